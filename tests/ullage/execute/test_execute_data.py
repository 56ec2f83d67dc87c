"""``ullage execute --data``: whole runs of text, chat and instructions, evaluated, interrupted, and on two ranks."""

import json
import re
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import forked
import numpy as np
import pytest
import torch
import transformers
from data_objects import lines, make_tokenizer
from forked import Forked, environments, until_training
from prometheus_client.parser import text_string_to_metric_families
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import ullage
from hwprofiles.profile import Fabric, HardwareProfile
from hwprofiles.quantity import Provenance, Quantity
from hwprofiles.registry import load_profile
from planner.plan.document import Plan, load_plan
from ullage.analysis.runs import load_run
from ullage.main import main

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


def two_devices() -> HardwareProfile:
    one = load_profile("epyc-turin-2c").with_device_memory(3_000_000)
    origin = Provenance(origin="assumed", source="gloo over loopback")
    fabric = Fabric(
        bytes_per_s=Quantity(value=1e9, unit="bytes_per_s", provenance=origin),
        latency_s=Quantity(value=3e-4, unit="s", provenance=origin),
    )
    more = {"devices_per_node": 2, "intra_node": fabric.model_dump(), "topology": (*one.topology, ("host1", "dram"))}
    return HardwareProfile.model_validate(one.model_dump() | more)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer, a configuration, and files of data whose lengths vary much."""
    folder = tmp_path_factory.mktemp("base")
    make_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **SIZES}))
    rng = np.random.default_rng(0)
    sums = [(f"{a}+{b}", str(a + b) + " because" * int(rng.integers(0, 3))) for a in range(10) for b in range(3, 8)]
    chats = [
        {"messages": [{"role": "user", "content": problem}, {"role": "assistant", "content": answer}]}
        for problem, answer in sums
    ]
    lines(folder / "chat.jsonl", chats)
    return folder


def planned(base: Path, name: str, hardware: str | HardwareProfile = "epyc-turin-2c", **more: object) -> Path:
    if isinstance(hardware, str):
        hardware = load_profile(hardware).with_device_memory(3_000_000)
    request = {"seq_len": 32, "micro_batch": 2, "num_micro_batches": 2, "precision": "fp32"} | more
    path = base / f"{name}.json"
    ullage.plan(base / "config.json", hardware=hardware, **request).save(path)
    return path


@pytest.fixture(scope="module")
def plan(base: Path) -> Path:
    return planned(base, "plan")


def of_data(base: Path, *more: str) -> list[str]:
    return ["--data", str(base / "chat.jsonl"), "--tokenizer", str(base), "--eval-split", "10%", "--lr", "3e-3", *more]


@pytest.mark.part(2)
@pytest.mark.parametrize("pack", [False, True], ids=["padded", "packed"])
def test_a_plan_for_masks_has_their_memory(
    base: Path, tmp_path: Path, pack: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a plan file the data ask for it; a plan of sequences without masks has too little."""
    monkeypatch.chdir(tmp_path)
    small = SIZES | {"hidden_size": 32, "max_position_embeddings": 256}
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "llama", **small}))
    lines(tmp_path / "long.jsonl", [{"text": "+".join(map(str, range(count)))} for count in range(100, 160, 2)])
    options = ["--model", str(config), "--seq-len", "256", "--micro-batch", "4", "--precision", "fp32"]
    options += ["--hardware", "epyc-turin-2c", "--device-memory", "60MB"]
    out = ["--output-dir", str(tmp_path), "--iterations", "6", "--json", *["--pack"] * pack]
    assert main(["execute", *options, "--data", "long.jsonl", "--tokenizer", str(base), *out]) == 0
    assert json.loads(capsys.readouterr().out)["memory"]["gpu"]["error"] == pytest.approx(0, abs=0.03)
    assert "attention_mask" in [spec.name for spec in load_plan(tmp_path / "plan.json").model.inputs]


REPORT: dict[str, Callable[[Path], list[str]]] = {
    "compare": lambda _: ["--json"],
    "report": lambda folder: ["--output", str(folder / "report.html")],
}


