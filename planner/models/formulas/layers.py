"""The operators of a decoder layer, with kernels and bytes, from a model's configuration and a batch."""

import dataclasses
import functools
from collections.abc import Iterable

from planner.models.config import ModelConfig
from planner.models.formulas import context, experts, float8, tiled, work
from planner.models.formulas.kernel_sets import KERNEL_SETS, kernel_set, norms_of_layer
from planner.models.kernels import Attention, Collective, Work, all_reduce, each
from planner.models.operators import Batch, Operator, Owned, by_module, operator_of
from planner.models.parameters import ParameterSpec, layer_path, layer_shapes
from planner.models.patterns import Pattern


def _names(config: ModelConfig) -> tuple[dict[str, str], dict[str, tuple[str, ...]]]:
    """Return the paths of a dense layer's operators within it, and the modules that some of them join."""
    if config.family == "gpt2":
        names = {
            "first": "ln_1", "qkv": "attn.c_attn", "core": "attn.core", "output": "attn.c_proj",
            "second": "ln_2", "up": "mlp.c_fc", "activation": "mlp.act", "down": "mlp.c_proj",
        }  # fmt: skip
        return names, {}
    names = {"qkv": "self_attn.qkv_proj", "core": "self_attn.core"}
    if config.family == "opt":
        names |= {
            "first": "self_attn_layer_norm", "output": "self_attn.out_proj",
            "second": "final_layer_norm", "up": "fc1", "activation": "activation_fn", "down": "fc2",
        }  # fmt: skip
        return names, {"qkv": tuple(f"self_attn.{side}_proj" for side in "qkv")}
    names |= {
        "first": "input_layernorm", "output": "self_attn.o_proj",
        "second": "post_attention_layernorm", "up": "mlp.gate_up_proj", "activation": "mlp.act_fn",
        "down": "mlp.down_proj",
    }  # fmt: skip
    order = ("q_proj", "q_norm", "k_proj", "k_norm", "v_proj") if config.qk_norm else ("q_proj", "k_proj", "v_proj")
    joined = {"qkv": tuple(f"self_attn.{module}" for module in order), "up": ("mlp.gate_proj", "mlp.up_proj")}
    return names, joined


def layer_parameters(config: ModelConfig, whole: ModelConfig, layer: int) -> Owned:
    """Return what one rank, whose share of the model ``whole`` is ``config``, has of a layer's parameters."""
    return by_module(
        ParameterSpec(name, shape, whole_shape=None if of_all == shape else of_all)
        for (name, shape), (_, of_all) in zip(layer_shapes(config, layer), layer_shapes(whole, layer), strict=True)
    )


def layer_parts(config: ModelConfig, whole: ModelConfig, batch: Batch, layer: int) -> tuple[Operator, ...]:
    """Return the operators of one decoder layer in order of execution, with names relative to it.

    Args:
        config: sizes of one rank's share of the model.
        whole: sizes of the model.
        batch: the batch.
        layer: the layer.
    """
    owned, (names, _) = layer_parameters(config, whole, layer), _names(config)
    hidden_bytes = batch.num_tokens * config.hidden_size * batch.dtype_bytes
    before = config.norm_before

    def norm(name: str, unit: str) -> Operator:
        effort, in_tiles = norm_work(config, batch), batch.layer_tile_tokens is not None
        if batch.layer_tile_tokens is not None:
            effort = tiled.rms_norm(batch.num_tokens, config.hidden_size, batch.dtype_bytes, batch.layer_tile_tokens)
        return operator_of(owned, unit, name, "norm", Pattern.REPLICATE, effort, hidden_bytes, in_tiles=in_tiles)

    parts: list[Operator] = []
    if before:
        parts.append(norm(names["first"], "attn"))
    parts += _attention_parts(config, batch, owned)
    if not before:
        parts.append(norm(names["first"], "attn"))
    else:
        separate_experts = config.has_experts(layer) and batch.separate_experts
        parts.append(norm(names["second"], "attn" if separate_experts else "mlp"))
    has_experts = config.has_experts(layer)
    parts += _expert_parts(config, batch, owned, layer) if has_experts else _mlp_parts(config, batch, owned)
    if not before:
        parts.append(norm(names["second"], "mlp"))
    else:
        # Non-reentrant checkpointing stops as soon as the last saved tensor is back, which is the last product's
        # input: neither the product nor the residual sum runs again. Of experts, the weighted sum does not.
        parts[-1] = dataclasses.replace(parts[-1], num_skipped=_num_skipped(config, batch, parts[-1]))
    return _in_one_graph(config, batch, parts) if kernel_set(batch).whole_layers else tuple(parts)


