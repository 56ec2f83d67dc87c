"""Types of weights, gradients and optimizer state."""

from typing import Literal, Self

from pydantic import model_validator

from hwprofiles.quantity import Frozen
from planner.optimizers import OPTIMIZERS, Optimizer, OptimizerState

# Over gradients in buffers: read for the check and for the norm, read and written to scale, written to clear.
_GRADIENT_PASSES = 5
TIE_PARAMS = 256
"""Parameters that share a tie of 16 bits, see [Note: Split masters] in :mod:`executor.optimizer.split`."""

SPLIT_OPERATOR_BYTES, SPLIT_SCRATCH_BYTES = 96, 14
"""What torch's operators move per parameter to join and split a master copy on a GPU, and what they hold meanwhile, the
scaled gradient included, per parameter that is updated at once; see [Note: Operators] in :mod:`planner.optimizers`."""


class Precision(Frozen):
    """Types of weights, gradients and optimizer state.

    Attributes:
        weights: the type of weights and activations.
        state: the type of all optimizer state; ``None`` is fp32, and that of the optimizer's row for its buffers, the
            only one that our executor has.
        gradients: the type in which gradients are summed over micro-batches and ranks; ``None`` is that of weights, the
            only one that our executor has.
        master: the form of the master copy; ``None`` is fp32, or the type of ``state``. ``split`` has the values of
            fp32: wherever it is not resident on the device, it is the weight in bf16 and a remainder of 16 bits, see
            [Note: Split masters] in :mod:`executor.optimizer.split`. A master copy in bf16 is the weight itself. Our
            executor has it for optimizers that round it stochastically.
        products: the type of the two matrices of products in linear layers of hidden layers, as torchao's
            ``Float8Linear`` computes them; ``None`` is that of weights. All other types stay.
    """

    weights: Literal["bf16", "fp32"]
    state: Literal["bf16"] | None = None
    gradients: Literal["fp32"] | None = None
    master: Literal["bf16", "split"] | None = None
    products: Literal["fp8"] | None = None

    @model_validator(mode="after")
    def _state_fits(self) -> Self:
        for name, found in (("state", self.state), ("master", self.master)):
            if found and self.weights != "bf16":
                raise ValueError(f"{name} {found} needs weights in bf16, not {self.weights}; change one")
        if self.splits and self.state:
            raise ValueError(
                f"master split has the values of fp32, but the state is {self.state}; leave one of them out"
            )
        return self

    @property
    def weight_bytes(self) -> Literal[2, 4]:
        """Bytes of one weight."""
        return 2 if self.weights == "bf16" else 4

    @property
    def without_fp8(self) -> Self:
        """The same types of what is kept and moved, with products in the type of weights."""
        return self.model_copy(update={"products": None})

    @property
    def gradient_bytes(self) -> Literal[2, 4]:
        """Bytes of one gradient."""
        return 4 if self.gradients else self.weight_bytes

    @property
    def master_bytes(self) -> Literal[2, 4]:
        """Bytes of one value of the master copy."""
        return 2 if self.state or self.rounds else 4

    @property
    def rounds(self) -> bool:
        """Whether the master copy is rounded to bf16."""
        return self.master == "bf16"

    @property
    def splits(self) -> bool:
        """Whether the master copy is split where it is not resident on the device."""
        return self.master == "split"

    @property
    def split(self) -> Self:
        """The same values, with master copies split if they can be."""
        can = self.weights == "bf16" and not (self.state or self.gradients or self.master)
        return self.model_copy(update={"master": "split"}) if can else self

    @property
    def whole(self) -> Self:
        """The same values, with whole master copies, as other engines have them."""
        return self.model_copy(update={"master": None}) if self.splits else self

    @property
    def master_is_weight(self) -> bool:
        """Whether the optimizer's master copy is the weight itself, if both are in one place."""
        return self.master_bytes == self.weight_bytes

    @property
    def weight_in_state(self) -> bool:
        """Whether the weight is a part of state that is not resident on the device."""
        return self.master_is_weight or self.splits

    def optimizer_state(self, optimizer: Optimizer) -> OptimizerState:
        """Return an optimizer's row, with the costs of rounding the master copy if it is bf16."""
        row = OPTIMIZERS[optimizer]
        return row.rounded if self.rounds and row.rounded else row

    def can_be_kept(self, optimizer: Optimizer) -> bool:
        """Return whether our executor can keep what an optimizer needs in these types."""
        known_master = not self.rounds or OPTIMIZERS[optimizer].rounded is not None
        return self.state is None and self.gradients is None and known_master

    def state_bytes_per_param(self, optimizer: Optimizer) -> float:
        """Return the bytes of optimizer state per parameter, the master copy included, without ties of split ones."""
        row = OPTIMIZERS[optimizer]
        return self.master_bytes + (2 * row.num_buffers if self.state else row.buffer_bytes_per_param)

    def update_bytes_per_param(self, optimizer: Optimizer, *, splits: bool = False) -> float:
        """Return the bytes that an update moves: gradient and state in; state and weight (unless it is in it) out.

        The state has the weight if the master copy is the weight, or ``splits``.

        Where gradients have a type of their own, they have buffers, which are checked, clipped and cleared in passes
        of their own (Megatron-Core's ``param_and_grad_buffer.py`` and ``clip_grads.py``).
        """
        weight_bytes = 0 if splits or self.master_is_weight else self.weight_bytes
        passes = _GRADIENT_PASSES * self.gradient_bytes if self.gradients else 0
        return self.gradient_bytes + 2 * self.state_bytes_per_param(optimizer) + weight_bytes + passes


BF16, FP32 = Precision(weights="bf16"), Precision(weights="fp32")
