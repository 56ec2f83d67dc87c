"""Lowering of a pipeline whose stages keep something off their devices: each as a model of its own, then joined.

[Note: Joined stages] A stage of a pipeline is a smaller model (:func:`planner.lowering.pipeline.stage_of`), and is
lowered by the same passes as any other. That is what its ranks execute ([Note: Pipelines] in
:mod:`executor.driver.pipeline`). The schedule of the whole pipeline has the tasks of all stages, each with lanes and
resources of its own, and three things more: hidden states and their gradients are sent from stage to stage, gradients
of weights that two stages have are exchanged, and the clipping of each stage waits for the gradients of all.

Where everything is on the devices, a stage is one unit instead ([Note: Stages]), which is quicker to simulate.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence

from planner.decisions import Decisions, Place
from planner.graph import Unit
from planner.lowering.pipeline import issue_order, stage_of
from planner.lowering.program import Held, Program, numbered
from planner.lowering.snapshots import snapshots
from planner.schedule.schedule import Schedule
from planner.schedule.tasks import Lane, Op, Phase, Task

_Kind = tuple[Op, int]  # forward or backward, and the micro-batch


def is_apart(decisions: Decisions) -> bool:
    """Return whether a pipeline's stages are lowered unit by unit, because something moves inside of them."""
    return decisions.pipeline_parallel > 1 and (
        decisions.zero_stage > 1
        or any(unit.params != "gpu" or {*unit.update} - {Place.GPU} for unit in decisions.units.values())
    )


def units_apart(units: tuple[Unit, ...], decisions: Decisions) -> tuple[Unit, ...]:
    """Return the units of all stages, in forward order; each stage has its own copy of shared weights."""
    return tuple(unit for stage in range(decisions.pipeline_parallel) for unit in stage_of(units, decisions, stage)[0])


def lower_stages(
    units: tuple[Unit, ...],
    decisions: Decisions,
    passes: Iterable[Callable[[Program], None]],
    *,
    asynchronous: bool,
    takes_snapshots: bool,
) -> Schedule:
    """Return the schedule of a pipeline, see [Note: Joined stages]."""
    passes, num_stages = tuple(passes), decisions.pipeline_parallel
    programs: list[Program] = []
    held: list[Held] = []
    first = 0
    for stage in range(num_stages):
        own, decided, _ = stage_of(units, decisions, stage)
        program = Program(own, decided, asynchronous=asynchronous)
        for run in passes:
            run(program)
        if takes_snapshots:
            snapshots(program)
        program.renumber(first, stage)
        first += len(program.drafts)
        programs.append(program)
        held += program.held
    join = _Join(programs, first)
    join.send(decisions)
    join.exchange(stage_of(units, decisions, 0)[2], units, decisions)
    order = [task for part in join.parts for task in part] + list(join.tail())
    name = f"{decisions.policy}: one iteration of {decisions.num_micro_batches} micro-batch(es)"
    return numbered(order, join.count, held, f"{name} in {num_stages} stages")


class _Join:
    """The tasks of all stages, and those between stages.

    Attributes:
        count: tasks so far.
        parts: tasks in issue order, up to the last backward of each stage.
    """

    def __init__(self, programs: Sequence[Program], count: int) -> None:
        self._programs, self.count = programs, count
        self.parts: list[list[Task]] = []
        self._chunks = [_chunks(program.ordered()) for program in programs]
        self._exchanges: list[Task] = []

    def _draft(self, stage: int, lane: Lane, phase: Phase, unit: str, micro_batch: int, after: tuple[int, ...]) -> Task:
        task = Task(self.count, lane, Op.SEND, phase, unit, micro_batch, stage=stage, after=after)
        self.count += 1
        return task

    def send(self, decisions: Decisions) -> None:
        """Bring the stages into one order, and send what each micro-batch has become to the next stage."""
        num_stages = decisions.pipeline_parallel
        sent: dict[tuple[Op, int, int], Task] = {}
        for op, stage, micro_batch in issue_order(num_stages, decisions.num_micro_batches):
            forward = op is Op.FORWARD
            step = 1 if forward else -1
            part = self._chunks[stage].pop((op, micro_batch))
            computing = [task for task in part if task.lane is Lane.COMPUTE]
            if received := sent.get((op, stage - step, micro_batch)):
                computing[0].after += (received.index,)
            if 0 <= stage + step < num_stages:
                lane = Lane.SEND if forward else Lane.SEND_BACK
                last = computing[-1]
                send = self._draft(stage, lane, last.phase, last.unit, micro_batch, (last.index,))
                hidden = next(unit.unit for unit in self._programs[stage].units if unit.unit.in_layer)
                send.num_bytes = -(-hidden.activation_output_bytes // decisions.tensor_parallel)
                sent[op, stage, micro_batch] = send
                part.append(send)
            self.parts.append(part)

    def exchange(self, tied: dict[str, str], units: Sequence[Unit], decisions: Decisions) -> None:
        """Add up the gradients of weights that the first and the last stage have, before any stage clips or updates."""
        ends = [program.units for program in self._programs]
        finals = [unit.summed for stage in ends for unit in stage if unit.num_params and unit.summed]
        if tied:
            sizes = {spec.name: spec.num_params for unit in units for spec in unit.parameters}
            backward = tuple(program.computing[-1].index for program in (self._programs[0], self._programs[-1]))
            for stage in (0, len(ends) - 1):
                task = self._draft(stage, Lane.COLLECTIVE, Phase.BACKWARD, ends[stage][0].name, 0, backward)
                task.num_bytes = decisions.precision.weight_bytes * sum(sizes[name] for name in tied)
                self._exchanges.append(task)
        for program in self._programs:
            if clip := program.clip:
                own = {*clip.after}
                clip.after += tuple(task.index for task in (*finals, *self._exchanges) if task.index not in own)

    def tail(self) -> Iterable[Task]:
        """Return what comes after the last backward of all stages: all gradients, and then norms and updates."""
        before, behind = list[Task](), list[Task]()
        for program, chunks in zip(self._programs, self._chunks, strict=True):
            rest = chunks[None]
            count = rest.index(program.clip) if program.clip else 0
            before += rest[:count]
            behind += rest[count:]
        return itertools.chain(before, self._exchanges, behind)


def _chunks(order: Sequence[Task]) -> dict[_Kind | None, list[Task]]:
    """Return a stage's tasks up to the end of each forward and backward; ``None`` has the rest."""
    ends: dict[int, _Kind] = {}
    for position, task in enumerate(order):
        if task.lane is Lane.COMPUTE:
            ends[position] = (Op.FORWARD if task.phase is Phase.FORWARD else Op.BACKWARD), task.micro_batch
    last = {kind: position for position, kind in ends.items()}
    found: dict[_Kind | None, list[Task]] = {}
    begin = 0
    for kind, position in sorted(last.items(), key=lambda item: item[1]):
        found[kind] = list(order[begin : position + 1])
        begin = position + 1
    return found | {None: list(order[begin:])}
