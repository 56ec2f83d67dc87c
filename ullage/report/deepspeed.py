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


@dataclasses.dataclass(frozen=True)
class SideBySide:
    """The same training by DeepSpeed and by a plan.

    Attributes:
        request: the training.
        zero: DeepSpeed's settings.
        assumed: assumptions about values that the configuration leaves open or that are not simulated, in words.
        theirs: an iteration by DeepSpeed.
        ours: the plan; ``None`` if no plan fits.
        our_iteration: an iteration of the plan.
        missing: the reason if there is no plan.
    """

    request: Request
    zero: Zero
    assumed: tuple[str, ...]
    theirs: Iteration
    ours: Plan | None
    our_iteration: Iteration | None
    missing: str = ""

    @property
    def ratio(self) -> float | None:
        """DeepSpeed's time over the plan's; ``None`` if one of them does not fit."""
        if self.our_iteration is None or self.theirs.missing:
            return None
        return self.theirs.period_s / self.our_iteration.period_s

    @property
    def reasons(self) -> list[str]:
        """Reasons for the difference in words: phases that take longer, and unused memory."""
        theirs, ours = self.theirs, self.our_iteration
        if ours is None or theirs.missing:  # without a fit there is no time to compare
            return []
        found = []
        for phase, theirs_s in theirs.phases.items():
            more_s = theirs_s - ours.phases[phase]
            if more_s > 0.02 * theirs.period_s:
                found.append((more_s, f"{phase.value} takes {si(more_s, 's')} longer by DeepSpeed"))
        reasons = [words for _, words in sorted(found, reverse=True)]
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

    def to_json(self) -> dict[str, Any]:
        """Return plain data: predicted seconds and bytes of both, and the words."""

        def plain(seen: Iteration) -> dict[str, Any]:
            return {
                "fits": not seen.missing,
                "iteration_s": seen.period_s,
                "phases_s": seen.phases,
                "memory_bytes": {tier: use.peak_bytes for tier, use in seen.peaks.items()},
            }

        return {
            "theirs": plain(self.theirs) | {"missing": self.theirs.missing},
            "ours": plain(self.our_iteration) if self.our_iteration else None,
            "ratio": self.ratio,
            "reasons": self.reasons,
            "assumed": self.assumed,
            "why_no_plan": self.missing or None,
        }


def side_by_side(request: Request, zero: Zero, assumed: tuple[str, ...]) -> SideBySide:
    """Simulate an iteration by DeepSpeed, and plan the same training."""
    own = variants(dataclasses.replace(request, subgroup_params=zero.size("sub_group_size")))[0]
    placements = configured(own.setup, zero, getattr(request.model, "hidden_size", None))
    best = best_of(map(Scorer.of(own, lower=lower).score, placements))
    units, seq_len = own.setup.units, request.seq_len
    theirs = Iteration("DeepSpeed", request.model, request.hardware, units, seq_len, best.decisions, own.cost)
    try:
        plan = make_plan(request)
    except InfeasibleError as error:
        return SideBySide(request, zero, assumed, theirs, None, None, str(error))
    return SideBySide(request, zero, assumed, theirs, plan, planned(plan))


def _words(zero: Zero) -> str:
    """Return settings in a few words."""
    where = {"none": "the device", "cpu": "the host", "nvme": "NVMe"}
    parts = [f"ZeRO-{zero.stage}", f"optimizer on {where[zero.optimizer.device]}"]
    if zero.optimizer.device == "cpu" and zero.stage == 3 and zero.optimizer.ratio < 1:
        parts[-1] = f"{percent(zero.optimizer.ratio)} of the optimizer on the host"
    if zero.params.device != "none":
        parts.append(f"parameters on {where[zero.params.device]}")
    return ", ".join(parts)


def shown(found: SideBySide) -> tuple[Shown, ...]:
    """Return DeepSpeed's iteration beside the plan's; all figures are predictions."""
    request = found.request
    tiers = [tier for tier in Tier if tier in found.theirs.peaks]
    summary = {
        "training": f"{request.model.name} on {request.num_devices} device(s) of {request.hardware.name}: "
        f"{request.micro_batch} sequences of {request.seq_len} tokens x {request.num_micro_batches} micro-batch(es), "
        f"{found.theirs.decisions.precision.weights}, {OPTIMIZERS[request.optimizer].words}",
        "DeepSpeed": f"{_words(found.zero)}, " + describe(found.theirs.decisions, found.theirs.units),
    }
    if found.ours is not None:
        summary["Ullage"] = describe(found.ours.decisions, found.ours.units())
    sides = {"DeepSpeed": found.theirs} | ({"Ullage": found.our_iteration} if found.our_iteration else {})
    columns = ("", "fits", "iteration", "forward", "backward", "update", *(tier.value for tier in tiers))
    rows = tuple((name, *_cells(seen, tiers)) for name, seen in sides.items())
    lines = [f"DeepSpeed does not fit: {found.theirs.missing}"] if found.theirs.missing else []
    lines += [f"no plan: {found.missing}"] if found.missing else []
    lines += [f"the plan is {found.ratio:.2f} x as fast (predicted)"] if found.ratio is not None else []
    lines += [f"- {line}" for line in found.reasons] + [f"note: {line}" for line in found.assumed]
    return summary, Table("predicted", columns, rows), "", *lines


def _cells(seen: Iteration, tiers: list[Tier]) -> list[str]:
    own = (seen.phases[phase] for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE))
    times = [si(s, "s") for s in (seen.period_s, *own)]
    held = [si(seen.peaks[tier].peak_bytes, "B") if tier in seen.peaks else "" for tier in tiers]
    return ["no" if seen.missing else "yes", *times, *held]
