"""Fit the profiles of published machines to a stated minority of their runs, and predict all of them.

Writes the fitted profiles to hwprofiles/data (unless --no-fit), all predictions with their errors to
benchmarks/results/published.json, and the plot of predicted against measured to docs/published.svg.

Usage: python benchmarks/published/run.py [--no-fit] [--only PROFILE ...]
"""

import argparse
import contextlib
import dataclasses
import io
import json
import sys
from pathlib import Path
from typing import Any

from ullage.cli import main as ullage

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "published.json"
FILES = (
    "offloaded_update",
    "nvme_offload",
    "checkpointing",
    "parallel_training",
    "activation_swapping",
)


@dataclasses.dataclass(frozen=True)
class Fitting:
    """Which quantities of a profile are fitted to which runs: patterns of ids in one file."""

    profile: str
    file: str
    fit_on: tuple[str, ...]
    parameters: tuple[str, ...]


FITTINGS = (
    Fitting(
        "a100x4-40g",
        "offloaded_update",
        ("a100x4-7b-*-blocking-flush", "a100x4-7b-*-async-flush", "a100x4-7b-*-k2"),
        (
            "device.gemm.bf16",
            "device.loop_s",
            "host.dram_bytes_per_s",
            "host_link.pageable_bytes_per_s",
            "host_link.pageable_down_bytes_per_s",
        ),
    ),
    Fitting(
        "h100x4-80g",
        "offloaded_update",
        ("h100x4-10b-*-async-flush", "h100x4-20b-*-r1-*-blocking-flush", "h100x4-20b-*-r0.5-*-k2"),
        (
            "device.gemm.bf16",
            "device.hook_s",
            "device.loop_s",
            "host.dram_bytes_per_s",
            "host_link.pageable_bytes_per_s",
            "host_link.pageable_down_bytes_per_s",
        ),
    ),
    Fitting(
        "h100x4-56core-nvme",
        "nvme_offload",
        ("h100x4-nvme-host-20b-*",),
        (
            "host.dram_bytes_per_s",
            "host_link.pageable_bytes_per_s",
            "intra_node.bytes_per_s",
        ),
    ),
    Fitting(
        "rtx4090-12ssd",
        "activation_swapping",
        ("lohan-13b-bs8", "lohan-13b-bs32-ssd1", "lohan-13b-bs32-ssd6", "lohan-13b-bs128"),
        ("host.optimizer", "nvme.write"),
    ),
    Fitting(
        "polaris-a100-40g",
        "checkpointing",
        (
            "polaris-ckpt-7b-torchsnapshot",
            "polaris-ckpt-7b-datastates",
            "polaris-ckpt-30b-*",
            "*-deepspeed-every5",
            "*-checkfreq-async-every5",
        ),
        (
            "pfs.job_write_bytes_per_s",
            "pfs.create_s",
            "host.fresh_bytes_per_s",
            "host.serialise_bytes_per_s",
        ),
    ),
    Fitting(
        "polaris-a100-40g",
        "offloaded_update",
        (
            "*-7b-*-dp1-*-blocking-flush",
            "*-7b-*-dp4-*-async-flush",
            "*-7b-*-dp8-*-async-flush",
            "*-7b-*-dp16-*-k5",
            "*-13b-*-dp2-*-blocking-flush",
            "*-13b-*-dp4-*-k2",
            "*-13b-*-dp2-*-k8",
        ),
        (
            "device.gemm.bf16",
            "host.dram_bytes_per_s",
            "host_link.pageable_bytes_per_s",
            "inter_node.bytes_per_s",
        ),
    ),
)


def call(*arguments: str) -> dict[str, Any]:
    """Run ``ullage`` with ``--json`` and return what it printed."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = ullage([*arguments, "--json"])
    if code != 0:
        raise SystemExit(f"ullage {' '.join(arguments)}: exit code {code}")
    result: dict[str, Any] = json.loads(out.getvalue())
    return result


def fit(fitting: Fitting) -> dict[str, Any]:
    """Fit one profile and write it where it is packaged."""
    arguments = ["calibrate", "--from-runs", str(HERE / f"{fitting.file}.json"), "--profile", fitting.profile]
    arguments += ["--fit-on", *fitting.fit_on, "--parameters", *fitting.parameters]
    path = ROOT / "hwprofiles" / "data" / f"{fitting.profile}.json"
    return call(*arguments, "--output", str(path))


def main() -> int:
    """Fit, predict, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-fit", action="store_true", help="only predict, with the profiles as they are")
    parser.add_argument("--only", nargs="+", metavar="PROFILE", help="fit only these profiles")
    parser.add_argument("--files", nargs="+", default=FILES, metavar="FILE", help="predict only these")
    args = parser.parse_args()
    fits = json.loads(RESULTS.read_text())["fits"] if RESULTS.exists() else {}
    for fitting in () if args.no_fit else FITTINGS:
        if not args.only or fitting.profile in args.only:
            found = fits[f"{fitting.profile} on {fitting.file}"] = fit(fitting)
            sys.stdout.write(f"{fitting.profile} on {fitting.file}: {100 * found['rms_residual']:.1f} %\n")
    validated = call("validate", *(str(HERE / f"{file}.json") for file in args.files))
    for case in validated["cases"]:
        case["file"] = Path(case["file"]).name
    result = {"command": "python benchmarks/published/run.py", "fits": fits, **validated}
    RESULTS.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n")
    for row in result["summaries"]:
        sys.stdout.write(
            f"{row['group']:<40}{row['quantity']:<22}{row['num_cases']:4} "
            f"{100 * row['mean']:6.1f} % {100 * row['worst']:6.1f} %\n"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
