"""The search: every engine policy as a seed, then local search over our own family, scored by the simulator.

Nothing is ever accepted that the simulator does not score better, so the result is never worse than the best seed.
Unless seconds are asked for, the budget is a number of simulations: the same inputs give the same plan on any machine.
"""

import contextlib
import dataclasses
import gc
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import get_args

from planner.bounds.conditions import conditions
from planner.bounds.program import LinearProgram
from planner.bounds.solver import solve
from planner.bounds.space import NEVER_S, RING, ROOM, Space
from planner.costs import UPDATE_BYTES_PER_PARAM, CostModel
from planner.decisions import (
    STATE_BYTES_PER_PARAM,
    Activations,
    Decisions,
    GradientPath,
    HostUpdate,
    Place,
    Storage,
    UnitDecision,
)
from planner.engines import POLICIES, Mix, Setup, mixed, movable, pieces, ratel, swappable, tied, zero_infinity
from planner.lowering import lower
from planner.prediction import Prediction, Workload, always_held, capacities, memory_peaks, predict
from planner.schedule import Lane, Schedule, Tier
from planner.simulate.machine import run_until_steady

Progress = Callable[["Candidate", int], None]
Key = Callable[["Candidate"], tuple[float, ...]]

# A plan may be this much slower than the fastest found if it moves fewer bytes; how many simulations to look for one.
_TIDY_SLOWER = 5e-3
_TIDY_SIMULATIONS = 40
# So near to what is possible at best, no further search is worth its time.
_CLOSE = 1e-2
# How much is simulated if nobody says: so many schedules, or more of them if they are small.
_SIMULATIONS, _TASKS = 120, 200_000
_ENDLESS = 10**9
# The share of the budget that is kept for moving single units.
_POLISH = 0.25
# Mixtures that are tried until one fills memory this far, as near as that.
_NUM_FITS, _FULL, _FITTED = 4, 0.995, 4e-3
# Slots of parameters, of streamed state and of gradients that are tried with them.
_SLOTS = ((2, 2, 2), (2, 3, 2), (3, 3, 2))
# Those that are tried if nothing fits with others.
_FEWEST_SLOTS = ((2, 1, 1), (1, 1, 1))
# Of how many tenths of all segments activations are swapped, in seeds; host buffers of state from NVMe, at most.
_SWAPPED_TENTHS, _MOST_NVME_SLOTS = (0, 3, 6, 10), 6
# Gradients wait on NVMe if they do so in a mixture for this share of all units.
_SPILLING = 0.1
# What remains of the budget for descents after each of them.
_LATER, _LATER_WITH_STORAGE = 0.3, 0.5
_BALANCE = "balance"  # a move of its own, beside those of counts
# First steps of a descent, as fractions of all there is to move.
_SMALL_STEP, _LARGE_STEP = 1 / 32, 1 / 2


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Decisions with their score.

    Attributes:
        decisions: what was tried.
        iteration_s: predicted time; infinite if it was rejected before simulating.
        missing_bytes: by tier, how much memory is lacking (empty if it fits).
        overload: the same as fractions of the tiers' capacities, added up; plus 1 if it was rejected before simulating.
        traffic_bytes: what crosses links and host memory in an iteration, hidden or not.
        filled: by tier, the peak as a fraction of the capacity; what is always held if it was not simulated.
        busy_s: seconds that each lane is occupied.
    """

    decisions: Decisions
    iteration_s: float
    missing_bytes: dict[Tier, int]
    overload: float = 0.0
    traffic_bytes: int = 0
    filled: dict[Tier, float] = dataclasses.field(default_factory=dict)
    busy_s: dict[Lane, float] = dataclasses.field(default_factory=dict)

    @property
    def order(self) -> tuple[float, float]:
        """Sort key: what fits first, then what is faster (or lacks less, where a byte weighs more on a small tier)."""
        return (self.overload, self.iteration_s)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a search found.

    Attributes:
        best: the best candidate, which may not fit if none does.
        engines: the best candidate of every engine policy, by name.
        num_simulations: schedules that were simulated.
    """

    best: Candidate
    engines: dict[str, Candidate]
    num_simulations: int


