"""The two kinds of device that can be calibrated: CUDA GPUs, and a share of the CPU.

Probes are the same for both; they differ in the clock (wall time against CUDA events) and in how a copy is made.
"""

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Protocol

import numpy as np
import torch

from hwprofiles.calibrate.options import CpuAdamW, Kernels
from hwprofiles.calibrate.sampling import Call, Case, clock_of
from hwprofiles.machine import cpu_name

_QUICK_COPY_BYTES = 2**27

Direction = Literal["down", "up"]


class Backend(Protocol):
    """The interface of a device to probes.

    Attributes:
        kind: as in :class:`hwprofiles.profile.Device`.
        num_cores: CPU cores that computing occupies (0 for a GPU).
        cores_per_copy: CPU cores that one running copy occupies.
        dram_bytes_per_copied_byte: host memory traffic of a copy: 1, or 2 where the device's memory is host memory.
        shapes: rows and hidden sizes of the matrix products to measure.
        pool_bytes: device memory that operands rotate through. It is larger than any cache, as in training.
        copy_pool_bytes: size of the largest copy, and of the pools on either side that copies rotate through.
    """

    kind: Literal["gpu", "host"]
    name: str
    device: torch.device
    num_cores: int
    cores_per_copy: int
    dram_bytes_per_copied_byte: int
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    pool_bytes: int
    copy_pool_bytes: int

    def time_s(self, call: Call, num_calls: int) -> float:
        """See :data:`hwprofiles.calibrate.sampling.Clock`."""
        ...

    def blocking(self, call: Call) -> Call:
        """Return a call that blocks until its work is done. Any thread may use it."""
        ...

    def copier(self, direction: Direction, *, pinned: bool = True) -> "Copier":
        """Return a copier for one direction."""
        ...

    def optimizer_cases(self, sizes: tuple[int, ...], kernels: Kernels) -> list[Case]:
        """Return one AdamW update on the device per number of parameters."""
        ...


class Copier(Protocol):
    """Copies between a pool of device memory and a pool of host memory."""

    def call(self, num_bytes: int) -> Call:
        """Return a call that copies the next ``num_bytes`` of the pools."""
        ...


def rotate(pool_size: int, item_size: int) -> Iterator[slice]:
    """Yield slices of a pool for successive items, without end."""
    starts = range(0, max(pool_size - item_size, 0) + 1, item_size)
    return itertools.cycle([slice(start, start + item_size) for start in starts])


