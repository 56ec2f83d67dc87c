"""The documents say what the program does, and their commands run."""

import ast
import functools
import importlib.util
import re
import runpy
import shlex
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

import ullage
from hwprofiles.registry import save_profile
from ullage.analysis.runs import load_run
from ullage.commands import SUMMARIES, build_parser
from ullage.main import main

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
TRAINING = [
    ROOT / "docs" / "howto" / name for name in ("train.md", "restrictions.md", "weights.md", "data.md")
]  # one goes on from the other
ALONE = [[ROOT / "docs" / "howto" / name] for name in ("models.md", "adapters.md", "fp8.md")]
SOURCE_LINK = re.compile(r"\[`([^`]+)`\]\(((?:\.\./)+[^)]+\.py)\)")
LINK = re.compile(r"\]\((?!https?://|#)([^)#]+)(?:#[^)]*)?\)")


def test_the_run_that_pages_show_can_be_read() -> None:
    """So a new field of plans is left out of files where it has its default: its default is ``None``."""
    assert load_run(ROOT / "benchmarks" / "results" / "demo_run.json").plan.content_digest


def shown(page: Path) -> str:
    return str(page.relative_to(ROOT))


def commands(page: Path, prompt: str = r"(?: {4}|\$ )") -> list[list[str]]:
    """Return the commands in the code blocks of a page, without the program's name."""
    lines = re.findall(rf"^{prompt}(ullage [^#|\n]*)", page.read_text(encoding="utf-8"), re.MULTILINE)
    return [shlex.split(line)[1:] for line in lines]


def reference() -> Any:
    spec = importlib.util.spec_from_file_location("make_reference", ROOT / "docs" / "reference" / "make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_is_what_the_program_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["make.py", "--check"])
    assert reference().main() == 0, "run `python docs/reference/make.py`"


@pytest.mark.parametrize("page", PAGES, ids=shown)
def test_commands_that_are_shown_are_commands(page: Path) -> None:
    for arguments in commands(page):
        assert arguments[0] in SUMMARIES, arguments
        build_parser(arguments[0]).parse_args(arguments)


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted((ROOT / "docs" / "howto").glob("*.md"))], ids=shown)
def test_commands_in_tables_are_commands(page: Path) -> None:
    rows = re.findall(r"^\|.*\|$", page.read_text(encoding="utf-8"), re.MULTILINE)
    for command in (command for row in rows for command in re.findall(r"`ullage ([^`]*)`", row)):
        arguments = shlex.split(command)
        assert arguments[0] in SUMMARIES, arguments
        build_parser(arguments[0]).parse_args(arguments)


@pytest.mark.parametrize("page", PAGES, ids=shown)
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


@pytest.mark.part(2)
@pytest.mark.parametrize("page", TUTORIALS, ids=shown)
def test_tutorials_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    run = commands(page, r"\$ ")
    assert len(run) > 2
    for arguments in run:
        if arguments[0] == "calibrate":  # half a minute, and tested with the command: a packaged profile stands in
            save_profile(ullage.load_profile("epyc-turin-2c"), Path(arguments[arguments.index("--output") + 1]))
        else:
            assert main(arguments) == 0, arguments


