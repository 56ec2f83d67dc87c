"""Layouts, boxes, and readers that are not ours."""

import itertools
import math

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from saving import part_of
from torch.distributed.checkpoint import HuggingFaceStorageReader

from executor.checkpoint.files.system_calls import CheckpointError, Files
from executor.checkpoint.files.writer import Flusher, ShardWriter, ring_of
from executor.checkpoint.format.layout import TensorBox, boxes, layout
from executor.checkpoint.format.manifest import Manifest
from executor.checkpoint.format.reader import Checkpoint, ReadRequest
from executor.checkpoint.places.folder import FolderPlace

shapes = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


@given(shape=shapes, data=st.data())
def test_boxes_are_the_range_in_order_each_value_once(shape, data):
    size = math.prod(shape)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    whole = np.arange(size).reshape(shape)
    found = list(boxes(shape, start, stop))
    assert len(found) <= 2 * len(shape) - 1
    for box in found:
        entry = TensorBox("w", "F32", shape, box)
        part = whole[tuple(slice(o, o + n) for o, n in zip(entry.offsets, entry.extents, strict=True))]
        assert part.reshape(-1).tolist() == list(box)
    assert [i for box in found for i in box] == list(range(start, stop))


def write(store, step, shards):
    """Write tensors by name, each rank's flat ranges of them, as files of boxes; return the checkpoint's folder."""
    draft = store.begin(step, ["model"])
    parts = []
    with Flusher(Files(), ring_of(2, 4096)) as flusher:
        for rank, ranges in enumerate(shards):
            by_file: dict[int, list[tuple[TensorBox, torch.Tensor]]] = {}
            for name, (tensor, start, stop) in ranges.items():
                for index, box in enumerate(boxes(tuple(tensor.shape), start, stop)):
                    entry = TensorBox(name, "F32", tuple(tensor.shape), box)
                    by_file.setdefault(index, []).append((entry, tensor.reshape(-1)[box.start : box.stop]))
            written = []
            for index, held in by_file.items():
                made = layout(tuple(entry for entry, _ in held))
                writer = ShardWriter(flusher, draft, f"model/rank-{rank}-{index}.safetensors", made)
                for _, values in held:
                    writer.append(values.numpy().view(np.uint8))
                written.append((made, writer.finish()))
            parts.append(part_of(written))
        return store.complete(draft.name, Manifest.of(step, parts, {}))


TENSORS = {"w": torch.randn(13, 7), "experts": torch.randn(3, 5, 4), "b": torch.randn(11)}


def cut(num_ranks, shift=0):
    """Return the ranges of all tensors, one behind the other, that ranks have."""
    total = sum(tensor.numel() for tensor in TENSORS.values())
    cuts = [0, *sorted((total * i // num_ranks + shift) % total for i in range(1, num_ranks)), total]
    shards = []
    for low, high in itertools.pairwise(cuts):
        ranges, base = {}, 0
        for name, tensor in TENSORS.items():
            start, stop = max(low - base, 0), min(high - base, tensor.numel())
            if start < stop:
                ranges[name] = (tensor, start, stop)
            base += tensor.numel()
        shards.append(ranges)
    return shards


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 7])
def test_the_stock_reader_of_distributed_checkpoints_loads_what_any_number_of_ranks_wrote(tmp_path, num_ranks):
    folder = write(FolderPlace(tmp_path / "store"), 1, cut(num_ranks, shift=3))
    loaded = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    dcp.load(loaded, storage_reader=HuggingFaceStorageReader(str(folder / "model")), no_dist=True)
    for name, tensor in TENSORS.items():
        assert torch.equal(loaded[name], tensor), name


def test_safetensors_loads_what_one_rank_wrote(tmp_path):
    folder = write(FolderPlace(tmp_path / "store"), 1, cut(1))
    loaded = load_file(folder / "model" / "rank-0-0.safetensors")
    assert loaded.keys() == TENSORS.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in TENSORS.items())


@given(num_ranks=st.integers(1, 6), name=st.sampled_from(sorted(TENSORS)), data=st.data())
def test_any_range_is_read_whoever_wrote_it(num_ranks, name, data, tmp_path_factory):
    folder = write(
        FolderPlace(tmp_path_factory.mktemp("any") / "store"), 1, cut(num_ranks, shift=data.draw(st.integers(0, 50)))
    )
    flat = TENSORS[name].reshape(-1).numpy()
    start = data.draw(st.integers(0, flat.size))
    stop = data.draw(st.integers(start, flat.size))
    found = np.empty(stop - start, np.float32)
    with Checkpoint(folder) as checkpoint:
        checkpoint.read([ReadRequest(name, start, found.view(np.uint8))])
        assert np.array_equal(found, flat[start:stop])
        with pytest.raises(CheckpointError, match="the checkpoint is of another model"):
            checkpoint.read([ReadRequest(name, 1, np.empty(4 * flat.size, np.uint8))])


@given(sizes=st.lists(st.integers(0, 5000), min_size=1, max_size=6), num_buffers=st.integers(1, 4))
def test_values_may_change_as_soon_as_they_were_given(sizes, num_buffers, tmp_path_factory):
    """And the files are those of a plain layout: what they hold does not depend on buffers or threads."""
    folder = tmp_path_factory.mktemp("poison")
    tensors = {f"t{i}": np.random.default_rng(i).random(size, np.float32) for i, size in enumerate(sizes)}
    made = layout(tuple(TensorBox(n, "F32", v.shape, b) for n, v in tensors.items() for b in boxes(v.shape, 0, v.size)))
    with Flusher(Files(), ring_of(num_buffers + 1, 4096)) as flusher:
        writer = ShardWriter(flusher, folder, "x.safetensors", made)
        for entry in made.entries:
            given_values = tensors[entry.name].copy()
            writer.append(given_values.view(np.uint8))
            given_values[:] = np.nan
        record = writer.finish()
    loaded = load_file(folder / "x.safetensors")
    assert all(np.array_equal(loaded[entry.name].numpy(), tensors[entry.name]) for entry in made.entries)
    assert (folder / "x.safetensors").stat().st_size == record.num_bytes == made.num_bytes


def test_one_name_twice_in_a_file_is_refused():
    (box,) = boxes((3,), 0, 3)
    with pytest.raises(ValueError, match="w is in one file twice"):
        layout((TensorBox("w", "F32", (3,), box),) * 2)


def test_values_that_nobody_wrote_are_missed(tmp_path):
    shards = cut(3)
    del shards[1]
    with pytest.raises(CheckpointError, match="w has 91 values, but only 54 are present"):
        write(FolderPlace(tmp_path / "store"), 1, shards)
    assert not FolderPlace(tmp_path / "store").folders()
