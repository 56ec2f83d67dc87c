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
import types
from pathlib import Path

import pytest
import torch


class MissingCompilerError(RuntimeError):
    """There is nothing to build the device with."""


@functools.cache
def install():
    """Build the device and return its extension; half a minute the first time.

    ``torch.cuda`` itself finds the device inside :func:`present` alone.

    Raises:
        MissingCompilerError: there is no C++ compiler, or no ninja.
    """
    from torch.utils import cpp_extension  # noqa: PLC0415 - takes a second

    if not cpp_extension.is_ninja_available():
        raise MissingCompilerError("ninja is missing; install it to build the tests' device")
    try:
        cpp_extension.get_compiler_abi_compatibility_and_version(cpp_extension.get_cxx_compiler())
        source = str(Path(__file__).with_name("device.cpp"))
        return cpp_extension.load("ullage_virtual_device", [source], extra_cflags=["-O1"])
    except OSError as error:
        raise MissingCompilerError(f"no C++ compiler works: {error}") from error


@contextlib.contextmanager
def present():
    """Let ``torch.cuda`` find the device; yield its extension."""
    extension = install()
    device = torch.device("cuda", 0)
    free_bytes, total_bytes = 3 << 30, 4 << 30
    runtime = types.SimpleNamespace(
        cudaHostRegister=lambda address, num_bytes, _flags: extension.pin(address, num_bytes) or 0,
        cudaHostUnregister=extension.unpin,
    )

    class Stream:  # a type, since signatures of others name it
        def __new__(cls, _device=None):
            return torch.Stream(device)

    class Event:
        def __new__(cls, enable_timing=False):
            return torch.Event(device, enable_timing=enable_timing)

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
        "memory_allocated": lambda _device=None: extension.held_bytes(),
        "memory_reserved": lambda _device=None: extension.held_bytes(),
        "max_memory_allocated": lambda _device=None: extension.peak_bytes(),
        "max_memory_reserved": lambda _device=None: extension.peak_bytes(),
        "reset_peak_memory_stats": lambda _device=None: extension.reset_peak(),
        "set_per_process_memory_fraction": lambda _share, _device=None: None,
        "empty_cache": lambda: None,
        "cudart": lambda: runtime,
        "default_generators": (torch.default_generator,),
        "get_rng_state": lambda _device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, _device=None: torch.set_rng_state(state),
        "manual_seed_all": lambda _seed: None,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in known.items():
            patch.setattr(torch.cuda, name, value)
        yield extension
