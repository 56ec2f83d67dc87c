"""How long does a plan of a published model take that is captured? ``python benchmarks/capture/published.py``.

``ullage plan`` plans packaged models at their published sizes, each in a process of its own, which also imports PyTorch
and ``transformers``. If other programs run meanwhile, only processor time counts. Names after the command choose some
of them, and nothing is written.
"""

import json
import math
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from benchmarks.origin import origin, write_result
from planner.models.captured import CapturedModel
from planner.models.registry import list_models
from planner.plan.document import load_plan

MODELS: Final = (
    *("gemma-2-27b", "gemma-3-1b", "phi-2", "phi-4", "gpt-neox-20b", "olmo-2-32b", "olmo-3-32b", "falcon-40b"),
    *("glm-4-32b", "granite-3.3-8b", "command-r", "smollm3-3b", "starcoder2-7b", "seed-oss-36b", "bloom-7b1"),
    *("deepseek-v2", "deepseek-v3", "glm-4.5", "gpt-oss-120b", "llama-4-scout", "llama-4-maverick"),
    *("qwen1.5-moe-a2.7b", "qwen3-next-80b-a3b", "olmoe-1b-7b", "phi-3.5-moe", "mamba-2.8b", "mamba2-codestral-7b"),
    *("bert-large", "roberta-large", "modernbert-large", "deberta-v3-large", "bart-large", "t5-11b"),
    *("whisper-large-v3", "vit-huge", "dinov2-giant"),
    *("gemma-3-27b", "llava-1.5-7b", "paligemma-3b", "qwen2.5-vl-72b"),
)
BOUND_S: Final = 30.0
_PARAMS_PER_DEVICE = 10e9  # for which offloading finds room on an H100 and its share of the host
_OUTPUT = Path(__file__).parents[1] / "results" / "published_sizes.json"


def row(name: str) -> dict[str, Any]:
    """Plan a packaged model for as many H100 as hold it, in a process of its own."""
    num_params = list_models()[name]
    num_devices = 2 ** max(math.ceil(math.log2(num_params / _PARAMS_PER_DEVICE)), 0)
    options = ["--gpus", str(num_devices), "--micro-batch", "1", "--output", "plan.json", "--json"]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "ullage", "plan", "--model", name, "--hardware", "h100", *options]
        before, begin_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        wall_s = time.perf_counter() - begin_s
        if done.returncode:
            own = (
                line for line in done.stderr.splitlines() if line.startswith("ullage plan: ")
            )  # others warn there too
            return {"model": name, "refused": "\n".join(own)}
        plan = load_plan(Path(folder) / "plan.json")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert isinstance(plan.model, CapturedModel)
    return {
        "model": name,
        "inputs": [str(spec) for spec in plan.model.inputs],
        "num_params": plan.model.num_params,
        "num_params_of_model": num_params,
        "num_devices": num_devices,
        "iteration_s": plan.prediction.iteration_s,
        "wall_s": round(wall_s, 1),
        "cpu_s": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1),
        "most_rss_bytes": after.ru_maxrss * 1024,  # of this and all before it
        "weight_bytes": 2 * plan.model.num_params,
    }


def main() -> None:
    """Run all, and write what was found."""
    began, chosen, rows = origin("torch", "transformers"), sys.argv[1:], []
    for name in chosen or MODELS:
        rows.append(row(name))
        print(json.dumps(rows[-1]), flush=True)
    done = [entry for entry in rows if "refused" not in entry]
    result = {
        **began,
        "num_models": len(rows),
        "num_refused": len(rows) - len(done),
        "slowest_cpu_s": max(entry["cpu_s"] for entry in done),
        "slowest_wall_s": max(entry["wall_s"] for entry in done),
        "most_rss_bytes": max(entry["most_rss_bytes"] for entry in done),
        "most_weight_bytes": max(entry["weight_bytes"] for entry in done),
        "models": rows,
    }
    if not chosen:
        write_result(_OUTPUT, result)


if __name__ == "__main__":
    main()
