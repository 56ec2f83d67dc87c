"""Where the search starts: mixtures that are best under the necessary conditions, rounded until they fill memory."""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from planner.bounds.conditions import conditions
from planner.bounds.program import Boxes
from planner.bounds.solver import Solver
from planner.choices.space import NEVER_S, RING, ROOM, Space
from planner.decisions import Decisions, Place
from planner.engines.policies import mixed
from planner.engines.setup import Mix, Setup, pieces
from planner.schedule.tasks import Tier
from planner.search.descent import FULL, LARGE_STEP, SMALL_STEP, most_alike, repaired
from planner.search.scoring import Candidate, Scorer, best_of

# Mixtures that are tried until one fills memory, as near as that.
_NUM_FITS, _FITTED = 4, 4e-3
# Slots of parameters, of streamed state and of gradients that are tried with them.
_SLOTS = ((2, 2, 2), (2, 3, 2), (3, 3, 2))
# Those that are tried if nothing fits with others.
_FEWEST_SLOTS = ((2, 1, 1), (1, 1, 1))
# Gradients wait on NVMe if they do so in a mixture for this share of all units.
_SPILLING = 0.1


@dataclasses.dataclass(frozen=True)
class Start:
    """Where a descent starts, how large its first steps are, and how fast anything of its ZeRO stage can be at best."""

    mix: Mix
    first_step: float
    bound_s: float


def starting_points(setup: Setup, scorer: Scorer, enough_s: float) -> tuple[list[Start], float]:
    """Return where descents start, the most promising first, and how fast anything can be at best.

    Nothing is simulated of a ZeRO stage that can be no faster than ``enough_s``.

    Every ZeRO stage is started from the mixture that is best under the necessary conditions, in small steps, and from
    everything on the CPU and recomputed, which needs the least device memory, in large ones.
    """
    starts: list[Start] = []
    bounds_s: list[float] = []
    together = most_alike(setup)
    slots = (*_SLOTS, *([(together, 3, together), (2 * together, 3, together)] if together > _SLOTS[-1][0] else []))
    for stage in (2, 3) if setup.data_parallel > 1 else (0,):
        space = _space(setup, stage)
        mixes, bound_s = _relaxed(setup, scorer, space, stage, slots, enough_s)
        bounds_s.append(bound_s)
        starts += [Start(mix, SMALL_STEP, bound_s) for mix in mixes]
        if setup.storage == "never":
            starts.append(Start(Mix(num_gpu=0, num_stream=0, num_keep=0, zero_stage=stage), LARGE_STEP, bound_s))
    # Parameters too may have to live on the host (their shards, if there are several ranks), or everything on NVMe.
    starts.append(Start(_lowest(setup), LARGE_STEP, bounds_s[-1]))
    starts.sort(key=lambda start: (start.first_step, start.bound_s))
    return starts, min(bounds_s)


def first_look(setup: Setup, scorer: Scorer) -> Candidate:
    """Return the best of a few mixtures: near to what a search will find, for a small part of its time."""
    found = [scorer.score(mixed(setup, _lowest(setup)))]
    for stage in (2, 3) if setup.data_parallel > 1 else (0,):
        mixes, _ = _relaxed(setup, scorer, _space(setup, stage), stage, _SLOTS[:1])
        found += [scorer.score(mixed(setup, mix)) for mix in mixes]
    return best_of(found)


def smallest(setup: Setup) -> Iterator[Decisions]:
    """Yield the decisions that need least memory: everything as far out as may be, in more and in fewer slots."""
    lowest = _lowest(setup)
    for slots in (_SLOTS[0], *_FEWEST_SLOTS):
        named = zip(("num_slots", "num_state_slots", "num_gradient_slots"), slots, strict=True)
        yield mixed(setup, dataclasses.replace(lowest, **dict(named)))


def _space(setup: Setup, stage: int) -> Space:
    return Space.of(setup.units, mixed(setup, Mix(0, 0, 0, zero_stage=stage)), storage=setup.storage)


def _lowest(setup: Setup) -> Mix:
    """Return the mix that needs the least memory on the device, and on the host if NVMe may be used."""
    stage, count = 3 if setup.data_parallel > 1 else 0, len(setup.units)
    on_nvme = sum(len(pieces(setup, unit)) for unit in setup.units) if setup.storage == "nvme" else 0
    return Mix(0, 0, 0, num_host=count, zero_stage=stage, num_nvme=on_nvme, num_on_nvme=count if on_nvme else 0)


