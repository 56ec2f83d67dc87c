"""``ullage.offloaded``: trainers of ``transformers`` and TRL, against the same ones with everything in memory."""

import json
import random
from pathlib import Path

import datasets
import forked
import numpy as np
import pytest
import tokenizers
import torch
import transformers
from forked import Forked, environments
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

import ullage
from hwprofiles.machine import this_machine
from hwprofiles.registry import load_profile, local_profile_path, save_profile
from planner.plan.document import PlanError

LENGTHS = (32, 9, 32, 17, 5, 32, 30, 3, 11, 32, 8, 8, 21, 32)  # 7 batches in an epoch: the last is a group of its own


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ULLAGE_HOME", str(tmp_path / "home"))
    profile = load_profile("epyc-turin-2c")
    save_profile(profile.model_copy(update={"name": "mine", "measured_on": this_machine()}), local_profile_path())


def padded(rows: list[dict]) -> dict[str, torch.Tensor]:
    """Pad on the right, as data collators do."""
    random.random(), np.random.random(), torch.rand(1)  # noqa: NPY002, S311 - so do collators that mask
    length = max(len(row["input_ids"]) for row in rows)
    ids = torch.zeros(len(rows), length, dtype=torch.long)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for into, row in enumerate(rows):
        ids[into, : len(row["input_ids"])] = labels[into, : len(row["input_ids"])] = row["input_ids"]
        mask[into, : len(row["input_ids"])] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def data() -> list[dict]:
    generator = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(256, (length,), generator=generator)} for length in LENGTHS]


def model_of(path: Path) -> nn.Module:
    transformers.set_seed(0)
    config = transformers.AutoConfig.for_model(**json.loads(path.read_text()), attention_dropout=0.1)
    return transformers.AutoModelForCausalLM.from_config(config)


def trainer(made: type[Trainer], model_path: Path, folder: Path, **arguments) -> Trainer:
    usual = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 6,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_steps": 3,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "warmup_steps": 2,
    }
    return made(
        model=model_of(model_path),
        args=TrainingArguments(output_dir=str(folder), **usual | arguments),
        data_collator=padded,
        train_dataset=data(),
        eval_dataset=data()[:4],
    )


def same_logs(plain: Trainer, ours: Trainer) -> None:
    logs = [[entry for entry in made.state.log_history if "train_runtime" not in entry] for made in (plain, ours)]
    for one, other in zip(*logs, strict=True):
        for name in {"loss", "eval_loss", "grad_norm", "learning_rate"} & one.keys():
            assert other[name] == pytest.approx(one[name], rel=1e-3), name


def same_weights(plain: nn.Module, ours: nn.Module) -> None:
    for (name, one), other in zip(plain.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4, msg=name)


def test_a_trainer_trains_as_in_memory_and_goes_on_from_its_checkpoints(tiny_model: Path, tmp_path: Path) -> None:
    """To rounding: PyTorch's AdamW and ours add up the same terms in another order."""
    plain = trainer(Trainer, tiny_model, tmp_path / "plain")
    plain.train()
    ours = trainer(ullage.offloaded(Trainer, device_memory="1.5MB"), tiny_model, tmp_path / "ours")
    assert ours.plan is None
    ours.train()
    same_logs(plain, ours)
    plan = ours.plan
    assert plan.model.inputs[0].shape == (2, 32)  # the longest, not the first
    assert (plan.decisions.num_micro_batches, plan.decisions.clip) == (2, True)
    assert any(unit.params == "host" for unit in plan.decisions.units.values())
    ours.save_model(str(tmp_path / "last"))
    steps = [entry for entry in ours.state.log_history if "loss" in entry]
    assert steps[-1]["loss"] < steps[0]["loss"]
    measured = [entry for entry in steps if "ullage_iteration_s" in entry]
    assert all(entry["ullage_predicted_s"] == plan.prediction.iteration_s for entry in measured)
    assert measured
    assert 4 not in {entry["step"] for entry in measured}  # the last group of an epoch has one micro-batch, not two
    ours.close()
    same_weights(plain.model, ours.model)
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "last")
    for name, weight in saved.named_parameters():
        assert torch.equal(weight, ours.model.get_parameter(name)), name

    again = trainer(ullage.offloaded(Trainer, device_memory="1.5MB"), tiny_model, tmp_path / "ours")
    again.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-3"))
    same_logs(plain, again)
    again.close()
    same_weights(plain.model, again.model)


