"""What a prepared model, its optimizer and a closed session refuse, each with what to do instead."""

import contextlib
import copy
import functools
import gc
import io
import itertools
import pickle
import re
import sys
import weakref

import pytest
import safetensors.torch
import torch
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import (
    ReferenceOptimizer,
    Task,
    batches,
    decide,
    make_model,
    make_optimizer,
    model_units,
    prepare,
    session_options,
    uniform,
    units_of,
)

from executor.module.guarded_parameters import guard
from executor.module.guards import check_memory, trained_memory
from executor.prepare import prepare_session
from planner.schedule.loop import OutOfOrderError

pytestmark = pytest.mark.filterwarnings("ignore:.*checkpointing.* is deprecated:FutureWarning")

TASK = Task("llama", torch.float32, iterations=3, schedule=False)
KEEP = uniform("host", "cpu")


@pytest.fixture
def started():
    model, optimizer = prepare(TASK, decide(TASK, KEEP))
    with optimizer.session:
        yield model, optimizer


def backward(model, number=0):
    tokens = batches(TASK)[number, 0]
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return loss


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "change",
    [nn.utils.parametrizations.weight_norm, nn.utils.weight_norm],
    ids=["parametrization", "hooks"],
)
def test_a_weight_that_is_not_replaced_stays(started, change):
    model, optimizer = started
    plain, names = make_model(TASK), [name for name, _ in model.named_parameters()]
    with pytest.raises(ValueError, match=r"of a Linear cannot be set.*prepare\(\) it again"):
        change(model.model.layers[0].mlp.up_proj)
    assert [name for name, _ in model.named_parameters()] == names
    assert backward(model) == backward(plain)
    optimizer.step()


@pytest.mark.parametrize("part", ["", "model.layers.0"])
@pytest.mark.parametrize(
    "use",
    [copy.copy, pickle.dumps, lambda module: torch.save(module, io.BytesIO())],
    ids=["copy", "pickle", "torch.save"],
)
def test_a_prepared_model_is_neither_pickled_nor_copied_shallowly(started, use, part):
    model, optimizer = started
    with pytest.raises(TypeError, match=r"copy\.copy.*save model\.state_dict\(\)") as caught:
        use(model.get_submodule(part))
    assert "\n" not in str(caught.value)
    optimizer.session.close()
    copied = copy.deepcopy(model)
    assert not any(name.startswith("__") for module in copied.modules() for name in vars(module))
    torch.save(model.lm_head, io.BytesIO())


def test_a_deep_copy_of_a_prepared_model_is_an_ordinary_one():
    calls = []
    model, optimizer = prepare(TASK, decide(TASK, uniform("host", "cpu", "recompute")))
    own = model.lm_head.register_forward_hook(lambda *_: calls.append(1))
    with optimizer.session:
        for number in range(2):
            backward(model, number)
            optimizer.step()
            optimizer.zero_grad()
            copied, part = copy.deepcopy(model), copy.deepcopy(model.model.layers[0])
        own.remove()
        expected = model.state_dict()
        assert all(torch.equal(weight, expected[name]) for name, weight in copied.state_dict().items())
        layer = copied.model.layers[0]
        assert all(torch.equal(a, b) for a, b in zip(part.parameters(), layer.parameters(), strict=True))
        assert {type(parameter) for parameter in copied.parameters()} == {nn.Parameter}
        assert not any(name.startswith("__") for module in copied.modules() for name in vars(module))
        assert backward(copied, 2).item() == backward(model, 2).item()
        optimizer.step()
        assert len(calls) == 3  # two of the model, one of the copy
        copied.lm_head._forward_hooks.clear()
        assert pickle.loads(pickle.dumps(copied)) is not None  # noqa: S301 - our own


def prepare_again(model, wraps=lambda model: model):
    optimizer = make_optimizer(TASK, model)
    return prepare_session(wraps(model), optimizer, model_units("llama"), decide(TASK, KEEP), session_options())


