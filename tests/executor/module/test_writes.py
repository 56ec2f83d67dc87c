"""Writing to the parameters of a prepared model, in all ways that torch has: done as in memory, or refused."""

import copy
import functools
import pickle
import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from training import Task, batches, decide, make_model, make_optimizer, model_units, prepare, session_options, uniform

from executor.module.guarded_parameters import guard, unguard
from executor.prepare import prepare_session

TASK = Task("llama-tied", torch.float32, iterations=3, schedule=False)
PLANS = {"resident": ("gpu", "gpu"), "uploaded": ("gpu", "cpu"), "fetched": ("host", "cpu"), "nvme": ("nvme", "nvme")}
REFUSED = r"is a parameter of a prepared model.*lost.*optimizer\.session\.close\(\).*prepare\(\) it again"
UNREADABLE = r"is a parameter of a prepared model, and cannot be read here.*session\.full_parameters\(\)"
WHOLE = "model.layers.1.mlp.up_proj"

# What ends in "_" and does not write values, or not to the tensor that it is called on.
NO_WRITES = {"requires_grad_"}


def in_place_methods():
    names = [name for name in dir(torch.Tensor) if re.fullmatch(r"[a-z]\w*[a-z0-9]_|__i(\w+)__", name)]
    others = {"__index__", "__int__", "__init__", "__iter__", "__invert__", "__init_subclass__", *NO_WRITES}
    return [name for name in names if name not in others]


def setters(weight):
    """Return ways that are no operation of a certain name."""
    other = torch.ones_like(weight)

    def data(tensor):
        tensor.data = other

    def by_index(tensor):
        tensor[0] = 1.0

    def in_part(tensor):
        tensor[:2][1:].zero_()

    def in_a_view(tensor):
        tensor.view(-1)[3:].t().fill_(1.0)

    def in_place(tensor):
        tensor *= 2

    return {
        "data": data,
        "[]": by_index,
        "[][]": in_part,
        "view": in_a_view,
        "*=": in_place,
        "out": lambda tensor: torch.add(other, 1, out=tensor),
        "out of several": lambda tensor: torch.max(torch.ones(2, *other.shape), 0, out=(tensor, torch.empty(0).long())),
        "function": lambda tensor: torch.fill_(tensor, 1.0) if hasattr(torch, "fill_") else torch.zero_(tensor),
        "unbound": lambda tensor: torch.Tensor.mul_(tensor, 2),
        "functional": lambda tensor: nn.functional.relu(tensor, inplace=True),
        "dropout": lambda tensor: nn.functional.dropout(tensor, 0.5, inplace=True),
        "foreach": lambda tensor: torch._foreach_mul_([other.clone(), tensor], 2),
        "foreach copy": lambda tensor: torch._foreach_copy_([tensor], [other]),
        "data.mul_": lambda tensor: tensor.data.mul_(2),
        "data.copy_": lambda tensor: tensor.data.copy_(other),
        "data[]": lambda tensor: by_index(tensor.data),
        "data.view": lambda tensor: tensor.data.view(-1)[0].zero_(),
        "detach": lambda tensor: tensor.detach().zero_(),
        "unbind": lambda tensor: tensor.unbind()[0].zero_(),
        "another parameter": lambda tensor: nn.Parameter(tensor).zero_(),
        "a parameter of data": lambda tensor: nn.Parameter(tensor.data).zero_(),
        "numpy": lambda tensor: by_index(tensor.detach().cpu().numpy()),
        "clip by value": lambda tensor: tensor.data.clamp_(-1, 1),
        "vector": lambda tensor: nn.utils.vector_to_parameters(torch.zeros(tensor.numel()), [tensor]),
        "init": nn.init.kaiming_uniform_,
        "init constant": lambda tensor: nn.init.constant_(tensor, 1.0),
        "init by name": lambda tensor: nn.init.normal_(tensor=tensor, std=2.0),
    }


@pytest.fixture(params=["fetched", "uploaded"])
def started(request):
    model, optimizer = prepare(TASK, decide(TASK, uniform(*PLANS[request.param])))
    with optimizer.session:
        yield model, optimizer


def step(model, optimizer, number=0):
    tokens = batches(TASK)[number, 0]
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.clip_grad_norm_(0.5)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def saved(optimizer):
    return {name: weight.clone() for name, weight in optimizer.session.full_parameters().items()}


