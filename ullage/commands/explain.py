"""``ullage explain``: show the reasons for a plan, or for the placement of one unit."""

import argparse
from pathlib import Path

from planner.plan.document import load_plan

DESCRIPTION = """\
Explain a plan: which lane binds, how much slower the plan is without each technique, where each unit is,
what moving it costs, and at which bandwidth another lane binds. With UNIT, show all ways to place that
unit, and when it is updated. Every figure is a simulation in which one thing changes and the rest of the
plan stays the same."""
EXAMPLES = """
    ullage explain plan.json
    ullage explain plan.json layers.3.mlp
    ullage explain plan.json --all --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("plan_file", type=Path, metavar="PLAN", help="file that `ullage plan` wrote")
    parser.add_argument("unit", nargs="?", metavar="UNIT", help="a unit of the model, such as layers.3.mlp")
    parser.add_argument(
        "--all",
        action="store_true",
        help="try to move every unit, not only the first, the middle and the last of each group",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run(args: argparse.Namespace) -> int:
    """Explain and print."""
    if args.unit is not None and args.all:
        raise ValueError(f"--all is for all units, but {args.unit} is given; leave one of them out")
    plan = load_plan(args.plan_file)
    from planner.explain.moves import find_unit  # noqa: PLC0415 - the simulator is slow to import: not before bad input
    from ullage.analysis.explanation import PlanExplained, UnitExplained  # noqa: PLC0415
    from ullage.output.progress import progress_bar  # noqa: PLC0415
    from ullage.report.explained import plan_explained_part, unit_explained_part  # noqa: PLC0415
    from ullage.report.terminal import answer  # noqa: PLC0415
    from ullage.rivals.tricks import bench_of  # noqa: PLC0415

    bench = bench_of(plan)
    explained: PlanExplained | UnitExplained
    with progress_bar() as progress:
        if args.unit is None:
            explained = PlanExplained.of(bench, every=args.all, progress=progress)
        else:
            explained = UnitExplained.of(bench, find_unit(bench, args.unit), progress=progress)
    part = plan_explained_part(explained) if isinstance(explained, PlanExplained) else unit_explained_part(explained)
    answer(args, explained.to_json(), part)
    return 0
