"""Memory that is leased to the flusher: written from where it is, never as it is after the lease has ended."""

import itertools
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from executor.checkpoint.files.system_calls import CheckpointError, Files
from executor.checkpoint.files.writer import Flusher, ShardWriter, ring_of
from executor.checkpoint.format.layout import TensorBox, boxes, layout
from executor.direct_io import BLOCK_BYTES

CHUNK_BYTES, SECTOR_BYTES = BLOCK_BYTES, 512
NUM_CHUNKS = 8  # after that which has the header


class Slow(Files):
    """Files whose writes wait until they are told to go on."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.begun = threading.Event()

    def write(self, fd, data, offset):
        self.begun.set()
        self.go_on.wait()
        return super().write(fd, data, offset)


@pytest.fixture
def files():
    slow = Slow()
    yield slow
    slow.go_on.set()


def filled(num_bytes, shift=0):
    """Return memory that begins so many bytes behind a page."""
    memory = ring_of(1, -(-(num_bytes + shift) // BLOCK_BYTES) * BLOCK_BYTES)[0][shift : shift + num_bytes]
    memory[:] = np.arange(num_bytes) // 7 % 251
    return memory


def writer_of(flusher, folder, num_values):
    made = layout((TensorBox("x", "F32", (num_values,), next(boxes((num_values,), 0, num_values))),))
    return ShardWriter(flusher, folder, "x.safetensors", made)


def leased(flusher, folder):
    """Lend a file's values, whole chunks of an array that begins at a page; return all that is needed."""
    memory = filled(CHUNK_BYTES * NUM_CHUNKS)
    writer = writer_of(flusher, folder, len(memory) // 4)
    return memory, memory.copy(), writer, writer.lease(memory)


def content(folder, writer):
    return (folder / "x.safetensors").read_bytes()[len(writer.layout.header) :]


@pytest.mark.parametrize("may_copy", [True, False])
@pytest.mark.parametrize("num_buffers", [1, 3, NUM_CHUNKS + 2])
def test_what_changes_after_a_loan_is_settled_is_not_in_the_file(tmp_path, files, num_buffers, may_copy):
    """In haste, what no thread has begun with is copied where buffers are free; for the rest the owner waits."""
    with Flusher(files, ring_of(num_buffers, CHUNK_BYTES), num_threads=1, patience_s=300) as flusher:
        memory, before, writer, leases = leased(flusher, tmp_path)
        assert [lease.is_leased for lease in leases] == [True] * NUM_CHUNKS
        files.begun.wait()
        settling = threading.Thread(target=flusher.end_leases, args=(leases,), kwargs={"may_copy": may_copy})
        settling.start()
        settling.join(0.2)
        assert settling.is_alive(), "a thread is writing from there"
        held = sum(lease.is_leased for lease in leases)
        assert held == NUM_CHUNKS - (min(num_buffers, NUM_CHUNKS - 1) if may_copy else 0)
        files.go_on.set()
        settling.join(300)
        memory[:] = 255
        writer.finish()
    assert content(tmp_path, writer) == before.tobytes()


def test_nothing_is_copied_of_what_is_written_in_time(tmp_path):
    with Flusher(Files(), ring_of(2, CHUNK_BYTES), num_threads=2, patience_s=300) as flusher:
        memory, before, writer, leases = leased(flusher, tmp_path)
        flusher.wait(writer)
        assert all(np.shares_memory(lease.data, memory) for lease in leases)
        flusher.end_leases(leases, may_copy=True)
        memory[:] = 255
        writer.finish()
    assert content(tmp_path, writer) == before.tobytes()


def test_the_owner_waits_no_longer_than_was_said_and_the_file_is_given_up(tmp_path, files):
    with Flusher(files, ring_of(1, CHUNK_BYTES), num_threads=1, patience_s=0.2) as flusher:
        memory, _, writer, leases = leased(flusher, tmp_path)
        with pytest.raises(CheckpointError, match=r"the drive has not answered for 0.2 s"):
            flusher.end_leases(leases, may_copy=True)
        memory[:] = 255
        files.go_on.set()
        with pytest.raises(CheckpointError, match=r"the drive has not answered for 0.2 s"):
            writer.finish()
        writer.abandon()


@pytest.mark.parametrize("shift", [4, 64, 512])
def test_what_transfers_cannot_begin_at_is_copied(tmp_path, shift):
    memory = filled(CHUNK_BYTES * NUM_CHUNKS, shift)
    before = memory.copy()
    with Flusher(Files(), ring_of(2, CHUNK_BYTES), patience_s=300) as flusher:
        writer = writer_of(flusher, tmp_path, len(memory) // 4)
        writer._alignment_bytes = max(writer._alignment_bytes, 512)  # as of a drive that needs whole sectors
        leases = writer.lease(memory)
        assert len(leases) == (NUM_CHUNKS if shift == 512 else 0)
        flusher.end_leases(leases, may_copy=True)
        memory[:] = 255
        writer.finish()
    assert content(tmp_path, writer) == before.tobytes()


RUNS = st.lists(
    st.tuples(
        st.one_of(st.integers(1, 6000), st.integers(1, 20).map(lambda n: n * BLOCK_BYTES // 4)),  # values
        st.sampled_from([0, 4, 512, 2048]),  # bytes that its memory begins behind a page
        st.sampled_from(["at once", "beside", "last"]),  # when it is settled
    ),
    min_size=1,
    max_size=9,
)


@given(RUNS, st.sampled_from([1, 3]), st.sampled_from([2, 3, 20]), st.sampled_from([1, 4, 512]))
def test_runs_that_meet_in_chunks_are_written_as_they_were_when_each_was_settled(runs, blocks, num_buffers, alignment):
    """Runs of any length, from memory that begins anywhere, given back in any order, by several threads."""
    chunk_bytes = blocks * BLOCK_BYTES
    with (
        tempfile.TemporaryDirectory() as folder,
        Flusher(Files(), ring_of(num_buffers, chunk_bytes), patience_s=300) as flusher,
        ThreadPoolExecutor(4) as others,
    ):
        writer = writer_of(flusher, Path(folder), sum(count for count, _, _ in runs))
        writer._alignment_bytes = max(writer._alignment_bytes, alignment)
        expected = [np.frombuffer(writer.layout.header, np.uint8)]

        def give_back(memory, leases):
            flusher.end_leases(leases, may_copy=True)
            memory[:] = 255

        late = []
        for count, shift, when in runs:
            memory = filled(4 * count, shift)
            expected.append(memory.copy())
            leases = writer.lease(memory)
            if when == "at once":
                give_back(memory, leases)
            else:
                late.append((when, memory, leases))
        beside = [others.submit(give_back, *rest) for when, *rest in late for _ in range(2) if when == "beside"]
        record = writer.finish()
        for future in beside:
            future.result()
        for _, memory, leases in late:
            give_back(memory, leases)
        written = (Path(folder) / "x.safetensors").read_bytes()
        assert written == np.concatenate(expected).tobytes()
        chunks = [written[begin : begin + chunk_bytes] for begin in range(0, len(written), chunk_bytes)]
        assert record.checksums == tuple(xxhash.xxh3_64_hexdigest(chunk) for chunk in chunks)
        assert len(flusher._free) == num_buffers


@given(st.lists(st.integers(64 * BLOCK_BYTES // SECTOR_BYTES, 800), min_size=1, max_size=6))
def test_only_edges_of_runs_are_copied(counts):
    """At most a block at either end, of runs of whole sectors."""
    with tempfile.TemporaryDirectory() as folder, Flusher(Files(), ring_of(4, 64 * BLOCK_BYTES)) as flusher:
        writer = writer_of(flusher, Path(folder), sum(counts) * SECTOR_BYTES // 4)
        writer._alignment_bytes = SECTOR_BYTES
        num_lent = 0
        for count in counts:
            leases = writer.lease(filled(count * SECTOR_BYTES))
            num_lent += sum(len(lease.data) for lease in leases)
            flusher.end_leases(leases, may_copy=True)
        writer.finish()
    assert num_lent >= SECTOR_BYTES * sum(counts) - 2 * BLOCK_BYTES * len(counts)


def test_a_run_is_given_back_before_its_chunk_is_complete(tmp_path, files):
    """No thread has begun with such a chunk: nobody waits for the drive."""
    with Flusher(files, ring_of(3, 16 * BLOCK_BYTES), num_threads=1, patience_s=300) as flusher:
        num_values = 12 * BLOCK_BYTES // 4
        writer = writer_of(flusher, tmp_path, 2 * num_values)
        first, second = filled(4 * num_values), filled(4 * num_values)
        before = first.copy()
        flusher.end_leases(leases := writer.lease(first), may_copy=True)
        assert leases
        first[:] = 255
        files.go_on.set()
        writer.lease(second)
        writer.finish()
    assert content(tmp_path, writer) == np.concatenate([before, second]).tobytes()


class SlowCopies:
    """Copies into buffers, each of which waits until it is told to go on."""

    def __init__(self) -> None:
        self.begun = [threading.Semaphore(0), threading.Semaphore(0)]
        self.go_on = [threading.Event(), threading.Event()]
        self._numbers = itertools.count()

    def __call__(self, target, source):
        number = next(self._numbers)
        self.begun[number].release()
        self.go_on[number].wait(300)
        target[:] = source


@pytest.mark.parametrize("num_copied", [1, 2])
def test_a_chunk_waits_for_all_that_is_being_copied_into_it(tmp_path, monkeypatch, num_copied):
    """Runs are given back while their chunk becomes complete, perhaps both at once: they are in the file as before."""
    copies = SlowCopies()
    with Flusher(Files(), ring_of(3, 16 * BLOCK_BYTES), patience_s=300) as flusher:
        runs = [filled(6 * BLOCK_BYTES), filled(6 * BLOCK_BYTES)]
        writer = writer_of(flusher, tmp_path, len(runs) * len(runs[0]) // 4)
        before = np.concatenate(runs)
        leases = [writer.lease(run) for run in runs]
        monkeypatch.setattr("executor.checkpoint.files.writer.np.copyto", copies)
        haste = {"may_copy": True}
        settling = [
            threading.Thread(target=flusher.end_leases, args=(leases[i],), kwargs=haste) for i in range(num_copied)
        ]
        for i, thread in enumerate(settling):
            thread.start()
            copies.begun[i].acquire()
        finishing = threading.Thread(target=writer.finish)
        finishing.start()
        for i, thread in enumerate(settling):
            finishing.join(0.1)
            assert finishing.is_alive()
            copies.go_on[i].set()
            thread.join(300)
            runs[i][:] = 255
        finishing.join(300)
        flusher.end_leases([lease for leased in leases for lease in leased], may_copy=True)
    assert content(tmp_path, writer) == before.tobytes()


def test_what_is_given_up_frees_its_buffer_and_what_was_lent(tmp_path):
    with Flusher(Files(), ring_of(2, 16 * BLOCK_BYTES), patience_s=300) as flusher:
        num_values = 24 * BLOCK_BYTES // 4
        writer = writer_of(flusher, tmp_path, num_values)
        leases = writer.lease(filled(20 * BLOCK_BYTES))
        writer.abandon()
        assert not any(lease.is_leased for lease in leases)
        assert len(flusher._free) == 2
