"""Profiles as tables: all profiles, one profile, differences between two, and drift on this machine.

[Note: Differences] Two values of a quantity differ if their spreads (p10 to p90 of the repetitions) do not overlap and
if the values differ by more than a tenth. The second condition is needed because repetitions minutes apart agree better
than calibrations days apart. For curves, the geometric mean of the ratios of medians at common sizes is compared,
because single points are noisy.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Final

from hwprofiles.paths import Item, quantities
from hwprofiles.profile import HardwareProfile
from hwprofiles.quantity import Curve, Quantity
from ullage.analysis.provenance import origin_shares, origin_words, spread, unit_and_value
from ullage.output.console import console, facts, table, write_json
from ullage.output.formatting import si, signed_percent

NOTICEABLE: Final = 0.1
DRIFT: Final = 0.25
"""A quantity has drifted if it is off by more than this fraction. Two calibrations of a machine differ by less."""
# The free memory and disk space of the moment are not properties of the machine.
_FREE: Final = frozenset({"device.memory_bytes", "host.memory_bytes", "nvme.capacity_bytes", "pfs.capacity_bytes"})


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """A quantity in two profiles.

    Attributes:
        path: path of the quantity.
        first, second: the quantity in each profile, or ``None`` if the profile lacks it.
        ratio: second over first, of rates (curves) or values; ``None`` if one is missing or 0.
    """

    path: str
    first: Item | None
    second: Item | None
    ratio: float | None

    @property
    def matters(self) -> bool:
        """Whether they differ by more than their spread; see [Note: Differences]."""
        if self.first is None or self.second is None:
            return True
        if self.ratio is None:
            return self.first != self.second and unit_and_value(self.first) != unit_and_value(self.second)
        return abs(math.log(self.ratio)) > -math.log(1 - NOTICEABLE) and not _meet(self.first, self.second)


def differences(first: HardwareProfile, second: HardwareProfile) -> tuple[Difference, ...]:
    """Return all quantities of two profiles side by side, largest difference first."""
    one, other = quantities(first), quantities(second)
    found = [Difference(path, one.get(path), other.get(path), _ratio(one.get(path), other.get(path))) for path in one]
    found += [Difference(path, None, item, None) for path, item in other.items() if path not in one]
    return tuple(sorted(found, key=lambda d: -math.inf if d.ratio is None else -abs(math.log(d.ratio))))


def _ratio(first: Item | None, second: Item | None) -> float | None:
    if isinstance(first, Curve) and isinstance(second, Curve):
        times_s = {point.size: point.median_s for point in first.points}
        logs = [math.log(times_s[p.size] / p.median_s) for p in second.points if p.size in times_s]
        return math.exp(math.fsum(logs) / len(logs)) if logs else second.best_rate_per_s() / first.best_rate_per_s()
    if isinstance(first, Quantity) and isinstance(second, Quantity) and first.value and second.value:
        return second.value / first.value
    return None


def _meet(first: Item, second: Item) -> bool:
    one, other = spread(first), spread(second)
    if one is None or other is None:
        return False
    return one[0] <= other[1] and other[0] <= one[1]


def listed(profiles: Mapping[str, HardwareProfile], *, as_json: bool) -> None:
    """Print profiles by name, with the origins of their values."""
    if as_json:
        write_json({name: {"description": p.description, "origins": origin_shares(p)} for name, p in profiles.items()})
        return
    rows = table("hardware", "name", "description", "origins", "devices", "device memory", num_text=3)
    for name, profile in profiles.items():
        memory = si(profile.device.memory_bytes.value, "B")
        rows.add_row(name, profile.description, origin_words(profile), str(profile.devices_per_node), memory)
    console().print(rows)


def shown(profile: HardwareProfile, *, as_json: bool) -> None:
    """Print every quantity of a profile."""
    if as_json:
        write_json({path: _plain(item) for path, item in quantities(profile).items()})
        return
    out = console()
    known = {
        "name": profile.name,
        "description": profile.description,
        "device": f"{profile.device.name} ({profile.device.kind}), {profile.devices_per_node} per node",
        "host": f"{profile.host.name}, {profile.host.num_cores} cores",
        "quantities": origin_words(profile),
    }
    if (on := profile.measured_on) is not None:
        parts = [on.cpu, f"{on.num_cpus} logical CPUs", si(on.memory_bytes, "B"), *on.gpus, *on.drives]
        known["measured on"] = ", ".join(parts)
    out.print(facts(known))
    out.print()
    rows = table("quantities", "quantity", "value", "p10 to p90", "n", "origin", "source", text={4, 5})
    for path, item in quantities(profile).items():
        made = item.provenance
        count = "" if made.num_samples is None else str(made.num_samples)
        rows.add_row(path, _value(item), _spread(item), count, made.origin, made.source)
    out.print(rows)


def different(first: HardwareProfile, second: HardwareProfile, *, as_json: bool) -> None:
    """Print the quantities that differ between two profiles."""
    found = differences(first, second)
    matter = [difference for difference in found if difference.matters]
    if as_json:
        write_json({d.path: _difference_json(d) for d in matter})
        return
    out = console()
    if not matter:
        out.print(f"{first.name} and {second.name} differ in none of {len(found)} quantities by more than their spread")
        return
    out.print(_table(f"{first.name} against {second.name}", matter, first.name, second.name))
    out.print(f"{len(found) - len(matter)} of {len(found)} quantities are equal within their spread, or within a tenth")


def drifted(before: HardwareProfile, now: HardwareProfile, *, as_json: bool) -> bool:
    """Print quantities that were measured again, and return whether any has drifted."""
    both = (d for d in differences(before, now) if d.ratio is not None)  # new quantities cannot have drifted
    measured = [d for d in both if d.first != d.second and d.path not in _FREE]
    found = [d for d in measured if d.matters and abs(math.log(d.ratio or 1.0)) > -math.log(1 - DRIFT)]
    if as_json:
        write_json({"drifted": {d.path: _difference_json(d) for d in found}, "measured": [d.path for d in measured]})
        return bool(found)
    out = console()
    out.print(_table(f"measured again: {before.name}", measured, "then", "now"))
    if found:
        names = ", ".join(d.path for d in found)
        out.print(f"drifted by more than {100 * DRIFT:.0f} %: {names}; measure them again: `ullage calibrate`")
    else:
        out.print(f"none of {len(measured)} quantities has drifted by more than {100 * DRIFT:.0f} % and its spread")
    return bool(found)


def _table(title: str, found: list[Difference], first: str, second: str) -> Any:
    rows = table(title, "quantity", first, "p10 to p90", second, "p10 to p90", "change")
    origins = {item.provenance.origin for d in found for item in (d.first, d.second) if item is not None}
    if with_origins := origins != {"measured"}:
        rows.add_column("origins", header_style="dim")
    for d in found:
        of = dict.fromkeys(item.provenance.origin for item in (d.first, d.second) if item is not None)
        change = "-" if d.ratio is None else signed_percent(d.ratio - 1)
        cells = [cell for item in (d.first, d.second) for cell in (_value(item), _spread(item))]
        rows.add_row(d.path, *cells, change, *([", ".join(of)] if with_origins else []))
    return rows


def _value(item: Item | None) -> str:
    if item is None:
        return "-"
    unit, value = unit_and_value(item)
    return f"{'up to ' if isinstance(item, Curve) else ''}{si(value, unit) if unit else f'{value:.3g}'}"


def _spread(item: Item | None) -> str:
    between = None if item is None else spread(item)
    if item is None or between is None or item.provenance.origin != "measured":
        return ""
    unit, _ = unit_and_value(item)
    low, high = (si(x, unit).split(" ") if unit else [f"{x:.3g}"] for x in between)
    return " to ".join([*low[:1], " ".join(high)]) if low[1:] == high[1:] else " ".join([*low, "to", *high])


def _difference_json(difference: Difference) -> dict[str, Any]:
    return {
        "ratio": difference.ratio,
        "first": None if difference.first is None else _plain(difference.first),
        "second": None if difference.second is None else _plain(difference.second),
    }


def _plain(item: Item) -> dict[str, Any]:
    unit, value = unit_and_value(item)
    kind = "curve" if isinstance(item, Curve) else "quantity"
    plain: dict[str, Any] = item.model_dump(mode="json", exclude_none=True)
    return {"kind": kind, **plain} if kind == "quantity" else {"kind": kind, **plain, "best_rate": value, "rate": unit}
