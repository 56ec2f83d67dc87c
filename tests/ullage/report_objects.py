"""Reports to look at: of a plan, and of a run that took a factor longer than predicted."""

import html.parser
import json
from typing import Any

from planner.plan import Plan
from planner.schedule import Tier
from ullage.report import report_on
from ullage.report.charts import Part
from ullage.report.page import render
from ullage.runs import RunRecord, rows
from ullage.simulation import simulate

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


def part_of(source: Plan | RunRecord) -> Part:
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
