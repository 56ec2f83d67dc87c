"""Frozen weights: bytes that only move.

A unit's frozen weights are one row of bytes beside those that are trained: the parameters one
after another, those in a form of their own first, so that each begins at a whole grain. They are kept on the device, on
the host, or on NVMe in one version, as they are never written again. Weights that are not resident come to the unit's
slot with the trained ones. In ZeRO-3 each rank keeps a shard of the bytes.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

import torch

from executor.distributed.ranks import Ranks
from executor.distributed.shards import ParameterShard
from executor.memory.arenas import Arena
from executor.memory.nvme_files import RecordFile, Storage, whole_blocks
from executor.memory.pieces import DTYPES
from planner.decisions import Decisions
from planner.graph import Unit
from planner.lowering.parameters import Slots
from planner.schedule.tasks import MemoryClass


class FrozenParameter(NamedTuple):
    """One parameter, its type while it is kept, and its range ``[start, stop)`` in the bytes of its unit."""

    shard: ParameterShard
    dtype: torch.dtype
    start: int
    stop: int

    def values(self, ranks: Ranks | None) -> torch.Tensor:
        """Return this rank's shard, flat, with rank 0's values; of a quantized parameter its bytes."""
        stored = self.shard.stored
        if stored.is_quantized:
            values = torch.empty(self.stop - self.start, dtype=torch.uint8, device="cpu")
            stored.read(values)
            return ranks.all.broadcast(values) if ranks else values
        of_all = self.shard.on_all_ranks(self.shard.whole.detach())
        return self.shard.on_this_rank(ranks.all.broadcast(of_all) if ranks else of_all).reshape(-1)

    def as_bytes(self, values: torch.Tensor) -> torch.Tensor:
        """Return the bytes of flat values, which may be of any type."""
        return values if self.shard.stored.is_quantized else values.to(self.dtype).view(torch.uint8)

    def live_in(self, held: torch.Tensor) -> None:
        """Make it a view of its bytes."""
        if self.shard.stored.is_quantized:
            self.shard.stored.live_in(held)
        else:
            self.shard.leaf.data = self.of(held)

    def of(self, held: torch.Tensor) -> torch.Tensor:
        """Return its values from its bytes; those of a quantized one stay bytes."""
        if self.shard.stored.is_quantized:
            return held
        return held[: self.shard.shape.numel() * self.dtype.itemsize].view(self.dtype).view(self.shard.shape)


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenWeights:
    """The frozen weights of one unit.

    Attributes:
        name: the unit's name.
        parameters: in the order of their bytes.
        start: where the rank's shard begins in the unit's bytes.
        device: ``uint8 [padded]``, the resident block or the slot.
        own: ``uint8 [shard]``, the rank's shard on the device.
        host: ``uint8 [shard]``, the bytes that are fetched; empty if the weights are resident.
        file: where that is read from first; ``None`` if it is not on NVMe.
    """

    name: str
    parameters: tuple[FrozenParameter, ...]
    start: int
    device: torch.Tensor
    own: torch.Tensor
    host: torch.Tensor
    file: RecordFile | None

    @property
    def is_sharded(self) -> bool:
        """Whether ranks keep only shards."""
        return len(self.own) < len(self.device)

    @property
    def stored(self) -> torch.Tensor:
        """The shard where it is kept, or where it is read to from NVMe."""
        return self.host if len(self.host) else self.own

    def read(self) -> None:
        """Read the bytes from NVMe into host memory, if they are there."""
        if self.file is not None:
            self.file.read(self.name, whole_blocks(self.host))

    def own_bytes(self, parameter: FrozenParameter) -> torch.Tensor:
        """Return the bytes of a parameter that the rank holds whole; those from NVMe in memory of their own."""
        self.read()
        held = self.stored[parameter.start : parameter.stop]
        return held if self.file is None else held.clone()

    def set_values(self, values_of: Callable[[FrozenParameter], Iterable[torch.Tensor]]) -> None:
        """Set the parameters, wherever they are kept.

        Args:
            values_of: yields the values of this rank's shard of a parameter in flat parts, one after another; nothing
                for one that stays as it is.
        """
        if self.file is not None and self.file.is_written(self.name):
            self.read()
        stored = self.stored
        for parameter in self.parameters:
            start = parameter.start - self.start
            for values in values_of(parameter):
                part = parameter.as_bytes(values)
                first, last = max(start, 0), min(start + len(part), len(stored))
                if first < last:
                    stored[first:last].copy_(part[first - start : last - start])
                start += len(part)
                del values, part  # or they would be held until there are others
        if self.file is not None:
            self.file.write(self.name, whole_blocks(self.host))

    def move_in(self, absent: Collection[str], ranks: Ranks | None) -> None:
        """Copy the parameters in, one after another, and let them live in the slot or block."""

        def values_of(parameter: FrozenParameter) -> Iterator[torch.Tensor]:
            if parameter.shard.name not in absent:
                yield parameter.values(ranks)
            parameter.live_in(self.device[parameter.start : parameter.stop])

        self.set_values(values_of)


def take_frozen(
    units: tuple[Unit, ...],
    decisions: Decisions,
    slots: Slots,
    shards: Mapping[str, ParameterShard],
    gpu: Arena,
    host: Arena,
    storage: Storage,
    ranks: Ranks | None,
) -> dict[str, FrozenWeights]:
    """Take memory and files for frozen weights, without values; return those of each unit that has any.

    Raises:
        ValueError: some are on NVMe, and no folder was given.
        StorageError: see :class:`executor.memory.nvme_files.RecordFile`.
        DeviceMemoryError: a tier is too small.
    """
    of_slot = [
        gpu.take(f"slot {i} frozen", MemoryClass.PARAMETERS, num_bytes, torch.uint8)
        for i, num_bytes in enumerate(slots.frozen_bytes)
    ]
    size = {unit.name: decisions.frozen_shard_bytes(unit) for unit in units if unit.frozen}
    on_nvme = {name: num_bytes for name, num_bytes in size.items() if decisions.units[name].params == "nvme"}
    file = None
    if on_nvme:
        file = storage.take("frozen", on_nvme, {MemoryClass.PARAMETERS: sum(on_nvme.values())}, "frozen weights")
    sizes_bytes = {name: [num_bytes] for name, num_bytes in on_nvme.items()}
    landing = host.take_rooms("frozen buffer of slot", MemoryClass.PARAMETERS, slots.of_unit, sizes_bytes)
    found = {}
    for unit in (unit for unit in units if unit.frozen):
        name, slot, shard_bytes = unit.name, slots.of_unit.get(unit.name, -1), size[unit.name]
        where, padded_bytes = decisions.units[name].params, decisions.frozen_padded_bytes(unit)
        start = ranks.replicas(unit).rank * shard_bytes if ranks and padded_bytes > shard_bytes else 0
        resident = (
            gpu.take(f"{name} frozen", MemoryClass.PARAMETERS, shard_bytes, torch.uint8) if where == "gpu" else None
        )
        device = of_slot[slot][:padded_bytes] if slot >= 0 else resident
        assert device is not None
        source = torch.empty(0, dtype=torch.uint8)
        if where == "nvme":
            source = landing[name][0][:shard_bytes]
        elif where == "host":
            source = host.take(f"{name} frozen", MemoryClass.PARAMETERS, shard_bytes, torch.uint8)
        own = device[start : start + shard_bytes] if resident is None else resident
        stored = file if where == "nvme" else None
        found[name] = FrozenWeights(name, _ranges(unit, decisions, shards), start, device, own, source, stored)
    return found


def _ranges(unit: Unit, decisions: Decisions, shards: Mapping[str, ParameterShard]) -> tuple[FrozenParameter, ...]:
    weights = DTYPES[decisions.precision.weight_bytes]
    result, start = [], 0
    for spec in sorted(unit.frozen, key=lambda spec: spec.frozen == "plain"):
        stop, shard = start + spec.stored_bytes(weights.itemsize), shards[spec.name]
        result.append(FrozenParameter(shard, weights if spec.frozen == "plain" else shard.whole.dtype, start, stop))
        start = stop
    return tuple(result)
