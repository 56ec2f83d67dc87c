"""Layers that an engine writes itself: als244/dataflow, which streams them.

Counted in its public source (``docs/models/llama3/llama3_8b_16x4K.md``, tasks ``block_fwd``, ``block_bwd`` and
``head_loss``). The outputs of norms and of SwiGLU are not saved: backward makes them again. Residual sums, sums of
gradients and their accumulation are part of the products (``addmm``). The loss takes tiles of tokens.
"""

import dataclasses
from typing import Final

from planner.graph import assemble
from planner.models.config import ModelConfig, ModelConfigError
from planner.models.formulas import work
from planner.models.formulas.ends import embedding_operators, head_operators
from planner.models.formulas.kernel_sets import KernelSet, Passes, loss_with_gradient
from planner.models.formulas.layers import attend, layer_parts, linear
from planner.models.kernels import Work
from planner.models.operators import Batch, Operator, by_module
from planner.models.parameters import parameters

_SET: Final = KernelSet(rms_norm=Passes((2,), (2, 4), 1, 2), rotary=Passes((2,), (2,)))
_SWIGLU: Final = Passes((3,), (3, 5), 2, 1)
_LOSS_TILE_TOKENS = 4096
# Backward does not run them again: their outputs follow from what is saved.
_SKIPPED = frozenset({"activation", "down"})


def build_graph(config: ModelConfig, batch: Batch) -> tuple[Operator, ...]:
    """Return the operators of one forward; see :func:`planner.graph.build_graph`.

    Raises:
        ModelConfigError: the model is none of Llama's kind.
    """
    if config.mlp != "swiglu" or config.qk_norm or config.is_expert_model:
        raise ModelConfigError(
            f"its layers are known of models with RMS norms, SwiGLU and no experts, not of {config.name}; state a "
            "model like Llama"
        )
    owned = by_module(parameters(config))
    last = [_at_end(config, batch, operator) for operator in head_operators(config, batch, owned)]
    first = embedding_operators(config, batch, owned)
    return assemble(config, batch, first, lambda layer: _parts(config, batch, layer), last)


def _parts(config: ModelConfig, batch: Batch, layer: int) -> tuple[Operator, ...]:
    rows, hidden, ffn, e = batch.num_tokens, config.hidden_size, config.ffn_hidden_size, batch.dtype_bytes
    query, key, bias = config.query_size, config.key_value_size, config.qkv_bias
    up, value = linear(batch, hidden, ffn, bias=config.mlp_bias), linear(batch, hidden, key, bias=bias)
    joint = linear(batch, hidden, query, bias=bias) + value + value
    own = {
        "norm": _SET.norm(rows, hidden, e),
        "qkv": work.with_memory(joint, 0, rows * (query + 2 * key + hidden) * e),
        "attention": _SET.turn(rows * query, rows * key, e) + attend(config, batch),
        "output": linear(batch, query, hidden, bias=config.output_bias),
        "up": work.with_memory(up + up, 0, rows * (ffn + 2 * hidden) * e),
        "activation": _SWIGLU.work(rows * ffn, e),
        "down": linear(batch, ffn, hidden, bias=config.mlp_bias),
    }
    return tuple(
        dataclasses.replace(
            part.doing(own[part.kind]), num_skipped=len(own[part.kind].forward) if part.kind in _SKIPPED else 0
        )
        for part in layer_parts(config, config, batch, layer)
    )


def _at_end(config: ModelConfig, batch: Batch, operator: Operator) -> Operator:
    rows, hidden, vocab, e = batch.num_tokens, config.hidden_size, config.vocab_size, batch.dtype_bytes
    tile_bytes = min(rows, _LOSS_TILE_TOKENS) * vocab * e
    own: dict[str, Work] = {
        "norm": _SET.norm(rows, hidden, e, around=False),
        "head": work.with_memory(work.linear(rows, hidden, vocab, e, bias=False), 0, tile_bytes + rows * hidden * e),
        "loss": loss_with_gradient(rows, vocab, e, 1),
    }
    return operator.doing(own[operator.kind])
