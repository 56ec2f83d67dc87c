"""Time the one-pass CPU AdamW against what it replaces, and against a plain copy of the same bytes.

    python benchmarks/cpu/adamw.py --output benchmarks/results/cpu_adamw.json

All routes run in one process and take turns, so that what disturbs the machine disturbs all of them; ratios are medians
of the rounds' ratios. bf16 gradient in, bf16 weight out, float32 state:

- ours: ``executor.optimizer.adamw_step``, 28 bytes a parameter (30 with the cache lines of the weight, read before they
  are written);
- torch: ``grad.float()``, ``torch.optim.AdamW(fused=True)`` on the master, the weight cast back;
- torch_preallocated: the same with a float32 gradient that is allocated once. It moves 6 + 28 + 6 bytes, and 6 more to
  read lines before writing them: 46 / 30 = 1.53 of ours where memory binds both;
- copy: numpy's and torch's copies of 14 bytes a parameter, which read and write 28. The faster of each round counts.
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

GOALS = {"ours_of_copy": 0.9, "ours_over_torch": 1.7}
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


def torch_route(num_params: int, *, preallocated: bool) -> Route:
    """Return a call that takes one step with torch, into a new float32 gradient or one allocated here."""
    generator = torch.Generator().manual_seed(0)
    master = torch.nn.Parameter(torch.randn(num_params, generator=generator))
    grad = torch.randn(num_params, generator=generator).bfloat16()
    weight = torch.zeros(num_params, dtype=torch.bfloat16)
    grad_float32 = torch.zeros(num_params) if preallocated else None
    betas = (PARAMS.beta1, PARAMS.beta2)
    optimizer = torch.optim.AdamW(
        [master], lr=PARAMS.lr, betas=betas, eps=PARAMS.eps, weight_decay=PARAMS.weight_decay, fused=True
    )

    def run() -> None:
        master.grad = grad.float() if grad_float32 is None else grad_float32.copy_(grad)
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
        routes = {
            "ours": our_route(num_params, team),
            "torch": torch_route(num_params, preallocated=False),
            "torch_preallocated": torch_route(num_params, preallocated=True),
        } | copy_routes(num_params, team)
        rounds = [{name: time_s(run) for name, run in routes.items()} for _ in range(num_repeats + 2)]
    rounds = [r | {"copy": min(r["numpy_copy"], r["torch_copy"])} for r in rounds[2:]]  # the first two touch pages

    def ratio(slow: str) -> float:
        return statistics.median(r[slow] / r["ours"] for r in rounds)

    names = list(rounds[0])
    median_s = {name: statistics.median(r[name] for r in rounds) for name in names}
    return {
        "num_params": num_params,
        "num_threads": num_threads,
        "median_s": median_s,
        "best_s": {name: min(r[name] for r in rounds) for name in names},
        "params_per_s": {name: num_params / median_s[name] for name in names if "copy" not in name},
        "ours_bytes_per_s": num_params * BYTES_PER_PARAM / median_s["ours"],
        "copy_bytes_per_s": num_params * BYTES_PER_PARAM / median_s["copy"],
        "ours_of_copy": ratio("copy"),
        "ours_over_torch": ratio("torch"),
        "ours_over_torch_preallocated": ratio("torch_preallocated"),
    }


def time_s(run: Route) -> float:
    """Return the seconds that one call takes."""
    start_s = time.perf_counter()
    run()
    return time.perf_counter() - start_s


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
    parser.add_argument("--repeats", type=int, default=31)
    arguments = parser.parse_args()

    load_average = os.getloadavg()
    warm_up()
    results = []
    for log2_params in arguments.log2_params:
        for num_threads in arguments.threads:
            result = measure(2**log2_params, num_threads, arguments.repeats)
            results.append(result)
            print(
                f"2^{log2_params} params, {num_threads} threads: {result['params_per_s']['ours'] / 1e9:.2f} Gparam/s, "
                f"{result['ours_bytes_per_s'] / 1e9:.1f} GB/s, {result['ours_of_copy']:.2f} of a copy "
                f"({result['copy_bytes_per_s'] / 1e9:.1f} GB/s), {result['ours_over_torch']:.2f} x torch, "
                f"{result['ours_over_torch_preallocated']:.2f} x preallocated"
            )
    goals = {f"{name} >= {goal}": all(r[name] >= goal for r in results) for name, goal in GOALS.items()}
    print(goals)
    report = {
        "command": shlex.join(["python", *sys.argv]),
        "date": datetime.now(UTC).date().isoformat(),
        "cpu": cpu_model(),
        "num_cores": os.cpu_count(),
        "load_average_before": load_average,
        "versions": {"python": platform.python_version(), **{m.__name__: m.__version__ for m in (numba, np, torch)}},
        "num_repeats": arguments.repeats,
        "goals": goals,
        "results": results,
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
