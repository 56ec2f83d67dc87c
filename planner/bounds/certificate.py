"""Certificates: proofs of how far a plan can be from the best one, which anybody can check.

A certificate holds one proof for every choice of degrees and batch sizes that the plan could have made, and every ZeRO
stage. A proof is a set of multipliers of the conditions (:mod:`planner.bounds.conditions`). It shows that no schedule
of its choice and stage is faster than a bound, or that none fits in memory. The smallest bound is the plan's. The
checker builds the conditions again from the plan's own model, machine and batch, and adds up the proofs in exact
arithmetic. It trusts neither HiGHS nor the search.

Two things hold however tasks overlap. A resource has a capacity, so an iteration lasts at least as
long as the resource needs for its work. And no task is faster than alone. If nothing were shared, no task would start
later than it does now, because a start is a maximum of ends. The iteration would take the longest chain of waits along
dependencies and lanes, divided by the number of iterations that the chain spans. A simulation without resources finds
it.
"""

import dataclasses
import math
import weakref
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from types import MappingProxyType
from typing import Final

import numpy as np

from planner.bounds.conditions import conditions, decided, memory_conditions
from planner.bounds.loads import Loads
from planner.bounds.pipelines import computing
from planner.bounds.program import NEVER_S, OVERRUN, LinearProgram, bound
from planner.bounds.proof import Certificate, Proof
from planner.bounds.solver import solve
from planner.choices.variants import Variant
from planner.costs.model import CostModel
from planner.costs.resources import Resource
from planner.decisions import Choice, Decisions
from planner.lowering import lower
from planner.schedule.schedule import Schedule
from planner.schedule.tasks import Lane, Op
from planner.setup import Setup
from planner.simulate.machine import Simulation, find_cycle, run

# Only schedules that take at most this many times as long as the plan are considered, so that numbers stay near one.
_LIMIT = 2.0
# A simulation is deterministic on one machine. On another machine the last digits of sums may differ.
_RELATIVE = 1e-9
# Of each variant, what computing alone proves. A search sorts by it, and a certificate again.
_KNOWN: Final = weakref.WeakKeyDictionary[CostModel, tuple[Setup, dict[str, float]]]()


def certify(
    rivals: Sequence[Variant],
    own: Variant,
    decisions: Decisions,
    iteration_s: float,
    misfits: Mapping[tuple[Choice, int], Proof] = MappingProxyType({}),
) -> Certificate:
    """Prove a lower bound on the iteration time of any schedule.

    Args:
        rivals: all variants that were compared; each stands for all its ZeRO stages.
        own: the plan's variant, one of them.
        decisions: the plan's decisions.
        iteration_s: the plan's predicted iteration time.
        misfits: proofs for choices and ZeRO stages that do not fit, if :func:`prove_misfits` has made them.
    """
    limit_s, cost = _LIMIT * iteration_s, own.cost

    def prove(setup: Setup, variant: Variant = own) -> Proof:
        return misfits.get((variant.choice, setup.given.zero_stage)) or _prove(variant, setup, limit_s)

    placed = _placed(own.setup, cost, decisions, limit_s)
    with ThreadPoolExecutor(2) as pool:  # HiGHS solves one program while Python makes the next
        placing = pool.submit(solve, placed)
        proving = pool.map(prove, own.setup.stages())
        order_s = _order_s(own.setup, cost, decisions)
        proofs, solution = list(proving), placing.result()
    placement = solution.multipliers if solution else {}  # the plan satisfies the conditions, whatever HiGHS says
    bound_s = min(proof.bound_s for proof in proofs if proof.bound_s is not None)
    for rival in sorted(rivals, key=computing_s):
        if rival.choice == own.choice:
            continue
        for setup in rival.setup.stages():
            enough = computing_s(rival) >= bound_s
            proof = _by_computing(rival, setup) if enough else prove(setup, rival)
            proofs.append(proof)
            bound_s = min(bound_s, proof.bound_s if proof.bound_s is not None else bound_s)
    # Proofs are exact, but the simulated time is rounded: it may be one digit below a bound that the plan attains.
    bound_s = min(iteration_s, bound_s)
    placement_s = min(iteration_s, max(bound_s, _proven(placed, placement)))
    return Certificate(
        bound_s=bound_s,
        placement_bound_s=placement_s,
        order_bound_s=min(max(order_s, placement_s), iteration_s),
        proofs=tuple(proofs),
        placement=dict(placement),
    )


