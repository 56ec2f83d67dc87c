"""Lower checkpoints into the schedule of a run of several iterations.

[Note: Checkpoint tasks] The training loop requests a checkpoint at the end of an iteration. The engine creates the
files. It copies each chunk of state on the device to host memory as soon as its piece is updated, and writes the copy.
State on the host is written in place, or cloned first by engines that clone everything. Waiting is expressed by
dependencies: of the next iteration (an engine that blocks), of a piece's next update (its gate), and of a copy into
host memory that is not written yet (a full buffer). So the timeline shows how long training was blocked; no formula of
time is needed.

[Note: As executed] The executor runs one snapshot task for each piece ([Note: Snapshots] in
:mod:`planner.lowering.snapshots`). The pieces that are saved here, their bytes and their order are those of these tasks
(:func:`planner.checkpoints.state.state_of`). How long a snapshot takes depends on the ring and the drive, so here it is
divided into the chunks that it copies and writes. Dependencies are the same, and so is the time that training is
blocked, except for as much as the ring holds.
"""

import dataclasses
from collections import deque
from collections.abc import Iterable, Sequence

from planner.checkpoints.policy import BlocksUntil, CheckpointPolicy, Gate, Staging
from planner.checkpoints.state import Shard
from planner.schedule.schedule import Schedule
from planner.schedule.tasks import Lane, Op, Phase, Task, Tier

_TASKS_PER_CHUNK = 3  # memory is touched, copied to, written: no engine does more
# A clone in host memory is read once and written once.
_CLONE_PASSES = 2
# The most chunks of a checkpoint, and the most tasks of a run: larger ones take too long to simulate.
_MAX_CHUNKS, _MAX_TASKS = 10_000, 300_000
_NOTHING = Shard(0, Tier.HOST, 0)


@dataclasses.dataclass(frozen=True)
class Run:
    """The schedule of a whole run with checkpoints.

    Attributes:
        schedule: all iterations and checkpoints, as one.
        origin: for each task, the index of its original in the schedule of one iteration; -1 for checkpoint tasks.
        checkpoint: for each task, the number of the checkpoint that it belongs to; -1 for training tasks.
    """

    schedule: Schedule
    origin: tuple[int, ...]
    checkpoint: tuple[int, ...]

    @property
    def num_checkpoints(self) -> int:
        """Number of checkpoints."""
        return max(self.checkpoint, default=-1) + 1


def with_checkpoints(
    schedule: Schedule,
    policy: CheckpointPolicy,
    state: Sequence[Shard],
    *,
    num_iterations: int,
    every: int,
    buffer_bytes: int,
    first: int | None = None,
    reads_again: float = 0.0,
) -> Run:
    """Return the schedule of a run with checkpoints at equal intervals; see [Note: Checkpoint tasks].

    Args:
        schedule: one iteration without checkpoints.
        policy: the engine.
        state: the pieces that one rank saves, in this order; in a pipeline, those of one rank of every stage.
        num_iterations: of the run.
        every: iterations from one checkpoint to the next.
        buffer_bytes: host memory of one rank for copies that are not written yet.
        first: the iteration after which the first checkpoint is made; by default ``every``.
        reads_again: the fraction of each checkpoint that is read again for verification after it is written.

    Raises:
        ValueError: a number is not positive, or a piece of state does not belong to the schedule.
    """
    for name, value in (("num_iterations", num_iterations), ("every", every), ("buffer_bytes", buffer_bytes)):
        if value < 1:
            raise ValueError(f"{name} is {value}; a run with checkpoints needs at least 1")
    for shard in state:
        if not 0 <= shard.changed_by < len(schedule.tasks) or shard.num_bytes < 0:
            raise ValueError(
                f"state of {shard.unit or 'the model'} ({shard.num_bytes} B) is changed by task {shard.changed_by}; "
                f"the schedule has tasks 0 to {len(schedule.tasks) - 1}, and sizes cannot be negative"
            )
    builder = _Builder(schedule, policy, state, buffer_bytes, reads_again)
    made_after = range(every if first is None else first, num_iterations + 1, every)
    num_checkpoints = len(made_after)
    num_tasks = num_iterations * len(schedule.tasks) + num_checkpoints * builder.num_chunks * _TASKS_PER_CHUNK
    if num_tasks > _MAX_TASKS:
        raise ValueError(
            f"{num_iterations} iterations with {num_checkpoints} checkpoints of {builder.num_chunks} chunks are "
            f"{num_tasks} tasks, more than {_MAX_TASKS}; ask for fewer iterations, as they repeat, or for more host "
            f"memory than {buffer_bytes} B"
        )
    for iteration in range(1, num_iterations + 1):
        builder.iterate()
        if iteration in made_after:
            builder.checkpoint()
    return builder.run()