def test_a_prepared_model_is_not_prepared_again_until_its_session_is_closed(started):
    model, optimizer = started
    for wraps in (lambda model: model, nn.Sequential):
        with pytest.raises(ValueError, match=r"prepared already.*close (the first|that) one"):
            prepare_again(model, wraps)
    backward(model)  # and the first goes on
    optimizer.step()
    optimizer.session.close()
    _, again = prepare_again(model)
    with again.session:
        backward(model)
        again.step()


def test_a_model_whose_session_has_failed_is_prepared_again_once_that_is_closed(started):
    model, optimizer = started
    optimizer.session.runtime.machine.fail(FloatingPointError("a broken cable"))
    with pytest.raises(FloatingPointError):
        backward(model)
    optimizer.session.close()
    _, again = prepare_again(model)
    with again.session:
        backward(model)


@pytest.mark.parametrize("breaks", ["units", "state"])
def test_a_model_that_could_not_be_prepared_is_prepared_later(breaks):
    model = make_model(TASK)
    optimizer = make_optimizer(TASK, model)
    if breaks == "state":
        for parameter in model.parameters():
            optimizer.state[parameter] = {"step": 1, "exp_avg": torch.zeros(7), "exp_avg_sq": torch.zeros(7)}
    units = model_units("gpt2" if breaks == "units" else "llama")
    with pytest.raises((ValueError, RuntimeError)):
        prepare_session(model, optimizer, units, decide(TASK, KEEP), session_options())
    _, again = prepare_again(model)
    with again.session:
        backward(model)
        again.step()


def test_models_are_not_kept_for_having_been_prepared():
    model, optimizer = prepare(TASK, decide(TASK, KEEP))
    optimizer.session.close()
    gone = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("part", ["", "model.layers.0"])
@pytest.mark.parametrize(
    ("change", "requested"),
    [
        (nn.Module.half, "torch.float16 on cpu"),
        (nn.Module.bfloat16, "torch.bfloat16 on cpu"),
        (nn.Module.double, "torch.float64 on cpu"),
        (lambda module: module.to("meta"), "torch.float32 on meta"),
        (lambda module: module.to_empty(device="cpu"), "torch.float32 on cpu elsewhere"),
        (nn.Module.share_memory, "torch.float32 on cpu elsewhere"),
    ],
    ids=["half", "bfloat16", "double", "to", "to_empty", "share_memory"],
)
def test_weights_of_a_prepared_model_stay_as_planned(started, change, requested, part):
    model, optimizer = started
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    with pytest.raises(ValueError, match=f"stay torch.float32 on cpu.*cannot become {requested}; change") as caught:
        change(model.get_submodule(part))
    assert "\n" not in str(caught.value)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    backward(model)
    optimizer.step()
    optimizer.session.close()
    assert next(change(model).parameters()) is not None


def test_a_change_of_weights_to_what_they_are_is_none(started):
    model, optimizer = started
    for same in (model.float(), model.to("cpu"), model.to(torch.float32), model.cpu(), model.to("cpu", torch.float32)):
        assert same is model
    backward(model)
    optimizer.step()


def checkpoints_by_itself(model, reentrant):
    forward = model.model.layers[1].forward

    def checkpointed(hidden, **kwargs):
        return checkpoint(functools.partial(forward, **kwargs), hidden, use_reentrant=reentrant)

    model.model.layers[1].forward = checkpointed


def transformers_checkpoints(model, reentrant):
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})


def test_a_model_that_checkpoints_is_prepared_and_trains_as_in_memory():
    plain, model = make_model(TASK), make_model(TASK)
    for each in (plain, model):
        transformers_checkpoints(each, reentrant=False)
    _, optimizer = prepare_again(model)
    with optimizer.session:
        assert backward(model) == backward(plain)
        optimizer.step()
        assert optimizer.session.num_left == 0


