"""Time limits for drives that may hang."""

import threading
from collections.abc import Callable
from typing import Final, TypeVar, final

from executor.checkpoint.files.system_calls import CheckpointError

SLOWEST_BYTES_PER_S: Final = 10e6
"""A drive that is slower than this counts as one that does not answer."""

_T = TypeVar("_T")


def timeout_error(patience_s: float) -> CheckpointError:
    """Return the error for a drive on which nothing has ended for this long."""
    return CheckpointError(
        f"nothing has ended for {patience_s:g} s: the drive does not keep up, or does not answer; this checkpoint is "
        "given up"
    )


@final
class TimeLimited:
    """Runs functions that may hang, one at a time, each in a thread. While one hangs, further ones fail at once."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def do(self, do: Callable[[], _T], undo: Callable[[_T], None], patience_s: float) -> _T:
        """Return what ``do`` returns.

        Args:
            do: the function.
            undo: called with the result if it comes too late.
            patience_s: longest wait.

        Raises:
            CheckpointError: it took too long, or an earlier one still hangs.
            OSError: whatever ``do`` raises.
        """
        if self._thread is not None and self._thread.is_alive():
            raise timeout_error(patience_s)
        found: list[_T | OSError] = []
        lock = threading.Lock()  # guards found and too_late
        too_late = False

        def work() -> None:
            try:
                result: _T | OSError = do()
            except OSError as error:
                result = error
            with lock:
                if not too_late:
                    found.append(result)
                    return
            if not isinstance(result, OSError):
                undo(result)

        self._thread = threading.Thread(target=work, name="checkpoint open", daemon=True)
        self._thread.start()
        self._thread.join(patience_s)
        with lock:
            if not found:
                too_late = True
                raise timeout_error(patience_s)
        if isinstance(found[0], OSError):
            raise found[0]
        return found[0]
