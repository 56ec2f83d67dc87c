"""The compiled kernel in its file: loaded without numba, and never if it is damaged or of other code."""

import json
import shutil
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest

from benchmarks.simulator.reference import FluidTask, built
from planner.simulate import loaded
from planner.simulate.kernel import simulate

SYSTEM = built([FluidTask(0, 2.0), FluidTask(1, 3.0, after=(0,))])


@pytest.fixture
def kernel_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "kernel.o"
    monkeypatch.setattr(loaded, "kernel_paths", lambda: [tmp_path / "missing.o", path])
    code = bytes(range(256))
    path.write_bytes(json.dumps(["symbol", sha256(code).hexdigest()]).encode() + b"\n" + code)
    return path


def test_a_process_that_finds_the_file_loads_it_without_numba() -> None:
    assert simulate(SYSTEM)[1].max() == 5.0  # so that the file is there
    code = (
        "import sys; from planner.simulate.kernel import simulate\n"
        "from benchmarks.simulator.reference import FluidTask, built\n"
        "print(simulate(built([FluidTask(0, 2.0), FluidTask(1, 3.0, after=(0,))]))[1].max())\n"
        "print('numba' in sys.modules, 'llvmlite' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found.split() == ["5.0", "False", "True"]


def test_a_whole_file_is_read(kernel_file: Path) -> None:
    assert kernel_file.exists()
    assert loaded._read() == ("symbol", bytes(range(256)))


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data[:20],
        lambda _: b"",
        lambda data: data[:-5] + bytes([data[-5] ^ 1]) + data[-4:],
        lambda data: data.replace(b"[", b"{", 1),
    ],
)
def test_a_damaged_file_is_not_read(damage: object, kernel_file: Path) -> None:
    kernel_file.write_bytes(damage(kernel_file.read_bytes()))  # type: ignore[operator]
    assert loaded._read() is None


@pytest.mark.parametrize("source", loaded._SOURCES)
def test_changed_code_has_another_file(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = [path.name for path in loaded.kernel_paths()]
    for name in loaded._SOURCES:
        shutil.copy(loaded._HERE / name, tmp_path / name)
    monkeypatch.setattr(loaded, "_HERE", tmp_path)
    assert [path.name for path in loaded.kernel_paths()] == before
    with (tmp_path / source).open("a") as file:
        file.write("# changed\n")
    assert not set(before) & {path.name for path in loaded.kernel_paths()}
