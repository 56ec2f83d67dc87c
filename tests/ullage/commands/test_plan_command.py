import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hwprofiles.paths import quantities, replace
from hwprofiles.profile import FOR_LIBRARIES_BYTES
from hwprofiles.quantity import Curve, Provenance, Quantity
from hwprofiles.registry import load_profile
from planner.decisions import Precision
from planner.models.parameters import num_parameters
from planner.plan.document import EngineRow, load_plan
from planner.schedule.tasks import Tier
from ullage.analysis.provenance import origin_shares
from ullage.main import main
from ullage.output.formatting import duration, si
from ullage.report.plan import engine_fits, engine_line, engine_setting, faster_line, mfu
from ullage.rivals.decisions import OWN_KERNELS
from ullage.rivals.engines.catalogue import POLICIES
from ullage.training.levels import MEMORY, buffer_bytes, levels_of


def for_tensors(num_bytes):
    """Return what to give ``--memory device=`` for a GPU, so that tensors may take so much."""
    return str(FOR_LIBRARIES_BYTES + num_bytes)


def test_two_processes_write_the_same_bytes(plan_args, tmp_path):
    texts = []
    for seed in ("1", "2"):
        path = tmp_path / f"{seed}.json"
        subprocess.run(
            [sys.executable, "-m", "ullage", *plan_args, "--output", str(path)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
        )
        texts.append(path.read_bytes())
    assert texts[0] == texts[1]


def test_a_row_that_does_not_fit_says_what_lacks_and_what_would_fit():
    row = EngineRow(name="twin-flow", setting="", fits=False, missing_bytes={Tier.GPU: 2_000_000_000, Tier.HOST: 5000})
    lacking = "lacks 2.00 GB of gpu memory and 5.00 kB of host memory"
    assert engine_fits(row) == lacking
    row = row.model_copy(update={"nearest": "--gpus 16 and 2 x the batch", "nearest_iteration_s": 7.5})
    assert engine_fits(row) == f"{lacking}; fits with --gpus 16 and 2 x the batch (7.50 s)"
    assert engine_line(row) == f"engine twin-flow {engine_fits(row)}"
    row = row.model_copy(update={"fits": True, "iteration_s": 2.0, "setting": "all on the CPU"})
    assert engine_fits(row) == "yes"
    assert engine_line(row) == "engine twin-flow fits (2.00 s per iteration; all on the CPU)"


def test_screen_says_everything(plan_args, plan, tmp_path, capsys):
    path = tmp_path / "plan.json"
    assert main([*plan_args, "--output", str(path)]) == 0
    shown, progress = capsys.readouterr()
    assert progress == ""  # not a terminal
    lines = shown.splitlines()
    starts = {line.split()[0]: line for line in lines[::-1] if line.strip()}
    seen = plan.prediction
    assert f"{num_parameters(plan.model):,} parameters" in " ".join(shown.split())
    assert "rtx-4090:" in starts["hardware"]
    assert re.search(r"\d+ % assumed", shown)
    assert starts["fits"].split()[:2] == ["fits", "yes;"]
    assert f"{seen.tokens_per_s:,.0f} tokens/s" in starts["speed"]
    assert f"{100 * mfu(plan):.1f} % of the best GEMM rate" in shown
    assert "%" in starts["binds"]
    for name in ("gpu-only", "zero-offload-blocking", "zero-offload", "twin-flow", "interleaved"):
        assert name in starts
    for row in plan.engines:
        if row.fits:
            assert f"{row.iteration_s / seen.iteration_s:.2f}" in starts[row.name]
        else:
            assert "lacks" in starts[row.name]
    assert any(not row.fits for row in plan.engines)
    assert "3.00 MB" in starts["capacity"]
    for warning in seen.warnings:
        assert f"warning: {warning}"[:100] in shown
    assert f"plan written to {path}" in shown.replace("\n", "")
    assert load_plan(path) == plan


def test_a_narrow_state_says_what_it_saves(tiny_model, tmp_path, capsys):
    arguments = ["plan", "--model", str(tiny_model), "--gpus", "2", "--optimizer", "adamw-8bit", "--seq-len", "64"]
    assert main([*arguments, "--hardware", "h100", "--output", str(tmp_path / "p.json")]) == 0
    plan = load_plan(tmp_path / "p.json")
    shard = sum(plan.decisions.shard_params(unit) for unit in plan.units())
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("state "))
    saved = si((6 - 8 / 256) * shard, "B")
    assert line.split()[1:] == f"6.03 bytes per parameter, 12 with adamw: {saved} less for each device".split()


