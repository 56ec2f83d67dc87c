"""The next constraint: how much each quantity of the machine matters to a plan, and where another one takes over.

[Note: Crossing] *What bounds* a schedule is the lane with the largest share of its critical path. One quantity of the
machine is scaled, the schedule is kept as it is, and simulated again: away from its present value first in factors of
two, then by bisection, until what bounds changes between two factors that differ by a thousandth. That is the crossing.
A capacity does not change times while decisions are kept; its crossing is where the plan no longer fits.

What a quantity is worth to *any* plan is the derivative of the bound that is proven for all: what the conditions ask of
the best mixture, weighted with the proof's multipliers, changes with the machine as the bound does (the envelope
theorem). Where the bound has a corner this is one of the derivatives between those on either side.
"""

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator

from hwprofiles.paths import number, quantities
from hwprofiles.profile import HardwareProfile
from hwprofiles.quantity import Curve
from planner.bounds.conditions import conditions
from planner.bounds.program import LinearProgram
from planner.bounds.proof import Proof
from planner.bounds.solver import solve
from planner.choices.variants import variant
from planner.costs.scalable import Knob, scaled
from planner.costs.scalable import knobs as knobs_of
from planner.explain.trial import Bench, bounding_lane
from planner.schedule.tasks import Lane, Tier
from planner.verification import job_of

# Quantities are scaled this far each way in search of a crossing, and two factors so near to one another bracket one.
_FARTHEST = 16.0
_NEAR = 1e-3
# Relative changes for derivatives: of a simulation, which has corners, and of conditions, which have none.
_STEP, _SMALL_STEP = 1e-2, 1e-6
# Iterations that take longer than this many times the plan's are of no interest to its bound.
_LIMIT = 2.0


@dataclasses.dataclass(frozen=True)
class Crossing:
    """Where something else takes over as what bounds the schedule; see [Note: Crossing].

    Attributes:
        last_factor: times the present value, where the present lane still bounds it.
        factor: a thousandth further, where another one does.
        value: that, in the knob's unit.
        iteration_s: what an iteration takes there.
        takes_over: the lane that bounds it there.
    """

    last_factor: float
    factor: float
    value: float
    iteration_s: float
    takes_over: Lane


@dataclasses.dataclass(frozen=True)
class Limit:
    """What one quantity means to a plan whose decisions are kept.

    Attributes:
        knob: which.
        value, unit: what the machine has: bytes, an amount per second, or seconds.
        elasticity: relative change of the iteration time for a relative change of the quantity; -1: inversely
            proportional, 0: it does not matter.
        best_iteration_s: what an iteration would take if there were 16 times as much.
        below, above: the crossings nearest to the present value; ``None``: none within a factor of 16.
        fits_from: for a capacity, the part of it that the plan needs.
        bound_elasticity: relative change of the bound for all plans.
        bound_s_per_unit: seconds of that bound for one more unit; negative where more is faster.
    """

    knob: Knob
    value: float
    unit: str
    elasticity: float
    best_iteration_s: float
    below: Crossing | None
    above: Crossing | None
    fits_from: float | None
    bound_elasticity: float
    bound_s_per_unit: float


def knobs(bench: Bench) -> tuple[Knob, ...]:
    """Return the quantities that matter for a plan: those of its machine that any of its tasks could meet."""
    decided = bench.decisions
    return knobs_of(
        bench.plan.hardware, decided.precision.weights, decided.num_devices, uses_storage=decided.uses_storage
    )


def limits(bench: Bench, progress: Callable[[int, int], object] = lambda *_: None) -> tuple[Limit, ...]:
    """Return what every quantity means to a plan; ``progress`` is told how many are done, and how many there are."""
    found, all_knobs = [], knobs(bench)
    derivative = _BoundDerivative(bench)
    for done, knob in enumerate(all_knobs):
        progress(done, len(all_knobs))
        found.append(_limit(bench, knob, derivative))
    return tuple(found)


def _limit(bench: Bench, knob: Knob, derivative: "_BoundDerivative") -> Limit:
    item = quantities(bench.plan.hardware)[knob.paths[0]]
    value, own_s = number(item), bench.own.iteration_s
    unit = f"{item.size_unit}_per_s" if isinstance(item, Curve) else item.unit
    bound_elasticity = derivative.elasticity(knob)
    worth = {
        "bound_elasticity": bound_elasticity,
        "bound_s_per_unit": bound_elasticity * derivative.bound_s / value,
    }
    if knob.tier is not None:
        needed = bench.own.peak_bytes(knob.tier) / value
        return Limit(knob, value, unit, 0.0, own_s, None, None, fits_from=needed, **worth)
    (more_s, _), (less_s, _) = (_at(bench, knob, factor) for factor in (1 + _STEP, 1 / (1 + _STEP)))
    return Limit(
        knob,
        value,
        unit,
        elasticity=math.log(more_s / less_s) / (2 * math.log1p(_STEP)),
        best_iteration_s=_at(bench, knob, _FARTHEST)[0],
        below=_crossing(bench, knob, value, 0.5),
        above=_crossing(bench, knob, value, 2.0),
        fits_from=None,
        **worth,
    )


