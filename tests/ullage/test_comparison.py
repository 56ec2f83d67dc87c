import json

import numpy as np
import pytest
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from hwprofiles.paths import number, quantities
from hwprofiles.registry import load_profile
from planner.costs.resources import Price, Resource
from planner.fitting.attribution import TasksOfKind
from planner.schedule.schedule import Schedule
from planner.schedule.tasks import Lane, Op, Phase, Task, Tier
from planner.schedule.timeline import Timeline
from planner.simulate.machine import Simulation, run
from ullage.analysis.comparison import Row, compare, explain_run
from ullage.analysis.runs import RunRecord, load_run, rows, save_run
from ullage.analysis.simulation import simulate
from ullage.main import main
from ullage.output.formatting import si
from ullage.report.run import comparison_section, count_words
from ullage.report.terminal import show

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


def steady(predicted: Timeline) -> Simulation:
    return Simulation(predicted, range(1), converged=True)


@given(st.floats(0.1, 10.0), st.integers(1, 4))
def test_a_run_that_takes_a_factor_longer_has_that_error(factor, count):
    predicted = timeline((1.0, 2.0, 0.5), (1.0, 2.0, 0.5), (1.0, 2.0, 0.5))
    measured = Timeline(SCHEDULE, predicted.start_s * factor + 7, predicted.end_s * factor + 7)
    found = compare(steady(predicted), measured, list(range(min(count, 3))), {Tier.GPU: 100}, {Tier.GPU: 50})
    for row in (*found.phases, *found.lanes):
        assert row.error == pytest.approx(1 / factor - 1, abs=1e-9)
    assert [row.name for row in found.phases] == ["forward", "backward", "update", "iteration"]
    assert [row.predicted for row in found.phases] == pytest.approx([1.0, 2.0, 0.5, 3.5])
    assert found.memory == (Row("gpu", 100, 50, "B"),)
    assert found.memory[0].error == 1.0


def test_measured_is_the_mean_of_the_middle_steady_iterations_only():
    measured = timeline((9.0, 9.0, 9.0), (1.0, 2.0, 0.5), (1.2, 2.0, 0.5), (5.0, 2.0, 0.5), (9.0, 9.0, 9.0))
    found = compare(steady(timeline((1, 2, 0.5), (1, 2, 0.5))), measured, [1, 2, 3], {}, {Tier.HOST: 5})
    assert found.phases[0].measured == pytest.approx(1.2)
    assert found.phases[3].measured == pytest.approx(3.7)
    assert found.memory == (Row("host", None, 5, "B"),)
    assert found.memory[0].error is None
    assert (found.num_iterations, found.num_read) == (3, 1)


def test_without_an_iteration_as_planned_only_memory_is_measured():
    some = timeline((1, 1, 1), (1, 1, 1))
    found = compare(steady(some), some, [], {}, {Tier.HOST: 5})
    assert {row.measured for row in (*found.phases, *found.lanes)} == {None}
    assert found.memory[0].measured == 5
    assert (found.num_iterations, found.num_read) == (0, 0)


@pytest.mark.parametrize("iterations", [[2], [-1]])
def test_iterations_must_have_been_measured(iterations):
    some = timeline((1, 1, 1), (1, 1, 1))
    with pytest.raises(ValueError, match="measured"):
        compare(steady(some), some, iterations, {}, {})


@settings(max_examples=examples(20))
@given(st.floats(1e-9, 1e9), st.floats(1e-9, 1e9))
def test_error_is_positive_if_too_much_was_predicted(predicted, measured):
    error = Row("x", predicted, measured, "s").error
    assert (error > 0) == (predicted / measured > 1)


def test_error_of_nothing():
    assert Row("x", 1.0, 0.0, "s").error is None
    assert Row("x", 1.0, None, "s").error is None


def test_rendering_has_all_rows(capsys):
    some = timeline((1, 2, 0.5), (1, 2, 0.5))
    found = compare(steady(some), some, [0], {Tier.GPU: 100}, {})
    show(comparison_section(found))
    text = capsys.readouterr().out
    for name in (
        "forward",
        "backward",
        "update",
        "iteration",
        "computing",
        "optimizer steps on the CPU",
        "one device",
        "+0.0 %",
    ):
        assert name in text


