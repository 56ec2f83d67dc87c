"""``ullage.Data``: batches from files, in an order that can resume at any step."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import nn

from ullage.data.batches import DataBatch, packed, padded
from ullage.data.order import Order, shares
from ullage.data.packing import Sequences
from ullage.data.packing import packed as packed_pieces
from ullage.data.pieces import Counts, Pieces
from ullage.data.tokenizers import checked, tokenizer_at

_SPLIT: Final = 0x5E1EC7  # makes the random numbers of the split differ from those of epochs


@final
class Data:
    """Text, chat or instructions from files, as batches of training steps.

    A text (``.txt``) is one document. JSON lines, a JSON list or a Parquet table have records: ``{"text": ...}``,
    ``{"messages": [...]}`` for the tokenizer's chat template, ``{"prompt": ..., "completion": ...}`` of two texts or
    two lists of messages, or ``{"instruction": ..., "input": ..., "output": ...}``. In a text, all tokens are targets
    of the loss; in other records, only the answers are, without messages of ``"weight": 0``. If a text is longer than a
    sequence, it continues in another sequence; other records are truncated. ``datasets`` caches the tokens.

    Args:
        path: a file or a folder.
        tokenizer: a folder, the name of a hub's model on this machine, or a tokenizer of ``transformers``.
        seq_len: maximum tokens of a sequence.
        micro_batch: sequences per call of the model on one rank.
        num_micro_batches: micro-batches of each step.
        pack: put several documents into one sequence and keep them apart by ``position_ids``. Otherwise each document
            is one sequence, padded to the longest of its batch.
        drop_last: drop the last step of an epoch if it is smaller than the others.
        eval_split: fraction of all pieces that is held out for :meth:`evaluate`, drawn with the seed.
        seed: seed of the order in each epoch, and of the split.

    Attributes:
        tokenizer: the tokenizer of ``transformers``.
        seq_len, micro_batch, num_micro_batches, pack: the arguments.
        rank, num_ranks: this rank and the number of ranks that share every batch; see :meth:`share`.
        counts: number of documents, tokens and targets in the files.
        num_sequences, num_eval_sequences: sequences for training in each epoch, and for evaluation.
        num_tokens: tokens of the latest step over all ranks, without padding.
        position: sequences that all ranks together have read since the first epoch began. Set it to resume. With the
            same files and arguments, the same sequences follow a position, for any number of ranks and micro-batches.

    Raises:
        ModuleNotFoundError: ``datasets`` is missing.
        ValueError: an argument or a line of the data is wrong, or no data are left for training or evaluation.
        OSError: a file cannot be read.
    """

    def __init__(
        self,
        path: str | Path,
        tokenizer: Any,
        seq_len: int,
        micro_batch: int = 1,
        num_micro_batches: int = 1,
        *,
        pack: bool = False,
        drop_last: bool = False,
        eval_split: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.seq_len, self.micro_batch, self.num_micro_batches, self.pack = (
            seq_len,
            micro_batch,
            num_micro_batches,
            pack,
        )
        self._check(path, eval_split, seed)
        self.tokenizer = checked(tokenizer_at(tokenizer) if isinstance(tokenizer, str | Path) else tokenizer)
        self._pieces = Pieces(Path(path).expanduser(), self.tokenizer, seq_len)
        self._seed = seed
        mine, held_out = self._split(eval_split)
        self._sequences, self._eval_sequences = self._sequenced(mine), self._sequenced(held_out)
        self._drop_last = drop_last
        self.share(_environment("RANK", 0), _environment("WORLD_SIZE", 1))
        self.position = self.num_tokens = 0

    def share(self, rank: int, num_ranks: int) -> None:
        """Set the rank whose part of every batch to return. The default is this process's rank under ``torchrun``.

        Args:
            rank: the data-parallel rank. Ranks that share layers (tensor parallelism) compute on the same batch and
                give the same number.
            num_ranks: number of data-parallel ranks.

        Raises:
            ValueError: the rank does not exist, or an epoch has no full step for so many ranks and smaller steps are
                dropped.
        """
        if not 0 <= rank < num_ranks:
            raise ValueError(f"rank is {rank}, but there are {num_ranks} ranks, counted from 0; give one of these")
        per_step = self.micro_batch * self.num_micro_batches * num_ranks
        self._order = Order(len(self._sequences), per_step, self._seed, drop_last=self._drop_last)
        self.rank, self.num_ranks = rank, num_ranks

    def check_vocabulary(self, size: int) -> None:
        """Check that a model with a vocabulary of ``size`` knows all tokens of the tokenizer.

        Raises:
            ValueError: the tokenizer has more tokens.
        """
        if len(self.tokenizer) > size:
            raise ValueError(
                f"the tokenizer has {len(self.tokenizer)} tokens, but the model knows {size}; give the tokenizer of "
                "this model, or resize the model's embeddings"
            )

    @property
    def counts(self) -> Counts:
        """Counts over the files."""
        return self._pieces.counts

    @property
    def num_sequences(self) -> int:
        """Sequences to train on in each epoch."""
        return len(self._sequences)

    @property
    def num_eval_sequences(self) -> int:
        """Sequences to evaluate on."""
        return len(self._eval_sequences)

    def num_steps(self, epochs: int) -> int:
        """Return the number of steps from :attr:`position` to the end of epoch ``epochs``."""
        return self._order.num_steps(epochs, self.position)

    @property
    def epoch_has_ended(self) -> bool:
        """Whether the latest step was the last one of its epoch."""
        return self.position > 0 and self.position % self._order.per_epoch == 0

    def example(self) -> dict[str, torch.Tensor]:
        """Return inputs of the largest batch, for ``ullage.prepare(model, optimizer, data.example())``.

        They include an attention mask, for packed data too: a model turns ``position_ids`` into a mask of the same
            size,
        but only values of a real batch show the boundaries of documents.
        """
        tokens = torch.zeros(self.micro_batch, self.seq_len, dtype=torch.int64)
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens.clone()}

    def steps(self, epochs: int = 1) -> Iterator[list[DataBatch]]:
        """Yield the micro-batches of each step, from :attr:`position` to the end of epoch ``epochs``.

        All ranks iterate together and have the same number of micro-batches in each step.

        Args:
            epochs: epochs since the first one began, so that a resumed run ends at the same step.
        """
        _check_whole("epochs", epochs, 1)
        while self.position < epochs * self._order.per_epoch:
            yield self.step()

    def step(self) -> list[DataBatch]:
        """Return this rank's micro-batches of the step at :attr:`position`, and advance the position."""
        rows = self._order.step(self.position)
        self.num_tokens = int(sum(self._pieces.lengths[self._sequences[row]].sum() for row in rows))
        batches = self._batches(self._sequences, rows)
        self.position += len(rows)
        return batches

    def evaluate(self, model: nn.Module) -> float:
        """Return the mean loss over all target tokens of the held-out data. All ranks call it together.

        The model is in evaluation mode meanwhile; its mode is restored afterwards.

        Raises:
            ValueError: nothing is held out.
        """
        sums = np.array(self.eval_sums(model))
        if self.num_ranks > 1:
            every: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(every, sums)
            sums = np.sum(every, axis=0)
        return float(sums[0] / sums[1])

    def eval_sums(self, model: nn.Module) -> tuple[float, int]:
        """Return the sum of this rank's losses over the held-out data, and its number of target tokens.

        Raises:
            ValueError: nothing is held out.
        """
        if not len(self._eval_sequences):
            raise ValueError(
                "no data are held out for evaluation; give for example --eval-split 0.05 (eval_split=0.05)"
            )
        total, num_targets, was_training = 0.0, 0, model.training
        model.eval()
        try:
            with torch.no_grad():
                for batch in self._batches(self._eval_sequences, np.arange(len(self._eval_sequences))):
                    total += float(batch.mean_loss(model)) * batch.num_targets
                    num_targets += batch.num_targets
        finally:
            model.train(was_training)
        return total, num_targets

    def state_dict(self) -> dict[str, Any]:
        """Return the position and the identity of the data, for checkpoints."""
        return {"position": self.position, "data": self._identity()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at a saved position.

        Raises:
            ValueError: the position belongs to other data.
        """
        if not (isinstance(saved := state_dict.get("data"), dict) and isinstance(state_dict.get("position"), int)):
            raise ValueError(  # noqa: TRY004 - a file may be wrong, not a call
                "the state is not from Data.state_dict(); give such a state, or resume from a checkpoint"
            )
        for name, value in self._identity().items():
            if saved.get(name, value) != value:
                raise ValueError(
                    f"the checkpoint is of data whose {name} is {saved[name]}, but here it is {value}; continue with "
                    "the same files, tokenizer and options"
                )
        self.position = state_dict["position"]

    def __str__(self) -> str:
        found = self.counts
        words = [f"{found.documents:,} documents in {self.num_sequences:,} sequences"]
        if len(self._eval_sequences):
            words.append(f"{self.num_eval_sequences:,} more to evaluate on")
        words.append(f"{found.targets / found.tokens:.0%} of {found.tokens:,} tokens are targets")
        if found.cut_off:
            words.append(f"{found.cut_off:,} documents longer than {self.seq_len:,} tokens were cut off")
        if found.without_targets:
            words.append(f"{found.without_targets:,} without target tokens were left out")
        return ", ".join(words)

    def _check(self, path: object, eval_split: object, seed: object) -> None:
        if not isinstance(path, str | Path):
            raise TypeError(f"the data are {type(path).__name__}; give the path of a file or folder")
        if not isinstance(eval_split, int | float) or not 0 <= eval_split < 1:
            raise ValueError(f"eval_split is {eval_split!r}, but must be a fraction of the data; give for example 0.05")
        _check_whole("seq_len", self.seq_len, 2, ", as a token is predicted from those before it")
        _check_whole("micro_batch", self.micro_batch, 1)
        _check_whole("num_micro_batches", self.num_micro_batches, 1)
        _check_whole("seed", seed, 0)

    def _split(self, eval_split: float) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the numbers of pieces to train on and to evaluate on."""
        num_pieces = len(self._pieces)
        num_eval = round(eval_split * num_pieces)
        if eval_split and not 0 < num_eval < num_pieces:
            what = "evaluate on" if not num_eval else "train on"
            raise ValueError(
                f"--eval-split {eval_split:g} of {num_pieces} pieces of data leaves none to {what}; give another "
                "share, or more data"
            )
        drawn = (
            np.random.default_rng([self._seed, _SPLIT]).permutation(num_pieces) if num_eval else np.arange(num_pieces)
        )
        return np.sort(drawn[num_eval:]), np.sort(drawn[:num_eval])

    def _sequenced(self, pieces: npt.NDArray[np.int64]) -> Sequences:
        if not self.pack:
            return Sequences(pieces, np.arange(len(pieces) + 1))
        found = packed_pieces(self._pieces.lengths[pieces], self.seq_len)
        return Sequences(pieces[found.pieces], found.bounds)

    def _batches(self, sequences: Sequences, rows: npt.NDArray[np.int64]) -> list[DataBatch]:
        of_step = int(sum(self._pieces.targets[sequences[row]].sum() for row in rows))
        found = []
        for share in shares(rows, self.micro_batch, self.rank, self.num_ranks):
            numbers = [sequences[row] for row in share.rows]
            every = np.concatenate(numbers)
            num_targets = int(self._pieces.targets[every].sum()) if share.counts else 0
            num_tokens = int(self._pieces.lengths[every].sum()) if share.counts else 0
            inputs = self._inputs(numbers)
            found.append(DataBatch(inputs, self.num_ranks * num_targets / of_step, num_targets, num_tokens))
        return found

    def _inputs(self, numbers: list[npt.NDArray[np.int64]]) -> dict[str, torch.Tensor]:
        fill = next((t for t in (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id) if t is not None), 0)
        pieces = iter(self._pieces.read(np.concatenate(numbers)))
        rows = [[next(pieces) for _ in of_row] for of_row in numbers]
        if self.pack:
            return packed(rows, self.seq_len, fill)
        return padded([row[0] for row in rows], fill)

    def _identity(self) -> dict[str, Any]:
        """Return facts about the data that must be equal for a position to have the same meaning."""
        found = self.counts
        return {
            "number of documents": found.documents,
            "number of tokens": found.tokens,
            "number of target tokens": found.targets,
            "seq_len": self.seq_len,
            "packing": self.pack,
            "number of sequences": self.num_sequences,
            "number of sequences in an epoch": self._order.per_epoch,
            "seed": self._seed,
            "digest of tokens": self._pieces.digest,
        }


def _check_whole(name: str, value: object, least: int, why: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} is {value!r}; give a whole number from {least} on{why}")


def _environment(name: str, default: int) -> int:
    return int(os.environ.get(name) or default)
