"""Megatron-LM's kernels, where they differ from those of ``transformers``: fused ones, dropout, accumulated gradients.

Counted in the public source of Megatron-LM v2.6 to v3.0 (``megatron/model/transformer.py``, ``fused_softmax.py``,
``fused_bias_gelu.py``, ``mpu/cross_entropy.py``, ``pretrain_gpt.py``), with its default fusions. Dropout is that of its
GPT scripts; models like Llama are trained without. Gradients stay on the device, and the lists contain the kernels that
add each micro-batch's gradients to them. In ZeRO-3, DeepSpeed takes fresh gradients and has passes of its own: then
they do not. Arguments are those of :mod:`planner.models.formulas.work`.
"""

import dataclasses
from typing import Final

from planner.graph import assemble
from planner.models import sharding
from planner.models.config import ModelConfig
from planner.models.formulas import work
from planner.models.formulas.ends import embedding_operators, head_operators
from planner.models.formulas.kernel_sets import RESIDUAL, KernelSet, Passes
from planner.models.formulas.layers import (
    has_learned_positions,
    layer_parts,
    linear,
    sum_input_gradient,
    sum_output,
)
from planner.models.kernels import Attention, Elementwise, Gemm, Kernels, Work, all_reduce, each
from planner.models.operators import Batch, Operator, by_module
from planner.models.parameters import parameters

# What ``get_batch`` (broadcast, masks, positions), ``loss_func`` and the loss scale launch for one micro-batch.
_BATCH_KERNELS = 27
_SET: Final = KernelSet(rms_norm=Passes((2,), (3, 2), 1, 2))


def build_graph(config: ModelConfig, batch: Batch, *, adds_gradients: bool = True) -> tuple[Operator, ...]:
    """Return the operators of one forward in Megatron-LM; see :func:`planner.graph.build_graph`.

    Args:
        config: the model.
        batch: the batch.
        adds_gradients: whether backward adds gradients to those of earlier micro-batches in kernels of its own.

    Raises:
        ValueError: the sequence is longer than a learned position embedding, or ranks cannot share the model.
    """
    own = share(config, batch)
    layers = _Layers(own, config, batch, adds_gradients)
    return assemble(own, batch, layers.first(), layers.parts, layers.last())


def share(config: ModelConfig, batch: Batch) -> ModelConfig:
    """Return one rank's share of a model; the vocabulary is padded if there is one rank, too.

    Raises:
        ModelConfigError: something does not divide evenly.
    """
    own = sharding.share(config, batch)
    return own.model_copy(update={"vocab_size": sharding.padded(own.vocab_size)})


class _Layers:
    """The operators of one rank: those of ``transformers``, with other kernels where Megatron-LM has its own."""

    def __init__(self, config: ModelConfig, whole: ModelConfig, batch: Batch, adds_gradients: bool) -> None:
        self._config = config
        self._whole = whole
        self._batch = batch
        self._adds_gradients = adds_gradients
        self._drops = has_learned_positions(config)
        self._owned = by_module(parameters(config))

    def first(self) -> list[Operator]:
        """Return the operators before the layers."""
        config, batch, e = self._config, self._batch, self._batch.dtype_bytes
        alone = dataclasses.replace(batch, tensor_parallel=1)  # what ranks add is added below
        look_up, *others = embedding_operators(config, alone, self._owned)
        width = config.word_embed_proj_dim
        effort = look_up + sum_output(batch, width) + self._accumulate(config.vocab_size * width)
        effort += embedding(batch.num_tokens, width, e, dropout=self._drops)
        return [look_up.doing(effort), *others]

    def last(self) -> list[Operator]:
        """Return the operators behind the layers."""
        config, batch = self._config, self._batch
        operators = head_operators(config, batch, self._owned)
        losses = loss(batch.num_tokens, config.vocab_size, batch.dtype_bytes, batch.tensor_parallel)
        own = {"norm": self._norm(), "loss": losses}
        return [made.doing(own[made.kind]) if made.kind in own else made for made in operators]

    def parts(self, layer: int) -> tuple[Operator, ...]:
        """Return the operators of a layer. Reentrant checkpoints run its whole forward again."""
        parts = layer_parts(self._config, self._whole, self._batch, layer)
        return tuple(dataclasses.replace(part.doing(self._work(part)), num_skipped=0) for part in parts)

    def _work(self, part: Operator) -> Work:
        config, ffn = self._config, self._config.ffn_hidden_size
        if part.kind == "attention":
            return part if self._batch.flash_attention else self._attention()
        if part.kind == "up":
            one = self._accumulate(config.hidden_size * ffn, *((ffn,) if config.mlp_bias else ()))
            return part + one + one if config.is_gated else part + one
        others = {
            "norm": self._norm(),
            "qkv": self._joint(),
            "output": self._row(config.query_size, bias=config.output_bias),
            "down": self._row(ffn, bias=config.mlp_bias),
        }
        return others.get(part.kind, part)

    def _joint(self) -> Work:
        """Return one product that makes queries, keys and values."""
        config, batch, hidden = self._config, self._batch, self._config.hidden_size
        outputs = config.query_size + 2 * config.key_value_size
        joint = sum_input_gradient(batch, hidden) + self._linear(hidden, outputs, bias=config.qkv_bias)
        value_bytes = batch.num_tokens * batch.dtype_bytes
        return work.with_memory(joint, hidden * value_bytes, (outputs + hidden) * value_bytes)

    def _norm(self) -> Work:
        config, rows, e = self._config, self._batch.num_tokens, self._batch.dtype_bytes
        hidden = config.hidden_size
        made = work.layer_norm(rows, hidden, e) if config.norm == "layernorm" else _SET.norm(rows, hidden, e)
        return made + self._accumulate(hidden, hidden)

    def _attention(self) -> Work:
        config, batch, rows = self._config, self._batch, self._batch.num_tokens
        query, key, e = rows * config.query_size, rows * config.key_value_size, batch.dtype_bytes
        core = Attention(batch.micro_batch, config.num_attention_heads, batch.seq_len, config.head_dim)
        attend = attention(core, query, key, e, dropout=self._drops)
        return attend if self._drops else _SET.turn(query, key, e) + attend

    def _linear(self, inputs: int, outputs: int, *, bias: bool) -> Work:
        added = self._accumulate(inputs * outputs, *((outputs,) if bias else ()))
        return linear(self._batch, inputs, outputs, bias=bias) + added

    def _row(self, inputs: int, *, bias: bool) -> Work:
        """Return a row-parallel product, the sum of ranks' outputs, and the residual sum, which adds the bias."""
        rows, hidden, e = self._batch.num_tokens, self._config.hidden_size, self._batch.dtype_bytes
        residual = bias_dropout_add(rows, hidden, e) if self._drops else RESIDUAL.work(rows * hidden, e)
        return self._linear(inputs, hidden, bias=bias) + sum_output(self._batch, hidden) + residual

    def _accumulate(self, *sizes: int) -> Work:
        """Return the addition of fresh gradients to those of earlier micro-batches, one kernel per parameter tensor."""
        e = self._batch.dtype_bytes
        return Work((), tuple(kernel for size in sizes for kernel in each(size, 3 * e)) if self._adds_gradients else ())


