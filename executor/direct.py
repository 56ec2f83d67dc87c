"""Transfers past the page cache: what they have to be multiples of, and whether a file takes them."""

import errno
import fcntl
import mmap
import os
from typing import Final

BLOCK_BYTES: Final = 4096
"""Offsets, lengths and addresses of direct transfers are multiples of this: a page, and no drive has larger sectors."""

NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors of a drive, or a share of it, that is full."""


def in_blocks(num_bytes: int) -> int:
    """Return bytes rounded up to whole blocks."""
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES


def go_direct(fd: int, *, probes: bool = True) -> bool:
    """Leave the page cache out from now on, if that is possible (not on tmpfs and some network file systems).

    Args:
        fd: of a file.
        probes: find out by transfers at its beginning, which some file systems refuse that did not refuse the flag.
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
