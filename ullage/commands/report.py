"""``ullage report``: write one HTML file about plans, runs and studies."""

import argparse
import sys
import webbrowser
from pathlib import Path

from hwprofiles.files import check_output, write_whole

DESCRIPTION = """\
Write one HTML file that shows a plan, a run or a study. For a plan or run: a summary, all tasks of an
iteration, memory and traffic over time, a roofline of the lanes, other engines, the effect of each
technique, and predicted against measured times. For a study: curves along each axis, and cost against
speed. The file needs no network and prints well; a button saves each chart as SVG. Several files are shown
side by side."""
EXAMPLES = """
    ullage report plan.json
    ullage report out/run.json --output run.html --open
    ullage report a100.json h100.json
    ullage report study.json --output study.html
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument(
        "files",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="files of `ullage plan`, `ullage execute` or `ullage whatif`",
    )
    parser.add_argument(
        "--output", "-o", type=Path, default=Path("report.html"), metavar="PATH", help="default: %(default)s"
    )
    parser.add_argument("--open", action="store_true", help="open the report in the browser")
    parser.add_argument(
        "--json", action="store_true", help="print the written files and the data of the report as JSON"
    )


def run(args: argparse.Namespace) -> int:
    """Write the report and print its path."""
    if args.output.suffix not in {".html", ".htm"}:
        raise ValueError(f"--output {args.output}: a report is HTML; let its name end in .html")
    check_output("--output", args.output)  # before the work, so that a bad path does not waste it
    from ullage.report.files import load, report_on, side_by_side  # noqa: PLC0415 - the simulator is slow to import

    sources = [load(path) for path in args.files]
    from ullage.output.progress import progress_bar  # noqa: PLC0415
    from ullage.report.page import render  # noqa: PLC0415 - the same, and it may be missing
    from ullage.report.terminal import answer  # noqa: PLC0415

    with progress_bar() as progress:
        parts = [report_on(source, progress) for source in sources]
        progress("writing", 0, 0)
        write_whole(args.output, render(parts, side_by_side(parts)))
    found = [
        {
            "file": str(path),
            "kind": part.kind,
            "title": part.title,
            "sections": {section.key: [picture.key for picture in section.pictures] for section in part.sections},
        }
        for path, part in zip(args.files, parts, strict=True)
    ]
    data = {"output": str(args.output), "num_bytes": args.output.stat().st_size, "parts": found}
    answer(args, data, f"report written to {args.output}")
    if args.open and not webbrowser.open(args.output.resolve().as_uri()):
        sys.stderr.write(f"ullage report: no browser was found; open {args.output} yourself\n")
    return 0
