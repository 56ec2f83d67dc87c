"""What planner and executor cannot import from each other, and have to agree on."""

from executor.checkpoint.files.flusher import CHUNK_BYTES, NUM_WRITERS
from executor.checkpoint.format.reader import NUM_READERS
from executor.checkpoint.levels import EXTRA_CHECKPOINTS
from executor.checkpoint.retention_thread import READING_SHARE
from planner.checkpoints.policy import CHUNK_BYTES as SIMULATED_CHUNK_BYTES
from planner.checkpoints.policy import EXTRA_CHECKPOINTS as PLANNED_MORE_THAN_KEPT
from planner.checkpoints.policy import READING_SHARE as SIMULATED_READING_SHARE
from planner.checkpoints.policy import policy


def test_checkpoints_are_simulated_as_they_are_made():
    assert SIMULATED_CHUNK_BYTES == CHUNK_BYTES
    assert SIMULATED_READING_SHARE == READING_SHARE
    assert policy("ullage").num_writers == NUM_WRITERS == NUM_READERS
    assert PLANNED_MORE_THAN_KEPT == EXTRA_CHECKPOINTS
