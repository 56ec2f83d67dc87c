"""A schedule as flat arrays, for code that goes through all tasks."""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Hashable, Iterable, Sequence
from typing import Self

import numpy as np

from planner.schedule.tasks import LANES, MEMORY_CLASSES, TIERS, Ints, Lane, MemoryClass, Op, Task, Tier


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """For each of n tasks, the indices of some other tasks.

    Attributes:
        indices: int64[...], those of the first task, then of the second, and so on.
        counts: int64[n], the number of indices of each task.
    """

    indices: Ints
    counts: Ints

    @classmethod
    def of(cls, rows: Iterable[Sequence[int]], count: int) -> Self:
        """Make them from ``count`` rows."""
        listed = list(rows)
        counts = np.array(list(map(len, listed)), np.int64)
        assert len(counts) == count
        return cls(np.array(list(itertools.chain.from_iterable(listed)), np.int64), counts)

    @classmethod
    def sorted(cls, pairs: Ints, count: int) -> Self:
        """Return the rows of ``count`` tasks from pairs of a task and an index; each is sorted, without duplicates."""
        flat = np.sort(pairs[:, 0] * count + pairs[:, 1])  # numpy's unique hashes them first, which takes longer
        flat = flat[np.diff(flat, prepend=-1) > 0]
        return cls(flat % count, np.bincount(flat // count, minlength=count))

    @property
    def pairs(self) -> Ints:
        """Pairs of a task and one of its indices."""
        return np.column_stack((np.repeat(np.arange(len(self.counts)), self.counts), self.indices))

    def tuples(self) -> list[tuple[int, ...]]:
        """Return the rows as tuples."""
        listed, ends = self.indices.tolist(), np.cumsum(self.counts).tolist()
        return [tuple(listed[begin:end]) for begin, end in itertools.pairwise((0, *ends))]


_LANE_NUMBERS = {lane: number for number, lane in enumerate(LANES)}
TIER_NUMBERS = {tier: number for number, tier in enumerate(TIERS)}
CLASS_NUMBERS = {memory_class: number for number, memory_class in enumerate(MEMORY_CLASSES)}
# The price of these tasks depends on their unit: on its kernels, or on how its parameters are divided.
_OF_UNITS = frozenset({Lane.COMPUTE, Lane.COLLECTIVE})
_UNPRICED = {"index", "phase", "unit", "micro_batch", "piece", "slot", "tile", "after", "after_previous"}
_amounts = operator.attrgetter(*(field.name for field in dataclasses.fields(Task) if field.name not in _UNPRICED))


def kind_of(work: Task) -> tuple[Hashable, ...]:
    """Return all that a task's price depends on: tasks of one kind have one price on any machine."""
    amounts = _amounts(work)
    # The unit has kernels and parts of parameters. Only the first micro-batch does not add to an earlier gradient.
    return (amounts, work.micro_batch > 0, work.unit if amounts[0] in _OF_UNITS else "")


def kinds_of(tasks: Iterable[Task]) -> tuple[list[tuple[Hashable, ...]], Ints]:
    """Return the kinds of tasks, as they come, and of each task the position of its kind."""
    every = list(map(kind_of, tasks))
    numbers = {kind: number for number, kind in enumerate(dict.fromkeys(every))}
    return list(numbers), np.array([numbers[kind] for kind in every], np.int64)


@dataclasses.dataclass(frozen=True, eq=False)
class Arrays:
    """A schedule as arrays: what a simulation, or a sum of held bytes, needs to know of tasks and buffers.

    Attributes:
        works: one task of each kind.
        kinds: the kind of each of ``works``, see :func:`kind_of`.
        work: int64[n], for each of n tasks, the position of its kind in ``works``.
        lane: int64[n], ``stage * len(LANES)`` plus the position of the lane in :data:`LANES`.
        after, num_after: int64[...] and int64[n], the predecessors' indices, task by task, and their number.
        after_previous, num_after_previous: the same for predecessors in the previous iteration.
        first_forward: the task with which an iteration begins; ``None`` if nothing is computed.
        tier, memory_class: int64[m], of each of m buffers, the position in :data:`TIERS` and :data:`MEMORY_CLASSES`.
        num_bytes, first, last, stage: int64[m], of each buffer; ``first`` and ``last`` are -1 if it is always held.
    """

    works: Sequence[Task]
    kinds: Sequence[Hashable]
    work: Ints
    lane: Ints
    after: Ints
    num_after: Ints
    after_previous: Ints
    num_after_previous: Ints
    first_forward: int | None
    tier: Ints
    memory_class: Ints
    num_bytes: Ints
    first: Ints
    last: Ints
    stage: Ints

    @classmethod
    def of(
        cls,
        tasks: Sequence[Task],
        after: Rows,
        after_previous: Rows,
        tier: Sequence[Tier],
        memory_class: Sequence[MemoryClass],
        *columns: Sequence[int] | Ints,
    ) -> Self:
        """Make them from tasks, their predecessors, and a column of all buffers for each of the last six attributes."""
        tiers, classes = [TIER_NUMBERS[each] for each in tier], [CLASS_NUMBERS[each] for each in memory_class]
        held = [np.array(column, np.int64) for column in (tiers, classes, *columns)]
        return cls.of_kinds(tasks, *kinds_of(tasks), after, after_previous, held)

    @classmethod
    def of_kinds(
        cls,
        tasks: Sequence[Task],
        kinds: Sequence[Hashable],
        numbers: Ints,
        after: Rows,
        after_previous: Rows,
        held: Iterable[Ints],
    ) -> Self:
        """Make them as :meth:`of` does, where the kind of each task is known.

        Args:
            tasks: all of them.
            kinds: their kinds.
            numbers: of each task, the position of its kind among these.
            after: their predecessors.
            after_previous: those in the previous iteration.
            held: the last six attributes.
        """
        firsts = np.sort(np.unique(numbers, return_index=True)[1])  # kinds are numbered as they come
        known = numbers[firsts]
        renumbered = np.full(len(kinds), -1)
        renumbered[known] = np.arange(len(known))
        works, work = [tasks[first] for first in firsts.tolist()], renumbered[numbers]
        lane = np.array([each.stage * len(LANES) + _LANE_NUMBERS[each.lane] for each in works], np.int64)
        return cls(
            works,
            [kinds[number] for number in known.tolist()],
            work,
            lane[work],
            after.indices,
            after.counts,
            after_previous.indices,
            after_previous.counts,
            next((i for i, task in enumerate(tasks) if task.op is Op.FORWARD), None),
            *held,
        )

    @functools.cached_property
    def always_held(self) -> Ints:
        """Bytes that are held all the time, int64[tiers, stages]; a schedule without buffers has no stages here."""
        always = self.first < 0
        held = np.zeros((len(TIERS), int(self.stage.max(initial=-1)) + 1), np.int64)
        np.add.at(held, (self.tier[always], self.stage[always]), self.num_bytes[always])
        return held

    @functools.cached_property
    def moved(self) -> tuple[int, int]:
        """Bytes that all tasks of an iteration move, and the number of parameters that the CPU updates."""
        counts = np.bincount(self.work, minlength=len(self.works)).tolist()
        num_bytes = sum(count * work.num_bytes for count, work in zip(counts, self.works, strict=True))
        updated = ((count, work) for count, work in zip(counts, self.works, strict=True) if work.lane is Lane.CPU)
        return num_bytes, sum(count * work.num_params for count, work in updated)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        fields = (getattr(self, field.name) for field in dataclasses.fields(self))
        return sum(field.nbytes for field in fields if isinstance(field, np.ndarray))
