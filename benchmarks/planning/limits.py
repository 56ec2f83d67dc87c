"""What fits, with and without each technique? ``python benchmarks/planning/limits.py largest`` or ``longest``.

``ullage whatif`` answers for one RTX 4090, one H100 and 8 H100, and each row has another technique:

- ``largest``: the largest of the packaged models that are planned from their sizes, one sequence of 2,048 tokens at a
  time on each device;
- ``longest``: the longest sequence of Llama-3-8B, one at a time on each device; in the last row all devices share one.
  Each row keeps the tiles of the one before.

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
DEVICE_ALONE: Final = ("--set", "host.memory_bytes=4GB", "--storage", "never")
AT_ONCE: Final = ("--tiles", "loss=100000000", "--tiles", "layer=100000000")
NF4: Final = ("--lora", "rank=16", "--quantize", "nf4")
LONGEST: Final = ("--model", "llama-3-8b")
SHARED: Final = "AdamW, one sequence on all devices"
WAYS: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    "largest": {
        "in device memory alone": DEVICE_ALONE,
        "AdamW": (),
        "moments in bf16": ("--optimizer", "adamw-bf16"),
        "moments in 8 bits": ("--optimizer", "adamw-8bit"),
        "moments in 8 bits, all else in bf16": ("--optimizer", "adamw-8bit", "--precision", "master=bf16"),
        "Muon": ("--optimizer", "muon"),
        "LoRA": ("--lora", "rank=16"),
        "LoRA on NF4": NF4,
    },
    "longest": {
        "LoRA on NF4 in device memory alone": (*LONGEST, *AT_ONCE, *NF4, *DEVICE_ALONE),
        "AdamW": (*LONGEST, *AT_ONCE),
        "the loss in tiles": (*LONGEST, *AT_ONCE[2:]),
        "norms and MLPs in tiles": LONGEST,
        "moments in 8 bits": (*LONGEST, "--optimizer", "adamw-8bit"),
        "LoRA on NF4": (*LONGEST, *NF4),
        SHARED: (*LONGEST, "--parallel", "context=8"),
    },
}
"""Options of each row, by question."""
ANSWERS: Final = {"largest": "model", "longest": "seq_len"}
"""The setting of a study that answers a question."""
RESULTS: Final = Path(__file__).parents[1] / "results"


def limits(question: str, machine: str, num_devices: int, options: tuple[str, ...]) -> dict[str, Any]:
    """Return the largest model or the longest sequence that fits, by what may be used beside device and host."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "ullage", "whatif", "--question", question, "--hardware", machine,
            "--gpus", str(num_devices), *options, "--output", f"{folder}/study.json", "--json",
        ]  # fmt: skip
        study: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    fits = (point["settings"] for point in study["points"] if point["result"]["status"] == "fits")
    return {settings["storage"]: settings[ANSWERS[question]] for settings in fits}


def main() -> None:
    """Ask for every machine and technique, and write what is found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", choices=WAYS)
    parser.add_argument("--resume", action="store_true", help="keep the rows that the result file has")
    args = parser.parse_args()
    output = RESULTS / f"planning_{args.question}.json"
    result: dict[str, Any] = {**origin(), "rows": []}
    if args.resume and output.exists():
        result = {
            **json.loads(output.read_text(encoding="utf-8")),
            "command": result["command"].removesuffix(" --resume"),
        }
    known = {(row["machine"], row["num_devices"], row["way"]) for row in result["rows"]}
    for machine, count in MACHINES:
        for way, options in WAYS[args.question].items():
            if (machine, count, way) not in known and (count > 1 or way != SHARED):
                found = limits(args.question, machine, count, options)
                row = {"machine": machine, "num_devices": count, "way": way, args.question: found}
                print(row, flush=True)
                result["rows"].append(row)
                order = [(*each, way) for each in MACHINES for way in WAYS[args.question]]
                result["rows"].sort(key=lambda row: order.index((row["machine"], row["num_devices"], row["way"])))
                write_result(output, result)


if __name__ == "__main__":
    main()
