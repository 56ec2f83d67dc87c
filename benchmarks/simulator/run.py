"""Simulate the same training-like task graphs with SimPy and with ours, paired in one run.

SimPy has no fluid sharing, so the link that both copy lanes cross is wide enough for both: all end times must then be
equal, bit for bit, and that is asserted. The same graph with a link too narrow for both is timed with ours alone.

Usage: python benchmarks/simulator/run.py [--layers 100 1000 10000] [--repeats 5] [--output FILE]
"""

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import simpy
from rich.console import Console
from rich.table import Table

from planner.simulate import FluidSystem, FluidTask, simulate, simulate_reference

LANES = ("compute", "h2d", "d2h", "cpu")
COMPUTE, H2D, D2H, CPU = range(4)
NUM_SLOTS = 4  # layers fetched ahead
DEFAULT_OUTPUT = Path(__file__).parents[1] / "results" / "simulator_vs_simpy.json"
PROBE = """
import time
begin_s = time.perf_counter()
from planner.simulate import FluidSystem, FluidTask, simulate
imported_s = time.perf_counter()
simulate(FluidSystem.build([FluidTask(0, 1.0, uses={0: 1.0})], [1.0]))
print(imported_s - begin_s, time.perf_counter() - imported_s)
"""


def training_graph(num_layers: int, seed: int = 0) -> list[FluidTask]:
    """Return one iteration: prefetched forward and backward, gradients flushed, updates on the CPU, uploads."""
    rng = np.random.default_rng(seed)
    tasks: list[FluidTask] = []
    computed: list[int] = []
    waiting: list[int] = []  # updates whose upload is not issued yet

    def issue(lane: int, after: Sequence[int]) -> int:
        uses = {lane: 1.0} | ({len(LANES): 1.0} if lane in {H2D, D2H} else {})
        tasks.append(FluidTask(lane, float(rng.uniform(1e-3, 3e-3)), 0.0, tuple(after), uses))
        return len(tasks) - 1

    def compute() -> None:
        fetch = issue(H2D, computed[-NUM_SLOTS:][:1] if len(computed) >= NUM_SLOTS else [])
        computed.append(issue(COMPUTE, [fetch]))

    for _ in range(num_layers):
        compute()
    for _ in range(num_layers):
        compute()
        flush = issue(D2H, computed[-1:])
        waiting.append(issue(CPU, [flush]))
        if len(waiting) > NUM_SLOTS:
            issue(H2D, [waiting.pop(0)])
    for update in waiting:
        issue(H2D, [update])
    return tasks


def fluid_system(tasks: Sequence[FluidTask], link_capacity: float) -> FluidSystem:
    """Return our form of a graph: exclusive lanes, and a link that both copy lanes cross."""
    return FluidSystem.build(tasks, [*[1.0] * len(LANES), link_capacity], lane_names=LANES)


def simpy_resources(tasks: Sequence[FluidTask]) -> list[float]:
    """Return end times from the usual SimPy model: a process per task, and lanes as resources."""
    environment = simpy.Environment()
    lanes = [simpy.Resource(environment, capacity=1) for _ in LANES]
    ended = [environment.event() for _ in tasks]
    end_s = [0.0] * len(tasks)

    def process(i: int, task: FluidTask) -> Generator[simpy.Event, Any, None]:
        with lanes[task.lane].request() as turn:  # requests are queued in issue order: first-in first-out
            yield turn
            for p in task.after:
                if not ended[p].processed:
                    yield ended[p]
            yield environment.timeout(task.duration_s)
            end_s[i] = environment.now
            ended[i].succeed()

    for i, task in enumerate(tasks):
        environment.process(process(i, task))
    environment.run()
    return end_s


def simpy_lanes(tasks: Sequence[FluidTask]) -> list[float]:
    """Return end times from the leanest SimPy model: one process per lane, which walks its tasks."""
    environment = simpy.Environment()
    ended = [environment.event() for _ in tasks]
    end_s = [0.0] * len(tasks)
    queues: list[list[int]] = [[] for _ in LANES]
    for i, task in enumerate(tasks):
        queues[task.lane].append(i)

    def process(queue: list[int]) -> Generator[simpy.Event, Any, None]:
        for i in queue:
            for p in tasks[i].after:
                if not ended[p].processed:
                    yield ended[p]
            yield environment.timeout(tasks[i].duration_s)
            end_s[i] = environment.now
            ended[i].succeed()

    for queue in queues:
        environment.process(process(queue))
    environment.run()
    return end_s


