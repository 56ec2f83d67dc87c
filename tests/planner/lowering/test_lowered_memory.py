"""What schedules hold in memory, from when until when."""

import pytest
from amount import examples
from cases import Case, cases, decide, random_prices, small_units
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from walked import NUM_ITERATIONS

from planner.decisions import Decisions, Place, Precision
from planner.schedule.schedule import Schedule
from planner.schedule.tasks import MemoryClass, Op, Tier
from planner.schedule.timeline import memory_use
from planner.simulate.machine import run
from ullage.rivals.decisions import GradientPath
from ullage.rivals.lowering import lower

SLOW = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


# Between them these need every kind of dependency.
DENSE = small_units("demo-llama")


@settings(SLOW, max_examples=examples(60))
@given(st.one_of(cases(), cases(in_fp8=True)), st.integers(0, 2**32 - 1))
def test_memory_is_never_negative_and_covers_what_is_always_held(case: Case, seed: int) -> None:
    timeline = run(case.schedule, *random_prices(case.schedule, seed), NUM_ITERATIONS)
    assume(timeline.period_s(1) > 0)
    for tier, use in memory_use(timeline, 1).items():
        rows = list(zip(*use.num_bytes.values(), strict=True))
        assert min(min(row) for row in rows) >= 0
        always = sum(b.num_bytes for b in case.schedule.buffers if b.tier is tier and b.first is None)
        assert always <= min(sum(row) for row in rows)
        assert max(sum(row) for row in rows) == use.peak_bytes == sum(use.peak_by_class.values())


def _held(schedule: Schedule, tier: Tier, kind: MemoryClass) -> int:
    return sum(b.num_bytes for b in schedule.buffers if b.tier is tier and b.memory_class is kind and b.first is None)


@pytest.mark.parametrize(
    ("decisions", "gpu", "host"),
    [  # bytes per parameter that are always held: parameters and optimizer on the GPU; both and gradients on the host
        (decide(DENSE, Place.GPU), (2, 12), (0, 0, 0)),
        (decide(DENSE, Place.CPU), (2, 0), (2, 12, 0)),  # gradients take the place of weights
        (decide(DENSE, Place.CPU, gradient_path=GradientPath.ZERO3_ASYNC), (2, 0), (2, 12, 4)),
        (decide(DENSE, Place.GPU, precision=Precision(weights="fp32")), (4, 8), (0, 0, 0)),
        (decide(DENSE, Place.CPU, precision=Precision(weights="fp32")), (4, 0), (0, 12, 4)),
        (decide(DENSE, Place.GPU, data_parallel=2, zero_stage=1), (2, 6), (0, 0, 0)),
        (decide(DENSE, Place.CPU, data_parallel=2, zero_stage=2), (2, 0), (1, 6, 0)),
    ],
)
def test_bytes_per_parameter(decisions: Decisions, gpu: tuple[int, int], host: tuple[int, int, int]) -> None:
    num_params = sum(unit.num_params for unit in DENSE)
    schedule = lower(DENSE, decisions, asynchronous=False)
    kinds = (MemoryClass.PARAMETERS, MemoryClass.OPTIMIZER, MemoryClass.GRADIENTS)
    assert tuple(_held(schedule, Tier.GPU, kind) for kind in kinds[:2]) == tuple(n * num_params for n in gpu)
    assert tuple(_held(schedule, Tier.HOST, kind) for kind in kinds) == tuple(n * num_params for n in host)


def test_slots_hold_the_largest_of_their_ring_and_state_slots_the_largest_piece() -> None:
    decisions = decide(DENSE, Place.STREAM, params="host", num_param_slots=1, num_state_slots=2)
    schedule = lower(DENSE, decisions, asynchronous=False)
    assert _held(schedule, Tier.GPU, MemoryClass.PARAMETERS) == 2 * sum({unit.num_params for unit in DENSE})
    largest = max(unit.num_params for unit in DENSE)
    assert _held(schedule, Tier.GPU, MemoryClass.OPTIMIZER) == 2 * 14 * largest


