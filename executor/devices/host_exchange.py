"""Collectives of ranks on one machine, through host memory that they share.

[Note: Through the host] Where devices have no link of their own, NCCL copies between them through the host with kernels
on the device, at a fraction of what the link moves: 2.9 of 25 GB/s between eight RTX 4090. The copy engines move as
much as the link does. So each rank copies its part to memory that all ranks of the machine have mapped, and copies from
there what it needs of the others' parts. Sums are added up on the device in fp32, each by one rank, so that all ranks
have the same bits.

Parts go in rounds, through two halves of a rank's memory in turn. In round ``k`` a rank copies from the others what
they wrote in it, and at the same time writes its own part of round ``k + 1`` to its other half. Then it tells the
others. When all have told it that they have written round ``k + 1``, all have also read round ``k``, so the half of
round ``k`` is free again for round ``k + 2``. Rounds are counted on over all collectives of a group, so that nobody
waits at the end of one.

Ranks tell each other through sockets of the machine. So a thread that waits takes no time from others, what was written
before a message is seen by whoever receives it, and whoever waits for a rank that has ended learns it at once.
"""

import contextlib
import itertools
import mmap
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from typing import Final, final

import numpy as np
import numpy.typing as npt
import torch

from executor.devices.backend import Backend
from executor.distributed.groups import Group
from executor.distributed.ranks import Ranks
from executor.distributed.watchdog import RankError

_POLL_S: Final = 0.1  # how often a thread that waits checks whether a rank has failed
_CONNECT_S: Final = 10.0
_NAME_BYTES: Final = 64

Copies = list[tuple[torch.Tensor, torch.Tensor]]
"""Pairs of a destination and a source."""


