"""A plan as sections, for pages of others: what ``ullage plan``, ``explain`` and ``report`` show."""

from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from planner.plan.document import Plan
from ullage.analysis.explanation import PlanExplained
from ullage.output.progress import Report
from ullage.report.charts import Part
from ullage.report.explained import plan_explained_part
from ullage.report.files import report_on, side_by_side
from ullage.report.interactive import THEMES
from ullage.report.plan import plan_part
from ullage.rivals.tricks import bench_of


def _silent(_step: str, _done: int, _total: int) -> None:
    pass


def summary(plan: Plan) -> Part:
    """Return what `ullage plan` shows: facts, memory by tier, other engines."""
    return plan_part(plan)


def explain(plan: Plan, progress: Report = _silent) -> Part:
    """Return what `ullage explain` shows: what binds, what each technique is worth, and which quantity matters."""
    return plan_explained_part(PlanExplained.of(bench_of(plan), every=False, progress=progress))


def details(plan: Plan, progress: Report = _silent) -> Part:
    """Return what `ullage report` shows: the summary, and charts of one iteration over time."""
    return report_on(plan, progress)


def report_html(plans: Sequence[Plan], progress: Report = _silent) -> str:
    """Return the page that `ullage report` writes about plans, side by side if there are several.

    Raises:
        ModuleNotFoundError: plotly or jinja2 is missing.
    """
    from ullage.report.page import render  # noqa: PLC0415 - plotly may be missing

    parts = [report_on(plan, progress) for plan in plans]
    return render(parts, side_by_side(parts))


def page_assets() -> dict[str, Any]:
    """Return what draws and styles the data of :func:`ullage.report.parts.page_data` in a browser.

    ``page.css`` and ``page.js`` are texts. The script needs plotly.js before it, and defines
    ``ullageCharts(figures, themes)``. ``themes`` are the colours of both themes.
    """
    own = files("ullage.report") / "assets"
    texts = {name: (own / name).read_text(encoding="utf-8") for name in ("page.css", "page.js")}
    return texts | {"themes": THEMES}
