"""Reports to look at: of a plan, and of a run that took a factor longer than predicted."""

import html.parser
import json
from typing import Any

from planner.plan.document import Plan
from planner.schedule.tasks import Lane, Tier
from planner.simulate.prediction import TierMemory
from ullage.analysis.runs import RunRecord, rows
from ullage.analysis.simulation import simulate
from ullage.report.charts import Part
from ullage.report.files import report_on
from ullage.report.page import render
from ullage.whatif.prices import Prices
from ullage.whatif.study import (
    Axis,
    Cost,
    Figures,
    Point,
    Result,
    Sensitivities,
    Sensitivity,
    Side,
    Study,
    StudyRequest,
    Varied,
)

SLOWER = 1.25
VOID = {"meta", "link", "br", "img", "input", "hr"}


def slower_run(plan: Plan, machine: str = "a machine") -> RunRecord:
    """A run in which every task took a factor longer, and whose memory was as predicted."""
    simulation = simulate(plan, 6)
    device_bytes = {task.index: 1000 for task in simulation.timeline.schedule.tasks if task.lane == "compute"}
    return RunRecord(
        plan=plan,
        machine=machine,
        losses=(2.0, 1.0),
        start_s=rows(simulation.timeline.start_s * SLOWER),
        end_s=rows(simulation.timeline.end_s * SLOWER),
        steady_iterations=(2, 3, 4),
        memory={tier: use.peak_bytes for tier, use in plan.prediction.memory.items()},
        static_bytes={Tier.GPU: {"parameters": plan.gpu_memory.peak_bytes - 1000}},
        device_bytes=device_bytes,
        data_position=0,
    )


def part_of(source: Plan | RunRecord | Study) -> Part:
    return report_on(source, lambda *_: None)


class Page(html.parser.HTMLParser):
    """The elements of a page with their attributes, their text, and what scripts and styles hold."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self._open: list[str] = []
        self.feed(text)
        assert self._open == [], "elements that are never closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self._open[-1] if self._open else "", data))

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def text(self, tag: str) -> list[str]:
        return [text for name, text in self.texts if name == tag]

    @property
    def words(self) -> str:
        return "\n".join(text for tag, text in self.texts if tag not in {"script", "style"})

    @property
    def figures(self) -> list[dict[str, Any]]:
        scripts = zip(self.named("script"), self.text("script"), strict=True)
        return next(json.loads(text) for attributes, text in scripts if attributes.get("id") == "figures")


def page_of(*parts: Part) -> Page:
    return Page(render(parts))


def study(num_values: int = 4, *, priced: bool = True) -> Study:
    """A study of two axes: more devices are faster and cost more, a faster link helps few of them; one does not fit."""
    axes = (
        Axis(name="gpus", words="devices", values=tuple(range(1, num_values + 1))),
        Axis(name="host-link", words="host link", unit="bytes_per_s", relative=True, values=(0.5, 1.0, 2.0)),
    )
    points = tuple(_point(gpus, factor, priced=priced) for gpus in axes[0].values for factor in axes[1].values)
    side = Side(factor=1.1, value=22e9, iteration_s=1.9, bound_by=Lane.COMPUTE)
    row = Sensitivity(
        name="host-link", words="host link", unit="bytes_per_s", value=20e9, less=side, more=side, elasticity_less=None,
        elasticity_more=-0.4, step_words="1 GB/s", seconds_per_step=-0.02,
    )  # fmt: skip
    return Study(
        program_version="0.1.0",
        request=StudyRequest(set={"model": "opt-13b"}, tokens=1e9),
        axes=axes,
        prices=Prices(currency="USD", machines={}) if priced else None,
        points=points,
        complete=True,
        sensitivities=Sensitivities(base=points[0].result, step=0.1, range=4.0, rows=(row,)),
        notes=("prices are made up",),
    )


def _point(gpus: int, factor: float, *, priced: bool) -> Point:
    varied = {"host-link": Varied(before=20e9, after=20e9 * factor)}
    named = {"settings": {"gpus": gpus, "host-link": factor}, "varied": varied, "hardware": "h", "model": "opt-13b"}
    if (gpus, factor) == (1, 0.5):
        return Point(**named, key="a", result=Result(status="lacks-memory", reason="lacks 5 GB", missing_bytes={}))
    speed = 1000.0 * gpus * (1 if factor < 1 else 1.1)
    figures = Figures(
        iteration_s=1000.0 / speed, forward_s=0.3, backward_s=0.6, update_s=0.1, loop_s=0.0, tokens_per_iteration=1000,
        tokens_per_s=speed, model_flop_per_s=1e14, num_devices=gpus, num_nodes=1,
        critical_s={Lane.H2D if factor < 1 else Lane.COMPUTE: 1.0}, busy_s={}, converged=True,
        memory={Tier.GPU: TierMemory(peak_bytes=50, capacity_bytes=100, by_class={})}, choice="", placement="",
        engines={}, num_simulations=1,
    )  # fmt: skip
    cost = Cost(per_hour=2.0 * gpus**1.5, per_million_tokens=2.0 * gpus**1.5 / 3600 / speed * 1e6, run=5.0)
    return Point(
        **named, key=f"{gpus} {factor}", result=Result(status="fits", figures=figures), cost=cost if priced else None,
        on_front=priced and factor == 1.0,
    )  # fmt: skip


def pictures(part):
    return {picture.key: picture for section in part.sections for picture in section.pictures}


def in_colour(value, colours):
    """Do what the page does with names of colours."""
    if isinstance(value, str) and value.startswith("@"):
        return colours[value[1:].partition("/")[0]]
    if isinstance(value, dict):
        return {key: in_colour(item, colours) for key, item in value.items()}
    return [in_colour(item, colours) for item in value] if isinstance(value, list) else value
