"""Calibration of a GPU: its timing on a simulated clock, and all of it on the virtual GPU of the executor's tests."""

import ctypes
import itertools
import json
import os
import sys
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_kernels import HOST, HOST_TIMES, put_fakes, silent
from forked import completed
from hypothesis import given
from hypothesis import strategies as st

from executor.devices.cores import Cores
from hwprofiles import machine
from hwprofiles.profile import ATTENTION_TYPES, HardwareProfile
from planner.lowering import lower
from planner.models.kernels import num_kernels
from planner.schedule.tasks import Lane
from ullage.calibrate import CalibrationOptions, calibrate, kernels, traffic
from ullage.calibrate.backend import CudaBackend, HostBackend, adamw_state, sensors
from ullage.calibrate.compute import ComputeProbe
from ullage.calibrate.run import budgets_s, spare_cores
from ullage.calibrate.sampling import SUSTAINED, Call, Case, Floats, Manner
from ullage.calibrate.traffic import NOTICEABLE, TrafficProbe, pool_params


class SimulatedGpu(CudaBackend):
    """A GPU on a clock of its own. Calls are slow the first time, and too fast unless products ran before them."""

    def __init__(self, first_s: float, allowed_s: float) -> None:
        self.now_s, self.hot_until_s, self._first_s = 0.0, -1.0, first_s
        self.device, self.first_calls_s, self.soak_s = torch.device("cpu"), allowed_s, 0.0
        self._read_sensors = lambda: (1755.0, 640.0)

    def case(self, size: float) -> Case:
        called: list[float] = []

        def call() -> None:
            self.now_s += size if self.now_s <= self.hot_until_s or not called else 0.8 * size
            self.now_s += 0.0 if called else self._first_s
            called.append(size)
            self.hot_until_s = self.now_s

        return Case(size, call)

    def _lead(self, seconds: float) -> None:
        self.now_s += seconds
        self.hot_until_s = self.now_s if seconds > 1e-3 else self.hot_until_s

    def time_s(self, call: Call, num_calls: int, readings: list[tuple[float, float]] | None = None) -> float:
        begin_s = self.now_s
        for _ in range(num_calls):
            call()
        if readings is not None and (reading := self._read_sensors()):
            readings.append(reading)
        taken_s = self.now_s - begin_s
        self.now_s += 1e-4  # the host's, in which the GPU cools down
        return taken_s / num_calls


@given(st.lists(st.floats(1e-6, 1e-3), min_size=2, max_size=8, unique=True), st.floats(0.0, 1.0))
def test_slow_first_calls_cost_no_size_and_clocks_are_sustained(sizes: list[float], first_s: float) -> None:
    gpu = SimulatedGpu(first_s, allowed_s=20.0)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(time, "perf_counter", lambda: gpu.now_s)
        patched.setattr(torch.cuda, "synchronize", lambda _device: None)
        found = gpu.sample([gpu.case(size) for size in sorted(sizes)], 1.0)
    assert [one.median_s for one in found] == pytest.approx(sorted(sizes))
    assert gpu.now_s <= len(sizes) * first_s + 1.5, "first calls are all that comes on top"
    assert all((one.mhz, one.watts, one.manner) == (1755.0, 640.0, SUSTAINED) for one in found)


def test_first_calls_have_a_limit_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimulatedGpu(first_s=1.0, allowed_s=3.0)
    monkeypatch.setattr(time, "perf_counter", lambda: gpu.now_s)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: None)
    counts = [len(gpu.sample([gpu.case(size) for size in (1e-5, 1e-4, 2e-4, 3e-4)], 0.5)) for _ in range(2)]
    assert counts == [3, 2], "two sizes stay always"


