"""``ullage plan``: find the fastest way to train a model on some hardware."""

import argparse
from pathlib import Path

from hwprofiles.files import check_output
from ullage.cli.arguments import counts, positive_float
from ullage.cli.options import add_options, check_names

DESCRIPTION = """\
Find the fastest way to train a model on some hardware. Show whether it fits in memory, the time of an
iteration, which lane binds, and the times of other engines. Write the plan to a file for `ullage execute`.
For a model of your own, give --model package.module:function; it is also searched in the current directory."""
EXAMPLES = """
    ullage plan --model opt-13b --gpus 8
    ullage plan --model path/to/config.json --hardware h100 --gpus 4 --seq-len 4096 --micro-batch 2
    ullage plan --model llama-3-70b --hardware a100-cluster --gpus 64 --global-batch 256
    ullage plan --model llama-3-8b --hardware h100 --gpus 8 --beside a100-80=4 --global-batch 72
    ullage plan --model mixtral-8x7b --hardware h100 --gpus 8 --parallel expert=4 --expert-load zipf:1.2
    ullage plan --model gpt2 --memory free,device=1.5GiB --output small.json
    ullage plan --model opt-66b --hardware rtx4090-12ssd --storage nvme
    ullage plan --model opt-13b --hardware h100 --optimizer lion
    ullage plan --model llama-3-70b --hardware rtx-4090 --micro-batch 1 --lora rank=16 --quantize nf4
    ullage plan --model my_package.models:make --input-shape 8x3x224x224 8:int64 --gpus 2
    ullage plan --model opt-13b --gpus 8 --mtbf 6h --checkpoints max-lost-work=30m
    ullage plan --model opt-13b --gpus 8 --mtbf memory=2h,nvme=1d,pfs=30d --checkpoints pfs-bandwidth=2GB
    ullage plan --model llama-3-8b --hardware h100 --gpus 4 --precision bf16,products=fp8
    ullage plan --model opt-13b --gpus 4 --deepspeed ds_config.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    add_options(parser, model_required=True, checkpoints=True)
    parser.add_argument(
        "--beside",
        type=counts,
        metavar="PROFILE=N[,...]",
        help="devices of other kinds in the same run, as in a100-80=4. The planner divides --global-batch by their "
        "speed. Each kind is in nodes of its own (--nodes 1: all are in one machine)",
    )
    parser.add_argument(
        "--budget",
        type=positive_float,
        metavar="SECONDS",
        help="time limit of the search in seconds (default: a few seconds)",
    )
    parser.add_argument(
        "--output", "-o", type=Path, default=Path("plan.json"), metavar="PATH", help="file for the plan (plan.json)"
    )
    parser.add_argument(
        "--deepspeed",
        type=Path,
        metavar="CONFIG",
        help="simulate the same training by this ds_config.json, and show both side by side: time, memory, and causes "
        "of the difference. Batch, accumulation, types, optimizer and clipping come from the configuration; options "
        "set values that are 'auto' there. Unknown keys, and keys that are not simulated, are listed. If the "
        "configuration does not fit in memory, the exit code is 1",
    )
    parser.add_argument(
        "--json", action="store_true", help="print JSON instead of tables: the plan, or changes with which it would fit"
    )


def run(args: argparse.Namespace) -> int:
    """Plan, print, write."""
    check_output("--output", args.output)  # before the search
    check_names(args)
    from ullage.cli.default_hardware import print_default_hardware  # noqa: PLC0415 - `--help` does without

    if args.memory is None:  # else this machine is measured, if need be
        print_default_hardware(args)
    from ullage.commands.plan.answer import plan_command  # noqa: PLC0415 - imports the planner, only for what is not refused

    return plan_command(args)
