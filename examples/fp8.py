"""Fine-tune a small Llama whose linear layers multiply in fp8, as `torchao` does, and save it for `transformers`."""

from pydoc_data.topics import topics

import torch
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from transformers import AutoModelForCausalLM, LlamaConfig

import ullage

torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=256, eos_token_id=0, **sizes)).save_pretrained("base")

text = torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8).long()
batches = text[: 20 * 4 * 64].view(20, 4, 64)


def in_fp8(folder):
    """Return the model in your folder. Without a GPU, its products are of fp8 values, but in a wider type."""
    config = Float8LinearConfig(emulate=not torch.cuda.is_available())
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name != "lm_head").train()


model = in_fp8("base")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
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

ullage.save(optimizer, "tuned")
optimizer.session.close()  # the model is an ordinary one again

ours, theirs = (each(input_ids=batches[0], labels=batches[0]).loss for each in (model, in_fp8("tuned")))
print("same loss:", torch.equal(ours, theirs))
