"""Storage in the search: it is used where it may be and where that is faster, and the certificate compares with it."""

import dataclasses
import itertools

import pytest
from amount import ALL, examples
from cases import MODELS, small_units
from hazards import violations
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from machines import machine
from walked import ordered_by_rules

from hwprofiles.profile import HardwareProfile
from hwprofiles.registry import load_profile
from planner.bounds.certificate import infeasible
from planner.choices.request import Request
from planner.choices.variants import variants
from planner.decisions import Decisions, Place, Sharding
from planner.models import resolve_model
from planner.placements import mixed
from planner.plan.document import Plan
from planner.plan.planning import InfeasibleError, make_plan
from planner.plan.remedies import what_would_fit
from planner.search import Scorer, first_look, search
from planner.search.moves import moved, moves
from planner.setup import Mix, Setup, pieces
from planner.terms import Storage
from planner.verification import verify
from ullage.rivals import make_plan as rivals_plan
from ullage.rivals.engines.deepspeed import zero_infinity
from ullage.rivals.engines.ratel import ratel
from ullage.rivals.lowering import lower

SLOW = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
STORAGE: tuple[Storage, ...] = ("never", "activations", "nvme")


def small(hardware: HardwareProfile, storage: Storage, **options: object) -> Request:
    config = resolve_model("demo-llama").model_copy(update={"num_layers": 4})
    defaults = {"seq_len": 512, "micro_batch": 2, "subgroup_params": 1_000_000, "storage": storage}
    return Request(config, hardware, **{**defaults, **options})  # type: ignore[arg-type]


@st.composite
def mixes(draw: st.DrawFn) -> tuple[Setup, Mix]:
    setup = Setup(
        small_units(draw(st.sampled_from(MODELS)), 3),
        Sharding(
            data_parallel=draw(st.sampled_from([1, 4])),
            num_micro_batches=draw(st.sampled_from([1, 2])),
            subgroup_params=500_000,
            clip=draw(st.booleans()),
        ),
        storage="nvme",
    )
    total, count = sum(len(pieces(setup, unit)) for unit in setup.units), len(setup.units)
    mix = Mix(
        num_gpu=draw(st.integers(0, total)),
        num_stream=draw(st.integers(0, total)),
        num_keep=draw(st.integers(0, 3)),
        num_host=draw(st.integers(0, count)),
        zero_stage=draw(st.sampled_from([2, 3])) if setup.given.data_parallel > 1 else 0,
        num_nvme=draw(st.integers(0, total)),
        num_on_nvme=draw(st.integers(0, count)),
        num_offload=draw(st.integers(0, 3)),
        num_evict=draw(st.integers(0, 3)),
        num_nvme_slots=draw(st.integers(1, 4)),
        spill=draw(st.integers(0, 1)),
    )
    return setup, mix


@settings(SLOW, max_examples=examples(40))
@given(mixes())
def test_mixes_with_storage_are_valid(drawn: tuple[Setup, Mix]) -> None:
    setup, mix = drawn
    decisions = mixed(setup, mix)
    Decisions.model_validate(decisions.model_dump())
    schedule = lower(setup.units, decisions, asynchronous=True)
    assert violations(schedule, setup.units, decisions, ordered_by_rules(schedule)) == []


@settings(SLOW, max_examples=examples(10))
@given(mixes(), st.sampled_from(STORAGE))
def test_single_moves_are_valid_and_stay_within_what_may_be_used(drawn: tuple[Setup, Mix], storage: Storage) -> None:
    setup = dataclasses.replace(drawn[0], storage=storage)
    allowed = {"never": Mix(3, 2, 1), "activations": Mix(3, 2, 1, num_offload=1), "nvme": drawn[1]}[storage]
    start = mixed(setup, dataclasses.replace(allowed, zero_stage=drawn[1].zero_stage))
    for move in itertools.islice(moves(setup, start), 150):
        valid = Decisions.model_validate(moved(start, move).model_dump())
        lower(setup.units, valid, asynchronous=False)
        chosen = valid.units.values()
        on_nvme = any(u.params == "nvme" or Place.NVME in u.update or u.activations == "offload-nvme" for u in chosen)
        assert not on_nvme or storage == "nvme"
        assert not valid.uses_storage or storage != "never"


def test_counts_of_a_mix_are_what_it_says() -> None:
    setup = Setup(small_units("demo-llama", 4), Sharding(subgroup_params=1_000_000), storage="nvme")
    total = sum(len(pieces(setup, unit)) for unit in setup.units)
    decided = mixed(setup, Mix(2, 3, 1, num_host=4, num_nvme=total, num_on_nvme=2, num_offload=2, num_evict=1))
    segments = {unit.segment: decided.units[unit.name].activations for unit in setup.units if unit.recompute}
    assert sorted(segments.values()) == ["keep", "offload", "offload-nvme", "recompute"]
    places = [place for unit in decided.units.values() for place in unit.update]
    assert places.count(Place.STREAM) == 3
    assert places.count(Place.CPU) == 0
    assert {unit.params for unit in decided.units.values()} >= {"gpu", "nvme"}


LITTLE_HOST = machine(gpu_bytes=1.5e8, host_bytes=4e7)
SLOW_GPU = machine(gpu_bytes=1.1e8, flop_per_s=2e12, cpu_params_per_s=1e10)
BUDGET = 100  # simulations


