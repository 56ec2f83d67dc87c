"""All ranks of a plan: their process groups, and how they stop if one rank fails.

All ranks must call the collectives of one process group in the same order. Several kinds of groups ensure that. Only
the thread of the collective lane uses the groups for collectives of the schedule. That lane is first-in first-out,
and all ranks have the same schedule. Collectives inside modules use the groups of tensor-, expert- or
context-parallel ranks, in the order of the model's program. The lane of updates on the CPU has groups of its own over
host memory, for casts of weights. Two stages of a pipeline have a group for what passes between them in each
direction, which only their lanes for that use, in the order of both schedules. All other collectives (norms, initial
values, saved states) use groups over host memory, in the order of the caller's program. On GPUs, collectives of
different groups are launched in one order too: see [Note: One order] in :mod:`planner.lowering.launches`. No
collective waits for ever: see [Note: Failed ranks].
"""

import atexit
import contextlib
import itertools
import os
import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Self, final

import torch
import torch.distributed as dist

from executor.distributed.groups import Group
from executor.distributed.meeting import join, new_group, session_store
from executor.distributed.mesh import Groups, Mesh
from executor.distributed.watchdog import LANE_THREAD, TIMEOUT, RankError, Watchdog, describe_mismatch
from planner.decisions import Decisions
from planner.graph import Unit
from planner.optimizers import OPTIMIZERS

_POLL_S: Final = 0.1  # how often a thread that waits for a collective checks whether another rank has failed
_CHECKPOINT_THREAD: Final = "checkpoint"  # names of threads that save begin so
_GRACE_S: Final = 5.0  # longest wait, after a failure, for a running collective
_TEXT_BYTES: Final = 256
_MOST_CTAS: Final = 32  # blocks of threads of a collective's kernel on most GPUs, by NCCL's own choice
# Collectives that a GPU may run at the same time: of weights and gradients, of modules, of updates, of users' groups.
_NUM_AT_ONCE: Final = 4
_HASH_RANGE: Final = 1 << 20  # float64 sums the squares of smaller numbers exactly, over thousands of ranks


