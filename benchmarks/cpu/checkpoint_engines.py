"""Four checkpoint engines over sizes of models and frequencies, as DataStates-LLM compares them, on this machine.

    python benchmarks/cpu/checkpoint_engines.py --peers PEERS             about six minutes where nothing else runs
    python benchmarks/cpu/checkpoint_engines.py --peers PEERS --quick     does it work at all?

One process trains one model under one plan for so many iterations, with a checkpoint by one engine after every 10, 5,
4, 3, 2 or 1 of them, until training has ended and the last checkpoint is durable (*end to end*). *Blocked* is how long
the call keeps the training loop, and *throughput* the size of a checkpoint over that. *Cost* is what a checkpoint adds
to training, which also has what goes on beside it. In each round every engine and frequency has its turn, and one run
has no checkpoint; rounds begin at different ones.

- torch.save: of all tensors into one file, while training waits: DeepSpeed's engine;
- checkfreq: clones all tensors while training waits, and saves the clones so in a thread, one checkpoint in flight;
- torchsnapshot: ``Snapshot.async_take``, one in flight; from PEERS, as ``benchmarks/requirements-peers.txt`` says;
- ours: ``ullage.Checkpoints``, which keeps two, each read again.

All of them end with ``fsync``, which none of the others does by itself: a checkpoint that the power can take is none.
The others are given tensors that lie ready, which is more than a user of offloaded state has. What each has written is
loaded once and compared bit by bit. Beside what was measured is what the simulator's policies predict, from a
profile of this machine that is calibrated just before.
"""

import argparse
import dataclasses
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import ullage
from benchmarks.cpu.engines import Blocking, CheckFreq, Engine, Ours, Tensors, TorchSnapshot
from benchmarks.cpu.peers import calibrated
from benchmarks.cpu.saving import BUFFER_BYTES, Training, plan_for
from benchmarks.origin import origin, write_result
from benchmarks.peers.jobs import Cell, Job
from hwprofiles.profile import HardwareProfile
from planner.checkpoints.lowering import Shard, with_checkpoints
from planner.checkpoints.trial import times
from planner.costs.model import CostModel
from planner.decisions import Sharding
from planner.plan.planning import default_precision
from planner.schedule.tasks import Tier
from planner.simulate.machine import run as simulate
from ullage.rivals import checkpoints
from ullage.rivals.cases.checkpoints import iteration

OUTPUT = Path(__file__).parents[1] / "results" / "cpu_checkpoint_engines.json"
SIZES = {"llama-22m": 250_000_000, "llama-41m": 330_000_000, "llama-79m": 500_000_000}
"""Models, and the memory of the device, which holds weights and activations, and no optimizer."""

FREQUENCIES = (10, 5, 4, 3, 2, 1)
PEERS: Mapping[str, Callable[[Tensors], Engine]] = {
    "torch.save": Blocking,
    "checkfreq": CheckFreq,
    "torchsnapshot": TorchSnapshot,
}
POLICIES = {
    "torch.save": "deepspeed",
    "checkfreq": "checkfreq-async",
    "torchsnapshot": "torchsnapshot",
    "ours": "ullage",
}


def train(training: Training, engine: Engine | None, folder: Path, num_iterations: int, every: int) -> dict[str, float]:
    """Train so many iterations with checkpoints; return seconds."""
    blocked_s: list[float] = []
    training.optimizer.session.synchronize()
    start_s = time.perf_counter()
    for step in range(1, num_iterations + 1):
        training.iterate()
        if engine is not None and step % every == 0:
            begin_s = time.perf_counter()
            engine.save(folder, step)
            blocked_s.append(time.perf_counter() - begin_s)
    training.optimizer.session.synchronize()
    training_s = time.perf_counter() - start_s
    if engine is not None:
        engine.finish()
    end_to_end_s = time.perf_counter() - start_s
    return {
        "end_to_end_s": end_to_end_s,
        "training_s": training_s,
        "blocked_s": statistics.mean(blocked_s) if blocked_s else 0.0,
    }


