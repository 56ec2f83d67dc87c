"""The base of all kinds of cases."""

import abc
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from hwprofiles.profile import HardwareProfile
from hwprofiles.quantity import Frozen
from planner.schedule.tasks import Tier
from planner.simulate.prediction import TierMemory

# Limits of counts and measurements, far beyond any run, so that products stay finite.
Number = Annotated[int, Field(ge=1, le=10**15)]
Amount = Annotated[float, Field(ge=1e-12, le=1e15)]

Unit = Literal["s", "B", "B/s", "FLOP/s", "tokens"]


class CaseError(ValueError):
    """A case that cannot be read or predicted; the message names the case, the field, and allowed values."""


class Metric(StrEnum):
    """A measured and predicted quantity of a run, in the order of tables."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"
    ITERATION = "iteration"
    PEAK_GPU = "peak GPU"
    BLOCKING = "blocking throughput"
    END_TO_END = "end to end"
    COMPUTE_RATE = "model FLOP rate"
    LONGEST = "longest sequence"
    OURS = "our plan in its place"

    @property
    def unit(self) -> Unit:
        """The SI unit of its values."""
        return _UNITS.get(self, "s")

    @property
    def headline(self) -> bool:
        """Whether thresholds apply to it, because it is about the whole run."""
        return self in {Metric.ITERATION, Metric.BLOCKING, Metric.END_TO_END, Metric.COMPUTE_RATE}


_UNITS: dict[Metric, Unit] = {
    Metric.PEAK_GPU: "B",
    Metric.BLOCKING: "B/s",
    Metric.COMPUTE_RATE: "FLOP/s",
    Metric.LONGEST: "tokens",
}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The prediction for a case.

    Attributes:
        values: in SI units, for every metric that the case measured, or more.
        converged: whether simulated iterations became equal.
        warnings: assumptions of the prediction, in sentences.
        room_bytes: what is left, at the peak, of the tier of which least is left; negative if memory lacks.
        iteration_s: simulates the iteration on another machine; ``None`` if the case has none, or chooses by machine.
    """

    values: dict[Metric, float]
    converged: bool = True
    warnings: tuple[str, ...] = ()
    room_bytes: int = 0
    iteration_s: Callable[[HardwareProfile], float] | None = None


def shortages(case_id: str, memory: Mapping[Tier, TierMemory]) -> Iterator[str]:
    """Yield a warning for each tier that is too small in the prediction, although the run succeeded."""
    for tier, used in memory.items():
        if used.missing_bytes:
            yield (
                f"case {case_id} is predicted to hold {used.peak_bytes / 1e9:.1f} GB of {tier} memory, where there are "
                f"{used.capacity_bytes / 1e9:.1f} GB: as it ran, something about it is not as it is simulated"
            )


class Case(Frozen, abc.ABC):
    """One published run.

    Attributes:
        id: its name, unique in its file.
        hardware: name of its machine's profile.
        source: who measured it, and where it is published.
    """

    model_config = ConfigDict(strict=True)  # "4" is not 4

    id: Annotated[str, Field(min_length=1)]
    hardware: str
    source: Annotated[str, Field(min_length=3)]

    @abc.abstractmethod
    def measurements(self) -> dict[Metric, float]:
        """Return the measurements, in SI units."""

    @abc.abstractmethod
    def check(self) -> None:
        """Check that the case can be expressed, before any work.

        Raises:
            CaseError: it cannot; the message names the first such field.
        """

    def predict(self, profile: HardwareProfile) -> Outcome:
        """Simulate the case on a machine.

        Raises:
            CaseError: the case cannot be expressed, or not on this machine; the message names the case.
        """
        self.check()
        try:
            outcome = self._predict(profile)
        except CaseError:
            raise
        except ValueError as error:
            raise CaseError(f"case {self.id}: {error}") from error
        for metric in self.measurements():
            if not 0 < (value := outcome.values[metric]) < math.inf:
                raise CaseError(
                    f"case {self.id}: {metric.value} is measured, but predicted as {value:g}: nothing of the kind "
                    "happens in such a run; leave it out of measured"
                )
        return outcome

    @abc.abstractmethod
    def _predict(self, profile: HardwareProfile) -> Outcome:
        """Simulate a case that was checked.

        Raises:
            ValueError: it cannot be expressed on this machine.
        """