def test_state_that_ranks_share_is_loaded_into_host_memory(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU of several, the stock trainer would load the state of all parameters onto the device."""
    made = ullage.offloaded(Trainer)
    ours = trainer(made, tiny_model, tmp_path, max_steps=1, save_steps=1)
    ours.train()
    moved, load = [], torch.load
    monkeypatch.setattr(torch, "load", lambda *args, **kw: moved.append(kw["map_location"]) or load(*args, **kw))
    monkeypatch.setattr(made, "_is_shared", True)
    ours._load_optimizer_and_scheduler(str(tmp_path / "checkpoint-1"))
    assert moved == ["cpu", "cpu"]
    moved.clear()
    ours._load_optimizer_and_scheduler(str(tmp_path / "checkpoint-2"))  # there is none
    assert moved == []
    monkeypatch.undo()
    ours.close()


def test_the_best_model_is_loaded_at_the_end(tiny_model: Path, tmp_path: Path) -> None:
    """The best is called what has the largest loss, which is the first of the two that were saved."""
    options = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    trained = []
    for made in (Trainer, ullage.offloaded(Trainer, device_memory="1.5MB")):
        trained.append(trainer(made, tiny_model, tmp_path / made.__name__, **options))
        trained[-1].train()
        assert Path(trained[-1].state.best_model_checkpoint).name == "checkpoint-3"
        assert trained[-1].evaluate()["eval_loss"] == trained[-1].state.best_metric
    plain, ours = trained
    ours.close()
    same_weights(plain.model, ours.model)


def test_evaluating_before_training_and_training_twice(tiny_model: Path, tmp_path: Path) -> None:
    found = []
    for made in (Trainer, ullage.offloaded(Trainer)):
        each = trainer(made, tiny_model, tmp_path / made.__name__, max_steps=1, learning_rate=1e-3)
        loss = each.evaluate()["eval_loss"]
        each.train()
        each.train()
        found.append((loss, each))
    (plain_loss, plain), (our_loss, ours) = found
    ours.close()
    assert our_loss == pytest.approx(plain_loss, rel=1e-6)
    same_weights(plain.model, ours.model)
    ours.train()  # under a new plan
    assert not ours.optimizer.optimizer.session.closed
    ours.close()


def test_mixed_precision_is_bf16_weights_with_masters_and_checkpointing_is_the_plans(
    tiny_model: Path, tmp_path: Path
) -> None:
    with pytest.warns(RuntimeWarning, match="activation_checkpointing=True, which is switched off"):
        ours = trainer(
            ullage.offloaded(Trainer), tiny_model, tmp_path, bf16=True, activation_checkpointing=True, max_steps=2
        )
    begins = torch.tensor([0, 3, 9], dtype=torch.int32)  # of documents, as TRL packs them
    ours.data_collator = lambda rows: padded(rows) | {"cu_seq_lens_q": begins}
    ours.train()
    assert [spec.shape for spec in ours.plan.model.inputs] == [(2, 32)] * 3
    assert ours.plan.decisions.precision.weights == "bf16"
    assert ours.optimizer.optimizer.state_dict()["state"][0]["master"].dtype is torch.float32
    ours.close()
    assert {parameter.dtype for parameter in ours.model.parameters()} == {torch.bfloat16}


def test_accelerate_wraps_no_prepared_model(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it would on several GPUs, where ranks of `DistributedDataParallel` each have a copy."""
    ours = trainer(ullage.offloaded(Trainer), tiny_model, tmp_path)
    ours.create_optimizer()
    monkeypatch.setattr(type(ours.accelerator), "multi_device", True)
    assert ours.accelerator.prepare_model(ours.model) is ours.model
    ours.close()
    assert not hasattr(ours.model, "_is_accelerate_prepared")


def test_a_stream_of_data_is_planned_for_its_first_batch(tiny_model: Path, tmp_path: Path) -> None:
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(data())

    ours = trainer(ullage.offloaded(Trainer), tiny_model, tmp_path, max_steps=1, max_grad_norm=0.0)
    ours.train_dataset = Stream()
    ours.train()
    ours.close()
    assert ours.plan.model.inputs[0].shape == (2, 32)
    assert not ours.plan.decisions.clip
    assert "grad_norm" not in ours.state.log_history[0]


class GradientNorms(TrainerCallback):
    """Reads gradients before the step."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_pre_optimizer_step(self, *_args: object, model: nn.Module, **_kwargs: object) -> None:
        self.norms += [parameter.grad.norm().item() for parameter in model.parameters()]


def test_a_callback_reads_gradients_without_clipping(tiny_model: Path, tmp_path: Path) -> None:
    norms = []
    for kind in (Trainer, ullage.offloaded(Trainer)):
        made = trainer(kind, tiny_model, tmp_path, max_steps=2, max_grad_norm=0.0)
        made.add_callback(callback := GradientNorms())
        made.train()
        norms.append(callback.norms)
        if hasattr(made, "close"):
            made.close()
    assert norms[1] == pytest.approx(norms[0], rel=1e-5, abs=1e-7)


def test_rows_that_make_no_batch_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    ours = trainer(ullage.offloaded(Trainer), tiny_model, tmp_path)
    ours.data_collator = transformers.default_data_collator
    ours.train_dataset = [{"input_ids": torch.ones(length, dtype=torch.long)} for length in range(3, 9)]
    with pytest.raises(ValueError, match=r"rows of the training data cannot be collated .*a data_collator that pads"):
        ours.train()
    ours.data_collator = list
    with pytest.raises(TypeError, match=r"batches are list, not dictionaries; give it a data_collator that returns"):
        ours.train()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"auto_find_batch_size": True},
            "auto_find_batch_size=True, which plans do not support; leave it out: the plan is for",
        ),
        (
            {"torch_compile": True},
            "torch_compile=True, which plans do not support; .*compile_blocks=True to ullage.offloaded",
        ),
        (
            {"fp16_full_eval": True},
            "fp16_full_eval=True, which plans do not support; leave it out: a prepared model keeps",
        ),
    ],
)
def test_arguments_that_no_plan_has_are_named_before_anything_is_made(
    tiny_model: Path, tmp_path: Path, arguments, message
) -> None:
    with pytest.raises(PlanError, match=message):
        trainer(ullage.offloaded(Trainer), tiny_model, tmp_path, **arguments)


def test_what_is_no_trainers_class_is_named(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(
        TypeError, match=r"Linear is not a subclass of transformers.Trainer; write ullage.offloaded\(Trainer"
    ):
        ullage.offloaded(nn.Linear)
    made = trainer(Trainer, tiny_model, tmp_path)
    with pytest.raises(TypeError, match=r"Trainer is not a subclass of"):
        ullage.offloaded(made)
    with pytest.raises(TypeError, match="OffloadedTrainer is offloaded already; call"):
        ullage.offloaded(ullage.offloaded(Trainer))


SCRIPT = """
import json, os, sys
import torch, transformers
from datasets import Dataset
import ullage
model_path, folder, name, resumed = sys.argv[1:]
if name == "SFTTrainer":
    from trl import SFTConfig as Arguments, SFTTrainer as Trainer
else:
    from transformers import Trainer, TrainingArguments as Arguments

def padded(rows):
    rows = [torch.tensor(row["input_ids"]) for row in rows]
    ids, labels = (torch.nn.utils.rnn.pad_sequence(rows, True, fill) for fill in (0, -100))
    return {"input_ids": ids, "attention_mask": (labels != -100).long(), "labels": labels}

generator = torch.Generator().manual_seed(1)
lengths = (32, 9, 32, 17, 5, 32, 30, 3, 11, 32, 8, 9, 21, 32, 6, 7)
rows = [torch.randint(256, (length,), generator=generator).tolist() for length in lengths]
data = Dataset.from_dict({"input_ids": rows})
transformers.set_seed(0)
config = transformers.AutoConfig.for_model(**json.load(open(model_path)))
model = transformers.AutoModelForCausalLM.from_config(config)
num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
args = Arguments(
    output_dir=folder, per_device_train_batch_size=2, gradient_accumulation_steps=4 // num_ranks, max_steps=4,
    learning_rate=1e-2, logging_steps=1, save_steps=2, eval_strategy="steps", eval_steps=2, report_to=[],
    use_cpu=True, disable_tqdm=True, warmup_steps=2, bf16=False,
)

def trainer(made):
    more = {"data_collator": padded}
    if name == "SFTTrainer":
        from tokenizers import Tokenizer, models
        words = models.WordLevel({str(number): number for number in range(256)}, unk_token="0")  # noqa: S106
        special = {"pad_token": "0", "eos_token": "1"}
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), **special)
        more = {"processing_class": tokenizer}
    return made(model=model, args=args, train_dataset=data, eval_dataset=data.select(range(4)), **more)

