"""The form a schedule has while it is being lowered: a spine of compute tasks, and what is issued around each.

Passes refer to tasks by key (a string), so that they can add tasks anywhere without renumbering; :meth:`Program.number`
turns keys into issue order at the end.
"""

import dataclasses
import functools
from collections import defaultdict

from planner.decisions import Decisions, Place
from planner.graph import Unit, segments
from planner.schedule import Arrays, Buffer, Held, Lane, MemoryClass, Op, Phase, Schedule, Task, Tier


@dataclasses.dataclass(slots=True, eq=False)
class Draft:
    """A task whose dependencies are still keys. See :class:`planner.schedule.Task` for the other fields."""

    key: str
    lane: Lane
    op: Op
    phase: Phase
    unit: str = ""
    micro_batch: int = 0
    piece: int = -1
    num_bytes: int = 0
    num_params: int = 0
    num_kernels: int = 0
    num_tensors: int = 0
    num_modules: int = 0
    slot: int = -1
    pinned: bool = True
    stalls: bool = False
    stage: int = 0
    after: list[str] = dataclasses.field(default_factory=list)
    after_previous: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(slots=True)
class Hold:
    """A buffer whose ends are still keys."""

    tier: Tier
    memory_class: MemoryClass
    num_bytes: int
    label: str
    first: str | None = None
    last: str | None = None


@dataclasses.dataclass
class Program:
    """What the passes read and extend.

    Attributes:
        units: the model's units in forward order.
        decisions: what to lower.
        spine: the tasks that the training loop itself reaches, in order.
        before, behind: tasks issued just before or just behind a spine task, by its key, in order.
        tail: tasks issued at the end of the iteration.
        loop: what comes after all of them, if anything does.
        first_use: for each unit in a slot, the key of what fills it first in an iteration, and the list it is in.
    """

    units: tuple[Unit, ...]
    decisions: Decisions
    spine: list[Draft] = dataclasses.field(default_factory=list)
    before: dict[str, list[Draft]] = dataclasses.field(default_factory=lambda: defaultdict(list))
    behind: dict[str, list[Draft]] = dataclasses.field(default_factory=lambda: defaultdict(list))
    tail: list[Draft] = dataclasses.field(default_factory=list)
    loop: Draft | None = None
    holds: list[Hold] = dataclasses.field(default_factory=list)
    drafts: dict[str, Draft] = dataclasses.field(default_factory=dict)
    first_use: dict[str, tuple[list[Draft], str]] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def stage_of(self) -> dict[str, int]:
        """The pipeline stage of each unit, by name."""
        pipelined = self.decisions.pipeline_parallel > 1  # units are then stages
        return {unit.name: stage if pipelined else 0 for stage, unit in enumerate(self.units)}

    @functools.cached_property
    def segments(self) -> list[list[Unit]]:
        """The units by segment, in forward order."""
        return segments(self.units)

    @functools.cached_property
    def replicas(self) -> dict[str, int]:
        """How many ranks have the same part of a unit, by name of the unit."""
        return {unit.name: self.decisions.replicas(unit) for unit in self.units}

    @functools.cached_property
    def shard_params(self) -> dict[str, int]:
        """How many of a unit's parameters one rank updates, by name of the unit."""
        return {unit.name: self.decisions.shard_params(unit) for unit in self.units}

    @functools.cached_property
    def padded_params(self) -> dict[str, int]:
        """How many parameters a unit has with what pads it to equal shards, by name of the unit."""
        sharded = self.decisions.zero_stage >= 1
        return {name: shard * (self.replicas[name] if sharded else 1) for name, shard in self.shard_params.items()}

    @functools.cached_property
    def pieces(self) -> dict[str, tuple[tuple[int, Place], ...]]:
        """Size and place of each of a unit's subgroups on one rank, by name of the unit."""
        return {unit.name: self.decisions.placed_pieces(unit) for unit in self.units}

    @functools.cached_property
    def placed(self) -> dict[str, dict[Place, int]]:
        """How many of a unit's parameters (on one rank) are updated at each place where any is, by name of the unit."""
        found: dict[str, dict[Place, int]] = {}
        for name, pieces in self.pieces.items():
            found[name] = totals = dict[Place, int]()
            for num_params, place in pieces:
                totals[place] = totals.get(place, 0) + num_params
        return found

    @functools.cached_property
    def flushed_params(self) -> dict[str, int]:
        """How many of a unit's parameters (on one rank) have a gradient that is flushed to the host, by its name."""
        flushes = self.decisions.flushes
        return {
            name: sum(num_params for place, num_params in placed.items() if flushes(name, place))
            for name, placed in self.placed.items()
        }

    @functools.cached_property
    def gathered(self) -> frozenset[str]:
        """Units whose parameters are gathered from other ranks for every use."""
        sharded = self.decisions.zero_stage == 3
        return frozenset(name for name, count in self.replicas.items() if sharded and count > 1)

    def placed_params(self, unit: Unit, *places: Place) -> int:
        """Return how many of a unit's parameters (on one rank) are updated at some places."""
        return sum(num_params for place, num_params in self.placed[unit.name].items() if place in places)

    def add(self, draft: Draft) -> Draft:
        """Make a draft known by its key, give it the stage of its unit, and return it."""
        assert draft.key not in self.drafts, draft.key
        draft.stage = self.stage_of.get(draft.unit, 0)
        self.drafts[draft.key] = draft
        return draft

    def at_step(self, draft: Draft) -> Draft:
        """Add a task behind everything that computes: before the norm is known, if gradients are clipped."""
        (self.before["clip"] if self.decisions.clip else self.tail).append(self.add(draft))
        return draft

    def hold(self, tier: Tier, memory_class: MemoryClass, num_bytes: int, label: str, *ends: str) -> None:
        """Hold bytes from the start of the first to the end of the second of ``ends``, or always if there are none.

        What is always held is labelled with the unit it belongs to, if any.
        """
        if num_bytes:
            self.holds.append(Hold(tier, memory_class, num_bytes, label, *ends))

    def ordered(self) -> list[Draft]:
        """Return all drafts in issue order."""
        order: list[Draft] = []
        for draft in self.spine:
            order += self.before.get(draft.key, ())
            order.append(draft)
            order += self.behind.get(draft.key, ())
        return order + self.tail + ([self.loop] if self.loop else [])

    def number(self, description: str) -> Schedule:
        """Turn keys into indices and return the schedule."""
        order = self.ordered()
        index = {draft.key: i for i, draft in enumerate(order)}
        assert len(index) == len(self.drafts) == len(order), "every draft is issued once"
        after = [_indices(draft.after, index) for draft in order]
        after_previous = [_indices(draft.after_previous, index) if draft.after_previous else () for draft in order]
        stage_of, drafts = self.stage_of, self.drafts
        held = [
            Held(h.tier, h.memory_class, h.num_bytes, -1, -1, stage_of.get(h.label, 0))
            if h.first is None or h.last is None
            else Held(h.tier, h.memory_class, h.num_bytes, index[h.first], index[h.last], drafts[h.first].stage)
            for h in self.holds
        ]
        labels = [hold.label for hold in self.holds]
        make = functools.partial(_made, order, after, after_previous, held, labels)
        return Schedule.deferred(Arrays.of(order, after, after_previous, held), make, description)


