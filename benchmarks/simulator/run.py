"""Simulate the same training-like task graphs with SimPy and with ours, paired in one run.

SimPy has no fluid sharing, so what tasks share is wide enough for all of them: all end times must then be equal, bit
for bit, and that is asserted. The same graph with resources too narrow is timed with ours alone. One graph is a real
one: a full iteration of a 70B model on 16 GPUs, as the planner lowers it.

Usage: python benchmarks/simulator/run.py [--layers 100 1000 10000] [--repeats 5] [--output FILE]
"""

import argparse
import dataclasses
import json
import math
import os
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

from benchmarks.origin import origin, write_result
from benchmarks.simulator.reference import FluidTask, built, predecessors, simulate_reference, uses_of
from hwprofiles.registry import load_profile
from planner.choices.request import Request
from planner.choices.variants import variants
from planner.costs.resources import Price, Resource
from planner.models import resolve_model
from planner.schedule.schedule import Schedule
from planner.simulate.kernel import simulate
from planner.simulate.machine import run as simulate_iterations
from planner.simulate.machine import system_of
from planner.simulate.system import FluidSystem
from ullage.rivals.engines.deepspeed import zero_offload
from ullage.rivals.lowering import lower

LANES = ("compute", "h2d", "d2h", "cpu")
COMPUTE, H2D, D2H, CPU = range(4)
MODEL, HARDWARE, NUM_DEVICES, SEQ_LEN = "llama-3-70b", "h100", 16, 4096
SAMPLE_S = 0.01  # a sample calls as often as this takes, so that no caller pays for what the one before left in caches
NUM_STAGES, LANES_PER_STAGE, STAGES_PER_NODE = 32, 12, 8
NUM_SLOTS = 4  # layers fetched ahead
DEFAULT_OUTPUT = Path(__file__).parents[1] / "results" / "simulator_vs_simpy.json"
PROBE = """
import time
begin_s = time.perf_counter()
from planner.simulate.kernel import simulate
imported_s = time.perf_counter()
from benchmarks.simulator.reference import FluidTask, built
system = built([FluidTask(0, 1.0, uses={0: 1.0})], [1.0])
built_s = time.perf_counter()
simulate(system)
print(imported_s - begin_s, time.perf_counter() - built_s)
"""
# What one process holds at most while it simulates very many tasks, and what it held before: in bytes.
MILLION = """
import json, sys, time
sys.path.insert(0, sys.argv[1])
import run
schedule, prices, capacities = run.full_model()
run.simulate_iterations(schedule, prices, capacities, 1)
before_bytes = run.peak_rss_bytes()
num_iterations = -(-1_000_000 // len(schedule.tasks))
begin_s = time.perf_counter()
timeline = run.simulate_iterations(schedule, prices, capacities, num_iterations)
elapsed_s = time.perf_counter() - begin_s
system = run.system_of(schedule, prices, capacities, num_iterations)
begin_s = time.perf_counter()
run.simulate(system)
kernel_s = time.perf_counter() - begin_s
print(json.dumps({
    "num_tasks": timeline.start_s.size, "num_iterations": num_iterations, "schedule_to_timeline_s": elapsed_s,
    "kernel_s": kernel_s, "peak_rss_before_bytes": before_bytes, "peak_rss_bytes": run.peak_rss_bytes(),
}))
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
    return built(tasks, [*[1.0] * len(LANES), link_capacity])


def full_model() -> tuple[Schedule, list[Price], dict[Resource, float]]:
    """Return an iteration of a 70B model on 16 GPUs: ZeRO-3, parameters gathered, the optimizer on the CPUs."""
    model, hardware = resolve_model(MODEL), load_profile(HARDWARE)
    request = Request(model=model, hardware=hardware, num_devices=NUM_DEVICES, seq_len=SEQ_LEN, micro_batch=1)
    one = variants(request)[0]
    setup, cost = one.setup, one.cost
    decisions = list(zero_offload(setup))[-1]
    schedule = lower(setup.units, decisions, asynchronous=cost.asynchronous)
    return schedule, cost.prices(schedule), cost.capacities()


def pipeline(num_tasks: int, seed: int = 0) -> FluidSystem:
    """Return micro-batches that pass through many stages: many lanes, of which most are idle at any moment."""
    rng = np.random.default_rng(seed)
    forward, send, fetch, offload = range(4)  # the lanes used, of those that a stage has
    num_batches = num_tasks // (4 * NUM_STAGES)
    tasks: list[FluidTask] = []
    for _ in range(num_batches):
        sent: list[int] = []
        for stage in range(NUM_STAGES):
            dram = NUM_STAGES + stage // STAGES_PER_NODE

            def issue(
                kind: int, duration_s: float, after: list[int], uses: dict[int, float], stage: int = stage
            ) -> int:
                lane = stage * LANES_PER_STAGE + kind
                tasks.append(FluidTask(lane, duration_s * float(rng.uniform(0.9, 1.1)), 1e-5, after, uses))
                return len(tasks) - 1

            fetched = issue(fetch, 1e-3, [], {stage: 1.0, dram: 0.1})
            computed = issue(forward, 1e-3, [*sent, fetched], {})
            sent = [issue(send, 2e-4, [computed], {})]
            issue(offload, 8e-4, [computed], {stage: 0.5, dram: 0.1})
    return built(tasks, [1.0] * (NUM_STAGES + NUM_STAGES // STAGES_PER_NODE))


def simpy_resources(tasks: Sequence[FluidTask]) -> list[float]:
    """Return end times from the usual SimPy model: a process per task, and lanes as resources."""
    environment = simpy.Environment()
    lanes = [simpy.Resource(environment, capacity=1) for _ in range(1 + max(task.lane for task in tasks))]
    ended = [environment.event() for _ in tasks]
    end_s = [0.0] * len(tasks)

    def process(i: int, task: FluidTask) -> Generator[simpy.Event, Any, None]:
        with lanes[task.lane].request() as turn:  # requests are queued in issue order: first-in first-out
            yield turn
            for p in task.after:
                if not ended[p].processed:
                    yield ended[p]
            if task.latency_s:
                yield environment.timeout(task.latency_s)
            if task.duration_s:
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
    queues: list[list[int]] = [[] for _ in range(1 + max(task.lane for task in tasks))]
    for i, task in enumerate(tasks):
        queues[task.lane].append(i)

    def process(queue: list[int]) -> Generator[simpy.Event, Any, None]:
        for i in queue:
            for p in tasks[i].after:
                if not ended[p].processed:
                    yield ended[p]
            if tasks[i].latency_s:
                yield environment.timeout(tasks[i].latency_s)
            if tasks[i].duration_s:
                yield environment.timeout(tasks[i].duration_s)
            end_s[i] = environment.now
            ended[i].succeed()

    for queue in queues:
        environment.process(process(queue))
    environment.run()
    return end_s


def compare(
    tasks: Sequence[FluidTask],
    wide: FluidSystem,
    candidates: dict[str, Callable[[], Any]],
    repeats: int,
    reference_limit: int,
) -> dict[str, Any]:
    """Time SimPy, the kernel, the reference and further candidates in turn, and return medians.

    Args:
        tasks: for SimPy.
        wide: the same tasks, with resources that hold nobody back: these end times must be SimPy's.
        candidates: what else to time.
        repeats: how often.
        reference_limit: most tasks to run the pure Python on.
    """
    checked = {
        "simpy_resources": lambda: simpy_resources(tasks),
        "simpy_lanes": lambda: simpy_lanes(tasks),
        "kernel": lambda: simulate(wide)[1],
    }
    if len(tasks) <= reference_limit:
        checked["reference"] = lambda: simulate_reference(wide)[1]
    runs = checked | candidates
    simulate(wide)  # compiled code is loaded
    num_calls: dict[str, int] = {}
    end_s: dict[str, Any] = {}
    for name, run in runs.items():
        begin_s = time.perf_counter()
        end_s[name] = run()
        num_calls[name] = math.ceil(SAMPLE_S / (time.perf_counter() - begin_s))
    times_s: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            begin_s = time.perf_counter()
            for _ in range(num_calls[name]):
                run()
            times_s[name].append((time.perf_counter() - begin_s) / num_calls[name])
    for name in ("simpy_resources", "simpy_lanes"):
        assert np.array_equal(end_s[name], end_s["kernel"]), f"{name} and the kernel disagree"
    if "reference" in end_s:
        np.testing.assert_allclose(end_s["reference"], end_s["kernel"], rtol=1e-9)
    medians_s = {name: statistics.median(values) for name, values in times_s.items()}
    return {
        "num_tasks": len(tasks),
        "makespan_s": float(end_s["kernel"].max()),
        "median_s": medians_s,
        "tasks_per_s": {name: len(tasks) / value for name, value in medians_s.items()},
        "kernel_over_simpy_resources": medians_s["simpy_resources"] / medians_s["kernel"],
        "kernel_over_simpy_lanes": medians_s["simpy_lanes"] / medians_s["kernel"],
    }


def measure_layers(num_layers: int, repeats: int, reference_limit: int) -> dict[str, Any]:
    """Compare on a made-up iteration of some layers."""
    tasks = training_graph(num_layers)
    begin_s = time.perf_counter()
    wide = fluid_system(tasks, link_capacity=2.0)
    build_s = time.perf_counter() - begin_s
    contended = fluid_system(tasks, link_capacity=1.0)
    assert simulate(contended)[1].max() > simulate(wide)[1].max()
    further = {"kernel_contended": lambda: simulate(contended)[1]}
    compared = compare(tasks, wide, further, repeats, reference_limit)
    return {"num_layers": num_layers, "build_s": build_s, **compared}


def measure_full_model(repeats: int, reference_limit: int) -> dict[str, Any]:
    """Compare on an iteration of a 70B model, and time the way from its schedule to its timeline."""
    schedule, prices, capacities = full_model()
    contended = system_of(schedule, prices, capacities, 1)
    # Wide enough for all tasks of all lanes at once.
    wide = dataclasses.replace(contended, capacity=np.full((len(capacities), 1), 1e3 * contended.use_rate.max()))
    tasks = [
        FluidTask(int(lane), float(duration_s), float(latency_s), predecessors(contended, i), uses_of(contended, i))
        for i, (lane, duration_s, latency_s) in enumerate(
            zip(contended.lane, contended.duration_s, contended.latency_s, strict=True)
        )
    ]
    further = {
        "kernel_contended": lambda: simulate(contended)[1],
        "schedule_to_timeline": lambda: simulate_iterations(schedule, prices, capacities, 1),
    }
    compared = compare(tasks, wide, further, repeats, reference_limit)
    assert compared["median_s"]["schedule_to_timeline"] < 0.05, "an iteration of a 70B model takes more than 50 ms"
    what = f"{MODEL}, {NUM_DEVICES} x {HARDWARE}, one sequence of {SEQ_LEN} each, zero-offload"
    return {"what": what, **compared}


def measure_pipeline(num_tasks: int, repeats: int) -> dict[str, Any]:
    """Time many lanes."""
    system = pipeline(num_tasks)
    simulate(system)
    times_s = []
    for _ in range(repeats):
        begin_s = time.perf_counter()
        start_s, end_s = simulate(system)
        times_s.append(time.perf_counter() - begin_s)
    busy_lanes = float((end_s - start_s).sum() / end_s.max())
    return {
        "num_tasks": system.num_tasks,
        "num_lanes": NUM_STAGES * LANES_PER_STAGE,
        "mean_busy_lanes": busy_lanes,
        "median_s": statistics.median(times_s),
        "tasks_per_s": system.num_tasks / statistics.median(times_s),
    }


def measure_million() -> dict[str, Any]:
    """Simulate a million tasks in a process of its own, and return what it took."""
    command = [sys.executable, "-c", MILLION, str(Path(__file__).parent)]
    found: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found


def peak_rss_bytes() -> int:
    """Return the most memory that this process held; what ``getrusage`` says would include its parent's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


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
    began, start = origin("numba", "numpy", "simpy"), startup()
    rows = [measure_layers(num_layers, options.repeats, options.reference_limit) for num_layers in options.layers]
    model = measure_full_model(max(options.repeats, 21), options.reference_limit)
    show([*rows, model])
    many_lanes = measure_pipeline(100_000, options.repeats)
    million = measure_million()
    Console(width=120).print(
        f"import {start['import_s']:.2f} s, first call {start['first_call_cached_s']:.2f} s "
        f"({start['first_call_compiling_s']:.1f} s when it has to compile)\n"
        f"{model['what']}: {1e3 * model['median_s']['schedule_to_timeline']:.2f} ms from schedule to timeline, of "
        f"which {1e3 * model['median_s']['kernel_contended']:.2f} ms in the kernel\n"
        f"{many_lanes['num_lanes']} lanes, {many_lanes['mean_busy_lanes']:.0f} busy: "
        f"{many_lanes['tasks_per_s'] / 1e6:.1f}e6 tasks/s\n"
        f"{million['num_tasks']:,} tasks: {million['schedule_to_timeline_s']:.2f} s, kernel "
        f"{million['kernel_s']:.2f} s, at most {million['peak_rss_bytes'] / 1e6:.0f} MB "
        f"({million['peak_rss_before_bytes'] / 1e6:.0f} MB before)"
    )
    result = {
        **began,
        "repeats": options.repeats,
        "startup": start,
        "sizes": rows,
        "full_model": model,
        "many_lanes": many_lanes,
        "million_tasks": million,
    }
    write_result(options.output, result)


if __name__ == "__main__":
    main()
