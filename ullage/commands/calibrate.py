"""``ullage calibrate``: measure this machine."""

import argparse
import sys
from pathlib import Path
from typing import Any

from hwprofiles.profile import HardwareProfile
from hwprofiles.registry import local_profile_path, save_profile
from ullage import fitting
from ullage.arguments import parse_bytes
from ullage.commands import Subparsers, command_parser
from ullage.progress import progress_bar


def add_parser(subparsers: Subparsers) -> None:
    """Add the parser of this command."""
    parser = command_parser(
        subparsers,
        "calibrate",
        run,
        "Measure what this machine can do and write its hardware profile, which `--hardware local` then means.\n"
        "Takes about four minutes, with --quick half a minute; best while nothing else runs.\n"
        "Or fit the few quantities that no probe and no publication states to whole runs (--from-runs).",
        """
        ullage calibrate
        ullage calibrate --quick --device-memory 2GB
        ullage calibrate --name lab-box --output lab-box.json
        ullage calibrate --from-runs cases.json --profile a100x4-40g --fit-on '*-blocking-*' '*-k2'
        """,
    )
    parser.add_argument("--quick", action="store_true", help="fewer and smaller sizes: half a minute, less exact")
    parser.add_argument("--name", metavar="NAME", help="name of the profile (default: from the host's name)")
    parser.add_argument(
        "--output", type=Path, metavar="PATH", help=f"where the profile goes (default: {local_profile_path()})"
    )
    parser.add_argument(
        "--device-memory", type=parse_bytes, metavar="SIZE", help="memory that training may use on each device"
    )
    parser.add_argument("--json", action="store_true", help="print the profile itself (or the fit) instead of tables")
    fitting.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, write, print. Nothing is written before all is measured."""
    others = fitting.MEASURES if args.from_runs else fitting.FITS
    if given := [f"--{name.replace('_', '-')}" for name in others if getattr(args, name)]:
        rule = (
            "measures, and --from-runs does not" if args.from_runs else "says how to fit, which needs --from-runs CASES"
        )
        raise ValueError(f"{given[0]} {rule}; leave it out, or correct the rest")
    if args.from_runs:
        return fitting.run(args)
    from hwprofiles.calibrate import CalibrationOptions, calibrate  # noqa: PLC0415 - torch

    path: Path = args.output or local_profile_path()
    if path.is_dir() or (args.output and not path.absolute().parent.is_dir()):
        raise ValueError(f"--output {path}: give the name of a file in a folder that is there")  # not after measuring
    options = CalibrationOptions(quick=args.quick, name=args.name, device_memory_bytes=args.device_memory)
    with progress_bar() as progress:
        profile, report = calibrate(options, kernels(), progress)
    save_profile(profile, path)
    if args.json:
        from hwprofiles.registry import canonical_json  # noqa: PLC0415

        sys.stdout.write(canonical_json(profile))
    else:
        _print(profile, report, path)
    return 0


def kernels() -> Any:
    """Return what the executor runs, in the form that calibration calls."""
    from executor.backend import sum_of_squares  # noqa: PLC0415 - numba
    from executor.optimizer import AdamWParams, WorkerTeam, adamw_step  # noqa: PLC0415
    from hwprofiles.calibrate import Kernels  # noqa: PLC0415 - torch
    from ullage.probe import host_times  # noqa: PLC0415 - transformers

    params = AdamWParams()
    teams: dict[int, WorkerTeam] = {}

    def step(master: Any, exp_avg: Any, exp_avg_sq: Any, grad: Any, weight: Any, num_threads: int) -> None:
        if num_threads not in teams:  # threads outlive one step, as they do in training
            teams[num_threads] = WorkerTeam(num_threads)
        adamw_step(master, exp_avg, exp_avg_sq, grad, weight, params, step=1, team=teams[num_threads])

    return Kernels(cpu_adamw=step, sum_of_squares=sum_of_squares, host_times=host_times)


def _print(profile: HardwareProfile, report: Any, path: Path) -> None:
    from hwprofiles.paths import quantities  # noqa: PLC0415
    from ullage.console import console, table  # noqa: PLC0415 - slow to import
    from ullage.formatting import si  # noqa: PLC0415
    from ullage.provenance import unit_and_value  # noqa: PLC0415

    out = console()
    out.print(f"{profile.name}: {profile.description}", markup=False)
    out.print()
    rows = table("measured", "quantity", "value")
    for name, item in quantities(profile).items():
        unit, value = unit_and_value(item)
        rows.add_row(name, si(value, unit) if unit else f"{value:.3g}")
    out.print(rows)
    out.print()
    pairs = table("at the same time", "what", "slow-down", "as the profile implies")
    for pair in report.pairs:
        pairs.add_row(pair.what, f"{pair.slow_down:.2f}", "-" if pair.predicted is None else f"{pair.predicted:.2f}")
    out.print(pairs)
    out.print(f"measured in {report.elapsed_s:.0f} s; profile written to {path}", markup=False, soft_wrap=True)
