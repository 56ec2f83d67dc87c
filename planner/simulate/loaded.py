"""The simulator's kernel as machine code: compiled by numba once, then loaded from a file without numba.

Importing numba and reading its own cache takes a second, because that imports a whole compiler. So we store numba's
object file ourselves, and LLVM alone loads it in less than a tenth of that time. The file's name contains a digest of
everything that the code depends on. Its first line has a digest of the code; a damaged file is compiled again.
"""

import ctypes
import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numpy.typing as npt

from hwprofiles.files import write_whole
from planner.simulate.state import State

_HERE = Path(__file__).parent
_SOURCES = ("compiled.py", "state.py")
_LOCK = threading.Lock()


Kernel = Callable[[State], int]
""":func:`planner.simulate.compiled.kernel`, ready to be called. It releases the GIL while it runs."""

_kernel: Kernel | None = None


def kernel_for(state: State) -> Kernel:
    """Return the kernel: loaded already, from its file, or compiled, which takes some seconds once."""
    global _kernel  # noqa: PLW0603 - one for the process
    with _LOCK:
        if _kernel is None:
            symbol, code = _read() or _compile(state)
            _kernel = _loaded(symbol, code, sum(1 for _ in _flattened(state)))
    return _kernel


def _loaded(symbol: str, code: bytes, num_arguments: int) -> Kernel:
    """Return the kernel with a name in an object file, and with so many arguments; see :func:`_flattened`."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_triple(llvm.get_process_triple()).create_target_machine()
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)  # owns the code
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    # A function compiled by numba takes pointers for its value and its exception, and returns 0 unless it raised.
    kind = ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * num_arguments)
    function = kind(engine.get_function_address(symbol))

    def call(state: State, _owner: Any = engine) -> int:
        value, exception = ctypes.c_int64(), ctypes.c_void_p()
        status = function(ctypes.addressof(value), ctypes.addressof(exception), *_flattened(state))
        assert status == 0, "the kernel raises nothing"
        return value.value

    return call


def kernel_paths() -> list[Path]:
    """Return the places for the file, in order: beside the source, then in the user's cache."""
    digest = hashlib.sha256()
    for part in (version("numba"), version("llvmlite"), llvm.get_process_triple(), llvm.get_host_cpu_name()):
        digest.update(f"{part}\n".encode())
    digest.update(llvm.get_host_cpu_features().flatten().encode())
    for source in _SOURCES:
        digest.update((_HERE / source).read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = f"kernel-{digest.hexdigest()[:16]}.o"
    return [_HERE / "__pycache__" / name, cache / "ullage" / name]


def _read() -> tuple[str, bytes] | None:
    """Return symbol and code from the file, if there is an undamaged one."""
    for path in kernel_paths():
        with suppress(OSError, ValueError):
            head, code = path.read_bytes().split(b"\n", 1)
            symbol, digest = json.loads(head)
            if digest == hashlib.sha256(code).hexdigest():
                return symbol, code
    return None


def _compile(state: State) -> tuple[str, bytes]:
    """Compile the kernel, and write its file to the first place that can be written."""
    from planner.simulate.compiled import compile_kernel  # noqa: PLC0415 - numba, which takes long to import

    symbol, code = compile_kernel(state)
    head = json.dumps([symbol, hashlib.sha256(code).hexdigest()])
    for path in kernel_paths():
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, f"{head}\n".encode() + code)
            break
    return symbol, code


def _flattened(state: tuple[Any, ...]) -> Iterator[int]:
    """Yield the arguments that numba makes of nested tuples of C-contiguous arrays.

    For each array these are its owner and parent (null for borrowed arrays), the number of items, the bytes of one, the
    address, the shape and the strides.
    """
    for part in state:
        if isinstance(part, tuple):
            yield from _flattened(part)
        else:
            array: npt.NDArray[Any] = part
            yield from (0, 0, array.size, array.itemsize, array.__array_interface__["data"][0])
            yield from array.shape
            yield from array.strides
