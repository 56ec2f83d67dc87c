"""Every row of a table in docs/results.md is what its result file says."""

import itertools
import json
import re
import statistics
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TIMES = "\N{MULTIPLICATION SIGN}"
ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")

# Group of runs and quantity, and what the page calls them.
PUBLISHED = (
    ("file offloaded_update.json", "iteration", "offloaded updates: iteration time"),
    ("file offloaded_update.json", "backward", "offloaded updates: backward phase"),
    ("file offloaded_update.json", "update", "offloaded updates: update phase"),
    ("file offloaded_update.json", "peak GPU", "offloaded updates: peak GPU memory"),
    ("file nvme_offload.json", "iteration", "optimizer in DRAM or on NVMe: iteration time"),
    ("file activation_swapping.json", "model FLOP rate", "activations swapped to NVMe: FLOP rate"),
    ("file streamed_h100.json", "iteration", "8B streamed through one H100: iteration time"),
    ("file in_memory_b200.json", "iteration", "Llama 3 and DeepSeek in memory on 8 B200: iteration time"),
    ("file in_memory_b200.json", "peak GPU", "Llama 3 and DeepSeek in memory on 8 B200: peak memory"),
    ("file checkpointing.json", "end to end", "checkpoint engines: end-to-end time"),
    ("file checkpointing.json", "blocking throughput", "checkpoint engines: blocking throughput"),
    ("hardware a100x8-nvlink", "iteration", "in memory, one server of 8: iteration time"),
    ("hardware a100-cluster", "iteration", "in memory, 64 to 512 GPUs: iteration time"),
)
HELD_OUT = (
    ("offloaded_update", "iteration", "offloaded updates: iteration time"),
    ("offloaded_update", "peak GPU", "offloaded updates: peak GPU memory"),
    ("nvme_offload", "iteration", "optimizer in DRAM or on NVMe: iteration time"),
    ("nvme_offload", "peak GPU", "optimizer in DRAM or on NVMe: peak GPU memory"),
    ("streamed_h100", "iteration", "8B streamed through one H100: iteration time"),
    ("in_memory_b200", "iteration", "Llama 3 and DeepSeek in memory on 8 B200: iteration time"),
    ("in_memory_b200", "peak GPU", "Llama 3 and DeepSeek in memory on 8 B200: peak memory"),
    ("in_memory_mpt", "iteration", "MPT in memory on 8 A100 or H100, packaged profiles: iteration time"),
    ("reported", "iteration", "engines and trainers of thirteen sources, packaged profiles: iteration time"),
    ("reported", "peak GPU", "engines and trainers of thirteen sources, packaged profiles: peak GPU memory"),
    ("llama_factory", "iteration", "LLaMA-Factory on 1 and 4 RTX 4090: iteration time"),
    ("qwen", "iteration", "adapters and all weights of Qwen on A100: iteration time"),
    ("qwen", "peak GPU", "adapters and all weights of Qwen on A100: peak GPU memory"),
    ("halo", "iteration", "Halo and TRL on B300, torchtune and DeepSpeed on one RTX 4090: iteration time"),
    ("halo", "peak GPU", "Halo and TRL on B300, torchtune and DeepSpeed on one RTX 4090: peak GPU memory"),
    ("llmq", "iteration", "LLMQ on 1 to 8 of six kinds of devices, packaged profiles: iteration time"),
    ("unseen", "iteration", "torchtitan, VectorLM, prime-rl, AutoModel, DeepSpeed: iteration time"),
    ("unseen", "peak GPU", "torchtitan, VectorLM, prime-rl, AutoModel, DeepSpeed: peak GPU memory"),
    ("roundpipe", "iteration", "five engines on 8 A800 or RTX 4090: iteration time"),
    ("roundpipe", "longest sequence", "five engines on 8 A800 or RTX 4090: longest sequence"),
)


