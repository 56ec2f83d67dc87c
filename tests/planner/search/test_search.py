"""The search: never worse than what it starts from, within its budget, the same every time."""

import dataclasses
import gc
import itertools
from typing import NoReturn

import pytest
from cases import decide, small_units
from machines import machine

from hwprofiles.profile import HardwareProfile
from hwprofiles.registry import load_profile
from planner.choices.request import Request
from planner.choices.variants import variants
from planner.decisions import Decisions, Place
from planner.models import resolve_model
from planner.placements import mixed, resident
from planner.plan.competition import compete
from planner.plan.planning import make_plan
from planner.schedule.schedule import Schedule
from planner.schedule.tasks import Tier
from planner.search import Candidate, Scorer, descents, refined, scoring, search
from planner.search.descent import descend
from planner.search.mixtures import _rounded
from planner.search.moves import moved, moves
from planner.search.scoring import ENDLESS
from planner.search.walk import walk
from planner.setup import Mix
from planner.simulate.critical_path import critical_path
from planner.simulate.machine import run_until_steady
from planner.simulate.prediction import always_held, capacities
from ullage.rivals.best import engine_policies
from ullage.rivals.lowering import lower


def find(request: Request, max_simulations: int = 80) -> tuple[Candidate, Scorer]:
    one = variants(request)[0]
    setup = one.setup
    scorer = Scorer.of(one)
    return search(setup, scorer, max_simulations), scorer


def small(model: str, hardware: HardwareProfile, **options: object) -> Request:
    config = resolve_model(model).model_copy(update={"num_layers": 4})
    defaults = {"seq_len": 512, "micro_batch": 2, "subgroup_params": 1_000_000}
    return Request(config, hardware, **{**defaults, **options})  # type: ignore[arg-type]


SMALL_GPU = machine(gpu_bytes=1e9)
REQUESTS = {
    "roomy": small("demo-llama", machine()),
    "tight": small("gpt2", SMALL_GPU),
    "no clip": small("opt-125m", SMALL_GPU, clip=False),
    "accumulation": small("gpt2", machine(), num_micro_batches=3),
    "several": small("demo-llama", machine(devices_per_node=4, gpu_bytes=2e8), num_devices=4),
    "two nodes": small("opt-125m", machine(devices_per_node=2), num_devices=4),
    "cpu": small("demo-llama", machine(kind="host")),
    "a100": Request(resolve_model("opt-1.3b"), load_profile("a100-40"), seq_len=1024, micro_batch=2),
    "3090": Request(resolve_model("opt-2.7b"), load_profile("rtx-3090"), seq_len=512, micro_batch=1),
}


@pytest.mark.part(4)
@pytest.mark.parametrize("count", [16, 37])
@pytest.mark.parametrize("name", ["roomy", "tight", "no clip", "several"])
def test_many_micro_batches_are_scored_from_few(name: str, count: int) -> None:
    """[Note: Few micro-batches]: all that a search looks at takes as long as its whole schedule, and as much memory."""
    one = variants(dataclasses.replace(REQUESTS[name], num_micro_batches=count))[0]
    setup = one.setup
    few, whole, seen = Scorer.of(one, whole=False), Scorer.of(one), list[Candidate]()
    best = search(setup, few, 40, lambda candidate, _: seen.append(candidate))
    assert few.exact(best).iteration_s == pytest.approx(best.iteration_s, rel=1e-2)
    for candidate in seen:
        exact = whole.score(candidate.decisions)
        assert candidate.iteration_s == pytest.approx(exact.iteration_s, rel=1e-2)
        assert candidate.missing_bytes == exact.missing_bytes
        assert candidate.traffic_bytes == exact.traffic_bytes
        assert candidate.filled == pytest.approx(exact.filled, rel=1e-2)
        for lane, busy_s in candidate.busy_s.items():
            assert busy_s == pytest.approx(exact.busy_s[lane], rel=1e-2)


def test_a_plan_that_was_scored_wrongly_is_known() -> None:
    found = compete(variants(small("gpt2", SMALL_GPU, num_micro_batches=16)), 20)
    assert found.is_as_scored
    off = dataclasses.replace(found.best, iteration_s=1.05 * found.best.iteration_s)
    assert not dataclasses.replace(found, best=off).is_as_scored


