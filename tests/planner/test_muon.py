"""Muon in plans: whole matrices, two kinds of state in one unit, and products in the price of an update."""

import dataclasses
import itertools
import math

import pytest
from amount import examples
from cases import decide, small_units
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import machine
from test_bounds import check

from planner.choices.request import Request
from planner.choices.variants import variants
from planner.costs.model import CostModel
from planner.decisions import Place
from planner.lowering import lower
from planner.lowering.amounts import amounts_by
from planner.models import resolve_model
from planner.models.formulas.work import newton_schulz, operand_bytes, orthogonalization_bytes
from planner.models.kernels import flop
from planner.optimizers import is_hidden_matrix
from planner.plan.document import Plan
from planner.schedule.tasks import Lane, MemoryClass, Op, Tier
from planner.subgroups import unit_layout
from planner.verification import verify
from ullage.rivals import make_plan
from ullage.rivals.engines.catalogue import POLICIES, policies_of

MATRICES = st.tuples(st.integers(1, 40), st.integers(1, 40)).map(lambda shape: (shape[0] * shape[1], shape))
VECTORS = st.integers(1, 200).map(lambda size: (size, None))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_unit_without_trained_parameters_has_an_empty_layout(optimizer):
    layout = unit_layout((), optimizer, 2, 1000)
    assert not layout.starts
    assert not layout.shard_params


@given(st.lists(MATRICES | VECTORS, min_size=1, max_size=9).map(tuple), st.integers(1, 5), st.integers(1, 3000))
def test_no_matrix_is_cut(extents, num_shards, most):
    layout = unit_layout(extents, "muon", num_shards, most)
    ranges = sorted((start, start + size) for start, (size, _) in zip(layout.starts, extents, strict=True))
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(ranges))
    assert ranges[-1][1] <= num_shards * layout.shard_params
    assert sum(layout.sizes) == layout.shard_params
    cuts = [0, *itertools.accumulate(layout.sizes)]
    kinds = [subgroup.kind for subgroup in layout.subgroups]
    if any(matrix for _, matrix in extents):
        inside = [[] for _ in layout.subgroups]
        for start, (size, matrix) in zip(layout.starts, extents, strict=True):
            rank, begin = divmod(start, layout.shard_params)
            within = [i for i, (a, b) in enumerate(itertools.pairwise(cuts)) if a < begin + size and begin < b]
            assert begin + size <= layout.shard_params, "it lies in one shard"
            assert {kinds[i] for i in within} == {"muon" if matrix else "adamw"}
            if matrix:
                assert len(within) == 1, "it lies in one subgroup"
                inside[within[0]].append((rank, matrix))
        for subgroup, held in zip(layout.subgroups, inside, strict=True):
            # More than asked only where it is one matrix, on the rank that has most.
            ranks = [[matrix for rank, matrix in held if rank == each] for each in range(num_shards)]
            assert subgroup.num_params <= most or subgroup.kind == "muon"
            assert sorted(subgroup.matrices) in [sorted(of_rank) for of_rank in ranks] or not held
    else:
        assert set(kinds) == {"adamw"}
        assert layout == dataclasses.replace(
            unit_layout(extents, "adamw", num_shards, most), subgroups=layout.subgroups
        )


def test_subgroups_are_as_large_as_they_may_be():
    four = ((100, (10, 10)),) * 4 + ((10, None),)
    assert unit_layout(four, "muon", 1, 250).sizes == (200, 200, 10)
    assert unit_layout(four, "muon", 2, 250).sizes == (200, 10)
    assert unit_layout(four, "muon", 2, 150).sizes == (100, 100, 10)
    assert unit_layout(four, "muon", 1, 50).sizes == (100, 100, 100, 100, 10)
    assert unit_layout(four, "muon", 8, 250).sizes == (100, 10)  # no shard is shorter than a matrix
    uneven = ((300, (10, 30)), (200, (10, 20)), (100, (10, 10)))
    assert unit_layout(uneven, "muon", 2, 1).sizes == (300,)  # a cut after 200 would cut the largest
    assert unit_layout(uneven, "muon", 2, 1).starts == (0, 300, 500)


