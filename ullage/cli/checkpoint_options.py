"""The options of ``ullage plan`` for failures that checkpoints must survive, and for limits on checkpoints.

:mod:`ullage.cli.checkpoint_request` reads them. It is separate because it imports the planner, which parsing does not
need.
"""

import argparse

from planner.terms import DEFAULT_RESTART_S, LEVELS, MIN_CHECKPOINTS, Level
from ullage.cli.arguments import fraction, parse_bytes, positive_float, positive_int, seconds


def mtbf(text: str) -> dict[Level, float]:
    """Return times between failures in seconds by level, from ``6h`` or ``memory=2h,nvme=1d,pfs=30d``.

    A time without a level is for failures that every durable level survives: the node's drives and slower levels.

    Raises:
        argparse.ArgumentTypeError: the text has neither form.
    """
    if "=" not in text:
        return {"nvme": seconds(text)}
    found: dict[Level, float] = {}
    for part in text.split(","):
        name, _, time = part.partition("=")
        level = next((level for level in LEVELS if level == name.strip()), None)
        if level is None or level in found:
            raise argparse.ArgumentTypeError(
                f"{part!r} names no level, or repeats one; give a time, or some of "
                f"{','.join(f'{level}=TIME' for level in LEVELS)}"
            )
        found[level] = seconds(time)
    return found


def add_checkpoint_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that :func:`ullage.cli.checkpoint_request.checkpoints_of` reads."""
    group = parser.add_argument_group("when to make checkpoints (with --mtbf)")
    group.add_argument(
        "--mtbf",
        type=mtbf,
        metavar="TIME|LEVEL=TIME,...",
        help="mean time between failures of the whole job, as in 6h. The planner then chooses levels and intervals of "
        "checkpoints. Or one time for each kind of failure, named by the fastest level that survives it: memory=2h (a "
        "process fails), nvme=1d (power fails), pfs=30d (a node fails)",
    )
    group.add_argument(
        "--max-checkpoint-overhead",
        type=fraction,
        metavar="SHARE",
        help="largest share of the time that checkpoints may cost, as in 1%%",
    )
    group.add_argument(
        "--max-lost-work", type=seconds, metavar="TIME", help="most training time that one failure may lose"
    )
    group.add_argument(
        "--restart",
        type=seconds,
        metavar="TIME",
        help=f"time from a failure until the restarted job reads a checkpoint ({DEFAULT_RESTART_S:g}s)",
    )
    group.add_argument(
        "--keep", type=positive_int, metavar="N", help=f"checkpoints to keep at each level ({MIN_CHECKPOINTS})"
    )
    group.add_argument(
        "--checkpoint-buffer",
        type=parse_bytes,
        metavar="SIZE",
        help="host memory per rank for checkpoint data that is not written yet (default: the best size)",
    )
    group.add_argument(
        "--drive-writes-per-day",
        type=positive_float,
        metavar="N",
        help="how often the node's drives may be overwritten per day, from their data sheet (default: the profile's)",
    )
    group.add_argument(
        "--pfs-bandwidth",
        type=parse_bytes,
        metavar="SIZE",
        help="bandwidth of each node to a shared file system, if the profile has none",
    )
    group.add_argument(
        "--iterations",
        type=positive_int,
        metavar="N",
        help="length of the run whose expected time is shown (default: one day)",
    )
