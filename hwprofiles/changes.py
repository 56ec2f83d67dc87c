"""Change a machine in ways that affect several fields of its profile."""

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Final

from hwprofiles.paths import number, quantities, replace
from hwprofiles.profile import HardwareProfile, Host
from hwprofiles.quantity import Provenance

CHANGED: Final = Provenance(origin="assumed", source="changed, to see what would be if it were so")
"""Provenance of changed values."""


def with_cores(profile: HardwareProfile, num_cores: int) -> HardwareProfile:
    """Return a machine whose host has ``num_cores`` cores, of which the same share as before runs updates.

    Raises:
        ValueError: there would be none.
    """
    host = profile.host
    _check_positive("host.num_cores", num_cores)
    updating = max(round(host.num_optimizer_cores * num_cores / host.num_cores), 1)
    return _with_host_cores(profile, max(num_cores, updating), updating)


def with_optimizer_cores(profile: HardwareProfile, num_cores: int) -> HardwareProfile:
    """Return a machine on which ``num_cores`` of the host's cores run updates.

    Raises:
        ValueError: there would be none, or more than there are.
    """
    _check_positive("host.num_optimizer_cores", num_cores)
    return _with_host_cores(profile, profile.host.num_cores, num_cores)


def _with_host_cores(profile: HardwareProfile, num_cores: int, updating: int) -> HardwareProfile:
    """Scale the rates of updates and other host passes with the cores. The rate of DRAM does not change."""
    faster = _update_rate(profile.host, updating) / _update_rate(profile.host, profile.host.num_optimizer_cores)
    has = quantities(profile)
    rates = {path: number(has[path]) * faster for path in ("host.optimizer", "host.elementwise_bytes_per_s")}
    counts = {"host.num_cores": num_cores, "host.num_optimizer_cores": updating}
    return replace(profile, rates | counts, CHANGED)


def _update_rate(host: Host, num_cores: int) -> float:
    """Return the rate of updates on ``num_cores`` cores, in an arbitrary unit.

    If the rate was measured over threads, interpolate linearly. Otherwise, and beyond the measurements, the rate is
    proportional to the cores.
    """
    measured = sorted((host.optimizer_by_threads or {}).items())
    if not measured:
        return float(num_cores)
    for (fewer, slow), (more, fast) in itertools.pairwise(measured):
        if fewer <= num_cores <= more:
            return slow.value + (fast.value - slow.value) * (num_cores - fewer) / (more - fewer)
    count, rate = measured[0] if num_cores < measured[0][0] else measured[-1]
    return rate.value * num_cores / count


def with_num_drives(profile: HardwareProfile, num_drives: int) -> HardwareProfile:
    """Return a machine whose nodes have ``num_drives`` striped drives. With 0 drives there is no NVMe tier.

    Raises:
        ValueError: the machine has no drives, or does not state how many.
    """
    if profile.nvme is None or profile.nvme.num_drives is None:
        raise ValueError(
            f"{profile.name} does not state nvme.num_drives; choose a profile that does, such as rtx4090-12ssd"
        )
    if num_drives == 0:
        return profile.model_copy(update={"nvme": None})
    _check_positive("nvme.num_drives", num_drives)
    return profile.model_copy(update={"nvme": profile.nvme.striped(num_drives)})


def with_devices_per_node(profile: HardwareProfile, num_devices: int) -> HardwareProfile:
    """Return a machine with ``num_devices`` devices in a node, each joined to the host as before.

    Raises:
        ValueError: there would be none, or more than the profile describes.
    """
    if not 1 <= num_devices <= profile.devices_per_node:
        raise ValueError(
            f"devices_per_node is {num_devices}, but {profile.name} describes nodes of {profile.devices_per_node}: "
            "give at most that, or a profile of larger nodes"
        )
    return profile.model_copy(update={"devices_per_node": num_devices})


CHANGES: Final[Mapping[str, Callable[[HardwareProfile, int], HardwareProfile]]] = {
    "host.num_cores": with_cores,
    "host.num_optimizer_cores": with_optimizer_cores,
    "nvme.num_drives": with_num_drives,
    "devices_per_node": with_devices_per_node,
}
"""Functions that change a count and the fields that depend on it, by the path of the count."""


def _check_positive(name: str, count: float) -> None:
    if count < 1 or not math.isfinite(count):
        raise ValueError(f"{name} is {count}, but must be at least 1")
