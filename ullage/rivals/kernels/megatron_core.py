"""Layers of Megatron-Core with TransformerEngine: fused kernels, shared tokens, sums of gradients in fp32.

Counted in the public source of Megatron-LM (``megatron/core/transformer``, ``core/fusions``, ``core/tensor_parallel``)
and TransformerEngine (``pytorch/module``): norms, SwiGLU, rotary embedding and residual
sums are one kernel each, and a product adds a weight's gradient to the sum over micro-batches, in fp32, as it writes it
(``gradient_accumulation_fusion``).

Between a row-parallel and the next column-parallel product, tensor-parallel ranks share
the tokens: norms and residual sums see ``rows / t`` of them, and reduce-scatter and all-gather take the place of the
all-reduce (Korthikanti et al., *Reducing Activation Recomputation in Large Transformer Models*, 2022). In backward, the
input of a column-parallel product is gathered again while its gradient is computed, and that gradient is reduced while
the weight's is (``LinearWithGradAccumulationAndAsyncCommunication``). Only what takes longer than the product counts.
Without ``sequence_parallel``, every rank has all tokens there, and all-reduces them.

Ranks share the tokens of each sequence: a rank has ``s / c`` of them, an early and a late block. Before attention they
exchange the tokens' queries, keys and values for those of all tokens of ``1 / c`` of the heads, after it the outputs
(``--cp-comm-type a2a``, ``AttnFuncWithCPAndQKVOA2A``): a copy sorts what is sent by rank, another orders the blocks.
The exchanged output is the next product's input; backward needs that before the exchange, too.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Final

from planner.graph import assemble
from planner.models import sharding
from planner.models.config import LatentAttention, ModelConfig
from planner.models.formulas import experts, work
from planner.models.formulas.ends import embedding_operators, head_operators
from planner.models.formulas.kernel_sets import KernelSet, Passes
from planner.models.formulas.layers import layer_parameters, some_experts
from planner.models.kernels import Attention, Collective, Gemm, Kernels, Work, all_reduce, each
from planner.models.operators import Batch, Operator, Owned, by_module, operator_of
from planner.models.parameters import parameters
from planner.models.patterns import Pattern

_FP32 = 4
_SET: Final = KernelSet(rms_norm=Passes((2,), (4,), 2, 2), rotary=Passes((2,), (2,)), joint_rotary=True)
_SWIGLU: Final = Passes((3,), (5,), 3, 2)
# Experts stay whole: expert-parallel ranks include those that share layers.
_DIVIDED = ("num_attention_heads", "num_key_value_heads", "ffn_hidden_size", "shared_expert_ffn_hidden_size")


@dataclasses.dataclass(frozen=True)
class MegatronBatch(Batch):
    """A batch, and with which options of Megatron-Core it is computed.

    Attributes:
        sequence_parallel: whether tensor-parallel ranks share its tokens between products (``--sequence-parallel``).
        loss_in_place: whether the loss is TransformerEngine's (``--cross-entropy-fusion-impl te``).
    """

    sequence_parallel: bool = True
    loss_in_place: bool = False

    @property
    def own_tokens(self) -> int:
        """Tokens that a rank has between products."""
        return self.num_tokens // (self.tensor_parallel if self.sequence_parallel else 1)


def build_graph(config: ModelConfig, batch: MegatronBatch) -> tuple[Operator, ...]:
    """Return the operators of one forward in Megatron-Core; see :func:`planner.graph.build_graph`.

    Raises:
        ValueError: ranks cannot share the model.
    """
    own = share(config, batch)
    owned = by_module(parameters(own))
    first, last = _first(own, batch, owned), _last(own, batch, owned)
    return assemble(own, batch, first, lambda layer: layer_parts(own, config, batch, layer), last)


def share(config: ModelConfig, batch: MegatronBatch) -> ModelConfig:
    """Return one rank's share of a model; the vocabulary is padded if there is one rank, too.

    Raises:
        ValueError: something does not divide evenly.
    """
    if batch.context_parallel > 1 and batch.seq_len % (2 * batch.context_parallel):
        raise ValueError(
            f"seq_len is {batch.seq_len}, but must be a multiple of twice context_parallel {batch.context_parallel}: "
            "every rank has two blocks of each sequence; change one"
        )
    own = sharding.share(config, batch, _DIVIDED)
    if own.num_attention_heads % batch.context_parallel or own.num_key_value_heads % batch.context_parallel:
        raise ValueError(
            f"context_parallel is {batch.context_parallel}, but must divide the {own.num_attention_heads} heads and "
            f"{own.num_key_value_heads} of keys of a tensor-parallel rank: ranks exchange tokens for heads; lower it"
        )
    experts.check(config, batch)
    return own.model_copy(update={"vocab_size": sharding.padded(own.vocab_size)})


def _first(config: ModelConfig, batch: MegatronBatch, owned: Owned) -> list[Operator]:
    alone = dataclasses.replace(batch, tensor_parallel=1)  # what ranks exchange is added below
    look_up, *others = embedding_operators(config, alone, owned)
    reduced, gathered = row_exchange(batch, config.hidden_size)
    added = add_gradient(config.vocab_size * config.hidden_size, batch.dtype_bytes)
    return [look_up.doing(look_up + Work(reduced, gathered) + added), *others]


def _last(config: ModelConfig, batch: MegatronBatch, owned: Owned) -> list[Operator]:
    """Return norm, head and loss; ranks normalise their own tokens."""
    rows, hidden, vocab, e = batch.num_tokens, config.hidden_size, config.vocab_size, batch.dtype_bytes
    own = {
        "norm": _SET.norm(batch.own_tokens, hidden, e),  # its row counts its output
        "head": work.with_memory(column(batch, hidden, vocab), 0, rows * (vocab + hidden) * e),
        "loss": (loss_in_place if batch.loss_in_place else loss)(rows, vocab, e, batch.tensor_parallel),
    }
    return [operator.doing(own[operator.kind]) for operator in head_operators(config, batch, owned)]


def layer_parts(config: ModelConfig, whole: ModelConfig, batch: MegatronBatch, layer: int) -> tuple[Operator, ...]:
    """Return the operators of one decoder layer; see :func:`planner.models.formulas.layers.layer_parts`."""
    owned = layer_parameters(config, whole, layer)
    rows, e = batch.own_tokens, batch.dtype_bytes
    hidden_bytes = rows * config.hidden_size * e
    has_experts = config.has_experts(layer)
    first, second = "input_layernorm", "post_attention_layernorm"
    normalize = _SET.norm(rows, config.hidden_size, e)

    def norm_part(name: str, unit: str) -> Operator:
        return operator_of(owned, unit, name, "norm", Pattern.REPLICATE, normalize, hidden_bytes)

    latent, ffn = config.latent, config.ffn_hidden_size
    attention = _latent_attention(config, latent, batch, owned) if latent else _attention(config, batch, owned)
    mlp = _experts(config, batch, owned, layer) if has_experts else _gated(config, batch, owned, "mlp", ffn)
    unit = "attn" if has_experts and batch.separate_experts else "mlp"
    return norm_part(first, "attn"), *attention, norm_part(second, unit), *mlp


def linear(rows: int, inputs: int, outputs: int, e: int, beside: tuple[Kernels, Kernels] = ((), ())) -> Work:
    """Return a product of every token; the gradient of its weight is added to an fp32 sum.

    Args:
        rows: tokens.
        inputs: values of a token before it.
        outputs: values of a token after it.
        e: bytes per value.
        beside: collectives that run while the gradient of the input, and that of the weight, is computed.
    """
    to_input, to_weight = Gemm(rows, inputs, outputs), Gemm(outputs, inputs, rows, accumulates=True)
    backward = (to_input, *_rest(beside[0], to_input), to_weight, *_rest(beside[1], to_weight))
    return Work((Gemm(rows, outputs, inputs),), backward, workspace_bytes=rows * inputs * e)


def _rest(collectives: Kernels, product: Gemm) -> Kernels:
    """Return collectives that run behind a product."""
    return tuple(
        dataclasses.replace(kernel, behind=product) for kernel in collectives if isinstance(kernel, Collective)
    )


def pass_tokens(batch: MegatronBatch, width: int) -> Kernels:
    """Return the all-gather or the reduce-scatter of all tokens' values."""
    if batch.tensor_parallel == 1:
        return ()
    return (Collective(batch.num_tokens * width * batch.dtype_bytes, batch.tensor_parallel, num_passes=1),)


