"""End training in order after Ctrl-C or SIGTERM."""

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any, Final, Self, final

_DEFAULTS: Final[Mapping[int, Any]] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
_AGAIN_S: Final = 0.02
_REPEATED_S: Final = 3.0  # torchrun repeats signals that its processes have already received


class SignalledError(KeyboardInterrupt):
    """A signal ended the program early: at once, or training after an iteration, with its state in a checkpoint.

    Attributes:
        signal: number of the signal.
    """

    def __init__(self, number: int, message: str = "") -> None:
        super().__init__(message)
        self.signal = number


@contextlib.contextmanager
def consistent_interrupt() -> Iterator[None]:
    """Turn Ctrl-C, SIGTERM, and any error that follows one of them into a :class:`SignalledError`.

    Interrupted code may raise another error: an extension in Rust or C that is importing a module reports a broken
    import. No exception leaves a destructor, or what is called when an object goes: a signal that comes there comes
    again behind it. If a signal has a handler already or is ignored, it is left alone.
    """
    noticed: int | None = None

    def handle(number: int, _frame: FrameType | None) -> None:
        nonlocal noticed
        noticed = number
        raise SignalledError(number)

    try:
        with _handlers(handle):
            yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if noticed is not None:
            raise SignalledError(noticed) from error
        raise


@contextlib.contextmanager
def _handlers(handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Let signals that have no handler of the user's call ``handle``, and those that are lost come again."""
    if threading.current_thread() is not threading.main_thread():  # Python accepts handlers only there
        yield
        return
    report, main = sys.unraisablehook, threading.get_ident()

    def repeat(lost: "sys.UnraisableHookArgs") -> None:
        if isinstance(lost.exc_value, SignalledError):
            again = threading.Timer(_AGAIN_S, signal.pthread_kill, (main, lost.exc_value.signal))
            again.daemon = True
            again.start()
        else:
            report(lost)

    before = {number: handler for number, handler in _DEFAULTS.items() if signal.getsignal(number) == handler}
    for number in before:
        signal.signal(number, handle)
    sys.unraisablehook = repeat
    try:
        yield
    finally:
        sys.unraisablehook = report
        for number, handler in before.items():
            signal.signal(number, handler)


@final
class Interruption:
    """On the first Ctrl-C or SIGTERM, end training after this iteration; on the second, end at once.

    Args:
        tell: called on the first signal with a line for the user, in a thread of its own. The signal may interrupt a
            write to the same stream, so the handler itself must not write.
        saves: whether there will be a checkpoint. If not, Ctrl-C keeps its meaning: nobody who types it wants to wait.
    """

    def __init__(self, tell: Callable[[str], None], *, saves: bool = True) -> None:
        self.signal: int | None = None
        self._first_s = 0.0
        self._numbers = tuple(_DEFAULTS) if saves else (signal.SIGTERM,)
        what = "with a checkpoint in all places" if saves else "with what was measured until then"
        line = f"ending after this iteration {what}; a second signal ends at once"
        self._telling = threading.Thread(target=tell, args=(line,))
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # Python accepts handlers only there
            self._before = {number: signal.signal(number, self._handle) for number in self._numbers}
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
            if time.monotonic() - self._first_s < _REPEATED_S:
                return
            self._restore()
            raise SignalledError(number)
        self.signal, self._first_s = number, time.monotonic()
        self._telling.start()
