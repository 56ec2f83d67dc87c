"""Fine-tune a small Llama on chats in a file, of which it learns the answers alone, and evaluate it on other chats.

With a plan, the command does the same: `ullage execute plan.json --weights base --data chat.jsonl --pack --epochs 6`.
"""

import json
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast

import ullage

torch.manual_seed(0)
texts = [(f"What is {a} and {b}?", f"{a} and {b} is {a + b}.") for a in range(20) for b in range(10)]
chats = [[{"role": "user", "content": ask}, {"role": "assistant", "content": answer}] for ask, answer in texts]
Path("chat.jsonl").write_text("\n".join(json.dumps({"messages": chat}) for chat in chats))

special = ["<pad>", "<end>", "<user>", "<assistant>"]
bpe = ByteLevelBPETokenizer()
bpe.train_from_iterator(sum(texts, ()), vocab_size=300, special_tokens=special, show_progress=False)
made = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, pad_token="<pad>", eos_token="<end>")
made.chat_template = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
made.save_pretrained("base")
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
config = LlamaConfig(vocab_size=len(made), pad_token_id=0, eos_token_id=1, bos_token_id=None, **sizes)
AutoModelForCausalLM.from_config(config).save_pretrained("base")

model = AutoModelForCausalLM.from_pretrained("base").train()  # your folder
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
data = ullage.Data("chat.jsonl", "base", seq_len=64, micro_batch=4, pack=True, eval_split=0.1)
model, optimizer = ullage.prepare(model, optimizer, data.example(), device_memory="3MB")  # leave out: all that is free
print(optimizer.plan)
print(data)

for batches in data.steps(epochs=3):
    for batch in batches:
        loss = batch.loss(model)
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    print(f"loss {loss.item():.3f}")
print(f"evaluation loss {data.evaluate(model):.3f}")

ullage.save(optimizer, "tuned")
optimizer.session.close()  # the model is an ordinary one again

prompt = AutoTokenizer.from_pretrained("base").apply_chat_template(
    chats[7][:1], add_generation_prompt=True, return_tensors="pt", return_dict=True
)
ours = model.eval().generate(**prompt, max_new_tokens=8, do_sample=False)
saved = AutoModelForCausalLM.from_pretrained("tuned").generate(**prompt, max_new_tokens=8, do_sample=False)
print("same tokens:", torch.equal(ours, saved))
