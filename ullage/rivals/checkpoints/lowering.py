"""How other checkpoint engines save state: they block training, copy all of it, or write after all is copied."""

import dataclasses
import sys
from collections.abc import Sequence

from planner.checkpoints.lowering import Run, Saver, Shard
from planner.schedule.tasks import Lane, Op, Task, Tier
from ullage.rivals.checkpoints.policy import CheckpointPolicy

# A clone in host memory is read once and written once.
_CLONE_PASSES = 2


class EngineSaver(Saver):
    """The tasks with which another engine saves one rank's state; see :class:`planner.checkpoints.lowering.Saver`."""

    def __init__(
        self, policy: CheckpointPolicy, run: Run, stage: int, state: Sequence[Shard], *, buffer_bytes: int
    ) -> None:
        room_bytes = buffer_bytes if policy.bounded else sys.maxsize
        super().__init__(run, stage, state, buffer_bytes=room_bytes, chunk_bytes=policy.chunk_bytes)
        self.buffer_bytes = buffer_bytes
        self._policy = policy
        self._last_writes: list[int] = []  # of each checkpoint

    def checkpoint(self) -> None:
        """Append a checkpoint of the state after the latest iteration."""
        self.number += 1
        policy = self._policy
        called = tuple(self.run.where[i] for i in self.lasts)
        if policy.in_flight is not None and self.number >= policy.in_flight:
            called = (*called, self._last_writes[self.number - policy.in_flight])
        copies: list[int | None] = []
        if policy.writes_after_staging:
            copies = [self._copy(chunk, called) for chunk in self.chunks]
            created = self.add(Lane.WRITE, Op.CREATE, (*called, *(i for i in copies[-1:] if i is not None)))
        else:
            # The caller creates the files and then copies. Or those that write create them too, while others copy.
            by_writers = policy.staging == "fresh-pool"
            created = self.add(Lane.WRITE if by_writers else Lane.SNAPSHOT, Op.CREATE, called)
            called = called if by_writers else (created,)
        staged: list[int] = []  # for each chunk, the task after which its state may change
        writes: list[int] = []
        for position, chunk in enumerate(self.chunks):
            if position == len(copies):  # not copied yet: copy it as soon as there is room, then write it
                copies.append(self._copy(chunk, called))
            copy = copies[position]
            if copy is None:
                writes.append(self.add(Lane.WRITE, Op.WRITE, (self.source(chunk), created), chunk))
            else:
                writes.append(self.write(chunk, (copy, created)))
            staged.append(writes[-1] if copy is None else copy)
        self._last_writes.append(writes[-1] if writes else created)
        blocks = {"created": [created], "staged": staged, "written": writes}
        self.safe = dict.fromkeys(self.firsts, self.latest(blocks[policy.blocks_until]))
        if policy.blocks_until == "created":  # the next update waits for the last copy
            for chunk in self.chunks:
                self.safe[chunk.changed_by] = (*self.latest(staged), *self.safe.get(chunk.changed_by, ()))

    def waits_of(self, task: Task, after: Sequence[int]) -> tuple[int, ...]:  # noqa: ARG002 - it has no gates
        """Return the checkpoint tasks for which a task of the next iteration waits besides its own dependencies."""
        return self.safe.get(task.index, ())

    def _copy(self, chunk: Shard, called: tuple[int, ...]) -> int | None:
        """Copy a chunk to host memory as the engine does; ``None`` if the chunk is written in place."""
        staging, on_host = self._policy.staging, chunk.tier is Tier.HOST
        op = Op.READ if chunk.tier is Tier.NVME else Op.SNAPSHOT
        ready = (*called, self.source(chunk))
        if staging == "transient":
            return None if on_host else self.add(Lane.WRITE, op, ready, chunk, pinned=False)
        if staging == "pinned":
            return None if on_host else self.add(Lane.SNAPSHOT, op, (*ready, *self.room(chunk)), chunk)
        pool = staging == "fresh-pool"
        touched = self.add(Lane.STAGING if pool else Lane.SNAPSHOT, Op.TOUCH, (*ready, *self.room(chunk)), chunk)
        if not on_host:
            return self.add(Lane.SNAPSHOT, op, (touched,), chunk, pinned=False)
        clone = dataclasses.replace(chunk, num_bytes=_CLONE_PASSES * chunk.num_bytes)
        return self.add(Lane.SNAPSHOT, Op.PASS, (touched,), clone)
