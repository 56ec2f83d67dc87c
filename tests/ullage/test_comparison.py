import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.schedule import Lane, Op, Phase, Schedule, Task, Tier
from planner.timeline import Timeline
from ullage.cli import main
from ullage.comparison import Row, compare, render_comparison
from ullage.console import console
from ullage.runs import RunRecord, rows, save_run
from ullage.simulation import simulate

SCHEDULE = Schedule(
    (
        Task(0, Lane.COMPUTE, Op.FORWARD, Phase.FORWARD, "a"),
        Task(1, Lane.COMPUTE, Op.BACKWARD, Phase.BACKWARD, "a", after=(0,)),
        Task(2, Lane.CPU, Op.UPDATE, Phase.UPDATE, "a", after=(1,), num_params=10),
    )
)


def timeline(*durations_s: tuple[float, float, float]) -> Timeline:
    flat = np.cumsum(np.array(durations_s).ravel())
    ends_s = flat.reshape(len(durations_s), 3)
    starts_s = np.concatenate([[0.0], flat[:-1]]).reshape(len(durations_s), 3)
    return Timeline(SCHEDULE, starts_s, ends_s)


@given(st.floats(0.1, 10.0), st.integers(1, 4))
def test_a_run_that_takes_a_factor_longer_has_that_error(factor, count):
    predicted = timeline((1.0, 2.0, 0.5), (1.0, 2.0, 0.5), (1.0, 2.0, 0.5))
    measured = Timeline(SCHEDULE, predicted.start_s * factor + 7, predicted.end_s * factor + 7)
    found = compare(predicted, 1, measured, list(range(min(count, 3))), {Tier.GPU: 100}, {Tier.GPU: 50})
    for row in (*found.phases, *found.lanes):
        assert row.error == pytest.approx(1 / factor - 1, abs=1e-9)
    assert [row.name for row in found.phases] == ["forward", "backward", "update", "iteration"]
    assert [row.predicted for row in found.phases] == pytest.approx([1.0, 2.0, 0.5, 3.5])
    assert found.memory == (Row("gpu", 100, 50, "B"),)
    assert found.memory[0].error == 1.0


def test_measured_is_the_median_of_the_steady_iterations_only():
    measured = timeline((9.0, 9.0, 9.0), (1.0, 2.0, 0.5), (1.2, 2.0, 0.5), (5.0, 2.0, 0.5), (9.0, 9.0, 9.0))
    found = compare(timeline((1, 2, 0.5), (1, 2, 0.5)), 0, measured, [1, 2, 3], {}, {Tier.HOST: 5})
    assert found.phases[0].measured == pytest.approx(1.2)
    assert found.phases[3].measured == pytest.approx(3.7)
    assert found.memory == (Row("host", None, 5, "B"),)
    assert found.memory[0].error is None
    assert found.num_iterations == 3


@pytest.mark.parametrize("iterations", [[], [2], [-1]])
def test_iterations_must_have_been_measured(iterations):
    some = timeline((1, 1, 1), (1, 1, 1))
    with pytest.raises(ValueError, match="measured"):
        compare(some, 0, some, iterations, {}, {})


@settings(max_examples=20)
@given(st.floats(1e-9, 1e9), st.floats(1e-9, 1e9))
def test_error_is_positive_if_too_much_was_predicted(predicted, measured):
    error = Row("x", predicted, measured, "s").error
    assert (error > 0) == (predicted / measured > 1)


def test_error_of_nothing():
    assert Row("x", 1.0, 0.0, "s").error is None
    assert Row("x", 1.0, None, "s").error is None


def test_rendering_has_all_rows(capsys):
    some = timeline((1, 2, 0.5), (1, 2, 0.5))
    found = compare(some, 0, some, [0], {Tier.GPU: 100}, {})
    console().print(render_comparison(found))
    text = capsys.readouterr().out
    for name in ("forward", "backward", "update", "iteration", "compute", "cpu", "gpu", "+0.0 %"):
        assert name in text


def test_compare_command_on_a_run_file(plan, tmp_path, capsys):
    simulation = simulate(plan, 6)
    slow = simulation.timeline
    record = RunRecord(
        plan=plan,
        machine="a test",
        losses=(1.0,) * 6,
        start_s=rows(slow.start_s * 1.25),
        end_s=rows(slow.end_s * 1.25),
        steady_iterations=(3, 4),
        memory={tier: use.peak_bytes // 2 for tier, use in plan.prediction.memory.items()},
        data_position=0,
    )
    path, trace = tmp_path / "run.json", tmp_path / "trace.json"
    save_run(record, path)
    assert main(["compare", str(path), "--json", "--trace", str(trace)]) == 0
    found = json.loads(capsys.readouterr().out)
    for name in ("forward", "backward", "iteration"):
        assert found["phases"][name]["error"] == pytest.approx(-0.2, abs=1e-3)
    assert found["memory"]["gpu"]["error"] == pytest.approx(1.0)
    processes = [e for e in json.loads(trace.read_text())["traceEvents"] if e["name"] == "process_name"]
    assert [e["args"]["name"] for e in processes] == ["predicted", "measured"]
    assert main(["compare", str(path)]) == 0
    assert "-20.0 %" in capsys.readouterr().out
