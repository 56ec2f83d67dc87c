"""Updates that begin before the norm is known: [Note: Speculation] in :mod:`executor.driver.speculation`."""

import dataclasses
import functools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import mixed
from training import Task, batches, decide, memory_of_step, prepare, reference, train, uniform, units_of, weights

from executor.devices.backend import as_array
from executor.optimizer.adamw import AdamWParams
from executor.optimizer.table import ENTRIES, Rule
from planner.lowering import lower
from planner.schedule.tasks import MemoryClass, Tier

EARLY = {"update_start": "backward", "speculate": True}
PLACES = {
    "device": uniform("gpu", "gpu"),
    "host": uniform("host", "cpu"),
    "streamed": uniform("host", "stream"),
    "nvme": uniform("nvme", "nvme"),
    "mixed": mixed,
}


def close(found, expected) -> None:
    """Compare what :func:`planned` gave with a reference, up to a few roundings of float32."""
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)
    for name, values in expected[1].items():
        assert (found[1][name] - values).norm() <= 2e-6 * values.norm(), name


def values_of(seed: int, count: int = 400):
    """Return weights, moments and a gradient, each of many sizes."""
    rng = np.random.default_rng(seed)
    sizes = 10.0 ** rng.uniform(-4, 1, (3, count))
    weight, moment, gradient = (rng.normal(size=(3, count)) * sizes).astype(np.float32)
    return weight, moment, np.square(sizes[1]).astype(np.float32), gradient


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    st.integers(0, 999),
    st.sampled_from([1, 2, 1000]),
    st.sampled_from([0.0, 0.1]),
    st.booleans(),
    st.sampled_from([(0.9, 0.95), (0.0, 0.999), (0.9, 0.999)]),
)
def test_a_step_that_is_taken_back_and_made_again_is_as_if_made_once(seed, step, decay, decoupled, betas):
    """Of the values before it, the error is that of float32 beside those after it, which came from them."""
    entry = ENTRIES[0]
    params = AdamWParams(1e-2, *betas, weight_decay=decay, decoupled_weight_decay=decoupled)
    first = values_of(seed)
    before = list(first[:3]) if step > 1 else [first[0], np.zeros_like(first[1]), np.zeros_like(first[2])]
    early = Rule(entry, params).limited()

    def take(rule: Rule, state) -> None:
        rule.entry.host(state, first[3], None, rule.params, step, rule.scale, None)

    state = [values.copy() for values in before]
    take(early, state)
    after = [values.copy() for values in state]
    take(early.back(), state)
    for back, old, new in zip(state[: 1 if 0.0 in betas else 3], before, after, strict=False):
        assert np.all(np.abs(back - old) <= 2e-6 * (np.abs(old) + np.abs(new)) + 1e-7 * np.abs(first[3]) ** 2 + 1e-8)
    late, expected = Rule(entry, params, scale=0.25), [values.copy() for values in before]
    take(late, state)
    take(late, expected)
    for found, wanted in zip(state, expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-7)


def test_what_cannot_be_taken_back_is_left_out():
    params = AdamWParams(1e-2)
    state = [torch.ones(4), torch.full((4,), 0.5), torch.full((4,), 0.25)]
    gradient = torch.tensor([1.0, float("nan"), float("inf"), -1e30])
    early = Rule(ENTRIES[0], params).limited()
    for rule in (early, early.back()):
        rule.entry.host([as_array(each) for each in state], as_array(gradient), None, rule.params, 7, 1.0, None)
        assert all(each.isfinite().all() for each in state)
    torch.testing.assert_close(state, [torch.ones(4), torch.full((4,), 0.5), torch.full((4,), 0.25)])


def clips(optimizer, _parameters, _iteration) -> None:
    optimizer.clip_grad_norm_(0.5)


def drops(_optimizer, parameters, iteration) -> None:
    parameters[iteration].grad = None


def skips(optimizer, parameters, iteration) -> None:
    if iteration == 2:
        parameters[1].grad.mul_(float("nan"))
    if not optimizer.clip_grad_norm_(1e6).isfinite():
        optimizer.zero_grad()


def scales(_optimizer, parameters, _iteration) -> None:
    for parameter in parameters:
        parameter.grad.mul_(0.5)


def changes_rate(optimizer, _parameters, iteration) -> None:
    optimizer.param_groups[0]["lr"] = 1e-3 / (1 + iteration)


@pytest.mark.parametrize(
    ("between", "num_unexpected"), [(clips, 6), (drops, 6), (skips, 2), (scales, 1), (changes_rate, 6)]
)
def test_what_a_loop_does_before_a_step_is_what_the_step_sees(between, num_unexpected):
    task = Task("llama", torch.float32, iterations=6, max_norm=1e6, schedule=False)
    outcomes = []
    for given_ in ({}, EARLY):
        model, optimizer = prepare(task, decide(task, mixed, **given_))
        parameters = list(model.parameters())
        seen = train(
            task, model, optimizer, clip=lambda _: 0.0, before_step=functools.partial(between, optimizer, parameters)
        )
        count = optimizer.session.driver.speculation.num_unexpected
        optimizer.session.close()
        outcomes.append((seen, weights(model)))
    assert count == num_unexpected
    close(outcomes[1], outcomes[0])


@pytest.mark.part(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("place", PLACES)
def test_steps_that_clip_are_made_again(place, dtype):
    """Some clip and some do not; the norms are those of training in memory, so no weight is wrong."""
    task = Task("llama", dtype, iterations=8, optimizer="adam" if place == "device" else "adamw")
    norms = reference(task)[0][1::2]
    task = dataclasses.replace(task, max_norm=1.0001 * sorted(norms)[6])
    model, optimizer = prepare(task, decide(task, PLACES[place], **EARLY))
    seen, driver = train(task, model, optimizer), optimizer.session.driver
    assert 0 < driver.speculation.num_unexpected < task.iterations
    optimizer.session.close()
    expected = reference(task)
    if dtype is torch.float32:
        close((seen, weights(model)), expected)
    else:  # a weight may round to the other side
        np.testing.assert_allclose(seen, expected[0], rtol=2e-2)


def test_gradients_stay_on_the_device_until_no_update_can_be_taken_back():
    task = Task("llama")
    waits, early = (decide(task, uniform("gpu", "gpu"), **given_) for given_ in ({}, EARLY))
    held = [
        (buffer.first, buffer.last)
        for buffer in lower(units_of(task), early, asynchronous=True).buffers
        if buffer.memory_class is MemoryClass.GRADIENTS
    ]
    assert held
    assert all(first > last for first, last in held), "from backward to the unit's next forward"
    peaks = []
    for decisions in (waits, early):
        model, optimizer = prepare(task, decisions)
        peaks.append(memory_of_step(model, optimizer, batches(task)[0, 0])[Tier.GPU].dynamic_peak_bytes)
        optimizer.session.close()
    assert peaks[1] >= peaks[0], "no gradient is freed earlier"