def _indices(keys: list[str], index: dict[str, int]) -> tuple[int, ...]:
    """Return where some tasks are, in order and each once."""
    if len(keys) < 2:
        return (index[keys[0]],) if keys else ()
    return tuple(sorted({index[key] for key in keys}))


def _made(
    order: list[Draft],
    after: list[tuple[int, ...]],
    after_previous: list[tuple[int, ...]],
    held: list[Held],
    labels: list[str],
) -> tuple[tuple[Task, ...], tuple[Buffer, ...]]:
    """Return tasks and buffers."""
    tasks = (
        Task(
            index=i,
            lane=d.lane,
            op=d.op,
            phase=d.phase,
            unit=d.unit,
            micro_batch=d.micro_batch,
            piece=d.piece,
            num_bytes=d.num_bytes,
            num_params=d.num_params,
            num_kernels=d.num_kernels,
            num_tensors=d.num_tensors,
            num_modules=d.num_modules,
            slot=d.slot,
            pinned=d.pinned,
            stalls=d.stalls,
            stage=d.stage,
            after=after[i],
            after_previous=after_previous[i],
        )
        for i, d in enumerate(order)
    )
    buffers = (
        Buffer(
            h.tier,
            h.memory_class,
            h.num_bytes,
            label,
            None if h.first < 0 else h.first,
            None if h.last < 0 else h.last,
            h.stage,
        )
        for h, label in zip(held, labels, strict=True)
    )
    return tuple(tasks), tuple(buffers)
