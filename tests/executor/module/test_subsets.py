"""Optimizers over a part of a model: frozen and tied parameters, adapters, many groups; and what that moves."""

import functools
import threading
from collections import Counter

import pytest
import torch
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from test_numerics import PLACEMENTS, mixed
from training import (
    OPTIMIZERS,
    ReferenceOptimizer,
    Task,
    assert_same,
    batches,
    decide,
    make_model,
    model_units,
    session_options,
    train,
    uniform,
)

from executor.direct_io import in_blocks
from executor.prepare import prepare_session
from planner.schedule.tasks import Op

PLACES = ["gpu", "stream", "cpu", "nvme"]


def adapters(name: str) -> bool:
    """Return whether a parameter is what LoRA trains: here the products of attention, all else is frozen."""
    return ".attn.c_attn." in name or ".attn.c_proj." in name


def frozen(model: torch.nn.Module, trained) -> torch.nn.Module:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained(name))
    return model


def own_groups(model: torch.nn.Module, choose) -> list[dict]:
    """Return one group for each set of options that ``choose(name)`` gives; ``None`` leaves a parameter out."""
    found: dict[tuple, list] = {}
    for name, parameter in model.named_parameters():
        options = choose(name)
        if options is not None:
            found.setdefault(tuple(sorted(options.items())), []).append(parameter)
    return [{"params": parameters, **dict(options)} for options, parameters in found.items()]


def assert_same_as_in_memory(task: Task, choose, trained, make_groups, make=OPTIMIZERS["adamw"], change=None) -> None:
    """Train in memory and under a plan; the same bits must come out. ``change(model)`` happens after two steps."""

    def run(model, optimizer):
        return train(task, model, optimizer, before_step=lambda i: change(model) if change and i == 1 else None)

    plain = frozen(make_model(task), trained)
    expected = run(plain, ReferenceOptimizer(make(make_groups(plain)))), dict(plain.named_parameters())
    model = frozen(make_model(task), trained)
    _, ours = prepare_session(
        model, make(make_groups(model)), model_units(task.family), decide(task, choose), session_options()
    )
    with ours.session as session:
        assert_same((run(model, ours), session.full_parameters()), expected)


@pytest.mark.part(8)
@pytest.mark.parametrize("num_micro_batches", [1, 2])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adagrad", "lion"])
def test_adapters_are_trained_and_all_else_is_frozen(optimizer, place, num_micro_batches):
    task = Task("gpt2", torch.bfloat16, num_micro_batches, optimizer=optimizer)
    for activations in ("keep", "recompute"):
        groups = functools.partial(own_groups, choose=lambda name: {} if adapters(name) else None)
        assert_same_as_in_memory(task, uniform("gpu", place, activations), adapters, groups, OPTIMIZERS[optimizer])


@pytest.mark.parametrize("place", ["stream", "cpu"])
def test_adapters_of_fetched_weights_are_trained(place):
    groups = functools.partial(own_groups, choose=lambda name: {} if adapters(name) else None)
    assert_same_as_in_memory(Task("gpt2"), uniform("host", place), adapters, groups)
    for dtype in (torch.bfloat16, torch.float32):
        assert_same_as_in_memory(
            Task("llama", dtype),
            uniform("host", place, "recompute"),
            lambda name: "q_proj" in name or "v_proj" in name,
            lambda model: [{"params": list(model.parameters())}],
        )


@pytest.mark.part(3)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("params", "place"), PLACEMENTS)
def test_what_the_optimizer_has_not_stays_as_it_is(params, place, dtype):
    """It has a gradient, which counts for nothing, but may take the place of the host's weights."""
    groups = functools.partial(own_groups, choose=lambda name: {} if adapters(name) else None)
    assert_same_as_in_memory(Task("gpt2", dtype), uniform(params, place), lambda _: True, groups)


