"""DeepSpeed's JSON: read as DeepSpeed reads it, simulated by its engine model, and written from plans."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from hwprofiles.registry import load_profile
from planner.choices.request import Request
from planner.costs.model import CostModel
from planner.decisions import Place, Sharding
from planner.graph import Batch, build_graph, units
from planner.models import resolve_model
from planner.plan.document import Plan
from planner.plan.planning import make_plan
from planner.schedule.tasks import Op, Phase
from planner.setup import Setup
from planner.simulate.machine import run_until_steady
from ullage.main import main
from ullage.rivals.deepspeed.export import export_config
from ullage.rivals.deepspeed.file import known_keys, load_config
from ullage.rivals.deepspeed.request import imported
from ullage.rivals.engines.deciding import gpu_only
from ullage.rivals.engines.deepspeed import super_offload, twin_flow, zero_infinity, zero_offload
from ullage.rivals.engines.deepspeed_config import Zero, configured
from ullage.rivals.lowering import lower

SETUP = Setup(units(build_graph(resolve_model("opt-1.3b"), Batch(2, 512))), Sharding(data_parallel=4))
MODEL = ["--model", "opt-1.3b", "--seq-len", "512"]


def zero(stage: int, device: str = "none", **optimizer: Any) -> Zero:
    """Return a stage with the optimizer on a device, through pinned memory unless said otherwise."""
    return Zero(stage=stage, offload_optimizer={"device": device, "pin_memory": True, **optimizer})  # type: ignore[arg-type]


def same(found, expected) -> None:
    """Compare decisions but for the name of the policy."""
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.model_copy(update={"policy": theirs.policy}) == theirs


def test_defaults_are_the_published_engines():
    same(configured(SETUP, zero(3, "cpu")), zero_offload(SETUP))
    same(configured(SETUP, zero(3, "cpu", ratio=0.3)), twin_flow(SETUP, (0.3,)))
    same(configured(SETUP, zero(3, "cpu", ratio=0.3, super_offload=True)), super_offload(SETUP, (0.3,)))
    same(configured(SETUP, zero(3, "nvme", pipeline_read=True)), zero_infinity(SETUP, pipeline_read=True))
    differs = {"device_buffer_bytes": 2 * 500_000_000 * 2, "all_reduces": True, "max_prefetch_params": 0}
    differs |= {"step_scratch_bytes": 2 + 4}  # a flat gradient, and the same in fp32
    same(configured(SETUP, zero(2)), [d.model_copy(update=differs) for d in gpu_only(SETUP) if d.zero_stage == 2])


def simulated(
    settings: Zero, num_micro_batches: int = 3, *, waits: bool = False
) -> tuple[list[Any], dict[Phase, float]]:
    """Return the tasks of the first of some settings' decisions, and how long its phases take."""
    setup = SETUP.changed(num_micro_batches=num_micro_batches)
    decisions = next(configured(setup, settings, waits=waits))
    cost = CostModel.of(load_profile("a100-80"), setup.units, decisions)
    schedule = lower(setup.units, decisions, asynchronous=True)
    return list(schedule.tasks), run_until_steady(schedule, cost).phases


@pytest.mark.parametrize("stage", [2, 3])
def test_a_step_on_the_device_makes_gradients_in_fp32(stage: int):
    """Stage 3 makes those of one subgroup at a time; nothing holds them outside of the step."""

    def held(subgroup_params: int) -> tuple[int, int]:
        decisions = next(configured(SETUP, zero(stage)))
        if stage == 3:
            decisions = decisions.model_copy(update={"step_scratch_params": subgroup_params})
        buffers = [b for b in lower(SETUP.units, decisions, asynchronous=True).buffers if b.label == "updates"]
        assert all(buffer.first is not None for buffer in buffers)
        return len(buffers), sum(buffer.num_bytes for buffer in buffers)

    own_params = sum(unit.num_params for unit in SETUP.units) / 4
    assert held(10**12) == (1, pytest.approx(6 * own_params, rel=1e-3))
    if stage == 3:
        assert held(10_000) == (1, 6 * 10_000)


def test_zero_1_and_2_all_reduce_beside_nothing_unless_comm_overlaps():
    params = sum(unit.num_params for unit in SETUP.units)
    for stage, rounds in ((1, 1), (2, 3)):  # only ZeRO-2 does in every micro-batch
        tasks, _ = simulated(zero(stage))
        moved = sum(task.num_bytes for task in tasks if task.op is Op.SCATTER)
        assert moved == pytest.approx(rounds * 2 * 2 * params, rel=0.01), stage
    alone, beside = (simulated(zero(2).model_copy(update={"overlap_comm": overlap}))[1] for overlap in (False, True))
    assert beside[Phase.BACKWARD] < alone[Phase.BACKWARD]


