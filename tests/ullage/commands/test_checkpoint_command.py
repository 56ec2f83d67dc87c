"""Checkpoints of real processes: ended by signals, killed, and gone on from; and the command that looks after them."""

import json
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import forked
import objects  # noqa: F401 - it registers itself
import pytest
import torch
from forked import Forked
from narrow import narrow_llama
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from executor.checkpoint.places.folder import FolderPlace
from executor.checkpoint.places.place import newest_of
from hwprofiles.registry import load_profile
from planner.choices.request import Request
from planner.decisions import FP32
from planner.plan.document import load_plan
from planner.plan.planning import make_plan
from ullage.main import main
from ullage.training.levels import memory_folder

NUM_ITERATIONS = 30


@pytest.fixture(scope="module")
def plan_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan for this kind of machine."""
    model = narrow_llama(2, vocab_size=512)
    hardware = load_profile("epyc-turin-2c").with_device_memory(15_000_000)
    hardware = hardware.model_copy(update={"name": f"this-{os.getpid()}"})  # no other run has this plan's memory
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    path.write_text(make_plan(Request(model, hardware, seq_len=64, precision=FP32)).to_json(), encoding="utf-8")
    return path


def with_objects(*arguments: str) -> None:
    """Be ``ullage`` where there is an object store that processes share: this module has imported it."""
    forked.ullage(*arguments)


def execute(
    plan_path: Path,
    folder: Path,
    *more: str,
    places: tuple[str, ...] = (),
    program: Callable[..., None] = with_objects,
) -> Forked:
    args = ["--iterations", str(NUM_ITERATIONS)]
    for place in places or (str(folder),):
        args += ["--checkpoint-dir", place if "every=" in place else f"{place},every=3,keep=9"]
    args += ["--output-dir", str(folder.with_suffix(".out")), *more]
    return Forked(program, "execute", str(plan_path), *args)


def finished(process: Forked) -> tuple[str, str]:
    out, err = process.communicate()
    return out, err


def state(folder: Path, step: int) -> dict[str, torch.Tensor]:
    (path,) = folder.glob(f"step-{step:08d}*")
    return {
        f"{file.parent.name}/{name}": tensor
        for file in path.rglob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def wait_for(folder: Path, count: int, process: Forked) -> None:
    deadline = time.monotonic() + forked.END_S
    while len(list(folder.glob("step-*"))) < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(scope="module")
def whole(plan_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing has disturbed."""
    folder = tmp_path_factory.mktemp("whole") / "checkpoints"
    out, err = finished(execute(plan_path, folder))
    assert f"checkpoint of step {NUM_ITERATIONS} in" in " ".join(out.split()), err
    return folder


@pytest.fixture
def memory(plan_path: Path) -> Iterator[Path]:
    """The folder that `--checkpoint-dir memory` stands for."""
    folder = memory_folder(load_plan(plan_path))
    shutil.rmtree(folder)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.part(2)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_that_is_ended_goes_on_as_if_it_had_not_been(
    number: signal.Signals, whole: Path, plan_path: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoints"
    process = execute(plan_path, folder)
    wait_for(folder, 2, process)
    process.send_signal(number)
    _, err = finished(process)
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)
    if number != signal.SIGKILL:
        assert "continue with --resume" in " ".join(err.split())
        assert not list(folder.glob("tmp-*"))
    last = max(int(path.name[5:]) for path in folder.glob("step-*"))
    assert last < NUM_ITERATIONS, "it was too quick to be interrupted"
    _, err = finished(execute(plan_path, folder, "--resume"))
    assert f"continuing from {folder}" in " ".join(err.split()), err
    expected, found = state(whole, NUM_ITERATIONS), state(folder, NUM_ITERATIONS)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def whose_drive_hangs(*arguments: str) -> None:
    """Be ``ullage`` with little patience, on a drive that hangs from the fortieth file on."""
    from executor.checkpoint import engine  # noqa: PLC0415
    from executor.checkpoint.files.system_calls import Files  # noqa: PLC0415
    from executor.training_state import saving  # noqa: PLC0415 - in the process that this is for

    saving._PATIENCE_S = engine._END_S = engine._PATIENCE_S = 0.5
    engine.SLOWEST_BYTES_PER_S = 1e9
    plain, done = Files.sync, []

    def hang(*args: object) -> object:
        done.append(args)
        return plain(*args) if len(done) < 40 else threading.Event().wait()

    Files.sync = hang
    forked.ullage(*arguments)


