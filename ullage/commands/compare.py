"""``ullage compare``: compare a prediction with a run, and find the wrong assumption."""

import argparse
from pathlib import Path

from hwprofiles.files import check_output
from hwprofiles.registry import save_profile
from ullage.analysis.comparison import explain_run
from ullage.analysis.runs import load_run
from ullage.output.progress import progress_bar
from ullage.report.run import explained_sections
from ullage.report.terminal import answer
from ullage.report.trace import chrome_trace, write_trace

DESCRIPTION = """\
Compare a plan's prediction with a measured run, and show which assumption was wrong:
  rate   tasks of one kind took more or less time than predicted
  count  planned tasks did not run, or unplanned tasks ran
  order  a lane ran its tasks in another order than planned
  stall  tasks began later than their dependencies and lanes allowed
These causes add up to the difference. Then show phases, lanes, memory, and a profile that fits the run.
An error of +10 % means that the prediction is 10 % too high."""
EXAMPLES = """
    ullage compare out/run.json
    ullage compare out/run.json --trace both.json.gz
    ullage compare out/run.json --refit this-machine.json
    ullage compare out/run.json --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("run_file", type=Path, metavar="RUN", help="run.json of `ullage execute`")
    parser.add_argument("--trace", type=Path, metavar="PATH", help="write both timelines for ui.perfetto.dev")
    parser.add_argument("--refit", type=Path, metavar="PATH", help="write the hardware profile that fits this run")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run(args: argparse.Namespace) -> int:
    """Compare, write the requested files, print."""
    check_output("--trace", args.trace)
    check_output("--refit", args.refit)
    record = load_run(args.run_file)
    with progress_bar() as progress:
        explained, simulation = explain_run(record, lambda done, total: progress("replaying", done, total))
    if args.trace:
        write_trace(args.trace, chrome_trace({"predicted": simulation.timeline, "measured": record.timeline}))
    if args.refit:
        save_profile(explained.refitted.profile, args.refit)
    written = [f"trace written to {args.trace}"] if args.trace else []
    if args.refit:
        written.append(f"profile written to {args.refit}; plan with it: `ullage plan ... --hardware {args.refit}`")
    title = f"{record.plan.model.name} on {record.machine}"
    answer(args, explained.to_json(), title, *explained_sections(explained), *written)
    return 0
