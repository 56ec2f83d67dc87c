"""``ullage export-deepspeed``: write the configuration of DeepSpeed that is nearest to a plan."""

import argparse
import json
import sys
from pathlib import Path

from hwprofiles.files import check_output, write_whole
from planner.plan.document import load_plan

DESCRIPTION = """\
Write the DeepSpeed configuration nearest to a plan: ZeRO stage, offloading, Twin-Flow ratio, batch, types.
Then list the parts of the plan that DeepSpeed cannot express. The learning rate is that of `ullage
execute`. `ullage plan --deepspeed` predicts how fast the configuration is."""
EXAMPLES = """
    ullage export-deepspeed plan.json
    ullage export-deepspeed plan.json --output ds_config.json --nvme-path /mnt/nvme
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("plan", type=Path, metavar="PLAN", help="file that `ullage plan` wrote")
    parser.add_argument(
        "--output", "-o", type=Path, metavar="PATH", help="file for the configuration (default: print it)"
    )
    parser.add_argument(
        "--nvme-path", default="/local_nvme", metavar="DIR", help="a folder on the drives of the machine (/local_nvme)"
    )


def run(args: argparse.Namespace) -> int:
    """Export."""
    check_output("--output", args.output)
    from ullage.rivals.deepspeed.export import export_config  # noqa: PLC0415

    config, lost = export_config(load_plan(args.plan), args.nvme_path)
    text = json.dumps(config, indent=2) + "\n"
    if args.output is None:
        sys.stdout.write(text)
    else:
        write_whole(args.output, text)
    for line in lost:
        sys.stderr.write(f"not in the configuration: {line}\n")
    return 0