def _at(bench: Bench, knob: Knob, factor: float) -> tuple[float, Lane]:
    return bench.on(scaled(bench.plan.hardware, knob, factor))


def _crossing(bench: Bench, knob: Knob, value: float, step: float) -> Crossing | None:
    """Return the crossing nearest to the present value in one direction; see [Note: Crossing]."""
    present = bounding_lane(bench.simulation)
    last, factor = 1.0, step
    while _at(bench, knob, factor)[1] is present:
        last, factor = factor, factor * step
        if not 1 / _FARTHEST <= factor <= _FARTHEST:
            return None
    while abs(math.log(factor / last)) > _NEAR:
        middle = math.sqrt(last * factor)
        if _at(bench, knob, middle)[1] is present:
            last = middle
        else:
            factor = middle
    iteration_s, lane = _at(bench, knob, factor)
    return Crossing(last, factor, value * factor, iteration_s, lane)


class _BoundDerivative:
    """How the bound that a plan's certificate proves changes with the machine."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._proof = binding_proof(bench)
        self.bound_s = self._proof.bound_s or 0.0
        solution = solve(self._conditions(bench.plan.hardware))
        assert solution is not None, "the plan itself satisfies the conditions"
        self._mixture = solution.values
        self._here_s = self._asked_s(bench.plan.hardware)

    def elasticity(self, knob: Knob) -> float:
        """Return the relative change of the bound for a relative change of a quantity."""
        there_s = self._asked_s(scaled(self._bench.plan.hardware, knob, 1 + _SMALL_STEP))
        return (there_s - self._here_s) / self.bound_s / _SMALL_STEP

    def _asked_s(self, hardware: HardwareProfile) -> float:
        """Return what conditions ask of the best mixture beyond what it gives, weighted with the multipliers."""
        multipliers, mixture = self._proof.multipliers, self._mixture
        rows = (row for row in self._conditions(hardware).rows if row.name in multipliers)
        return math.fsum(
            multipliers[row.name] * (row.least - math.fsum(a * mixture[name] for name, a in row.terms)) for row in rows
        )

    def _conditions(self, hardware: HardwareProfile) -> LinearProgram:
        plan = self._bench.plan.model_copy(update={"hardware": hardware})
        rival = variant(job_of(plan), self._proof.choice, plan.asked.storage)
        space = next(s for s in rival.space.stages() if s.given.zero_stage == self._proof.zero_stage)
        return conditions(space, rival.cost, _LIMIT * plan.prediction.iteration_s)


def binding_proof(bench: Bench) -> Proof:
    """Return the proof that the plan's bound rests on: that of the choice that could be fastest."""
    proofs = [proof for proof in bench.plan.certificate.proofs if proof.bound_s is not None]
    return min(proofs, key=lambda proof: proof.bound_s or 0.0)


_RESTS = (
    (re.compile(r"^work: (.+)$"), "work"),
    (re.compile(r"^update of \d+ to \d+ by (.+?)(?:, with what is stored)?$"), "update"),
    (re.compile(r"^leave of \d+ to \d+ by (.+)$"), "leave"),
)


def bound_rests_on(bench: Bench) -> dict[tuple[str, str], float]:
    """Return what the bound rests on, from the multipliers of its proof, largest first.

    Returns:
        The weight of each kind of condition with a lane or resource: all ``work`` of it in an iteration; the ``update``
        of units, with what it moves, between the last backward and the next forward; gradients that ``leave`` before
        that. Weights of ``work`` and of windows add up to 1, and those of ``update`` and ``leave`` to the windows'.
    """
    weights: dict[tuple[str, str], float] = defaultdict(float)
    for name, multiplier in binding_proof(bench).multipliers.items():
        for pattern, kind in _RESTS:
            if match := pattern.match(name):
                weights[kind, match[1].removeprefix("resource ")] += multiplier
    told = ((key, weight) for key, weight in weights.items() if weight > _NEAR)
    return dict(sorted(told, key=lambda item: -item[1]))


def full_tiers(bench: Bench) -> Iterator[tuple[Tier, float]]:
    """Yield the tiers that have no room for one more of the model's largest subgroups of state, with the share used."""
    largest = max(size for unit in bench.units.values() for size in bench.decisions.piece_params(unit) or (0,))
    for tier, use in bench.own.memory.items():
        ranks = 1 if tier is Tier.GPU else bench.cost.ranks_per_node
        if use.capacity_bytes - use.peak_bytes < bench.decisions.state_bytes_per_param * largest * ranks:
            yield tier, use.peak_bytes / use.capacity_bytes
