"""Starting points of the search: optimal mixtures under the necessary conditions, rounded until they fill memory."""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from planner.bounds.conditions import conditions
from planner.bounds.program import NEVER_S, RING, ROOM, Boxes
from planner.bounds.solver import Solver
from planner.decisions import Decisions, Place
from planner.placements import mixed
from planner.schedule.tasks import Tier
from planner.search.descent import FULL, LARGE_STEP, SMALL_STEP, max_equal_units, repaired
from planner.search.scoring import Candidate, Scorer, best_of
from planner.setup import Mix, Setup, pieces

# The most mixtures to try until one fills memory, to within this fraction.
_NUM_FITS, _FITTED = 4, 4e-3
# Numbers of slots to try: of parameters, of streamed state, of gradients.
_SLOTS = ((2, 2, 2), (2, 3, 2), (3, 3, 2))
# Numbers of slots to try if nothing fits with those.
_FEWEST_SLOTS = ((2, 1, 1), (1, 1, 1))
# Mixtures tend to put a little of everything on NVMe, which costs more than fractions show. So some kinds of data are
# excluded in turn.
_WITHOUT = ((), (":stays",), (":spill", ":evict"), (":offload", ":evict"), (":onnvme", ":spill", ":evict"))
# Gradients wait on NVMe if the mixture has them there for at least this share of all units.
_SPILLING = 0.1


Start = tuple[float, float, Mix]
"""The first step of a descent, the lower bound of its ZeRO stage in seconds, and where it starts."""


def starting_points(setup: Setup, scorer: Scorer, enough_s: float) -> tuple[list[Start], float]:
    """Return starting points, the most promising first, and a lower bound on the iteration time.

    A ZeRO stage with a lower bound of at least ``enough_s`` is not simulated.

    Each ZeRO stage has two starting points: its optimal mixture under the necessary conditions, with small steps, and
    everything on the CPU and recomputed, which needs the least device memory, with large steps.
    """
    starts: list[Start] = []
    bounds_s: list[float] = []
    num_equal = max_equal_units(setup)
    more = [(num_equal, 3, num_equal), (2 * num_equal, 3, num_equal)] if num_equal > _SLOTS[-1][0] else []
    slots = (*_SLOTS, *more)
    for stage in setup.zero_stages[-2:]:
        mixes, bound_s = _relaxed(setup, scorer, stage, slots, enough_s)
        bounds_s.append(bound_s)
        starts += [(SMALL_STEP, bound_s, mix) for mix in mixes]
        if setup.storage == "never":
            starts.append((LARGE_STEP, bound_s, Mix(num_gpu=0, num_stream=0, num_keep=0, zero_stage=stage)))
    # Parameters may have to live on the host too (or shards of them), or everything on NVMe.
    starts.append((LARGE_STEP, bounds_s[-1], _smallest_that_fits(setup, scorer)))
    starts.sort(key=lambda start: start[:2])
    return starts, min(bounds_s)


def first_look(setup: Setup, scorer: Scorer) -> Candidate:
    """Return the best of a few mixtures: close to the result of a search, in a small part of its time."""
    found = [scorer.score(mixed(setup, _lowest(setup)))]
    for stage in setup.zero_stages[-2:]:
        mixes, _ = _relaxed(setup, scorer, stage, _SLOTS[:1])
        found += [scorer.score(mixed(setup, mix)) for mix in mixes]
    return best_of(found)


def smallest(setup: Setup) -> Iterator[Decisions]:
    """Yield the decisions that need least device memory, with more and with fewer slots."""
    yield from (mixed(setup, mix) for mix in _smallest(setup))


def _lowest(setup: Setup) -> Mix:
    """Return the mix that needs the least memory on the device, and on the host if NVMe is allowed."""
    stage, count = setup.zero_stages[-1], len(setup.units)
    on_nvme = sum(len(pieces(setup, unit)) for unit in setup.units) if setup.storage == "nvme" else 0
    return Mix(0, 0, 0, num_host=count, zero_stage=stage, num_nvme=on_nvme, num_on_nvme=count if on_nvme else 0)


