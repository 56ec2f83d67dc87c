"""Why a run took another time than predicted: other tasks, other rates, another order, or stalls.

[Note: Attribution] A schedule with fixed task times is a max-plus system (Baccelli et al., *Synchronization and
Linearity*, 1992): a task starts when the last of its predecessors ends. So the period is a convex function ``T`` of the
durations, and never falls if one of them rises. The predicted durations, sharing included, give the predicted period.
Four steps lead from it to the measured period, and each one changes one thing:

    predicted  T(p; planned)    the simulated durations ``p``
    count      T(p; ran)        tasks that did not run take no time, unplanned tasks take their measured time
    rate       T(m; ran)        the measured durations ``m``
    order      T(m; as seen)    lanes run their tasks in the observed order, without dependencies that the run broke
    stall      measured         tasks began later than all this explains

The differences add up to the error exactly. Stalls are negative only by noise: a run cannot be faster than its order
allows. The effect of all rates is divided among kinds of tasks by Shapley's value (*A value for n-person games*, 1953;
for decompositions: Shorrocks, *J. Econ. Inequality* 11, 2013): the mean change of the period when a kind changes from
``p`` to ``m``, over all orders of kinds. Shapley values add up. A kind off the critical path explains nothing, and two
kinds of which each could hide the other share the effect.
"""

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal

import numpy as np

from planner.costs.resources import Price, Resource
from planner.schedule.schedule import Schedule
from planner.schedule.tasks import Lane, Op, Task
from planner.schedule.timeline import Seconds, Timeline
from planner.simulate.critical_path import critical_walk
from planner.simulate.kernel import simulate
from planner.simulate.machine import Simulation, system_of

# Iterations to simulate, and to skip at the beginning, until the effect of the start is gone.
_NUM, _FIRST = 9, 4


def replayed(schedule: Schedule) -> Callable[[Seconds], float]:
    """Return a function from durations of a schedule's tasks, float64[num_tasks] in seconds, to those per iteration.

    The schedule's arrays are built once, for many sets of durations.
    """
    free, shape = [Price(0.0, 0.0)] * schedule.num_tasks, (_NUM, schedule.num_tasks)
    system = system_of(schedule, free, dict.fromkeys(Resource, 1.0), _NUM)

    def period_s(durations_s: Seconds) -> float:
        start_s, end_s = simulate(dataclasses.replace(system, duration_s=np.tile(durations_s, _NUM)))
        timeline = Timeline(schedule, start_s.reshape(shape), end_s.reshape(shape))
        return (timeline.begin_s(_NUM - 1) - timeline.begin_s(_FIRST)) / (_NUM - 1 - _FIRST)

    return period_s


CauseKind = Literal["rate", "count", "order", "stall"]
TaskKind = tuple[Lane, Op]

# With n kinds there are 2 ** n replays. The kinds beyond these, whose times differ least, share one value.
_MOST_KINDS: Final = 8
# Tolerance for times that different threads measured.
_SIMULTANEOUS_S: Final = 5e-5


@dataclasses.dataclass(frozen=True, slots=True)
class Cause:
    """One reason for the difference between prediction and measurement.

    Attributes:
        kind: which assumption was wrong.
        seconds: its part of ``measured - predicted``; negative if it made the run faster.
        of: the kind of tasks whose rate it is; ``None`` if it is about several kinds, or about no rate.
    """

    kind: CauseKind
    seconds: float
    of: TaskKind | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class TasksOfKind:
    """Tasks of one kind in an iteration.

    Attributes:
        lane, op: their kind.
        num_planned, num_ran: number of tasks in the schedule and in the run.
        predicted_s, measured_s: sums of their durations; the predicted sum is over those that ran.
        explains_s: the part of the difference that their rate explains, if it is known for this kind alone.
    """

    lane: Lane
    op: Op
    num_planned: int
    num_ran: int
    predicted_s: float
    measured_s: float
    explains_s: float | None


@dataclasses.dataclass(frozen=True)
class Attribution:
    """The difference between prediction and measurement, divided among causes; see [Note: Attribution].

    Attributes:
        predicted_s, measured_s: iteration times.
        causes: parts of the difference, largest first, without zeros; they add up to it.
        tasks: by kind, those that explain most first.
        stalls_s: gaps on the measured critical path, in seconds, by the kind of task that began late; largest first.
        swapped: by lane, the number of tasks that ran before an earlier task of the schedule.
        num_broken: number of dependencies that the run broke.
    """

    predicted_s: float
    measured_s: float
    causes: tuple[Cause, ...]
    tasks: tuple[TasksOfKind, ...]
    stalls_s: dict[TaskKind, float]
    swapped: dict[Lane, int]
    num_broken: int


