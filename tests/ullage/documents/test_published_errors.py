"""Every large error on a published run has a reason on the page of these runs."""

import fnmatch
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
README = ROOT / "benchmarks" / "published" / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
NEVER_FITTED = {"in_memory_mpt", "reported", "roundpipe", "llama_factory", "qwen", "halo", "llmq", "unseen"}


@pytest.mark.parametrize(
    ("title", "file", "most"),
    [("## Errors above 15 %", "published.json", 0.15), ("### Errors above 20 %", "published_held_out.json", 0.2)],
)
def test_every_large_error_has_a_reason(title: str, file: str, most: float) -> None:
    """Runs that are further off have a row that says why, and no row is left over."""
    page = README.read_text(encoding="utf-8").split(title)[1].split("\n#")[0]
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| [^|]*% \| [^|]+ \|$", page, re.MULTILINE)
    reasons = [(_patterns(runs), quantities.split(", ")) for runs, quantities in rows]
    used = set[int]()
    results = json.loads((RESULTS / file).read_text(encoding="utf-8"))
    for case in results.get("cases") or [row for row in results["rows"] if row["file"] in NEVER_FITTED]:
        for quantity, found in case.items():
            if not isinstance(found, dict) or abs(found["error"]) <= most:
                continue
            fitting = {
                number
                for number, (patterns, quantities) in enumerate(reasons)
                if quantity in quantities and any(fnmatch.fnmatchcase(case["id"], pattern) for pattern in patterns)
            }
            assert fitting, f"{case['id']}: {quantity} is {found['error']:+.0%} off"
            used |= fitting
    assert used == set(range(len(reasons)))
    assert len(reasons) > 5


def _patterns(runs: str) -> list[str]:
    """Return patterns of ids; one that begins with a hyphen ends as the first one does not."""
    first, *others = runs.replace("\\", "").split(", ")
    stem = first[: first.rfind("-interleave")]
    return [first, *(stem + other if other.startswith("-") else other for other in others)]
