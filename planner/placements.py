"""Placements of our own: a family with a few counts, and the extremes from which the search also starts.

A placement only makes :class:`planner.decisions.Decisions`. One set of passes lowers them all, and one simulator scores
them.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from planner.decisions import Activations, Decisions, Place, Sharding, UnitDecision
from planner.lowering.stages import stage_of
from planner.setup import Mix, Setup, pieces

ACTIVATIONS: tuple[Activations, ...] = ("keep", "recompute")
"""What is everybody's choice: activations are recomputed where keeping them does not fit."""


def resident(setup: Setup) -> Iterator[Decisions]:
    """Yield everything on the device: with activations kept, then recomputed; over devices in ZeRO-1, 2 and 3."""
    for stage in setup.zero_stages:
        for activations in ACTIVATIONS:
            units = {
                unit.name: UnitDecision(
                    params="gpu",
                    activations=activations if unit.can_swap else "keep",
                    update=(Place.GPU,) * len(pieces(setup, unit)),
                    streamed_gradients="gpu",
                )
                for unit in setup.units
            }
            yield _ours(setup, units, zero_stage=stage)


def swapping(setup: Setup, num_swapped: int, num_evicted: int) -> Decisions:
    """Return parameters and state on NVMe, updated by the host, with activations of the first segments swapped.

    Args:
        setup: the model, the machine and what the user has fixed.
        num_swapped: segments whose activations leave the device; the others recompute theirs.
        num_evicted: those of them, from the first, whose activations go on to NVMe.
    """
    segments, stay = setup.swappable, setup.tied
    ways: dict[str, Activations] = dict.fromkeys(segments, "recompute")
    ways.update(dict.fromkeys(segments[:num_swapped], "offload"))
    ways.update(dict.fromkeys(segments[:num_evicted], "offload-nvme"))
    units = {
        unit.name: UnitDecision(
            params="nvme" if unit.num_weights and unit.name not in stay else "gpu",
            activations=ways.get(unit.segment, "keep"),
            update=(Place.GPU if unit.writes else Place.NVME,) * len(pieces(setup, unit)),
        )
        for unit in setup.units
    }
    return _ours(setup, units, zero_stage=setup.zero_stages[-1])


def _ours(setup: Setup, units: dict[str, UnitDecision], **options: Any) -> Decisions:
    """Return decisions of our engine.

    It updates during backward unless updates wait for the norm, units stay, or stages may make gradients later.
    """
    ours = {"policy": "ullage", "num_nvme_slots": Mix(0, 0, 0).num_nvme_slots, "units": units}
    at_step = setup.given.waits_for_norm or setup.given.pipeline_parallel > 1 or any(unit.stays for unit in setup.units)
    if not at_step:
        ours |= {"update_start": "backward", "update_order": "backward"}
    return Decisions(**{**dict(setup.given), **ours, **options})


def mixed(setup: Setup, mix: Mix) -> Decisions:
    """Our policy at one point: every update has its own place, and only its unit's next forward waits for it.

    Resident state goes to the units with the earliest deadlines: the first in forward order, and within a layer the
    most visited experts. Gradients of streamed subgroups stay on the device for the first units too, because they are
    made last and used first. Streamed subgroups are spread evenly among those that the CPU updates, so that both stay
    busy. Subgroups from NVMe, fetched units (unless the last ones are fetched) and offloading segments are spread
    evenly too. Units with a shared weight, and units updated on the device, keep their parameters there. So do very
    small units: anywhere else they would take a slot and a turn for almost nothing.

    Each stage of a pipeline has its share of the counts, as a model of its own.

    Each mix is made once, because a search meets the same mixes again and again.
    """
    known = setup.known_mixes
    if (found := known.get(mix)) is None:
        placed = _placed(setup, mix) if setup.given.pipeline_parallel == 1 else _placed_in_stages(setup, mix)
        found = known[mix] = _ours(
            setup,
            placed,
            zero_stage=mix.zero_stage,
            num_param_slots=mix.num_slots,
            num_state_slots=mix.num_state_slots,
            num_gradient_slots=mix.num_gradient_slots,
            num_nvme_slots=mix.num_nvme_slots,
            spill_gradients=mix.spill > 0,
        )
    return found


def _placed_in_stages(setup: Setup, mix: Mix) -> dict[str, UnitDecision]:
    stages = _stages(setup)
    places = [sum(stage.movable.values()) for stage in stages]
    sizes = [len(stage.units) for stage in stages]
    segments = [len(stage.swappable) for stage in stages]
    shares = {"num_keep": _kept(mix.num_keep, segments, setup.given)}
    for names, of_stages in (
        (("num_gpu", "num_stream", "num_nvme"), places),
        (("num_host", "num_on_nvme", "num_stay"), sizes),
        (("num_offload", "num_evict"), segments),
    ):
        shares |= {name: _shared_out(getattr(mix, name), of_stages) for name in names}
    units: dict[str, UnitDecision] = {}
    for number, stage in enumerate(stages):
        own = {name: share[number] for name, share in shares.items()}
        units |= _placed(stage, dataclasses.replace(mix, **own))
    for unit in setup.units:  # a stage updates its copy of shared weights with the last subgroup of the unit
        decided = units[unit.name]
        units[unit.name] = decided.model_copy(update={"update": decided.update[: len(pieces(setup, unit))]})
    return units


