"""The machine on random schedules: order, times, failures, and that nothing is left behind."""

import _thread
import gc
import itertools
import math
import subprocess
import sys
import threading
import time
from collections import defaultdict

import numpy as np
import pytest
import training
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st

import executor.devices.lanes
from benchmarks.simulator.reference import FluidTask, built
from executor.devices.backend import HostBackend
from executor.devices.lanes import NUM_RECORDED, LaneError, LaneMachine
from planner.decisions import Place
from planner.lowering import lower
from planner.schedule.loop import Loop
from planner.schedule.schedule import Schedule
from planner.schedule.tasks import CALLER_LANES, Lane, Op, Phase, Task
from planner.simulate.kernel import simulate

LANES = [Lane.COMPUTE, Lane.LAUNCH, Lane.H2D, Lane.D2H, Lane.CPU]
LATE_S = 0.1  # a thread of a busy machine may wake this late


def work(index, lane, after=(), after_previous=(), op=Op.PASS):
    return Task(index, lane, op, Phase.UPDATE, after=tuple(after), after_previous=tuple(after_previous))


@st.composite
def schedules(draw):
    count = draw(st.integers(1, 12))
    tasks = []
    for i in range(count):
        after = draw(st.sets(st.integers(0, i - 1), max_size=3)) if i else ()
        previous = draw(st.sets(st.integers(0, count - 1), max_size=2))
        tasks.append(work(i, draw(st.sampled_from(LANES)), sorted(after), sorted(previous)))
    return Schedule(tuple(tasks))


SUBMITTED = st.sets(st.sampled_from(LANES[2:]))  # lanes without a thread


def on_host(schedule, perform, *, record=False, submitted=()):
    return LaneMachine(schedule, perform, HostBackend(), record=record, submitted=submitted)


def walk(machine, schedule, iterations):
    loop = Loop(schedule, machine.issue)
    for _ in range(iterations):
        loop.finish()
    machine.wait()


def lane_threads():
    return [t for t in threading.enumerate() if t.name.startswith("lane ")]


@settings(max_examples=examples(25, fewest=4), deadline=None, derandomize=True)
@given(schedules(), st.lists(st.integers(0, 2), min_size=12, max_size=12), SUBMITTED)
def test_a_task_starts_when_its_lane_is_free_and_what_it_comes_after_has_ended(schedule, durations_ms, submitted):
    def perform(task, _iteration):
        time.sleep(durations_ms[task.index] / 1e3)

    iterations = 3
    with on_host(schedule, perform, record=True, submitted=submitted) as machine:
        assert len(lane_threads()) == len({task.lane for task in schedule.tasks} - CALLER_LANES - submitted)
        walk(machine, schedule, iterations)
        timeline = machine.timeline()
    assert not lane_threads()
    spans = {(s.iteration, s.task): s for s in timeline.spans}
    assert len(spans) == iterations * len(schedule.tasks)
    free_s = defaultdict(float)
    for iteration, task in itertools.product(range(iterations), schedule.tasks):
        span = spans[iteration, task.index]
        before = [spans[iteration, i].end_s for i in task.after]
        before += [spans[iteration - 1, i].end_s for i in task.after_previous if iteration]
        lane = "caller" if task.lane in CALLER_LANES else task.lane  # one thread runs both of the caller's lanes
        ready_s = max([free_s[lane], *before])
        assert span.start_s >= ready_s
        if task.lane not in CALLER_LANES:
            assert span.end_s - span.start_s >= durations_ms[task.index] / 1e3
        free_s[lane] = span.end_s


def may_have_ended(issued):
    """Return which tasks, as iteration and index, end without more from the caller, who is at its latest task."""
    of_caller = [(i, task.index) for i, task in issued if task.lane in CALLER_LANES]
    ended, before = set(of_caller[:-1]), None
    while ended != before:
        before = set(ended)
        for lane in LANES[2:]:
            for i, task in ((i, task) for i, task in issued if task.lane is lane):
                needs = {(i, other) for other in task.after} | {(i - 1, other) for other in task.after_previous if i}
                if not needs <= ended:
                    break
                ended.add((i, task.index))
    return ended


@settings(max_examples=examples(50), deadline=None, derandomize=True)
@given(schedules(), st.sampled_from(LANES[2:]), SUBMITTED)
def test_a_lane_has_settled_once_it_waits_for_the_caller_alone(schedule, lane, submitted):
    ended, issued = set(), []
    with on_host(schedule, lambda task, i: ended.add((i, task.index)), submitted=submitted) as machine:
        for i, task in itertools.product(range(2), schedule.tasks):
            machine.issue([task], i)
            issued.append((i, task))
            machine.settle(lane)
            assert {(i, task.index) for i, task in issued if task.lane is lane} & may_have_ended(issued) <= ended
        machine.wait()


