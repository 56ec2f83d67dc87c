"""When a simulated iteration repeats itself.

[Note: Steady state] The first iterations of a simulation are special: nothing of an earlier iteration is still under
way. The last ones are too: nothing of a later iteration is under way yet. In between, iterations settle into a *cycle*:
of one iteration, or of several that differ, such as two that alternate because work handed on from lane to lane comes
back only every second time. A cycle has been found when each of its iterations ran twice, with every task at the same
moment after the iteration's beginning. Equal periods alone would not do: while a lane falls behind, the lanes that do
not wait for it yet keep a period that will not last.
"""

import dataclasses

import numpy as np

from planner.timeline import Timeline

# Moments that differ by less than this part of the period are the same.
_SAME = 1e-6


@dataclasses.dataclass(frozen=True, slots=True)
class Cycle:
    """Iterations that repeat from then on: ``length`` of them, beginning with the index ``first``."""

    first: int
    length: int


def find_cycle(timeline: Timeline) -> Cycle | None:
    """Return the shortest cycle that a timeline shows twice, and of that the first; ``None`` if there is none."""
    num_iterations = timeline.num_iterations
    begin_s = np.array([timeline.begin_s(i) for i in range(num_iterations)])
    period_s = np.diff(begin_s)
    end_s = (timeline.end_s - begin_s[:, np.newaxis])[:-1]
    # Iterations of which all that they overlap with was simulated, and of which the end is known.
    reach = _reach(timeline)
    first, stop = reach, min(num_iterations - reach, num_iterations - 1)
    slack_s = _SAME * period_s.max(initial=0.0)
    for length in range(1, (stop - first) // 2 + 1):
        earlier, later = slice(first, stop - length), slice(first + length, stop)
        same = abs(period_s[later] - period_s[earlier]) <= slack_s
        if not same.any():
            continue
        same &= (abs(end_s[later] - end_s[earlier]) <= slack_s).all(axis=1)
        for start in range(len(same) - length + 1):
            if same[start : start + length].all():
                return Cycle(first + start, length)
    return None


def _reach(timeline: Timeline) -> int:
    """Return how many iterations lie between two whose tasks run at the same time, at most."""
    first_s, last_s = timeline.start_s.min(axis=1), timeline.end_s.max(axis=1)
    slack_s = _SAME * (last_s - first_s)
    begun = np.searchsorted(np.maximum.accumulate(first_s), last_s - slack_s)  # iterations begun before each one's end
    return int((begun - 1 - np.arange(timeline.num_iterations)).max(initial=0))
