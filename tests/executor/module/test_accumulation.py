"""``model.no_sync()`` around micro-batches without a step: the loop of DistributedDataParallel, as it is."""

import contextlib
import dataclasses
import time
import types
import warnings

import numpy as np
import pytest
import torch
from amount import examples
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from plans import mixed, plans
from training import (
    ReferenceOptimizer,
    Task,
    assert_same,
    batches,
    decide,
    grouped,
    make_model,
    make_optimizer,
    planned,
    prepare,
    reference,
    train,
    uniform,
)

from executor.gradients import GradientError


def trained_as_by_ddp(task, choose, *, each):
    """Train with the context around each of the first micro-batches, or around all of them together."""
    model, optimizer = prepare(task, decide(task, choose))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, task.iterations)
    torch.manual_seed(11)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]  # in the reference's order of sums
    seen = []

    def backward(tokens):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        seen.append(loss.item())

    with optimizer.session as session:
        for *first, last in grouped(task, batches(task)):
            with contextlib.nullcontext() if each else model.no_sync():
                for tokens in first:
                    with model.no_sync() if each else contextlib.nullcontext():
                        backward(tokens)
            backward(last)
            seen.append(float(torch.nn.utils.clip_grad_norm_(parameters, task.max_norm)))
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        return seen, {n: w.clone() for n, w in session.full_parameters().items()}


@pytest.mark.part(2)
@pytest.mark.parametrize("each", [True, False], ids=["around each", "around all"])
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (2, 2, 2, 2), (3, 3, 3, 3), (3, 1, 3, 2)])
def test_the_usual_loop_trains_to_the_same_bits(sizes, each):
    task = Task("llama", torch.bfloat16, max(sizes), group_sizes=sizes)
    assert_same(trained_as_by_ddp(task, mixed, each=each), reference(task))


@settings(max_examples=examples(15), deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])
@given(plans().filter(lambda plan: min(plan[0].group_sizes) < plan[0].num_micro_batches), st.integers(0, 99))
def test_a_short_group_trains_as_in_memory(plan, seed):
    """A loop whose data end before a group is full makes its step all the same, with what is there."""
    task, decisions = plan
    assert_same(planned(task, decisions, delays=seed), reference(task))


@pytest.mark.parametrize(
    ("params", "place", "start"), [("gpu", "gpu", "backward"), ("host", "stream", "step"), ("nvme", "nvme", "backward")]
)
def test_a_short_group_trains_wherever_updates_are_and_begin(params, place, start):
    task = Task("small", torch.float32, 3, None if start == "backward" else 0.5, 4, group_sizes=(3, 1, 2, 3))
    decisions = decide(task, uniform(params, place, "recompute"), update_start=start)
    assert_same(planned(task, decisions), reference(task))


