"""The sizes of a decoder-only transformer that decide its time and memory."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from hwprofiles.quantity import Frozen

Family = Literal["opt", "gpt2", "llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "deepseek"]
Mlp = Literal["relu", "gelu", "gelu_new", "swiglu"]
Norm = Literal["layernorm", "rmsnorm"]
# Far beyond any model. Products of sizes stay finite, and a schedule with a unit for each layer stays small enough.
Size = Annotated[int, Field(gt=0, le=10**9, strict=True)]
Count = Annotated[int, Field(ge=0, le=10**9, strict=True)]
MAX_LAYERS = 2_000


class ModelConfigError(ValueError):
    """A description of a model that cannot be used."""


class UnknownModelError(ModelConfigError):
    """A name that is neither a packaged model nor a file."""


class NoFormulasError(ModelConfigError):
    """A configuration of an architecture that has no formulas here; PyTorch can capture it."""


class LatentAttention(Frozen):
    """Sizes of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    Attributes:
        q_lora_rank: width of the vector from which queries are made.
        kv_lora_rank: width of the vector from which keys and values are made.
        qk_rope_head_dim: how much of a head's query and key is rotated; heads share that part of the key.
        v_head_dim: width of a head's values.
    """

    q_lora_rank: Size
    kv_lora_rank: Size
    qk_rope_head_dim: Size
    v_head_dim: Size


class ModelConfig(Frozen):
    """One model, described as far as time and memory depend on it.

    Settings that only change values are left out: initialisation, rotary base and scaling. Dropout is taken as 0, and
    attention as full and causal, without sliding windows.

    Attributes:
        family: architecture of ``transformers``; decides module names and kernels.
        ffn_hidden_size: width of a dense MLP.
        mlp: activation; ``gelu`` is one kernel, ``gelu_new`` the eight of GPT-2, ``swiglu`` has a gate.
        qkv_bias, output_bias, mlp_bias: whether the projections of attention and MLP have biases.
        qk_norm: RMS norm over each head of query and key.
        word_embed_proj_dim: width of the token embedding; differs from ``hidden_size`` in opt-350m only.
        norm_before: norms come before attention and MLP; in opt-350m they come after.
        final_norm: a norm before the head.
        num_experts: experts of a layer, 0 for a dense model.
        experts_per_token: how many of them a token visits.
        expert_ffn_hidden_size: width of one expert.
        dense_layers: layers of an expert model that have a dense MLP.
        normalize_router: routing weights are scaled to sum to 1.
        shared_expert_ffn_hidden_size: width of the expert that every token visits, if there is one.
        latent: sizes of multi-head latent attention, if that is used; ``head_dim`` is a head's query and key.
    """

    name: Annotated[str, Field(min_length=1)]
    family: Family
    num_layers: Annotated[Size, Field(le=MAX_LAYERS)]
    hidden_size: Size
    ffn_hidden_size: Size
    num_attention_heads: Size
    num_key_value_heads: Size
    head_dim: Size
    vocab_size: Size
    max_positions: Size
    mlp: Mlp
    norm: Norm
    tied_embeddings: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    word_embed_proj_dim: Size
    norm_before: bool = True
    final_norm: bool = True
    num_experts: Count = 0
    experts_per_token: Count = 0
    expert_ffn_hidden_size: Count = 0
    dense_layers: tuple[Count, ...] = ()
    normalize_router: bool = True
    shared_expert_ffn_hidden_size: Size | None = None
    latent: LatentAttention | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        hidden, heads, groups = self.hidden_size, self.num_attention_heads, self.num_key_value_heads
        if hidden % heads:
            raise ValueError(
                f"hidden_size {hidden} must be divisible by num_attention_heads {heads}; change one of them"
            )
        if heads % groups:
            raise ValueError(
                f"num_attention_heads {heads} must be divisible by num_key_value_heads {groups}; change one of them"
            )
        if (self.norm == "layernorm") != (self.family in {"opt", "gpt2"}):
            raise ValueError(
                f"norm {self.norm} does not belong to {self.family}; leave it out or change the model type"
            )
        if self.family in {"opt", "gpt2"} and (self.head_dim, groups) != (hidden // heads, heads):
            raise ValueError(
                f"{self.family} has neither grouped heads nor a head_dim of its own, but num_key_value_heads is "
                f"{groups} and head_dim {self.head_dim}; leave both out"
            )
        if self.is_expert_model and not (
            0 < self.experts_per_token <= self.num_experts and self.expert_ffn_hidden_size > 0
        ):
            raise ValueError(
                f"experts_per_token {self.experts_per_token} must lie between 1 and num_experts {self.num_experts} and "
                f"expert_ffn_hidden_size {self.expert_ffn_hidden_size} be positive; correct the expert sizes"
            )
        return self

    @property
    def is_expert_model(self) -> bool:
        """Whether the architecture routes tokens to experts."""
        return self.family in {"mixtral", "qwen3_moe", "deepseek"}

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_value_size(self) -> int:
        """Width of all key (or value) heads together."""
        return self.num_key_value_heads * self.head_dim

    @property
    def is_gated(self) -> bool:
        """Whether the MLP has a gate beside its up projection."""
        return self.mlp == "swiglu"

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer's MLP is a bank of experts."""
        return self.is_expert_model and layer not in self.dense_layers
