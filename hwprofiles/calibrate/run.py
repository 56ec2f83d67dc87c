"""Calibration from beginning to end."""

import contextlib
import dataclasses
import functools
import gc
import math
import platform
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch

from hwprofiles.allocator import keep_freed_memory
from hwprofiles.calibrate.backend import Backend, CudaBackend, HostBackend, adamw_cases, adamw_state
from hwprofiles.calibrate.compute import ComputeProbe
from hwprofiles.calibrate.disk import Disk, open_disk
from hwprofiles.calibrate.fabric import joined, probe_fabric, probe_uplinks
from hwprofiles.calibrate.options import (
    CalibrationError,
    CalibrationOptions,
    CalibrationReport,
    CpuAdamW,
    Kernels,
    Pair,
    Progress,
)
from hwprofiles.calibrate.sampling import quantity
from hwprofiles.calibrate.saving import probe_saving
from hwprofiles.calibrate.traffic import (
    TrafficProbe,
    fewest_threads,
    narrow_update_s,
    optimizer_by_threads,
    pool_params,
)
from hwprofiles.catalogue import Part
from hwprofiles.machine import (
    available_memory_bytes,
    cache_bytes,
    cpu_name,
    num_cores,
    num_issuing_cores,
    profile_name,
    this_machine,
)
from hwprofiles.profile import FOR_LIBRARIES_BYTES, Device, Fabric, HardwareProfile, Host, Link, Storage
from hwprofiles.quantity import Provenance, Quantity

USABLE_SHARE = 0.85
"""Usable fraction of the available memory; the rest is for the program itself and for other programs."""
# Steps of each part in order, with their shares of the time. The disk comes first, because it fails most often.
_SHARES: Final[Mapping[Part, Mapping[str, float]]] = {
    "disk": {"disk": 3.0},
    "pfs": {"shared file system": 3.0},
    "device": {
        "products of few rows": 2.0,
        "elementwise kernels in bf16": 1.5,
        "elementwise kernels in fp32": 1.5,
        "the host's own time": 2.0,
        "products in bf16": 3.0,
        "products in fp32": 2.5,
        "products in fp8": 2.0,
        "attention in bf16": 2.0,
        "attention in fp32": 1.0,
        "backward of attention in bf16": 2.0,
        "backward of attention in fp32": 1.0,
        "optimizer on the device": 2.0,
        "device memory": 1.0,
        "gradient norm": 1.0,
    },
    "cpu": {
        "optimizer against threads": 1.5,
        "optimizer on the host": 2.5,
        "updates with state in fewer bytes": 1.0,
        "host memory": 1.0,
        "checkpoints": 1.0,
    },
    "copies": {"copies": 4.0},
    "together": {"all at once": 7.0},
    "fabric": {"between devices": 1.0},
}
_ALL = sum(sum(steps.values()) for part, steps in _SHARES.items() if part != "pfs")


class _Steps:
    """Reports each step as it begins, and divides the time among steps."""

    def __init__(self, options: CalibrationOptions, progress: Progress, *, on_gpu: bool) -> None:
        shares = {part: steps for part, steps in _SHARES.items() if options.measures(part)}
        self._budgets_s = {
            name: options.total_s(on_gpu=on_gpu) * share / _ALL
            for steps in shares.values()
            for name, share in steps.items()
        }
        self._done_s, self._progress = 0.0, progress

    def begin(self, name: str) -> float:
        """Report a step and return its budget in seconds."""
        self._progress(name, self._done_s, self._total_s)
        self._done_s += self._budgets_s[name]
        return self._budgets_s[name]

    def end(self) -> None:
        """Report that all steps are done."""
        self._progress("done", self._total_s, self._total_s)

    @property
    def _total_s(self) -> float:
        return math.fsum(self._budgets_s.values())


