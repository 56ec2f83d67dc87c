"""How long does planning take, whole process, when code is compiled? ``python benchmarks/planning/speed.py``.

First for requests that people make, then as the model gets deeper and the devices more.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.progress import track

from benchmarks.origin import origin, write_result
from planner.models import resolve_model
from planner.models.huggingface import to_hf_config_dict

REQUESTS = (
    ("--model", "opt-13b", "--gpus", "8"),
    ("--model", "opt-175b", "--gpus", "64"),
    ("--model", "opt-6.7b", "--hardware", "rtx-4090"),
    ("--model", "mixtral-8x7b", "--gpus", "8", "--hardware", "h100"),
    ("--model", "moe-1t", "--gpus", "4096", "--hardware", "h100"),
    ("--model", "moe-1t", "--gpus", "4096", "--hardware", "h100", "--parallel", "expert=64"),
    ("--model", "opt-13b", "--gpus", "8", "--global-batch", "32"),
    ("--model", "llama-3-70b", "--gpus", "64", "--hardware", "a100-cluster", "--global-batch", "256"),
)
LAYERS = (10, 20, 40, 80, 160)
DEVICES = (1, 8, 64, 512, 4096)
OUTPUT = Path(__file__).parents[1] / "results" / "planning_speed.json"


def timed(request: tuple[str, ...], folder: str) -> dict[str, Any]:
    """Plan in a process of its own, and return how long it took."""
    plan = Path(folder) / "plan.json"
    command = [sys.executable, "-m", "ullage", "plan", *request, "--output", str(plan)]
    begin_s = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    elapsed_s = time.perf_counter() - begin_s
    made = json.loads(plan.read_text(encoding="utf-8"))
    return {
        "process_s": round(elapsed_s, 3),
        "num_simulations": made["num_simulations"],
        "gap": made["prediction"]["iteration_s"] / made["certificate"]["bound_s"] - 1,
    }


def deeper(num_layers: int, folder: str) -> str:
    """Write a configuration of OPT-13B with so many layers; return its path."""
    model = resolve_model("opt-13b").model_copy(update={"num_layers": num_layers})
    path = Path(folder) / "config.json"
    path.write_text(json.dumps(to_hf_config_dict(model)), encoding="utf-8")
    return str(path)


def main() -> None:
    """Time everything and write it."""
    began = origin("numba", "numpy", "scipy", "highspy")
    layers, devices = [], []
    with tempfile.TemporaryDirectory() as folder:
        timed(REQUESTS[2], folder)  # Numba compiles what its cache lacks
        rows = [
            {"request": " ".join(request), **timed(request, folder)}
            for request in track(REQUESTS, description="requests")
        ]
        for count in track(LAYERS, description="layers"):
            request: tuple[str, ...] = ("--model", deeper(count, folder), "--gpus", "8")
            layers.append({"num_layers": count, **timed(request, folder)})
        for count in track(DEVICES, description="devices"):
            request = ("--model", "opt-13b", "--gpus", str(count), "--hardware", "h100")
            devices.append({"num_devices": count, **timed(request, folder)})
    result = {
        **began,
        "rows": rows,
        "growth": {"layers of opt-13b on 8 a100-80": layers, "h100 for opt-13b": devices},
    }
    write_result(OUTPUT, result)
    for row in rows:
        print(f"{row['process_s']:6.1f} s  {row['request']}")


if __name__ == "__main__":
    main()
