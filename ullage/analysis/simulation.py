"""Simulate a plan, or an engine policy in its place."""

import dataclasses

from planner.choices.request import Request
from planner.choices.variants import variants
from planner.costs.model import CostModel
from planner.decisions import Choice
from planner.plan.document import Plan
from planner.simulate.machine import Simulation
from ullage.analysis.iteration import Iteration
from ullage.rivals.settings import OURS, decided


def simulate(plan: Plan, num_iterations: int | None = None) -> Simulation:
    """Simulate a plan's schedule on the plan's hardware, for so many iterations, or until they repeat.

    The iteration to read is then the last complete one, or one of those that repeat.
    """
    return dataclasses.replace(planned(plan), num_iterations=num_iterations).simulation


def planned(plan: Plan, engine: str = OURS, setting: str | None = None) -> Iteration:
    """Return an iteration of a plan's own decisions, or of those of an engine for the plan's model, machine and batch.

    Args:
        plan: gives the model, the machine and the batch.
        engine: name of a policy, or ``ullage`` for the plan's own decisions.
        setting: see :func:`ullage.rivals.settings.decided`.

    Raises:
        ValueError: the policy or its setting does not exist.
    """
    decisions, own_units = plan.decisions, None
    if engine != OURS or setting is not None:
        tiles = {field: getattr(plan.constraints, field) for field in plan.decisions.tiles}
        asked = dataclasses.replace(chosen_request(plan), **tiles, split_masters=False)
        rivals = variants(asked)  # whole logits, and tiles of them
        decisions, own_units = decided(engine, setting, rivals)
    name, units = engine if setting is None else f"{engine} {setting}", own_units or plan.units(decisions)
    cost = CostModel.of(plan.hardware, units, decisions)
    return Iteration(name, plan.model, units, plan.seq_len, decisions, cost)


def chosen_request(plan: Plan) -> Request:
    """Return a plan's request with the parallel degrees and batch sizes that the plan chose, without storage."""
    chosen = Choice.of(plan.decisions).model_dump(exclude={"data_parallel"})
    chosen["collectives"] = chosen["collectives"] or "fabric"
    chosen["pipeline_order"] = chosen["pipeline_order"] or "1f1b"
    chosen["context_exchange"] = chosen["context_exchange"] or "all-to-all"
    return dataclasses.replace(plan.request, **chosen, global_batch=None, storage="never")
