"""The default of ``--hardware``: this machine if it was calibrated, otherwise a packaged profile."""

import argparse
import platform
import sys
from pathlib import Path

from hwprofiles.machine import check_measured_here, differences, gpu_names
from hwprofiles.profile import HardwareProfile
from hwprofiles.registry import LOCAL, ProfileError, load_profile, local_profile_path
from ullage.cli.options import PACKAGED_HARDWARE


def default_hardware() -> tuple[str, str]:
    """Return the value of ``--hardware`` if it is left out, and a line for the user about it, or an empty one.

    It is this machine's own profile if ``ullage calibrate`` has written one here, else the packaged default.

    Raises:
        ProfileError: this machine's own profile cannot be read.
    """
    path = local_profile_path()
    meanwhile = f"{PACKAGED_HARDWARE} is used; run `ullage calibrate` to measure"
    if path.is_file():
        if found := differences(load_profile(LOCAL)):
            note = f"{path} was measured on another machine: {'; '.join(found)}; {meanwhile} this one"
            return PACKAGED_HARDWARE, note
        return LOCAL, f"this machine's profile {path} is used; choose another with --hardware"
    if other := next(filter(_is_calibrated, sorted(path.parent.glob("*.json"))), None):
        note = f"host {platform.node()!r} has no profile, but {other} is of another host; {meanwhile} this one"
        return PACKAGED_HARDWARE, note
    if gpus := gpu_names() or tuple(file.name for file in Path("/dev").glob("nvidia[0-9]*")):
        return PACKAGED_HARDWARE, f"this machine has a GPU ({gpus[0]}) but no profile; {meanwhile} it"
    return PACKAGED_HARDWARE, ""


def machine_named(name: str) -> HardwareProfile:
    """Return the profile that a name or path stands for, as :func:`hwprofiles.registry.load_profile` does.

    Raises:
        ProfileError: no profile has that name, or it is not valid.
        ValueError: ``local`` was measured on another machine.
    """
    profile = load_profile(name)
    if name == LOCAL:
        check_measured_here(profile, otherwise=", or name the profile by its path")
    return profile


def print_default_hardware(args: argparse.Namespace) -> None:
    """If ``--hardware`` was left out, print the note about the default, if any, to stderr."""
    if args.hardware is None and (note := default_hardware()[1]):
        sys.stderr.write(f"ullage {args.command}: {note}\n")


def _is_calibrated(path: Path) -> bool:
    try:
        return load_profile(str(path.absolute())).measured_on is not None
    except ProfileError:
        return False