@pytest.mark.part(3)
@pytest.mark.parametrize("family", ["gpt2", "llama-tied"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("trains_tied", [True, False])
def test_a_tied_weight_is_one_parameter_frozen_or_not(family, place, trains_tied):
    """Its gradient is the sum over both of its uses, and its update one."""

    def trained(name):
        return trains_tied if "wte" in name or "embed_tokens" in name else "mlp" in name

    assert_same_as_in_memory(
        Task(family), uniform("gpu", place), trained, lambda model: [{"params": list(model.parameters())}]
    )


@settings(max_examples=examples(30), deadline=None)
@given(data=st.data())
def test_any_groups_over_any_subset_give_the_same_bits(data):
    names = [name for name, _ in make_model(Task("gpt2")).named_parameters()]
    kinds = data.draw(st.lists(st.integers(0, 4), min_size=len(names), max_size=len(names)))
    of = dict(zip(names, kinds, strict=True))
    if not any(kind > 1 for kind in kinds):
        of[names[0]] = 2
    options = {
        2: {},
        3: {"lr": 2e-2, "weight_decay": 0.0, "betas": (0.8, 0.9)},
        4: {"lr": 1e-4, "eps": 1e-4, "weight_decay": 0.3},
    }
    task = Task("gpt2", data.draw(st.sampled_from([torch.bfloat16, torch.float32])), iterations=3)
    groups = functools.partial(own_groups, choose=lambda name: options.get(of[name]))
    assert_same_as_in_memory(task, mixed, lambda name: of[name] > 0, groups)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("thaws", [True, False], ids=["thaws", "freezes"])
def test_what_is_trained_may_change_on_the_way(place, thaws):
    """As in fine-tuning that unfreezes layer by layer: the plan has room for all."""
    task = Task("gpt2", torch.bfloat16, iterations=4)
    assert_same_as_in_memory(
        task,
        uniform("gpu", place),
        adapters if thaws else lambda _: True,
        lambda model: [{"params": list(model.parameters())}],
        change=lambda model: frozen(model, (lambda _: True) if thaws else adapters),
    )


def test_only_what_was_updated_has_state():
    task = Task("gpt2")
    model = frozen(make_model(task), adapters)
    optimizer = OPTIMIZERS["adamw"]([{"params": list(model.parameters())}])
    decisions = decide(task, mixed)
    _, ours = prepare_session(model, optimizer, model_units("gpt2"), decisions, session_options())
    with ours.session:
        train(Task("gpt2", iterations=1, schedule=False), model, ours)
        trained = [number for number, p in enumerate(model.parameters()) if p.requires_grad]
        assert sorted(ours.state_dict()["state"]) == trained, "as in torch"


# --- what is left out -----------------------------------------------------------------------------------------------


def count_bytes(session) -> Counter:
    """Return the bytes that tasks copy from now on, by what they are."""
    moved, op_in = Counter(), threading.local()
    copy, perform = session.runtime.backend.copy, session.runtime.machine._perform

    def counted(destination, source):
        copy(destination, source)
        moved[getattr(op_in, "value", None)] += source.nbytes  # None: the caller, outside training

    def recorded(task, iteration):
        op_in.value = task.op
        perform(task, iteration)

    session.runtime.backend.copy, session.runtime.machine._perform = counted, recorded
    if session.runtime.state.stored is not None:
        file = session.runtime.state.stored.file
        transfer = file._transfer

        def transferred(verb, call, record, version, buffer, start):
            transfer(verb, call, record, version, buffer, start)
            moved[verb] += len(buffer[: file._room_bytes[record] - start])

        file._transfer = transferred
    return moved


@pytest.mark.parametrize(
    ("params", "place"), [("gpu", "stream"), ("gpu", "cpu"), ("host", "stream"), ("host", "cpu"), ("gpu", "nvme")]
)
def test_frozen_parameters_move_neither_gradients_nor_state(params, place):
    task = Task("gpt2", torch.bfloat16)
    model = frozen(make_model(task), adapters)
    optimizer = OPTIMIZERS["adamw"]([{"params": [p for p in model.parameters() if p.requires_grad]}])
    decisions = decide(task, uniform(params, place))
    _, ours = prepare_session(model, optimizer, model_units("gpt2"), decisions, session_options())
    with ours.session as session:
        trained = {
            (unit.name, part.piece.index): part.piece.num_params
            for unit, parameter in session.runtime.parameter_states().values()
            for part in parameter.parts
            if parameter.shard.trains
        }
        moved = count_bytes(session)
        tokens = batches(task)[0, 0]
        for _ in range(3):
            model(input_ids=tokens, labels=tokens).loss.backward()
            ours.clip_grad_norm_(1.0)
            ours.step()
            ours.zero_grad()
        session.synchronize()
    num_trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    in_pieces = sum(trained.values())
    assert num_trained < in_pieces < sum(p.numel() for p in model.parameters()) / 2
    assert moved[Op.FLUSH] == 3 * 2 * num_trained
    if place == "nvme":
        of_file = sum(in_blocks(12 * count) for count in trained.values())
        assert (moved["read"], moved["write"]) == (3 * of_file, 3 * of_file)
    if place == "stream":
        assert moved[Op.LOAD] == 3 * 14 * in_pieces
        assert moved[Op.STORE] == 3 * (12 + 2 * (params == "host")) * in_pieces
    elif params == "gpu":
        assert moved[Op.UPLOAD] == 2 * 2 * in_pieces, "the third step's would come in the fourth iteration"


@pytest.mark.parametrize("place", PLACES)
def test_a_piece_that_is_frozen_in_part_changes_in_the_other_part_alone(place):
    assert_same_as_in_memory(
        Task("gpt2", torch.bfloat16, iterations=3),
        uniform("gpu", place),
        lambda name: name.endswith("mlp.c_fc.bias"),
        lambda model: [{"params": [p for p in model.parameters() if p.requires_grad]}],
    )
