"""Calibration: measure this machine, with the kernels that the executor runs, and build its hardware profile."""

try:
    import torch  # noqa: F401 - if torch is missing, the message below says how to install it
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "calibration measures with torch, which is not installed; pip install 'ullage[execute]'", name=error.name
    ) from error

from ullage.calibrate.fabric import calibrate_collectives
from ullage.calibrate.options import (
    CalibrationOptions,
    Pair,
    parse_only,
)
from ullage.calibrate.run import calibrate

__all__ = [
    "CalibrationOptions",
    "Pair",
    "calibrate",
    "calibrate_collectives",
    "parse_only",
]
