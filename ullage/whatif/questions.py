"""The questions of ``--question``: their points, and their answers in words."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Literal, get_args

from hwprofiles.profile import HardwareProfile
from hwprofiles.registry import LOCAL, list_profiles, load_profile
from planner.terms import Storage
from ullage.output.formatting import duration, percent
from ullage.output.progress import Report
from ullage.whatif.design import Space
from ullage.whatif.fields import of_machine, scalables_of
from ullage.whatif.prices import Prices
from ullage.whatif.running.point import PointRequest
from ullage.whatif.running.runner import Evaluator, narrowed, run_study
from ullage.whatif.running.store import Store
from ullage.whatif.study import Answer, Axis, Cost, Minimum, Point, Study, StudyRequest
from ullage.whatif.values import Number, Question

COMPARES_MACHINES: Final[frozenset[Question | None]] = frozenset({"fits", "cheapest"})
"""Questions that compare all packaged machines, if no machine is given."""
_MOST_DEVICES: Final = 64
_NEAR: Final = 1.05  # least amounts of memory are found up to this ratio
_LEAST_SHARE: Final = 1 / 1024  # of the present amount; smaller amounts are not tried
_GOOD: Final = 0.8  # efficiency that counts as good
_MATTERS: Final = 0.01  # smaller changes of the iteration time may be errors of the search
_FIRST_LENGTH: Final = 4096  # the first number of tokens to try; every length is a multiple of the step
_LENGTH_STEP, _MOST_LENGTH = 256, 2**26
_HARDWARE = Axis(name="hardware", words="profile of the machine", values=())
_GPUS = Axis(name="gpus", words="devices to train on", values=())


def answer(run: Evaluator) -> Study:
    """Run the study of a question and return it with its answer.

    Raises:
        ValueError: an option that the question needs is not given.
    """
    question = run.space.request.question
    assert question is not None
    if swept := run.space.request.sweep.keys() - _SWEPT.get(question, set()):
        name = min(swept)
        raise ValueError(f"--question {question} chooses its own points; leave out --sweep {name}, or --question")
    return _QUESTIONS[question](run)


def _fits(run: Evaluator) -> Study:
    space, machines = run.space, _machines(run.space, None)
    waiting = {name: list(_device_counts(space, hardware)) for name, hardware in machines.items()}
    tried: list[PointRequest] = []
    chosen: dict[str, int] = {}
    while waiting := {name: counts for name, counts in waiting.items() if counts and name not in chosen}:
        cases = {name: space.case({"hardware": name, "gpus": counts.pop(0)}) for name, counts in waiting.items()}
        tried += cases.values()
        results = run.results(cases.values(), "how many devices")
        chosen |= {
            name: int(case.settings["gpus"])
            for (name, case), result in zip(cases.items(), results, strict=True)
            if result.status == "fits"
        }
    tried.sort(key=lambda case: (list(machines).index(str(case.settings["hardware"])), case.settings["gpus"]))
    least = _minimum(run, {name: (machines[name], count) for name, count in chosen.items()})
    study = _study(dataclasses.replace(run, prices=None), tried)  # the question is only whether points fit
    model = study.points[0].model
    words = []
    for count, group in itertools.groupby(least, key=lambda one: one.num_devices):
        names = ", ".join(one.hardware for one in group)
        words.append(f"{model} trains on {count} device{'s' if count > 1 else ''} of {names}")
    if without := [name for name in machines if name not in chosen]:
        words.append(f"no plan was found for {', '.join(without)}")
    settings = [point.settings for point in study.points]
    order = [settings.index({"hardware": one.hardware, "gpus": one.num_devices}) for one in least]
    return _answered(study, "fits", words, order, least=least)


def _minimum(run: Evaluator, chosen: Mapping[str, tuple[HardwareProfile, int]]) -> tuple[Minimum, ...]:
    """Return the least memory and drives of each machine with which a plan is found, by bisection."""
    fields = {
        name: ("device.memory_bytes", "host.memory_bytes", *_drives(run.space, hardware))
        for name, (hardware, _) in chosen.items()
    }

    def amount(key: tuple[str, str], share: float) -> float:
        value = of_machine(chosen[key[0]][0], key[1]) * share
        return max(round(value), 0) if key[1] == "nvme.num_drives" else value

    def tried(shares: Mapping[tuple[str, str], float]) -> dict[tuple[str, str], bool]:
        cases = [
            run.space.case(
                {"hardware": name, "gpus": chosen[name][1], field: Number(amount((name, field), share))}, effort="fit"
            )
            for (name, field), share in shares.items()
        ]
        results = run.results(cases, "how little memory", "fit")
        return {key: result.status == "fits" for key, result in zip(shares, results, strict=True)}

    def between(key: tuple[str, str], high: float, low: float) -> float | None:
        same = key[1] == "nvme.num_drives" and amount(key, high) - amount(key, low) <= 1
        return None if same or high / low <= _NEAR else math.sqrt(low * high)

    # Brackets: the smallest share that is known to fit, and the largest that is known not to.
    ends = tried({(name, field): _LEAST_SHARE for name, of in fields.items() for field in of})
    brackets = {key: (_LEAST_SHARE if fits else 1.0, _LEAST_SHARE) for key, fits in ends.items()}
    found = {key: amount(key, high) for key, (high, _) in narrowed(brackets, between, tried).items()}
    rows = [
        Minimum(
            hardware=name,
            num_devices=count,
            device_memory_bytes=found[name, "device.memory_bytes"],
            host_memory_bytes=found[name, "host.memory_bytes"],
            num_drives=int(found[name, "nvme.num_drives"]) if "nvme.num_drives" in fields[name] else None,
        )
        for name, (_, count) in chosen.items()
    ]
    return tuple(sorted(rows, key=lambda row: (row.num_devices, row.device_memory_bytes)))


def _drives(space: Space, hardware: HardwareProfile) -> tuple[str, ...]:
    counted = hardware.nvme is not None and hardware.nvme.num_drives is not None
    return ("nvme.num_drives",) if counted and space.request.set.get("storage") == "nvme" else ()


def _cheapest(run: Evaluator) -> Study:
    space, prices, request = run.space, run.prices, run.space.request
    if prices is None or request.tokens is None:
        missing = "--prices FILE (or --prices example)" if prices is None else "--tokens, as in 300B"
        raise ValueError(f"--question cheapest needs {missing}")
    machines = _machines(space, prices)
    cases = [
        space.case({"hardware": name, "gpus": count})
        for name, machine in machines.items()
        for count in _device_counts(space, machine)
    ]
    study = _study(run, cases)
    currency = prices.currency
    priced = [(at, p, p.cost) for at, p in enumerate(study.points) if p.cost and p.cost.run is not None]
    if not priced:
        return _answered(study, "cheapest", [f"no machine with a price trains {cases[0].model}"], [])
    by_cost = sorted(priced, key=lambda item: (item[2].run or 0.0, item[0]))
    in_time = [item for item in by_cost if item[2].in_time is not False]
    fastest = min(priced, key=lambda item: item[2].run_s or math.inf)
    words = []
    if request.deadline_s and in_time:
        words.append(f"Cheapest within {duration(request.deadline_s)}: {_offer_words(*in_time[0][1:], currency)}")
    elif request.deadline_s:
        words.append(f"None of the {len(priced)} machines that fit ends the run within {duration(request.deadline_s)}")
    if not request.deadline_s or by_cost[0] not in in_time[:1]:
        words.append(f"Cheapest without a deadline: {_offer_words(*by_cost[0][1:], currency)}")
    words.append(f"Fastest: {_offer_words(*fastest[1:], currency)}")
    order = [at for at, _, _ in (*in_time, *by_cost)]
    return _answered(study, "cheapest", words, list(dict.fromkeys(order)))


def _offer_words(point: Point, cost: Cost, currency: str) -> str:
    assert cost.run_s is not None
    return (
        f"{point.settings['gpus']} x {point.hardware}, {cost.run:,.0f} {currency} in {duration(cost.run_s)} "
        f"({cost.per_million_tokens:.3g} {currency} per million tokens, predicted)"
    )


def _upgrade(run: Evaluator) -> Study:
    space, base = run.space, run.space.case({})
    if base.request is None:
        raise ValueError(f"there is nothing to upgrade: {base.refused.reason if base.refused else ''}")
    request = base.request
    # All scalables but "issue", which is a time: doubling a time is not an upgrade.
    names = [scalable.key for scalable in scalables_of(request) if scalable.key != "issue"]
    cases = {"as it is": base}
    for name in (*names, "host.num_cores"):
        value = of_machine(request.hardware, name)
        cases[f"{name} 2x"] = space.case({name: Number(2 * value)})
    cases["gpus 2x"] = space.case({"gpus": 2 * request.num_devices})
    labelled = [_with_settings(case, {"change": label}) for label, case in cases.items()]
    axis = Axis(name="change", words="the resource that is doubled", values=tuple(cases))
    study = run.study(labelled, (axis,))
    present = study.points[0].figures
    fits = [(at, point) for at, point in enumerate(study.points) if point.figures and at]
    order = sorted(fits, key=lambda item: -item[1].goodput_tokens_per_s)
    if present is None:
        words = [f"Without a change there is no plan: {study.points[0].result.reason}"]
        words += [f"with {order[0][1].settings['change']} there is one"] if order else []
        return _answered(study, "upgrade", words, [at for at, _ in order])
    gains = [(point, point.goodput_tokens_per_s / present.goodput_tokens_per_s - 1) for _, point in order]
    faster = [
        f"{p.settings['change']}: {percent(gain)} more tokens/s (predicted)" for p, gain in gains if gain > _MATTERS
    ]
    words = faster[:3]
    if not words:
        words = ["Doubling any one resource makes training at most 1 % faster (predicted)"]
    else:
        words[0] = f"Best upgrade: {words[0]}"
        words.append(f"{len(fits) - len(faster)} of {len(fits)} changes make training at most 1 % faster")
    if run.prices and (cheap := _cheapest_change(study.points)):
        words.append(cheap)
    return _answered(study, "upgrade", words, [0, *(at for at, _ in order)])


def _cheapest_change(points: Sequence[Point]) -> str | None:
    """Return which change with a known price lowers the cost per token most, in words."""
    if (present := points[0].cost) is None:
        return None
    # A change without a price is not necessarily free.
    charged_for = [(p, p.cost) for p in points[1:] if p.cost and p.cost.per_hour != present.per_hour]
    if not charged_for:
        return None
    best, cost = min(charged_for, key=lambda item: item[1].per_million_tokens)
    change = cost.per_million_tokens / present.per_million_tokens - 1
    verdict = f"{percent(abs(change))} {'less' if change < 0 else 'more'} per token than without a change"
    return f"Best upgrade for its price: {best.settings['change']}, {verdict}"


def _scale(run: Evaluator) -> Study:
    space, hardware = run.space, load_profile(run.space.hardware)
    counts = list(_device_counts(space, hardware))
    study = run.study(
        [space.case({"gpus": count}) for count in counts], (_GPUS.model_copy(update={"values": tuple(counts)}),)
    )
    fits = [point.figures for point in study.points if point.figures]
    if not fits:
        return _answered(study, "scale", [f"no plan was found on up to {counts[-1]} devices of {hardware.name}"], [])
    first = fits[0]
    efficiency = tuple(
        (figures.goodput_tokens_per_s / figures.num_devices) / (first.goodput_tokens_per_s / first.num_devices)
        if figures
        else None
        for figures in (point.figures for point in study.points)
    )
    last, last_one = fits[-1], next(one for one in reversed(efficiency) if one is not None)
    times = last.goodput_tokens_per_s / first.goodput_tokens_per_s
    words = [
        (
            f"{last.num_devices} devices of {hardware.name} are {times:.3g} times as fast as {first.num_devices}, at "
            f"{percent(last_one)} of its speed per device (predicted)"
        )
    ]
    good = [
        f.num_devices
        for f, e in zip((p.figures for p in study.points), efficiency, strict=True)
        if f and e and e >= _GOOD
    ]
    words.append(f"Efficiency stays above {percent(_GOOD)} on up to {max(good)} devices")
    if "global_batch" not in space.request.set:
        words.append("Every device has its own batch, so more devices train on more tokens per iteration")
    return _answered(study, "scale", words, [], efficiency=efficiency)


def _longest(run: Evaluator) -> Study:
    lengths, refusals, study = _greatest_that_fits(run, "seq_len", _next_length)
    model, machine = study.points[0].model, _devices_words(run.space)
    words = [
        f"{model} trains on sequences of {fits:,} tokens on {machine} with --storage {kind} "
        f"({refusals.get(kind) or f'no plan was found for {misfits:,}'})"
        for kind, (fits, misfits) in lengths.items()
        if fits
    ]
    return _answered(study, "longest", words or [f"no plan was found for sequences of {_FIRST_LENGTH} tokens"], [])


def _largest(run: Evaluator) -> Study:
    if "model" in run.space.request.set:
        raise ValueError(
            "--question largest compares models; leave out --model for the packaged ones, or give some from the "
            "smallest to the largest with --sweep model=qwen3-8b,qwen3-14b,qwen3-32b"
        )
    names = [str(name) for name in run.space.axes[0].values]

    def following(fits: int, misfits: int | None) -> int | None:
        """Return the number of the next model to try, counted from 1."""
        end = len(names) + 1 if misfits is None else misfits
        return (fits + end) // 2 if end - fits > 1 else None

    places, _, study = _greatest_that_fits(run, "model", following, names)
    machine = _devices_words(run.space)
    words = [
        f"{names[fits - 1]} is the largest of {len(names)} models that train on {machine} with --storage {kind}"
        + (f" (no plan was found for {names[misfits - 1]})" if misfits else "")
        for kind, (fits, misfits) in places.items()
        if fits
    ]
    return _answered(study, "largest", words or [f"no plan was found for {names[0]} on {machine}"], [])


def _greatest_that_fits(
    run: Evaluator,
    field: str,
    following: Callable[[int, int | None], int | None],
    names: Sequence[str] | None = None,
) -> tuple[dict[str, tuple[int, int | None]], dict[str, str | None], Study]:
    """Find the greatest value of a field that fits, for every value of ``--storage``.

    ``following`` takes the greatest number that fits (0: none) and the least that does not, and returns the next number
    to try. If the values of the field are names, ``names`` are the names of the numbers from 1. Return for each kind of
    storage the greatest number that fits and the least that does not; for each the reason, if the latter is not
    possible at all; and the study of the points that fit.
    """
    space, hardware = run.space, load_profile(run.space.hardware)
    given = space.request.set.get("storage")
    kinds = [given] if given else [kind for kind in get_args(Storage) if kind != "nvme" or hardware.nvme]
    tried: dict[tuple[str, int], PointRequest] = {}
    refusals: dict[str, str | None] = {}

    def fit(numbers: Mapping[str, int]) -> dict[str, bool]:
        cases = {kind: _case_with(space, kind, field, names[n - 1] if names else n) for kind, n in numbers.items()}
        results = dict(zip(cases, run.results(cases.values(), f"what fits, of {field}", "fit"), strict=True))
        tried.update({(kind, numbers[kind]): case for kind, case in cases.items()})
        refusals.update(
            {k: r.reason if r.status == "refused" else None for k, r in results.items() if r.status != "fits"}
        )
        return {kind: result.status == "fits" for kind, result in results.items()}

    start: dict[str, tuple[int, int | None]] = dict.fromkeys(kinds, (0, None))
    known = narrowed(start, lambda _kind, fits, misfits: following(fits, misfits), fit)
    order = sorted(tried, key=lambda item: (kinds.index(item[0]), item[1]))
    values = tuple(dict.fromkeys(tried[item].settings[field] for item in sorted(order, key=lambda item: item[1])))
    axes = (
        Axis(name="storage", words="what may be used beside device and host", values=tuple(kinds)),
        Axis(name=field, words=space.field(field).words.partition(" (")[0], values=values),
    )
    shown = [item for item in order if item[1] == known[item[0]][0]] or order[:1]
    return known, refusals, run.study([tried[item] for item in shown], axes)


def _next_length(fits: int, misfits: int | None) -> int | None:
    """Return the next number of tokens to try, a multiple of 256; ``None`` if the bracket is narrow enough."""
    if misfits is None:
        return (2 * fits or _FIRST_LENGTH) if fits < _MOST_LENGTH else None
    middle = round(math.sqrt(max(fits, _LENGTH_STEP) * misfits) / _LENGTH_STEP) * _LENGTH_STEP
    return middle if fits < middle < misfits and misfits > _NEAR * fits else None


def _case_with(space: Space, kind: str, field: str, value: str | int) -> PointRequest:
    """Return a point with a micro-batch of one sequence, unless the study sets another."""
    settings: dict[str, str | int] = {"storage": kind, field: value}
    sized = {"global_batch", "micro_batch"} & space.request.set.keys()
    return _with_settings(space.case(settings if sized else settings | {"micro_batch": 1}), settings)


def _devices_words(space: Space) -> str:
    return f"{space.request.set.get('gpus', 1)} x {load_profile(space.hardware).name}"


_QUESTIONS: Final[Mapping[Question, Callable[[Evaluator], Study]]] = {
    "fits": _fits,
    "cheapest": _cheapest,
    "upgrade": _upgrade,
    "scale": _scale,
    "longest": _longest,
    "largest": _largest,
}
_SWEPT: Final[Mapping[Question, set[str]]] = {"largest": {"model"}}
"""Fields whose values are given to a question as axes."""


def _machines(space: Space, prices: Prices | None) -> dict[str, HardwareProfile]:
    """Return the machines to compare: the given one, or all packaged machines (with a price, if there are prices)."""
    if (given := space.request.set.get("hardware")) is not None:
        return {given: load_profile(given)}
    names = [name for name in list_profiles() if name != LOCAL and (prices is None or name in prices.machines)]
    found = {name: load_profile(name) for name in names}
    return {name: profile for name, profile in found.items() if profile.device.kind == "gpu"}


def _device_counts(space: Space, hardware: HardwareProfile) -> Iterable[int]:
    """Yield powers of two up to the given devices, or to those of a node, or to 64 if nodes have a network."""
    most = int(space.request.set.get("gpus", _MOST_DEVICES if hardware.inter_node else hardware.devices_per_node))
    powers = (2**i for i in itertools.count())
    yield from itertools.takewhile(lambda count: count < most, powers)
    yield most


def _with_settings(case: PointRequest, settings: Mapping[str, str | int]) -> PointRequest:
    return dataclasses.replace(case, settings=dict(settings))


def _study(run: Evaluator, cases: Sequence[PointRequest]) -> Study:
    """Return a study of machines with some numbers of devices."""
    axes = tuple(
        axis.model_copy(update={"values": tuple(dict.fromkeys(case.settings[axis.name] for case in cases))})
        for axis in (_HARDWARE, _GPUS)
    )
    return run.study(cases, axes)


def _answered(study: Study, question: Question, words: Sequence[str], points: Sequence[int], **more: Any) -> Study:
    found = Answer(question=question, words=tuple(words), points=tuple(points), **more)
    return study.model_copy(update={"answer": found})


def study(
    *,
    sweep: Mapping[str, str] | None = None,
    question: Question | None = None,
    tokens: float | None = None,
    deadline_s: float | None = None,
    prices: Prices | None = None,
    effort: Literal["plan", "certify", "fit"] = "plan",
    progress: Report = lambda *_: None,
    **options: Any,
) -> Study:
    """Plan with other machines, models and batches, and compare speed and cost, as ``ullage whatif`` does.

    Args:
        sweep: fields that vary, each with its values as on the command line, as in ``{"gpus": "1,2,4,8"}``.
        question: a question that chooses the points, such as ``"cheapest"``.
        tokens: tokens of a whole run.
        deadline_s: seconds within which the run must end.
        prices: prices of machines.
        effort: effort for each point. ``"fit"``: the first plan found that fits, a few percent slower than the best.
        progress: called with the present step in words, the finished points and the number of points.
        options: fields that are the same at every point, by their names in studies: ``model``, ``hardware``, ``gpus``.

    Raises:
        ValueError: an option names something unknown, or options contradict each other.
    """
    fixed = {name: str(value) for name, value in options.items() if value is not None}
    swept = {name: (values,) for name, values in (sweep or {}).items()}
    request = StudyRequest(set=fixed, sweep=swept, tokens=tokens, deadline_s=deadline_s, question=question)
    with Store(None) as store:
        evaluator = Evaluator(Space(request, effort), store, prices, progress=progress)
        return answer(evaluator) if question else run_study(evaluator)
