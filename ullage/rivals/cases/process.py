"""What a process holds of a device beside its tensors: the context of CUDA, the code of kernels, NCCL's buffers."""

from typing import Final

from hwprofiles.paths import replace
from hwprofiles.profile import FOR_LIBRARIES_BYTES, HardwareProfile
from hwprofiles.quantity import Provenance
from ullage.rivals.cases.rates import GEFORCE

# A process of an RTX 3090 with one communicator (github.com/NVIDIA/nccl/pull/2366). An RTX 4090 that ran out of memory
# had 0.49 GiB beside what PyTorch had reserved (github.com/3DTopia/Phidias-Diffusion/issues/8). Without NVLink, NCCL's
# buffers are in host memory.
_GEFORCE_BYTES: Final = 484 << 20
# NCCL keeps buffers for each channel of each communicator: on A100 with NVLink, 688 MiB after the first all-reduce of
# more than two (github.com/NVIDIA/nccl/issues/964).
_COMMUNICATOR_BYTES: Final = 688 << 20
# Megatron's ranks exchange with those that share layers or hand them on, with all of the model for the norm of
# gradients (``core/optimizer/clip_grads.py``), and with all of the job for barriers.
_MEGATRON_COMMUNICATORS: Final = 3


def beside_tensors_bytes(profile: HardwareProfile, num_devices: int, *, megatron: bool) -> int:
    """Return the bytes of a device that a process holds beside its tensors.

    Those that packaged profiles leave free have room for one communicator. What the kernels of TransformerEngine and
    cuDNN take is not published, so Megatron has that room everywhere.

    Args:
        profile: the machine.
        num_devices: of the job.
        megatron: whether it runs Megatron, which has several communicators.
    """
    if not megatron:
        return _GEFORCE_BYTES if GEFORCE.match(profile.device.name) else FOR_LIBRARIES_BYTES
    fabric = profile.intra_node
    by_nvlink = num_devices > 1 and fabric is not None and not fabric.via_host_link
    return FOR_LIBRARIES_BYTES + (_MEGATRON_COMMUNICATORS - 1) * _COMMUNICATOR_BYTES * by_nvlink


def with_room_for_tensors(profile: HardwareProfile, beside_bytes: int) -> HardwareProfile:
    """Return a machine whose devices leave free what a process holds beside its tensors, and no more."""
    num_bytes = profile.device.memory_bytes.value + FOR_LIBRARIES_BYTES - beside_bytes
    source = f"{profile.name}, less {beside_bytes} B that a process holds beside its tensors"
    return replace(profile, {"device.memory_bytes": num_bytes}, Provenance(origin="assumed", source=source))
