"""No schedule is faster than the bound, and a proof of a bound is believed for its arithmetic alone."""

import itertools
import math
from fractions import Fraction
from typing import get_args

import pytest
from amount import ALL, examples
from cases import Case, cases, decide, in_stages, small_units
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from machines import machine, quantity, rate

from hwprofiles.profile import HardwareProfile
from hwprofiles.registry import load_profile
from planner.bounds.conditions import conditions, decided, memory_conditions
from planner.bounds.memory import memory
from planner.bounds.pipelines import computing
from planner.bounds.placement import Placement
from planner.bounds.program import NEVER_S, ROOM, LinearProgram, bound
from planner.bounds.solver import Solver, solve
from planner.bounds.windows import windows
from planner.bounds.work import work
from planner.costs.model import CostModel
from planner.decisions import Decisions, Place, Precision, Sharding
from planner.graph import Batch, Unit, build_graph
from planner.graph import units as units_of
from planner.lowering import lower
from planner.models import resolve_model
from planner.schedule.tasks import Op, Tier
from planner.setup import Setup
from planner.simulate.machine import run_until_steady
from planner.simulate.prediction import memory_peaks
from planner.terms import Storage

SLOW = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def machines(draw: st.DrawFn) -> HardwareProfile:
    return machine(
        kind=draw(st.sampled_from(["gpu", "gpu", "host"])),
        devices_per_node=draw(st.sampled_from([1, 2, 4])),
        cpu_params_per_s=draw(st.sampled_from([1e7, 1e9, 1e11])),
        gpu_params_per_s=draw(st.sampled_from([1e8, 1e10])),
        flop_per_s=draw(st.sampled_from([1e12, 1e14, 1e16])),
        issue_s=draw(st.sampled_from([1e-5, 1e-9])),
        num_cores_per_copy=draw(st.sampled_from([0, 1])),
        rows_half=draw(st.sampled_from([0, 500])),
        via_host_link=draw(st.booleans()),
        nvme_both=draw(st.sampled_from([None, 9e9])),
        fp8_flop_per_s=2e14,
    )


def with_memory(profile: HardwareProfile, gpu_bytes: float, host_bytes: float, nvme_bytes: float) -> HardwareProfile:
    device = profile.device.model_copy(update={"memory_bytes": quantity(gpu_bytes, "bytes")})
    host = profile.host.model_copy(update={"memory_bytes": quantity(host_bytes, "bytes")})
    assert profile.nvme is not None
    nvme = profile.nvme.model_copy(update={"capacity_bytes": quantity(nvme_bytes, "bytes")})
    return profile.model_copy(update={"device": device, "host": host, "nvme": nvme})


def test_other_boxes_are_another_program() -> None:
    """A solver that is asked again, with other boxes and with its own, answers as one that never was."""
    units = small_units()
    given = decide(units)
    program = conditions(
        Setup(units, Sharding.of(given)),
        CostModel.of(machine(), units, given),
        NEVER_S,
    )
    solver, name = Solver(program), ROOM[Tier.GPU]
    for share in (1.0, 1e-3, 1e-9, 1.0):
        boxes = {name: (share, share)}
        other = program.within(boxes)
        found, alone = solver.solve(boxes), solve(other)
        assert (found is None) == (alone is None) == (share < 1e-6)
        if found is not None and alone is not None:
            assert found.value == pytest.approx(alone.value, rel=1e-9)
            assert float(bound(other, found.multipliers)) == pytest.approx(found.value, rel=1e-9)
    again, alone = solver.solve(), solve(program)
    assert again is not None
    assert alone is not None
    assert again.value == pytest.approx(alone.value, rel=1e-9)


FLOATS = st.floats(-1e9, 1e9, allow_subnormal=True)


