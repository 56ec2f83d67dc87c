"""The state that a checkpoint saves: the optimizer state of one rank, in the order of updates."""

import dataclasses
from collections.abc import Iterable, Mapping

from planner.schedule.schedule import Schedule
from planner.schedule.tasks import Lane, Op, Tier

_COARSE_CHUNKS = 400


@dataclasses.dataclass(frozen=True, slots=True)
class Shard:
    """One piece of a rank's state.

    Attributes:
        num_bytes: bytes to save.
        tier: where it lives.
        changed_by: index of the task that changes it, in an iteration with snapshots.
        unit, piece: whose state it is; see :class:`planner.schedule.tasks.Task`.
    """

    num_bytes: int
    tier: Tier
    changed_by: int
    unit: str = ""
    piece: int = -1


def state_of(taken: Schedule, num_replicas: int | Mapping[str, int] = 1) -> tuple[Shard, ...]:
    """Return the state of which an executed iteration takes snapshots, in their order; see [Note: Checkpoint tasks].

    16-bit weights are casts of the master and are not saved. State that is streamed through the device lives on the
    host and changes when it is stored back. State on NVMe changes when its new version is written.

    Args:
        taken: one iteration with snapshots.
        num_replicas: data-parallel ranks that hold the same state, by unit if they differ; each saves a part of it.
    """
    shards = []
    for task in taken.tasks:
        if task.op is Op.SNAPSHOT:
            (change,) = (taken.tasks[i] for i in task.after_previous)
            tier = {Op.STORE: Tier.HOST, Op.SWAP_OUT: Tier.NVME}.get(
                change.op, Tier.GPU if change.lane is Lane.GPU_UPDATE else Tier.HOST
            )
            replicas = num_replicas if isinstance(num_replicas, int) else num_replicas[task.unit]
            num_bytes = -(-task.num_bytes // replicas)
            shards.append(Shard(num_bytes, tier, change.index, task.unit, task.piece))
    return tuple(shards)


def bytes_by_stage(schedule: Schedule, state: Iterable[Shard]) -> tuple[int, ...]:
    """Return the bytes that one rank of every pipeline stage saves."""
    saved = [0] * schedule.num_stages
    for shard in state:
        saved[schedule.tasks[shard.changed_by].stage] += shard.num_bytes
    return tuple(saved)


def coarse(chunk_bytes: int, state: Iterable[Shard], buffer_bytes: int) -> tuple[int, int]:
    """Return the size of chunks, at least 1/400 of the state, and a buffer that has room for two of them.

    A gate may then open too early by the time to write two chunks: half a percent of the time to write a checkpoint.
    """
    chunk_bytes = max(chunk_bytes, -(-sum(shard.num_bytes for shard in state) // _COARSE_CHUNKS))
    return chunk_bytes, max(buffer_bytes, 2 * chunk_bytes)
