"""Layers that LLMQ runs, in kernels of its own between the products of cuBLAS and the attention of cuDNN.

Counted in its source (github.com/IST-DASLab/llmq, ``src/models/llama_model.cpp`` and ``llama_run_state.cpp``). Queries,
keys and values are one product, gate and up another. A norm's kernel makes the residual sum before it, backward too.
The head takes tokens in chunks; one kernel reads their logits and writes the gradients in their place. The gradients of
micro-batches are added up in products.

In fp8, each product has one cast of its input, whose largest value the kernel before has found; of attention's output a
pass finds it. Weights are cast once a step. Backward casts the gradient of the output, and transposes all three
matrices, because products read rows.
"""

import dataclasses
from collections.abc import Collection
from typing import Final, Literal

from planner.graph import assemble
from planner.models.config import ModelConfig, ModelConfigError
from planner.models.formulas import work
from planner.models.formulas.ends import embedding_operators, head_operators
from planner.models.formulas.layers import attend, layer_parts
from planner.models.kernels import Gemm, Kernels, Work, each
from planner.models.operators import Batch, Operator, by_module
from planner.models.parameters import parameters

Remade = Literal["norms", "swiglu", "ffn"]
"""What backward makes again instead of reading it: norms, SwiGLU, or both beside the product before it."""

# Values read and written for each value of the result.
_NORM, _NORM_BACK, _NORM_AGAIN = 4, 4, 2  # with the residual sum: two terms, their sum and the result
_ROTARY = 2
_SWIGLU, _SWIGLU_BACK = 3, 5
_CHUNKS: Final = 16
# What of a layer recomputation leaves out: nothing reads the last product's output.
_SKIPPED = frozenset({"down"})


def build_graph(config: ModelConfig, batch: Batch, remade: Collection[Remade] = ()) -> tuple[Operator, ...]:
    """Return the operators of one forward; see :func:`planner.graph.build_graph`.

    Args:
        config: sizes of the model.
        batch: the batch. Its kernels do not count.
        remade: what backward makes again, layer by layer.

    Raises:
        ModelConfigError: the model is none of Llama's kind.
    """
    if config.mlp != "swiglu" or config.qk_norm or config.is_expert_model or batch.tensor_parallel > 1:
        raise ModelConfigError(
            f"its layers are known of models with RMS norms, SwiGLU and no experts, not of {config.name}; state a "
            "model like Llama, without tensor parallelism"
        )
    batch = dataclasses.replace(batch, kernels="transformers", loss_tile_tokens=None, layer_tile_tokens=None)
    plain = dataclasses.replace(batch, fp8_products=None)
    owned = by_module(parameters(config))
    last = [_at_end(config, batch, operator) for operator in head_operators(config, plain, owned)]
    first = embedding_operators(config, plain, owned)
    return assemble(config, batch, first, lambda layer: _parts(config, batch, layer, remade), last)


def _parts(config: ModelConfig, batch: Batch, layer: int, remade: Collection[Remade]) -> tuple[Operator, ...]:
    rows, hidden, ffn, e = batch.num_tokens, config.hidden_size, config.ffn_hidden_size, batch.dtype_bytes
    query, joint = config.query_size, config.query_size + 2 * config.key_value_size
    narrow, drops = (
        batch.fp8_products is not None,
        frozenset(remade) | {"norms", "swiglu"} if "ffn" in remade else (frozenset(remade)),
    )
    kept = 1 if narrow else e  # of a product's input

    def norm(*, again: bool) -> Work:
        saved_bytes = rows * hidden * (e + (0 if again else kept)) + 4 * rows  # the sum, and the product's input
        remaking = each(rows * hidden, _NORM_AGAIN * e) if again else ()
        back = (*remaking, *each(rows * hidden, _NORM_BACK * e))
        return Work(each(rows * hidden, _NORM * e), back, saved_bytes, 2 * rows * hidden * e)

    up = _product(batch, hidden, 2 * ffn, reuses="norms" not in drops)
    up = work.with_memory(up, 0 if "ffn" in drops else 2 * rows * ffn * e, rows * (ffn + 2 * hidden) * e)
    if "ffn" in drops:
        up = dataclasses.replace(up, backward=up.forward + up.backward)
    remaking = each(rows * ffn, _SWIGLU * e) if "swiglu" in drops else ()
    swiglu = Work(
        each(rows * ffn, _SWIGLU * e),
        (*remaking, *each(rows * ffn, _SWIGLU_BACK * e)),
        0 if "swiglu" in drops else kept * rows * ffn,
        3 * rows * ffn * e,
    )
    qkv = _product(batch, hidden, joint, bias=config.qkv_bias, reuses="norms" not in drops)
    turned = each(rows * (query + config.key_value_size), _ROTARY * e)
    core = Work(turned, turned) + attend(config, batch)
    found = each(rows * query, e) if narrow else ()  # the largest value of attention's output
    own = {
        "norm": norm(again="norms" in drops),
        "qkv": work.with_memory(qkv, 0, rows * (joint + hidden) * e),
        "attention": core,
        "output": Work(found) + _product(batch, query, hidden, reuses=False),
        "up": up,
        "activation": swiglu,
        "down": _product(batch, ffn, hidden),
    }
    return tuple(
        dataclasses.replace(
            part.doing(own[part.kind]), num_skipped=len(own[part.kind].forward) if part.kind in _SKIPPED else 0
        )
        for part in layer_parts(config, config, dataclasses.replace(batch, fp8_products=None), layer)
    )


def _product(batch: Batch, inputs: int, outputs: int, *, bias: bool = False, reuses: bool = True) -> Work:
    """Return a projection; in fp8, backward ``reuses`` the cast of its input or makes it again."""
    rows, e = batch.num_tokens, batch.dtype_bytes
    if batch.fp8_products is None:
        return work.linear(rows, inputs, outputs, e, bias=bias)
    x, w, y = rows * inputs, inputs * outputs, rows * outputs
    to_bias: Kernels = each(y, 1) if bias else ()
    backward = (
        *each(y, e + 1),  # the cast of the output's gradient
        *each(w, 2),
        Gemm(rows, inputs, outputs, fp8=True),
        *each(x, 2 if reuses else e + 1),
        *each(y, 2),
        Gemm(outputs, inputs, rows, fp8=True),
        *to_bias,
    )
    return Work((*each(x, e + 1), Gemm(rows, outputs, inputs, fp8=True)), backward, 0, e * x + w + x + 2 * y)


def _at_end(config: ModelConfig, batch: Batch, operator: Operator) -> Operator:
    rows, hidden, vocab, e = batch.num_tokens, config.hidden_size, config.vocab_size, batch.dtype_bytes
    tile_bytes = -(-rows // _CHUNKS) * vocab * e
    head = work.linear(rows, hidden, vocab, e, bias=False)
    own: dict[str, Work] = {
        "norm": Work(
            each(rows * hidden, _NORM * e), each(rows * hidden, e, _NORM_BACK * e), 2 * rows * hidden * e + 4 * rows
        ),
        "head": dataclasses.replace(head, workspace_bytes=tile_bytes + rows * hidden * e),
        "loss": Work(each(rows * vocab, 2 * e)),
    }
    return operator.doing(own[operator.kind])
