"""What is told of a plan is what simulating says that knows nothing of the explanation."""

import dataclasses
import itertools
import math

import pytest
from amount import examples
from cases import as_rival
from cases import decisions as random_decisions
from explained import NAMES, bench, predicted, with_decisions
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import machine

from hwprofiles.paths import number, quantities, replace
from hwprofiles.quantity import Provenance
from planner.bounds.certificate import certify
from planner.choices.variants import variants
from planner.decisions import Choice, Place, Precision
from planner.explain.bench import bounding_lane
from planner.explain.limits import binding_proof, bound_rests_on, full_tiers, limits, scalables
from planner.explain.moves import (
    _runs,
    alternatives,
    deadline,
    moved,
    single_moves,
)
from planner.explain.tricks import with_compiled_kernels, with_speculation, without
from planner.explain.tricks import worths as worths_of
from planner.schedule.tasks import Tier
from ullage.rivals.decisions import GradientPath, HostUpdate
from ullage.rivals.lowering import lower
from ullage.rivals.tricks import TRICKS, bench_of

# A trick may turn out this much slower than doing without: plans are tidied within half a per cent.
TOLERANCE = 5e-3
ANOMALY = 0.02
SCALED = Provenance(origin="assumed", source="scaled for a test")


@pytest.mark.part(2)
@pytest.mark.parametrize("name", NAMES)
def test_the_plan_is_simulated_as_it_was_predicted(name: str) -> None:
    explained = bench(name)
    assert explained.own.iteration_s == pytest.approx(explained.plan.prediction.iteration_s, rel=1e-12)
    assert explained.memory == explained.plan.prediction.memory
    assert (
        bounding_lane(explained.simulation)
        == max(explained.plan.prediction.critical_s.items(), key=lambda item: item[1])[0]
    )


@given(st.data())
@settings(max_examples=examples(20))
def test_alternatives_are_what_simulating_them_says(data: st.DataObject) -> None:
    explained = bench(data.draw(st.sampled_from(NAMES)))
    unit = data.draw(st.sampled_from(list(explained.units)))
    found = alternatives(explained, unit)
    assert [trial is explained.own for trial in found] == [True] + [False] * (len(found) - 1)
    assert len({trial.decisions.units[unit].model_dump_json() for trial in found}) == len(found)
    for alternative in data.draw(st.lists(st.sampled_from(found), min_size=1, max_size=3)):
        decisions = alternative.decisions
        prediction = predicted(explained, decisions)
        assert alternative.iteration_s == pytest.approx(prediction.iteration_s, rel=1e-12)
        assert alternative.peak_bytes == {tier: use.peak_bytes for tier, use in prediction.memory.items()}
        assert alternative.fits == prediction.fits
        # Nothing else differs from the plan but the activations of the same segment.
        segment = explained.units[unit].segment
        for name, other in decisions.units.items():
            own = explained.decisions.units[name]
            if name != unit and explained.units[name].segment == segment:
                own = own.model_copy(update={"activations": other.activations})
            assert name == unit or other == own
        assert decisions.model_copy(update={"units": {}}) == explained.decisions.model_copy(update={"units": {}})


def test_alternatives_are_all_there_are() -> None:
    explained = bench("one")
    unit = "layers.1.mlp"
    found = [trial.decisions.units[unit] for trial in alternatives(explained, unit)]
    assert len(found) == len({decision.model_dump_json() for decision in found})
    streamed = [(d.params, d.activations, d.update, d.streamed_gradients) for d in found if Place.STREAM in d.update]
    assert sum(gradients == "gpu" for *_, gradients in streamed) == len(streamed) / 2
    ways = {(decision.params, decision.activations, decision.update) for decision in found}
    count = len(explained.decisions.units[unit].update)
    whole = {
        (params, activations, (place,) * count)
        for activations in ("keep", "recompute")
        for params, place in (
            ("gpu", Place.GPU),
            ("gpu", Place.STREAM),
            ("gpu", Place.CPU),
            ("host", Place.STREAM),
            ("host", Place.CPU),
        )
    }
    assert whole <= ways
    own = explained.decisions.units[unit].update
    assert all(update == own for _, _, update in ways - {(*way[:2], way[2]) for way in whole})


