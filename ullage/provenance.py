"""The quantities of a hardware profile, and where they come from."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from hwprofiles.profile import HardwareProfile
from hwprofiles.quantity import Curve, Quantity

_RATES = {"bytes": "B/s", "flop": "FLOP/s", "params": "param/s"}
_UNITS = {"bytes": "B", "bytes_per_s": "B/s", "s": "s", "flop_per_s": "FLOP/s", "params_per_s": "param/s"}


def quantities(profile: HardwareProfile) -> dict[str, Quantity | Curve]:
    """Return every quantity and curve of a profile by its path, such as ``host_link.down``, in the schema's order."""
    return dict(_walk("", profile))


def origin_shares(profile: HardwareProfile) -> dict[str, float]:
    """Return which fraction of a profile's quantities is measured, published, fitted or assumed; largest first."""
    counts = Counter(item.provenance.origin for item in quantities(profile).values())
    return {origin: count / counts.total() for origin, count in counts.most_common()}


def unit_and_value(item: Quantity | Curve) -> tuple[str, float]:
    """Return a quantity's value, or the best rate of a curve, with its unit."""
    if isinstance(item, Curve):
        return _RATES[item.size_unit], item.best_rate_per_s()
    return _UNITS.get(item.unit, ""), item.value


def _walk(path: str, item: Any) -> Iterator[tuple[str, Quantity | Curve]]:
    if isinstance(item, (Quantity, Curve)):
        yield path, item
    elif isinstance(item, BaseModel):
        for name in type(item).model_fields:
            yield from _walk(f"{path}.{name}".lstrip("."), getattr(item, name))
    elif isinstance(item, dict):
        for name, value in item.items():
            yield from _walk(f"{path}.{name}", value)
