"""``--question unlike``: how a batch is divided among GPUs of several kinds.

[Note: Unlike GPUs] Each kind is in hosts of its own. It has a plan of its own for its share of the global batch, with
whatever degrees, tiles and placements are best there, and keeps the whole model and optimizer state. Once all have
their gradients, kinds add them up over their networks, each device a part; nothing is assumed to hide that. An
iteration takes as long as the slowest kind and this exchange. Shares are whole sequences per device. What a
kind computes for each share takes at least the time of :func:`planner.bounds.certificate.computing_s`: this bounds all
divisions, and promises the next one to plan, once plans have shown by how much each kind exceeds it.
"""

import contextlib
import itertools
import math
from collections.abc import Mapping, Sequence

from planner.bounds.certificate import computing_s
from planner.choices.request import Request
from planner.choices.variants import variants
from planner.models.captured import CapturedModel
from planner.models.parameters import num_parameters
from ullage.output.formatting import duration, percent
from ullage.whatif.design import Case
from ullage.whatif.running.runner import Evaluator
from ullage.whatif.study import Answer, Axis, Result, Study

_MOST_DIVISIONS = 8  # that are planned
_MOST_SHARES = 64  # of one kind, whose bounds are worked out
Kind = tuple[str, int]
"""The profile of some devices, and their number."""
Shares = tuple[int, ...]
"""Sequences of each kind."""
Times = Mapping[int, float]
"""Seconds of a kind by its number of sequences."""


def divide(run: Evaluator) -> Study:
    """Divide the global batch among the kinds of GPUs of a study.

    Raises:
        ValueError: the kinds or the batch are not given, cannot be divided, or a kind cannot do its share.
    """
    kinds, total = _kinds(run), _global_batch(run)
    bounds = _bounds(run, kinds, total)
    bound_s, _ = least_longest(bounds, total)
    tried = _tried(run, kinds, total, bounds)
    best = min(tried, key=lambda shares: tried[shares])
    shown = [_case(run, kind, share) for kind, share in zip(kinds, best, strict=True)]
    alone = [_case(run, (name, count), total) for name, count in kinds if total % count == 0]
    results = run.results(alone, "each kind alone")
    fit = [(_time_s(result), case) for case, result in zip(alone, results, strict=True) if result.status == "fits"]
    exchange_s = _exchange_s([case.request for case in shown if case.request])
    iteration_s = tried[best] + exchange_s
    done = "; ".join(f"{share} on {_words(kind)}" for kind, share in zip(kinds, best, strict=True))
    takes = f"{duration(iteration_s)} an iteration (predicted), {duration(exchange_s)} of it to add up gradients"
    words = [f"Of {total} sequences, {done}: {takes}"]
    steps = [_shares(kind, _most(kind, kinds, total)).step for kind in kinds]
    of_all = steps == [count for _, count in kinds]
    divisions = "division" if of_all else f"division in steps of {' and '.join(map(str, steps))} sequences"
    words.append(
        f"no {divisions} is faster than {duration(bound_s)} (proven from what devices compute); this one takes "
        f"{percent(iteration_s / bound_s - 1)} longer"
    )
    if fit:
        time_s, case = min(fit, key=lambda one: one[0])
        verdict = "together they are faster" if iteration_s < time_s else "so the others are no gain"
        words.append(
            f"{case.settings['gpus']} x {case.hardware} alone take {duration(time_s)} for the batch: {verdict}"
        )
    words.append("This is a forecast: ullage execute trains by one plan, on devices of one kind")
    columns = {"hardware": "profile of the machine", "gpus": "devices of this kind", "global_batch": "their sequences"}
    cases = [*shown, *(case for _, case in fit)]
    axes = tuple(
        Axis(name=name, words=what, values=tuple(dict.fromkeys(case.settings[name] for case in cases)))
        for name, what in columns.items()
    )
    found = Answer(
        question="unlike", words=tuple(words), points=tuple(range(len(kinds))), iteration_s=iteration_s, bound_s=bound_s
    )
    return run.study(cases, axes).model_copy(update={"answer": found})


def _tried(run: Evaluator, kinds: Sequence[Kind], total: int, bounds: Sequence[Times]) -> dict[Shares, float]:
    """Return seconds of the slowest kind by shares: the most promising ones, as plans come closer to the bounds."""
    tried: dict[Shares, float] = {}
    expected = bounds
    while len(tried) < _MOST_DIVISIONS and (shares := least_longest(expected, total)[1]) not in tried:
        cases = [_case(run, kind, share) for kind, share in zip(kinds, shares, strict=True)]
        results = run.results(cases, f"{' + '.join(map(str, shares))} sequences")
        for kind, result in zip(kinds, results, strict=True):
            if result.status != "fits":
                raise ValueError(f"{_words(kind)} cannot do a share of this batch: {result.reason}")
        tried[shares] = max(map(_time_s, results))
        over = [
            _time_s(result) / of_kind[share] for result, of_kind, share in zip(results, bounds, shares, strict=True)
        ]
        expected = [
            {share: ratio * bound_s for share, bound_s in of_kind.items()}
            for ratio, of_kind in zip(over, bounds, strict=True)
        ]
    return tried


