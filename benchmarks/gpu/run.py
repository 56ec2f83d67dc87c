"""One GPU, ten minutes: a probe, tests on the device, calibration, peers beside ours, plans predicted and measured.

    bash benchmarks/gpu/run.sh                                       what pays most, in that order
    bash benchmarks/gpu/run.sh doctor tests calibrate --budget 200   does anything work?
    bash benchmarks/gpu/run.sh more checkpoints                      a second call, with the profile of the first
    bash benchmarks/gpu/run.sh peers --with peers '--models llama-2-13b --cells small'

Results go to ``out/gpu``, which git ignores, and stay there for the next call. Where ``$OUT`` is set,
``results.tar.gz`` with all of them goes there after every stage, and the few files that say most: at most eight.

Each stage has a limit, and leaves later ones what they are guaranteed. One that fails, or takes longer (code 124),
does not stop the others; then the exit code is 1. It leaves ``stages/NAME.json``: exit code, seconds, limit, clocks and
power of the GPU (which are read, never set), memory of the host, and the end of its output. ``logs`` has all of it.

``make device-bundle`` puts what such a machine lacks into ``device``: wheels and plans. Wheels are installed into
``out/site``. Nothing is downloaded. This program needs Python's standard library alone; stages are forked from one
process that has imported torch, transformers and Ullage while the probe ran.
"""

import argparse
import contextlib
import io
import json
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn

from benchmarks.forks import END_S, Process, Server, started
from benchmarks.peers.build import compiled

ROOT: Final = Path(__file__).parents[2]
BUDGET_S: Final = 580.0
MOST_FILES: Final = 8
MOST_BYTES: Final = 15 << 20  # of one file that comes back
TOO_LONG: Final = 124
_LEAST_S = 5.0  # a stage with less is not begun
_SPARE_S = 10.0  # for the last archive
_TAIL = 30  # lines
# Beside the archive, what says most.
FILES: Final = ("stages.json", "doctor.json", "probe.jsonl", "profile.json", "agreement.json", "peers.json")
assert len(FILES) < MOST_FILES  # and the archive


class Stage(NamedTuple):
    """One command of Python.

    Attributes:
        arguments: of Python; ``{results}``, ``{profile}``, ``{memory}``, ``{host}`` (the same, as calibration takes it)
            and ``{budget}`` (seconds that it may plan with) are filled in, and dropped where there is nothing to
            fill in with.
        limit_s: most seconds that it may take.
        least_s: what stages before it leave of the budget for it.
        makes: files that it writes, which are removed before; the first is its answer on stdout, if ``prints``.
        prints: whether its answer goes to stdout.
        alone: whether nothing else may run meanwhile (DeepSpeed's extension is built beside the others).
        forked: whether it waits for the server, to be forked from it.
    """

    arguments: str
    limit_s: float
    least_s: float = 0.0
    makes: tuple[str, ...] = ()
    prints: bool = False
    alone: bool = False
    forked: bool = True


