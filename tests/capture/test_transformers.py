"""Captures of ``transformers`` models against the analytic graph of the same architecture.

They agree to the last FLOP, parameter and kernel of a layer but for what the analytic lists leave out on purpose:
kernels on less than one value per token and head (:mod:`planner.models.kernels`), which is what tolerances are for.
"""

import functools

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from hwprofiles.registry import load_profile
from planner.choices.request import Request
from planner.choices.variants import variants
from planner.costs.model import CostModel
from planner.decisions import Sharding
from planner.graph import Batch, Elementwise, Gemm, Kernels, Unit, build_graph, units
from planner.models import ModelConfig, resolve_model, to_hf_config_dict
from planner.models.captured import CapturedInput, CapturedModel, Model
from planner.models.kernels import flop
from planner.search import best_of
from ullage.capture import capture_module
from ullage.rivals.best import best_of_engine, scorer_of

MICRO_BATCH, SEQ_LEN = 2, 512
NAMES = ["opt-1.3b", "gpt2", "llama-3-8b", "qwen2.5-7b", "qwen2.5-0.5b", "qwen3-8b", "mixtral-8x7b"]


def elementwise_bytes(kernels: Kernels) -> int:
    return sum(kernel.num_bytes * kernel.count for kernel in kernels if isinstance(kernel, Elementwise))


@functools.cache
def capture(name: str) -> tuple[ModelConfig, CapturedModel]:
    config = resolve_model(name)

    def make():
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**to_hf_config_dict(config)))

    inputs = [CapturedInput(name=key, shape=(MICRO_BATCH, SEQ_LEN), dtype="int64") for key in ("input_ids", "labels")]
    return config, capture_module(make, inputs)


def both(name: str) -> list[tuple[Unit, Unit]]:
    graphs = (build_graph(model, Batch(MICRO_BATCH, SEQ_LEN)) for model in capture(name))
    return list(zip(*map(units, graphs), strict=True))


@pytest.mark.part(4)
@pytest.mark.parametrize("name", NAMES)
def test_units_parameters_and_flop_are_equal(name: str) -> None:
    owners = {mine.name: theirs.name for mine, theirs in both(name)}
    for mine, theirs in both(name):
        assert sorted((spec.name, spec.shape) for spec in mine.parameters) == sorted(
            (spec.name, spec.shape) for spec in theirs.parameters
        )
        assert [owners[shared] for shared in mine.shared_units] == list(theirs.shared_units)
        for attribute in ("forward", "backward", "recompute"):
            assert flop(getattr(mine, attribute)) == flop(getattr(theirs, attribute))
        assert bool(mine.recompute) == bool(theirs.recompute)


@pytest.mark.part(4)
@pytest.mark.parametrize("name", NAMES)
def test_saved_bytes_are_equal(name: str) -> None:
    """But for rotary frequencies, which the capture counts as what they are, buffers."""
    for mine, theirs in both(name):
        assert theirs.saved_bytes == pytest.approx(mine.saved_bytes, rel=2.5e-3)
        assert theirs.activation_output_bytes == mine.activation_output_bytes


@pytest.mark.part(3)
@pytest.mark.parametrize("name", NAMES)
def test_recomputed_layers_hold_their_input_as_long(name: str) -> None:
    """An RMS norm keeps a float32 copy, beside which it stays until the backward; others keep it itself."""
    for mine, captured in both(name):
        if mine.is_first and mine.in_layer:
            assert captured.operators[0].copies_input == mine.operators[0].copies_input, mine.name


@pytest.mark.parametrize("name", NAMES)
def test_layers_move_the_same_bytes(name: str) -> None:
    """Captured layers also turn rotary factors and masks; a bank of experts sorts a few indices more."""
    for mine, theirs in both(name)[1:-1]:
        assert elementwise_bytes(theirs.forward) == pytest.approx(elementwise_bytes(mine.forward), rel=6e-3)
        assert elementwise_bytes(theirs.recompute) == pytest.approx(elementwise_bytes(mine.recompute), rel=6e-3)
        assert elementwise_bytes(theirs.backward) == pytest.approx(elementwise_bytes(mine.backward), rel=2.5e-2)
        products = [[k for k in unit.forward if not isinstance(k, Elementwise)] for unit in (mine, theirs)]
        assert sorted(map(shape, products[0])) == sorted(map(shape, products[1]))


def shape(kernel) -> tuple[int, ...]:
    return (kernel.m, kernel.n, kernel.k) if isinstance(kernel, Gemm) else (kernel.batch, kernel.num_heads)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("engine", ["gpu-only", "zero-offload"])
def test_predicted_iterations_agree(name: str, engine: str) -> None:
    hardware = load_profile("h100x4-80g")

    def iteration_s(model: Model) -> float:
        request = Request(model, hardware, num_devices=4, seq_len=SEQ_LEN, micro_batch=MICRO_BATCH, expert_units=1)
        rivals = variants(request)
        return best_of(best_of_engine(rival.setup, scorer_of(rival), engine) for rival in rivals).iteration_s

    analytic, captured = map(iteration_s, capture(name))
    assert captured == pytest.approx(analytic, rel=0.01)


@pytest.mark.parametrize("name", NAMES)
def test_equal_layers_are_stored_once(name: str) -> None:
    config, captured = capture(name)
    assert len(captured.segments) == config.num_layers + 2
    assert len(captured.blocks) <= 4  # the first layer makes no more than it hands on


@pytest.mark.part(2)
@pytest.mark.parametrize("name", ["llama-3-8b", "qwen3-8b"])
def test_compiled_layers_take_as_long_as_known_ones(name: str) -> None:
    """The rule for runs of captured kernels, against the table of kernel sets."""
    known, captured = (
        units(build_graph(model, Batch(MICRO_BATCH, SEQ_LEN, kernels="compiled"))) for model in capture(name)
    )
    plain = units(build_graph(capture(name)[1], Batch(MICRO_BATCH, SEQ_LEN)))
    cost = CostModel(load_profile("h200x1-16c"), known, Sharding(micro_batch=MICRO_BATCH))
    for way in ("forward", "backward", "recompute"):
        times = [sum(cost.compute_s(getattr(unit, way)) for unit in found[1:-1]) for found in (known, captured)]
        assert times[1] == pytest.approx(times[0], rel=0.05)
        for unit, before in zip(captured, plain, strict=True):
            again = 3 * unit.activation_output_bytes if way == "recompute" else 0  # the residual sum runs too
            assert elementwise_bytes(getattr(unit, way)) <= elementwise_bytes(getattr(before, way)) + again + 64
            assert unit.num_kernels[way] <= before.num_kernels[way]
            assert unit.saved_bytes <= before.saved_bytes  # less with the loss, whose probabilities come again
