import json
from pathlib import Path

import pytest
import torch
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from planner.models import (
    ModelConfig,
    ModelConfigError,
    UnknownModelError,
    from_hf_config,
    models_with_formulas,
    num_parameters,
    parameters,
    resolve_model,
    to_hf_config_dict,
)

SMALL = {"num_hidden_layers": 3, "hidden_size": 48, "num_attention_heads": 4, "vocab_size": 64}
RMS = SMALL | {"intermediate_size": 80, "num_key_value_heads": 2, "max_position_embeddings": 32}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
OPT = SMALL | {"model_type": "opt", "ffn_dim": 96, "max_position_embeddings": 32}
SMALL_CONFIGS = {
    "opt": OPT,
    "opt-projected": OPT | {"word_embed_proj_dim": 16, "do_layer_norm_before": False},
    "opt-untied-without-bias": OPT | {"tie_word_embeddings": False, "enable_bias": False},
    "gpt2": {"model_type": "gpt2", "n_layer": 2, "n_embd": 48, "n_head": 4, "n_positions": 32, "vocab_size": 64},
    "gpt2-inner": {"model_type": "gpt2", "n_layer": 2, "n_embd": 48, "n_head": 4, "n_positions": 32, "n_inner": 99}
    | {"vocab_size": 64, "activation_function": "relu"},
    "llama": RMS | {"model_type": "llama"},
    "llama-biased": RMS | {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "head_dim": 20},
    "mistral": RMS | {"model_type": "mistral", "head_dim": 8},
    "qwen2": RMS | {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": RMS | {"model_type": "qwen3"},
    "mixtral": RMS | {"model_type": "mixtral", "num_local_experts": 4},
    "qwen3_moe": RMS | MOE | {"model_type": "qwen3_moe", "decoder_sparse_step": 2, "head_dim": 16},
    "qwen3_moe-listed": RMS | MOE | {"model_type": "qwen3_moe", "mlp_only_layers": [1]},
}


def real_parameters(fields: dict[str, object]) -> list[tuple[str, tuple[int, ...]]]:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))
    return [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]


def own_parameters(config: ModelConfig) -> list[tuple[str, tuple[int, ...]]]:
    return [(spec.name, spec.shape) for spec in parameters(config)]


@pytest.mark.parametrize("name", SMALL_CONFIGS)
def test_parameters_equal_transformers_and_the_way_back_keeps_them(name: str) -> None:
    fields = SMALL_CONFIGS[name]
    config = from_hf_config(fields, name)
    real = real_parameters(fields)
    assert own_parameters(config) == real
    assert real_parameters(to_hf_config_dict(config)) == real
    assert from_hf_config(to_hf_config_dict(config), name) == config


@pytest.mark.parametrize("name", models_with_formulas())
def test_presets_equal_transformers(name: str) -> None:
    config = resolve_model(name)
    assert own_parameters(config) == real_parameters(to_hf_config_dict(config))
    assert from_hf_config(to_hf_config_dict(config), name) == config


# Sizes of the published checkpoints, as their safetensors indices and model cards state them.
@pytest.mark.parametrize(
    ("name", "count"),
    {
        "facebook/opt-125m": 125_239_296,
        "facebook/opt-350m": 331_196_416,
        "facebook/opt-13b": 12_853_473_280,
        "openai-community/gpt2": 124_439_808,
        "gpt2-xl": 1_557_611_200,
        "llama-2-7b": 6_738_415_616,
        "meta-llama/Llama-2-70b-hf": 68_976_648_192,
        "meta-llama/Meta-Llama-3-8B": 8_030_261_248,
        "meta-llama/Llama-3.1-405B": 405_853_388_800,
        "meta-llama/Llama-3.2-1B": 1_235_814_400,
        "mistralai/Mistral-7B-v0.1": 7_241_732_096,
        "mistralai/Mistral-Nemo-Base-2407": 12_247_782_400,
        "Qwen/Qwen2.5-7B": 7_615_616_512,
        "Qwen/Qwen3-8B": 8_190_735_360,
        "qwen3-30b-a3b": 30_532_122_624,
        "mistralai/Mixtral-8x7B-v0.1": 46_702_792_704,
    }.items(),
)
def test_presets_have_the_published_size(name: str, count: int) -> None:
    assert num_parameters(resolve_model(name)) == count
    assert num_parameters(resolve_model(name.upper())) == count


def test_a_file_goes_before_a_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "opt-13b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SMALL_CONFIGS["llama"]))
    monkeypatch.chdir(tmp_path)
    for text in ("opt-13b", "opt-13b/config.json", str(folder)):
        assert resolve_model(text).family == "llama"
    monkeypatch.chdir(folder)
    for text in ("config.json", "./config.json", ".", "../opt-13b", str(folder)):
        assert resolve_model(text).name == "opt-13b"


def test_unknown_model_names_the_nearest_and_the_way_out() -> None:
    with pytest.raises(UnknownModelError, match=r"opt-13b.*path to a config\.json"):
        resolve_model("opt-13bb")
    with pytest.raises(UnknownModelError, match=r"path to a config\.json"):
        resolve_model("zzzzzzzzz")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "bert"}, r"model_type is 'bert', but sizes alone describe only opt"),
        ({"hidden_size": -4}, r"hidden_size is -4, but input should be greater than 0; correct the field"),
        ({"hidden_size": 48.5}, r"hidden_size is 48.5, but .*integer"),
        ({"vocab_size": "many"}, r"vocab_size is 'many', but .*integer"),
        ({"vocab_size": True}, r"vocab_size is True, but .*integer"),
        ({"hidden_size": 50}, r"hidden_size 50 must be divisible by num_attention_heads 4"),
        ({"num_key_value_heads": 3}, r"num_attention_heads 4 must be divisible by num_key_value_heads 3"),
        ({"num_attention_heads": 0}, r"num_attention_heads is 0"),
        ({"num_hidden_layers": None}, r"num_layers is missing; add the field num_hidden_layers or n_layer"),
        ({"intermediate_size": None}, r"ffn_hidden_size is missing; add the field intermediate_size"),
        ({"hidden_act": "relu"}, r"activation 'relu' is not supported in llama; use silu"),
        ({"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 5}, r"experts_per_token 5 must lie"),
    ],
)
def test_bad_files_are_refused_in_one_line(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMALL_CONFIGS["llama"] | change))
    with pytest.raises(ModelConfigError, match=message) as error:
        resolve_model(str(path))
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("text", ["{", "[1]", "3", "null"])
def test_files_that_are_no_objects_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ModelConfigError, match=r"give a Hugging Face config\.json"):
        resolve_model(str(path))


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 2**40)
    | st.floats()
    | st.sampled_from(["", "7", "silu"])
    | st.lists(st.integers())
)


@settings(max_examples=examples(300), deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(
            sorted(RMS | MOE | {"head_dim": 1, "mlp_only_layers": 1, "hidden_act": 1, "decoder_sparse_step": 1})
        ),
        SCALARS,
    ),
    st.data(),
)
def test_any_file_gives_a_model_or_one_line(changes: dict[str, object], data: st.DataObject) -> None:
    fields = SMALL_CONFIGS[data.draw(st.sampled_from(sorted(SMALL_CONFIGS)))] | changes
    # Counting goes layer by layer, so depth is bounded here.
    if isinstance(fields.get("num_hidden_layers"), int):
        fields["num_hidden_layers"] = min(fields["num_hidden_layers"], 9)
    try:
        config = from_hf_config(fields, "x")
    except ModelConfigError as error:
        assert "\n" not in str(error)
    else:
        assert num_parameters(config) > 0
