"""What a machine with a GPU and no network lacks, in one folder that git ignores: wheels, and plans made beforehand.

    python benchmarks/gpu/bundle.py                       into ``device``: fetch, check, try in an empty environment
    python benchmarks/gpu/bundle.py --check               what is there alone
    python benchmarks/gpu/bundle.py --profile h200x1-16c  plans for a device that was calibrated before
    python benchmarks/gpu/bundle.py --builder PYTHON      DeepSpeed's optimizer is compiled here, and not there

``device/ours`` has what Ullage, and the programs of others that are tried there, need beside what such machines have
(``environment.txt`` beside this file), and ``device/peers`` the engines that it is compared with. Every wheel has to
fit Python 3.12 on Linux, and all of it, together with the files that git knows, 60 MiB. ``benchmarks/gpu/run.py``
installs them there.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from benchmarks import prepared

ROOT: Final = Path(__file__).parents[2]
FOLDER: Final = ROOT / "device"
MOST_BYTES: Final = 60 << 20  # with the working tree
PYTHON: Final = (3, 12)
GLIBC: Final = (2, 39)
_OURS = ("pydantic", "pydantic_core", "annotated-types", "typing-inspection", "highspy")
_LIBRARIES = ("diffusers", "importlib_metadata", "zipp", "lazy-importer", "trl", "datasets", "dill", "multiprocess")
"""Whose programs are tried there, and what they need."""
_PEERS = ("torchao", "hjson")
_BUILT = ("deepspeed",)  # from source
_PLATFORMS = ("manylinux1", "manylinux2010", "manylinux2014", *(f"manylinux_2_{n}" for n in range(5, GLIBC[1] + 1)))
_ENVIRONMENT = Path(__file__).with_name("environment.txt")


def pinned(names: Iterable[str], *files: Path) -> list[str]:
    """Return requirements as files of requirements pin them, or as they are."""
    lines = [line.split("#")[0].strip() for file in files for line in file.read_text().splitlines()]
    known = {_normal(re.split(r"[=<>\[ ]", line)[0]): line for line in lines if line}
    return [known.get(_normal(name), name) for name in names]


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def fits(wheel: str) -> bool:
    """Return whether a wheel, by its name, can be installed on the device.

    The last three parts of the name are tags of Python, ABI and platform, each several joined by dots (PEP 425, 427).
    """
    pythons, abis, platforms = (part.split(".") for part in wheel.removesuffix(".whl").split("-")[-3:])
    minors = range(PYTHON[1] + 1)
    major = {"py3", f"py3{PYTHON[1]}", f"cp3{PYTHON[1]}"}
    stable = {f"cp3{minor}" for minor in minors}  # of an older version too, with the stable ABI
    fitting = {"any", *(f"{platform}_x86_64" for platform in ("linux", *_PLATFORMS))}
    return bool(fitting & set(platforms)) and (
        bool(major & set(pythons) and {"none", f"cp3{PYTHON[1]}"} & set(abis))
        or bool(stable & set(pythons) and "abi3" in abis)
    )


def problems(folder: Path, tree_bytes: int) -> list[str]:
    """Return why a bundle cannot be used."""
    wheels = sorted(folder.rglob("*.whl"))
    found = [f"{wheel.name} is not for Python 3.12 on Linux" for wheel in wheels if not fits(wheel.name)]
    for place, names in (("ours", (*_OURS, *_LIBRARIES)), ("peers", (*_PEERS, *_BUILT))):
        there = [_normal(wheel.name.split("-")[0]) for wheel in (folder / place).glob("*.whl")]
        counts = {name: there.count(_normal(name)) for name in names}
        found += [f"{place} has {count} wheels of {name}, not one" for name, count in counts.items() if count != 1]
    total_bytes = tree_bytes + sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    if total_bytes > MOST_BYTES:
        found.append(f"{total_bytes / 2**20:.1f} MiB with the working tree, more than {MOST_BYTES >> 20} MiB")
    return found


def tree_bytes() -> int:
    """Return the bytes of the files that git knows, or would."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout.decode().split("\0")
    return sum((ROOT / name).stat().st_size for name in names if name and (ROOT / name).is_file())


def _pip(*arguments: str | Path, python: Path | str = sys.executable, **environment: str) -> None:
    command = [str(python), "-m", "pip", *map(str, arguments), "--quiet", "--disable-pip-version-check"]
    subprocess.run(command, check=True, env=os.environ | environment)


