"""Training batches: from files with a tokenizer, from tokens, or one random batch for captured models.

Models that are planned from sizes, and models with adapters, take tokens.
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
from ullage.capture.inputs import begun
from ullage.capture.recording import find_loss
from ullage.capture.records import DTYPES
from ullage.data import Data
from ullage.data.batches import to_device
from ullage.output.plans import tokens_per_iteration
from ullage.training.text import NUM_BYTES, Tokens, TokenStream, read_text

_OF_TEXT = {"input_ids", "labels", "attention_mask", "position_ids"}


class Sequences(Protocol):
    """Sequences in an order."""

    position: int
    """Sequences that all ranks together have read so far; may be set."""


class BatchSource(Protocol):
    """Yields a rank's losses on successive micro-batches."""

    @property
    def sequences(self) -> Sequences:
        """The sequences that it reads."""
        ...

    @property
    def num_tokens(self) -> int:
        """Tokens of the latest iteration over all ranks, without padding."""
        ...

    def losses(self, model: nn.Module, device: torch.device) -> Iterator[Tensor]:
        """Yield each micro-batch's part of the next iteration's loss; call ``backward()`` on it."""
        ...


def batch_source(plan: Plan, data: Tokens | Data | None, seed: int, position: int, rank: int = 0) -> BatchSource:
    """Return one rank's training data for a plan's model.

    Ranks take consecutive parts of every micro-batch, so its content does not depend on the number of ranks. For a
    captured model without data, each rank has one random batch, unless the model is a language model with adapters.

    Args:
        plan: the plan, which sets the size of a micro-batch.
        data: the training data; ``None``: the built-in English text.
        seed: seed of the order.
        position: position to begin at; see :class:`ullage.training.text.TokenStream`.
        rank: data-parallel rank.

    Raises:
        PlanError: tokens or a position are given for a captured model, or data for a model that cannot use them.
        ValueError: there are too few tokens, or the model does not know one; the position is negative; or the data are
            batched differently than planned.
    """
    if position < 0:
        raise ValueError(f"position is {position}, but is a number of sequences to skip; give at least 0")
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
    """Return the vocabulary size of a plan's model; ``None`` if it is not trained on tokens."""
    if isinstance(plan.model, CapturedModel) and plan.model.lora is None:
        return None
    return plan.model.vocab_size


def vocabulary_for_data(plan: Plan) -> int | None:
    """Return the vocabulary size of a plan's model, or ``None`` if it is not known.

    Raises:
        PlanError: the model is not a causal language model, so files with a tokenizer cannot train it.
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
    """Check that tokens, or a position in them, are ``given`` only if the plan's model is trained on tokens.

    Raises:
        PlanError: tokens or a position are given for a captured model.
    """
    if given and _vocabulary(plan) is None:
        raise PlanError(
            "a captured model is trained on one random batch of its inputs; leave out --text, --tokens and "
            "--data-position, or give files with a tokenizer (--data), or use ullage.prepare in a loop of your own"
        )


def check_knows_text(plan: Plan) -> None:
    """Check that a plan's model knows the tokens of a text, one per byte.

    Raises:
        ValueError: the vocabulary is smaller.
    """
    if (size := _vocabulary(plan)) is not None and size < NUM_BYTES:
        raise ValueError(
            f"text is read as one token per byte, 0 to {NUM_BYTES - 1}, but the model knows tokens 0 to "
            f"{size - 1}; give the tokens of its own tokenizer (--tokens, or data= in Python)"
        )


def batch_shapes(plan: Plan) -> BatchShapes:
    """Return the shapes of the inputs of a plan's model, by name."""
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
    """Return normal values, integers within the vocabulary, or ones (a mask that masks nothing)."""
    if spec.dtype == "float":
        return torch.randn(spec.shape, generator=generator).to(dtype)
    if spec.begins:
        most = spec.num_values or 2
        return begun(spec, torch.randint(most, spec.shape, generator=generator, dtype=getattr(torch, spec.dtype)))
    if spec.num_values is None:
        return torch.ones(spec.shape, dtype=getattr(torch, spec.dtype))
    return torch.randint(spec.num_values, spec.shape, generator=generator, dtype=getattr(torch, spec.dtype))