_AGREEMENT = "benchmarks/gpu/agreement.py --profile {profile} --budget {budget} --output {results}"
_PEERS = "benchmarks/gpu/peers.py --profile {profile} --budget {budget} --output {results}"
_CALIBRATE = "-m ullage calibrate --quick {host} --output {results}"
STAGES: Final[Mapping[str, Stage]] = {
    "probe": Stage(
        "benchmarks/gpu/probe.py --output {results}/probe.jsonl --budget 130",  # its longest step takes 50 s
        180,
        60,
        ("probe.jsonl", "probe.touch.txt"),
        forked=False,  # it begins while the server imports
    ),
    "doctor": Stage("-m ullage doctor --json", 30, 5, ("doctor.json",), prints=True),
    "tests": Stage(
        "-m pytest -vv --durations=0 -p no:cacheprovider --rootdir . --junitxml {results}/tests.xml "
        "tests/executor/devices/test_fused.py tests/executor/devices/test_narrow.py "
        "tests/executor/devices/test_cuda.py tests/executor/memory/test_parking.py::test_on_a_gpu "
        "tests/executor/distributed/test_ring_attention.py tests/executor/module/test_float8_casts.py::test_on_a_gpu",
        180,  # kernels of Triton are compiled for a minute
        30,
        ("tests.xml",),
    ),
    "calibrate": Stage(f"{_CALIBRATE}/profile.json", 90, 60, ("profile.json",), alone=True),
    # Where peers have to be beaten: the model that every peer's state fits the host with.
    "peers": Stage(
        f"{_PEERS}/peers.json --models llama-3.2-3b --cells large --rows ours in-memory zero-3-offload "
        "--tries 3 --rounds 1 --limit 60",
        190,
        110,
        ("peers.json",),
        alone=True,
    ),
    "agreement": Stage(
        f"{_AGREEMENT}/agreement.json --only mixed planned '8B in 12 GiB' fetched",
        200,
        60,
        ("agreement.json",),
        alone=True,
    ),
    # Where training in memory has to be matched.
    "tokens": Stage(
        f"{_PEERS}/peers_64k.json --models llama-3.2-3b --cells tokens-64k --rows ours in-memory --tries 1 --rounds 1 "
        "--limit 60",
        90,
        40,
        ("peers_64k.json",),
        alone=True,
    ),
    "compiled": Stage(
        f"{_AGREEMENT}/agreement_compiled.json --only compiled", 70, 30, ("agreement_compiled.json",), alone=True
    ),
    # Of a second call: the next larger model, and what is left.
    "larger": Stage(
        f"{_PEERS}/peers_7b.json --models llama-2-7b --cells large --rows ours in-memory zero-3-offload --tries 1 "
        "--rounds 1 --limit 90",
        200,
        60,
        ("peers_7b.json",),
        alone=True,
    ),
    "more": Stage(
        f"{_AGREEMENT}/agreement_more.json --only 'planned, 8B' resident 'host updates' "
        "streamed 'activations on the host' accumulated",
        400,
        60,
        ("agreement_more.json",),
        alone=True,
    ),
    "all-peers": Stage(f"{_PEERS}/peers_all.json --limit 150", 560, 60, ("peers_all.json",), alone=True),
    "checkpoints": Stage(
        "benchmarks/gpu/checkpoints.py --profile {profile} --rounds 1 --output {results}/checkpoints.json",
        200,
        30,
        ("checkpoints.json",),
        alone=True,
    ),
    "updates": Stage(
        "benchmarks/gpu/updates.py --output {results}/updates.json", 60, 30, ("updates.json",), alone=True
    ),
    # Programs of other libraries, in memory and under plans.
    "programs": Stage(
        "tests/programs/run_programs.py --device cuda --jobs 12 --output {results}/programs.json",
        500,
        60,
        ("programs.json",),
        alone=True,
    ),
    # A second time, for its spread (benchmarks/calibration.py --read).
    "again": Stage(f"{_CALIBRATE}/profile_again.json", 90, 30, ("profile_again.json",), alone=True),
}
DEFAULT: Final = ("probe", "doctor", "tests", "calibrate", "peers", "agreement", "tokens", "compiled")


def limits_s(stages: Sequence[Stage], left_s: float) -> Iterator[float]:
    """Yield the limit of each stage, if all before it took theirs.

    Each is the stage's own, or less where the budget has less, after what all later ones are guaranteed.
    """
    for number, stage in enumerate(stages):
        limit_s = min(stage.limit_s, left_s - sum(later.least_s for later in stages[number + 1 :]))
        yield limit_s
        left_s -= max(limit_s, 0.0)


# --- what is read beside the stages -----------------------------------------------------------------------------------
_MEMORY = ("MemTotal", "MemAvailable", "AnonHugePages", "Mlocked", "PageTables")


