"""Calibration from beginning to end."""

import contextlib
import platform
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from hwprofiles.allocator import keep_freed_memory
from hwprofiles.calibrate.backend import Backend, CudaBackend, HostBackend, adamw_cases
from hwprofiles.calibrate.compute import ComputeProbe
from hwprofiles.calibrate.disk import probe_disk
from hwprofiles.calibrate.fabric import probe_fabric
from hwprofiles.calibrate.machine import available_memory_bytes, cpu_name, num_cores, profile_name
from hwprofiles.calibrate.options import (
    CalibrationError,
    CalibrationOptions,
    CalibrationReport,
    CpuAdamW,
    Kernels,
    Progress,
)
from hwprofiles.calibrate.sampling import quantity
from hwprofiles.calibrate.saving import probe_saving
from hwprofiles.calibrate.traffic import TrafficProbe, fewest_threads, optimizer_by_threads
from hwprofiles.profile import Device, HardwareProfile, Host, Storage
from hwprofiles.quantity import Quantity

_USABLE = 0.85  # of the available memory: the rest is for the program itself and for what other programs may want
# Steps in order, with their shares of the time. The disk comes first: it is what most often cannot be measured.
_SHARES = {
    "disk": 3.0,
    "products of few rows": 2.0,
    "elementwise kernels": 2.0,
    "the host's own time": 2.0,
    "products in bf16": 3.0,
    "products in fp32": 2.5,
    "attention in bf16": 1.0,
    "attention in fp32": 1.0,
    "optimizer on the device": 2.0,
    "device memory": 1.0,
    "gradient norm": 1.0,
    "optimizer against threads": 1.5,
    "copies": 4.0,
    "optimizer on the host": 2.5,
    "host memory": 1.0,
    "checkpoints": 1.0,
    "all at once": 7.0,
    "between devices": 1.0,
}


class _Steps:
    """Reports each step as it begins, and shares the time out."""

    def __init__(self, total_s: float, progress: Progress) -> None:
        self._total_s, self._progress = total_s, progress

    def begin(self, name: str) -> float:
        """Report a step and return its budget in seconds."""
        self._progress(name, list(_SHARES).index(name), len(_SHARES))
        return self._total_s * _SHARES[name] / sum(_SHARES.values())

    def end(self) -> None:
        """Report that all steps are done."""
        self._progress("done", len(_SHARES), len(_SHARES))


def calibrate(
    options: CalibrationOptions, kernels: Kernels, progress: Progress
) -> tuple[HardwareProfile, CalibrationReport]:
    """Measure this machine.

    torch's number of threads is set meanwhile and restored; nothing is left on disk, not even after Ctrl-C.

    Args:
        options: what to measure.
        kernels: what the executor runs, see :class:`hwprofiles.calibrate.options.Kernels`.
        progress: called before each step and after the last with its name, steps done and steps in all.

    Returns:
        The profile, every value with provenance, and how activities slowed each other down.

    Raises:
        CalibrationError: the options do not fit the machine, or the disk cannot be measured.
    """
    begin_s = time.perf_counter()
    on_gpu = torch.cuda.is_available() if options.device is None else options.device == "gpu"
    if on_gpu and not torch.cuda.is_available():
        raise CalibrationError("device 'gpu' was asked for, but torch finds no CUDA GPU; choose 'host'")
    cores, num_devices = num_cores(), torch.cuda.device_count() if on_gpu else 1
    device_memory, host_memory = _divide_memory(options, on_gpu=on_gpu)
    if not on_gpu:
        keep_freed_memory()  # as the executor does
    backend = _backend(options, cores, int(device_memory.value), on_gpu=on_gpu)
    # What computes keeps its cores; on GPUs each process needs one core to issue kernels from.
    spare_cores = max(cores - (num_devices if on_gpu else backend.num_cores), 1)
    steps = _Steps(options.total_s, progress)
    with _torch_threads(backend.num_cores or cores, kernels.cpu_adamw), torch.no_grad():
        nvme = _probe_scratch(options, steps.begin("disk"))
        compute = ComputeProbe.create(backend, options.seed, quick=options.quick)
        device = _probe_device(compute, kernels, device_memory, steps)
        by_threads = optimizer_by_threads(kernels.cpu_adamw, cores, steps.begin("optimizer against threads"))
        optimizer_cores = fewest_threads(by_threads, spare_cores)
        traffic = TrafficProbe(backend, kernels.cpu_adamw, optimizer_cores, cores, quick=options.quick)
        link = traffic.link(steps.begin("copies"))
        optimizer = traffic.optimizer(steps.begin("optimizer on the host"))
        passes = traffic.elementwise_bytes_per_s(steps.begin("host memory"))
        saving = probe_saving(steps.begin("checkpoints"))
        dram, pairs = traffic.contention(compute.gemm_call(), steps.begin("all at once"))
        fabric = probe_fabric(num_devices, steps.begin("between devices"))
    places = [f"{backend.kind}{i}" for i in range(num_devices)]
    profile = HardwareProfile(
        name=options.name or profile_name(),
        description=f"{num_devices} x {backend.name}, {platform.system()}, torch {torch.__version__}",
        device=device,
        devices_per_node=num_devices,
        host=Host(
            name=cpu_name(),
            memory_bytes=host_memory,
            dram_bytes_per_s=dram,
            num_cores=cores,
            optimizer=optimizer,
            num_optimizer_cores=optimizer_cores,
            optimizer_by_threads=by_threads,
            elementwise_bytes_per_s=passes,
            **saving._asdict(),
        ),
        host_link=link,
        nvme=nvme,
        intra_node=fabric,
        topology=(*((place, "dram") for place in places), ("dram", "nvme0")),
    )
    steps.end()
    return profile, CalibrationReport(pairs, time.perf_counter() - begin_s)