def fetch(folder: Path, builder: str | None) -> None:
    """Fetch all wheels from the package index, or build them.

    Args:
        folder: for them.
        builder: Python 3.12 with the device's torch, by which DeepSpeed's optimizer for the host is compiled, with the
            instructions of this machine's processor; ``None``: the device's compiler does that, in minutes.
    """
    constraints, peers = ROOT / "constraints.txt", ROOT / "benchmarks" / "requirements-peers.txt"
    platforms = [f"--platform={name}_x86_64" for name in _PLATFORMS]
    wanted = ["--python-version=3.12", "--implementation=cp", "--only-binary=:all:", *platforms]
    for place, requirements in (("ours", pinned((*_OURS, *_LIBRARIES), constraints)), ("peers", pinned(_PEERS, peers))):
        shutil.rmtree(folder / place, ignore_errors=True)
        _pip("download", "--no-deps", "--dest", folder / place, *wanted, *requirements)
    # With what is installed here: its setup asks torch for its version.
    built: list[str | Path] = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder / "peers"]
    built += pinned(_BUILT, peers)
    if builder is None:
        _pip(*built, DS_BUILD_OPS="0")
        return
    compiler = Path(shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc").resolve()
    options = {"DS_ACCELERATOR": "cuda", "DS_BUILD_CPU_ADAM": "1", "DS_SKIP_CUDA_CHECK": "1"}
    _pip(*built, python=builder, CUDA_HOME=str(compiler.parents[1]), TORCH_CUDA_ARCH_LIST="9.0", **options)


def try_out(folder: Path, python: str) -> None:
    """Install the bundle where only the device's own packages are, and let the doctor look at it.

    torch is not among them, as it takes gigabytes: the doctor has to say so, and that nothing else is missing.

    Raises:
        ValueError: something else is missing.
    """
    with tempfile.TemporaryDirectory() as name:
        own, site = Path(name) / "bin" / "python", Path(name) / "site"
        subprocess.run([python, "-m", "venv", name], check=True)
        _pip("install", "--only-binary=:all:", "-r", _ENVIRONMENT, python=own)
        _pip("uninstall", "--yes", *_OURS, python=own)  # which some of them bring
        for place in ("ours", "peers"):
            wheels = sorted((folder / place).glob("*.whl"))
            _pip("install", "--no-index", "--no-deps", "--target", site / place, *wheels, python=own)
        code = "import json; from ullage.analysis.doctor import examine; print(json.dumps(examine()['missing']))"
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(site / "ours")])}
        done = subprocess.run([own, "-c", code], env=environment, check=False, capture_output=True, text=True)
        print(f"missing in an environment without torch: {done.stdout.strip() or done.stderr[-2000:]}")
        if done.returncode or not done.stdout.startswith('{"torch": "No module named \'torch\'"'):
            raise ValueError("the bundle does not do where it shall be used: see above what else is missing")


def main(arguments: Sequence[str] | None = None) -> int:
    """Make and check it; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER, metavar="DIR", help="(device)")
    parser.add_argument("--check", action="store_true", help="fetch and plan nothing")
    parser.add_argument("--no-plans", action="store_true", help="wheels alone: plans take minutes")
    parser.add_argument("--profile", metavar="NAME|PATH", help="of the device, for plans (h100)")
    parser.add_argument("--builder", metavar="PATH", help="Python 3.12 with the device's torch, to compile with")
    parser.add_argument("--python", default=shutil.which("python3.12"), metavar="PATH", help="3.12, to try it with")
    args = parser.parse_args(arguments)
    if not args.check:
        fetch(args.folder, args.builder)
        if not args.no_plans:
            shutil.rmtree(args.folder / "plans", ignore_errors=True)
            prepared.main([str(args.folder / "plans"), *(["--profile", args.profile] if args.profile else [])])
    found = problems(args.folder, tree_bytes())
    print(*found, sep="\n", end="\n" if found else "")
    if found:
        return 1
    # A name may be there without a program behind it, as pyenv's.
    if (
        args.python is None
        or subprocess.run([args.python, "-c", ""], check=False, stderr=subprocess.DEVNULL).returncode
    ):
        print("not tried: there is no python3.12; name one with --python")
    elif not args.check:
        try_out(args.folder, args.python)
    print(f"{args.folder} can travel: name it beside the working tree, and begin with benchmarks/gpu/run.sh")
    return 0


if __name__ == "__main__":
    sys.exit(main())