class Scorer:
    """Scores decisions by simulating their schedule; remembers what it has seen.

    Attributes:
        cost: prices and machine.
        num_simulations: schedules simulated so far.
        deadline_s: by the monotonic clock, when a search is to end; ``None`` if its budget is one of simulations.
    """

    def __init__(self, workload: Workload, cost: CostModel, deadline_s: float | None = None) -> None:
        self.deadline_s = deadline_s
        self.num_simulations = 0
        self._workload = workload
        self.cost = cost
        self._seen: dict[str, Candidate] = {}

    def spent(self, max_simulations: int = _ENDLESS) -> bool:
        """Return whether a budget is used up."""
        late = self.deadline_s is not None and time.monotonic() >= self.deadline_s
        return late or self.num_simulations >= max_simulations

    def schedule(self, decisions: Decisions) -> Schedule:
        """Return the schedule of some decisions."""
        return lower(self._workload.units, decisions, asynchronous=self.cost.asynchronous)

    def score(self, decisions: Decisions) -> Candidate:
        """Return decisions with their predicted time, or rejected for lack of memory."""
        key = decisions.model_dump_json()
        if key not in self._seen:
            self._seen[key] = self._score(decisions)
        return self._seen[key]

    def predict(self, decisions: Decisions) -> Prediction:
        """Return the full prediction of some decisions, simulated until steady."""
        cost = self._priced(decisions)
        simulation = run_until_steady(self.schedule(decisions), cost)
        return predict(self._workload, decisions, cost, simulation)

    def _priced(self, decisions: Decisions) -> CostModel:
        """Return the prices of what is lowered: pipeline stages are other units for other decisions."""
        if decisions.pipeline_parallel == 1:
            return self.cost
        return CostModel.of(self.cost.profile, self._workload.units, decisions)

    def _score(self, decisions: Decisions) -> Candidate:
        cost = self._priced(decisions)
        schedule = self.schedule(decisions)
        capacity = capacities(cost)
        held = always_held(schedule, cost)
        # What a machine has none of is refused by name where it is priced.
        missing = {tier: n - capacity[tier] for tier, n in held.items() if n > capacity[tier] > 0}
        if missing:  # no need to simulate; what is missing is a lower bound, so it must not pass for the better of two
            filled = {tier: num_bytes / capacity[tier] for tier, num_bytes in held.items() if num_bytes}
            return Candidate(decisions, float("inf"), missing, 1 + _overload(missing, capacity), filled=filled)
        self.num_simulations += 1
        simulation = run_until_steady(schedule, cost, quick=True)
        timeline, steady = simulation.timeline, simulation.steady
        peaks = memory_peaks(timeline, steady, cost)
        missing = {tier: use.missing_bytes for tier, use in peaks.items() if use.missing_bytes}
        filled = {tier: use.peak_bytes / capacity[tier] for tier, use in peaks.items() if use.peak_bytes}
        overload, moved_bytes = _overload(missing, capacity), traffic_bytes(schedule)
        return Candidate(
            decisions, timeline.period_s(steady), missing, overload, moved_bytes, filled, timeline.busy_s(steady)
        )


