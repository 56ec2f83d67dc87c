"""Linear programs with bounded variables, and the bounds that their dual vectors prove, in exact arithmetic.

For a minimum over ``low <= x <= high`` with rows ``a_i x >= b_i``, any multipliers ``y_i >= 0`` (of
any sign if the row is an equation) give a lower bound, without trust in a solver (weak duality): no feasible x has
``y (b - A x) > 0``, so the objective is at least

    sum_i y_i b_i  +  sum_j  min over [low_j, high_j] of (c_j - sum_i y_i a_ij) x_j

Floats are exact rationals, and so is every step of the sum, so :func:`bound` has no tolerance. A bad vector gives a
weak bound, never a wrong one.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Mapping
from fractions import Fraction

from planner.schedule.tasks import Tier

TIME = "iteration_s"
OVERRUN = "overrun"
# A variable for the usable fraction of a tier's memory. It is 1; a search may set it lower.
ROOM = {Tier.GPU: "room on the device", Tier.HOST: "room on the host", Tier.NVME: "room on NVMe"}
# A variable for each ring of slots: the fraction of device memory that the ring takes.
RING = "slots for units of "
# Longer than any iteration.
NEVER_S = 1e9

Boxes = Mapping[str, tuple[float, float]]
"""Lowest and highest value of variables, by name."""


class Sum(defaultdict[str, float]):
    """A linear expression: coefficients by variable; the constant has the key ``""``."""

    def __init__(self, *terms: tuple[str, float]) -> None:
        super().__init__(float, terms)
        if len(self) < len(terms):  # a variable occurs more than once
            self.clear()
            for name, coefficient in terms:
                self[name] += coefficient

    def plus(self, other: Mapping[str, float], times: float = 1.0) -> "Sum":
        """Add ``times`` another expression in place, and return this one."""
        if not self and times == 1.0:
            self.update(other)
            return self
        for name, coefficient in other.items():
            self[name] += times * coefficient
        return self


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """A condition: ``sum of terms >= least``, or ``==``.

    Attributes:
        name: the condition in words; reports name binding conditions by it.
        terms: coefficients, by variable.
        least: the right-hand side.
        equal: whether it is an equation.
    """

    name: str
    terms: tuple[tuple[str, float], ...]
    least: float
    equal: bool = False


class LinearProgram:
    """Minimise one variable under linear conditions.

    Attributes:
        objective: the variable to minimise.
        boxes: lowest and highest value of every variable.
        rows: the conditions; their names are unique.
    """

    def __init__(self, objective: str) -> None:
        self.objective = objective
        self.boxes: dict[str, tuple[float, float]] = {}
        self.rows: list[Row] = []

    def variable(self, name: str, low: float = 0.0, high: float = 1.0) -> str:
        """Add a variable, and return its name."""
        assert name not in self.boxes, name
        self.boxes[name] = (low, high)
        return name

    def at_least(
        self, name: str, large: Mapping[str, float], small: Mapping[str, float], *, equal: bool = False
    ) -> None:
        """Add the condition that one expression is at least another, or equals it."""
        difference = Sum().plus(large).plus(small, -1.0)
        least = -difference.pop("", 0.0)
        terms = tuple((variable, a) for variable, a in difference.items() if a)
        self.rows.append(Row(name, terms, least, equal))

    def highest(self, expression: Mapping[str, float]) -> float:
        """Return the largest value of an expression within the boxes of its variables."""
        ends = ((a, self.boxes[name]) for name, a in expression.items() if name)
        return expression.get("", 0.0) + sum(max(a * low, a * high) for a, (low, high) in ends)

    def within(self, boxes: Boxes) -> "LinearProgram":
        """Return the same program with other boxes for some variables."""
        other = LinearProgram(self.objective)
        other.boxes, other.rows = {**self.boxes, **boxes}, self.rows
        return other


def bound(program: LinearProgram, multipliers: Mapping[str, float]) -> Fraction:
    """Return the lower bound of the objective that multipliers prove; see the module.

    Args:
        program: the conditions.
        multipliers: by the name of the row; 0 for all other rows.

    Raises:
        ValueError: a multiplier is of no row, or is negative where the row is no equation.
    """
    rows = {row.name: row for row in program.rows}
    total = 0  # integers, in units of the smallest product of two floats: several times as fast as fractions
    reduced: dict[str, int] = defaultdict(int)
    reduced[program.objective] = 1 << 2 * _PLACES
    for name, multiplier in multipliers.items():
        row = rows.get(name)
        if row is None:
            raise ValueError(f"multiplier of {name!r}, which is no condition of this problem")
        if multiplier < 0 and not row.equal:
            raise ValueError(f"multiplier of {name!r} is {multiplier:g}, but must not be negative")
        exact = _whole(multiplier)
        total += exact * _whole(row.least)
        for variable, a in row.terms:
            reduced[variable] -= exact * _whole(a)
    total <<= _PLACES  # now in units of the smallest product of three floats
    for variable, cost in reduced.items():
        low, high = program.boxes[variable]
        if end := low if cost >= 0 else high:
            total += cost * _whole(end)
    return Fraction(total, 1 << 3 * _PLACES)


# Binary places of the smallest float; all other floats are multiples of it.
_PLACES = 1074


def _whole(number: float) -> int:
    """Return a float as an exact multiple of the smallest one."""
    numerator, denominator = number.as_integer_ratio()
    return numerator << _PLACES + 1 - denominator.bit_length()
