"""Programs of Python as processes that are forked from one which has imported torch, transformers and Ullage.

A new interpreter takes ten seconds for that, before each of some twenty runs of a comparison. A forked one has its own
environment, folder, files and process group, and ends as any other: by the end of its program, or a signal.

The process that is forked from (``python -m benchmarks.forks ADDRESS``) has one thread, and never initialises CUDA:
neither would survive a fork. OpenMP has read its variables there, so a run that changes those starts anew.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final

ADDRESS: Final = "ULLAGE_FORKS"
"""Environment variable: where the server listens, if there is one."""
END_S: Final = 8.0
"""What a process has to end by itself, after it was asked to and before it is killed."""
_MOST_BYTES: Final = 1 << 17  # of a request: one message, which Linux keeps whole
PRELOADED: Final = (
    "torch._dynamo",
    "transformers.models.llama.modeling_llama",
    "executor.prepare",
    "planner.plan.planning",
    "ullage.commands.execute.run",
    "ullage.calibrate.kernels",
    "benchmarks.peers.command",
    "benchmarks.peers.engines",
    "benchmarks.gpu.warm",
)


class Process:
    """A program under way, in a process group of its own.

    Args:
        pid: its number, which is the group's.
        wait: waits for so many seconds, and returns the exit code, or ``None`` if it has not ended.
    """

    def __init__(self, pid: int, wait: Callable[[float], int | None]) -> None:
        self.pid, self._wait = pid, wait
        self._code: int | None = None

    def wait(self, limit_s: float) -> int | None:
        """Return its exit code, negative if a signal ended it; ``None`` if it runs for longer than that."""
        if self._code is None:
            self._code = self._wait(limit_s)
        return self._code

    def pause(self, *, paused: bool = True) -> None:
        """Stop it and all that it started for a while, or let them go on."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGSTOP if paused else signal.SIGCONT)

    def end(self, grace_s: float = END_S) -> None:
        """Ask it and all that it started to end, and kill what is left so many seconds later."""
        for number in (signal.SIGTERM, signal.SIGCONT, signal.SIGKILL):
            try:
                os.killpg(self.pid, number)
            except ProcessLookupError:
                return
            self.wait(grace_s if number is signal.SIGCONT else 0.0)


def started(
    command: Sequence[str], environment: Mapping[str, str], log: Path | IO[str], answer: Path | None = None
) -> Process:
    """Start a command: as a fork, if it is one of this Python and its environment has :data:`ADDRESS`.

    Args:
        command: whose first part is a program.
        environment: all of it.
        log: file for what it writes to stderr, and to stdout too.
        answer: file for what it writes to stdout instead.
    """
    with open(log, "w") if isinstance(log, Path) else os.fdopen(os.dup(log.fileno()), "w") as err:  # noqa: PTH123
        if answer is None:
            return _started(command, environment, err.fileno(), err.fileno())
        with answer.open("w") as out:
            return _started(command, environment, out.fileno(), err.fileno())


def _started(command: Sequence[str], environment: Mapping[str, str], out: int, err: int) -> Process:
    address = environment.get(ADDRESS)
    if address and command[0] == sys.executable and (found := _forked(address, command, environment, out, err)):
        return found
    child = subprocess.Popen(command, env=environment, stdout=out, stderr=err, process_group=0)

    def wait(limit_s: float) -> int | None:
        try:
            return child.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None

    return Process(child.pid, wait)


def _forked(address: str, command: Sequence[str], environment: Mapping[str, str], out: int, err: int) -> Process | None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(address)
        request = {"command": list(command), "environment": dict(environment), "folder": str(Path.cwd())}
        socket.send_fds(connection, [json.dumps(request).encode()], [out, err])
        pid = int(connection.recv(64))
    except (OSError, ValueError):  # the server is not there, or not yet
        connection.close()
        return None

    def wait(limit_s: float) -> int | None:
        connection.settimeout(max(limit_s, 0.001))
        try:
            told = connection.recv(64)
        except TimeoutError:
            return None
        connection.close()
        return int(told) if told else -signal.SIGKILL  # its keeper was killed with it

    return Process(pid, wait)


