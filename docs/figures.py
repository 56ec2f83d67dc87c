"""Draw the figures of the documentation, from committed files or simulated anew: ``python docs/figures.py``."""

import json
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from hwprofiles.registry import load_profile
from planner.choices.request import Request
from planner.models.registry import list_models, resolve_model
from planner.schedule.tasks import Lane
from planner.schedule.timeline import Timeline
from ullage.analysis.runs import load_run
from ullage.analysis.simulation import planned, simulate
from ullage.output.palette import COLOURS, ORDINALS, WORK, Work
from ullage.planning import plan
from ullage.report.charts import Chart, value_text
from ullage.report.iteration import iteration_part

HERE = Path(__file__).parent
RUN = HERE.parent / "benchmarks" / "results" / "demo_run.json"
PUBLISHED = HERE.parent / "benchmarks" / "results" / "published.json"
SPEED = HERE.parent / "benchmarks" / "results" / "planning_speed.json"
LOSSES = HERE.parent / "benchmarks" / "results" / "cpu_loss_curves.json"
LIMITS = HERE.parent / "benchmarks" / "results"
PUBLISHED_PANELS = (
    ("iteration and end-to-end time (s)", ("iteration", "end to end"), 1.0),
    ("phases: backward and update (s)", ("backward", "update"), 1.0),
    ("peak GPU memory (GB)", ("peak GPU",), 1e9),
)
COLOUR = {name: light for name, (light, _dark) in COLOURS.items()}
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
                used.index(task.lane), (end_s - start_s) * 1e3, left=start_s * 1e3, height=0.8, linewidth=0.4,
                color=COLOUR[WORK[task.op]], edgecolor=COLOUR[WORK[task.op]],
            )  # fmt: skip
    axes.set_yticks(range(len(used)), [lane.value for lane in used])
    axes.invert_yaxis()
    axes.set_title(f"{title}: {period_s * 1e3:.0f} ms", loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)


def draw_published() -> None:
    """Draw what is predicted of published runs against what was measured, from the committed result."""
    cases = json.loads(PUBLISHED.read_text())["cases"]
    figure, panels = plt.subplots(1, 3, figsize=(10.5, 3.9), layout="constrained")
    for axes, (title, quantities, unit) in zip(panels.flat, PUBLISHED_PANELS, strict=True):
        found = [(case["file"], case["fitted"], case[q]) for case in cases for q in quantities if q in case]
        values = [row[side] / unit for _, _, row in found for side in ("predicted", "measured")]
        low, high = min(values) / 1.3, max(values) * 1.3
        axes.fill_between([low, high], [low / 1.15, high / 1.15], [low * 1.15, high * 1.15], color=COLOUR["grid"], lw=0)
        axes.plot([low, high], [low, high], color=COLOUR["soft"], lw=0.8)
        for name, file in zip(ORDINALS, dict.fromkeys(case["file"] for case in cases), strict=False):
            colour = COLOUR[name]
            for fitted in (True, False):
                points = [row for of, was, row in found if (of, was) == (file, fitted)]
                axes.scatter(
                    [row["measured"] / unit for row in points],
                    [row["predicted"] / unit for row in points],
                    s=14, linewidths=0.9, edgecolors=colour, facecolors="none" if fitted else colour,
                    alpha=0.85, label=file.removesuffix(".json").replace("_", " ") if points and not fitted else None,
                )  # fmt: skip
        axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high), title=title, xlabel="measured")
        axes.set_aspect("equal")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(LogLocator(subs=(1,) if high > 1000 * low else (1, 2, 5)))
            axis.set_major_formatter(StrMethodFormatter("{x:g}"))
            axis.set_minor_formatter(NullFormatter())
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=7, loc="upper left")
    panels.flat[0].set_ylabel("predicted (grey: within 15 %; hollow: the profile was fitted to it)")
    panels.flat[0].yaxis.label.set_fontsize(8)
    figure.savefig(HERE / "published.svg", metadata={"Date": None})
    plt.close(figure)


