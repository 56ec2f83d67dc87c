"""The effect of every resource on one point, and where the bottleneck moves, by planning anew.

[Note: Elasticity] The request is planned again with a fifth more and with a fifth less of a resource. The elasticity is
the logarithm of the ratio of iteration times, divided by the logarithm of the ratio of the resource. Both sides are
reported, because they differ if the best plan changes: it may be bound by a link on one side and by cores on the other.
A search ends within about a percent of the best, so an elasticity below
:data:`ullage.whatif.study.AS_GOOD_AS_NONE` means no effect. The step is large enough for this error, and small enough
to describe this machine.

[Note: Moves] The search for a crossing, where another lane begins to bound the plan, goes from a quarter of the
resource to four times as much. If another lane binds at an end, bisection finds the crossing up to a tenth. A crossing
of `ullage explain` keeps the plan's decisions. Here every trial is planned anew, so another lane bounds the *best* plan
from the crossing on.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Final

from planner.schedule.tasks import Lane
from ullage.whatif.design import Case, Space
from ullage.whatif.fields import Field, of_machine, scalables_of
from ullage.whatif.running.runner import Evaluator
from ullage.whatif.study import Crossing, Result, Sensitivities, Sensitivity, Side, StudyError
from ullage.whatif.values import Number

STEP: Final = 0.2
RANGE: Final = 4.0
_NEAR: Final = 1.1
_CORES: Final = "host.num_cores"
# Steps of a resource that people buy, by unit: amount and name.
_STEPS: Final = {
    "bytes": (1e9, "1 GB"),
    "bytes_per_s": (1e9, "1 GB/s"),
    "flop_per_s": (1e12, "1 TFLOP/s"),
    "params_per_s": (1e9, "1 Gparam/s"),
    "s": (1e-6, "1 µs"),
    "": (1.0, "1"),
}


@dataclasses.dataclass
class _Search:
    """The bracket of a crossing: the last factor at which the present lane binds, and the first where another does."""

    inside: float
    outside: float

    @property
    def found(self) -> bool:
        """Whether the bracket is narrow enough."""
        return abs(math.log(self.outside / self.inside)) <= math.log(_NEAR)

    @property
    def middle(self) -> float:
        return math.sqrt(self.inside * self.outside)


def sensitivities(space: Space, evaluator: Evaluator) -> Sensitivities:
    """Return the effect of every resource of the base point; see [Note: Elasticity] and [Note: Moves].

    Raises:
        StudyError: the base point has no plan.
    """
    base_case = space.case({})
    (base,) = evaluator.results([base_case], space.effort, "the base point")
    if base.figures is None or base_case.request is None or base.status != "fits":
        raise StudyError(f"the base point has no plan, so there is nothing to vary: {base.reason}")
    request = base_case.request
    matters = scalables_of(request)
    fields = [space.fields[name] for name in (*(scalable.key for scalable in matters), _CORES)]
    trials = _Trials(space, evaluator, {field.name: of_machine(request.hardware, field.name) for field in fields})
    trials.plan(dict.fromkeys(trials.values, (1 + STEP, 1 / (1 + STEP), RANGE, 1 / RANGE)), "what is it worth")
    crossings = _crossings(trials, base.figures.bound_by)
    rows = [_row(trials, field, base, crossings) for field in fields]
    rows.sort(key=lambda row: -max(abs(row.elasticity_more or 0.0), abs(row.elasticity_less or 0.0)))
    return Sensitivities(base=base, step=STEP, range=RANGE, rows=tuple(rows))


class _Trials:
    """Results of scaling one field by a factor, planned on demand.

    Args:
        space: space of the study.
        evaluator: plans the points.
        values: value of each field at the base point.
    """

    def __init__(self, space: Space, evaluator: Evaluator, values: Mapping[str, float]) -> None:
        self.values = values
        self._space, self._evaluator = space, evaluator
        self._results: dict[tuple[str, float], tuple[Case, Result]] = {}

    def plan(self, factors: Mapping[str, tuple[float, ...]], what: str) -> None:
        """Plan several factors of several fields at once."""
        wanted = [(name, factor) for name, all_factors in factors.items() for factor in all_factors]
        cases = [self._space.case({name: Number(self._scaled(name, factor))}) for name, factor in wanted]
        results = self._evaluator.results(cases, self._space.effort, what)
        self._results |= dict(zip(wanted, zip(cases, results, strict=True), strict=True))

    def side(self, name: str, factor: float) -> Side:
        """Return the result at a factor. For whole numbers, the factor is that of the rounded value."""
        case, result = self._results[name, factor]
        figures = result.figures if result.status == "fits" else None
        after = of_machine(case.request.hardware, name) if case.request else self._scaled(name, factor)
        return Side(
            factor=after / self.values[name],
            value=after,
            iteration_s=figures.iteration_s if figures else None,
            bound_by=figures.bound_by if figures else None,
        )

    def _scaled(self, name: str, factor: float) -> float:
        value = self.values[name] * factor
        return max(round(value), 1) if isinstance(self.values[name], int) else value


def _crossings(trials: _Trials, present: Lane) -> dict[tuple[str, bool], Crossing]:
    """Return crossings by field and by whether they are above the present value."""
    searches = {
        (name, above): _Search(1.0, end)
        for name in trials.values
        for above, end in ((False, 1 / RANGE), (True, RANGE))
        if trials.side(name, end).bound_by not in {present, None}
    }
    while open_ := {key: search for key, search in searches.items() if not search.found}:
        wanted: dict[str, tuple[float, ...]] = {}
        for (name, _), search in open_.items():
            wanted[name] = (*wanted.get(name, ()), search.middle)
        trials.plan(wanted, "where the bottleneck moves")
        for (name, _), search in open_.items():
            middle = search.middle
            if trials.side(name, middle).bound_by in {present, None}:
                search.inside = middle
            else:
                search.outside = middle
    return {key: Crossing(**trials.side(key[0], search.outside).model_dump()) for key, search in searches.items()}


def _row(trials: _Trials, field: Field, base: Result, crossings: Mapping[tuple[str, bool], Crossing]) -> Sensitivity:
    assert base.figures is not None
    more, less = trials.side(field.name, 1 + STEP), trials.side(field.name, 1 / (1 + STEP))
    base_s, value = base.figures.iteration_s, trials.values[field.name]
    elasticity = _elasticity(more, base_s)
    amount, words = _STEPS[field.unit]
    return Sensitivity(
        name=field.name,
        words=field.words,
        unit=field.unit,
        value=float(value),
        less=less,
        more=more,
        elasticity_less=_elasticity(less, base_s),
        elasticity_more=elasticity,
        step_words="1 core" if field.name == _CORES else words,
        seconds_per_step=None if elasticity is None else elasticity * base_s * amount / value,
        below=crossings.get((field.name, False)),
        above=crossings.get((field.name, True)),
    )


def _elasticity(side: Side, base_s: float) -> float | None:
    if side.iteration_s is None or side.factor == 1:
        return None
    return math.log(side.iteration_s / base_s) / math.log(side.factor)
