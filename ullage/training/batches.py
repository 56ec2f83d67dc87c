"""One rank's training batches: its part of the next tokens, or one random batch of a captured model's inputs."""

from collections.abc import Iterator, Mapping
from typing import Any, final

import torch
from torch import Tensor, nn

from executor.module.batches import BatchShapes
from planner.models.captured import CapturedInput, CapturedModel
from planner.plan.document import Plan, PlanError
from ullage.capture.inputs import begun
from ullage.capture.recording import find_loss
from ullage.capture.records import DTYPES
from ullage.training.text import NUM_BYTES, Tokens, read_text, read_tokens, sequences, windows


def tokens_for(plan: Plan, data: Mapping[str, Any]) -> Tokens | None:
    """Return what a plan's model is trained on; ``None``: one random batch of its inputs.

    Models that are planned from sizes, and models with adapters, take tokens.

    Args:
        plan: the plan.
        data: see :func:`ullage.cli.arguments.data`: tokens (:func:`ullage.training.text.read_tokens`), or text, one
            token per byte; empty: the built-in English text.

    Raises:
        PlanError: tokens or a position are given for a captured model.
        ValueError: the model does not know the tokens of a text, or a file is not valid.
        OSError: a file cannot be read.
    """
    if isinstance(plan.model, CapturedModel) and plan.model.lora is None:
        if data:
            raise PlanError(
                "a captured model is trained on one random batch of its inputs; leave out --data, "
                "or use ullage.prepare in a loop of your own, or ullage.offloaded(Trainer)"
            )
        return None
    path, dtype = data.get(""), data.get("dtype")
    if path is not None and (dtype or path.suffix == ".npy"):
        return read_tokens(path, dtype)
    if (size := plan.model.vocab_size) is not None and size < NUM_BYTES:
        raise ValueError(
            f"text is read as one token per byte, 0 to {NUM_BYTES - 1}, but the model knows tokens 0 to "
            f"{size - 1}; give the tokens of its own tokenizer (--data tokens.npy)"
        )
    return read_text(path)


@final
class Batches:
    """One rank's micro-batches.

    Ranks take consecutive parts of every micro-batch, so its content does not depend on the number of ranks. Without
    tokens, each rank has one random batch.

    Args:
        plan: the plan, which sets the size of a micro-batch.
        tokens: what :func:`tokens_for` returned.
        seed: seed of the order, or of the random batch.
        reader: number of the group of ranks that reads these sequences; without groups, the data-parallel rank.
        num_sequences: sequences that all ranks together read in an iteration, if they are fewer than the plan's ranks
            and micro-batches have room for; see :mod:`ullage.training.elastic`.

    Attributes:
        num_sequences: sequences that all ranks together read in an iteration.
        position: sequences that all ranks together have read so far. Set it to resume. With the same tokens, sequence
            length and seed, a position means the same sequence, for any number of ranks and micro-batches.
    """

    def __init__(
        self, plan: Plan, tokens: Tokens | None, seed: int = 0, reader: int = 0, num_sequences: int | None = None
    ) -> None:
        decided = plan.decisions
        self.position = 0
        self._plan = plan
        self._num_micro_batches = decided.num_micro_batches
        shares = decided.shares or (decided.micro_batch,) * decided.num_readers
        self._at_once, begin = sum(shares), sum(shares[:reader])
        self.num_sequences = num_sequences or self._num_micro_batches * self._at_once
        self._own = slice(begin, begin + decided.micro_batch)
        self._seed = seed
        self._windows: Tokens | None = None
        self._random: list[tuple[str, Tensor]] = []
        if tokens is not None:
            self._windows = windows(tokens, plan.seq_len)
        else:
            assert isinstance(plan.model, CapturedModel)
            generator, dtype = torch.Generator().manual_seed(seed + reader), DTYPES[decided.precision.weights]
            self._random = [(spec.name, random_input(spec, dtype, generator)) for spec in plan.model.inputs]

    def micro_batches(self, device: torch.device) -> list[dict[str, Any]]:
        """Return the next iteration's micro-batches, as named arguments of the model; for pipelines.

        Raises:
            PlanError: inputs of the model have no names.
        """
        found = []
        for _ in range(self._num_micro_batches):
            args, kwargs = self._inputs(device, self._own, self._at_once)
            if args:
                raise PlanError(
                    "stages of a pipeline get the model's inputs by name, but the plan's are in the order of its "
                    "forward; plan with names (--input-shape NAME=SHAPE), or with --parallel pipeline=1"
                )
            found.append(kwargs)
            self.position += self._at_once
        return found

    def losses(self, model: nn.Module) -> Iterator[Tensor]:
        """Yield each micro-batch's part of the next iteration's loss; call ``backward()`` on it.

        Raises:
            ValueError: the model does not know a token.
        """
        left = self.num_sequences
        for _ in range(self._num_micro_batches):
            there = min(self._at_once, left)
            left -= there
            has_own = self._own.start < there  # else it computes the sequences of another rank, for nothing
            own = self._own if has_own else slice(self._own.stop - self._own.start)
            args, kwargs = self._inputs(next(model.parameters()).device, own, there)
            self.position += there
            loss = loss_of(model(*args, **kwargs)) / (self.num_sequences / self._at_once)
            yield loss if has_own else 0.0 * loss

    def _inputs(self, device: torch.device, own: slice, num_sequences: int) -> tuple[list[Tensor], dict[str, Any]]:
        """Return the model's arguments for its part of the next sequences, which all ranks together read."""
        if self._windows is None:
            given = [(name, to_device(tensor, device)) for name, tensor in self._random]
            return [tensor for name, tensor in given if not name], {name: tensor for name, tensor in given if name}
        size = self._plan.model.vocab_size
        there = sequences(self._windows, self.position, num_sequences, seed=self._seed, vocab_size=size)
        tokens = to_device(there[own], device)
        further = {} if isinstance(self._plan.model, CapturedModel) else {"use_cache": False}
        return [], {"input_ids": tokens, "labels": tokens, **further}


def loss_of(output: Any, _batch: object = None) -> Tensor:
    """Return the loss in a model's output: its ``loss``, which may have no gradient, or what a capture finds."""
    own = getattr(output, "loss", None)
    return own if isinstance(own, Tensor) and own.dim() == 0 else find_loss(output)[0]


def to_device(batch: Tensor, device: torch.device) -> Tensor:
    """Copy a batch to a device from pinned memory. A copy from pageable memory would wait for the device's work."""
    return batch.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else batch.to(device)


def batch_shapes(plan: Plan) -> BatchShapes:
    """Return the shapes of the inputs of a plan's model, by name."""
    if isinstance(plan.model, CapturedModel):
        return tuple((spec.name, spec.shape) for spec in plan.model.inputs)
    return (("input_ids", (plan.decisions.micro_batch, plan.seq_len)),)


def random_input(spec: CapturedInput, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Return normal values, integers within the vocabulary, or ones (a mask that masks nothing)."""
    if spec.dtype == "float":
        return torch.randn(spec.shape, generator=generator, device="cpu").to(dtype)
    kind = getattr(torch, spec.dtype)
    if spec.num_values is None and not spec.begins:
        return torch.ones(spec.shape, dtype=kind, device="cpu")
    values = torch.randint(spec.num_values or 2, spec.shape, generator=generator, dtype=kind, device="cpu")
    return begun(spec, values) if spec.begins else values
