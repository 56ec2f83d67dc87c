"""``model.no_sync()`` around micro-batches without a step: the loop of DistributedDataParallel, as it is."""

import contextlib
import re

import pytest
import torch
from plans import mixed
from training import Task, assert_same, batches, decide, prepare, reference, uniform

from executor.gradients import GradientError
from planner.loop import OutOfOrderError


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
        for *first, last in batches(task):
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


@pytest.mark.parametrize("each", [True, False], ids=["around each", "around all"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_usual_loop_trains_to_the_same_bits(count, each):
    task = Task("llama", torch.bfloat16, count)
    assert_same(trained_as_by_ddp(task, mixed, each=each), reference(task))


class Loop:
    """Steps of a user's loop, one by one."""

    def __init__(self, num_micro_batches):
        self.task = Task("gpt2", num_micro_batches=num_micro_batches, schedule=False)
        self.model, self.optimizer = prepare(self.task, decide(self.task, uniform("gpu", "cpu")))

    def forward(self):
        tokens = batches(self.task)[0, 0]
        return self.model(input_ids=tokens, labels=tokens).loss

    def backward(self):
        self.forward().backward()

    def inside(self):
        with self.model.no_sync():
            self.backward()


def too_few(loop):
    loop.inside()
    loop.backward()


def too_many(loop):
    for _ in range(3):
        loop.inside()


def too_many_backward_alone(loop):
    loop.inside()
    loop.inside()
    loss = loop.forward()
    with loop.model.no_sync():
        loss.backward()


def step_inside(loop):
    loop.inside()
    with loop.model.no_sync():
        loop.optimizer.step()


def step_too_early(loop):
    loop.inside()
    loop.optimizer.step()


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (too_few, r"left no_sync\(\) with micro-batch 2, but the plan has 3 .*inside, or plan with --accumulate 2"),
        (too_many, r"holds micro-batch 3, but the plan has 3 .*leave no_sync\(\) for it, or plan with --accumulate 4"),
        (too_many_backward_alone, r"holds micro-batch 3, but the plan has 3"),
        (step_inside, r"optimizer.step\(\) came inside no_sync\(\)"),
        (step_too_early, r"optimizer.step\(\) came when the plan expects .* the plan has 3 forward and backward"),
    ],
)
def test_misuse_is_told(misuse, message):
    loop = Loop(3)
    with loop.optimizer.session, pytest.raises(OutOfOrderError) as caught:
        misuse(loop)
    assert re.search(message, str(caught.value)), caught.value
    assert "\n" not in str(caught.value)


def test_zero_grad_between_micro_batches_is_refused_and_elsewhere_as_in_torch():
    loop = Loop(2)
    with loop.optimizer.session as session:
        before = {n: w.clone() for n, w in session.full_parameters().items()}
        loop.optimizer.zero_grad()
        loss = loop.forward()
        loop.optimizer.zero_grad()  # before anything has come
        loss.backward()
        with pytest.raises(GradientError, match=r"what micro-batches before it have added up; call it after"):
            loop.optimizer.zero_grad()
        loop.backward()
        loop.optimizer.zero_grad()  # drops all, so that nothing is updated
        loop.optimizer.step()
        assert all(torch.equal(w, before[n]) for n, w in session.full_parameters().items())


def drop(loop):
    loop.model.zero_grad()
    loop.backward()


def drop_one(loop):
    next(loop.model.parameters()).grad = None
    loop.backward()


def replace(loop):
    weight = next(loop.model.parameters())
    weight.grad = torch.zeros_like(weight)
    loop.backward()


def clip(loop):
    torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0)


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (drop, r"was dropped after micro-batch 1 of 2"),
        (drop_one, r"was dropped after micro-batch 1 of 2"),
        (replace, r"was replaced after micro-batch 1 of 2"),
        (clip, r"after micro-batch 1 of 2; .* clip after that"),
    ],
)
def test_what_is_done_to_gradients_between_micro_batches_is_refused_or_seen(misuse, message):
    """In torch it would change what is added up; here that has left. Nobody trains on with something else."""
    loop = Loop(2)
    with loop.optimizer.session:
        loop.backward()
        with pytest.raises(GradientError, match=message):
            misuse(loop)
    assert all(parameter.grad is None or misuse is replace for parameter in loop.model.parameters())


def test_a_closed_model_has_no_context_and_one_micro_batch_is_the_last():
    loop = Loop(1)
    with loop.optimizer.session, pytest.raises(OutOfOrderError, match="holds micro-batch 1, but the plan has 1"):
        loop.inside()
    assert not hasattr(loop.model, "no_sync")