def call(name, tensor) -> None:
    """Call an operation with what it takes; torch looks at the kinds of arguments before all else."""
    values, index = torch.full(tensor.shape, 0.5), torch.zeros(1, dtype=torch.long)
    mask = torch.ones(tensor.shape, dtype=torch.bool)
    several = [
        *((), (values,), (2,), (0.5,), (values, values), (0, 1), (0.0, 1.0), (values, values, 0.5)),
        *((0, index, values), (mask, 0.5), (mask, values), (0, index, 0.5), (2, 0, 1.0), (0, index, values, "sum")),
        *((lambda value: value, values), (lambda value: value,), (tensor.shape, (1,) * tensor.ndim), (index, values)),
        *(((index,), values), ((index,), values[:1]), (2, 0, 1.0, 0.5), (values.to_sparse(), 1), (tensor.shape, 1, 1)),
    ]
    error = None
    for arguments in several:
        try:
            if getattr(tensor, name)(*arguments) is not NotImplemented:
                return
        except TypeError as wrong:
            error = wrong
    raise error


def come_to(moment, model, optimizer):
    tokens = batches(TASK)[0, 0]
    if moment == "behind backward":
        model(input_ids=tokens, labels=tokens).loss.backward()
    elif moment == "behind a step":
        step(model, optimizer)
    elif moment == "behind an evaluation":
        with torch.no_grad():
            model.eval()(input_ids=tokens)
        model.train()


def ways_to_write(weight):
    """Return all ways, by their names."""
    ways = setters(weight)
    for name in in_place_methods():
        ways[name] = functools.partial(call, name)
        ways[f"data.{name}"] = lambda tensor, name=name: call(name, tensor.data)
    return ways


def outcome(write, weight) -> str:
    try:
        with torch.no_grad():
            write(weight)
    except Exception as error:  # noqa: BLE001 - what comes through is to be listed
        refused = re.search(f"{REFUSED}|{UNREADABLE}|read-only", str(error)) and isinstance(error, ValueError)
        return "refused" if refused else repr(error)
    return "accepted"


@pytest.mark.part(12)
@pytest.mark.parametrize("started", PLANS, indirect=True)
@pytest.mark.parametrize("moment", ["at first", "behind backward", "behind a step", "behind an evaluation"])
def test_every_way_to_write_does_what_it_does_in_memory_or_is_refused(started, moment):
    model, optimizer = started
    before = saved(optimizer)
    come_to(moment, model, optimizer)
    if moment == "behind a step":
        before = saved(optimizer)
    parameters = dict(model.named_parameters())
    for name in (f"{WHOLE}.weight", "model.embed_tokens.weight", "model.norm.weight"):
        weight, found = parameters[name], {}
        for way, write in ways_to_write(weight).items():
            plain = nn.Parameter(before[name].clone())
            torch.manual_seed(1)
            in_memory = outcome(write, plain)
            torch.manual_seed(1)
            found[way] = outcome(write, weight)
            if found[way] == "accepted":
                if re.search("requires? grad", in_memory):  # torch refuses some for a leaf, even without gradients
                    plain.data = weight.detach().clone()
                else:
                    assert (way, in_memory) == (way, "accepted")
                assert torch.equal(weight.nan_to_num(), plain.nan_to_num()), way
                with torch.no_grad():
                    weight.copy_(before[name])
            elif found[way] != "refused":
                assert in_memory != "accepted", (way, found[way])
            assert torch.equal(weight, before[name]), way
        ways = {way for way in setters(weight) if weight.ndim > 1 or way != "init"} - {"numpy"}
        assert {way: found[way] for way in ways if found[way] != "accepted"} == {}
        assert {found["numpy"], found["set_"]} == {"refused"}
    if moment == "behind backward":
        optimizer.zero_grad()
        optimizer.step()
    assert all(torch.equal(weight, before[name]) for name, weight in saved(optimizer).items())
    assert np.isfinite(step(model, optimizer, 1))


