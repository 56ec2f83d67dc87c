"""Profiles listed, shown, compared and checked, and refused where they are of another machine."""

import json
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from amount import small_measurements
from hypothesis import given
from hypothesis import strategies as st

import ullage.calibrate
from hwprofiles.machine import this_machine
from hwprofiles.paths import number, quantities, replace
from hwprofiles.profile import HardwareProfile
from hwprofiles.quantity import Provenance, Quantity
from hwprofiles.registry import load_profile, local_profile_path, save_profile
from ullage.main import main
from ullage.report.profile import NOTICEABLE, Difference, differences

HERE = Provenance(origin="measured", source="a test")


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HardwareProfile]:
    """A profile of a machine with two cores as if it had been measured here; measurements take a second."""
    monkeypatch.setenv("ULLAGE_HOME", str(tmp_path))
    monkeypatch.setattr(
        ullage.calibrate, "CalibrationOptions", partial(ullage.calibrate.CalibrationOptions, budget_s=1.0)
    )
    profile = load_profile("epyc-turin-2c").model_copy(update={"measured_on": this_machine()})
    save_profile(profile, local_profile_path())
    with small_measurements():
        yield profile


def test_profiles_are_listed_with_where_their_values_are_from(local, capsys):
    assert main(["hardware"]) == 0
    assert "100 % measured" in capsys.readouterr().out
    assert main(["hardware", "list", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["local"] == {"description": local.description, "origins": {"measured": 1.0}}
    assert sum(found["h100"]["origins"].values()) == pytest.approx(1.0)


def test_show_has_spread_and_machine(local, capsys):
    assert main(["hardware", "show", "local"]) == 0
    text = capsys.readouterr().out
    assert f"measured on  {local.measured_on.cpu}, {local.measured_on.num_cpus} logical CPUs" in text
    assert "p10 to p90" in text


def test_diff_has_what_differs_and_nothing_else(local, tmp_path, capsys):
    other = replace(local, {"host.optimizer": number(local.host.optimizer) / 2}, HERE)
    save_profile(other, tmp_path / "other.json")
    assert main(["hardware", "diff", "local", str(tmp_path / "other.json"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"host.optimizer"}
    assert found["host.optimizer"]["ratio"] == pytest.approx(0.5)
    assert main(["hardware", "diff", "local", str(tmp_path / "other.json")]) == 0
    assert "-50.0 %" in capsys.readouterr().out
    assert main(["hardware", "diff", "local", "local"]) == 0
    assert f"differ in none of {len(quantities(local))} quantities" in capsys.readouterr().out
    assert main(["hardware", "diff", "h100", "a100-80", "--json"]) == 0
    assert "device.memory_bytes_per_s" in json.loads(capsys.readouterr().out)


@given(st.floats(0.1, 10), st.floats(1, 3), st.floats(1, 3))
def test_spreads_that_meet_are_no_difference(ratio, down, up):
    def quantity(value: float) -> Quantity:
        return Quantity(value=value, unit="s", provenance=HERE, p10=value / down, p90=value * up)

    found = Difference("device.issue_s", quantity(1.0), quantity(ratio), ratio)
    meet = ratio / down <= up and 1 / down <= ratio * up
    assert found.matters == (abs(math.log(ratio)) > -math.log(1 - NOTICEABLE) and not meet)


def test_what_only_one_profile_has_differs(local):
    without = local.model_copy(update={"nvme": None})
    found = {d.path: d for d in differences(without, local)}
    assert found["nvme.read"].first is None
    assert found["nvme.read"].matters
    assert {d.path for d in differences(local, without) if d.second is None} == {
        path for path in quantities(local) if path.startswith("nvme.")
    }


def test_check_says_what_has_drifted(local, tmp_path, capsys):
    """A believed rate that is ten times too high: nothing that disturbs this machine makes it look right."""
    path = "host.elementwise_bytes_per_s"
    wrong = replace(local, {path: 10 * number(local.host.elementwise_bytes_per_s)}, HERE)
    save_profile(wrong, local_profile_path())
    before = local_profile_path().read_bytes()
    again = tmp_path / "again.json"
    assert main(["hardware", "check", "--output", str(again)]) == 1
    text = capsys.readouterr().out
    assert path in text.partition("drifted by more than 25 %: ")[2].partition(";")[0]
    assert "measure them again: `ullage calibrate`" in " ".join(text.split())
    assert local_profile_path().read_bytes() == before
    now = load_profile(str(again))
    assert number(now.host.elementwise_bytes_per_s) < number(wrong.host.elementwise_bytes_per_s) / 2
    assert "hash_bytes_per_s" not in text.partition("drifted by more")[2], "not known before"
    assert now.host.dram_bytes_per_s == local.host.dram_bytes_per_s


@pytest.fixture
def elsewhere(local: HardwareProfile) -> HardwareProfile:
    other = local.model_copy(update={"measured_on": local.measured_on.model_copy(update={"cpu": "Z80"})})
    save_profile(other, local_profile_path())
    return other


@pytest.mark.usefixtures("elsewhere")
def test_another_machines_profile_is_refused_unless_asked_for(tiny_model, tmp_path, capsys):
    plan = tmp_path / "plan.json"
    options = ["plan", "--model", str(tiny_model), "--hardware", "local", "--seq-len", "64"]
    options += ["--output", str(plan), "--json"]
    beside = [*options[:4], "epyc-turin-2c", *options[5:], "--beside", "local=1", "--global-batch", "8"]
    for command in (options, beside, ["calibrate", "--only", "cpu"], ["hardware", "check"]):
        assert main(command) == 2
        shown = capsys.readouterr().err
        assert "was measured on another machine: its CPU is 'Z80', this one" in shown
        assert shown.count("\n") == 1
    assert not plan.exists()
    options[options.index("local")] = str(local_profile_path())
    assert main(options) == 0
    capsys.readouterr()
    run = ["execute", str(plan), "--iterations", "6", "--output-dir", str(tmp_path / "out"), "--json"]
    assert main(run) == 2
    assert "its CPU is 'Z80'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert main([*run, "--allow-other-machine"]) == 0
    assert len(json.loads(capsys.readouterr().out)["losses"]) == 6


def test_parts_are_renewed_in_place(local, capsys):
    assert main(["calibrate", "--quick", "--only", "cpu", "--drive-endurance", "1TB"]) == 0
    text = capsys.readouterr().out
    assert "host.optimizer" in text
    assert "device.gemm.bf16 " not in text
    assert "copies" not in text.partition("not measured")[0].partition("quantity")[2]
    renewed = load_profile("local")
    assert renewed.device == local.device
    assert renewed.host.optimizer != local.host.optimizer
    assert renewed.nvme.endurance_bytes_per_day.value == 1e12
    assert renewed.nvme.read == local.nvme.read


def test_parts_of_a_named_file_are_renewed_there(local, tmp_path):
    other, before = tmp_path / "other.json", local_profile_path().read_bytes()
    save_profile(local.model_copy(update={"name": "mine", "description": "the other one"}), other)
    assert main(["calibrate", "--quick", "--only", "cpu", "--output", str(other)]) == 0
    renewed = load_profile(str(other))
    assert (renewed.name, renewed.description) == ("mine", "the other one")
    assert renewed.host.optimizer != local.host.optimizer
    assert local_profile_path().read_bytes() == before
    assert main(["calibrate", "--quick", "--only", "cpu", "--output", str(tmp_path / "new.json")]) == 0
    assert load_profile(str(tmp_path / "new.json")).name == local.name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["hardware", "diff", "h100"], "needs two names, but 1 were given"),
        (["hardware", "list", "h100"], "needs no name"),
        (["hardware", "check", "h100", "h200"], "needs at most one name"),
        (["hardware", "show", "h100", "--output", "x.json"], "only `ullage hardware check` writes a profile"),
        (["calibrate", "--only", "cpu", "--output", "x.json"], "there is no local profile"),
        (["calibrate", "--only", "cpu"], "there is no local profile"),
    ],
)
def test_what_cannot_be_asked(arguments, message, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("ULLAGE_HOME", str(tmp_path))
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_all_quantities_are_listed(capsys):
    assert main(["calibrate", "--list"]) == 0
    text = capsys.readouterr().out
    assert "device.hook_s" in text
    assert "fitted" in text
    assert main(["calibrate", "--list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["host.optimizer"]["part"] == "cpu"
