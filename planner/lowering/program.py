"""A schedule while it is being lowered: a spine of compute tasks, and the tasks that are issued around each.

A pass refers to a task by its key: its ``index`` until then, which counts tasks in order of creation. So passes can
add tasks anywhere without renumbering; at the end :meth:`Program.number` turns keys into issue order. Passes find each
other's tasks in the unit that the tasks work on (:class:`LoweredUnit`).
"""

import dataclasses
import functools
import itertools
import operator
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence

import numpy as np

from planner.decisions import Activations, Decisions
from planner.graph import Unit
from planner.lowering.amounts import Amounts, amounts_by
from planner.schedule.arrays import CLASS_NUMBERS, TIER_NUMBERS, Arrays, Rows, kinds_of
from planner.schedule.schedule import Schedule
from planner.schedule.tasks import Buffer, Ints, Lane, MemoryClass, Op, Phase, Task, Tier

Keys = tuple[int, ...]
Held = tuple[Tier, MemoryClass, int, int, int, int, str]
ALWAYS = -1
"""Stands for both keys of a buffer that is always held."""


@dataclasses.dataclass(slots=True, eq=False)
class LoweredUnit:
    """A unit, its decision, and its tasks so far.

    Attributes:
        unit: the unit of the model, as it computes here, or the stage of a pipeline.
        amounts: its decision, as amounts.
        activations: the decision on its activations.
        name, num_params: the unit's own.
        stage: its pipeline stage.
        turn: its round in that stage, see [Note: Rounds] in :mod:`planner.lowering.stages`.
        forwards, backwards: its compute tasks, in the order in which they run; see :meth:`there` and :meth:`back`.
        weight_gradients: tasks that make the gradients that backward leaves, if any, likewise.
        agains: tasks that recompute activations just before its backward, if any, likewise.
        offloads, reloads: copies of its activations, if any, likewise.
        moved_bytes: bytes of its activations that leave the device and return; ``None`` if its segment's stay.
        scatters, flushes: by micro-batch, the collective that reduces its gradient, and the last copy to the host.
        final: the task after which its summed gradient is on the device.
        summed: the task after which its whole summed gradient is where it will be used.
        exchange: the all-reduce of a weight's gradient that the first and last pipeline stage share.
        spill: the write of its gradient to NVMe.
        updates: the update of every subgroup.
        changes: of every subgroup, the task that changes its state in its home: the update, or the store after it.
        first_fill: the first task of an iteration that fills its slot, and the list in which it is issued.
    """

    unit: Unit
    amounts: Amounts
    activations: Activations
    name: str
    num_params: int
    stage: int
    turn: int = 0
    moved_bytes: int | None = None
    forwards: list[Task] = dataclasses.field(default_factory=list)
    backwards: list[Task] = dataclasses.field(default_factory=list)
    weight_gradients: list[Task] = dataclasses.field(default_factory=list)
    agains: list[Task] = dataclasses.field(default_factory=list)
    offloads: list[Task] = dataclasses.field(default_factory=list)
    reloads: list[Task] = dataclasses.field(default_factory=list)
    scatters: dict[int, Task] = dataclasses.field(default_factory=dict)
    flushes: dict[int, Task] = dataclasses.field(default_factory=dict)
    exchange: Task | None = None
    final: Task | None = None
    summed: Task | None = None
    spill: Task | None = None
    updates: list[Task] = dataclasses.field(default_factory=list)
    changes: list[Task] = dataclasses.field(default_factory=list)
    first_fill: tuple[list[Task], Task] | None = None

    def makes(self, micro_batch: int) -> Task:
        """Return the first task of a micro-batch that makes the unit's gradients."""
        return self.weight_gradients[micro_batch] if self.weight_gradients else self.backwards[self.back(micro_batch)]

    def there(self, micro_batch: int, tile: int = 0) -> int:
        """Return the number of a tile's task among those of forward."""
        return micro_batch * self.unit.num_tiles + tile

    def back(self, micro_batch: int, tile: int | None = None) -> int:
        """Return the number of a tile's task among those of backward, where the last tile is the first (the default).

        See [Note: Breadth order] in :mod:`planner.lowering.compute`.
        """
        last = self.unit.num_tiles - 1
        return micro_batch * self.unit.num_tiles + last - (last if tile is None else tile)


