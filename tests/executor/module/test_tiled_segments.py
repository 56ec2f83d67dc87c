"""Tiles of sequences that pass a layer one after another: the bits of the same in memory, under any plan."""

import functools
from collections import Counter

import pytest
import rank_references
import torch
import transformers
from amount import examples
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from plans import mixed, plans
from programs import programs, run
from rank_programs import metered, trained
from ranks import assert_same_bits
from torch import nn
from training import (
    ReferenceOptimizer,
    Task,
    assert_same,
    batches,
    decide,
    make_model,
    make_optimizer,
    planned,
    prepare,
    session_options,
    train,
    uniform,
    weights,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from executor.audit.audit import AuditError
from executor.callbacks import replace_attribute
from executor.distributed.shards import BindingError
from executor.prepare import prepare_session
from hwprofiles.registry import load_profile
from planner.costs.model import CostModel
from planner.decisions import Decisions, Place, Precision, UnitDecision
from planner.graph import Batch, build_graph, units
from planner.lowering import lower
from planner.models import from_hf_config
from planner.schedule.tasks import Op, Tier
from planner.simulate.machine import run_until_steady
from planner.simulate.prediction import memory_peaks
from ullage.capture import capture_module

TILES = {"segment_tile_sequences": 1}  # of a micro-batch of 2


def one_by_one(model):
    """Let each sequence pass a layer by itself."""
    for layer in (module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)):
        replace_attribute(layer, "forward", _each(layer.forward))
    return model


def _each(run):
    def forward(hidden, *args, **kwargs):
        if not torch.is_grad_enabled():
            return run(hidden, *args, **kwargs)
        found = [run(row, *args, **kwargs) for row in hidden.split(1)]
        return torch.cat(found) if torch.is_tensor(found[0]) else (torch.cat([row for row, *_ in found]),)

    return forward


def in_memory(task):
    """Return what training in memory gives, with layers that sequences pass one by one."""
    model = one_by_one(make_model(task))
    optimizer = ReferenceOptimizer(make_optimizer(task, model))
    return train(task, model, optimizer), weights(model)


@settings(max_examples=examples(30), deadline=None)
@given(
    plans(families=["gpt2", "llama", "mixtral", "opt"], degrees=TILES, optimizers=["adamw", "adamw-8bit", "lion"]),
    st.integers(0, 99),
)
def test_any_plan_gives_the_bits_of_tiles_in_memory(plan, seed):
    task, decisions = plan
    assert_same(planned(task, decisions, delays=seed), in_memory(task))


@settings(max_examples=examples(40), deadline=None, phases=[Phase.generate])
@given(plans(degrees=TILES, max_norm=0.5), programs())
def test_so_does_any_program_that_leaves_the_plan(plan, program):
    task, decisions = plan
    model, optimizer = prepare(task, decisions)
    with optimizer.session as session:
        seen = run(program, model, optimizer, batches(task), task.max_norm)
        final = {name: weight.clone() for name, weight in session.full_parameters().items()}
    model = one_by_one(make_model(task))
    optimizer = ReferenceOptimizer(make_optimizer(task, model))
    assert_same((seen, final), (run(program, model, optimizer, batches(task), task.max_norm), weights(model)))


def test_weights_come_twice_and_gradients_leave_once():
    """Of a micro-batch in two tiles; two micro-batches bring weights twice as often."""
    task = Task("llama", torch.float32, iterations=2)
    moved = {}
    for name, tiles in (("one", {}), ("tiles", TILES)):
        decisions = decide(task, uniform("host", "cpu", "recompute"), num_param_slots=1, **tiles)
        model, optimizer = prepare(task, decisions)
        with optimizer.session as session:
            found = moved[name] = Counter()
            actions = session.runtime.actions
            for op in (Op.FETCH, Op.FLUSH):
                actions._by_op[op] = functools.partial(
                    _counting, found, actions._by_op[op], session.runtime.state.units
                )
            train(task, model, optimizer)
            assert session.num_left == 0
            wanted = Counter()
            for each in session.schedule.tasks:
                if each.op in {Op.FETCH, Op.FLUSH}:
                    wanted[each.op] += task.iterations * each.num_bytes
        assert found == wanted
    assert moved["one"] == moved["tiles"]


def _counting(found, perform, unit_states, each, iteration):
    """Do a task, and count the bytes that are really there to be moved."""
    unit = unit_states[each.unit]
    if each.op is Op.FETCH:
        found[each.op] += sum(served.nbytes for _, served in unit.fetches())
    else:
        found[each.op] += sum(
            parameter.part_of(part, gradient).nbytes
            for parameter in unit.parameters
            if (gradient := unit.flushing.get(each.micro_batch, {}).get(parameter.name)) is not None
            for part in parameter.leaving
        )
    perform(each, iteration)


