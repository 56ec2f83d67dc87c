"""One plan for devices of several kinds, which share each micro-batch by their speed.

[Note: Unlike devices] All ranks are data-parallel, and hold equal shards. Every rank computes as many micro-batches as
the others, but the sequences that it has of each are a share of its kind's own, and gradients are weighted by these
shares. So collectives are the same tasks in the same order on all ranks, of the same bytes. All else may differ by
kind: where weights, activations and state are, what is recomputed, and who updates. If the best plans of the kinds
have other collectives (another ZeRO stage, say), all take those of one kind, the one with which the slowest kind is
fastest: each other kind keeps what it can of its own placement.

A collective ends when the last rank has come, so an iteration takes as long as that of the slowest kind, and each
kind's is predicted over the slowest network of all. Within an iteration, kinds may be further apart than at its end:
such waits are not predicted.

What a kind computes for a share takes at least the time of :func:`planner.bounds.certificate.computing_s`. This bounds
all divisions of the batch. It also says which division to plan next, once plans have shown by how much each kind
exceeds it.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from hwprofiles.profile import Fabric, HardwareProfile
from planner.bounds.certificate import computing_s
from planner.choices.constraints import MOST_MICRO_BATCHES
from planner.choices.request import Request
from planner.choices.variants import variants
from planner.decisions import Choice, Decisions
from planner.lowering import agreed, lower
from planner.plan.competition import Found
from planner.plan.document import DeviceKind, EngineRow, Plan
from planner.plan.planning import InfeasibleError, as_plan, find
from planner.search import Progress, Scorer, no_garbage_collection
from planner.simulate.uncertainty import with_interval

_MOST_DIVISIONS: Final = 6  # that are planned
_MOST_MISFITS: Final = 64  # divisions of which a kind has too little memory for its share
MOST_SHARES: Final = 64  # sequences of a micro-batch on a rank; larger ones are not considered
Machine = tuple[HardwareProfile, int]
"""A kind of device, and how many there are."""
Times = Mapping[int, float]
"""Seconds of a kind by the sequences of all its ranks in a micro-batch."""
Search = Callable[[Request], Found]
Divided = Callable[[int, tuple[int, ...]], None]
"""Called with the micro-batches of a division, and the sequences of a rank of each kind in each of them."""


@dataclasses.dataclass(frozen=True)
class _Division:
    bound_s: float
    num_micro_batches: int
    sequences: tuple[int, ...]  # of a rank of each kind, in a micro-batch


@no_garbage_collection()
def make_unlike_plan(
    request: Request,
    machines: Sequence[Machine],
    progress: Progress | None = None,
    budget_s: float | None = None,
    divided: Divided | None = None,
) -> Plan:
    """Find the best plan for devices of several kinds; see [Note: Unlike devices].

    Args:
        request: the request; its machine and its number of devices do not count.
        machines: the kinds of devices. The slowest one has the first ranks.
        progress: called with the best so far for one kind, and the number of simulations.
        budget_s: limit of each kind's search in seconds.
        divided: called before a division is planned.

    Raises:
        InfeasibleError: a kind has too little memory for all shares that were tried.
        ValueError: the request asks for more than data parallelism, or the batch cannot be divided.
    """
    kinds = _kinds(request, machines)
    bounds = {count: _bounds(kinds, count) for count in _numbers_of_micro_batches(kinds)}
    waiting = sorted(_divisions(kinds, bounds), key=lambda division: division.bound_s)
    if not waiting:
        raise ValueError(
            f"a global batch of {request.global_batch} sequences cannot be divided among "
            f"{_num_ranks(kinds)} devices, each of which needs sequences of every micro-batch; choose "
            "another --global-batch, or fewer devices"
        )
    search = functools.partial(find, progress=progress, budget_s=budget_s)
    division, found = _best(kinds, bounds, waiting, search, divided)
    return _as_one(kinds, division, found, waiting[0].bound_s, tuple(_rows(kinds, bounds, search)))


def _best(
    kinds: Sequence[Request],
    bounds: Mapping[int, Sequence[Times]],
    divisions: Sequence[_Division],
    search: Search,
    divided: Divided | None,
) -> tuple[_Division, list[Found]]:
    """Plan divisions, the most promising first; return the best, and what was found for each kind.

    Raises:
        InfeasibleError: a kind has too little memory for all shares that were tried.
    """
    fitting = {count: [dict(of_kind) for of_kind in times] for count, times in bounds.items()}  # as far as is known
    best: tuple[float, _Division, list[Found]] | None = None
    tried, misfits, waiting = set[tuple[int, ...]](), list[InfeasibleError](), [*divisions]
    while waiting and len(tried) - len(misfits) < _MOST_DIVISIONS and len(misfits) < _MOST_MISFITS:
        division = waiting.pop(0)
        count = division.num_micro_batches
        if division.sequences in tried or (best and division.bound_s >= best[0]):
            continue
        tried.add(division.sequences)
        if divided:
            divided(count, division.sequences)
        try:
            found = _found(kinds, division, search, fitting[count])
        except InfeasibleError as error:
            misfits.append(error)
            smaller = _divisions(kinds, {count: fitting[count]})
            waiting = sorted([*waiting, *smaller], key=lambda each: each.bound_s)
            continue
        if best is None or _slowest_s(found) < best[0]:
            best = _slowest_s(found), division, found
        waiting.insert(0, _closer(division, found, kinds, fitting[count]))
    if best is None:
        raise misfits[0]
    _, division, found = best
    return division, found


def _rows(kinds: Sequence[Request], bounds: Mapping[int, Sequence[Times]], search: Search) -> Iterator[EngineRow]:
    """Yield what else the devices could do: have equal shares, as with other engines, or leave all to one kind."""

    def row(name: str, setting: str, time_s_of: Callable[[], float]) -> EngineRow:
        try:
            time_s = time_s_of()
        except InfeasibleError as error:
            return EngineRow(name=name, setting=setting, fits=False, missing_bytes=error.missing_bytes)
        return EngineRow(name=name, setting=setting, fits=True, iteration_s=time_s, missing_bytes={})

    if (equal := _equal(kinds, bounds)) is not None:
        setting = f"{equal.sequences[0]} sequence(s) of each micro-batch on every device"
        yield row("equal shares", setting, lambda: _slowest_s(_found(kinds, equal, search, [{} for _ in kinds])))
    for kind in kinds:
        if _batch(kinds) % kind.num_devices == 0:
            alone = dataclasses.replace(kind, num_micro_batches=None)
            time_s_of = functools.partial(_time_s, functools.partial(search, alone))
            yield row(f"{kind.num_devices} x {kind.hardware.name}", "all sequences", time_s_of)


def _equal(kinds: Sequence[Request], bounds: Mapping[int, Sequence[Times]]) -> _Division | None:
    """Return the best division in which all ranks have equal shares, as other engines divide; ``None`` without one."""
    found, ranks = [], _num_ranks(kinds)
    for count, times in bounds.items():
        each, rest = divmod(_batch(kinds) // count, ranks)
        own = [of_kind.get(each * kind.num_devices, math.inf) for of_kind, kind in zip(times, kinds, strict=True)]
        if not rest and math.isfinite(max(own)):
            found.append(_Division(max(own), count, (each,) * len(kinds)))
    return min(found, key=lambda division: division.bound_s, default=None)


def _kinds(request: Request, machines: Sequence[Machine]) -> list[Request]:
    """Return the request for each kind alone, with the slowest networks of any: each collective waits for all ranks.

    Raises:
        ValueError: the request asks for other degrees than data parallelism, or for no global batch.
    """
    fixed = ("tensor_parallel", "pipeline_parallel", "expert_parallel", "context_parallel", "micro_batch")
    if wrong := next((name for name in fixed if getattr(request, name) not in {None, 1}), None):
        raise ValueError(
            f"{wrong} is {getattr(request, wrong)}, but devices of several kinds are data-parallel, each kind with "
            "micro-batches of its own size; leave it out"
        )
    if request.global_batch is None:
        raise ValueError(
            "devices of several kinds divide a global batch; give its sequences with --global-batch, as in 64"
        )
    total = sum(count for _, count in machines)
    for machine, _ in machines:  # else the error would name another one, to which its lack of a network is handed on
        if machine.inter_node is None and total > machine.devices_per_node:
            raise ValueError(
                f"{machine.name} has no network between nodes, over which kinds of devices exchange gradients; give a "
                "profile with inter_node, or --nodes 1 if all devices are in one machine"
            )
    networks = {
        name: _slowest([getattr(machine, name) for machine, _ in machines]) for name in ("intra_node", "inter_node")
    }
    as_one = dataclasses.replace(
        request,
        num_devices=total,
        tensor_parallel=1,
        pipeline_parallel=1,
        expert_parallel=1,
        context_parallel=1,
    )
    of_all = [dataclasses.replace(as_one, hardware=machine.model_copy(update=networks)) for machine, _ in machines]
    return [dataclasses.replace(kind, num_devices=count) for kind, (_, count) in zip(of_all, machines, strict=True)]


def _slowest(fabrics: Sequence[Fabric | None]) -> Fabric | None:
    found = [fabric for fabric in fabrics if fabric is not None]
    return None if len(found) < len(fabrics) else min(found, key=lambda fabric: fabric.bytes_per_s.value)


def _numbers_of_micro_batches(kinds: Sequence[Request]) -> Iterator[int]:
    """Yield the numbers that divide the batch, such that each rank has a sequence of each micro-batch."""
    most = min(_batch(kinds) // _num_ranks(kinds), MOST_MICRO_BATCHES)
    asked = kinds[0].num_micro_batches
    for count in [asked] if asked else range(1, most + 1):
        if _batch(kinds) % count == 0 and count <= most:
            yield count


def _batch(kinds: Sequence[Request]) -> int:
    assert kinds[0].global_batch is not None
    return kinds[0].global_batch


def _num_ranks(kinds: Sequence[Request]) -> int:
    return sum(kind.num_devices for kind in kinds)


def _share(kinds: Sequence[Request], kind: Request, num_sequences: int, num_micro_batches: int) -> Request:
    """Return the request for a kind's share of the batch, as if all devices were of this kind."""
    return dataclasses.replace(
        kind,
        num_devices=_num_ranks(kinds),
        global_batch=None,
        micro_batch=num_sequences,
        num_micro_batches=num_micro_batches,
    )


