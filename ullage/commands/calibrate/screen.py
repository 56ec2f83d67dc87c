"""The screen of a calibration: measured quantities with their spread, and unknown quantities with the reason."""

from pathlib import Path
from typing import TYPE_CHECKING

from hwprofiles.catalogue import CATALOGUE, PARTS
from hwprofiles.paths import Item, quantities
from hwprofiles.profile import HardwareProfile
from hwprofiles.quantity import Curve
from hwprofiles.registry import local_profile_path

if TYPE_CHECKING:
    from hwprofiles.calibrate.options import CalibrationReport

from ullage.analysis.provenance import spread, unit_and_value
from ullage.output.console import console, table, write_json
from ullage.output.formatting import si


def list_quantities(*, as_json: bool) -> None:
    """Print all quantities, and what measures each one, or why nothing does."""
    if as_json:
        write_json({path: {"how": e.how, "part": e.part, "words": e.words} for path, e in CATALOGUE.items()})
        return
    out = console()
    parts = table("parts (--only)", "part", "what it measures", num_text=2)
    for part, words in PARTS.items():
        parts.add_row(part, words)
    out.print(parts)
    out.print()
    rows = table("quantities of a profile", "quantity", "how", "part", "measured by, or why not", num_text=4)
    for path, entry in CATALOGUE.items():
        rows.add_row(path, entry.how, entry.part or "-", entry.words)
    out.print(rows)


def calibrated(
    profile: HardwareProfile, path: Path, base: HardwareProfile | None, report: "CalibrationReport | None"
) -> None:
    """Print measured quantities, how activities slowed each other down, and unknown quantities.

    Args:
        profile: the new profile.
        path: path of its file.
        base: the profile before, if only parts were measured again.
        report: report of calibration; ``None`` for collectives.
    """
    out = console()
    out.print(f"{profile.name}: {profile.description}")
    out.print()
    found = quantities(profile)
    before = quantities(base) if base else {}
    rows = table("measured", "quantity", "value", "p10", "p90", "repetitions")
    for name, item in found.items():
        if before.get(name) != item:
            rows.add_row(name, *_shown(item))
    out.print(rows)
    out.print()
    if report and report.pairs:
        pairs = table("slow-down of pairs that run at the same time", "what", "measured", "from the profile")
        for pair in report.pairs:
            pairs.add_row(
                pair.what, f"{pair.slow_down:.2f}", "-" if pair.predicted is None else f"{pair.predicted:.2f}"
            )
        out.print(pairs)
        out.print()
    if missing := _missing(profile):
        unknown = table("not measured", "quantity", "why", num_text=2)
        for name, why in missing.items():
            unknown.add_row(name, why)
        out.print(unknown)
    took = f"measured in {report.elapsed_s:.0f} s; " if report else ""
    meaning = "; it is now the default of --hardware" if path == local_profile_path() else ""
    out.print(f"{took}profile written to {path}{meaning}", soft_wrap=True)


def _shown(item: Item) -> tuple[str, str, str, str]:
    unit, value = unit_and_value(item)
    low, high = spread(item) or (None, None)
    shown = (("-" if x is None else si(x, unit) if unit else f"{x:.3g}") for x in (value, low, high))
    count = item.provenance.num_samples
    up_to = "up to " if isinstance(item, Curve) else ""
    value_text, low_text, high_text = shown
    return f"{up_to}{value_text}", low_text, high_text, "-" if count is None else str(count)


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
