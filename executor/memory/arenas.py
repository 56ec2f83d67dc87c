"""Static memory: allocated once, in the sizes of the plan, and counted by class."""

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Final, final

import torch

from executor.devices.backend import Backend
from executor.direct_io import BLOCK_BYTES, in_blocks
from planner.schedule.tasks import MemoryClass, Tier

ALIGNMENT_BYTES: Final = 64
"""Alignment of blocks: a cache line, which suits vector kernels."""


class DeviceMemoryError(MemoryError):
    """A plan needs more memory than a tier has. The message lists the bytes in use.

    Args:
        tier: the tier of the memory.
        name, requested_bytes: name and size of the block.
        capacity_bytes: the arena's limit; ``None``: no limit is set.
        held_bytes: bytes that the arena holds already, by class.
    """

    def __init__(
        self,
        tier: Tier,
        name: str,
        requested_bytes: int,
        capacity_bytes: int | None,
        held_bytes: Mapping[MemoryClass, int],
    ) -> None:
        super().__init__(tier, name, requested_bytes, capacity_bytes, held_bytes)
        self.tier, self.name, self.requested_bytes = tier, name, requested_bytes
        self.capacity_bytes, self.held_bytes = capacity_bytes, held_bytes

    def __str__(self) -> str:
        free_bytes = None if self.capacity_bytes is None else self.capacity_bytes - sum(self.held_bytes.values())
        limit = "no limit set" if self.capacity_bytes is None else f"{self.capacity_bytes:,} B capacity"
        free = "" if free_bytes is None else f", {free_bytes:,} B free"
        held = "; ".join(f"{c} {n:,} B" for c, n in sorted(self.held_bytes.items())) or "nothing"
        return (
            f"the {self.tier} is out of memory: {self.name} needs {self.requested_bytes:,} B ({limit}{free}); held "
            f"so far: {held}. Plan for the memory that is really free, or move more of the plan to another tier"
        )


