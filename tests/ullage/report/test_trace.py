import dataclasses
import gzip
import itertools
import json
import math
from collections import defaultdict

import numpy as np
import pytest
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from hwprofiles.registry import load_profile
from planner.choices.request import Request
from planner.choices.variants import variants
from planner.models import ModelConfig
from planner.schedule.schedule import Schedule
from planner.schedule.tasks import Buffer, Lane, MemoryClass, Op, Phase, Task, Tier
from planner.schedule.timeline import Timeline, memory_use
from planner.simulate.machine import run_until_steady
from ullage.report.trace import chrome_trace, write_trace
from ullage.rivals.engines.catalogue import POLICIES
from ullage.rivals.lowering import lower

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


FOLDED = {"state-in": "h2d", "state-out": "d2h", "activation-in": "h2d", "activation-out": "d2h"}
ENGINES = list(POLICIES)


@pytest.fixture(scope="module")
def simulations() -> dict[str, tuple[Timeline, int]]:
    request = Request(
        MODEL, load_profile("h100"), num_devices=2, seq_len=128, num_micro_batches=2, subgroup_params=9000
    )
    one = variants(request)[0]
    setup, cost = one.setup, one.cost
    result = {}
    for name in ENGINES:
        schedule = lower(one.setup.units, next(POLICIES[name](setup)), asynchronous=True)
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


EVENT = {"ph", "pid", "tid", "name"}
KEYS = {"X": {*EVENT, "cat", "ts", "dur", "args"}, "C": {*EVENT, "ts", "args"}, "M": {*EVENT, "args"}}
METADATA = {
    "process_name": ("name", str),
    "process_sort_index": ("sort_index", int),
    "thread_name": ("name", str),
    "thread_sort_index": ("sort_index", int),
}


def check_format(trace: dict) -> None:
    """What the Trace Event Format, and Perfetto's reading of it, ask of a trace."""
    assert set(trace) == {"traceEvents", "displayTimeUnit"}
    assert trace["displayTimeUnit"] in {"ms", "ns"}
    tracks, counters, named = defaultdict(list), defaultdict(list), set()
    for event in trace["traceEvents"]:
        assert set(event) == KEYS[event["ph"]]
        assert isinstance(event["name"], str)
        assert event["name"]
        assert type(event["pid"]) is type(event["tid"]) is int
        if event["ph"] == "M":
            key, kind = METADATA[event["name"]]
            assert set(event["args"]) == {key}
            assert isinstance(event["args"][key], kind)
            named.add((event["pid"], event["tid"], event["name"]))
            continue
        assert math.isfinite(event["ts"])
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            tracks[event["pid"], event["tid"]].append((ns(event["ts"]), ns(event["ts"]) + ns(event["dur"])))
        else:
            assert event["args"]
            assert all(math.isfinite(value) and value >= 0 for value in event["args"].values())
            counters[event["pid"], event["name"]].append((ns(event["ts"]), set(event["args"])))
    for (pid, tid), slices in tracks.items():
        assert {(pid, tid, "thread_name"), (pid, tid, "thread_sort_index"), (pid, 0, "process_name")} <= named
        slices.sort()
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(slices))
    for samples in counters.values():
        times = [time for time, _ in samples]
        assert times == sorted(set(times))
        assert all(series == samples[0][1] for _, series in samples)


def track_names(trace: dict) -> dict[tuple[int, int], str]:
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}


def counter(trace: dict, pid: int, name: str) -> list[tuple[int, dict[str, float]]]:
    events = [e for e in trace["traceEvents"] if e["ph"] == "C" and e["pid"] == pid and e["name"] == name]
    return [(ns(e["ts"]), e["args"]) for e in events]


def test_traces_follow_the_format(trace):
    check_format(trace)
    assert list(processes(trace).values()) == ENGINES


def test_every_task_is_a_slice_on_its_lanes_track(trace, simulations):
    tracks = track_names(trace)
    for pid, name in processes(trace).items():
        timeline, _ = simulations[name]
        slices = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["pid"] == pid]
        zero_s = float(np.nanmin(timeline.start_s))
        tasks = timeline.schedule.tasks
        wanted = sorted((tasks[s.task].lane.value, tasks[s.task].name, s.iteration) for s in timeline.spans)
        found = [(tracks[pid, e["tid"]], e["name"], e["args"]["iteration"]) for e in slices]
        assert sorted(item for item in found if item[0] != "phases") == wanted
        assert min(e["ts"] for e in slices) == 0
        assert max(e["ts"] + e["dur"] for e in slices) == pytest.approx(
            1e6 * (float(np.nanmax(timeline.end_s)) - zero_s), rel=1e-6
        )


def test_phases_are_a_track(trace, simulations):
    tracks = track_names(trace)
    for pid, name in processes(trace).items():
        timeline, _ = simulations[name]
        spent_us = defaultdict(float)
        for event in trace["traceEvents"]:
            if event["ph"] == "X" and event["pid"] == pid and tracks[pid, event["tid"]] == "phases":
                spent_us[event["args"]["iteration"], event["name"]] += event["dur"]
        for iteration in range(timeline.num_iterations):
            for phase, seconds in timeline.phases(iteration).items():
                assert spent_us[iteration, phase] == pytest.approx(1e6 * seconds, abs=0.01)