def test_start_is_measured_when_a_task_becomes_ready_not_when_it_is_issued():
    schedule = Schedule((work(0, Lane.CPU), work(1, Lane.H2D), work(2, Lane.D2H, after=[0])))
    with on_host(schedule, lambda task, _: time.sleep(0.05 if task.lane is Lane.CPU else 0), record=True) as machine:
        walk(machine, schedule, 1)
        spans = list(machine.timeline().spans)
    assert spans[1].start_s < 0.05 <= spans[2].start_s < 0.05 + LATE_S
    assert spans[2].end_s - spans[2].start_s < LATE_S


def test_lanes_run_at_the_same_time():
    both, met = threading.Barrier(2, timeout=10), list[int]()
    schedule = Schedule((work(0, Lane.CPU), work(1, Lane.H2D)))
    with on_host(schedule, lambda *_: met.append(both.wait())) as machine:
        walk(machine, schedule, 3)
    assert sorted(met) == [0, 0, 0, 1, 1, 1]


def test_a_callers_task_lasts_until_its_next_one():
    schedule = Schedule((work(0, Lane.COMPUTE, op=Op.FORWARD), work(1, Lane.CPU, after=[0]), work(2, Lane.COMPUTE)))
    done = []
    with on_host(schedule, lambda task, _: done.append(task.index), record=True) as machine:
        loop = Loop(schedule, machine.issue)
        loop.reach(Op.FORWARD)
        machine.issue([schedule.tasks[1]], 0)
        time.sleep(0.05)
        assert not done, "what comes after an open task waits"
        machine.issue([schedule.tasks[2]], 0)
        machine.wait()
        assert done == [1]
        first = machine.timeline().of_iteration(0)
        assert math.isclose(next(first).end_s, 0.05, abs_tol=LATE_S)


def test_the_caller_waits_for_what_its_task_comes_after():
    schedule = Schedule((work(0, Lane.CPU), work(1, Lane.COMPUTE, after=[0])))
    with on_host(schedule, lambda *_: time.sleep(0.05)) as machine:
        begin_s = time.perf_counter()
        Loop(schedule, machine.issue).finish()
        assert time.perf_counter() - begin_s >= 0.05


def test_only_the_last_two_iterations_are_kept():
    schedule = Schedule((work(0, Lane.CPU), work(1, Lane.H2D, after=[0], after_previous=[1])))
    with on_host(schedule, lambda *_: None) as machine:
        walk(machine, schedule, 50)
        assert sum(map(len, machine._tickets.values())) <= 2 * len(schedule.tasks)
        assert all(not t.after for tickets in machine._tickets.values() for t in tickets.values())
        assert machine.timeline().num_iterations == 0, "nothing is recorded unless asked for"


def test_recording_can_be_switched_on_later():
    schedule = Schedule((work(0, Lane.CPU), work(1, Lane.COMPUTE, after=[0])))
    with on_host(schedule, lambda *_: None) as machine:
        loop = Loop(schedule, machine.issue)
        for _ in range(6):
            machine.record = loop.iteration >= 2
            loop.finish()
        machine.wait()
        assert machine.timeline().num_iterations == 4
        timeline = machine.timeline(3, 4)
    assert timeline.num_iterations == 2
    assert min(s.start_s for s in timeline.spans) == 0


def test_memory_of_times_is_bounded():
    """However long it records; what is kept are the latest iterations."""
    schedule = Schedule((work(0, Lane.CPU), work(1, Lane.COMPUTE, after=[0], after_previous=[1])))
    gc.collect()
    before = num_tickets()  # what other tests have left
    with on_host(schedule, lambda *_: None, record=True) as machine:
        loop = Loop(schedule, machine.issue)
        for _ in range(NUM_RECORDED + 50):
            loop.finish()
            machine.wait()
        assert num_tickets() - before <= (NUM_RECORDED + 2) * len(schedule.tasks)
        timeline = machine.timeline()
        assert timeline.num_iterations == NUM_RECORDED
        assert not np.isnan(timeline.end_s).any()
        assert machine.timeline(0, 49).num_iterations == 0
        latest = machine.timeline(NUM_RECORDED + 48)
        assert latest.num_iterations == 2
        assert latest.makespan_s() <= timeline.makespan_s()


def num_tickets():
    return sum(type(found).__name__ == "_Ticket" for found in gc.get_objects())


def failing(task, iteration):
    if task.lane is Lane.CPU and iteration == 1:
        raise ValueError("no such core")


def bounded(function, limit_s=30.0):
    """Run a function in a thread that must end in time; return what it raised."""
    raised = []

    def target():
        try:
            function()
        except BaseException as error:  # noqa: BLE001 - handed to the test
            raised.append(error)

    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    thread.join(limit_s)
    assert not thread.is_alive(), "it hangs"
    return raised[0] if raised else None


