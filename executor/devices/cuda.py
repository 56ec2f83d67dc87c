"""The backend for one CUDA device: a stream per lane, CUDA events, pinned host memory."""

import bisect
import collections
import contextlib
import functools
import math
import operator
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Final

import torch

from executor.devices.backend import Array, Event, Pairs, as_array, sum_of_squares
from executor.devices.meter import CudaMeter
from executor.devices.sums import BUFFER_BYTES, NUM_BUFFERS, HostSums
from executor.direct_io import pages
from executor.optimizer.adamw import AdamWParams
from executor.optimizer.passes import BLOCK, cut
from executor.optimizer.split import SplitMaster, opened
from executor.optimizer.table import ENTRIES, Rule
from executor.optimizer.workers import WorkerTeam
from hwprofiles.machine import available_memory_bytes
from planner.optimizers import UPDATED_AT_ONCE
from planner.schedule.tasks import HOST_LANES, Lane

# Lanes with a stream that allocate memory. Memory counts when the thread allocates it. So these threads wait on the
# host for dependencies; otherwise new memory would be allocated before the old memory is free.
_PACED_LANES: Final = frozenset({Lane.ACTIVATION_IN})
# Between anchors of the clock. In a second, clocks drift apart by tens of microseconds.
_APART_S: Final = 1.0
_MOST_ANCHORS: Final = 1 << 12  # then every second one goes
# Lanes whose copies give way: a device has one copy engine for each direction, which ends a copy that it has begun,
# whatever waits on other streams. A weight that forward waits for comes 0.6 ms late at most, at 55 GB/s.
_YIELDING_LANES: Final = frozenset({Lane.STATE_IN, Lane.STATE_OUT})
_YIELDING_BYTES: Final = 32 << 20
# A thread that blocks wakes 0.05 to 0.4 ms late (a virtual machine's later), one that polls has no core to give to
# others. So it polls, then looks again after naps, and then blocks.
_SPIN_S: Final = 50e-6
_NAP_S: Final = 1e-4
_AWAKE_S: Final = 5e-3
_TOUCHED_BYTES: Final = 1 << 30
_GROWING_S: Final = 20.0  # most that memory which grows is waited for, per part
_POLL_S: Final = 0.02
# Limits the float32 copy of a gradient during an update on the device to 64 MiB. For smaller chunks, launching a kernel
# may take longer than the kernel itself.
_CHUNK_PARAMS: Final = 1 << 24
RESERVED: Final = "reserved_bytes.all.peak"
"""The allocator's name for the most bytes that it had from the driver."""
RETRIES: Final = "num_alloc_retries"
"""The allocator's name for how often memory was full until it gave unused segments back."""
_ALLOCATOR_PEAKS: Final = (RESERVED, "inactive_split_bytes.all.peak")
_ALLOCATOR_EVENTS: Final = (RETRIES, "num_ooms")


def _touch(block: torch.Tensor) -> None:
    """Touch the pages of a block with all threads, as the driver would use one; a part after another.

    The memory of a virtual machine may grow as it is used, but more slowly than threads touch it. Each part waits until
    there is room for it: the kernel would end the process.

    Raises:
        MemoryError: memory does not grow.
    """
    for part in block.split(_TOUCHED_BYTES):  # type: ignore[no-untyped-call]
        end_s = time.monotonic() + _GROWING_S
        while (free_bytes := available_memory_bytes()) < part.nbytes:
            if time.monotonic() > end_s:
                raise MemoryError(
                    f"pinned host memory of {block.nbytes:,} B does not fit: {part.nbytes:,} B more are needed, and "
                    f"{free_bytes:,} B are free; leave more host memory free, or give the plan less of it"
                )
            time.sleep(_POLL_S)
        part.zero_()


