"""Schedules do what training needs, under any timing; the checker itself is checked on schedules with broken rules."""

import dataclasses
import itertools
from collections import Counter

import pytest
from amount import examples
from cases import MODELS, Case, as_rival, cases, decide, random_prices, small_units
from hazards import violations
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from walked import NUM_ITERATIONS, ordered_by_rules, ordered_in

from planner.costs.model import CostModel
from planner.decisions import Place, Sharding
from planner.graph import Batch, build_graph, units
from planner.lowering import slots
from planner.lowering.amounts import amounts_by
from planner.models import resolve_model
from planner.placements import Mix, mixed
from planner.schedule.schedule import Schedule
from planner.schedule.tasks import Lane, Op, Phase
from planner.setup import Setup
from planner.simulate.machine import run
from ullage.rivals.decisions import GradientPath, HostUpdate
from ullage.rivals.engines.catalogue import POLICIES, STORAGE_POLICIES, can_run
from ullage.rivals.lowering import lower
from ullage.rivals.passes.gradients import SWAPPER_SLOTS
from ullage.rivals.precision import RivalPrecision

ALL_POLICIES = POLICIES | STORAGE_POLICIES
SLOW = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@settings(SLOW, max_examples=examples(250))
@given(st.one_of(cases(), cases(in_fp8=True)))
def test_safe_under_any_timing(case: Case) -> None:
    schedule = case.schedule
    assert violations(schedule, case.units, case.decisions, ordered_by_rules(schedule)) == []


@settings(SLOW, max_examples=examples(50))
@given(cases(), st.integers(0, 2**32 - 1))
def test_safe_in_simulated_time(case: Case, seed: int) -> None:
    """The simulator keeps the rules from which safety follows, whatever tasks take and share."""
    timeline = run(case.schedule, *random_prices(case.schedule, seed), NUM_ITERATIONS)
    assert violations(case.schedule, case.units, case.decisions, ordered_in(timeline)) == []


@settings(SLOW, max_examples=examples(20))
@given(st.sampled_from(MODELS), st.sampled_from(sorted(ALL_POLICIES)), st.sampled_from([1, 4]), st.integers(1, 2))
def test_every_engine_policy_is_safe(model: str, policy: str, ranks: int, num_micro_batches: int) -> None:
    units = small_units(model)
    setup = Setup(units, Sharding(data_parallel=ranks, num_micro_batches=num_micro_batches, subgroup_params=1_000_000))
    for decisions in ALL_POLICIES[policy](setup) if can_run(policy, setup, 1) else ():
        if decisions.prepare_bytes is not None:
            continue  # tests/rivals/test_other_engines.py
        schedule = lower(units, decisions, asynchronous=True)
        assert violations(schedule, units, decisions, ordered_by_rules(schedule)) == []


def test_equal_amounts_are_each_units_own() -> None:
    """What is worked out once for several units is what each would have been given by itself."""
    units = small_units(num_layers=5)
    decisions = decide(units, Place.STREAM)
    ways = itertools.product(["gpu", "host"], ["gpu", "host"])
    by_segment = {
        f"layers.{layer}": {"params": params, "streamed_gradients": g} for layer, (params, g) in enumerate(ways)
    }
    by_segment["layers.4"] = {"update": (Place.CPU,)}
    chosen = {
        unit.name: decisions.units[unit.name].model_copy(update=by_segment.get(unit.segment, {})) for unit in units
    }
    decisions = decisions.model_copy(update={"units": chosen})
    shared = amounts_by(decisions)
    amounts = [dataclasses.asdict(shared(unit, chosen[unit.name])) for unit in units]
    assert amounts == [dataclasses.asdict(amounts_by(decisions)(unit, chosen[unit.name])) for unit in units]
    assert len({unit.segment for unit in units} & by_segment.keys()) == 5