def _kinds(run: Evaluator) -> list[Kind]:
    names = [str(name) for name in run.space.values("hardware")]
    counts = [int(count) for count in run.space.values("gpus")]
    counts = counts * len(names) if len(counts) == 1 else counts
    if len(names) < 2 or len(counts) != len(names):
        raise ValueError(
            f"--question unlike is about two or more kinds of GPUs, but there are {len(names)}, with {len(counts)} "
            "numbers of devices; give both, as in --sweep hardware=h100,a100-80 --sweep gpus=8,4"
        )
    return [*zip(names, counts, strict=True)]


def _words(kind: Kind) -> str:
    hardware, count = kind
    return f"{count} x {hardware}"


def _global_batch(run: Evaluator) -> int:
    if (given := run.space.request.set.get("global_batch")) is None:
        raise ValueError("--question unlike divides a batch; give its sequences with --global-batch, as in 64")
    return int(given)


def _case(run: Evaluator, kind: Kind, share: int) -> Case:
    hardware, count = kind
    return run.space.case({"hardware": hardware, "gpus": count, "global_batch": share})


def _time_s(result: Result) -> float:
    assert result.figures is not None
    return result.figures.iteration_s


def _exchange_s(requests: Sequence[Request]) -> float:
    """Return the time in which kinds add up their gradients: a ring over them, of each device's part.

    Raises:
        ValueError: a machine has no network.
    """
    count, rates, latency_s = len(requests), [], 0.0
    for request in requests:
        if (network := request.hardware.inter_node) is None:
            raise ValueError(
                f"{request.hardware.name} has no network between nodes, over which kinds of GPUs add up gradients; "
                "give a profile with inter_node"
            )
        rates.append(request.num_devices * network.bytes_per_s.value)
        latency_s = max(latency_s, network.latency_s.value)
    model = requests[0].model
    trained = model.num_trained if isinstance(model, CapturedModel) else num_parameters(model)
    num_bytes = trained * requests[0].types.gradient_bytes
    return 2 * (count - 1) * (num_bytes / count / min(rates) + latency_s)


def _bounds(run: Evaluator, kinds: Sequence[Kind], total: int) -> list[Times]:
    """Return, of each kind, the time that each share takes at least.

    Raises:
        ValueError: the batch gives a kind nothing, or the kind cannot be asked for a share.
    """
    shares = {kind: list(_shares(kind, _most(kind, kinds, total))) for kind in kinds}
    found: list[Times] = []
    for kind in kinds:
        times: dict[int, float] = {}
        for share in shares[kind]:
            run.progress("bounds for all divisions", sum(map(len, found)) + len(times), sum(map(len, shares.values())))
            case = _case(run, kind, share)
            if case.request is None:
                raise ValueError(f"{_words(kind)}: {case.refused.reason if case.refused else ''}")
            with contextlib.suppress(ValueError):  # no way to cut this share into micro-batches
                times[share] = min(map(computing_s, variants(case.request)))
        found.append(times)
    return found


def _most(kind: Kind, kinds: Sequence[Kind], total: int) -> int:
    """Return the largest share of a kind: each device of the others has a sequence."""
    _, own = kind
    return total - sum(count for _, count in kinds) + own


def _shares(kind: Kind, most: int) -> range:
    """Return the shares of a kind that are compared: whole sequences of each device, in steps that are few enough."""
    _, step = kind
    while most > step * _MOST_SHARES:
        step *= 2
    return range(step, most + 1, step)


def least_longest(times: Sequence[Times], total: int) -> tuple[float, Shares]:
    """Return the least time in which all kinds do a batch, and their shares then.

    Args:
        times: of each kind, seconds by number of sequences.
        total: sequences of all.

    Raises:
        ValueError: no shares make up the batch.
    """
    best: dict[int, tuple[float, float, Shares]] = {0: (0.0, 0.0, ())}  # of equal ones, the least sum of times
    for of_kind in times:
        longer: dict[int, tuple[float, float, Shares]] = {}
        for (done, (longest_s, sum_s, shares)), (share, time_s) in itertools.product(best.items(), of_kind.items()):
            if done + share <= total:
                new = max(longest_s, time_s), sum_s + time_s, (*shares, share)
                longer[done + share] = min(longer.get(done + share, new), new)
        best = longer
    if total not in best:
        steps = [min(of_kind, default=total) for of_kind in times]
        raise ValueError(
            f"a global batch of {total} sequences is no sum of shares in steps of {', '.join(map(str, steps))}; choose "
            f"a larger multiple of {math.gcd(*steps)}"
        )
    longest_s, _, shares = best[total]
    return longest_s, shares
