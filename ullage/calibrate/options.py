"""Options of calibration, and what it reports beside the profile."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from hwprofiles.catalogue import PARTS, Part
from hwprofiles.profile import NAME_PATTERN, HardwareProfile

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]

#: ``progress(step, done_s, total_s)``: called before each step and once after the last; seconds are of the budget.
Progress = Callable[[str, float, float], None]


@dataclasses.dataclass(frozen=True)
class CalibrationOptions:
    """What to measure, and how thoroughly.

    Attributes:
        quick: fewer and smaller sizes, about half a minute; otherwise about four minutes.
        name: the profile's name; by default derived from the host's name.
        device_cores: kind ``host`` only: cores that stand in for the device (default: half of them, at least 1).
        device_memory_bytes: memory that training may use on the device (default: the free memory of a GPU; a quarter
            of the usable memory for kind ``host``).
        host_memory_bytes: memory that training may use on the host (default: 85 % of what is free, less the device's
            for kind ``host``).
        scratch_dir: existing directory on the disk to measure (default: a temporary one below ``~/.cache``). Nothing is
            left there.
        device: ``gpu``, ``host``, or ``None`` for the GPU if there is one.
        budget_s: seconds to measure all parts, in place of the default of ``quick``. Sizes that take too long for this
            budget are left out. Every other size is measured at least three times.
        only: parts to measure, each with its folder if one is given; ``None``: all but ``pfs``. The other parts are
            copied from ``base``.
        base: this machine's profile, in which the parts of ``only`` are replaced.
        endurance_bytes_per_day: bytes that may be written to the drives per day, from their data sheet.
        is_rank: whether other ranks measure at the same time. Then the host's own time stays that of ``base``: the tiny
            model that takes it would train over all ranks.
    """

    quick: bool = False
    name: str | None = None
    device_cores: int | None = None
    device_memory_bytes: int | None = None
    host_memory_bytes: int | None = None
    scratch_dir: Path | None = None
    device: str | None = None
    budget_s: float | None = None
    only: Mapping[Part, Path | None] | None = None
    base: HardwareProfile | None = None
    endurance_bytes_per_day: float | None = None
    is_rank: bool = False

    def __post_init__(self) -> None:
        if self.only is not None and self.base is None:
            raise ValueError("only some parts are to be measured; give the profile whose other parts stay")
        if self.device not in {None, "gpu", "host"}:
            raise ValueError(f"device is {self.device!r}; choose 'gpu' or 'host', or leave it out")
        if self.name is not None and not re.fullmatch(NAME_PATTERN, self.name):
            raise ValueError(
                f"name is {self.name!r}; start with a lower-case letter or digit, then letters, digits, '.', '_' or '-'"
            )
        for field in (
            "device_cores",
            "device_memory_bytes",
            "host_memory_bytes",
            "budget_s",
            "endurance_bytes_per_day",
        ):
            value = getattr(self, field)
            if value is not None and not value > 0:
                raise ValueError(f"{field} is {value}; give a positive number, or leave it out")

    def measures(self, part: Part) -> bool:
        """Return whether to measure a part."""
        return part != "pfs" if self.only is None else part in self.only

    def folder(self, part: Part) -> Path | None:
        """Return the folder in which to measure a part, if one was given."""
        return (self.only or {}).get(part) or (self.scratch_dir if part == "disk" else None)

    def total_s(self, *, on_gpu: bool) -> float:
        """Return seconds to measure all parts; first calls on a GPU, and the memory to measure with, come on top."""
        if self.budget_s is not None:
            return self.budget_s
        return (30.0 if self.quick else 210.0) if on_gpu else (29.0 if self.quick else 240.0)


def parse_only(text: str) -> dict[Part, Path | None]:
    """Return parts from ``cpu,disk:/mnt/nvme``.

    Raises:
        ValueError: a part does not exist, takes no folder, or needs one.
    """
    found: dict[Part, Path | None] = {}
    for word in text.split(","):
        name, colon, folder = word.strip().partition(":")
        part = next((part for part in get_args(Part) if part == name), None)
        if part is None:
            raise ValueError(f"there is no part {name!r}; choose of {', '.join(PARTS)}")
        if colon and (part not in {"disk", "pfs"} or not folder):
            raise ValueError(f"{word!r}: disk and pfs alone have a folder, as in disk:/mnt/nvme; leave it out")
        if part == "pfs" and not folder:
            raise ValueError("pfs needs a folder of the shared file system, as in pfs:/scratch/me")
        found[part] = Path(folder) if folder else None
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    """Seconds per repetition of one activity, alone and beside other activities.

    Attributes:
        what: the activity, and what ran beside it.
        alone_s, paired_s: seconds per repetition.
        predicted: the slow-down that the profile's ``dram_bytes_per_s`` implies; ``None`` if the activity's demand on
            DRAM is not known.
    """

    what: str
    alone_s: float
    paired_s: float
    predicted: float | None = None

    @property
    def slow_down(self) -> float:
        """``paired_s / alone_s``."""
        return self.paired_s / self.alone_s
