"""A virtual GPU: what this project does on CUDA, seen without one.

In a torch that is built without CUDA, :func:`install` puts a device into CUDA's place (``device.cpp``). Its tensors
are not the host's, its streams and events are torch's own types, autograd runs its backward in a thread of its own,
and host memory must be registered for copies to be asynchronous: so the code for CUDA runs on it line by line. Kernels
are the CPU's, and have run when they are launched; what would go wrong on a device that runs them later is found by
logic, see :mod:`virtual.races`. Times on it mean nothing.

``python -m virtual SCRIPT ARGUMENTS`` runs a script, or with ``-m`` a module, on it.
"""

import contextlib
import functools
import hashlib
import importlib.util
import os
import subprocess
import sys
import sysconfig
import tempfile
import types
from pathlib import Path

import pytest
import torch

_NAME = "ullage_virtual_gpu"
_PARTS = ("device.cpp", "pools.h", "attention.h")


class NoVirtualGpuError(RuntimeError):
    """There can be none here, and why."""


@functools.cache
def install():
    """Build the device and return its extension; twenty seconds the first time.

    To be called before a process goes backward for the first time, when autograd makes a thread for each device there
    is. ``torch.cuda`` itself finds the device inside :func:`present` alone.

    Raises:
        NoVirtualGpuError: torch has CUDA itself, or there is no C++ compiler.
    """
    if torch.version.cuda or torch.version.hip:
        raise NoVirtualGpuError("this torch has CUDA itself, whose place is taken; it takes one built without")
    source = Path(__file__).with_name("device.cpp")
    text = "".join(source.with_name(name).read_text() for name in _PARTS)
    key = hashlib.sha256(f"{torch.__version__} {sys.version} {text}".encode()).hexdigest()[:16]
    built = Path.home() / ".cache" / "ullage" / f"{_NAME}-{key}.so"
    if not built.exists():
        _build(source, built)
    spec = importlib.util.spec_from_file_location(_NAME, built)
    extension = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(extension)
    return extension


def _build(source, built):
    built.parent.mkdir(parents=True, exist_ok=True)
    root = Path(torch.__file__).parent
    paths = [root / "include", root / "include/torch/csrc/api/include", sysconfig.get_path("include")]
    with tempfile.TemporaryDirectory(dir=built.parent) as folder:
        target = Path(folder) / built.name
        command = [
            *[os.environ.get("CXX", "c++"), "-std=c++20", "-O1", "-fPIC", "-shared", "-w", str(source)],
            *[f"-I{path}" for path in paths],
            f"-DTORCH_EXTENSION_NAME={_NAME}",
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
            *[f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python", "-o", str(target)],
        ]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError as error:
            raise NoVirtualGpuError(f"{command[0]} is missing; install a C++ compiler, or name it in CXX") from error
        # What does not compile is a mistake of these tests, not of the machine.
        assert done.returncode == 0, done.stderr[-4000:]
        target.replace(built)  # whole, or not at all: other processes may build it too


@contextlib.contextmanager
def present():
    """Let ``torch.cuda`` find the device; yield its extension."""
    extension = install()
    extension.set_memory(2**63 - 1, "expandable_segments:True" in os.environ.get("PYTORCH_ALLOC_CONF", ""))
    device = torch.device("cuda", 0)
    free_bytes, total_bytes = 3 << 30, 4 << 30
    runtime = types.SimpleNamespace(
        cudaHostRegister=lambda address, num_bytes, _flags: extension.pin(address, num_bytes) or 0,
        cudaHostUnregister=extension.unpin,
    )

    class Stream:  # a type, since signatures of others name it
        def __new__(cls, _device=None, priority=0):
            return torch.Stream(device, priority=priority)

    class Event:
        def __new__(cls, enable_timing=False, blocking=False):
            return torch.Event(device, enable_timing=enable_timing, blocking=blocking)

    def current_stream(_device=None):
        return torch.accelerator.current_stream()

    @contextlib.contextmanager
    def stream(given):
        before = current_stream()
        torch.accelerator.set_stream(given)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)

    known = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda *_: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda _device: None,
        "device": lambda _device: contextlib.nullcontext(),
        "get_device_name": lambda _device=None: "virtual GPU",
        "get_device_capability": lambda _device=None: (9, 0),
        "get_device_properties": lambda _device=None: types.SimpleNamespace(
            name="virtual GPU", total_memory=total_bytes, multi_processor_count=1, major=9, minor=0
        ),
        "can_device_access_peer": lambda _one, _other: True,
        "Stream": Stream,
        "Event": Event,
        "stream": stream,
        "current_stream": current_stream,
        "synchronize": lambda _device=None: extension.synchronize(),
        "mem_get_info": lambda _device=None: (free_bytes, total_bytes),
        "memory_allocated": lambda _device=None: extension.memory_stats()["active_bytes.all.current"],
        "memory_reserved": lambda _device=None: extension.memory_stats()["reserved_bytes.all.current"],
        "max_memory_allocated": lambda _device=None: extension.memory_stats()["active_bytes.all.peak"],
        "max_memory_reserved": lambda _device=None: extension.memory_stats()["reserved_bytes.all.peak"],
        "memory_stats": lambda _device=None: extension.memory_stats(),
        "reset_peak_memory_stats": lambda _device=None: extension.reset_peaks(),
        "set_per_process_memory_fraction": lambda _share, _device=None: None,
        "empty_cache": extension.empty_cache,
        "cudart": lambda: runtime,
        "default_generators": (torch.default_generator,),
        "get_rng_state": lambda _device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, _device=None: torch.set_rng_state(state),
        "manual_seed": torch.default_generator.manual_seed,
        "manual_seed_all": lambda _seed: None,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in known.items():
            patch.setattr(torch.cuda, name, value)
        yield extension
