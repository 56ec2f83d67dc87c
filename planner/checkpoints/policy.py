"""Checkpoint engines as policies: what training waits for, how state is copied, and which threads write it.

The constants of our engine are here too. The executor imports them, so what is executed is what is simulated.
"""

import dataclasses
from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from hwprofiles.quantity import Provenance, Quantity

HASH_BYTES_PER_S: Final = Quantity(
    value=6.5e9,
    unit="bytes_per_s",
    provenance=Provenance(origin="assumed", source="xxh3 of one core, from memory, as measured on an EPYC Turin"),
)
"""Rate at which one thread computes checksums of host memory, if a profile has none."""


CHUNK_BYTES: Final = 4 << 20
"""Bytes that our engine copies, hashes and writes at a time.

Smaller writes are slower with ``O_DIRECT``. Larger writes only take more memory.
"""

NUM_THREADS: Final = 12
"""Threads of our engine that write, or read. While some hash, the others keep the drive busy."""

READING_SHARE: Final = 1 / 8
"""Largest share of the time in which our engine reads checkpoints again; see :mod:`executor.checkpoint.levels`."""

EXTRA_CHECKPOINTS: Final = 2
"""Checkpoints for which a level needs room beside those that are kept: the newest, not verified yet, and the next."""

LEAST_BUFFER_BYTES: Final = 16 * CHUNK_BYTES
"""Smallest buffer of each rank: with less, copies and writes would wait for each other."""


class BlocksUntil(StrEnum):
    """What must be done before the training loop continues."""

    NOTHING = "nothing"
    CREATED = "created"  # the files exist, and their layout is known
    STAGED = "staged"  # all state is copied to host memory
    WRITTEN = "written"


class Staging(StrEnum):
    """How state is copied from the device to the host memory from which it is written."""

    # Into pageable memory that is reused for the next chunk, by the thread that then writes it.
    TRANSIENT = "transient"
    # Into new pageable memory, by one thread: the page faults of a chunk add to the time of its copy.
    FRESH = "fresh"
    # The same, by several threads: the page faults of one chunk overlap with the copy of another. Files are created by
    # those that write (``storage_plugins/fs.py`` of torchsnapshot).
    FRESH_POOL = "fresh-pool"
    # Into a ring of pinned memory that is allocated once. A copy waits until the bytes that it overwrites are written.
    PINNED = "pinned"


class Gate(StrEnum):
    """What the next update of a piece of state waits for."""

    NONE = "none"  # nothing: training was blocked until everything was copied
    UPDATE = "update"  # the whole checkpoint is copied
    SHARD = "shard"  # that piece is copied


@dataclasses.dataclass(frozen=True, slots=True)
class CheckpointPolicy:
    """One checkpoint engine.

    Engines with a gate do not copy state that lives on the host: they write it in place. Its gate waits for that write,
    or for a copy of the part that is not written yet (``copies_late``).

    Attributes:
        name: its name in cases and commands.
        blocks_until: what the training loop waits for.
        staging: how state is copied to host memory.
        gate: what the next update waits for.
        chunk_bytes: most bytes that are copied, and written, at a time.
        num_writers: threads of each process that write; the same number reads.
        serialises: writers use ``torch.save``; otherwise they write raw bytes.
        hashes: writers compute checksums.
        writes_after_staging: writes begin after everything is copied.
        holds_interpreter: writers hold Python's interpreter lock, so that training shares the interpreter with them.
        copies_late: if state on the host is not written when its update is due, it is copied then, as far as the
            buffer has room.
        device_only: the engine's code refuses state that is not on the device; the simulator accepts it.
        in_flight: most checkpoints under way; one more waits until the oldest is written. ``None``: as many as fit into
            host memory.
        weight: of its copies and writes where they compete with training; see [Note: Fluid sharing].

    Raises:
        ValueError: state could change before it is copied.
    """

    name: str
    blocks_until: BlocksUntil
    staging: Staging
    gate: Gate
    chunk_bytes: int
    num_writers: int = 1
    serialises: bool = False
    hashes: bool = False
    writes_after_staging: bool = False
    holds_interpreter: bool = False
    copies_late: bool = False
    device_only: bool = False
    in_flight: int | None = None
    weight: float = 1.0

    def __post_init__(self) -> None:
        waits = self.blocks_until in {BlocksUntil.STAGED, BlocksUntil.WRITTEN}
        if self.gate is Gate.NONE and not waits:
            raise ValueError(
                f"checkpoint policy {self.name} blocks until {self.blocks_until} and has no gate: state would change "
                "before it is copied; give it the gate 'update' or 'shard'"
            )
        in_flight = 1 if self.in_flight is None else self.in_flight
        if min(self.chunk_bytes, self.num_writers, in_flight) < 1 or not self.weight > 0:
            raise ValueError(
                f"checkpoint policy {self.name}: chunk_bytes, num_writers, in_flight and weight must be positive"
            )

    @property
    def bounded(self) -> bool:
        """Whether its host memory is limited; other engines take as much as they need."""
        return self.staging in {Staging.FRESH_POOL, Staging.PINNED}


# Chunk sizes are the engine's own, or those of a large tensor of a typical model.
POLICIES: Mapping[str, CheckpointPolicy] = {
    policy.name: policy
    for policy in (
        # torch.save of every rank's state, and all ranks wait (TorchCheckpointEngine of DeepSpeed).
        CheckpointPolicy("deepspeed", BlocksUntil.WRITTEN, Staging.TRANSIENT, Gate.NONE, 256_000_000, serialises=True),
        # Snapshot, then persist (Mohan et al., CheckFreq, FAST'21): state is cloned to the host while training waits;
        # a thread of the trainer then calls torch.save, which keeps the interpreter lock while it writes records.
        CheckpointPolicy(
            "checkfreq-async",
            BlocksUntil.STAGED,
            Staging.FRESH,
            Gate.NONE,
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
            BlocksUntil.STAGED,
            Staging.FRESH_POOL,
            Gate.NONE,
            512 * 2**20,
            num_writers=4,
            in_flight=1,
        ),
        # DataStates-LLM (HPDC'24): the call lays out and creates the files; copies run beside the next forward and
        # backward into a pinned ring, one thread of C++ writes, and the next update waits for the last copy.
        CheckpointPolicy("datastates", BlocksUntil.CREATED, Staging.PINNED, Gate.UPDATE, 256_000_000, device_only=True),
        # Ours: the update of each piece waits for its own copy only; copies yield to training; every byte is hashed.
        CheckpointPolicy(
            "ullage",
            BlocksUntil.NOTHING,
            Staging.PINNED,
            Gate.SHARD,
            CHUNK_BYTES,
            num_writers=NUM_THREADS,
            hashes=True,
            copies_late=True,
            weight=1 / 16,
        ),
    )
}


def policy(name: str) -> CheckpointPolicy:
    """Return the policy of that name.

    Raises:
        ValueError: there is no such policy; the message lists all names.
    """
    if name not in POLICIES:
        raise ValueError(f"there is no checkpoint engine {name!r}; choose one of {', '.join(POLICIES)}")
    return POLICIES[name]
