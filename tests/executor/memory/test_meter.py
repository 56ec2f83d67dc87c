"""What the meter counts is what the schedule says and what PyTorch's allocator gives out."""

import itertools
import time
from collections.abc import Callable

import pytest
import torch
from plans import mixed
from training import (
    CONFIGS,
    MICRO_BATCH,
    NUM_TOKENS,
    SEQ_LEN,
    Task,
    assert_memory_is_stated,
    batches,
    decide,
    make_model,
    memory_of_step,
    one_iteration,
    prepare,
    some_of_each,
    uniform,
)

from executor.devices.meter import MemoryMeter
from executor.memory.activations import OffloadedActivations
from planner.schedule.tasks import Lane, Op, Tier


@pytest.mark.parametrize(
    "choose",
    [some_of_each, uniform("gpu", "gpu"), uniform("host", "cpu"), uniform("gpu", "cpu"), uniform("gpu", "nvme"), mixed],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_memory_taken_once_is_what_the_schedule_says(choose, dtype):
    task = Task("llama", dtype)
    _, optimizer = prepare(task, decide(task, choose))
    with optimizer.session as session:
        assert_memory_is_stated(session)


def test_gradients_and_activations_are_metered():
    task = Task("llama", torch.float32, max_norm=None)
    peaks, after_forward = {}, {}
    for activations in ("keep", "recompute"):
        model, optimizer = prepare(task, decide(task, uniform("host", "cpu", activations)))
        with optimizer.session as session:
            assert session.memory()[Tier.GPU].dynamic_peak_bytes is None
            with session.metered():
                one_iteration(model, optimizer, batches(task)[0, 0])
            memory = session.memory()[Tier.GPU]
            peaks[activations] = memory.dynamic_peak_bytes
            assert memory.peak_bytes > peaks[activations]
            tasks = session.schedule.tasks
            assert set(memory.dynamic_bytes_of) >= {task.index for task in tasks if task.lane is Lane.COMPUTE}
            assert max(memory.dynamic_bytes_of.values()) == peaks[activations]
            forward = [n for task, n in memory.dynamic_bytes_of.items() if tasks[task].op is Op.FORWARD]
            after_forward[activations] = forward[-1]
    assert after_forward["keep"] > after_forward["recompute"]
    assert peaks["keep"] > peaks["recompute"] > MICRO_BATCH * SEQ_LEN * 32 * 4


class _Probe(torch.autograd.Function):
    """Passes values on, and calls a function when backward comes by."""

    @staticmethod
    def forward(ctx, values, when):
        ctx.when = when
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.when()
        return gradient, None


@pytest.mark.parametrize("own_loss", [True, False])
def test_the_backward_of_a_models_own_loss_belongs_to_its_last_unit(own_loss):
    """What is brought back meanwhile is planned so, and the memory of both counts together."""
    task = Task("llama", torch.float32, max_norm=None)
    model, optimizer = prepare(task, decide(task, uniform("host", "cpu", "offload")))
    found, inner = [], model.loss_function
    with optimizer.session as session:

        def loss_of(logits, *args, **more):
            return inner(_Probe.apply(logits, lambda: found.append(session.driver.progress.task)), *args, **more)

        model.loss_function = loss_of
        tokens = batches(task)[0, 0]
        if own_loss:
            one_iteration(model, optimizer, tokens)
        else:
            loss_of(model(input_ids=tokens).logits, tokens, NUM_TOKENS).backward()
            optimizer.step()
    assert [(at.op, at.unit) for at in found] == [(Op.BACKWARD if own_loss else Op.FORWARD, "head")]


def test_what_is_metered_does_not_depend_on_how_fast_activations_come_back(monkeypatch):
    task, found = Task("llama", torch.float32), []
    reload = OffloadedActivations.reload

    def slow(activations, unit, tile):
        time.sleep(0.02)
        reload(activations, unit, tile)

    for way in (reload, slow):
        monkeypatch.setattr(OffloadedActivations, "reload", way)
        model, optimizer = prepare(task, decide(task, uniform("host", "cpu", "offload")))
        with optimizer.session as session:
            held = memory_of_step(model, optimizer, batches(task)[0, 0])[Tier.GPU].dynamic_bytes_of
            tasks = session.schedule.tasks
            found.append([n for i, n in held.items() if (tasks[i].op, tasks[i].unit) == (Op.BACKWARD, "head")])
    assert found[0] == found[1]


def test_the_meter_counts_exactly():
    x = torch.ones(1000)
    with MemoryMeter() as meter:
        y = x * 2  # 4000 B
        z = y.view(10, 100)  # a view: nothing
        w = torch.cat([y, y])  # 8000 B
        assert meter.held_bytes == meter.peak_bytes == 12000
        del y
        assert meter.held_bytes == 12000, "the view keeps it"
        del z
        assert meter.held_bytes == 8000
        w.add_(1)
        like = torch.empty_like(w, device="meta")  # without values: nothing
        assert meter.held_bytes == 8000
    assert like.untyped_storage().nbytes() == 8000
    assert meter.peak_bytes == 12000


def test_gradients_that_meet_are_metered_as_added_in_place():
    """As autograd does while nobody looks: three vectors at once, here and in backward, and no fourth for the sum."""
    x = torch.ones(1000, requires_grad=True)
    with MemoryMeter() as meter:
        y = x * 1
        loss = (y * 2).sum() + (y * 3).sum()
        loss.backward()
        del loss
        assert meter.held_bytes == 8000, "what was added up is held, once nothing else is: y and the gradient"
    assert 12000 <= meter.peak_bytes < 12100
    assert x.grad.tolist() == [5.0] * 1000


def allocated_peak(step: Callable[[], None]) -> int:
    """Return the most bytes that PyTorch's allocator had given out at one time, by its own account."""
    with torch.profiler.profile(profile_memory=True) as profile:
        step()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(itertools.accumulate(changes))


@pytest.mark.parametrize("num_tokens", [2, SEQ_LEN])
@pytest.mark.parametrize("family", CONFIGS)
def test_the_meter_agrees_with_the_allocator(family, num_tokens):
    """Few tokens: gradients are the peak, among them those of tied weights, which nobody adds up in place."""
    model = make_model(Task(family, torch.float32))
    tokens = torch.arange(num_tokens).unsqueeze(0) % 16

    def step() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()

    allocated_bytes = allocated_peak(step)
    model.zero_grad(set_to_none=True)
    with MemoryMeter() as meter:
        step()
    assert meter.peak_bytes == pytest.approx(allocated_bytes, rel=1e-3)