def _relaxed(
    setup: Setup,
    scorer: Scorer,
    space: Space,
    stage: int,
    slots: Sequence[tuple[int, int, int]],
    enough_s: float = NEVER_S,
) -> tuple[list[Mix], float]:
    """Return mixes near to the best mixture of decisions that fits, the best first, and how fast anything can be.

    There is no mix if nothing fits, or can be better than ``enough_s``; one, or with storage one for each idea of it.

    The conditions know nothing of slots and of what is held for a moment only. So a mixture is simulated, and by as
    much as it overruns a memory, or leaves it empty, the next one is allowed less of it, or more.
    """
    solver = Solver(conditions(space, scorer.cost, NEVER_S))
    if (relaxed := solver.solve()) is None:
        return [], math.inf
    if relaxed.value >= enough_s:
        return [], relaxed.value
    # Of what may be on storage, mixtures tend to take a little of everything, so that some is left out too.
    without = [(":spill", ":evict"), (":offload", ":evict")] if setup.storage == "nvme" else [()]
    fitted = []
    for names in without:
        closed = {name: (0.0, 0.0) for name in solver.boxes if names and name.endswith(names)}
        found = _fitted(setup, scorer, solver, closed, stage, slots if len(without) == 1 else slots[:1])
        if all(overload for (overload, _), _ in found):
            found += _fitted(setup, scorer, solver, closed, stage, _FEWEST_SLOTS)
        if found:
            _, mix = min(found, key=lambda pair: pair[0])
            together = dataclasses.replace(mix, spread=0)
            found.append((scorer.score(mixed(setup, together)).order, together))
            fitted.append(min(found, key=lambda pair: pair[0]))
    return [mix for _, mix in sorted(fitted, key=lambda pair: pair[0])], relaxed.value


def _fitted(
    setup: Setup,
    scorer: Scorer,
    solver: Solver,
    closed: Boxes,
    stage: int,
    slots: Sequence[tuple[int, int, int]],
) -> list[tuple[tuple[float, float], Mix]]:
    """Return mixes that are nearer and nearer to filling memory, with the order of their score.

    Args:
        setup: what is asked for.
        scorer: scores them.
        solver: of the conditions.
        closed: boxes of the variables that are left out.
        stage: the ZeRO stage.
        slots: slots of parameters, of streamed state and of gradients that are tried.
    """
    room = dict.fromkeys(ROOM, 1.0)
    fitted: list[tuple[tuple[float, float], Mix]] = []
    for num_slots, num_state_slots, num_gradient_slots in slots:
        rings = _rings(setup, solver.boxes, num_slots) if stage == 3 else {}
        for _ in range(_NUM_FITS):
            rooms = {ROOM[tier]: (share, share) for tier, share in room.items()}
            solution = solver.solve({**closed, **rings, **rooms})
            if solution is None:
                break
            mix = _rounded(setup, solution.values, stage)
            mix = dataclasses.replace(
                mix, num_slots=num_slots, num_state_slots=num_state_slots, num_gradient_slots=num_gradient_slots
            )
            found = scorer.score(mixed(setup, mix))
            fitted.append((found.order, mix))
            if found.missing_bytes and (setup.storage != "never" or Tier.HOST in found.missing_bytes):
                fixed, better = repaired(setup, scorer, mix, found)
                fitted.append((better.order, fixed))
            before = dict(room)
            for tier, share in found.filled.items():
                room[tier] = min(max(room[tier] + (FULL - share), room[tier] / 2), 1.0)
            if all(abs(room[tier] - before[tier]) < _FITTED for tier in room) or scorer.spent():
                break
    return fitted


def _rings(setup: Setup, boxes: Boxes, num_slots: int) -> Boxes:
    """Return boxes of the variables for slots, where there are so many of each size and every unit needs one."""
    counts = Counter(unit.num_params for unit in setup.units if f"{unit.name}:fills" in boxes)
    return {
        name: (min(num_slots / count, 1.0) * boxes[name][1], boxes[name][1])
        for name, count in ((f"{RING}{num_params}", count) for num_params, count in counts.items())
    }


def _rounded(setup: Setup, values: Mapping[str, float], zero_stage: int) -> Mix:
    """Return the mix nearest to fractions of decisions; see :mod:`planner.bounds.conditions` for their names."""
    counts = setup.movable
    placed = {  # but for the solver's tolerance: what is whole stays so
        place: round(sum(values.get(f"{name}:{place}", 0.0) * count for name, count in counts.items()), 6)
        for place in Place
    }
    segments = setup.swappable
    ways = {
        way: sum(values.get(f"{segment}:{way}", 0.0) for segment in segments)
        for way in ("recompute", "offload", "evict")
    }
    on_host, on_nvme = (
        sum(values.get(f"{unit.name}:{where}", 0.0) for unit in setup.units) for where in ("host", "onnvme")
    )
    staying = sum(values.get(f"{name}:stays", 0.0) * count for name, count in counts.items())
    num_streaming = min(sum(count > 0 for count in counts.values()), placed[Place.STREAM])
    return Mix(
        num_gpu=math.floor(placed[Place.GPU]),
        num_stay=round(num_streaming * staying / placed[Place.STREAM]) if placed[Place.STREAM] > 0 else 0,
        num_stream=min(round(placed[Place.STREAM]), sum(counts.values()) - math.floor(placed[Place.GPU])),
        num_keep=math.floor(round(len(segments) - sum(ways.values()), 6)),
        num_host=math.ceil(round(on_host + on_nvme, 6)),
        zero_stage=zero_stage,
        num_nvme=math.ceil(placed[Place.NVME]),
        num_on_nvme=math.ceil(round(on_nvme, 6)),
        num_offload=round(ways["offload"] + ways["evict"]),
        num_evict=math.ceil(round(ways["evict"], 6)),
        spill=int(sum(values.get(f"{unit.name}:spill", 0.0) for unit in setup.units) > len(setup.units) * _SPILLING),
    )