def test_unpinned_gradients_are_waited_for_in_every_micro_batch():
    pageable, _ = simulated(zero(3, "cpu", pin_memory=False))
    pinned, _ = simulated(zero(3, "cpu"))

    def copies(tasks):
        return [task for task in tasks if task.phase is Phase.BACKWARD and task.op in {Op.OVERWRITE, Op.LOAD}]

    assert len(copies(pageable)) == len(copies(pinned))
    assert not any(task.pinned for task in copies(pageable))
    assert all(task.pinned for task in copies(pinned))
    ways = (zero(3, "cpu", pin_memory=False), False), (zero(3, "cpu"), True), (zero(3, "cpu"), False)
    for num_micro_batches in (1, 3):
        times = [simulated(settings, num_micro_batches, waits=waits)[1][Phase.BACKWARD] for settings, waits in ways]
        assert times == sorted(times, reverse=True), "less waiting, less time"
        assert times[0] > times[-1]


def read(tmp_path: Path, data: dict[str, Any], *given: str, **request: Any):
    """Return what a configuration asks for, beside options of the command line that are ``given``."""
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(data))
    model, machine = resolve_model("opt-1.3b"), load_profile(request.pop("machine", "h100x4-80g"))
    config = load_config(path)
    asked, assumed = imported(config, Request(model, machine, seq_len=512, **request), given.__contains__)
    return asked, config.zero_optimization, assumed


@pytest.mark.parametrize(
    ("batch", "given", "expected"),
    [
        ((32, 2, 4), {}, (4, 2, 4)),
        ((None, 2, 4), {"num_devices": 2}, (2, 2, 4)),
        (("auto", "auto", "auto"), {"micro_batch": 3, "num_devices": 2}, (2, 3, 1)),
        ((32, None, 4), {"num_devices": 4}, (4, 2, 4)),
        ((32, 2, None), {"num_devices": 4}, (4, 2, 4)),
        ((32, None, None), {"num_devices": 4}, (4, 8, 1)),
    ],
)
def test_batches_are_completed_as_deepspeed_does(tmp_path, batch, given, expected):
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    data = {key: value for key, value in zip(keys, batch, strict=True) if value is not None} | {"zero_optimization": {}}
    request, *_ = read(tmp_path, data, *given, **given)
    assert (request.num_devices, request.micro_batch, request.num_micro_batches) == expected


def test_types_clipping_optimizer_and_auto(tmp_path):
    request, settings, _ = read(
        tmp_path,
        {
            "bf16": {"enabled": "auto"},
            "gradient_clipping": 0,
            "optimizer": {"type": "Lion"},
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "nvme", "nvme_path": "/x"},
                "reduce_bucket_size": "auto",
                "stage3_prefetch_bucket_size": 5e7,
                "sub_group_size": 1e8,
            },
        },
        machine="h100x4-56core-nvme",
    )
    assert (request.precision.weights, request.optimizer, request.clip, request.storage) == (
        "bf16",
        "lion",
        False,
        "nvme",
    )
    hidden_size = request.model.hidden_size
    assert settings.size("reduce_bucket_size", hidden_size) == hidden_size**2
    sizes = settings.size("stage3_prefetch_bucket_size", hidden_size), settings.size("sub_group_size")
    assert sizes == (50_000_000, 100_000_000)
    plain, _, assumed = read(tmp_path, {"gradient_clipping": 1.0})
    assert (plain.precision.weights, plain.clip) == ("fp32", True)
    assert any(note.startswith("neither bf16 nor fp16 is on: weights are fp32") for note in assumed)


def test_what_is_not_known_or_not_simulated_is_named(tmp_path):
    section = {"stage": 3, "overlap_com": True, "zero_quantized_weights": True, "zero_hpz_partition_size": 1}
    data = {"fp16": {"enabled": True}, "nonsense": 1, "steps_per_print": 5, "zero_optimization": section}
    printed_notes = "\n".join(read(tmp_path, data)[2])
    assert (
        "zero_optimization.overlap_com is not a key of DeepSpeed (did you mean overlap_comm?); ignored" in printed_notes
    )
    assert "nonsense is not a key of DeepSpeed; ignored" in printed_notes
    assert "zero_quantized_weights: all-gathers are simulated without quantization" in printed_notes
    assert "fp16 is simulated as bf16" in printed_notes
    assert "steps_per_print" not in printed_notes
    assert "hpz" not in printed_notes


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage is 4: Input should be less than or equal to 3"),
        ({"zero_optimization": {"offload_optimizer": {"device": "disk"}}}, "offload_optimizer.device is 'disk'"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, "needs zero_optimization.stage 1, 2 or 3"),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}}},
            "offload_optimizer.device nvme needs zero_optimization.stage 3, but it is 2",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
            "offload_param.device is nvme, but .* has no drives",
        ),
        ({"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2}, "train_batch_size is 7, but 2 sequences x"),
        ({"train_micro_batch_size_per_gpu": -1}, "train_micro_batch_size_per_gpu is -1: Input should be greater"),
        ({"optimizer": {"type": "Muon"}}, "optimizer.type is Muon, which is not simulated; choose .* --optimizer"),
        ({"model_type": "opt"}, "has none of DeepSpeed's keys"),
    ],
)
def test_bad_configurations_are_one_line(tmp_path, capsys, data, message):
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(data))
    assert main(["plan", "--deepspeed", str(path), *MODEL, "--hardware", "a100x8-nvlink", "--gpus", "4"]) == 2
    err = capsys.readouterr().err
    assert re.search(message, err), err
    assert err.count("\n") == 1


