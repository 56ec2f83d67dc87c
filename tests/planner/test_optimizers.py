"""Other optimizers than AdamW: less state to hold and to move, in plans, prices, bounds and certificates."""

import dataclasses
import json
from pathlib import Path
from typing import get_args

import pytest
from amount import examples
from cases import decide, small_units
from hypothesis import example, given, settings
from hypothesis import strategies as st
from machines import machine
from test_bounds import check

from hwprofiles.profile import NarrowUpdate
from hwprofiles.quantity import Provenance, Quantity
from planner.choices.request import Request
from planner.choices.variants import variants
from planner.costs.model import CostModel
from planner.decisions import BF16, FP32, Place, Precision, Sharding
from planner.decisions.precision import SPLIT_OPERATOR_BYTES
from planner.lowering import lower
from planner.models import resolve_model
from planner.optimizers import OPTIMIZERS
from planner.plan.document import Plan
from planner.schedule.schedule import Schedule
from planner.schedule.tasks import Lane, MemoryClass, Op, Tier
from planner.subgroups import unit_layout
from planner.verification import verify
from ullage.rivals import make_plan

ONE_BUFFER = ("sgd", "adagrad", "lion")
NARROW = (*ONE_BUFFER, "adamw-bf16", "adamw-8bit")
ROUNDED = Precision(weights="bf16", master="bf16")
WHOLE, SPLIT, NARROW_MASTER = {}, {"split_masters": True}, {"precision": ROUNDED}  # forms of master copies
MOVED = {"adamw-bf16": 20, "adamw-8bit": 16 + 16 / 256}  # bytes of an update per parameter
HELD = {"adamw": 12, **dict.fromkeys(NARROW, 8), "adamw-8bit": 6 + 8 / 256}  # bytes of state per parameter


def held_bytes(schedule: Schedule, tier: Tier) -> int:
    return sum(b.num_bytes for b in schedule.buffers if b.tier is tier and b.memory_class is MemoryClass.OPTIMIZER)


@pytest.mark.parametrize("optimizer", ("adamw", *NARROW))
@pytest.mark.parametrize("weights", ["bf16", "fp32"])
@pytest.mark.parametrize("place", [Place.GPU, Place.CPU])
def test_state_takes_what_the_optimizer_keeps(optimizer, weights, place):
    units = small_units()
    decisions = decide(units, place, precision=Precision(weights=weights), optimizer=optimizer)
    schedule = lower(units, decisions, asynchronous=True)
    total = sum(unit.num_params for unit in units)
    # On the device the fp32 weight is the master copy.
    per_param = HELD[optimizer] - 4 * (weights == "fp32" and place is Place.GPU)
    tier, other = (Tier.GPU, Tier.HOST) if place is Place.GPU else (Tier.HOST, Tier.GPU)
    assert held_bytes(schedule, tier) == per_param * total
    assert held_bytes(schedule, other) == 0


@pytest.mark.parametrize("optimizer", ("adamw", *NARROW))
def test_slots_take_the_state_that_passes_through_them(optimizer):
    units = small_units()
    decisions = decide(units, Place.STREAM, optimizer=optimizer, num_state_slots=2)
    largest = max(unit.num_params for unit in units)
    per_param = HELD[optimizer] + 2  # with the bf16 gradient
    assert held_bytes(lower(units, decisions, asynchronous=True), Tier.GPU) == 2 * per_param * largest


@pytest.mark.parametrize("optimizer", ONE_BUFFER)
@pytest.mark.parametrize("place", [Place.CPU, Place.STREAM])
def test_an_update_takes_adamws_time_by_the_bytes_that_it_moves(optimizer, place):
    units, profile = small_units(), machine()

    def prices_of(name, op):
        decisions = decide(units, place, optimizer=name)
        schedule = lower(units, decisions, asynchronous=True)
        cost = CostModel.of(profile, units, decisions)
        return [cost.price(task) for task in schedule.tasks if task.op is op]

    for mine, adamw in zip(prices_of(optimizer, Op.UPDATE), prices_of("adamw", Op.UPDATE), strict=True):
        assert mine.duration_s == pytest.approx(adamw.duration_s * 20 / 28)
        assert dict(mine.uses) == pytest.approx(dict(adamw.uses))  # no more of DRAM per second
    for mine, adamw in zip(prices_of(optimizer, Op.STORE), prices_of("adamw", Op.STORE), strict=True):
        assert mine.duration_s == pytest.approx(adamw.duration_s * 8 / 12)


