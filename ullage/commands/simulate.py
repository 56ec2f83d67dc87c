"""``ullage simulate``: show one iteration in detail."""

import argparse
import dataclasses
import sys
from pathlib import Path

from hwprofiles.files import check_output, write_whole
from planner.plan.document import load_plan
from ullage.analysis.simulation import planned
from ullage.cli.arguments import positive_int
from ullage.cli.exit_codes import CHECK_FAILED
from ullage.report.iteration import iteration_part
from ullage.report.terminal import answer
from ullage.report.trace import chrome_trace, write_trace
from ullage.rivals.settings import ENGINES, OURS

DESCRIPTION = """\
Simulate one iteration of a plan, or of another engine in its place. Show phases, lanes, traffic and memory
over time, the critical path, and the lane that binds.
If the iteration does not fit in memory, it is still shown, and the exit code is 1."""
EXAMPLES = """
    ullage simulate plan.json
    ullage simulate plan.json --engine twin-flow 0.4 --trace twin-flow.json.gz
    ullage simulate plan.json --engine zero-offload --figure iteration.html
    ullage simulate plan.json --text | less
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("plan", type=Path, metavar="PLAN", help="file that `ullage plan` wrote")
    parser.add_argument(
        "--engine",
        nargs="+",
        default=[OURS],
        metavar=("NAME", "SETTING"),
        help=f"engine whose schedule is simulated: {OURS} (that of the plan), "
        f"{', '.join(ENGINES)}. SETTING is the fraction that the CPU updates (twin-flow, super-offload), the stride "
        "(interleaved) or the steps between updates on the host (zenflow, default 4); otherwise the default is the "
        "best setting",
    )
    parser.add_argument(
        "--iterations", type=positive_int, metavar="N", help="iterations to simulate (default: until they repeat)"
    )
    parser.add_argument(
        "--trace", type=Path, metavar="PATH", help="write a trace for ui.perfetto.dev (.json, .json.gz)"
    )
    parser.add_argument(
        "--figure",
        type=Path,
        metavar="PATH",
        help="draw tasks, memory, traffic and busy shares over the iteration on a page (.html)",
    )
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--text", action="store_true", help="print the schedule, one line per task, and nothing else")
    shown.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run(args: argparse.Namespace) -> int:
    """Simulate and print."""
    if len(args.engine) > 2:
        raise ValueError(f"--engine {' '.join(args.engine)} has too many values; give a name and at most one setting")
    if args.iterations == 1:
        raise ValueError(
            "--iterations 1 is too few, because an iteration ends where the next one begins; give at least 2"
        )
    if args.figure and args.figure.suffix != ".html":
        raise ValueError(f"--figure {args.figure}: the figure is a page; let its name end in .html")
    check_output("--trace", args.trace)
    check_output("--figure", args.figure)
    seen = dataclasses.replace(planned(load_plan(args.plan), *args.engine), num_iterations=args.iterations)
    if args.text:
        sys.stdout.write(seen.schedule.to_text() + "\n")
        return 0
    if args.trace:
        write_trace(args.trace, chrome_trace({"predicted": seen.simulation.timeline}))
    if args.figure:
        from ullage.report.page import render  # noqa: PLC0415 - plotly may be missing

        write_whole(args.figure, render([iteration_part(seen)]))
    written = {"trace": args.trace, "figure": args.figure}
    lines = (f"{what} written to {path}" for what, path in written.items() if path)
    answer(args, seen.to_json(), iteration_part(seen), *lines)
    return CHECK_FAILED if seen.missing else 0
