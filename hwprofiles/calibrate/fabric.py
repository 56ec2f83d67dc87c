"""Probes of what joins the GPUs of a node: copies between them, and which of them share a link to the host."""

import itertools
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from hwprofiles.calibrate.backend import CudaBackend
from hwprofiles.calibrate.options import Pair
from hwprofiles.calibrate.sampling import (
    Case,
    Summary,
    rate,
    sample,
    sample_groups,
    seconds,
    wall_clock,
)
from hwprofiles.profile import Fabric, connected

_LARGE_BYTES = 64 * 2**20
_COPY_BYTES = 32 * 2**20
_SHARED = 1.5  # two that share one link take twice as long each; beside another link, hardly longer


def probe_fabric(num_devices: int, budget_s: float) -> Fabric | None:
    """Measure copies from the first GPU to the second; ``None`` where there is only one device.

    One process sees all GPUs here, but training has one per GPU: copies between two neighbours are what one process
    can time without starting others, and come close to a ring collective's bus bandwidth. The collectives themselves
    are measured by :mod:`hwprofiles.calibrate.collectives`.
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
        bytes_per_s=rate(_LARGE_BYTES, _less(large, small.median_s), "bytes_per_s", "copy from gpu0 to gpu1"),
        latency_s=seconds(small, 1, "small copy from gpu0 to gpu1"),
        via_host_link=not torch.cuda.can_device_access_peer(0, 1),
    )


def _less(time: Summary, known_s: float) -> Summary:
    p10_s, median_s, p90_s = (max(x - known_s, 1e-9) for x in time[:3])
    return Summary(p10_s, median_s, p90_s, time.num_samples)


def probe_uplinks(num_devices: int, budget_s: float) -> tuple[tuple[tuple[int, ...], ...], tuple[Pair, ...]]:
    """Measure copies to all GPUs at once, and to any two: which of them share a link to the host?

    Returns:
        Groups of GPUs that do, and how all of them slowed each other down.
    """
    calls = []
    for index in range(num_devices):
        with torch.cuda.device(index):
            backend = CudaBackend(quick=True)
            calls.append(backend.blocking(backend.copier("down").call(_COPY_BYTES)))
    twos = list(itertools.combinations(range(num_devices), 2))
    groups = [[call] for call in calls] + [[calls[i], calls[j]] for i, j in twos] + [calls]
    found = [group.time_s for group in sample_groups(groups, budget_s)]
    alone_s = np.array([times_s[0] for times_s in found[:num_devices]])
    slow_downs = {two: float(np.mean(times_s / alone_s[list(two)])) for two, times_s in zip(twos, found[num_devices:])}  # noqa: B905 - the last is of all
    what = f"copy down beside those to all {num_devices} GPUs"
    return groups_that_share(num_devices, slow_downs), (Pair(what, float(alone_s.mean()), float(found[-1].mean())),)


def groups_that_share(num_devices: int, slow_downs: dict[tuple[int, int], float]) -> tuple[tuple[int, ...], ...]:
    """Return groups of devices that share a link, from by how much any two slow each other down."""
    twos = (two for two, slow_down in slow_downs.items() if slow_down >= _SHARED)
    return tuple(tuple(group) for group in connected(range(num_devices), twos) if len(group) > 1)


def joined(kind: str, num_devices: int, uplinks: Iterable[Sequence[int]]) -> tuple[tuple[str, str], ...]:
    """Return a topology's pairs: devices joined to DRAM, by way of a switch where several share a link to it."""
    switch = {device: f"switch{number}" for number, group in enumerate(uplinks) for device in group}
    pairs = [(f"{kind}{i}", switch.get(i, "dram")) for i in range(num_devices)]
    return (*pairs, *((name, "dram") for name in dict.fromkeys(switch.values())))
