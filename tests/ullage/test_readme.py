"""The README says what the program does and what result files hold."""

import doctest
import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

TIMES = "\N{MULTIPLICATION SIGN}"
ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def result(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / name).read_text(encoding="utf-8"))
    return loaded


# Group of runs and quantity, and what the README calls them.
PUBLISHED = (
    ("file offloaded_update.json", "iteration", "offloaded updates: iteration time"),
    ("file offloaded_update.json", "backward", "their backward phase"),
    ("file offloaded_update.json", "update", "their update phase"),
    ("file offloaded_update.json", "peak GPU", "their peak GPU memory"),
    ("file nvme_offload.json", "iteration", "optimizer in DRAM or on NVMe: iteration time"),
    ("file activation_swapping.json", "model FLOP rate", "activations swapped to NVMe: FLOP rate"),
    ("file checkpointing.json", "end to end", "checkpoint engines: end-to-end time"),
    ("file checkpointing.json", "blocking throughput", "their blocking throughput"),
    ("hardware a100x8-nvlink", "iteration", "in memory, one server of 8: iteration time"),
    ("hardware a100-cluster", "iteration", "in memory, 64 to 512 GPUs: iteration time"),
)


def published_rows() -> list[str]:
    """Return the rows of the README's table of published runs."""
    summaries = {(s["group"], s["quantity"]): s for s in result("published.json")["summaries"]}
    rows = []
    for group, quantity, words in PUBLISHED:
        everything, others = summaries[group, quantity], summaries[f"{group}, not fitted to", quantity]
        cells = [f"{100 * share:.1f} %" for share in (everything["mean"], others["mean"], everything["worst"])]
        counts = (str(everything["num_cases"]), str(others["num_cases"]))
        rows.append(f"| {words} | {counts[0]} | {cells[0]} | {counts[1]} | {cells[1]} | {cells[2]} |")
    return rows


def capture_figures() -> dict[str, str]:
    capture = result("capture.json")
    off = {key: max(abs(ratio - 1) for ratio in ends) for key, ends in capture["range"].items()}
    assert all(off[key] == 0 for key in off if "flop" in key or "num_params" in key)
    digits = {"saved_bytes": 3, "moved_bytes": 2, "iteration": 2}
    within = [f"{100 * off[f'{key}_ratio']:.{number}f} %" for key, number in digits.items()]
    return {
        "capture": f"FLOP and parameters equal; saved activations within {within[0]}, bytes moved within {within[1]}, "
        f"iteration time within {within[2]}",
        "capture_cost": f"{capture['slowest_capture_s']:.1f} s, {capture['most_rss_bytes'] / 1e9:.2f} GB of memory",
    }


def peers_figures() -> dict[str, str]:
    """Return how ours compares with peers, cell by cell; nothing before it has been measured."""
    if not (ROOT / "benchmarks" / "results" / "cpu_peers.json").exists():
        return {}
    cells = result("cpu_peers.json")["cells"].values()
    assert all(cell["rows"]["ours"]["status"] == "ok" for cell in cells)
    return {
        "peers": ", ".join(f"{cell['ours_over_best_peer']:.2f} {TIMES} {cell['best_peer']}" for cell in cells),
        "peers_in_memory": ", ".join(f"{cell['ours_over_in_memory']:.2f} {TIMES}" for cell in cells),
        "peers_bound": ", ".join(f"{100 * cell['ours_over_bound']:.0f} %" for cell in cells),
        "peers_predicted": ", ".join(f"{100 * cell['prediction_error']:+.1f} %" for cell in cells),
    }


def checkpoint_figures() -> dict[str, str]:
    """Return what a checkpoint beside training costs, against others."""
    found = result("cpu_checkpoint.json")
    others = ("torch.save", "dcp", "dcp_async")
    calls = ", ".join(f"{found['blocked_over_ours'][name]:.0f} {TIMES}" for name in others)
    costs = ", ".join(f"{found['cost_over_ours'][name]:.1f} {TIMES}" for name in others)
    slower, predicted = (100 * (found[f"every_iteration_{kind}"] - 1) for kind in ("measured", "predicted"))
    blocked_ms, cost_ms = (1e3 * found[key]["ours"] for key in ("blocked_s", "cost_s"))
    drive = result("cpu_checkpoint_drive.json")
    of_raw = ", ".join(f"{drive[f'{what}_of_raw']:.2f}" for what in ("write", "verify", "restore"))
    rates = " and ".join(f"{drive[f'raw_{what}_bytes_per_s'] / 1e9:.1f}" for what in ("write", "read"))
    return {
        "checkpoint at the drive's rate": f"A checkpoint of {drive['checkpoint_bytes'] / 1e9:.1f} GB written until it "
        f"is durable, read again and checked, restored, each alone: of the rate of bare direct transfers of as many "
        f"bytes by as many threads ({rates} GB/s written and read) | {of_raw} | "
        f"[cpu_checkpoint_drive.json](benchmarks/results/cpu_checkpoint_drive.json), `{drive['command']}` |",
        "checkpoint": f"{blocked_ms:.1f} ms: {calls}; {cost_ms:.0f} ms: {costs}; "
        f"{slower:.0f} % longer ({predicted:.0f} % predicted)",
    }


