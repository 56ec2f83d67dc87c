"""Pipeline parallelism: stages as units, and the order in which each runs its micro-batches.

[Note: Stages] Inside a stage nothing is placed or moved separately, so a stage is lowered as one unit. Its forward is
that of all its layers, and its backward includes their recomputation. One representative rank with its own lanes and
resources stands for each stage, and the whole pipeline is one schedule. Warm-up, cool-down and bubbles follow from the
order within each stage and from dependencies. If data-parallel ranks share experts, those of a stage are a unit beside
it, because other ranks reduce their gradients and share their state.

The order is 1F1B (Narayanan et al., *Memory-Efficient Pipeline-Parallel DNN Training*, 2021): stage ``s`` of ``p``
runs ``p - s`` forwards ahead, then alternates, so that it holds the activations of at most that many micro-batches.
Tensor-parallel ranks each send their share of the hidden state, and the receivers gather it.
"""

import dataclasses
import itertools
from collections import deque
from collections.abc import Iterator

from planner.decisions import Decisions, Place, UnitDecision
from planner.graph import Unit, segments
from planner.lowering.compute import one_f_one_b
from planner.lowering.gradients import add_scatter, settle
from planner.lowering.program import Program
from planner.models.kernels import Collective, Kernels
from planner.models.operators import Operator, weight_of
from planner.models.parameters import ParameterSpec
from planner.models.patterns import Pattern
from planner.schedule.tasks import Lane, Op, Phase, Task

_PHASES = {Op.FORWARD: Phase.FORWARD, Op.BACKWARD: Phase.BACKWARD}


def stages(units: tuple[Unit, ...], decisions: Decisions) -> tuple[Unit, ...]:
    """Return the units to lower and price: the given ones, or one per pipeline stage and then one for its experts.

    Raises:
        ValueError: there are fewer layers than stages.
    """
    if decisions.pipeline_parallel == 1:
        return units
    specs = {spec.name: spec for unit in units for spec in (*unit.parameters, *unit.frozen)}
    dealt = deal(units, decisions.pipeline_parallel)
    merged = tuple(_merge(parts, stage, decisions, specs) for stage, parts in enumerate(dealt))
    return merged if decisions.expert_parallel == 1 else merged + tuple(itertools.starmap(_experts, enumerate(dealt)))


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


def stage_decisions(merged: tuple[Unit, ...], decisions: Decisions) -> Decisions:
    """Return the decisions for merged stages: everything on the device; recomputation is part of their backward.

    Raises:
        ValueError: something is elsewhere. That can be executed (:func:`stage_of`), but not simulated.
    """
    if decisions.zero_stage > 1:
        raise ValueError(
            f"zero_stage {decisions.zero_stage} with pipeline_parallel {decisions.pipeline_parallel}: every "
            "micro-batch would send its gradients again; set zero_stage to 0 or 1"
        )
    for name, unit in decisions.units.items():
        if unit.params != "gpu" or set(unit.update) - {Place.GPU}:
            raise ValueError(
                f"unit {name}: a plan with pipeline_parallel {decisions.pipeline_parallel} keeps everything on the "
                "devices; set params and update to 'gpu'"
            )
    chosen = {
        unit.name: UnitDecision(
            params="gpu",
            activations="keep",
            update=(Place.GPU,) * len(decisions.piece_params(unit)),
        )
        for unit in merged
    }
    return decisions.model_copy(update={"units": chosen, "overlap_next_forward": True})


def _merge(parts: list[list[Unit]], stage: int, decisions: Decisions, specs: dict[str, ParameterSpec]) -> Unit:
    """Merge segments (``parts``) into one unit. It has its own copy of weights that it shares with another stage."""
    forward: Kernels = ()
    backward: Kernels = ()
    saved_bytes = workspace_bytes = 0
    for segment in parts:
        recompute = decisions.units[segment[0].name].activations == "recompute"
        stored_bytes = sum(unit.saved_bytes for unit in segment)
        inside_bytes = max(unit.workspace_bytes for unit in segment)
        for unit in segment:
            forward += unit.forward
        again = tuple(kernel for unit in segment for kernel in unit.recompute) if recompute else ()
        backward = again + tuple(k for unit in reversed(segment) for k in unit.backward) + backward
        saved_bytes += segment[0].activation_output_bytes if recompute else stored_bytes
        workspace_bytes = max(workspace_bytes, inside_bytes + (stored_bytes if recompute else 0))
    members = [unit for segment in parts for unit in segment]
    hidden_bytes = next(unit for unit in members if unit.in_layer).activation_output_bytes
    if decisions.tensor_parallel > 1:
        gather: Kernels = (Collective(hidden_bytes, decisions.tensor_parallel, num_passes=1),)
        forward = (gather if stage else ()) + forward
        backward = (gather if stage < decisions.pipeline_parallel - 1 else ()) + backward
    name = f"stage{stage}"
    expert_names = {spec.name for spec in _expert_parameters(parts)} if decisions.expert_parallel > 1 else set()
    used = [spec.name for unit in members for spec in (*unit.parameters, *unit.frozen) if spec.name not in expert_names]
    used += [shared for unit in members for operator in unit.operators for shared in operator.shared_parameters]
    parameters = tuple(specs[parameter] for parameter in dict.fromkeys(used))
    merged = Operator(
        name, "stage", name, name, parameters, Pattern.SHARD, forward, backward, saved_bytes, hidden_bytes,
        workspace_bytes,
    )  # fmt: skip
    return _unit(name, merged)


