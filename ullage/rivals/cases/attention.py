"""Attention kernels of runs that had others than those whose rates profiles have."""

from typing import Final, Literal

from hwprofiles.paths import number, quantities, replace
from hwprofiles.profile import HardwareProfile
from hwprofiles.quantity import Provenance

AttentionKernel = Literal["flash-attention-1", "flash-attention-2", "flash-attention-3", "flash-attention-4", "triton"]
"""``triton`` is the kernel of 2023 in Triton's tutorials, as llm-foundry has it."""

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
    if kernel not in _SHARES:
        return profile
    forward, backward = _SHARES[kernel]
    device = profile.device
    both = device.model_copy(update={"attention_backward": device.attention_backward or device.attention})
    profile = profile.model_copy(update={"device": both})
    rates = {
        path: number(item) * (backward if path.startswith("device.attention_backward.") else forward)
        for path, item in quantities(profile).items()
        if path.startswith(("device.attention.", "device.attention_backward."))
    }
    source = f"{profile.name} x {forward:.2f} forward and {backward:.2f} backward: {kernel}, arXiv 2307.08691"
    return replace(profile, rates, Provenance(origin="assumed", source=source))
