"""Timelines as Chrome traces, which Perfetto (ui.perfetto.dev) opens.

The format is Google's "Trace Event Format": a JSON object whose ``traceEvents`` are slices (``X``), counters (``C``)
and names (``M``); times are microseconds.
"""

import gzip
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hwprofiles.files import write_whole
from planner.schedule import Lane, Task
from planner.timeline import Span, Timeline

Event = dict[str, Any]

_COPY_LANES = (
    Lane.H2D,
    Lane.D2H,
    Lane.STATE_IN,
    Lane.STATE_OUT,
    Lane.COLLECTIVE,
    Lane.ACTIVATION_IN,
    Lane.ACTIVATION_OUT,
    Lane.NVME_READ,
    Lane.NVME_WRITE,
    Lane.NVME_STATE_IN,
    Lane.NVME_STATE_OUT,
)
_THREADS = {lane: number for number, lane in enumerate(Lane, start=1)}


def chrome_trace(timelines: Mapping[str, Timeline]) -> dict[str, Any]:
    """Return a trace with one process per timeline, one track per lane, and counters of memory and traffic.

    Args:
        timelines: by the name of their process, such as ``predicted`` and ``measured``. Each is shown from its own
            first start on.
    """
    events: list[Event] = []
    for process, (name, timeline) in enumerate(timelines.items(), start=1):
        events += _names(process, name, timeline)
        spans = sorted(timeline.spans, key=lambda span: (span.start_s, span.iteration, span.task))
        zero_s = spans[0].start_s if spans else 0.0
        events += [_slice(process, span, timeline.schedule.tasks[span.task], zero_s) for span in spans]
        events += _memory(process, timeline, zero_s)
        events += _traffic(process, timeline, spans, zero_s)
    return {"displayTimeUnit": "ms", "traceEvents": events}


def write_trace(path: Path, trace: Mapping[str, Any]) -> None:
    """Write a trace whole or not at all; compressed if the name ends in ``.gz``. Equal traces are equal bytes.

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """
    data = json.dumps(trace, separators=(",", ":"), allow_nan=False).encode()
    if path.suffix == ".gz":
        data = gzip.compress(data, mtime=0)
    write_whole(path, data)


def _names(process: int, name: str, timeline: Timeline) -> Iterator[Event]:
    yield _metadata(process, 0, "process_name", name=name)
    yield _metadata(process, 0, "process_sort_index", sort_index=process)
    used = {task.lane for task in timeline.schedule.tasks}
    for lane in Lane:
        if lane in used:
            yield _metadata(process, _THREADS[lane], "thread_name", name=lane.value)
            yield _metadata(process, _THREADS[lane], "thread_sort_index", sort_index=_THREADS[lane])


def _metadata(process: int, thread: int, what: str, **args: Any) -> Event:
    return {"ph": "M", "pid": process, "tid": thread, "name": what, "args": args}


def _slice(process: int, span: Span, task: Task, zero_s: float) -> Event:
    start_ns, end_ns = _ns(span.start_s - zero_s), _ns(span.end_s - zero_s)
    return {
        "ph": "X",
        "pid": process,
        "tid": _THREADS[task.lane],
        "name": task.name,
        "cat": task.phase.value,
        "ts": start_ns / 1000,
        "dur": (end_ns - start_ns) / 1000,
        "args": {
            "iteration": span.iteration,
            "phase": task.phase.value,
            "unit": task.unit,
            "bytes": task.num_bytes,
            "params": task.num_params,
        },
    }


def _memory(process: int, timeline: Timeline, zero_s: float) -> Iterator[Event]:
    """Yield one counter per tier, with one series per class; a buffer whose task never ran is left out."""
    changes: dict[str, dict[int, dict[str, int]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(int)))
    starts_s, ends_s = timeline.start_s - zero_s, timeline.end_s - zero_s
    for buffer in timeline.schedule.buffers:
        tier = changes[buffer.tier]
        if buffer.first is None or buffer.last is None:
            tier[0][buffer.memory_class] += buffer.num_bytes
            continue
        carried = 1 if buffer.last < buffer.first else 0
        for iteration in range(timeline.num_iterations):
            start_s = float(starts_s[iteration, buffer.first])
            if not math.isnan(start_s):  # it ran
                tier[_ns(start_s)][buffer.memory_class] += buffer.num_bytes
                later = iteration + carried
                end_s = float(ends_s[later, buffer.last]) if later < timeline.num_iterations else start_s
                if end_s > start_s:
                    tier[_ns(end_s)][buffer.memory_class] -= buffer.num_bytes
    for tier_name, by_time in sorted(changes.items()):
        held = dict.fromkeys(sorted({name for change in by_time.values() for name in change}), 0)
        for time_ns, change in sorted(by_time.items()):
            for name, num_bytes in change.items():
                held[name] += num_bytes
            yield _counter(process, f"{tier_name} memory (bytes)", time_ns, dict(held))


def _traffic(process: int, timeline: Timeline, spans: list[Span], zero_s: float) -> Iterator[Event]:
    """Yield one counter per copy lane: the average GB/s of what it copies."""
    rates: dict[Lane, dict[int, float]] = {lane: {} for lane in _COPY_LANES}
    for span in spans:  # sorted by start, so that the next copy overwrites the 0 at the end of the last
        task = timeline.schedule.tasks[span.task]
        start_ns, end_ns = _ns(span.start_s - zero_s), _ns(span.end_s - zero_s)
        if task.lane in rates and task.num_bytes and end_ns > start_ns:
            rates[task.lane][start_ns] = round(task.num_bytes / (end_ns - start_ns), 3)  # bytes per ns are GB/s
            rates[task.lane][end_ns] = 0.0
    for lane, by_time in rates.items():
        for time_ns, rate in by_time.items():
            yield _counter(process, f"{lane} (GB/s)", time_ns, {"GB/s": rate})


def _counter(process: int, name: str, time_ns: int, values: Mapping[str, float]) -> Event:
    return {"ph": "C", "pid": process, "tid": 0, "name": name, "ts": time_ns / 1000, "args": dict(values)}


def _ns(time_s: float) -> int:
    return round(time_s * 1e9)