@pytest.mark.parametrize("waiting", [Lane.H2D, Lane.COMPUTE])
def test_a_failure_reaches_the_caller_and_everything_stops(waiting):
    schedule = Schedule((work(0, Lane.CPU), work(1, waiting, after=[0], after_previous=[0])))
    machine = on_host(schedule, failing)
    error = bounded(lambda: walk(machine, schedule, 5))
    assert isinstance(error, LaneError)
    assert "lane cpu" in str(error)
    assert "pass model" in str(error)
    assert "no such core" in str(error)
    assert isinstance(error.__cause__, ValueError)
    for later in (machine.wait, lambda: machine.issue([schedule.tasks[0]], 9)):
        assert isinstance(bounded(later), LaneError)
    bounded(machine.close)
    assert not lane_threads()


def test_a_failure_while_a_caller_looks_is_never_taken_for_closing():
    class Stopping(LaneMachine):
        """A machine that another thread stops just after its failure was read."""

        @property
        def _failure(self):
            failure = vars(self).get("failure")
            if failure is None:
                vars(self).update(failure=ValueError("elsewhere"), _stopped=True)
            return failure

    machine = object.__new__(Stopping)
    machine._stopped = False
    machine._check()
    with pytest.raises(ValueError, match="elsewhere"):
        machine._check()


def test_closing_with_an_open_task_that_others_wait_for_does_not_hang():
    schedule = Schedule((work(0, Lane.COMPUTE, op=Op.FORWARD), work(1, Lane.CPU, after=[0])))
    machine = on_host(schedule, lambda *_: None)
    machine.issue([schedule.tasks[0]], 0)
    machine.issue([schedule.tasks[1]], 0)
    assert bounded(machine.close) is None
    assert not lane_threads()
    with pytest.raises(RuntimeError, match="closed"):
        machine.issue([schedule.tasks[0]], 1)


def test_closing_does_not_wait_for_a_task_that_hangs(monkeypatch):
    monkeypatch.setattr(executor.devices.lanes, "_END_S", 0.5)
    begun, over = threading.Event(), threading.Event()

    def hanging(*_):
        begun.set()
        over.wait(60)

    schedule = Schedule((work(0, Lane.CPU), work(1, Lane.H2D, after=[0])))
    machine = on_host(schedule, hanging)
    try:
        Loop(schedule, machine.issue).finish()
        assert begun.wait(60)
        with pytest.warns(RuntimeWarning, match=r"^lane cpu\b.*: the task has not ended within 0\.5 s"):
            assert bounded(machine.close) is None
        monkeypatch.setattr(executor.devices.lanes, "_END_S", 60)
        assert bounded(machine.close) is None, "it waits once"
    finally:
        over.set()
        for thread in (each for each in threading.enumerate() if each.name.startswith("lane ")):
            thread.join()


def test_an_interrupt_while_waiting_leaves_no_thread():
    schedule = Schedule((work(0, Lane.CPU), work(1, Lane.COMPUTE, after=[0])))

    def interrupt(*_):
        _thread.interrupt_main()
        time.sleep(0.2)

    errors = []
    machine = LaneMachine(schedule, interrupt, HostBackend(), on_stop=errors.append)
    with pytest.raises(KeyboardInterrupt) as interrupted:
        walk(machine, schedule, 1)
    assert not lane_threads()
    assert errors == [interrupted.value], "other ranks are told at once, and not left to its silence"


