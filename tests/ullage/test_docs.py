"""The documents say what the program does, and their commands run."""

import importlib.util
import re
import shlex
import sys
import tempfile
import types
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

import ullage
from ullage.commands import SUMMARIES, build_parser
from ullage.main import main

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
TRAINING = ROOT / "docs" / "training.md"
LINK = re.compile(r"\]\((?!https?://|#)([^)#]+)(?:#[^)]*)?\)")


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


def test_the_code_of_training_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    blocks = re.findall(r"^```python\n(.*?)^```", TRAINING.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) > 7
    page = types.ModuleType("training_page")
    monkeypatch.setitem(sys.modules, page.__name__, page)  # a captured model is imported where it is trained
    for block in blocks:
        exec(compile(block, str(TRAINING), "exec"), vars(page))  # noqa: S102


def test_what_training_says_is_refused_is_refused() -> None:
    """The section of what does not stay as it is; how the executor fails is tested with it."""
    text = TRAINING.read_text(encoding="utf-8")
    names: dict[str, Any] = {"__name__": "training_page"}
    exec(re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[0], names)  # noqa: S102
    x, labels = torch.randn(8, 16), torch.randint(4, (8,))

    def value(model: Any, _optimizer: Any) -> None:
        model(x, labels).backward()
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.1)

    def scaled(model: Any, optimizer: Any) -> None:
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(model(x, labels)).backward()
        scaler.step(optimizer)

    def between(model: Any, _optimizer: Any) -> None:
        model(x, labels).backward()
        model.state_dict()

    def loaded(model: Any, _optimizer: Any) -> None:
        model.load_state_dict(names["Net"]().state_dict())

    def without_backward(model: Any, _optimizer: Any) -> None:
        model(x, labels)
        model(x, labels)

    def without_step(model: Any, _optimizer: Any) -> None:
        model(x, labels).backward()
        model(x, labels)

    def layer_drop(model: Any, _optimizer: Any) -> None:
        del model.blocks[3]
        model(x, labels)

    def checkpointed(model: Any, _optimizer: Any) -> None:
        loss = model.last(torch.utils.checkpoint.checkpoint(model.blocks[0], model.first(x), use_reentrant=False))
        loss.sum().backward()

    said = {
        value: "only its 2-norm",
        scaled: "only its 2-norm",
        between: "after optimizer.step\\(\\) and before the next forward",
        loaded: "load them before prepare",
        without_backward: "Every forward needs its backward",
        without_step: "Every forward needs its backward",
        layer_drop: "same modules in the same order",
        checkpointed: "same modules in the same order",
    }
    for use, words in said.items():
        model = names["Net"]()
        model, optimizer = ullage.prepare(model, torch.optim.AdamW(model.parameters()), names["plan"])
        with pytest.raises((ValueError, RuntimeError), match=words), optimizer.session:
            use(model, optimizer)


def test_what_files_leave_out_has_a_default() -> None:
    """Files are written without fields that are null; those must be read again."""
    make = reference()
    roots = [root for _, _, roots in make.FILES.values() for root in roots]
    for model in make.reached([*roots, *make.PAGES]):
        for name, field in model.model_fields.items():
            assert not (field.is_required() and type(None) in get_args(field.annotation)), f"{model.__name__}.{name}"
