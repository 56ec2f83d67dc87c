"""The parameters of a model, named and ordered as ``transformers`` does."""

import dataclasses
import functools
import math
from typing import Literal

from planner.models.config import LatentAttention, ModelConfig

FrozenFormat = Literal["plain"] | int
"""How a frozen weight is kept and moved: ``plain`` in the type of the weights, or in so many bytes of its own form."""

_ROOTS = {"opt": "model.decoder", "gpt2": "transformer"}


@dataclasses.dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One parameter: its name in ``named_parameters()`` and its shape.

    Attributes:
        frozen: how it is kept if it is frozen; ``None`` if it is trained. What is frozen has no gradient, no master
            copy, no optimizer state and no update.
        whole_shape: the shape of the parameter of which tensor-parallel ranks have parts; ``None`` if it is not
            divided.
    """

    name: str
    shape: tuple[int, ...]
    frozen: FrozenFormat | None = None
    whole_shape: tuple[int, ...] | None = None

    @property
    def num_params(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def is_trained(self) -> bool:
        """Whether it is trained."""
        return self.frozen is None

    def stored_bytes(self, weight_bytes: int) -> int:
        """Return the bytes that its weights take where they are kept, and when they move.

        Args:
            weight_bytes: bytes of one value in the type of the weights.
        """
        return self.frozen if isinstance(self.frozen, int) else weight_bytes * self.num_params


def root(config: ModelConfig) -> str:
    """Return the path of the module that holds embedding, layers and final norm."""
    return _ROOTS.get(config.family, "model")


def layer_path(config: ModelConfig, layer: int) -> str:
    """Return the path of a decoder layer, such as ``model.layers.3``."""
    return f"{root(config)}.{'h' if config.family == 'gpt2' else 'layers'}.{layer}"


def parameters(config: ModelConfig) -> tuple[ParameterSpec, ...]:
    """Return all parameters in the order of ``named_parameters()``; tied ones once, under the embedding's name."""
    prefix = root(config)
    before, after = _outside_layers(config)
    specs = [ParameterSpec(f"{prefix}.{name}", shape) for name, shape in before]
    for layer in range(config.num_layers):
        path = layer_path(config, layer)
        specs += [ParameterSpec(f"{path}.{name}", shape) for name, shape in layer_shapes(config, layer)]
    specs += [ParameterSpec(f"{prefix}.{name}", shape) for name, shape in after]
    if not config.tied_embeddings:
        specs.append(ParameterSpec("lm_head.weight", (config.vocab_size, config.word_embed_proj_dim)))
    return tuple(specs)


def num_parameters(config: ModelConfig) -> int:
    """Return the number of parameters, tied ones counted once."""
    return sum(spec.num_params for spec in parameters(config))


Shapes = tuple[tuple[str, tuple[int, ...]], ...]


def layer_shapes(config: ModelConfig, layer: int) -> Shapes:
    """Return names within the layer and shapes of its parameters, in the order of ``named_parameters()``."""
    return _layer_shapes(config, config.has_experts(layer))


@functools.lru_cache(maxsize=64)
def _layer_shapes(config: ModelConfig, experts: bool) -> Shapes:
    if config.family == "opt":
        return _opt_layer(config)
    if config.family == "gpt2":
        return _gpt2_layer(config)
    hidden, query, key = config.hidden_size, config.query_size, config.key_value_size
    shapes = (
        _latent_attention(config, config.latent)
        if config.latent
        else [
            *_linear("self_attn.q_proj", query, hidden, bias=config.qkv_bias),
            *_linear("self_attn.k_proj", key, hidden, bias=config.qkv_bias),
            *_linear("self_attn.v_proj", key, hidden, bias=config.qkv_bias),
            *_linear("self_attn.o_proj", hidden, query, bias=config.output_bias),
        ]
    )
    if config.qk_norm:
        shapes += [(f"self_attn.{side}_norm.weight", (config.head_dim,)) for side in "qk"]
    shapes += _expert_shapes(config) if experts else _gated_mlp(config, "mlp", config.ffn_hidden_size)
    shapes += [("input_layernorm.weight", (hidden,)), ("post_attention_layernorm.weight", (hidden,))]
    return tuple(shapes)


