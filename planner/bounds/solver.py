"""HiGHS, by way of scipy: the optimum of a linear program and its dual vector."""

import dataclasses
from typing import Any

import numpy as np

from planner.bounds.program import Boxes, LinearProgram, Row


@dataclasses.dataclass(frozen=True)
class Solution:
    """An optimum in floating point.

    Attributes:
        value: of the objective.
        values: of every variable.
        multipliers: of the rows that matter, by name; see :func:`planner.bounds.program.bound`.
    """

    value: float
    values: dict[str, float]
    multipliers: dict[str, float]


class Solver:
    """Solves one program, as it is or with other boxes: its conditions are made ready once.

    Args:
        program: what is solved.

    Attributes:
        boxes: the program's own.
    """

    def __init__(self, program: LinearProgram) -> None:
        self.boxes: Boxes = program.boxes
        self._objective = program.objective
        columns = {name: i for i, name in enumerate(program.boxes)}
        self._inequalities = [row for row in program.rows if not row.equal]
        self._equations = [row for row in program.rows if row.equal]
        costs = np.zeros(len(columns))
        costs[columns[program.objective]] = 1.0
        self._costs = costs
        self._large, self._least = _conditions(self._inequalities, columns)
        self._equal, self._values = _conditions(self._equations, columns)
        self._solved: dict[tuple[tuple[float, float], ...], Solution | None] = {}

    def solve(self, boxes: Boxes | None = None) -> Solution | None:
        """Return the optimum, with other ``boxes`` for some variables; ``None`` if nothing satisfies the conditions.

        Raises:
            RuntimeError: the solver failed.
        """
        bounds = tuple({**self.boxes, **(boxes or {})}.values())
        if bounds not in self._solved:
            self._solved[bounds] = self._solve(bounds)
        return self._solved[bounds]

    def _solve(self, bounds: tuple[tuple[float, float], ...]) -> Solution | None:
        from scipy.optimize import linprog  # noqa: PLC0415 - takes a quarter of a second to import

        found = linprog(
            self._costs,
            A_ub=None if self._large is None else -self._large,
            b_ub=None if self._least is None else -self._least,
            A_eq=self._equal,
            b_eq=self._values,
            bounds=bounds,
            method="highs-ds",
        )
        if found.status == 2:
            return None
        if not found.success:
            raise RuntimeError(f"HiGHS stopped: {found.message}")
        multipliers: dict[str, float] = {}
        for rows, marginals, sign in (
            (self._inequalities, found.ineqlin.marginals, -1.0),
            (self._equations, found.eqlin.marginals, 1.0),
        ):
            for row, marginal in zip(rows, np.asarray(marginals).tolist(), strict=True):
                multiplier = sign * marginal
                if multiplier and (row.equal or multiplier > 0):  # a negative one is rounding: it proves nothing
                    multipliers[row.name] = multiplier
        values = dict(zip(self.boxes, np.asarray(found.x).tolist(), strict=True))
        return Solution(values[self._objective], values, multipliers)


def solve(program: LinearProgram) -> Solution | None:
    """Solve a linear program; return ``None`` if nothing satisfies it.

    Raises:
        RuntimeError: the solver failed.
    """
    return Solver(program).solve()


def _conditions(rows: list[Row], columns: dict[str, int]) -> tuple[Any, Any]:  # the stubs know only dense matrices
    """Return the coefficients and right-hand sides of some rows, or nothing if there are none."""
    if not rows:
        return None, None
    from scipy.sparse import csr_array  # noqa: PLC0415

    data = [a for row in rows for _, a in row.terms]
    index = [columns[variable] for row in rows for variable, _ in row.terms]
    starts = np.cumsum([0, *(len(row.terms) for row in rows)])
    matrix = csr_array((np.array(data), np.array(index, dtype=np.int64), starts), shape=(len(rows), len(columns)))
    return matrix, np.array([row.least for row in rows])
