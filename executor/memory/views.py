"""Parts of a session's memory as tensors of their own, without a copy."""

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]  # as documented


def with_own_storage(values: torch.Tensor) -> torch.Tensor:
    """Return the same values in the same memory, with a storage that has nothing else.

    What goes by storages then takes them for a tensor of their own: ``torch.save`` writes no more than them, and
    ``safetensors`` sees no shared memory. The block that they are part of is kept as long as any of its parts is.
    """
    values = values.detach()
    if values.untyped_storage().nbytes() <= values.nbytes:
        return values
    # By capsule, which has any host memory as the CPU's; torch.from_dlpack(values) would name pinned memory CUDA's.
    return from_dlpack(to_dlpack(values))
