"""Our checkpoint engine in numbers. The executor imports them, so what is executed is what is simulated."""

from typing import Final

from hwprofiles.quantity import Provenance, Quantity

HASH_BYTES_PER_S: Final = Quantity(
    value=6.5e9,
    unit="bytes_per_s",
    provenance=Provenance(origin="assumed", source="xxh3 of one core, from memory, as measured on an EPYC Turin"),
)
"""Rate at which one thread computes checksums of host memory, if a profile has none."""


CHUNK_BYTES: Final = 4 << 20
"""Bytes that our engine copies, hashes and writes at a time.

Smaller writes are slower with ``O_DIRECT``. Larger writes only take more memory.
"""

NUM_THREADS: Final = 12
"""Threads of our engine that write, or read. While some hash, the others keep the drive busy."""

READING_SHARE: Final = 1 / 8
"""Largest share of the time in which our engine reads checkpoints again; see :mod:`executor.checkpoint.levels`."""

EXTRA_CHECKPOINTS: Final = 2
"""Checkpoints for which a level needs room beside those that are kept: the newest, not verified yet, and the next."""

LEAST_BUFFER_BYTES: Final = 16 * CHUNK_BYTES
"""Smallest buffer of each rank: with less, copies and writes would wait for each other."""

COPY_WEIGHT: Final = 1 / 16
"""Weight of its copies and writes where they compete with training; see [Note: Fluid sharing]."""
