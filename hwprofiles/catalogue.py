"""Every quantity of a profile: which part of calibration measures it, or why none can."""

import dataclasses
from collections.abc import Mapping
from typing import Final, Literal

Part = Literal["device", "cpu", "copies", "disk", "pfs", "together", "fabric"]

PARTS: Final[Mapping[Part, str]] = {
    "device": "products, attention, elementwise kernels, optimizer, memory, and the host's own time beside them",
    "cpu": "optimizer and passes of the host, and what checkpoints take of it",
    "copies": "between host and device, each way and both",
    "disk": "reads, writes and both, in a folder of yours (disk:FOLDER) or below ~/.cache",
    "pfs": "the same of a file system that all nodes share (pfs:FOLDER), and how long it takes to create a file",
    "together": "what slows what: optimizer, copies, products and disk beside each other; what the host's memory moves",
    "fabric": "collectives between ranks that `torchrun` has started, or copies between GPUs",
}
"""What can be measured by itself. Nothing measures ``pfs`` unless it is asked to."""


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """How a quantity comes into a profile.

    Attributes:
        how: ``measured`` here, ``read`` from the operating system, ``fitted`` to whole runs (``--from-runs``),
            ``asked`` for, or ``unknown`` to calibration.
        part: of ``ullage calibrate --only`` that measures it, ``""`` if none does.
        words: by what; or why it is not.
        only: ``gpu`` or ``host`` where it is of one kind of device alone.
    """

    how: Literal["measured", "read", "fitted", "asked", "unknown"]
    part: str
    words: str
    only: Literal["gpu", "host"] | None = None


def _measured(part: str, words: str, only: Literal["gpu", "host"] | None = None) -> Entry:
    return Entry("measured", part, words, only)


_CANNOT_BE_COLLECTIVE = "copies between GPUs; collectives where `torchrun -m ullage calibrate --only fabric` runs"
_DISK, _PFS = "large requests past the page cache", "the same in a folder of the shared file system (pfs:FOLDER)"

CATALOGUE: Final[Mapping[str, Entry]] = {
    "device.memory_bytes": Entry("read", "device", "what is free on the GPU; a quarter of what is free on a host"),
    "device.memory_bytes_per_s": _measured("device", "copies inside the device's memory"),
    "device.gemm.*": _measured("device", "products of a linear layer: forward, dgrad and wgrad"),
    "device.gemm_rows_half": _measured("device", "short against tall products of equal FLOP"),
    "device.gemm_bytes_per_s": Entry("unknown", "", "measured products include what transfers add to their time"),
    "device.attention.*": _measured("device", "fused causal attention"),
    "device.attention_backward.*": _measured("device", "the backward of the same"),
    "device.elementwise": _measured("device", "eager kernels on tensors of all sizes"),
    "device.elementwise_fp32": _measured("device", "the same in fp32"),
    "device.optimizer": _measured("device", "AdamW on the device"),
    "device.gradient_norm": _measured("device", "sums of squares; on a GPU lost in its memory's rate", "host"),
    "device.issue_s": _measured("device", "forward and backward of a tiny model through the whole executor"),
    "device.step_s": _measured("device", "the same, from the end of backward to the next forward"),
    "device.hook_s": Entry("fitted", "", "hooks of DeepSpeed ZeRO-3, which our executor does not have"),
    "device.loop_s": Entry("fitted", "", "what a published script does between iterations; ours is a task of its own"),
    "device.exchange_s": Entry("fitted", "", "host time around an exchange of pipeline stages, which are not executed"),
    "host.memory_bytes": Entry("read", "", "what is free, less what the program and others need"),
    "host.dram_bytes_per_s": _measured("together", "how optimizer and copies slow each other down"),
    "host.optimizer": _measured("cpu", "one-pass CPU AdamW, as it is executed"),
    "host.optimizer_by_threads.*": _measured("cpu", "the same with 1, 2, 4, ... threads"),
    "host.optimizer_process_params_per_s": Entry("fitted", "", "engines whose processes are bound to some cores"),
    "host.elementwise_bytes_per_s": _measured("cpu", "casts and sign changes"),
    "host.fresh_bytes_per_s": _measured("cpu", "first touch of new pages"),
    "host.serialise_bytes_per_s": _measured("cpu", "torch.save to nowhere"),
    "host.hash_bytes_per_s": _measured("cpu", "xxh3 by one thread"),
    "host_link.down": _measured("copies", "pinned copies to the device (on a host: by one core)"),
    "host_link.up": _measured("copies", "pinned copies from the device"),
    "host_link.both_bytes_per_s": _measured("copies", "both at once"),
    "host_link.pageable_bytes_per_s": _measured("copies", "copies to memory that is not pinned"),
    "host_link.pageable_down_bytes_per_s": _measured("copies", "copies from memory that is not pinned"),
    "host_link.num_cores_per_copy": Entry("read", "copies", "0 where an engine copies, 1 where a core does"),
    "nvme.capacity_bytes": Entry("read", "disk", "free space of the file system"),
    "nvme.read": _measured("disk", _DISK),
    "nvme.write": _measured("disk", f"{_DISK}, over what is there"),
    "nvme.both_bytes_per_s": _measured("disk", "reads and writes at once"),
    "nvme.job_write_bytes_per_s": Entry("unknown", "", "of all nodes of a job together: drives of a node have none"),
    "nvme.create_s": Entry("unknown", "", "of a metadata server: drives of a node have none"),
    "nvme.endurance_bytes_per_day": Entry("asked", "disk", "no probe tells; --drive-endurance, of the data sheet"),
    "pfs.capacity_bytes": Entry("read", "pfs", "free space of the file system"),
    "pfs.read": _measured("pfs", _PFS),
    "pfs.write": _measured("pfs", _PFS),
    "pfs.both_bytes_per_s": _measured("pfs", "reads and writes at once"),
    "pfs.job_write_bytes_per_s": Entry(
        "unknown", "", "needs all nodes at once; taken as so many times one node's rate"
    ),
    "pfs.create_s": _measured("pfs", "creating and closing empty files"),
    "pfs.endurance_bytes_per_day": Entry("unknown", "", "whoever runs a shared file system replaces its drives"),
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


def entry_of(path: str) -> Entry:
    """Return the entry of a quantity's path, such as ``device.gemm.bf16``.

    Raises:
        KeyError: there is no such quantity.
    """
    return CATALOGUE.get(path) or CATALOGUE[f"{path.rpartition('.')[0]}.*"]
