"""The options of ``ullage plan`` that say which failures checkpoints are for, and what they may take."""

import argparse
from typing import Any

from hwprofiles.profile import HardwareProfile, Storage
from hwprofiles.quantity import Curve, CurvePoint, Provenance, Quantity
from planner.checkpoints.chosen import CheckpointsAsked
from planner.checkpoints.stores import LEVELS, Level
from ullage.arguments import fraction, parse_bytes, positive_float, positive_int, seconds

_DEFAULTS = CheckpointsAsked(mtbf_s={"nvme": 1.0})
_UNKNOWN_CAPACITY_BYTES = 1e15
_REQUEST_BYTES = 1e9


def mtbf(text: str) -> dict[Level, float]:
    """Return the times between failures that ``6h`` or ``memory=2h,nvme=1d,pfs=30d`` mean, in seconds by level.

    A time alone is of failures that anything durable survives: the node's drives, or what is slower.

    Raises:
        argparse.ArgumentTypeError: it is neither.
    """
    if "=" not in text:
        return {"nvme": seconds(text)}
    found: dict[Level, float] = {}
    for part in text.split(","):
        name, _, time = part.partition("=")
        level = next((level for level in LEVELS if level == name.strip()), None)
        if level is None or level in found:
            raise argparse.ArgumentTypeError(
                f"{part!r} is of no level, or of one again; give a time, or some of "
                f"{','.join(f'{level}=TIME' for level in LEVELS)}"
            )
        found[level] = seconds(time)
    return found


def add_checkpoint_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that :func:`checkpoints_of` reads."""
    group = parser.add_argument_group("when to make checkpoints (with --mtbf)")
    group.add_argument(
        "--mtbf",
        type=mtbf,
        metavar="TIME|LEVEL=TIME,...",
        help="mean time between failures of the whole job, as in 6h: chooses levels and intervals of checkpoints. Or "
        "by the fastest level that survives them: memory=2h,nvme=1d,pfs=30d (of a process; of power; of a node)",
    )
    group.add_argument(
        "--max-checkpoint-overhead", type=fraction, metavar="SHARE", help="the most that they may add, as in 1%%"
    )
    group.add_argument("--max-lost-work", type=seconds, metavar="TIME", help="the most that one failure may lose")
    group.add_argument(
        "--restart",
        type=seconds,
        metavar="TIME",
        help=f"from a failure until checkpoints are read ({_DEFAULTS.restart_s:g}s, assumed)",
    )
    group.add_argument(
        "--keep", type=positive_int, metavar="N", help=f"checkpoints that stay at each level ({_DEFAULTS.keep})"
    )
    group.add_argument(
        "--checkpoint-buffer",
        type=parse_bytes,
        metavar="SIZE",
        help="host memory of a rank for what is not written yet (as much as pays)",
    )
    group.add_argument(
        "--drive-writes-per-day",
        type=positive_float,
        metavar="N",
        help="how often the node's drives may be written over in a day, of their data sheet (as the profile says)",
    )
    group.add_argument(
        "--pfs-bandwidth",
        type=parse_bytes,
        metavar="SIZE",
        help="bytes a second that each node reads and writes of a shared file system which the profile does not have",
    )
    group.add_argument(
        "--iterations", type=positive_int, metavar="N", help="of the run whose expected time is printed (a day of them)"
    )


def checkpoints_of(args: argparse.Namespace) -> CheckpointsAsked | None:
    """Return what the options ask; ``None`` without ``--mtbf``.

    Raises:
        ValueError: others of them without it, or fewer than two checkpoints are to stay.
    """
    given: dict[str, Any] = {
        "max_overhead": args.max_checkpoint_overhead,
        "max_lost_s": args.max_lost_work,
        "restart_s": args.restart,
        "keep": args.keep,
        "buffer_bytes": args.checkpoint_buffer,
        "drive_writes_per_day": args.drive_writes_per_day,
        "num_iterations": args.iterations,
    }
    found = {name: value for name, value in given.items() if value is not None}
    if args.mtbf is None:
        if found or args.pfs_bandwidth is not None:
            raise ValueError("options of checkpoints choose nothing without --mtbf; give it, as in --mtbf 6h")
        return None
    if found.get("keep", _DEFAULTS.keep) < _DEFAULTS.keep:
        raise ValueError(
            f"--keep {args.keep}: at least {_DEFAULTS.keep} checkpoints stay at each level, so that one may be bad"
        )
    return CheckpointsAsked(mtbf_s=args.mtbf, **found)


def with_pfs(hardware: HardwareProfile, bytes_per_s: int) -> HardwareProfile:
    """Return a profile with a shared file system of which each node draws so much, as asked for.

    Raises:
        ValueError: it has one.
    """
    if hardware.pfs is not None:
        raise ValueError(f"--pfs-bandwidth: profile {hardware.name} has a pfs already; leave the option out")
    asked = Provenance(origin="assumed", source="asked for with --pfs-bandwidth")
    point = CurvePoint(
        size=_REQUEST_BYTES, **dict.fromkeys(("p10_s", "median_s", "p90_s"), _REQUEST_BYTES / bytes_per_s)
    )
    curve = Curve(size_unit="bytes", points=(point,), provenance=asked)
    capacity = Quantity(
        value=_UNKNOWN_CAPACITY_BYTES,
        unit="bytes",
        provenance=Provenance(origin="assumed", source="not known; as much as is needed"),
    )
    return hardware.model_copy(update={"pfs": Storage(capacity_bytes=capacity, read=curve, write=curve)})
