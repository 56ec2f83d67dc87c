"""Reading parameters of a prepared model: current values as in memory, or an error that says where to read them."""

import contextlib
import dataclasses
import itertools
import re

import numpy as np
import pytest
import safetensors.torch
import torch
from amount import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st
from plans import mixed, plans
from rank_programs import read_parameters
from torch import nn
from torch.utils.dlpack import to_dlpack
from training import ReferenceOptimizer, Task, batches, decide, make_model, make_optimizer, prepare, uniform, weights

from executor.devices.cuda import CudaBackend
from executor.module.guarded_parameters import METADATA

TASK = Task("llama-tied", torch.float32, iterations=4, schedule=False)
PLANS = {"resident": ("gpu", "cpu"), "fetched": ("host", "cpu"), "nvme": ("nvme", "nvme")}
REFUSED = r"is a parameter of a prepared model, and cannot be read here, because .*session\.full_parameters\(\)"

NO_MEMORY = "meta tensor|set_data"  # torch's own words, from functions that do not ask


def with_out(parameters):
    target = torch.zeros(sum(p.numel() for p in parameters), dtype=parameters[0].dtype)
    return torch.cat([p.reshape(-1) for p in parameters], out=target)


def with_data(values):
    target = torch.zeros(values.shape, dtype=values.dtype)
    target.data = values
    return target


def averaged(parameters):
    means = [torch.ones_like(p) for p in parameters]
    for mean, parameter in zip(means, parameters, strict=True):
        mean.lerp_(parameter, 0.25)
    return means


def averaged_at_once(parameters):
    means = [torch.ones_like(p) for p in parameters]
    torch._foreach_lerp_(means, parameters, 0.25)
    return means


READS = {
    "clone": lambda ps: [p.detach().clone() for p in ps],
    "data": lambda ps: [p.data * 2 for p in ps],
    "sum": lambda ps: sum(p.sum() for p in ps),
    "norm in grad mode": lambda ps: torch.enable_grad()(lambda: [p.norm() for p in ps])(),
    "a part": lambda ps: [p[-1:].t() + 1 for p in ps if p.ndim == 2],
    "foreach": lambda ps: torch._foreach_mul(ps, 2),
    "foreach norm": torch._foreach_norm,
    "vector": nn.utils.parameters_to_vector,
    "out": with_out,
    "lerp": averaged,
    "foreach lerp": averaged_at_once,
    "copy": lambda ps: [torch.zeros(p.shape, dtype=p.dtype).copy_(p) for p in ps],
    "to": lambda ps: [p.to("cpu", torch.float64) for p in ps],
    "same": lambda ps: [p.to("cpu").contiguous().detach().clone() for p in ps],
    "list": lambda ps: [torch.tensor(p.tolist()) for p in ps],
    "item": lambda ps: [torch.tensor(p.sum().item()) for p in ps],
    "numpy": lambda ps: [torch.from_numpy(p.detach().float().cpu().numpy().copy()) for p in ps],
    "array": lambda ps: [torch.tensor(np.asarray(p.float().detach())) for p in ps],
    "dlpack": lambda ps: [torch.from_dlpack(p.detach()) for p in ps],
    "compare": lambda ps: [torch.eq(p, p.detach()) for p in ps],
    "another parameter": lambda ps: [nn.Parameter(p).detach().clone() for p in ps],
    "a parameter of data": lambda ps: [nn.Parameter(p.data).detach() * 1 for p in ps],
    "on the host": lambda ps: [torch.tensor(p.detach().cpu().float().numpy()) for p in ps],
    "as a tensor": lambda ps: [torch.as_tensor(p) + 0 for p in ps],
    "array of a parameter": lambda ps: [torch.tensor(np.asarray(p.detach().float())) for p in ps],
    "product": lambda ps: [p @ torch.ones(p.shape[-1], dtype=p.dtype) for p in ps],
    "data of another": lambda ps: [with_data(p.data) for p in ps],
    "data as a new tensor": lambda ps: [torch.tensor(p.data).cpu() for p in ps],
    "class": lambda ps: [p.data.as_subclass(torch.Tensor).clone() for p in ps],
}
"""Ways to read, each a function of a list of parameters."""


