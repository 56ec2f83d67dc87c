"""Fine-tune a small Llama on chats in a file, of which it learns the answers alone, and evaluate it on other chats.

TRL's `SFTTrainer` reads, masks and packs them, and counts epochs; `ullage.offloaded` trains its model under a plan.
"""

import json
from pathlib import Path

import torch
from datasets import load_dataset
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

import ullage

set_seed(0)
texts = [(f"What is {a} and {b}?", f"{a} and {b} is {a + b}.") for a in range(20) for b in range(10)]
chats = [[{"role": "user", "content": ask}, {"role": "assistant", "content": answer}] for ask, answer in texts]
Path("chat.jsonl").write_text("\n".join(json.dumps({"messages": chat}) for chat in chats))

special = ["<pad>", "<end>", "<user>", "<assistant>"]
bpe = ByteLevelBPETokenizer()
bpe.train_from_iterator(sum(texts, ()), vocab_size=300, special_tokens=special, show_progress=False)
made = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, pad_token="<pad>", eos_token="<end>")
made.chat_template = (  # what is between the marks of generation is learned
    "{% for message in messages %}<{{ message.role }}>"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<end>{% endgeneration %}"
    "{% else %}{{ message.content }}<end>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
made.save_pretrained("base")
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
config = LlamaConfig(vocab_size=len(made), pad_token_id=0, eos_token_id=1, bos_token_id=None, **sizes)
AutoModelForCausalLM.from_config(config).save_pretrained("base")

model = AutoModelForCausalLM.from_pretrained("base")  # your folder
tokenizer = AutoTokenizer.from_pretrained("base")
data = load_dataset("json", data_files="chat.jsonl", split="train").train_test_split(0.1, seed=0)
args = SFTConfig(
    output_dir="runs",
    max_length=64,
    packing=True,
    eval_packing=False,
    assistant_only_loss=True,
    per_device_train_batch_size=4,
    num_train_epochs=3,
    eval_strategy="epoch",
    learning_rate=5e-3,
    logging_steps=1,
    save_strategy="no",
    report_to=[],  # or ["tensorboard"]
    disable_tqdm=True,
    bf16=torch.cuda.is_available(),  # the default needs a GPU
)
trainer = ullage.offloaded(SFTTrainer, device_memory="3MB")(  # leave device_memory out: all that is free
    model=model, args=args, train_dataset=data["train"], eval_dataset=data["test"], processing_class=tokenizer
)
trainer.train()
trainer.save_model("tuned")
print(trainer.plan)
for entry in trainer.state.log_history:
    for name in ("loss", "eval_loss"):
        if name in entry:
            print(f"{name} {float(entry[name]):.3f}")
trainer.close()  # the model is an ordinary one again

prompt = tokenizer.apply_chat_template(
    chats[7][:1], add_generation_prompt=True, return_tensors="pt", return_dict=True
).to(model.device)
ours = model.eval().generate(**prompt, max_new_tokens=8, do_sample=False)
saved = AutoModelForCausalLM.from_pretrained("tuned").generate(**prompt.to("cpu"), max_new_tokens=8, do_sample=False)
print("same tokens:", torch.equal(ours.cpu(), saved))
