"""Other checkpoint engines as policies: what training waits for, how state is copied, and which threads write it."""

import dataclasses
from collections.abc import Mapping
from typing import Final, Literal

BlocksUntil = Literal["created", "staged", "written"]
"""What must be done before the training loop continues.

``created``: the files exist, and their layout is known; updates then wait until all state is copied. ``staged``: all
state is copied to host memory.
"""

Staging = Literal["transient", "fresh", "fresh-pool", "pinned"]
"""How state is copied from the device to the host memory from which it is written.

``transient``: into pageable memory that is reused for the next chunk, by the thread that then writes it.
``fresh``: into new pageable memory, by one thread: the page faults of a chunk add to the time of its copy.
``fresh-pool``: the same, by several threads: the page faults of one chunk overlap with the copy of another. Files are
created by those that write (``storage_plugins/fs.py`` of torchsnapshot).
``pinned``: into a ring of pinned memory that is allocated once. A copy waits until the bytes that it overwrites are
written.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class CheckpointPolicy:
    """One checkpoint engine.

    If it only waits for files, it does not copy state that lives on the host: it writes that in place.

    Attributes:
        name: its name in cases and commands.
        blocks_until: what the training loop waits for.
        staging: how state is copied to host memory.
        chunk_bytes: most bytes that are copied, and written, at a time.
        num_writers: threads of each process that write; the same number reads.
        serialises: writers use ``torch.save``; otherwise they write raw bytes.
        writes_after_staging: writes begin after everything is copied.
        holds_interpreter: writers hold Python's interpreter lock, so that training shares the interpreter with them.
        device_only: the engine's code refuses state that is not on the device; the simulator accepts it.
        in_flight: most checkpoints under way; one more waits until the oldest is written. ``None``: as many as fit into
            host memory.
    """

    name: str
    blocks_until: BlocksUntil
    staging: Staging
    chunk_bytes: int
    num_writers: int = 1
    serialises: bool = False
    writes_after_staging: bool = False
    holds_interpreter: bool = False
    device_only: bool = False
    in_flight: int | None = None

    @property
    def bounded(self) -> bool:
        """Whether its host memory is limited; other engines take as much as they need."""
        return self.staging in {"fresh-pool", "pinned"}


# Chunk sizes are the engine's own, or those of a large tensor of a typical model.
POLICIES: Final[Mapping[str, CheckpointPolicy]] = {
    policy.name: policy
    for policy in (
        # torch.save of every rank's state, and all ranks wait (TorchCheckpointEngine of DeepSpeed).
        CheckpointPolicy("deepspeed", "written", "transient", 256_000_000, serialises=True),
        # Snapshot, then persist (Mohan et al., CheckFreq, FAST'21): state is cloned to the host while training waits;
        # a thread of the trainer then calls torch.save, which keeps the interpreter lock while it writes records.
        CheckpointPolicy(
            "checkfreq-async",
            "staged",
            "fresh",
            256_000_000,
            serialises=True,
            writes_after_staging=True,
            holds_interpreter=True,
            in_flight=1,
        ),
        # Snapshot.async_take of torchsnapshot: chunks of at most 512 MiB are staged and written by thread pools, within
        # a budget of host memory, and the call returns when all are staged. Raw bytes; writes leave the interpreter
        # free. Four writers per GPU in the published runs.
        CheckpointPolicy(
            "torchsnapshot",
            "staged",
            "fresh-pool",
            512 * 2**20,
            num_writers=4,
            in_flight=1,
        ),
        # DataStates-LLM (HPDC'24): the call lays out and creates the files; copies run beside the next forward and
        # backward into a pinned ring, one thread of C++ writes, and the next update waits for the last copy.
        CheckpointPolicy("datastates", "created", "pinned", 256_000_000, device_only=True),
    )
}
