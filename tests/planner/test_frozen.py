"""Frozen weights in the engines that plans are compared with: no gradients, no state, no traffic of updates."""

from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from cases import small_units
from machines import machine

from planner.costs.model import CostModel
from planner.decisions import Decisions, Sharding
from planner.graph import Unit
from planner.schedule.schedule import Schedule
from planner.schedule.tasks import Op
from planner.setup import Setup
from planner.simulate.machine import run_until_steady
from planner.simulate.prediction import memory_peaks
from ullage.rivals.engines.catalogue import POLICIES, STORAGE_POLICIES, can_run
from ullage.rivals.engines.deepspeed import with_host_parameters
from ullage.rivals.engines.deepspeed_config import Zero, configured
from ullage.rivals.engines.interleaved import interleaved
from ullage.rivals.lowering import lower

ALL = small_units("demo-llama", 3)
TRAINED = {"model.layers.1.self_attn.q_proj.weight"}
ADAPTED = small_units(
    "demo-llama", 3, frozen=frozenset(spec.name for unit in ALL for spec in unit.parameters) - TRAINED
)
# What happens to gradients, state, and updated parameters.
UPDATING = {
    *(Op.SCATTER, Op.FLUSH, Op.OVERWRITE, Op.SPILL, Op.PASS, Op.UPDATE, Op.UPLOAD),
    *(Op.LOAD, Op.STORE, Op.SWAP_IN, Op.SWAP_OUT),
}


def deepspeed(stage: int, device: str, params: str = "none") -> Callable[[Setup], Iterator[Decisions]]:
    offloads = {"offload_optimizer": {"device": device, "pin_memory": True}, "offload_param": {"device": params}}
    return lambda setup: configured(setup, Zero(stage=stage, **offloads))  # type: ignore[arg-type]


def on_host(policy: Callable[[Setup], Iterator[Decisions]]) -> Callable[[Setup], Iterator[Decisions]]:
    return lambda setup: (with_host_parameters(decisions, setup) for decisions in policy(setup))


ENGINES = {
    **POLICIES,
    **STORAGE_POLICIES,
    "interleaved": lambda setup: interleaved(setup, (1,)),  # others stream a share that depends on what is left over
    "zero-offload, parameters too": on_host(POLICIES["zero-offload"]),
    "zero-1-offload": deepspeed(1, "cpu"),
    "zero-2-offload": deepspeed(2, "cpu"),
    "zero-3-offload": deepspeed(3, "cpu", "cpu"),
    "zero-3-nvme": deepspeed(3, "nvme", "nvme"),
}


def moved_per_trained(schedule: Schedule, found: tuple[Unit, ...], name: str) -> dict[Op, float]:
    """Return the bytes that move, and the updates, for each trained parameter of a unit."""
    (num_trained,) = (unit.num_params for unit in found if unit.name == name)
    moved: Counter[Op] = Counter()
    for task in schedule.tasks:
        if task.op in UPDATING and task.unit == name:
            moved[task.op] += task.num_params if task.op is Op.UPDATE else task.num_bytes
    return {op: count / num_trained for op, count in moved.items() if count}


def setup(found: tuple[Unit, ...], num_ranks: int) -> Setup:
    return Setup(found, Sharding(data_parallel=num_ranks, clip=False, subgroup_params=30_000))


@pytest.mark.parametrize(
    ("name", "num_ranks"), [(name, n) for name in ENGINES for n in (1, 2) if can_run(name, setup(ALL, n), 1)]
)
def test_other_engines_update_and_keep_only_what_is_trained(name: str, num_ranks: int) -> None:
    decisions = next(ENGINES[name](setup(ADAPTED, num_ranks)))
    schedule = lower(ADAPTED, decisions, asynchronous=True)
    whole = lower(ALL, next(ENGINES[name](setup(ALL, num_ranks))), asynchronous=True)
    moved = moved_per_trained(schedule, ADAPTED, "layers.1.attn")
    assert moved == pytest.approx(moved_per_trained(whole, ALL, "layers.1.attn"), rel=1e-2)
    assert moved[Op.UPDATE] * num_ranks == 1
    assert {task.unit for task in schedule.tasks if task.op in UPDATING} == {"layers.1.attn"}
    cost = CostModel(
        machine(devices_per_node=8), ADAPTED, Sharding(precision=decisions.precision, data_parallel=num_ranks)
    )
    simulation = run_until_steady(schedule, cost)
    held: Counter[str] = Counter()
    for peak in memory_peaks(simulation.timeline, simulation.steady, cost).values():
        held.update(peak.by_class)
    (num_trained,) = (unit.num_params for unit in ADAPTED if unit.num_params)
    num_weights = sum(unit.num_weights for unit in ADAPTED)
    assert held["gradients"] <= 10 * num_trained < num_weights
    least = 8 if name == "llmq" else 12  # its weights are masters
    assert least * num_trained <= num_ranks * held["optimizer"] <= num_ranks * 30 * num_trained
