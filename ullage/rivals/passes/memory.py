"""What other engines hold, where it differs from ours."""

import functools
import itertools
import operator
from collections.abc import Collection, Mapping

from planner.decisions import Place
from planner.lowering.memory import Fresh, hold_from, hold_resident, note_fresh
from planner.lowering.memory import memory as core_memory
from planner.lowering.parameters import assign_slots
from planner.lowering.program import LoweredUnit, Program
from planner.models.kernels import Gemm
from planner.schedule.tasks import Lane, MemoryClass, Op, Phase, Task, Tier
from ullage.rivals.decisions import GradientPath, RivalDecisions
from ullage.rivals.passes.computing import buffered_params, first_passes
from ullage.rivals.precision import RivalPrecision

# DeepSpeed keeps the optimizer's gradients of device updates in fp32 (``stage3.py::initialize_optimizer_states``).
_BUFFER_BYTES_PER_PARAM = 4
_FILLS = frozenset({Op.FETCH, Op.GATHER})


def memory(decisions: RivalDecisions, program: Program) -> None:
    """Add all buffers of the engine."""
    program.hold(Tier.GPU, MemoryClass.WORKSPACE, decisions.device_buffer_bytes, "engine's buffers")
    once = decisions.gradient_path is GradientPath.ONCE and not decisions.bucket_params
    if _has_buffers(decisions):
        core_memory(program, _hold_sums)
        _hold_placeholders(program)
    elif once:
        core_memory(program)
    else:
        core_memory(program, functools.partial(_hold_gradients, decisions, _brought(program)))
    for unit in program.units:
        _hold_more(decisions, program, unit)
    if decisions.step_scratch_bytes:
        _hold_step_scratch(decisions, program)
    for made, used in zip(program.units[-1].forwards, program.units[0].backwards, strict=True):
        program.hold_while(MemoryClass.ACTIVATIONS, decisions.output_bytes, "output", made, used)
    if decisions.spill_gradients and decisions.gradient_path is not GradientPath.ONCE:
        program.held = [held for held in program.held if not held[-1].startswith("spilled gradients")]
        _hold_spilled(decisions, program)
    _change_held(decisions, program)


def _change_held(decisions: RivalDecisions, program: Program) -> None:
    """Change what is held as ours would be."""
    if decisions.max_live_params is not None or decisions.shards_masters:
        _hold_while_used(program, decisions.max_live_params or 0)
    if decisions.gradient_path is GradientPath.ON_DEVICE:
        _shorten_state_slots(program)
    if decisions.recompute_block:
        _hold_blocks(program, decisions.recompute_block)
    if decisions.shards_masters:
        _hold_in_type_of_masters(program)
    if decisions.head_percent < 100:
        _shrink_head(program, decisions.head_percent)


def _hold_more(decisions: RivalDecisions, program: Program, unit: LoweredUnit) -> None:
    if not unit.num_params:
        pass
    elif decisions.gradient_path.is_deepspeed and not decisions.step_scratch_bytes:
        num_bytes = _BUFFER_BYTES_PER_PARAM * buffered_params(unit.amounts)
        program.hold(Tier.GPU, MemoryClass.GRADIENTS, num_bytes, f"{unit.name} buffer", unit.stage)
    if unit.num_params and decisions.host_bytes:
        on_cpu = sum(num_params for num_params, place in unit.amounts.pieces if place is Place.CPU)
        program.hold(Tier.HOST, MemoryClass.OPTIMIZER, decisions.host_bytes * on_cpu, unit.name, unit.stage)
    if decisions.fetches_fp8 and unit.amounts.fetched:
        num_params = sum(num_params for num_params, _ in unit.amounts.pieces)
        program.hold(Tier.HOST, MemoryClass.PARAMETERS, num_params, f"{unit.name} in fp8")
    if decisions.inputs_on_host and unit.activations == "recompute":
        # Layer by layer, those of all micro-batches are there at once.
        count = decisions.num_micro_batches if decisions.layer_by_layer else 1
        program.hold(Tier.HOST, MemoryClass.ACTIVATIONS, count * (unit.moved_bytes or 0), unit.name)


