"""Some of a plan's ranks, which run collectives together."""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, final

import torch
import torch.distributed as dist

# torch renames these in 2.13 and deprecates the old names; they are there from 1.13 on.
_all_gather: Final[Callable[..., Any]] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Final[Callable[..., Any]] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Wait(Protocol):
    """Begins a collective and waits, not for ever: [Note: Failed ranks] in :mod:`executor.distributed.watchdog`."""

    def __call__(self, group: dist.ProcessGroup, begin: Callable[[], Any]) -> None:
        """Begin a collective of a group, and wait for it.

        Raises:
            RankError: a rank has failed. So do all methods of :class:`Group`.
        """
        ...


@final
class Group:
    """Some ranks as one of them sees them; one that is alone has nothing to exchange.

    What works on the device's tensors is for one thread at a time, and so is :meth:`all_gather_on_host`, beside it.

    Args:
        ranks: their numbers among all.
        rank: this one's.
        device: who runs collectives on the device; ``None`` where the rank is alone.
        hosts: who runs them over the hosts.
        on_device: whether the device is not the host.
        wait: for a collective.

    Attributes:
        rank, size: this rank among them, and how many there are.
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
        self._ranks = ranks
        self._on_device = on_device
        self._device, self._hosts = device, hosts
        self._wait = wait

    def all_gather(self, whole: torch.Tensor, own: torch.Tensor) -> None:
        """Fill ``whole``, ``[size * n]``, with every rank's ``own``, ``[n]``, which may be its place in it."""
        if (group := self._device) is None:
            whole.copy_(own)
        else:
            self._wait(group, lambda: _all_gather(whole, own, group=group, async_op=True))

    def all_reduce(self, values: torch.Tensor) -> None:
        """Replace ``values`` by the sum of all ranks' in their own type; the same bits on all ranks."""
        self._reduce(values, dist.ReduceOp.SUM)

    def all_reduce_max(self, values: torch.Tensor) -> None:
        """Replace ``values`` by the greatest of all ranks', element by element."""
        self._reduce(values, dist.ReduceOp.MAX)

    def reduce_scatter(self, own: torch.Tensor, values: torch.Tensor) -> None:
        """Set ``own``, ``[n]``, to this rank's part of the sum of all ranks' ``values``, ``[size * n]``, in their type.

        ``values`` may be overwritten. On hosts the whole is added up: gloo's own reduce-scatter, where a version of
        torch has it, takes longer than that (and did just that before).
        """
        if (group := self._device) is not None and self._on_device:
            self._wait(group, lambda: _reduce_scatter(own, values, group=group, async_op=True))
        else:
            self.all_reduce(values)
            own.copy_(values[self.rank * len(own) : (self.rank + 1) * len(own)])

    def all_to_all(
        self, received: torch.Tensor, sent: torch.Tensor, num_received: Sequence[int], num_sent: Sequence[int]
    ) -> None:
        """Give every rank its rows of ``sent``, and take those that it has for this one, each in the order of ranks.

        Args:
            received: ``[sum(num_received), ...]``, contiguous.
            sent: ``[sum(num_sent), ...]``, contiguous.
            num_received: rows from each rank.
            num_sent: rows for each rank.
        """
        if (group := self._device) is None:
            received.copy_(sent)
            return
        counts = list(num_received), list(num_sent)
        self._wait(group, lambda: dist.all_to_all_single(received, sent, *counts, group=group, async_op=True))

    def all_gather_on_host(self, own: torch.Tensor) -> torch.Tensor:
        """Return every rank's ``own``, ``[n]``, one behind the other, in host memory, ``[size * n]``."""
        own = own.to("cpu").contiguous()
        if (group := self._hosts) is None:
            return own
        whole = torch.empty(self.size * len(own), dtype=own.dtype)
        self._wait(group, lambda: _all_gather(whole, own, group=group, async_op=True))
        return whole

    def broadcast(self, values: torch.Tensor) -> torch.Tensor:
        """Return the first rank's values, in host memory, where this one has a tensor of the same shape and type."""
        values = values.to("cpu", copy=True).contiguous()
        if (group := self._hosts) is not None and values.numel():
            as_bytes = values.view(-1).view(torch.uint8)  # gloo does not take all types
            self._wait(group, lambda: dist.broadcast(as_bytes, self._ranks[0], group, async_op=True))
        return values

    def barrier(self) -> None:
        """Wait until all have come here."""
        if (group := self._hosts) is not None:
            self._wait(group, lambda: dist.barrier(group=group, async_op=True))

    def forget(self, group: dist.ProcessGroup) -> None:
        """Forget who ran collectives, as it is destroyed; its connections close when nobody has it any more."""
        self._device = None if self._device is group else self._device
        self._hosts = None if self._hosts is group else self._hosts

    def check_same(self, what: str, value: bytes) -> None:
        """Check that all have the same value; as :meth:`all_gather_on_host` does, over the hosts.

        Raises:
            ValueError: they do not.
        """
        digests = self._digests(value)
        different = [rank for rank, its in digests.items() if not torch.equal(its, digests[self._ranks[0]])]
        if different:
            names = f"rank {different[0]} has another {what} than rank {self._ranks[0]}"
            raise ValueError(f"{names}; give the same to ranks {', '.join(map(str, self._ranks))}")

    def ranks_with_same(self, value: bytes) -> list[int]:
        """Return the ranks that have the same value as this one, by their numbers among all, in order."""
        digests = self._digests(value)
        own = digests[self._ranks[self.rank]]
        return [rank for rank, its in digests.items() if torch.equal(its, own)]

    def _digests(self, value: bytes) -> dict[int, torch.Tensor]:
        digest = torch.frombuffer(bytearray(hashlib.sha256(value).digest()), dtype=torch.uint8)
        return dict(zip(self._ranks, self.all_gather_on_host(digest).view(self.size, -1), strict=True))

    def _reduce(self, values: torch.Tensor, op: dist.ReduceOp.RedOpType) -> None:
        if (group := self._device) is not None:
            self._wait(group, lambda: dist.all_reduce(values, op=op, group=group, async_op=True))
