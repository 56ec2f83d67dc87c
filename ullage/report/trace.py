"""Timelines as Chrome traces, which Perfetto (ui.perfetto.dev) opens.

The format is Google's "Trace Event Format": a JSON object whose ``traceEvents`` are slices (``X``), counters (``C``)
and names (``M``); times are microseconds. Every timeline is a process. Its tracks are the phases, then the lanes. If
executions of one lane overlap, as they may in a measured run, the lane gets several tracks, because slices of one
track must nest. Counters are memory by class, GB/s of every link, and busy processors. In a pipeline, tracks and
counters name their stage.
"""

import dataclasses
import gzip
import itertools
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hwprofiles.files import write_whole
from planner.schedule.series import PROCESSORS, Flow, Series, link_of, series
from planner.schedule.tasks import Lane, Task, Tier
from planner.schedule.timeline import Span, Timeline

Event = dict[str, Any]

_PHASES_TRACK = 1  # track 0 holds what belongs to the whole process


def chrome_trace(timelines: Mapping[str, Timeline]) -> dict[str, Any]:
    """Return a trace with one process per timeline, one track per concurrent flow, and counters.

    Args:
        timelines: by the name of their process, such as ``predicted`` and ``measured``. Each begins at zero.
    """
    events: list[Event] = []
    for process, (name, timeline) in enumerate(timelines.items(), start=1):
        spans = sorted(timeline.spans, key=lambda span: (span.start_s, span.end_s, span.iteration, span.task))
        zero_s = spans[0].start_s if spans else 0.0
        events += [_metadata(process, 0, "process_name", name=name)]
        events += [_metadata(process, 0, "process_sort_index", sort_index=process)]
        events += _phases(process, timeline, zero_s)
        events += _flows(process, timeline, spans, zero_s)
        events += _memory(process, timeline, zero_s)
        events += _traffic(process, timeline, spans, zero_s)
        events += _busy(process, timeline, spans, zero_s)
    return {"displayTimeUnit": "ms", "traceEvents": events}


def write_trace(path: Path, trace: Mapping[str, Any]) -> None:
    """Write a trace atomically; compressed if the name ends in ``.gz``. Equal traces are equal bytes.

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """
    data = json.dumps(trace, separators=(",", ":"), allow_nan=False).encode()
    if path.suffix == ".gz":
        data = gzip.compress(data, mtime=0)
    write_whole(path, data)


def _metadata(process: int, track: int, what: str, **args: Any) -> Event:
    return {"ph": "M", "pid": process, "tid": track, "name": what, "args": args}


def _track(process: int, track: int, name: str) -> Iterator[Event]:
    yield _metadata(process, track, "thread_name", name=name)
    yield _metadata(process, track, "thread_sort_index", sort_index=track)


def _phases(process: int, timeline: Timeline, zero_s: float) -> Iterator[Event]:
    """Yield the track of the phases of all iterations that ran to their end."""
    yield from _track(process, _PHASES_TRACK, "phases")
    for iteration in range(timeline.num_iterations):
        if np.isnan(timeline.start_s[iteration]).any():
            continue
        for stretch in timeline.stretches(iteration):
            start_ns, end_ns = _ns(stretch.start_s - zero_s), _ns(stretch.end_s - zero_s)
            args = {"iteration": iteration}
            yield _slice(process, _PHASES_TRACK, stretch.phase.value, stretch.phase.value, start_ns, end_ns, args)


def _flows(process: int, timeline: Timeline, spans: Sequence[Span], zero_s: float) -> Iterator[Event]:
    """Yield every execution on the first free track of its lane; a lane without overlaps has one track."""
    tasks = timeline.schedule.tasks
    by_lane: dict[tuple[int, Lane], list[Span]] = defaultdict(list)
    for span in spans:
        by_lane[tasks[span.task].stage, tasks[span.task].lane].append(span)
    track = _PHASES_TRACK
    for stage, lane in itertools.product(range(timeline.schedule.num_stages), Lane):
        free_ns: list[int] = []  # when each track of the lane becomes free
        slices = []
        for span in by_lane.get((stage, lane), ()):
            start_ns, end_ns = _ns(span.start_s - zero_s), _ns(span.end_s - zero_s)
            number = next((i for i, ns in enumerate(free_ns) if ns <= start_ns), len(free_ns))
            free_ns[number : number + 1] = [end_ns]
            slices.append(_task(process, track + 1 + number, tasks[span.task], span.iteration, start_ns, end_ns))
        for number in range(len(free_ns)):
            track += 1
            name = f"{lane} {number + 1}" if number else lane.value
            yield from _track(process, track, name + _of_stage(timeline, stage))
        yield from slices


def _of_stage(timeline: Timeline, stage: int) -> str:
    return f" of stage {stage}" if timeline.schedule.num_stages > 1 else ""


