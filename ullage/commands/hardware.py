"""``ullage hardware``: list, show, compare and check hardware profiles."""

import argparse
from pathlib import Path

from hwprofiles.files import check_output
from hwprofiles.paths import quantities
from hwprofiles.registry import list_profiles, load_profile, save_profile
from ullage.analysis.provenance import origin_shares
from ullage.output.progress import seconds_bar
from ullage.report import profile as of
from ullage.report.charts import Table
from ullage.report.terminal import answer

_NUM_NAMES = {"list": (0, 0), "show": (1, 1), "diff": (2, 2), "check": (0, 1)}


DESCRIPTION = """\
  list   show all profiles, and which fraction of each was measured
  show   show every quantity of a profile with its unit, value, spread, origin and source
  diff   show the quantities that differ between two profiles by more than their spread
  check  measure some quantities of this machine again; if any has drifted, the exit code is 1
For a curve (time against size), tables show its best rate; --json prints all its points."""
EXAMPLES = """
    ullage hardware
    ullage hardware show a100-80
    ullage hardware show local --json
    ullage hardware diff local yesterday.json
    ullage hardware check
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("action", nargs="?", choices=tuple(_NUM_NAMES), default="list", help="what to do (list)")
    parser.add_argument("names", nargs="*", metavar="NAME|PATH|local", help="one profile, or two for diff")
    parser.add_argument(
        "--output", "-o", type=Path, metavar="PATH", help="check: write the new measurements as a profile"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run(args: argparse.Namespace) -> int:
    """List, show, compare or check."""
    fewest, most = _NUM_NAMES[args.action]
    if not fewest <= len(args.names) <= most:
        wanted = {0: "no name", 1: "one name", 2: "two names"}
        needed = wanted[most] if fewest == most else "at most one name"
        raise ValueError(f"`ullage hardware {args.action}` needs {needed}, but {len(args.names)} were given")
    if args.output and args.action != "check":
        raise ValueError(f"--output {args.output}: only `ullage hardware check` writes a profile; leave it out")
    check_output("--output", args.output)
    if args.action == "check":
        return _check(args)
    profiles = {name: load_profile(name) for name in args.names or list_profiles()}
    if args.action == "list":
        data = {name: {"description": p.description, "origins": origin_shares(p)} for name, p in profiles.items()}
        answer(args, data, of.list_table(profiles))
    elif args.action == "show":
        (profile,) = profiles.values()
        data = {path: of.item_json(item) for path, item in quantities(profile).items()}
        answer(args, data, of.profile_part(profile))
    else:
        first, second = map(load_profile, args.names)
        found = of.differences(first, second)
        matter = [difference for difference in found if difference.matters]
        if matter:
            table = of.differences_table(f"{first.name} against {second.name}", matter, first.name, second.name)
            equal = f"{len(found) - len(matter)} of {len(found)} quantities"
            shown: list[Table | str] = [table, f"{equal} are equal within their spread, or within a tenth"]
        else:
            shown = [
                f"{first.name} and {second.name} differ in none of {len(found)} quantities by more than their spread"
            ]
        answer(args, {d.path: of.difference_json(d) for d in matter}, *shown)
    return 0


def _check(args: argparse.Namespace) -> int:
    from hwprofiles.machine import check_measured_here  # noqa: PLC0415
    from ullage.calibrate import CalibrationOptions, calibrate  # noqa: PLC0415 - torch

    profile = load_profile(args.names[0] if args.names else "local")
    check_measured_here(profile, otherwise="")
    sampled = {part: None for part in ("device", "cpu", "copies", "disk") if part != "disk" or profile.nvme}
    options = CalibrationOptions(quick=True, only=sampled, base=profile)  # type: ignore[arg-type]
    with seconds_bar() as progress:
        now, _ = calibrate(options, progress)
    if args.output:
        save_profile(now, args.output)
    measured = of.measured_again(profile, now)
    found = of.drifted(measured)
    names, share = ", ".join(d.path for d in found), f"{100 * of.DRIFT:.0f} %"
    words = f"none of {len(measured)} quantities has drifted by more than {share} and its spread"
    if found:
        words = f"drifted by more than {share}: {names}; measure them again: `ullage calibrate`"
    data = {"drifted": {d.path: of.difference_json(d) for d in found}, "measured": [d.path for d in measured]}
    answer(args, data, of.differences_table(f"measured again: {profile.name}", measured, "then", "now"), words)
    return 1 if found else 0
