"""Compare the busy time of each lane with its prediction during training."""

import statistics
from collections.abc import Iterator, Sequence
from typing import Final

from executor.devices.lanes import NUM_RECORDED
from executor.session import Session
from planner.schedule.tasks import Lane
from planner.schedule.timeline import Timeline
from planner.simulate.machine import Simulation
from ullage.analysis.comparison import Row
from ullage.output.formatting import LANE_WORDS, si

THRESHOLD: Final = 0.25
"""A lane has drifted if its busy time differs by more than this fraction of its prediction,"""
MIN_SHARE: Final = 0.05
"""and by more than this fraction of the predicted iteration."""

_MOST_NAMED: Final = 3  # lanes in one warning

# Task times are recorded for the first iterations, which go into run.json, and then for a few iterations of every
# period. This is enough to see a change, and its cost is bounded for training of any length.
_PERIOD = 100
_WINDOW = 5  # iterations; the first and the last may be incomplete
_FIRST_CHECK = 7  # first iteration whose window has no warm-up and no metering


def warning(drifts: Sequence[Row]) -> str:
    """Return one line about all lanes that have drifted, largest drift first."""

    def words(drift: Row, predicted_s: float, measured_s: float) -> str:
        ratio = f" ({measured_s / predicted_s:.2f} x)" if predicted_s else ""
        return (
            f"{LANE_WORDS[Lane(drift.name)]} (lane {drift.name}) {si(measured_s, 's')} measured, "
            f"{si(predicted_s, 's')} predicted{ratio}"
        )

    seconds = [(drift, drift.predicted or 0.0, drift.measured or 0.0) for drift in drifts]
    worst = sorted(seconds, key=lambda found: -abs(found[2] - found[1]))
    named = [words(*found) for found in worst[:_MOST_NAMED]]
    named += [f"{len(worst) - _MOST_NAMED} more lane(s)"] if len(worst) > _MOST_NAMED else []
    return (
        f"warning: busy times per iteration differ from their prediction: {'; '.join(named)}. Run `ullage calibrate`, "
        "then plan again"
    )


class DriftWatch:
    """Periodically compares lanes with their prediction, and reports each drifted lane once.

    Args:
        predicted: the simulated plan, of which the steady iteration counts.
    """

    def __init__(self, predicted: Simulation) -> None:
        self._busy_s = predicted.timeline.busy_s(predicted.steady)
        self._iteration_s = predicted.timeline.period_s(predicted.steady)
        self._reported: set[Lane] = set()

    def after(self, session: Session, iteration: int) -> tuple[Row, ...]:
        """If a check is due after this iteration, compare. Also decide whether the next iteration is recorded.

        A check waits for running updates, which then do not overlap with the next forward. This affects few iterations.

        Returns:
            Lanes that have drifted and have not been reported.
        """
        upcoming = iteration + 1
        session.record = upcoming < NUM_RECORDED or upcoming % _PERIOD < _WINDOW
        if iteration != _FIRST_CHECK and (iteration < _PERIOD or iteration % _PERIOD != _WINDOW - 1):
            return ()
        timeline = session.timeline(iteration - _WINDOW + 1, iteration)
        whole = range(1, timeline.num_iterations - 1)  # some of these may not be recorded
        return tuple(self.drifts(timeline, whole)) if whole else ()

    def drifts(self, measured: Timeline, iterations: Sequence[int]) -> Iterator[Row]:
        """Yield lanes that have not been reported and whose median over these iterations has drifted."""
        seen_s = [measured.busy_s(i) for i in iterations]
        for lane in dict.fromkeys([*self._busy_s, *(lane for busy_s in seen_s for lane in busy_s)]):
            predicted_s = self._busy_s.get(lane, 0.0)
            measured_s = statistics.median(busy_s.get(lane, 0.0) for busy_s in seen_s)
            off_s = abs(measured_s - predicted_s)
            if lane in {Lane.SNAPSHOT, Lane.GATE}:
                continue  # the prediction does not include checkpoints
            if lane not in self._reported and off_s > max(THRESHOLD * predicted_s, MIN_SHARE * self._iteration_s):
                self._reported.add(lane)
                yield Row(lane.value, predicted_s, measured_s, "s")
