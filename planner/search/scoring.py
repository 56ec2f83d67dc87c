"""Scoring decisions: the simulator's time, and the memory that is lacking."""

import collections
import contextlib
import dataclasses
import gc
import math
import time
from collections.abc import Callable, Hashable, Iterable, Iterator

from planner.costs.model import CostModel
from planner.decisions import Decisions
from planner.lowering import lower
from planner.optimizers import OPTIMIZERS
from planner.schedule.arrays import Arrays
from planner.schedule.schedule import Schedule
from planner.schedule.tasks import Lane, Tier
from planner.simulate.machine import run_until_steady
from planner.simulate.prediction import Prediction, Workload, always_held, capacities, needs_bytes, predict

Progress = Callable[["Candidate", int], None]
Key = Callable[["Candidate"], tuple[float, ...]]

ENDLESS = 10**9
# A candidate that is faster by this part is worth looking for more.
_WORTH = 1e-3
# How many times longer the patience is while what was found is far from what is possible.
_LONGER = 2


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


class _Lowered:
    """Schedules that were simulated last, as arrays, up to so many bytes.

    Points of a study differ in their machine, and searches for them come by the same decisions again and again: what
    is simulated there is the same work at other prices.
    """

    def __init__(self, most_bytes: int) -> None:
        self._left_bytes = most_bytes
        self._arrays: collections.OrderedDict[Hashable, tuple[object, Arrays, str]] = collections.OrderedDict()

    def get(self, key: Hashable, owner: object, make: Callable[[], Schedule]) -> Schedule:
        """Return a schedule that was made before, or make it.

        Args:
            key: of the schedule, with the identity of ``owner``, which is kept from being another's.
            owner: see ``key``.
            make: makes it.
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
        self.be_patient()
        self._workload = workload
        self.cost = cost
        self._seen: dict[str, Candidate] = {}
        self._keys: dict[int, tuple[Decisions, str]] = {}  # by identity, of objects that are kept from being others

    def spent(self, max_simulations: int = ENDLESS) -> bool:
        """Return whether a budget is used up."""
        late = self.deadline_s is not None and time.monotonic() >= self.deadline_s
        longer = 1 if self._best <= (0.0, self._far_s) else _LONGER
        idle = self.num_simulations - self._gained_at >= self._patience * longer
        enough = self._best <= (0.0, self._enough_s)
        return late or idle or enough or self.num_simulations >= max_simulations

    def be_patient(self, patience: int = ENDLESS, enough_s: float = -math.inf, far_s: float = math.inf) -> None:
        """From now on a budget is used up too when looking further is not worth the time.

        Args:
            patience: so many simulations in a row have gained next to nothing.
            enough_s: or something has been found that fits and is as fast.
            far_s: until something is as fast as this, the patience is twice as long: there is more to be found.
        """
        self._patience, self._gained_at = patience, self.num_simulations
        self._enough_s, self._far_s = enough_s, far_s
        self._best = (math.inf, math.inf)

    def schedule(self, decisions: Decisions) -> Schedule:
        """Return the schedule of some decisions."""
        return lower(self._workload.units, decisions, asynchronous=self.cost.asynchronous)

    def score(self, decisions: Decisions) -> Candidate:
        """Return decisions with their predicted time, or rejected for lack of memory."""
        if (known := self._keys.get(id(decisions))) is None:
            known = self._keys[id(decisions)] = decisions, decisions.model_dump_json()
        _, key = known
        if key not in self._seen:
            units, asynchronous = self._workload.units, self.cost.asynchronous
            schedule = _LOWERED.get((id(units), asynchronous, key), units, lambda: self.schedule(decisions))
            self._seen[key] = found = self._score(decisions, schedule)
            overload, iteration_s = self._best
            if found.order < (overload, iteration_s * (1 - _WORTH)):
                self._best, self._gained_at = found.order, self.num_simulations
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

    def _score(self, decisions: Decisions, schedule: Schedule) -> Candidate:
        cost = self._priced(decisions)
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
        peaks = needs_bytes(timeline, steady, cost)
        missing = {tier: peak - capacity[tier] for tier, peak in peaks.items() if peak > capacity[tier]}
        filled = {tier: peak / capacity[tier] for tier, peak in peaks.items() if peak}
        overload, moved_bytes = _overload(missing, capacity), traffic_bytes(schedule, decisions)
        return Candidate(
            decisions, timeline.period_s(steady), missing, overload, moved_bytes, filled, timeline.busy_s(steady)
        )


def best_of(candidates: Iterable[Candidate]) -> Candidate:
    """Return the candidate that fits and is fastest, or lacks least."""
    return min(candidates, key=lambda candidate: candidate.order)


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Keep Python from looking for cycles among the tasks of schedules: there are none, and it doubles the time.

    Objects that were made meanwhile count as old afterwards, so that the next collection does not go through them all.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            if not gc.get_freeze_count():  # what a program has frozen itself stays so
                gc.freeze()
                gc.unfreeze()
            gc.enable()


def _overload(missing_bytes: dict[Tier, int], capacity_bytes: dict[Tier, int]) -> float:
    return sum(num_bytes / capacity_bytes[tier] for tier, num_bytes in missing_bytes.items())


def traffic_bytes(schedule: Schedule, decisions: Decisions) -> int:
    """Return the bytes that cross links and host memory in an iteration, hidden or not."""
    arrays = schedule.arrays
    update_bytes = OPTIMIZERS[decisions.optimizer].update_bytes_per_param
    moved_bytes, num_updated = arrays.moved
    return moved_bytes + update_bytes * num_updated
