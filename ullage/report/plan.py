"""A plan as sections: the result in figures, memory by tier, other engines, and checkpoints."""

import itertools
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from planner.bounds.proof import Certificate
from planner.costs.model import CostModel
from planner.costs.resources import Resource
from planner.models.captured import CapturedModel, Model, counted
from planner.models.parameters import num_parameters
from planner.optimizers import OPTIMIZERS
from planner.plan.checkpoints import CheckpointPlan
from planner.plan.document import EngineRow, Plan, describe
from planner.plan.unlike import MOST_SHARES
from planner.schedule.tasks import Lane, MemoryClass, Tier
from planner.simulate.critical_path import used_meanwhile
from planner.simulate.machine import run_until_steady
from planner.simulate.prediction import TierMemory
from ullage.analysis.provenance import origin_words
from ullage.output.formatting import TIER_WORDS, binds, duration, percent, si, signed_percent
from ullage.report.charts import Axis, Chart, Fact, Line, Part, Section, Table, Trace, bars
from ullage.rivals.decisions import LAYERS_IN_TURN, OWN_KERNELS
from ullage.rivals.engines.catalogue import POLICIES, policies_of
from ullage.training.processes import launch_lines, nodes

if TYPE_CHECKING:
    from ullage.analysis.runs import RunRecord  # slow to import, and a plan alone does without

_BILLION = 1e9
# If updates on the CPU have at least this share of the critical path, the summary says what slows them.
_MATTERS = 0.25
_BOUNDS = {
    "waste": "loses least time",
    "iteration": "one iteration",
    "drain": "the previous one is safe",
    "endurance": "drive endurance",
    "overhead": "overhead limit",
    "lost work": "lost-work limit",
}

_REACH = {
    "never": "that offloads no activations",
    "activations": "that may offload activations",
    "nvme": "that may use NVMe and offload activations",
}


def plan_part(
    plan: Plan,
    run: "RunRecord | None" = None,
    measured_s: float | None = None,
    *,
    path: Path = Path("plan.json"),
    chosen: str = "",
) -> Part:
    """Return a plan, or its run with the measured iteration time ``measured_s``.

    Args:
        plan: the plan.
        run: its run, if it was executed.
        measured_s: measured seconds of an iteration.
        path: path of the plan's file.
        chosen: why this machine was chosen, if the user did not choose it.
    """
    seen, decided = plan.prediction, plan.decisions
    items, tokens = counted(plan.model), tokens_per_iteration(plan)
    speed = tokens / measured_s if measured_s else seen.tokens_per_s
    where = where_words(plan)
    how: Literal["measured", "predicted"] = "measured" if measured_s else "predicted"
    first_bound, _, others = binds(seen.critical_s, seen.iteration_s).partition(", ")
    gap, why = gap_words(plan)
    use = f"{si(seen.model_flop_per_s, 'FLOP/s')} of the model per device, {percent(mfu(plan))} of the best GEMM rate"
    facts = (
        Fact("fits", *_fits(seen.memory), "good" if seen.fits else "bad", "predicted"),
        _iteration(plan, measured_s),
        *_interval(plan),
        Fact("speed", f"{speed:,.0f} {items}/s", use, origin=how),
        Fact("binds", first_bound, others, origin="predicted"),
        Fact("best", gap, why),
    )
    faster = faster_line(plan)
    losses = {}
    if run is not None:
        last = f"{run.losses[-1]:.3f} after {len(run.losses)} iterations"
        losses = {"ran on": run.machine, "losses": f"{run.losses[0]:.3f} at first, {last}"}
    about = {
        "placement": describe(decided, plan.units()),
        "model": model_line(plan.model),
        "hardware": f"{plan.hardware.name}{chosen}: {plan.hardware.description}. Its quantities are "
        f"{origin_words(plan.hardware)}",
        "batch": batch_line(plan),
        **_narrow_state(plan),
        **_choice(plan),
        **_host_memory(plan),
        **({"faster": faster} if faster else {}),
        **_execution(plan, path),
        **_storage(plan),
        **losses,
        "made by": f"ullage {plan.program_version}",
    }
    warnings = list(plan.warnings)
    if not seen.converged:
        warnings.append("simulated iterations differ; times are of one of them")
    return Part(
        title=f"{plan.model.name} on {where}",
        kind="plan" if run is None else "run",
        sentence=f"{plan.model.name} {'fits' if seen.fits else 'does not fit'} on {where}. One iteration of "
        f"{tokens:,} {items} takes {si(measured_s or seen.iteration_s, 's')} ({how}), a billion {items} take "
        f"{duration(_BILLION / speed)}.",
        facts=facts,
        about=about,
        sections=(
            memory_section(seen.memory, run.memory if run else {}),
            *([kinds_section(plan)] if plan.others else []),
            engines_section(plan, measured_s),
            *([checkpoints_section(plan.checkpoints)] if plan.checkpoints else []),
        ),
        warnings=tuple(warnings),
    )


