"""Walls that keep all code readable: of classes, of files and of folders. Split what comes up against one."""

import ast
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PRODUCT = [
    path for name in ("hwprofiles", "planner", "executor", "ullage") for path in sorted((ROOT / name).rglob("*"))
]
MODULES = [path for path in PRODUCT if path.suffix == ".py"]
TESTS = sorted((ROOT / "tests").rglob("*.py"))
MOST_METHODS, MOST_LINES, MOST_FILES = 40, 600, 15


def methods(source: str) -> dict[str, int]:
    """Return the number of methods and properties of each class."""
    classes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef))
    return {each.name: sum(isinstance(one, ast.FunctionDef) for one in each.body) for each in classes}


@pytest.mark.parametrize("package", ["hwprofiles", "planner", "executor", "ullage"])
def test_no_class_and_no_file_is_long(package: str) -> None:
    files = {path: path.read_text("utf-8") for path in MODULES if path.is_relative_to(ROOT / package)}
    assert files
    assert {path: n for path, text in files.items() if (n := len(text.splitlines())) > MOST_LINES} == {}
    assert {
        f"{path}::{name}": n for path, text in files.items() for name, n in methods(text).items() if n > MOST_METHODS
    } == {}


def test_no_file_of_tests_is_long() -> None:
    assert {path: n for path in TESTS if (n := len(path.read_text("utf-8").splitlines())) > MOST_LINES} == {}


def test_no_folder_with_code_is_full() -> None:
    of_code = {path.parent for path in MODULES}
    files = Counter(path.parent for path in PRODUCT if path.parent in of_code and path.is_file())
    assert {folder: n for folder, n in files.items() if n > MOST_FILES} == {}


def test_methods_are_counted() -> None:
    assert methods("class A:\n    x = 1\n    def a(self): ...\n    @property\n    def b(self): ...\n") == {"A": 2}
