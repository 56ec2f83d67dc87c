"""Machines that are proposed in place of one that is too small."""

from collections.abc import Iterator

from hwprofiles.paths import number, quantities, replace
from hwprofiles.profile import HardwareProfile
from hwprofiles.quantity import Provenance

# Memory sizes on the market: of one device, and of one host.
_DEVICE_GB = (16, 24, 32, 40, 48, 80, 96, 141, 192, 288)
_HOST_GIB = tuple(2**i for i in range(4, 15))
MOST_DEVICES = 64
_PROPOSED = Provenance(origin="assumed", source="a size that is sold")


def most_devices(hardware: HardwareProfile) -> int:
    """Return the most devices that are proposed instead of fewer."""
    return MOST_DEVICES if hardware.inter_node else hardware.devices_per_node


def larger_devices(hardware: HardwareProfile) -> Iterator[tuple[str, HardwareProfile]]:
    """Yield machines with more memory on each device, the smallest first, with words for the change."""
    return _larger(hardware, "device.memory_bytes", {f"devices with {size} GB": size * 1e9 for size in _DEVICE_GB})


def larger_hosts(hardware: HardwareProfile) -> Iterator[tuple[str, HardwareProfile]]:
    """Yield machines with more host memory, the smallest first; none if there is one memory, the device's."""
    sizes = {f"hosts with {size} GiB": float(size * 2**30) for size in _HOST_GIB if not hardware.one_memory}
    return _larger(hardware, "host.memory_bytes", sizes)


def _larger(hardware: HardwareProfile, path: str, sizes: dict[str, float]) -> Iterator[tuple[str, HardwareProfile]]:
    has = number(quantities(hardware)[path])
    for words, size in sizes.items():
        if size > has:
            yield words, replace(hardware, {path: size}, _PROPOSED)
