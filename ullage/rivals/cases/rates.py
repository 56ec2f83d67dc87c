"""Rates of runs whose kernels differ from those that profiles describe."""

import re
from typing import Final, Literal

from hwprofiles.paths import number, quantities, replace
from hwprofiles.profile import HardwareProfile
from hwprofiles.quantity import Provenance

AttentionKernel = Literal["flash-attention-1", "flash-attention-2", "flash-attention-3", "flash-attention-4", "triton"]
"""``triton`` is the kernel of 2023 in Triton's tutorials, as llm-foundry has it."""

# On a B300, FlashAttention-2 takes 3.9 times as long as FlashAttention-4 forward, and 3.6 times backward (2 sequences
# of 8192 tokens, 32 heads of 128 values; github.com/whitecircle/halo, agent-docs/optimization/flash-attention.md). Its
# kernels are those for Ampere. What PyTorch and TransformerEngine take there, cuDNN's, is as fast as FlashAttention-4.
_BLACKWELL: Final = re.compile(r"(NVIDIA )?G?B[23]00")
_ON_BLACKWELL: Final[dict[AttentionKernel, tuple[float, float]]] = {"flash-attention-2": (0.70 / 2.71, 2.3 / 8.19)}
# Rates of forward and backward, as shares of FlashAttention-2's (arXiv 2307.08691). In its table 1, GPT3-1.3B reaches
# 196 and 220 TFLOP/s at 2k and 8k tokens, with FlashAttention 189 and 170. Attention alone differs, so the older kernel
# has 0.47 of the rate. In its section 4.1, it is 1.3 to 1.5 times as fast as the kernel in Triton forward, and about
# twice as fast backward.
_SHARES: Final[dict[AttentionKernel, tuple[float, float]]] = {
    "flash-attention-1": (0.47, 0.47),
    "triton": (1 / 1.4, 1 / 2),
}


def with_attention(profile: HardwareProfile, kernel: AttentionKernel) -> HardwareProfile:
    """Return a machine whose attention is as fast as one kernel's, if that is slower than what profiles have."""
    device = profile.device
    shares = _ON_BLACKWELL if _BLACKWELL.match(device.name) else _SHARES
    if kernel not in shares:
        return profile
    forward, backward = shares[kernel]
    both = device.model_copy(update={"attention_backward": device.attention_backward or device.attention})
    profile = profile.model_copy(update={"device": both})
    rates = {
        path: number(item) * (backward if path.startswith("device.attention_backward.") else forward)
        for path, item in quantities(profile).items()
        if path.startswith(("device.attention.", "device.attention_backward."))
    }
    source = f"{profile.name} x {forward:.2f} forward and {backward:.2f} backward: {kernel}"
    return replace(profile, rates, Provenance(origin="assumed", source=source))


# GeForce cards add up products of fp16 in fp16 twice as fast as in fp32, other cards as fast (NVIDIA Ada GPU
# Architecture, appendix A: RTX 4090 with 330.3 and 165.2 TFLOP/s).
_GEFORCE: Final = re.compile(r"RTX [3-5]0\d\d")
_FP16_SUMS: Final = 2.0


def with_fp16_sums(profile: HardwareProfile) -> HardwareProfile:
    """Return a machine whose products are as fast as those of fp16 that are added up in fp16."""
    if not _GEFORCE.match(profile.device.name):
        return profile
    rates = {
        path: number(item) * _FP16_SUMS
        for path, item in quantities(profile).items()
        if path.startswith("device.gemm.bf16")
    }
    source = f"{profile.name} x {_FP16_SUMS:g}: sums in fp16, NVIDIA Ada GPU Architecture, appendix A"
    return replace(profile, rates, Provenance(origin="assumed", source=source))
