"""Pipelines of Megatron-LM, where everything is on the devices and a stage is lowered as one unit.

Its forward is that of all its layers, and its backward includes their recomputation. One representative rank with its
own lanes and resources stands for each stage. If data-parallel ranks share experts, those of a stage are a unit beside
it, because other ranks reduce their gradients and share their state. The order is that of
:func:`planner.lowering.stages.issue_order`.
"""

import itertools

from planner.decisions import Decisions, Place, UnitDecision
from planner.graph import Unit
from planner.lowering.program import Program
from planner.lowering.stages import deal, issue_order
from planner.models.kernels import Collective, Kernels, Work
from planner.models.operators import operator_of
from planner.models.parameters import ParameterSpec
from planner.models.patterns import Pattern
from planner.schedule.tasks import Lane, Op, Phase, Task

_PHASES = {Op.FORWARD: Phase.FORWARD, Op.BACKWARD: Phase.BACKWARD}


def merged(units: tuple[Unit, ...], decisions: Decisions) -> tuple[Unit, ...]:
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


def stage_decisions(merged: tuple[Unit, ...], decisions: Decisions) -> Decisions:
    """Return the decisions for merged stages: everything on the device; recomputation is part of their backward.

    Raises:
        ValueError: something is elsewhere.
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
    for segment in reversed(parts):  # as backward releases them
        recompute = decisions.units[segment[0].name].activations == "recompute"
        stored_bytes = sum(unit.saved_bytes for unit in segment)
        inside_bytes = max(unit.workspace_bytes for unit in segment)
        forward = tuple(kernel for unit in segment for kernel in unit.forward) + forward
        again = tuple(kernel for unit in segment for kernel in unit.recompute) if recompute else ()
        backward += again + tuple(k for unit in reversed(segment) for k in unit.backward)
        workspace_bytes = max(workspace_bytes, inside_bytes + (stored_bytes if recompute else 0) - saved_bytes)
        saved_bytes += segment[0].activation_output_bytes if recompute else stored_bytes
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
    work = Work(forward, backward, saved_bytes, workspace_bytes)
    merged = operator_of({}, name, name, "stage", Pattern.SHARD, work, hidden_bytes, parameters=parameters)
    return Unit(name, name, (merged,))


def _experts(stage: int, parts: list[list[Unit]]) -> Unit:
    """Return the experts of a stage as a unit that computes nothing: its kernels are the stage's."""
    name, parameters = f"stage{stage}.experts", _expert_parameters(parts)
    return Unit(name, name, (operator_of({}, name, name, "experts", Pattern.EXPERT, Work(), 0, parameters=parameters),))


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
