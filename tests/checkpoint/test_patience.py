"""Things that may hang are waited for in bounds, and undone if they end later."""

import threading
import time

import pytest

from executor.checkpoint.files.system_calls import CheckpointError
from executor.checkpoint.files.timeouts import TimeLimited

PATIENCE_S = 0.1


def test_what_ends_in_time_is_returned_and_what_it_raises_is_raised():
    in_time = TimeLimited()
    assert in_time.do(lambda: 7, pytest.fail, 20.0) == 7
    with pytest.raises(FileNotFoundError):
        in_time.do(lambda: open("/nowhere"), pytest.fail, 20.0)  # noqa: PTH123, SIM115
    assert in_time.do(lambda: 8, pytest.fail, 20.0) == 8


@pytest.mark.parametrize("fails", [False, True])
def test_what_hangs_is_left_behind_and_undone_when_it_ends(fails):
    in_time, go_on, undone = TimeLimited(), threading.Event(), []

    def hang():
        go_on.wait()
        if fails:
            raise OSError(5, "Input/output error")
        return 9

    for _ in range(3):
        begin_s = time.monotonic()
        with pytest.raises(CheckpointError, match=r"the drive has not answered for 0.1 s"):
            in_time.do(hang, undone.append, PATIENCE_S)
        waited_s = time.monotonic() - begin_s
    assert waited_s < PATIENCE_S, "while it hangs nothing else is tried"
    go_on.set()
    in_time._hung.join(20)
    assert undone == ([] if fails else [9])
    assert in_time.do(lambda: 7, pytest.fail, 20.0) == 7


def test_a_thread_that_has_answered_but_has_not_ended_does_not_hang():
    """On a busy machine the thread of one checkpoint may end after the next has begun."""
    in_time, go_on, local, threads = TimeLimited(), threading.Event(), threading.local(), []

    class Slow:
        def __del__(self):
            go_on.wait(20)

    def answer():
        local.slow = Slow()  # deleted as the thread ends
        threads.append(threading.current_thread())
        return 7

    assert in_time.do(answer, pytest.fail, 20.0) == 7
    assert in_time.do(lambda: 8, pytest.fail, 20.0) == 8
    assert threads[0].is_alive()
    go_on.set()
