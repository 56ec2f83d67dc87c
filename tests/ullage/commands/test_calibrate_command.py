import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from amount import small_measurements

import hwprofiles.calibrate
from executor.optimizer.adamw import AdamWParams, adamw_step
from hwprofiles.registry import load_profile
from ullage.main import main
from ullage.this_machine.kernels import kernels


@pytest.fixture
def hurried(monkeypatch, tmp_path):
    """Spend a second on real measurements, and keep profiles in a folder of its own."""
    options = partial(hwprofiles.calibrate.CalibrationOptions, budget_s=1.0)
    monkeypatch.setattr(hwprofiles.calibrate, "CalibrationOptions", options)
    monkeypatch.setenv("ULLAGE_HOME", str(tmp_path))
    with small_measurements():
        yield


@pytest.mark.usefixtures("hurried")
def test_the_profile_is_local_from_then_on(tmp_path, capsys):
    assert main(["calibrate", "--quick", "--name", "test-box", "--device-memory", "2GB"]) == 0
    text, progress = capsys.readouterr()
    assert progress == ""
    profile = load_profile("local")
    assert (profile.name, profile.device.memory_bytes.value) == ("test-box", 2e9)
    narrow = profile.host.narrow_update_s
    assert narrow is not None
    assert narrow["adamw-8bit"].value > narrow["adamw-bf16"].value > 0, "codes are more work than rounding"
    assert narrow["adamw-split"].value > 0
    assert f"profile written to {next(tmp_path.iterdir())}" in text.replace("\n", "")
    assert "host.optimizer" in text
    plan = tmp_path / "plan.json"
    arguments = ["plan", "--model", "demo-llama", "--hardware", "local", "--seq-len", "64", "--micro-batch", "1"]
    assert main([*arguments, "--device-memory", "1GB", "--output", str(plan), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["hardware"]["name"] == "test-box"


def test_an_optimizer_step_is_the_executors_on_any_team():
    rng = np.random.default_rng(0)
    arrays = [rng.random(1000, np.float32) for _ in range(3)]
    grad = (rng.random(1000, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    wanted, weight = [a.copy() for a in arrays], np.empty(1000, np.uint16)
    adamw_step(wanted, grad, weight, AdamWParams(), step=1)
    step = kernels().cpu_adamw
    for num_threads in (1, 2, 2):
        got, got_weight = [a.copy() for a in arrays], np.empty(1000, np.uint16)
        step(*got, grad, got_weight, num_threads)
        assert all(np.array_equal(a, b) for a, b in zip((*got, got_weight), (*wanted, weight), strict=True))


def test_fitting_to_runs(tmp_path, capsys):
    cases = Path(__file__).parents[1] / "data" / "published_cases.json"
    output = tmp_path / "fitted.json"
    arguments = ["calibrate", "--from-runs", str(cases), "--profile", "a100x4-40g", "--output", str(output)]
    fitted = ["--parameters", "device.hook_s", "host.dram_bytes_per_s"]
    assert main([*arguments, *fitted, "--fit-on", "*blocking*", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert set(result["quantities"]) == set(fitted[1:])
    assert result["errors"]["fitted"]["iteration"]["num"] == len(result["fitted_on"]) == 1
    assert result["errors"]["not fitted"]["iteration"]["num"] == 1
    profile = load_profile(str(output))
    assert profile.device.hook_s.value == pytest.approx(result["quantities"]["device.hook_s"]["value"])
    assert main([*arguments, *fitted, "--fit-on", "*blocking*"]) == 0
    assert "not fitted" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "needs --profile"),
        (["--profile", "a100x4-40g", "--fit-on", "none"], "no case of a100x4-40g"),
        (["--profile", "a100x4-40g", "--parameters", "device.hook"], "no quantity 'device.hook'"),
        (["--profile", "a100x4-40g", "--bounds", "device.hook_s=1"], "QUANTITY=LOW:HIGH"),
        (["--profile", "a100x4-40g", "--output", "no/such/folder/x.json"], "there is no such folder; make it first"),
    ],
)
def test_fits_that_cannot_be(arguments, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cases = Path(__file__).parents[1] / "data" / "published_cases.json"
    try:
        code = main(["calibrate", "--from-runs", str(cases), *arguments])
    except SystemExit as stopped:  # what argparse itself refuses
        code = stopped.code
    assert code == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