@given(st.data())
def test_what_multipliers_prove_is_exact(data: st.DataObject) -> None:
    """Equal to the sum in Python's fractions, to the last digit, however small the numbers."""
    program, names = LinearProgram("x"), ("x", "y", "z")
    for name in names:
        program.variable(name, *sorted(data.draw(st.tuples(FLOATS, FLOATS))))
    for i in range(data.draw(st.integers(0, 3))):
        terms = {name: data.draw(FLOATS) for name in data.draw(st.sets(st.sampled_from(names)))}
        program.at_least(f"row {i}", terms, {"": data.draw(FLOATS)}, equal=data.draw(st.booleans()))
    multipliers = {row.name: data.draw(FLOATS if row.equal else FLOATS.map(abs)) for row in program.rows}
    total, reduced = Fraction(0), dict.fromkeys(names, Fraction(0)) | {"x": Fraction(1)}
    for row in program.rows:
        total += Fraction(multipliers[row.name]) * Fraction(row.least)
        for name, a in row.terms:
            reduced[name] -= Fraction(multipliers[row.name]) * Fraction(a)
    total += sum(min(cost * Fraction(end) for end in program.boxes[name]) for name, cost in reduced.items())
    assert bound(program, multipliers) == total


def afresh(setup: Setup, cost: CostModel, limit_s: float) -> LinearProgram:
    """Return the conditions as they are written down, of all that is given and of this limit."""
    placement = Placement(setup, cost)
    work(placement)
    windows(placement, *memory(placement))
    never = (box for box in placement.program.boxes.items() if box[1][1] == NEVER_S)
    return placement.program.within({name: (low, limit_s) for name, (low, _) in never})


@settings(SLOW, max_examples=examples(50))
@given(cases(ours=True), machines(), st.permutations([NEVER_S, 3.5]))
def test_conditions_that_are_kept_are_those_made_afresh(
    case: Case, profile: HardwareProfile, limits_s: list[float]
) -> None:
    """Whatever was asked for before, and whatever is decided that conditions do not ask about."""
    units, given = case.units, case.decisions
    kinds = [Setup(units, Sharding.of(given), storage) for storage in get_args(Storage)]
    cost = CostModel.of(profile, units, given)
    for limit_s, setup in itertools.product(limits_s, [*kinds, *kinds[0].stages()]):
        found, wanted = conditions(setup, cost, limit_s), afresh(setup, cost, limit_s)
        assert list(found.boxes.items()) == list(wanted.boxes.items())
        assert (found.objective, found.rows) == (wanted.objective, wanted.rows)


@pytest.mark.parametrize("ranks", [1, 4])
def test_memory_alone_says_as_much_about_what_fits_as_all_conditions(ranks: int) -> None:
    units = small_units()
    given = decide(units, data_parallel=ranks)
    for gpu_bytes in (1e4, 1e6, 1e8):
        profile = with_memory(machine(), gpu_bytes, 1e6, 1e6)
        cost = CostModel.of(profile, units, given)
        for setup in Setup(units, Sharding.of(given)).stages():
            alone, whole = solve(memory_conditions(setup, cost)), solve(conditions(setup, cost, NEVER_S, soft=True))
            assert alone is not None
            assert whole is not None
            assert alone.value == pytest.approx(whole.value, rel=1e-6, abs=1e-9)
            # What proves it there proves it among all conditions.
            program = conditions(setup, cost, NEVER_S, soft=True)
            assert float(bound(program, alone.multipliers)) == pytest.approx(whole.value, rel=1e-6, abs=1e-9)