def attention(core: Attention, query_elements: int, key_value_elements: int, e: int, *, dropout: bool) -> Work:
    """Return attention with a fused scaled, masked softmax, perhaps dropout on its output, and a copy of the context.

    The causal kernel reads the lower triangle only (``scaled_upper_triang_masked_softmax``). Saved: query, key, value,
    probabilities before and after dropout, its mask, and the context.
    """
    heads, seq_len, head_dim = core.batch * core.num_heads, core.seq_len, core.head_dim
    n = heads * seq_len**2
    scores = Gemm(seq_len, seq_len, head_dim, heads, batched=True)
    values = Gemm(seq_len, head_dim, seq_len, heads, batched=True)
    drop = [2 * e + 1] if dropout else []
    # Shared keys and values are repeated for every query head.
    groups = query_elements // key_value_elements
    repeat = each(key_value_elements, (1 + groups) * e, (1 + groups) * e) if groups > 1 else ()
    forward: Kernels = (*repeat, scores, *each(n, 1.5 * e, *drop), values, *each(query_elements, 2 * e))
    backward: Kernels = (
        scores,  # of the probabilities
        values,  # of the values
        *each(n, *drop, 2 * e),  # dropout; softmax, which reads two triangles and writes a square
        values,  # of the query
        values,  # of the key
        *repeat,
        *each(query_elements + 2 * key_value_elements, 2 * e),  # joined for the projection
    )
    saved_bytes = 2 * (query_elements + key_value_elements * groups) * e + n * (2 * e + 1 if dropout else e)
    return Work(forward, backward, saved_bytes, 2 * n * e)


def bias_dropout_add(rows: int, hidden: int, e: int) -> Work:
    """Return ``x + dropout(f(x) + bias)``, one fused kernel, and in backward dropout and the sum of two gradients."""
    n = rows * hidden
    return Work(each(n, 3 * e + 1), each(n, 2 * e + 1, 3 * e), n)


def embedding(rows: int, hidden: int, e: int, *, dropout: bool) -> Work:
    """Return the dropout after the look-up, and before it the kernels that a micro-batch launches outside the model."""
    n = rows * hidden if dropout else 0
    drop = each(n, 2 * e + 1) if dropout else ()
    return Work((Elementwise(8 * rows, _BATCH_KERNELS), *drop), drop, n)


def loss(rows: int, vocab: int, e: int, num_ranks: int) -> Work:
    """Return vocabulary-parallel cross-entropy in fp32: maximum, difference, exponential, sum, quotient.

    Three small all-reduces join the ranks' shares: the maximum, the target's logit and the sum. The probabilities are
    saved; backward subtracts the target in place, scales and casts. While the difference is computed, the logits live
    in the training data type, in fp32, and as that difference.
    """
    n = rows * vocab
    forward = (*each(n, e + 4, 4, 8, 8, 4, 8), *all_reduce(4 * rows, num_ranks, 3))
    return Work(forward, each(n, 8, 4 + e), 4 * n + 8 * rows, n * (4 + e))
