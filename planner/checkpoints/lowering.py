"""Lower checkpoints into the schedule of a run of several iterations.

[Note: Checkpoint tasks] The training loop requests a checkpoint at the end of an iteration. The engine creates the
files. It copies each chunk of state on the device to host memory as soon as its piece is updated, and writes the copy.
State on the host is written in place. Waiting is expressed by dependencies: of a piece's next update (its gate), and of
a copy into host memory that is not written yet (a full buffer). So the timeline shows how long training was blocked; no
formula of time is needed.

The iteration that is repeated is the one that is executed, with its snapshots and gates ([Note:
Snapshots] in :mod:`planner.lowering.snapshots`). Where no checkpoint was requested they do nothing, and are left out.
Elsewhere each snapshot becomes the chunks that it copies and writes, as its time depends on the ring and the drive.
What waited for the snapshot waits for them, except for as much as the ring holds.
"""

import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from planner.checkpoints.policy import CHUNK_BYTES
from planner.schedule.schedule import Schedule
from planner.schedule.tasks import Lane, Op, Phase, Task, Tier

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


_TASKS_PER_CHUNK = 3  # memory is touched, copied to, written: no engine does more
# The most chunks of a checkpoint, and the most tasks of a run: larger ones take too long to simulate.
_MAX_CHUNKS, _MAX_TASKS = 10_000, 300_000
_NOTHING = Shard(0, Tier.HOST, 0)
_OWN = frozenset({Op.SNAPSHOT, Op.GATE})


class Run:
    """Iterations, and checkpoints between them, as one list of tasks.

    Args:
        one: the iteration, with snapshots.

    Attributes:
        one: the iteration.
        tasks: of all iterations and checkpoints.
        origin: for each task, the index of its original in ``one``; -1 for checkpoint tasks.
        checkpoint: for each task, the number of the checkpoint that it belongs to; -1 for training tasks.
        where: indices of the latest iteration's tasks, by their index in ``one``.
    """

    def __init__(self, one: Schedule) -> None:
        self.one = one
        # The fields of tasks that all iterations share; dataclasses.replace would take several times as long.
        names = {field.name for field in dataclasses.fields(Task)} - {"index", "after", "after_previous"}
        self._same = [{name: getattr(task, name) for name in sorted(names)} for task in one.tasks]
        self.tasks: list[Task] = []
        self.origin: list[int] = []
        self.checkpoint: list[int] = []
        self.where: dict[int, int] = {}

    def iterate(self, savers: Sequence["Saver"]) -> None:
        """Append one iteration, which waits for what the savers of its stages have begun."""
        previous, self.where = self.where, {}
        for task in self.one.tasks:
            if task.op in _OWN:
                continue
            after = [self.where[i] for i in task.after if i in self.where]
            after += savers[task.stage].waits_of(task, after)
            after += [previous[i] for i in task.after_previous if i in previous]
            now = Task(index=len(self.tasks), after=_unique(after), **self._same[task.index])
            self.where[task.index] = self.append(now, task.index, -1)

    def append(self, task: Task, origin: int, checkpoint: int) -> int:
        """Append a task, and return its index."""
        self.tasks.append(task)
        self.origin.append(origin)
        self.checkpoint.append(checkpoint)
        return task.index

    @functools.cached_property
    def schedule(self) -> Schedule:
        """All tasks, when all are appended."""
        return Schedule(tuple(self.tasks), description=f"{self.one.description}, with checkpoints")

    @property
    def num_checkpoints(self) -> int:
        """Number of checkpoints."""
        return max(self.checkpoint, default=-1) + 1


