"""Optimizers as planning sees them: bytes of state and traffic per parameter.

The executor has their arithmetic, with an entry for each of these in :mod:`executor.optimizer.table`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Final, Literal

Optimizer = Literal["adamw", "sgd", "adagrad", "lion", "muon"]
"""AdamW (or Adam, whose state is the same), SGD with momentum, Adagrad, Lion; Muon is only simulated so far."""


@dataclasses.dataclass(frozen=True, slots=True)
class OptimizerState:
    """State of one optimizer.

    Attributes:
        words: a description for people.
        num_buffers: values per parameter in addition to the master copy.
    """

    words: str
    num_buffers: int

    @property
    def state_bytes_per_param(self) -> int:
        """Bytes of master copy and buffers in fp32."""
        return self.bytes_per_param(4)

    def bytes_per_param(self, value_bytes: int) -> int:
        """Return the bytes of master copy and buffers."""
        return value_bytes * (1 + self.num_buffers)


ALL_OPTIMIZERS: Final[Mapping[Optimizer, OptimizerState]] = {
    "adamw": OptimizerState("AdamW", 2),
    "sgd": OptimizerState("SGD with momentum", 1),
    "adagrad": OptimizerState("Adagrad", 1),
    "lion": OptimizerState("Lion", 1),
    # Its matrices have a momentum. Embeddings, norms and head are AdamW's, whose second moment is left out here.
    "muon": OptimizerState("Muon", 1),
}
OPTIMIZERS: Final[Mapping[Optimizer, OptimizerState]] = {
    name: state for name, state in ALL_OPTIMIZERS.items() if name != "muon"
}
"""Those that our executor has."""
