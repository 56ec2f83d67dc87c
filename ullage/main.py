"""The command line: parse the arguments, call one command, and turn errors into one line and an exit code."""

import contextlib
import errno
import importlib.util
import io
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from ullage.cli.exit_codes import BAD_INPUT, BROKEN_PIPE, SIGNALLED
from ullage.cli.interruption import consistent_interrupt
from ullage.commands import SUMMARIES, build_parser

# Libraries that only some commands need.
_EXTRAS = {
    "torch",
    "transformers",
    "safetensors",
    "shtab",
    "pyarrow",
    "plotly",
    "jinja2",
}
# Remedies for errors of the operating system, which name a file but no remedy.
_REMEDIES = {
    errno.ENOENT: "give the path of one that exists",
    errno.EACCES: "give one that this user may use, or change its permissions",
    errno.EPERM: "give one that this user may use, or change its permissions",
    errno.EISDIR: "it is a folder; give a file",
    errno.ENOTDIR: "it is a file; give a folder",
    errno.EEXIST: "give a new name, or remove it",
    errno.EROFS: "give a path on a drive that can be written",
    errno.ENOSPC: "make room, or give a path on another drive",
    errno.ENAMETOOLONG: "give a shorter name",
}


def _settings_for_torch() -> None:
    """Set variables that torch reads when it is loaded, or when CUDA is first used; both happen later."""
    # Let torch's threads sleep while they wait for each other, because updates need the cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # Streams share the device's queues unless there are as many: one that waits for another process would stop others.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    # The system maps large tensors in large pages: the first touch of small ones takes several times as long.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    # Segments of device memory that grow leave less of it unused where sizes vary. Older versions know the second name.
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    if not os.environ.keys() & set(names):
        os.environ |= dict.fromkeys(names, "expandable_segments:True")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments after the program's name; by default those of the process.

    Returns:
        The exit code: 0 success, 1 a check failed, 2 bad input, 130 interrupted, 141 the reader of the output closed
            it.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments[0] if arguments and arguments[0] in SUMMARIES else None
    prog = f"ullage {command}" if command else "ullage"
    if sys.stdout is None:  # a closed descriptor
        sys.stdout = io.StringIO()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # do not fail if the terminal cannot show a character
    _settings_for_torch()
    try:
        with consistent_interrupt():
            check_packages()
            args = build_parser(*([command] if command else [])).parse_args(arguments)
            code: int = args.run(args)
            sys.stdout.flush()
    except SystemExit as exit_:  # argparse raises this after --help, or after it has printed an error
        return exit_.code if isinstance(exit_.code, int) else 0
    except KeyboardInterrupt as error:
        return _interrupted(prog, error)
    except BrokenPipeError as error:
        return _broken_pipe(prog, error)
    except (ValueError, OSError, MemoryError) as error:
        return _bad_input(prog, error)
    except ImportError as error:
        if error.name not in {None, *_EXTRAS}:  # what packages raise themselves, as where one is too old, has no name
            raise
        return _bad_input(prog, error)
    return code


def run() -> NoReturn:
    """Be the program: run the command of the process's arguments, and end with its exit code.

    A signal that comes while Python ends is a second one, or too late: it ends the program at once with its code.
    """
    code = main()
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, _frame: os._exit(SIGNALLED + number))
    sys.exit(code)


def _interrupted(prog: str, error: KeyboardInterrupt) -> int:
    # Python remembers an interrupted import and would end by the signal. Running any code clears that.
    exec("")  # noqa: S102
    number: int = getattr(error, "signal", signal.SIGINT)
    return _fail(prog, str(error) or "interrupted", SIGNALLED + number)


def _broken_pipe(prog: str, error: BrokenPipeError) -> int:
    if error.filename is not None:  # the pipe is an output file, not stdout
        return _bad_input(prog, error)
    # Python flushes stdout again at exit; discard that output.
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return BROKEN_PIPE


def _bad_input(prog: str, error: Exception) -> int:
    if os.environ.get("ULLAGE_TRACEBACK", "") not in {"", "0"}:
        raise error
    message = str(error)
    if isinstance(error, OSError) and error.filename:
        message = f"{error.filename}: {error.strerror}"
        if error.errno in _REMEDIES and ";" not in message:
            message += f"; {_REMEDIES[error.errno]}"
    elif isinstance(error, ModuleNotFoundError) and "pip install" not in message:
        message += "; pip install 'ullage[execute]'"
    return _fail(prog, f"error: {message}", BAD_INPUT)


def _fail(prog: str, message: str, code: int) -> int:
    sys.stderr.write(f"{prog}: {' '.join(message.split())}\n")
    return code


PACKAGES = ("hwprofiles", "planner", "executor", "ullage")


def check_packages() -> None:
    """Check that Python finds all packages of Ullage in the folder of this one.

    Raises:
        ImportError: a package is missing or is found elsewhere; the message names it and the remedy.
    """
    home = Path(__file__).resolve().parents[1]
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is None:
            raise ImportError(f"package {name!r} is missing beside {home / 'ullage'}; install ullage again")
        found = Path(spec.origin).resolve() if spec.origin else None
        if found is None or found.parent.parent != home:
            where = found or ", ".join(spec.submodule_search_locations or ()) or "elsewhere"
            raise ImportError(
                f"package {name!r} is not Ullage's: it resolves to {where}, not to {home / name}; pip uninstall {name} "
                "if another distribution installed it, leave a folder that has a file of that name, or use a fresh "
                "environment"
            )
