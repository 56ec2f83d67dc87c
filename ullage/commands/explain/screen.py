"""What `ullage explain` prints: one screen for a plan, or for one of its units."""

from rich.table import Table

from planner.explain.limits import Crossing, Limit
from planner.explain.moves import SAME, Alternative, Group
from planner.explain.trial import Bench, Trial
from planner.schedule.tasks import Lane, Tier
from ullage.analysis.explanation import (
    ACTIVATIONS,
    PARAMS,
    TIERS,
    PlanExplained,
    UnitExplained,
    change,
    lacks_short,
    move_words,
    places_words,
    treatment_words,
)
from ullage.output.console import console, facts, table
from ullage.output.formatting import LANE_WORDS, UNIT_SYMBOLS, binds, percent, si, signed_percent
from ullage.output.plans import gap_line

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
_WORTH_TELLING = 0.01


def plan_explained_screen(explained: PlanExplained) -> None:
    """Print the explanation of a plan."""
    out = console()
    out.print(facts(_summary(explained)))
    for part in (_tricks(explained), _units(explained), _limits(explained)):
        out.print()
        out.print(part)


def unit_explained_screen(explained: UnitExplained) -> None:
    """Print the explanation of a unit's placement."""
    out, bench = console(), explained.bench
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
    out.print(facts(rows))
    out.print()
    out.print(_alternatives(explained))


def _summary(explained: PlanExplained) -> dict[str, str]:
    bench = explained.bench
    plan, own = bench.plan, bench.own
    memory = ", ".join(
        f"{TIERS[tier]} {percent(use.peak_bytes / use.capacity_bytes)}{' (full)' if tier in explained.full else ''}"
        for tier, use in own.memory.items()
    )
    rows = {
        "plan": f"{plan.model.name} on {plan.decisions.num_devices} device(s) of {plan.hardware.name}: "
        f"{si(own.iteration_s, 's')} per iteration",
        "best": gap_line(plan),
        "binds": binds(plan.prediction.critical_s, plan.prediction.iteration_s),
        "memory": memory,
        "proof": _rests_on(explained.rests_on),
    }
    if worth := [_worth(limit) for limit in explained.limits if _matters(limit)]:
        rows["worth"] = f"to the bound of any plan: {', '.join(worth)}"
    if better := explained.better:
        unit, move = better
        seconds, share = change(bench, move.trial)
        rows["better"] = (
            f"{unit} changed to '{move_words(bench, unit, move.decision)}' would fit and save {si(-seconds, 's')} "
            f"({percent(-share)}); the search missed this"
        )
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


def _matters(limit: Limit) -> bool:
    return limit.scalable.key in _SOLD and limit.bound_elasticity < -_WORTH_TELLING


def _worth(limit: Limit) -> str:
    unit = "GB" if limit.unit == "bytes" else "GB/s"
    return f"one more {unit} of {limit.scalable.words} {si(-1e9 * limit.bound_s_per_unit, 's')}"


def _tricks(explained: PlanExplained) -> Table:
    columns = ("technique", "instead", "time", "slower by", "", "fits")
    result = table("each technique switched off alone", *columns, num_text=2, text={5})
    for worth in explained.worths:
        if worth.trial is None:
            continue
        seconds, share = _slowdown(explained.bench, worth.trial)
        times = (si(worth.trial.iteration_s, "s"), si(seconds, "s"), signed_percent(share))
        result.add_row(worth.trick.words, worth.trick.without, *times, lacks_short(worth.trial))
    if unused := [worth.trick.words for worth in explained.worths if worth.trial is None]:
        result.caption = f"this plan does not use: {'; '.join(unused)}"
    return result


