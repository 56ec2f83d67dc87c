"""Parts of a calibration, what is listed, and the machine that a profile is of."""

import itertools
import os
import threading
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pytest
import scipy.sparse.csgraph
from amount import small_measurements
from fake_kernels import Calibrated, silent
from forked import Forked, environments
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from hwprofiles import machine
from hwprofiles.catalogue import CATALOGUE, PARTS, Entry
from hwprofiles.files import locked
from hwprofiles.paths import quantities
from hwprofiles.profile import HardwareProfile, connected
from hwprofiles.quantity import Curve, Quantity
from hwprofiles.registry import load_profile, save_profile, update_profile
from ullage.calibrate import CalibrationOptions, calibrate, parse_only
from ullage.calibrate.fabric import groups_that_share, joined


def leaves(kind: Any, path: str) -> Iterator[str]:
    """Yield the paths of all quantities that a type of the schema can have."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is dict:
        yield from leaves(inner[1], f"{path}.*")
    elif inner:  # of optional and annotated types
        yield from itertools.chain.from_iterable(leaves(one, path) for one in inner)
    elif isinstance(kind, type) and issubclass(kind, Quantity | Curve):
        yield path
    elif isinstance(kind, type) and issubclass(kind, BaseModel):
        for name, field in kind.model_fields.items():
            yield from leaves(field.annotation, f"{path}.{name}" if path else name)


def test_every_quantity_is_listed_with_what_measures_it_or_why_nothing_does(calibrated: Calibrated) -> None:
    assert set(leaves(HardwareProfile, "")) == set(CATALOGUE)
    there = quantities(calibrated.profile)
    for path, entry in CATALOGUE.items():
        has = any(name == path or name.rpartition(".")[0] == path.removesuffix(".*") != path for name in there)
        whole = path.partition(".")[0]
        if entry.how in {"fitted", "asked", "unknown"} or whole in {"pfs", "intra_node", "inter_node"}:
            assert not has, f"{path}: measured, but said not to be"
        else:
            assert has, f"{path}: said to be measured"
    assert {entry.part for entry in CATALOGUE.values()} - {""} == set(PARTS)


def test_what_was_repeated_has_a_spread(calibrated: Calibrated) -> None:
    for path, item in quantities(calibrated.profile).items():
        if isinstance(item, Quantity) and CATALOGUE.get(path, Entry("measured", "", "")).how == "measured":
            assert item.p10 is not None, path
            assert item.p90 is not None, path
            assert item.p10 <= item.value <= item.p90


def test_parts_are_measured_again_and_the_rest_stays(calibrated: Calibrated, tmp_path: Path) -> None:
    base = calibrated.profile
    only = parse_only(f"cpu,disk:{tmp_path},pfs:{tmp_path}")
    options = CalibrationOptions(
        quick=True,
        budget_s=1,
        device="host",
        only=only,
        base=base,
        endurance_bytes_per_day=5e12,
        host_memory_bytes=7_000_000_000,
    )
    steps: list[str] = []
    with small_measurements():
        found, pairs = calibrate(options, lambda step, _done, _total: steps.append(step))
    assert steps[0] == "disk"
    assert {"optimizer on the host", "shared file system"} < set(steps)
    assert not {"copies", "products in bf16", "all at once"} & set(steps)
    assert not pairs
    before, after = quantities(base), quantities(found)
    assert after.pop("host.memory_bytes").value == 7e9  # asked for, not measured
    changed = {path for path, item in after.items() if before.get(path) != item}
    parts = {CATALOGUE[path if path in CATALOGUE else f"{path.rpartition('.')[0]}.*"].part for path in changed}
    assert parts == {"cpu", "disk", "pfs"}
    assert {"host.optimizer", "nvme.read", "pfs.create_s"} < changed
    assert (found.host.dram_bytes_per_s, found.device, found.host_link) == (
        base.host.dram_bytes_per_s,
        base.device,
        base.host_link,
    )
    assert found.nvme is not None
    assert found.nvme.endurance_bytes_per_day is not None
    assert found.nvme.endurance_bytes_per_day.provenance.origin == "published"
    assert not list(tmp_path.iterdir())
    again = CalibrationOptions(quick=True, budget_s=1, device="host", only=parse_only(f"disk:{tmp_path}"), base=found)
    with small_measurements():
        saved = calibrate(again, silent)[0].nvme
    assert saved is not None
    assert saved.endurance_bytes_per_day == found.nvme.endurance_bytes_per_day


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpu", "no part 'gpu'; choose of device"),
        ("cpu,", "no part ''"),
        ("cpu:/x", "disk and pfs alone"),
        ("disk:", "disk and pfs alone"),
        ("pfs", "pfs needs a folder"),
    ],
)
def test_parts_that_are_none(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_only(text)


def test_parts_that_cannot_be(calibrated: Calibrated) -> None:
    with pytest.raises(ValueError, match="nothing joins a single device; start several ranks"):
        calibrate(
            CalibrationOptions(budget_s=0.1, device="host", only=parse_only("fabric"), base=calibrated.profile),
            silent,
        )
    with pytest.raises(ValueError, match="of a gpu device"):
        calibrate(CalibrationOptions(device="host", only=parse_only("cpu"), base=load_profile("h100")), silent)
    with pytest.raises(ValueError, match="give the profile whose other parts stay"):
        CalibrationOptions(only=parse_only("cpu"))


def test_a_profile_knows_its_machine(calibrated: Calibrated) -> None:
    profile = calibrated.profile
    here = profile.measured_on
    assert here is not None
    assert machine.differences(profile) == ()
    machine.check_measured_here(profile)
    machine.check_measured_here(load_profile("h100"))
    grown = profile.model_copy(update={"measured_on": here.model_copy(update={"memory_bytes": here.memory_bytes // 4})})
    assert machine.differences(grown) == ()  # it was measured when the machine had a part of its memory
    for changes, words in [
        ({"cpu": "Z80"}, "its CPU is 'Z80'"),
        ({"num_cpus": here.num_cpus + 1}, f"{here.num_cpus + 1} logical CPUs, this one {here.num_cpus}"),
        ({"memory_bytes": 2 * here.memory_bytes}, "of memory, this one"),
        ({"gpus": ("NVIDIA H900",)}, "its GPUs are 'NVIDIA H900', those of this one"),
        ({"drives": ("Punched cards",)}, "its drives 'Punched cards' are not in this one"),
    ]:
        other = profile.model_copy(update={"measured_on": here.model_copy(update=changes)})
        with pytest.raises(ValueError, match=words) as caught:
            machine.check_measured_here(other)
        assert "run `ullage calibrate` here, or use it anyway with --allow-other-machine" in str(caught.value)


def test_drives_and_gpus_are_read_from_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder on a RAID of a partition and a whole drive."""
    device = tmp_path.stat().st_dev
    block = tmp_path / "sys/devices/block"
    for name, model in {"nvme0n1": "Fast 1", "sda": "Slow 2"}.items():
        (block / name / "device").mkdir(parents=True)
        (block / name / "device" / "model").write_text(f"{model}  \n")
    (block / "nvme0n1" / "nvme0n1p1").mkdir()
    (block / "nvme0n1" / "nvme0n1p1" / "partition").write_text("1")
    raid = tmp_path / f"sys/dev/block/{os.major(device)}:{os.minor(device)}"
    (raid / "slaves").mkdir(parents=True)
    (raid / "slaves" / "a").symlink_to(block / "nvme0n1" / "nvme0n1p1")
    (raid / "slaves" / "b").symlink_to(block / "sda")
    gpu = tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0"
    gpu.mkdir(parents=True)
    (gpu / "information").write_text("Model: \t\t NVIDIA H100 80GB HBM3\nIRQ: 3\n")
    monkeypatch.setattr(machine, "_SYS", tmp_path / "sys")
    monkeypatch.setattr(machine, "_PROC", tmp_path / "proc")
    assert machine.drive_names(tmp_path) == ("Fast 1", "Slow 2")
    assert machine.drive_names(tmp_path / "none") == ()
    assert machine.gpu_names() == ("NVIDIA H100 80GB HBM3",)