class Program:
    """The data that passes read and extend.

    Attributes:
        model: the model's units in forward order.
        decisions: what to lower.
        units: the same units with their decisions.
        named: the lowered units by name.
        segments: the lowered units by segment, in forward order.
        rounds: the segments of each round.
        drafts: all tasks, by key.
        spine: the tasks that the training loop reaches, in order.
        computing: the compute tasks of the spine.
        clip: the barrier after them, if gradients are clipped.
        before, behind: tasks issued just before or just after a spine task, by its key, in order.
        tail: tasks issued at the end of the iteration.
        held: all buffers: tier, class, bytes, the keys of the first and last task (or ALWAYS twice), stage, label.
        asynchronous: whether the device runs apart from the thread that issues its work.
        stage: of a pipeline, or 0.

    Raises:
        ValueError: the decisions do not fit the units; naming the unit, the rule and the remedy.
    """

    def __init__(
        self,
        model: tuple[Unit, ...],
        decisions: Decisions,
        *,
        asynchronous: bool = False,
        stage: int = 0,
    ) -> None:
        _check(model, decisions)
        self.model, self.decisions, self.asynchronous, self.stage = model, decisions, asynchronous, stage
        amounts_of, decided = amounts_by(decisions), decisions.units
        # In another engine's pipeline, units are the stages, and then perhaps the experts of each.
        stages = itertools.cycle(range(stage, stage + decisions.pipeline_parallel))
        self.units = [
            LoweredUnit(
                unit.fp8_twin if unit.fp8_twin and decisions.moves_fp8(unit) else unit,
                amounts_of(unit, decided[unit.name]),
                decided[unit.name].activations,
                unit.name,
                unit.num_params,
                of_stage,
                turn,
            )
            for unit, of_stage, turn in zip(model, stages, rounds_of(model, decisions), strict=False)
        ]
        for lowered in self.units:
            if decided[lowered.name].offloads:
                lowered.moved_bytes = lowered.unit.swap_bytes
        self.named = {unit.name: unit for unit in self.units}
        self.segments = [list(group) for _, group in itertools.groupby(self.units, key=lambda each: each.unit.segment)]
        self.rounds = [list(group) for _, group in itertools.groupby(self.segments, key=lambda each: each[0].turn)]
        self.drafts: list[Task] = []
        self.spine: list[Task] = []
        self.computing: list[Task] = []
        self.clip: Task | None = None
        self.before: dict[int, list[Task]] = defaultdict(list)
        self.behind: dict[int, list[Task]] = defaultdict(list)
        self.tail: list[Task] = []
        self.held: list[Held] = []

    def draft(
        self,
        lane: Lane,
        op: Op,
        phase: Phase,
        unit: LoweredUnit | None = None,
        micro_batch: int = 0,
        after: Keys = (),
        *,
        piece: int = -1,
        tile: int = 0,
    ) -> Task:
        """Make a task in the stage of its unit. The caller decides where it is issued."""
        drafts = self.drafts
        if unit:
            draft = Task(
                len(drafts), lane, op, phase, unit.name, micro_batch, piece, stage=unit.stage, tile=tile, after=after
            )
        else:
            draft = Task(len(drafts), lane, op, phase, "", micro_batch, piece, stage=self.stage, after=after)
        if lane is Lane.COLLECTIVE:
            draft.through_host = self.decisions.collectives is not None
        drafts.append(draft)
        return draft

    def lay(self, noted: list[Task], op: Op, unit: LoweredUnit, micro_batch: int, tile: int = 0) -> None:
        """Append a compute task to the spine, and to the unit's tasks of its kind."""
        phase = Phase.FORWARD if op is Op.FORWARD else Phase.BACKWARD
        draft = self.draft(Lane.COMPUTE, op, phase, unit, micro_batch, tile=tile)
        draft.in_fp8 = unit.amounts.fp8 is not None
        noted.append(draft)
        self.spine.append(draft)

    def at_step(self, draft: Task) -> None:
        """Issue a task after all compute tasks; if gradients are clipped, before the norm is known."""
        (self.before[self.clip.index] if self.clip else self.tail).append(draft)

    def hold(self, tier: Tier, memory_class: MemoryClass, num_bytes: int, label: str, stage: int | None = None) -> None:
        """Hold bytes all the time, on a rank of a stage, by default its own; 0 bytes add no buffer."""
        if num_bytes:
            of_stage = self.stage if stage is None else stage
            self.held.append((tier, memory_class, num_bytes, ALWAYS, ALWAYS, of_stage, label))

    def hold_while(
        self, memory_class: MemoryClass, num_bytes: int, label: str, first: Task, last: Task, tier: Tier = Tier.GPU
    ) -> None:
        """Hold bytes from the start of one task to the end of another; 0 bytes add no buffer."""
        if num_bytes:
            self.held.append((tier, memory_class, num_bytes, first.index, last.index, first.stage, label))

    def ordered(self) -> list[Task]:
        """Return all drafts in issue order."""
        order: list[Task] = []
        for draft in self.spine:
            order += self.before.get(draft.index, ())
            order.append(draft)
            order += self.behind.get(draft.index, ())
        return order + self.tail

    @functools.cached_property
    def as_arrays(self) -> tuple[Ints, Ints, list[tuple[Hashable, ...]], Ints, Ints]:
        """What :func:`numbered` needs, with keys in place of indices, when all passes have run.

        Pairs of a task and what it waits for, in this iteration and in the previous one; all kinds, and that of each
        task; and columns of buffers, as :attr:`held` has them but for labels.
        """
        count = len(self.drafts)
        after, previous = (Rows.of(map(keys_of, self.drafts), count).pairs for keys_of in (_AFTER, _AFTER_PREVIOUS))
        held = [(TIER_NUMBERS[tier], CLASS_NUMBERS[of], *numbers) for tier, of, *numbers, _ in self.held]
        return after, previous, *kinds_of(self.drafts), np.array(held, np.int64).reshape(-1, 6).T

    def number(self, description: str) -> Schedule:
        """Turn keys into indices and return the schedule."""
        return numbered(self.ordered(), [self], {}, description)


