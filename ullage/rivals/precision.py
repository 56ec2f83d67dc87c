"""Types of gradients and optimizer state that only other engines have."""

import dataclasses
from typing import Literal, Self

from pydantic import model_validator

from planner.decisions import Precision
from planner.optimizers import OPTIMIZERS, Optimizer

# Over gradients in buffers: read for the check and for the norm, read and written to scale, written to clear.
_GRADIENT_PASSES = 5


class RivalPrecision(Precision):
    """Types of weights, gradients and optimizer state of another engine.

    Attributes:
        state: the type of all optimizer state that is not of a narrower one; ``None``: as ours.
        gradients: the type in which gradients are summed over micro-batches and ranks; ``None``: as ours.
    """

    state: Literal["bf16"] | None = None
    gradients: Literal["fp32"] | None = None

    @model_validator(mode="after")
    def _known(self) -> Self:
        if self.state and (self.weights != "bf16" or self.master):
            raise ValueError(
                f"state {self.state} needs weights in bf16 and its own master copies, not {self.weights} and "
                f"{self.master}; change one"
            )
        return self

    @property
    def gradient_bytes(self) -> Literal[2, 4]:
        """Bytes of one gradient."""
        return 4 if self.gradients else super().gradient_bytes

    @property
    def master_bytes(self) -> Literal[2, 4]:
        """Bytes of one value of the master copy."""
        return 2 if self.state else super().master_bytes

    @property
    def can_be_split(self) -> bool:
        """No: only our executor splits master copies."""
        return False

    def can_be_kept(self, optimizer: Optimizer) -> bool:
        """Return whether our executor can keep what an optimizer needs in these types."""
        return not (self.state or self.gradients) and super().can_be_kept(optimizer)

    def state_bytes_per_param(self, optimizer: Optimizer) -> float:
        """Return the bytes of optimizer state per parameter, the master copy included."""
        row = OPTIMIZERS[optimizer]
        if self.state and row.buffer_bytes > self.master_bytes:
            row = dataclasses.replace(row, buffer_bytes=self.master_bytes)
        return self.master_bytes + row.buffer_bytes_per_param

    def update_bytes_per_param(self, optimizer: Optimizer, *, splits: bool = False) -> float:
        """Return the bytes that an update moves; see :class:`planner.decisions.Precision`.

        Gradients of their own type have buffers, which are checked, clipped and cleared in passes of their own
        (Megatron-Core's ``param_and_grad_buffer.py`` and ``clip_grads.py``).
        """
        passes = _GRADIENT_PASSES * self.gradient_bytes if self.gradients else 0
        return super().update_bytes_per_param(optimizer, splits=splits) + passes