@final
class HostExchange:
    """Collectives of a group of ranks through shared memory; see [Note: Through the host].

    All ranks of the group construct it together, and call its methods in one order, each in one thread at a time.

    Args:
        group: the ranks.
        num_bytes: what a rank writes in a round, at most; the same on all ranks. It has two halves of this size.
        backend: the device.
        ranks: all ranks.

    Attributes:
        own_memory: uint8, this rank's part of the memory.

    Raises:
        ValueError: the ranks are not on one machine.
        RankError: a rank has failed. All methods raise it too.
    """

    def __init__(self, group: Group, num_bytes: int, backend: Backend, ranks: Ranks) -> None:
        self._rank, self._size = group.rank, group.size
        self._num_bytes, self._backend, self._ranks = num_bytes, backend, ranks
        self._round = 0
        self._others: dict[int, socket.socket] = {}
        with self._all_agree(group):
            self._connect(group)
            shared = self._map()
            self.own_memory = torch.from_numpy(shared).view(self._size, -1)[self._rank]
            backend.claim(self.own_memory)  # whoever touches memory first has it nearby
        with self._all_agree(group):  # pinning touches that of all ranks
            self._halves = backend.pinned(shared).view(self._size, 2, num_bytes)

    def all_gather(self, whole: torch.Tensor, own: torch.Tensor) -> None:
        """Fill ``whole``, ``[size * n]``, with every rank's ``own``, ``[n]``. ``own`` may be a view of ``whole``."""
        parts = self._divided(whole)
        if (mine := parts[self._rank]).data_ptr() != own.data_ptr():
            self._backend.copy(mine, own)
        self._gather(parts)

    def all_reduce(self, values: torch.Tensor) -> None:
        """Replace ``values``, ``[n]``, by the sum over all ranks."""
        parts = self._divided(values)
        self._reduce(parts, parts[self._rank])
        self._gather(parts)

    def reduce_scatter(self, own: torch.Tensor, values: torch.Tensor) -> None:
        """Set ``own``, ``[n]``, to this rank's part of the sum of all ranks' ``values``, ``[size * n]``."""
        self._reduce(self._divided(values), own)

    def close(self) -> None:
        """Close the connections. The memory goes with the last reference to it."""
        for other in self._others.values():
            other.close()
        self._others.clear()

    @contextlib.contextmanager
    def _all_agree(self, group: Group) -> Iterator[None]:
        """Return a context that ends when all ranks have come to its end, with an error if one has failed there."""
        try:
            with group.together(OSError("one of them cannot"), (OSError, MemoryError)):
                yield
        except RankError:
            raise
        except (OSError, MemoryError) as failure:
            self.close()
            raise ValueError(
                f"ranks cannot share host memory ({failure}), as if they were on several machines, or were short of "
                "it; plan with --parallel collectives=fabric (ullage.prepare: collectives='fabric')"
            ) from failure

    def _divided(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Return each rank's part, of which the last ones may be shorter."""
        length = -(-len(values) // self._size)
        return [values[rank * length : (rank + 1) * length] for rank in range(self._size)]

    def _gather(self, parts: list[torch.Tensor]) -> None:
        """Fill all parts but this rank's own with those of their ranks."""
        most = self._num_bytes // parts[0].itemsize
        cuts = [slice(start, start + most) for start in range(0, len(parts[0]), most)]

        def written(cut: slice) -> Copies:
            return [(self._half(self._rank, parts[self._rank][cut]), parts[self._rank][cut])]

        def read(cut: slice) -> Copies:
            return [(parts[q][cut], self._half(q, parts[q][cut])) for q in self._others]

        for _ in self._rounds(cuts, written, read):
            pass

    def _reduce(self, parts: list[torch.Tensor], own: torch.Tensor) -> None:
        """Set ``own`` to the sum of all ranks' values of this rank's part; it may be that part."""
        most = max(self._num_bytes // (self._size * own.itemsize), 1)
        cuts = [slice(start, start + most) for start in range(0, len(parts[0]), most)]
        mine = parts[self._rank]
        rows = self._backend.scratch(self._size * min(most, len(parts[0])), own.dtype).view(self._size, -1)

        def written(cut: slice) -> Copies:
            return [(self._half(self._rank, parts[q][cut], q * most), parts[q][cut]) for q in self._others]

        def read(cut: slice) -> Copies:
            count = len(mine[cut])
            copies = [(rows[q, :count], self._half(q, mine[cut], self._rank * most)) for q in self._others]
            return [*copies, (rows[self._rank, :count], mine[cut])]

        for cut in self._rounds(cuts, written, read):
            count = len(mine[cut])
            self._backend.sum_rows(own[cut], rows[:, :count])

    def _half(self, rank: int, like: torch.Tensor, start: int = 0) -> torch.Tensor:
        """Return memory of a rank for the round under way, from an item on, for values of this type and number."""
        half = self._halves[rank, self._round % 2, start * like.itemsize :][: like.nbytes]
        return half.view(like.dtype)

    def _rounds(
        self, cuts: list[slice], written: Callable[[slice], Copies], read: Callable[[slice], Copies]
    ) -> Iterator[slice]:
        """Copy in rounds, one for each cut; yield it when what others wrote in it has been read."""
        if not cuts:
            return
        self._copy(written(cuts[0]), [])
        self._tell()
        for cut, following in itertools.zip_longest(cuts, cuts[1:]):
            self._hear()
            reading = read(cut)
            self._round += 1
            self._copy(written(following) if following is not None else [], reading)
            if following is not None:
                self._tell()
            yield cut

    def _copy(self, up: Copies, down: Copies) -> None:
        self._backend.copy_both_ways([pair for pair in up if len(pair[0])], [pair for pair in down if len(pair[0])])

    def _tell(self) -> None:
        try:
            for other in self._others.values():
                other.sendall(b"+")
        except OSError as error:
            raise self._ranks.watchdog.explain(error) from error

    def _hear(self) -> None:
        for other in self._others.values():
            while True:
                try:
                    told = other.recv(1)
                except TimeoutError:
                    self._ranks.check()
                    continue
                except OSError as error:
                    raise self._ranks.watchdog.explain(error) from error
                if not told:
                    raise self._ranks.watchdog.explain(ConnectionResetError("a rank has closed its connection"))
                break

    def _connect(self, group: Group) -> None:
        """Connect to all ranks of the group: to those before this one, and then from those behind it."""
        name = f"\0ullage {os.getpid()} {secrets.token_hex(8)}".encode().ljust(_NAME_BYTES, b".")
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(name)
            listening.listen(self._size)
            listening.settimeout(_POLL_S)
            every = group.all_gather_on_host(torch.frombuffer(bytearray(name), dtype=torch.uint8))
            names = [bytes(each.tolist()) for each in every.view(self._size, _NAME_BYTES)]
            for rank in range(self._rank):
                other = self._others[rank] = socket.socket(socket.AF_UNIX)
                other.connect(names[rank])
                other.sendall(bytes([self._rank % 256, self._rank // 256]))
            end_s = time.monotonic() + _CONNECT_S
            while len(self._others) < self._size - 1:
                with contextlib.suppress(TimeoutError):
                    other, _ = listening.accept()
                    low, high = other.recv(2, socket.MSG_WAITALL)
                    self._others[low + 256 * high] = other
                self._ranks.check()
                if time.monotonic() > end_s:
                    raise OSError("a rank has not connected")
        self._others = dict(sorted(self._others.items()))
        for other in self._others.values():
            other.settimeout(_POLL_S)

    def _map(self) -> npt.NDArray[np.uint8]:
        """Map the memory of all ranks, which the first rank makes. It has no name, so nothing is left of it."""
        total_bytes = self._size * 2 * self._num_bytes
        if self._rank == 0:
            handle = os.memfd_create("ullage collectives")
            os.ftruncate(handle, total_bytes)
            for other in self._others.values():
                socket.send_fds(other, [b"m"], [handle])
        else:
            self._others[0].settimeout(_CONNECT_S)
            _, (handle,), _, _ = socket.recv_fds(self._others[0], 1, 1)
            self._others[0].settimeout(_POLL_S)
        try:
            memory = mmap.mmap(handle, total_bytes, mmap.MAP_SHARED)
        finally:
            os.close(handle)
        memory.madvise(mmap.MADV_DONTFORK)
        with contextlib.suppress(OSError):  # where the system has no large pages for shared memory
            memory.madvise(mmap.MADV_HUGEPAGE)
        return np.frombuffer(memory, np.uint8)
