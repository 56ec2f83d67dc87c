"""Captures of modules whose frozen weights bitsandbytes keeps quantized."""

from pathlib import Path

import bitsandbytes
import pytest
import torch
from packed_sizes import packed_bytes
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, GPT2Config, LlamaConfig, OPTConfig

from planner.models.adapters import Lora
from planner.models.captured import CapturedModel, CapturedOperator
from planner.models.kernels import Elementwise, Gemm
from planner.models.quantization import Quantization
from ullage.capture import capture, capture_module
from ullage.capture.architectures import architecture
from ullage.capture.quantized import quantize

ROWS, WIDTH, INNER = 24, 128, 192
LLAMA = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
CONFIGS = {
    "llama": LlamaConfig(**LLAMA),
    "llama-tied": LlamaConfig(**LLAMA, tie_word_embeddings=True),
    "gpt2": GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=3, n_head=2),
}


def make(quantization: Quantization, *, quantize: bool = False) -> nn.Module:
    """Return a trained projection before two quantized ones; on a device, they are quantized if asked for."""
    if quantization == "nf4":
        made = [bitsandbytes.nn.LinearNF4(*size, compute_dtype=torch.bfloat16) for size in ((WIDTH, INNER), (INNER, 8))]
    else:
        made = [
            bitsandbytes.nn.Linear8bitLt(*size, has_fp16_weights=False, threshold=6.0)
            for size in ((WIDTH, INNER), (INNER, 8))
        ]
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *made)
    for parameter in model[1:].parameters():
        parameter.requires_grad_(requires_grad=False)
    return model.bfloat16().to("cpu") if quantize else model


def captured(quantization: Quantization) -> CapturedModel:
    return capture_module(lambda: make(quantization), [f"{ROWS}x{WIDTH}"], name="own:model")


def operator(model: CapturedModel, name: str) -> CapturedOperator:
    return next(o for block in model.blocks for o in block.operators if o.name == name)


def dequantized(quantization: Quantization) -> tuple[list[Elementwise], int]:
    """Return the kernels that make a matrix of INNER x WIDTH values in bf16, and the bytes of the result and scales."""
    count = INNER * WIDTH
    if quantization == "int8":  # the values are converted, the scales divided by 127, and both multiplied in place
        return [*map(Elementwise, (3 * count, 8 * INNER, 4 * count + 4 * INNER))], 2 * count
    blocks = count // 64
    outer_bytes = 4 * -(-blocks // 256)
    decode, shift = 5 * blocks + outer_bytes + 1024, 8 * blocks + 4  # a table of 256 float32; an offset for all scales
    return [*map(Elementwise, (decode, shift, count // 2 + 4 * blocks + 2 * count))], 2 * count + 4 * blocks


@pytest.mark.parametrize("quantization", ["nf4", "int8"])
def test_a_quantized_projection_is_dequantized_before_each_product(quantization: Quantization) -> None:
    model = captured(quantization)
    found, (inside, inside_bytes) = operator(model, "1"), dequantized(quantization)
    assert found.forward == (*inside, Gemm(ROWS, INNER, WIDTH))
    assert found.backward[-len(inside) - 1 :] == (*inside, Gemm(ROWS, WIDTH, INNER))
    assert found.saved_bytes == 0  # the input is of use only for a weight that is trained
    gradients_bytes = 2 * ROWS * (INNER + WIDTH)
    assert found.workspace_bytes == pytest.approx(inside_bytes + gradients_bytes, rel=0.1)


@pytest.mark.parametrize("quantization", ["nf4", "int8"])
def test_parameters_have_the_shapes_that_they_had_and_the_bytes_that_they_take(quantization: Quantization) -> None:
    specs = {spec.name: spec for o in captured(quantization).operators() for spec in o.parameters}
    assert {name: spec.shape for name, spec in specs.items()} == {
        name: tuple(parameter.shape) for name, parameter in make(quantization).named_parameters()
    }
    assert specs["1.weight"].stored_bytes(2) == packed_bytes(quantization, (INNER, WIDTH))
    assert [name for name, spec in specs.items() if spec.is_trained] == ["0.weight", "0.bias"]


@pytest.mark.parametrize("quantization", ["nf4", "int8"])
def test_a_model_that_is_quantized_already_is_captured_alike(quantization: Quantization) -> None:
    with torch.device("cpu"):
        model = make(quantization, quantize=True)
    assert capture_module(lambda: model, [f"{ROWS}x{WIDTH}"], name="own:model") == captured(quantization)
    assert not any("forward" in vars(module) for module in model.modules())


def test_biases_that_a_quantized_layer_takes_to_the_type_of_its_input_are_no_other_data(tmp_path: Path) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = tmp_path / "config.json"
    config.write_text(OPTConfig(**sizes, word_embed_proj_dim=32, max_position_embeddings=32).to_json_string())
    inputs = architecture(str(config)).inputs(1, 16)
    model = capture(str(config), inputs, lora=Lora(rank=4), quantization="nf4")
    assert any(spec.name.endswith("k_proj.base_layer.bias") for o in model.operators() for spec in o.parameters)


def test_what_captures_leave_behind_is_real() -> None:
    captured("nf4")
    assert type(make("nf4", quantize=True)[1].weight.quant_state.state2.code) is torch.Tensor


def test_integers_that_are_no_quantized_weights_are_refused() -> None:
    def integers() -> nn.Module:
        model = nn.Linear(4, 4)
        model.bias = nn.Parameter(torch.zeros(4, dtype=torch.int8), requires_grad=False)
        return model

    with pytest.raises(ValueError, match=r"bias has type torch.int8, but must be floating-point"):
        capture_module(integers, ["2x4"])


def load(quantization: Quantization, folder: Path) -> nn.Module:
    """Return what ``from_pretrained`` makes of the weights in a folder."""
    if quantization == "nf4":
        config = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
    else:
        config = BitsAndBytesConfig(load_in_8bit=True)
    return AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, dtype=torch.bfloat16, device_map="cpu"
    )


@pytest.mark.parametrize("quantization", ["nf4", "int8"])
@pytest.mark.parametrize("family", CONFIGS)
def test_quantizing_gives_what_from_pretrained_gives(family: str, quantization: Quantization, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(CONFIGS[family], dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    expected = load(quantization, tmp_path).state_dict()
    found = quantize(model, quantization).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_model_without_memory_is_marked() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIGS["llama"])
    quantize(model, "nf4")
    quantized = {name for name, module in model.named_modules() if isinstance(module, bitsandbytes.nn.Linear4bit)}
    assert len(quantized) == 3 * 7
    assert "lm_head" not in quantized
    assert all(parameter.is_meta for parameter in model.parameters())
