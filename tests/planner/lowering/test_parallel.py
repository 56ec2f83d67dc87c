"""Tensor and pipeline parallelism: shares add up to the whole, pipelines take what textbooks say, orders are valid."""

import dataclasses
import itertools
from collections import Counter, defaultdict

import pytest
from amount import examples
from cases import as_rival, decide
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import machine

from hwprofiles.registry import load_profile
from planner.costs.kernels import wave_factor
from planner.costs.layout import Layout
from planner.costs.model import CostModel
from planner.costs.resources import Price, Resource
from planner.decisions import Decisions, Place, Sharding
from planner.graph import Batch, Collective, Gemm, Pattern, Unit, build_graph, units
from planner.lowering import stages
from planner.lowering.compute import turns
from planner.lowering.stages import issue_order
from planner.models import ModelConfigError, resolve_model
from planner.models.kernels import flop
from planner.schedule.schedule import Schedule
from planner.schedule.series import PROCESSORS, busy, traffic
from planner.schedule.tasks import Lane, Op, Phase, Task, Tier
from planner.schedule.timeline import Timeline, memory_use
from planner.simulate.critical_path import critical_steps, slowed
from planner.simulate.machine import run, run_until_steady
from ullage.report.trace import chrome_trace
from ullage.rivals.decisions import RivalDecisions
from ullage.rivals.kernels import megatron_lm
from ullage.rivals.lowering import lower

GRAPHS = {"transformers": build_graph, "megatron": megatron_lm.build_graph}


def share(name: str, ranks: int, kernels: str = "transformers", num_layers: int = 2, **batch: object):
    config = resolve_model(name).model_copy(update={"num_layers": num_layers})
    sizes = {"micro_batch": 2, "seq_len": 64, "tensor_parallel": ranks, **batch}
    return units(GRAPHS[kernels](config, Batch(**sizes)))  # type: ignore[arg-type]


def divided(model_units: tuple[Unit, ...]) -> dict[str, tuple[int, int, int]]:
    """Return FLOP forward and backward, and weights, of operators that tensor parallelism divides."""
    return {
        operator.name: (
            flop(operator.forward),
            flop(operator.backward),
            # Biases of row-parallel products and their norms are not divided.
            sum(spec.num_params for spec in operator.parameters if len(spec.shape) > 1),
        )
        for unit in model_units
        for operator in unit.operators
        if operator.pattern is not Pattern.REPLICATE
    }


@pytest.mark.parametrize("kernels", GRAPHS)
@given(st.sampled_from(["gpt2", "opt-125m", "demo-llama"]), st.sampled_from([2, 4]))
@settings(deadline=None, max_examples=examples(12))
def test_shares_of_all_ranks_add_up_to_the_whole(kernels: str, name: str, ranks: int) -> None:
    config = resolve_model(name)
    if config.num_key_value_heads % ranks:
        with pytest.raises(ModelConfigError, match=f"num_.*heads of .* {ranks} tensor-parallel ranks"):
            share(name, ranks, kernels)
        return
    # A vocabulary that needs no padding, so that the head divides evenly too.
    config = config.model_copy(update={"num_layers": 2, "vocab_size": 128 * 8})
    whole, part = (divided(units(GRAPHS[kernels](config, Batch(2, 64, tensor_parallel=n)))) for n in (1, ranks))
    assert {op: tuple(ranks * n for n in numbers) for op, numbers in part.items()} == whole


def test_vocabulary_is_padded_where_it_is_divided_or_megatron_runs() -> None:
    ways = ((1, "transformers"), (2, "transformers"), (1, "megatron"))
    heads = [share("gpt2", ranks, kernels)[-1].operators[1].forward[0] for ranks, kernels in ways]
    assert [head.n for head in heads if isinstance(head, Gemm)] == [50257, 25216, 50304]


