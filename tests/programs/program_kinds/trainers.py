"""Trainers of transformers, TRL and sentence-transformers, and a loop with accelerate."""

import tempfile

import accelerate
import peft
import sentence_transformers as st
import torch
import transformers
import trl
from datasets import Dataset
from program_catalogue import PLACE, Trained, registry
from sentence_transformers import losses
from sentence_transformers.cross_encoder import losses as cross_losses
from sentence_transformers.models import Pooling, Transformer
from tokenizers import Tokenizer, models, pre_tokenizers
from trl.experimental import cpo, online_dpo, orpo

PROGRAMS, program = registry()
LLAMA = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    words = Tokenizer(
        models.WordLevel({"<end>": 0} | {c: i for i, c in enumerate("0123456789abcdefghij ", 1)}, "<end>")
    )
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", pad_token="<end>")


def llama(kind=transformers.AutoModelForCausalLM, **changes):
    torch.manual_seed(0)
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    return kind.from_config(transformers.Qwen2Config(**LLAMA, **ids, **changes))


def settings(kind, **changes):
    return kind(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=4,
        max_steps=3,
        learning_rate=1e-2,
        adam_epsilon=1e-4,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=PLACE.device == "cpu",
        bf16=False,
        seed=1,
        **changes,
    )


def run(trainer) -> Trained:
    """Train; return what was logged, and the weights."""
    trainer.train()
    seen = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    weights = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
    if hasattr(trainer, "close"):
        trainer.close()
    return seen, weights


def pairs() -> Dataset:
    return Dataset.from_list([{"prompt": f"{i} ", "chosen": f"{i}ab", "rejected": f"{i}cdef"} for i in range(24)])


LORA = {"r": 4, "target_modules": ["q_proj", "up_proj"], "task_type": "CAUSAL_LM"}


@program
def trainer(ullage) -> Trained:
    """transformers.Trainer with accumulation and a schedule."""
    ids = torch.randint(64, (24, 12), generator=torch.Generator().manual_seed(0))
    rows = Dataset.from_list([{"input_ids": row.tolist(), "labels": row.tolist()} for row in ids])
    args = settings(transformers.TrainingArguments, gradient_accumulation_steps=2, lr_scheduler_type="cosine")
    return run(ullage.offloaded(transformers.Trainer)(model=llama(), args=args, train_dataset=rows))


@program
def supervised(ullage) -> Trained:
    """TRL's SFTTrainer."""
    rows = Dataset.from_list([{"text": f"{i} abc {i * 7}"} for i in range(24)])
    args = settings(trl.SFTConfig, max_length=32)
    return run(
        ullage.offloaded(trl.SFTTrainer)(model=llama(), args=args, train_dataset=rows, processing_class=tokenizer())
    )


@program
def preferences(ullage) -> Trained:
    """DPO with LoRA: the reference is the model without its adapters."""
    args = settings(trl.DPOConfig, max_length=32)
    return run(
        ullage.offloaded(trl.DPOTrainer)(
            model=llama(), args=args, train_dataset=pairs(), processing_class=tokenizer(),
            peft_config=peft.LoraConfig(**LORA),
        )
    )  # fmt: skip


@program
def preferences_with_a_reference(ullage) -> Trained:
    """DPO with a reference model of its own."""
    args = settings(trl.DPOConfig, max_length=32)
    return run(
        ullage.offloaded(trl.DPOTrainer)(
            model=llama(), ref_model=llama(), args=args, train_dataset=pairs(), processing_class=tokenizer()
        )
    )


@program
def single_preferences(ullage) -> Trained:
    """KTO with LoRA."""
    rows = [
        {"prompt": f"{i} ", "completion": f"{i}{'ab' if i % 2 else 'cdef'}", "label": i % 2 == 1} for i in range(24)
    ]
    args = settings(trl.KTOConfig, max_length=32)
    return run(
        ullage.offloaded(trl.KTOTrainer)(
            model=llama(), args=args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer(),
            peft_config=peft.LoraConfig(**LORA),
        )
    )  # fmt: skip


