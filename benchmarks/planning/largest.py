"""Which models fit, with and without each technique? ``python benchmarks/planning/largest.py``.

``ullage whatif --question largest`` answers for one RTX 4090, one H100 and 8 H100: the largest of the packaged models
that are planned from their sizes, one sequence of 2,048 tokens at a time on each device. Each row adds one technique.
The question itself says what NVMe adds. A host of 4 GB stands for training in device memory alone.

Rows are written as they are found. ``--resume`` keeps those that the result file has.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from benchmarks.origin import origin, write_result

MACHINES: Final = (("rtx-4090", 1), ("h100", 1), ("h100", 8))
WAYS: Final = {
    "in device memory alone": ("--set", "host.memory_bytes=4GB", "--storage", "never"),
    "AdamW": (),
    "moments in bf16": ("--optimizer", "adamw-bf16"),
    "moments in 8 bits": ("--optimizer", "adamw-8bit"),
    "moments in 8 bits, all else in bf16": ("--optimizer", "adamw-8bit", "--master", "bf16"),
    "Muon": ("--optimizer", "muon"),
    "LoRA": ("--lora", "rank=16"),
    "LoRA on NF4": ("--lora", "rank=16", "--quantize", "nf4"),
}
OUTPUT: Final = Path(__file__).parents[1] / "results" / "planning_largest.json"


def largest(machine: str, num_devices: int, options: tuple[str, ...]) -> dict[str, str]:
    """Return the largest model that fits, by what may be used beside device and host."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "ullage", "whatif", "--question", "largest", "--hardware", machine,
            "--gpus", str(num_devices), *options, "--output", f"{folder}/study.json", "--json",
        ]  # fmt: skip
        study: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    fits = (point["settings"] for point in study["points"] if point["result"]["status"] == "fits")
    return {settings["storage"]: settings["model"] for settings in fits}


def main() -> None:
    """Ask for every machine and technique, and write what is found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--resume", action="store_true", help="keep the rows that the result file has")
    args = parser.parse_args()
    result: dict[str, Any] = {**origin(), "rows": []}
    if args.resume and OUTPUT.exists():
        result = json.loads(OUTPUT.read_text(encoding="utf-8"))
    known = {(row["machine"], row["num_devices"], row["way"]) for row in result["rows"]}
    for machine, count in MACHINES:
        for way, options in WAYS.items():
            if (machine, count, way) not in known:
                row = {
                    "machine": machine,
                    "num_devices": count,
                    "way": way,
                    "largest": largest(machine, count, options),
                }
                print(row, flush=True)
                result["rows"].append(row)
                write_result(OUTPUT, result)


if __name__ == "__main__":
    main()