def memory_bytes() -> dict[str, int]:
    """Return what Linux tells of the host's memory."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return {name: int(lines[name].split()[0]) * 1024 for name in _MEMORY if name in lines}


class Watch:
    """Clocks and power of the first GPU, five times a second, beside everything. They are read, never set.

    Args:
        path: of a file of comma-separated values; each line begins with the time.
    """

    COLUMNS: Final = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu", "clocks_event_reasons.active")

    def __init__(self, path: Path) -> None:
        self._path = path
        query = f"--query-gpu=timestamp,{','.join(self.COLUMNS)}"
        command = ["nvidia-smi", "--id=0", query, "--format=csv,noheader,nounits", "-lms", "200"]
        self._child: subprocess.Popen[bytes] | None = None
        if shutil.which(command[0]):  # there is a driver
            with path.open("w") as file:
                self._child = subprocess.Popen(command, stdout=file, stderr=subprocess.DEVNULL)

    def now(self) -> int:
        """Return a place in the file, for :meth:`since`."""
        return self._path.stat().st_size if self._path.exists() else 0

    def since(self, place: int) -> dict[str, Any]:
        """Return clocks and power since a place: the first, the median and the last of each."""
        if not self._path.exists():
            return {}
        lines = self._path.read_bytes()[place:].decode(errors="replace").splitlines()
        rows = [[word.strip() for word in line.split(",")][1:] for line in lines]
        rows = [row for row in rows if len(row) == len(self.COLUMNS)]
        found: dict[str, Any] = {}
        for column, words in zip(self.COLUMNS[:-1], zip(*(row[:-1] for row in rows), strict=True), strict=False):
            if values := [float(word) for word in words if word.replace(".", "", 1).isdigit()]:
                found[column] = [values[0], statistics.median(values), values[-1]]
        return found | ({"clocks_event_reasons": sorted({row[-1] for row in rows})} if rows else {})

    def close(self) -> None:
        """End it."""
        if self._child is not None:
            self._child.terminate()
            self._child.wait()


# --- results ----------------------------------------------------------------------------------------------------------
class Results:
    """The folder of results, and what of it comes back.

    Args:
        folder: of results; made if need be.
        back: the folder that comes back; ``None``: there is none.
    """

    def __init__(self, folder: Path, back: Path | None) -> None:
        self.folder, self._back = folder.absolute(), back
        for name in ("stages", "logs"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)

    def write(self, name: str, values: Mapping[str, Any]) -> None:
        """Write a JSON file whole."""
        part = self.folder / f"{name}.part"
        part.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
        part.replace(self.folder / name)

    def bring_back(self) -> None:
        """Write the archive, and the few files beside it, each whole."""
        if self._back is None:
            return
        self._back.mkdir(parents=True, exist_ok=True)
        self._whole("results.tar.gz", self._archive())
        for name in FILES:
            path = self.folder / name
            if path.exists() and path.stat().st_size <= MOST_BYTES:
                self._whole(name, path.read_bytes())
            else:  # of an earlier call, and made again in vain
                (self._back / name).unlink(missing_ok=True)

    def _whole(self, name: str, content: bytes) -> None:
        assert self._back is not None
        part = self._back / f"{name}.part"
        part.write_bytes(content)
        part.replace(self._back / name)

    def _archive(self) -> bytes:
        """Return all results in one file. If that is too large, the largest of them are left out, and named."""
        contents: dict[str, bytes] = {}
        for path in sorted(self.folder.rglob("*")):
            if path.is_file() and path.suffix != ".part":
                with contextlib.suppress(OSError):  # a stage's own, of the moment
                    contents[str(path.relative_to(self.folder))] = path.read_bytes()
        left_out: list[str] = []
        while True:
            packed = _packed(contents | ({"left_out.json": json.dumps(left_out).encode()} if left_out else {}))
            if len(packed) <= MOST_BYTES or not contents:
                return packed
            left_out.append(max(contents, key=lambda name: len(contents[name])))
            del contents[left_out[-1]]


def _packed(contents: Mapping[str, bytes]) -> bytes:
    """Return an archive. Contents are read before: a file that grows meanwhile would make an archive that is broken."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=6) as archive:
        for name, content in contents.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mtime = len(content), int(time.time())
            archive.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


