"""The reasons for a plan, or for the placement of one of its units, as sections."""

from collections.abc import Mapping

from planner.explain.bench import Bench
from planner.explain.limits import Crossing, Limit
from planner.explain.moves import SAME, LayerGroup, peak_change_bytes
from planner.explain.tricks import Trick
from planner.schedule.tasks import Lane, Tier
from planner.search.scoring import Candidate
from ullage.analysis.explanation import (
    ACTIVATIONS,
    PARAMS,
    TIERS,
    PlanExplained,
    UnitExplained,
    change,
    lacks,
    move_words,
    places_words,
    treatment_words,
)
from ullage.output.formatting import LANE_WORDS, UNIT_SYMBOLS, binds, percent, si, signed_percent
from ullage.report.charts import Axis, Part, Section, Table, bars
from ullage.report.plan import gap_words

_RESOURCES = {
    "device": "computing on the device",
    "cores": "CPU cores",
    "dram": "host DRAM",
    "link_down": "the host link to the device",
    "link_up": "the host link to the host",
    "link": "the host link, both ways together",
    "fabric": "the fabric",
    "nvme_read": "reading NVMe",
    "nvme_write": "writing NVMe",
    "nvme": "NVMe, both ways together",
}
_RESTS = {
    "work": "all work of an iteration",
    "update": "updates between the last backward and the next forward",
    "leave": "gradients that are copied to the host before updates",
}
# The effect of one more GB or GB/s is shown for these quantities, if the elasticity of the bound is at least this.
_SOLD = ("host-link", "host-dram", "device-memory", "host-memory", "intra-node", "inter-node", "nvme")
_TELLING = 0.02  # of an iteration
_COMPILED = "compiles the kernels between products: with this placement, an iteration takes {}; bits change"
_SPECULATING = (
    "begins updates before the norm of gradients is known: with nearly this placement, an iteration that does not clip "
    "takes {}; where steps clip, bits change and iterations take longer"
)
_WORTH_TELLING = 0.01


def plan_explained_part(explained: PlanExplained) -> Part:
    """Return the explanation of a plan."""
    bench = explained.bench
    sections = (tricks_section(bench, explained.worths), _units(explained), _limits(explained))
    return Part(bench.plan.model.name, "explanation", "", (), _summary(explained), sections)


def unit_explained_part(explained: UnitExplained) -> Part:
    """Return the explanation of a unit's placement."""
    bench = explained.bench
    unit = bench.units[explained.unit]
    own = bench.decisions.units[explained.unit]
    update, params, activations = treatment_words(own)
    rows = {
        "unit": f"{explained.unit} of {bench.plan.model.name}: {unit.num_params:,} parameters in {len(own.update)} "
        "subgroup(s) on a device",
        "where": f"updated {update}, parameters {params}, activations {activations}",
        "why": explained.words,
    }
    if when := explained.deadline:
        held = ": its next forward waits for it" if when.critical and when.slack_s <= 0 else ""
        rows["update"] = (
            f"from {si(when.update_start_s, 's')} to {si(when.update_end_s, 's')} after the iteration began, on the "
            f"device at {si(when.ready_s, 's')}"
        )
        rows["deadline"] = (
            f"its next forward at {si(when.deadline_s, 's')}: {si(when.slack_s, 's')} of slack"
            f"{', on the critical path' if when.critical else ''}{held}"
        )
    return Part(explained.unit, "explanation", "", (), rows, (_alternatives(explained),))


