"""A group of ranks, and its collectives."""

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, final

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from executor.distributed.watchdog import RankError

# torch 2.13 renames these functions and deprecates the old names, which exist since 1.13.
all_gather_single: Final[Callable[..., Any]] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Final[Callable[..., Any]] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


Wait = Callable[[dist.ProcessGroup, Callable[[], Any]], None]
"""Begins a collective of a group and waits for it; see [Note: Failed ranks] in :mod:`executor.distributed.watchdog`.

If a rank has failed, it raises ``RankError``, and so do all methods of :class:`Group`.
"""


@final
class Group:
    """A group of ranks, seen from one of them. If it has one rank, collectives return at once.

    One thread at a time may call the methods that take tensors on the device. At the same time, another thread may call
    the other methods.

    Args:
        ranks: global numbers of the group's ranks.
        rank: global number of this rank.
        device: process group for tensors on the device; ``None`` if the group has one rank.
        hosts: process group for tensors in host memory; ``None`` if the group has one rank.
        on_device: whether the device is a GPU.
        wait: begins a collective and waits for it.

    Attributes:
        rank, size: this rank's number within the group, and the group's number of ranks.
        first: global number of the group's first rank.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        *,
        device: dist.ProcessGroup | None,
        hosts: dist.ProcessGroup | None,
        on_device: bool,
        wait: Wait,
    ) -> None:
        self.rank, self.size = ranks.index(rank), len(ranks)
        self._ranks, self.first = ranks, ranks[0]
        self._on_device = on_device
        self._device, self._hosts = device, hosts
        self._wait = wait

    def all_gather(self, whole: torch.Tensor, own: torch.Tensor) -> None:
        """Fill ``whole``, ``[size * n]``, with every rank's ``own``, ``[n]``. ``own`` may be a view of ``whole``."""
        if (group := self._device) is None:
            whole.copy_(own)
        else:
            self._wait(group, lambda: all_gather_single(whole, own, group=group, async_op=True))

    def all_reduce(self, values: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        """Replace ``values`` by the sum or maximum over all ranks, in their own type, with the same bits everywhere."""
        if (group := self._device) is not None:
            self._wait(group, lambda: dist.all_reduce(values, op=op, group=group, async_op=True))

    def send(self, values: torch.Tensor, sender: int) -> None:
        """Fill ``values`` on all ranks with those of the rank with number ``sender`` in the group."""
        if (group := self._device) is not None:
            self._wait(group, lambda: dist.broadcast(values, self._ranks[sender], group, async_op=True))

    def reduce_scatter(self, own: torch.Tensor, values: torch.Tensor) -> None:
        """Set ``own``, ``[n]``, to this rank's part of the sum of all ranks' ``values``, ``[size * n]``, in their type.

        It may overwrite ``values``. On hosts it all-reduces: gloo's own reduce-scatter, if this version of torch has
        it, takes longer.
        """
        if (group := self._device) is not None and self._on_device:
            self._wait(group, lambda: reduce_scatter_single(own, values, group=group, async_op=True))
        else:
            self.all_reduce(values)
            own.copy_(values[self.rank * len(own) : (self.rank + 1) * len(own)])

    def all_to_all(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        num_received: Sequence[int],
        num_sent: Sequence[int],
        *,
        on_host: bool = False,
    ) -> None:
        """Send every rank its rows of ``sent``, and receive the rows for this rank, in the order of ranks.

        Args:
            received: ``[sum(num_received), ...]``, contiguous.
            sent: ``[sum(num_sent), ...]``, contiguous.
            num_received: rows from each rank.
            num_sent: rows for each rank.
            on_host: whether they are in host memory.
        """
        if (group := self._hosts if on_host else self._device) is None:
            received.copy_(sent)
            return
        counts = list(num_received), list(num_sent)
        self._wait(group, lambda: dist.all_to_all_single(received, sent, *counts, group=group, async_op=True))

    def all_gather_on_host(self, own: torch.Tensor) -> torch.Tensor:
        """All-gather every rank's ``own``, ``[n]``, and return them concatenated in host memory, ``[size * n]``."""
        own = own.to("cpu").contiguous()
        if (group := self._hosts) is None:
            return own
        whole = torch.empty(self.size * len(own), dtype=own.dtype, device="cpu")
        self._wait(group, lambda: all_gather_single(whole, own, group=group, async_op=True))
        return whole

    def broadcast(self, values: torch.Tensor) -> torch.Tensor:
        """Return the first rank's values, in host memory. Every rank passes a tensor of the same shape and type."""
        values = values.to("cpu", copy=True).contiguous()
        if (group := self._hosts) is not None and values.numel():
            as_bytes = values.view(-1).view(torch.uint8)  # gloo does not take all types
            self._wait(group, lambda: dist.broadcast(as_bytes, self._ranks[0], group, async_op=True))
        return values

    def broadcast_text(self, make: Callable[[], str]) -> str:
        """Return the text that the first rank makes, while the others wait. The text must not be empty."""
        if self.size == 1:
            return make()
        values = torch.frombuffer(bytearray(make().encode()), dtype=torch.uint8) if self.rank == 0 else torch.empty(0)
        count = int(self.broadcast(torch.tensor(len(values), device="cpu")))
        text = self.broadcast(values if self.rank == 0 else torch.empty(count, dtype=torch.uint8, device="cpu"))
        return bytes(text.tolist()).decode()

    def means(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the elementwise mean of all ranks' arrays, of one shape. The group is one over host memory alone.

        That holds for :meth:`mean` and :meth:`any`, too.
        """
        if self.size == 1:
            return values
        total = torch.tensor(values, dtype=torch.float64, device="cpu")
        self.all_reduce(total)
        return total.numpy() / self.size

    def mean(self, value: float) -> float:
        """Return the mean of all ranks' values."""
        return float(self.means(np.array([value]))[0])

    def any(self, value: bool) -> bool:
        """Return whether ``value`` is true on any rank."""
        return self.mean(float(value)) > 0

    @contextlib.contextmanager
    def together(
        self, otherwise: Exception, kinds: tuple[type[Exception], ...] = (ValueError, OSError)
    ) -> Iterator[None]:
        """Return a context that all ranks leave well, or none: if one raises in it, all do at its end.

        Args:
            otherwise: raised on ranks where it went well. Write what cannot be done, and that another rank says why.
            kinds: of errors; others are raised at once. When one of these is raised, no collective may be left that
                other ranks begin within the context.
        """
        failure: Exception | None = None
        try:
            yield
        except RankError:  # there is no meeting with a rank that is gone
            raise
        except kinds as error:
            failure = error
        if self.all_gather_on_host(torch.tensor([failure is not None], device="cpu")).any():
            raise failure or otherwise

    def barrier(self) -> None:
        """Wait until all ranks have called this."""
        if (group := self._hosts) is not None:
            self._wait(group, lambda: dist.barrier(group=group, async_op=True))

    def forget(self, group: dist.ProcessGroup) -> None:
        """Drop a process group that is being destroyed. Its connections close with the last reference."""
        self._device = None if self._device is group else self._device
        self._hosts = None if self._hosts is group else self._hosts

    def check_same(self, what: str, value: bytes) -> None:
        """Check that all ranks have the same value.

        Raises:
            ValueError: a rank has another value.
        """
        digests = self._digests(value)
        different = [rank for rank, its in digests.items() if not torch.equal(its, digests[self._ranks[0]])]
        if different:
            names = f"rank {different[0]} has another {what} than rank {self._ranks[0]}"
            raise ValueError(f"{names}; give the same to ranks {', '.join(map(str, self._ranks))}")

    def ranks_with_same(self, value: bytes) -> list[int]:
        """Return the numbers, in the group, of the ranks with the same value as this one, in order."""
        digests = [*self._digests(value).values()]
        return [rank for rank, its in enumerate(digests) if torch.equal(its, digests[self.rank])]

    def _digests(self, value: bytes) -> dict[int, torch.Tensor]:
        digest = torch.frombuffer(bytearray(hashlib.sha256(value).digest()), dtype=torch.uint8)
        return dict(zip(self._ranks, self.all_gather_on_host(digest).view(self.size, -1), strict=True))