def test_a_run_whose_drive_hangs_goes_on_and_ends_when_it_is_asked_to(plan_path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    process = execute(plan_path, folder, "--iterations", "100000", program=whose_drive_hangs)
    watchdog = threading.Timer(100, process.send_signal, [signal.SIGKILL])
    watchdog.start()
    wait_for(folder, 1, process)
    for line in process.stderr:  # until the drive hangs, and training goes on
        if "the drive has not answered for" in line:
            break
    process.send_signal(signal.SIGTERM)
    _, err = finished(process)
    watchdog.cancel()
    assert process.returncode == 128 + signal.SIGTERM, err
    assert "interrupted after iteration" in " ".join(err.split())
    assert newest_of([FolderPlace(folder)])[0] is not None


def test_a_run_on_several_levels_goes_on_from_the_slowest_when_its_node_was_lost(
    whole: Path, plan_path: Path, tmp_path: Path, memory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, folder = f"objects://{tmp_path}/bucket/run", tmp_path / "bucket" / "run"
    places = ("memory,every=1", f"{tmp_path}/drive,every=3,keep=3", f"{url},every=9")
    process = execute(plan_path, tmp_path / "lost", places=places)
    wait_for(memory, 2, process)
    process.send_signal(signal.SIGINT)
    _, err = finished(process)
    assert process.returncode == 130
    found = re.search(
        rf"checkpoint of step (\d+) in {memory}/step-(\S+) and {tmp_path}/drive/step-(\S+) and (\S+);", err
    )
    assert found is not None, err
    last, where = int(found[1]), found[4]
    assert 0 < last < NUM_ITERATIONS
    assert where.startswith(f"{url}/step-{last:08d}-")
    steps = [int(path.name[5:]) for path in (tmp_path / "drive").glob("step-*")]
    assert len(steps) <= 3
    assert all(step % 3 == 0 or step == last for step in steps), steps
    for lost in (memory, tmp_path / "drive"):
        shutil.rmtree(lost)
    _, err = finished(execute(plan_path, tmp_path / "lost", "--resume", places=places))
    assert f"continuing from {where}" in " ".join(err.split()), err
    for place in (memory, tmp_path / "drive", folder):
        expected, got = state(whole, NUM_ITERATIONS), state(place, NUM_ITERATIONS)
        assert all(torch.equal(expected[name], got[name]) for name in expected)
    assert main(["checkpoint", "ls", url, "--json"]) == 0
    newest, older = (entry["step"] for entry in json.loads(capsys.readouterr().out))
    assert newest == NUM_ITERATIONS
    assert older % 9 == 0 or older == last  # 54, unless the next came before it was there
    assert main(["checkpoint", "verify", url]) == 0
    assert main(["checkpoint", "export", url, "--save", str(tmp_path / "model")]) == 0
    assert main(["checkpoint", "prune", url, "--json"]) == 0


def test_a_second_signal_gives_up_what_is_on_its_way(plan_path: Path, tmp_path: Path) -> None:
    places = (f"{tmp_path}/drive", f"objects://{tmp_path}/slow-5/run")  # seconds for each request
    process = execute(plan_path, tmp_path / "run", "--iterations", "100000", places=places)
    wait_for(tmp_path / "drive", 1, process)
    process.send_signal(signal.SIGTERM)
    assert any("a second signal ends at once" in line for line in process.stderr)
    time.sleep(3.5)  # what comes sooner is taken for the same wish
    process.send_signal(signal.SIGTERM)
    _, err = finished(process)
    assert process.returncode == 143
    why = f"not in objects://{tmp_path}/slow-5/run: abandoned when training was interrupted again"
    found = re.search(rf"checkpoint of step (\d+) in {tmp_path}/drive/step-\d+; {why}; continue with --resume", err)
    assert found is not None, err
    assert max(int(path.name[5:]) for path in (tmp_path / "drive").glob("step-*")) == int(found[1])
    assert not list((tmp_path / "slow-5").rglob("manifest.json"))


def test_a_second_run_in_a_folder_is_refused_before_it_trains(plan_path: Path, tmp_path: Path) -> None:
    """On any level; the first goes on, and when it is killed nothing is left to be removed."""
    folder = tmp_path / "checkpoints"
    first = execute(plan_path, folder, "--iterations", "100000")
    wait_for(folder, 1, first)
    for places in ((str(folder),), (str(tmp_path / "own"), str(folder))):
        second = execute(plan_path, tmp_path / "second", places=places)
        out, err = finished(second)
        assert (second.returncode, out) == (2, "")
        assert f"{folder}: another run (process {first.pid} on " in err
        assert "a folder of its own" in err
        assert err.count("\n") == 1
    count = len(list(folder.glob("step-*")))
    wait_for(folder, count + 1, first)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    last = max(int(path.name[5:]) for path in folder.glob("step-*"))
    resumed = execute(plan_path, folder, "--resume", "--iterations", str(last + 6))
    _, err = finished(resumed)
    assert resumed.returncode == 0, err
    assert not (folder / "run.lock").exists()


@pytest.mark.parametrize("action", ["ls", "verify", "export", "prune"])
def test_a_place_without_checkpoints_is_one_line(
    action: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    more = ["--save", str(tmp_path / "model")] if action == "export" else []
    for place in ("", " ", str(tmp_path / "missing"), str(tmp_path / "file"), "nothing://here"):
        assert main(["checkpoint", action, place, *more]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("ullage checkpoint: error: ")
        assert err.count("\n") == 1
    (tmp_path / "empty").mkdir()
    code = main(["checkpoint", action, str(tmp_path / "empty"), *more])
    out, err = capsys.readouterr()
    assert code == (0 if action in {"ls", "prune"} else 2)
    assert (out + err).count("\n") == 1
    assert not (tmp_path / "missing").exists()


def test_a_folder_of_weights_must_be_new(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe"):
        assert main(["checkpoint", "export", str(whole), "--save", str(tmp_path / name)]) == 2
        assert f"{name} is there already; give a new folder\n" in capsys.readouterr().err


def test_the_command_lists_verifies_exports_and_prunes(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*args: str) -> tuple[int, str]:
        code = main(["checkpoint", *args])
        return code, capsys.readouterr().out

    copies = tmp_path / "copies"
    copies.mkdir()
    for path in whole.glob("step-*"):
        (copies / path.name).symlink_to(path)
    listed = json.loads(run("ls", str(copies), "--json")[1])
    steps = [entry["step"] for entry in listed]
    assert steps == sorted(steps, reverse=True)
    assert steps[0] == NUM_ITERATIONS
    assert len(steps) >= 9  # which of them depends on what was read again in time
    assert run("verify", str(copies))[0] == 0
    assert run("export", str(copies), "--save", f"{tmp_path / 'model'},dtype=float32")[0] == 0
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).state_dict()
    masters = load_file(whole / f"step-{NUM_ITERATIONS:08d}" / "model" / "model-00000.safetensors")
    assert masters
    assert all(torch.equal(exported[name], tensor) for name, tensor in masters.items())
    damaged = whole / f"step-{steps[1]:08d}" / "optimizer" / "exp_avg-00000.safetensors"
    intact = damaged.read_bytes()
    damaged.write_bytes(intact[:-1] + bytes([intact[-1] ^ 1]))
    code, text = run("verify", str(copies))
    assert code == 1
    assert "is damaged between" in text
    damaged.write_bytes(intact)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["checkpoint", "ls", "nowhere"], "nowhere is not a folder; give a --checkpoint-dir of a run"),
        (["checkpoint", "export", "."], "export needs --save DIR"),
        (["checkpoint", "export", ".", "--save", "x"], ". has no complete checkpoint"),
        (["checkpoint", "ls", "memory"], "memory has a folder for each plan; give one of these folders: "),
        (["checkpoint", "ls", "nonsense://x"], "nonsense://x: Protocol not known: nonsense; give a folder, or a URL"),
        (["execute", "PLAN", "--resume"], "--resume needs the place of the checkpoints; give --checkpoint-dir PLACE"),
        (
            ["execute", "PLAN", "--checkpoint-dir", "a,every=10", "--checkpoint-dir", "b,every=25"],
            "b gets its checkpoints from a, which has one every 10 iterations, so 25 is not a valid interval; give a",
        ),
        (
            ["execute", "PLAN", "--checkpoint-dir", "a", "--checkpoint-dir", "nonsense://x"],
            "nonsense://x: Protocol not known: nonsense",
        ),
        (["execute", "PLAN", "--checkpoint-dir", "memory://x"], "memory://x is not a folder, but training writes only"),
    ],
)
def test_bad_input_is_reported_in_one_line(
    args: list[str],
    message: str,
    plan_path: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([str(plan_path) if arg == "PLAN" else arg for arg in args]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
