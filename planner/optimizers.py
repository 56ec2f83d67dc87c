"""Optimizers as planning sees them: bytes of state and traffic per parameter.

The executor has their arithmetic, with an entry for each of these in :mod:`executor.optimizer.table`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Final, Literal

Optimizer = Literal["adamw", "sgd", "adagrad", "lion"]
"""AdamW (or Adam, whose state is the same), SGD with momentum, Adagrad, Lion."""


@dataclasses.dataclass(frozen=True, slots=True)
class OptimizerState:
    """Fp32 state of one optimizer.

    Attributes:
        words: a description for people.
        num_buffers: values per parameter in addition to the master copy.
    """

    words: str
    num_buffers: int

    @property
    def state_bytes_per_param(self) -> int:
        """Bytes of master copy and buffers."""
        return 4 * (1 + self.num_buffers)

    @property
    def update_bytes_per_param(self) -> int:
        """Bytes that one fused pass moves: bf16 gradient and state in, state and bf16 weight out."""
        return 2 + 2 * self.state_bytes_per_param + 2


OPTIMIZERS: Final[Mapping[Optimizer, OptimizerState]] = {
    "adamw": OptimizerState("AdamW", 2),
    "sgd": OptimizerState("SGD with momentum", 1),
    "adagrad": OptimizerState("Adagrad", 1),
    "lion": OptimizerState("Lion", 1),
}

# Profiles contain the time of AdamW's update.
MEASURED: Final = OPTIMIZERS["adamw"]
