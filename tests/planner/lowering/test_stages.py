"""Pipelines of ours: the schedule of all stages has what each stage executes, and takes what textbooks say."""

import dataclasses
import itertools
from collections import Counter, defaultdict

import pytest
from amount import examples
from cases import MODELS, Case, decide, in_stages, small_units
from hazards import violations
from hypothesis import example, given, settings
from hypothesis import strategies as st
from machines import machine
from walked import ordered_by_rules

from planner.costs.model import CostModel
from planner.costs.resources import Price, Resource
from planner.decisions import Place
from planner.graph import Batch, Gemm, build_graph
from planner.lowering import lower, stages
from planner.lowering.compute import AGAIN
from planner.lowering.stages import deal, latest, sharing_stages, stage_of
from planner.models import resolve_model
from planner.models.kernels import flop
from planner.models.operators import weight_of
from planner.models.zero_bubble import apart
from planner.schedule.schedule import Schedule
from planner.schedule.tasks import STAGE_LANES, Lane, Op, Phase, Task, Tier
from planner.schedule.timeline import memory_use, memory_uses
from planner.simulate.machine import run, run_until_steady
from planner.simulate.prediction import memory_peaks, needs_bytes


def is_between(task: Task) -> bool:
    return task.lane in STAGE_LANES


def alike(task: Task) -> Task:
    return dataclasses.replace(task, index=0, after=(), after_previous=(), stage=0)


@settings(deadline=None, max_examples=examples(60))
@given(in_stages())
def test_each_stage_has_the_tasks_and_memory_that_its_ranks_execute(case: Case):
    """In the same order, with the same dependencies, and besides them only those on other stages.

    These are of what a stage receives on what another one sends: as much, in one order on each link.
    """
    units, decisions, asynchronous = case.units, case.decisions, case.asynchronous
    whole = lower(units, decisions, asynchronous=asynchronous)
    for stage in range(decisions.pipeline_parallel):
        own_units, decided, _ = stage_of(units, decisions, stage)
        alone = lower(own_units, decided, asynchronous=asynchronous)
        mine = [task for task in whole.tasks if task.stage == stage]
        assert list(map(alike, mine)) == list(map(alike, alone.tasks))
        number = {task.index: position for position, task in enumerate(mine)}
        for task, own in zip(mine, alone.tasks, strict=True):
            assert {number[i] for i in task.after if i in number} == {*own.after}
            assert {number[i] for i in task.after_previous} == {*own.after_previous}
            others = [whole.tasks[i] for i in task.after if i not in number]
            assert len(others) == (task.lane is Lane.RECEIVE) or task.op in {Op.CLIP, Op.SEND}
            assert not is_between(task) or [task.num_bytes] * len(others) == [other.num_bytes for other in others]
        buffers = [b for b in whole.buffers if b.stage == stage]
        ends = [(b.num_bytes, b.tier, number.get(b.first), number.get(b.last)) for b in buffers]
        assert ends == [(b.num_bytes, b.tier, b.first, b.last) for b in alone.buffers]
        assert_held_at_cuts(alone)
    received = [whole.tasks[i] for task in whole.tasks if task.lane is Lane.RECEIVE for i in task.after]
    passed = [task for task in received if task.lane in {Lane.SEND, Lane.SEND_BACK}]
    assert Counter(t.index for t in passed) == Counter(
        t.index for t in whole.tasks if t.op is Op.SEND and is_between(t)
    )
    for lane, stage in {(task.lane, task.stage) for task in passed}:
        on_link = [task.index for task in passed if (task.lane, task.stage) == (lane, stage)]
        assert on_link == sorted(on_link)


