"""Models of transformers, each called as its documentation shows it, and small ones after papers."""

import torch
import torch.nn.functional as F
import transformers
from program_catalogue import Trained, registry, seeded, train
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

PROGRAMS, program = registry()
SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "use_cache": False,
}
ENCODER = {key: value for key, value in SIZES.items() if key not in {"num_key_value_heads", "use_cache"}}
IMAGES = {"image_size": 32, "patch_size": 8, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
IMAGES |= {"num_attention_heads": 4}


def tokens(step: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 128, (4, 16), generator=seeded(step))
    return {"input_ids": ids, "labels": ids}


def padded(step: int) -> dict[str, torch.Tensor]:
    found = tokens(step)
    mask = torch.ones_like(found["input_ids"])
    mask[1, 9:] = 0
    return found | {"attention_mask": mask, "labels": found["labels"].masked_fill(mask == 0, -100)}


def pixels(step: int) -> dict[str, torch.Tensor]:
    of = seeded(step)
    return {"pixel_values": torch.randn(4, 3, 32, 32, generator=of), "labels": torch.randint(2, (4,), generator=of)}


def causal(name: str, batch=padded, **changes):
    def run(ullage) -> Trained:
        return train(ullage, AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **SIZES | changes)), batch)

    run.__doc__ = f"A causal {name}, padded."
    run.__name__ = name
    return run


EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
for each in (
    causal("gpt2", n_embd=64, n_layer=3, n_head=4, n_positions=32),
    causal("llama"),
    causal("qwen3", head_dim=16),
    causal("mistral", sliding_window=8),
    causal("gemma2", head_dim=16, sliding_window=8),
    causal("gemma3_text", head_dim=16, sliding_window=8),
    causal("opt", ffn_dim=128, word_embed_proj_dim=32),
    causal("bloom", n_layer=3, n_head=4),
    causal("falcon"),
    causal("mixtral", **EXPERTS, output_router_logits=True),
    causal("qwen3_moe", head_dim=16, **EXPERTS),
    causal("gpt_oss", head_dim=16, sliding_window=8, **EXPERTS),
    causal("mamba", tokens, state_size=8, num_hidden_layers=2),
):
    program(each)


@program
def bert_for_masked_words(ullage) -> Trained:
    """BERT for masked words, with dropout."""
    return train(ullage, transformers.BertForMaskedLM(transformers.BertConfig(**ENCODER)), padded)


@program
def bert_without_its_pooler(ullage) -> Trained:
    """A model whose pooler has no part in the loss."""
    model = transformers.BertModel(transformers.BertConfig(**ENCODER))
    return train(
        ullage,
        model,
        lambda step: {"input_ids": tokens(step)["input_ids"]},
        loss=lambda out: out.last_hidden_state.square().mean(),
    )


@program
def roberta_classifies(ullage) -> Trained:
    """RoBERTa for classes."""
    model = transformers.RobertaForSequenceClassification(transformers.RobertaConfig(**ENCODER, num_labels=3))
    return train(ullage, model, lambda step: padded(step) | {"labels": torch.tensor([0, 1, 2, step % 3])})


@program
def deberta(ullage) -> Trained:
    """DeBERTa, whose layers share relative positions."""
    config = transformers.DebertaV2Config(
        **ENCODER, relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8, num_labels=3
    )
    model = transformers.DebertaV2ForSequenceClassification(config)
    return train(ullage, model, lambda step: padded(step) | {"labels": torch.tensor([0, 1, 2, step % 3])})


@program
def nystromformer(ullage) -> Trained:
    """Nystromformer, whose attention has landmarks for keys, and takes no mask of the keys themselves."""
    config = transformers.NystromformerConfig(**ENCODER, num_landmarks=4, segment_means_seq_len=16)
    inputs = lambda step: tokens(step) | {"attention_mask": torch.ones(4, 16, dtype=torch.int64)}
    return train(ullage, transformers.NystromformerForMaskedLM(config), inputs)


@program
def albert(ullage) -> Trained:
    """ALBERT: one layer for all."""
    config = transformers.AlbertConfig(**ENCODER, embedding_size=32)
    return train(ullage, transformers.AlbertForMaskedLM(config), padded)


@program
def t5(ullage) -> Trained:
    """T5, encoder and decoder."""
    sizes = {"vocab_size": 128, "d_model": 64, "d_ff": 128, "d_kv": 16, "num_layers": 2, "num_heads": 4}
    config = transformers.T5Config(**sizes, pad_token_id=0, decoder_start_token_id=0)
    return train(ullage, transformers.T5ForConditionalGeneration(config), padded)


