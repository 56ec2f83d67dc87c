"""The words of a request: what its options may say, and their defaults. Imported to parse a command line, so light."""

from typing import Final, Literal, get_args

Storage = Literal["never", "activations", "nvme"]
"""What may be used beside device and host: nothing; the host for activations; or that and drives for anything."""

DEFAULT_MICRO_BATCH: Final = 4
"""Sequences per forward on each device."""

Level = Literal["memory", "nvme", "pfs"]
"""Memory of the node (survives a process), its drives (survive a loss of power), the file system that all nodes share
(survives the node)."""

LEVELS: Final[tuple[Level, ...]] = get_args(Level)
"""Fastest first. What one survives all slower ones do."""

DEFAULT_RESTART_S: Final = 60.0
"""From a failure until checkpoints can be read again; assumed."""

LEAST_KEPT: Final = 2
"""Checkpoints that stay at each level, unless more are asked for: one may be bad."""
