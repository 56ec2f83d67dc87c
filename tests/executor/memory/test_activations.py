"""Offloaded activations: what leaves is what the plan counts, the device has it no more, and training is the same."""

import weakref

import pytest
import torch
import transformers
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint
from training import (
    Task,
    assert_same,
    batches,
    decide,
    make_model,
    memory_of_step,
    model_units,
    prepare,
    reference,
    session_options,
    train,
    uniform,
)

from executor.devices.backend import HostBackend
from executor.memory import recompute_cache
from executor.memory.activations import OffloadedActivations, offloadable_inputs
from executor.memory.arenas import Arena
from executor.memory.forward_state import ForwardState
from executor.memory.nvme_files import Storage
from executor.memory.recompute_cache import ActivationError
from executor.module.guarded_parameters import guard, lifted
from executor.prepare import prepare_session
from hwprofiles.registry import load_profile
from planner.costs.model import CostModel
from planner.decisions import Decisions, Place, UnitDecision
from planner.graph import Batch, build_graph, units
from planner.lowering import lower
from planner.models import from_hf_config
from planner.schedule.tasks import Op, Tier
from planner.simulate.machine import run_until_steady
from planner.simulate.prediction import memory_peaks

FAMILIES = ["gpt2", "llama", "qwen3", "mixtral", "opt"]
DTYPES = [torch.bfloat16, torch.float32]


def offload(session, watch):
    """Call ``watch`` around everything that leaves: with the unit, and whether it has left."""
    activations = session.runtime.offloaded
    leave = activations.offload

    def watched(unit, room):
        watch(unit, False)
        leave(unit, room)
        watch(unit, True)

    activations.offload = watched


def without_dropout(model):
    for module in model.modules():
        for name in ("p", "attn_dropout", "dropout", "attention_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_leaves_is_what_the_plan_counts(family, dtype):
    """To the byte, unit by unit; only the last product of a segment is made again, which nothing needs."""
    task = Task(family, dtype, iterations=1)
    model, optimizer = prepare(task, decide(task, uniform("host", "cpu", "offload")))
    moved, again = {}, []
    with optimizer.session as session:
        without_dropout(model)

        def watch(unit, has_left):
            if has_left:
                segment = session.runtime.offloaded._segments[unit]
                moved[unit] = sum(tensor.num_bytes for tensor in segment.offloaded(unit))
                again.extend(product.function for product in segment.products_of[unit] if not product.is_offloaded)

        offload(session, watch)
        train(task, model, optimizer)
        stated = {t.unit: t.num_bytes for t in session.schedule.tasks if t.op is Op.OFFLOAD}
    assert moved == stated
    assert len(again) == (0 if family == "mixtral" else len(stated) // 2), again


def test_the_device_has_it_no_more_when_forward_has_ended():
    task = Task("llama", torch.bfloat16, iterations=1)
    model, optimizer = prepare(task, decide(task, uniform("host", "cpu", "offload")))
    made = []
    with optimizer.session as session:

        def watch(unit, has_left):
            if not has_left:
                segment = session.runtime.offloaded._segments[unit]
                tensors = [t for product in segment.products_of[unit] for t in product.tensors] + segment.inputs
                made.extend(weakref.ref(t.tensor.untyped_storage()) for t in tensors if t.tensor is not None)

        offload(session, watch)
        loss = model(input_ids=batches(task)[0, 0], labels=batches(task)[0, 0]).loss
        session.runtime.machine.wait()
        assert len(made) > 3 * 6
        assert not [reference for reference in made if reference() is not None]
        loss.backward()
        optimizer.step()


def keep_up(session):
    """Let the caller wait at every mark until lanes have done what they can, so that none is slower than planned."""
    reach, machine = session.runtime.loop.reach, session.runtime.machine

    def reached(*args):
        task = reach(*args)
        with machine._changed:
            machine._changed.wait_for(lambda: machine._stopped or not machine._num_pending)
        return task

    session.runtime.loop.reach = reached


SMALL = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "num_hidden_layers": 4,
}


@pytest.mark.parametrize("ways", [["offload"] * 4, ["keep", "offload", "recompute", "offload"]], ids=["all", "some"])
def test_the_device_holds_what_the_plan_says(ways):
    """The most of what comes and goes, in a model whose activations are the most of that, within half a per cent."""
    config = transformers.LlamaConfig(**SMALL, use_cache=False)
    found = units(build_graph(from_hf_config(config.to_dict(), "small"), Batch(2, 128)))
    way = {f"layers.{number}": way for number, way in enumerate(ways)}
    decisions = Decisions(
        policy="test",
        micro_batch=2,
        num_activation_slots=1,
        num_gradient_slots=1,
        units={
            unit.name: UnitDecision(params="gpu", activations=way.get(unit.segment, "keep"), update=(Place.CPU,))
            for unit in found
        },
    )
    cost = CostModel.of(load_profile("epyc-turin-2c"), found, decisions)
    simulation = run_until_steady(lower(found, decisions, asynchronous=False), cost)
    peaks = memory_peaks(simulation.timeline, simulation.steady, cost)
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).train()
    tokens = torch.randint(256, (2, 128))
    _, optimizer = prepare_session(model, torch.optim.AdamW(model.parameters()), found, decisions, session_options())
    with optimizer.session as session:
        keep_up(session)
        for _ in range(2):
            memory = memory_of_step(model, optimizer, tokens)
    predicted = peaks[Tier.GPU].peak_bytes - sum(memory[Tier.GPU].static_bytes.values())
    assert predicted == pytest.approx(memory[Tier.GPU].dynamic_peak_bytes, rel=0.005)
    assert peaks[Tier.HOST].by_class == {c: n for c, n in memory[Tier.HOST].static_bytes.items() if n}