class _Event:
    """A CUDA event that returns to its pool when nothing refers to it any more."""

    def __init__(self, pool: "collections.deque[torch.cuda.Event]", stream: torch.cuda.Stream | None = None) -> None:
        self._pool = pool
        try:
            self.event = pool.pop()
        except IndexError:
            # Blocking: a thread that spins would take a core from the updates on the host.
            self.event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        self.event.record(stream)

    def __del__(self) -> None:
        self._pool.append(self.event)

    def wait(self) -> None:
        """Let the calling thread wait for it."""
        begin_s = time.perf_counter()
        while not self.event.query():  # type: ignore[no-untyped-call]
            waited_s = time.perf_counter() - begin_s
            if waited_s > _AWAKE_S:
                self.event.synchronize()
                return
            time.sleep(0 if waited_s < _SPIN_S else _NAP_S)  # other threads need the interpreter

    def seconds_to(self, other: "_Event") -> float:
        """Return the seconds from this event to another. Both have ended."""
        return float(self.event.elapsed_time(other.event)) / 1e3


class Clock:
    """Converts events to times on the host's clock.

    CUDA returns the time between two events in float32 milliseconds. For events an hour apart, the resolution is a
    quarter of a millisecond. Besides, the GPU's clock and the host's drift apart by milliseconds a minute. So every
    event is measured from a near anchor: an event whose time the host read when it happened.

    Args:
        read: makes an anchor now, and returns its time on the host's clock and its event.
    """

    def __init__(self, read: Callable[[], tuple[float, _Event]]) -> None:
        self._lock = threading.Lock()
        self._read = read
        self._anchors = [read()]  # by time

    def keep_up(self) -> None:
        """Make an anchor if the last one is old."""
        if time.perf_counter() - self._anchors[-1][0] > _APART_S and self._lock.acquire(blocking=False):
            try:
                if len(self._anchors) >= _MOST_ANCHORS:
                    del self._anchors[1::2]
                self._anchors.append(self._read())
            finally:
                self._lock.release()

    def time_s(self, event: _Event) -> float:
        """Return the time of an event that has ended, on the host's clock."""
        with self._lock:
            zero_s, zero = self._anchors[0]
            about_s = zero_s + zero.seconds_to(event)
            i = bisect.bisect(self._anchors, about_s, key=operator.itemgetter(0))
            near_s, near = min(self._anchors[max(i - 1, 0) : i + 1], key=lambda anchor: abs(anchor[0] - about_s))
        return near_s + near.seconds_to(event)


