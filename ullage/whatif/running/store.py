"""A store of results of points, so that nothing is computed twice.

[Note: Store] One line of JSON for each point, in the order in which they were done: its key, a checksum, the result.
A line is written and synced before the point counts as done. What a kill or a full disk leaves is at most one line
that is cut off at the end; whoever opens the store next drops it. A line whose checksum does not match is passed
over, so that its point is planned again. One process writes at a time, which a lock on the file sees to; the kernel
lets go of it however that process ends.
"""

import fcntl
import hashlib
import json
import os
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from pydantic import ValidationError

from ullage.whatif.study import Result

_BEGIN: Final = b'{"key":'


class StoreError(ValueError):
    """A store that cannot be used, and what to do about it."""


class Store:
    """Results by key, in a file; see [Note: Store].

    Args:
        path: of the file, which is made if it is not there.

    Raises:
        StoreError: another process has it open, or it is no such file.
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            self._lock()
            self._results, self._size = self._read()
        except BaseException:
            os.close(self._file)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._file)

    def look_again(self) -> None:
        """Take the results from the file, as an interruption may come between writing one there and counting it."""
        self._results, self._size = self._read()

    def __len__(self) -> int:
        return len(self._results)

    def get(self, key: str) -> Result | None:
        """Return the result of a point, if it is done."""
        return self._results.get(key)

    def put(self, key: str, result: Result) -> None:
        """Add a result; when this returns it survives a crash.

        Raises:
            OSError: it cannot be written, as on a full disk; earlier results are unchanged.
        """
        assert key not in self._results, "what is done is not computed again"
        text = json.dumps(result.model_dump(mode="json", exclude_none=True), separators=(",", ":"))
        line = f'{{"key":"{key}","sha256":"{_checksum(key, text)}","result":{text}}}\n'.encode()
        try:
            written = os.pwrite(self._file, line, self._size)
            if written < len(line):  # a disk that is nearly full takes a part; the rest says why not
                written += os.pwrite(self._file, line[written:], self._size + written)
            os.fsync(self._file)
        except OSError as error:
            os.ftruncate(self._file, self._size)
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        self._size += len(line)
        self._results[key] = result

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreError(
                f"{self.path} is being written by another study; wait for it, or choose another --output"
            ) from None

    def _read(self) -> tuple[dict[str, Result], int]:
        """Return the results, and the offset where whole lines end; the rest was cut off in writing."""
        with open(self._file, "rb", closefd=False) as file:
            file.seek(0)  # the descriptor is where an earlier look has left it
            data = file.read(len(_BEGIN))  # the rest of another file may be large
            if not data.startswith(_BEGIN) and not _BEGIN.startswith(data):
                raise StoreError(f"{self.path} is there already and holds no results; choose another --output")
            data += file.read()
        end = data.rfind(b"\n") + 1
        os.ftruncate(self._file, end)
        return dict(found for line in data[:end].splitlines() if (found := _parsed(line))), end


def _parsed(line: bytes) -> tuple[str, Result] | None:
    try:
        data = json.loads(line)
        text = json.dumps(data["result"], separators=(",", ":"))
        if data["sha256"] != _checksum(data["key"], text):
            return None
        return data["key"], Result.model_validate(data["result"])
    except (ValueError, KeyError, TypeError, ValidationError):
        return None


def _checksum(key: str, text: str) -> str:
    return hashlib.sha256(f"{key} {text}".encode()).hexdigest()[:16]
