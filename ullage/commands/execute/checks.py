"""Checks of the options of ``ullage execute``, before anything is measured, planned or read."""

import argparse
import shutil
from typing import Any, Final

from executor.devices.lanes import NUM_RECORDED
from executor.weights.files import weights_folder
from executor.weights.folder import check_new
from hwprofiles.files import check_regular, make_folder
from planner.plan.document import Plan
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
    if not args.checkpoint_places and args.resume:
        raise ValueError("--resume needs the place of the checkpoints; give --checkpoint-dir PLACE")
    for option, numbers in (("--checkpoint-every", args.checkpoint_every), ("--keep", args.keep)):
        given = ",".join(map(str, numbers)) or None
        _check_belongs(
            option, given, "needs a place for checkpoints; give --checkpoint-dir PLACE", args.checkpoint_places or None
        )
    if too_few := [count for count in args.keep if count < MIN_CHECKPOINTS]:
        raise ValueError(
            f"--keep {too_few[0]} is too few, because one checkpoint may be damaged; give --keep {MIN_CHECKPOINTS} or "
            "more"
        )
    if args.replan and args.num_iterations < REPLAN_AFTER + MIN_MEASURED:
        raise ValueError(
            f"--replan plans again after {REPLAN_AFTER} iterations and measures at least {MIN_MEASURED} more, but "
            f"there are {args.num_iterations}; run at least {REPLAN_AFTER + MIN_MEASURED}"
        )
    if args.data.path is not None:
        check_regular(args.data.path)
    if args.data.dtype is not None and args.data.path is None:
        raise ValueError(f"--data dtype={args.data.dtype} has no file; give --data PATH,dtype={args.data.dtype}")
    if args.save and "" not in args.save:
        raise ValueError(f"--save dtype={args.save['dtype']} has no folder; give --save DIR,dtype={args.save['dtype']}")
    if args.weights is not None:
        weights_folder(args.weights)
    if args.save:
        make_folder("--save", args.save[""].absolute().parent)
        check_new(args.save[""])


def _check_belongs(option: str, value: object, words: str, needed: object) -> None:
    if value is not None and needed is None:
        raise ValueError(f"{option} {value} {words}")


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
