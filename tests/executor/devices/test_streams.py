"""Nothing depends on when streams run what they are given: seen by logic, on the virtual device.

Every access to device memory and to registered host memory is watched while plans are executed. What is launched or
freed before something else has certainly ended is found in any run, however the threads happened to fall; see
[Note: Happens before] in :mod:`virtual.races`. On a real device such a mistake would show now and then, as a number
that is a little wrong.
"""

import contextlib
import gc
import itertools
from collections import Counter

import pytest
import torch
from amount import examples
from hypothesis import given, settings
from plans import mixed, plans
from rank_programs import trained_on_gpu, trained_on_gpu_in_turn
from rank_references import reference as of_processes
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from training import Task, batches, decide, prepare, train, uniform, units_of
from virtual import NoVirtualGpuError, install, present
from virtual.races import Races
from virtual.watch import watched

import executor.tasks.snapshots
from executor.checkpoint.format.reader import Checkpoint
from executor.checkpoint.levels import Level
from executor.devices.cuda import CudaBackend
from executor.devices.lanes import LaneMachine
from executor.tasks.actions import Actions
from executor.tasks.updates import UpdateTasks
from executor.training_state.restoring import restore
from executor.training_state.saving import Checkpoints
from hwprofiles.registry import load_profile
from planner.costs.model import CostModel
from planner.lowering import lower
from planner.schedule.tasks import Lane, Op, Tier
from planner.simulate.machine import run_until_steady
from planner.simulate.prediction import memory_peaks
from ullage.training.batches import to_device

FAMILIES = ("gpt2", "gpt2-untied", "llama", "llama-tied", "qwen3", "mixtral", "opt")
NUM_LOOKED_AT = Counter()


@pytest.fixture(autouse=True)
def _virtual_device():
    """Skip where there can be none."""
    try:
        install()
    except NoVirtualGpuError as error:
        pytest.skip(str(error))


def watched_training(task, decisions, blind=None):
    """Train on the virtual device; return what was found."""
    with watched(blind) as races:
        model, optimizer = prepare(task, decisions, device="cuda", record=True)
        with optimizer.session as session:
            before = Counter(races.waits)
            train(task, model, optimizer)
            races.waits -= before
            sizes = task.group_sizes or (task.num_micro_batches,) * task.iterations
            assert session.timeline().num_iterations == sizes.count(task.num_micro_batches)
    NUM_LOOKED_AT["accesses"] += races.num_accesses
    return races


@settings(max_examples=examples(20))
@given(plan=plans(families=FAMILIES, optimizers=("adamw", "adamw-bf16", "adamw-8bit", "adamw-8bit-rounded", "muon")))
def test_no_plan_depends_on_when_streams_run(plan):
    races = watched_training(*plan)
    assert not races.found
    assert not races.pageable, "copies from or to memory that is not registered wait for the device"


@settings(max_examples=examples(15))
@given(plan=plans(families=FAMILIES, degrees={"segment_tile_sequences": 1}, num_micro_batches=1, iterations=3))
def test_nor_does_one_in_which_tiles_pass_a_layer_one_after_another(plan):
    assert not watched_training(*plan).found


@pytest.mark.parametrize("place", ["cpu", "stream", "nvme"])
def test_weights_are_cast_when_they_are_there_and_fetched_when_they_are_cast(place, monkeypatch):
    float8 = pytest.importorskip("executor.module.float8")
    monkeypatch.setattr(float8, "_compiled", lambda function: function)  # nothing compiles for this device
    task = Task("llama", iterations=3, products="fp8")
    decisions = decide(task, uniform("host", place, "keep" if place == "cpu" else "recompute"), fp8_weights=True)
    assert not watched_training(task, decisions).found


@pytest.mark.parametrize("place", ["gpu", "stream"])
def test_products_of_muon_stay_on_their_stream(place):
    task = Task("llama", iterations=2, optimizer="muon")
    assert not watched_training(task, decide(task, uniform("gpu", place))).found


