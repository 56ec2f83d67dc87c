"""The report's section about checkpoints of a plan."""

from planner.plan.checkpoints import CheckpointPlan
from ullage.output.formatting import duration, percent, si
from ullage.output.plans import LEVEL_COLUMNS, level_rows
from ullage.report.charts import Axis, Chart, Mark, Section, Table, Trace


def checkpoints_section(chosen: CheckpointPlan) -> Section:
    """Show the intervals of checkpoints, their cost, and the loss of other checkpoint engines at their best."""
    words = (
        f"Expected: {percent(chosen.waste)} of the time is lost, {percent(chosen.overhead)} to making checkpoints of "
        f"{si(chosen.size_bytes, 'B')}, the rest to failures. {duration(chosen.work_s)} of training take "
        f"{duration(chosen.expected_s)}, or {duration(chosen.without_s)} without checkpoints. One failure loses at "
        f"most {duration(chosen.most_lost_s)} of work."
    )
    unused = "; ".join(f"{level} not used: {why}" for level, why in chosen.left_out.items())
    levels = Table("Levels", LEVEL_COLUMNS, level_rows(chosen), unused)
    engines = [("ullage (this plan)", chosen.waste, ""), *((e.name, e.waste, e.why_not or "") for e in chosen.engines)]
    engines = [row for row in engines if row[0] != "ullage"]
    known = [(name, waste) for name, waste, _ in engines if waste is not None]
    chart = Chart(
        key="checkpoints",
        title="Time lost to checkpoints and failures",
        note="Each checkpoint engine at its own best interval.",
        x=Axis("expected share of the time", "%"),
        traces=(
            Trace(
                "lost",
                [waste for _, waste in known],
                [name for name, _ in known],
                Mark.BARS,
                ["first", *["quiet"] * (len(known) - 1)],
                texts=[percent(waste) for _, waste in known],
            ),
        ),
    )
    unknown = "; ".join(f"{name}: {why}" for name, waste, why in engines if waste is None)
    rows = tuple((assumption,) for assumption in chosen.assumptions)
    assumed = Table("Assumed, not measured", ("assumption",), rows, unknown)
    return Section("checkpoints", "Checkpoints", "Checkpoints", (words,), (levels, chart, assumed))