@pytest.mark.parametrize("quick", [True, False])
def test_a_fast_gpu_is_measured_at_the_sizes_of_training_in_time(quick: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels take what they would on an H100; training has 8 TFLOP a product, 0.5 in attention, and 1 GB elsewhere."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "simulated")
    gpu = SimulatedGpu(first_s=0.02, allowed_s=20.0)
    vars(gpu).update({**vars(CudaBackend(quick=quick)), **vars(gpu)})
    monkeypatch.setattr(time, "perf_counter", lambda: gpu.now_s)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: None)

    def linear(_: object, dtype: str, rows: int, hidden: int, correction: float = 1.0) -> Case:
        flop, num_bytes = 2.0 * rows * hidden**2, 4 * (hidden**2 + 2 * rows * hidden)
        call = gpu.case(3 * max(4e-6, flop / (6e14 if dtype == "bf16" else 5e13), num_bytes / 2.7e12)).call
        return Case(flop, call, correction / 3)

    def attend(_: object, dtype: str, shape: tuple[int, ...], _keys: object, *, backward: bool) -> Call:
        batch, heads, seq, width = shape
        flop = (5 if backward else 2) * batch * heads * seq**2 * width
        return gpu.case(6e-6 + flop / (4e14 if dtype == "bf16" else 1.5e13)).call

    def elementwise(_: object, dtype: str, count: int) -> Case:
        num_bytes = count * (5.5 if dtype == "bf16" else 10)
        return Case(num_bytes, gpu.case(4 * (2.5e-6 + num_bytes / 2.75e12)).call, 1 / 4)

    for name, simulated in (("_linear_mix", linear), ("_attention_call", attend), ("_elementwise_mix", elementwise)):
        monkeypatch.setattr(ComputeProbe, name, simulated)
    probe, steps_s = ComputeProbe(gpu, {}, torch.empty(0)), budgets_s(CalibrationOptions(quick=quick), on_gpu=True)
    measure = [
        ("products of few rows", lambda budget_s: probe.gemm_rows_half(budget_s) and {}, 0.0),
        ("products in bf16", lambda budget_s: {"": probe.gemm("bf16", 0.0, budget_s)}, 8e12),
        ("products in fp32", lambda budget_s: {"": probe.gemm("fp32", 0.0, budget_s)}, 1e12),
        ("elementwise kernels in bf16", lambda budget_s: {"": probe.elementwise("bf16", budget_s)}, 1e9),
        ("elementwise kernels in fp32", lambda budget_s: {"": probe.elementwise("fp32", budget_s)}, 1e9),
        ("attention in bf16", lambda budget_s: probe.attention("bf16", budget_s), 2.5e11),
        ("attention in fp32", lambda budget_s: probe.attention("fp32", budget_s), 2.5e11),
        ("backward of attention in bf16", lambda budget_s: probe.attention("bf16", budget_s, backward=True), 6e11),
        ("backward of attention in fp32", lambda budget_s: probe.attention("fp32", budget_s, backward=True), 6e11),
    ]
    allowed_s = 0.0
    for step, call, largest in measure:
        budget_s = steps_s[step]
        allowed_s += 1.1 * budget_s
        for kind, curve in call(budget_s).items():
            assert curve.points[-1].size >= largest * (2 if "128" in kind else 1), (step, kind)
            assert "left out" not in curve.provenance.source
    assert gpu.now_s < allowed_s + 10.0, "first calls come on top"


def test_the_sensors_of_the_gpu_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    library = _management()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: {"libnvidia-ml.so.1": library}[name])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: types.SimpleNamespace(uuid="1-2"))
    assert sensors(torch.device("cpu"))() == (1755.0, 640.5)
    library.nvmlDeviceGetPowerUsage = lambda *_: 3  # not supported
    assert sensors(torch.device("cpu"))() is None
    library.nvmlInit_v2 = lambda: 9  # the driver is not loaded
    assert sensors(torch.device("cpu"))() is None


def _management() -> types.SimpleNamespace:
    """Return NVIDIA's management library, as far as it is used."""

    def fill(value: int, place: Any) -> int:
        place._obj.value = value
        return 0

    return types.SimpleNamespace(
        nvmlInit_v2=lambda: 0,
        nvmlDeviceGetHandleByUUID=lambda name, place: fill(1, place) if name == b"GPU-1-2" else 6,
        nvmlDeviceGetClockInfo=lambda _handle, kind, place: fill({1: 1755}[kind], place),
        nvmlDeviceGetPowerUsage=lambda _handle, place: fill(640_500, place),
    )


@given(st.integers(0, 1 << 30))
def test_updates_are_measured_on_more_than_caches_hold(cache_bytes: int) -> None:
    num_params = pool_params(cache_bytes)
    assert 2**24 <= num_params <= 2**27
    assert 16 * num_params >= min(4 * cache_bytes, 2**31)