@pytest.mark.part(6)
@pytest.mark.parametrize("update_start", ["step", "backward"])
@pytest.mark.parametrize(
    "place",
    [
        ("gpu", "gpu"),
        ("gpu", "stream"),
        ("host", "cpu"),
        ("host", "stream"),
        ("nvme", "nvme"),
        ("gpu", "gpu", "offload-nvme"),
        None,
    ],
    ids=str,
)
def test_between_steps_everything_has_ended(place, update_start, tmp_path, monkeypatch):
    """Evaluation, both state_dicts, checkpoints and going back to one: on the caller's stream, which no task names."""
    monkeypatch.setattr(executor.tasks.snapshots, "CHUNK_BYTES", 4096)
    task = Task("llama", iterations=3, max_norm=0.5 if update_start == "step" else None)
    decisions = decide(
        task,
        uniform(*place) if place else mixed,
        subgroup_params=3000,
        update_start=update_start,
        overlap_next_forward=True,
    )
    outcomes = []

    def step(tokens):
        model(input_ids=tokens, labels=tokens).loss.backward()
        if task.max_norm is not None:
            optimizer.clip_grad_norm_(task.max_norm)
        optimizer.step()
        optimizer.zero_grad()

    with watched() as races:
        model, optimizer = prepare(task, decisions, device="cuda", checkpoint_buffer_bytes=6 * 4096)
        with optimizer.session as session:
            with Checkpoints(optimizer, Level(tmp_path, keep=9), on_outcome=outcomes.append) as saved:
                for number, (tokens,) in enumerate(batches(task).to("cuda"), 1):
                    step(tokens)
                    saved.save(number)
                    if number == 2:
                        with torch.no_grad():
                            model.eval()(input_ids=tokens)
                        model.train()
                        weights = {name: value.cpu().clone() for name, value in session.full_parameters().items()}
                        optimizer.load_state_dict(optimizer.state_dict())
                saved.finish()
            with Checkpoint(tmp_path / "step-00000002") as checkpoint:
                restore(optimizer, checkpoint)
            again = {name: value.cpu().clone() for name, value in session.full_parameters().items()}
            step(tokens)
    assert [outcome.error for outcome in outcomes] == [None] * task.iterations
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    assert not races.found
    NUM_LOOKED_AT["accesses"] += races.num_accesses


def test_the_caller_waits_as_often_whatever_the_model_has():
    """For the norm and the loss, and not for every parameter."""
    waits = {}
    for family in ("small", "gpt2"):  # 1 and 3 layers
        races = watched_training(Task(family, iterations=4), decide(Task(family), uniform("gpu", "gpu")))
        waits[family] = sum(count for (_, what), count in races.waits.items() if what == "stream")
    assert waits["small"] == waits["gpt2"] <= 4 * 7


def test_a_batch_is_brought_without_waiting(gpu):  # noqa: ARG001 - a fixture
    tokens = torch.arange(64).view(2, 32)
    with watched() as races:
        found = to_device(tokens, torch.device("cuda"))
    assert not races.waits
    assert not races.pageable
    assert torch.equal(found.cpu(), tokens)
    with watched() as races:
        tokens.to("cuda")
    assert races.waits, "that is how it would be seen"


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_memory_is_metered_from_rest(gpu, activations):  # noqa: ARG001 - a fixture
    """As much as the host's own meter finds, and not less what updates of the iteration before have not freed yet.

    Where gradients and activations stay, so that no lane's timing shows.
    """
    task, peaks = Task("llama", iterations=2), {}
    gc.collect()  # what earlier sessions had on the device
    with sdpa_kernel(SDPBackend.MATH):  # the device has no other
        for device in ("cpu", "cuda"):
            model, optimizer = prepare(task, decide(task, uniform("gpu", "gpu", activations)), device=device)
            with optimizer.session as session:
                train(task, model, optimizer)
                with session.metered():
                    train(task, model, optimizer)
                measured = session.memory()[Tier.GPU]
            assert min(measured.dynamic_bytes_of.values()) >= 0
            peaks[device] = measured.dynamic_peak_bytes
    assert 1 <= peaks["cuda"] / peaks["cpu"] < 1.2  # the batch comes and goes there too