def with_memory(values):
    return torch.zeros(values.shape).set_(values)


UNASKED = {
    "tensor": torch.tensor,
    "Tensor": torch.Tensor,
    "as_tensor": lambda p: torch.as_tensor(p, dtype=torch.float64),
    "asarray": lambda p: torch.asarray(p, dtype=torch.float64),
    "data": with_data,
    "set_": with_memory,
    "dlpack": lambda p: torch.from_dlpack(to_dlpack(p)),
    "storage": lambda p: torch.tensor([], dtype=p.dtype).set_(p.untyped_storage()),
}
"""Ways to read memory for which torch does not call the parameter's class."""


def read(way: str, model) -> list[torch.Tensor]:
    with torch.no_grad():
        found = READS[way](list(model.parameters()))
    return [values.detach().clone() for values in ([found] if isinstance(found, torch.Tensor) else found)]


def assert_as(ours, theirs) -> None:
    assert len(ours) == len(theirs)
    for own, values in zip(ours, theirs, strict=True):
        assert (own.shape, own.dtype) == (values.shape, values.dtype)
        assert torch.equal(own, values)


def in_memory(task, session):
    """Return an ordinary model with the session's weights."""
    model = make_model(task)
    model.load_state_dict(session.model.state_dict())
    return model


def run(task, model, optimizer, number, look):
    """Run one iteration; ``look`` is called at each moment inside."""
    torch.manual_seed(number)
    for tokens in batches(task)[number].to(next(model.parameters()).device):
        loss = model(input_ids=tokens, labels=tokens).loss
        look()
        loss.backward()
        look()
    if task.max_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), task.max_norm)
        look()
    optimizer.step()
    optimizer.zero_grad()


@pytest.fixture(params=PLANS)
def started(request):
    model, optimizer = prepare(TASK, decide(TASK, uniform(*PLANS[request.param])))
    with optimizer.session:
        yield model, optimizer


def test_gradients_pass_through_a_read(started):
    model, optimizer = started
    plain = in_memory(TASK, optimizer.session)
    reference = ReferenceOptimizer(make_optimizer(TASK, plain))
    for tokens in batches(TASK)[:2, 0]:
        for trained, its_optimizer in ((model, optimizer), (plain, reference)):
            norm = sum(parameter.pow(2).sum() for parameter in trained.parameters())
            (trained(input_ids=tokens, labels=tokens).loss + 1e-1 * norm).backward()
            its_optimizer.step()
            its_optimizer.zero_grad()
        found = optimizer.session.full_parameters()
        for name, weight in plain.named_parameters():
            torch.testing.assert_close(found[name], weight.detach(), atol=1e-6, rtol=1e-6)


def test_a_gradient_through_a_read_reaches_hooks_and_autograd_grad(started):
    """Hooks see the sum once, and ``torch.autograd.grad`` returns all of the gradient, as in memory."""
    model, optimizer = started
    plain = in_memory(TASK, optimizer.session)
    reference = ReferenceOptimizer(make_optimizer(TASK, plain))
    tokens, seen = batches(TASK)[0][0], []
    for trained, its_optimizer in ((model, optimizer), (plain, reference)):
        weight = trained.model.layers[0].mlp.up_proj.weight
        handle = weight.register_hook(lambda gradient: seen.append(gradient.clone()))
        (trained(input_ids=tokens, labels=tokens).loss + weight.pow(2).sum()).backward()
        handle.remove()
        its_optimizer.step()
        its_optimizer.zero_grad()
        parameters = list(trained.parameters())
        penalty = sum(parameter.pow(2).sum() for parameter in parameters)
        given = torch.autograd.grad(trained(input_ids=tokens, labels=tokens).loss + penalty, parameters)
        for parameter, gradient in zip(parameters, given, strict=True):
            parameter.grad = gradient
        its_optimizer.step()
        its_optimizer.zero_grad()
    torch.testing.assert_close(seen[0], seen[1])
    assert len(seen) == 2
    found = optimizer.session.full_parameters()
    for name, weight in plain.named_parameters():
        torch.testing.assert_close(found[name], weight.detach(), atol=1e-6, rtol=1e-6)