def test_a_bf16_master_copy_says_what_it_saves_and_counts_the_weight(tiny_model, tmp_path, capsys):
    arguments = [
        "plan",
        "--model",
        str(tiny_model),
        "--optimizer",
        "adamw-8bit",
        "--precision",
        "master=bf16",
        "--seq-len",
        "64",
    ]
    assert main([*arguments, "--hardware", "h100", "--output", str(tmp_path / "p.json")]) == 0
    plan = load_plan(tmp_path / "p.json")
    assert plan.decisions.precision == Precision(weights="bf16", master="bf16")
    shard = sum(plan.decisions.shard_params(unit) for unit in plan.units())
    shown = " ".join(capsys.readouterr().out.split())
    saved = si((10 - 8 / 256) * shard, "B")
    assert f"4.03 bytes per parameter with the weight, 14 with adamw: {saved} less for each device" in shown
    assert "bf16 (also the master copy), AdamW with 8-bit moments" in shown


def test_default_hardware_is_named(tiny_model, tmp_path, capsys):
    arguments = ["plan", "--model", str(tiny_model), "--seq-len", "64"]
    assert main([*arguments, "--output", str(tmp_path / "p.json")]) == 0
    assert "a100-80 (the default; choose another with --hardware)" in capsys.readouterr().out


def test_json_is_the_plan(plan_args, plan_path, tmp_path, capsys):
    assert main([*plan_args, "--output", str(tmp_path / "p.json"), "--json"]) == 0
    assert capsys.readouterr().out == plan_path.read_text() == (tmp_path / "p.json").read_text()


def test_options_reach_the_plan(tiny_model, tmp_path):
    path = tmp_path / "p.json"
    options = ["--gpus", "2", "--hardware", "h100", "--seq-len", "32", "--micro-batch", "3", "--accumulate", "2"]
    options += ["--precision", "fp32", "--no-clip", "--memory", "device=2GiB"]
    assert main(["plan", "--model", str(tiny_model), *options, "--output", str(path), "--json"]) == 0
    plan = load_plan(path)
    decided = plan.decisions
    assert (plan.seq_len, decided.micro_batch, decided.num_micro_batches, decided.data_parallel) == (32, 3, 2, 2)
    assert (decided.precision.weights, decided.clip) == ("fp32", False)
    memory = plan.hardware.device.memory_bytes
    assert (memory.value, memory.provenance.origin) == (2**30, "assumed")
    assert "asked for" in memory.provenance.source
    assert plan.hardware.name == "h100"


def test_a_device_without_bf16_instructions_trains_in_fp32_unless_asked_not_to(tiny_model, tmp_path):
    fields = load_profile("h100").model_dump(mode="json")
    for point in fields["device"]["gemm"]["bf16"]["points"]:
        point |= {name: 100 * point[name] for name in ("p10_s", "median_s", "p90_s")}
    slow = tmp_path / "slow.json"
    slow.write_text(json.dumps(fields))

    def planned(*options):
        path = tmp_path / "p.json"
        arguments = ["plan", "--model", str(tiny_model), "--hardware", str(slow), "--seq-len", "32"]
        assert main([*arguments, *options, "--output", str(path), "--json"]) == 0
        return load_plan(path).decisions.precision.weights

    assert planned() == "fp32"
    assert (
        planned("--precision", "bf16") == planned("--precision", "master=bf16", "--optimizer", "adamw-bf16") == "bf16"
    )


@pytest.fixture
def no_engines(monkeypatch):
    """Save what other engines need: their rows take seconds."""
    monkeypatch.setattr("ullage.commands.plan.answer.engine_rows", lambda _request: iter(()))


@pytest.fixture
def no_remedies(monkeypatch):
    """Let nothing help, which takes long to find out: the planner's own tests do."""
    monkeypatch.setattr("ullage.cli.remedies.what_would_fit", lambda _request, _further: iter(()))


@pytest.mark.usefixtures("no_engines", "no_remedies")
def test_a_plan_that_cannot_fit_leaves_the_old_file(plan_args, tmp_path, capsys):
    path = tmp_path / "p.json"
    path.write_text("old")
    arguments = [*plan_args, "--memory", "device=" + for_tensors(40_000), "--output", str(path)]
    assert main(arguments) == 2
    assert "does not fit" in capsys.readouterr().err
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("p.json", "old")]


ASSUMED = Provenance(origin="assumed", source="a test")
TOO_LITTLE = ["plan", "--model", "gpt2", "--memory", "device=" + for_tensors(99_000_000), "--seq-len", "64"]