def test_memory_feeds_an_update_of_fewer_bytes_faster():
    units = small_units()
    slow = machine(cpu_params_per_s=1e12)  # memory binds: 1e11 B/s
    for name, num_bytes in (("adamw", 28), ("lion", 20)):
        schedule = lower(units, decide(units, Place.CPU, optimizer=name), asynchronous=True)
        cost = CostModel(slow, units, Sharding(optimizer=name))
        update = next(task for task in schedule.tasks if task.lane is Lane.CPU)
        assert cost.price(update).duration_s == pytest.approx(num_bytes * update.num_params / 1e11)


@pytest.mark.part(4)
@pytest.mark.parametrize("place", [Place.STREAM, Place.CPU, Place.NVME])
@pytest.mark.parametrize("params", ["gpu", "host"])
@pytest.mark.parametrize(
    ("optimizer", "form"),
    [
        *((name, WHOLE) for name in NARROW),
        *((name, NARROW_MASTER) for name in MOVED),
        *((name, SPLIT) for name in ("adamw", "lion")),
    ],
)
def test_bounds_hold_where_what_moves_and_holds_state_binds(optimizer, form, place, params):
    """Drives, links and DRAM are what binds here, so that conditions which ask for AdamW's bytes would fail."""
    units = small_units("demo-llama", 6)
    profile = machine(flop_per_s=1e16, issue_s=1e-9, cpu_params_per_s=1e12, gpu_params_per_s=1e13)
    for clip in (True, False):
        starts = {"update_start": "step" if clip else "backward", "update_order": "forward" if clip else "backward"}
        options = {"clip": clip, "subgroup_params": 1_000_000, "num_state_slots": 3, "num_nvme_slots": 12, **starts}
        options |= {"optimizer": optimizer, **form}
        check(units, decide(units, place, params=params, **options), profile)


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    config = resolve_model("demo-llama")
    # A device on which AdamW's state does not fit by half.
    request = Request(config, machine(gpu_bytes=180e6, cpu_params_per_s=2e8), seq_len=128, micro_batch=1)
    requests = {name: dataclasses.replace(request, optimizer=name) for name in ("adamw", "lion")}
    requests["rounded"] = dataclasses.replace(request, optimizer="adamw-8bit", precision=ROUNDED)
    return {name: make_plan(each, 80) for name, each in requests.items()}


@pytest.mark.parametrize("optimizer", MOVED)
@pytest.mark.parametrize("place", [Place.GPU, Place.STREAM, Place.CPU, Place.NVME])
@pytest.mark.parametrize("params", ["gpu", "host"])
def test_a_master_copy_in_bf16_takes_two_bytes_less_and_the_place_of_weights(optimizer, place, params):
    """Weights that are fetched are the master copies, as far as the host has these."""
    if place is Place.GPU and params == "host":
        return
    units = small_units()
    total = sum(unit.num_params for unit in units)
    wide, rounded = (held(units, place, params, optimizer, form) for form in (WHOLE, NARROW_MASTER))
    tier = {Place.GPU: Tier.GPU, Place.NVME: Tier.NVME}.get(place, Tier.HOST)
    versions = 2 if tier is Tier.NVME else 1
    on_device = 2 * (place is Place.GPU)  # there the weight is the master copy
    less = versions * (2 + on_device) * total
    assert wide[tier][MemoryClass.OPTIMIZER] - rounded[tier][MemoryClass.OPTIMIZER] == less
    copies = 2 * total if place is Place.CPU or (params == "host" and place is Place.STREAM) else 0
    assert wide[Tier.HOST][MemoryClass.PARAMETERS] - rounded[Tier.HOST][MemoryClass.PARAMETERS] == copies


def held(units, place, params, optimizer, form, num_micro_batches=1):
    """Return the bytes of state, parameters and gradients by tier."""
    settings = {"params": params, "optimizer": optimizer, **form}
    decisions = decide(units, place, **settings, num_micro_batches=num_micro_batches)
    classes = (MemoryClass.OPTIMIZER, MemoryClass.PARAMETERS, MemoryClass.GRADIENTS)
    sizes = {tier: dict.fromkeys(classes, 0) for tier in Tier}
    for buffer in lower(units, decisions, asynchronous=True).buffers:
        if buffer.memory_class in classes:
            sizes[buffer.tier][buffer.memory_class] += buffer.num_bytes
    return sizes


