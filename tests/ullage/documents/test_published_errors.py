"""Every large error on a published run has a reason on the page of these runs."""

import fnmatch
import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
README = ROOT / "benchmarks" / "published" / "README.md"
PUBLISHED = ROOT / "benchmarks" / "results" / "published.json"


def test_every_large_error_has_a_reason() -> None:
    """Runs that are more than 15 % off have a row that says why, and no row is left over."""
    page = README.read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| [^|]*% \| [^|]+ \|$", page, re.MULTILINE)
    reasons = [(_patterns(runs), quantities.split(", ")) for runs, quantities in rows]
    used = set[int]()
    for case in json.loads(PUBLISHED.read_text(encoding="utf-8"))["cases"]:
        for quantity, found in case.items():
            if not isinstance(found, dict) or abs(found["error"]) <= 0.15:
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