@pytest.mark.filterwarnings("ignore:To copy construct")
@pytest.mark.parametrize("start", ["step", "backward"])
@pytest.mark.parametrize("place", PLANS)
def test_reads_after_backward_are_those_of_the_iteration_or_refused(place, start):
    """They are right as long as no update has begun."""
    task = dataclasses.replace(TASK, max_norm=0.5 if start == "step" else None)
    model, optimizer = prepare(task, decide(task, uniform(*PLANS[place]), update_start=start))
    early = {}

    def look(*_anything) -> None:
        for name, parameter in model.named_parameters():
            with contextlib.suppress(ValueError):
                early[name] = parameter.detach().clone()

    with optimizer.session as session:
        run(task, model, optimizer, 0, lambda: None)
        handle = model.get_input_embeddings().register_forward_hook(look)
        tokens = batches(task)[1][0]
        loss = model(input_ids=tokens, labels=tokens).loss
        handle.remove()
        if place == "resident":
            assert all(
                torch.equal(parameter, early.get(name, parameter)) for name, parameter in model.named_parameters()
            )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected = in_memory(task, session)
        loss = model(input_ids=tokens, labels=tokens).loss
        if place == "resident":
            assert_as(read("clone", model), read("clone", expected))
        loss.backward()
        refused = set()
        for way in READS:
            try:
                found = read(way, model)
            except (ValueError, RuntimeError) as error:
                assert re.search(f"{REFUSED}|{NO_MEMORY}", str(error))
                refused.add(way)
            else:
                assert_as(found, read(way, expected))
        assert refused == (set() if start == "step" else set(READS))
        optimizer.step()


def test_weights_can_be_read_between_clipping_and_step():
    """None is added to gradients then, and they are scaled in the step, in fp32, as without a read."""
    task = dataclasses.replace(TASK, dtype=torch.bfloat16, max_norm=0.5)
    trained = []
    for reads in (False, True):
        model, optimizer = prepare(task, decide(task, uniform(*PLANS["fetched"])))
        with optimizer.session as session:
            for number in range(2):
                for tokens in batches(task)[number]:
                    model(input_ids=tokens, labels=tokens).loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), task.max_norm)
                if reads:
                    read("clone", model)
                optimizer.step()
                optimizer.zero_grad()
            trained.append(session.model.state_dict())
    assert all(torch.equal(values, trained[1][name]) for name, values in trained[0].items())


@pytest.mark.filterwarnings("ignore:To copy construct", "ignore:torch.asarray")
def test_memory_that_is_read_without_asking_holds_no_other_weights(started):
    """Neither old ones nor those of another unit: NaN, or what is right while its unit computes."""
    model, optimizer = started

    def look() -> None:
        for (way, reads), parameter in itertools.product(UNASKED.items(), model.parameters()):
            try:
                with torch.no_grad():
                    found = reads(parameter).detach()
            except (RuntimeError, ValueError, TypeError, BufferError):
                continue
            assert found.isnan().all() or (is_inside and found.flatten()[0] in now), way

    for number in range(2):
        now, is_inside = [values.flatten()[0] for values in model.state_dict().values()], False
        look()
        is_inside = True
        run(TASK, model, optimizer, number, look)


