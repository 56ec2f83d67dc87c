"""GRPO in a loop of your own: the prepared model writes texts between steps, and is rewarded for short words."""

from pydoc_data.topics import topics

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import ullage

NUM_PROMPTS, NUM_ANSWERS, LENGTH = 4, 8, 12
torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
config = LlamaConfig(vocab_size=256, bos_token_id=None, eos_token_id=None, pad_token_id=0, **sizes)
model = AutoModelForCausalLM.from_config(config).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
text = torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8).long()
prompts = text[: NUM_PROMPTS * 16].view(NUM_PROMPTS, 16).repeat_interleave(NUM_ANSWERS, 0)

example = {"input_ids": torch.zeros(len(prompts), 16 + LENGTH, dtype=torch.long)}
model, optimizer = ullage.prepare(model, optimizer, example, device_memory="7MB")  # leave out: all that is free
print(optimizer.plan)


def written() -> torch.Tensor:
    """Return the prompts with answers: weights come to the device once for all their tokens."""
    model.eval()
    with torch.no_grad():
        found = model.generate(prompts, min_new_tokens=LENGTH, max_new_tokens=LENGTH, do_sample=True, top_k=0)
    model.train()
    return found


for _ in range(15):
    tokens = written()
    answers = tokens[:, -LENGTH:]
    rewards = ((answers == ord(" ")) | (answers > 127)).float().mean(1).view(NUM_PROMPTS, NUM_ANSWERS)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    logits = model(input_ids=tokens).logits[:, -LENGTH - 1 : -1]
    chosen = logits.float().log_softmax(-1).gather(2, answers.unsqueeze(2)).squeeze(2)
    ratio = (chosen - chosen.detach()).exp()  # one step for each generation: the old policy is this one
    (-(ratio * advantages.view(-1, 1)).mean()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {1 - rewards.mean().item():.3f}")  # what is missing to the largest reward

ullage.save(optimizer, "tuned")
optimizer.session.close()  # the model is an ordinary one again
ours = model.eval().generate(prompts[:1], max_new_tokens=8, do_sample=False)
saved = AutoModelForCausalLM.from_pretrained("tuned").generate(prompts[:1], max_new_tokens=8, do_sample=False)
print("same tokens:", torch.equal(ours, saved))
