"""Adapters of ``peft`` and parts of a model, planned as they are from one batch: the bits of training in memory."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import (
    BOFTConfig,
    C3AConfig,
    FourierFTConfig,
    IA3Config,
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    OFTConfig,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    TrainableTokensConfig,
    VBLoRAConfig,
    WaveFTConfig,
    get_peft_model,
)
from training import ReferenceOptimizer
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PretrainedConfig

import ullage
from hwprofiles.machine import this_machine
from hwprofiles.registry import load_profile, local_profile_path, save_profile

TOKENS = {"vocab_size": 256, "use_cache": False, "bos_token_id": 0, "eos_token_id": 0}
LLAMA = LlamaConfig(
    **TOKENS,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
)
GPT2 = GPT2Config(**TOKENS, n_embd=64, n_layer=3, n_head=4, n_positions=64)
TEXT = {"task_type": "CAUSAL_LM"}
ADAPTERS = {
    "dora": LoraConfig(**TEXT, r=4, target_modules=["q_proj", "down_proj"], use_dora=True),
    "lora with a head": LoraConfig(**TEXT, r=4, target_modules=["q_proj"], modules_to_save=["lm_head"]),
    "lora of an embedding": LoraConfig(**TEXT, r=4, target_modules=["embed_tokens", "q_proj"]),
    "lora with dropout": LoraConfig(**TEXT, r=4, target_modules="all-linear", lora_dropout=0.1),
    "ia3": IA3Config(**TEXT, target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "loha": LoHaConfig(target_modules=["q_proj"], r=4),
    "lokr": LoKrConfig(target_modules=["q_proj"], r=4),
    "lokr without some": LoKrConfig(target_modules=["q_proj"], r=4, module_dropout=0.3),
    "vb-lora": VBLoRAConfig(target_modules=["q_proj"], num_vectors=8, vector_length=4),
    "fourierft": FourierFTConfig(target_modules=["q_proj"], n_frequency=8),
    "c3a": C3AConfig(target_modules=["q_proj"], block_size=8),
    "waveft": WaveFTConfig(target_modules=["q_proj"], n_frequency=8),
    "oft": OFTConfig(target_modules=["q_proj"], oft_block_size=8),
    "boft": BOFTConfig(target_modules=["q_proj"], boft_block_size=4),
    "p-tuning": PromptEncoderConfig(**TEXT, num_virtual_tokens=4, encoder_hidden_size=16),
    "p-tuning with an LSTM": PromptEncoderConfig(
        **TEXT, num_virtual_tokens=4, encoder_hidden_size=16, encoder_reparameterization_type="LSTM"
    ),
    "prefix": PrefixTuningConfig(**TEXT, num_virtual_tokens=4),  # in a cache, as keys and values
    "prompt": PromptTuningConfig(**TEXT, num_virtual_tokens=4),
    "tokens": TrainableTokensConfig(**TEXT, token_indices=[1, 2, 200], target_modules=["embed_tokens"]),
}
PARTS: dict[str, tuple[PretrainedConfig, Callable[[str], bool]]] = {
    "last layer": (LLAMA, lambda name: "layers.2." in name),
    "norms": (LLAMA, lambda name: "norm" in name),
    "biases": (GPT2, lambda name: name.endswith("bias")),
    "a tied embedding": (GPT2, lambda name: "wte" in name),
}


def make(kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    config, is_trained = PARTS.get(kind, (LLAMA, None))
    model = AutoModelForCausalLM.from_config(config)
    if is_trained is None:
        model = get_peft_model(model, ADAPTERS[kind])
    for name, parameter in model.named_parameters():
        if is_trained is not None:
            parameter.requires_grad_(is_trained(name))
        elif parameter.requires_grad:  # many adapters change nothing at first
            torch.nn.init.normal_(parameter, std=0.1)
    return model.train()


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    torch.manual_seed(1)
    seen = []
    for _ in range(3):
        tokens = torch.randint(256, (2, 16))
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        seen += [loss.item(), float(optimizer.clip_grad_norm_(0.5))]
        optimizer.step()
        optimizer.zero_grad()
    return seen


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


@pytest.mark.part(10)
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # in transformers, by peft
@pytest.mark.parametrize("kind", [*ADAPTERS, *PARTS])
def test_what_trains_is_planned_and_trained_as_in_memory(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ULLAGE_HOME", str(tmp_path))
    profile = load_profile("epyc-turin-2c").model_copy(update={"name": "mine", "measured_on": this_machine()})
    save_profile(profile, local_profile_path())
    plain = make(kind)
    expected = train(plain, ReferenceOptimizer(adam(plain)))
    model, tokens = make(kind), torch.zeros(2, 16, dtype=torch.long)
    batch = {"input_ids": tokens, "labels": tokens}
    model, optimizer = ullage.prepare(model, adam(model), batch, device_memory=750_000)
    with optimizer.session as session:
        chosen = optimizer.plan.decisions.units.values()
        assert any(unit.params == "host" or unit.activations != "keep" for unit in chosen)
        assert optimizer.plan.model.num_trained == sum(p.numel() for p in plain.parameters() if p.requires_grad)
        assert train(model, optimizer) == expected
        final = session.full_parameters()
        different = [name for name, weight in plain.named_parameters() if not torch.equal(final[name], weight)]
    assert not different
