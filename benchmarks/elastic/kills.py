"""Kill processes and nodes of an elastic run, any of them, at any time: does its loss curve go on, and at what cost?

    python benchmarks/elastic/kills.py --kills 200

Four nodes of one process each, emulated on this machine, train one model together. At random times one of their
processes is killed, or a whole node, which comes back some seconds later (all but the first, which keeps the store of
``torchrun``). Every iteration is then compared with that of a run that nobody disturbed: its loss, and the sequences
that it has read. A run that ends before all kills is followed by another.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parents[2]))

from torch._C._distributed_c10d import TCPStore

from benchmarks import forks
from benchmarks.origin import origin, write_result
from hwprofiles.profile import Fabric, HardwareProfile
from hwprofiles.quantity import Provenance, Quantity
from hwprofiles.registry import load_profile
from planner.choices.request import Request
from planner.decisions import FP32
from planner.models import resolve_model
from planner.plan.planning import make_plan
from ullage.training.elastic import Start, read_progress, starts_of

_OUTPUT: Final = Path(__file__).parents[1] / "results" / "elastic.json"
_PRELOADED: Final = (
    "torch._dynamo",
    "transformers.models.llama.modeling_llama",
    "executor.prepare",
    "planner.plan.planning",
    "ullage.commands.execute.run",
    "ullage.this_machine.kernels",
)
_NODES: Final = 4
_EVERY: Final = 2
_HANGS_S: Final = 300.0
"""Time without progress after which the run counts as hanging."""
_PATIENCE_S: Final = 30.0
"""What processes have to end in order, as with ``torchrun``."""
_SHARE_NODES, _SHARE_EARLY = 0.25, 0.1


def nodes() -> HardwareProfile:
    """Return this machine as nodes of one core each, between which loopback is the network."""
    origin_ = Provenance(origin="assumed", source="gloo over loopback")
    network = Fabric(
        bytes_per_s=Quantity(value=1e9, unit="bytes_per_s", provenance=origin_),
        latency_s=Quantity(value=3e-4, unit="s", provenance=origin_),
    )
    one = load_profile("epyc-turin-2c").with_device_memory(22_000_000)
    return HardwareProfile.model_validate(one.model_dump() | {"name": "nodes", "inter_node": network.model_dump()})


def make(path: Path) -> None:
    """Write a plan for all nodes, of 12 sequences an iteration, which two, three and four nodes share equally."""
    width = {"hidden_size": 256, "ffn_hidden_size": 704, "head_dim": 32, "word_embed_proj_dim": 256, "num_layers": 2}
    model = resolve_model("demo-llama").model_copy(update=width)
    request = Request(
        model, nodes(), num_devices=_NODES, precision=FP32, seq_len=64, micro_batch=1, num_micro_batches=3
    )
    path.write_text(make_plan(request).to_json(), encoding="utf-8")


class Run:
    """An elastic run, whose agents start all processes again when one has failed, or when nodes come or go.

    They stand for those of ``torchrun``. Processes are forked from one that has imported all they need.
    """

    def __init__(self, plan: Path, folder: Path, iterations: int) -> None:
        self.folder, self.progress = folder, folder / "checkpoints" / "iterations.jsonl"
        self.words = ["-m", "ullage", "execute", str(plan), "--elastic", "--iterations", str(iterations)]
        self.words += ["--checkpoint-dir", f"{folder / 'checkpoints'},every={_EVERY}", "--audit", "off"]
        self.words += ["--output-dir", str(folder / "out"), "--cores", "free"]
        self.num_supervised = self.num_killed = 0
        folder.mkdir()
        self._present = set(range(_NODES))
        self._processes: dict[int, forks.Process] = {}
        self.begin()

    def begin(self) -> None:
        """Start a process on each node that is there."""
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # a new one for each start
        every = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._store.port), "LOCAL_WORLD_SIZE": "1"}
        every |= {"WORLD_SIZE": str(len(self._present)), "LOCAL_RANK": "0", "OMP_NUM_THREADS": "1"}
        every |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
        for rank, node in enumerate(sorted(self._present)):
            environment = os.environ | every | {"RANK": str(rank)}
            with (self.folder / f"node-{node}.log").open("a") as log:
                self._processes[node] = forks.started([sys.executable, *self.words], environment, log)

    def kill_process(self, node: int) -> bool:
        """Kill the process of a node; return whether there was one."""
        found = self._processes.get(node)
        if found is None or found.wait(0) is not None:
            return False
        os.killpg(found.pid, signal.SIGKILL)
        return True

    def kill_node(self, node: int) -> bool:
        """Kill what runs on a node, which is gone then; return whether it was there."""
        if node not in self._present:
            return False
        self._present.discard(node)
        self.kill_process(node)
        return True

    def bring_back(self, node: int) -> None:
        """Have a node come back, for which all processes end in order, with a checkpoint, and start again."""
        self._present.add(node)
        self._again()

    def supervise(self) -> bool:
        """Start all processes again if one has failed; return whether all have ended in order."""
        codes = {node: process.wait(0) for node, process in self._processes.items()}
        if any(codes.values()):
            self._again()
            return False
        return not any(code is None for code in codes.values())

    def _again(self) -> None:
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in self._processes.values():
            if process.wait(_PATIENCE_S) is None:
                self.num_killed += 1
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(_PATIENCE_S)
        self._processes.clear()
        self.begin()

    def lines(self) -> list[dict[str, Any]]:
        """Return what the run has told of its iterations."""
        return [dict(line) for line in read_progress(self.progress)]


class ByTorchrun(Run):
    """An elastic run under ``torchrun``: an agent for each node. Agents that fail start again, as clusters have it."""

    def begin(self) -> None:
        """Start all agents."""
        self._port = free_port()
        self._agents = {node: self._agent(node) for node in self._present}

    def _agent(self, node: int) -> subprocess.Popen[bytes]:
        settings = f"is_host={int(node == 0)},last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", f"1:{_NODES}", "--nproc-per-node", "1"),
            *("--max-restarts", "100000", "--monitor-interval", "0.1", "--rdzv-backend", "c10d"),
            *("--rdzv-endpoint", f"127.0.0.1:{self._port}", "--rdzv-id", "elastic", "--rdzv-conf", settings),
        ]
        with (self.folder / f"node-{node}.log").open("ab") as log:
            return subprocess.Popen([*command, *self.words], stdout=log, stderr=log, start_new_session=True)

    def _started(self, node: int) -> list[int]:
        agent = self._agents[node].pid
        with contextlib.suppress(OSError):
            return [int(word) for word in Path(f"/proc/{agent}/task/{agent}/children").read_text().split()]
        return []

    def kill_process(self, node: int) -> bool:
        """See :class:`Run`."""
        started = self._started(node) if node in self._agents else []
        return any(_killed(process) for process in started[-1:])

    def kill_node(self, node: int) -> bool:
        """See :class:`Run`."""
        if node not in self._agents or self._agents[node].poll() is not None:
            return False
        for process in (self._agents[node].pid, *self._started(node)):
            _killed(process)
        self._agents.pop(node).wait()
        return True

    def bring_back(self, node: int) -> None:
        """See :class:`Run`."""
        self._agents[node] = self._agent(node)

    def supervise(self) -> bool:
        """See :class:`Run`."""
        for node in [node for node, agent in self._agents.items() if agent.poll()]:
            self.bring_back(node)
            self.num_supervised += 1
        return all(agent.poll() == 0 for agent in self._agents.values())


def _killed(process: int) -> bool:
    try:
        os.kill(process, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def finished(run: Run, iterations: int) -> bool:
    """Return whether all iterations have ended."""
    return any(line["iteration"] == iterations - 1 for line in run.lines()[-3:])


def moments(run: Run, iterations: int, rng: random.Random, mean_s: float) -> Iterator[None]:
    """Yield at random times until a run has ended, most of them after some progress."""
    seen, since_s = 0, time.monotonic()
    while not finished(run, iterations):
        until_s = time.monotonic() + rng.expovariate(1 / mean_s)
        while time.monotonic() < until_s and not finished(run, iterations):
            time.sleep(0.05)
            run.supervise()
        got_on = len(run.lines()) > seen
        if got_on:
            seen, since_s = len(run.lines()), time.monotonic()
        elif time.monotonic() - since_s > _HANGS_S:
            ends = [log.read_text()[-1500:] for log in sorted(run.folder.glob("*.log"))]
            raise RuntimeError("\n".join([f"no iteration for {_HANGS_S:g} s; logs end with", *ends]))
        if got_on or rng.random() < _SHARE_EARLY:
            yield


def disturbed(run: Run, iterations: int, most: int, rng: random.Random, mean_s: float) -> Iterator[str]:
    """Kill at random times until a run has ended or there were so many kills; yield what was killed."""
    back: dict[int, float] = {}
    count = 0
    for _ in moments(run, iterations, rng, mean_s):
        for node in [node for node, at_s in back.items() if at_s <= time.monotonic()]:
            run.bring_back(node)
            del back[node]
        node = rng.randrange(_NODES)
        is_node = bool(node) and rng.random() < _SHARE_NODES
        if count == most or not (run.kill_node(node) if is_node else run.kill_process(node)):
            continue
        if is_node:
            back[node] = time.monotonic() + rng.expovariate(1 / mean_s)
        count += 1
        yield "node" if is_node else "process"
    for node in back:
        run.bring_back(node)
    while not run.supervise():
        time.sleep(0.1)


def curve(lines: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return the iterations that count: of those that were computed again, the last."""
    return {line["iteration"]: line for line in lines}