def logged(trained):
    kept = "loss", "eval_loss", "grad_norm", "learning_rate"
    return [{key: entry[key] for key in kept if key in entry} for entry in trained.state.log_history]

if num_ranks == 1:
    alone = trainer(Trainer)
    alone.train()
    print(json.dumps([logged(alone)]))
    model.save_pretrained(folder + "/last")
else:
    ours = trainer(ullage.offloaded(Trainer, device_memory="1.2MB"))
    ours.train()
    ours.save_model(folder + "/last")
    decided, logs = ours.plan.decisions, [logged(ours)]
    ours.close()
    if resumed:
        again = trainer(ullage.offloaded(Trainer, device_memory="1.2MB"))
        again.train(resume_from_checkpoint=folder + "/checkpoint-2")
        logs.append(logged(again))
        again.close()
    if os.environ["RANK"] == "0":
        print(json.dumps([*logs, [decided.data_parallel, decided.num_micro_batches]]))
"""


def logged(process: Forked) -> list:
    out, err = process.communicate()
    assert process.returncode == 0, err[-3000:]
    found = [line for line in out.splitlines() if line.startswith("[")]
    return json.loads(found[0]) if found else []


def check_logs(ours: list[dict], plain: list[dict]) -> None:
    assert [entry.keys() for entry in ours] == [entry.keys() for entry in plain]
    for one, other in zip(ours, plain, strict=True):
        assert one == pytest.approx(other, rel=1e-4)


def same_saved(folder: Path, plain: Path) -> None:
    one, other = (transformers.AutoModelForCausalLM.from_pretrained(path / "last") for path in (folder, plain))
    same_weights(other, one)


def test_two_ranks_train_and_resume_as_one_process_in_memory(tiny_model: Path, tmp_path: Path) -> None:
    """The same sequences in each step, every target token with the same weight; rank 0 writes what all ranks hold."""
    (tmp_path / "script.py").write_text(SCRIPT)
    words = (str(tmp_path / "script.py"), str(tiny_model))
    both = [Forked(forked.script, *words, str(tmp_path / "two"), "Trainer", "yes", env=e) for e in environments(2)]
    alone = Forked(forked.script, *words, str(tmp_path / "one"), "Trainer", "")
    (plain,), (ours, resumed, decided) = logged(alone), logged(both[0])
    assert logged(both[1]) == []
    check_logs(ours, plain)
    check_logs(resumed, plain)
    assert decided == [2, 2]
    same_saved(tmp_path / "two", tmp_path / "one")
    names = {path.name for path in (tmp_path / "two" / "checkpoint-2").iterdir()}
    assert {"optimizer.pt", "rng_state_0.pth", "rng_state_1.pth", "model.safetensors"} <= names


@pytest.mark.part(0)
def test_torchrun_starts_two_ranks_of_an_sft_trainer(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    words = (str(tmp_path / "script.py"), str(tiny_model))
    run = ("torch.distributed.run", "--nproc-per-node", "2", *words, str(tmp_path / "two"), "SFTTrainer", "")
    (ours, decided), (plain,) = (
        logged(Forked(forked.launcher, *run)),
        logged(Forked(forked.script, *words, str(tmp_path / "one"), "SFTTrainer", "")),
    )
    check_logs(ours, plain)
    assert decided == [2, 2]
    same_saved(tmp_path / "two", tmp_path / "one")


class OwnReference(Trainer):
    """Runs its model without gradients between forward and backward, as TRL's DPO and KTO trainers do with adapters."""

    def compute_loss(self, model, inputs, *args, **kwargs):  # type: ignore[no-untyped-def]
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        if not model.training:
            return loss
        with torch.no_grad():
            reference = super().compute_loss(model, inputs)
        return loss - 0.5 * reference


