"""Kernels that touch what the executor's touch, and what a calibration with them found."""

import dataclasses
from pathlib import Path
from typing import Any, get_args

import numpy as np

from hwprofiles.calibrate import Kernels, Pair
from hwprofiles.profile import HardwareProfile, NarrowUpdate


def cpu_adamw(master: Any, exp_avg: Any, exp_avg_sq: Any, grad: Any, weight: Any, num_threads: int) -> None:
    """Touches what AdamW touches."""
    assert num_threads >= 1
    exp_avg *= np.float32(0.9)
    exp_avg_sq *= np.float32(0.95)
    master -= exp_avg
    np.copyto(weight, grad)


HOST = [15e-6] * 5, [25e-6] * 5

KERNELS = Kernels(
    cpu_adamw=cpu_adamw,
    device_adamw=lambda *_state: None,
    fuses_updates=lambda: True,
    sum_of_squares=lambda bits: float(np.square(bits, dtype=np.float64).sum()),
    host_times=lambda _device: HOST,
    narrow_updates=lambda num_params: {name: np.zeros(num_params).sum for name in get_args(NarrowUpdate)},
)


def silent(step: str, done: float, total: float) -> None:
    del step, done, total


@dataclasses.dataclass
class Calibrated:
    profile: HardwareProfile
    pairs: tuple[Pair, ...]
    steps: list[tuple[str, float, float]]
    scratch: Path
    threads_before: int
