"""Calibration: measure this machine and build its hardware profile.

The only part of :mod:`hwprofiles` that needs torch; :mod:`hwprofiles` itself does not import it.
"""

try:
    import torch  # noqa: F401 - if torch is missing, the message below says how to install it
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "calibration measures with torch, which is not installed; pip install 'ullage[execute]'", name=error.name
    ) from error

from hwprofiles.calibrate.options import (
    CalibrationOptions,
    Kernels,
    Pair,
    parse_only,
)
from hwprofiles.calibrate.ranks import calibrate_ranks
from hwprofiles.calibrate.run import calibrate

__all__ = [
    "CalibrationOptions",
    "Kernels",
    "Pair",
    "calibrate",
    "calibrate_ranks",
    "parse_only",
]