@pytest.mark.part(4)
@pytest.mark.parametrize("name", REQUESTS)
def test_never_worse_than_the_best_engine(name: str) -> None:
    best, scorer = find(REQUESTS[name])
    one = variants(REQUESTS[name])[0]
    setup = one.setup
    engines = engine_policies(setup, Scorer.of(one, lower=lower))
    assert set(engines) == {
        "gpu-only",
        "zero-offload-blocking",
        "zero-offload",
        "twin-flow",
        "interleaved",
        "fsdp2-offload",
        "super-offload",
        "zenflow",
        "streaming",
        *({"megatrain", "roundpipe", "roundpipe-sync"} if name != "two nodes" else ()),
        *({"slideformer"} if name == "no clip" else ()),
    }
    # Engines with other numerics, or a head of their own, may be faster.
    found = [(candidate, candidate.decisions) for candidate in engines.values()]
    same = [candidate for candidate, of in found if of.prepare_bytes is None and of.head_percent == 100]
    assert best.order <= min(candidate.order for candidate in same)
    assert not best.missing_bytes
    # The full prediction confirms the quick score.
    prediction = scorer.predict(best.decisions)
    assert prediction.fits
    assert prediction.iteration_s == pytest.approx(best.iteration_s, rel=0.02)


def test_tight_memory_is_used_and_kept() -> None:
    request = REQUESTS["tight"]
    best, scorer = find(request)
    setup = variants(request)[0].setup
    assert all(scorer.score(decisions).missing_bytes for decisions in resident(setup))
    peak = next(m for t, m in scorer.predict(best.decisions).memory.items() if t == "gpu")
    assert 0.8 * peak.capacity_bytes < peak.peak_bytes <= peak.capacity_bytes


def test_deterministic() -> None:
    first, second = (find(REQUESTS["tight"])[0] for _ in range(2))
    assert first == second


def test_more_simulations_are_never_worse_and_the_budget_is_kept() -> None:
    scores = [find(REQUESTS["tight"], budget)[0].order for budget in (1, 60, 200)]
    for (overload, iteration_s), (more_overload, more_s) in itertools.pairwise(scores):
        assert more_overload <= overload
        assert more_s <= iteration_s * 1.005  # as much slower a plan may be that moves fewer bytes
    seeds = find(REQUESTS["roomy"], 1)[1].num_simulations
    assert find(REQUESTS["roomy"], seeds + 20)[1].num_simulations <= seeds + 20


def test_progress_only_improves() -> None:
    one = variants(REQUESTS["tight"])[0]
    setup = one.setup
    calls: list[Candidate] = []
    best = search(setup, Scorer.of(one), 80, lambda candidate, _: calls.append(candidate))
    assert calls[-1] == best
    assert calls[0].order >= calls[-1].order


def test_garbage_collection_is_only_suspended() -> None:
    """Interrupted or not, the caller's collector is as it was."""

    def interrupt(_: Candidate, _num: int) -> None:
        assert not gc.isenabled()
        raise KeyboardInterrupt

    assert gc.isenabled()
    with pytest.raises(KeyboardInterrupt):
        make_plan(REQUESTS["roomy"], 1, interrupt)
    assert gc.isenabled()


def test_the_same_decisions_are_simulated_once() -> None:
    one = variants(REQUESTS["roomy"])[0]
    setup = one.setup
    scorer = Scorer.of(one)
    best = search(setup, scorer, 20)
    before = scorer.num_simulations
    assert scorer.score(best.decisions) == best
    assert scorer.num_simulations == before


def test_a_schedule_is_lowered_once_for_all_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    request = REQUESTS["3090"]
    faster = request.hardware.model_copy(update={"host": load_profile("a100-40").host})
    one, other = variants(request)[0], variants(dataclasses.replace(request, hardware=faster))[0]
    assert other.setup.units is one.setup.units
    setup = one.setup
    seeds = [find(request, 1)[0].decisions, *resident(setup)]
    expected = [Scorer.of(other).score(each) for each in seeds]
    monkeypatch.setattr(scoring, "_LOWERED", scoring._Lowered(1 << 30))
    first = [Scorer.of(one).score(each) for each in seeds]

    def again(*_args: object, **_options: object) -> NoReturn:
        pytest.fail("lowered again")

    assert [Scorer.of(other, lower=again).score(each) for each in seeds] == expected
    assert [each.iteration_s for each in first] != [each.iteration_s for each in expected]


def test_as_many_schedules_are_remembered_as_there_is_room_for() -> None:
    units = small_units()
    made = [lower(units, decide(units, place), asynchronous=False) for place in (Place.CPU, Place.STREAM, Place.GPU)]
    remembered = scoring._Lowered(sum(schedule.arrays.nbytes for schedule in made[:2]))
    lowered: list[int] = []

    def get(number: int) -> Schedule:
        def make() -> Schedule:
            lowered.append(number)
            return made[number]

        return remembered.get(number, units, make)

    assert [get(number).arrays for number in (0, 1, 0)] == [made[number].arrays for number in (0, 1, 0)]
    assert lowered == [0, 1]
    assert get(0).tasks == made[0].tasks
    assert get(0).buffers == made[0].buffers
    assert lowered[2:] == [0, 0], "tasks are made only where they are looked at"
    get(2)
    get(0)
    get(1)
    assert lowered[4:] == [2, 1], "what was asked for longest ago is forgotten first"