def test_an_optimizer_of_the_users_own_may_step(started):
    model, optimizer = started
    for foreach in (False, True):
        before = saved(optimizer)
        other = torch.optim.SGD(model.parameters(), lr=0.1, foreach=foreach)
        for parameter in model.parameters():
            parameter.grad = torch.ones(parameter.shape)
        other.step()
        assert all(torch.equal(weight, before[name] - 0.1) for name, weight in saved(optimizer).items())
        other.zero_grad()
    parameter.grad = torch.ones(parameter.shape)
    del parameter.grad
    assert parameter.grad is None


def test_reading_is_as_ever(started):
    model, _ = started
    weight = model.get_submodule(WHOLE).weight
    total = torch.zeros_like(weight).add_(weight).lerp_(weight, 0.5).copy_(weight)
    assert total.shape == (weight * 2).shape == weight.clone().zero_().shape
    weight.clone().mul_(2)
    (weight + 1)[0] = 3
    torch._foreach_add_([torch.zeros_like(weight)], [weight])
    assert isinstance(weight, nn.Parameter)
    assert not isinstance(weight.detach(), nn.Parameter)
    assert weight.data_ptr()
    assert weight.to_sparse().is_sparse
    assert repr(weight)
    assert sum(parameter.numel() for parameter in model.parameters()) > 0
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        parameter.requires_grad_(True)
        parameter.register_hook(lambda gradient: gradient).remove()


def test_a_write_inside_forward_is_reported_afterwards(started):
    model, optimizer = started
    module = model.get_submodule(WHOLE)

    def write(module, _args):
        with torch.no_grad():
            module.weight.mul_(1.0)

    handle = module.register_forward_pre_hook(write)
    tokens = batches(TASK)[0, 0]
    with pytest.raises(ValueError, match=rf"wrote to the parameter {WHOLE}\.weight.*do it between backward and step"):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
    handle.remove()


@pytest.mark.parametrize("copies", [copy.deepcopy, copy.copy, pickle.dumps], ids=["deepcopy", "copy", "pickle"])
def test_a_parameter_is_neither_copied_nor_pickled(started, copies):
    model, _ = started
    with pytest.raises(TypeError, match=r"copied.*state_dict\(\)"):
        copies(model.get_submodule(WHOLE).weight)


def test_a_state_is_loaded_between_steps(started):
    model, optimizer = started
    before = saved(optimizer)
    state = {name: weight.clone() for name, weight in model.state_dict().items()}
    expected = [step(model, optimizer, number) for number in range(2)]
    model.load_state_dict(state)
    model.lm_head.load_state_dict({"weight": before["model.embed_tokens.weight"]})
    assert all(torch.equal(weight, before[name]) for name, weight in saved(optimizer).items())
    assert step(model, optimizer) == expected[0]


def test_a_write_changes_master_copies_only_where_it_changes_weights():
    task = Task("llama-tied", torch.bfloat16, schedule=False)
    for place in PLANS.values():
        model, optimizer = prepare(task, decide(task, uniform(*place)))
        with optimizer.session:
            step(model, optimizer)
            before = {number: state["master"] for number, state in optimizer.state_dict()["state"].items()}
            number, weight = 2, list(model.parameters())[2]
            assert not torch.equal(before[number], before[number].bfloat16().float())  # it has more digits
            with torch.no_grad():
                weight.mul_(1.0)
                weight[0] = 0.5
            expected = before[number].clone()
            expected[0] = torch.where(expected[0].bfloat16() == 0.5, expected[0], torch.tensor(0.5))
            after = {number: state["master"] for number, state in optimizer.state_dict()["state"].items()}
            assert torch.equal(after[number], expected)
            assert all(torch.equal(after[n], values) for n, values in before.items() if n != number)
            assert torch.equal(weight, expected.bfloat16())