def _summary(explained: PlanExplained) -> dict[str, str]:
    bench = explained.bench
    plan, own = bench.plan, bench.own
    memory = ", ".join(
        f"{TIERS[tier]} {percent(use.peak_bytes / use.capacity_bytes)}{' (full)' if tier in explained.full else ''}"
        for tier, use in bench.memory.items()
    )
    rows = {
        "plan": f"{plan.model.name} on {plan.decisions.num_devices} device(s) of {plan.hardware.name}: "
        f"{si(own.iteration_s, 's')} per iteration",
        "best": ": ".join(gap_words(plan)),
        "binds": binds(plan.prediction.critical_s, plan.prediction.iteration_s),
        "memory": memory,
        "proof": _rests_on(explained.rests_on),
    }
    sold = [limit for limit in explained.limits if limit.scalable.key in _SOLD]
    if worth := [_worth(limit) for limit in sold if limit.bound_elasticity < -_WORTH_TELLING]:
        rows["worth"] = f"to the bound of any plan: {', '.join(worth)}"
    if better := explained.better:
        unit, move = better
        seconds, share = change(bench, move)
        rows["better"] = (
            f"{unit} changed to '{move_words(bench, unit, move)}' would fit and save {si(-seconds, 's')} "
            f"({percent(-share)}); the search missed this"
        )
    offers = (explained.compiled, "--kernels auto", _COMPILED), (explained.speculating, "--speculate", _SPECULATING)
    faster = []
    for trial, option, words in offers:
        if trial and trial.fits and (saved := -change(bench, trial)[1]) > _TELLING:
            takes = f"{si(trial.iteration_s, 's')} ({percent(saved)} less)"
            faster.append(f"`ullage plan {option}` {words.format(takes)}")
    if faster:
        rows["faster"] = ". ".join(faster)
    return rows


def _rests_on(weights: dict[tuple[str, str], float]) -> str:
    """Return the conditions that the bound rests on, in words, by kind."""
    conditions = []
    for kind, words in _RESTS.items():
        shares = [f"{_by(by)} {percent(weight)}" for (other, by), weight in weights.items() if other == kind]
        conditions += [f"{words}: {', '.join(shares)}"] if shares else []
    return f"the bound rests on {'; '.join(conditions)}"


def _by(key: str) -> str:
    return _RESOURCES.get(key) or LANE_WORDS[Lane(key)] if key in {*_RESOURCES, *Lane} else key


def _worth(limit: Limit) -> str:
    unit = "GB" if limit.unit == "bytes" else "GB/s"
    return f"one more {unit} of {limit.scalable.words} {si(-1e9 * limit.bound_s_per_unit, 's')}"


def tricks_section(bench: Bench, worths: Mapping[Trick, Candidate | None]) -> Section:
    """Show the effect of each technique: the plan simulated without it."""
    used = {trick: trial for trick, trial in worths.items() if trial is not None}
    slowdowns = {trick: _slowdown(bench, trial) for trick, trial in used.items()}
    order = sorted(used, key=lambda trick: -slowdowns[trick][0])
    chart = bars(
        "tricks",
        "What each technique is worth",
        "Extra time of an iteration without the technique; the rest of the plan does not change. Below zero: the "
        "iteration is faster, but does not fit in memory.",
        Axis("longer iteration", "s"),
        {
            trick.words: (seconds, f"{si(seconds, 's')} ({signed_percent(share)}){_lacking(used[trick])}")
            for trick, (seconds, share) in ((trick, slowdowns[trick]) for trick in order)
        },
        ["first" if used[trick].fits else "bad" for trick in order],
    )
    rows = tuple(
        (
            trick.words,
            trick.without,
            si(used[trick].iteration_s, "s"),
            si(slowdowns[trick][0], "s"),
            signed_percent(slowdowns[trick][1]),
            lacks(used[trick]),
        )
        for trick in order
    )
    unused = [trick.words for trick in worths if trick not in used]
    note = f"this plan does not use: {'; '.join(unused)}" if unused else ""
    columns = ("technique", "instead", "time", "slower by", "", "fits")
    table = Table("each technique switched off alone", columns, rows, note)
    return Section("tricks", "Techniques", "What each technique is worth", (), (chart, table) if used else (table,))


def _lacking(trial: Candidate) -> str:
    return "" if trial.fits else f", {lacks(trial)}"


