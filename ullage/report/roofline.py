"""The rate that each lane achieves, against the rates of the profile."""

import dataclasses
import math
from collections.abc import Callable, Sequence

from hwprofiles.quantity import Curve
from planner.costs.model import CostModel
from planner.costs.resources import Resource
from planner.schedule.series import link_of
from planner.schedule.tasks import Lane, Op, Task
from ullage.analysis.iteration import View
from ullage.output.formatting import LANE_WORDS, percent, si
from ullage.output.palette import WORK
from ullage.report.charts import Axis, Chart, Section, Table, Trace

_MOST_POINTS = 400  # tasks of one kind in a chart; equal tasks overlap anyway
_UPDATES = {Lane.CPU, Lane.GPU_UPDATE}


@dataclasses.dataclass(frozen=True)
class _Lane:
    """A lane with the rates that bound it.

    Attributes:
        lane: the lane.
        unit: unit of the work of its tasks.
        best_per_s: highest rate in the profile.
        amount: returns the work of a task.
        roof: rate over the size of a task; ``None``: ``best_per_s`` at any size.
    """

    lane: Lane
    unit: str
    best_per_s: float
    amount: Callable[[Task], float]
    roof: Callable[[float], float] | None


def roofline_section(views: Sequence[View], cost: CostModel) -> Section:
    """Show the roofline of computing, and for every other lane the rate of its tasks against their size."""
    tasks = views[0].timeline.schedule.tasks
    lanes = [lane for lane in Lane if any(task.lane is lane for task in tasks)]
    through_host = any(task.through_host for task in tasks)
    known = [found for lane in lanes if (found := _lane(lane, cost, through_host=through_host)) is not None]
    rows, traces = [], []
    for view in views:
        shares, busies = [], []
        for of in known:
            amount, busy_s = _achieved(view, of)
            rate = amount / busy_s if busy_s else 0.0
            share = rate / of.best_per_s
            shares.append(share)
            busies.append(busy_s / view.period_s)
            rows.append(
                (
                    of.lane.value,
                    LANE_WORDS[of.lane],
                    view.who,
                    si(amount, of.unit),
                    si(busy_s, "s"),
                    percent(busy_s / view.period_s),
                    si(rate, f"{of.unit}/s"),
                    si(of.best_per_s, f"{of.unit}/s"),
                    percent(share),
                )
            )
        names = [of.lane.value for of in known]
        suffix = f", {view.who}" if len(views) > 1 else ""
        traces.append(Trace(f"rate while busy{suffix}", shares, names, "bars", "first", measured=view.measured))
        traces.append(Trace(f"busy{suffix}", busies, names, "bars", "fourth", measured=view.measured))
    overview = Chart(
        key="lanes",
        title="Each lane against its best rate",
        note="Rate while busy, as a share of the best rate in the profile, and the share of the iteration in which the "
        "lane is busy. A lane that is always busy at its best rate cannot go faster.",
        x=Axis("share", "%"),
        traces=tuple(traces),
    )
    columns = (
        "lane",
        "does",
        "",
        "amount",
        "busy",
        "of the iteration",
        "rate while busy",
        "the profile's best",
        "share",
    )
    table = Table("Lanes in figures", columns, tuple(sorted(rows, key=lambda row: names.index(row[0]))))
    compute = _compute(views, cost) if Lane.COMPUTE in lanes else ()
    others = [chart for of in known if of.roof and (chart := _sizes(views, of)) is not None]
    return Section("roofline", "Roofline", "Lanes against the roofline", (), (overview, *compute, *others, table))


def _lane(lane: Lane, cost: CostModel, *, through_host: bool) -> _Lane | None:
    """Return a lane with its bounds; ``None`` if the profile has no rate for it.

    Args:
        lane: which.
        cost: prices on the machine.
        through_host: whether collectives go through host memory.
    """
    profile, capacity, ranks = cost.profile, cost.capacities(), cost.ranks_per_node
    host, device, fabric = profile.host, profile.device, profile.intra_node or profile.inter_node
    link = link_of(lane)
    found: _Lane | None = None
    if lane is Lane.COMPUTE:
        best = _best_flop_per_s(cost)
        found = _Lane(lane, "FLOP", best, lambda task: cost.work(task)[0], None)
    elif lane is Lane.GPU_UPDATE:
        best = device.optimizer.best_rate_per_s()
        found = _Lane(lane, "params", best, _updated, _rate_of(device.optimizer, 1))
    elif lane is Lane.CPU:
        best = host.optimizer.best_rate_per_s() / ranks
        found = _Lane(lane, "params", best, _updated, _rate_of(host.optimizer, ranks))
    elif link is Lane.H2D or link is Lane.D2H:
        down = link is Lane.H2D
        curve = profile.host_link.down if down else profile.host_link.up
        best = capacity[Resource.LINK_DOWN if down else Resource.LINK_UP]
        found = _Lane(lane, "B", best, _moved, _rate_of(curve, curve.best_rate_per_s() / best))
    elif profile.nvme is not None and (link is Lane.NVME_READ or link is Lane.NVME_WRITE):
        curve = profile.nvme.read if link is Lane.NVME_READ else profile.nvme.write
        found = _Lane(lane, "B", curve.best_rate_per_s() / ranks, _moved, _rate_of(curve, ranks))
    elif lane is Lane.COLLECTIVE and through_host:
        found = _Lane(lane, "B", capacity[Resource.LINK_DOWN], _moved, None)
    elif fabric is not None and lane in {Lane.COLLECTIVE, Lane.SEND, Lane.SEND_BACK}:
        found = _Lane(lane, "B", fabric.bytes_per_s.value, _moved, None)
    return found


