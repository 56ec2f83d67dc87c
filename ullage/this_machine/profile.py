"""This machine's own profile: the stored one, or else one that is measured now and stored."""

import sys

import torch

from hwprofiles.calibrate import CalibrationOptions, calibrate
from hwprofiles.machine import differences
from hwprofiles.profile import HardwareProfile
from hwprofiles.registry import LOCAL, load_profile, local_profile_path, save_profile
from ullage.output.progress import seconds_bar
from ullage.this_machine.kernels import kernels


def profile_here() -> HardwareProfile:
    """Return this machine's profile, where ``--hardware`` finds it; without one, measure half a minute and keep it.

    A profile of another machine under this machine's name stays beside the new one, as ``.json.old``.

    Raises:
        ProfileError: the stored profile cannot be read.
        CalibrationError: this machine cannot be measured.
    """
    path = local_profile_path()
    why = "this machine has no profile"
    if path.is_file():
        local = load_profile(LOCAL)
        if not (others := differences(local)):
            return local
        why = f"{path} was measured on another machine ({'; '.join(others)})"
    _say(f"{why}: measuring this one, once, for half a minute")
    options = CalibrationOptions(quick=True)
    with seconds_bar() as progress, torch.random.fork_rng():  # training draws what it would have drawn
        profile, _ = calibrate(options, kernels(), progress)
    try:
        if path.is_file():
            path.replace(path.with_suffix(".json.old"))
        save_profile(profile, path)
    except OSError as error:
        _say(f"the profile cannot be kept ({error}), so the next time measures again; set ULLAGE_HOME to a folder")
    else:
        _say(f"profile written to {path}; `ullage calibrate` measures more exactly, in four minutes")
    return profile


def _say(words: str) -> None:
    sys.stderr.write(f"ullage: {words}\n")
    sys.stderr.flush()
