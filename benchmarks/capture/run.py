"""Does a capture say what the analytic graph says, and what does it take? ``python benchmarks/capture/run.py``.

Models of ``transformers`` are captured at their real sizes, each in a process of its own, and compared with the
graph that Ullage derives from their sizes alone: captured over analytic, 1 where they agree. Iterations are those of
ZeRO-Offload on four H100. Process time includes importing PyTorch and ``transformers``.
"""

import itertools
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.origin import origin, write_result

MODELS = (
    "opt-1.3b",
    "opt-13b",
    "opt-175b",
    "gpt2",
    "llama-3-8b",
    "llama-3-70b",
    "qwen2.5-7b",
    "qwen3-8b",
    "mixtral-8x7b",
)
MICRO_BATCH, SEQ_LEN = 4, 1024
OUTPUT = Path(__file__).parents[1] / "results" / "capture.json"


def compare(name: str) -> dict[str, Any]:
    """Capture one model in this process."""
    begin_s = time.perf_counter()
    import torch  # noqa: PLC0415 - part of what is timed
    import transformers  # noqa: PLC0415

    from hwprofiles.registry import load_profile  # noqa: PLC0415
    from planner.choices.request import Request  # noqa: PLC0415
    from planner.choices.variants import variants  # noqa: PLC0415
    from planner.graph import Batch, Elementwise, build_graph, units  # noqa: PLC0415
    from planner.models import resolve_model, to_hf_config_dict  # noqa: PLC0415
    from planner.models.captured import CapturedInput  # noqa: PLC0415
    from planner.models.kernels import flop, num_kernels  # noqa: PLC0415
    from planner.search import best_of  # noqa: PLC0415
    from ullage.capture import capture_module  # noqa: PLC0415
    from ullage.rivals.best import best_of_engine, scorer_of  # noqa: PLC0415

    config = resolve_model(name)

    def make() -> torch.nn.Module:
        description = transformers.AutoConfig.for_model(**to_hf_config_dict(config))
        model: torch.nn.Module = transformers.AutoModelForCausalLM.from_config(description)  # type: ignore[no-untyped-call]
        return model

    inputs = [CapturedInput(name=key, shape=(MICRO_BATCH, SEQ_LEN), dtype="int64") for key in ("input_ids", "labels")]
    capture_begin_s = time.perf_counter()
    captured = capture_module(make, inputs)
    end_s = time.perf_counter()
    models = (captured, config)
    graphs = [units(build_graph(model, Batch(MICRO_BATCH, SEQ_LEN))) for model in models]
    hidden_bytes = graphs[1][1].activation_output_bytes

    def ratio(of: Any) -> float:
        ours, analytic = (sum(map(of, graph)) for graph in graphs)
        return float(ours / analytic)

    def moved_bytes(unit: Any) -> int:
        kernels = (*unit.forward, *unit.backward)
        return sum(kernel.num_bytes * kernel.count for kernel in kernels if isinstance(kernel, Elementwise))

    def peak_bytes(graph: Any) -> int:
        held = itertools.accumulate(unit.saved_bytes for unit in graph)
        return int(max(saved + unit.workspace_bytes for saved, unit in zip(held, graph, strict=True)))

    iterations = []
    for model in models:
        machine = load_profile("h100x4-80g")
        request = Request(model, machine, num_devices=4, seq_len=SEQ_LEN, micro_batch=MICRO_BATCH, expert_units=1)
        tried = (best_of_engine(one.setup, scorer_of(one), "zero-offload") for one in variants(request))
        iterations.append(best_of(tried).iteration_s)
    return {
        "model": name,
        "num_params": captured.num_params,
        "num_params_ratio": ratio(lambda unit: unit.num_params),
        "forward_flop_ratio": ratio(lambda unit: flop(unit.forward)),
        "backward_flop_ratio": ratio(lambda unit: flop(unit.backward)),
        "recompute_flop_ratio": ratio(lambda unit: flop(unit.recompute)),
        "saved_bytes_ratio": ratio(lambda unit: unit.saved_bytes),
        "moved_bytes_ratio": ratio(moved_bytes),
        "num_kernels_ratio": ratio(lambda unit: num_kernels((*unit.forward, *unit.backward))),
        # The analytic workspace leaves out the hidden state and its gradient.
        "peak_activation_bytes_ratio": peak_bytes(graphs[0]) / (peak_bytes(graphs[1]) + 2 * hidden_bytes),
        "iteration_ratio": iterations[0] / iterations[1],
        "capture_s": round(end_s - capture_begin_s, 2),
        "process_s": round(end_s - begin_s, 2),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def main() -> None:
    """Compare all, and write what was found."""
    began, rows = origin("torch", "transformers"), []
    for name in MODELS:
        done = subprocess.run([sys.executable, __file__, name], capture_output=True, text=True, check=True)
        rows.append(json.loads(done.stdout))
        print(done.stdout.strip())
    ratios = {key: [row[key] for row in rows] for key in rows[0] if key.endswith("_ratio")}
    result = {
        **began,
        "batch": {"micro_batch": MICRO_BATCH, "seq_len": SEQ_LEN},
        "range": {key: [min(values), max(values)] for key, values in ratios.items()},
        "slowest_capture_s": max(row["capture_s"] for row in rows),
        "most_rss_bytes": max(row["peak_rss_bytes"] for row in rows),
        "models": rows,
    }
    write_result(OUTPUT, result)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(compare(sys.argv[1])))
    else:
        main()
