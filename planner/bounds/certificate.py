"""Certificates: how far from the best a plan can be at most, in a form that needs no trust in who made it.

[Note: Certificates] For every ZeRO stage that a plan could have had, a certificate holds multipliers of the conditions
(:mod:`planner.bounds.conditions`) that prove either that no schedule of that stage is faster than a bound, or that none
fits in memory. The least of the bounds is that of the plan. A checker builds the conditions again from the plan's own
model, machine and batch, and adds up the proofs in exact arithmetic: neither HiGHS nor the search is believed.
"""

import dataclasses
import math
from fractions import Fraction

from planner.bounds.conditions import OVERRUN, Space, conditions, decided
from planner.bounds.program import LinearProgram, bound
from planner.bounds.proof import Certificate, Proof
from planner.bounds.solver import Solution, solve
from planner.costs import CostModel
from planner.decisions import Decisions

# Schedules that take longer than this many times a plan are of no interest; the limit keeps numbers near one.
_LIMIT = 2.0
# Where nothing fits, time does not matter; any limit will do that no iteration reaches.
_NEVER_S = 1e9


class CertificateError(ValueError):
    """A certificate that does not prove what it states."""


def spaces(space: Space) -> tuple[Space, ...]:
    """Return the spaces of all ZeRO stages that make sense for some number of ranks."""
    stages = (0, 1, 2, 3) if space.given.data_parallel > 1 else (0,)
    options = ({"zero_stage": stage} for stage in stages)
    return tuple(dataclasses.replace(space, given=space.given.model_copy(update=option)) for option in options)


def relax(space: Space, cost: CostModel) -> Solution | None:
    """Return the best mixture of decisions of one ZeRO stage, or ``None`` if nothing fits in memory."""
    return solve(conditions(space, cost, _NEVER_S))


def certify(space: Space, cost: CostModel, decisions: Decisions, iteration_s: float) -> Certificate:
    """Prove how fast any schedule can be at best.

    Args:
        space: what is compared; its ZeRO stage is left open.
        cost: prices and machine.
        decisions: the plan's.
        iteration_s: what the plan takes.
    """
    limit_s = _LIMIT * iteration_s
    proofs = tuple(_prove(one, cost, limit_s) for one in spaces(space))
    program = _placed(space, cost, decisions, limit_s)
    solution = solve(program)
    assert solution is not None, "the plan itself satisfies the conditions"
    # Proofs are exact, but the simulated time is rounded: of a plan that attains its bound it may be a digit below.
    bound_s = min(iteration_s, *(proof.bound_s for proof in proofs if proof.bound_s is not None))
    placement_s = min(iteration_s, max(bound_s, _proven(program, solution.multipliers)))
    return Certificate(
        bound_s=bound_s, placement_bound_s=placement_s, proofs=proofs, placement=dict(solution.multipliers)
    )


def infeasible(space: Space, cost: CostModel) -> tuple[Proof, ...]:
    """Return proofs that no schedule of any stage fits, or nothing if one might."""
    proofs = []
    for one in spaces(space):
        proof = _does_not_fit(one, cost)
        if proof is None:
            return ()
        proofs.append(proof)
    return tuple(proofs)


def check(certificate: Certificate, space: Space, cost: CostModel, decisions: Decisions, iteration_s: float) -> None:
    """Check every statement of a certificate, in exact arithmetic.

    Raises:
        CertificateError: naming the statement that does not hold.
    """
    stages = {one.given.zero_stage: one for one in spaces(space)}
    if sorted(proof.zero_stage for proof in certificate.proofs) != sorted(stages):
        raise CertificateError(f"the certificate must have one proof for each of the ZeRO stages {sorted(stages)}")
    for proof in certificate.proofs:
        check_proof(proof, stages[proof.zero_stage], cost, _LIMIT * iteration_s)
    bounds = [proof.bound_s for proof in certificate.proofs if proof.bound_s is not None]
    if not bounds or certificate.bound_s > min(bounds):
        raise CertificateError(
            f"bound_s is {certificate.bound_s!r}, but the proofs are of {min(bounds, default=None)!r}"
        )
    program = _placed(space, cost, decisions, _LIMIT * iteration_s)
    stated, proven = certificate.placement_bound_s, _exactly(program, certificate.placement)
    if Fraction(stated) > max(proven, Fraction(certificate.bound_s)):
        raise CertificateError(f"placement_bound_s is {stated!r}, but only {float(proven)!r} is proven")
    if stated > iteration_s:
        raise CertificateError(f"placement_bound_s is {stated!r}, above the plan's own time {iteration_s!r}")


def check_proof(proof: Proof, space: Space, cost: CostModel, limit_s: float) -> None:
    """Check one proof, in exact arithmetic.

    Raises:
        CertificateError: it does not prove what it states.
    """
    if (proof.bound_s is None) == (proof.overrun is None):
        raise CertificateError(f"the proof of ZeRO stage {proof.zero_stage} must state either bound_s or overrun")
    fits = proof.bound_s is not None
    program = conditions(space, cost, limit_s if fits else _NEVER_S, soft=not fits)
    proven, stated = _exactly(program, proof.multipliers), proof.bound_s if fits else proof.overrun
    assert stated is not None
    if Fraction(stated) > proven or (not fits and proven <= 0):
        raise CertificateError(
            f"ZeRO stage {proof.zero_stage}: {'bound_s' if fits else OVERRUN} is stated as {stated!r}, but its "
            f"multipliers prove {float(proven)!r}"
        )


def _placed(space: Space, cost: CostModel, decisions: Decisions, limit_s: float) -> LinearProgram:
    """Return the conditions on schedules that place everything as a plan does."""
    own = Space.of(space.units, decisions, storage=space.storage)
    return decided(conditions(own, cost, limit_s), space.units, decisions)


def _prove(space: Space, cost: CostModel, limit_s: float) -> Proof:
    program = conditions(space, cost, limit_s)
    solution = solve(program)
    if solution is None:
        if proof := _does_not_fit(space, cost):
            return proof
        solution = relax(space, cost)  # it fits, but not within the limit: what is proven without one is above it
        assert solution is not None
    multipliers = solution.multipliers
    return Proof(zero_stage=space.given.zero_stage, bound_s=_proven(program, multipliers), multipliers=multipliers)


def _does_not_fit(space: Space, cost: CostModel) -> Proof | None:
    program = conditions(space, cost, _NEVER_S, soft=True)
    solution = solve(program)
    assert solution is not None, "memory may be overrun by any amount"
    overrun = _proven(program, solution.multipliers)
    if overrun <= 0:
        return None
    return Proof(zero_stage=space.given.zero_stage, overrun=overrun, multipliers=solution.multipliers)


def _exactly(program: LinearProgram, multipliers: dict[str, float]) -> Fraction:
    try:
        return bound(program, multipliers)
    except ValueError as error:
        raise CertificateError(f"the certificate has a {error}") from error


def _proven(program: LinearProgram, multipliers: dict[str, float]) -> float:
    """Return the largest float that multipliers prove."""
    exact = bound(program, multipliers)
    nearest = float(exact)
    return nearest if Fraction(nearest) <= exact else math.nextafter(nearest, -math.inf)
