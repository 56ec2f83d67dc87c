"""``ullage hardware``: profiles, and every quantity of one with its origin."""

import argparse
from typing import Any

from hwprofiles.paths import quantities
from hwprofiles.profile import HardwareProfile
from hwprofiles.quantity import Curve
from hwprofiles.registry import list_profiles, load_profile
from ullage.commands import Subparsers, command_parser
from ullage.console import console, facts, table, write_json
from ullage.formatting import si
from ullage.provenance import origin_shares, unit_and_value


def add_parser(subparsers: Subparsers) -> None:
    """Add the parser of this command."""
    parser = command_parser(
        subparsers,
        "hardware",
        run,
        "List hardware profiles, or show every quantity of one with its unit, value, origin and source.\n"
        "Of a curve (time against size) the best rate is shown; --json has all its points.",
        """
        ullage hardware
        ullage hardware show a100-80
        ullage hardware show local --json
        """,
    )
    parser.add_argument("action", nargs="?", choices=("list", "show"), default="list", help="what to do (list)")
    parser.add_argument("name", nargs="?", metavar="NAME|PATH|local", help="which profile to show")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run(args: argparse.Namespace) -> int:
    """List, or show one."""
    if (args.action == "show") != (args.name is not None):
        raise ValueError("`ullage hardware show` needs one name, and `ullage hardware list` none")
    if args.action == "list":
        _list(as_json=args.json)
    else:
        _show(load_profile(args.name), as_json=args.json)
    return 0


def _list(*, as_json: bool) -> None:
    profiles = {name: load_profile(name) for name in list_profiles()}
    if as_json:
        write_json({name: profile.description for name, profile in profiles.items()})
        return
    rows = table("hardware", "name", "description", "devices", "device memory", num_text=2)
    for name, profile in profiles.items():
        memory = si(profile.device.memory_bytes.value, "B")
        rows.add_row(name, profile.description, str(profile.devices_per_node), memory)
    console().print(rows)


def _show(profile: HardwareProfile, *, as_json: bool) -> None:
    if as_json:
        write_json({path: _plain(item) for path, item in quantities(profile).items()})
        return
    out = console()
    origins = ", ".join(f"{100 * share:.0f} % {origin}" for origin, share in origin_shares(profile).items())
    out.print(
        facts(
            {
                "name": profile.name,
                "description": profile.description,
                "device": f"{profile.device.name} ({profile.device.kind}), {profile.devices_per_node} per node",
                "host": f"{profile.host.name}, {profile.host.num_cores} cores",
                "quantities": origins,
            }
        )
    )
    out.print()
    rows = table("quantities", "quantity", "value", "origin", "source")
    rows.columns[2].justify = rows.columns[3].justify = "left"
    for path, item in quantities(profile).items():
        unit, value = unit_and_value(item)
        shown = f"{'up to ' if isinstance(item, Curve) else ''}{si(value, unit) if unit else f'{value:.3g}'}"
        rows.add_row(path, shown, item.provenance.origin, item.provenance.source)
    out.print(rows)


def _plain(item: Any) -> dict[str, Any]:
    unit, value = unit_and_value(item)
    kind = "curve" if isinstance(item, Curve) else "quantity"
    plain: dict[str, Any] = item.model_dump(mode="json", exclude_none=True)
    return {"kind": kind, **plain} if kind == "quantity" else {"kind": kind, **plain, "best_rate": value, "rate": unit}
