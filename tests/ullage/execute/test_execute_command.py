"""``ullage execute``: whole runs, and processes that are interrupted or lack memory."""

import dataclasses
import errno
import json
import os
import re
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import forked
import numpy as np
import pytest
from forked import Forked, completed, until_training
from narrow import narrow_llama

from hwprofiles.profile import HardwareProfile
from hwprofiles.registry import load_profile
from planner.choices.request import Request
from planner.decisions import BF16, FP32, Place
from planner.models import to_hf_config_dict
from planner.optimizers import OPTIMIZERS
from planner.plan.document import describe, load_plan
from planner.plan.planning import make_plan
from planner.schedule.tasks import MemoryClass, Tier
from ullage.analysis.comparison import compare_record
from ullage.analysis.runs import MIN_MEASURED, load_run
from ullage.cli.arguments import parse_bytes
from ullage.main import main
from ullage.output.formatting import si
from ullage.training.preparing import options_of


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan in which every lane of a single device has work."""

    model = narrow_llama(3)
    hardware = load_profile("epyc-turin-2c").with_device_memory(22_000_000)
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    path.write_text(
        make_plan(Request(model, hardware, seq_len=64, micro_batch=2, precision=FP32)).to_json(), encoding="utf-8"
    )
    return path


def test_a_run_is_recorded_and_can_be_compared(plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "not yet there"
    assert main(["execute", str(plan), "--iterations", "12", "--output-dir", str(out), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["losses"][-1] < printed["losses"][0]
    assert printed["memory"]["gpu"]["error"] == pytest.approx(0, abs=0.15)
    assert printed["memory"]["host"]["error"] == 0
    run = load_run(out / "run.json")
    assert (run.timeline.num_iterations, run.data_position) == (12, 24)
    assert {tier: sum(held.values()) for tier, held in run.static_bytes.items()} | {
        Tier.GPU: sum(run.static_bytes[Tier.GPU].values()) + max(run.device_bytes.values())
    } == run.memory
    assert sorted(path.name for path in out.iterdir()) == ["run.json", "trace.json.gz"]
    assert main(["compare", str(out / "run.json"), "--json"]) == 0
    compared = json.loads(capsys.readouterr().out)
    assert compared["phases"] == printed["phases"]


def test_a_plan_for_compiled_kernels_is_executed_with_compiled_blocks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = property(lambda options: "aot_eager_decomp_partition" if options.compile_blocks else None)
    monkeypatch.setattr("executor.options.Options.compile_backend", backend)  # needs no compiler
    hardware, file = load_profile("epyc-turin-2c"), tmp_path / "plan.json"
    request = Request(narrow_llama(2), hardware, seq_len=64, micro_batch=2, precision=FP32, kernels="compiled")
    plan = make_plan(request)
    assert "compiled kernels" in describe(plan.decisions, plan.units())
    plan.save(file)
    assert load_plan(file).request == request
    for option, compiles in (((), True), (("--no-compile",), False)):
        assert main(["execute", str(file), "--output-dir", str(tmp_path / "out"), "--iterations", "6", *option]) == 0
        run = load_run(tmp_path / "out" / "run.json")
        assert ("blocks compiled" in run.machine) is compiles
        # On a CPU, what meters the device's memory would keep compiled graphs from running.
        assert (Tier.GPU in run.memory) is not compiles
    capsys.readouterr()
    priced = make_plan(dataclasses.replace(request, kernels="liger", hardware=load_profile("h100"), precision=BF16))
    with pytest.raises(ValueError, match=r"kernels of Liger, .*plan with --kernels compiled"):
        options_of(priced, {})


def test_a_run_has_its_first_iterations_however_long_it_was(
    plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("executor.devices.lanes", "ullage.training.drift", "ullage.commands.execute.run"):
        monkeypatch.setattr(f"{module}.NUM_RECORDED", 8)
    monkeypatch.setattr("ullage.training.drift._PERIOD", 10)
    assert main(["execute", str(plan), "--iterations", "16", "--output-dir", str(tmp_path), "--json"]) == 0
    run = load_run(tmp_path / "run.json")
    assert (len(run.losses), run.timeline.num_iterations, run.steady_iterations) == (16, 8, (3, 4, 5, 6))
    assert not np.isnan(run.timeline.end_s).any()
    assert json.loads(capsys.readouterr().out)["losses"] == list(run.losses)


@pytest.mark.parametrize("num_iterations", [1, 3])
def test_few_iterations_are_trained_and_not_compared(
    plan: Path, tmp_path: Path, num_iterations: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also what a checkpoint leaves of a longer run: its results take the place of those of the first part."""
    words = ["execute", str(plan), "--output-dir", str(tmp_path), "--checkpoint-dir", str(tmp_path / "saved")]
    losses: list[float] = []
    for count, more in ((num_iterations, ["--json"]), (2 * num_iterations, ["--json", "--resume"])):
        assert main([*words, "--iterations", str(count), *more]) == 0
        printed = json.loads(capsys.readouterr().out)
        run = load_run(tmp_path / "run.json")
        assert (run.steady_iterations, list(run.losses)) == ((), printed["losses"])
        assert (printed["num_iterations"], printed["phases"]["iteration"]["measured"]) == (0, None)
        losses += run.losses
    assert len(losses) == 2 * num_iterations
    assert main(["compare", str(tmp_path / "run.json")]) == 2
    assert "iterations, which are too few to compare, as the first ones warm up; train" in capsys.readouterr().err
    assert main([*words[:4], "--iterations", "1"]) == 0
    assert "not measured: too few iterations" in capsys.readouterr().out