@pytest.mark.part(2)
@pytest.mark.parametrize("name", NAMES)
def test_tricks_that_a_plan_uses_make_it_no_slower(name: str) -> None:
    explained = bench(name)
    own = (explained.schedule.tasks, explained.schedule.buffers)
    used = 0
    for trick, trial in worths_of(explained, tricks=TRICKS).items():
        if trial is None:
            for decisions in trick.off(explained):
                schedule = lower(explained.plan.units(), decisions, asynchronous=True)
                assert (schedule.tasks, schedule.buffers) == own, trick.key
            continue
        used += 1
        prediction = predicted(explained, trial.decisions)
        assert trial.iteration_s == pytest.approx(prediction.iteration_s, rel=1e-12), trick.key
        if trial.fits:
            # Where lanes are first-in first-out, less freedom can be a little faster (Graham's anomalies).
            assert trial.iteration_s >= explained.own.iteration_s * (1 - ANOMALY), trick.key
    assert used >= 5


def test_every_trick_can_be_switched_off() -> None:
    """Each is used by one of the plans, or by decisions that planning does not make yet."""
    used = {trick.key for name in NAMES for trick, trial in worths_of(bench(name), tricks=TRICKS).items() if trial}
    stage_1 = with_decisions(
        bench("two"),
        zero_stage=1,
        units={
            name: unit.model_copy(update={"params": "gpu", "update": (Place.GPU,) * len(unit.update)})
            for name, unit in bench("two").decisions.units.items()
        },
    )
    through_host = with_decisions(bench("two"), collectives="host")
    slots = with_decisions(bench("slow"), num_state_slots=3, num_param_slots=3)
    tiled = with_decisions(bench("one"), loss_tile_tokens=16, layer_tile_tokens=16)
    breadth = with_decisions(bench("one"), micro_batch=2, segment_tile_sequences=1)
    # Every other layer recomputes, and every other subgroup is streamed.
    mixed = with_decisions(
        bench("one"),
        num_state_slots=2,
        units={
            name: unit.model_copy(
                update={
                    "activations": "recompute" if bench("one").units[name].segment == "layers.0" else "keep",
                    "params": "gpu",
                    "update": tuple((Place.STREAM, Place.CPU)[i % 2] for i in range(len(unit.update))),
                }
            )
            for name, unit in bench("one").decisions.units.items()
        },
    )
    compiled = with_decisions(bench("one"), kernels="compiled")
    narrow = with_decisions(bench("slow"), optimizer="adamw-8bit")
    fast = bench("one").plan.model_copy(update={"hardware": machine(gpu_bytes=1.3e8, fp8_flop_per_s=4e14)})
    in_fp8 = with_decisions(bench_of(fast), precision=Precision(weights="bf16", products="fp8"))
    away = {name: unit.model_copy(update={"params": "host"}) for name, unit in in_fp8.decisions.units.items()}
    away = {name: unit for name, unit in away.items() if Place.GPU not in unit.update}
    fetched = with_decisions(in_fp8, units=in_fp8.decisions.units | away, fp8_weights=True)
    assert any(map(fetched.decisions.moves_fp8, fetched.units.values()))
    for other in (stage_1, through_host, slots, mixed, tiled, breadth, compiled, narrow, in_fp8, fetched):
        used |= {trick.key for trick, trial in worths_of(other, tricks=TRICKS).items() if trial}
    assert used == {trick.key for trick in TRICKS} - {"zero-bubble", "ring"}, "see test_explain_stages.py"


GLOBAL = {
    "gradients-once": {"gradient_path": GradientPath.ZERO3_ASYNC},
    "overlap-next-forward": {"overlap_next_forward": False},
    "forward-order": {"update_order": "backward"},
    "early-updates": {"update_start": "step"},
    "parameter-slots": {"num_param_slots": 1},
    "state-slots": {"num_state_slots": 1},
    "collectives-beside": {"max_prefetch_params": 0},
    "early-reduction": {"reduce_start": "step"},
    "through-host": {"collectives": None},
    "split-masters": {"split_masters": None},
    "one-pass": {"host_update": HostUpdate.DEEPSPEED},
}


def test_a_trick_off_changes_nothing_else() -> None:
    """What is a matter of global decisions leaves units alone, and the other way round."""
    seen = set()
    for plan in (*map(bench, NAMES), with_decisions(bench("two"), collectives="host")):
        own = dict(as_rival(plan.decisions))
        for trick in TRICKS:
            for decisions in trick.off(plan):
                different = {key: value for key, value in decisions if value != own[key]}
                if trick.key == "split-masters":  # for which less state may stay on the device
                    different.pop("units", None)
                assert different.keys() == GLOBAL.get(trick.key, {"units": None}).keys() or not different, trick.key
                assert all(different[key] == GLOBAL[trick.key][key] for key in different if key != "units")
                seen.add(trick.key)
    assert len(seen) >= len(TRICKS) - 9


def test_joined_kernels_are_worth_the_bytes_that_they_save() -> None:
    """Without them, an iteration is the one that was planned without them."""
    found = worths_of(with_decisions(bench("one"), kernels="compiled"), tricks=TRICKS)
    (trial,) = (trial for trick, trial in found.items() if trick.key == "joined-kernels")
    assert trial is not None
    assert trial.iteration_s == pytest.approx(bench("one").own.iteration_s, rel=1e-9)


