"""Descents: move one count of a mix at a time, then fill the memory that it frees or relieve the memory it overruns."""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from planner.placements import mixed
from planner.schedule.tasks import Lane, Tier
from planner.search.scoring import ENDLESS, Candidate, Key, Scorer
from planner.setup import Mix, Setup, pieces
from planner.simulate.prediction import capacities

# The fraction of memory to fill.
FULL = 0.995
# The most host buffers for state from NVMe.
_MOST_NVME_SLOTS = 6
_BALANCE = "balance"  # a move that changes two counts
# First steps of a descent, as fractions of the whole range of a count.
SMALL_STEP, LARGE_STEP = 1 / 32, 1 / 2


def descend(
    setup: Setup,
    scorer: Scorer,
    start: Mix,
    key: Key,
    max_simulations: int,
    report: Callable[[Candidate], None] = lambda _: None,
    first_step: float = LARGE_STEP,
    patience: int = ENDLESS,
) -> tuple[Mix, Candidate]:
    """Minimise ``key`` by pattern search: move one count at a time, by a step that halves when no move helps.

    The first step is the fraction ``first_step`` of a count's range. The descent also ends after ``patience``
    simulations in a row without a gain.
    """
    limits = limits_of(setup, start)
    mix, best = start, scorer.score(mixed(setup, start))
    steps = {
        name: 1 if name.endswith("slots") else max(int(limit * first_step), 1)
        for name, limit in limits.items()
        if limit
    }
    helped_at = scorer.num_simulations
    while True:
        moved = False
        for name in (_BALANCE, *steps):
            for trial in _moves(mix, best, name, steps.get(name, 0), limits):
                candidate = scorer.score(mixed(setup, trial))
                if not best.missing_bytes and candidate.missing_bytes:
                    trial, candidate = repaired(setup, scorer, trial, candidate, name)  # noqa: PLW2901
                elif not key(candidate) < key(best) and name != "num_gpu":
                    trial, candidate = filled(setup, scorer, trial, candidate)  # noqa: PLW2901
                if key(candidate) < key(best):
                    mix, best, moved = trial, candidate, True
                    helped_at = scorer.num_simulations
                    report(best)
                    break
                if scorer.spent(min(max_simulations, helped_at + patience)) and not best.missing_bytes:
                    return mix, best
        if not moved:
            if all(step == 1 for step in steps.values()):
                return mix, best
            steps = {name: max(step // 2, 1) for name, step in steps.items()}


def limits_of(setup: Setup, start: Mix) -> dict[str, int]:
    """Return the largest number of each count of a mix, 0 if it cannot change."""
    return {
        "num_gpu": sum(setup.movable.values()),
        "num_stream": sum(setup.movable.values()),
        "num_keep": len(setup.swappable),
        "num_host": len(setup.units) if start.zero_stage in {0, 3} or setup.given.expert_parallel > 1 else 0,
        "spread": 1,
        "num_slots": max(4, 2 * max_equal_units(setup)),
        "num_state_slots": 4,
        "num_gradient_slots": max(4, 2 * max_equal_units(setup)),
        "num_stay": len(setup.units),
        **_storage_limits(setup, start),
    }


def max_equal_units(setup: Setup) -> int:
    """Return the largest number of units of one size in a segment.

    With that many slots, recomputation leaves all of them for backward. With twice as many, the next segment's can be
    fetched meanwhile.
    """
    sizes = Counter((unit.segment, unit.size_name) for unit in setup.units if unit.num_weights)
    return max(sizes.values())


def _storage_limits(setup: Setup, start: Mix) -> dict[str, int]:
    """Return the largest counts of subgroups, units and segments on storage, by the name of the count."""
    found: dict[str, int] = {}
    if setup.storage != "never":
        found["num_offload"] = len(setup.swappable)
    if setup.storage == "nvme":
        found["num_evict"] = len(setup.swappable)
        found["num_nvme"] = sum(len(pieces(setup, unit)) for unit in setup.units)
        found["num_on_nvme"] = len(setup.units) if start.zero_stage in {0, 3} or setup.given.expert_parallel > 1 else 0
        found["num_nvme_slots"] = _MOST_NVME_SLOTS
        found["spill"] = int(setup.given.num_micro_batches == 1)
    return found


def _moves(mix: Mix, found: Candidate, name: str, step: int, limits: Mapping[str, int]) -> Iterator[Mix]:
    """Yield the mixes that one kind of move can reach."""
    if name == _BALANCE:
        yield from (other for other in [_balanced(mix, found, limits["num_gpu"])] if other != mix)
        return
    for delta in (step, -step):
        value = min(max(getattr(mix, name) + delta, int(name.endswith("_slots"))), limits[name])
        moved = dataclasses.replace(mix, **{name: value})
        yield dataclasses.replace(moved, num_stream=min(moved.num_stream, limits["num_gpu"] - moved.num_gpu))


def repaired(setup: Setup, scorer: Scorer, trial: Mix, found: Candidate, moved: str = "") -> tuple[Mix, Candidate]:
    """Move resident subgroups off the device until the mix fits, or relieve the host.

    The host is relieved by moving state to NVMe, or by streaming more, because gradients of streamed subgroups stay on
    the device. The count that was just moved stays.
    """
    sizes = [num_params for unit in setup.units for num_params in pieces(setup, unit)]
    # On average: of all stages of a pipeline, one has the subgroup.
    state_bytes = found.decisions.state_bytes_per_param * sum(sizes) / len(sizes) * scorer.cost.ranks_per_node
    state_bytes /= setup.given.pipeline_parallel
    if set(found.missing_bytes) == {Tier.GPU} and moved != "num_gpu":
        lacking = math.ceil(found.missing_bytes[Tier.GPU] * scorer.cost.ranks_per_node / state_bytes)
        trial = dataclasses.replace(trial, num_gpu=max(trial.num_gpu - lacking, 0))
    elif set(found.missing_bytes) == {Tier.HOST} and moved != "num_nvme" and setup.storage == "nvme":
        lacking = math.ceil(found.missing_bytes[Tier.HOST] / state_bytes)
        trial = dataclasses.replace(trial, num_nvme=trial.num_nvme + lacking)
    elif set(found.missing_bytes) == {Tier.HOST} and moved not in {"num_stream", "num_stay"}:
        gradient_bytes = state_bytes * setup.given.precision.weight_bytes / found.decisions.state_bytes_per_param
        more = math.ceil(found.missing_bytes[Tier.HOST] / gradient_bytes)
        trial = dataclasses.replace(trial, num_stream=trial.num_stream + more, num_stay=trial.num_stay + more)
    else:
        return trial, found
    return trial, scorer.score(mixed(setup, trial))


def filled(setup: Setup, scorer: Scorer, trial: Mix, found: Candidate) -> tuple[Mix, Candidate]:
    """Fill the free memory of the device with resident subgroups."""
    # Gradients stay there too.
    bytes_per_param = found.decisions.state_bytes_per_param + setup.given.precision.weight_bytes
    sizes = [num_params for unit in setup.units for num_params in pieces(setup, unit)]
    room_bytes = (FULL - found.filled[Tier.GPU]) * capacities(scorer.cost)[Tier.GPU] * setup.given.pipeline_parallel
    more = math.floor(room_bytes * len(sizes) / sum(sizes) / bytes_per_param)
    num_gpu = min(trial.num_gpu + more, sum(setup.movable.values()) - trial.num_nvme)
    if found.missing_bytes or num_gpu <= trial.num_gpu:
        return trial, found
    trial = dataclasses.replace(trial, num_gpu=num_gpu)
    return trial, scorer.score(mixed(setup, trial))


def _balanced(mix: Mix, found: Candidate, num_subgroups: int) -> Mix:
    """Return the mix in which CPU updates and streamed updates would end at the same time, at their measured rates."""
    on_cpu = num_subgroups - mix.num_gpu - mix.num_stream
    cpu_s = found.busy_s.get(Lane.CPU, 0.0)
    stream_s = max((found.busy_s.get(lane, 0.0) for lane in (Lane.STATE_IN, Lane.STATE_OUT)), default=0.0)
    if not (on_cpu and mix.num_stream and cpu_s and stream_s):
        return mix
    moved = round((cpu_s - stream_s) / (cpu_s / on_cpu + stream_s / mix.num_stream))
    return dataclasses.replace(mix, num_stream=mix.num_stream + moved)
