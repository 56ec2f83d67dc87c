"""``ullage plan``: find the fastest way to train a model on some hardware."""

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from hwprofiles.files import check_output, write_whole
from hwprofiles.machine import check_measured_here
from hwprofiles.registry import LOCAL
from planner.checkpoints.choosing import protected
from planner.planning import InfeasibleError, Request, make_plan
from planner.remedies import what_would_fit
from planner.search import Candidate
from ullage.arguments import positive_float
from ullage.commands import Subparsers, command_parser
from ullage.failures import add_checkpoint_options, checkpoints_of, with_pfs
from ullage.formatting import si
from ullage.request import add_request_options, request_of


def add_parser(subparsers: Subparsers) -> None:
    """Add the parser of this command."""
    parser = command_parser(
        subparsers,
        "plan",
        run,
        "Find the fastest way to train a model on some hardware: says whether it fits, how long an iteration takes,\n"
        "what binds, and what other engines would take. Writes the plan to a file that `ullage execute` runs.\n"
        "A model of your own is captured from package.module:function, looked for from the current directory.",
        """
        ullage plan --model opt-13b --gpus 8
        ullage plan --model path/to/config.json --hardware h100 --gpus 4 --seq-len 4096 --micro-batch 2
        ullage plan --model llama-3-70b --hardware a100-cluster --gpus 64 --global-batch 256
        ullage plan --model mixtral-8x7b --hardware h100 --gpus 8 --expert-parallel 4 --expert-load zipf:1.2
        ullage plan --model gpt2 --hardware local --device-memory 1.5GiB --output small.json
        ullage plan --model opt-66b --hardware rtx4090-12ssd --storage nvme
        ullage plan --model opt-13b --hardware h100 --optimizer lion
        ullage plan --model my_package.models:make --input-shape 8x3x224x224 8:int64 --gpus 2
        ullage plan --model opt-13b --gpus 8 --mtbf 6h --max-lost-work 30m
        ullage plan --model opt-13b --gpus 8 --mtbf memory=2h,nvme=1d,pfs=30d --pfs-bandwidth 2GB
        """,
    )
    add_request_options(parser, model_required=True)
    add_checkpoint_options(parser)
    parser.add_argument(
        "--budget",
        type=positive_float,
        metavar="SECONDS",
        help="search for so long, or until nothing better is in sight (as many schedules as take some seconds)",
    )
    parser.add_argument(
        "--output", type=Path, default=Path("plan.json"), metavar="PATH", help="where the plan goes (plan.json)"
    )
    parser.add_argument(
        "--allow-other-machine",
        action="store_true",
        help="plan for --hardware local also if it was measured on another machine than this one",
    )
    parser.add_argument("--json", action="store_true", help="print the plan itself instead of tables")


def run(args: argparse.Namespace) -> int:
    """Plan, print, write."""
    check_output("--output", args.output)  # not after the search
    request, checkpoints = request_of(args), checkpoints_of(args)
    if args.hardware == LOCAL and not args.allow_other_machine:
        check_measured_here(request.hardware)
    if args.pfs_bandwidth is not None:
        request = dataclasses.replace(request, hardware=with_pfs(request.hardware, args.pfs_bandwidth))
    try:
        with _progress() as progress:
            plan = make_plan(request, progress=progress, budget_s=args.budget)
    except InfeasibleError as error:
        raise ValueError(f"{error}; {_remedies(request)}") from error
    if checkpoints is not None:
        plan = protected(plan, checkpoints)
    text = plan.to_json()
    if args.json:
        write_whole(args.output, text)
        sys.stdout.write(text)
        return 0
    from ullage.screens import plan_screen  # noqa: PLC0415 - rich is slow to import, and --json does without

    write_whole(args.output, text)
    plan_screen(plan, args.output, default_hardware=args.hardware is None)
    return 0


def _remedies(request: Request) -> str:
    """Say with which changes a plan was found."""
    from ullage.console import console  # noqa: PLC0415 - rich is slow to import

    quiet = contextlib.nullcontext() if not sys.stderr.isatty() else None
    with quiet or console(stderr=True).status("nothing fits; looking for what would"):
        found = what_would_fit(request)
    if not found:
        return "nothing that was tried makes it fit"
    return "a plan was found with " + ", or with ".join(
        f"{remedy.words} ({si(remedy.iteration_s, 's')} per iteration before any search)" for remedy in found
    )


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[Candidate, int], None] | None]:
    """Show the best so far on stderr, if that is a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from ullage.console import console  # noqa: PLC0415 - rich is slow to import

    with console(stderr=True).status("looking at engine policies") as status:

        def show(best: Candidate, num_simulations: int) -> None:
            found = "nothing fits yet" if best.missing_bytes else f"best so far {best.iteration_s:.3g} s per iteration"
            status.update(f"{num_simulations} schedules simulated, {found}")

        yield show