def test_hidden_matrices_are_those_of_layers():
    shapes = {spec.name: spec.shape for unit in small_units("opt-125m", 1) for spec in unit.parameters}
    assert not is_hidden_matrix("layers.0.empty", (0, 8))
    found = {name for name, shape in shapes.items() if is_hidden_matrix(name, shape)}
    path = "model.decoder.layers.0"
    assert found == {
        *(f"{path}.self_attn.{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "out_proj")),
        f"{path}.fc1.weight",
        f"{path}.fc2.weight",
    }


@pytest.mark.parametrize("place", [Place.GPU, Place.CPU, Place.STREAM])
def test_matrices_keep_one_buffer_and_all_else_two(place):
    units = small_units("opt-125m")
    schedule = lower(units, decide(units, place, optimizer="muon"), asynchronous=True)
    extents = [extent for unit in units for extent in unit.extents]
    expected = sum(size * (8 if matrix else 12) for size, matrix in extents)
    tier = Tier.GPU if place is Place.GPU else Tier.HOST
    held = [b for b in schedule.buffers if b.tier is tier and b.memory_class is MemoryClass.OPTIMIZER]
    assert sum(b.num_bytes for b in held if b.first is None) == expected
    if place is Place.STREAM:
        stored = sum(task.num_bytes for task in schedule.tasks if task.op is Op.STORE)
        assert stored == expected


@pytest.mark.parametrize("lane", [Lane.CPU, Lane.GPU_UPDATE])
def test_an_update_takes_its_pass_over_memory_and_its_products(lane):
    units, profile = small_units("demo-llama"), machine()
    place = Place.CPU if lane is Lane.CPU else Place.GPU
    cost = CostModel.of(profile, units, decide(units, place, optimizer="muon"))
    schedule = lower(units, decide(units, place, optimizer="muon"), asynchronous=True)
    updates = [task for task in schedule.tasks if task.op is Op.UPDATE]
    assert {bool(task.matrices) for task in updates} == {True, False}
    for task in updates:
        alone = cost.price(dataclasses.replace(task, matrices=())).duration_s  # AdamW's
        if task.matrices:
            products_s = sum(cost.compute_s(newton_schulz(*shape)) for shape in task.matrices)
            duration_s = cost.price(task).duration_s
            if lane is Lane.GPU_UPDATE:
                assert duration_s == pytest.approx(alone * 20 / 28 + products_s)
            else:
                assert duration_s > alone * 20 / 28 + products_s  # by far fewer FLOP/s
            if lane is Lane.GPU_UPDATE:
                held = [b for b in schedule.buffers if b.first == b.last == task.index]
                most_bytes = max(map(orthogonalization_bytes, task.matrices))
                assert [(b.tier, b.num_bytes) for b in held] == [(Tier.GPU, most_bytes)]
    on_host = [b.num_bytes for b in schedule.buffers if (b.tier, b.memory_class) == (Tier.HOST, MemoryClass.WORKSPACE)]
    most_bytes = max(orthogonalization_bytes(shape) for task in updates for shape in task.matrices)
    assert on_host == ([most_bytes] if lane is Lane.CPU else [])  # one after another
    assert any("assumed to run at 50 GFLOP/s a core" in warning for warning in cost.warnings) is (lane is Lane.CPU)


@settings(max_examples=examples(15, 3), deadline=None)
@given(st.data())
def test_bounds_hold_for_anything_that_can_be_decided(data):
    """Of our engine; what others do, they do with other optimizers."""
    tensor_parallel = data.draw(st.sampled_from([1, 2]))
    units = small_units(data.draw(st.sampled_from(["demo-llama", "opt-125m"])), 2, tensor_parallel=tensor_parallel)
    ranks = data.draw(st.sampled_from([1, 2, 3]))
    zero_stage = data.draw(st.integers(0, 3)) if ranks > 1 else 0
    options = {
        "optimizer": "muon",
        "data_parallel": ranks,
        "tensor_parallel": tensor_parallel,
        "zero_stage": zero_stage,
        "subgroup_params": data.draw(st.sampled_from([100_000, 10**8])),
        "clip": data.draw(st.booleans()),
        "num_micro_batches": data.draw(st.integers(1, 2)),
        "num_nvme_slots": 12,
    }
    params = data.draw(st.sampled_from(["gpu", "host"])) if zero_stage in {0, 3} else "gpu"
    place = data.draw(st.sampled_from([Place.STREAM, Place.CPU, Place.NVME, *([Place.GPU] * (params == "gpu"))]))
    check(units, decide(units, place, params=params, **options), machine())


@pytest.fixture(scope="module")
def plan() -> Plan:
    config = resolve_model("demo-llama")
    request = Request(config, machine(gpu_bytes=220e6), seq_len=128, micro_batch=1, optimizer="muon")
    return make_plan(request, 60)


def test_a_plan_is_verified_and_certified(plan):
    assert plan.request.optimizer == "muon"
    assert verify(plan).iteration_s == pytest.approx(plan.prediction.iteration_s, rel=1e-9)
    assert 0 < plan.certificate.bound_s <= plan.prediction.iteration_s
    assert plan.decisions.pipeline_parallel == 1


def test_engines_that_have_no_muon_are_left_out(plan):
    assert [row.name for row in plan.engines] == policies_of("muon") == ["gpu-only"]
    assert policies_of("lion") == list(POLICIES)


def test_tensor_parallel_ranks_divide_matrices_and_their_products():
    """Each has a half of every matrix, orthogonalizes about a half of them, and says what that exchanges and holds."""
    whole, shared = (small_units("demo-llama", tensor_parallel=ranks) for ranks in (1, 2))
    of_one, of_two = (
        [subgroup for unit in units for subgroup in decide(units, **options).subgroups(unit) if subgroup.matrices]
        for units, options in ((whole, {}), (shared, {"tensor_parallel": 2}))
        for options in [options | {"optimizer": "muon"}]
    )
    for one, two in zip(of_one, of_two, strict=True):
        assert 2 * two.num_params == one.num_params
        assert two.exchanged_bytes == 4 * two.num_params
        assert not one.exchanged_bytes
        flop_of = [sum(flop(newton_schulz(*shape)) for shape in each.matrices) for each in (one, two)]
        assert set(two.matrices) < set(one.matrices) or len(two.matrices) < len(one.matrices)
        assert flop_of[0] / 2 <= flop_of[1] < flop_of[0]
        sent, received = 2 * two.num_params, max(2 * sum(map(math.prod, two.matrices)), 0)
        assert two.workspace_bytes >= sent + received + max(map(operand_bytes, two.matrices))


@pytest.mark.parametrize("lane", [Lane.CPU, Lane.GPU_UPDATE])
def test_the_exchange_is_part_of_the_price(lane):
    profile = machine(devices_per_node=2)
    units = small_units("demo-llama", tensor_parallel=2)
    decided = decide(units, Place.CPU if lane is Lane.CPU else Place.GPU, optimizer="muon", tensor_parallel=2)
    cost = CostModel.of(profile, units, decided)
    updates = [t for t in lower(units, decided, asynchronous=True).tasks if t.op is Op.UPDATE and t.matrices]
    assert updates
    for task in updates:
        alone_s = cost.price(dataclasses.replace(task, num_bytes=0)).duration_s
        exchanges_s = cost.price(task).duration_s - alone_s
        fabric = profile.intra_node
        assert exchanges_s > task.num_bytes / 2 / fabric.bytes_per_s.value
        if lane is Lane.CPU:
            assert exchanges_s == pytest.approx(task.num_bytes / 1e9)
    assert any("parts of Muon's matrices in host memory" in w for w in cost.warnings) is (lane is Lane.CPU)


def test_ranks_that_share_layers_are_among_the_choices():
    config = resolve_model("demo-llama")
    request = Request(config, machine(devices_per_node=2), num_devices=2, seq_len=128, global_batch=4, optimizer="muon")
    assert {variant.choice.tensor_parallel for variant in variants(request)} == {1, 2}


def test_units_of_one_size_with_other_matrices_are_laid_out_apart():
    one = next(unit for unit in small_units("demo-llama") if unit.name == "layers.0.attn")
    first = one.parameters[1]
    turned = dataclasses.replace(first, shape=(first.num_params // 2, 2))
    operators = (
        dataclasses.replace(each, parameters=tuple(turned if spec is first else spec for spec in each.parameters))
        for each in one.operators
    )
    other = dataclasses.replace(one, name="other", operators=tuple(operators))
    assert other.num_params == one.num_params
    decided = decide((one, other), Place.GPU, optimizer="muon")
    amounts_of = amounts_by(decided)
    amounts = [amounts_of(unit, decided.units[unit.name]) for unit in (one, other)]
    assert [amount.subgroups for amount in amounts] == [decided.subgroups(unit) for unit in (one, other)]
    assert amounts[0].subgroups != amounts[1].subgroups
