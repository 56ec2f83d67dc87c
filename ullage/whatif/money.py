"""Costs of points per hour, per million tokens and per run, and the Pareto front of cost and speed."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from ullage.whatif.prices import MachinePrice, Prices
from ullage.whatif.study import Cost, Figures, Point, StudyRequest, Value

_SECONDS_PER_HOUR = 3600.0
_MILLION = 1e6


def charged(points: Iterable[Point], prices: Prices | None, request: StudyRequest) -> tuple[list[Point], list[str]]:
    """Return points with their costs, if there are prices, and notes about the prices.

    Without prices, the points still get the time of a run, so that a deadline can be checked.
    """
    if prices is None:
        return list(points), []
    priced = [point.model_copy(update={"cost": _cost(point, prices, request)}) for point in points]
    front = pareto_front(priced)
    marked = [
        point.model_copy(update={"on_front": True}) if position in front else point
        for position, point in enumerate(priced)
    ]
    return marked, _notes(priced, prices)


def pareto_front(points: Sequence[Point]) -> set[int]:
    """Return the indices of the Pareto front: no other point of the same model is as fast and as cheap.

    If points are equal in both, only the first is on the front.
    """
    by_model: dict[str, list[tuple[float, float, int]]] = defaultdict(list)
    for position, point in enumerate(points):
        if point.figures and point.cost:
            key = (point.cost.per_million_tokens, -point.figures.goodput_tokens_per_s, position)
            by_model[point.model].append(key)
    front = set()
    for keys in by_model.values():
        fastest = 0.0
        for _, slowness, position in sorted(keys):  # cheapest first; each further point must be faster
            if -slowness > fastest:
                fastest = -slowness
                front.add(position)
    return front


def run_seconds(figures: Figures, tokens: float) -> float:
    """Return the time to train on a number of tokens."""
    return tokens / figures.goodput_tokens_per_s


def _cost(point: Point, prices: Prices, request: StudyRequest) -> Cost | None:
    figures, machine = point.figures, prices.machines.get(point.hardware)
    if figures is None or machine is None:
        return None
    per_hour = _per_hour(point, figures, machine, prices)
    per_token = per_hour / _SECONDS_PER_HOUR / figures.goodput_tokens_per_s
    run_s = run_seconds(figures, request.tokens) if request.tokens else None
    return Cost(
        per_hour=per_hour,
        per_million_tokens=per_token * _MILLION,
        run_s=run_s,
        run=per_token * request.tokens if request.tokens else None,
        in_time=run_s <= request.deadline_s if run_s and request.deadline_s else None,
    )


def _per_hour(point: Point, figures: Figures, machine: MachinePrice, prices: Prices) -> float:
    """Return the hourly price of all nodes in use, with extras for fields that differ from the profile."""
    own = figures.num_devices * machine.per_device_hour + figures.num_nodes * machine.per_node_hour
    extra = 0.0
    for name, change in point.varied.items():
        if (price := prices.extras.get(name)) is not None:
            times = figures.num_devices if name.startswith("device") else figures.num_nodes
            extra += times * price.per_hour * (_number(change.after) - _number(change.before))
    return max(own + extra, 0.0)


def _number(value: Value | None) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _notes(points: Sequence[Point], prices: Prices) -> list[str]:
    """Return notes about the sources of prices, and about machines and fields without a price."""
    hardware = dict.fromkeys(point.hardware for point in points if point.figures)
    origins = {name: prices.machines[name].provenance for name in hardware if name in prices.machines}
    by_origin: dict[str, list[str]] = defaultdict(list)
    for name, origin in origins.items():
        by_origin[f"{origin.origin}, {origin.source}{f', {origin.date}' if origin.date else ''}"].append(name)
    notes = [f"prices of {', '.join(names)}: {origin}" for origin, names in by_origin.items()]
    if without := [name for name in hardware if name not in origins]:
        notes.append(f"there are no prices for {', '.join(without)}, so their points have no cost")
    varied = dict.fromkeys(name for point in points for name in point.varied if not name.startswith("model."))
    free = [name for name in varied if name not in prices.extras]
    if free and origins:
        notes.append(f"changes of {', '.join(free)} cost nothing here: the prices have no extra for them")
    return notes