def assert_held_at_cuts(schedule):
    """What is sent is held until it has been sent, and a gradient that comes as long as its backward lasts.

    The cell behind one that sends has room for what is sent late.
    """
    sends = [task for task in schedule.tasks if task.op is Op.SEND and is_between(task)]
    sent = [b for b in schedule.buffers if b.last is not None and schedule.tasks[b.last] in sends]
    computed = [
        t.index for t in schedule.tasks if t.op in {Op.FORWARD, Op.BACKWARD, Op.WEIGHT_GRADIENT, *AGAIN.values()}
    ]
    assert sorted(b.last for b in sent) == [task.index for task in sends]
    assert all(b.num_bytes >= schedule.tasks[b.last].num_bytes for b in sent)
    late = {b.first: b for b in schedule.buffers if b.label.endswith(" sent late")}
    begin = dict(itertools.pairwise(computed))
    behind = {begin[b.first]: b for b in sent if b.first in begin}
    assert {i: b.num_bytes for i, b in late.items()} == {i: b.num_bytes for i, b in behind.items()}
    tasks = {i: schedule.tasks[i] for i in computed}
    cell = {i: (task.micro_batch, task.phase, task.op is Op.WEIGHT_GRADIENT) for i, task in tasks.items()}
    assert all(cell[b.first] == cell[b.last] for b in late.values())
    if schedule.tasks[computed[-1]].micro_batch:  # with one alone, cells of two rounds look like one
        assert all(cell[b.last] != cell.get(begin.get(b.last)) for b in late.values())
    come = [t.index for t in schedule.tasks if t.lane is Lane.RECEIVE and t.phase is Phase.BACKWARD]
    received = [b for b in schedule.buffers if b.first in come]
    assert sorted(b.first for b in received) == come
    assert all(schedule.tasks[b.last].op is Op.BACKWARD for b in received)


@settings(deadline=None, max_examples=examples(60))
@given(in_stages())
def test_schedules_that_differ_in_a_stage_are_as_if_lowered_alone(case: Case):
    """What they have in common is lowered once. Nobody changes it."""
    unit = next(name for name, decided in case.decisions.units.items() if decided.update)
    decided = case.decisions.units[unit]
    places = tuple(Place("cpu" if place == "gpu" else "gpu") for place in decided.update)
    changed = case.decisions.units | {unit: decided.model_copy(update={"update": places})}
    both = [case.decisions, case.decisions.model_copy(update={"units": changed})]

    def lowered(decisions) -> str:
        return lower(case.units, decisions, asynchronous=case.asynchronous).to_json()

    alone = []
    for decisions in both:
        latest.clear()
        alone.append(lowered(decisions))
    assert [lowered(decisions) for decisions in (*both, *both)] == alone * 2
    assert len(latest) < 2 * case.decisions.pipeline_parallel, "of one stage alone there are two"


@settings(deadline=None, max_examples=examples(30))
@given(st.integers(2, 6), st.integers(1, 12))
def test_the_bubble_of_equal_stages_is_that_of_the_textbook(num_stages: int, num_micro_batches: int) -> None:
    """Forward 1 s a stage, backward 2 s, all else free: the bubble is (p - 1) / m of the work, exactly.

    The first stage waits as long for what it receives.
    """
    units = small_units("demo-llama", num_stages)
    decisions = decide(units, Place.GPU, pipeline_parallel=num_stages, num_micro_batches=num_micro_batches)
    schedule = lower(units, decisions, asynchronous=True)
    taking_s = {Op.FORWARD: 1.0, Op.BACKWARD: 2.0}
    prices = [Price(0.0, taking_s.get(t.op, 0.0) if t.unit.endswith(".mlp") else 0.0) for t in schedule.tasks]
    timeline = run(schedule, prices, dict.fromkeys(Resource, 1.0), 3)
    work_s = 3.0 * num_micro_batches
    assert timeline.period_s(1) / work_s - 1 == pytest.approx((num_stages - 1) / num_micro_batches, abs=1e-9)
    first = timeline.with_waiting().only(lambda task: task.stage == 0)
    assert first.busy_s(1)[Lane.RECEIVE] == pytest.approx(3.0 * (num_stages - 1), abs=1e-9)


@settings(deadline=None, max_examples=examples(30))
@given(st.integers(2, 6), st.integers(1, 12))
@example(5, 2)
def test_without_gradients_of_weights_the_bubble_is_that_of_zb_h1(num_stages: int, num_micro_batches: int) -> None:
    """All three parts 1 s a stage: (p - 1) (forward + input's gradient - weights' gradient), of the paper's table 2.

    With fewer micro-batches than stages, there are too few of the latter to fill it.
    """
    units = small_units("demo-llama", num_stages, splits_backward=True)
    decisions = decide(
        units,
        Place.GPU,
        pipeline_parallel=num_stages,
        num_micro_batches=num_micro_batches,
        pipeline_order="zero-bubble",
    )
    schedule = lower(units, decisions, asynchronous=True)
    prices = []
    for task in schedule.tasks:
        taking_s = 1.0 if task.op in {Op.FORWARD, Op.BACKWARD, Op.WEIGHT_GRADIENT} else 0.0
        prices.append(Price(0.0, taking_s if task.unit.endswith(".mlp") else 0.0))
    timeline = run(schedule, prices, dict.fromkeys(Resource, 1.0), 3)
    bubble_s = timeline.period_s(1) - 3.0 * num_micro_batches
    few = max(num_stages - num_micro_batches, 0)
    assert bubble_s == pytest.approx(num_stages - 1 + few, abs=1e-9)


