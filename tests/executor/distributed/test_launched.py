"""Ranks of a launcher, and how one that leaves alone ends what devices have under way."""

import threading
from pathlib import Path

import forked
from forked import Forked, environments

from executor.distributed.ranks import Ranks


class Collectives:
    """A process group with a backend that is NCCL's as far as its end goes."""

    def __init__(self, name, calls):
        self._name, self._calls = name, calls

    def _get_backend(self, _device):
        return self

    def _group_start(self):
        self._calls.append("begin")

    def abort(self):
        self._calls.append(f"abort {self._name}")

    def _group_end(self):
        self._calls.append("end")


def test_who_leaves_alone_ends_what_devices_have_under_way_all_at_once():
    """One after another each might wait for the next, and to destroy them would wait for ranks that are gone."""
    calls = []
    first, second, left = (Collectives(name, calls) for name in ("first", "second", "left"))
    ranks = object.__new__(Ranks)
    ranks._aborting, ranks._to_abort, ranks._groups = threading.Lock(), [first, second, left], [first, second]
    ranks._abort_devices()
    ranks._abort_devices()
    assert calls == ["begin", "abort first", "abort second", "end"]


SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
import torch
from plans import mixed
from training import Task, decide, make_model, prepare, train

torch.set_num_threads(1)
task = Task("gpt2", iterations=2)
decisions = decide(task, mixed, data_parallel=2, zero_stage=3)
begun = [prepare(task, decisions) for _ in range(2)]
seen = [train(task, *one) for one in begun]
begun[0][1].session.close()
train(task, *begun[1])  # the other goes on
begun[1][1].session.close()
for _ in range(3):
    model, optimizer = prepare(task, decisions)
    with optimizer.session:
        seen.append(train(task, model, optimizer))
assert all(one == seen[0] for one in seen), seen
print("in the end")
"""


def test_a_launcher_joins_processes_for_all_sessions_that_they_have(tmp_path):
    """Whatever the order in which these begin and end: it joins them once."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("{tests!r}", repr(str(Path(__file__).parents[1]))), encoding="utf-8")
    started = [Forked(forked.script, str(script), env=each) for each in environments(2)]
    for process in started:
        out, err = process.communicate()
        assert process.returncode == 0, err[-3000:]
        assert out.count("in the end") == 1