def check(engine: Engine, folder: Path, step: int) -> None:
    """Load a checkpoint and compare it bit by bit."""
    found, expected = engine.load(folder, step)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], values) for name, values in expected.items()), type(engine).__name__


def predicted(
    plan: ullage.Plan, name: str, iteration_s: float, num_bytes: int, run: tuple[int, int]
) -> dict[str, float] | str:
    """Return what the simulator says of a run of (iterations, iterations from checkpoint to checkpoint), or why not."""
    phases, whole = plan.prediction, iteration_s / plan.prediction.iteration_s
    seconds = [each * whole for each in (phases.forward_s, phases.backward_s, phases.update_s)]
    schedule, training = iteration(seconds[0], seconds[1], max(seconds[2], 1e-6))
    if name not in POLICIES:
        return f"there is no policy for {name}"
    state = [Shard(num_bytes, Tier.HOST, schedule.tasks[-1].index)]
    num_iterations, every = run
    try:
        cost = CostModel(plan.hardware, (), Sharding())
        make, costs = checkpoints.engine(POLICIES[name], cost, "nvme", state, BUFFER_BYTES)
        made = with_checkpoints(schedule, state, make, num_iterations=num_iterations, every=every)
        read = times(made, simulate(made.schedule, costs.prices(made, training), costs.capacities(), 1))
    except ValueError as error:
        return str(error)
    return {"end_to_end_s": read.end_to_end_s, "blocked_s": statistics.mean(read.blocked_s)}