def row_exchange(batch: MegatronBatch, width: int) -> tuple[Kernels, Kernels]:
    """Return how ranks add up what each has of all tokens' values, and how that is undone in backward."""
    if batch.sequence_parallel:
        return pass_tokens(batch, width), pass_tokens(batch, width)
    return all_reduce(batch.num_tokens * width * batch.dtype_bytes, batch.tensor_parallel), ()


def column(batch: MegatronBatch, inputs: int, outputs: int) -> Work:
    """Return a column-parallel product: tokens are gathered before it; their gradients are reduced after it."""
    reduced, gathered = row_exchange(batch, inputs)
    return Work(gathered) + linear(batch.num_tokens, inputs, outputs, batch.dtype_bytes, (gathered, reduced))


def row(batch: MegatronBatch, inputs: int, outputs: int) -> Work:
    """Return a row-parallel product and a residual sum: tokens are reduced in between, and gathered in backward."""
    e, own = batch.dtype_bytes, batch.own_tokens
    reduced, gathered = row_exchange(batch, outputs)
    residual = each(own * outputs, 3 * e)
    return linear(batch.num_tokens, inputs, outputs, e) + Work((*reduced, *residual), (*residual, *gathered))


def add_gradient(size: int, e: int) -> Work:
    """Return the addition of a gradient that no product writes to its fp32 sum; until then it is there beside it."""
    return Work((), each(size, e + 2 * _FP32), workspace_bytes=size * e)