def test_muon_is_not_simulated_of_deepspeed(tmp_path, capsys):
    path, plan = tmp_path / "ds_config.json", tmp_path / "plan.json"
    path.write_text(json.dumps({"train_batch_size": 4}))
    machine = ["--hardware", "a100x8-nvlink", "--optimizer", "muon"]
    assert main(["plan", "--deepspeed", str(path), *MODEL, *machine]) == 2
    assert "--optimizer is muon, which is not simulated for DeepSpeed; choose one of adamw" in capsys.readouterr().err
    assert main(["plan", "--model", "demo-llama", *machine, "--seq-len", "64", "--output", str(plan)]) == 0
    assert "not compared: zero-offload-blocking, zero-offload, twin-flow" in capsys.readouterr().out
    assert main(["export-deepspeed", str(plan)]) == 2
    assert "the plan is for muon, which is not exported to DeepSpeed; plan with" in capsys.readouterr().err
    assert main(["simulate", str(plan), "--engine", "twin-flow"]) == 2
    assert "engine twin-flow is not simulated with Muon; choose ullage or gpu-only" in capsys.readouterr().err


def test_both_are_predicted_side_by_side(tmp_path, capsys):
    path, out = tmp_path / "ds_config.json", tmp_path / "plan.json"
    data = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    }
    path.write_text(json.dumps(data))
    arguments = ["plan", "--deepspeed", str(path), *MODEL, "--hardware", "h100x4-80g", "--gpus", "4"]
    assert main([*arguments, "--json", "--output", str(out)]) == 0
    found = json.loads(capsys.readouterr().out)
    plan = Plan.model_validate_json(out.read_text())
    by_engine = {row.name: row.iteration_s for row in plan.engines}
    assert found["ours"]["iteration_s"] == pytest.approx(plan.prediction.iteration_s)
    assert found["ratio"] == pytest.approx(found["theirs"]["iteration_s"] / found["ours"]["iteration_s"])
    assert found["theirs"]["iteration_s"] >= by_engine["zero-offload"] * 0.999, "its subgroups are larger"
    assert found["theirs"]["memory_bytes"]["gpu"] > 0
    assert any("DeepSpeed is bound by" in reason for reason in found["reasons"])
    assert main([*arguments, "--output", str(out)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "2 sequences of 512 tokens x 1 micro-batch(es), bf16, AdamW" in shown


@pytest.fixture(scope="module")
def offloading() -> Plan:
    machine = load_profile("h100x4-80g").with_device_memory(6_000_000_000)
    request = Request(resolve_model("opt-1.3b"), machine, num_devices=2, seq_len=512, micro_batch=2)
    return make_plan(request, max_simulations=30)


def test_a_plan_becomes_twin_flow_and_comes_back(offloading, tmp_path):
    config, lost = export_config(offloading)
    decided = offloading.decisions
    pieces = [piece for unit in offloading.units() for piece in decided.placed_pieces(unit)]
    away = sum(count for count, place in pieces if place is not Place.GPU) / sum(count for count, _ in pieces)
    section = config["zero_optimization"]
    assert away > 0
    assert away <= section["offload_optimizer"]["ratio"] <= away + 1e-3
    assert config["train_batch_size"] == 2 * 2
    assert any("updates overlap with the next forward" in line for line in lost)
    request, settings, _ = read(tmp_path, config)
    decisions = offloading.decisions
    assert (request.num_devices, request.micro_batch, request.clip) == (2, decisions.micro_batch, decisions.clip)
    assert settings.optimizer.ratio == section["offload_optimizer"]["ratio"]
    assert set(section) <= set(known_keys()["zero_optimization"])
    assert set(config) <= set(known_keys()["config"])


def test_export_prints_or_writes_and_names_what_is_lost(offloading, tmp_path, capsys):
    path, out = tmp_path / "plan.json", tmp_path / "ds_config.json"
    path.write_text(offloading.to_json())
    assert main(["export-deepspeed", str(path)]) == 0
    printed, printed_notes = capsys.readouterr()
    assert main(["export-deepspeed", str(path), "--output", str(out)]) == 0
    assert json.loads(out.read_text()) == json.loads(printed)
    assert "not in the configuration: updates overlap with the next forward" in printed_notes


def test_deepspeeds_own_parser_takes_what_is_exported(offloading, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    config = pytest.importorskip("deepspeed.runtime.config", reason="DeepSpeed is not installed")
    monkeypatch.setattr(config.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(config.dist, "get_world_size", lambda *_: 2)
    found, _ = export_config(offloading)
    read_by_them = config.DeepSpeedConfig(found)
    theirs = read_by_them.zero_config
    assert theirs.offload_optimizer.ratio == found["zero_optimization"]["offload_optimizer"]["ratio"]
    assert (theirs.stage, read_by_them.train_batch_size) == (3, found["train_batch_size"])
