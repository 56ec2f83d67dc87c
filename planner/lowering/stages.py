"""Pipelines: the layers of each stage, and the schedule of all.

[Note: Stages] A stage of a pipeline is a smaller model (:func:`stage_of`), and is lowered by the same passes as any
other, with what it sends and receives (:mod:`.sends`). That is what its ranks execute ([Note: Pipelines] in
:mod:`executor.driver.pipeline`). The schedule of the whole pipeline has exactly the tasks of all stages, each with
lanes and resources of its own, and dependencies between them: what a stage receives waits for what another one sends,
stages that add up gradients of the same weights wait for each other, and the clipping of each stage waits for the
gradients of all. Warm-up, cool-down and bubbles follow from the order within each stage and from dependencies.

The order is 1F1B (Narayanan et al., *Memory-Efficient Pipeline-Parallel DNN Training*, 2021): stage ``s`` of ``p``
runs ``p - s`` forwards ahead, then alternates, so that it holds the activations of at most that many micro-batches.
Tensor-parallel ranks each send their share of the hidden state, and the receivers gather it.

Backward may leave the gradients of weights for later, see [Note: Zero bubble] in :mod:`planner.models.zero_bubble`.

[Note: Rounds] With ``pipeline_rounds`` of more than one, layers move from device to device: the model is dealt in as
many chunks as stages and rounds make, chunk ``c`` to stage ``c mod p``, and each micro-batch comes to every stage once
a round. All micro-batches pass a chunk before the stage turns to its next one (Lamy-Poirier, *Breadth-First Pipeline
Parallelism*, 2023), but for the last round, which is 1F1B. So weights that a stage fetches come once for all
micro-batches, to one device of a node: the host's memory is read once. Gradients add up on the device, and leave once.
There are fewer bubbles: ``p - 1`` chunks wait, not ``p - 1`` stages.
"""

import dataclasses
import itertools
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final

from planner.decisions import Decisions, UnitDecision
from planner.graph import Unit, segments
from planner.lowering.compute import turns
from planner.lowering.program import Keys, Program, numbered
from planner.lowering.sends import Cell, cell_of, links
from planner.lowering.snapshots import snapshots
from planner.models.choice import Choice
from planner.models.operators import Operator, weight_of
from planner.models.parameters import ParameterSpec
from planner.schedule.schedule import Schedule
from planner.schedule.tasks import STAGE_LANES, Lane, Op, Task

_Parts = dict[Cell | None, list[Task]]  # a stage's tasks, see _parts
_Given = tuple[tuple[Callable[[Program], None], ...], bool, bool]  # passes, asynchronous, takes_snapshots


def deal(units: tuple[Unit, ...], num_stages: int, num_rounds: int = 1) -> list[list[list[Unit]]]:
    """Return the segments of every chunk.

    Layers are divided as evenly as possible; the first chunks may have one more. The embedding belongs to the first
    chunk, the head and the loss to the last. Chunk ``c`` is one of stage ``c mod num_stages``.

    Raises:
        ValueError: there are fewer layers than chunks, or the model cannot be cut before one of these.
    """
    parts, count = segments(units), num_stages * num_rounds
    layers = [i for i, part in enumerate(parts) if part[0].in_layer]
    if not layers:
        raise ValueError(
            "the model has no layers to cut between: modules of a list that run once each, in order, with no weights "
            "of the model's own in between; leave pipeline= (--parallel pipeline) out"
        )
    if len(layers) < count:
        rounds = f" in {num_rounds} rounds" if num_rounds > 1 else ""
        raise ValueError(
            f"{len(layers)} layers cannot be dealt to {num_stages} pipeline stages{rounds}; choose a pipeline_parallel "
            f"of at most {max(len(layers) // num_rounds, 1)}"
        )
    share, rest = divmod(len(layers), count)
    firsts = [layers[chunk * share + min(chunk, rest)] for chunk in range(1, count)]
    for unit in (parts[first][0] for first in firsts):
        if (uncut := unit.operators[0].uncut) is not None:
            raise ValueError(f"no pipeline stage can begin with {unit.segment}: {uncut}")
    bounds = [0, *firsts, len(parts)]
    return [parts[begin:end] for begin, end in itertools.pairwise(bounds)]


