"""Several prepared models in one loop: gradients flow through one to another, and each is trained as in memory."""

import functools

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
    decide,
    make_model,
    make_optimizer,
    prepare,
    uniform,
    weights,
)

from executor.callbacks import in_backward
from executor.gradients import GradientError
from planner.schedule.loop import OutOfOrderError

FIRST, SECOND = Task("gpt2", iterations=3), Task("small", iterations=3)
PLANS = {
    "mixed": mixed,
    "fetched": uniform("host", "cpu", "recompute"),
    "resident": uniform("gpu", "cpu", "offload"),
}


def embedded(model, values):
    """Return the loss of a model on vectors, through which gradients flow to what made them."""
    return model(inputs_embeds=values[..., : model.config.n_embd], labels=torch.zeros(2, 8, dtype=torch.long)).loss


@torch.no_grad()
def total(model):
    """Return the sum of all weights, which are read as they are between calls and in hooks of modules."""
    return sum(float(parameter.float().sum()) for parameter in model.parameters())


def look(seen, model, event, *_args):
    if event == "through, evaluating" and (found := total(model)) and not in_backward():
        seen.append(found)


def last_loss(model):
    torch.manual_seed(4)
    return embedded(model, torch.ones(2, 8, 64, dtype=next(model.parameters()).dtype)).item()


def run(program, models, optimizers):
    """Run a loop of two models; return the losses. In each step one is trained, alone or through the other."""
    torch.manual_seed(3)
    seen = []
    for event, number in program:
        own, other = models[number], models[1 - number]
        tokens, drop = torch.randint(64, (2, 8)), optimizers[number].zero_grad
        drops = {"drop": drop, "step, drop": drop, "drop by module": own.zero_grad}
        if event == "read":
            seen.append(total(own))
        elif event == "evaluate":
            with torch.no_grad():
                seen.append(own.eval()(input_ids=tokens, labels=tokens).loss.item())
            own.train()
        elif event == "step" and all(parameter.grad is None for parameter in own.parameters()):
            continue
        elif event in {"step", "step alone"}:
            optimizers[number].step()
            drops.get(f"{event}, drop", lambda: None)()
        elif event in drops:
            drops[event]()
        else:
            hook = other.transformer.h[0].mlp.register_forward_pre_hook(functools.partial(look, seen, other, event))
            trained = [parameter for parameter in other.parameters() if parameter.requires_grad]
            if event == "through, frozen":
                other.requires_grad_(False)
            other.train(event != "through, evaluating")
            if event == "alone":
                loss = own(input_ids=tokens, labels=tokens).loss
            else:
                vectors = own(input_ids=tokens).logits.float()
                loss = embedded(other, vectors.to(other.dtype))
            loss.backward()
            hook.remove()
            for parameter in trained:
                parameter.requires_grad_(True)
            other.train()
            seen.append(loss.item())
    return seen


EVENTS = ["alone", "through", "through, frozen", "through, evaluating", "step", "step", "drop", "read", "evaluate"]
PROGRAMS = {
    "gan": [("alone", 1), ("step", 1), ("through", 0), ("step", 0), ("drop", 1)] * 3,
    "frozen": [("alone", 1), ("step", 1), ("through, frozen", 0), ("step", 0), ("read", 1)] * 3,
    "critic": [("drop by module", 1), ("alone", 1), ("step alone", 1), ("through, frozen", 0), ("step", 0), ("read", 1)]
    * 3,
    "teacher": [("through, evaluating", 0), ("step", 0), ("drop", 1)] * 3,
}


def in_memory(program, tasks=(FIRST, SECOND)):
    models = [make_model(task) for task in tasks]
    optimizers = [ReferenceOptimizer(make_optimizer(task, model)) for task, model in zip(tasks, models, strict=True)]
    seen = run(program, models, optimizers)
    seen.append(last_loss(models[1]))
    return seen, weights(torch.nn.ModuleList(models))


def planned(program, decided):
    models, optimizers = zip(*(prepare(task, decisions) for task, decisions in decided), strict=True)
    with optimizers[0].session, optimizers[1].session:
        seen = run(program, models, optimizers)
        optimizers[0].session.close()  # which leaves the other one as it is
        seen.append(last_loss(models[1]))
    return (seen, weights(torch.nn.ModuleList(models))), [optimizer.session.num_left for optimizer in optimizers]


@pytest.mark.part(3)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_gradients_flow_through_one_model_to_another(program, plan):
    expected = in_memory(PROGRAMS[program])
    found, num_left = planned(PROGRAMS[program], [(task, decide(task, PLANS[plan])) for task in (FIRST, SECOND)])
    assert_same(found, expected)
    assert num_left == {"gan": [0, 0], "frozen": [0, 0], "critic": [0, 0], "teacher": [0, 1]}[program]


def test_a_gradient_that_was_used_stays_so_when_others_pass_through_the_frozen_model():
    """It is in sight, and refused, until the loop drops it: plain PyTorch would add to it."""
    (model, optimizer), (through, other) = (prepare(task, decide(task, mixed)) for task in (FIRST, SECOND))
    with optimizer.session, other.session:
        run(
            [("alone", 1), ("step alone", 1), ("through, frozen", 0), ("read", 1)], (model, through), (optimizer, other)
        )
        parameter = through.lm_head.weight
        with pytest.raises(GradientError, match="used it up"):
            parameter.grad.norm()
        through(
            input_ids=torch.zeros(2, 8, dtype=torch.long), labels=torch.zeros(2, 8, dtype=torch.long)
        ).loss.backward()
        with pytest.raises(GradientError, match="was not dropped"):
            other.step()


def test_a_model_whose_forward_calls_the_model_follows_the_plan():
    """As a step of Lightning does, which is run as the forward of the module that it calls."""
    model, optimizer = prepare(FIRST, decide(FIRST, mixed))
    tokens, own = torch.randint(64, (2, 8)), model.forward

    def step(**inputs):
        model.forward = own
        return model(**inputs)

    with optimizer.session as session:
        for _ in range(2):
            model.forward = step
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert session.num_left == 0


@given(
    plans(families=("gpt2",), iterations=3, max_norm=0.5),
    plans(families=("small",), iterations=3, max_norm=0.5, freezes=True),
    st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 1)), max_size=12),
)
@settings(max_examples=examples(30), deadline=None, phases=[Phase.generate])
def test_any_two_models_in_any_loop_train_as_in_memory(first, second, program):
    ends = [("alone", 0), ("step", 0), ("alone", 1), ("step", 1)]
    tasks = [task for task, _ in (first, second)]
    try:
        found, _ = planned([*program, *ends], (first, second))
    except OutOfOrderError as error:
        assert "backward" in {decisions.update_start for _, decisions in (first, second)}, error
    else:
        assert_same(found, in_memory([*program, *ends], tasks))
