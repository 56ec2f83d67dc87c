"""Time the one-pass CPU AdamW against what it replaces, and against a plain copy of the same bytes.

    python benchmarks/cpu/adamw.py

All routes run in one process and take turns, so that what disturbs the machine disturbs all of them; ratios are medians
of the rounds' ratios. Each call that is timed follows one of the same route that is not: OpenMP's threads go on looking
for work for some milliseconds after their last, and would take a core from whoever comes next. bf16 gradient in, bf16
weight out, float32 state:

- ours: ``executor.optimizer.adamw_step``, 28 bytes a parameter (30 with the cache lines of the weight, read before they
  are written);
- in_place: the same with the weight written over the gradient, as plans do to save two bytes a parameter: 26 bytes;
- torch: ``grad.float()``, ``torch.optim.AdamW(fused=True)`` on the master, the weight cast back;
- torch_preallocated: the same with a float32 gradient that is allocated once. It moves 6 + 28 + 6 bytes, and 6 more to
  read lines before writing them: 46 / 30 = 1.53 of ours where memory binds both;
- deepspeed: ``DeepSpeedCPUAdam`` of DeepSpeed 0.19.8 between the same two casts, into a float32 gradient that is
  allocated once, as its engine does. Left out where it is not installed: ``pip install deepspeed==0.19.8 ninja``, and a
  C++ compiler; it compiles its kernel at its first use;
- copy: numpy's, numba's and torch's copies of 14 bytes a parameter, which read and write 28. The fastest of each round
  counts.

``--quick`` is for a look: fewer rounds of one size.
"""

import argparse
import contextlib
import ctypes
import io
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import util
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch

from benchmarks.origin import origin, write_result
from executor.optimizer.adamw import AdamWParams, adamw_step
from executor.optimizer.workers import WorkerTeam
from planner.decisions import BF16

GOALS = {"ours_of_copy": 0.9, "ours_over_torch": 1.7, "ours_over_deepspeed": 1.0, "in_place_over_ours": 0.9}
PARAMS = AdamWParams(lr=1e-4)
BYTES_PER_PARAM = int(BF16.update_bytes_per_param("adamw"))
OPTIONS = {
    "lr": PARAMS.lr,
    "betas": (PARAMS.beta1, PARAMS.beta2),
    "eps": PARAMS.eps,
    "weight_decay": PARAMS.weight_decay,
}
COPIES = ("numpy_copy", "numba_copy", "torch_copy")
Route = Callable[[], object]


def our_route(
    num_params: int,
    team: WorkerTeam,
    *,
    in_place: bool,
    kernel: Callable[..., object] = adamw_step,
    params: Any = PARAMS,
    buffers: Sequence[Any] | None = None,
    rounds: bool = False,
) -> Route:
    """Return a call that takes one step with our kernel; in place, the last weights are the next gradient.

    Without ``buffers``, they are moments in fp32. If it ``rounds``, the master copy is bf16, and is the weight.
    """
    rng = np.random.default_rng(0)
    master: Any = rng.standard_normal(num_params, np.float32)
    if rounds:
        master = torch.from_numpy(master).bfloat16().view(torch.uint16).numpy()
    state = (master, *(np.zeros((2, num_params), np.float32) if buffers is None else buffers))
    grad = torch.from_numpy(rng.standard_normal(num_params, np.float32)).bfloat16().view(torch.uint16).numpy()
    weight = None if rounds else grad if in_place else np.zeros(num_params, np.uint16)
    step = 0

    def run() -> None:
        nonlocal step
        step += 1
        kernel(state, grad, weight, params, step, 1.0, team)

    return run


def their_route(num_params: int, make: Callable[[Any], torch.optim.Optimizer], *, preallocated: bool) -> Route:
    """Return a call that takes one step between two casts, into a new float32 gradient or one allocated here."""
    generator = torch.Generator().manual_seed(0)
    master = torch.nn.Parameter(torch.randn(num_params, generator=generator))
    grad = torch.randn(num_params, generator=generator).bfloat16()
    weight = torch.zeros(num_params, dtype=torch.bfloat16)
    grad_float32 = torch.zeros(num_params) if preallocated else None
    optimizer = make([master])

    def run() -> None:
        master.grad = grad.float() if grad_float32 is None else grad_float32.copy_(grad)
        optimizer.step()
        weight.copy_(master.detach())

    return run


@numba.njit(nogil=True)
def copy_words(target: Any, source: Any) -> None:
    """Copy an array of equal length."""
    for i in range(source.size):
        target[i] = source[i]


def copy_routes(num_params: int, team: WorkerTeam) -> dict[str, Route]:
    """Return calls that copy 14 bytes a parameter: with numpy and numba on the team, and with torch's own threads."""
    num_words = num_params * BYTES_PER_PARAM // 2 // 4
    source, target = np.ones(num_words, np.float32), np.zeros(num_words, np.float32)
    torch_source, torch_target = torch.from_numpy(source), torch.from_numpy(target)
    copy_words(target[:1], source[:1])

    def on_team(copy: Callable[[Any, Any], object]) -> Route:
        return lambda: team.run(lambda start, stop: copy(target[start:stop], source[start:stop]), num_words)

    return {
        "numpy_copy": on_team(np.copyto),
        "numba_copy": on_team(copy_words),
        "torch_copy": lambda: torch_target.copy_(torch_source),
    }


