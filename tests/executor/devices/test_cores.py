"""Shares of cores: who gets which, what all threads of a rank may use, and that it is given back."""

import contextlib
import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plans import mixed
from training import Task, decide, prepare

from executor.devices.cores import Cores, divide, in_order, open_cores, ranges, take_cores

linux = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs a system that can bind threads")


@given(st.sets(st.integers(0, 200), min_size=1), st.integers(1, 16))
def test_shares_are_even_and_none_is_left_over(cores, count):
    shares = [divide(sorted(cores), position, count) for position in range(count)]
    assert {core for share in shares for core in share} <= cores
    sizes = {len(share) for share in shares}
    assert min(sizes) >= 1
    if len(cores) >= count:
        assert sorted(core for share in shares for core in share) == sorted(cores)
        assert max(sizes) - min(sizes) <= 1


@given(st.integers(1, 64), st.sampled_from([None, 1, 3, 100]), st.booleans())
def test_threads_do_not_exceed_the_cores(count, num_wanted, on_device):
    """But that somebody must update, also where all cores compute or there is but one."""
    cores = Cores.of(range(count), num_wanted, is_bound=True, on_device=on_device)
    assert cores.num_updating >= 1
    assert cores.num_issuing + cores.num_updating <= max(count, cores.num_issuing + 1)
    assert cores.num_updating <= (num_wanted or count)
    if on_device:
        assert len(cores.of_updates) == len(set(cores.of_updates)) == cores.num_updating
        assert cores.num_issuing == (0 if count == 1 else 1 if count < 8 else 2), "a few are left"


def test_neighbours_are_threads_of_one_core_and_cores_of_one_package(tmp_path: Path):
    """As Linux numbers them: second threads come after all first ones."""
    for cpu in range(8):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{cpu % 4 // 2}\n")
        (folder / "core_id").write_text(f"{cpu % 2}\n")
    assert in_order(range(8), tmp_path) == [0, 4, 1, 5, 2, 6, 3, 7]
    assert in_order([3, 1, 2], tmp_path / "nothing") == [1, 2, 3]
    assert ranges([0, 1, 2, 5, 8, 7]) == "0-2,5,7-8"


def masks():
    found = set()
    for entry in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # a thread of an earlier session has just ended
            found.add(frozenset(os.sched_getaffinity(int(entry.name))))
    return found


@linux
def test_named_cores_bind_all_threads_until_the_session_is_closed():
    """Those of BLAS and autograd that are there before, those that come, and nobody afterwards."""
    allowed, core = open_cores(), min(open_cores())
    np.ones((300, 300)) @ np.ones((300, 300))
    waits = threading.Event()
    early = threading.Thread(target=waits.wait, daemon=True)  # a failure must not wait for it
    early.start()
    task = Task()
    _, optimizer = prepare(task, decide(task, mixed), cores=(core,), num_threads=None)
    with optimizer.session as session:
        assert masks() == {frozenset({core})}
        assert str(session.cores) == f"cores {core}: 1 compute, 1 update"
    assert masks() == {allowed}
    _, optimizer = prepare(task, decide(task, mixed))
    with optimizer.session:
        assert masks() == {allowed}, "one rank is not bound unless cores are named"
    with pytest.raises(ValueError, match="cores are 100000, but this process may use"):
        prepare(task, decide(task, mixed), cores=(100000,))
    waits.set()
    early.join()
    assert masks() == {allowed}


@linux
def test_what_fails_to_begin_leaves_threads_where_they_were():
    allowed = open_cores()
    task = Task()
    with pytest.raises(MemoryError):
        prepare(task, decide(task, mixed), cores=(min(allowed),), gpu_capacity_bytes=10)
    assert masks() == {allowed}


def test_updates_leave_cores_to_what_issues_work_on_a_gpu():
    cores, restore = take_cores("auto", None, None, on_device=True)
    restore()
    count = len(open_cores())
    assert cores.num_updating == max(count - cores.num_issuing, 1)
    assert cores.of_updates is None, "alone, the system places threads"
    assert torch.get_num_threads() == 1
