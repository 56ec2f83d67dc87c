"""Adds gradients of several micro-batches up in host memory, behind the copies that bring them from a GPU.

A copy brings a part of a gradient into one of a few pinned buffers, and a thread adds it to the sum from
there, while the next parts are copied: to the sum itself the GPU cannot add. So the lane of the copies is done as soon
as the last part is on its way, and the device's memory with it; it waits only where all buffers are full. Whoever reads
a sum on the host calls :meth:`HostSums.settle` first. Copies to memory that is not pinned would take twice as long.
"""

import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import torch

from executor.devices.backend import add_on_host
from executor.optimizer.workers import WorkerTeam

Pair = tuple[torch.Tensor, torch.Tensor]
"""A flat sum in host memory, and what is added to it."""

BUFFER_BYTES: Final = 64 << 20
"""Of one buffer: threads take about as long to start as to add a hundredth of it."""
NUM_BUFFERS: Final = 4


_Wait = Callable[[], object]
"""Lets the calling thread wait until a copy has ended."""

_Copied = queue.Queue[tuple[list[Pair], _Wait, torch.Tensor] | None]
"""What has been copied, or is on its way."""


class HostSums:
    """Sums of one process, and the thread that adds. Its threads are its own: those of updates may be busy for long.

    Args:
        memory: uint8, pinned, for the buffers; the ledger does not count it, like the driver's memory.
        num_threads: number of threads that add.
    """

    def __init__(self, memory: torch.Tensor, num_threads: int) -> None:
        self._free: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        for buffer in memory.view(NUM_BUFFERS, -1):
            self._free.put(buffer)
        self._copied: _Copied = queue.Queue()
        self._failures: list[BaseException] = []
        args = self._copied, self._free, self._failures, num_threads
        threading.Thread(target=_add, args=args, name="adding gradients", daemon=True).start()
        weakref.finalize(self, self._copied.put, None)

    def add(self, sums: Sequence[Pair], arrival: Callable[[], _Wait]) -> None:
        """Copy gradients on the current stream, and let them be added. Waits only for a buffer.

        Args:
            sums: all of one type.
            arrival: returns what waits for the copies so far.
        """
        for parts in batches(sums, BUFFER_BYTES // sums[0][1].itemsize):
            buffer = self._free.get()
            space, end, passed = buffer.view(parts[0][1].dtype), 0, list[Pair]()
            for total, values in parts:
                end += len(values)
                passed.append((total, space[end - len(values) : end]))
                passed[-1][1].copy_(values, non_blocking=True)
            self._copied.put((passed, arrival(), buffer))

    def settle(self) -> None:
        """Wait until all that was copied has been added.

        Raises:
            BaseException: whatever adding failed with.
        """
        if self._copied.unfinished_tasks:
            self._copied.join()
        if self._failures:
            raise self._failures[0]


def _add(
    copied: _Copied, free: "queue.SimpleQueue[torch.Tensor]", failures: list[BaseException], num_threads: int
) -> None:
    """Add what has been copied, in that order, until there is a ``None``. After a failure, nothing is added."""
    with WorkerTeam(num_threads) as team:
        while (found := copied.get()) is not None:
            passed, wait, buffer = found
            try:
                if not failures:
                    wait()
                    add_on_host(passed, team)
            except BaseException as error:  # noqa: BLE001 - whoever reads a sum raises it
                failures.append(error)
            del found, passed, wait  # which keep an event from being used again, and the sums' memory
            free.put(buffer)
            copied.task_done()


def batches(sums: Sequence[Pair], num_items: int) -> Iterator[list[Pair]]:
    """Yield flat pairs, cut so that each batch has at most so many items."""
    batch: list[Pair] = []
    room = num_items
    for total, values in sums:
        start = 0
        while start < len(values):
            part = slice(start, start + room)
            batch.append((total[part], values[part]))
            room -= len(batch[-1][1])
            start = part.stop
            if not room:
                yield batch
                batch, room = [], num_items
    if batch:
        yield batch
