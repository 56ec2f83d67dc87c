"""The allowed values and defaults of a request's options. The command line's parser imports this, so it is light."""

from typing import Final, Literal, get_args

AuditTime = Literal["first", "off"] | int
"""When a session audits itself: in its first iterations; never; or in the first ones after every so many."""

CoreChoice = tuple[int, ...] | Literal["auto", "free"]
"""Cores that the ranks of a machine divide.

``auto``: all cores that the process may use; if there are several ranks, each process is bound to its share. ``free``:
the same cores, but nothing is bound.
"""

Storage = Literal["never", "activations", "nvme"]
"""What a plan may use: ``never`` no storage; the host for activations too; or also drives for anything."""

KernelChoice = Literal["transformers", "compiled", "compiled-layers", "liger"]
"""Kernel sets that a plan can be made for; see [Note: Kernel sets] in :mod:`planner.models.formulas.kernel_sets`."""

KernelRequest = Literal["transformers", "compiled", "compiled-layers", "liger", "auto"]
"""The same, or the fastest of those that can be executed."""

COMPILED: Final[tuple[KernelChoice, ...]] = ("compiled", "compiled-layers")
"""Those that ``torch.compile`` makes."""

DEFAULT_SEQ_LEN: Final = 2048
"""Tokens per sequence, or the model's limit if that is smaller."""

DEFAULT_MICRO_BATCH: Final = 4
"""Sequences per forward on each device; fewer if they are long, see :func:`default_micro_batch`."""

_MOST_DEFAULT_TOKENS: Final = 32768


def default_micro_batch(seq_len: int) -> int:
    """Return the sequences per forward on each device where that is not given: 4, or those of 32,768 tokens."""
    return max(min(DEFAULT_MICRO_BATCH, _MOST_DEFAULT_TOKENS // seq_len), 1)


Level = Literal["memory", "nvme", "pfs"]
"""Memory of the node (survives a process), its drives (survive a loss of power), the file system that all nodes share
(survives the node)."""

LEVELS: Final[tuple[Level, ...]] = get_args(Level)
"""Fastest first. A slower level survives every failure that a faster one survives."""

DAY_S: Final = 86400.0
"""Seconds of a day."""

DEFAULT_RESTART_S: Final = 60.0
"""Seconds from a failure until checkpoints can be read again; assumed."""

MIN_CHECKPOINTS: Final = 2
"""Checkpoints that each level keeps by default: two, because one may be bad."""