def calibrate(
    options: CalibrationOptions, kernels: Kernels, progress: Progress
) -> tuple[HardwareProfile, CalibrationReport]:
    """Measure this machine, or parts of it.

    The call changes torch's number of threads and restores it. It leaves nothing on disk, even after Ctrl-C.

    If several CPU cores compute, start Python with ``OMP_WAIT_POLICY=passive``, as training and the commands do.
    Otherwise threads spin between kernels and begin the next kernel tens of microseconds sooner than in training.

    Args:
        options: what to measure.
        kernels: the executor's kernels; see :class:`hwprofiles.calibrate.options.Kernels`.
        progress: called before each step and after the last, with its name, the seconds done and the seconds in all.

    Returns:
        The profile with the provenance of every measured value, and a report of how activities slow each other down.

    Raises:
        CalibrationError: the options do not fit the machine, or a disk cannot be measured.
    """
    begin_s = time.perf_counter()
    base = options.base if options.only is not None else None
    on_gpu = torch.cuda.is_available() if options.device is None else options.device == "gpu"
    if on_gpu and not torch.cuda.is_available():
        raise CalibrationError("device is 'gpu', but torch finds no CUDA GPU; choose 'host'")
    if base is not None and base.device.kind != ("gpu" if on_gpu else "host"):
        raise CalibrationError(
            f"profile {base.name} is of a {base.device.kind} device, but {'a' if on_gpu else 'no'} CUDA GPU is found "
            "here; measure all parts anew, or choose another profile to renew"
        )
    if not on_gpu:
        keep_freed_memory()  # as the executor does
    steps = _Steps(options, progress, on_gpu=on_gpu)
    with contextlib.ExitStack() as stack:
        machine = _Machine.find(options, on_gpu=on_gpu)
        stack.enter_context(_torch_threads(machine.backend.num_cores or machine.cores, kernels.cpu_adamw))
        stack.enter_context(torch.no_grad())
        found = _Probes(options, kernels, machine, steps, stack).measure()
    if found.device is not None and on_gpu and not options.device_memory_bytes:
        found.device = found.device.model_copy(update={"memory_bytes": _left_on_gpu()})
    profile = (_new_profile if base is None else functools.partial(_updated_profile, base))(found, machine, options)
    steps.end()
    return profile, CalibrationReport(found.pairs, time.perf_counter() - begin_s)


