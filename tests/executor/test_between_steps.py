"""What comes between two steps: evaluating, reading, saving, going back, and changes of mind, in any order."""

import copy

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from plans import plans
from training import ReferenceOptimizer, Task, batches, decide, make_model, make_optimizer, prepare, uniform, weights

from executor.checkpoint import Checkpoint
from executor.restoring import restore
from executor.saving import Checkpoints, Level

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


@settings(max_examples=15)
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