def _units(explained: PlanExplained) -> Section:
    rows = tuple(
        (
            group.name,
            places_words(group.updates),
            PARAMS[group.params],
            ACTIVATIONS[group.activations],
            _cheapest(explained.bench, group),
        )
        for group in explained.groups
    )
    tried, total = sum(len(group.cheapest) for group in explained.groups), len(explained.bench.units)
    rule = "the first, the middle and the last of each group" if tried < total else "all of them"
    note = f"simulated: moves of {tried} of {total} units ({rule}), one unit at a time"
    columns = ("units", "update", "parameters", "activations", "cheapest move")
    return Section("units", "Units", "Units", (), (Table("which units are where", columns, rows, note),))


def _cheapest(bench: Bench, group: LayerGroup) -> str:
    moves = [(unit, move) for unit, move in group.cheapest.items() if move is not None]
    if not moves:
        return "-"
    unit, move = min(moves, key=lambda found: found[1].order)
    slowest = max(_slowdown(bench, other)[0] for _, other in moves)
    least = _slowdown(bench, move)[0]
    range_ = (
        si(least, "s") if slowest - least < 1e-6 * bench.own.iteration_s else f"{si(least, 's')} to {si(slowest, 's')}"
    )
    return f"{move_words(bench, unit, move)}: {range_}{_lacking(move)}"


def _slowdown(bench: Bench, trial: Candidate) -> tuple[float, float]:
    """Return the seconds and fraction by which a trial is slower, or 0 if the difference is rounding."""
    seconds, share = change(bench, trial)
    return (seconds, share) if abs(share) > SAME else (0.0, 0.0)


def _limits(explained: PlanExplained) -> Section:
    rows = tuple(
        (
            limit.scalable.words,
            si(limit.value, UNIT_SYMBOLS[limit.unit]),
            _one_per_cent(limit.elasticity),
            _one_per_cent(limit.bound_elasticity),
            _crossing(limit.below, limit)
            if limit.fits_from is None
            else f"fits from {si(limit.fits_from * limit.value, 'B')}",
            _crossing(limit.above, limit),
        )
        for limit in explained.limits
    )
    title = f"how much each quantity matters, and the value at which another lane than {explained.lane} binds"
    note = (
        "this plan, any plan: change of this plan's iteration time and of the bound with 1 % more of the quantity. "
        "The decisions of the plan do not change; `ullage whatif` plans again"
    )
    columns = ("quantity", "now", "this plan", "any plan", "binds below", "binds above")
    return Section("limits", "Quantities", "Quantities", (), (Table(title, columns, rows, note),))


def _one_per_cent(elasticity: float) -> str:
    return f"{elasticity:+.2f} %" if abs(elasticity) >= 0.005 else "0"


def _crossing(crossing: Crossing | None, limit: Limit) -> str:
    if crossing is None:
        return "-"
    return f"{si(crossing.value, UNIT_SYMBOLS[limit.unit])} (x{crossing.factor:.3f}) {crossing.takes_over}"


def _alternatives(explained: UnitExplained) -> Section:
    own = explained.bench.own
    order = sorted(explained.alternatives, key=lambda tried: (tried is not own, not tried.fits, tried.iteration_s))
    rows = tuple(_alternative(explained.bench, explained.unit, tried) for tried in order)
    columns = ("update", "parameters", "activations", "time", "change", "", "device", "host", "moved", "fits")
    note = "the first row is chosen by the plan. In every other row, only this unit changes"
    table = Table("all ways to place this unit", columns, rows, note, bold=(0,))
    return Section("alternatives", "Alternatives", "Alternatives", (), (table,))


def _alternative(bench: Bench, unit: str, trial: Candidate) -> tuple[str, ...]:
    seconds, share = _slowdown(bench, trial)
    changes = [peak_change_bytes(bench, trial, tier) for tier in (Tier.GPU, Tier.HOST)]
    changes.append(trial.traffic_bytes - bench.own.traffic_bytes)
    return (
        *treatment_words(trial.decisions.units[unit]),
        si(trial.iteration_s, "s"),
        *(("-", "-") if trial is bench.own else (si(seconds, "s"), signed_percent(share))),
        *(si(number, "B") if number else "" for number in changes),
        lacks(trial),
    )
