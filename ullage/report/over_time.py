"""One iteration over time: tasks, memory, traffic, and the use of resources by phase."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np

from planner.costs.model import CostModel
from planner.costs.resources import Resource
from planner.schedule.series import Series
from planner.schedule.tasks import Lane, MemoryClass, Tier
from planner.schedule.timeline import MemoryUse
from planner.simulate.prediction import capacities
from ullage.analysis.iteration import View
from ullage.analysis.runs import RunRecord
from ullage.output.formatting import TIER_WORDS, percent, si
from ullage.output.palette import WORK
from ullage.report.charts import Axis, Band, Chart, Line, Section, Trace

TIME: Final = Axis("time since the iteration began", "s")
"""The axis of charts over time."""
# A capacity far above the curve would flatten the picture, so it is in the note and not drawn.
_DRAWN = 0.25
# Lines are means over this fraction of the period, as a sampling monitor shows them. Behind them is every single task.
_WINDOW = 1 / 60
_NUM_SAMPLES = 600
_MOST_STEPS = 3000  # a step function with more steps is drawn as this many equal parts
_LINKS = {
    "host-link": ("host link (PCIe)", "towards the device", Lane.H2D, "to the host", Lane.D2H),
    "nvme": ("NVMe", "read", Lane.NVME_READ, "written", Lane.NVME_WRITE),
}
_CAPACITY = {
    Lane.H2D: Resource.LINK_DOWN,
    Lane.D2H: Resource.LINK_UP,
    Lane.NVME_READ: Resource.NVME_READ,
    Lane.NVME_WRITE: Resource.NVME_WRITE,
}


def gantt_section(views: Sequence[View]) -> Section:
    """Show every task of an iteration on its lane, predicted above measured."""
    rows: dict[tuple[int, int, bool], Trace] = {}
    for view in views:
        for (stage, lane), row in _rows(view, says_who=len(views) > 1):
            rows[stage, lane, view.measured] = row
    shown = tuple(rows[key] for key in sorted(rows))
    note = "Each bar is a task. Bars narrower than a pixel are merged; drag to zoom in and separate them."
    if len(views) > 1:
        note += " The phases in the background are predicted."
    gantt = Chart(
        key="gantt",
        title="Tasks of one iteration, by lane",
        note=note,
        x=TIME,
        traces=shown,
        bands=_bands(views[0]),
        over_time=True,
        period_s=max(view.period_s for view in views),
    )
    return Section("timeline", "Tasks", "What happens when", (), (gantt,))


def _rows(view: View, *, says_who: bool) -> Iterator[tuple[tuple[int, int], Trace]]:
    """Yield a row per stage and lane with all tasks that run within this interval, of any iteration."""
    tasks = view.timeline.schedule.tasks
    start_s = view.timeline.start_s - view.begin_s
    end_s = view.timeline.end_s - view.begin_s
    inside = (np.nan_to_num(end_s, nan=-1.0) > 0) & (np.nan_to_num(start_s, nan=np.inf) < view.period_s)
    found: dict[tuple[int, int], list[tuple[float, float, int]]] = {}
    order = list(Lane)
    for iteration, index in zip(*np.nonzero(inside & (end_s > start_s)), strict=True):
        task = tasks[index]
        span = (
            max(float(start_s[iteration, index]), 0.0),
            min(float(end_s[iteration, index]), view.period_s),
            int(index),
        )
        found.setdefault((task.stage, order.index(task.lane)), []).append(span)
    several = view.timeline.schedule.num_stages > 1
    for (stage, number), spans in sorted(found.items()):
        spans.sort()
        name = f"{stage}: {order[number]}" if several else order[number].value
        yield (
            (stage, number),
            Trace(
                name=f"{name}, {view.who}" if says_who else name,
                x=[span[0] for span in spans],
                y=[span[1] for span in spans],
                mark="tasks",
                colour=[WORK[tasks[span[2]].op] for span in spans],
                texts=[tasks[span[2]].name for span in spans],
                measured=view.measured,
            ),
        )


def _bands(view: View) -> tuple[Band, ...]:
    """Return the phases in order."""
    lasting = (stretch for stretch in view.stretches if stretch.end_s > stretch.start_s)
    return tuple(Band(s.start_s, s.end_s, s.phase.value, f"phase {s.phase}") for s in lasting)


def _chart(
    views: Sequence[View],
    key: str,
    title: str,
    note: str,
    y: Axis,
    traces: Sequence[Trace],
    levels: Sequence[Line] = (),
) -> Chart:
    """Return a chart over the time of the iteration, above its predicted phases."""
    return Chart(key, title, note, TIME, tuple(traces), y, tuple(levels), _bands(views[0]), over_time=True)


def memory_over_time(views: Sequence[View], cost: CostModel, run: RunRecord | None) -> Section:
    """Show the memory of each tier over time, by class."""
    predicted = views[0]
    charts = []
    for tier, use in predicted.memory.items():
        has_stages = predicted.timeline.schedule.num_stages > 1  # of which a node's ranks have different ones
        num_ranks = 1 if tier is Tier.GPU or has_stages else cost.ranks_per_node
        capacity_bytes = capacities(cost)[tier]
        traces = list(_areas(use, predicted.period_s, num_ranks))
        if run is not None and (line := _measured_memory(run, views[-1], tier)) is not None:
            traces.append(line)
        peak_bytes = use.peak_bytes * num_ranks
        drawn = peak_bytes >= _DRAWN * capacity_bytes
        share = percent(peak_bytes / capacity_bytes)
        note = f"Peak {si(peak_bytes, 'B')} predicted, {share} of {si(capacity_bytes, 'B')}."
        if run is not None and tier in run.memory:
            note += f" Measured peak {si(run.memory[tier], 'B')}."
        if num_ranks > 1:
            note += f" All {num_ranks} ranks of a node together."
        if has_stages:
            note += " One rank of the stage with the highest peak is shown."
        levels = [Line(capacity_bytes, "capacity")] if drawn else []
        title = f"Memory of {TIER_WORDS[tier]}"
        charts.append(_chart(views, f"memory-{tier}", title, note, Axis("memory", "B"), traces, levels))
    words = []
    if run is not None and not run.device_bytes:
        words.append("This run has no measured device memory over time; run it again with this version.")
    return Section("memory", "Memory", "Memory over time", tuple(words), tuple(charts))


def _areas(use: MemoryUse, period_s: float, num_ranks: int) -> Sequence[Trace]:
    """Return stacked areas by class; classes that change least are at the bottom."""
    held = {kind: np.array(values, np.float64) * num_ranks for kind, values in use.num_bytes.items() if any(values)}
    times_s = np.array(use.times_s)
    if len(times_s) > _MOST_STEPS:
        times_s, held = _most_held(times_s, held, period_s)
    result = []
    for kind, values in sorted(held.items(), key=lambda item: float(np.ptp(item[1]))):
        x, y = [*times_s.tolist(), period_s], [*values.tolist(), float(values[-1])]
        result.append(Trace(kind.value, x, y, "area", kind))
    return result


def _most_held(
    times_s: np.ndarray[tuple[int], np.dtype[np.float64]],
    held: Mapping[MemoryClass, np.ndarray[tuple[int], np.dtype[np.float64]]],
    period_s: float,
) -> tuple[
    np.ndarray[tuple[int], np.dtype[np.float64]], dict[MemoryClass, np.ndarray[tuple[int], np.dtype[np.float64]]]
]:
    """Resample to equal parts; each part has the bytes of all classes at the moment of their highest sum."""
    edges_s = np.linspace(0.0, period_s, _MOST_STEPS, endpoint=False)
    part = np.minimum((times_s / period_s * _MOST_STEPS).astype(np.int64), _MOST_STEPS - 1)
    total = np.sum(list(held.values()), axis=0)
    # The value at the beginning of a part is a candidate too; if nothing changes, it is the only one.
    chosen = np.maximum(np.searchsorted(times_s, edges_s, side="right") - 1, 0)
    order = np.lexsort((total, part))
    last = np.append(np.flatnonzero(np.diff(part[order])), len(order) - 1)
    best = order[last]
    better = total[best] > total[chosen[part[best]]]
    chosen[part[best][better]] = best[better]
    return edges_s, {kind: values[chosen] for kind, values in held.items()}


def _measured_memory(run: RunRecord, view: View, tier: Tier) -> Trace | None:
    """Return measured bytes over time: per task of the metered iteration on the device, constant on other tiers.

    The metered iteration is another, slower one, so its bytes are drawn at the times of this iteration's tasks.
    """
    if tier not in run.memory:
        return None
    if tier is not Tier.GPU:
        x, y = [0.0, view.period_s], [float(run.memory[tier])] * 2
        return Trace("measured", x, y, "steps", "ink", measured=True)
    if not run.device_bytes:
        return None
    static_bytes = sum(run.static_bytes[tier].values())
    starts_s = view.timeline.start_s[view.iteration] - view.begin_s
    seen = sorted((float(starts_s[task]), static_bytes + n) for task, n in run.device_bytes.items())
    seen = [(at_s, n) for at_s, n in seen if not np.isnan(at_s)]
    x, y = [at_s for at_s, _ in seen], [float(n) for _, n in seen]
    return Trace("measured", [*x, view.period_s], [*y, y[-1]], "steps", "ink", measured=True)


def traffic_section(views: Sequence[View], cost: CostModel) -> Section:
    """Show bytes per second on every link in both directions, and of host memory."""
    capacity = cost.capacities()
    charts = [
        chart
        for key, (title, first, down, second, up) in _LINKS.items()
        if (chart := _both_ways(views, key, title, ((first, down, 1), (second, up, -1)), capacity)) is not None
    ]
    network = tuple(
        (words, lane, 1)
        for words, lane in (
            ("all-gathers and reduce-scatters", Lane.COLLECTIVE),
            ("to the next stage", Lane.SEND),
            ("to the previous stage", Lane.SEND_BACK),
        )
    )
    if (chart := _both_ways(views, "network", "network between devices", network, {})) is not None:
        charts.append(chart)
    charts.append(_dram(views, cost, capacity[Resource.DRAM]))
    words = (
        "Rates of one rank. A line is the mean over a sixtieth of the iteration, as a monitor would show it. Behind "
    )
    words += "it is every single transfer at its own mean rate."
    return Section("traffic", "Traffic", "Traffic over time", (words,), tuple(charts))


def _both_ways(
    views: Sequence[View],
    key: str,
    title: str,
    directions: Sequence[tuple[str, Lane, int]],
    capacity: Mapping[Resource, float],
) -> Chart | None:
    """Draw the first direction upwards and the second downwards."""
    traces, totals = [], []
    levels = []
    for number, (words, lane, sign) in enumerate(directions):
        colour = ("down", "up", "third")[number]
        for view in views:
            if (series := view.traffic.get(lane)) is None:
                continue
            name = f"{words}, {view.who}" if len(views) > 1 else words
            traces += _rate(series, name, colour, sign, measured=view.measured)
            totals.append(f"{name} {si(series.integral, 'B')}, at most {si(series.peak, 'B/s')}")
        if totals and lane in _CAPACITY and _CAPACITY[lane] in capacity:
            levels.append(Line(sign * capacity[_CAPACITY[lane]], f"{words}: peak rate"))
    if not traces:
        return None
    return _chart(
        views,
        f"traffic-{key}",
        f"Traffic over the {title}",
        f"{'; '.join(totals)}.",
        Axis("rate", "B/s"),
        traces,
        levels,
    )


def _dram(views: Sequence[View], cost: CostModel, capacity: float) -> Chart:
    traces = []
    for view in views:
        name = view.who if len(views) > 1 else "reads and writes"
        traces += _rate(view.used(_dram_bytes(view, cost)), name, "dram", 1, measured=view.measured)
    title = "Traffic of host memory (DRAM)"
    note = "Bytes that tasks read and write according to the cost model, at the times of the tasks."
    levels = [Line(capacity, "peak rate")]
    return _chart(views, "traffic-dram", title, note, Axis("rate", "B/s"), traces, levels)


def _dram_bytes(view: View, cost: CostModel) -> list[float]:
    """Return the bytes of host memory that each task reads and writes."""
    prices = cost.prices(view.timeline.schedule)
    return [dict(price.uses).get(Resource.DRAM, 0.0) * price.duration_s for price in prices]


def _rate(series: Series, name: str, colour: str, sign: int, *, measured: bool) -> list[Trace]:
    """Return the mean over a sliding window, and behind it every step."""
    at_s = np.linspace(0.0, series.period_s, _NUM_SAMPLES)
    means = sign * series.moving_means(at_s, _WINDOW * series.period_s)
    line = Trace(name, at_s.tolist(), means.tolist(), "line", colour, measured=measured)
    if measured:  # two overlapping shades would be hard to distinguish
        return [line]
    if len(series.times_s) <= _MOST_STEPS:
        x, y = [*series.times_s.tolist(), series.period_s], [*series.values.tolist(), float(series.values[-1])]
    else:
        x = np.linspace(0.0, series.period_s, _MOST_STEPS + 1).tolist()
        means_of_parts = series.means(_MOST_STEPS)
        y = [*means_of_parts.tolist(), float(means_of_parts[-1])]
    return [Trace(name, x, [sign * value for value in y], "steps", colour, faint=True), line]


def resources_section(views: Sequence[View], cost: CostModel) -> Section:
    """Show how much of the machine each phase uses, and how busy the processors are over time."""
    over_time = []
    for view in views:
        for processor, colour, words in (("gpu", "device", "device computes"), ("cpu", "cores", "CPU updates")):
            if (series := view.busy.get(processor)) is not None and series.integral:
                name = f"{words}, {view.who}" if len(views) > 1 else words
                over_time += _rate(series, name, colour, 1, measured=view.measured)
    note = "Share of the time in which the device computes, and in which the CPU updates."
    busy = _chart(views, "busy", "How busy the processors are", note, Axis("busy", "%"), over_time)
    shares = [(view, _shares(view, cost)) for view in views]
    phases = list(dict.fromkeys(phase for _, found in shares for phase in found))
    used = [name for _, found in shares for of in found.values() for name, share in of.items() if share]
    resources = list(dict.fromkeys(used))
    traces = []
    for number, phase in enumerate(phases):
        for view, found in shares:
            values = [found.get(phase, {}).get(name, 0.0) for name in resources]
            name = f"{phase}, {view.who}" if len(views) > 1 else phase
            colour = ("first", "fifth", "third", "fourth")[number]
            traces.append(Trace(name, values, resources, "bars", colour, measured=view.measured))
    by_phase = Chart(
        key="phases",
        title="Use of resources by phase",
        note="Mean use within each phase: processors as a share of the time, links and memory as a share of their "
        "highest rate.",
        x=Axis("mean use within the phase", "%"),
        traces=tuple(traces),
    )
    return Section("resources", "Phases", "Phases against resources", (), (by_phase, busy))


def _shares(view: View, cost: CostModel) -> dict[str, dict[str, float]]:
    """Return the mean use of every resource within each phase, over all its intervals."""
    capacity = cost.capacities()
    used: dict[str, tuple[Series, float]] = {
        "device computes": (view.busy["gpu"], 1.0),
        "CPU updates": (view.busy["cpu"], 1.0),
        "host memory (DRAM)": (view.used(_dram_bytes(view, cost)), capacity[Resource.DRAM]),
    }
    names = {
        Lane.H2D: "host link, to the device",
        Lane.D2H: "host link, to the host",
        Lane.NVME_READ: "NVMe, read",
        Lane.NVME_WRITE: "NVMe, written",
    }
    used |= {
        name: (view.traffic[lane], capacity[_CAPACITY[lane]]) for lane, name in names.items() if lane in view.traffic
    }
    result: dict[str, dict[str, float]] = {}
    stretches = view.stretches
    for phase in dict.fromkeys(stretch.phase for stretch in stretches):
        own = [s for s in stretches if s.phase is phase and s.end_s > s.start_s]
        length_s = sum(s.end_s - s.start_s for s in own)
        if length_s <= 0:
            continue
        result[phase.value] = {
            name: sum(series.mean_within(s.start_s, s.end_s) * (s.end_s - s.start_s) for s in own) / length_s / most
            for name, (series, most) in used.items()
        }
    return result
