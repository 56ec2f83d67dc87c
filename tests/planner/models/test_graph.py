import itertools
import math
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from one_thread import one_thread  # noqa: F401 - of all tests here
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop, sdpa_flop
from transformers import AutoConfig, AutoModelForCausalLM

from executor.module.tiled_layers import tile_modules
from executor.module.tiled_logits import tile_head
from planner.graph import Attention, Batch, Elementwise, Gemm, Kernels, Pattern, Unit, build_graph, units
from planner.models import (
    ModelConfig,
    from_hf_config,
    models_with_formulas,
    parameters,
    resolve_model,
    to_hf_config_dict,
)
from planner.models.kernels import flop
from planner.models.parameters import layer_path

aten = torch.ops.aten
ATTENTION = {"_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward"}
PRODUCTS = {"mm", "addmm", "bmm", "_grouped_mm"} | ATTENTION
# Bookkeeping that moves no data; is_view says the rest.
FREE = {"detach", "_unsafe_view", "empty", "new_empty", "new_empty_strided", "_reshape_alias", "alias"}

SMALL = {"num_hidden_layers": 2, "hidden_size": 96, "num_attention_heads": 4, "vocab_size": 160}
RMS = SMALL | {"intermediate_size": 256, "num_key_value_heads": 2, "max_position_embeddings": 128}
MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
OPT = SMALL | {"model_type": "opt", "ffn_dim": 384, "max_position_embeddings": 128}
GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 96, "n_head": 4, "n_positions": 128, "vocab_size": 160}
FAMILIES = {
    "llama": RMS | {"model_type": "llama"},
    "gpt2": GPT2,
    "gpt2-fused-gelu": GPT2 | {"activation_function": "gelu"},
    "opt": OPT,
    "opt-projected": OPT | {"word_embed_proj_dim": 32, "do_layer_norm_before": False},
    "mistral": RMS | {"model_type": "mistral"},
    "qwen2": RMS | {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": RMS | {"model_type": "qwen3", "head_dim": 32},
    "mixtral": RMS | {"model_type": "mixtral", "num_local_experts": 4},
    "qwen3_moe": RMS | MOE | {"model_type": "qwen3_moe", "head_dim": 32, "mlp_only_layers": [0]},
}
WIDE = {"hidden_size": 160, "intermediate_size": 320}
VARIED = FAMILIES | {
    "llama-wide": FAMILIES["llama"] | WIDE,
    "opt-wide": OPT | {"hidden_size": 160, "ffn_dim": 320},
    "gpt2-wide": GPT2 | {"n_embd": 160, "n_inner": 320},
}
DTYPES = {2: torch.bfloat16, 4: torch.float32}
BATCHES = [Batch(2, 64, 2), Batch(3, 32, 4), Batch(1, 128, 2, flash_attention=False), Batch(2, 64, 4, False)]


def make(name: str, batch: Batch, **changes: int) -> tuple[ModelConfig, Any, torch.Tensor]:
    config = from_hf_config(VARIED[name] | changes, name)
    torch.manual_seed(0)
    attention = "sdpa" if batch.flash_attention else "eager"
    hf_config = AutoConfig.for_model(**to_hf_config_dict(config))
    model = AutoModelForCausalLM.from_config(hf_config, attn_implementation=attention, dtype=DTYPES[batch.dtype_bytes])
    if batch.loss_tile_tokens:
        tile_head(model, batch.loss_tile_tokens)
    if batch.layer_tile_tokens:
        operators = build_graph(config, batch)
        tile_modules([model.get_submodule(o.name) for o in operators if o.in_tiles], batch.layer_tile_tokens)
    return config, model.train(), torch.randint(config.vocab_size, (batch.micro_batch, batch.seq_len))


def layer_of(config: ModelConfig, model: Any, index: int) -> torch.nn.Module:
    return model.get_submodule(layer_path(config, index))


def of_layer(result: tuple[Unit, ...], index: int) -> list[Unit]:
    return [unit for unit in result if unit.segment == f"layers.{index}"]


def elementwise_bytes(kernels: Kernels) -> int:
    return sum(kernel.num_bytes * kernel.count for kernel in kernels if isinstance(kernel, Elementwise))


def gemm_flop(kernels: Kernels) -> int:
    return sum(kernel.flop for kernel in kernels if isinstance(kernel, Gemm))


def moved_bytes(tensor: torch.Tensor) -> int:
    """Bytes behind a tensor: an expanded dimension is read once."""
    return math.prod(n for n, s in zip(tensor.shape, tensor.stride(), strict=True) if s) * tensor.element_size()


class Traffic(TorchDispatchMode):
    """Adds up, per stretch of the program, what elementwise kernels move, and lists the products."""

    def __init__(self) -> None:
        super().__init__()
        self.where = "outside"
        self.num_bytes: defaultdict[str, int] = defaultdict(int)
        self.products: defaultdict[str, list[str]] = defaultdict(list)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in PRODUCTS:
            self.products[self.where].append(name)
        elif not func.is_view and name not in FREE:
            read = [moved_bytes(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            written = [moved_bytes(t) for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
            total = sum(read) + sum(written)
            if name == "slice_backward":  # fills its output, then copies its input
                total = written[0] + 2 * read[0]
            elif name == "index":  # reads the chosen rows only
                total = 2 * written[0] + sum(read[1:])
            elif name == "copy_":  # does not read what it replaces
                total = read[1] + written[0]
            elif name == "native_layer_norm_backward":  # once for the input, once for weight and bias
                total += read[0] + read[1]
            self.num_bytes[self.where] += total
        return out


@contextmanager
def tracing(config: ModelConfig, model: Any) -> Iterator[Traffic]:
    """Trace forward and backward of the last layer, told from the rest by hooks."""
    traffic, layer = Traffic(), layer_of(config, model, config.num_layers - 1)

    def at(where: str) -> Any:
        return lambda *_: setattr(traffic, "where", where)

    handles = [
        layer.register_forward_pre_hook(at("forward")),
        layer.register_forward_hook(at("outside")),
        layer.register_full_backward_pre_hook(at("backward")),
        layer.register_full_backward_hook(at("outside")),
    ]
    with traffic:
        yield traffic
    for handle in handles:
        handle.remove()


CASES = [(name, Batch(2, 64, 2)) for name in FAMILIES]
CASES += [(name, Batch(2, 64, 4)) for name in ("llama", "gpt2", "opt", "mixtral")]
CASES += [(name, Batch(2, 64, e, loss_tile_tokens=30)) for name, e in (("llama", 2), ("gpt2", 4))]
CASES += [(name, Batch(2, 64, e, layer_tile_tokens=30)) for name, e in (("llama", 2), ("qwen3", 4))]


def _id(name: str, batch: Batch) -> str:
    tiles = "-loss-tiled" * bool(batch.loss_tile_tokens) + "-layers-tiled" * bool(batch.layer_tile_tokens)
    return f"{name}-{batch.dtype_bytes}B{tiles}"


IDS = [_id(name, batch) for name, batch in CASES]


@pytest.mark.parametrize(("name", "batch"), CASES, ids=IDS)
def test_flop_equals_the_flop_counter(name: str, batch: Batch) -> None:
    config, model, ids = make(name, batch)
    counted: defaultdict[bool, int] = defaultdict(int)

    def attention(*args: Any, out_shape: Any = None, **_: Any) -> int:  # noqa: ARG001
        return sdpa_flop(args[0], args[0], args[0])  # the counter's formula wants as many key heads as query heads

    def attention_backward(*args: Any, out_shape: Any = None, **_: Any) -> int:  # noqa: ARG001
        return sdpa_backward_flop(*([args[0]] * 4))

    def grouped(a: Any, b: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:  # noqa: ARG001
        return 2 * a[0] * a[1] * b[-1]  # each row meets one matrix

    mapping = {
        aten._scaled_dot_product_flash_attention_for_cpu: attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward,
        aten._grouped_mm: grouped,
    }
    fused = {
        aten._scaled_dot_product_flash_attention_for_cpu,
        aten._scaled_dot_product_flash_attention_for_cpu_backward,
    }
    counter = FlopCounterMode(display=False, custom_mapping=mapping)
    with counter:
        loss = model(input_ids=ids, labels=ids).loss
    for function, count in counter.get_flop_counts()["Global"].items():
        counted[function in fused] += count
    result = units(build_graph(config, batch))
    forward = tuple(kernel for unit in result for kernel in unit.forward)
    assert gemm_flop(forward) == counted[False]
    # The counter does not know that a causal kernel skips half.
    assert sum(kernel.flop for kernel in forward if isinstance(kernel, Attention)) * 2 == counted[True]
    assert sum(flop(unit.forward) for unit in result) == counted[False] + counted[True] // 2

    counter = FlopCounterMode(display=False, custom_mapping=mapping)
    with counter:
        loss.backward()
    backward = tuple(kernel for unit in result for kernel in unit.backward)
    counts = counter.get_flop_counts()["Global"]
    assert gemm_flop(backward) == sum(count for function, count in counts.items() if function not in fused)
    assert sum(kernel.flop for kernel in backward if isinstance(kernel, Attention)) * 2 == sum(
        count for function, count in counts.items() if function in fused
    )


@pytest.mark.parametrize(("name", "batch"), CASES, ids=IDS)
def test_elementwise_bytes_of_a_layer(name: str, batch: Batch) -> None:
    config, model, ids = make(name, batch)
    with tracing(config, model) as traffic:
        model(input_ids=ids, labels=ids).loss.backward()
    layer = of_layer(units(build_graph(config, batch)), config.num_layers - 1)
    forward = sum(elementwise_bytes(unit.forward) for unit in layer)
    backward = sum(elementwise_bytes(unit.backward) for unit in layer)
    assert forward == pytest.approx(traffic.num_bytes["forward"], rel=0.05)
    assert backward == pytest.approx(traffic.num_bytes["backward"], rel=0.05)


def saved_by_layer(config: ModelConfig, model: Any, ids: torch.Tensor) -> list[int]:
    """Bytes of the storages that each layer is the first to save, parameters excluded."""
    seen: dict[int, torch.UntypedStorage] = {
        p.untyped_storage().data_ptr(): p.untyped_storage() for p in model.parameters()
    }
    where, saved = [-1], defaultdict(int)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen[storage.data_ptr()] = storage  # held, so that its address is not given away again
            saved[where[0]] += storage.nbytes()
        return tensor

    for name, module in model.named_modules():
        if name.endswith("rotary_emb"):  # the first layer saves its factors, but all share them
            module.register_forward_hook(lambda *args: [pack(tensor) for tensor in args[-1]] and None)
    for index in range(config.num_layers):
        layer = layer_of(config, model, index)
        layer.register_forward_pre_hook(lambda *_, index=index: where.__setitem__(0, index))
        layer.register_forward_hook(lambda *_: where.__setitem__(0, -1))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(input_ids=ids, labels=ids)
    return [saved[index] for index in range(config.num_layers)] + [saved[-1]]


@pytest.mark.parametrize(
    ("name", "batch"),
    [
        *itertools.product(VARIED, BATCHES[:2]),
        *CASES[-4:],
        *itertools.product(("llama", "gpt2", "opt", "mixtral"), BATCHES[2:]),
    ],
    ids=str,
)
def test_saved_bytes_are_what_autograd_saves(name: str, batch: Batch) -> None:
    config, model, ids = make(name, batch)
    *layers, outside = saved_by_layer(config, model, ids)
    if batch.loss_tile_tokens:  # the gradient of the head's weight, which counts in backward
        outside -= model.get_output_embeddings().weight.nbytes
    result = units(build_graph(config, batch))
    for index, saved in enumerate(layers):
        assert sum(unit.saved_bytes for unit in of_layer(result, index)) == pytest.approx(saved, rel=0.02)
    assert result[0].saved_bytes + result[-1].saved_bytes == pytest.approx(outside, rel=0.05)


@pytest.mark.parametrize(
    ("name", "e", "vocab"),  # with few words a layer decides, with many the loss
    [*((name, 2, 64) for name in FAMILIES), ("llama", 4, 64), ("opt", 4, 64), ("llama", 2, 4000), ("gpt2", 4, 4000)],
)
def test_peak_memory_is_saved_bytes_and_workspace(name: str, e: Any, vocab: int) -> None:
    batch = Batch(4, 128, e)
    config, model, ids = make(name, batch, vocab_size=vocab)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    tracker = MemTracker()
    tracker.track_external(model)
    with tracker:
        model(input_ids=ids, labels=ids).loss.backward()
    (peak,) = tracker.get_tracker_snapshot("peak").values()
    counted = {str(kind).rpartition(".")[2]: num_bytes for kind, num_bytes in peak.items()}
    measured = sum(counted[kind] for kind in ("ACT", "TEMP"))
    result = units(build_graph(config, batch))
    hidden_bytes = batch.num_tokens * config.hidden_size * e
    held = itertools.accumulate(unit.saved_bytes for unit in result)
    predicted = max(saved + unit.workspace_bytes + 2 * hidden_bytes for saved, unit in zip(held, result, strict=True))
    assert predicted == pytest.approx(measured, rel=0.13)


@pytest.mark.parametrize(("name", "batch"), CASES, ids=IDS)
def test_recompute_is_what_checkpointing_reruns(name: str, batch: Batch) -> None:
    config, model, ids = make(name, batch)
    traffics = []
    for recompute in (False, True):
        if recompute:
            model.activation_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
        with Traffic() as traffic:
            model(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad()
        traffics.append(traffic)
    plain, rerun = traffics
    result = units(build_graph(config, batch))
    kernels = [kernel for unit in result for kernel in unit.recompute]
    num_bytes = rerun.num_bytes["outside"] - plain.num_bytes["outside"]
    assert elementwise_bytes(tuple(kernels)) == pytest.approx(num_bytes, rel=0.05)
    num_products = len(rerun.products["outside"]) - len(plain.products["outside"])
    assert sum(isinstance(kernel, Gemm | Attention) for kernel in kernels) == num_products
    for unit in result[1:-1]:
        assert unit.forward[: len(unit.recompute)] == unit.recompute


@pytest.mark.parametrize("name", VARIED)
def test_units_hold_every_parameter_once_in_order_of_use(name: str) -> None:
    config, model, ids = make(name, Batch(2, 16))
    used: list[str] = []
    for path, module in model.named_modules():
        own = [f"{path}.{leaf}" for leaf, _ in module.named_parameters(recurse=False)]
        module.register_forward_pre_hook(lambda *_, own=own: used.extend(n for n in own if n not in used))
    model(input_ids=ids, labels=ids)
    result = units(build_graph(config, Batch(2, 16)))
    owned = [spec.name for unit in result for spec in unit.parameters]
    real = dict(model.named_parameters())
    assert owned == [path for path in used if path in real]
    assert set(owned) == set(real)
    assert sum(unit.num_params for unit in result) == sum(parameter.numel() for parameter in real.values())
    for unit in result:
        assert [spec for operator in unit.operators for spec in operator.parameters] == list(unit.parameters)


@pytest.mark.parametrize("name", models_with_formulas())
def test_graph_of_every_preset(name: str) -> None:
    config = resolve_model(name)
    operators = build_graph(config, Batch(1, 1024))
    result = units(operators)
    assert [unit.name for unit in result] == [
        "embed",
        *(f"layers.{layer}.{part}" for layer in range(config.num_layers) for part in ("attn", "mlp")),
        "head",
    ]
    assert result[-1].shared_units == (("embed",) if config.tied_embeddings else ())
    assert sorted(spec.name for unit in result for spec in unit.parameters) == sorted(
        p.name for p in parameters(config)
    )
    assert len({operator.name for operator in operators}) == len(operators)
    assert operators[-1].name == "loss"
    assert all(operator.output_bytes > 0 for operator in operators)
    hidden_bytes = 1024 * config.hidden_size * 2
    assert {unit.activation_output_bytes for unit in result[:-1]} == {hidden_bytes}
    # A matrix product costs 2 FLOP per parameter and token, but for experts that are not chosen and look-ups.
    backward = sum(flop(unit.backward) for unit in result)
    forward = sum(flop(unit.forward) for unit in result)
    assert 2 < backward / forward < 2.5
    for operator in operators:
        assert (operator.pattern is Pattern.SHARD) <= (not operator.parameters)
        assert (operator.pattern is Pattern.EXPERT) == (operator.kind == "experts")


@given(
    micro_batch=st.integers(1, 4),
    seq_len=st.integers(1, 128),
    e=st.sampled_from([2, 4]),
    flash=st.booleans(),
    name=st.sampled_from([name for name in VARIED if "mix" not in name and "moe" not in name]),
)
@settings(deadline=None)
def test_layers_scale_with_the_micro_batch(micro_batch: int, seq_len: int, e: Any, flash: bool, name: str) -> None:
    config = from_hf_config(VARIED[name], name)
    one = units(build_graph(config, Batch(1, seq_len, e, flash)))[1:-1]
    many = units(build_graph(config, Batch(micro_batch, seq_len, e, flash)))[1:-1]
    for a, b in zip(one, many, strict=True):
        assert b.saved_bytes == micro_batch * a.saved_bytes
        assert flop(b.forward) == micro_batch * flop(a.forward)
        assert flop(b.backward) == micro_batch * flop(a.backward)
        assert elementwise_bytes(b.forward) == micro_batch * elementwise_bytes(a.forward)
        assert elementwise_bytes(b.backward) == micro_batch * elementwise_bytes(a.backward)


def test_equal_layers_share_their_kernels() -> None:
    result = units(build_graph(resolve_model("opt-125m"), Batch(1, 128)))
    first, later = of_layer(result, 0), of_layer(result, 7)
    for a, b in zip(first, later, strict=True):
        assert all(
            x.forward is y.forward and x.backward is y.backward for x, y in zip(a.operators, b.operators, strict=True)
        )


def test_bad_batches_are_refused() -> None:
    for arguments in ((0, 8), (1, -1), (1, 8, 3)):
        with pytest.raises(ValueError, match="but must be"):
            Batch(*arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="2049 exceeds the 2048 positions"):
        build_graph(resolve_model("opt-125m"), Batch(1, 2049))
