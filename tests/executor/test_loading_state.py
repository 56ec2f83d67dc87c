"""``optimizer.load_state_dict()`` checks all of a state before it changes anything."""

import copy
import math
import warnings

import pytest
import torch
from training import Task, decide, prepare, train, uniform

from executor.weights.loading import load
from executor.weights.saving import save

KINDS = ("adam", "adamw", "sgd", "adagrad", "lion", "muon", "adamw-8bit")
PLACE = uniform("host", "cpu")


def task_of(kind):
    return Task("gpt2", iterations=1, schedule=False, max_norm=None, optimizer=kind)


@pytest.fixture(scope="module")
def states():
    """Return the state of each optimizer after a step."""
    found = {}
    for kind in KINDS:
        task = task_of(kind)
        model, optimizer = prepare(task, decide(task, PLACE))
        with optimizer.session:
            train(task, model, optimizer)
            found[kind] = copy.deepcopy(optimizer.state_dict())
    return found


@pytest.fixture
def prepared(request):
    """Return an optimizer after two steps, for a function that is to be refused a state."""
    task = task_of(request.param)
    model, optimizer = prepare(task, decide(task, PLACE))
    with optimizer.session:
        train(task, model, optimizer)
        train(task, model, optimizer)
        yield optimizer


def refused(optimizer, state, match):
    """Check that a state is refused, and that nothing has changed then."""
    before = copy.deepcopy(optimizer.state_dict())
    weights = {name: values.clone() for name, values in optimizer.session.full_parameters().items()}
    with pytest.raises(ValueError, match=match) as error:
        optimizer.load_state_dict(state)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for number, entry in before["state"].items():
        assert all(torch.equal(after["state"][number][key], value) for key, value in entry.items())
    found = optimizer.session.full_parameters()
    assert all(torch.equal(found[name], values) for name, values in weights.items())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("prepared", KINDS, indirect=True)
def test_the_state_of_another_optimizer_is_refused_by_its_name(states, prepared):
    own = prepared.entry.torch_class.__name__
    converted = {"AdamW": {"adamw", "adamw-8bit"}, "AdamW8bit": {"adamw", "adamw-8bit"}}
    for kind, state in states.items():
        if kind in converted.get(own, {own.lower()}):
            prepared.load_state_dict(copy.deepcopy(state))
        elif {own, kind} <= {"Muon", "muon"} or "muon" in {own.lower(), kind}:
            refused(prepared, state, r"the state has groups of|the state of|has no use_muon")
        else:
            refused(prepared, state, r"it is of \w+, but the optimizer is \w+|decoupled_weight_decay=(True|False)")


def last(state):
    """Return the entry of the last parameter."""
    return state["state"][max(state["state"])]


def widened(state):
    last(state)["exp_avg"] = torch.zeros(9)


DAMAGE = {
    "no moment": (lambda state: last(state).pop("exp_avg_sq"), r"h\.\d.*|.* has no exp_avg_sq, but that of AdamW has"),
    "no step": (lambda state: last(state).pop("step"), "has no step"),
    "another shape": (widened, r"exp_avg of \S+ has shape \(9,\) in the state, but \(\d+,?.*\) is needed"),
    "another kind": (lambda state: last(state).update(exp_avg=3.0), "exp_avg of .* has shape float"),
    "integers": (lambda s: last(s).update(exp_avg=last(s)["exp_avg"].int()), "is int32 in the state"),
    "no values": (lambda s: last(s).update(exp_avg=last(s)["exp_avg"].to("meta")), "on the meta device"),
    "NaN": (lambda state: last(state).update(step=torch.tensor(math.nan)), "the step of .* is nan"),
    "half a step": (lambda state: last(state).update(step=0.5), "the step of .* is 0.5"),
    "steps": (lambda state: last(state).update(step=torch.ones(2)), "the step of .* must be a whole number"),
    "more": (lambda state: last(state).update(max_exp_avg_sq=torch.zeros(9)), "has a max_exp_avg_sq"),
    "a master copy of another shape": (lambda state: last(state).update(master=torch.zeros(9)), "master of .*9"),
    "of no group": (lambda state: state["state"].update({99: {}}), "entry 99 of the state is in no group"),
    "twice": (lambda s: s["param_groups"][0]["params"].__setitem__(0, s["param_groups"][0]["params"][1]), "in several"),
    "no number": (lambda state: state["param_groups"][1].pop("lr"), "group 1 of the state has no lr"),
    "another number": (lambda state: state["param_groups"][1].update(lr=None), "a number of another type"),
    "a flag": (lambda state: state["param_groups"][1].update(amsgrad=True), "amsgrad"),
    "no parameters": (lambda state: state["param_groups"][1].pop("params"), r"groups of \[\d+, 0\] parameters"),
    "no groups": (lambda state: state.pop("param_groups"), "has no 'param_groups'"),
}


@pytest.mark.parametrize("prepared", ["adamw"], indirect=True)
def test_a_state_that_is_not_whole_is_refused_and_changes_nothing(states, prepared):
    for damage, (change, match) in DAMAGE.items():
        state = copy.deepcopy(states["adamw"])
        change(state)
        try:
            refused(prepared, state, match)
        except BaseException as error:
            error.add_note(damage)
            raise


@pytest.mark.parametrize("prepared", ["adamw"], indirect=True)
def test_a_parameter_without_an_entry_is_named(states, prepared):
    """As in torch, it begins anew."""
    state = copy.deepcopy(states["adamw"])
    del state["state"][0]
    with pytest.warns(RuntimeWarning, match=r"has no entry for \S+: as in torch"):
        prepared.load_state_dict(state)
    assert prepared.state_dict()["state"].keys() == state["state"].keys()


@pytest.mark.parametrize("prepared", ["adamw"], indirect=True)
def test_weights_alone_are_said_to_be_another_trajectory_once_there_are_moments(prepared, tmp_path):
    save(prepared, tmp_path / "saved")
    with pytest.warns(RuntimeWarning, match=r"keeps its moments and step counts \(2 steps\).* another trajectory"):
        load(prepared, tmp_path / "saved")
    _, fresh = prepare(task_of("adamw"), decide(task_of("adamw"), PLACE))
    with fresh.session, warnings.catch_warnings():
        warnings.simplefilter("error")
        load(fresh, tmp_path / "saved")
