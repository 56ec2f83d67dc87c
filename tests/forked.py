"""Programs as processes of their own, forked from one that has imported torch and all else, which takes seconds.

A forked program has its own number, environment, folder and pipes; signals reach it, and it ends with its exit code.
What happens while it imports, or before, takes a new interpreter to test.
"""

import atexit
import importlib
import multiprocessing
import os
import runpy
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from subprocess import CompletedProcess, TimeoutExpired
from typing import Final

FORKS: Final = multiprocessing.get_context("forkserver")
END_S: Final = 300.0


def start_server() -> None:
    """Have what is forked from, which is another process, import ``imported.py``."""
    path = os.environ.get("PYTHONPATH")
    try:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parent), path]))
        FORKS.set_forkserver_preload(["imported"])
        forkserver.ensure_running()
    finally:
        os.environ.pop("PYTHONPATH")
        if path is not None:
            os.environ["PYTHONPATH"] = path


def ullage(*arguments: str) -> None:
    """Be ``python -m ullage ARGUMENTS``."""
    sys.argv = ["ullage", *arguments]
    runpy.run_module("ullage", run_name="__main__", alter_sys=True)


def trained(note: str, *arguments: str) -> None:
    """Be ``python -m ullage ARGUMENTS``, and keep in a file how many iterations have ended."""
    run = importlib.import_module("ullage.commands.execute.run")
    train = run.train

    def noted(*given: object) -> Iterator[object]:
        for step in train(*given):
            Path(note).write_text(str(step.iteration + 1), "utf-8")
            yield step

    run.train = noted
    ullage(*arguments)


def launcher(module: str, *arguments: str) -> None:
    """Be ``python -m MODULE ARGUMENTS``, in a group of its own; what it starts are new interpreters."""
    os.setsid()
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def script(path: str, *arguments: str) -> None:
    """Be ``python PATH ARGUMENTS``."""
    sys.argv = [path, *arguments]
    runpy.run_path(path, run_name="__main__")


class Forked:
    """A process in which a function runs, with arguments and options as ``subprocess.Popen`` has them; text in pipes.

    Args:
        function: of a module, not of a test: the process imports it.
        arguments: of the function.
        env: environment, by default that of this process. Libraries have read theirs before.
        cwd: folder.
    """

    def __init__(
        self,
        function: Callable[..., object],
        *arguments: str,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        start_server()
        ours, theirs = zip(*(FORKS.Pipe(duplex=False) for _ in range(2)), strict=True)
        place = (dict(os.environ if env is None else env), str(cwd or Path.cwd()))
        self._process = FORKS.Process(target=_begin, args=(function, arguments, *place, *theirs), daemon=True)
        self._process.start()
        for pipe in theirs:
            pipe.close()
        self.stdout, self.stderr = (os.fdopen(os.dup(pipe.fileno()), encoding="utf-8") for pipe in ours)
        assert self._process.pid
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code; minus the number of the signal that ended it; None while it runs."""
        return self._process.exitcode

    poll = returncode.fget

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def communicate(self, timeout: float = END_S) -> tuple[str, str]:
        """Wait for its end; return what it wrote to stdout and stderr and was not read yet."""
        with ThreadPoolExecutor(2) as readers:
            written = [readers.submit(stream.read) for stream in (self.stdout, self.stderr)]
            self._process.join(timeout)
            if late := self.returncode is None:
                self._process.kill()
            out, err = (text.result() for text in written)
        if late:
            raise TimeoutExpired(str(self.pid), timeout, out, err)
        self._process.join()
        return out, err


def completed(function: Callable[..., object], *arguments: str, **options: object) -> CompletedProcess[str]:
    """Return what a process did, when it has ended."""
    process = Forked(function, *arguments, **options)
    out, err = process.communicate()
    return CompletedProcess([*arguments], process.returncode, out, err)


def environments(num_ranks: int) -> list[dict[str, str]]:
    """Return what a launcher gives processes on this machine that train together, each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    every = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    every |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(num_ranks))
    return [os.environ | every | dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)) for rank in range(num_ranks)]


def until_training(process: Forked, note: Path, num_iterations: int = 2) -> None:
    """Wait until so many iterations of :func:`trained` have ended."""
    end_s = time.monotonic() + END_S
    while not (note.exists() and int(note.read_text("utf-8") or 0) >= num_iterations):
        assert process.returncode is None, process.communicate()
        assert time.monotonic() < end_s
        time.sleep(0.02)


def _begin(
    function: Callable[..., object],
    arguments: Sequence[str],
    environment: Mapping[str, str],
    folder: str,
    out: Connection,
    err: Connection,
) -> None:
    for number, pipe in enumerate((out, err), 1):
        os.dup2(pipe.fileno(), number)
        pipe.close()
    # Those of the process it was forked from may have been of a file, in which one can seek.
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - until the process ends
    sys.stderr = open(2, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    try:
        function(*arguments)
    finally:
        atexit._run_exitfuncs()  # which processes of multiprocessing end without
