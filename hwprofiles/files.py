"""Writing files whole or not at all."""

import os
from pathlib import Path


def write_whole(path: Path, data: str | bytes) -> None:
    """Write a file so that whoever reads it, now or after a crash, finds the old content or the new one, complete.

    Raises:
        OSError: the folder does not exist or cannot be written, or the disk is full; nothing is left behind.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with partial.open("xb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:  # a full disk names no file, and the temporary one means nothing to anybody
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        partial.unlink(missing_ok=True)  # after the rename there is nothing to remove
