"""Compare training by a DeepSpeed configuration with training by a plan: time, memory, and reasons."""

import dataclasses
from typing import Any

from planner.choices.request import Request
from planner.choices.variants import variants
from planner.optimizers import OPTIMIZERS
from planner.plan.document import Plan, describe
from planner.plan.planning import InfeasibleError
from planner.schedule.tasks import Phase, Tier
from planner.search import Scorer, best_of
from ullage.analysis.iteration import Iteration
from ullage.analysis.simulation import planned
from ullage.output.formatting import percent, si
from ullage.report.charts import Table
from ullage.report.terminal import Shown
from ullage.rivals import make_plan
from ullage.rivals.engines.deepspeed_config import Zero, configured
from ullage.rivals.lowering import lower


def side_by_side(
    request: Request, zero: Zero, assumed: tuple[str, ...]
) -> tuple[dict[str, Any], tuple[Shown, ...], Plan | None]:
    """Simulate an iteration by DeepSpeed, and plan the same training. All figures are predictions.

    Args:
        request: the training.
        zero: DeepSpeed's settings.
        assumed: assumptions about values that the configuration leaves open or that are not simulated, in words.

    Returns:
        Both as plain data, in seconds and bytes; what people read; and the plan, ``None`` if none fits.
    """
    own = variants(dataclasses.replace(request, subgroup_params=zero.size("sub_group_size")))[0]
    placements = configured(own.setup, zero, getattr(request.model, "hidden_size", None))
    best = best_of(map(Scorer.of(own, lower=lower).score, placements))
    units, seq_len = own.setup.units, request.seq_len
    theirs = Iteration("DeepSpeed", request.model, units, seq_len, best.decisions, own.cost)
    plan, ours, why_not = None, None, ""
    try:
        plan = make_plan(request)
        ours = planned(plan)
    except InfeasibleError as error:
        why_not = str(error)
    ratio = theirs.period_s / ours.period_s if ours is not None and not theirs.missing else None
    reasons = [] if ours is None or theirs.missing else _reasons(theirs, ours)  # without a fit, no time to compare
    data = {
        "theirs": _plain(theirs) | {"missing": theirs.missing},
        "ours": ours and _plain(ours),
        "ratio": ratio,
        "reasons": reasons,
        "assumed": assumed,
        "why_no_plan": why_not or None,
    }
    lines = [f"DeepSpeed does not fit: {theirs.missing}"] if theirs.missing else []
    lines += [f"no plan: {why_not}"] if why_not else []
    lines += [f"the plan is {ratio:.2f} x as fast (predicted)"] if ratio is not None else []
    lines += [f"- {line}" for line in reasons] + [f"note: {line}" for line in assumed]
    return data, (*_shown(request, zero, theirs, ours), "", *lines), plan


def _plain(seen: Iteration) -> dict[str, Any]:
    return {
        "fits": not seen.missing,
        "iteration_s": seen.period_s,
        "phases_s": seen.phases,
        "memory_bytes": {tier: use.peak_bytes for tier, use in seen.peaks.items()},
    }


def _reasons(theirs: Iteration, ours: Iteration) -> list[str]:
    """Return reasons for the difference in words: phases that take longer, and unused memory."""
    longer = {phase: theirs_s - ours.phases[phase] for phase, theirs_s in theirs.phases.items()}
    reasons = [
        f"{phase.value} takes {si(more_s, 's')} longer by DeepSpeed"
        for phase, more_s in sorted(longer.items(), key=lambda item: -item[1])
        if more_s > 0.02 * theirs.period_s
    ]
    reasons += [f"DeepSpeed is {theirs.verdict}", f"the plan is {ours.verdict}"]
    for tier in {Tier.GPU, Tier.HOST} & theirs.peaks.keys() & ours.peaks.keys():
        unused = theirs.peaks[tier].capacity_bytes - theirs.peaks[tier].peak_bytes
        ours_uses = ours.peaks[tier].peak_bytes - theirs.peaks[tier].peak_bytes
        if unused > 0 and ours_uses > 0.05 * theirs.peaks[tier].capacity_bytes:
            where = "of one device" if tier is Tier.GPU else "of the host"
            reasons.append(
                f"DeepSpeed leaves {si(unused, 'B')} {where} unused; the plan uses {si(ours_uses, 'B')} of it"
            )
    return reasons


def _words(zero: Zero) -> str:
    """Return settings in a few words."""
    where = {"none": "the device", "cpu": "the host", "nvme": "NVMe"}
    parts = [f"ZeRO-{zero.stage}", f"optimizer on {where[zero.optimizer.device]}"]
    if zero.optimizer.device == "cpu" and zero.stage == 3 and zero.optimizer.ratio < 1:
        parts[-1] = f"{percent(zero.optimizer.ratio)} of the optimizer on the host"
    if zero.params.device != "none":
        parts.append(f"parameters on {where[zero.params.device]}")
    return ", ".join(parts)


def _shown(request: Request, zero: Zero, theirs: Iteration, ours: Iteration | None) -> tuple[dict[str, str], Table]:
    tiers = [tier for tier in Tier if tier in theirs.peaks]
    summary = {
        "training": f"{request.model.name} on {request.num_devices} device(s) of {request.hardware.name}: "
        f"{request.micro_batch} sequences of {request.seq_len} tokens x {request.num_micro_batches} micro-batch(es), "
        f"{theirs.decisions.precision.weights}, {OPTIMIZERS[request.optimizer].words}",
        "DeepSpeed": f"{_words(zero)}, " + describe(theirs.decisions, theirs.units),
    }
    sides = {"DeepSpeed": theirs}
    if ours is not None:
        summary["Ullage"] = describe(ours.decisions, ours.units)
        sides["Ullage"] = ours
    columns = ("", "fits", "iteration", "forward", "backward", "update", *(tier.value for tier in tiers))
    rows = tuple((name, *_cells(seen, tiers)) for name, seen in sides.items())
    return summary, Table("predicted", columns, rows)


def _cells(seen: Iteration, tiers: list[Tier]) -> list[str]:
    own = (seen.phases[phase] for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE))
    times = [si(s, "s") for s in (seen.period_s, *own)]
    held = [si(seen.peaks[tier].peak_bytes, "B") if tier in seen.peaks else "" for tier in tiers]
    return ["no" if seen.missing else "yes", *times, *held]
