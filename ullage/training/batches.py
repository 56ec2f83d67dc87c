"""What a trainer trains on: tokens for models known by their sizes and for adapters, one random batch for others."""

from pathlib import Path
from typing import Final, Protocol

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from executor.module.batches import BatchShapes
from executor.module.empty import empty_parameters
from planner.models import num_parameters, to_hf_config_dict
from planner.models.captured import CapturedInput, CapturedModel
from planner.plan.document import Plan, PlanError
from ullage.capture.adapters import make_adapted
from ullage.capture.architectures import architecture
from ullage.capture.module import load_factory
from ullage.capture.recording import find_loss
from ullage.capture.records import DTYPES
from ullage.training.text import NUM_BYTES, Tokens, TokenStream, read_text

CONFIG: Final = "config.json"
_SHARE_TO_MAKE = 0.8  # of free device memory: weights that are tied later are drawn separately


class BatchSource(Protocol):
    """Makes the model, and a rank's loss on one micro-batch after another."""

    position: int
    """Sequences read so far, by all ranks together; may be set."""

    def model(self, weights: Path | None = None) -> nn.Module:
        """Make the planned model with random weights; or without any, as the config.json beside weights has it.

        A quantized base has its weights at once: they cannot be loaded under a plan.
        """
        ...

    def loss(self, model: nn.Module, device: torch.device) -> Tensor:
        """Return the loss on the next micro-batch."""
        ...


def batch_source(plan: Plan, data: Tokens | None, seed: int, position: int, rank: int = 0) -> BatchSource:
    """Return one rank's training data for a plan's model.

    Of every micro-batch of all ranks together, each takes its own sequences, in the order of ranks: how many ranks
    share a batch does not change what is in it. Of a captured model each has a random batch of its own, unless it is a
    language model with adapters.

    Args:
        plan: says what a micro-batch is.
        data: what to train on; ``None``: the built-in English text.
        seed: of the order.
        position: where to begin; see :class:`ullage.training.text.TokenStream`.
        rank: whose part, of the data-parallel ranks.

    Raises:
        PlanError: data or a position were given for a captured model.
        ValueError: there are too few tokens, or strange ones, or the position is negative.
        CaptureError: the function that makes a captured model is not there.
    """
    if position < 0:
        raise ValueError(f"position {position}: sequences to skip are counted from 0 on")
    if _vocabulary(plan) is not None:
        if data is None:
            check_knows_text(plan)
        return _TokenBatches(plan, read_text(None) if data is None else data, seed, position, rank)
    check_takes_data(plan, given=data is not None or position > 0)
    assert isinstance(plan.model, CapturedModel)
    return _RandomBatches(plan, plan.model, seed, rank)


def _vocabulary(plan: Plan) -> int | None:
    """Return how many tokens a plan's model knows; ``None`` if it is not trained on tokens."""
    if isinstance(plan.model, CapturedModel) and plan.model.lora is None:
        return None
    return plan.model.vocab_size


def brings_weights(plan: Plan) -> bool:
    """Return whether the planned model is made with its weights, as a quantized base is."""
    return isinstance(plan.model, CapturedModel) and plan.model.quantization is not None


def check_takes_data(plan: Plan, *, given: bool) -> None:
    """Check that data, or a position in them, are ``given`` only where a plan's model is trained on them.

    Raises:
        PlanError: they are given for a captured model.
    """
    if given and _vocabulary(plan) is None:
        raise PlanError(
            "a captured model is trained on one random batch of its inputs; leave data (--text, --tokens) and a "
            "position in it out, or use ullage.prepare in a loop of your own"
        )


def check_knows_text(plan: Plan) -> None:
    """Check that a plan's model knows what text is read as: one token per byte.

    Raises:
        ValueError: its vocabulary is smaller.
    """
    if (size := _vocabulary(plan)) is not None and size < NUM_BYTES:
        raise ValueError(
            f"text is read as one token per byte, 0 to {NUM_BYTES - 1}, but the model knows tokens 0 to "
            f"{size - 1}; give the tokens of its own tokenizer (--tokens, or data= in Python)"
        )


def batch_shapes(plan: Plan) -> BatchShapes:
    """Return what a plan's model is called with, by name."""
    if isinstance(plan.model, CapturedModel):
        return tuple((spec.name, spec.shape) for spec in plan.model.inputs)
    return (("input_ids", (plan.decisions.micro_batch, plan.seq_len)),)


