"""``ullage calibrate``: measure this machine."""

import argparse
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

from hwprofiles.files import check_output, make_folder
from hwprofiles.profile import NAME_PATTERN, HardwareProfile
from hwprofiles.registry import LOCAL, load_profile, local_profile_path, save_profile, update_profile
from ullage.cli.arguments import parse_bytes, parts, positive_int
from ullage.output.progress import seconds_bar

DESCRIPTION = """\
Measure this machine and write its hardware profile, which becomes the default of --hardware here.
This takes about four minutes, or half a minute with --quick. Run nothing else meanwhile. All measurements
of a step are repeated in turns. A value is the median of the fastest quarter of its repetitions, because
other programs can only slow them down; p10 and p90 are over all repetitions.
Under torchrun, --only device,fabric measures all ranks' devices at once, and collectives between them."""
EXAMPLES = """
    ullage calibrate
    ullage calibrate --quick --memory device=2GB
    ullage calibrate --output lab-box.json
    ullage calibrate --only cpu,disk:/mnt/nvme
    ullage calibrate --list
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("--quick", action="store_true", help="fewer and smaller sizes: half a minute, less exact")
    parser.add_argument(
        "--only",
        metavar="PART[:FOLDER],...",
        help="measure only these parts, and keep the rest of the profile in --output (if that is a new file: of this "
        "machine's own): device, cpu, copies, disk[:FOLDER], pfs:FOLDER, together, fabric",
    )
    parser.add_argument(
        "--output",
        "-o",
        type=Path,
        metavar="PATH",
        help="file for the profile, which gives it its name (default: HOSTNAME.json in $ULLAGE_HOME, "
        "$XDG_DATA_HOME/ullage or ~/.local/share/ullage)",
    )
    parser.add_argument(
        "--memory",
        type=lambda text: parts(text, {"device": parse_bytes, "host": parse_bytes}),
        default={},
        metavar="device=SIZE[,host=SIZE]",
        help="memory that training may take. device: of each device; of a GPU, 1 GiB of it is for libraries. host: of "
        "the host, beside a device that cores stand in for (default: 85 %% of what is free now, which is too little if "
        "the memory of a virtual machine grows as it is used)",
    )
    parser.add_argument(
        "--device-cores",
        type=positive_int,
        metavar="N",
        help="let this many CPU cores stand in for a GPU (default on a machine without a GPU: half of the cores)",
    )
    parser.add_argument(
        "--drive-endurance",
        type=parse_bytes,
        metavar="SIZE",
        help="bytes that may be written to the drives per day: their TBW divided by the days of their warranty",
    )
    parser.add_argument(
        "--allow-other-machine",
        action="store_true",
        help="measure parts of a profile again, even if the profile was measured on another machine",
    )
    parser.add_argument(
        "--list", action="store_true", help="list all quantities, and what measures each one, or why nothing does"
    )
    parser.add_argument("--json", action="store_true", help="print the profile as JSON instead of tables")


def run(args: argparse.Namespace) -> int:
    """Measure, write the profile, print. Nothing is written before everything is measured."""
    if args.list:
        from hwprofiles.catalogue import CATALOGUE  # noqa: PLC0415
        from ullage.report.profile import catalogue_tables  # noqa: PLC0415 - slow to import
        from ullage.report.terminal import answer  # noqa: PLC0415

        known = {path: {"how": e.how, "part": e.part, "words": e.words} for path, e in CATALOGUE.items()}
        answer(args, known, *catalogue_tables())
        return 0
    path: Path = args.output or local_profile_path()
    if not args.output:
        make_folder("--output", path.parent)
    check_output("--output", path)  # before minutes of measuring
    base = _base(args, path) if args.only is not None else None
    from ullage.calibrate import CalibrationOptions, calibrate, calibrate_ranks, parse_only  # noqa: PLC0415 - torch
    from ullage.calibrate.ranks import ranks  # noqa: PLC0415

    only = parse_only(args.only) if args.only is not None else None
    if args.device_cores and only is not None:
        raise ValueError(
            "--device-cores is for a whole profile, but --only keeps the cores of the profile; leave one of them out"
        )
    options = CalibrationOptions(
        quick=args.quick,
        name=_name(args.output) if only is None else None,
        device_memory_bytes=args.memory.get("device"),
        host_memory_bytes=args.memory.get("host"),
        device="host" if args.device_cores else None,
        device_cores=args.device_cores,
        only=only,
        base=base,
        endurance_bytes_per_day=args.drive_endurance,
    )

    begin_s = time.perf_counter()
    pairs: Any = ()
    with seconds_bar() as progress:
        if ranks()[0] > 1:
            profile = calibrate_ranks(options, progress)
        else:
            profile, pairs = calibrate(options, progress)
    if os.environ.get("RANK", "0") != "0":
        return 0  # rank 0 writes and prints
    took = f"measured in {time.perf_counter() - begin_s:.0f} s; "
    profile = _saved(profile, path, base)
    _print(args, profile, path, base, pairs, took)
    return 0


def _name(output: Path | None) -> str | None:
    """Return the name that a file gives its profile; ``None``: the file's name cannot be one."""
    return output.stem if output and re.fullmatch(NAME_PATTERN, output.stem) else None


def _base(args: argparse.Namespace, path: Path) -> HardwareProfile:
    """Return the profile whose parts are measured again."""
    from hwprofiles.machine import check_measured_here  # noqa: PLC0415

    profile = load_profile(str(path.absolute()) if path.is_file() else LOCAL)
    if not args.allow_other_machine:
        check_measured_here(profile)
    return profile


def _saved(profile: HardwareProfile, path: Path, base: HardwareProfile | None) -> HardwareProfile:
    """Write a profile and return it. Parts that were measured again are written into the file as it is now."""
    if base is not None and path.is_file():
        return update_profile(path, base, profile)
    save_profile(profile, path)
    return profile


def _print(
    args: argparse.Namespace, profile: HardwareProfile, path: Path, base: Any, pairs: Any = (), took: str = ""
) -> None:
    if args.json:
        from hwprofiles.registry import canonical_json  # noqa: PLC0415

        sys.stdout.write(canonical_json(profile))
        return
    from ullage.report.profile import calibration_part  # noqa: PLC0415 - slow to import
    from ullage.report.terminal import show  # noqa: PLC0415

    meaning = "; it is now the default of --hardware" if path == local_profile_path() else ""
    show(calibration_part(profile, base, pairs), f"{took}profile written to {path}{meaning}")