@pytest.mark.part(6)
@pytest.mark.parametrize("num_micro_batches", [1, 2])
@pytest.mark.parametrize(
    ("zero_stage", "choose"),
    [(0, mixed), (1, uniform("gpu", "stream", "offload")), (2, uniform("gpu", "cpu", "recompute")), (3, mixed)],
    ids=["0", "1", "2", "3"],
)
def test_two_ranks_give_the_bits_of_one_process(processes, monkeypatch, zero_stage, choose, num_micro_batches):
    monkeypatch.setattr(rank_references, "make_model", lambda task: one_by_one(make_model(task)))
    family = ["gpt2", "llama", "mixtral"][(zero_stage + num_micro_batches) % 3]
    task = Task(family, torch.float32, num_micro_batches, iterations=5)  # one that no other test has
    decisions = decide(task, choose, data_parallel=2, zero_stage=zero_stage, **TILES)
    assert_same_bits(processes.call(2, trained, task, decisions), rank_references.reference(task, 2, decisions))


@pytest.mark.part(2)
@pytest.mark.parametrize(
    ("degrees", "family"),
    [
        ({"tensor_parallel": 2}, "llama-shared"),
        ({"tensor_parallel": 2}, "mixtral-shared"),
        ({"data_parallel": 2, "expert_parallel": 2, "expert_units": 2}, "mixtral-shared"),
    ],
    ids=str,
)
def test_ranks_share_layers_and_experts(processes, degrees, family):
    task = Task(family, torch.float32, iterations=3)
    expected, found = (
        processes.call(2, trained, task, decide(task, mixed, **degrees, **tiles)) for tiles in ({}, TILES)
    )
    for (seen, final), (losses, whole) in zip(found, expected, strict=True):
        assert seen == pytest.approx(losses, rel=1e-5)
        for name, weight in whole.items():
            own, other = (torch.from_numpy(each.copy()).view(torch.float32) for each in (final[name], weight))
            torch.testing.assert_close(own, other, rtol=1e-3, atol=2e-4, msg=name)


@pytest.mark.parametrize("activations", ["keep", "recompute", "offload"])
def test_the_audit_compares_with_all_sequences_at_once(activations):
    task = Task("llama", torch.float32, iterations=2)
    decisions = decide(task, uniform("host", "cpu", activations), **TILES)
    model, optimizer = prepare(task, decisions, audit="first")
    with optimizer.session as session:
        train(task, model, optimizer)
        assert not session.audit.result.left_out
        assert session.audit.result.largest < 1e-5
        assert session.num_left == 0


def test_the_audit_says_that_tiles_draw_other_random_numbers():
    task = Task("gpt2", torch.float32, iterations=1)
    model, optimizer = prepare(task, decide(task, uniform("host", "cpu", "recompute"), **TILES), audit="first")
    with optimizer.session as session:
        train(task, model, optimizer)
        said = "tiles of sequences pass it, and draw other random numbers"
        assert session.audit.result.left_out == {"transformer.h.2": said}
        assert session.audit.result.num_passes == 3


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_tiles_see_no_keys_of_others_in_a_cache(activations):
    task = Task("llama", torch.float32, iterations=2)
    expected = make_model(task)
    expected.config.use_cache = True
    losses = train(task, expected, ReferenceOptimizer(make_optimizer(task, expected)))
    model, optimizer = prepare(task, decide(task, uniform("host", "cpu", activations), **TILES))
    model.config.use_cache = True
    with optimizer.session as session:
        assert train(task, model, optimizer) == pytest.approx(losses, rel=1e-5)
        assert session.num_left == 0


@pytest.mark.parametrize("sizes", [(3, 2), (1, 2), (2, 1)], ids=str)
def test_batches_of_other_sizes_train(sizes):
    """Three sequences pass in two tiles; one leaves the plan."""
    task = Task("llama", torch.float32, 2, iterations=2)
    decisions = decide(task, mixed, **TILES)
    expected = make_model(task)
    reference = ReferenceOptimizer(make_optimizer(task, expected))
    model, optimizer = prepare(task, decisions)
    generator = torch.Generator().manual_seed(5)
    sized = [[torch.randint(64, (size, 8), generator=generator) for size in sizes] for _ in range(3)]

    def losses(model, optimizer):
        seen = []
        for micro_batches in sized:
            for tokens in micro_batches:
                loss = model(input_ids=tokens, labels=tokens).loss
                loss.backward()
                seen.append(loss.item())
            optimizer.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
        return seen

    with optimizer.session as session:
        assert losses(model, optimizer) == pytest.approx(losses(expected, reference), rel=1e-5)
        assert (session.num_left > 0) == (1 in sizes)


