"""Engines that do what ours does not: what moves, what waits for what, and what that takes."""

from collections import Counter

import pytest
from cases import small_units
from machines import machine

from planner.costs.model import CostModel
from planner.decisions import Decisions, Place, Sharding
from planner.graph import Batch, build_graph, units
from planner.models import resolve_model
from planner.schedule.schedule import Schedule
from planner.schedule.tasks import Lane, MemoryClass, Op, Task, Tier
from planner.search import Scorer
from planner.setup import Setup
from planner.simulate.machine import run_until_steady
from planner.simulate.prediction import memory_peaks
from ullage.rivals.best import best_of_engine
from ullage.rivals.decisions import GradientPath
from ullage.rivals.engines.catalogue import POLICIES, can_run
from ullage.rivals.engines.megatrain import mega_train
from ullage.rivals.engines.roundpipe import round_pipe, round_pipe_sync
from ullage.rivals.engines.streaming import best_streaming
from ullage.rivals.engines.zenflow import zen_flow
from ullage.rivals.lowering import lower

UNITS = small_units("demo-llama", 8)
LAYERS = {unit.name for unit in UNITS if unit.in_layer}
PARAMS = sum(unit.num_params for unit in UNITS)


def setup(**given: object) -> Setup:
    return Setup(UNITS, Sharding(**{"clip": False, **given}))  # type: ignore[arg-type]


def scorer_of(some: Setup, **options: float) -> Scorer:
    profile = machine(devices_per_node=8, **options)  # type: ignore[arg-type]
    cost = CostModel(profile, some.units, some.given)
    return Scorer(some.units, 512, cost, lower=lower)


def lowered(decisions: Decisions) -> Schedule:
    return lower(UNITS, decisions, asynchronous=True)


def of(schedule: Schedule, *ops: Op) -> list[Task]:
    return [task for task in schedule.tasks if task.op in ops]


def host_bytes_per_param(decisions: Decisions) -> float:
    """Return what the host holds for each parameter without activations."""
    cost = CostModel.of(machine(devices_per_node=8), UNITS, decisions)
    simulation = run_until_steady(lowered(decisions), cost)
    held = memory_peaks(simulation.timeline, simulation.steady, cost)[Tier.HOST].by_class
    return sum(n for name, n in held.items() if name != "activations") / PARAMS


@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_megatrain_fetches_and_computes_every_layer_three_times(num_micro_batches: int) -> None:
    """As ``_forward_and_backward_single_gpu`` does: forward, forward of the block, forward of the layer, backward."""
    (decisions, _) = mega_train(setup(num_micro_batches=num_micro_batches))
    schedule = lowered(decisions)
    fetched = Counter((task.unit, task.micro_batch) for task in of(schedule, Op.FETCH))
    assert fetched == {(name, m): 3 for name in LAYERS for m in range(num_micro_batches)}
    computed = Counter((task.unit, task.op) for task in of(schedule, Op.FORWARD, Op.RECOMPUTE))
    for name in LAYERS:
        assert computed[name, Op.FORWARD] + computed[name, Op.RECOMPUTE] == 3 * num_micro_batches
    # Blocks of four layers: forwards of the last block, then each of its layers with its backward.
    spine = [task for task in of(schedule, Op.RECOMPUTE, Op.BACKWARD) if task.unit.endswith(".mlp")]
    first = [f"{task.op} {task.unit.split('.')[1]}" for task in spine if not task.micro_batch][:12]
    block = [f"recompute {i}" for i in (4, 5, 6, 7)]
    assert first == block + [f"{op} {i}" for i in (7, 6, 5, 4) for op in ("recompute", "backward")]


def test_megatrain_keeps_the_input_of_every_block_only() -> None:
    (blocks, wider) = mega_train(setup())
    buffers = {d.recompute_block: lowered(d) for d in (blocks, wider)}
    for block, schedule in buffers.items():
        inputs = [b for b in schedule.buffers if b.label.endswith(" input") and b.first is not None]
        since_forward = [b for b in inputs if schedule.tasks[b.first].op is Op.FORWARD]
        assert len(inputs) == 8
        assert len(since_forward) == 8 // block


@pytest.mark.parametrize("clip", [True, False])
def test_megatrain_updates_when_all_is_added_and_has_no_master_copy(clip: bool) -> None:
    (decisions, _) = mega_train(setup(clip=clip, num_micro_batches=2))
    assert decisions.state_bytes_per_param == 10  # the weight in bf16, two moments in fp32
    assert host_bytes_per_param(decisions) == pytest.approx(10 + 2 + 3, rel=0.01)  # and gradient, pinned copy, slabs
    schedule = lowered(decisions)
    passes = [task for task in of(schedule, Op.PASS) if task.phase == "backward"]
    assert len(passes) == 2 * sum(unit.num_params > 0 for unit in UNITS)
    (last,) = {task.index for task in of(schedule, Op.BACKWARD)[-1:]}
    assert all(task.index > last for task in of(schedule, Op.UPDATE))
    prepared = [task for task in of(schedule, Op.PASS) if task.phase == "update"]
    assert sum(task.num_bytes for task in prepared) == (6 + 6 * clip) * PARAMS
    assert decisions.numerics == "no master copy beside weights in bf16"