# Between them these need every kind of dependency.
DENSE = small_units("demo-llama")
BROKEN = {
    "cpu, overlapped": decide(DENSE, Place.CPU),
    "cpu, no overlap": decide(DENSE, Place.CPU, overlap_next_forward=False, host_update=HostUpdate.DEEPSPEED),
    "cpu, deepspeed": decide(DENSE, Place.CPU, gradient_path=GradientPath.ZERO3_ASYNC, num_micro_batches=2),
    "cpu, fetched": decide(DENSE, Place.CPU, params="host", recompute=True),
    "fetched, no overlap": decide(DENSE, Place.CPU, params="host", overlap_next_forward=False),
    "streamed": decide(DENSE, Place.STREAM, subgroup_params=1_000_000),
    "streamed, fetched": decide(DENSE, Place.STREAM, params="host", num_state_slots=1),
    "gpu": decide(DENSE, Place.GPU, num_micro_batches=2),
    "zero-1": decide(DENSE, Place.GPU, data_parallel=2, zero_stage=1),
    "zero-2": decide(DENSE, Place.CPU, data_parallel=2, zero_stage=2),
    "zero-3": decide(DENSE, Place.CPU, data_parallel=2, zero_stage=3),
    "zero-3, fetched": decide(DENSE, Place.CPU, data_parallel=2, zero_stage=3, params="host"),
    "nvme": decide(DENSE, Place.NVME, params="nvme", num_nvme_slots=1, num_param_slots=1),
    "nvme, shared buffers": decide(DENSE, Place.NVME, clip=False, num_nvme_slots=2, subgroup_params=1_000_000),
    "nvme, deepspeed": decide(
        DENSE,
        Place.NVME,
        gradient_path=GradientPath.ZERO3_PINNED,
        spill_gradients=True,
        num_nvme_slots=1,
        host_update=HostUpdate.DEEPSPEED,
        overlap_next_forward=False,
    ),
    "offloaded": decide(DENSE, activations="offload", num_activation_slots=1, num_micro_batches=2),
    "offloaded to nvme": decide(DENSE, activations="offload-nvme", num_activation_slots=1),
    "no clip": decide(DENSE, Place.CPU, clip=False, update_start="backward", update_order="backward"),
}
# Time, not safety: the thread that updates waits for its own unpinned copy, and the caller steps before it computes.
NOT_FOR_SAFETY = {
    ("after", Op.PASS, Op.UPLOAD),
    ("after", Op.STEP, Op.BACKWARD),
    ("after", Op.STEP, Op.CLIP),
    ("after_previous", Op.FORWARD, Op.STEP),
    # An engine that overlaps nothing waits for what is written to NVMe.
    ("after_previous", Op.FORWARD, Op.SWAP_OUT),
    ("after", Op.SWAP_OUT, Op.UPLOAD),
    ("after", Op.SWAP_IN, Op.CLIP),
    # These bound how much is on its way: see test_no_more_is_on_its_way_than_there_are_slots.
    ("after", Op.FORWARD, Op.OFFLOAD),
    ("after", Op.OFFLOAD, Op.EVICT),
    ("after", Op.RECALL, Op.FORWARD),
    ("after", Op.RECALL, Op.RELOAD),
    ("after", Op.RELOAD, Op.FORWARD),
    ("after", Op.RELOAD, Op.BACKWARD),
}


@pytest.mark.parametrize("name", BROKEN)
def test_no_dependency_can_be_left_out(name: str) -> None:
    """Dropping all that tasks of one kind wait for on another kind is noticed, unless something else implies it."""
    decisions = BROKEN[name]
    schedule = lower(DENSE, decisions, asynchronous=False)
    assert violations(schedule, DENSE, decisions, ordered_by_rules(schedule)) == []
    for field in ("after", "after_previous"):
        kinds = {(t.op, schedule.tasks[i].op) for t in schedule.tasks for i in getattr(t, field)}
        for later, earlier in sorted(kinds):
            broken = _without(schedule, field, later, earlier)
            if (field, later, earlier) not in NOT_FOR_SAFETY and _orders(broken) != _orders(schedule):
                assert violations(broken, DENSE, decisions, ordered_by_rules(broken)), (field, later, earlier)


