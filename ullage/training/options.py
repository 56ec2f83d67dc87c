"""The options of `ullage execute`."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

TokenDtype = Literal["uint16", "uint32"]
TOKEN_DTYPES: Final[tuple[TokenDtype, ...]] = ("uint16", "uint32")
"""What the tokens of a raw file may be, little-endian."""
MIN_CHECKPOINTS: Final = 2
"""Checkpoints that stay at least: the newest may be damaged."""
DEFAULT_CHECKPOINTS: Final = 2


@dataclasses.dataclass(frozen=True)
class ExecuteOptions:
    """How to run a plan.

    Attributes:
        num_iterations: how many optimizer steps; ``None``: 30, or so many as ``epochs`` have.
        text: what to train on; without it, ``tokens`` and ``data``, the built-in English text.
        tokens: a file of tokens to train on instead of a text.
        token_dtype: type of its tokens, if the file does not say so itself.
        data: files with text, chat or instructions; see :class:`ullage.Data` for these and ``pack`` to ``eval_split``.
        tokenizer: its folder, or the name of a hub's model that is on this machine; ``None``: that beside ``weights``.
        pack: several documents in one sequence.
        epochs: passes over the data.
        drop_last: leave out a smaller last step of an epoch.
        eval_split: share of the data to evaluate on.
        eval_every: iterations from one evaluation to the next; ``None``: one at the end of each epoch.
        data_position: where to begin; see :class:`ullage.training.text.TokenStream`.
        seed: of the weights and of the order of the data.
        lr: learning rate.
        output_dir: where results go; made if it does not exist.
        storage_dir: where what the plan keeps on NVMe is while it trains; ``None``: in ``output_dir``.
        compile_blocks: whether ``torch.compile`` fuses kernels of the repeated blocks.
        cores: what this machine's ranks divide, ``auto`` or ``free``; see :class:`ullage.training.trainer.Settings`.
        replan: plan again after some iterations with measured rates, and change to a faster plan.
        weights: a folder of safetensors files to begin with, or the name of a hub's model that is on this machine.
        save: a new folder for the trained model, as ``from_pretrained`` loads it.
        save_dtype: of the weights there; left out, that of the plan.
        checkpoint_places: where checkpoints go, fastest first; empty: none are made. See :mod:`ullage.training.levels`.
        checkpoint_every: iterations from one to the next, for each place or all.
        keep: the newest checkpoints that stay, at least :data:`MIN_CHECKPOINTS`, for each place or all; empty:
            :data:`DEFAULT_CHECKPOINTS`.
        resume: go on from the newest checkpoint that is in any place, if there is one.
        tensorboard: a folder for TensorBoard's event files.
        metrics_file: a file in Prometheus' text format.
        allow_other_machine: run a plan for a profile that was measured on another machine.
        json: print JSON instead of tables.
        device: ``host`` (threads), ``cuda``, or ``auto``: what the plan was made for.
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
