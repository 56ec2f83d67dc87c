"""How other engines compute, bring parameters and issue work."""

import dataclasses
from collections import Counter
from collections.abc import Collection

from planner.decisions import Place
from planner.lowering.activations import activations as core_activations
from planner.lowering.amounts import Amounts
from planner.lowering.compute import add_issue
from planner.lowering.compute import launch as core_launch
from planner.lowering.parameters import parameters as core_parameters
from planner.lowering.program import LoweredUnit, Program
from planner.schedule.tasks import Lane, Op, Phase, Task, Tier
from ullage.rivals.decisions import RivalDecisions
from ullage.rivals.engines.roundpipe import SEGMENTS_OF_STAGE
from ullage.rivals.passes import stages

# The host's work on one layer in one pass. On a core that issues a kernel in 10.5 us, hooks of PyTorch 2.13 around a
# layer of 11 parameters take 1.7 ms in forward and backward together, and 1.8 to 2.2 ms with recomputation; 1 ms was
# reported of forward alone (github.com/pytorch/pytorch/issues/173680).
_ISSUES_OF_HOOKS = 60
_COPY_PASSES = 2  # read and written
# To clip the 291 gradients of Llama-7B takes the host 63 ms if they are ``DTensor``, with ``foreach``, and 3 ms if they
# are flat (the pull request 120910 of pytorch/pytorch): each as long as the issue of so many kernels.
_ISSUES_TO_CLIP = 14


def note_amounts(decisions: RivalDecisions, program: Program) -> None:
    """Note where amounts of the engine differ from ours, before any task is made.

    DeepSpeed allocates one flat buffer for the gradients of device updates before training, so they are not new.
    RoundPipe's ranks each work on other segments, and its one process keeps all weights once: a rank has its share of
    frozen ones, too, on the host, and copies it. Ranks that fetch whole weights update shares of them. Inputs of
    recomputed segments may wait on the host.
    """
    if decisions.gradient_path.is_deepspeed or decisions.layer_by_layer or decisions.fetches_whole:
        known: dict[int, Amounts] = {}
        for unit in program.units:
            if (changed := known.get(id(unit.amounts))) is None:
                changed = known[id(unit.amounts)] = _amounts(decisions, unit)
            unit.amounts = changed
    for unit in program.units:
        if decisions.inputs_on_host and unit.activations == "recompute":
            unit.moved_bytes = unit.unit.activation_output_bytes if unit.unit.is_first else 0


