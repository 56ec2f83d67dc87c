"""Architectures of ``transformers`` at tiny sizes: what their ``config.json`` would hold."""

from typing import Any, Final

_SPECIAL = {"vocab_size": 60, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_LAYERS = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
_ENCODER = _SPECIAL | _LAYERS | {"max_position_embeddings": 40}
_DECODER = _ENCODER | {"num_key_value_heads": 2, "head_dim": 8}
_SLIDING = _DECODER | {"sliding_window": 8}
_EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4}
_MOE = _DECODER | _EXPERTS | {"moe_intermediate_size": 16, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
_LATENT = {"kv_lora_rank": 8, "q_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
_DEEPSEEK = _MOE | _LATENT | {"num_key_value_heads": 4, "head_dim": 4}
_LINEAR = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
_BOTH_SIDES = _SPECIAL | {
    "d_model": 32,
    **{f"{side}_layers": 2 for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": 64 for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": 4 for side in ("encoder", "decoder")},
    "max_position_embeddings": 40,
    "decoder_start_token_id": 1,
}
_T5 = _SPECIAL | {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 3, "num_heads": 4, "decoder_start_token_id": 0}
_GPT = _SPECIAL | {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 40, "n_inner": 64}
_STATES = _SPECIAL | {"hidden_size": 32, "num_hidden_layers": 3, "state_size": 8, "n_groups": 1}
_IMAGES = _LAYERS | {"image_size": 16, "patch_size": 4, "num_labels": 8}
_TURNING = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
_SPECIAL_TOKENS = {"image_token_id": 9, "video_token_id": 10, "vision_start_token_id": 11, "vision_end_token_id": 12}
_VISION = {"hidden_size": 32, "depth": 3, "num_heads": 4, "intermediate_size": 64, "patch_size": 4}


def _seeing(text: dict[str, Any], vision: str, **more: object) -> dict[str, Any]:
    return {"text_config": text, "vision_config": _IMAGES | {"model_type": vision}, "image_token_index": 9, **more}


def _named(sizes: dict[str, Any], model_type: str) -> dict[str, Any]:
    return sizes | {"model_type": model_type}


TINY: Final[dict[str, dict[str, Any]]] = {
    # decoders
    "gemma": _DECODER,
    "gemma2": _SLIDING,
    "gemma3_text": _SLIDING,
    "phi": _DECODER,
    "phi3": _DECODER,
    "gpt_neox": _ENCODER,
    "olmo": _DECODER,
    "olmo2": _DECODER,
    "olmo3": _SLIDING,
    "falcon": _SPECIAL | _LAYERS | {"num_kv_heads": 2},
    "glm": _DECODER,
    "glm4": _DECODER,
    "granite": _DECODER,
    "cohere": _DECODER,
    "cohere2": _SLIDING,
    "starcoder2": _DECODER,
    "stablelm": _DECODER,
    "smollm3": _DECODER,
    "nemotron": _DECODER,
    "ernie4_5": _DECODER,
    "exaone4": _SLIDING,
    "seed_oss": _DECODER,
    "arcee": _DECODER,
    "apertus": _DECODER,
    "helium": _DECODER,
    "bloom": _SPECIAL | {"hidden_size": 32, "n_layer": 3, "n_head": 4},
    "gpt_neo": _SPECIAL
    | {
        "hidden_size": 32,
        "max_position_embeddings": 40,
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
    },
    "gptj": _GPT | {"rotary_dim": 4},
    "gpt_bigcode": _GPT,
    "codegen": _GPT | {"rotary_dim": 4},
    "persimmon": _DECODER,
    "lfm2": _DECODER | {"layer_types": ["conv", "full_attention", "conv"], "block_ff_dim": 64},
    "modernbert-decoder": _ENCODER,
    # experts
    "deepseek_v2": _DEEPSEEK | {"topk_method": "greedy"},
    "deepseek_v3": _DEEPSEEK,
    "glm4_moe": _MOE,
    "gpt_oss": _MOE,
    "llama4_text": _MOE | {"intermediate_size_mlp": 64},
    "qwen2_moe": _MOE | {"shared_expert_intermediate_size": 16},
    "qwen3_next": _MOE | _LINEAR,
    "olmoe": _MOE,
    "phimoe": _MOE,
    "granitemoe": _MOE,
    "jetmoe": _MOE | {"kv_channels": 8},
    "dots1": _MOE | {"n_shared_experts": 1},
    "ernie4_5_moe": _MOE | {"moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 1},
    # states
    "mamba": _STATES,
    "mamba2": _STATES | {"num_heads": 8, "head_dim": 8},
    "falcon_h1": _DECODER | {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_ssm": 64, "mamba_d_state": 8},
    "bamba": _DECODER | {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "attn_layer_indices": [1]},
    "jamba": _DECODER | {"num_experts": 4, "mamba_d_state": 8, "mamba_dt_rank": 4, "use_mamba_kernels": False},
    # encoders
    "bert": _ENCODER,
    "roberta": _ENCODER,
    "electra": _ENCODER | {"embedding_size": 32},
    "albert": _ENCODER | {"embedding_size": 16},
    "distilbert": _SPECIAL | {"dim": 32, "hidden_dim": 64, "n_layers": 3, "n_heads": 4, "max_position_embeddings": 40},
    "deberta-v2": _ENCODER | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8},
    "mpnet": _ENCODER,
    "modernbert": _ENCODER,
    "bert, answers": _ENCODER | {"architectures": ["BertForQuestionAnswering"]},
    "bert, classes of tokens": _ENCODER | {"architectures": ["BertForTokenClassification"], "num_labels": 8},
    "gemma2, classes": _SLIDING | {"architectures": ["Gemma2ForSequenceClassification"], "num_labels": 8},
    # from one sequence to another
    "t5": _T5,
    "mt5": _T5,
    "bart": _BOTH_SIDES,
    "pegasus": _BOTH_SIDES,
    "m2m_100": _BOTH_SIDES | {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0},  # which layers run is no chance
    # sound
    "whisper": _BOTH_SIDES | {"num_mel_bins": 8, "max_source_positions": 16},
    "speech_to_text": _BOTH_SIDES | {"input_feat_per_channel": 8, "max_source_positions": 32, "conv_channels": 16},
    "audio-spectrogram-transformer": _LAYERS
    | {"num_labels": 8, "num_mel_bins": 16, "max_length": 32, "patch_size": 4, "frequency_stride": 4, "time_stride": 4},
    "wav2vec2, classes": _ENCODER
    | {
        "architectures": ["Wav2Vec2ForSequenceClassification"],
        "num_labels": 8,
        "conv_dim": [16, 16],
        "conv_stride": [20, 20],
        "conv_kernel": [20, 20],
        "num_conv_pos_embeddings": 8,
        "num_conv_pos_embedding_groups": 4,
        "apply_spec_augment": False,
        "layerdrop": 0.0,
    },
    # images
    "vit": _IMAGES,
    "deit": _IMAGES,
    "beit": _IMAGES,
    "dinov2": _LAYERS | {"image_size": 16, "patch_size": 4, "num_labels": 8, "mlp_ratio": 2},
    "swin": {
        "image_size": 16,
        "patch_size": 2,
        "embed_dim": 16,
        "depths": [2, 2],
        "num_heads": [2, 4],
        "window_size": 4,
        "num_labels": 8,
    },
    "convnext": {"image_size": 32, "num_labels": 8, "hidden_sizes": [16, 32], "depths": [2, 2], "num_stages": 2},
    # images and text
    "gemma3": _seeing(
        _named(_SLIDING, "gemma3_text"),
        "siglip_vision_model",
        mm_tokens_per_image=4,
        boi_token_index=10,
        eoi_token_index=11,
    ),
    "llava": _seeing(_named(_DECODER, "llama"), "clip_vision_model"),
    "paligemma": _seeing(_named(_DECODER, "gemma"), "siglip_vision_model", projection_dim=32),
    "qwen2_vl": {
        "text_config": _named(_DECODER, "qwen2_vl_text") | _TURNING,
        "vision_config": _VISION | {"embed_dim": 32, "mlp_ratio": 2, "model_type": "qwen2_vl_vision"},
        **_SPECIAL_TOKENS,
    },
    "qwen2_5_vl": {
        "text_config": _named(_DECODER, "qwen2_5_vl_text") | _TURNING,
        "vision_config": _VISION
        | {"out_hidden_size": 32, "window_size": 16, "fullatt_block_indexes": [1], "model_type": "qwen2_5_vl_vision"},
        **_SPECIAL_TOKENS,
    },
    "qwen3_vl": {
        "text_config": _named(_DECODER, "qwen3_vl_text") | _TURNING,
        "vision_config": _VISION
        | {
            "out_hidden_size": 32,
            "deepstack_visual_indexes": [0],
            "num_position_embeddings": 64,
            "model_type": "qwen3_vl_vision",
        },
        **_SPECIAL_TOKENS,
    },
    "idefics3": _seeing(_named(_DECODER, "llama"), "idefics3_vision", image_token_id=9, scale_factor=2),
    "smolvlm": _seeing(_named(_DECODER, "llama"), "smolvlm_vision", image_token_id=9, scale_factor=2),
    "mistral3": _seeing(_named(_DECODER, "mistral"), "pixtral"),
}
"""By name: the ``model_type``, and the head behind a comma where it is not the first that there is."""
