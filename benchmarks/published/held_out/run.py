"""Predict the runs that were found after the model had been made: ``python benchmarks/published/held_out/run.py``.

No profile is fitted to any of them. ``first.json`` has what was predicted for each when it had been written down and
nothing had been changed; the result holds the errors of these predictions beside those of today.
"""

import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.origin import origin, write_result
from benchmarks.published.run import ROOT, call

HERE = Path(__file__).parent
OUTPUT = ROOT / "benchmarks" / "results" / "published_held_out.json"
FILES = ("offloaded_update", "nvme_offload", "streamed_h100", "in_memory_b200", "in_memory_mpt")
QUANTITIES = ("forward", "backward", "update", "iteration", "peak GPU")


def summary(rows: list[dict[str, Any]], file: str, quantity: str) -> dict[str, Any]:
    """Return the errors of one quantity over one file: at first and now, the mean and the worst."""
    found = [row[quantity] for row in rows if row["file"] == file and quantity in row]
    result: dict[str, Any] = {"file": file, "quantity": quantity, "num_cases": len(found)}
    for when in ("first_error", "error"):
        sizes = [abs(each[when]) for each in found]
        result[when] = {"mean": statistics.mean(sizes), "worst": max(sizes)}
    return result


def main() -> None:
    """Predict every run, and write both predictions of each."""
    first = json.loads((HERE / "first.json").read_text())["predicted"]
    result = origin("numpy")
    rows: list[dict[str, Any]] = []
    for case in call("validate", *(str(HERE / f"{name}.json") for name in FILES))["cases"]:
        file = Path(case["file"]).stem
        row: dict[str, Any] = {"id": case["id"], "file": file}
        for quantity in QUANTITIES:
            if quantity in case:
                found, before = case[quantity], first[file][case["id"]][quantity]
                row[quantity] = found | {"first": before, "first_error": before / found["measured"] - 1}
        rows.append(row)
    measured = {(row["file"], quantity): None for row in rows for quantity in QUANTITIES if quantity in row}
    summaries = [summary(rows, *each) for each in measured]
    for each in summaries:
        print(json.dumps(each))
    write_result(OUTPUT, {**result, "rows": rows, "summaries": summaries})


if __name__ == "__main__":
    main()
