"""Conditions on work: an iteration lasts at least as long as each lane and resource needs for its work."""

from collections import defaultdict
from collections.abc import Sequence

from planner.bounds.loads import Load, label
from planner.bounds.placement import AGAIN, Placement
from planner.bounds.program import TIME, Sum
from planner.costs.resources import Resource
from planner.decisions import Place
from planner.graph import Unit
from planner.schedule.tasks import Lane, Op, Phase, Task


def work(on: Placement) -> None:
    """Add the conditions on work to a placement's program."""
    for key, load in load_of(on, on.segments).items():
        terms = Sum().plus(load, 1.0 / on.loads.capacity[key])
        on.program.at_least(f"work: {label(key)}", Sum((TIME, 1.0)), terms)


def load_of(on: Placement, segments: Sequence[Sequence[Unit]]) -> Load:
    """Return the load of an iteration of some segments: all that their lanes and resources do."""
    total: Load = defaultdict(Sum)
    units = [unit for segment in segments for unit in segment]
    for unit in units:
        every = Sum(("", on.passes(unit)))
        _pass(on, total, unit, Op.FORWARD, every)
        _pass(on, total, unit, Op.BACKWARD, every)
        if unit.weight_gradients:
            _pass(on, total, unit, Op.WEIGHT_GRADIENT, every)
        _casts(on, total, unit)
        if unit.name in on.position:  # otherwise only what is computed is wanted
            _work_of(on, total, unit)
    for segment in segments:
        for way, op in AGAIN:
            if (name := f"{segment[0].segment}:{way}") not in on.program.boxes:
                continue
            by = Sum((name, on.passes(segment[0])))
            for unit in segment:
                _pass(on, total, unit, op, by)
                if way != "recompute":
                    on.loads.copy(total, Resource.LINK_UP, unit.swap_bytes, by)
                    on.loads.copy(total, Resource.LINK_DOWN, unit.swap_bytes, by)
                if way == "evict":
                    on.loads.storage(total, Resource.NVME_WRITE, unit.swap_bytes, by)
                    on.loads.storage(total, Resource.NVME_READ, unit.swap_bytes, by)
    num_tensors = sum(len(unit.parameters) for unit in units)
    step = Task(0, Lane.LAUNCH, Op.STEP, Phase.UPDATE, num_tensors=num_tensors)
    on.loads.charge(total, step, Sum(("", 1.0)))
    return total


def _pass(on: Placement, total: Load, unit: Unit, op: Op, by: Sum) -> None:
    for key, amount in on.loads.computing(unit, op).items():
        total[key].plus(by, amount[""])


def _casts(on: Placement, total: Load, unit: Unit) -> None:
    """Add the casts of weights in forward and backward where weights do not come in fp8."""
    repeats = on.passes(unit)
    for op in (Op.FORWARD, Op.BACKWARD):
        for key, amount in on.loads.casting(unit, op).items():
            total[key].plus(Sum(("", repeats)).plus(on.moved_in_fp8(unit), -repeats), amount[""])


def _work_of(on: Placement, total: Load, unit: Unit) -> None:
    """Add the load of a unit's weights, gradients and updates in an iteration."""
    if unit.num_params:
        _train(on, total, unit)
    if unit.num_weights:
        _bring(on, total, unit)


def _train(on: Placement, total: Load, unit: Unit) -> None:
    """Add the load of a unit's gradients and updates."""
    name = unit.name
    shard = on.given.placed_params(unit)
    on.updates(total, unit)
    on.loads.copy(total, Resource.LINK_DOWN, on.weight_bytes * shard, Sum((f"{name}:upload", 1.0)))
    by = Sum().plus(on.leaves(unit), float(on.repeats))
    on.loads.copy(total, Resource.LINK_UP, on.weight_bytes * shard, by)
    on.loads.copy(total, Resource.LINK_UP, 1.0, on.state_out(unit))
    if on.given.replicas(unit) > 1:
        # Whole gradients that accumulate on the device are reduced once.
        resident = Sum((f"{name}:{Place.GPU}", 1.0), (f"{name}:{Place.STREAM}", 1.0))
        rest = on.repeats - 1.0
        often = Sum(("", float(on.repeats))).plus(resident if on.given.zero_stage < 2 else {}, -rest)
        on.loads.scatter(total, unit, often)
    if on.given.regathers(unit):
        on.loads.gather(total, unit, Sum(("", 1.0)))


def _bring(on: Placement, total: Load, unit: Unit) -> None:
    """Add the load of bringing a unit's weights to the device, and of its storage."""
    name = unit.name
    fp8, boxes = on.given.fp8_if_moved(unit), on.program.boxes
    if on.given.gathers(unit) and unit.forward:
        fills, wide = Sum((f"{name}:fills", 1.0)), Sum((f"{name}:wide", 1.0)) if fp8 else Sum()
        on.loads.gather(total, unit, fills.plus(wide, -1.0), fp8)
        on.loads.gather(total, unit, wide)
    fetched = next((v for v in (f"{name}:fetches", f"{name}:fills") if v in boxes), None)
    if fetched and on.away(unit):
        reads = Sum((f"{name}:reads", 1.0)) if fp8 and f"{name}:reads" in boxes else Sum()
        frozen_bytes, own_bytes = on.given.frozen_shard_bytes(unit), on.own_bytes(unit)
        for num_bytes, by in (
            (fp8.fetched_bytes + frozen_bytes if fp8 else own_bytes, Sum((fetched, 1.0)).plus(reads, -1.0)),
            (own_bytes, reads),
        ):
            fetch = Task(0, Lane.H2D, Op.FETCH, Phase.FORWARD, num_bytes=num_bytes)
            on.loads.charge(total, fetch, by)
    if on.stores(nvme=True):
        _storage_work(on, total, unit)


def _storage_work(on: Placement, total: Load, unit: Unit) -> None:
    """Add the reads and writes of a unit's parameters, gradients and state on NVMe in an iteration."""
    name, shard = unit.name, on.given.placed_params(unit)
    read, written = Resource.NVME_READ, Resource.NVME_WRITE
    weights_written = 0 if on.given.weight_in_state else on.weight_bytes
    for what, num_bytes, directions in (
        (Place.NVME, on.given.placed_state_bytes_per_param(unit) * shard, (read, written)),
        ("spill", on.given.spilled_bytes_per_param * shard, (read, written)),
        ("onnvme", weights_written * shard, (written,)),
        ("reads", on.own_bytes(unit), (read,)),
    ):
        for direction in directions if f"{name}:{what}" in on.program.boxes else ():
            on.loads.storage(total, direction, num_bytes, Sum((f"{name}:{what}", 1.0)))