def record_of(plan, start_s, end_s):
    return RunRecord(
        plan=plan,
        machine="a test",
        losses=(1.0,) * len(start_s),
        start_s=rows(start_s),
        end_s=rows(end_s),
        steady_iterations=tuple(range(3, len(start_s) - 1)),
        memory={tier: use.peak_bytes // 2 for tier, use in plan.prediction.memory.items()},
        data_position=0,
    )


def test_compare_command_on_a_run_file(plan, tmp_path, capsys):
    slow = simulate(plan, 6).timeline
    path, trace, refitted = tmp_path / "run.json", tmp_path / "trace.json", tmp_path / "refitted.json"
    save_run(record_of(plan, slow.start_s * 1.25, slow.end_s * 1.25), path)
    assert main(["compare", str(path), "--json", "--trace", str(trace), "--refit", str(refitted)]) == 0
    found = json.loads(capsys.readouterr().out)
    for name in ("forward", "backward", "iteration"):
        assert found["phases"][name]["error"] == pytest.approx(-0.2, abs=1e-3)
    assert found["memory"]["gpu"]["error"] == pytest.approx(1.0)
    assert found["verdict"] == "rate"
    assert {cause["kind"] for cause in found["causes"] if abs(cause["seconds"]) > 1e-6} == {"rate"}
    assert sum(cause["seconds"] for cause in found["causes"]) == pytest.approx(
        found["measured_s"] - found["predicted_s"]
    )
    assert found["refit"]["predicted_s"] == pytest.approx(found["measured_s"], rel=0.02)
    proposed = quantities(load_profile(str(refitted)))
    assert {change["path"]: change["after"] for change in found["refit"]["quantities"]} == {
        path: pytest.approx(number(item))
        for path, item in proposed.items()
        if item != quantities(plan.hardware)[path]
    }  # fmt: skip
    processes = [e for e in json.loads(trace.read_text())["traceEvents"] if e["name"] == "process_name"]
    assert [e["args"]["name"] for e in processes] == ["predicted", "measured"]
    assert main(["compare", str(path)]) == 0
    assert "-20.0 %" in capsys.readouterr().out


def test_the_answer_names_what_was_wrong_and_how_much_it_explains(plan, tmp_path, capsys):
    """Updates on the host, and nothing else, take so much longer that the next forward waits for them."""
    simulation = simulate(plan)
    schedule = simulation.timeline.schedule
    durations_s = simulation.timeline.end_s[simulation.steady] - simulation.timeline.start_s[simulation.steady]
    slowed = [task.index for task in schedule.tasks if task.lane is Lane.CPU]
    durations_s[slowed] *= 2 * simulation.period_s / durations_s[slowed].sum()
    prices = [Price(0.0, float(seconds)) for seconds in durations_s]
    slow = run(schedule, prices, dict.fromkeys(Resource, 1.0), 9)
    path = tmp_path / "run.json"
    save_run(record_of(plan, slow.start_s, slow.end_s), path)
    explained, _ = explain_run(load_run(path))
    assert main(["compare", str(path)]) == 0
    answer = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("Predicted"))
    assert "optimizer steps on the CPU (update) ran at 0." in answer
    assert answer.removesuffix(".").endswith(
        f"explains {si(explained.error_s, 's')} of the {si(explained.error_s, 's')}"
    )
    assert explained.main is not None
    assert explained.main.seconds == pytest.approx(explained.error_s, rel=1e-6)
    assert explained.error_s > 0
    assert {row.name for row in explained.critical if row.measured} >= {"cpu"}


def test_tasks_that_ran_without_a_plan_are_not_so_many_of_none():
    ran = TasksOfKind(Lane.CPU, Op.UPDATE, num_planned=0, num_ran=18, predicted_s=0.0, measured_s=1.0, explains_s=None)
    assert count_words(ran) == "18 (0 planned)"


@pytest.mark.parametrize("option", ["--trace", "--refit"])
def test_files_that_cannot_be_written_are_refused_before_anything_is_read(option, tmp_path, capsys):
    assert main(["compare", str(tmp_path / "none.json"), option, str(tmp_path / "no" / "file")]) == 2
    assert f"{option} {tmp_path}/no/file: there is no such folder; make it first" in capsys.readouterr().err
