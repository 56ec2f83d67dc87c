"""The files that a report is about: :func:`load` reads one, :func:`report_on` returns its content as data."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from hwprofiles.complaints import kind_of
from hwprofiles.files import read_json
from planner.explain.tricks import worths
from planner.plan.document import Plan, load_plan
from ullage.analysis.comparison import explain_run
from ullage.analysis.iteration import View
from ullage.analysis.runs import RunRecord, load_run
from ullage.output.progress import Report
from ullage.report.charts import Part, Table
from ullage.report.explained import tricks_section
from ullage.report.offloading import offload_section
from ullage.report.over_time import gantt_section, memory_over_time, resources_section, traffic_section
from ullage.report.plan import plan_part
from ullage.report.roofline import roofline_section
from ullage.report.run import explained_sections
from ullage.report.study import study_part
from ullage.rivals.tricks import TRICKS, bench_of
from ullage.whatif.study import Study, load_study

_MAKERS = "`ullage plan`, `ullage execute` or `ullage whatif`"


def load(path: Path) -> Plan | RunRecord | Study:
    """Read a file that contains a plan, a run or a study.

    Raises:
        ValueError: the file is none of these, is a study that was not run, or cannot be used.
    """
    data = read_json(path, ValueError, f"give a file that {_MAKERS} wrote")
    match kind_of(data):
        case "run":
            return load_run(path)
        case "plan":
            return load_plan(path)
        case "study":
            study = load_study(path)
            if not study.points:
                raise ValueError(f"{path} is a study that was not run; run it with `ullage whatif {path}`")
            return study
    raise ValueError(f"{path} is not a plan, run or study; give a file that {_MAKERS} wrote")


def report_on(source: Plan | RunRecord | Study, progress: Report) -> Part:
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
    names = dict.fromkeys(fact.name for part in parts for fact in part.facts)
    found = [{fact.name: f"{fact.value}{fact.origin and f', {fact.origin}'}" for fact in part.facts} for part in parts]
    rows = tuple((name, *(facts.get(name, "-") for facts in found)) for name in names)
    return Table("Side by side", ("", *(f"{part.title} ({part.kind})" for part in parts)), rows)


def _of_plan(plan: Plan, run: RunRecord | None, progress: Report) -> Part:
    progress("simulating", 0, 0)
    bench = bench_of(plan)
    views = [View(bench.simulation.timeline, bench.simulation.steady, measured=False)]
    explained, measured_s = None, None
    if run is not None:
        views.append(View.measured_in(run))
        explained, _ = explain_run(run, lambda done, total: progress("replaying", done, total))
        measured_s = explained.attribution.measured_s
    cost = bench.cost
    part = plan_part(plan, run, measured_s)
    offloading = offload_section(bench, run, measured_s, progress)
    sections = (
        *(explained_sections(explained) if explained is not None else ()),
        *part.sections,
        gantt_section(views),
        memory_over_time(views, cost, run),
        traffic_section(views, cost),
        resources_section(views, cost),
        roofline_section(views, cost),
        tricks_section(bench, worths(bench, lambda done: progress("switching tricks off", done, 0), TRICKS)),
        *([offloading] if offloading is not None else []),
    )
    return dataclasses.replace(part, sections=sections)