def test_zero_3_holds_a_shard_and_slots() -> None:
    decisions = decide(DENSE, Place.GPU, data_parallel=2, zero_stage=3, num_param_slots=1)
    schedule = lower(DENSE, decisions, asynchronous=False)
    whole, rings = sum(unit.num_params for unit in DENSE), sum({unit.num_params for unit in DENSE})
    assert _held(schedule, Tier.GPU, MemoryClass.PARAMETERS) == whole + 2 * rings
    assert _held(schedule, Tier.GPU, MemoryClass.OPTIMIZER) == 6 * whole


def _ends(schedule: Schedule, label: str, kind: MemoryClass) -> list[tuple[str, str, int]]:
    return [
        (schedule.tasks[b.first].name, schedule.tasks[b.last].name, b.num_bytes)
        for b in schedule.buffers
        if b.tier is Tier.GPU and b.label == label and b.memory_class is kind and b.first is not None
    ]


def test_a_tied_gradient_is_held_from_the_head_on() -> None:
    units = small_units("gpt2")
    schedule = lower(units, decide(units, Place.CPU), asynchronous=False)
    words, positions = (spec.num_params for spec in units[0].parameters)
    summed = f"{units[0].parameters[0].name} summed"
    held = _ends(schedule, "embed", MemoryClass.GRADIENTS)
    assert held == [("backward head", "flush embed", 2 * words)]
    others = _ends(schedule, "embed of its own", MemoryClass.GRADIENTS)
    assert others == [("backward embed", "flush embed", 2 * positions)]
    assert _ends(schedule, summed, MemoryClass.GRADIENTS)[0][2] == 2 * 2 * words
    schedule = lower(units, decide(units, Place.CPU, data_parallel=2), asynchronous=False)
    beside = _ends(schedule, summed, MemoryClass.GRADIENTS)[0][2]
    assert beside == 3 * 2 * words, "the gradient of positions has allocated the block that ranks reduce"


def test_gradients_pile_up_whole_until_ranks_agree() -> None:
    """ZeRO-1 over two micro-batches: the whole sum on every rank, reduced once."""
    decisions = decide(DENSE, Place.GPU, data_parallel=2, zero_stage=1, num_micro_batches=2)
    schedule = lower(DENSE, decisions, asynchronous=False)
    size = DENSE[1].num_params
    kind = MemoryClass.GRADIENTS
    name = "layers.0.attn"
    assert _ends(schedule, f"{name} unreduced", kind) == [(f"backward {name}", f"scatter {name} mb1", 2 * size)]
    assert _ends(schedule, f"{name} resident", kind) == [(f"scatter {name} mb1", f"update {name}#0", size)]


def test_activations_are_held_from_forward_or_recompute_to_backward() -> None:
    unit = DENSE[1]
    saved = lower(DENSE, decide(DENSE), asynchronous=False)
    again = lower(DENSE, decide(DENSE, recompute=True), asynchronous=False)
    kind = MemoryClass.ACTIVATIONS
    assert _ends(saved, unit.name, kind) == [(f"forward {unit.name}", f"backward {unit.name}", unit.saved_bytes)]
    assert _ends(again, unit.name, kind) == [(f"recompute {unit.name}", f"backward {unit.name}", unit.saved_bytes)]
    names = (f"forward {unit.name}", f"backward {unit.name}")
    assert _ends(again, f"{unit.segment} input", kind) == [(*names, unit.activation_output_bytes)]


@pytest.mark.parametrize(("zero_stage", "times"), [(0, 2), (1, 1), (2, 1), (3, 1)])
def test_ranks_reduce_all_gradients_once_or_reduce_and_gather_them(zero_stage: int, times: int) -> None:
    """Without shards it is an all-reduce, which sends twice what a reduce-scatter does."""
    decisions = decide(DENSE, Place.GPU, data_parallel=2, zero_stage=zero_stage)
    schedule = lower(DENSE, decisions, asynchronous=True)
    sent = sum(task.num_bytes for task in schedule.tasks if task.op is Op.SCATTER)
    assert sent == times * decisions.precision.gradient_bytes * sum(unit.num_params for unit in DENSE)
