"""Parallel patterns: how an operator is divided among devices.

[Note: Patterns] A pattern is a property of an operator. It tells the planner one number: how many different parts of
the operator's parameters the data-parallel ranks hold, 1 if all ranks hold the same. Ranks with the same part reduce
its gradient, and shard its optimizer state and parameters under ZeRO. The operator's kernels say what a rank computes
and sends. So a new pattern needs no change of lowering, prices, bounds or search.
"""

import dataclasses
from collections.abc import Callable
from typing import ClassVar


@dataclasses.dataclass(frozen=True, slots=True)
class Degrees:
    """Degrees of parallelism.

    Attributes:
        data_parallel: ranks that each work on tokens of their own.
        tensor_parallel: ranks that share every layer, in each data-parallel rank.
        pipeline_parallel: stages that share the layers, in each data-parallel rank.
        expert_parallel: data-parallel ranks that share the experts of every layer; divides ``data_parallel``.
    """

    data_parallel: int = 1
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    expert_parallel: int = 1

    @property
    def num_devices(self) -> int:
        """All ranks, each with one device."""
        return self.data_parallel * self.tensor_parallel * self.pipeline_parallel


def _one(_degrees: Degrees) -> int:
    return 1


@dataclasses.dataclass(frozen=True, slots=True)
class Pattern:
    """One way to divide an operator among devices; see [Note: Patterns].

    Attributes:
        name: shown on screens.
        parts: the number of different parts of its parameters that data-parallel ranks hold.
    """

    name: str
    parts: Callable[[Degrees], int] = _one

    REPLICATE: ClassVar["Pattern"]
    SHARD: ClassVar["Pattern"]
    COLUMN: ClassVar["Pattern"]
    ROW: ClassVar["Pattern"]
    EXPERT: ClassVar["Pattern"]


def _experts(degrees: Degrees) -> int:
    return degrees.expert_parallel


# Every device computes all of it.
Pattern.REPLICATE = Pattern("replicate")
# No parameters: every device computes its share of heads, channels or vocabulary.
Pattern.SHARD = Pattern("shard")
# Weights split by output over tensor-parallel ranks: no communication before, a share of the output after.
Pattern.COLUMN = Pattern("column")
# Weights split by input over tensor-parallel ranks: partial sums, to be reduced after.
Pattern.ROW = Pattern("row")
# Whole experts on some of the data-parallel ranks: tokens are exchanged before and after.
Pattern.EXPERT = Pattern("expert", _experts)