def _stages(setup: Setup) -> "list[Setup]":
    """Return the setups of a pipeline's stages, each a model of its own. They are made once."""
    if not setup.known_stages:
        whole = next(resident(setup))
        for number in range(setup.given.pipeline_parallel):
            units, decided, _ = stage_of(setup.units, whole, number)
            setup.known_stages.append(Setup(units, Sharding.of(decided), setup.storage))
    return setup.known_stages


def _shared_out(count: int, sizes: Sequence[int]) -> list[int]:
    """Return the share of each stage in a count, by its size."""
    total = max(sum(sizes), 1)
    ends = [round(count * end / total) for end in itertools.accumulate(sizes, initial=0)]
    return [end - begin for begin, end in itertools.pairwise(ends)]


def _kept(count: int, sizes: Sequence[int], given: Sharding) -> list[int]:
    """Return how many segments keep their activations in each stage, so that these take about the same memory.

    A stage keeps those of all its micro-batches between forward and backward: without rounds, of fewer in later stages.
    """
    num_stages, most = given.pipeline_parallel, given.num_micro_batches
    flying = [most if given.pipeline_rounds > 1 else min(num_stages - stage, most) for stage in range(num_stages)]
    kept = [0] * num_stages
    for _ in range(min(count, sum(sizes))):
        stages = (stage for stage in range(num_stages) if kept[stage] < sizes[stage])
        kept[min(stages, key=lambda stage: ((kept[stage] + 1) * flying[stage], -stage))] += 1
    return kept


def _placed(setup: Setup, mix: Mix) -> dict[str, UnitDecision]:
    counts = setup.movable
    fixed = setup.tied
    order = setup.in_turn
    fetchable = [
        unit.name in setup.large
        and unit.name not in fixed
        and (mix.zero_stage not in {1, 2} or setup.given.replicas(unit) == 1)
        for unit in order
    ]
    first_there = len(order) - min(mix.num_on_nvme, mix.num_host)
    there = [fetchable[i] and i >= first_there for i in range(len(order))]
    num_there = sum(counts[unit.name] for unit, whole in zip(order, there, strict=True) if whole)
    places = _spread(sum(counts.values()) - num_there, mix.num_gpu, mix.num_stream, max(mix.num_nvme - num_there, 0))
    ways = _activations(setup, mix)
    updates: dict[str, tuple[Place, ...]] = {}
    for unit, whole in zip(order, there, strict=True):
        if whole:
            updates[unit.name] = (Place.NVME,) * len(pieces(setup, unit))
        else:
            update = tuple(itertools.islice(places, counts[unit.name]))
            count = len(pieces(setup, unit))
            updates[unit.name] = update + update[-1:] * (count - len(update)) if update else (Place.GPU,) * count
    streaming = [unit.name for unit in order if Place.STREAM in updates[unit.name]]
    staying = set(streaming[: mix.num_stay])
    on_nvme = {unit.name for unit, whole in zip(order, there, strict=True) if whole}
    on_host = [
        unit.name
        for unit, can in zip(order, fetchable, strict=True)
        if can and unit.name not in on_nvme and Place.GPU not in updates[unit.name]
    ]
    num_host = mix.num_host - len(on_nvme)
    chosen = (
        _evenly(len(on_host), num_host) if mix.spread else [i >= len(on_host) - num_host for i in range(len(on_host))]
    )
    on_host = list(itertools.compress(on_host, chosen))
    where: dict[str, Any] = dict.fromkeys(on_host, "host") | dict.fromkeys(on_nvme, "nvme")
    return {
        unit.name: _decided(
            params=where.get(unit.name, "gpu"),
            activations=ways.get(unit.segment, "keep"),
            update=updates[unit.name],
            streamed_gradients="gpu" if unit.name in staying else "host",
        )
        for unit in order
    }


def _spread(total: int, num_gpu: int, num_stream: int, num_nvme: int) -> Iterator[Place]:
    num_gpu = min(num_gpu, total)
    yield from (Place.GPU,) * num_gpu
    streamed = _evenly(total - num_gpu, num_stream)
    from_nvme = iter(_evenly(streamed.count(False), num_nvme))
    for here in streamed:
        yield Place.STREAM if here else Place.NVME if next(from_nvme) else Place.CPU


def _activations(setup: Setup, mix: Mix) -> dict[str, Activations]:
    """Return the decision on activations of every segment that can recompute or offload them."""
    found: dict[str, Activations] = dict.fromkeys(setup.swappable, "keep")
    rest = list(found)[: max(len(found) - mix.num_keep, 0)]
    leave = dict(zip(rest, _evenly(len(rest), mix.num_offload), strict=True))
    evicted = iter(_evenly(sum(leave.values()), mix.num_evict))
    for segment, leaves in leave.items():
        found[segment] = "recompute" if not leaves else "offload-nvme" if next(evicted) else "offload"
    return found


def _evenly(total: int, count: int) -> list[bool]:
    """Choose ``count`` of ``total`` items in a row, evenly spaced (Bresenham)."""
    count = min(count, total)
    return [(i + 1) * count // total > i * count // total for i in range(total)]


_decided = functools.lru_cache(4096)(UnitDecision)  # most units have equal decisions, in all mixes of a search
