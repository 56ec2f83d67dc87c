"""Runs as collections state them: in words that differ from source to source.

A collection has a ``tier`` for each run, and describes its machines in words. What it says of an engine, of types and
of memory is translated by the rules below, after a translation by hand that was written down before any run was
predicted; what a run says beyond them is listed as not read. A run is left out, with the reason, if nothing here is
like its machine or engine.
"""

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, get_args

from pydantic import ValidationError

from hwprofiles.registry import list_profiles, load_profile
from planner.models.registry import configuration
from ullage.rivals.cases.base import Case, CaseError
from ullage.rivals.cases.capacity import STEP_TOKENS, CapacityCase
from ullage.rivals.cases.layouts import flat, read_case
from ullage.rivals.cases.rates import AttentionKernel
from ullage.rivals.cases.training import TrainingCase
from ullage.rivals.engines.catalogue import POLICIES

Values = dict[str, Any]

# Profiles by the beginnings of machines' names, the longest first that fits; and what differs then.
_OTHER_HOST: Final = "another host, which the source does not state"
_MACHINES: Final[dict[str, tuple[str, str]]] = {
    "a100-80": ("a100-80", ""),
    "a100x2-40g": ("a100-40", ""),
    "a100-40": ("a100-40", ""),
    "a800": ("a800-80", ""),
    "b200": ("b200", ""),
    "b300": ("b300", ""),
    "gb10": ("gb10", ""),
    "gb200": ("gb200", ""),
    "gh200": ("gh200", ""),
    "h100": ("h100", _OTHER_HOST),
    "h100x8": ("h100", ""),
    "h200": ("h200", ""),
    "l40s": ("l40s", _OTHER_HOST),
    "mi300x": ("mi300x", ""),
    "2x4090": ("rtx-4090x8", _OTHER_HOST),
    "rtx3090": ("rtx-3090", _OTHER_HOST),
    "rtx4090": ("rtx-4090", "another host, with more memory"),
    "rtx4090-llmq": ("rtx-4090x8", _OTHER_HOST),
    "rtx4090x": ("rtx-4090x8", _OTHER_HOST),
    "rtx5060ti": ("rtx-5060-ti", _OTHER_HOST),
    "rtx5090": ("rtx-5090", _OTHER_HOST),
    "rtxa6000": ("rtx-a6000", _OTHER_HOST),
    "rtxpro6000": ("rtx-pro-6000", _OTHER_HOST),
    "v100": ("v100", _OTHER_HOST),
}
# Desktops, and servers with the same device: a run whose host held more than a desktop has was on a server.
_SERVERS: Final = {"rtx-4090": "rtx-4090x8"}
_UNSTATED: Final[dict[str, str]] = {
    "h100x4-mlpoffload": "the rate of its drives is not stated",
    "2x3090": "the rate of its PCIe is not stated, and the profile of RTX 3090 is of one device",
    "rtx5090x4": "how four RTX 5090 are connected is not stated",
}
# Architectures whose ``config.json`` follows from the sizes, with their names in ``transformers``.
_FAMILIES: Final = {"llama": "llama", "mistral": "mistral", "qwen": "qwen2", "qwen2": "qwen2", "qwen3": "qwen3"}
# Architectures with all experts of a layer in one parameter. RoundPipe (``models/gpt_oss.py``), and ``transformers`` 4
# beside which it was measured, take them one after the other: each one's gradient is as large as all of them.
_BANKS: Final = ("gpt_oss", "gpt-oss-20b", "gpt-oss-120b")
# NeMo's configurations of Llama (``llm/gpt/model/llama.py``) have no vocabulary of their own. They take that of the
# data's tokenizer, which is GPT-2's in runs with mock data.
_NEMO_VOCAB: Final = 50_257
_PROJECTIONS: Final = {
    "output_proj": "o_proj",
    "mlp": "gate_proj+up_proj+down_proj",
    "attention": "q_proj+k_proj+v_proj+o_proj",
}
_SAVED: Final = {"wte": "embed_tokens", "lm_head": "lm_head", "output": "lm_head", "tok_embeddings": "embed_tokens"}
_QWEN_LINEAR: Final = {"c_attn", "c_proj", "w1", "w2"}  # all projections of Qwen's first models
_LOSS_TILE: Final = 1024  # tokens, where the loss is in chunks
_TORCHTUNE_CHUNKS: Final = 8
# What was measured of memory, in which unit, and of what: tensors, or, where the source does not say, the process.
_PEAKS: Final = (
    ("peak_gpu_allocated_gib", 2**30, "allocated"),
    ("peak_gpu_gib", 2**30, "allocated"),
    ("peak_gpu_allocated_gb", 10**9, "allocated"),
    ("peak_gpu_gb", 10**9, "process"),
)
_NUMBERS: Final = re.compile(
    r"(parallel|batch|host_link)\.\w+"
    r"|measured\.(iteration_ms|tokens_per_s|tflops|host_gb|peak_gpu_\w*g(i)?b|max_seq_thousands)"
    r"|model\.(num_\w+|\w+_size|head_dim)|lora\.rank|engine\.(zero_stage|prefetch_bucket|persistence_threshold)"
    r"|zero_stage|ssds|devices|device_budget_gib|micro_batch"
)
_TEXTS: Final = {"id", "hardware", "source", "note", "system", "model.name", "engine.name", "precision", "activations"}
# Fields that say nothing of how a run is predicted, or say again what others do.
_WORDS: Final = re.compile(
    r"id|tier|core|source|note|hardware|model\..*|parallel\.(gpus_per_node|nodes)"
    r"|batch\.(global_batch|tokens_per_\w+|accumulation)|lora\.(alpha|factors|frozen|trainable_m)|measured\..*"
    r"|host_link\.latency_us|host_budget_gib"
    r"|engine\.(framework|wrapper|state\.\w+|recomputed_choices|optimizer_on|gradient_flush|cuda_graphs)"
)


