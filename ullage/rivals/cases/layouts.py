"""How files state published runs.

Most files state runs of training as their sources do, each kind in a layout of its own. A layout is a table of its
fields by their paths, such as ``engine.stride``, with their types, and a function that says the same in the fields of a
case. A run in the words of a request, and one of checkpoints, has the fields of its case.
"""

from collections.abc import Callable, Iterator
from typing import Annotated, Any, Final, Literal

from pydantic import ConfigDict, Field, ValidationError, create_model

from planner.models.config import LatentAttention, ModelConfig
from planner.models.huggingface import build
from planner.models.parameters import num_parameters
from ullage.rivals.cases.base import Amount, Case, CaseError, Number
from ullage.rivals.cases.checkpoints import CheckpointCase
from ullage.rivals.cases.rates import AttentionKernel
from ullage.rivals.cases.training import TrainingCase

Values = dict[str, Any]
Table = dict[str, Any]  # the type of each field, and its default, if it has one

# Number of learned positions where a published run does not record it: at least as many as it was trained on.
_POSITIONS: Final = 2048
_RUN: Final[Table] = {"id": Annotated[str, Field(min_length=1)], "hardware": str, "source": str}
_SIZES: Final[Table] = {
    "model.name": str,
    "model.architecture": Literal["llama", "gpt2"],
    "model.num_layers": Number,
    "model.hidden_size": Number,
    "model.ffn_hidden_size": Number,
    "model.num_attention_heads": Number,
    "model.num_key_value_heads": Number,
    "model.vocab_size": Number,
    "model.mlp": str,
    "model.norm": str,
    "model.tied_embeddings": bool,
    "model.bias": bool,
    "model.flash_attention": bool,
    "model.max_positions": (Number | None, None),
    "model.num_params": (Number | None, None),
}


def _sized(values: Values, num_positions: int) -> ModelConfig:
    """Return the model of these sizes, which has so many positions unless they are stated."""
    sizes = {path.removeprefix("model."): value for path, value in values.items() if path.startswith("model.")}
    sizes["max_positions"] = sizes["max_positions"] or num_positions
    num_params, bias = sizes.pop("num_params"), sizes.pop("bias")
    del sizes["flash_attention"]
    sizes |= dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), bias)
    model = build(sizes, sizes.pop("name"), sizes.pop("architecture"))
    if num_params is not None and (found := num_parameters(model)) != num_params:
        raise ValueError(
            f"model: its sizes make {found} parameters, but num_params is {num_params}; correct the sizes or leave it "
            "out"
        )
    return model


# Megatron-LM, its like, and DeepSpeed's engines. ``gradient_flush`` says whether backward waits for unpinned copies of
# gradients to the host. A fraction of the parameters is updated by the CPU; the first ones stay on the device.
# DeepSpeed's log calls GiB "GB" (``utils.py::see_memory_usage``).
_TRAINED: Final[Table] = _RUN | _SIZES | {
    "attention": (AttentionKernel | None, None),
    "engine.name": Literal["gpu-only", "zero3-offload", "interleaved"],
    "engine.gradient_flush": (Literal["blocking", "async"] | None, None),
    "engine.cpu_optimizer_fraction": (Annotated[float, Field(ge=0, le=1)], 1.0),
    "engine.subgroup_params": (Number, 100_000_000),
    "engine.stride": (Number | None, None),
    "parallel.data_parallel": Number,
    "parallel.tensor_parallel": (Number, 1),
    "parallel.pipeline_parallel": (Number, 1),
    "parallel.gpus_per_node": Number,
    "parallel.nodes": (Number, 1),
    "batch.micro_batch": Number,
    "batch.global_batch": Number,
    "batch.seq_len": Number,
    "activations": Literal["keep", "recompute"],
    "zero_stage": Annotated[int, Field(ge=0, le=3)],
    "offload.params": (Literal["gpu", "cpu"], "gpu"),
    "offload.optimizer": (Literal["gpu", "cpu", "nvme"], "gpu"),
    # fp16 products take what bf16 ones take; the optimizer works in fp32 either way.
    "precision": Literal["bf16+fp32-adam", "fp16+fp32-adam"],
    "measured.forward_ms": (Amount | None, None),
    "measured.backward_ms": (Amount | None, None),
    "measured.update_ms": (Amount | None, None),
    "measured.iteration_ms": Amount,
    "measured.peak_gpu_allocated_gb": (Amount | None, None),
}  # fmt: skip


