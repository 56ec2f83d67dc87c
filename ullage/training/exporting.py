"""Export the weights of a checkpoint for other programs."""

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch

from executor.checkpoint import Checkpoint, DamagedError, ReadRequest
from executor.checkpoint.format.layout import ITEM_BYTES
from executor.checkpoint.source import MODEL_FOLDER
from executor.distributed.shards import assemble, whole_name
from executor.module.naming import Shape
from executor.weights.files import DTYPES
from executor.weights.folder import MAX_SHARD_BYTES, WeightsFolder
from executor.weights.saving import SAVED_DTYPES, Dtype

_READ_BYTES: Final = 256 << 20  # float32 bytes to read at once, plus one tensor


def export_hf(
    checkpoint: Checkpoint, folder: Path, dtype: Dtype = "bfloat16", max_shard_bytes: int = MAX_SHARD_BYTES
) -> int:
    """Write a checkpoint's weights in the format of ``transformers``; return the number of tensors.

    Every value is checked against its checksum when it is read. The folder appears in one step, when it is complete.

    Args:
        checkpoint: a checkpoint of any number of ranks.
        folder: a folder that does not exist.
        dtype: type of the exported weights; the checkpoint has float32, or bf16 if that is the master copy.
        max_shard_bytes: maximum bytes of one file, unless a single tensor is larger.

    Raises:
        DamagedError: weights of the checkpoint are damaged.
        ValueError: the folder exists already.
        OSError: the folder cannot be written.
    """
    weights = _weights(checkpoint)
    shapes = {name: Shape(weight.shape, SAVED_DTYPES[dtype]) for name, weight in weights.items()}
    config: dict[str, Any] | None = checkpoint.manifest.extra["ranks"][0].get("config")
    with WeightsFolder(folder) as new:
        if config is not None:
            (new.path / "config.json").write_text(json.dumps(config | {"dtype": dtype}, indent=2) + "\n", "utf-8")
        new.write_tensors(shapes, _values(checkpoint, weights), max_shard_bytes)
        new.commit()
    return len(weights)


@dataclasses.dataclass(frozen=True, slots=True)
class _Weight:
    """A parameter: its shape, and the names of its saved shards."""

    shape: tuple[int, ...]
    own_names: list[str]

    @property
    def num_values(self) -> int:
        return math.prod(self.shape)


def _weights(checkpoint: Checkpoint) -> dict[str, _Weight]:
    """Return the full parameters of a checkpoint, for any sharding."""
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


def _values(checkpoint: Checkpoint, weights: dict[str, _Weight]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield full tensors in float32. Several tensors are read at once, because readers work in parallel."""
    held: dict[str, _Weight] = {}
    num_values = 0
    for name, weight in weights.items():
        held[name] = weight
        num_values += weight.num_values
        if num_values * ITEM_BYTES["F32"] >= _READ_BYTES:
            yield from _read(checkpoint, held).items()
            held, num_values = {}, 0
    yield from _read(checkpoint, held).items()


def _read(checkpoint: Checkpoint, weights: dict[str, _Weight]) -> dict[str, torch.Tensor]:
    records = {own: checkpoint.manifest.tensors[own] for weight in weights.values() for own in weight.own_names}
    parts = {
        own: torch.empty(record.shape, dtype=DTYPES[record.dtype], device="cpu") for own, record in records.items()
    }
    checkpoint.read(ReadRequest(own, 0, values.reshape(-1).view(torch.uint8).numpy()) for own, values in parts.items())
    wide = {own: values.float() for own, values in parts.items()}
    return {name: _joined(checkpoint, name, weight, wide) for name, weight in weights.items()}


def _joined(checkpoint: Checkpoint, name: str, weight: _Weight, parts: dict[str, torch.Tensor]) -> torch.Tensor:
    if weight.own_names == [name]:
        return parts[name]
    whole = torch.empty(weight.shape, device="cpu")
    try:
        assemble(name, {own: parts[own] for own in weight.own_names}, whole)
    except (ValueError, RuntimeError) as error:  # torch raises these if shapes do not match
        raise DamagedError(
            f"{checkpoint.folder}: {error}; the checkpoint is from an older version, or is damaged"
        ) from error
    return whole