def test_a_drive_that_fills_is_noticed_before_training_or_leaves_the_run(
    plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["execute", str(plan), "--iterations", "1", "--output-dir", str(tmp_path / "out")]
    saving = ["--save", str(tmp_path / "model"), "--checkpoint-dir", str(tmp_path / "kept")]
    with monkeypatch.context() as full:
        full.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=0))
        for more, option in (([], "--output-dir"), (["--save", str(tmp_path / "model")], "--")):
            assert main([*words, *more]) == 2
            assert re.search(rf"{option}\S* needs .* at the end of training, but the drive", capsys.readouterr().err)
    assert list((tmp_path / "out").iterdir()) == []

    def fails(*_args: object, **_options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "model")

    monkeypatch.setattr("ullage.commands.execute.run.save", fails)
    assert main([*words, *saving]) == 2
    err = " ".join(capsys.readouterr().err.split())
    assert "the model was not saved: [Errno 28] No space left on device: 'model'; make room, and save again with" in err
    assert f"`ullage checkpoint export {tmp_path / 'kept'} --save DIR`" in err
    assert len(load_run(tmp_path / "out/run.json").losses) == 1
    monkeypatch.setattr("ullage.commands.execute.run.save_run", fails)
    assert main([*words[:3], "2", *words[4:], *saving[2:]]) == 2
    assert "iterations, loss" in capsys.readouterr().out


