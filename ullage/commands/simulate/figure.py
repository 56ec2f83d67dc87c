"""One simulated iteration as a picture: memory, traffic and busy shares on one time axis, phases shaded.

The memory-wall study draws the same three panels of measured runs (Maurya et al., "Breaking the Memory Wall:
A Study of I/O Patterns and GPU Memory Utilization for Hybrid CPU-GPU Offloaded Optimizers", FlexScience 2024).
"""

import dataclasses
import html
from pathlib import Path

from hwprofiles.files import write_whole
from planner.schedule.tasks import Tier
from ullage.analysis.iteration import Iteration
from ullage.output.formatting import si
from ullage.output.palette import COLOURS
from ullage.report.charts import Chart, Level
from ullage.report.over_time import memory_section, resources_section, traffic_section
from ullage.report.static import draw_on, to_bytes
from ullage.report.views import View

from matplotlib.figure import Figure  # isort: skip  (static names the remedy if it is missing)

_SIZE_INCHES = (10.0, 7.0)


def draw(seen: Iteration) -> Figure:
    """Return the picture of an iteration."""
    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    charts = _charts(seen)
    panels = figure.subplots(len(charts), 1, sharex=True, height_ratios=(5, 4, 3))
    for axes, chart in zip(panels, charts, strict=True):
        draw_on(axes, chart)
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=9, reverse=chart is charts[0])
        axes.label_outer()
    subject = seen.subject
    figure.suptitle(
        f"{subject.model.name} by {subject.engine} on {subject.decisions.num_devices} device(s) of "
        f"{subject.hardware.name}: {si(seen.period_s, 's')} per iteration, simulated, one rank",
        x=0.01,
        ha="left",
        fontsize=11,
        fontweight="bold",
    )
    figure.supxlabel(seen.verdict, x=0.01, ha="left", fontsize=9, color=COLOURS["soft"].light)
    return figure


def _charts(seen: Iteration) -> tuple[Chart, ...]:
    """Return the charts of device memory, host link and processors, as in a report."""
    views, cost = [View.predicted_by(seen.simulation)], seen.subject.cost
    sections = (memory_section(views, cost, None), traffic_section(views, cost), resources_section(views, cost))
    found = {chart.key: chart for section in sections for chart in section.pictures if isinstance(chart, Chart)}
    memory, busy = found[f"memory-{Tier.GPU}"], found["busy"]
    memory = dataclasses.replace(memory, levels=(Level(seen.peaks[Tier.GPU].capacity_bytes, "capacity"),))
    nothing = dataclasses.replace(
        memory, y=dataclasses.replace(memory.y, title="rate", unit="B/s"), traces=(), levels=()
    )
    unnamed = tuple(dataclasses.replace(band, words="") for band in memory.bands)
    others = (found.get("traffic-host-link", nothing), busy)
    return (memory, *(dataclasses.replace(chart, bands=unnamed) for chart in others))


def save_figure(seen: Iteration, path: Path) -> None:
    """Draw an iteration into a file in one step: SVG, PNG, or self-contained HTML.

    Equal iterations give equal bytes (with the same version of matplotlib).

    Raises:
        OSError: the file cannot be written.
    """
    data = to_bytes(draw(seen), "png" if path.suffix == ".png" else "svg")
    write_whole(path, _page(seen, data.decode()) if path.suffix == ".html" else data)


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
