"""Kernels that touch what the executor's touch, and what a calibration with them found."""

import dataclasses
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from hwprofiles.profile import HardwareProfile, NarrowUpdate
from ullage.calibrate import Pair, kernels


def cpu_adamw(state: tuple[Any, ...], num_threads: int) -> None:
    """Touches what AdamW touches."""
    master, exp_avg, exp_avg_sq, grad, weight = state
    assert num_threads >= 1
    exp_avg *= np.float32(0.9)
    exp_avg_sq *= np.float32(0.95)
    master -= exp_avg
    np.copyto(weight, grad)


HOST = [15e-6] * 5, [25e-6] * 5

HOST_TIMES = kernels.host_times  # the executor's
FAKES = {
    "cpu_adamw": cpu_adamw,
    "device_adamw": lambda *_state: None,
    "fuses_updates": lambda: True,
    "sum_of_squares": lambda bits: float(np.square(bits, dtype=np.float64).sum()),
    "host_times": lambda _device: HOST,
    "narrow_updates": lambda num_params: {name: np.zeros(num_params).sum for name in get_args(NarrowUpdate)},
}


def put_fakes(patched: pytest.MonkeyPatch) -> None:
    for name, fake in FAKES.items():
        patched.setattr(kernels, name, fake)


def silent(step: str, done: float, total: float) -> None:
    del step, done, total


@dataclasses.dataclass
class Calibrated:
    profile: HardwareProfile
    pairs: tuple[Pair, ...]
    steps: list[tuple[str, float, float]]
    scratch: Path
    threads_before: int
