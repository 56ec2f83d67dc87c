"""Time the one-pass CPU AdamW against what it replaces, and against a plain copy of the same bytes.

    python benchmarks/cpu/adamw.py --output benchmarks/results/cpu_adamw.json

All routes run in one process and take turns, so that what disturbs the machine disturbs all of them; medians are
compared. bf16 gradient in, bf16 weight out, float32 state:

- ours: ``executor.optimizer.adamw_step``, 28 bytes a parameter;
- torch: the gradient cast to float32, ``torch.optim.AdamW(fused=True)`` on the master, the weight cast back;
- copy: numpy's and torch's copies of 14 bytes a parameter, which reads and writes 28. The faster counts.
"""

import argparse
import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch

from executor.optimizer import BYTES_PER_PARAM, AdamWParams, WorkerTeam, adamw_step, warm_up

GOAL_OF_COPY = 0.9
GOAL_OVER_TORCH = 1.7
PARAMS = AdamWParams(lr=1e-4)
Route = Callable[[], object]


def our_route(num_params: int, team: WorkerTeam) -> Route:
    """Return a call that takes one step with our kernel."""
    rng = np.random.default_rng(0)
    master = rng.standard_normal(num_params, np.float32)
    exp_avg, exp_avg_sq = np.zeros((2, num_params), np.float32)
    grad = torch.from_numpy(rng.standard_normal(num_params, np.float32)).bfloat16().view(torch.uint16).numpy()
    weight = np.zeros(num_params, np.uint16)
    step = 0

    def run() -> None:
        nonlocal step
        step += 1
        adamw_step(master, exp_avg, exp_avg_sq, grad, weight, PARAMS, step, 1.0, team)

    return run


def torch_route(num_params: int) -> Route:
    """Return a call that takes one step the usual way; the float32 gradient is allocated once, outside the timing."""
    generator = torch.Generator().manual_seed(0)
    master = torch.nn.Parameter(torch.randn(num_params, generator=generator))
    master.grad = torch.zeros(num_params)
    grad = torch.randn(num_params, generator=generator).bfloat16()
    weight = torch.zeros(num_params, dtype=torch.bfloat16)
    betas = (PARAMS.beta1, PARAMS.beta2)
    optimizer = torch.optim.AdamW(
        [master], lr=PARAMS.lr, betas=betas, eps=PARAMS.eps, weight_decay=PARAMS.weight_decay, fused=True
    )

    def run() -> None:
        master.grad.copy_(grad)
        optimizer.step()
        weight.copy_(master.detach())

    return run


def copy_routes(num_params: int, team: WorkerTeam) -> dict[str, Route]:
    """Return calls that copy 14 bytes a parameter, with numpy on the team and with torch's own threads."""
    num_words = num_params * BYTES_PER_PARAM // 2 // 4
    source, target = np.ones(num_words, np.float32), np.zeros(num_words, np.float32)
    torch_source, torch_target = torch.from_numpy(source), torch.from_numpy(target)

    def copy_piece(start: int, stop: int) -> None:
        np.copyto(target[start:stop], source[start:stop])

    return {
        "numpy_copy": lambda: team.run(copy_piece, num_words),
        "torch_copy": lambda: torch_target.copy_(torch_source),
    }


def measure(num_params: int, num_threads: int, num_repeats: int) -> dict[str, Any]:
    """Time every route, in turns, and return medians and ratios."""
    torch.set_num_threads(num_threads)
    with WorkerTeam(num_threads) as team:
        routes = {"ours": our_route(num_params, team), "torch": torch_route(num_params)} | copy_routes(num_params, team)
        times_s: dict[str, list[float]] = {name: [] for name in routes}
        for repeat in range(num_repeats + 2):
            for name, run in routes.items():
                start_s = time.perf_counter()
                run()
                if repeat >= 2:  # the first rounds touch pages and fill pools
                    times_s[name].append(time.perf_counter() - start_s)
    median_s = {name: statistics.median(times) for name, times in times_s.items()}
    copy_s = min(median_s["numpy_copy"], median_s["torch_copy"])
    return {
        "num_params": num_params,
        "num_threads": num_threads,
        "median_s": median_s,
        "quartiles_s": {name: statistics.quantiles(times, n=4)[::2] for name, times in times_s.items()},
        "params_per_s": {name: num_params / median_s[name] for name in ("ours", "torch")},
        "ours_bytes_per_s": num_params * BYTES_PER_PARAM / median_s["ours"],
        "copy_bytes_per_s": num_params * BYTES_PER_PARAM / copy_s,
        "ours_of_copy": copy_s / median_s["ours"],
        "ours_over_torch": median_s["torch"] / median_s["ours"],
    }


def cpu_model() -> str:
    """Return the CPU's name as the kernel reports it, or else as Python does."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


def main() -> None:
    """Measure every size and thread count, print a table and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/cpu_adamw.json"))
    parser.add_argument("--log2-params", type=int, nargs="+", default=[24, 25, 26])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()

    warm_up()
    results = []
    for log2_params in arguments.log2_params:
        for num_threads in arguments.threads:
            result = measure(2**log2_params, num_threads, arguments.repeats)
            results.append(result)
            print(
                f"2^{log2_params} params, {num_threads} threads: {result['params_per_s']['ours'] / 1e9:.2f} Gparam/s, "
                f"{result['ours_bytes_per_s'] / 1e9:.1f} GB/s, {result['ours_of_copy']:.2f} of a copy "
                f"({result['copy_bytes_per_s'] / 1e9:.1f} GB/s), {result['ours_over_torch']:.2f} x torch"
            )
    goals = {
        f"ours_of_copy >= {GOAL_OF_COPY}": all(r["ours_of_copy"] >= GOAL_OF_COPY for r in results),
        f"ours_over_torch >= {GOAL_OVER_TORCH}": all(r["ours_over_torch"] >= GOAL_OVER_TORCH for r in results),
    }
    print(goals)
    report = {
        "command": shlex.join(["python", *sys.argv]),
        "date": datetime.now(UTC).date().isoformat(),
        "cpu": cpu_model(),
        "num_cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        "versions": {"python": platform.python_version(), **{m.__name__: m.__version__ for m in (numba, np, torch)}},
        "num_repeats": arguments.repeats,
        "goals": goals,
        "results": results,
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
