"""What keeps all code readable: the size of classes, files and folders. What grows beyond it is warned of.

A class in six shards that passes is worse than one that does not: split what can be understood apart.
"""

import ast
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST_METHODS, MOST_LINES, MOST_FILES = 40, 600, 15


def beyond(files: Sequence[Path]) -> Iterator[str]:
    """Yield what is large among files of a tree, in words."""
    of_code = {path.parent for path in files if path.suffix == ".py"}
    for folder, count in Counter(path.parent for path in files).items():
        if folder in of_code and count > MOST_FILES:
            yield f"{folder} has {count} files, more than {MOST_FILES}"
    for path in files:
        text = path.read_text("utf-8") if path.suffix == ".py" else ""
        if (count := len(text.splitlines())) > MOST_LINES:
            yield f"{path} has {count} lines, more than {MOST_LINES}"
        if text.count("def ") <= MOST_METHODS:
            continue  # parsing all takes seconds
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                count = sum(isinstance(one, ast.FunctionDef) for one in node.body)
                if count > MOST_METHODS:
                    yield f"{path}::{node.name} has {count} methods, more than {MOST_METHODS}"


def test_what_is_large_is_warned_of() -> None:
    files = [path for name in ("hwprofiles", "planner", "executor", "ullage") for path in (ROOT / name).rglob("*")]
    tests = (ROOT / "tests").rglob("*.py")
    found = [path for path in (*files, *tests) if path.is_file() and "__pycache__" not in path.parts]
    assert len(found) > 400
    for words in beyond(found):
        if "tests" not in words or "lines" in words:  # of tests, files alone
            warnings.warn(words, stacklevel=1)


def test_what_is_large_is_found(tmp_path: Path) -> None:
    method = "    def m{}(self): ...\n"
    (tmp_path / "a.py").write_text("class A:\n    x = 1\n" + "".join(map(method.format, range(MOST_METHODS + 1))))
    (tmp_path / "b.py").write_text("class B:\n" + "".join(map(method.format, range(MOST_METHODS))))
    (tmp_path / "c.py").write_text("\n" * (MOST_LINES + 1))
    (tmp_path / "d.py").write_text("\n" * MOST_LINES)
    names = [words.removeprefix(f"{tmp_path}/").split(" has ")[0] for words in beyond(sorted(tmp_path.iterdir()))]
    assert names == ["a.py::A", "c.py"]
    for number in range(MOST_FILES - 3):
        (tmp_path / f"{number}.json").touch()
    assert f"{tmp_path} has {MOST_FILES + 1} files, more than {MOST_FILES}" in beyond(sorted(tmp_path.iterdir()))
