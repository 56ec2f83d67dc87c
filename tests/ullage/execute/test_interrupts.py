"""Ctrl-C ends every command, in every phase, with one line and exit code 130; SIGTERM with 143, as shells count."""

import fcntl
import os
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable
from pathlib import Path

import forked
import pytest

from ullage.cli.interruption import Interruption, SignalledError, consistent_interrupt

WAIT_S = 60.0


def loaded(process: subprocess.Popen[str], library: str) -> bool:
    """Return whether a process has come so far that it has a library."""
    return library in Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8")


def wait_until(process: subprocess.Popen[str], is_there: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not is_there():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline_s
        time.sleep(0.002)


# Measuring, training and studies are interrupted in their own tests.
# What is run, the library whose loading tells how far it is, and seconds from then on.
PHASES = {
    "imports of the planner": ("plan --model opt-13b --gpus 8 --output {out}", "_pydantic_core", 0.0),
    "imports of torch": ("execute {host_plan} --output-dir {out}", "libtorch_cpu", 0.0),
    "planning": (
        "plan --model moe-1t --hardware h100 --gpus 4096 --output {out}",
        "highs",
        0.5,
    ),
    "a report": ("report {plan} --output {out}.html", "_pydantic_core", 0.4),
}


def start(phase: str, host_plan: Path, plan_path: Path, folder: Path) -> subprocess.Popen[str]:
    arguments, library, seconds = PHASES[phase]
    words = {"host_plan": host_plan, "plan": plan_path, "out": folder / "out"}
    process = subprocess.Popen(
        [sys.executable, "-m", "ullage", *arguments.format(**words).split()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=os.environ | {"HOME": str(folder), "ULLAGE_HOME": str(folder)},
    )
    wait_until(process, lambda: loaded(process, library))
    time.sleep(seconds)
    return process


@pytest.mark.part(4)
@pytest.mark.parametrize(
    ("phase", "number"),
    [
        *((phase, signal.SIGINT) for phase in PHASES),
        *((phase, signal.SIGTERM) for phase in ("imports of torch", "planning")),
    ],
)
def test_a_signal_is_one_line_and_its_code(
    phase: str, number: signal.Signals, host_plan: Path, plan_path: Path, tmp_path: Path
) -> None:
    process = start(phase, host_plan, plan_path, tmp_path)
    process.send_signal(number)
    out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 128 + number, err
    assert out == ""
    assert "Traceback" not in err
    assert f"ullage {PHASES[phase][0].split()[0]}: interrupted" in err.splitlines()[-1]
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".jsonl"]


def test_what_fails_because_of_ctrl_c_counts_as_that() -> None:
    with pytest.raises(KeyboardInterrupt), consistent_interrupt():
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise ImportError("a broken module") from None
    with pytest.raises(ImportError), consistent_interrupt():
        raise ImportError("a broken module")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


class _Interrupted:
    def __init__(self, number: int) -> None:
        self._number = number

    def __del__(self) -> None:
        signal.raise_signal(self._number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_a_destructor_is_not_lost(number: int) -> None:
    before, deadline_s = sys.unraisablehook, time.monotonic() + WAIT_S
    with pytest.raises(SignalledError) as raised, consistent_interrupt():
        _Interrupted(number)
        while time.monotonic() < deadline_s:
            time.sleep(0.002)
    assert raised.value.signal == number
    assert sys.unraisablehook is before


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_other_errors_of_destructors_are_reported_as_before() -> None:
    told: list[object] = []

    class Failing:
        def __del__(self) -> None:
            raise ValueError("an error of a destructor")

    before, sys.unraisablehook = sys.unraisablehook, lambda lost: told.append(lost.exc_type)
    try:
        with consistent_interrupt():
            Failing()
    finally:
        sys.unraisablehook = before
    assert told == [ValueError]


def test_a_signal_during_a_write_is_reported_after_it() -> None:
    """Training and the signal print to the same stream, and no handler may write to it meanwhile."""
    readable, writable = os.pipe()
    text = "x" * 200_000  # more than a pipe holds
    found = []

    def reader() -> None:
        while int.from_bytes(fcntl.ioctl(readable, termios.FIONREAD, bytes(4)), sys.byteorder) < 65536:
            time.sleep(0.002)
        os.kill(os.getpid(), signal.SIGTERM)
        while not interruption.signal:
            time.sleep(0.002)
        with os.fdopen(readable) as pipe:
            found.append(pipe.read())

    thread = threading.Thread(target=reader)
    with os.fdopen(writable, "w") as out:
        with Interruption(lambda line: print(line, file=out, flush=True)) as interruption:
            thread.start()
            out.write(text)
            out.flush()
        assert interruption.signal == signal.SIGTERM
    thread.join()
    assert found[0].startswith(text)
    assert found[0].endswith("a second signal ends at once\n")


def test_who_has_own_handlers_keeps_them() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell's background jobs have it
    try:
        with consistent_interrupt():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_signal_while_python_ends_ends_with_its_code(tmp_path: Path) -> None:
    """A second Ctrl-C comes where nothing handles it any more, and the signal itself would end the process."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, sys\nfrom ullage import main\n"
        "main.main = lambda: signal.SIGINT + 128\n"
        "try:\n    main.run()\nfinally:\n    os.kill(os.getpid(), int(sys.argv[1]))\n",
        encoding="utf-8",
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        done = forked.completed(forked.script, str(script), str(int(number)))
        assert (done.returncode, done.stderr) == (128 + number, "")