@pytest.mark.parametrize("pack", [False, True], ids=["padded", "packed"])
def test_a_run_learns_and_is_evaluated(
    base: Path, plan: Path, tmp_path: Path, pack: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Batches whose length varies, and a smaller last one in each epoch; of padded ones no time is compared."""
    out = ["--output-dir", str(tmp_path / "out"), "--save", str(tmp_path / "mine")]
    out += ["--tensorboard", str(tmp_path / "board"), "--metrics-file", str(tmp_path / "run.prom"), "--json"]
    assert main(["execute", str(plan), *of_data(base, "--epochs", "4"), *out, *["--pack"] * pack]) == 0
    printed, said = capsys.readouterr()
    found, run = json.loads(printed), load_run(tmp_path / "out" / "run.json")
    data = ullage.Data(base / "chat.jsonl", base, 32, 2, 2, pack=pack, eval_split=0.1)
    num_steps = data.num_steps(4)
    assert data.num_sequences % 4, "the last step of an epoch is smaller"
    assert len(run.losses) == num_steps
    assert run.data_position == 4 * data.num_sequences
    assert found["eval_losses"] == [list(entry) for entry in run.eval_losses]
    assert [made for made, _ in run.eval_losses] == [num_steps * epoch // 4 for epoch in (1, 2, 3, 4)]
    assert run.eval_losses[-1][1] < 0.9 * run.eval_losses[0][1]
    assert f"data: {data}" in " ".join(said.split())
    assert bool(run.steady_iterations) == pack
    for command in ("compare", "report"):
        assert (main([command, str(tmp_path / "out" / "run.json"), *REPORT[command](tmp_path)]) == 0) == pack
        assert pack or "after the first ones, no batch had the planned" in capsys.readouterr().err
    events = EventAccumulator(str(tmp_path / "board")).Reload().Scalars("evaluation loss")
    assert [(event.step + 1, event.value) for event in events] == [
        (made, pytest.approx(loss, rel=1e-6)) for made, loss in run.eval_losses
    ]
    metrics = {
        sample.name: sample.value
        for family in text_string_to_metric_families((tmp_path / "run.prom").read_text())
        for sample in family.samples
    }
    assert metrics["ullage_eval_loss"] == pytest.approx(run.eval_losses[-1][1])
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "mine")
    assert data.evaluate(saved) == pytest.approx(run.eval_losses[-1][1], rel=1e-5)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "mine").chat_template


def in_memory(base: Path, plan: Plan, num_steps: int) -> list[float]:
    """Return the losses of the same training without a plan: each step one big batch, and a mean over its targets."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, use_cache=False)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    size = plan.decisions.micro_batch * plan.decisions.num_micro_batches * plan.decisions.data_parallel
    losses = []
    for (batch,), _ in zip(ullage.Data(base / "chat.jsonl", base, 32, size).steps(9), range(num_steps), strict=False):
        logits = model(input_ids=batch.inputs["input_ids"], attention_mask=batch.inputs["attention_mask"]).logits
        targets = batch.inputs["labels"][:, 1:]
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_it_trains_as_one_big_batch_in_memory(base: Path, plan: Path) -> None:
    """13 steps of an epoch of 50 sequences: the last one has half of a micro-batch less."""
    loaded = load_plan(plan)
    data = ullage.Data(base / "chat.jsonl", base, 32, 2, 2)
    with ullage.Trainer(loaded, data=data, lr=3e-3) as trainer:
        steps = list(trainer.run(16))
    assert [step.loss for step in steps] == pytest.approx(in_memory(base, loaded, 16), rel=2e-4)
    assert sum(step.num_tokens for step in steps[:13]) == data.counts.tokens
    assert trainer.position == 50 + 3 * 4


def test_the_time_of_an_evaluation_is_no_iterations(base: Path, plan: Path) -> None:
    data = ullage.Data(base / "chat.jsonl", base, 32, 2, 2, pack=True, eval_split=0.2)
    with ullage.Trainer(load_plan(plan), data=data) as trainer:
        for number, _ in enumerate(trainer.run(5)):
            if number == 2:
                trainer.evaluate()
        assert trainer.model.training
        assert trainer.session.runtime.machine.left_out == {2}


def trained_by_two(plan: Path, folder: Path, *arguments: str) -> None:
    words = ("execute", str(plan), "--output-dir", str(folder), *arguments)
    both = [Forked(forked.ullage, *words, env=each) for each in environments(2)]
    for process in both:
        _, err = process.communicate()
        assert process.returncode == 0, err


def test_two_ranks_train_as_one(base: Path, tmp_path: Path) -> None:
    """Each has its share, every target token the same weight: losses of training and of evaluation are those of one."""
    one = planned(base, "one", num_micro_batches=3)
    two = planned(base, "two", two_devices(), micro_batch=1, num_micro_batches=3, gpus=2)
    arguments = of_data(base, "--epochs", "1", "--eval-every", "5")
    assert main(["execute", str(one), "--output-dir", str(tmp_path / "one"), *arguments]) == 0
    trained_by_two(two, tmp_path / "two", *arguments)
    first, second = (load_run(tmp_path / name / "run.json") for name in ("one", "two"))
    assert second.losses == pytest.approx(first.losses, rel=2e-4)
    assert [made for made, _ in second.eval_losses] == [5, 8]
    assert [loss for _, loss in second.eval_losses] == pytest.approx([loss for _, loss in first.eval_losses], rel=2e-4)
    assert first.data_position == second.data_position == 45


LOOP = """
import sys
import torch, transformers, ullage
base, micro_batches = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(base)).train()
data = ullage.Data(base + "/chat.jsonl", base, 32, 2, micro_batches, pack=True, eval_split=0.1)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
machine = ullage.load_profile("epyc-turin-2c")
model, optimizer = ullage.prepare(model, optimizer, data.example(), hardware=machine, num_micro_batches=micro_batches)
with optimizer.session:
    for batches in data.steps(2):
        for batch in batches:
            batch.loss(model).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    print(len(optimizer.plan.decisions.units), data.position, data.evaluate(model))
"""


@pytest.mark.part(0)
def test_a_loop_of_ones_own_shares_data_among_ranks(base: Path, tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    both = [Forked(forked.script, str(tmp_path / "loop.py"), str(base), "2", env=each) for each in environments(2)]
    alone = Forked(forked.script, str(tmp_path / "loop.py"), str(base), "4")
    said = []
    for process in (*both, alone):
        out, err = process.communicate()
        assert process.returncode == 0, err
        said.append(out.split())
    assert said[0] == said[1]
    assert said[0][:2] == said[2][:2]
    assert float(said[0][2]) == pytest.approx(float(said[2][2]), rel=1e-4)


def test_what_was_interrupted_goes_on_with_the_same_losses(
    base: Path, plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = of_data(base, "--iterations", "150", "--pack")
    places = ["--checkpoint-dir", str(tmp_path / "checkpoints"), "--checkpoint-every", "1000"]
    metrics, out = tmp_path / "run.prom", ["--output-dir", str(tmp_path / "out")]
    process = Forked(forked.ullage, "execute", str(plan), *whole, *places, *out, "--metrics-file", str(metrics))
    until_training(process, metrics, 6)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM, err
    made = int(re.search(r"interrupted after iteration (\d+)", " ".join(err.split()))[1])
    begun = load_run(tmp_path / "out" / "run.json").losses
    assert main(["execute", str(plan), *whole, *places, *out, "--resume"]) == 0
    rest = load_run(tmp_path / "out" / "run.json")
    assert main(["execute", str(plan), *whole, "--output-dir", str(tmp_path / "whole")]) == 0
    expected = load_run(tmp_path / "whole" / "run.json")
    assert (*begun, *rest.losses) == expected.losses
    assert rest.eval_losses == tuple(entry for entry in expected.eval_losses if entry[0] > made)
    assert rest.data_position == expected.data_position
    capsys.readouterr()
    lines(tmp_path / "other.jsonl", [{"text": "something else"}] * 40)
    other = ["--data", str(tmp_path / "other.jsonl"), "--tokenizer", str(base), "--iterations", "500"]
    assert main(["execute", str(plan), *other, *places, *out, "--resume"]) == 2
    assert (
        "of data whose number of documents is 50, but here it is 40; continue with the same files"
        in capsys.readouterr().err
    )
    np.save(tmp_path / "tokens.npy", np.arange(9000, dtype=np.uint16) % 128)
    tokens = ["--tokens", str(tmp_path / "tokens.npy"), "--iterations", "500"]
    assert main(["execute", str(plan), *tokens, *places, *out, "--resume"]) == 2
    assert "has a position in --data, which means nothing in other data" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("model_type", ["phi3"])
def test_a_captured_model_trains_on_data(
    base: Path, tmp_path: Path, model_type: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, **SIZES}))
    path = tmp_path / "plan.json"
    hardware = load_profile("epyc-turin-2c").with_device_memory(4_000_000)
    ullage.plan(tmp_path / "config.json", hardware=hardware, seq_len=32, micro_batch=2, precision="fp32").save(path)
    run = ["--iterations", "12", "--output-dir", str(tmp_path / "out"), "--json"]
    assert main(["execute", str(path), *of_data(base, *run)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["losses"][-1] < printed["losses"][0]
    assert len(printed["eval_losses"]) == 1


BAD: dict[str, tuple[Sequence[str], str]] = {
    "tokenizer alone": (
        ["--tokenizer", "x"],
        "--tokenizer is for text, chat or instructions in files; give --data PATH",
    ),
    "pack alone": (["--pack"], "--pack is for text, chat or instructions"),
    "epochs alone": (["--epochs", "2"], "--epochs is for text, chat or instructions"),
    "no tokenizer": (["--data", "{data}"], "needs a tokenizer; give --tokenizer DIR, or --weights DIR"),
    "two sources": (["--data", "{data}", "--text", "{data}"], "both name training data; give one of them"),
    "how long": (["--epochs", "2", "--iterations", "9"], "both set the length of training; give one"),
    "too short": (
        ["--epochs", "1", "--drop-last"],
        "the data have 3 sequences, but a step takes 4, and a smaller last step is dropped; leave --drop-last out",
    ),
    "every what": (["--eval-every", "5"], "needs held-out data; give for example --eval-split 0.05"),
    "all of it": (["--eval-split", "1.5"], "'1.5' is not a share between 0 and 1"),
    "no file": (["--data", "nowhere.jsonl", "--tokenizer", "{base}"], "nowhere.jsonl: there is no such file"),
    "no folder": (["--data", "{data}", "--tokenizer", "nowhere/x"], "nowhere/x has no tokenizer that can be read"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line(
    base: Path, plan: Path, tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lines(tmp_path / "data.jsonl", [{"text": "abc"}] * (3 if case == "too short" else 14))
    words = [word.format(data=tmp_path / "data.jsonl", base=base) for word in BAD[case][0]]
    if case in {"how long", "too short", "every what", "all of it"}:
        words += ["--data", str(tmp_path / "data.jsonl"), "--tokenizer", str(base)]
    assert main(["execute", str(plan), "--output-dir", str(tmp_path / "out"), *words]) == 2
    err = capsys.readouterr().err
    assert BAD[case][1] in err
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_data_that_are_not_there_are_reported_before_anything_is_planned(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--data", str(tmp_path / "no.jsonl"), "--tokenizer", str(base), "--output-dir", str(tmp_path / "out")]
    assert main(["execute", "--model", "opt-13b", *words]) == 2
    err = capsys.readouterr().err
    assert err.startswith(
        f"ullage execute: error: {tmp_path / 'no.jsonl'}: there is no such file or folder; give a file"
    )
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SIZES, "vocab_size": 99}))
    hardware = load_profile("epyc-turin-2c").with_device_memory(4_000_000)
    ullage.plan(tmp_path / "config.json", hardware=hardware, seq_len=32, precision="fp32").save(tmp_path / "plan.json")
    assert main(["execute", str(tmp_path / "plan.json"), *of_data(base)]) == 2
    assert "the tokenizer has 100 tokens, but the model knows 99; give the tokenizer of this" in capsys.readouterr().err


def test_data_that_are_batched_otherwise_than_planned_are_refused(base: Path, plan: Path) -> None:
    data = ullage.Data(base / "chat.jsonl", base, 32, 3, 2)
    with pytest.raises(ValueError, match="the data have micro_batch=3, but the plan has 2; make them with the plan's"):
        ullage.Trainer(load_plan(plan), data=data)
    tokens = np.arange(128, dtype=np.uint8)
    with (
        ullage.Trainer(load_plan(plan), data=tokens) as trainer,
        pytest.raises(ValueError, match="no data are held out"),
    ):
        trainer.evaluate()
