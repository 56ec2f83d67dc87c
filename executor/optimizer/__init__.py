"""The optimizer step on the host: one pass over memory, on a team of threads, bf16 in and out.

Kernels work without torch. :mod:`executor.optimizer.table` joins them to optimizers.
"""

from executor.optimizer.adamw import BYTES_PER_PARAM, AdamWParams, adamw_step
from executor.optimizer.lion import LionParams, lion_step
from executor.optimizer.sgd import AdagradParams, SgdParams, adagrad_step, sgd_step
from executor.optimizer.workers import WorkerTeam

__all__ = [
    "BYTES_PER_PARAM",
    "AdagradParams",
    "AdamWParams",
    "LionParams",
    "SgdParams",
    "WorkerTeam",
    "adagrad_step",
    "adamw_step",
    "lion_step",
    "sgd_step",
]
