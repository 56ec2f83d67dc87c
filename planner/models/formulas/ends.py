"""The operators before the first and after the last decoder layer."""

import dataclasses
import functools
from collections.abc import Iterable

from planner.models.config import ModelConfig
from planner.models.formulas import context, tiled, work
from planner.models.formulas.kernel_sets import KERNEL_SETS, kernel_set, liger_tile, loss_with_gradient
from planner.models.formulas.layers import has_learned_positions, norm_work, sum_input_gradient
from planner.models.kernels import Gemm, Work, all_reduce, each
from planner.models.operators import Batch, Operator, Owned, operator_of
from planner.models.parameters import root
from planner.models.patterns import Pattern

_FP32 = 4


def embedding_operators(config: ModelConfig, batch: Batch, owned: Owned) -> list[Operator]:
    """Return token embedding and positions; the hidden state comes from the last operator that is not ``rotary``."""
    rows, e, path = batch.num_read_tokens, batch.dtype_bytes, root(config)
    hidden, width = config.hidden_size, config.word_embed_proj_dim
    make = functools.partial(operator_of, owned, "embed")
    look_up = work.embedding(rows, config.vocab_size, width, e)
    if config.tied_embeddings:  # the head's gradient is added
        look_up += Work((), each(config.vocab_size * width, 3 * e))
    look_up += Work(all_reduce(rows * width * e, batch.tensor_parallel))
    if batch.tensor_parallel > 1:  # a copy of the gradient, without other ranks' rows
        look_up = work.with_memory(look_up, 0, 2 * rows * width * e)
    operators = [
        make(_token_embedding(config), "embedding", Pattern.ROW, look_up, rows * width * e),
        _positions(config, batch, owned),
    ]
    if width != hidden:
        name = f"{path}.project_in"
        project = work.with_memory(work.linear(rows, width, hidden, e, bias=False), rows * width * e)
        operators.append(make(name, "projection", Pattern.REPLICATE, project, rows * hidden * e))
    operators[-1] = operators[-1].doing(operators[-1] + context.cut(batch, hidden))
    return operators


def _positions(config: ModelConfig, batch: Batch, owned: Owned) -> Operator:
    make = functools.partial(operator_of, owned, "embed")
    rows, hidden, e, path = batch.num_read_tokens, config.hidden_size, batch.dtype_bytes, root(config)
    if not has_learned_positions(config):
        factors = batch.seq_len * config.head_dim
        turn = Work(each(factors, 6, 8, 8, 8, 8, 8, 4 + e, 4 + e), (), 2 * factors * e)
        return make(f"{path}.rotary_emb", "rotary", Pattern.REPLICATE, turn, 2 * factors * e)
    once = config.family == "gpt2"  # GPT-2 looks positions up once for all sequences
    name = f"{path}.{'wpe' if once else 'embed_positions'}"
    place = work.embedding(batch.seq_len if once else rows, owned[name][0].shape[0], hidden, e)
    place += Work(each(rows * hidden, 3 * e), each(rows * hidden, e) if once else ())
    return make(name, "embedding", Pattern.REPLICATE, place, rows * hidden * e)


def head_operators(config: ModelConfig, batch: Batch, owned: Owned) -> list[Operator]:
    """Return final norm, head and loss."""
    rows, e, path = batch.num_tokens, batch.dtype_bytes, root(config)
    hidden, width, vocab = config.hidden_size, config.word_embed_proj_dim, config.vocab_size
    make, kernels = functools.partial(operator_of, owned, "head"), kernel_set(batch, outside=True)
    operators = []
    if config.final_norm:
        norm = f"{path}.{ {'gpt2': 'ln_f', 'opt': 'final_layer_norm'}.get(config.family, 'norm') }"
        normalize = norm_work(config, batch, around=False)
        if (tile := batch.layer_tile_tokens) is not None:
            normalize = tiled.rms_norm(rows, hidden, e, tile)
        is_tiled = tile is not None
        operators.append(make(norm, "norm", Pattern.REPLICATE, normalize, rows * hidden * e, in_tiles=is_tiled))
    if width != hidden:
        name = f"{path}.project_out"
        project = work.with_memory(work.linear(rows, hidden, width, e, bias=False), rows * hidden * e)
        operators.append(make(name, "projection", Pattern.REPLICATE, project, rows * width * e))
    logits = sum_input_gradient(batch, width) + work.linear(rows, width, vocab, e, bias=False)
    # The gradient of the logits, in their type, stays until the gradient of the hidden state is complete.
    logits = work.with_memory(logits, rows * width * e, rows * (vocab + width) * e)
    loss = kernel_set(batch).loss(rows, vocab, e, batch.tensor_parallel)
    if batch.loss_tile_tokens is not None:
        logits, loss = _in_tiles(batch, width, vocab, batch.loss_tile_tokens)
    elif kernels.loss_tile:
        logits, loss = with_gradients(rows, width, vocab, e)
    loss += context.gather_losses(batch)
    shared = (f"{_token_embedding(config)}.weight",) if config.tied_embeddings else ()
    head = make("lm_head", "head", Pattern.COLUMN, logits, rows * vocab * e, shared_parameters=shared)
    operators.append(dataclasses.replace(head, differentiates=batch.loss_tile_tokens is not None))
    operators.append(make("loss", "loss", Pattern.SHARD, loss, 4))
    return operators