# --- running ----------------------------------------------------------------------------------------------------------
class Run:
    """All stages of one call.

    Args:
        args: of the command line.
        results: where they go.
    """

    def __init__(self, args: argparse.Namespace, results: Results) -> None:
        self._args, self._results = args, results
        self._end_s = time.monotonic() + args.budget - _SPARE_S
        self._site = ROOT / "out" / "site"
        self._watch = Watch(results.folder / "clocks.csv")
        # The server reads how memory is allocated as it imports torch, for all that are forked from it.
        self._environment = dict(os.environ) | {"PYTHONUNBUFFERED": "1", "THP_MEM_ALLOC_ENABLE": "1"}
        for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
            self._environment.setdefault(name, "expandable_segments:True")
        self._environment.pop("OUT", None)  # no stage's own
        self._told: dict[str, dict[str, Any]] = {}
        self._beside: dict[str, Process] = {}  # what runs beside the stages
        self._server: Server | None = None

    @property
    def _left_s(self) -> float:
        return float(self._end_s - time.monotonic())

    def __call__(self, names: Sequence[str]) -> int:
        """Run stages; return the exit code."""
        for name in ("install", *names):
            (self._results.folder / "stages" / f"{name}.json").unlink(missing_ok=True)
        try:
            self._install()
            if any(STAGES[name].forked for name in names) and not self._args.no_server:
                self._server = Server(self._environment, self._results.folder / "logs" / "server.txt")
            if any(name.endswith("peers") for name in names):
                self._build()
            for number, name in enumerate(names):
                stages = [STAGES[later] for later in names[number:]]
                self._stage(name, next(limits_s(stages, self._left_s)))
        finally:
            for process in self._beside.values():
                process.end()
            if self._server is not None:
                self._server.close()
            self._watch.close()
            self._results.bring_back()
        return int(any(told["code"] != 0 for told in self._told.values()))

    def _install(self) -> None:
        """Install the bundle's wheels, unless an earlier call has. Peers' go apart: only their processes shall pay."""
        bundle = self._args.bundle
        folders = {name: self._site / name for name in ("ours", "peers") if list((bundle / name).glob("*.whl"))}
        begin_s, log = time.monotonic(), self._results.folder / "logs" / "install.txt"
        code = 0
        for name, folder in folders.items():
            wheels = sorted(map(str, (bundle / name).glob("*.whl")))
            marker = folder / "wheels.txt"
            listed = "\n".join(Path(wheel).name for wheel in wheels)
            if not marker.exists() or marker.read_text() != listed:
                shutil.rmtree(folder, ignore_errors=True)
                command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile"]
                command += ["--target", str(folder), *wheels]
                with log.open("a") as file:
                    done = subprocess.run(command, check=False, stdout=file, stderr=file)
                if not done.returncode:
                    marker.write_text(listed)
                code = code or done.returncode
        if folders:
            self._tell("install", code, time.monotonic() - begin_s, self._args.budget, log)
        places = [str(ROOT), *([str(folders["ours"])] if "ours" in folders else [])]
        self._environment["PYTHONPATH"] = os.pathsep.join(
            [*places, *filter(None, [self._environment.get("PYTHONPATH")])]
        )
        if "peers" in folders:
            self._environment["ULLAGE_PEERS"] = str(folders["peers"])
        if (plans := bundle / "plans").is_dir():
            self._environment["ULLAGE_PREPARED"] = str(plans.absolute())

    def _build(self) -> None:
        """Begin to build DeepSpeed's optimizer, beside the stages that only the GPU is busy in."""
        peers = self._environment.get("ULLAGE_PEERS")
        if peers and (Path(peers) / "deepspeed").is_dir() and not compiled(Path(peers)):
            command = ["nice", "-n", "19", sys.executable, "-m", "benchmarks.peers.build"]  # of no haste
            self._beside["build"] = started(command, self._environment, self._results.folder / "logs" / "build.txt")

    def _stage(self, name: str, limit_s: float) -> None:
        """Run a stage within its limit, and tell how it ended."""
        stage, log = STAGES[name], self._results.folder / "logs" / f"{name}.txt"
        begin_s, place, before = time.monotonic(), self._watch.now(), memory_bytes()
        for made in stage.makes:
            (self._results.folder / made).unlink(missing_ok=True)
        code: int | None = None
        if limit_s < _LEAST_S:
            log.write_text("not run, no time was left\n")
        else:
            if stage.forked and self._server is not None and not self._server.ready(limit_s / 4):
                # So this is a new interpreter.
                print((self._results.folder / "logs" / "server.txt").read_text(errors="replace"), end="")
            if stage.alone:
                self._pause_others(limit_s / 2 if "peers.py" in stage.arguments else 0.0)
            limit_s -= time.monotonic() - begin_s
            answer = self._results.folder / stage.makes[0] if stage.prints else None
            process = started(self._command(name, limit_s), self._environment, log, answer)
            self._beside[name] = process
            code = process.wait(limit_s)
            if code is None:
                code = TOO_LONG
                process.end(2 * END_S)  # it ends its own
            del self._beside[name]
            for other in self._beside.values():
                other.pause(paused=False)
        told = self._watch.since(place)
        self._tell(
            name, code, time.monotonic() - begin_s, limit_s, log, gpu=told, memory_bytes=[before, memory_bytes()]
        )

    def _command(self, name: str, limit_s: float) -> list[str]:
        memory = f"--host-memory={self._args.host_memory}" if self._args.host_memory else ""
        host = f"--memory=host={self._args.host_memory}" if self._args.host_memory else ""
        filled = {"results": str(self._results.folder), "memory": memory, "host": host}
        filled["budget"] = f"{max(limit_s - END_S, 1):.0f}"
        arguments: list[str] = []
        for part in shlex.split(STAGES[name].arguments):
            filled["profile"] = self._profile() if part == "{profile}" else ""
            arguments.append(part.format(**filled))
        if name == "probe":
            arguments += [f"--beside={process.pid}" for process in self._beside.values()]
        for stage, options in self._args.options:
            arguments += shlex.split(options) if stage == name else []
        return [sys.executable, *filter(None, arguments)]

    def _profile(self) -> str:
        """Return this machine's profile; where calibration has left none, a packaged one with its memory and cores."""
        found = self._results.folder / "profile.json"
        if not found.exists():
            found = self._results.folder / "stand_in.json"
            memory = [f"--host-memory={self._args.host_memory}"] if self._args.host_memory else []
            command = [sys.executable, "benchmarks/gpu/stand_in.py", self._args.profile, str(found), *memory]
            log = self._results.folder / "logs" / "stand_in.txt"
            process = started(command, self._environment, log)
            if process.wait(max(self._left_s, 1.0)) != 0:
                process.end()
        return str(found)

    def _pause_others(self, limit_s: float) -> None:
        """Wait so long for what runs beside the stages; then end it, or if it is not needed yet, let it pause."""
        end_s = time.monotonic() + limit_s
        for name, process in list(self._beside.items()):
            if process.wait(max(end_s - time.monotonic(), 0.0)) is None:
                if not limit_s:
                    process.pause()
                    continue
                process.end()  # the stage does it itself
            del self._beside[name]

    def _tell(self, name: str, code: int | None, seconds: float, limit_s: float, log: Path, **more: Any) -> None:
        """Write how a stage ended, print the end of its output, and bring all back."""
        tail = log.read_text(errors="replace").splitlines()[-_TAIL:] if log.exists() else []
        told = {"stage": name, "code": code, "wall_s": round(seconds, 1), "limit_s": round(limit_s, 1), **more}
        self._told[name] = told
        self._results.write(f"stages/{name}.json", told | {"output_tail": tail})
        self._results.write("stages.json", self._told)
        print("\n".join(tail))
        print(f"{name}: code {code} after {seconds:.0f} s of {limit_s:.0f} s; {self._left_s:.0f} s left", flush=True)
        self._results.bring_back()


