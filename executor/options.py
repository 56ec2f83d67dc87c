"""Options of a session."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from executor.devices.backend import Backend, HostBackend
from executor.module.batches import BatchShapes
from executor.module.cuts import Operators
from planner.terms import AuditTime, CoreChoice


def _say_nothing(_line: str) -> None:
    pass


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """How to execute a plan. ``ullage.prepare`` makes it from its keywords, the plan and the machine.

    Attributes:
        device: ``cpu`` computes in the calling thread, with a part of ordinary memory standing in for the device.
        num_threads: at most so many threads update on the host. By default, one per core of the rank, without the cores
            that issue work or compute.
        cores: the cores that the ranks of this machine divide, see [Note: Shares of cores] in
            :mod:`executor.devices.cores`.
        gpu_capacity_bytes: limit of device memory for everything that the plan keeps there all the time. If the host is
            the device, tasks also wait until there is room, see :mod:`executor.devices.room`.
        host_capacity_bytes: the same limit for host memory.
        storage_dir: folder on a fast drive for state that the plan keeps on NVMe. During training, each rank has a file
            in it.
        compile_blocks: whether to compile the repeated blocks with ``torch.compile``, see
            :mod:`executor.module.compilation`; or its backend.
        checkpoint_buffer_bytes: host memory for copies that a checkpoint has not written yet; 0: no checkpoints.
        record: whether to record times for :meth:`Session.timeline` from the start. The latest
            :data:`executor.devices.lanes.NUM_RECORDED` iterations are kept.
        link_bytes_per_s: rates of copies from and to the device, for predictions; ``None``: unknown.
        batch: planned inputs of the model. If empty, batches of other shapes are not detected.
        calls: paths of the modules that a step of the user's loop calls, if these are not the model alone, once.
        audit: when to compare with plain PyTorch, see [Note: Audit] in :mod:`executor.audit.audit`.
        report: gets a line about each audit.
        uncompiled: whether functions that the user has compiled see modules or parameters, so they run as they are.
        operators: what runs operators without values, so that a pipeline of any model finds where it is cut; ``None``:
            the model's layers are known.
        num_stages: stages of a pipeline. The session's model, units and decisions are those of this process's stage.
        sharing: those that share weights.
        as_buffers: names of frozen parameters that are in no unit, because forward writes to them; see
            [Note: Written weights] in :mod:`planner.setup`.
        copies: weights that an earlier stage has too, and whose state it saves: the name there, by the name here.
    """

    device: Literal["cpu", "cuda"] = "cpu"
    num_threads: int | None = None
    cores: CoreChoice = "auto"
    gpu_capacity_bytes: int | None = None
    host_capacity_bytes: int | None = None
    storage_dir: Path | None = None
    compile_blocks: bool | str = False
    checkpoint_buffer_bytes: int = 0
    record: bool = False
    link_bytes_per_s: tuple[float, float] | None = None
    batch: BatchShapes = ()
    calls: tuple[str, ...] = ()
    audit: AuditTime = "off"
    report: Callable[[str], None] = _say_nothing
    uncompiled: bool = False
    operators: Operators | None = None
    num_stages: int = 1
    sharing: tuple[int, ...] = ()
    as_buffers: frozenset[str] = frozenset()
    copies: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def compile_backend(self) -> str | None:
        """The backend of ``torch.compile``; ``None`` without compiling."""
        return "inductor" if self.compile_blocks is True else self.compile_blocks or None


def backend_of(options: Options) -> Backend:
    """Return the backend for the device in the options.

    Raises:
        ValueError: this machine has no such device.
    """
    if options.device == "cpu":
        return HostBackend()
    from executor.devices.cuda import CudaBackend  # noqa: PLC0415 - only where there is a GPU

    return CudaBackend()
