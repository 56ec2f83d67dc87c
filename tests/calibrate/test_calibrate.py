import errno
import multiprocessing
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from fake_kernels import HOST, Calibrated, silent
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from hwprofiles import machine
from hwprofiles.machine import available_memory_bytes
from hwprofiles.profile import NAME_PATTERN, HardwareProfile, NarrowUpdate, Storage
from hwprofiles.quantity import Provenance, Quantity
from ullage.calibrate import (
    CalibrationOptions,
    calibrate,
    disk,
)
from ullage.calibrate.backend import adamw_state
from ullage.calibrate.compute import ComputeProbe
from ullage.calibrate.run import _divide_memory
from ullage.calibrate.sampling import (
    SUSTAINED,
    Case,
    Summary,
    build_curve,
    clock_of,
    concurrently,
    median_s,
    sample,
    sample_groups,
    summarize,
    wall_clock,
)
from ullage.calibrate.traffic import fewest_threads, fit_capacity, optimizer_by_threads


def test_issue_time_is_what_elementwise_kernels_do_not_have_yet(calibrated: Calibrated) -> None:
    device = calibrated.profile.device
    floor_s = device.elementwise.points[0].median_s
    assert device.issue_s.value == pytest.approx(HOST[0][0] - floor_s)
    assert device.step_s is not None
    assert device.step_s.value == pytest.approx(HOST[1][0])
    assert device.gradient_norm is not None


def test_elementwise_kernels_are_measured_in_both_types(calibrated: Calibrated) -> None:
    device = calibrated.profile.device
    assert device.elementwise_fp32 is not None
    for curve, dtype in ((device.elementwise, "bf16"), (device.elementwise_fp32, "fp32")):
        assert f"mean of {dtype} add" in curve.provenance.source
        assert len(curve.points) >= 3  # how many more depends on how steady the machine is


def test_backward_of_attention_is_measured_apart(calibrated: Calibrated) -> None:
    forward, backward = calibrated.profile.device.attention, calibrated.profile.device.attention_backward
    assert backward is not None
    for dtype in ("fp32", "bf16"):
        assert "the backward" in backward[dtype].provenance.source
        assert "forward" in forward[dtype].provenance.source
        assert backward[dtype].points[0].size == 2.5 * forward[dtype].points[0].size
        # Five products where there were two, on the same sequences, however slow their kernels are.
        assert backward[dtype].points[0].median_s > forward[dtype].points[0].median_s


def provenances(model: BaseModel) -> Iterator[Provenance]:
    for value in dict(model).values():
        for item in value.values() if isinstance(value, dict) else [value]:
            if isinstance(item, Provenance):
                yield item
            elif isinstance(item, BaseModel):
                yield from provenances(item)


def test_profile_survives_json(calibrated: Calibrated) -> None:
    assert HardwareProfile.model_validate_json(calibrated.profile.model_dump_json()) == calibrated.profile
    assert calibrated.profile.name == "here"


@given(st.none() | st.integers(10**6, 10**9), st.none() | st.integers(10**6, 10**14))
def test_memory_is_divided_as_asked_for(device_bytes: int | None, host_bytes: int | None) -> None:
    options = CalibrationOptions(device_memory_bytes=device_bytes, host_memory_bytes=host_bytes)
    device, host = _divide_memory(options, on_gpu=False)
    assert device.value == (device_bytes or device.value)
    # What is asked for may be more than is free: the memory of a virtual machine may grow as it is used.
    assert host.value == host_bytes or (host_bytes is None and device.value + host.value <= available_memory_bytes())
    assert (host.provenance.source == "as asked for") == (host_bytes is not None)


def test_every_value_is_measured(calibrated: Calibrated) -> None:
    found = list(provenances(calibrated.profile))
    assert len(found) > 15
    for provenance in found:
        assert provenance.origin == "measured"
        assert provenance.num_samples
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", provenance.date or "")


def test_values_are_plausible_against_each_other(calibrated: Calibrated) -> None:
    profile = calibrated.profile
    device, host, link = profile.device, profile.host, profile.host_link
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 3 * device.memory_bytes.value == pytest.approx(host.memory_bytes.value, rel=1e-6)
    assert device.memory_bytes.value + host.memory_bytes.value < physical
    assert device.num_cores + host.num_optimizer_cores <= max(host.num_cores, 2)
    assert link.both_bytes_per_s.value <= link.down.best_rate_per_s() + link.up.best_rate_per_s()
    # A copy here reads and writes the same DRAM that everything shares.
    assert host.dram_bytes_per_s.value > 0.5 * 2 * link.down.time_s(2**24) ** -1 * 2**24
    assert device.gemm["bf16"].best_rate_per_s() > device.gemm["bf16"].points[0].size / 1.0
    assert device.attention["fp32"].best_rate_per_s() < 3 * device.gemm["fp32"].best_rate_per_s()
    assert device.gemm["fp8"].best_rate_per_s() > 0  # emulated
    assert device.gemm["fp8"].provenance.origin == "measured"
    assert 0 <= device.gemm_rows_half.value < 2048
    assert link.num_cores_per_copy.value == 1
    assert profile.nvme is not None
    assert profile.nvme.capacity_bytes.value <= shutil.disk_usage(calibrated.scratch).total


