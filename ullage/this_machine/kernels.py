"""The executor's kernels for calibration."""

from typing import Any

import torch

from executor.devices.backend import sum_of_squares
from executor.devices.cuda import update_on_device
from executor.optimizer import AdamWParams, WorkerTeam, adamw_step
from executor.optimizer.table import ENTRIES, Rule
from hwprofiles.calibrate import Kernels
from ullage.this_machine.probe import host_times


def kernels() -> Kernels:
    """Return the kernels of the executor."""
    params = AdamWParams()
    rule = Rule(next(entry for entry in ENTRIES if entry.torch_class is torch.optim.AdamW), params)
    teams: dict[int, WorkerTeam] = {}

    def step(master: Any, exp_avg: Any, exp_avg_sq: Any, grad: Any, weight: Any, num_threads: int) -> None:
        if num_threads not in teams:  # threads persist between steps, as in training
            teams[num_threads] = WorkerTeam(num_threads)
        adamw_step((master, exp_avg, exp_avg_sq), grad, weight, params, step=1, team=teams[num_threads])

    def device_step(master: Any, exp_avg: Any, exp_avg_sq: Any, grad: Any, weight: Any) -> None:
        state = master, exp_avg, exp_avg_sq, weight
        update_on_device(state, [grad], rule, step=1, scale=0.5)  # a scale as in clipping

    return Kernels(cpu_adamw=step, device_adamw=device_step, sum_of_squares=sum_of_squares, host_times=host_times)