class Alone:
    """One segment of one unit that leaves, without a session."""

    unit = "layers.0.attn"
    on_demand = False
    micro_batch = tile = 0

    def __init__(self, room_bytes: int = 1 << 20):
        found = [unit for unit in model_units("llama") if unit.segment == "layers.0"]
        decided = {unit.name: UnitDecision(params="gpu", activations="offload", update=(Place.GPU,)) for unit in found}
        backend = HostBackend()
        host = Arena(Tier.HOST, None, backend)
        decisions = Decisions(policy="test", units=decided)
        self.activations = OffloadedActivations(tuple(found), decisions, host, Storage(None, 0), backend)
        self.activations._room[self.unit] = torch.empty(room_bytes, dtype=torch.uint8)

    def on_forward(self, unit):
        """See `ModuleCallbacks`."""

    def forward(self, compute, *given):
        with self.activations.forward([self.unit], self, given) as modes:
            return checkpoint(compute, *given, use_reentrant=False, context_fn=modes)

    def away_and_back(self):
        self.activations.offload(self.unit, self.unit)
        self.activations.reload(self.unit, self.unit)

    def made_again(self):
        return [p.function for p in self.activations._segments[self.unit].products_of[self.unit] if not p.is_offloaded]


WEIGHT = torch.linspace(-1, 1, 64 * 64).view(64, 64)


def some_input():
    return torch.linspace(-2, 2, 8 * 64).view(8, 64).requires_grad_()


def test_random_numbers_of_a_product_are_drawn_once(monkeypatch):
    """A product that draws, as attention does on a GPU, does not run again; what is drawn behind it is the same."""
    monkeypatch.setattr(recompute_cache, "_PRODUCTS", recompute_cache._PRODUCTS | {torch.ops.aten.native_dropout})

    def compute(x):
        drawn = torch.native_dropout(x @ WEIGHT, 0.5, True)[0]  # a product
        return torch.tanh(torch.nn.functional.dropout(drawn.sin(), 0.5) @ WEIGHT)  # made again

    found = []
    for alone in (None, Alone()):
        torch.manual_seed(5)
        x = some_input()
        y = compute(x) if alone is None else alone.forward(compute, x)
        if alone is not None:
            alone.away_and_back()
            assert not alone.made_again()
        y.sum().backward()
        found.append((y.detach(), x.grad, torch.get_rng_state()))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_second_pass_draws_what_the_first_one_has_drawn(monkeypatch):
    """From torch's own generators, that of the GPU too, which nothing in the module leads to."""
    on_gpu = torch.Generator()
    for name, value in (("is_initialized", lambda: True), ("current_device", lambda: 1)):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda, "default_generators", (torch.Generator(), on_gpu))

    class Drawing(torch.nn.Module):
        def forward(self, x):
            return x + torch.rand(4) + torch.rand(4, generator=torch.cuda.default_generators[1])

    module = Drawing()
    state = ForwardState(module, "drawing", torch_too=True)
    before, zero = state.save(), torch.zeros(4)
    first, after = module(zero), [one.get_state() for one in (torch.default_generator, on_gpu)]
    with state.restored(before):
        assert torch.equal(module(zero), first)
    assert all(map(torch.equal, after, [one.get_state() for one in (torch.default_generator, on_gpu)]))


def test_the_second_pass_finds_the_parametrized_weights_that_the_first_one_found():
    module = parametrizations.weight_norm(torch.nn.Linear(4, 4))
    state = ForwardState(module, "normed", torch_too=True)
    with parametrize.cached():
        before, first = state.save(), module.weight
        with state.restored(before):
            assert module.weight is not first
        assert module.weight is first


