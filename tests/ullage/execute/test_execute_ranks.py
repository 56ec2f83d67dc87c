"""``ullage execute`` with two processes on the cores of this machine, started by launchers and as by them."""

import dataclasses
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import forked
import pytest
import torch
from forked import END_S, Forked, completed, environments, until_training
from narrow import narrow_llama
from transformers import AutoModelForCausalLM

from hwprofiles.machine import this_machine
from hwprofiles.profile import Fabric, HardwareProfile
from hwprofiles.quantity import Provenance, Quantity
from hwprofiles.registry import load_profile
from planner.choices.request import Request
from planner.choices.variants import variants
from planner.costs.scalable import all_scalables, scaled
from planner.decisions import FP32, Place, UnitDecision
from planner.plan.document import PlanError, load_plan
from planner.plan.planning import make_plan
from planner.plan.unlike import make_unlike_plan
from planner.schedule.tasks import Lane, Op
from planner.search import Scorer
from planner.verification import verify
from ullage.analysis.runs import load_run
from ullage.analysis.simulation import chosen_request
from ullage.capture import capture
from ullage.capture.architectures import architecture
from ullage.main import main
from ullage.training.elastic import read_progress
from ullage.training.levels import memory_folder
from ullage.training.models import check_machine, planned_model
from ullage.training.processes import launch_lines


def two_devices(memory_bytes: int) -> HardwareProfile:
    """Return this machine as two devices of one core each."""
    one = load_profile("epyc-turin-2c").with_device_memory(memory_bytes)
    origin = Provenance(origin="assumed", source="gloo over loopback")
    fabric = Fabric(
        bytes_per_s=Quantity(value=1e9, unit="bytes_per_s", provenance=origin),
        latency_s=Quantity(value=3e-4, unit="s", provenance=origin),
    )
    topology = (*one.topology, ("host1", "dram"))
    return HardwareProfile.model_validate(
        one.model_dump()
        | {"name": f"this-{os.getpid()}", "devices_per_node": 2}  # no other run has this plan's memory
        | {"intra_node": fabric.model_dump(), "topology": topology}
    )


def slower(machine: HardwareProfile, times: float) -> HardwareProfile:
    """Return a machine whose devices take so many times as long."""
    for scalable in all_scalables(machine):
        if scalable.key.startswith("device-") and scalable.key != "device-memory":
            machine = scaled(machine, scalable, 1 / times)
    return machine