@st.composite
def views(draw):
    """Draw the layout of a part of 32 values."""
    shape = draw(st.lists(st.integers(0, 4), max_size=2))
    strides = [draw(st.integers(1, 9)) for _ in shape]
    room = 32 - sum(max(size - 1, 0) * stride for size, stride in zip(shape, strides, strict=True))
    return shape, strides, draw(st.integers(0, max(room - 1, 0)))


@given(layouts=st.lists(views(), min_size=2, max_size=4), kinds=st.lists(st.integers(0, 2), min_size=4, max_size=4))
@settings(max_examples=examples(400, 150))
def test_memory_is_shared_where_writing_one_changes_the_other(layouts, kinds):
    """Of parameters (2: trained, 1: frozen) and buffers (0), with values and without."""
    for device in ("cpu", "meta"):
        memory, model = torch.zeros(64, device=device), nn.Module()  # a matrix of strides may reach beyond 32
        expected, parts = set(), {}
        for number, (layout, kind) in enumerate(zip(layouts, kinds, strict=False)):
            parts[f"p{number}"] = memory.as_strided(*layout), kind
            if kind:
                model.register_parameter(f"p{number}", nn.Parameter(memory.as_strided(*layout), kind == 2))
            else:
                model.register_buffer(f"p{number}", memory.as_strided(*layout))
        for (one, (_, kind)), (other, (_, kind_of_other)) in itertools.combinations(parts.items(), 2):
            values = torch.zeros(64)
            values.as_strided(*layouts[int(one[1:])]).fill_(1)
            if values.as_strided(*layouts[int(other[1:])]).any() and 2 in (kind, kind_of_other):
                expected.add(frozenset((one, other)))
        try:
            check_memory(model)
        except ValueError as error:
            assert frozenset(re.findall(r"(?:parameter|buffer) (p\d)", str(error))) in expected
            assert str(error).count("\n") == 0
        else:
            assert not expected


def test_a_parameter_out_of_sight_does_not_reach_into_the_memory_behind_it():
    memory, model = torch.zeros(16), nn.Module()
    model.bias = nn.Parameter(memory[4:8])
    hidden = nn.Parameter(memory[2].expand(8))  # one value in memory, which stands for all
    guard(hidden, "weight of another session", None)
    assert hidden.stride() == (1,)
    assert trained_memory(model)(hidden) == ""
    assert trained_memory(model)(memory[7:]) == "parameter bias"
    check_memory(nn.ParameterList([model.bias, hidden]))


def test_two_parameters_over_one_memory_are_not_prepared_and_nothing_is_touched():
    model = make_model(TASK)
    model.lm_head.weight = nn.Parameter(model.model.embed_tokens.weight.data)
    optimizer, before = make_optimizer(TASK, model), [(id(p), p.data_ptr()) for p in model.parameters()]
    given = model, optimizer, model_units("llama"), decide(TASK, KEEP), session_options()
    with pytest.raises(ValueError, match=r"model\.embed_tokens\.weight and parameter lm_head\.weight share memory"):
        prepare_session(*given)
    model.lm_head.weight.requires_grad_(False)
    model.model.embed_tokens.weight.requires_grad_(False)  # but the optimizer has both
    with pytest.raises(ValueError, match="share memory"):
        prepare_session(*given)
    assert before == [(id(p), p.data_ptr()) for p in model.parameters()]
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.clone())
    prepare_session(model, make_optimizer(TASK, model), *given[2:])[1].session.close()


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize(
    ("switch_on", "reentrant", "activations"),
    [
        (checkpoints_by_itself, False, "keep"),  # where the plan computes again what the model does, nothing is wrong
        (checkpoints_by_itself, True, "keep"),
        (checkpoints_by_itself, True, "offload"),
        (transformers_checkpoints, False, "keep"),
        (transformers_checkpoints, False, "recompute"),
        (transformers_checkpoints, True, "recompute"),
    ],
)
def test_checkpointing_that_begins_later_trains_as_in_memory(switch_on, reentrant, activations):
    plain = make_model(TASK)
    switch_on(plain, reentrant)
    reference = ReferenceOptimizer(make_optimizer(TASK, plain))
    expected = backward(plain)
    reference.step()
    model, optimizer = prepare(TASK, decide(TASK, uniform("host", "cpu", activations)))
    switch_on(model, reentrant)
    with optimizer.session as session:
        assert backward(model) == expected
        optimizer.step()
        weights = session.full_parameters()
        assert all(torch.equal(weights[name], weight) for name, weight in plain.named_parameters())