@dataclasses.dataclass(frozen=True)
class _Machine:
    """The machine to measure: its device backend, cores and memory."""

    backend: Backend
    cores: int
    num_devices: int
    device_memory: Quantity
    host_memory: Quantity

    @classmethod
    def find(cls, options: CalibrationOptions, *, on_gpu: bool) -> "_Machine":
        cores, num_devices = num_cores(), torch.cuda.device_count() if on_gpu else 1
        device_memory, host_memory = _divide_memory(options, on_gpu=on_gpu)
        backend = _backend(options, cores, int(device_memory.value), on_gpu=on_gpu)
        return cls(backend, cores, num_devices, device_memory, host_memory)

    @property
    def spare_cores(self) -> int:
        """Cores that update: those that the device does not use, and that launch nothing to it."""
        taken = self.backend.num_cores
        if self.backend.kind == "gpu":
            taken = self.num_devices * num_issuing_cores(self.cores // self.num_devices)
        return max(self.cores - taken, 1)


@dataclasses.dataclass
class _Found:
    """The measurements; ``None`` or empty for parts that were not measured."""

    device: Device | None = None
    host: dict[str, Any] = dataclasses.field(default_factory=dict)
    link: Link | None = None
    nvme: Storage | None = None
    pfs: Storage | None = None
    fabric: Fabric | None = None
    uplinks: tuple[tuple[int, ...], ...] = ()
    pairs: tuple[Pair, ...] = ()
    folders: tuple[Path, ...] = ()


class _Probes:
    """Measures the requested parts in order."""

    def __init__(
        self,
        options: CalibrationOptions,
        kernels: Kernels,
        machine: _Machine,
        steps: _Steps,
        stack: contextlib.ExitStack,
    ) -> None:
        self._options, self._kernels, self._machine, self._steps = options, kernels, machine, steps
        self._stack = stack  # closes resources at the end of calibration
        self._found = _Found()

    def measure(self) -> _Found:
        options, found, begin = self._options, self._found, self._steps.begin
        disk = None
        if options.measures("disk"):
            budget_s = begin("disk")  # opening the disk is part of this step
            disk = self._disk()
            found.nvme = with_endurance(disk.probe(budget_s), options)
        elif options.measures("together"):
            disk = self._disk()
        if (folder := options.folder("pfs")) is not None:
            with open_disk(folder, quick=options.quick) as shared:
                found.pfs = shared.probe(begin("shared file system"), shared=True)
        compute = ComputeProbe.create(self._machine.backend, options.seed)
        if options.measures("device"):
            found.device = _probe_device(compute, self._kernels, self._machine.device_memory, self._steps)
        traffic = self._cpu()
        if options.measures("copies"):
            found.link = traffic.link(begin("copies"))
        if options.measures("together"):
            dram, found.pairs = traffic.contention(compute.gemm_call(), disk, begin("all at once"))
            found.host["dram_bytes_per_s"] = dram
        if options.measures("fabric"):
            self._fabric(begin("between devices"))
        return found

    def _disk(self) -> Disk:
        options = self._options
        folder = options.folder("disk")
        if folder is None:
            folder = self._stack.enter_context(_scratch_folder())
        self._found.folders = (folder,)
        return self._stack.enter_context(open_disk(folder, quick=options.quick))

    def _cpu(self) -> TrafficProbe:
        """Measure the host's updates if requested; return the probe of copies and contention."""
        options, machine, kernels, begin = self._options, self._machine, self._kernels, self._steps.begin
        most_params = max(machine.backend.optimizer_sizes)
        if machine.backend.kind == "gpu":  # its host may have caches larger than that
            most_params = max(most_params, pool_params(cache_bytes()))
        state = adamw_state(most_params if options.measures("cpu") or options.measures("together") else 1)
        if not options.measures("cpu"):
            assert options.base is not None
            cores = options.base.host.num_optimizer_cores
            return TrafficProbe(machine.backend, kernels.cpu_adamw, state, cores, machine.cores)
        budget_s = begin("optimizer against threads")
        by_threads = optimizer_by_threads(kernels.cpu_adamw, state, machine.cores, machine.spare_cores, budget_s)
        cores = fewest_threads(by_threads, machine.spare_cores)
        traffic = TrafficProbe(machine.backend, kernels.cpu_adamw, state, cores, machine.cores)
        self._found.host |= {
            "name": cpu_name(),
            "num_cores": machine.cores,
            "num_optimizer_cores": cores,
            "optimizer_by_threads": by_threads,
            "optimizer": traffic.optimizer(begin("optimizer on the host")),
            "narrow_update_s": narrow_update_s(kernels.narrow_updates, begin("updates with state in fewer bytes")),
            "elementwise_bytes_per_s": traffic.elementwise_bytes_per_s(begin("host memory")),
            **probe_saving(begin("checkpoints"))._asdict(),
        }
        return traffic

    def _fabric(self, budget_s: float) -> None:
        found, machine = self._found, self._machine
        if machine.num_devices < 2 and self._options.only is not None:
            raise CalibrationError(
                "fabric: nothing joins a single device; start several ranks, `torchrun --nproc-per-node N -m ullage "
                "calibrate --only fabric`"
            )
        found.fabric = probe_fabric(machine.num_devices, budget_s / 2)
        if machine.num_devices > 1:
            found.uplinks, pairs = probe_uplinks(machine.num_devices, budget_s / 2)
            found.pairs += pairs


def with_endurance(storage: Storage, options: CalibrationOptions) -> Storage:
    """Return storage with its endurance from the options, or else unchanged. No probe measures endurance."""
    known = storage.endurance_bytes_per_day
    if known is None and options.base is not None and options.base.nvme is not None:
        known = options.base.nvme.endurance_bytes_per_day
    if options.endurance_bytes_per_day is not None:
        stated = Provenance(origin="published", source="the drives' data sheet, as asked for")
        known = Quantity(value=options.endurance_bytes_per_day, unit="bytes", provenance=stated)
    return storage.model_copy(update={"endurance_bytes_per_day": known})


def _new_profile(found: _Found, machine: _Machine, options: CalibrationOptions) -> HardwareProfile:
    """Return a profile of measured values only."""
    backend = machine.backend
    assert found.device is not None
    assert found.link is not None
    return HardwareProfile(
        name=options.name or profile_name(),
        description=f"{machine.num_devices} x {backend.name}, {platform.system()}, torch {torch.__version__}",
        device=found.device,
        devices_per_node=machine.num_devices,
        host=Host(memory_bytes=machine.host_memory, **found.host),
        host_link=found.link,
        nvme=found.nvme,
        intra_node=found.fabric,
        topology=(*joined(backend.kind, machine.num_devices, found.uplinks), ("dram", "nvme0")),
        measured_on=this_machine(found.folders),
    )


def _updated_profile(
    base: HardwareProfile, found: _Found, machine: _Machine, options: CalibrationOptions
) -> HardwareProfile:
    """Return a profile in which the measured parts are replaced."""
    here = this_machine(found.folders if options.measures("disk") else ())
    if base.measured_on is not None and not options.measures("disk"):
        here = here.model_copy(update={"drives": base.measured_on.drives})
    parts = {"device": found.device, "host_link": found.link, "nvme": found.nvme, "pfs": found.pfs}
    changed: dict[str, Any] = {name: part for name, part in parts.items() if part is not None}
    if found.nvme is None and base.nvme is not None:  # the endurance can be given without measuring the disk
        changed["nvme"] = with_endurance(base.nvme, options)
    if found.device is not None:  # the memory limit is that of the options, or that of the old profile
        memory = found.device if options.device_memory_bytes else base.device
        changed["device"] = found.device.model_copy(update={"memory_bytes": memory.memory_bytes})
    if options.host_memory_bytes is not None:
        found.host["memory_bytes"] = machine.host_memory
    if found.host:
        changed["host"] = base.host.model_copy(update=found.host)
    if found.fabric is not None:
        kind, count = base.device.kind, base.devices_per_node
        rest = tuple(pair for pair in base.topology if not any(f"{kind}{i}" in pair for i in range(count)))
        rest = tuple(pair for pair in rest if not any(place.startswith("switch") for place in pair))
        changed |= {"intra_node": found.fabric, "topology": (*joined(kind, count, found.uplinks), *rest)}
    if options.name:
        changed["name"] = options.name
    renewed = base.model_copy(update={**changed, "measured_on": here})
    return HardwareProfile.model_validate(renewed.model_dump(mode="json", exclude_none=True))


def _probe_device(compute: ComputeProbe, kernels: Kernels, memory: Quantity, steps: _Steps) -> Device:
    rows_half = compute.gemm_rows_half(steps.begin("products of few rows"))
    elementwise = compute.elementwise("bf16", steps.begin("elementwise kernels in bf16"))
    elementwise_fp32 = compute.elementwise("fp32", steps.begin("elementwise kernels in fp32"))
    issue_s, step_s = compute.host_s(kernels.host_times, elementwise, steps.begin("the host's own time"))
    in_fp8 = compute.gemm_fp8(rows_half.value, steps.begin("products in fp8"))
    return Device(
        name=compute.backend.name,
        kind=compute.backend.kind,
        memory_bytes=memory,
        num_cores=compute.backend.num_cores,
        gemm_rows_half=rows_half,
        gemm={
            "bf16": compute.gemm("bf16", rows_half.value, steps.begin("products in bf16")),
            "fp32": compute.gemm("fp32", rows_half.value, steps.begin("products in fp32")),
            **({"fp8": in_fp8} if in_fp8 else {}),
        },
        attention={
            **compute.attention("bf16", steps.begin("attention in bf16")),
            **compute.attention("fp32", steps.begin("attention in fp32")),
        },
        attention_backward={
            **compute.attention("bf16", steps.begin("backward of attention in bf16"), backward=True),
            **compute.attention("fp32", steps.begin("backward of attention in fp32"), backward=True),
        },
        elementwise=elementwise,
        elementwise_fp32=elementwise_fp32,
        optimizer=compute.optimizer(kernels, steps.begin("optimizer on the device")),
        fuses_updates=kernels.fuses_updates() if compute.backend.kind == "gpu" else None,
        memory_bytes_per_s=compute.memory_bytes_per_s(steps.begin("device memory")),
        gradient_norm=compute.gradient_norm(kernels.sum_of_squares, steps.begin("gradient norm")),
        issue_s=issue_s,
        step_s=step_s,
    )


def _left_on_gpu() -> Quantity:
    """Return what is free on a GPU on which libraries have loaded their kernels and made their workspaces."""
    gc.collect()  # operands of probes
    torch.cuda.empty_cache()
    left = torch.cuda.mem_get_info()[0] - FOR_LIBRARIES_BYTES
    source = "free memory of the GPU beside the CUDA context and workspaces of libraries, less 1 GiB for more of them"
    return quantity(left, "bytes", source, 1)


def _backend(options: CalibrationOptions, cores: int, memory_bytes: int, *, on_gpu: bool) -> Backend:
    if on_gpu:
        return CudaBackend(quick=options.quick)
    known = options.base.device.num_cores if options.only is not None and options.base is not None else None
    device_cores = options.device_cores or known or max(cores // 2, 1)
    if device_cores > cores:
        raise CalibrationError(f"device_cores is {device_cores}, but only {cores} cores may be used; give fewer")
    return HostBackend(device_cores, memory_bytes, quick=options.quick)


def _divide_memory(options: CalibrationOptions, *, on_gpu: bool) -> tuple[Quantity, Quantity]:
    """Return the memory that training may use on the device and on the host."""
    usable = int(available_memory_bytes() * USABLE_SHARE)
    share = f"{USABLE_SHARE:.0%} of the available memory"
    requested = options.device_memory_bytes
    margin = FOR_LIBRARIES_BYTES if on_gpu else 0
    capacity = torch.cuda.mem_get_info()[0] if on_gpu else usable - 1
    if requested is not None and not margin < requested <= capacity:
        least = f", and {margin} of them are for libraries" if margin else ""
        raise CalibrationError(
            f"device_memory_bytes is {requested}, but at most {capacity} are free for it{least}; give another number"
        )
    if on_gpu:
        device, host = (requested or capacity) - margin, usable
        source = f"{'as asked for' if requested else 'free memory of the GPU'}, less 1 GiB for libraries"
    else:
        device = requested or usable // 4
        host = usable - device
        source = "arena in host memory, " + ("as asked for" if requested else f"a quarter of {share}")
        share += ", less the device's arena"
    if options.host_memory_bytes is not None:
        host, share = options.host_memory_bytes, "as asked for"
    return quantity(device, "bytes", source, 1), quantity(host, "bytes", share, 1)


@contextlib.contextmanager
def _scratch_folder() -> Iterator[Path]:
    cache = Path.home() / ".cache"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.TemporaryDirectory(prefix="ullage-", dir=cache)
    except OSError as error:
        raise CalibrationError(f"disk probe: cannot write in {cache} ({error}); choose another folder") from error
    with scratch as folder:
        yield Path(folder)


@contextlib.contextmanager
def _torch_threads(num_threads: int, cpu_adamw: CpuAdamW) -> Iterator[None]:
    before = torch.get_num_threads()
    try:
        # When numba starts its OpenMP team, it changes the calling thread's number of threads, and so torch's. Start
        # it now, so that this does not happen between two measurements.
        adamw_cases((64,), adamw_state(64), cpu_adamw, 1)[0].call()
        torch.set_num_threads(num_threads)
        yield
    finally:
        torch.set_num_threads(before)
