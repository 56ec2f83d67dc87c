"""What benchmarks of checkpoints share: our training, and ``torch.save`` that is durable."""

import os
from pathlib import Path
from typing import Any

import torch

import ullage
from benchmarks.peers.jobs import Cell, Job, model_config
from benchmarks.peers.training import adamw_options, loss_of, make_model, micro_batches
from hwprofiles.machine import keep_freed_memory
from hwprofiles.profile import HardwareProfile
from planner.decisions import Precision

BUFFER_BYTES = 64 << 20


class Training:
    """Our training, an iteration at a time."""

    def __init__(self, plan: ullage.Plan, job: Job) -> None:
        torch.set_num_threads(job.num_threads)
        if job.device == "cpu":
            keep_freed_memory()
        self._model = make_model(job.cell, job.device, home="cpu")
        optimizer = torch.optim.AdamW(self._model.parameters(), **adamw_options(job))
        self._model, self.optimizer = ullage.prepare(self._model, optimizer, plan, checkpoint_buffer_bytes=BUFFER_BYTES)
        torch.set_num_threads(job.num_threads)
        self._batches = micro_batches(job)
        self.step = 0

    def state(self) -> dict[str, torch.Tensor]:
        """Return copies of all optimizer state, and of the master copies, by what they are of."""
        entries = self.optimizer.state_dict()["state"].items()
        return {f"{number}.{key}": value.clone() for number, entry in entries for key, value in entry.items()}

    def iterate(self) -> None:
        """Train one iteration."""
        batch = next(self._batches)
        for tokens in batch:
            (loss_of(self._model, tokens) / len(batch)).backward()  # type: ignore[no-untyped-call]
        self.optimizer.clip_grad_norm_(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1


def plan_for(cell: Cell, profile: HardwareProfile) -> ullage.Plan:
    """Plan what is trained."""
    profile = profile.with_device_memory(int(cell.device_memory_bytes or 0))
    return ullage.plan(
        ullage.Request(
            model_config(cell.model),
            profile,
            seq_len=cell.seq_len,
            micro_batch=cell.micro_batch,
            num_micro_batches=cell.num_micro_batches,
            precision=Precision(weights=cell.dtype),
        )
    )


def torch_save(state: dict[str, Any], path: Path) -> None:
    """Save all tensors into one new file, and return when it is durable."""
    with path.open("xb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