def test_layers_that_the_loop_checkpoints_together_train_as_in_memory():
    def in_parts(model):
        inner, tokens = model.model, batches(TASK)[0, 0]
        hidden = inner.embed_tokens(tokens)
        positions = inner.rotary_emb(hidden, torch.arange(tokens.shape[1])[None])

        def layers(hidden):
            return functools.reduce(lambda h, layer: layer(h, position_embeddings=positions), inner.layers, hidden)

        loss = model.lm_head(inner.norm(checkpoint(layers, hidden, use_reentrant=True))).square().mean()
        loss.backward()
        return loss

    plain = make_model(TASK)
    reference = ReferenceOptimizer(make_optimizer(TASK, plain))
    expected = in_parts(plain)
    reference.step()
    model, optimizer = prepare(TASK, decide(TASK, KEEP))
    with optimizer.session as session:
        assert in_parts(model) == expected
        optimizer.step()
        weights = session.full_parameters()
        assert all(torch.equal(weights[name], weight) for name, weight in plain.named_parameters())


@pytest.mark.parametrize(
    "use",
    [copy.deepcopy, copy.copy, pickle.dumps, lambda optimizer: torch.save(optimizer, io.BytesIO())],
    ids=["deepcopy", "copy", "pickle", "torch.save"],
)
def test_the_optimizer_is_neither_copied_nor_pickled(started, use):
    model, optimizer = started
    backward(model)
    optimizer.step()
    with pytest.raises(TypeError, match=r"save optimizer\.state_dict\(\)") as caught:
        use(optimizer)
    assert "\n" not in str(caught.value)
    assert copy.deepcopy(optimizer.state_dict())["state"]
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    assert pickle.dumps(scheduler.state_dict())


def test_the_state_of_the_optimizer_can_be_read_and_written_between_steps():
    model, optimizer = prepare(TASK, decide(TASK, uniform("host", "cpu")))
    with optimizer.session:
        assert len(optimizer.state) == 0
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
        first, second = list(model.parameters())[:2]
        saved = optimizer.state_dict()["state"]
        assert len(optimizer.state) == len(saved) == len({*optimizer.state})
        assert torch.equal(optimizer.state[first]["exp_avg"], saved[0]["exp_avg"])
        optimizer.state[first]["exp_avg"].fill_(2)  # a copy, which the session takes over
        optimizer.state[second]["exp_avg"] = torch.full_like(saved[1]["exp_avg"], 3)
        now = optimizer.state_dict()["state"]
        assert now[0]["exp_avg"].eq(2).all()
        assert now[1]["exp_avg"].eq(3).all()
        for number in range(2):
            now[number]["exp_avg"] = saved[number]["exp_avg"]
        torch.testing.assert_close(now, saved, rtol=0, atol=0)
        optimizer.state[first] = {"step": 1, "exp_avg": torch.zeros(7), "exp_avg_sq": torch.zeros(7)}
        with pytest.raises(ValueError, match="exp_avg"):
            backward(model)
        backward(model)
        optimizer.state[first]["exp_avg"].zero_()
        with pytest.raises(OutOfOrderError, match=r"save, load and park after optimizer\.step\(\)"):
            optimizer.step()
        optimizer.state = {}
        assert len(optimizer.state) == 0