class Block(nn.Module):
    """A block that may mix sequences, keep them behind, or return what says nothing about them."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.norm, self.wide, self.narrow = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, hidden, mask):
        inner = self.narrow(torch.relu(self.wide(self.norm(hidden)))) * mask.unsqueeze(-1)
        if self.kind == "mixes":
            inner = inner + hidden.mean(0, keepdim=True)
        return (hidden + inner, inner.square().mean()) if self.kind == "sums" else hidden + inner


class Net(nn.Module):
    """Blocks, and a mean over tokens that count."""

    def __init__(self, kind=""):
        super().__init__()
        self.kind = kind
        self.embed, self.head = nn.Embedding(40, 16), nn.Linear(16, 40)
        self.blocks = nn.ModuleList(Block(kind) for _ in range(3))

    def forward(self, tokens, labels):
        hidden, mask = self.embed(tokens), (labels >= 0).float()
        if self.kind == "behind":
            hidden, mask = hidden.transpose(0, 1), mask.transpose(0, 1)
        extra = 0.0
        for block in self.blocks:
            hidden = block(hidden, mask)
            if self.kind == "sums":
                hidden, more = hidden
                extra = extra + more
        if self.kind == "behind":
            hidden = hidden.transpose(0, 1)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten()) + extra


def net(kind=""):
    torch.manual_seed(3)
    model = Net(kind)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


@functools.cache
def units_of_net(kind, tile):
    captured = capture_module(lambda: Net(kind), ["4x8:int64", "4x8:int64"], "fp32", as_on_gpu=False)
    return units(build_graph(captured, Batch(4, 8, 4, segment_tile_sequences=tile)))


def planned_net(kind="", params="host", place=Place.CPU, activations="recompute", tile=1, **options):
    found = units_of_net(kind, tile)
    precision, settings = Precision(weights="fp32"), {"micro_batch": 4, "segment_tile_sequences": tile}
    empty = Decisions(policy="test", precision=precision, units={})
    chosen = {
        unit.name: UnitDecision(
            params=params,
            activations=activations if unit.can_swap else "keep",
            update=(place,) * len(empty.piece_params(unit)),
        )
        for unit in found
    }
    decisions = Decisions(policy="test", precision=precision, units=chosen, **settings)
    return prepare_session(*net(kind), found, decisions, session_options(**options))


def steps(model, optimizer, num=3):
    """Train on sequences of which some have many more tokens that count than others."""
    generator = torch.Generator().manual_seed(7)
    seen = []
    for _ in range(num):
        tokens, labels = (torch.randint(40, (4, 8), generator=generator) for _ in range(2))
        for row, length in enumerate((8, 1, 5, 2)):
            labels[row, length:] = -100
        loss = model(tokens, labels)
        loss.backward()
        seen += [loss.item(), float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))]
        optimizer.step()
        optimizer.zero_grad()
    return seen


@pytest.mark.parametrize(
    ("params", "place", "activations", "tile"),
    [
        ("gpu", Place.GPU, "keep", 1),
        ("host", Place.CPU, "recompute", 2),
        ("host", Place.STREAM, "offload", 1),
        ("nvme", Place.NVME, "offload-nvme", 2),
    ],
)
def test_a_mean_over_tokens_is_that_of_the_whole_batch(params, place, activations, tile):
    """Of a captured model, with sequences that count unequally: plain training of the batch in memory, unlike tiles."""
    model, optimizer = net()
    expected = steps(model, optimizer), weights(model)
    model, optimizer = planned_net("", params, place, activations, tile, audit="first")
    with optimizer.session as session:
        seen = steps(model, optimizer)
        final = {name: weight.clone() for name, weight in session.full_parameters().items()}
        assert session.num_left == 0
        assert session.audit.result.kinds
    assert seen == pytest.approx(expected[0], rel=1e-5)
    for name, weight in expected[1].items():
        torch.testing.assert_close(final[name], weight, rtol=1e-4, atol=1e-5, msg=name)


def test_a_block_that_mixes_sequences_is_found_by_the_audit():
    model, optimizer = planned_net("mixes", audit="first")
    with pytest.raises(AuditError, match=r"blocks\.2"), optimizer.session:
        steps(model, optimizer)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("behind", "blocks.0 is given nothing whose first dimension is that of the 4 sequences"),
        ("sums", r"blocks.0 returns a tensor of shape \[\] for 1 sequences, which tells nothing about each of them"),
    ],
)
def test_what_cannot_be_cut_is_refused(kind, message):
    model, optimizer = planned_net(kind)
    with pytest.raises(BindingError, match=message), optimizer.session:
        steps(model, optimizer)


@pytest.mark.part(2)
@pytest.mark.parametrize("activations", ["keep", "recompute", "offload"])
def test_the_ledger_has_the_memory_of_tiles(processes, activations):
    """What comes and goes, within a few per cent: layers' inputs and outputs are a good part of it."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "vocab_size": 7}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, use_cache=False)
    batch = Batch(16, 32, 4, segment_tile_sequences=2)
    found = units(build_graph(from_hf_config(config.to_dict(), "tiled"), batch))
    decisions = Decisions(
        policy="test",
        precision=Precision(weights="fp32"),
        micro_batch=16,
        segment_tile_sequences=2,
        units={
            unit.name: UnitDecision(
                params="gpu", activations=activations if unit.in_layer else "keep", update=(Place.GPU,)
            )
            for unit in found
        },
    )
    cost = CostModel.of(load_profile("a100x8-nvlink"), found, decisions)
    simulation = run_until_steady(lower(found, decisions, asynchronous=False), cost)
    predicted = memory_peaks(simulation.timeline, simulation.steady, cost)[Tier.GPU].peak_bytes
    for static_bytes, dynamic_bytes in processes.call(1, metered, config, batch, decisions):
        assert predicted - static_bytes == pytest.approx(dynamic_bytes, rel=0.03)