class Server:
    """The process that is forked from.

    Args:
        environment: of it; :data:`ADDRESS` is added here.
        log: file for what it writes.
        preloaded: modules that it imports.
    """

    def __init__(self, environment: dict[str, str], log: Path, preloaded: Sequence[str] = PRELOADED) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="forks-")
        self._address = Path(self._folder.name) / "address"
        # Whether there is a GPU is asked of the driver's library, which initialises nothing. OpenBLAS, which numpy and
        # scipy have and training does not use, begins no threads, nor does the allocator of pyarrow.
        own = {
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "JE_ARROW_MALLOC_CONF": "background_thread:false",
        }
        command = (sys.executable, "-m", "benchmarks.forks", str(self._address), *preloaded)
        self._process = started(command, environment | own, log)
        environment[ADDRESS] = str(self._address)

    def ready(self, limit_s: float) -> bool:
        """Return whether it has imported everything, at most so many seconds from now."""
        end_s = time.monotonic() + limit_s
        while not self._address.exists():
            if time.monotonic() > end_s or self._process.wait(0.05) is not None:
                return False
        return True

    def close(self) -> None:
        """End it."""
        self._process.end()
        self._folder.cleanup()


# --- in the server ----------------------------------------------------------------------------------------------------
def _preload(names: Sequence[str]) -> None:
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:  # a run that needs it will say so
            print(f"{name}: {error}", file=sys.stderr, flush=True)
    if "numba" in sys.modules:
        # What the first compiled function that is loaded would wait for.
        sys.modules["numba.core.registry"].cpu_target.target_context.refresh()
    threads = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    if len(threads) > 1:
        named = ", ".join(sorted(threads))
        sys.exit(f"there are {len(threads)} threads ({named}), and a fork has one; an imported module begins them")
    if "torch" in sys.modules and _spoilt(sys.modules["torch"]):
        sys.exit("CUDA was asked for its devices, and refuses forked processes then; a module that is imported asks it")
    gc.collect()
    gc.freeze()  # collections pass over what was imported, and copy none of it


def _spoilt(torch: Any) -> bool:
    """Return whether forked processes could not use CUDA: even counting its devices spoils it for them."""
    pid = os.fork()
    if pid == 0:
        os._exit(int(torch.cuda._is_in_bad_fork()))
    return os.waitpid(pid, 0)[1] != 0


def _serve(address: str) -> dict[str, Any]:
    """Serve; return the request in each process that is forked for one."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"{address}.new")
        listener.listen(64)
        Path(f"{address}.new").rename(address)  # which says that it is ready
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers are not waited for
        while True:
            connection, _ = listener.accept()
            if os.fork() == 0:
                break
            connection.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    return _kept(connection)


def _kept(connection: socket.socket) -> dict[str, Any]:
    """Be the keeper of one process: tell its number, wait, and tell its exit code. Returns in that process."""
    message, fds, _, _ = socket.recv_fds(connection, _MOST_BYTES, 2)
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        connection.close()
        for number, fd in enumerate(fds, 1):
            os.dup2(fd, number)
            os.close(fd)
        request: dict[str, Any] = json.loads(message)
        return request
    os.setpgid(pid, pid)  # whoever is first: it may be killed from the moment that it is told of
    for fd in fds:
        os.close(fd)
    connection.send(str(pid).encode())
    _, status = os.waitpid(pid, 0)
    try:
        connection.send(str(os.waitstatus_to_exitcode(status)).encode())
    finally:
        os._exit(0)


def _be(request: Mapping[str, Any]) -> None:
    """Be a program: a file of Python, or ``-m`` a module."""
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    places = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [place for place in places if place and place not in sys.path]
    importlib.invalidate_caches()
    _, *arguments = request["command"]
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path[0] = str(Path(arguments[0]).absolute().parent)
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    _preload(sys.argv[2:])
    _be(_serve(sys.argv[1]))
