"""Scans over tokens are assumed to be kernels of other packages, where `transformers` calls those; stand-ins fit."""

import importlib
import json

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from planner.models.captured import CapturedModel
from planner.models.kernels import flop
from ullage.capture import capture, capture_module
from ullage.capture.architectures import architecture
from ullage.capture.records import CaptureError
from ullage.capture.scans import check_scans, fused_scans

TOKENS = 128
SMALL = {"num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 128}
HEADS = SMALL | {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
MAMBA = SMALL | {"model_type": "mamba", "state_size": 16}
MODELS = {
    "mamba": (MAMBA, ("mamba_ssm",)),
    "mamba2": (
        SMALL | {"model_type": "mamba2", "state_size": 32, "head_dim": 16, "num_heads": 8, "n_groups": 2},
        ("mamba_ssm",),
    ),
    "lfm2": (HEADS | {"model_type": "lfm2", "layer_types": ["conv", "full_attention"]}, ("causal_conv1d",)),
    "olmo-hybrid": (
        HEADS | {"model_type": "olmo_hybrid", "pad_token_id": 0, "eos_token_id": 1, "num_key_value_heads": 4},
        ("causal_conv1d", "fla"),
    ),
}


def captured(tmp_path, config, *, as_on_gpu: bool = True) -> CapturedModel:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    return capture(str(path), architecture(path).inputs(2, TOKENS), "bf16", as_on_gpu=as_on_gpu)


@pytest.mark.parametrize("name", MODELS)
def test_a_plan_for_a_gpu_assumes_the_kernels_and_says_so(tmp_path, name):
    config, packages = MODELS[name]
    model = captured(tmp_path, config)
    assert model.scans == packages
    assert any(" and ".join(packages) in words for words in model.assumed)


def test_a_layer_of_mamba_has_the_work_and_the_memory_of_its_kernel(tmp_path):
    model = captured(tmp_path, MAMBA)
    mixer = next(o for o in model.operators() if o.kind == "MambaMixer")
    hidden, wide, states, rank = 64, 128, 16, 4
    products = wide * (rank + 2 * states) + rank * wide + wide * hidden  # the first projection is an operator itself
    assert flop(mixer.forward) == 2 * (2 * TOKENS) * products
    again = rank * wide  # steps are not kept
    assert flop(mixer.backward) == 2 * (2 * TOKENS) * (2 * products + again)
    # The first projection's output, the output before the gate, and the small projection; in bf16.
    kept = 2 * (2 * TOKENS) * (2 * wide + wide + (rank + 2 * states))
    of_states = 4 * 2 * wide * 2 * states  # at the end of each part of 2048 tokens
    assert mixer.saved_bytes == pytest.approx(kept + of_states, rel=0.1)


def test_elsewhere_it_is_as_the_model_has_it(tmp_path, monkeypatch):
    assert captured(tmp_path, MODELS["lfm2"][0], as_on_gpu=False).scans is None
    own = AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODELS["lfm2"][0]))
    with fused_scans(own, assumed=False) as called:
        own(input_ids=torch.zeros(1, 8, dtype=torch.int64))
    assert not called, "a user's own model runs what is installed"
    (tmp_path / "causal_conv1d").mkdir()
    (tmp_path / "causal_conv1d" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    inputs = f"input_ids=2x{TOKENS}:int64", f"labels=2x{TOKENS}:int64"
    given = capture_module(own, inputs, "fp32")
    assert given.scans is None, "nothing is assumed"
    convolved = next(o for o in given.operators() if o.kind == "Lfm2ShortConv")
    assert not flop(convolved.forward), "a convolution moves bytes; without the package, it is a product"


def test_execution_names_the_packages_that_are_missing(tmp_path, monkeypatch):
    (tmp_path / "fla").mkdir()
    (tmp_path / "fla" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    check_scans(("fla",))
    with pytest.raises(CaptureError, match="pip install causal-conv1d mamba-ssm"):
        check_scans(("causal_conv1d", "fla", "mamba_ssm"))


def values(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


# Functions of `transformers` with arguments: a convolution, scans of both kinds, and delta rules.
CALLS = {
    ("mamba", "causal_conv1d_fn"): lambda: ((values(2, 8, 70), values(8, 4), values(8)), {"activation": "silu"}),
    ("mamba", "mamba_selective_scan"): lambda: (
        (values(2, 8, 70), values(2, 8, 70), values(8, 4), values(2, 4, 70), values(2, 4, 70), values(8)),
        {"z": values(2, 8, 70), "delta_bias": values(8), "return_last_state": True},
    ),
    ("mamba2", "mamba2_chunk_scan"): lambda: (
        (values(2, 70, 4, 8), values(2, 70, 4), values(4), values(2, 70, 2, 16), values(2, 70, 2, 16)),
        {"chunk_size": 32, "D": values(4), "dt_bias": values(4), "return_final_states": True},
    ),
    ("qwen3_next", "torch_chunk_gated_delta_rule"): lambda: (
        (values(2, 70, 2, 8), values(2, 70, 2, 8), values(2, 70, 4, 16), values(2, 70, 4), values(2, 70, 4)),
        {"output_final_state": True, "use_qk_l2norm_in_kernel": True},
    ),
    ("kimi_linear", "chunk_kimi_delta_attention"): lambda: (
        (values(2, 70, 4, 8), values(2, 70, 4, 8), values(2, 70, 4, 16), values(2, 70, 4, 8), values(2, 70, 4)),
        {"output_final_state": True},
    ),
}


@pytest.mark.parametrize(("family", "name"), CALLS)
def test_a_stand_in_takes_and_returns_what_the_function_does(family, name):
    modelling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    own = getattr(modelling, name)
    config = MODELS[family][0] if family in MODELS else MAMBA
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    type(model).__module__, before = modelling.__name__, type(model).__module__
    args, named = CALLS[family, name]()
    try:
        with fused_scans(model, assumed=True) as called:
            found = getattr(modelling, name)(*args, **named)
    finally:
        type(model).__module__ = before
    assert called
    assert getattr(modelling, name) is own
    expected = own(*args, **named)
    as_tuples = [each if isinstance(each, tuple) else (each,) for each in (found, expected)]
    assert [each.shape for each in as_tuples[0]] == [each.shape for each in as_tuples[1]]
    as_tuples[0][0].sum().backward()
    given = [each for each in (*args, *named.values()) if isinstance(each, Tensor)]
    assert all(each.grad is not None and each.grad.shape == each.shape for each in given)