def of_stages(units: tuple[Unit, ...], choice: Choice) -> list[list[list[list[Unit]]]]:
    """Return the chunks of every stage."""
    chunks = deal(units, choice.pipeline_parallel, choice.pipeline_rounds)
    return [chunks[stage :: choice.pipeline_parallel] for stage in range(choice.pipeline_parallel)]


def sharing_stages(units: tuple[Unit, ...], choice: Choice) -> tuple[int, ...]:
    """Return the stages that share weights, whose gradients they add up together; empty if none do.

    Raises:
        ValueError: some weights are shared by other stages than others, or an operator of a later stage has a weight of
            its own beside a shared one.
    """
    stages_of: dict[str, set[int]] = {}
    of_stage = _owners(of_stages(units, choice))
    for number, unit in of_stage:
        for name in (*(spec.name for spec in (*unit.parameters, *unit.frozen)), *unit.shared_parameters):
            stages_of.setdefault(name, set()).add(number)
    for number, unit in of_stage:
        for operator in unit.operators:
            for name in operator.shared_parameters:  # of which a later stage has a copy, as the operator's weight
                home = min(stages_of[name])
                if number != home and weight_of(operator) in stages_of.keys() - {name}:
                    raise ValueError(
                        f"{operator.path} in stage {number} is given {name} of stage {home} beside a weight of its "
                        "own; choose pipeline_parallel=1"
                    )
    shared = {tuple(sorted(stages)): name for name, stages in stages_of.items() if len(stages) > 1}
    if len(shared) > 1:
        (some, one), (others, other), *_ = shared.items()
        raise ValueError(
            f"stages {list(some)} share {one}, but {list(others)} share {other}, and gradients of shared weights are "
            "added up by the same stages; choose another pipeline_parallel"
        )
    return next(iter(shared), ())


