"""Do programs train under a plan as they do in memory?

    python tests/programs/run_programs.py                                     all, on the CPU
    python tests/programs/run_programs.py loops dora                          a kind, and what has this in its name
    python tests/programs/run_programs.py --device cuda --jobs 8 --output gpu.json    on a GPU, eight at a time

Each program runs in memory, with all the memory there is, and with little more than the least that a plan needs. Where
words choose programs, nothing is written, unless ``--output`` says where. On a GPU a program makes its model and its
batches there, as its author would with ``torch.set_default_device``.
"""

import argparse
import contextlib
import dataclasses
import io
import math
import multiprocessing
import multiprocessing.connection
import os
import re
import signal
import sys
import time
import traceback
import unittest.mock
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import torch
import transformers
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))  # benchmarks

from program_catalogue import IN_MEMORY, KINDS, PLACE, Program, Trained, programs

import ullage
from benchmarks.origin import gpu_facts, origin, write_result
from executor.distributed.watchdog import RankError
from ullage.training import preparing

_ABOVE_LEAST: Final = 1.1
_LIMIT_S: Final = 120.0
"""Most that a program in a process of its own may take."""
_OWN_DEVICE: Final = ("trainers",)
"""Kinds whose programs move models and batches to the GPU by themselves."""
_OUTPUT: Final = Path(__file__).parents[2] / "benchmarks" / "results" / "programs.json"
_LEAST: Final = re.compile(r"larger device_memory='([\d.]+)([kMG])B'")
_UNITS: Final = {"k": 1e3, "M": 1e6, "G": 1e9}
_REFUSALS: Final = (ValueError, TypeError, NotImplementedError)


class Machine(NamedTuple):
    """What programs run on.

    Attributes:
        device: that they make their tensors on.
        hardware: a packaged profile that is planned for, so that plans are the same everywhere.
        too_little: bytes that no plan fits; on a GPU beside what libraries take.
        bound: most that a loss or weight may differ from that of training in memory, relative to the largest of its
            kind. On a GPU, norms that clip are added up in another order, and Adam divides small gradients by
            themselves.
    """

    device: str
    hardware: str
    too_little: int
    bound: float


CPU: Final = Machine("cpu", "epyc-turin-2c", 1000, 1e-4)
GPU: Final = Machine("cuda", "h200x1-16c", (1 << 30) + 1000, 2e-4)


@dataclasses.dataclass
class Outcome:
    """What came of a program.

    Attributes:
        seconds: of training, without what ``prepare`` takes.
        off: most that losses and weights differ from those in memory, relative to the largest.
        refused: the line that refused it.
        failed: an error that is no refusal, or came only in a later step.
        num_left: iterations that left the plan.
    """

    seconds: float = 0.0
    off: float | None = None
    refused: str = ""
    failed: str = ""
    num_left: int = 0


