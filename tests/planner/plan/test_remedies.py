"""What would make a request fit: the smallest change of a kind, and nothing that was not planned."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
from machines import machine

from hwprofiles.paths import replace
from hwprofiles.profile import HardwareProfile
from hwprofiles.quantity import Provenance
from hwprofiles.registry import load_profile
from planner.choices.request import Request
from planner.choices.variants import variants
from planner.models import resolve_model
from planner.plan.planning import InfeasibleError, make_plan
from planner.plan.remedies import what_would_fit
from planner.search import Candidate, Scorer
from ullage.rivals import make_plan as rivals_plan
from ullage.rivals.best import engine_policies
from ullage.rivals.lowering import lower

ASSUMED = Provenance(origin="assumed", source="a test")


def request(micro_batch: int = 8, **sizes: object) -> Request:
    return Request(resolve_model("demo-llama"), machine(**sizes), seq_len=256, micro_batch=micro_batch)


def test_a_smaller_micro_batch_with_accumulation_is_the_smallest_change_that_fits():
    too_large = request(gpu_bytes=8e7)
    with pytest.raises(InfeasibleError):
        make_plan(too_large)
    found = dict(what_would_fit(too_large))
    words = next(words for words in found if words.startswith("--micro-batch"))
    size, repeats = (int(n) for n in re.findall(r"\d+", words))
    assert size * repeats == 8
    fits = dataclasses.replace(too_large, micro_batch=size, num_micro_batches=repeats)
    assert make_plan(fits, max_simulations=40).prediction.iteration_s <= found[words]
    with pytest.raises(InfeasibleError):
        make_plan(dataclasses.replace(too_large, micro_batch=2 * size, num_micro_batches=repeats // 2))
    assert "devices with 16 GB" in found


@pytest.mark.part(2)
@pytest.mark.parametrize("num_devices", [1, 4])
def test_devices_may_share_a_sequence_that_one_does_not_hold(num_devices: int) -> None:
    too_long = dataclasses.replace(request(1, gpu_bytes=8e7), seq_len=2048, num_devices=num_devices)
    words = next(words for words, _ in what_would_fit(too_long) if "context=" in words)
    count = int(words.partition("context=")[2].split()[0])
    shared = dataclasses.replace(too_long, num_devices=max(num_devices, count), context_parallel=count)
    shared = dataclasses.replace(shared, num_micro_batches=1 if num_devices == 1 else count)
    plan = make_plan(shared, max_simulations=40)
    assert plan.decisions.num_sequences == num_devices


def test_host_memory_is_asked_for_where_that_is_what_lacks():
    words = [words for words, _ in what_would_fit(request(micro_batch=1, gpu_bytes=1.2e8, host_bytes=1e8))]
    assert "hosts with 16 GiB" in words
    assert not [word for word in words if word.startswith("--micro-batch")]


def test_where_there_is_one_memory_it_is_the_device_that_lacks_it():
    too_large = request(micro_batch=1, gpu_bytes=1.2e8, host_bytes=1e8)
    too_large = dataclasses.replace(too_large, hardware=too_large.hardware.model_copy(update={"one_memory": True}))
    with pytest.raises(InfeasibleError, match=r"a device with more memory$") as caught:
        make_plan(too_large)
    assert "host" not in str(caught.value)
    words = [words for words, _ in what_would_fit(too_large)]
    assert "devices with 16 GB" in words
    assert not [word for word in words if word.startswith("hosts")]


def test_nothing_is_said_to_help_that_does_not():
    tiny = machine(gpu_bytes=1e6, host_bytes=1e6, inter_node=False)
    assert not list(what_would_fit(Request(resolve_model("opt-30b"), tiny, seq_len=256, micro_batch=1)))


# What a row's words change, and the largest change of this kind with which the engine still lacks memory.
CHANGES: dict[str, Callable[[Request, int], tuple[dict[str, Any], dict[str, Any]]]] = {
    "--micro-batch": lambda _, n: tuple({"micro_batch": m, "num_micro_batches": 8 // m} for m in (n, 2 * n)),
    "--gpus": lambda _, n: ({"num_devices": n}, {"num_devices": n // 2}),
    "devices": lambda too_large, n: ({"hardware": larger(too_large, gpu_bytes=n * 1e9)}, {}),
    "hosts": lambda too_large, n: ({"hardware": larger(too_large, host_bytes=n * 2**30)}, {}),
}


@pytest.mark.part(2)
@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("--micro-batch", {"micro_batch": 8, "gpu_bytes": 4.2e8}),
        ("--gpus", {"micro_batch": 1, "gpu_bytes": 8e7, "devices_per_node": 8}),
        ("devices", {"micro_batch": 1, "gpu_bytes": 8e7, "inter_node": False}),
        # DeepSpeed reduces gradients in a bucket of 1 GB.
        ("hosts", {"micro_batch": 1, "gpu_bytes": 1.4e9, "host_bytes": 2e8, "inter_node": False}),
    ],
)
def test_an_engine_that_does_not_fit_names_its_nearest_set_up_that_does(kind: str, sizes: dict[str, Any]):
    too_large = request(**sizes)
    rows = [row for row in rivals_plan(too_large, max_simulations=1).engines if not row.fits]
    assert any(row.nearest and row.nearest.startswith(kind) for row in rows)
    for row in rows:
        assert row.nearest
        if not row.nearest.startswith(kind):
            continue
        size, *more = (int(n) for n in re.findall(r"\d+", row.nearest))
        changed, smaller = CHANGES[kind](too_large, size)
        assert more == {"--micro-batch": [8 // size], "--gpus": [size]}.get(kind, [])
        fits, lacks = (engine(dataclasses.replace(too_large, **change), row.name) for change in (changed, smaller))
        assert not fits.missing_bytes
        assert fits.iteration_s == row.nearest_iteration_s
        assert lacks.missing_bytes


def larger(too_large: Request, **sizes: float) -> HardwareProfile:
    names = {"gpu_bytes": "device.memory_bytes", "host_bytes": "host.memory_bytes"}
    return replace(too_large.hardware, {names[name]: size for name, size in sizes.items()}, ASSUMED)


def engine(too_large: Request, name: str) -> Candidate:
    one = variants(too_large)[0]
    setup = one.setup
    return engine_policies(setup, Scorer.of(one, lower=lower))[name]


def test_an_engine_that_no_single_change_helps_names_a_larger_device_and_host_or_another_machine():
    too_large = Request(resolve_model("opt-30b"), load_profile("rtx4090-12ssd"), micro_batch=1)
    rows = {row.name: row for row in rivals_plan(too_large, max_simulations=1).engines if not row.fits}
    both = re.fullmatch(r"devices with (\d+) GB and hosts with (\d+) GiB", rows["zenflow"].nearest or "")
    assert both
    gpu_bytes, host_bytes = int(both[1]) * 1e9, int(both[2]) * 2**30

    def on(hardware: HardwareProfile, name: str, num_devices: int = 1) -> Candidate:
        return engine(dataclasses.replace(too_large, hardware=hardware, num_devices=num_devices), name)

    found = on(larger(too_large, gpu_bytes=gpu_bytes, host_bytes=host_bytes), "zenflow")
    assert (found.missing_bytes, found.iteration_s) == ({}, rows["zenflow"].nearest_iteration_s)
    assert on(larger(too_large, gpu_bytes=gpu_bytes, host_bytes=host_bytes / 2), "zenflow").missing_bytes
    assert on(larger(too_large, gpu_bytes=80e9, host_bytes=host_bytes), "zenflow").missing_bytes
    elsewhere = re.fullmatch(r"--hardware h100 --gpus (\d+) and (\d+) x the batch", rows["gpu-only"].nearest or "")
    assert elsewhere
    count = int(elsewhere[1])
    assert int(elsewhere[2]) == count
    found = on(load_profile("h100"), "gpu-only", count)
    assert (found.missing_bytes, found.iteration_s) == ({}, rows["gpu-only"].nearest_iteration_s)
    assert on(load_profile("h100"), "gpu-only", count // 2).missing_bytes
