"""Pipelines: the layers of each stage, and the schedule of all.

[Note: Stages] A stage of a pipeline is a smaller model (:func:`stage_of`), and is lowered by the same passes as any
other. That is what its ranks execute ([Note: Pipelines] in :mod:`executor.driver.pipeline`). The schedule of the whole
pipeline has the tasks of all stages, each with lanes and resources of its own, and three things more: hidden states and
their gradients are sent from stage to stage, gradients of weights that two stages have are exchanged, and the clipping
of each stage waits for the gradients of all. Warm-up, cool-down and bubbles follow from the order within each stage and
from dependencies.

The order is 1F1B (Narayanan et al., *Memory-Efficient Pipeline-Parallel DNN Training*, 2021): stage ``s`` of ``p``
runs ``p - s`` forwards ahead, then alternates, so that it holds the activations of at most that many micro-batches.
Tensor-parallel ranks each send their share of the hidden state, and the receivers gather it.
"""

import dataclasses
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from planner.decisions import Decisions, UnitDecision
from planner.graph import Unit, segments
from planner.lowering.compute import one_f_one_b
from planner.lowering.program import Held, Program, numbered
from planner.lowering.snapshots import snapshots
from planner.models.operators import weight_of
from planner.models.parameters import ParameterSpec
from planner.schedule.schedule import Schedule
from planner.schedule.tasks import Lane, Op, Phase, Task

_Kind = tuple[Op, int]  # forward or backward, and the micro-batch


def deal(units: tuple[Unit, ...], num_stages: int) -> list[list[list[Unit]]]:
    """Return the segments of every stage.

    Layers are divided as evenly as possible; the first stages may have one more. The embedding belongs to the first
    stage, the head and the loss to the last.

    Raises:
        ValueError: there are fewer layers than stages.
    """
    parts = segments(units)
    layers = [i for i, part in enumerate(parts) if part[0].in_layer]
    if len(layers) < num_stages:
        raise ValueError(
            f"{len(layers)} layers cannot be dealt to {num_stages} pipeline stages; choose a pipeline_parallel of at "
            f"most {len(layers)}"
        )
    share, rest = divmod(len(layers), num_stages)
    firsts = [layers[stage * share + min(stage, rest)] for stage in range(1, num_stages)]
    bounds = [0, *firsts, len(parts)]
    return [parts[begin:end] for begin, end in itertools.pairwise(bounds)]


def stage_of(
    units: tuple[Unit, ...], decisions: Decisions, stage: int
) -> tuple[tuple[Unit, ...], Decisions, dict[str, str]]:
    """Return what the ranks of one stage execute: a smaller model, which they share as data- and tensor-parallel ranks.

    Args:
        units: the model's.
        decisions: for all of them.
        stage: its number.

    Returns:
        The stage's units, the decisions for them, and its weights that another stage has too: the name of each in the
        whole model, and what this stage calls it. The last stage has a copy of weights that its head shares.
    """
    num_stages = decisions.pipeline_parallel
    of_stages = [[unit for segment in dealt for unit in segment] for dealt in deal(units, num_stages)]
    specs = {spec.name: spec for unit in units for spec in unit.parameters}
    homes = {spec.name: number for number, own in enumerate(of_stages) for unit in own for spec in unit.parameters}
    tied, own = {}, list[Unit]()
    for number, unit in ((number, unit) for number, mine in enumerate(of_stages) for unit in mine):
        for operator in unit.operators:
            for name in operator.shared_parameters:
                if homes[name] != number and stage in {homes[name], number}:
                    tied[name] = name if stage == homes[name] else weight_of(operator)
        if number == stage:
            own.append(_owning(unit, {name: specs[name] for name in tied if homes[name] != stage}))
    chosen = {unit.name: _placed(unit, decisions) for unit in own}
    ahead = min(num_stages - stage, decisions.num_micro_batches)
    more = {"units": chosen, "pipeline_parallel": 1, "num_forwards_ahead": ahead}
    return tuple(own), decisions.model_copy(update=more), tied


def _placed(unit: Unit, decisions: Decisions) -> UnitDecision:
    """Return the decision for a stage's unit. Copied weights are updated where its last subgroup is."""
    decided, count = decisions.units[unit.name], len(decisions.piece_params(unit))
    if len(decided.update) == count:
        return decided
    return decided.model_copy(update={"update": (*decided.update, *[decided.update[-1]] * count)[:count]})


def _owning(unit: Unit, copied: dict[str, ParameterSpec]) -> Unit:
    """Return a unit that has weights of its own in place of those that it shares with another stage."""
    if not copied.keys() & {*unit.shared_parameters}:
        return unit
    operators = [
        dataclasses.replace(
            operator,
            parameters=operator.parameters
            + tuple(dataclasses.replace(copied[n], name=weight_of(operator)) for n in operator.shared_parameters),
            shared_parameters=(),
        )
        if copied.keys() & {*operator.shared_parameters}
        else operator
        for operator in unit.operators
    ]
    parameters = tuple(spec for operator in operators for spec in operator.parameters if spec.is_trained)
    return dataclasses.replace(unit, operators=tuple(operators), parameters=parameters, shared_units=())


def units_apart(units: tuple[Unit, ...], decisions: Decisions) -> tuple[Unit, ...]:
    """Return the units of all stages, in forward order; each stage has its own copy of shared weights."""
    return tuple(unit for stage in range(decisions.pipeline_parallel) for unit in stage_of(units, decisions, stage)[0])


def issue_order(num_stages: int, num_micro_batches: int) -> Iterator[tuple[Op, int, int]]:
    """Yield (forward or backward, stage, micro-batch): 1F1B within each stage, predecessors first."""
    left = [deque(one_f_one_b(num_stages - stage, num_micro_batches)) for stage in range(num_stages)]
    issued: set[tuple[Op, int, int]] = set()
    while any(left):
        for stage in range(num_stages):
            while left[stage]:
                op, micro_batch = left[stage][0]
                sender = stage - 1 if op is Op.FORWARD else stage + 1
                if 0 <= sender < num_stages and (op, sender, micro_batch) not in issued:
                    break
                left[stage].popleft()
                issued.add((op, stage, micro_batch))
                yield op, stage, micro_batch


def lower_stages(
    units: tuple[Unit, ...],
    decisions: Decisions,
    passes: Iterable[Callable[[Program], None]],
    *,
    asynchronous: bool,
    takes_snapshots: bool,
) -> Schedule:
    """Return the schedule of a pipeline, see [Note: Stages]."""
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
                layer = next(unit.unit for unit in self._programs[stage].units if unit.unit.in_layer)
                send.num_bytes = -(-layer.activation_output_bytes // decisions.tensor_parallel)
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
    ends: dict[_Kind, int] = {}  # none begins before another has ended
    for position, task in enumerate(order):
        if task.lane is Lane.COMPUTE:
            ends[Op.FORWARD if task.phase is Phase.FORWARD else Op.BACKWARD, task.micro_batch] = position
    found: dict[_Kind | None, list[Task]] = {}
    begin = 0
    for kind, position in ends.items():
        found[kind] = list(order[begin : position + 1])
        begin = position + 1
    return found | {None: list(order[begin:])}
