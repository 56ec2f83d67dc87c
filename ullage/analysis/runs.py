"""The record of an execution, ``run.json``: the executed plan and its measurements."""

import json
from pathlib import Path
from typing import Final, Literal

import numpy as np
from pydantic import Field

from hwprofiles.complaints import read_document
from hwprofiles.files import write_whole
from hwprofiles.quantity import Frozen
from planner.plan.document import Plan
from planner.schedule.tasks import MemoryClass, Tier
from planner.schedule.timeline import Timeline

MIN_MEASURED: Final = 6
"""The fewest iterations of which some count as measurements: the first ones warm up, and the last is not complete."""


class RunRecord(Frozen):
    """One execution of a plan.

    Attributes:
        plan: the executed plan.
        machine: the machine, in words.
        losses: mean loss of each iteration.
        start_s, end_s: start and end in seconds of each task of each recorded iteration (at most the first 200);
            ``None`` if the task did not run.
        steady_iterations: recorded iterations that count as measurements: complete ones after the first few. Only
            iterations with all micro-batches in the planned shape are recorded, so there may be none.
        memory: measured peak bytes by tier; for the host only what the program allocated itself.
        data_position: sequences of the data that all ranks together have passed or skipped. With the same data, seed
            and sequence length, ``--data PATH,skip=N`` continues from here.
        before: the run under the first plan, if the plan was changed during training. All other fields are then of the
            second plan, except ``losses``, which has all iterations.
        static_bytes: the part of ``memory`` that was allocated once, by class.
        device_bytes: peak bytes of device memory beyond ``static_bytes`` during each compute task, by the task's index,
            in one metered iteration; empty if they were not recorded.
        allocator: counts of PyTorch's allocator for the GPU since that iteration: the names of
            ``torch.cuda.memory_stats``; empty without a GPU.
        checkpoint_bytes: host memory for checkpoints. If it is not 0, tasks that copy state for them are recorded too.
        num_left: number of iterations that left the plan. They are not recorded.
        num_unexpected: number of iterations that used gradients otherwise than ``speculate`` expected, as when they
            clipped. They are not recorded, nor is the one after each.
        attention: the fused kernels that computed attention, such as ``cudnn`` or ``flash``; empty if none did.
    """

    schema_version: Literal[1] = 1
    plan: Plan
    machine: str
    losses: tuple[float, ...]
    start_s: tuple[tuple[float | None, ...], ...]
    end_s: tuple[tuple[float | None, ...], ...]
    steady_iterations: tuple[int, ...]
    memory: dict[Tier, int]
    data_position: int
    before: "RunRecord | None" = None
    static_bytes: dict[Tier, dict[MemoryClass, int]] = Field(default_factory=dict)
    device_bytes: dict[int, int] = Field(default_factory=dict)
    allocator: dict[str, int] = Field(default_factory=dict)
    checkpoint_bytes: int = 0
    num_left: int = 0
    num_unexpected: int = 0
    attention: tuple[str, ...] = ()

    @property
    def timeline(self) -> Timeline:
        """The measured timeline."""
        schedule = self.plan.schedule(takes_snapshots=self.checkpoint_bytes > 0)
        shape = len(self.start_s), schedule.num_tasks  # start_s is empty if no iteration had the planned shape
        start_s, end_s = (np.array(rows, np.float64).reshape(shape) for rows in (self.start_s, self.end_s))
        return Timeline(schedule, start_s, end_s)


def check_measured(run: RunRecord) -> None:
    """Check that a run has iterations to compare with the prediction.

    Raises:
        ValueError: there are too few iterations, or none had the planned shape.
    """
    if not run.steady_iterations and len(run.losses) < MIN_MEASURED:
        raise ValueError(
            f"the run has {len(run.losses)} iterations, which are too few to compare, as the first ones warm up; train "
            f"at least {MIN_MEASURED} in one run"
        )
    if not run.steady_iterations:
        raise ValueError(
            f"none of the run's {len(run.losses)} iterations can be compared: after the first ones, no batch had the "
            "planned shape, a micro-batch was missing, or a plan with speculate clipped too often; give batches of the "
            "planned shape, or plan without speculate"
        )


def rows(seconds: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> tuple[tuple[float | None, ...], ...]:
    """Return times for a run file: rounded to nanoseconds, with ``None`` for NaN."""
    return tuple(tuple(None if np.isnan(x) else round(float(x), 9) for x in row) for row in seconds)


def save_run(run: RunRecord, path: Path) -> None:
    """Write a run file whole or not at all.

    Raises:
        OSError: the file cannot be written.
    """
    write_whole(path, json.dumps(run.model_dump(mode="json"), separators=(",", ":"), allow_nan=False) + "\n")


def load_run(path: Path) -> RunRecord:
    """Read and check a run file.

    Raises:
        ValueError: the file is missing, is not a run, or has another schema version.
    """
    remedy, again = "give the run.json that `ullage execute` writes of a plan", "execute the plan again"
    return read_document(RunRecord, path, "run", remedy, again)
