"""A task of the caller waits for the memory that it needs, where lanes are slower than planned."""

import time

from amount import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st
from training import Task, batches, decide, memory_of_step, prepare, uniform

from executor.devices.backend import HostBackend
from executor.devices.lanes import LaneMachine
from planner.schedule.loop import Loop
from planner.schedule.schedule import Schedule
from planner.schedule.tasks import CALLER_LANES, Buffer, Lane, MemoryClass, Op, Phase, Tier
from planner.schedule.tasks import Task as ScheduledTask

ITERATIONS = 2
CARRIED = -1


@st.composite
def schedules(draw):
    """Tasks of the caller make buffers, which any task frees, of the same iteration or the next."""
    count = draw(st.integers(2, 10))
    tasks = []
    for i in range(count):
        lane = draw(st.sampled_from([Lane.COMPUTE, Lane.D2H, Lane.CPU]))
        after = draw(st.sets(st.integers(0, i - 1), max_size=2)) if i else ()
        previous = draw(st.sets(st.integers(0, count - 1), max_size=1))
        tasks.append(
            ScheduledTask(
                i, lane, Op.PASS, Phase.UPDATE, after=tuple(sorted(after)), after_previous=tuple(sorted(previous))
            )
        )
    makers = [task.index for task in tasks if task.lane in CALLER_LANES]
    buffers = [Buffer(Tier.GPU, MemoryClass.PARAMETERS, 1, "always")]
    for first in draw(st.lists(st.sampled_from(makers), max_size=6)) if makers else ():
        last, num_bytes = draw(st.integers(0, count - 1)), draw(st.integers(1, 3))
        buffers.append(Buffer(Tier.GPU, MemoryClass.GRADIENTS, num_bytes, "some", first, last))
    return Schedule(tuple(tasks), tuple(buffers))


def lives(schedule):
    """Yield every buffer's bytes with who makes and who frees it, as (iteration, task)."""
    for buffer in schedule.buffers:
        for iteration in range(ITERATIONS):
            if buffer.first is None:
                continue
            if buffer.last < buffer.first:
                yield buffer.num_bytes, (iteration - 1, buffer.first), (iteration, buffer.last)
            else:
                yield buffer.num_bytes, (iteration, buffer.first), (iteration, buffer.last)
        if buffer.first is not None and buffer.last < buffer.first:
            yield buffer.num_bytes, (ITERATIONS - 1, buffer.first), None


def scheduled(index, lane):
    return ScheduledTask(index, lane, Op.PASS, Phase.UPDATE)


OF_THE_ITERATION_BEFORE = Schedule(
    (scheduled(0, Lane.D2H), scheduled(1, Lane.COMPUTE), scheduled(2, Lane.COMPUTE)),
    (
        Buffer(Tier.GPU, MemoryClass.GRADIENTS, 2, "carried", 2, 0),
        Buffer(Tier.GPU, MemoryClass.GRADIENTS, 2, "new", 1, 2),
    ),
)


@settings(max_examples=examples(40), deadline=None, derandomize=True)
@example(OF_THE_ITERATION_BEFORE, 3, [5] * 10)
@given(schedules(), st.integers(1, 8), st.lists(st.integers(0, 2), min_size=10, max_size=10))
def test_a_task_begins_only_with_room_or_if_no_room_will_come(schedule, capacity, durations_ms):
    def perform(task, _iteration):
        time.sleep(durations_ms[task.index] / 1e3)

    with LaneMachine(schedule, perform, HostBackend(), capacity_bytes=capacity, record=True) as machine:
        loop = Loop(schedule, machine.issue)
        for _ in range(ITERATIONS):
            loop.finish()
        machine.wait()
        spans = {(span.iteration, span.task): span for span in machine.timeline().spans}
    made, freed = {b.first for b in schedule.buffers}, {b.last for b in schedule.buffers if b.first is not None}
    for key, span in spans.items():
        if schedule.tasks[key[1]].lane not in CALLER_LANES or key[1] not in made:
            continue
        always = sum(buffer.num_bytes for buffer in schedule.buffers if buffer.first is None)
        held = always + sum(
            num_bytes
            for num_bytes, first, last in lives(schedule)
            if (first[0] == CARRIED or spans[first].start_s <= span.start_s)
            and (last is None or spans[last].end_s > span.start_s)
        )
        coming = [
            other
            for other in spans
            if other < key
            and other[1] in freed
            and schedule.tasks[other[1]].lane not in CALLER_LANES
            and spans[other].end_s > span.start_s
        ]
        assert held <= capacity or not coming


def test_backward_waits_for_gradients_that_are_slow_to_leave():
    """Four units' gradients may be under way by the plan, but there is room for two of the largest."""
    task = Task("llama", max_norm=1.0, iterations=1)
    decisions = decide(task, uniform("host", "cpu", "recompute"), num_gradient_slots=4)

    def peak_bytes(**options):
        model, optimizer = prepare(task, decisions, **options)
        with optimizer.session as session:
            machine = session.runtime.machine
            perform = machine._perform

            def late(task, iteration):
                time.sleep(0.1 if task.lane is Lane.D2H else 0)
                perform(task, iteration)

            machine._perform = late
            return memory_of_step(model, optimizer, batches(task)[0, 0])[Tier.GPU].peak_bytes

    roomy = peak_bytes()
    tight, small_inputs = roomy - 8_000, 1024  # copies that plans do not count
    assert peak_bytes(gpu_capacity_bytes=tight) <= tight + small_inputs