@pytest.mark.usefixtures("no_engines")
def test_what_does_not_fit_is_said_before_remedies_are_looked_for(monkeypatch, tmp_path, capsys):
    shown = []

    def remedies(_request, _further):
        for size in (1, 2):
            shown.append(capsys.readouterr().err)
            yield f"change {size}", 1.0

    monkeypatch.setattr("ullage.cli.remedies.what_would_fit", remedies)
    assert main([*TOO_LITTLE, "--output", str(tmp_path / "p.json")]) == 2
    verdict, first = shown
    assert re.fullmatch(r"ullage plan: error: gpt2 does not fit .* lacks .* it is proven .*--gpus.*\n", verdict)
    assert first == "ullage plan: it fits with change 1 (1.00 s per iteration before any search)\n"
    assert capsys.readouterr() == ("", first.replace("1 (", "2 ("))
    assert not list(tmp_path.iterdir())


def test_json_of_what_does_not_fit_is_one_document(tmp_path, capsys):
    assert main([*TOO_LITTLE, "--output", str(tmp_path / "p.json"), "--json"]) == 2
    text, shown = capsys.readouterr()
    found = json.loads(text)
    helps, engines = found["fits_with"], [EngineRow.model_validate(row) for row in found["engines"]]
    verdict, *others = shown.splitlines()
    remedies, rows = others[: len(helps)], others[len(helps) :]
    assert verdict == f"ullage plan: error: {found['error']}"
    assert (found["fits"], found["proven"], list(found["missing_bytes"])) == (False, True, ["gpu"])
    assert helps
    assert all(remedy["change"] in line for remedy, line in zip(helps, remedies, strict=True))
    assert [row.name for row in engines] == [name for name in POLICIES if name not in {"slideformer", "llmq"}]
    assert rows == [f"ullage plan: engine {row.name} {engine_fits(row)}" for row in engines]
    assert all("; fits with" in line for line in rows if "roundpipe" not in line)


@pytest.mark.usefixtures("no_engines")
@pytest.mark.part(2)
@pytest.mark.parametrize(
    ("host_bytes", "options", "change", "effect"),
    [
        (
            2e8,
            ["device=" + for_tensors(60_000_000)],
            "--lora rank=16",
            "only adapters are trained; all other weights stay as they are",
        ),
        (
            2e7,
            ["device=" + for_tensors(30_000_000), "--lora", "rank=4"],
            "--quantize nf4",
            "the frozen weights are rounded to 4 bits",
        ),
    ],
)
def test_adapters_are_a_remedy_that_says_what_it_changes(host_bytes, options, change, effect, tmp_path, capsys):
    """It is one only where a plan of it was found: a host too small for the state of all weights, or for the frozen."""
    machine = replace(load_profile("rtx-4090"), {"host.memory_bytes": host_bytes}, ASSUMED)
    path = tmp_path / "small.json"
    path.write_text(machine.model_dump_json())
    command = ["plan", "--model", "demo-llama", "--hardware", str(path), "--seq-len", "64", "--memory"]
    command += [*options, "--output", str(tmp_path / "p.json")]
    assert main([*command, "--json"]) == 2
    text, shown = capsys.readouterr()
    found = {remedy["change"]: remedy["effect"] for remedy in json.loads(text)["fits_with"]}
    assert found[change] == effect
    assert f"{change} (" in shown
    assert f"any search): {effect}\n" in shown
    assert main([*command, *change.split()]) == 0


@pytest.mark.usefixtures("no_engines", "no_remedies")
def test_nothing_that_helps_is_said_too(tmp_path, capsys):
    arguments = [
        "plan",
        "--model",
        "demo-llama",
        "--micro-batch",
        "1000000",
        "--memory",
        "device=" + for_tensors(1_000_000),
    ]
    assert main([*arguments, "--output", str(tmp_path / "p.json")]) == 2
    verdict, *others = capsys.readouterr().err.splitlines()
    assert "does not fit" in verdict
    assert "there is no proof" in verdict
    assert others == ["ullage plan: no change that was tried makes it fit"]


