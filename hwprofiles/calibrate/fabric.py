"""Probe of what joins the GPUs of one node."""

import torch

from hwprofiles.calibrate.sampling import Case, quantity, sample, wall_clock
from hwprofiles.profile import Fabric

_LARGE_BYTES = 64 * 2**20


def probe_fabric(num_devices: int, budget_s: float) -> Fabric | None:
    """Measure copies from the first GPU to the second; ``None`` where there is only one device.

    One process sees all GPUs here, but training has one per GPU: copies between two neighbours are what one process
    can time without starting others, and come close to a ring collective's bus bandwidth.
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
    rate = _LARGE_BYTES / max(large.median_s - small.median_s, 1e-9)
    return Fabric(
        bytes_per_s=quantity(rate, "bytes_per_s", "copy from gpu0 to gpu1", large.num_samples),
        latency_s=quantity(small.median_s, "s", "small copy from gpu0 to gpu1", small.num_samples),
        via_host_link=not torch.cuda.can_device_access_peer(0, 1),
    )
