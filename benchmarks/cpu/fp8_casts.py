"""Time the host's cast of weights to fp8 beside a plain copy of the same bytes.

    python benchmarks/cpu/fp8_casts.py

As ``benchmarks/cpu/adamw.py``: all routes run in one process and take turns, and ratios are medians of the rounds'
ratios. A cast reads a weight twice, to find its largest value and to cast it, and writes a byte. A ratio to the copy is
that of bytes per second.
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.cpu.adamw import BYTES_PER_PARAM, COPIES, Route, copy_routes, set_threads, time_s
from benchmarks.origin import origin, write_result
from executor.devices.backend import as_array
from executor.memory.fp8_weights import cast_to_fp8, largest_bits, scales_of
from executor.optimizer.workers import WorkerTeam

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def cast_route(dtype: torch.dtype, num_params: int, team: WorkerTeam) -> Route:
    """Return a call that casts one weight."""
    values = as_array(torch.randn(num_params, generator=torch.Generator().manual_seed(0)).to(dtype))
    out, whole = np.zeros(num_params, np.uint8), [slice(0, num_params)]
    return lambda: cast_to_fp8(values, scales_of(largest_bits(values, whole, team)), whole, out, team)


def measure(num_params: int, num_threads: int, num_repeats: int) -> list[dict[str, Any]]:
    """Time every route, in turns, and return medians and ratios of each type of weights."""
    set_threads(num_threads)
    with WorkerTeam(num_threads) as team:
        routes = {name: cast_route(dtype, num_params, team) for name, dtype in DTYPES.items()}
        routes |= copy_routes(num_params, team)
        rounds = [{name: time_s(run) for name, run in routes.items()} for _ in range(num_repeats + 1)]
    rounds = [r | {"copy": min(r[name] for name in COPIES)} for r in rounds[1:]]  # the first touches pages
    results = []
    for name, dtype in DTYPES.items():
        of_copy = (2 * dtype.itemsize + 1) / BYTES_PER_PARAM
        results.append(
            {
                "weights": name,
                "num_params": num_params,
                "num_threads": num_threads,
                "of_copy": statistics.median(of_copy * r["copy"] / r[name] for r in rounds),
                "median_s": {each: statistics.median(r[each] for r in rounds) for each in (name, "copy")},
            }
        )
    return results


def main() -> None:
    """Measure every size and thread count, print a table and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/cpu_fp8_casts.json"))
    parser.add_argument("--log2-params", type=int, nargs="+", default=[24, 26])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    began, results = origin("numba", "numpy", "torch"), []
    for log2_params in arguments.log2_params:
        for num_threads in arguments.threads:
            for found in measure(2**log2_params, num_threads, arguments.repeats):
                results.append(found)
                print(
                    f"{found['weights']}, 2^{log2_params} parameters, {num_threads} threads: of_copy "
                    f"{found['of_copy']:.2f}",
                    flush=True,
                )
    write_result(arguments.output, {**began, "num_repeats": arguments.repeats, "results": results})


if __name__ == "__main__":
    main()
