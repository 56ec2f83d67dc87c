"""SM clock and power of a GPU, from NVIDIA's management library. Nothing is ever set."""

import contextlib
import ctypes

import torch

_SM_CLOCK = 1  # NVML_CLOCK_SM


class Sensors:
    """Reads a GPU's sensors through ``libnvidia-ml.so.1``, which comes with the driver.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._library: ctypes.CDLL | None = None
        self._handle = ctypes.c_void_p()
        with contextlib.suppress(OSError, AttributeError):  # no driver, or a torch that does not know the device's id
            library = ctypes.CDLL("libnvidia-ml.so.1")
            name = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
            if not library.nvmlInit_v2() and not library.nvmlDeviceGetHandleByUUID(name, ctypes.byref(self._handle)):
                self._library = library

    def read(self) -> tuple[float, float] | None:
        """Return the SM clock in MHz and the power in W; ``None`` if they cannot be read."""
        mhz, milliwatts = ctypes.c_uint(), ctypes.c_uint()
        if (
            self._library is None
            or self._library.nvmlDeviceGetClockInfo(self._handle, _SM_CLOCK, ctypes.byref(mhz))
            or self._library.nvmlDeviceGetPowerUsage(self._handle, ctypes.byref(milliwatts))
        ):
            return None
        return float(mhz.value), milliwatts.value / 1e3