def _best_flop_per_s(cost: CostModel) -> float:
    precision = cost.precision
    return cost.profile.device.gemm[precision.products or precision.weights].best_rate_per_s()


def _moved(task: Task) -> float:
    return task.num_bytes


def _updated(task: Task) -> float:
    return task.num_params if task.op is Op.UPDATE else 0.0


def _rate_of(curve: Curve, ranks: float) -> Callable[[float], float]:
    """Return each rank's rate by task size if ``ranks`` ranks run such a task at once and share the curve's rate."""
    return lambda size: size / curve.time_s(size * ranks)


def _achieved(view: View, of: _Lane) -> tuple[float, float]:
    """Return the work of a lane in an iteration, and its busy seconds, both for the busiest stage."""
    totals: dict[int, tuple[float, float]] = {}
    for task, length_s in view.tasks():
        if task.lane is of.lane:
            amount, busy_s = totals.get(task.stage, (0.0, 0.0))
            totals[task.stage] = (amount + of.amount(task), busy_s + length_s)
    return max(totals.values(), key=lambda found: found[1], default=(0.0, 0.0))


def _compute(views: Sequence[View], cost: CostModel) -> tuple[Chart, ...]:
    """Draw FLOP/s over FLOP per byte of device memory, with the roofline of compute and memory rates."""
    device = cost.profile.device
    best = _best_flop_per_s(cost)
    memory = device.memory_bytes_per_s.value
    traces, intensities = [], []
    for view in views:
        for op in (Op.FORWARD, Op.RECOMPUTE, Op.BACKWARD, Op.WEIGHT_GRADIENT):
            points = []
            for task, length_s in view.tasks():
                if task.lane is not Lane.COMPUTE or task.op is not op or length_s <= 0:
                    continue
                flop, num_bytes = cost.work(task)
                if flop and num_bytes:
                    points.append((flop / num_bytes, flop / length_s, f"{task.name}: {si(length_s, 's')}"))
            if points:
                name = f"{op}, {view.who}" if len(views) > 1 else op.value
                intensities += [point[0] for point in points]
                traces.append(_points(name, points, WORK[op], measured=view.measured))
    if not intensities:
        return ()
    ridge = best / memory
    low, high = min(*intensities, ridge) / 2, max(*intensities, ridge) * 2
    roof = Trace("roof", [low, ridge, high], [low * memory, best, best], "line", "ink")
    chart = Chart(
        key="roofline",
        title="Roofline of computing",
        note=f"Each point is a task on the compute lane. The roof: {si(best, 'FLOP/s')} of matrix products, and "
        f"{si(memory, 'B/s')} of device memory. Bytes are those that kernels access, including hits in caches.",
        x=Axis("FLOP per byte", "", log=True),
        y=Axis("rate", "FLOP/s", log=True),
        traces=(roof, *traces),
    )
    return (chart,)


def _sizes(views: Sequence[View], of: _Lane) -> Chart | None:
    """Draw the rate of each task of a lane against its size, under the profile's curve."""
    assert of.roof is not None
    traces, sizes = [], []
    for view in views:
        points = []
        for task, length_s in view.tasks():
            amount = of.amount(task)
            if task.lane is of.lane and amount and length_s > 0:
                points.append((amount, amount / length_s, f"{task.name}: {si(length_s, 's')}"))
        if points:
            sizes += [point[0] for point in points]
            colour = "second" if view.measured else "first"
            traces.append(_points(view.who if len(views) > 1 else "tasks", points, colour, measured=view.measured))
    if not sizes:
        return None
    low, high = math.log10(min(sizes) / 2), math.log10(max(sizes) * 2)
    at = [10 ** (low + (high - low) * i / 40) for i in range(41)]
    roof = Trace("the profile's curve", at, [of.roof(size) for size in at], "line", "ink")
    what = "parameters" if of.lane in _UPDATES else "bytes"
    return Chart(
        key=f"rates-{of.lane}",
        title=f"Lane {of.lane}: {LANE_WORDS[of.lane]}",
        note="Each point is a task. The line is the profile's rate for a task of that size alone on the machine.",
        x=Axis(f"{what} of one task", of.unit, log=True),
        y=Axis("rate", f"{of.unit}/s", log=True),
        traces=(roof, *traces),
        half=True,
    )


def _points(name: str, points: Sequence[tuple[float, float, str]], colour: str, *, measured: bool) -> Trace:
    step = -(-len(points) // _MOST_POINTS)
    shown = points[::step]
    x, y, texts = [p[0] for p in shown], [p[1] for p in shown], [p[2] for p in shown]
    return Trace(name, x, y, "points", colour, measured=measured, texts=texts)
