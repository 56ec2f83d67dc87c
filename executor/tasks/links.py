"""Tasks by which a stage of a pipeline sends to the stages beside it, and receives from them.

The caller hands over the tensors that a task is about, and then reaches the task: :mod:`executor.driver.pipeline`. What
has no task, in evaluation and off the plan, takes the same way.
"""

import collections
from collections.abc import Sequence
from typing import final

from torch import Tensor

from executor.devices.backend import Backend, Event
from executor.distributed.groups import Group
from executor.distributed.ranks import Ranks
from planner.lowering.sends import links
from planner.schedule.schedule import Schedule
from planner.schedule.tasks import STAGE_LANES, Lane, Task

_Handed = tuple[Event, Group, int, Sequence[Tensor]]


@final
class Links:
    """Exchanges tensors with other stages, in the order in which they are handed over on each lane."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._handed = {lane: collections.deque[_Handed]() for lane in STAGE_LANES}

    def hand_over(self, lane: Lane, group: Group, sender: int, values: Sequence[Tensor]) -> None:
        """Let the next task of a lane exchange these tensors, when all that the caller has issued so far has ended.

        Args:
            lane: where it will be.
            group: this rank and that of the other stage.
            sender: number of the one that sends, in the group.
            values: flat tensors, which are sent, or are filled.
        """
        self._handed[lane].append((self._backend.record_event(Lane.COMPUTE), group, sender, values))

    def exchange(self, task: Task) -> None:
        """Send or receive, in the thread of a task's lane."""
        ready, group, sender, values = self._handed[task.lane].popleft()
        self._backend.wait_event(task.lane, ready)
        for each in values:
            group.send(each, sender)
            self._backend.record_stream(each)


def check_same_order(schedule: Schedule, ranks: Ranks) -> None:
    """Check that this stage and those beside it exchange the same, in one order. All stages call this together.

    Raises:
        ValueError: they do not, so that they would wait for each other without end.
    """
    with_next, with_last = links(schedule.tasks)
    for number, group in sorted(ranks.forward.items()):
        ways = with_next if number == ranks.stage else with_last
        order = [[(task.micro_batch, task.num_bytes) for task in way] for way in ways]
        group.check_same("order of what its stage of the pipeline exchanges", repr(order).encode())