def search(
    setup: Setup, scorer: Scorer, max_simulations: int | None = None, progress: Progress | None = None
) -> Outcome:
    """Find decisions for a setup.

    Args:
        setup: what is asked for.
        scorer: scores candidates.
        max_simulations: stop the local search after so many; the seeds are always scored. By default as many as take a
            second or two: schedules of small models have few tasks. For each kind of storage, as many again.
        progress: called with the best so far and the number of simulations.
    """

    def tell(candidate: Candidate) -> None:
        if progress:
            progress(candidate, scorer.num_simulations)

    engines = engine_policies(setup, scorer)
    # A plan is what we can run: of another engine its placement, driven our way, which is never slower.
    driven = [scorer.score(_driven_by_us(setup, candidate.decisions)) for candidate in engines.values()]
    driven += [candidate for candidate in engines.values() if candidate.decisions.executable]
    enough_s, kinds = NEVER_S, get_args(Storage)
    for kind in kinds[: kinds.index(setup.storage) + 1]:  # what does with less is found as if no more was allowed
        last, budget = kind == setup.storage, max_simulations
        if kind != "never":
            budget = None if budget is None else scorer.num_simulations + budget
        if kind == "nvme":
            driven += [scorer.score(_driven_by_us(setup, placement)) for placement in _swapping(setup)]
        allowed = dataclasses.replace(setup, storage=kind)
        best, bound_s = _improve(allowed, scorer, driven, engines, budget, tell, last=last, enough_s=enough_s)
        enough_s = NEVER_S if best.missing_bytes else min(bound_s * (1 - _CLOSE), NEVER_S)
        driven.append(best)
    return Outcome(best, engines, scorer.num_simulations)


def _improve(
    setup: Setup,
    scorer: Scorer,
    seeds: Iterable[Candidate],
    engines: Mapping[str, Candidate],
    max_simulations: int | None,
    tell: Callable[[Candidate], None],
    *,
    last: bool = True,
    enough_s: float = NEVER_S,
) -> tuple[Candidate, float]:
    """Return the best that is found from seeds and mixtures, and how fast anything can be at best.

    Args:
        setup: what is asked for.
        scorer: scores candidates.
        seeds: candidates to start from.
        engines: the best of every engine policy.
        max_simulations: see :func:`search`.
        tell: called with the best so far.
        last: whether no more storage will be allowed later, so that it is worth looking for what hardly fits.
        enough_s: if nothing can be faster than this, the best of the seeds is.
    """
    driven, storage = list(seeds), setup.storage != "never"
    best = _best(driven)
    tell(best)
    starts, bound_s = _starts(setup, scorer, enough_s)
    if bound_s >= enough_s or (bound_s == math.inf and not last):
        return best, bound_s
    before = scorer.num_simulations
    if max_simulations is None:
        max_simulations = before + _default_simulations(scorer, best, endless=last)
        if storage and enough_s == NEVER_S:  # nothing was searched with less
            max_simulations += max_simulations - before
    room = max(max_simulations - before, 0)
    mix: Mix | None = None
    later = _LATER_WITH_STORAGE if storage else _LATER
    for number, start in enumerate(starts):
        # The more promising a start, the more of the budget; a part is always left for moving single units.
        limit = before + int(room * (1 - _POLISH) * (1 - later ** (number + 1)))
        if not best.missing_bytes and best.iteration_s <= max(start.bound_s, bound_s * (1 + _CLOSE)):
            continue  # nothing that is worth the time can be found from there
        trial, found = _descend(setup, scorer, start.mix, lambda c: c.order, limit, tell, start.first_step)
        driven.append(found)
        if found.order < best.order:
            mix, best = trial, found
            tell(best)
    # From other ends too, the best first, as far as the budget goes: single moves do not lead everywhere.
    enough_s, limit = bound_s * (1 + _CLOSE), max(max_simulations, before)
    for end in (best, *sorted(driven, key=lambda candidate: candidate.order)):
        if best.order > (0.0, enough_s):
            best = _best([best, _polish(setup, scorer, end, enough_s, limit)])
    tell(best)
    if mix is not None and best.decisions == mixed(setup, mix):
        # Equally fast is not equally good: what is hidden now may show when the model is off.
        limit_s = _tolerance_s(best, engines.values())
        tidy = scorer.num_simulations + _TIDY_SIMULATIONS
        _, best = _descend(setup, scorer, mix, _quieter(limit_s), tidy)
        tell(best)
    return best, bound_s


