"""The times of a run with checkpoints, from its timeline."""

import dataclasses
from collections import defaultdict
from collections.abc import Iterable

from planner.checkpoints.lowering import Run
from planner.schedule.tasks import Lane, Op
from planner.schedule.timeline import Timeline


@dataclasses.dataclass(frozen=True)
class RunTimes:
    """Times of a run with checkpoints, in seconds.

    Attributes:
        end_to_end_s: until everything was computed and written.
        over_s: until checkpoints were also read again.
        training_s: until everything was computed.
        blocked_s: for each checkpoint, how long training tasks waited for it that could have run.
        latency_s: for each checkpoint, from the time when its state was complete until it was written; in a pipeline,
            of the slowest stage.
        busy_s: for each checkpoint, from that time until it was also read again.
    """

    end_to_end_s: float
    over_s: float
    training_s: float
    blocked_s: tuple[float, ...]
    latency_s: tuple[float, ...]
    busy_s: tuple[float, ...]


def times(run: Run, timeline: Timeline) -> RunTimes:
    """Return the times of a run whose timeline has the whole run as one iteration."""
    start_s, end_s = timeline.start_s[0].tolist(), timeline.end_s[0].tolist()
    waits: dict[int, list[tuple[float, float]]] = defaultdict(list)
    begun_s: dict[tuple[int, int], float] = {}  # by checkpoint and stage
    latency_s: dict[int, float] = defaultdict(float)
    busy_s: dict[int, float] = defaultdict(float)
    lane_end_s: dict[tuple[int, Lane], float] = defaultdict(float)
    for task, number in zip(run.schedule.tasks, run.checkpoint, strict=True):
        mine = [i for i in task.after if run.checkpoint[i] >= 0]
        others_s = max((end_s[i] for i in task.after if run.checkpoint[i] < 0), default=0.0)
        if number < 0:
            ready_s = max(others_s, lane_end_s[task.stage, task.lane])
            if mine and start_s[task.index] > ready_s:
                last = max(mine, key=lambda i: (end_s[i], i))
                waits[run.checkpoint[last]].append((ready_s, start_s[task.index]))
        elif task.op is not Op.GATE:
            took_s = end_s[task.index] - begun_s.setdefault((number, task.stage), others_s)
            busy_s[number] = max(busy_s[number], took_s)
            if task.lane is not Lane.RETENTION:
                latency_s[number] = max(latency_s[number], took_s)
        lane_end_s[task.stage, task.lane] = end_s[task.index]
    numbers = range(run.num_checkpoints)
    return RunTimes(
        end_to_end_s=max(
            (e for e, t in zip(end_s, run.schedule.tasks, strict=True) if t.lane is not Lane.RETENTION), default=0.0
        ),
        over_s=max(end_s, default=0.0),
        training_s=max((e for e, number in zip(end_s, run.checkpoint, strict=True) if number < 0), default=0.0),
        blocked_s=tuple(_union_s(waits[number]) for number in numbers),
        latency_s=tuple(latency_s[number] for number in numbers),
        busy_s=tuple(busy_s[number] for number in numbers),
    )


def _union_s(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the time that at least one interval covers."""
    total_s, covered_s = 0.0, 0.0
    for begin_s, end_s in sorted(intervals):
        total_s += max(end_s - max(begin_s, covered_s), 0.0)
        covered_s = max(covered_s, end_s)
    return total_s