def where_words(plan: Plan) -> str:
    """Return the devices of a plan, by kind."""
    found = [(kind.num_ranks, kind.hardware.name) for kind in plan.kinds()]
    return " and ".join(f"{count} device{'s' if count > 1 else ''} of {name}" for count, name in found)


def kinds_section(plan: Plan) -> Section:
    """Show what each kind of device does, if there are several."""
    rows = []
    for kind in plan.kinds():
        seen, own = kind.prediction, plan.of_rank(kind.first_rank)
        ranks = f"{kind.ranks.start} to {kind.ranks.stop - 1}" if kind.num_ranks > 1 else str(kind.first_rank)
        sequences = f"{kind.decisions.micro_batch} x {kind.decisions.num_micro_batches}"
        placed = describe(kind.decisions, own.units())
        rows.append((kind.hardware.name, ranks, sequences, si(seen.iteration_s, "s"), _used(seen.memory), placed))
    names = ("devices", "ranks", "sequences of each", "iteration", "memory at the peak", "placement")
    assert plan.divisions_bound_s is not None
    over = percent(plan.prediction.iteration_s / plan.divisions_bound_s - 1)
    bound = (
        f"No division of the batch among these devices, with at most {MOST_SHARES} sequences of a micro-batch on each, "
        f"is faster than {si(plan.divisions_bound_s, 's')}, by what they compute; this one takes {over} longer."
    )
    return Section("kinds", "Kinds", "Kinds of devices", (bound,), (Table("kinds of devices", names, tuple(rows)),))


def _fits(memory: Mapping[Tier, TierMemory]) -> tuple[str, str]:
    """Return whether the memory is enough, and how much of it is used or missing."""
    if short := [f"{si(use.missing_bytes, 'B')} of {tier} memory" for tier, use in memory.items() if use.missing_bytes]:
        return "no", f"lacks {' and '.join(short)}"
    return "yes", f"at the peak {_used(memory)}"


def _used(memory: Mapping[Tier, TierMemory]) -> str:
    """Return the share of each tier that the peak takes."""
    return ", ".join(
        f"{TIER_WORDS[tier]} {percent(use.peak_bytes / use.capacity_bytes)}" for tier, use in memory.items()
    )


def _interval(plan: Plan) -> Iterator[Fact]:
    """Yield how far the predicted iteration may be off; nothing for plans of older versions."""
    if (interval := plan.prediction.interval_s) is not None:
        low, high = (si(seconds, "s") for seconds in interval)
        yield Fact("8 of 10", f"{low} to {high}", "as far off as the origins of the machine's rates let expect")


def _iteration(plan: Plan, measured_s: float | None) -> Fact:
    seen = plan.prediction
    if measured_s:
        words = f"{si(seen.iteration_s, 's')} predicted ({signed_percent(seen.iteration_s / measured_s - 1)})"
        return Fact("iteration", si(measured_s, "s"), words, origin="measured")
    phases = {"forward": seen.forward_s, "backward": seen.backward_s, "update": seen.update_s}
    words = " + ".join(f"{name} {si(seconds, 's')}" for name, seconds in phases.items())
    words += " (updates may run inside the next forward)"
    return Fact("iteration", si(seen.iteration_s, "s"), words, origin="predicted")


