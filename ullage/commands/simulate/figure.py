"""One simulated iteration as a picture: memory, traffic and busy shares on one time axis, phases shaded.

The three panels are those that the memory-wall study draws of measured runs (Maurya et al., "Breaking the Memory Wall:
A Study of I/O Patterns and GPU Memory Utilization for Hybrid CPU-GPU Offloaded Optimizers", FlexScience 2024).
"""

import html
import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hwprofiles.files import write_whole
from planner.schedule.series import Series
from planner.schedule.tasks import Lane, Tier
from ullage.analysis.iteration import Iteration
from ullage.output.formatting import percent, si
from ullage.output.palette import COLOURS

try:
    import matplotlib as mpl
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("a figure needs matplotlib; pip install 'ullage[figure]'", name="matplotlib") from error

_COLOURS = {name: colour.light for name, colour in COLOURS.items()}
_DIRECTIONS = {Lane.H2D: (1, "down", "host to GPU"), Lane.D2H: (-1, "up", "GPU to host")}
_BUSY = {"gpu": ("device", "-", "GPU computes"), "cpu": ("cores", "--", "CPU updates")}
_SIZE_INCHES = (10.0, 7.0)
_MIN_LABELLED = 0.09  # of the period: a narrower stretch has no room for its name
# Lines are means over this part of the period, as a sampling monitor would show them; behind them is every single task.
_WINDOW = 1 / 50
_NUM_SAMPLES = 500


def draw(seen: Iteration) -> Figure:
    """Return the picture of an iteration."""
    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    memory, links, processors = figure.subplots(3, 1, sharex=True, height_ratios=(5, 4, 3))
    for axes in (memory, links, processors):
        _shade(axes, seen)
    _name_phases(memory, seen)
    _draw_memory(memory, seen)
    _draw_links(links, seen)
    _draw_busy(processors, seen)
    processors.set_xlabel("seconds since the iteration began")
    subject = seen.subject
    figure.suptitle(
        f"{subject.model.name} by {subject.engine} on {subject.decisions.num_devices} device(s) of "
        f"{subject.hardware.name}: {si(seen.period_s, 's')} per iteration, simulated, one rank",
        x=0.01,
        ha="left",
        fontsize=11,
        fontweight="bold",
    )
    figure.supxlabel(seen.verdict, x=0.01, ha="left", fontsize=9, color=_COLOURS["soft"])
    return figure


def save_figure(seen: Iteration, path: Path) -> None:
    """Draw an iteration into a file, whole or not at all: SVG, PNG, or HTML that needs nothing else.

    Equal iterations are equal bytes (with the same matplotlib).

    Raises:
        OSError: it cannot be written.
    """
    kind = "png" if path.suffix == ".png" else "svg"
    data = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": "ullage"}):
        draw(seen).savefig(data, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else {"Software": None})
    write_whole(path, _page(seen, data.getvalue().decode()) if path.suffix == ".html" else data.getvalue())


def _page(seen: Iteration, svg: str) -> str:
    title = html.escape(f"{seen.subject.model.name} by {seen.subject.engine} on {seen.subject.hardware.name}")
    lines = [line for line in (seen.verdict, seen.relief, seen.sharing, seen.missing) if line]
    said = "\n".join(f"<p>{html.escape(line)}</p>" for line in lines)
    picture = svg[svg.index("<svg") :]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>\n'
        "<style>body{font-family:sans-serif;max-width:70em;margin:2em auto}svg{width:100%;height:auto}</style></head>\n"
        f"<body>\n<h1>{title}</h1>\n{said}\n{picture}\n</body></html>\n"
    )


def _shade(axes: Axes, seen: Iteration) -> None:
    for stretch in seen.stretches:
        axes.axvspan(stretch.start_s, stretch.end_s, color=_COLOURS[f"phase {stretch.phase}"], linewidth=0, zorder=0)
        axes.axvline(stretch.start_s, color=_COLOURS["quiet"], linewidth=0.6, zorder=1)
    axes.set_xlim(0.0, seen.period_s)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=_COLOURS["grid"], linewidth=0.6, zorder=1)
    axes.set_axisbelow(True)


def _name_phases(axes: Axes, seen: Iteration) -> None:
    for stretch in seen.stretches:
        if (length_s := stretch.end_s - stretch.start_s) < _MIN_LABELLED * seen.period_s:
            continue
        name = f"{stretch.phase} {si(length_s, 's')}"
        middle_s = (stretch.start_s + stretch.end_s) / 2
        axes.text(middle_s, 1.02, name, transform=axes.get_xaxis_transform(), ha="center", va="bottom", fontsize=9)