def _in_one_graph(config: ModelConfig, batch: Batch, parts: Iterable[Operator]) -> tuple[Operator, ...]:
    """Return a layer's operators if it is one unit and one graph, which runs to its end if it is recomputed."""
    first, second = norms_of_layer(batch.num_tokens, config.hidden_size, batch.dtype_bytes)
    works = iter((KERNEL_SETS["compiled"].call + first, second))
    made = (part.doing(next(works)) if part.kind == "norm" else part for part in parts)
    return tuple(dataclasses.replace(part, unit="layer", num_skipped=0) for part in made)


def _num_skipped(config: ModelConfig, batch: Batch, part: Operator) -> int:
    if part.kind in {"down", "mlp"}:
        # The last product of OPT is in no module that is compiled, and that of tensor-parallel ranks in no graph.
        if kernel_set(batch).runs_last and config.family != "opt" and batch.tensor_parallel == 1:
            return 1
        # A product in fp8 saves what it has cast when it ends; then come its bias and the residual.
        is_narrow = part.kind == "down" and _in_fp8(batch, config.ffn_hidden_size, config.hidden_size)
        return 1 + config.mlp_bias if is_narrow else len(part.forward)
    converts = _routing_bytes(config, batch) != batch.dtype_bytes
    # gather in token order, sum over experts, (cast, sum over ranks,) residual
    return 3 + converts + (batch.tensor_parallel > 1)


def norm_work(config: ModelConfig, batch: Batch, *, around: bool = True) -> Work:
    """Return the work of a norm over the hidden size, with or without a residual ``around`` it."""
    rows, hidden, e = batch.num_tokens, config.hidden_size, batch.dtype_bytes
    if config.norm == "layernorm":
        return work.layer_norm(rows, hidden, e)
    kernels = kernel_set(batch, outside=not around)
    return kernels.norm(rows, hidden, e, around=around) + kernels.call


def linear(
    batch: Batch,
    inputs: int,
    outputs: int,
    *,
    bias: bool,
    beside: Iterable[int] = (),
    found: float8.Found = None,
) -> Work:
    """Return a projection of every token, with products in fp8 if these are asked for and possible.

    See :func:`planner.models.formulas.work.linear`.

    Args:
        batch: the batch.
        inputs: width of its input.
        outputs: width of its output.
        bias: whether it has a bias.
        beside: outputs of the projections that read its input before it, of which one in fp8 has cast that.
        found: the tensor of which a cast knows the largest value.
    """
    rows, e = batch.num_tokens, batch.dtype_bytes
    if not _in_fp8(batch, inputs, outputs):
        return work.linear(rows, inputs, outputs, e, bias=bias)
    shares, emulated = any(float8.fits(inputs, others) for others in beside), batch.fp8_products == "emulated"
    given = {"bias": bias, "emulated": emulated, "casts_weights": batch.casts_weights, "shares": shares}
    return float8.float8_linear(rows, inputs, outputs, e, **given, found=found)


def _in_fp8(batch: Batch, inputs: int, outputs: int) -> bool:
    return batch.fp8_products is not None and float8.fits(inputs, outputs)


