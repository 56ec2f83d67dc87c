"""Why each unit has its place: the effect of moving one unit and nothing else."""

import dataclasses
import difflib
import itertools
import re
from collections.abc import Callable, Iterator, Sequence

import networkx as nx

from planner.decisions import Decisions, Place, UnitDecision
from planner.explain.bench import Bench
from planner.schedule.tasks import Lane, Op, Tier
from planner.search.scoring import Candidate
from planner.simulate.critical_path import critical_steps

# Times that differ by a smaller fraction count as equal.
SAME = 1e-6
# A unit's name: the parts before and behind the number of its layer.
_LAYER = re.compile(r"^(.*?)\.(\d+)\.(.+)$")


@dataclasses.dataclass(frozen=True)
class Deadline:
    """When a unit is updated, in seconds since the beginning of the iteration that computes its gradient.

    Attributes:
        update_start_s, update_end_s: the first of its updates starts, the last one ends.
        ready_s: its new weights are on the device.
        deadline_s: its forward of the next iteration starts.
        critical: whether its update or the copy of its weights to the device is on the critical path.
    """

    update_start_s: float
    update_end_s: float
    ready_s: float
    deadline_s: float
    critical: bool

    @property
    def slack_s(self) -> float:
        """Time between its being ready and its deadline."""
        return self.deadline_s - self.ready_s


@dataclasses.dataclass(frozen=True)
class LayerGroup:
    """Consecutive layers with the same decision for one of their units.

    Attributes:
        name: such as ``layers.3-17.mlp``.
        units: their names.
        params, activations: as in :class:`planner.decisions.UnitDecision`.
        updates: fraction of their parameters that is updated at each place.
        cheapest: for each unit that was tried, its cheapest move to another place; ``None`` if it has none.
    """

    name: str
    units: tuple[str, ...]
    params: str
    activations: str
    updates: dict[Place, float]
    cheapest: dict[str, Candidate | None]


def find_unit(bench: Bench, name: str) -> str:
    """Return the name of a unit.

    Raises:
        ValueError: there is no such unit; the message names similar ones.
    """
    if name in bench.units:
        return name
    near = difflib.get_close_matches(name, bench.units, n=4) or [unit for unit in bench.units if name in unit][:4]
    near = near or list(bench.units)[:4]
    raise ValueError(f"the plan has no unit {name!r}; did you mean {', '.join(near)}?")


def alternatives(
    bench: Bench, unit: str, progress: Callable[[int, int], object] = lambda *_: None
) -> tuple[Candidate, ...]:
    """Simulate every decision for a unit as a whole, the plan's own first (``bench.own``).

    These are all valid combinations of one place for all its updates, gradients of streamed subgroups on the device or
    the host, parameters on either, and activations of its segment kept or recomputed. ``progress`` is called with the
    number done and the total.
    """
    own = bench.decisions.units[unit]
    found = [bench.own]
    others = [decision for decision in _ways(bench, unit) if decision != own]
    for done, decision in enumerate(others):
        progress(done, len(others))
        found.append(bench.trial(moved(bench, unit, decision)))
    return tuple(found)


def moved(bench: Bench, unit: str, decision: UnitDecision) -> Decisions:
    """Return the plan's decisions with another one for a unit and for the activations of its segment."""
    units = {unit: decision}
    segment = bench.units[unit].segment
    for name, other in bench.units.items():
        if name != unit and other.segment == segment and bench.recomputable(name):
            units[name] = bench.decisions.units[name].model_copy(update={"activations": decision.activations})
    return bench.with_units(units)


