"""From outcomes to figures: the gate of correctness, medians, and ratios paired by round.

A row counts if its losses are those of a reference: training in memory with the stock loop. Weights that are their own
master copies are rounded stochastically by ours, and to nearest by others. Losses then differ by as much as those of a
wrong rate, so ours is held to training in memory with the same rounding. Where that does not fit, or
fails, a row is held to those of other engines, and counts if they agree with at least one that shares no code with it:
what two engines that were written apart find alike is taken as right. So a wrong engine fails with or without company,
and where just two engines train and disagree, neither counts. A row that nobody can be set beside is ``not checked``:
its figures are shown, and enter no ratio.
"""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.peers.engines import PACKAGES
from benchmarks.peers.jobs import Cell, Outcome, model_config
from benchmarks.peers.rows import Rounding, Row
from planner.models.parameters import num_parameters

# Most that a loss may be off the reference's, relative, in any iteration. Engines that train alike stay within a tenth
# of it (they round gradients and norms differently); a learning rate that is off by a tenth does not.
TOLERANCES = {"bf16": 0.005, "fp32": 0.002}
IN_MEMORY = "training in memory"


@dataclasses.dataclass(frozen=True)
class Reference:
    """Losses that others are held to.

    Attributes:
        name: :data:`IN_MEMORY`, or the row that they are of.
        losses: of every iteration.
    """

    name: str
    losses: tuple[float, ...]


def loss_error(losses: Sequence[float], reference: Sequence[float]) -> float:
    """Return the largest relative difference of two loss curves; infinite if they have no iteration in common."""
    pairs = list(zip(losses, reference, strict=False))
    if not pairs or not all(math.isfinite(a) for a, _ in pairs):
        return math.inf
    return max(abs(a / b - 1) for a, b in pairs)


def references_of(
    cell: Cell,
    row: Row,
    rows: Sequence[Row],
    outcomes: Mapping[str, Sequence[Outcome]],
    in_memory: Mapping[Rounding, Reference],
) -> tuple[Reference, ...]:
    """Return what a row is held to: training in memory, or else all rows of engines that share no code with its own."""
    rounding = row.rounding(cell)
    if rounding in in_memory:
        return (in_memory[rounding],)
    found = []
    for other in rows:
        if other.kind != "other mathematics" and _code(other) != _code(row) and other.rounding(cell) == rounding:
            ended = next((outcome for outcome in outcomes[other.name] if outcome.error is None), None)
            found += [Reference(other.name, ended.losses)] if ended else []
    return tuple(found)


def _code(row: Row) -> str:
    return PACKAGES.get(row.engine, row.engine)


def worst_errors(outcomes: Sequence[Outcome], references: Sequence[Reference]) -> dict[str, float]:
    """Return by reference how far a row's losses are off, in its worst process; the nearest reference first."""
    errors = {r.name: max(loss_error(outcome.losses, r.losses) for outcome in outcomes) for r in references}
    return dict(sorted(errors.items(), key=lambda item: item[1]))


def verdict(outcomes: Sequence[Outcome], references: Sequence[Reference], cell: Cell) -> tuple[str, str]:
    """Return whether a row counts, and why.

    That is ``ok``, ``failed``, ``not checked``, ``error``, ``not installed`` or ``not run``.
    """
    if not outcomes:
        return "not run", "no time was left"
    for outcome in outcomes:
        if outcome.error is not None:
            missing = outcome.error.startswith("ModuleNotFoundError")
            return "not installed" if missing else "error", outcome.error
    if not references:
        return "not checked", "neither training in memory nor another engine has losses to hold these to"
    nearest, worst = next(iter(worst_errors(outcomes, references).items()))
    tolerance = TOLERANCES[cell.dtype]
    if worst > tolerance:
        off = f"losses are off those of {nearest} by up to {worst:.2%}, more than {tolerance:.1%}"
        others = len(references) - 1
        return "failed", off + (f", and further off those of {others} others" if others else "")
    return "ok", ""