def _input_bytes(batch: Batch, inputs: int, *outputs: int) -> int:
    """Return the bytes of an input that projections keep for backward: in fp8, in its own type, or both."""
    narrow = [_in_fp8(batch, inputs, width) for width in outputs]
    return batch.num_tokens * inputs * ((0 if all(narrow) else batch.dtype_bytes) + any(narrow))


def _passed_on(batch: Batch, made: Work, inputs: int, outputs: int, *, needed: bool = False) -> Work:
    """Return the work that makes a projection's input, of which it counts the bytes that backward keeps.

    In fp8 the projection keeps a cast of its own. Then the input is kept no longer, unless it is ``needed``.
    """
    if needed or not _in_fp8(batch, inputs, outputs):
        return made
    kept_bytes = made.saved_bytes - batch.num_tokens * inputs * batch.dtype_bytes
    return dataclasses.replace(made, saved_bytes=kept_bytes)


def _keeping_cast(batch: Batch, made: Work, inputs: int, outputs: int) -> Work:
    """Return a projection's work, with the cast of its input that it keeps in fp8."""
    return work.with_memory(made, batch.num_tokens * inputs) if _in_fp8(batch, inputs, outputs) else made


def _casts_bytes(batch: Batch, inputs: int, outputs: int) -> int:
    """Return the bytes that casts to fp8 take beside the gradients of a projection; 0 without them."""
    if not _in_fp8(batch, inputs, outputs):
        return 0
    return float8.casts_bytes(
        batch.num_tokens,
        inputs,
        outputs,
        batch.dtype_bytes,
        emulated=batch.fp8_products == "emulated",
        casts_weights=batch.casts_weights,
        keeps=True,
    )


def sum_output(batch: Batch, width: int) -> Work:
    """Return the all-reduce of a row-parallel operator's output (Megatron-LM's ``g``)."""
    return Work(all_reduce(batch.num_tokens * width * batch.dtype_bytes, batch.tensor_parallel))


def sum_input_gradient(batch: Batch, width: int) -> Work:
    """Return the all-reduce of the gradient of a column-parallel operator's input (Megatron-LM's ``f``).

    Backward ends with it, so it is the first work in forward order.
    """
    return Work((), all_reduce(batch.num_tokens * width * batch.dtype_bytes, batch.tensor_parallel))


def add_bias(batch: Batch, width: int, *, bias: bool) -> Work:
    """Return the addition of a row-parallel operator's bias, after the all-reduce of the ranks' partial sums."""
    has_bias_sum = bias and batch.tensor_parallel > 1
    return Work(each(batch.num_tokens * width, 2 * batch.dtype_bytes)) if has_bias_sum else Work()


def exchange(batch: Batch, num_bytes: int) -> Work:
    """Return the all-to-all of tokens among expert-parallel ranks, and of their gradients.

    Received tokens are sorted by rank. A copy sorts them by expert, or back.
    """
    if batch.expert_parallel == 1:
        return Work()
    swap = (Collective(num_bytes, batch.expert_parallel, kind="all-to-all"), *each(num_bytes, 2))
    return Work(swap, swap)


def _residual(batch: Batch, width: int, *, ends: bool) -> Work:
    return kernel_set(batch).residuals[ends].work(batch.num_tokens * width, batch.dtype_bytes)


def _attention_parts(config: ModelConfig, batch: Batch, owned: Owned) -> Iterable[Operator]:
    make = functools.partial(operator_of, owned, "attn")
    names, joined = _names(config)
    rows, hidden, e = batch.num_tokens, config.hidden_size, batch.dtype_bytes
    query, key = config.query_size, config.key_value_size
    yield make(
        names["qkv"],
        "qkv",
        Pattern.COLUMN,
        _qkv_work(config, batch),
        rows * (query + 2 * key) * e,
        *joined.get("qkv", ()),
        product_bytes=rows * (query + 2 * key) * e,
    )
    per_head = 4 if batch.flash_attention else batch.seq_len * e  # a logarithm of each row's sum, or all its scores
    yield make(
        names["core"],
        "attention",
        Pattern.SHARD,
        _core_work(config, batch),
        rows * query * e,
        product_bytes=rows * (query * e + config.num_attention_heads * per_head),
    )
    project = _keeping_cast(batch, linear(batch, query, hidden, bias=config.output_bias), query, hidden)
    output = context.exchange(batch, rows * query * e, saves=not _in_fp8(batch, query, hidden)) + project
    output += sum_output(batch, hidden) + add_bias(batch, hidden, bias=config.output_bias)
    output += _residual(batch, hidden, ends=False)
    hidden_bytes = rows * hidden * e
    yield make(names["output"], "output", Pattern.ROW, output, hidden_bytes, product_bytes=hidden_bytes)