def test_a_product_takes_what_the_curve_says(calibrated: Calibrated) -> None:
    device = calibrated.profile.device
    x, w = torch.rand(512, 768), torch.rand(768, 768)
    threads = torch.get_num_threads()
    torch.set_num_threads(device.num_cores)
    try:
        (found,) = sample([Case(1, lambda: torch.nn.functional.linear(x, w))], wall_clock, 0.3)
    finally:
        torch.set_num_threads(threads)
    predicted_s = device.gemm["fp32"].time_s(2 * 512 * 768**2) * (1 + device.gemm_rows_half.value / 512)
    assert 0.4 < found.median_s / predicted_s < 2.5


@given(st.floats(0, 1000), st.lists(st.floats(1e-9, 1e-7), min_size=6, max_size=6))
def test_the_correction_for_few_rows_makes_no_rate_that_no_product_has(
    rows_half: float, per_row_s: list[float]
) -> None:
    rows, hiddens = (8, 64, 512), (16, 32)

    def measured(cases: list[Case], _budget_s: float) -> list[Summary]:
        return [summarize([case.size * s * case.scale]) for case, s in zip(cases, per_row_s, strict=True)]

    backend = SimpleNamespace(kind="host", shapes=(rows, hiddens), sample=measured)
    probe = ComputeProbe(backend, {}, torch.empty(0))  # type: ignore[arg-type]
    curve = probe._products(lambda r, h, scale: Case(2.0 * r * h**2, int, scale), "bf16", rows_half, 1.0)
    assert curve.best_rate_per_s() <= max(1 / s for s in per_row_s) * (1 + rows_half / 512) * (1 + 1e-9)


def test_pairs_are_reported(calibrated: Calibrated) -> None:
    assert any("copy" in pair.what and "AdamW" in pair.what for pair in calibrated.pairs)
    assert all(0.3 < pair.slow_down < 30 for pair in calibrated.pairs)


def test_progress_counts_up_and_nothing_is_left(calibrated: Calibrated) -> None:
    done = [step[1] for step in calibrated.steps]
    assert done[0] == 0
    assert done == sorted(set(done)), "every step has its time"
    assert calibrated.steps[-1] == ("done", pytest.approx(3.0), pytest.approx(3.0))
    assert not list(calibrated.scratch.iterdir())
    assert torch.get_num_threads() == calibrated.threads_before


@pytest.mark.parametrize("stop_at", ["disk", "products of few rows"])
def test_interrupt_leaves_nothing(stop_at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    seen: list[str] = []
    write = disk.Disk._write

    def interrupted_write(self: Any, offset: int, memory: memoryview) -> None:
        write(self, offset, memory)
        assert next((tmp_path / ".cache").iterdir()).name.startswith("ullage-")
        raise KeyboardInterrupt

    def progress(step: str, done: float, total: float) -> None:
        del done, total
        seen.append(step)
        if step == stop_at != "disk":
            raise KeyboardInterrupt

    if stop_at == "disk":
        monkeypatch.setattr(disk.Disk, "_write", interrupted_write)
    threads = torch.get_num_threads()
    with pytest.raises(KeyboardInterrupt):
        calibrate(CalibrationOptions(quick=True, budget_s=0.1, device="host"), progress)
    assert seen[-1] == stop_at
    assert not list((tmp_path / ".cache").iterdir())
    assert torch.get_num_threads() == threads


def test_scratch_file_has_no_name_even_while_in_use(tmp_path: Path) -> None:
    with disk.open_disk(tmp_path, quick=True):
        assert not list(tmp_path.iterdir())


def probe_disk(folder: Path, budget_s: float) -> Storage:
    with disk.open_disk(folder, quick=True) as opened:
        return opened.probe(budget_s)


def refuse(number: int) -> Callable[..., None]:
    def call(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    return call


@pytest.mark.parametrize(
    ("function", "number", "message"),
    [
        ("posix_fallocate", errno.ENOSPC, r"needs 322 MB there; free some space"),
        ("open", errno.EACCES, r"Permission denied.*check permissions.*another folder"),
        ("open", errno.EROFS, r"Read-only file system"),
        ("pwrite", errno.EDQUOT, r"free some space"),
    ],
)
def test_disk_refusals_name_the_remedy(
    function: str, number: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, function, refuse(number))
    with pytest.raises(ValueError, match=message) as caught:
        probe_disk(tmp_path, 0.1)
    assert str(tmp_path) in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_full_disk_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=2**28))
    with pytest.raises(ValueError, match="free some space"):
        probe_disk(tmp_path, 0.1)


