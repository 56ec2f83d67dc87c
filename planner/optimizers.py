"""Optimizers as planning sees them: bytes of state and traffic per parameter, and which parameters they take.

The executor has their arithmetic, with an entry for each of these in :mod:`executor.optimizer.table`. Any other
optimizer of PyTorch that treats each value by itself is planned by what it keeps (:data:`ELEMENTWISE`), and takes its
own step.

[Note: Hidden matrices] Muon orthogonalizes the updates of whole matrices in hidden layers. All other parameters
(embeddings, norms, biases, the head, banks of experts) are AdamW's, in the same optimizer. A parameter is a hidden
matrix if it has two dimensions and lies in a list of layers, so that its path has a number. The planner and
``ullage.Muon`` both decide so, from name and shape alone.

[Note: Operators] On a GPU with Triton, an update of any AdamW is one kernel, which moves state, gradient and weight
once. If the profile says that there is none (``fuses_updates``), ``adamw-bf16``, ``adamw-8bit`` and split master copies
take chains of torch's operators: each reads and writes memory, and some make temporaries. Together they move many times
the bytes of the state, and profiles have only the time of AdamW. So rows have what the operators move, which a test
counts. They are for :data:`UPDATED_AT_ONCE` parameters at a time. The ledger has their temporaries in any case, as a
schedule does not depend on the profile: at most 100 MB. A host as the device has the same one pass as other updates on
the host. The operators of :data:`ELEMENTWISE` are those of the user's class. Their rows have about as much as
those of ``torch.optim`` need, on the host too.

[Note: Blocks] ``adamw-8bit`` keeps moments as ``bitsandbytes`` does: 8-bit codes of values between -1 and 1, and one
fp32 scale for each block of 256. Blocks are of one parameter, from its first value on. So parameters, shards and
subgroups begin at multiples of 256 in a unit's range, and no placement and no number of ranks changes a block. The
padding is small: hidden sizes are mostly multiples of 256. All parameters are kept so. ``bitsandbytes`` keeps those
with fewer than 4,096 values in fp32; norms and biases are too few for that to show in memory.
"""

import dataclasses
from collections.abc import Mapping
from typing import Final, Literal, get_args

_Elementwise = Literal["elementwise-0", "elementwise-1", "elementwise-2", "elementwise-3", "elementwise-4"]
Optimizer = Literal["adamw", "adamw-bf16", "adamw-8bit", "sgd", "adagrad", "lion", "muon", _Elementwise]
"""AdamW (or Adam, whose state is the same), the same with bf16 moments and with 8-bit ones, SGD with momentum, Adagrad,
Lion, Muon beside AdamW, and others by what they keep."""

ELEMENTWISE: Final[tuple[Optimizer, ...]] = get_args(_Elementwise)
"""Optimizers that have no kernel of ours and treat each value by itself, by how many values they keep for each."""

UPDATED_AT_ONCE: Final = 1 << 22
"""Parameters that a chain of operators updates at once on a GPU: temporaries are bounded, launches are few."""


