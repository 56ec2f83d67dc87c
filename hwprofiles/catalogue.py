"""Every quantity of a profile: which part of calibration measures it, or why no part does."""

import dataclasses
from collections.abc import Mapping
from typing import Final, Literal

Part = Literal["device", "cpu", "copies", "disk", "pfs", "together", "fabric"]

PARTS: Final[Mapping[Part, str]] = {
    "device": "matrix products, attention, elementwise kernels, optimizer, memory, and host time per kernel",
    "cpu": "optimizer and elementwise passes on the host, and host work for checkpoints",
    "copies": "copies between host and device, in each direction and in both at once",
    "disk": "reads, writes and both at once, in a folder of yours (disk:FOLDER) or below ~/.cache",
    "pfs": "the same on a file system that all nodes share (pfs:FOLDER), and the time to create a file",
    "together": "how optimizer, copies, products and disk slow each other down; the bandwidth of host memory",
    "fabric": "collectives between ranks that `torchrun` has started, or copies between GPUs",
}
"""The parts of calibration. ``pfs`` is measured only on request."""


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """The origin of one quantity of a profile.

    Attributes:
        how: ``measured``, ``read`` from the operating system, ``fitted`` to whole runs, ``asked`` for
            in an option, or ``unknown`` to calibration.
        part: the part of ``ullage calibrate --only`` that measures it, ``""`` if none does.
        words: what measures it, or why nothing does.
        only: ``gpu`` or ``host`` if only that kind of device has it.
    """

    how: Literal["measured", "read", "fitted", "asked", "unknown"]
    part: str
    words: str
    only: Literal["gpu", "host"] | None = None


def _measured(part: str, words: str, only: Literal["gpu", "host"] | None = None) -> Entry:
    return Entry("measured", part, words, only)


_CANNOT_BE_COLLECTIVE = "copies between GPUs; collectives under `torchrun -m ullage calibrate --only fabric`"
_DISK, _PFS = "large requests past the page cache", "the same in a folder of the shared file system (pfs:FOLDER)"

CATALOGUE: Final[Mapping[str, Entry]] = {
    "device.memory_bytes": Entry(
        "read", "device", "what libraries leave of a GPU's memory; on a host a quarter of the free memory"
    ),
    "device.memory_bytes_per_s": _measured("device", "copies inside the device's memory"),
    "device.gemm.*": _measured("device", "products of a linear layer: forward, and the gradients of input and weight"),
    "device.gemm_rows_half": _measured("device", "products with few and with many rows, of equal FLOP"),
    "device.gemm_bytes_per_s": Entry("unknown", "", "the measured time of products includes transfers"),
    "device.attention.*": _measured("device", "fused causal attention; on a GPU, for each kind of heads"),
    "device.attention_backward.*": _measured("device", "backward of fused causal attention"),
    "device.elementwise": _measured("device", "eager kernels on tensors of all sizes"),
    "device.elementwise_fp32": _measured("device", "the same in fp32"),
    "device.optimizer": _measured("device", "AdamW on the device"),
    "device.gradient_norm": _measured("device", "sums of squares; on a GPU, memory bandwidth hides them", "host"),
    "device.issue_s": _measured(
        "device", "forward and backward of a tiny model through the whole executor, without waits"
    ),
    "device.step_s": _measured("device", "the same model, from the end of backward to the next forward"),
    "device.hook_s": Entry("fitted", "", "hooks of DeepSpeed ZeRO-3; Ullage's executor has none"),
    "device.loop_s": Entry("fitted", "", "work of published scripts outside of the phases of an iteration"),
    "device.exchange_s": Entry("fitted", "", "host time around an exchange of stages, in published runs of pipelines"),
    "host.memory_bytes": Entry("read", "", "free memory, less what this program and others need"),
    "host.dram_bytes_per_s": _measured("together", "how optimizer and copies slow each other down"),
    "host.optimizer": _measured("cpu", "one-pass CPU AdamW, the kernel of the executor"),
    "host.optimizer_by_threads.*": _measured("cpu", "the same with 1, 2, 4, ... threads"),
    "host.optimizer_process_params_per_s": Entry("fitted", "", "engines that bind each process to some of the cores"),
    "host.narrow_update_s.*": _measured(
        "cpu", "AdamW with bf16 and 8-bit moments, and with split master copies, by one thread"
    ),
    "host.elementwise_bytes_per_s": _measured("cpu", "casts and sign changes"),
    "host.fresh_bytes_per_s": _measured("cpu", "first touch of new pages"),
    "host.serialise_bytes_per_s": _measured("cpu", "torch.save to a file in memory"),
    "host.hash_bytes_per_s": _measured("cpu", "xxh3 by one thread"),
    "host_link.down": _measured("copies", "pinned copies to the device (on a host: by one core)"),
    "host_link.up": _measured("copies", "pinned copies from the device"),
    "host_link.both_bytes_per_s": _measured("copies", "both at once"),
    "host_link.pageable_bytes_per_s": _measured("copies", "copies to memory that is not pinned"),
    "host_link.pageable_down_bytes_per_s": _measured("copies", "copies from memory that is not pinned"),
    "host_link.num_cores_per_copy": Entry("read", "copies", "0 if a copy engine copies, 1 if a core does"),
    "nvme.capacity_bytes": Entry("read", "disk", "free space of the file system"),
    "nvme.read": _measured("disk", _DISK),
    "nvme.write": _measured("disk", f"{_DISK}, overwriting a file"),
    "nvme.both_bytes_per_s": _measured("disk", "reads and writes at once"),
    "nvme.job_write_bytes_per_s": Entry("unknown", "", "a limit of shared file systems; a node's drives have none"),
    "nvme.create_s": Entry("unknown", "", "time of a metadata server; a node's drives have none"),
    "nvme.endurance_bytes_per_day": Entry("asked", "disk", "not measured; --drive-endurance, from the data sheet"),
    "pfs.capacity_bytes": Entry("read", "pfs", "free space of the file system"),
    "pfs.read": _measured("pfs", _PFS),
    "pfs.write": _measured("pfs", _PFS),
    "pfs.both_bytes_per_s": _measured("pfs", "reads and writes at once"),
    "pfs.job_write_bytes_per_s": Entry("unknown", "", "needs all nodes at once; assumed: nodes times one node's rate"),
    "pfs.create_s": _measured("pfs", "creating and closing empty files"),
    "pfs.endurance_bytes_per_day": Entry("unknown", "", "the operator of a shared file system replaces its drives"),
    "intra_node.bytes_per_s": _measured("fabric", _CANNOT_BE_COLLECTIVE),
    "intra_node.latency_s": _measured("fabric", _CANNOT_BE_COLLECTIVE),
    "intra_node.hop_latency_s": Entry("unknown", "", "the start-up time is measured in groups of one size"),
    "intra_node.partial_group_ratio": Entry("unknown", "", "inside a node every device has links of its own"),
    "inter_node.bytes_per_s": _measured("fabric", "collectives over several nodes, by torchrun --nnodes"),
    "inter_node.latency_s": _measured("fabric", "collectives over several nodes, by torchrun --nnodes"),
    "inter_node.hop_latency_s": Entry("unknown", "", "the start-up time is measured in groups of one size"),
    "inter_node.partial_group_ratio": Entry("fitted", "", "groups with some of a node's devices; calibration has all"),
}
"""By dotted path as in :mod:`hwprofiles.paths`, with ``*`` for a key; multiprocessors, cores and drives are counts."""