def test_scratch_directory_must_exist(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "missing", tmp_path / "file"):
        with pytest.raises(ValueError, match="needs an existing directory; create it"):
            probe_disk(path, 0.1)


def test_disk_without_direct_io(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "enable_direct_io", lambda _descriptor: False)
    storage = probe_disk(tmp_path, 0.2)
    assert "page cache" in storage.read.provenance.source
    assert not list(tmp_path.iterdir())


def test_options_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"device_cores is 0; give a positive number"):
        CalibrationOptions(device_cores=0)
    with pytest.raises(ValueError, match="choose 'gpu' or 'host'"):
        CalibrationOptions(device="tpu")
    with pytest.raises(ValueError, match="name is 'My box'"):
        CalibrationOptions(name="My box")
    for options in (
        CalibrationOptions(device="host", device_cores=9999),
        CalibrationOptions(device_memory_bytes=2**60),
    ):
        with pytest.raises(ValueError, match=r"(9999|1152921504606846976), but .* give (fewer|another number)"):
            calibrate(options, silent)


@given(st.text())
def test_profile_name_is_valid(hostname: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: hostname)
        assert re.fullmatch(NAME_PATTERN, machine.profile_name())


times = st.floats(1e-6, 1e3)


@given(st.lists(times, min_size=1, max_size=40))
def test_summary_is_ordered_and_robust(samples: list[float]) -> None:
    found = summarize(samples)
    assert min(samples) <= found.p10_s <= found.median_s <= found.p90_s <= max(samples) * (1 + 1e-12)
    assert summarize(samples, SUSTAINED).median_s == pytest.approx(np.median(samples)), "no sample is too fast there"
    half_disturbed = summarize([*samples, *(1e6 + s for s in samples)])
    assert half_disturbed.median_s <= np.median(samples) + 1e-12


@given(st.lists(st.tuples(st.integers(1, 20), times, times, times), min_size=1, max_size=20))
def test_any_noise_gives_a_valid_curve(rows: list[tuple[int, float, float, float]]) -> None:
    summaries = [Summary(*sorted(row[1:]), 5) for row in rows]
    curve = build_curve("bytes", [float(row[0]) for row in rows], summaries, "test")  # the schema checks monotony
    assert len(curve.points) == len({row[0] for row in rows})
    assert curve.provenance.num_samples == 5 * len(rows)


def test_moved_points_and_missing_sizes_are_stated() -> None:
    falling = [Summary(t, t, t, 1) for t in (2.0, 1.0, 3.0)]
    source = build_curve("bytes", [1, 2, 3, 4], falling, "test").provenance.source
    assert "2 of 3 points moved" in source
    assert "the 1 largest sizes left out" in source
    assert ";" not in build_curve("bytes", [1, 2], falling[1:], "test").provenance.source


def test_sizes_too_large_for_the_budget_are_left_out() -> None:
    cases = [Case(s, lambda s=s: time.sleep(s)) for s in (0.001, 0.002, 0.3, 100.0)]
    assert len(sample(cases, wall_clock, 1.5)) == 3, "warming up with the third takes more than a third of the budget"
    assert len(sample(cases, wall_clock, 0.5)) == 2, "three rounds with the third would take more than the budget"


@given(st.floats(1e9, 1e12), st.lists(st.floats(1e8, 1e13), min_size=1, max_size=8))
def test_capacity_explains_slow_downs(capacity: float, demands: list[float]) -> None:
    slow_downs = [s if (s := max(d / capacity, 1.0)) >= 1.05 else 1.0 for d in demands]
    found = fit_capacity(demands, slow_downs)
    for demand, slow_down in zip(demands, slow_downs, strict=True):
        assert max(demand / found, 1.0) == pytest.approx(slow_down, rel=0.06)


def test_capacity_follows_most_groups() -> None:
    assert fit_capacity([100.0, 100.0, 100.0], [2.0, 2.0, 1.0]) == pytest.approx(50.0)


