"""Memory that is lent to the flusher: written from where it is, and never as it is after the loan has been settled."""

import threading

import numpy as np
import pytest

from executor.checkpoint import CheckpointError, Entry, Files, Flusher, ShardWriter, boxes, layout, ring_of

CHUNK_BYTES = 4096
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


def lent(flusher, folder):
    """Lend a file's values, whole chunks of an array that begins at a page; return all that is needed."""
    num_values = CHUNK_BYTES * NUM_CHUNKS // 4
    made = layout((Entry("x", "F32", (num_values,), next(boxes((num_values,), 0, num_values))),))
    memory = ring_of(1, CHUNK_BYTES * NUM_CHUNKS)[0]
    memory[:] = np.arange(len(memory)) // 7 % 251
    writer = ShardWriter(flusher, folder, "x.safetensors", made)
    return memory, memory.copy(), writer, writer.lend(memory)


def content(folder, writer):
    return (folder / "x.safetensors").read_bytes()[len(writer.layout.header) :]


@pytest.mark.parametrize("num_buffers", [1, 3, NUM_CHUNKS + 2])
def test_what_changes_after_a_loan_is_settled_is_not_in_the_file(tmp_path, files, num_buffers):
    """What no thread has begun with is copied where buffers are free; for the rest the owner waits."""
    with Flusher(files, ring_of(num_buffers, CHUNK_BYTES), num_threads=1, patience_s=20) as flusher:
        memory, before, writer, loans = lent(flusher, tmp_path)
        assert [loan.is_lent for loan in loans] == [True] * NUM_CHUNKS
        files.begun.wait()
        settling = threading.Thread(target=flusher.settle, args=(loans,))
        settling.start()
        settling.join(0.2)
        assert settling.is_alive(), "a thread is writing from there"
        held = sum(loan.is_lent for loan in loans)
        assert held == NUM_CHUNKS - min(num_buffers, NUM_CHUNKS - 1)
        files.go_on.set()
        settling.join(20)
        memory[:] = 255
        writer.finish()
    assert content(tmp_path, writer) == before.tobytes()


def test_nothing_is_copied_of_what_is_written_in_time(tmp_path):
    with Flusher(Files(), ring_of(2, CHUNK_BYTES), num_threads=2, patience_s=20) as flusher:
        memory, before, writer, loans = lent(flusher, tmp_path)
        flusher.wait(writer._done)
        assert all(np.shares_memory(loan.data, memory) for loan in loans)
        flusher.settle(loans)
        memory[:] = 255
        writer.finish()
    assert content(tmp_path, writer) == before.tobytes()


def test_the_owner_waits_no_longer_than_was_said_and_the_file_is_given_up(tmp_path, files):
    with Flusher(files, ring_of(1, CHUNK_BYTES), num_threads=1, patience_s=0.2) as flusher:
        memory, _, writer, loans = lent(flusher, tmp_path)
        with pytest.raises(CheckpointError, match=r"nothing has ended for 0.2 s"):
            flusher.settle(loans)
        memory[:] = 255
        files.go_on.set()
        with pytest.raises(CheckpointError, match=r"nothing has ended for 0.2 s"):
            writer.finish()
        writer.abandon()


@pytest.mark.parametrize("shift", [4, 64, 512])
def test_what_transfers_cannot_begin_at_is_copied(tmp_path, shift):
    num_values = CHUNK_BYTES * NUM_CHUNKS // 4
    made = layout((Entry("x", "F32", (num_values,), next(boxes((num_values,), 0, num_values))),))
    memory = ring_of(1, CHUNK_BYTES * (NUM_CHUNKS + 1))[0][shift:][: 4 * num_values]
    memory[:] = np.arange(len(memory)) // 7 % 251
    before = memory.copy()
    with Flusher(Files(), ring_of(2, CHUNK_BYTES), patience_s=20) as flusher:
        writer = ShardWriter(flusher, tmp_path, "x.safetensors", made)
        writer._alignment_bytes = max(writer._alignment_bytes, 512)  # as of a drive that needs whole sectors
        loans = writer.lend(memory)
        assert len(loans) == (NUM_CHUNKS if shift == 512 else 0)
        flusher.settle(loans)
        memory[:] = 255
        writer.finish()
    assert content(tmp_path, writer) == before.tobytes()
