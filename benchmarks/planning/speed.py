"""How long does planning take, whole process, second run? ``python benchmarks/planning/speed.py``."""

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REQUESTS = [
    ["--model", "opt-13b", "--gpus", "8"],
    ["--model", "opt-175b", "--gpus", "64"],
    ["--model", "opt-6.7b", "--hardware", "rtx-4090"],
]


def main() -> None:
    """Time each request twice and keep the second run."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for request in REQUESTS:
            command = [sys.executable, "-m", "ullage", "plan", *request, "--output", f"{folder}/plan.json"]
            for _ in range(2):
                begin_s = time.perf_counter()
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
                elapsed_s = time.perf_counter() - begin_s
            rows.append({"request": " ".join(request), "process_s": round(elapsed_s, 3)})
    result = {
        "command": "python benchmarks/planning/speed.py",
        "machine": platform.machine(),
        "num_cores": os.cpu_count(),
        "python": platform.python_version(),
        "rows": rows,
    }
    output = Path(__file__).parents[1] / "results" / "planning_speed.json"
    output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
