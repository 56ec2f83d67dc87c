"""Frees a session's device memory between steps, so that another program can use it, and takes it again.

[Note: Parked] Some state exists only on the device: optimizer state, and weights that are updated there. It moves to
pinned host memory. State that the host has too is dropped: weights that the host updates or streams, and slots, which
are filled at each use. The session's tensor objects stay the same; only their memory is freed and taken again. While a
session is parked, state is read from the host. The host memory is taken when a session is parked for the first time,
and kept for the next time.
"""

import dataclasses
import time
from collections.abc import Iterator
from typing import final

import torch

from executor.driver.runtime import Runtime
from executor.memory.frozen import FrozenWeights
from executor.memory.units import Moments, UnitState
from planner.decisions import Place
from planner.schedule.tasks import MemoryClass


@dataclasses.dataclass(frozen=True, slots=True)
class Moved:
    """Bytes and time of parking or unparking.

    Attributes:
        num_bytes: bytes copied over the link.
        device_bytes: device memory that was freed or taken.
        predicted_s: time that the profile predicts for copying these bytes; ``None`` without a profile.
        seconds: time that it took. The first parking also takes host memory.
    """

    num_bytes: int
    device_bytes: int
    predicted_s: float | None
    seconds: float


@final
class Parking:
    """Parks a session; see [Note: Parked].

    Args:
        model: its buffers are parked too.
        runtime: the session's runtime.
        link_bytes_per_s: rates of copies from and to the device; ``None`` if they are unknown.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        runtime: Runtime,
        link_bytes_per_s: tuple[float, float] | None,
    ) -> None:
        self._model = model
        self._runtime = runtime
        self._link_bytes_per_s = link_bytes_per_s
        self._host: torch.Tensor | None = None
        self._num_taken = 0
        self._moved: list[tuple[torch.Tensor, torch.Tensor]] = []  # on the device, and on the host
        # Each unit, and what it has while it is not parked.
        self._before: list[tuple[UnitState, Moments, torch.Tensor, FrozenWeights | None]] = []
        self._released: list[tuple[torch.Tensor, int]] = []  # buffers without memory, and their bytes

    def park(self, *, keep_weights: bool) -> Moved:
        """See :meth:`executor.session.Session.park`."""
        runtime, units = self._runtime, list(self._runtime.state.units.values())
        begin_s = time.perf_counter()
        self._runtime.end_evaluation()
        self._runtime.make_current("park()")
        if runtime.snapshots is not None:
            runtime.snapshots.take_remaining()
        own = [unit.own_weights for unit in units if _updated_on_device(unit) and not keep_weights]
        slabs = [slab for unit in units for slab in _slabs(unit.device)]
        slabs += [frozen for unit in units if not keep_weights for frozen in _device_only_frozen(unit)]
        buffers = list(self._buffers())
        place = self._host_memory_for([*own, *slabs, *buffers])
        moved = [(tensor, place[id(tensor)]) for tensor in (*slabs, *buffers)]
        for unit in units if not keep_weights else ():
            device, host = unit.own_weights, place.get(id(unit.own_weights))
            moved += [] if host is None else [(device[held], host[held]) for held in _updated_on_device(unit)]
        for tensor, there in moved:
            runtime.backend.copy(there, tensor)
        runtime.actions.synchronize()
        self._moved = moved
        runtime.parked = True  # from here on, both places have all values, and unpark() undoes whatever was done
        for unit in units:
            self._read_from_host(unit, place)
        if not keep_weights:
            self._runtime.take_device_memory()
        staying = [tensor for unit in units if keep_weights for tensor in _resident_tensors(unit)]
        device_bytes = runtime.gpu.release({tensor.untyped_storage()._cdata for tensor in staying})
        for buffer in buffers:
            self._released.append((buffer, buffer.untyped_storage().nbytes()))
            runtime.backend.release(buffer)
        return self._result(0, device_bytes, begin_s)

    def unpark(self) -> Moved:
        """See :meth:`executor.session.Session.unpark`. Until it is done, it can be done again."""
        runtime = self._runtime
        begin_s = time.perf_counter()
        device_bytes = runtime.gpu.restore()  # if that raises, the session stays parked
        for buffer, num_bytes in self._released:
            runtime.backend.restore(buffer, num_bytes)
        for tensor, there in self._moved:
            runtime.backend.copy(tensor, there)
        runtime.actions.synchronize()
        for unit, device, own, frozen in self._before:
            unit.device, unit.own_weights, unit.frozen = device, own, frozen
            unit.views.clear()
        for unit in runtime.state.units.values():
            for piece in unit.pieces if unit.on_device else ():
                if piece.place is Place.STREAM:
                    unit.own(piece).copy_(unit.masters(piece))
        self._runtime.forget_current()
        self._runtime.make_current("unpark()", unparks=True)  # uploads weights that the host updates
        runtime.actions.synchronize()
        result = self._result(1, device_bytes, begin_s)
        runtime.parked = False
        self._moved, self._released, self._before = [], [], []
        return result

    def _result(self, way: int, device_bytes: int, begin_s: float) -> Moved:
        num_bytes = sum(tensor.nbytes for tensor, _ in self._moved)
        if way:
            held = [
                (unit, piece) for unit in self._runtime.state.units.values() if unit.on_device for piece in unit.pieces
            ]
            num_bytes += sum(unit.own(piece).nbytes for unit, piece in held if piece.place is not Place.GPU)
        predicted_s = None if self._link_bytes_per_s is None else num_bytes / self._link_bytes_per_s[way]
        return Moved(num_bytes, device_bytes, predicted_s, time.perf_counter() - begin_s)

    def _buffers(self) -> Iterator[torch.Tensor]:
        """Yield the model's buffers that have device memory of their own."""
        seen = set()
        for buffer in self._model.buffers():
            if buffer.is_cuda and buffer.is_contiguous() and id(buffer) not in seen:
                seen.add(id(buffer))
                yield buffer

    def _host_memory_for(self, tensors: list[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return host memory for tensors, by identity."""
        num_bytes = sum(_aligned(tensor.nbytes) for tensor in tensors)
        if self._host is None or len(self._host) < num_bytes:
            self._num_taken += 1  # first: the block may be taken, and this call interrupted
            name = f"parked {self._num_taken}"
            self._host = self._runtime.host.take(name, MemoryClass.OPTIMIZER, num_bytes, torch.uint8)
        found, start = {}, 0
        for tensor in tensors:
            found[id(tensor)] = self._host[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            start += _aligned(tensor.nbytes)
        return found

    def _read_from_host(self, unit: UnitState, place: dict[int, torch.Tensor]) -> None:
        """Let a unit's state be read from the host."""
        device, own = unit.device, unit.own_weights
        master = None if device.master is None else place[id(device.master)]
        unit.device = Moments(master, tuple(place[id(buffer)] for buffer in device.buffers))
        unit.own_weights = place.get(id(own), own)
        unit.views.clear()
        self._before.append((unit, device, own, unit.frozen))
        if unit.frozen is not None and (there := place.get(id(unit.frozen.own))) is not None:
            unit.frozen = dataclasses.replace(unit.frozen, own=there)


def _updated_on_device(unit: UnitState) -> list[slice]:
    """Return the ranges of a unit's own weights that are updated on the device."""
    pieces = [piece for piece in unit.pieces if unit.on_device and piece.place is Place.GPU]
    return [slice(piece.start - unit.start, piece.stop - unit.start) for piece in pieces]


def _resident_tensors(unit: UnitState) -> list[torch.Tensor]:
    held = [*([unit.own_weights] if unit.on_device else []), *([unit.device_weights] if unit.is_resident else [])]
    return held + _device_only_frozen(unit)


def _device_only_frozen(unit: UnitState) -> list[torch.Tensor]:
    """Return the frozen weights that only the device has."""
    return [] if unit.frozen is None or not unit.on_device else [unit.frozen.own]


def _slabs(moments: Moments) -> list[torch.Tensor]:
    return [*([] if moments.master is None else [moments.master]), *moments.buffers]


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // 64) * 64
