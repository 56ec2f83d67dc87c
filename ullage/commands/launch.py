"""``ullage launch``: print the command line that starts a plan on all its devices."""

import argparse
import shlex
import sys
from pathlib import Path
from typing import get_args

from planner.plan.document import load_plan
from ullage.training.processes import Launcher, launch_lines

DESCRIPTION = """\
Print the command that starts one process per device of a plan. Options of `ullage execute` may follow it.
On several nodes, run it on each node. Replace N by the number of the node, from 0, and FIRST by the address
of the first node.
This command starts nothing."""
EXAMPLES = """
    ullage launch plan.json
    ullage launch plan.json --with accelerate
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("plan", type=Path, metavar="PLAN", help="file that `ullage plan` wrote")
    parser.add_argument(
        "--with",
        dest="launcher",
        choices=get_args(Launcher),
        default="torchrun",
        help="program that starts the processes (torchrun)",
    )


def run(args: argparse.Namespace) -> int:
    """Print."""
    lines = launch_lines(load_plan(args.plan), path=shlex.quote(str(args.plan)), launcher=args.launcher)
    sys.stdout.write("\n".join(lines) + "\n")
    return 0
