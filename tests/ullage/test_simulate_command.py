import gzip
import json

import pytest

from planner.engines import POLICIES
from planner.schedule import MemoryClass
from planner.timeline import MemoryUse
from ullage.cli import main
from ullage.commands.simulate import columns
from ullage.simulation import engine_decisions, simulate


def shown(capsys, *arguments) -> dict:
    assert main(["simulate", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_plan_simulates_as_it_predicted(plan, plan_path, capsys):
    found = shown(capsys, plan_path)
    seen = plan.prediction
    assert found["phases_s"]["iteration"] == seen.iteration_s
    assert found["phases_s"]["update"] == seen.update_s
    assert found["critical_s"] == seen.critical_s
    assert found["busy_s"] == seen.busy_s
    assert {tier: use["peak_bytes"] for tier, use in found["memory"].items()} == {
        tier: use.peak_bytes for tier, use in seen.memory.items()
    }


def test_engines_simulate_as_the_plan_says(plan, plan_path, capsys):
    rows = {row.name: row for row in plan.engines}
    assert set(rows) == set(POLICIES)
    for name, row in rows.items():
        found = shown(capsys, plan_path, "--engine", name)
        if row.iteration_s is not None:
            assert found["phases_s"]["iteration"] == pytest.approx(row.iteration_s, rel=0.02)


def test_settings_of_engines(plan):
    places = [p for u in engine_decisions(plan, "twin-flow", "0.5").units.values() for p in u.update]
    assert abs(places.count("cpu") - len(places) / 2) <= 0.5
    strided = [p for u in engine_decisions(plan, "interleaved", "2").units.values() for p in u.update]
    assert strided == ["cpu" if i % 2 == 0 else "stream" for i in range(len(strided))]
    assert engine_decisions(plan, "ullage") == plan.decisions
    with pytest.raises(ValueError, match="choose one of twin-flow, interleaved"):
        engine_decisions(plan, "ullage", "3")


def test_iterations(plan):
    simulation = simulate(plan, 5)
    assert (simulation.timeline.num_iterations, simulation.steady) == (5, 3)


def test_text_is_the_schedule(plan, plan_path, capsys):
    assert main(["simulate", str(plan_path), "--text"]) == 0
    assert capsys.readouterr().out == plan.schedule().to_text() + "\n"


def test_screen_has_every_lane_and_tier(plan, plan_path, tmp_path, capsys):
    trace = tmp_path / "trace.json.gz"
    assert main(["simulate", str(plan_path), "--trace", str(trace)]) == 0
    text = capsys.readouterr().out
    for lane in {task.lane for task in plan.schedule().tasks}:
        assert f"\n{lane} " in text
    for part in ("forward", "backward", "update", "binds", "gpu memory of one rank", "host memory of one rank", "busy"):
        assert part in text
    assert str(trace) in text.replace("\n", "")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {"predicted"}


def test_chart_shows_the_most_that_is_held():
    kept = MemoryClass.PARAMETERS
    use = MemoryUse(times_s=(0.0, 0.5, 0.51), num_bytes={kept: (1, 9, 2)}, peak_bytes=9, peak_by_class={kept: 9})
    chart = columns(use, use.num_bytes[kept], 1.0)
    assert chart[0] == chart[35] == 1
    assert chart[36] == 9
    assert chart[37:] == [2] * (len(chart) - 37)
