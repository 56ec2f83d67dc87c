"""The one loop: it issues every task once, in order, and only as far as the caller has come."""

from collections.abc import Sequence

import pytest
from amount import examples
from cases import Case, cases, decide, small_units
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner.lowering import lower
from planner.schedule.loop import Loop, OutOfOrderError
from planner.schedule.schedule import Schedule
from planner.schedule.tasks import Op, Task


class Recorder:
    """A machine that only remembers."""

    def __init__(self) -> None:
        self.issued: list[tuple[int, int]] = []

    def issue(self, tasks: Sequence[Task], iteration: int) -> None:
        self.issued += ((iteration, task.index) for task in tasks)


def small_schedule() -> Schedule:
    units = small_units(num_layers=1)
    return lower(units, decide(units, recompute=True, num_micro_batches=2), asynchronous=True)


@settings(deadline=None, max_examples=examples(50), suppress_health_check=[HealthCheck.too_slow])
@given(cases(), st.data())
def test_every_task_once_in_order_wherever_the_caller_stops(case: Case, data: st.DataObject) -> None:
    recorder = Recorder()
    loop = Loop(case.schedule, recorder.issue)
    for iteration in range(3):
        for _ in range(data.draw(st.integers(0, 12))):
            if (expected := loop.expected()) is None:
                break
            assert loop.iteration == iteration
            assert loop.reach(expected.op, expected.unit) is expected
            # Everything up to the caller's own task, and nothing beyond it.
            assert recorder.issued[-1] == (iteration, expected.index)
        loop.finish()
    count = len(case.schedule.tasks)
    assert recorder.issued == [(i, task) for i in range(3) for task in range(count)]


def test_the_caller_may_walk_the_whole_iteration() -> None:
    recorder, schedule = Recorder(), small_schedule()
    loop = Loop(schedule, recorder.issue)
    reached = []
    while (expected := loop.expected()) is not None:
        reached.append(loop.reach(expected.op, expected.unit))
    assert [task.op for task in reached].count(Op.FORWARD) == 2 * len(small_units(num_layers=1))
    assert reached[-1].op is Op.CLIP
    assert recorder.issued[-1] == (0, reached[-1].index)
    with pytest.raises(OutOfOrderError, match="the model reached forward embed, but the plan expects the end"):
        loop.reach(Op.FORWARD, "embed")
    loop.finish()
    assert len(recorder.issued) == len(schedule.tasks)
    assert (loop.iteration, loop.expected()) == (1, reached[0])


@pytest.mark.parametrize(("op", "unit"), [(Op.BACKWARD, "embed"), (Op.FORWARD, "head"), (Op.CLIP, "")])
def test_a_caller_at_another_place_is_shown_where(op: Op, unit: str) -> None:
    recorder = Recorder()
    loop = Loop(small_schedule(), recorder.issue)
    with pytest.raises(OutOfOrderError, match=f"reached {op} {unit or 'model'}, but the plan expects forward embed;"):
        loop.reach(op, unit)
    assert recorder.issued == []  # nothing was issued for it
    assert loop.reach(Op.FORWARD, "embed").unit == "embed"  # and the right one still works