class _TokenBatches:
    def __init__(self, plan: Plan, data: Tokens, seed: int, position: int, rank: int) -> None:
        vocab_size = _vocabulary(plan)
        assert vocab_size is not None
        self._plan = plan
        self._rank = rank
        self._stream = TokenStream(data, plan.seq_len, seed, vocab_size)
        self._stream.position = position

    @property
    def position(self) -> int:
        return self._stream.position

    @position.setter
    def position(self, position: int) -> None:
        self._stream.position = position

    def model(self, weights: Path | None = None) -> nn.Module:
        if isinstance(self._plan.model, CapturedModel):
            return _adapted(self._plan.model, weights)
        config = AutoConfig.for_model(**to_hf_config_dict(self._plan.model))
        dtype = DTYPES[self._plan.decisions.precision.weights]
        if weights is not None:
            if (weights / CONFIG).exists():
                config = architecture(weights).config
            with empty_parameters():
                return AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-any-return, no-untyped-call]
        where = self._where_to_make(dtype)
        with torch.device(where):
            model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
        model.to("cpu")
        if where == "cuda":
            torch.cuda.empty_cache()
        return model

    def _where_to_make(self, dtype: torch.dtype) -> str:
        """Return a GPU with room for all weights: one core of the host takes minutes to draw billions of numbers."""
        assert not isinstance(self._plan.model, CapturedModel)
        if self._plan.hardware.device.kind != "gpu":
            return "cpu"
        needed_bytes = num_parameters(self._plan.model) * dtype.itemsize
        return "cuda" if needed_bytes <= _SHARE_TO_MAKE * torch.cuda.mem_get_info()[0] else "cpu"

    def loss(self, model: nn.Module, device: torch.device) -> Tensor:
        decided = self._plan.decisions
        of_all = self._stream.next(decided.data_parallel * decided.micro_batch)
        tokens = to_device(of_all[self._rank * decided.micro_batch :][: decided.micro_batch], device)
        further = {} if isinstance(self._plan.model, CapturedModel) else {"use_cache": False}
        loss: Tensor = model(input_ids=tokens, labels=tokens, **further).loss
        return loss


class _RandomBatches:
    def __init__(self, plan: Plan, model: CapturedModel, seed: int, rank: int) -> None:
        self._model = model
        self._num_sequences = model.micro_batch * plan.decisions.data_parallel
        generator = torch.Generator().manual_seed(seed + rank)
        dtype = DTYPES[plan.decisions.precision.weights]
        batch = [(spec.name, _random(spec, dtype, generator)) for spec in model.inputs]
        self._args = [tensor for name, tensor in batch if not name]
        self._kwargs = {name: tensor for name, tensor in batch if name}
        self.position = 0

    def model(self, weights: Path | None = None) -> nn.Module:
        if self._model.lora is not None:
            return _adapted(self._model, weights)
        if weights is None:
            return load_factory(self._model.factory)()
        is_function = ":" in self._model.factory and not Path(self._model.factory).exists()
        has_config = not is_function and (weights / CONFIG).exists()
        with empty_parameters():
            return load_factory(str(weights) if has_config else self._model.factory)()

    def loss(self, model: nn.Module, device: torch.device) -> Tensor:
        self.position += self._num_sequences
        args = [to_device(tensor, device) for tensor in self._args]
        return find_loss(model(*args, **{name: to_device(tensor, device) for name, tensor in self._kwargs.items()}))[0]


def _adapted(model: CapturedModel, weights: Path | None) -> nn.Module:
    """Return a planned model with adapters; see :meth:`BatchSource.model`."""
    assert model.lora is not None
    has_config = weights is not None and (weights / CONFIG).exists()
    found = architecture(weights if weights is not None and has_config else model.factory)
    parts = found, model.lora, model.quantization, DTYPES[model.dtype]
    if weights is None:
        return make_adapted(*parts)
    found.config.name_or_path = str(weights)  # adapters say what they are for
    if model.quantization is not None:
        return make_adapted(*parts, weights)
    with empty_parameters():
        return make_adapted(*parts)


def to_device(batch: Tensor, device: torch.device) -> Tensor:
    """Return a batch on a device. Pinned, as from other memory the copy would wait for what the device has to do."""
    return batch.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else batch.to(device)


def _random(spec: CapturedInput, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Return normal values, integers that the model can look up, or ones (a mask that hides nothing)."""
    if spec.dtype == "float":
        return torch.randn(spec.shape, generator=generator).to(dtype)
    if spec.num_values is None:
        return torch.ones(spec.shape, dtype=getattr(torch, spec.dtype))
    return torch.randint(spec.num_values, spec.shape, generator=generator, dtype=getattr(torch, spec.dtype))
