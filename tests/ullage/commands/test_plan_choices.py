"""Degrees, batches, nodes and experts on the command line: what was asked for is what is planned."""

import json
from pathlib import Path

import pytest

from planner.models.kernels import flop
from planner.plan.document import load_plan
from ullage.main import main

MOE = Path(__file__).parents[2] / "data" / "tiny-moe.json"


@pytest.fixture
def moe():
    return str(MOE)


def plan_of(tmp_path, *options: str):
    path = tmp_path / "plan.json"
    assert main(["plan", "--seq-len", "64", "--output", str(path), *options]) == 0
    return load_plan(path)


def test_a_batch_is_cut_and_said_so(tiny_model, tmp_path, capsys):
    options = ("--model", str(tiny_model), "--gpus", "4", "--global-batch", "8")
    plan = plan_of(tmp_path, *options)
    decided = plan.decisions
    assert decided.data_parallel * decided.micro_batch * decided.num_micro_batches == 8
    assert decided.num_devices == 4
    said = " ".join(capsys.readouterr().out.split())
    assert (
        f"the best found of {len({p.choice for p in plan.certificate.proofs})}, and the bound holds for all of them"
        in said
    )
    assert main(["verify", str(tmp_path / "plan.json")]) == 0


def test_degrees_nodes_and_experts_reach_the_plan(moe, tmp_path):
    shares = tmp_path / "load.json"
    shares.write_text(json.dumps([0.3, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1]))
    options = ("--model", moe, "--hardware", "h100", "--gpus", "8", "--nodes", "2", "--micro-batch", "1")
    more = (
        "--parallel",
        "tensor=2",
        "--parallel",
        "expert=4",
        "--parallel",
        "expert-units=2",
        "--expert-load",
        str(shares),
    )
    plan = plan_of(tmp_path, *options, *more)
    decided = plan.decisions
    assert (decided.tensor_parallel, decided.data_parallel, decided.expert_parallel) == (2, 4, 4)
    assert decided.expert_units == 2
    assert plan.hardware.devices_per_node == 4
    assert plan.expert_load == ((0.3, *[0.1] * 7),)
    assert main(["verify", str(tmp_path / "plan.json")]) == 0


def test_uneven_experts_are_another_plan(moe, tmp_path):
    options = ("--model", moe, "--hardware", "h100", "--gpus", "4", "--parallel", "expert=4")
    even, uneven = (plan_of(tmp_path, *options, "--expert-load", load) for load in ("uniform", "zipf:1.2"))
    assert even.expert_load == ()
    assert uneven.expert_load[0][0] == pytest.approx(1 / sum(i**-1.2 for i in range(1, 9)))
    computed = [sum(flop(unit.forward) for unit in plan.units()) for plan in (even, uneven)]
    assert computed[1] > 1.3 * computed[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--nodes 3", "--nodes 3 cannot share --gpus 4 evenly with at most 8 device(s) per node of h100"),
        ("--parallel tensor=3", "tensor 3 x pipeline 1 must divide the 4 device(s)"),
        ("--parallel expert=3", "num_experts of"),
        ("--expert-load zipf:x", "the exponent must be a number from 0 to 10"),
        (
            "--expert-load nowhere.json",
            "cannot read nowhere.json: No such file or directory; --expert-load takes uniform, zipf:S or",
        ),
        ("--expert-load {bad}", "must hold a list of shares, or one for each layer"),
        ("--expert-load {short}", "has 2 shares that add up to 1"),
        ("--global-batch 6 --micro-batch 4", "a global batch of 6 sequences cannot be cut into equal micro-batches"),
        ("--parallel pipeline=4", "has 2 layers, which 4 pipeline stages cannot share"),
    ],
)
def test_what_makes_no_sense_is_named_in_one_line(options, message, moe, tmp_path, capsys):
    files = {"bad": '{"a": 1}', "short": "[0.5, 0.5]"}
    for name, text in files.items():
        (tmp_path / f"{name}.json").write_text(text)
    chosen = options.format(**{name: str(tmp_path / f"{name}.json") for name in files}).split()
    assert main(["plan", "--model", moe, "--hardware", "h100", "--gpus", "4", "--seq-len", "64", *chosen]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_experts_one_by_one_are_executed(moe, tmp_path, capsys):
    plan_of(
        tmp_path, "--model", moe, "--hardware", "epyc-turin-2c", "--parallel", "expert-units=8", "--micro-batch", "1"
    )
    run = ("--iterations", "6", "--output-dir", str(tmp_path), "--json")
    capsys.readouterr()
    assert main(["execute", str(tmp_path / "plan.json"), *run]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert sum(printed["losses"][3:]) < sum(printed["losses"][:3])  # of one sequence each, so single ones jump
    assert printed["memory"]["gpu"]["error"] == pytest.approx(0, abs=0.05)
