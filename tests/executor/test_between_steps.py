"""What comes between two steps: evaluating, reading, saving, going back, and changes of mind, in any order."""

import copy
import itertools

import pytest
import torch
from amount import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st
from plans import plans
from training import ReferenceOptimizer, Task, batches, decide, make_model, make_optimizer, prepare, uniform, weights

from executor.checkpoint.format.reader import Checkpoint
from executor.memory.arenas import Arena, DeviceMemoryError
from executor.module.binding import BindingError
from executor.training_state.restoring import restore
from executor.training_state.saving import Checkpoints, Level

ACTIONS = ["step", "evaluate", "read", "save", "load", "drop", "rate"]
TASK = Task("llama", torch.bfloat16, iterations=10, schedule=False)


class InMemory:
    """The same training without a plan, of which a saved state is everything."""

    def __init__(self, task: Task) -> None:
        self.model = make_model(task)
        self.optimizer = ReferenceOptimizer(make_optimizer(task, self.model))

    def weights(self):
        return weights(self.model)

    def save(self):
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        states = [copy.deepcopy(self.optimizer.state.get(p)) for p in parameters]
        return weights(self.model), list(zip(parameters, states, strict=True)), self.rates()

    def load(self, saved) -> None:
        values, states, rates = saved
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(values[name])
        for parameter, state in states:
            self.optimizer.state[parameter] = copy.deepcopy(state)
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def rates(self):
        return [group["lr"] for group in self.optimizer.param_groups]


class Planned(InMemory):
    """Training under a plan."""

    def __init__(self, task: Task, decisions, **options) -> None:
        self.model, self.optimizer = prepare(task, decisions, **options)

    def weights(self):
        return {name: values.clone() for name, values in self.optimizer.session.full_parameters().items()}

    def save(self):
        return self.optimizer.state_dict()

    def load(self, saved) -> None:
        self.optimizer.load_state_dict(saved)


def do(action: str, training: InMemory, task: Task, number: int, saved: list):
    """Do one thing; return what is to be seen of it."""
    model, optimizer = training.model, training.optimizer
    tokens = batches(task)[number % task.iterations]
    seen = []
    match action:
        case "step" | "drop":
            torch.manual_seed(number)
            for micro_batch in tokens:
                loss = model(input_ids=micro_batch, labels=micro_batch).loss
                loss.backward()
                seen.append(loss.item())
            seen.append(float(optimizer.clip_grad_norm_(task.max_norm)))
            if action == "drop":
                next(model.parameters()).grad = None
            optimizer.step()
            optimizer.zero_grad()
        case "evaluate":
            with torch.no_grad():
                seen.append(model.eval()(input_ids=tokens[0], labels=tokens[0]).loss.item())
            model.train()
        case "read":
            return training.weights()
        case "save":
            saved[:] = [training.save()]
        case "load" if saved:
            training.load(saved[0])
        case "rate":
            for group in optimizer.param_groups:
                group["lr"] *= 0.7
    return seen


def plan_of(params: str, place: str):
    return TASK, decide(TASK, uniform(params, place))


@settings(max_examples=examples(15))
@example(plan_of("host", "cpu"), ["save", "step", "evaluate", "load", "evaluate"])
@example(plan_of("nvme", "nvme"), ["save", "step", "read", "load", "read"])
@given(plans(dtype=torch.bfloat16, schedule=False, iterations=10), st.lists(st.sampled_from(ACTIONS), max_size=8))
def test_any_plan_is_as_in_memory(plan, actions):
    """The first step is a whole one, so that there is a state of everything to save."""
    task, decisions = plan
    ours, theirs = Planned(task, decisions), InMemory(task)
    saved = [], []
    with ours.optimizer.session:
        for number, action in enumerate(["step", *actions]):
            found, expected = (
                do(action, training, task, number, of) for training, of in zip((ours, theirs), saved, strict=True)
            )
            if isinstance(found, dict):
                assert all(torch.equal(found[name], values) for name, values in expected.items())
            else:
                assert found == expected
        final = ours.weights()
    assert all(torch.equal(final[name], values) for name, values in theirs.weights().items())