class OwnLoss(Trainer):
    """Calls its model twice, changes the batch that it is given, and keeps metrics, as trainers of TRL do."""

    seen: list[float]

    def compute_loss(self, model, inputs, *args, **kwargs):  # type: ignore[no-untyped-def]  # noqa: ARG002
        labels = inputs.pop("labels")
        logits = [model(**inputs, use_cache=False).logits for _ in "ab"]
        loss = torch.nn.functional.cross_entropy(logits[0].flatten(0, 1), labels.flatten())
        loss = loss + (logits[0] - logits[1]).square().mean()
        self.seen.append(self.accelerator.gather_for_metrics(loss.detach()).mean().item())
        return loss


@pytest.mark.parametrize(("made", "num_calls", "num_left"), [(OwnReference, 2, 0), (OwnLoss, 2, 0)])
def test_a_trainer_whose_step_is_its_own_is_planned_as_it_is(
    tiny_model: Path, tmp_path: Path, made: type[Trainer], num_calls: int, num_left: int
) -> None:
    found = []
    for name, of in (("plain", made), ("ours", ullage.offloaded(made, device_memory="1.5MB"))):
        mine = trainer(of, tiny_model, tmp_path / name, max_steps=2, bf16=False, eval_strategy="no")
        mine.seen = []
        mine.train()
        found.append(mine)
    plain, ours = found
    assert ours.seen == pytest.approx(plain.seen, rel=1e-5)
    same_logs(plain, ours)
    session = ours._offloaded.session
    assert (len(ours.plan.model.calls), session.num_left) == (num_calls, num_left)
    ours.close()
    same_weights(plain.model, ours.model)