def _units(explained: PlanExplained) -> Table:
    result = table("which units are where", "units", "update", "parameters", "activations", "cheapest move", num_text=5)
    for group in explained.groups:
        result.add_row(
            group.name,
            places_words(group.updates),
            PARAMS[group.params],
            ACTIVATIONS[group.activations],
            _cheapest(explained.bench, group),
        )
    tried, total = sum(len(group.cheapest) for group in explained.groups), len(explained.bench.units)
    rule = "the first, the middle and the last of each group" if tried < total else "all of them"
    result.caption = f"simulated: moves of {tried} of {total} units ({rule}), one unit at a time"
    return result


def _cheapest(bench: Bench, group: Group) -> str:
    moves = [(unit, move) for unit, move in group.cheapest.items() if move is not None]
    if not moves:
        return "-"
    unit, move = min(moves, key=lambda found: found[1].trial.order)
    slowest = max(_slowdown(bench, other.trial)[0] for _, other in moves)
    least = _slowdown(bench, move.trial)[0]
    range_ = (
        si(least, "s") if slowest - least < 1e-6 * bench.own.iteration_s else f"{si(least, 's')} to {si(slowest, 's')}"
    )
    short = "" if move.trial.fits else f", {lacks_short(move.trial)}"
    return f"{move_words(bench, unit, move.decision)}: {range_}{short}"


def _slowdown(bench: Bench, trial: Trial) -> tuple[float, float]:
    """Return the seconds and fraction by which a trial is slower, or 0 if the difference is rounding."""
    seconds, share = change(bench, trial)
    return (seconds, share) if abs(share) > SAME else (0.0, 0.0)


def _limits(explained: PlanExplained) -> Table:
    title = f"how much each quantity matters, and the value at which another lane than {explained.lane} binds"
    result = table(title, "quantity", "now", "this plan", "any plan", "binds below", "binds above", text={4, 5})
    for limit in explained.limits:
        least = f"fits from {si(limit.fits_from * limit.value, 'B')}" if limit.fits_from is not None else ""
        result.add_row(
            limit.scalable.words,
            si(limit.value, UNIT_SYMBOLS[limit.unit]),
            _one_per_cent(limit.elasticity),
            _one_per_cent(limit.bound_elasticity),
            least or _crossing(limit.below, limit),
            _crossing(limit.above, limit),
        )
    result.caption = (
        "this plan, any plan: change of this plan's iteration time and of the bound with 1 % more of the quantity. "
        "The decisions of the plan do not change; `ullage whatif` plans again"
    )
    return result


def _one_per_cent(elasticity: float) -> str:
    return f"{elasticity:+.2f} %" if abs(elasticity) >= 0.005 else "0"


def _crossing(crossing: Crossing | None, limit: Limit) -> str:
    if crossing is None:
        return "-"
    return f"{si(crossing.value, UNIT_SYMBOLS[limit.unit])} (x{crossing.factor:.3f}) {crossing.takes_over}"


def _alternatives(explained: UnitExplained) -> Table:
    bench = explained.bench
    columns = ("update", "parameters", "activations", "time", "change", "", "device", "host", "moved", "fits")
    result = table("all ways to place this unit", *columns, num_text=3, text={9})
    order = sorted(explained.alternatives, key=lambda a: (not a.chosen, not a.trial.fits, a.trial.iteration_s))
    for alternative in order:
        result.add_row(*_alternative(bench, alternative), style="bold" if alternative.chosen else "")
    result.caption = "the first row is the plan. In every other row, only this unit changes"
    return result


def _alternative(bench: Bench, alternative: Alternative) -> tuple[str, ...]:
    decision, trial = alternative.decision, alternative.trial
    seconds, share = _slowdown(bench, trial)
    changes = [trial.peak_bytes(tier) - bench.own.peak_bytes(tier) for tier in (Tier.GPU, Tier.HOST)]
    changes.append(trial.traffic_bytes - bench.own.traffic_bytes)
    return (
        *treatment_words(decision),
        si(trial.iteration_s, "s"),
        *(("chosen", "") if alternative.chosen else (si(seconds, "s"), signed_percent(share))),
        *(si(number, "B") if number else "" for number in changes),
        lacks_short(trial),
    )
