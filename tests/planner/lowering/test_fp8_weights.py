"""Weights of products in fp8 that are fetched, and gathered, in fp8: what moves, what is held, and what is computed."""

import math
from collections import Counter

import numpy as np
import pytest
from amount import examples
from cases import Case, cases, decide, small_units
from hazards import violations
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from walked import ordered_by_rules

from planner.decisions import BF16, FP32, Decisions, Fp8Weights, Place, Precision
from planner.decisions.fp8 import CAST_AT_ONCE
from planner.graph import Unit
from planner.lowering import slots
from planner.lowering.amounts import amounts_by
from planner.models.formulas.float8 import cast
from planner.models.kernels import Elementwise, Kernel
from planner.schedule.schedule import Schedule
from planner.schedule.tasks import Lane, MemoryClass, Op, Task, Tier
from ullage.rivals.decisions import GradientPath, RivalDecisions
from ullage.rivals.lowering import lower

SLOW = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
NARROW = Precision(weights="bf16", products="fp8")
SCALE_BYTES = 4


def moved_in_fp8(unit: Unit) -> set[str]:
    """Return the names of the weights that should: those of projections, which are no norms, biases or tables."""
    return {
        spec.name
        for operator in unit.operators
        for spec in operator.parameters
        if operator.kind in {"qkv", "output", "up", "down"} and len(spec.shape) == 2
    }


def of(schedule: Schedule, op: Op, unit: Unit) -> list[Task]:
    return [task for task in schedule.tasks if task.op is op and task.unit == unit.name]


@settings(SLOW, max_examples=examples(150))
@given(cases(in_fp8=True))
def test_bytes_of_every_move_and_place_follow_from_sizes_and_ranks(case: Case) -> None:
    """All that the planner says of a unit, worked out again from its parameters."""
    decisions, schedule, assigned = case.decisions, case.schedule, slots(case.units, case.decisions)
    plain = decisions.model_copy(update={"fp8_weights": None})
    other = lower(case.units, plain, asynchronous=case.asynchronous)
    e = decisions.precision.weight_bytes
    assume(any(map(decisions.moves_fp8, case.units)))
    for unit in case.units:
        narrow, ranks = moved_in_fp8(unit), decisions.replicas(unit) if decisions.gathers(unit) else 1
        if not decisions.moves_fp8(unit):
            for op in (Op.FETCH, Op.GATHER):
                assert {t.num_bytes for t in of(schedule, op, unit)} == {t.num_bytes for t in of(other, op, unit)}
            assert not of(schedule, Op.CAST, unit)
            continue
        assert {spec.name for spec in unit.parameters} >= narrow == {spec.name for spec in unit.fp8_parameters}
        fetched = decisions.units[unit.name].params == "host"
        assert fetched or ranks > 1
        grain = 256 if decisions.optimizer == "adamw-8bit" else 1
        sizes = [math.ceil(spec.num_params / grain) * grain for spec in unit.parameters]
        others = sum(sizes[: -len(narrow)])
        shard = math.ceil(sum(sizes) / grain / decisions.replicas(unit)) * grain if decisions.zero_stage else sum(sizes)
        own = shard + e * min(shard, others)
        frozen = decisions.frozen_shard_bytes(unit)
        scales = SCALE_BYTES * len(narrow)
        assert {task.num_bytes for task in of(schedule, Op.FETCH, unit)} == (
            {own + scales + frozen} if fetched else set()
        )
        gathered = {(task.num_bytes, task.num_params) for task in of(schedule, Op.GATHER, unit)}
        cast_params = 0 if fetched else shard
        assert gathered == ({(ranks * own + unit.frozen_bytes(e), cast_params)} if ranks > 1 else set())
        held = {b.label: b.num_bytes for b in schedule.buffers if b.memory_class is MemoryClass.PARAMETERS}
        block = math.ceil(ranks * shard / 16) * 16
        slot_bytes = math.ceil((block + e * ranks * min(shard, others)) / 4) * 4 + scales + frozen * ranks
        assert held[f"slot {assigned.of_unit[unit.name]}"] == slot_bytes
        assert on_host(schedule, unit) == on_host(other, unit) + (shard + scales if fetched else 0)
        casts = [b for b in schedule.buffers if b.label == f"{unit.name} cast"]
        if not fetched:
            assert not of(schedule, Op.CAST, unit)
            tasks = [schedule.tasks[b.first] for b in casts]
            assert [task.index for task in tasks] == [task.index for task in of(schedule, Op.GATHER, unit)]
            assert {(b.tier, b.num_bytes) for b in casts} == {(Tier.GPU, 4 * min(shard, CAST_AT_ONCE))}
            continue
        assert not casts
        (casting,) = of(schedule, Op.CAST, unit)
        assert casting.num_bytes == (2 * e + 1) * shard
        assert (casting.lane, casting.piece) == (Lane.CPU, -1)


def on_host(schedule: Schedule, unit: Unit) -> int:
    return sum(
        b.num_bytes
        for b in schedule.buffers
        if (b.label, b.tier, b.memory_class) == (unit.name, Tier.HOST, MemoryClass.PARAMETERS)
    )