@program
def bart(ullage) -> Trained:
    """BART, encoder and decoder."""
    both = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in (("layers", 2), ("ffn_dim", 128))}
    config = transformers.BartConfig(
        vocab_size=128, d_model=64, encoder_attention_heads=4, decoder_attention_heads=4, pad_token_id=0, **both
    )
    return train(ullage, transformers.BartForConditionalGeneration(config), padded)


@program
def vit(ullage) -> Trained:
    """ViT for classes."""
    return train(ullage, transformers.ViTForImageClassification(transformers.ViTConfig(**IMAGES)), pixels)


@program
def swin(ullage) -> Trained:
    """Swin, with stages."""
    config = transformers.SwinConfig(
        image_size=32, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4
    )
    return train(ullage, transformers.SwinForImageClassification(config), pixels)


@program
def convnext(ullage) -> Trained:
    """ConvNeXt."""
    config = transformers.ConvNextConfig(hidden_sizes=[16, 32], depths=[2, 2], num_stages=2)
    return train(ullage, transformers.ConvNextForImageClassification(config), pixels)


@program
def resnet(ullage) -> Trained:
    """ResNet, with batch norm."""
    config = transformers.ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[2, 2], layer_type="basic")
    return train(ullage, transformers.ResNetForImageClassification(config), pixels)


@program
def dinov2(ullage) -> Trained:
    """DINOv2, with layer scales and stochastic depth."""
    config = transformers.Dinov2Config(**IMAGES, mlp_ratio=2, drop_path_rate=0.1)
    return train(ullage, transformers.Dinov2ForImageClassification(config), pixels)


@program
def segformer(ullage) -> Trained:
    """SegFormer: an image of classes."""
    config = transformers.SegformerConfig(
        num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[16, 32], patch_sizes=[3, 3],
        strides=[2, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2], decoder_hidden_size=32, num_labels=4,
    )  # fmt: skip
    model = transformers.SegformerForSemanticSegmentation(config)
    labels = lambda step: torch.randint(4, (4, 32, 32), generator=seeded(step))
    sgd = torch.optim.SGD(model.parameters(), lr=1e-2)  # Adam would divide gradients that are rounding alone
    return train(ullage, model, lambda step: pixels(step) | {"labels": labels(step)}, optimizer=sgd)


@program
def clip(ullage) -> Trained:
    """CLIP, with as many texts as images."""
    config = transformers.CLIPConfig(
        text_config=ENCODER | {"max_position_embeddings": 16, "eos_token_id": 2},
        vision_config=IMAGES,
        projection_dim=32,
    )
    inputs = lambda step: {
        "input_ids": tokens(step)["input_ids"], "pixel_values": pixels(step)["pixel_values"], "return_loss": True
    }  # fmt: skip
    return train(ullage, transformers.CLIPModel(config), inputs)


@program
def clip_with_more_texts(ullage) -> Trained:
    """CLIP with other numbers of texts and images."""
    config = transformers.CLIPConfig(
        text_config=ENCODER | {"max_position_embeddings": 16, "eos_token_id": 2},
        vision_config=IMAGES,
        projection_dim=32,
    )
    inputs = lambda step: {
        "input_ids": tokens(step)["input_ids"][:3], "pixel_values": pixels(step)["pixel_values"]
    }  # fmt: skip
    loss = lambda out: out.logits_per_image.square().mean()
    return train(ullage, transformers.CLIPModel(config), inputs, loss=loss)


