import dataclasses
import gzip
import json

import numpy as np
import pytest

from hwprofiles.registry import load_profile, save_profile
from planner.costs.model import CostModel
from planner.schedule.tasks import Lane, Tier
from planner.simulate.prediction import predict
from ullage.analysis.simulation import planned, simulate
from ullage.main import main
from ullage.report.charts import Trace
from ullage.report.iteration import iteration_part
from ullage.report.terminal import _columns, show
from ullage.rivals.engines.catalogue import POLICIES, STORAGE_POLICIES


def shown(capsys, *arguments) -> dict:
    code = main(["simulate", *map(str, arguments), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert code == (0 if found["fits"] else 1)
    return found


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
    assert set(rows) == set(POLICIES) - {"slideformer"}  # which does not clip
    for name, row in rows.items():
        found = shown(capsys, plan_path, "--engine", name)
        assert found["fits"] == row.fits
        if row.iteration_s is not None:
            num_steps = 4 if name == "zenflow" else 1
            assert found["phases_s"]["iteration"] == pytest.approx(num_steps * row.iteration_s, rel=0.02)


def test_settings_of_engines(plan):
    def places(*engine: str) -> set[str]:
        return {p.value for u in planned(plan, *engine).decisions.units.values() for p in u.update}

    # The model is smaller than one subgroup, which these engines treat as a whole.
    assert (places("twin-flow", "0"), places("twin-flow", "1")) == ({"gpu"}, {"cpu"})
    assert (places("super-offload", "0"), places("super-offload", "1")) == ({"gpu"}, {"cpu"})
    assert (places("interleaved", "1"), places("interleaved", "2")) == ({"stream"}, {"cpu"})
    assert planned(plan, "ullage").decisions == plan.decisions
    assert planned(plan, "zenflow", "3").decisions.num_micro_batches == 3 * plan.decisions.num_micro_batches
    with pytest.raises(ValueError, match="the update interval must be a whole number of at least 1"):
        planned(plan, "zenflow", "often")
    with pytest.raises(ValueError, match="choose one of twin-flow, super-offload, interleaved"):
        planned(plan, "ullage", "3")


def test_iterations(plan):
    simulation = simulate(plan, 5)
    assert (simulation.timeline.num_iterations, simulation.steady) == (5, 3)


def test_text_is_the_schedule(plan, plan_path, capsys):
    assert main(["simulate", str(plan_path), "--text"]) == 0
    assert capsys.readouterr().out == plan.schedule().to_text() + "\n"


@pytest.mark.parametrize("engine", STORAGE_POLICIES)
def test_engines_that_need_drives_can_be_asked_for(engine, plan_path, tmp_path, capsys):
    found = shown(
        capsys, plan_path, "--engine", engine, "--figure", tmp_path / "f.html", "--trace", tmp_path / "t.json"
    )
    assert {"nvme-read", "nvme-write"} & found["traffic"].keys()
    assert found["memory"]["nvme"]["peak_bytes"] > 0
    # Whatever crosses PCIe is seen there: no lane of its own beside it.
    assert found["traffic"].keys() <= {"h2d", "d2h", "nvme-read", "nvme-write"}
    assert main(["simulate", str(plan_path), "--engine", engine]) in {0, 1}  # DeepSpeed's bucket takes 1 GB
    assert "Memory of drives of one node" in capsys.readouterr().out


def test_engines_that_need_drives_are_refused_without_any(tiny_model, tmp_path, capsys):
    profile = load_profile("rtx-4090").model_copy(update={"name": "no-drives", "nvme": None})
    save_profile(profile, tmp_path / "no-drives.json")
    plan, arguments = (
        tmp_path / "plan.json",
        ["--model", str(tiny_model), "--hardware", str(tmp_path / "no-drives.json")],
    )
    assert main(["plan", *arguments, "--output", str(plan), "--json"]) == 0
    capsys.readouterr()
    assert main(["simulate", str(plan), "--engine", "zero-infinity"]) == 2
    assert "no-drives has no nvme; add it, or place nothing there" in capsys.readouterr().err


def test_the_scripts_own_time_is_shown_where_it_is_a_task(plan, capsys):
    """No plan has it, published runs do: it must add up, and be drawn."""
    seen = planned(plan, "zero-offload")
    machine = load_profile("a100x4-40g")
    decisions = seen.decisions.model_copy(update={"loop": True})
    cost = CostModel.of(machine, seen.units, decisions)
    seen = dataclasses.replace(seen, decisions=decisions, cost=cost)
    output = seen.to_json()["phases_s"]
    assert output["loop"] == pytest.approx(machine.device.loop_s.value)
    assert sum(output.values()) == pytest.approx(2 * output["iteration"])
    prediction = predict(seen.units, seen.seq_len, decisions, cost, seen.simulation)
    parts_s = (prediction.forward_s, prediction.backward_s, prediction.update_s, prediction.loop_s)
    assert sum(parts_s) == pytest.approx(prediction.iteration_s)
    show(iteration_part(seen))
    text = capsys.readouterr().out
    assert "\nloop " in text
    assert "l loop" in text


def test_what_does_not_fit_is_shown_and_said(plan_path, capsys):
    arguments = ["simulate", str(plan_path)]
    assert main([*arguments, "--engine", "gpu-only"]) == 1
    text = capsys.readouterr().out
    line = next(line for line in text.splitlines() if line.startswith("does not fit "))
    assert "gpu memory lacks" in line
    assert "beyond the 3.00 MB of one device" in text
    assert "Memory of one device" in text
    assert main(arguments) == 0
    assert "does not fit" not in capsys.readouterr().out


def test_json_has_what_is_seen_over_time(plan, plan_path, capsys):
    found = shown(capsys, plan_path)
    period_s = found["phases_s"]["iteration"]
    tasks = plan.schedule().tasks
    moved = {"h2d": 0, "d2h": 0}
    for task in tasks:
        link = {"h2d": "h2d", "state-in": "h2d", "d2h": "d2h", "state-out": "d2h"}.get(task.lane)
        moved |= {link: moved[link] + task.num_bytes} if link else {}
    assert {link: round(use["num_bytes"]) for link, use in found["traffic"].items()} == moved
    for use in found["traffic"].values():
        lengths_s = np.diff([*use["times_s"], period_s])
        assert float(np.dot(lengths_s, use["bytes_per_s"])) == pytest.approx(use["num_bytes"])
        assert max(use["bytes_per_s"]) == use["peak_bytes_per_s"] <= 1.001 * 32e9  # PCIe 4.0 x16
    for tier, use in found["memory_over_time"].items():
        totals = np.sum(list(use["num_bytes"].values()), axis=0)
        assert max(totals) == found["memory"][tier]["peak_bytes"]
        assert len(totals) == len(use["times_s"])
    for use in found["busy_over_time"].values():
        assert set(use["busy"]) <= {0, 1}
    path = found["critical_path"]
    assert sum(step["end_s"] - step["start_s"] for step in path) == pytest.approx(period_s)
    assert {step["task"] for step in path} <= {task.name for task in tasks}
    assert sum(found["slowed_by_sharing_s"].values()) == pytest.approx(sum(step["slowed_s"] for step in path))
    assert sum(s["end_s"] - s["start_s"] for s in found["stretches"]) == pytest.approx(period_s)


def test_half_the_work_helps_no_more_than_the_lanes_share(plan_path, capsys):
    for engine in ("zero-offload", "interleaved"):
        found = shown(capsys, plan_path, "--engine", engine)
        period_s = found["phases_s"]["iteration"]
        assert found["half_work_iteration_s"]
        for lane, seconds in found["half_work_iteration_s"].items():
            # Half of what the lane is responsible for, and what it takes from others by sharing.
            least_s = period_s - found["critical_s"][lane] / 2 - sum(found["slowed_by_sharing_s"].values())
            assert least_s * 0.999 <= seconds <= period_s * 1.001
        assert f"bound by {max(found['critical_s'], key=found['critical_s'].get)} " in found["verdict"]["binds"]


def test_screen_has_every_lane_and_tier(plan, plan_path, tmp_path, capsys):
    trace = tmp_path / "trace.json.gz"
    assert main(["simulate", str(plan_path), "--trace", str(trace)]) == 0
    text = capsys.readouterr().out
    for lane in {task.lane for task in plan.schedule().tasks}:
        assert f"\n{lane} " in text
    parts = ("forward", "backward", "update", "bound by ", "would help", "critical path", "Traffic over", "busy")
    for part in (*parts, "Memory of one device", "Memory of one host"):
        assert part in text
    assert str(trace) in text.replace("\n", "")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {"predicted"}


@pytest.mark.parametrize("width", ["40", "60", "79"])
def test_a_narrow_terminal_cuts_nothing_off(width, plan_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", width)
    assert main(["simulate", str(plan_path), "--engine", "interleaved"]) in {0, 1}
    assert "…" not in capsys.readouterr().out


def test_figures_are_pages_and_repeatable(plan_path, tmp_path, capsys):
    for name in ("a.html", "b.html"):
        command = ["simulate", str(plan_path), "--engine", "zero-offload", "--figure", str(tmp_path / name)]
        assert main(command) in {0, 1}
        assert f"figure written to {tmp_path / name}" in capsys.readouterr().out.replace("\n", "")
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()
    assert "bound by " in (tmp_path / "a.html").read_text()


def test_a_figure_shows_what_was_simulated(plan):
    seen = planned(plan, "zero-offload")
    shown = iteration_part(seen).pictures
    assert shown["gantt"].period_s == pytest.approx(seen.period_s)
    areas = [trace.name for trace in shown["memory-gpu"].traces]
    assert set(areas) == {kind.value for kind, n in seen.view.memory[Tier.GPU].num_bytes.items() if any(n)}
    rates = {trace.colour: max(map(abs, trace.y)) for trace in shown["traffic-host-link"].traces if trace.faint}
    assert rates == pytest.approx({"down": seen.view.traffic[Lane.H2D].peak, "up": seen.view.traffic[Lane.D2H].peak})
    assert {trace.name for trace in shown["busy"].traces} == {"device computes", "CPU updates"}


def test_chart_shows_the_most_that_is_held():
    chart = _columns(Trace("", [0.0, 0.5, 0.51, 1.0], [1.0, 9.0, 2.0, 2.0], "area", "ink"), 72)
    assert chart[0] == chart[35] == 1
    assert chart[36] == 9
    assert chart[37:] == [2] * (len(chart) - 37)