@pytest.mark.parametrize("num_micro_batches", [1, 2])
@pytest.mark.parametrize("optimizer", MOVED)
@pytest.mark.parametrize("params", ["gpu", "host"])
def test_split_masters_take_the_place_of_weights_on_the_host(optimizer, params, num_micro_batches):
    """Gradients of one micro-batch took that place before, and so they have memory of their own; so have all others."""
    units = small_units()
    sizes = [unit.num_params for unit in units]
    whole, split = (
        held(units, Place.CPU, params, optimizer, form, num_micro_batches)[Tier.HOST] for form in (WHOLE, SPLIT)
    )
    ties = sum(2 * -(-size // 256) for size in sizes)
    assert split[MemoryClass.OPTIMIZER] - whole[MemoryClass.OPTIMIZER] == ties
    assert whole[MemoryClass.PARAMETERS] == 2 * sum(sizes)
    assert split[MemoryClass.PARAMETERS] == 0
    assert split[MemoryClass.GRADIENTS] == 2 * sum(sizes)
    in_place = num_micro_batches == 1 or params == "gpu"
    assert whole[MemoryClass.GRADIENTS] == (0 if in_place else 2 * sum(sizes))
    assert BF16.update_bytes_per_param(optimizer, splits=True) == MOVED[optimizer] - 2


@pytest.mark.parametrize("place", [Place.CPU, Place.STREAM, Place.GPU])
@pytest.mark.parametrize(("kind", "fuses"), [("gpu", True), ("gpu", False), ("host", False)])
def test_an_update_of_split_masters_takes_the_time_of_what_it_moves(place, kind, fuses):
    units, profile = small_units(), machine()
    device = profile.device.model_copy(update={"kind": kind, "fuses_updates": fuses})
    profile = profile.model_copy(update={"device": device})

    def prices_of(form):
        decisions = decide(units, place, **form)
        schedule, cost = lower(units, decisions, asynchronous=True), CostModel.of(profile, units, decisions)
        return [cost.price(task).duration_s for task in schedule.tasks if task.op is Op.UPDATE]

    operators = SPLIT_OPERATOR_BYTES if place is Place.STREAM and kind == "gpu" and not fuses else 0
    moved = 28 if place is Place.GPU else 26 + operators
    for split, whole in zip(prices_of(SPLIT), prices_of(WHOLE), strict=True):
        assert split == pytest.approx(whole * moved / 28)


@pytest.mark.parametrize("place", [Place.STREAM, Place.NVME, Place.GPU])
@pytest.mark.parametrize("params", ["gpu", "host", "nvme"])
def test_split_masters_take_no_more_anywhere(place, params):
    if (params == "host" and place is Place.GPU) or (params == "nvme" and place is not Place.NVME):
        return
    units = small_units()
    whole, split = (held(units, place, params, "adamw", form) for form in (WHOLE, SPLIT))
    for tier in Tier:
        versions = 2 if tier is Tier.NVME else 1
        ties = versions * sum(2 * -(-unit.num_params // 256) for unit in units)
        assert sum(split[tier].values()) <= sum(whole[tier].values()) + ties
    assert place is not Place.GPU or split == whole
    stored = whole[Tier.NVME][MemoryClass.PARAMETERS]
    assert (stored > 0) == (params == "nvme")
    assert split[Tier.NVME][MemoryClass.PARAMETERS] == 0, "the weight is a part of the state"


@pytest.mark.parametrize(("optimizer", "moved"), MOVED.items())
def test_narrow_moments_take_fewer_bytes_in_memory_and_in_updates(optimizer, moved):
    for weights in ("bf16", "fp32"):
        precision = Precision(weights=weights)
        assert precision.state_bytes_per_param(optimizer) == HELD[optimizer]
        assert precision.update_bytes_per_param(optimizer) == moved
    assert ROUNDED.state_bytes_per_param(optimizer) == HELD[optimizer] - 2
    assert ROUNDED.update_bytes_per_param(optimizer) == moved - 6  # 2 of reading, 2 of writing, 2 of the weight


@pytest.mark.parametrize("num_shards", [1, 2, 3])
@pytest.mark.parametrize("most", [1, 700, 5000])
def test_parameters_shards_and_subgroups_begin_with_a_block(num_shards, most):
    sizes = (1000, 256, 64, 10_000, 1)
    layout = unit_layout(tuple((size, None) for size in sizes), "adamw-8bit", num_shards, most)
    assert layout.starts == (0, 1024, 1280, 1536, 11_776)
    assert all(size % 256 == 0 and size <= max(most, 256) for size in layout.sizes)
    assert sum(layout.sizes) == layout.shard_params
    assert 12_032 <= num_shards * layout.shard_params < 12_032 + 256 * num_shards
    assert layout.has_gaps
    assert not unit_layout(((512, None), (256, None)), "adamw-8bit", num_shards, most).has_gaps


@pytest.mark.parametrize("precision", [BF16, ROUNDED], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("optimizer", "moved"), MOVED.items())
def test_on_a_gpu_narrow_moments_cost_the_time_and_memory_of_operators_or_that_of_one_kernel(
    optimizer, moved, precision, monkeypatch
):
    monkeypatch.setattr("planner.optimizers.UPDATED_AT_ONCE", 1_000_000)
    units, gpu = small_units(), machine()
    row, moved = precision.optimizer_state(optimizer), moved - 6 * (precision is ROUNDED)
    assert row.master_bytes == precision.master_bytes
    operators, host = (
        gpu.model_copy(update={"device": gpu.device.model_copy(update=changes)})
        for changes in ({"fuses_updates": False}, {"kind": "host"})
    )

    def updates(name, profile):
        decisions = decide(units, Place.GPU, optimizer=name, precision=BF16 if name == "adamw" else precision)
        schedule = lower(units, decisions, asynchronous=True)
        cost = CostModel.of(profile, units, decisions)
        held = {b.label: b.num_bytes for b in schedule.buffers if b.memory_class is MemoryClass.WORKSPACE}
        return [(cost.price(task).duration_s, task, held) for task in schedule.tasks if task.op is Op.UPDATE]

    # A host of no cores: memory alone binds.
    for profile, num_bytes in ((operators, row.gpu_update_bytes), (gpu, moved), (host, moved)):
        for mine, adamw in zip(updates(optimizer, profile), updates("adamw", profile), strict=True):
            assert mine[0] == pytest.approx(adamw[0] * num_bytes / 28)
            name = f"{mine[1].unit} update"
            assert mine[2].get(name, 0) == 24 * min(mine[1].num_params, 1_000_000)
            assert adamw[2].get(name, 0) == 0


@pytest.mark.parametrize("precision", [BF16, ROUNDED], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("optimizer", "moved"), MOVED.items())
def test_on_few_cores_arithmetic_binds_an_update_of_narrow_moments(optimizer, moved, precision):
    units, core_s = small_units(), precision.optimizer_state(optimizer).host_core_s
    moved -= 6 * (precision is ROUNDED)
    fast = machine(cpu_params_per_s=1e12)  # a copy of 20 bytes takes 0.2 ns
    for num_cores in (1, 4, 64):
        host = fast.host.model_copy(update={"num_cores": num_cores, "num_optimizer_cores": num_cores})
        profile = fast.model_copy(update={"host": host})
        decisions = decide(units, Place.CPU, optimizer=optimizer, precision=precision)
        cost = CostModel.of(profile, units, decisions)
        for task in lower(units, decisions, asynchronous=True).tasks:
            if task.op is Op.UPDATE:
                expected = task.num_params * max(core_s / num_cores, moved / 1e11)
                assert cost.price(task).duration_s == pytest.approx(expected)


@settings(max_examples=examples(60), deadline=None)
@given(st.sampled_from(get_args(NarrowUpdate)), st.floats(0, 1e-7), st.integers(1, 64), st.sampled_from(["cpu", "gpu"]))
@example("adamw-split", 1e-8, 2, "cpu")
def test_a_measured_time_per_core_replaces_the_constant_and_no_update_is_faster_than_memory(
    name, core_s, num_cores, place
):
    units, given_machine = small_units(), machine(cpu_params_per_s=1e10)
    optimizer, rounded, _ = name.removesuffix("-split").partition("-rounded")
    form = SPLIT if name.endswith("-split") else NARROW_MASTER if rounded else WHOLE
    decisions = decide(units, Place(place), optimizer=optimizer, **form)
    device = {"kind": "host", "num_cores": num_cores} if place == "gpu" else {}

    def cost_with(core_s):
        measured = Quantity(value=core_s, unit="s", provenance=Provenance(origin="measured", source="here"))
        host = {"num_cores": num_cores, "num_optimizer_cores": num_cores, "narrow_update_s": {name: measured}}
        parts = {"host": host, "device": device}
        changed = {part: getattr(given_machine, part).model_copy(update=update) for part, update in parts.items()}
        return CostModel.of(given_machine.model_copy(update=changed), units, decisions)

    cost, memory = cost_with(core_s), cost_with(0.0)
    updates = [task for task in lower(units, decisions, asynchronous=True).tasks if task.op is Op.UPDATE]
    assert updates
    for task in updates:
        memory_s = memory.price(task).duration_s
        assert memory_s > 0
        arithmetic_s = task.num_params * core_s / num_cores if task.splits or form is not SPLIT else 0.0
        assert cost.price(task).duration_s == pytest.approx(max(memory_s, arithmetic_s))
        assert task.splits == (form is SPLIT and place == "cpu")  # what is resident is whole
    assert not any("per parameter and core" in warning for warning in cost.warnings)


@pytest.mark.parametrize("name", sorted({*get_args(NarrowUpdate)} - {"adamw-split"}))
def test_constants_are_what_the_benchmark_measured(name):
    results = Path(__file__).parents[2] / "benchmarks" / "results" / "cpu_narrow_state_epyc.json"
    optimizer, rounded, _ = name.partition("-rounded")
    wanted = {
        "optimizer": optimizer + " --precision master=bf16" * bool(rounded),
        "num_threads": 1,
        "num_params": 2**24 + 2**16,
    }
    (row,) = (r for r in json.loads(results.read_text("utf-8"))["results"] if wanted.items() <= r.items())
    state = (ROUNDED if rounded else BF16).optimizer_state(optimizer)
    assert state.host_core_s == pytest.approx(row["core_s_per_param"], rel=0.05)


def test_a_constant_that_binds_is_named_in_a_warning():
    units = small_units()
    decisions = decide(units, Place.CPU, optimizer="adamw-8bit")
    for params_per_s, binds in ((1e12, True), (1e3, False)):
        cost = CostModel.of(machine(cpu_params_per_s=params_per_s), units, decisions)
        cost.prices(lower(units, decisions, asynchronous=True))
        found = [warning for warning in cost.warnings if "adamw-8bit are assumed to take" in warning]
        assert bool(found) is binds


def test_less_state_makes_faster_plans_and_lower_bounds(plans):
    adamw, lion = plans["adamw"], plans["lion"]
    assert lion.decisions.optimizer == "lion"
    assert lion.prediction.iteration_s < adamw.prediction.iteration_s
    assert lion.certificate.bound_s < adamw.certificate.bound_s


def test_a_plan_with_a_master_copy_in_bf16_can_be_executed_and_changes_no_numerics_but_its_own(plans):
    rounded, adamw = plans["rounded"], plans["adamw"]
    assert rounded.decisions.pipeline_parallel == 1
    assert rounded.decisions.precision == ROUNDED
    assert {row.name for row in adamw.engines if "no master copy" in (row.numerics or "")} == {"llmq", "megatrain"}
    assert not any("no master copy" in (row.numerics or "") for row in rounded.engines)


@pytest.mark.parametrize("optimizer", sorted(set(OPTIMIZERS) - set(MOVED)))
def test_other_optimizers_keep_no_master_copy_in_bf16(optimizer):
    request = Request(resolve_model("demo-llama"), machine(), seq_len=128)
    with pytest.raises(
        ValueError, match=f"{optimizer} keeps only one in fp32; choose optimizer adamw-bf16 or adamw-8bit"
    ):
        dataclasses.replace(request, optimizer=optimizer, precision=ROUNDED)


@pytest.mark.parametrize("name", ["adamw", "lion", "rounded"])
def test_plans_of_every_optimizer_are_verified(plans, name):
    assert plans[name].request.optimizer == plans[name].decisions.optimizer
    assert plans[name].request.precision == plans[name].decisions.precision
    verified = verify(plans[name])
    assert verified.iteration_s == pytest.approx(plans[name].prediction.iteration_s, rel=1e-9)


def test_master_copies_are_split_where_weights_are_in_bf16_and_their_values_in_fp32():
    units = small_units()
    assert decide(units, Place.CPU, **SPLIT).splits(Place.CPU)
    for precision, words in ((FP32, "not fp32 and fp32"), (ROUNDED, "not bf16 and bf16")):
        with pytest.raises(
            ValueError, match=f"weights in bf16 and master copies in fp32, {words}; leave split_masters out"
        ):
            decide(units, Place.CPU, precision=precision, **SPLIT)
        asked = Request(resolve_model("demo-llama"), machine(gpu_bytes=1e8), seq_len=128, optimizer="adamw-8bit")
        asked = dataclasses.replace(asked, precision=precision)
        assert not any(each.choice.split_masters for each in variants(asked))
