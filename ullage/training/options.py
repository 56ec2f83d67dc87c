"""The options of `ullage execute`."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

from planner.terms import AuditTime

TokenDtype = Literal["uint16", "uint32"]
TOKEN_DTYPES: Final[tuple[TokenDtype, ...]] = ("uint16", "uint32")
"""Types of the tokens of a raw file, little-endian."""
MIN_CHECKPOINTS: Final = 2
"""Minimum number of checkpoints to keep, because the newest may be damaged."""
DEFAULT_CHECKPOINTS: Final = 2


@dataclasses.dataclass(frozen=True)
class ExecuteOptions:
    """Options of ``ullage execute``.

    Attributes:
        num_iterations: number of optimizer steps; ``None``: 30, or those of ``epochs``.
        text: a text file to train on. Without ``text``, ``tokens`` and ``data``, the built-in English text is used.
        tokens: a file of tokens to train on.
        token_dtype: type of the tokens in a raw file.
        data: files with text, chat or instructions; see :class:`ullage.Data` for these and ``pack`` to ``eval_split``.
        tokenizer: a folder, or the name of a hub's model on this machine; ``None``: the tokenizer beside ``weights``.
        pack: put several documents into one sequence.
        epochs: passes over the data.
        drop_last: drop a smaller last step of an epoch.
        eval_split: fraction of the data that is held out for evaluation.
        eval_every: iterations between evaluations; ``None``: evaluate at the end of each epoch.
        data_position: position to begin at; see :class:`ullage.training.text.TokenStream`.
        seed: seed of the weights and of the order of the data.
        lr: learning rate.
        output_dir: folder for results; made if it does not exist.
        storage_dir: folder for the data that the plan keeps on NVMe during training; ``None``: ``output_dir``.
        compile_blocks: compile the repeated blocks with ``torch.compile``.
        cores: the cores that this machine's ranks divide, ``auto`` or ``free``; see
            :class:`ullage.Options`.
        audit: see :class:`ullage.Options`.
        replan: after some iterations, plan again with measured rates, and change to a faster plan.
        weights: a folder of safetensors files to begin with, or the name of a hub's model on this machine.
        save: a new folder for the trained model, in the format of ``from_pretrained``.
        save_dtype: type of the saved weights; ``None``: that of the plan.
        checkpoint_places: places of checkpoints, fastest first; empty: no checkpoints. See
            :mod:`ullage.training.levels`.
        checkpoint_every: iterations between checkpoints, for each place or one for all.
        keep: number of newest checkpoints to keep, at least :data:`MIN_CHECKPOINTS`, for each place or one for all;
            empty: :data:`DEFAULT_CHECKPOINTS`.
        resume: continue from the newest checkpoint in any place, if there is one.
        tensorboard: a folder for TensorBoard's event files.
        metrics_file: a file in Prometheus' text format.
        allow_other_machine: run a plan whose profile was measured on another machine.
        json: print JSON instead of tables.
        device: ``host`` (threads), ``cuda``, or ``auto``: the kind that the plan is for.
    """

    num_iterations: int | None = None
    text: Path | None = None
    tokens: Path | None = None
    token_dtype: TokenDtype | None = None
    data: Path | None = None
    tokenizer: str | None = None
    pack: bool = False
    epochs: int | None = None
    drop_last: bool = False
    eval_split: float = 0.0
    eval_every: int | None = None
    data_position: int = 0
    seed: int = 0
    lr: float = 1e-3
    output_dir: Path = Path("out")
    storage_dir: Path | None = None
    compile_blocks: bool = False
    audit: AuditTime = "first"
    cores: tuple[int, ...] | Literal["auto", "free"] = "auto"
    replan: bool = False
    weights: str | None = None
    save: Path | None = None
    save_dtype: Literal["bfloat16", "float16", "float32"] | None = None
    checkpoint_places: Sequence[str] = ()
    checkpoint_every: tuple[int, ...] = ()
    keep: tuple[int, ...] = ()
    resume: bool = False
    tensorboard: Path | None = None
    metrics_file: Path | None = None
    allow_other_machine: bool = False
    json: bool = False
    device: Literal["auto", "host", "cuda"] = "auto"