def _without(schedule: Schedule, field: str, later: Op, earlier: Op) -> Schedule:
    def keeps(task, i: int) -> bool:
        return (task.op, schedule.tasks[i].op) != (later, earlier)

    tasks = (
        dataclasses.replace(task, **{field: tuple(i for i in getattr(task, field) if keeps(task, i))})
        for task in schedule.tasks
    )
    return Schedule(tuple(tasks), schedule.buffers)


def _orders(schedule: Schedule) -> set[tuple[int, int]]:
    """Return what is ordered within the second of two iterations, and from the first to the second."""
    before, count = ordered_by_rules(schedule, 2), range(len(schedule.tasks))
    return {(i, a, b) for a in count for b in count for i in (0, 1) if before((i, a), (1, b))}


@pytest.mark.parametrize("overlap", [True, False])
def test_what_is_fetched_for_a_late_gather_is_updated(overlap: bool) -> None:
    """Its gather waits until the caller is there, but the fetch before it does not."""
    options = {"params": "host", "data_parallel": 2, "zero_stage": 3, "max_prefetch_params": 0}
    decisions = decide(DENSE, Place.CPU, overlap_next_forward=overlap, **options)
    schedule = lower(DENSE, decisions, asynchronous=False)
    assert violations(schedule, DENSE, decisions, ordered_by_rules(schedule)) == []


def test_lanes_are_first_in_first_out() -> None:
    decisions = BROKEN["cpu, overlapped"]
    schedule = lower(DENSE, decisions, asynchronous=False)
    assert violations(schedule, DENSE, decisions, ordered_by_rules(schedule, fifo=False))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"drop": Op.UPDATE}, "0 times"),
        ({"drop": Op.UPLOAD}, "weights of"),
        ({"drop": Op.FLUSH}, "gradients"),
        ({"drop": Op.CLIP}, "clip factor"),
    ],
)
def test_a_missing_task_is_noticed(change: dict[str, Op], message: str) -> None:
    decisions = BROKEN["cpu, overlapped"]
    schedule = lower(DENSE, decisions, asynchronous=False)
    missing = next(task.index for task in schedule.tasks if task.op is change["drop"])
    # In its place the lane does something that means nothing.
    tasks = [dataclasses.replace(t, op=Op.ISSUE) if t.index == missing else t for t in schedule.tasks]
    broken = Schedule(tuple(tasks))
    assert any(message in line for line in violations(broken, DENSE, decisions, ordered_by_rules(broken)))


@settings(SLOW, max_examples=examples(60))
@given(cases())
def test_the_callers_tasks_come_in_the_order_of_training(case: Case) -> None:
    """Forward, then backward in reverse, each segment recomputed as a whole just before; then the norm."""
    names = [unit.name for unit in case.units]
    recomputed = {name for name, decided in case.decisions.units.items() if decided.activations == "recompute"}
    expected: list[tuple[Op, str]] = []
    for _ in range(case.decisions.num_micro_batches):
        expected += [(Op.FORWARD, name) for name in names]
        for i, unit in reversed(list(enumerate(case.units))):
            segment = [u.name for u in case.units if u.segment == unit.segment]
            if unit.name in recomputed and unit.name == segment[-1]:
                expected += [(Op.RECOMPUTE, name) for name in segment]
            expected.append((Op.BACKWARD, names[i]))
    if case.decisions.clip:
        expected.append((Op.CLIP, ""))
    callers = (Op.FORWARD, Op.RECOMPUTE, Op.BACKWARD, Op.CLIP)
    assert [(t.op, t.unit) for t in case.schedule.tasks if t.op in callers] == expected


@settings(SLOW, max_examples=examples(100))
@given(cases())
def test_the_clip_computes_the_norm_of_gradients_that_stay_on_the_device(case: Case) -> None:
    decisions, staying = case.decisions, 0
    for unit in case.units:
        decided = decisions.units[unit.name]
        stay = {Place.GPU, Place.STREAM} - ({Place.STREAM} if decided.streamed_gradients == "host" else set())
        pairs = zip(decisions.subgroups(unit), decided.update, strict=True)
        staying += sum(subgroup.num_params for subgroup, place in pairs if place in stay)
    found = [task.num_params for task in case.schedule.tasks if task.op is Op.CLIP]
    assert found == ([staying] if decisions.clip else [])


