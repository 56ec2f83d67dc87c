"""Tiles of the loss and of layers are compared with all tokens at once where these take much memory."""

import dataclasses
from typing import Any

import pytest
from torch import nn

from hwprofiles.registry import load_profile
from planner.choices.request import Request
from planner.choices.tiles import tile_of
from planner.choices.variants import Variant, variants
from planner.explain.bench import Bench
from planner.explain.tricks import TRICKS, without
from planner.graph import Batch, build_graph, units
from planner.models import ModelConfig, resolve_model
from planner.models.config import ModelConfigError
from planner.models.kernels import flop
from planner.plan.document import describe
from planner.plan.planning import make_plan
from planner.schedule.tasks import Tier
from planner.terms import default_micro_batch
from planner.verification import verify
from ullage.capture import capture_module
from ullage.rivals import make_plan as rivals_plan

MODEL = resolve_model("qwen2.5-0.5b")  # 151,936 logits of 0.5 billion parameters
REQUEST = Request(MODEL, load_profile("rtx-4090"), seq_len=2048, micro_batch=1)


def tiles(request: Request) -> list[int | None]:
    return [variant.choice.loss_tile_tokens for variant in whole(request)]


def whole(request: Request) -> tuple[Variant, ...]:
    """Return the variants with whole master copies."""
    return variants(dataclasses.replace(request, split_masters=False))


@pytest.mark.parametrize(("micro_batch", "is_tiled"), [(1, True), (2, True), (4, True)])
def test_tiles_are_compared_if_whole_logits_take_a_tenth_of_the_device(micro_batch: int, is_tiled: bool) -> None:
    logit_bytes = micro_batch * 2048 * MODEL.vocab_size * 14
    capacity_bytes = REQUEST.hardware.device.memory_bytes.value
    found = tiles(dataclasses.replace(REQUEST, micro_batch=micro_batch))
    assert (logit_bytes >= capacity_bytes / 10) is is_tiled
    assert len(found) == 1 + is_tiled
    small = dataclasses.replace(REQUEST, micro_batch=micro_batch, seq_len=512 // micro_batch)
    assert tiles(small) == [None]


def test_a_tile_is_no_smaller_than_another_units_peak() -> None:
    batch = Batch(8, 2048)
    found = units(build_graph(MODEL, batch))
    tokens = tile_of(MODEL, batch, found, REQUEST.hardware.device)
    assert tokens is not None
    others_bytes = max(unit.saved_bytes + unit.workspace_bytes for unit in found[:-1])
    assert tokens * MODEL.vocab_size * 14 <= others_bytes < 2 * tokens * MODEL.vocab_size * 14
    head = units(build_graph(MODEL, dataclasses.replace(batch, loss_tile_tokens=tokens)))[-1]
    assert head.saved_bytes + head.workspace_bytes < 2 * others_bytes
    assert tile_of(MODEL, batch, found[-1:], REQUEST.hardware.device) == 256  # the model is one unit


def test_a_tile_that_is_given_is_taken() -> None:
    assert tiles(dataclasses.replace(REQUEST, loss_tile_tokens=300)) == [300]
    assert tiles(dataclasses.replace(REQUEST, loss_tile_tokens=2048)) == [None]
    with pytest.raises(ValueError, match="loss_tile_tokens is 0, but must be a whole number of at least 1"):
        dataclasses.replace(REQUEST, loss_tile_tokens=0)


@pytest.mark.parametrize("tile", [1, 7, 64, 100, 128])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_tiled_head_makes_its_gradients_in_forward(tile: int, ranks: int) -> None:
    batches = (Batch(2, 50, tensor_parallel=ranks, loss_tile_tokens=n) for n in (None, tile))
    whole, tiled = (units(build_graph(MODEL, batch))[-1] for batch in batches)
    assert all(kernel.count for kernel in (*tiled.forward, *tiled.backward))  # a tile may be larger than the batch
    assert flop(tiled.forward) == flop(whole.forward + whole.backward)
    assert flop(tiled.backward) == 0
    assert tiled.saved_bytes < whole.saved_bytes


def test_a_long_sequence_fits_with_tiles_alone() -> None:
    request = dataclasses.replace(REQUEST, seq_len=32768)
    plan = make_plan(request, max_simulations=20)
    tokens = plan.decisions.loss_tile_tokens
    assert tokens is not None
    assert f"loss in tiles of {tokens} tokens" in describe(plan.decisions, plan.units())
    verify(plan)
    bench = Bench(plan)
    trial = without(bench, next(trick for trick in TRICKS if trick.key == "loss-in-tiles"))
    assert trial is not None
    assert trial.missing_bytes[Tier.GPU] > 32768 * MODEL.vocab_size * 8
    assert without(Bench(make_plan(dataclasses.replace(REQUEST, seq_len=128), 5)), TRICKS[11]) is None


def layer_tiles(request: Request) -> list[int | None]:
    return [variant.choice.layer_tile_tokens for variant in whole(request)]


LONG = Request(resolve_model("llama-3-8b"), load_profile("h100"), seq_len=65536, micro_batch=1)


def test_layers_in_tiles_are_compared_if_one_takes_a_fifth_of_the_device() -> None:
    assert [tuple(variant.choice.tiles.values()) for variant in whole(LONG)] == [
        (None, None, None),
        (4096, None, None),
        (2048, 16384, None),  # attention takes more than a smaller tile saves
    ]
    assert layer_tiles(dataclasses.replace(LONG, seq_len=32768)) == [None, None]
    assert layer_tiles(dataclasses.replace(LONG, seq_len=512, layer_tile_tokens=100)) == [100]
    assert layer_tiles(dataclasses.replace(LONG, seq_len=512, layer_tile_tokens=512)) == [None]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": resolve_model("gpt2"), "seq_len": 64}, "layers of gpt2 cannot be computed in tiles"),
        ({"model": resolve_model("mixtral-8x7b")}, "layers of mixtral-8x7b cannot be computed in tiles"),
        ({"num_devices": 2, "tensor_parallel": 2}, "2 tensor-parallel ranks share cannot be computed in tiles"),
    ],
)
def test_layers_that_cannot_be_tiled_are_refused(change: dict[str, Any], message: str) -> None:
    request = dataclasses.replace(LONG, seq_len=2048, layer_tile_tokens=64)
    with pytest.raises(ModelConfigError, match=f"{message}.*leave --tiles layer"):
        variants(dataclasses.replace(request, **change))