def _amounts(decisions: RivalDecisions, unit: LoweredUnit) -> Amounts:
    amounts = unit.amounts
    if decisions.fetches_whole:
        return _whole(decisions, unit) if amounts.replicas > 1 else amounts
    if not decisions.layer_by_layer:
        return dataclasses.replace(amounts, resident_params=amounts.resident_params - buffered_params(amounts))
    frozen_bytes = -(-amounts.frozen_bytes // amounts.replicas)
    others_bytes = amounts.frozen_bytes - frozen_bytes
    held = tuple((tier, num_bytes - others_bytes * (tier is Tier.HOST)) for tier, num_bytes in amounts.parameters)
    return dataclasses.replace(amounts, replicas=1, frozen_bytes=frozen_bytes, parameters=held)


def _whole(decisions: RivalDecisions, unit: LoweredUnit) -> Amounts:
    """Return amounts of a rank that fetches whole weights, but updates a share of them.

    What ranks share in the memory of their node is divided by their number.
    """
    amounts, weight_bytes = unit.amounts, decisions.precision.weight_bytes
    others = amounts.padded_params - amounts.shard_params
    parameters, gradients = Counter(dict(amounts.parameters)), Counter(dict(amounts.gradients))
    own_copy = decisions.replicates(unit.name)
    if own_copy:
        parameters[Tier.HOST] += weight_bytes * others
        gradients[Tier.HOST] += decisions.spilled_bytes_per_param * (others if amounts.flushed_params else 0)
    elif amounts.fetched:
        parameters[Tier.HOST] -= amounts.frozen_bytes - -(-amounts.frozen_bytes // amounts.replicas)
    leaves_whole = amounts.flushed_params > 0 and (own_copy or decisions.sums_on_host)
    return dataclasses.replace(
        amounts,
        replicas=1 if decisions.sums_on_host else amounts.replicas,
        shard_params=amounts.padded_params,
        flushed_params=amounts.padded_params if leaves_whole else amounts.flushed_params,
        resident_params=0 if leaves_whole else amounts.resident_params,
        parameters=tuple(parameters.items()),
        gradients=tuple(gradients.items()),
    )


def buffered_params(amounts: Amounts) -> int:
    """Return the number of parameters that the device updates."""
    return sum(num_params for num_params, place in amounts.pieces if place is Place.GPU)


def parameters(decisions: RivalDecisions, program: Program) -> None:
    """Fetch and all-gather parameters as the engine does."""
    again = decisions.recompute_block > 0

    def released(unit: LoweredUnit, user: Task, num_params: int) -> bool:
        """Return whether parameters are brought again though they are in a slot."""
        limit = decisions.max_reuse_params
        away = unit.amounts.gathered or unit.amounts.fetched
        reused_late = away and limit is not None and num_params > limit
        return reused_late or (again and user.op is not Op.BACKWARD)

    core_parameters(program, released)
    for draft in program.drafts:
        if draft.op is Op.FETCH:
            own_bytes = decisions.moved_bytes_per_param - decisions.precision.weight_bytes
            draft.num_bytes += own_bytes * program.named[draft.unit].amounts.shard_params
            draft.pinned = decisions.pinned_reads or program.named[draft.unit].amounts.params != "nvme"
            if again:  # into another buffer than the one that is in use
                draft.after = tuple(key for key in draft.after if program.drafts[key].unit != draft.unit)
    if decisions.cast_bytes:
        _cast_fetched(decisions, program)
    if decisions.max_prefetch_params is not None:
        _gather_when_reached(decisions, program)


def _cast_fetched(decisions: RivalDecisions, program: Program) -> None:
    """Let the host cast what is fetched right before that."""
    for lane in (*program.before.values(), *program.behind.values()):
        for place, fetch in reversed(list(enumerate(lane))):
            unit = program.named.get(fetch.unit)
            if fetch.op is Op.FETCH and unit and unit.num_params:
                cast = program.draft(Lane.CPU, Op.PASS, fetch.phase, unit, fetch.micro_batch)
                cast.num_bytes = decisions.cast_bytes * unit.num_params
                fetch.after += (cast.index,)
                lane.insert(place, cast)


def _gather_when_reached(decisions: RivalDecisions, program: Program) -> None:
    """Gather parameters of large units only when the caller needs them."""
    positions = {draft.index: position for position, draft in enumerate(program.spine)}
    issued = {
        draft.index: (lane, draft) for lane in (*program.before.values(), *program.behind.values()) for draft in lane
    }
    for user in program.computing:
        for key in user.after:
            where, gather = issued.get(key, ([], user))
            unit = program.named[gather.unit]
            if gather.op is not Op.GATHER or decisions.gathers_ahead(unit.unit.num_weights):
                continue
            tasks = [gather]
            for op in (Op.FETCH, Op.READ):
                tasks[:0] = [program.drafts[each] for each in tasks[0].after if program.drafts[each].op is op]
            own = program.before[user.index]
            if where is not own:
                where[:] = [draft for draft in where if draft not in tasks]
                own += tasks
            if position := positions[user.index]:
                gather.after += (program.spine[position - 1].index,)
            if unit.first_fill and unit.first_fill[1] is tasks[0]:
                unit.first_fill = own, tasks[0]


def activations(decisions: RivalDecisions, program: Program) -> None:
    """Offload and reload activations; layer by layer, those of stages are more than their inputs."""
    core_activations(program)
    for draft in program.drafts if decisions.layer_by_layer else ():
        if draft.lane in {Lane.ACTIVATION_IN, Lane.ACTIVATION_OUT}:
            # Each way: a segment's input that is kept, a gradient of it, and the output of every stage of forward.
            draft.num_bytes = draft.num_bytes * (2 * SEGMENTS_OF_STAGE + 1) // SEGMENTS_OF_STAGE


def first_passes(program: Program) -> dict[tuple[str, int], Task]:
    """Return the recomputations of segments before those just before their backward, by unit and micro-batch."""
    agains = {draft.index for unit in program.units for draft in unit.agains}
    found = (draft for draft in program.computing if draft.op is Op.RECOMPUTE and draft.index not in agains)
    return {(draft.unit, draft.micro_batch): draft for draft in found}


def launch(decisions: RivalDecisions, program: Program) -> None:
    """Add the host's time to issue kernels, and to run hooks of modules if the engine has them."""
    if decisions.pipeline_parallel > 1:
        stages.launch(program)
        return
    path, last = decisions.gradient_path, decisions.num_micro_batches - 1
    awaited: Collection[Op] = ()
    if path.is_one_copy:
        awaited = (Op.FLUSH, Op.SCATTER)
    elif path.blocks(last, last):
        awaited = (Op.OVERWRITE,)
    core_launch(program, awaited)
    for draft in first_passes(program).values() if program.asynchronous else ():
        unit = program.named[draft.unit]
        add_issue(program, unit, draft, unit.unit.num_kernels[draft.op], awaited)
    for draft in program.drafts if decisions.launches_graphs else ():
        if draft.op is Op.ISSUE:
            draft.num_kernels = 1
    if decisions.dtensors:
        _add_hooks(program)
    for draft in program.drafts if decisions.module_hooks else ():
        if draft.op is Op.ISSUE:
            draft.num_modules = program.named[draft.unit].unit.num_modules


def _add_hooks(program: Program) -> None:
    """Add the host's time for layers and gradients that are ``DTensor``.

    [Note: FSDP2] PyTorch's FSDP2 shards each parameter by itself. What is gathered lies in the order of ranks, and is
    copied to whole parameters; gradients are copied to the order of ranks before they are reduced. Both copies are on
    the stream that computes (``_fsdp_collectives.py::foreach_all_gather_copy_out`` and ``foreach_reduce``;
    github.com/pytorch/pytorch/issues/157027). Python hooks around each layer do this. Each gradient that is clipped is
    dispatched on its own.
    """
    firsts = {segment[0].name for segment in program.segments}
    for draft in program.drafts:
        if draft.op is Op.ISSUE and draft.unit in firsts:
            draft.num_kernels += _ISSUES_OF_HOOKS
    if program.clip:
        program.clip.num_kernels = _ISSUES_TO_CLIP * sum(len(unit.unit.parameters) for unit in program.units)


def add_copies(program: Program) -> None:
    """Add the copies of what is gathered and reduced to the tasks before and behind; see [Note: FSDP2]."""
    for user in program.computing:
        gathered = (program.drafts[key] for key in user.after if program.drafts[key].op is Op.GATHER)
        user.num_bytes += _COPY_PASSES * sum(draft.num_bytes for draft in gathered)
    for unit in program.units:
        for micro_batch, scatter in unit.scatters.items():
            unit.backwards[micro_batch].num_bytes += _COPY_PASSES * scatter.num_bytes


def loop(program: Program) -> None:
    """Add the script's own work after everything else.

    [Note: Reports] The scripts of the published DeepSpeed runs report memory: before and after every forward and
    backward, and before and after the step (``engine.py``, ``memory_breakdown``). Each report collects Python's garbage
    (``utils.py::see_memory_usage``), which takes 40 to 70 ms. Timers of phases leave them out. So they are one task at
    the end of the iteration.
    """
    updates = tuple(draft.index for draft in program.drafts if draft.phase is Phase.UPDATE)
    last = program.decisions.num_micro_batches - 1
    work = program.draft(Lane.LAUNCH, Op.LOOP, Phase.LOOP, micro_batch=last, after=updates)
    work.num_modules = 4 * program.decisions.num_micro_batches + 2
    program.spine[0].after_previous += (work.index,)
    program.tail.append(work)