def test_gradients_that_leave_are_counted_until_the_host_waits_for_them(gpu):  # noqa: ARG001 - a fixture
    """What backward allocates ahead cannot have their memory, although their copies end before it computes."""
    task = Task("llama", torch.bfloat16, iterations=2)
    decisions = decide(task, uniform("host", "cpu", "recompute"), num_gradient_slots=3)
    found = units_of(task, decisions)
    cost = CostModel.of(load_profile("h100"), found, decisions)
    simulation = run_until_steady(lower(found, decisions, asynchronous=True), cost)
    counted_bytes = memory_peaks(simulation.timeline, simulation.steady, cost)[Tier.GPU].peak_bytes
    gc.collect()
    with sdpa_kernel(SDPBackend.MATH):
        model, optimizer = prepare(task, decisions, device="cuda")
        with optimizer.session as session:
            train(task, model, optimizer)
            with session.metered():
                train(task, model, optimizer)
            held = session.memory()[Tier.GPU]
    counted_bytes -= sum(held.static_bytes.values())
    assert held.dynamic_peak_bytes <= 1.2 * counted_bytes  # small tensors are rounded up, and freed late


class Forgetful(dict):
    def __setitem__(self, _key, _value):
        pass


def threads_alone(self):
    """Wait for threads that give work to streams, and not for the streams."""
    self._last = Forgetful()
    wait(self)


wait = LaneMachine.wait
BLIND = [
    (("gpu", "gpu"), Lane.COMPUTE),
    (("gpu", "gpu"), Lane.GPU_UPDATE),
    (("gpu", "cpu"), Lane.CPU),
    (("host", "cpu"), Lane.H2D),
    (("gpu", "cpu"), Lane.D2H),
    (("gpu", "stream"), Lane.STATE_IN),
    (("gpu", "stream"), Lane.STATE_OUT),
    (("gpu", "gpu", "offload"), Lane.ACTIVATION_OUT),
    (("nvme", "nvme"), Lane.NVME_READ),
]


@pytest.mark.parametrize(("place", "lane"), BLIND, ids=str)
def test_a_lane_that_waits_for_nothing_is_found(place, lane):
    """The oracle is worth something: it sees what each wait prevents."""
    task = Task("llama", iterations=3, max_norm=None)
    decisions = decide(task, uniform(*place), subgroup_params=3000, update_start="backward")
    assert watched_training(task, decisions, lane).found


@pytest.mark.parametrize("place", [("gpu", "gpu"), ("host", "stream"), None], ids=str)
def test_updates_that_are_taken_back_wait_for_streams(place):
    task = Task("llama", iterations=4, max_norm=2.6)  # of which norms are smaller and larger
    decisions = decide(
        task, uniform(*place) if place else mixed, subgroup_params=3000, update_start="backward", speculate=True
    )
    with watched() as races:
        model, optimizer = prepare(task, decisions, device="cuda")
        train(task, model, optimizer)
        assert optimizer.session.num_unexpected
        optimizer.session.close()
    assert not races.found


def test_memory_that_nobody_says_is_used_is_found(monkeypatch):
    task = Task("llama", iterations=2)
    monkeypatch.setattr(CudaBackend, "record_stream", lambda _self, _tensor: None)
    for place in (("gpu", "cpu"), ("host", "stream")):
        assert watched_training(task, decide(task, uniform(*place))).found


@pytest.mark.parametrize("place", [("gpu", "gpu"), ("host", "stream")])
def test_gradients_that_updates_were_given_are_there_until_the_next_forward(place, monkeypatch):
    """Then that stream, which has waited for the updates, may have their memory; before, they might still be read."""
    task = Task("llama", iterations=3)
    decisions = decide(task, uniform(*place))
    assert not watched_training(task, decisions).found

    monkeypatch.setattr(UpdateTasks, "_release_gradients", lambda _self, _unit, gradients: gradients.clear())
    assert watched_training(task, decisions).found


DEGREES = {
    "zero 0": ("llama", {"data_parallel": 2}),
    "zero 1": ("llama-tied", {"data_parallel": 2, "zero_stage": 1}),
    "zero 2": ("llama", {"data_parallel": 2, "zero_stage": 2}),
    "zero 3": ("qwen3", {"data_parallel": 2, "zero_stage": 3}),
    "tensor": ("llama-shared", {"tensor_parallel": 2}),
    "matrices": ("gpt2-shared", {"tensor_parallel": 2}),
    "expert": ("mixtral-shared", {"data_parallel": 2, "expert_parallel": 2, "zero_stage": 3}),
}


