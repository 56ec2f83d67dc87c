"""Optimizers as planning sees them: bytes of state and traffic per parameter, and which parameters they take.

The executor has their arithmetic, with an entry for each of these in :mod:`executor.optimizer.table`.

[Note: Hidden matrices] Muon orthogonalizes the updates of whole matrices in hidden layers. All other parameters
(embeddings, norms, biases, the head, banks of experts) are AdamW's, in the same optimizer. A parameter is a hidden
matrix if it has two dimensions and lies in a list of layers, so that its path has a number. The planner and
``ullage.Muon`` both decide so, from name and shape alone.

[Note: Operators] On a GPU, ``adamw-bf16`` is a chain of torch's operators: each reads and writes memory, and some make
temporaries. Together they move many times the bytes of the state, and profiles have only the time of the fused AdamW.
So its row has what its operators move, which a test counts, and the ledger has its temporaries. They are for
:data:`UPDATED_AT_ONCE` parameters at a time. A host as the device has the same one pass as other updates on the host.
"""

import dataclasses
from collections.abc import Mapping
from typing import Final, Literal

Optimizer = Literal["adamw", "adamw-bf16", "sgd", "adagrad", "lion", "muon"]
"""AdamW (or Adam, whose state is the same), the same with bf16 moments, SGD with momentum, Adagrad, Lion, and Muon
beside AdamW."""

UPDATED_AT_ONCE: Final = 1 << 22
"""Parameters that a chain of operators updates at once on a GPU: temporaries are bounded, launches are few."""


@dataclasses.dataclass(frozen=True, slots=True)
class OptimizerState:
    """State of one optimizer.

    Attributes:
        words: a description for people.
        num_buffers: values per parameter in addition to the master copy.
        others: the optimizer of all parameters that are no hidden matrices [Note: Hidden matrices]; ``None`` if this
            one takes all.
        buffer_bytes: of one value beside the master copy, which is fp32.
        wide: the optimizer that has the same buffers in fp32; ``None`` if this one does.
        gpu_update_bytes: what an update on a GPU moves per parameter, if it is made of torch's operators because no
            fused kernel does it [Note: Operators]; ``None`` for about as much as state, gradient and weight are.
        gpu_scratch_bytes: what such an update holds meanwhile, the scaled gradient included, per parameter that it
            updates at once.
        host_core_s: what one core needs for the arithmetic of one parameter on the host. It counts where that is more
            than memory needs: ``benchmarks/cpu/adamw_bf16.py`` measures both.
    """

    words: str
    num_buffers: int
    others: Optimizer | None = None
    buffer_bytes: int = 4
    wide: Optimizer | None = None
    gpu_update_bytes: int | None = None
    gpu_scratch_bytes: int = 0
    host_core_s: float = 0.0

    @property
    def state_bytes_per_param(self) -> int:
        """Bytes of an fp32 master copy, and of buffers."""
        return 4 + self.buffer_bytes * self.num_buffers

    def scratch_bytes(self, num_params: int) -> int:
        """Return what an update of so many parameters on a GPU holds beside state and gradient."""
        return self.gpu_scratch_bytes * min(num_params, UPDATED_AT_ONCE)

    def bytes_per_param(self, value_bytes: int) -> int:
        """Return the bytes of master copy and buffers, where an engine keeps all of them in one type."""
        return value_bytes * (1 + self.num_buffers)


OPTIMIZERS: Final[Mapping[Optimizer, OptimizerState]] = {
    "adamw": OptimizerState("AdamW", 2),
    "adamw-bf16": OptimizerState(
        "AdamW with bf16 moments",
        2,
        buffer_bytes=2,
        wide="adamw",
        gpu_update_bytes=380,
        gpu_scratch_bytes=24,
        host_core_s=1.25e-9,
    ),
    "sgd": OptimizerState("SGD with momentum", 1),
    "adagrad": OptimizerState("Adagrad", 1),
    "lion": OptimizerState("Lion", 1),
    "muon": OptimizerState("Muon", 1, others="adamw"),
}


def is_hidden_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a parameter is a matrix of a hidden layer [Note: Hidden matrices]."""
    return len(shape) == 2 and any(part.isdigit() for part in name.split("."))
