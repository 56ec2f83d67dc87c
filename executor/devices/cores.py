"""Divides CPU cores among ranks, and among the threads of a rank.

[Note: Shares of cores] If ranks of one machine may use the same cores, they divide them evenly, in the order of
packages and physical cores. So both hardware threads of a core belong to one rank, and a rank is near its own memory.
If ranks were given different cores (by ``srun --cpu-bind``, ``numactl`` or containers), they keep them. The whole
process is bound: existing threads of libraries (OpenMP, BLAS, autograd) move too, and new threads inherit the binding.
Updates leave some cores free for the threads that issue work to a GPU; otherwise those threads could not run. If the
CPU is the device, updates leave cores free for the threads that compute.
"""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, Self

import torch

from executor.distributed.ranks import Ranks
from executor.distributed.watchdog import this_machine
from hwprofiles.machine import num_issuing_cores
from planner.terms import CoreChoice

_SYSTEM: Final = Path("/sys/devices/system/cpu")
_THREADS: Final = Path("/proc/self/task")


@dataclasses.dataclass(frozen=True)
class Cores:
    """A rank's cores.

    Attributes:
        own: numbers of the cores.
        num_issuing: number of cores for threads that issue work to a GPU, or that compute if the CPU is the device.
        num_updating: number of threads that update. If a GPU computes and the process is bound, each of them is bound
            to one of the last cores.
        is_bound: whether the process is bound to these cores.
        on_device: whether a GPU computes.
    """

    own: tuple[int, ...]
    num_issuing: int
    num_updating: int
    is_bound: bool
    on_device: bool

    @classmethod
    def of(cls, own: Sequence[int], most_threads: int | None, *, is_bound: bool, on_device: bool) -> Self:
        """Divide a rank's cores among its threads. At most ``most_threads`` threads update."""
        count = len(own)
        num_issuing = num_issuing_cores(count) if on_device else min(torch.get_num_threads(), count)
        room = max(count - num_issuing, 1)
        return cls(tuple(own), num_issuing, min(most_threads or room, room), is_bound, on_device)

    @property
    def of_updates(self) -> tuple[int, ...] | None:
        """The core of each thread that updates; ``None`` if these threads are not bound."""
        return self.own[len(self.own) - self.num_updating :] if self.is_bound and self.on_device else None

    def __str__(self) -> str:
        """Return the cores and their division, in words."""
        issue = "issue" if self.on_device else "compute"
        where = f"cores {ranges(self.own)}" if self.is_bound else f"{len(self.own)} cores"
        return f"{where}: {self.num_issuing} {issue}, {self.num_updating} update"


def divide(cores: Sequence[int], position: int, count: int) -> tuple[int, ...]:
    """Divide cores into ``count`` parts, and return part ``position``.

    With fewer cores than parts, parts share cores.
    """
    if len(cores) < count:
        return (cores[position % len(cores)],)
    return tuple(cores[len(cores) * position // count : len(cores) * (position + 1) // count])


def in_order(cores: Iterable[int], system: Path = _SYSTEM) -> list[int]:
    """Return cores sorted by package, then by physical core."""

    def place(core: int) -> tuple[int, int, int]:
        def number(name: str) -> int:
            with contextlib.suppress(OSError, ValueError):
                return int((system / f"cpu{core}" / "topology" / name).read_text(encoding="ascii"))
            return 0

        return number("physical_package_id"), number("core_id"), core

    return sorted(cores, key=place)


def ranges(cores: Iterable[int]) -> str:
    """Return cores as ``0-3,8``."""
    found: list[list[int]] = []
    for core in sorted(cores):
        if found and core == found[-1][1] + 1:
            found[-1][1] = core
        else:
            found.append([core, core])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in found)


def open_cores() -> frozenset[int]:
    """Return the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def take_cores(
    choice: CoreChoice, most_threads: int | None, ranks: Ranks | None, *, on_device: bool
) -> tuple[Cores, Callable[[], None]]:
    """Take a rank's share of the cores, see [Note: Shares of cores]; all ranks call this together.

    Args:
        choice: the cores to divide.
        most_threads: at most so many threads update; ``None``: one per core.
        ranks: all ranks; ``None`` if there is only one.
        on_device: whether a GPU computes.

    Returns:
        The share, and a function that removes the binding.

    Raises:
        ValueError: this process may not use some of the chosen cores, or the choice is empty.
    """
    allowed = open_cores()
    if isinstance(choice, tuple):
        if not choice or not allowed.issuperset(choice):
            raise ValueError(
                f"cores are {ranges(choice) or '(none)'}, but this process may use {ranges(allowed)}; choose from "
                "those, or leave cores out"
            )
        allowed = frozenset(choice)
    sharing = [0] if ranks is None else ranks.everybody.ranks_with_same(f"{this_machine()} {ranges(allowed)}".encode())
    position = 0 if ranks is None else sharing.index(ranks.process)
    is_bound = choice != "free" and (len(sharing) > 1 or choice != "auto") and hasattr(os, "sched_setaffinity")
    own = divide(in_order(allowed), position, len(sharing))
    cores = Cores.of(own, most_threads, is_bound=is_bound, on_device=on_device)
    num_threads = torch.get_num_threads()
    if len(sharing) > 1:
        torch.set_num_threads(max(min(num_threads, cores.num_issuing), 1))
    unbind = _bind(cores.own) if is_bound else lambda: None

    def give_back() -> None:
        torch.set_num_threads(num_threads)
        unbind()

    return cores, give_back


def _bind(cores: Sequence[int]) -> Callable[[], None]:
    """Bind new threads, and all threads without a binding of their own; return a function that removes the binding."""
    before = open_cores()
    masks = {thread: mask for thread in _threads() if (mask := _mask(thread)) is not None}
    _set({thread: frozenset(cores) for thread, mask in masks.items() if mask == before})

    def undo() -> None:
        _set({thread: masks.get(thread, before) for thread in _threads()})

    return undo


def _threads() -> list[int]:
    return [int(entry.name) for entry in _THREADS.iterdir()] if _THREADS.exists() else [0]


def _mask(thread: int) -> frozenset[int] | None:
    with contextlib.suppress(OSError):  # the thread has ended
        return frozenset(os.sched_getaffinity(thread))
    return None


def _set(masks: Mapping[int, frozenset[int]]) -> None:
    for thread, mask in masks.items():
        with contextlib.suppress(OSError):
            os.sched_setaffinity(thread, mask)