def with_promotion(
    schedule: Schedule, policy: CheckpointPolicy, num_bytes: Sequence[int], *, num_iterations: int
) -> Run:
    """Return the schedule of a run in which a checkpoint is promoted to slower storage, from the second iteration on.

    The promotion reads it, writes it and reads it again beside training. Training does not wait for it.

    Args:
        schedule: one iteration without checkpoints.
        policy: the engine.
        num_bytes: bytes of one rank's share of the checkpoint, for each pipeline stage.
        num_iterations: of the run.
    """
    builder = _Builder(schedule, policy, (), 1)
    builder.iterate()
    for saver, of_rank in zip(builder.savers, num_bytes, strict=True):
        saver.promote(of_rank)
    for _ in range(num_iterations - 1):
        builder.iterate()
    return builder.run()


class _Builder:
    """Appends iterations and checkpoints to one list of tasks. Each pipeline stage has its own saver."""

    def __init__(
        self,
        schedule: Schedule,
        policy: CheckpointPolicy,
        state: Sequence[Shard],
        buffer_bytes: int,
        reads_again: float = 0.0,
    ) -> None:
        self._one = schedule
        # The fields of tasks that all iterations share; dataclasses.replace would take several times as long.
        names = {field.name for field in dataclasses.fields(Task)} - {"index", "after", "after_previous"}
        self._same = [{name: getattr(task, name) for name in sorted(names)} for task in schedule.tasks]
        self._policy = policy
        self._origin: list[int] = []
        self._checkpoint: list[int] = []
        self.tasks: list[Task] = []
        self.where: list[int] = []  # indices of the latest iteration's tasks
        of_stage: list[list[Shard]] = [[] for _ in range(schedule.num_stages)]
        for shard in state:
            of_stage[schedule.tasks[shard.changed_by].stage].append(shard)
        self.savers = [
            _Saver(self, schedule, stage, saved, policy, buffer_bytes, reads_again)
            for stage, saved in enumerate(of_stage)
        ]
        self.num_chunks = sum(saver.num_chunks for saver in self.savers)

    def iterate(self) -> None:
        """Append one iteration."""
        previous = self.where
        where: list[int] = []
        for task in self._one.tasks:
            after = [where[i] for i in task.after]
            after += self.savers[task.stage].waits_of(task, after)
            if previous:
                after += [previous[i] for i in task.after_previous]
            where.append(len(self.tasks))
            now = Task(index=where[-1], after=_unique(after), **self._same[task.index])
            self.append(now, task.index, -1)
        self.where = where
        for saver in self.savers:
            saver.block, saver.gates, saver.gates_late = (), {}, False

    def checkpoint(self) -> None:
        """Append a checkpoint of the state after the latest iteration."""
        assert self.where, "a checkpoint follows an iteration"
        for saver in self.savers:
            saver.checkpoint()

    def append(self, task: Task, origin: int, checkpoint: int) -> int:
        """Append a task, and return its index; see :class:`Run`."""
        self.tasks.append(task)
        self._origin.append(origin)
        self._checkpoint.append(checkpoint)
        return task.index

    def run(self) -> Run:
        """Return the run of all appended tasks."""
        name = f"{self._one.description}, with checkpoints by {self._policy.name}"
        return Run(Schedule(tuple(self.tasks), description=name), tuple(self._origin), tuple(self._checkpoint))