def test_what_cannot_fit_is_not_simulated() -> None:
    request = dataclasses.replace(REQUESTS["roomy"], hardware=machine(gpu_bytes=1e6))
    best, scorer = find(request)
    assert scorer.num_simulations == 0
    assert best.iteration_s == float("inf")
    assert best.missing_bytes.keys() == {"gpu"}


@pytest.mark.parametrize("name", ["tight", "several"])
def test_what_is_always_held_bounds_the_peak(name: str) -> None:
    best, scorer = find(REQUESTS[name], 40)
    cost = variants(REQUESTS[name])[0].cost
    setup = variants(REQUESTS[name])[0].setup
    for candidate in (best, *map(scorer.score, resident(setup))):
        if candidate.iteration_s < float("inf"):
            prediction = scorer.predict(candidate.decisions)
            for tier, held in always_held(scorer.schedule(candidate.decisions), cost).items():
                if held:
                    assert held <= prediction.memory[tier].peak_bytes
                    assert prediction.memory[tier].capacity_bytes == capacities(cost)[tier]


@pytest.mark.part(3)
@pytest.mark.parametrize("name", ["roomy", "tight", "several"])
def test_the_critical_path_explains_the_period(name: str) -> None:
    best, scorer = find(REQUESTS[name], 40)
    cost = variants(REQUESTS[name])[0].cost
    simulation = run_until_steady(scorer.schedule(best.decisions), cost)
    path = critical_path(simulation.timeline, simulation.steady)
    assert sum(path.values()) == pytest.approx(simulation.timeline.period_s(simulation.steady), rel=0.01)
    assert list(path.values()) == sorted(path.values(), reverse=True)


def test_a_search_of_its_own_length_ends_when_it_has_gained_nothing_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    one = variants(dataclasses.replace(REQUESTS["tight"], num_micro_batches=2))[0]
    setup = one.setup
    monkeypatch.setattr("planner.search._TASKS", 75_000)
    scorer, asked, patient = (Scorer.of(one) for _ in range(3))
    found = search(setup, scorer)
    requested = search(setup, asked, 2 * scorer.num_simulations)
    monkeypatch.setattr("planner.search._PATIENCE", 1.0)
    whole = search(setup, patient)
    assert scorer.num_simulations < 0.8 * patient.num_simulations
    assert scorer.num_simulations < asked.num_simulations, "what is asked for is not cut short"
    assert found.iteration_s <= min(whole.iteration_s, requested.iteration_s) * 1.01


def test_moves_of_single_units_are_tried_where_descents_gain_nothing_any_more() -> None:
    one = variants(REQUESTS["tight"])[0]
    scorer = Scorer.of(one)
    ends = descents(one.setup, scorer, 20)
    assert [end.order for _, end in ends] == sorted(end.order for _, end in ends)
    scorer.set_patience(0)
    assert scorer.spent()
    before = scorer.num_simulations
    found = refined(one.setup, scorer, ends, progress=lambda *_: None)
    assert scorer.num_simulations > before
    assert found.order < ends[0][1].order


