import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor.optimizer.workers import GRAIN_ITEMS, WorkerTeam, pieces


@given(num_items=st.integers(0, 100_000), num_pieces=st.integers(1, 70))
def test_pieces_are_contiguous_aligned_and_equal(num_items, num_pieces):
    cut = pieces(num_items, num_pieces)

    assert all(left[1] == right[0] for left, right in pairwise(cut))
    assert len(cut) <= num_pieces
    assert (cut[0][0], cut[-1][1]) == (0, num_items) if num_items else cut == []
    assert all(start < stop and start % GRAIN_ITEMS == 0 for start, stop in cut)
    num_grains = [-(-(stop - start) // GRAIN_ITEMS) for start, stop in cut]
    assert not cut or max(num_grains) - min(num_grains) <= 1
    assert len(cut) == min(num_pieces, -(-num_items // GRAIN_ITEMS))


def test_all_workers_run_at_the_same_time():
    meeting, met = threading.Barrier(3), list[int]()
    with WorkerTeam(3) as team:
        team.run(lambda _start, _stop: met.append(meeting.wait(timeout=20)), 3 * GRAIN_ITEMS)
    assert sorted(met) == [0, 1, 2]


def test_team_of_one_works_in_the_calling_thread():
    seen = []
    with WorkerTeam(1) as team:
        team.run(lambda start, stop: seen.append((threading.get_ident(), start, stop)), 1000)
        team.run(lambda *_: seen.append("called on nothing"), 0)
    assert seen == [(threading.get_ident(), 0, 1000)]


def test_error_reaches_the_caller_after_every_piece_has_ended():
    ended = []

    def fail_early(start, stop):
        if start == 0:
            raise ZeroDivisionError("first piece")
        time.sleep(0.1)
        ended.append((start, stop))

    with WorkerTeam(2) as team:
        with pytest.raises(ZeroDivisionError, match="first piece"):
            team.run(fail_early, 2 * GRAIN_ITEMS)
        assert ended == [(GRAIN_ITEMS, 2 * GRAIN_ITEMS)]

        team.run(lambda start, stop: ended.append((start, stop)), GRAIN_ITEMS)  # the team survives
        assert ended[1:] == [(0, GRAIN_ITEMS)]


@pytest.mark.parametrize("num_threads", [1, 2])
def test_many_lanes_share_a_team(num_threads):
    num_items = 1000

    def lane(team):
        count = [0] * num_items

        def visit(start, stop):
            for i in range(start, stop):
                count[i] += 1

        for _ in range(50):
            team.run(visit, num_items)
        return count

    with WorkerTeam(num_threads) as team, ThreadPoolExecutor(4) as lanes:
        counts = list(lanes.map(lane, [team] * 4))
    assert counts == [[50] * num_items] * 4


def test_running_inside_a_piece_does_not_wait_for_itself():
    seen = []
    with WorkerTeam(2) as team:
        team.run(lambda *_: team.run(lambda start, stop: seen.append((start, stop)), 200), 2 * GRAIN_ITEMS)
    assert seen == [(0, 200)] * 2


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system cannot bind threads")
def test_cores_bind_the_workers_and_leave_the_caller_alone():
    before = os.sched_getaffinity(0)
    cores = (sorted(before) * 2)[:2]
    meeting = threading.Barrier(2)
    bound = []

    def record(*_):
        meeting.wait(timeout=20)  # so that neither thread takes both pieces
        bound.append(os.sched_getaffinity(0))

    with WorkerTeam(2, cores) as team:
        team.run(record, 2 * GRAIN_ITEMS)
    with WorkerTeam(1, cores[-1:]) as team:
        team.run(lambda *_: bound.append(os.sched_getaffinity(0)), 1)
    assert sorted(map(tuple, bound[:2])) == [(core,) for core in cores]
    assert bound[2] == {cores[-1]}
    assert os.sched_getaffinity(0) == before


def test_wrong_arguments_say_what_is_wrong():
    with pytest.raises(ValueError, match="num_threads is 0"):
        WorkerTeam(0)
    with pytest.raises(ValueError, match="one core per thread"):
        WorkerTeam(2, [0])
    if sys.platform == "linux":
        with pytest.raises(ValueError, match=r"this process may not use cores \[100000\]; choose from"):
            WorkerTeam(1, [100_000])


@pytest.mark.parametrize("num_threads", [1, 2])
def test_closed_team_refuses_and_its_threads_are_gone(num_threads):
    before = threading.active_count()
    team = WorkerTeam(num_threads)
    team.run(lambda *_: None, 1000)
    team.close()
    team.close()
    assert threading.active_count() == before
    with pytest.raises(RuntimeError, match="closed"):
        team.run(lambda *_: None, 1000)