@pytest.mark.part(2)
@pytest.mark.parametrize("kind", ["GRPO", "DPO", "SFT"])
def test_trainers_of_trl_follow_their_plan(kind: str, tiny_model: Path, tmp_path: Path) -> None:
    """GRPO generates its batches; DPO runs its adapters' base model without gradients in each step; SFT packs."""
    trl, peft = pytest.importorskip("trl"), pytest.importorskip("peft")
    words = tokenizers.models.WordLevel({str(number): number for number in range(256)}, unk_token="0")  # noqa: S106
    splits = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(words),
        pad_token="0",  # noqa: S106
        eos_token="1",  # noqa: S106
    )
    splits._tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    rows = [{"prompt": "5 6 7", "chosen": f"8 {number}", "rejected": "9"} for number in range(10, 26)]
    folder = {"output_dir": str(tmp_path), "report_to": [], "use_cpu": True, "disable_tqdm": True, "bf16": False}
    usual = {"max_steps": 2, "logging_steps": 1, "per_device_train_batch_size": 4, "save_strategy": "no", **folder}
    found = []
    for wrap in (lambda made: made, lambda made: ullage.offloaded(made, device_memory="60MB")):
        model = model_of(tiny_model)
        if kind == "GRPO":
            args = trl.GRPOConfig(num_generations=2, max_completion_length=6, **usual)
            more = {"reward_funcs": lambda completions, **_: [float(len(text)) for text in completions]}
        elif kind == "SFT":
            args, more = trl.SFTConfig(packing=True, max_length=32, **usual), {}
        else:
            model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
            args, more = trl.DPOConfig(**usual), {}
        made = wrap(getattr(trl, f"{kind}Trainer"))
        columns = {"GRPO": {"prompt": "prompt"}, "SFT": {"prompt": "prompt", "completion": "chosen"}}.get(kind)
        taken = [{name: row[of] for name, of in columns.items()} for row in rows] if columns else rows
        data = datasets.Dataset.from_list(taken)
        one = made(model=model, args=args, train_dataset=data, processing_class=splits, **more)
        torch.manual_seed(3)
        one.train()
        found.append(one)
    plain, ours = found
    key = "reward"  # not of what was made up for the plan
    assert [entry.get(key) for entry in ours.state.log_history] == [entry.get(key) for entry in plain.state.log_history]
    same_logs(plain, ours)
    assert ours._offloaded.session.num_left == 0
    assert ours.plan.model.calls == (("", "") if kind == "DPO" else None)
    if kind == "SFT":
        batch = next(iter(ours.get_train_dataloader()))
        assert (batch["position_ids"] == 0).sum() > 4, "several documents in each sequence, kept apart"
        assert (batch["labels"] == -100).sum() > 4, "of which completions alone are learned"
    ours.close()
    same_weights(plain.model, ours.model)


