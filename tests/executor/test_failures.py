"""What goes wrong is said at once, with a remedy, and leaves no thread."""

import copy

import pytest
import torch
from training import (
    Task,
    batches,
    decide,
    groups,
    make_model,
    model_units,
    prepare,
    session_options,
    train,
    uniform,
    weights,
)

from executor.devices.lanes import LaneError
from executor.distributed.shards import BindingError
from executor.gradients import GradientError
from executor.memory.arenas import Arena, DeviceMemoryError
from executor.options import Options, backend_of
from executor.prepare import prepare_session
from planner.schedule.loop import OutOfOrderError
from planner.schedule.tasks import MemoryClass, Op, Tier

TASK = Task("gpt2", torch.bfloat16, iterations=2)
KEEP = uniform("host", "cpu")


@pytest.fixture
def started():
    model, optimizer = prepare(TASK, decide(TASK, KEEP))
    with optimizer.session:
        yield model, optimizer, batches(TASK)[0, 0]


def loss_of(model, tokens):
    return model(input_ids=tokens, labels=tokens).loss


def test_steps_without_gradients_do_nothing_as_in_torch(started):
    model, optimizer, tokens = started
    before = weights(model)
    optimizer.step()
    assert all(torch.equal(weight, before[name]) for name, weight in weights(model).items())
    loss_of(model, tokens).backward()
    optimizer.step()
    optimizer.zero_grad()
    after = weights(model)
    optimizer.step()
    assert all(torch.equal(weight, after[name]) for name, weight in weights(model).items())
    assert optimizer.session.num_left == 0


@pytest.mark.parametrize("runs_forward", [False, True])
def test_a_step_with_used_gradients_is_refused(runs_forward, started):
    """Plain PyTorch would use them again."""
    model, optimizer, tokens = started
    loss_of(model, tokens).backward()
    optimizer.step()
    before = weights(model)
    if runs_forward:
        loss_of(model, tokens)
    with pytest.raises(GradientError, match=r"used up by the last optimizer.step\(\).*call optimizer.zero_grad"):
        optimizer.step()
    optimizer.zero_grad()
    loss_of(model, tokens).backward()
    assert all(torch.equal(weight, before[name]) for name, weight in weights(model).items())
    optimizer.step()


def test_state_is_that_of_the_last_step_until_the_next_one(started):
    model, optimizer, tokens = started
    loss_of(model, tokens).backward()
    optimizer.step()
    optimizer.zero_grad()
    before = copy.deepcopy(optimizer.state_dict())
    loss = loss_of(model, tokens)
    loss.backward()
    between = optimizer.state_dict()
    with pytest.raises(OutOfOrderError, match="a step is under way"):
        optimizer.load_state_dict(before)
    for number, state in before["state"].items():
        for key, value in state.items():
            assert torch.equal(between["state"][number][key], value), key
    optimizer.step()
    assert optimizer.state_dict()["state"][0]["step"] == before["state"][0]["step"] + 1
    with torch.no_grad():
        model(input_ids=tokens)


