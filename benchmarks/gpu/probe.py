"""The first minutes on a GPU: facts that decide everything else, a line of JSON each, written as soon as it is known.

    python benchmarks/gpu/probe.py --output probe.jsonl --budget 150
    python benchmarks/gpu/probe.py --output probe.jsonl --tiny           every step, nothing large

Needs torch and transformers, and no part of Ullage. What fails leaves a line with its error, and the next step begins.
The order is by value, with one exception: the host's memory is touched in the background of steps that only the GPU is
busy in, since some machines' memory grows as it is used. Nothing is set, neither clocks nor power: all is only read.
"""

import argparse
import contextlib
import ctypes
import importlib
import json
import mmap
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

_PACKAGES: Final = (
    *("torch", "transformers", "triton", "numba", "llvmlite", "numpy", "scipy", "rich", "safetensors", "xxhash"),
    *("pydantic", "highspy", "deepspeed", "torchao", "hypothesis", "pytest", "ninja", "psutil"),
)
_QUERY: Final = (
    "name,driver_version,memory.total,memory.used,clocks.sm,clocks.max.sm,clocks.mem,power.draw,power.limit,"
    "temperature.gpu,pcie.link.gen.current,pcie.link.gen.max,pcie.link.width.current,ecc.mode.current,"
    "persistence_mode,compute_mode"
)
_MEMORY: Final = ("MemTotal", "MemAvailable", "AnonHugePages", "Mlocked", "ShmemHugePages", "PageTables")
_GIB: Final = 1 << 30
_TOUCHED_BYTES: Final = 112 * _GIB
_TOUCHING_S: Final = 90.0  # most that later steps wait for it


class Log:
    """Lines of JSON, each in the file before the next thing is tried.

    Args:
        path: of the file, which is added to.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._begin_s = time.perf_counter()
        path.parent.mkdir(parents=True, exist_ok=True)

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.perf_counter() - self._begin_s

    def tell(self, step: str, **values: Any) -> None:
        """Write and print a line."""
        line = json.dumps({"at_s": round(self.seconds, 2), "step": step, **values}, default=str)
        with self.path.open("a") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())
        print(line[:600], flush=True)


def memory_kb() -> dict[str, int]:
    """Return what Linux tells of the host's memory."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return {name: int(lines[name].split()[0]) for name in _MEMORY if name in lines}


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError as error:
        return f"({error.strerror})"


def _ran(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=15, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"({error})"
    return (done.stdout + done.stderr).strip()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def facts(log: Log) -> None:
    """Tell what the system and the driver know."""
    log.tell("memory at start", kb=memory_kb())
    pages = {n: _read(f"/sys/kernel/mm/transparent_hugepage/{n}") for n in ("enabled", "defrag", "shmem_enabled")}
    log.tell("huge pages", **pages, num_numa_nodes=len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))))
    log.tell(
        "cpu",
        lscpu=_ran("lscpu")[:3000],
        num_cores=os.cpu_count(),
        affinity=len(os.sched_getaffinity(0)),
        cpu_max=_read("/sys/fs/cgroup/cpu.max"),
        memory_max=_read("/sys/fs/cgroup/memory.max"),
        kernel=platform.release(),
    )
    tools = {name: shutil.which(name) for name in ("nvcc", "c++", "ninja")}
    log.tell("places", df=_ran("df", "-h", "/", "/tmp", "/dev/shm", "."), user=os.getuid(), **tools)  # noqa: S108
    log.tell("gpu", csv=_ran("nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv"))
    log.tell("packages", python=platform.python_version(), **{name: _version(name) for name in _PACKAGES})