class CachedLoss(OwnLoss):
    """Runs its model inside of backward, as losses with cached gradients do."""

    def compute_loss(self, model, inputs, *args, **kwargs):  # type: ignore[no-untyped-def]  # noqa: ARG002
        with torch.no_grad():
            logits = model(**inputs, use_cache=False).logits
        loss = logits.square().mean().detach().requires_grad_()

        def again(gradient: torch.Tensor) -> None:
            with torch.enable_grad():
                (model(**inputs, use_cache=False).logits.square().mean() * gradient).backward()

        loss.register_hook(again)
        return loss


def test_a_step_that_cannot_be_recorded_trains_on_demand(tiny_model: Path, tmp_path: Path) -> None:
    found = []
    for name, of in (("plain", CachedLoss), ("ours", ullage.offloaded(CachedLoss, device_memory="1.5MB"))):
        mine = trainer(of, tiny_model, tmp_path / name, max_steps=2, bf16=False, eval_strategy="no")
        mine.train()
        found.append(mine)
    plain, ours = found
    same_logs(plain, ours)
    assert ours._offloaded.session.num_left == 2
    ours.close()
    same_weights(plain.model, ours.model)


def test_a_step_that_no_plan_can_be_made_for_is_refused_with_the_trainers_name(
    tiny_model: Path, tmp_path: Path
) -> None:
    class Idle(Trainer):
        def compute_loss(self, model, inputs, *args, **kwargs):  # type: ignore[no-untyped-def]  # noqa: ARG002
            return torch.zeros((), requires_grad=True)

    with pytest.raises(PlanError, match=r"^compute_loss of the Idle cannot be recorded: LlamaForCausalLM: the step"):
        trainer(ullage.offloaded(Idle), tiny_model, tmp_path).train()


def test_processes_that_the_trainer_does_not_know_of_are_named(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a machine without a GPU, where each would train on all data and save over the others."""

    class Alone(TrainingArguments):
        @property
        def world_size(self) -> int:
            return 1

    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(PlanError, match=r"2 processes were started, but TrainingArguments has world_size=1.*use_cpu"):
        ullage.offloaded(Trainer)(model=model_of(tiny_model), args=Alone(output_dir=str(tmp_path), report_to=[]))