def test_what_needs_no_values_works_everywhere(started):
    """Also in an iteration, with the answers of an ordinary parameter."""
    model, optimizer = started
    expected = dict(in_memory(TASK, optimizer.session).named_parameters())
    tokens = batches(TASK)[0][0]
    loss, kept = model(input_ids=tokens, labels=tokens).loss, []
    loss.register_hook(lambda _: kept.extend(p.detach().requires_grad_() for p in model.parameters()))  # no values now
    loss.backward()
    for name, parameter in model.named_parameters():
        plain, moment = expected[name], len(parameter)
        assert (parameter.shape, parameter.stride(), parameter.dtype) == (plain.shape, plain.stride(), plain.dtype)
        assert (moment, parameter.is_contiguous(), parameter.is_leaf) == (len(plain), True, True)
        assert parameter.data.numel() == plain.detach().nelement() == parameter.detach().size().numel()
        assert parameter.to("cpu") is parameter is parameter.float()
        assert torch.zeros_like(parameter).equal(torch.zeros_like(plain))
        assert torch.ones(2).to(parameter).type_as(parameter).dtype == plain.dtype
        assert parameter.data_ptr()
    assert len({parameter.data_ptr() for parameter in model.parameters()}) == len(expected)
    model.to("cpu").float()
    kept += [parameter.detach().requires_grad_() for parameter in model.parameters()]
    optimizer.step()
    assert len(kept) == 2 * len(expected)
    assert all(values.sum().requires_grad for values in kept)


def test_names_of_metadata_read_no_values():
    """Each gives the same for weights that differ."""
    assert not {name for name in METADATA if re.fullmatch(r"[^_].*_", name)} - {"requires_grad_"}
    one, other = (nn.Parameter(torch.full((2, 3), value)) for value in (1.0, 2.0))
    same = {"data_ptr", "untyped_storage", "_cdata", "__hash__", "new_empty", "empty_like", "rand_like", "randn_like"}
    for name in METADATA - same:
        found = []
        for parameter in (one, other):
            what = getattr(parameter, name, None)
            with contextlib.suppress(TypeError, RuntimeError, AttributeError):
                what = what() if callable(what) else what
            found.append(None if callable(what) or what is parameter else what)
        assert str(found[0]) == str(found[1]), name


def test_a_failed_session_refuses_reads(started):
    model, optimizer = started
    parameter = next(model.parameters())
    assert parameter.isfinite().all()
    optimizer.session.runtime.machine.fail(OSError("a drive"))
    with pytest.raises(ValueError, match=r"its session has failed.*checkpoint"):
        parameter.sum()


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_ranks_read_what_each_has(processes, zero_stage):
    task = Task("llama", torch.float32, iterations=1)
    decisions = decide(task, uniform("gpu", "cpu"), data_parallel=2, zero_stage=zero_stage)
    assert processes.call(2, read_parameters, task, decisions) == [None, None]


