"""The screen of `ullage plan --mtbf` about checkpoints."""

from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table

from planner.plan.checkpoints import CheckpointPlan
from ullage.output.console import facts, table
from ullage.output.formatting import duration, percent, si
from ullage.output.plans import LEVEL_COLUMNS, level_rows


def checkpoints_screen(plan: CheckpointPlan) -> Iterator[RenderableType]:
    """Yield tables: the chosen levels, expected times, and other checkpoint engines."""
    yield _levels(plan)
    yield facts(_expected(plan))
    yield _engines(plan)


def _levels(plan: CheckpointPlan) -> Table:
    result = table(f"checkpoints of {si(plan.size_bytes, 'B')}", *LEVEL_COLUMNS, text={7})
    for row in level_rows(plan):
        result.add_row(*row)
    return result


def _expected(plan: CheckpointPlan) -> dict[str, str]:
    """Return the expected loss of time with and without checkpoints, and its assumptions."""
    num_iterations = plan.request.num_iterations
    run = (
        "a day of training"
        if num_iterations is None
        else f"the run of {num_iterations:,} iterations ({duration(plan.work_s)})"
    )
    written = ", ".join(
        f"{si(each.written_bytes_per_day, 'B')} a day to {each.level}" for each in plan.levels if each.level != "memory"
    )
    unused = "; ".join(f"{level}: {why}" for level, why in plan.left_out.items())
    return {
        "lost": f"{percent(plan.waste)} of the time (saving alone {percent(plan.overhead)}): {run} is expected to take "
        f"{duration(plan.expected_s)}, and without checkpoints {duration(plan.without_s)}",
        "at most": f"one failure loses at most {duration(plan.most_lost_s)} of work",
        "takes": f"{si(plan.node_buffer_bytes, 'B')} of each host as a buffer; {written}",
        **({"not used": unused} if unused else {}),
        "assumed": "; ".join(plan.assumptions),
    }


def _engines(plan: CheckpointPlan) -> Table:
    columns = ("engine", "level", "every", "costs", "lost", "")
    result = table("checkpoint engines, each at its best interval", *columns, text={5})
    levels = "+".join(each.level for each in plan.levels)
    first = plan.levels[0]
    result.add_row(
        "ullage", levels, f"{first.every} it.", duration(first.cost_s), percent(plan.waste), "", style="bold"
    )
    for row in plan.engines:
        if row.every is None or row.cost_s is None or row.waste is None:
            result.add_row(row.name, "-", "-", "-", "-", (row.why_not or "").partition(", which")[0])
        else:
            result.add_row(row.name, row.level or "", f"{row.every} it.", duration(row.cost_s), percent(row.waste), "")
    return result
