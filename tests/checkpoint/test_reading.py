"""Reading ahead: every value, each chunk once, straight to where it goes, in bounded memory."""

import contextlib
import errno
import fcntl
import itertools
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from saving import part_of

from executor.checkpoint.files import opening
from executor.checkpoint.files.system_calls import DamagedError, Files
from executor.checkpoint.files.writer import Flusher, ShardWriter, ring_of
from executor.checkpoint.format import reader
from executor.checkpoint.format.layout import TensorBox, boxes, layout
from executor.checkpoint.format.manifest import Manifest
from executor.checkpoint.format.reader import Checkpoint, ReadRequest
from executor.checkpoint.places.folder import FolderPlace
from executor.direct_io import BLOCK_BYTES, enable_direct_io

SIZES = {"a": 70_000, "b": 3, "c": 1024 * 33, "d": 1}  # values; "c" begins in the middle of a block
ORDER = [("x.safetensors", ("a", "b", "c")), ("y.safetensors", ("d",))]
VALUES = {name: np.random.default_rng(i).random(size, np.float32) for i, (name, size) in enumerate(SIZES.items())}


def write(root, chunk_bytes, order=ORDER):
    place = FolderPlace(root)
    draft = place.begin(1)
    written = []
    with Flusher(Files(), ring_of(3, chunk_bytes)) as flusher:
        for path, names in order:
            made = layout(
                tuple(TensorBox(n, "F32", (SIZES[n],), b) for n in names for b in boxes((SIZES[n],), 0, SIZES[n]))
            )
            writer = ShardWriter(flusher, draft, path, made)
            for name in names:
                writer.append(VALUES[name].view(np.uint8))
            written.append((made, writer.finish()))
    return place.complete(draft.name, Manifest.of(1, [part_of(written)], {}))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return one checkpoint in chunks of several sizes."""
    root = tmp_path_factory.mktemp("read")
    return {blocks: write(root / f"{blocks}", blocks * BLOCK_BYTES) for blocks in (1, 3, 16, 256)}


@pytest.fixture
def small_stretches(monkeypatch):
    monkeypatch.setattr(reader, "_LEAST_DIRECT_BYTES", BLOCK_BYTES)
    monkeypatch.setattr(reader, "_WORTH_A_THREAD_BYTES", 1)


def aligned(num_bytes, phase):
    """Return uninitialised bytes that begin so many bytes behind a block."""
    memory = np.full(num_bytes + 2 * BLOCK_BYTES, 0xAA, np.uint8)
    start = (phase - memory.ctypes.data) % BLOCK_BYTES
    return memory[start : start + num_bytes]


def refuses_odd_addresses(fd, *, writes):
    """Return the alignment of a drive that asks for most, without trying."""
    assert not writes
    enable_direct_io(fd, probes=False)
    return BLOCK_BYTES


def offset_of(checkpoint, name, start):
    (fragment,) = checkpoint.manifest.tensors[name].fragments
    return fragment.offset + 4 * start


@given(data=st.data(), blocks=st.sampled_from([1, 3, 16, 256]), cuts_short=st.booleans())
@pytest.mark.usefixtures("small_stretches")
def test_any_values_come_to_anywhere_however_the_system_cuts_reads_short(folders, data, blocks, cuts_short):
    """Ranges may overlap, and begin anywhere in memory."""

    def preadv(fd, buffers, offset, *, plain=os.preadv):
        assert offset % BLOCK_BYTES == 0
        count = plain(fd, buffers, offset)
        return max(count // 2, min(count, BLOCK_BYTES)) if cuts_short else count

    drawn = data.draw(
        st.lists(
            st.sampled_from(sorted(SIZES)).flatmap(
                lambda name: st.tuples(
                    st.just(name),
                    st.integers(0, SIZES[name]),
                    st.integers(0, SIZES[name]),
                    st.sampled_from([0, 4, 64, 512]),
                )
            ),
            max_size=5,
        )
    )
    with Checkpoint(folders[blocks]) as checkpoint, pytest.MonkeyPatch.context() as patch:
        patch.setattr(opening.os, "preadv", preadv)
        wanted = []
        for name, one, other, shift in drawn:
            start, stop = sorted((one, other))
            out = aligned(4 * (stop - start), offset_of(checkpoint, name, start) + shift)  # 0: as in the file
            wanted.append(ReadRequest(name, start, out))
        checkpoint.read(wanted)
        for one in wanted:
            assert np.array_equal(one.out.view(np.float32), VALUES[one.name][one.start :][: len(one.out) // 4])


@pytest.mark.usefixtures("small_stretches")
@pytest.mark.parametrize("blocks", [1, 16, 256])
def test_each_chunk_is_read_once_and_what_fits_goes_straight_to_its_place(folders, blocks, monkeypatch):
    straight, ends, lock = [], [], threading.Lock()

    def preadv(fd, buffers, offset, *, plain=os.preadv):
        count = plain(fd, buffers, offset)
        with lock:
            ends.append((os.fstat(fd).st_ino, offset, offset + count))
            straight.extend(len(b) for b in buffers if places(b))
        return count

    def places(buffer):
        at = np.frombuffer(buffer, np.uint8).ctypes.data
        return any(o.ctypes.data <= at < o.ctypes.data + len(o) for o in outs)

    with Checkpoint(folders[blocks]) as checkpoint:
        monkeypatch.setattr(opening, "alignment_bytes", refuses_odd_addresses)
        monkeypatch.setattr(opening.os, "preadv", preadv)
        outs = [aligned(4 * size, offset_of(checkpoint, name, 0)) for name, size in SIZES.items()]
        checkpoint.read(ReadRequest(name, 0, out) for name, out in zip(SIZES, outs, strict=True))
        for name, out in zip(SIZES, outs, strict=True):
            assert np.array_equal(out.view(np.float32), VALUES[name])
        assert all(stop <= start for (f, _, stop), (g, start, _) in itertools.pairwise(sorted(ends)) if f == g)
        first = 0 if blocks > 1 else BLOCK_BYTES  # a chunk that has nothing but the header is not wanted
        assert sum(stop - start for _, start, stop in ends) == sum(
            r.num_bytes - first for r in checkpoint.manifest.files
        )
        whole_blocks = sum(4 * size // BLOCK_BYTES - 1 for size in (SIZES["a"], SIZES["c"]))
        assert sum(straight) >= whole_blocks * BLOCK_BYTES, "all but what shares a block with something else"


def test_a_file_system_that_refuses_to_leave_out_the_page_cache_is_read_through_it(folders, monkeypatch):
    refused = []

    def refusing(*_given):
        raise OSError(errno.EINVAL, "Invalid argument")

    def preadv(fd, buffers, offset, *, plain=os.preadv):
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(fd)
            raise OSError(errno.EINVAL, "Invalid argument")
        return plain(fd, buffers, offset)

    monkeypatch.setattr(opening.os, "preadv", preadv)
    with Checkpoint(folders[16]) as checkpoint:
        checkpoint.verify()
    assert refused
    monkeypatch.undo()
    with Checkpoint(folders[16]) as checkpoint, pytest.raises(DamagedError, match="Invalid argument at 0 B"):
        monkeypatch.setattr(opening.os, "preadv", refusing)
        checkpoint.verify()


@pytest.mark.parametrize("error", [errno.EIO, errno.ESTALE])
def test_what_cannot_be_read_is_damaged_and_the_first_is_reported(folders, error, monkeypatch):
    def preadv(fd, buffers, offset, *, plain=os.preadv):
        if offset >= 8 * BLOCK_BYTES:
            time.sleep(0.05 * (offset == 8 * BLOCK_BYTES))  # others fail before
            raise OSError(error, os.strerror(error))
        time.sleep(1e-3)
        return plain(fd, buffers, offset)

    monkeypatch.setattr(reader, "_WORTH_A_THREAD_BYTES", 1)
    monkeypatch.setattr(opening.os, "preadv", preadv)
    with Checkpoint(folders[1]) as checkpoint, pytest.raises(DamagedError, match=r"x.safetensors: .* at 32,768 B"):
        checkpoint.verify()


def test_a_few_chunks_and_files_are_under_way_at_once_and_no_more(tmp_path, monkeypatch):
    under_way, most, sizes, lock = [], [], set(), threading.Lock()

    def preadv(fd, buffers, offset, *, plain=os.preadv):
        with lock:
            under_way.append(fd)
            most.append((len(under_way), num_open()))
            sizes.add(sum(map(len, buffers)))
        time.sleep(5e-4)
        try:
            return plain(fd, buffers, offset)
        finally:
            with lock:
                under_way.remove(fd)

    def num_open():
        count = 0
        for entry in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                count += entry.readlink().is_relative_to(tmp_path)
        return count

    monkeypatch.setattr(opening, "alignment_bytes", refuses_odd_addresses)
    folder = write(tmp_path, 2 * BLOCK_BYTES, [(f"{i}.safetensors", (name,)) for i, name in enumerate(SIZES)])
    monkeypatch.setattr(reader, "_WORTH_A_THREAD_BYTES", 1)
    monkeypatch.setattr(opening.os, "preadv", preadv)
    monkeypatch.setattr(reader, "NUM_THREADS", 2)
    with Checkpoint(folder) as checkpoint:
        checkpoint.verify()
    assert max(chunks for chunks, _ in most) <= 2
    assert max(files for _, files in most) <= 2, "a file is closed once it is read"
    assert num_open() == 0
    assert sizes <= {BLOCK_BYTES, 2 * BLOCK_BYTES}
