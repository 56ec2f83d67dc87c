"""What differs in training under a plan with pipeline stages, whose processes have one stage each."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from transformers import PreTrainedModel

from executor.prepare import OffloadedOptimizer
from planner.plan.document import Plan, PlanError
from planner.schedule.schedule import Schedule
from planner.schedule.tasks import Op, Task
from planner.schedule.timeline import Span, Timeline

_INSIDE_BACKWARD = frozenset({Op.RECOMPUTE, Op.BACKWARD})


def check_stages(plan: Plan, **asked: object) -> None:
    """Check that what is asked for beside training can be done with stages.

    Args:
        plan: the plan.
        asked: options, by their names on the command line, each false if it is not given.

    Raises:
        PlanError: it cannot.
    """
    names = [name for name, is_asked in asked.items() if is_asked]
    if names and plan.decisions.pipeline_parallel > 1:
        raise PlanError(
            f"--{names[0].replace('_', '-')} cannot be used with pipeline stages, which would each need its own; "
            "leave it out, or plan with --parallel pipeline=1"
        )


def save_stages(optimizer: OffloadedOptimizer, folder: Path, *, is_first: bool) -> None:
    """Close the session, which gives every process the weights of all stages, and save the model on one.

    Raises:
        OSError: the folder cannot be written; no folder has its name.
    """
    optimizer.session.close()
    if is_first:
        begun = folder.with_name(f".{folder.name}.part")
        model = cast("PreTrainedModel", optimizer.session.model)
        try:
            model.save_pretrained(begun)
            begun.rename(folder)
        finally:
            shutil.rmtree(begun, ignore_errors=True)


def as_planned(timeline: Timeline, schedule: Schedule) -> Timeline:
    """Return a stage's measured times as those of the tasks of its plan.

    In the plan, forward and backward of a stage are one task each for every micro-batch, see [Note: Stages] in
    :mod:`planner.lowering.pipeline`; when it runs, each of its units has tasks. What else a stage does is left out.

    Args:
        timeline: measured by the first stage.
        schedule: the plan's.
    """
    if schedule.num_stages == 1:
        return timeline
    planned = {_kind(task): task.index for task in schedule.tasks if task.stage == 0 and _computes(task)}

    def spans() -> Iterator[Span]:
        for iteration in range(timeline.num_iterations):
            found: dict[tuple[Op, int], list[Span]] = {}
            for span in timeline.of_iteration(iteration):
                if _computes(task := timeline.schedule.tasks[span.task]):
                    found.setdefault(_kind(task), []).append(span)
            for kind, parts in found.items():
                begin_s, end_s = min(part.start_s for part in parts), max(part.end_s for part in parts)
                yield Span(iteration, planned[kind], begin_s, end_s)

    return Timeline.from_spans(schedule, spans(), timeline.num_iterations)


def _computes(task: Task) -> bool:
    return task.op is Op.FORWARD or task.op in _INSIDE_BACKWARD


def _kind(task: Task) -> tuple[Op, int]:
    return Op.BACKWARD if task.op in _INSIDE_BACKWARD else task.op, task.micro_batch