class LeftOutError(CaseError):
    """A run that nothing here is like; the message is the reason."""


class _Stated:
    """What a run states, by dotted paths; it notes what was asked for.

    Raises:
        LeftOutError: a number or a word is something else.
    """

    def __init__(self, entry: Values) -> None:
        self._values = dict(flat(entry))
        self._read: set[str] = set()
        for path, value in self._values.items():
            kind = float | int if _NUMBERS.fullmatch(path) else str if path in _TEXTS else object
            if value is not None and (not isinstance(value, kind) or (kind is not object and isinstance(value, bool))):
                raise LeftOutError(f"{path} is {value!r}, but must be a {'word' if kind is str else 'number'}")

    def __call__(self, path: str, otherwise: Any = None) -> Any:
        self._read.add(path)
        value = self._values.get(path)
        return otherwise if value is None else value

    @property
    def unread(self) -> list[str]:
        """Paths that were not asked for, and may matter."""
        return sorted(path for path in self._values.keys() - self._read if not _WORDS.fullmatch(path))


def read_collected(entry: Mapping[str, Any], machines: Mapping[str, str]) -> Case:
    """Return a run of a collection as a case.

    Args:
        entry: the run.
        machines: the collection's words for its machines, by name.

    Raises:
        LeftOutError: there is no profile or engine for it, or it does not state enough.
    """
    stated = _Stated(dict(entry))
    with _left_out():
        if stated("ssds"):
            return _swapped(stated)
        return _translated(stated, machines)


def read_capacity(entry: Mapping[str, Any], machines: Mapping[str, str]) -> Case:
    """Return the longest sequence that a system trained as a case.

    Args:
        entry: the machine, the system, the name of the model, and thousands of tokens.
        machines: the collection's words for its machines, by name.

    Raises:
        LeftOutError: there is no profile or engine for it, or it does not state enough.
    """
    stated = _Stated(dict(entry))
    system, machine = stated("system"), stated("hardware", "")
    if (longest := stated("measured.max_seq_thousands")) is None:
        raise LeftOutError("no longest sequence is stated")
    if system not in _SYSTEMS:
        raise LeftOutError(f"there is no row for system {system}")
    count = re.search(r"\dx(\d+)", machine)
    devices = int(count[1]) if count else 1
    run = {
        "id": stated("id"),
        "hardware": machine,
        "source": stated("source"),
        "model": {"name": stated("model")},  # of a packaged configuration
        "batch": {"micro_batch": stated("micro_batch", 1), "seq_len": longest * STEP_TOKENS},
        "activations": "recompute",
        "measured": {"iteration_ms": 1.0},  # which nobody looks at
    }
    added = _SYSTEMS[system](devices) | ({"lora": adapters} if (adapters := _ADAPTED.get(stated("model"))) else {})
    for name, value in added.items():
        run[name] = run.get(name, {}) | value
    with _left_out():
        translated = _translated(_Stated(run), machines)
        fields = {name: getattr(translated, name) for name in ("id", "hardware", "source")}
        return CapacityCase.model_validate(fields | {"run": translated, "longest": longest})


