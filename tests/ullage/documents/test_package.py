"""What is installed: the four packages with their data, and nothing else."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGES = ("hwprofiles", "planner", "executor", "ullage")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--directory", str(folder)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=300,
    )
    return folder


def tracked(*folders: str) -> set[str]:
    listed = subprocess.run(["git", "ls-files", *folders], cwd=ROOT, check=True, capture_output=True, text=True)
    return {name for name in listed.stdout.splitlines() if (ROOT / name).exists()}


def test_the_wheel_has_the_four_packages_whole_and_nothing_else(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert tracked(*PACKAGES) <= names
    assert {name.partition("/")[0] for name in names} == set(PACKAGES)
    assert {f"{package}/py.typed" for package in PACKAGES} <= names


def test_the_source_has_what_is_needed_to_build_and_test_it(built: Path) -> None:
    (source,) = built.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert tracked(*PACKAGES, "tests", "benchmarks", "examples", "docs") <= names
    assert {"README.md", "LICENSE", "Makefile", "constraints.txt", "pyproject.toml"} <= names
