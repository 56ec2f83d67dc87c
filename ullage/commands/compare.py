"""``ullage compare``: a prediction beside what was measured."""

import argparse
from pathlib import Path

from planner.trace import chrome_trace, write_trace
from ullage.commands import Subparsers, command_parser
from ullage.comparison import compare, render_comparison
from ullage.console import console, write_json
from ullage.runs import load_run
from ullage.simulation import simulate


def add_parser(subparsers: Subparsers) -> None:
    """Add the parser of this command."""
    parser = command_parser(
        subparsers,
        "compare",
        run,
        "Compare what a plan predicted with what a run of it measured: phases, busy time of every lane, peak memory.\n"
        "Errors are predicted over measured: +10 % means that a tenth too much was predicted.",
        """
        ullage compare out/run.json
        ullage compare out/run.json --trace both.json.gz
        """,
    )
    parser.add_argument("run_file", type=Path, metavar="RUN", help="what `ullage execute` wrote")
    parser.add_argument("--trace", type=Path, metavar="PATH", help="write both timelines for ui.perfetto.dev")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run(args: argparse.Namespace) -> int:
    """Compare and print."""
    record = load_run(args.run_file)
    simulation = simulate(record.plan)
    measured = record.timeline
    predicted_memory = {tier: use.peak_bytes for tier, use in record.plan.prediction.memory.items()}
    comparison = compare(
        simulation.timeline,
        simulation.steady,
        measured,
        record.steady_iterations,
        predicted_memory,
        record.memory,
    )
    if args.trace:
        write_trace(args.trace, chrome_trace({"predicted": simulation.timeline, "measured": measured}))
    if args.json:
        write_json(comparison.to_json())
        return 0
    out = console()
    out.print(f"{record.plan.model.name} on {record.machine}", markup=False)
    out.print()
    out.print(render_comparison(comparison))
    if args.trace:
        out.print(f"trace written to {args.trace}", markup=False, soft_wrap=True)
    return 0
