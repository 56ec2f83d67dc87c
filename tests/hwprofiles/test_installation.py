"""Packages that are older than ``pyproject.toml`` states are refused in one line, before anything imports them."""

import importlib
from pathlib import Path

import pytest

import executor
from hwprofiles.installation import check_versions
from ullage.analysis.doctor import examine


@pytest.fixture(autouse=True)
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Ullage be installed with these requirements."""
    metadata = ["Requires-Dist: numpy>=1.26", 'Requires-Dist: torch[some,extras] <4,>=2.11; extra == "execute"']
    distribution(tmp_path, "ullage", "1.0", *metadata)
    monkeypatch.syspath_prepend(tmp_path)


def distribution(folder: Path, name: str, version: str, *metadata: str) -> None:
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *metadata]
    (info / "METADATA").write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.mark.parametrize("version", ["2.6.0", "2.9.1+cu128", "1.13", "2.10.0rc1", "2"])
def test_what_is_older_is_refused_with_its_remedy(version: str, tmp_path: Path) -> None:
    distribution(tmp_path, "torch", version)
    with pytest.raises(ImportError) as caught:
        importlib.reload(executor)
    words = f"torch {version} is older than 2.11, the oldest that Ullage was tried with; pip install 'torch>=2.11'"
    assert str(caught.value) == words


@pytest.mark.parametrize("version", ["2.11", "2.11.0+cu130", "2.13.0+cpu", "2.110", "3.0"])
def test_what_is_as_new_is_accepted(version: str, tmp_path: Path) -> None:
    distribution(tmp_path, "torch", version)
    check_versions(["torch"])


def test_what_is_missing_or_has_no_bound_is_accepted() -> None:
    check_versions(["no-such-package", "transformers"])


def test_the_doctor_names_it(tmp_path: Path) -> None:
    distribution(tmp_path, "torch", "2.6.0")
    failure = examine()["failure"]
    assert "torch 2.6.0 is older than 2.11" in failure["what"]
