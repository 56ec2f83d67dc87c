"""Do programs train under a plan as they do in memory? ``python tests/programs/run_programs.py``.

Each program runs in memory, with all the memory there is, and with little more than the least that a plan needs. Words
after the command choose programs by kind or name; then nothing is written.
"""

import contextlib
import dataclasses
import io
import math
import re
import sys
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))  # benchmarks

from program_catalogue import IN_MEMORY, KINDS, Program, Trained, programs

import ullage
from benchmarks.origin import origin, write_result

BOUND: Final = 1e-4
"""Most that a loss or weight may differ from that of training in memory, relative to the largest of its kind."""

_HARDWARE: Final = "epyc-turin-2c"  # plans are the same everywhere
_ABOVE_LEAST: Final = 1.1
_OUTPUT: Final = Path(__file__).parents[2] / "benchmarks" / "results" / "programs.json"
_LEAST: Final = re.compile(r"larger device_memory='([\d.]+)([kMG])B'")
_UNITS: Final = {"k": 1e3, "M": 1e6, "G": 1e9}
_REFUSALS: Final = (ValueError, TypeError, NotImplementedError)


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

    def __init__(self, *, tight: bool) -> None:
        self._tight = tight
        self.preparing_s = 0.0
        self.prepared: list[Any] = []

    def prepare(self, model: nn.Module, optimizer: Any, *batch: Any, **options: Any) -> Any:
        """Prepare a model as :func:`ullage.prepare`."""
        begin_s = time.perf_counter()
        try:
            found = ullage.prepare(
                model, optimizer, *batch, **options, **self._memory(model, optimizer, batch, options)
            )
        finally:
            self.preparing_s += time.perf_counter() - begin_s
        self.prepared.append(found[1])
        return found

    def _memory(self, model: nn.Module, optimizer: Any, batch: Any, options: Any) -> dict[str, Any]:
        if not self._tight:
            return {"hardware": _HARDWARE}
        try:
            given = {**options, "hardware": _HARDWARE, "device_memory": 1000}
            ullage.prepare(model, optimizer, *batch, **given)[1].session.close()
        except ullage.InfeasibleError as error:
            if (found := _LEAST.search(str(error))) is None:
                raise
            enough = math.ceil(float(found[1]) * _UNITS[found[2]] * _ABOVE_LEAST)
            return {"hardware": _HARDWARE, "device_memory": enough}
        return {"hardware": _HARDWARE}

    def offloaded(self, trainer: Any, **options: Any) -> Any:
        """Return a trainer class as :func:`ullage.offloaded`."""
        return ullage.offloaded(trainer, **options, hardware=_HARDWARE)

    def close(self) -> None:
        """Close all sessions."""
        for optimizer in self.prepared:
            with contextlib.suppress(Exception):
                optimizer.session.close()


def trained(program: Program, module: Any) -> Trained:
    """Run a program."""
    torch.manual_seed(0)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        losses, model = program.train(module)
    weights = model if isinstance(model, dict) else model.state_dict()
    return losses, {name: weight.detach().float().clone() for name, weight in weights.items()}


def outcome(program: Program, expected: Trained, *, tight: bool) -> Outcome:
    """Run a program under a plan, and compare."""
    module, found = Under(tight=tight), Outcome()
    begin_s = time.perf_counter()
    try:
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


def row(program: Program) -> dict[str, Any]:
    """Run a program in memory, with much memory and with little; return its row."""
    trained(program, IN_MEMORY)  # what is made once is made here
    begin_s = time.perf_counter()
    expected = trained(program, IN_MEMORY)
    plain_s = time.perf_counter() - begin_s
    ample, tight = (outcome(program, expected, tight=tight) for tight in (False, True))
    kept = {"kind": program.kind, "name": program.name, "title": program.title, "lines_changed": program.lines_changed}
    for name, found in (("ample", ample), ("tight", tight)):
        kept[name] = {
            "off": found.off,
            "times_plain": found.seconds / plain_s if found.seconds else None,
            "left": found.num_left,
            "refused": found.refused,
            "failed": found.failed,
        }
    return kept


def verdict(found: dict[str, Any]) -> str:
    """Return what came of one run, in a word."""
    if found["failed"]:
        return "failed"
    if found["refused"]:
        return "refused"
    return "same" if found["off"] <= BOUND else "wrong"


def main() -> None:
    """Run all programs, or those that words name."""
    words = [word for word in sys.argv[1:] if not word.startswith("-")]
    about = origin("torch", "transformers", "diffusers", "trl", "peft", "accelerate", "sentence-transformers")
    named = [word for word in words if word not in KINDS]
    rows = []
    for program in programs(*(kind for kind in KINDS if kind in words)):
        if named and not any(word in program.name for word in named):
            continue
        rows.append(row(program))
        shown = [f"{verdict(rows[-1][run])} {rows[-1][run]['off'] or 0:.0e}" for run in ("ample", "tight")]
        reasons = {rows[-1][run][why] for run in ("ample", "tight") for why in ("refused", "failed")} - {""}
        sys.stdout.write(f"{program.kind}/{program.name}: {', '.join(shown)} {' | '.join(reasons)}\n")
        sys.stdout.flush()
    count = Counter(verdict(found[run]) for found in rows for run in ("ample", "tight"))
    sys.stdout.write(f"{dict(count)}\n")
    if not words:
        write_result(_OUTPUT, about | {"bound": BOUND, "rows": rows})
    sys.exit(1 if count["wrong"] else 0)


if __name__ == "__main__":
    main()
