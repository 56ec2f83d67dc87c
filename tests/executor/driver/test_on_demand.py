"""Programs that leave the order of the plan are trained as in memory, bit for bit: weights come when modules run."""

import contextlib
import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import mixed, plans
from training import (
    ReferenceOptimizer,
    Task,
    assert_same,
    batches,
    decide,
    make_model,
    make_optimizer,
    prepare,
    uniform,
    weights,
)

from executor.callbacks import replace_attribute
from planner.schedule.loop import OutOfOrderError

FORWARDS = ["whole", "without a block", "without the head", "evaluating", "no gradients"]


@st.composite
def programs(draw):
    """Any three steps: of each, what happens in which order."""
    event = st.one_of(
        st.tuples(st.just("forward"), st.sampled_from(FORWARDS)),
        st.tuples(st.just("backward"), st.sampled_from(["sum", "one by one", "the latest"])),
        st.tuples(st.sampled_from(["zero_grad", "give up"]), st.just("")),
    )
    return [draw(st.lists(event, max_size=6)) for _ in range(3)]


def blocks(model):
    return model.transformer.h if hasattr(model, "transformer") else model.model.layers


def forward(model, tokens, how):
    """Return a loss, in one of the ways that a loop may go forward."""
    base = getattr(model, "transformer", None) or model.model
    if how == "without the head":
        return base(input_ids=tokens).last_hidden_state.float().square().mean()
    with contextlib.ExitStack() as stack:
        if how == "without a block":
            skipped = replace_attribute(blocks(model)[1], "forward", lambda hidden, *_args, **_kwargs: hidden)
            stack.callback(skipped)
        if how == "evaluating":
            model.eval()
            stack.callback(model.train)
        if how == "no gradients":
            stack.enter_context(torch.no_grad())
        return model(input_ids=tokens, labels=tokens).loss


def run(program, model, optimizer, tokens, max_norm):
    """Run a loop; return what it sees."""
    torch.manual_seed(11)
    seen, tokens = [], iter(tokens.flatten(0, 1).repeat(20, 1, 1))
    for events in program:
        pending = []
        for what, how in [*events, ("forward", "whole"), ("backward", "the latest")]:
            if what == "forward":
                loss = forward(model, next(tokens), how)
                seen.append(loss.item())
                pending += [loss] if loss.requires_grad else []
            elif what == "give up" and max_norm is not None and any(p.grad is not None for p in model.parameters()):
                seen.append(float(optimizer.clip_grad_norm_(max_norm)))  # as if it were not finite
                optimizer.zero_grad()
            elif what in {"zero_grad", "give up"}:
                optimizer.zero_grad()
            elif pending and how == "sum":
                sum(pending).backward()
                pending.clear()
            else:
                for loss in pending[::-1] if how == "one by one" else pending[-1:]:
                    loss.backward()
                    pending.remove(loss)
        if max_norm is not None:
            seen.append(float(optimizer.clip_grad_norm_(max_norm)))
        optimizer.step()
        optimizer.zero_grad()
    return seen


def in_memory(program, task):
    model = make_model(task)
    optimizer = ReferenceOptimizer(make_optimizer(task, model))
    return run(program, model, optimizer, batches(task), task.max_norm), weights(model)


def planned(program, task, decisions, said=None):
    model, optimizer = prepare(task, decisions, report=(said if said is not None else []).append)
    with optimizer.session as session:
        seen = run(program, model, optimizer, batches(task), task.max_norm)
        return seen, {name: weight.clone() for name, weight in session.full_parameters().items()}


@given(plans(), programs())
@settings(max_examples=40, deadline=None)
def test_any_program_under_any_plan_trains_as_in_memory(plan, program):
    task, decisions = plan
    try:
        found = planned(program, task, decisions)
    except OutOfOrderError as error:
        assert "Updates of this plan begin in backward" in str(error)
    else:
        assert_same(found, in_memory(program, task))


TASK = Task("gpt2", iterations=3)
PLANS = {
    "mixed": mixed,
    "fetched, updated by the host": uniform("host", "cpu", "recompute"),
    "resident, updated by the host": uniform("gpu", "cpu", "offload"),
}


def gradients_that_come_late(model, _optimizer, batch, *, is_marked):
    """A value of the last iteration, not detached: its gradient arrives after its unit's, which has been flushed."""
    first, last = model.transformer.h[0], model.transformer.h[2]
    if not is_marked:  # backward passes the unit over instead of leaving it
        for module in (last.mlp.c_fc, last.mlp.c_proj, last.ln_2):
            module._forward_hooks.clear()
    kept = []
    first.mlp.register_forward_hook(lambda _module, _args, output: output + sum(kept))
    last.mlp.c_fc.register_forward_hook(lambda module, _args, _output: kept.append(module.bias.sum()))
    for _ in range(2):
        yield forward(model, batch, "whole")
        kept[:-1] = []


def exceptions(model, optimizer, batch, *, where):
    """A loop that catches what a forward or backward raises, and goes on with the next batch."""
    block, fails = model.transformer.h[1], [False]

    def raising(*_args):
        if fails[0]:
            raise FloatingPointError

    block.mlp.register_forward_hook(raising)
    if where == "backward":
        block.mlp.register_full_backward_hook(raising)
    for _ in range(2):
        loss = forward(model, batch, "whole")
        with contextlib.suppress(FloatingPointError):
            if where == "forward":
                fails[0] = True
                forward(model, batch, "whole")
            fails[0] = True
            loss.backward()
        fails[0] = False
        optimizer.zero_grad()
        yield forward(model, batch, "whole")


LOOPS = {
    "late": functools.partial(gradients_that_come_late, is_marked=True),
    "late, not marked": functools.partial(gradients_that_come_late, is_marked=False),
    "raising in forward": functools.partial(exceptions, where="forward"),
    "raising in backward": functools.partial(exceptions, where="backward"),
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("loop", LOOPS)
def test_loops_that_break_the_order_of_backward(loop, plan):
    def train(model, optimizer):
        torch.manual_seed(11)
        losses = []
        for loss in LOOPS[loop](model, optimizer, batches(TASK)[0, 0]):
            losses.append(loss.item())
            loss.backward()
            losses.append(float(optimizer.clip_grad_norm_(TASK.max_norm)))
            optimizer.step()
            optimizer.zero_grad()
        return losses

    model = make_model(TASK)
    expected = train(model, ReferenceOptimizer(make_optimizer(TASK, model))), weights(model)
    model, optimizer = prepare(TASK, decide(TASK, PLANS[plan]))
    with optimizer.session as session:
        found = train(model, optimizer)
        final = {name: weight.clone() for name, weight in session.full_parameters().items()}
    assert_same((found, final), expected)
