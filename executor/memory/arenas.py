"""Memory that is taken once, as a plan says, with a ledger."""

import dataclasses
from collections import defaultdict
from collections.abc import Mapping
from typing import Final, final

import torch

from executor.devices.backend import Backend
from planner.schedule.tasks import MemoryClass, Tier

ALIGNMENT_BYTES: Final = 64
"""Blocks start at multiples of this: a cache line, and what vector kernels like best."""


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryShortage:
    """Why an arena gave nothing, in numbers; as a string, in words.

    Attributes:
        tier: whose memory it is.
        name, asked_bytes: the block that was asked for.
        capacity_bytes: what may be taken in all; ``None``: what the machine has.
        held_bytes: what had been taken before, by what it is for.
    """

    tier: Tier
    name: str
    asked_bytes: int
    capacity_bytes: int | None
    held_bytes: Mapping[MemoryClass, int]

    def __str__(self) -> str:
        free_bytes = None if self.capacity_bytes is None else self.capacity_bytes - sum(self.held_bytes.values())
        limit = "no limit set" if self.capacity_bytes is None else f"{self.capacity_bytes:,} B capacity"
        free = "" if free_bytes is None else f", {free_bytes:,} B free"
        held = "; ".join(f"{c} {n:,} B" for c, n in sorted(self.held_bytes.items())) or "nothing"
        return (
            f"the {self.tier} is out of memory: {self.name} asks for {self.asked_bytes:,} B ({limit}{free}); held so "
            f"far: {held}. Plan for the memory that is really free, or move more of the plan to another tier"
        )


class DeviceMemoryError(MemoryError):
    """A plan asks for more memory than a tier has; the message shows who holds what.

    Its one argument is the :class:`MemoryShortage`.
    """


@final
class Arena:
    """Named blocks of one tier, taken once and at exactly the size asked for, with a ledger.

    Args:
        tier: whose memory this is.
        capacity_bytes: what may be taken in all; ``None`` leaves the limit to the machine.
        backend: where memory comes from.
    """

    def __init__(self, tier: Tier, capacity_bytes: int | None, backend: Backend) -> None:
        self.tier = tier
        self.capacity_bytes = capacity_bytes
        self._backend = backend
        self._blocks: dict[str, tuple[dict[MemoryClass, int], torch.Tensor]] = {}  # bytes by class

    @property
    def used_bytes(self) -> int:
        """Bytes taken so far."""
        return sum(self.by_class().values())

    def by_class(self) -> dict[MemoryClass, int]:
        """Return the bytes taken so far by what they are for."""
        totals: dict[MemoryClass, int] = defaultdict(int)
        for num_bytes, _ in self._blocks.values():
            for memory_class, count in num_bytes.items():
                totals[memory_class] += count
        return dict(totals)

    def take(self, name: str, memory_class: MemoryClass, num_items: int, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised block ``[num_items]``, aligned to :data:`ALIGNMENT_BYTES`.

        Raises:
            DeviceMemoryError: it does not fit; nothing is taken.
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
        """Return one uninitialised block, uint8, for several purposes.

        Args:
            name: of the block.
            num_bytes_of: bytes by what they are for.
            block_bytes: it is aligned to this. If that is more than :data:`ALIGNMENT_BYTES`, what it has is rounded up
                to a multiple of this too; neither is in the ledger, as both are less than two such blocks.
            room_bytes: what it has where it is of several parts, each of which is rounded up; not in the ledger either.
            shift_bytes: it begins so far behind such a multiple, less than one.

        Raises:
            DeviceMemoryError: it does not fit; nothing is taken.
        """
        assert name not in self._blocks, name
        num_bytes = sum(num_bytes_of.values())
        if self.capacity_bytes is not None and self.used_bytes + num_bytes > self.capacity_bytes:
            raise DeviceMemoryError(self._message(name, num_bytes))
        whole = block_bytes > ALIGNMENT_BYTES
        room = max(-(-num_bytes // block_bytes) * block_bytes if whole else num_bytes, room_bytes)
        try:
            block = self._backend.empty(room + (block_bytes if whole else 0), on_device=self.tier is Tier.GPU)
        except (MemoryError, RuntimeError, OSError) as error:  # as Python, torch and the system (mmap) report it
            raise DeviceMemoryError(self._message(name, num_bytes)) from error
        block = block[(shift_bytes - block.data_ptr()) % block_bytes if whole else 0 :][:room]
        assert not room or (block.data_ptr() - shift_bytes) % block_bytes == 0
        self._blocks[name] = (dict(num_bytes_of), block)
        return block

    def clear(self) -> None:
        """Give all blocks up. What still views them keeps them."""
        self._blocks.clear()

    def _message(self, name: str, num_bytes: int) -> MemoryShortage:
        return MemoryShortage(self.tier, name, num_bytes, self.capacity_bytes, self.by_class())


@dataclasses.dataclass(frozen=True, slots=True)
class MeasuredMemory:
    """What a tier has really held.

    Attributes:
        static_bytes: taken once, by class.
        dynamic_peak_bytes: most that came on top of it inside :meth:`Session.metered`; ``None`` if not measured.
        dynamic_bytes_of: the same while each of the caller's tasks was under way, by its index.
    """

    static_bytes: Mapping[MemoryClass, int]
    dynamic_peak_bytes: int | None = None
    dynamic_bytes_of: Mapping[int, int] = dataclasses.field(default_factory=dict)

    @property
    def peak_bytes(self) -> int:
        """Most held in all."""
        return sum(self.static_bytes.values()) + (self.dynamic_peak_bytes or 0)