def _outside_layers(config: ModelConfig) -> tuple[Shapes, Shapes]:
    hidden, width = config.hidden_size, config.word_embed_proj_dim
    if config.family == "gpt2":
        embeddings = (("wte.weight", (config.vocab_size, hidden)), ("wpe.weight", (config.max_positions, hidden)))
        return embeddings, _norm("ln_f", hidden)
    embedding = ("embed_tokens.weight", (config.vocab_size, width))
    if config.family != "opt":
        return (embedding,), (("norm.weight", (hidden,)),)
    # OPT numbers its positions from 2.
    shapes: list[tuple[str, tuple[int, ...]]] = [
        embedding,
        ("embed_positions.weight", (config.max_positions + 2, hidden)),
    ]
    if width != hidden:
        shapes += [("project_out.weight", (width, hidden)), ("project_in.weight", (hidden, width))]
    if config.final_norm:
        shapes += _norm("final_layer_norm", hidden)
    return tuple(shapes), ()


def _opt_layer(config: ModelConfig) -> Shapes:
    hidden, ffn = config.hidden_size, config.ffn_hidden_size
    query, key = config.query_size, config.key_value_size
    return (
        *_linear("self_attn.k_proj", key, hidden, bias=config.qkv_bias),
        *_linear("self_attn.v_proj", key, hidden, bias=config.qkv_bias),
        *_linear("self_attn.q_proj", query, hidden, bias=config.qkv_bias),
        *_linear("self_attn.out_proj", hidden, query, bias=config.qkv_bias),
        *_norm("self_attn_layer_norm", hidden),
        *_linear("fc1", ffn, hidden, bias=config.mlp_bias),
        *_linear("fc2", hidden, ffn, bias=config.mlp_bias),
        *_norm("final_layer_norm", hidden),
    )


def _gpt2_layer(config: ModelConfig) -> Shapes:
    hidden, ffn = config.hidden_size, config.ffn_hidden_size
    query, key = config.query_size, config.key_value_size
    # Conv1D stores its weight as (inputs, outputs).
    return (
        *_norm("ln_1", hidden),
        *_linear("attn.c_attn", hidden, query + 2 * key, bias=False),
        ("attn.c_attn.bias", (query + 2 * key,)),
        *_linear("attn.c_proj", query, hidden, bias=False),
        ("attn.c_proj.bias", (hidden,)),
        *_norm("ln_2", hidden),
        *_linear("mlp.c_fc", hidden, ffn, bias=False),
        ("mlp.c_fc.bias", (ffn,)),
        *_linear("mlp.c_proj", ffn, hidden, bias=False),
        ("mlp.c_proj.bias", (hidden,)),
    )


def _gated_mlp(config: ModelConfig, path: str, ffn: int) -> Shapes:
    hidden = config.hidden_size
    return (
        *_linear(f"{path}.gate_proj", ffn, hidden, bias=config.mlp_bias),
        *_linear(f"{path}.up_proj", ffn, hidden, bias=config.mlp_bias),
        *_linear(f"{path}.down_proj", hidden, ffn, bias=config.mlp_bias),
    )


def _latent_attention(config: ModelConfig, latent: LatentAttention) -> list[tuple[str, tuple[int, ...]]]:
    hidden, heads, turned = config.hidden_size, config.num_attention_heads, latent.qk_rope_head_dim
    keys = heads * (config.head_dim - turned + latent.v_head_dim)
    return [
        ("self_attn.q_a_proj.weight", (latent.q_lora_rank, hidden)),
        ("self_attn.q_a_layernorm.weight", (latent.q_lora_rank,)),
        ("self_attn.q_b_proj.weight", (config.query_size, latent.q_lora_rank)),
        ("self_attn.kv_a_proj_with_mqa.weight", (latent.kv_lora_rank + turned, hidden)),
        ("self_attn.kv_a_layernorm.weight", (latent.kv_lora_rank,)),
        ("self_attn.kv_b_proj.weight", (keys, latent.kv_lora_rank)),
        ("self_attn.o_proj.weight", (hidden, heads * latent.v_head_dim)),
    ]


def _expert_shapes(config: ModelConfig) -> Shapes:
    num, hidden, ffn = config.num_experts, config.hidden_size, config.expert_ffn_hidden_size
    router = ("mlp.gate.weight", (num, hidden))
    bank = (("mlp.experts.gate_up_proj", (num, 2 * ffn, hidden)), ("mlp.experts.down_proj", (num, hidden, ffn)))
    shared = _gated_mlp(config, "mlp.shared_experts", width) if (width := config.shared_expert_ffn_hidden_size) else ()
    return (router, *bank) if config.family == "mixtral" else (*bank, router, *shared)


def _linear(name: str, rows: int, columns: int, *, bias: bool) -> Shapes:
    weight = (f"{name}.weight", (rows, columns))
    return (weight, (f"{name}.bias", (rows,))) if bias else (weight,)


def _norm(name: str, width: int) -> Shapes:
    return (f"{name}.weight", (width,)), (f"{name}.bias", (width,))
