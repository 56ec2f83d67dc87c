"""Profiles as sections: all, one, what calibration measured, differences between two, and drift on this machine.

Two values of a quantity differ if their spreads (p10 to p90 of the repetitions) do not overlap and
if the values differ by more than a tenth. The second condition is needed because repetitions minutes apart agree better
than calibrations days apart. For curves, the geometric mean of the ratios of medians at common sizes is compared,
because single points are noisy.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from hwprofiles.catalogue import CATALOGUE, PARTS
from hwprofiles.paths import Item, quantities
from hwprofiles.profile import HardwareProfile
from hwprofiles.quantity import Curve, Quantity
from ullage.analysis.provenance import origin_words, spread, unit_and_value
from ullage.output.formatting import si, signed_percent
from ullage.report.charts import Part, Section, Table

if TYPE_CHECKING:
    from ullage.calibrate.options import Pair

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
        """Whether they differ by more than their spread."""
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


def list_table(profiles: Mapping[str, HardwareProfile]) -> Table:
    """List profiles by name, with the origins of their values."""
    rows = tuple(
        (name, of.description, origin_words(of), str(of.devices_per_node), si(of.device.memory_bytes.value, "B"))
        for name, of in profiles.items()
    )
    return Table("hardware", ("name", "description", "origins", "devices", "device memory"), rows)


def profile_part(profile: HardwareProfile) -> Part:
    """Return every quantity of a profile."""
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
    rows = tuple(
        (*_measured(path, item), item.provenance.origin, item.provenance.source)
        for path, item in quantities(profile).items()
    )
    table = Table("quantities", ("quantity", "value", "p10 to p90", "n", "origin", "source"), rows)
    return Part(
        profile.name, "profile", "", (), known, (Section("quantities", "Quantities", "Quantities", (), (table,)),)
    )


def _measured(path: str, item: Item) -> tuple[str, ...]:
    count = item.provenance.num_samples
    return path, _value(item), _spread(item), "" if count is None else str(count)


def calibration_part(profile: HardwareProfile, base: HardwareProfile | None, pairs: "Sequence[Pair]" = ()) -> Part:
    """Return measured quantities, how activities slowed each other down, and unknown quantities.

    Args:
        profile: the new profile.
        base: the profile before, if only parts were measured again.
        pairs: activities that ran beside others.
    """
    before = quantities(base) if base else {}
    new = tuple(_measured(path, item) for path, item in quantities(profile).items() if before.get(path) != item)
    tables = [Table("measured", ("quantity", "value", "p10 to p90", "n"), new)]
    if pairs:
        rows = tuple(
            (pair.what, f"{pair.slow_down:.2f}", "-" if pair.predicted is None else f"{pair.predicted:.2f}")
            for pair in pairs
        )
        title = "slow-down of pairs that run at the same time"
        tables.append(Table(title, ("what", "measured", "from the profile"), rows))
    if missing := _missing(profile):
        tables.append(Table("not measured", ("quantity", "why"), tuple(missing.items())))
    section = Section("measured", "Measured", "Measured", (), tuple(tables))
    return Part(profile.name, "calibration", "", (), {profile.name: profile.description}, (section,))


def _missing(profile: HardwareProfile) -> dict[str, str]:
    """Return the quantities that a profile lacks, with the reason. A missing tier or fabric is one entry."""
    there = {*quantities(profile)}
    stars = {f"{path.rpartition('.')[0]}.*" for path in there}
    result: dict[str, str] = {}
    for path, entry in CATALOGUE.items():
        if path in there | stars or entry.only not in {None, profile.device.kind}:
            continue
        whole = path.partition(".")[0]
        if whole in {"nvme", "pfs", "intra_node", "inter_node"} and getattr(profile, whole) is None:
            words = {"pfs": "--only pfs:FOLDER measures it", "nvme": "--only disk measures it"}
            several = "`torchrun ... -m ullage calibrate --only fabric` measures it between several ranks"
            result[whole] = words.get(whole, several)
        else:
            result[path] = entry.words
    return result


def catalogue_tables() -> tuple[Table, Table]:
    """List all parts and quantities, and what measures each one, or why nothing does."""
    rows = tuple((path, entry.how, entry.part or "-", entry.words) for path, entry in CATALOGUE.items())
    return (
        Table("parts (--only)", ("part", "what it measures"), tuple(PARTS.items())),
        Table("quantities of a profile", ("quantity", "how", "part", "measured by, or why not"), rows),
    )


def drifted(found: Iterable[Difference]) -> list[Difference]:
    """Return the quantities that have drifted: they differ by more than their spread and a quarter."""
    return [d for d in found if d.matters and abs(math.log(d.ratio or 1.0)) > -math.log(1 - DRIFT)]


def measured_again(before: HardwareProfile, now: HardwareProfile) -> list[Difference]:
    """Return the quantities that were measured again. New ones cannot have drifted, and free memory is no property."""
    both = (d for d in differences(before, now) if d.ratio is not None)
    return [d for d in both if d.first != d.second and d.path not in _FREE]


def differences_table(title: str, found: Sequence[Difference], first: str, second: str) -> Table:
    """Show quantities of two profiles side by side; with their origins, if not all were measured."""
    origins = {item.provenance.origin for d in found for item in (d.first, d.second) if item is not None}
    with_origins = origins != {"measured"}
    rows = []
    for d in found:
        of = dict.fromkeys(item.provenance.origin for item in (d.first, d.second) if item is not None)
        change = "-" if d.ratio is None else signed_percent(d.ratio - 1)
        cells = [cell for item in (d.first, d.second) for cell in (_value(item), _spread(item))]
        rows.append((d.path, *cells, change, *([", ".join(of)] if with_origins else [])))
    columns = ("quantity", first, "p10 to p90", second, "p10 to p90", "change", *(["origins"] if with_origins else []))
    return Table(title, columns, tuple(rows))


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


def difference_json(difference: Difference) -> dict[str, Any]:
    """Return a difference as JSON data."""
    sides = {"first": difference.first, "second": difference.second}
    return {"ratio": difference.ratio, **{name: item and item_json(item) for name, item in sides.items()}}


def item_json(item: Item) -> dict[str, Any]:
    """Return a quantity or a curve as JSON data."""
    unit, value = unit_and_value(item)
    best = {"best_rate": value, "rate": unit} if isinstance(item, Curve) else {}
    plain = item.model_dump(mode="json", exclude_none=True)
    return {"kind": "curve" if isinstance(item, Curve) else "quantity", **plain, **best}
