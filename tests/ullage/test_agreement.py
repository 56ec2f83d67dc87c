"""Feed measured durations into the simulator: what is left between prediction and measurement is then the cost model.

The plan is chosen so that every rule matters: parameters go through a single slot, so copies and computing take turns,
and updates by the CPU gate the next forward. Real threads, a real model; bounds are relative, not wall-clock. Where
other programs use the cores, threads wait for one between tasks, which no task accounts for. Linux counts that time,
and as much more is allowed.
"""

import dataclasses
import gc
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.peers.replay import replay
from executor.options import Options
from executor.prepare import prepare_session
from planner.decisions import FP32, Decisions, Place, UnitDecision
from planner.graph import Batch, build_graph, units
from planner.models import resolve_model, to_hf_config_dict
from planner.schedule.schedule import Schedule
from planner.schedule.tasks import Lane, Task
from planner.schedule.timeline import Timeline

NUM_ITERATIONS = 12
STEADY = range(4, NUM_ITERATIONS - 1)
TOLERANCE = 0.05
MOST_RUNS = 3


class Run(NamedTuple):
    """A timeline, and the seconds in which threads waited for a core per second of it."""

    timeline: Timeline
    waited: float

    @property
    def replayed(self) -> float:
        return replayed(self.timeline, self.timeline.schedule)


@pytest.fixture(scope="module")
def best_run() -> Run:
    """The best run of several: other programs only ever add time between tasks that no task accounts for."""
    gc.collect()
    gc.disable()  # nor does any task account for a collection, which takes long beside all that pytest holds
    found: list[Run] = []
    while len(found) < MOST_RUNS and max((run.replayed for run in found), default=0.0) < 1 - TOLERANCE / 2:
        found.append(measure())
    gc.enable()
    best = max(found, key=lambda run: run.replayed + run.waited)
    assert best.timeline.num_iterations == NUM_ITERATIONS
    return best


@pytest.fixture(scope="module")
def measured(best_run: Run) -> Timeline:
    return best_run.timeline


def waiting_s() -> float:
    """Return how long threads of this process have been ready without a core (the kernel's ``sched-stats.rst``)."""
    return sum(int(file.read_text().split()[1]) / 1e9 for file in Path("/proc/self/task").glob("*/schedstat"))


def measure() -> Run:
    # Wide and short: what crosses lanes takes milliseconds, beside which waking a thread is nothing. In fp32, as
    # without instructions for bf16 nothing but computing would matter.
    wide = {"num_layers": 2, "hidden_size": 1024, "ffn_hidden_size": 4096, "head_dim": 128, "word_embed_proj_dim": 1024}
    config = resolve_model("demo-llama").model_copy(update=wide)
    model_units = units(build_graph(config, Batch(1, 32, 2)))
    decisions = Decisions(
        policy="ullage",
        precision=FP32,
        num_param_slots=1,
        units={
            unit.name: UnitDecision(
                params="host" if unit.recompute else "gpu",
                activations="keep",
                update=(Place.CPU,),
            )
            for unit in model_units
        },
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**to_hf_config_dict(config)), dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    options = Options(num_threads=1, record=True)
    model, offloaded = prepare_session(model, optimizer, model_units, decisions, options)
    tokens = torch.randint(0, 256, (1, 32))
    with offloaded.session as session:
        began_s, waited_s = time.perf_counter(), waiting_s()
        for _ in range(NUM_ITERATIONS):
            model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
            offloaded.clip_grad_norm_(1.0)
            offloaded.step()
            offloaded.zero_grad()
        timeline = session.timeline()
        waited = (waiting_s() - waited_s) / (time.perf_counter() - began_s)
    torch.set_num_threads(threads)
    return Run(timeline, waited)


def replayed(timeline: Timeline, schedule: Schedule) -> float:
    return replay(timeline, STEADY, schedule)


def changed(schedule: Schedule, **changes: object) -> Schedule:
    return dataclasses.replace(schedule, tasks=tuple(dataclasses.replace(task, **changes) for task in schedule.tasks))


def test_measured_durations_give_the_measured_period(best_run: Run) -> None:
    assert best_run.replayed < 1 + TOLERANCE
    assert best_run.replayed > 1 - TOLERANCE - best_run.waited


def test_forgetting_dependencies_is_noticed(measured: Timeline) -> None:
    forgetful = changed(measured.schedule, after=(), after_previous=())
    assert replayed(measured, forgetful) < 1 - TOLERANCE


def test_forgetting_lane_order_is_noticed(measured: Timeline) -> None:
    lanes = list(Lane)

    def scattered(task: Task) -> Task:
        return dataclasses.replace(task, lane=lanes[task.index % len(lanes)])

    shuffled = dataclasses.replace(measured.schedule, tasks=tuple(map(scattered, measured.schedule.tasks)))
    assert abs(replayed(measured, shuffled) - 1) > TOLERANCE