def result(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return loaded


def percent(share: float, digits: int = 1, sign: str = "") -> str:
    return f"{100 * share:{sign}.{digits}f} %"


def times(ratio: float, digits: int = 2) -> str:
    return f"{ratio:.{digits}f} {TIMES}"


def span(ratios: list[float], digits: int) -> str:
    return f"{min(ratios):.{digits}f} to {times(max(ratios), digits)}"


def published() -> Iterator[tuple[str, ...]]:
    summaries = {(s["group"], s["quantity"]): s for s in result("published.json")["summaries"]}
    for group, quantity, words in PUBLISHED:
        every, others = summaries[group, quantity], summaries[f"{group}, not fitted to", quantity]
        counts = (str(every["num_cases"]), str(others["num_cases"]))
        yield words, counts[0], percent(every["mean"]), counts[1], percent(others["mean"]), percent(every["worst"])


def held_out() -> Iterator[tuple[str, ...]]:
    summaries = {(s["file"], s["quantity"]): s for s in result("published_held_out.json")["summaries"]}
    for file, quantity, words in HELD_OUT:
        row = summaries[file, quantity]
        errors = (percent(row[when][which]) for when in ("first_error", "error") for which in ("mean", "worst"))
        yield words, str(row["num_cases"]), *errors, percent(row["inside"], 0) if "inside" in row else ""


def beside() -> Iterator[tuple[str, ...]]:
    for row in result("published_beside.json")["rows"]:
        if "ratio" not in row:
            continue
        machine, types = f"{row['devices']} x {row['hardware'].split('x8')[0]}", row["products"] or "bf16"
        rates = (f"{row[f'{who}_tokens_per_s']:,.0f}" for who in ("theirs", "theirs_predicted", "ours"))
        yield row["model"], machine, types, *rates, f"{row['ratio']:.2f}", percent(row["products_share"], 0)


PARTS = ("products", "attention", "loss", "norms and sums", "SwiGLU", "embedding", "others")


def beside_parts() -> Iterator[tuple[str, ...]]:
    rows = {row["id"]: row for row in result("published_beside.json")["rows"]}
    slower = [rows[f"llmq-{name}-0.5b-bf16-b{size}"] for name, size in (("4090x1", 16), ("4090x4", 16), ("h100x1", 32))]
    assert {row["id"] for row in rows.values() if row["ratio"] < 1} == {row["id"] for row in slower}
    for part in PARTS:
        yield part, *(f"{row[f'{who}_parts_s'][part]:.2f}" for row in slower for who in ("ours", "theirs"))


def streamed() -> Iterator[tuple[str, ...]]:
    for row in result("streamed.json")["rows"].values():
        tokens = (f"{row[f'{who}_tokens_per_s']:,.0f}" for who in ("measured", "predicted", "ours"))
        sizes = (f"{row[name] // 1024} k" for name in ("tokens_per_step", "ours_tokens_per_round"))
        yield f"{row['budget_gib']:g} GiB", next(sizes), *tokens, next(sizes)


def demo() -> Iterator[tuple[str, ...]]:
    for number, error in enumerate(result("demo.json")["iteration_errors"], 1):
        yield str(number), percent(error, sign="+")


def memory() -> Iterator[tuple[str, ...]]:
    summary = result("planning_memory.json")["summary"]
    words = {
        "in memory": "plain PyTorch, peak",
        "executed": "executed plans that offload, device and host",
        "adapters": "executed plans of adapters, likewise",
        "tiles": "executed plans with the loss in tiles, likewise",
        "layers": "executed plans with norms and MLPs in tiles too, likewise",
    }
    for kind, what in words.items():
        row = summary[kind]
        yield what, str(row["num_cases"]), percent(row["mean"]), percent(abs(row["worst"]))


def _machine(row: dict[str, Any]) -> str:
    return f"{row['num_devices']} x {row['machine'].upper().replace('-', ' ')}"


def largest_models() -> Iterator[tuple[str, ...]]:
    for row in result("planning_largest.json")["rows"]:
        yield _machine(row), row["way"], *(row["largest"].get(kind, "-") for kind in ("never", "nvme"))


def longest_sequences() -> Iterator[tuple[str, ...]]:
    for row in result("planning_longest.json")["rows"]:
        found = (row["longest"].get(kind) for kind in ("never", "activations", "nvme"))
        yield _machine(row), row["way"], *(f"{length:,}" if length else "-" for length in found)


def calibration() -> Iterator[tuple[str, ...]]:
    summary = result("calibration.json")["summary"]
    yield f"median of {summary['num_quantities']} quantities", percent(summary["median_quantity_off"])
    yield "worst quantity", percent(summary["worst_quantity_off"])
    yield "worst predicted iteration time", percent(summary["worst_prediction_off"])


def capture() -> Iterator[tuple[str, ...]]:
    found = result("capture.json")
    off = {key: max(abs(ratio - 1) for ratio in ends) for key, ends in found["range"].items()}
    assert all(off[key] == 0 for key in off if "flop" in key or "num_params" in key)
    yield "FLOP, number of parameters", "equal"
    yield "saved activations", percent(off["saved_bytes_ratio"], 3)
    yield "bytes moved", percent(off["moved_bytes_ratio"], 2)
    yield "iteration time", percent(off["iteration_ratio"], 2)
    yield "slowest capture", f"{found['slowest_capture_s']:.1f} s"
    yield "memory of the process", f"{found['most_rss_bytes'] / 1e9:.2f} GB"


def architectures() -> Iterator[tuple[str, ...]]:
    found = result("architectures.json")
    rows = found["architectures"]
    assert all(row["num_params"] == row["num_params_of_model"] for row in rows)
    assert all(max(row["loss_error"], row["weight_error"]) <= found["bound"] == 1e-4 for row in rows)
    assert (found["num_steps"], found["num_architectures"]) == (20, len(rows))
    yield "architectures", str(len(rows))
    yield "refused", str(found["num_refused"])
    yield "captured parameters", "equal to the model's"
    yield "device memory under the plan, of that without, median", percent(found["median_memory_share"], 0)
    yield "largest difference of a loss", f"{found['largest_loss_error']:.1e}"
    yield "largest difference of a weight", f"{found['largest_weight_error']:.1e}"


def published_sizes() -> Iterator[tuple[str, ...]]:
    found = result("published_sizes.json")
    rows = [row for row in found["models"] if "refused" not in row]
    assert all(row["num_params"] == row["num_params_of_model"] for row in rows)
    (loop,) = (row for row in rows if row["model"] == "mamba-2.8b")
    rows.remove(loop)
    slowest = max(row["wall_s"] for row in rows)
    assert max(slowest, loop["wall_s"]) < 30
    yield "models", str(len(found["models"]))
    assert all("it is proven" in row["refused"] for row in found["models"] if "refused" in row)
    yield "without a plan that fits: Llama 4 Maverick on 64 H100, as is proven", str(found["num_refused"])
    yield "slowest plan but one", f"{slowest:.1f} s"
    yield "slowest plan: Mamba 2.8B, whose code loops over tokens", f"{loop['wall_s']:.1f} s"
    yield "most memory of a process", f"{found['most_rss_bytes'] / 1e9:.2f} GB"
    yield "largest model's weights in bf16", f"{found['most_weight_bytes'] / 1e9:,.0f} GB"


def peers() -> Iterator[tuple[str, ...]]:
    found = (result(name)["cells"].values() for name in ("cpu_peers.json", "cpu_peers_bf16.json"))
    for cell in itertools.chain(*found):
        assert cell["rows"]["ours"]["status"] == "ok"
        state = ", all state in bf16" if cell.get("state") == "bf16" else ""
        yield (
            f"{cell['compute_threads']} core(s), {cell['num_micro_batches']} micro-batch(es){state}",
            cell["best_peer"],
            times(cell["ours_over_best_peer"]),
            times(cell["ours_over_in_memory"]),
            percent(cell["ours_over_bound"], 0),
            percent(cell["prediction_error"], sign="+"),
        )


def month() -> Iterator[tuple[str, ...]]:
    rows = result("planning_month.json")["rows"]
    for chosen, alone in zip(rows[::2], rows[1::2], strict=True):
        levels = ", ".join(f"{level} every {every}" for level, every in chosen["levels"].items())
        months = f"{100 * chosen['from']:.2f} to {percent(chosen['to'], 2)}"
        lost = (percent(row[how], 2) for row in (chosen, alone) for how in ("expected", "simulated"))
        of_chosen = itertools.islice(lost, 2)
        yield f"{chosen['mtbf_h']:.1f} h", levels, *of_chosen, months, *lost


def gpu_rates() -> Iterator[tuple[str, ...]]:
    lines = result("gpu_probe.json")["lines"]

    def found(step: str, **wanted: Any) -> dict[str, Any]:
        (line,) = (x for x in lines if x["step"] == step and wanted.items() <= x.items())
        return line

    sustained = statistics.median(found("sustained products")["tflops"])
    yield "largest product of a layer of 8B, for 8 s, in bf16", f"{sustained:.0f} TFLOP/s"
    for name, backend in (("cuDNN", "CUDNN"), ("flash", "FLASH")):
        line = found("attention", batch=4, seq_len=2048, backend=f"SDPBackend.{backend}_ATTENTION")
        rates = f"{line['forward_tflops']:.0f} and {line['backward_tflops']:.0f} TFLOP/s"
        yield f"attention of {name}, 4 sequences of 2048: forward and backward", rates
    for name, compiled in (("as `transformers` has it", False), ("in compiled parts", True)):
        line = found("layer", tokens=8192, seq_len=2048, compiled=compiled)
        yield f"a layer of 8B with recomputation, {name}", f"{line['tflops_of_model']:.0f} TFLOP/s of the model"
    down, up = found("copies at once", ways=["down", "up"])["gb_per_s"]
    alone = found("copies", log2_bytes=28)
    yield "copies to the device alone, and each way of both", f"{alone['down']:.1f} and {min(down, up):.1f} GB/s"
    for beside in (False, True):
        line = found("host update", threads=14, beside_copies=beside)
        words = "beside copies both ways" if beside else "alone"
        copied = f", and the copies {sum(line['copies_gb_per_s']):.0f} GB/s" if beside else ""
        yield f"AdamW on 14 cores {words}", f"{line['dram_gb_per_s']:.0f} GB/s of host memory{copied}"
    pinned = found("pinning", huge=True)
    rates = f"{pinned['touch_gb_per_s']:.1f} and {pinned['register_gb_per_s']:.1f} GB/s"
    yield "first touch of host memory in large pages, and registering it", rates


def gpu_agreement() -> Iterator[tuple[str, ...]]:
    for name, row in result("gpu_agreement.json")["rows"].items():
        sequences, tokens, num_micro_batches = row["batch"]
        of_memory = max((part["error"] for part in row["memory"].values()), key=abs)
        yield (
            name,
            row["model"],
            f"{num_micro_batches} {TIMES} {sequences} {TIMES} {tokens}",
            f"{row['predicted']:.2f} s",
            f"{row['measured']:.2f} s",
            percent(row["error"], sign="+"),
            percent(of_memory, sign="+"),
        )


def gpu_programs() -> Iterator[tuple[str, ...]]:
    found = result("gpu_programs.json")
    outcomes = ("the same", "refused before training, in one line", "failed", "does not run there in memory")

    def outcome(row: dict[str, Any], run: str) -> str:
        if "absent" in row:
            return outcomes[3]
        if row[run]["failed"]:
            return outcomes[2]
        if row[run]["refused"]:
            return outcomes[1]
        return outcomes[0] if row[run]["off"] <= found["bound"] else "wrong"

    counts = [Counter(outcome(row, run) for row in found["rows"]) for run in ("ample", "tight")]
    assert not any(count["wrong"] for count in counts)
    yield from ((words, *(str(count[words]) for count in counts)) for words in outcomes)


def gpu_updates() -> Iterator[tuple[str, ...]]:
    for name, row in result("gpu_updates.json")["rows"].items():
        rates = (f"{row[way]['gb_per_s']:,.0f} GB/s" for way in ("chain", "kernel"))
        yield f"`{name}`", f"{row['bytes_per_param']:.0f} B", *rates, times(row["speed_up"], 1)


def gpu_lanes() -> Iterator[tuple[str, ...]]:
    found = result("gpu_lanes.json")
    for words, lane, op, per, unit in (
        ("gradients copied to the host, and added there", "d2h", "flush", 1e9, "GB/s"),
        ("optimizer steps on the device", "gpu-update", "update", 1e9, "billion parameters"),
        ("optimizer steps on the CPU", "cpu", "update", 1e9, "billion parameters"),
        ("weights copied to the device", "h2d", "fetch", 1e9, "GB/s"),
        ("backward", "compute", "backward", 1e12, "TFLOP"),
        ("recomputation", "compute", "recompute", 1e12, "TFLOP"),
    ):
        rates = []
        for when in ("before", "after"):
            (task,) = (t for t in found[when]["tasks"] if (t["lane"], t["op"]) == (lane, op))
            rates.append(task["amount"] / task["measured_s"] / per)
        yield words, *(f"{rate:.{0 if unit == 'TFLOP' else 1}f} {unit}" for rate in rates)


def gpu_peers() -> Iterator[tuple[str, ...]]:
    for name, cell in result("gpu_peers.json")["cells"].items():
        for row, found in cell["rows"].items():
            done = "iteration_s" in found
            yield (
                name,
                row,
                f"{found['iteration_s']:.3f} s" if done else "out of memory" * ("OutOfMemory" in found["why"]),
                f"{found['tokens_per_s']:,.0f}" if done else "",
                times(found["iteration_s"] / cell["rows"]["in-memory"]["iteration_s"]) if done else "",
            )


def adamw() -> Iterator[tuple[str, ...]]:
    for row in result("cpu_adamw.json")["results"]:
        ratios = (times(row[key]) for key in ("ours_of_copy", "ours_over_torch", "ours_over_deepspeed"))
        yield f"{row['num_params']:,}", str(row["num_threads"]), *ratios


def narrow_state() -> Iterator[tuple[str, ...]]:
    for name in ("Xeon", "EPYC"):
        found = result(f"cpu_narrow_state_{name.lower()}.json")["results"]
        for row in (row for row in found if row["num_params"] >= 2**26):
            values = [row.get(key) for key in ("of_copy", "wide_of_copy", "over_wide", "over_bitsandbytes")]
            yield name, f"`{row['optimizer']}`", str(row["num_threads"]), *(times(v) if v else "" for v in values)


def loss_curves() -> Iterator[tuple[str, ...]]:
    found = result("cpu_loss_curves.json")
    last = {(row["optimizer"], row["seed"]): row["last"] for row in found["rows"]}
    seeds = list(dict.fromkeys(row["seed"] for row in found["rows"]))
    for number, seed in enumerate(seeds):
        yield str(seed), "`adamw`", f"{last['adamw', seed]:.4f}", ""
        for name, differences in found["differences"].items():
            difference = last[name, seed] / last["adamw", seed] - 1
            assert difference == pytest.approx(differences[number])
            yield str(seed), f"`{name}`", f"{last[name, seed]:.4f}", percent(difference, 2, "+")


def simulator() -> Iterator[tuple[str, ...]]:
    row = result("simulator_vs_simpy.json")["full_model"]
    yield "SimPy, lanes only (its fastest form)", times(row["kernel_over_simpy_lanes"], 0)
    yield "SimPy, with resources (its usual form)", times(row["kernel_over_simpy_resources"], 0)


def checkpoint() -> Iterator[tuple[str, ...]]:
    found = result("cpu_checkpoint.json")
    blocked, cost = found["blocked_s"], found["cost_s"]
    names = {"ours": "Ullage", "torch.save": "`torch.save`", "dcp": "`torch.distributed.checkpoint`"}
    names["dcp_async"] = "its `async_save`"
    for name, words in names.items():
        ratios = [found[f"{kind}_over_ours"].get(name, 1.0) for kind in ("blocked", "cost")]
        ms = [f"{1e3 * blocked[name]:.1f} ms", f"{1e3 * cost[name]:.0f} ms"]
        yield words, ms[0], times(ratios[0], 0), ms[1], times(ratios[1], 1)


def checkpoint_every_iteration() -> Iterator[tuple[str, ...]]:
    found = result("cpu_checkpoint.json")
    yield tuple(percent(found[f"every_iteration_{kind}"] - 1, 0) for kind in ("measured", "predicted"))


def checkpoint_drive() -> Iterator[tuple[str, ...]]:
    found = result("cpu_checkpoint_drive.json")
    words = {"write": "written until durable", "verify": "read again and checked", "restore": "restored"}
    for what, said in words.items():
        raw = found[f"raw_{'write' if what == 'write' else 'read'}_bytes_per_s"]
        yield said, f"{raw / 1e9:.1f} GB/s", f"{found[f'{what}_of_raw']:.2f}"


def checkpoint_engines() -> Iterator[tuple[str, ...]]:
    models = result("cpu_checkpoint_engines.json")["models"].values()
    runs = [{(row["engine"], row["every"]): row for row in found["rows"]} for found in models]
    for engine in ("torch.save", "checkfreq", "torchsnapshot"):
        pairs = [(rows[key], rows["ours", key[1]]) for rows in runs for key in rows if key[0] == engine]
        ends, calls = ([row[key] / our[key] for row, our in pairs] for key in ("end_to_end_s", "blocked_s"))
        yield engine, span(ends, 2), span(calls, 0)


def checkpoint_engines_predicted() -> Iterator[tuple[str, ...]]:
    models = result("cpu_checkpoint_engines.json")["models"].values()
    rows = [row for found in models for row in found["rows"] if not isinstance(row["predicted"], str)]
    yield (percent(statistics.mean(abs(r["predicted"]["end_to_end_s"] / r["end_to_end_s"] - 1) for r in rows), 0),)


def grid() -> Iterator[tuple[str, ...]]:
    summary = result("planning_grid.json")["summary"]
    yield "requests", str(summary["num_cells"])
    yield "planned", str(summary["planned"])
    yield "proven not to fit", str(summary["proven_infeasible"])
    yield "neither", str(summary["not_found"])
    yield "gap to the proven bound, median", percent(summary["median_gap"])
    yield "gap to the proven bound, worst", percent(summary["worst_gap"])
    yield "best other engine over our plan, least", times(summary["least_engine_over_ours"])
    yield "best other engine over our plan, median", times(summary["median_engine_over_ours"])
    yield "best other engine over our plan, most", times(summary["most_engine_over_ours"])


def planning_speed() -> Iterator[tuple[str, ...]]:
    for row in result("planning_speed.json")["rows"]:
        yield f"`{row['request']}`", f"{row['process_s']:.1f} s"


def first_answer() -> Iterator[tuple[str, ...]]:
    for row in result("first_answer.json")["rows"].values():
        first, whole = (f"{row['now'][key]:.1f} s" for key in ("first_output_s", "process_s"))
        yield f"`{row['request']}`", first, whole, times(row["now_over_base"]["process_s"])


def page() -> Iterator[tuple[str, ...]]:
    for name, row in result("page.json")["rows"].items():
        yield name, f"{row['first_answer_s']:.1f} s", f"{row['last_answer_s']:.1f} s"


def elastic(file: str = "elastic.json") -> Iterator[tuple[str, ...]]:
    found = result(file)
    yield "processes killed", str(found["kills"]["process"])
    yield "nodes killed", str(found["kills"]["node"])
    if both := found["kills"].get("all nodes"):
        yield "both nodes killed at once", str(both)
        places = found["went_on_from"]
        words = f"{places['own']}, {places['shared']} and {places['beginning']}"
        yield "times that processes went on from nodes' own places, the shared one, and the beginning", words
    yield (
        "starts that got on, with four ranks and with fewer",
        (f"{found['starts_by_ranks']['4']} and {found['starts'] - found['starts_by_ranks']['4']}"),
    )
    yield "largest difference of a loss, relative", f"{found['loss_max_relative_difference']:.0e}"
    yield (
        "iterations computed again after a start, on average and at most",
        (f"{found['lost_iterations']['mean']:.1f} and {found['lost_iterations']['max']}"),
    )
    down = found["down_s"]
    yield "without training, median and worst", f"{down['median']:.1f} s and {down['max']:.0f} s"
    yield "processes that did not end when asked to", str(found["killed_because_they_did_not_end"])


def elastic_levels() -> Iterator[tuple[str, ...]]:
    yield from elastic("elastic_levels.json")


def elastic_stages() -> Iterator[tuple[str, ...]]:
    yield from elastic("elastic_stages.json")


def loss_tiles() -> Iterator[tuple[str, ...]]:
    for row in result("cpu_loss_tiles.json")["rows"]:
        ratios = row["over_whole"]
        sizes = (f"{row[name]:,}" for name in ("width", "vocabulary", "tokens", "tile"))
        yield *sizes, times(ratios["in tiles"]), times(ratios["again in backward"])


def launcher() -> Iterator[tuple[str, ...]]:
    plans = {"resident": "all on the device", "updated": "updated on the host"}
    plans["fetched"] = "updated on the host, weights fetched"
    for chain in result("cpu_launcher.json")["results"]:
        for plan, words in plans.items():
            row = chain["rows"][plan]
            added = (f"{row['added_us_per_unit'][phase]:.0f} us" for phase in ("forward", "backward", "clip"))
            yield str(chain["num_units"]), words, *added, times(row["over_fsdp2"])


def study() -> Iterator[tuple[str, ...]]:
    found = result("planning_study.json")
    yield "points planned", f"{found['num_points']:,}"
    yield f"time on {found['num_workers']} processes", f"{found['total_s'] / 60:.1f} min"
    yield "points planned twice after the two kills", str(found["num_computed_twice"])
    yield "points planned again alone, and equal", str(found["num_sampled_again_and_equal"])


def storage() -> Iterator[tuple[str, ...]]:
    for cell in result("planning_storage.json")["cells"]:
        setting = (f"{cell['model']} on {cell['machine']}", f"`{cell['storage']}`")
        if cell["fits"]:
            yield *setting, f"{cell['iteration_s']:.2f} s", percent(cell["gap"])
        else:
            assert cell["proven"]
            yield *setting, "proven not to fit", "-"


def accumulated() -> Iterator[tuple[str, ...]]:
    for cell in result("planning_accumulated.json")["cells"]:
        theirs, held = cell["deepspeed"], cell["held_bytes"]
        assert cell["fits"]
        assert not theirs["fits"]
        assert theirs["with_160_gb_fits"]
        yield (
            f"{cell['dram_bytes_per_s'] / 1e9:.0f} GB/s",
            f"{cell['iteration_s']:.2f} s",
            f"{cell['tokens_per_s']:,.0f}",
            f"{held['gpu'] / 2**30:.1f} GiB",
            f"{held['host'] / 1e9:.1f} GB",
            f"lacks {theirs['lacks_host_bytes'] / 1e9:.1f} GB",
            f"{theirs['with_160_gb_iteration_s']:.2f} s",
        )


def speculation() -> Iterator[tuple[str, ...]]:
    for cell in result("planning_speculation.json")["cells"]:
        waits, speculates, unclipped = (cell[way]["iteration_s"] for way in ("waits", "speculates", "no_clip"))
        assert speculates <= 1.001 * waits
        seconds = (waits, speculates, cell["speculates"]["bound_s"], unclipped)
        name = f"{cell['model']} on {cell['num_devices']} x {cell['hardware']}"
        yield name, *(f"{each:.2f} s" for each in seconds), f"{waits / speculates:.2f}"


def storage_gap() -> Iterator[tuple[str, ...]]:
    gaps = [c["gap"] for c in result("planning_storage.json")["cells"] if c["fits"] and c["storage"] == "nvme"]
    yield f"gap to the proven bound with `nvme`, median of {len(gaps)}", percent(statistics.median(gaps))
    assert statistics.median(gaps) < 0.15


def elixir() -> Iterator[tuple[str, ...]]:
    for row in result("planning_claims.json")["summary"]["elixir"]:
        yield str(row["micro_batch"]), percent(row["efficiency"], 0), f"{row['host_bytes'] / 1e9:.0f} GB"


def claims() -> Iterator[tuple[str, ...]]:
    found = result("planning_claims.json")["summary"]
    twin, stride = found["twin_flow"], found["stride"]
    shares = max(abs(predicted - measured) for _, predicted, measured in found["memory_wall"])
    yield (
        "Twin-Flow: sweeps in which the least fraction that fits is best",
        f"{twin['best_is_least']} of {twin['num_sweeps']}",
    )
    for name, row in twin["most_speedup"].items():
        said = f"{times(row['over zero_offload'], 1)} ({row['published']:.0f} {TIMES} published)"
        yield f"Twin-Flow over ZeRO-Offload, {name}", said
    yield (
        "Deep Optimizer States: sweeps in which the formula's stride is best",
        f"{stride['equal']} of {stride['num_sweeps']}",
    )
    yield "Deep Optimizer States: most that the formula's stride loses", percent(stride["most_lost_by_formula"], 0)
    yield (
        "Deep Optimizer States: time at the best stride over our plan, least",
        times(stride["least_best_stride_over_ours"], 1),
    )
    yield (
        f"memory-wall study: update share off by, in {len(found['memory_wall'])} runs",
        f"at most {100 * shares:.0f} points",
    )


def mutation() -> Iterator[tuple[str, ...]]:
    """Return how many defects of each package were noticed, in the amount of ``make test``."""
    defects = [(each["file"].split("/")[0], each["outcome"]) for each in result("mutation.json")["defects"]]
    for name in sorted({package for package, _ in defects}):
        outcomes = [outcome for package, outcome in defects if package == name]
        yield f"`{name}`", str(len(outcomes)), str(outcomes.count("caught"))


def programs() -> Iterator[tuple[str, ...]]:
    """Return what came of the programs of each kind; in a plan for little memory where it says so."""
    data = result("programs.json")
    for kind in dict.fromkeys(row["kind"] for row in data["rows"]):
        rows = [row for row in data["rows"] if row["kind"] == kind]
        same = [
            row for row in rows if all((row[run]["off"] or 0) <= data["bound"] and not why(row[run]) for run in RUNS)
        ]
        refused = sum(bool(row["tight"]["refused"]) for row in rows)
        followed = sum(not row["tight"]["left"] for row in same)
        ratio = statistics.median(row["ample"]["times_plain"] for row in same)
        yield kind, str(len(rows)), str(len(same)), str(refused), str(followed), times(ratio, 1)


def on_demand() -> Iterator[tuple[str, ...]]:
    for name, row in result("cpu_on_demand.json")["results"].items():
        left = "" if row["num_left"] is None else str(row["num_left"])
        yield name, f"{row['step_s']:.2f} s", times(row["over_fsdp2"]), left, f"{row['most_off']:.1e}"


def many_processes() -> Iterator[tuple[str, ...]]:
    rows = result("many_processes.json")["rows"]
    assert all(row["same"] and row["sent"] == row["planned"] for row in rows)
    for size in sorted({row["processes"] for row in rows}):
        of_size = [row for row in rows if row["processes"] == size]
        single, half = ([row for row in of_size if row["weights"] == weights] for weights in ("fp32", "bf16"))
        off = [f"{max(row['off'][what] for row in of):.0e}" for of in (single, half) for what in ("losses", "weights")]
        sent = sum(sum(row["sent"].values()) for row in of_size)
        yield (
            str(size),
            str(len(single)),
            str(sum(bool(row["offloaded"]) for row in single)),
            *off,
            f"{sent / 1e6:.1f} MB",
        )


def pipelines() -> Iterator[tuple[str, ...]]:
    for row in result("cpu_pipelines.json")["rows"]:
        yield (
            row["way"],
            *(f"{row['iteration'][key]:.2f} s" for key in ("measured", "predicted")),
            *(percent(row[phase]["error"], 1, "+") for phase in ("iteration", "forward", "backward")),
        )


RUNS = ("ample", "tight")


def why(run: dict[str, Any]) -> str:
    return str(run["refused"] or run["failed"])


def audit_cost() -> Iterator[tuple[str, ...]]:
    for row in result("cpu_audit.json")["results"]:
        share = percent(row["share_of_100_iterations"], 1)
        yield row["device_memory"], str(row["kinds"]), str(row["num_passes"]), f"{row['audit_s']:.1f} s", share


def audited() -> Iterator[tuple[str, ...]]:
    for defect in result("audit.json")["defects"]:
        yield defect["breaks"].rstrip("."), {"caught": "yes"}.get(defect["outcome"], "no")


TABLES = (
    published,
    held_out,
    beside,
    beside_parts,
    streamed,
    demo,
    memory,
    largest_models,
    longest_sequences,
    calibration,
    capture,
    architectures,
    published_sizes,
    peers,
    adamw,
    narrow_state,
    loss_curves,
    loss_tiles,
    launcher,
    simulator,
    checkpoint,
    checkpoint_every_iteration,
    checkpoint_drive,
    checkpoint_engines,
    checkpoint_engines_predicted,
    elastic,
    elastic_levels,
    elastic_stages,
    month,
    gpu_rates,
    gpu_programs,
    gpu_updates,
    gpu_agreement,
    gpu_lanes,
    gpu_peers,
    grid,
    planning_speed,
    first_answer,
    page,
    study,
    storage,
    accumulated,
    speculation,
    storage_gap,
    elixir,
    claims,
    mutation,
    programs,
    on_demand,
    many_processes,
    pipelines,
    audit_cost,
    audited,
)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.__name__)
def test_tables_hold_what_result_files_say(table: Any) -> None:
    rows = [f"| {' | '.join(cells)} |" for cells in table()]
    assert rows
    assert "\n".join(rows) in PAGE


