"""Draw the figures of the documentation, from committed files or simulated anew: ``python docs/figures.py``."""

from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from hwprofiles.registry import load_profile
from planner.models.registry import resolve_model
from planner.planning import Request
from planner.schedule import Lane, Op
from planner.timeline import Timeline
from ullage.figure import save_figure
from ullage.iteration import Iteration
from ullage.runs import load_run
from ullage.simulation import requested, simulate

HERE = Path(__file__).parent
RUN = HERE.parent / "benchmarks" / "results" / "demo_run.json"
COLOURS = {
    Op.FORWARD: "#4c78a8",
    Op.RECOMPUTE: "#9ecae9",
    Op.BACKWARD: "#f58518",
    Op.FLUSH: "#e45756",
    Op.UPDATE: "#54a24b",
    Op.UPLOAD: "#b279a2",
    Op.FETCH: "#72b7b2",
    Op.LOAD: "#72b7b2",
    Op.STORE: "#d67195",
    Op.CLIP: "#222222",
}
LANES = (Lane.COMPUTE, Lane.H2D, Lane.D2H, Lane.STATE_IN, Lane.STATE_OUT, Lane.CPU, Lane.GPU_UPDATE)


def draw(axes: Axes, timeline: Timeline, iteration: int, title: str) -> None:
    """Draw every task of one iteration, and what of the one before is still under way in it, as a bar in its lane."""
    tasks = timeline.schedule.tasks
    used = [lane for lane in LANES if any(task.lane is lane for task in tasks)]
    begin_s, period_s = timeline.begin_s(iteration), timeline.period_s(iteration)
    for span in (*timeline.of_iteration(iteration - 1), *timeline.of_iteration(iteration)):
        task = tasks[span.task]
        start_s, end_s = max(span.start_s - begin_s, 0.0), min(span.end_s - begin_s, period_s)
        if task.lane in used and end_s > start_s:
            axes.barh(
                used.index(task.lane), (end_s - start_s) * 1e3, left=start_s * 1e3, height=0.8, color=COLOURS[task.op],
                linewidth=0.4, edgecolor=COLOURS[task.op],
            )  # fmt: skip
    axes.set_yticks(range(len(used)), [lane.value for lane in used])
    axes.invert_yaxis()
    axes.set_title(f"{title}: {period_s * 1e3:.0f} ms", loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)


def draw_simulated() -> None:
    """Draw OPT-13B on four H100, by ZeRO-Offload and by our plan, as the memory-wall study draws measured runs."""
    request = Request(resolve_model("opt-13b"), load_profile("h100x4-80g"), num_devices=4)
    for engine in ("zero-offload", "ullage"):
        subject = requested(request, engine)
        save_figure(Iteration.of(subject, subject.simulate()), HERE / f"opt-13b_{engine}.png")


def main() -> None:
    """Draw the iteration of the committed demo run, predicted above measured, on one time axis; then the others."""
    mpl.rcParams["svg.hashsalt"] = "ullage"  # the same file every time
    record = load_run(RUN)
    simulation, measured = simulate(record.plan), record.timeline
    periods = sorted(record.steady_iterations, key=measured.period_s)
    middle = periods[len(periods) // 2]
    figure, (above, below) = plt.subplots(2, 1, figsize=(10, 4.6), sharex=True, layout="constrained")
    draw(above, simulation.timeline, simulation.steady, "predicted")
    draw(below, measured, middle, "measured (median iteration)")
    below.set_xlabel("ms since the iteration began")
    used = {task.op for task in measured.schedule.tasks if task.lane in LANES}
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for op, colour in COLOURS.items() if op in used]
    figure.legend(handles, [op.value for op in COLOURS if op in used], loc="outside right upper", frameon=False)
    figure.savefig(HERE / "demo_iteration.svg", metadata={"Date": None})
    draw_simulated()


if __name__ == "__main__":
    main()
