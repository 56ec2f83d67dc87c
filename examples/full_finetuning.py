"""Fine-tune all weights of a small Llama that is in a folder, in a loop of your own, and save it for `from_pretrained`.

The text is that of Python's own help pages, one token per byte.
"""

from pydoc_data.topics import topics

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import ullage

torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=256, eos_token_id=0, **sizes)).save_pretrained("base")

text = torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8).long()
batches = text[: 20 * 4 * 64].view(20, 4, 64)

model = AutoModelForCausalLM.from_pretrained("base").train()  # your folder
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
batch = {"input_ids": batches[0], "labels": batches[0]}
model, optimizer = ullage.prepare(model, optimizer, batch, device_memory="2MB")  # leave out: all that is free
print(optimizer.plan)

for tokens in batches:
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss.item():.3f}")

ullage.save(optimizer, "tuned")
optimizer.session.close()  # the model is an ordinary one again

prompt = batches[0][:1, :16]
ours = model.eval().generate(prompt, max_new_tokens=8, do_sample=False)
saved = AutoModelForCausalLM.from_pretrained("tuned").generate(prompt, max_new_tokens=8, do_sample=False)
print("same tokens:", torch.equal(ours, saved))
