"""The next constraint: how much each quantity of the machine matters to a plan, and where another lane takes over.

The lane with the largest share of the critical path *bounds* a schedule. To find a crossing, one
quantity of the machine is scaled and the same schedule is simulated again: first in factors of two, then by bisection,
until the bounding lane changes between two factors that differ by a thousandth. A capacity does not change times while
decisions stay; its crossing is the value at which the plan no longer fits.

The worth of a quantity to *any* plan is the derivative of the proven bound. By the envelope theorem, it is the
derivative of the conditions at the best mixture, weighted with the proof's multipliers. At a corner of the bound this
is one of the derivatives between those of the two sides.
"""

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator

from hwprofiles.paths import number, quantities
from hwprofiles.profile import HardwareProfile
from planner.bounds.conditions import conditions
from planner.bounds.program import LinearProgram
from planner.bounds.proof import Proof
from planner.bounds.solver import solve
from planner.choices.variants import variant
from planner.costs.scalable import Scalable, scaled
from planner.costs.scalable import scalables as scalables_of
from planner.explain.bench import Bench, bounding_lane
from planner.schedule.tasks import Lane, Tier

# The largest factor in the search for a crossing, and the ratio of two factors that bracket it.
_FARTHEST = 16.0
_NEAR = 1e-3
# Relative changes for derivatives: of a simulation, which has corners, and of conditions, which are smooth.
_STEP, _SMALL_STEP = 1e-2, 1e-6
# The bound is about iterations of at most this many times the plan's time.
_LIMIT = 2.0


@dataclasses.dataclass(frozen=True)
class Crossing:
    """The value of a quantity at which another lane bounds the schedule; see the module.

    Attributes:
        last_factor: factor on the present value at which the present lane still bounds it.
        factor: a thousandth further, where another lane bounds it.
        value: the same in the quantity's unit.
        iteration_s: iteration time there.
        takes_over: the lane that bounds it there.
    """

    last_factor: float
    factor: float
    value: float
    iteration_s: float
    takes_over: Lane


@dataclasses.dataclass(frozen=True)
class Limit:
    """How much one quantity of the machine matters to a plan whose decisions stay.

    Attributes:
        scalable: the quantity.
        value, unit: its present value: bytes, an amount per second, or seconds.
        elasticity: relative change of the iteration time for a relative change of the quantity; -1: inversely
            proportional, 0: it does not matter.
        best_iteration_s: iteration time with 16 times as much.
        below, above: the crossings nearest to the present value; ``None``: none within a factor of 16.
        fits_from: for a capacity, the fraction of it that the plan needs.
        bound_elasticity: relative change of the bound for all plans.
        bound_s_per_unit: change of that bound in seconds for one more unit; negative if more is faster.
    """

    scalable: Scalable
    value: float
    unit: str
    elasticity: float
    best_iteration_s: float
    below: Crossing | None
    above: Crossing | None
    fits_from: float | None
    bound_elasticity: float
    bound_s_per_unit: float


def scalables(bench: Bench) -> tuple[Scalable, ...]:
    """Return the quantities of the machine that could matter to any task of a plan."""
    decided = bench.decisions
    return scalables_of(
        bench.plan.hardware, decided.precision.weights, decided.num_devices, uses_storage=decided.uses_storage
    )


def limits(bench: Bench, progress: Callable[[int, int], object] = lambda *_: None) -> tuple[Limit, ...]:
    """Return how much every quantity matters to a plan; ``progress`` is called with the number done and the total."""
    found, all_scalables = [], scalables(bench)
    bound_elasticity = _bound_elasticity(bench)
    for done, scalable in enumerate(all_scalables):
        progress(done, len(all_scalables))
        found.append(_limit(bench, scalable, bound_elasticity(scalable)))
    return tuple(found)


def _limit(bench: Bench, scalable: Scalable, bound_elasticity: float) -> Limit:
    item = quantities(bench.plan.hardware)[scalable.paths[0]]
    value, own_s = number(item), bench.own.iteration_s
    bound_s = binding_proof(bench).bound_s or 0.0
    worth = {"bound_elasticity": bound_elasticity, "bound_s_per_unit": bound_elasticity * bound_s / value}
    if scalable.tier is not None:
        needed = bench.own.peak_bytes.get(scalable.tier, 0) / value
        return Limit(scalable, value, item.unit, 0.0, own_s, None, None, fits_from=needed, **worth)
    (more_s, _), (less_s, _) = (_at(bench, scalable, factor) for factor in (1 + _STEP, 1 / (1 + _STEP)))
    return Limit(
        scalable,
        value,
        item.unit,
        elasticity=math.log(more_s / less_s) / (2 * math.log1p(_STEP)),
        best_iteration_s=_at(bench, scalable, _FARTHEST)[0],
        below=_crossing(bench, scalable, value, 0.5),
        above=_crossing(bench, scalable, value, 2.0),
        fits_from=None,
        **worth,
    )