def _bounds(kinds: Sequence[Request], num_micro_batches: int) -> list[Times]:
    """Return, of each kind, the time that each share of a micro-batch takes at least."""
    at_once = _batch(kinds) // num_micro_batches
    found: list[Times] = []
    for kind in kinds:
        most = (at_once - _num_ranks(kinds)) // kind.num_devices + 1  # each rank of the others has a sequence
        times: dict[int, float] = {}
        for share in range(1, min(most, MOST_SHARES) + 1):
            with contextlib.suppress(ValueError):  # a captured model that does not take such a batch
                tried = variants(_share(kinds, kind, share, num_micro_batches))
                times[share * kind.num_devices] = min(map(computing_s, tried))
        found.append(times)
    return found


def _divisions(kinds: Sequence[Request], times: Mapping[int, Sequence[Times]]) -> Iterator[_Division]:
    """Yield the best division into each number of micro-batches, by the times of kinds."""
    for num_micro_batches, of_kinds in times.items():
        with contextlib.suppress(ValueError):
            time_s, shares = least_longest(of_kinds, _batch(kinds) // num_micro_batches)
            sequences = tuple(share // kind.num_devices for share, kind in zip(shares, kinds, strict=True))
            yield _Division(time_s, num_micro_batches, sequences)


def _closer(
    division: _Division, found: Sequence[Found], kinds: Sequence[Request], bounds: Sequence[Times]
) -> _Division:
    """Return the best division into as many micro-batches, if each kind exceeds its bounds as its plan does."""
    expected = []
    for own, kind, sequences, times in zip(found, kinds, division.sequences, bounds, strict=True):
        over = own.prediction.iteration_s / times[sequences * kind.num_devices]
        expected.append({share: over * time_s for share, time_s in times.items()})
    (closer,) = _divisions(kinds, {division.num_micro_batches: expected})
    return dataclasses.replace(closer, bound_s=division.bound_s)


def _found(
    kinds: Sequence[Request], division: _Division, search: Search, fitting: Sequence[dict[int, float]]
) -> list[Found]:
    """Return what is best for each kind, with the same collectives for all.

    Raises:
        InfeasibleError: a kind has too little memory for its share, which is then taken out of those that may fit, as
            are larger ones.
    """
    found = []
    for kind, sequences, shares in zip(kinds, division.sequences, fitting, strict=True):
        try:
            found.append(search(_share(kinds, kind, sequences, division.num_micro_batches)))
        except InfeasibleError:
            for share in [share for share in shares if share >= sequences * kind.num_devices]:
                del shares[share]
            raise
    if len(set(map(_agreed, found))) == 1:
        return found
    if shared := [placed for one in found if (placed := _all_as(one, found))]:
        return min(shared, key=_slowest_s)
    raise InfeasibleError(
        f"no placement fits on all kinds of devices, with {' and '.join(map(str, division.sequences))} sequences each",
        {},
        "choose a smaller --global-batch, or leave one kind out",
        proven=False,
    )


def _agreed(found: Found) -> tuple[object, ...]:
    units, asynchronous = found.own.setup.units, found.own.cost.asynchronous
    return agreed(lower(units, found.decisions, asynchronous=asynchronous), found.decisions)


def _all_as(one: Found, found: Sequence[Found]) -> list[Found] | None:
    """Return all kinds with the collectives of one; ``None`` if one of them cannot have these.

    Another kind keeps what it can of its own placement: all of it in the ZeRO stage of the one, or what it does with
    activations. Or it takes the placement of the one. The fastest of these counts.
    """
    wanted, placed = _agreed(one), []
    for other in found:
        tried = (_placed(other, choice, decided) for choice, decided in _like(one, other))
        agreeing = [each for each in tried if each is not None and _agreed(each) == wanted]
        if not agreeing:
            return None
        placed.append(min(agreeing, key=lambda each: each.prediction.iteration_s))
    return placed


def _like(one: Found, other: Found) -> Iterator[tuple[Choice, Decisions]]:
    """Yield the choice and the decisions of another kind, changed to be like those of one; see :func:`_all_as`."""
    own = other.decisions
    size = {"micro_batch": own.micro_batch, "split_masters": own.split_masters}  # masters have each kind's own form
    yield other.own.choice, own.model_copy(update={"zero_stage": one.decisions.zero_stage})
    taken = one.decisions.model_copy(update=size)
    kept = {
        name: unit.model_copy(update={"activations": own.units[name].activations}) for name, unit in taken.units.items()
    }
    for decided in (taken.model_copy(update={"units": kept}), taken):
        yield one.own.choice.model_copy(update=size), decided


def _placed(found: Found, choice: Choice, decided: Decisions) -> Found | None:
    """Return what was found with other decisions; ``None`` if they do not fit, or contradict one another."""
    own = next((rival for rival in found.rivals if rival.choice == choice), None)
    if own is None:
        return None
    try:
        best = Scorer.of(own).score(decided)
    except ValueError:
        return None
    return dataclasses.replace(found, own=own, best=best, searched=(own,)) if best.fits else None


def _time_s(search: Callable[[], Found]) -> float:
    return search().prediction.iteration_s


def _slowest_s(found: Sequence[Found]) -> float:
    return max(own.prediction.iteration_s for own in found)


def _as_one(
    kinds: Sequence[Request],
    division: _Division,
    found: Sequence[Found],
    bound_s: float,
    rows: tuple[EngineRow, ...],
) -> Plan:
    """Return the plan of the slowest kind, which has the first ranks, with the others in it."""
    slowest_first = sorted(zip(kinds, division.sequences, found, strict=True), key=lambda of: -_slowest_s(of[2:]))
    shares = tuple(sequences for kind, sequences, _ in slowest_first for _ in range(kind.num_devices))
    firsts = itertools.accumulate((kind.num_devices for kind, *_ in slowest_first), initial=0)
    own, *others = (
        _part(each, first_rank, kind, shares)
        for (kind, _, each), first_rank in zip(slowest_first, firsts, strict=False)  # the last is the end
    )
    _, _, slowest = slowest_first[0]
    plan = as_plan(slowest.own.request, slowest, rows, found)
    return plan.model_copy(
        update={
            "decisions": own.decisions,
            "prediction": own.prediction,
            "others": tuple(others),
            "divisions_bound_s": bound_s,
        }
    ).sealed()


def _part(found: Found, first_rank: int, kind: Request, shares: tuple[int, ...]) -> DeviceKind:
    decided = found.decisions.model_copy(update={"shares": shares})
    seen = with_interval(found.prediction, found.own.setup.units, decided, found.own.cost)
    rate = decided.num_sequences * kind.seq_len / seen.iteration_s
    return DeviceKind(
        hardware=kind.hardware,
        first_rank=first_rank,
        num_ranks=kind.num_devices,
        decisions=decided,
        prediction=seen.model_copy(update={"tokens_per_s": rate}),
    )


def least_longest(times: Sequence[Times], total: int) -> tuple[float, tuple[int, ...]]:
    """Return the least time in which all kinds do a batch, and their shares then.

    Args:
        times: of each kind, seconds by number of sequences.
        total: sequences of all.

    Raises:
        ValueError: no shares make up the batch.
    """
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}  # of equal ones, the least sum of times
    for of_kind in times:
        longer: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for (done, (longest_s, sum_s, shares)), (share, time_s) in itertools.product(best.items(), of_kind.items()):
            if done + share <= total:
                new = max(longest_s, time_s), sum_s + time_s, (*shares, share)
                longer[done + share] = min(longer.get(done + share, new), new)
        best = longer
    if total not in best:
        raise ValueError(f"no shares make up {total} sequences")
    longest_s, _, shares = best[total]
    return longest_s, shares
