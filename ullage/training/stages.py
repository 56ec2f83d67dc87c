"""What differs in training under a plan with pipeline stages, whose processes have one stage each."""

import numpy as np

from planner.plan.document import Plan, PlanError
from planner.schedule.schedule import Schedule
from planner.schedule.tasks import Lane
from planner.schedule.timeline import Timeline


def check_stages(plan: Plan, *, replan: bool) -> None:
    """Check that another plan can take over, if it may have to.

    Raises:
        PlanError: it cannot.
    """
    if replan and plan.decisions.pipeline_parallel > 1:
        raise PlanError(
            "--replan cannot be used with pipeline stages, whose plan cannot change while they train; leave it out, or "
            "plan with --parallel pipeline=1"
        )


def as_planned(timeline: Timeline, schedule: Schedule, stage: int) -> Timeline:
    """Return a stage's measured times as those of its tasks among the plan's, see [Note: Stages].

    Args:
        timeline: measured by the stage.
        schedule: the plan's, of all stages. What is sent between them is not measured.
        stage: its number.
    """
    if schedule.num_stages == 1:
        return timeline
    between = {Lane.SEND, Lane.SEND_BACK}
    own = [task.index for task in schedule.tasks if task.stage == stage and task.lane not in between]
    start_s, end_s = np.full((2, timeline.num_iterations, schedule.num_tasks), np.nan)
    start_s[:, own], end_s[:, own] = timeline.start_s, timeline.end_s
    return Timeline(schedule, start_s, end_s)
