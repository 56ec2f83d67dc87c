"""The effect of every resource on one point, and where the bottleneck moves, by planning anew.

The request is planned again with a fifth more and with a fifth less of a resource. The elasticity is
the logarithm of the ratio of iteration times, divided by the logarithm of the ratio of the resource. Both sides are
reported, because they differ if the best plan changes: it may be bound by a link on one side and by cores on the other.
A search ends within about a percent of the best, so an elasticity below
:data:`ullage.whatif.study.AS_GOOD_AS_NONE` means no effect. The step is large enough for this error, and small enough
to describe this machine.

The search for a crossing, where another lane begins to bound the plan, goes from a quarter of the
resource to four times as much. If another lane binds at an end, bisection finds the crossing up to a tenth. A crossing
of `ullage explain` keeps the plan's decisions. Here every trial is planned anew, so another lane bounds the *best* plan
from the crossing on.
"""

import itertools
import math
from collections.abc import Collection, Mapping
from typing import Final

from ullage.whatif.fields import Field, of_machine, scalables_of
from ullage.whatif.running.runner import Evaluator, narrowed
from ullage.whatif.study import Sensitivities, Sensitivity, Side
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

Trials = dict[tuple[str, float], Side]
"""Results of scaling a field, by its name and the factor."""


def sensitivities(evaluator: Evaluator) -> Sensitivities:
    """Return the effect of every resource of the base point.

    Raises:
        ValueError: the base point has no plan.
    """
    space = evaluator.space
    base_case = space.case({})
    (base,) = evaluator.results([base_case], "the base point")
    if base.figures is None or base_case.request is None or base.status != "fits":
        raise ValueError(f"the base point has no plan, so there is nothing to vary: {base.reason}")
    machine, present = base_case.request.hardware, base.figures.bound_by
    fields = [space.field(name) for name in (*(s.key for s in scalables_of(base_case.request)), _CORES)]
    values = {field.name: of_machine(machine, field.name) for field in fields}

    def tried(wanted: Collection[tuple[str, float]], what: str) -> Trials:
        """Plan factors of fields. Whole numbers are rounded, and the factor is then that of the rounded value."""
        cases = {}
        for name, factor in wanted:
            value = values[name] * factor
            whole = isinstance(values[name], int)
            cases[name, factor] = space.case({name: Number(max(round(value), 1) if whole else value)})
        sides = {}
        for (key, case), result in zip(cases.items(), evaluator.results(cases.values(), what), strict=True):
            after = of_machine(case.request.hardware, key[0]) if case.request else values[key[0]] * key[1]
            figures = result.figures if result.status == "fits" else None
            seen = {} if figures is None else {"iteration_s": figures.iteration_s, "bound_by": figures.bound_by}
            sides[key] = Side(factor=after / values[key[0]], value=after, **seen)
        return sides

    factors = (1 + STEP, 1 / (1 + STEP), RANGE, 1 / RANGE)
    trials = tried([(name, factor) for name in values for factor in factors], "what is it worth")

    def between(_key: tuple[str, float], inside: float, outside: float) -> float | None:
        return math.sqrt(inside * outside) if abs(math.log(outside / inside)) > math.log(_NEAR) else None

    def binds(factors: Mapping[tuple[str, float], float]) -> dict[tuple[str, float], bool]:
        trials.update(tried([(name, at) for (name, _), at in factors.items()], "where the bottleneck moves"))
        return {key: trials[key[0], at].bound_by in {present, None} for key, at in factors.items()}

    # Brackets of crossings by field and end: the last factor at which the present lane binds, the first where not.
    ends = itertools.product(values, (1 / RANGE, RANGE))
    wide = {key: (1.0, key[1]) for key in ends if trials[key].bound_by not in {present, None}}
    brackets = narrowed(wide, between, binds)
    crossings = {key: trials[key[0], outside] for key, (_, outside) in brackets.items()}
    rows = [_row(field, values[field.name], trials, crossings, base.figures.iteration_s) for field in fields]
    rows.sort(key=lambda row: -max(abs(row.elasticity_more or 0.0), abs(row.elasticity_less or 0.0)))
    return Sensitivities(base=base, step=STEP, range=RANGE, rows=tuple(rows))


def _row(field: Field, value: float, trials: Trials, crossings: Trials, base_s: float) -> Sensitivity:
    less, more = trials[field.name, 1 / (1 + STEP)], trials[field.name, 1 + STEP]
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
        below=crossings.get((field.name, 1 / RANGE)),
        above=crossings.get((field.name, RANGE)),
    )


def _elasticity(side: Side, base_s: float) -> float | None:
    if side.iteration_s is None or side.factor == 1:
        return None
    return math.log(side.iteration_s / base_s) / math.log(side.factor)
