"""A parked session has no device memory; afterwards training goes on with the same bits."""

import pytest
import torch
from amount import examples
from forked import completed
from hypothesis import given, settings
from plans import mixed, plans
from rank_programs import measured_while_parked, parked_on_the_way
from rank_references import reference as of_ranks
from ranks import assert_same_bits
from training import Task, assert_same, batches, decide, prepare, reference, train, uniform

from executor.devices.cuda import CudaBackend
from executor.memory.arenas import DeviceMemoryError
from planner.schedule.loop import OutOfOrderError
from planner.schedule.tasks import Tier

TASK = Task("llama", torch.bfloat16)


def parked(session, checks=lambda: None):
    """Park and unpark, as a loop with rollouts does after each step."""

    def between(_iteration):
        session.park()
        assert not sum(session.memory()[Tier.GPU].static_bytes.values())
        checks()
        session.unpark()

    return between


@given(case=plans(families=("gpt2", "llama-tied")))
@settings(max_examples=examples(30))
def test_training_with_parking_after_each_step_gives_the_same_bits(case):
    task, decisions = case
    model, optimizer = prepare(task, decisions)
    with optimizer.session as session:

        def streamed():
            found = {name: values.clone() for name, values in session.stream_weights()}
            before.update(found)

        before = {}
        seen = train(task, model, optimizer, after_step=parked(session, streamed))
        final = {name: values.clone() for name, values in session.full_parameters().items()}
        assert {name: before[name].tolist() for name in final} == {n: v.tolist() for n, v in final.items()}
    assert_same((seen, final), reference(task))
    assert all(torch.equal(final[name], values) for name, values in reference(task)[1].items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_on_a_gpu(gpu, monkeypatch, dtype):  # noqa: ARG001 - a GPU
    """The virtual one cannot give memory back: what is left there is overwritten instead."""
    if not torch.version.cuda:
        monkeypatch.setattr(CudaBackend, "release", lambda _, block: block.fill_(255).nbytes)
        monkeypatch.setattr(CudaBackend, "restore", lambda *_: None)
    task = Task("llama", dtype)
    decisions = decide(task, mixed)
    model, optimizer = prepare(task, decisions, device="cuda")
    with optimizer.session as session:
        seen = train(task, model, optimizer, after_step=parked(session))
        final = {name: values.cpu() for name, values in session.full_parameters().items()}
    model, optimizer = prepare(task, decisions, device="cuda")
    with optimizer.session as session:
        assert train(task, model, optimizer) == seen
        assert all(torch.equal(final[name], values.cpu()) for name, values in session.full_parameters().items())


FROZEN = frozenset({"transformer.wte.weight", "transformer.h.0.mlp.c_fc.weight", "transformer.h.2.attn.c_attn.weight"})


@pytest.mark.part(2)
@pytest.mark.parametrize(
    ("zero_stage", "choose", "frozen"),
    [
        (1, uniform("gpu", "gpu"), frozenset()),
        (3, mixed, frozenset()),
        (3, uniform("gpu", "gpu"), FROZEN),
        (3, mixed, FROZEN),
    ],
    ids=["1", "3", "3, frozen, resident", "3, frozen"],
)
def test_ranks_park_together(processes, zero_stage, choose, frozen):
    task = Task("gpt2", torch.bfloat16, frozen=frozen)
    decisions = decide(task, choose, data_parallel=2, zero_stage=zero_stage)
    assert_same_bits(processes.call(2, parked_on_the_way, task, decisions), of_ranks(task, 2, decisions))


def test_what_the_host_has_does_not_move_and_the_prediction_is_that_of_the_link():
    for place, moved in (("gpu", True), ("cpu", False)):
        _, optimizer = prepare(TASK, decide(TASK, uniform("gpu", place)), link_bytes_per_s=(1e9, 2e9))
        with optimizer.session as session:
            device_bytes = sum(session.memory()[Tier.GPU].static_bytes.values())
            away = session.park()
            back = session.unpark()
        assert away.num_bytes == (device_bytes if moved else 0)
        assert away.device_bytes == back.device_bytes == device_bytes
        assert back.num_bytes == device_bytes
        assert (away.predicted_s, back.predicted_s) == (away.num_bytes / 1e9, back.num_bytes / 2e9)
        assert min(away.seconds, back.seconds) > 0


def test_weights_can_stay_on_the_device():
    model, optimizer = prepare(TASK, decide(TASK, uniform("gpu", "gpu")))
    with optimizer.session as session:
        views = session.full_parameters()
        before = {name: values.clone() for name, values in views.items()}
        away = session.park(keep_weights=True)
        weight_bytes = sum(values.nbytes for values in before.values())
        assert sum(session.memory()[Tier.GPU].static_bytes.values()) == weight_bytes
        assert away.num_bytes == 6 * weight_bytes  # a float32 master copy and two moments of bf16
        assert all(torch.equal(views[name], values) for name, values in before.items())
        session.unpark()
        assert train(TASK, model, optimizer) == reference(TASK)[0]


def test_nothing_else_is_done_while_parked():
    model, optimizer = prepare(TASK, decide(TASK, mixed))
    tokens = batches(TASK)[0, 0]
    with optimizer.session as session:
        with pytest.raises(OutOfOrderError, match=r"the session is not parked; call session\.park"):
            session.unpark()
        loss = model(input_ids=tokens, labels=tokens).loss
        with pytest.raises(OutOfOrderError, match="a step is under way"):
            session.park()
        loss.backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        session.park()
        for act in (
            lambda: model(input_ids=tokens, labels=tokens),
            lambda: model.eval()(input_ids=tokens),
            model.state_dict,
            optimizer.state_dict,
            session.full_parameters,
            session.park,
        ):
            with pytest.raises(OutOfOrderError, match=r"the session is parked, .*; call session\.unpark\(\) first"):
                act()
        for parameter in model.parameters():
            with pytest.raises(ValueError, match=r"its session is parked; call session\.unpark\(\)"):
                parameter.isnan()
    assert not any(parameter.isnan().any() for parameter in model.parameters())  # it was closed


def test_memory_that_others_have_taken_leaves_it_parked(monkeypatch):
    _, optimizer = prepare(TASK, decide(TASK, uniform("gpu", "gpu")))
    with optimizer.session as session:
        before = {name: values.clone() for name, values in session.full_parameters().items()}
        session.park()
        with monkeypatch.context() as patched:
            patched.setattr(type(session.runtime.backend), "restore", _full)
            with pytest.raises(DeviceMemoryError, match="parked memory needs"):
                session.unpark()
        assert all(torch.equal(before[name], values) for name, values in session.stream_weights())
        session.unpark()
        assert all(torch.equal(before[name], values) for name, values in session.full_parameters().items())


def _full(*_args):
    raise MemoryError


def test_the_system_has_the_memory_meanwhile():
    done = completed(measured_while_parked)
    assert not done.returncode, done.stderr
    device_bytes, before, meanwhile, after = map(int, done.stdout.split())
    assert before - meanwhile > 0.95 * device_bytes
    assert after - meanwhile > 0.95 * device_bytes
