"""Training that outlives its processes: a plan for those that are there, and what each loss of some has cost.

``torchrun`` starts all processes again when one has failed, or when nodes have come or gone
(``--nnodes 1:4 --max-restarts 100``). Each time, training goes on from the newest whole checkpoint, under a plan for
the ranks that are there then. An iteration reads the same sequences under every one of these plans, so a step number
means the same state, and the loss curve goes on. Where the sequences cannot be divided equally, some ranks compute
their last micro-batch for nothing, with a weight of zero. Stages of a pipeline become more or fewer, or none.

Plans and a line for each iteration are kept beside the checkpoints, on the slowest level that is a folder.
"""

import contextlib
import dataclasses
import itertools
import json
import math
import os
import queue
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, final

from executor.checkpoint.files.system_calls import CheckpointError
from executor.checkpoint.levels import Level
from executor.checkpoint.places.locating import is_remote
from hwprofiles.files import write_whole
from planner.choices.request import Request
from planner.models.captured import CapturedModel
from planner.models.config import ModelConfigError
from planner.plan.document import Plan, PlanError, load_plan
from planner.plan.planning import InfeasibleError, make_plan
from ullage.analysis.simulation import chosen_request
from ullage.output.formatting import si
from ullage.this_machine.planning import made_by_rank_0
from ullage.training.loop import Step

_PROGRESS: Final = "iterations.jsonl"
_END_S: Final = 10.0  # longest wait for its last line


def shared_folder(levels: Sequence[Level]) -> Path:
    """Return the folder for what is kept beside the checkpoints: the place of the slowest level that is a folder.

    Raises:
        CheckpointError: several nodes have no folder in common, because the last level is a URL.
    """
    if is_remote(levels[-1].place) and int(os.environ.get("GROUP_WORLD_SIZE") or 1) > 1:
        raise CheckpointError(
            f"{levels[-1].place} is the only level that nodes share, but an elastic run keeps its record in a folder; "
            "give a folder that all nodes share as one more --checkpoint-dir, behind the URL"
        )
    return next(Path(level.place) for level in reversed(levels) if not is_remote(level.place))


def planned_for(plan: Plan, num_ranks: int, folder: Path) -> Plan:
    """Return a plan for the ranks that are there, which reads as many sequences an iteration as the given one.

    All ranks call it together. Rank 0 plans, unless the folder has such a plan from an earlier start.

    Raises:
        PlanError: the ranks that are there cannot share layers as planned.
        InfeasibleError: no plan fits in their memory.
    """
    if num_ranks == plan.decisions.num_devices:
        return plan
    tensor = plan.decisions.tensor_parallel
    if num_ranks % tensor:
        raise PlanError(
            f"the plan shares layers over {tensor} ranks, but {num_ranks} are there; let nodes have a multiple of "
            f"{tensor} ranks"
        )
    path = folder / f"plan-{plan.digest()[:12]}-{num_ranks}.json"

    def make() -> Plan:
        with contextlib.suppress(OSError, PlanError):  # there is none, or one of an earlier version
            return load_plan(path)
        found = _fastest(plan, num_ranks)
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, found.to_json())
        return found

    return made_by_rank_0(make)


def _fastest(plan: Plan, num_ranks: int) -> Plan:
    plans, error = [], None
    for request in _requests(plan, num_ranks):
        try:
            plans.append(make_plan(request))
        except (InfeasibleError, ModelConfigError) as refused:  # the latter: more stages than layers
            error = error or refused
    if error is not None and not plans:
        raise error
    return min(plans, key=lambda found: found.prediction.iteration_s)