@pytest.mark.part(7)
@pytest.mark.parametrize("update_start", ["step", "backward"])
@pytest.mark.parametrize(("family", "degrees"), DEGREES.values(), ids=DEGREES)
def test_ranks_do_not_depend_on_when_streams_run(processes, family, degrees, update_start):
    """gloo stands in for NCCL, on the stream that is current when a collective begins."""
    at_step, optimizer = update_start == "step", "muon" if family == "gpt2-shared" else "adamw"
    speculates = not at_step and degrees.get("zero_stage") in {2, 3}
    max_norm = 0.5 if at_step or speculates else None
    task = Task(family, torch.float32, 2 if at_step else 1, max_norm=max_norm, iterations=3, optimizer=optimizer)
    resident = degrees.get("zero_stage") in {1, 2}
    placed = uniform("gpu", "stream") if resident else mixed
    decisions = decide(task, placed, **degrees, update_start=update_start, speculate=speculates or None)
    results = processes.call(2, trained_on_gpu, task, decisions)
    assert [found for _, found in results] == [[], []]
    losses, _ = of_processes(task, decisions.data_parallel, decisions)
    for rank, (seen, _) in enumerate(results):
        assert seen == pytest.approx(losses[rank // decisions.tensor_parallel], rel=1e-3)


@pytest.mark.part(2)
@pytest.mark.parametrize(("places", "zero_stage"), [(("gpu", "cpu"), 2), (("host", "cpu"), 3)], ids=str)
def test_ranks_launch_collectives_of_all_groups_in_one_order(processes, places, zero_stage):
    """Those of modules and those of the schedule, on devices that would wait for ever in two different orders."""
    task = Task("llama", num_micro_batches=2, iterations=3)
    decisions = decide(task, uniform(*places), data_parallel=2, context_parallel=2, zero_stage=zero_stage)
    results = processes.call(2, trained_on_gpu_in_turn, task, decisions, timeout_s=40.0)
    assert results[0] == results[1]


@pytest.mark.part(2)
@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_keys_that_pass_on_beside_attention_are_those_that_were_made(processes, activations):
    """The stream that passes them waits for what is computed, which waits for what has come."""
    task = Task("llama-shared", num_micro_batches=2, iterations=3, max_norm=0.5)
    choose = uniform("host", "cpu", activations)
    decisions = decide(task, choose, data_parallel=2, context_parallel=2, context_exchange="ring", zero_stage=3)
    results = processes.call(2, trained_on_gpu_in_turn, task, decisions, timeout_s=60.0)
    assert [found for _, found in results] == [[], []]
    losses, _ = of_processes(task, 1, decisions)
    for seen, _ in results:
        assert seen == pytest.approx(losses[0], rel=5e-3)  # sums of keys' gradients are rounded once more

    if activations == "keep":
        blind = processes.call(2, trained_on_gpu, task, decisions, Lane.RING)
        assert all(found for _, found in blind)


def test_a_collective_that_waits_for_nothing_is_found(processes):
    task = Task("llama", iterations=2)
    decisions = decide(task, uniform("gpu", "cpu"), data_parallel=2, zero_stage=3)
    results = processes.call(2, trained_on_gpu, task, decisions, Lane.COLLECTIVE)
    assert all(found for _, found in results)


@pytest.mark.parametrize(
    ("place", "broken"),
    [
        (("gpu", "gpu"), (LaneMachine, "wait", threads_alone)),
        (("nvme", "nvme"), (Actions, "synchronize", lambda _self: None)),
    ],
)
def test_what_is_not_waited_for_between_steps_is_found(place, broken, monkeypatch):
    monkeypatch.setattr(*broken)
    task = Task("llama", iterations=1)
    with watched() as races:
        model, optimizer = prepare(task, decide(task, uniform(*place)), device="cuda")
        with optimizer.session:
            train(task, model, optimizer)
            with torch.no_grad():
                model.eval()(input_ids=batches(task)[0, 0].to("cuda"))
    assert races.found


def test_kernels_of_a_device_take_numbers_alone_from_the_host(gpu):  # noqa: ARG001 - a fixture
    on_device, on_host = torch.arange(4, device="cuda"), torch.arange(4)
    assert (on_device[on_host] * torch.tensor(2)).tolist() == [0, 2, 4, 6]  # places too
    for run in (torch.cat, torch.stack, lambda pair: pair[0].index_select(0, pair[1])):
        with pytest.raises(RuntimeError, match="same device"):
            run([on_device, on_host])


# The oracle itself, on two streams.


@pytest.mark.parametrize(("between", "is_race"), [("nothing", True), ("event", False), ("host", False)])
def test_two_streams_are_ordered_by_events_and_by_the_host(gpu, between, is_race):  # noqa: ARG001 - a fixture
    races, other = watch_two_streams(between)
    assert bool(races.found) == is_race
    assert other.item() == 2


def watch_two_streams(between):
    races = Races()
    install().observe(races)
    try:
        side = torch.cuda.Stream()
        values = torch.ones(1000, device="cuda").mul_(2)
        if between == "event":
            event = torch.cuda.Event()
            event.record()
            side.wait_event(event)
        elif between == "host":
            torch.cuda.synchronize()
        with torch.cuda.stream(side):
            other = values[-1:].clone()
            event = torch.cuda.Event()
            event.record()
        event.synchronize()
    finally:
        install().observe(None)
    return races, other


@pytest.mark.parametrize("recorded", [False, True])
def test_memory_that_another_stream_still_uses_is_not_free(gpu, recorded):  # noqa: ARG001 - a fixture
    races = Races()
    install().observe(races)
    try:
        side = torch.cuda.Stream()
        values = torch.ones(1000, device="cuda")
        event = torch.cuda.Event()
        event.record()
        side.wait_event(event)
        with torch.cuda.stream(side):
            total = values.sum()
        if recorded:
            values.record_stream(side)
        del values
        torch.cuda.synchronize()
    finally:
        install().observe(None)
    assert bool(races.found) != recorded
    assert total.item() == 1000


def test_tasks_of_lanes_give_the_host_little_to_do(monkeypatch):
    """Their threads share the interpreter with the caller. What can be kept for the next iteration is not made anew."""
    found, perform = Counter(), Actions.perform

    class Operators(TorchDispatchMode):
        def __init__(self, op):
            super().__init__()
            self.op = op

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            found[self.op, func.__name__.partition(".")[0]] += 1
            return func(*args, **(kwargs or {}))

    def counted(self, task, iteration):
        with Operators(task.op) if iteration else contextlib.nullcontext():
            perform(self, task, iteration)

    monkeypatch.setattr(Actions, "perform", counted)
    task = Task("llama", torch.float32, iterations=3)
    with present():
        model, optimizer = prepare(task, decide(task, uniform("host", "cpu")), device="cuda")
        with optimizer.session as session:
            train(task, model, optimizer)
            units = [unit for unit in session.runtime.state.units.values() if unit.parameters]
    counts = [len(parameter.leaving) for unit in units for parameter in unit.parameters]
    assert {key: count for key, count in found.items() if key[0] is Op.FLUSH} == {
        (Op.FLUSH, "copy_"): 2 * sum(counts),
        (Op.FLUSH, "linalg_vector_norm"): 2 * sum(counts),
        (Op.FLUSH, "slice"): 4 * sum(count for count in counts if count > 1),
        (Op.FLUSH, "record_stream"): 2 * len(counts),
    }
    assert {name for op, name in found if op is Op.FETCH} == {"copy_"}
    # detach makes numpy's arrays, and pieces are sliced where the rules of their parameters differ.
    assert {name for op, name in found if op is Op.UPDATE} == {"detach", "slice"}


def test_only_overlapping_accesses_of_which_one_writes_are_races():
    for ranges, writes in itertools.product([(0, 100), (100, 100), (99, 1)], [(False, False), (True, False)]):
        races = Races()
        races.allocated(4096, 200, 0)
        races.launched("first", 1, [(4096, 100, writes[0])])
        races.launched("second", 2, [(4096 + ranges[0], ranges[1], writes[1])])
        assert bool(races.found) == (any(writes) and ranges[0] < 100)


def test_how_much_was_looked_at():
    assert NUM_LOOKED_AT["accesses"] > 100_000
