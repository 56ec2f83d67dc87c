"""``ullage verify``: check the prediction and the proofs of a plan."""

import argparse
from pathlib import Path

from planner.plan.document import load_plan
from planner.verification import verify
from ullage.cli.exit_codes import CHECK_FAILED
from ullage.output.formatting import percent, si
from ullage.report.plan import gap_parts_words
from ullage.report.terminal import answer

DESCRIPTION = """\
Check a plan independently of the program that made it: simulate it again, check that it fits in memory, and
check the proofs of its lower bound in exact arithmetic. If a check fails, the exit code is 1."""
EXAMPLES = """
    ullage verify plan.json
    ullage verify plan.json --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("plan_file", type=Path, metavar="PLAN", help="file that `ullage plan` wrote")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(args: argparse.Namespace) -> int:
    """Verify and print."""
    plan = load_plan(args.plan_file)
    certificate, iteration_s = plan.certificate, plan.prediction.iteration_s
    try:
        verified = verify(plan)
    except ValueError as error:
        answer(args, {"holds": False, "why": str(error)}, f"does not hold: {error}")
        return CHECK_FAILED
    gap = certificate.gap(iteration_s)
    data = {
        "holds": True,
        "iteration_s": verified.iteration_s,
        "bound_s": certificate.bound_s,
        "gap": gap,
        "gap_parts": certificate.gap_parts(iteration_s),
        "num_proofs": len(certificate.proofs),
        "num_multipliers": certificate.num_multipliers,
    }
    lines = {
        "holds": "yes",
        "iteration": f"{si(verified.iteration_s, 's')}, simulated again",
        "memory": ", ".join(
            f"{si(use.peak_bytes, 'B')} of {si(use.capacity_bytes, 'B')} {tier}"
            for tier, use in verified.memory.items()
        ),
        "bound": f"{si(certificate.bound_s, 's')}, by {len(certificate.proofs)} proof(s) with "
        f"{certificate.num_multipliers} multipliers, in exact arithmetic: within "
        f"{percent(gap)} of the best",
        "gap": f"{gap_parts_words(certificate, iteration_s)}; each found again",
    }
    answer(args, data, lines)
    return 0