@settings(deadline=None, max_examples=examples(30))
@given(st.sampled_from(MODELS))
def test_backward_in_two_parts_does_the_same_work(model: str) -> None:
    """Kernel for kernel; the gradients of all matrices of layers are left for later."""
    for whole, part in zip(small_units(model), small_units(model, splits_backward=True), strict=True):
        assert Counter(part.backward) + Counter(part.weight_gradients) == Counter(whole.backward)
        is_left = any(operator.kind == "experts" for operator in whole.operators)
        matrices = [spec for spec in whole.parameters if len(spec.shape) == 2 and whole.in_layer and not is_left]
        made = sum(kernel.m * kernel.n * kernel.count for kernel in part.weight_gradients)
        assert made == sum(spec.num_params for spec in matrices)
        assert bool(part.kept_bytes) == bool(matrices)


def test_in_rounds_weights_come_once_and_gradients_leave_once() -> None:
    """However many micro-batches there are. The last two rounds' weights are still in the slots when backward comes."""
    units = small_units("demo-llama", 8)
    for num_micro_batches in (2, 5):
        decisions = decide(
            units, Place.CPU, params="host", activations="recompute", pipeline_parallel=2, pipeline_rounds=4
        ).model_copy(update={"num_micro_batches": num_micro_batches})
        tasks = lower(units, decisions, asynchronous=True).tasks
        layers = {unit.name for unit in units if unit.in_layer}
        fetched = Counter(task.unit for task in tasks if task.op is Op.FETCH and task.unit in layers)
        last = {
            unit.name for unit in units if unit.name.startswith(("layers.4.", "layers.5.", "layers.6.", "layers.7."))
        }
        assert fetched == {name: 1 if name in last else 2 for name in layers}
        assert Counter(task.unit for task in tasks if task.op is Op.FLUSH) == dict.fromkeys({u.name for u in units}, 1)


@settings(deadline=None, max_examples=examples(30))
@given(st.integers(2, 5), st.integers(1, 4), st.integers(0, 7), st.sampled_from([None, "zero-bubble"]))
def test_with_rounds_the_bubble_is_that_of_chunks(num_stages: int, num_rounds: int, more: int, order) -> None:
    """As above, of chunks of one layer each: p - 1 of them wait, or of each their forward alone."""
    units = small_units("demo-llama", num_stages * num_rounds, splits_backward=order is not None)
    count = num_stages + more
    given = {"pipeline_parallel": num_stages, "pipeline_rounds": num_rounds, "pipeline_order": order}
    decisions = decide(units, Place.GPU, **given, num_micro_batches=count)
    schedule = lower(units, decisions, asynchronous=True)
    taking_s = {Op.FORWARD: 1.0, Op.BACKWARD: 1.0 if order else 2.0, Op.WEIGHT_GRADIENT: 1.0}
    prices = [Price(0.0, taking_s.get(t.op, 0.0) if t.unit.endswith(".mlp") else 0.0) for t in schedule.tasks]
    timeline = run(schedule, prices, dict.fromkeys(Resource, 1.0), 3)
    work_s = 3.0 * count * num_rounds
    assert timeline.period_s(1) - work_s == pytest.approx((1.0 if order else 3.0) * (num_stages - 1), abs=1e-9)


@settings(deadline=None, max_examples=examples(60))
@given(in_stages())
def test_stages_are_safe_under_any_timing(case: Case) -> None:
    """Whatever is in flight: activations of several micro-batches leave and come back, each to its own room."""
    for stage in range(case.decisions.pipeline_parallel):
        own, decided, _ = stage_of(case.units, case.decisions, stage)
        schedule = lower(own, decided, asynchronous=case.asynchronous)
        assert violations(schedule, own, decided, ordered_by_rules(schedule)) == []


