"""The pass that states who holds how many bytes of which tier, and when."""

from planner.decisions import STATE_BYTES_PER_PARAM, GradientPath, Place
from planner.graph import Unit
from planner.lowering.compute import compute_drafts, segments
from planner.lowering.gradients import flushed_params, placed_params
from planner.lowering.parameters import assign_slots, gathers
from planner.lowering.program import Program
from planner.schedule import MemoryClass, Op, Tier


def memory(program: Program) -> None:
    """Add all buffers: parameters, slots, optimizer state, gradients, activations and workspace."""
    _parameters(program)
    program.hold(Tier.GPU, MemoryClass.WORKSPACE, program.decisions.device_buffer_bytes, "engine's buffers")
    # Backward makes a tied weight's gradient where the weight is used last in forward, and adds to it until its own.
    makers = {name: unit.name for unit in program.units for name in (unit.name, *unit.shared_units)}
    for unit in program.units:
        if unit.num_params:
            _optimizer(program, unit)
            _gradients(program, unit, makers[unit.name])
    _tied_gradients(program)
    _state_slots(program)
    for micro_batch in range(program.decisions.num_micro_batches):
        for segment in segments(program.units):
            _activations(program, segment, micro_batch)
    # What lives only inside a unit's own computing: one unit's at a time.
    sizes = {unit.name: unit.workspace_bytes for unit in program.units}
    for draft in compute_drafts(program):
        label = f"{draft.unit} workspace"
        program.hold(Tier.GPU, MemoryClass.WORKSPACE, sizes[draft.unit], label, draft.key, draft.key)


def _parameters(program: Program) -> None:
    decisions = program.decisions
    weight_bytes = decisions.precision.weight_bytes
    for slot, num_params in enumerate(assign_slots(program).num_params):
        program.hold(Tier.GPU, MemoryClass.PARAMETERS, weight_bytes * num_params, f"slot {slot}")
    for unit in program.units:
        resident = decisions.shard_params(unit.num_params) if gathers(program) else unit.num_params
        if decisions.units[unit.name].params == "gpu":
            program.hold(Tier.GPU, MemoryClass.PARAMETERS, weight_bytes * resident, unit.name)
        shard = decisions.shard_params(unit.num_params)
        # The host's copy of what it updates or serves; in fp32 the master copy serves.
        if not decisions.precision.master_is_weight:
            host = shard if decisions.units[unit.name].params == "host" else placed_params(program, unit, Place.CPU)
            program.hold(Tier.HOST, MemoryClass.PARAMETERS, weight_bytes * host, unit.name)


def _optimizer(program: Program, unit: Unit) -> None:
    shard = program.decisions.shard_params(unit.num_params)
    host = placed_params(program, unit, Place.CPU, Place.STREAM)
    resident_bytes = STATE_BYTES_PER_PARAM - (4 if program.decisions.precision.master_is_weight else 0)
    program.hold(Tier.HOST, MemoryClass.OPTIMIZER, STATE_BYTES_PER_PARAM * host, unit.name)
    program.hold(Tier.GPU, MemoryClass.OPTIMIZER, resident_bytes * (shard - host), unit.name)


def _gradients(program: Program, unit: Unit, maker: str) -> None:
    decisions = program.decisions
    weight_bytes = decisions.precision.weight_bytes
    host = flushed_params(program, unit)
    resident = decisions.shard_params(unit.num_params) - host
    if decisions.gradient_path is not GradientPath.ONCE:
        # DeepSpeed's flat buffer for what the device updates is allocated once, before training.
        fixed = placed_params(program, unit, Place.GPU)
        program.hold(Tier.GPU, MemoryClass.GRADIENTS, weight_bytes * fixed, f"{unit.name} buffer")
        resident -= fixed
    made: str | None = None  # since when whole gradients of this rank pile up
    host_bytes = weight_bytes if decisions.gradient_path is GradientPath.ONCE else 4
    program.hold(Tier.HOST, MemoryClass.GRADIENTS, host_bytes * host, unit.name)
    summed: str | None = None  # since when the sum that the device updates with is there
    for micro_batch in range(decisions.num_micro_batches):
        made = made or f"{Op.BACKWARD}:{maker}:{micro_batch}"
        scatter = f"scatter:{unit.name}:{micro_batch}"
        if scatter in program.drafts:  # the unreduced gradient of all parameters, then the rank's shard of it
            label = f"{unit.name} unreduced"
            program.hold(Tier.GPU, MemoryClass.GRADIENTS, weight_bytes * unit.num_params, label, made, scatter)
            made = scatter
        elif decisions.data_parallel > 1:
            continue
        if host:
            end = f"flush:{unit.name}:{micro_batch}"
            program.hold(Tier.GPU, MemoryClass.GRADIENTS, weight_bytes * host, unit.name, made, end)
        summed, made = summed or made, None
    if resident:
        assert summed is not None
        final = max(p for p, place in enumerate(decisions.units[unit.name].update) if not decisions.flushes(place))
        end = f"{Op.UPDATE}:{unit.name}:{final}"
        program.hold(Tier.GPU, MemoryClass.GRADIENTS, weight_bytes * resident, f"{unit.name} resident", summed, end)


def _tied_gradients(program: Program) -> None:
    """Autograd adds up a tied weight's two gradients out of place: at that moment there are three."""
    sizes = {spec.name: spec.num_params for unit in program.units for spec in unit.parameters}
    owner = {spec.name: unit.name for unit in program.units for spec in unit.parameters}
    weight_bytes = program.decisions.precision.weight_bytes
    tied = {name for unit in program.units for operator in unit.operators for name in operator.shared_parameters}
    for name in sorted(tied):
        for micro_batch in range(program.decisions.num_micro_batches):
            adding = f"{Op.BACKWARD}:{owner[name]}:{micro_batch}"
            label = f"{name} summed"
            program.hold(Tier.GPU, MemoryClass.GRADIENTS, 2 * weight_bytes * sizes[name], label, adding, adding)


def _state_slots(program: Program) -> None:
    decisions = program.decisions
    streamed = [
        n
        for unit in program.units
        for n, place in zip(decisions.piece_params(unit.num_params), decisions.units[unit.name].update, strict=True)
        if place is Place.STREAM
    ]
    gradient_bytes = decisions.precision.weight_bytes if decisions.flushes(Place.STREAM) else 0
    per_param = STATE_BYTES_PER_PARAM + gradient_bytes
    for slot in range(min(decisions.num_state_slots, len(streamed))):
        program.hold(Tier.GPU, MemoryClass.OPTIMIZER, per_param * max(streamed), f"state slot {slot}")


def _activations(program: Program, segment: list[Unit], micro_batch: int) -> None:
    keep = program.decisions.units[segment[0].name].activations == "keep"
    first = segment[0]
    if not keep:
        program.hold(
            Tier.GPU,
            MemoryClass.ACTIVATIONS,
            first.activation_output_bytes,
            f"{first.segment} input",
            f"{Op.FORWARD}:{first.name}:{micro_batch}",
            f"{Op.BACKWARD}:{first.name}:{micro_batch}",
        )
    for unit in segment:
        begin = f"{Op.FORWARD if keep else Op.RECOMPUTE}:{unit.name}:{micro_batch}"
        end = f"{Op.BACKWARD}:{unit.name}:{micro_batch}"
        program.hold(Tier.GPU, MemoryClass.ACTIVATIONS, unit.saved_bytes, unit.name, begin, end)
