"""Probes of what joins devices: copies between the GPUs of a node, and which of them share a link to the host.

Collectives are measured between ranks that ``torchrun`` has started: NCCL between GPUs, gloo between CPUs.
"""

import itertools
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import distributed

from executor.distributed.groups import all_gather_single, reduce_scatter_single
from hwprofiles.profile import Fabric, connected
from ullage.calibrate.backend import CudaBackend
from ullage.calibrate.options import Floats, Pair
from ullage.calibrate.sampling import (
    Case,
    Summary,
    median_s,
    quantity,
    rate,
    sample,
    sample_groups,
    seconds,
    team_clock,
    wall_clock,
)

_LARGE_BYTES, _SMALL_BYTES = 64 * 2**20, 4096
_COPY_BYTES = 32 * 2**20
_SHARED = 1.5  # slow-down of two copies at once: about 2 if they share a link, about 1 if they do not


def probe_fabric(num_devices: int, budget_s: float) -> Fabric | None:
    """Measure copies from the first GPU to the second; return ``None`` if there is only one device.

    Training has one process per GPU, but calibration is one process that sees all GPUs. Without starting others, it can
    time copies between two neighbours, which come close to a ring collective's bus bandwidth.
    :func:`probe_collectives` measures the collectives themselves.
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


_FEWEST, _MOST = 5, 200  # repetitions


def probe_collectives(budget_s: float) -> Fabric:
    """Measure an all-gather and a reduce-scatter of bf16 values over all ranks of ``torch.distributed``'s group.

    The rate is NCCL's bus bandwidth: the bytes of the whole tensor minus the rank's own shard, divided by the time. All
    ranks measure at the same time, and the slowest rank counts.

    Raises:
        ValueError: there is only one rank.
    """
    size = distributed.get_world_size()
    if size < 2:
        raise ValueError("collectives need at least two ranks; start them with `torchrun --nproc-per-node N`")
    device = torch.device("cuda", torch.cuda.current_device()) if distributed.get_backend() == "nccl" else None
    small, large = (_time(num_bytes, size, device, budget_s / 2) for num_bytes in (_SMALL_BYTES, _LARGE_BYTES))
    backend, latency_s = distributed.get_backend(), float(np.median(small))
    moved = (_LARGE_BYTES - _SMALL_BYTES) * (size - 1) / size
    rates = moved / np.maximum(large - latency_s, 1e-9)
    source = f"all-gather and reduce-scatter over {size} ranks ({backend})"
    sized = f"{source}, {_LARGE_BYTES >> 20} MiB"
    return Fabric(
        bytes_per_s=quantity(float(np.median(rates)), "bytes_per_s", sized, len(rates), rates),
        latency_s=quantity(latency_s, "s", f"{source}, {_SMALL_BYTES} bytes", len(small), small),
        via_host_link=device is not None and not _all_peers(),
    )


def _all_peers() -> bool:
    count = torch.cuda.device_count()
    return all(torch.cuda.can_device_access_peer(i, j) for i, j in itertools.permutations(range(count), 2))


def _time(num_bytes: int, size: int, device: torch.device | None, budget_s: float) -> Floats:
    """Return the seconds of each repetition on the slowest rank: the mean of both collectives."""
    count = num_bytes // 2 // size
    own = torch.ones(count, dtype=torch.bfloat16, device=device)
    whole = torch.ones(count * size, dtype=torch.bfloat16, device=device)

    def both() -> float:
        distributed.barrier()

        def call() -> None:
            all_gather_single(whole, own)
            reduce_scatter_single(own, whole)
            if device is not None:
                torch.cuda.synchronize(device)

        return team_clock(call, 1) / 2

    for _ in range(2):
        once_s = both()  # the first call makes connections
    number = torch.tensor([np.clip(budget_s / max(2 * once_s, 1e-9), _FEWEST, _MOST)], device=device)
    distributed.all_reduce(number, distributed.ReduceOp.MIN)  # ranks with unequal counts would wait for ever
    times = torch.tensor([both() for _ in range(int(number.item()))], dtype=torch.float64, device=device)
    distributed.all_reduce(times, distributed.ReduceOp.MAX)
    return times.cpu().numpy()