def _ways(bench: Bench, unit: str) -> Iterator[UnitDecision]:
    own = bench.decisions.units[unit]
    places = _places(bench) if own.update else ()
    updates = dict.fromkeys([own.update, *((place,) * len(own.update) for place in places)])  # its own may differ
    activations = ("keep", "recompute") if bench.recomputable(unit) else (own.activations,)
    for update, params, way, gradients in itertools.product(updates, ("gpu", "host"), activations, ("gpu", "host")):
        if params == "host" and (Place.GPU in update or not bench.fetchable(unit)):
            continue
        if Place.STREAM not in update and gradients != own.streamed_gradients:
            continue
        changed = {"update": update, "params": params, "activations": way, "streamed_gradients": gradients}
        yield own.model_copy(update=changed)


def _places(bench: Bench) -> tuple[Place, ...]:
    nvme = (Place.NVME,) if bench.decisions.uses_storage and bench.plan.hardware.nvme is not None else ()
    alone = bench.decisions.pipeline_parallel == 1
    return (Place.GPU, Place.STREAM, Place.CPU, *nvme) if alone else (Place.GPU,)


def single_moves(bench: Bench, unit: str) -> Iterator[UnitDecision]:
    """Yield decisions that differ from the plan's in one thing: place of updates, of parameters, or activations.

    If a unit is updated on the device, its parameters move there too. Gradients of streamed subgroups take the better
    of both places.
    """
    own = bench.decisions.units[unit]
    for decision in _ways(bench, unit):
        same = (decision.update == own.update, decision.params == own.params, decision.activations == own.activations)
        follows = set(decision.update) == {Place.GPU} and same == (False, False, True)
        gradients_only = all(same) and decision != own
        if (
            gradients_only
            or follows
            or (sum(same) == 2 and (not same[0] or decision.streamed_gradients == own.streamed_gradients))
        ):
            yield decision


def cheapest_move(bench: Bench, unit: str) -> Candidate | None:
    """Return the cheapest of a unit's single moves, preferring those that fit; ``None`` if there is none."""
    trials = (bench.trial(moved(bench, unit, decision)) for decision in single_moves(bench, unit))
    return min(trials, key=lambda trial: trial.order, default=None)


