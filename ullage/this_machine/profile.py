"""This machine's own profile: load it, or measure and save it."""

import sys

import torch

from hwprofiles.machine import differences
from hwprofiles.profile import HardwareProfile
from hwprofiles.registry import LOCAL, load_profile, local_profile_path, save_profile
from ullage.calibrate import CalibrationOptions, calibrate
from ullage.output.progress import seconds_bar


def profile_here() -> HardwareProfile:
    """Return this machine's profile, the default of ``--hardware``. Without one, measure half a minute and save it.

    If the file has the profile of another machine, that profile is renamed to ``.json.old``.

    Raises:
        ProfileError: the saved profile cannot be read.
        ValueError: this machine cannot be measured.
    """
    path = local_profile_path()
    why = "this machine has no profile"
    if path.is_file():
        local = load_profile(LOCAL)
        if not (others := differences(local)):
            return local
        why = f"{path} was measured on another machine ({'; '.join(others)})"
    print_line(f"{why}: measuring it once, for half a minute")
    options = CalibrationOptions(quick=True)
    with seconds_bar() as progress, torch.random.fork_rng():  # the RNG state does not change
        profile, _ = calibrate(options, progress)
    try:
        if path.is_file():
            path.replace(path.with_suffix(".json.old"))
        save_profile(profile, path)
    except OSError as error:
        print_line(
            f"the profile cannot be saved ({error}), so the next call measures again; set ULLAGE_HOME to a folder"
        )
    else:
        print_line(f"profile written to {path}; `ullage calibrate` measures more exactly, in four minutes")
    return profile


def print_line(words: str) -> None:
    """Print a line about what is going on to stderr, where results are not."""
    sys.stderr.write(f"ullage: {words}\n")
    sys.stderr.flush()
