"""Checks that a plan, an optimizer and a saved state can be executed. Errors name the reason."""

import contextlib
import math
from collections.abc import Mapping
from typing import Any

import torch

from executor.optimizer.blocks import SCALES
from executor.optimizer.passes import BLOCK
from executor.optimizer.reference import ROUNDS, rounds
from executor.optimizer.table import ENTRIES, OptimizerEntry
from planner.decisions import Decisions, Place
from planner.graph import Unit
from planner.optimizers import ELEMENTWISE, is_hidden_matrix


def check_decisions(decisions: Decisions, entry: OptimizerEntry, groups: list[dict[str, Any]]) -> None:
    """Check that decisions can be executed with an optimizer and its groups.

    Raises:
        ValueError: they cannot; the error states the reason and the remedy.
    """
    if decisions.optimizer != entry.planned_as:
        raise ValueError(
            f"the plan is for {decisions.optimizer}, but the optimizer is {entry.torch_class.__name__}, with other "
            "state; "
            + (
                "give ullage.prepare() a batch in place of the plan, so that it plans for this optimizer"
                if entry.planned_as in ELEMENTWISE
                else f"plan with --optimizer {entry.planned_as}"
            )
        )
    if entry.whole:
        if decisions.divides_weights:
            raise ValueError(
                f"{entry.torch_class.__name__} steps on whole weights ({entry.whole}), but tensor- or expert-parallel "
                "ranks hold parts of them; plan without these, or use an optimizer that updates each value by itself"
            )
        if decisions.update_start == "backward":
            raise ValueError(
                f"{entry.torch_class.__name__} steps on all gradients ({entry.whole}), but the plan updates in "
                "backward; plan with clip=True"
            )
    if decisions.speculate and entry.back is None:
        raise ValueError(
            f"the plan may take updates back (speculate), which those of {entry.torch_class.__name__} cannot be; use "
            "torch.optim.AdamW or Adam, or plan without speculate"
        )
    if not decisions.precision.can_be_kept(decisions.optimizer):
        types = ", ".join(f"{name} in {dtype}" for name, dtype in decisions.precision if dtype is not None)
        raise ValueError(
            f"the plan has {types}, which can be simulated but not executed with {decisions.optimizer}; plan with "
            "--precision bf16 or fp32"
        )
    in_bf16, planned = decisions.precision.weights == "bf16", decisions.precision.master == "bf16"
    if in_bf16 and any(rounds(group) is not planned for group in groups):
        raise ValueError(
            f"the plan's master copy is {'bf16' if planned else 'fp32'}, but {ROUNDS} is {not planned} in a group of "
            f"the optimizer; make {entry.torch_class.__name__} with {ROUNDS}={planned}, or plan "
            f"{'without' if planned else 'with'} --precision master=bf16"
        )


def check_units(decisions: Decisions, units: tuple[Unit, ...]) -> None:
    """Check that units can be executed as they were planned.

    Raises:
        ValueError: a unit is not on the device, but was planned as if its experts got no tokens, or stays there.
    """
    for unit in units:
        elsewhere = unit.num_weights and (decisions.units[unit.name].fetched or decisions.gathers(unit))
        if elsewhere and unit.stays:
            raise ValueError(
                f"{unit.name} is planned to move, but gradients of gradients need its weights on the device; set its "
                "params to 'gpu' and zero_stage to at most 2, or plan again"
            )
        if unit.writes and not (
            decisions.precision.weights == "fp32"
            and decisions.num_devices == 1
            and decisions.units[unit.name].params == "gpu"
            and {*decisions.units[unit.name].update} <= {Place.GPU}
        ):
            raise ValueError(
                f"forward writes to weights of {unit.name} (as nn.Embedding does with max_norm), which needs fp32, one "
                "device, and the unit and its updates on it; plan so, or let forward compute with a changed copy"
            )
        if elsewhere and not (unit.forward or unit.is_unused):
            raise ValueError(
                f"{unit.name} was planned for experts that no token reaches, so the plan never moves it to the "
                "device; plan without --expert-load, or with a load that reaches all experts"
            )


def check_groups(
    entry: OptimizerEntry, groups: list[dict[str, Any]], names: Mapping[int, str], *, is_alone: bool
) -> None:
    """Check that an optimizer's groups can be updated; ``names`` maps ``id(parameter)`` to its name in the model.

    Raises:
        ValueError: our updates do not support a flag, or no parameter is one of the model, or some are not and there
            are several ranks, which would not add up their gradients.
    """
    given = [id(parameter) for group in groups for parameter in group["params"]]
    if given and not names.keys() & given:
        raise ValueError(
            "the optimizer has no parameter that is one of the model; make it from model.parameters() of this model"
        )
    trained = {id(parameter) for group in groups for parameter in group["params"] if parameter.requires_grad}
    if not is_alone and not names.keys() >= trained:
        raise ValueError(
            "the optimizer has a parameter that is not one of the model, whose gradients ranks would not add up; train "
            "it with an optimizer of its own, or prepare one module that holds all, with step="
        )
    for group in groups:
        entry.rule(group)  # raises for flags that kernels do not support
        if entry.others is not None:
            _check_kinds(group, names)