class HostBackend:
    """A share of the CPU; its memory is ordinary memory and a copy is a memcpy that takes one core."""

    kind: Literal["gpu", "host"] = "host"
    cores_per_copy = 1
    dram_bytes_per_copied_byte = 2
    pool_bytes = 128 * 2**20

    def __init__(self, num_cores: int, memory_bytes: int, *, quick: bool) -> None:
        self.name = f"{num_cores} core{'s' if num_cores > 1 else ''} of {cpu_name()}"
        self.device = torch.device("cpu")
        self.num_cores = num_cores
        self.shapes: tuple[tuple[int, ...], tuple[int, ...]] = (
            (64, 256, 1024, *(() if quick else (2048, 4096))),
            (256, 512, 1024, 2048),
        )
        self.copy_pool_bytes = max(min(_QUICK_COPY_BYTES * (1 if quick else 2), memory_bytes // 2), 2**16)

    def time_s(self, call: Call, num_calls: int) -> float:
        """Return seconds per call by the wall clock: computing is synchronous."""
        return clock_of(self.num_cores)(call, num_calls)

    def blocking(self, call: Call) -> Call:
        """Return the call itself: it blocks already."""
        return call

    def copier(self, direction: Direction, *, pinned: bool = True) -> Copier:  # noqa: ARG002 - one kind of memory
        """Return a memcpy by the calling thread; both directions are alike."""
        return _Memcpy(self.copy_pool_bytes)

    def optimizer_cases(self, sizes: tuple[int, ...], kernels: Kernels) -> list[Case]:
        """Return updates by the injected CPU kernel on the device's cores."""
        return adamw_cases(sizes, kernels.cpu_adamw, self.num_cores)


class _Memcpy:
    def __init__(self, pool_bytes: int) -> None:
        # Fill the pools now, so that page faults are not measured.
        self._source = np.full(pool_bytes, 1, dtype=np.uint8)
        self._target = np.full(pool_bytes, 2, dtype=np.uint8)

    def call(self, num_bytes: int) -> Call:
        slices = rotate(len(self._source), num_bytes)

        def copy() -> None:
            part = next(slices)
            np.copyto(self._target[part], self._source[part])

        return copy


class CudaBackend:
    """One GPU of this process, timed by CUDA events on the current stream."""

    kind: Literal["gpu", "host"] = "gpu"
    num_cores = 0
    cores_per_copy = 0
    dram_bytes_per_copied_byte = 1
    pool_bytes = 512 * 2**20

    def __init__(self, *, quick: bool) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.name = torch.cuda.get_device_name(self.device)
        rows = (64, 512, 2048, 8192) if quick else (64, 256, 512, 1024, 2048, 4096, 8192)
        self.shapes: tuple[tuple[int, ...], tuple[int, ...]] = (rows, (1024, 2048, 4096, 8192))
        self.copy_pool_bytes = 256 * 2**20
        self._stream = threading.local()

    def time_s(self, call: Call, num_calls: int) -> float:
        """Return seconds per call between two events on the current stream."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(self.device)
        start.record()
        for _ in range(num_calls):
            call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / num_calls

    def blocking(self, call: Call) -> Call:
        """Return a call that issues to a stream of the calling thread and waits for it, with the GIL released."""

        def run() -> None:
            if not hasattr(self._stream, "value"):
                torch.cuda.set_device(self.device)
                self._stream.value = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(self._stream.value):
                call()
            self._stream.value.synchronize()

        return run

    def copier(self, direction: Direction, *, pinned: bool = True) -> Copier:
        """Return asynchronous copies (synchronous ones if the host side is not pinned)."""
        return _CudaCopy(self.device, direction, self.copy_pool_bytes, pinned=pinned)

    def optimizer_cases(self, sizes: tuple[int, ...], kernels: Kernels) -> list[Case]:
        """Return updates by the injected kernel; subgroups rotate through the state of the largest."""
        num_params = max(sizes)
        state = [torch.full((num_params,), value, device=self.device) for value in (0.02, 1e-3, 1e-6)]
        state += [torch.full((num_params,), 1e-3, dtype=torch.bfloat16, device=self.device) for _ in range(2)]

        return _rotating(sizes, state, kernels.device_adamw)


class _CudaCopy:
    def __init__(self, device: torch.device, direction: Direction, pool_bytes: int, *, pinned: bool) -> None:
        on_device = torch.ones(pool_bytes, dtype=torch.uint8, device=device)
        on_host = torch.ones(pool_bytes, dtype=torch.uint8, pin_memory=pinned)
        self._source, self._target = (on_host, on_device) if direction == "down" else (on_device, on_host)

    def call(self, num_bytes: int) -> Call:
        slices = rotate(len(self._source), num_bytes)

        def copy() -> None:
            part = next(slices)
            self._target[part].copy_(self._source[part], non_blocking=True)

        return copy


def adamw_cases(sizes: tuple[int, ...], cpu_adamw: CpuAdamW, num_threads: int) -> list[Case]:
    """Return one CPU AdamW update per number of parameters. Subgroups rotate through the state of the largest."""
    num_params = max(sizes)
    master, exp_avg = (np.full(num_params, value, dtype=np.float32) for value in (0.02, 1e-3))
    exp_avg_sq = np.full(num_params, 1e-6, dtype=np.float32)
    gradient = np.full(num_params, 0x3A83, dtype=np.uint16)  # 0.001 in bfloat16: away from zero and denormals
    weight = np.zeros(num_params, dtype=np.uint16)
    arrays = (master, exp_avg, exp_avg_sq, gradient, weight)

    return _rotating(sizes, arrays, lambda m, avg, sq, grad, w: cpu_adamw(m, avg, sq, grad, w, num_threads))


def _rotating(sizes: tuple[int, ...], state: Sequence[Any], step: Callable[..., object]) -> list[Case]:
    """Return one step per size, on subgroups that rotate through the flat state."""

    def update(size: int) -> Call:
        slices = rotate(len(state[0]), size)

        def call() -> None:
            part = next(slices)
            step(*(values[part] for values in state))

        return call

    return [Case(size, update(size)) for size in sizes]