def test_compiled_kernels_are_offered_to_a_plan_that_can_have_them() -> None:
    """The same placement with them is what is then planned so; it is not offered twice, nor where blocks cannot."""
    plain, compiled = bench("one"), with_decisions(bench("one"), kernels="compiled")
    offered = with_compiled_kernels(plain)
    assert offered is not None
    assert offered.iteration_s == pytest.approx(compiled.own.iteration_s, rel=1e-9)
    assert offered.iteration_s < plain.own.iteration_s
    assert with_compiled_kernels(compiled) is None
    offloading = {
        name: unit.model_copy(update={"activations": "offload"})
        for name, unit in plain.decisions.units.items()
        if plain.recomputable(name)
    }
    assert with_compiled_kernels(with_decisions(plain, units=plain.decisions.units | offloading)) is None


def test_speculation_is_offered_where_updates_wait_for_the_norm() -> None:
    """What is offered is a plan that fits and is as fast as offered; no plan gets it that waits for no norm."""
    waits = bench("slow")
    offered = with_speculation(waits)
    assert offered is not None
    assert offered.fits
    assert offered.decisions.takes_back
    assert offered.iteration_s < waits.own.iteration_s
    own = with_decisions(waits, **dict(offered.decisions)).own
    assert own.iteration_s == pytest.approx(offered.iteration_s, rel=1e-9)
    assert with_speculation(with_decisions(waits, **dict(offered.decisions))) is None
    assert with_speculation(with_decisions(waits, clip=False)) is None
    assert with_speculation(with_decisions(waits, optimizer="adamw-bf16")) is None


def test_narrow_state_off_has_a_master_copy_in_fp32_too() -> None:
    rounded = Precision(weights="bf16", master="bf16")
    narrow = with_decisions(bench("slow"), optimizer="adamw-8bit", precision=rounded, split_masters=None)
    (trick,) = (trick for trick in TRICKS if trick.key == "narrow-state")
    found = {(off.optimizer, off.precision) for off in trick.off(narrow)}
    assert found == {("adamw", Precision(weights="bf16"))}


def test_tricks_of_placement_off_place_as_they_say() -> None:
    explained = bench("one")
    own = [explained.decisions.units[unit].update[piece] for unit, piece in explained.pieces()]
    assert len(set(own)) > 1

    def places(key: str) -> list[list[Place]]:
        trick = next(trick for trick in TRICKS if trick.key == key)
        return [[d.units[unit].update[piece] for unit, piece in explained.pieces()] for d in trick.off(explained)]

    assert places("several-places") == [[place] * len(own) for place in (Place.GPU, Place.STREAM, Place.CPU)]
    resident = places("resident-state")
    assert [[after for after, before in zip(off, own, strict=True) if before is Place.GPU] for off in resident] == [
        [place] * own.count(Place.GPU) for place in (Place.STREAM, Place.CPU)
    ]
    for off in places("shares-by-rate"):
        assert [place is Place.GPU for place in off] == [place is Place.GPU for place in own]
        away = [place for place in off if place is not Place.GPU]
        assert all(one is not other for one, other in itertools.pairwise(away))
    (farthest,) = places("nearest-deadline")
    count = own.count(Place.GPU)
    assert [place is Place.GPU for place in farthest] == [False] * (len(own) - count) + [True] * count


@given(st.data())
@settings(max_examples=examples(30))
def test_anything_that_can_be_decided_can_be_explained(data: st.DataObject) -> None:
    """Every switch and every move of random decisions is itself a decision that can be lowered."""
    explained = bench("two")
    plan = explained.plan.model_copy(
        update={
            "decisions": data.draw(random_decisions(explained.plan.units(), ours=True)),
            "hardware": machine(devices_per_node=8),
        }
    )
    other = bench_of(plan)
    for trick in TRICKS:
        for decisions in trick.off(other):
            other.lower(decisions)
    unit = data.draw(st.sampled_from(list(other.units)))
    for decision in single_moves(other, unit):
        assert decision != other.decisions.units[unit]
        other.lower(moved(other, unit, decision))
    assert sorted(name for run in _runs(other).values() for name in run) == sorted(other.units)
    deadline(other, unit)


def test_a_trick_off_is_the_best_that_can_be_done_without() -> None:
    explained = bench("one")
    trick = next(trick for trick in TRICKS if trick.key == "several-places")
    trial = without(explained, trick)
    assert trial is not None
    everywhere = [predicted(explained, decisions) for decisions in trick.off(explained)]
    assert len(everywhere) == 3
    fitting = [prediction.iteration_s for prediction in everywhere if prediction.fits]
    assert trial.fits == bool(fitting)
    assert trial.iteration_s == pytest.approx(min(fitting), rel=1e-12)