def _trained(values: Values) -> Values:
    for path, allowed in _possible(values):
        if values[path] not in allowed:
            choices = " or ".join(str(choice) for choice in allowed)
            raise ValueError(f"{path} is {values[path]}, but only {choices} can be predicted so far")
    parallel = {name: values[f"parallel.{name}"] for name in ("data_parallel", "tensor_parallel", "pipeline_parallel")}
    data_parallel, tensor_parallel, pipeline_parallel = parallel.values()
    _check_nodes(values, data_parallel * tensor_parallel * pipeline_parallel, tensor_parallel)
    micro_batch, global_batch = values["batch.micro_batch"], values["batch.global_batch"]
    if global_batch % (micro_batch * data_parallel):
        raise ValueError(
            f"batch.global_batch is {global_batch}, but must be a multiple of micro_batch {micro_batch} times "
            f"data_parallel {data_parallel}; correct it"
        )
    offloaded = values["engine.name"] != "gpu-only"
    sharded = not offloaded and values["zero_stage"] == 3  # by FSDP, which checkpoints as PyTorch does by itself
    fraction, flush = values["engine.cpu_optimizer_fraction"], values["engine.gradient_flush"]
    swaps = values["offload.optimizer"] == "nvme"  # gradients always leave through pinned buffers
    engines = {"gpu-only": "megatron", "zero3-offload": "zero-infinity" if swaps else "twin-flow"}
    return {
        "model": _sized(values, max(_POSITIONS, values["batch.seq_len"])),
        "attention": values["attention"] if values["model.flash_attention"] else "unfused",
        "engine": "fsdp" if sharded else engines.get(values["engine.name"], values["engine.name"]),
        "kernels": "transformers" if sharded else "megatron-lm",
        "loop": True,
        "zero_stage": values["zero_stage"],
        "host_share": fraction if offloaded and not swaps else None,
        "host_params": values["offload.params"] == "cpu",
        "stride": values["engine.stride"],
        "gradient_path": f"zero3-{flush}" if offloaded and not swaps else None,
        "subgroup_params": values["engine.subgroup_params"],
        "devices": data_parallel * tensor_parallel * pipeline_parallel,
        "tensor_parallel": tensor_parallel,
        "pipeline_parallel": pipeline_parallel,
        "gpus_per_node": values["parallel.gpus_per_node"],
        "micro_batch": micro_batch,
        "num_micro_batches": global_batch // (micro_batch * data_parallel),
        "seq_len": values["batch.seq_len"],
        "activations": values["activations"],
        "measured": _measured(values) | _only(peak_gpu_allocated_gib=values["measured.peak_gpu_allocated_gb"]),
    }


def _possible(values: Values) -> Iterator[tuple[str, tuple[object, ...]]]:
    """Yield what a field may be beside others."""
    engine, stages = values["engine.name"], values["parallel.pipeline_parallel"]
    if engine == "gpu-only":
        yield "offload.params", ("gpu",)
        yield "offload.optimizer", ("gpu",)
        # Pipeline engines refuse more: every micro-batch would send its gradients again.
        yield "zero_stage", (0, 1) if stages > 1 else (0, 1, 2, 3)
        yield "engine.gradient_flush", (None,)
    else:
        yield "offload.optimizer", ("cpu", "nvme") if engine == "zero3-offload" else ("cpu",)
        yield "parallel.pipeline_parallel", (1,)
        yield "zero_stage", (3,)
        yield "engine.gradient_flush", ("async", "blocking")
    if engine == "gpu-only" or values["offload.optimizer"] == "nvme":
        yield "engine.cpu_optimizer_fraction", (1.0,)
    if engine != "interleaved":
        yield "engine.stride", (None,)
    elif values["engine.stride"] is None:
        raise ValueError("engine.stride is missing, which this engine needs; state it")