def _attention(config: ModelConfig, batch: MegatronBatch, owned: Owned) -> Iterator[Operator]:
    make = functools.partial(operator_of, owned, "attn")
    rows, hidden, e = batch.num_tokens, config.hidden_size, batch.dtype_bytes
    query, key = config.query_size, config.key_value_size
    joint = "self_attn.qkv_proj"
    modules = tuple(f"self_attn.{side}_proj" for side in "qkv")
    out_bytes = rows * (query + 2 * key) * e
    project = column(batch, hidden, query + 2 * key)
    yield make(joint, "qkv", Pattern.COLUMN, project, out_bytes, *modules, product_bytes=out_bytes)
    core = _core(config, batch, config.head_dim)
    turn = _SET.turn(rows * query, rows * key, e)
    # The gradients of query, key and value are written where the joint projection's gradient is read.
    attend = turn + _attend(batch, core, rows * query, rows * query, rows * key, rows * key)
    yield make("self_attn.core", "attention", Pattern.SHARD, attend, rows * query * e)
    yield _output(config, batch, owned, query)


def _output(config: ModelConfig, batch: MegatronBatch, owned: Owned, width: int) -> Operator:
    num_bytes = batch.own_tokens * config.hidden_size * batch.dtype_bytes
    make, product = functools.partial(operator_of, owned, "attn"), row(batch, width, config.hidden_size)
    return make("self_attn.o_proj", "output", Pattern.ROW, product, num_bytes, product_bytes=num_bytes)


