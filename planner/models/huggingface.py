"""Hugging Face ``config.json`` to :class:`ModelConfig` and back."""

from collections.abc import Mapping
from typing import Any, TypeGuard, get_args

from pydantic import ValidationError

from planner.models.config import Family, ModelConfig, ModelConfigError, NoFormulasError

# The names of our fields in configuration files; the first one that is present counts.
_ALIASES: dict[str, tuple[str, ...]] = {
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "ffn_hidden_size": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "num_attention_heads": ("num_attention_heads", "n_head", "num_heads"),
    "num_key_value_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "vocab_size": ("vocab_size",),
    "max_positions": ("max_position_embeddings", "n_positions"),
    "mlp": ("hidden_act", "activation_function", "mlp"),
    "tied_embeddings": ("tie_word_embeddings", "tied_embeddings"),
    "word_embed_proj_dim": ("word_embed_proj_dim",),
    "norm_before": ("do_layer_norm_before",),
    "mlp_bias": ("mlp_bias",),
    "num_experts": ("num_local_experts", "num_experts"),
    "experts_per_token": ("num_experts_per_tok",),
    "expert_ffn_hidden_size": ("moe_intermediate_size",),
    "normalize_router": ("norm_topk_prob",),
}
_REQUIRED = ("num_layers", "hidden_size", "num_attention_heads", "vocab_size", "max_positions")
_RMS = {"norm": "rmsnorm", "mlp": "silu", "tied_embeddings": False}
# Defaults of the configuration classes of transformers.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "opt": {"norm": "layernorm", "mlp": "relu", "tied_embeddings": True},
    "gpt2": {"norm": "layernorm", "mlp": "gelu_new", "tied_embeddings": True},
    "llama": _RMS,
    "mistral": _RMS,
    "qwen2": _RMS | {"qkv_bias": True},
    "qwen3": _RMS | {"qk_norm": True, "head_dim": 128},
    "mixtral": _RMS | {"num_experts": 8, "experts_per_token": 2},
    "qwen3_moe": _RMS | {"qk_norm": True, "normalize_router": False},
}
_ACTIVATIONS = {"silu": "swiglu", "swiglu": "swiglu", "relu": "relu", "gelu": "gelu", "gelu_new": "gelu_new"}
_ARCHITECTURES = {
    "opt": "OPTForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
# Settings that change parameters or kernels in a way that ModelConfig cannot describe.
_UNSUPPORTED = {"layer_norm_elementwise_affine": False, "add_cross_attention": True}


def from_hf_config(data: Mapping[str, Any], name: str) -> ModelConfig:
    """Return the model that a Hugging Face configuration describes.

    Args:
        data: the object in ``config.json``.
        name: what to call the model; also named in errors.

    Raises:
        NoFormulasError: another architecture.
        ModelConfigError: a missing field, or a size that breaks a rule.
    """
    family = str(data.get("model_type"))
    if family not in get_args(Family):
        raise NoFormulasError(
            f"{name}: model_type is {family!r}, but sizes alone describe only {', '.join(get_args(Family))}; plan it, "
            "which captures any other architecture of transformers"
        )
    for key, value in _UNSUPPORTED.items():
        if data.get(key) is value:
            raise NoFormulasError(f"{name}: {key} is {value}, which has no formulas; plan it, which captures it")
    return build(_DEFAULTS[family] | _known_fields(data) | _family_fields(data, family), name, family)


def build(fields: dict[str, Any], name: str, family: str) -> ModelConfig:
    """Fill in the sizes that follow from others and validate, with errors of one line."""
    if missing := [key for key in _REQUIRED if key not in fields]:
        names = " or ".join(_ALIASES[missing[0]])
        raise ModelConfigError(f"{name}: {missing[0]} is missing; add the field {names}")
    hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
    activation = str(fields["mlp"])
    if activation not in _ACTIVATIONS or (_ACTIVATIONS[activation] == "swiglu") == (family in {"opt", "gpt2"}):
        raise ModelConfigError(
            f"{name}: activation {activation!r} is not supported in {family}; use "
            f"{'relu, gelu or gelu_new' if family in {'opt', 'gpt2'} else 'silu'}"
        )
    fields["mlp"] = _ACTIVATIONS[activation]
    fields.setdefault("num_key_value_heads", heads)
    fields.setdefault("word_embed_proj_dim", hidden)
    if _is_size(hidden) and _is_size(heads):
        fields.setdefault("head_dim", max(hidden // heads, 1))
    if family == "gpt2" and _is_size(hidden):
        fields.setdefault("ffn_hidden_size", 4 * hidden)
    if family == "mixtral":
        fields["expert_ffn_hidden_size"] = fields.get("ffn_hidden_size")
    try:
        return ModelConfig(name=name, family=family, **fields)
    except ValidationError as error:
        raise ModelConfigError(f"{name}: {_one_line(error)}") from error


def _known_fields(data: Mapping[str, Any]) -> dict[str, Any]:
    fields = {}
    for field, names in _ALIASES.items():
        value = next((data[key] for key in names if data.get(key) is not None), None)
        if value is not None:
            fields[field] = value
    return fields


def _family_fields(data: Mapping[str, Any], family: str) -> dict[str, Any]:
    if family == "gpt2":
        return {"qkv_bias": True, "output_bias": True, "mlp_bias": True}
    if family == "opt":
        bias = data.get("enable_bias", True)
        final_norm = data.get("do_layer_norm_before", True) and not data.get("_remove_final_layer_norm", False)
        return {"qkv_bias": bias, "output_bias": bias, "mlp_bias": bias, "final_norm": final_norm}
    fields: dict[str, Any] = {}
    if family in {"llama", "qwen3", "qwen3_moe"}:
        fields["qkv_bias"] = fields["output_bias"] = data.get("attention_bias", False)
    if family != "llama":
        fields["mlp_bias"] = False
    if family == "mixtral":
        fields["normalize_router"] = True
    if family == "qwen3_moe":
        fields["dense_layers"] = _dense_layers(data)
    return fields


def _dense_layers(data: Mapping[str, Any]) -> tuple[int, ...]:
    step, layers = data.get("decoder_sparse_step", 1), data.get("num_hidden_layers")
    listed = data.get("mlp_only_layers") or []
    if not isinstance(listed, list) or not all(isinstance(i, int) and i >= 0 for i in listed):
        raise ModelConfigError(f"mlp_only_layers is {listed!r}, but must be a list of layer numbers; correct it")
    if not _is_size(step):
        raise ModelConfigError(f"decoder_sparse_step is {step!r}, but must be a positive integer; correct it")
    every = {i for i in range(layers) if (i + 1) % step} if _is_size(layers) and step > 1 else set()
    return tuple(sorted(every | set(listed)))


def _is_size(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _one_line(error: ValidationError) -> str:
    first = error.errors()[0]
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    field = str(first["loc"][0])
    names = " or ".join(_ALIASES.get(field, (field,)))
    if first["type"] == "missing" or first["input"] is None:
        return f"{field} is missing; add the field {names}"
    return f"{field} is {first['input']!r}, but {first['msg'].lower()}; correct the field {names}"


def to_hf_config_dict(config: ModelConfig) -> dict[str, Any]:
    """Return keyword arguments of ``transformers.AutoConfig.for_model`` that build this model.

    Dropout and the key-value cache are off: a plan describes training without either.
    """
    family = config.family
    common: dict[str, Any] = {
        "model_type": family,
        "architectures": [_ARCHITECTURES[family]],
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tied_embeddings,
        "use_cache": False,
    }
    if family == "gpt2":
        return common | {
            "n_layer": config.num_layers,
            "n_embd": config.hidden_size,
            "n_inner": config.ffn_hidden_size,
            "n_head": config.num_attention_heads,
            "n_positions": config.max_positions,
            "activation_function": config.mlp,
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        }
    common |= {
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "max_position_embeddings": config.max_positions,
        "attention_dropout": 0.0,
    }
    if family == "opt":
        return common | {
            "ffn_dim": config.ffn_hidden_size,
            "word_embed_proj_dim": config.word_embed_proj_dim,
            "do_layer_norm_before": config.norm_before,
            "_remove_final_layer_norm": config.norm_before and not config.final_norm,
            "enable_bias": config.qkv_bias,
            "activation_function": config.mlp,
            "dropout": 0.0,
        }
    return common | _rms_fields(config)


def _rms_fields(config: ModelConfig) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "intermediate_size": config.ffn_hidden_size,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
    }
    if config.family in {"llama", "qwen3", "qwen3_moe"}:
        fields["attention_bias"] = config.qkv_bias
    if config.family == "llama":
        fields["mlp_bias"] = config.mlp_bias
    if config.family in {"mistral", "mixtral"}:
        fields["sliding_window"] = None
    if config.family == "mixtral":
        fields |= {"num_local_experts": config.num_experts, "num_experts_per_tok": config.experts_per_token}
    if config.family == "qwen3_moe":
        fields |= {
            "num_experts": config.num_experts,
            "num_experts_per_tok": config.experts_per_token,
            "moe_intermediate_size": config.expert_ffn_hidden_size,
            "mlp_only_layers": list(config.dense_layers),
            "norm_topk_prob": config.normalize_router,
        }
    return fields
