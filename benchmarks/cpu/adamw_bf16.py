"""Time the CPU kernel of AdamW with bf16 moments beside that with fp32 state, and beside a plain copy.

    python benchmarks/cpu/adamw_bf16.py

As ``benchmarks/cpu/adamw.py``: all routes run in one process and take turns, ratios are medians of the rounds' ratios,
gradients and weights are bf16. The kernel moves 20 bytes a parameter instead of 28, and hashes the position of each for
its random bits. A ratio to the copy is that of bytes per second.
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.cpu.adamw import COPIES, Route, copy_routes, our_route, set_threads, time_s
from benchmarks.origin import origin, write_result
from executor.optimizer import BYTES_PER_PARAM, WorkerTeam
from executor.optimizer.adamw_bf16 import BYTES_PER_PARAM as NARROW_BYTES_PER_PARAM
from executor.optimizer.adamw_bf16 import AdamWBf16Params, adamw_bf16_step

GOALS = {"narrow_of_copy": 0.9, "narrow_over_wide": 1.0}
PARAMS = AdamWBf16Params(lr=1e-4)


def narrow_route(num_params: int, team: WorkerTeam) -> Route:
    """Return a call that takes one step with bf16 moments."""
    rng = np.random.default_rng(0)
    master = rng.standard_normal(num_params, np.float32)
    exp_avg, exp_avg_sq, weight = np.zeros((3, num_params), np.uint16)
    grad = torch.from_numpy(rng.standard_normal(num_params, np.float32)).bfloat16().view(torch.uint16).numpy()
    step = 0

    def run() -> None:
        nonlocal step
        step += 1
        adamw_bf16_step((master, exp_avg, exp_avg_sq), grad, weight, PARAMS, step, 1.0, team)

    return run


def measure(num_params: int, num_threads: int, num_repeats: int) -> dict[str, Any]:
    """Time every route, in turns, and return medians and ratios."""
    set_threads(num_threads)
    with WorkerTeam(num_threads) as team:
        routes = {"narrow": narrow_route(num_params, team), "wide": our_route(num_params, team, in_place=False)}
        routes |= copy_routes(num_params, team)
        rounds = [{name: time_s(run) for name, run in routes.items()} for _ in range(num_repeats + 1)]
    rounds = [r | {"copy": min(r[name] for name in COPIES)} for r in rounds[1:]]  # the first touches pages
    of_copy = NARROW_BYTES_PER_PARAM / BYTES_PER_PARAM
    return {
        "num_params": num_params,
        "num_threads": num_threads,
        "median_s": {name: statistics.median(r[name] for r in rounds) for name in rounds[0]},
        "narrow_of_copy": statistics.median(of_copy * r["copy"] / r["narrow"] for r in rounds),
        "wide_of_copy": statistics.median(r["copy"] / r["wide"] for r in rounds),
        "narrow_over_wide": statistics.median(r["wide"] / r["narrow"] for r in rounds),
    }


def main() -> None:
    """Measure every size and thread count, print a table and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/cpu_adamw_bf16.json"))
    parser.add_argument("--log2-params", type=int, nargs="+", default=[24, 26])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=21)
    arguments = parser.parse_args()
    began = origin("numba", "numpy", "torch")
    results = []
    for log2_params in arguments.log2_params:
        for num_threads in arguments.threads:
            found = measure(2**log2_params, num_threads, arguments.repeats)
            results.append(found)
            ratios = ", ".join(
                f"{name} {value:.2f}" for name, value in found.items() if "_of_" in name or "over" in name
            )
            print(f"2^{log2_params} parameters, {num_threads} threads: {ratios}")
    goals = {f"{name} >= {goal}": all(r[name] >= goal for r in results) for name, goal in GOALS.items()}
    print(goals)
    write_result(arguments.output, {**began, "num_repeats": arguments.repeats, "goals": goals, "results": results})


if __name__ == "__main__":
    main()
