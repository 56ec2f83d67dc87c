"""Parameter groups of checkpoints: their numbers follow the names of parameters, or the checkpoint is refused."""

import itertools
import json
import warnings

import pytest
import torch
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from training import Task, batches, decide, make_model, session_options, uniform, units_of

from executor.checkpoint.files.system_calls import CheckpointError
from executor.checkpoint.levels import Level
from executor.prepare import prepare_session
from executor.training_state.restoring import groups_in_order
from executor.training_state.saving import Checkpoints

TASK = Task("llama", torch.bfloat16, iterations=2, schedule=False)
NAMES = [name for name, _ in make_model(TASK).named_parameters()]


@given(data=st.data())
def test_each_group_gets_the_numbers_of_its_own_parameters(data):
    """Whatever the order of groups and of parameters in them, and whatever parameters only one side has."""
    names = [f"p{i}" for i in range(data.draw(st.integers(1, 9)))]
    in_group = {name: data.draw(st.integers(0, 3)) for name in names}
    groups = [[name for name in names if in_group[name] == number] for number in range(4)]
    order = data.draw(st.permutations(range(4)))
    only_saved = data.draw(st.sets(st.sampled_from(names)))
    now = [data.draw(st.permutations([n for n in groups[i] if n not in only_saved])) for i in order]
    saved = [{"lr": i} for i in range(4)]
    found = groups_in_order(saved, groups, now, "here")
    assert sorted(found) == list(range(4))
    assert all(i == j for i, j, group in zip(found, order, now, strict=True) if group)
    name = data.draw(st.sampled_from(names))
    target = data.draw(st.integers(0, 3).filter(lambda i: i != in_group[name]))
    moved = [[n for n in group if n != name] + [name] * (i == target) for i, group in enumerate(groups)]
    if len(groups[in_group[name]]) > 1 or groups[target]:  # else the group has only moved
        with pytest.raises(CheckpointError, match=r"p\d is in group \d of the optimizer, but was in group \d in here"):
            groups_in_order(saved, groups, moved, "here")


def started(groups, numbers):
    """Prepare the model with groups of these names."""
    model = make_model(TASK)
    own = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(
        [{"params": [own[name] for name in group]} | given for group, given in zip(groups, numbers, strict=True)]
    )
    decisions = decide(TASK, uniform("host", "cpu"))
    return prepare_session(
        model, optimizer, units_of(TASK), decisions, session_options(checkpoint_buffer_bytes=1 << 20)
    )


def step(model, optimizer, number):
    loss = model(input_ids=(tokens := batches(TASK)[number, 0]), labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return {name: weight.clone() for name, weight in optimizer.session.full_parameters().items()}


GROUPS = [NAMES[::2], NAMES[1::2]]
NUMBERS = [{"lr": 1e-2, "weight_decay": 0.3}, {"lr": 1e-4, "weight_decay": 0.0}]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a folder with a checkpoint, and the weights of the step after it."""
    folder = tmp_path_factory.mktemp("saved")
    model, optimizer = started(GROUPS, NUMBERS)
    with optimizer.session, Checkpoints(optimizer, Level(folder)) as checkpoints:
        step(model, optimizer, 0)
        checkpoints.save(1)
        checkpoints.finish()
        return folder, step(model, optimizer, 1)


def resumed(folder, groups, numbers):
    """Resume, and return what was said of it, with the weights of the step after it."""
    model, optimizer = started(groups, numbers)
    before = {name: weight.clone() for name, weight in optimizer.session.full_parameters().items()}
    with optimizer.session, Checkpoints(optimizer, Level(folder)) as checkpoints:
        try:
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                checkpoints.resume()
        except CheckpointError:
            assert [group["lr"] for group in optimizer.param_groups] == [given["lr"] for given in numbers]
            found = optimizer.session.full_parameters()
            assert all(torch.equal(found[name], values) for name, values in before.items())
            raise
        return [str(each.message) for each in said], step(model, optimizer, 1)


@settings(max_examples=examples(10, fewest=2))
@given(data=st.data())
def test_a_resume_with_groups_in_another_order_is_the_same_training(saved, data):
    folder, expected = saved
    order = data.draw(st.permutations([0, 1]))
    groups = [data.draw(st.permutations(GROUPS[i])) for i in order]
    said, found = resumed(folder, groups, [NUMBERS[i] for i in order])
    assert all(torch.equal(found[name], values) for name, values in expected.items())
    assert [line.partition(" of ")[0] for line in said] == ["the optimizer's groups are the groups 1, 0"] * (
        order == [1, 0]
    )


def test_a_parameter_in_another_group_is_refused_by_name(saved):
    moved = [[*GROUPS[0], GROUPS[1][-1]], GROUPS[1][:-1]]
    with pytest.raises(CheckpointError, match=rf"{GROUPS[1][-1]} is in group 0 of the optimizer, but was in group 1"):
        resumed(saved[0], moved, NUMBERS)
    with pytest.raises(CheckpointError, match=r"has 2 parameter group\(s\), but the optimizer has 1; make"):
        resumed(saved[0], [NAMES], NUMBERS[:1])


def test_who_asked_for_other_numbers_is_told_which_won(saved):
    folder, expected = saved
    said, found = resumed(folder, GROUPS, [NUMBERS[0] | {"lr": 5e-2}, NUMBERS[1] | {"betas": (0.8, 0.99)}])
    assert all(torch.equal(found[name], values) for name, values in expected.items())
    (line,) = said
    assert "lr 0.01 instead of 0.05 in group 0, betas [0.9, 0.999] instead of (0.8, 0.99) in group 1" in line


def test_the_rates_of_schedulers_are_no_other_numbers(tmp_path):
    for resumes, before in itertools.product([False, True], repeat=2):
        model, optimizer = started(GROUPS, NUMBERS)
        with optimizer.session, Checkpoints(optimizer, Level(tmp_path)) as checkpoints:
            if before or not resumes:
                scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, [1e-2, 1e-4], total_steps=9)
            if resumes:
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    checkpoints.resume()
            elif not before:
                step(model, optimizer, 0)
                scheduler.step()
                checkpoints.save(1)
                checkpoints.finish()
    assert json.loads((tmp_path / "step-00000001/manifest.json").read_text())["extra"]["ranks"][0]["parameters"]
