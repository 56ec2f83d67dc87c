"""The deliberate defects of ``run.py`` can still be made. Trying them takes minutes and is no part of ``make test``."""

import ast
import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_SPEC = importlib.util.spec_from_file_location("mutation_run", Path(__file__).with_name("run.py"))
assert _SPEC is not None
run = sys.modules[_SPEC.name] = importlib.util.module_from_spec(_SPEC)
assert _SPEC.loader is not None
_SPEC.loader.exec_module(run)


@pytest.mark.parametrize("defect", run.defects(), ids=lambda defect: defect.breaks)
def test_a_defect_can_be_made(defect: "run.Defect") -> None:
    assert defect.why_not(ROOT) == "", "change defects.json as the code was changed"
    ast.parse((ROOT / defect.file).read_text(encoding="utf-8").replace(defect.old, defect.new))


def test_a_defect_whose_text_is_gone_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "one.py").write_text("a = 1\nb = 1\n", encoding="utf-8")
    gone, twice, once = (run.Defect("one.py", old, "2", "", ("tests",)) for old in ("3", "1", "a = 1"))
    assert "3' 0 times" in gone.why_not(tmp_path)
    assert "1' 2 times" in twice.why_not(tmp_path)
    assert once.why_not(tmp_path) == ""
    assert "two.py does not exist" in run.Defect("two.py", "", "", "", ()).why_not(tmp_path)
    assert str(run.tried(gone, tmp_path)["outcome"]).startswith("error: ")


def test_all_packages_are_broken() -> None:
    files = [defect.file for defect in run.defects()]
    assert len(files) >= 30
    assert {file.split("/")[0] for file in files} == {"hwprofiles", "planner", "executor", "ullage", "benchmarks"}