def check(units: tuple[Unit, ...], decisions: Decisions, profile: HardwareProfile) -> float:
    """Check bounds on a machine with just the memory that a schedule needs; return its own one over its time."""
    cost = CostModel.of(profile, units, decisions)
    simulation = run_until_steady(lower(units, decisions, asynchronous=cost.asynchronous), cost)
    if not simulation.converged:
        return math.nan
    peaks = memory_peaks(simulation.timeline, simulation.steady, cost)
    needs = [float(peaks[tier].peak_bytes) if tier in peaks else 1.0 for tier in (Tier.GPU, Tier.HOST, Tier.NVME)]
    full = with_memory(profile, *(max(num_bytes, 1.0) for num_bytes in needs))
    setup = Setup(units, Sharding.of(decisions), storage="nvme")
    period_s = simulation.period_s
    program = conditions(setup, CostModel.of(full, units, decisions), 2 * period_s)
    solution = solve(program)
    assert solution is not None, "a schedule that fits does not satisfy the conditions"
    # These decisions themselves satisfy them, which asks more of each condition.
    own = solve(decided(program, units, decisions))
    assert own is not None, "a schedule that fits does not satisfy the conditions on its own decisions"
    assert solution.value * (1 - 1e-6) <= own.value <= period_s * (1 + 1e-6)
    proven = bound(program, solution.multipliers)
    assert proven <= Fraction(period_s) * Fraction(1 + 1e-6)
    assert float(proven) == pytest.approx(solution.value, rel=1e-3, abs=1e-9)
    if decisions.pipeline_parallel > 1:
        names = [row.name for row in program.rows if row.name.startswith(("work: compute ", "work: launch "))]
        alone = {name: float(bound(program, {name: 1.0})) for name in names}
        assert computing(setup, cost) == pytest.approx(alone, rel=1e-9)
    return own.value / period_s


@settings(SLOW, max_examples=150 if ALL else 15)
@given(cases(ours=True), machines())
def test_no_schedule_is_faster_than_the_bound_where_it_just_fits(case: Case, profile: HardwareProfile) -> None:
    event(f"{check(case.units, case.decisions, profile):.1f} of the period")


@settings(SLOW, max_examples=150 if ALL else 15)
@given(cases(in_fp8=True, ours=True), machines())
def test_nor_is_one_whose_weights_move_in_fp8(case: Case, profile: HardwareProfile) -> None:
    moved = sum(map(case.decisions.moves_fp8, case.units))
    event(f"{moved} units, {check(case.units, case.decisions, profile):.1f} of the period")


@settings(SLOW, max_examples=150 if ALL else 15)
@given(cases(ours=True, tiled=True), machines())
def test_nor_is_one_in_breadth_order(case: Case, profile: HardwareProfile) -> None:
    event(f"{case.num_tiles} tiles, {check(case.units, case.decisions, profile):.1f} of the period")


@settings(SLOW, max_examples=300 if ALL else 20)
@given(in_stages(), machines())
def test_nor_is_one_in_stages(case: Case, profile: HardwareProfile) -> None:
    event(f"{check(case.units, case.decisions, profile):.1f} of the period")


SPEEDS = ({"flop_per_s": 1e16, "issue_s": 1e-9}, {"flop_per_s": 1e14}, {"flop_per_s": 3e12, "cpu_params_per_s": 1e9})
OURS = {"num_param_slots": 2, "zero_stage": 3}
ZERO_BUBBLE = {"pipeline_order": "zero-bubble"}


@pytest.mark.part(5)
@pytest.mark.parametrize("speed", SPEEDS, ids=["links bind", "balanced", "computing binds"])
@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("place", Place)
def test_bounds_of_plain_schedules_hold_and_are_near(speed, ranks, place):
    """Our own way to drive them wastes little, so that conditions which ask too much would fail here."""
    units = small_units("gpt2", 6)
    profile = machine(devices_per_node=4, **{"cpu_params_per_s": 2e8, **speed})
    repeats = 3 if (ranks == 4) == (place in {Place.CPU, Place.STREAM}) else 1
    for clip, recompute, params in itertools.product((True, False), (True, False), ("gpu", "host")):
        if params == "host" and place is Place.GPU:
            continue
        options = {"data_parallel": ranks, "num_micro_batches": repeats, "subgroup_params": 10_000_000, "clip": clip}
        starts = {"update_start": "step" if clip else "backward", "update_order": "forward" if clip else "backward"}
        if not clip and recompute:
            starts |= {"clip": True, "speculate": True}
        decisions = decide(units, place, recompute=recompute, params=params, **OURS, **options | starts)
        # What is streamed need not leave the device before, but ours does, once for each micro-batch.
        assert check(units, decisions, profile) > (0.35 if place is Place.STREAM else 0.5)


