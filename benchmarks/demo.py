"""How well is a run of this machine predicted? Calibrate, plan, execute and compare, three times over.

    python benchmarks/demo.py

Best while nothing else runs: every repeat calibrates anew, so its error includes what calibration itself gets wrong.
"""

import argparse
import contextlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.origin import origin, write_result
from ullage.main import main as ullage

RESULTS = Path(__file__).parent / "results"


def output_of(*arguments: str) -> dict[str, Any]:
    """Run one command of the program with ``--json`` and return what it prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = ullage([*arguments, "--json"])
    if code != 0:
        sys.exit(f"ullage {' '.join(arguments)} failed with {code}")
    result: dict[str, Any] = json.loads(out.getvalue())
    return result


def repeat(folder: Path, setting: list[str], iterations: int) -> dict[str, Any]:
    """Calibrate, plan, execute; return predicted and measured."""
    profile, plan = folder / "machine.json", folder / "plan.json"
    output_of("calibrate", "--quick", "--output", str(profile))
    output_of("plan", "--hardware", str(profile), *setting, "--output", str(plan))
    run = output_of("execute", str(plan), "--iterations", str(iterations), "--output-dir", str(folder))
    return {
        "load_average": os.getloadavg()[0],
        "phases": run["phases"],
        "memory": run["memory"],
        "loss": [run["losses"][0], run["losses"][-1]],
    }


def main() -> None:
    """Repeat, and write the result and the last run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--output", type=Path, default=RESULTS / "demo.json")
    args = parser.parse_args()
    began = origin("torch", "transformers", "numba", "numpy")
    setting = ["--model", "demo-llama", "--memory", "device=180MB", "--micro-batch", "2", "--seq-len", "256"]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        repeats = [repeat(folder, setting, args.iterations) for _ in range(args.repeats)]
        run = (folder / "run.json").read_text(encoding="utf-8")
    errors = [r["phases"]["iteration"]["error"] for r in repeats]
    result = {
        **began,
        "plan": " ".join(setting),
        "iteration_errors": errors,
        "worst_iteration_error": max(errors, key=abs),
        "repeats": repeats,
    }
    write_result(args.output, result)
    (args.output.parent / "demo_run.json").write_text(run, encoding="utf-8")
    print(json.dumps({"iteration_errors": errors, "written": args.output.name}))


if __name__ == "__main__":
    main()
