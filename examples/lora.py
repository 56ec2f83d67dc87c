"""Train a LoRA adapter of a small Llama that is in a folder, and save the adapter for `peft`."""

from pydoc_data.topics import topics

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig

import ullage

torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=256, eos_token_id=0, **sizes)).save_pretrained("base")

text = torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8).long()
batches = text[: 20 * 4 * 64].view(20, 4, 64)

base = AutoModelForCausalLM.from_pretrained("base")  # your folder
model = get_peft_model(base, LoraConfig(r=8, target_modules=["q_proj", "v_proj", "up_proj", "lm_head"])).train()
optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
batch = {"input_ids": batches[0], "labels": batches[0]}
model, optimizer = ullage.prepare(model, optimizer, batch, device_memory="3MB")  # leave out: all that is free
print(optimizer.plan)

for tokens in batches:
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss.item():.3f}")

ullage.save(optimizer, "adapter")
optimizer.session.close()  # the model is an ordinary one again

prompt = batches[0][:1, :16]
ours = model.eval().generate(input_ids=prompt, max_new_tokens=8, do_sample=False)
saved = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("base"), "adapter").eval()
print("same tokens:", torch.equal(ours, saved.generate(input_ids=prompt, max_new_tokens=8, do_sample=False)))
