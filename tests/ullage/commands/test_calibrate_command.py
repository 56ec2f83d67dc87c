import json
from functools import partial

import numpy as np
import pytest
from amount import small_measurements

import ullage.calibrate
from executor.optimizer.adamw import AdamWParams, adamw_step
from hwprofiles.machine import profile_name
from hwprofiles.registry import load_profile
from ullage.calibrate.kernels import cpu_adamw
from ullage.main import main


@pytest.fixture
def hurried(monkeypatch, tmp_path):
    """Spend a second on real measurements, and keep profiles in a folder of its own."""
    options = partial(ullage.calibrate.CalibrationOptions, budget_s=1.0)
    monkeypatch.setattr(ullage.calibrate, "CalibrationOptions", options)
    monkeypatch.setenv("ULLAGE_HOME", str(tmp_path))
    with small_measurements():
        yield


@pytest.mark.usefixtures("hurried")
def test_the_profile_is_local_from_then_on(tmp_path, capsys):
    assert main(["calibrate", "--quick", "--memory", "device=2GB"]) == 0
    text, progress = capsys.readouterr()
    assert progress == ""
    profile = load_profile("local")
    assert (profile.name, profile.device.memory_bytes.value) == (profile_name(), 2e9)
    narrow = profile.host.narrow_update_s
    assert narrow is not None
    assert narrow["adamw-8bit"].value > narrow["adamw-bf16"].value > 0, "codes are more work than rounding"
    assert narrow["adamw-split"].value > 0
    assert f"profile written to {next(tmp_path.iterdir())}" in text.replace("\n", "")
    assert "host.optimizer" in text
    plan = tmp_path / "plan.json"
    arguments = ["plan", "--model", "demo-llama", "--hardware", "local", "--seq-len", "64", "--micro-batch", "1"]
    assert main([*arguments, "--memory", "device=1GB", "--output", str(plan), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["hardware"]["name"] == profile_name()


def test_an_optimizer_step_is_the_executors_on_any_team():
    rng = np.random.default_rng(0)
    arrays = [rng.random(1000, np.float32) for _ in range(3)]
    grad = (rng.random(1000, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    wanted, weight = [a.copy() for a in arrays], np.empty(1000, np.uint16)
    adamw_step(wanted, grad, weight, AdamWParams(), step=1)
    for num_threads in (1, 2, 2):
        got, got_weight = [a.copy() for a in arrays], np.empty(1000, np.uint16)
        cpu_adamw((*got, grad, got_weight), num_threads)
        assert all(np.array_equal(a, b) for a, b in zip((*got, got_weight), (*wanted, weight), strict=True))