def _narrow_state(plan: Plan) -> dict[str, str]:
    """Return how many bytes a low-precision optimizer state saves."""
    decided = plan.decisions
    if (wide := OPTIMIZERS[decided.optimizer].wide) is None:
        return {}
    own_bytes = decided.precision.state_bytes_per_param(decided.optimizer)
    wide_bytes = OPTIMIZERS[wide].state_bytes_per_param
    if decided.precision.rounds:  # there the weight is part of the state
        wide_bytes += decided.precision.weight_bytes
    num_params = sum(decided.shard_params(unit) for unit in plan.units()) // decided.pipeline_parallel
    saved = si((wide_bytes - own_bytes) * num_params, "B")
    counts = " with the weight" if decided.precision.rounds else ""
    words = f"{own_bytes:.3g} bytes per parameter{counts}, {wide_bytes} with {wide}: {saved} less for each device"
    return {"state": words}


def _choice(plan: Plan) -> dict[str, str]:
    """Return the chosen parallel degrees and batch sizes, if the planner chose them."""
    choices = {proof.choice for proof in plan.certificate.proofs}
    if len(choices) == 1:
        return {}
    return {"choice": f"{plan.decisions.words}: the best found of {len(choices)}, and the bound holds for all of them"}


def _execution(plan: Plan, path: Path) -> dict[str, str]:
    """Return how to start a plan's processes."""
    if plan.decisions.num_devices == 1:
        return {}
    lines = launch_lines(plan, path=shlex.quote(str(path)))
    if len(lines) > 1:
        names = [plan.of_rank(node.start).hardware.name for node in nodes(plan)]
        lines = [f"on {name}: {line}" for name, line in zip(names, lines, strict=True)]
    return {"execution": f"one process per device: {'; '.join(lines)}"}


def _host_memory(plan: Plan) -> dict[str, str]:
    """Return the use of host memory if updates on the CPU bind, or that host and device share one memory."""
    seen, hardware = plan.prediction, plan.hardware
    if hardware.one_memory:
        return {"host memory": "host and device share one memory, so offloading to the host gains nothing"}
    if seen.critical_s.get(Lane.CPU, 0.0) < _MATTERS * seen.iteration_s:
        return {}
    schedule, cost = plan.schedule(), CostModel.of(hardware, plan.units(), plan.decisions)
    found = run_until_steady(schedule, cost)
    used = used_meanwhile(
        found.timeline, found.steady, Lane.CPU, Resource.DRAM, cost.prices(schedule), cost.capacities()
    )
    rate = si(hardware.host.dram_bytes_per_s.value, "B/s")
    return {"host memory": f"optimizer steps on the CPU bind; while they run, they use {percent(used)} of its {rate}"}


def _storage(plan: Plan) -> dict[str, str]:
    """Return the bytes written to drives, which wear them."""
    lanes = {Lane.NVME_WRITE, Lane.NVME_STATE_OUT}
    written_bytes = sum(task.num_bytes for task in plan.schedule().tasks if task.lane in lanes)
    if not written_bytes:
        return {}
    return {"storage": f"{si(written_bytes, 'B')} per device and iteration are written to NVMe, which wears its drives"}


def memory_section(memory: Mapping[Tier, TierMemory], measured: Mapping[Tier, int]) -> Section:
    """Show the peak memory of each tier by class against its capacity, beside measured peaks if there are any."""
    names = [TIER_WORDS[tier] for tier in memory]
    held = {kind: [use.by_class.get(kind, 0) for use in memory.values()] for kind in MemoryClass}
    held = {kind: sizes for kind, sizes in held.items() if any(sizes)}
    totals = [use.capacity_bytes for use in memory.values()]
    traces = tuple(
        Trace(
            kind.value,
            [size / total for size, total in zip(sizes, totals, strict=True)],
            names,
            "bars",
            kind,
            texts=[si(size, "B") if size else "" for size in sizes],
        )
        for kind, sizes in held.items()
    )
    chart = Chart(
        key="peaks",
        title="Peak memory by tier, as a share of its capacity",
        note="",
        x=Axis("share of capacity", "%"),
        traces=traces,
        limits=(Line(1.0, "capacity"),),
        bars="stack",
    )
    rows = [(kind.value, *(si(size, "B") if size else "" for size in sizes)) for kind, sizes in held.items()]
    rows.append(("all", *(si(use.peak_bytes, "B") for use in memory.values())))
    if measured:
        rows.append(("measured", *(si(measured[tier], "B") if tier in measured else "-" for tier in memory)))
    rows.append(("capacity", *(si(use.capacity_bytes, "B") for use in memory.values())))
    rows.append(("used", *(percent(use.peak_bytes / use.capacity_bytes) for use in memory.values())))
    table = Table("peak memory", ("", *names), tuple(rows), bold=(len(held),))
    return Section("peaks", "Tiers", "Memory by tier", (), (chart, table))