def _smallest(setup: Setup) -> Iterator[Mix]:
    """Yield that mix with more and with fewer slots, on the host as well if NVMe is allowed."""
    lowest = _lowest(setup)
    for num_slots, num_state_slots, num_gradient_slots in (_SLOTS[0], *_FEWEST_SLOTS):
        slots = {"num_slots": num_slots, "num_state_slots": num_state_slots, "num_gradient_slots": num_gradient_slots}
        yield dataclasses.replace(lowest, **slots)
    if setup.storage == "nvme":
        fewest = dataclasses.replace(lowest, **slots, num_nvme_slots=1)
        yield fewest
        if setup.given.num_micro_batches == 1:  # gradients of several accumulate on the host
            yield dataclasses.replace(fewest, spill=1)


def _smallest_that_fits(setup: Setup, scorer: Scorer) -> Mix:
    """Return the first of these mixes that fits; if none does, the one that lacks least. What follows is not scored."""
    orders: dict[Mix, tuple[float, float]] = {}
    for mix in _smallest(setup):
        orders[mix] = scorer.score(mixed(setup, mix)).order
        if not orders[mix][0]:
            return mix
    return min(orders, key=orders.__getitem__)


def _relaxed(
    setup: Setup, scorer: Scorer, stage: int, slots: Sequence[tuple[int, int, int]], enough_s: float = NEVER_S
) -> tuple[list[Mix], float]:
    """Return mixes near the optimal mixture, the best first, and the lower bound.

    There is no mix if nothing fits or the bound is not below ``enough_s``. Otherwise there is one, or, if NVMe is
    allowed, one for each way to use it.

    The conditions ignore slots and short-lived buffers. So each mixture is simulated; the next one may use less of a
    memory that was overrun, and more of one that was left empty, by the same amount.
    """
    solver = Solver(conditions(setup.changed(zero_stage=stage), scorer.cost, NEVER_S, few=True))
    if (relaxed := solver.solve()) is None:
        return [], math.inf
    if relaxed.value >= enough_s:
        return [], relaxed.value
    fitted: list[tuple[tuple[float, float], Mix]] = []
    for names in _WITHOUT if setup.storage == "nvme" else [()]:
        closed = {name: (0.0, 0.0) for name in solver.boxes if names and name.endswith(names)}
        best = min((order for order, _ in fitted), default=(math.inf, math.inf))
        if closed and ((least := solver.solve(closed)) is None or (0.0, least.value) >= best):
            continue  # a mix that was found is better than all of this kind
        found = _fitted(setup, scorer, solver, closed, stage, slots if setup.storage != "nvme" else slots[:1])
        if all(overload for (overload, _), _ in found):
            found += _fitted(setup, scorer, solver, closed, stage, _FEWEST_SLOTS)
        if found:
            _, mix = min(found, key=lambda pair: pair[0])
            unspread = dataclasses.replace(mix, spread=0)
            found.append((scorer.score(mixed(setup, unspread)).order, unspread))
            fitted.append(min(found, key=lambda pair: pair[0]))
    return [mix for _, mix in sorted(fitted, key=lambda pair: pair[0])], relaxed.value


def _fitted(
    setup: Setup, scorer: Scorer, solver: Solver, closed: Boxes, stage: int, slots: Sequence[tuple[int, int, int]]
) -> list[tuple[tuple[float, float], Mix]]:
    """Return mixes that fill memory better and better, each with the sort key of its score.

    Args:
        setup: the model, the machine and what the user has fixed.
        scorer: scores mixes.
        solver: solves the conditions.
        closed: boxes of the variables that are excluded.
        stage: the ZeRO stage.
        slots: numbers of slots to try: of parameters, of streamed state, of gradients.
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
    """Return boxes of the variables for slots, if each size of units has ``num_slots`` and every unit needs one."""
    counts = Counter(unit.size_name for unit in setup.units if f"{unit.name}:fills" in boxes)
    return {
        name: (min(num_slots / count, 1.0) * boxes[name][1], boxes[name][1])
        for name, count in ((f"{RING}{size}", count) for size, count in counts.items())
        if name in boxes
    }


def _rounded(setup: Setup, values: Mapping[str, float], zero_stage: int) -> Mix:
    """Round fractions to a mix; see :mod:`planner.bounds.conditions` for the names of variables."""
    counts = setup.movable
    placed = {  # the solver has a tolerance: whole numbers stay whole
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
