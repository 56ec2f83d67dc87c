"""Checks of the options of ``ullage execute``, before anything is measured, planned or read."""

import argparse
import shutil
from typing import Any, Final

import numpy as np

from executor.devices.lanes import NUM_RECORDED
from executor.weights.files import weights_folder
from executor.weights.folder import check_new
from hwprofiles.files import check_regular, make_folder
from planner.plan.document import Plan, PlanError
from planner.schedule.schedule import Schedule
from planner.schedule.timeline import Timeline
from planner.terms import MIN_CHECKPOINTS
from ullage.analysis.runs import MIN_MEASURED
from ullage.cli.arguments import WEIGHT_BYTES
from ullage.output.formatting import si

REPLAN_AFTER: Final = 10
_TIMES_BYTES: Final = 16  # of a task of an iteration in run.json, at least


def check_options(args: argparse.Namespace) -> None:
    """Check that options match, that files and weights exist, and that the folder for saving the model does not.

    Raises:
        ValueError: an option is missing or contradicts another, the weights do not exist, or the folder of ``--save``
            does.
        OSError: a file does not exist, or the folder of ``--save`` cannot be made.
    """
    _check_checkpoints(args)
    if args.replan and args.num_iterations < REPLAN_AFTER + MIN_MEASURED:
        raise ValueError(
            f"--replan plans again after {REPLAN_AFTER} iterations and measures at least {MIN_MEASURED} more, but "
            f"there are {args.num_iterations}; run at least {REPLAN_AFTER + MIN_MEASURED}"
        )
    if "" in args.data:
        check_regular(args.data[""])
    elif "dtype" in args.data:
        raise ValueError(f"--data dtype={args.data['dtype']} has no file; give --data PATH,dtype={args.data['dtype']}")
    if args.save and "" not in args.save:
        raise ValueError(f"--save dtype={args.save['dtype']} has no folder; give --save DIR,dtype={args.save['dtype']}")
    if args.weights is not None:
        weights_folder(args.weights)
    if args.save:
        make_folder("--save", args.save[""].absolute().parent)
        check_new(args.save[""])


def _check_checkpoints(args: argparse.Namespace) -> None:
    for option in ("resume", "elastic"):
        if not args.checkpoint_dirs and getattr(args, option):
            raise ValueError(f"--{option} needs the place of the checkpoints; give --checkpoint-dir PLACE")
    for given in args.checkpoint_dirs:
        if "" not in given:
            raise ValueError("--checkpoint-dir has no place; give one, as in --checkpoint-dir PLACE,every=10")
        if given.get("keep", MIN_CHECKPOINTS) < MIN_CHECKPOINTS:
            raise ValueError(
                f"--checkpoint-dir {given['']},keep={given['keep']} is too few, because one checkpoint may be damaged; "
                f"keep at least {MIN_CHECKPOINTS}"
            )


def check_room(plan: Plan, args: argparse.Namespace) -> None:
    """Check that drives have room for what is written at the end of training, before it begins.

    Raises:
        ValueError: there is too little.
    """
    tasks = plan.schedule().num_tasks * min(args.num_iterations, NUM_RECORDED)
    needs: dict[tuple[str, Any], int] = {("--output-dir", args.output_dir): tasks * _TIMES_BYTES}
    if args.save:
        width = WEIGHT_BYTES[args.save["dtype"]] if "dtype" in args.save else plan.decisions.precision.weight_bytes
        trained = sum(unit.num_params for unit in plan.units())  # of LoRA only the adapters are saved
        needs["--save", args.save[""].absolute().parent] = trained * width
    for (option, folder), num_bytes in needs.items():
        if (free := shutil.disk_usage(folder).free) < num_bytes:
            raise ValueError(
                f"{option} needs {si(num_bytes, 'B')} at the end of training, but the drive of {folder} has "
                f"{si(free, 'B')} free; make room, or give a folder on another drive"
            )


def check_changes(plan: Plan, *, replan: bool, elastic: bool) -> None:
    """Check that another plan can take over, if it may have to.

    Raises:
        PlanError: it cannot.
    """
    if plan.others and (replan or elastic):
        raise PlanError(
            f"{'--replan' if replan else '--elastic'} cannot be used with devices of several kinds, whose shares of a "
            "batch are planned together; leave it out"
        )
    if replan and plan.decisions.pipeline_parallel > 1:
        raise PlanError(
            "--replan cannot be used with pipeline stages, whose plan cannot change while they train; leave it out, or "
            "plan with --parallel pipeline=1"
        )


def as_planned(timeline: Timeline, schedule: Schedule, stage: int) -> Timeline:
    """Return a stage's measured times as those of its tasks among the plan's, see [Note: Stages].

    Args:
        timeline: measured by the stage.
        schedule: the plan's, of all stages.
        stage: its number.
    """
    if schedule.num_stages == 1:
        return timeline
    own = [task.index for task in schedule.tasks if task.stage == stage]
    start_s, end_s = np.full((2, timeline.num_iterations, schedule.num_tasks), np.nan)
    start_s[:, own], end_s[:, own] = timeline.start_s, timeline.end_s
    return Timeline(schedule, start_s, end_s)