def _draw_memory(axes: Axes, seen: Iteration) -> None:
    """Stack the classes, those that change least at the bottom."""
    use, capacity_bytes = seen.memory[Tier.GPU], seen.peaks[Tier.GPU].capacity_bytes
    times_s = np.append(use.times_s, seen.period_s)
    held = {c: np.array([*n, n[-1]]) / 1e9 for c, n in use.num_bytes.items() if any(n)}
    base = np.zeros(len(times_s))
    bands = []
    for name, values in sorted(held.items(), key=lambda item: float(np.ptp(item[1]))):
        label = f"{name}\nup to {si(float(values.max()) * 1e9, 'B')}"
        bands.append(
            axes.fill_between(
                times_s, base, base + values, step="post", color=_COLOURS[name], linewidth=0, label=label, zorder=2
            )
        )
        base = base + values
    _legend(axes, bands[::-1])  # from top to bottom, as they are stacked
    levels = [(capacity_bytes, "capacity", "-")]
    if seen.allocator is not None:
        levels.append((seen.allocator.reserved_bytes, "reserved by PyTorch's allocator", ":"))
    highest_bytes = max(level[0] for level in levels)
    for num_bytes, what, style in levels:
        align = "bottom" if num_bytes == highest_bytes else "top"  # the names of near lines stay apart
        axes.axhline(num_bytes / 1e9, color=_COLOURS["ink"], linewidth=1.0, linestyle=style, zorder=3)
        axes.annotate(
            f"{what} {si(num_bytes, 'B')}", (seen.period_s, num_bytes / 1e9), (-4, 2 if align == "bottom" else -2),
            textcoords="offset points", ha="right", va=align, fontsize=9, zorder=4,
            bbox={"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.7},
        )  # fmt: skip
    axes.set_ylim(0.0, 1.1 * max(use.peak_bytes, highest_bytes) / 1e9)
    axes.set_ylabel("GPU memory (GB)")


def _draw_links(axes: Axes, seen: Iteration) -> None:
    """Draw traffic to the device upwards and traffic from it downwards."""
    lines = []
    highest = 0.0
    for link, (sign, colour, name) in _DIRECTIONS.items():
        if (series := seen.traffic.get(link)) is not None:
            highest = max(highest, series.peak / 1e9)
            label = f"{name}\n{si(series.integral, 'B')}, peak {si(series.peak, 'B/s')}"
            lines.append(_rate(axes, series, sign * 1e-9, _COLOURS[colour], "-", label))
    _legend(axes, lines)
    limit = 1.1 * highest or 1.0
    axes.set_ylim(-limit, limit)
    axes.axhline(0.0, color=_COLOURS["ink"], linewidth=0.8, zorder=3)
    axes.yaxis.set_major_formatter(lambda value, _: f"{abs(value):g}")
    axes.set_ylabel("PCIe (GB/s)")


def _draw_busy(axes: Axes, seen: Iteration) -> None:
    lines = []
    for processor, (colour, style, name) in _BUSY.items():
        series = seen.busy[processor]
        label = f"{name}\n{percent(series.integral / seen.period_s)} of the time"
        lines.append(_rate(axes, series, 100.0, _COLOURS[colour], style, label))
    _legend(axes, lines)
    axes.set_ylim(0.0, 105.0)
    axes.set_yticks([0, 50, 100])
    axes.set_ylabel("busy (%)")


def _rate(axes: Axes, series: Series, scale: float, colour: str, style: str, label: str) -> Line2D:
    """Draw the mean over a sliding window as a line, and faintly every single step behind it."""
    edges_s = np.append(series.times_s, series.period_s)
    axes.stairs(scale * series.values, edges_s, fill=True, color=colour, alpha=0.22, linewidth=0, zorder=2)
    at_s = np.linspace(0.0, series.period_s, _NUM_SAMPLES)
    means = scale * series.moving_means(at_s, _WINDOW * series.period_s)
    return axes.plot(at_s, means, color=colour, linestyle=style, linewidth=1.5, label=label, zorder=3)[0]


def _legend(axes: Axes, handles: Sequence[Artist]) -> None:
    axes.legend(
        handles=handles, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=9, handlelength=1.4,
        labelspacing=0.8,
    )  # fmt: skip
