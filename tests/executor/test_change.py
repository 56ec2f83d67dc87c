"""Another plan in the middle of training: the same bits as without, and never more than one plan's memory."""

import dataclasses
import weakref

import pytest
import torch
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import mixed
from training import (
    OPTIMIZERS,
    Task,
    assert_same,
    decide,
    make_model,
    model_units,
    prepare,
    reference,
    train,
    uniform,
    units_of,
)
from training import session_options as options

import executor.prepare
from executor.memory.arenas import DeviceMemoryError
from executor.memory.nvme_files import StorageError
from executor.prepare import prepare_session

WAYS = [mixed, uniform("gpu", "gpu", "recompute"), uniform("gpu", "stream"), uniform("gpu", "cpu")]
WAYS += [uniform("host", "cpu", "recompute"), uniform("host", "stream"), uniform("host", "nvme")]


def way(task, choose, **settings):
    decisions = decide(task, choose, subgroup_params=settings.pop("grain", 3000))
    return units_of(task, decisions), decisions, options()


def changed(task, first, second, tmp_path, after=1):
    model, optimizer = prepare(task, decide(task, first))

    def change(iteration):
        if iteration == after:
            optimizer.switch_plan(*way(task, second, grain=977), tmp_path)
        if iteration == after + 1:  # and back
            optimizer.switch_plan(*way(task, first), tmp_path)

    try:
        seen = train(task, model, optimizer, after_step=change)
        return seen, {n: w.clone() for n, w in optimizer.session.full_parameters().items()}
    finally:
        optimizer.session.close()


@settings(max_examples=examples(10, fewest=4), deadline=None)
@given(
    ways=st.tuples(st.sampled_from(WAYS), st.sampled_from(WAYS)),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    num_micro_batches=st.integers(1, 2),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
)
def test_training_goes_on_to_the_same_bits(tmp_path_factory, ways, dtype, num_micro_batches, optimizer):
    """With dropout, clipping, groups, and a schedule that was built before."""
    task = Task("opt", dtype, num_micro_batches, iterations=5, optimizer=optimizer)
    assert_same(changed(task, *ways, tmp_path_factory.getbasetemp()), reference(task))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (uniform("gpu", "gpu"), uniform("host", "cpu")),
        (uniform("host", "cpu"), uniform("nvme", "nvme")),
        (mixed, mixed),
    ],
    ids=["off the device", "to drives", "mixed"],
)
def test_frozen_weights_change_places_too(tmp_path, first, second):
    frozen = {"transformer.wte.weight", "transformer.h.0.mlp.c_fc.weight", "transformer.h.2.attn.c_attn.weight"}
    task = Task("gpt2", frozen=frozenset(frozen))
    assert_same(changed(task, first, second, tmp_path), reference(task))


def test_experts_come_apart_on_the_way_and_together_again(tmp_path):
    task = Task("mixtral-shared", iterations=4)
    model, optimizer = prepare(task, decide(task, mixed, expert_units=2))
    ways = {0: decide(task, mixed), 1: decide(task, uniform("host", "cpu"), expert_units=4)}

    def change(iteration):
        if iteration in ways:
            optimizer.switch_plan(units_of(task, ways[iteration]), ways[iteration], options(), tmp_path)

    try:
        seen = train(task, model, optimizer, after_step=change)
        assert_same((seen, optimizer.session.full_parameters()), reference(task))
    finally:
        optimizer.session.close()


def test_master_copies_of_what_is_not_trained_stay(tmp_path):
    """They may have more digits than the weights, where a float32 model is trained in bf16."""

    model = make_model(Task("gpt2", torch.float32))
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    stock = torch.optim.SGD(list(model.parameters())[:3], lr=0.1)
    decisions = decide(Task("gpt2", optimizer="sgd"), mixed)
    model, optimizer = prepare_session(model, stock, model_units("gpt2"), decisions, options())
    optimizer.switch_plan(model_units("gpt2"), decisions, options(), tmp_path)
    with optimizer.session as session:
        for name, (unit, entry) in session.runtime.parameter_states().items():
            for part in entry.parts:
                with session.runtime.state.state_of(unit, part.piece) as (master, *_):
                    held = master[part.start - part.piece.start : part.stop - part.piece.start]
                    assert torch.equal(held, entry.values_of(part, before[name].reshape(-1))), name


def test_one_plans_memory_is_given_back_before_the_next_takes_its_own(tmp_path, monkeypatch):
    task = Task("llama")
    model, optimizer = prepare(task, decide(task, mixed))
    train(task, model, optimizer)
    blocks = [
        block
        for arena in (optimizer.session.runtime.gpu, optimizer.session.runtime.host)
        for _, block in arena._blocks.values()
    ]
    gone, gone_before = [], []
    for block in blocks:
        weakref.finalize(block.untyped_storage(), gone.append, 1)
    count = len(blocks)
    del blocks, block
    session = executor.prepare.Session

    def begin(*arguments):
        gone_before.append(len(gone))
        return session(*arguments)

    monkeypatch.setattr(executor.prepare, "Session", begin)
    num_bytes = optimizer.switch_plan(*way(task, mixed), tmp_path)
    assert gone_before == [count]
    assert list(tmp_path.iterdir()) == []
    num_params = sum(p.numel() for p in model.parameters())
    assert 14 * num_params <= num_bytes < 14.1 * num_params + 64 * 4 * len(list(model.parameters()))
    optimizer.session.close()


def test_what_cannot_begin_leaves_training_as_it_was(tmp_path):
    task = Task("llama", torch.float32)  # whose weights are nowhere else
    model, optimizer = prepare(task, decide(task, mixed))
    small = model_units("llama"), decide(task, uniform("host", "cpu")), options(host_capacity_bytes=200_000)
    (tmp_path / "file").touch()

    def fail(_iteration):
        with pytest.raises(DeviceMemoryError):
            optimizer.switch_plan(*small, tmp_path)
        with pytest.raises(StorageError, match="make room, or choose another --storage-dir"):
            optimizer.switch_plan(*way(task, mixed), tmp_path / "file")
        with pytest.raises(ValueError, match="the plan is for sgd, but the optimizer is AdamW"):
            optimizer.switch_plan(*way(Task("llama", optimizer="sgd"), mixed), tmp_path)
        with pytest.raises(ValueError, match="data_parallel 2, but training runs with 1; plan with 1"):
            shared = decide(task, mixed, data_parallel=2, zero_stage=3)
            optimizer.switch_plan(model_units("llama"), shared, options(), tmp_path)

    try:
        seen = train(task, model, optimizer, after_step=fail)
        assert_same((seen, optimizer.session.full_parameters()), reference(task))
    finally:
        optimizer.session.close()


@pytest.mark.parametrize("where", ["on the host", "streamed", "on drives"])
def test_master_copies_are_split_and_joined_by_a_change(where, tmp_path):
    ways = {
        "on the host": uniform("host", "cpu", "recompute"),
        "streamed": uniform("gpu", "stream"),
        "on drives": uniform("host", "nvme"),
    }
    task = Task("gpt2", torch.bfloat16, iterations=4)
    model, optimizer = prepare(task, decide(task, ways[where]))

    def change(iteration):
        if iteration in {1, 2}:  # and back
            other = dataclasses.replace(task, splits=iteration == 1)
            optimizer.switch_plan(*way(other, ways[where]), tmp_path)
            assert any(task.splits for task in optimizer.session.schedule.tasks) == other.splits

    try:
        seen = train(task, model, optimizer, after_step=change)
        assert_same((seen, optimizer.session.full_parameters()), reference(task))
    finally:
        optimizer.session.close()