def _default_simulations(scorer: Scorer, example: Candidate, *, endless: bool) -> int:
    """Return how many schedules are simulated if nobody says, or until when."""
    if scorer.deadline_s is not None and endless:
        return _ENDLESS
    return max(_SIMULATIONS, _TASKS // len(scorer.schedule(example.decisions).tasks))


def engine_policies(setup: Setup, scorer: Scorer) -> dict[str, Candidate]:
    """Return the best candidate of every engine policy that does what is asked, by name."""
    found = {name: _best(map(scorer.score, policy(setup))) for name, policy in POLICIES.items()}
    if setup.storage == "nvme":
        found["zero-infinity"] = _best(map(scorer.score, zero_infinity(setup)))
        if not setup.clip:  # it updates during backward
            found["ratel"] = _best(map(scorer.score, _swapping(setup)))
    return found


def _swapping(setup: Setup) -> Iterator[Decisions]:
    """Yield the placements of an engine that swaps all state and more or fewer activations."""
    num_segments = len(swappable(setup))
    counts = sorted({round(num_segments * tenths / 10) for tenths in _SWAPPED_TENTHS})
    for num_on_host in (None, 0):
        yield from ratel(setup, counts, num_on_host)


def _tolerance_s(found: Candidate, engines: Iterable[Candidate]) -> float:
    """Return how slow a tidier plan may be: a little slower than what was found, never slower than an engine."""
    fastest_s = min((engine.iteration_s for engine in engines if not engine.missing_bytes), default=float("inf"))
    return max(found.iteration_s, min(found.iteration_s * (1 + _TIDY_SLOWER), fastest_s))


def _polish(
    setup: Setup,
    scorer: Scorer,
    best: Candidate,
    enough_s: float,
    max_simulations: int,
) -> Candidate:
    """Move single units, one decision at a time, for as long as that helps and the budget lasts."""
    moved, num_trials = not best.missing_bytes, 0
    while moved:
        moved = False
        singles = _neighbours(setup, best.decisions)
        pairs = (pair for one in _neighbours(setup, best.decisions) for pair in _neighbours(setup, one))
        for trial in itertools.chain(singles, pairs):  # two at a time where the budget lasts: small models
            num_trials += 1  # what is rejected before it is simulated takes time too
            if num_trials >= max_simulations or scorer.spent(max_simulations) or best.iteration_s <= enough_s:
                return best
            candidate = scorer.score(trial)
            if candidate.order < best.order:
                best, moved = candidate, True
                break
    return best


def _neighbours(setup: Setup, decisions: Decisions) -> Iterator[Decisions]:
    """Yield decisions that differ in one subgroup, one unit's parameters, one segment's activations, or an exchange.

    Units far apart come first, so that a budget that does not last for all still looks everywhere.
    """
    resident, storage, places, activations = tied(setup), setup.storage, list(Place), list(get_args(Activations))
    if storage != "nvme":
        places.remove(Place.NVME)
        activations = ["keep", "recompute", *(["offload"] if storage == "activations" else [])]
    segments = {segment: [u for u in setup.units if u.segment == segment] for segment in swappable(setup)}
    for _, unit in sorted(enumerate(setup.units), key=lambda numbered: _scattered(numbered[0])):
        old = decisions.units[unit.name]
        changed: list[UnitDecision] = []
        for piece, place in itertools.product(range(len(old.update)), places):
            update = (*old.update[:piece], place, *old.update[piece + 1 :])
            params = "host" if old.params == "nvme" and place is not Place.NVME else old.params
            changed.append(old.model_copy(update={"update": update, "params": params}))
        changed.append(old.model_copy(update={"params": "host" if old.params == "gpu" else "gpu"}))
        if Place.STREAM in old.update:
            other = "host" if old.streamed_gradients == "gpu" else "gpu"
            changed.append(old.model_copy(update={"streamed_gradients": other}))
        if storage == "nvme":
            whole = {"params": "nvme", "update": (Place.NVME,) * len(old.update)}
            changed.append(old.model_copy(update=whole))
        for new in changed:
            fetched = new.fetched and (Place.GPU in new.update or unit.name in resident or decisions.regathers(unit))
            if new != old and unit.num_params and not fetched:
                yield decisions.model_copy(update={"units": decisions.units | {unit.name: new}})
        if unit.recompute and segments[unit.segment][0] is unit:
            for way in (way for way in activations if way != old.activations):
                together = {
                    other.name: decisions.units[other.name].model_copy(update={"activations": way})
                    for other in segments[unit.segment]
                }
                yield decisions.model_copy(update={"units": decisions.units | together})
    yield from _exchanges(setup, decisions)


def _exchanges(setup: Setup, decisions: Decisions) -> Iterator[Decisions]:
    """Yield decisions in which two units exchange where they are updated.

    What the memory of a tier allows one of them, it allows the other. Their parameters are exchanged too, or those of
    all units become resident.
    """
    resident = tied(setup)
    for one, other in itertools.combinations((unit for unit in setup.units if unit.num_params), 2):
        old = (decisions.units[one.name], decisions.units[other.name])
        if old[0].update[0] is old[1].update[0]:
            continue
        for exchange_params in (True, False):
            changed = {} if exchange_params else _all_resident(decisions)
            for unit, own, there in ((one, *old), (other, *old[::-1])):
                place = there.update[0]
                fixed = unit.name in resident or decisions.regathers(unit)
                stays = place is Place.GPU or fixed or not exchange_params
                params = "gpu" if stays else there.params
                changed[unit.name] = own.model_copy(update={"update": (place,) * len(own.update), "params": params})
            yield decisions.model_copy(update={"units": decisions.units | changed})


def _all_resident(decisions: Decisions) -> dict[str, UnitDecision]:
    return {name: unit.model_copy(update={"params": "gpu"}) for name, unit in decisions.units.items()}


def _scattered(position: int) -> float:
    """Return a key that sorts neighbours far apart (multiples of the golden ratio)."""
    return position * (math.sqrt(5) - 1) / 2 % 1


def _quieter(limit_s: float) -> Key:
    """Return a sort key: what fits and is fast enough first, then what moves fewer bytes."""
    return lambda candidate: (candidate.overload, max(candidate.iteration_s - limit_s, 0.0), candidate.traffic_bytes)


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Keep Python from looking for cycles among the tasks of schedules: there are none, and it doubles the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _overload(missing_bytes: dict[Tier, int], capacity_bytes: dict[Tier, int]) -> float:
    return sum(num_bytes / capacity_bytes[tier] for tier, num_bytes in missing_bytes.items())


def traffic_bytes(schedule: Schedule) -> int:
    """Return the bytes that cross links and host memory in an iteration, hidden or not."""
    on_cpu = sum(task.num_params for task in schedule.tasks if task.lane is Lane.CPU)
    return sum(task.num_bytes for task in schedule.tasks) + UPDATE_BYTES_PER_PARAM * on_cpu


def _best(candidates: Iterable[Candidate]) -> Candidate:
    return min(candidates, key=lambda candidate: candidate.order)


def _driven_by_us(setup: Setup, decisions: Decisions) -> Decisions:
    early = not setup.clip
    return decisions.model_copy(
        update={
            "policy": "ullage",
            "overlap_next_forward": True,
            "host_update": HostUpdate.FUSED,
            "gradient_path": GradientPath.ONCE,
            "max_prefetch_params": None,
            "max_reuse_params": None,
            "module_hooks": False,
            "device_buffer_bytes": 0,
            "spill_gradients": False,
            "pinned_reads": True,
            "num_nvme_slots": Mix(0, 0, 0).num_nvme_slots,
            "clip": setup.clip,
            "update_start": "backward" if early else "step",
            "update_order": "backward" if early else "forward",
        }
    )


@dataclasses.dataclass(frozen=True)
class _Start:
    """Where a descent starts, how large its first steps are, and how fast anything of its ZeRO stage can be at best."""

    mix: Mix
    first_step: float
    bound_s: float


def _starts(setup: Setup, scorer: Scorer, enough_s: float) -> tuple[list[_Start], float]:
    """Return where descents start, the most promising first, and how fast anything can be at best.

    Nothing is simulated of a ZeRO stage that can be no faster than ``enough_s``.

    Every ZeRO stage is started from the mixture that is best under the necessary conditions, in small steps, and from
    everything on the CPU and recomputed, which needs the least device memory, in large ones.
    """
    starts: list[_Start] = []
    bounds_s: list[float] = []
    together = _most_alike(setup)
    slots = (*_SLOTS, *([(together, 3, together), (2 * together, 3, together)] if together > _SLOTS[-1][0] else []))
    for stage in (2, 3) if setup.data_parallel > 1 else (0,):
        space = _space(setup, stage)
        mixes, bound_s = _relaxed(setup, scorer, space, stage, slots, enough_s)
        bounds_s.append(bound_s)
        starts += [_Start(mix, _SMALL_STEP, bound_s) for mix in mixes]
        if setup.storage == "never":
            starts.append(_Start(Mix(num_gpu=0, num_stream=0, num_keep=0, zero_stage=stage), _LARGE_STEP, bound_s))
    # Parameters too may have to live on the host (their shards, if there are several ranks), or everything on NVMe.
    starts.append(_Start(_lowest(setup), _LARGE_STEP, bounds_s[-1]))
    starts.sort(key=lambda start: (start.first_step, start.bound_s))
    return starts, min(bounds_s)


def first_look(setup: Setup, scorer: Scorer) -> Candidate:
    """Return the best of a few mixtures: near to what a search will find, for a small part of its time."""
    found = [scorer.score(mixed(setup, _lowest(setup)))]
    for stage in (2, 3) if setup.data_parallel > 1 else (0,):
        mixes, _ = _relaxed(setup, scorer, _space(setup, stage), stage, _SLOTS[:1])
        found += [scorer.score(mixed(setup, mix)) for mix in mixes]
    return _best(found)


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
    program = conditions(space, scorer.cost, NEVER_S)
    if (relaxed := solve(program)) is None:
        return [], math.inf
    if relaxed.value >= enough_s:
        return [], relaxed.value
    # Of what may be on storage, mixtures tend to take a little of everything, so that some is left out too.
    without = [(":spill", ":evict"), (":offload", ":evict")] if setup.storage == "nvme" else [()]
    fitted = []
    for names in without:
        limited = (
            program.within({name: (0.0, 0.0) for name in program.boxes if name.endswith(names)}) if names else program
        )
        found = _fitted(setup, scorer, limited, stage, slots if len(without) == 1 else slots[:1])
        if all(overload for (overload, _), _ in found):
            found += _fitted(setup, scorer, limited, stage, _FEWEST_SLOTS)
        fitted += [min(found, key=lambda pair: pair[0])] if found else []
    return [mix for _, mix in sorted(fitted, key=lambda pair: pair[0])], relaxed.value


def _fitted(
    setup: Setup, scorer: Scorer, program: LinearProgram, stage: int, slots: Sequence[tuple[int, int, int]]
) -> list[tuple[tuple[float, float], Mix]]:
    """Return mixes that are nearer and nearer to filling memory, with the order of their score."""
    room = dict.fromkeys(ROOM, 1.0)
    fitted: list[tuple[tuple[float, float], Mix]] = []
    for num_slots, num_state_slots, num_gradient_slots in slots:
        slotted = program.within(_rings(setup, program, num_slots) if stage == 3 else {})
        for _ in range(_NUM_FITS):
            solution = solve(slotted.within({ROOM[tier]: (share, share) for tier, share in room.items()}))
            if solution is None:
                break
            mix = _rounded(setup, solution.values, stage)
            mix = dataclasses.replace(
                mix, num_slots=num_slots, num_state_slots=num_state_slots, num_gradient_slots=num_gradient_slots
            )
            found = scorer.score(mixed(setup, mix))
            fitted.append((found.order, mix))
            if found.missing_bytes and (setup.storage != "never" or Tier.HOST in found.missing_bytes):
                fixed, better = _repaired(setup, scorer, mix, found)
                fitted.append((better.order, fixed))
            before = dict(room)
            for tier, share in found.filled.items():
                room[tier] = min(max(room[tier] + (_FULL - share), room[tier] / 2), 1.0)
            if all(abs(room[tier] - before[tier]) < _FITTED for tier in room) or scorer.spent():
                break
    return fitted


def _rings(setup: Setup, program: LinearProgram, num_slots: int) -> dict[str, tuple[float, float]]:
    """Return boxes of the variables for slots, where there are so many of each size and every unit needs one."""
    counts = Counter(unit.num_params for unit in setup.units if f"{unit.name}:fills" in program.boxes)
    return {
        name: (min(num_slots / count, 1.0) * program.boxes[name][1], program.boxes[name][1])
        for name, count in ((f"{RING}{num_params}", count) for num_params, count in counts.items())
    }


def _most_alike(setup: Setup) -> int:
    """Return the most units of one size in a segment.

    With as many slots recomputation leaves them all for backward; with twice as many the next ones come meanwhile.
    """
    sizes = Counter((unit.segment, unit.num_params) for unit in setup.units if unit.num_params)
    return max(sizes.values())


def _rounded(setup: Setup, values: Mapping[str, float], zero_stage: int) -> Mix:
    """Return the mix nearest to fractions of decisions; see :mod:`planner.bounds.conditions` for their names."""
    counts = movable(setup)
    placed = {
        place: sum(values.get(f"{name}:{place}", 0.0) * count for name, count in counts.items()) for place in Place
    }
    segments = swappable(setup)
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
        num_stay=round(num_streaming * staying / placed[Place.STREAM]) if staying else 0,
        num_stream=min(round(placed[Place.STREAM]), sum(counts.values()) - math.floor(placed[Place.GPU])),
        num_keep=math.floor(len(segments) - sum(ways.values())),
        num_host=math.ceil(round(on_host + on_nvme, 6)),
        zero_stage=zero_stage,
        num_nvme=math.ceil(round(placed[Place.NVME], 6)),
        num_on_nvme=math.ceil(round(on_nvme, 6)),
        num_offload=round(ways["offload"] + ways["evict"]),
        num_evict=math.ceil(round(ways["evict"], 6)),
        spill=int(sum(values.get(f"{unit.name}:spill", 0.0) for unit in setup.units) > len(setup.units) * _SPILLING),
    )