def engines_section(plan: Plan, measured_s: float | None) -> Section:
    """Show the iteration times of other engines."""
    ours_s = plan.prediction.iteration_s
    own = EngineRow(
        name="ullage",
        setting=describe(plan.decisions, plan.units()),
        fits=plan.prediction.fits,
        iteration_s=ours_s,
        missing_bytes={},
    )
    times = {row.name: (row.iteration_s, row) for row in (own, *plan.engines) if row.iteration_s is not None}
    texts = [
        f"{si(time_s, 's')}, {time_s / ours_s:.2f} x{'' if row.fits else ', ' + engine_fits(row)}"
        for time_s, row in times.values()
    ]
    colours = ["first" if row is own else "quiet" if row.fits else "bad" for _, row in times.values()]
    traces = [Trace("predicted", [s for s, _ in times.values()], [*times], "bars", colours, texts=texts)]
    if measured_s is not None:
        texts = [f"{si(measured_s, 's')} measured"]
        traces.append(
            Trace("measured", [measured_s], ["ullage (this run)"], "bars", "first", measured=True, texts=texts)
        )
    chart = Chart(
        key="engines",
        title="Engines side by side",
        note="One iteration of the same model on the same machine, each engine at its best setting, by the same "
        "simulator.",
        x=Axis("iteration", "s"),
        traces=tuple(traces),
        bars="overlay",
    )
    rows = []
    for row in (own, *plan.engines):
        time_s = row.iteration_s if row.fits else None
        cells = (si(time_s, "s"), f"{time_s / ours_s:.2f}") if time_s else ("-", "-")
        rows.append((row.name, *cells, engine_fits(row), engine_setting(row)))
    title = f"engines ({plan.num_simulations} schedules simulated)"
    table = Table(title, ("engine", "time", "ratio", "fits", "setting"), tuple(rows), _not_compared(plan), bold=(0,))
    words: tuple[str, ...] = ()
    if fitting := {row.name: row.iteration_s for row in plan.engines if row.fits and row.iteration_s}:
        best = min(fitting, key=fitting.__getitem__)
        words = (f"The best other engine that fits is {best}: it takes {fitting[best] / ours_s:.2f} x as long.",)
    elif plan.engines:
        words = ("No other engine fits in memory.",)
    else:
        words = ("No other engine was compared. `ullage simulate PLAN --engine NAME` predicts one.",)
    return Section("engines", "Engines", "Engines side by side", words, (chart, table))


def _not_compared(plan: Plan) -> str:
    optimizer = plan.decisions.optimizer
    if not (left_out := [name for name in POLICIES if name not in policies_of(optimizer)]):
        return ""
    words = OPTIMIZERS[optimizer].words
    return f"not compared: {', '.join(left_out)}; Ullage does not simulate these engines with {words}"


