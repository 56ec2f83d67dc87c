"""One representative of equal ranks takes what each of them takes: see [Note: Fluid sharing]."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from amount import examples
from cases import decide, small_units
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.simulator.reference import FluidTask, built
from hwprofiles.profile import HardwareProfile
from hwprofiles.registry import load_profile
from planner.costs.model import CostModel
from planner.costs.resources import Resource
from planner.decisions import Place, Sharding
from planner.lowering import lower
from planner.simulate.kernel import simulate
from planner.simulate.machine import system_of
from planner.simulate.system import Capacity, FluidSystem, capacity_rows

AMOUNTS = st.sampled_from([0.5, 1.0, 2.0, 3.0]) | st.floats(0.1, 10.0)
TIMES = st.just(0.0) | AMOUNTS


def unfold(
    system: FluidSystem, capacity: Sequence[Capacity], num_ranks: int, sharers: Mapping[int, int]
) -> FluidSystem:
    """Return a system of equal ranks, each with lanes of its own.

    Args:
        system: tasks of one rank; its capacities do not matter.
        capacity: of each resource, whole.
        num_ranks: how many ranks, one after another in the result.
        sharers: of each resource that ranks share, how many (adjacent ones) share one; the others are each rank's own.
    """
    num_preds, num_uses, ranks = len(system.pred), len(system.use_rate), np.arange(num_ranks)[:, np.newaxis]
    group = np.array([sharers.get(r, 1) for r in range(len(capacity))], dtype=np.int64)
    return FluidSystem(
        lane=(ranks * system.num_lanes + system.lane).ravel(),
        latency_s=np.tile(system.latency_s, num_ranks),
        duration_s=np.tile(system.duration_s, num_ranks),
        weight=np.tile(system.weight, num_ranks),
        pred_ptr=np.append(ranks * num_preds + system.pred_ptr[:-1], num_ranks * num_preds),
        pred=(ranks * system.num_tasks + system.pred).ravel(),
        use_ptr=np.append(ranks * num_uses + system.use_ptr[:-1], num_ranks * num_uses),
        use_resource=(num_ranks * system.use_resource + ranks // group[system.use_resource]).ravel(),
        use_rate=np.tile(system.use_rate, num_ranks),
        capacity=np.repeat(capacity_rows(capacity), num_ranks, axis=0),
    )


def check(folded: FluidSystem, capacity: Sequence[Capacity], num_ranks: int, sharers: Mapping[int, int]) -> None:
    """Compare the representative with every one of the ranks."""
    expected = simulate(folded)
    slack_s = 1e-11 * expected[1].max()
    for times_s, expected_s in zip(simulate(unfold(folded, capacity, num_ranks, sharers)), expected, strict=True):
        for of_rank_s in np.split(times_s, num_ranks):
            np.testing.assert_allclose(of_rank_s, expected_s, rtol=1e-9, atol=slack_s)


def fold_capacity(capacity: Capacity, num_ranks: int) -> Capacity:
    """Return one rank's capacity of a resource that ``num_ranks`` equal ranks share."""
    if not isinstance(capacity, Sequence):
        return capacity / num_ranks
    last = len(capacity) - 1
    users = range(num_ranks, len(capacity) + num_ranks, num_ranks)  # k users of one rank are k * num_ranks of all
    return [capacity[min(count - 1, last)] / num_ranks for count in users]


def fold(capacity: Sequence[Capacity], sharers: Mapping[int, int]) -> list[Capacity]:
    return [fold_capacity(amount, sharers.get(r, 1)) for r, amount in enumerate(capacity)]


@st.composite
def ranks(draw: st.DrawFn) -> tuple[list[FluidTask], list[Capacity], int, dict[int, int]]:
    num_lanes, num_resources, num_ranks = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(2, 6))
    tasks = [
        FluidTask(
            lane=draw(st.integers(0, num_lanes - 1)),
            duration_s=draw(TIMES),
            latency_s=draw(TIMES),
            after=sorted(draw(st.sets(st.integers(max(0, i - 4), i - 1), max_size=2))) if i else (),
            uses=draw(st.dictionaries(st.integers(0, num_resources - 1), AMOUNTS)),
            weight=draw(st.sampled_from([1.0, 0.25, 2.0])),
        )
        for i in range(draw(st.integers(1, 10)))
    ]
    capacity = [draw(AMOUNTS | st.lists(AMOUNTS, min_size=1, max_size=9)) for _ in range(num_resources)]
    groups = [n for n in range(1, num_ranks + 1) if num_ranks % n == 0]
    return tasks, capacity, num_ranks, {r: draw(st.sampled_from(groups)) for r in range(num_resources)}