@pytest.mark.part(2)
@pytest.mark.parametrize("speed", SPEEDS, ids=["links bind", "balanced", "computing binds"])
@pytest.mark.parametrize(
    "way", [{}, {"pipeline_rounds": 3}, ZERO_BUBBLE, ZERO_BUBBLE | {"pipeline_rounds": 2}], ids=str
)
@pytest.mark.parametrize("activations", ["keep", "recompute", "offload"])
def test_bounds_of_plain_stages_hold_and_are_near(speed, way, activations):
    """Conditions that count more copies, sends, waiting or memory than there are would fail here."""
    units = small_units("demo-llama", 6, splits_backward="pipeline_order" in way)
    stages = 3 if "pipeline_order" in way else 2
    given = {"pipeline_parallel": stages, "num_micro_batches": 6, "activations": activations, **way}
    shares = []
    for place, params in itertools.product((Place.GPU, Place.CPU, Place.STREAM), ("gpu", "host")):
        if (place, params) != (Place.GPU, "host"):
            profile = machine(devices_per_node=4, via_host_link=True, **{"cpu_params_per_s": 2e8, **speed})
            shares.append(check(units, decide(units, place, params=params, **given), profile))
    assert min(shares) > (0.35 if stages == 3 else 0.45)


@pytest.mark.parametrize("num_stages", [2, 3, 6])
@pytest.mark.parametrize("num_micro_batches", [2, 6])
@pytest.mark.parametrize("order", [None, "zero-bubble"])
def test_bounds_of_stages_that_only_compute_are_nearly_exact(num_stages, num_micro_batches, order):
    """Layers are so large that nothing else counts: conditions that ask a little too much would fail here."""
    model = resolve_model("llama-2-7b").model_copy(update={"num_layers": 6, "vocab_size": 1024})
    units = units_of(build_graph(model, Batch(1, 2048, splits_backward=order is not None)))
    given = {"pipeline_parallel": num_stages, "num_micro_batches": num_micro_batches, "pipeline_order": order}
    decisions = decide(units, Place.GPU, params="gpu", activations="keep", **given)
    assert check(units, decisions, load_profile("h100")) > 0.85


@pytest.mark.parametrize(("num_rounds", "share"), [(1, 0.78), (3, 0.9)])
def test_stages_compute_the_other_micro_batches_when_all_is_updated(num_rounds, share):
    model = resolve_model("llama-2-7b").model_copy(update={"num_layers": 6, "vocab_size": 1024})
    units = units_of(build_graph(model, Batch(1, 2048)))
    given = {"pipeline_parallel": 2, "pipeline_rounds": num_rounds, "num_micro_batches": 6, "activations": "keep"}
    assert check(units, decide(units, Place.CPU, params="gpu", **given), load_profile("h100")) > share


@pytest.mark.parametrize(
    ("place", "params", "num_micro_batches", "share"),
    [
        (Place.GPU, "gpu", 2, 0.8),  # what passes from chunk to chunk is sent, there and back
        (Place.GPU, "gpu", 6, 0.87),  # gradients are added to those of earlier micro-batches
        (Place.STREAM, "gpu", 6, 0.87),  # state that is in no slot is stored meanwhile
        (Place.STREAM, "host", 6, 0.86),  # and all whose weights are fetched
        (Place.CPU, "host", 6, 0.83),
    ],
)
def test_bounds_of_rounds_are_near(place, params, num_micro_batches, share):
    """On a machine whose links and memory bind, what one condition leaves out is missing here."""
    model = resolve_model("llama-2-7b").model_copy(update={"num_layers": 6, "vocab_size": 1024})
    units = units_of(build_graph(model, Batch(1, 1024)))
    given = {"pipeline_parallel": 2, "pipeline_rounds": 3, "num_micro_batches": num_micro_batches}
    decisions = decide(units, place, params=params, activations="keep", subgroup_params=10_000_000, **given)
    assert check(units, decisions, load_profile("rtx-4090x8")) > share