class Under:
    """Takes the place of the module ``ullage``: all programs plan for little memory, and sessions are closed."""

    def __init__(self, *, tight: bool, machine: Machine) -> None:
        self._tight, self._machine = tight, machine
        self.preparing_s = 0.0
        self.prepared: list[Any] = []

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Count the seconds of plans and of sessions that begin, whoever asks for them."""

        def counted(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **options: Any) -> Any:
                begin_s = time.perf_counter()
                try:
                    return function(*args, **options)
                finally:
                    self.preparing_s += time.perf_counter() - begin_s

            return call

        parts = {name: counted(getattr(preparing, name)) for name in ("plan_here", "prepare_planned")}
        with unittest.mock.patch.multiple(preparing, **parts):
            yield

    def prepare(self, model: nn.Module, optimizer: Any, *batch: Any, **options: Any) -> Any:
        """Prepare a model as :func:`ullage.prepare`."""
        found = ullage.prepare(model, optimizer, *batch, **options, **self._memory(model, optimizer, batch, options))
        self.prepared.append(found[1])
        return found

    def _memory(self, model: nn.Module, optimizer: Any, batch: Any, options: Any) -> dict[str, Any]:
        if not self._tight:
            return {"hardware": self._machine.hardware}
        try:
            given = {**options, "hardware": self._machine.hardware, "device_memory": self._machine.too_little}
            ullage.prepare(model, optimizer, *batch, **given)[1].session.close()
        except (ullage.InfeasibleError, RankError) as error:  # which the first rank has raised
            if (found := _LEAST.search(str(error))) is None:
                raise
            enough = math.ceil(float(found[1]) * _UNITS[found[2]] * _ABOVE_LEAST)
            return {"hardware": self._machine.hardware, "device_memory": enough}
        return {"hardware": self._machine.hardware}

    def offloaded(self, trainer: Any, **options: Any) -> Any:
        """Return a trainer class as :func:`ullage.offloaded`."""
        return ullage.offloaded(trainer, **options, hardware=self._machine.hardware)

    def close(self) -> None:
        """Close all sessions."""
        for optimizer in self.prepared:
            with contextlib.suppress(Exception):
                optimizer.session.close()


def trained(program: Program, module: Any) -> Trained:
    """Run a program."""
    transformers.set_seed(0)  # of Python, NumPy and PyTorch
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        losses, model = program.train(module)
    weights = model if isinstance(model, dict) else model.state_dict()
    real = {name: torch.view_as_real(w) if w.is_complex() else w for name, w in weights.items()}
    return losses, {name: weight.detach().cpu().float().clone() for name, weight in real.items()}


def outcome(program: Program, expected: Trained, *, tight: bool, machine: Machine = CPU) -> Outcome:
    """Run a program under a plan, and compare."""
    module, found = Under(tight=tight, machine=machine), Outcome()
    begin_s = time.perf_counter()
    try:
        with module.timed():
            losses, weights = trained(program, SimpleNamespace(prepare=module.prepare, offloaded=module.offloaded))
        found.seconds = time.perf_counter() - begin_s - module.preparing_s
        found.off = max(difference(expected[0], losses), _between(expected[1], weights))
        found.num_left = sum(optimizer.session.num_left for optimizer in module.prepared)
    except _REFUSALS as error:
        if module.prepared:
            found.failed = _line(error)
        else:
            found.refused = _line(error)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the result
        found.failed = f"{type(error).__name__}: {_line(error)}"
        if "-v" in sys.argv:
            traceback.print_exc()
    finally:
        module.close()
    return found


def on_ranks(_rank: int, _size: int, kind: str, name: str, expected: Trained) -> Outcome:
    """Run a program with little memory as one of several ranks, which have the same batches."""
    program = next(program for program in programs(kind) if program.name == name)
    return outcome(program, expected, tight=True)


def difference(expected: list[float], found: list[float]) -> float:
    """Return how far losses differ, relative to the largest."""
    if len(expected) != len(found):
        return math.inf
    most = max(map(abs, expected), default=1.0) or 1.0
    return max((abs(a - b) / most if math.isfinite(a - b) else math.inf for a, b in zip(expected, found, strict=True)))


def _between(expected: Any, found: Any) -> float:
    if expected.keys() != found.keys():
        return math.inf
    largest = 0.0
    for name, weight in expected.items():
        if weight.shape != found[name].shape:
            return math.inf
        if weight.numel():
            off = float((weight - found[name]).abs().max()) / max(float(weight.abs().max()), 1e-3)
            largest = max(largest, off if math.isfinite(off) else math.inf)
    return largest


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())


def row(program: Program, machine: Machine) -> dict[str, Any]:
    """Run a program in memory, with much memory and with little; return its row."""
    kept: dict[str, Any] = {"kind": program.kind, "name": program.name, "title": program.title}
    kept["lines_changed"] = program.lines_changed
    try:
        trained(program, IN_MEMORY)  # what is made once is made here
        begin_s = time.perf_counter()
        expected = trained(program, IN_MEMORY)
    except Exception as error:  # noqa: BLE001 - whatever it is, the program cannot be compared here
        return kept | {"absent": f"{type(error).__name__}: {_line(error)}"[:300]}
    plain_s = time.perf_counter() - begin_s
    for name, tight in (("ample", False), ("tight", True)):
        found = outcome(program, expected, tight=tight, machine=machine)
        kept[name] = {
            "off": found.off,
            "times_plain": found.seconds / plain_s if found.seconds else None,
            "left": found.num_left,
            "refused": found.refused,
            "failed": found.failed,
        }
    return kept


def verdict(found: dict[str, Any], bound: float) -> str:
    """Return what came of one run, in a word."""
    if found["failed"]:
        return "failed"
    if found["refused"]:
        return "refused"
    return "same" if found["off"] <= bound else "wrong"


def apart(chosen: Sequence[Program], machine: Machine, num_jobs: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of programs, each from a process of its own; all are forked by this thread, so many at a time."""
    context, waiting, rows = multiprocessing.get_context("fork"), list(chosen), dict[str, dict[str, Any]]()
    running: dict[multiprocessing.connection.Connection, tuple[Program, Any, float]] = {}
    for program in chosen:
        while program.id not in rows:
            while waiting and len(running) < num_jobs:
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_send_row, args=(theirs, waiting[0], machine))
                process.start()
                theirs.close()
                running[ours] = waiting.pop(0), process, time.monotonic() + _LIMIT_S
            ready = multiprocessing.connection.wait(running, 1.0)
            late = [pipe for pipe, (_, _, end_s) in running.items() if pipe not in ready and time.monotonic() > end_s]
            for pipe in [*ready, *late]:
                ended, process, _ = running.pop(pipe)
                try:
                    found = pipe.recv() if pipe in ready else {"absent": f"took more than {_LIMIT_S:.0f} s"}
                except EOFError:
                    process.join()
                    found = {"absent": f"its process ended with {process.exitcode}"}
                process.kill()
                process.join()
                rows[ended.id] = {"kind": ended.kind, "name": ended.name, "title": ended.title} | found
        yield rows[program.id]


