"""Make the C library's allocator keep freed memory."""

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_BYTES = 1 << 30  # glibc takes thresholds as int


def keep_freed_memory() -> bool:
    """Stop glibc from giving freed tensors back to the kernel; return whether it did.

    By default every large tensor is mapped anew and its pages are zeroed again at first touch. In training on a CPU
    this takes a fifth of the time of elementwise kernels. Kept memory costs nothing the second time, but the process
    keeps its peak. Without glibc this does nothing.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return all(mallopt(option, _LARGEST_BYTES) == 1 for option in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD))
