"""Experts as units of their own, shared by ranks, unevenly visited: they add up, and are placed one by one."""

from pathlib import Path

import pytest
from amount import ALL, examples
from hazards import violations
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import machine
from walked import ordered_by_rules

from planner.choices.request import Request
from planner.costs.layout import Layout
from planner.costs.model import CostModel
from planner.decisions import Decisions, Place, Sharding, UnitDecision
from planner.graph import Batch, Collective, Unit, build_graph, segments, units
from planner.lowering import lower
from planner.models import ModelConfigError, resolve_model
from planner.models.formulas import experts as expert_rules
from planner.models.kernels import flop
from planner.placements import mixed
from planner.plan.document import Plan
from planner.plan.planning import make_plan
from planner.schedule.tasks import Lane, MemoryClass, Op
from planner.setup import Mix, Setup
from planner.verification import verify

TINY = resolve_model(str(Path(__file__).parents[2] / "data" / "tiny-moe.json"))
UNVISITED = ((0.5, 0.25, 0.25, 0, 0, 0, 0, 0),)


def share(**batch: object) -> tuple[Unit, ...]:
    sizes = {"micro_batch": 2, "seq_len": 64, **batch}
    return units(build_graph(TINY, Batch(**sizes)))  # type: ignore[arg-type]


def totals(found: tuple[Unit, ...]) -> tuple[int, ...]:
    return (
        sum(unit.num_params for unit in found),
        sum(unit.saved_bytes for unit in found),
        sum(flop(unit.forward) for unit in found),
        sum(flop(unit.backward) for unit in found),
        sum(flop(unit.recompute) for unit in found),
    )


@pytest.mark.parametrize("expert_units", [2, 3, 8, 100])
def test_units_of_experts_add_up_to_the_bank(expert_units: int) -> None:
    whole, separate = share(), share(expert_units=expert_units)
    assert totals(separate) == totals(whole)
    layer = [unit.name for unit in separate if unit.segment == "layers.1"]
    # As few units as hold equal numbers of experts: 8 of them in 3 units are 3 + 3 + 2.
    assert len(layer) == 1 + min(expert_units, 8)
    names = [spec.name for unit in separate for spec in unit.parameters]
    assert len(names) == len(set(names))
    if expert_units == 2:
        assert layer == ["layers.1.attn", "layers.1.experts.0-3", "layers.1.experts.4-7"]
        assert "model.layers.1.mlp.experts.gate_up_proj[4:8]" in names
    # What is around experts belongs to their neighbours: no unit is without parameters.
    assert all(unit.num_params for unit in separate)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_share_experts(ranks: int) -> None:
    whole, part = share(expert_units=8), share(expert_units=8, expert_parallel=ranks)
    experts = [[u for u in found if ".experts" in u.name] for found in (whole, part)]
    assert sum(u.num_params for u in experts[0]) == ranks * sum(u.num_params for u in experts[1])
    # Tokens of all ranks visit a rank's experts: if none is visited more than another, it computes as much as before.
    assert sum(flop(u.forward) for u in experts[0]) == sum(flop(u.forward) for u in experts[1])
    assert [u.num_params for u in whole if u not in experts[0]] == [u.num_params for u in part if u not in experts[1]]
    visit_bytes = 2 * 64 * TINY.experts_per_token * TINY.hidden_size * 2
    for direction in ("forward", "backward"):
        swaps = [k for u in part for k in getattr(u, direction) if isinstance(k, Collective)]
        assert swaps == [Collective(visit_bytes, ranks, kind="all-to-all")] * 2 * TINY.num_layers


