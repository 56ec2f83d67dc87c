"""HiGHS: the optimum of a linear program and its dual vector."""

import dataclasses
import itertools

import numpy as np
import numpy.typing as npt

from planner.bounds.program import Boxes, LinearProgram

Floats = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Solution:
    """An optimum in floating point, or what the solver had reached when it stopped.

    Nobody trusts it: a plan is simulated, and a bound is proven from the multipliers in exact arithmetic. One that is
    no optimum gives a weaker bound.

    Attributes:
        value: the objective.
        values: all variables, by name, within their boxes.
        multipliers: of the binding rows, by name; see :func:`planner.bounds.program.bound`.
    """

    value: float
    values: dict[str, float]
    multipliers: dict[str, float]


# Options of a solve, and of those after it that start from nothing if the ones before have come to no end.
_WAYS: tuple[dict[str, str], ...] = (
    {"solver": "simplex", "presolve": "choose"},
    {"solver": "simplex", "presolve": "off"},
    {"solver": "ipm", "presolve": "choose"},
)


class Solver:
    """Solves one program, with its own or other boxes.

    The matrix is built once. The dual simplex method starts from the last optimum, so it needs few steps if little has
    changed.

    Args:
        program: the program to solve.

    Attributes:
        boxes: the program's own boxes.
    """

    def __init__(self, program: LinearProgram) -> None:
        import highspy  # noqa: PLC0415 - takes a fifth of a second to import, and not all commands plan

        self.boxes: Boxes = program.boxes
        self._objective = program.objective
        self._rows = program.rows
        columns = {name: i for i, name in enumerate(program.boxes)}
        model = highspy.HighsLp()
        model.num_col_, model.num_row_ = len(columns), len(program.rows)
        costs = np.zeros(len(columns))
        costs[columns[program.objective]] = 1.0
        model.col_cost_ = costs
        model.col_lower_, model.col_upper_ = _ends(program.boxes)
        least = np.array([row.least for row in program.rows])
        model.row_lower_ = least
        model.row_upper_ = np.where([row.equal for row in program.rows], least, highspy.kHighsInf)
        matrix = model.a_matrix_
        matrix.format_ = highspy.MatrixFormat.kRowwise
        matrix.start_ = np.cumsum([0, *(len(row.terms) for row in program.rows)])
        names, values = zip(*itertools.chain.from_iterable(row.terms for row in program.rows), strict=True)
        matrix.index_ = np.array(list(map(columns.__getitem__, names)), np.int32)
        matrix.value_ = np.array(values)

        class Silent(highspy.Highs):
            """Without callbacks: from version 1.16 on, enabling them prints a header to stdout."""

            def enableCallbacks(self) -> None:  # noqa: N802 - the library's name
                return

        self._highs = Silent()  # type: ignore[no-untyped-call]
        self._highs.setOptionValue("output_flag", False)
        self._highs.setOptionValue("threads", 1)
        for option, value in _WAYS[0].items():
            self._highs.setOptionValue(option, value)
        self._highs.passModel(model)
        self._solved: dict[tuple[tuple[float, float], ...], Solution | None] = {}

    def solve(self, boxes: Boxes | None = None) -> Solution | None:
        """Return the optimum, with other ``boxes`` for some variables; ``None`` if HiGHS says that there is none."""
        wanted = {**self.boxes, **(boxes or {})}
        key = tuple(wanted.values())
        if key not in self._solved:
            low, high = _ends(wanted)
            self._highs.changeColsBounds(len(wanted), np.arange(len(wanted), dtype=np.int32), low, high)
            self._solved[key] = self._solve(low, high)
        return self._solved[key]

    def _solve(self, low: Floats, high: Floats) -> Solution | None:
        from highspy import HighsModelStatus  # noqa: PLC0415 - as above

        # The objective has a box, so the program cannot be unbounded.
        nothing = {HighsModelStatus.kInfeasible, HighsModelStatus.kUnboundedOrInfeasible}
        for way in _WAYS:
            if way is not _WAYS[0]:
                self._highs.clearSolver()
                for option, value in way.items():
                    self._highs.setOptionValue(option, value)
            self._highs.run()
            status = self._highs.getModelStatus()
            if status in {HighsModelStatus.kOptimal, *nothing}:
                break
        if way is not _WAYS[0]:
            for option, value in _WAYS[0].items():
                self._highs.setOptionValue(option, value)
        if status in nothing:
            return None
        found = self._highs.getSolution()
        reached, duals = (np.array(part, np.float64) for part in (found.col_value, found.row_dual))
        if len(reached) != len(low) or not np.isfinite(reached).all():
            reached = low
        if len(duals) != len(self._rows) or not np.isfinite(duals).all():
            duals = np.zeros(len(self._rows))
        inside = np.clip(reached, low, high)  # the solver has a tolerance
        values = dict(zip(self.boxes, inside.tolist(), strict=True))
        multipliers = {
            row.name: multiplier
            for row, multiplier in zip(self._rows, duals.tolist(), strict=True)
            if multiplier > 0 or (row.equal and multiplier)  # of other rows, a negative one is a rounding error
        }
        return Solution(values[self._objective], values, multipliers)


def solve(program: LinearProgram) -> Solution | None:
    """Solve a linear program; return ``None`` if HiGHS says that it is infeasible."""
    return Solver(program).solve()


def _ends(boxes: Boxes) -> tuple[Floats, Floats]:
    """Return the lower and the upper ends of all boxes."""
    low, high = np.array(list(boxes.values()), np.float64).reshape(-1, 2).T
    return np.ascontiguousarray(low), np.ascontiguousarray(high)
