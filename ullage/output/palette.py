"""Colours: each class of memory or work has the same colour in every picture.

The colours are those of Okabe and Ito ("Color Universal Design", 2008), which people with any kind of colour vision can
distinguish. On a dark background, the same hues are lighter.
"""

from enum import StrEnum
from typing import Final

from planner.schedule.tasks import MemoryClass, Op, Phase


class Work(StrEnum):
    """The purpose of a task, which determines its colour."""

    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTE = "computed again"
    UPDATE = "update"
    STATE = "optimizer state moves"
    PARAMETERS = "parameters move"
    GRADIENTS = "gradients move"
    ACTIVATIONS = "activations move"
    HOST = "host work"
    CHECKPOINT = "checkpoint"


_OPS = {
    Work.FORWARD: (Op.FORWARD,),
    Work.BACKWARD: (Op.BACKWARD, Op.WEIGHT_GRADIENT),
    Work.RECOMPUTE: (Op.RECOMPUTE, Op.REMAKE),
    Work.UPDATE: (Op.UPDATE,),
    Work.STATE: (Op.LOAD, Op.STORE, Op.SWAP_IN, Op.SWAP_OUT),
    Work.PARAMETERS: (Op.FETCH, Op.GATHER, Op.UPLOAD, Op.READ),
    Work.GRADIENTS: (Op.SCATTER, Op.FLUSH, Op.OVERWRITE, Op.SPILL),
    Work.ACTIVATIONS: (Op.OFFLOAD, Op.EVICT, Op.RECALL, Op.RELOAD, Op.SEND),
    Work.HOST: (Op.PASS, Op.CAST, Op.CLIP, Op.ISSUE, Op.RECEIVE, Op.STEP, Op.LOOP),
    Work.CHECKPOINT: (Op.CREATE, Op.TOUCH, Op.SNAPSHOT, Op.WRITE, Op.PROMOTE, Op.VERIFY, Op.GATE),
}
WORK: Final[dict[Op, Work]] = {op: work for work, ops in _OPS.items() for op in ops}
"""The purpose of every operation."""


Colour = tuple[str, str]
"""One colour on a light background and on a dark one, as ``#rrggbb``."""

_BLUE, _SKY = ("#0072b2", "#4ba3dc"), ("#56b4e9", "#9ad4f5")
_GREEN, _VERMILION = ("#009e73", "#2fc79b"), ("#d55e00", "#ff8b47")
_ORANGE, _PURPLE = ("#e69f00", "#f5bd3d"), ("#cc79a7", "#e6a3c8")
_GREY, _OLIVE = ("#8c8c8c", "#a0a0a0"), ("#a89c00", "#e3d84f")

COLOURS: Final[dict[str, Colour]] = {
    MemoryClass.PARAMETERS: _BLUE,
    MemoryClass.OPTIMIZER: _GREEN,
    MemoryClass.GRADIENTS: _VERMILION,
    MemoryClass.ACTIVATIONS: _ORANGE,
    MemoryClass.WORKSPACE: _SKY,
    MemoryClass.CHECKPOINT: _OLIVE,
    Work.FORWARD: _SKY,
    Work.BACKWARD: _PURPLE,
    Work.RECOMPUTE: ("#7a5c86", "#b48fc4"),
    Work.UPDATE: _GREEN,
    Work.STATE: ("#7cc9ae", "#1d8a69"),
    Work.PARAMETERS: _BLUE,
    Work.GRADIENTS: _VERMILION,
    Work.ACTIVATIONS: _ORANGE,
    Work.HOST: _GREY,
    Work.CHECKPOINT: _OLIVE,
    "down": _BLUE,
    "up": _VERMILION,
    "device": _BLUE,
    "cores": _VERMILION,
    "dram": _GREEN,
    "first": _BLUE,
    "second": _VERMILION,
    "third": _GREEN,
    "fourth": _ORANGE,
    "fifth": _PURPLE,
    "sixth": _SKY,
    "least": ("#e3f0f8", "#1c2c38"),
    "middle": ("#4ba3dc", "#2f7fb3"),
    "most": ("#003b5c", "#c3e6fb"),
    "bad": ("#b3261e", "#ff8a80"),
    "quiet": _GREY,
    "ink": ("#1a1d21", "#e8eaed"),
    "paper": ("#ffffff", "#15181c"),
    "grid": ("#dfe3e8", "#30363d"),
    "soft": ("#565d66", "#a3abb5"),
    f"phase {Phase.FORWARD}": ("#e4ebf3", "#1d2733"),
    f"phase {Phase.BACKWARD}": ("#ffffff", "#15181c"),
    f"phase {Phase.UPDATE}": ("#eeeeee", "#23272c"),
    f"phase {Phase.LOOP}": ("#f6f0e2", "#2c281d"),
}
"""Every colour by its class; ``first`` to ``sixth`` are for data without a class."""

SCALE: Final = ("least", "middle", "most")
"""Names of colours for the ends of a scale of amounts: one hue of different lightness."""

ORDINALS: Final = ("first", "second", "third", "fourth", "fifth", "sixth")
"""Names of colours for data without a class, in the order of use."""
