"""The quantities of a hardware profile and their origins."""

from collections import Counter

from hwprofiles.paths import number, quantities
from hwprofiles.profile import HardwareProfile
from hwprofiles.quantity import Curve, Quantity
from ullage.output.formatting import UNIT_SYMBOLS


def origin_shares(profile: HardwareProfile) -> dict[str, float]:
    """Return the fraction of a profile's quantities with each origin, such as ``measured``; largest first."""
    counts = Counter(item.provenance.origin for item in quantities(profile).values())
    return {origin: count / counts.total() for origin, count in counts.most_common()}


def spread(item: Quantity | Curve) -> tuple[float, float] | None:
    """Return the tenth and ninetieth percentile of the value of :func:`unit_and_value`, if they are known."""
    if isinstance(item, Curve):
        best = max(item.points, key=lambda point: point.size / point.median_s)
        return best.size / best.p90_s, best.size / best.p10_s
    return None if item.p10 is None or item.p90 is None else (item.p10, item.p90)


def unit_and_value(item: Quantity | Curve) -> tuple[str, float]:
    """Return a quantity's value, or the best rate of a curve, with its unit."""
    return UNIT_SYMBOLS.get(item.unit, ""), number(item)


def origin_words(profile: HardwareProfile) -> str:
    """Return the shares of a profile's quantities by origin, such as ``70 % measured, 30 % assumed``."""
    return ", ".join(f"{100 * share:.0f} % {origin}" for origin, share in origin_shares(profile).items())
