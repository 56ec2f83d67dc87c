"""Break the program on purpose, one defect of ``defects.json`` after the other, and see whether its tests notice.

Tests run as in ``make test``, in a copy of the tree. Exits with 1 if a defect survives, and with 2 if one could not be
tried. ``python tests/mutation/run.py``; with words, only defects whose file or description has one of them. With
``--audit``, those that are ``audited``: trainings run, and their own audit has to notice.
"""

import dataclasses
import datetime as dt
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
RESULT: Final = ROOT / "benchmarks" / "results" / "mutation.json"
AUDIT: Final = ROOT / "benchmarks" / "results" / "audit.json"
_LONGEST_S: Final = 900.0  # a defect may make something wait for ever


@dataclasses.dataclass(frozen=True)
class Defect:
    """A change of one line that breaks something.

    Attributes:
        file: path from the root.
        old, new: what is there, once, and what takes its place.
        breaks: what goes wrong then.
        tests: files or folders of tests, of which one is expected to fail.
        audited: whether a session's own audit has to notice it too.
    """

    file: str
    old: str
    new: str
    breaks: str
    tests: tuple[str, ...]
    audited: bool = False

    def why_not(self, root: Path) -> str:
        """Return why it cannot be tried in a tree; empty if it can."""
        if missing := [path for path in (self.file, *self.tests) if not (root / path).exists()]:
            return f"{missing[0]} does not exist"
        count = (root / self.file).read_text(encoding="utf-8").count(self.old)
        return "" if count == 1 else f"{self.file} has {self.old!r} {count} times instead of once"


def defects() -> list[Defect]:
    """Return all of them."""
    found = json.loads(Path(__file__).with_name("defects.json").read_text(encoding="utf-8"))
    return [Defect(**(each | {"tests": tuple(each["tests"])})) for each in found]


def copied(root: Path) -> None:
    """Copy all files of the tree but those that git ignores."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
    )
    for name in filter(None, listed.stdout.decode().split("\n")):
        if (ROOT / name).exists():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, root / name)


def tried(defect: Defect, root: Path, *, by_audit: bool = False) -> dict[str, object]:
    """Apply a defect to a copy, run its tests, or trainings that only audit themselves, and take it back."""
    begin_s = time.monotonic()
    row: dict[str, object] = {"file": defect.file, "breaks": defect.breaks, "seen_by": None}
    if why := defect.why_not(root):
        return row | {"outcome": f"error: {why}", "seconds": 0.0}
    path = root / defect.file
    whole = path.read_text(encoding="utf-8")
    path.write_text(whole.replace(defect.old, defect.new), encoding="utf-8")
    try:
        tests = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *defect.tests]
        command = [sys.executable, *(["tests/mutation/audited.py"] if by_audit else tests)]
        environment = os.environ | {"PYTHONPATH": str(root), "OMP_WAIT_POLICY": "passive"}
        environment.pop("ULLAGE_TESTS", None)
        done = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, timeout=_LONGEST_S, check=False
        )
        outcome = {0: "survived", 1: "caught"}.get(done.returncode, f"error: pytest ended with {done.returncode}")
        failed = re.search(r"^(?:FAILED |ERROR |AuditError: )(.+?(?=; |$)|\S+)", done.stdout, re.MULTILINE)
        row["seen_by"] = failed[1] if failed else None
    except subprocess.TimeoutExpired:
        outcome = "caught"
        row["seen_by"] = "tests that never ended"
    finally:
        path.write_text(whole, encoding="utf-8")
    return row | {"outcome": outcome, "seconds": round(time.monotonic() - begin_s, 1)}


def main(words: list[str]) -> int:
    """Try all defects, or those that are named; print a row for each, and write all that were ever tried."""
    if words == ["--audit"]:
        return audited()
    rows = {row["breaks"]: row for row in json.loads(RESULT.read_text("utf-8"))["defects"]} if words else {}
    chosen = [d for d in defects() if not words or any(word in f"{d.file} {d.breaks}" for word in words)]
    with tempfile.TemporaryDirectory() as folder:
        copied(Path(folder))
        for defect in chosen:
            row = rows[defect.breaks] = tried(defect, Path(folder))
            print(f"{row['outcome']:9} {row['seconds']:6} s  {defect.file}: {defect.breaks}", flush=True)  # noqa: T201
    date = dt.datetime.now(tz=dt.UTC).date().isoformat()
    ordered = [rows[defect.breaks] for defect in defects() if defect.breaks in rows]
    result = {"command": "python tests/mutation/run.py", "date": date, "defects": ordered}
    RESULT.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    outcomes = [str(rows[defect.breaks]["outcome"]) for defect in chosen]
    survived, errors = (sum(outcome.startswith(word) for outcome in outcomes) for word in ("survived", "error"))
    print(f"{len(chosen) - survived - errors} caught, {survived} survived, {errors} could not be tried")  # noqa: T201
    return 2 if errors else int(bool(survived))


def audited() -> int:
    """Try all defects that an audit has to notice, and write them; return 1 if it does not notice one."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        copied(Path(folder))
        none = Defect("tests/mutation/audited.py", '"""Trainings', '"""Trainings', "Nothing.", (), audited=True)
        for defect in (none, *(each for each in defects() if each.audited)):
            rows.append(row := tried(defect, Path(folder), by_audit=True))
            print(f"{row['outcome']:9} {row['seconds']:6} s  {defect.file}: {defect.breaks}", flush=True)  # noqa: T201
    date = dt.datetime.now(tz=dt.UTC).date().isoformat()
    result = {"command": "python tests/mutation/run.py --audit", "date": date, "defects": rows[1:]}
    AUDIT.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return int(rows[0]["outcome"] != "survived" or any(row["outcome"] != "caught" for row in rows[1:]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
