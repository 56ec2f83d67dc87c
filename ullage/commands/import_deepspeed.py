"""``ullage import-deepspeed``: predict the speed of a DeepSpeed configuration, and compare it with a plan."""

import argparse
import sys
from pathlib import Path

from hwprofiles.files import check_output, write_whole
from ullage.cli.default_hardware import print_default_hardware
from ullage.cli.options import add_options
from ullage.cli.request import request_of
from ullage.commands import Subparsers, command_parser


def add_parser(subparsers: Subparsers) -> None:
    """Add the parser of this command."""
    parser = command_parser(
        subparsers,
        "import-deepspeed",
        run,
        "Simulate an iteration of a DeepSpeed configuration, plan the same training with Ullage, and show both side\n"
        "by side: time, memory, and causes of the difference. Batch, accumulation, types, optimizer and clipping\n"
        "come from the configuration; options here set values that are 'auto' there. Unknown keys, and keys that are\n"
        "not simulated, are listed. All figures are predictions.",
        """
        ullage import-deepspeed ds_config.json --model opt-13b --hardware h100x4-80g --gpus 4
        ullage import-deepspeed ds_config.json --model llama-3-8b --micro-batch 4 --output plan.json
        ullage import-deepspeed ds_config.json --model opt-13b --gpus 4 --json
        """,
    )
    parser.add_argument("config", type=Path, metavar="CONFIG", help="a ds_config.json")
    parser.add_argument(
        "--output", "-o", type=Path, metavar="PATH", help="file for the plan (default: it is not written)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    add_options(parser, model_required=True)


def run(args: argparse.Namespace) -> int:
    """Read, simulate, plan, print. Return 1 if DeepSpeed's configuration does not fit in memory."""
    from ullage.integrations.deepspeed.config import load_config  # noqa: PLC0415 - pydantic models take a moment
    from ullage.integrations.deepspeed.importing import imported, side_by_side  # noqa: PLC0415

    check_output("--output", args.output)
    if args.global_batch is not None:
        raise ValueError("--global-batch is given by train_batch_size of the configuration; leave it out")
    print_default_hardware(args)
    given = {name for name, value in vars(args).items() if value is not None}
    found = side_by_side(imported(load_config(args.config), request_of(args), given.__contains__))
    if args.output is not None and found.ours is not None:
        write_whole(args.output, found.ours.to_json())
    if args.json:
        from ullage.output.console import write_json  # noqa: PLC0415

        write_json(found.to_json())
    else:
        from ullage.integrations.deepspeed.screen import side_by_side_screen  # noqa: PLC0415 - rich is slow to import

        side_by_side_screen(found)
        if args.output is not None and found.ours is not None:
            sys.stdout.write(f"plan written to {args.output}\n")
    return 1 if found.theirs.missing else 0