def _requests(plan: Plan, num_ranks: int) -> Iterator[Request]:
    """Yield the plan's request for other ranks, divided and cut into micro-batches in all ways that may be the fastest.

    Stages of a pipeline may be more or fewer, or none.
    """
    chosen, decided = chosen_request(plan), plan.decisions
    groups = num_ranks // decided.tensor_parallel
    for stages in range(1, groups + 1 if decided.pipeline_parallel > 1 else 2):
        data, rest = divmod(groups, stages)
        if rest:
            continue
        experts, sharing = (math.gcd(n, data) for n in (decided.expert_parallel, decided.context_parallel))
        for micro_batch, count in _cuts(plan, data // sharing, stages):
            yield dataclasses.replace(
                chosen,
                num_devices=num_ranks,
                micro_batch=micro_batch,
                num_micro_batches=count,
                pipeline_parallel=stages,
                pipeline_rounds=decided.pipeline_rounds if stages > 1 else 1,
                pipeline_order=plan.constraints.pipeline_order if stages > 1 else None,
                expert_parallel=experts,
                context_parallel=sharing,
                context_exchange=plan.constraints.context_exchange if sharing > 1 else None,
                expert_units=chosen.expert_units if experts == decided.expert_parallel else None,
                collectives=plan.constraints.collectives,
                storage=plan.constraints.storage,
            )


def _cuts(plan: Plan, readers: int, stages: int) -> Iterator[tuple[int, int]]:
    """Yield sizes and numbers of micro-batches in which so many readers read the plan's sequences."""
    sequences, most = plan.decisions.num_sequences, plan.decisions.micro_batch
    sizes = range(most, 0, -1) if not isinstance(plan.model, CapturedModel) else (most,)
    if stages > 1:  # each reader has as many; the largest size with which no stage is always idle
        each, rest = divmod(sequences, readers)
        whole = [size for size in sizes if not rest and each % size == 0]
        busy = [size for size in whole if each // size >= stages]
        yield from ((size, each // size) for size in busy[:1] or whole[-1:])
        return
    least = math.inf
    for micro_batch in sizes:
        count, rest = -(-sequences // (micro_batch * readers)), sequences % micro_batch
        if rest or count * micro_batch >= least:  # smaller micro-batches are worth it only if ranks compute less
            continue
        least = count * micro_batch
        yield micro_batch, count


class Start(NamedTuple):
    """How training went on after processes were lost or have come.

    Attributes:
        iteration: iterations in the checkpoint that training went on from.
        ranks: ranks from then on.
        lost_iterations: iterations that had ended, and are computed again.
        down_s: seconds without training, from the end of the last iteration to the beginning of the next.
        predicted_down_s: what the plan predicts for a failure, if it has checkpoints (``ullage plan --mtbf``).
    """

    iteration: int
    ranks: int
    lost_iterations: int
    down_s: float
    predicted_down_s: float | None = None

    def __str__(self) -> str:
        predicted = "" if self.predicted_down_s is None else f" ({si(self.predicted_down_s, 's')} predicted)"
        return (
            f"goes on with {self.ranks} rank{'s' * (self.ranks != 1)} after {si(self.down_s, 's')}{predicted}; "
            f"{self.lost_iterations} iteration{'s' * (self.lost_iterations != 1)} to compute again"
        )


def in_words(starts: Sequence[Start]) -> str:
    """Return what all losses of processes have cost, in a line."""
    lost, down_s = sum(start.lost_iterations for start in starts), sum(start.down_s for start in starts)
    times = f"{len(starts)} time{'s' * (len(starts) != 1)}"
    return f"went on {times} with other processes: {si(down_s, 's')} without training, {lost} iterations computed again"


@final
class IterationLog:
    """The iterations of a run over all its starts, in a file of one line each.

    Each line has ``iteration``, ``loss``, ``begin_s`` and ``end_s`` (since the epoch), ``ranks`` and ``position``, the
    number of sequences that were read until then.

    Args:
        folder: see :func:`shared_folder`.
        plan: the plan that the run began with, which may predict what failures cost.
        ranks: ranks of this start.
        num_iterations: iterations in all. A start after the last one is no loss.

    Lines are written by another thread, as a file system that does not answer must not stop training.

    Attributes:
        starts: how training went on, each time but the first.
    """

    def __init__(self, folder: Path, plan: Plan, ranks: int, num_iterations: int) -> None:
        self._path, self._plan, self._ranks, self._is_new = folder / _PROGRESS, plan, ranks, True
        self._num_iterations = num_iterations
        self._before = list(read_progress(self._path))
        self.starts = list(starts_of(self._before))
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="progress", daemon=True)
        self._thread.start()

    def add(self, step: Step, position: int) -> Start | None:
        """Add an iteration that has ended. Return how training went on if it is the first of this start."""
        end_s = time.time()
        line = {
            "iteration": step.iteration,
            "loss": step.loss,
            "begin_s": end_s - step.measured_s,
            "end_s": end_s,
            "ranks": self._ranks,
            "position": position,
        }
        if step.iteration + 1 == self._num_iterations:
            line["last"] = True
        start = None
        if self._is_new:
            line["start"] = True
            start = next(starts_of([*self._before[-1:], line]), None)
            if start is not None:
                checkpoints = self._plan.checkpoints
                planned = None if checkpoints is None else checkpoints.levels[0].restart_s
                start = start._replace(predicted_down_s=planned)
                self.starts.append(start)
        self._is_new = False
        self._lines.put(json.dumps(line))
        return start

    def close(self, patience_s: float = _END_S) -> None:
        """Wait until all lines are written, for at most so long. Closing twice is allowed."""
        self._lines.put(None)
        self._thread.join(patience_s)

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            # A process that was killed, or a full drive, may have left a part of a line; and neither ends training.
            with contextlib.suppress(OSError), self._path.open("a", encoding="utf-8") as file:
                file.write(f"\n{line}")


def read_progress(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the lines of a file of :class:`IterationLog`, without those that were not written whole."""
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and "end_s" in line:
            yield line


def starts_of(lines: Sequence[Mapping[str, Any]]) -> Iterator[Start]:
    """Yield how a run went on, from the lines of :class:`IterationLog`."""
    for before, line in itertools.pairwise(lines):
        if line.get("start") and not before.get("last"):
            lost = before["iteration"] + 1 - line["iteration"]
            yield Start(line["iteration"], line["ranks"], lost, line["begin_s"] - before["end_s"])
