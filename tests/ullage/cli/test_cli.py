import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hwprofiles.registry import canonical_json, load_profile
from ullage.cli.options import Options, given_options
from ullage.cli.request import request_of
from ullage.commands import SUMMARIES, build_parser
from ullage.main import main

REQUEST = {
    "--model",
    "--input-shape",
    "--lora",
    "--quantize",
    "--batches",
    "--gpus",
    "--hardware",
    "--seq-len",
    "--micro-batch",
    "--global-batch",
    "--nodes",
    "--parallel",
    "--tiles",
    "--kernels",
    "--storage",
    "--expert-load",
    "--accumulate",
    "--precision",
    "--clip",
    "--speculate",
    "--optimizer",
    "--memory",
}
FLAGS = {
    "web": {"--port", "--public", "--proxies", "--open"},
    "verify": {"plan_file", "--json"},
    "explain": {"plan_file", "unit", "--all", "--json"},
    "calibrate": {"--quick", "--output", "--memory", "--json", "--only", "--device-cores"}
    | {"--drive-endurance", "--allow-other-machine", "--list"},
    "plan": {*REQUEST, "--beside", "--mtbf", "--checkpoints", "--budget", "--output", "--deepspeed", "--json"},
    "whatif": {
        *(*REQUEST, "study", "--set", "--sweep", "--design", "--question", "--sensitivities", "--certify", "--prices"),
        *("--tokens", "--days", "--workers", "--output", "--table", "--json", "--fields"),
    },
    "execute": {
        *("plan", "--iterations", "--data", "--seed", "--lr", "--weights", "--save", "--output-dir", "--storage-dir"),
        *("--cores", "--audit", "--compile", "--replan", "--allow-other-machine", "--json"),
        *("--checkpoint-dir", "--resume", "--elastic"),
    },
    "checkpoint": {"action", "place", "--save", "--keep", "--json"},
    "simulate": {"plan", "--engine", "--iterations", "--trace", "--figure", "--text", "--json"},
    "compare": {"run_file", "--trace", "--refit", "--json"},
    "report": {"files", "--output", "--open", "--json"},
    "validate": {
        "files",
        "--hardware",
        "--case",
        "--max-mean-error",
        "--max-error",
        "--intervals",
        "--beside",
        "--json",
    },
    "models": {"model", "--lora", "--quantize", "--json"},
    "hardware": {"action", "names", "--output", "--json"},
    "completion": {"shell"},
    "doctor": {"--json"},
    "launch": {"plan", "--with"},
    "export-deepspeed": {"plan", "--output", "--nvme-path"},
}
MOST_OPTIONS = 160
"""Of all commands together: each further one makes the others harder to find."""


def subparser(command: str) -> argparse.ArgumentParser:
    actions = build_parser(command)._actions
    choices = next(action.choices for action in actions if isinstance(action, argparse._SubParsersAction))
    return choices[command]


def test_flags_are_exactly_these():
    found = {}
    for command in SUMMARIES:
        actions = [a for a in subparser(command)._actions if a.dest != "help"]
        found[command] = {(a.option_strings or [a.dest])[0] for a in actions}
    assert found == FLAGS
    assert sum(flag.startswith("--") for flags in found.values() for flag in flags) <= MOST_OPTIONS


def test_memory_of_the_host_is_what_is_asked_for():
    command = ["plan", "--model", "gpt2", "--hardware", "h100", "--memory"]
    had = load_profile("h100").host.memory_bytes.value
    for size in (had / 4, had * 4):  # what was free when it was measured says little, if memory grows as it is used
        request = request_of(Options(**given_options(build_parser("plan").parse_args([*command, f"host={int(size)}"]))))
        assert request.hardware.host.memory_bytes.value == int(size)
        assert request.hardware.device == load_profile("h100").device


@pytest.mark.parametrize("command", SUMMARIES)
def test_help_describes_and_gives_examples(command, capsys):
    assert main([command, "--help"]) == 0
    shown = capsys.readouterr().out
    description = shown.partition("options:")[0]
    assert len(description.partition("\n\n")[2]) > 60
    examples = [line.split() for line in shown.partition("examples:")[2].splitlines() if line]
    assert len(examples) >= 2
    assert all(words[:2] == ["ullage", command] for words in examples)


def test_examples_in_help_parse(capsys):
    for command in SUMMARIES:
        main([command, "--help"])
        for line in capsys.readouterr().out.partition("examples:")[2].strip().splitlines():
            words = line.partition("|")[0].replace("'", "").split()
            assert build_parser(command).parse_args(words[1:]).run


def test_help_and_version(cli):
    shown = cli("--help")
    assert shown.returncode == 0
    assert all(f"    {command}" in shown.stdout for command in SUMMARIES)
    assert cli("--version").stdout.startswith("ullage 0.")


