"""Numbers as people read them: three digits, SI prefixes (GB = 1e9 bytes)."""

import math
from collections.abc import Sequence

from planner.schedule import Lane

_PREFIXES = {-3: "n", -2: "µ", -1: "m", 0: "", 1: "k", 2: "M", 3: "G", 4: "T", 5: "P", 6: "E"}
_BARS = "▁▂▃▄▅▆▇█"

LANE_WORDS = {
    Lane.COMPUTE: "computing",
    Lane.GPU_UPDATE: "optimizer steps on the device",
    Lane.H2D: "copies of parameters to the device",
    Lane.D2H: "copies of gradients to the host",
    Lane.STATE_IN: "copies of optimizer state to the device",
    Lane.STATE_OUT: "copies of optimizer state to the host",
    Lane.CPU: "optimizer steps on the CPU",
    Lane.COLLECTIVE: "communication between devices",
    Lane.SEND: "sending activations to the next stage",
    Lane.SEND_BACK: "sending gradients to the previous stage",
    Lane.LAUNCH: "issuing kernels",
    Lane.SNAPSHOT: "copies for checkpoints",
    Lane.STAGING: "memory for checkpoints",
    Lane.WRITE: "writing checkpoints",
    Lane.GATE: "waiting for checkpoints",
    Lane.ACTIVATION_IN: "copies of activations to the device",
    Lane.ACTIVATION_OUT: "copies of activations to the host",
    Lane.NVME_READ: "reading parameters and activations from NVMe",
    Lane.NVME_WRITE: "writing activations to NVMe",
    Lane.NVME_STATE_IN: "reading optimizer state from NVMe",
    Lane.NVME_STATE_OUT: "writing optimizer state to NVMe",
}
"""What each lane does, in words."""


def si(value: float, unit: str) -> str:
    """Return a value with three digits and a prefix: ``si(2.5e9, "B")`` is ``2.50 GB``."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g} {unit}"
    exponent = int(f"{value:.2e}".split("e")[1])  # after rounding to three digits
    step = min(max(exponent // 3, -3), 6)
    digits = min(max(2 - (exponent - 3 * step), 0), 2)
    return f"{value / 1000**step:.{digits}f} {_PREFIXES[step]}{unit}"


def percent(fraction: float) -> str:
    """Return a fraction as ``12.3 %``."""
    return f"{100 * fraction:.1f} %"


def signed_percent(fraction: float) -> str:
    """Return a fraction as ``+12.3 %``."""
    return f"{100 * fraction:+.1f} %"


def sparkline(values: Sequence[float], top: float) -> str:
    """Return one character per value, its height relative to ``top``; a blank for 0."""
    return "".join(_BARS[min(int(len(_BARS) * value / top), len(_BARS) - 1)] if value > 0 else " " for value in values)


def binds(critical_s: dict[str, float], period_s: float) -> str:
    """Return what the critical path consists of, in words, largest share first; what is below 1 % is left out."""
    shares = sorted(((seconds / period_s, lane) for lane, seconds in critical_s.items()), reverse=True)
    parts = [f"{LANE_WORDS[Lane(lane)]} {percent(share)}" for share, lane in shares if share >= 0.01]
    return ", ".join(parts) or "nothing"