def test_time_of_an_all_to_all() -> None:
    inside = machine(devices_per_node=4)
    cost = CostModel(inside, share(expert_parallel=4), Sharding(data_parallel=4, expert_parallel=4))
    fabric = inside.intra_node
    assert fabric is not None
    swap = Collective(10**8, 4, kind="all-to-all")
    assert cost.compute_s([swap]) == pytest.approx(10**8 * 3 / 4 / fabric.bytes_per_s.value + fabric.latency_s.value)
    across = machine(devices_per_node=2)
    cost = CostModel(across, share(expert_parallel=4), Sharding(data_parallel=4, expert_parallel=4))
    between = across.inter_node
    assert between is not None and across.intra_node is not None
    slower_s = max(10**8 * 2 / 4 / between.bytes_per_s.value, 10**8 / 4 / across.intra_node.bytes_per_s.value)
    latencies_s = between.latency_s.value + across.intra_node.latency_s.value
    assert cost.compute_s([swap]) == pytest.approx(slower_s + latencies_s)


def test_groups_of_a_layout() -> None:
    layout = Layout(data=16, tensor=1, pipeline=1, devices_per_node=8)
    assert (layout.parts(4).per_node, layout.parts(4).nodes) == (4, 1)
    assert (layout.replicas(4).per_node, layout.replicas(4).nodes) == (2, 2)
    assert (layout.parts(16).per_node, layout.parts(16).nodes) == (8, 2)
    assert (layout.replicas(16).per_node, layout.replicas(16).nodes) == (1, 1)


@given(st.lists(st.floats(0.0, 1.0), min_size=8, max_size=8).filter(lambda row: sum(row) > 0.1), st.integers(1, 5000))
@settings(deadline=None, max_examples=examples(50))
def test_visits_in_proportion_to_shares(row: list[float], total: int) -> None:
    shares = tuple(share / sum(row) for share in row)
    counts = expert_rules.whole(shares, total)
    assert sum(counts) == total
    assert all(abs(count - share * total) < 1 for count, share in zip(counts, shares, strict=True))


def test_the_busiest_rank_stands_for_all() -> None:
    load = (expert_rules.zipf(8, 1.0),)
    even, uneven = share(expert_parallel=4, expert_units=8), share(expert_parallel=4, expert_units=8, expert_load=load)
    assert sum(flop(u.forward) for u in uneven) > 1.5 * sum(flop(u.forward) for u in even)
    # The busiest of 4 ranks has the two most visited experts of 8.
    assert sum(load[0][:2]) == pytest.approx((1 + 1 / 2) / sum(1 / i for i in range(1, 9)))
    batch = Batch(2, 64, expert_parallel=4, expert_load=load)
    assert sum(expert_rules.tokens(TINY, batch, 0)) == pytest.approx(sum(load[0][:2]) * 4 * 2 * 64 * 2, abs=2)


def test_what_cannot_be_shared_or_loaded_is_named() -> None:
    for options, message in (
        ({"expert_parallel": 3}, "num_experts of tiny-moe is 8, which 3 expert-parallel ranks cannot share"),
        ({"expert_load": ((0.5, 0.5),)}, r"has 2 shares that add up to 1, .* has 8 experts"),
        ({"expert_load": ((0.125,) * 8,) * 3}, "the load has 3 rows, but tiny-moe has 2 layers"),
    ):
        with pytest.raises(ModelConfigError, match=message):
            share(**options)
    with pytest.raises(ModelConfigError, match="opt-125m has no experts"):
        build_graph(resolve_model("opt-125m"), Batch(1, 64, expert_parallel=2))


def test_an_expert_that_no_token_visits_computes_nothing() -> None:
    load = ((0.5, 0.5, 0, 0, 0, 0, 0, 0),)
    idle = next(unit for unit in share(expert_units=8, expert_load=load) if unit.name == "layers.0.experts.5")
    assert not idle.forward and not idle.backward and idle.num_params