def _probe_device(compute: ComputeProbe, kernels: Kernels, memory: Quantity, steps: _Steps) -> Device:
    rows_half = compute.gemm_rows_half(steps.begin("products of few rows"))
    elementwise = compute.elementwise(steps.begin("elementwise kernels"))
    issue_s, step_s = compute.host_s(kernels.host_times, elementwise, steps.begin("the host's own time"))
    return Device(
        name=compute.backend.name,
        kind=compute.backend.kind,
        memory_bytes=memory,
        num_cores=compute.backend.num_cores,
        gemm_rows_half=rows_half,
        gemm={
            "bf16": compute.gemm("bf16", rows_half.value, steps.begin("products in bf16")),
            "fp32": compute.gemm("fp32", rows_half.value, steps.begin("products in fp32")),
        },
        attention={
            "bf16": compute.attention("bf16", steps.begin("attention in bf16")),
            "fp32": compute.attention("fp32", steps.begin("attention in fp32")),
        },
        elementwise=elementwise,
        optimizer=compute.optimizer(kernels.cpu_adamw, steps.begin("optimizer on the device")),
        memory_bytes_per_s=compute.memory_bytes_per_s(steps.begin("device memory")),
        gradient_norm=compute.gradient_norm(kernels.sum_of_squares, steps.begin("gradient norm")),
        issue_s=issue_s,
        step_s=step_s,
    )


def _backend(options: CalibrationOptions, cores: int, memory_bytes: int, *, on_gpu: bool) -> Backend:
    if on_gpu:
        return CudaBackend(quick=options.quick)
    device_cores = options.device_cores or max(cores // 2, 1)
    if device_cores > cores:
        raise CalibrationError(f"device_cores is {device_cores}, but only {cores} cores may be used; give fewer")
    return HostBackend(device_cores, memory_bytes, quick=options.quick)


def _divide_memory(options: CalibrationOptions, *, on_gpu: bool) -> tuple[Quantity, Quantity]:
    """Return what training may use on the device and on the host."""
    usable = int(available_memory_bytes() * _USABLE)
    share = f"{_USABLE:.0%} of the available memory"
    asked = options.device_memory_bytes
    capacity = torch.cuda.mem_get_info()[0] if on_gpu else usable - 1
    if asked is not None and asked > capacity:
        raise CalibrationError(f"device_memory_bytes is {asked}, but at most {capacity} are free for it; give fewer")
    if on_gpu:
        source = "as asked for" if asked else "free memory of the GPU"
        return quantity(asked or capacity, "bytes", source, 1), quantity(usable, "bytes", share, 1)
    device = asked or usable // 4
    source = "arena in host memory, " + ("as asked for" if asked else f"a quarter of {share}")
    return (
        quantity(device, "bytes", source, 1),
        quantity(usable - device, "bytes", f"{share}, less the device's arena", 1),
    )


def _probe_scratch(options: CalibrationOptions, budget_s: float) -> Storage:
    if options.scratch_dir is not None:
        return probe_disk(options.scratch_dir, budget_s, quick=options.quick)
    cache = Path.home() / ".cache"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.TemporaryDirectory(prefix="ullage-", dir=cache)
    except OSError as error:
        raise CalibrationError(f"disk probe: cannot write in {cache} ({error}); choose a scratch_dir") from error
    with scratch as directory:
        return probe_disk(Path(directory), budget_s, quick=options.quick)


@contextlib.contextmanager
def _torch_threads(num_threads: int, cpu_adamw: CpuAdamW) -> Iterator[None]:
    before = torch.get_num_threads()
    try:
        # When numba starts its OpenMP team, it sets the calling thread's number of threads, torch's with it: let it
        # start now, so that it cannot do so between two measurements.
        adamw_cases((64,), cpu_adamw, 1)[0].call()
        torch.set_num_threads(num_threads)
        yield
    finally:
        torch.set_num_threads(before)
