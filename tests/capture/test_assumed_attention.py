"""Attention that `transformers` computes step by step is assumed to be one kernel, where the architecture has one."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from planner.models.captured import CapturedModel
from planner.models.formulas.work import attention_scratch_bytes
from planner.models.kernels import Attention
from ullage.capture import capture, capture_module
from ullage.capture.architectures import architecture
from ullage.capture.attention import use_attention
from ullage.capture.records import CaptureError

TINY = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
}
GPT_OSS = TINY | {"model_type": "gpt_oss", "num_local_experts": 4, "sliding_window": 32}
WHISPER = {
    "model_type": "whisper",
    "architectures": ["WhisperForConditionalGeneration"],
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "num_mel_bins": 8,
    "max_source_positions": 150,
    "max_target_positions": 44,
    "vocab_size": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
TOKENS = 128
INPUTS = f"input_ids=2x{TOKENS}:int64", f"labels=2x{TOKENS}:int64"


def captured(tmp_path, config, *, num_tokens: int = TOKENS, as_on_gpu: bool = True) -> CapturedModel:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    return capture(str(path), architecture(path).inputs(2, num_tokens), "fp32", as_on_gpu=as_on_gpu)


def attentions(model: CapturedModel) -> list[Attention]:
    return [k for o in model.operators() for k in o.forward if isinstance(k, Attention) and k.flash]


def test_a_decoder_attends_to_the_keys_of_its_encoder(tmp_path):
    model = captured(tmp_path, WHISPER, num_tokens=44)
    seen = {(core.seq_len, core.num_keys or core.seq_len): core for core in attentions(model)}
    assert seen.keys() == {(150, 150), (44, 44), (44, 150)}
    cross = seen[44, 150]
    assert cross.flop == 2 * 2 * (2 * 2) * 44 * 150 * 16, "both products, of both heads and samples"
    scratch_bytes = attention_scratch_bytes(cross, grouped=False, e=2)
    assert scratch_bytes == 4 * (2 * 2 * 128) * (32 + 1), "of queries, in blocks of 128"


def test_sinks_and_windows_are_one_kernel_on_a_gpu(tmp_path):
    model = captured(tmp_path, GPT_OSS)
    assert model.attention == "kernels-community/vllm-flash-attn3"
    assert any(model.attention in words for words in model.assumed)
    windowed, whole = attentions(model)  # gpt-oss begins with a layer that has a window
    pairs = 2 * 4 * 16 * 4  # both products, heads, width, FLOP of both sequences
    assert whole.flop == pytest.approx(pairs * TOKENS**2 / 2, rel=0.02), "causal"
    assert windowed.flop == pytest.approx(pairs * TOKENS * 32, rel=0.02), "as many keys as the window has"
    scores = 2 * 4 * TOKENS**2 * 4
    assert all(o.saved_bytes < scores for o in model.operators() if o.kind == "GptOssAttention")
    assert {spec.name for o in model.operators() for spec in o.parameters if "sinks" in spec.name}, "sinks are trained"


def test_elsewhere_it_is_as_the_model_has_it(tmp_path):
    on_host = captured(tmp_path, GPT_OSS, as_on_gpu=False)
    assert (on_host.attention, attentions(on_host)) == (None, [])
    gemma = captured(tmp_path, TINY | {"model_type": "gemma2"})  # its authors advise against other kernels
    assert (gemma.attention, attentions(gemma)) == (None, [])
    own = AutoModelForCausalLM.from_config(AutoConfig.for_model(**GPT_OSS))
    given = capture_module(own, INPUTS, "fp32")
    assert (given.attention, attentions(given)) == (None, []), "a user's own model is not changed"
    assert own.config._attn_implementation == "eager"


def test_execution_uses_it_or_says_what_is_missing():
    own = AutoModelForCausalLM.from_config(AutoConfig.for_model(**GPT_OSS))
    use_attention(own, "eager")
    assert own(input_ids=torch.zeros(1, 4, dtype=torch.int64)).logits.shape == (1, 4, 128)
    with pytest.raises(CaptureError, match="pip install kernels"):
        use_attention(own, "kernels-community/vllm-flash-attn3")