# Bytes of state per parameter, master copy included.
SAVED = {"adamw": 12, "adamw-bf16": 8, "adamw-8bit": 6 + 8 / 256, "sgd": 8, "adagrad": 8, "lion": 8, "muon": 8}
SAVED_IN_BF16 = {"adamw": 6, "adamw-bf16": 6, "adamw-8bit": 6, "sgd": 4, "adagrad": 4, "lion": 4, "muon": 4}
SAVED |= {f"elementwise-{n}": 4 + 4 * n for n in range(5)}
SAVED_IN_BF16 |= {f"elementwise-{n}": 2 + 2 * n for n in range(5)}


@settings(SLOW, max_examples=examples(100))
@given(cases())
def test_bytes_are_those_that_decisions_imply(case: Case) -> None:
    decisions, moved, updated = as_rival(case.decisions), Counter(), Counter()
    for task in case.schedule.tasks:
        moved[task.op] += task.num_bytes
        updated[task.lane] += task.num_params
    weight, batches = decisions.precision.weight_bytes, decisions.num_micro_batches
    params, state = dict.fromkeys(Place, 0), dict.fromkeys(Place, 0)
    master = 2 if isinstance(decisions.precision, RivalPrecision) or decisions.precision.master else 4
    saved = (
        SAVED_IN_BF16
        if isinstance(decisions.precision, RivalPrecision)
        else {name: n - 4 + master for name, n in SAVED.items()}
    )
    uploaded = stored_weights = read = leaving = host_gradients = 0
    for unit in case.units:
        decided = decisions.units[unit.name]
        for subgroup, place in zip(decisions.subgroups(unit), decided.update, strict=True):
            n = subgroup.num_params
            params[place] += n
            state[place] += n * saved[subgroup.kind]
            uploaded += n * (place in {Place.CPU, Place.NVME} and decided.params == "gpu")
            read += n * (decided.params == "nvme")
            stored_weights += n * (place is Place.STREAM and decided.params == "host")
            leaving += n * (place in {Place.CPU, Place.NVME})
            host_gradients += n * (place is Place.STREAM and decided.streamed_gradients == "host")
    total = sum(decisions.shard_params(unit) for unit in case.units)
    assert sum(params.values()) == total
    assert updated[Lane.CPU] == params[Place.CPU] + params[Place.NVME]
    assert updated[Lane.GPU_UPDATE] == params[Place.GPU] + params[Place.STREAM]
    once, fsdp2 = decisions.gradient_path.is_one_copy, decisions.gradient_path is GradientPath.FSDP2
    leaving += host_gradients
    assert moved[Op.FLUSH] == ((master if fsdp2 else weight) * leaving * batches if once else 0)
    if decisions.gradient_path is GradientPath.ON_DEVICE:
        # Before updates in backward, the last sum stays, and with it weights that are masters. At the step both come.
        at_step = decisions.update_start == "step"
        alone = state[Place.STREAM] - weight * params[Place.STREAM] * decisions.precision.master_is_weight
        assert (sums := moved[Op.OVERWRITE]) == weight * leaving * (batches - 1 + at_step)
        assert moved[Op.LOAD] == alone + sums + weight * stored_weights * (
            at_step and decisions.precision.master_is_weight
        )
        assert moved[Op.STORE] == alone + weight * stored_weights
    else:
        assert moved[Op.OVERWRITE] == (0 if once else (weight * batches + 4) * leaving)
        added = host_gradients + (0 if once else leaving * batches)
        assert moved[Op.LOAD] == state[Place.STREAM] + weight * added
        no_master = 0 if decisions.precision.master_is_weight else weight * stored_weights
        assert moved[Op.STORE] == state[Place.STREAM] + no_master
    assert moved[Op.UPLOAD] == (4 if decisions.host_update is HostUpdate.DEVICE_CAST else weight) * uploaded
    clipped = 3 * master if fsdp2 and decisions.clip else 0
    again = 16 * uploaded if decisions.host_update is HostUpdate.SUPER_OFFLOAD else 0
    assert moved[Op.PASS] == (clipped if decisions.host_update.is_pinned else 8) * updated[Lane.CPU] + again
    spilled = decisions.spilled_bytes_per_param * params[Place.NVME] * decisions.spill_gradients
    assert moved[Op.SPILL] == spilled
    assert moved[Op.SWAP_IN] == state[Place.NVME] + spilled
    written = 0 if decisions.precision.master_is_weight else weight * read
    assert moved[Op.SWAP_OUT] == state[Place.NVME] + written
    assert read * weight <= moved[Op.READ]  # once at least; again where another unit was in the slot
    assert moved[Op.READ] <= moved[Op.FETCH]
    ways = {u.name: decisions.units[u.name].activations for u in case.units}
    swapped = [u.swap_bytes * batches for u in case.units if ways[u.name] in {"offload", "offload-nvme"}]
    inputs = [u for u in case.units if decisions.inputs_on_host and ways[u.name] == "recompute" and u.is_first]
    swapped += [u.activation_output_bytes * batches for u in inputs]
    evicted = [u.swap_bytes * batches for u in case.units if decisions.units[u.name].activations == "offload-nvme"]
    assert moved[Op.OFFLOAD] == moved[Op.RELOAD] == sum(swapped)
    assert moved[Op.EVICT] == moved[Op.RECALL] == sum(evicted)
    sent = {unit.name: unit.num_params for unit in case.units}
    for unit in case.units:  # whole matrices have padding between them
        if decisions.optimizer == "muon" and any(matrix for _, matrix in unit.extents):
            sent[unit.name] = decisions.padded_params(unit)
    of_unit = {name: weight * count * (2 if decisions.zero_stage == 0 else 1) for name, count in sent.items()}
    scatters = [task for task in case.schedule.tasks if task.op is Op.SCATTER]
    assert [task.num_bytes for task in scatters] == [of_unit[task.unit] for task in scatters]


