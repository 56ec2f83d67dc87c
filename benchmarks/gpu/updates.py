"""Optimizer steps on a GPU: one kernel each, beside chains of torch's operators, in turns.

    python benchmarks/gpu/updates.py --output updates.json              64 million parameters of each form
    python benchmarks/gpu/updates.py --num-params 65536 --rounds 1      does it run?

*Bytes* are those that an update has to move per parameter: gradient and state in, state and weight out. *GB/s* are
these over the time, so for a chain, which moves several times as many, they are those that count. The first call of
each, which compiles, is timed apart, by the host. *same* says whether both left the same bits: without narrow moments
the chain is torch's own fused AdamW, which computes in float64.
"""

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch

from benchmarks.origin import origin, write_result
from executor.devices import cuda
from executor.memory.pieces import as_state, state_buffers, state_tensors
from executor.optimizer.table import ENTRIES, Rule
from planner.decisions import BF16, Precision
from planner.optimizers import OPTIMIZERS, Optimizer

OUTPUT: Final = Path(__file__).parents[2] / "out" / "gpu" / "updates.json"
MASTERS: Final[dict[str, tuple[Precision, bool]]] = {
    "": (BF16, False),
    " split": (BF16, True),
    " rounded": (Precision(weights="bf16", master="bf16"), False),
}


class Update:
    """Steps of one form; both ways take the same steps, each over state of its own.

    Args:
        optimizer: which one.
        precision: with the type of the master copy.
        num_params: of one gradient.
        splits: whether the master copy is split.
    """

    def __init__(self, optimizer: Optimizer, precision: Precision, num_params: int, *, splits: bool) -> None:
        entry = next(entry for entry in ENTRIES if entry.planned_as == optimizer)
        make: Any = entry.torch_class
        options = {"bf16_stochastic_round": True} if precision.rounds else {}
        parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16 if precision.rounds else torch.float32))
        self._rule: Rule = dataclasses.replace(entry.rule(make([parameter], **options).param_groups[0]), scale=0.5)
        self._precision, self._num_params, self._optimizer = precision, num_params, optimizer
        self._splits = splits
        self._gradient = torch.randn(num_params, device="cuda", generator=self._generator()).bfloat16()
        self.num_bytes = precision.update_bytes_per_param(optimizer, splits=splits)

    @staticmethod
    def _generator() -> torch.Generator:
        return torch.Generator("cuda").manual_seed(0)

    def state(self) -> list[Any]:
        """Return new state: random masters, moments of 0, and where weights go."""
        splits, master_bytes = self._splits, self._precision.master_bytes
        buffers = state_buffers(self._optimizer, master_bytes, splits=splits)
        num_bytes = sum(buffer.num_bytes(self._num_params) for buffer in buffers)
        memory = torch.zeros(num_bytes, dtype=torch.uint8, device="cuda")
        tensors = state_tensors(memory, self._num_params, buffers)
        state = list(as_state(tensors, splits=splits))
        state[0].copy_(torch.randn(self._num_params, device="cuda", generator=self._generator()))
        if not (splits or self._precision.rounds):
            state.append(torch.zeros_like(self._gradient))
        return state

    def call(self, *, fuses: bool) -> tuple[Callable[[], None], list[Any]]:
        """Return a call that takes the next step, and the state that it changes."""
        state, step, found = self.state(), 0, cuda.fused() if fuses else None

        def call() -> None:
            nonlocal step
            step += 1
            with mock.patch.object(cuda, "fused", lambda: found):
                cuda.update_on_device(state, [self._gradient], self._rule, step)

        return call, state


def seconds(call: Callable[[], None], count: int) -> float:
    """Return seconds of a call between two events on the current stream, mean of so many."""
    make: Callable[..., torch.cuda.Event] = torch.cuda.Event
    start, end = make(enable_timing=True), make(enable_timing=True)
    start.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    milliseconds: float = start.elapsed_time(end)
    return milliseconds / 1e3 / count


def first_seconds(call: Callable[[], None]) -> float:
    """Return the host's seconds of a first call."""
    begin_s = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - begin_s


def measure(update: Update, num_params: int, num_rounds: int) -> dict[str, Any]:
    """Return what both ways take for one form."""
    ways = {name: update.call(fuses=name == "kernel") for name in ("chain", "kernel")}
    first_s = {name: first_seconds(call) for name, (call, _) in ways.items()}
    states = [[value for part in state for value in _tensors(part)] for _, state in ways.values()]
    same = all(torch.equal(mine, theirs) for mine, theirs in zip(*states, strict=True))
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(num_rounds):
        for name, (call, _) in ways.items():
            times[name].append(seconds(call, 3 if name == "chain" else 10))
    row: dict[str, Any] = {"bytes_per_param": update.num_bytes, "same": same}
    for name, found in times.items():
        median_s = statistics.median(found)
        row[name] = {
            "first_call_s": first_s[name],
            "seconds": found,
            "params_per_s": num_params / median_s,
            "gb_per_s": update.num_bytes * num_params / median_s / 1e9,
        }
    row["speed_up"] = statistics.median(a / b for a, b in zip(times["chain"], times["kernel"], strict=True))
    return row


def _tensors(part: Any) -> tuple[torch.Tensor, ...]:
    return (part,) if isinstance(part, torch.Tensor) else part.of_blocks()


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-params", type=int, default=1 << 26, metavar="N", help="of each update (64 million)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="of chain and kernel in turns (5)")
    parser.add_argument("--output", type=Path, default=OUTPUT, metavar="PATH", help="result file")
    args = parser.parse_args()
    began = origin("torch", "triton", gpu=True)
    if cuda.fused() is None:
        sys.exit("Triton is not installed, or cannot run here")
    rows: dict[str, Any] = {}
    for optimizer, row in OPTIMIZERS.items():
        for suffix, (precision, splits) in MASTERS.items():
            if row.fuses and (row.rounded or not precision.rounds):
                name, update = optimizer + suffix, Update(optimizer, precision, args.num_params, splits=splits)
                rows[name] = found = measure(update, args.num_params, args.rounds)
                rates = ", ".join(f"{way} {found[way]['gb_per_s']:.0f} GB/s" for way in ("chain", "kernel"))
                print(f"{name}: {rates}, {found['speed_up']:.1f} times as fast, same bits: {found['same']}", flush=True)
    write_result(args.output, {**began, "num_params": args.num_params, "num_rounds": args.rounds, "rows": rows})


if __name__ == "__main__":
    main()