def _check_kinds(group: dict[str, Any], names: Mapping[int, str]) -> None:
    """Check that groups of Muon hold exactly the hidden matrices, as planned."""
    for parameter in group["params"]:
        name, shape = names.get(id(parameter), ""), tuple(parameter.shape)
        if is_hidden_matrix(name, shape) is not bool(group["use_muon"]):
            planned, given = ("AdamW", "Muon") if group["use_muon"] else ("Muon", "AdamW")
            raise ValueError(
                f"{name} with shape {shape} is in a group of {given}, but the plan updates it with {planned}; pass "
                "model.named_parameters() to ullage.Muon, or move it to another group"
            )


def check_saved_group(entry: OptimizerEntry, index: int, own: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Check that a saved group has all numbers that an optimizer's group needs.

    Raises:
        ValueError: a number is missing or has another type, or the group is another optimizer's.
    """
    class_name = entry.torch_class.__name__
    try:
        kept = {key: own[key] for key in ("seed",) if key in own}  # optimizers that are converted from lack it
        entry.rule(kept | {**saved})
    except KeyError as missing:
        raise ValueError(
            f"group {index} of the state has no {missing.args[0]}, which {class_name} needs; the state is of another "
            "optimizer: make the optimizer that was saved"
        ) from None
    except TypeError as error:
        raise ValueError(f"group {index} of the state has a number of another type: {error}") from error
    if "seed" in saved and not entry.converts:
        raise ValueError(
            f"group {index} of the state has a seed: it is of AdamWBf16 or AdamW8bit, but the optimizer is "
            f"{class_name}; make the optimizer that was saved"
        )
    for flag, wanted in (
        ("decoupled_weight_decay", own.get("decoupled_weight_decay", entry.torch_class is not torch.optim.Adam)),
        ("use_muon", own.get("use_muon")),
    ):
        if flag in saved and wanted is not None and bool(saved[flag]) is not wanted:
            raise ValueError(
                f"group {index} of the state has {flag}={saved[flag]}, but {class_name} has {wanted} there; the state "
                "is of another optimizer: make the optimizer that was saved"
            )


def check_saved_state(own: OptimizerEntry, name: str, shape: torch.Size, saved: Mapping[str, Any]) -> None:
    """Check that a parameter's saved state is one of its optimizer, whole, and in its shape.

    Args:
        own: the optimizer of the parameter.
        name: of the parameter.
        shape: of the parameter.
        saved: its saved state. Empty, or without values: it has taken no step.

    Raises:
        ValueError: it is not.
    """
    values = {key: value for key, value in saved.items() if value is not None and key != "master"}
    if not values and "master" not in saved:
        return
    wanted = _saved_keys(own, values)
    if values and values.keys() != wanted:
        if other := next((e.torch_class.__name__ for e in ENTRIES if values.keys() == _saved_keys(e, values)), ""):
            raise ValueError(
                f"the state of {name} has {_listed(values)}: it is of {other}, but the optimizer is "
                f"{own.torch_class.__name__}, whose state has {_listed(wanted)}; make the optimizer that was saved"
            )
        wrong = min(wanted ^ values.keys())
        raise ValueError(
            f"the state of {name} has {'no' if wrong in wanted else 'a'} {wrong}, but that of "
            f"{own.torch_class.__name__} has {_listed(wanted)}; load a whole state of this optimizer"
        )
    for key, value in saved.items():
        if value is not None and key not in own.numbers:
            _check_value(name, key, value, shape, is_code=SCALES.get(key) in saved)


def _saved_keys(entry: OptimizerEntry, saved: Mapping[str, Any]) -> set[str]:
    """Return the keys of a state, which has scales of its moments if ``saved`` has any."""
    keys = {key for key in entry.buffers if key not in SCALES.values()} | {*entry.numbers}
    keys |= {"step"} if entry.counts_steps else set()
    with_scales = any(key in saved for key in SCALES.values())
    return keys | {SCALES[key] for key in keys & SCALES.keys() if with_scales and entry.converts}


def _listed(keys: Any) -> str:
    return ", ".join(sorted(keys))


def _check_value(name: str, key: str, value: Any, shape: torch.Size, *, is_code: bool) -> None:
    if key == "step":
        step = math.nan
        with contextlib.suppress(TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor of several values
            step = float(value)
        if not (step >= 0 and step.is_integer()):
            raise ValueError(f"the step of {name} in the state is {value}, but must be a whole number of at least 0")
        return
    shapes = [tuple(shape), *([(-(-shape.numel() // BLOCK),)] if key in SCALES.values() else [])]
    found = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
    if found not in shapes:
        raise ValueError(
            f"{key} of {name} has shape {found} in the state, but {shapes[-1]} is needed; load a state of this model"
        )
    kind = "on the meta device, without values" if value.is_meta else str(value.dtype).removeprefix("torch.")
    if value.is_meta or value.layout is not torch.strided or not (value.is_floating_point() or is_code):
        raise ValueError(f"{key} of {name} is {kind} in the state, but must be a dense floating-point tensor")