@pytest.mark.parametrize("kernels", GRAPHS)
@pytest.mark.parametrize("name", ["gpt2", "demo-llama"])
def test_a_layer_adds_up_two_outputs_and_two_input_gradients(name: str, kernels: str) -> None:
    hidden_bytes = 2 * 64 * resolve_model(name).hidden_size * 2
    model_units = share(name, 2, kernels)
    for unit in model_units:
        if unit.segment.startswith("layers."):
            for list_ in (unit.forward, unit.backward):
                found = [kernel for kernel in list_ if isinstance(kernel, Collective)]
                assert found == [Collective(hidden_bytes, 2)]
    assert not any(isinstance(k, Collective) for unit in share(name, 1, kernels) for k in unit.forward + unit.backward)
    # Recomputation repeats the sum behind attention; of the MLP's only Megatron's checkpoints do.
    again = [isinstance(k, Collective) for unit in model_units[1:3] for k in unit.recompute]
    assert sum(again) == (2 if kernels == "megatron" else 1)
    vocabulary = [k for unit in (model_units[0], model_units[-1]) for k in unit.forward if isinstance(k, Collective)]
    assert vocabulary == [Collective(hidden_bytes, 2), Collective(4 * 2 * 64, 2, count=3)]


def test_ring_time_of_a_sum_over_tensor_parallel_ranks() -> None:
    profile = machine(devices_per_node=4)
    cost = CostModel(profile, share("gpt2", 4), Sharding(tensor_parallel=4))
    fabric = profile.intra_node
    assert fabric is not None
    assert cost.compute_s([Collective(10**9, 4)]) == pytest.approx(
        2 * 10**9 * 3 / 4 / fabric.bytes_per_s.value + fabric.latency_s.value
    )


def test_waves() -> None:
    assert wave_factor(128 * 9, 128 * 12, 108) == 1  # one full wave
    three_of_half = 3 * 108 * 64 * 128 / 0.98  # two waves of whole tiles would take longer
    assert wave_factor(128 * 9 + 1, 128 * 12, 108) == pytest.approx(three_of_half / ((128 * 9 + 1) * 128 * 12))
    assert wave_factor(1, 1, 108) == pytest.approx(108 * 32**2 / 0.37)


SIZES = st.integers(1, 3000) | st.integers(1, 30).map(lambda tiles: 128 * tiles)


