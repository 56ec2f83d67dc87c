"""Rows of other checkpoint engines beside the checkpoints of a plan."""

import dataclasses
import functools
from collections.abc import Iterator

from planner.checkpoints.choosing import NOT_WORTH_IT, choose_checkpoints
from planner.checkpoints.interval import Protection, nest
from planner.checkpoints.lowering import coarse
from planner.checkpoints.trial import Trial
from planner.plan.checkpoints import CheckpointPlan, CheckpointRequest, EngineCheckpoints
from planner.plan.document import Plan
from planner.schedule.tasks import Tier
from planner.terms import LEVELS, Level
from ullage.rivals.checkpoints.costs import EngineCosts
from ullage.rivals.checkpoints.lowering import EngineSaver
from ullage.rivals.checkpoints.policy import POLICIES, CheckpointPolicy


def protected(plan: Plan, request: CheckpointRequest) -> Plan:
    """Return a plan with its checkpoints, and a row for each other engine.

    Raises:
        CheckpointsError: see :func:`planner.checkpoints.choosing.choose_checkpoints`.
    """
    trial = Trial(plan)
    made = choose_checkpoints(plan, request, trial)
    beside = {"engines": tuple(engine_rows(made, trial))}
    return plan.model_copy(update={"checkpoints": made.model_copy(update=beside)}).sealed()


def engine_rows(made: CheckpointPlan, trial: Trial) -> Iterator[EngineCheckpoints]:
    """Yield each other engine at its best interval, on its best level."""
    for name, policy in POLICIES.items():
        yield _row(name, policy, made, trial)


def _row(name: str, policy: CheckpointPolicy, made: CheckpointPlan, trial: Trial) -> EngineCheckpoints:
    request = made.request
    unusable = {level: why for level, why in made.left_out.items() if why != NOT_WORTH_IT}
    slowest = max(LEVELS.index(kind) for kind in request.mtbf_s)
    found: list[EngineCheckpoints] = []
    reasons = [f"nothing survives ({why})" for why in unusable.values()]
    for level in LEVELS[max(slowest, 1) :]:
        if level in unusable:
            continue
        try:
            measured = saved_by(trial, policy, level)
        except ValueError as error:
            reasons.insert(0, str(error))
            continue
        restart_s = request.restart_s + trial.restored_s(level)
        least_s = measured.latency_s - measured.cost_s
        rate = request.failures_per_s
        protection = Protection(measured.cost_s, measured.latency_s, restart_s, rate, least_s=least_s)
        nested = nest([protection], made.iteration_s)
        found.append(
            EngineCheckpoints(
                name=name,
                level=level,
                every=nested.every[0],
                cost_s=measured.cost_s,
                latency_s=measured.latency_s,
                waste=nested.waste,
            )
        )
    if not found:
        return EngineCheckpoints(name=name, why_not=reasons[0] if reasons else "it only writes to drives")
    return min(found, key=lambda each: (each.waste, each.name))


def saved_by(trial: Trial, policy: CheckpointPolicy, level: Level) -> Protection:
    """Return cost and latency of one checkpoint of another engine, which may use all free host memory.

    Raises:
        ValueError: the profile lacks the level, or something that the engine needs.
    """
    if policy.device_only and any(shard.tier is not Tier.GPU for shard in trial.state):
        raise ValueError("its code refuses state that is not on the device")
    chunk_bytes, buffer_bytes = coarse(policy.chunk_bytes, trial.state, _left_bytes(trial, policy))
    coarser = dataclasses.replace(policy, chunk_bytes=chunk_bytes)
    make = functools.partial(EngineSaver, coarser, buffer_bytes=buffer_bytes)
    return trial.alone(make, EngineCosts(policy, trial.cost, level), policy.num_writers)


def _left_bytes(trial: Trial, policy: CheckpointPolicy) -> int:
    """Return the free host memory of one rank that an engine can use, in bytes.

    Raises:
        ValueError: there is too little.
    """
    ranks = trial.cost.ranks_per_node
    free_bytes = max(trial.free_bytes(Tier.HOST), 0) // ranks
    needed_bytes = trial.shard_bytes if policy.writes_after_staging else 0
    if policy.bounded:  # two chunks, so that one is copied while the other is written
        needed_bytes = 2 * min(policy.chunk_bytes, max((shard.num_bytes for shard in trial.state), default=0))
    if needed_bytes > free_bytes:
        raise ValueError(
            f"needs {needed_bytes * ranks / 1e9:.3g} GB more of the host, which has {free_bytes * ranks / 1e9:.3g} GB "
            "left"
        )
    return max(min(free_bytes, trial.shard_bytes), 1)