def prove_misfits(rivals: Sequence[Variant]) -> dict[tuple[Choice, int], Proof]:
    """Return a proof for every ZeRO stage but the last of some variants that does not fit, by choice and stage.

    These proofs do not depend on a plan. So they can be made beside the search, on another core: HiGHS takes most of
    the time and does not hold the interpreter. The last stage of one fits, or :func:`infeasible` would have said so.
    """
    proofs = {}
    for variant in rivals:
        for setup in variant.setup.stages()[:-1]:
            if proof := _does_not_fit(setup, memory_conditions(setup, variant.cost)):
                proofs[variant.choice, setup.given.zero_stage] = proof
    return proofs


def computing_s(variant: Variant) -> float:
    """Return the least time, in seconds, that the device computes or the host issues: the simplest bound."""
    return max(_computing(variant).values()) * (1 - _RELATIVE)  # the sum of a proof may be rounded otherwise


def _computing(variant: Variant) -> dict[str, float]:
    """Return the bound that each condition on computing and issuing proves alone, if nothing is recomputed."""
    setup, works = _KNOWN.get(variant.cost, (None, {}))
    if setup is not variant.setup:
        works = _works(variant)
        _KNOWN[variant.cost] = variant.setup, works
    return works


def _works(variant: Variant) -> dict[str, float]:
    given, cost = variant.setup.given, variant.cost
    if given.pipeline_parallel == 1:
        loads = Loads(cost, given)
        passes = [
            (given.num_micro_batches * unit.num_tiles, loads.computing(unit, op))
            for unit in variant.setup.units
            for op in (Op.FORWARD, Op.BACKWARD)
        ]
        return {
            f"work: {lane}": sum(count * load[lane][""] for count, load in passes)
            for lane in (Lane.COMPUTE, Lane.LAUNCH)
        }
    return computing(variant.setup, cost)


def _by_computing(variant: Variant, setup: Setup) -> Proof:
    works = _computing(variant)
    name = max(works, key=works.__getitem__)
    return _proof(setup, {name: 1.0}, bound_s=computing_s(variant))


def infeasible(rivals: Sequence[Variant]) -> tuple[Proof, ...]:
    """Return a proof for every variant and stage that no schedule fits in memory; nothing if one might fit."""
    proofs = []
    for rival in rivals:
        for setup in reversed(rival.setup.stages()):  # the last stage needs least memory, so it is the likeliest to fit
            proof = _does_not_fit(setup, memory_conditions(setup, rival.cost))
            if proof is None:
                return ()
            proofs.append(proof)
    return tuple(proofs)


def check(
    certificate: Certificate, rivals: Sequence[Variant], own: Variant, decisions: Decisions, iteration_s: float
) -> None:
    """Check every statement of a certificate, in exact arithmetic.

    Raises:
        ValueError: naming the statement that does not hold.
    """
    expected = {
        (rival.choice, setup.given.zero_stage): (setup, rival.cost)
        for rival in rivals
        for setup in rival.setup.stages()
    }
    found = [(proof.choice, proof.zero_stage) for proof in certificate.proofs]
    if len(found) != len(expected) or set(found) != set(expected):
        missing = [f"{choice.words}, ZeRO-{stage}" for choice, stage in expected if (choice, stage) not in found]
        raise ValueError(
            f"the certificate must have one proof for each of {len(expected)} choices of degrees, batch and ZeRO "
            f"stage, but has {len(found)}" + (f"; there is none for {missing[0]}" if missing else "")
        )
    for proof in certificate.proofs:
        setup, cost = expected[proof.choice, proof.zero_stage]
        check_proof(proof, setup, cost, _LIMIT * iteration_s)
    bounds = [proof.bound_s for proof in certificate.proofs if proof.bound_s is not None]
    if not bounds or certificate.bound_s > min(bounds):
        raise ValueError(f"bound_s is {certificate.bound_s!r}, but the proofs are of {min(bounds, default=None)!r}")
    program = _placed(own.setup, own.cost, decisions, _LIMIT * iteration_s)
    stated, proven = certificate.placement_bound_s, _exactly(program, certificate.placement)
    if Fraction(stated) > max(proven, Fraction(certificate.bound_s)):
        raise ValueError(f"placement_bound_s is {stated!r}, but only {float(proven)!r} is proven")
    if stated > iteration_s:
        raise ValueError(f"placement_bound_s is {stated!r}, above the plan's own time {iteration_s!r}")
    ordered = min(max(_order_s(own.setup, own.cost, decisions), stated), iteration_s)
    if abs(certificate.order_bound_s - ordered) > _RELATIVE * ordered:
        raise ValueError(f"order_bound_s is {certificate.order_bound_s!r}, but the schedule's is {ordered!r}")