@final
class Arena:
    """Named blocks of one tier. Each is allocated once, with exactly the requested size, and counted by class.

    Args:
        capacity_bytes: limit of the sum of all blocks; ``None``: the machine limits it.
    """

    def __init__(self, tier: Tier, capacity_bytes: int | None, backend: Backend) -> None:
        self.tier = tier
        self.capacity_bytes = capacity_bytes
        self._backend = backend
        self._blocks: dict[str, tuple[dict[MemoryClass, int], torch.Tensor]] = {}  # bytes by class
        self._released: dict[str, int] = {}

    @property
    def used_bytes(self) -> int:
        """Bytes taken so far."""
        return sum(self.by_class().values())

    def by_class(self) -> dict[MemoryClass, int]:
        """Return the bytes taken so far, by class."""
        totals: dict[MemoryClass, int] = defaultdict(int)
        for name, (num_bytes, _) in self._blocks.items():
            for memory_class, count in num_bytes.items() if name not in self._released else ():
                totals[memory_class] += count
        return dict(totals)

    def take(self, name: str, memory_class: MemoryClass, num_items: int, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised block ``[num_items]``, aligned to :data:`ALIGNMENT_BYTES`.

        Raises:
            DeviceMemoryError: the block does not fit; nothing is taken.
        """
        return self.take_blocks(name, {memory_class: num_items * dtype.itemsize}).view(dtype)

    def take_blocks(
        self,
        name: str,
        num_bytes_of: Mapping[MemoryClass, int],
        block_bytes: int = ALIGNMENT_BYTES,
        *,
        room_bytes: int = 0,
        shift_bytes: int = 0,
    ) -> torch.Tensor:
        """Return one uninitialised block, uint8, for several classes of memory.

        Args:
            name: name of the block.
            num_bytes_of: bytes by class.
            block_bytes: alignment of the block. If it is more than :data:`ALIGNMENT_BYTES`, the size is also rounded
                up to a multiple of it. Padding is less than two such blocks, and does not count as taken.
            room_bytes: size of the block, if it has several parts that are each rounded up. This padding does not count
                either.
            shift_bytes: the block begins so many bytes after a multiple of ``block_bytes``; less than ``block_bytes``.

        Raises:
            DeviceMemoryError: the block does not fit; nothing is taken.
        """
        assert name not in self._blocks, name
        num_bytes = sum(num_bytes_of.values())
        if self.capacity_bytes is not None and self.used_bytes + num_bytes > self.capacity_bytes:
            raise self._error(name, num_bytes)
        whole = block_bytes > ALIGNMENT_BYTES
        room = max(-(-num_bytes // block_bytes) * block_bytes if whole else num_bytes, room_bytes)
        try:
            block = self._backend.empty(room + (block_bytes if whole else 0), on_device=self.tier is Tier.GPU)
        except (MemoryError, RuntimeError, OSError) as error:  # of Python, torch and the system (mmap)
            raise self._error(name, num_bytes) from error
        block = block[(shift_bytes - block.data_ptr()) % block_bytes if whole else 0 :][:room]
        assert not room or (block.data_ptr() - shift_bytes) % block_bytes == 0
        self._blocks[name] = (dict(num_bytes_of), block)
        return block

    def count(self, name: str, memory_class: MemoryClass, block: torch.Tensor) -> None:
        """Count a block, uint8, that was allocated elsewhere.

        Raises:
            DeviceMemoryError: it does not fit.
        """
        assert name not in self._blocks, name
        if self.capacity_bytes is not None and self.used_bytes + block.nbytes > self.capacity_bytes:
            raise self._error(name, block.nbytes)
        self._blocks[name] = {memory_class: block.nbytes}, block

    def take_rooms(
        self,
        name: str,
        memory_class: MemoryClass,
        slot_of: Mapping[str, int],
        sizes_bytes: Mapping[str, Sequence[int]],
        planned_bytes: Sequence[int] = (),
    ) -> dict[str, list[torch.Tensor]]:
        """Return rooms for transfers to files, uint8, each of whole blocks. Those of one slot share memory.

        Args:
            name: begins the names of the blocks.
            memory_class: class of all of them.
            slot_of: number of each user's slot.
            sizes_bytes: sizes of the rooms of each user.
            planned_bytes: what each slot counts as; by default, the most that a user has there.

        Raises:
            DeviceMemoryError: a slot does not fit.
        """
        rooms: dict[str, list[torch.Tensor]] = {}
        for slot in sorted({slot_of[user] for user in sizes_bytes}):
            users = [user for user in sizes_bytes if slot_of[user] == slot]
            whole = {user: [in_blocks(size) for size in sizes_bytes[user]] for user in users}
            counted = planned_bytes[slot] if planned_bytes else max(sum(sizes_bytes[user]) for user in users)
            room_bytes = max(map(sum, whole.values()))
            memory = self.take_blocks(f"{name} {slot}", {memory_class: counted}, BLOCK_BYTES, room_bytes=room_bytes)
            rooms |= {user: list(torch.split(memory[: sum(parts)], parts)) for user, parts in whole.items()}
        return rooms

    def release(self, staying: Collection[int]) -> int:
        """Free the memory of all blocks for a while, except that of ``staying`` storages; return the freed bytes."""
        for name, (_, block) in self._blocks.items():
            if block.nbytes and block.untyped_storage()._cdata not in staying:
                self._released[name] = block.untyped_storage().nbytes()  # first: restoring twice does no harm
                self._backend.release(block)
        return sum(self._released.values())

    def restore(self) -> int:
        """Take the memory again that :meth:`release` freed; return its bytes. The old values are lost.

        Raises:
            DeviceMemoryError: another program holds the memory now. The part that was taken again is freed.
        """
        done: dict[str, int] = {}
        try:
            for name, num_bytes in self._released.items():
                self._backend.restore(self._blocks[name][1], num_bytes)
                done[name] = num_bytes
        except (MemoryError, RuntimeError) as error:
            for name in done:
                self._backend.release(self._blocks[name][1])
            left = sum(self._released.values())
            raise self._error("parked memory", left) from error
        self._released.clear()
        return sum(done.values())

    def _error(self, name: str, num_bytes: int) -> DeviceMemoryError:
        return DeviceMemoryError(self.tier, name, num_bytes, self.capacity_bytes, self.by_class())


@dataclasses.dataclass(frozen=True, slots=True)
class MeasuredMemory:
    """The measured memory of a tier.

    Attributes:
        static_bytes: allocated once, by class.
        dynamic_peak_bytes: peak of all other memory inside :meth:`Session.metered`; ``None`` if not measured.
        dynamic_bytes_of: the same peak during each of the caller's tasks, by the task's index.
        allocator: see :meth:`executor.devices.backend.HostBackend.allocator_counts`.
    """

    static_bytes: Mapping[MemoryClass, int]
    dynamic_peak_bytes: int | None = None
    dynamic_bytes_of: Mapping[int, int] = dataclasses.field(default_factory=dict)
    allocator: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def peak_bytes(self) -> int:
        """Peak of static and dynamic memory together."""
        return sum(self.static_bytes.values()) + (self.dynamic_peak_bytes or 0)


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