def test_a_write_before_backward_is_noticed_by_autograd(started):
    model, _ = started
    tokens = batches(TASK)[0, 0]
    loss = model(input_ids=tokens, labels=tokens).loss
    with torch.no_grad():
        model.get_submodule(WHOLE).weight.mul_(0.5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_write_before_a_recomputation_is_refused_where_autograd_would_not_notice():
    task = Task("gpt2", torch.float32)
    model, optimizer = prepare(task, decide(task, uniform("host", "cpu", "recompute")))
    with optimizer.session:
        tokens = batches(task)[0, 0]
        loss = model(input_ids=tokens, labels=tokens).loss
        with torch.no_grad():
            model.transformer.h[0].mlp.c_fc.bias.add_(0.1)
        with pytest.raises(ValueError, match=r"bias .* written to between forward and.*recomputes.*after backward"):
            loss.backward()


def test_a_closed_model_is_an_ordinary_one():
    model, optimizer = prepare(TASK, decide(TASK, uniform("host", "cpu")))
    step(model, optimizer)
    optimizer.session.close()
    assert {type(parameter) for parameter in model.parameters()} == {nn.Parameter}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
            parameter.data = parameter.data.clone()
    assert pickle.loads(pickle.dumps(copy.deepcopy(model))) is not None  # noqa: S301 - our own
    model.lm_head = nn.Linear(2, 3)
    model.register_parameter("more", nn.Parameter(torch.zeros(2)))


def new_weight(model):
    model.get_submodule(WHOLE).weight = nn.Parameter(torch.zeros(64, 32))


def registered(model):
    model.get_submodule(WHOLE).register_parameter("weight", nn.Parameter(torch.zeros(64, 32)))


def registered_more(model):
    model.register_parameter("more", nn.Parameter(torch.zeros(2)))


def tied(model):
    model.model.layers[0].mlp.up_proj.weight = model.model.layers[1].mlp.up_proj.weight


def new_module(model):
    model.model.layers[1].mlp.up_proj = nn.Linear(32, 64)


def wrapped(model):
    model.model.layers[1] = nn.Sequential(model.model.layers[1])


def adapter(model):
    model.get_submodule(WHOLE).add_module("lora", nn.Linear(2, 2))


def normed(model):
    parametrizations.weight_norm(model.get_submodule(WHOLE))


def pruned(model):
    prune.l1_unstructured(model.get_submodule(WHOLE), "weight", 0.5)


def resized(model):
    model.resize_token_embeddings(80, mean_resizing=False)


def new_input_embeddings(model):
    model.set_input_embeddings(nn.Embedding(64, 32))


def part_assigned(model):
    model.get_submodule(WHOLE).load_state_dict({"weight": torch.zeros(64, 32)}, assign=True)


@pytest.mark.parametrize(
    "change",
    [
        new_weight, registered, registered_more, tied, new_module, wrapped, adapter, normed, pruned, resized,
        new_input_embeddings, part_assigned,
    ],
)  # fmt: skip
def test_another_module_or_parameter_is_refused(started, change):
    model, optimizer = started
    before = saved(optimizer)
    names = list(dict(model.named_parameters(remove_duplicate=False)))
    with pytest.raises(ValueError, match=r"prepared.*(session\.close\(\)|before prepare\(\))") as caught:
        change(model)
    assert "\n" not in str(caught.value)
    if change is normed:  # torch takes the weight away before it asks
        return
    assert list(dict(model.named_parameters(remove_duplicate=False))) == names
    assert all(torch.equal(weight, before[name]) for name, weight in saved(optimizer).items())
    assert np.isfinite(step(model, optimizer))


def test_what_is_there_may_be_set_again(started):
    model, optimizer = started
    model.tie_weights()
    model.lm_head.weight = model.lm_head.weight
    model.model.layers[1] = model.model.layers[1]
    nn.Sequential(model)  # a module of the user's own, with the model in it
    assert np.isfinite(step(model, optimizer))


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("maximize", "plans for this optimizer"),
        ("differentiable", "differentiable set"),
        ("capturable", "capturable set"),
    ],
)
def test_flags_of_an_optimizer_that_updates_do_not_know_are_refused(flag, words):
    model = make_model(TASK)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.param_groups[0][flag] = True
    with pytest.raises(ValueError, match=words):
        prepare_session(model, optimizer, model_units("llama-tied", torch.float32), decide(TASK, uniform("gpu", "cpu")))


