"""Counts the device memory that a running schedule holds.

A plan fits if tasks take their simulated times: a gradient is freed when its copy to the host ends, before backward
needs the memory. In a real iteration the copy may be late, and both would be held at once. So a task of the caller
begins only if there is room for the buffers that it makes, or if no running task is going to free memory. If all times
are as simulated, no task waits.

A task that waits for another stage of a pipeline is not waited for: that stage may wait for room itself.

This is not done on a GPU. There a task is issued long before it runs, and the plan leaves a margin.
"""

from collections import defaultdict
from typing import final

from planner.schedule.schedule import Schedule
from planner.schedule.tasks import STAGE_LANES, Task, Tier

_NUM_ITERATIONS = 3  # a buffer may outlive its iteration, and its last task may be late


@final
class Room:
    """Counts the bytes of a schedule's buffers on the device. Not thread-safe.

    Args:
        schedule: the tasks and buffers of every iteration.
        capacity_bytes: the limit of device memory.
    """

    def __init__(self, schedule: Schedule, capacity_bytes: int) -> None:
        self._made, self._freed = defaultdict[int, int](int), defaultdict[int, int](int)  # by task
        self._freed_later = defaultdict[int, int](int)  # bytes of buffers that the previous iteration made, by task
        self._held = {-1: 0}  # bytes by the iteration that made the buffers
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
        """Count a task that was issued to another thread."""
        self._num_freeing += self._frees(task)

    def begin(self, task: Task, iteration: int) -> None:
        """Count the buffers that a task makes."""
        if iteration not in self._held:
            self._held = {i: held for i, held in self._held.items() if i > iteration - _NUM_ITERATIONS}
            self._held[iteration] = 0
        self._held[iteration] += self._made.get(task.index, 0)

    def end(self, task: Task, iteration: int, *, was_issued: bool) -> None:
        """Count the buffers that are freed when a task ends."""
        for made_in, freed in ((iteration, self._freed), (iteration - 1, self._freed_later)):
            if made_in in self._held:
                self._held[made_in] -= freed.get(task.index, 0)
        self._num_freeing -= was_issued and self._frees(task)

    def lacks(self, task: Task) -> bool:
        """Return whether there is too little room for a task now, but an issued task is going to free some."""
        return self._num_freeing > 0 and sum(self._held.values()) + self._made.get(task.index, 0) > self._capacity_bytes

    def _frees(self, task: Task) -> bool:
        frees = self._freed.get(task.index) or self._freed_later.get(task.index)
        return bool(frees) and task.lane not in STAGE_LANES