def test_caches_of_all_sockets_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_SYS", tmp_path)
    assert machine.cache_bytes() == 0
    for core in range(4):
        place = tmp_path / f"devices/system/cpu/cpu{core}/cache/index3"
        place.mkdir(parents=True)
        (place / "size").write_text("32768K\n")
        (place / "shared_cpu_list").write_text("0-1\n" if core < 2 else "2-3\n")
    assert machine.cache_bytes() == 2 * 32 * 2**20


@given(st.integers(1, 256))
def test_calibration_and_training_update_on_the_same_cores(num_cores: int) -> None:
    cores = Cores.of(range(num_cores), None, is_bound=False, on_device=True)
    gpu = types.SimpleNamespace(kind="gpu", num_cores=0)
    assert spare_cores(gpu, num_cores, 1) == cores.num_updating  # type: ignore[arg-type]


class _CopyEngines:
    """Copies of 50 bytes a second each way, which cores take no part in."""

    cores_per_copy, num_cores, dram_bytes_per_copied_byte, pair_bytes, pair_copies, copy_pool_bytes = 0, 0, 1, 50, 1, 50

    def copier(self, _direction: str) -> object:
        return lambda _num_bytes: None

    def blocking(self, call: object) -> object:
        return call if call == "GEMM" else "copy"


@pytest.mark.parametrize(
    ("of_host", "expected"),
    [(CudaBackend.of_host, "median"), (HostBackend.of_host, "median of the fastest quarter")],
    ids=("gpu", "host"),
)
def test_updates_beside_a_gpu_are_as_fast_as_most_of_them(of_host: Manner, expected: str) -> None:
    """Neighbours slow down two of three updates, as they will in training."""
    pauses = itertools.cycle([0.002, 0.006, 0.006])
    backend = types.SimpleNamespace(optimizer_sizes=(4, 8), of_host=of_host)
    probe = TrafficProbe(backend, adamw_state(8), 2, 4)  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(kernels, "cpu_adamw", lambda *_: time.sleep(next(pauses)))
        curve = probe.optimizer(0.3)
    assert curve.provenance.source.endswith(expected)
    assert (curve.points[-1].median_s > 0.004) == (expected == "median")


@given(st.floats(1.0, 2.0), st.floats(163, 250))
def test_a_full_link_says_nothing_about_host_memory(link_slows: float, capacity: float) -> None:
    """Copies slow each other down on their link, and host memory slows them and an update."""
    demand = 28 * 4 + 2 * 50 / link_slows
    memory_slows = max(demand / capacity, 1.0)

    def together(groups: list[list[object]], _budget_s: float) -> list[Floats]:
        every = []
        for group in groups:
            is_copy = [call == "copy" for call in group]
            slows = link_slows if sum(is_copy) > 1 else 1.0
            everywhere = memory_slows if len(group) == 3 and "GEMM" not in group else 1.0
            every.append(np.array([everywhere * (slows if copies else 1.0) for copies in is_copy]))
        return [times[None] for times in every]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(traffic, "sample_groups", together)
        probe = TrafficProbe(_CopyEngines(), adamw_state(16), 1, 4)  # type: ignore[arg-type]
        dram, _ = probe.contention("GEMM", None, 1.0)  # type: ignore[arg-type]
    largest = max(demand, 28 * 4 + 50)
    assert dram.value == pytest.approx(capacity if memory_slows >= NOTICEABLE else largest)


class _SmallGpu(CudaBackend):
    """Sizes for a GPU that is a CPU core."""

    pool_bytes, pair_bytes, soak_s, lead_side = 2**20, 2**18, 0.0, 128

    def __init__(self, *, quick: bool) -> None:
        super().__init__(quick=quick)
        self.shapes, self.beside = ((32, 64, 128), (32, 64, 128)), (32, 64)
        self.seq_lens, self.backward_seq_lens, self.batch = (8, 16), (16,), 1
        self.most_elements, self.optimizer_sizes, self.copy_pool_bytes = 4**6, (2**10, 2**12), 2**20


