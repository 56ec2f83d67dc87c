"""Liger's kernels for captured models: as many bytes and kernels as the formulas have; modules trained beside LoRA."""

import pytest

from planner.graph import Batch, build_graph, units
from planner.models import resolve_model
from planner.models.adapters import Lora
from planner.models.config import ModelConfigError
from planner.models.kernels import Elementwise, Gemm, flop, num_kernels
from ullage.capture import capture
from ullage.capture.architectures import architecture
from ullage.capture.records import CaptureError

NAME, MICRO_BATCH, TOKENS = "qwen2.5-0.5b", 2, 256
LIGER = Batch(MICRO_BATCH, TOKENS, 2, kernels="liger")


def captured(lora: Lora | None = None):
    return capture(NAME, architecture(NAME).inputs(MICRO_BATCH, TOKENS), as_on_gpu=True, lora=lora)


def totals(model, batch=LIGER):
    """Return FLOP, bytes of elementwise kernels, and kernels, of forward and of backward; and saved bytes."""
    found = units(build_graph(model, batch))
    ways = [[k for unit in found for k in getattr(unit, way)] for way in ("forward", "backward")]
    moved = [sum(k.num_bytes * k.count for k in kernels if isinstance(k, Elementwise)) for kernels in ways]
    return list(map(flop, ways)), moved, list(map(num_kernels, ways)), sum(unit.saved_bytes for unit in found)


def test_a_captured_model_has_what_the_formulas_have():
    ours, theirs = totals(captured()), totals(resolve_model(NAME))
    assert ours[0] == theirs[0]
    assert ours[1] == pytest.approx(theirs[1], rel=0.05)
    assert ours[2] == pytest.approx(theirs[2], rel=0.1)
    assert theirs[3] <= ours[3] <= 1.25 * theirs[3], "an upper limit"
    plain = totals(captured(), Batch(MICRO_BATCH, TOKENS, 2))
    assert ours[1][0] < 0.5 * plain[1][0]
    assert ours[3] < 0.7 * plain[3]


def test_a_frozen_head_has_no_gradient():
    model = captured(Lora(rank=4, targets=("q_proj",)))
    head = units(build_graph(model, LIGER))[-1]
    products = [k for k in head.backward if isinstance(k, Gemm)]
    assert {k.n for k in products} == {896}
    assert sum(k.flop for k in products) == sum(k.flop for k in head.forward if isinstance(k, Gemm))


def test_saved_modules_are_trained_as_a_whole():
    model = captured(Lora(rank=4, targets=("q_proj",), save=("embed_tokens",)))
    trained = {spec.name: spec.num_params for o in model.operators() for spec in o.parameters if spec.is_trained}
    assert sum(count for name, count in trained.items() if "embed_tokens" in name) == 151_936 * 896
    with pytest.raises(CaptureError, match="no module nothing to save"):
        captured(Lora(rank=4, save=("nothing",)))


def test_tiles_of_the_loss_are_refused():
    with pytest.raises(ModelConfigError, match="which liger kernels cannot; leave out --kernels liger"):
        build_graph(captured(), Batch(MICRO_BATCH, TOKENS, 2, kernels="liger", loss_tile_tokens=64))