@given(st.integers(1, 8), st.data())
def test_devices_that_slow_each_other_down_share_a_link(num_devices: int, data: st.DataObject) -> None:
    switch = [data.draw(st.integers(0, 3)) for _ in range(num_devices)]
    slow_downs = {
        (i, j): data.draw(st.floats(1.7, 2.2) if switch[i] == switch[j] else st.floats(0.9, 1.3))
        for i, j in itertools.combinations(range(num_devices), 2)
    }
    groups = groups_that_share(num_devices, slow_downs)
    assert sorted(groups) == sorted(
        tuple(i for i in range(num_devices) if switch[i] == number)
        for number in set(switch)
        if switch.count(number) > 1
    )
    pairs = joined("gpu", num_devices, groups)
    (places,) = connected({place for pair in pairs for place in pair}, pairs)
    assert {f"gpu{i}" for i in range(num_devices)} | {"dram"} <= set(places)


@st.composite
def graphs(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]]]:
    count = draw(st.integers(1, 12))
    return count, draw(st.lists(st.tuples(st.integers(0, count - 1), st.integers(0, count - 1))))


@given(graphs())
def test_connected_components_are_those_of_scipy(case: tuple[int, list[tuple[int, int]]]) -> None:
    count, pairs = case
    ones, others = np.array(pairs, int).reshape(-1, 2).T
    matrix = scipy.sparse.coo_array((np.ones(len(pairs)), (ones, others)), (count, count))
    _, labels = scipy.sparse.csgraph.connected_components(matrix, directed=False)
    found = connected(range(count), pairs)
    assert sorted(found) == sorted([int(i) for i in np.flatnonzero(labels == label)] for label in set(labels.tolist()))