@dataclasses.dataclass(frozen=True, slots=True)
class OptimizerState:
    """State of one optimizer.

    Attributes:
        words: a description for people.
        num_buffers: values per parameter in addition to the master copy, without scales.
        others: the optimizer of all parameters that are no hidden matrices [Note: Hidden matrices]; ``None`` if this
            one takes all.
        buffer_bytes: of one value beside the master copy.
        master_bytes: of one value of the master copy.
        block_params: parameters that share one fp32 scale for each of these values [Note: Blocks]; 0 without scales.
        rounded: the same with a master copy in bf16, which is the weight itself and is rounded stochastically; ``None``
            if it only has one in fp32.
        wide: the optimizer that has the same buffers in fp32; ``None`` if this one does.
        fuses: whether one kernel updates on a GPU, where the executor has Triton [Note: Operators].
        gpu_update_bytes: what an update on a GPU moves per parameter, if it is made of torch's operators; ``None`` for
            about as much as state, gradient and weight are.
        gpu_scratch_bytes: what such an update holds meanwhile, the scaled gradient included, per parameter that it
            updates at once.
        host_core_s: what one core needs for one parameter on the host, where that is more than memory needs. It is for
            profiles without ``narrow_update_s``. An AMD EPYC with AVX-512 needs that: see one thread in
            ``benchmarks/results/cpu_narrow_state_epyc.json``.
    """

    words: str
    num_buffers: int
    others: Optimizer | None = None
    buffer_bytes: int = 4
    master_bytes: int = 4
    block_params: int = 0
    rounded: "OptimizerState | None" = None
    wide: Optimizer | None = None
    fuses: bool = False
    gpu_update_bytes: int | None = None
    gpu_scratch_bytes: int = 0
    host_core_s: float = 0.0

    @property
    def lays_out(self) -> bool:
        """Whether the layout of a unit depends on the sizes of its parameters, and not on their sum alone."""
        return self.others is not None or self.block_params > 0

    @property
    def buffers(self) -> tuple[tuple[int, int], ...]:
        """What it keeps beside the master copy: the bytes of each value, and how many parameters share it."""
        scales = ((4, self.block_params),) * self.num_buffers if self.block_params else ()
        return (*((self.buffer_bytes, 1),) * self.num_buffers, *scales)

    @property
    def buffer_bytes_per_param(self) -> float:
        """Bytes of buffers, scales included."""
        return self.num_buffers * (self.buffer_bytes + (4 / self.block_params if self.block_params else 0))

    @property
    def state_bytes_per_param(self) -> float:
        """Bytes of a master copy, and of buffers."""
        return self.master_bytes + self.buffer_bytes_per_param

    def scratch_bytes(self, num_params: int) -> int:
        """Return what an update of so many parameters on a GPU holds beside state and gradient."""
        return self.gpu_scratch_bytes * min(num_params, UPDATED_AT_ONCE)


def _rounding(row: OptimizerState, *, gpu_update_bytes: int, host_core_s: float) -> OptimizerState:
    """Return a row that may have a master copy in bf16, at other costs of an update."""
    rounded = dataclasses.replace(row, master_bytes=2, gpu_update_bytes=gpu_update_bytes, host_core_s=host_core_s)
    return dataclasses.replace(row, rounded=rounded)


OPTIMIZERS: Final[Mapping[Optimizer, OptimizerState]] = {
    "adamw": OptimizerState("AdamW", 2, fuses=True),
    "adamw-bf16": _rounding(
        OptimizerState(
            "AdamW with bf16 moments",
            2,
            fuses=True,
            buffer_bytes=2,
            wide="adamw",
            gpu_update_bytes=372,
            gpu_scratch_bytes=24,
            host_core_s=0.65e-9,
        ),
        gpu_update_bytes=548,
        host_core_s=0.6e-9,
    ),
    "adamw-8bit": _rounding(
        OptimizerState(
            "AdamW with 8-bit moments",
            2,
            fuses=True,
            buffer_bytes=1,
            block_params=256,
            wide="adamw",
            gpu_update_bytes=272,
            gpu_scratch_bytes=24,
            host_core_s=1.45e-9,
        ),
        gpu_update_bytes=448,
        host_core_s=1.5e-9,
    ),
    "sgd": OptimizerState("SGD with momentum", 1),
    "adagrad": OptimizerState("Adagrad", 1),
    "lion": OptimizerState("Lion", 1),
    "muon": OptimizerState("Muon", 1, others="adamw"),
    **{
        name: OptimizerState(
            f"an optimizer of its own, with {number} value{'s' * (number != 1)} of state per parameter",
            number,
            gpu_update_bytes=100 + 60 * number,
            gpu_scratch_bytes=16 + 8 * number,
            host_core_s=1e-8,
        )
        for number, name in enumerate(ELEMENTWISE)
    },
}


def is_hidden_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a parameter is a matrix of a hidden layer, with elements [Note: Hidden matrices]."""
    return len(shape) == 2 and min(shape) > 0 and any(part.isdigit() for part in name.split("."))
