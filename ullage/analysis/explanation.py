"""The data of `ullage explain`: reasons for the decisions of a plan."""

import dataclasses
from typing import Any, Self

from planner.decisions import Place, UnitDecision
from planner.explain.bench import Bench, bounding_lane
from planner.explain.limits import Limit, bound_rests_on, full_tiers, limits
from planner.explain.moves import (
    SAME,
    Deadline,
    LayerGroup,
    alternatives,
    deadline,
    groups,
    peak_change_bytes,
    why,
)
from planner.explain.tricks import Trick, with_compiled_kernels, with_speculation, worths
from planner.schedule.tasks import Lane, Tier
from planner.search.scoring import Candidate
from ullage.output.formatting import percent, si
from ullage.output.progress import Report
from ullage.rivals.tricks import TRICKS

PLACES = {
    Place.GPU: "on the device",
    Place.STREAM: "streamed",
    Place.CPU: "on the CPU",
    Place.NVME: "on the CPU from NVMe",
}
PARAMS = {"gpu": "resident", "host": "fetched", "nvme": "from NVMe"}
ACTIVATIONS = {
    "keep": "kept",
    "recompute": "recomputed",
    "offload": "offloaded",
    "offload-nvme": "on NVMe",
}
TIERS = {Tier.GPU: "device", Tier.HOST: "host", Tier.NVME: "NVMe"}


@dataclasses.dataclass(frozen=True)
class PlanExplained:
    """Reasons for the decisions of a plan.

    Attributes:
        bench: the plan, simulated.
        lane: the lane with the largest share of the critical path.
        full: tiers without room for one more subgroup of state.
        rests_on: conditions that the bound rests on, with their weights.
        worths: the effect of switching each technique off.
        compiled: the same placement with compiled kernels, which change bits; ``None`` if the plan cannot have them.
        speculating: nearly the same placement with updates that begin before the norm is known; likewise.
        groups: units with equal decisions, and the cheapest moves of some of them.
        limits: the effect of each quantity of the machine, and the values at which another lane binds.
    """

    bench: Bench
    lane: Lane
    full: tuple[Tier, ...]
    rests_on: dict[tuple[str, str], float]
    worths: dict[Trick, Candidate | None]
    compiled: Candidate | None
    speculating: Candidate | None
    groups: tuple[LayerGroup, ...]
    limits: tuple[Limit, ...]

    @classmethod
    def of(cls, bench: Bench, *, every: bool, progress: Report) -> Self:
        """Simulate the plan with one change at a time. ``every``: try moves of all units, not of some in each group."""
        return cls(
            bench=bench,
            lane=bounding_lane(bench.simulation),
            full=tuple(tier for tier, _ in full_tiers(bench)),
            rests_on=bound_rests_on(bench),
            worths=worths(bench, lambda done: progress("switching tricks off", done, 0), TRICKS),
            compiled=with_compiled_kernels(bench),
            speculating=with_speculation(bench),
            groups=groups(bench, every=every, progress=lambda done, total: progress("moving units", done, total)),
            limits=limits(bench, lambda done, total: progress("changing the machine", done, total)),
        )

    @property
    def better(self) -> tuple[str, Candidate] | None:
        """The best move that fits and makes the plan faster, with its unit, if the search missed one."""
        enough_s = self.bench.own.iteration_s * (1 - SAME)
        moves = [(unit, move) for group in self.groups for unit, move in group.cheapest.items() if move]
        faster = [(unit, move) for unit, move in moves if move.fits and move.iteration_s < enough_s]
        return min(faster, key=lambda found: found[1].iteration_s, default=None)

    def to_json(self) -> dict[str, Any]:
        """Return everything for :func:`ullage.output.console.write_json`."""
        plan, own = self.bench.plan, self.bench.own
        return {
            **_head(self.bench),
            "bound_s": plan.certificate.bound_s,
            "gap": plan.certificate.gap(own.iteration_s),
            "gap_parts": plan.certificate.gap_parts(own.iteration_s),
            "binds": {
                "lane": self.lane,
                "critical_s": plan.prediction.critical_s,
                "memory": {tier: {**dict(use), "full": tier in self.full} for tier, use in self.bench.memory.items()},
                "bound_rests_on": [
                    {"kind": kind, "by": by, "weight": weight} for (kind, by), weight in self.rests_on.items()
                ],
            },
            "tricks": [
                {
                    "trick": trick.key,
                    "words": trick.words,
                    "without": trick.without,
                    "used": trial is not None,
                    **(_trial(self.bench, trial) if trial else {}),
                }
                for trick, trial in self.worths.items()
            ],
            "compiled": self.compiled and _trial(self.bench, self.compiled),
            "speculating": self.speculating and _trial(self.bench, self.speculating),
            "units": [
                {
                    **{name: getattr(group, name) for name in ("name", "units", "params", "activations", "updates")},
                    "cheapest_moves": {
                        unit: move and {**dict(move.decisions.units[unit]), **_trial(self.bench, move)}
                        for unit, move in group.cheapest.items()
                    },
                }
                for group in self.groups
            ],
            "limits": [_limit(limit) for limit in self.limits],
        }


