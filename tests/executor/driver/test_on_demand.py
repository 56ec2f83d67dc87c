"""Programs that leave the order of the plan are trained as in memory, bit for bit: weights come when modules run."""

import contextlib
import functools

import pytest
import torch
from amount import examples
from hypothesis import Phase, example, given, settings
from plans import mixed, plans
from programs import forward, programs, run
from rank_programs import passing_over, ran
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

from planner.schedule.loop import OutOfOrderError


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
@settings(
    max_examples=examples(100), deadline=None, phases=[Phase.generate]
)  # to make an example smaller takes minutes
def test_any_program_under_any_plan_trains_as_in_memory(plan, program):
    task, decisions = plan
    try:
        found = planned(program, task, decisions)
    except OutOfOrderError as error:
        assert "Updates of this plan begin in backward" in str(error)
        assert decisions.update_start == "backward"
    else:
        (assert_near if decisions.takes_back else assert_same)(found, in_memory(program, task))


def assert_near(found, expected) -> None:
    """Compare where updates may have been taken back: a bf16 weight that rounds to the other side is 2**-8 off."""
    assert found[0] == pytest.approx(expected[0], rel=2e-2, abs=1e-5)
    for name, values in expected[1].items():
        off = 2**-8 if values.dtype is torch.bfloat16 else 1e-5
        assert (found[1][name] - values).float().norm() <= off * values.float().norm(), name


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


def losses_of_weights_alone(model, _optimizer, batch):
    """A forward whose output gets no gradient, as that of a sampler (RBM), before a loss that reads a weight."""
    for _ in range(2):
        yield forward(model, batch, "whole").detach() + model.transformer.ln_f.weight.square().sum()


def weights_that_another_module_reads(model, _optimizer, batch):
    """A forward that reads the weights of a module that does not run then, which the plan does not know."""
    first, last = model.transformer.h[0], model.transformer.h[2]
    first.mlp.c_proj.register_forward_hook(lambda _m, _args, output: output * (1 + last.mlp.c_fc.weight.square().sum()))
    for _ in range(2):
        yield forward(model, batch, "whole")


def weights_read_between_forwards(model, _optimizer, batch):
    """A loop that reads the weights of the last module before another forward runs other modules."""
    for _ in range(2):
        loss = forward(model, batch, "whole") + model.transformer.ln_f.weight.square().sum()
        yield loss + forward(model, batch, "whole")


LOOPS = {
    "late": functools.partial(gradients_that_come_late, is_marked=True),
    "late, not marked": functools.partial(gradients_that_come_late, is_marked=False),
    "of weights alone": losses_of_weights_alone,
    "reading weights in forward": weights_that_another_module_reads,
    "reading weights between forwards": weights_read_between_forwards,
    "raising in forward": functools.partial(exceptions, where="forward"),
    "raising in backward": functools.partial(exceptions, where="backward"),
}


@pytest.mark.part(3)
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


TWICE = [[("forward", "whole"), ("backward", "twice")]] * 3


@pytest.mark.parametrize("activations", ["offload", "offload-nvme"])
def test_offloaded_activations_serve_a_second_backward(activations):
    decisions = decide(TASK, uniform("host", "cpu", activations))
    assert_same(planned(TWICE, TASK, decisions), in_memory(TWICE, TASK))


def test_after_an_iteration_off_the_plan_without_an_update_the_next_one_follows_it():
    model, optimizer = prepare(TASK, decide(TASK, uniform("host", "cpu", "offload")))
    with optimizer.session as session:
        for (tokens,) in batches(TASK)[:2]:
            model(input_ids=tokens, labels=tokens).loss.backward()
            if not session.iteration:
                model.transformer.h[0].ln_1.weight.grad.sum()
                optimizer.zero_grad()
        assert (session.num_left, session.iteration) == (1, 1)


LATE = [[("forward", "whole"), ("backward", "sum"), ("forward", "late"), ("backward", "sum")]] * 3
SHARDED = Task("gpt2", torch.float32, 2, iterations=3)


OFTEN = [[("forward", "whole"), ("forward", "without a block"), ("forward", "no gradients"), ("backward", "sum")]] * 3
DIVIDED = Task("llama-shared", torch.float32, iterations=3)


@example(plan=(SHARDED, decide(SHARDED, mixed, data_parallel=2, zero_stage=3)), program=LATE)
@example(plan=(DIVIDED, decide(DIVIDED, mixed, tensor_parallel=2)), program=OFTEN)
@given(plans(sizes=(2,), iterations=3, dtype=torch.float32, max_norm=0.5), programs())
@settings(max_examples=examples(20, fewest=2), deadline=None, phases=[Phase.explicit, Phase.generate])
def test_ranks_leave_the_plan_together(processes, plan, program):
    task, decisions = plan
    for found, expected, off in processes.call(2, ran, program, task, decisions):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)
        assert off < 1e-4


PASSED = Task("gpt2", torch.float32, iterations=4)


@example(plan=(PASSED, decide(PASSED, mixed, data_parallel=2, zero_stage=3)))
@example(plan=(PASSED, decide(PASSED, uniform("host", "cpu", "offload"))))
@given(plan=plans(sizes=(1, 2), iterations=4, dtype=torch.float32, max_norm=0.5, num_micro_batches=1))
@settings(max_examples=examples(20, fewest=2), deadline=None, phases=[Phase.explicit, Phase.generate])
def test_ranks_pass_over_modules_of_their_own_on_the_plan(processes, plan):
    """As where no token of a rank's goes to an expert, or layers are dropped: all ranks run one schedule still."""
    task, decisions = plan
    for num_left, off in processes.call(decisions.data_parallel, passing_over, task, decisions):
        assert num_left == 0
        assert off < 1e-6
