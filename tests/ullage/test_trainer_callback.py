"""A prepared model inside ``transformers.Trainer``, against the same trainer with everything in memory."""

import json
from pathlib import Path

import pytest
import torch
import transformers

import ullage
from planner.plan.document import Plan, PlanError, load_plan
from ullage.integrations.trainer_callback import UllageCallback
from ullage.main import main


@pytest.fixture(scope="module")
def plan(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Plan:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    options = ["--seq-len", "32", "--micro-batch", "2", "--accumulate", "2", "--precision", "fp32"]
    machine = ["--hardware", "epyc-turin-2c", "--device-memory", "1.5MB"]
    assert main(["plan", "--model", str(tiny_model), *options, *machine, "--output", str(path), "--json"]) == 0
    return load_plan(path)


def trainer(plan: Plan, model_path: Path, folder: Path, *, under_plan: bool, **arguments):
    transformers.set_seed(0)
    config = transformers.AutoConfig.for_model(**json.loads(model_path.read_text()), use_cache=False)
    model = transformers.AutoModelForCausalLM.from_config(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    callbacks = []
    if under_plan:
        model, optimizer = ullage.prepare(model, optimizer, plan)
        callbacks = [UllageCallback(optimizer, plan)]
    # 7 micro-batches in an epoch, of which the last is a group of its own.
    tokens = torch.randint(256, (14, 32), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    usual = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 6,
        "logging_steps": 1,
        "save_steps": 3,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    made = transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(output_dir=str(folder), **usual | arguments),
        train_dataset=data,
        eval_dataset=data[:4],
        optimizers=(optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)),
        callbacks=callbacks,
    )
    return made, model, optimizer


def test_training_in_a_trainer_is_training_in_memory(plan: Plan, tiny_model: Path, tmp_path: Path) -> None:
    """To rounding: PyTorch's AdamW and ours add up the same terms in another order. Saved weights too.

    The short group at the end of the first epoch as well, of which the log has no seconds beside those of whole ones.
    """
    seen, final = [], []
    for under_plan in (False, True):
        folder = tmp_path / str(under_plan)
        made, model, optimizer = trainer(plan, tiny_model, folder, under_plan=under_plan)
        made.train()
        made.save_model(str(folder / "last"))
        seen.append([entry for entry in made.state.log_history if "train_runtime" not in entry])
        if under_plan:
            optimizer.session.close()
        final.append({name: weight.detach().clone() for name, weight in model.named_parameters()})
    for plain, ours in zip(*seen, strict=True):
        for name in {"loss", "eval_loss", "grad_norm", "learning_rate"} & plain.keys():
            assert ours[name] == pytest.approx(plain[name], rel=1e-4), name
    steps = [entry for entry in seen[1] if "loss" in entry]
    assert len(steps) == 6
    assert steps[-1]["loss"] != steps[0]["loss"]
    assert [entry["step"] for entry in steps if entry.get("ullage_iteration_s", 0) > 0] == [1, 2, 3, 5, 6]
    assert {entry["ullage_predicted_s"] for entry in steps if entry["step"] != 4} == {plan.prediction.iteration_s}
    for name, weight in final[0].items():
        torch.testing.assert_close(final[1][name], weight, rtol=0, atol=1e-4)
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "True" / "last")
    for name, weight in saved.named_parameters():
        assert torch.equal(weight, final[1][name]), name


@pytest.mark.part(3)
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gradient_accumulation_steps": 1}, "gradient_accumulation_steps=1, but under the plan it is 2"),
        ({"per_device_train_batch_size": 4}, "per_device_train_batch_size=4, but under the plan it is 2"),
        ({"max_grad_norm": 0.0}, "max_grad_norm=0.0, but under the plan it is 1.0"),
        ({"gradient_checkpointing": True}, "(activation|gradient)_checkpointing=True, but under the plan it is False"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size=True, but under the plan it is False"),
        ({"bf16_full_eval": True}, "bf16_full_eval=True, but under the plan it is False"),
    ],
)
def test_arguments_that_mean_something_else_are_named(plan, tiny_model, tmp_path, arguments, message) -> None:
    made, _, optimizer = trainer(plan, tiny_model, tmp_path, under_plan=True, **arguments)
    with optimizer.session, pytest.raises(PlanError, match=message):
        made.train()
