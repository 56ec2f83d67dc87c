"""A schedule as flat arrays, for what looks at every task."""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple, Self

import numpy as np

from planner.schedule.tasks import (
    LANES,
    MEMORY_CLASSES,
    TIERS,
    Ints,
    Lane,
    MemoryClass,
    Op,
    Tier,
    Work,
)


class Held(NamedTuple):
    """Buffers without their labels, column by column, see :class:`Buffer`; -1 for the ends of what is always held."""

    tier: Sequence[Tier]
    memory_class: Sequence[MemoryClass]
    num_bytes: Sequence[int]
    first: Sequence[int] | Ints
    last: Sequence[int] | Ints
    stage: Sequence[int]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Indices of other tasks, of each of n tasks.

    Attributes:
        indices: int64[...], one task after another.
        counts: int64[n], how many each has.
    """

    indices: Ints
    counts: Ints

    @classmethod
    def of(cls, rows: Iterable[Sequence[int]], count: int) -> Self:
        """Make them from so many rows."""
        listed = list(rows)
        counts = np.array(list(map(len, listed)), np.int64)
        assert len(counts) == count
        return cls(np.array(list(itertools.chain.from_iterable(listed)), np.int64), counts)

    def sorted(self) -> Self:
        """Return the same with every row in order, each index once."""
        count = len(self.counts)
        row = np.repeat(np.arange(count), self.counts)
        pairs = np.sort(row * count + self.indices)  # numpy's unique hashes them first, which takes longer
        pairs = pairs[np.diff(pairs, prepend=-1) > 0]
        return type(self)(pairs % count, np.bincount(pairs // count, minlength=count))

    def tuples(self) -> list[tuple[int, ...]]:
        """Return them task by task."""
        listed, ends = self.indices.tolist(), np.cumsum(self.counts).tolist()
        return [tuple(listed[begin:end]) for begin, end in itertools.pairwise((0, *ends))]


_LANE_NUMBERS = {lane: number for number, lane in enumerate(LANES)}


_TIER_NUMBERS = {tier: number for number, tier in enumerate(TIERS)}


_CLASS_NUMBERS = {memory_class: number for number, memory_class in enumerate(MEMORY_CLASSES)}


# Where a task's price depends on its unit: on its kernels, or on how its parameters are divided.
_OF_UNITS = frozenset({Lane.COMPUTE, Lane.COLLECTIVE})


_amounts = operator.attrgetter(
    "lane",
    "op",
    "num_bytes",
    "num_params",
    "num_kernels",
    "num_tensors",
    "num_modules",
    "pinned",
    "stalls",
    "stage",
)


def kind_of(work: Work) -> tuple[Hashable, ...]:
    """Return all that a price depends on: what is equal here has one price under any prices."""
    amounts = _amounts(work)
    # Kernels and parts of parameters are the unit's; of micro-batches the first is alone in adding to nothing.
    return (amounts, work.micro_batch > 0, work.unit if amounts[0] in _OF_UNITS else "")


@dataclasses.dataclass(frozen=True, eq=False)
class Arrays:
    """A schedule as arrays: all that simulating it, and adding up what it holds, needs of tasks and buffers.

    Attributes:
        works: what tasks do; what is of one kind stands here once.
        kinds: of each of them, see :func:`kind_of`.
        work: int64[n], which of ``works`` each of n tasks does.
        lane: int64[n], ``stage * len(LANES)`` and the position of the lane in :data:`LANES`.
        after, num_after: int64[...] and int64[n], the indices of each task's predecessors, one task after another, and
            how many each has.
        after_previous, num_after_previous: likewise in the previous iteration.
        first_forward: the task with which an iteration begins; ``None`` if nothing is computed.
        tier, memory_class: int64[m], of each of m buffers, the position in :data:`TIERS` and :data:`MEMORY_CLASSES`.
        num_bytes, first, last, stage: int64[m], of each buffer; -1 for the ends of what is always held.
    """

    works: Sequence[Work]
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
        tasks: Sequence[Work],
        after: Rows,
        after_previous: Rows,
        held: Held,
    ) -> Self:
        """Make them from what tasks do, whom they come after, and what is held."""
        numbers, works = dict[tuple[Hashable, ...], int](), list[Work]()
        number_of = list[int]()
        amounts_of, of_units, number_for = _amounts, _OF_UNITS, numbers.setdefault
        for task in tasks:  # kind_of, but for the call
            amounts = amounts_of(task)
            kind = (amounts, task.micro_batch > 0, task.unit if amounts[0] in of_units else "")
            if (number := number_for(kind, len(works))) == len(works):
                works.append(task)
            number_of.append(number)
        work = np.array(number_of, np.int64)
        lane = np.array([each.stage * len(LANES) + _LANE_NUMBERS[each.lane] for each in works], np.int64)
        first_forward = next((i for i, task in enumerate(tasks) if task.op is Op.FORWARD), None)
        tier, memory_class, *columns = held
        return cls(
            works,
            list(numbers),
            work,
            lane[work],
            after.indices,
            after.counts,
            after_previous.indices,
            after_previous.counts,
            first_forward,
            np.array([_TIER_NUMBERS[t] for t in tier], np.int64),
            np.array([_CLASS_NUMBERS[c] for c in memory_class], np.int64),
            *(np.array(column, np.int64) for column in columns),
        )

    @functools.cached_property
    def always_held(self) -> Ints:
        """Bytes that are held all the time, int64[tiers, stages]; with no buffers there are no stages."""
        always = self.first < 0
        held = np.zeros((len(TIERS), int(self.stage.max(initial=-1)) + 1), np.int64)
        np.add.at(held, (self.tier[always], self.stage[always]), self.num_bytes[always])
        return held

    @functools.cached_property
    def moved(self) -> tuple[int, int]:
        """Bytes that tasks move in an iteration, and parameters that the CPU updates."""
        counts = np.bincount(self.work, minlength=len(self.works)).tolist()
        num_bytes = sum(count * work.num_bytes for count, work in zip(counts, self.works, strict=True))
        updated = ((count, work) for count, work in zip(counts, self.works, strict=True) if work.lane is Lane.CPU)
        return num_bytes, sum(count * work.num_params for count, work in updated)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        fields = (getattr(self, field.name) for field in dataclasses.fields(self))
        return sum(field.nbytes for field in fields if isinstance(field, np.ndarray))
