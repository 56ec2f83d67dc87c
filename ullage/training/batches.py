"""A trainer's data: files with a tokenizer, tokens, or one random batch for captured models.

Models that are known by their sizes, or have adapters, take tokens.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from executor.module.batches import BatchShapes
from planner.models.captured import CapturedInput, CapturedModel
from planner.plan.document import Plan, PlanError
from ullage.capture.architectures import architecture
from ullage.capture.module import begun
from ullage.capture.recording import find_loss
from ullage.capture.records import DTYPES
from ullage.data import Data
from ullage.data.batches import to_device
from ullage.output.plans import tokens_per_iteration
from ullage.training.text import NUM_BYTES, Tokens, TokenStream, read_text

_OF_TEXT = {"input_ids", "labels", "attention_mask", "position_ids"}


class Sequences(Protocol):
    """What batches are made of, in an order."""

    position: int
    """Sequences read so far, by all ranks together; may be set."""


class BatchSource(Protocol):
    """Makes a rank's losses on one micro-batch after another."""

    @property
    def sequences(self) -> Sequences:
        """What it reads."""
        ...

    @property
    def num_tokens(self) -> int:
        """Tokens of the latest iteration of all ranks, padding left out."""
        ...

    def losses(self, model: nn.Module, device: torch.device) -> Iterator[Tensor]:
        """Yield the share that each micro-batch of the next iteration has in its loss, for backward to begin from."""
        ...


def batch_source(plan: Plan, data: Tokens | Data | None, seed: int, position: int, rank: int = 0) -> BatchSource:
    """Return one rank's training data for a plan's model.

    Of every micro-batch of all ranks together, each takes its own sequences, in the order of ranks: how many ranks
    share a batch does not change what is in it. Of a captured model each has a random batch of its own, unless there
    are data for it, or it is a language model with adapters.

    Args:
        plan: says what a micro-batch is.
        data: what to train on; ``None``: the built-in English text.
        seed: of the order.
        position: where to begin; see :class:`ullage.training.text.TokenStream`.
        rank: whose part, of the data-parallel ranks.

    Raises:
        PlanError: tokens or a position were given for a captured model, or data for one that takes none.
        ValueError: there are too few tokens, or strange ones; the position is negative; or data are batched otherwise
            than planned.
    """
    if position < 0:
        raise ValueError(f"position {position}: sequences to skip are counted from 0 on")
    if isinstance(data, Data):
        return _DataBatches(plan, data, position, rank)
    if isinstance(data, str | Path):
        raise TypeError(f"the data are the path {data}; give ullage.Data({str(data)!r}, tokenizer, seq_len, ...)")
    if _vocabulary(plan) is not None:
        if data is None:
            check_knows_text(plan)
        return _TokenBatches(plan, read_text(None) if data is None else data, seed, position, rank)
    check_takes_tokens(plan, given=data is not None or position > 0)
    assert isinstance(plan.model, CapturedModel)
    return _RandomBatches(plan, plan.model, seed, rank)


def _vocabulary(plan: Plan) -> int | None:
    """Return how many tokens a plan's model knows; ``None`` if it is not trained on tokens."""
    if isinstance(plan.model, CapturedModel) and plan.model.lora is None:
        return None
    return plan.model.vocab_size


def vocabulary_for_data(plan: Plan) -> int | None:
    """Return how many tokens a plan's model knows, if that is known.

    Raises:
        PlanError: it is no causal language model, so that files with a tokenizer cannot train it.
    """
    if not isinstance(plan.model, CapturedModel):
        return plan.model.vocab_size
    inputs = {spec.name: spec for spec in plan.model.inputs}
    path = Path(plan.model.factory)
    auto = architecture(path).auto.__name__ if path.exists() else ""
    if not {"input_ids", "labels"} <= inputs.keys() <= _OF_TEXT or auto not in {"", "AutoModelForCausalLM"}:
        raise PlanError(
            f"{plan.model.name} takes {', '.join(name or 'a tensor' for name in inputs)}"
            f"{f' ({auto})' if auto else ''}, but data with a tokenizer are for causal language models; use "
            "ullage.prepare in a loop of your own"
        )
    return inputs["input_ids"].num_values


def check_takes_tokens(plan: Plan, *, given: bool) -> None:
    """Check that tokens, or a position in them, are ``given`` only where a plan's model is trained on them.

    Raises:
        PlanError: they are given for a captured model.
    """
    if given and _vocabulary(plan) is None:
        raise PlanError(
            "a captured model is trained on one random batch of its inputs; leave data (--text, --tokens) and a "
            "position in it out, or give files with a tokenizer (--data), or use ullage.prepare in a loop of your own"
        )