def _in_tiles(batch: Batch, width: int, vocab: int, tile: int) -> tuple[Work, Work]:
    """Return head and loss if the loss is computed in tiles of tokens ([Note: Tiled logits] in the executor).

    Each tile makes its gradients at once, and backward scales them. From the second tile on, the gradient of the weight
    is added to. Workspace: both gradients, and of one tile the logits and what the loss makes of them.
    """
    rows, e = batch.num_tokens, batch.dtype_bytes
    repeated = functools.partial(tiled.repeated, rows, tile)
    product = functools.partial(work.linear, inputs=width, outputs=vocab, e=e, bias=False)
    loss = functools.partial(work.loss, vocab=vocab, e=e, num_ranks=batch.tensor_parallel)
    products = repeated(lambda size: product(size).forward) + repeated(lambda size: product(size).backward)
    adding = tiled.added(vocab * width, e, tiled.num_tiles(rows, tile))
    scale = (*each(rows * width, 2 * e), *each(vocab * width, 2 * e))
    workspace_bytes = (rows + vocab) * width * e + tile * vocab * tiled_logit_bytes(batch.tensor_parallel, e)
    # The all-reduce of the input's gradient is in backward, once for all tiles.
    head = sum_input_gradient(batch, width) + Work((*products, *adding), scale, rows * width * e, workspace_bytes)
    return head, Work(repeated(lambda size: loss(size).forward) + repeated(lambda size: loss(size).backward))


def with_gradients(rows: int, width: int, vocab: int, e: int, *, frozen: bool = False) -> tuple[Work, Work]:
    """Return Liger's head and loss: each tile of tokens makes its gradients at once, so no logits are made again.

    That happens in forward, right before the head's backward, so its products may stand there. The gradient of the
    head's input takes the place of that input among saved activations. Of a weight that is trained, every tile's
    gradient is as large as the weight. It is cast to fp32 and then added to the sum, which has the weight's type
    (``fused_linear_cross_entropy.py`` of releases before the pull request 1454 of linkedin/Liger-Kernel). A ``frozen``
    weight has none.
    """
    tile = liger_tile(rows, width, vocab)
    repeated, num_weights = functools.partial(tiled.repeated, rows, tile), 0 if frozen else vocab * width
    product = functools.partial(work.linear, inputs=width, outputs=vocab, e=e, bias=False)
    casts_and_sums = each(num_weights, e + _FP32, 2 * e + _FP32) if num_weights else ()
    adding = repeated(lambda _: casts_and_sums)
    backward = (*repeated(lambda size: product(size).backward[: 1 if frozen else None]), *adding)
    num_bytes = rows * width * e
    forward = repeated(lambda size: product(size).forward)
    head = Work(forward, backward, num_bytes, num_bytes + tile * vocab * e + num_weights * (e + _FP32))
    return head, Work(repeated(lambda size: loss_with_gradient(size, vocab, e).forward))


def with_loss_of(operators: Iterable[Operator], kernels: str, vocab: int, e: int) -> tuple[Operator, ...]:
    """Return a captured model's operators with the loss, and Liger's head, of a kernel set.

    The head is the last product that makes ``vocab`` values; the loss follows.
    """
    found = list(operators)
    number, product = max(
        (index, kernel)
        for index, operator in enumerate(found)
        for kernel in operator.forward
        if isinstance(kernel, Gemm) and kernel.n == vocab
    )
    made: dict[int, Work] = {number + 1: KERNEL_SETS[kernels].loss(product.m, vocab, e, 1)}
    if KERNEL_SETS[kernels].loss_tile:
        num_products = sum(isinstance(kernel, Gemm) for kernel in found[number].backward)
        both = with_gradients(product.m, product.k, vocab, e, frozen=num_products == 1)
        made = dict(zip((number, number + 1), both, strict=True))
    for index, done in made.items():
        found[index] = found[index].doing(done)
    return tuple(found)


def tiled_logit_bytes(tensor_parallel: int, dtype_bytes: int) -> int:
    """Return the most bytes that each logit of a tile needs, in backward.

    That is the logit, its fp32 log-probability, and the gradient before and after log-softmax. The loss of ranks that
    share the vocabulary turns log-probabilities into the gradient in one tensor, which it then converts.
    """
    if tensor_parallel > 1:
        return 12
    return dtype_bytes + 12


def _token_embedding(config: ModelConfig) -> str:
    return f"{root(config)}.{'wte' if config.family == 'gpt2' else 'embed_tokens'}"
