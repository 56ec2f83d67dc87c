"""What planner and executor cannot import from each other, and have to agree on."""

from executor.checkpoint.flusher import CHUNK_BYTES
from planner.checkpoints.policy import CHUNK_BYTES as SIMULATED_CHUNK_BYTES


def test_chunks_are_simulated_as_they_are_written():
    assert SIMULATED_CHUNK_BYTES == CHUNK_BYTES