def planned(folder: Path, **degrees: int) -> Path:
    model = narrow_llama(4, tied_embeddings=True) if "pipeline_rounds" in degrees else narrow_llama(2)
    # Where layers are shared there is less to hold: so much memory that something must leave in any case.
    machine = two_devices(15_000_000 if degrees else 22_000_000)
    batch = {"seq_len": 64, "micro_batch": 2, "num_micro_batches": 2}
    request = Request(model, machine, num_devices=2, precision=FP32, **batch, **degrees)
    path = folder / "plan.json"
    path.write_text(make_plan(request).to_json(), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return planned(tmp_path_factory.mktemp("plan"))


def ranks(plan: Path, folder: Path, *arguments: str) -> list[Forked]:
    """Start both processes, as ``torchrun`` would. The first keeps in a file beside the folder how far it is."""
    words = ("execute", str(plan), "--output-dir", str(folder), *arguments)
    notes = (folder.with_suffix(f".{rank}") for rank in range(2))
    return [
        Forked(forked.trained, str(note), *words, env=each) for note, each in zip(notes, environments(2), strict=True)
    ]


def trained(plan: Path, folder: Path, *arguments: str) -> tuple[str, str]:
    """Return what the first rank printed, when both have ended in order; the other prints nothing."""
    first, second = ranks(plan, folder, *arguments)
    out, err = first.communicate()
    assert first.returncode == 0, err
    assert (second.communicate()[0], second.returncode) == ("", 0)
    return out, err


def test_two_stages_train_one_model(tmp_path: Path) -> None:
    """With updates on the host; save it whole, and go on. The tasks of the first stage are compared with the plan's."""
    (folder := tmp_path / "staged").mkdir()
    plan = planned(folder, pipeline_parallel=2, pipeline_rounds=2)
    places = {place for unit in load_plan(plan).decisions.units.values() for place in unit.update}
    assert places >= {Place.CPU}
    saved, weights, checkpoints = tmp_path / "saved", tmp_path / "weights", f"{tmp_path / 'checkpoints'},every=4"
    planned_model(load_plan(plan)).save_pretrained(weights)
    words = ("--json", "--checkpoint-dir", checkpoints, "--weights", str(weights))
    words += ("--save", f"{saved},dtype=bfloat16")
    printed = json.loads(trained(plan, tmp_path / "out", "--iterations", "6", *words)[0])
    assert printed["losses"][-1] < printed["losses"][0]
    assert printed["memory"]["gpu"]["error"] == pytest.approx(0, abs=0.15)
    assert printed["memory"]["host"]["error"] == pytest.approx(0, abs=0.15)
    run = load_run(tmp_path / "out" / "run.json")
    assert run.timeline.num_iterations == 6
    tasks = run.timeline.schedule.tasks
    seen = {span.task for span in run.timeline.of_iteration(4)}
    assert seen == {task.index for task in tasks if task.stage == 0}
    assert {(tasks[index].op, tasks[index].lane) for index in seen} >= {
        (Op.SEND, Lane.SEND),
        (Op.RECEIVE, Lane.RECEIVE),
        (Op.SEND, Lane.COLLECTIVE),  # gradients of the weight that stages share
    }
    for lane in ("send", "send-back", "receive"):
        assert printed["lanes"][lane]["predicted"] > 0 < printed["lanes"][lane]["measured"]
    assert run.num_left == 0
    assert printed["phases"].keys() >= {"forward", "backward", "iteration"}
    model = AutoModelForCausalLM.from_pretrained(saved)
    assert all(values.isfinite().all() and values.dtype is torch.bfloat16 for values in model.state_dict().values())
    words = ("--iterations", "8", "--resume", "--checkpoint-dir", checkpoints)
    assert "step-00000006" in trained(plan, tmp_path / "more", *words)[1]
    assert load_run(tmp_path / "more" / "run.json").data_position == 8 * 2 * 2


def test_stages_of_a_captured_model_train_as_one_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """BERT, with two of its three layers in the first stage, and a weight that both stages have."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
    sizes |= {"vocab_size": 200, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (config := tmp_path / "config.json").write_text(
        json.dumps({"model_type": "bert", "architectures": ["BertForMaskedLM"], **sizes})
    )
    model = capture(str(config), architecture(config).inputs(2, 16), "fp32")
    losses = []
    for number in (1, 2):
        batch = {
            "seq_len": 16,
            "micro_batch": 2,
            "num_micro_batches": 2,
            "pipeline_parallel": number,
            "num_devices": number,
        }
        machine = two_devices(2**30) if number == 2 else load_profile("epyc-turin-2c")
        (folder := tmp_path / str(number)).mkdir()
        (path := folder / "plan.json").write_text(make_plan(Request(model, machine, precision=FP32, **batch)).to_json())
        if number == 1:
            assert main(["execute", str(path), "--iterations", "4", "--output-dir", str(folder), "--json"]) == 0
            losses.append(json.loads(capsys.readouterr().out)["losses"])
        else:
            losses.append(json.loads(trained(path, folder / "out", "--iterations", "4", "--json")[0])["losses"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_what_stages_cannot_do_is_refused_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(tmp_path, pipeline_parallel=2, pipeline_rounds=2)
    for name in (of_cuda := ("CUDA_MODULE_LOADING", "CUDA_DEVICE_MAX_CONNECTIONS")):
        monkeypatch.setenv(name, "")  # so that it is as before afterwards
        del os.environ[name]
    assert main(["execute", str(plan), "--replan", "--iterations", "30"]) == 2
    assert "--replan cannot be used with pipeline stages" in capsys.readouterr().err
    assert [os.environ[name] for name in of_cuda] == ["EAGER", "32"]  # before CUDA starts: nothing waits behind a stage


@pytest.mark.parametrize("shared", ["data", "layers", "sequences"])
def test_two_processes_train_one_model(plan: Path, tmp_path: Path, shared: str) -> None:
    if shared != "data":
        (folder := tmp_path / "shared").mkdir()
        plan = planned(folder, **{"tensor_parallel" if shared == "layers" else "context_parallel": 2})
        tmp_path /= "out"
    printed = json.loads(trained(plan, tmp_path, "--iterations", "6", "--json")[0])
    assert printed["losses"][-1] < printed["losses"][0]
    assert printed["memory"]["gpu"]["error"] == pytest.approx(0, abs=0.15)
    assert printed["memory"]["host"]["error"] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.json", "trace.json.gz"]
    run = load_run(tmp_path / "run.json")
    of_all = 2 if shared == "data" else 1
    assert (run.timeline.num_iterations, run.data_position) == (6, 6 * 2 * 2 * of_all)
    assert re.search(r"cores [\d,-]+: 1 compute, 1 update \(rank 0\)", run.machine), run.machine
    lanes = {task.lane for task in run.timeline.schedule.tasks}
    assert lanes >= ({"compute"} if shared == "layers" else {"collective", "compute"})


def test_two_processes_plan_again_by_what_both_measured(plan: Path, tmp_path: Path) -> None:
    """All change to the same plan, and train as those that never did. Over gloo, gathering weights costs much."""
    good = make_plan(dataclasses.replace(load_plan(plan).request, collectives="fabric"))
    units = {
        name: UnitDecision(params="host", activations=unit.activations, update=(Place.CPU,) * len(unit.update))
        for name, unit in good.decisions.units.items()
    }
    decisions = good.decisions.model_copy(update={"units": units, "num_param_slots": 1, "zero_stage": 3})
    request = chosen_request(good)
    one = variants(dataclasses.replace(request, num_micro_batches=1))[0]
    decisions = decisions.model_copy(update={"num_micro_batches": 1})
    prediction = Scorer.of(one).predict(decisions)
    bad = good.model_copy(update={"decisions": decisions, "prediction": prediction}).sealed()
    path = tmp_path / "plan.json"
    path.write_text(bad.to_json(), encoding="utf-8")
    printed = []
    for options in ([], ["--replan"]):
        out = tmp_path / "out"
        printed.append(json.loads(trained(path, out, "--iterations", "16", "--json", *options)[0]))
    stayed, changed = printed
    assert changed["replan"]["switched"], changed["replan"]["words"]
    assert changed["losses"] == stayed["losses"], "in all bits"
    assert sorted(path.name for path in out.iterdir()) == ["run.json", "trace.json.gz"]


def test_ctrl_c_ends_all(plan: Path, tmp_path: Path) -> None:
    both = ranks(plan, tmp_path / "out", "--iterations", "100000")
    until_training(both[0], tmp_path / "out.0")
    for process in both:  # as a terminal does: to all of them
        process.send_signal(signal.SIGINT)
    for process in both:
        _, err = process.communicate()
        assert process.returncode == 130
        assert "ullage execute: interrupted\n" in err
    assert list((tmp_path / "out").iterdir()) == []


@pytest.fixture
def memory(plan: Path) -> Iterator[Path]:
    """The folder that `--checkpoint-dir memory` stands for."""
    folder = memory_folder(load_plan(plan))
    yield folder
    shutil.rmtree(folder)


Started = tuple[list[Forked], Callable[[], None]]


def by_torchrun(*words: str) -> Started:
    """Start both processes with torchrun; return it, and what ends all as a shell does."""
    start = ("torch.distributed.run", "--nproc-per-node", "2", "-m", "ullage")
    process = Forked(forked.launcher, *start, *words)
    return [process], lambda: os.killpg(process.pid, signal.SIGTERM)  # torchrun sends it once more to its processes


def as_by_torchrun(*words: str) -> Started:
    """Start both processes as torchrun does; return them, and what sends a signal to each of them, twice."""
    both = [Forked(forked.ullage, *words, env=each) for each in environments(2)]

    def end() -> None:
        for process in both * 2:
            process.send_signal(signal.SIGTERM)

    return both, end


@pytest.mark.part(2)
@pytest.mark.parametrize("start", [as_by_torchrun, by_torchrun])
def test_sigterm_ends_all_with_one_checkpoint_on_all_levels_which_they_go_on_from(
    plan: Path, tmp_path: Path, memory: Path, start: Callable[..., Started]
) -> None:
    folder = tmp_path / "checkpoints"
    places = ("--checkpoint-dir", "memory,every=2", "--checkpoint-dir", f"{folder},every=4")
    processes, end = start("execute", str(plan), *places, "--output-dir", str(tmp_path), "--iterations", "100000")
    while not list(folder.glob("step-*")):
        assert all(process.poll() is None for process in processes), processes[0].communicate()
        time.sleep(0.05)
    end()
    err = "".join(process.communicate(timeout=END_S)[1] for process in processes)
    last = max(int(path.name[5:]) for path in folder.glob("step-*"))
    step = f"step-{last:08d}"
    said = f"checkpoint of step {last} in {memory}/{step} and {folder}/{step}; continue with --resume"
    assert said in " ".join(err.split()), err
    assert "rank 0 prints the place of its checkpoint; continue with --resume" in " ".join(err.split()), err
    assert "no new checkpoint" not in " ".join(err.split()), err
    assert not list(folder.glob("tmp-*"))
    shutil.rmtree(memory)  # the node was lost
    out, err = trained(plan, tmp_path, *places, "--iterations", str(last + 7), "--resume")
    assert f"continuing from {folder}/{step}" in " ".join(err.split()), err
    assert f"checkpoint of step {last + 7} in" in " ".join(out.split())


def test_a_killed_process_ends_the_other(plan: Path, tmp_path: Path) -> None:
    first, second = ranks(plan, tmp_path / "out", "--iterations", "100000")
    until_training(first, tmp_path / "out.0")
    second.send_signal(signal.SIGKILL)
    _, err = first.communicate()
    # 1 where gloo has not given up an exchange with the other after some seconds: then the process ends at once.
    assert first.returncode in {1, 2}, err
    assert f"rank 1 (process {second.pid}) has ended without reporting why" in err


@pytest.mark.part(2)
@pytest.mark.parametrize("degrees", [{}, {"pipeline_parallel": 2, "pipeline_rounds": 2}], ids=["data", "stages"])
def test_an_elastic_run_goes_on_with_the_processes_that_are_there(tmp_path: Path, degrees: dict[str, int]) -> None:
    """Two, of which one is killed; one, which ends for the other's return; two again: one curve, and the same data."""
    plan = planned(tmp_path, **degrees)
    num_sequences = load_plan(plan).decisions.num_sequences
    folder, progress = tmp_path / "elastic", tmp_path / "saved" / "iterations.jsonl"
    words = ("--iterations", "24", "--elastic", "--checkpoint-dir", f"{progress.parent},every=2")

    def until(count: int, process: Forked) -> None:
        while len(list(read_progress(progress))) < count:
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)

    trained(plan, tmp_path / "whole", "--iterations", "24")
    both = ranks(plan, folder, *words)
    until(5, both[0])
    both[1].send_signal(signal.SIGKILL)
    for process in both:
        process.communicate()
    there = len(list(read_progress(progress)))
    alone = Forked(forked.ullage, "execute", str(plan), "--output-dir", str(folder), *words)
    until(there + 4, alone)
    alone.send_signal(signal.SIGTERM)
    assert "goes on with 1 rank after" in " ".join(alone.communicate()[1].split())
    told = json.loads(trained(plan, folder, *words, "--json")[0])["starts"]
    assert [start["ranks"] for start in told] == [1, 2]
    assert 0 <= told[0]["lost_iterations"] <= 4
    assert told[1]["lost_iterations"] == 0
    lines = {line["iteration"]: line for line in read_progress(progress)}  # the last of those computed again
    assert [lines[number]["position"] for number in range(24)] == [num_sequences * (n + 1) for n in range(24)]
    whole = load_run(tmp_path / "whole" / "run.json").losses
    assert [lines[number]["loss"] for number in range(24)] == pytest.approx(whole, rel=1e-4)


