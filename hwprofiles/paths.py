"""Quantities and curves of a profile by their dotted path, such as ``host_link.down`` or ``device.gemm.bf16``."""

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from hwprofiles.profile import HardwareProfile
from hwprofiles.quantity import Curve, Provenance, Quantity

Item = Quantity | Curve


def quantities(profile: HardwareProfile) -> dict[str, Item]:
    """Return all quantities and curves of a profile by path, in the order of its fields."""
    return {path: item for path, item in _walk(profile, "") if isinstance(item, Item)}


def number(item: Item) -> float:
    """Return one number for an item: the value of a quantity, or the best rate per second of a curve."""
    return item.value if isinstance(item, Quantity) else item.best_rate_per_s()


def counts(profile: HardwareProfile) -> dict[str, int | bool]:
    """Return all whole numbers and switches of a profile by path. These fields have no provenance."""
    found = {path: value for path, value in _walk(profile, "") if isinstance(value, int)}
    del found["schema_version"]  # a property of the file, not of the machine
    return found


def replace(profile: HardwareProfile, numbers: Mapping[str, float], provenance: Provenance) -> HardwareProfile:
    """Return a profile with some items set to other numbers (see :func:`number`); curves keep their shape.

    Counts and switches can be set too; they have no provenance.

    Raises:
        ValueError: a path does not exist, or a number breaks a rule of its field.
    """
    known, plain = quantities(profile), counts(profile)
    data = profile.model_dump(mode="json", exclude_none=True)
    for path, value in numbers.items():
        if path not in known and path not in plain:
            raise ValueError(f"{profile.name} has no quantity {path!r}; it has {', '.join(known)}")
        place = data
        *outer, last = path.split(".")
        for name in outer:
            place = place[name]
        if path in plain:
            place[last] = value
            continue
        place[last] = _with_number(known[path], value, provenance).model_dump(mode="json", exclude_none=True)
    return HardwareProfile.model_validate(data)


def _with_number(item: Item, value: float, provenance: Provenance) -> Item:
    if isinstance(item, Quantity):
        return Quantity(value=value, unit=item.unit, provenance=provenance)
    factor = item.best_rate_per_s() / value
    points = (
        {"size": p.size, "p10_s": p.p10_s * factor, "median_s": p.median_s * factor, "p90_s": p.p90_s * factor}
        for p in item.points
    )
    return Curve.model_validate({"size_unit": item.size_unit, "points": tuple(points), "provenance": provenance})


def _walk(part: Any, path: str) -> Iterator[tuple[str, Item | int]]:
    if isinstance(part, Item | int):
        yield path, part
        return
    members: Mapping[str, Any] = {}
    if isinstance(part, BaseModel):
        members = {name: getattr(part, name) for name in type(part).model_fields}
    elif isinstance(part, dict):
        members = {str(name): value for name, value in part.items()}
    for name, value in members.items():
        yield from _walk(value, f"{path}.{name}" if path else name)
