"""What a recording of a module consists of: its calls, operators, storages, and the tensors that autograd saves."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, Final, Literal

import torch
from torch import nn

from planner.models.kernels import Kernels
from ullage.capture.repeats import Copy

DTYPES: Final[dict[Literal["bf16", "fp32"], torch.dtype]] = {"bf16": torch.bfloat16, "fp32": torch.float32}
"""The types of weights that are planned, by name."""


@dataclasses.dataclass(slots=True)
class Visit:
    """One call of a module's forward.

    Attributes:
        parent: index of the visit it was called from; -1 for the model's own.
        first, stop: range of forward events.
        input_bytes: of the tensors it was given that have a gradient: what recomputation must keep.
        inputs: their storages; where none has a gradient, that of the first.
    """

    path: str
    module: nn.Module
    parent: int
    first: int
    stop: int = -1
    input_bytes: int = 0
    inputs: frozenset[int] = frozenset()


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """One operator that was dispatched.

    Attributes:
        visit: index of the visit that ran it; in backward that of the forward whose gradient it computes.
        source: index of the forward event that it belongs to: itself, or the one whose autograd node runs.
        kernels: empty for views and bookkeeping.
        storages: numbers of the storages it wrote.
        output_bytes: of its first result.
        product_bytes: of all floating results, if it is a product and they stay as it made them.
        parameters: names of those it read.
    """

    visit: int
    source: int
    kernels: Kernels
    storages: tuple[int, ...]
    output_bytes: int
    product_bytes: int
    parameters: tuple[str, ...]


@dataclasses.dataclass(slots=True)
class Storage:
    """Memory that was allocated.

    Attributes:
        born, died: first and last event at which it exists; -1 if it exists before the first.
        owner: ``parameter``, ``buffer``, ``input``, ``gradient`` of a parameter, or empty.
    """

    num_bytes: int
    born: int
    died: int | None = None
    owner: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Save:
    """A tensor that autograd keeps.

    Attributes:
        position: number of forward events before it was saved.
    """

    storage: int
    position: int
    visit: int


@dataclasses.dataclass(frozen=True)
class Recording:
    """What happened.

    Attributes:
        forward, backward: events; backward ones are numbered from ``len(forward)`` on.
        loss: what backward began from, in words.
        gradients: numbers of the storages that parameters' gradients are in at the end.
        sums: of every sum in backward, the storages that it was made of.
        num_values: of every input, how many different integers it may hold, where it is looked up in a table.
        copies: blocks that were not recorded, as they are like others.
        begins: forward events before which blocks of lists with copies were called, in order.
        arrivals: of visits to whose results backward came, in order, how many backward events had been dispatched.
        tiled: paths of modules that compute in tiles.
    """

    model: nn.Module
    visits: list[Visit]
    forward: list[Event]
    backward: list[Event]
    storages: list[Storage]
    saves: list[Save]
    loss: str
    gradients: dict[str, int]
    sums: dict[int, tuple[int, ...]]
    num_values: list[int | None]
    arrivals: list[tuple[int, int]]
    copies: list[Copy] = dataclasses.field(default_factory=list)
    begins: list[int] = dataclasses.field(default_factory=list)
    tiled: frozenset[str] = frozenset()

    @functools.cached_property
    def skipped(self) -> frozenset[int]:
        """Forward events that ran in place of copied blocks, or between one and the next block."""
        return frozenset(index for copy in self.copies for index in range(copy.first, copy.stop))

    def is_copied(self, name: str) -> bool:
        """Return whether a parameter is in a copied block."""
        return name.startswith(self._copied)

    @functools.cached_property
    def _copied(self) -> tuple[str, ...]:
        return tuple(f"{copy.path}." for copy in self.copies)


class CaptureError(ValueError):
    """A model that cannot be captured, and what to do about it."""


def nodes(root: Any) -> Iterator[Any]:
    """Yield all autograd nodes behind ``root``."""
    seen, left = {root}, [root]
    while left:
        node = left.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                left.append(following)