@program
def odds_ratios(ullage) -> Trained:
    """ORPO."""
    args = settings(orpo.ORPOConfig, max_length=32)
    trainer_class = ullage.offloaded(orpo.ORPOTrainer)
    return run(trainer_class(model=llama(), args=args, train_dataset=pairs(), processing_class=tokenizer()))


@program
def contrastive_preferences(ullage) -> Trained:
    """CPO."""
    args = settings(cpo.CPOConfig, max_length=32)
    trainer_class = ullage.offloaded(cpo.CPOTrainer)
    return run(trainer_class(model=llama(), args=args, train_dataset=pairs(), processing_class=tokenizer()))


@program
def rewards(ullage) -> Trained:
    """TRL's RewardTrainer."""
    model = llama(transformers.AutoModelForSequenceClassification, num_labels=1)
    args = settings(trl.RewardConfig, max_length=32)
    return run(
        ullage.offloaded(trl.RewardTrainer)(model=model, args=args, train_dataset=pairs(), processing_class=tokenizer())
    )


def policy(ullage, trainer_class, config) -> Trained:
    rows = Dataset.from_list([{"prompt": f"{i} a"} for i in range(24)])
    args = settings(config, num_generations=2, max_completion_length=6, beta=0.0)
    return run(
        ullage.offloaded(trainer_class)(
            model=llama(), args=args, train_dataset=rows, processing_class=tokenizer(),
            reward_funcs=lambda completions, **_: [float(len(set(text))) for text in completions],
        )
    )  # fmt: skip


@program
def group_relative_policy(ullage) -> Trained:
    """GRPO, which generates between steps."""
    return policy(ullage, trl.GRPOTrainer, trl.GRPOConfig)


@program
def leave_one_out(ullage) -> Trained:
    """RLOO."""
    return policy(ullage, trl.RLOOTrainer, trl.RLOOConfig)


@program
def online_preferences(ullage) -> Trained:
    """Online DPO: a training_step of its own makes the batch from prompts, and no compute_loss is called."""
    rows = Dataset.from_list([{"prompt": f"{i} a"} for i in range(24)])
    args = settings(online_dpo.OnlineDPOConfig, max_new_tokens=6)
    return run(
        ullage.offloaded(online_dpo.OnlineDPOTrainer)(
            model=llama(), ref_model=llama(), args=args, train_dataset=rows, processing_class=tokenizer(),
            reward_funcs=lambda completions, **_: [float(len(set(str(text)))) for text in completions],
        )
    )  # fmt: skip


