"""HiGHS: the optimum of a linear program and its dual vector."""

import dataclasses
import itertools

import numpy as np
import numpy.typing as npt

from planner.bounds.program import Boxes, LinearProgram

Floats = npt.NDArray[np.float64]


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
    """Solves one program, as it is or with other boxes.

    Its conditions are made ready once, and each optimum is looked for from the last one on: the dual simplex method is
    there within a few steps if little has changed.

    Args:
        program: what is solved.

    Attributes:
        boxes: the program's own.
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
            """Without the callbacks, which nobody needs here: from 1.16 on, enabling them prints a header on stdout."""

            def enableCallbacks(self) -> None:  # noqa: N802 - the library's name
                return

        self._highs = Silent()  # type: ignore[no-untyped-call]
        for option, value in (("output_flag", False), ("threads", 1), ("solver", "simplex")):
            self._highs.setOptionValue(option, value)
        self._highs.passModel(model)
        self._solved: dict[tuple[tuple[float, float], ...], Solution | None] = {}

    def solve(self, boxes: Boxes | None = None) -> Solution | None:
        """Return the optimum, with other ``boxes`` for some variables; ``None`` if nothing satisfies the conditions.

        Raises:
            RuntimeError: the solver failed.
        """
        wanted = {**self.boxes, **(boxes or {})}
        key = tuple(wanted.values())
        if key not in self._solved:
            low, high = _ends(wanted)
            self._highs.changeColsBounds(len(wanted), np.arange(len(wanted), dtype=np.int32), low, high)
            self._solved[key] = self._solve(low, high)
        return self._solved[key]

    def _solve(self, low: Floats, high: Floats) -> Solution | None:
        from highspy import HighsModelStatus  # noqa: PLC0415 - as above

        self._highs.run()
        status = self._highs.getModelStatus()
        # The objective is in a box, so that it is not unbounded.
        if status in {HighsModelStatus.kInfeasible, HighsModelStatus.kUnboundedOrInfeasible}:
            return None
        if status != HighsModelStatus.kOptimal:
            raise RuntimeError(f"HiGHS stopped: {self._highs.modelStatusToString(status)}")
        found = self._highs.getSolution()
        inside = np.clip(found.col_value, low, high)  # they are, but for the solver's tolerance
        values = dict(zip(self.boxes, inside.tolist(), strict=True))
        multipliers = {
            row.name: multiplier
            for row, multiplier in zip(self._rows, found.row_dual, strict=True)
            if multiplier > 0 or (row.equal and multiplier)  # elsewhere a negative one is rounding: it proves nothing
        }
        return Solution(values[self._objective], values, multipliers)


def solve(program: LinearProgram) -> Solution | None:
    """Solve a linear program; return ``None`` if nothing satisfies it.

    Raises:
        RuntimeError: the solver failed.
    """
    return Solver(program).solve()


def _ends(boxes: Boxes) -> tuple[Floats, Floats]:
    """Return the lowest and the highest value of every variable."""
    low, high = np.array(list(boxes.values()), np.float64).reshape(-1, 2).T
    return np.ascontiguousarray(low), np.ascontiguousarray(high)