def blocks_of(*pages: Path) -> list[str]:
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("pages", [TRAINING, *ALONE], ids=lambda pages: pages[0].stem)
def test_the_code_of_pages_runs(pages: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    blocks = blocks_of(*pages)
    assert len(blocks) > (7 if len(pages) > 1 else 0)
    page = types.ModuleType("page")
    monkeypatch.setitem(sys.modules, page.__name__, page)  # a captured model is imported where it is trained
    for block in blocks:
        exec(compile(block, "docs/howto", "exec"), vars(page))  # noqa: S102


def test_all_code_of_pages_is_run_or_a_session() -> None:
    run = {*TRAINING, *(page for pages in ALONE for page in pages)}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert not re.search(r"^```py\n", text, re.MULTILINE), page
        sessions = [block.startswith(">>> ") for block in blocks_of(page)]
        assert page in run or page.name == "README.md" or all(sessions), page


def imported(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


@pytest.mark.parametrize("page", [*PAGES, *sorted((ROOT / "examples").glob("*.py"))], ids=shown)
def test_pages_and_examples_import_only_what_is_public(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    blocks = [text] if page.suffix == ".py" else re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    blocks = [
        re.sub(r"^(?!>>> |\.\.\. ).*\n|^(>>>|\.\.\.) ", "", text, flags=re.MULTILINE) if ">>>" in text else text
        for text in blocks
    ]
    names = [name for block in blocks for name in imported(block)]
    ours = {"hwprofiles", "planner", "executor", "ullage"}
    assert {name for name in names if name.partition(".")[0] in ours} <= {"ullage", "ullage.integrations.lightning"}


def defined(module: ast.Module | ast.ClassDef) -> dict[str, ast.AST]:
    """Return what a module or a class defines, by name."""
    found: dict[str, ast.AST] = {}
    for node in module.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id: node for target in targets if isinstance(target, ast.Name)}
    return found


def exists(reference: str) -> bool:
    """Return whether ``package/module.py::name`` (or ``::Class.name``) is in the tree."""
    path, _, names = reference.partition("::")
    if not (ROOT / path).exists():
        return False
    node: Any = ast.parse((ROOT / path).read_text(encoding="utf-8")) if names else None
    for name in names.split(".") if names else ():
        node = defined(node).get(name) if hasattr(node, "body") else None
        if node is None:
            return False
    return True


@pytest.mark.parametrize("page", PAGES, ids=shown)
def test_code_that_pages_name_exists(page: Path) -> None:
    named = re.findall(
        r"`((?:hwprofiles|planner|executor|ullage|benchmarks|tests|examples)/[^`\s]*)`",
        page.read_text(encoding="utf-8"),
    )
    assert [reference for reference in named if "*" not in reference and not exists(reference)] == []
    assert page.parent.name != "architecture" or len([reference for reference in named if "::" in reference]) > 3


@pytest.mark.parametrize("page", PAGES, ids=shown)
def test_notes_that_pages_cite_are_in_the_code(page: Path) -> None:
    cited = {" ".join(title.split()) for title in re.findall(r"\[Note:\s([^\]]+)\]", page.read_text(encoding="utf-8"))}
    assert cited - notes() - {"Title"} == set()


@functools.cache
def notes() -> frozenset[str]:
    sources = (
        path
        for name in ("hwprofiles", "planner", "executor", "ullage", "tests")
        for path in (ROOT / name).rglob("*.py")
    )
    text = "\n".join(path.read_text(encoding="utf-8") for path in sources if path.name != "test_docs.py")
    return frozenset(
        " ".join(title.split()) for title in re.findall(r"^\s*(?:\S*\s*)?\[Note:\s([^\]]+)\]", text, re.MULTILINE)
    )


def test_contributors_questions_are_three_clicks_away() -> None:
    """From the README to the questions, to an answer, and to the source, in a checkout and on the site alike."""
    heading = "Where do I change something?"
    assert f"(docs/architecture/index.md#{slug(heading)})" in (ROOT / "README.md").read_text(encoding="utf-8")
    page = (ROOT / "docs" / "architecture" / "index.md").read_text(encoding="utf-8")
    contents, *sections = page.split(f"## {heading}\n")[1].partition("\n## ")[0].split("\n### ")
    answers = dict(section.split("\n", 1) for section in sections)
    assert re.findall(r"^- \[(.*)\]\((.*)\)$", contents, re.MULTILINE) == [(q, f"#{slug(q)}") for q in answers]
    assert len(answers) == 6
    links = {question: set(SOURCE_LINK.findall(answer)) for question, answer in answers.items()}
    assert all(links.values()), links
    for reference, target in set().union(*links.values()):
        assert exists(reference)
        assert target == f"../../{reference.partition('::')[0]}"


def test_links_to_source_lead_to_copies_on_the_site() -> None:
    hooks = runpy.run_path(str(ROOT / "docs" / "site_hooks.py"))
    page = types.SimpleNamespace(file=types.SimpleNamespace(src_uri="architecture/index.md"))
    shown = hooks["on_page_markdown"]((ROOT / "docs" / "architecture" / "index.md").read_text(encoding="utf-8"), page)
    assert "](../source/planner/optimizers.py.txt)" in shown
    assert "](../../planner" not in shown


def slug(heading: str) -> str:
    """Return the anchor of a heading; only words, single spaces and hyphens have the same one in every renderer."""
    words = re.sub(r"[^\w -]", "", heading.lower())
    assert words == words.strip()
    return words.replace(" ", "-")


def test_pages_of_the_site_are_in_its_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    listed = re.findall(r"[\w/.-]+\.md", navigation)
    assert sorted(listed) == sorted(str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md"))


def test_public_names_are_on_the_page_of_the_api() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^::: ullage\.(\w+)$", page, re.MULTILINE)) == sorted(ullage.__all__)


def test_what_training_says_is_refused_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page of what changes; how the executor fails is tested with it."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "training_page"}
    exec("\n".join(blocks_of(*TRAINING)[:3]), names)  # noqa: S102
    names["session"].close()
    x, labels = names["x"], names["labels"]

    def late(model: Any, optimizer: Any) -> None:
        model(x, labels).backward()
        gradient = next(model.parameters()).grad
        optimizer.step()
        gradient.add_(1)

    def loaded(model: Any, _optimizer: Any) -> None:
        model.load_state_dict(names["Net"]().state_dict(), assign=True)

    said = {late: "used after optimizer.step", loaded: "load them before prepare"}
    for use, words in said.items():
        model, optimizer = ullage.prepare(*names["make"](), names["plan"])
        with pytest.raises((ValueError, RuntimeError), match=words), optimizer.session:
            use(model, optimizer)


def test_what_files_leave_out_has_a_default() -> None:
    """Files are written without fields that are null; those must be read again."""
    make = reference()
    roots = [root for _, _, roots in make.FILES.values() for root in roots]
    for model in make.reached([*roots, *make.PAGES]):
        for name, field in make.fields_of(model).items():
            assert not (field.is_required() and type(None) in get_args(field.annotation)), f"{model.__name__}.{name}"


def test_figures_of_the_documents_can_be_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest of them is drawn, by the script that draws all."""
    script = runpy.run_path(str(ROOT / "docs" / "figures.py"))
    monkeypatch.setitem(script["draw_limits"].__globals__, "HERE", tmp_path)
    script["draw_limits"]("longest", "tokens", (5e3, 1e7))
    assert (tmp_path / "longest.svg").stat().st_size > 10_000
