"""Direct I/O, past the page cache: its alignment, and whether a file supports it."""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
from typing import Final

import numpy as np
import numpy.typing as npt

BLOCK_BYTES: Final = 4096
"""Direct transfers have offsets, lengths and addresses that are multiples of this. No drive has larger sectors."""

_WORD_BYTES, _SECTOR_BYTES = 4, 512

DISK_FULL_ERRNOS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors of a full drive or an exhausted quota."""


def in_blocks(num_bytes: int) -> int:
    """Return bytes rounded up to whole blocks."""
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES


def pages(num_bytes: int, *, inherited: bool = True) -> npt.NDArray[np.uint8]:
    """Return zeroed memory of whole pages, uint8 ``[num_bytes]``, in huge pages if the system has them.

    A direct transfer looks up and pins each page of its memory. 4 MiB are 1024 small pages, but only two huge ones.

    Args:
        num_bytes: size of the memory.
        inherited: whether forked processes get the memory too. If the memory is pinned for a device, a fork copies all
            of it at once.
    """
    memory = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory seldom has huge pages
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    if not inherited and hasattr(mmap, "MADV_DONTFORK"):
        memory.madvise(mmap.MADV_DONTFORK)
    return np.frombuffer(memory, np.uint8)


def forget_pages(address: int, num_bytes: int) -> None:
    """Return the memory of :func:`pages` to the system. It is zero when it is next used."""
    if not address % mmap.PAGESIZE:  # other memory stays
        ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), mmap.MADV_DONTNEED)


def enable_direct_io(fd: int, *, probes: bool = True) -> bool:
    """Switch a file to direct I/O; return whether it supports that (tmpfs and some network file systems do not).

    Args:
        fd: descriptor of the file.
        probes: write and read the first block too. Some file systems accept the flag, but refuse transfers.
    """
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        if probes:
            with mmap.mmap(-1, BLOCK_BYTES) as page:
                os.pwritev(fd, [page], 0)
                os.preadv(fd, [page], 0)
    except OSError:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
        return False
    return True


def alignment_bytes(fd: int, *, writes: bool) -> int:
    """Switch a file to direct I/O if it supports that; return the alignment that memory addresses need.

    Some drives take any word-aligned address, others need alignment to a sector, and a file system may need more. The
    alignment is 1 if transfers go through the page cache.

    Args:
        fd: descriptor of the file.
        writes: probe by writing the first block; else by reading it.
    """
    if not enable_direct_io(fd, probes=writes):
        return 1
    transfer = os.pwritev if writes else os.preadv
    with mmap.mmap(-1, 2 * BLOCK_BYTES) as pages, memoryview(pages) as memory:
        for found in (_WORD_BYTES, _SECTOR_BYTES):
            with contextlib.suppress(OSError), memory[found : found + BLOCK_BYTES] as block:
                transfer(fd, [block], 0)
                return found
    return BLOCK_BYTES
