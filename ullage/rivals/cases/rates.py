"""Rates of runs whose kernels differ from those that profiles describe."""

import math
import re
from typing import Final, Literal

from hwprofiles.paths import number, quantities, replace
from hwprofiles.profile import HardwareProfile
from hwprofiles.quantity import Provenance

AttentionKernel = Literal["flash-attention-1", "flash-attention-2", "flash-attention-3", "flash-attention-4", "triton"]
"""``triton`` is the kernel of 2023 in Triton's tutorials, as llm-foundry has it."""

# FlashAttention-2's kernels are those for Ampere. The most FLOP/s that they reach on newer devices, forward and
# backward, by names of devices. On a B300, 2 sequences of 8192 tokens with 32 heads of 128 values take 2.71 and
# 8.19 ms, 3.9 and 3.6 times as long as with FlashAttention-4 (github.com/whitecircle/halo,
# agent-docs/optimization/flash-attention.md). What PyTorch and TransformerEngine take there, cuDNN's, is as fast as
# FlashAttention-4. On an H100 they reach 35 % of the datasheet's 989 TFLOP/s (arXiv 2407.08608).
_HOPPER: Final = re.compile(r"(NVIDIA )?(GH200|H[12]00)")
_FLASH_2: Final = ((re.compile(r"(NVIDIA )?G?B[23]00"), (406e12, 336e12)), (_HOPPER, (346e12, 346e12)))
_UNBOUNDED: Final = (math.inf, math.inf)
# Rates of forward and backward, as shares of FlashAttention-2's (arXiv 2307.08691). In its table 1, GPT3-1.3B reaches
# 196 and 220 TFLOP/s at 2k and 8k tokens, with FlashAttention 189 and 170. Attention alone differs, so the older kernel
# has 0.47 of the rate. In its section 4.1, it is 1.3 to 1.5 times as fast as the kernel in Triton forward, and about
# twice as fast backward. FlashAttention-3 is 1.5 to 2 times as fast as it on an H100 forward, and 1.5 to 1.75 times
# backward (arXiv 2407.08608, abstract and section 4.1).
_SHARES: Final[dict[AttentionKernel, tuple[float, float]]] = {
    "flash-attention-1": (0.47, 0.47),
    "flash-attention-2": (1.0, 1.0),
    "flash-attention-3": (1.75, 1.625),
    "triton": (1 / 1.4, 1 / 2),
}


def with_attention(profile: HardwareProfile, kernel: AttentionKernel) -> HardwareProfile:
    """Return a machine whose attention is as fast as one kernel's, if that is slower than what profiles have.

    FlashAttention-3 has its own rate in place of one that a profile of a Hopper assumes, also if that is slower.
    """
    device = profile.device
    most = next((rates for names, rates in _FLASH_2 if names.match(device.name)), None)
    if kernel not in _SHARES or (kernel == "flash-attention-2" and not most):
        return profile
    if kernel == "flash-attention-3" and (not _HOPPER.match(device.name) or _origin(profile) != "assumed"):
        return profile
    both = device.model_copy(update={"attention_backward": device.attention_backward or device.attention})
    profile = profile.model_copy(update={"device": both})
    known, rates = quantities(profile), dict[str, float]()
    ways = ("attention", "attention_backward")
    for way, flash_2, share in zip(ways, most or _UNBOUNDED, _SHARES[kernel], strict=True):
        for path in known:
            if path.startswith(f"device.{way}.") and share <= 1:
                rates[path] = min(number(known[path]), flash_2) * share
            elif path.startswith(f"device.{way}.bf16"):
                rates[path] = flash_2 * share
    return replace(profile, rates, Provenance(origin="assumed", source=f"{profile.name} with {kernel}"))


def _origin(profile: HardwareProfile) -> str:
    """Return where the rate of attention in bf16 is from."""
    return profile.device.attention["bf16"].provenance.origin


GEFORCE: Final = re.compile(r"RTX [3-5]0\d\d")
"""Names of GeForce cards."""

# They add up products of fp16 in fp16 twice as fast as in fp32, other cards as fast (NVIDIA Ada GPU Architecture,
# appendix A: RTX 4090 with 330.3 and 165.2 TFLOP/s).
_FP16_SUMS: Final = 2.0


def with_fp16_sums(profile: HardwareProfile) -> HardwareProfile:
    """Return a machine whose products are as fast as those of fp16 that are added up in fp16."""
    if not GEFORCE.match(profile.device.name):
        return profile
    rates = {
        path: number(item) * _FP16_SUMS
        for path, item in quantities(profile).items()
        if path.startswith("device.gemm.bf16")
    }
    source = f"{profile.name} x {_FP16_SUMS:g}: sums in fp16, NVIDIA Ada GPU Architecture, appendix A"
    return replace(profile, rates, Provenance(origin="assumed", source=source))


# All-reduces of 1 to 256 MiB between two RTX 3090 of one host (github.com/NVIDIA/nccl/pull/2366).
_PAIR_BYTES_PER_S: Final = 3.816e9


def with_pair(profile: HardwareProfile) -> HardwareProfile:
    """Return a machine with two devices that exchange through host memory, which they share with no others."""
    if profile.intra_node is None or not profile.intra_node.via_host_link:
        return profile
    source = "two RTX 3090 of one host, github.com/NVIDIA/nccl/pull/2366"
    return replace(
        profile, {"intra_node.bytes_per_s": _PAIR_BYTES_PER_S}, Provenance(origin="published", source=source)
    )
