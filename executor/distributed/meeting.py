"""How ranks meet: they make process groups over gloo, and exchange what they need before they have a session.

gloo connects each pair of ranks when a group is made. On a busy machine a rank may lose such a
connection: it raises an error, and the others wait for it for five times the group's timeout. So that timeout is short
until the group is there. Then all ranks exchange, through the store, whether they have it, and if one has not, all try
again. Nothing interrupts gloo while it connects, so it does so in a thread: meanwhile a signal ends the process, and so
does the news that a rank has ended.
"""

import concurrent.futures
import contextlib
import datetime as dt
import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from executor.distributed.watchdog import TIMEOUT, RankError, Watchdog, report_to

_Made = TypeVar("_Made")

_ATTEMPTS: Final = 3
_HANDSHAKE_S: Final = 8.0  # of one attempt, for each answer of the store; gloo waits for connections 5 times as long
_PERIOD_S: Final = 0.2  # between two looks at other ranks


def world_size() -> int:
    """Return the number of processes of the process group, or else those that ``torchrun`` has started."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE") or 1)


def join(size: int) -> None:
    """Check the number of processes, and make the default process group if there is none and they are several.

    Raises:
        ValueError: the number of processes is another.
        RankError: a rank is missing, or cannot be reached.
    """
    if (started := world_size()) != size:
        raise ValueError(
            f"the plan is for {size} device(s), but {started} process(es) were started; plan for {started} "
            f"(gpus={started}, --gpus {started}), or start one per device: torchrun --nproc-per-node {size}, plus "
            "--nnodes for several nodes"
        )
    if not dist.is_initialized() and size > 1:
        store, rank, _ = next(rendezvous("env://", timeout=TIMEOUT))
        begin(store, rank, size)


def begin(store: Any, rank: int, size: int) -> None:
    """Make the default process group over a store of ``torch.distributed``.

    Raises:
        RankError: a rank is missing, or cannot be reached.
    """
    own, attempts = _next(store, "begins", rank), iter(range(_ATTEMPTS))

    def make(timeout: dt.timedelta) -> dist.ProcessGroup:
        dist.distributed_c10d._world.group_count = 0  # an attempt that fails may count, and it names the group
        place = PrefixStore(f"attempt {next(attempts)}", own)
        dist.init_process_group("gloo", store=place, rank=rank, world_size=size, timeout=timeout)
        return dist.distributed_c10d._get_default_group()

    with Watchdog(own, rank, size) as watchdog:
        _connected(watchdog, make)


def new_group(watchdog: Watchdog, ranks: Sequence[int] | None = None) -> dist.ProcessGroup:
    """Make a process group over gloo, of all ranks by default. All ranks call it, also those outside.

    Raises:
        RankError: a rank has failed, or cannot be reached.
    """
    return _connected(watchdog, lambda timeout: dist.new_group(ranks, backend="gloo", timeout=timeout))


def session_store() -> PrefixStore:
    """Return a part of the ranks' store for one more :class:`Watchdog`. All ranks call it equally often."""
    return _next(dist.distributed_c10d._get_default_store(), "sessions", dist.get_rank())


@contextlib.contextmanager
def meeting(size: int) -> Iterator[Watchdog]:
    """Return a context in which ranks exchange texts before they have a session, and notice if one fails.

    Raises:
        ValueError: the number of processes is another.
        RankError: a rank has failed, or is missing.
    """
    join(size)
    with Watchdog(session_store(), dist.get_rank(), size) as watchdog:
        yield watchdog


@contextlib.contextmanager
def missed() -> Iterator[None]:
    """Return a context in which a rank makes its session. If it fails before, it says so to ranks that wait for it."""
    before = _num_sessions()
    try:
        yield
    except BaseException as error:
        if dist.is_initialized() and _num_sessions() == before:
            report_to(session_store(), dist.get_rank(), error)
        raise


def _num_sessions() -> int:
    """Return how often this rank has called :func:`session_store`."""
    if not dist.is_initialized():
        return 0
    return int(dist.distributed_c10d._get_default_store().add(_taken("sessions", dist.get_rank()), 0))


def _taken(what: str, rank: int) -> str:
    return f"ullage {what} of rank {rank}"


def _next(store: Any, what: str, rank: int) -> PrefixStore:
    return PrefixStore(f"ullage {what} {store.add(_taken(what, rank), 1)}", store)


def _apart(connect: Callable[[], _Made], check: Callable[[], None]) -> _Made:
    """Return what a function returns that runs in a thread of its own; ``check`` is called meanwhile, and may raise."""
    made = concurrent.futures.Future[_Made]()

    def run() -> None:
        try:
            made.set_result(connect())
        except BaseException as error:  # noqa: BLE001 - the caller raises it
            made.set_exception(error)

    threading.Thread(target=run, name="rank connecting", daemon=True).start()
    while not concurrent.futures.wait([made], _PERIOD_S).done:
        check()
    return made.result()


def _connected(watchdog: Watchdog, make: Callable[[dt.timedelta], dist.ProcessGroup]) -> dist.ProcessGroup:
    """Make a process group on all ranks."""
    for _ in range(_ATTEMPTS):
        group, lost = None, ""
        try:
            group = _apart(functools.partial(make, dt.timedelta(seconds=_HANDSHAKE_S)), watchdog.check)
        except RuntimeError as error:
            lost = f"{error}".partition("\n")[0] or "no reason given"
        is_member = isinstance(group, dist.ProcessGroup)  # else torch returns a placeholder
        every = watchdog.exchange(lost)
        if group is not None and not any(every):
            if is_member:
                dist.distributed_c10d._set_pg_timeout(TIMEOUT, group)
            return group
        if is_member:
            dist.destroy_process_group(group)
    rank = next(rank for rank, words in enumerate(every) if words)
    raise RankError(
        f"rank {rank} could not connect to the others in {_ATTEMPTS} attempts of {_HANDSHAKE_S:g} s ({every[rank]}); "
        "check the network between them (GLOO_SOCKET_IFNAME chooses an interface), and start again"
    )