def test_zenflow_stands_for_several_iterations_and_publishes_late() -> None:
    """The host updates once in four iterations, beside the next four; the caller waits only for upload and scaling."""
    (decisions, _, _, _) = zen_flow(setup(num_micro_batches=2), (4, 1))
    assert decisions.num_micro_batches == 8
    schedule = lowered(decisions)
    assert sum(task.num_params for task in of(schedule, Op.UPDATE)) == PARAMS
    uploads, updates = of(schedule, Op.UPLOAD), {task.index for task in of(schedule, Op.UPDATE)}
    assert all(updates & set(task.after_previous) for task in uploads)
    assert not any(task.pinned for task in uploads)
    first = of(schedule, Op.FORWARD)[0]
    assert not updates & set(first.after_previous)
    assert {task.index for task in uploads} <= set(first.after_previous) | set(
        schedule.tasks[min(first.after, default=first.index)].after_previous
    )
    assert host_bytes_per_param(decisions) == pytest.approx(34, rel=0.01)
    scorer = scorer_of(setup())
    candidates = [scorer.score(each) for each in list(zen_flow(setup(), (4, 1)))[::2]]
    times = {each.decisions.num_steps: each.iteration_s / each.decisions.num_steps for each in candidates}
    assert times[4] < times[1]
    assert times[1] < scorer.score(next(POLICIES["zero-offload-blocking"](setup()))).iteration_s


