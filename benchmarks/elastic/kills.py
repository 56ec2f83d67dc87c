"""Kill processes and nodes of an elastic run, any of them, at any time: does its loss curve go on, and at what cost?

    python benchmarks/elastic/kills.py --kills 200

Four nodes of one process each, emulated on this machine, train one model together. At random times one of their
processes is killed, or a whole node, which comes back some seconds later (all but the first, which keeps the store of
``torchrun``). Every iteration is then compared with that of a run that nobody disturbed: its loss, and the sequences
that it has read. A run that ends before all kills is followed by another.

    python benchmarks/elastic/kills.py --kills 100 --levels

With ``--levels`` there are two nodes of two processes each. Each node has a folder of its own, which stands for its
memory, and all share another, which gets fewer checkpoints. A node that is killed loses its folder, and so do both if
both are. A node that comes, at once or later, has an empty folder.

    python benchmarks/elastic/kills.py --kills 100 --stages

With ``--stages`` the model is a pipeline of two stages, each on two ranks. Fewer processes are other stages, or none.
"""

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

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

_RESULTS: Final = Path(__file__).parents[1] / "results"
_PRELOADED: Final = (
    "torch._dynamo",
    "transformers.models.llama.modeling_llama",
    "executor.prepare",
    "planner.plan.planning",
    "ullage.commands.execute.run",
    "ullage.calibrate.kernels",
)
_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - shared memory is intended
_RANKS: Final = 4
_EVERY: Final = 2
_SHARED_EVERY: Final = 16
"""Iterations between checkpoints in the folder that nodes share, where each has one of its own too."""
_HANGS_S: Final = 300.0
"""Time without progress after which the run counts as hanging."""
_PATIENCE_S: Final = 30.0
"""What processes have to end in order, as with ``torchrun``."""
_SHARE_NODES, _SHARE_EARLY, _SHARE_ALL = 0.25, 0.1, 0.05


class Cluster(NamedTuple):
    """The nodes of a run.

    Attributes:
        nodes: their number.
        per_node: processes on each.
        has_own: whether each has a folder of its own, which is lost with it.
    """

    nodes: int
    per_node: int
    has_own: bool