def reached(schedule: Schedule) -> dict[int, set[int]]:
    found: dict[int, set[int]] = defaultdict(set)
    for task in schedule.tasks:
        found[task.index] = set(task.after).union(*(found[i] for i in task.after))
    return found


@pytest.mark.parametrize("name", ["demo-llama", "gpt2"])
def test_stages_wait_for_one_another_where_they_must(name: str) -> None:
    units = small_units(name, 3)
    decisions = decide(units, Place.CPU, params="gpu", pipeline_parallel=3, num_micro_batches=4)
    schedule = lower(units, decisions, asynchronous=True)
    before, tasks = reached(schedule), schedule.tasks
    sends = {(t.lane, t.stage, t.micro_batch): t.index for t in tasks if t.op is Op.SEND}
    firsts: dict[tuple[int, Phase, int], Task] = {}  # the others follow on the same lane
    for task in tasks:
        if task.lane is Lane.COMPUTE:
            firsts.setdefault((task.stage, task.phase, task.micro_batch), task)
    for (stage, phase, micro_batch), task in firsts.items():
        if phase is Phase.FORWARD and stage:
            assert sends[Lane.SEND, stage - 1, micro_batch] in before[task.index]
        if phase is Phase.BACKWARD and stage < 2:
            assert sends[Lane.SEND_BACK, stage + 1, micro_batch] in before[task.index]
    flushed = {t.index for t in tasks if t.op is Op.FLUSH}
    exchanges = [t for t in tasks if t.op is Op.SEND and t.lane is Lane.COLLECTIVE]
    exchanged = {t.index for t in exchanges}
    assert [t.stage for t in exchanges] == ([0, 2] if name == "gpt2" else [])  # which has tied weights
    ends = {t.index for t in tasks if t.op is Op.FLUSH and t.unit in {u.unit for u in exchanges} and t.micro_batch == 3}
    assert all({*t.after} == ends for t in exchanges)
    clips = [t for t in tasks if t.op is Op.CLIP]
    assert len(clips) == 3
    assert all(before[clip.index] >= flushed | exchanged for clip in clips)
    assert all(clips[task.stage].index in before[task.index] for task in tasks if task.op is Op.UPDATE)
    assert {t.phase for t in tasks if t.op is Op.STEP} == {Phase.UPDATE}


def test_stages_hold_and_run_all_of_the_model() -> None:
    units = small_units("gpt2", 5)
    decisions = decide(units, Place.GPU, pipeline_parallel=2)
    of_stages = stages(decisions, units)
    assert sum(flop(unit.forward) for unit in of_stages) == sum(flop(unit.forward) for unit in units)
    tied = units[0].parameters[0]
    assert sum(u.num_params for u in of_stages) == sum(u.num_params for u in units) + tied.num_params


def test_earlier_stages_hold_the_activations_of_more_micro_batches() -> None:
    units = small_units("demo-llama", 8)
    decisions = decide(units, Place.GPU, pipeline_parallel=4, num_micro_batches=8)
    schedule = lower(units, decisions, asynchronous=True)
    simulation = run_until_steady(schedule, CostModel.of(machine(devices_per_node=4), units, decisions))

    def peak_bytes(stage: int) -> int:
        buffers = tuple(b if b.stage == stage else dataclasses.replace(b, num_bytes=0) for b in schedule.buffers)
        only = dataclasses.replace(simulation.timeline, schedule=dataclasses.replace(schedule, buffers=buffers))
        return memory_use(only, simulation.steady)[Tier.GPU].peak_bytes

    saved = sum(unit.saved_bytes for unit in units if unit.in_layer) / 4
    saved += sum(o.saved_bytes for unit in units for o in unit.operators if o.kind == "rotary")
    assert peak_bytes(1) - peak_bytes(2) == pytest.approx(saved, rel=1e-6)
    assert memory_use(simulation.timeline, simulation.steady)[Tier.GPU].peak_bytes == max(map(peak_bytes, range(4)))


