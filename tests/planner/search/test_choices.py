"""Degrees and batch sizes: what is fixed stays fixed, what is open is chosen, and all of it is in the certificate."""

import dataclasses
import itertools
import json
import math
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from amount import ALL, examples
from cases import small_units, staged
from hazards import violations
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import machine
from walked import ordered_by_rules

from hwprofiles.registry import load_profile
from planner.bounds.certificate import certify, check, computing_s
from planner.bounds.conditions import conditions, decided
from planner.bounds.program import bound
from planner.bounds.solver import solve
from planner.choices.choice import choices
from planner.choices.request import Request, batch_of
from planner.choices.variants import Variant, variants
from planner.costs.model import CostModel
from planner.decisions import BF16, Choice, Decisions, Place, Sharding
from planner.graph import Batch, Unit, build_graph, units
from planner.lowering import lower
from planner.lowering.stages import of_stages
from planner.lowering.workspace import least_workspace_bytes
from planner.models import resolve_model
from planner.models.formulas.work import attention_scratch_bytes
from planner.models.kernels import Attention, Collective
from planner.models.patterns import Pattern
from planner.placements import mixed, resident
from planner.plan.competition import _lags, _Look, compete
from planner.plan.document import Plan
from planner.plan.planning import make_plan
from planner.schedule.tasks import Tier
from planner.search import Candidate, End, Scorer, descents, search
from planner.setup import Mix, Setup
from planner.verification import verify
from ullage.rivals import make_plan as rivals_plan

OPT, LLAMA, MIXTRAL = (resolve_model(name) for name in ("opt-125m", "llama-3-8b", "mixtral-8x7b"))


@pytest.mark.parametrize(("profile", "takes"), [("h100", True), ("epyc-turin-2c", False)])
def test_attention_takes_scratch_on_a_gpu_alone(profile, takes) -> None:
    batch = batch_of(Choice(micro_batch=8), BF16, 1024, (), load_profile(profile))
    attention = [unit for unit in units(build_graph(OPT, batch)) if unit.name == "layers.3.attn"]
    plain = [unit for unit in units(build_graph(OPT, Batch(8, 1024))) if unit.name == "layers.3.attn"]
    more_bytes = least_workspace_bytes(*attention, 2) - least_workspace_bytes(*plain, 2)
    scratch_bytes = attention_scratch_bytes(Attention(8, 12, 1024, 64), grouped=False, e=2)
    assert 0 < more_bytes <= scratch_bytes if takes else more_bytes == 0


def collectives(profile: str, num_devices: int, wanted: Literal["fabric", "host"] | None = None) -> set[str | None]:
    asked = Request(OPT, load_profile(profile), num_devices=num_devices, pipeline_parallel=1, collectives=wanted)
    return {variant.choice.collectives for variant in variants(asked)}


def test_collectives_go_the_faster_way_or_the_one_that_was_asked_for() -> None:
    assert collectives("rtx-4090x8", 8) == collectives("a100x8-nvlink", 8, "host") == {"host"}
    assert collectives("a100x8-nvlink", 8) == collectives("rtx-4090x8", 8, "fabric") == {None}
    assert collectives("rtx-4090x8", 1) == collectives("rtx-4090x8", 1, "host") == {None}
    with pytest.raises(ValueError, match="16 data-parallel ranks are on 2 nodes; leave --parallel collectives=host"):
        collectives("a100-cluster", 16, "host")