@settings(max_examples=examples(200), deadline=None)
@given(ranks())
def test_a_representative_takes_what_every_rank_takes(case) -> None:
    """With resources of each rank alone, of some ranks together or of all, and capacities that depend on users."""
    tasks, capacity, num_ranks, sharers = case
    check(built(tasks, fold(capacity, sharers)), capacity, num_ranks, sharers)


def test_users_of_all_ranks_count() -> None:
    """Of four ranks with one copy each, a disk has four users; that of a representative with one copy must know."""
    disk = [4.0, 6.0, 7.0, 8.0, 8.5]
    tasks = [FluidTask(0, 1.0, uses={0: 3.0}), FluidTask(1, 2.0, uses={0: 3.0})]
    assert fold_capacity(disk, 4) == [2.0, 8.5 / 4]
    assert fold_capacity(disk, 2) == [3.0, 4.0, 4.25]
    assert fold_capacity(disk, 1) == disk
    assert fold_capacity(8.0, 4) == 2.0
    check(built(tasks, [fold_capacity(disk, 4)]), [disk], 4, {0: 4})
    with pytest.raises(AssertionError):  # each number of users divided, as if only one rank's copies counted
        check(built(tasks, [[amount / 4 for amount in disk]]), [disk], 4, {0: 4})


@pytest.mark.parametrize("wrong", [lambda c: c, lambda c: fold_capacity(c, 3)])
def test_a_wrong_share_shows(wrong) -> None:
    tasks = [FluidTask(0, 1.0, uses={0: 1.0}), FluidTask(1, 1.0, uses={0: 1.0})]
    with pytest.raises(AssertionError):
        check(built(tasks, [wrong(2.0)]), [2.0], 2, {0: 2})


def test_ranks_that_start_apart_cannot_be_folded() -> None:
    """Why the note asks for it: copies that do not meet are faster than the representative's share."""
    tasks = [FluidTask(0, 1.0, uses={0: 1.0}), FluidTask(1, 1.0, latency_s=1.0, uses={0: 1.0})]
    assert simulate(built(tasks, [1.0]))[1].tolist() == [1.0, 2.0]
    assert simulate(built(tasks[:1], [fold_capacity(1.0, 2)]))[1].tolist() == [2.0]


def whole(profile: HardwareProfile, cost: CostModel) -> tuple[list[Capacity], dict[int, int]]:
    """Return what a node has, read off its profile, and how many ranks share each of it."""
    link, host = profile.host_link, profile.host
    on_uplink = min(cost.ranks_per_node, profile.devices_per_uplink())
    rows: dict[Resource, tuple[float, int]] = {
        Resource.DEVICE: (1.0, 1),
        Resource.CORES: (host.num_cores, cost.ranks_per_node),
        Resource.DRAM: (host.dram_bytes_per_s.value, cost.ranks_per_node),
        Resource.LINK_DOWN: (link.down.best_rate_per_s(), on_uplink),
        Resource.LINK_UP: (link.up.best_rate_per_s(), on_uplink),
        Resource.LINK: (link.both_bytes_per_s.value, on_uplink),
        Resource.FABRIC: (1.0, 1),
    }
    # What these schedules do not use, drives and what writes checkpoints, is the rank's own.
    rows |= {r: (amount, 1) for r, amount in cost.capacities().items() if r not in rows}
    return [rows[r][0] for r in Resource], {r: rows[r][1] for r in Resource}


@settings(max_examples=examples(20), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(["a100x8-nvlink", "polaris-a100-40g"]),
    st.sampled_from([2, 4]),
    st.sampled_from([Place.CPU, Place.STREAM]),
    st.booleans(),
    st.lists(st.floats(0.2, 1.0), min_size=1, max_size=9),
)
def test_a_lowered_schedule(name: str, num_ranks: int, place: Place, clip: bool, efficiency: list[float]) -> None:
    """Three iterations of a real schedule on a real node, of which the DRAM also suffers from many users."""
    profile = load_profile(name)
    units = small_units()
    decisions = decide(units, place, data_parallel=num_ranks, zero_stage=3, clip=clip)
    cost = CostModel(profile, units, Sharding(data_parallel=num_ranks))
    schedule = lower(units, decisions, asynchronous=True)
    capacity, sharers = whole(profile, cost)
    assert [cost.capacities()[r] for r in Resource] == fold(capacity, sharers)
    capacity[Resource.DRAM] = [profile.host.dram_bytes_per_s.value * part for part in efficiency]
    folded = dict(zip(Resource, fold(capacity, sharers), strict=True))
    # Three times what they use, so that they compete wherever they meet.
    prices = [dataclasses.replace(p, uses=tuple((r, 3 * a) for r, a in p.uses)) for p in cost.prices(schedule)]
    check(system_of(schedule, prices, folded, 3), capacity, num_ranks, sharers)
