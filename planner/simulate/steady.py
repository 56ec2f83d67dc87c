"""When a simulated iteration repeats itself.

[Note: Steady state] Iterations settle into a *cycle*: of one iteration, or of several that differ, such as two that
alternate because work handed on from lane to lane comes back only every second time. Equal periods alone do not show
it: while a lane falls behind, the lanes that do not wait for it yet keep a period that will not last. Two iterations
are the same if each task starts and ends at the same moments after the iteration's beginning.

Let *reach* be how many iterations later something may still run beside what is left of an iteration. What happens from
the first start of iteration i on depends on earlier iterations only through when the tasks of those from i - reach on
start and end: that says who runs beside whom, and thus every speed. So if as many iterations in a row are the same as
those ``length`` later, all that follow are. We also ask that each iteration of the cycle was seen twice, and leave out
the last one: nothing later runs beside it, and it has no period.
"""

import dataclasses

import numpy as np

from planner.schedule.timeline import Timeline

# Moments that differ by less than this part of the period are the same.
_SAME = 1e-6


@dataclasses.dataclass(frozen=True, slots=True)
class Cycle:
    """Iterations that repeat from then on: ``length`` of them, beginning with the index ``first``."""

    first: int
    length: int


def find_cycle(timeline: Timeline) -> Cycle | None:
    """Return the shortest cycle that a timeline shows, and of that the first occurrence; ``None`` if it shows none."""
    num_iterations = timeline.num_iterations
    begin_s = np.array([timeline.begin_s(i) for i in range(num_iterations)])
    period_s = np.diff(begin_s)
    moments_s = np.concatenate([timeline.start_s, timeline.end_s], axis=1) - begin_s[:, np.newaxis]
    slack_s = _SAME * period_s.max(initial=0.0)
    reach = _reach(timeline)
    num_whole = num_iterations - 1
    for length in range(1, num_whole // 2 + 1):
        earlier, later = slice(num_whole - length), slice(length, num_whole)
        same = abs(period_s[later] - period_s[earlier]) <= slack_s
        same[same] = (abs(moments_s[later][same] - moments_s[earlier][same]) <= slack_s).all(axis=1)
        in_a_row = max(length, reach)
        for first in range(len(same) - in_a_row + 1):
            if same[first : first + in_a_row].all():
                return Cycle(first, length)
    return None


def _reach(timeline: Timeline) -> int:
    """Return how many iterations after an iteration something may run beside what is left of it."""
    first_s, last_s = timeline.start_s.min(axis=1), timeline.end_s.max(axis=1)
    slack_s = _SAME * (last_s - first_s)
    begun = np.searchsorted(np.maximum.accumulate(first_s), last_s - slack_s)  # iterations begun before each one's end
    return int((begun - 1 - np.arange(timeline.num_iterations)).max(initial=0))
