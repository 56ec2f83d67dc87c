"""``ullage explain`` as a process: what it prints, its JSON, and what it refuses."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from planner.decisions import Place, UnitDecision
from planner.plan.document import Plan
from ullage.analysis.explanation import move_words

Cli = Callable[..., subprocess.CompletedProcess[str]]

OFFERS = ("compiled", "speculating")
TRIAL = {
    "iteration_s",
    "change_s",
    "change",
    "fits",
    "missing_bytes",
    "device_peak_change_bytes",
    "host_peak_change_bytes",
    "traffic_change_bytes",
}
DECISION = {"params", "activations", "update", "streamed_gradients"}
HEAD = {"model", "hardware", "num_devices", "iteration_s"}
LIMIT = {
    "quantity",
    "words",
    "paths",
    "value",
    "unit",
    "elasticity",
    "best_iteration_s",
    "below",
    "above",
    "fits_from",
    "bound_elasticity",
    "bound_s_per_unit",
}


def test_a_plan_is_explained_on_one_screen(cli: Cli, plan_path: Path) -> None:
    shown = cli("explain", str(plan_path))
    assert (shown.returncode, shown.stderr) == (0, "")
    for words in (
        "binds",
        "the bound rests on",
        "each technique switched off alone",
        "which units are where",
        "how much each quantity matters",
        "`ullage whatif` plans again",
        "moves of 6 of 6 units (all of them)",
    ):
        assert words in " ".join(shown.stdout.split())


def test_the_json_of_a_plan(cli: Cli, plan_path: Path, plan: Plan) -> None:
    shown = cli("explain", str(plan_path), "--all", "--json")
    assert (shown.returncode, shown.stderr) == (0, "")
    data = json.loads(shown.stdout)
    assert set(data) == HEAD | {"bound_s", "gap", "gap_parts", "binds", "tricks", *OFFERS, "units", "limits"}
    assert data["iteration_s"] == pytest.approx(plan.prediction.iteration_s)
    assert set(data["gap_parts"]) == {"rounding", "relaxation", "schedule"}
    assert sum(data["gap_parts"].values()) == pytest.approx(data["gap"])
    assert set(data["binds"]) == {"lane", "critical_s", "memory", "bound_rests_on"}
    assert data["binds"]["lane"] in data["binds"]["critical_s"]
    assert all(set(part) == {"kind", "by", "weight"} for part in data["binds"]["bound_rests_on"])
    for trick in data["tricks"]:
        assert set(trick) == {"trick", "words", "without", "used"} | (TRIAL if trick["used"] else set())
    assert all(data[offer] is None or set(data[offer]) == TRIAL for offer in OFFERS)
    units = [unit for group in data["units"] for unit in group["units"]]
    assert sorted(units) == sorted(plan.decisions.units)
    for group in data["units"]:
        assert set(group) == {"name", "units", "params", "activations", "updates", "cheapest_moves"}
        assert sorted(group["cheapest_moves"]) == sorted(group["units"])  # --all
        assert all(move is None or set(move) == DECISION | TRIAL for move in group["cheapest_moves"].values())
    for limit in data["limits"]:
        assert set(limit) == LIMIT
        for crossing in (limit["below"], limit["above"]):
            assert crossing is None or set(crossing) == {
                "last_factor",
                "factor",
                "value",
                "iteration_s",
                "takes_over",
            }


def test_a_move_of_gradients_alone_does_not_repeat_where_the_unit_is_updated() -> None:
    decision = UnitDecision(params="host", activations="recompute", update=(Place.STREAM, Place.CPU))
    stay, leave = (
        SimpleNamespace(
            decisions=SimpleNamespace(units={"mlp": decision.model_copy(update={"streamed_gradients": way})})
        )
        for way in ("gpu", "host")
    )
    assert move_words(stay, "mlp", leave) == "gradients leave and come back"  # both a plan and a trial have decisions
    assert move_words(leave, "mlp", stay) == "gradients stay"


def test_a_unit_is_explained(cli: Cli, plan_path: Path) -> None:
    shown = cli("explain", str(plan_path), "layers.1.mlp")
    assert (shown.returncode, shown.stderr) == (0, "")
    words = " ".join(shown.stdout.split())
    for part in (
        "layers.1.mlp of tiny",
        "why",
        "deadline its next forward at",
        "all ways to place this unit",
        "chosen",
    ):
        assert part in words


def test_the_json_of_a_unit(cli: Cli, plan_path: Path, plan: Plan) -> None:
    shown = cli("explain", str(plan_path), "layers.0.attn", "--json")
    assert (shown.returncode, shown.stderr) == (0, "")
    data = json.loads(shown.stdout)
    assert set(data) == HEAD | {"unit", "num_params", "reason", "why", "deadline", "alternatives"}
    assert set(data["deadline"]) == {
        "update_start_s",
        "update_end_s",
        "ready_s",
        "deadline_s",
        "slack_s",
        "critical",
    }
    chosen = [a for a in data["alternatives"] if a["chosen"]]
    assert len(chosen) == 1
    own = plan.decisions.units["layers.0.attn"].model_dump(mode="json")
    assert {key: chosen[0][key] for key in DECISION} == own
    assert chosen[0]["change_s"] == 0
    assert all(set(a) == {"chosen"} | DECISION | TRIAL for a in data["alternatives"])


def test_an_unknown_unit_is_refused_with_near_ones(cli: Cli, plan_path: Path) -> None:
    shown = cli("explain", str(plan_path), "layers.1.mpl")
    assert (shown.returncode, shown.stdout) == (2, "")
    assert "the plan has no unit 'layers.1.mpl'; did you mean layers.1.mlp" in shown.stderr


def test_all_is_not_for_one_unit(cli: Cli, plan_path: Path) -> None:
    shown = cli("explain", str(plan_path), "embed", "--all")
    assert shown.returncode == 2
    assert "--all is for all units, but embed is given" in shown.stderr


def test_a_plan_that_was_changed_is_refused(cli: Cli, plan_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "changed.json"
    path.write_text(plan_path.read_text().replace('"micro_batch": ', '"micro_batch": 1'))
    shown = cli("explain", str(path))
    assert shown.returncode == 2
    assert "changed after it was written" in shown.stderr
