"""A store of the results of points, so that no point is planned twice.

The file has one line of JSON for each finished point: its key and the result. A line is written and synced before the
point counts as finished. A kill or a full disk leaves at most one truncated line at the end; the next process that
opens the store removes it. A line that cannot be read is skipped, and its point is planned again. A lock on the file
ensures that only one process writes at a time. The kernel releases the lock when that process ends, even by a kill.
"""

import contextlib
import fcntl
import json
import os
import tempfile
from pathlib import Path
from typing import Final

from ullage.whatif.study import Result

_BEGIN: Final = b'{"key":'


class Store(contextlib.AbstractContextManager["Store"]):
    """Results in a file.

    Args:
        path: path of the file, which is made if it does not exist; ``None``: a temporary file without a name.

    Attributes:
        results: the results of finished points by their keys.

    Raises:
        ValueError: another process has the file open, or it is not a store.
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path or "a temporary file"
        opened = tempfile.TemporaryFile("a+b", buffering=0) if path is None else path.open("a+b", buffering=0)  # noqa: SIM115
        self._file = opened
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.look_again()
        except BaseException as error:
            self._file.close()
            if isinstance(error, BlockingIOError):
                raise ValueError(  # noqa: TRY004 - the kind of the error is no matter of types
                    f"{path} is being written by another study; wait for it, or choose another --output"
                ) from None
            raise

    def __exit__(self, *_error: object) -> None:
        self._file.close()

    def look_again(self) -> None:
        """Read the file, without a truncated last line. An interruption may come between writing and counting."""
        self._file.seek(0)
        data = self._file.read(len(_BEGIN))  # if this is another kind of file, it may be large
        if not data.startswith(_BEGIN) and not _BEGIN.startswith(data):
            raise ValueError(f"{self.path} exists and is not a store of results; choose another --output")
        data += self._file.read()
        end = data.rfind(b"\n") + 1
        self._file.truncate(end)
        self.results = dict(found for line in data[:end].splitlines() if (found := _parsed(line)))

    def put(self, key: str, result: Result) -> None:
        """Add a result. When this method returns, the result survives a crash.

        Raises:
            OSError: the result cannot be written, for example on a full disk; earlier results are unchanged.
        """
        assert key not in self.results, "a finished point is not planned again"
        plain = {"key": key, "result": result.model_dump(mode="json", exclude_none=True)}
        line = (json.dumps(plain, separators=(",", ":")) + "\n").encode()
        end = self._file.seek(0, os.SEEK_END)
        try:
            written = self._file.write(line)
            if written < len(line):  # a nearly full disk takes a part; writing the rest raises the error
                self._file.write(line[written:])
            os.fsync(self._file)
        except OSError as error:
            self._file.truncate(end)
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        self.results[key] = result


def _parsed(line: bytes) -> tuple[str, Result] | None:
    try:
        data = json.loads(line)
        return data["key"], Result.model_validate(data["result"])
    except (ValueError, KeyError, TypeError):
        return None