@contextlib.contextmanager
def _left_out() -> Iterator[None]:
    """Make of what a case refuses the reason for which it is left out."""
    try:
        yield
    except ValidationError as error:
        first = error.errors()[0]
        raise LeftOutError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def _sharded(name: str, stage: int, **engine: Any) -> Callable[[int], Values]:
    made = {"name": name, "zero_stage": stage, "loss": "whole logits"} | engine
    return lambda devices: {"engine": made, "parallel": {"data_parallel": devices}}


def _divided(kind: str) -> Callable[[int], Values]:
    made = {"name": "gpu-only", "framework": "Megatron (NeMo)", "sequence_parallel": False}  # its default
    return lambda devices: {"engine": made, "parallel": {kind: devices}, "batch": {"num_micro_batches": _SEQUENCES}}


# Sequences of an iteration with which RoundPipe's artifact looked for the longest (``megatron/run.sh``): each is a
# micro-batch, and a pipeline's first stage holds all of them.
_SEQUENCES: Final = 8
# Models of which it trained adapters (``deepspeed/train-lora.py``, ``roundpipe/train_lora.py``).
_ADAPTED: Final[dict[str, Values]] = {"qwen3-235b-a22b": {"rank": 32, "targets": "all linear"}}

# What RoundPipe's artifact compared, in the words of its runs; by the number of devices.
_SYSTEMS: Final[dict[str, Callable[[int], Values]]] = {
    "zero-infinity": _sharded(
        "zero-offload", 3, offload_param=True, prefetch_bucket=500_000_000, persistence_threshold=1_000_000
    ),
    "zero2": _sharded("gpu-only", 2),
    "fsdp1": _sharded("gpu-only", 3, wrapper="FSDP"),
    "megatron-pp": _divided("pipeline_parallel"),
    "megatron-tp": _divided("tensor_parallel"),
    "roundpipe": _sharded("roundpipe", 0, asynchronous_update=True),
    "roundpipe-sync": _sharded("roundpipe", 0, asynchronous_update=False),
}


def _swapped(stated: _Stated) -> Case:
    if (count := stated("devices", 1)) != 1:
        raise LeftOutError(f"there is no row of this engine for {count} devices")
    names = ("id", "hardware", "source", "model", "batch", "ssds")
    return read_case({name: stated(name) for name in names} | {"measured": {"tflops": stated("measured.tflops")}})


def _translated(stated: _Stated, machines: Mapping[str, str]) -> Case:
    machine = stated("hardware", "")
    profile, differs = _profile(machine)
    held_bytes = stated("measured.host_gb", 0) * 10**9
    if profile in _SERVERS and held_bytes > load_profile(profile).host.memory_bytes.value:
        profile = _SERVERS[profile]
    ranks = [stated(f"parallel.{kind}_parallel", 1) for kind in ("data", "tensor", "pipeline")]
    devices = ranks[0] * ranks[1] * ranks[2]
    micro_batch, num_micro_batches = _batch(stated, ranks[0])
    fields: Values = {
        "id": stated("id"),
        "hardware": profile,
        "machine": machines.get(machine, ""),
        "source": stated("source"),
        "note": stated("note", ""),
        "model": _model(stated),
        "lora": _lora(stated),
        "quantize": _quantized(stated),
        "devices": devices,
        "tensor_parallel": ranks[1],
        "pipeline_parallel": ranks[2],
        "sequence_parallel": stated("engine.sequence_parallel"),
        "micro_batch": micro_batch,
        "num_micro_batches": num_micro_batches,
        "seq_len": stated("batch.seq_len"),
        "kernels": _kernels(stated),
        "attention": _attention(stated),
        "joint_qkv": stated("model.architecture") == "qwen" and stated("lora.rank") is None,  # ``modeling_qwen.py``
        "fp16_sums": stated("fp16_accumulation") and not _is_megatron(stated),  # whose products are TransformerEngine's
        "loss": _loss(stated),
        "loss_tile": _loss_tile(stated),
        "precision": _precision(stated),
        "optimizer": _optimizer(stated),
        "clip": _clips(stated),
        "activations": _activations(stated),
        "reruns_all": _reruns_all(stated),
        "inputs_on_host": _on_host(stated),
        "updates_in_backward": stated("engine.update") == "in backward",
        "dtensors": "FSDP2" in str(stated("engine.wrapper", "")) or None,
        "reduces_once": _reduces_once(stated),
        "fused_head": _fuses_head(stated),
        "fused_update": _fuses_update(stated),
        "paged": "paged" in _optimizer_words(stated) or None,
        "step_copies": 2 if re.search(r"\btorch 2\.0\b", stated("source")) else None,
        "keeps_output": stated("engine.loss") == "whole logits" and not (_is_megatron(stated) or _is_fsdp(stated)),
        "device_budget_gib": stated("device_budget_gib"),
        "link_gb_s": _link(stated),
        "measured": _measured(stated, devices),
    } | _engine(stated)
    unread = f"not read: {', '.join(stated.unread)}" if stated.unread else ""
    fields["differs"] = "; ".join(filter(None, (differs, unread)))
    return TrainingCase.model_validate({name: value for name, value in fields.items() if value is not None})