def row_summary(cell: Cell, row: Row, outcomes: Sequence[Outcome], references: Sequence[Reference]) -> dict[str, Any]:
    """Return what the table shows of a row: medians over its processes, and what its losses were held to and met."""
    status, why = verdict(outcomes, references, cell)
    if row.kind == "other mathematics" and status == "failed":
        status = "other mathematics"
    result: dict[str, Any] = {"status": status, "why": why, "kind": row.kind, "state": row.state(cell)}
    whole = [outcome for outcome in outcomes if outcome.error is None]
    if not whole:
        return result
    per_process_s = [statistics.median(outcome.iteration_s) for outcome in whole]
    iteration_s = statistics.median(per_process_s)
    mean_s = statistics.median(outcome.total_s / len(outcome.iteration_s) for outcome in whole)
    errors = worst_errors(whole, references)
    busy = [share for outcome in whole if (share := outcome.detail.get("device_span_share")) is not None]
    told = {name: whole[-1].detail.get(name) for name in ("num_alloc_retries", "attention")}
    device_bytes = [outcome.peak_device_bytes for outcome in whole if outcome.peak_device_bytes is not None]
    return result | {
        "iteration_s": iteration_s,
        "iteration_s_of_processes": per_process_s,
        "iteration_s_of_first_process": list(whole[0].iteration_s),
        "mean_iteration_s": mean_s,
        "tokens_per_s": cell.num_tokens / iteration_s,
        "loss_error": next(iter(errors.values()), None),
        "checked_against": [name for name, error in errors.items() if error <= TOLERANCES[cell.dtype]],
        "peak_rss_bytes": max(outcome.peak_rss_bytes for outcome in whole),
        "peak_device_bytes": max(device_bytes) if device_bytes else None,
        "device_span_share": statistics.median(busy) if busy else None,
        "start_up_s": statistics.median(outcome.start_up_s for outcome in whole),
        "first_iteration_s": statistics.median(outcome.first_iteration_s for outcome in whole),
        **{name: value for name, value in told.items() if value is not None},
    }


def paired_ratio(slower: Sequence[Outcome], faster: Sequence[Outcome]) -> float:
    """Return how many times an iteration of one row takes that of another: the median over rounds, each paired."""
    return statistics.median(
        statistics.median(a.iteration_s) / statistics.median(b.iteration_s)
        for a, b in zip(slower, faster, strict=False)
    )


def cell_summary(
    cell: Cell,
    rows: Sequence[Row],
    outcomes: Mapping[str, Sequence[Outcome]],
    in_memory: Mapping[Rounding, Reference],
    peak_flop_per_s: float | None = None,
) -> dict[str, Any]:
    """Return all rows of a cell and how ours compares; ratios above 1 mean that ours is faster.

    Args:
        cell: what was trained.
        rows: by whom.
        outcomes: what came of it, by row.
        in_memory: losses of training in memory; where there are none, engines are held to one another.
        peak_flop_per_s: that ``mfu`` is a share of: the best rate that the profile has for one matrix product. The
            model's FLOP are 6 for each parameter and token (Kaplan et al. 2020, table 1), recomputed ones not counted.
    """
    table = {
        row.name: row_summary(cell, row, outcomes[row.name], references_of(cell, row, rows, outcomes, in_memory))
        for row in rows
    }
    result: dict[str, Any] = {
        "rows": table,
        "num_tokens": cell.num_tokens,
        "tolerance": TOLERANCES[cell.dtype],
        "reference": IN_MEMORY if in_memory else "other engines" if any(outcomes.values()) else None,
        "model_flop_per_token": 6 * num_parameters(model_config(cell.model)),
        "peak_flop_per_s": peak_flop_per_s,
    }
    for found in table.values():
        if peak_flop_per_s is not None and "tokens_per_s" in found:
            found["mfu"] = result["model_flop_per_token"] * found["tokens_per_s"] / peak_flop_per_s
    counted = {name: row for name, row in table.items() if row["status"] == "ok"}
    own = next((row for row in rows if row.kind == "ours" and row.name in counted), None)
    if own is None:
        return result
    ours = own.name
    peers = {name: row["iteration_s"] for name, row in counted.items() if row["kind"] == "peer"}
    if peers:
        best = min(peers, key=peers.__getitem__)
        result |= {"best_peer": best, "ours_over_best_peer": paired_ratio(outcomes[best], outcomes[ours])}
    ceiling = next((name for name, row in counted.items() if row["kind"] == "ceiling"), None)
    if ceiling is not None:
        result["ours_over_in_memory"] = paired_ratio(outcomes[ceiling], outcomes[ours])
    return result | _predictions(outcomes[ours], table[ours]["iteration_s"])


def _predictions(outcomes: Sequence[Outcome], iteration_s: float) -> dict[str, Any]:
    """Return the plan's promises beside what was measured; errors are positive where too much was predicted."""
    details = [outcome.detail for outcome in outcomes]
    if not all("plan" in detail for detail in details):
        return {}
    plan = details[0]["plan"]
    memory = details[0]["predicted_and_measured"]["memory"]
    return {
        "plan": plan,
        "ours_over_bound": plan["bound_s"] / iteration_s,
        "prediction_error": plan["predicted_iteration_s"] / iteration_s - 1,
        "replayed_over_measured": statistics.median(detail["replayed_over_measured"] for detail in details),
        "memory_errors": {tier: row["error"] for tier, row in memory.items() if row["error"] is not None},
    }