@settings(deadline=None, max_examples=examples(30))
@given(in_stages(), st.integers(1, 5))
def test_a_host_has_what_the_stages_of_its_ranks_hold(case: Case, devices_per_node: int) -> None:
    units, decisions = case.units, case.decisions
    cost = CostModel.of(machine(devices_per_node=devices_per_node), units, decisions)
    simulation = run_until_steady(lower(units, decisions, asynchronous=cost.asynchronous), cost)
    timeline, steady = simulation.timeline, simulation.steady
    by_tier, peaks = memory_uses(timeline, steady), memory_peaks(timeline, steady, cost)
    ranks_of_stage = decisions.num_devices // decisions.pipeline_parallel
    for tier in by_tier.keys() - {Tier.GPU}:
        held = [0] * (decisions.num_devices // devices_per_node + 1)
        for rank in range(decisions.num_devices):
            use = by_tier[tier].get(rank // ranks_of_stage)
            held[rank // devices_per_node] += use.peak_bytes if use else 0
        assert peaks[tier].peak_bytes == sum(peaks[tier].by_class.values()) == max(held)
    assert needs_bytes(timeline, steady, cost) == {tier: peak.peak_bytes for tier, peak in peaks.items()}


def test_frozen_weights_leave_nothing_for_later() -> None:
    """Also where gradients of inputs have the shape of a weight: there are as many tokens as channels."""
    graph = build_graph(resolve_model("demo-llama"), Batch(1, 512))
    output, qkv = (next(operator for operator in graph if operator.kind == kind) for kind in ("output", "qkv"))
    square = Gemm(512, 512, 512)
    assert Counter(output.backward)[square] == 2
    frozen = tuple(dataclasses.replace(spec, frozen="plain") for spec in output.parameters)
    rest = tuple(kernel for kernel in output.backward if kernel != square)
    output = dataclasses.replace(output, parameters=frozen, backward=(square, *rest))
    keys = next(kernel for kernel in qkv.backward if isinstance(kernel, Gemm) and kernel.m == 256 and kernel.k == 512)
    half = list(qkv.backward)
    half.remove(keys)
    qkv = dataclasses.replace(qkv, backward=tuple(half))
    parts = list(apart([qkv, output], 2))
    assert [part.weight_gradients.count(keys) for part in parts] == [1, 0]
    assert parts[1].weight_gradients == ()
    for whole, part in zip((qkv, output), parts, strict=True):
        assert Counter(part.backward) + Counter(part.weight_gradients) == Counter(whole.backward)


def test_gradients_that_wait_need_no_weights_and_hold_what_they_need() -> None:
    """Weights come as often as in 1F1B; until the gradients are made, inputs and gradients of outputs are there."""
    given = {"params": "host", "pipeline_parallel": 2, "num_micro_batches": 4}
    units = [small_units("demo-llama", 8, splits_backward=splits) for splits in (False, True)]
    plain, apart = (
        lower(each, decide(each, Place.CPU, **given, pipeline_order=order), asynchronous=True)
        for each, order in zip(units, (None, "zero-bubble"), strict=True)
    )
    fetches = [Counter(task.unit for task in each.tasks if task.op is Op.FETCH) for each in (plain, apart)]
    assert fetches[0] == fetches[1]
    number = {(t.op, t.unit, t.micro_batch): t.index for t in apart.tasks}
    for unit in units[1]:
        held = [b for b in apart.buffers if b.label == f"{unit.name} for its weights' gradients"]
        assert [b.num_bytes for b in held] == [unit.kept_bytes] * (4 if unit.weight_gradients else 0)
        ends = {(number[Op.BACKWARD, unit.name, m], number[Op.WEIGHT_GRADIENT, unit.name, m]) for m in range(len(held))}
        assert {(b.first, b.last) for b in held} == ends


def test_a_chunk_may_leave_no_gradients_of_weights() -> None:
    """As one of layers that are much smaller than those of the stage's other chunk, such as an encoder's of images."""
    plain, apart = (small_units("demo-llama", 4, splits_backward=splits) for splits in (False, True))
    last = {unit.name for part in deal(apart, 2, 2)[-1] for unit in part}
    units = tuple(whole if whole.name in last else split for whole, split in zip(plain, apart, strict=True))
    given = {"pipeline_parallel": 2, "pipeline_rounds": 2, "pipeline_order": "zero-bubble"}
    schedule = lower(units, decide(units, Place.GPU, **given, num_micro_batches=3), asynchronous=True)
    made = {task.unit for task in schedule.tasks if task.op is Op.WEIGHT_GRADIENT}
    assert made == {unit.name for unit in units if unit.weight_gradients}
    assert made.isdisjoint(last)


def test_gradients_that_the_loss_makes_in_forward_are_held_until_backward_takes_them() -> None:
    """The last stage makes gradients of weights between the two. They are of a head's weight, its own or another's."""
    for model in ("demo-llama", "gpt2"):
        units = small_units(model, 4, splits_backward=True, loss_tile_tokens=8)
        decisions = decide(units, Place.GPU, pipeline_parallel=2, num_micro_batches=4, pipeline_order="zero-bubble")
        schedule = lower(units, decisions, asynchronous=True)
        held = [b for b in schedule.buffers if b.label.endswith(" made in forward")]
        size = units[0].parameters[0].num_params  # of the embedding
        assert [b.num_bytes for b in held] == [2 * size] * 2, "of those before which gradients of weights are made"
        assert {schedule.tasks[b.first].op for b in held} == {Op.WEIGHT_GRADIENT}


def test_a_reduced_gradient_that_is_added_is_held_beside_the_sum() -> None:
    """Of each micro-batch but the first, whose shard becomes the sum; and all that goes to the host, until it has."""
    units = small_units("demo-llama")
    for place, stage, ends in ((Place.GPU, 3, Op.SCATTER), (Place.CPU, 3, Op.FLUSH), (Place.CPU, 0, Op.FLUSH)):
        decisions = decide(units, place, data_parallel=2, zero_stage=stage, num_micro_batches=3)
        schedule = lower(units, decisions, asynchronous=False)
        for unit in (unit for unit in units if unit.num_params):
            of_unit = (b for b in schedule.buffers if b.label == unit.name and b.last is not None)
            held = [b for b in of_unit if schedule.tasks[b.last].op is ends]
            assert [b.num_bytes for b in held] == [2 * decisions.shard_params(unit)] * (3 - (place is Place.GPU))
            first = {schedule.tasks[b.first].op for b in held}
            assert first == {Op.SCATTER if stage else Op.BACKWARD}, "without shards, ranks sum the gradient in place"


@pytest.mark.parametrize("degrees", [{}, {"expert_parallel": 2}, {"expert_units": 2}], ids=str)
def test_experts_make_their_gradients_in_backward(degrees: dict[str, int]) -> None:
    """Nothing of them waits, as they could only wait as they are."""
    units = small_units("mixtral-8x7b", splits_backward=True, **degrees)
    waiting = {unit.name.split(".")[2] for unit in units if unit.weight_gradients}
    assert waiting == {"attn"}


def test_a_gradient_that_waited_is_made_beside_the_block_that_ranks_reduce() -> None:
    units = small_units("demo-llama", splits_backward=True)
    decisions = decide(units, Place.CPU, pipeline_parallel=2, data_parallel=2, pipeline_order="zero-bubble")
    schedule = lower(units, decisions, asynchronous=True)
    made = [b for b in schedule.buffers if b.first and schedule.tasks[b.first].op is Op.WEIGHT_GRADIENT]
    for unit in (unit for unit in units if unit.in_layer):
        assert {b.num_bytes for b in made if b.label == f"{unit.name} workspace"} == {2 * max(unit.sizes.values())}


def test_a_copy_of_a_weight_is_for_a_module_without_its_own() -> None:
    """What DeBERTa's layers are given, the embedding of positions, is multiplied with a weight of theirs."""
    units = small_units("gpt2", 4)
    decisions = decide(units, Place.GPU, pipeline_parallel=2, num_micro_batches=2)
    assert sharing_stages(units, decisions) == (0, 1)
    layer = units[-2]
    reader = next(o for o in layer.operators if any(weight_of(o) == spec.name for spec in o.parameters))
    given = dataclasses.replace(reader, shared_parameters=(units[0].parameters[0].name,))
    operators = tuple(given if o is reader else o for o in layer.operators)
    changed = (*units[:-2], dataclasses.replace(layer, operators=operators), units[-1])
    with pytest.raises(ValueError, match=rf"{reader.path} in stage 1 is given .* beside a weight of its own"):
        sharing_stages(changed, decisions)
