"""Checks that a plan and an optimizer can be executed. Errors name the reason."""

from collections.abc import Mapping
from typing import Any

from executor.optimizer.reference import ROUNDS, rounds
from executor.optimizer.table import OptimizerEntry
from planner.decisions import Decisions
from planner.graph import Unit
from planner.optimizers import is_hidden_matrix


def check_decisions(decisions: Decisions, entry: OptimizerEntry, groups: list[dict[str, Any]]) -> None:
    """Check that decisions can be executed with an optimizer and its groups.

    Raises:
        ValueError: they cannot; the error states the reason and the remedy.
    """
    if decisions.optimizer != entry.planned_as:
        raise ValueError(
            f"the plan is for {decisions.optimizer}, but the optimizer is {entry.torch_class.__name__}, with other "
            f"state; plan with --optimizer {entry.planned_as}"
        )
    if (stages := decisions.pipeline_parallel) > 1:
        raise ValueError(
            f"pipeline_parallel is {stages}, which can be simulated but not executed; plan with --pipeline-parallel 1"
        )
    if decisions.reduce_start != "backward":
        raise ValueError(
            f"reduce_start is {decisions.reduce_start!r}, which can be simulated but not executed; set it to 'backward'"
        )
    if not decisions.executable:
        raise ValueError(
            f"policy {decisions.policy} models another engine, which can be simulated but not executed: plan again, or "
            "set gradient_path to 'once', host_update to 'fused' and pinned_reads to true, and leave out module_hooks, "
            "loop, device_buffer_bytes, max_prefetch_params and max_reuse_params"
        )
    in_bf16, planned = decisions.precision.weights == "bf16", decisions.precision.master == "bf16"
    if in_bf16 and any(rounds(group) is not planned for group in groups):
        raise ValueError(
            f"the plan's master copy is {'bf16' if planned else 'fp32'}, but {ROUNDS} is {not planned} in a group of "
            f"the optimizer; make {entry.torch_class.__name__} with {ROUNDS}={planned}, or plan "
            f"{'without' if planned else 'with'} --master bf16"
        )


def check_units(decisions: Decisions, units: tuple[Unit, ...]) -> None:
    """Check that units can be executed as they were planned.

    Raises:
        ValueError: a unit is not on the device, but was planned as if its experts got no tokens.
    """
    for unit in units:
        elsewhere = unit.num_weights and (decisions.units[unit.name].fetched or decisions.gathers(unit))
        if elsewhere and not unit.forward:
            raise ValueError(
                f"{unit.name} was planned for experts that no token reaches, so the plan never moves it to the "
                "device; plan without --expert-load, or with a load that reaches all experts"
            )


def check_groups(entry: OptimizerEntry, groups: list[dict[str, Any]], names: Mapping[int, str]) -> None:
    """Check that our kernels can update an optimizer's groups; ``names`` maps ``id(parameter)`` to its name.

    Raises:
        ValueError: our updates do not support a flag, or a parameter belongs to another model.
    """
    for group in groups:
        entry.rule(group)  # raises for flags that kernels do not support
        if any(id(parameter) not in names for parameter in group["params"]):
            raise ValueError(
                "the optimizer has a parameter that is not one of the model; make it from model.parameters()"
            )
        if entry.others is not None:
            _check_kinds(group, names)


def _check_kinds(group: dict[str, Any], names: Mapping[int, str]) -> None:
    """Check that groups of Muon hold exactly the hidden matrices, as planned."""
    for parameter in group["params"]:
        name, shape = names[id(parameter)], tuple(parameter.shape)
        if is_hidden_matrix(name, shape) is not bool(group["use_muon"]):
            planned, given = ("AdamW", "Muon") if group["use_muon"] else ("Muon", "AdamW")
            raise ValueError(
                f"{name} with shape {shape} is in a group of {given}, but the plan updates it with {planned}; pass "
                "model.named_parameters() to ullage.Muon, or move it to another group"
            )