def _repaired(setup: Setup, scorer: Scorer, trial: Mix, found: Candidate, moved: str = "") -> tuple[Mix, Candidate]:
    """Let go of the resident subgroups without which a mix fits on the device, or relieve the host.

    From there state goes to NVMe, or more is streamed, whose gradients stay on the device. Only of what was not moved
    itself.
    """
    sizes = [num_params for unit in setup.units for num_params in pieces(setup, unit)]
    state_bytes = STATE_BYTES_PER_PARAM * sum(sizes) / len(sizes) * scorer.cost.ranks_per_node
    if set(found.missing_bytes) == {Tier.GPU} and moved != "num_gpu":
        lacking = math.ceil(found.missing_bytes[Tier.GPU] * scorer.cost.ranks_per_node / state_bytes)
        trial = dataclasses.replace(trial, num_gpu=max(trial.num_gpu - lacking, 0))
    elif set(found.missing_bytes) == {Tier.HOST} and moved != "num_nvme" and setup.storage == "nvme":
        lacking = math.ceil(found.missing_bytes[Tier.HOST] / state_bytes)
        trial = dataclasses.replace(trial, num_nvme=trial.num_nvme + lacking)
    elif set(found.missing_bytes) == {Tier.HOST} and moved not in {"num_stream", "num_stay"}:
        gradient_bytes = state_bytes * setup.precision.weight_bytes / STATE_BYTES_PER_PARAM
        more = math.ceil(found.missing_bytes[Tier.HOST] / gradient_bytes)
        trial = dataclasses.replace(trial, num_stream=trial.num_stream + more, num_stay=trial.num_stay + more)
    else:
        return trial, found
    return trial, scorer.score(mixed(setup, trial))