def test_a_loop_that_accumulates_less_than_planned_is_reported_once():
    task = Task("small", num_micro_batches=4, iterations=5, group_sizes=(2, 2, 2, 4, 2))
    with pytest.warns(RuntimeWarning, match=r"fewer .*plan's 4.*--accumulate 2") as warned:
        planned(task, decide(task, uniform("gpu", "cpu")))
    assert len(warned) == 1
    task = dataclasses.replace(task, group_sizes=(4, 2, 2, 4, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        planned(task, decide(task, uniform("gpu", "cpu")))


def test_times_of_short_groups_are_left_out():
    """So that means over iterations are those of whole ones, whose time between two beginnings has no gap."""
    task = Task("gpt2", torch.float32, 3, iterations=5, group_sizes=(3, 3, 1, 3, 3))
    model, optimizer = prepare(task, decide(task, uniform("host", "cpu")), record=True)
    with optimizer.session as session:
        begin_s = time.perf_counter()
        train(task, model, optimizer, before_step=lambda iteration: time.sleep(0.2 * (iteration == 2)))
        timeline = session.timeline()
        assert timeline.num_iterations == 4
        assert not np.isnan(timeline.start_s).any()
        assert sum(timeline.period_s(i) for i in range(4)) < timeline.makespan_s() + 1e-6
        assert timeline.makespan_s() < time.perf_counter() - begin_s - 0.2
        assert session.iteration == 5


class Loop:
    """Steps of a user's loop, one by one."""

    def __init__(self, num_micro_batches, params="gpu", max_norm=0.5, **given):
        self.task = Task("gpt2", num_micro_batches=num_micro_batches, schedule=False, max_norm=max_norm)
        self.model, self.optimizer = prepare(self.task, decide(self.task, uniform(params, "cpu"), **given))

    def forward(self):
        tokens = batches(self.task)[0, 0]
        return self.model(input_ids=tokens, labels=tokens).loss

    def backward(self):
        self.forward().backward()

    def inside(self):
        with self.model.no_sync():
            self.backward()


def test_zero_grad_drops_what_has_been_added_up_so_far():
    loop = Loop(2)
    with loop.optimizer.session as session:
        before = {n: w.clone() for n, w in session.full_parameters().items()}
        loop.optimizer.zero_grad()
        loss = loop.forward()
        loop.optimizer.zero_grad()  # before anything has come
        loss.backward()
        loop.optimizer.zero_grad()
        loop.backward()
        loop.optimizer.zero_grad()  # drops all, so that nothing is updated
        loop.optimizer.step()
        assert all(torch.equal(w, before[n]) for n, w in session.full_parameters().items())


@pytest.mark.parametrize("params", ["gpu", "host"])
@pytest.mark.parametrize("edit", ["replaced", "zeroed", "in views", "another class"])
def test_gradients_that_are_changed_between_micro_batches_are_what_is_added_to(edit, params):
    """As many micro-batches as planned."""

    def train(loop, optimizer, forward):
        for number in range(2):
            forward().backward()
            for weight in list(loop.model.parameters())[number : 3 + number]:
                if edit == "replaced":
                    weight.grad = weight.grad * 0.5 - weight.grad.mean()
                elif edit == "zeroed":
                    weight.grad.zero_()
                elif edit == "in views":
                    weight.grad.view(-1)[::2].mul_(0.5)
                else:
                    torch._foreach_clamp_max_([weight.grad, torch.ones(2)], 1e-3)
        optimizer.step()
        optimizer.zero_grad()

    assert not differing(train, params)


def differing(train, params="gpu") -> list[str]:
    """Return the weights that differ after ``train(loop, optimizer, forward)`` in memory and under a plan of two."""
    loop = Loop(2, params)
    plain = types.SimpleNamespace(model=make_model(loop.task))
    reference, tokens = ReferenceOptimizer(make_optimizer(loop.task, plain.model)), batches(loop.task)[0, 0]
    torch.manual_seed(11)
    train(plain, reference, lambda: plain.model(input_ids=tokens, labels=tokens).loss)
    with loop.optimizer.session as session:
        torch.manual_seed(11)
        train(loop, loop.optimizer, loop.forward)
        found = session.full_parameters()
        return [name for name, weight in plain.model.named_parameters() if not torch.equal(found[name], weight)]


def test_gradients_that_are_scaled_between_micro_batches_are_what_is_added_to():
    def train(loop, optimizer, forward):
        forward().backward()
        for weight in loop.model.parameters():
            weight.grad.mul_(0.5)
        forward().backward()
        optimizer.step()
        optimizer.zero_grad()

    assert not differing(train)


@pytest.mark.parametrize("through", ["optimizer", "model", "one"])
@pytest.mark.parametrize("count", [1, 3])
def test_gradients_that_are_dropped_on_the_way_are_not_added(through, count):
    """As many micro-batches as planned or not, and whatever ``no_sync()`` says."""

    def train(loop, optimizer, forward):
        for number in range(count):
            with getattr(loop.model, "no_sync", contextlib.nullcontext)() if number else contextlib.nullcontext():
                forward().backward()
            if number == count // 2 - 1:
                if through == "one":
                    next(loop.model.parameters()).grad = None
                else:
                    (optimizer if through == "optimizer" else loop.model).zero_grad()
        forward().backward()
        optimizer.step()

    assert not differing(train)


def each_to_none(model, _optimizer):
    for parameter in model.parameters():
        parameter.grad = None


DROPS = {
    "optimizer": lambda _model, optimizer: optimizer.zero_grad(),
    "optimizer, zeros": lambda _model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model": lambda model, _optimizer: model.zero_grad(),
    "model, zeros": lambda model, _optimizer: model.zero_grad(set_to_none=False),
    "each": each_to_none,
    "each, zeros": lambda model, _: [p.grad.zero_() for p in model.parameters() if p.grad is not None],
    "another optimizer": lambda model, _: torch.optim.SGD(model.parameters()).zero_grad(),
}


@pytest.mark.part(3)
@pytest.mark.parametrize("when", ["after the step", "before forward", "before backward"])
@pytest.mark.parametrize("how", DROPS)
def test_gradients_are_dropped_in_any_way(how, when):
    """On the plan, and to the bits of training in memory."""
    seen = []

    def train(loop, optimizer, forward):
        for _ in range(3):
            losses = []
            for _ in range(2):
                if when == "before forward" and not losses:
                    DROPS[how](loop.model, optimizer)
                losses.append(forward())
                if when == "before backward" and len(losses) == 1:
                    DROPS[how](loop.model, optimizer)
                losses[-1].backward()
            optimizer.step()
            if when == "after the step":
                DROPS[how](loop.model, optimizer)
        seen.append(getattr(optimizer, "session", None))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not differing(train)
    assert seen[-1].num_left == 0


@pytest.mark.parametrize("how", [how for how in DROPS if "zeros" in how])
@pytest.mark.parametrize(
    "loop", ["no backward", "no forward", "a part frozen", "decay added", "dropped then", "set then"]
)
def test_gradients_of_zero_are_seen_and_updated(how, loop):
    """As in memory, momentum moves weights whose gradient is zero, but not those that have none."""

    def train(model_and_forward, optimizer, forward):
        model = model_and_forward.model
        forward().backward()
        optimizer.step()
        DROPS[how](model, optimizer)
        weights = list(model.parameters())
        assert all(weight.grad is not None and not weight.grad.any() for weight in weights[:2])
        if loop == "no backward":
            forward()
        elif loop != "no forward":
            for weight in weights[:-2]:
                weight.requires_grad_(False)
            forward().backward()
        if loop == "decay added":
            for weight in weights[:2]:
                weight.grad.add_(weight.detach(), alpha=0.1)
        elif loop == "dropped then":
            weights[0].grad = None
        elif loop == "set then":
            weights[0].grad = torch.ones_like(weights[0])
        optimizer.step()
        assert loop == "decay added" or not weights[1].grad.any()
        model.requires_grad_(True)
        optimizer.zero_grad()

    assert not differing(train)


def test_a_loop_that_never_drops_gradients_is_refused_before_its_second_step():
    """Plain PyTorch would add them up over steps, whose values are gone here."""
    loop = Loop(1)
    with loop.optimizer.session as session:
        loop.backward()
        loop.optimizer.step()
        loop.backward()
        before = {name: weight.clone() for name, weight in session.full_parameters().items()}
        with pytest.raises(
            GradientError,
            match=r"not dropped between optimizer.step\(\) and the next backward\(\).*call optimizer.zero",
        ):
            loop.optimizer.step()
        assert all(torch.equal(weight, before[name]) for name, weight in session.full_parameters().items())
        loop.optimizer.zero_grad()
        loop.backward()
        loop.optimizer.step()


@pytest.mark.parametrize(("start", "num_left"), [("step", 0), ("backward", 3)])
def test_gradients_on_the_way_to_another_model_may_come_on_used_ones(start, num_left):
    """As in a GAN, whose loop drops them before the discriminator's own turn."""
    loop, plain = (Loop(1, max_norm=None, update_start=begins) for begins in (start, "step"))
    with loop.optimizer.session as session, plain.optimizer.session, warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(3):
            for each in (loop, plain):
                torch.manual_seed(number)
                each.optimizer.zero_grad()
                each.backward()
                each.optimizer.step()
            loop.backward()  # for another model's sake
        assert session.num_left == num_left
        with pytest.raises(GradientError, match="not dropped between"):
            loop.optimizer.step()
        loop.optimizer.zero_grad()
        for name, values in plain.optimizer.session.full_parameters().items():
            assert torch.equal(values, session.full_parameters()[name])


def test_norms_that_were_read_can_be_read_after_the_step():
    loop = Loop(1)
    with loop.optimizer.session:
        loop.backward()
        weight = next(loop.model.parameters())
        norm = torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 1e-2)
        before = weight.grad.norm()
        loop.optimizer.step()
        assert norm > 1e-2
        assert weight.grad.norm() == before


def test_a_closed_model_has_no_context():
    loop = Loop(1)
    with loop.optimizer.session:
        assert hasattr(loop.model, "no_sync")
    assert not hasattr(loop.model, "no_sync")