@pytest.mark.part(3)
@pytest.mark.parametrize(
    ("optimizer", "lr", "types"),
    [
        ("adamw-8bit", "1e-2", "--precision master=bf16"),
        ("muon", "1e-2", "--precision fp32"),
        ("sgd", "0.1", "--precision fp32"),
        ("adagrad", "1e-2", "--precision fp32"),
        ("lion", "1e-3", "--precision fp32"),
    ],
)
def test_every_optimizer_is_planned_and_executed(
    optimizer: str, lr: str, types: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It learns, and the ledger is that of its own state."""

    path, config = tmp_path / "plan.json", tmp_path / "config.json"
    config.write_text(json.dumps(to_hf_config_dict(narrow_llama(3))), encoding="utf-8")
    options = ["--model", str(config), "--hardware", "epyc-turin-2c", "--seq-len", "64", "--micro-batch", "2"]
    options += ["--memory", "device=22MB", *types.split(), "--optimizer", optimizer]
    assert main(["plan", *options, "--output", str(path)]) == 0
    assert OPTIMIZERS[optimizer].words in capsys.readouterr().out
    run = ["--iterations", "8", "--lr", lr, "--output-dir", str(tmp_path), "--json"]
    assert main(["execute", str(path), *run]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["losses"][-1] < printed["losses"][0]
    assert printed["memory"]["host"]["error"] == 0
    # On a GPU, updates with 8-bit moments need memory of their own, which the kernel of a CPU does not.
    assert -0.01 <= printed["memory"]["gpu"]["error"] <= (1 if optimizer == "adamw-8bit" else 0.15)
    assert main(["verify", str(path), "--json"]) == 0


def test_what_the_host_lacks_is_planned_and_executed_on_nvme(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = narrow_llama(3)
    hardware = load_profile("epyc-turin-2c").with_device_memory(22_000_000).model_dump()
    hardware["host"]["memory_bytes"]["value"] = 18_000_000
    machine = HardwareProfile.model_validate(hardware)
    request = Request(model, machine, seq_len=128, micro_batch=4, storage="nvme", precision=FP32)
    made = make_plan(request, max_simulations=40)
    assert any(Place.NVME in unit.update for unit in made.decisions.units.values())
    assert any(unit.params == "nvme" for unit in made.decisions.units.values())
    assert made.decisions.pipeline_parallel == 1
    path, storage = tmp_path / "plan.json", tmp_path / "drive"
    path.write_text(made.to_json(), encoding="utf-8")
    run = ["--iterations", "8", "--output-dir", str(tmp_path / "out"), "--json"]
    assert main(["execute", str(path), *run, "--storage-dir", str(storage)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["losses"][-1] < printed["losses"][0]
    assert printed["memory"]["host"]["error"] == printed["memory"]["nvme"]["error"] == 0
    assert printed["lanes"]["nvme-state-in"]["measured"] > 0
    assert re.search(r"state in .*drive, (past|through .*) the page cache", load_run(tmp_path / "out/run.json").machine)
    assert not list(storage.iterdir()), "state goes with the run"
    (tmp_path / "file").touch()
    assert main(["execute", str(path), *run, "--storage-dir", str(tmp_path / "file")]) != 0
    assert "/file, but must be a folder" in capsys.readouterr().err


def test_activations_that_leave_are_planned_and_executed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = narrow_llama(3)
    roomy = load_profile("epyc-turin-2c").with_device_memory(29_000_000)  # lanes may be slower than planned
    machine = roomy.with_device_memory(26_000_000)
    request = Request(model, machine, seq_len=128, micro_batch=4, storage="activations", precision=FP32)
    made = make_plan(request, max_simulations=40)
    assert any(unit.offloads for unit in made.decisions.units.values())
    made = made.model_copy(update={"hardware": roomy})
    path = tmp_path / "plan.json"
    path.write_text(made.to_json(), encoding="utf-8")
    assert main(["execute", str(path), "--iterations", "8", "--output-dir", str(tmp_path / "out"), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["losses"][-1] < printed["losses"][0]
    assert printed["memory"]["host"]["error"] == 0
    assert printed["memory"]["gpu"]["error"] == pytest.approx(0, abs=0.15)
    assert printed["lanes"]["activation-out"]["measured"] > 0
    assert printed["lanes"]["activation-in"]["measured"] > 0


def test_the_same_seed_gives_the_same_losses(plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    losses = []
    for seed in ("1", "1", "2"):
        assert (
            main(["execute", str(plan), "--iterations", "6", "--seed", seed, "--output-dir", str(tmp_path), "--json"])
            == 0
        )
        losses.append(json.loads(capsys.readouterr().out)["losses"])
    assert losses[0] == losses[1] != losses[2]


def test_tokens_are_trained_on_from_a_position(plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokens = np.random.default_rng(1).integers(0, 256, 64 * 50).astype(np.uint16)
    np.save(tmp_path / "tokens.npy", tokens)
    tokens.astype("<u4").tofile(tmp_path / "tokens.raw")
    of_npy, of_raw = ["--data", str(tmp_path / "tokens.npy")], ["--data", f"{tmp_path / 'tokens.raw'},dtype=uint32"]
    losses = []
    for options in (of_npy, of_raw, ["--data", f"{of_npy[1]},skip=12"]):
        assert main(["execute", str(plan), "--iterations", "6", *options, "--output-dir", str(tmp_path), "--json"]) == 0
        losses.append(json.loads(capsys.readouterr().out)["losses"])
    assert losses[0] == losses[1] != losses[2]
    assert load_run(tmp_path / "run.json").data_position == 12 + 12


def test_sigterm_ends_with_what_was_measured(plan: Path, tmp_path: Path) -> None:
    """A limit of time ends a run so: the part that was measured can be compared."""
    note = tmp_path / "note"
    arguments = [str(plan), "--iterations", "100000", "--output-dir", str(tmp_path / "out")]
    process = Forked(forked.trained, str(note), "execute", *arguments)
    until_training(process, note, MIN_MEASURED + 1)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate()
    assert process.returncode == 143, err
    assert "Traceback" not in err
    run = load_run(tmp_path / "out" / "run.json")
    assert MIN_MEASURED < len(run.losses) < 100_000
    assert f"interrupted after iteration {len(run.losses)}; what was measured is in" in " ".join(err.split())
    assert compare_record(run).phases[0].measured


def test_ctrl_c_ends_with_one_line_and_writes_nothing(plan: Path, tmp_path: Path) -> None:
    note = tmp_path / "note"
    arguments = [str(plan), "--iterations", "100000", "--output-dir", str(tmp_path / "out")]
    process = Forked(forked.trained, str(note), "execute", *arguments)
    until_training(process, note)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert process.returncode == 130
    assert out == ""
    assert err.endswith("ullage execute: interrupted\n")
    assert "Traceback" not in err
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--iterations", "12", "--replan"], "there are 12; run at least 16"),
        (["--data", "no-such.txt"], "no-such.txt: No such file"),
        (["--data", "no-such.npy"], "no-such.npy: No such file"),
        (["--data", sys.executable], "is no text; if it holds tokens, give their type"),
        (["--checkpoint-every", "5"], "--checkpoint-every 5 needs a place for checkpoints; give --checkpoint-dir"),
        (["--data", "chats.jsonl"], "chats.jsonl is for a trainer: `ullage.offloaded(trl.SFTTrainer)(model="),
        (["--data", "skip=-1"], "'-1' is not a whole number from 0 on"),
    ],
)
def test_bad_input_is_one_line(
    plan: Path, tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["execute", str(plan), "--output-dir", str(tmp_path), *arguments]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_plan_for_a_gpu_is_refused_without_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    assert main(["plan", "--model", "gpt2", "--seq-len", "128", "--output", str(path)]) == 0
    capsys.readouterr()
    assert main(["execute", str(path), "--output-dir", str(tmp_path)]) == 2
    assert "has no GPU that PyTorch can use" in capsys.readouterr().err


def smaller(plan: Path, path: Path, device_memory_bytes: float) -> Path:
    """Write the same plan for a device with less memory than it was made for."""
    planned = load_plan(plan)
    memory = planned.hardware.device.memory_bytes.model_copy(update={"value": device_memory_bytes})
    device = planned.hardware.device.model_copy(update={"memory_bytes": memory})
    changed = planned.model_copy(update={"hardware": planned.hardware.model_copy(update={"device": device})}).sealed()
    path.write_text(changed.to_json(), encoding="utf-8")
    return path


@pytest.mark.part(2)
@pytest.mark.parametrize(
    ("device_memory_bytes", "what"),
    [(4e6, "of gpu memory, but less is free"), (0.9, "at its peak, but has")],
    ids=["the arena is too small", "what comes and goes is too much"],
)
def test_too_little_memory_prints_the_ledger(plan: Path, tmp_path: Path, device_memory_bytes: float, what: str) -> None:
    """The prediction was wrong, or the plan is for more than there is: one screen, exit code 1 and nothing written."""

    if device_memory_bytes < 1:  # of what is predicted: its static part still fits
        device_memory_bytes *= load_plan(plan).gpu_memory.peak_bytes
    path = smaller(plan, tmp_path / "plan.json", device_memory_bytes)
    arguments = [str(path), "--iterations", "6", "--output-dir", str(tmp_path / "out")]
    done = completed(forked.ullage, "execute", *arguments)
    assert (done.returncode, done.stdout) == (1, "")
    screen = done.stderr[done.stderr.index("out of memory: ") :]
    assert what in " ".join(screen.split())
    assert "Traceback" not in done.stderr
    rows = {line.split("  ")[0].strip(): line.split("  ")[1:] for line in screen.splitlines() if "  " in line}
    held = load_plan(plan).gpu_memory.by_class
    assert si(held[MemoryClass.PARAMETERS], "B") in " ".join(rows["parameters"])
    assert {"in all", "capacity"} < set(rows)
    assert any(row.startswith("activations") for row in rows)
    assert si(device_memory_bytes, "B") in " ".join(rows["capacity"])
    (remedy,) = [line for line in screen.splitlines() if line.startswith("remedy: ")]
    proposed = parse_bytes(remedy.rpartition("--memory device=")[2].rstrip("`"))
    assert 0.5 * device_memory_bytes < proposed < device_memory_bytes
    assert list((tmp_path / "out").iterdir()) == []
