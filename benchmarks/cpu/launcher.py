"""Host time that a plan adds to an iteration, beside what PyTorch's DDP and FSDP2 add to the same model.

    python benchmarks/cpu/launcher.py

The model is a chain of tiny blocks, each a unit, so that kernels take next to no time. All variants train it in one
process, in fp32 with AdamW and clipping. They take turns of several iterations, of which the first ones are not
counted: a loop that trains one model has its code in the processor's caches. Per phase (forward, backward, clip, step)
two times are kept: ``main_s``, CPU time of the calling thread, and ``wall_s``. On a CPU the lanes of a plan are threads
that share the interpreter's lock with the caller, and the two cores with it, so wall time has waits in it that a GPU's
host would not have. Goals and ratios are about ``main_s``. DDP and FSDP2 run on one rank over gloo. Added time is the
median of the rounds' differences to eager training.

- eager: plain PyTorch in memory;
- ddp: ``DistributedDataParallel``;
- fsdp2: ``fully_shard`` on every block and on the model;
- resident: a plan with all on the device, updated there;
- updated: weights on the device, updated on the host;
- fetched: weights on the host, brought for every use, and updated there.

``num_tasks`` counts the tasks of the plan's iteration on all lanes. Work of the lanes' own threads is in no ``main_s``.
"""

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ullage
from benchmarks.origin import origin, write_result
from executor.options import Options
from executor.prepare import prepare_session
from planner.decisions import FP32, Decisions, Place, UnitDecision
from planner.graph import Batch, build_graph, units

WIDTH = 8
PHASES = ("forward", "backward", "clip", "step")
PLANS = {"resident": ("gpu", Place.GPU), "updated": ("gpu", Place.CPU), "fetched": ("host", Place.CPU)}
GOALS = {"us_per_unit_and_pass": 25.0, "over_fsdp2": 1.5}
_WARM_UP, _TURN = 2, 10  # iterations of a variant before those that count, and those


class Block(nn.Module):
    """A layer and its activation: the smallest block that a capture makes a unit of."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return float32[WIDTH, WIDTH]."""
        return torch.tanh(self.layer(x))


class Chain(nn.Module):
    """Blocks one after another, float32[WIDTH, WIDTH] in, a scalar out."""

    def __init__(self, num_units: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(num_units))

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of the last block's results."""
        for block in self.blocks:
            x = block(x)
        return x.sum()


class Variant(NamedTuple):
    """A way to train the chain. ``settle`` waits for what goes on after a step; it is not timed."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    settle: Callable[[], object]
    num_tasks: int = 0


def chain(num_units: int) -> Chain:
    """Make the chain with the weights that all variants start from."""
    torch.manual_seed(0)
    return Chain(num_units)


def stock(num_units: int, name: str) -> Variant:
    """Return a variant of PyTorch's own."""
    model: nn.Module = chain(num_units)
    if name == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif name == "fsdp2":
        mesh = init_device_mesh("cpu", (1,))
        for block in list(model.blocks):  # type: ignore[arg-type]
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return Variant(model, torch.optim.AdamW(model.parameters()), lambda: None)


def planned(num_units: int, name: str) -> Variant:
    """Return a variant under a plan."""
    shape = f"{WIDTH}x{WIDTH}"
    captured = ullage.capture_module(lambda: Chain(num_units), [shape], "fp32", name="chain", as_on_gpu=False)
    found = units(build_graph(captured, Batch(captured.micro_batch, captured.seq_len, FP32.weight_bytes)))
    if len(found) != num_units:
        raise AssertionError(f"the chain has {len(found)} units, not {num_units}")
    params, place = PLANS[name]
    decided = UnitDecision(params=params, activations="keep", update=(place,))
    decisions = Decisions(
        policy="launcher",
        precision=FP32,
        num_micro_batches=1,
        micro_batch=WIDTH,
        subgroup_params=1 << 20,
        clip=True,
        units={unit.name: decided for unit in found},
    )
    model = chain(num_units)
    prepared, optimizer = prepare_session(
        model, torch.optim.AdamW(model.parameters()), found, decisions, Options(num_threads=1)
    )
    return Variant(prepared, optimizer, optimizer.session.synchronize, len(optimizer.session.schedule.tasks))


def time_iteration(variant: Variant, x: Tensor) -> dict[str, tuple[float, float]]:
    """Train one iteration; return CPU time of this thread and wall time of every phase, in seconds."""
    found = {}
    moment = time.thread_time(), time.perf_counter()

    def end(phase: str) -> None:
        nonlocal moment
        now = time.thread_time(), time.perf_counter()
        found[phase] = now[0] - moment[0], now[1] - moment[1]
        moment = time.thread_time(), time.perf_counter()

    loss = variant.model(x)
    end("forward")
    loss.backward()
    end("backward")
    nn.utils.clip_grad_norm_(variant.model.parameters(), 1.0)
    end("clip")
    variant.optimizer.step()
    end("step")
    variant.optimizer.zero_grad()
    variant.settle()
    return found