def test_clipping_under_a_plan_without(started):
    del started
    model, optimizer = prepare(TASK, decide(TASK, KEEP, clip=False, update_start="backward"))
    with optimizer.session:
        loss_of(model, batches(TASK)[0, 0]).backward()
        with pytest.raises(GradientError, match="clip=True"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        model.zero_grad()
        with pytest.raises(GradientError, match="after step"):
            optimizer.step()


def test_rates_that_change_after_backward_where_updates_have_begun(started):
    """In an iteration that was audited they have not, and then wait in those to come; else the step says so."""
    del started
    model, optimizer = prepare(TASK, decide(TASK, KEEP, clip=False, update_start="backward"))
    with optimizer.session:
        loss_of(model, batches(TASK)[0, 0]).backward()
        optimizer.param_groups[0]["lr"] *= 0.5
        with pytest.raises(ValueError, match=r"changed between backward and step.*clip=True"):
            optimizer.step()


@pytest.mark.parametrize("op", [Op.FETCH, Op.FLUSH, Op.UPDATE, Op.LOAD, Op.STORE, Op.UPLOAD, Op.SWAP_IN, Op.SWAP_OUT])
def test_a_failing_task_reaches_the_training_loop(op):
    place = {Op.LOAD: "stream", Op.STORE: "stream", Op.SWAP_IN: "nvme", Op.SWAP_OUT: "nvme"}.get(op, "cpu")
    params = "host" if op is Op.FETCH else "gpu"
    model, optimizer = prepare(TASK, decide(TASK, uniform(params, place)))
    machine = optimizer.session.runtime.machine
    perform = machine._perform

    def failing(task, iteration):
        if task.op is op:
            raise FloatingPointError("a broken cable")
        perform(task, iteration)

    machine._perform = failing
    with optimizer.session, pytest.raises(LaneError, match=rf"lane .* {op} .*a broken cable"):
        train(TASK, model, optimizer)
        optimizer.session.synchronize()


def test_the_device_is_too_small():
    decisions = decide(TASK, uniform("gpu", "gpu"))
    with pytest.raises(DeviceMemoryError) as caught:
        prepare(TASK, decisions, gpu_capacity_bytes=200_000)
    message = str(caught.value)
    assert "200,000 B capacity" in message
    assert "parameters" in message
    assert "optimizer" in message
    assert "Plan for" in message
    with pytest.raises(DeviceMemoryError, match="host"):
        prepare(TASK, decide(TASK, KEEP), host_capacity_bytes=10)


def test_all_of_a_memory_can_be_taken_and_no_more() -> None:
    arena = Arena(Tier.HOST, 128, backend_of(Options()))
    arena.take("half", MemoryClass.PARAMETERS, 16, torch.float32)
    with pytest.raises(DeviceMemoryError, match="needs 65 B"):
        arena.take("too much", MemoryClass.PARAMETERS, 65, torch.uint8)
    arena.take("the rest", MemoryClass.PARAMETERS, 64, torch.uint8)
    assert arena.used_bytes == 128


def test_the_system_has_too_little():
    """Nobody has a quarter of a petabyte; what the system says of it is no MemoryError of Python's."""
    arena = Arena(Tier.HOST, None, backend_of(Options()))
    with pytest.raises(DeviceMemoryError, match="host is out of memory: master needs") as caught:
        arena.take("master", MemoryClass.OPTIMIZER, 1 << 46, torch.float32)
    assert isinstance(caught.value.__cause__, OSError)
    assert not arena.used_bytes


def test_a_plan_for_several_devices():
    with pytest.raises(ValueError, match=r"2 device\(s\), but 1 process.* were started; .*torchrun --nproc-per-node 2"):
        prepare(TASK, decide(TASK, KEEP, pipeline_parallel=2))
    with pytest.raises(ValueError, match=r"2 device\(s\), but 1 process.* were started; .*torchrun --nproc-per-node 2"):
        prepare(TASK, decide(TASK, KEEP, data_parallel=2, zero_stage=3))


def test_another_model():
    decisions = decide(TASK, KEEP)

    def attempt(model):
        optimizer = torch.optim.AdamW(groups(model))
        prepare_session(model, optimizer, model_units("gpt2"), decisions, session_options())

    model = make_model(Task("llama"))
    with pytest.raises(BindingError, match="but the model has none with that name"):
        attempt(model)
    model = make_model(TASK)
    model.transformer.h[0].mlp.c_fc.weight = torch.nn.Parameter(torch.zeros(32, 64, dtype=torch.bfloat16))
    with pytest.raises(BindingError, match="has shape"):
        attempt(model)
    model = make_model(TASK)
    model.extra = torch.nn.Linear(2, 2)
    with pytest.raises(BindingError, match=r"extra\.weight"):
        attempt(model)
    model = make_model(TASK)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    with pytest.raises(BindingError, match="lm_head"):
        attempt(model)


def test_a_session_that_fails_when_it_has_taken_the_weights_gives_them_back(monkeypatch):
    def fails(*_args, **_options):
        raise MemoryError("no thread can be started")

    model = make_model(TASK)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    monkeypatch.setattr("executor.driver.runtime.LaneMachine", fails)
    with pytest.raises(MemoryError, match="no thread"):
        prepare_session(
            model, torch.optim.AdamW(groups(model)), model_units("gpt2"), decide(TASK, KEEP), session_options()
        )
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_another_optimizer():
    model = make_model(TASK)
    decisions = decide(TASK, KEEP)
    with pytest.raises(ValueError, match=r"the plan is for adamw, but the optimizer is SGD, .* --optimizer sgd"):
        prepare_session(model, torch.optim.SGD(model.parameters()), model_units("gpt2"), decisions)
    with pytest.raises(ValueError, match=r"the optimizer is Rprop, with other state; give ullage\.prepare\(\) a batch"):
        prepare_session(model, torch.optim.Rprop(model.parameters()), model_units("gpt2"), decisions)
    with pytest.raises(ValueError, match="the optimizer is AdamW, with other state"):
        optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
        prepare_session(model, optimizer, model_units("gpt2"), decisions)
    with pytest.raises(ValueError, match="the optimizer has no parameter that is one of the model"):
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))])
        prepare_session(model, optimizer, model_units("gpt2"), decisions)


def test_what_a_plan_cannot_do(started):
    model, optimizer, _ = started
    with pytest.raises(ValueError, match="before prepare"):
        model.load_state_dict(model.state_dict(), assign=True)
    state = optimizer.state_dict()
    state["param_groups"] = state["param_groups"][:1]
    with pytest.raises(ValueError, match="groups of"):
        optimizer.load_state_dict(state)


def test_an_error_in_the_users_own_code_closes_cleanly():
    model, optimizer = prepare(TASK, decide(TASK, KEEP))
    with pytest.raises(ZeroDivisionError), optimizer.session:
        loss_of(model, batches(TASK)[0, 0])
        raise ZeroDivisionError


def test_a_gradient_that_was_replaced(started):
    model, optimizer, tokens = started
    loss_of(model, tokens).backward()
    weight = next(iter(model.parameters()))
    before = weight.detach().clone()
    weight.grad = None
    optimizer.step()
    assert torch.equal(weight, before)
    optimizer.zero_grad()
    loss_of(model, tokens).backward()
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert not torch.equal(weight, before)
    optimizer.zero_grad()
    assert weight.grad is None