def _check_nodes(values: Values, ranks: int, tensor_parallel: int) -> None:
    """Check that ranks fill one node after the other; see [Note: Layout] in :mod:`planner.costs.layout`."""
    nodes, per_node = values["parallel.nodes"], values["parallel.gpus_per_node"]
    if ranks > nodes * per_node:
        raise ValueError(
            f"parallel.data_parallel {values['parallel.data_parallel']} x tensor_parallel {tensor_parallel} x "
            f"pipeline_parallel {values['parallel.pipeline_parallel']} need {ranks} devices, but there are "
            f"{nodes * per_node}; correct it"
        )
    needed = -(-ranks // per_node)
    if nodes > needed:
        raise ValueError(
            f"parallel.nodes is {nodes}, but {ranks} ranks fill {needed} of them with {per_node} devices each; state "
            "how many were used"
        )
    if needed > 1 and per_node % tensor_parallel and tensor_parallel % per_node:
        raise ValueError(
            f"parallel.tensor_parallel is {tensor_parallel}, which on nodes of {per_node} devices spreads some groups "
            "of ranks over two nodes and others not; choose one that divides the other"
        )


# Megatron-LM with all state on the devices of one node, without recomputation. ``gradients`` is the type in which those
# of micro-batches are added up and reduced. Tensor-parallel ranks share the tokens of norms and residuals. The loss is
# TransformerEngine's: ``cef`` stands for ``--cross-entropy-fusion-impl te`` (SimuMax's ``docs/strategy-zh.md``).
_IN_MEMORY: Final[Table] = _RUN | {
    "engine.name": Literal["gpu-only"],
    "engine.zero_stage": Literal[1],
    "engine.gradients": Literal["fp32"],
    "engine.fused_cross_entropy": Literal[True],
    "engine.sequence_parallel": bool,
    "parallel.data_parallel": Number,
    "parallel.tensor_parallel": Number,
    "parallel.pipeline_parallel": Number,
    "parallel.context_parallel": Number,
    "parallel.expert_parallel": Number,
    "seq_len": Number,
    "micro_batch": Number,
    "num_micro_batches": Number,
    "measured.iteration_ms": Amount,
    "measured.peak_gpu_allocated_gib": (Amount | None, None),
    "predicted_by_simumax_ms": (Amount | None, None),
}
_COMMON: Final[Table] = {
    "model.mlp": Literal["swiglu"],
    "model.bias": Literal[False],
    "model.flash_attention": Literal[True],
}
_DENSE: Final[Table] = _SIZES | _IN_MEMORY | _COMMON | {
    "model.architecture": Literal["llama"],
    "parallel.expert_parallel": Literal[1],
}  # fmt: skip
# With multi-head latent attention; ``num_dense_layers`` layers come before those with experts.
_EXPERTS: Final[Table] = _IN_MEMORY | _COMMON | {
    "model.name": str,
    "model.architecture": Literal["deepseek_v2", "deepseek_v3"],
    "model.num_layers": Number,
    "model.num_dense_layers": Annotated[int, Field(ge=0)],
    "model.hidden_size": Number,
    "model.ffn_hidden_size": Number,
    "model.moe_ffn_hidden_size": Number,
    "model.shared_expert_ffn_hidden_size": Number,
    "model.num_experts": Number,
    "model.experts_per_token": Number,
    "model.num_attention_heads": Number,
    "model.q_lora_rank": Number,
    "model.kv_lora_rank": Number,
    "model.qk_nope_head_dim": Number,
    "model.qk_rope_head_dim": Number,
    "model.v_head_dim": Number,
    "model.vocab_size": Number,
    "model.norm": Literal["rmsnorm"],
    "model.tied_embeddings": bool,
}  # fmt: skip


def _in_memory(values: Values, model: ModelConfig) -> Values:
    tensor_parallel, pipeline_parallel = values["parallel.tensor_parallel"], values["parallel.pipeline_parallel"]
    if tensor_parallel > 1 and not values["engine.sequence_parallel"]:  # otherwise there is nothing to share
        raise ValueError("engine.sequence_parallel is False, but only True can be predicted so far")
    replicas = values["parallel.data_parallel"] * values["parallel.context_parallel"]
    return {
        "model": model,
        "engine": "megatron",
        "kernels": "megatron-core",
        "zero_stage": 1,
        "loss_in_place": values["engine.fused_cross_entropy"],
        "precision": {"weights": "bf16", "gradients": "fp32"},
        "nodes": 1,
        "devices": replicas * tensor_parallel * pipeline_parallel,
        "tensor_parallel": tensor_parallel,
        "pipeline_parallel": pipeline_parallel,
        "context_parallel": values["parallel.context_parallel"],
        "expert_parallel": values["parallel.expert_parallel"],
        "measured": _measured(values),
    } | {name: values[name] for name in ("seq_len", "micro_batch", "num_micro_batches", "predicted_by_simumax_ms")}


def _dense(values: Values) -> Values:
    return _in_memory(values, _sized(values, values["seq_len"]))


def _experts(values: Values) -> Values:
    sizes = {path.removeprefix("model."): value for path, value in values.items() if path.startswith("model.")}
    same = (
        "name", "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "vocab_size", "mlp", "norm",
        "tied_embeddings", "num_experts", "experts_per_token", "shared_expert_ffn_hidden_size",
    )  # fmt: skip
    latent = ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "v_head_dim")
    model = ModelConfig(
        family="deepseek",
        num_key_value_heads=sizes["num_attention_heads"],
        head_dim=sizes["qk_nope_head_dim"] + sizes["qk_rope_head_dim"],
        max_positions=values["seq_len"],
        word_embed_proj_dim=sizes["hidden_size"],
        expert_ffn_hidden_size=sizes["moe_ffn_hidden_size"],
        dense_layers=tuple(range(min(sizes["num_dense_layers"], sizes["num_layers"]))),
        latent=LatentAttention(**{name: sizes[name] for name in latent}),
        **{name: sizes[name] for name in same},
    )
    return _in_memory(values, model)


