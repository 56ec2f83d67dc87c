"""Reports: one HTML file about plans, runs and studies. :func:`report_on` returns its content as data."""

from collections.abc import Sequence
from pathlib import Path

from hwprofiles.files import read_json
from planner.plan.document import Plan, PlanError, load_plan
from ullage.analysis.comparison import explain_run
from ullage.analysis.runs import RunRecord, load_run
from ullage.output.progress import Report
from ullage.report.charts import Fact, Part, Table
from ullage.report.checkpoints import checkpoints_section
from ullage.report.engines import engines_section, offload_section, tricks_section
from ullage.report.measured import comparison_section
from ullage.report.over_time import gantt_section, memory_section, resources_section, traffic_section
from ullage.report.roofline import roofline_section
from ullage.report.study import study_part
from ullage.report.summary import memory_by_tier, plan_summary
from ullage.report.views import View
from ullage.rivals.tricks import bench_of
from ullage.whatif.study import Study, load_study

Source = Plan | RunRecord | Study
_MAKERS = "`ullage plan`, `ullage execute` or `ullage whatif`"


class ReportError(ValueError):
    """Ullage cannot make a report about a file; the message says which files it takes."""


def load(path: Path) -> Source:
    """Read a file that contains a plan, a run or a study.

    Raises:
        ReportError: the file is none of these, or is a study that was not run.
        PlanError, RunError, StudyError: the plan, run or study cannot be used.
    """
    data = read_json(path, ReportError, f"give a file that {_MAKERS} wrote")
    keys = data.keys() if isinstance(data, dict) else ()
    if "start_s" in keys:
        return load_run(path)
    if "decisions" in keys:
        return load_plan(path)
    if "request" in keys:
        study = load_study(path)
        if not study.points:
            raise ReportError(f"{path} is a study that was not run; run it with `ullage whatif {path}`")
        return study
    raise ReportError(f"{path} is not a plan, run or study; give a file that {_MAKERS} wrote")


def report_on(source: Source, progress: Report) -> Part:
    """Return the part of a report about one file. ``progress`` is called with each step in words."""
    if isinstance(source, Study):
        return study_part(source)
    if isinstance(source, Plan):
        return _of_plan(source, None, progress)
    return _of_plan(source.plan, source, progress)


def side_by_side(parts: Sequence[Part]) -> Table | None:
    """Return the summaries of several files as columns of one table."""
    if len(parts) < 2:
        return None
    names = list(dict.fromkeys(fact.name for part in parts for fact in part.summary.facts))
    facts = [{fact.name: fact for fact in part.summary.facts} for part in parts]
    rows = tuple((name, *(_with_origin(found[name]) if name in found else "-" for found in facts)) for name in names)
    return Table("Side by side", ("", *(f"{p.summary.title} ({p.summary.kind})" for p in parts)), rows)


def _with_origin(fact: Fact) -> str:
    """Return a figure with its origin, predicted or measured."""
    origins = sorted((fact.words.find(word), word) for word in ("predicted", "measured") if word in fact.words)
    return fact.value + (f", {origins[0][1]}" if origins else "")


def _of_plan(plan: Plan, run: RunRecord | None, progress: Report) -> Part:
    progress("simulating", 0, 0)
    bench = bench_of(plan)
    views = [View.predicted_by(bench.simulation)]
    explained, measured_s = None, None
    if run is not None:
        views.append(View.measured_in(run))
        explained, _ = explain_run(run, lambda done, total: progress("replaying", done, total))
        measured_s = explained.attribution.measured_s
    cost = bench.cost
    sections = [
        memory_by_tier(plan, run),
        *([comparison_section(explained)] if explained is not None else []),
        gantt_section(views),
        memory_section(views, cost, run),
        traffic_section(views, cost),
        resources_section(views, cost),
        roofline_section(views, cost),
        engines_section(plan, measured_s),
        tricks_section(bench, progress),
    ]
    if (offloading := offload_section(bench, run, measured_s, progress)) is not None:
        sections.append(offloading)
    if plan.checkpoints is not None:
        sections.append(checkpoints_section(plan.checkpoints))
    return Part(plan_summary(plan, run, measured_s), tuple(sections))


__all__ = ["PlanError", "ReportError", "Source", "load", "report_on", "side_by_side"]
