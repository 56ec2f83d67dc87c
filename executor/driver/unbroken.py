"""Calls that change a session: if one does not complete, the session has failed."""

import contextlib
import dataclasses
from typing import TYPE_CHECKING, final

from planner.schedule.loop import OutOfOrderError

if TYPE_CHECKING:
    from executor.driver.runtime import Runtime


@final
@dataclasses.dataclass(frozen=True)
class Unbroken(contextlib.AbstractContextManager["Unbroken"]):
    """A context for a part of a call that changes the session: if it does not complete, the session has failed.

    [Note: Interrupted] A signal's handler may raise anywhere (Ctrl-C, time limits). Calls that only read can then be
    made again: what they remember is set after the work that it describes, and forgotten before. Parking and unparking
    can be called again too. Around everything else stands this context. It marks the session as failed, and every later
    call says so. In forward and backward, weights and state of the last step are still whole where updates begin at the
    step: then lanes finish them, and ``close()`` gives the weights back.

    Attributes:
        runtime: of the session.
        call: the call, in words.
        keeps: whether weights and state stay those of the last step.
        expected: errors that leave everything as it was, or are followed by a call that sets it.
    """

    runtime: "Runtime"
    call: str
    keeps: bool = False
    expected: tuple[type[BaseException], ...] = ()

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if error is None:
            return
        if not isinstance(error, (OutOfOrderError, *self.expected)):
            self.runtime.fail(self.call, error, keeps=self.keeps)
        elif isinstance(error, OutOfOrderError) and self.runtime.inside_iteration and self.runtime.ranks is not None:
            self.runtime.ranks.watchdog.report_failure(error)  # others wait for the tasks that this rank does not reach