def checkpoints_section(chosen: CheckpointPlan) -> Section:
    """Show the intervals of checkpoints, their cost, and the loss of other checkpoint engines at their best."""
    num_iterations = chosen.request.num_iterations
    run = (
        "a day of training"
        if num_iterations is None
        else f"the run of {num_iterations:,} iterations ({duration(chosen.work_s)})"
    )
    written = ", ".join(
        f"{si(each.written_bytes_per_day, 'B')} a day to {each.level}"
        for each in chosen.levels
        if each.level != "memory"
    )
    unused = "; ".join(f"{level}: {why}" for level, why in chosen.left_out.items())
    words = (
        (
            f"lost {percent(chosen.waste)} of the time (saving alone {percent(chosen.overhead)}): {run} is expected to "
            f"take {duration(chosen.expected_s)}, and without checkpoints {duration(chosen.without_s)}"
        ),
        f"one failure loses at most {duration(chosen.most_lost_s)} of work",
        f"takes {si(chosen.node_buffer_bytes, 'B')} of each host as a buffer; {written}",
        *([f"not used: {unused}"] if unused else []),
        f"assumed: {'; '.join(chosen.assumptions)}",
    )
    rows = tuple(
        (
            level.level,
            f"{level.every} it. = {duration(level.every * chosen.iteration_s)}",
            duration(level.cost_s),
            duration(level.latency_s),
            duration(level.restart_s),
            f"every {duration(level.mtbf_s)}" if level.mtbf_s else "-",
            si(level.stored_bytes, "B"),
            _BOUNDS[level.bound],
        )
        for level in chosen.levels
    )
    columns = ("level", "every", "costs", "safe after", "restart", "for failures", "stored", "because")
    levels = Table(f"checkpoints of {si(chosen.size_bytes, 'B')}", columns, rows)
    first = chosen.levels[0]
    own = (
        "ullage",
        "+".join(each.level for each in chosen.levels),
        f"{first.every} it.",
        duration(first.cost_s),
        percent(chosen.waste),
    )
    engines, wastes = [(*own, "")], {"ullage": (chosen.waste, percent(chosen.waste))}
    for row in chosen.engines:
        if row.every is None or row.cost_s is None or row.waste is None:
            engines.append((row.name, "-", "-", "-", "-", (row.why_not or "").partition(", which")[0]))
            continue
        wastes.setdefault(row.name, (row.waste, percent(row.waste)))
        cells = (row.level or "", f"{row.every} it.", duration(row.cost_s), percent(row.waste))
        engines.append((row.name, *cells, ""))
    chart = bars(
        "checkpoints",
        "Time lost to checkpoints and failures",
        "Each checkpoint engine at its own best interval.",
        Axis("expected share of the time", "%"),
        wastes,
        ["first", *itertools.repeat("quiet", len(wastes) - 1)],
    )
    title = "checkpoint engines, each at its best interval"
    others = Table(title, ("engine", "level", "every", "costs", "lost", ""), tuple(engines), bold=(0,))
    return Section("checkpoints", "Checkpoints", "Checkpoints", words, (levels, chart, others))


def model_line(model: Model) -> str:
    """Return a model's sizes and number of parameters; for a captured model, its function and its loss."""
    if isinstance(model, CapturedModel):
        num_repeated = sum(bool(segment.path) for segment in model.segments)
        trained = f", {model.num_trained:,} of them trained" if model.num_trained < model.num_params else ""
        return (
            f"{model.name}({', '.join(map(str, model.inputs))}): captured, {num_repeated} repeated blocks, "
            f"{si(model.forward_flop, 'FLOP')} forward, the loss is {model.loss}; {model.num_params:,} parameters"
            f"{trained}"
        )
    experts = f", {model.experts_per_token} of {model.num_experts} experts" if model.num_experts else ""
    return (
        f"{model.name}: {model.family}, {model.num_layers} layers, hidden {model.hidden_size}, "
        f"MLP {model.expert_ffn_hidden_size or model.ffn_hidden_size}{experts}, {model.num_attention_heads} heads, "
        f"{model.num_key_value_heads} key/value heads, vocabulary {model.vocab_size}; "
        f"{num_parameters(model):,} parameters"
    )


def engine_fits(row: EngineRow) -> str:
    """Return whether an engine fits; if not, its missing memory and the nearest set-up in which it fits."""
    if row.fits:
        return "yes"
    lacking = " and ".join(f"{si(n, 'B')} of {tier} memory" for tier, n in row.missing_bytes.items())
    nearest = f"; fits with {row.nearest} ({si(row.nearest_iteration_s, 's')})" if row.nearest_iteration_s else ""
    return f"lacks {lacking}{nearest}"


def engine_line(row: EngineRow) -> str:
    """Return in one line whether an engine fits, and its iteration time."""
    time = f" ({si(row.iteration_s, 's')} per iteration; {engine_setting(row)})" if row.fits and row.iteration_s else ""
    return f"engine {row.name} {'fits' if row.fits else engine_fits(row)}{time}"


def engine_setting(row: EngineRow) -> str:
    """Return an engine's settings, and its change of numerics if it has one."""
    return row.setting + (f"; changes numerics: {row.numerics}" if row.numerics else "")


