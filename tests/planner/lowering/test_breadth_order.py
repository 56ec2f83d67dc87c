"""Schedules in breadth order: tiles of sequences pass a layer one after another."""

from collections import Counter

import pytest
from amount import examples
from cases import Case, cases, decide, random_prices
from hazards import violations
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from walked import NUM_ITERATIONS, ordered_by_rules

from planner.decisions import Place
from planner.graph import Batch, build_graph, segments, units
from planner.lowering import lower
from planner.lowering.compute import AGAIN
from planner.models import resolve_model
from planner.models.config import ModelConfigError
from planner.models.kernels import flop
from planner.schedule.tasks import Op
from planner.schedule.timeline import memory_use
from planner.simulate.machine import run

SLOW = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
TILED = cases(ours=True, tiled=True)


@settings(SLOW, max_examples=examples(150, 20))
@given(TILED)
def test_safe_under_any_timing(case: Case) -> None:
    schedule = case.schedule
    assert violations(schedule, case.units, case.decisions, ordered_by_rules(schedule)) == []


@settings(SLOW, max_examples=examples(60))
@given(TILED, st.integers(0, 2**32 - 1))
def test_memory_is_never_negative(case: Case, seed: int) -> None:
    timeline = run(case.schedule, *random_prices(case.schedule, seed), NUM_ITERATIONS)
    assume(timeline.period_s(1) > 0)
    for use in memory_use(timeline, 1).values():
        assert min(min(row) for row in zip(*use.num_bytes.values(), strict=True)) >= 0


@settings(SLOW, max_examples=examples(60))
@given(TILED)
def test_all_tiles_pass_a_segment_before_the_next_one_begins(case: Case) -> None:
    """Backward is the mirror image of forward."""
    cells = []
    for micro_batch in range(case.decisions.num_micro_batches):
        there = [
            (segment, micro_batch, tile) for segment in segments(case.units) for tile in range(segment[0].num_tiles)
        ]
        cells += [(Op.FORWARD, unit.name, number, tile) for segment, number, tile in there for unit in segment]
        for segment, number, tile in there[::-1]:
            if again := AGAIN.get(case.decisions.units[segment[0].name].activations):
                cells += [(again, unit.name, number, tile) for unit in segment]
            cells += [(Op.BACKWARD, unit.name, number, tile) for unit in segment[::-1]]
    computing = {Op.FORWARD, Op.BACKWARD, *AGAIN.values()}
    found = [(t.op, t.unit, t.micro_batch, t.tile) for t in case.schedule.tasks if t.op in computing]
    assert found == cells


@settings(SLOW, max_examples=examples(60))
@given(TILED)
def test_weights_come_at_most_twice_a_micro_batch_and_gradients_leave_once(case: Case) -> None:
    """As often as if there were no tiles; without them, so many micro-batches would bring weights each time."""
    counts = Counter((task.op, task.unit) for task in case.schedule.tasks)
    for unit in case.units:
        own = {name for name, of in counts if of == unit.name} & {Op.FETCH, Op.GATHER, Op.READ, Op.FLUSH, Op.SCATTER}
        users = 1 + sum(unit.name in other.shared_units for other in case.units)
        regathered = case.decisions.regathers(unit)
        for op in own:
            times = 1 if op in {Op.FLUSH, Op.SCATTER} else 2 * users
            assert counts[op, unit.name] <= times * case.decisions.num_micro_batches + regathered, (op, unit.name)


@pytest.mark.parametrize("num_slots", [1, 2])
def test_units_of_one_size_stay_until_the_last_tile_has_passed(num_slots: int) -> None:
    """Experts of a layer are many units of one size: a slot of their ring is one for each of them."""
    config = resolve_model("mixtral-8x7b").model_copy(update={"num_layers": 3})
    batch = Batch(4, 64, expert_units=4, segment_tile_sequences=1)
    found = units(build_graph(config, batch))
    decisions = decide(found, params="host", num_param_slots=num_slots)
    schedule = lower(found, decisions, asynchronous=True)
    counts = Counter(task.unit for task in schedule.tasks if task.op is Op.FETCH)
    experts = [unit.name for unit in found if ".experts." in unit.name]
    assert len(experts) == 12
    assert all(counts[name] <= 2 for name in experts)


@pytest.mark.parametrize("model", ["demo-llama", "gpt2", "opt-125m", "mixtral-8x7b"])
def test_tiles_together_are_the_whole(model: str) -> None:
    config = resolve_model(model).model_copy(update={"num_layers": 2})
    whole, tiled = (units(build_graph(config, Batch(4, 64, segment_tile_sequences=n))) for n in (None, 2))
    for one, other in zip(whole, tiled, strict=True):
        assert other.num_tiles == (2 if one.in_layer else 1)
        assert flop(other.forward) * other.num_tiles == flop(one.forward)
        assert (one.name, one.parameters) == (other.name, other.parameters)
        assert other.saved_bytes * other.num_tiles == pytest.approx(one.saved_bytes, rel=1e-2)


def test_less_is_held_inside_a_layer() -> None:
    """Of recomputed layers, all but inputs and outputs exist for one tile."""
    config = resolve_model("demo-llama").model_copy(update={"num_layers": 4})
    peaks = []
    for tile in (None, 4):  # then the loss needs most
        found = units(build_graph(config, Batch(16, 512, loss_tile_tokens=64, segment_tile_sequences=tile)))
        schedule = lower(found, decide(found, Place.CPU, recompute=True, params="host"), asynchronous=False)
        timeline = run(schedule, *random_prices(schedule, 1), NUM_ITERATIONS)
        peaks.append(max(use.peak_bytes for tier, use in memory_use(timeline, 1).items() if tier == "gpu"))
    assert peaks[1] < 0.6 * peaks[0]


@settings(SLOW, max_examples=examples(60))
@given(TILED)
def test_outputs_of_tiles_wait_for_the_last_one_in_both_passes(case: Case) -> None:
    """With gradients of the input beside those of the output; when all are there, they are put together."""
    buffers, tasks = case.schedule.buffers, case.schedule.tasks
    for segment in (segment for segment in segments(case.units) if segment[0].num_tiles > 1):
        one, count = segment[0].activation_output_bytes, segment[0].num_tiles
        held = Counter(
            (b.num_bytes, tasks[b.first].op, b.first == b.last) for b in buffers if b.label == around(segment)
        )
        for op, num_bytes in ((Op.FORWARD, one * (count - 1)), (Op.BACKWARD, 2 * one * (count - 1))):
            assert held[num_bytes, op, False] >= case.decisions.num_micro_batches
            assert held[one * count, op, True] == case.decisions.num_micro_batches


def around(segment) -> str:
    return f"{segment[0].segment} around tiles"


@pytest.mark.parametrize("size", [3, 5])
def test_a_tile_divides_the_micro_batch(size: int) -> None:
    with pytest.raises(ModelConfigError, match=f"segment_tile_sequences is {size}, but must divide the micro-batch"):
        build_graph(resolve_model("demo-llama"), Batch(4, 64, segment_tile_sequences=size))