def measure(num_layers: int, repeats: int, reference_limit: int) -> dict[str, Any]:
    """Time every simulator in turn on one graph, ``repeats`` times, and return medians."""
    tasks = training_graph(num_layers)
    begin_s = time.perf_counter()
    system = fluid_system(tasks, link_capacity=2.0)
    build_s = time.perf_counter() - begin_s
    contended = fluid_system(tasks, link_capacity=1.0)
    candidates: dict[str, Callable[[], Any]] = {
        "simpy_resources": lambda: simpy_resources(tasks),
        "simpy_lanes": lambda: simpy_lanes(tasks),
        "kernel": lambda: simulate(system).end_s,
        "kernel_contended": lambda: simulate(contended).end_s,
    }
    if len(tasks) <= reference_limit:
        candidates["reference"] = lambda: simulate_reference(system)[1]
    for warm_up in (system, contended):
        simulate(warm_up)
    times_s: dict[str, list[float]] = {name: [] for name in candidates}
    end_s: dict[str, Any] = {}
    for _ in range(repeats):
        for name, run in candidates.items():
            begin_s = time.perf_counter()
            end_s[name] = run()
            times_s[name].append(time.perf_counter() - begin_s)
    for name in candidates.keys() - {"kernel_contended", "reference"}:
        assert np.array_equal(end_s[name], end_s["kernel"]), f"{name} and the kernel disagree"
    if "reference" in end_s:
        np.testing.assert_allclose(end_s["reference"], end_s["kernel"], rtol=1e-9)
    assert end_s["kernel_contended"].max() > end_s["kernel"].max()
    medians_s = {name: statistics.median(values) for name, values in times_s.items()}
    return {
        "num_layers": num_layers,
        "num_tasks": len(tasks),
        "makespan_s": float(end_s["kernel"].max()),
        "build_s": build_s,
        "median_s": medians_s,
        "tasks_per_s": {name: len(tasks) / value for name, value in medians_s.items()},
        "kernel_over_simpy_resources": medians_s["simpy_resources"] / medians_s["kernel"],
        "kernel_over_simpy_lanes": medians_s["simpy_lanes"] / medians_s["kernel"],
    }


def startup() -> dict[str, float]:
    """Return seconds to import and to make the first call, in new processes without and with compiled code cached."""
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"NUMBA_CACHE_DIR": cache}
        cold, cached = (
            subprocess.run(
                [sys.executable, "-c", PROBE], env=environment, check=True, capture_output=True, text=True
            ).stdout.split()
            for _ in range(2)
        )
    return {
        "import_s": float(cached[0]),
        "first_call_compiling_s": float(cold[1]),
        "first_call_cached_s": float(cached[1]),
    }


def cpu_model() -> str:
    """Return the name of the CPU, as far as the system tells."""
    info = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor()


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print one line per size."""
    table = Table(title="Tasks simulated per second (median); ratios of ours to SimPy")
    for column in ("tasks", "SimPy, resources", "SimPy, lanes", "ours", "ours, contended", "reference", "ratios"):
        table.add_column(column, justify="right")
    for row in rows:
        rates = row["tasks_per_s"]
        names = ("simpy_resources", "simpy_lanes", "kernel", "kernel_contended", "reference")
        table.add_row(
            f"{row['num_tasks']:,}",
            *(f"{rates[name]:.3g}" if name in rates else "-" for name in names),
            f"{row['kernel_over_simpy_resources']:.0f}x, {row['kernel_over_simpy_lanes']:.0f}x",
        )
    Console(width=120).print(table)


def main() -> None:
    """Run, print a table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--layers", type=int, nargs="+", default=[100, 1_000, 10_000, 100_000])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--reference-limit", type=int, default=100_000, help="most tasks to run the pure Python on")
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT)
    options = parser.parse_args()
    start = startup()
    rows = [measure(num_layers, options.repeats, options.reference_limit) for num_layers in options.layers]
    show(rows)
    Console(width=120).print(
        f"import {start['import_s']:.2f} s, first call {start['first_call_cached_s']:.2f} s "
        f"({start['first_call_compiling_s']:.1f} s when it has to compile)"
    )
    result = {
        "command": " ".join(["python benchmarks/simulator/run.py", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "cpu": cpu_model(),
        "num_cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in ("numba", "numpy", "simpy")},
        "repeats": options.repeats,
        "startup": start,
        "sizes": rows,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
