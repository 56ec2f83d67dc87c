"""Fit the profiles of published machines to a stated minority of their runs, and predict all of them.

Writes the fitted profiles to hwprofiles/data (unless --no-fit), and all predictions with their errors to
benchmarks/results/published.json, which ``python docs/figures.py`` plots.

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

from benchmarks.published import fit as fitter
from benchmarks.published.fitting import fitted_paths
from hwprofiles.paths import number, quantities, replace
from hwprofiles.quantity import Provenance
from hwprofiles.registry import load_profile, save_profile
from ullage.main import main as ullage

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "published.json"
FILES = (
    "offloaded_update",
    "nvme_offload",
    "checkpointing",
    "parallel_training",
    "activation_swapping",
    "streamed_h100",
    "in_memory_b200",
)


@dataclasses.dataclass(frozen=True)
class Fitting:
    """Which quantities of a profile are fitted to which runs: patterns of ids in one file."""

    profile: str
    file: str
    fit_on: tuple[str, ...]
    parameters: tuple[str, ...]


def every(step: int, first: int, hardware: str) -> tuple[str, ...]:
    """Return the ids of every so many in-memory runs of a machine, sorted so that each kind of run is among them."""
    cases = json.loads((HERE / "parallel_training.json").read_text())["cases"]

    def key(case: dict[str, Any]) -> tuple[int, ...]:
        model, parallel, batch = case["model"], case["parallel"], case["batch"]
        degrees = (parallel["pipeline_parallel"], parallel["data_parallel"])
        return (model["hidden_size"], parallel["tensor_parallel"], batch["micro_batch"], *degrees, model["num_layers"])

    return tuple(case["id"] for case in sorted((c for c in cases if c["hardware"] == hardware), key=key)[first::step])


FITTINGS = (
    Fitting(
        "a100x4-40g",
        "offloaded_update",
        ("a100x4-7b-*-blocking-flush", "a100x4-7b-*-async-flush", "a100x4-7b-*-k2"),
        (
            "device.gemm.bf16",
            "device.hook_s",
            "device.loop_s",
            "host.dram_bytes_per_s",
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
        "a100x8-nvlink",
        "parallel_training",
        every(4, 0, "a100x8-nvlink"),
        ("device.elementwise", "device.issue_s", "device.exchange_s", "intra_node.latency_s"),
    ),
    Fitting(
        "a100-cluster",
        "parallel_training",
        (*every(4, 1, "a100-cluster"), "a100-cluster-*-tp16-*"),
        ("inter_node.bytes_per_s", "inter_node.partial_group_ratio"),
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
        "h100-80g-dataflow",
        "streamed_h100",
        ("*-adamw-*-b18",),
        ("device.gemm.bf16", "device.attention.bf16"),
    ),
    Fitting(
        "b200x8-nvlink",
        "in_memory_b200",
        ("*-70b-tp2-*", "*-405b-l4-tp2-pp1-dp4-*", "*-deepseekv2-tp1-ep8-*"),
        ("device.gemm.bf16",),
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
            "*-7b-*-tp1-dp1-mb4-gb4-*-blocking-flush",
            "*-7b-*-dp4-*-async-flush",
            "*-7b-*-dp8-*-async-flush",
            "*-7b-*-dp16-*-k5",
            "*-13b-*-dp2-*-blocking-flush",
            "*-13b-*-dp4-*-k2",
            "*-13b-*-dp2-*-k8",
            "*-30b-*-tp2-*-blocking-flush",
        ),
        (
            "device.gemm.bf16",
            "host.dram_bytes_per_s",
            "host_link.pageable_bytes_per_s",
            "inter_node.bytes_per_s",
            "inter_node.partial_group_ratio",
        ),
    ),
)


# The servers of the cluster are those of the other machine: what was fitted to one holds for the others.
SAME_SERVERS = ("a100x8-nvlink", "a100-cluster")


def call(*arguments: str) -> dict[str, Any]:
    """Run ``ullage`` with ``--json`` and return what it printed."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = ullage([*arguments, "--json"])
    if code != 0:
        raise SystemExit(f"ullage {' '.join(arguments)}: exit code {code}")
    result: dict[str, Any] = json.loads(out.getvalue())
    return result


def packaged(profile: str) -> Path:
    """Return where a built-in profile lives."""
    return ROOT / "hwprofiles" / "data" / f"{profile}.json"


def inherit() -> None:
    """Give the cluster what was fitted to one server."""
    server, cluster = (load_profile(str(packaged(name))) for name in SAME_SERVERS)
    of_server = quantities(server)
    shared = {path: number(of_server[path]) for path in fitted_paths(server)}
    source = f"the same devices and software as in {server.name}: its value, fitted to runs on one server"
    provenance = Provenance(origin="fitted", source=source)
    save_profile(replace(cluster, shared, provenance), packaged(cluster.name))


def fit(fitting: Fitting) -> dict[str, Any]:
    """Fit one profile and write it where it is packaged."""
    if fitting.profile == SAME_SERVERS[1]:
        inherit()
    arguments = [str(HERE / f"{fitting.file}.json"), "--profile", fitting.profile]
    arguments += ["--fit-on", *fitting.fit_on, "--parameters", *fitting.parameters]
    return fitter.main([*arguments, "--output", str(packaged(fitting.profile))])


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
