"""Adapters of peft on small models of transformers."""

import peft
import torch
import transformers
from program_catalogue import Trained, registry, seeded, train

PROGRAMS, program = registry()
SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def base(**changes) -> torch.nn.Module:
    config = transformers.LlamaConfig(**SIZES, use_cache=False, tie_word_embeddings=False, **changes)
    return transformers.AutoModelForCausalLM.from_config(config)


def tokens(step: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(128, (4, 16), generator=seeded(step))
    return {"input_ids": ids, "labels": ids}


def adapted(ullage, config, **changes) -> Trained:
    return train(ullage, peft.get_peft_model(base(**changes), config), tokens)


@program
def lora(ullage) -> Trained:
    """LoRA on projections, with dropout."""
    return adapted(ullage, peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "up_proj"]))


@program
def lora_on_all_linear(ullage) -> Trained:
    """LoRA on all linear layers, with rank-stabilised scales."""
    return adapted(ullage, peft.LoraConfig(r=4, use_rslora=True, target_modules="all-linear"))


@program
def dora(ullage) -> Trained:
    """DoRA."""
    return adapted(ullage, peft.LoraConfig(r=4, use_dora=True, target_modules=["q_proj", "down_proj"]))


@program
def lora_with_trained_head(ullage) -> Trained:
    """LoRA with modules_to_save."""
    return adapted(ullage, peft.LoraConfig(r=4, target_modules=["v_proj"], modules_to_save=["lm_head"]))


@program
def lora_on_parameters(ullage) -> Trained:
    """LoRA on parameters (target_parameters)."""
    return adapted(ullage, peft.LoraConfig(r=4, target_modules=[], target_parameters=["q_proj.weight"]))


@program
def lora_on_embeddings(ullage) -> Trained:
    """LoRA on embeddings."""
    return adapted(ullage, peft.LoraConfig(r=4, target_modules=["embed_tokens", "q_proj"]))


@program
def trained_tokens(ullage) -> Trained:
    """LoRA with some rows of the embedding trained (trainable_token_indices)."""
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], trainable_token_indices={"embed_tokens": [3, 5]})
    return adapted(ullage, config)


@program
def loha(ullage) -> Trained:
    """LoHa."""
    return adapted(ullage, peft.LoHaConfig(r=4, target_modules=["q_proj"]))


@program
def lokr(ullage) -> Trained:
    """LoKr."""
    return adapted(ullage, peft.LoKrConfig(r=4, target_modules=["q_proj"]))


@program
def ia3(ullage) -> Trained:
    """(IA)^3."""
    config = peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])
    return adapted(ullage, config)


@program
def oft(ullage) -> Trained:
    """OFT, which makes orthogonal matrices in forward."""
    return adapted(ullage, peft.OFTConfig(r=0, oft_block_size=8, target_modules=["q_proj"]))


@program
def vera(ullage) -> Trained:
    """VeRA: all layers share frozen random matrices."""
    return adapted(ullage, peft.VeraConfig(r=8, target_modules=["q_proj"]))


@program
def prompt_tuning(ullage) -> Trained:
    """Prompt tuning."""
    return adapted(ullage, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))


@program
def prefix_tuning(ullage) -> Trained:
    """Prefix tuning."""
    return adapted(ullage, peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))


@program
def p_tuning(ullage) -> Trained:
    """P-tuning with an encoder."""
    return adapted(
        ullage, peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=4, encoder_hidden_size=32)
    )


@program
def layer_norm_tuning(ullage) -> Trained:
    """Only norms are trained."""
    return adapted(ullage, peft.LNTuningConfig(task_type="CAUSAL_LM", target_modules=["input_layernorm"]))


@program
def two_adapters_in_turn(ullage) -> Trained:
    """Two adapters in one model, of which one trains."""
    config = peft.LoraConfig(r=4, target_modules=["q_proj"])
    model = peft.get_peft_model(base(), config)
    model.add_adapter("other", config)
    model.set_adapter("default")
    return train(ullage, model, tokens)


@program
def adalora(ullage) -> Trained:
    """AdaLoRA: ranks are allocated by gradients, after the step."""
    config = peft.AdaLoraConfig(
        target_modules=["q_proj", "v_proj"], init_r=6, target_r=3, tinit=1, tfinal=1, total_step=6
    )
    model = peft.get_peft_model(base(), config)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2, eps=1e-4)
    model, optimizer = ullage.prepare(model, optimizer, tokens(0))
    losses = []
    for step in range(6):
        loss = model(**tokens(step)).loss
        loss.backward()
        optimizer.step()
        model.base_model.update_and_allocate(step)
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


@program
def shira(ullage) -> Trained:
    """SHiRA: some values of each weight are trained, as a sparse tensor."""
    return adapted(ullage, peft.ShiraConfig(r=4, target_modules=["q_proj"], random_seed=3))


@program
def context_prompt_tuning(ullage) -> Trained:
    """CPT: forward projects what it trains, and gives it to the parameter as other data."""
    config = peft.CPTConfig(
        task_type="CAUSAL_LM",
        cpt_token_ids=[1, 5, 6, 7],
        cpt_mask=[1, 1, 1, 1],
        cpt_tokens_type_mask=[1, 2, 3, 4],
        opt_projection_epsilon=0.2,
        opt_projection_format_epsilon=0.1,
    )

    def batch(step: int) -> dict[str, torch.Tensor]:
        given = tokens(step)
        ones = torch.ones_like(given["input_ids"])
        return given | {"attention_mask": ones, "input_type_mask": 4 * ones}

    return train(ullage, peft.get_peft_model(base(), config), batch)