@given(
    st.integers(1, 40).map(lambda n: 16 * n), st.integers(1, 60).map(lambda n: 16 * n), st.sampled_from([1, 2, 3, 4, 8])
)
def test_the_parts_that_ranks_bring_to_a_slot_are_all_weights_in_order(others: int, narrow: int, ranks: int) -> None:
    """Played with values: the concatenation of what ranks bring begins with all other values."""
    shard = math.ceil((others + narrow) / ranks)
    fp8 = Fp8Weights(shard, others, 1, ranks, weight_bytes=2)
    flat = np.arange(ranks * shard)
    brought = np.concatenate([each[: fp8.own_others] for each in np.split(flat, ranks)])
    assert len(brought) >= others
    assert (brought[:others] == flat[:others]).all()
    assert fp8.gathered_bytes == len(flat) + 2 * len(brought)
    assert 0 <= fp8.slot_bytes - fp8.others_start_bytes - 2 * len(brought) - fp8.scales_bytes < SCALE_BYTES
    assert 0 <= fp8.others_start_bytes - len(flat) < 16


def test_nothing_but_the_casts_of_weights_is_gone() -> None:
    """In backward they were turned when they were cast, and are turned by a copy now. Scales come as they are."""
    for unit in small_units(in_fp8=True):
        if not unit.fp8_parameters:
            assert unit.fp8_twin is None
            continue
        assert unit.fp8_twin is not None
        sizes = [spec.num_params for spec in unit.fp8_parameters]
        casts = Counter(kernel for size in sizes for kernel in one_by_one(cast(size, 2)))
        turned, copied = (Counter(Elementwise(width * size) for size in sizes) for width in (3, 2))
        forward, backward = (Counter(one_by_one(kernels)) for kernels in (unit.forward, unit.backward))
        fewer, others = (Counter(one_by_one(kernels)) for kernels in (unit.fp8_twin.forward, unit.fp8_twin.backward))
        assert forward + Counter({Elementwise(8): len(sizes)}) == fewer + casts
        assert backward + copied == others + turned
        assert unit.fp8_twin.saved_bytes == unit.saved_bytes
        assert unit.fp8_twin.workspace_bytes == unit.workspace_bytes
        assert unit.fp8_twin.parameters == unit.parameters


def one_by_one(kernels: tuple[Kernel, ...]) -> list[Kernel]:
    return [
        each
        for kernel in kernels
        for each in ([Elementwise(kernel.num_bytes)] * kernel.count if isinstance(kernel, Elementwise) else [kernel])
    ]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("place", [Place.CPU, Place.STREAM, Place.NVME])
def test_a_cast_comes_after_all_updates_and_before_the_next_fetch(place: Place, ranks: int, *, overlap: bool) -> None:
    units, options = small_units(in_fp8=True), {"precision": NARROW, "fp8_weights": True, "params": "host"}
    options |= {"data_parallel": ranks, "zero_stage": 3, "subgroup_params": 400_000, "overlap_next_forward": overlap}
    decisions = decide(units, place, num_micro_batches=2, **options)
    schedule = lower(units, decisions, asynchronous=True)
    assert len([task for task in schedule.tasks if task.op is Op.CAST]) == sum(map(decisions.moves_fp8, units)) > 0
    assert violations(schedule, units, decisions, ordered_by_rules(schedule)) == []


def test_units_of_one_size_have_amounts_of_their_own() -> None:
    unit = small_units(in_fp8=True)[1]
    decisions = decide((unit,), precision=NARROW, fp8_weights=True, params="host")
    amounts_of, decided = amounts_by(decisions), decisions.units[unit.name]
    assert amounts_of(unit, decided).fp8 is not None
    assert amounts_of(small_units()[1], decided).fp8 is None


@pytest.mark.parametrize(("params", "degrees"), [("gpu", {}), ("nvme", {"data_parallel": 2, "zero_stage": 3})])
def test_what_is_neither_fetched_from_the_host_nor_gathered_from_devices_stays_as_it_is(
    params: str, degrees: dict[str, int]
) -> None:
    units = small_units(in_fp8=True)
    plain, narrow = (
        decide(units, Place.NVME, params=params, precision=NARROW, fp8_weights=flag, **degrees) for flag in (None, True)
    )
    one, other = (lower(units, decisions, asynchronous=True) for decisions in (plain, narrow))
    assert (one.tasks, one.buffers) == (other.tasks, other.buffers)


@pytest.mark.parametrize("precision", [BF16, FP32])
def test_without_products_in_fp8_there_is_nothing_to_move_so(precision: Precision) -> None:
    with pytest.raises(ValueError, match=f"fp8_weights needs products in fp8, not {precision.weights}; plan with"):
        Decisions(policy="test", units={}, precision=precision, fp8_weights=True)
    for unit in small_units():
        assert (unit.fp8_parameters, unit.fp8_twin) == ((), None)
        used = dict.fromkeys(spec for operator in unit.operators for spec in operator.parameters)
        assert unit.parameters == tuple(used)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"optimizer": "muon"}, "Muon needs matrices before other parameters"),
        ({"gradient_path": GradientPath.FSDP2}, "policy 'test' fetches them in another type"),
    ],
)
def test_refusals(options: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        RivalDecisions(policy="test", units={}, precision=NARROW, fp8_weights=True, **options)  # type: ignore[arg-type]


def test_units_with_large_other_weights_are_left_alone() -> None:
    """With many ranks each brings as many values in the weights' type as its shard has, which saves nothing."""
    assert Fp8Weights(1000, 400, 2, 1, 2).saves
    assert not Fp8Weights(400, 400, 2, 8, 2).saves
