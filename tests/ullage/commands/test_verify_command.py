"""``ullage verify``: what holds, what does not, and what is no plan."""

import json
from pathlib import Path

import pytest

from planner.plan.document import Plan
from ullage.main import main


@pytest.fixture
def path(plan: Plan, tmp_path: Path) -> Path:
    written = tmp_path / "plan.json"
    written.write_text(plan.to_json())
    return written


def test_a_plan_holds(path: Path, plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(path)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "holds yes" in shown
    gap = plan.certificate.gap(plan.prediction.iteration_s)
    assert f"within {100 * gap:.1f} % of the best" in shown


def test_json(path: Path, plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(path), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["holds"] is True
    assert data["bound_s"] == plan.certificate.bound_s
    assert data["iteration_s"] == plan.prediction.iteration_s


def test_what_does_not_hold_is_named_with_exit_code_1(
    path: Path, plan: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    prediction = plan.prediction.model_copy(update={"iteration_s": plan.prediction.iteration_s / 2})
    path.write_text(plan.model_copy(update={"prediction": prediction}).sealed().to_json())
    assert main(["verify", str(path)]) == 1
    assert "does not hold: the plan states" in capsys.readouterr().out
    assert main(["verify", str(path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["holds"] is False


def test_what_was_changed_by_hand_is_bad_input(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path.write_text(path.read_text().replace('"num_simulations": ', '"num_simulations": 1'))
    assert main(["verify", str(path)]) == 2
    assert "changed after it was written" in capsys.readouterr().err
