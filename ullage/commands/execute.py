"""``ullage execute``: run a plan."""

import argparse
from pathlib import Path

from planner.plan import load_plan
from ullage.arguments import positive_float, positive_int
from ullage.commands import Subparsers, command_parser
from ullage.options import ExecuteOptions


def add_parser(subparsers: Subparsers) -> None:
    """Add the parser of this command."""
    defaults = ExecuteOptions()
    parser = command_parser(
        subparsers,
        "execute",
        run,
        "Train the plan's model, from random weights, on a text of yours or on the built-in one, exactly as planned;\n"
        "measure every task, and compare that with the prediction. A captured model is made by the function that the\n"
        "plan names, imported as `ullage plan` did, and trained on one random batch of its inputs. A plan for several\n"
        "devices is executed by one process for each: `torchrun --nproc-per-node 8 -m ullage execute plan.json`.",
        """
        ullage execute plan.json
        ullage execute plan.json --iterations 100 --text corpus.txt --lr 3e-4 --output-dir runs/1
        """,
    )
    parser.add_argument("plan", type=Path, metavar="PLAN", help="what `ullage plan` wrote")
    parser.add_argument(
        "--iterations",
        type=positive_int,
        default=defaults.num_iterations,
        metavar="N",
        help=f"optimizer steps, at least 6 ({defaults.num_iterations})",
    )
    parser.add_argument("--text", type=Path, metavar="PATH", help="what to train on (default: built-in English text)")
    parser.add_argument("--seed", type=int, default=defaults.seed, metavar="N", help=f"of all chance ({defaults.seed})")
    parser.add_argument(
        "--lr",
        type=positive_float,
        default=defaults.lr,
        metavar="X",
        help=f"learning rate ({defaults.lr:g})",
    )
    parser.add_argument(
        "--output-dir", type=Path, default=defaults.output_dir, metavar="DIR", help="where results go (out/)"
    )
    parser.add_argument(
        "--storage-dir",
        type=Path,
        metavar="DIR",
        help="a folder on the planned drives, for optimizer state on NVMe while it trains: it takes twice its size "
        "(default: --output-dir)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument(
        "--device",
        choices=("auto", "host", "cuda"),
        default=defaults.device,
        help="what to run on (auto: what the plan was made for)",
    )


def run(args: argparse.Namespace) -> int:
    """Execute the plan."""
    options = ExecuteOptions(
        num_iterations=args.iterations,
        text=args.text,
        seed=args.seed,
        lr=args.lr,
        output_dir=args.output_dir,
        storage_dir=args.storage_dir,
        json=args.json,
        device=args.device,
    )
    plan = load_plan(args.plan)
    from ullage.training import execute  # noqa: PLC0415 - torch takes seconds: not before the plan is known to be good

    execute(plan, options)
    return 0
