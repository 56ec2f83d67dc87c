"""Checkpoints beside training, without a GPU: what they cost, against what people use, and against the bare drive.

    python benchmarks/cpu/checkpoint.py                   about four minutes where nothing else runs
    python benchmarks/cpu/checkpoint.py --folder DIR      on another drive

One process trains one model under one plan. In each round every engine saves the same state once, in turns: a block is
a checkpoint and three iterations of training, and what a checkpoint *costs* is a block less one without. *Blocked* is
how long the call keeps the training loop. The others are given tensors that lie ready, which is more than a user has.
What is still under way at the end of a block is waited for, untimed.

- ours: ``ullage.Checkpoints``, taken during the next iteration, hashed, durable;
- torch.save: of all tensors into one file, with ``fsync``;
- dcp: ``torch.distributed.checkpoint.save``; dcp_async: its ``async_save``.

Then training goes on with a checkpoint at every iteration, in turns with none, and how much longer iterations take is
compared with what the simulator predicts.
"""

import argparse
import dataclasses
import logging
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import state_dict_saver as dcp

import ullage
from benchmarks.cpu.peers import calibrated, cells
from benchmarks.cpu.saving import BUFFER_BYTES, Training, plan_for, torch_save
from benchmarks.origin import origin, write_result
from benchmarks.peers.jobs import Job
from hwprofiles.profile import Dtype
from planner.checkpoints.trial import Trial
from planner.plan.planning import default_precision

OUTPUT = Path(__file__).parents[1] / "results" / "cpu_checkpoint.json"
ITERATIONS_OF_A_BLOCK = 3
ITERATIONS_IN_A_ROW = 6
ROUNDS_OF_SLOW_DOWN = 3  # of each: what is little takes more of them to be seen
NUM_COMPUTE_THREADS = 1
SEQ_LEN: dict[Dtype, int] = {"bf16": 256, "fp32": 64}  # iterations take about as long on processors that prefer it
Save = Callable[[Path], Callable[[], None]]
"""Begins to save into a new folder, and returns what waits for the end."""


def engines(state: dict[str, Any]) -> dict[str, Save]:
    """Return how others save a state."""

    def blocking(folder: Path) -> Callable[[], None]:
        folder.mkdir()
        torch_save(state, folder / "state.pt")
        return lambda: None

    def dcp_save(folder: Path) -> Callable[[], None]:
        dcp.save(state, checkpoint_id=str(folder), no_dist=True)
        return lambda: None

    def dcp_async(folder: Path) -> Callable[[], None]:
        future = dcp.async_save(state, checkpoint_id=str(folder), no_dist=True)
        return lambda: _wait_for(future)

    return {"torch.save": blocking, "dcp": dcp_save, "dcp_async": dcp_async}


def _wait_for(future: Any) -> None:
    future.result()


def block(training: Training, begin: Callable[[], Callable[[], None]]) -> dict[str, float]:
    """Save and train on; return the seconds that the call took, and all of it."""
    training.optimizer.session.synchronize()
    start_s = time.perf_counter()
    wait = begin()
    blocked_s = time.perf_counter() - start_s
    for _ in range(ITERATIONS_OF_A_BLOCK):
        training.iterate()
    training.optimizer.session.synchronize()
    block_s = time.perf_counter() - start_s
    wait()  # what goes on in the background must not fall into the next block
    return {"blocked_s": blocked_s, "block_s": block_s}