def without_cli(arguments: list[str], *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *options, *arguments], capture_output=True, text=True, check=True)


def test_planner_and_hwprofiles_never_import_torch():
    code = """
import importlib, pathlib, sys, planner, hwprofiles
for package in (planner, hwprofiles):
    home = pathlib.Path(package.__file__).parent
    for path in home.rglob("*.py"):
        if "calibrate" not in path.parts:
            importlib.import_module(".".join(path.relative_to(home.parent).with_suffix("").parts))
print("torch" in sys.modules, "planner.costs.model" in sys.modules)
"""
    assert without_cli(["-c", code]).stdout.split() == ["False", "True"]


def test_import_is_lazy():
    assert without_cli(["-c", "import sys, ullage; print('numpy' in sys.modules)"]).stdout.strip() == "False"


def edited(path: Path, tmp_path: Path, **changes: object) -> str:
    copy = tmp_path / "edited.json"
    copy.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return str(copy)


def crippled_profile(tmp_path: Path, dtype: str, part: str) -> str:
    data = json.loads(canonical_json(load_profile("rtx-4090")))
    del data["device"][part][dtype]
    path = tmp_path / "crippled.json"
    path.write_text(json.dumps(data))
    return str(path)


BAD_INPUT = {
    "unknown model, nearest named": (["plan", "--model", "opt-13c"], ["opt-13b"]),
    "config is not JSON": (["plan", "--model", "{tmp}/broken.json"], ["broken.json", "not JSON"]),
    "config lacks a size": (["plan", "--model", "{tmp}/empty.json"], ["empty.json"]),
    "unknown hardware, nearest named": (["plan", "--model", "gpt2", "--hardware", "a100-8"], ["a100-80"]),
    "no local profile": (["plan", "--model", "gpt2", "--hardware", "local"], ["ullage calibrate"]),
    "profile without network": (["plan", "--model", "gpt2", "--hardware", "h100x4-80g", "--gpus", "8"], ["inter_node"]),
    "profile without fp32": (["plan", "--model", "gpt2", "--hardware", "{gemm}", "--precision", "fp32"], ["fp32"]),
    "fp32 weights, bf16 master": (
        ["plan", "--model", "gpt2", "--precision", "fp32", "--precision", "master=bf16", "--optimizer", "adamw-8bit"],
        ["master copy in bf16", "precision is fp32", "change one"],
    ),
    "no bf16 master": (
        ["plan", "--model", "gpt2", "--precision", "master=bf16"],
        ["adamw keeps only", "adamw-bf16 or adamw-8bit"],
    ),
    "no output folder": (["plan", "--model", "gpt2", "--output", "{tmp}/no/plan.json"], ["no such folder"]),
    "output is a folder": (["plan", "--model", "gpt2", "--output", "/"], ["--output / is a folder", "name of a file"]),
    "more than any count": (
        ["plan", "--model", "gpt2", "--micro-batch", "99999999999999"],
        ["--micro-batch", "'99999999999999' is too large", "at most 1000000000"],
    ),
    "more digits than Python reads": (["plan", "--model", "gpt2", "--gpus", "9" * 5000], ["--gpus", "is too large"]),
    "too many sequences": (
        ["plan", "--model", "gpt2", "--micro-batch", "1000000000"],
        ["micro_batch is 1000000000", "no more than 1000000"],
    ),
    "too many devices": (["plan", "--model", "gpt2", "--gpus", "1000000"], ["num_devices is 1000000", "no more than"]),
    "too many micro-batches": (
        ["plan", "--model", "gpt2", "--accumulate", "10000000"],
        ["num_micro_batches is 10000000", "no more than 4096"],
    ),
    "too large a batch": (
        ["plan", "--model", "gpt2", "--global-batch", "1000000000"],
        ["global_batch", "no more than"],
    ),
    "too large a batch for a device": (
        ["plan", "--model", "gpt2", "--global-batch", "1000000", "--micro-batch", "1"],
        ["1000000 sequences", "at most 4096 micro-batches"],
    ),
    "checkpoints without a place": (
        ["execute", "{plan}", "--checkpoint-dir", "every=3,keep=4"],
        ["has no place", "--checkpoint-dir PLACE"],
    ),
    "one checkpoint of a run": (
        ["execute", "{plan}", "--checkpoint-dir", "{tmp}/c,keep=1"],
        ["/c,keep=1 is too few", "at least 2"],
    ),
    "negative seed": (["execute", "{plan}", "--seed", "-1"], ["--seed", "'-1' is not a whole number from 0 on"]),
    "seed without end": (["execute", "{plan}", "--seed", "9" * 20], ["--seed", "is too large; give a whole number"]),
    "seed of a study": (
        ["whatif", "--model", "gpt2", "--design", "random,seed=-1"],
        ["--design", "'-1' is not a whole number"],
    ),
    "size": (["plan", "--model", "gpt2", "--memory", "device=12 apples"], ["150MB"]),
    "size for libraries alone": (
        ["plan", "--model", "gpt2", "--hardware", "h100", "--memory", "device=1GiB"],
        ["more"],
    ),
    "size below zero": (["plan", "--model", "gpt2", "--memory", "device=-1GB"], ["'-1GB' is not a size", "150MB"]),
    "zero devices": (["plan", "--model", "gpt2", "--gpus", "0"], ["--gpus", "from 1 on"]),
    "sequence too long": (["plan", "--model", "gpt2", "--seq-len", "4096"], ["1024"]),
    "no model": (["plan"], ["--model"]),
    "failures of no level": (["plan", "--model", "gpt2", "--mtbf", "disk=3h"], ["'disk=3h'", "memory=..."]),
    "failures at no time": (["plan", "--model", "gpt2", "--mtbf", "soon"], ["'soon'", "6h"]),
    "overhead of all": (["plan", "--model", "gpt2", "--mtbf", "6h", "--checkpoints", "max-overhead=120%"], ["1%"]),
    "limits without failures": (
        ["plan", "--model", "gpt2", "--checkpoints", "max-lost-work=9m"],
        ["without --mtbf", "--mtbf 6h"],
    ),
    "one checkpoint of many": (["checkpoint", "prune", "{tmp}", "--keep", "1"], ["--keep 1 is too few", "--keep 2"]),
    "one checkpoint": (
        ["plan", "--model", "gpt2", "--mtbf", "6h", "--checkpoints", "keep=1"],
        ["keep=1", "at least 2"],
    ),
    "a second pfs": (
        [
            "plan",
            "--model",
            "gpt2",
            "--hardware",
            "polaris-a100-40g",
            "--mtbf",
            "6h",
            "--checkpoints",
            "pfs-bandwidth=2GB",
        ],
        ["polaris-a100-40g has a pfs already"],
    ),
    "abbreviated flag": (["plan", "--mod", "gpt2"], ["--mod is not an option", "did you mean --model"]),
    "flag of no command": (
        ["plan", "--model", "gpt2", "--frobnicate=1"],
        ["--frobnicate is not", "`ullage plan --help`"],
    ),
    "one argument more": (["verify", "{plan}", "twice"], ["twice: too many arguments", "`ullage verify --help`"]),
    "no plan": (["simulate", "{tmp}/none.json"], ["none.json", "ullage plan"]),
    "plan of another schema": (["simulate", "{schema}"], ["schema_version 99", "again"]),
    "plan changed by hand": (["execute", "{changed}"], ["changed after it was written", "again"]),
    "unknown engine": (["simulate", "{plan}", "--engine", "warp"], ["'warp'", "twin-flow"]),
    "bad fraction": (["simulate", "{plan}", "--engine", "twin-flow", "2"], ["between 0 and 1"]),
    "bad stride": (["simulate", "{plan}", "--engine", "interleaved", "0.5"], ["whole number"]),
    "no such setting": (["simulate", "{plan}", "--engine", "gpu-only", "3"], ["no setting"]),
    "too many settings": (["simulate", "{plan}", "--engine", "twin-flow", "1", "2"], ["at most one"]),
    "one iteration": (["simulate", "{plan}", "--iterations", "1"], ["at least 2"]),
    "nothing to simulate": (["simulate", "--engine", "zero-offload"], ["required: PLAN"]),
    "nothing to execute": (["execute"], ["required: PLAN"]),
    "data of a trainer": (["execute", "{plan}", "--data", "chats.jsonl"], ["chats.jsonl", "ullage.offloaded(trl.SFT"]),
    "type of no file": (["execute", "{plan}", "--data", "dtype=uint16"], ["dtype=uint16 has no file", "--data PATH"]),
    "type of no folder": (["execute", "{plan}", "--save", "dtype=float32"], ["has no folder", "--save DIR"]),
    "unknown part": (["plan", "--model", "gpt2", "--parallel", "data=2"], ["'data=2'", "tensor=..."]),
    "a part twice": (["plan", "--model", "gpt2", "--tiles", "loss=2,loss=4"], ["loss twice"]),
    "unknown type": (["plan", "--model", "gpt2", "--precision", "fp16"], ["'fp16'", "bf16, fp32"]),
    "memory of now in a study": (["whatif", "--model", "gpt2", "--memory", "free"], ["memory"]),
    "figure of an unknown kind": (["simulate", "{plan}", "--figure", "{tmp}/f.gif"], ["f.gif", "end in .html"]),
    "figure into nowhere": (["simulate", "{plan}", "--figure", "{tmp}/no/f.html"], ["no/", "there is no such folder"]),
    "trace into nowhere": (["simulate", "{plan}", "--trace", "{tmp}/no/t.json"], ["no/", "there is no such folder"]),
    "no run": (["compare", "{tmp}/none.json"], ["none.json", "ullage execute"]),
    "plan instead of run": (["compare", "{plan}"], ["is a plan", "not a run", "ullage execute"]),
    "profile instead of run": (["compare", "{gemm}"], ["is a profile", "not a run", "run.json"]),
    "neither run nor anything": (["compare", "{tmp}/empty.json"], ["empty.json is not a run", "run.json"]),
    "no cases": (["validate", "{tmp}/none.json"], ["none.json", "No such file"]),
    "model not known": (["models", "opt-13c"], ["opt-13b"]),
    "hardware without name": (["hardware", "show"], ["needs one name"]),
    "unknown command": (["plam"], ["plam"]),
    "no command": ([], ["COMMAND"]),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_clear_line(case, plan_path, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("ULLAGE_HOME", str(tmp_path))
    arguments, wanted = BAD_INPUT[case]
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "empty.json").write_text('{"model_type": "llama"}')
    places = {
        "tmp": str(tmp_path),
        "plan": str(plan_path),
        "gemm": crippled_profile(tmp_path, "fp32", "gemm"),
        "schema": edited(plan_path, tmp_path, schema_version=99) if "{schema}" in arguments else "",
        "changed": edited(plan_path, tmp_path, seq_len=64) if "{changed}" in arguments else "",
    }
    before = sorted(tmp_path.iterdir())
    assert main([argument.format(**places) for argument in arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert shown.err.startswith(" ".join(["ullage", *[a for a in arguments[:1] if a in SUMMARIES]]) + ": error: ")
    for text in wanted:
        assert text in shown.err
    assert sorted(tmp_path.iterdir()) == before


def test_bad_input_of_a_process_has_no_traceback(cli, tmp_path):
    result = cli("plan", "--model", "opt-13c")
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert not list(tmp_path.iterdir())
    assert "Traceback" in cli("plan", "--model", "opt-13c", ULLAGE_TRACEBACK="1").stderr


def test_our_own_bugs_are_not_bad_input(monkeypatch):
    def broken(_args: argparse.Namespace) -> int:
        raise AssertionError

    monkeypatch.setattr(importlib.import_module("ullage.commands.models"), "run", broken)
    with pytest.raises(AssertionError):
        main(["models"])


@pytest.mark.parametrize("intruder", ["executor", "planner"])
def test_intruder_is_named(intruder, cli, tmp_path):
    (tmp_path / intruder).mkdir()
    (tmp_path / intruder / "__init__.py").write_text("")
    result = cli("models")  # runs in that folder, so that it comes first
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert f"package '{intruder}' is not Ullage's" in result.stderr
    assert str(tmp_path / intruder) in result.stderr
    assert f"pip uninstall {intruder}" in result.stderr


def test_namespace_intruder_is_harmless(cli, tmp_path):
    (tmp_path / "executor").mkdir()  # no __init__.py: a folder that happens to be called so; ours is found after it
    assert cli("models").returncode == 0


@pytest.mark.parametrize("given", [{}, {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}])
def test_segments_of_device_memory_can_grow_unless_the_user_says_otherwise(given, monkeypatch):
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    for name in names:
        monkeypatch.setenv(name, given.get(name, ""))  # so that it is as before afterwards
        if name not in given:
            del os.environ[name]
    assert main(["--help"]) == 0
    found = {name: os.environ[name] for name in names if name in os.environ}
    assert found == (given or dict.fromkeys(names, "expandable_segments:True"))


def test_broken_pipe_is_quiet():
    for arguments in (["hardware", "show", "h100"], ["hardware", "show", "h100", "--json"]):
        with subprocess.Popen(
            [sys.executable, "-m", "ullage", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            process.stdout.close()
            error = process.stderr.read()
        assert (process.returncode, error) == (141, b"")


def test_ctrl_c_in_calibration_leaves_nothing(tmp_path):
    environment = {**os.environ, "HOME": str(tmp_path), "ULLAGE_HOME": str(tmp_path / "profiles")}
    with subprocess.Popen(
        [sys.executable, "-m", "ullage", "calibrate"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob(".cache/ullage-*")) and time.monotonic() < deadline:  # it measures the disk
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert error == "ullage calibrate: interrupted\n"
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not list(tmp_path.glob(".cache/ullage-*"))