def test_zenflow_hides_the_host_behind_the_next_iterations() -> None:
    """If computing takes longer than the host's updates, a slower host costs only what the caller waits for."""
    some = setup()
    fast, slow = (
        scorer_of(some, flop_per_s=1e11, cpu_params_per_s=rate).score(next(zen_flow(some))).iteration_s
        for rate in (4e9, 2e9)
    )
    assert slow == pytest.approx(fast, rel=0.01)


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_roundpipe_moves_weights_twice_and_gradients_once(ranks: int, num_micro_batches: int) -> None:
    """However many micro-batches there are; each of several devices moves its share."""
    (decisions,) = round_pipe(setup(data_parallel=ranks, num_micro_batches=num_micro_batches))
    schedule = lowered(decisions)
    shard = sum(-(-unit.num_params // ranks) for unit in UNITS)
    fetched = Counter(task.unit for task in of(schedule, Op.FETCH))
    assert {fetched[name] for name in LAYERS} <= {1, 2}  # once where it is still in its slot
    assert max(fetched.values()) == 2
    turns = {unit.name for unit in UNITS if unit.segment in {"layers.6", "layers.7"}}  # where forward turns to backward
    assert {name for name in LAYERS if fetched[name] == 1} <= turns
    assert sum(task.num_bytes for task in of(schedule, Op.OVERWRITE)) == 2 * shard
    assert not of(schedule, Op.GATHER, Op.SCATTER, Op.FLUSH)
    assert host_bytes_per_param(decisions) == pytest.approx(20, rel=0.01)
    layers = [task.unit for task in of(schedule, Op.FORWARD)]
    assert len(layers) == num_micro_batches * len(UNITS)
    firsts = list(dict.fromkeys(name.split(".attn")[0].split(".mlp")[0] for name in layers))
    assert firsts == list(dict.fromkeys(unit.segment for unit in UNITS))  # one segment after the other


def test_roundpipe_keeps_frozen_weights_once() -> None:
    """Its one process has them for all devices, each of which copies its share. They have no gradients."""
    names = sorted(spec.name for unit in UNITS for spec in unit.parameters)
    some = small_units("demo-llama", 8, frozen=frozenset(names[1:]))
    moved = {}
    for ranks in (1, 4):
        (decisions,) = round_pipe(Setup(some, Sharding(clip=False, data_parallel=ranks)))
        cost = CostModel.of(machine(devices_per_node=8), some, decisions)
        schedule = lower(some, decisions, asynchronous=True)
        simulation = run_until_steady(schedule, cost)
        held = memory_peaks(simulation.timeline, simulation.steady, cost)[Tier.HOST].by_class[MemoryClass.PARAMETERS]
        assert held == pytest.approx(2 * sum(unit.num_weights for unit in some), rel=0.01)
        moved[ranks] = sum(task.num_bytes for task in of(schedule, Op.FETCH))
    assert moved[1] == pytest.approx(4 * moved[4], rel=0.01)
    (whole,) = round_pipe(setup(data_parallel=4))
    (trained,) = (unit for unit in some if unit.num_params)
    largest = max(sum(unit.num_params for unit in UNITS if unit.segment == name) for name in {u.segment for u in UNITS})
    assert whole.device_buffer_bytes - decisions.device_buffer_bytes == 2 * 2 * (largest - trained.num_params)


def test_roundpipe_holds_more_inputs_the_larger_the_vocabulary_is() -> None:
    """Stages are as long as the backward of the head, and inputs of their layers stay until they end."""
    config = resolve_model("demo-llama").model_copy(update={"num_layers": 8})
    layer = sum(unit.num_params for unit in UNITS if unit.segment == "layers.0")
    held = []
    for times in (1, 2):
        vocab_size = -(-times * layer // config.hidden_size)
        some = units(build_graph(config.model_copy(update={"vocab_size": vocab_size}), Batch(1, 128)))
        (decisions,) = round_pipe(Setup(some, Sharding(clip=False)))
        held.append(decisions.device_buffer_bytes)
    hidden_bytes = max(unit.activation_output_bytes for unit in some if unit.in_layer)
    assert held[1] - held[0] == 4 * hidden_bytes  # six layers forward and two backward, in place of three and one


def test_roundpipe_waits_for_the_optimizer_only_if_set_to() -> None:
    some = setup(data_parallel=4)
    scorer = scorer_of(some, cpu_params_per_s=1e8)
    (late,), (sync,) = round_pipe(some), round_pipe_sync(some)
    assert scorer.score(late).iteration_s < scorer.score(sync).iteration_s
    assert late.numerics == "weights are one update old"
    assert sync.numerics is None
    schedule = lowered(late)
    updates = {task.index for task in of(schedule, Op.UPDATE)}
    copies = [task for task in of(schedule, Op.PASS) if updates & set(task.after_previous)]
    assert sum(task.num_bytes for task in copies) == 6 * sum(-(-unit.num_params // 4) for unit in UNITS)
    used = {index for task in of(schedule, Op.FETCH) for index in task.after_previous}
    assert used >= {task.index for task in copies}
    assert not used & updates


def test_roundpipe_takes_longer_to_fill_the_more_devices_there_are() -> None:
    waits, count = [], 40
    for ranks in (1, 2, 8):
        schedule = lowered(next(round_pipe_sync(setup(data_parallel=ranks, num_micro_batches=count))))
        waits.append(len(of(schedule, Op.FORWARD)) - count * len(UNITS))
    assert waits[0] == 0
    # One of the node's micro-batches, of which there are two more than devices, passes the stages of the others.
    assert waits[2] / waits[1] == pytest.approx((7 * 8 / 10) / (1 * 2 / 4), rel=0.01)
    assert waits[1] > 0


def test_streaming_is_found_in_a_few_simulations() -> None:
    some = setup(num_micro_batches=4)
    full = sum(unit.saved_bytes for unit in UNITS)
    for room in (0.5, 1.0, 3.0):
        quick, thorough = (scorer_of(some, gpu_bytes=4 * PARAMS + room * full) for _ in range(2))
        found, best = best_of_engine(some, quick, "streaming"), best_streaming(some, thorough)
        assert quick.num_simulations <= 11
        assert found.decisions.num_micro_batches == 4
        assert not found.missing_bytes
        assert found.iteration_s <= 1.2 * best.iteration_s
        assert {place for unit in found.decisions.units.values() for place in unit.update} == {Place.STREAM}
        assert found.decisions.gradient_path is GradientPath.ON_DEVICE


def test_what_an_engine_cannot_do_is_no_row() -> None:
    assert all(can_run(name, setup(), 1) for name in POLICIES)
    assert all(can_run(name, setup(data_parallel=2), 1) for name in POLICIES)

    def cannot(num_nodes: int = 1, **given: object) -> set[str]:
        return {name for name in POLICIES if not can_run(name, setup(**given), num_nodes)}

    in_one_node = {"megatrain", "roundpipe", "roundpipe-sync", "slideformer", "llmq"}
    assert cannot(2, data_parallel=2) == in_one_node
    assert cannot(tensor_parallel=2) == in_one_node | {"streaming"}
    only_adam = {"zenflow", "megatrain", "streaming", "slideformer"}
    assert cannot(optimizer="lion") == only_adam | {"llmq"}
    assert cannot(optimizer="adamw-bf16") == only_adam
    assert cannot(clip=True) == cannot(num_micro_batches=2) == {"slideformer"}


def test_lanes_of_late_updates_keep_their_order() -> None:
    """Publishing, preparing and updating follow each other on the host's lane, so none delays the next iteration."""
    for decisions in (next(zen_flow(setup())), next(round_pipe(setup()))):
        tail = [task for task in lowered(decisions).tasks if task.lane is Lane.CPU and task.phase == "update"]
        ops = [task.op for task in tail]
        assert ops == sorted(ops, key=lambda op: op is Op.UPDATE)