_SHARED, _DIVIDED = Cluster(_RANKS, 1, has_own=False), Cluster(2, _RANKS // 2, has_own=True)


def nodes(per_node: int) -> HardwareProfile:
    """Return this machine as nodes of so many devices of one core each, between which loopback is the network."""
    origin_ = Provenance(origin="assumed", source="gloo over loopback")
    network = Fabric(
        bytes_per_s=Quantity(value=1e9, unit="bytes_per_s", provenance=origin_),
        latency_s=Quantity(value=3e-4, unit="s", provenance=origin_),
    )
    one = load_profile("epyc-turin-2c").with_device_memory(22_000_000)
    fields: dict[str, Any] = {"name": "nodes", "inter_node": network.model_dump()}
    if per_node > 1:
        more = tuple((f"host{number}", "dram") for number in range(1, per_node))
        fields |= {"devices_per_node": per_node, "intra_node": network.model_dump(), "topology": (*one.topology, *more)}
    return HardwareProfile.model_validate(one.model_dump() | fields)


def make(path: Path, per_node: int = 1, stages: int = 1) -> None:
    """Write a plan for all nodes, of 12 sequences an iteration, which two, three and four nodes share equally."""
    width = {"hidden_size": 256, "ffn_hidden_size": 704, "head_dim": 32, "word_embed_proj_dim": 256}
    model = resolve_model("demo-llama").model_copy(update=width | {"num_layers": 2 * stages})
    request = Request(
        model,
        nodes(per_node),
        num_devices=_RANKS,
        pipeline_parallel=stages,
        precision=FP32,
        seq_len=64,
        micro_batch=1,
        num_micro_batches=3 * stages,
    )
    path.write_text(make_plan(request).to_json(), encoding="utf-8")


class Run:
    """An elastic run, whose agents start all processes again when one has failed, or when nodes come or go.

    They stand for those of ``torchrun``. Processes are forked from one that has imported all they need.
    """

    def __init__(self, plan: Path, folder: Path, iterations: int, cluster: Cluster = _SHARED) -> None:
        self.folder, self.progress = folder, folder / "checkpoints" / "iterations.jsonl"
        self.cluster = cluster
        self._words = ["-m", "ullage", "execute", str(plan), "--elastic", "--iterations", str(iterations)]
        self._words += ["--output-dir", str(folder / "out"), "--cores", "free", "--audit", "off"]
        self.num_supervised = self.num_killed = 0
        folder.mkdir()
        self._present = set(range(cluster.nodes))
        self._processes: dict[tuple[int, int], forks.Process] = {}  # by node, and number there
        self.begin()

    def words(self, node: int) -> list[str]:
        """Return the words of the command of a node's processes."""
        places = [(self.folder / "checkpoints", _SHARED_EVERY if self.cluster.has_own else _EVERY)]
        if self.cluster.has_own:
            places.insert(0, (self.own(node), _EVERY))
        dirs = (["--checkpoint-dir", f"{place},every={every}"] for place, every in places)
        return [*self._words, *(word for words in dirs for word in words)]

    def own(self, node: int) -> Path:
        """Return the folder that stands for a node's memory."""
        return _MEMORY / self.folder.parent.name / self.folder.name / f"memory-{node}"

    def begin(self) -> None:
        """Start a process on each node that is there."""
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # a new one for each start
        every = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._store.port)}
        here = [(node, local) for node in sorted(self._present) for local in range(self.cluster.per_node)]
        every |= {"WORLD_SIZE": str(len(here)), "LOCAL_WORLD_SIZE": str(self.cluster.per_node), "OMP_NUM_THREADS": "1"}
        every |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
        for rank, (node, local) in enumerate(here):
            environment = os.environ | every | {"RANK": str(rank), "LOCAL_RANK": str(local)}
            with (self.folder / f"node-{node}.log").open("a") as log:
                started = forks.started([sys.executable, *self.words(node)], environment, log)
                self._processes[node, local] = started

    def kill_process(self, node: int, local: int = 0) -> bool:
        """Kill a process of a node; return whether there was one."""
        found = self._processes.get((node, local))
        if found is None or found.wait(0) is not None:
            return False
        os.killpg(found.pid, signal.SIGKILL)
        return True

    def kill_node(self, node: int) -> bool:
        """Kill what runs on a node, which is gone then; return whether it was there."""
        if node not in self._present:
            return False
        self._present.discard(node)
        for local in range(self.cluster.per_node):
            self.kill_process(node, local)
        shutil.rmtree(self.own(node), ignore_errors=True)
        return True

    def bring_back(self, node: int) -> None:
        """Have a node come back, for which all processes end in order, with a checkpoint, and start again."""
        self._present.add(node)
        self._again()

    def replace(self, node: int) -> None:
        """Have another node come in a lost one's place before the others have noticed."""
        self._present.add(node)

    def supervise(self) -> bool:
        """Start all processes again if one has failed; return whether all have ended in order."""
        codes = {number: process.wait(0) for number, process in self._processes.items()}
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
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", f"1:{self.cluster.nodes}"),
            *("--nproc-per-node", str(self.cluster.per_node)),
            *("--max-restarts", "100000", "--monitor-interval", "0.1", "--rdzv-backend", "c10d"),
            *("--rdzv-endpoint", f"127.0.0.1:{self._port}", "--rdzv-id", "elastic", "--rdzv-conf", settings),
        ]
        with (self.folder / f"node-{node}.log").open("ab") as log:
            return subprocess.Popen([*command, *self.words(node)], stdout=log, stderr=log, start_new_session=True)

    def _started(self, node: int) -> list[int]:
        agent = self._agents[node].pid
        with contextlib.suppress(OSError):
            return [int(word) for word in Path(f"/proc/{agent}/task/{agent}/children").read_text().split()]
        return []

    def kill_process(self, node: int, local: int = 0) -> bool:
        """See :class:`Run`."""
        started = self._started(node)[-self.cluster.per_node :] if node in self._agents else []
        return any(_killed(process) for process in started[local : local + 1])

    def kill_node(self, node: int) -> bool:
        """See :class:`Run`."""
        if node not in self._agents or self._agents[node].poll() is not None:
            return False
        for process in (self._agents[node].pid, *self._started(node)):
            _killed(process)
        self._agents.pop(node).wait()
        shutil.rmtree(self.own(node), ignore_errors=True)
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
        if count == most:
            continue
        node, local = rng.randrange(run.cluster.nodes), rng.randrange(run.cluster.per_node)
        is_node = bool(node) and rng.random() < _SHARE_NODES
        lost = [node] if is_node else []
        if run.cluster.has_own and rng.random() < _SHARE_ALL:  # at least the first of them comes back at once
            lost = list(range(run.cluster.nodes))
        killed = [run.kill_node(each) for each in lost] if lost else [run.kill_process(node, local)]
        if not all(killed):
            continue
        for each in lost:
            if each and rng.random() < 0.5:
                back[each] = time.monotonic() + rng.expovariate(1 / mean_s)
            else:
                run.replace(each)
        count += 1
        yield ("all nodes" if len(lost) > 1 else "node") if lost else "process"
    for node in back:
        run.bring_back(node)
    while not run.supervise():
        time.sleep(0.1)