def test_hooks_that_the_optimizer_had_go_on():
    model, decisions = make_model(TASK), decide(TASK, KEEP)
    given = make_optimizer(TASK, model)
    called = []
    given.register_state_dict_pre_hook(lambda _optimizer: called.append("before"))
    given.register_state_dict_post_hook(lambda _optimizer, state: {**state, "more": 1})
    given.register_load_state_dict_pre_hook(lambda _optimizer, state: {k: v for k, v in state.items() if k != "more"})
    given.register_load_state_dict_post_hook(lambda _optimizer: called.append("loaded"))
    _, optimizer = prepare_session(model, given, units_of(TASK, decisions), decisions, session_options())
    with optimizer.session:
        state = optimizer.state_dict()
        optimizer.load_state_dict(state)
    assert state["more"] == 1
    assert called == ["before", "loaded"]


def test_methods_of_the_given_optimizer_find_its_state() -> None:
    model, decisions = make_model(TASK), decide(TASK, KEEP)
    given = make_optimizer(TASK, model)
    given.forget = lambda: [state["exp_avg"].zero_() for state in given.state.values()]
    for _ in range(2):
        _, optimizer = prepare_session(model, given, units_of(TASK, decisions), decisions, session_options())
        with optimizer.session:
            backward(model)
            optimizer.step()
            optimizer.forget()
            assert not any(state["exp_avg"].any() for state in optimizer.state_dict()["state"].values())
        given.forget()  # it has state of its own again


@pytest.mark.parametrize("activations", ["recompute", "offload"])
def test_a_forward_that_was_wrapped_later_runs_on_when_the_session_has_ended(activations) -> None:
    model, optimizer = prepare(TASK, decide(TASK, uniform("host", "cpu", activations)))
    layer = model.model.layers[1]
    layer.forward = functools.partial(lambda forward, *args, **kwargs: forward(*args, **kwargs), layer.forward)
    layer.args = object()  # of the user's own, which is no arguments
    with optimizer.session:
        loss = backward(model).item()
        assert optimizer.session.num_left == 0
        optimizer.zero_grad()
    assert backward(model).item() == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize("ends", ["whole", "in the middle"])
def test_a_closed_session_says_so(started, ends):
    model, optimizer = started
    backward(model)
    state = {}
    if ends == "whole":
        optimizer.step()
        state = optimizer.state_dict()
    optimizer.session.close()
    calls = {
        "step": optimizer.step,
        "state_dict": optimizer.state_dict,
        "load_state_dict": lambda: optimizer.load_state_dict(state),
    }
    for name, call in calls.items():
        expected = rf"optimizer\.{name}\(\) was called after optimizer\.session\.close\(\).*prepare\(\) the model"
        with pytest.raises(OutOfOrderError, match=expected):
            call()
    optimizer.zero_grad()
    if ends == "whole":
        with pytest.raises(RuntimeError, match=r"closed.*prepare\(\) the model"):
            optimizer.session.full_parameters()
        plain = make_optimizer(TASK, model)
        plain.load_state_dict(state)
        backward(model)
        plain.step()
    _, again = prepare_again(model)
    with again.session, pytest.raises(OutOfOrderError, match="was called after"):
        optimizer.step()


def divide_each(parameters, number):
    for parameter in parameters:
        parameter.grad.div_(number)


def divide_by_operator(parameters, number):
    for parameter in parameters:
        parameter.grad /= number


def divide_both(parameters, number):
    torch._foreach_div_([parameter.grad for parameter in parameters], number)


def divide_by_tensor(parameters, number):
    divide_each(parameters, torch.tensor(float(number)))


