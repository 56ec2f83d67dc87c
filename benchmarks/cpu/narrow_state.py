"""Time the CPU kernels of AdamW with narrow moments beside that with fp32 state, a plain copy, and ``bitsandbytes``.

    python benchmarks/cpu/narrow_state.py

As ``benchmarks/cpu/adamw.py``: all routes run in one process and take turns, ratios are medians of the rounds' ratios,
gradients and weights are bf16. With fp32 state an update moves 28 bytes a parameter, with bf16 moments 20, and with
8-bit ones 16. Where the master copy is bf16, and so the weight itself, it is 6 less. A ratio to the copy is that of
bytes per second.

Where two threads take half of one thread's time, arithmetic binds: ``core_s_per_param`` stays, although a core has less
bandwidth, and ``bytes_per_core_s`` is what it moves at most. More cores would help then, until memory binds. A division
and a square root are most of AdamW's own arithmetic. Encoding two moments in 8 bits takes longer than that, and a hash
for stochastic rounding less.

Numbers of parameters are 2^16 above a power of two. Without that, arrays of 2^26 values begin so far from each other
that their lines compete for the same banks of memory: updates then take far longer.

``bitsandbytes`` is its ``AdamW8bit`` on bf16 weights, which keeps no master copy and rounds to the nearest: it moves 8
bytes a parameter, in several passes. Left out where it is not installed.
"""

import argparse
import importlib.util
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.cpu.adamw import BYTES_PER_PARAM, COPIES, PARAMS, Route, copy_routes, our_route, set_threads, time_s
from benchmarks.origin import origin, write_result
from executor.optimizer import adamw, adamw_8bit
from executor.optimizer.adamw import AdamWParams
from executor.optimizer.workers import WorkerTeam
from planner.decisions import BF16

ROUNDED = " --precision master=bf16"
_LESS = 6  # bytes per parameter, where the master copy is bf16
_ABOVE = 2**16
GOALS = {"of_copy": 0.9, "over_wide": 1.0}
BITSANDBYTES = "bitsandbytes"
KERNELS: dict[str, tuple[Callable[..., object], Any, float, Callable[[int], list[Any]]]] = {
    "adamw-bf16": (
        adamw.adamw_step,
        AdamWParams(PARAMS.lr, seed=0),
        BF16.update_bytes_per_param("adamw-bf16"),
        lambda count: [np.zeros(count, np.uint16) for _ in range(2)],
    ),
    "adamw-8bit": (
        adamw_8bit.adamw_8bit_step,
        AdamWParams(PARAMS.lr, seed=0),
        BF16.update_bytes_per_param("adamw-8bit"),
        lambda count: [
            np.zeros(size, kind) for size, kind in ((count, np.uint8), (count // 256, np.float32)) for _ in "mv"
        ],
    ),
}
"""By optimizer: the step, its hyper-parameters, the bytes that it moves per parameter, and what makes its buffers."""


def narrow_route(name: str, num_params: int, team: WorkerTeam) -> Route:
    """Return a call that takes one step with narrow moments."""
    step, params, _, buffers = KERNELS[name.removesuffix(ROUNDED)]
    given = {"kernel": step, "params": params, "buffers": buffers(num_params), "rounds": name.endswith(ROUNDED)}
    return our_route(num_params, team, in_place=False, **given)


def bitsandbytes_route(num_params: int) -> Route:
    """Return a call that takes one step with the stock optimizer, on its CPU operators."""
    optim: Any = importlib.import_module("bitsandbytes.optim")
    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(num_params, generator=generator).bfloat16())
    weight.grad = torch.randn(num_params, generator=generator).bfloat16()
    run: Route = optim.AdamW8bit([weight], lr=PARAMS.lr).step
    return run


def measure(num_params: int, num_threads: int, num_repeats: int) -> list[dict[str, Any]]:
    """Time every route, in turns, and return medians and ratios of each kernel."""
    set_threads(num_threads)
    with WorkerTeam(num_threads) as team:
        names = [name + master for master in ("", ROUNDED) for name in KERNELS]
        routes = {name: narrow_route(name, num_params, team) for name in names}
        routes |= {"wide": our_route(num_params, team, in_place=False), **copy_routes(num_params, team)}
        if importlib.util.find_spec(BITSANDBYTES):
            routes[BITSANDBYTES] = bitsandbytes_route(num_params)
        rounds = [{name: time_s(run) for name, run in routes.items()} for _ in range(num_repeats + 1)]
    rounds = [r | {"copy": min(r[name] for name in COPIES)} for r in rounds[1:]]  # the first touches pages
    median_s = {name: statistics.median(r[name] for r in rounds) for name in rounds[0]}
    results = []
    for name in names:
        num_bytes = KERNELS[name.removesuffix(ROUNDED)][2] - _LESS * name.endswith(ROUNDED)
        of_copy = num_bytes / BYTES_PER_PARAM
        result = {
            "optimizer": name,
            "num_params": num_params,
            "num_threads": num_threads,
            "core_s_per_param": num_threads * median_s[name] / num_params,
            "bytes_per_core_s": num_bytes * num_params / median_s[name] / num_threads,
            "of_copy": statistics.median(of_copy * r["copy"] / r[name] for r in rounds),
            "wide_of_copy": statistics.median(r["copy"] / r["wide"] for r in rounds),
            "over_wide": statistics.median(r["wide"] / r[name] for r in rounds),
        }
        if BITSANDBYTES in routes and name.startswith("adamw-8bit"):
            result["over_bitsandbytes"] = statistics.median(r[BITSANDBYTES] / r[name] for r in rounds)
        results.append(result | {"median_s": {each: median_s[each] for each in (name, "wide", "copy")}})
    return results


def main() -> None:
    """Measure every size and thread count, print a table and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/cpu_narrow_state.json"))
    parser.add_argument("--log2-params", type=int, nargs="+", default=[24, 26])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    began = origin("numba", "numpy", "torch", BITSANDBYTES)
    results = []
    for log2_params in arguments.log2_params:
        for num_threads in arguments.threads:
            for found in measure(2**log2_params + _ABOVE, num_threads, arguments.repeats):
                results.append(found)
                ratios = ", ".join(
                    f"{name} {value:.2f}" for name, value in found.items() if "of_" in name or "over" in name
                )
                print(f"{found['optimizer']}, 2^{log2_params} parameters, {num_threads} threads: {ratios}", flush=True)
    goals = {f"{name} >= {goal}": all(r[name] >= goal for r in results) for name, goal in GOALS.items()}
    print(goals)
    write_result(
        arguments.output,
        {
            **began,
            "num_repeats": arguments.repeats,
            "goals": goals,
            "results": results,
        },
    )


if __name__ == "__main__":
    main()