class Saver:
    """The tasks with which one rank saves its state; in a pipeline, one rank of a stage.

    Args:
        run: to which they are appended.
        stage: of the rank.
        state: the pieces that it saves, in this order.
        buffer_bytes: host memory of the rank for copies that are not written yet.
        chunk_bytes: most bytes that are copied, and written, at a time.
        reads_again: the fraction of each checkpoint that is read again for verification after it is written.

    Attributes:
        run, buffer_bytes: as given.
        chunks: the state, cut into chunks.
        number: of the latest checkpoint; -1 before the first.
        safe: by task that changes state, the checkpoint tasks for which it waits in the next iteration.
        firsts, lasts: the first tasks of the training loop's lanes, and those after which it has finished an iteration:
            the last ones, and everything for which the next iteration will wait.

    Raises:
        ValueError: the buffer is empty, or there are too many chunks.
    """

    def __init__(
        self,
        run: Run,
        stage: int,
        state: Sequence[Shard],
        *,
        buffer_bytes: int,
        chunk_bytes: int = CHUNK_BYTES,
        reads_again: float = 0.0,
    ) -> None:
        if buffer_bytes < 1:
            raise ValueError(f"buffer_bytes is {buffer_bytes}; a run with checkpoints needs at least 1")
        self.run = run
        self._stage = stage
        self._reads_again = reads_again
        # Two chunks must fit into the buffer, so that one is copied while the other is written.
        chunk_bytes = min(chunk_bytes, max(buffer_bytes // 2, 1))
        if (num_chunks := sum(-(-shard.num_bytes // chunk_bytes) for shard in state)) > _MAX_CHUNKS:
            raise ValueError(
                f"a checkpoint of {sum(shard.num_bytes for shard in state)} B in chunks of {chunk_bytes} B has "
                f"{num_chunks} of them, more than {_MAX_CHUNKS}; give it more host memory than {buffer_bytes} B or "
                "save less"
            )
        self.chunks = tuple(_cut(state, chunk_bytes))
        self.buffer_bytes = self._room_bytes = buffer_bytes  # host memory that is filled and emptied in the same order
        self._held: deque[tuple[int, int]] = deque()  # (write, bytes) of writes that may not have ended
        self.number = -1
        self.safe: dict[int, tuple[int, ...]] = {}
        mine = [task for task in run.one.tasks if task.stage == stage]
        loop = [[task.index for task in mine if task.lane is lane] for lane in (Lane.COMPUTE, Lane.LAUNCH)]
        self.firsts = frozenset(indices[0] for indices in loop if indices)
        needed = (i for first in self.firsts for i in run.one.tasks[first].after_previous)
        self.lasts = _unique((*(indices[-1] for indices in loop if indices), *needed))

    def waits_of(self, task: Task, after: Sequence[int]) -> tuple[int, ...]:
        """Return the checkpoint tasks for which a task of the next iteration waits besides its own dependencies."""
        safe = self.safe.get(task.index, ())
        if safe and any(self.run.one.tasks[i].op is Op.GATE for i in task.after):
            return (self.add(Lane.GATE, Op.GATE, (*after, *safe)),)
        return safe

    def checkpoint(self) -> None:
        """Append a checkpoint of the state after the latest iteration; other threads do it, so training goes on."""
        self.number += 1
        created = self.add(Lane.STAGING, Op.CREATE, [self.source(chunk) for chunk in self.chunks[:1]])
        last, safe = created, dict[int, list[int]]()
        for chunk in self.chunks:
            room, op = self.room(chunk), Op.READ if chunk.tier is Tier.NVME else Op.SNAPSHOT
            if chunk.tier is Tier.HOST:
                # It is written from where it is, after the copies before it. Its gate waits until they are made and the
                # buffer has room for the part that is not written by then.
                handed = dataclasses.replace(chunk, num_bytes=0)
                copies = (self.add(Lane.SNAPSHOT, op, (self.source(chunk),), handed), *room)
            else:
                copies = (self.add(Lane.SNAPSHOT, op, (self.source(chunk), *room), chunk),)
            last = self.write(chunk, (copies[0], created))
            safe.setdefault(chunk.changed_by, []).extend(copies)
        self.safe = {task: self.latest(copies) for task, copies in safe.items()}
        if self._reads_again:
            num_bytes = round(self._reads_again * sum(chunk.num_bytes for chunk in self.chunks))
            self.add(Lane.RETENTION, Op.VERIFY, (last,), Shard(num_bytes, Tier.HOST, 0))

    def promote(self, num_bytes: int) -> None:
        """Append the promotion of a checkpoint of the state after the latest iteration to slower storage."""
        self.number += 1
        chunk = Shard(num_bytes, Tier.HOST, 0)
        promoted = self.add(Lane.PROMOTION, Op.PROMOTE, (self.run.where[i] for i in self.lasts), chunk)
        self.add(Lane.PROMOTION, Op.VERIFY, (promoted,), chunk)

    def source(self, chunk: Shard) -> int:
        """Return the task after which a chunk has the content that will be saved."""
        return self.run.where[chunk.changed_by]

    def room(self, chunk: Shard) -> tuple[int, ...]:
        """Return the write that must end before host memory has room for one more chunk, if there is one."""
        last: tuple[int, ...] = ()
        while self._room_bytes < chunk.num_bytes and self._held:
            write, freed_bytes = self._held.popleft()
            self._room_bytes += freed_bytes
            last = (write,)
        return last

    def write(self, chunk: Shard, after: Iterable[int]) -> int:
        """Write a chunk, and hold host memory for it until then."""
        write = self.add(Lane.WRITE, Op.WRITE, after, chunk)
        self._room_bytes -= chunk.num_bytes
        self._held.append((write, chunk.num_bytes))
        return write

    def latest(self, indices: Iterable[int]) -> tuple[int, ...]:
        """Return the last of some tasks on each lane; the others end earlier."""
        return tuple({self.run.tasks[i].lane: i for i in sorted(indices)}.values())

    def add(self, lane: Lane, op: Op, after: Iterable[int], chunk: Shard = _NOTHING, *, pinned: bool = True) -> int:
        """Append one task of the latest checkpoint, and return its index."""
        task = Task(
            len(self.run.tasks),
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
        return self.run.append(task, -1, self.number)


MakeSaver = Callable[[Run, int, Sequence[Shard]], Saver]
"""Makes the saver of a stage, which saves this state."""


def with_checkpoints(
    taken: Schedule,
    state: Sequence[Shard],
    make: MakeSaver,
    *,
    num_iterations: int,
    every: int,
    first: int | None = None,
) -> Run:
    """Return the schedule of a run with checkpoints at equal intervals; see [Note: Checkpoint tasks].

    Args:
        taken: one iteration with snapshots.
        state: the pieces that one rank saves, in this order; in a pipeline, those of one rank of every stage.
        make: makes each stage's saver.
        num_iterations: of the run.
        every: iterations from one checkpoint to the next.
        first: the iteration after which the first checkpoint is made; by default ``every``.

    Raises:
        ValueError: a number is not positive, or a piece of state does not belong to the schedule.
    """
    for name, value in (("num_iterations", num_iterations), ("every", every)):
        if value < 1:
            raise ValueError(f"{name} is {value}; a run with checkpoints needs at least 1")
    for shard in state:
        if not 0 <= shard.changed_by < len(taken.tasks) or shard.num_bytes < 0:
            raise ValueError(
                f"state of {shard.unit or 'the model'} ({shard.num_bytes} B) is changed by task {shard.changed_by}; "
                f"the schedule has tasks 0 to {len(taken.tasks) - 1}, and sizes cannot be negative"
            )
    run = Run(taken)
    of_stage: list[list[Shard]] = [[] for _ in range(taken.num_stages)]
    for shard in state:
        of_stage[taken.tasks[shard.changed_by].stage].append(shard)
    savers = [make(run, stage, saved) for stage, saved in enumerate(of_stage)]
    made_after = range(every if first is None else first, num_iterations + 1, every)
    num_checkpoints, num_chunks = len(made_after), sum(len(saver.chunks) for saver in savers)
    num_tasks = num_iterations * len(taken.tasks) + num_checkpoints * num_chunks * _TASKS_PER_CHUNK
    if num_tasks > _MAX_TASKS:
        raise ValueError(
            f"{num_iterations} iterations with {num_checkpoints} checkpoints of {num_chunks} chunks are "
            f"{num_tasks} tasks, more than {_MAX_TASKS}; ask for fewer iterations, as they repeat, or for more host "
            f"memory than {savers[0].buffer_bytes} B"
        )
    for iteration in range(1, num_iterations + 1):
        run.iterate(savers)
        for saver in savers:
            saver.safe = {}
            if iteration in made_after:
                saver.checkpoint()
    return run


def with_promotion(taken: Schedule, num_bytes: Sequence[int], *, num_iterations: int) -> Run:
    """Return the schedule of a run in which a checkpoint is promoted to slower storage, from the second iteration on.

    The promotion reads it, writes it and reads it again beside training. Training does not wait for it.

    Args:
        taken: one iteration with snapshots.
        num_bytes: bytes of one rank's share of the checkpoint, for each pipeline stage.
        num_iterations: of the run.
    """
    run = Run(taken)
    savers = [Saver(run, stage, (), buffer_bytes=1) for stage in range(taken.num_stages)]
    run.iterate(savers)
    for saver, of_rank in zip(savers, num_bytes, strict=True):
        saver.promote(of_rank)
    for _ in range(num_iterations - 1):
        run.iterate(savers)
    return run


def _cut(state: Iterable[Shard], chunk_bytes: int) -> Iterable[Shard]:
    """Yield the state in chunks of at most ``chunk_bytes``."""
    for shard in state:
        for begin in range(0, shard.num_bytes, chunk_bytes):
            yield dataclasses.replace(shard, num_bytes=min(chunk_bytes, shard.num_bytes - begin))


def _unique(indices: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(set(indices)))