@pytest.mark.part(2)
@pytest.mark.parametrize("name", NAMES)
def test_crossings_are_where_another_lane_takes_over(name: str) -> None:
    explained = bench(name)
    present = max(explained.plan.prediction.critical_s.items(), key=lambda item: item[1])[0]
    hardware, num_crossings = explained.plan.hardware, 0

    def lane(paths: tuple[str, ...], factor: float) -> str:
        has = quantities(hardware)
        other = replace(hardware, {path: number(has[path]) * factor for path in paths}, SCALED)
        plan = explained.plan.model_copy(update={"hardware": other})
        return next(iter(predicted(explained, explained.decisions, plan).critical_s))

    for limit in limits(explained):
        for crossing, sign in ((limit.below, -1), (limit.above, 1)):
            if crossing is None:
                continue
            num_crossings += 1
            assert 1 < (crossing.factor / crossing.last_factor) ** sign < 1.0011
            assert lane(limit.scalable.paths, crossing.last_factor) == present
            assert lane(limit.scalable.paths, crossing.factor) == crossing.takes_over != present
            assert crossing.value == pytest.approx(limit.value * crossing.factor)
    assert num_crossings >= 2


def test_a_capacity_binds_where_the_plan_no_longer_fits() -> None:
    explained = bench("one")
    for limit in limits(explained):
        if limit.scalable.tier is None:
            assert limit.fits_from is None
            continue
        peak_bytes = explained.memory[limit.scalable.tier].peak_bytes
        assert limit.fits_from is not None
        for num_bytes, fits in ((peak_bytes, True), (peak_bytes - 1, False)):
            hardware = replace(explained.plan.hardware, {limit.scalable.paths[0]: float(num_bytes)}, SCALED)
            plan = explained.plan.model_copy(update={"hardware": hardware})
            assert predicted(explained, explained.decisions, plan).fits is fits
        assert limit.fits_from * limit.value == pytest.approx(peak_bytes)
    assert [tier for tier, _ in full_tiers(explained)] == [Tier.GPU]


@pytest.mark.part(2)
@pytest.mark.parametrize("name", ["one", "two"])
def test_the_bound_changes_with_the_machine_as_its_multipliers_say(name: str) -> None:
    """Against bounds that are solved anew: where the bound has a corner, the derivative lies between its sides."""
    explained = bench(name)
    plan = explained.plan
    step, num_that_matter = 1e-3, 0
    for limit in limits(explained):
        has = quantities(plan.hardware)
        sides = []
        for factor in (1 + step, 1 - step):
            other = replace(plan.hardware, {path: number(has[path]) * factor for path in limit.scalable.paths}, SCALED)
            rivals = variants(dataclasses.replace(plan.request, hardware=other))
            own = next(rival for rival in rivals if rival.choice == Choice.of(plan.decisions))
            there_s = certify(rivals, own, plan.decisions, plan.prediction.iteration_s).bound_s
            sides.append((there_s / plan.certificate.bound_s - 1) / (factor - 1))
        assert sides[1] - 0.01 <= limit.bound_elasticity <= sides[0] + 0.01, limit.scalable.key
        assert limit.bound_s_per_unit * limit.value == pytest.approx(limit.bound_elasticity * plan.certificate.bound_s)
        num_that_matter += abs(limit.bound_elasticity) > 0.05
    assert num_that_matter
    assert binding_proof(explained).bound_s == plan.certificate.bound_s
    weights = bound_rests_on(explained)
    assert weights
    assert all(weight > 0 for weight in weights.values())


def test_elasticities() -> None:
    explained = bench("one")
    found = {limit.scalable.key: limit for limit in limits(explained)}
    assert set(found) == {scalable.key for scalable in scalables(explained)}
    hardware = explained.plan.hardware
    has = quantities(hardware)
    for key in ("device-gemm", "host-link", "cpu-optimizer"):
        times_s = []
        for factor in (1.01, 1 / 1.01):
            other = replace(hardware, {path: number(has[path]) * factor for path in found[key].scalable.paths}, SCALED)
            plan = explained.plan.model_copy(update={"hardware": other})
            times_s.append(predicted(explained, explained.decisions, plan).iteration_s)
        expected = math.log(times_s[0] / times_s[1]) / (2 * math.log(1.01))
        assert found[key].elasticity == pytest.approx(expected, abs=1e-9)
    assert "intra-node" not in found
    assert "intra-node" in {scalable.key for scalable in scalables(bench("two"))}