def check_knows_text(plan: Plan) -> None:
    """Check that a plan's model knows the tokens of a text: one per byte.

    Raises:
        ValueError: its vocabulary is smaller.
    """
    if (size := _vocabulary(plan)) is not None and size < NUM_BYTES:
        raise ValueError(
            f"text is read as one token per byte, 0 to {NUM_BYTES - 1}, but the model knows tokens 0 to "
            f"{size - 1}; give the tokens of its own tokenizer (--tokens, or data= in Python)"
        )


def batch_shapes(plan: Plan) -> BatchShapes:
    """Return the shapes of a plan's model inputs, by name."""
    if isinstance(plan.model, CapturedModel):
        return tuple((spec.name, spec.shape) for spec in plan.model.inputs)
    return (("input_ids", (plan.decisions.micro_batch, plan.seq_len)),)


class _DataBatches:
    def __init__(self, plan: Plan, data: Data, position: int, rank: int) -> None:
        decided = plan.decisions
        if (size := vocabulary_for_data(plan)) is not None:
            data.check_vocabulary(size)
        planned = {"micro_batch": decided.micro_batch, "num_micro_batches": decided.num_micro_batches}
        for name, value in {"seq_len": plan.seq_len, **planned}.items():
            if getattr(data, name) != value:
                raise ValueError(
                    f"the data have {name}={getattr(data, name)}, but the plan has {value}; make them with the plan's"
                )
        data.share(rank, decided.data_parallel)
        self.sequences = data
        if position:
            data.position = position

    @property
    def num_tokens(self) -> int:
        return self.sequences.num_tokens

    def losses(self, model: nn.Module, device: torch.device) -> Iterator[Tensor]:
        assert next(model.parameters()).device == device
        for batch in self.sequences.step():
            yield batch.loss(model)


class _TokenBatches:
    def __init__(self, plan: Plan, data: Tokens, seed: int, position: int, rank: int) -> None:
        vocab_size = _vocabulary(plan)
        assert vocab_size is not None
        self._plan = plan
        self._rank = rank
        self.sequences = TokenStream(data, plan.seq_len, seed, vocab_size)
        self.sequences.position = position

    @property
    def num_tokens(self) -> int:
        return tokens_per_iteration(self._plan)

    def losses(self, model: nn.Module, device: torch.device) -> Iterator[Tensor]:
        num_micro_batches = self._plan.decisions.num_micro_batches
        for _ in range(num_micro_batches):
            yield self.loss(model, device) / num_micro_batches

    def loss(self, model: nn.Module, device: torch.device) -> Tensor:
        decided = self._plan.decisions
        of_all = self.sequences.next(decided.data_parallel * decided.micro_batch)
        tokens = to_device(of_all[self._rank * decided.micro_batch :][: decided.micro_batch], device)
        further = {} if isinstance(self._plan.model, CapturedModel) else {"use_cache": False}
        loss: Tensor = model(input_ids=tokens, labels=tokens, **further).loss
        return loss


class _RandomBatches:
    def __init__(self, plan: Plan, model: CapturedModel, seed: int, rank: int) -> None:
        self._plan = plan
        self._num_sequences = model.micro_batch * plan.decisions.data_parallel
        generator = torch.Generator().manual_seed(seed + rank)
        dtype = DTYPES[plan.decisions.precision.weights]
        batch = [(spec.name, random_input(spec, dtype, generator)) for spec in model.inputs]
        self._args = [tensor for name, tensor in batch if not name]
        self._kwargs = {name: tensor for name, tensor in batch if name}
        self.position = 0

    @property
    def sequences(self) -> Sequences:
        return self

    @property
    def num_tokens(self) -> int:
        return tokens_per_iteration(self._plan)

    def losses(self, model: nn.Module, device: torch.device) -> Iterator[Tensor]:
        num_micro_batches = self._plan.decisions.num_micro_batches
        for _ in range(num_micro_batches):
            self.position += self._num_sequences
            args = [to_device(tensor, device) for tensor in self._args]
            kwargs = {name: to_device(tensor, device) for name, tensor in self._kwargs.items()}
            yield find_loss(model(*args, **kwargs))[0] / num_micro_batches


def random_input(spec: CapturedInput, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Return normal values, integers that the model can look up, or ones (a mask that hides nothing)."""
    if spec.dtype == "float":
        return torch.randn(spec.shape, generator=generator).to(dtype)
    if spec.begins:
        most = spec.num_values or 2
        return begun(spec, torch.randint(most, spec.shape, generator=generator, dtype=getattr(torch, spec.dtype)))
    if spec.num_values is None:
        return torch.ones(spec.shape, dtype=getattr(torch, spec.dtype))
    return torch.randint(spec.num_values, spec.shape, generator=generator, dtype=getattr(torch, spec.dtype))