def _unit(name: str, operator: Operator) -> Unit:
    trained, frozen = (tuple(s for s in operator.parameters if s.is_trained is wanted) for wanted in (True, False))
    return Unit(name, name, (operator,), trained, frozen=frozen)


def _experts(stage: int, parts: list[list[Unit]]) -> Unit:
    """Return the experts of a stage as a unit that computes nothing: its kernels are the stage's."""
    name, parameters = f"stage{stage}.experts", _expert_parameters(parts)
    bank = Operator(name, "experts", name, name, parameters, Pattern.EXPERT, (), (), 0, 0, 0)
    return _unit(name, bank)


def _expert_parameters(parts: list[list[Unit]]) -> tuple[ParameterSpec, ...]:
    operators = (operator for segment in parts for unit in segment for operator in unit.operators)
    return tuple(spec for operator in operators if operator.pattern is Pattern.EXPERT for spec in operator.parameters)


def lay(program: Program) -> None:
    """Append forwards and backwards of all stages to the spine, each after the transfer that it needs."""
    units, decisions = program.units, program.decisions
    sent: dict[tuple[Lane, int, int], Task] = {}  # by sender and micro-batch
    num_stages = decisions.pipeline_parallel
    for op, stage, micro_batch in issue_order(num_stages, decisions.num_micro_batches):
        unit, phase = units[stage], _PHASES[op]
        forward = op is Op.FORWARD
        lane, step = (Lane.SEND, 1) if forward else (Lane.SEND_BACK, -1)
        draft = program.draft(Lane.COMPUTE, op, phase, unit, micro_batch)
        if received := sent.get((lane, stage - step, micro_batch)):
            draft.after = (received.index,)
        (unit.forwards if forward else unit.backwards).append(draft)
        program.spine.append(draft)
        if not 0 <= stage + step < num_stages:
            continue
        send = sent[lane, stage, micro_batch] = program.draft(lane, Op.SEND, phase, unit, micro_batch, (draft.index,))
        send.num_bytes = -(-unit.unit.activation_output_bytes // decisions.tensor_parallel)
        program.behind[draft.index].append(send)
    for stage, bank in enumerate(units[num_stages:]):
        bank.forwards, bank.backwards = units[stage].forwards, units[stage].backwards


def gradients(program: Program) -> None:
    """Reduce gradients over ranks after the last backward of each rank, when those of a tied embedding are added up."""
    exchange_tied(program)
    last = program.decisions.num_micro_batches - 1
    ends = {draft.stage: draft for draft in program.computing}
    for unit in reversed(program.units):
        if unit.num_params and unit.amounts.replicas > 1:
            program.at_step(add_scatter(program, unit, last, unit.exchange or ends[unit.stage]))
    settle(program)


def exchange_tied(program: Program) -> None:
    """Add the all-reduce of the tied embedding's gradient between the first and the last stage, at the end."""
    first, last = program.units[0], program.units[program.decisions.pipeline_parallel - 1]
    tied = {spec.name: spec.num_params for spec in first.unit.parameters if spec in last.unit.parameters}
    if not tied or first is last:
        return
    final = program.decisions.num_micro_batches - 1
    backward = (first.backwards[final].index, last.backwards[final].index)
    for unit in (first, last):
        unit.exchange = program.draft(Lane.COLLECTIVE, Op.SEND, Phase.BACKWARD, unit, final, backward)
        # Each stage sends and receives half of it, twice.
        unit.exchange.num_bytes = program.decisions.precision.weight_bytes * sum(tied.values())
        program.at_step(unit.exchange)


def launch(program: Program) -> None:
    """Add the host's time to issue kernels beside every task of a stage.

    The host of a stage waits for each exchange (Megatron-LM synchronises there) before it turns to the next task. Then
    it issues kernels while the device runs them. The next task waits for the slower of the two.
    """
    if not program.asynchronous:
        return
    computed: dict[str, int] = {}  # by unit, its latest compute task
    for draft in program.computing:
        unit = program.named[draft.unit]
        before = (computed[unit.name],) if unit.name in computed else ()
        receive = program.draft(
            Lane.LAUNCH, Op.RECEIVE, draft.phase, unit, draft.micro_batch, after=draft.after + before
        )
        issue = program.draft(Lane.LAUNCH, Op.ISSUE, draft.phase, unit, draft.micro_batch, after=(receive.index,))
        issue.num_kernels = unit.unit.num_kernels[draft.op]
        draft.after = issue.after
        computed[unit.name] = draft.index
        program.before[draft.index] += [receive, issue]
        for follower in program.behind[draft.index]:
            follower.after += (issue.index,)


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
