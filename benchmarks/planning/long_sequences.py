"""How long a sequence fits, with tiles of tokens and without? ``python benchmarks/planning/long_sequences.py``.

The longest sequence of Llama-3-8B, one at a time, with AdamW, on one RTX 4090, one H100 and 8 H100, as
``ullage whatif --question longest`` finds it: with all tokens at once, with tiles of the loss, and with tiles of norms
and MLPs too, each where the planner likes them.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.origin import origin, write_result

MODEL = "llama-3-8b"
MACHINES = (("rtx-4090", 1), ("h100", 1), ("h100", 8))
ALL = "100000000"
WAYS = {
    "nothing": ("--loss-tile", ALL, "--layer-tile", ALL),
    "the loss": ("--layer-tile", ALL),
    "the loss, norms and MLPs": (),
}
OUTPUT = Path(__file__).parents[1] / "results" / "long_sequences.json"


def longest(machine: str, num_devices: int, options: tuple[str, ...]) -> dict[str, int]:
    """Return the tokens of the longest sequence that fits, by what may be used beside device and host."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "ullage", "whatif", "--question", "longest", "--model", MODEL, "--hardware", machine,
            "--gpus", str(num_devices), *options, "--output", f"{folder}/study.json", "--json",
        ]  # fmt: skip
        study: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    points = [point["settings"] for point in study["points"] if point["result"]["status"] == "fits"]
    return {point["storage"]: point["seq_len"] for point in points}


def main() -> None:
    """Ask for every machine and way, and write what is found."""
    began = origin()
    rows = [
        {"machine": machine, "num_devices": count, "in_tiles": way, "longest_seq_len": longest(machine, count, options)}
        for machine, count in MACHINES
        for way, options in WAYS.items()
    ]
    write_result(OUTPUT, {**began, "model": MODEL, "rows": rows})
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
