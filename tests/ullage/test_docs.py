"""The documents say what the program does, and their commands run."""

import importlib.util
import re
import shlex
import sys
from pathlib import Path

import pytest

from ullage.cli import build_parser, main
from ullage.commands import SUMMARIES

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
LINK = re.compile(r"\]\((?!https?://|#)([^)#]+)(?:#[^)]*)?\)")


def commands(page: Path, prompt: str = r"(?: {4}|\$ )") -> list[list[str]]:
    """Return the commands in the code blocks of a page, without the program's name."""
    lines = re.findall(rf"^{prompt}(ullage [^#|\n]*)", page.read_text(encoding="utf-8"), re.MULTILINE)
    return [shlex.split(line)[1:] for line in lines]


def test_the_reference_is_what_the_program_says(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("make_reference", ROOT / "docs" / "reference" / "make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "argv", ["make.py", "--check"])
    assert module.main() == 0, "run `python docs/reference/make.py`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_that_are_shown_are_commands(page: Path) -> None:
    for arguments in commands(page):
        assert arguments[0] in SUMMARIES, arguments
        build_parser(arguments[0]).parse_args(arguments)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_tutorials_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    shown = commands(page, r"\$ ")
    assert len(shown) > 2
    for arguments in shown:
        assert main(arguments) == 0, arguments