def _hold_while_used(program: Program, max_live_params: int) -> None:
    """Hold whole parameters while they are used, not their slots all the time, if the slots are more than may be live.

    DeepSpeed allocates them when it fetches them, and frees them behind their module. It fetches ahead until
    ``max_live_parameters`` are there, and then the module that is reached (``partitioned_param_coordinator.py``,
    ``fetch_sub_module`` and ``release_sub_module``): up to that, layers take the room of an embedding that is not in
    use. FSDP frees what it has gathered behind each layer, and has nothing whole in its step
    (``torch/distributed/fsdp/_runtime_utils.py::_reshard``).
    """
    weight_bytes = program.decisions.precision.weight_bytes
    slots = assign_slots(program)
    sizes = slots.sizes(weight_bytes)
    if sum(sizes) <= weight_bytes * max_live_params + max(sizes, default=0):
        return
    program.held = [held for held in program.held if held[1] is not MemoryClass.PARAMETERS or held[-1][:5] != "slot "]
    brought: dict[int, Task] = {}
    last_use: dict[int, Task] = {}

    def free(slot: int) -> None:
        if slot in brought:
            label = f"{brought[slot].unit} whole"
            program.hold_while(MemoryClass.PARAMETERS, sizes[slot], label, brought[slot], last_use[slot])

    for user in program.computing:
        for fill in (program.drafts[key] for key in user.after):
            if fill.op in _FILLS and fill.slot is not None:
                free(fill.slot)
                fetches = [program.drafts[key] for key in fill.after if program.drafts[key].op is Op.FETCH]
                brought[fill.slot] = next((draft for draft in fetches if draft.unit == fill.unit), fill)
        for name in (user.unit, *program.named[user.unit].unit.shared_units):
            if (slot := slots.of_unit.get(name)) is not None:
                last_use[slot] = user
    for slot in brought:
        free(slot)


def _hold_step_scratch(decisions: RivalDecisions, program: Program) -> None:
    """Hold what the step's updates on the device need, on every pipeline stage, from the first of them to the last."""
    own = [draft for draft in program.tail if draft.op is Op.UPDATE and draft.lane is Lane.GPU_UPDATE]
    for _, group in itertools.groupby(sorted(own, key=lambda draft: draft.stage), key=lambda draft: draft.stage):
        updates = list(group)
        num_params = sum(update.num_params for update in updates)
        num_bytes = decisions.step_scratch_bytes * min(num_params, decisions.step_scratch_params or num_params)
        program.hold_while(MemoryClass.WORKSPACE, num_bytes, "updates", updates[0], updates[-1])


def _brought(program: Program) -> dict[tuple[str, int], Task]:
    """Return the copies of earlier sums to the device, by unit and micro-batch."""
    return {
        (draft.unit, draft.micro_batch): draft
        for draft in program.drafts
        if draft.lane is Lane.H2D and draft.op is Op.LOAD and draft.phase is Phase.BACKWARD
    }


def _hold_gradients(
    decisions: RivalDecisions,
    brought: Mapping[tuple[str, int], Task],
    program: Program,
    unit: LoweredUnit,
    maker: LoweredUnit,
    tied: Collection[str],
    fresh: Fresh,
) -> None:
    """Hold a unit's gradients on the device; see :func:`planner.lowering.memory.hold_leaving`.

    Engines that stream layers bring the sum back to the device, and leave the last one there for the update. If ranks
    reduce that, a share of it is left.
    """
    amounts, last_number = unit.amounts, decisions.num_micro_batches - 1
    gradient_bytes, ranks, host = decisions.precision.gradient_bytes, amounts.replicas, amounts.flushed_params
    on_device, replicates = decisions.gradient_path is GradientPath.ON_DEVICE, decisions.replicates(unit.name)
    made: Task | None = None  # the task since which whole gradients of this rank accumulate
    summed: Task | None = None  # the task since which the sum for the device's update is there
    for micro_batch in range(decisions.num_micro_batches):
        note_fresh(unit, maker, tied, fresh[micro_batch], (summed is not None, made is not None))
        here = brought.get((unit.name, micro_batch)) if on_device else None
        made = made or here or maker.backwards[micro_batch]
        if scatter := unit.scatters.get(micro_batch):
            # First the unreduced gradient of all parameters, then the rank's shard; an all-reduce is in place.
            if decisions.zero_stage:
                num_bytes, label = gradient_bytes * amounts.padded_params, f"{unit.name} unreduced"
                program.hold_while(MemoryClass.GRADIENTS, num_bytes, label, made, scatter)
                made = scatter
                host = min(host, sum(count for count, _ in amounts.pieces))
        elif (ranks > 1 and not replicates) or (decisions.layer_by_layer and micro_batch not in unit.flushes):
            continue
        if host:
            stays = on_device and micro_batch == last_number and not decisions.sums_leave
            last = unit.updates[-1] if stays else unit.flushes[micro_batch]
            hold_from(program, unit, tied, gradient_bytes * host, unit.name, made, last)
        summed, made = summed or made, None
    if amounts.resident_params and summed:
        hold_resident(program, unit, tied, summed)


def _hold_spilled(decisions: RivalDecisions, program: Program) -> None:
    """Hold gradients on their way to NVMe, which other engines allocate on demand."""
    begins: dict[str, Task] = {}
    for draft in program.drafts:
        if draft.lane is Lane.D2H and draft.phase is Phase.BACKWARD:
            begins.setdefault(draft.unit, draft)
    for unit in program.units:
        if not unit.spill:
            continue
        num_bytes, label = decisions.spilled_bytes_per_param * sum(unit.amounts.from_nvme), f"{unit.name} spilled"
        if decisions.num_micro_batches == 1:
            begin = begins[unit.name]
            program.hold_while(MemoryClass.GRADIENTS, num_bytes, label, begin, unit.spill, Tier.HOST)
        else:
            program.hold(Tier.HOST, MemoryClass.GRADIENTS, num_bytes, label)