@settings(SLOW, max_examples=examples(60))
@given(cases())
def test_passes_over_gradients_on_the_device(case: Case) -> None:
    """DeepSpeed: into the bucket, into the input of the reduction, the division; and the norm in fp64."""
    decisions, weight = as_rival(case.decisions), case.decisions.precision.weight_bytes
    padded = sum(decisions.padded_params(unit) for unit in case.units)
    leaving = sum(
        count
        for unit in case.units
        for count, place in decisions.placed_pieces(unit)
        if decisions.flushes(unit.name, place)
    )
    passes = 6 * weight * padded * decisions.num_micro_batches + (weight + 16) * leaving * decisions.clip
    # What stays on the device is added to the sum of earlier micro-batches: two read, one written.
    staying = sum(
        unit.num_params
        if decisions.layer_by_layer or (decisions.piles_up and decisions.replicas(unit) > 1 and not left)
        else sum(count for count, _ in decisions.placed_pieces(unit)) - left
        for unit in case.units
        for left in [sum(n for n, p in decisions.placed_pieces(unit) if decisions.flushes(unit.name, p))]
    )
    adding = 3 * decisions.precision.gradient_bytes * staying * (decisions.num_micro_batches - 1)
    moved = sum(task.num_bytes for task in case.schedule.tasks if task.op is Op.BACKWARD)
    assert moved == (passes if decisions.module_hooks else 0) + (0 if decisions.adds_in_products else adding)


def test_sums_of_micro_batches_on_the_device_take_time() -> None:
    """As the executor's ``keep_gradient`` adds them. A gradient that leaves is added on the host, with its copy."""
    demo = resolve_model("demo-llama")
    model = units(build_graph(demo, Batch(1, 8)))
    setup = Setup(model, Sharding(num_micro_batches=3))
    for num_gpu in (sum(setup.movable.values()), 0):
        decisions = mixed(setup, Mix(num_gpu=num_gpu, num_stream=0, num_keep=demo.num_layers))
        tasks = lower(model, decisions, asynchronous=True).tasks
        unit = next(unit for unit in model if unit.in_layer)
        backwards = [task for task in tasks if task.op is Op.BACKWARD and task.unit == unit.name]
        added = 3 * 2 * unit.num_params if num_gpu else 0
        assert [task.num_bytes for task in backwards] == [0, added, added]
        kernels = unit.num_kernels[Op.BACKWARD]
        issued = [
            t.num_kernels for t in tasks if t.op is Op.ISSUE and t.unit == unit.name and t.phase is Phase.BACKWARD
        ]
        assert issued == [kernels, *[kernels + len(unit.parameters) * bool(num_gpu)] * 2]


