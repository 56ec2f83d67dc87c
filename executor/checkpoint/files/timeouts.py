"""Time limits for drives that may hang."""

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, wait
from typing import Final, TypeVar, final

from executor.checkpoint.files.system_calls import CheckpointError

SLOWEST_BYTES_PER_S: Final = 10e6
"""A slower drive counts as one that does not answer."""

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
        self._hung: threading.Thread | None = None  # the newest that has not answered in time

    def do(self, do: Callable[[], _T], undo: Callable[[_T], None], patience_s: float) -> _T:
        """Return what ``do`` returns.

        Args:
            do: the function.
            undo: called with a result that is too late, in the other thread.
            patience_s: longest wait.

        Raises:
            CheckpointError: it took too long, or an earlier one still hangs.
            OSError: whatever ``do`` raises.
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
