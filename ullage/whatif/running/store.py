"""A store of the results of points, so that no point is planned twice.

[Note: Store] The file has one line of JSON for each finished point: its key, a checksum, and the result. A line is
written and synced before the point counts as finished. A kill or a full disk leaves at most one truncated line at the
end; the next process that opens the store removes it. If the checksum of a line does not match, the line is skipped,
and its point is planned again. A lock on the file ensures that only one process writes at a time. The kernel releases
the lock when that process ends, even by a kill.
"""

import contextlib
import fcntl
import hashlib
import json
import os
from pathlib import Path
from types import TracebackType
from typing import Final

from pydantic import ValidationError

from ullage.whatif.study import Result
from ullage.whatif.values import StudyError

_BEGIN: Final = b'{"key":'


class Store(contextlib.AbstractContextManager["Store"]):
    """Results by key, in a file; see [Note: Store].

    Args:
        path: path of the file, which is made if it does not exist.

    Raises:
        StudyError: another process has the file open, or it is not a store.
        OSError: the file cannot be opened.
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

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._file)

    def look_again(self) -> None:
        """Read the file again. An interruption may come between writing a result and counting it."""
        self._results, self._size = self._read()

    def __len__(self) -> int:
        return len(self._results)

    def get(self, key: str) -> Result | None:
        """Return the result of a point; ``None`` if it is not finished."""
        return self._results.get(key)

    def put(self, key: str, result: Result) -> None:
        """Add a result. When this method returns, the result survives a crash.

        Raises:
            OSError: the result cannot be written, for example on a full disk; earlier results are unchanged.
        """
        assert key not in self._results, "a finished point is not planned again"
        text = json.dumps(result.model_dump(mode="json", exclude_none=True), separators=(",", ":"))
        line = f'{{"key":"{key}","sha256":"{_checksum(key, text)}","result":{text}}}\n'.encode()
        try:
            written = os.pwrite(self._file, line, self._size)
            if written < len(line):  # a nearly full disk takes a part; writing the rest raises the error
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
            raise StudyError(
                f"{self.path} is being written by another study; wait for it, or choose another --output"
            ) from None

    def _read(self) -> tuple[dict[str, Result], int]:
        """Return the results, and the offset at which complete lines end; the rest is a truncated line."""
        with open(self._file, "rb", closefd=False) as file:
            file.seek(0)  # an earlier read has moved the position
            data = file.read(len(_BEGIN))  # if this is another kind of file, it may be large
            if not data.startswith(_BEGIN) and not _BEGIN.startswith(data):
                raise StudyError(f"{self.path} exists and is not a store of results; choose another --output")
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
