"""Weights of a checkpoint as other programs have them."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch
from safetensors.torch import save_file

from executor.checkpoint import Checkpoint, Wanted
from executor.checkpoint.engine import MODEL_FOLDER
from executor.checkpoint.layout import ITEM_BYTES
from hwprofiles.files import write_whole

MAX_SHARD_BYTES: Final = 5_000_000_000
_READ_BYTES: Final = 256 << 20  # of values in float32 at once, unless one tensor has more
DTYPES: Final = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
Dtype = Literal["bfloat16", "float16", "float32"]


def export_hf(
    checkpoint: Checkpoint, folder: Path, dtype: Dtype = "bfloat16", max_shard_bytes: int = MAX_SHARD_BYTES
) -> int:
    """Write a checkpoint's weights as ``transformers`` reads them; return their number.

    Every value is checked as it is read, once, and the folder appears whole or not at all.

    Args:
        checkpoint: of any number of ranks.
        folder: that is not there.
        dtype: of the weights, which a checkpoint has in float32.
        max_shard_bytes: most bytes of one file, unless one tensor has more.

    Raises:
        DamagedError: its weights are damaged.
        ValueError: the folder is there.
        OSError: it cannot be written.
    """
    if folder.exists():
        raise ValueError(f"{folder} is there already; export into a new folder")
    new = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    try:
        names = _model_names(checkpoint)
        shards = list(_shards(checkpoint, names, DTYPES[dtype].itemsize, max_shard_bytes))
        index: dict[str, str] = {}
        for number, held in enumerate(shards, 1):
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else "model.safetensors"
            tensors: dict[str, torch.Tensor] = {}
            for names_read in _shards(checkpoint, held, ITEM_BYTES["F32"], _READ_BYTES):
                read = _read(checkpoint, names_read)
                tensors |= {name: values.to(DTYPES[dtype]) for name, values in read.items()}
            save_file(tensors, new / file, metadata={"format": "pt"})
            index |= dict.fromkeys(held, file)
        if len(shards) > 1:
            total = sum(_num_values(checkpoint, name) for name in names) * DTYPES[dtype].itemsize
            text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2)
            write_whole(new / "model.safetensors.index.json", text + "\n")
        config: dict[str, Any] | None = checkpoint.manifest.extra["ranks"][0].get("config")
        if config is not None:
            write_whole(new / "config.json", json.dumps(config | {"dtype": dtype}, indent=2) + "\n")
        new.rename(folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return len(names)


def _model_names(checkpoint: Checkpoint) -> list[str]:
    files = checkpoint.manifest.files
    return [
        name
        for name, record in checkpoint.manifest.tensors.items()
        if all(files[fragment.file].path.startswith(f"{MODEL_FOLDER}/") for fragment in record.fragments)
    ]


def _shards(checkpoint: Checkpoint, names: list[str], item_bytes: int, most_bytes: int) -> Iterator[list[str]]:
    held: list[str] = []
    num_bytes = 0
    for name in names:
        size = _num_values(checkpoint, name) * item_bytes
        if held and num_bytes + size > most_bytes:
            yield held
            held, num_bytes = [], 0
        held.append(name)
        num_bytes += size
    yield held


def _num_values(checkpoint: Checkpoint, name: str) -> int:
    return checkpoint.manifest.tensors[name].num_values


def _read(checkpoint: Checkpoint, names: list[str]) -> dict[str, torch.Tensor]:
    found = {name: torch.empty(checkpoint.manifest.tensors[name].shape) for name in names}
    checkpoint.read(Wanted(name, 0, values.reshape(-1).numpy().view(np.uint8)) for name, values in found.items())
    return found
