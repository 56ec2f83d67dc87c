"""Scores of decisions: the simulated time, and the memory that is missing."""

import collections
import contextlib
import dataclasses
import gc
import math
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Self

from planner.choices.variants import Variant
from planner.costs.model import CostModel
from planner.decisions import Decisions, Precision
from planner.graph import Unit
from planner.lowering import lower, stages
from planner.schedule.arrays import Arrays
from planner.schedule.schedule import Schedule
from planner.schedule.tasks import Lane, Tier
from planner.simulate.machine import Simulation, run_until_steady
from planner.simulate.prediction import Prediction, always_held, capacities, needs_bytes, predict

Progress = Callable[["Candidate", int], None]
Key = Callable[["Candidate"], tuple[float, ...]]

ENDLESS = 10**9
# A gain of this fraction is worth further simulations.
_WORTH = 1e-3
# The factor on the patience while the best plan is far from the lower bound.
_LONGER = 2
# Iterations of at least the first number of micro-batches are scored from iterations of the other two numbers.
MANY, _FEW = 16, (6, 4)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Decisions with their score.

    Attributes:
        decisions: what was tried.
        iteration_s: predicted time; infinite if it was rejected before simulating.
        missing_bytes: by tier, how much memory is missing (empty if it fits).
        overload: the sum of ``missing_bytes`` as fractions of capacity; plus 1 if it was rejected before simulating.
        traffic_bytes: bytes that cross links and host memory in an iteration, hidden or not.
        peak_bytes: by tier, the peak of one device, or of one node; empty without a simulation.
        filled: the same as a fraction of the capacity; without a simulation, only bytes that are always held.
        busy_s: seconds that each lane is occupied.
    """

    decisions: Decisions
    iteration_s: float
    missing_bytes: dict[Tier, int]
    overload: float = 0.0
    traffic_bytes: int = 0
    peak_bytes: dict[Tier, int] = dataclasses.field(default_factory=dict)
    filled: dict[Tier, float] = dataclasses.field(default_factory=dict)
    busy_s: dict[Lane, float] = dataclasses.field(default_factory=dict)

    @property
    def fits(self) -> bool:
        """Whether every tier holds its peak."""
        return not self.missing_bytes

    @property
    def order(self) -> tuple[float, float]:
        """Sort key: candidates that fit come first, then faster ones, or those that lack less of a tier."""
        return (self.overload, self.iteration_s)


class _Lowered:
    """A cache of lowered schedules, as arrays, of at most ``most_bytes``.

    The points of a study differ in their machine, and their searches try the same decisions: the same schedule at other
    prices.
    """

    def __init__(self, most_bytes: int) -> None:
        self._left_bytes = most_bytes
        self._arrays: collections.OrderedDict[Hashable, tuple[object, Arrays, str]] = collections.OrderedDict()

    def get(self, key: Hashable, owner: object, make: Callable[[], Schedule]) -> Schedule:
        """Return a schedule from the cache, or make it.

        Args:
            key: identifies the schedule; contains the ``id`` of ``owner``.
            owner: an object that the cache keeps alive, so that its ``id`` stays unique.
            make: makes the schedule.
        """
        if key in self._arrays:
            self._arrays.move_to_end(key)
            _, arrays, name = self._arrays[key]
            return Schedule.deferred(arrays, lambda: ((made := make()).tasks, made.buffers), name)
        made = make()
        self._arrays[key] = owner, made.arrays, made.description
        self._left_bytes -= made.arrays.nbytes
        while self._left_bytes < 0:
            _, (_, arrays, _) = self._arrays.popitem(last=False)
            self._left_bytes += arrays.nbytes
        return made


_LOWERED = _Lowered(256 << 20)


Lower = Callable[..., Schedule]
"""Lowers decisions, with the arguments of :func:`planner.lowering.lower`."""


class Scorer:
    """Scores decisions by simulating their schedule, each once.

    [Note: Few micro-batches] Between the first and the last micro-batches of an iteration, one takes as long as the
    next. So if a search need not be exact (``whole=False``), an iteration of many is scored from two iterations of few:
    the difference of their times is that of the micro-batches by which they differ. Lowering 64 micro-batches takes six
    times as long. The memory is that of the larger one. What a search returns is then simulated whole, and the search
    is made again, whole, where that differs (:func:`planner.plan.competition.compete`).

    Attributes:
        cost: prices and machine.
        num_simulations: schedules simulated so far.
        deadline_s: the end of the search by the monotonic clock; ``None`` if the budget is a number of simulations.
    """

    def __init__(
        self,
        units: tuple[Unit, ...],
        seq_len: int,
        cost: CostModel,
        deadline_s: float | None = None,
        lower: Lower = lower,
        *,
        whole: bool = True,
    ) -> None:
        self.deadline_s = deadline_s
        self._whole = whole
        self.num_simulations = 0
        self.set_patience()
        self._units, self._seq_len, self._lower = units, seq_len, lower
        self.cost = cost
        self._seen: dict[str, Candidate] = {}
        self._costs: dict[Precision, tuple[tuple[Unit, ...], CostModel]] = {cost.precision: (units, cost)}
        self._keys: dict[int, tuple[Decisions, str]] = {}  # by identity, of objects that stay alive in here

    @classmethod
    def of(cls, variant: Variant, deadline_s: float | None = None, lower: Lower = lower, *, whole: bool = True) -> Self:
        """Return a scorer for a variant of a request."""
        return cls(variant.setup.units, variant.request.seq_len, variant.cost, deadline_s, lower, whole=whole)

    def whole(self) -> "Scorer":
        """Return a scorer of whole iterations for the same work, with a count of its own and no end."""
        return Scorer(self._units, self._seq_len, self.cost, lower=self._lower)

    def spent(self, max_simulations: int = ENDLESS) -> bool:
        """Return whether the budget is used up."""
        late = self.deadline_s is not None and time.monotonic() >= self.deadline_s
        longer = 1 if self._best <= (0.0, self._far_s) else _LONGER
        idle = self.num_simulations - self._gained_at >= self._patience * longer
        enough = self._best <= (0.0, self._enough_s)
        return late or idle or enough or self.num_simulations >= max_simulations

    def set_patience(self, patience: int = ENDLESS, enough_s: float = -math.inf, far_s: float = math.inf) -> None:
        """From now on, the budget also counts as used up when further simulations are not worth their time.

        Args:
            patience: after so many simulations in a row without a gain.
            enough_s: or when a candidate fits and is as fast as this.
            far_s: the patience is twice as long until a candidate is as fast as this.
        """
        self._patience, self._gained_at = patience, self.num_simulations
        self._enough_s, self._far_s = enough_s, far_s
        self._best = (math.inf, math.inf)

    def schedule(self, decisions: Decisions) -> Schedule:
        """Lower decisions to their schedule."""
        return self._lower(self._units, decisions, asynchronous=self.cost.asynchronous)

    def score(self, decisions: Decisions) -> Candidate:
        """Return the candidate of decisions: with a predicted time, or rejected because memory is missing."""
        if (known := self._keys.get(id(decisions))) is None:
            known = self._keys[id(decisions)] = decisions, decisions.model_dump_json()
        _, key = known
        if key not in self._seen:
            self._seen[key] = found = self._extrapolated(decisions) or self._scored(decisions, key)
            overload, iteration_s = self._best
            if found.order < (overload, iteration_s * (1 - _WORTH)):
                self._best, self._gained_at = found.order, self.num_simulations
        return self._seen[key]

    def predict(self, decisions: Decisions) -> Prediction:
        """Return the full prediction for decisions, simulated until the iterations repeat."""
        in_stages = decisions.pipeline_parallel > 1  # whose prices have warnings of no other decisions
        cost = CostModel.of(self.cost.profile, self._units, decisions) if in_stages else self._priced(decisions)
        simulation = run_until_steady(self.schedule(decisions), cost)
        return predict(self._units, self._seq_len, decisions, cost, simulation)

    def _priced(self, decisions: Decisions) -> CostModel:
        """Return prices for decisions; units of a pipeline are those of its stages, mostly the same ones."""
        units = stages(decisions, self._units) if decisions.pipeline_parallel > 1 else self._units
        known, cost = self._costs.get(decisions.precision, ((), self.cost))
        if known != units:
            cost = CostModel(self.cost.profile, units, decisions)
            self._costs[decisions.precision] = units, cost
        return cost

    def _extrapolated(self, decisions: Decisions) -> Candidate | None:
        """Return the candidate of decisions with many micro-batches from few; see [Note: Few micro-batches]."""
        if not self._shortens(decisions):
            return None
        begun = self.num_simulations
        shorter = [decisions.model_copy(update={"num_micro_batches": few}) for few in _FEW]
        more, fewer = (self._scored(few, few.model_dump_json()) for few in shorter)
        self.num_simulations = min(self.num_simulations, begun + 1)
        times = (decisions.num_micro_batches - _FEW[0]) / (_FEW[0] - _FEW[1])

        def at_count(of_more: float, of_fewer: float) -> float:
            return of_more if of_more == math.inf else of_more + times * (of_more - of_fewer)

        return dataclasses.replace(
            more,
            decisions=decisions,
            iteration_s=at_count(more.iteration_s, fewer.iteration_s),
            traffic_bytes=round(at_count(more.traffic_bytes, fewer.traffic_bytes)),
            busy_s={lane: at_count(busy_s, fewer.busy_s.get(lane, 0.0)) for lane, busy_s in more.busy_s.items()},
        )

    def _shortens(self, decisions: Decisions) -> bool:
        return not self._whole and decisions.num_micro_batches >= MANY and decisions.pipeline_parallel == 1

    def exact(self, candidate: Candidate) -> Candidate:
        """Return the candidate, simulated whole."""
        decisions = candidate.decisions
        return self._scored(decisions, decisions.model_dump_json()) if self._shortens(decisions) else candidate

    def _scored(self, decisions: Decisions, key: str) -> Candidate:
        """Simulate the schedule of decisions, which as JSON are ``key``."""
        units, asynchronous = self._units, self.cost.asynchronous
        schedule = _LOWERED.get((id(units), asynchronous, key), units, lambda: self.schedule(decisions))
        cost = self._priced(decisions)
        capacity = capacities(cost)
        held = always_held(schedule, cost)
        # A tier that the machine does not have is refused by name when its tasks are priced.
        missing = {tier: n - capacity[tier] for tier, n in held.items() if n > capacity[tier] > 0}
        if missing:  # no need to simulate; only a lower bound is missing, so simulated candidates come first
            filled = {tier: num_bytes / capacity[tier] for tier, num_bytes in held.items() if num_bytes}
            return Candidate(decisions, float("inf"), missing, 1 + _overload(missing, capacity), filled=filled)
        self.num_simulations += 1
        return candidate_of(decisions, run_until_steady(schedule, cost, quick=True), cost)


def candidate_of(decisions: Decisions, simulation: Simulation, cost: CostModel) -> Candidate:
    """Return the candidate of decisions whose schedule was simulated."""
    timeline, steady, capacity = simulation.timeline, simulation.steady, capacities(cost)
    peaks = needs_bytes(timeline, steady, cost)
    missing = {tier: peak - capacity[tier] for tier, peak in peaks.items() if peak > capacity[tier]}
    return Candidate(
        decisions,
        simulation.period_s,
        missing,
        overload=_overload(missing, capacity),
        traffic_bytes=traffic_bytes(timeline.schedule, decisions),
        peak_bytes=peaks,
        filled={tier: peak / capacity[tier] for tier, peak in peaks.items() if peak},
        busy_s=timeline.busy_s(steady),
    )


def best_of(candidates: Iterable[Candidate]) -> Candidate:
    """Return the fastest candidate that fits, or the one that lacks least."""
    return min(candidates, key=lambda candidate: candidate.order)


_has_frozen = threading.Event()  # kept, as counting them takes 50 ms where all imported modules are frozen


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Switch off the search for reference cycles: schedules have none, and it would double the time.

    Objects made meanwhile count as old afterwards, so that the next collection does not go through all of them.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            if _has_frozen.is_set() or gc.get_freeze_count():  # objects that the program froze stay frozen
                _has_frozen.set()
            else:
                gc.freeze()
                gc.unfreeze()
            gc.enable()


def _overload(missing_bytes: dict[Tier, int], capacity_bytes: dict[Tier, int]) -> float:
    return sum(num_bytes / capacity_bytes[tier] for tier, num_bytes in missing_bytes.items())


def traffic_bytes(schedule: Schedule, decisions: Decisions) -> int:
    """Return the bytes that cross links and host memory in an iteration, hidden or not."""
    arrays = schedule.arrays
    splits = decisions.split_masters is not None
    update_bytes = decisions.precision.update_bytes_per_param(decisions.optimizer, splits=splits)
    moved_bytes, num_updated = arrays.moved
    return moved_bytes + round(update_bytes * num_updated)
