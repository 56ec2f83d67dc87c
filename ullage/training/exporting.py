"""Weights of a checkpoint as other programs have them."""

import dataclasses
import json
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch
from safetensors.torch import save_file

from executor.checkpoint import Checkpoint, DamagedError, ReadRequest
from executor.checkpoint.format.layout import ITEM_BYTES
from executor.checkpoint.source import MODEL_FOLDER
from executor.distributed.shards import assemble, whole_name
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
    if os.path.lexists(folder):  # also a link to nothing, in whose place no folder can come
        raise ValueError(f"{folder} is there already; export into a new folder")
    new = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    try:
        names = _weights(checkpoint)
        shards = list(_shards(names, DTYPES[dtype].itemsize, max_shard_bytes))
        index: dict[str, str] = {}
        for number, held in enumerate(shards, 1):
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else "model.safetensors"
            tensors: dict[str, torch.Tensor] = {}
            for names_read in _shards(held, ITEM_BYTES["F32"], _READ_BYTES):
                read = _read(checkpoint, names_read)
                tensors |= {name: values.to(DTYPES[dtype]) for name, values in read.items()}
            save_file(tensors, new / file, metadata={"format": "pt"})
            index |= dict.fromkeys(held, file)
        if len(shards) > 1:
            total = sum(weight.num_values for weight in names.values()) * DTYPES[dtype].itemsize
            text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2)
            write_whole(new / "model.safetensors.index.json", text + "\n")
        config: dict[str, Any] | None = checkpoint.manifest.extra["ranks"][0].get("config")
        if config is not None:
            write_whole(new / "config.json", json.dumps(config | {"dtype": dtype}, indent=2) + "\n")
        new.rename(folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return len(names)


@dataclasses.dataclass(frozen=True, slots=True)
class _Weight:
    """A parameter: its shape, and the names under which shares of it were saved."""

    shape: tuple[int, ...]
    own_names: list[str]

    @property
    def num_values(self) -> int:
        return math.prod(self.shape)


def _weights(checkpoint: Checkpoint) -> dict[str, _Weight]:
    """Return what a checkpoint has of a model, whole, whoever shared it."""
    files = checkpoint.manifest.files
    shapes: dict[str, list[int]] = {}
    for of_rank in checkpoint.manifest.extra["ranks"]:
        shapes |= of_rank.get("shapes", {})
    found: dict[str, _Weight] = {}
    for own, record in checkpoint.manifest.tensors.items():
        if all(files[fragment.file].path.startswith(f"{MODEL_FOLDER}/") for fragment in record.fragments):
            name = whole_name(own)
            found.setdefault(name, _Weight(tuple(shapes.get(name, record.shape)), [])).own_names.append(own)
    return found


def _shards(weights: dict[str, _Weight], item_bytes: int, most_bytes: int) -> Iterator[dict[str, _Weight]]:
    held: dict[str, _Weight] = {}
    num_bytes = 0
    for name, weight in weights.items():
        size = weight.num_values * item_bytes
        if held and num_bytes + size > most_bytes:
            yield held
            held, num_bytes = {}, 0
        held[name] = weight
        num_bytes += size
    yield held


def _read(checkpoint: Checkpoint, weights: dict[str, _Weight]) -> dict[str, torch.Tensor]:
    tensors = checkpoint.manifest.tensors
    parts = {own: torch.empty(tensors[own].shape) for weight in weights.values() for own in weight.own_names}
    checkpoint.read(ReadRequest(own, 0, values.reshape(-1).numpy().view(np.uint8)) for own, values in parts.items())
    return {name: _joined(checkpoint, name, weight, parts) for name, weight in weights.items()}


def _joined(checkpoint: Checkpoint, name: str, weight: _Weight, parts: dict[str, torch.Tensor]) -> torch.Tensor:
    if weight.own_names == [name]:
        return parts[name]
    whole = torch.empty(weight.shape)
    try:
        assemble(name, {own: parts[own] for own in weight.own_names}, whole)
    except (ValueError, RuntimeError) as error:  # torch: shapes that do not fit
        raise DamagedError(f"{checkpoint.folder}: {error}; it was made by an older version, or is damaged") from error
    return whole