def main() -> NoReturn:
    """Run the stages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"of {', '.join(STAGES)} ({' '.join(DEFAULT)})")
    parser.add_argument("--budget", type=float, default=BUDGET_S, metavar="SECONDS", help="for all (580)")
    parser.add_argument("--results", type=Path, default=ROOT / "out" / "gpu", metavar="DIR", help="(out/gpu)")
    parser.add_argument("--bundle", type=Path, default=ROOT / "device", metavar="DIR", help="of wheels (device)")
    parser.add_argument("--profile", default="h100", metavar="NAME", help="planned for before calibration (h100)")
    parser.add_argument("--host-memory", metavar="SIZE", help="of the host that plans may use (what is free now)")
    parser.add_argument(
        "--with",
        dest="options",
        nargs=2,
        action="append",
        default=[],
        metavar=("STAGE", "OPTIONS"),
        help="more options of a stage's command",
    )
    parser.add_argument("--no-server", action="store_true", help="an interpreter for each stage, in place of a fork")
    args = parser.parse_args()
    names = args.stages or list(DEFAULT)
    if unknown := [name for name in (*names, *(stage for stage, _ in args.options)) if name not in STAGES]:
        parser.error(f"there is no stage {unknown[0]!r}; choose of {', '.join(STAGES)}")
    back = os.environ.get("OUT")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that results come back
    sys.exit(Run(args, Results(args.results, Path(back) if back else None))(names))


if __name__ == "__main__":
    main()
