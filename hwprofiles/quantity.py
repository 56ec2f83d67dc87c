"""Numbers with their provenance.

Every number of a profile is a :class:`Quantity` or a :class:`Curve` with a :class:`Provenance`. The planner mixes
measured, published and assumed values, so it must be able to say which of them a prediction rests on.
"""

import bisect
import itertools
import math
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

Origin = Literal["measured", "published", "fitted", "assumed"]
Unit = Literal["bytes", "bytes_per_s", "s", "flop_per_s", "params_per_s", "count", "ratio"]
SizeUnit = Literal["bytes", "flop", "params"]


class Frozen(BaseModel):
    """Base of all profile types: immutable, and an unknown field is an error that names it."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Provenance(Frozen):
    """Where a value comes from.

    Attributes:
        origin: ``measured`` on the machine itself, ``published`` by others, ``fitted`` to whole runs, or ``assumed``.
        source: the command that measured it, the publication, or the reason for the assumption.
        date: ISO date of the measurement or publication, if known.
        num_samples: number of repetitions of the measurement.
        runs: ids of the runs that a fitted value was fitted to.
    """

    origin: Origin
    source: Annotated[str, Field(min_length=3)]
    date: str | None = None
    num_samples: Annotated[int, Field(ge=1)] | None = None
    runs: tuple[str, ...] | None = None


class Quantity(Frozen):
    """One number with its unit and provenance.

    Attributes:
        value: in ``unit``; not negative.
        p10, p90: tenth and ninetieth percentile over the repetitions of a measurement, if there were several.
    """

    value: Annotated[float, Field(ge=0)]
    unit: Unit
    provenance: Provenance
    p10: Annotated[float, Field(ge=0)] | None = None
    p90: Annotated[float, Field(ge=0)] | None = None

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if (self.p10 is None) != (self.p90 is None):
            raise ValueError("has one of p10 and p90; give both, or neither")
        if self.p10 is not None and self.p90 is not None and not self.p10 <= self.value <= self.p90:
            raise ValueError(f"p10 <= value <= p90 does not hold: {self.p10:g}, {self.value:g}, {self.p90:g}")
        return self


class CurvePoint(Frozen):
    """Time taken at one size: tenth percentile, median and ninetieth percentile, in seconds."""

    size: Annotated[float, Field(gt=0)]
    p10_s: Annotated[float, Field(gt=0)]
    median_s: Annotated[float, Field(gt=0)]
    p90_s: Annotated[float, Field(gt=0)]

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if not self.p10_s <= self.median_s <= self.p90_s:
            raise ValueError(f"at size {self.size:g}: p10 <= median <= p90 does not hold")
        return self


class Curve(Frozen):
    """Time against size, monotone, interpolated linearly in log-log space.

    Above the last point, time is proportional to size: the rate stays that of the last point. So no size is read at a
    rate that was not measured. Below the first point, the slope of the nearest segment continues (at least 0 and at
    most proportional to size). :meth:`covers` tells such an extrapolation, so that the user can be warned.
    """

    size_unit: SizeUnit
    points: Annotated[tuple[CurvePoint, ...], Field(min_length=1)]
    provenance: Provenance

    @property
    def unit(self) -> str:
        """The unit of its rates."""
        return f"{self.size_unit}_per_s"

    @model_validator(mode="after")
    def _monotone(self) -> Self:
        for a, b in itertools.pairwise(self.points):
            if not a.size < b.size:
                raise ValueError(f"sizes must increase, but {a.size:g} is followed by {b.size:g}")
            if a.median_s > b.median_s:
                raise ValueError(f"time must not fall with size, but it does from {a.size:g} to {b.size:g}")
        return self

    def time_s(self, size: float) -> float:
        """Return the median time in seconds at ``size`` (in ``size_unit``)."""
        if size <= 0:
            return 0.0
        points, last = self.points, self.points[-1]
        if size > last.size or len(points) == 1:
            return last.median_s * size / last.size
        right = max(bisect.bisect_left([p.size for p in points], size), 1)
        a, b = points[right - 1], points[right]
        slope = math.log(b.median_s / a.median_s) / math.log(b.size / a.size)
        if size < a.size:
            slope = min(slope, 1.0)
        return float(a.median_s * (size / a.size) ** slope)

    def best_rate_per_s(self) -> float:
        """Return the highest rate of the curve's points, in ``size_unit`` per second."""
        return max(p.size / p.median_s for p in self.points)


def _quantity_in(unit: Unit, *, positive: bool = False) -> AfterValidator:
    """Return a check that a quantity is in ``unit``, and above zero if ``positive``."""

    def check(quantity: Quantity) -> Quantity:
        if quantity.unit != unit:
            raise ValueError(f"is in {quantity.unit!r}, but must be in {unit!r}; convert the value and change its unit")
        if positive and quantity.value == 0:
            raise ValueError("is 0, but must be above 0; measure it again, or leave an optional field out")
        return quantity

    return AfterValidator(check)


def _curve_over(size_unit: SizeUnit) -> AfterValidator:
    """Return a check that a curve's sizes are in ``size_unit``."""

    def check(curve: Curve) -> Curve:
        if curve.size_unit != size_unit:
            raise ValueError(f"has sizes in {curve.size_unit!r}, but must have them in {size_unit!r}; convert them")
        return curve

    return AfterValidator(check)


# Fields have these types, so that the error about a wrong unit names the field.
Bytes = Annotated[Quantity, _quantity_in("bytes", positive=True)]
BytesPerSecond = Annotated[Quantity, _quantity_in("bytes_per_s", positive=True)]
ParamsPerSecond = Annotated[Quantity, _quantity_in("params_per_s", positive=True)]
Ratio = Annotated[Quantity, _quantity_in("ratio", positive=True)]
Seconds = Annotated[Quantity, _quantity_in("s")]
Count = Annotated[Quantity, _quantity_in("count")]
CurveOverBytes = Annotated[Curve, _curve_over("bytes")]
CurveOverFlop = Annotated[Curve, _curve_over("flop")]
CurveOverParams = Annotated[Curve, _curve_over("params")]
