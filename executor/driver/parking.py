"""Frees a session's device memory between steps, so that another program can use it, and takes it again.

Some state exists only on the device: optimizer state, and weights that are updated there. It moves to pinned host
memory. State that the host has too is dropped: weights that the host updates or streams, and slots, which are filled at
each use. The session's tensor objects stay the same; only their memory is freed and taken again. While a session is
parked, state is read from the host. The host memory is taken when a session is parked for the first time, and kept for
the next time.
"""

import dataclasses
import functools
import time
from collections.abc import Sequence

import torch

from executor.driver.runtime import Runtime
from executor.memory.arenas import Moved
from executor.memory.frozen import FrozenWeights
from executor.memory.stream import in_room, room_bytes
from executor.memory.units import UnitState
from planner.decisions import Place
from planner.schedule.tasks import MemoryClass


def park(
    runtime: Runtime, model: torch.nn.Module, link_bytes_per_s: tuple[float, float] | None, *, keep_weights: bool
) -> Moved:
    """Park a session; see the module. Until :attr:`Runtime.unpark` is set, nothing has changed.

    Args:
        runtime: the session's runtime.
        model: its buffers are parked too.
        link_bytes_per_s: rates of copies from and to the device; ``None`` if they are unknown.
        keep_weights: whether resident weights stay on the device.
    """
    begin_s = time.perf_counter()
    runtime.end_evaluation()
    runtime.make_current("park()")
    runtime.take_remaining()
    units = list(runtime.state.units.values())
    leaving = [slab for unit in units for slab in unit.device if slab is not unit.own_weights]
    frozen = [unit.frozen.own for unit in units if unit.frozen is not None and unit.on_device]
    buffers = [buffer for buffer in model.buffers() if buffer.is_cuda and buffer.is_contiguous()]
    leaving += buffers if keep_weights else [*buffers, *frozen]
    updated = {} if keep_weights else {unit.name: held for unit in units if (held := _updated_on_device(unit))}
    weights = [unit.own_weights for unit in units if unit.name in updated]
    num_bytes = room_bytes(tensors := [*leaving, *weights])
    if runtime.parking_memory.nbytes < num_bytes:
        name = f"parked at {begin_s}"  # this call may be interrupted here, and made again
        runtime.parking_memory = runtime.host.take(name, MemoryClass.OPTIMIZER, num_bytes, torch.uint8)
    place = dict(zip(map(id, tensors), in_room(tensors, runtime.parking_memory), strict=True))
    moved = [(tensor, place[id(tensor)]) for tensor in leaving]
    for unit, there in ((unit, place[id(unit.own_weights)]) for unit in units if unit.name in updated):
        moved += [(unit.own_weights[held], there[held]) for held in updated[unit.name]]
    for tensor, there in moved:
        runtime.backend.copy(there, tensor)
    runtime.actions.synchronize()
    before = [(unit, unit.device, unit.own_weights, unit.frozen) for unit in units]
    released: list[tuple[torch.Tensor, int]] = []  # buffers without memory, and their bytes
    # From here on, both places have all values, and unpark() undoes whatever was done.
    runtime.unpark = functools.partial(_unpark, runtime, moved, before, released, link_bytes_per_s)
    for unit in units:  # state is read from the host now
        unit.device = tuple(place.get(id(slab), slab) for slab in unit.device)
        unit.own_weights = place.get(id(unit.own_weights), unit.own_weights)
        if unit.frozen is not None:
            unit.frozen = dataclasses.replace(unit.frozen, own=place.get(id(unit.frozen.own), unit.frozen.own))
        unit.views.clear()
    staying = []
    if keep_weights:
        own = [unit.own_weights for unit in units if unit.on_device]
        staying = [*frozen, *own, *(unit.device_weights for unit in units if unit.is_resident)]
    else:
        runtime.take_device_memory()
    device_bytes = runtime.gpu.release({tensor.untyped_storage()._cdata for tensor in staying})
    for buffer in {buffer.untyped_storage()._cdata: buffer for buffer in buffers}.values():
        released.append((buffer, buffer.untyped_storage().nbytes()))
        runtime.backend.release(buffer)
    num_bytes = sum(tensor.nbytes for tensor, _ in moved)
    return _result(num_bytes, device_bytes, link_bytes_per_s and link_bytes_per_s[0], begin_s)


def _unpark(
    runtime: Runtime,
    moved: Sequence[tuple[torch.Tensor, torch.Tensor]],
    before: Sequence[tuple[UnitState, tuple[torch.Tensor, ...], torch.Tensor, FrozenWeights | None]],
    released: Sequence[tuple[torch.Tensor, int]],
    link_bytes_per_s: tuple[float, float] | None,
) -> Moved:
    """Undo :func:`park`. Until it is done, it can be done again.

    Args:
        runtime: the session's runtime.
        moved: pairs of tensors on the device and on the host.
        before: each unit, and what it has while it is not parked.
        released: buffers without memory, and their bytes.
        link_bytes_per_s: see :func:`park`.
    """
    begin_s = time.perf_counter()
    device_bytes = runtime.gpu.restore()  # if that raises, the session stays parked
    for buffer, num_bytes in released:
        runtime.backend.restore(buffer, num_bytes)
    for tensor, there in moved:
        runtime.backend.copy(tensor, there)
    runtime.actions.synchronize()
    for unit, device, own, frozen in before:
        unit.device, unit.own_weights, unit.frozen = device, own, frozen
        unit.views.clear()
    from_host = [
        (unit, piece) for unit, *_ in before for piece in unit.pieces if unit.on_device and piece.place is not Place.GPU
    ]
    for unit, piece in from_host:
        if piece.place is Place.STREAM:
            unit.own(piece).copy_(unit.masters(piece))
    runtime.forget_current()
    runtime.make_current("unpark()", unparks=True)  # uploads weights that the host updates
    runtime.actions.synchronize()
    num_bytes = sum(tensor.nbytes for tensor, _ in moved) + sum(unit.own(piece).nbytes for unit, piece in from_host)
    result = _result(num_bytes, device_bytes, link_bytes_per_s and link_bytes_per_s[1], begin_s)
    runtime.unpark = None
    return result


def _updated_on_device(unit: UnitState) -> list[slice]:
    """Return the ranges of a unit's own weights that are updated on the device."""
    pieces = [piece for piece in unit.pieces if unit.on_device and piece.place is Place.GPU]
    return [slice(piece.start - unit.start, piece.stop - unit.start) for piece in pieces]


def _result(num_bytes: int, device_bytes: int, bytes_per_s: float | None, begin_s: float) -> Moved:
    predicted_s = None if bytes_per_s is None else num_bytes / bytes_per_s
    return Moved(num_bytes, device_bytes, predicted_s, time.perf_counter() - begin_s)