def deepspeed_adam() -> Callable[[Any], torch.optim.Optimizer] | None:
    """Return what makes DeepSpeed's CPU AdamW, once its kernel is there, or ``None`` where it is not installed."""
    if util.find_spec("deepspeed") is None:
        return None
    with contextlib.redirect_stdout(io.StringIO()):
        from deepspeed.ops.adam import DeepSpeedCPUAdam  # noqa: PLC0415

        parameter = torch.nn.Parameter(torch.zeros(1))
        DeepSpeedCPUAdam([parameter])

    def make(parameters: Any) -> torch.optim.Optimizer:
        with contextlib.redirect_stdout(io.StringIO()):
            optimizer: torch.optim.Optimizer = DeepSpeedCPUAdam(parameters, **OPTIONS, adamw_mode=True)
        return optimizer

    return make


def set_threads(num_threads: int) -> None:
    """Set the threads of torch, and of every other OpenMP in the process: a compiled extension may bring its own."""
    torch.set_num_threads(num_threads)
    for path in loaded("libgomp", "libomp", "libiomp5"):
        ctypes.CDLL(path).omp_set_num_threads(num_threads)


def loaded(*names: str) -> Iterator[str]:
    """Yield the paths of shared libraries in this process whose file names begin so (Linux)."""
    maps = Path("/proc/self/maps")
    paths = {line.split()[-1] for line in maps.read_text().splitlines() if "/" in line} if maps.exists() else set()
    return (path for path in sorted(paths) if Path(path).name.startswith(names))


def measure(
    num_params: int, num_threads: int, num_repeats: int, deepspeed: Callable[[Any], torch.optim.Optimizer] | None
) -> dict[str, Any]:
    """Time every route, in turns, and return medians and ratios."""
    set_threads(num_threads)

    def fused(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, **OPTIONS, fused=True)  # type: ignore[arg-type]

    with WorkerTeam(num_threads) as team:
        routes = {
            "ours": our_route(num_params, team, in_place=False),
            "in_place": our_route(num_params, team, in_place=True),
            "torch": their_route(num_params, fused, preallocated=False),
            "torch_preallocated": their_route(num_params, fused, preallocated=True),
        }
        if deepspeed:
            routes["deepspeed"] = their_route(num_params, deepspeed, preallocated=True)
        routes |= copy_routes(num_params, team)
        rounds = [{name: time_s(run) for name, run in routes.items()} for _ in range(num_repeats + 1)]
    rounds = [r | {"copy": min(r[name] for name in COPIES)} for r in rounds[1:]]  # the first touches pages

    def ratio(slow: str) -> float:
        return statistics.median(r[slow] / r["ours"] for r in rounds)

    names = list(rounds[0])
    median_s = {name: statistics.median(r[name] for r in rounds) for name in names}
    others = [name for name in names if name not in {"ours", "in_place"} and "copy" not in name]
    return {
        "num_params": num_params,
        "num_threads": num_threads,
        "median_s": median_s,
        "best_s": {name: min(r[name] for r in rounds) for name in names},
        "params_per_s": {name: num_params / median_s[name] for name in ("ours", *others)},
        "ours_bytes_per_s": num_params * BYTES_PER_PARAM / median_s["ours"],
        "copy_bytes_per_s": num_params * BYTES_PER_PARAM / median_s["copy"],
        "ours_of_copy": ratio("copy"),
        **{f"ours_over_{name}": ratio(name) for name in others},
        "in_place_over_ours": statistics.median(r["ours"] / r["in_place"] for r in rounds),
    }


def time_s(run: Route) -> float:
    """Return the seconds that the second of two calls takes."""
    run()
    start_s = time.perf_counter()
    run()
    return time.perf_counter() - start_s


def print_row(result: dict[str, Any] | None = None) -> None:
    """Print one line of the table, or its head."""
    if result is None:
        print(
            f"{'params':>7} {'threads':>7} {'ours':>13} {'':>10} {'copy':>10} {'of copy':>8} "
            f"{'in place':>8} {'x torch':>8} {'x torch, allocated once':>24} {'x DeepSpeed':>12}"
        )
        return
    deepspeed = result.get("ours_over_deepspeed")
    size, ours, copy = result["num_params"].bit_length() - 1, result["ours_bytes_per_s"], result["copy_bytes_per_s"]
    print(
        f"{f'2^{size}':>7} {result['num_threads']:>7} {result['params_per_s']['ours'] / 1e9:>6.2f} Gp/s   "
        f"{ours / 1e9:>5.1f} GB/s {copy / 1e9:>5.1f} GB/s {result['ours_of_copy']:>8.2f} "
        f"{result['in_place_over_ours']:>8.2f} "
        f"{result['ours_over_torch']:>8.2f} {result['ours_over_torch_preallocated']:>24.2f} "
        f"{'-' if deepspeed is None else f'{deepspeed:.2f}':>12}"
    )


def main() -> None:
    """Measure every size and thread count, print a table and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/cpu_adamw.json"))
    parser.add_argument("--log2-params", type=int, nargs="+", default=[24, 25, 26])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--quick", action="store_true", help="9 rounds of 2^25 parameters, written nowhere")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.log2_params, arguments.repeats = [25], 9

    began = origin("numba", "numpy", "torch", "deepspeed")
    deepspeed = deepspeed_adam()
    results = []
    print_row()
    for log2_params in arguments.log2_params:
        for num_threads in arguments.threads:
            results.append(measure(2**log2_params, num_threads, arguments.repeats, deepspeed))
            print_row(results[-1])
    # What was not measured is not claimed: null.
    goals = {
        f"{name} >= {goal}": all(r[name] >= goal for r in results) if name in results[0] else None
        for name, goal in GOALS.items()
    }
    print(goals)
    if arguments.quick:
        return
    report = {
        **began,
        "num_repeats": arguments.repeats,
        "goals": goals,
        "results": results,
    }
    write_result(arguments.output, report)


if __name__ == "__main__":
    main()
