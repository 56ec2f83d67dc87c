"""Calibration: measure this machine, with the kernels that the executor runs, and build its hardware profile."""

try:
    import torch  # noqa: F401 - if torch is missing, the message below says how to install it
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "calibration measures with torch, which is not installed; pip install 'ullage[execute]'", name=error.name
    ) from error

from ullage.calibrate.options import CalibrationOptions, Pair, parse_only
from ullage.calibrate.ranks import calibrate_ranks
from ullage.calibrate.run import calibrate

__all__ = ["CalibrationOptions", "Pair", "calibrate", "calibrate_ranks", "parse_only"]