def test_no_result_names_a_folder_of_a_machine() -> None:
    places = re.compile(r"(?<![\w.])/(?:home|root|tmp|work|opt|mnt)/")
    assert [path.name for path in RESULTS.glob("*.json") if places.search(path.read_text(encoding="utf-8"))] == []


def test_plans_beside_llmq_are_as_fast_as_the_page_says() -> None:
    ratios = {
        row["id"]: row["ours_tokens_per_s"] / row["theirs_predicted_tokens_per_s"]
        for row in result("published_beside.json")["rows"]
    }
    assert f"our rate is {min(ratios.values()):.2f} to {max(ratios.values()):.2f} of LLMQ's" in PAGE
    slower = [name for name, ratio in ratios.items() if ratio < 1]
    smallest = [name for name in ratios if "-0.5b-" in name]
    assert (len(set(slower) & set(smallest)), len(smallest), len(slower)) == (6, 8, 7)
    errors = [row["iteration"]["error"] for row in result("published_held_out.json")["rows"] if row["file"] == "llmq"]
    assert f"{sum(error < -0.03 for error in errors)} of {len(errors)} too fast by more than 3 %" in PAGE


def test_every_row_of_a_table_is_tied() -> None:
    """A figure that nobody ties to a file cannot slip into a table."""
    tied = {f"| {' | '.join(cells)} |" for table in TABLES for cells in table()}
    shown = re.findall(r"^\|.*\|$", PAGE, re.MULTILINE)
    heads = {shown[i - 1] for i, row in enumerate(shown) if set(row) <= set("|-: ")}
    assert [row for row in shown if row not in tied and row not in heads and not set(row) <= set("|-: ")] == []


