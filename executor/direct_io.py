"""Transfers past the page cache: their alignment, and whether a file supports them."""

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
"""Offsets, lengths and addresses of direct transfers are multiples of this: a page, and no drive has larger sectors."""

_WORD_BYTES, _SECTOR_BYTES = 4, 512

DISK_FULL_ERRNOS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors of a drive, or a share of it, that is full."""


def in_blocks(num_bytes: int) -> int:
    """Return bytes rounded up to whole blocks."""
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES


def pages(num_bytes: int, *, inherited: bool = True) -> npt.NDArray[np.uint8]:
    """Return memory of whole pages, all zero, uint8 ``[num_bytes]``; large pages where the system gives them.

    A direct transfer looks up and holds each page of its memory: 1024 small ones or two large ones in 4 MiB.

    Args:
        num_bytes: how much.
        inherited: whether processes that are forked have it too. A fork copies all of it at once if a device holds it.
    """
    memory = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory seldom has large pages
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    if not inherited and hasattr(mmap, "MADV_DONTFORK"):
        memory.madvise(mmap.MADV_DONTFORK)
    return np.frombuffer(memory, np.uint8)


def forget_pages(address: int, num_bytes: int) -> None:
    """Give the system the memory of :func:`pages` back, which is zero when it is used again."""
    if not address % mmap.PAGESIZE:  # else it is of another kind, and stays
        ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), mmap.MADV_DONTNEED)


def enable_direct_io(fd: int, *, probes: bool = True) -> bool:
    """Bypass the page cache from now on, if possible (not on tmpfs and some network file systems).

    Args:
        fd: of a file.
        probes: try transfers at its beginning: some file systems accept the flag, but refuse transfers.
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
    """Bypass the page cache if possible, and return the alignment that memory needs.

    A drive may need addresses of whole words or of whole sectors, and a file system may need more. It is 1 if transfers
    go through the page cache.

    Args:
        fd: of a file.
        writes: whether its first block is going to be written, which is tried; else the file is read.
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
