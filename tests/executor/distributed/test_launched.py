"""Ranks of a launcher, and how one that leaves alone ends what devices have under way."""

import threading
from pathlib import Path

import forked
import pytest
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


ENDING = """
import os, sys
import torch
import executor.distributed.watchdog
from executor.distributed import meeting
from executor.distributed.ranks import Ranks
from executor.distributed.watchdog import RankError
from planner.decisions import Decisions
from ullage.this_machine.planning import free_memory

what, *environments = sys.argv[1:]
executor.distributed.watchdog.Watchdog.__init__.__kwdefaults__["silence_s"] = 1.5


def session():
    return Ranks(Decisions(policy="none", units={}, data_parallel=2), torch.device("cpu"))


def be(rank):
    os.environ.update(pair.split("=") for pair in environments[rank].split())
    meeting.join(2)
    if what == "before a second session":
        session().close(on_all_ranks=True)
    if rank == 1:
        sys.exit(0)
    try:
        free_memory() if what == "before planning" else session()
    except RankError as error:
        print("noticed:", error, flush=True)
        os._exit(0)
    os._exit(1)


started = [pid for rank in range(2) if (pid := os.fork()) or be(rank)]
codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in reversed(started)]
print("exit codes", codes, flush=True)
"""


KILLED = """
import os, signal, sys, time
import torch.distributed as dist
from executor.distributed import meeting
from executor.distributed.watchdog import RankError

join = dist.init_process_group


class Given(dist.Store):
    def __init__(self, store):
        super().__init__()
        self.store = store

    def set(self, key, value):
        self.store.set(key, value)

    def wait(self, *given):
        self.store.wait(*given)
        os.kill(os.getpid(), signal.SIGKILL)


def be(rank):
    os.environ.update(pair.split("=") for pair in sys.argv[1 + rank].split())
    if rank == 1:  # it is killed when both know their addresses, before it connects
        dist.init_process_group = lambda *given, store, **more: join(*given, store=Given(store), **more)
    begin_s = time.monotonic()
    try:
        meeting.join(2)
    except RankError as error:
        print("noticed:", error, "in time:", time.monotonic() - begin_s < 20, flush=True)
        os._exit(0)
    os._exit(1)


started = [pid for rank in range(2) if (pid := os.fork()) or be(rank)]
codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in reversed(started)]
print("exit codes", codes, flush=True)
"""


def test_a_rank_that_is_killed_while_ranks_connect_is_missed(tmp_path):
    """gloo would wait for its connection for five times its timeout, and keep signals waiting."""
    script = tmp_path / "script.py"
    script.write_text(KILLED, encoding="utf-8")
    names = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    given = [" ".join(f"{name}={each[name]}" for name in names) for each in environments(2)]
    done = forked.completed(forked.script, str(script), *given)
    assert "exit codes [-9, 0]" in done.stdout, done.stderr[-3000:]
    assert "has ended without reporting why: it was killed, or crashed in time: True" in done.stdout, done.stdout


@pytest.mark.part(2)
@pytest.mark.parametrize("what", ["before planning", "before a session", "before a second session"])
def test_a_rank_that_ends_in_order_is_missed(tmp_path, what):
    """Its exit code is 0, so that no launcher notices; the other rank would wait for it for ever."""
    script = tmp_path / "script.py"
    script.write_text(ENDING, encoding="utf-8")
    names = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    given = [" ".join(f"{name}={each[name]}" for name in names) for each in environments(2)]
    done = forked.completed(forked.script, str(script), what, *given)
    assert "exit codes [0, 0]" in done.stdout, done.stderr[-3000:]
    assert "noticed: rank 1 has not come to prepare() for 1.5 s, and its process has ended: if its own" in done.stdout
