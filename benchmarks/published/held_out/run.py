"""Predict the runs that were found after the model had been made: ``python benchmarks/published/held_out/run.py``.

With names of files, such as ``llmq``, only their runs are predicted again.

No profile is fitted to any of them, but ``rtx-4090x8`` to two, which are left out. ``first.json`` has what was
predicted for each when it had been written down and nothing had been changed; the result holds the errors of these
predictions beside those of today.
"""

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.origin import origin, write_result
from benchmarks.published.run import ROOT, call

HERE = Path(__file__).parent
OUTPUT = ROOT / "benchmarks" / "results" / "published_held_out.json"
FILES = (
    "offloaded_update",
    "nvme_offload",
    "streamed_h100",
    "in_memory_b200",
    "in_memory_mpt",
    "reported",
    "roundpipe",
    "llama_factory",
    "qwen",
    "halo",
    "llmq",
    "unseen",
)
QUANTITIES = ("forward", "backward", "update", "iteration", "peak GPU", "model FLOP rate", "longest sequence")


def summary(rows: list[dict[str, Any]], file: str, quantity: str) -> dict[str, Any]:
    """Return the errors of one quantity over one file: at first and now, the mean and the worst.

    For iterations, also the share of runs within the interval that should hold 80 %.
    """
    own = [row for row in rows if row["file"] == file and quantity in row]
    result: dict[str, Any] = {"file": file, "quantity": quantity, "num_cases": len(own)}
    for when in ("first_error", "error"):
        if sizes := [abs(row[quantity][when]) for row in own if when in row[quantity]]:
            result[when] = {"mean": statistics.mean(sizes), "worst": max(sizes), "num_cases": len(sizes)}
    if quantity == "iteration" and (inside := [row["inside"] for row in own if "inside" in row]):
        result["inside"] = statistics.mean(inside)
    return result


def main() -> None:
    """Predict every run, and write both predictions of each."""
    first = json.loads((HERE / "first.json").read_text())["predicted"]
    result, wanted = origin("numpy"), sys.argv[1:] or list(FILES)
    rows = [row for row in json.loads(OUTPUT.read_text())["rows"] if row["file"] not in wanted]
    for case in call("validate", "--intervals", *(str(HERE / f"{name}.json") for name in wanted))["cases"]:
        if case["fitted"]:
            continue
        file = Path(case["file"]).stem
        row: dict[str, Any] = {"id": case["id"], "file": file}
        row |= {name: case[name] for name in ("interval_s", "inside") if name in case}
        for quantity in QUANTITIES:
            if quantity not in case:
                continue
            row[quantity] = found = case[quantity]
            if before := first[file].get(case["id"], {}).get(quantity):  # the program of that day could not state all
                row[quantity] = found | {"first": before, "first_error": before / found["measured"] - 1}
        rows.append(row)
    rows.sort(key=lambda row: FILES.index(row["file"]))
    measured = {(row["file"], quantity): None for row in rows for quantity in QUANTITIES if quantity in row}
    summaries = [summary(rows, *each) for each in measured]
    for each in summaries:
        print(json.dumps(each))
    command = {"command": "python benchmarks/published/held_out/run.py"}
    write_result(OUTPUT, {**result, **command, "rows": rows, "summaries": summaries})


if __name__ == "__main__":
    main()
