"""One rank's share of a model under tensor parallelism.

[Note: Tensor parallelism] Megatron-LM (Shoeybi et al., 2019, section 3) gives each of ``t`` ranks ``1 / t`` of the
heads, of the MLP's width and of the vocabulary: a rank's share of a transformer is a transformer with fewer heads, a
narrower MLP and a shorter vocabulary. So the formulas for kernels, saved bytes and parameters are those of the
whole model, with these sizes. Norms, biases behind row-parallel products and routers are not divided. All-reduces are
added in forward where rows of weights are divided, and in backward where columns are.
"""

from collections.abc import Iterable

from planner.models.config import ModelConfig, ModelConfigError
from planner.models.operators import Batch

_VOCAB_MULTIPLE = 128
DIVIDED = ("num_attention_heads", "num_key_value_heads", "ffn_hidden_size", "expert_ffn_hidden_size")
"""Sizes of a model that are divided among tensor-parallel ranks."""


def share(config: ModelConfig, batch: Batch, sizes: Iterable[str] = DIVIDED) -> ModelConfig:
    """Return the sizes of one rank's share of a model; see [Note: Tensor parallelism].

    The vocabulary is padded to a multiple of 128 rows per rank, as in Megatron, if it is divided.

    Args:
        config: the whole model.
        batch: says how many ranks share it.
        sizes: names of the sizes that are divided.

    Raises:
        ModelConfigError: something does not divide evenly.
    """
    ranks = batch.tensor_parallel
    divided = [name for name in sizes if getattr(config, name) is not None]
    for name in divided:
        if getattr(config, name) % ranks:
            raise ModelConfigError(
                f"{name} of {config.name} is {getattr(config, name)}, which {ranks} tensor-parallel ranks cannot share "
                "equally; choose a tensor_parallel that divides it"
            )
    parts = {name: getattr(config, name) // ranks for name in divided}
    if ranks > 1:
        parts["vocab_size"] = padded(-(-config.vocab_size // ranks))
    # A share keeps the model's head_dim and hidden_size. As a model of its own it would be invalid: do not validate it.
    return config.model_copy(update=parts)


def padded(num_rows: int) -> int:
    """Return so many rows of a vocabulary, padded to a multiple of 128, as in Megatron."""
    return -(-num_rows // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE
