"""A script for `transformers.Trainer` in which two lines were changed: the import, and `ullage.offloaded`."""

from pydoc_data.topics import topics

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments, set_seed

import ullage

set_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=256, eos_token_id=0, **sizes))

text = torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8).long()
data = [{"input_ids": row, "labels": row} for row in text[: 160 * 64].view(160, 64)]
args = TrainingArguments(
    output_dir="runs",
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    max_steps=20,
    learning_rate=3e-3,
    logging_steps=1,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
)
trainer = ullage.offloaded(Trainer)(model=model, args=args, train_dataset=data)
trainer.train()
trainer.save_model("tuned")
print(trainer.plan)
for entry in trainer.state.log_history:
    if "loss" in entry:
        print(f"loss {float(entry['loss']):.3f}")
trainer.close()  # the model is an ordinary one again

prompt = data[0]["input_ids"][None, :16]
ours = model.eval().generate(prompt, max_new_tokens=8, do_sample=False)
saved = AutoModelForCausalLM.from_pretrained("tuned").generate(prompt, max_new_tokens=8, do_sample=False)
print("same tokens:", torch.equal(ours.cpu(), saved))
