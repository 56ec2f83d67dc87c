"""Simulating what a plan says, or what an engine policy would do in its place."""

from collections.abc import Callable, Iterator

from planner.costs import CostModel
from planner.decisions import Decisions
from planner.engines import POLICIES, Setup, interleaved, twin_flow
from planner.lowering import lower
from planner.plan import Plan
from planner.planning import Request, prepare
from planner.schedule import Schedule
from planner.search import Scorer
from planner.simulate.machine import Simulation, run, run_until_steady

OURS = "ullage"


def simulate(plan: Plan, num_iterations: int | None = None, decisions: Decisions | None = None) -> Simulation:
    """Simulate a plan's schedule on the hardware it was made for.

    Args:
        plan: what to simulate.
        num_iterations: how many iterations; ``None``: until they repeat.
        decisions: simulate these for the plan's model and machine instead (see :func:`engine_decisions`).

    Returns:
        The timeline and which of its iterations to read: with ``num_iterations`` the last complete one.
    """
    cost = cost_model(plan)
    schedule = plan.schedule() if decisions is None else schedule_of(plan, decisions)
    if num_iterations is None:
        return run_until_steady(schedule, cost)
    timeline = run(schedule, cost.prices(schedule), cost.capacities(), num_iterations)
    return Simulation(timeline, max(num_iterations - 2, 0), converged=False)


def cost_model(plan: Plan) -> CostModel:
    """Return the cost model that a plan was made with."""
    return CostModel(plan.hardware, plan.units(), plan.decisions.precision, plan.decisions.data_parallel)


def schedule_of(plan: Plan, decisions: Decisions) -> Schedule:
    """Return the schedule of other decisions for a plan's model and machine."""
    return lower(plan.units(), decisions, asynchronous=plan.hardware.device.kind == "gpu")


def engine_decisions(plan: Plan, engine: str, setting: str | None = None) -> Decisions:
    """Return what an engine policy decides for a plan's model, machine and batch.

    Args:
        plan: says what is trained, and where.
        engine: name of a policy, or ``ullage`` for the plan's own decisions.
        setting: what the policy leaves to its user: the fraction that the CPU updates (``twin-flow``) or the stride
            (``interleaved``). ``None``: the best that :mod:`planner.engines` tries.

    Raises:
        ValueError: no such policy, or not a setting of it.
    """
    if engine == OURS and setting is None:
        return plan.decisions
    if engine not in POLICIES:
        names = ", ".join((OURS, *POLICIES)) if engine != OURS else "twin-flow, interleaved"
        raise ValueError(f"no engine {engine!r} takes {'that setting' if setting else 'part'}; choose one of {names}")
    setup, workload, cost = prepare(_request(plan))
    policy = POLICIES[engine] if setting is None else _with_setting(engine, setting)
    scorer = Scorer(workload, cost)
    return min(map(scorer.score, policy(setup)), key=lambda candidate: candidate.order).decisions


def _request(plan: Plan) -> Request:
    """Return what a plan was asked for."""
    decided = plan.decisions
    return Request(
        model=plan.model,
        hardware=plan.hardware,
        num_devices=decided.data_parallel,
        seq_len=plan.seq_len,
        micro_batch=decided.micro_batch,
        num_micro_batches=decided.num_micro_batches,
        precision=decided.precision,
        clip=decided.clip,
        subgroup_params=decided.subgroup_params,
    )


def _with_setting(engine: str, setting: str) -> Callable[[Setup], Iterator[Decisions]]:
    if engine == "twin-flow":
        try:
            fraction = float(setting)
        except ValueError:
            fraction = -1.0
        if not 0 <= fraction <= 1:
            raise ValueError(f"twin-flow {setting}: the fraction that the CPU updates must lie between 0 and 1")
        return lambda setup: twin_flow(setup, (fraction,))
    if engine == "interleaved":
        if not setting.isdecimal() or int(setting) < 1:
            raise ValueError(f"interleaved {setting}: the stride must be a whole number from 1 on")
        return lambda setup: interleaved(setup, (int(setting),))
    raise ValueError(f"{engine} {setting}: this engine has no setting; leave it out")
