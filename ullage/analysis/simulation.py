"""Simulate a plan, or an engine policy in its place."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from planner.choices.request import Request
from planner.choices.variants import variants
from planner.costs.model import CostModel
from planner.decisions import Choice, Decisions
from planner.optimizers import OPTIMIZERS
from planner.plan.document import Plan
from planner.search import Candidate, Scorer, best_of
from planner.setup import Setup
from planner.simulate.machine import Simulation
from ullage.analysis.iteration import Iteration
from ullage.rivals.best import best_of_engine, scorer_of
from ullage.rivals.engines.catalogue import POLICIES, STORAGE_POLICIES, can_run, policies_of
from ullage.rivals.engines.deepspeed import super_offload, twin_flow
from ullage.rivals.engines.interleaved import interleaved
from ullage.rivals.engines.zenflow import zen_flow

OURS = "ullage"
ENGINES = POLICIES | STORAGE_POLICIES
_BY_COUNT: Final[Mapping[str, tuple[Callable[[Setup, tuple[int, ...]], Iterator[Decisions]], str]]] = {
    "zenflow": (zen_flow, "update interval"),
    "interleaved": (interleaved, "stride"),
}
"""Engines whose setting is a number, and what that is."""


def simulate(plan: Plan, num_iterations: int | None = None, decisions: Decisions | None = None) -> Simulation:
    """Simulate a plan's schedule on the plan's hardware.

    Args:
        plan: the plan to simulate.
        num_iterations: number of iterations; ``None``: until they repeat.
        decisions: other decisions to simulate for the plan's model and machine (see :func:`planned`).

    Returns:
        The timeline and the iteration to read. With ``num_iterations`` it is the last complete one.
    """
    seen = _of_plan(plan, OURS, plan.decisions if decisions is None else decisions)
    return dataclasses.replace(seen, num_iterations=num_iterations).simulation


def planned(plan: Plan, engine: str = OURS, setting: str | None = None) -> Iteration:
    """Return an iteration of a plan's own decisions, or of those of an engine for the plan's model, machine and batch.

    Args:
        plan: gives the model, the machine and the batch.
        engine: name of a policy (of :data:`ENGINES`), or ``ullage`` for the plan's own decisions.
        setting: the option that the policy leaves to its user: the fraction that the CPU updates (``twin-flow``,
            ``super-offload``), the stride (``interleaved``) or the steps between updates on the host (``zenflow``).
            ``None``: the best setting that the policy tries.

    Raises:
        ValueError: the policy or its setting does not exist.
    """
    decisions = plan.decisions
    if engine != OURS or setting is not None:
        tiles = {field: getattr(plan.constraints, field) for field in plan.decisions.tiles}
        rivals = variants(dataclasses.replace(chosen_request(plan), **tiles))  # whole logits, and tiles of them
        decisions = best_of(_best(engine, setting, rival.setup, scorer_of(rival)) for rival in rivals).decisions
    return _of_plan(plan, _name(engine, setting), decisions)


def _best(engine: str, setting: str | None, setup: Setup, scorer: Scorer) -> Candidate:
    if engine not in ENGINES:
        names = ", ".join((OURS, *ENGINES)) if engine != OURS else "twin-flow, super-offload, interleaved, zenflow"
        raise ValueError(f"no engine {engine!r} takes {'that setting' if setting else 'part'}; choose one of {names}")
    state = OPTIMIZERS[setup.given.optimizer]
    if state.others and engine not in (known := policies_of(setup.given.optimizer)):
        raise ValueError(f"engine {engine} is not simulated with {state.words}; choose {' or '.join((OURS, *known))}")
    if not can_run(engine, setup, len(scorer.cost.layout.nodes())):
        raise ValueError(
            f"--engine {engine} cannot run this request: megatrain and streaming need one device, roundpipe needs one "
            "node without other parallelism, and zenflow, megatrain and streaming need adamw; choose another engine"
        )
    if engine == "streaming" and setting is None:
        return best_of_engine(setup, scorer, engine)
    policy = ENGINES[engine] if setting is None else _with_setting(engine, setting)
    return best_of(map(scorer.score, policy(setup)))


def _name(engine: str, setting: str | None) -> str:
    return engine if setting is None else f"{engine} {setting}"


def _of_plan(plan: Plan, engine: str, decisions: Decisions) -> Iteration:
    units = plan.units(decisions)
    cost = CostModel.of(plan.hardware, units, decisions)
    return Iteration(engine, plan.model, plan.hardware, units, plan.seq_len, decisions, cost)


def chosen_request(plan: Plan) -> Request:
    """Return a plan's request with the parallel degrees and batch sizes that the plan chose, without storage."""
    chosen = Choice.of(plan.decisions).model_dump(exclude={"data_parallel"})
    chosen["collectives"] = chosen["collectives"] or "fabric"
    chosen["pipeline_order"] = chosen["pipeline_order"] or "1f1b"
    chosen["context_exchange"] = chosen["context_exchange"] or "all-to-all"
    return dataclasses.replace(plan.request, **chosen, global_batch=None, storage="never")


def _with_setting(engine: str, setting: str) -> Callable[[Setup], Iterator[Decisions]]:
    if by_fraction := {"twin-flow": twin_flow, "super-offload": super_offload}.get(engine):
        try:
            fraction = float(setting)
        except ValueError:
            fraction = -1.0
        if not 0 <= fraction <= 1:
            raise ValueError(f"{engine} {setting}: the fraction that the CPU updates must be between 0 and 1")
        return lambda setup: by_fraction(setup, (fraction,))
    if engine not in _BY_COUNT:
        raise ValueError(f"{engine} {setting}: this engine has no setting; leave it out")
    policy, what = _BY_COUNT[engine]
    if not setting.isdecimal() or int(setting) < 1:
        raise ValueError(f"{engine} {setting}: the {what} must be a whole number of at least 1")
    return lambda setup: policy(setup, (int(setting),))
