"""Batches: tensors of some sequences, and their weight in the loss of a step."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor, nn

from ullage.data.documents import check_documents, takes_positions, without_cache

IGNORED: Final = -100
"""The label of a token that is not a target of the loss."""

Piece = tuple[Sequence[int], Sequence[bool]]
"""The tokens of one piece of a document, and which of them are targets. The first token is never a target."""


@dataclasses.dataclass(frozen=True, slots=True)
class DataBatch:
    """One micro-batch of one rank.

    Attributes:
        inputs: keyword arguments for a model of ``transformers``, beside ``use_cache=False``. ``input_ids`` and
            ``labels`` are int64[sequences, tokens]; a label is -100 if the token is not a target. Padded batches also
            have an ``attention_mask``. Packed batches have ``position_ids``, which begin at 0 with each document.
        weight: factor for the model's mean loss. The weights of a step add up to the number of ranks, because gradients
            are averaged over ranks. So the step's gradient is that of the mean loss over all its target tokens.
        num_targets: target tokens of this batch.
        num_tokens: tokens of this batch without padding.
    """

    inputs: dict[str, Tensor]
    weight: float
    num_targets: int
    num_tokens: int

    def loss(self, model: nn.Module) -> Tensor:
        """Return this batch's part of the step's loss; call ``backward()`` on it.

        Before a model's first packed batch, this tests whether attention keeps documents apart, and warns if it does
        not.

        Raises:
            ValueError: the model returns no loss.
        """
        return self.mean_loss(model) * self.weight

    def mean_loss(self, model: nn.Module) -> Tensor:
        """Move this batch to the model's device and return the mean loss over its target tokens.

        Raises:
            ValueError: the model returns no loss.
        """
        device = next(model.parameters()).device
        inputs = {name: to_device(tensor, device) for name, tensor in self.inputs.items()}
        if "position_ids" in inputs:
            check_documents(model)
            if not takes_positions(model):
                del inputs["position_ids"]
        output = model(**inputs, **without_cache(model))
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if not isinstance(loss, Tensor):
            raise ValueError(  # noqa: TRY004 - the caller gave the wrong model
                f"{type(model).__name__} returned no loss for input_ids and labels; give a causal language model of "
                "transformers, or a module that returns an object with a loss"
            )
        return loss


def padded(pieces: Sequence[Piece], fill: int) -> dict[str, Tensor]:
    """Return a batch with one piece per row, padded on the right to the longest piece.

    Args:
        pieces: at least one.
        fill: the padding token.
    """
    seq_len = max(len(tokens) for tokens, _ in pieces)
    rows = [_row([piece], seq_len, fill) for piece in pieces]
    lengths = torch.tensor([len(tokens) for tokens, _ in pieces])
    mask = (torch.arange(seq_len) < lengths[:, None]).long()
    return {"input_ids": _stacked(rows, 0), "attention_mask": mask, "labels": _stacked(rows, 1)}


def packed(rows: Sequence[Sequence[Piece]], seq_len: int, fill: int) -> dict[str, Tensor]:
    """Return a batch with several pieces per row, padded to ``seq_len``. The padding is a document of its own.

    Args:
        rows: pieces of each row, at most ``seq_len`` tokens together.
        seq_len: tokens of a row.
        fill: the padding token.
    """
    made = [_row(pieces, seq_len, fill) for pieces in rows]
    return {name: _stacked(made, number) for number, name in enumerate(("input_ids", "labels", "position_ids"))}


def to_device(batch: Tensor, device: torch.device) -> Tensor:
    """Copy a batch to a device from pinned memory. A copy from pageable memory would wait for the device's work."""
    return batch.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else batch.to(device)


def _row(pieces: Sequence[Piece], seq_len: int, fill: int) -> tuple[list[int], list[int], list[int]]:
    """Return tokens, labels and positions of a row."""
    tokens, labels, positions = list[int](), list[int](), list[int]()
    for own, targets in pieces:
        tokens += own
        labels += [token if is_target else IGNORED for token, is_target in zip(own, targets, strict=True)]
        positions += range(len(own))
    rest = seq_len - len(tokens)
    return tokens + [fill] * rest, labels + [IGNORED] * rest, [*positions, *range(rest)]


def _stacked(rows: Sequence[tuple[list[int], ...]], number: int) -> Tensor:
    return torch.tensor([row[number] for row in rows])
