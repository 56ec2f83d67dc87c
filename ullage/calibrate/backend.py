"""The two kinds of device that can be calibrated: CUDA GPUs, and a share of the CPU.

Probes are the same for both; they differ in the clock (wall time against CUDA events) and in how a copy is made.
"""

import ctypes
import functools
import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Literal

import numpy as np
import torch

from hwprofiles.machine import cpu_name
from hwprofiles.profile import AttentionType
from ullage.calibrate import kernels
from ullage.calibrate.options import Array
from ullage.calibrate.sampling import ROBUST, SHARED, SUSTAINED, Call, Case, Summary, clock_of, sample

_SM_CLOCK = 1  # NVML_CLOCK_SM


def sensors(device: torch.device) -> Callable[[], tuple[float, float] | None]:
    """Return a function that reads a GPU's SM clock in MHz and power in W, or ``None`` if they cannot be read.

    It reads through ``libnvidia-ml.so.1``, which comes with the driver.
    """
    handle = ctypes.c_void_p()
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        name = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
        failed = library.nvmlInit_v2() or library.nvmlDeviceGetHandleByUUID(name, ctypes.byref(handle))
    except (OSError, AttributeError):  # no driver, or a torch that does not know the device's id
        failed = True
    if failed:
        return lambda: None

    def read() -> tuple[float, float] | None:
        mhz, milliwatts = ctypes.c_uint(), ctypes.c_uint()
        if library.nvmlDeviceGetClockInfo(handle, _SM_CLOCK, ctypes.byref(mhz)) or library.nvmlDeviceGetPowerUsage(
            handle, ctypes.byref(milliwatts)
        ):
            return None
        return float(mhz.value), milliwatts.value / 1e3

    return read


_QUICK_COPY_BYTES = 2**27
FIRST_CALLS_S: Final[Mapping[bool, float]] = {True: 10.0, False: 20.0}
"""Seconds of first calls on a GPU, by whether calibration is quick. They are no part of the steps' budgets."""

Direction = Literal["down", "up"]

#: ``copier(num_bytes)``: a call that copies the next ``num_bytes`` between pools of device and host memory.
Copier = Callable[[int], Call]


def in_turn(step: Callable[[slice], object], pool_size: int, item_size: int) -> Call:
    """Return a call that takes a step on the next item of a pool, round and round."""
    starts = range(0, max(pool_size - item_size, 0) + 1, item_size)
    slices = itertools.cycle([slice(start, start + item_size) for start in starts])
    return lambda: step(next(slices))