@program
def whisper(ullage) -> Trained:
    """Whisper: speech to text."""
    config = transformers.WhisperConfig(
        vocab_size=128, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128, num_mel_bins=16, max_source_positions=20,
        max_target_positions=32, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    model = transformers.WhisperForConditionalGeneration(config)
    sounds = lambda step: torch.randn(4, 16, 40, generator=seeded(step))
    return train(ullage, model, lambda step: {"input_features": sounds(step), "labels": tokens(step)["labels"]})


@program
def wav2vec2_ctc(ullage) -> Trained:
    """Wav2Vec2 with CTC."""
    config = transformers.Wav2Vec2Config(
        vocab_size=30, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        conv_dim=(32, 32), conv_kernel=(10, 3), conv_stride=(5, 2), num_feat_extract_layers=2,
        num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4, mask_time_prob=0.0, layerdrop=0.0,
    )  # fmt: skip

    def sounds(step: int) -> dict[str, torch.Tensor]:
        of = seeded(step)
        return {"input_values": torch.randn(4, 800, generator=of), "labels": torch.randint(1, 30, (4, 6), generator=of)}

    return train(ullage, transformers.Wav2Vec2ForCTC(config), sounds)


@program
def llava(ullage) -> Trained:
    """LLaVA: text with images in it."""
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**SIZES),
        vision_config=transformers.CLIPVisionConfig(**IMAGES),
        image_token_index=5,
        vision_feature_select_strategy="full",
    )

    def both(step: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(6, 128, (2, 24), generator=seeded(step))
        ids[:, 2 : 2 + 17] = 5
        return {"input_ids": ids, "labels": ids, "pixel_values": pixels(step)["pixel_values"][:2]}

    return train(ullage, transformers.LlavaForConditionalGeneration(config), both)


@program
def llava_with_text_alone(ullage) -> Trained:
    """LLaVA, planned for text; some batches have images."""
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**SIZES),
        vision_config=transformers.CLIPVisionConfig(**IMAGES),
        image_token_index=5,
        vision_feature_select_strategy="full",
    )

    def either(step: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(6, 128, (2, 24), generator=seeded(step))
        if step % 2 == 0:
            return {"input_ids": ids, "labels": ids}
        ids[:, 2 : 2 + 17] = 5
        return {"input_ids": ids, "labels": ids, "pixel_values": pixels(step)["pixel_values"][:2]}

    return train(ullage, transformers.LlavaForConditionalGeneration(config), either)


@program
def time_series(ullage) -> Trained:
    """PatchTST: forecasts of series."""
    config = transformers.PatchTSTConfig(
        num_input_channels=3, context_length=32, patch_length=8, patch_stride=8, prediction_length=8, d_model=32,
        num_attention_heads=4, num_hidden_layers=2, ffn_dim=64,
    )  # fmt: skip

    def series(step: int) -> dict[str, torch.Tensor]:
        of = seeded(step)
        return {"past_values": torch.randn(4, 32, 3, generator=of), "future_values": torch.randn(4, 8, 3, generator=of)}

    return train(ullage, transformers.PatchTSTForPrediction(config), series)


def boxes(step: int) -> dict[str, object]:
    of = seeded(step)
    labels = [
        {"class_labels": torch.randint(5, (n,), generator=of), "boxes": torch.rand(n, 4, generator=of) * 0.4 + 0.2}
        for n in (2, 3)
    ]
    return {"pixel_values": torch.randn(2, 3, 32, 32, generator=of), "labels": labels}


@program
def yolos(ullage) -> Trained:
    """Objects, matched to predictions by SciPy inside the loss, which checks that corners of boxes are in order."""
    config = transformers.YolosConfig(**IMAGES | {"image_size": [32, 32], "num_detection_tokens": 6, "num_labels": 5})
    return train(ullage, transformers.YolosForObjectDetection(config), boxes)


@program
def switch_transformers(ullage) -> Trained:
    """Experts that are found by names made of their numbers, behind a router that converts itself in each forward."""
    sizes = {"vocab_size": 128, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
    experts = {"num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
    config = transformers.SwitchTransformersConfig(**sizes, **experts, decoder_start_token_id=0)
    return train(ullage, transformers.SwitchTransformersForConditionalGeneration(config), padded)


@program
def jamba(ullage) -> Trained:
    """Attention beside a state-space mixer whose cache holds dictionaries, as it is made by default."""
    sizes = {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1, "mamba_d_state": 4, "mamba_dt_rank": 4}
    config = transformers.JambaConfig(**SIZES | {"num_hidden_layers": 2, "use_cache": True, **sizes})
    return train(ullage, transformers.JambaForCausalLM(config), padded)


@program
def llama_that_checkpoints(ullage) -> Trained:
    """A Llama whose own gradient checkpointing is on."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES))
    model.gradient_checkpointing_enable()
    return train(ullage, model, padded)


@program
def xlnet(ullage) -> Trained:
    """XLNet, which calls one dropout at both ends, and has a parameter that nothing uses."""
    sizes = {"vocab_size": 128, "d_model": 64, "n_layer": 2, "n_head": 4, "d_inner": 128}
    return train(ullage, transformers.XLNetLMHeadModel(transformers.XLNetConfig(**sizes)), tokens)


@program
def zamba2(ullage) -> Trained:
    """Blocks that share attention, which is audited by itself inside a block that is recomputed."""
    sizes = {"num_hidden_layers": 4, "hybrid_layer_ids": [1, 3], "layers_block_type": ["mamba", "hybrid"] * 2}
    mixers = {"mamba_d_state": 8, "mamba_ngroups": 1, "n_mamba_heads": 8, "mamba_headdim": 16, "chunk_size": 8}
    config = transformers.Zamba2Config(**ENCODER | sizes | mixers, num_mem_blocks=1, adapter_rank=4, use_cache=False)
    return train(ullage, transformers.Zamba2ForCausalLM(config), tokens)


class Ahead(nn.Module):
    """Reads one embedding for several heads, and two parameters of its own far apart."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(50, 64), nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.ahead, self.head = nn.ModuleList(nn.Linear(128, 64) for _ in range(2)), nn.Linear(64, 50, bias=False)
        self.head.weight = self.embed.weight
        self.start, self.scale = nn.Parameter(torch.zeros(64)), nn.Parameter(torch.ones(64))

    def forward(self, ids):
        x = self.embed(ids) + self.start
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        loss = F.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        for skipped, project in enumerate(self.ahead, start=1):
            x = project(torch.cat([x[:, :-1] * self.scale, self.embed(ids[:, skipped:])], dim=-1))
            loss = loss + 0.3 * F.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), ids[:, skipped + 1 :].flatten())
        return loss


@program
def tokens_ahead(ullage) -> Trained:
    """Several tokens are predicted by one tied head, as DeepSeek-V3 does."""
    return train(ullage, Ahead(), lambda step: (torch.randint(50, (4, 12), generator=seeded(step)),))


@program
def latents_and_queries(ullage) -> Trained:
    """Perceiver: two parameters of the model, which attention reads at the begin and at the end."""

    class Perceiver(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.latents, self.query = nn.Parameter(torch.randn(6, 64) * 0.1), nn.Parameter(torch.randn(1, 64))
            self.read, self.answer = (nn.MultiheadAttention(64, 4, batch_first=True) for _ in range(2))
            self.inner, self.last = nn.Linear(64, 64), nn.Linear(64, 8)

        def forward(self, x):
            x = self.inner(x)
            x = self.read(self.latents.expand(len(x), -1, -1), x, x)[0]
            return self.last(self.answer(self.query.expand(len(x), -1, -1), x, x)[0])

    return train(ullage, Perceiver(), lambda step: (torch.randn(4, 7, 64, generator=seeded(step)),))


@program
def tables_before_blocks(ullage) -> Trained:
    """A table of the model is read before its first block, and a parameter of its own behind the last."""

    class Tabled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables, self.scale = nn.ParameterDict({"places": torch.zeros(64)}), nn.Parameter(torch.ones(64))
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(2))
            self.last = nn.Linear(64, 8)

        def forward(self, x):
            x = x + self.tables["places"]
            for block in self.blocks:
                x = block(x)
            return self.last(x * self.scale)

    return train(ullage, Tabled(), lambda step: (torch.randn(8, 64, generator=seeded(step)),))


@program
def cache_of_states(ullage) -> Trained:
    """Zamba2 with a cache, in which layers have states, and some keys and values too."""
    config = transformers.Zamba2Config(
        vocab_size=128, hidden_size=64, num_hidden_layers=4, layers_block_type=["mamba", "hybrid"] * 2,
        num_attention_heads=4, num_key_value_heads=4, intermediate_size=128, mamba_d_state=8, n_mamba_heads=2,
        mamba_ngroups=1, chunk_size=8, num_mem_blocks=1, adapter_rank=4, use_shared_attention_adapter=True,
    )  # fmt: skip
    return train(ullage, transformers.Zamba2ForCausalLM(config), tokens, num_steps=3)


@program
def reformer(ullage) -> Trained:
    """Reformer, whose reversible layers run again in a backward of their own."""
    config = transformers.ReformerConfig(
        vocab_size=128, hidden_size=32, num_attention_heads=2, attention_head_size=16, feed_forward_size=64,
        axial_pos_shape=[4, 4], axial_pos_embds_dim=[16, 16], max_position_embeddings=16, attn_layers=["local", "lsh"],
        local_attn_chunk_length=4, lsh_attn_chunk_length=4, num_hashes=1, num_buckets=2, is_decoder=True, hash_seed=0,
        hidden_dropout_prob=0.0, lsh_attention_probs_dropout_prob=0.0, local_attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return train(ullage, transformers.ReformerModelWithLMHead(config), tokens, num_steps=3)