@pytest.mark.parametrize("speed", SPEEDS, ids=["links bind", "balanced", "computing binds"])
@pytest.mark.parametrize("ranks", [1, 4])
def test_bounds_of_weights_fetched_in_fp8_hold_and_are_near(speed, ranks):
    """Conditions that count more bytes, casts or memory than there are would fail here."""
    units = small_units("demo-llama", 6, in_fp8=True)
    narrow = Precision(weights="bf16", products="fp8")
    for clip, place in itertools.product((True, False), (Place.CPU, Place.STREAM, Place.NVME)):
        # Without clipping updates are fast, there is one slot of each size, and gathers take long: one device a node.
        # With many micro-batches copies of weights bind.
        repeats = 3 if clip or place is not Place.CPU else 12
        rates = {"fp8_flop_per_s": 2e16, **speed, "cpu_params_per_s": 2e8 if clip else 1e11}
        profile = machine(devices_per_node=4 if clip else 1, **rates)
        options = {"data_parallel": ranks, "num_micro_batches": repeats, "subgroup_params": 10_000_000, "clip": clip}
        options |= {"update_start": "step" if clip else "backward", "update_order": "forward" if clip else "backward"}
        options |= {"num_param_slots": 1 + clip, "zero_stage": 3, "recompute": place is Place.CPU}
        decisions = decide(units, place, precision=narrow, fp8_weights=True, params="host", **options)
        assert check(units, decisions, profile) > 0.4


@pytest.mark.parametrize("fp8_weights", [True, None])
@pytest.mark.parametrize("ranks", [1, 4])
def test_conditions_charge_a_fetch_with_what_it_takes(ranks: int, fp8_weights: bool | None) -> None:
    units, precision = small_units("demo-llama", in_fp8=True), Precision(weights="bf16", products="fp8")
    options = {"precision": precision, "fp8_weights": fp8_weights, "data_parallel": ranks, "zero_stage": 3}
    decisions = decide(units, params="host", **options)
    cost = CostModel.of(machine(devices_per_node=4, fp8_flop_per_s=2e14), units, decisions)
    fetches = {
        t.unit: cost.price(t).duration_s for t in lower(units, decisions, asynchronous=True).tasks if t.op is Op.FETCH
    }
    assert fetches.keys() == {unit.name for unit in units}
    program = conditions(Setup(units, Sharding.of(decisions)), cost, NEVER_S)
    charged = dict(next(row.terms for row in program.rows if row.name == "work: h2d"))
    for name, duration_s in fetches.items():
        assert -charged[f"{name}:{'fetches' if ranks > 1 else 'fills'}"] == pytest.approx(duration_s, rel=1e-9)


@pytest.mark.part(7)  # two that differ in all
@pytest.mark.parametrize("read_bytes_per_s", [1e9, 8e9], ids=["reads bind", "writes bind"])
@pytest.mark.parametrize("params", ["host", "nvme"])
@pytest.mark.parametrize("spill", [False, True])
def test_bounds_of_schedules_through_nvme_hold_and_are_near(read_bytes_per_s, params, spill):
    """Drives bind here, so that conditions which ask too much of them, or of host memory, would fail."""
    units = small_units("demo-llama", 14)
    profile = machine(devices_per_node=4, flop_per_s=1e13, issue_s=1e-9, cpu_params_per_s=1e11)
    assert profile.nvme is not None
    nvme = profile.nvme.model_copy(update={"read": rate(read_bytes_per_s, "bytes")})
    profile = profile.model_copy(update={"nvme": nvme})
    for clip, slots, activations in itertools.product((True, False), (1, 12), ("keep", "offload", "offload-nvme")):
        options = {"num_nvme_slots": slots, "num_activation_slots": 1, "spill_gradients": spill, "clip": clip}
        options |= {"update_start": "step" if clip else "backward", "update_order": "forward" if clip else "backward"}
        decisions = decide(units, Place.NVME, params=params, activations=activations, **OURS, **options)
        # One buffer reads, updates and writes in turn, which conditions on each alone do not know.
        assert check(units, decisions, profile) > (0.4 if slots == 1 else 0.6)