def lane_and_op(task: Task) -> TaskKind:
    """Return the kind of a task. Clipping counts as the step, because one quantity prices both."""
    return task.lane, Op.STEP if task.op is Op.CLIP else task.op


def middle(measured: Timeline, iterations: Sequence[int]) -> tuple[int, ...]:
    """Return the middle third of iterations by duration: as robust as a median, and their means add up.

    Raises:
        ValueError: there is none, or one was not measured.
    """
    if not iterations:
        raise ValueError("no steady iteration was measured; run more iterations")
    if not all(0 <= i < measured.num_iterations for i in iterations):
        raise ValueError(f"iterations {list(iterations)} are not among the {measured.num_iterations} measured ones")
    ordered = sorted(iterations, key=measured.period_s)
    outer = len(ordered) // 3
    return tuple(sorted(ordered[outer : len(ordered) - outer]))


def attribute(
    predicted: Simulation,
    measured: Timeline,
    iterations: Sequence[int],
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Attribution:
    """Divide the difference between a prediction and a run; see [Note: Attribution].

    Args:
        predicted: the simulated schedule.
        measured: a run of it, or of a schedule with more tasks (checkpoints) or fewer.
        iterations: iterations of the run to read (see :func:`middle`); each and its successor must be complete.
        progress: called with the number of replays done and the total.
    """
    run = _Run.of(measured, iterations)
    expected_s = _aligned(predicted, measured.schedule)
    ran = run.ran
    before_s = np.where(ran, np.where(np.isnan(expected_s), run.durations_s, expected_s), 0.0)
    expected_of_ran_s = np.where(ran, np.nan_to_num(expected_s), 0.0)
    rated_s, explained_s = _rates(measured.schedule, before_s, run.durations_s, ran, progress)
    seen, swapped, num_broken = _as_seen(run)
    # A cycle of several iterations is read as their mean, so replays may differ from it.
    planned_s = replayed(predicted.timeline.schedule)(_durations_s(predicted.timeline, predicted.iterations))
    ordered_s = rated_s[1]
    if seen is not None:
        schedule, order = seen
        ordered_s = replayed(schedule)(run.durations_s[order])
    measured_s = float(np.mean([measured.period_s(i) for i in iterations]))
    error_s = measured_s - predicted.period_s
    known_s = ordered_s - planned_s
    causes = [
        Cause("count", rated_s[0] - planned_s),
        *(Cause("rate", seconds, kind) for kind, seconds in explained_s.items()),
        Cause("order", ordered_s - rated_s[1]),
        Cause("stall", error_s - known_s),
    ]
    least_s = 1e-9 * max(measured_s, predicted.period_s)
    return Attribution(
        predicted.period_s,
        measured_s,
        tuple(sorted((c for c in causes if abs(c.seconds) > least_s), key=lambda c: -abs(c.seconds))),
        _by_kind(predicted.timeline.schedule, measured.schedule, expected_of_ran_s, run, explained_s),
        _stalls_s(measured, iterations),
        swapped,
        num_broken,
    )


@dataclasses.dataclass(frozen=True)
class _Run:
    """Means over iterations of a measured timeline, in seconds; ``start_s`` counts from the start of the iteration."""

    timeline: Timeline
    iterations: tuple[int, ...]
    durations_s: Seconds  # 0 where a task has not run
    start_s: Seconds  # NaN there
    ran: np.ndarray[tuple[int], np.dtype[np.bool_]]

    @classmethod
    def of(cls, timeline: Timeline, iterations: Sequence[int]) -> "_Run":
        chosen = list(iterations)
        starts_s = timeline.start_s[chosen] - np.array([[timeline.begin_s(i)] for i in chosen])
        present = ~np.isnan(starts_s)
        ran = present.any(axis=0)
        count = np.maximum(present.sum(axis=0), 1)
        start_s = np.where(ran, np.where(present, starts_s, 0.0).sum(axis=0) / count, np.nan)
        durations_s = np.nan_to_num(timeline.end_s[chosen] - timeline.start_s[chosen]).mean(axis=0)
        return cls(timeline, tuple(chosen), durations_s, start_s, ran)


def _durations_s(timeline: Timeline, iterations: Sequence[int]) -> Seconds:
    chosen = list(iterations)
    mean_s: Seconds = (timeline.end_s[chosen] - timeline.start_s[chosen]).mean(axis=0)
    return mean_s


def _aligned(predicted: Simulation, schedule: Schedule) -> Seconds:
    """Return the predicted durations of another schedule's tasks; NaN for tasks that the prediction lacks."""
    durations_s = _durations_s(predicted.timeline, predicted.iterations)
    planned = predicted.timeline.schedule.tasks
    if planned == schedule.tasks:
        return durations_s
    known_s = dict(zip(_identities(planned), durations_s.tolist(), strict=True))
    return np.array([known_s.get(key, math.nan) for key in _identities(schedule.tasks)])


def _identities(tasks: Sequence[Task]) -> list[tuple[object, ...]]:
    """Return keys of tasks that are unique and do not depend on the other tasks of a schedule."""
    seen: dict[tuple[object, ...], int] = defaultdict(int)
    result: list[tuple[object, ...]] = []
    for task in tasks:
        key = (task.lane, task.op, task.unit, task.micro_batch, task.tile, task.piece, task.stage)
        result.append((*key, seen[key]))
        seen[key] += 1
    return result


def _rates(
    schedule: Schedule,
    predicted_s: Seconds,
    measured_s: Seconds,
    ran: np.ndarray[tuple[int], np.dtype[np.bool_]],
    progress: Callable[[int, int], None],
) -> tuple[tuple[float, float], dict[TaskKind | None, float]]:
    """Return the effect of each kind of task's durations, by Shapley's value.

    Returns:
        The period with all durations as predicted, and as measured; and what each kind explains, largest difference in
        time first, where ``None`` stands for all kinds beyond the largest.
    """
    period_s = replayed(schedule)
    members: dict[TaskKind, list[int]] = defaultdict(list)
    for task in schedule.tasks:
        if ran[task.index]:
            members[lane_and_op(task)].append(task.index)
    differs_s = {kind: float(np.abs(measured_s - predicted_s)[tasks].sum()) for kind, tasks in members.items()}
    kinds = sorted((kind for kind, seconds in differs_s.items() if seconds > 0), key=lambda kind: -differs_s[kind])
    players: dict[TaskKind | None, list[int]] = {kind: members[kind] for kind in kinds[:_MOST_KINDS]}
    if len(kinds) > _MOST_KINDS:
        rest = kinds[_MOST_KINDS - 1 :]
        del players[kinds[_MOST_KINDS - 1]]
        players[None] = list(itertools.chain.from_iterable(members[kind] for kind in rest))
    num_all = 2 ** len(players)
    periods_s = np.empty(num_all)
    for coalition in range(num_all):
        durations_s = predicted_s.copy()
        for position, tasks in enumerate(players.values()):
            if coalition >> position & 1:
                durations_s[tasks] = measured_s[tasks]
        periods_s[coalition] = period_s(durations_s)
        progress(coalition + 1, num_all)
    return (float(periods_s[0]), float(periods_s[-1])), dict(zip(players, shapley(periods_s), strict=True))


def shapley(worth: Sequence[float] | Seconds) -> list[float]:
    """Return each player's Shapley value; the values add up to ``worth[-1] - worth[0]``.

    Args:
        worth: float[2 ** num_players], the worth of every coalition; player ``i`` is in those whose index has bit
            ``i``.
    """
    num_players = len(worth).bit_length() - 1
    weights = [
        math.factorial(size) * math.factorial(num_players - size - 1) / math.factorial(num_players)
        for size in range(num_players)
    ]
    return [
        math.fsum(
            weights[coalition.bit_count()] * float(worth[coalition | 1 << player] - worth[coalition])
            for coalition in range(len(worth))
            if not coalition >> player & 1
        )
        for player in range(num_players)
    ]


def _as_seen(run: _Run) -> tuple[tuple[Schedule, list[int]] | None, dict[Lane, int], int]:
    """Return the schedule in the observed order, swapped tasks by lane, and the number of broken dependencies.

    With the schedule come the planned indices of its tasks; there is none if nothing differs.
    """
    schedule, starts_s = run.timeline.schedule, _filled_starts_s(run)
    ends_s = starts_s + run.durations_s
    swapped: dict[Lane, int] = defaultdict(int)
    latest_s: dict[tuple[Lane, int], float] = defaultdict(lambda: -math.inf)
    for task in schedule.tasks:
        queue = task.lane, task.stage
        swapped[task.lane] += bool(starts_s[task.index] < latest_s[queue] - _SIMULTANEOUS_S)
        latest_s[queue] = max(latest_s[queue], float(starts_s[task.index]))
    period_s = float(np.mean([run.timeline.period_s(i) for i in run.iterations]))

    def held(task: Task, other: int, back_s: float) -> bool:
        if not (run.ran[task.index] and run.ran[other]):
            return True
        return bool(starts_s[task.index] >= ends_s[other] - back_s - _SIMULTANEOUS_S)

    after = [tuple(i for i in task.after if held(task, i, 0.0)) for task in schedule.tasks]
    previous = [tuple(i for i in task.after_previous if held(task, i, period_s)) for task in schedule.tasks]
    num_broken = sum(
        len(task.after) + len(task.after_previous) - len(one) - len(other)
        for task, one, other in zip(schedule.tasks, after, previous, strict=True)
    )
    found = {lane: count for lane, count in swapped.items() if count}
    if not found and not num_broken:
        return None, {}, 0
    order = sorted(range(len(schedule.tasks)), key=lambda i: (starts_s[i], i)) if found else list(range(len(after)))
    where = {old: new for new, old in enumerate(order)}
    tasks = [
        dataclasses.replace(
            schedule.tasks[old],
            index=new,
            after=tuple(where[i] for i in after[old] if where[i] < new),
            after_previous=tuple(where[i] for i in previous[old]),
        )
        for new, old in enumerate(order)
    ]
    return (Schedule(tuple(tasks)), order), found, num_broken


def _filled_starts_s(run: _Run) -> Seconds:
    """Return start times in seconds; a task that did not run starts when its predecessors have ended."""
    starts_s = run.start_s.copy()
    last: dict[tuple[Lane, int], float] = defaultdict(float)
    for task in run.timeline.schedule.tasks:
        queue = task.lane, task.stage
        if not run.ran[task.index]:
            ready_s = (float(starts_s[i] + run.durations_s[i]) for i in task.after)
            starts_s[task.index] = max([last[queue], *ready_s])
        last[queue] = max(last[queue], float(starts_s[task.index] + run.durations_s[task.index]))
    return starts_s


def _by_kind(
    planned: Schedule, schedule: Schedule, predicted_s: Seconds, run: _Run, explained_s: Mapping[TaskKind | None, float]
) -> tuple[TasksOfKind, ...]:
    num_planned: dict[TaskKind, int] = defaultdict(int)
    for task in planned.tasks:
        num_planned[lane_and_op(task)] += 1
    members: dict[TaskKind, list[int]] = {kind: [] for kind in num_planned}
    for task in schedule.tasks:
        ran = members.setdefault(lane_and_op(task), [])
        if run.ran[task.index]:
            ran.append(task.index)
    found = [
        TasksOfKind(
            *kind,
            num_planned=num_planned[kind],
            num_ran=len(tasks),
            predicted_s=float(predicted_s[tasks].sum()),
            measured_s=float(run.durations_s[tasks].sum()),
            explains_s=explained_s.get(kind),
        )
        for kind, tasks in members.items()
    ]
    return tuple(sorted(found, key=lambda t: (-abs(t.explains_s or 0.0), -abs(t.measured_s - t.predicted_s))))


def _stalls_s(measured: Timeline, iterations: Sequence[int]) -> dict[TaskKind, float]:
    """Return the mean length of gaps on the critical path, in seconds, by the kind of task after the gap.

    The path is walked back from the end of the run, not from the end of each iteration: where it has passed through an
    iteration or two, it repeats itself, and the work on it is the work of the iteration's critical circuit.
    """
    tasks = measured.schedule.tasks
    windows_s = [(measured.begin_s(i), measured.begin_s(i) + measured.period_s(i)) for i in iterations]
    found: dict[TaskKind, float] = defaultdict(float)
    for later, earlier in itertools.pairwise(critical_walk(measured)):
        gap_s = float(measured.end_s[earlier]), float(measured.start_s[later])
        found[lane_and_op(tasks[later[1]])] += sum(
            max(0.0, min(gap_s[1], end_s) - max(gap_s[0], begin_s)) for begin_s, end_s in windows_s
        ) / len(windows_s)
    ordered = sorted(found.items(), key=lambda item: -item[1])
    return {kind: seconds for kind, seconds in ordered if seconds > 0}
