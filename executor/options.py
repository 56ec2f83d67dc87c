"""Options of a session."""

import dataclasses
from pathlib import Path
from typing import Literal

from executor.devices.backend import Backend, HostBackend
from executor.devices.cores import CoreChoice
from executor.module.batches import BatchShapes


@dataclasses.dataclass(frozen=True, slots=True)
class SessionOptions:
    """How to execute a plan.

    Attributes:
        device: ``cpu`` computes in the calling thread, with a part of ordinary memory standing in for the device.
        num_threads: most threads that update on the host; left out, one for each of the rank's cores but those that
            issue work or compute.
        cores: that the ranks of this machine divide, see [Note: Shares of cores] in :mod:`executor.devices.cores`.
        gpu_capacity_bytes: most that is taken of the device for what the plan keeps there all the time. Where the host
            is the device, tasks also wait until there is room, see [Note: Room] in :mod:`executor.devices.room`.
        host_capacity_bytes: likewise, of the host.
        storage_dir: folder on a fast drive for what the plan keeps on NVMe; each rank has a file in it while it trains.
        compile_backend: of ``torch.compile``, for the repeated blocks, see :mod:`executor.module.compilation`; left
            out, they run as they are.
        checkpoint_buffer_bytes: host memory for what is taken for checkpoints and not written yet; 0: none are made.
        record: whether to keep times from the start on, for :meth:`Session.timeline`: those of the latest
            :data:`executor.devices.lanes.NUM_RECORDED` iterations.
        link_bytes_per_s: rates of copies away from the device and to it, for predictions; ``None``: unknown.
        batch: planned inputs of the model; empty: batches of other shapes are not noticed.
    """

    device: Literal["cpu", "cuda"] = "cpu"
    num_threads: int | None = None
    cores: CoreChoice = "auto"
    gpu_capacity_bytes: int | None = None
    host_capacity_bytes: int | None = None
    storage_dir: Path | None = None
    compile_backend: str | None = None
    checkpoint_buffer_bytes: int = 0
    record: bool = False
    link_bytes_per_s: tuple[float, float] | None = None
    batch: BatchShapes = ()


def backend_of(options: SessionOptions) -> Backend:
    """Return the backend of a device.

    Raises:
        ValueError: it is not there.
    """
    if options.device == "cpu":
        return HostBackend()
    from executor.devices.cuda import CudaBackend  # noqa: PLC0415 - only where there is a GPU

    return CudaBackend()
