"""Time limits for drives that may hang."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError, wait
from typing import Final, TypeVar, final

from executor.checkpoint.files.system_calls import CheckpointError

SLOWEST_BYTES_PER_S: Final = 10e6
"""A slower drive counts as a drive that does not answer."""

_T = TypeVar("_T")
_POLL_S: Final = 0.02
_LOST_S: Final = 3.0  # longest wait for other ranks once one is lost: those that are there end in order


def waiting(patience_s: float, is_lost: Callable[[], bool]) -> Iterator[bool]:
    """Yield while a rank waits for others: for so long, but only for a moment once one of them is lost."""
    deadline_s, lost = time.monotonic() + patience_s, False
    while time.monotonic() < deadline_s:
        if not lost and (lost := is_lost()):
            deadline_s = min(deadline_s, time.monotonic() + _LOST_S)
        time.sleep(_POLL_S)
        yield True


def timeout_error(patience_s: float) -> CheckpointError:
    """Return the error for a drive that has not answered for this long."""
    return CheckpointError(
        f"the drive has not answered for {patience_s:g} s, or is too slow; this checkpoint is abandoned"
    )


@final
class TimeLimited:
    """Runs functions that may hang, one at a time, each in a thread. While one hangs, further calls raise at once."""

    def __init__(self) -> None:
        self._hung: threading.Thread | None = None  # the newest thread that exceeded its time limit

    def do(self, do: Callable[[], _T], undo: Callable[[_T], None], patience_s: float) -> _T:
        """Call ``do``, and return its result.

        Args:
            do: the function.
            undo: called in the other thread with a result that came too late.
            patience_s: longest wait.

        Raises:
            CheckpointError: the call took too long, or an earlier one still hangs.
            OSError: ``do`` raised it.
        """
        if self._hung is not None and self._hung.is_alive():
            raise timeout_error(patience_s)
        future = Future[_T]()

        def work() -> None:
            try:
                result = do()
            except BaseException as error:  # noqa: BLE001 - raised in the calling thread
                with contextlib.suppress(InvalidStateError):
                    future.set_exception(error)
                return
            try:
                future.set_result(result)
            except InvalidStateError:  # cancelled: too late
                undo(result)

        thread = threading.Thread(target=work, name="checkpoint open", daemon=True)
        thread.start()
        wait([future], patience_s)
        if future.cancel():
            self._hung = thread
            raise timeout_error(patience_s)
        return future.result()