def _send_row(pipe: multiprocessing.connection.Connection, program: Program, machine: Machine) -> None:
    with _made_on(machine.device, program):
        pipe.send(row(program, machine))


@contextlib.contextmanager
def _made_on(device: str, program: Program) -> Iterator[None]:
    """Let a program make its tensors on a device, whose kernels give the same sums each time where they can."""
    if device == "cpu":
        yield
        return
    torch.backends.cudnn.allow_tf32 = False
    torch.use_deterministic_algorithms(True, warn_only=True)
    PLACE.device = device
    with contextlib.nullcontext() if program.kind in _OWN_DEVICE else torch.device(device):
        yield


def _facts(pipe: multiprocessing.connection.Connection) -> None:
    pipe.send(gpu_facts())


def _gpu_facts() -> dict[str, Any]:
    """Return facts of the GPU, read by a process that nothing is forked from."""
    ours, theirs = multiprocessing.get_context("fork").Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_facts, args=(theirs,))
    process.start()
    theirs.close()
    found: dict[str, Any] = ours.recv()
    process.join()
    return found


def rows_of(chosen: Sequence[Program], machine: Machine, num_jobs: int | None) -> Iterator[dict[str, Any]]:
    """Yield the rows of programs, in order; with ``num_jobs``, so many run at a time, each in a process of its own."""
    if num_jobs:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_jobs))
        yield from apart(chosen, machine, num_jobs)
        return
    for program in chosen:
        with _made_on(machine.device, program):
            yield row(program, machine)


def chosen_of(words: Sequence[str]) -> tuple[list[Program], dict[str, str]]:
    """Return the programs that words name, and kinds whose libraries are not installed, with why."""
    named = [word for word in words if word not in KINDS]
    found: list[Program] = []
    absent: dict[str, str] = {}
    for kind in [kind for kind in KINDS if kind in words] or KINDS:
        try:
            found += [p for p in programs(kind) if not named or any(word in p.name for word in named)]
        except (ImportError, AttributeError) as error:
            absent[kind] = _line(error)
    return found, absent


def main() -> None:
    """Run all programs, or those that words name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="WORD", help="a kind of programs, or a part of a name (all)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="(cpu)")
    parser.add_argument("--hardware", metavar="NAME|PATH", help="profile that is planned for (a packaged one)")
    parser.add_argument("--jobs", type=int, metavar="N", help="programs at a time, each in a process of its own")
    parser.add_argument("--output", type=Path, metavar="PATH", help=f"result file ({_OUTPUT.name}, of all)")
    parser.add_argument("-v", action="store_true", help="print the tracebacks of what fails")
    args = parser.parse_args()
    about = origin("torch", "transformers", "diffusers", "trl", "peft", "accelerate", "sentence-transformers")
    machine = GPU if args.device == "cuda" else CPU
    if args.hardware:
        machine = machine._replace(hardware=args.hardware)
    if args.device == "cuda":
        # So that what is imported asks the driver alone for devices: CUDA could not be used in a fork.
        os.environ |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        about |= _gpu_facts()
    chosen, absent = chosen_of(args.words)
    sys.stdout.writelines(f"{kind}: {why}\n" for kind, why in absent.items())
    rows: list[dict[str, Any]] = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # whoever has no more time gets what there is
    try:
        for found in rows_of(chosen, machine, args.jobs):
            rows.append(found)
            said = found.get("absent") or ", ".join(
                f"{verdict(found[run], machine.bound)} {found[run]['off'] or 0:.0e}" for run in ("ample", "tight")
            )
            reasons = {found[run][why] for run in ("ample", "tight") if run in found for why in ("refused", "failed")}
            sys.stdout.write(f"{found['kind']}/{found['name']}: {said} {' | '.join(reasons - {''})}\n")
            sys.stdout.flush()
    finally:
        count = Counter(
            verdict(found[run], machine.bound) for found in rows for run in ("ample", "tight") if run in found
        )
        count["absent"] = sum("absent" in found for found in rows)
        sys.stdout.write(f"{dict(count)}\n")
        if args.output or not (args.words or len(rows) < len(chosen)):
            write_result(
                args.output or _OUTPUT, about | {"bound": machine.bound, "not_installed": absent, "rows": rows}
            )
    sys.exit(1 if count["wrong"] else 0)


if __name__ == "__main__":
    main()
