"""A batch divided among devices of several kinds."""

import dataclasses
import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import machine

from hwprofiles.profile import HardwareProfile
from planner.choices.request import Request
from planner.lowering import agreed
from planner.models import resolve_model
from planner.plan.planning import InfeasibleError, find
from planner.plan.unlike import least_longest, make_unlike_plan
from planner.verification import verify

MODEL = resolve_model("demo-llama").model_copy(update={"num_layers": 2})


def kind(name: str, flop_per_s: float = 1e13, **sizes: float) -> HardwareProfile:
    found = machine(devices_per_node=4, flop_per_s=flop_per_s, issue_s=1e-7, **sizes)  # type: ignore[arg-type]
    return found.model_copy(update={"name": name})


FAST, SLOW = kind("fast"), kind("slow", 1e13 / 3)


def request(**options: object) -> Request:
    return Request(MODEL, FAST, **{"seq_len": 256, "global_batch": 12} | options)  # type: ignore[arg-type]


def test_no_other_division_is_faster() -> None:
    """Every division into one micro-batch or several is planned, each kind with whatever placement is best there."""
    plan = make_unlike_plan(request(), [(FAST, 2), (SLOW, 1)])
    counts = {"fast": 2, "slow": 1}
    assert [(each.hardware.name, [*each.ranks]) for each in plan.kinds()] in (
        [("fast", [0, 1]), ("slow", [2])],
        [("slow", [0]), ("fast", [1, 2])],
    )
    own = {each.hardware.name: each.decisions for each in plan.kinds()}
    assert sum(own[name].micro_batch * counts[name] for name in counts) * plan.decisions.num_micro_batches == 12
    assert plan.decisions.num_sequences == 12
    assert own["fast"].micro_batch > own["slow"].micro_batch

    def time_s(hardware: HardwareProfile, size: int, count: int) -> float:
        alone = request(num_devices=3, micro_batch=size, num_micro_batches=count, global_batch=None)
        return find(dataclasses.replace(alone, hardware=hardware)).prediction.iteration_s

    times = [
        max(time_s(FAST, size, count), time_s(SLOW, 12 // count - 2 * size, count))
        for count in (1, 2)
        for size in range(1, (12 // count - 1) // 2 + 1)
    ]
    assert plan.prediction.iteration_s == max(each.prediction.iteration_s for each in plan.kinds())
    assert plan.prediction.iteration_s <= 1.02 * min(times)
    assert plan.divisions_bound_s is not None
    assert plan.divisions_bound_s <= min(times)
    rows = {row.name: row.iteration_s for row in plan.engines}
    assert rows.keys() == {"equal shares", "2 x fast", "1 x slow"}
    assert all(row_s is not None and row_s > plan.prediction.iteration_s for row_s in rows.values())


def test_like_devices_have_equal_shares() -> None:
    plan = make_unlike_plan(request(global_batch=8, num_micro_batches=1), [(FAST, 2), (FAST, 2)])
    assert len(set(plan.decisions.shares or ())) == 1


def test_ranks_agree_on_collectives() -> None:
    """One kind has little memory, so it updates on the host; each statement can be checked."""
    small = kind("small", 1e13 / 2, gpu_bytes=75e6)
    plan = make_unlike_plan(request(precision="fp32", num_micro_batches=2), [(FAST, 1), (small, 1), (SLOW, 1)])
    parts = [plan.of_rank(rank) for rank in range(3)]
    assert len({agreed(part.schedule(), part.decisions) for part in parts}) == 1
    assert len({part.hardware.name for part in parts}) == 3
    own = {part.hardware.name: part.decisions.units for part in parts}
    assert own["small"] != own["fast"]
    assert all(part.prediction.fits for part in parts)
    verify(plan)
    first, *others = plan.others or ()
    faster = first.prediction.model_copy(update={"iteration_s": first.prediction.iteration_s / 2})
    forged = plan.model_copy(update={"others": (first.model_copy(update={"prediction": faster}), *others)})
    with pytest.raises(ValueError, match="s per iteration, but it takes"):
        verify(forged)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"global_batch": None}, "--global-batch"),
        ({"tensor_parallel": 2}, "tensor_parallel is 2, but devices of several kinds are data-parallel"),
        ({"micro_batch": 2}, "micro_batch is 2"),
        ({"global_batch": 2}, "cannot be divided among 3 devices"),
        ({"num_micro_batches": 5}, "cannot be divided among 3 devices"),
    ],
)
def test_what_cannot_be_divided_is_refused_in_one_line(options: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)) as refused:
        make_unlike_plan(request(**options), [(FAST, 2), (SLOW, 1)])
    assert "\n" not in str(refused.value)


def test_a_kind_without_a_network_is_named() -> None:
    alone = machine(inter_node=False).model_copy(update={"name": "alone"})
    with pytest.raises(ValueError, match="alone has no network between nodes"):
        make_unlike_plan(request(), [(FAST, 2), (alone, 1)])


def test_a_kind_with_little_memory_has_as_much_as_fits() -> None:
    """By its speed it would have three quarters of the batch."""
    small = kind("small", gpu_bytes=30e6)
    plan = make_unlike_plan(request(num_micro_batches=1), [(small, 1), (SLOW, 1)])
    shares = {each.hardware.name: each.decisions.micro_batch for each in plan.kinds()}
    assert shares == {"small": 2, "slow": 10}
    more = dataclasses.replace(request(num_devices=2, micro_batch=3, global_batch=None), hardware=small)
    with pytest.raises(InfeasibleError):
        find(more)


def test_a_kind_that_is_too_small_is_named() -> None:
    tiny = kind("tiny", gpu_bytes=1e6, host_bytes=1e6, nvme_bytes=0)
    with pytest.raises(InfeasibleError, match=r"does not fit on .* of tiny"):
        make_unlike_plan(request(), [(FAST, 1), (tiny, 1)])


@given(st.lists(st.lists(st.floats(0, 10), min_size=1, max_size=6), min_size=1, max_size=3), st.data())
def test_the_bound_is_the_least_longest_of_all_divisions(times: list[list[float]], data: st.DataObject) -> None:
    tables = [dict(enumerate(of_kind, start=1)) for of_kind in times]
    total = sum(data.draw(st.integers(1, len(table))) for table in tables)
    found_s, shares = least_longest(tables, total)
    ways = itertools.product(*(table.items() for table in tables))
    expected = min(max(time_s for _, time_s in way) for way in ways if sum(share for share, _ in way) == total)
    assert found_s == expected
    assert sum(shares) == total
    assert max(table[share] for table, share in zip(tables, shares, strict=True)) == found_s
