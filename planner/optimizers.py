"""Optimizers as planning sees them: bytes of state and traffic per parameter, and which parameters they take.

The executor has their arithmetic, with an entry for each of these in :mod:`executor.optimizer.table`.

[Note: Hidden matrices] Muon orthogonalizes the updates of whole matrices in hidden layers. All other parameters
(embeddings, norms, biases, the head, banks of experts) are AdamW's, in the same optimizer. A parameter is a hidden
matrix if it has two dimensions and lies in a list of layers, so that its path has a number. The planner and
``ullage.Muon`` both decide so, from name and shape alone.
"""

import dataclasses
from collections.abc import Mapping
from typing import Final, Literal

Optimizer = Literal["adamw", "adamw-bf16", "sgd", "adagrad", "lion", "muon"]
"""AdamW (or Adam, whose state is the same), the same with bf16 moments, SGD with momentum, Adagrad, Lion, and Muon
beside AdamW."""


@dataclasses.dataclass(frozen=True, slots=True)
class OptimizerState:
    """State of one optimizer.

    Attributes:
        words: a description for people.
        num_buffers: values per parameter in addition to the master copy.
        others: the optimizer of all parameters that are no hidden matrices [Note: Hidden matrices]; ``None`` if this
            one takes all.
        buffer_bytes: of one value beside the master copy, which is fp32.
    """

    words: str
    num_buffers: int
    others: Optimizer | None = None
    buffer_bytes: int = 4

    @property
    def state_bytes_per_param(self) -> int:
        """Bytes of an fp32 master copy, and of buffers."""
        return 4 + self.buffer_bytes * self.num_buffers

    def bytes_per_param(self, value_bytes: int) -> int:
        """Return the bytes of master copy and buffers, where an engine keeps all of them in one type."""
        return value_bytes * (1 + self.num_buffers)


OPTIMIZERS: Final[Mapping[Optimizer, OptimizerState]] = {
    "adamw": OptimizerState("AdamW", 2),
    "adamw-bf16": OptimizerState("AdamW with bf16 moments", 2, buffer_bytes=2),
    "sgd": OptimizerState("SGD with momentum", 1),
    "adagrad": OptimizerState("Adagrad", 1),
    "lion": OptimizerState("Lion", 1),
    "muon": OptimizerState("Muon", 1, others="adamw"),
}


def is_hidden_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a parameter is a matrix of a hidden layer [Note: Hidden matrices]."""
    return len(shape) == 2 and any(part.isdigit() for part in name.split("."))
