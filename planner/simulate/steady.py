"""The steady state: when simulated iterations repeat.

[Note: Steady state] Iterations settle into a *cycle*, of one iteration or of several different ones; two may alternate,
for example, if work that passes from lane to lane returns only every second time. Equal periods do not prove a cycle:
while one lane falls behind, lanes that do not wait for it yet keep a period that will not last. Two iterations are
equal if each task starts and ends at the same times after the iteration's beginning.

Let *reach* be the number of iterations by which tasks of one iteration may still overlap with later ones. From the
first start of iteration i on, everything depends on earlier iterations only through the start and end times of
iterations from i - reach on: these determine which tasks overlap, and so every speed. So if that many iterations in a
row equal those ``length`` later, all following iterations do too. We also require that each iteration of the cycle was
seen twice. The last iteration does not count: nothing later overlaps with it, and it has no period.
"""

import numpy as np

from planner.schedule.timeline import Timeline

# Times that differ by less than this fraction of the period are equal.
_SAME = 1e-6


def find_cycle(timeline: Timeline) -> range | None:
    """Return the iterations of the first occurrence of the shortest cycle in a timeline; ``None`` if there is none."""
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
                return range(first, first + length)
    return None


def _reach(timeline: Timeline) -> int:
    """Return the number of later iterations with which an iteration may overlap."""
    first_s, last_s = timeline.start_s.min(axis=1), timeline.end_s.max(axis=1)
    slack_s = _SAME * (last_s - first_s)
    begun = np.searchsorted(np.maximum.accumulate(first_s), last_s - slack_s)  # iterations begun before each one's end
    return int((begun - 1 - np.arange(timeline.num_iterations)).max(initial=0))
