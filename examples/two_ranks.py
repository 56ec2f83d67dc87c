"""Two processes train one model, each with its own part of every batch: `torchrun --nproc-per-node 2 two_ranks.py`."""

import os
from pydoc_data.topics import topics

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import ullage

rank = int(os.environ["RANK"])
if torch.cuda.is_available():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))

torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=256, eos_token_id=0, **sizes)).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

text = torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8).long()
batches = text[: 20 * 8 * 64].view(20, 2, 4, 64)[:, rank]

batch = {"input_ids": batches[0], "labels": batches[0]}
model, optimizer = ullage.prepare(model, optimizer, batch, device_memory="2MB")  # leave out: all that is free
for tokens in batches:
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(f"loss {loss.item():.3f}")

ullage.save(optimizer, "tuned")  # all ranks together; the first one writes
optimizer.session.close()  # each rank has the whole model again
if rank == 0:
    print(optimizer.plan)
    prompt = batches[0][:1, :16]
    ours = model.eval().generate(prompt, max_new_tokens=8, do_sample=False)
    saved = AutoModelForCausalLM.from_pretrained("tuned").generate(prompt, max_new_tokens=8, do_sample=False)
    print("same tokens:", torch.equal(ours, saved))
