"""What engines keep in the host's memory, from their sources and a model's parameters: known before they are started.

An engine that takes more than there is would be killed by the kernel after minutes, and say nothing.
"""

import mmap
import weakref
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from benchmarks.peers.jobs import Job, model_config
from planner.models.parameters import parameters

EXACT: Final = ("zero2", "zero3", "zenflow", "fsdp2")
"""Engines whose ``Tensor.pin_memory`` is :func:`pinned_exactly`."""
USABLE_SHARE: Final = 0.96
"""Of the host's memory; the rest is for the kernel, page tables and the program itself. Assumed."""


def host_bytes(job: Job) -> int:
    """Return the bytes of master copies, moments, gradients and weights that an engine keeps on the host; 0: unknown.

    Of DeepSpeed 0.19.8: ``stage_1_and_2.py`` pins the flat master copy, its gradient and a copy in the computing type;
    ``stage3.py`` pins a gradient per subgroup (``initialize_optimizer_states``), all gradients once more as they are
    accumulated (``_setup_for_real_optimizer``) and, if they are offloaded, weights.
    FSDP2 keeps parameters and gradients in the master copy's type; so does torchao's ``CPUOffloadOptimizer``. Its
    tensors come pinned from PyTorch, which rounds each up to a power of two, as it does FSDP2's gradients.
    """
    cell, engine = job.cell, job.engine
    sizes = [spec.num_params for spec in parameters(model_config(cell.model))]
    n = sum(sizes)
    weight, master = (2 if dtype == "bf16" else 4 for dtype in (cell.dtype, cell.state))
    rounded = sum(_power_of_two(master * size) for size in sizes)
    if engine in {"zero2", "zenflow"}:
        return n * (4 * master + weight)
    if engine == "zero3":
        share = float(job.setting("ratio", 1.0))  # of Twin-Flow: the rest is updated on the device
        offloaded = weight if job.setting("offload_param", default=False) else 0
        return int(n * (share * 4 * master + weight + offloaded))
    if engine == "fsdp2":
        return 3 * n * master + rounded
    if engine == "torchao":
        return 2 * n * master + 2 * rounded
    return 0


def _power_of_two(num_bytes: int) -> int:
    return 1 << (num_bytes - 1).bit_length()


def too_large(job: Job, memory_bytes: int) -> str | None:
    """Return why a job need not be tried on a host with so much memory, if so."""
    needed, usable = host_bytes(job), USABLE_SHARE * memory_bytes
    if job.device != "cuda" or needed <= usable:  # without a GPU, host and device are the same memory
        return None
    return (
        f"not tried: what it keeps takes {needed / 1e9:.1f} GB of host memory, and of this host's "
        f"{memory_bytes / 1e9:.1f} GB {usable / 1e9:.1f} GB can be used"
    )


def pinned_exactly(tensor: Tensor, *_: Any) -> Tensor:
    """Return a copy in pinned memory of its own size; ``Tensor.pin_memory`` would round it up to a power of two.

    7 billion values in fp32 are 27 GB, and 34 GB rounded up. PyTorch 2.11 has no setting for that.

    Raises:
        MemoryError: the memory cannot be pinned.
    """
    if not tensor.nbytes or tensor.is_pinned():
        return tensor
    memory = np.frombuffer(mmap.mmap(-1, tensor.nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
    block = torch.from_numpy(memory)
    pinned = block.view(tensor.dtype).view(tensor.shape).copy_(tensor)
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if code := int(cudart.cudaHostRegister(block.data_ptr(), tensor.nbytes, 0)):
        raise MemoryError(f"cudaHostRegister of {tensor.nbytes:,} B failed with {code}; leave more host memory free")
    # Keeps the memory until it is unregistered.
    weakref.finalize(
        block.untyped_storage(), lambda address, _: cudart.cudaHostUnregister(address), block.data_ptr(), memory
    )
    return pinned
