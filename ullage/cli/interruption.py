"""Signals that let training end in order."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any, Final, Self, final

_DEFAULTS: Final[Mapping[int, Any]] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
_SAME_WISH_S: Final = 3.0  # torchrun repeats signals that its processes have already received


class InterruptedTrainingError(Exception):
    """Training ended early as requested, and its state is in a checkpoint.

    Attributes:
        signal: its number.
    """

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.signal = number


class ForcedExitError(KeyboardInterrupt):
    """A signal asked to end at once.

    Attributes:
        signal: its number.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.signal = number


@contextlib.contextmanager
def consistent_interrupt() -> Iterator[None]:
    """Make Ctrl-C, SIGTERM and any error after one of them a :class:`ForcedExitError`.

    Interrupted code may fail in another way: an extension in Rust or C reports a broken import. Existing handlers, and
    ignored signals, stay.
    """
    noticed: int | None = None

    def handle(number: int, _frame: FrameType | None) -> None:
        nonlocal noticed
        noticed = number
        raise ForcedExitError(number)

    ours = threading.current_thread() is threading.main_thread()
    before = {number: handler for number, handler in _DEFAULTS.items() if ours and signal.getsignal(number) == handler}
    for number in before:
        signal.signal(number, handle)
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if noticed is not None:
            raise ForcedExitError(noticed) from error
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@final
class Interruption:
    """Takes the first Ctrl-C or SIGTERM as a request to end after this iteration; the second ends at once.

    Args:
        tell: called at the first one, in a thread of its own, with a line for the user. The signal may have come in the
            middle of a write to the same stream, which no handler may write to.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.signal: int | None = None
        self._first_s = 0.0
        self._telling = threading.Thread(
            target=tell,
            args=("ending after this iteration, with a checkpoint in all places; once more to end at once",),
        )
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python takes no handlers
            self._before = {number: signal.signal(number, self._handle) for number in _DEFAULTS}
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self._restore()
        if self.signal is not None:
            self._telling.join()

    def _restore(self) -> None:
        while self._before:
            signal.signal(*self._before.popitem())

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.signal is not None:
            if time.monotonic() - self._first_s < _SAME_WISH_S:
                return
            self._restore()
            raise ForcedExitError(number)
        self.signal, self._first_s = number, time.monotonic()
        self._telling.start()