@given(
    st.tuples(SIZES, SIZES, SIZES),
    st.tuples(*(st.sampled_from([0, 1, 100, 2000]) for _ in range(3))),
    st.sampled_from(["h100", "a100-80", "h200x1-16c", "epyc-turin-2c"]),
    st.booleans(),
)
def test_a_product_takes_no_longer_than_a_larger_one(sizes, more, name, grouped) -> None:
    """Nor than one that fills its last tiles: what idles there computes nothing, and start-up counts once."""
    cost, kept = CostModel(load_profile(name), share("gpt2", 1), Sharding()), []

    def time_s(*sizes: int) -> float:
        kept.append(Gemm(*sizes, count=4, grouped=True) if grouped else Gemm(*sizes))  # prices know it by identity
        return cost.compute_s(kept[-1:])

    m, n, k = sizes
    of_this = time_s(*sizes) * (1 - 1e-9)
    assert of_this <= time_s(*(size + added for size, added in zip(sizes, more, strict=True)))
    if cost.profile.device.multiprocessors:
        assert of_this <= time_s(-(-m // 128) * 128, -(-n // 128) * 128, k)


def test_layout() -> None:
    layout = Layout(data=4, tensor=2, pipeline=4, devices_per_node=8)
    assert (layout.num_ranks, layout.ranks_per_node) == (32, 8)
    assert (layout.replicas(1).per_node, layout.replicas(1).nodes) == (4, 1)
    assert layout.crosses(0, 1)
    wide = Layout(data=16, tensor=8, pipeline=1, devices_per_node=8)
    assert (wide.replicas(1).per_node, wide.replicas(1).nodes) == (1, 16)
    assert not Layout(data=1, tensor=2, pipeline=4, devices_per_node=8).crosses(0, 3)
    assert not Layout(data=2, tensor=2, pipeline=4, devices_per_node=8).crosses(0, 1)
    assert Layout(data=2, tensor=2, pipeline=4, devices_per_node=8).crosses(1, 2)


@given(st.integers(1, 8), st.integers(1, 20))
def test_1f1b(num_stages: int, num_micro_batches: int) -> None:
    order = list(issue_order(num_stages, num_micro_batches))
    assert len(order) == len(set(order)) == 2 * num_stages * num_micro_batches
    position = {item: i for i, item in enumerate(order)}
    for (op, stage, micro_batch), i in position.items():
        sender = stage - 1 if op is Op.FORWARD else stage + 1
        assert sender < 0 or sender >= num_stages or position[op, sender, micro_batch] < i
        if op is Op.BACKWARD:
            assert position[Op.FORWARD, stage, micro_batch] < i
    for stage in range(num_stages):
        mine = [(op, micro_batch) for op, other, micro_batch in order if other == stage]
        wanted = turns(num_stages - stage, num_micro_batches)
        assert mine == [(op, micro_batch) for op, _, micro_batch in wanted]
        held = list(itertools.accumulate(1 if op is Op.FORWARD else -1 for op, _ in mine))
        assert max(held) == min(num_stages - stage, num_micro_batches)


def pipelined(
    num_stages: int, num_micro_batches: int, name: str = "demo-llama", num_layers: int = 0, **options: object
) -> tuple[tuple[Unit, ...], Decisions, Schedule]:
    """Return what Megatron-LM runs, each of whose stages is one unit."""
    model_units = share(name, 1, num_layers=num_layers or num_stages)
    options = {"pipeline_parallel": num_stages, "num_micro_batches": num_micro_batches, **options}
    decisions = as_rival(decide(model_units, Place.GPU, **options, reduce_start="step"))
    return stages(decisions, model_units), decisions, lower(model_units, decisions, asynchronous=True)


@given(st.integers(2, 6), st.integers(1, 12))
@settings(deadline=None, max_examples=examples(30))
def test_bubble_of_equal_stages_is_that_of_the_textbook(num_stages: int, num_micro_batches: int) -> None:
    """Forward 1 s, backward 2 s, all else free: the bubble is (p - 1) / m of the work, exactly."""
    _, _, schedule = pipelined(num_stages, num_micro_batches)
    durations_s = {Op.FORWARD: 1.0, Op.BACKWARD: 2.0}
    prices = [Price(0.0, durations_s.get(task.op, 0.0)) for task in schedule.tasks]
    timeline = run(schedule, prices, dict.fromkeys(Resource, 1.0), 3)
    work_s = 3.0 * num_micro_batches
    assert timeline.period_s(1) / work_s - 1 == pytest.approx((num_stages - 1) / num_micro_batches, abs=1e-9)


def test_an_engine_with_buckets_reduces_the_same_bytes_in_few_collectives() -> None:
    """No bucket is larger than it may be, and all wait for the last backward."""
    model_units = share("demo-llama", 1, num_layers=8)
    most = 2 * max(unit.num_params for unit in model_units)

    def reductions(bucket_params: int) -> list[Task]:
        options = {"reduce_start": "step", "data_parallel": 4, "zero_stage": 0, "num_micro_batches": 3}
        decisions = decide(model_units, Place.GPU, bucket_params=bucket_params, **options)
        tasks = lower(model_units, decisions, asynchronous=True).tasks
        last = max(task.index for task in tasks if task.op is Op.BACKWARD)
        found = [task for task in tasks if task.op is Op.SCATTER]
        assert all(last in task.after for task in found)
        return found

    separate, joint, once = (reductions(size) for size in (0, most, 10**12))
    assert len(separate) == sum(unit.num_params > 0 for unit in model_units)
    assert len(separate) > len(joint) > len(once) == 1
    assert max(task.num_bytes for task in joint) <= 2 * 2 * most
    assert len({sum(task.num_bytes for task in found) for found in (separate, joint, once)}) == 1


def test_uneven_layers_and_refusals() -> None:
    merged, decisions, _ = pipelined(3, 2, num_layers=5)
    layers = [len({spec.name.split(".")[2] for spec in unit.parameters if ".layers." in spec.name}) for unit in merged]
    assert layers == [2, 2, 1]
    with pytest.raises(ValueError, match="5 layers cannot be dealt to 6 pipeline stages"):
        pipelined(6, 1, num_layers=5)
    with pytest.raises(ValueError, match="zero_stage 2 with pipeline_parallel 3"):
        pipelined(3, 1, data_parallel=2, zero_stage=2)
    with pytest.raises(ValueError, match="no update can start during backward"):
        RivalDecisions.model_validate(decisions.model_dump() | {"clip": False, "update_start": "backward"})
    units = share("demo-llama", 1)
    with pytest.raises(ValueError, match="keeps everything on the devices"):
        lower(units, as_rival(decide(units, Place.CPU, pipeline_parallel=2)), asynchronous=True)


@pytest.mark.parametrize("name", ["demo-llama", "gpt2"])
def test_stages_hold_and_run_all_of_the_model(name: str) -> None:
    model_units = share(name, 1, num_layers=4)
    merged, _, schedule = pipelined(4, 3, name, num_layers=4)
    tied = {spec for unit in model_units if unit.shared_units for spec in model_units[0].parameters[:1]}
    owned = Counter(spec for unit in merged for spec in unit.parameters)
    assert owned == Counter(spec for unit in model_units for spec in unit.parameters) + Counter(tied)
    assert sum(flop(unit.forward) for unit in merged) == sum(flop(unit.forward) for unit in model_units)
    exchanged = [task for task in schedule.tasks if task.op is Op.SEND and task.lane is Lane.COLLECTIVE]
    assert [(task.stage, task.num_bytes) for task in exchanged] == [
        (stage, 2 * spec.num_params) for stage in (0, 3) for spec in tied
    ]


def test_only_what_other_stages_computed_moves_and_nobody_steps_early() -> None:
    """Every forward waits for the send of the stage before, every update for the norm over all stages."""
    merged, _, schedule = pipelined(3, 2, data_parallel=2)
    tasks = schedule.tasks
    by_key = {(t.op, t.lane, t.stage, t.micro_batch): t for t in tasks}
    reached: dict[int, set[int]] = defaultdict(set)
    for task in tasks:
        reached[task.index] = set(task.after).union(*(reached[i] for i in task.after))
    for task in tasks:
        if task.op is Op.FORWARD and task.stage:
            assert by_key[Op.SEND, Lane.SEND, task.stage - 1, task.micro_batch].index in reached[task.index]
        if task.op is Op.BACKWARD and task.stage < 2:
            assert by_key[Op.SEND, Lane.SEND_BACK, task.stage + 1, task.micro_batch].index in reached[task.index]
        if task.op is Op.UPDATE:
            last = {t.index for t in tasks if t.op is Op.BACKWARD and t.micro_batch == 1}
            assert last <= reached[task.index]
            start = by_key[Op.FORWARD, Lane.COMPUTE, task.stage, 0]
            assert task.index in start.after_previous
    scattered = sum(t.num_bytes for t in tasks if t.op is Op.SCATTER)
    assert scattered == 2 * 2 * sum(unit.num_params for unit in merged)  # all-reduce of bf16


def test_peak_memory_is_that_of_the_fullest_stage() -> None:
    """The first stage holds the activations of as many micro-batches as there are stages, the last of one."""
    merged, decisions, schedule = pipelined(4, 8, num_layers=8)
    cost = CostModel(machine(devices_per_node=4), merged, Sharding(pipeline_parallel=4))
    simulation = run_until_steady(schedule, cost)
    peak = memory_use(simulation.timeline, simulation.steady)[Tier.GPU].peak_bytes
    alone = []
    for stage in range(4):
        buffers = tuple(
            dataclasses.replace(b, num_bytes=b.num_bytes if b.stage == stage else 0) for b in schedule.buffers
        )
        only = dataclasses.replace(simulation.timeline, schedule=dataclasses.replace(schedule, buffers=buffers))
        alone.append(memory_use(only, simulation.steady)[Tier.GPU].peak_bytes)
    assert peak == max(alone)
    assert alone[1] > alone[2]  # equal layers, but one micro-batch more in flight
    assert alone[1] - alone[2] == pytest.approx(merged[1].saved_bytes, rel=1e-6)
    assert decisions.pipeline_parallel == schedule.num_stages == 4


def test_stages_step_at_the_same_time() -> None:
    """The host goes through the parameters of one rank, not of all stages one after another."""
    merged, _, schedule = pipelined(3, 2, "gpt2", num_layers=7)
    (step,) = (task for task in schedule.tasks if task.op is Op.STEP)
    assert step.num_tensors == max(len(unit.parameters) for unit in merged)


@pytest.fixture(scope="module")
def deep() -> Timeline:
    """A pipeline whose first and last stage have most to move and to hold."""
    merged, _, schedule = pipelined(3, 4, "gpt2", num_layers=3, data_parallel=2)
    return run_until_steady(
        schedule, CostModel(machine(devices_per_node=8), merged, Sharding(data_parallel=2, pipeline_parallel=3))
    ).timeline


def test_what_is_seen_of_a_pipeline_is_that_of_one_rank(deep: Timeline) -> None:
    """Traffic, busy shares and memory: of the stage where that is most, never of all together."""
    tasks, period_s = deep.schedule.tasks, deep.period_s(1)
    for lane in (Lane.SEND, Lane.SEND_BACK, Lane.COLLECTIVE):
        moved = Counter[int]()
        for task in tasks:
            moved[task.stage] += task.num_bytes if task.lane is lane else 0
        assert traffic(deep, 1)[lane].integral == pytest.approx(max(moved.values()))
    computing = busy(deep, 1)["gpu"].integral
    assert deep.busy_s(1)[Lane.COMPUTE] * 0.999 <= computing <= period_s
    at_work = [task.index for task in tasks if task.lane in PROCESSORS["gpu"]]
    assert (deep.end_s[1, at_work] - deep.start_s[1, at_work]).sum() > 1.5 * computing
    counters = {e["name"] for e in chrome_trace({"x": deep})["traceEvents"] if e["ph"] == "C"}
    assert {f"{what} of stage {stage}" for what in ("gpu memory (bytes)", "gpu busy") for stage in range(3)} <= counters


def test_stages_are_short_of_their_own_resources() -> None:
    """Two stages compute at once, and each has a device: neither slows the other, so something else is named."""
    tasks = (
        Task(0, Lane.COMPUTE, Op.FORWARD, Phase.FORWARD, "a"),
        Task(1, Lane.COMPUTE, Op.FORWARD, Phase.FORWARD, "b", stage=1),
        Task(2, Lane.GPU_UPDATE, Op.UPDATE, Phase.UPDATE, "b", stage=1, num_params=1),
        Task(3, Lane.D2H, Op.FLUSH, Phase.BACKWARD, "b", stage=1),
        Task(4, Lane.H2D, Op.UPLOAD, Phase.UPDATE, "b", stage=1, after=(1, 3)),
    )
    first = dataclasses.replace(tasks[0], after_previous=(4,))
    uses = {2: ((Resource.DEVICE, 0.3), (Resource.LINK_UP, 0.4)), 3: ((Resource.DEVICE, 0.3), (Resource.LINK_UP, 1.0))}
    prices = [Price(0.0, 1.0, uses.get(i, ((Resource.DEVICE, 0.3),))) for i in range(5)]
    prices[0], prices[4] = Price(0.0, 1.0, ((Resource.DEVICE, 1.0),)), Price(0.0, 1.0)
    schedule, capacities = Schedule((first, *tasks[1:])), dict.fromkeys(Resource, 1.0)
    timeline = run(schedule, prices, capacities, 3)
    found = slowed(timeline, 1, critical_steps(timeline, 1), prices, capacities)
    assert {(step.task, resource) for step, (_, resource) in found.items()} == {(3, Resource.LINK_UP)}


def test_sends_cross_the_slower_fabric_between_nodes() -> None:
    merged, _, _ = pipelined(4, 1)
    profile = machine(devices_per_node=2)
    assert profile.intra_node is not None
    assert profile.inter_node is not None
    cost = CostModel(profile, merged, Sharding(pipeline_parallel=4))
    for stage, fabric in ((0, profile.intra_node), (1, profile.inter_node), (2, profile.intra_node)):
        send = Task(0, Lane.SEND, Op.SEND, Phase.FORWARD, num_bytes=10**9, stage=stage)
        price = cost.price(send)
        assert (price.latency_s, price.duration_s) == (fabric.latency_s.value, 10**9 / fabric.bytes_per_s.value)


def test_decisions_survive_json() -> None:
    _, decisions, _ = pipelined(2, 1, tensor_parallel=2)
    assert RivalDecisions.model_validate_json(decisions.model_dump_json()) == decisions