class Logits(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(inputs_embeds=x).logits


def replicated(model):
    def called(x):
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        try:
            nn.parallel.DistributedDataParallel(model)(inputs_embeds=x)
        finally:
            torch.distributed.destroy_process_group()

    return called


@pytest.mark.parametrize(
    ("hidden", "words"),
    [
        (lambda model: lambda x: torch.jit.trace(Logits(model), x), "called by torch.jit.trace"),
        (replicated, "called by DistributedDataParallel"),
        (lambda model: torch.compile(lambda x: model(inputs_embeds=x), backend="eager"), "compile_blocks=True"),
        (
            lambda model: lambda x: checkpoint(lambda y: model(inputs_embeds=y), x, use_reentrant=False),
            "outside of that",
        ),
    ],
    ids=["traced", "replicated", "compiled", "checkpointed"],
)
def test_what_would_hide_a_model_from_its_plan_is_refused(started, hidden, words):
    model, optimizer = started
    width = model.get_input_embeddings().weight.shape[1]
    with pytest.raises(ValueError, match=words) as caught:
        hidden(model)(torch.zeros(1, 8, width))
    assert "\n" not in str(caught.value)
    backward(model)
    optimizer.step()


@pytest.mark.parametrize("write", [lambda p: p.sub_(p.grad), lambda p: p.data.sub_(p.grad)], ids=["itself", "data"])
def test_an_optimizer_that_steps_in_a_hook_is_refused_in_backward(started, write):
    """As LOMO does: the write would go to a slot, which another unit gets."""
    model, optimizer = started
    weight = model.get_output_embeddings().weight

    def step(parameter):
        with torch.no_grad():
            write(parameter)
        parameter.grad = None

    hook = weight.register_post_accumulate_grad_hook(step)
    with pytest.raises(ValueError, match=r"a hook on a gradient wrote to .*LOMO.*step\(\) after backward"):
        backward(model)
    hook.remove()
    optimizer.session.close()


@pytest.mark.parametrize("divide", [divide_each, divide_by_operator, divide_both, divide_by_tensor])
@pytest.mark.parametrize(("number", "exact"), [(1024, True), (3, False)])
def test_a_gradient_is_divided_by_a_number(divide, number, exact):
    """Scaling of the loss by hand, in place of a step on the loss itself."""
    results = []
    for scale in (1, number):
        model, optimizer = prepare(TASK, decide(TASK, KEEP))
        with optimizer.session:
            for tokens in batches(TASK)[:, 0]:
                (model(input_ids=tokens, labels=tokens).loss * scale).backward()
                if scale != 1:
                    divide(list(model.parameters()), scale)
                norm = optimizer.clip_grad_norm_(0.5)
                optimizer.step()
                optimizer.zero_grad()
            results.append([norm, *(w.clone() for w in optimizer.session.full_parameters().values())])
    for plain, divided in zip(*results, strict=True):
        if exact:
            assert torch.equal(plain, divided)
        else:
            torch.testing.assert_close(plain, divided, rtol=1e-4, atol=1e-4)


def test_a_gradient_is_multiplied_by_a_mask(started):
    model, _ = started
    backward(model)
    gradient = model.lm_head.weight.grad
    before = gradient.clone()
    gradient.mul_(before > 0)
    assert torch.equal(gradient.clone(), before * (before > 0))


def test_a_forward_of_a_class_that_is_replaced_later_counts(monkeypatch) -> None:
    plain = make_model(TASK)
    model, optimizer = prepare(TASK, decide(TASK, uniform("host", "cpu", "recompute")))
    kind = type(plain.model.layers[0])
    own = kind.forward
    with optimizer.session:
        monkeypatch.setattr(kind, "forward", lambda layer, x, *rest, **given: own(layer, 0.5 * x, *rest, **given))
        assert backward(model) == backward(plain)


def test_norms_of_a_gradient_in_a_type_and_along_dimensions(started):
    model, _ = started
    backward(model)
    gradient = model.lm_head.weight.grad
    values = gradient.clone()
    for norm in (
        lambda g: torch.linalg.vector_norm(g, dtype=torch.float64),
        lambda g: g.norm(dim=0),
        lambda g: g.norm(2, 1, keepdim=True),
        lambda g: g.norm(),
    ):
        assert torch.allclose(norm(gradient).double(), norm(values).double(), rtol=1e-6)


def test_a_gradient_divided_by_nothing_is_no_number(started):
    model, optimizer = started
    backward(model)
    weight = model.lm_head.weight
    weight.grad.div_(0)
    assert not torch.isfinite(weight.grad.norm())
    assert weight.grad.isnan().any() or weight.grad.isinf().any()
    weight.grad.nan_to_num_(0.5, 0.5, 0.5).div_(weight.grad)
    assert weight.grad.eq(1).all()
    optimizer.zero_grad()
    optimizer.step()


class BoomError(Exception):
    """What interrupts an iteration."""


def boom(*_args):
    raise BoomError


def in_forward(model):
    return model.model.layers[1].register_forward_pre_hook(boom)


def in_backward(model):
    return model.model.layers[1].mlp.up_proj.weight.register_hook(boom)


def nowhere(model):
    return model.register_forward_pre_hook(lambda *_args: None)


@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize("interrupted", [in_forward, in_backward, nowhere])
def test_an_iteration_that_is_left_half_way_can_be_closed(interrupted, activations):
    model, optimizer = prepare(TASK, decide(TASK, uniform("host", "cpu", activations)))
    tokens = batches(TASK)[0, 0]
    saved = {name: weight.clone() for name, weight in model.state_dict().items()}
    with optimizer.session:
        hook = interrupted(model)
        with contextlib.suppress(BoomError):
            loss = model(input_ids=tokens, labels=tokens).loss
            if interrupted is not nowhere:
                loss.backward()
        hook.remove()
        if interrupted is in_backward:
            for again in (lambda: backward(model), optimizer.step):
                with pytest.raises(
                    OutOfOrderError, match=r"exception has ended backward\(\).*optimizer\.zero_grad\(\)"
                ):
                    again()
    assert all(torch.equal(weight, saved[name]) for name, weight in model.state_dict().items())
    _, again = prepare_again(model)  # as the message says
    with again.session:
        assert backward(model).isfinite()
        again.step()


def test_a_step_that_was_left_out_has_begun_where_updates_begin_during_backward():
    task = Task("llama", torch.float32, max_norm=None)
    model, optimizer = prepare(task, decide(task, KEEP, update_start="backward"))
    with optimizer.session:
        backward(model)
        with pytest.raises(OutOfOrderError, match=r"expects optimizer\.step\(\)\. Updates .*clip=True"):
            backward(model)
        optimizer.step()
        optimizer.zero_grad()
        backward(model)


@pytest.mark.part(3)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("choose", [KEEP, uniform("gpu", "gpu"), uniform("host", "stream"), uniform("nvme", "nvme")])
@pytest.mark.parametrize("family", ["llama-tied", "mixtral"])
def test_weights_of_a_closed_session_are_tensors_of_their_own(family, choose, dtype, tmp_path):
    task = Task(family, dtype)
    model, optimizer = prepare(task, decide(task, choose))
    with optimizer.session:
        before = {name: weight.clone() for name, weight in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        file = io.BytesIO()
        torch.save(parameter.detach(), file)
        assert file.tell() < parameter.nbytes + 2000, name
    safetensors.torch.save_model(model, tmp_path / "model.safetensors")
    del optimizer
    gc.collect()
    empty = make_model(task)
    safetensors.torch.load_model(empty, tmp_path / "model.safetensors")
    for other in (model, empty, copy.deepcopy(model)):
        assert other.state_dict().keys() == before.keys()
        assert all(torch.equal(weight, before[name]) for name, weight in other.state_dict().items())
    backward(model)
    make_optimizer(task, model).step()
    assert all(weight.isfinite().all() for weight in model.parameters())


def test_clipping_calls_little_python_for_each_parameter(started) -> None:
    model, optimizer = started
    parameters = list(model.parameters())
    calls = []
    backward(model)
    sys.setprofile(lambda _frame, event, _argument: calls.append(event) if event == "call" else None)
    try:
        torch.nn.utils.clip_grad_norm_(parameters, 0.5)
    finally:
        sys.setprofile(None)
    optimizer.step()
    assert len(calls) < 120 * len(parameters)