def _balanced(mix: Mix, found: Candidate, num_subgroups: int) -> Mix:
    """Return the mix in which the host and the streams would end their updates together, at the rates they had."""
    on_cpu = num_subgroups - mix.num_gpu - mix.num_stream
    cpu_s = found.busy_s.get(Lane.CPU, 0.0)
    stream_s = max((found.busy_s.get(lane, 0.0) for lane in (Lane.STATE_IN, Lane.STATE_OUT)), default=0.0)
    if not (on_cpu and mix.num_stream and cpu_s and stream_s):
        return mix
    moved = round((cpu_s - stream_s) / (cpu_s / on_cpu + stream_s / mix.num_stream))
    return dataclasses.replace(mix, num_stream=mix.num_stream + moved)


def _descend(
    setup: Setup,
    scorer: Scorer,
    start: Mix,
    key: Key,
    max_simulations: int,
    tell: Callable[[Candidate], None] = lambda _: None,
    first_step: float = _LARGE_STEP,
) -> tuple[Mix, Candidate]:
    """Pattern search for the least ``key``: move one count at a time by a step that halves when no move helps.

    The first steps are a fraction ``first_step`` of all there is to move.
    """
    limits = {
        "num_gpu": sum(movable(setup).values()),
        "num_stream": sum(movable(setup).values()),
        "num_keep": len(swappable(setup)),
        "num_host": len(setup.units) if start.zero_stage in {0, 3} or setup.expert_parallel > 1 else 0,
        "num_slots": max(4, 2 * _most_alike(setup)),
        "num_state_slots": 4,
        "num_gradient_slots": max(4, 2 * _most_alike(setup)),
        "num_stay": len(setup.units),
        **_storage_limits(setup, start),
    }
    mix, best = start, scorer.score(mixed(setup, start))
    steps = {
        name: 1 if name.endswith("slots") else max(int(limit * first_step), 1)
        for name, limit in limits.items()
        if limit
    }
    while True:
        moved = False
        for name in (_BALANCE, *steps):
            for trial in _moves(mix, best, name, steps.get(name, 0), limits):
                candidate = scorer.score(mixed(setup, trial))
                if not best.missing_bytes and candidate.missing_bytes:
                    trial, candidate = _repaired(setup, scorer, trial, candidate, name)  # noqa: PLW2901
                if key(candidate) < key(best):
                    mix, best, moved = trial, candidate, True
                    tell(best)
                    break
                if scorer.spent(max_simulations) and not best.missing_bytes:
                    return mix, best
        if not moved:
            if all(step == 1 for step in steps.values()):
                return mix, best
            steps = {name: max(step // 2, 1) for name, step in steps.items()}


def _storage_limits(setup: Setup, start: Mix) -> dict[str, int]:
    """Return how much of a mix may be on storage, by what is counted."""
    found: dict[str, int] = {}
    if setup.storage != "never":
        found["num_offload"] = len(swappable(setup))
    if setup.storage == "nvme":
        found["num_evict"] = len(swappable(setup))
        found["num_nvme"] = sum(len(pieces(setup, unit)) for unit in setup.units)
        found["num_on_nvme"] = len(setup.units) if start.zero_stage in {0, 3} or setup.expert_parallel > 1 else 0
        found["num_nvme_slots"] = _MOST_NVME_SLOTS
        found["spill"] = int(setup.num_micro_batches == 1)
    return found


def _moves(mix: Mix, found: Candidate, name: str, step: int, limits: Mapping[str, int]) -> Iterator[Mix]:
    """Yield the mixes that one kind of move leads to."""
    if name == _BALANCE:
        yield from (other for other in [_balanced(mix, found, limits["num_gpu"])] if other != mix)
        return
    for delta in (step, -step):
        value = min(max(getattr(mix, name) + delta, int(name.endswith("_slots"))), limits[name])
        moved = dataclasses.replace(mix, **{name: value})
        yield dataclasses.replace(moved, num_stream=min(moved.num_stream, limits["num_gpu"] - moved.num_gpu))