@st.composite
def shared_decisions(draw: st.DrawFn) -> tuple[tuple[Unit, ...], Decisions]:
    """Return anything that can be decided for experts shared by some of the ranks."""
    ranks, parts = draw(st.sampled_from([(2, 2), (4, 2), (4, 4)]))
    load = draw(st.sampled_from([(), UNVISITED]))
    found = share(expert_parallel=parts, expert_units=draw(st.sampled_from([1, 2, 8])), expert_load=load)
    given = Decisions(
        policy="test",
        units={},
        data_parallel=ranks,
        expert_parallel=parts,
        zero_stage=draw(st.integers(0, 3)),
        num_micro_batches=draw(st.integers(1, 2)),
        subgroup_params=draw(st.sampled_from([30_000, 10**8])),
        num_param_slots=draw(st.integers(1, 3)),
    )
    decided = {}
    for segment in segments(found):
        activations = draw(st.sampled_from(["keep", "recompute"])) if segment[0].recompute else "keep"
        for unit in segment:
            update = tuple(
                draw(st.sampled_from([Place.GPU, Place.STREAM, Place.CPU])) for _ in given.piece_params(unit)
            )
            away = Place.GPU not in update and not given.regathers(unit) and not unit.shared_units
            params = draw(st.sampled_from(["gpu", "host"])) if away else "gpu"
            decided[unit.name] = UnitDecision(params=params, activations=activations, update=update)
    return found, given.model_copy(update={"units": decided})


@given(shared_decisions())
@settings(deadline=None, max_examples=examples(60))
def test_schedules_of_shared_experts_are_safe_and_hold_what_they_should(case) -> None:
    found, decisions = case
    schedule = lower(found, decisions, asynchronous=True)
    assert violations(schedule, found, decisions, ordered_by_rules(schedule)) == []
    collectives = {task.unit for task in schedule.tasks if task.lane is Lane.COLLECTIVE}
    for unit in found:
        # Ranks with different experts have nothing to add up or to gather.
        assert (unit.name in collectives) == (decisions.replicas(unit) > 1)
        # What no token visits is not brought to the device.
        brought = {task.op for task in schedule.tasks if task.unit == unit.name} & {Op.FETCH, Op.GATHER}
        assert unit.forward or not brought or decisions.regathers(unit)
    held = sum(b.num_bytes for b in schedule.buffers if b.memory_class is MemoryClass.OPTIMIZER and b.first is None)
    slots = sum(b.num_bytes for b in schedule.buffers if b.label.startswith("state slot"))
    assert held - slots == 12 * sum(decisions.shard_params(unit) for unit in found)


def test_the_device_holds_the_most_visited() -> None:
    """Where memory lets few experts be updated on the device, they are those that tokens visit."""
    setup = Setup(share(expert_units=8, expert_load=(tuple(reversed(expert_rules.zipf(8, 1.0))),)))
    decisions = mixed(setup, Mix(num_gpu=5, num_stream=0, num_keep=0, num_host=100))
    resident = {name for name, unit in decisions.units.items() if unit.update == (Place.GPU,)}
    assert resident >= {"embed", "layers.0.attn", "layers.0.experts.7", "layers.0.experts.6", "layers.0.experts.5"}
    assert not resident & {f"layers.0.experts.{i}" for i in range(5)}


@pytest.mark.part(2)
@pytest.mark.parametrize("load", [(), UNVISITED, (expert_rules.zipf(8, 1.2),)])
def test_plans_with_experts_are_verified(load: tuple[tuple[float, ...], ...]) -> None:
    profile = machine(gpu_bytes=9e6, cpu_params_per_s=5e7, devices_per_node=2)
    request = Request(
        TINY, profile, num_devices=2, seq_len=64, micro_batch=1, expert_units=8, expert_parallel=2, expert_load=load
    )
    plan = make_plan(request, 60)
    verify(Plan.model_validate_json(plan.to_json()))
    assert plan.decisions.expert_units == 8
    assert plan.decisions.pipeline_parallel == 1


def test_experts_one_by_one_are_no_slower_than_as_a_whole() -> None:
    profile = machine(gpu_bytes=1.2e7, cpu_params_per_s=5e7)
    requests = (Request(TINY, profile, seq_len=64, micro_batch=2, expert_units=n) for n in (1, 8))
    times_s = [make_plan(request, None if ALL else 100).prediction.iteration_s for request in requests]
    assert times_s[1] <= times_s[0] * 1.02
