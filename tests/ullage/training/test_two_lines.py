"""Two lines of a stock script of ``transformers`` change, and it trains to the same losses."""

import difflib
from pathlib import Path
from typing import Any

import pytest

from hwprofiles.machine import this_machine
from hwprofiles.registry import load_profile, local_profile_path, save_profile

OF_TRAINER = """
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments, set_seed

set_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=256, **sizes))
tokens = torch.randint(256, (48, 32))
data = [{"input_ids": row, "labels": row} for row in tokens]
args = TrainingArguments(
    "runs", max_steps=6, logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True
)
trainer = Trainer(model=model, args=args, train_dataset=data)
trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
"""

OF_OWN_LOOP = """
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, get_cosine_schedule_with_warmup, set_seed

set_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=256, **sizes)).train()
batches = [{"input_ids": rows, "labels": rows} for rows in torch.randint(256, (6, 8, 32))]
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = get_cosine_schedule_with_warmup(optimizer, 2, 6)
losses = []
for batch in batches:
    loss = model(**batch).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    losses.append(loss.item())
"""

OF_ACCELERATE = """
import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
rows = torch.utils.data.TensorDataset(torch.randn(48, 16), torch.randint(4, (48,)))
batches = torch.utils.data.DataLoader(rows, 8)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
model, optimizer, batches, scheduler = accelerator.prepare(model, optimizer, batches, scheduler)
losses = []
for x, y in batches:
    with accelerator.accumulate(model):
        loss = torch.nn.functional.cross_entropy(model(x), y)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
accelerator.save_state("state")
"""

CHANGES = {
    "Trainer": (OF_TRAINER, "trainer = Trainer(", "trainer = ullage.offloaded(Trainer)("),
    "own loop": (
        OF_OWN_LOOP,
        "scheduler = ",
        "model, optimizer = ullage.prepare(model, optimizer, batches[0])\nscheduler = ",
    ),
    "accelerate": (
        OF_ACCELERATE,
        "scheduler = torch",
        "model, optimizer = ullage.prepare(model, optimizer, rows[:8][0], num_micro_batches=2)\nscheduler = torch",
    ),
}


@pytest.mark.part(2)
@pytest.mark.parametrize("kind", CHANGES)
def test_a_stock_script_changes_in_two_lines_and_trains_to_the_same_losses(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ULLAGE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    profile = load_profile("epyc-turin-2c").model_copy(update={"name": "mine", "measured_on": this_machine()})
    save_profile(profile, local_profile_path())
    stock, old, new = CHANGES[kind]
    ours = stock.replace("import torch\n", "import torch\nimport ullage\n").replace(old, new)
    added = [line for line in difflib.ndiff(stock.splitlines(), ours.splitlines()) if line[0] == "+"]
    assert len(added) == 2
    found = []
    for script in (stock, ours):
        names: dict[str, Any] = {}
        exec(script, names)  # noqa: S102
        found.append(names["losses"])
    planned = names["trainer" if kind == "Trainer" else "optimizer"]
    planned = planned.optimizer if kind == "accelerate" else planned  # which wraps it
    assert planned.plan.prediction.fits
    (planned if kind == "Trainer" else planned.session).close()
    assert found[1] == pytest.approx(found[0], rel=1e-6)
    assert len(set(found[0])) == 6