def test_a_program_that_forgets_to_close_ends_all_the_same():
    program = """
import time
from executor.devices.backend import HostBackend
from executor.devices.lanes import LaneMachine
from planner.schedule.schedule import Schedule
from planner.schedule.tasks import Lane, Op, Phase, Task
tasks = (
    Task(0, Lane.COMPUTE, Op.FORWARD, Phase.FORWARD),
    Task(1, Lane.CPU, Op.PASS, Phase.UPDATE, after=(0,)),
    Task(2, Lane.H2D, Op.PASS, Phase.UPDATE),
)

def perform(task, iteration):
    time.sleep(0.3)
    print("ended", task.index, flush=True)

machine = LaneMachine(Schedule(tasks), perform, HostBackend())
for task in tasks:
    machine.issue([task], 0)
time.sleep(0.1)
raise KeyboardInterrupt
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert "KeyboardInterrupt" in done.stderr
    assert done.stdout == "ended 2\n", "what runs ends, what waits does not start"
    assert "Fatal" not in done.stderr


def drive(schedule, seed, iterations=4):
    """Walk a schedule as a training loop does, every task taking a time of its own; return what was measured."""
    rng = np.random.default_rng(seed)
    durations_s = {task.index: float(rng.choice([0.0, 2e-3, 5e-3])) for task in schedule.tasks}

    def perform(task, _iteration):
        time.sleep(durations_s[task.index])

    with on_host(schedule, perform, record=True) as machine:
        loop = Loop(schedule, machine.issue)
        for _ in range(iterations):
            while (task := loop.expected()) is not None:
                loop.reach(task.op, task.unit)
                time.sleep(durations_s[task.index])
            machine.end_open()
            loop.finish()
        machine.wait()
        return machine.timeline()


def simulated_makespan_s(timeline, keep=lambda _task: True):
    """Return the makespan of the measured durations in virtual time; ``keep`` says whose dependencies count."""
    count, lanes = len(timeline.schedule.tasks), list(Lane)
    tasks = []
    for iteration, task in itertools.product(range(timeline.num_iterations), timeline.schedule.tasks):
        after = [i + iteration * count for i in task.after]
        after += [i + (iteration - 1) * count for i in task.after_previous if iteration]
        duration_s = timeline.end_s[iteration, task.index] - timeline.start_s[iteration, task.index]
        tasks.append(FluidTask(lanes.index(task.lane), duration_s, after=after if keep(task) else ()))
    return float(simulate(built(tasks))[1].max())


@pytest.mark.parametrize("seed", range(3))
def test_measured_durations_make_the_measured_makespan_in_the_simulator(seed):
    task = training.Task("llama", num_micro_batches=1 + seed % 2)
    places = itertools.cycle([Place.CPU, Place.STREAM])
    decisions = training.decide(task, lambda _, count: ("host", "recompute", [next(places) for _ in range(count)]))
    schedule = lower(training.model_units("llama"), decisions, asynchronous=False)
    for attempt in range(8):  # on a busy machine threads wait for a core, which no simulation knows
        timeline = drive(schedule, seed)
        if simulated_makespan_s(timeline) > 0.95 * timeline.makespan_s():
            break
        time.sleep(attempt)
    assert simulated_makespan_s(timeline) == pytest.approx(timeline.makespan_s(), rel=0.05)
    # The agreement means something only if a rule that is forgotten breaks it.
    assert simulated_makespan_s(timeline, lambda _: False) < 0.9 * timeline.makespan_s()


def test_waiting_for_weights_is_not_issuing():
    """The host cannot issue kernels before the copy that they wait for has been issued, here after 50 ms."""
    tasks = (work(0, Lane.CPU), work(1, Lane.LAUNCH, op=Op.ISSUE), work(2, Lane.COMPUTE, (0, 1)))
    with on_host(Schedule(tasks), lambda _task, _iteration: time.sleep(0.05), record=True) as machine:
        walk(machine, Schedule(tasks), 1)
        timeline = machine.timeline()
    assert timeline.end_s[0, 0] <= timeline.start_s[0, 1] <= timeline.start_s[0, 2]


def test_the_time_to_issue_runs_beside_the_task_that_is_issued():
    task = training.Task("llama")
    decisions = training.decide(task, training.uniform("host", "cpu"))
    schedule = lower(training.model_units("llama"), decisions, asynchronous=True)
    timeline = drive(schedule, seed=1, iterations=2)
    for compute in schedule.tasks:
        issue = next((i for i in compute.after if schedule.tasks[i].op is Op.ISSUE), None)
        if compute.lane is Lane.COMPUTE:
            assert timeline.start_s[1, issue] <= timeline.start_s[1, compute.index] < timeline.end_s[1, issue]
            assert timeline.end_s[1, issue] == pytest.approx(timeline.end_s[1, compute.index], abs=LATE_S)


IN_ORDER = (Lane.COMPUTE, Lane.H2D, Lane.D2H)


@settings(max_examples=examples(15), deadline=None, derandomize=True)
@given(schedules(), st.data())
def test_tasks_in_order_are_launched_as_they_were_issued_whatever_takes_how_long(schedule, data):
    durations_ms = data.draw(st.lists(st.integers(0, 2), min_size=12, max_size=12))
    launched = []

    def perform(task, iteration):
        if task.lane in IN_ORDER:
            launched.append((iteration, task.index))
        time.sleep(durations_ms[task.index] / 1e3)

    with LaneMachine(schedule, perform, HostBackend(), in_order=lambda task: task.lane in IN_ORDER) as machine:
        loop = Loop(schedule, machine.issue)
        machine.on_caller = lambda index: launched.append((loop.iteration, index))
        for _ in range(3):
            loop.finish()
        machine.wait()
    issued = [(i, task.index) for i in range(3) for task in schedule.tasks if task.lane in IN_ORDER]
    assert [each for each in launched if schedule.tasks[each[1]].lane in IN_ORDER] == issued