def _calibrated() -> None:
    """Print the profile of the virtual GPU, pairs of activities, and the lanes of the model that issue time is of."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "executor"))
    from virtual import present  # noqa: PLC0415 - of another folder

    def kernel(master: torch.Tensor, *_state: torch.Tensor) -> None:
        master.mul_(0.9)

    planned, sleeping, waited_s, prepare = [], [], 0.03, kernels.prepare_session

    def wait(*_: object) -> float:
        time.sleep(waited_s)
        return 0.0

    with present(), pytest.MonkeyPatch.context() as patched:
        event = torch.cuda.Event
        patched.setattr(torch.cuda, "Event", lambda **settings: sleeping.append(settings) or event(**settings))
        properties = types.SimpleNamespace(uuid="1-2")
        patched.setattr(torch.cuda, "get_device_properties", lambda _device: properties)
        patched.setattr(ctypes, "CDLL", lambda _name: _management())
        patched.setattr("ullage.calibrate.run.CudaBackend", _SmallGpu)
        patched.setattr(traffic, "_POOL_PARAMS", 2**22)
        patched.setattr(traffic, "_MOST_POOL_PARAMS", 2**22)
        patched.setattr(traffic, "_THREADS_PARAMS", 2**12)
        patched.setattr("ullage.calibrate.run._NUM_BYTES", 2**20)
        patched.setattr("ullage.calibrate.disk._QUICK_FILE_BYTES", 2**26)
        patched.setattr("ullage.calibrate.sampling.NUM_WINDOWS", 3)
        taken = []  # by libraries, once they were used
        patched.setattr(torch.cuda, "mem_get_info", lambda: ((3 << 30) - sum(taken), 4 << 30))
        put_fakes(patched)
        patched.setattr(kernels, "device_adamw", kernel)
        patched.setattr(kernels, "host_times", lambda _device: taken.append(100) or HOST)
        with torch.device("cuda"):  # as a user may have it
            profile, pairs = calibrate(CalibrationOptions(quick=True, budget_s=2.0), silent)
        sleeps = {"blocking": True} in sleeping
        patched.setattr(kernels, "prepare_session", lambda *given: planned.append(given[2:4]) or prepare(*given))
        patched.setattr(torch.Tensor, "item", wait)
        patched.setattr(torch.cuda, "synchronize", wait)
        issue_s, step_s = HOST_TIMES("cuda")
        ((units, decisions),) = planned
        num_issued = sum(num_kernels(unit.forward) + num_kernels(unit.backward) for unit in units)
        num_tensors = sum(len(unit.parameters) for unit in units)
        too_long_s = 1.3 * waited_s  # what is issued takes much of that by itself, and more with a wait
        lanes = sorted({task.lane.name for task in lower(units, decisions, asynchronous=True).tasks})
        print(  # noqa: T201 - to the test
            json.dumps(
                {
                    "profile": profile.model_dump(mode="json", exclude_none=True),
                    "pairs": [pair.what for pair in pairs],
                    "lanes": lanes,
                    "sleeps": sleeps,
                    "left": (2 << 30) - sum(taken),
                    "waited": max(min(issue_s) * num_issued, min(step_s) * num_tensors) >= too_long_s,
                }
            ),
            flush=True,
        )
    os._exit(0)  # at once, as a virtual device wants it


def test_a_gpu_is_calibrated_with_all_kinds_of_attention_and_its_sensors_beside_each_number() -> None:
    done = completed(_calibrated)
    if "NoVirtualGpuError" in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    device = HardwareProfile.model_validate(found["profile"]).device
    assert device.attention_backward is not None
    assert set(device.attention) == set(device.attention_backward) == set(ATTENTION_TYPES)
    assert "head dimension 128, 4 query heads per key-value head" in device.attention["bf16-128-gqa"].provenance.source
    assert "head dimension 64" in device.attention["bf16"].provenance.source
    assert "per key-value head" not in device.attention["bf16"].provenance.source
    curves = (*device.gemm.values(), *device.attention.values(), device.elementwise, device.optimizer)
    for curve in curves:
        assert curve.provenance.source.endswith(", median, each after large products, at 1,755 MHz and 640 W")
    assert set(device.gemm) == {"bf16", "fp32", "fp8"}
    assert device.memory_bytes.value == found["left"] < 2 << 30, "1 GiB less than what libraries have left"
    assert device.memory_bytes_per_s.provenance.source.endswith(", at 1,755 MHz and 640 W")
    assert {"copy down beside copy down", "GEMM beside copy down beside copy up"} <= set(found["pairs"])
    assert not {Lane.H2D.name, Lane.D2H.name, Lane.CPU.name} & set(found["lanes"]), "kernels would wait for copies"
    assert found["sleeps"], "threads that copy would take cores from updates"
    assert not found["waited"], "host time is without waiting for the GPU"
