"""SM clock and power of a GPU, from NVIDIA's management library. Nothing is ever set."""

import ctypes
from collections.abc import Callable

import torch

_SM_CLOCK = 1  # NVML_CLOCK_SM


def sensors(device: torch.device) -> Callable[[], tuple[float, float] | None]:
    """Return a function that reads a GPU's SM clock in MHz and power in W, or ``None`` if they cannot be read.

    It reads through ``libnvidia-ml.so.1``, which comes with the driver.
    """
    handle = ctypes.c_void_p()
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        name = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
        failed = library.nvmlInit_v2() or library.nvmlDeviceGetHandleByUUID(name, ctypes.byref(handle))
    except (OSError, AttributeError):  # no driver, or a torch that does not know the device's id
        failed = True
    if failed:
        return lambda: None

    def read() -> tuple[float, float] | None:
        mhz, milliwatts = ctypes.c_uint(), ctypes.c_uint()
        if library.nvmlDeviceGetClockInfo(handle, _SM_CLOCK, ctypes.byref(mhz)) or library.nvmlDeviceGetPowerUsage(
            handle, ctypes.byref(milliwatts)
        ):
            return None
        return float(mhz.value), milliwatts.value / 1e3

    return read
