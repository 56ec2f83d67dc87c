"""Groups of units, their slack, and the reasons of what was decided."""

import dataclasses

import pytest
from explained import NAMES, bench, with_decisions
from machines import machine

from planner.decisions import Place
from planner.explain.bench import Bench
from planner.explain.moves import (
    alternatives,
    cheapest_move,
    deadline,
    find_unit,
    groups,
    moved,
    single_moves,
    why,
)
from planner.schedule.tasks import Op, Tier


@pytest.mark.part(2)
@pytest.mark.parametrize("name", NAMES)
def test_groups_hold_every_unit_once_and_tell_the_cheapest_move(name: str) -> None:
    explained = bench(name)
    found = groups(explained)
    names = [unit for group in found for unit in group.units]
    assert sorted(names) == sorted(explained.units)
    for group in found:
        decided = [explained.decisions.units[unit] for unit in group.units]
        assert {(unit.params, unit.activations) for unit in decided} == {(group.params, group.activations)}
        assert sum(group.updates.values()) == pytest.approx(1)
        middle = group.units[len(group.units) // 2]
        assert list(group.cheapest) == list(dict.fromkeys((group.units[0], middle, group.units[-1])))
    unit = next(iter(found[1].cheapest))
    trials = [explained.trial(moved(explained, unit, decision)) for decision in single_moves(explained, unit)]
    best = found[1].cheapest[unit]
    assert best is not None
    assert best.order == min(trial.order for trial in trials)
    everything = groups(explained, every=True)
    assert sorted(unit for group in everything for unit in group.cheapest) == sorted(explained.units)


def test_layers_that_are_treated_alike_are_one_group() -> None:
    explained = bench("one")
    alike = with_decisions(
        explained,
        units={
            name: unit.model_copy(
                update={
                    "params": "gpu",
                    "activations": "keep",
                    "update": (Place.CPU if name.startswith("layers.0") else Place.GPU,) * len(unit.update),
                }
            )
            for name, unit in explained.decisions.units.items()
        },
    )
    separate = with_decisions(
        alike,
        units={
            **alike.decisions.units,
            "layers.2.mlp": alike.decisions.units["layers.2.mlp"].model_copy(
                update={"update": alike.decisions.units["layers.0.mlp"].update}
            ),
        },
    )
    assert {"layers.0.mlp", "layers.1.mlp", "layers.2.mlp"} <= {group.name for group in groups(separate)}
    last = explained.plan.model.num_layers - 1
    assert [group.name for group in groups(alike)] == [
        "embed",
        "layers.0.attn",
        "layers.0.mlp",
        f"layers.1-{last}.attn",
        f"layers.1-{last}.mlp",
        "head",
    ]


@pytest.mark.part(2)
@pytest.mark.parametrize("name", NAMES)
def test_units_are_ready_before_they_are_needed(name: str) -> None:
    explained = bench(name)
    timeline, steady = explained.simulation.timeline, explained.simulation.steady
    tight = 0
    for unit in explained.units:
        when = deadline(explained, unit)
        assert when is not None
        assert 0 < when.update_start_s < when.update_end_s <= when.ready_s
        assert when.slack_s >= -1e-12
        user = next(t.index for t in explained.schedule.tasks if t.unit == unit and t.op is Op.FORWARD)
        next_s = timeline.start_s[steady + 1, user] - timeline.begin_s(steady)
        assert when.deadline_s == pytest.approx(next_s)
        tight += when.critical
    updates_bind = {"cpu", "h2d", "state-in", "state-out", "gpu-update"} & {
        lane for lane, s in explained.plan.prediction.critical_s.items() if s > 0.05 * explained.own.iteration_s
    }
    assert bool(tight) or not updates_bind


def test_without_overlap_every_update_is_early() -> None:
    barrier = with_decisions(bench("one"), overlap_next_forward=False)
    ready = [deadline(barrier, unit) for unit in barrier.units]
    assert all(when is not None and when.update_end_s <= barrier.own.iteration_s * (1 + 1e-9) for when in ready)


def test_reasons() -> None:
    explained = bench("one")
    roomy = machine(gpu_bytes=1e12, cpu_params_per_s=1e8)
    bad = Bench(
        explained.plan.model_copy(
            update={
                "hardware": roomy,
                "decisions": explained.placed(dict.fromkeys(explained.pieces(), Place.CPU)),
            }
        )
    )
    unit = "layers.0.attn"
    reason, about = why(bad, alternatives(bad, unit))
    assert reason == "better"
    assert about is not None
    assert about.iteration_s < bad.own.iteration_s
    best = cheapest_move(bad, unit)
    assert best is not None
    assert best.iteration_s < bad.own.iteration_s
    found = alternatives(bad, unit)
    short = dataclasses.replace(about, missing_bytes={Tier.GPU: 1})
    lacking = (found[0], *(short for _ in found[1:]))
    assert why(bad, lacking)[0] == "lacks"
    assert why(bad, found[:1]) == ("only", None)
    slower = dataclasses.replace(bad.own, iteration_s=2 * bad.own.iteration_s)
    assert why(bad, (found[0], slower)) == ("fastest", slower)
    louder = dataclasses.replace(bad.own, traffic_bytes=2 * bad.own.traffic_bytes)
    assert why(bad, (found[0], louder)) == ("bytes", louder)
    equal = dataclasses.replace(bad.own)
    assert why(bad, (found[0], equal)) == ("equal", equal)


def test_an_unknown_unit_names_near_ones() -> None:
    explained = bench("one")
    assert find_unit(explained, "layers.1.mlp") == "layers.1.mlp"
    with pytest.raises(ValueError, match=r"no unit 'layers.1.mpl'; did you mean layers.1.mlp"):
        find_unit(explained, "layers.1.mpl")
    with pytest.raises(ValueError, match=r"no unit 'x'; did you mean "):
        find_unit(explained, "x")