@settings(SLOW, max_examples=examples(60))
@given(cases())
def test_updates_at_the_step_come_after_all_of_backward(case: Case) -> None:
    """For the caller steps then, whatever else could begin before."""
    assume(case.decisions.update_start == "step")
    ordered, tasks = ordered_by_rules(case.schedule, 1), case.schedule.tasks
    (*_, last) = (task.index for task in tasks if task.op is Op.BACKWARD)
    assert [t.name for t in tasks if t.op is Op.UPDATE and not ordered((0, last), (0, t.index))] == []


@settings(SLOW, max_examples=examples(60))
@given(cases(), st.integers(0, 2**32 - 1))
def test_no_more_is_on_its_way_than_there_are_slots(case: Case, seed: int) -> None:
    """Whatever tasks take: buffers of one kind that are held at once are never more than their slots."""
    timeline = run(case.schedule, *random_prices(case.schedule, seed), NUM_ITERATIONS)
    count = case.decisions.num_activation_slots
    segment_of = {unit.name: unit.segment for unit in case.units}
    ours = as_rival(case.decisions).gradient_path is GradientPath.ONCE
    stays = (
        (Op.FORWARD, Op.OFFLOAD, count),
        (Op.RELOAD, Op.BACKWARD, count),
        (Op.OFFLOAD, Op.EVICT, count),
        (Op.RECALL, Op.RELOAD, count),
        (Op.SWAP_IN, Op.SWAP_OUT, case.decisions.num_nvme_slots),
        (Op.SPILL, Op.SPILL, 1),
        (Op.FLUSH, Op.SPILL, case.decisions.num_gradient_slots if ours else SWAPPER_SLOTS),
    )
    for begin, end, limit in stays:
        held: dict[tuple, list[float]] = {}
        begun, ended = (
            {(t.unit, t.micro_batch, t.piece) for t in case.schedule.tasks if t.op is op} for op in (begin, end)
        )
        for span in timeline.of_iteration(1):
            task = case.schedule.tasks[span.task]
            if task.op not in {begin, end} or (task.unit, task.micro_batch, task.piece) not in begun & ended:
                continue
            swaps = begin is Op.SWAP_IN
            key = (task.unit, task.piece) if swaps else (segment_of[task.unit], task.micro_batch)
            if begin is Op.RELOAD and not case.decisions.offloads(task.unit):
                continue
            low, high = held.get(key, [span.start_s, span.end_s])
            held[key] = [min(low, span.start_s), max(high, span.end_s)]
        events = sorted(event for low, high in held.values() for event in ((low, 1), (high, -1)) if high > low)
        most = now = 0
        for _, change in events:
            now += change
            most = max(most, now)
        assert most <= limit, (begin, end)


@settings(SLOW, max_examples=examples(60))
@given(cases(), st.integers(0, 2**32 - 1))
def test_the_host_takes_memory_for_no_more_gradients_than_may_be_on_their_way(case: Case, seed: int) -> None:
    """A device runs behind the host, which takes memory for gradients as it issues the backward that makes them."""
    decisions = case.decisions
    asynchronous = lower(case.units, decisions, asynchronous=True)
    timeline = run(asynchronous, *random_prices(asynchronous, seed), NUM_ITERATIONS)
    taken: dict[tuple[str, int], float] = {}
    left: dict[tuple[str, int], float] = {}
    for span in timeline.of_iteration(1):
        task = asynchronous.tasks[span.task]
        if task.op is Op.ISSUE and task.phase is Phase.BACKWARD:
            taken[task.unit, task.micro_batch] = max(span.end_s, taken.get((task.unit, task.micro_batch), 0.0))
        if task.op is Op.FLUSH:
            left[task.unit, task.micro_batch] = max(span.end_s, left.get((task.unit, task.micro_batch), 0.0))
    if as_rival(decisions).gradient_path is GradientPath.ONCE:
        events = sorted((time_s, change) for key in left for time_s, change in ((taken[key], 1), (left[key], -1)))
        assert max(itertools.accumulate(change for _, change in events), default=0) <= decisions.num_gradient_slots


