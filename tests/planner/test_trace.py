import dataclasses
import gzip
import itertools
import json
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hwprofiles.registry import load_profile
from planner.engines import POLICIES
from planner.lowering import lower
from planner.models import ModelConfig
from planner.planning import Request, prepare
from planner.schedule import Buffer, Lane, MemoryClass, Op, Phase, Schedule, Task, Tier
from planner.simulate.machine import run_until_steady
from planner.timeline import Timeline, memory_use
from planner.trace import chrome_trace, write_trace

MODEL = ModelConfig(
    name="tiny",
    family="llama",
    num_layers=3,
    hidden_size=64,
    ffn_hidden_size=128,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=256,
    max_positions=128,
    mlp="swiglu",
    norm="rmsnorm",
    tied_embeddings=False,
    word_embed_proj_dim=64,
)


@pytest.fixture(scope="module")
def simulations() -> dict[str, tuple[Timeline, int]]:
    request = Request(
        MODEL, load_profile("h100"), num_devices=2, seq_len=128, num_micro_batches=2, subgroup_params=9000
    )
    setup, workload, cost = prepare(request)
    result = {}
    for name, policy in POLICIES.items():
        schedule = lower(workload.units, next(policy(setup)), asynchronous=True)
        simulation = run_until_steady(schedule, cost)
        result[name] = (simulation.timeline, simulation.steady)
    return result


@pytest.fixture(scope="module")
def trace(simulations) -> dict:
    return chrome_trace({name: timeline for name, (timeline, _) in simulations.items()})


def ns(microseconds: float) -> int:
    return round(microseconds * 1000)


def processes(trace: dict) -> dict[int, str]:
    return {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}


def test_events_have_what_the_format_asks_for(trace):
    assert set(trace) == {"traceEvents", "displayTimeUnit"}
    for event in trace["traceEvents"]:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["ph"] in {"X", "C", "M"}
        if event["ph"] != "M":
            assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert set(event["args"]) == {"iteration", "phase", "unit", "bytes", "params"}
        if event["ph"] == "C":
            assert event["args"]
            assert all(isinstance(value, (int, float)) and value >= 0 for value in event["args"].values())
    assert list(processes(trace).values()) == list(POLICIES)


def test_every_task_is_a_slice_on_its_lanes_track(trace, simulations):
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    for pid, name in processes(trace).items():
        timeline, _ = simulations[name]
        slices = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["pid"] == pid]
        zero_s = float(np.nanmin(timeline.start_s))
        wanted = sorted(
            (timeline.schedule.tasks[s.task].lane.value, timeline.schedule.tasks[s.task].name, s.iteration)
            for s in timeline.spans
        )
        assert sorted((tracks[pid, e["tid"]], e["name"], e["args"]["iteration"]) for e in slices) == wanted
        assert min(e["ts"] for e in slices) == 0
        assert max(e["ts"] + e["dur"] for e in slices) == pytest.approx(
            1e6 * (float(np.nanmax(timeline.end_s)) - zero_s), rel=1e-6
        )


def test_slices_of_one_track_never_overlap(trace):
    tracks = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append((ns(event["ts"]), ns(event["ts"]) + ns(event["dur"])))
    assert len(tracks) > 10
    for slices in tracks.values():
        slices.sort()
        for (_, end), (start, _) in itertools.pairwise(slices):
            assert end <= start


def test_traffic_adds_up_to_what_was_copied(trace, simulations):
    """The area under the counter of a lane is the bytes of its tasks."""
    for pid, name in processes(trace).items():
        timeline, _ = simulations[name]
        copied = defaultdict(int)
        for span in timeline.spans:
            copied[timeline.schedule.tasks[span.task].lane] += timeline.schedule.tasks[span.task].num_bytes
        counters = defaultdict(list)
        for event in trace["traceEvents"]:
            if event["ph"] == "C" and event["pid"] == pid and "GB/s" in event["name"]:
                counters[event["name"].split()[0]].append((ns(event["ts"]), event["args"]["GB/s"]))
        assert counters
        for lane, samples in counters.items():
            times = [time for time, _ in samples]
            assert times == sorted(set(times))
            assert samples[-1][1] == 0
            area = sum(rate * (after - at) for (at, rate), (after, _) in itertools.pairwise(samples))
            assert area == pytest.approx(copied[lane], rel=0.02)


def test_memory_peaks_are_those_of_the_steady_iteration(trace, simulations):
    for pid, name in processes(trace).items():
        timeline, steady = simulations[name]
        zero_s = float(np.nanmin(timeline.start_s))
        begin = ns(1e6 * (timeline.begin_s(steady) - zero_s))
        end = begin + ns(1e6 * timeline.period_s(steady))
        for tier, use in memory_use(timeline, steady).items():
            counters = [
                (ns(e["ts"]), sum(e["args"].values()))
                for e in trace["traceEvents"]
                if e["ph"] == "C" and e["pid"] == pid and e["name"].startswith(f"{tier} memory")
            ]
            before = max(at for at, _ in counters if at <= begin)
            peak = max(num_bytes for at, num_bytes in counters if before <= at <= end)
            assert peak == pytest.approx(use.peak_bytes, rel=1e-3)


def test_memory_that_is_carried_over_is_held_into_the_next_iteration():
    tasks = (
        Task(0, Lane.COMPUTE, Op.FORWARD, Phase.FORWARD, "a"),
        Task(1, Lane.COMPUTE, Op.BACKWARD, Phase.BACKWARD, "a", after=(0,)),
    )
    carried = Buffer(Tier.GPU, MemoryClass.GRADIENTS, 10, "a", first=1, last=0)
    starts_s, ends_s = np.array([[0.0, 1.0], [2.0, 3.0]]), np.array([[1.0, 2.0], [3.0, 4.0]])
    events = chrome_trace({"x": Timeline(Schedule(tasks, (carried,)), starts_s, ends_s)})["traceEvents"]
    held = [(e["ts"], e["args"]["gradients"]) for e in events if e["ph"] == "C"]
    assert held == [(1e6, 10), (3e6, 10)]  # what is freed at 3 s is taken again at once


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000))
def test_a_run_that_stopped_midway_can_be_traced(simulations, stop):
    timeline, _ = simulations["interleaved"]
    start_s, end_s = timeline.start_s.copy(), timeline.end_s.copy()
    stop %= start_s.size
    start_s.ravel()[stop:] = np.nan
    end_s.ravel()[stop:] = np.nan
    cut = chrome_trace({"measured": dataclasses.replace(timeline, start_s=start_s, end_s=end_s)})
    assert sum(event["ph"] == "X" for event in cut["traceEvents"]) == stop
    json.dumps(cut, allow_nan=False)


def test_files_are_equal_bytes_and_compressed_by_name(trace, tmp_path):
    for name in ("a.json.gz", "b.json.gz", "a.json"):
        write_trace(tmp_path / name, trace)
    assert (tmp_path / "a.json.gz").read_bytes() == (tmp_path / "b.json.gz").read_bytes()
    assert gzip.decompress((tmp_path / "a.json.gz").read_bytes()) == (tmp_path / "a.json").read_bytes()
    assert json.loads((tmp_path / "a.json").read_text()) == trace
    assert len(list(tmp_path.iterdir())) == 3


def test_a_file_that_cannot_be_written_leaves_nothing(trace, tmp_path):
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError, match="taken"):
        write_trace(tmp_path / "taken", trace)
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