def checkpoint_engine_figures() -> dict[str, str]:
    """Return how other checkpoint engines compare with ours, over models and frequencies."""
    models = result("cpu_checkpoint_engines.json")["models"].values()
    runs = [{(row["engine"], row["every"]): row for row in found["rows"]} for found in models]

    def ratios(engine: str, key: str, digits: int) -> str:
        ours = ((rows[found], rows["ours", found[1]]) for rows in runs for found in rows if found[0] == engine)
        each = [row[key] / our[key] for row, our in ours]
        return f"{min(each):.{digits}f} to {max(each):.{digits}f} {TIMES}"

    engines = ("torch.save", "checkfreq", "torchsnapshot")
    rows = [row for found in runs for row in found.values() if not isinstance(row["predicted"], str)]
    error = statistics.mean(abs(row["predicted"]["end_to_end_s"] / row["end_to_end_s"] - 1) for row in rows)
    return {
        "checkpoint engines": "; ".join(
            f"{name} {ratios(name, 'end_to_end_s', 2)}, {ratios(name, 'blocked_s', 0)}" for name in engines
        ),
        "checkpoint engines, predicted": f"ends predicted {100 * error:.0f} % off on average",
    }


def storage_figures() -> dict[str, str]:
    """Return what NVMe and offloaded activations are worth."""
    cells = {(cell["model"], cell["storage"]): cell for cell in result("planning_storage.json")["cells"]}
    gaps = " and ".join(f"{100 * cells[model, 'nvme']['gap']:.1f} %" for model in ("opt-66b", "opt-175b"))
    again, away = cells["opt-6.7b", "never"], cells["opt-6.7b", "activations"]
    return {
        "storage": f"planned with NVMe within {gaps} of the best",
        "offloaded activations": f"{again['iteration_s']:.2f} s by recomputing, {away['iteration_s']:.2f} s with "
        f"activations on the host, within {100 * away['gap']:.1f} % of the best",
    }


def study_figures() -> dict[str, str]:
    """Return the README's row of a large study; nothing before it has been run."""
    if not (ROOT / "benchmarks" / "results" / "planning_study.json").exists():
        return {}
    found = result("planning_study.json")
    ray_s = found["equal_on_ray_s"]  # null where Ray was not installed
    on_ray = f"; all planned by 2 Ray workers in {ray_s / 60:.1f} min, the same bytes" if ray_s else ""
    statuses = ", ".join(f"{count} {status}" for status, count in found["num_by_status"].items())
    return {
        "study": f"| a study of {found['num_points']:,} points (opt-13b: GPUs {TIMES} PCIe {TIMES} cores {TIMES} "
        f"device memory) on {found['num_workers']} processes, killed twice | {found['total_s'] / 60:.1f} min; "
        f"{statuses}; "
        f"{found['num_computed_twice']} planned twice, {found['num_sampled_again_and_equal']} of a sample planned "
        f"again alone and equal{on_ray} | [planning_study.json](benchmarks/results/planning_study.json), "
        f"`{found['command']}` |"
    }


def calibration_figures() -> dict[str, str]:
    """Return the README's row of calibrating twice; nothing before it has been done."""
    if not (ROOT / "benchmarks" / "results" / "calibration.json").exists():
        return {}
    found = result("calibration.json")
    summary = found["summary"]
    off = [f"{100 * summary[key]:.1f} %" for key in ("median_quantity_off", "worst_quantity_off")]
    return {
        "calibration": f"| calibrated twice: {summary['num_quantities']} quantities, and iteration times predicted "
        f"from both | {off[0]} apart at the median, {off[1]} at worst; predictions "
        f"{100 * summary['worst_prediction_off']:.1f} % apart at worst | "
        f"[calibration.json](benchmarks/results/calibration.json), `{found['command']}` |"
    }


