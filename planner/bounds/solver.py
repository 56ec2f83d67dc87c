"""HiGHS, by way of scipy: the optimum of a linear program and its dual vector."""

import dataclasses
from typing import Any

import numpy as np

from planner.bounds.program import LinearProgram, Row


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


def solve(program: LinearProgram) -> Solution | None:
    """Solve a linear program; return ``None`` if nothing satisfies it.

    Raises:
        RuntimeError: the solver failed.
    """
    from scipy.optimize import linprog  # noqa: PLC0415 - takes a quarter of a second to import

    columns = {name: i for i, name in enumerate(program.boxes)}
    costs = np.zeros(len(columns))
    costs[columns[program.objective]] = 1.0
    inequalities = [row for row in program.rows if not row.equal]
    equations = [row for row in program.rows if row.equal]
    found = linprog(
        costs,
        A_ub=-_matrix(inequalities, columns) if inequalities else None,
        b_ub=-np.array([row.least for row in inequalities]) if inequalities else None,
        A_eq=_matrix(equations, columns) if equations else None,
        b_eq=np.array([row.least for row in equations]) if equations else None,
        bounds=list(program.boxes.values()),
        method="highs-ds",
    )
    if found.status == 2:
        return None
    if not found.success:
        raise RuntimeError(f"HiGHS stopped: {found.message}")
    multipliers: dict[str, float] = {}
    for rows, marginals, sign in (
        (inequalities, found.ineqlin.marginals, -1.0),
        (equations, found.eqlin.marginals, 1.0),
    ):
        for row, marginal in zip(rows, np.asarray(marginals).tolist(), strict=True):
            multiplier = sign * marginal
            if multiplier and (row.equal or multiplier > 0):  # a negative one is rounding: it proves nothing
                multipliers[row.name] = multiplier
    values = np.asarray(found.x).tolist()
    return Solution(values[columns[program.objective]], dict(zip(columns, values, strict=True)), multipliers)


def _matrix(rows: list[Row], columns: dict[str, int]) -> Any:  # the stubs of ``linprog`` know only dense ones
    from scipy.sparse import csr_array  # noqa: PLC0415

    data, index, starts = [], [], [0]
    for row in rows:
        for variable, a in row.terms:
            data.append(a)
            index.append(columns[variable])
        starts.append(len(data))
    return csr_array(
        (np.array(data), np.array(index, dtype=np.int64), np.array(starts)), shape=(len(rows), len(columns))
    )