@pytest.mark.parametrize("room_bytes", [0, 2048, 2047, 4096, 6144, 6143, 100_000])
def test_what_has_no_room_is_made_again_and_the_bits_are_the_same(room_bytes):
    def compute(x):
        return ((x.sin() @ WEIGHT).cos() @ WEIGHT).relu() @ WEIGHT.sum(1).diag()

    alone, x, plain = Alone(room_bytes), some_input(), some_input()
    y = alone.forward(compute, x)
    alone.away_and_back()
    segment = alone.activations._segments[alone.unit]
    assert sum(tensor.num_bytes for tensor in segment.offloaded(alone.unit)) == min(room_bytes // 2048, 4) * 2048
    for loss in (y.sum(), compute(plain).sum()):
        loss.backward()
    assert torch.equal(x.grad, plain.grad)


def test_a_product_that_is_changed_in_place_is_made_again():
    def compute(x):
        return torch.nn.functional.relu((x @ WEIGHT).mul_(2), inplace=True) @ WEIGHT

    alone, x, plain = Alone(), some_input(), some_input()
    y = alone.forward(compute, x)
    alone.away_and_back()
    assert alone.made_again() == [torch.ops.aten.mm.default]
    y.sin().sum().backward()
    compute(plain).sin().sum().backward()
    assert torch.equal(x.grad, plain.grad)


def test_tensors_come_back_with_their_strides():
    def compute(x):
        turned = torch.nn.functional.scaled_dot_product_attention(*[(x @ WEIGHT).view(1, 8, 4, 16).transpose(1, 2)] * 3)
        strides.append(turned.stride())
        return turned.sin()

    strides = []
    alone = Alone()
    y = alone.forward(compute, some_input())
    alone.away_and_back()
    y.sum().backward()
    assert len(strides) == 2
    assert strides[0] == strides[1]
    assert not y.is_contiguous()


def test_changes_that_would_be_lost_are_reported():
    alone, x = Alone(), some_input() * 1
    alone.forward(lambda x: (x @ WEIGHT).sin(), x)
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(ActivationError, match=r"an input of layers.0.attn was changed in place .* change a copy"):
        alone.activations.offload(alone.unit, alone.unit)

    fickle, runs = Alone(), []

    def compute(x):
        runs.append(1)
        return (x @ WEIGHT if len(runs) == 1 else torch.addmm(x, x, WEIGHT)).sin()

    y = fickle.forward(compute, some_input()).sum()
    fickle.away_and_back()
    with pytest.raises(ActivationError, match=r"product 0 of the recomputed segment is aten\.addmm"):
        y.backward()


def test_a_second_backward_is_given_the_activations_of_its_own_forward():
    def compute(x):
        return (x @ WEIGHT).sin()

    alone, x, plain = Alone(), some_input(), some_input()
    y = alone.forward(compute, x).sum()
    alone.away_and_back()
    y.backward(retain_graph=True)
    alone.on_demand = True  # as any iteration does that goes backward again
    y.backward(retain_graph=True)
    (2 * compute(plain).sum()).backward()
    assert torch.equal(x.grad, plain.grad)
    alone.activations.drop_all()
    alone.forward(compute, some_input() * 3)
    alone.away_and_back()
    with pytest.raises(ActivationError, match=r"backward ran twice through one forward, .* overwritten"):
        y.backward()


def test_a_guarded_parameter_that_a_layer_is_given_stays():
    """DeBERTa gives every layer its relative positions, which move as their unit does."""
    places, x, expected = torch.nn.Parameter(WEIGHT.clone()), some_input(), some_input()
    (expected @ WEIGHT).tanh().sum().backward()

    def compute(x, places):
        with lifted(places):
            return (x @ places).tanh()

    guard(places, "places", None)
    layer = Alone()
    y = layer.forward(compute, x, places)
    assert [saved.shape for saved in layer.activations._segments[layer.unit].inputs] == [x.shape]
    layer.away_and_back()
    y.sum().backward()
    assert torch.equal(x.grad, expected.grad)
    assert places.grad.isfinite().all()


def test_layers_that_nothing_trains_leave_nothing_behind():
    task = Task("gpt2", torch.bfloat16, iterations=2)
    found = []
    for way in ("keep", "offload"):
        model = make_model(task)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("h.2" in name)
        model, optimizer = prepare(task, decide(task, uniform("gpu", "cpu", way)), model=model)
        with optimizer.session as session:
            seen = train(task, model, optimizer)
            segments = session.runtime.offloaded._segments.values()
            held = [t for s in segments for t in (*s.inputs, *(t for p in s.products for t in p.tensors))]
            assert bool(held) is (way == "offload")
            assert all(saved.tensor is None for saved in held)
            found.append((seen, {n: w.clone() for n, w in session.full_parameters().items()}))
    assert_same(*found)


def test_a_model_is_evaluated_between_iterations():
    task = Task("llama", torch.float32, iterations=2)
    model, optimizer = prepare(task, decide(task, uniform("host", "cpu", "offload")))
    tokens = batches(task)[0, 0]

    with optimizer.session:
        with torch.no_grad():
            first = model(input_ids=tokens).logits
        seen = train(task, model, optimizer)
        with torch.no_grad():
            assert not torch.equal(model(input_ids=tokens).logits, first)
        assert_same((seen, optimizer.session.full_parameters()), reference(task))


def test_what_a_transform_of_torch_func_runs_stays_on_the_device():
    """Its tensors have no memory of their own; forward-mode gradients need no backward."""
    values, found = torch.ones(3), []

    def forward(given):
        found.extend(offloadable_inputs([given, values]))
        return given.square()

    torch.func.jvp(forward, (values,), (values,))
    assert [tensor is values for tensor in found] == [True]
    forward(values.clone().requires_grad_())
    assert len(found) == 2
