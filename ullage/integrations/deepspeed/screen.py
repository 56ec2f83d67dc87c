"""The screen of `ullage import-deepspeed`."""

from planner.optimizers import OPTIMIZERS
from planner.plan.document import describe
from planner.schedule.tasks import Tier
from ullage.analysis.iteration import Iteration
from ullage.integrations.deepspeed.importing import SideBySide, words
from ullage.output.console import console, facts, table
from ullage.output.formatting import si


def side_by_side_screen(found: SideBySide) -> None:
    """Print DeepSpeed's iteration beside the plan's; all figures are predictions."""
    out, request = console(), found.imported.request
    tiers = [tier for tier in Tier if tier in found.theirs.peaks]
    rows = table("predicted", "", "fits", "iteration", "forward", "backward", "update", *(t.value for t in tiers))
    rows.add_row("DeepSpeed", *_cells(found.theirs, tiers))
    if found.our_iteration is not None:
        rows.add_row("Ullage", *_cells(found.our_iteration, tiers))
    summary = {
        "training": f"{request.model.name} on {request.num_devices} device(s) of {request.hardware.name}: "
        f"{request.micro_batch} sequences of {request.seq_len} tokens x {request.num_micro_batches} micro-batch(es), "
        f"{found.theirs.subject.decisions.precision.weights}, {OPTIMIZERS[request.optimizer].words}",
        "DeepSpeed": f"{words(found.imported.settings)}, "
        + describe(found.theirs.subject.decisions, found.theirs.subject.workload.units),
    }
    if found.ours is not None:
        summary["Ullage"] = describe(found.ours.decisions, found.ours.units())
    out.print(facts(summary))
    out.print()
    out.print(rows)
    out.print()
    if found.theirs.missing:
        out.print(f"DeepSpeed does not fit: {found.theirs.missing}", style="bold", soft_wrap=True)
    if found.missing:
        out.print(f"no plan: {found.missing}", soft_wrap=True)
    if found.ratio is not None:
        out.print(f"the plan is {found.ratio:.2f} x as fast (predicted)", style="bold")
    for line in found.reasons:
        out.print(f"- {line}", soft_wrap=True)
    for line in found.imported.assumed:
        out.print(f"note: {line}", soft_wrap=True)


def _cells(seen: Iteration, tiers: list[Tier]) -> list[str]:
    phases = seen.phases
    times = [si(s, "s") for s in (seen.period_s, phases.forward_s, phases.backward_s, phases.update_s)]
    held = [si(seen.peaks[tier].peak_bytes, "B") if tier in seen.peaks else "" for tier in tiers]
    return ["no" if seen.missing else "yes", *times, *held]