@given(
    st.sampled_from([OPT, MIXTRAL]),
    st.sampled_from([1, 2, 4, 6, 8, 16]),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([None, 8, 12, 32]),
    st.sampled_from([None, 1, 2]),
    st.sampled_from([None, 1, 2]),
)
@settings(deadline=None, max_examples=examples(100))
def test_choices_are_what_was_asked_for(model, num_devices, per_node, batch, tensor, micro_batch) -> None:
    asked = Request(model, machine(devices_per_node=per_node), num_devices=num_devices, tensor_parallel=tensor)
    if num_devices % (tensor or 1):
        with pytest.raises(ValueError, match="must divide the"):
            choices(asked)
        return
    try:
        found = choices(dataclasses.replace(asked, global_batch=batch, micro_batch=micro_batch, expert_units=8))
    except ValueError as error:
        assert batch is not None and "cannot be cut" in str(error)
        return
    assert len(set(found)) == len(found)
    for choice in found:
        assert choice.data_parallel * choice.tensor_parallel * choice.pipeline_parallel == num_devices
        assert choice.data_parallel % choice.expert_parallel == choice.data_parallel % choice.context_parallel == 0
        assert tensor in {None, choice.tensor_parallel}
        assert micro_batch in {None, choice.micro_batch}
        if tensor is None:
            assert per_node % choice.tensor_parallel == 0
        if batch:
            assert choice.num_sequences == batch
        else:
            assert choice.pipeline_parallel == choice.expert_parallel == choice.num_micro_batches == 1
            assert choice.context_parallel == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel": 5}, "tensor 5 x pipeline 1 must divide the 8 device"),
        ({"expert_parallel": 2}, "opt-125m has no experts"),
        (
            {"context_parallel": 8, "context_exchange": "all-to-all"},
            "has 12 heads and 12 of keys on a rank, which 8 context-parallel ranks cannot share",
        ),
        (
            {"context_parallel": 8, "context_exchange": "ring", "seq_len": 1032},
            "sequences of 1032 tokens cannot be cut into two equal parts for each of 8",
        ),
        ({"context_parallel": 4, "seq_len": 1026}, "sequences of 1026 tokens cannot be shared equally by 4"),
        ({"context_parallel": 3, "seq_len": 6}, "context_parallel 3 must divide the 8 data-parallel ranks"),
        ({"tensor_parallel": 8}, "num_attention_heads of opt-125m is 12, which 8 tensor-parallel ranks cannot share"),
        ({"global_batch": 7, "micro_batch": 2}, "a global batch of 7 sequences cannot be cut"),
        ({"num_devices": 16, "pipeline_parallel": 16}, "has 12 layers, which 16 pipeline stages cannot share"),
        ({"pipeline_parallel": 4, "pipeline_rounds": 4}, "12 layers, which 4 pipeline stages cannot share in 4 rounds"),
        ({"context_exchange": "ring"}, "exchange=ring is of ranks that share sequences; leave it out, or choose"),
        ({"pipeline_order": "zero-bubble"}, "order=zero-bubble: it is of a pipeline's stages; leave it out"),
        ({"pipeline_rounds": 2}, "2 rounds are of a pipeline's stages; leave --parallel rounds out, or choose"),
    ],
)
def test_what_cannot_be_done_is_named(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choices(Request(OPT, machine(devices_per_node=8), **{"num_devices": 8, **options}))


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        ({"expert_parallel": 2}, "expert_parallel 2 must divide the 1 data-parallel ranks"),
        ({"context_exchange": "ring"}, "exchange=ring is of ranks that share sequences"),
        ({"pipeline_rounds": 2}, "2 rounds are of a pipeline's stages"),
        ({"pipeline_order": "zero-bubble"}, "order=zero-bubble: it is of a pipeline's stages"),
        ({"pipeline_parallel": 2, "segment_tile_sequences": 1}, "2 pipeline stages cannot compute tiles of sequences"),
        (
            {"pipeline_parallel": 2, "pipeline_order": "zero-bubble", "layer_tile_tokens": 8},
            "order=zero-bubble: gradients of weights are not made apart from backward beside tiles of layers",
        ),
    ],
)
def test_decisions_keep_the_same_rules(degrees: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Decisions(policy="test", units={}, **degrees)


@pytest.mark.parametrize(
    ("profile", "seq_len", "faster"),
    [("rtx-4090x8", 131072, "ring"), ("rtx-4090x8", 16384, None), ("h100", 65536, None)],
)
def test_keys_pass_on_where_that_is_faster(profile, seq_len, faster) -> None:
    """A ring sends more, but hides it behind attention: it pays over slow links, where sequences are long."""
    asked = Request(LLAMA, load_profile(profile), num_devices=8, context_parallel=8, seq_len=seq_len)
    ways = {found.choice.context_exchange: found for found in variants(asked)}
    assert ways.keys() == {None, "ring"}
    layer_s = {
        way: sum(
            found.cost.compute_s((*unit.forward, *unit.backward))
            for unit in found.setup.units
            if unit.name == "layers.0.attn"
        )
        for way, found in ways.items()
    }
    assert min(layer_s, key=layer_s.__getitem__) == faster


def test_stages_fill_their_bubble_where_they_can() -> None:
    """Either order is tried, unless one is asked for."""
    asked = Request(OPT, machine(devices_per_node=8), num_devices=8, pipeline_parallel=4, num_micro_batches=4)
    assert [choice.pipeline_order for choice in choices(asked)] == [None, "zero-bubble"]
    for order, wanted in (("1f1b", None), ("zero-bubble", "zero-bubble")):
        found = choices(dataclasses.replace(asked, pipeline_order=order))
        assert [choice.pipeline_order for choice in found] == [wanted]
    turning = dataclasses.replace(asked, pipeline_rounds=2)
    ways = [(choice.pipeline_rounds, choice.pipeline_order) for choice in choices(turning)]
    assert ways == [(2, None), (2, "zero-bubble")]


def test_ranks_may_be_more_than_heads_where_keys_pass_on() -> None:
    asked = Request(OPT, machine(devices_per_node=8), num_devices=8, context_parallel=8)
    assert {choice.context_exchange for choice in choices(asked)} == {"ring"}


def test_where_devices_exchange_through_the_host_layers_may_move_from_one_to_the_next() -> None:
    """With the same sequences, so that both ways can be compared; where degrees are given, they stay."""
    asked = Request(OPT, machine(devices_per_node=4, via_host_link=True), num_devices=4, micro_batch=2)
    alone, *moving = choices(asked)
    assert (alone.data_parallel, alone.pipeline_parallel) == (4, 1)
    for each in moving:
        assert (each.data_parallel, each.pipeline_parallel, each.pipeline_rounds) == (1, 4, 3)
        assert each.num_sequences == alone.num_sequences == 8
    assert [each.micro_batch for each in moving] == [2, 1]
    for other in (
        dataclasses.replace(asked, tensor_parallel=1),
        dataclasses.replace(asked, num_devices=8),
        dataclasses.replace(asked, hardware=machine(devices_per_node=4)),
    ):
        assert all(choice.pipeline_parallel == 1 for choice in choices(other))


def test_experts_fall_into_units_that_are_worth_moving() -> None:
    eight = machine(devices_per_node=8)
    for name, ranks, expected in (("mixtral-8x7b", 1, 8), ("mixtral-8x7b", 4, 2), ("qwen3-30b-a3b", 1, 6)):
        (choice,) = choices(Request(resolve_model(name), eight, num_devices=8, expert_parallel=ranks))
        assert choice.expert_units == expected
    (dense,) = choices(Request(OPT, eight, num_devices=8))
    assert dense.expert_units == 1


def request(**options: object) -> Request:
    hardware = machine(devices_per_node=4, gpu_bytes=2e8, cpu_params_per_s=1e8)
    model = resolve_model("demo-llama").model_copy(update={"num_layers": 4})
    return Request(model, **{"hardware": hardware, "seq_len": 128, **options})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def competed() -> Plan:
    return make_plan(request(num_devices=4, global_batch=16), 40)


def test_the_best_of_all_choices_wins(competed: Plan) -> None:
    """A choice planned by itself is no better, as far as the search can tell, and none beats the bound."""
    asked = request(num_devices=4, global_batch=16)
    rivals = variants(asked)
    assert len(rivals) > 10
    least_s = math.inf
    for variant in rivals if ALL else rivals[::4]:
        fixed = variant.choice.model_dump()
        del fixed["data_parallel"]
        fixed["context_exchange"] = fixed["context_exchange"] or "all-to-all"
        alone = make_plan(dataclasses.replace(asked, global_batch=None, **fixed), 40)
        least_s = min(least_s, alone.prediction.iteration_s)
        assert competed.certificate.bound_s <= alone.prediction.iteration_s
        assert computing_s(variant) <= alone.prediction.iteration_s
    assert competed.prediction.iteration_s <= least_s * 1.02


def test_a_competition_is_verified(competed: Plan) -> None:
    verify(competed)
    proven = {proof.choice for proof in competed.certificate.proofs}
    assert len(proven) == len(variants(request(num_devices=4, global_batch=16)))
    data = json.loads(competed.to_json())
    del data["content_digest"]
    # To say that less was asked for than was, or to leave out a choice, is noticed.
    fewer = [p for p in data["certificate"]["proofs"] if p["choice"] != data["certificate"]["proofs"][-1]["choice"]]
    forged = json.loads(json.dumps(data))
    forged["certificate"]["proofs"] = fewer
    with pytest.raises(ValueError, match="there is none for"):
        verify(Plan.model_validate(forged).sealed())
    forged = json.loads(json.dumps(data))
    forged["constraints"]["global_batch"] = 8
    with pytest.raises(ValueError, match="do not match its request"):
        verify(Plan.model_validate(forged).sealed())


def test_plans_over_slow_networks_keep_their_parameters_still() -> None:
    """Where gathering parameters between nodes is slow, pipeline stages or tensor parallelism take over."""
    fast = machine(devices_per_node=4, gpu_bytes=2e8)
    assert fast.inter_node is not None
    slow_rate = fast.inter_node.bytes_per_s.model_copy(update={"value": 2e7})
    slow = fast.model_copy(update={"inter_node": fast.inter_node.model_copy(update={"bytes_per_s": slow_rate})})
    plan = rivals_plan(request(hardware=slow, num_devices=8, global_batch=16), 40)
    assert plan.decisions.pipeline_parallel > 1
    assert {engine.name for engine in plan.engines} >= {"gpu-only", "zero-offload"}
    verify(plan)


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("num_layers", [0, 3, 100])
@pytest.mark.parametrize(("num_stages", "num_rounds"), [(2, 1), (3, 1), (2, 3), (3, 2)])
def test_pipelines_satisfy_their_conditions(num_stages: int, num_rounds: int, num_layers: int, stage: int) -> None:
    units = small_units("demo-llama", 6)
    degrees = {"data_parallel": 2, "pipeline_parallel": num_stages, "pipeline_rounds": num_rounds}
    setup = Setup(units, Sharding(**degrees, num_micro_batches=4))
    profile = machine(devices_per_node=4)
    free = Scorer(units, 64, CostModel(profile, units, setup.given))
    decisions = staged(setup, num_layers, stage)
    prediction = free.predict(decisions)
    exact = machine(devices_per_node=4, gpu_bytes=max(use.peak_bytes for use in prediction.memory.values()))
    variant = Variant(request(), setup, CostModel(exact, units, setup.given))
    for each in variant.setup.stages():
        if each.given.zero_stage == stage:
            program = decided(conditions(each, variant.cost, 1e9), units, decisions)
            solution = solve(program)
            assert solution is not None
            assert bound(program, solution.multipliers) <= prediction.iteration_s * (1 + 1e-9)
            assert solution.value >= 0.8 * prediction.iteration_s


@pytest.mark.part(2)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_pipeline_moves_state_to_the_host_and_then_weights_as_little_as_fits(ranks: int) -> None:
    units = small_units("demo-llama", 6)
    setup = Setup(units, Sharding(pipeline_parallel=2, data_parallel=ranks, num_micro_batches=4))
    free = Scorer(units, 64, CostModel(machine(devices_per_node=4), units, setup.given))
    least_bytes = free.predict(staged(setup, 0, 1 if ranks > 1 else 0)).memory[Tier.GPU].peak_bytes
    there, fetched, seconds = [], [], []
    for share in (1.0, 0.7, 0.5, 0.35, 0.25, 0.17):
        cost = CostModel(machine(devices_per_node=4, gpu_bytes=share * least_bytes), units, setup.given)
        scorer = Scorer(units, 64, cost)
        best = search(setup, scorer, 100)
        if best.missing_bytes:  # also with all of it on the host
            break
        decided_units = best.decisions.units
        updates = [place for unit in decided_units.values() for place in unit.update]
        there.append(1 - updates.count(Place.CPU) / len(updates))  # on the device, resident or streamed
        seconds.append(best.iteration_s)
        fetched.append(sum(unit.fetched for unit in decided_units.values()))
        solution = solve(conditions(setup.changed(zero_stage=best.decisions.zero_stage), cost, 1e9))
        assert solution is not None
        assert solution.value <= scorer.predict(best.decisions).iteration_s * (1 + 1e-9)
    assert len(there) >= 5
    one = 1 / len(updates)  # subgroup may be streamed more where there is less memory
    assert all(later < earlier + 1.5 * one for earlier, later in itertools.pairwise(there))
    assert there[-1] < there[0] - 5 * one
    assert there[0] > 0.8
    assert seconds == sorted(seconds)
    assert fetched[0] == 0
    assert fetched[-1] > 0


@settings(max_examples=examples(100))
@given(st.integers(2, 3), st.integers(1, 2), st.integers(0, 14), st.integers(0, 14), st.integers(0, 7))
def test_stages_share_out_a_mix(num_stages: int, num_rounds: int, num_gpu: int, num_stream: int, num_keep: int) -> None:
    units = small_units("demo-llama", 7)
    given = {"pipeline_parallel": num_stages, "pipeline_rounds": num_rounds, "num_micro_batches": 4}
    setup = Setup(units, Sharding(**given))
    total = sum(setup.movable.values())
    num_stream = min(num_stream, total - min(num_gpu, total))
    decisions = mixed(setup, Mix(min(num_gpu, total), num_stream, num_keep))
    places = [place for unit in units for place in decisions.units[unit.name].update[: setup.movable[unit.name]]]
    assert abs(places.count(Place.GPU) - min(num_gpu, total)) <= num_stages
    assert abs(places.count(Place.STREAM) - num_stream) <= num_stages
    kept = [
        {segment[0].segment for chunk in chunks for segment in chunk if segment[0].can_swap}
        & {unit.segment for unit in units if decisions.units[unit.name].activations == "keep"}
        for chunks in of_stages(units, decisions)
    ]
    assert sum(map(len, kept)) == num_keep
    if num_rounds == 1 and num_keep < 4:  # later stages hold fewer micro-batches of each
        assert [*map(len, kept)] == sorted(map(len, kept))


def test_a_pipeline_keeps_as_many_activations_as_fit() -> None:
    units = small_units("demo-llama", 6)
    setup = Setup(units, Sharding(pipeline_parallel=2, num_micro_batches=8))
    peaks = {}
    for num_layers in (0, 3, 6):
        cost = CostModel(machine(devices_per_node=2, issue_s=1e-9), units, setup.given)
        peaks[num_layers] = Scorer(units, 64, cost).score(staged(setup, num_layers, 0))
    times = [peaks[num_layers].iteration_s for num_layers in (0, 3, 6)]
    assert times[0] > times[1] > times[2]
    room = peaks[3].filled["gpu"] * 1e12 * 1.001  # type: ignore[index]
    tight = CostModel(machine(devices_per_node=2, issue_s=1e-9, gpu_bytes=room), units, setup.given)
    found = search(setup, Scorer(units, 64, tight), 100)
    assert not found.missing_bytes
    assert found.iteration_s <= times[1]


@pytest.mark.part(2)
@pytest.mark.parametrize(("num_micro_batches", "room"), [(24, 0.6), (48, 1.0)])
def test_a_pipeline_offloads_activations_where_that_is_faster_than_to_recompute_them(num_micro_batches, room) -> None:
    units = small_units("demo-llama", 6)
    given = Sharding(pipeline_parallel=2, pipeline_rounds=3, num_micro_batches=num_micro_batches)
    setup = Setup(units, given)
    slow = {"devices_per_node": 2, "issue_s": 1e-9, "flop_per_s": 1e12}
    free = Scorer(units, 64, CostModel(machine(**slow), units, setup.given))
    gpu_bytes = room * 1.01 * free.predict(staged(setup, 0, 0)).memory[Tier.GPU].peak_bytes
    scorer = Scorer(units, 64, CostModel(machine(**slow, gpu_bytes=gpu_bytes), units, setup.given))
    without = search(setup, scorer, 40)
    assert not without.missing_bytes
    leaving = dataclasses.replace(setup, storage="activations")
    found = search(leaving, scorer, 40)
    assert any(map(found.decisions.offloads, found.decisions.units))
    assert found.iteration_s < 0.95 * without.iteration_s
    solution = solve(conditions(leaving, scorer.cost, 1e9))
    assert solution is not None
    assert solution.value <= found.iteration_s * (1 + 1e-9)


HALVES = Pattern("halves", lambda degrees: 2 if degrees.data_parallel % 2 == 0 else 1)


def halved(units: tuple[Unit, ...]) -> tuple[Unit, ...]:
    """Return units whose MLPs are spread in a way that the planner has never heard of.

    Of two neighbours each has half of every weight, and they exchange what they work on.
    """
    swap = Collective(1 << 16, 2, kind="all-to-all")
    result = []
    for unit in units:
        if not unit.name.endswith(".mlp"):
            result.append(unit)
            continue
        operators = tuple(
            dataclasses.replace(
                operator,
                pattern=HALVES,
                parameters=tuple(
                    dataclasses.replace(spec, shape=(spec.shape[0] // 2, *spec.shape[1:]))
                    for spec in operator.parameters
                ),
                forward=(swap, *operator.forward),
                backward=(*operator.backward, swap),
            )
            for operator in unit.operators
        )
        result.append(dataclasses.replace(unit, operators=operators))
    return tuple(result)


@pytest.mark.part(2)
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_new_pattern_is_planned_without_being_known(ranks: int) -> None:
    units = halved(small_units("demo-llama", 3))
    mlp = next(unit for unit in units if unit.name == "layers.1.mlp")
    assert mlp.parts(Choice(data_parallel=ranks)) == 2
    profile = machine(devices_per_node=4, gpu_bytes=3e7)
    setup = Setup(units, Sharding(data_parallel=ranks, subgroup_params=400_000))
    variant = Variant(request(), setup, CostModel(profile, units, setup.given))
    found = search(setup, Scorer(units, 64, variant.cost), 60)
    assert not found.missing_bytes
    schedule = lower(units, found.decisions, asynchronous=True)
    assert violations(schedule, units, found.decisions, ordered_by_rules(schedule)) == []
    # Two ranks have nothing to add up of what each has a part of; four do so in pairs.
    summed = {task.unit for task in schedule.tasks if task.lane == "collective"}
    assert ("layers.1.mlp" in summed) == (ranks == 4)
    assert "layers.1.attn" in summed
    certificate = certify([variant], variant, found.decisions, found.iteration_s)
    check(certificate, [variant], variant, found.decisions, found.iteration_s)
    assert certificate.bound_s > 0.5 * found.iteration_s


def test_patterns_that_differ_cannot_move_as_one() -> None:
    unit = small_units("demo-llama", 1)[1]
    mixed = (dataclasses.replace(unit.operators[0], pattern=HALVES), *unit.operators[1:])
    with pytest.raises(ValueError, match="make them units of their own"):
        dataclasses.replace(unit, operators=mixed).parts(Choice(data_parallel=2))


def _slow_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a millisecond pass whenever somebody asks for the time, however fast this machine is."""
    ticks = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: 1e-3 * next(ticks))
    for module in ("planner.plan.planning", "planner.plan.competition", "planner.search.scoring"):
        monkeypatch.setattr(f"{module}.time", clock)


def test_a_budget_in_seconds_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    _slow_clock(monkeypatch)
    tight = machine(gpu_bytes=1e8, cpu_params_per_s=1e8)
    plan = make_plan(request(hardware=tight), budget_s=0.01)
    longer = make_plan(request(hardware=tight), budget_s=0.2)
    assert plan.num_simulations < longer.num_simulations
    assert longer.prediction.iteration_s <= plan.prediction.iteration_s
    verify(plan)


def test_stages_are_not_searched_if_they_would_have_to_gain_more_than_twice_what_the_first_choice_gained() -> None:
    variant = variants(request(num_devices=2, pipeline_parallel=2))[0]
    scorer, decisions = Scorer.of(variant), next(resident(variant.setup))

    def seen(seconds: float, missing_bytes: int = 0) -> Candidate:
        return Candidate(decisions, seconds, {Tier.GPU: missing_bytes} if missing_bytes else {})

    def look(seconds: float, missing_bytes: int = 0) -> _Look:
        return _Look(variant, scorer, 1.0, seen(seconds, missing_bytes))

    gained = [(look(10.0), [(None, seen(9.5))])]  # 5.3 %
    assert _lags(look(10.6), gained)
    assert not _lags(look(10.4), gained)
    assert not _lags(look(10.6, missing_bytes=1), gained)  # what a search finds may be anything
    assert not _lags(look(10.6), [(look(10.0, missing_bytes=1), [(None, seen(9.5))])])
    assert not _lags(look(10.1), [(look(10.0), [(None, seen(10.0))])])  # where nothing is gained, a little may be


def test_each_search_gets_its_share_of_the_seconds_and_the_best_plan_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    ends_s: list[float | None] = []

    def short(setup: Setup, scorer: Scorer, _most: object = None, *args: Any) -> list[End]:
        ends_s.append(scorer.deadline_s)
        return descents(setup, scorer, 1, *args)

    clock = SimpleNamespace(monotonic=lambda: 100.0)  # stands still, so that shares are whole numbers
    monkeypatch.setattr("planner.plan.competition.time", clock)
    monkeypatch.setattr("planner.search.scoring.time", clock)
    monkeypatch.setattr("planner.plan.competition.descents", short)
    monkeypatch.setattr("planner.search.descents", short)
    monkeypatch.setattr("planner.search.refined", lambda _setup, _scorer, ends, *_: ends[0][1])
    rivals = variants(request(hardware=machine(gpu_bytes=5e7, cpu_params_per_s=1e8), global_batch=8))
    compete(rivals, deadline_s=112.0)
    shares = [100.0 + 12.0 / left for left in range(len(ends_s) - 1, 0, -1)]
    assert len(shares) > 1
    assert ends_s == [*shares, 112.0]