@pytest.mark.part(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("family", ["llama-tied", "mixtral"])
@pytest.mark.parametrize("place", [*PLANS, "mixed"])
def test_tensors_of_state_dict_have_storages_of_their_own(family, place, dtype, tmp_path):
    """So safetensors writes them all, and sees only those as tied that are; at any depth of modules."""
    task = Task(family, dtype)
    model, optimizer = prepare(task, decide(task, uniform(*PLANS[place]) if place in PLANS else mixed))
    with optimizer.session as session:
        for found in (model.state_dict(), model.model.layers.state_dict(), session.full_parameters()):
            for name, values in found.items():
                assert values.untyped_storage().nbytes() == values.nbytes, name
        found = model.state_dict()
        tied = [names for names in safetensors.torch._find_shared_tensors(found) if len(names) > 1]
        assert tied == ([{"model.embed_tokens.weight", "lm_head.weight"}] if family == "llama-tied" else [])
        safetensors.torch.save_model(model, tmp_path / "model.safetensors")
        expected = {name: values.clone() for name, values in found.items()}
        run(task, model, optimizer, 0, lambda: None)
    del session, optimizer, model
    other = make_model(task)
    safetensors.torch.load_model(other, tmp_path / "model.safetensors")
    assert all(torch.equal(values, expected[name]) for name, values in weights(other).items())


def test_on_a_gpu(gpu, monkeypatch):  # noqa: ARG001 - a GPU
    """Weights are read on the parameter's device, and those that are there keep their memory."""
    if not torch.version.cuda:  # the virtual one cannot give memory back
        monkeypatch.setattr(CudaBackend, "release", lambda _, block: block.nbytes)
        monkeypatch.setattr(CudaBackend, "restore", lambda *_: None)
    task = Task("llama-tied", torch.bfloat16)
    model, optimizer = prepare(task, decide(task, mixed), device="cuda")
    with optimizer.session as session:
        run(task, model, optimizer, 0, lambda: None)
        found = model.state_dict()
        for name, parameter in model.named_parameters():
            values = parameter.detach().clone()
            assert values.device == parameter.device
            assert torch.equal(values.cpu(), found[name].cpu())
            assert found[name].untyped_storage().nbytes() == parameter.nbytes
            there = session.runtime.stored_weights(name)
            assert (there.data_ptr() == found[name].data_ptr()) == (not _is_copied(session, name))
        run(task, model, optimizer, 1, lambda: None)
        kept = model.state_dict()
        session.park()
        assert all(values.untyped_storage().nbytes() < values.nbytes for values in kept.values() if values.is_cuda)
        session.unpark()
        assert all(torch.equal(values, model.state_dict()[name]) for name, values in kept.items())


def _is_copied(session, name) -> bool:
    return any(unit.on_nvme for unit, _ in session.runtime.state.by_parameter[name])


@pytest.mark.filterwarnings("ignore:To copy construct")
@settings(max_examples=examples(12, fewest=4))
@example((TASK, decide(TASK, uniform("gpu", "cpu"))), ["data", "vector"], 3)
@example((TASK, decide(TASK, uniform("nvme", "nvme"))), ["foreach lerp", "norm in grad mode"], 3)
@given(
    plans(families=("gpt2", "llama-tied")),
    st.lists(st.sampled_from(sorted(READS)), min_size=1, max_size=4),
    st.integers(0, 200),
)
def test_any_read_anywhere_is_as_in_memory_or_refused(plan, ways, place):
    """Between steps while updates run, inside iterations, and in a hook of any module, also while it evaluates."""
    task, decisions = plan
    model, optimizer = prepare(task, decisions)
    modules = [module for module in model.modules() if list(module.parameters(recurse=False))]
    choice, seen = itertools.cycle(ways), []

    def look(*_anything) -> None:
        way = ways[number % len(ways)]  # one for each iteration: a layer that is recomputed does what it did
        try:
            seen.append((way, read(way, model)))
        except (ValueError, RuntimeError) as refused:
            assert re.search(f"{REFUSED}|{NO_MEMORY}", str(refused))

    with optimizer.session as session:
        kept = [parameter.data for parameter in model.parameters()]
        views = [parameter.flatten() for parameter in model.parameters()]
        for number in range(2):
            before = in_memory(task, session)
            handle = modules[place % len(modules)].register_forward_hook(look)
            with torch.no_grad():
                logits = model.eval()(input_ids=batches(task)[0][0]).logits
                handle.remove()
                assert torch.equal(logits, model(input_ids=batches(task)[0][0]).logits)
            assert seen
            handle = modules[place % len(modules)].register_forward_hook(look)
            run(task, model.train(), optimizer, number, look)
            handle.remove()
            found = read(way := next(choice), model)
            now = in_memory(task, session)
            assert_as(found, read(way, now))
            assert_as([values.clone() for values in kept], list(now.parameters()))
            for way, found in seen:
                assert_as(found, read(way, before))
            seen.clear()
            with pytest.raises(ValueError, match=r"a view of .* before .*session\.full_parameters\(\)"):
                views[number].sum()
    way = next(choice)
    assert_as(read(way, model), read(way, now))
    assert_as([values.clone() for values in kept], list(now.parameters()))