# ShadowSpill (als244/dataflow) on one device. ``master`` is ``null``: weights are their own master copy.
# ``over_their_prediction`` is the measured iteration over the one that the engine itself predicts.
_STREAMED: Final[Table] = _RUN | _SIZES | {
    "engine.name": Literal["dataflow"],
    "engine.optimizer": Literal["adamw", "muon"],
    "engine.optimizer_on": Literal["gpu"],
    "engine.clip": Literal[False],
    "engine.attention": Literal["flash-attention-2", "flash-attention-3"],
    "engine.loss": Literal["head and loss in chunks of tokens"],
    "engine.state.weights": Literal["bf16"],
    "engine.state.gradients": Literal["bf16"],
    "engine.state.moments": Literal["bf16"],
    "engine.state.master": None,
    "seq_len": Number,
    "tokens_per_round": Number,
    "tokens_per_step": Number,
    "device_budget_gib": Annotated[float, Field(gt=0, le=10_000)],
    "measured.tokens_per_s": Amount,
    "measured.over_their_prediction": (Amount | None, None),
}  # fmt: skip


def _streamed(values: Values) -> Values:
    seq_len, round_, step = values["seq_len"], values["tokens_per_round"], values["tokens_per_step"]
    for name, whole, part in (("tokens_per_round", round_, seq_len), ("tokens_per_step", step, round_)):
        if whole % part:
            raise ValueError(f"{name} is {whole}, but must be a multiple of {part}; correct it")
    return {
        "model": _sized(values, max(_POSITIONS, seq_len)),
        "attention": values["engine.attention"] if values["model.flash_attention"] else "unfused",
        "engine": "streaming",
        "kernels": "dataflow",
        "precision": {"weights": "bf16", "state": "bf16"},
        "optimizer": values["engine.optimizer"],
        "clip": False,
        "gpus_per_node": 1,
        "micro_batch": round_ // seq_len,
        "num_micro_batches": step // round_,
        "seq_len": seq_len,
        "device_budget_gib": values["device_budget_gib"],
        "measured": {"tokens_per_s": values["measured.tokens_per_s"]},
        "over_their_prediction": values["measured.over_their_prediction"],
    }


# LoHan (Ratel) on one consumer GPU: a batch, and as many NVMe drives, out of those of the machine.
_SWAPPED: Final[Table] = _RUN | {
    "model": Annotated[str, Field(min_length=1)],
    "batch": Number,
    "ssds": Number,
    "measured.tflops": Amount,
}
MODEL_SIZES: Final[dict[str, tuple[int, int, int]]] = {
    "6b": (28, 32, 4096),
    "13b": (40, 40, 5120),
    "30b": (48, 56, 7168),
    "70b": (80, 64, 8192),
    "135b": (88, 88, 11264),
    "175b": (96, 96, 12288),
    "276b": (112, 112, 14336),
    "412b": (128, 128, 16384),
}
"""Of LoHan's models, whose published data give names only: the layers, heads and hidden sizes that GPT-like models of
such names usually have (GPT-3's, arXiv 2005.14165, table 2.1, and its like). They are assumed, as are GPT-2's
vocabulary and length of sequences for all of them."""
_GPT2_VOCAB_SIZE: Final = 50257
_GPT2_SEQ_LEN: Final = 1024


