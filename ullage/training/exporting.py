"""Export the weights of a checkpoint for other programs."""

import itertools
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch

from executor.checkpoint.files.system_calls import DamagedError
from executor.checkpoint.format.layout import ITEM_BYTES
from executor.checkpoint.format.reader import Checkpoint
from executor.checkpoint.source import MODEL_FOLDER
from executor.distributed.shards import whole_name
from executor.training_state.restoring import read_whole
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
    shapes = _shapes(checkpoint)
    config: dict[str, Any] | None = checkpoint.manifest.extra["ranks"][0].get("config")
    with WeightsFolder(folder) as new:
        if config is not None:
            (new.path / "config.json").write_text(json.dumps(config | {"dtype": dtype}, indent=2) + "\n", "utf-8")
        saved = {n: torch.empty(shape, dtype=SAVED_DTYPES[dtype], device="meta") for n, shape in shapes.items()}
        new.write_tensors(saved, _values(checkpoint, shapes), max_shard_bytes)
        new.commit()
    return len(shapes)


def _shapes(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the whole parameters of a checkpoint, for any sharding."""
    files = checkpoint.manifest.files
    shapes: dict[str, list[int]] = {}
    for of_rank in checkpoint.manifest.extra["ranks"]:
        shapes |= of_rank.get("shapes", {})
    return {
        (name := whole_name(own)): tuple(shapes.get(name, record.shape))
        for own, record in checkpoint.manifest.tensors.items()
        if all(files[fragment.file].path.startswith(f"{MODEL_FOLDER}/") for fragment in record.fragments)
    }


def _values(checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield whole tensors in float32. Several tensors are read at once, because readers work in parallel."""
    ends = itertools.accumulate(ITEM_BYTES["F32"] * math.prod(shape) for shape in shapes.values())
    for _, batch in itertools.groupby(zip(shapes, ends, strict=True), key=lambda held: held[1] // _READ_BYTES):
        try:
            yield from read_whole(checkpoint, {name: shapes[name] for name, _ in batch}).items()
        except ValueError as error:
            raise DamagedError(
                f"{checkpoint.folder}: {error}; the checkpoint is from an older version, or is damaged"
            ) from error