def draw_growth() -> None:
    """Draw how long planning takes as models get deeper and devices more."""
    growth = json.loads(SPEED.read_text(encoding="utf-8"))["growth"]
    figure, panels = plt.subplots(1, len(growth), figsize=(9, 3), sharey=True, layout="constrained")
    for axes, (what, rows) in zip(panels, growth.items(), strict=True):
        counts = [next(value for key, value in row.items() if key.startswith("num_")) for row in rows]
        axes.loglog(counts, [row["process_s"] for row in rows], "o-", color=COLOUR["first"])
        axes.set_xticks(counts, [f"{count:,}" for count in counts])
        axes.set_yticks((1, 2, 5, 10, 20))
        axes.minorticks_off()
        axes.set_xlabel(what)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("s to plan, whole process")
    panels[0].yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    figure.savefig(HERE / "growth.svg", metadata={"Date": None})


def draw_loss_curves() -> None:
    """Draw the loss of training with fp32 state and with narrow state, for each seed; without an fp32 copy dashed."""
    rows = json.loads(LOSSES.read_text(encoding="utf-8"))["rows"]
    seeds = list(dict.fromkeys(row["seed"] for row in rows))
    figure, panels = plt.subplots(1, len(seeds), figsize=(9, 3), sharey=True, layout="constrained")
    colour_of = {"adamw": "first", "adamw-bf16": "second", "adamw-8bit": "third"}
    for axes, seed in zip(panels, seeds, strict=True):
        for row in (row for row in rows if row["seed"] == seed):
            iterations = [10 * i + 5 for i in range(len(row["curve"]))]
            name, *master = row["optimizer"].split()
            style = {"color": COLOUR[colour_of[name]], "ls": "--" if master else "-"}
            axes.plot(iterations, row["curve"], lw=1, label=row["optimizer"], **style)
        axes.set_title(f"seed {seed}", fontsize=10)
        axes.set_xlabel("iterations")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("loss")
    panels[0].legend(frameon=False)
    figure.savefig(HERE / "loss_curves.svg", metadata={"Date": None})


def draw_month() -> None:
    """Draw what failures take of a month, expected and simulated, over the time between them."""
    rows = json.loads((LIMITS / "planning_month.json").read_text(encoding="utf-8"))["rows"]
    figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
    for way, colour in (("file system", "second"), ("chosen", "first")):
        of = [row for row in rows if row["way"] == way]
        hours = [row["mtbf_h"] for row in of]
        axes.plot(hours, [100 * row["expected"] for row in of], color=COLOUR[colour], lw=1, label=f"{way}, expected")
        axes.plot(hours, [100 * row["simulated"] for row in of], "o", ms=4, color=COLOUR[colour], label="simulated")
        if way == "chosen":
            between = ([100 * row[end] for row in of] for end in ("from", "to"))
            axes.fill_between(hours, *between, color=COLOUR[colour], alpha=0.2, lw=0, label="9 of 10 months")
    axes.set(xscale="log", yscale="log", xlabel="hours between failures of the job", ylabel="% of the time lost")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.set_minor_formatter(NullFormatter())
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(HERE / "month.svg", metadata={"Date": None})
    plt.close(figure)