@dataclasses.dataclass(frozen=True)
class UnitExplained:
    """Reasons for the placement of a unit.

    Attributes:
        bench: the plan, simulated.
        unit: name of the unit.
        deadline: when the unit is updated, and when its next forward needs it; ``None`` if it has nothing to update.
        alternatives: all decisions that are possible for the unit; the first is the plan's.
        reason, about: the reason for the decision, and the alternative that shows it; see
            :func:`planner.explain.moves.why`.
    """

    bench: Bench
    unit: str
    deadline: Deadline | None
    alternatives: tuple[Candidate, ...]
    reason: str
    about: Candidate | None

    @classmethod
    def of(cls, bench: Bench, unit: str, progress: Report) -> Self:
        """Simulate the plan with every other decision for the unit."""
        found = alternatives(bench, unit, lambda done, total: progress(f"moving {unit}", done, total))
        return cls(bench, unit, deadline(bench, unit), found, *why(bench, found))

    @property
    def words(self) -> str:
        """The reason for the unit's placement, in one sentence."""
        if self.about is None:
            return "nothing else fits in memory"
        other = move_words(self.bench, self.unit, self.about)
        seconds, share = change(self.bench, self.about)
        extra_bytes = self.about.traffic_bytes - self.bench.own.traffic_bytes
        fewer = f"{si(-extra_bytes, 'B')} less" if extra_bytes else "as much"
        saves = f"would save {si(-seconds, 's')} ({percent(-share)})"
        return {
            "better": f"not the best: {other} {saves} and fits; the search missed this",
            "lacks": f"{other} {saves}, but {lacks(self.about)}; nothing that fits is faster",
            "bytes": f"{other} takes as long, but moves {si(extra_bytes, 'B')} more",
            "equal": f"{other} takes as long and moves {fewer}; both are equally good",
            "fastest": f"the fastest that fits; the next best is {other}, {si(seconds, 's')} ({percent(share)}) slower",
        }[self.reason]

    def to_json(self) -> dict[str, Any]:
        """Return everything for :func:`ullage.output.console.write_json`."""
        when = self.deadline
        return {
            **_head(self.bench),
            "unit": self.unit,
            "num_params": self.bench.units[self.unit].num_params,
            "reason": self.reason,
            "why": self.words,
            "deadline": when and {**dataclasses.asdict(when), "slack_s": when.slack_s},
            "alternatives": [
                {
                    "chosen": tried is self.bench.own,
                    **dict(tried.decisions.units[self.unit]),
                    **_trial(self.bench, tried),
                }
                for tried in self.alternatives
            ],
        }


def change(bench: Bench, trial: Candidate) -> tuple[float, float]:
    """Return the seconds and the fraction by which a trial is slower than the plan; negative: faster."""
    own_s = bench.own.iteration_s
    return trial.iteration_s - own_s, trial.iteration_s / own_s - 1


def lacks(trial: Candidate) -> str:
    """Return the missing memory of a trial, of the device if not said otherwise; ``yes`` if it fits."""
    missing = [
        f"{si(n, 'B')}{'' if tier is Tier.GPU else f' {TIERS[tier]}'}" for tier, n in trial.missing_bytes.items()
    ]
    return f"lacks {', '.join(missing)}" if missing else "yes"


def move_words(bench: Bench, unit: str, trial: Candidate) -> str:
    """Return the differences between a trial's decision for a unit and the plan's, in words."""
    own, decision = bench.decisions.units[unit], trial.decisions.units[unit]
    changes = []
    if decision.update != own.update:
        changes.append(f"updated {_update_words(decision)}")
    elif decision.streamed_gradients != own.streamed_gradients:
        changes.append("gradients stay" if decision.streamed_gradients == "gpu" else "gradients leave and come back")
    if decision.params != own.params:
        changes.append(f"parameters {PARAMS[decision.params]}")
    if decision.activations != own.activations:
        changes.append(f"activations {ACTIVATIONS[decision.activations]}")
    return ", ".join(changes)


def treatment_words(decision: UnitDecision) -> tuple[str, str, str]:
    """Return where a unit is updated, where its parameters are, and what happens to activations, in words."""
    return _update_words(decision), PARAMS[decision.params], ACTIVATIONS[decision.activations]


def _update_words(decision: UnitDecision) -> str:
    stay = Place.STREAM in decision.update and decision.streamed_gradients == "gpu"
    return places_words(_shares(decision)) + (", gradients stay" if stay else "")


def places_words(shares: dict[Place, float]) -> str:
    """Return where updates are made, in words."""
    if len(shares) == 1:
        return PLACES[next(iter(shares))]
    return " and ".join(f"{100 * share:.0f} % {PLACES[place]}" for place, share in shares.items()) or "nowhere"


def _shares(decision: UnitDecision) -> dict[Place, float]:
    """Return the share of a unit's subgroups (which are of equal size) at each place."""
    places = [place for place in Place if place in decision.update]
    return {place: decision.update.count(place) / len(decision.update) for place in places}


def _head(bench: Bench) -> dict[str, Any]:
    plan = bench.plan
    return {
        "model": plan.model.name,
        "hardware": plan.hardware.name,
        "num_devices": plan.decisions.num_devices,
        "iteration_s": bench.own.iteration_s,
    }


def _trial(bench: Bench, trial: Candidate) -> dict[str, Any]:
    seconds, share = change(bench, trial)
    return {
        "iteration_s": trial.iteration_s,
        "change_s": seconds,
        "change": share,
        "fits": trial.fits,
        "missing_bytes": trial.missing_bytes,
        "device_peak_change_bytes": peak_change_bytes(bench, trial, Tier.GPU),
        "host_peak_change_bytes": peak_change_bytes(bench, trial, Tier.HOST),
        "traffic_change_bytes": trial.traffic_bytes - bench.own.traffic_bytes,
    }


def _limit(limit: Limit) -> dict[str, Any]:
    data = dataclasses.asdict(limit)
    scalable = data.pop("scalable")
    return {"quantity": scalable["key"], "words": scalable["words"], "paths": scalable["paths"], **data}
