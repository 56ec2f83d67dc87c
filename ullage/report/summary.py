"""The summary of a report: the result in a few figures."""

from planner.models.captured import counted
from planner.plan.document import Plan, describe
from planner.schedule.tasks import Tier
from planner.simulate.prediction import TierMemory
from ullage.analysis.provenance import origin_words
from ullage.analysis.runs import RunRecord
from ullage.output.formatting import TIER_WORDS, binds, duration, percent, si, signed_percent
from ullage.output.plans import batch_line, gap_line, mfu, model_line, tokens_per_iteration
from ullage.report.charts import Axis, Chart, Fact, Level, Mark, Section, Summary, Table, Trace

_BILLION = 1e9


def plan_summary(plan: Plan, run: RunRecord | None, measured_s: float | None) -> Summary:
    """Return the summary of a plan, or of its run with the measured iteration time ``measured_s``."""
    seen, decided = plan.prediction, plan.decisions
    items = counted(plan.model)
    tokens = tokens_per_iteration(plan)
    speed = seen.tokens_per_s if not measured_s else tokens / measured_s
    where = f"{decided.num_devices} device{'s' if decided.num_devices > 1 else ''} of {plan.hardware.name}"
    how = "measured" if measured_s else "predicted"
    first = f"{plan.model.name} {'fits' if seen.fits else 'does not fit'} on {where}. "
    second = f"One iteration of {tokens:,} {items} takes {si(measured_s or seen.iteration_s, 's')} ({how}), "
    third = f"a billion {items} take {duration(_BILLION / speed)}."
    first_bound, _, others = binds(seen.critical_s, seen.iteration_s).partition(", ")
    facts = [
        _fits(seen.memory, seen.fits),
        _iteration(plan, measured_s),
        Fact(
            f"{items.capitalize()} per second",
            f"{speed:,.0f}",
            f"{how}, on all devices together" + (f"; {seen.tokens_per_s:,.0f} predicted" if measured_s else ""),
        ),
        Fact(
            "What binds",
            first_bound,
            "of the iteration, predicted" + (f"; then {others}" if others else ""),
        ),
        Fact(
            "From the best possible",
            f"within {percent(plan.certificate.gap(seen.iteration_s))}",
            f"proven: every schedule takes at least {si(plan.certificate.bound_s, 's')} on this machine",
        ),
        Fact(
            "Use of the device",
            percent(mfu(plan)),
            f"of its best GEMM rate, predicted: {si(seen.model_flop_per_s, 'FLOP/s')} of the model per device",
        ),
    ]
    about = {
        "model": model_line(plan.model),
        "machine": f"{plan.hardware.name}: {plan.hardware.description}; its quantities are "
        f"{origin_words(plan.hardware)}",
        "batch": batch_line(plan),
        "placement": describe(decided, plan.units()),
        "gap": gap_line(plan),
        **({} if run is None else {"ran on": run.machine, "losses": _losses(run)}),
        "made by": f"ullage {plan.program_version}",
    }
    warnings = list(plan.warnings)
    if not seen.converged:
        warnings.append("simulated iterations differ; times are of one of them")
    return Summary(
        title=f"{plan.model.name} on {where}",
        kind="plan" if run is None else "run",
        sentence=first + second + third,
        facts=tuple(facts),
        about=about,
        warnings=tuple(warnings),
    )


def _fits(memory: dict[Tier, TierMemory], fits: bool) -> Fact:
    shares = ", ".join(
        f"{TIER_WORDS[tier]} {percent(use.peak_bytes / use.capacity_bytes)}" for tier, use in memory.items()
    )
    if fits:
        return Fact("Fits in memory", "yes", f"predicted peak: {shares}", "good")
    lacking = " and ".join(
        f"{si(use.missing_bytes, 'B')} of {tier} memory" for tier, use in memory.items() if use.missing_bytes
    )
    return Fact("Fits in memory", "no", f"lacks {lacking}; predicted peak: {shares}", "bad")


def _iteration(plan: Plan, measured_s: float | None) -> Fact:
    seen = plan.prediction
    phases = ", ".join(
        f"{name} {si(seconds, 's')}"
        for name, seconds in (("forward", seen.forward_s), ("backward", seen.backward_s), ("update", seen.update_s))
    )
    if not measured_s:
        return Fact("Iteration", si(seen.iteration_s, "s"), f"predicted: {phases}")
    error = seen.iteration_s / measured_s - 1
    words = f"measured; {si(seen.iteration_s, 's')} predicted ({signed_percent(error)})"
    return Fact("Iteration", si(measured_s, "s"), words)


def _losses(run: RunRecord) -> str:
    return f"{run.losses[0]:.3f} at first, {run.losses[-1]:.3f} after {len(run.losses)} iterations"


def memory_by_tier(plan: Plan, run: RunRecord | None) -> Section:
    """Show the peak memory of each tier by class against its capacity."""
    memory = plan.prediction.memory
    names = [TIER_WORDS[tier] for tier in memory]
    kinds = sorted({kind for use in memory.values() for kind in use.by_class})
    traces = [
        Trace(
            kind.value,
            [use.by_class.get(kind, 0) / use.capacity_bytes for use in memory.values()],
            names,
            Mark.BARS,
            kind,
            texts=[si(n, "B") if (n := use.by_class.get(kind, 0)) else "" for use in memory.values()],
        )
        for kind in kinds
        if any(use.by_class.get(kind) for use in memory.values())
    ]
    chart = Chart(
        key="peaks",
        title="Peak memory by tier, as a share of its capacity",
        note="; ".join(
            f"{TIER_WORDS[tier]}: {si(use.peak_bytes, 'B')} of {si(use.capacity_bytes, 'B')}"
            + (f", {si(run.memory[tier], 'B')} measured" if run is not None and tier in run.memory else "")
            for tier, use in memory.items()
        ),
        x=Axis("share of capacity", "%"),
        traces=tuple(traces),
        limits=(Level(1.0, "capacity"),),
        bars="stack",
    )
    rows = tuple(
        (
            TIER_WORDS[tier],
            *(si(n, "B") if (n := use.by_class.get(kind, 0)) else "" for kind in kinds),
            si(use.peak_bytes, "B"),
            *(() if run is None else (si(run.memory[tier], "B") if tier in run.memory else "-",)),
            si(use.capacity_bytes, "B"),
            percent(use.peak_bytes / use.capacity_bytes),
        )
        for tier, use in memory.items()
    )
    measured = () if run is None else ("measured",)
    columns = (
        "",
        *(kind.value for kind in kinds),
        "peak" if run is None else "predicted",
        *measured,
        "capacity",
        "used",
    )
    return Section("peaks", "Tiers", "Memory by tier", (), (chart, Table("Peak memory", columns, rows)))
