"""Decisions that contradict each other, or that another model needs, are refused."""

from collections import Counter

import pytest
from amount import examples
from cases import MODELS, decide, small_units
from hazards import violations
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from walked import ordered_by_rules

from planner.decisions import Decisions, Place, Sharding
from planner.graph import Unit
from planner.lowering import lower
from planner.placements import mixed
from planner.setup import Mix, Setup

SLOW = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


# Between them these need every kind of dependency.
DENSE = small_units("demo-llama")


@pytest.mark.parametrize(
    ("unit", "change", "message"),
    [
        ("layers.0.attn", {"update": ()}, "has 1 subgroups .* but 0 places"),
        ("layers.0.attn", {"activations": "recompute"}, "segment layers.0"),
        ("embed", {"activations": "recompute"}, "embed cannot be recomputed"),
        ("head", {"activations": "offload"}, "head cannot be offloaded"),
    ],
)
def test_decisions_that_do_not_fit_are_refused(unit: str, change: dict[str, object], message: str) -> None:
    decisions = decide(DENSE)
    units = decisions.units | {unit: decisions.units[unit].model_copy(update=change)}
    with pytest.raises(ValueError, match=message):
        lower(DENSE, decisions.model_copy(update={"units": units}), asynchronous=False)


def test_decisions_for_another_model_are_refused() -> None:
    with pytest.raises(ValueError, match=r"differ in units layers\.2\.attn"):
        lower(small_units("demo-llama", 3), decide(DENSE), asynchronous=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip": True, "update_start": "backward"}, "set update_start to 'step', speculate to true or clip to false"),
        ({"clip": False, "speculate": True}, "speculate is for gradients that are clipped"),
        ({"optimizer": "lion", "speculate": True}, "needs updates that can be taken back.*not lion"),
        ({"params": "nvme", "place": Place.GPU}, "set params to 'gpu' or update to"),
        ({"params": "nvme", "place": Place.CPU}, "set update to 'nvme' or params to 'host'"),
        ({"params": "host", "place": Place.GPU}, "set params to 'gpu' or update to"),
        ({"params": "host", "data_parallel": 2, "zero_stage": 1}, "set params to 'gpu' or zero_stage to 3"),
        ({"params": "host", "data_parallel": 2, "zero_stage": 2}, "set params to 'gpu' or zero_stage to 3"),
    ],
)
def test_decisions_that_contradict_each_other_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lower(DENSE, decide(DENSE, **options), asynchronous=False)


@settings(SLOW, max_examples=examples(30))
@given(st.data())
def test_mixes_are_valid(data: st.DataObject) -> None:
    model, ranks = data.draw(st.sampled_from(MODELS)), data.draw(st.sampled_from([1, 4]))
    units: tuple[Unit, ...] = small_units(model)
    setup = Setup(units, Sharding(data_parallel=ranks, subgroup_params=500_000, clip=data.draw(st.booleans())))
    counts = setup.movable
    total = sum(counts.values())
    num_gpu = data.draw(st.integers(0, total))
    mix = Mix(
        num_gpu=num_gpu,
        num_stream=(num_stream := data.draw(st.integers(0, total - num_gpu))),
        num_keep=data.draw(st.integers(0, 2)),
        num_host=data.draw(st.integers(0, len(units))) if ranks == 1 else 0,
        num_slots=data.draw(st.integers(1, 4)),
        zero_stage=data.draw(st.sampled_from([1, 2, 3])) if ranks > 1 else 0,
    )
    decisions = mixed(setup, mix)
    placed = Counter(place for name, unit in decisions.units.items() if counts[name] for place in unit.update)
    assert all(set(unit.update) <= {Place.GPU} for name, unit in decisions.units.items() if not counts[name])
    assert (placed[Place.GPU], placed[Place.STREAM], placed.total()) == (num_gpu, num_stream, total)
    Decisions.model_validate(decisions.model_dump())
    schedule = lower(units, decisions, asynchronous=True)
    assert violations(schedule, units, decisions, ordered_by_rules(schedule)) == []
