"""Probes of the device: products, attention, elementwise kernels, optimizer, memory."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch.nn import functional

from hwprofiles.calibrate.backend import POOL_BYTES, Backend
from hwprofiles.calibrate.options import CpuAdamW
from hwprofiles.calibrate.sampling import Call, Case, Summary, build_curve, quantity, sample, summarize
from hwprofiles.profile import Dtype
from hwprofiles.quantity import Curve, Quantity

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_HEAD_DIM, _NUM_HEADS = 64, 8


@dataclasses.dataclass(frozen=True)
class ComputeProbe:
    """Probes that share a backend and random operands.

    Operands that training finds in memory (weights, saved activations) rotate through a pool larger than any cache;
    those just produced by the previous operator are reused, as they would be.
    """

    backend: Backend
    pool: torch.Tensor
    quick: bool

    @classmethod
    def create(cls, backend: Backend, seed: int, *, quick: bool) -> "ComputeProbe":
        """Fill the pool with small random numbers."""
        generator = torch.Generator().manual_seed(seed)
        pool = torch.empty(POOL_BYTES // 4).uniform_(-0.1, 0.1, generator=generator)
        return cls(backend, pool.to(backend.device), quick)

    def _views(self, rows: int, columns: int, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        flat = self.pool.to(dtype)
        size = rows * columns
        views = [flat[i : i + size].view(rows, columns) for i in range(0, len(flat) - size + 1, size)]
        return itertools.cycle(views)
