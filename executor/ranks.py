"""The processes that execute a plan together: collectives, and an end for all if one fails.

[Note: Groups] Collectives of the schedule have a process group of their own, which only the thread of the collective
lane uses while an iteration is under way. That lane is first-in first-out and all ranks have the same schedule, so they
call the same collectives in the same order whatever their timing. What the caller's thread needs beside it (norms, the
values that all begin with, saved states) goes through a second group, over the hosts, in the order of the caller's own
program. Nothing else orders collectives, and no collective waits for ever: see [Note: Failed ranks].
"""

import atexit
import contextlib
import datetime as dt
import hashlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, final

import torch
import torch.distributed as dist

from executor.watch import SILENCE_S, RankError, Watch

_POLL_S: Final = 0.1  # how long after another rank's failure a waiting thread notices it
_GRACE_S: Final = 5.0  # in which what was under way when a rank failed ends, as the others leave too
# A limit on honest waiting (a checkpoint on one rank, say); failures end waiting much earlier.
_TIMEOUT: Final = dt.timedelta(minutes=30)

# torch renames these in 2.13 and deprecates the old names; they are there from 1.13 on.
_all_gather: Final[Callable[..., Any]] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Final[Callable[..., Any]] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@final
class Ranks:
    """All ranks of a plan, one process each, as one of them sees them. Made by all at the same time.

    The default process group is the user's, or else is made from the environment that ``torchrun`` sets.

    Args:
        size: how many the plan has.
        device: where the collectives of the schedule work: NCCL on CUDA, gloo elsewhere.
        silence_s: see :data:`executor.watch.SILENCE_S`.

    Attributes:
        rank, size: this rank, and how many there are.

    Raises:
        ValueError: another number of processes was started.
    """

    def __init__(self, size: int, device: torch.device, *, silence_s: float = SILENCE_S) -> None:
        self._made = _join(size)
        self.rank, self.size = dist.get_rank(), size
        self._on_device = device.type == "cuda"
        self._stopped = threading.Event()
        self._under_way: dict[dist.ProcessGroup, threading.Event] = {}  # set when what a group has begun has ended
        store = dist.distributed_c10d._get_default_store()
        prefix = f"ullage {store.add(f'ullage sessions of rank {self.rank}', 1)}"  # all ranks count alike
        self._watch = Watch(dist.distributed_c10d.PrefixStore(prefix, store), self.rank, size, silence_s=silence_s)
        self._lane = dist.new_group(backend="nccl" if self._on_device else "gloo", timeout=_TIMEOUT)
        self._hosts = dist.new_group(backend="gloo", timeout=_TIMEOUT)
        self._groups = [self._lane, self._hosts]
        self._on_failure: Callable[[RankError], None] = lambda _error: None
        self._watch.start(self._failed)
        atexit.register(self._at_exit)

    def watch(self, on_failure: Callable[[RankError], None]) -> None:
        """Have this called, in another thread, as soon as another rank has failed."""
        self._on_failure = on_failure
        self._watch.check()  # it may have been too early for that

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Tell the others of what goes wrong inside, and leave them then."""
        try:
            yield
        except BaseException as error:
            self.tell(error)
            self.close(together=False)
            raise

    # Collectives of the schedule, in the thread of their lane, on the device.

    def gather(self, whole: torch.Tensor, own: torch.Tensor) -> None:
        """Fill ``whole``, ``[size * n]``, with every rank's ``own``, ``[n]``, which may be its place in it.

        Raises:
            RankError: a rank has failed. So do all methods below.
        """
        self._wait(self._lane, lambda: _all_gather(whole, own, group=self._lane, async_op=True))

    def add_up(self, values: torch.Tensor) -> None:
        """Replace ``values`` by the sum of all ranks' in their own type; the same bits on all ranks."""
        self._wait(self._lane, lambda: dist.all_reduce(values, group=self._lane, async_op=True))

    def scatter(self, own: torch.Tensor, values: torch.Tensor) -> None:
        """Set ``own``, ``[n]``, to this rank's part of the sum of all ranks' ``values``, ``[size * n]``, in their type.

        ``values`` may be overwritten. On hosts the whole is added up: gloo's own reduce-scatter, where a version of
        torch has it, takes longer than that (and did just that before).
        """
        if self._on_device:
            self._wait(self._lane, lambda: _reduce_scatter(own, values, group=self._lane, async_op=True))
        else:
            self.add_up(values)
            own.copy_(values[self.rank * len(own) : (self.rank + 1) * len(own)])

    # What the caller's thread needs, over the hosts.

    def sums(self, values: Sequence[float]) -> list[float]:
        """Return the sums over ranks, element by element, in float64; the same bits on all ranks."""
        total = torch.tensor(values, dtype=torch.float64)
        self._wait(self._hosts, lambda: dist.all_reduce(total, group=self._hosts, async_op=True))
        result: list[float] = total.tolist()
        return result

    def of_first(self, values: torch.Tensor) -> torch.Tensor:
        """Return rank 0's values, in host memory, where this rank has a tensor of the same shape and type."""
        values = values.to("cpu", copy=True).contiguous()
        first = dist.get_global_rank(self._hosts, 0)
        self._wait(self._hosts, lambda: dist.broadcast(values, first, self._hosts, async_op=True))
        return values

    def collected(self, own: torch.Tensor) -> torch.Tensor:
        """Return every rank's ``own``, ``[n]``, one behind the other, in new host memory, ``[size * n]``."""
        own = own.to("cpu").contiguous()
        whole = torch.empty(self.size * len(own), dtype=own.dtype)
        self._wait(self._hosts, lambda: _all_gather(whole, own, group=self._hosts, async_op=True))
        return whole

    def agree(self, what: str, value: str) -> None:
        """Check that all ranks have the same value.

        Raises:
            ValueError: they do not.
        """
        digests = self._digests(value)
        different = [rank for rank in range(self.size) if not torch.equal(digests[rank], digests[0])]
        if different:
            raise ValueError(f"rank {different[0]} has another {what} than rank 0; give the same to all ranks")

    def alike(self, value: str) -> list[int]:
        """Return the ranks that have the same value as this one, in order, this one included."""
        digests = self._digests(value)
        return [rank for rank in range(self.size) if torch.equal(digests[rank], digests[self.rank])]

    def _digests(self, value: str) -> torch.Tensor:
        digest = hashlib.sha256(value.encode()).digest()
        return self.collected(torch.frombuffer(bytearray(digest), dtype=torch.uint8)).view(self.size, -1)

    # The end.

    def tell(self, error: BaseException) -> None:
        """Tell the other ranks that this one has failed: they raise :class:`RankError`."""
        self._watch.tell(error)

    def stop(self) -> None:
        """Let no thread of this rank wait for a collective any longer."""
        self._stopped.set()

    def meet(self) -> None:
        """Wait until all ranks have come here."""
        self._wait(self._hosts, lambda: dist.barrier(group=self._hosts, async_op=True))

    def close(self, *, together: bool) -> None:
        """Leave the others; ``together`` if they do so too, after they met. Closing twice is allowed.

        A group is destroyed when nothing is under way in it, since gloo crashes otherwise. After a failure there is
        always a rank that has nothing under way in a group: it goes first, its connections close, and that ends what
        the others still have.
        """
        self._watch.leave(together=together)
        self._stopped.set()
        for group in sorted(self._groups, key=lambda group: group in self._under_way):
            done = self._under_way.get(group)
            if done is None or done.wait(_GRACE_S):
                dist.destroy_process_group(group)
                self._groups.remove(group)
        if not self._groups:
            atexit.unregister(self._at_exit)
            if self._made and dist.is_initialized():
                dist.destroy_process_group()
            self._made = False

    def _at_exit(self) -> None:
        """Leave by a process that ends without having closed: nothing may be under way when the interpreter goes."""
        if (error := getattr(sys, "last_value", None)) is not None:  # nobody has caught it
            self.tell(error)
        self.close(together=False)
        if self._groups:  # the process would crash, and has said why it ends
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    def _wait(self, group: dist.ProcessGroup, begin: Callable[[], Any]) -> None:
        """Begin a collective and wait for it, or make the current stream wait for it if it is one on a device."""
        self._check()
        try:
            work = begin()
            if group is self._hosts or not self._on_device:  # work.wait() could not be left if another rank fails
                done = self._under_way[group] = threading.Event()
                work.get_future().add_done_callback(lambda _future: done.set())
                while not done.wait(_POLL_S):
                    self._check()
                del self._under_way[group]
            work.wait()
        except RankError:
            raise
        except RuntimeError as error:  # a connection was closed, or NCCL was aborted
            raise self._watch.explain(error) from error

    def _check(self) -> None:
        self._watch.check()
        if self._stopped.is_set():
            raise RankError("this rank was stopped while it waited for the others")

    def _failed(self, error: RankError) -> None:
        """End what runs on the device, as kernels of a collective wait for a dead rank for ever, and pass it on."""
        if self._on_device and self._groups:
            backend = self._lane._get_backend(torch.device("cuda"))
            getattr(backend, "abort", lambda: None)()
        self._on_failure(error)


def _join(size: int) -> bool:
    """Make sure of a default process group; return whether it was made here."""
    remedy = f"start one process per device: torchrun --nproc-per-node {size} (a node), plus --nnodes for several"
    made = not dist.is_initialized()
    if made:
        started = int(os.environ.get("WORLD_SIZE", "1"))
        if started != size:
            raise ValueError(f"the plan is for {size} devices, but {started} process(es) were started; {remedy}")
        dist.init_process_group("gloo", timeout=_TIMEOUT)
    if dist.get_world_size() != size:
        raise ValueError(
            f"the plan is for {size} devices, but the process group has {dist.get_world_size()} ranks; {remedy}"
        )
    return made