class _Saver:
    """The tasks with which one rank saves its state; in a pipeline, one rank of a stage."""

    def __init__(
        self,
        builder: _Builder,
        schedule: Schedule,
        stage: int,
        state: Sequence[Shard],
        policy: CheckpointPolicy,
        buffer_bytes: int,
        reads_again: float,
    ) -> None:
        self._builder = builder
        self._stage = stage
        self._policy = policy
        self._reads_again = reads_again
        # Two chunks must fit into the buffer, so that one is copied while the other is written.
        chunk_bytes = min(policy.chunk_bytes, max(buffer_bytes // 2, 1)) if policy.bounded else policy.chunk_bytes
        if (num_chunks := sum(-(-shard.num_bytes // chunk_bytes) for shard in state)) > _MAX_CHUNKS:
            raise ValueError(
                f"a checkpoint of {sum(shard.num_bytes for shard in state)} B in chunks of {chunk_bytes} B has "
                f"{num_chunks} of them, more than {_MAX_CHUNKS}; give it more host memory than {buffer_bytes} B or "
                "save less"
            )
        self._chunks = tuple(_cut(state, chunk_bytes))
        self.num_chunks = num_chunks
        self._room_bytes = buffer_bytes  # host memory that is filled and emptied in the same order
        self._held: deque[tuple[int, int]] = deque()  # (write, bytes) of writes that may not have ended
        self._on_host = frozenset(shard.changed_by for shard in state if shard.tier is Tier.HOST)
        # The checkpoint tasks for which the next iteration waits: its loop, and each task that changes state.
        self.block: tuple[int, ...] = ()
        self.gates: dict[int, tuple[int, ...]] = {}
        self.gates_late = False  # gates are tasks of their own, which copy the rest of the state on the host
        self._last_writes: list[int] = []  # of each checkpoint
        # The lanes of the training loop. The loop waits where the first task of an iteration waits. It has finished an
        # iteration when the last task has ended, and everything for which the next iteration will wait.
        mine = [task for task in schedule.tasks if task.stage == stage]
        loop = {lane: [task.index for task in mine if task.lane is lane] for lane in (Lane.COMPUTE, Lane.LAUNCH)}
        self._firsts = frozenset(indices[0] for indices in loop.values() if indices)
        needed = (i for first in self._firsts for i in schedule.tasks[first].after_previous)
        self._lasts = _unique((*(indices[-1] for indices in loop.values() if indices), *needed))

    def waits_of(self, task: Task, after: Sequence[int]) -> tuple[int, ...]:
        """Return the checkpoint tasks for which a task of the next iteration waits besides its own dependencies."""
        gates = self.gates.get(task.index, ())
        if self.gates_late and task.index in self._on_host:
            gates = (self._add(Lane.GATE, Op.GATE, (*after, *gates), number=len(self._last_writes) - 1),)
        return (*gates, *self.block) if task.index in self._firsts else gates

    def checkpoint(self) -> None:
        """Append a checkpoint of the state after the latest iteration."""
        policy, number = self._policy, len(self._last_writes)
        called = tuple(self._builder.where[i] for i in self._lasts)
        if policy.in_flight is not None and number >= policy.in_flight:
            called = (*called, self._last_writes[number - policy.in_flight])
        copies: list[int | None] = []
        writes: list[int] = []
        safe: list[tuple[int, ...]] = []  # for each chunk, the tasks for which its next update waits
        if policy.writes_after_staging:
            copies = [self._copy(chunk, called) for chunk in self._chunks]
            created = self._add(Lane.WRITE, Op.CREATE, (*called, *(i for i in copies[-1:] if i is not None)))
        else:
            # The caller creates the files and then copies. Or it leaves both to other threads, which wait only for the
            # state: see [Note: As executed]. Or those that write create them too, while others copy.
            calls = policy.blocks_until is not BlocksUntil.NOTHING
            if not calls:
                called = tuple(self._source(chunk) for chunk in self._chunks[:1])
            by_writers = policy.staging is Staging.FRESH_POOL
            lane = Lane.WRITE if by_writers else Lane.SNAPSHOT if calls else Lane.STAGING
            created = self._add(lane, Op.CREATE, called)
            called = called if by_writers else (created,) if calls else ()
        for position, chunk in enumerate(self._chunks):
            if position == len(copies):  # not copied yet: copy it as soon as there is room, then write it
                copies.append(self._copy(chunk, called))
            copy = copies[position]
            if copy is None and policy.copies_late:
                handed, writes_after = self._hand_over(chunk, created)
                safe.append(handed)
                writes.append(writes_after)
            else:
                writes.append(self._write(chunk, copy, created))
                safe.append((writes[-1] if copy is None else copy,))
        self._last_writes.append(writes[-1] if writes else created)
        if self._reads_again:
            num_bytes = round(self._reads_again * sum(chunk.num_bytes for chunk in self._chunks))
            read = Shard(num_bytes, Tier.HOST, 0)
            self._add(Lane.RETENTION, Op.VERIFY, self._last_writes[-1:], read, number=number)
        staged = [i for indices in safe for i in indices]
        blocks = {BlocksUntil.CREATED: [created], BlocksUntil.STAGED: staged, BlocksUntil.WRITTEN: writes}
        self.block = self._latest(blocks.get(policy.blocks_until, ()))
        self.gates, self.gates_late = self._gates(safe), policy.copies_late

    def promote(self, num_bytes: int) -> None:
        """Append the promotion of a checkpoint of the state after the latest iteration to slower storage."""
        chunk = Shard(num_bytes, Tier.HOST, 0)
        called = tuple(self._builder.where[i] for i in self._lasts)
        promoted = self._add(Lane.PROMOTION, Op.PROMOTE, called, chunk)
        self._last_writes.append(self._add(Lane.PROMOTION, Op.VERIFY, (promoted,), chunk))

    def _copy(self, chunk: Shard, called: tuple[int, ...]) -> int | None:
        """Copy a chunk to host memory as the engine does; ``None`` if the chunk is written in place."""
        staging, on_host = self._policy.staging, chunk.tier is Tier.HOST
        op = Op.READ if chunk.tier is Tier.NVME else Op.SNAPSHOT
        ready = (*called, self._source(chunk))
        if staging is Staging.TRANSIENT:
            return None if on_host else self._add(Lane.WRITE, op, ready, chunk, pinned=False)
        if staging is Staging.PINNED:
            return None if on_host else self._add(Lane.SNAPSHOT, op, (*ready, *self._room(chunk)), chunk)
        pool = staging is Staging.FRESH_POOL
        touched = self._add(Lane.STAGING if pool else Lane.SNAPSHOT, Op.TOUCH, (*ready, *self._room(chunk)), chunk)
        if not on_host:
            return self._add(Lane.SNAPSHOT, op, (touched,), chunk, pinned=False)
        clone = dataclasses.replace(chunk, num_bytes=_CLONE_PASSES * chunk.num_bytes)
        return self._add(Lane.SNAPSHOT, Op.PASS, (touched,), clone)

    def _room(self, chunk: Shard) -> tuple[int, ...]:
        """Return the write that must end before bounded host memory has room for one more chunk, if there is one."""
        last: tuple[int, ...] = ()
        while self._policy.bounded and self._room_bytes < chunk.num_bytes and self._held:
            write, freed_bytes = self._held.popleft()
            self._room_bytes += freed_bytes
            last = (write,)
        return last

    def _take(self, write: int, num_bytes: int) -> None:
        """Hold host memory until a write has ended."""
        self._room_bytes -= num_bytes
        self._held.append((write, num_bytes))

    def _write(self, chunk: Shard, copy: int | None, created: int) -> int:
        """Write a chunk, and hold its copy until then."""
        write = self._add(Lane.WRITE, Op.WRITE, (self._source(chunk) if copy is None else copy, created), chunk)
        if copy is not None:
            self._take(write, chunk.num_bytes)
        return write

    def _hand_over(self, chunk: Shard, created: int) -> tuple[tuple[int, ...], int]:
        """Write a chunk on the host in place, after the copies of earlier chunks.

        Returns the tasks for which its gate waits, and its write. The gate waits until the snapshot thread has reached
        the chunk and the buffer has room for the part that is not written by then.
        """
        handed = self._add(Lane.SNAPSHOT, Op.SNAPSHOT, (self._source(chunk),), dataclasses.replace(chunk, num_bytes=0))
        room = self._room(chunk)
        write = self._add(Lane.WRITE, Op.WRITE, (handed, created), chunk)
        self._take(write, chunk.num_bytes)
        return (handed, *room), write

    def _source(self, chunk: Shard) -> int:
        """Return the task after which a chunk has the content that will be saved."""
        return self._builder.where[chunk.changed_by]

    def _gates(self, safe: Sequence[tuple[int, ...]]) -> dict[int, tuple[int, ...]]:
        """Return, by task that changes state, the copies for which it waits, or writes where nothing is copied."""
        policy = self._policy
        if policy.gate is Gate.NONE:
            return {}
        of_task: dict[int, list[int]] = {}
        for chunk, indices in zip(self._chunks, safe, strict=True):
            of_task.setdefault(chunk.changed_by, []).extend(indices)
        if policy.gate is Gate.UPDATE:
            return dict.fromkeys(of_task, self._latest(i for indices in safe for i in indices))
        return {task: self._latest(indices) for task, indices in of_task.items()}

    def _latest(self, indices: Iterable[int]) -> tuple[int, ...]:
        """Return the last of some tasks on each lane; the others end earlier."""
        return tuple({self._builder.tasks[i].lane: i for i in sorted(indices)}.values())

    def _add(
        self,
        lane: Lane,
        op: Op,
        after: Iterable[int],
        chunk: Shard = _NOTHING,
        *,
        pinned: bool = True,
        number: int | None = None,
    ) -> int:
        """Append one task of a checkpoint, by default of the current one, and return its index."""
        task = Task(
            len(self._builder.tasks),
            lane,
            op,
            Phase.UPDATE,
            chunk.unit,
            piece=chunk.piece,
            num_bytes=chunk.num_bytes,
            stage=self._stage,
            pinned=pinned,
            after=_unique(after),
        )
        return self._builder.append(task, -1, len(self._last_writes) if number is None else number)


def _cut(state: Iterable[Shard], chunk_bytes: int) -> Iterable[Shard]:
    """Yield the state in chunks of at most ``chunk_bytes``."""
    for shard in state:
        for begin in range(0, shard.num_bytes, chunk_bytes):
            yield dataclasses.replace(shard, num_bytes=min(chunk_bytes, shard.num_bytes - begin))


def _unique(indices: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(set(indices)))