@pytest.mark.parametrize("tile", [64, 100, 2000])
def test_tiled_layers_compute_two_products_of_the_mlp_once_more_unless_they_are_recomputed(tile: int) -> None:
    model = LONG.model
    assert isinstance(model, ModelConfig)
    whole, tiled = (units(build_graph(model, Batch(2, 500, layer_tile_tokens=n)))[2] for n in (None, tile))
    product = 2 * 1000 * model.hidden_size * model.ffn_hidden_size
    assert flop(tiled.forward) == flop(whole.forward)
    assert flop(tiled.backward) == flop(whole.backward) + 2 * product
    assert flop(tiled.recompute) == flop(whole.recompute) - 2 * product
    assert tiled.saved_bytes < whole.saved_bytes / 5


def test_layers_in_tiles_are_planned_where_they_are_better() -> None:
    plan = make_plan(LONG, max_simulations=20)
    assert f"layers in tiles of {plan.decisions.layer_tile_tokens} tokens" in describe(plan.decisions, plan.units())
    verify(plan)
    trial = without(Bench(plan), next(trick for trick in TRICKS if trick.key == "layers-in-tiles"))
    assert trial is not None
    assert trial.missing_bytes or trial.iteration_s > plan.prediction.iteration_s


def on_a_device_of(num_bytes: float, **changes: Any) -> Request:
    """Return a request for a GPU with little memory beside what layers take for 16 sequences."""
    hardware = load_profile("rtx-4090")
    memory_bytes = hardware.device.memory_bytes.model_copy(update={"value": num_bytes})
    device = hardware.device.model_copy(update={"memory_bytes": memory_bytes})
    hardware = hardware.model_copy(update={"device": device})
    return dataclasses.replace(Request(resolve_model("gpt2"), hardware, seq_len=1024, micro_batch=16), **changes)


def passing(request: Request) -> set[int | None]:
    return {variant.choice.segment_tile_sequences for variant in variants(request)}


def test_sequences_pass_layers_in_tiles_where_a_layer_takes_a_tenth_of_the_device() -> None:
    assert passing(on_a_device_of(1e9)) == {None, 2}  # a tile has at least 2,048 tokens
    assert passing(on_a_device_of(2e10)) == {None}
    assert passing(on_a_device_of(1e9, segment_tile_sequences=4)) == {4}
    assert passing(on_a_device_of(1e9, segment_tile_sequences=16)) == {None}
    captured = capture_module(lambda: nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), ["64x64"])
    request = dataclasses.replace(on_a_device_of(5e4), model=captured, micro_batch=64, seq_len=1)
    assert passing(request) == {None}  # its blocks may mix sequences


def test_breadth_order_is_planned_where_it_is_better() -> None:
    """Other engines have the plan's micro-batch, or one of as many sequences as its tile."""
    plan = rivals_plan(on_a_device_of(1e9), max_simulations=20)
    assert "2 of 16 sequences pass a layer at a time" in describe(plan.decisions, plan.units())
    assert plan.engines
    assert not any("pass a layer at a time" in row.setting for row in plan.engines)
    verify(plan)
    trial = without(Bench(plan), next(trick for trick in TRICKS if trick.key == "breadth-order"))
    assert trial is not None
    assert trial.missing_bytes or trial.iteration_s > plan.prediction.iteration_s


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"segment_tile_sequences": 3}, "segment_tile_sequences is 3, but must divide the micro-batch of 16"),
        ({"num_devices": 2, "pipeline_parallel": 2}, "2 pipeline stages cannot compute tiles of sequences; leave"),
        ({"kernels": "compiled"}, "compiled kernels compute all sequences at once; leave --tiles segment or"),
    ],
)
def test_tiles_of_sequences_that_cannot_be_are_refused(change: dict[str, Any], message: str) -> None:
    request = on_a_device_of(1e9, segment_tile_sequences=2, hardware=load_profile("h100"))
    with pytest.raises(ModelConfigError, match=message):
        variants(dataclasses.replace(request, **change))


def test_the_default_micro_batch_of_long_sequences_is_small() -> None:
    assert [default_micro_batch(n) for n in (1, 8192, 8193, 16384, 32768, 10**6)] == [4, 4, 3, 2, 1, 1]
    for seq_len, expected in ((2048, 4), (32768, 1)):
        request = Request(MODEL, load_profile("h200"), seq_len=seq_len, loss_tile_tokens=1024)
        assert variants(request)[0].choice.micro_batch == expected
