"""Checkpoint engines as policies: what training waits for, how state is copied, and who writes it."""

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
"""At which one thread makes checksums of what is in host memory, where a profile does not say."""


CHUNK_BYTES: Final = 4 << 20
"""That our engine copies, hashes and writes as one."""

READING_SHARE: Final = 1 / 8
"""Of its time that our engine reads checkpoints again, at most; see :mod:`executor.checkpoint.retention_thread`."""

MORE_THAN_KEPT: Final = 2
"""Checkpoints that a level needs room for beside those that stay: the newest, not read again yet, and the next."""

LEAST_BUFFER_BYTES: Final = 16 * CHUNK_BYTES
"""Of each rank: less would make copies and writes wait for each other."""


class BlocksUntil(StrEnum):
    """What must be over before the training loop goes on."""

    NOTHING = "nothing"
    CREATED = "created"  # the files exist, and what goes into them is known
    STAGED = "staged"  # all state is copied to host memory
    WRITTEN = "written"


class Staging(StrEnum):
    """How state gets from the device to host memory, from where it is written."""

    # Through pageable memory that is used again for the next chunk, by the thread that then writes it.
    TRANSIENT = "transient"
    # Into new pageable memory, by one thread: the page faults of a chunk come on top of its copy.
    FRESH = "fresh"
    # The same by several threads: the page faults of one chunk overlap with the copy of another.
    FRESH_POOL = "fresh-pool"
    # Into a ring of pinned memory that is allocated once; a copy waits until what it overwrites is written.
    PINNED = "pinned"


class Gate(StrEnum):
    """What the next optimizer step of a piece of state waits for."""

    NONE = "none"  # nothing is left to wait for, because training was blocked until all was copied
    UPDATE = "update"  # the whole checkpoint is copied
    SHARD = "shard"  # that piece is copied


@dataclasses.dataclass(frozen=True, slots=True)
class CheckpointPolicy:
    """One checkpoint engine.

    State that already lives on the host is not copied by engines with a gate: it is written from where it is, and its
    gate waits for that, or for what is left of it to be copied (``copies_late``).

    Attributes:
        name: what cases and commands call it.
        blocks_until: what the training loop waits for.
        staging: how state gets to host memory.
        gate: what the next update waits for.
        chunk_bytes: the most that is copied, and written, as one.
        num_writers: threads of each process that write; as many read.
        serialises: they write with ``torch.save``; else raw bytes.
        hashes: they hash what they write.
        writes_after_staging: nothing is written before everything is copied.
        holds_interpreter: they keep Python's interpreter lock meanwhile, so that training shares the interpreter.
        copies_late: state on the host that is not written when its update comes is copied then, as far as the bounded
            memory has room.
        device_only: their code refuses state that is not on the device; simulated it can be all the same.
        in_flight: checkpoints that may be under way; one more waits until the oldest is written. ``None``: as many as
            the host memory holds.
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
        """Whether a limit of host memory holds it back; the others take what they need."""
        return self.staging in {Staging.FRESH_POOL, Staging.PINNED}


# Chunks: what the engine itself cuts, or the size of a large tensor of the models in question.
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
        # Ours: nothing is waited for but, for each piece, its own copy; copies yield to training; every byte is hashed.
        CheckpointPolicy(
            "ullage",
            BlocksUntil.NOTHING,
            Staging.PINNED,
            Gate.SHARD,
            CHUNK_BYTES,
            num_writers=12,
            hashes=True,
            copies_late=True,
            weight=1 / 16,
        ),
    )
}


def policy(name: str) -> CheckpointPolicy:
    """Return the policy of that name.

    Raises:
        ValueError: there is none; the message lists them.
    """
    if name not in POLICIES:
        raise ValueError(f"there is no checkpoint engine {name!r}; choose one of {', '.join(POLICIES)}")
    return POLICIES[name]
