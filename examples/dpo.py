"""Preferences with TRL's `DPOTrainer` and an adapter of `peft`: the base without the adapter is the reference."""

from pydoc_data.topics import topics

import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, set_seed
from trl import DPOConfig, DPOTrainer

import ullage

set_seed(0)
pages = [" ".join(page.split()) for page in topics.values()]
bpe = ByteLevelBPETokenizer()
bpe.train_from_iterator(pages, vocab_size=400, special_tokens=["<pad>", "<eos>"], show_progress=False)
tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, pad_token="<pad>", eos_token="<eos>")
pairs = [{"prompt": page[:40], "chosen": " in short", "rejected": " at great length"} for page in pages[:64]]

sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
config = LlamaConfig(vocab_size=len(tokenizer), pad_token_id=0, eos_token_id=1, bos_token_id=None, **sizes)
AutoModelForCausalLM.from_config(config).save_pretrained("base")
args = DPOConfig(
    output_dir="runs",
    max_length=64,
    per_device_train_batch_size=4,
    max_steps=15,
    learning_rate=2e-2,
    logging_steps=1,
    precompute_ref_log_probs=True,  # else each step runs the base too, which leaves the plan
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
    bf16=torch.cuda.is_available(),
)
trainer = ullage.offloaded(DPOTrainer)(
    model=AutoModelForCausalLM.from_pretrained("base"),
    args=args,
    train_dataset=Dataset.from_list(pairs),
    processing_class=tokenizer,
    peft_config=LoraConfig(r=8, target_modules=["q_proj", "v_proj", "up_proj"], task_type="CAUSAL_LM"),
)
trainer.train()
trainer.save_model("adapter")
print(trainer.plan)
for entry in trainer.state.log_history:
    if "loss" in entry:
        print(f"loss {float(entry['loss']):.3f}")
trainer.close()  # the model is an ordinary one again

prompt = tokenizer("The standard type", return_tensors="pt").input_ids
ours = trainer.model.eval().generate(input_ids=prompt, max_new_tokens=8, do_sample=False)
saved = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("base"), "adapter").eval()
print("same tokens:", torch.equal(ours.cpu(), saved.generate(input_ids=prompt, max_new_tokens=8, do_sample=False)))