def test_what_is_no_model_is_refused():
    model = make_model(TASK)
    units, decisions = model_units("llama-tied", torch.float32), decide(TASK, uniform("gpu", "cpu"))
    with pytest.raises(TypeError, match=r"the model is int.*nn\.Module"):
        prepare_session(5, make_optimizer(TASK, model), units, decisions, session_options())
    with pytest.raises(TypeError, match=r"the optimizer is float.*torch\.optim"):
        prepare_session(model, 1e-3, units, decisions, session_options())


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_autocast_to_another_type_computes_as_in_memory_and_is_told(activations):
    said: list[str] = []
    model, optimizer = prepare(TASK, decide(TASK, uniform("host", "cpu", activations)), report=said.append)
    plain = make_model(TASK)
    with optimizer.session:
        for tokens in batches(TASK)[:2, 0]:
            with torch.autocast("cpu", torch.bfloat16):
                losses = [each(input_ids=tokens, labels=tokens).loss for each in (model, plain)]
            for loss in losses:
                loss.backward()
            assert torch.equal(*losses)
            for (name, ours), (_, theirs) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
                assert torch.equal(ours.grad.clone(), theirs.grad), name
            for each in (optimizer, plain):
                each.zero_grad()
    assert [line.partition(":")[0] for line in said if "autocast" in line] == [
        "autocast to torch.bfloat16 is on, but the plan is for torch.float32"
    ]


def test_autocast_to_the_planned_type_is_not_told():
    said: list[str] = []
    task = Task("llama", torch.bfloat16, schedule=False)
    model, optimizer = prepare(task, decide(task, uniform("host", "cpu")), report=said.append)
    with optimizer.session, torch.autocast("cpu", torch.bfloat16):
        step(model, optimizer)
    assert not said


def test_a_parameter_of_a_class_of_the_users_own_has_it_back() -> None:
    class Own(nn.Parameter):
        """As libraries mark parameters."""

    parameter = Own(torch.ones(3))
    guard(parameter, "weight", None)
    guard(parameter, "weight", None)  # as two modules that share it do
    with pytest.raises(ValueError, match=REFUSED):
        parameter.set_(torch.zeros(3))
    unguard(parameter)
    assert type(parameter) is Own
    assert parameter.detach().zero_().tolist() == [0.0] * 3


def test_what_shared_weights_keeps_them_when_the_parameter_gets_other_data() -> None:
    """As in torch: also what is given other data itself, and views; it is then a tensor that can be saved."""
    model, optimizer = prepare(TASK, decide(TASK, uniform("host", "cpu")))
    weight = model.get_submodule(WHOLE).weight
    with optimizer.session:
        before = weight.clone()
        kept, other = weight.data, weight.detach()
        row = kept[0]
        other.data = torch.ones_like(other)  # which leaves the parameter as it is
        assert torch.equal(weight, before)
        assert torch.equal(other, torch.ones_like(before))
        weight.data = torch.zeros_like(before)
        assert torch.equal(kept, before)
        row.fill_(7.0)
        assert (kept[0] == 7).all()
        assert not weight.any()
        assert pickle.dumps(kept)
        with pytest.raises(ValueError, match=REFUSED):
            weight.data = torch.zeros(3)
        assert torch.equal(weight.data, torch.zeros_like(before))


def test_views_follow_each_others_writes() -> None:
    model, optimizer = prepare(TASK, decide(TASK, uniform("host", "cpu")))
    weight = model.get_submodule(WHOLE).weight
    expected = weight.detach().clone()
    with optimizer.session:
        for tensor in (weight.data, expected):
            flat = tensor.view(-1)
            flat[::2] *= 0.5
            row = tensor[1]
            tensor.mul_(2)
            row.add_(1)
        assert torch.equal(weight, expected)


def halve(module, _args):
    module.weight.data = module.weight.data * 0.5


def halve_in_place(module, _args):
    module.weight.data[:1].mul_(0.5)


@pytest.mark.part(2)
@pytest.mark.parametrize("params", ["resident", "uploaded", "fetched"])
@pytest.mark.parametrize(
    ("way", "words"), [(halve, "gave other data to"), (halve_in_place, "wrote to the data of")], ids=["new", "in place"]
)
def test_what_forward_does_to_data_of_a_parameter_is_never_lost_without_a_word(params, way, words) -> None:
    model, optimizer = prepare(TASK, decide(TASK, uniform(*PLANS[params])))
    layer, tokens = model.get_submodule(WHOLE), batches(TASK)[0, 0]
    with optimizer.session:
        layer.register_forward_pre_hook(way)
        with pytest.raises(ValueError, match=rf"{words} the parameter {WHOLE}\.weight.*do it between"):
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
