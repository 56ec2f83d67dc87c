"""The room that a schedule has on the device while it runs.

[Note: Room] A plan fits by simulated times: a gradient is gone when its copy to the host has ended, which it does
before backward needs the memory. In a real iteration that copy may be late, and both would be held. So a task of the
caller begins only if there is room for what it makes, or nothing that is under way would make room. Where all is as
simulated, no task waits.

On a GPU this is not done. There a task begins when it is issued, long before it runs, and the plan leaves a margin.
"""

from collections import defaultdict
from typing import final

from planner.schedule.schedule import Schedule
from planner.schedule.tasks import Task, Tier

_NUM_ITERATIONS = 3  # iterations: a buffer may outlive one, and its last task may be late


@final
class Room:
    """Counts what is held on the device, by the buffers of a schedule. Not thread-safe.

    Args:
        schedule: the tasks and buffers of every iteration.
        capacity_bytes: of the device.
    """

    def __init__(self, schedule: Schedule, capacity_bytes: int) -> None:
        self._made, self._freed = defaultdict[int, int](int), defaultdict[int, int](int)  # by task
        self._freed_later = defaultdict[int, int](int)  # the same of buffers that the iteration before made
        self._held = {-1: 0}  # by the iteration that made it
        self._num_freeing = 0
        self._capacity_bytes = capacity_bytes
        for buffer in schedule.buffers:
            if buffer.tier is not Tier.GPU:
                continue
            if buffer.first is None or buffer.last is None:
                self._capacity_bytes -= buffer.num_bytes
                continue
            self._made[buffer.first] += buffer.num_bytes
            if buffer.last < buffer.first:
                self._freed_later[buffer.last] += buffer.num_bytes
                self._held[-1] += buffer.num_bytes
            else:
                self._freed[buffer.last] += buffer.num_bytes

    def issue(self, task: Task) -> None:
        """Count a task of another thread, which will run."""
        self._num_freeing += self._frees(task)

    def begin(self, task: Task, iteration: int) -> None:
        """Count what a task holds from its beginning on."""
        if iteration not in self._held:
            self._held = {i: held for i, held in self._held.items() if i > iteration - _NUM_ITERATIONS}
            self._held[iteration] = 0
        self._held[iteration] += self._made.get(task.index, 0)

    def end(self, task: Task, iteration: int, *, was_issued: bool) -> None:
        """Count what is gone when a task has ended."""
        for made_in, freed in ((iteration, self._freed), (iteration - 1, self._freed_later)):
            if made_in in self._held:
                self._held[made_in] -= freed.get(task.index, 0)
        self._num_freeing -= was_issued and self._frees(task)

    def lacks(self, task: Task) -> bool:
        """Return whether there is too little room for a task now, but there will be more."""
        return self._num_freeing > 0 and sum(self._held.values()) + self._made.get(task.index, 0) > self._capacity_bytes

    def _frees(self, task: Task) -> bool:
        return bool(self._freed.get(task.index) or self._freed_later.get(task.index))