def slow_down(
    training: Training, checkpoints: ullage.Checkpoints, plan: ullage.Plan, num_rounds: int
) -> dict[str, Any]:
    """Return how much longer an iteration takes if each has a checkpoint: measured in turns with none, and predicted.

    The prediction is the simulator's, from rates of the machine that were measured before: nothing here was fitted.
    """

    def iteration_s(*, saves: bool) -> float:
        checkpoints.settle()
        start_s = time.perf_counter()
        for _ in range(ITERATIONS_IN_A_ROW):
            training.iterate()
            if saves:
                checkpoints.save(training.step)
        training.optimizer.session.synchronize()
        return (time.perf_counter() - start_s) / ITERATIONS_IN_A_ROW

    measured = [(iteration_s(saves=True), iteration_s(saves=False)) for _ in range(num_rounds)]
    plain_s = plan.prediction.iteration_s
    predicted = 1 + Trial(plan).saved("nvme", BUFFER_BYTES, every=1).cost_s / plain_s
    ratio = statistics.median(saving / plain for saving, plain in measured)
    return {
        "every_iteration_measured": ratio,
        "every_iteration_predicted": predicted,
        "every_iteration_error": predicted / ratio - 1,
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="on the drive to measure (default: where temporary files are)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="of every engine (5)")
    parser.add_argument("--output", type=Path, default=OUTPUT, metavar="PATH", help="result file")
    args = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    began = origin("torch")
    profile = calibrated(NUM_COMPUTE_THREADS)
    dtype = default_precision(profile.device).weights
    cell = dataclasses.replace(cells(2 * NUM_COMPUTE_THREADS, dtype, quick=True)[0], seq_len=SEQ_LEN[dtype])
    job = Job(cell, "ours", num_threads=NUM_COMPUTE_THREADS, num_warm_up=0, num_timed=10**6)
    plan = plan_for(cell, profile)
    training = Training(plan, job)
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        outcomes: list[Any] = []
        checkpoints = ullage.Checkpoints(training.optimizer, ullage.Level(folder / "ours"), on_outcome=outcomes.append)
        for _ in range(3):
            training.iterate()
        state = training.state()

        def ours() -> Callable[[], None]:
            checkpoints.save(training.step)
            return checkpoints.settle

        ways: dict[str, Callable[[], Callable[[], None]]] = {"none": lambda: lambda: None, "ours": ours}
        others = engines(state)
        for engine, save in others.items():
            ways[engine] = lambda save=save, engine=engine: save(folder / engine)  # type: ignore[misc]
        rounds: list[dict[str, dict[str, float]]] = []
        for number in range(args.rounds + 1):  # the first touches files and memory
            found = {}
            for way, begin in ways.items():
                found[way] = block(training, begin)
                if way in others:
                    shutil.rmtree(folder / way)
            if number:
                rounds.append(found)
            sys.stderr.write(
                f"round {number}: " + ", ".join(f"{w} {f['block_s']:.2f} s" for w, f in found.items()) + "\n"
            )
        assert all(outcome.error is None for outcome in outcomes), outcomes
        slower = slow_down(training, checkpoints, plan, ROUNDS_OF_SLOW_DOWN * args.rounds)
        checkpoints.close()
    result = {
        **began,
        "dtype": dtype,
        "num_bytes": sum(value.numel() * value.element_size() for value in state.values()),
        "iteration_s": statistics.median(r["none"]["block_s"] for r in rounds) / ITERATIONS_OF_A_BLOCK,
        **summary(rounds),
        **slower,
    }
    write_result(args.output, result)
    for key, value in result.items():
        print(f"{key}: {value}")


def summary(rounds: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Return medians by engine, and the others' over ours, paired by round."""
    names = [name for name in rounds[0] if name != "none"]
    blocked_s = {name: statistics.median(r[name]["blocked_s"] for r in rounds) for name in names}
    costs = {name: [r[name]["block_s"] - r["none"]["block_s"] for r in rounds] for name in names}
    return {
        "blocked_s": blocked_s,
        "cost_s": {name: statistics.median(values) for name, values in costs.items()},
        "blocked_over_ours": {
            name: statistics.median(r[name]["blocked_s"] / r["ours"]["blocked_s"] for r in rounds)
            for name in names
            if name != "ours"
        },
        "cost_over_ours": {
            name: statistics.median(costs[name]) / statistics.median(costs["ours"]) for name in names if name != "ours"
        },
    }


if __name__ == "__main__":
    main()
