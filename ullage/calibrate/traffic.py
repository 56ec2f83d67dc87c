"""Probes of the host side: copies, CPU AdamW, and how they slow each other down.

In the simulator, running tasks share DRAM. If the sum of their demands (bytes per second
when alone) exceeds ``dram_bytes_per_s``, all of them slow down by demand / capacity. So if a group of activities slows
down by s when they run together, capacity = demand / s. If a group does not slow down, the capacity is at least its
demand. The result is the candidate with the least squared error of log slow-down over all groups. A group never has
more threads than there are cores, because waiting for a core is not contention for DRAM. Copies
by copy engines share a link, which slows them down too. So where several of them run, what they take without others
stands for what each takes alone.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np
import torch

from hwprofiles.profile import Link, NarrowUpdate
from hwprofiles.quantity import Curve, Quantity
from ullage.calibrate import kernels
from ullage.calibrate.backend import Backend, Copier, Direction, adamw_cases
from ullage.calibrate.disk import Disk
from ullage.calibrate.options import Array, Pair
from ullage.calibrate.sampling import (
    NUM_WINDOWS,
    Call,
    Case,
    Summary,
    build_curve,
    clock_of,
    median_s,
    quantity,
    rate,
    sample,
    sample_groups,
    seconds,
    team_clock,
    wall_clock,
)

ADAMW_BYTES_PER_PARAM = 28  # reads and writes of fp32 master, m, v (24), bf16 gradient in (2), bf16 weight out (2)
NOTICEABLE = 1.05  # a smaller slow-down is noise
_THREADS_PARAMS = 2**23
_GOOD_ENOUGH = 0.97  # fraction of the best rate; what more threads add beyond it is noise
_NARROW_PARAMS = 2**21  # more than caches hold
_DISK_BYTES = 8 * 2**20
_POOL_PARAMS, _MOST_POOL_PARAMS = 2**24, 2**27
_BYTES_OF_STATE = 16  # per parameter: what an update reads, and the new weight


@dataclasses.dataclass(frozen=True)
class Activity:
    """Something that runs beside others.

    Attributes:
        name: in words.
        call: one repetition, blocking.
        dram_bytes: host memory traffic of one repetition, or 0 if it is not known.
        num_cores: CPU cores it occupies.
    """

    name: str
    call: Call
    dram_bytes: float
    num_cores: int


def pool_params(cache_bytes: int) -> int:
    """Return so many parameters that their AdamW state is four times as large as the caches, within limits."""
    wanted = 4 * cache_bytes // _BYTES_OF_STATE
    return min(max(1 << wanted.bit_length(), _POOL_PARAMS), _MOST_POOL_PARAMS)


def optimizer_by_threads(
    state: tuple[Array, ...], num_cores: int, spare_cores: int, budget_s: float
) -> dict[int, Quantity]:
    """Measure one large CPU AdamW with 1, 2, 4, ... threads, on all cores, and on those that training leaves to it."""
    counts = sorted({*(2**i for i in range(num_cores.bit_length())), spare_cores, num_cores})
    cases = [adamw_cases((_THREADS_PARAMS,), state, count)[0] for count in counts]
    found = sample(cases, team_clock, budget_s)
    return {
        count: rate(_THREADS_PARAMS, time, "params_per_s", f"CPU AdamW, {count} threads")
        for count, time in zip(counts, found, strict=False)
    }


def narrow_update_s(budget_s: float) -> dict[NarrowUpdate, Quantity]:
    """Measure the time of one thread per parameter of each update with state in fewer bytes."""
    calls = kernels.narrow_updates(_NARROW_PARAMS)
    found = {
        name: sample([Case(_NARROW_PARAMS, call, 1 / _NARROW_PARAMS)], wall_clock, budget_s / len(calls))[0]
        for name, call in calls.items()
    }
    return {name: seconds(one, f"{name} by one thread") for name, one in found.items()}


def fewest_threads(rates: dict[int, Quantity], at_most: int) -> int:
    """Return the smallest number of threads that is as fast as more. The remaining cores launch kernels and copy."""
    allowed = {count: rate.value for count, rate in rates.items() if count <= at_most} or {at_most: 0.0}
    return min(count for count, rate in allowed.items() if rate >= _GOOD_ENOUGH * max(allowed.values()))


@dataclasses.dataclass(frozen=True)
class TrafficProbe:
    """Probes that share a backend, the state of the CPU's AdamW, and its number of threads."""

    backend: Backend
    state: tuple[Array, ...]
    num_optimizer_cores: int
    num_cores: int

    def link(self, budget_s: float) -> Link:
        """Measure pinned copies in each direction and in both at once, and pageable copies."""
        sizes = [2.0**i for i in range(16, 29, 2) if 2**i <= self.backend.copy_pool_bytes]
        copiers = {"down": self.backend.copier("down"), "up": self.backend.copier("up")}
        cases = {k: [Case(size, copier(int(size))) for size in sizes] for k, copier in copiers.items()}
        curves = {
            name: build_curve("bytes", sizes, self.backend.sample(cases[name], budget_s / 4), f"pinned copy, {name}")
            for name in cases
        }
        largest = int(min(sizes[-1], self.backend.pair_bytes))
        calls = [self._copies(copier, largest) for copier in copiers.values()]
        (windows_s,) = sample_groups([calls], budget_s / 4)
        alone = sum(curve.best_rate_per_s() for curve in curves.values())
        both = np.minimum(np.sum(self.backend.pair_copies * largest / windows_s, axis=1), alone)
        unpinned = [
            Case(largest, self.backend.copier(direction, pinned=False)(largest)) for direction in ("up", "down")
        ]
        pageable_up, pageable_down = self.backend.sample(unpinned, budget_s / 4)
        return Link(
            down=curves["down"],
            up=curves["up"],
            both_bytes_per_s=quantity(
                float(np.median(both)), "bytes_per_s", "copies both ways at once, sum", len(both), both
            ),
            pageable_bytes_per_s=rate(largest, pageable_up, "bytes_per_s", "copy to pageable memory"),
            pageable_down_bytes_per_s=rate(largest, pageable_down, "bytes_per_s", "copy from pageable memory"),
            num_cores_per_copy=quantity(self.backend.cores_per_copy, "count", "how copies were made", 1),
        )

    def _copies(self, copier: Copier, num_bytes: int) -> Call:
        """Return a blocking call of several copies at once, so that waiting for them is a small part of its time."""
        copy = copier(num_bytes)

        def copies() -> None:
            for _ in range(self.backend.pair_copies):
                copy()

        return self.backend.blocking(copies)

    def optimizer(self, budget_s: float) -> Curve:
        """Measure the CPU AdamW with ``num_optimizer_cores`` threads."""
        cases = adamw_cases(self.backend.optimizer_sizes, self.state, self.num_optimizer_cores)
        found = sample(cases, clock_of(self.num_optimizer_cores), budget_s, self.backend.of_host)
        source = f"CPU AdamW on {self.num_optimizer_cores} cores"
        return build_curve("params", [c.size for c in cases], found, source)

    def elementwise_bytes_per_s(self, budget_s: float) -> Quantity:
        """Measure host passes, the mean of a cast from bf16 and a scaling in place, with the optimizer's cores."""
        num_elements = max(1 << 25, 2 * len(self.state[0]))  # far more than caches hold
        half = torch.ones(num_elements, dtype=torch.bfloat16)
        single = torch.ones(num_elements)
        num_threads = torch.get_num_threads()
        try:
            torch.set_num_threads(self.num_optimizer_cores)
            passes = [Case(6.0 * num_elements, lambda: single.copy_(half)), Case(8.0 * num_elements, single.neg_)]
            found = sample(passes, clock_of(self.num_optimizer_cores), budget_s, self.backend.of_host)
        finally:
            torch.set_num_threads(num_threads)
        p10_s, median_s, p90_s = (sum(times) for times in zip(*(s[:3] for s in found), strict=True))
        time = Summary(p10_s, median_s, p90_s, sum(s.num_samples for s in found))
        source = f"cast from bf16 and sign change in place on {self.num_optimizer_cores} cores"
        return rate(sum(c.size for c in passes), time, "bytes_per_s", source)

    def contention(self, gemm: Call, disk: Disk | None, budget_s: float) -> tuple[Quantity, tuple[Pair, ...]]:
        """Measure activities beside each other, including the disk if given; see the module."""
        groups = self._groups(gemm, disk)
        alone = [(activity,) for activity in dict.fromkeys(itertools.chain(*groups))]
        found = sample_groups([[a.call for a in group] for group in (*alone, *groups)], budget_s)
        times_s = [median_s(windows_s) for windows_s in found]
        alone_s = {activity: float(t[0]) for (activity,), t in zip(alone, times_s, strict=False)}
        paired_s = times_s[len(alone) :]
        of_group = dict(zip(groups, paired_s, strict=True))
        demands, slow_downs = [], []
        for group, times in of_group.items():
            on_link = tuple(a for a in group if a.dram_bytes and not a.num_cores)
            apart_s = alone_s | dict(zip(on_link, of_group.get(on_link, ()), strict=False))
            demands.append(sum(a.dram_bytes / apart_s[a] for a in group))
            slow_downs.append(math.exp(np.mean([math.log(t / apart_s[a]) for a, t in zip(group, times, strict=True)])))
        known = [all(a.dram_bytes for a in group) for group in groups]
        capacity = fit_capacity(list(itertools.compress(demands, known)), list(itertools.compress(slow_downs, known)))
        pairs = [
            Pair(
                " beside ".join([activity.name, *(a.name for a in group if a is not activity)]),
                alone_s[activity],
                float(time_s),
                max(demand / capacity, 1.0) if is_known else None,
            )
            for group, times, demand, is_known in zip(groups, paired_s, demands, known, strict=True)
            for activity, time_s in zip(group, times, strict=True)
        ]
        if max(itertools.compress(slow_downs, known)) < NOTICEABLE:
            source = "CPU AdamW and copies together, which did not slow down: a lower bound"
        else:
            source = "CPU AdamW and copies, alone and together: the capacity that best explains how they slow down"
        seen = [demand / slow for demand, slow, is_known in zip(demands, slow_downs, known, strict=True) if is_known]
        return quantity(capacity, "bytes_per_s", source, NUM_WINDOWS * sum(known), seen), tuple(pairs)

    def _groups(self, gemm: Call, disk: Disk | None) -> list[tuple[Activity, ...]]:
        backend, cores = self.backend, self.num_optimizer_cores
        num_bytes = min(backend.pair_bytes, backend.copy_pool_bytes)
        num_params = len(self.state[0]) // 4  # as large as caches, so that starting threads takes no time of it
        update = adamw_cases((num_params,), self.state, cores)[0].call
        adamw = Activity("CPU AdamW", update, ADAMW_BYTES_PER_PARAM * num_params, cores)
        directions: tuple[Direction, ...] = ("down", "up", "down")
        down, up, other_down = (
            Activity(
                f"copy {direction}",
                self._copies(backend.copier(direction), num_bytes),
                backend.dram_bytes_per_copied_byte * backend.pair_copies * num_bytes,
                backend.cores_per_copy,
            )
            for direction in directions
        )
        product = Activity("GEMM", backend.blocking(gemm), 0.0, backend.num_cores)
        groups = [(adamw,), (down, adamw), (down, up), (down, up, adamw), (product, adamw), (product, down)]
        if not backend.cores_per_copy:
            groups += [(down, other_down), (product, down, up)]
        if disk is not None:
            read, write = (Activity(f"disk {name}", call, 0.0, 0) for name, call in disk.requests(_DISK_BYTES).items())
            groups += [(read, write), (write, adamw), (read, adamw), (write, down), (product, write)]
        return [group for group in groups if sum(a.num_cores for a in group) <= self.num_cores or len(group) == 1]


def fit_capacity(demands: Sequence[float], slow_downs: Sequence[float]) -> float:
    """Return the capacity that best explains the slow-downs of groups; see the module.

    Args:
        demands: bytes per second of each group: the sum over its activities when they run alone.
        slow_downs: slow-down of each group when its activities run together (1: none).
    """
    demand, slow_down = np.asarray(demands), np.asarray(slow_downs)
    slow_down = np.where(slow_down < NOTICEABLE, 1.0, slow_down)
    candidates = demand / slow_down
    predicted = np.maximum(demand / candidates[:, None], 1.0)
    errors = np.sum(np.log(predicted / slow_down) ** 2, axis=1)
    # Of equally good candidates take the largest: the capacity cannot be below a rate that was measured.
    best = candidates[errors <= errors.min() + 1e-6]
    return float(best.max())