def bert(kind=transformers.BertModel, **changes) -> str:
    torch.manual_seed(0)
    folder = tempfile.mkdtemp()
    words = Tokenizer(
        models.WordLevel({"[PAD]": 0, "[UNK]": 1} | {c: i + 2 for i, c in enumerate("abcdefgh ")}, "[UNK]")
    )
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(
        folder
    )
    sizes = {"vocab_size": 16, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    kind(transformers.BertConfig(**sizes, num_attention_heads=4, **changes)).save_pretrained(folder)
    return folder


@program
def sentence_embeddings(ullage) -> Trained:
    """SentenceTransformerTrainer with in-batch negatives."""
    model = st.SentenceTransformer(modules=[Transformer(bert()), Pooling(64)], device=PLACE.device)
    rows = Dataset.from_list([{"anchor": "abc"[: 1 + i % 3], "positive": "abd"[i % 2 :]} for i in range(24)])
    args = settings(st.SentenceTransformerTrainingArguments)
    return run(
        ullage.offloaded(st.SentenceTransformerTrainer)(
            model=model, args=args, train_dataset=rows, loss=losses.MultipleNegativesRankingLoss(model)
        )
    )


@program
def loss_with_parameters(ullage) -> Trained:
    """SentenceTransformerTrainer with a classifier in the loss."""
    model = st.SentenceTransformer(modules=[Transformer(bert()), Pooling(64)], device=PLACE.device)
    rows = [{"one": "abc"[: 1 + i % 3], "other": "abd"[i % 2 :], "label": i % 3} for i in range(24)]
    torch.manual_seed(4)
    loss = losses.SoftmaxLoss(model, 64, 3)
    args = settings(st.SentenceTransformerTrainingArguments)
    trainer = ullage.offloaded(st.SentenceTransformerTrainer)
    return run(trainer(model=model, args=args, train_dataset=Dataset.from_list(rows), loss=loss))


@program
def adafactor(ullage) -> Trained:
    """Trainer with Adafactor and a linear schedule."""
    rows = [{"input_ids": [1 + (i + j) % 20 for j in range(8)]} for i in range(24)]
    rows = Dataset.from_list([row | {"labels": row["input_ids"]} for row in rows])
    args = settings(transformers.TrainingArguments, optim="adafactor")
    return run(ullage.offloaded(transformers.Trainer)(model=llama(), args=args, train_dataset=rows))


@program
def triplets(ullage) -> Trained:
    """SentenceTransformerTrainer with a triplet loss: three encodings a step."""
    model = st.SentenceTransformer(modules=[Transformer(bert()), Pooling(64)], device=PLACE.device)
    rows = [{"anchor": "abc", "positive": "abd"[i % 2 :], "negative": "efg"[: 1 + i % 3]} for i in range(24)]
    args = settings(st.SentenceTransformerTrainingArguments)
    return run(
        ullage.offloaded(st.SentenceTransformerTrainer)(
            model=model, args=args, train_dataset=Dataset.from_list(rows), loss=losses.TripletLoss(model)
        )
    )


@program
def cross_encoder(ullage) -> Trained:
    """CrossEncoderTrainer."""
    model = st.CrossEncoder(
        bert(transformers.BertForSequenceClassification, num_labels=1), num_labels=1, device=PLACE.device
    )
    rows = Dataset.from_list([{"a": "abc", "b": "abd"[i % 2 :], "label": float(i % 2)} for i in range(24)])
    args = settings(st.CrossEncoderTrainingArguments)
    loss = cross_losses.BinaryCrossEntropyLoss(model)
    return run(ullage.offloaded(st.CrossEncoderTrainer)(model=model, args=args, train_dataset=rows, loss=loss))


@program
def cross_encoder_with_cached_gradients(ullage) -> Trained:
    """CrossEncoderTrainer whose loss calls the model again inside of backward; it takes and returns a BatchEncoding."""
    model = st.CrossEncoder(
        bert(transformers.BertForSequenceClassification, num_labels=1), num_labels=1, device=PLACE.device
    )
    rows = Dataset.from_list([{"anchor": "abc"[: 1 + i % 3], "positive": "abd"[i % 2 :]} for i in range(24)])
    args = settings(st.CrossEncoderTrainingArguments)
    loss = cross_losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=2)
    return run(ullage.offloaded(st.CrossEncoderTrainer)(model=model, args=args, train_dataset=rows, loss=loss))


@program
def accelerated(ullage) -> Trained:
    """A loop with accelerate."""
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    ids = torch.randint(64, (12, 12), generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.DataLoader(ids, batch_size=4)
    model, optimizer = ullage.prepare(model, optimizer, {"input_ids": ids[:4], "labels": ids[:4]})
    accelerator = accelerate.Accelerator(cpu=PLACE.device == "cpu")
    prepared, stepping, data = accelerator.prepare(model, optimizer, data)
    seen = []
    for batch in data:
        loss = prepared(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
        stepping.step()
        stepping.zero_grad()
        seen.append(loss.item())
    return seen, model


@program
def resumed_by_accelerate(ullage) -> Trained:
    """accelerate's save_state after two steps, and load_state after two more."""
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    ids = torch.randint(64, (16, 12), generator=torch.Generator().manual_seed(0))
    model, optimizer = ullage.prepare(model, optimizer, {"input_ids": ids[:4], "labels": ids[:4]})
    accelerator = accelerate.Accelerator(cpu=PLACE.device == "cpu")
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    prepared, stepping, schedule = accelerator.prepare(model, optimizer, schedule)
    seen, folder = [], tempfile.mkdtemp()
    for step in (0, 1, 2, 3, 2, 3):
        if step == 2:
            accelerator.load_state(folder) if len(seen) > 2 else accelerator.save_state(folder)
        batch = ids[4 * step : 4 * step + 4].to(accelerator.device)
        loss = prepared(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        stepping.step()
        schedule.step()
        stepping.zero_grad()
        seen.append(loss.item())
    return seen, model