def _profile(machine: str) -> tuple[str, str]:
    """Return the profile that is like a machine, and what differs."""
    if machine in list_profiles():
        return machine, ""
    for names, reason in _UNSTATED.items():
        if machine.startswith(names):
            raise LeftOutError(f"machine {machine}: {reason}")
    fitting = [name for name in _MACHINES if machine.startswith(name)]
    if not fitting:
        raise LeftOutError(f"machine {machine} has no profile")
    return _MACHINES[max(fitting, key=len)]


def _batch(stated: _Stated, data_parallel: int) -> tuple[int, int]:
    """Return sequences of a rank's micro-batch, and their number.

    Some engines cut a rank's sequences into unequal micro-batches; they are stated as equal ones of the next size.
    RoundPipe cuts those of all ranks together.
    """
    count = stated("batch.num_micro_batches", 1)
    if (size := stated("batch.micro_batch")) is not None:
        return size, count
    if stated("engine.name") == "roundpipe":
        count = max(count // data_parallel, 1)
    each = stated("batch.sequences", stated("batch.global_batch", 0)) // data_parallel
    if not each:
        raise LeftOutError("the batch is not stated")
    size = next(size for size in range(-(-each // count), each + 1) if each % size == 0)
    return size, each // size


def _model(stated: _Stated) -> str | Values:
    name, family = stated("model.name"), stated("model.architecture")
    own: Values = {}
    if "NeMo" in str(stated("engine.framework", "")) and "llama" in str(name):
        own["vocab_size"] = _NEMO_VOCAB
    in_a_loop = (family in _BANKS or name in _BANKS) and "RoundPipe-artifact" in stated("source")
    if in_a_loop or "loop" in str(stated("engine.experts", "")):
        own["experts_implementation"] = "eager"
    if stated("model.num_experts") or family not in _FAMILIES:  # of a packaged configuration
        return configuration(name) | own if own else str(name)
    sizes = {
        "vocab_size": stated("model.vocab_size"),
        "hidden_size": stated("model.hidden_size"),
        "intermediate_size": stated("model.ffn_hidden_size"),
        "num_hidden_layers": stated("model.num_layers"),
        "num_attention_heads": stated("model.num_attention_heads"),
        "num_key_value_heads": stated("model.num_key_value_heads"),
        "head_dim": stated("model.head_dim"),
    }
    if missing := [key for key, value in sizes.items() if value is None and key != "head_dim"]:
        raise LeftOutError(f"the model's {missing[0]} is not stated")
    return (
        {"model_type": _FAMILIES[family]}
        | {key: value for key, value in sizes.items() if value is not None}
        | {
            "max_position_embeddings": 200_000,
            "tie_word_embeddings": stated("model.tied_embeddings", False),
            "hidden_act": "silu",
        }
        | own
    )


def _lora(stated: _Stated) -> str | None:
    if (rank := stated("lora.rank")) is None:
        return None
    targets, saved = stated("lora.targets", "all linear"), stated("lora.modules_to_save", ())
    if isinstance(targets, str):
        if "head" in targets:
            raise LeftOutError("adapters of the head are not known")
        targets = ["attention" if "attention" in targets and "mlp" not in targets else "all-linear"]
    if set(targets) == _QWEN_LINEAR:
        targets = ["all-linear"]
    parts = [f"rank={rank}", f"targets={'+'.join(_PROJECTIONS.get(name, name) for name in targets)}"]
    if "QwenLM/Qwen" in stated("source"):  # its finetune.py has dropout
        parts.append("dropout=0.05")
    if saved:
        parts.append(f"save={'+'.join(_SAVED.get(name, name) for name in saved)}")
    return ",".join(parts)


def _quantized(stated: _Stated) -> str | None:
    weights = str(stated("engine.weights", "bf16")).lower()
    if weights in {"bf16", "fp16"}:
        return None
    if "nf4" in weights or "4-bit" in weights:
        return "nf4"
    if "int8" in weights or "8-bit" in weights:
        return "int8"
    raise LeftOutError(f"weights are {weights!r}, but known are bf16, NF4 and int8")


def _kernels(stated: _Stated) -> str | None:
    if _is_megatron(stated):
        return "megatron-core"
    words = f"{stated('note', '')} {stated('engine.kernels', '')}".lower()
    if stated("engine.liger") or "liger" in words or "fused linear" in str(stated("engine.loss", "")):
        return "liger"  # whose head is the only fused one that trainers have
    return "compiled" if stated("engine.compile") and not _leaves_layers(stated) else None


def _leaves_layers(stated: _Stated) -> bool:
    """Return whether layers that are to be compiled run as they are.

    PyTorch leaves a checkpointed layer as it is if its graph would break (``torch/utils/checkpoint.py``, Note:
    torch.compile and checkpoint). It does in the FlashAttention of ``transformers``, which branches on the positions
    of a micro-batch of one sequence (``modeling_flash_attention_utils.py::_is_packed_sequence``).
    """
    is_flash = str(_attention(stated)).startswith("flash-attention")
    return is_flash and _activations(stated) == "recompute" and stated("batch.micro_batch", 1) == 1


def _loss(stated: _Stated) -> str | None:
    """Return the loss of whole logits beside compiled layers, unless it is compiled too, as torchtune's is."""
    words = str(stated("engine.loss", ""))
    compiled = "compiled" in words or "pytorch/torchtune" in stated("source")
    return "transformers" if words.startswith("whole logits") and stated("engine.compile") and not compiled else None


def _is_megatron(stated: _Stated) -> bool:
    return "megatron" in str(stated("engine.framework", "")).lower() or stated("engine.name") == "megatron"


def _is_fsdp(stated: _Stated) -> bool:
    return "FSDP" in str(stated("engine.wrapper", ""))


def _reduces_once(stated: _Stated) -> bool | None:
    """Return whether gradients of sharded parameters are reduced with the last micro-batch only.

    So they are in RoundPipe's ``fsdp/train.py``, and under ``transformers.Trainer`` (``accelerate``): both use
    ``no_sync``.
    """
    wrapper = str(stated("engine.wrapper", ""))
    by_trainer = "FSDP" in wrapper and "trainer" in wrapper.lower()
    return True if by_trainer or ("FSDP" in wrapper and "RoundPipe-artifact" in stated("source")) else None


def _attention(stated: _Stated) -> str | None:
    kernel = stated("engine.attention")
    return kernel if kernel in get_args(AttentionKernel) else None


def _loss_tile(stated: _Stated) -> int | None:
    words = str(stated("engine.loss", ""))
    if stated("engine.name") in {"roundpipe", "shadowspill"}:  # rows of their own, which know it
        return None
    if "pytorch/torchtune" in stated("source"):
        # Recipes for adapters take the head in. Else all logits are there, and only their cast to fp32 is in chunks,
        # which takes no memory where it is compiled (``modules/loss/ce_chunked_output_loss.py``).
        tokens = stated("batch.micro_batch", 1) * stated("batch.seq_len", 1)
        return -(-tokens // _TORCHTUNE_CHUNKS) if stated("lora.rank") else None
    return _LOSS_TILE if "chunk" in words else None


def _fuses_head(stated: _Stated) -> bool | None:
    """Return whether Liger's head computes the loss: by default, but not in Halo (``agent-docs``, Liger Kernels)."""
    return False if "whitecircle/halo" in stated("source") and not stated("engine.loss") else None


def _precision(stated: _Stated) -> Values | None:
    """Return the types if they are not bf16 weights with fp32 state. fp16 takes what bf16 takes."""
    words, products = str(stated("precision", "")), str(stated("engine.products", "bf16"))
    if (words and not words.startswith(("bf16", "fp16"))) or products not in {"bf16", "fp16", "fp8"}:
        raise LeftOutError(f"types are {words!r} with products in {products!r}, but known are bf16 and fp16, or fp8")
    found = {"products": "fp8"} if products == "fp8" else {}
    if _is_megatron(stated):
        found |= {"gradients": "fp32"}
    elif "bf16-adam" in words or (words == "bf16" and not _is_fsdp(stated)) or stated("lora.modules_to_save"):
        found |= {"state": "bf16"}
    elif "bf16-master" in words:
        found |= {"master": "bf16"}
    return {"weights": "bf16"} | found if found else None


def _optimizer_words(stated: _Stated) -> str:
    return str(stated("engine.optimizer", "")).lower().partition("(")[0]  # behind it, what it is not


def _optimizer(stated: _Stated) -> str | None:
    words = _optimizer_words(stated)
    if "8bit" in words or "8-bit" in words or stated("engine.moments") == "8-bit":
        return "adamw-8bit"
    found = next((name for name in ("muon", "lion") if name in words), None)
    if words and not found and "adam" not in words:
        raise LeftOutError(f"the optimizer is {words!r}, but known are adamw, lion and muon")
    return found


def _fuses_update(stated: _Stated) -> bool | None:
    """Return whether an update is one kernel a tensor.

    So it is where the optimizer's name says so, and where kernels of its own round.
    """
    rounds = "stochastic rounding" in str(stated("engine.optimizer", ""))
    return rounds or "fused" in _optimizer_words(stated) or None


def _clips(stated: _Stated) -> bool | None:
    if (clip := stated("engine.clip")) is not None:
        return bool(clip)
    others = stated("engine.name") == "roundpipe" or _is_megatron(stated)
    if stated("engine.update") == "in backward" or ("RoundPipe-artifact" in stated("source") and not others):
        return False
    return None


def _activations(stated: _Stated) -> str | None:
    words = str(stated("activations", ""))
    found = next((kind for kind in ("recompute", "keep") if words.startswith(kind)), None)
    if words and not found:
        raise LeftOutError(f"activations are {words!r}, neither recomputed nor kept")
    return found


def _reruns_all(stated: _Stated) -> bool | None:
    """Return whether recomputation runs all of a layer again.

    So it does in reentrant checkpoints, which ``transformers`` before 5 (``gradient_checkpointing_enable``) and
    LLaMA-Factory (``use_reentrant_gc``) have by default, and in engines that recompute by themselves (RoundPipe's
    ``run.py::run_backward``). FSDP's wrapper, torchtune and Halo have the other kind; Megatron's kernels know theirs.
    """
    words, source = str(stated("activations", "")), stated("source", "")
    other = _is_fsdp(stated) or _is_megatron(stated) or stated("engine.name") == "shadowspill"
    other = other or any(name in source for name in ("pytorch/torchtune", "whitecircle/halo"))
    own = stated("engine.name") in {"roundpipe", "megatrain"}
    return True if own or "reentrant" in words or (words.startswith("recompute") and not other) else None


def _link(stated: _Stated) -> Values:
    """Return what was measured of the host link; lanes of both ways at once add up."""
    both = [stated(f"host_link.{way}_gb_s") for way in ("fetch", "evict")]
    found = {
        "down": stated("host_link.solo_fetch_gb_s"),
        "up": stated("host_link.solo_evict_gb_s"),
        "both": sum(both) if None not in both else None,
    }
    return {way: rate for way, rate in found.items() if rate is not None}


def _on_host(stated: _Stated) -> bool:
    checkpoints = f"{stated('engine.checkpoints', '')} {stated('activations', '')}"
    # ``cpu_checkpointing`` is read by ``deepspeed.checkpointing.checkpoint``, which no model of ``transformers`` calls.
    return bool(stated("engine.activations_offloaded")) or (
        "host" in checkpoints and "cpu_checkpointing" not in checkpoints
    )


def _engine(stated: _Stated) -> Values:
    """Return the engine with its settings."""
    name, stage = str(stated("engine.name")), stated("engine.zero_stage", stated("zero_stage", 0))
    rows = {"shadowspill": "streaming", "zen-flow": "zenflow"}
    if name == "roundpipe" and not stated("engine.asynchronous_update", True):
        name = "roundpipe-sync"
    if name == "gpu-only":
        by_deepspeed = stage > 0 and not (_is_fsdp(stated) or _is_megatron(stated))
        if by_deepspeed:
            return {"engine": "deepspeed", "deepspeed": {"stage": stage}}
        if stated("engine.distributed_optimizer"):  # Megatron's, which shards optimizer state
            stage = max(stage, 1)
        return {"engine": "fsdp", "zero_stage": stage}
    if name == "zero-offload":
        return {"engine": "deepspeed", "deepspeed": _deepspeed(stated, stage)}
    if name == "llmq":
        return {"engine": name} | _llmq(stated)
    if (row := rows.get(name, name)) not in POLICIES:
        raise LeftOutError(f"there is no row for engine {name}")
    return {"engine": row}


def _llmq(stated: _Stated) -> Values:
    """Return LLMQ's settings, by its options: what is on the host, sharded and made again in backward."""
    again, sharded, flags = (stated(f"engine.{name}", ()) for name in ("recompute", "sharded", "flags"))
    parts = {"norm": "norms", "swiglu": "swiglu", "ffn": "ffn"}
    block = "block" in again or {"ffn", "att"} <= set(again)
    held = {name: stated(f"offload.{name}") == "cpu" for name in ("master", "opt-v", "gradients", "residual")}
    shards = {name.removeprefix("shard-") for name in sharded}
    placed = {
        "streams": held["opt-v"],
        "fetches": held["master"] and "weights" in shards,
        "gradients_on_host": held["gradients"],
    }
    return {
        "model": stated("model.name"),
        "kernels": "llmq",
        "activations": "recompute" if block else "keep",
        "inputs_on_host": held["residual"],
        "remade": [] if block else [parts[name] for name in again if name in parts],
        "placed": {name: True for name, is_so in placed.items() if is_so},
        "zero_stage": 3 if "weights" in shards and not held["master"] else 2 if "gradients" in shards else 1,
        "through_host": "all-to-all-reduce" in flags,
    }


def _deepspeed(stated: _Stated, stage: int) -> Values:
    where = stated("offload.optimizer", "cpu"), stated("offload.params", "gpu")
    if "nvme" in where:
        raise LeftOutError("its drives are not stated")
    pinned = stated("engine.pinned", False)
    found = {
        "stage": stage,
        "optimizer_device": "cpu",
        "param_device": "cpu" if stated("engine.offload_param") or where[1] == "cpu" else None,
        "prefetch_params": stated("engine.prefetch_bucket"),
        "persistent_params": stated("engine.persistence_threshold"),
        "max_live_params": stated("engine.max_live_parameters"),
        "pin_optimizer": pinned if isinstance(pinned, bool) else "optimizer not" not in pinned,
        "waits": True,  # releases before 0.19.5
    }
    return {key: value for key, value in found.items() if value is not None}


def _measured(stated: _Stated, devices: int) -> Values:
    """Return what was measured. A peak may be in GB or GiB, or of all devices; reserved memory is another quantity."""
    found: Values = {"iteration_ms": stated("measured.iteration_ms")}
    if found["iteration_ms"] is None:
        found = {"tokens_per_s": stated("measured.tokens_per_s")}
    if next(iter(found.values())) is None:
        raise LeftOutError("no iteration was timed")
    shared_by = devices if "of both GPUs" in stated("note", "") else 1
    calls_gib_gb = "whitecircle/halo" in stated("source")  # ``callbacks/efficiency.py``
    for name, unit, kind in _PEAKS:
        if (peak := stated(f"measured.{name}")) is not None:
            found[f"peak_gpu_{kind}_gib"] = peak * (1 if calls_gib_gb else unit / 2**30) / shared_by
            break
    return found
