"""Relations that publications report, and that nothing in the program states: they have to come out by themselves."""

import copy
import functools
import json
from pathlib import Path
from typing import Any

import pytest

from hwprofiles.registry import load_profile
from ullage.rivals.cases import Metric, read_case

PUBLISHED = Path(__file__).parents[3] / "benchmarks" / "published"


@functools.cache
def cases(file: str) -> dict[str, dict[str, Any]]:
    return {case["id"]: case for case in json.loads((PUBLISHED / f"{file}.json").read_text())["cases"]}


def iteration_s(name: str, **engine: object) -> float:
    data = copy.deepcopy(cases("offloaded_update")[name])
    data["engine"] |= engine
    return read_case(data).predict(load_profile(data["hardware"])).values[Metric.ITERATION]


def measured_s(name: str) -> float:
    measured: float = cases("offloaded_update")[name]["measured"]["iteration_ms"]
    return measured / 1e3


@pytest.mark.parametrize(
    "prefix", ["a100x4-7b-l32-tp1-dp4-mb1-gb4-r1-sg100m", "polaris-a100-13b-l40-tp1-dp4-mb4-gb16-r1-sg100m"]
)
def test_with_four_ranks_the_smallest_stride_is_best(prefix: str) -> None:
    names = [name for name in cases("offloaded_update") if name.startswith(f"{prefix}-interleave")]
    assert len(names) >= 6
    assert min(names, key=iteration_s) == min(names, key=measured_s) == f"{prefix}-interleave-k2"


def test_the_best_stride_grows_as_a_rank_has_more_of_the_cpu() -> None:
    """A quarter of a node, or all of it: measured best at k = 2 and 8, where all strides from 4 on are close."""
    strides = (2, 3, 4, 5, 6, 8, 10)
    best = {}
    for ranks in (1, 4):
        name = f"polaris-a100-13b-l40-tp1-dp{ranks}-mb4-gb{4 * ranks}-r1-sg100m-interleave-k10"
        best[ranks] = min(strides, key=lambda stride: iteration_s(name, stride=stride))
    assert best[1] > best[4] == 2


def test_twin_flow_gains_as_the_cpu_fraction_falls() -> None:
    """Over ZeRO-Offload on the same machine, for every published fraction."""
    gains = {}
    for fraction in ("0.5", "0.6", "0.7", "0.8", "0.9"):
        name = f"h100x4-20b-l40-tp1-dp4-mb1-gb4-r{fraction}-sg100m-async-flush"
        whole = "h100x4-20b-l40-tp1-dp4-mb1-gb4-r1-sg100m-async-flush"
        gains[fraction] = iteration_s(whole) / iteration_s(name)
        assert gains[fraction] == pytest.approx(measured_s(whole) / measured_s(name), rel=0.05)
    assert sorted(gains.values(), reverse=True) == list(gains.values())


def test_more_drives_stop_helping_where_the_device_is_busy() -> None:
    found, measured = {}, {}
    for drives in (1, 2, 3, 6, 12):
        data = cases("activation_swapping")[f"lohan-13b-bs32-ssd{drives}"]
        found[drives] = read_case(data).predict(load_profile(data["hardware"]))
        measured[drives] = data["measured"]["tflops"]
    rates = {drives: outcome.values[Metric.COMPUTE_RATE] for drives, outcome in found.items()}
    for fewer, more in ((1, 2), (2, 3), (3, 6), (6, 12)):
        assert rates[more] / rates[fewer] == pytest.approx(measured[more] / measured[fewer], rel=0.06)
    assert rates[2] / rates[1] > 1.5
    assert rates[12] / rates[6] < 1.25


def test_blocking_gradient_copies_cost_what_they_are_measured_to_cost() -> None:
    for prefix in ("h100x4-20b-l40-tp1-dp4-mb1-gb4-r1-sg100m", "h100x4-20b-l40-tp1-dp4-mb1-gb4-r0.5-sg100m"):
        blocking, asynchronous = (f"{prefix}-{flush}-flush" for flush in ("blocking", "async"))
        predicted = iteration_s(blocking) - iteration_s(asynchronous)
        assert predicted == pytest.approx(measured_s(blocking) - measured_s(asynchronous), rel=0.1)
