"""The executor's kernels for calibration."""

import itertools
from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import torch

from executor.devices.backend import as_array, sum_of_squares
from executor.devices.cuda import fused, update_on_device
from executor.memory.pieces import state_buffers
from executor.optimizer.adamw import AdamWParams, adamw_step
from executor.optimizer.split import SplitMaster
from executor.optimizer.table import ENTRIES, Rule
from executor.optimizer.workers import WorkerTeam
from hwprofiles.calibrate import Kernels
from hwprofiles.profile import NarrowUpdate
from ullage.this_machine.probe import host_times


def kernels() -> Kernels:
    """Return the kernels of the executor."""
    params = AdamWParams()
    entry = next(entry for entry in ENTRIES if entry.torch_class is torch.optim.AdamW)
    rule = Rule(entry, params, scale=0.5)  # as in clipping
    teams: dict[int, WorkerTeam] = {}

    def step(master: Any, exp_avg: Any, exp_avg_sq: Any, grad: Any, weight: Any, num_threads: int) -> None:
        if num_threads not in teams:  # threads persist between steps, as in training
            teams[num_threads] = WorkerTeam(num_threads)
        adamw_step((master, exp_avg, exp_avg_sq), grad, weight, params, step=1, team=teams[num_threads])

    def device_step(master: Any, exp_avg: Any, exp_avg_sq: Any, grad: Any, weight: Any) -> None:
        state = master, exp_avg, exp_avg_sq, weight
        update_on_device(state, [grad], rule, step=1)

    return Kernels(
        cpu_adamw=step,
        device_adamw=device_step,
        fuses_updates=lambda: fused() is not None,
        sum_of_squares=sum_of_squares,
        host_times=host_times,
        narrow_updates=_narrow_updates,
    )


def _narrow_updates(num_params: int) -> dict[NarrowUpdate, Callable[[], object]]:
    """See :data:`hwprofiles.calibrate.options.NarrowUpdates`."""
    found = {name: _narrow_update(name, num_params) for name in get_args(NarrowUpdate)}
    for update in found.values():
        update()  # compiles it
    return found


def _narrow_update(name: NarrowUpdate, num_params: int) -> Callable[[], object]:
    planned, rounded, _ = name.removesuffix("-split").partition("-rounded")
    entry = next(entry for entry in ENTRIES if entry.planned_as == planned)
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(num_params, generator=generator) for _ in range(2)]
    master, gradient = (as_array(v) for v in (values[0].bfloat16() if rounded else values[0], values[1].bfloat16()))
    buffers = [as_array(torch.zeros(b.length(num_params), dtype=b.dtype)) for b in state_buffers(entry.planned_as)[1:]]
    weight = None if rounded else np.zeros(num_params, np.uint16)
    whole: Any = master
    if name.endswith("-split"):
        whole, weight = SplitMaster.of_zeros(num_params), None
        whole.copy_(values[0])
    steps = itertools.count(1)
    return lambda: entry.host([whole, *buffers], gradient, weight, AdamWParams(seed=0), next(steps))