def _latent_attention(
    config: ModelConfig, latent: LatentAttention, batch: MegatronBatch, owned: Owned
) -> Iterator[Operator]:
    """Yield multi-head latent attention: queries, keys and values come from narrow vectors with norms of their own.

    Ranks make the narrow vectors of their own tokens, and gather those. Keys of all heads share their rotated part, so
    they are put together before attention
    (DeepSeek-V2, arXiv:2405.04434, section 2.1; ``megatron/core/transformer/multi_latent_attention.py``).
    """
    rows, hidden, e, heads = batch.num_tokens, config.hidden_size, batch.dtype_bytes, config.num_attention_heads
    rank, shared, turned = latent.q_lora_rank, latent.kv_lora_rank, latent.qk_rope_head_dim
    query, value = config.query_size, heads * latent.v_head_dim
    keys = heads * (config.head_dim - turned) + value

    make = functools.partial(operator_of, owned, "attn")

    def part(name: str, work: Work, width: int, modules: tuple[str, ...]) -> Operator:
        return make(f"self_attn.{name}", "qkv", Pattern.REPLICATE, work, rows * width * e, *modules)

    own = batch.own_tokens
    down = linear(own, hidden, rank, e) + linear(own, hidden, shared + turned, e)
    modules = ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa")
    yield part("down_proj", down, rank + shared + turned, modules)
    normalize = _SET.norm(own, rank, e) + _SET.norm(own, shared, e)
    modules = ("self_attn.q_a_layernorm", "self_attn.kv_a_layernorm")
    yield part("latent_norm", normalize, rank + shared, modules)
    reduced, gathered = row_exchange(batch, turned)
    up = column(batch, rank, query) + column(batch, shared, keys) + Work(gathered, reduced)
    modules = ("self_attn.q_b_proj", "self_attn.kv_b_proj")
    yield part("up_proj", up, query + keys, modules)
    turn = _SET.turn(rows * turned * heads, rows * turned, e)
    joined = Work(each(rows * query, 2 * e), each(rows * query, 2 * e))
    core = _core(config, batch, latent.v_head_dim)
    attend = turn + joined + _attend(batch, core, rows * value, rows * query, rows * query, rows * value)
    yield make("self_attn.core", "attention", Pattern.SHARD, attend, rows * value * e)
    yield _output(config, batch, owned, value)


def _core(config: ModelConfig, batch: MegatronBatch, value_dim: int) -> Attention:
    return Attention(
        batch.micro_batch,
        config.num_attention_heads // batch.context_parallel,
        batch.seq_len,
        config.head_dim,
        value_dim=value_dim,
    )


def _attend(batch: MegatronBatch, core: Attention, output: int, *inputs: int) -> Work:
    """Return flash attention; saved are query, key, value, output and a factor per row.

    Args:
        batch: the batch.
        core: the forward kernel.
        output: values of the rank's output.
        inputs: values of its queries, keys and values.
    """
    e, shared = batch.dtype_bytes, batch.context_parallel > 1
    values = sum(inputs) + output
    saved_bytes = (values + output * shared) * e + _FP32 * core.batch * core.num_heads * core.seq_len
    attend = Work((core,), (dataclasses.replace(core, backward=True),), saved_bytes, values * e)
    return _swap(batch, *inputs) + attend + _swap(batch, output) if shared else attend


def _swap(batch: MegatronBatch, *sizes: int) -> Work:
    """Return the exchange of tensors of so many values each, and of their gradients."""
    swaps = tuple(
        kernel
        for size in sizes
        for kernel in (
            *each(size, 2 * batch.dtype_bytes),
            Collective(size * batch.dtype_bytes, batch.context_parallel, kind="all-to-all"),
            *each(size, 2 * batch.dtype_bytes),
        )
    )
    return Work(swaps, swaps)


def _gated(
    config: ModelConfig, batch: MegatronBatch, owned: Owned, path: str, ffn: int, unit: str = "mlp"
) -> Iterator[Operator]:
    """Yield a gated MLP; the first product writes the gate's input and the other side by side."""
    make = functools.partial(operator_of, owned, unit)
    rows, hidden, e = batch.num_tokens, config.hidden_size, batch.dtype_bytes
    up, activation, down = f"{path}.gate_up_proj", f"{path}.act_fn", f"{path}.down_proj"
    up_bytes, modules = 2 * rows * ffn * e, (f"{path}.gate_proj", f"{path}.up_proj")
    project = column(batch, hidden, 2 * ffn)
    yield make(up, "up", Pattern.COLUMN, project, up_bytes, *modules, product_bytes=up_bytes)
    activate = _SWIGLU.work(rows * ffn, e)
    yield make(activation, "activation", Pattern.SHARD, activate, rows * ffn * e)
    hidden_bytes = batch.own_tokens * hidden * e
    product = row(batch, ffn, hidden)
    yield make(down, "down", Pattern.ROW, product, hidden_bytes)


