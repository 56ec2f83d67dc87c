"""A device: memory, copies, streams, events and updates."""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Union

import numba as nb
import numpy as np
import numpy.typing as npt
import torch

from executor.devices.meter import CudaMeter, MemoryMeter
from executor.direct_io import forget_pages, pages
from executor.optimizer.bf16 import bf16_to_float32, float32_to_bf16
from executor.optimizer.passes import as_float32, cut
from executor.optimizer.split import SplitMaster
from executor.optimizer.table import Rule
from executor.optimizer.workers import WorkerTeam
from planner.schedule.tasks import Lane

if TYPE_CHECKING:
    from executor.devices.cuda import CudaBackend

Array = npt.NDArray[Any]

Event = object
"""Made by :meth:`HostBackend.record_event`: a time on the host's clock, or an event on a stream."""

Meter = MemoryMeter | CudaMeter

_AT_ONCE: Final = 4096
Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]

Backend = Union["HostBackend", "CudaBackend"]
"""A device, as lanes and tasks use it."""


class HostBackend:
    """The host in place of a device. The calling thread computes, and nothing is asynchronous.

    Updates use as many threads as torch has when the backend is made.

    Attributes:
        submits: lanes whose tasks a thread submits to streams without waiting, if one rank trains, and no task adds up
            gradients.
    """

    submits: frozenset[Lane] = frozenset()

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._meter: MemoryMeter | None = None
        self._team = WorkerTeam(torch.get_num_threads())

    @contextlib.contextmanager
    def lane(self, lane: Lane) -> Iterator[None]:  # noqa: ARG002 - as :class:`CudaBackend` has it
        """Return a context in which the calling thread's work goes to the lane's stream, if it has one."""
        yield

    def record_event(self, lane: Lane) -> float:  # noqa: ARG002 - as :class:`CudaBackend` has it
        """Record an event after all work that this thread has submitted to the lane so far."""
        return time.perf_counter()

    def wait_event(self, lane: Lane, event: Event) -> None:
        """Make all work that this thread submits to the lane from now on wait for an event."""

    def event_time_s(self, event: Event) -> float:
        """Wait for an event; return its time, in seconds on the host's clock."""
        assert isinstance(event, float)
        return event

    def empty(self, num_bytes: int, *, on_device: bool) -> torch.Tensor:  # noqa: ARG002 - as :class:`CudaBackend` has it
        """Return uint8 ``[num_bytes]`` on the device, or in pinned host memory."""
        return torch.from_numpy(pages(num_bytes)) if num_bytes else torch.empty(0, dtype=torch.uint8)

    def claim(self, block: torch.Tensor) -> None:
        """Fill new host memory with zeros, so that it is near this thread's cores."""
        block.zero_()

    def pinned(self, shared: Array) -> torch.Tensor:
        """Return memory that ranks share, uint8, for copies to and from the device, pinned if that needs it."""
        return torch.from_numpy(shared)

    def release(self, block: torch.Tensor) -> int:
        """Free the device memory of a tensor's storage, but keep the storage and its views; return the freed bytes.

        The address stays the same; the system takes the pages back.
        """
        storage = block.untyped_storage()
        forget_pages(storage.data_ptr(), storage.nbytes())
        return storage.nbytes()

    def restore(self, block: torch.Tensor, num_bytes: int) -> None:
        """Allocate device memory again for a storage that :meth:`release` has freed. The old values are lost.

        The system maps pages again when they are used.
        """

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Copy between contiguous tensors of one type and shape, on the thread's lane."""
        assert destination.dtype == source.dtype
        # numpy copies in this thread alone; torch would start a thread pool in every lane.
        if destination.dtype is not torch.float32:
            destination, source = destination.view(torch.uint8), source.view(torch.uint8)
        np.copyto(destination.numpy(), source.numpy())

    def copy_both_ways(self, up: Pairs, down: Pairs) -> None:
        """Make copies from the device and copies to it at the same time, on the thread's lane, and wait for them.

        They are pairs of a destination and a source.
        """
        for destination, source in (*up, *down):
            self.copy(destination, source)

    def sum_rows(self, own: torch.Tensor, rows: torch.Tensor) -> None:
        """Set ``own``, ``[n]``, to the sums of ``rows``, ``[ranks, n]``, on the device, in fp32, with one rounding."""
        if len(own):
            _sum_rows(as_array(own), as_array(rows))

    def accumulate(self, sums: Sequence[tuple[torch.Tensor, torch.Tensor]], team: WorkerTeam) -> None:  # noqa: ARG002
        """Add flat tensors to others in host memory, all of one type; each pair is the sum and what is added.

        It uses torch's threads, which also compute. A GPU's are added later, in this order, by as many threads as
        ``team`` has, but not by those.
        """
        for total, values in sums:
            total.add_(values)

    def settle(self) -> None:
        """Wait until all that was accumulated has been added. Whoever reads sums in host memory calls it before."""

    def scale(self, values: torch.Tensor, factor: float) -> None:
        """Multiply a flat tensor on the device, in its own type, on the thread's lane."""
        _scale(as_array(values), np.float32(factor))

    def scratch(self, num_items: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate short-lived device memory on a lane. Meters count it."""
        taken = torch.empty(num_items, dtype=dtype, device="cpu")
        if (meter := self._meter) is not None:
            meter.count(taken)
        return taken

    def record_stream(self, tensor: torch.Tensor) -> None:
        """Keep the allocator from reusing a tensor's memory before the lane has finished with it."""

    def update(
        self,
        state: Sequence[torch.Tensor | SplitMaster],
        gradients: Sequence[torch.Tensor],
        rule: Rule,
        step: int,
    ) -> None:
        """Take one optimizer step on the device.

        It uses the kernel of updates on the host, so the bits are the same.

        Args:
            state: master copy, the optimizer's buffers, and the target of new bf16 weights, if the master copy does not
                have them.
            gradients: consecutive parts of the gradient.
            rule: the optimizer, its hyper-parameters, and the factor of the gradient.
            step: number of this step, from 1.
        """
        begin = 0
        for gradient in gradients:
            part = cut(state, begin, begin + len(gradient))
            update_on_host(part, gradient, rule, step, self._team)
            begin += len(gradient)

    @contextlib.contextmanager
    def meter(self) -> Iterator[MemoryMeter]:
        """Return a context that measures all device memory except that of :meth:`empty`."""
        with MemoryMeter() as meter:
            self._meter = meter
            try:
                yield meter
            finally:
                self._meter = None

    def expect_many_shapes(self) -> None:
        """Avoid kernels that take long to prepare for a new shape, until :meth:`forget_shapes`.

        The host's kernels need no preparation.
        """

    def forget_shapes(self) -> None:
        """End the effect of :meth:`expect_many_shapes`. May be called twice."""

    def allocator_counts(self) -> dict[str, int]:
        """Return what the device's allocator has counted since memory was last metered, by its own names.

        The host's allocator counts nothing.
        """
        return {}

    def sum_of_squares_on_host(self, tensor: torch.Tensor, team: WorkerTeam) -> float:  # noqa: ARG002
        """Return :meth:`sum_of_squares` of a tensor in host memory.

        It uses one thread, because the other cores compute at that time.
        """
        return sum_of_squares(as_array(tensor))

    def sum_of_squares(self, tensor: torch.Tensor) -> float:
        """Return the sum of squares of a flat tensor; or, if the device still computes it, its root, a scalar there."""
        return sum_of_squares(as_array(tensor))


def update_on_host(
    state: Sequence[torch.Tensor | SplitMaster],
    gradient: torch.Tensor,
    rule: Rule,
    step: int,
    team: WorkerTeam | None,
    memory: torch.Tensor | None = None,
) -> None:
    """Take one optimizer step in host memory.

    Args:
        state: master copy, the optimizer's buffers, and the target of new bf16 weights, if there is one.
        gradient: of the same length.
        rule: the optimizer, its hyper-parameters, and the factor of the gradient.
        step: number of this step, from 1.
        team: threads to run on; ``None`` for the calling thread.
        memory: uint8 workspace for rules that need one; ``None``: they allocate it.
    """
    arrays = [tensor if isinstance(tensor, SplitMaster) else as_array(tensor) for tensor in state]
    count = 1 + len(rule.entry.buffers)
    weight_out = arrays[count] if len(arrays) > count else None
    more = () if rule.entry.others is None else (memory,)
    rule.entry.host(arrays[:count], as_array(gradient), weight_out, rule.params, step, rule.scale, team, *more)


def add_on_host(sums: Sequence[tuple[torch.Tensor, torch.Tensor]], team: WorkerTeam) -> None:
    """Add flat values to others of their type, in host memory, to the bits of torch's addition.

    Args:
        sums: pairs of what is added to, and what is added.
        team: threads. Each has one part of all pairs, laid end to end: to start them takes as long as adding 10 MB.
    """
    arrays = [(as_array(total), as_array(values)) for total, values in sums]
    ends = list(itertools.accumulate(len(values) for _, values in arrays))

    def add(start: int, stop: int) -> None:
        for (total, values), end in zip(arrays, ends, strict=True):
            first = end - len(values)
            part = slice(max(start - first, 0), min(stop - first, len(values)))
            if part.start < part.stop:
                _add(total[part], values[part])

    team.run(add, ends[-1])


def _add(total: Array, values: Array) -> None:
    if total.dtype == np.uint16:
        _add_bf16(total, values)
    else:
        np.add(total, values, out=total)


def as_array(tensor: torch.Tensor) -> Array:
    """Return the numpy view of a tensor in host memory. The view of bf16 is uint16, its bits."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    array: Array = (tensor.view(torch.uint16) if tensor.dtype is torch.bfloat16 else tensor).numpy()
    return array


@nb.njit(nogil=True, cache=True, fastmath={"reassoc", "nsz"})
def _sum_squares(values: Any) -> float:
    total = 0.0
    for i in range(values.size):  # a loop over values is not vectorised, and six times slower
        wide = np.float64(as_float32(values[i]))
        total += wide * wide
    return total


@nb.njit(nogil=True, cache=True)
def _add_bf16(target: Any, bits: Any) -> None:
    for i in range(target.size):
        target[i] = float32_to_bf16(bf16_to_float32(target[i]) + bf16_to_float32(bits[i]))


@nb.njit(nogil=True, cache=True)
def _scale_bf16(bits: Any, factor: Any) -> None:
    for i in range(bits.size):
        bits[i] = float32_to_bf16(bf16_to_float32(bits[i]) * factor)


@nb.njit(nogil=True, cache=True)
def _sum_rows_bf16(bits: Any, rows: Any) -> None:
    total = np.empty(_AT_ONCE, np.float32)  # stays in a core's cache
    for start in range(0, bits.size, _AT_ONCE):
        count = min(_AT_ONCE, bits.size - start)
        total[:count] = 0.0
        for row in range(rows.shape[0]):
            for i in range(count):
                total[i] += bf16_to_float32(rows[row, start + i])
        for i in range(count):
            bits[start + i] = float32_to_bf16(total[i])


def _sum_rows(own: Array, rows: Array) -> None:
    if own.dtype == np.uint16:
        _sum_rows_bf16(own, rows)
    else:
        np.add.reduce(rows, axis=0, out=own)


def _scale(values: Array, factor: np.float32) -> None:
    """Multiply a flat array in place, in float32, as torch does. A uint16 array holds bits of bf16."""
    if values.dtype == np.uint16:
        _scale_bf16(values, factor)
    else:
        np.multiply(values, factor, out=values)


def sum_of_squares(values: Array) -> float:
    """Return the sum of squares of a flat array, added up in float64. A uint16 array holds bits of bf16.

    In float64 the order of summation changes only the sixteenth digit. So a float32 norm does not depend on how
    parameters are cut into pieces.
    """
    return float(_sum_squares(values))


def beside(backend: Backend, lane: Lane, work: Callable[[], None]) -> Callable[[], None]:
    """Let a stream do work beside what is computed, behind what has been; return a function that waits for it.

    Tensors that the work uses must live until then.
    """
    begun = backend.record_event(Lane.COMPUTE)
    with backend.lane(lane):
        backend.wait_event(lane, begun)
        work()
        ended = backend.record_event(lane)
    return lambda: backend.wait_event(Lane.COMPUTE, ended)