def test_a_walk_is_the_same_each_time_keeps_its_length_and_is_never_worse_than_its_start() -> None:
    one = variants(REQUESTS["tight"])[0]
    found, reported = [], list[Candidate]()
    for _ in range(2):
        scorer = Scorer.of(one)
        start = scorer.score(mixed(one.setup, Mix(3, 2, 1, num_host=4)))
        assert not start.missing_bytes
        found.append(walk(one.setup, scorer, Mix(3, 2, 1, num_host=4), 60, reported.append))
        assert 60 <= scorer.num_simulations - 1 <= 61  # a trial that lacks memory is simulated, and then its repair
    assert found[0] == found[1]
    assert not found[0].missing_bytes
    assert found[0].order < start.order
    assert reported[-1] == found[1]
    assert [candidate.order for candidate in reported[: len(reported) // 2]] == sorted(
        (candidate.order for candidate in reported[: len(reported) // 2]), reverse=True
    )


def test_a_walk_goes_on_from_slower_mixes() -> None:
    """Two slots are slower than one, and three are faster; a walk changes a number of slots by one."""

    class Ridge(Scorer):
        def score(self, decisions: Decisions) -> Candidate:
            self.num_simulations += 1
            time_s = {1: 1.0, 2: 1.004}.get(decisions.num_state_slots, 0.9)
            return Candidate(decisions, time_s, {}, filled={Tier.GPU: 1.0})

    one = variants(REQUESTS["tight"])[0]
    assert walk(one.setup, Ridge.of(one), Mix(3, 2, 1, num_state_slots=1), 200).iteration_s == 0.9


def test_a_walk_finds_what_no_change_of_one_count_does() -> None:
    one = variants(REQUESTS["a100"])[0]
    scorer = Scorer.of(one)
    mix, end = descend(one.setup, scorer, Mix(0, 0, 0), lambda candidate: candidate.order, ENDLESS)
    assert not end.missing_bytes
    assert walk(one.setup, scorer, mix, 200).order < end.order


def test_one_unit_of_each_kind_moves_before_another_of_its_kind() -> None:
    setup = variants(REQUESTS["tight"])[0].setup
    start = mixed(setup, Mix(3, 2, 1, num_host=4))
    kinds = {unit.name: (unit.size_name, start.units[unit.name]) for unit in setup.units}
    order = dict.fromkeys(next(iter(units)) for units, _ in moves(setup, start) if len(units) == 1)
    first = [kinds[name] for name in order][: len(set(kinds.values()))]
    assert len(first) < len(order)
    assert len(set(first)) == len(first)


def test_a_move_of_slots_changes_nothing_else() -> None:
    setup = variants(REQUESTS["tight"])[0].setup
    start = mixed(setup, Mix(3, 2, 1, num_slots=1))
    tried = [moved(start, move) for move in moves(setup, start) if move[1]]
    assert {one.num_param_slots for one in tried} == {1, 2}  # never none
    for one in tried:
        changed = {name for name, value in dict(one).items() if value != getattr(start, name)}
        assert len(changed) == 1
        assert changed < {"num_param_slots", "num_state_slots", "num_gradient_slots"}


def test_a_budget_is_used_up_when_what_was_found_is_fast_enough() -> None:
    one = variants(REQUESTS["tight"])[0]
    setup = one.setup
    seeds = [mixed(setup, Mix(num_gpu, 0, 0)) for num_gpu in range(3)]
    least_s = min(Scorer.of(one).score(seed).iteration_s for seed in seeds)
    for enough_s, expected in ((least_s, True), (least_s * (1 - 1e-9), False)):
        scorer = Scorer.of(one)
        scorer.set_patience(enough_s=enough_s)
        assert not scorer.spent()
        for seed in seeds:
            scorer.score(seed)
        assert scorer.spent() is expected
        scorer.set_patience()
        assert not scorer.spent()


def test_what_is_far_from_the_best_possible_is_looked_at_for_longer() -> None:
    one = variants(REQUESTS["tight"])[0]
    setup = one.setup
    known = Scorer.of(one)
    seeds = sorted((mixed(setup, Mix(num_gpu, 0, 0)) for num_gpu in range(8)), key=lambda seed: known.score(seed).order)
    best = known.score(seeds[0])
    assert not best.missing_bytes
    for far_s, expected in ((best.iteration_s, 3), (best.iteration_s * (1 - 1e-9), 6)):
        scorer = Scorer.of(one)
        scorer.set_patience(3, far_s=far_s)
        scorer.score(seeds[0])
        used = next(used for used, seed in enumerate(seeds[1:], 1) if scorer.score(seed) and scorer.spent())
        assert used == expected


def test_a_descent_ends_when_nothing_has_helped_for_long() -> None:
    one = variants(REQUESTS["tight"])[0]
    setup = one.setup
    start = Mix(0, 0, 0)
    found: dict[int, tuple[int, list[float]]] = {}
    for patience in (1, 12, ENDLESS):
        scorer, better = Scorer.of(one), list[Candidate]()
        _, best = descend(setup, scorer, start, lambda c: c.order, 200, better.append, patience=patience)
        assert not best.missing_bytes
        found[patience] = scorer.num_simulations, [each.iteration_s for each in better]
    (few, first), (some, more), (most, every) = found.values()
    assert few < some < most
    assert every[: len(more)] == more
    assert more[: len(first)] == first


@pytest.mark.parametrize("noise", [0.0, 1e-9, -1e-9])
def test_what_the_solver_leaves_open_within_its_tolerance_changes_no_mixture(noise: float) -> None:
    setup = variants(REQUESTS["tight"])[0].setup
    values = {f"{unit.name}:{place}": noise for unit in setup.units for place in ("stream", "stays", "nvme", "host")}
    values |= {f"{unit.name}:gpu": 1.0 - noise for unit in setup.units}
    values |= {f"{segment}:recompute": 1.0 - noise for segment in setup.swappable}
    mix = _rounded(setup, values, 0)
    assert mix == Mix(num_gpu=sum(setup.movable.values()), num_stream=0, num_keep=0)
