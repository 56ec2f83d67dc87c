"""The machine that ``--hardware`` means if it is left out: this one if it was measured, never another in silence."""

import json
import warnings
from pathlib import Path

import pytest

import ullage
from hwprofiles import machine, registry
from hwprofiles.machine import this_machine
from hwprofiles.registry import local_profile_path, save_profile
from ullage.main import main

MODEL = ["--model", "opt-125m", "--seq-len", "128"]


def calibrated(**changes: object) -> ullage.HardwareProfile:
    """Write the profile that ``ullage calibrate`` would write here, or on a machine that differs in some fields."""
    measured_on = this_machine().model_copy(update=changes)
    profile = ullage.load_profile("epyc-turin-2c").model_copy(update={"name": "mine", "measured_on": measured_on})
    save_profile(profile, local_profile_path())
    return profile


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ULLAGE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(machine, "gpu_names", tuple)
    monkeypatch.setattr("ullage.cli.default_hardware.gpu_names", tuple)
    return tmp_path / "home"


def hardware_of(*command: str) -> str:
    assert main(list(command)) == 0
    return json.loads(Path("plan.json").read_text())["hardware"]["name"]  # type: ignore[no-any-return]


def test_a_machine_that_was_not_measured_is_a_packaged_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert hardware_of("plan", *MODEL) == "a100-80"
    out, err = capsys.readouterr()
    assert "a100-80 (the default; choose another with --hardware)" in out
    assert err == ""


def test_the_profile_of_this_machine_is_the_default_of_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    calibrated()
    assert hardware_of("plan", *MODEL) == "mine"
    line = f"this machine's profile {local_profile_path()} is used; choose another with --hardware\n"
    assert capsys.readouterr().err == f"ullage plan: {line}"
    Path("ds_config.json").write_text('{"train_micro_batch_size_per_gpu": 1}')
    main(["plan", "--deepspeed", "ds_config.json", *MODEL])
    assert f"ullage plan: {line}" in capsys.readouterr().err
    assert main(["whatif", *MODEL, "--workers", "1"]) == 0
    assert json.loads(Path("study.json").read_text())["points"][0]["hardware"] == "mine"
    assert f"ullage whatif: {line}" in capsys.readouterr().err
    assert ullage.plan("opt-125m", seq_len=128, budget_s=1).hardware.name == "mine"


def test_what_is_named_is_taken_without_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    calibrated()
    assert hardware_of("plan", *MODEL, "--hardware", "h100") == "h100"
    assert capsys.readouterr().err == ""


def test_the_profile_of_a_machine_that_has_changed_is_not_used(capsys: pytest.CaptureFixture[str]) -> None:
    calibrated(gpus=("NVIDIA H200",))
    assert hardware_of("plan", *MODEL) == "a100-80"
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "its GPUs are 'NVIDIA H200', those of this one none" in err
    assert "a100-80 is used; run `ullage calibrate`" in err
    with pytest.warns(UserWarning, match="its GPUs are 'NVIDIA H200'"):
        assert ullage.plan("opt-125m", seq_len=128, budget_s=1).hardware.name == "a100-80"


def test_the_profile_of_a_host_of_another_name_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(registry.platform, "node", lambda: "before")
    calibrated()
    path = local_profile_path()
    monkeypatch.setattr(registry.platform, "node", lambda: "after")
    assert hardware_of("plan", *MODEL) == "a100-80"
    err = capsys.readouterr().err
    assert f"host 'after' has no profile, but {path} is of another host; a100-80 is used" in err


def test_a_gpu_without_a_profile_is_advised_to_calibrate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ullage.cli.default_hardware.gpu_names", lambda: ("NVIDIA H200",))
    assert hardware_of("plan", *MODEL) == "a100-80"
    words = "this machine has a GPU (NVIDIA H200) but no profile; a100-80 is used; run `ullage calibrate` to measure it"
    assert capsys.readouterr().err == f"ullage plan: {words}\n"
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        ullage.plan("opt-125m", seq_len=128, budget_s=1)
    assert [str(warning.message) for warning in said] == [words]


def test_too_few_devices_of_this_machine_name_the_option_that_chooses_another(
    capsys: pytest.CaptureFixture[str],
) -> None:
    calibrated()
    assert main(["plan", *MODEL, "--gpus", "8"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "mine has 1 device(s) and no network between nodes, but 8 are asked for" in error
    assert "choose a larger machine with --hardware (`ullage hardware` lists them)" in error
