"""Format numbers with three digits and SI prefixes (GB = 1e9 bytes)."""

import math
from collections.abc import Sequence

from planner.schedule.tasks import Lane, Tier

_PREFIXES = {-3: "n", -2: "µ", -1: "m", 0: "", 1: "k", 2: "M", 3: "G", 4: "T", 5: "P", 6: "E"}
_MINUTE_S, _HOUR_S, _DAY_S = 60.0, 3600.0, 86400.0
_YEAR_S = 365.25 * _DAY_S
_THOUSAND_YEARS_S = 1000 * _YEAR_S
_LONG_UNITS = ((_YEAR_S, "years"), (_DAY_S, "d"), (_HOUR_S, "h"), (_MINUTE_S, "min"))
_FEWEST = 1.5  # smaller amounts of a unit are shown in the next smaller unit
_ROUNDING_S = 1e-9  # rounding errors of sums
_BARS = "▁▂▃▄▅▆▇█"

UNIT_SYMBOLS = {"bytes": "B", "bytes_per_s": "B/s", "flop_per_s": "FLOP/s", "params_per_s": "params/s", "s": "s"}
"""Symbols of the units of profiles and studies."""

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
    Lane.RECEIVE: "receiving from other stages",
    Lane.RING: "passing keys and values from rank to rank",
    Lane.LAUNCH: "issuing kernels",
    Lane.SNAPSHOT: "copies for checkpoints",
    Lane.STAGING: "memory for checkpoints",
    Lane.WRITE: "writing checkpoints",
    Lane.PROMOTION: "copying checkpoints to slower storage",
    Lane.RETENTION: "reading checkpoints again",
    Lane.GATE: "waiting for checkpoints",
    Lane.ACTIVATION_IN: "copies of activations to the device",
    Lane.ACTIVATION_OUT: "copies of activations to the host",
    Lane.NVME_READ: "reading parameters and activations from NVMe",
    Lane.NVME_WRITE: "writing activations to NVMe",
    Lane.NVME_STATE_IN: "reading optimizer state from NVMe",
    Lane.NVME_STATE_OUT: "writing optimizer state to NVMe",
}
"""The work of each lane in words."""

TIER_WORDS = {Tier.GPU: "one device", Tier.HOST: "one host", Tier.NVME: "drives of one node"}
"""Whose memory a tier is, in words."""


def si(value: float, unit: str) -> str:
    """Return a value with three digits and a prefix, such as ``2.50 GB`` for ``si(2.5e9, "B")``."""
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


def signed_s(seconds: float) -> str:
    """Return seconds with their sign: ``+1.20 ms``."""
    if abs(seconds) < _ROUNDING_S:
        return "0 s"
    return f"{'+' if seconds >= 0 else '-'}{si(abs(seconds), 's')}"


def sparkline(values: Sequence[float], top: float) -> str:
    """Return one character per value, its height relative to ``top``; a blank for 0."""
    return "".join(_BARS[min(int(len(_BARS) * value / top), len(_BARS) - 1)] if value > 0 else " " for value in values)


def binds(critical_s: dict[str, float], period_s: float) -> str:
    """Return the parts of the critical path in words, largest share first, without those below 1 %."""
    shares = sorted(((seconds / period_s, lane) for lane, seconds in critical_s.items()), reverse=True)
    parts = [f"{LANE_WORDS[Lane(lane)]} {percent(share)}" for share, lane in shares if share >= 0.01]
    return ", ".join(parts) or "nothing"


def duration(seconds: float) -> str:
    """Return seconds in a readable unit: ``45.0 s``, ``12.5 min``, ``3.01 h``, ``2.5 d``."""
    if seconds < _MINUTE_S:
        return si(seconds, "s")
    if seconds >= _THOUSAND_YEARS_S:
        return "more than 1000 years"
    found = (pair for pair in _LONG_UNITS if seconds >= _FEWEST * pair[0])
    unit_s, word = next(found, _LONG_UNITS[-1])
    return f"{seconds / unit_s:.3g} {word}"