def check_proof(proof: Proof, setup: Setup, cost: CostModel, limit_s: float) -> None:
    """Check one proof, in exact arithmetic.

    Raises:
        ValueError: it does not prove what it states.
    """
    if (proof.bound_s is None) == (proof.overrun is None):
        raise ValueError(f"the proof of ZeRO stage {proof.zero_stage} must state either bound_s or overrun")
    fits = proof.bound_s is not None
    program = conditions(setup, cost, limit_s if fits else NEVER_S, soft=not fits)
    proven, stated = _exactly(program, proof.multipliers), proof.bound_s if fits else proof.overrun
    assert stated is not None
    if Fraction(stated) > proven or (not fits and proven <= 0):
        raise ValueError(
            f"ZeRO stage {proof.zero_stage}: {'bound_s' if fits else OVERRUN} is stated as {stated!r}, but its "
            f"multipliers prove {float(proven)!r}"
        )


def _placed(setup: Setup, cost: CostModel, decisions: Decisions, limit_s: float) -> LinearProgram:
    """Return the conditions on schedules that have the plan's placement."""
    return decided(conditions(setup.changed(zero_stage=decisions.zero_stage), cost, limit_s), setup.units, decisions)


def _order_s(setup: Setup, cost: CostModel, decisions: Decisions) -> float:
    """Return a lower bound on the plan's own schedule, from its tasks and their order."""
    schedule = lower(setup.units, decisions, asynchronous=cost.asynchronous)
    return order_bound_s(schedule, CostModel.of(cost.profile, setup.units, decisions))


def _prove(variant: Variant, setup: Setup, limit_s: float) -> Proof:
    """Prove a bound for one choice and ZeRO stage, or that nothing fits."""
    cost = variant.cost
    program = conditions(setup, cost, limit_s)
    # If no schedule is within the limit, the proof without the limit gives a bound above it, unless nothing fits.
    solution = solve(program) or solve(conditions(setup, cost, NEVER_S))
    if solution is None:
        # The conditions on memory alone come first: they are few, and mostly enough.
        softened = (memory_conditions(setup, cost), conditions(setup, cost, NEVER_S, soft=True))
        proofs = (_does_not_fit(setup, soft) for soft in softened)
        if proof := next(filter(None, proofs), None):
            return proof
    elif (bound_s := _proven(program, solution.multipliers)) > 0:
        return _proof(setup, solution.multipliers, bound_s=bound_s)
    return _by_computing(variant, setup)  # needs no solver


def _proof(setup: Setup, multipliers: dict[str, float], **stated: float) -> Proof:
    """Return the proof of what is stated about a setup's choice and ZeRO stage."""
    stage = setup.given.zero_stage
    return Proof(choice=Choice.of(setup.given), zero_stage=stage, multipliers=multipliers, **stated)


def _does_not_fit(setup: Setup, program: LinearProgram) -> Proof | None:
    solution = solve(program)
    if solution is None:  # the conditions allow at most a million times the memory, or the solver is wrong
        return None
    overrun = _proven(program, solution.multipliers)
    return _proof(setup, solution.multipliers, overrun=overrun) if overrun > 0 else None


def _exactly(program: LinearProgram, multipliers: dict[str, float]) -> Fraction:
    try:
        return bound(program, multipliers)
    except ValueError as error:
        raise ValueError(f"the certificate has a {error}") from error


def _proven(program: LinearProgram, multipliers: dict[str, float]) -> float:
    """Return the largest float that the multipliers prove as a bound."""
    exact = bound(program, multipliers)
    nearest = float(exact)
    return nearest if Fraction(nearest) <= exact else math.nextafter(nearest, -math.inf)


# Iterations to simulate in search of a cycle. Without sharing, a cycle shows up soon or is not needed.
_NUM_ITERATIONS = (4, 16)


def order_bound_s(schedule: Schedule, cost: CostModel) -> float:
    """Return a lower bound on the iteration time of a schedule, in seconds; see the module."""
    arrays, capacity = schedule.arrays, cost.capacities()
    prices = [cost.price(each) for each in arrays.works]
    counts = np.bincount(arrays.work, minlength=len(prices)).tolist()
    work: dict[tuple[Resource, int], float] = defaultdict(float)
    for each, price, count in zip(arrays.works, prices, counts, strict=True):
        for resource, rate in price.uses:
            work[resource, each.stage] += count * rate * price.duration_s / capacity[resource]
    at_least_s = max(work.values(), default=0.0)
    without = [dataclasses.replace(price, uses=()) for price in prices]
    alone = [without[number] for number in arrays.work.tolist()]
    for num_iterations in _NUM_ITERATIONS:
        timeline = run(schedule, alone, capacity, num_iterations)
        if cycle := find_cycle(timeline):
            return max(at_least_s, Simulation(timeline, cycle, converged=True).period_s)
    return at_least_s  # no cycle was found, so nothing more is known
