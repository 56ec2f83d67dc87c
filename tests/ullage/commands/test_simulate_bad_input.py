"""A machine on which something would never end is refused by name, with exit code 2."""

import json
from pathlib import Path

import pytest

from planner.plan.document import load_plan
from planner.schedule.schedule import Schedule
from planner.schedule.tasks import Lane, Op, Phase, Task
from ullage.main import main


def tampered(plan_path: Path, folder: Path, **values: float) -> Path:
    """Write a plan whose hardware has other values of some quantities, ``part__field=value``; its digest is right."""
    plan = load_plan(plan_path)
    hardware = plan.hardware
    for name, value in values.items():
        part, field = name.split("__")
        group = getattr(hardware, part)
        quantity = getattr(group, field).model_copy(update={"value": value})
        hardware = hardware.model_copy(update={part: group.model_copy(update={field: quantity})})
    path = folder / "tampered.json"
    path.write_text(plan.model_copy(update={"hardware": hardware}).to_json())
    return path


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"host__dram_bytes_per_s": 0.0}, "host.dram_bytes_per_s: is 0, but must be above 0"),
        ({"host_link__both_bytes_per_s": 0.0}, "host_link.both_bytes_per_s: is 0, but must be above 0"),
        ({"device__issue_s": 1e308}, "issue embed on lane launch would take for ever; correct the profile"),
    ],
)
def test_what_never_ends_is_named(plan_path, tmp_path, capsys, values, message):
    assert main(["simulate", str(tampered(plan_path, tmp_path, **values))]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_plan_changed_by_hand_is_refused(plan_path, tmp_path, capsys):
    data = json.loads(plan_path.read_text())
    data["decisions"]["num_param_slots"] += 1
    path = tmp_path / "changed.json"
    path.write_text(json.dumps(data))
    assert main(["simulate", str(path)]) == 2
    assert "changed after it was written" in capsys.readouterr().err


def test_a_cycle_is_named():
    tasks = [
        Task(0, Lane.H2D, Op.FETCH, Phase.FORWARD, "a", after=(1,)),
        Task(1, Lane.COMPUTE, Op.FORWARD, Phase.FORWARD, "a"),
    ]
    with pytest.raises(ValueError, match=r"task 0 fetch a comes after \[1\], not issued before it: a cycle"):
        Schedule(tuple(tasks))
