"""What the comparison's commands for CPU and GPU have in common."""

import argparse
import dataclasses
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.peers.driver import Comparison, Settings, table
from benchmarks.peers.jobs import Cell
from benchmarks.peers.processes import Clock, Runner
from benchmarks.peers.rows import rows_for
from hwprofiles.profile import HardwareProfile

_BUSY = 0.25  # load per core above which other programs are in the way


@dataclasses.dataclass(frozen=True)
class Rounds:
    """How much is measured.

    Attributes:
        num_rounds: processes per row and cell.
        num_warm_up, num_timed: iterations of each.
        most_settings: how many of every peer are tried, the likeliest first; ``None``: all.
    """

    num_rounds: int
    num_warm_up: int
    num_timed: int
    most_settings: int | None = None


def add_arguments(parser: argparse.ArgumentParser, output: Path) -> None:
    """Add the options that :func:`compare` reads."""
    parser.add_argument(
        "--peers",
        type=Path,
        default=os.environ.get("ULLAGE_PEERS"),
        metavar="DIR",
        help="folder that the peers are installed in (default: $ULLAGE_PEERS, or the environment alone)",
    )
    parser.add_argument("--rows", nargs="+", default=(), metavar="ROW", help="these rows alone")
    parser.add_argument("--profile", metavar="NAME|PATH", help="the machine's profile (default: measured first)")
    parser.add_argument("--budget", type=float, default=3600.0, metavar="SECONDS", help="for all processes together")
    parser.add_argument("--limit", type=float, default=180.0, metavar="SECONDS", help="for one process (180)")
    parser.add_argument("--verbose", action="store_true", help="show what the processes write")
    parser.add_argument("--output", type=Path, default=output, metavar="PATH", help="result file")


def compare(
    args: argparse.Namespace,
    device: str,
    cells: tuple[Cell, ...],
    profiles: dict[int, HardwareProfile],
    rounds: Rounds,
) -> dict[str, Any]:
    """Run the comparison, write its result file, print and return it."""
    rows = rows_for(device, tuple(args.rows))
    args.output.absolute().parent.mkdir(parents=True, exist_ok=True)
    runner = Runner(len(os.sched_getaffinity(0)), args.peers, args.limit, Clock(args.budget), args.verbose)
    settings = Settings(
        cells=cells,
        rows=rows,
        device=device,
        profiles=profiles,
        num_rounds=rounds.num_rounds,
        num_warm_up=rounds.num_warm_up,
        num_timed=rounds.num_timed,
        most_settings=rounds.most_settings,
        output=args.output,
    )
    if (load := os.getloadavg()[0]) > _BUSY * runner.num_cores:
        print(f"warning: the load average is {load:.1f}; measure where nothing else runs", file=sys.stderr)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the process under way is ended too
    with tempfile.TemporaryDirectory() as folder:
        result = Comparison(settings, runner, Path(folder)).run()
    print(table(result["cells"], [row.name for row in rows]))
    return result
