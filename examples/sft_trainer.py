"""A script for TRL's `SFTTrainer` in which two lines were changed: the import, and `ullage.offloaded`.

The tokenizer is trained here, because nothing is downloaded; yours comes from a folder.
"""

from pydoc_data.topics import topics

import torch
from datasets import Dataset
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

import ullage

set_seed(0)
pages = [page[:400] for page in topics.values()]
bpe = ByteLevelBPETokenizer()
bpe.train_from_iterator(pages, vocab_size=400, special_tokens=["<pad>", "<eos>"], show_progress=False)
tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, pad_token="<pad>", eos_token="<eos>")

sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
config = LlamaConfig(vocab_size=len(tokenizer), pad_token_id=0, eos_token_id=1, bos_token_id=None, **sizes)
model = AutoModelForCausalLM.from_config(config)
args = SFTConfig(
    output_dir="runs",
    max_length=64,
    per_device_train_batch_size=4,
    max_steps=20,
    learning_rate=3e-3,
    logging_steps=1,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
    bf16=torch.cuda.is_available(),  # the default needs a GPU
)
trainer = ullage.offloaded(SFTTrainer)(
    model=model, args=args, train_dataset=Dataset.from_dict({"text": pages}), processing_class=tokenizer
)
trainer.train()
trainer.save_model("tuned")
print(trainer.plan)
for entry in trainer.state.log_history:
    if "loss" in entry:
        print(f"loss {float(entry['loss']):.3f}")
trainer.close()  # the model is an ordinary one again

prompt = tokenizer("The standard type", return_tensors="pt").input_ids
ours = model.eval().generate(prompt, max_new_tokens=8, do_sample=False)
saved = AutoModelForCausalLM.from_pretrained("tuned").generate(prompt, max_new_tokens=8, do_sample=False)
print("same tokens:", torch.equal(ours.cpu(), saved))