def test_groups_run_at_the_same_time() -> None:
    """Of three units of time, two need the lock: alone a repetition takes three, two together need four each."""
    lock = threading.Lock()

    def work() -> None:
        with lock:
            time.sleep(0.04)
        time.sleep(0.02)

    alone, paired = sample_groups([[work], [work, work]], 2.0)
    assert paired.shape[1] == 2
    assert np.mean(median_s(paired)) == pytest.approx(median_s(alone)[0] * 4 / 3, rel=0.2)


def test_concurrent_calls_pass_errors_on() -> None:
    def fail() -> None:
        raise ZeroDivisionError

    for calls in ([fail, lambda: None], [lambda: None, fail]):
        with pytest.raises(ZeroDivisionError):
            concurrently(calls, 0.01)


def _hog(core: int) -> None:
    os.sched_setaffinity(0, {core})
    while True:
        pass


@pytest.mark.skipif(not Path("/proc/thread-self/schedstat").exists(), reason="nobody counts waiting for a core")
def test_waiting_for_a_core_does_not_count() -> None:
    core = min(os.sched_getaffinity(0))
    before = os.sched_getaffinity(0)
    hog = multiprocessing.get_context("spawn").Process(target=_hog, args=(core,), daemon=True)

    def work() -> None:
        sum(range(1_000_000))

    try:
        os.sched_setaffinity(0, {core})
        hog.start()
        time.sleep(1.5)  # until it spins
        begin_s, computed_s = time.perf_counter(), time.thread_time()
        found_s = sum(wall_clock(work, 3) for _ in range(10)) / 10
        elapsed_s, computed_s = (time.perf_counter() - begin_s) / 30, (time.thread_time() - computed_s) / 30
    finally:
        os.sched_setaffinity(0, before)
        if hog.is_alive():
            hog.kill()
            hog.join()
    assert elapsed_s > 1.5 * computed_s
    assert found_s < 1.3 * computed_s


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, hwprofiles, hwprofiles.profile; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@given(st.dictionaries(st.integers(1, 64), st.floats(1, 1e10), min_size=1), st.integers(1, 64))
def test_no_more_threads_than_help(rates: dict[int, float], at_most: int) -> None:
    provenance = Provenance(origin="measured", source="test")
    found = {n: Quantity(value=rate, unit="params_per_s", provenance=provenance) for n, rate in rates.items()}
    chosen = fewest_threads(found, at_most)
    assert chosen <= at_most
    allowed = {n: rate for n, rate in rates.items() if n <= at_most}
    if allowed:
        assert allowed[chosen] >= 0.97 * max(allowed.values())
        assert all(rate < 0.97 * max(allowed.values()) for n, rate in allowed.items() if n < chosen)


def test_the_cores_that_training_leaves_to_updates_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ullage.calibrate.traffic._THREADS_PARAMS", 2**10)
    assert set(optimizer_by_threads(adamw_state(2**10), 16, 14, 1.0)) == {1, 2, 4, 8, 14, 16}


def test_rates_against_threads_are_in_the_profile(calibrated: Calibrated) -> None:
    host = calibrated.profile.host
    assert host.optimizer_by_threads is not None
    assert min(host.optimizer_by_threads) == 1
    assert max(host.optimizer_by_threads) <= host.num_cores
    assert host.num_optimizer_cores in host.optimizer_by_threads


def test_updates_with_state_in_fewer_bytes_are_timed_per_parameter(calibrated: Calibrated) -> None:
    found = calibrated.profile.host.narrow_update_s
    assert found is not None
    assert set(found) == set(get_args(NarrowUpdate))
    assert all(0 < each.value < 1e-8 and each.provenance.num_samples for each in found.values()), "a sum takes less"


def test_work_of_other_threads_is_timed_whole() -> None:
    """The caller sleeps and wakes; what it waits for is the work, whoever had the cores meanwhile."""
    assert clock_of(1) is wall_clock
    with ThreadPoolExecutor(2) as pool:
        call = lambda: list(pool.map(time.sleep, [0.01, 0.02]))  # noqa: E731
        assert clock_of(2)(call, 3) >= 0.02


def test_what_checkpoints_take_of_the_host_is_measured(calibrated):
    host = calibrated.profile.host
    rates = [host.hash_bytes_per_s, host.fresh_bytes_per_s, host.serialise_bytes_per_s]
    assert all(rate.provenance.origin == "measured" and rate.provenance.num_samples >= 3 for rate in rates)
    hashed, touched, serialised = (rate.value for rate in rates)
    assert hashed > serialised, "a file of torch.save has its own checksum, and a copy"
    assert 1e8 < touched < host.dram_bytes_per_s.value