def figures() -> dict[str, str]:
    """Return every figure of the README, from the committed result files."""
    errors = [f"{100 * error:+.1f} %" for error in result("demo.json")["iteration_errors"]]
    simulator = result("simulator_vs_simpy.json")["full_model"]
    grid = result("planning_grid.json")["summary"]
    memory, claims = (result(f"planning_{name}.json")["summary"] for name in ("memory", "claims"))
    twin_flow, stride = claims["twin_flow"], claims["stride"]
    speedups = [
        f"{row['over zero_offload']:.1f} {TIMES} ({row['published']:.0f} {TIMES} published) for {name}"
        for name, row in twin_flow["most_speedup"].items()
    ]
    shares = max(abs(predicted - measured) for _, predicted, measured in claims["memory_wall"])
    adamw = result("cpu_adamw.json")["results"]
    over_torch, over_deepspeed = (
        f"{min(row[key] for row in adamw):.1f} to {max(row[key] for row in adamw):.1f} {TIMES}"
        for key in ("ours_over_torch", "ours_over_deepspeed")
    )
    of_copy = [row["ours_of_copy"] for row in adamw]
    return {
        **{row: row for row in published_rows()},
        "demo_errors": ", ".join(errors),
        "ratio_lanes": f"{simulator['kernel_over_simpy_lanes']:.0f}",
        "ratio_resources": f"{simulator['kernel_over_simpy_resources']:.0f}",
        "grid": f"{grid['planned']} planned, {grid['proven_infeasible']} proven infeasible, "
        f"{grid['not_found']} neither",
        "gaps": f"{100 * grid['median_gap']:.1f} % at the median, {100 * grid['worst_gap']:.1f} % at worst",
        "engines": f"{grid['median_engine_over_ours']:.2f} at the median, {grid['least_engine_over_ours']:.2f} to "
        f"{grid['most_engine_over_ours']:.2f}",
        **{
            kind: f"{memory[kind]['num_cases']} runs: {100 * memory[kind]['mean']:.1f} % off on average, "
            f"{100 * abs(memory[kind]['worst']):.1f} % at worst"
            for kind in ("in memory", "executed")
        },
        "elixir": ", ".join(f"{100 * row['efficiency']:.0f} %" for row in claims["elixir"]),
        "elixir_host": f"up to {max(row['host_bytes'] for row in claims['elixir']) / 1e9:.0f} GB",
        "twin_flow": f"in {twin_flow['best_is_least']} of {twin_flow['num_sweeps']} sweeps",
        "twin_flow_speedups": "; ".join(speedups),
        "stride": f"in {stride['equal']} of {stride['num_sweeps']} sweeps of rates, a neighbour in the others",
        "stride_lost": f"loses up to {100 * stride['most_lost_by_formula']:.0f} %",
        "stride_ours": f"at least {stride['least_best_stride_over_ours']:.1f} {TIMES} the time of our plan",
        "memory_wall": f"within {100 * shares:.0f} points of those measured in {len(claims['memory_wall'])} runs",
        "planning": "; ".join(f"{result('planning_speed.json')['rows'][i]['process_s']:.1f} s" for i in (0, 1, 4)),
        **capture_figures(),
        "adamw": f"{min(of_copy):.2f} to {max(of_copy):.2f} of its speed; {over_torch}; {over_deepspeed}",
        **peers_figures(),
        **checkpoint_figures(),
        **checkpoint_engine_figures(),
        **storage_figures(),
        **study_figures(),
        **calibration_figures(),
        **launcher_figures(),
    }


def launcher_figures() -> dict[str, str]:
    """Return what the README says of the host time that plans add."""
    found = result("cpu_launcher.json")
    rows = [chain["rows"] for chain in found["results"]]

    def span(name: str, phase: str) -> str:
        values = [row[name]["added_us_per_unit"][phase] for row in rows]
        return f"{min(values):.0f} to {max(values):.0f}"

    plans = ("resident", "updated", "fetched")
    added = "; ".join(f"{span(name, 'forward')} and {span(name, 'backward')}" for name in plans)
    ratios = [row[name]["over_fsdp2"] for row in rows for name in plans]
    return {
        "launcher": f"{added} µs (goal: 25, {'met' if all(found['goals'].values()) else 'missed'}); "
        f"{min(ratios):.2f} to {max(ratios):.2f} of what FSDP2 adds | "
        f"[cpu_launcher.json](benchmarks/results/cpu_launcher.json), `{found['command']}` |"
    }


def test_examples_run() -> None:
    parser = doctest.DocTestParser()
    test = parser.get_doctest(README, {}, "README.md", "README.md", 0)
    assert len(test.examples) >= 5
    assert doctest.DocTestRunner().run(test).failed == 0


@pytest.mark.parametrize(("name", "figure"), figures().items())
def test_figures_come_from_result_files(name: str, figure: str) -> None:
    assert figure in README, f"{name} is {figure}"


def test_paths_exist() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    local = [link for link in links if not link.startswith("http")]
    assert local
    assert [link for link in local if not (ROOT / link).exists()] == []
