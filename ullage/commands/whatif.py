"""``ullage whatif``: vary fields of a request by name, and plan every point anew."""

import argparse
import sys
from pathlib import Path
from typing import Any, get_args

from ullage.cli.arguments import choice, non_negative_int, parts, positive_float, positive_int, tokens
from ullage.cli.options import add_options
from ullage.whatif.values import Design, Question

_MOST_ROWS = 48  # of points on the screen


DESCRIPTION = """\
Plan one request with other values of the machine, the model, the batch or the policy. Every point is
planned anew, as by `ullage plan`. Values are absolute (64GB, 25GB/s, 10us) or factors (2x). They may be
lists (1,2,4) or ranges (0..12, 10..40..10GB/s, 1x..8x..*2). Every result is saved at once: if a study is
interrupted, the same command continues it. STUDY is a study file, finished or not."""
EXAMPLES = """
    ullage whatif --model opt-13b --gpus 8 --set pcie=2x
    ullage whatif --model opt-13b --sweep gpus=1,2,4,8 --sweep pcie=1x..4x..*2 --table study.csv
    ullage whatif --model opt-66b --hardware rtx4090-12ssd --storage nvme --sweep nvme.count=0..12..4
    ullage whatif --model opt-13b --gpus 8 --sensitivities
    ullage whatif --model opt-30b --question fits
    ullage whatif --model opt-13b --question cheapest --tokens 300B --days 30 --prices example
    ullage whatif --model opt-13b --gpus 8 --question upgrade --prices my_prices.json
    ullage whatif --model llama-3-70b --hardware a100-cluster --gpus 64 --question scale
    ullage whatif --model llama-3-8b --hardware h100 --question longest
    ullage whatif --hardware rtx4090 --question largest --lora rank=16 --quantize nf4
    ullage whatif study.json --workers 2
    ullage whatif --fields pcie
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument(
        "study", nargs="?", type=Path, metavar="STUDY", help="a study file, in place of the options below"
    )
    design = parser.add_argument_group("what varies")
    design.add_argument(
        "--set", action="append", metavar="FIELD=VALUE", help="value of a field at all points; may be repeated"
    )
    design.add_argument(
        "--sweep",
        action="append",
        metavar="FIELD=VALUES",
        help="vary a field over these values, as one axis of the study; may be repeated",
    )
    design.add_argument(
        "--design",
        type=_design,
        metavar="cartesian|zip|random,points=N[,seed=N]",
        help="cartesian: all combinations (the default); zip: the first values of all axes, then the second values, "
        "...; random: so many random combinations, drawn with a seed (0), also inside ranges such as 0.5x..4x",
    )
    design.add_argument(
        "--question",
        choices=get_args(Question),
        help="fits: the smallest machine of each kind that trains the model; cheapest: machines and numbers of GPUs by "
        "cost; upgrade: which resource to double; scale: speed and efficiency on more and more GPUs; longest: the "
        "longest sequence that fits; largest: the largest packaged model that fits, or the largest of --sweep "
        "model=A,B,C (sorted by size, smallest first)",
    )
    design.add_argument(
        "--sensitivities",
        action="store_true",
        help="show the effect of one more GB/s, core or GB, and where the bottleneck moves",
    )
    design.add_argument(
        "--certify",
        action="store_true",
        default=None,
        help="prove for each plan how far it can be from the best (takes longer)",
    )
    money = parser.add_argument_group("money")
    money.add_argument(
        "--prices",
        metavar="FILE|example",
        help="prices of machines; example: packaged example prices, to be replaced by yours",
    )
    money.add_argument("--tokens", type=tokens, metavar="N", help="tokens of a whole run, as in 300B")
    money.add_argument("--days", type=positive_float, metavar="D", help="deadline of the whole run in days")
    add_options(parser, model_required=False)
    running = parser.add_argument_group("running the study")
    running.add_argument("--workers", type=positive_int, metavar="N", help="processes (one per core)")
    running.add_argument(
        "--output",
        "-o",
        type=Path,
        default=Path("study.json"),
        metavar="PATH",
        help="file for the study (study.json)",
    )
    running.add_argument("--table", type=Path, metavar="PATH", help="write one row per point, as .csv or .parquet")
    running.add_argument("--json", action="store_true", help="print the study as JSON instead of tables")
    running.add_argument(
        "--fields",
        nargs="?",
        const="",
        metavar="TEXT",
        help="only list the fields that can be varied, with units",
    )


def _design(text: str) -> dict[str, Any]:
    return parts(text, {"": choice(*get_args(Design)), "points": positive_int, "seed": non_negative_int})


def run(args: argparse.Namespace) -> int:
    """Run, write and print a study."""
    from ullage.report.terminal import answer, show  # noqa: PLC0415 - rich is slow to import
    from ullage.whatif.command import matching_fields, study_of  # noqa: PLC0415 - the simulator is slow to import

    if args.fields is not None:
        from ullage.report.study import fields_table  # noqa: PLC0415

        fields, aliases = matching_fields(args)
        keys = ("name", "kind", "unit", "present", "words")
        names = ", ".join(f"{name} is {field}" for name, field in aliases.items())
        data = {"fields": [{k: getattr(f, k) for k in keys} for f in fields], "aliases": aliases}
        answer(args, data, fields_table(fields), *([f"other names: {names}"] if names else []))
        return 0
    study = study_of(args)
    if args.json:
        sys.stdout.write(study.to_json())
        return 0
    from ullage.report.study import study_part  # noqa: PLC0415 - rich is slow to import

    written = f"study written to {args.output}" + (f", its table to {args.table}" if args.table else "")
    show(study_part(study, _MOST_ROWS), written)
    return 0
