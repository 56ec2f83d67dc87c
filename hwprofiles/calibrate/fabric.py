"""Probes of the links of a node's GPUs: copies between GPUs, and which GPUs share a link to the host."""

import itertools
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from hwprofiles.calibrate.backend import CudaBackend
from hwprofiles.calibrate.options import Pair
from hwprofiles.calibrate.sampling import (
    Case,
    Summary,
    median_s,
    rate,
    sample,
    sample_groups,
    seconds,
    wall_clock,
)
from hwprofiles.profile import Fabric, connected

_LARGE_BYTES = 64 * 2**20
_COPY_BYTES = 32 * 2**20
_SHARED = 1.5  # slow-down of two copies at once: about 2 if they share a link, about 1 if they do not


def probe_fabric(num_devices: int, budget_s: float) -> Fabric | None:
    """Measure copies from the first GPU to the second; return ``None`` if there is only one device.

    Training has one process per GPU, but calibration is one process that sees all GPUs. Without starting others, it can
    time copies between two neighbours, which come close to a ring collective's bus bandwidth.
    :mod:`hwprofiles.calibrate.collectives` measures the collectives themselves.
    """
    if num_devices < 2:
        return None
    source, target = (
        torch.ones(_LARGE_BYTES, dtype=torch.uint8, device=torch.device("cuda", index)) for index in range(2)
    )

    def copy(num_bytes: int) -> None:
        target[:num_bytes].copy_(source[:num_bytes])
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)

    small, large = sample(
        [Case(16, lambda: copy(16)), Case(_LARGE_BYTES, lambda: copy(_LARGE_BYTES))], wall_clock, budget_s
    )
    return Fabric(
        bytes_per_s=rate(_LARGE_BYTES, _minus(large, small.median_s), "bytes_per_s", "copy from gpu0 to gpu1"),
        latency_s=seconds(small, "small copy from gpu0 to gpu1"),
        via_host_link=not torch.cuda.can_device_access_peer(0, 1),
    )


def _minus(time: Summary, known_s: float) -> Summary:
    p10_s, centre_s, p90_s = (max(x - known_s, 1e-9) for x in time[:3])
    return Summary(p10_s, centre_s, p90_s, time.num_samples)


def probe_uplinks(num_devices: int, budget_s: float) -> tuple[tuple[tuple[int, ...], ...], tuple[Pair, ...]]:
    """Measure copies to all GPUs at once and to each pair, to find which GPUs share a link to the host.

    Returns:
        The groups of GPUs that share a link, and by how much copies to all GPUs slowed each other down.
    """
    calls = []
    for index in range(num_devices):
        with torch.cuda.device(index):
            backend = CudaBackend(quick=True)
            calls.append(backend.blocking(backend.copier("down")(_COPY_BYTES)))
    twos = list(itertools.combinations(range(num_devices), 2))
    groups = [[call] for call in calls] + [[calls[i], calls[j]] for i, j in twos] + [calls]
    found = [median_s(windows_s) for windows_s in sample_groups(groups, budget_s)]
    alone_s = np.array([times_s[0] for times_s in found[:num_devices]])
    slow_downs = {two: float(np.mean(times_s / alone_s[list(two)])) for two, times_s in zip(twos, found[num_devices:])}  # noqa: B905 - the last is of all
    what = f"copy down beside those to all {num_devices} GPUs"
    return groups_that_share(num_devices, slow_downs), (Pair(what, float(alone_s.mean()), float(found[-1].mean())),)


def groups_that_share(num_devices: int, slow_downs: dict[tuple[int, int], float]) -> tuple[tuple[int, ...], ...]:
    """Return the groups of devices that share a link, given the slow-down of each pair."""
    twos = (two for two, slow_down in slow_downs.items() if slow_down >= _SHARED)
    return tuple(tuple(group) for group in connected(range(num_devices), twos) if len(group) > 1)


def joined(kind: str, num_devices: int, uplinks: Iterable[Sequence[int]]) -> tuple[tuple[str, str], ...]:
    """Return the pairs of a topology: each device joined to DRAM, through a switch if several share a link."""
    switch = {device: f"switch{number}" for number, group in enumerate(uplinks) for device in group}
    pairs = [(f"{kind}{i}", switch.get(i, "dram")) for i in range(num_devices)]
    return (*pairs, *((name, "dram") for name in dict.fromkeys(switch.values())))