def touch(num_bytes: int) -> None:
    """Touch memory in steps of at most 1 GiB; print GiB, seconds of the step, and what the system has then, in KiB."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # if memory runs out, this is what is killed
    blocks, step_bytes = [], min(_GIB, num_bytes)
    for at in range(0, num_bytes, step_bytes):
        begin_s = time.perf_counter()
        block = mmap.mmap(-1, step_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):
            block.madvise(mmap.MADV_HUGEPAGE)
        ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(block)), 1, step_bytes)
        blocks.append(block)
        found = memory_kb()
        seconds = round(time.perf_counter() - begin_s, 3)
        print((at + step_bytes) / _GIB, seconds, found["MemTotal"], found["MemAvailable"], flush=True)


class Beside:
    """What runs beside the steps of the GPU, and has ended before those of the host begin.

    Args:
        log: of the probe.
        pids: other processes to wait for.
    """

    def __init__(self, log: Log, pids: Sequence[int]) -> None:
        self._log, self._pids = log, pids
        self._lines = log.path.with_suffix(".touch.txt")
        self._child: subprocess.Popen[bytes] | None = None

    def begin(self, num_bytes: int) -> None:
        """Begin to touch memory: how far does it grow, and how fast?"""
        with self._lines.open("w") as file:
            command = [sys.executable, __file__, "--touch", str(num_bytes)]
            self._child = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)

    def wait(self) -> None:
        """Wait for all, and tell how far memory was touched."""
        end_s = time.monotonic() + _TOUCHING_S
        if self._child is not None:
            try:
                code: int | str = self._child.wait(_TOUCHING_S)
            except subprocess.TimeoutExpired:
                self._child.kill()
                code = f"too slow, killed: {self._child.wait()}"
            lines = self._lines.read_text().splitlines()
            self._log.tell("touched memory", code=code, gib_s_total_available_kb=lines[:1] + lines[4::8] + lines[-1:])
            self._log.tell("memory after touching", kb=memory_kb())
        while time.monotonic() < end_s and any(Path(f"/proc/{pid}").exists() for pid in self._pids):
            time.sleep(0.1)


def main() -> None:
    """Take all steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("probe.jsonl"), metavar="PATH", help="added to")
    parser.add_argument("--budget", type=float, default=150.0, metavar="SECONDS", help="no step begins later (150)")
    parser.add_argument("--tiny", action="store_true", help="nothing large: does it run?")
    parser.add_argument("--only", nargs="+", metavar="STEP", help="these steps alone")
    parser.add_argument(
        "--beside", type=int, action="append", default=[], metavar="PID", help="may run until the host's"
    )
    parser.add_argument("--touch", type=int, metavar="BYTES", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.touch:
        touch(args.touch)
        return
    log = Log(args.output)
    beside = Beside(log, args.beside)
    probe: Any = None

    def imports() -> None:
        nonlocal probe
        times = {}
        for name in ("torch", "transformers.models.llama.modeling_llama"):
            begin_s = time.perf_counter()
            importlib.import_module(name)
            times[name.partition(".")[0]] = round(time.perf_counter() - begin_s, 2)
        sys.path.insert(0, str(Path(__file__).parent))
        probe = importlib.import_module("device_steps").DeviceProbe(log, tiny=args.tiny)
        log.tell("imports", seconds=times)

    def step(name: str) -> Callable[[], None]:
        return lambda: None if probe is None else getattr(probe, name)()

    steps: dict[str, Callable[[], None]] = {
        "facts": lambda: facts(log),
        "touch": lambda: beside.begin(_GIB >> 5 if args.tiny else _TOUCHED_BYTES),
        "imports": imports,
        **{name: step(name) for name in ("context", "attention", "products")},
        "wait": beside.wait,
        **{name: step(name) for name in ("pinning", "link", "host_update", "layer", "elementwise")},
    }
    for name, call in steps.items():
        if args.only and name not in {*args.only, "imports"}:
            continue
        begin_s = log.seconds
        if begin_s > args.budget:
            log.tell(name, skipped="no time was left")
            continue
        try:
            call()
        except Exception as error:  # noqa: BLE001 - a line, and the next step
            log.tell(name, error=f"{type(error).__name__}: {error}"[:500])
        log.tell("end of step", name=name, seconds=round(log.seconds - begin_s, 2))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