def main() -> None:
    """Measure, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--iterations", type=int, default=200, help="of each run")
    parser.add_argument("--mean-s", type=float, default=1.0, help="mean seconds between kills")
    parser.add_argument("--torchrun", action="store_true", help="with agents of torchrun, and new interpreters")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=_OUTPUT)
    args = parser.parse_args()
    result: dict[str, Any] = origin("torch", "numpy")
    kind = ByTorchrun if args.torchrun else Run
    with tempfile.TemporaryDirectory(prefix="elastic-") as folder, contextlib.ExitStack() as stack:
        if not args.torchrun:
            environment = dict(os.environ)
            server = forks.Server(environment, Path(folder) / "forks.log", _PRELOADED)
            stack.callback(server.close)
            if not server.ready(120.0):
                sys.exit((Path(folder) / "forks.log").read_text())
            os.environ[forks.ADDRESS] = environment[forks.ADDRESS]
        result |= measured(kind, Path(folder), args)
    write_result(args.output, result)
    print(json.dumps(result, indent=2))


def measured(kind: type[Run], folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Run without disturbance, and then with so many kills; return what they did."""
    plan = folder / "plan.json"
    make(plan)
    plain = kind(plan, folder / "plain", args.iterations)
    while not plain.supervise():
        time.sleep(0.1)
    expected = curve(plain.lines())
    kills: list[str] = []
    starts: list[Start] = []
    worst, num_runs, again, supervised, killed, rng = 0.0, 0, 0, 0, 0, random.Random(args.seed)  # noqa: S311
    while len(kills) < args.kills:
        run = kind(plan, folder / f"run-{num_runs}", args.iterations)
        for what in disturbed(run, args.iterations, args.kills - len(kills), rng, args.mean_s):
            kills.append(what)
            last = (run.lines() or [{}])[-1]
            print(f"{len(kills)}: {what}, iteration {last.get('iteration')}, {last.get('ranks')} ranks", flush=True)
        lines = run.lines()
        found = curve(lines)
        if sorted(found) != list(range(args.iterations)):
            raise RuntimeError(f"iterations are missing: {sorted(set(range(args.iterations)) - set(found))}")
        if moved := [n for n, line in found.items() if line["position"] != expected[n]["position"]]:
            raise RuntimeError(f"other sequences were read in the iterations {moved}")
        worst = max(worst, *(abs(found[i]["loss"] / expected[i]["loss"] - 1) for i in found))
        starts += starts_of(lines)
        again += len(lines) - args.iterations
        num_runs += 1
        supervised, killed = supervised + run.num_supervised, killed + run.num_killed
        print(f"run {num_runs}: losses within {worst:.1e} of those of the run without kills", flush=True)
    down = sorted(start.down_s for start in starts)
    mine = [line["end_s"] - line["begin_s"] for line in expected.values()]
    return {
        "agents": "torchrun" if args.torchrun else "of this program, which fork",
        "kills": {kind: kills.count(kind) for kind in ("process", "node")},
        "runs": num_runs,
        "iterations_of_each": args.iterations,
        "iteration_s": statistics.median(mine),
        "checkpoint_every": _EVERY,
        "agents_that_failed": supervised,
        "killed_because_they_did_not_end": killed,
        "starts": len(starts),
        "starts_by_ranks": {str(n): sum(start.ranks == n for start in starts) for n in range(1, _NODES + 1)},
        "loss_max_relative_difference": worst,
        "iterations_computed_again": again,
        "lost_iterations": {
            "mean": statistics.mean(start.lost_iterations for start in starts),
            "max": max(start.lost_iterations for start in starts),
        },
        "down_s": {"median": statistics.median(down), "p90": down[int(0.9 * (len(down) - 1))], "max": down[-1]},
    }


if __name__ == "__main__":
    main()