def _swapped(values: Values) -> Values:
    name = values["model"]
    if name not in MODEL_SIZES:
        raise ValueError(f"model is {name!r}, whose sizes are unknown; it may be {', '.join(MODEL_SIZES)}")
    num_layers, num_heads, hidden_size = MODEL_SIZES[name]
    sizes = {
        "num_layers": num_layers,
        "num_attention_heads": num_heads,
        "hidden_size": hidden_size,
        "ffn_hidden_size": 4 * hidden_size,
        "vocab_size": _GPT2_VOCAB_SIZE,
        "max_positions": _GPT2_SEQ_LEN,
        "mlp": "gelu",
        "norm": "layernorm",
        "tied_embeddings": True,
    }
    bias = dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), True)
    return {
        "model": build(sizes | bias, name, "gpt2"),
        "engine": "ratel",
        "clip": False,
        "gpus_per_node": 1,
        "ssds": values["ssds"],
        "micro_batch": values["batch"],
        "seq_len": _GPT2_SEQ_LEN,
        "measured": {"tflops": values["measured.tflops"]},
    }


def _measured(values: Values) -> Values:
    """Return what was measured that a case calls the same."""
    names = ("forward_ms", "backward_ms", "update_ms", "iteration_ms", "peak_gpu_allocated_gib")
    return _only(**{name: values.get(f"measured.{name}") for name in names})


def _only(**fields: Any) -> Values:
    return {name: value for name, value in fields.items() if value is not None}


_LAYOUTS: Final[tuple[tuple[Table, Callable[[Values], Values]], ...]] = (
    (_SWAPPED, _swapped),
    (_STREAMED, _streamed),
    (_TRAINED, _trained),
    (_DENSE, _dense),
    (_EXPERTS, _experts),
)
_CHECKPOINTS: Final = {field.alias or name: field for name, field in CheckpointCase.model_fields.items()}


def read_case(entry: Values) -> Case:
    """Return the run that an entry of a file states.

    Raises:
        CaseError: a field is unknown, missing or wrong, or contradicts another.
    """
    try:
        return _read(entry)
    except ValidationError as error:
        # An unknown field says more than the field that is missing instead of it.
        details = error.errors(include_url=False)
        first = min(details, key=lambda detail: (detail["type"] != "extra_forbidden", len(detail["loc"])))
        field = ".".join(str(part) for part in first["loc"]) or "the case"
        rule = first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            rule = "such a field cannot be predicted from"
        elif isinstance(first["input"], (str, int, float)):
            rule += f", not {str(first['input'])[:40]!r}"
        raise CaseError(f"case {entry.get('id')}: {field}: {rule}; correct the case, or leave it out") from error
    except ValueError as error:
        raise CaseError(f"case {entry.get('id')}: {error}") from error


def _read(entry: Values) -> Case:
    values = dict(flat(entry))
    # In the layout with most of these fields: then the error names the field that is missing or misspelt.
    tables: list[Table] = [*(table for table, _ in _LAYOUTS), _CHECKPOINTS, TrainingCase.model_fields]
    at = max(range(len(tables)), key=lambda at: _shared(tables[at], entry, values))
    table = tables[at]
    if table is TrainingCase.model_fields:
        return TrainingCase.model_validate(entry)
    for path in values.keys() - table.keys():
        if any(known.startswith(f"{path}.") for known in table):
            raise ValueError(f"{path} must be an object with fields of its own; correct the case, or leave it out")
    if table is _CHECKPOINTS:
        return CheckpointCase.model_validate(values)
    found = _checked(table, values)
    return TrainingCase.model_validate({name: found[name] for name in _RUN} | _LAYOUTS[at][1](found))


def _shared(table: Table, entry: Values, values: Values) -> tuple[int, int]:
    """Return how many of a layout's fields an entry has: of the outermost ones, and of all."""
    return len({path.split(".")[0] for path in table} & entry.keys()), len(table.keys() & values.keys())


def flat(entry: Values, outer: str = "") -> Iterator[tuple[str, Any]]:
    """Yield values with their paths."""
    for name, value in entry.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{outer}{name}.")
        else:
            yield f"{outer}{name}", value


def _checked(table: Table, values: Values) -> Values:
    """Return the values of all fields of a layout, in its types."""
    fields: Values = {}
    for at, (path, kind) in enumerate(table.items()):
        type_, default = kind if isinstance(kind, tuple) else (kind, ...)
        fields[f"field_{at}"] = (type_, Field(default, alias=path))
    config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    return create_model("Layout", __config__=config, **fields).model_validate(values).model_dump(by_alias=True)
