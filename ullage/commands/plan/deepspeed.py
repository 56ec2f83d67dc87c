"""``ullage plan --deepspeed``: training by a DeepSpeed configuration beside the plan."""

import argparse

from hwprofiles.files import write_whole
from planner.choices.request import Request
from ullage.cli.options import given_options
from ullage.report.deepspeed import side_by_side
from ullage.report.terminal import answer
from ullage.rivals.deepspeed.file import load_config
from ullage.rivals.deepspeed.request import imported


def beside_deepspeed(args: argparse.Namespace, request: Request) -> int:
    """Simulate the configuration, plan, write and print. Return 1 if the configuration does not fit in memory."""
    if args.global_batch is not None:
        raise ValueError("--global-batch is given by train_batch_size of the configuration; leave it out")
    if args.mtbf is not None:
        raise ValueError("--mtbf is for a plan, not for a comparison with DeepSpeed; leave --mtbf or --deepspeed out")
    config = load_config(args.deepspeed)
    request, assumed = imported(config, request, given_options(args).__contains__)
    data, shown, plan = side_by_side(request, config.zero_optimization, assumed)
    if plan is not None:
        write_whole(args.output, plan.to_json())
    answer(args, data, *shown, *([f"plan written to {args.output}"] if plan else []))
    return 1 if data["theirs"]["missing"] else 0