class HostBackend:
    """A share of the CPU; its memory is ordinary memory and a copy is a memcpy that takes one core.

    Attributes:
        kind: as in :class:`hwprofiles.profile.Device`.
        num_cores: CPU cores that computing occupies (0 for a GPU).
        cores_per_copy: CPU cores that one running copy occupies.
        dram_bytes_per_copied_byte: host memory traffic of a copy: 1, or 2 where the device's memory is host memory.
        shapes: rows and hidden sizes of the matrix products to measure.
        beside: rows and hidden size of the product that runs beside other work.
        heads: of the attention to measure, the head dimension and the key-value heads of each type. The plain type of
            a data type comes first; others are of bf16 alone.
        num_heads, batch: its query heads and sequences.
        seq_lens, backward_seq_lens: lengths of these, forward and backward.
        most_elements: elements of the largest elementwise kernel.
        optimizer_sizes: numbers of parameters of AdamW.
        of_host: how updates on the host, and its other passes over memory, are sampled.
        pair_bytes, pair_copies: size and number of the copies that are issued at once beside other work.
        pool_bytes: device memory that operands rotate through. It is larger than any cache, as in training.
        copy_pool_bytes: size of the largest copy, and of the pools on either side that copies rotate through.
    """

    kind: Literal["gpu", "host"] = "host"
    cores_per_copy = 1
    dram_bytes_per_copied_byte = 2
    pool_bytes = 128 * 2**20
    pair_bytes, pair_copies = 8 * 2**20, 1
    of_host = ROBUST
    heads: Mapping[AttentionType, tuple[int, int]] = MappingProxyType({"bf16": (64, 8), "fp32": (64, 8)})
    num_heads, batch = 8, 1

    def __init__(self, num_cores: int, memory_bytes: int, *, quick: bool) -> None:
        self.name = f"{num_cores} core{'s' if num_cores > 1 else ''} of {cpu_name()}"
        self.device = torch.device("cpu")
        self.num_cores = num_cores
        self.shapes: tuple[tuple[int, ...], tuple[int, ...]] = (
            (64, 256, 1024, *(() if quick else (2048, 4096))),
            (256, 512, 1024, 2048),
        )
        self.beside = (256, 1024)
        self.seq_lens: tuple[int, ...] = (64, 128, 256, 512, 1024, 2048, *(() if quick else (4096,)))
        self.backward_seq_lens = self.seq_lens
        self.most_elements = 4**11 if quick else 4**12
        self.optimizer_sizes = tuple(2**i for i in range(14, 25 if quick else 27, 2))
        self.copy_pool_bytes = max(min(_QUICK_COPY_BYTES * (1 if quick else 2), memory_bytes // 2), 2**16)

    def time_s(self, call: Call, num_calls: int) -> float:
        """Return seconds per call by the wall clock: computing is synchronous."""
        return clock_of(self.num_cores)(call, num_calls)

    def sample(self, cases: Sequence[Case], budget_s: float) -> list[Summary]:
        """Sample as [Note: Robust timing] says."""
        return sample(cases, self.time_s, budget_s)

    def blocking(self, call: Call) -> Call:
        """Return the call itself: it blocks already."""
        return call

    def copier(self, direction: Direction, *, pinned: bool = True) -> Copier:  # noqa: ARG002 - one kind of memory
        """Return a memcpy by the calling thread; both directions are alike."""
        # Fill the pools now, so that page faults are not measured.
        source, target = (np.full(self.copy_pool_bytes, value, dtype=np.uint8) for value in (1, 2))

        def copy(part: slice) -> None:
            np.copyto(target[part], source[part])

        return functools.partial(in_turn, copy, self.copy_pool_bytes)

    def optimizer_cases(self) -> list[Case]:
        """Return updates by the CPU kernel on the device's cores."""
        state = adamw_state(max(self.optimizer_sizes))
        return adamw_cases(self.optimizer_sizes, state, self.num_cores)


class CudaBackend:
    """One GPU of this process, timed by CUDA events on the current stream.

    Sizes reach those of training, because beyond the largest one a curve can only say that the rate stays.

    Attributes: those of :class:`HostBackend`, and
        soak_s: duration of the large products before the first sample.
        lead_side: rows and columns of their matrices.
        first_calls_s: seconds that are left to first calls; libraries may build plans in them, or load kernels.
    """

    kind: Literal["gpu", "host"] = "gpu"
    num_cores = 0
    cores_per_copy = 0
    dram_bytes_per_copied_byte = 1
    pool_bytes = 2**30
    pair_bytes, pair_copies = 64 * 2**20, 4
    of_host = SHARED
    soak_s, lead_side = 2.0, 4096
    heads: Mapping[AttentionType, tuple[int, int]] = MappingProxyType(
        {"bf16": (64, 32), "fp32": (64, 32), "bf16-gqa": (64, 8), "bf16-128": (128, 32), "bf16-128-gqa": (128, 8)}
    )
    num_heads, batch = 32, 4

    def __init__(self, *, quick: bool) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.name = torch.cuda.get_device_name(self.device)
        rows = (64, 512, 2048, 8192, 16384) if quick else (64, 256, 512, 1024, 2048, 4096, 8192, 16384)
        hiddens = (1024, 4096, 8192, 16384) if quick else (1024, 2048, 4096, 8192, 16384)
        self.shapes: tuple[tuple[int, ...], tuple[int, ...]] = (rows, hiddens)
        self.beside = (8192, 8192)
        self.seq_lens: tuple[int, ...] = (128, 512, 2048, 4096) if quick else (128, 256, 512, 1024, 2048, 4096, 8192)
        # With shorter sequences, a GPU computes a backward in less time than autograd takes to launch it.
        self.backward_seq_lens = tuple(seq for seq in self.seq_lens if seq >= 512)
        self.most_elements = 4**14
        self.optimizer_sizes = tuple(2**i for i in range(14, 27, 2))
        self.copy_pool_bytes = 256 * 2**20
        self.first_calls_s = FIRST_CALLS_S[quick]
        self._read_sensors = sensors(self.device)
        self._thread = threading.local()  # its stream and its event

    def sample(self, cases: Sequence[Case], budget_s: float) -> list[Summary]:
        """Sample as [Note: Robust timing] says of GPUs."""
        readings: dict[Call, list[tuple[float, float]]] = defaultdict(list)

        def clock(call: Call, num_calls: int) -> float:
            self._lead(SUSTAINED.lead_s)
            return self.time_s(call, num_calls, readings[call])

        called = self._called_once(cases)
        self._lead(self.soak_s)
        self.soak_s = 0.0
        found = sample(called, clock, budget_s, SUSTAINED)
        for number, case in enumerate(cases[: len(found)]):
            if of_case := readings[case.call]:
                mhz, watts = np.median(of_case, axis=0).tolist()
                found[number] = found[number]._replace(mhz=mhz, watts=watts)
        return found

    def _called_once(self, cases: Sequence[Case]) -> Sequence[Case]:
        """Call every case, and return those for which there was time: two at least."""
        for number, case in enumerate(cases):
            if number >= 2 and self.first_calls_s <= 0:
                return cases[:number]
            begin_s = time.perf_counter()
            case.call()
            torch.cuda.synchronize(self.device)
            self.first_calls_s -= time.perf_counter() - begin_s
        return cases

    def _lead(self, seconds: float) -> None:
        """Issue large products that take about so long."""
        product, product_s = self._product
        for _ in range(round(seconds / product_s)):
            product()

    @functools.cached_property
    def _product(self) -> tuple[Call, float]:
        """A large product, and its time."""
        shape = (self.lead_side, self.lead_side)
        # Of equal numbers it would take less power.
        operand = torch.empty(shape, dtype=torch.bfloat16, device=self.device).uniform_(-0.1, 0.1)
        result = torch.empty_like(operand)

        def product() -> None:
            torch.mm(operand, operand, out=result)

        product()
        return product, self.time_s(product, 3)

    def time_s(self, call: Call, num_calls: int, readings: list[tuple[float, float]] | None = None) -> float:
        """Return seconds per call between two events on the current stream; read the sensors meanwhile."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(num_calls):
            call()
        end.record()
        if readings is not None and (reading := self._read_sensors()):
            readings.append(reading)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / num_calls

    def blocking(self, call: Call) -> Call:
        """Return a call that issues to a stream of the calling thread and waits for it, with the GIL released.

        The thread sleeps while it waits, as the executor's do: a thread that spins would take a core from updates.
        """

        def run() -> None:
            if not hasattr(self._thread, "stream"):
                torch.cuda.set_device(self.device)
                self._thread.stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
                self._thread.event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(self._thread.stream):
                call()
                self._thread.event.record()
            self._thread.event.synchronize()

        return run

    def copier(self, direction: Direction, *, pinned: bool = True) -> Copier:
        """Return asynchronous copies (synchronous ones if the host side is not pinned)."""
        pool_bytes = self.copy_pool_bytes
        on_device = torch.ones(pool_bytes, dtype=torch.uint8, device=self.device)
        on_host = torch.ones(pool_bytes, dtype=torch.uint8, pin_memory=pinned)
        source, target = (on_host, on_device) if direction == "down" else (on_device, on_host)
        return functools.partial(in_turn, lambda part: target[part].copy_(source[part], non_blocking=True), pool_bytes)

    def optimizer_cases(self) -> list[Case]:
        """Return updates on the device; subgroups rotate through the state of the largest."""
        num_params = max(self.optimizer_sizes)
        state = [torch.full((num_params,), value, device=self.device) for value in (0.02, 1e-3, 1e-6)]
        state += [torch.full((num_params,), 1e-3, dtype=torch.bfloat16, device=self.device) for _ in range(2)]

        return _rotating(self.optimizer_sizes, state, kernels.device_adamw)


Backend = HostBackend | CudaBackend
"""A device, as probes use it."""


def adamw_state(num_params: int) -> tuple[Array, ...]:
    """Return the arrays of a CPU AdamW over so many parameters, without page faults to come."""
    master, exp_avg = (np.full(num_params, value, dtype=np.float32) for value in (0.02, 1e-3))
    exp_avg_sq = np.full(num_params, 1e-6, dtype=np.float32)
    gradient = np.full(num_params, 0x3A83, dtype=np.uint16)  # 0.001 in bfloat16: away from zero and denormals
    weight = np.full(num_params, 0, dtype=np.uint16)  # zeros() would leave page faults to the updates
    return master, exp_avg, exp_avg_sq, gradient, weight


def adamw_cases(sizes: tuple[int, ...], state: tuple[Array, ...], num_threads: int) -> list[Case]:
    """Return one CPU AdamW update per number of parameters, on subgroups that rotate through the state."""
    return _rotating(sizes, state, lambda *arrays: kernels.cpu_adamw(arrays, num_threads))


def _rotating(sizes: tuple[int, ...], state: Sequence[Any], step: Callable[..., object]) -> list[Case]:
    """Return one step per size, on subgroups that rotate through the flat state."""

    def update(part: slice) -> None:
        step(*(values[part] for values in state))

    return [Case(size, in_turn(update, len(state[0]), size)) for size in sizes]