def test_flows_of_one_lane_that_overlap_get_tracks_of_their_own():
    tasks = tuple(Task(i, Lane.H2D, Op.FETCH, Phase.FORWARD, f"u{i}", num_bytes=1000 * (i + 1)) for i in range(4))
    starts_s, ends_s = np.array([[0.0, 1.0, 2.0, 3.0]]), np.array([[2.0, 3.0, 2.5, 4.0]])
    trace = chrome_trace({"x": Timeline(Schedule(tasks), starts_s, ends_s)})
    check_format(trace)
    tracks = track_names(trace)
    slices = [e for e in trace["traceEvents"] if e["ph"] == "X" and "unit" in e["args"]]
    found = {e["args"]["unit"]: tracks[1, e["tid"]] for e in slices}
    assert found == {"u0": "h2d", "u1": "h2d 2", "u2": "h2d", "u3": "h2d"}
    # 1000 B in 2 s, then 2000 B in 2 s beside it, then 3000 B in 0.5 s beside that.
    rates = [1e9 * args["GB/s"] for _, args in counter(trace, 1, "h2d (GB/s)")]
    assert rates == pytest.approx([500, 1500, 7000, 1000, 4000, 0], abs=1e3)  # six decimals of GB/s


def test_traffic_adds_up_to_what_was_moved(trace, simulations):
    """The area under a link's counter is the bytes of the tasks of its lanes."""
    for pid, name in processes(trace).items():
        timeline, _ = simulations[name]
        moved = defaultdict(int)
        for span in timeline.spans:
            task = timeline.schedule.tasks[span.task]
            if task.num_bytes and task.lane not in {Lane.COMPUTE, Lane.CPU}:  # these pass over memory, not a link
                moved[FOLDED.get(task.lane, task.lane.value)] += task.num_bytes
        names = {e["name"] for e in trace["traceEvents"] if e["ph"] == "C" and e["pid"] == pid and "GB/s" in e["name"]}
        assert names == {f"{link} (GB/s)" for link in moved}
        for link, num_bytes in moved.items():
            samples = [(at, args["GB/s"]) for at, args in counter(trace, pid, f"{link} (GB/s)")]
            assert samples[-1][1] == 0
            area = sum(rate * (after - at) for (at, rate), (after, _) in itertools.pairwise(samples))
            assert area == pytest.approx(num_bytes, rel=1e-4)


def test_busy_is_when_any_lane_of_a_processor_runs(trace, simulations):
    for pid, name in processes(trace).items():
        timeline, _ = simulations[name]
        for processor, lanes in {"gpu": {Lane.COMPUTE, Lane.GPU_UPDATE}, "cpu": {Lane.CPU}}.items():
            spans = sorted(
                (s.start_s, s.end_s) for s in timeline.spans if timeline.schedule.tasks[s.task].lane in lanes
            )
            busy_s, until_s = 0.0, 0.0
            for start_s, end_s in spans:
                busy_s += max(end_s - max(start_s, until_s), 0.0)
                until_s = max(until_s, end_s)
            samples = counter(trace, pid, f"{processor} busy")
            area = sum(args["busy"] * (after - at) for (at, args), (after, _) in itertools.pairwise(samples))
            assert area == pytest.approx(1e9 * busy_s, rel=1e-4)


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
    held = [(e["ts"], e["args"]["gradients"]) for e in events if e["name"].startswith("gpu memory")]
    assert held == [(1e6, 10), (3e6, 10)]  # what is freed at 3 s is taken again at once


@settings(max_examples=examples(20), deadline=None)
@given(st.integers(0, 10_000))
def test_a_run_that_stopped_midway_can_be_traced(simulations, stop):
    timeline, _ = simulations["interleaved"]
    start_s, end_s = timeline.start_s.copy(), timeline.end_s.copy()
    stop %= start_s.size
    start_s.ravel()[stop:] = np.nan
    end_s.ravel()[stop:] = np.nan
    cut = chrome_trace({"measured": dataclasses.replace(timeline, start_s=start_s, end_s=end_s)})
    check_format(cut)
    tracks = track_names(cut)
    slices = [e for e in cut["traceEvents"] if e["ph"] == "X" and tracks[1, e["tid"]] != "phases"]
    assert len(slices) == stop
    json.dumps(cut, allow_nan=False)


def test_files_are_equal_bytes_and_compressed_by_name(trace, tmp_path):
    for name in ("a.json.gz", "b.json.gz", "a.json"):
        write_trace(tmp_path / name, trace)
    assert (tmp_path / "a.json.gz").read_bytes() == (tmp_path / "b.json.gz").read_bytes()
    assert gzip.decompress((tmp_path / "a.json.gz").read_bytes()) == (tmp_path / "a.json").read_bytes()
    assert json.loads((tmp_path / "a.json").read_text()) == trace
    check_format(json.loads(gzip.decompress((tmp_path / "a.json.gz").read_bytes())))
    assert len(list(tmp_path.iterdir())) == 3


def test_a_file_that_cannot_be_written_leaves_nothing(trace, tmp_path):
    (tmp_path / "taken").mkdir()
    with pytest.raises(ValueError, match="taken is a folder"):
        write_trace(tmp_path / "taken", trace)
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
