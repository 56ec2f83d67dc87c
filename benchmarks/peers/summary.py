"""From outcomes to figures: the gate of correctness, medians, and ratios paired by round."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.peers.jobs import Cell, Outcome
from benchmarks.peers.rows import Row

# Most that a loss may be off the reference's, relative, in any iteration. Engines that train alike stay within a tenth
# of it (they round gradients and norms differently); a learning rate that is off by a tenth does not.
TOLERANCES = {"bf16": 0.005, "fp32": 0.002}


def loss_error(losses: Sequence[float], reference: Sequence[float]) -> float:
    """Return the largest relative difference of two loss curves; infinite if they have no iteration in common."""
    pairs = list(zip(losses, reference, strict=False))
    if not pairs or not all(math.isfinite(a) for a, _ in pairs):
        return math.inf
    return max(abs(a / b - 1) for a, b in pairs)


def verdict(outcomes: Sequence[Outcome], reference: Sequence[float], cell: Cell) -> tuple[str, str]:
    """Return whether a row counts, as ``ok``, ``failed``, ``error``, ``not installed`` or ``not run``; and why."""
    if not outcomes:
        return "not run", "no time was left"
    for outcome in outcomes:
        if outcome.error is not None:
            missing = outcome.error.startswith("ModuleNotFoundError")
            return "not installed" if missing else "error", outcome.error
    if not reference:
        return "failed", "there is no reference to hold the losses to"
    worst = max(loss_error(outcome.losses, reference) for outcome in outcomes)
    tolerance = TOLERANCES[cell.dtype]
    if worst > tolerance:
        return "failed", f"losses are off the reference's by up to {worst:.2%}, more than {tolerance:.1%}"
    return "ok", ""


def row_summary(cell: Cell, row: Row, outcomes: Sequence[Outcome], reference: Sequence[float]) -> dict[str, Any]:
    """Return what the table shows of a row: medians over its processes."""
    status, why = verdict(outcomes, reference, cell)
    if row.kind == "other mathematics" and status == "failed":
        status = "other mathematics"
    result: dict[str, Any] = {"status": status, "why": why, "kind": row.kind}
    whole = [outcome for outcome in outcomes if outcome.error is None]
    if not whole:
        return result
    per_process_s = [statistics.median(outcome.iteration_s) for outcome in whole]
    iteration_s = statistics.median(per_process_s)
    mean_s = statistics.median(outcome.total_s / len(outcome.iteration_s) for outcome in whole)
    device_bytes = [outcome.peak_device_bytes for outcome in whole if outcome.peak_device_bytes is not None]
    return result | {
        "iteration_s": iteration_s,
        "iteration_s_of_processes": per_process_s,
        "mean_iteration_s": mean_s,
        "tokens_per_s": cell.num_tokens / iteration_s,
        "loss_error": max(loss_error(outcome.losses, reference) for outcome in whole) if reference else None,
        "peak_rss_bytes": max(outcome.peak_rss_bytes for outcome in whole),
        "peak_device_bytes": max(device_bytes) if device_bytes else None,
        "start_up_s": statistics.median(outcome.start_up_s for outcome in whole),
        "first_iteration_s": statistics.median(outcome.first_iteration_s for outcome in whole),
    }


def paired_ratio(slower: Sequence[Outcome], faster: Sequence[Outcome]) -> float:
    """Return how many times an iteration of one row takes that of another: the median over rounds, each paired."""
    return statistics.median(
        statistics.median(a.iteration_s) / statistics.median(b.iteration_s)
        for a, b in zip(slower, faster, strict=False)
    )


def cell_summary(
    cell: Cell, rows: Sequence[Row], outcomes: Mapping[str, Sequence[Outcome]], reference: Sequence[float]
) -> dict[str, Any]:
    """Return all rows of a cell and how ours compares; ratios above 1 mean that ours is faster."""
    table = {row.name: row_summary(cell, row, outcomes[row.name], reference) for row in rows}
    result: dict[str, Any] = {"rows": table, "num_tokens": cell.num_tokens, "tolerance": TOLERANCES[cell.dtype]}
    counted = {name: row for name, row in table.items() if row["status"] == "ok"}
    ours = next((row.name for row in rows if row.kind == "ours" and row.name in counted), None)
    if ours is None:
        return result
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
