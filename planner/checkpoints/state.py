"""The state that a checkpoint saves: the optimizer state of one rank, in the order of updates."""

import dataclasses
import math
from collections.abc import Iterable, Mapping

from planner.checkpoints.policy import CheckpointPolicy
from planner.schedule.schedule import Schedule
from planner.schedule.tasks import Lane, Op, Tier

_COARSE_CHUNKS = 400
# Lanes whose task changes a piece in its home instead of the update: the store, or the write to NVMe.
_CHANGES = {Op.STORE: Tier.HOST, Op.SWAP_OUT: Tier.NVME}


@dataclasses.dataclass(frozen=True, slots=True)
class Shard:
    """One piece of a rank's state.

    Attributes:
        num_bytes: bytes to save.
        tier: where it lives.
        changed_by: index of the task of an iteration that changes it.
        unit, piece: whose state it is; see :class:`planner.schedule.tasks.Task`.
    """

    num_bytes: int
    tier: Tier
    changed_by: int
    unit: str = ""
    piece: int = -1


def state_of(
    schedule: Schedule,
    *,
    num_replicas: int | Mapping[str, int] = 1,
    bytes_per_param: float = 12,
    other_bytes_per_param: float | None = None,
) -> tuple[Shard, ...]:
    """Return the optimizer state that an iteration's updates change, in their order: master and buffers.

    16-bit weights are casts of the master and are not saved. State that is streamed through the device lives on the
    host and changes when it is stored back. State on NVMe changes when its new version is written.

    Args:
        schedule: one iteration.
        num_replicas: data-parallel ranks that hold the same state, by unit if they differ; each saves a part of it.
        bytes_per_param: bytes of state, see :attr:`planner.decisions.Decisions.state_bytes_per_param`.
        other_bytes_per_param: the same where no matrix is updated; left out, there is no difference.
    """
    changed = {(task.unit, task.piece): task for task in schedule.tasks if task.op in _CHANGES}
    shards = []
    for task in schedule.tasks:
        if task.op is Op.UPDATE and task.num_params:
            change = changed.get((task.unit, task.piece), task)
            here = Tier.GPU if task.lane is Lane.GPU_UPDATE else Tier.HOST
            replicas = num_replicas if isinstance(num_replicas, int) else num_replicas[task.unit]
            each_bytes = bytes_per_param if task.matrices else other_bytes_per_param or bytes_per_param
            num_bytes = math.ceil(each_bytes * task.num_params / replicas)
            shards.append(Shard(num_bytes, _CHANGES.get(change.op, here), change.index, task.unit, task.piece))
    return tuple(shards)


def bytes_by_stage(schedule: Schedule, state: Iterable[Shard]) -> tuple[int, ...]:
    """Return the bytes that one rank of every pipeline stage saves."""
    saved = [0] * schedule.num_stages
    for shard in state:
        saved[schedule.tasks[shard.changed_by].stage] += shard.num_bytes
    return tuple(saved)


def coarse(policy: CheckpointPolicy, state: Iterable[Shard], buffer_bytes: int) -> tuple[CheckpointPolicy, int]:
    """Return the policy with chunks of at least 1/400 of the state, and a buffer that has room for two of them.

    A gate may then open too early by the time to write two chunks: half a percent of the time to write a checkpoint.
    """
    chunk_bytes = max(policy.chunk_bytes, -(-sum(shard.num_bytes for shard in state) // _COARSE_CHUNKS))
    return dataclasses.replace(policy, chunk_bytes=chunk_bytes), max(buffer_bytes, 2 * chunk_bytes)