@pytest.fixture(scope="module")
def on_nvme() -> Plan:
    """A plan that needs NVMe."""
    return rivals_plan(small(LITTLE_HOST, "nvme"), BUDGET)


def test_nvme_is_used_where_nothing_fits_without(on_nvme: Plan) -> None:
    with pytest.raises(InfeasibleError, match="it is proven"):
        make_plan(small(LITTLE_HOST, "never"))
    assert any(Place.NVME in unit.update for unit in on_nvme.decisions.units.values())
    assert on_nvme.constraints.storage == "nvme"
    assert "zero-infinity" in {row.name for row in on_nvme.engines}
    verify(on_nvme)
    words = [words for words, _ in what_would_fit(small(LITTLE_HOST, "never"))]
    assert "--storage nvme" in words


def test_what_was_asked_for_is_what_is_verified(on_nvme: Plan) -> None:
    """A bound for schedules without storage is none for those with it, whoever says so."""
    constraints = dataclasses.replace(on_nvme.constraints, storage="never")
    with pytest.raises(ValueError, match="which is no condition of this problem"):
        verify(on_nvme.model_copy(update={"constraints": constraints}).sealed())


def test_a_plan_that_does_not_need_storage_is_found_as_without() -> None:
    plans = {storage: make_plan(small(machine(), storage), BUDGET) for storage in STORAGE}
    assert plans["never"].decisions == plans["activations"].decisions == plans["nvme"].decisions
    simulated = {storage: plan.num_simulations for storage, plan in plans.items()}
    assert simulated["activations"] == simulated["never"]


def test_activations_leave_where_the_link_is_faster_than_computing() -> None:
    kinds: tuple[Storage, ...] = ("never", "activations")
    times = {storage: make_plan(small(SLOW_GPU, storage, micro_batch=4), BUDGET) for storage in kinds}
    chosen = [unit.activations for unit in times["activations"].decisions.units.values()]
    assert "recompute" in [unit.activations for unit in times["never"].decisions.units.values()]
    assert "offload" in chosen
    assert times["activations"].prediction.iteration_s < 0.95 * times["never"].prediction.iteration_s
    verify(times["activations"])


@pytest.mark.part(3)
@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("hardware", [LITTLE_HOST, SLOW_GPU], ids=["host", "device"])
def test_never_worse_than_without_nor_than_engines_that_swap(hardware: HardwareProfile, *, clip: bool) -> None:
    found = {}
    for storage in STORAGE:
        one = variants(small(hardware, storage, clip=clip))[0]
        setup = one.setup
        found[storage] = search(setup, Scorer.of(one), BUDGET).order
    assert found["nvme"] <= found["never"]
    assert found["activations"] <= found["never"]
    scorer = Scorer.of(one, lower=lower)
    policies = [zero_infinity(setup), *([] if clip else [ratel(setup)])]
    assert found["nvme"] <= min(scorer.score(decisions).order for policy in policies for decisions in policy)


def test_offloaded_activations_take_room_on_the_host() -> None:
    """With the same memory that is enough for one sequence, none is found, and proven, for many."""
    tight = machine(gpu_bytes=1.5e8, host_bytes=4e8)
    assert not infeasible(variants(small(tight, "activations", micro_batch=1)))
    assert infeasible(variants(small(tight, "activations", micro_batch=64)))


def test_drives_that_are_not_there_are_not_asked_for() -> None:
    with pytest.raises(ValueError, match=r"storage is 'nvme', but profile .* has no nvme"):
        small(machine(nvme_bytes=0), "nvme")


@pytest.mark.part(0)
@pytest.mark.parametrize(
    ("model", "hardware", "micro_batch", "without", "storage"),
    [("opt-13b", "rtx-4090", 4, None, "nvme"), ("opt-6.7b", "gh200", 24, 3.264, "activations")],
)
def test_real_machines(model: str, hardware: str, micro_batch: int, without: float | None, storage: Storage) -> None:
    request = Request(resolve_model(model), load_profile(hardware), micro_batch=micro_batch, loss_tile_tokens=10**6)
    if without is None:  # or else the time that is proven to be the least without
        assert infeasible(variants(request))
    plan = make_plan(dataclasses.replace(request, storage=storage), None if ALL else 120)
    assert plan.prediction.iteration_s < 0.95 * (without or float("inf"))
    assert plan.decisions.uses_storage
    assert plan.certificate.gap(plan.prediction.iteration_s) < (0.18 if ALL else 0.22)
    verify(plan)


@pytest.mark.part(2)
def test_mixtures_that_use_drives_for_everything_are_tried() -> None:
    """Only if gradients and activations wait on NVMe too is there room for state that the device updates."""
    request = Request(resolve_model("opt-175b"), load_profile("rtx4090-12ssd"), micro_batch=4, storage="nvme")
    chosen = variants(request)[0]
    found = first_look(chosen.setup, Scorer(chosen.setup.units, 2048, chosen.cost))
    assert found.iteration_s < 130
    assert found.decisions.spill_gradients


def test_a_mixture_is_tried_in_which_all_gradients_leave_the_device() -> None:
    """What stays there may fill it. Without this mixture, the first look takes 0.0337 s."""
    request = Request(resolve_model("demo-llama"), machine(gpu_bytes=1e8), seq_len=256, micro_batch=1, storage="nvme")
    chosen = variants(request)[0]
    found = first_look(chosen.setup, Scorer(chosen.setup.units, 256, chosen.cost))
    assert not found.missing_bytes
    assert found.iteration_s < 0.031