class CudaBackend:
    """The current CUDA device. Methods: see :class:`executor.devices.backend.HostBackend`."""

    submits = frozenset({Lane.H2D, Lane.D2H, Lane.STATE_IN, Lane.STATE_OUT, Lane.GPU_UPDATE})

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise ValueError("device is cuda, but torch finds no CUDA device; use device='cpu' or install CUDA's torch")
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._pool: collections.deque[torch.cuda.Event] = collections.deque()
        self._idle = torch.cuda.Stream(self.device, priority=-1)  # type: ignore[no-untyped-call]
        self._beside: torch.cuda.Stream | None = None  # for copies of an exchange
        self._clock = Clock(self._anchor)
        # Its stream, so that no task has to ask for it, and whether its copies give way.
        self._lane = threading.local()
        self._streams: dict[Lane, torch.cuda.Stream] = {}
        self._events_before: dict[str, int] = {}  # counts of the allocator when memory was last metered
        self._without_cudnn = False  # whether it has switched cuDNN's attention off
        self._sums: HostSums | None = None  # what accumulates gradients on the host

    @contextlib.contextmanager
    def lane(self, lane: Lane) -> Iterator[None]:
        """Make the lane's own stream current. The compute lane is the caller's current stream."""
        torch.cuda.set_device(self.device)
        if lane in HOST_LANES:
            yield
            return
        if (stream := self._streams.get(lane)) is None:
            # Small kernels between copies must not wait for matrix products. Updates fill the device, so they get no
            # priority.
            priority = 0 if lane is Lane.GPU_UPDATE else -1
            stream = self._streams[lane] = torch.cuda.Stream(self.device, priority=priority)  # type: ignore[no-untyped-call]
        before = getattr(self._lane, "stream", None), getattr(self._lane, "yields", False)
        with torch.cuda.stream(stream):
            self._lane.stream, self._lane.yields = stream, lane in _YIELDING_LANES
            try:
                yield
            finally:
                self._lane.stream, self._lane.yields = before

    def record_event(self, lane: Lane) -> Event:
        """Return the host's time, or an event on the current stream."""
        if lane in HOST_LANES:
            return time.perf_counter()
        self._clock.keep_up()
        return _Event(self._pool, self._stream())

    def _anchor(self) -> tuple[float, _Event]:
        """Return the time now, and an event of now: nothing else is on its stream. The thread spins for microseconds.

        A blocking event would wake it up late.
        """
        event = _Event(self._pool, self._idle)
        self._idle.synchronize()
        return time.perf_counter(), event

    def wait_event(self, lane: Lane, event: Event) -> None:
        """Make the current stream, or the calling thread, wait for a CUDA event.

        A time on the host has already passed.
        """
        if isinstance(event, _Event):
            if lane in HOST_LANES or lane in _PACED_LANES:
                event.wait()
            else:
                self._stream().wait_event(event.event)

    def event_time_s(self, event: Event) -> float:
        """Return the time of an event, on the host's clock."""
        if isinstance(event, _Event):
            event.wait()
            return self._clock.time_s(event)
        assert isinstance(event, float)
        return event

    def empty(self, num_bytes: int, *, on_device: bool) -> torch.Tensor:
        """Return device memory, or pinned host memory of exactly this size. torch would round up to a power of two."""
        if on_device or not num_bytes:
            return torch.empty(num_bytes, dtype=torch.uint8, device=self.device if on_device else "cpu")
        memory = pages(num_bytes, inherited=False)
        _touch(torch.from_numpy(memory))
        return self._registered(memory)

    def claim(self, block: torch.Tensor) -> None:
        """Fill new host memory with zeros, as it grows."""
        _touch(block)

    def pinned(self, shared: Array) -> torch.Tensor:
        """Register the memory."""
        return self._registered(shared)

    def _registered(self, memory: Array) -> torch.Tensor:
        """Return memory, uint8, as a tensor, pinned as long as that is in use."""
        block, num_bytes = torch.from_numpy(memory), memory.nbytes
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        code = cudart.cudaHostRegister(block.data_ptr(), num_bytes, 0)
        if int(code) != 0:
            self._forget_error()
            raise MemoryError(
                f"cudaHostRegister of {num_bytes:,} B failed with {code}; leave more host memory free, or raise the "
                "limit of locked memory (ulimit -l)"
            )
        device, chosen, synchronize = self.device, torch.cuda.device, torch.cuda.synchronize

        def unregister(address: int, _memory: object) -> None:
            # Whatever thread drops the last view: its device may be another, on which this would make a context. Copies
            # may be under way, if training ended half way.
            with chosen(device):
                with contextlib.suppress(RuntimeError):  # of a kernel that failed before
                    synchronize(device)
                cudart.cudaHostUnregister(address)

        # Keep ``memory`` alive until it is unregistered: freed pages could not be. It does not hold the tensor.
        weakref.finalize(block.untyped_storage(), unregister, block.data_ptr(), memory)
        return block

    def _forget_error(self) -> None:
        """Clear CUDA's last error. Otherwise the next kernel launch would report it."""
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=self.device)

    def release(self, block: torch.Tensor) -> int:
        """Free the memory of a storage, and return it from the allocator to the device."""
        storage = block.untyped_storage()
        num_bytes = storage.nbytes()
        storage.resize_(0)
        torch.cuda.empty_cache()
        return num_bytes

    def restore(self, block: torch.Tensor, num_bytes: int) -> None:
        """Allocate the memory of a storage again."""
        block.untyped_storage().resize_(num_bytes)

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Copy on the current stream; in parts, if copies on other streams must not wait for the whole."""
        parts = [(destination, source)]
        if getattr(self._lane, "yields", False):
            num_items = _YIELDING_BYTES // destination.itemsize
            parts = list(zip(destination.split(num_items), source.split(num_items), strict=True))  # type: ignore[no-untyped-call]
        for target, values in parts:
            target.copy_(values, non_blocking=True)

    def copy_both_ways(self, up: Pairs, down: Pairs) -> None:
        """Copy up on a stream beside the current one; then wait for both."""
        stream = self._stream()
        if self._beside is None:
            self._beside = torch.cuda.Stream(self.device, priority=-1)  # type: ignore[no-untyped-call]
        ended = []
        if up:
            self._beside.wait_stream(stream)
            with torch.cuda.stream(self._beside):
                for target, values in up:
                    target.copy_(values, non_blocking=True)
            ended.append(_Event(self._pool, self._beside))
        for target, values in down:
            target.copy_(values, non_blocking=True)
        for event in (*ended, _Event(self._pool, stream)):
            event.wait()

    def sum_rows(self, own: torch.Tensor, rows: torch.Tensor) -> None:
        """Sum with one kernel, which adds up in fp32."""
        torch.sum(rows, dim=0, out=own)

    def accumulate(self, sums: Sequence[tuple[torch.Tensor, torch.Tensor]], team: WorkerTeam) -> None:
        """Copy to pinned buffers; a thread adds from there, see :mod:`executor.devices.sums`."""
        if self._sums is None:
            self._sums = HostSums(self.empty(NUM_BUFFERS * BUFFER_BYTES, on_device=False), team.num_threads)
        self._sums.add(sums, lambda: _Event(self._pool, self._stream()).wait)

    def settle(self) -> None:
        """Wait for that thread."""
        if self._sums is not None:
            self._sums.settle()

    def scale(self, values: torch.Tensor, factor: float) -> None:
        """Multiply on the current stream."""
        values.mul_(factor)

    def scratch(self, num_items: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate on the current stream. torch's allocator counts it."""
        return torch.empty(num_items, dtype=dtype, device=self.device)

    def record_stream(self, tensor: torch.Tensor) -> None:
        """Keep the allocator from reusing a tensor's memory before the current stream has finished with it."""
        tensor.record_stream(self._stream())

    def update(
        self,
        state: Sequence[torch.Tensor | SplitMaster],
        gradients: Sequence[torch.Tensor],
        rule: Rule,
        step: int,
    ) -> None:
        """Take one step with a kernel of Triton, or with torch's."""
        update_on_device(state, gradients, rule, step)

    @contextlib.contextmanager
    def meter(self) -> Iterator[CudaMeter]:
        """Read the counts of torch's allocator."""
        with CudaMeter() as meter:
            yield meter
        torch.cuda.reset_peak_memory_stats()
        stats = torch.cuda.memory_stats()
        self._events_before = {name: stats[name] for name in _ALLOCATOR_EVENTS}

    def expect_many_shapes(self) -> None:
        """Switch cuDNN's attention off.

        It makes a plan for each shape in each thread, the caller's and autograd's (``MHAGraphCache`` in PyTorch's
        ``aten/src/ATen/native/cudnn/MHA.cpp``), which takes as long as many iterations of attention.
        """
        if torch.backends.cuda.cudnn_sdp_enabled():  # type: ignore[no-untyped-call]
            self._without_cudnn = True
            torch.backends.cuda.enable_cudnn_sdp(False)

    def forget_shapes(self) -> None:
        """Switch cuDNN's attention on again, if it was."""
        if self._without_cudnn:
            self._without_cudnn = False
            torch.backends.cuda.enable_cudnn_sdp(True)

    def allocator_counts(self) -> dict[str, int]:
        """Return peaks in bytes, and how often memory was short.

        At a retry, the allocator waits for the device and gives unused segments back to the driver.
        """
        stats = torch.cuda.memory_stats()
        return {name: stats[name] for name in _ALLOCATOR_PEAKS} | {
            name: stats[name] - self._events_before.get(name, 0) for name in _ALLOCATOR_EVENTS
        }

    def sum_of_squares_on_host(self, tensor: torch.Tensor, team: WorkerTeam) -> float:
        """Sum with the team's threads, which run no updates just before clipping."""
        values, sums = as_array(tensor), list[float]()
        team.run(lambda start, stop: sums.append(sum_of_squares(values[start:stop])), len(values))
        return math.fsum(sums)

    def sum_of_squares(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the norm, computed in float32: one kernel. Its square is taken with all others, in float64."""
        norm: torch.Tensor = torch.linalg.vector_norm(tensor, dtype=torch.float32)
        return norm

    def _stream(self) -> torch.cuda.Stream:
        """Return the stream of this thread's lane, or the caller's current one."""
        stream: torch.cuda.Stream = getattr(self._lane, "stream", None) or torch.cuda.current_stream(self.device)
        return stream


@functools.cache
def fused() -> ModuleType | None:
    """Return :mod:`executor.devices.fused` if its kernels run here, which are for NVIDIA's GPUs.

    Triton may be absent, may not know the GPU, or may find no C compiler for what launches its kernels.
    """
    if torch.version.cuda is None:
        return None
    try:
        from executor.devices import fused as found  # noqa: PLC0415 - imports Triton
    except ImportError:
        return None
    values = [torch.zeros(BLOCK, dtype=torch.float32, device="cuda") for _ in range(4)]  # whatever the default type
    try:
        found.update(values[:3], values[3:], Rule(ENTRIES[0], AdamWParams()), 1)
    except torch.OutOfMemoryError:  # which says nothing of Triton
        raise
    except Exception as error:  # noqa: BLE001 - whatever it is, there is another way
        warnings.warn(f"updates on the GPU take several times longer: Triton fails with {error!r}", stacklevel=2)
        return None
    return found


def update_on_device(
    state: Sequence[torch.Tensor | SplitMaster],
    gradients: Sequence[torch.Tensor],
    rule: Rule,
    step: int,
) -> None:
    """Take one optimizer step on the current stream. See :meth:`executor.devices.backend.HostBackend.update`.

    With Triton it is a kernel for each gradient [Note: Fused updates]. Otherwise all parameters of a chunk are updated
    together, because launching a chain of operators for one small parameter takes longer than the operators.
    """
    whole = state[0]
    if whole.device.type == "cuda" and (kernels := fused()) and kernels.can_update(state, gradients, rule):
        kernels.update(state, gradients, rule, step)
        return
    count = 1 + len(rule.entry.buffers)
    # A 1-D tensor makes the product float32; a Python number would keep the gradient's type.
    factor = torch.full((1,), rule.scale, dtype=torch.float32, device=whole.device)
    num_params = rule.chunk_params(UPDATED_AT_ONCE if isinstance(whole, SplitMaster) else _CHUNK_PARAMS)
    for begin in range(0, len(whole), num_params):
        chunk = cut(state, begin, min(begin + num_params, len(whole)))
        scaled = torch.empty(len(chunk[0]), dtype=torch.float32, device=whole.device)
        _scale_into(scaled, gradients, begin, factor)
        with opened(chunk[0]) as master:
            rule.entry.device(master, tuple(chunk[1:count]), scaled, rule.at(begin).params, step)
            for weight in chunk[count:]:
                weight.copy_(master)


def _scale_into(scaled: torch.Tensor, gradients: Sequence[torch.Tensor], begin: int, factor: torch.Tensor) -> None:
    """Fill ``scaled`` with the concatenated gradients, from index ``begin`` on, times a factor."""
    at = -begin  # index in ``scaled`` at which the gradient begins
    for gradient in gradients:
        target = scaled[max(at, 0) : max(at + len(gradient), 0)]
        if len(target):
            torch.mul(gradient[max(-at, 0) :][: len(target)], factor, out=target)
        at += len(gradient)
