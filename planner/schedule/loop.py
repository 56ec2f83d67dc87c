"""The one loop that walks a schedule while a model runs.

A machine runs the tasks, with threads and ordinary memory, or with CUDA streams (:mod:`executor.devices.lanes`). The
loop decides only when tasks are issued, in their order. Everything else follows from [Note: Semantics] in
:mod:`planner.schedule.tasks`, which machines obey, and the simulator too (:mod:`planner.simulate.machine`): there, all
tasks are issued at once.
"""

from collections.abc import Callable, Sequence
from typing import Final

from planner.schedule.schedule import Schedule
from planner.schedule.tasks import Op, Task

REACHED: Final = frozenset({Op.FORWARD, Op.RECOMPUTE, Op.REMAKE, Op.BACKWARD, Op.WEIGHT_GRADIENT, Op.CLIP})
"""Tasks that the caller performs itself, and reports to the loop."""


Issue = Callable[[Sequence[Task], int], None]
"""Appends tasks of an iteration to their lanes. They run when [Note: Semantics] allows, perhaps before it returns."""


class OutOfOrderError(RuntimeError):
    """The caller reached a compute task that the schedule does not expect next."""


class Loop:
    """Issues a schedule's tasks in order, iteration after iteration.

    A caller that computes by itself (PyTorch's forward and backward) reports with :meth:`reach` where it is. The loop
    then issues all tasks up to and including that one. :meth:`finish` issues the rest of the iteration.
    """

    def __init__(self, schedule: Schedule, issue: Issue) -> None:
        self.schedule = schedule
        self.iteration = 0
        self._issue = issue
        self._next = 0
        self._order = [*(t for t in schedule.tasks if t.op in REACHED), None]
        self._reached = 0

    @property
    def num_issued(self) -> int:
        """Tasks of this iteration that have been issued."""
        return self._next

    def expected(self) -> Task | None:
        """Return the compute (or clip) task that must be reached next in this iteration, if any is left."""
        return self._order[self._reached]

    def reach(self, op: Op, unit: str = "") -> Task:
        """Issue all tasks up to and including the next compute task, which must be ``op`` on ``unit``.

        Raises:
            OutOfOrderError: the schedule expects another task here.
        """
        task = self.expected()
        if task is None or task.op is not op or task.unit != unit:
            wanted = task.name if task else "the end of the iteration"
            raise OutOfOrderError(
                f"the model reached {op} {unit or 'model'}, but the plan expects {wanted}; run the model as it was "
                "planned (same modules in the same order, as many micro-batches), or plan again"
            )
        self.issue_up_to(task.index + 1)
        self._reached += 1
        return task

    def issue_up_to(self, stop: int) -> None:
        """Issue the tasks before index ``stop`` that have not been issued. The caller has reached its own."""
        if stop > self._next:
            self._issue(self.schedule.tasks[self._next : stop], self.iteration)
            self._next = stop

    def finish(self) -> None:
        """Issue the rest of this iteration and begin the next."""
        self.issue_up_to(len(self.schedule.tasks))
        self._next = 0
        self._reached = 0
        self.iteration += 1