def test_methods_say_what_was_measured() -> None:
    saved, drive, engines = (result(f"cpu_checkpoint{name}.json") for name in ("", "_drive", "_engines"))
    sizes = [f"{model['num_bytes'] / 1e6:.0f}" for model in engines["models"].values()]
    peer_results = result("cpu_peers.json")
    (model,) = {cell["model"] for cell in peer_results["cells"].values()}
    said = " ".join(PAGE.split())
    for words in (
        f"A checkpoint of {saved['num_bytes'] / 1e6:.0f} MB",
        f"A checkpoint of {drive['checkpoint_bytes'] / 1e9:.1f} GB",
        f"{', '.join(sizes[:-1])} and {sizes[-1]} MB of state",
        f"{model.removeprefix('llama-').removesuffix('m')} million parameters",
        {3: "There are three processes per row."}[peer_results["num_rounds"]],
    ):
        assert words in said


def test_a_missed_goal_is_said() -> None:
    goals = result("cpu_launcher.json")["goals"]
    said = {met: sum(found == met for found in goals.values()) for met in (True, False)}
    assert f"Goals met: {said[True]} of {len(goals)}" in " ".join(PAGE.split())
    assert all(met == ("over_fsdp2" in goal) for goal, met in goals.items())


def test_commands_are_those_that_made_the_files() -> None:
    for path in RESULTS.glob("*.json"):
        command = json.loads(path.read_text(encoding="utf-8")).get("command", "")
        assert command.partition(" --peers")[0] in PAGE, path.name


def test_every_result_file_is_on_the_page() -> None:
    assert [path.name for path in sorted(RESULTS.glob("*.json")) if path.name not in PAGE] == []