def _has_buffers(decisions: RivalDecisions) -> bool:
    """Return whether whole gradients are added up in another type, to which products write: Megatron-Core's buffers."""
    other = isinstance(decisions.precision, RivalPrecision) and decisions.precision.gradients is not None
    return other and decisions.zero_stage < 2


def _hold_sums(program: Program, unit: LoweredUnit, _maker: LoweredUnit, _tied: Collection[str], _fresh: Fresh) -> None:
    """Hold the sums of a unit's gradients all the time; see :func:`planner.lowering.memory.hold_leaving`.

    Their buffers are allocated once, also where ranks share the optimizer's state (``param_and_grad_buffer.py``). No
    gradient is new: products add theirs to the sums.
    """
    num_bytes = program.decisions.precision.gradient_bytes * max(unit.amounts.padded_params, unit.num_params)
    program.hold(Tier.GPU, MemoryClass.GRADIENTS, num_bytes, f"{unit.name} sums", unit.stage)


def _hold_placeholders(program: Program) -> None:
    """Hold what products that add gradients to sums give autograd in a gradient's place.

    TransformerEngine keeps one tensor for each shape of a weight (``module/base.py::get_dummy_wgrad``), and
    Megatron-Core's head takes its from there (``core/tensor_parallel/layers.py``).
    """
    shapes: dict[int, set[tuple[int, int]]] = {}
    for unit in program.units:
        own = {(each.m, each.n) for each in unit.unit.backward if isinstance(each, Gemm) and each.accumulates}
        shapes.setdefault(unit.stage, set()).update(own)
    for stage, found in shapes.items():
        num_bytes = program.decisions.precision.weight_bytes * sum(itertools.starmap(operator.mul, found))
        program.hold(Tier.GPU, MemoryClass.GRADIENTS, num_bytes, "placeholders", stage)


def _hold_in_type_of_masters(program: Program) -> None:
    """Hold shards of gradients in the type of those of parameters (FSDP casts what it has reduced).

    See ``_fsdp_collectives.py::foreach_reduce`` and ``_runtime_utils.py::_post_reduce_grad_callback`` in
    ``torch/distributed/fsdp``.
    """
    precision = program.decisions.precision
    program.held = [
        (tier, kind, num_bytes * precision.master_bytes // precision.gradient_bytes, first, last, stage, label)
        if kind is MemoryClass.GRADIENTS and label.endswith(" resident")
        else (tier, kind, num_bytes, first, last, stage, label)
        for tier, kind, num_bytes, first, last, stage, label in program.held
    ]


def _shorten_state_slots(program: Program) -> None:
    """Let slots for streamed state have no room for a master copy that is the weight, which is on the device anyway."""
    decisions = program.decisions
    streaming = [unit for unit in program.units if unit.amounts.streamed]
    spared = decisions.resident_weight_bytes_per_param
    state = [
        (state_bytes, state_bytes - spared * num_params)
        for unit in streaming
        for (num_params, place), state_bytes in zip(unit.amounts.pieces, unit.amounts.state_bytes, strict=True)
        if place is Place.STREAM
    ]
    largest, needed = (max(column) for column in zip(*state, strict=True)) if state else (0, 0)
    spared_bytes = largest - needed
    program.held = [
        (tier, kind, num_bytes - spared_bytes * label.startswith("state slot "), first, last, stage, label)
        for tier, kind, num_bytes, first, last, stage, label in program.held
    ]


def _hold_blocks(program: Program, block: int) -> None:
    """Hold inputs in a block that is recomputed together: only the first segment's is kept since forward."""
    first_of = first_passes(program)
    firsts = [segment[0] for segment in program.segments if (segment[0].name, 0) in first_of]
    later = {
        forward.index: first_of[first.name, forward.micro_batch].index
        for number, first in enumerate(firsts)
        for forward in first.forwards
        if number % block
    }
    program.held = [
        (tier, kind, num_bytes, later.get(first, first) if label.endswith(" input") else first, last, stage, label)
        for tier, kind, num_bytes, first, last, stage, label in program.held
    ]


def _shrink_head(program: Program, percent: int) -> None:
    """Let an engine with a head of its own hold less of what the model's head saves and works in."""
    segment = program.units[-1].unit.segment
    members = [unit for unit in program.units if unit.unit.segment == segment]
    saved = {unit.name for unit in members if unit.moved_bytes is None}
    working = {f"{unit.name} workspace" for unit in members}

    def share(kind: MemoryClass, label: str, num_bytes: int) -> int:
        own = label in (saved if kind is MemoryClass.ACTIVATIONS else working if kind is MemoryClass.WORKSPACE else ())
        return num_bytes * percent // 100 if own else num_bytes

    program.held = [
        (tier, kind, held, first, last, stage, label)
        for tier, kind, num_bytes, first, last, stage, label in program.held
        if (held := share(kind, label, num_bytes))
    ]