def test_an_interrupted_search_for_remedies_keeps_what_was_printed(tmp_path):
    arguments = ["plan", "--model", "opt-175b", "--gpus", "1", "--output", str(tmp_path / "p.json")]
    process = subprocess.Popen([sys.executable, "-m", "ullage", *arguments], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    verdict = process.stderr.readline()
    process.send_signal(signal.SIGINT)
    *_, last = process.stderr.read().splitlines()
    assert verdict.startswith("ullage plan: error: opt-175b does not fit")
    assert last == "ullage plan: interrupted"
    assert process.wait() == 130


def test_every_number_of_a_profile_is_counted():
    profile = load_profile("h100")
    text = profile.model_dump_json()
    found = quantities(profile)
    assert len(found) == text.count('"provenance"')
    assert {type(item) for item in found.values()} == {Quantity, Curve}
    assert isinstance(found["device.gemm.bf16"], Curve)
    assert sum(origin_shares(profile).values()) == pytest.approx(1)


def test_models_and_hardware(capsys):
    assert main(["models", "facebook/opt-13b", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_params"] == 12_853_473_280
    assert main(["models"]) == 0
    assert "12,853,473,280" in capsys.readouterr().out
    assert main(["models", "mixtral-8x7b"]) == 0
    assert "num_experts" in capsys.readouterr().out
    assert main(["hardware", "show", "h100", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert list(shown) == sorted(quantities(load_profile("h100")))
    assert all(item["provenance"]["source"] for item in shown.values())
    assert main(["hardware", "show", "h100"]) == 0
    table = capsys.readouterr().out
    assert all(f"\n{path} " in table for path in shown)
    assert main(["hardware"]) == 0
    assert "polaris-a100-40g" in capsys.readouterr().out
    assert main(["hardware", "list", "--json"]) == 0
    assert "h200" in json.loads(capsys.readouterr().out)


def test_local_profile_of_a_path(tmp_path, capsys):
    path = tmp_path / "box.json"
    path.write_text((Path(load_profile.__code__.co_filename).parent / "data" / "h200.json").read_text())
    assert main(["hardware", "show", str(path)]) == 0
    assert "name         h200" in capsys.readouterr().out


def test_a_plan_for_several_devices_says_how_it_is_started(tiny_model, tmp_path, capsys):
    arguments = ["plan", "--model", str(tiny_model), "--hardware", "rtx-4090x8", "--gpus", "4"]
    arguments += ["--output", str(tmp_path / "plan.json")]
    assert main(arguments) == 0
    assert "torchrun --nproc-per-node 4 -m ullage execute" in " ".join(capsys.readouterr().out.split())
    assert main([*arguments, "--parallel", "tensor=2"]) == 0
    assert "torchrun --nproc-per-node 4 -m ullage execute" in " ".join(capsys.readouterr().out.split())
    assert main([*arguments, "--parallel", "pipeline=2"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "torchrun --nproc-per-node 4 -m ullage execute" in out


def test_a_pipeline_that_does_not_fit_on_devices_is_planned_explained_and_verified(tmp_path, capsys):
    path = str(tmp_path / "plan.json")
    machine = ["--hardware", "rtx-4090x8", "--gpus", "2", "--memory", "device=2.2GB"]
    batch = ["--micro-batch", "1", "--accumulate", "2", "--seq-len", "256"]
    assert main(["plan", "--model", "gpt2", *machine, *batch, "--parallel", "pipeline=2", "--output", path]) == 0
    assert "of updates on the CPU" in " ".join(capsys.readouterr().out.split())
    for command in ("verify", "explain", "simulate"):
        assert main([command, path]) == 0
    assert "updates run beside the next forward" in capsys.readouterr().out


def test_checkpoints_are_chosen_said_and_executed(plan_args, tmp_path, capsys):
    path = tmp_path / "plan.json"
    arguments = [
        *plan_args,
        "--mtbf",
        "memory=1h,nvme=6h",
        "--checkpoints",
        "max-lost-work=2h,iterations=1000000",
    ]
    assert main([*arguments, "--output", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["checkpoints"] == json.loads(path.read_text())["checkpoints"]
    assert main([*arguments, "--output", str(path)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    plan = load_plan(path)
    made = plan.checkpoints
    assert made.request.mtbf_s == {"memory": 3600, "nvme": 6 * 3600}
    for each in made.levels:
        assert f"{each.level} {each.every} it. =" in shown
    assert f"lost {100 * made.waste:.1f} % of the time" in shown
    assert f"the run of 1,000,000 iterations ({duration(made.work_s)}) is expected to take" in shown
    assert f"without checkpoints {duration(made.without_s)}" in shown
    assert "not used" in shown
    assert "pfs: profile rtx-4090 has none" in shown
    assert "restart: 60 s" in shown
    assert main(["verify", str(path)]) == 0
    places = [f"{tmp_path}/{each.level}" for each in made.levels]
    dirs = [{"": place} for place in places]
    assert [level.every for level in levels_of(plan, dirs)] == [each.every for each in made.levels]
    assert levels_of(plan, [{"": "x", "every": 7}])[0].every == 7
    assert buffer_bytes(plan) == made.buffer_bytes
    with pytest.raises(ValueError, match="give one place for each level, fastest first, or intervals, as in"):
        levels_of(plan, [*dirs, {"": "/more"}])
    durable = [each.level for each in made.levels if each.level != "memory"]
    with pytest.raises(ValueError, match=f"but --checkpoint-dir gives .*{MEMORY}"):
        levels_of(plan, [*dirs[:-1], {"": MEMORY}])
    assert durable == ["nvme"]


def test_a_shared_file_system_can_be_asked_for(plan_args, tmp_path, capsys):
    path = tmp_path / "plan.json"
    assert main([*plan_args, "--mtbf", "pfs=1d", "--checkpoints", "pfs-bandwidth=2GB", "--output", str(path)]) == 0
    assert load_plan(path).checkpoints.levels[-1].level == "pfs"
    assert load_plan(path).hardware.pfs.write.provenance.source == "asked for with --checkpoints pfs-bandwidth"
    assert main([*plan_args, "--mtbf", "pfs=1d", "--output", str(tmp_path / "none.json")]) == 2
    assert "profile rtx-4090 has none" in capsys.readouterr().err
    assert not (tmp_path / "none.json").exists()


def test_rows_that_change_numerics_say_how(plan_path):
    """In plan.json, and on screens and pages in the settings."""
    rows = {row.name: row for row in load_plan(plan_path).engines}
    said = {name for name, row in rows.items() if "; changes numerics: " in engine_setting(row)}
    assert said == {name for name, row in rows.items() if row.numerics} == {"zenflow", "megatrain", "roundpipe", "llmq"}
    assert engine_setting(rows["roundpipe"]).endswith("changes numerics: weights are one update old")


def test_engines_that_are_faster_are_explained(plan):
    half_s = plan.prediction.iteration_s / 2
    offloads = "activations of 3 units offloaded"
    row = EngineRow(name="other", setting=offloads, fits=True, iteration_s=half_s, missing_bytes={})
    for change, words in (
        ({}, "other: by offloading activations, which plans do with --storage activations"),
        (
            {"setting": f"{offloads}, layers in turn"},  # offloading alone would not do it
            (
                "other: by moving layers from device to device instead of gathering them, which plans cannot do; the "
                "bound above does not cover it"
            ),
        ),
        (
            {"setting": f"{offloads}, {OWN_KERNELS}"},
            (
                "other: by kernels of its own, which plans do not have; --kernels auto compares compiled ones; the "
                "bound above does not cover it"
            ),
        ),
        (
            {"setting": "updated elsewhere"},
            "other: by moving data in a way that plans cannot; the bound above does not cover it",
        ),
        ({"numerics": "weights are one update old"}, ""),
        ({"fits": False}, ""),
        ({"iteration_s": 4 * half_s}, ""),
    ):
        assert faster_line(plan.model_copy(update={"engines": (row.model_copy(update=change),)})) == words


def test_where_updates_on_the_cpu_bind_the_screen_says_how_much_of_host_memory_is_in_use(tmp_path, capsys):
    """With half the bandwidth all of it is in use; with fifty times as much the cores bind, and little is."""
    profile, path = load_profile("rtx-4090"), tmp_path / "machine.json"
    now = profile.host.dram_bytes_per_s.value
    used = []
    for factor in (0.5, 50):
        machine = replace(profile, {"host.dram_bytes_per_s": factor * now}, ASSUMED)
        path.write_text(machine.model_dump_json())
        options = [
            "--seq-len",
            "64",
            "--hardware",
            str(path),
            "--memory",
            "device=" + for_tensors(700_000_000),
        ]
        assert main(["plan", "--model", "gpt2", *options, "-o", str(tmp_path / "p.json")]) == 0
        line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("host memory"))
        used.append(float(re.search(r"([\d.]+) % of its", line).group(1)))
    assert used[0] > 90
    assert used[1] < 10


def test_where_host_and_device_share_one_memory_the_screen_says_that_moving_state_gains_nothing(tmp_path, capsys):
    arguments = ["plan", "--model", "gpt2", "--hardware", "gb10", "--seq-len", "64", "-o", str(tmp_path / "p.json")]
    assert main(arguments) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "host and device share one memory, so offloading to the host gains nothing" in shown
