"""``ullage plan``: find the fastest way to train a model on some hardware."""

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from hwprofiles.files import write_whole
from hwprofiles.registry import load_profile
from planner.decisions import Precision
from planner.models.registry import resolve_model
from planner.planning import Request, make_plan
from planner.search import Candidate
from ullage.arguments import parse_bytes, positive_int
from ullage.commands import Subparsers, command_parser

DEFAULT_HARDWARE = "a100-80"


def add_parser(subparsers: Subparsers) -> None:
    """Add the parser of this command."""
    parser = command_parser(
        subparsers,
        "plan",
        run,
        "Find the fastest way to train a model on some hardware: says whether it fits, how long an iteration takes,\n"
        "what binds, and what other engines would take. Writes the plan to a file that `ullage execute` runs.",
        """
        ullage plan --model opt-13b --gpus 8
        ullage plan --model path/to/config.json --hardware h100 --gpus 4 --seq-len 4096 --micro-batch 2
        ullage plan --model gpt2 --hardware local --device-memory 1.5GiB --output small.json
        """,
    )
    parser.add_argument("--model", required=True, help="name (see `ullage models`), hub id, or path of a config.json")
    parser.add_argument("--gpus", type=positive_int, default=1, metavar="N", help="devices to train on (default: 1)")
    parser.add_argument(
        "--hardware",
        metavar="NAME|PATH|local",
        help=f"profile of the machine, see `ullage hardware` (default: {DEFAULT_HARDWARE})",
    )
    parser.add_argument(
        "--seq-len",
        type=positive_int,
        metavar="N",
        help="tokens per sequence (2048, or the model's limit)",
    )
    parser.add_argument("--micro-batch", type=positive_int, default=4, metavar="N", help="sequences per forward (4)")
    parser.add_argument(
        "--accumulate", type=positive_int, default=1, metavar="N", help="micro-batches per iteration (1)"
    )
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16", help="of weights and gradients (bf16)")
    parser.add_argument("--no-clip", action="store_true", help="do not clip gradients by their global norm")
    parser.add_argument(
        "--device-memory", type=parse_bytes, metavar="SIZE", help="use this much of each device, as in 150MB or 16GiB"
    )
    parser.add_argument(
        "--budget", type=positive_int, default=160, metavar="N", help="schedules to simulate in the search (160)"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("plan.json"), metavar="PATH", help="where the plan goes (plan.json)"
    )
    parser.add_argument("--json", action="store_true", help="print the plan itself instead of tables")


def run(args: argparse.Namespace) -> int:
    """Plan, print, write."""
    hardware = load_profile(DEFAULT_HARDWARE if args.hardware is None else args.hardware)
    if args.device_memory is not None:
        hardware = hardware.with_device_memory(args.device_memory)
    if not args.output.absolute().parent.is_dir():
        raise ValueError(f"--output {args.output}: there is no such folder; make it first")  # not after the search
    model = resolve_model(args.model)
    request = Request(
        model=model,
        hardware=hardware,
        num_devices=args.gpus,
        seq_len=args.seq_len or min(2048, model.max_positions),
        micro_batch=args.micro_batch,
        num_micro_batches=args.accumulate,
        precision=Precision(weights=args.precision),
        clip=not args.no_clip,
    )
    with _progress() as progress:
        plan = make_plan(request, args.budget, progress)
    text = plan.to_json()
    if args.json:
        write_whole(args.output, text)
        sys.stdout.write(text)
        return 0
    from ullage.screens import plan_screen  # noqa: PLC0415 - rich is slow to import, and --json does without

    write_whole(args.output, text)
    plan_screen(plan, args.output, default_hardware=args.hardware is None)
    return 0


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