@pytest.mark.parametrize(("params", "place"), [("host", "cpu"), ("nvme", "nvme")])
def test_going_back_to_a_checkpoint_brings_weights_anew(params, place, tmp_path):
    training = Planned(*plan_of(params, place), checkpoint_buffer_bytes=1 << 20)
    saved = []
    with training.optimizer.session, Checkpoints(training.optimizer, Level(tmp_path)) as checkpoints:
        do("step", training, TASK, 0, saved)
        checkpoints.save(1)
        checkpoints.finish()
        expected = [do(action, training, TASK, 0, saved) for action in ("read", "evaluate")]
        do("step", training, TASK, 1, saved)
        later = [do(action, training, TASK, 0, saved) for action in ("read", "evaluate")]
        with Checkpoint(tmp_path / "step-00000001") as checkpoint:
            restore(training.optimizer, checkpoint)
        assert do("evaluate", training, TASK, 0, saved) == expected[1] != later[1]
        found = training.weights()
    assert all(torch.equal(found[name], values) for name, values in expected[0].items())


class LeftError(Exception):
    """What ends a loop."""


def leave_in(training: InMemory, task: Task, moment: str, number: int) -> None:
    """Go into the second iteration, and no further than that moment of it."""
    modules = [module for module in training.model.modules() if not list(module.children())]
    module = modules[number % len(modules)]

    def stop(*_anything: object) -> None:
        raise LeftError

    handle = module.register_forward_hook(stop) if moment == "forward" else None
    if moment == "backward":
        parameters = list(training.model.parameters())
        handle = parameters[number % len(parameters)].register_hook(stop)
    for tokens in batches(task)[1]:
        training.model(input_ids=tokens, labels=tokens).loss.backward()
    if moment == "after clipping":
        training.optimizer.clip_grad_norm_(task.max_norm)
    assert handle is None
    raise LeftError


@settings(max_examples=examples(25))
@example(plan_of("nvme", "nvme"), "backward", 3)
@given(
    plans(),
    st.sampled_from(["forward", "backward", "before step", "after clipping"]),
    st.integers(0, 100),
)
def test_a_loop_that_is_left_in_the_middle_has_the_weights_of_the_last_step(plan, moment, number):
    task, decisions = plan
    if task.max_norm is None and moment == "after clipping":
        moment = "before step"
    ours = Planned(task, decisions)
    with pytest.raises(LeftError), ours.optimizer.session:
        tokens = batches(task)[0]
        for micro_batch in tokens:
            ours.model(input_ids=micro_batch, labels=micro_batch).loss.backward()
        if task.max_norm is not None:
            ours.optimizer.clip_grad_norm_(task.max_norm)
        ours.optimizer.step()
        ours.optimizer.zero_grad()
        theirs = ours.weights()
        leave_in(ours, task, moment, number)
    left = weights(ours.model)
    if decisions.update_start == "step":
        assert all(torch.equal(left[name], values) for name, values in theirs.items())
    else:  # updates of the second iteration may have begun
        assert all(values.isnan().all() for values in left.values())


@settings(max_examples=examples(25))
@example(plan_of("nvme", "nvme"), 3)
@given(plans(), st.integers(0, 30))
def test_a_plan_that_cannot_begin_leaves_the_model_as_it_was(plan, number):
    """Whichever block it is that is not to be had; and another plan, or none, can take the model then."""
    task, decisions = plan
    model, taken = make_model(task), itertools.count()

    def take(arena: Arena, *args, **kwargs) -> torch.Tensor:
        if next(taken) == number:
            raise DeviceMemoryError(arena.tier, "no more", 0, 0, {})
        return take_blocks(arena, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patched:
        take_blocks = Arena.take_blocks
        patched.setattr(Arena, "take_blocks", take)
        try:
            _, optimizer = prepare(task, decisions, model)
            optimizer.session.close()
        except DeviceMemoryError:
            pass
    assert_untouched(model, task)


def assert_untouched(model: torch.nn.Module, task: Task) -> None:
    """Weights are the first ones, and nothing of a session is left in the way."""
    plain, tokens = make_model(task), batches(task)[0, 0]
    before = weights(plain)
    assert all(torch.equal(values, before[name]) for name, values in weights(model).items())
    found = []
    for each in (model, plain):
        torch.manual_seed(0)
        loss = each(input_ids=tokens, labels=tokens).loss
        loss.backward()
        found.append((loss.item(), [parameter.grad for parameter in each.parameters()]))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(*gradients) for gradients in zip(found[0][1], found[1][1], strict=True))


def test_a_model_that_is_refused_is_as_it_was():
    """Where parameters have moved already: experts in several units are bound after that."""
    task = Task("mixtral", torch.bfloat16)
    model = make_model(task)
    experts = next(p for name, p in model.named_parameters() if "experts" in name)
    hook = experts.register_hook(lambda gradient: gradient)
    with pytest.raises(BindingError, match="has a hook"):
        prepare(task, decide(task, uniform("host", "cpu"), expert_units=2), model)
    hook.remove()
    assert_untouched(model, task)