def test_an_elastic_run_goes_on_when_a_node_is_lost_with_all_that_it_had(tmp_path: Path) -> None:
    """Two nodes of two processes. One is killed and loses its folder; in its place comes one that has nothing."""
    one = two_devices(22_000_000)
    machine = HardwareProfile.model_validate(one.model_dump() | {"inter_node": one.model_dump()["intra_node"]})
    batch = {"seq_len": 64, "micro_batch": 1, "num_micro_batches": 2}
    plan, progress = tmp_path / "plan.json", tmp_path / "shared" / "iterations.jsonl"
    plan.write_text(
        make_plan(Request(narrow_llama(1), machine, num_devices=4, precision=FP32, **batch)).to_json(), "utf-8"
    )

    def started(*names: str) -> list[Forked]:
        words = ("execute", str(plan), "--elastic", "--iterations", "16", "--output-dir", str(tmp_path / "out"))
        shared = ("--checkpoint-dir", f"{progress.parent},every=100")
        there = []
        for rank, env in enumerate(environments(4)):
            env |= {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": str(rank % 2)}
            own = ("--checkpoint-dir", f"{tmp_path / names[rank // 2]},every=2")
            there.append(Forked(forked.ullage, *words, *own, *shared, env=env))
        return there

    processes = started("a", "b")
    while not all(list((tmp_path / name).glob("step-*")) for name in "ab"):
        assert all(process.poll() is None for process in processes), processes[0].communicate()
        time.sleep(0.02)
    for process in processes[:2]:
        process.send_signal(signal.SIGKILL)
    for process in processes:
        process.communicate()
    shutil.rmtree(tmp_path / "a")
    newest = max(int(path.name[5:]) for path in (tmp_path / "b").glob("step-*"))
    before = {line["iteration"]: line for line in read_progress(progress)}
    processes = started("c", "b")
    _, err = processes[0].communicate()
    assert [process.communicate() and process.returncode for process in processes] == [0] * 4, err
    assert f"continuing from {tmp_path}/c/step-{newest:08d}" in " ".join(err.split()), err
    lines = {line["iteration"]: line for line in list(read_progress(progress))[len(before) :]}
    assert sorted(lines) == list(range(newest, 16))
    for number in lines.keys() & before.keys():
        assert lines[number]["loss"] == pytest.approx(before[number]["loss"], rel=2e-7)
        assert lines[number]["position"] == before[number]["position"]
    kept = [sorted(path.name for path in (tmp_path / name).glob("step-*")) for name in "bc"]
    assert kept[0] == kept[1]


def test_without_torchrun_the_line_that_works_is_named(
    plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["execute", str(plan), "--output-dir", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert "for 2 device(s), 2 on this node, but 1 process(es) were started" in err
    assert "`torchrun --nproc-per-node 2 -m ullage execute PLAN`" in err
    assert err.count("\n") == 1
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert main(["execute", str(plan), "--output-dir", str(tmp_path)]) == 2
    assert "but 4 process(es) were started" in capsys.readouterr().err


def test_launch_lines(plan: Path) -> None:
    two = load_plan(plan)
    assert launch_lines(two) == ["torchrun --nproc-per-node 2 -m ullage execute PLAN"]
    alone = two.model_copy(update={"decisions": two.decisions.model_copy(update={"data_parallel": 1})})
    assert launch_lines(alone) == ["ullage execute PLAN"]
    large = two.model_copy(update={"decisions": two.decisions.model_copy(update={"data_parallel": 16})})
    large = large.model_copy(update={"hardware": load_profile("h100")})
    assert launch_lines(large) == [
        "torchrun --nproc-per-node 8 --nnodes 2 --node-rank N --master-addr FIRST -m ullage execute PLAN"
    ]
    assert launch_lines(large, path="x.json", launcher="accelerate") == [
        (
            "accelerate launch --multi_gpu --num_processes 16 --num_machines 2 --machine_rank N "
            "--main_process_ip FIRST --main_process_port 29500 --mixed_precision no --dynamo_backend no "
            "-m ullage execute x.json"
        )
    ]


def test_a_kind_of_device_on_the_rank_of_another_is_refused(plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as the faster one, which CUDA counts first, on the first rank."""
    two = load_plan(plan)
    gpu = load_profile("h100").model_copy(update={"measured_on": this_machine()})
    shared = two.decisions.model_copy(update={"shares": (2, 2)})
    two = two.model_copy(update={"hardware": gpu, "decisions": shared})
    for name, found in {"is_available": True, "device_count": 2, "get_device_name": "another"}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_args, found=found: found)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(
        PlanError, match=r"rank 1 is planned for a .*, but its device is a another.*CUDA_VISIBLE_DEVICES"
    ):
        check_machine(two)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _number: gpu.device.name)
    check_machine(two)


def test_unlike_devices_train_as_one_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One device is three times as slow, and has less memory: shares and placements differ."""
    fast = two_devices(2**30)
    slow = slower(two_devices(20_000_000), 3).model_copy(update={"name": "slow"})
    request = Request(narrow_llama(2), fast, precision=FP32, seq_len=64, global_batch=16, num_micro_batches=2)
    together = make_unlike_plan(request, [(fast, 1), (slow, 1)])
    (many := tmp_path / "plan.json").write_text(together.to_json())
    verify(together)
    kinds = {kind.hardware.name: kind.decisions for kind in together.kinds()}
    assert (kinds[fast.name].micro_batch, kinds["slow"].micro_batch) == (6, 2), "of 8 sequences at a time"
    assert kinds[fast.name].units != kinds["slow"].units
    trained(many, tmp_path / "together", "--iterations", "4", "--audit", "off")
    alone = make_plan(dataclasses.replace(request, hardware=load_profile("epyc-turin-2c"), micro_batch=8))
    (one := tmp_path / "one.json").write_text(alone.to_json())
    assert main(["execute", str(one), "--iterations", "4", "--output-dir", str(tmp_path / "alone")]) == 0
    runs = [load_run(tmp_path / name / "run.json") for name in ("alone", "together")]
    assert [run.data_position for run in runs] == [4 * 16, 4 * 16]
    assert runs[1].losses == pytest.approx(runs[0].losses, rel=1e-5)
    capsys.readouterr()
    assert main(["execute", str(many), "--replan", "--output-dir", str(tmp_path)]) == 2
    assert "--replan cannot be used with devices of several kinds" in capsys.readouterr().err


@pytest.mark.part(0)
def test_accelerate_starts_what_launch_prints(plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", str(plan), "--with", "accelerate"]) == 0
    words = capsys.readouterr().out.split()
    assert words[:2] == ["accelerate", "launch"]
    words += ["--iterations", "6", "--output-dir", str(tmp_path / "out")]
    done = completed(forked.launcher, "accelerate.commands.accelerate_cli", *words[1:])
    assert done.returncode == 0, done.stderr
    assert load_run(tmp_path / "out" / "run.json").timeline.num_iterations == 6
    assert main(["launch", str(plan)]) == 0
    assert capsys.readouterr().out == f"torchrun --nproc-per-node 2 -m ullage execute {plan}\n"