@final
class Ranks:
    """All ranks of a plan, one process each, seen from one of them. All ranks construct it at the same time.

    If there is no default process group, it is made from the environment that ``torchrun`` sets. It exists until the
    process ends, because a launcher's rendezvous works only once.

    Args:
        device: device of the schedule's collectives. They use NCCL on CUDA, gloo elsewhere.
        num_stages: stages of a pipeline, each of which has as many ranks. Then ``decisions``, and the attributes before
            ``process``, are those of this process's stage.
        sharing: stages that share weights.

    Attributes:
        rank, size: this rank's number, and the number of ranks.
        mesh: this rank's position.
        all: group of all ranks over host memory. The caller's thread calls its collectives.
        tensor, experts, contexts: this rank's tensor-, expert- and context-parallel groups.
        matrices: the tensor-parallel group again, for updates; ``None`` if none needs it. Only the lanes of updates use
            it: one on the device, one on the host.
        num_values: number of values that :meth:`check_same_call` sums. Set once, to the same number on all ranks.
        decision_hash: hash of this rank's decisions that must be the same on all ranks. Set before each update.
        is_waiting: whether the caller's thread waits for other ranks now.
        num_ended: number of collectives that have ended.
        watchdog: notices if another rank fails, and tells the others if this one does.
        leaving: what :meth:`close` does first.
        process: global number of this process.
        everybody: group of all processes over host memory, in all stages.
        stage: number of this process's stage.
        stages: group of the ranks with this number in all stages, over host memory.
        sharing: group of those in the stages that share weights, if this process is in one of them; the first one's
            weights are the model's.
        forward, back: groups of this rank and that of the stage before or behind it, by the stage that sends hidden
            states: one for these, one for their gradients.

    Raises:
        ValueError: the number of processes does not match the plan.
    """

    def __init__(
        self, decisions: Decisions, device: torch.device, num_stages: int = 1, sharing: Sequence[int] = ()
    ) -> None:
        size = decisions.num_devices
        join(size * num_stages)
        self.process, self._num_stages = dist.get_rank(), num_stages
        self.stage, self.rank = divmod(self.process, size)
        self.size = size
        self.mesh = Mesh(decisions, self.rank)
        # Our watchdog reports which rank failed, and why; NCCL's own would end the process before that.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        self._on_device = device.type == "cuda"
        if self._on_device:  # a kernel that waits for one which has no room would wait for ever
            num_processors = torch.cuda.get_device_properties(device).multi_processor_count
            most_ctas = max(1, min(_MOST_CTAS, num_processors // _NUM_AT_ONCE))
            os.environ.setdefault("NCCL_MAX_CTAS", str(most_ctas))
        self.num_values = self.decision_hash = self.num_ended = 0
        self.is_waiting = False
        self.leaving = contextlib.ExitStack()
        self._stopped = threading.Event()
        self._under_way: dict[dist.ProcessGroup, threading.Event] = {}  # set when a group's collective has ended
        self._on_failure: Callable[[RankError], None] = lambda _error: None
        self._groups: list[dist.ProcessGroup] = []
        self._parts: list[Group] = []
        self._more: dict[Groups, Group] = {}
        self._on_devices: list[dist.ProcessGroup] = []  # process groups of GPUs
        self._to_abort, self._aborting = self._on_devices, threading.Lock()
        self.watchdog = Watchdog(session_store(), self.process, size * num_stages)
        self.watchdog.start(self._failed)
        with self.reporting_failures():
            self.all = self._group((tuple(range(size)),), is_everybody=True)
            self.everybody = self.all
            self.tensor, self.experts = self._group(self.mesh.tensor_groups()), self._group(self.mesh.expert_groups())
            self.contexts = self._group(self.mesh.context_groups())
            shares_matrices = decisions.tensor_parallel > 1 and OPTIMIZERS[decisions.optimizer].others is not None
            self.matrices = self._group(self.mesh.tensor_groups()) if shares_matrices else None
            kinds = dict.fromkeys((1, decisions.expert_parallel))
            casts = decisions.fp8_weights is not None
            self._replicas = {parts: self._group(self.mesh.replicas(parts)) for parts in kinds}
            self._casting = {
                parts: self._group(self.mesh.replicas(parts), on_hosts=True) for parts in (kinds if casts else ())
            }
            if num_stages > 1:
                self._connect_stages(sharing, is_ring=bool(decisions.round_starts))
        atexit.register(self._at_exit)

    @classmethod
    def of(
        cls, decisions: Decisions, device: torch.device, num_stages: int = 1, sharing: Sequence[int] = ()
    ) -> Self | None:
        """Return all ranks of a plan, of which some stages share weights; ``None`` if there is one rank.

        For errors, see the class.
        """
        if decisions.num_devices == num_stages == 1:
            join(1)  # several processes would train as many models
            return None
        return cls(decisions, device, num_stages, sharing)

    def watch(self, on_failure: Callable[[RankError], None], waits_for: Callable[[], tuple[str, int]]) -> None:
        """Register a callback, which another thread calls when another rank fails or is in another call."""
        self._on_failure = on_failure
        self.watchdog.waits_for = waits_for
        self.watchdog.check()  # a rank may have failed before

    @contextlib.contextmanager
    def reporting_failures(self) -> Iterator[None]:
        """Return a context that reports errors to the other ranks, and leaves the process groups after one."""
        try:
            yield
        except BaseException as error:
            self.watchdog.report_failure(error)
            self.close(on_all_ranks=False)
            raise

    def replicas(self, unit: Unit) -> Group:
        """Return the group of ranks that hold the same part of a unit.

        They reduce its gradient, and shard it under ZeRO.

        Only the thread of the collective lane uses this group.
        """
        return self._replicas[unit.parts(self.mesh.degrees)]

    def casting(self, unit: Unit) -> Group:
        """Return the same ranks as :meth:`replicas`, over host memory, for casts of the unit's weights alone."""
        return self._casting[unit.parts(self.mesh.degrees)]

    def host_group(self, groups: Groups) -> Group:
        """Return this process's of some groups over host memory, for one more thread. All call this together."""
        if groups not in self._more:
            with self.reporting_failures():
                self._more[groups] = self._made(groups, on_hosts=True)[0]
        return self._more[groups]

    # Collectives of the caller's thread, over host memory.

    def all_reduce(self, values: Sequence[float]) -> list[float]:
        """Return the elementwise sums over ranks, in float64, with the same bits on all ranks.

        Raises:
            RankError: a rank has failed. All methods below raise it too.
        """
        total = torch.tensor(values, dtype=torch.float64, device="cpu")
        self.all.all_reduce(total)
        result: list[float] = total.tolist()
        return result

    def check_same_call(self, doing: str, values: Sequence[float] = ()) -> list[float]:
        """Check that all ranks are in the same call with the same decisions; return the sums of ``values`` over ranks.

        Call it before other collectives. If ranks were in different calls, they would misread each other's numbers, or
        gloo would end the process because sizes differ. If a rank never calls this, see [Note: Failed ranks] in
        :mod:`executor.distributed.watchdog`.

        Args:
            doing: the call that this rank is in, in words.
            values: :attr:`num_values` numbers; by default, zeros.
        """
        hashes = zlib.crc32(doing.encode()) % _HASH_RANGE, self.decision_hash % _HASH_RANGE
        head = [float(number) for value in hashes for number in (value, value * value)]
        total = self.all_reduce([*head, *(values or (0.0,) * self.num_values)])
        for sum_, squares, is_call in ((*total[0:2], True), (*total[2:4], False)):
            if self.size * int(squares) == int(sum_) ** 2:  # then all are equal (Cauchy-Schwarz)
                continue
            texts = self.all_gather_text(f"{doing if is_call else self.decision_hash}"[:_TEXT_BYTES])
            if is_call:
                raise RankError(f"rank {describe_mismatch(dict(enumerate(texts)))}")
            different = next(rank for rank, text in enumerate(texts) if text != texts[0])
            raise RankError(
                f"rank {different} has updated differently from rank 0 before {doing}: make all ranks skip steps, clip "
                "and set learning rates in the same way, from values that are the same on all ranks"
            )
        return total[4:]

    def sync_rng_state(self) -> None:
        """Give tensor-parallel ranks the same RNG state, so that dropout is the same on them."""
        torch.set_rng_state(self.tensor.broadcast(torch.get_rng_state()))
        if self._on_device:
            torch.cuda.set_rng_state(self.tensor.broadcast(torch.cuda.get_rng_state()))

    def all_gather_text(self, text: str) -> list[str]:
        """Return every rank's text, in the order of ranks. Texts are short and ASCII."""
        values = torch.frombuffer(bytearray(text.encode("ascii").ljust(_TEXT_BYTES, b"\0")), dtype=torch.uint8)
        every = self.all.all_gather_on_host(values).view(self.size, _TEXT_BYTES)
        return [bytes(row.tolist()).rstrip(b"\0").decode("ascii") for row in every]

    # Failing and closing.

    def stop(self) -> None:
        """End all waiting for collectives on this rank."""
        self._stopped.set()

    def close(self, *, on_all_ranks: bool) -> None:
        """Leave the process groups. Closing twice is allowed.

        gloo crashes if a group is destroyed while one of its collectives is running. After a failure, there is always a
        rank without a running collective. It destroys the group first: its connections close, which ends the other
        ranks' collectives.

        Args:
            on_all_ranks: whether all ranks close now, after a barrier.
        """
        self.watchdog.stop(on_all_ranks=on_all_ranks)
        self._stopped.set()
        self.leaving.close()
        if not on_all_ranks:
            self._abort_devices()  # else destroying groups would wait for kernels that wait for dead ranks
        for group in sorted(self._groups, key=lambda group: group in self._under_way):
            done = self._under_way.get(group)
            if done is None or done.wait(_GRACE_S):
                dist.destroy_process_group(group)
                self._groups.remove(group)
                for part in self._parts:
                    part.forget(group)
        if not self._groups:
            atexit.unregister(self._at_exit)

    def _at_exit(self) -> None:
        """Close at the end of a process that has not closed: no collective may run at interpreter exit."""
        if (error := getattr(sys, "last_value", None)) is not None:  # an uncaught exception
            self.watchdog.report_failure(error)
        self.close(on_all_ranks=False)
        if self._groups:  # interpreter exit would crash; the traceback is already printed
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    def _connect_stages(self, sharing: Sequence[int], *, is_ring: bool) -> None:
        """Make the groups that stages share."""
        self.everybody = self._made([tuple(range(self.size * self._num_stages))], is_everybody=True)[0]
        columns = [range(rank, self.size * self._num_stages, self.size) for rank in range(self.size)]
        self.stages = self._made([tuple(column) for column in columns], on_hosts=True)[0]
        groups = self._made([tuple(column[stage] for stage in sharing) for column in columns]) if sharing else ()
        self.sharing = groups[0] if groups else self.stages
        pairs = [pair for column in columns for pair in itertools.pairwise(column)]
        pairs += [(column[-1], column[0]) for column in columns if is_ring]
        self.forward, self.back = ({group.first // self.size: group for group in self._made(pairs)} for _ in range(2))

    def _group(self, groups: Groups, *, on_hosts: bool = False, is_everybody: bool = False) -> Group:
        """Make all groups of one kind, on all ranks; return this rank's group, which may be over host memory alone."""
        first = range(0, self.size * self._num_stages, self.size)
        of_stages = [tuple(start + rank for rank in ranks) for start in first for ranks in groups]
        return self._made(of_stages, on_hosts=on_hosts, is_everybody=is_everybody)[0]

    def _made(
        self, groups: Sequence[tuple[int, ...]], *, on_hosts: bool = False, is_everybody: bool = False
    ) -> list[Group]:
        """Make groups of these processes, on all processes; return those that this one is in."""
        on_device, mine = self._on_device and not (on_hosts or is_everybody), []
        for ranks in groups:
            device = hosts = None
            if len(ranks) > 1:
                nccl = dist.new_group(ranks, backend="nccl", timeout=TIMEOUT) if on_device else None
                device = nccl or new_group(self.watchdog, ranks)
                hosts = device if is_everybody else None if on_hosts else new_group(self.watchdog, ranks)
            if self.process in ranks:
                self._groups += [group for group in dict.fromkeys((device, hosts)) if group is not None]
                if device is not None and on_device:
                    self._on_devices.append(device)  # before it connects: if a rank ends meanwhile, it is aborted
                    # Connect now, not in the first iteration: it takes seconds, and memory that the plan leaves free.
                    dist.all_reduce(torch.zeros(1, device="cuda"), group=device, async_op=True).wait()
                    torch.cuda.synchronize()
                mine.append(
                    Group(ranks, self.process, device=device, hosts=hosts, on_device=on_device, wait=self._wait)
                )
        self._parts += mine
        return mine

    def _wait(self, group: dist.ProcessGroup, begin: Callable[[], Any]) -> None:
        """Begin a collective and wait for it. If it runs on a GPU, make the current stream wait instead."""
        self.check()
        is_lane = threading.current_thread().name.startswith((LANE_THREAD, _CHECKPOINT_THREAD))
        try:
            with contextlib.nullcontext() if is_lane else self.waiting():
                work = begin()
                if group not in self._on_devices:  # work.wait() would not return if another rank fails
                    done = self._under_way[group] = threading.Event()
                    work.get_future().add_done_callback(lambda _future: done.set())
                    while not done.wait(_POLL_S):
                        self.check()
                    del self._under_way[group]
                work.wait()
        except RankError:
            raise
        except RuntimeError as error:  # a connection was closed, or NCCL was aborted
            raise self.watchdog.explain(error) from error
        finally:
            self.num_ended += 1

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Return a context in which the caller's thread waits for other ranks, so that they hear of it."""
        self.is_waiting = True
        try:
            yield
        finally:
            self.is_waiting = False

    def check(self) -> None:
        """Check that no rank has failed, and that this one has not been stopped.

        Raises:
            RankError: either has happened.
        """
        self.watchdog.check()
        if self._stopped.is_set():
            raise RankError("this rank was stopped while it waited for other ranks")

    def _failed(self, error: RankError) -> None:
        """Report the failure, and abort collectives on the device, whose kernels would wait for ever."""
        self._on_failure(error)
        self._abort_devices()

    def _abort_devices(self) -> None:
        """Abort collectives on the device, once. All groups abort together, because one may wait for another."""
        with self._aborting:
            groups, self._to_abort = self._to_abort, []
            backends = [group._get_backend(torch.device("cuda")) for group in groups if group in self._groups]
            abortable: list[Any] = [backend for backend in backends if hasattr(backend, "_group_start")]  # NCCL's
            if abortable:
                abortable[0]._group_start()
                for backend in abortable:
                    backend.abort()
                abortable[0]._group_end()


ALONE: Final = Group((0,), 0, device=None, hosts=None, on_device=False, wait=lambda _group, _begin: None)
"""The group of a process that trains alone."""