def turn(variant: Variant, x: Tensor) -> list[dict[str, tuple[float, float]]]:
    """Train some iterations in a row; return the times of those after the first ones."""
    return [time_iteration(variant, x) for _ in range(_WARM_UP + _TURN)][_WARM_UP:]


def measure(num_units: int, num_rounds: int) -> dict[str, Any]:
    """Time all variants of a chain in turns; return medians, spread, and what each adds to eager training."""
    x = torch.ones(WIDTH, WIDTH)
    with contextlib.ExitStack() as closing:
        variants = {name: stock(num_units, name) for name in ("eager", "ddp", "fsdp2")}
        for name in PLANS:
            variants[name] = planned(num_units, name)
            closing.callback(variants[name].optimizer.session.close, give_back=False)  # type: ignore[attr-defined]
        rounds: list[Times] = []
        for _ in range(-(-num_rounds // _TURN)):
            turns = {name: turn(variant, x) for name, variant in variants.items()}
            rounds += [{name: turns[name][i] for name in variants} for i in range(_TURN)]
    rows = {name: row(rounds, name, num_units, variant.num_tasks) for name, variant in variants.items()}
    for name in PLANS:
        rows[name]["over_fsdp2"] = rows[name]["added_main_s"]["passes"] / rows["fsdp2"]["added_main_s"]["passes"]
    return {"num_units": num_units, "num_rounds": num_rounds, "rows": rows}


Times = dict[str, dict[str, tuple[float, float]]]


def row(rounds: list[Times], name: str, num_units: int, num_tasks: int) -> dict[str, Any]:
    """Return what is told of one variant. ``passes`` is forward and backward together, ``all`` the iteration."""
    parts = {phase: (phase,) for phase in PHASES} | {"passes": PHASES[:2], "all": PHASES}

    def series(variant: str, part: str, clock: int) -> list[float]:
        return [sum(r[variant][phase][clock] for phase in parts[part]) for r in rounds]

    def added(part: str, clock: int) -> list[float]:
        return [a - b for a, b in zip(series(name, part, clock), series("eager", part, clock), strict=True)]

    result: dict[str, Any] = {"num_tasks": num_tasks}
    for clock, kind in enumerate(("main_s", "wall_s")):
        result[kind] = {part: statistics.median(series(name, part, clock)) for part in parts}
        result[f"added_{kind}"] = {part: statistics.median(added(part, clock)) for part in parts}
        result[f"added_{kind}_quartiles"] = {part: statistics.quantiles(added(part, clock))[::2] for part in parts}
    added_s = result["added_main_s"]
    result["added_us_per_unit"] = {part: 1e6 * added_s[part] / num_units for part in parts}
    result["added_us_per_task"] = 1e6 * added_s["all"] / num_tasks if num_tasks else None
    return result


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    """Have a process group of this process alone, over gloo."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def print_result(result: dict[str, Any]) -> None:
    """Print the table of one chain."""
    print(f"{result['num_units']} units: us of the calling thread that are added, by unit")
    print(f"{'':>10}" + "".join(f"{phase:>10}" for phase in PHASES) + f"{'by task':>10}{'x FSDP2':>10}")
    for name, found in result["rows"].items():
        if name != "eager":
            times = "".join(f"{found['added_us_per_unit'][phase]:>10.1f}" for phase in PHASES)
            by_task, ratio = found["added_us_per_task"], found.get("over_fsdp2")
            print(f"{name:>10}{times}" + "".join(f"{'-' if v is None else f'{v:.2f}':>10}" for v in (by_task, ratio)))


def goals_of(results: list[dict[str, Any]]) -> dict[str, bool]:
    """Return which plans keep to the goals, on all chains."""
    met = {}
    for name in PLANS:
        rows = [result["rows"][name] for result in results]
        most_us = max(r["added_us_per_unit"][phase] for r in rows for phase in ("forward", "backward"))
        met[f"{name}: us_per_unit_and_pass <= {GOALS['us_per_unit_and_pass']:g}"] = (
            most_us <= GOALS["us_per_unit_and_pass"]
        )
        met[f"{name}: over_fsdp2 <= {GOALS['over_fsdp2']:g}"] = (
            max(r["over_fsdp2"] for r in rows) <= GOALS["over_fsdp2"]
        )
    return met


def main() -> None:
    """Measure all chains, print a table of each and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/cpu_launcher.json"))
    parser.add_argument("--units", type=int, nargs="+", default=[24, 48, 100])
    parser.add_argument("--rounds", type=int, default=100)
    args = parser.parse_args()
    began = origin("torch", "numba", "numpy")
    torch.set_num_threads(1)
    results = []
    with one_rank():
        for num_units in args.units:
            results.append(measure(num_units, args.rounds))
            print_result(results[-1])
    goals = goals_of(results)
    for goal, met in goals.items():
        print(f"{goal}: {'met' if met else 'missed'}")
    write_result(args.output, {**began, "goals": goals, "results": results})


if __name__ == "__main__":
    main()