def _at(bench: Bench, scalable: Scalable, factor: float) -> tuple[float, Lane]:
    return bench.on(scaled(bench.plan.hardware, scalable, factor))


def _crossing(bench: Bench, scalable: Scalable, value: float, step: float) -> Crossing | None:
    """Return the crossing nearest to the present value in one direction; see the module."""
    present = bounding_lane(bench.simulation)
    last, factor = 1.0, step
    while _at(bench, scalable, factor)[1] is present:
        last, factor = factor, factor * step
        if not 1 / _FARTHEST <= factor <= _FARTHEST:
            return None
    while abs(math.log(factor / last)) > _NEAR:
        middle = math.sqrt(last * factor)
        if _at(bench, scalable, middle)[1] is present:
            last = middle
        else:
            factor = middle
    iteration_s, lane = _at(bench, scalable, factor)
    return Crossing(last, factor, value * factor, iteration_s, lane)


def _bound_elasticity(bench: Bench) -> Callable[[Scalable], float]:
    """Return a function to the relative change of the plan's proven bound for a relative change of a quantity."""
    proof, hardware = binding_proof(bench), bench.plan.hardware
    solution = solve(_conditions(bench, proof, hardware))
    mixture = solution.values if solution else {}  # the plan satisfies the conditions, whatever HiGHS says

    def violated_s(machine: HardwareProfile) -> float:
        """Return the violation of conditions at the best mixture, weighted with the multipliers, in seconds."""
        rows = (row for row in _conditions(bench, proof, machine).rows if row.name in proof.multipliers)
        return math.fsum(
            proof.multipliers[row.name] * (row.least - math.fsum(a * mixture.get(name, 0.0) for name, a in row.terms))
            for row in rows
        )

    here_s = violated_s(hardware)

    def elasticity(scalable: Scalable) -> float:
        there_s = violated_s(scaled(hardware, scalable, 1 + _SMALL_STEP))
        return (there_s - here_s) / (proof.bound_s or 0.0) / _SMALL_STEP

    return elasticity


def _conditions(bench: Bench, proof: Proof, hardware: HardwareProfile) -> LinearProgram:
    plan = bench.plan.model_copy(update={"hardware": hardware})
    rival = variant(plan.request, proof.choice)
    setup = rival.setup.changed(zero_stage=proof.zero_stage)
    return conditions(setup, rival.cost, _LIMIT * plan.prediction.iteration_s)


def binding_proof(bench: Bench) -> Proof:
    """Return the proof with the smallest bound, which is the plan's bound."""
    proofs = [proof for proof in bench.plan.certificate.proofs if proof.bound_s is not None]
    return min(proofs, key=lambda proof: proof.bound_s or 0.0)


_RESTS = (
    (re.compile(r"^work: (.+)$"), "work"),
    (re.compile(r"^update of \d+ to \d+ by (.+?)(?:, with what is stored)?$"), "update"),
    (re.compile(r"^window: (?:first )?updates of stage \d+ by (.+?)(?: before .*|, and .*)$"), "update"),
    (re.compile(r"^leave of \d+ to \d+ by (.+)$"), "leave"),
)


def bound_rests_on(bench: Bench) -> dict[tuple[str, str], float]:
    """Return the conditions that make the bound, by the multipliers of its proof, largest first.

    Returns:
        The weight of each pair of a kind of condition and a lane or resource. Kinds are ``work``, all work of an
        iteration; ``update``, updates and their copies between the last backward and the next forward; and ``leave``,
        gradients that leave before that. Weights of ``work`` and of windows add up to 1. Those of ``update`` and
        ``leave`` add up to the windows' weights.
    """
    weights: dict[tuple[str, str], float] = defaultdict(float)
    for name, multiplier in binding_proof(bench).multipliers.items():
        for pattern, kind in _RESTS:
            if match := pattern.match(name):
                weights[kind, match[1].removeprefix("resource ")] += multiplier
    near = ((key, weight) for key, weight in weights.items() if weight > _NEAR)
    return dict(sorted(near, key=lambda item: -item[1]))


def full_tiers(bench: Bench) -> Iterator[tuple[Tier, float]]:
    """Yield tiers without room for the state of one more of the largest subgroups, with the fraction in use."""
    largest = max(size for unit in bench.units.values() for size in bench.decisions.piece_params(unit) or (0,))
    for tier, use in bench.memory.items():
        ranks = 1 if tier is Tier.GPU else bench.cost.ranks_per_node
        if use.capacity_bytes - use.peak_bytes < bench.decisions.state_bytes_per_param * largest * ranks:
            yield tier, use.peak_bytes / use.capacity_bytes