def continued(run: Run) -> Counter[str]:
    """Return how often a run went on from which kind of place: a folder of each node, or the one that all share."""
    logs = "".join(log.read_text() for log in run.folder.glob("*.log"))
    found = re.findall(r"continuing from \S*/(memory|checkpoints)[^/]*/step-", logs)
    kinds = Counter("shared" if place == "checkpoints" else "own" for place in found)
    kinds["beginning"] = logs.count("training starts from the beginning") - 1  # not the first time
    return kinds


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
    parser.add_argument("--levels", action="store_true", help="each node has checkpoints of its own, which it loses")
    parser.add_argument("--stages", action="store_true", help="a pipeline of two stages")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if args.levels and args.torchrun:
        parser.error("with --levels, any node may be lost, also the one that serves torchrun's rendezvous; give one")
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
        stack.callback(shutil.rmtree, _MEMORY / Path(folder).name, ignore_errors=True)
        result |= measured(kind, Path(folder), args)
    name = f"elastic{'_levels' * args.levels}{'_stages' * args.stages}.json"
    write_result(args.output or _RESULTS / name, result)
    print(json.dumps(result, indent=2))


def measured(kind: type[Run], folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Run without disturbance, and then with so many kills; return what they did."""
    plan, cluster = folder / "plan.json", _DIVIDED if args.levels else _SHARED
    make(plan, cluster.per_node, stages=1 + args.stages)
    plain = kind(plan, folder / "plain", args.iterations, cluster)
    while not plain.supervise():
        time.sleep(0.1)
    expected = curve(plain.lines())
    kills: list[str] = []
    starts: list[Start] = []
    gone_on: Counter[str] = Counter()
    worst, num_runs, again, supervised, killed, rng = 0.0, 0, 0, 0, 0, random.Random(args.seed)  # noqa: S311
    while len(kills) < args.kills:
        run = kind(plan, folder / f"run-{num_runs}", args.iterations, cluster)
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
        gone_on += continued(run)
        again += len(lines) - args.iterations
        num_runs += 1
        supervised, killed = supervised + run.num_supervised, killed + run.num_killed
        print(f"run {num_runs}: losses within {worst:.1e} of those of the run without kills", flush=True)
    down = sorted(start.down_s for start in starts)
    mine = [line["end_s"] - line["begin_s"] for line in expected.values()]
    return {
        "agents": "torchrun" if args.torchrun else "of this program, which fork",
        "nodes": cluster.nodes,
        "processes_of_each": cluster.per_node,
        "kills": {kind: kills.count(kind) for kind in ("process", "node", "all nodes") if kind in kills},
        "runs": num_runs,
        "iterations_of_each": args.iterations,
        "iteration_s": statistics.median(mine),
        "checkpoint_every": _EVERY,
        "agents_that_failed": supervised,
        "killed_because_they_did_not_end": killed,
        "starts": len(starts),
        "starts_by_ranks": {str(n): sum(start.ranks == n for start in starts) for n in range(1, _RANKS + 1)},
        **({"shared_checkpoint_every": _SHARED_EVERY, "went_on_from": dict(gone_on)} if cluster.has_own else {}),
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
