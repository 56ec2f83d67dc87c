"""Parallel patterns: how an operator is divided among devices.

[Note: Patterns] A pattern is a property of an operator. It tells the planner one number: how many different parts of
the operator's parameters the data-parallel ranks hold, 1 if all ranks hold the same. Ranks with the same part reduce
its gradient, and shard its optimizer state and parameters under ZeRO. The operator's kernels say what a rank computes
and sends. So a new pattern needs no change of lowering, prices, bounds or search.
"""

import dataclasses
from collections.abc import Callable
from typing import ClassVar

from planner.models.choice import Choice


def _one(_choice: Choice) -> int:
    return 1


@dataclasses.dataclass(frozen=True, slots=True)
class Pattern:
    """One way to divide an operator among devices; see [Note: Patterns].

    Attributes:
        name: shown on screens.
        parts: the number of different parts of its parameters that data-parallel ranks hold.
    """

    name: str
    parts: Callable[[Choice], int] = _one

    REPLICATE: ClassVar["Pattern"]
    SHARD: ClassVar["Pattern"]
    COLUMN: ClassVar["Pattern"]
    ROW: ClassVar["Pattern"]
    EXPERT: ClassVar["Pattern"]


def _experts(choice: Choice) -> int:
    return choice.expert_parallel


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
