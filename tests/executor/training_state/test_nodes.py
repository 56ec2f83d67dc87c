"""Checkpoints in folders that each node has for itself. Nodes are folders and processes here; some are lost."""

import shutil

import pytest
from rank_failures import leaving_checkpoints_early
from rank_programs import on_nodes
from training import Task, decide, uniform

from executor.distributed.watchdog import RankError

TASK = Task("gpt2", iterations=6)
FILE = "optimizer/exp_avg-00001.safetensors"


def steps(folder):
    """Return the steps of the checkpoints in a folder."""
    return sorted(int(path.name.split("-")[1]) for path in folder.glob("step-*"))


@pytest.fixture
def run(processes, tmp_path):
    """Return a function that trains on nodes with folders of these names until a step; and checks that all agree."""

    def run(names, until, per_node=1, **degrees):
        count = per_node * len(names)
        decisions = decide(TASK, uniform("host", "cpu"), data_parallel=count, **degrees)
        found = processes.call(count, on_nodes, TASK, decisions, tmp_path, names, per_node, until)
        assert len({(step, begin, end) for step, _, begin, end, _ in found}) == 1
        kept = [steps(tmp_path / name) for name in names]
        assert kept == kept[:1] * len(names), "what is kept is the same on all nodes"
        return found[0]

    return run


@pytest.mark.part(2)
@pytest.mark.parametrize("zero_stage", [3, 0])
def test_a_lost_node_costs_nothing(run, tmp_path, zero_stage):
    """Two nodes of two ranks; in the place of one of them comes another, without anything."""
    *_, end, outcomes = run("ab", 3, 2, zero_stage=zero_stage)
    assert outcomes == [(1, 0, None), (2, 0, None), (2, 1, None), (3, 0, None), (3, 1, None)]
    assert [steps(tmp_path / name) for name in ("a", "shared")] == [[2, 3], [2, 3]]
    for lost, there in (("a", "cb"), ("b", "cd")):
        shutil.rmtree(tmp_path / lost)
        assert run(there, 3, 2, zero_stage=zero_stage)[:4] == (3, (), end, end)
        assert steps(tmp_path / "d" if lost == "b" else tmp_path / "b") == [3]


def test_of_neighbours_that_are_lost_the_shared_place_has_the_newest(run, tmp_path):
    """Four nodes. Two that are no neighbours may be lost at once; fewer go on with what is left."""
    *_, end, _ = run("abcd", 3, zero_stage=3)
    for lost in "ac":
        shutil.rmtree(tmp_path / lost)
    assert run("bd", 3, zero_stage=3)[:3] == (3, (), end)
    *_, begin, _, _ = run("ebgd", 4, zero_stage=3)
    assert begin == end
    for lost in "eb":
        shutil.rmtree(tmp_path / lost)
    shutil.rmtree(tmp_path / "shared" / "step-00000004")
    step, refused, begin, *_ = run("hdgi", 3, zero_stage=3)
    assert (step, begin) == (3, end)
    assert "step-00000004: a part of it is on no node, or damaged on all" in refused[0]
    assert steps(tmp_path / "g") in ([], [3]), "nobody goes on from what is left of it"


def test_what_a_crash_or_damage_has_left_is_made_whole_or_removed(run, tmp_path):
    *_, end, _ = run("abc", 3, zero_stage=3)
    shutil.rmtree(tmp_path / "shared")
    damaged = tmp_path / "b/step-00000003" / FILE
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\x7f")
    (tmp_path / "a/step-00000003").rename(tmp_path / "a/step-00000009")  # as if a crash came before the others' names
    shutil.rmtree(tmp_path / "c/step-00000002")  # a crash came before the others had removed it
    step, refused, found, *_ = run("abc", 3, zero_stage=3)
    assert (step, found, len(refused)) == (3, end, 1)
    assert steps(tmp_path / "a") == [3]
    for name in "abc":
        (tmp_path / name / "step-00000003" / FILE).unlink(missing_ok=True)
    with pytest.raises(Exception, match=r"no checkpoint is whole: .* a part of it is on no node"):
        run("abc", 3, zero_stage=3)


def test_drives_of_nodes_get_what_their_memory_has(processes, tmp_path):
    """And a URL the files of each. When all have lost their memory, and one its drives, the other drives are enough."""
    decisions = decide(TASK, uniform("host", "cpu"), data_parallel=3, zero_stage=3)

    def run(names, until):
        return processes.call(3, on_nodes, TASK, decisions, tmp_path, names, 1, until, "slow")[0]

    assert not [error for *_, error in run("abc", 5)[-1] if error]
    there = {name: steps(tmp_path / name) for name in ("a", "b", "c", "a-drive", "b-drive", "c-drive", "slow")}
    assert there["a"] == there["b"] == there["c"]
    assert max(there["a"]) == 5
    assert there["a-drive"] == there["b-drive"] == there["c-drive"] == [2, 4]
    assert there["slow"] == [4]
    for lost in ("a", "b", "c", "b-drive", "slow"):
        shutil.rmtree(tmp_path / lost)
    assert run("abc", 4)[:2] == (4, ())
    assert steps(tmp_path / "b-drive") == [4]


def test_places_that_nodes_share_otherwise_are_refused(processes, tmp_path):
    def refused(names, per_node, shared):
        count = per_node * len(names)
        decisions = decide(TASK, uniform("host", "cpu"), data_parallel=count)
        with pytest.raises(Exception, match=r"is not the same|is shared by") as caught:
            processes.call(count, on_nodes, TASK, decisions, tmp_path, names, per_node, 1, shared)
        return str(caught.value)

    assert "/a is not the same on all nodes: give after it a folder on a file system" in refused("ab", 1, "")
    assert "/a is shared by some nodes and not by all" in refused("abb", 1, "shared")


@pytest.mark.parametrize("how", ["has one batch less", "raises"])
def test_a_leader_that_closes_early_ends_all(processes, tmp_path, how):
    """Its node follows rank 0's orders until rank 0 closes, which waits for it in an iteration."""
    decisions = decide(TASK, uniform("host", "cpu"), data_parallel=2, zero_stage=3)
    processes.begin(2, leaving_checkpoints_early, TASK, decisions, tmp_path, how)
    first, second = processes.results(2, timeout_s=40.0)
    assert isinstance(first, RankError), first
    if how == "raises":
        assert "rank 1 failed: ZeroDivisionError: in the loop" in str(first)
    else:
        assert second is None or isinstance(second, RankError), second  # what it waits for has ended, orderly or not
        assert "rank 0 is in iteration 3, and rank 1 in checkpoints.close()" in str(first)
    assert steps(tmp_path / "a") == steps(tmp_path / "b") == [1, 2]