def _owners(dealt: Iterable[list[list[list[Unit]]]]) -> list[tuple[int, Unit]]:
    """Return the units of all stages, each with its stage."""
    return [(number, unit) for number, own in enumerate(dealt) for chunk in own for part in chunk for unit in part]


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
        whole model, and what this stage calls it. A stage has a copy of what it shares with an earlier one.
    """
    num_stages = decisions.pipeline_parallel
    chunks = deal(units, num_stages, decisions.pipeline_rounds)
    dealt = [chunks[number::num_stages] for number in range(num_stages)]
    given = [0, *(chunk[0][0].given_bytes for chunk in chunks[1:]), 0]
    owners = _owners(dealt)
    specs = {spec.name: spec for unit in units for spec in (*unit.parameters, *unit.frozen)}
    homes = {spec.name: number for number, unit in owners for spec in (*unit.parameters, *unit.frozen)}
    rotations = sum(o.saved_bytes for unit in units for o in unit.operators if o.kind == "rotary")
    entries = {chunk[0][0].name for chunk in dealt[stage]} - {units[0].name}
    unit_of = {spec.name: u.name for number, u in owners if number == stage for spec in (*u.parameters, *u.frozen)}
    tied, own, chosen = dict[str, str](), list[Unit](), dict[str, UnitDecision]()
    for number, unit in owners:
        for operator in unit.operators:
            for name in operator.shared_parameters:
                if homes[name] != number and stage in {homes[name], number}:
                    here = tied.setdefault(name, name if stage == homes[name] else weight_of(operator))
                    if number == stage:
                        unit_of.setdefault(here, unit.name)
        if number == stage:
            made = _owning(unit, {name: (specs[name], tied[name]) for name in tied if homes[name] != stage}, unit_of)
            chosen[unit.name] = _placed(made, decisions, unit.shared_units)
            beside = rotations + max(unit.given_bytes - unit.activation_output_bytes, 0)
            own.append(dataclasses.replace(made, entry_bytes=beside) if unit.name in entries else made)
    splits = any(unit.weight_gradients for unit in own)
    ahead = min(num_stages - stage, decisions.num_micro_batches)
    more = {
        "units": chosen,
        "pipeline_parallel": 1,
        "pipeline_rounds": 1,
        "num_forwards_ahead": ahead,
        "num_backwards_ahead": stage if splits else None,
        "pipeline_order": None,
        "round_starts": tuple(chunk[0][0].segment for chunk in dealt[stage][1:]),
        "cuts": tuple(zip(given[stage:-1:num_stages], given[stage + 1 :: num_stages], strict=True)),
        "tied_weights": tuple(here for there, here in tied.items() if specs[there].is_trained),
    }
    return tuple(own), decisions.model_copy(update=more), tied


def _placed(unit: Unit, decisions: Decisions, sharing: Sequence[str]) -> UnitDecision:
    """Return the decision for a stage's unit. Copied weights are updated where its last subgroup is.

    If it had none, that is where those are of the unit with which it shares them.
    """
    decided, count = decisions.units[unit.name], len(decisions.piece_params(unit))
    if len(decided.update) == count:
        return decided
    last = next(update[-1] for name in (unit.name, *sharing) if (update := decisions.units[name].update))
    return decided.model_copy(update={"update": (*decided.update, *[last] * count)[:count]})


def _owning(unit: Unit, copied: dict[str, tuple[ParameterSpec, str]], unit_of: Mapping[str, str]) -> Unit:
    """Return a unit of a stage, with weights of its own in place of those that it shares with another stage.

    Args:
        unit: the unit.
        copied: weights of another stage, each with the name that the stage gives its own.
        unit_of: the unit that has a weight: the first one in the stage that uses it.
    """
    if not copied.keys() & {*unit.shared_parameters}:
        return unit
    operators, sharing = list[Operator](), dict[str, None]()
    for operator in unit.operators:
        names = [copied[name][1] if name in copied else name for name in operator.shared_parameters]
        shared = [name for name in names if unit_of[name] != unit.name]
        sharing |= dict.fromkeys(unit_of[name] for name in shared)
        specs = [copied[name][0] for name in operator.shared_parameters if name in copied]
        made = (dataclasses.replace(spec, name=copied[spec.name][1]) for spec in specs)
        own = tuple(spec for spec in made if spec.name == weight_of(operator) and unit_of[spec.name] == unit.name)
        parameters = operator.parameters + own
        operators.append(dataclasses.replace(operator, parameters=parameters, shared_parameters=tuple(shared)))
    return dataclasses.replace(unit, operators=tuple(operators), shared_units=tuple(sharing))


def units_apart(units: tuple[Unit, ...], decisions: Decisions) -> tuple[Unit, ...]:
    """Return the units of all stages, in forward order; each stage has its own copy of shared weights."""
    return tuple(unit for stage in range(decisions.pipeline_parallel) for unit in stage_of(units, decisions, stage)[0])


def issue_order(
    num_stages: int, num_micro_batches: int, num_rounds: int = 1, split: Collection[int] = ()
) -> Iterator[tuple[Op, int, int]]:
    """Yield (forward, backward or gradients of weights, chunk, micro-batch): the order within each stage.

    What is waited for comes first. The stages ``split`` make gradients of weights after backward.
    """
    behind = [stage if stage in split else None for stage in range(num_stages)]
    left = [deque(turns(num_stages - s, num_micro_batches, num_rounds, behind[s])) for s in range(num_stages)]
    issued: set[tuple[Op, int, int]] = set()
    while any(left):
        for stage in range(num_stages):
            while left[stage]:
                op, turn, micro_batch = left[stage][0]
                chunk = turn * num_stages + stage
                sender = {Op.FORWARD: chunk - 1, Op.BACKWARD: chunk + 1}.get(op, -1)
                if 0 <= sender < num_stages * num_rounds and (op, sender, micro_batch) not in issued:
                    break
                left[stage].popleft()
                issued.add((op, chunk, micro_batch))
                yield op, chunk, micro_batch


def lower_stages(
    units: tuple[Unit, ...],
    decisions: Decisions,
    passes: Iterable[Callable[[Program], None]],
    *,
    asynchronous: bool,
    takes_snapshots: bool,
) -> Schedule:
    """Return the schedule of a pipeline, see [Note: Stages]."""
    num_stages = decisions.pipeline_parallel
    given = tuple(passes), asynchronous, takes_snapshots
    lowered = [_lowered(units, decisions, stage, given) for stage in range(num_stages)]
    programs, parts = [program for program, _ in lowered], [of_stage for _, of_stage in lowered]
    split = {number for number, program in enumerate(programs) if program.decisions.num_backwards_ahead is not None}
    order = list[Task]()
    for op, chunk, micro_batch in issue_order(
        num_stages, decisions.num_micro_batches, decisions.pipeline_rounds, split
    ):
        turn, stage = divmod(chunk, num_stages)
        order += parts[stage].get((op, turn, micro_batch), ())  # a chunk may leave no gradients of weights
    exchanges = [unit.exchange for program in programs for unit in program.units if unit.exchange]
    begins = [0, *itertools.accumulate(len(program.drafts) for program in programs)]
    more = dict(_joined(order, begins)) | dict(_waiting_for_all(programs, exchanges, begins))
    order += _tail(programs, parts, exchanges)
    name = f"{decisions.policy}: one iteration of {decisions.num_micro_batches} micro-batch(es)"
    return numbered(order, programs, more, f"{name} in {num_stages} stages")


_MOST_TASKS: Final = 200_000
latest: Final = list[tuple[tuple[Unit, ...], tuple[int, int, int, _Given], Decisions, Program, _Parts]]()
"""Stages that were lowered latest, of so many tasks together. A search changes some stages and leaves the others."""


def _lowered(units: tuple[Unit, ...], decisions: Decisions, stage: int, given: _Given) -> tuple[Program, _Parts]:
    """Return what becomes of a stage. Nobody changes it: other schedules have the same one."""
    own, decided, _ = stage_of(units, decisions, stage)
    about = stage, decisions.pipeline_parallel, decisions.pipeline_rounds, given
    for of_units, made_as, known, program, parts in tuple(latest):
        if of_units is units and made_as == about and known == decided:
            return program, parts
    passes, asynchronous, takes_snapshots = given
    program = Program(own, decided, asynchronous=asynchronous, stage=stage)
    for run in passes:
        run(program)
    if takes_snapshots:
        snapshots(program)
    parts = _parts(program)
    latest.insert(0, (units, about, decided, program, parts))
    del latest[_MOST_TASKS // len(program.drafts) + 1 :]
    return program, parts


def _joined(order: Sequence[Task], begins: Sequence[int]) -> Iterator[tuple[int, Keys]]:
    """Let stages receive what others send: the first that one sends on a link is the first that the other receives."""
    of_stages: list[list[Task]] = [[] for _ in begins[1:]]
    for task in order:
        of_stages[task.stage].append(task)
    found = [links(tasks) for tasks in of_stages]
    for stage, ((ahead, from_behind), _) in enumerate(found):
        behind = (stage + 1) % len(found)
        _, (from_before, back) = found[behind]
        for sent, sender, received, receiver in (
            (ahead, stage, from_before, behind),
            (back, behind, from_behind, stage),
        ):
            for send, receive in zip(sent, received, strict=True):
                assert (send.micro_batch, send.num_bytes) == (receive.micro_batch, receive.num_bytes)
                yield begins[receiver] + receive.index, (begins[sender] + send.index,)


def _waiting_for_all(
    programs: Sequence[Program], exchanges: Sequence[Task], begins: Sequence[int]
) -> Iterator[tuple[int, Keys]]:
    """Let stages that add up gradients wait for each other, and each stage's clipping for all gradients."""
    ready = tuple(begins[task.stage] + key for task in exchanges for key in task.after)
    for task in exchanges:
        yield begins[task.stage] + task.index, ready
    summed = [unit.summed for program in programs for unit in program.units if unit.num_params]
    all_summed = tuple(begins[task.stage] + task.index for task in summed if task)
    for program in programs:
        if clip := program.clip:
            yield begins[program.stage] + clip.index, all_summed


def _tail(programs: Sequence[Program], parts: Sequence[_Parts], exchanges: Sequence[Task]) -> list[Task]:
    """Return what comes after the last backward of all stages: all gradients, and then norms and updates."""
    before, behind = list[Task](), list[Task]()
    exchanging = {id(task) for task in exchanges}
    for program, of_stage in zip(programs, parts, strict=True):
        own = exchanging | {id(program.clip)}
        rest = of_stage[None]
        count = next((at for at, task in enumerate(rest) if id(task) in own), 0)
        before += rest[:count]
        behind += [task for task in rest[count:] if id(task) not in exchanging]
    return [*before, *exchanges, *behind]


def _parts(program: Program) -> _Parts:
    """Return a stage's tasks up to the end of each cell, with what it sends then; ``None`` has the rest."""
    order, ends = program.ordered(), dict[Cell, int]()  # none begins before another has ended
    for position, task in enumerate(order):
        if task.lane is Lane.COMPUTE or task.lane in STAGE_LANES:
            ends[cell_of(program, task)] = position
    found: _Parts = {}
    begin = 0
    for kind, position in ends.items():
        found[kind] = list(order[begin : position + 1])
        begin = position + 1
    return found | {None: list(order[begin:])}