def rounds_of(units: Sequence[Unit], decisions: Decisions) -> list[int]:
    """Return the number of the round that each unit of a stage is in."""
    starts = decisions.round_starts
    return list(itertools.accumulate(int(unit.is_first and unit.segment in starts) for unit in units))


def numbered(order: list[Task], programs: Sequence[Program], more: Mapping[int, Keys], description: str) -> Schedule:
    """Turn keys into indices and return the schedule.

    Args:
        order: all tasks, in issue order; the ``index`` of each is its key in its program.
        programs: those of all stages. Keys count through all of them: those of a stage follow those of earlier stages.
        more: what some tasks wait for beside what they know: both by these keys.
        description: of the schedule.
    """
    begins = list(itertools.accumulate((len(program.drafts) for program in programs), initial=0))
    count, parts = len(order), [(program.as_arrays, begin) for program, begin in zip(programs, begins, strict=False)]
    keys = np.fromiter(map(_KEY, order), np.int64, count)
    if len(programs) > 1:
        keys += np.array(begins)[np.fromiter(map(_STAGE, order), np.int64, count)]
    index = np.full(count + 1, -1)  # by key; that of ALWAYS is the last
    index[keys] = np.arange(count)
    assert count == begins[-1] == np.count_nonzero(index + 1), "every draft is issued once"
    later = np.array([(task, key) for task, before in more.items() for key in before], np.int64).reshape(-1, 2)
    befores, earlier = ([of[way] + begin for (*of, _, _, _), begin in parts] for way in (0, 1))
    after = Rows.sorted(index[np.concatenate((*befores, later))], count)
    after_previous = Rows.sorted(index[np.concatenate(earlier)], count)
    number_of: dict[Hashable, int] = {}
    for (_, _, its, *_), _ in parts:
        for kind in its:
            number_of.setdefault(kind, len(number_of))
    numbers = [np.array([number_of[kind] for kind in its], np.int64)[own] for (_, _, its, own, _), _ in parts]
    held = np.concatenate([columns + (columns != ALWAYS) * _IS_KEY * begin for (*_, columns), begin in parts], axis=1)
    held[3:5] = index[held[3:5]]
    arrays = Arrays.of_kinds(order, [*number_of], np.concatenate(numbers)[keys], after, after_previous, held)

    def make() -> tuple[tuple[Task, ...], tuple[Buffer, ...]]:
        rows = zip(order, after.tuples(), after_previous.tuples(), strict=True)
        tasks = [
            dataclasses.replace(task, index=position, after=before, after_previous=earlier)
            for position, (task, before, earlier) in enumerate(rows)
        ]
        every = [each for program in programs for each in program.held]
        ends = ([None if end < 0 else end for end in each.tolist()] for each in held[3:5])
        buffers = [
            Buffer(tier, memory_class, num_bytes, label, first, last, stage)
            for (tier, memory_class, num_bytes, _, _, stage, label), first, last in zip(every, *ends, strict=True)
        ]
        return tuple(tasks), tuple(buffers)

    return Schedule.deferred(arrays, make, description)


_IS_KEY = np.array([[0], [0], [0], [1], [1], [0]])  # of the columns of buffers
_KEY, _AFTER, _AFTER_PREVIOUS, _STAGE = map(operator.attrgetter, ("index", "after", "after_previous", "stage"))


def _check(units: tuple[Unit, ...], decisions: Decisions) -> None:
    """Check that decisions cover exactly these units, and what they say of activations."""
    decided = decisions.units
    names = {unit.name for unit in units}
    if names != decided.keys():
        strange = sorted(names ^ decided.keys())
        raise ValueError(f"decisions and model differ in units {', '.join(strange[:3])}; plan this model again")
    if decisions.num_backwards_ahead is None and (split := [unit.name for unit in units if unit.weight_gradients]):
        raise ValueError(
            f"unit {split[0]} makes gradients of weights apart from backward, and the decisions have no place for "
            "them; make units of a batch with splits_backward off, or set pipeline_order"
        )
    segments: dict[str, Activations] = {}
    for unit in units:
        activations = decided[unit.name].activations
        if activations != "keep" and not unit.can_swap:
            verb = "offloaded" if decided[unit.name].offloads else "recomputed"
            raise ValueError(f"unit {unit.name} cannot be {verb}; set its activations to 'keep'")
        if segments.setdefault(unit.segment, activations) != activations:
            raise ValueError(
                f"segment {unit.segment}: all its units must keep, all recompute or all offload their activations"
            )