@pytest.mark.parametrize("slots", [1, 2])
def test_gradients_are_spilled_no_further_behind_than_buffers_reach(slots: int) -> None:
    decisions = decide(DENSE, Place.NVME, spill_gradients=True, num_gradient_slots=slots)
    schedule = lower(DENSE, decisions, asynchronous=False)
    spills = [t.index for t in schedule.tasks if t.op is Op.SPILL]
    waits = [i for t in schedule.tasks if t.op is Op.BACKWARD for i in t.after if i in spills]
    assert waits == spills[: len(DENSE) - slots]


def test_units_fetched_once_per_use_in_sight() -> None:
    """What is still in its slot is not fetched again; a slot for every unit means one fetch per iteration."""
    for num_slots, num_fetches in ((1, 2), (100, 1)):
        decisions = decide(DENSE, params="host", num_param_slots=num_slots)
        fetches = Counter(t.unit for t in lower(DENSE, decisions, asynchronous=False).tasks if t.op is Op.FETCH)
        # With one slot per ring of equal size, the last of each ring stays until its backward.
        rings = Counter(unit.num_params for unit in DENSE)
        for unit in DENSE:
            last = unit is [u for u in DENSE if u.num_params == unit.num_params][-1]
            assert fetches[unit.name] == (1 if last or rings[unit.num_params] == 1 else num_fetches)


def test_weights_streamed_into_place_are_used_before_their_state_is_back() -> None:
    for params, waits_for in (("gpu", Op.UPDATE), ("host", Op.STORE)):
        schedule = lower(DENSE, decide(DENSE, Place.STREAM, params=params, clip=False), asynchronous=False)
        users = [t for t in schedule.tasks if t.op in {Op.FORWARD, Op.FETCH}]
        waited = {schedule.tasks[i].op for t in users for i in t.after_previous}
        assert waited - {Op.BACKWARD, Op.STEP} == {waits_for}


def test_tied_weights_are_fetched_for_the_head() -> None:
    units = small_units("gpt2")
    decisions = decide(units, params="host", num_param_slots=1)
    schedule = lower(units, decisions, asynchronous=False)
    head = next(t for t in schedule.tasks if t.op is Op.FORWARD and t.unit == "head")
    assert "embed" in slots(units, decisions).of_unit
    assert violations(schedule, units, decisions, ordered_by_rules(schedule)) == []
    assert {t.unit for t in schedule.tasks[: head.index] if t.op is Op.FETCH} >= {"embed", "head"}


def test_the_host_issues_every_compute_task_of_a_device_that_runs_apart() -> None:
    schedule = lower(DENSE, decide(DENSE), asynchronous=True)
    issues = {t.index: t for t in schedule.tasks if t.op is Op.ISSUE}
    compute = [t for t in schedule.tasks if t.lane is Lane.COMPUTE]
    assert len(issues) == len(compute)
    for task in compute:
        (issue,) = (issues[i] for i in task.after if i in issues)
        assert issue.unit == task.unit
        assert issue.num_kernels > 0
    assert not [t for t in lower(DENSE, decide(DENSE), asynchronous=False).tasks if t.op is Op.ISSUE]


def test_prices_exist_for_all_of_a_schedule(profile) -> None:
    for decisions in BROKEN.values():
        if profile.nvme is None and decisions.uses_storage:
            continue
        schedule = lower(DENSE, decisions, asynchronous=True)
        cost = CostModel(profile, DENSE, decisions)
        assert len(cost.prices(schedule)) == len(schedule.tasks)
