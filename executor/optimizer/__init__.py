"""The optimizer step on the host: one pass over memory, on a team of threads, bf16 in and out."""

from executor.optimizer.adamw import BYTES_PER_PARAM, AdamWParams, adamw_step, warm_up
from executor.optimizer.workers import WorkerTeam

__all__ = ["BYTES_PER_PARAM", "AdamWParams", "WorkerTeam", "adamw_step", "warm_up"]