COLLECTIVES = """
import sys
from pathlib import Path
from ullage.calibrate import CalibrationOptions, backend, calibrate_ranks, parse_only, ranks
from hwprofiles.registry import load_profile, save_profile
ranks._QUICK_BUDGET_S = 0.5
backend.HostBackend.pool_bytes = 2**25
ranks.num_cores = lambda: 2
options = CalibrationOptions(
    quick=True, only=parse_only("device,fabric"), base=load_profile(sys.argv[1]), budget_s=0.1
)
steps = []
found = calibrate_ranks(options, lambda step, *_: steps.append(step))
place = Path(sys.argv[2] + str(ranks.distributed.is_initialized()))
if steps:
    save_profile(found, place)
"""


def test_collectives_of_real_ranks(calibrated: Calibrated, tmp_path: Path) -> None:
    base, script = tmp_path / "base.json", tmp_path / "measure.py"
    save_profile(
        calibrated.profile.model_copy(update={"device": calibrated.profile.device.model_copy(update={"num_cores": 1})}),
        base,
    )
    script.write_text(COLLECTIVES)
    ranks = [Forked(forked.script, str(script), str(base), str(tmp_path / "out"), env=each) for each in environments(2)]
    for rank in ranks:
        _, err = rank.communicate()
        assert rank.returncode == 0, err
    found = load_profile(str(tmp_path / "outFalse"))
    assert found.devices_per_node == 2
    assert found.intra_node is not None
    assert found.intra_node.bytes_per_s.provenance.source.startswith(
        "all-gather and reduce-scatter over 2 ranks (gloo)"
    )
    assert 1e7 < found.intra_node.bytes_per_s.value < 1e11
    assert 1e-6 < found.intra_node.latency_s.value < 1
    assert ("host1", "dram") in found.topology
    assert found.host == calibrated.profile.host
    assert found.device.issue_s == calibrated.profile.device.issue_s
    assert found.device.gemm["fp32"] != calibrated.profile.device.gemm["fp32"]  # of both devices at once


def written(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


@pytest.mark.parametrize("version", [1, 2])
def test_limits_of_nested_control_groups_are_those_of_the_tightest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    """Page cache that the kernel would drop is free, and a quota may be a part of a core more than it allows."""
    monkeypatch.setattr(machine, "_PROC", tmp_path)
    monkeypatch.setattr(machine, "_CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: set(range(8)))
    written(tmp_path, meminfo="MemAvailable:    1000000 kB")
    lines = ["4:memory:/outer/own", "3:cpu,cpuacct:/outer/own"] if version == 1 else ["0::/outer/own"]
    written(tmp_path / "self", cgroup="\n".join(lines) + "\n")
    assert (machine.num_cores(), machine.available_memory_bytes()) == (8, 1_024_000_000)
    if version == 1:
        memory, cpu = tmp_path / "cgroup/memory", tmp_path / "cgroup/cpu"
        written(memory / "outer/own", memory__limit_in_bytes=str(2**63 - 4096), memory__usage_in_bytes="100000000")
        cached = "inactive_file 1\ntotal_inactive_file 20000000\n"
        names = ("memory__limit_in_bytes", "memory__usage_in_bytes")
        written(cpu / "outer/own", cpu__cfs_quota_us="-1\n", cpu__cfs_period_us="100000\n")
        written(cpu / "outer", cpu__cfs_quota_us="250000\n", cpu__cfs_period_us="100000\n")
    else:
        memory = cpu = tmp_path / "cgroup"
        written(memory / "outer/own", memory__max="max\n", memory__current="100000000\n")
        cached = "inactive_file 20000000\nactive_file 3\n"
        names = ("memory__max", "memory__current")
        written(cpu / "outer/own", cpu__max="max 100000\n")
        written(cpu / "outer", cpu__max="250000 100000\n")
    written(memory / "outer", **dict(zip(names, ("300000000\n", "110000000\n"), strict=True)), memory__stat=cached)
    assert (machine.num_cores(), machine.available_memory_bytes()) == (3, 300_000_000 - 90_000_000)


def test_two_who_measure_parts_of_one_profile_both_keep_theirs(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    before = load_profile("epyc-turin-2c")
    save_profile(before, path)
    host = before.host.model_copy(update={"num_optimizer_cores": before.host.num_optimizer_cores + 1})
    device = before.device.model_copy(update={"memory_bytes": before.host.memory_bytes})
    update_profile(path, before, before.model_copy(update={"host": host}))
    found = update_profile(path, before, before.model_copy(update={"device": device}))
    assert found == load_profile(str(path)) == before.model_copy(update={"host": host, "device": device})
    with locked(tmp_path):
        other = threading.Thread(target=update_profile, args=(path, found, before))
        other.start()
        other.join(0.1)
        assert other.is_alive(), "it waits"
    other.join()
    assert load_profile(str(path)) == before