def _experts(config: ModelConfig, batch: MegatronBatch, owned: Owned, layer: int) -> Iterator[Operator]:
    """Yield router, shared expert, dispatch, the bank of experts and the sum of their outputs.

    Counted in ``token_dispatcher.py`` (all-to-all) and ``moe_utils.py`` with the fused permutation of
    TransformerEngine: tokens are copied in the order of experts, exchanged, and sorted by local expert; back the other
    way round. Routing weights are applied in the activation function. Tensor-parallel ranks route their own tokens and
    have whole experts, so expert-parallel ranks are among them too.
    """
    make = functools.partial(operator_of, owned)
    own = dataclasses.replace(batch, context_parallel=batch.context_parallel * batch.tensor_parallel)
    rows, hidden, e = own.num_tokens, config.hidden_size, batch.dtype_bytes
    before = "attn" if batch.separate_experts else "mlp"
    num, visits = config.num_experts, rows * config.experts_per_token
    scores = each(rows * num, e + 4, 8, 8, 8)
    route = linear(rows, hidden, num, e) + Work(scores, scores, 8 * rows * num)
    visit_bytes = visits * hidden * e
    yield make(before, "mlp.gate", "router", Pattern.REPLICATE, route, 8 * visits)
    if ffn := config.shared_expert_ffn_hidden_size:
        yield from _gated(config, batch, owned, "mlp.shared_experts", ffn, before)
    swap: Kernels = ()
    if batch.expert_parallel > 1:
        exchange = Collective(visit_bytes, batch.expert_parallel, kind="all-to-all", over_tensor=True)
        swap = (exchange, *each(visits * hidden, 2 * e))
    copy = each(visits * hidden, 2 * e)
    send = Work((*copy, *swap), (*swap, *copy), 8 * visits)
    yield make(before, "mlp.dispatch", "dispatch", Pattern.SHARD, send, visit_bytes)
    sizes, unit = experts.tokens(config, own, layer), "mlp"
    for first, count in experts.groups(config, batch):
        label = f".{first}-{first + count - 1}" if batch.separate_experts else ""
        unit = f"experts{label}" if batch.separate_experts else "mlp"
        bank = sizes[first : first + count]
        work = _bank(bank, hidden, config.expert_ffn_hidden_size, e)
        own_rows, num_bytes = some_experts(owned, first, count), sum(bank) * hidden * e
        yield make(unit, f"mlp.experts{label}", "experts", Pattern.EXPERT, work, num_bytes, parameters=own_rows)
    gather = Work((*swap, *copy, *each(rows * hidden, 3 * e)), (*each(rows * hidden, 3 * e), *copy, *swap))
    yield make(unit, "mlp.combine", "combine", Pattern.SHARD, gather, rows * hidden * e)


def _bank(sizes: tuple[int, ...], hidden: int, ffn: int, e: int) -> Work:
    """Return a bank of experts: ``GroupedLinear`` runs one product per expert, on a few streams in turn."""
    total = Work()
    for size in sizes:
        if size:
            total += linear(size, hidden, 2 * ffn, e) + _SWIGLU.work(size * ffn, e) + linear(size, ffn, hidden, e)
    visits = sum(sizes)
    inside_bytes = 2 * visits * ffn * e
    return dataclasses.replace(total, saved_bytes=total.saved_bytes + visits * hidden * e, workspace_bytes=inside_bytes)


def loss(rows: int, vocab: int, e: int, num_ranks: int) -> Work:
    """Return cross-entropy over a divided vocabulary with its fusions (``fused_cross_entropy.py``).

    To fp32; maximum; difference, exponential and sum; quotient. Backward subtracts the target, scales and casts. The
    logits live in the training data type and in fp32.
    """
    n = rows * vocab
    # The maximum; then the target's logit and the sum together.
    sums = (*all_reduce(4 * rows, num_ranks), *all_reduce(8 * rows, num_ranks))
    return Work((*each(n, e + 4, 4, 8, 8), *sums), each(n, 8, 4 + e), 4 * n + 8 * rows, n * (4 + e))


def loss_in_place(rows: int, vocab: int, e: int, num_ranks: int) -> Work:
    """Return TransformerEngine's cross-entropy (``common/triton/cross_entropy.py``), in the type of the logits.

    One kernel finds the maximum and the sum; another makes the loss and writes gradients over the logits, which
    backward scales. Ranks gather three fp32 values of each row.
    """
    n = rows * vocab
    gathered = (Collective(12 * rows * num_ranks, num_ranks, num_passes=1),) if num_ranks > 1 else ()
    return Work((*each(n, e), *gathered, *each(n, 2 * e)), each(n, 2 * e), e * n)