def num_bytes_of(state: Tensors) -> int:
    """Return the bytes of all tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values())


@dataclasses.dataclass
class Study:
    """All runs of one model.

    Attributes:
        job: what is trained.
        profile: of this machine.
        folder: where checkpoints go.
        num_iterations: of a run.
        frequencies: iterations from one checkpoint to the next.
        peers: engines beside ours, by name.
        absent: why engines are not there, by name.
    """

    job: Job
    profile: HardwareProfile
    folder: Path
    num_iterations: int
    frequencies: Sequence[int]
    peers: Mapping[str, Callable[[Tensors], Engine]] = dataclasses.field(default_factory=lambda: PEERS)
    absent: dict[str, str] = dataclasses.field(default_factory=dict)

    def measure(self, num_rounds: int) -> dict[str, Any]:
        """Run everything, in turns, and return medians, with what is predicted."""
        plan = plan_for(self.job.cell, self.profile)
        training = Training(plan, self.job)
        training.iterate()
        state = training.state()
        num_bytes = num_bytes_of(state)
        ours = Ours(training, self.folder)
        engines: dict[str, Engine] = {}
        for name, make in self.peers.items():
            try:
                engines[name] = make(state)
            except ImportError as error:
                self.absent[name] = str(error)
        engines["ours"] = ours
        runs: list[tuple[str, int]] = [("none", 1), *((name, k) for k in self.frequencies for name in engines)]
        found: dict[tuple[str, int], list[dict[str, float]]] = {run: [] for run in runs}
        checked: set[str] = set()
        for number in range(num_rounds):
            first = number * len(runs) // max(num_rounds, 1)
            for name, every in (*runs[first:], *runs[:first]):
                found[name, every].append(self._run(training, engines.get(name), every))
                if name in engines and name not in checked and self.num_iterations % every == 0:
                    check(engines[name], self.folder, self.num_iterations)
                    checked.add(name)
                ours.settle()  # what is read again in the background is no part of the next run
                self._clear()
                sys.stderr.write(f"{self.job.cell.model} {name} every {every}: {found[name, every][-1]}\n")
        assert checked == set(engines), "each engine's checkpoints were compared"
        ours.close()
        plain_s = statistics.median(one["training_s"] for one in found["none", 1])
        rows = [
            self._row(name, every, found[name, every], plain_s, num_bytes)
            | {
                "predicted": predicted(
                    plan, name, plain_s / self.num_iterations, num_bytes, (self.num_iterations, every)
                )
            }
            for name, every in runs[1:]
        ]
        return {
            "num_bytes": num_bytes,
            "iteration_s": plain_s / self.num_iterations,
            "rows": rows,
        }

    def _run(self, training: Training, engine: Engine | None, every: int) -> dict[str, float]:
        return train(training, engine, self.folder, self.num_iterations, every)

    def _clear(self) -> None:
        for path in self.folder.iterdir():
            if path.name == "ours":
                for checkpoint in path.iterdir():
                    shutil.rmtree(checkpoint, ignore_errors=True)  # what retention removes is gone too
            elif path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()

    def _row(
        self, name: str, every: int, runs: Sequence[dict[str, float]], plain_s: float, num_bytes: int
    ) -> dict[str, Any]:
        medians = {key: statistics.median(one[key] for one in runs) for key in runs[0]}
        return {
            "engine": name,
            "every": every,
            **medians,
            "iteration_s": medians["training_s"] / self.num_iterations,
            "cost_s": (medians["training_s"] - plain_s) / (self.num_iterations // every),
            "blocking_throughput_bytes_per_s": num_bytes / medians["blocked_s"],
        }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="on the drive to measure (default: where temporary files are)")
    parser.add_argument("--peers", type=Path, help="folder in which torchsnapshot is installed")
    parser.add_argument("--iterations", type=int, default=10, metavar="N", help="of each run (10)")
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="of all runs (1)")
    parser.add_argument("--models", nargs="+", choices=SIZES, default=list(SIZES), help="sizes to train (all)")
    parser.add_argument("--quick", action="store_true", help="a tiny model, two frequencies")
    parser.add_argument("--output", type=Path, default=OUTPUT, metavar="PATH", help="result file")
    args = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    warnings.filterwarnings("ignore")
    if args.peers is not None:
        sys.path.append(str(args.peers))
    began = origin("torch", "torchsnapshot", beside=args.peers)
    sizes = {"llama-tiny": 100_000_000} if args.quick else {name: SIZES[name] for name in args.models}
    frequencies = (2, 1) if args.quick else FREQUENCIES
    profile = calibrated(1)
    models: dict[str, Any] = {}
    absent: dict[str, str] = {}
    for model, memory_bytes in sizes.items():
        with tempfile.TemporaryDirectory(dir=args.folder) as name:
            cell = Cell(model, default_precision(profile.device).weights, 1, 128, 1, 1.0, memory_bytes, 1)
            job = Job(cell, "ours", num_threads=1, num_warm_up=0, num_timed=10**6)
            study = Study(job, profile, Path(name), 4 if args.quick else args.iterations, frequencies)
            models[model] = study.measure(args.rounds)
            absent |= study.absent
    result = {
        **began,
        "num_iterations": args.iterations,
        "num_rounds": args.rounds,
        "absent": absent,
        "models": models,
    }
    write_result(args.output, result)
    print(report(result))


def report(result: dict[str, Any]) -> str:
    """Return the result as lines to print, a figure of the paper after another."""
    lines = [f"{name} is not there: {why}" for name, why in result["absent"].items()]
    for model, found in result["models"].items():
        lines.append(f"{model}: {found['num_bytes'] / 1e6:.0f} MB, {found['iteration_s']:.3f} s without checkpoints")
        lines.append(
            "engine        every  end to end (predicted)   blocked (predicted)   throughput  iteration    cost"
        )
        for row in found["rows"]:
            says = row["predicted"]
            keys = ("end_to_end_s", "blocked_s")
            end, blocked = ("-", "-") if isinstance(says, str) else (f"{says[key]:.3f}" for key in keys)
            rate = f"{row['blocking_throughput_bytes_per_s'] / 1e9:.1f} GB/s"
            lines.append(
                f"{row['engine']:13} {row['every']:5}  {row['end_to_end_s']:8.3f} s ({end:>7} s)  "
                f"{row['blocked_s']:7.4f} s ({blocked:>6} s)  {rate:>11}  {row['iteration_s']:7.3f} s  "
                f"{row['cost_s']:6.3f} s"
            )
        lines += sorted(
            {f"  not predicted: {row['predicted']}" for row in found["rows"] if isinstance(row["predicted"], str)}
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
