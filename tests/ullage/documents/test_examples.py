"""The recipes run as they are, in processes of their own: the loss falls, and what was saved is what was trained."""

import importlib.util
import platform
import re
from pathlib import Path

import forked
import pytest
from forked import Forked, completed, environments

from hwprofiles.machine import this_machine
from hwprofiles.registry import load_profile, save_profile

EXAMPLES = Path(__file__).parents[3] / "examples"
PAGE = Path(__file__).parents[3] / "docs" / "howto" / "recipes.md"
OF_RANKS = "two_ranks"
NEEDS = {"diffusion_lora": "diffusers", "embeddings": "sentence_transformers", "lightning_module": "lightning"}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine has a profile, so that no recipe measures it."""
    monkeypatch.setenv("ULLAGE_HOME", str(tmp_path / "home"))
    profile = load_profile("epyc-turin-2c").model_copy(update={"name": "mine", "measured_on": this_machine()})
    save_profile(profile, tmp_path / "home" / f"{platform.node()}.json")


def check(out: str) -> None:
    losses = [float(found) for found in re.findall(r"^loss (\S+)$", out, re.MULTILINE)]
    assert len(losses) > 10
    assert sum(losses[-3:]) < 0.95 * sum(losses[:3])
    assert re.search(r"^same (tokens|classes|loss): True$", out, re.MULTILINE), out[-500:]
    assert "of mine: " in out  # the plan


@pytest.mark.part(4)
@pytest.mark.parametrize(
    "script", sorted(path for path in EXAMPLES.glob("*.py") if path.stem != OF_RANKS), ids=lambda path: path.stem
)
def test_a_recipe_works(script: Path, tmp_path: Path) -> None:
    if (needed := NEEDS.get(script.stem)) and importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    done = completed(forked.script, str(script), cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    check(done.stdout)


def test_two_ranks_work(tmp_path: Path) -> None:
    script = str(EXAMPLES / f"{OF_RANKS}.py")
    first, second = [Forked(forked.script, script, env=each, cwd=tmp_path) for each in environments(2)]
    out, err = first.communicate()
    assert first.returncode == 0, err[-2000:]
    assert second.communicate()[0] == ""
    check(out)


def test_every_recipe_is_on_the_page() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(re.findall(r"`examples/(\w+\.py)`", text))