def _qkv_work(config: ModelConfig, batch: Batch) -> Work:
    rows, hidden, e = batch.num_tokens, config.hidden_size, batch.dtype_bytes
    query, key, bias = config.query_size, config.key_value_size, config.qkv_bias
    share, kernels = sum_input_gradient(batch, hidden), kernel_set(batch)
    if config.family == "gpt2":
        joint = linear(batch, hidden, query + 2 * key, bias=bias)
        joint += context.exchange(batch, rows * (query + 2 * key) * e)
        inside_bytes = max(rows * (query + 2 * key + hidden) * e, joint.workspace_bytes)
        return work.with_memory(share + kernels.call + joint, rows * hidden * e, inside_bytes)
    sent = rows * key * context.copies_of_keys(config, batch)
    exchange_key = context.exchange(batch, sent * e)
    q = linear(batch, hidden, query, bias=bias) + context.exchange(batch, rows * query * e)
    k = linear(batch, hidden, key, bias=bias, beside=(query,)) + exchange_key
    if config.family == "opt":
        q += Work(each(rows * query, 2 * e), each(rows * query, 2 * e))  # scaled before attention
    elif kernels.turned_back:  # rotary's gradients are turned back into the projection's layout
        q += Work((), each(rows * query, 2 * e))
        k += Work((), each(sent, 2 * e))
    if config.qk_norm:  # every rank has these norms whole, for its own heads: their gradients are summed
        share_norm = Work((), all_reduce(config.head_dim * e, batch.tensor_parallel))
        q += kernels.norm(rows * config.num_attention_heads, config.head_dim, e, around=False) + share_norm
        k += kernels.norm(sent // config.head_dim, config.head_dim, e, around=False) + share_norm
    v = linear(batch, hidden, key, bias=bias, beside=(query, key)) + exchange_key
    join = share + kernels.joins[3].work(rows * hidden, e)  # the input's gradients from q, k and v
    inside_bytes = rows * (query + 2 * key + hidden) * e + _casts_bytes(batch, hidden, query)
    inside_bytes = max(inside_bytes, context.exchange(batch, rows * query * e).workspace_bytes)
    saved_bytes = _input_bytes(batch, hidden, query, key)
    return work.with_memory(join + kernels.call + q + k + v, saved_bytes, inside_bytes)


def _core_work(config: ModelConfig, batch: Batch) -> Work:
    if has_learned_positions(config):
        return attend(config, batch)
    rows, e = batch.num_tokens, batch.dtype_bytes
    key = rows * config.key_value_size * context.copies_of_keys(config, batch)
    return kernel_set(batch).turn(rows * config.query_size, key, e) + attend(config, batch)


def attend(config: ModelConfig, batch: Batch) -> Work:
    """Return the core of attention, from queries and keys that are rotated."""
    rows, e = batch.num_tokens, batch.dtype_bytes
    query, key = rows * config.query_size, rows * config.key_value_size * context.copies_of_keys(config, batch)
    core = Attention(
        batch.micro_batch,
        config.num_attention_heads // (1 if batch.passes_keys else batch.context_parallel),
        batch.seq_len,
        config.head_dim,
        causal=True,
        flash=batch.flash_attention,
        shares_keys=key < query,
        num_steps=batch.context_parallel if batch.passes_keys else 1,
    )
    if batch.flash_attention:
        scratch_bytes = work.attention_scratch_bytes(core, grouped=key < query, e=e) if batch.attention_scratch else 0
        merged = config.family == "gpt2"
        made = work.flash_attention(core, query, key, e, merged_gradient=merged, scratch_bytes=scratch_bytes)
        return context.ring(batch, core, query, key, scratch_bytes) + made if core.num_steps > 1 else made
    made = work.eager_attention(core, query, key, e, upcast=config.family != "gpt2")
    return _passed_on(batch, made, config.query_size, config.hidden_size, needed=batch.context_parallel > 1)


def _mlp_parts(config: ModelConfig, batch: Batch, owned: Owned) -> Iterable[Operator]:
    make = functools.partial(operator_of, owned, "mlp")
    names, joined = _names(config)
    rows, hidden, ffn, e = batch.num_tokens, config.hidden_size, config.ffn_hidden_size, batch.dtype_bytes
    hidden_bytes, kernels = rows * hidden * e, kernel_set(batch)
    if (tile := batch.layer_tile_tokens) is not None:
        effort = tiled.swiglu_mlp(rows, hidden, ffn, e, tile, bias=config.mlp_bias)
        effort += _residual(batch, hidden, ends=True)
        yield make(
            "mlp",
            "mlp",
            Pattern.COLUMN,
            effort,
            hidden_bytes,
            *joined.get("up", (names["up"],)),
            names["down"],
            in_tiles=True,
        )
        return
    # A GPU's SwiGLU between products in fp8 finds largest values for their casts.
    finds = batch.fp8_products == "device" and config.mlp == "swiglu" and float8.fits(hidden, ffn)
    up = linear(batch, hidden, ffn, bias=config.mlp_bias, found="gradient" if finds else None)
    if config.is_gated:
        second = linear(batch, hidden, ffn, bias=config.mlp_bias, beside=(ffn,), found="gradient" if finds else None)
        up = kernels.joins[2].work(rows * hidden, e) + up + second
    if config.family != "opt":  # whose MLP is no module of its own
        up = kernels.call + up
    # Backward computes the gate's gradient after the up projection's. At that time three gradients are alive: that of
    # the gate's output, and one of the input from each of the two products.
    inside_bytes = rows * (ffn + hidden * (2 if config.is_gated else 1)) * e + _casts_bytes(batch, hidden, ffn)
    up = work.with_memory(sum_input_gradient(batch, hidden) + up, _input_bytes(batch, hidden, ffn), inside_bytes)
    up_bytes = rows * ffn * e * (2 if config.is_gated else 1)
    yield make(names["up"], "up", Pattern.COLUMN, up, up_bytes, *joined.get("up", ()), product_bytes=up_bytes)
    activate = kernels.activations[config.mlp].work(rows * ffn, e)
    activate = _passed_on(batch, activate, ffn, hidden, needed=config.mlp == "relu")
    activate = float8.swiglu(rows * ffn, e) if finds else activate
    yield make(names["activation"], "activation", Pattern.SHARD, activate, rows * ffn * e)
    down = linear(batch, ffn, hidden, bias=config.mlp_bias, found="input" if finds else None)
    down = (
        _keeping_cast(batch, down, ffn, hidden)
        + sum_output(batch, hidden)
        + add_bias(batch, hidden, bias=config.mlp_bias)
        + _residual(batch, hidden, ends=True)
    )
    product_bytes = 0 if config.norm_before else hidden_bytes
    yield make(names["down"], "down", Pattern.ROW, down, hidden_bytes, product_bytes=product_bytes)


def _expert_parts(config: ModelConfig, batch: Batch, owned: Owned, layer: int) -> Iterable[Operator]:
    """Yield router, dispatch, the experts unit by unit, and the weighted sum of their outputs.

    If experts are units of their own, router and dispatch belong to the unit before them, and the sum to their last
    unit: they are too small to be units.
    """
    rows, hidden, e = batch.num_tokens, config.hidden_size, batch.dtype_bytes
    num, top = config.num_experts, config.experts_per_token
    weight_bytes, whole = _routing_bytes(config, batch), not batch.separate_experts
    before = "mlp" if whole else "attn"
    route = work.with_memory(
        work.router(rows, hidden, num, top, e, normalize=config.normalize_router), rows * hidden * e
    )
    chosen_bytes = rows * top * (weight_bytes + 8)
    make, score_bytes = functools.partial(operator_of, owned), rows * num * e
    yield make(before, "mlp.gate", "router", Pattern.REPLICATE, route, chosen_bytes, product_bytes=score_bytes)
    visit_bytes = rows * top * hidden * e
    # A rank that has a share of every expert computes partial gradients, of tokens and of routing weights alike.
    share = sum_input_gradient(batch, hidden) + Work((), all_reduce(rows * top * weight_bytes, batch.tensor_parallel))
    send = share + work.dispatch(rows, hidden, top, e) + exchange(batch, visit_bytes)
    yield make(before, "mlp.dispatch", "dispatch", Pattern.SHARD, send, visit_bytes)
    sums = (
        exchange(batch, visit_bytes)
        + work.combine(rows, hidden, top, e, weight_bytes)
        + sum_output(batch, hidden)
        + _residual(batch, hidden, ends=True)
    )
    unit = "mlp"
    sizes = experts.tokens(config, batch, layer)
    for first, count in experts.groups(config, batch):
        bank, ffn = sizes[first : first + count], config.expert_ffn_hidden_size
        label = "" if whole else f".{first}" if count == 1 else f".{first}-{first + count - 1}"
        unit = "mlp" if whole else f"experts{label}"
        yield make(
            unit,
            f"mlp.experts{label}",
            "experts",
            Pattern.EXPERT,
            work.experts(bank, hidden, ffn, e, one_kernel=whole),
            sum(bank) * hidden * e,
            parameters=some_experts(owned, first, count),
            product_bytes=sum(bank) * (2 * ffn + hidden) * e,
        )
    yield make(unit, "mlp.combine", "combine", Pattern.SHARD, sums, rows * hidden * e)


def _routing_bytes(config: ModelConfig, batch: Batch) -> int:
    # Mixtral leaves its routing weights in fp32, Qwen casts them back.
    return 4 if config.family == "mixtral" else batch.dtype_bytes


def has_learned_positions(config: ModelConfig) -> bool:
    """Return whether positions are an embedding (OPT, GPT-2) rather than rotary."""
    return config.family in {"opt", "gpt2"}


def placed(part: Operator, config: ModelConfig, layer: int) -> Operator:
    """Return an operator of a layer at its place in the model; its kernels are objects that all equal layers share."""
    path, segment = layer_path(config, layer), f"layers.{layer}"
    return dataclasses.replace(
        part,
        name=f"{path}.{part.name}",
        unit=f"{segment}.{part.unit}",
        segment=segment,
        parameters=tuple(dataclasses.replace(spec, name=f"{path}.{spec.name}") for spec in part.parameters),
        fp8_twin=part.fp8_twin and placed(part.fp8_twin, config, layer),
    )


def some_experts(owned: Owned, first: int, count: int) -> tuple[ParameterSpec, ...]:
    """Return the rows of ``count`` experts, from ``first`` on, in the parameters that hold all experts of a layer."""
    bank, rows = owned["mlp.experts"], f"[{first}:{first + count}]"
    if count == bank[0].shape[0]:
        return tuple(bank)
    shapes = [(count, *spec.shape[1:]) for spec in bank]
    wholes = [spec.whole_shape and (count, *spec.whole_shape[1:]) for spec in bank]
    return tuple(
        dataclasses.replace(spec, name=f"{spec.name}{rows}", shape=shape, whole_shape=whole)
        for spec, shape, whole in zip(bank, shapes, wholes, strict=True)
    )