def tokens_per_iteration(plan: Plan) -> int:
    """Return the tokens of one iteration over all ranks; for a captured model, the samples."""
    return plan.decisions.num_sequences * plan.seq_len


def batch_line(plan: Plan) -> str:
    """Return the batch of one iteration, the data types, and the optimizer."""
    decided, items = plan.decisions, counted(plan.model)
    sequences = f"{plan.seq_len} tokens x {decided.micro_batch} sequences"
    accumulated = f" x {decided.num_micro_batches} micro-batches" if decided.num_micro_batches > 1 else ""
    products = f" with products in {decided.precision.products}" if decided.precision.products else ""
    ranks = "device(s)" if decided.num_devices == decided.data_parallel else "data-parallel rank(s)"
    ranks = f"groups of {decided.context_parallel} {ranks}" if decided.context_parallel > 1 else ranks
    master = " (also the master copy)" if decided.precision.rounds else ""
    per_rank = f"{sequences if items == 'tokens' else f'{decided.micro_batch} samples'}{accumulated}"
    whole = f"{per_rank} x {decided.num_readers} {ranks}"
    if decided.shares:
        of_all = f"{plan.seq_len} tokens x {sum(decided.shares)} sequences" if items == "tokens" else ""
        whole = f"{of_all or f'{sum(decided.shares)} samples'}{accumulated}, divided by the speed of devices"
    clipped = f"{'seldom ' if decided.speculate else ''}clipped" if decided.clip else "not clipped"
    return (
        f"{whole} = {tokens_per_iteration(plan):,} {items}, {decided.precision.weights}{master}{products}, "
        f"{OPTIMIZERS[decided.optimizer].words}, gradients {clipped}"
    )


def mfu(plan: Plan) -> float:
    """Return the model's FLOP/s over the profile's best rate of a matrix product."""
    precision = plan.decisions.precision
    best = plan.hardware.device.gemm[precision.products or precision.weights].best_rate_per_s()
    return plan.prediction.model_flop_per_s / best


def gap_words(plan: Plan) -> tuple[str, str]:
    """Return the maximum gap between a plan and the best schedule, and the bound with the parts of that gap."""
    certificate, iteration_s = plan.certificate, plan.prediction.iteration_s
    forms = {True: ", with split master copies,", False: ", with whole master copies,", None: ""}
    split = forms[plan.constraints.split_masters]
    return (
        f"within {percent(certificate.gap(iteration_s))}",
        (
            f"every schedule {_REACH[plan.constraints.storage]}{split} provably takes at least "
            f"{si(certificate.bound_s, 's')} ({gap_parts_words(certificate, iteration_s)})"
        ),
    )


def faster_line(plan: Plan) -> str:
    """Return the engines that are faster with the same numerics, and the reason; empty if there are none."""
    ours_s = plan.prediction.iteration_s
    rows = [row for row in plan.engines if row.fits and row.iteration_s and row.numerics is None]
    names: dict[str, list[str]] = {}
    for row in rows:
        if (row.iteration_s or ours_s) < ours_s:
            names.setdefault(_reason_words(row, plan), []).append(row.name)
    return "; ".join(f"{', '.join(engines)}: {way}" for way, engines in names.items())


def _reason_words(row: EngineRow, plan: Plan) -> str:
    """Return why an engine is faster than a plan, and the option with which plans do the same, if there is one."""
    if LAYERS_IN_TURN in row.setting:
        moves = "by moving layers from device to device instead of gathering them"
        return f"{moves}, which plans cannot do; the bound above does not cover it"
    if OWN_KERNELS in row.setting:
        nearer = "" if plan.decisions.kernels else "; --kernels auto compares compiled ones"
        return f"by {OWN_KERNELS}, which plans do not have{nearer}; the bound above does not cover it"
    if "offloaded" in row.setting and plan.constraints.storage == "never":
        return "by offloading activations, which plans do with --storage activations"
    return "by moving data in a way that plans cannot; the bound above does not cover it"


def gap_parts_words(certificate: Certificate, iteration_s: float) -> str:
    """Return the parts of the gap, in words."""
    return ", ".join(f"{percent(part)} {name}" for name, part in certificate.gap_parts(iteration_s).items())