def draw_limits(question: str, label: str, xlim: tuple[float, float]) -> None:
    """Draw the largest model or the longest sequence that fits, on each machine and with each technique."""
    found = json.loads((LIMITS / f"planning_{question}.json").read_text(encoding="utf-8"))["rows"]
    params = list_models()
    ways = list(dict.fromkeys(row["way"] for row in found))
    machines = list(dict.fromkeys((row["machine"], row["num_devices"]) for row in found))
    figure, panels = plt.subplots(1, len(machines), figsize=(12, 3.4), sharex=True, sharey=True, layout="constrained")
    for axes, machine in zip(panels, machines, strict=True):
        rows = [row for row in found if (row["machine"], row["num_devices"]) == machine]
        for row in rows:
            at, found_with = ways.index(row["way"]), row[question]
            for kind, colour in (("nvme", "second"), ("never", "first")):
                if kind in found_with:
                    axes.barh(at, params.get(found_with[kind], found_with[kind]), color=COLOUR[colour])
            best = found_with.get("nvme", found_with["never"])
            words = f" {best:,}" if isinstance(best, int) else f" {best}"
            axes.text(params.get(best, best), at, words, va="center", fontsize=7)
        axes.set_yticks(range(len(ways)), ways, fontsize=8)
        axes.set(xscale="log", xlabel=label, xlim=xlim)
        axes.set_title(f"{machine[1]} x {machine[0]}", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].invert_yaxis()
    handles = [plt.Rectangle((0, 0), 1, 1, color=COLOUR[colour]) for colour in ("first", "second")]
    figure.legend(handles, ["device and host", "and NVMe"], loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(HERE / f"{question}.svg", metadata={"Date": None})
    plt.close(figure)


def draw_simulated() -> None:
    """Draw OPT-13B on four H100, by ZeRO-Offload and by our plan, as the memory-wall study draws measured runs."""
    made = plan(Request(resolve_model("opt-13b"), load_profile("h100x4-80g"), num_devices=4))
    for engine in ("zero-offload", "ullage"):
        part = iteration_part(planned(made, engine))
        keys = ("memory-gpu", "traffic-host-link", "busy")
        figure, panels = plt.subplots(3, 1, sharex=True, figsize=(10, 7), layout="constrained", height_ratios=(5, 4, 3))
        for axes, key in zip(panels, keys, strict=True):
            if key in part.pictures:
                draw_chart(axes, part.pictures[key])
        figure.suptitle(f"{part.title}: {part.facts[0].value} per iteration, simulated, one rank", fontsize=11)
        figure.savefig(HERE / f"opt-13b_{engine}.png", dpi=150, metadata={"Software": None})
        plt.close(figure)


def draw_chart(axes: Axes, chart: Chart) -> None:
    """Draw areas and lines of a chart over the time of an iteration, with its phases and limits."""
    base: float | np.ndarray[tuple[int], np.dtype[np.float64]] = 0.0
    for band in chart.bands:
        axes.axvspan(band.start, band.end, color=COLOUR[band.colour], linewidth=0, zorder=0)
    for trace in chart.traces:
        x, y, colour = np.array(trace.x, float), np.array(trace.y, float), COLOUR[str(trace.colour)]
        if trace.mark == "area":
            axes.fill_between(x, base, base + y, step="post", color=colour, linewidth=0, label=trace.name)
            base = base + y
        elif trace.faint:
            axes.fill_between(x, 0.0, y, step="post", color=colour, alpha=0.22, linewidth=0)
        else:
            axes.plot(x, y, color=colour, label=trace.name)
    for level in chart.levels:
        axes.axhline(level.value, color=COLOUR["ink"], linewidth=1, linestyle="--")
    axes.set_ylabel(f"{chart.y.title} ({chart.y.unit})")
    axes.yaxis.set_major_formatter(lambda value, _: value_text(value, chart.y.unit))
    axes.set_title(chart.title, loc="left", fontsize=10)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=9)


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
    used = {WORK[task.op] for task in measured.schedule.tasks if task.lane in LANES}
    shown = [work for work in Work if work in used]
    handles = [plt.Rectangle((0, 0), 1, 1, color=COLOUR[work]) for work in shown]
    figure.legend(handles, [work.value for work in shown], loc="outside right upper", frameon=False)
    figure.savefig(HERE / "demo_iteration.svg", metadata={"Date": None})
    draw_simulated()
    draw_growth()
    draw_loss_curves()
    draw_month()
    draw_limits("largest", "parameters", (5e8, 5e13))
    draw_limits("longest", "tokens", (5e3, 1e7))
    draw_published()


if __name__ == "__main__":
    main()
