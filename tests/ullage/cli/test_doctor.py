"""What ``ullage doctor`` tells of a machine, with a real process in place of NVIDIA's tool."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ullage.analysis.doctor import failure_of, gpus_of
from ullage.main import main

SMI = "NVIDIA H200, 580.95.05, 143771, 143000, 1, 5, {width}, 16"


def tool(folder: Path, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script = folder / "nvidia-smi"
    script.write_text(f"#!/bin/sh\n{code}\n", encoding="utf-8")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def test_a_machine_without_a_gpu_is_named_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tool(tmp_path, "exit 9", monkeypatch)
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["gpus"] == []
    assert found["failure"] is None
    assert found["num_cores"] >= 1
    assert 0 < found["available_memory_bytes"] <= found["memory_bytes"]
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "none (nvidia-smi is missing" in shown
    assert len(shown.splitlines()) < 24


def test_gpus_are_those_of_the_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool(tmp_path, f"echo '{SMI.format(width=16)}'; echo 'Old GPU, 580.95.05, [N/A], 5, 1, 4, [N/A], 16'", monkeypatch)
    first, second = gpus_of()
    assert first["name"] == "NVIDIA H200"
    assert first["free_bytes"] == 143000 << 20
    assert (first["pcie_generation"], first["pcie_generation_max"]) == (1, 5)
    assert second["memory_bytes"] is None
    assert second["pcie_width"] is None


def test_a_gpu_that_torch_cannot_use_fails_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tool(tmp_path, f"echo '{SMI.format(width=16)}'", monkeypatch)
    assert main(["doctor", "--json"]) == 1
    failure = json.loads(capsys.readouterr().out)["failure"]
    assert "torch" in failure["what"]
    assert failure["remedy"]


@pytest.mark.parametrize(("width", "fails"), [(8, True), (16, False)])
def test_a_narrow_link_fails(width: int, fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool(tmp_path, f"echo '{SMI.format(width=width)}'", monkeypatch)
    found = {"missing": {}, "gpus": gpus_of(), "num_usable_gpus": 1}
    failure = failure_of(found)
    assert (failure is not None) == fails
    assert failure is None or "x8 of x16" in failure["what"]


def test_a_package_that_cannot_be_imported_is_the_first_failure(tmp_path: Path) -> None:
    (tmp_path / "highspy.py").write_text("raise ImportError('libhighs.so is not there')", encoding="utf-8")
    (tmp_path / "pydantic.py").write_text("raise ImportError('of another Python')", encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-m", "ullage", "doctor"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    words = " ".join(done.stdout.split())
    assert "packages cannot be used: highspy (libhighs.so is not there); pydantic (of another Python)" in words
    assert "pip install" in words
