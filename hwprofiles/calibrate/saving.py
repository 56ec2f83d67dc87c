"""Probe of the host's work for checkpoints: checksums, fresh memory, and files of ``torch.save``."""

import mmap
import os

import numpy as np
import torch
import xxhash

from hwprofiles.calibrate.sampling import Call, Case, rate, sample, wall_clock
from hwprofiles.quantity import Quantity

_NUM_BYTES = 2**28  # more than caches hold
_PAGE_BYTES = 4096


def probe_saving(budget_s: float) -> dict[str, Quantity]:
    """Measure the rates of one thread over memory that is not in a cache, by field of a profile's host."""
    values = torch.arange(_NUM_BYTES // 4, dtype=torch.float32)
    data = values.numpy().data
    calls: dict[str, tuple[str, Call]] = {
        "hash_bytes_per_s": ("xxh3 (64 bits) by one thread", lambda: xxhash.xxh3_64_intdigest(data)),
        "fresh_bytes_per_s": ("first touch of new pages by one thread", _touch),
        "serialise_bytes_per_s": (
            "torch.save of one tensor to a new file in memory",
            lambda: _save({"values": values}),
        ),
    }
    rates = {}
    for field, (what, call) in calls.items():
        (found,) = sample([Case(_NUM_BYTES, call)], wall_clock, budget_s / len(calls))
        rates[field] = rate(_NUM_BYTES, found, "bytes_per_s", what)
    return rates


def _touch() -> None:
    with mmap.mmap(-1, _NUM_BYTES) as memory:
        pages = np.frombuffer(memory, np.uint8)
        pages[::_PAGE_BYTES] = 1
        del pages  # otherwise the memory cannot be given back


def _save(values: dict[str, torch.Tensor]) -> None:
    """Save into a new file in memory. Its pages are fresh memory, as in the page cache, but no drive delays them."""
    fd = os.memfd_create("checkpoint")
    try:
        torch.save(values, f"/proc/self/fd/{fd}")  # a path makes torch use its writer in C++, as engines do
    finally:
        os.close(fd)