def groups(
    bench: Bench, *, every: bool = False, progress: Callable[[int, int], object] = lambda *_: None
) -> tuple[LayerGroup, ...]:
    """Return groups of units with equal decisions, and the cost of moving one of their units.

    Args:
        bench: the plan.
        every: try to move every unit, instead of the first, the middle and the last one of each group.
        progress: called with the number of units tried, and of all to try.
    """
    runs = _runs(bench)
    tried = {
        name: units if every else dict.fromkeys((units[0], units[len(units) // 2], units[-1]))
        for name, units in runs.items()
    }
    total = sum(map(len, tried.values()))
    done, found = 0, []
    for name, units in runs.items():
        cheapest: dict[str, Candidate | None] = {}
        for unit in tried[name]:
            progress(done, total)
            cheapest[unit] = cheapest_move(bench, unit)
            done += 1
        first = bench.decisions.units[units[0]]
        found.append(LayerGroup(name, units, first.params, first.activations, _shares(bench, units), cheapest))
    return tuple(found)


def _runs(bench: Bench) -> dict[str, tuple[str, ...]]:
    """Return groups of units by name: of the same part of consecutive layers, treated alike, in forward order."""
    runs: dict[str, list[tuple[str, int, str]]] = {}  # by the first unit's name
    latest: dict[str, tuple[object, int, str]] = {}  # by part of a layer: its treatment, its layer, its run
    for name in bench.units:
        match = _LAYER.match(name)
        part = f"{match[1]}.#.{match[3]}" if match else name
        number = int(match[2]) if match else 0
        treated = _treated(bench.decisions.units[name])
        before = latest.get(part)
        run = before[2] if before and before[:2] == (treated, number - 1) else name
        runs.setdefault(run, []).append((name, number, part))
        latest[part] = (treated, number, run)
    return {_run_name(members): tuple(name for name, _, _ in members) for members in runs.values()}


def _treated(unit: UnitDecision) -> object:
    """Return a key of a unit's treatment, without how the CPU and streaming share updates."""
    places = {Place.STREAM if place is Place.CPU else place for place in unit.update}
    return unit.params, unit.activations, frozenset(places)


def _run_name(members: Sequence[tuple[str, int, str]]) -> str:
    (name, first, part), (_, last, _) = members[0], members[-1]
    return name if first == last else part.replace("#", f"{first}-{last}", 1)


def _shares(bench: Bench, units: Sequence[str]) -> dict[Place, float]:
    placed = bench.decisions.params_by_place(bench.units[name] for name in units)
    total = sum(placed.values())
    return {place: count / total for place, count in placed.items() if count}


def deadline(bench: Bench, unit: str) -> Deadline | None:
    """Return when a unit is updated, and when that is needed, as simulated; ``None`` if it has nothing to update."""
    timeline, steady = bench.simulation.timeline, bench.simulation.steady
    tasks = bench.schedule.tasks
    updates = [task.index for task in tasks if task.unit == unit and task.op is Op.UPDATE]
    user = next((task for task in tasks if task.unit == unit and task.op is Op.FORWARD and not task.micro_batch), None)
    if not updates or user is None:
        return None
    # In the next iteration, go back from the forward through the copies and gathers of this unit that it waits for.
    copies = [t.index for t in tasks if t.unit == unit and t.lane not in {Lane.COMPUTE, Lane.LAUNCH}]
    brings = nx.ancestors(bench.schedule.graph().subgraph([*copies, user.index]), user.index)
    begin_s = timeline.begin_s(steady)
    ends_s = [float(timeline.end_s[steady, i]) for i in updates] + [
        float(timeline.end_s[steady + 1, i]) for i in brings
    ]
    # On the critical path are tasks of this iteration and of the one before, which this forward may wait for.
    steps = {(step.iteration - steady, step.task) for step in critical_steps(timeline, steady)}
    own = {(-1, i) for i in updates} | {(0, i) for i in (*updates, *brings)}
    return Deadline(
        update_start_s=min(float(timeline.start_s[steady, i]) for i in updates) - begin_s,
        update_end_s=max(float(timeline.end_s[steady, i]) for i in updates) - begin_s,
        ready_s=max(ends_s) - begin_s,
        deadline_s=float(timeline.start_s[steady + 1, user.index]) - begin_s,
        critical=bool(steps & own),
    )


def why(bench: Bench, found: Sequence[Candidate]) -> tuple[str, Candidate | None]:
    """Return the reason why a unit is where it is, and the alternative that the reason is about.

    Args:
        bench: the plan.
        found: from :func:`alternatives`.

    Returns:
        ``better``: an alternative that fits is faster, so the plan is not the best there is; ``lacks``: the fastest
        alternative is faster but does not fit; ``bytes``: one that fits is as fast and moves more bytes; ``equal``: one
        that fits is as fast and moves no more; ``fastest``: all that fit are slower, this one by the least; ``only``:
        nothing else fits.
    """
    own_s = bench.own.iteration_s
    others = sorted((trial for trial in found if trial is not bench.own), key=lambda trial: trial.iteration_s)
    fitting = [trial for trial in others if trial.fits]
    if fitting and fitting[0].iteration_s < own_s * (1 - SAME):
        return "better", fitting[0]
    if others and others[0].iteration_s < own_s * (1 - SAME):
        return "lacks", others[0]
    same = [trial for trial in fitting if trial.iteration_s <= own_s * (1 + SAME)]
    if same:
        nearest = min(same, key=lambda trial: trial.traffic_bytes)
        return ("bytes" if nearest.traffic_bytes > bench.own.traffic_bytes else "equal"), nearest
    return ("fastest", fitting[0]) if fitting else ("only", None)


def peak_change_bytes(bench: Bench, trial: Candidate, tier: Tier) -> int:
    """Return by how much a trial changes the peak of a tier."""
    return trial.peak_bytes.get(tier, 0) - bench.own.peak_bytes.get(tier, 0)
