"""Types of weights and optimizer state."""

from typing import Literal, Self

from pydantic import model_validator

from hwprofiles.quantity import Frozen
from planner.optimizers import OPTIMIZERS, Optimizer, OptimizerState

TIE_PARAMS = 256
"""Parameters that share a tie of 16 bits, see [Note: Split masters] in :mod:`executor.optimizer.split`."""

SPLIT_OPERATOR_BYTES, SPLIT_SCRATCH_BYTES = 96, 14
"""What torch's operators move per parameter to join and split a master copy on a GPU, and what they hold meanwhile, the
scaled gradient included, per parameter that is updated at once; see [Note: Operators] in :mod:`planner.optimizers`."""


class Precision(Frozen):
    """Types of weights, which gradients have too, and of master copies. Other state has those of the optimizer's row.

    Attributes:
        weights: the type of weights, gradients and activations.
        master: the type of the master copy; ``None`` is fp32. One in bf16 is the weight itself. Our executor has it for
            optimizers that round it stochastically.
        products: the type of the two matrices of products in linear layers of hidden layers, as torchao's
            ``Float8Linear`` computes them; ``None`` is that of weights. All other types stay.
    """

    weights: Literal["bf16", "fp32"]
    master: Literal["bf16"] | None = None
    products: Literal["fp8"] | None = None

    @model_validator(mode="after")
    def _master_fits(self) -> Self:
        if self.master and self.weights != "bf16":
            raise ValueError(f"master {self.master} needs weights in bf16, not {self.weights}; change one")
        return self

    @property
    def weight_bytes(self) -> Literal[2, 4]:
        """Bytes of one weight."""
        return 2 if self.weights == "bf16" else 4

    @property
    def gradient_bytes(self) -> Literal[2, 4]:
        """Bytes of one gradient."""
        return self.weight_bytes

    @property
    def master_bytes(self) -> Literal[2, 4]:
        """Bytes of one value of the master copy."""
        return 2 if self.rounds else 4

    @property
    def rounds(self) -> bool:
        """Whether the master copy is rounded to bf16."""
        return self.master == "bf16"

    @property
    def can_be_split(self) -> bool:
        """Whether a master copy can be kept as a weight and a remainder of 16 bits, by our executor."""
        return self.weights == "bf16" and not self.master

    @property
    def master_is_weight(self) -> bool:
        """Whether the optimizer's master copy is the weight itself, if both are in one place."""
        return self.master_bytes == self.weight_bytes

    def optimizer_state(self, optimizer: Optimizer) -> OptimizerState:
        """Return an optimizer's row, with the costs of rounding the master copy if it is bf16."""
        row = OPTIMIZERS[optimizer]
        return row.rounded if self.rounds and row.rounded else row

    def can_be_kept(self, optimizer: Optimizer) -> bool:
        """Return whether our executor can keep what an optimizer needs in these types."""
        return not self.rounds or OPTIMIZERS[optimizer].rounded is not None

    def state_bytes_per_param(self, optimizer: Optimizer) -> float:
        """Return the bytes of optimizer state per parameter, the master copy included, without ties of split ones."""
        return self.master_bytes + OPTIMIZERS[optimizer].buffer_bytes_per_param

    def update_bytes_per_param(self, optimizer: Optimizer, *, splits: bool = False) -> float:
        """Return the bytes that an update moves: gradient and state in; state and weight (unless it is in it) out.

        The state has the weight if the master copy is the weight, or ``splits``.
        """
        weight_bytes = 0 if splits or self.master_is_weight else self.weight_bytes
        return self.gradient_bytes + 2 * self.state_bytes_per_param(optimizer) + weight_bytes


BF16, FP32 = Precision(weights="bf16"), Precision(weights="fp32")