def _task(process: int, track: int, task: Task, iteration: int, start_ns: int, end_ns: int) -> Event:
    args = {
        "iteration": iteration,
        "phase": task.phase.value,
        "unit": task.unit,
        "bytes": task.num_bytes,
        "params": task.num_params,
    }
    return _slice(process, track, task.name, task.phase.value, start_ns, end_ns, args)


def _slice(
    process: int, track: int, name: str, category: str, start_ns: int, end_ns: int, args: Mapping[str, Any]
) -> Event:
    return {
        "ph": "X",
        "pid": process,
        "tid": track,
        "name": name,
        "cat": category,
        "ts": start_ns / 1000,
        "dur": (end_ns - start_ns) / 1000,
        "args": dict(args),
    }


def _memory(process: int, timeline: Timeline, zero_s: float) -> Iterator[Event]:
    """Yield one counter per tier, with one series per class, without buffers whose tasks never ran."""
    changes: dict[tuple[Tier, int], dict[int, dict[str, int]]]
    changes = defaultdict(lambda: defaultdict(lambda: defaultdict(int)))
    starts_s, ends_s = timeline.start_s - zero_s, timeline.end_s - zero_s
    for buffer in timeline.schedule.buffers:
        held_on = changes[buffer.tier, buffer.stage]
        if buffer.first is None or buffer.last is None:
            held_on[0][buffer.memory_class] += buffer.num_bytes
            continue
        carried = 1 if buffer.last < buffer.first else 0
        for iteration in range(timeline.num_iterations):
            start_s = float(starts_s[iteration, buffer.first])
            if not math.isnan(start_s):  # it ran
                held_on[_ns(start_s)][buffer.memory_class] += buffer.num_bytes
                later = iteration + carried
                end_s = float(ends_s[later, buffer.last]) if later < timeline.num_iterations else start_s
                if end_s > start_s:
                    held_on[_ns(end_s)][buffer.memory_class] -= buffer.num_bytes
    for (tier, stage), by_time in sorted(changes.items()):
        held = dict.fromkeys(sorted({name for change in by_time.values() for name in change}), 0)
        for time_ns, change in sorted(by_time.items()):
            for name, num_bytes in change.items():
                held[name] += num_bytes
            yield _counter(process, f"{tier} memory (bytes){_of_stage(timeline, stage)}", time_ns, dict(held))


def _traffic(process: int, timeline: Timeline, spans: Sequence[Span], zero_s: float) -> Iterator[Event]:
    """Yield one counter per link, in GB/s; each execution counts with its mean rate."""
    flows: dict[tuple[int, Lane], list[Flow]] = defaultdict(list)
    for span in spans:
        task = timeline.schedule.tasks[span.task]
        link = link_of(task.lane)
        if link is not None and task.num_bytes and span.length_s > 0:
            rate = task.num_bytes / 1e9 / span.length_s
            flows[task.stage, link].append((span.start_s - zero_s, span.end_s - zero_s, rate))
    for stage, link in itertools.product(range(timeline.schedule.num_stages), Lane):
        if (stage, link) in flows:
            counted = series(flows[stage, link], math.inf)
            yield from _counters(process, f"{link} (GB/s){_of_stage(timeline, stage)}", "GB/s", counted)


def _busy(process: int, timeline: Timeline, spans: Sequence[Span], zero_s: float) -> Iterator[Event]:
    """Yield one counter per processor: 1 while any of its lanes runs."""
    tasks = timeline.schedule.tasks
    for stage, (name, lanes) in itertools.product(range(timeline.schedule.num_stages), PROCESSORS.items()):
        own = (span for span in spans if tasks[span.task].stage == stage and tasks[span.task].lane in lanes)
        running = series([(span.start_s - zero_s, span.end_s - zero_s, 1.0) for span in own], math.inf)
        running = dataclasses.replace(running, values=np.minimum(running.values.round(), 1.0))
        yield from _counters(process, f"{name} busy{_of_stage(timeline, stage)}", "busy", running)


def _counters(process: int, name: str, unit: str, counted: Series) -> Iterator[Event]:
    """Yield a counter whenever its value changes, if it ever does."""
    shown = None if counted.peak else 0.0
    for time_s, value in zip(counted.times_s.tolist(), counted.values.round(6).tolist(), strict=True):
        if value != shown:
            shown = value
            yield _counter(process, name, _ns(time_s), {unit: value})


def _counter(process: int, name: str, time_ns: int, values: Mapping[str, float]) -> Event:
    return {"ph": "C", "pid": process, "tid": 0, "name": name, "ts": time_ns / 1000, "args": dict(values)}


def _ns(time_s: float) -> int:
    return round(time_s * 1e9)
