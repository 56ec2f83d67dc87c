"""Predicted against measured: time by phase and lane, memory by tier."""

import dataclasses
import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from rich.console import Group, RenderableType

from planner.schedule import Phase, Tier
from planner.timeline import Timeline
from ullage.console import table
from ullage.formatting import si, signed_percent


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One quantity, predicted and measured.

    Attributes:
        name: of the phase, lane or tier.
        predicted, measured: in ``unit``; ``None`` where there is no such number.
        unit: the SI unit.
    """

    name: str
    predicted: float | None
    measured: float | None
    unit: Literal["s", "B", "B/s", "FLOP/s"]

    @property
    def error(self) -> float | None:
        """``predicted / measured - 1``: positive if too much was predicted; ``None`` if either is missing or 0."""
        if self.predicted is None or not self.measured:
            return None
        return self.predicted / self.measured - 1


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Predicted against measured.

    Attributes:
        phases: those that the schedule has, and the iteration.
        lanes: seconds that each lane is busy in one iteration.
        memory: peak bytes of each tier.
        num_iterations: measured iterations that the medians are taken over.
    """

    phases: tuple[Row, ...]
    lanes: tuple[Row, ...]
    memory: tuple[Row, ...]
    num_iterations: int

    def to_json(self) -> dict[str, Any]:
        """Return plain data, seconds and bytes, with the signed relative error of each row."""
        tables = {"phases": self.phases, "lanes": self.lanes, "memory": self.memory}
        return {
            "num_iterations": self.num_iterations,
            **{
                name: {
                    row.name: {"predicted": row.predicted, "measured": row.measured, "error": row.error} for row in rows
                }
                for name, rows in tables.items()
            },
        }


def compare(
    predicted: Timeline,
    steady: int,
    measured: Timeline,
    iterations: Sequence[int],
    predicted_memory: Mapping[Tier, int],
    measured_memory: Mapping[Tier, int],
) -> Comparison:
    """Compare a simulated iteration with measured ones.

    Args:
        predicted: simulated timeline.
        steady: which of its iterations to read.
        measured: of the same schedule.
        iterations: which of its iterations to read; each quantity is their median.
        predicted_memory: peak bytes by tier.
        measured_memory: the same, measured.

    Raises:
        ValueError: ``iterations`` is empty or names an iteration that was not measured.
    """
    if not iterations:
        raise ValueError("no steady iteration was measured; run more iterations")
    if not all(0 <= i < measured.num_iterations for i in iterations):
        raise ValueError(f"iterations {list(iterations)} are not among the {measured.num_iterations} measured ones")

    def median_s(read: Callable[[Timeline, int], float]) -> float:
        return statistics.median(read(measured, i) for i in iterations)

    present = {task.phase for task in predicted.schedule.tasks}
    reads: dict[str, Callable[[Timeline, int], float]] = {
        phase.value: functools.partial(_phase_s, phase) for phase in Phase if phase in present
    }
    reads["iteration"] = Timeline.period_s
    phases = tuple(Row(name, read(predicted, steady), median_s(read), "s") for name, read in reads.items())
    expected_s = predicted.busy_s(steady)
    seen_s = [measured.busy_s(i) for i in iterations]
    lanes = tuple(
        Row(lane.value, expected_s.get(lane), statistics.median(busy_s.get(lane, 0.0) for busy_s in seen_s), "s")
        for lane in dict.fromkeys([*expected_s, *(lane for busy_s in seen_s for lane in busy_s)])
    )
    memory = tuple(
        Row(tier.value, predicted_memory.get(tier), measured_memory.get(tier), "B")
        for tier in Tier
        if tier in predicted_memory or tier in measured_memory
    )
    return Comparison(phases, lanes, memory, len(iterations))


def _phase_s(phase: Phase, timeline: Timeline, iteration: int) -> float:
    return timeline.phases(iteration).by_phase[phase]


def render_comparison(comparison: Comparison) -> RenderableType:
    """Return tables to print with :func:`ullage.console.console`."""
    count = comparison.num_iterations
    return Group(
        _render(f"phases (measured: median of {count} iterations)", comparison.phases),
        "",
        _render("busy time of lanes", comparison.lanes),
        "",
        _render("peak memory", comparison.memory),
    )


def _render(title: str, rows: Sequence[Row]) -> RenderableType:
    result = table(title, "", "predicted", "measured", "error")
    for row in rows:
        values = ("-" if value is None else si(value, row.unit) for value in (row.predicted, row.measured))
        result.add_row(row.name, *values, "-" if row.error is None else signed_percent(row.error))
    return result
