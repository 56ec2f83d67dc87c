"""Muon: momentum, orthogonalized matrix by matrix with torch's products, on a host or a device.

The arithmetic is that of ``torch.optim.Muon``, operation by operation, so the bits are the same
on one machine with as many threads. Products are in bf16 whatever the type of weights, as there.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from executor.optimizer.passes import Bf16Array, Float32Array, GradientArray, check_params
from executor.optimizer.split import SplitMaster, opened
from executor.optimizer.workers import WorkerTeam
from planner.models.formulas.work import orthogonalization_bytes
from planner.optimizers import UPDATED_AT_ONCE

COEFFICIENTS: Final = (3.4445, -4.7750, 2.0315)
_ADJUSTMENTS: Final = (None, "original", "match_rms_adamw")
_MOST_STEPS: Final = 100


@dataclass(frozen=True, slots=True)
class MuonParams:
    """Hyper-parameters, as ``torch.optim.Muon`` names and bounds them.

    Attributes:
        shape: of the whole matrices, without which no step can be taken.

    Raises:
        ValueError: one is negative or not finite, unknown, or there are 100 iterations or more.
    """

    lr: float = 1e-3
    weight_decay: float = 0.1
    momentum: float = 0.95
    nesterov: bool = True
    ns_coefficients: tuple[float, ...] = COEFFICIENTS
    eps: float = 1e-7
    ns_steps: int = 5
    adjust_lr_fn: str | None = None
    shape: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check_params(self, not_negative=("lr", "weight_decay", "momentum", "eps", "ns_steps"))
        if self.adjust_lr_fn not in _ADJUSTMENTS:
            raise ValueError(f"adjust_lr_fn is {self.adjust_lr_fn!r}, but must be one of {_ADJUSTMENTS}; choose one")
        if len(self.ns_coefficients) != 3 or self.ns_steps >= _MOST_STEPS:
            raise ValueError(
                f"ns_coefficients are {self.ns_coefficients} and ns_steps {self.ns_steps}, but there must be 3 "
                f"coefficients and fewer than {_MOST_STEPS} steps; change them"
            )

    @property
    def adjusted_lr(self) -> float:
        """The learning rate for a matrix of this shape."""
        assert self.shape is not None
        rows, columns = self.shape
        if self.adjust_lr_fn == "match_rms_adamw":
            return self.lr * 0.2 * math.sqrt(max(rows, columns))
        return self.lr * math.sqrt(max(1, rows / columns))


def newton_schulz(matrix: torch.Tensor, params: MuonParams, memory: torch.Tensor | None = None) -> torch.Tensor:
    """Return a matrix, bf16 ``[rows, columns]``, with the singular vectors of ``matrix`` and singular values near 1.

    This is the quintic iteration of Jordan et al. (https://kellerjordan.github.io/posts/muon/).

    Args:
        matrix: any type.
        params: coefficients a, b and c, the least norm to divide by (``eps``), and number of iterations.
        memory: bf16, as much as :func:`planner.models.formulas.work.orthogonalization_bytes` says without the gradient;
            the result is in it. Left out, it is allocated.
    """
    a, b, c = params.ns_coefficients
    short, long = sorted(matrix.shape)
    sizes = [short * long] * 2 + [short * short] * 2
    if memory is None:
        memory = torch.empty(sum(sizes), dtype=torch.bfloat16, device=matrix.device)
    first, second, gram, update = torch.split(memory[: sum(sizes)], sizes)
    gram, update = gram.view(short, short), update.view(short, short)
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = first.view(matrix.shape).copy_(matrix)
    x = x.T if is_tall else x
    x.div_(x.norm().clamp(min=params.eps))
    for _, target in zip(range(params.ns_steps), itertools.cycle((second, first)), strict=False):
        torch.mm(x, x.T, out=gram)
        torch.addmm(gram, gram, gram, beta=b, alpha=c, out=update)
        x = torch.addmm(x, update, x, beta=a, out=target.view(short, long))
    return x.T if is_tall else x


def muon(
    master: torch.Tensor | SplitMaster,
    buffers: tuple[torch.Tensor, ...],
    gradient: torch.Tensor,
    params: MuonParams,
    step: int = 1,  # noqa: ARG001 - all have it
    memory: torch.Tensor | None = None,
) -> None:
    """Take one step of Muon, for whole matrices of ``params.shape`` one after another.

    It is the same at each step::

        m = momentum * m + (1 - momentum) * g
        u = momentum * m + (1 - momentum) * g   (with ``nesterov``; else m)
        p = p * (1 - lr * weight_decay) - adjusted lr * newton_schulz(u)

    Args:
        master: float32 or split, flat.
        buffers: the momentum alone, float32, flat.
        gradient: float32, scaled; overwritten.
        params: hyper-parameters.
        step: number of this step.
        memory: see :func:`newton_schulz`.
    """
    assert params.shape is not None
    num_params = math.prod(params.shape)
    matrices = (tensor.view(-1, *params.shape) for tensor in (*buffers, gradient))
    for i, (m, g) in enumerate(zip(*matrices, strict=True)):
        update = momentum_update(m, g, params)
        update = newton_schulz(update, params, memory)
        apply_update(master[i * num_params : (i + 1) * num_params], update, params)


def momentum_update(momentum: torch.Tensor, gradient: torch.Tensor, params: MuonParams) -> torch.Tensor:
    """Update a momentum, float32, and return what is orthogonalized, in the memory of one of the arguments."""
    momentum.lerp_(gradient, 1 - params.momentum)
    return gradient.lerp_(momentum, params.momentum) if params.nesterov else momentum


def apply_update(master: torch.Tensor | SplitMaster, update: torch.Tensor, params: MuonParams) -> None:
    """Decay a flat master copy, and add an orthogonalized update to it, some rows at a time if it is split."""
    rows = update.view(-1, 1) if update.dim() == 1 else update
    at_once = len(rows) if isinstance(master, torch.Tensor) else max(UPDATED_AT_ONCE // rows.shape[1], 1)
    for start in range(0, len(rows), at_once):
        part = rows[start : start + at_once]
        with opened(master[start * rows.shape[1] :][: part.numel()]) as flat:
            values = flat.view(part.shape)
            values.mul_(1 - params.lr * params.weight_decay)
            values.add_(part, alpha=-params.adjusted_lr)


def muon_step(
    state: Sequence[Float32Array | SplitMaster | None],
    grad: GradientArray,
    weight_out: Bf16Array | None,
    params: MuonParams,
    step: int,
    grad_scale: float = 1.0,
    team: WorkerTeam | None = None,  # noqa: ARG001 - torch has its own threads
    memory: torch.Tensor | None = None,
) -> None:
    """Take a step of :func:`muon` in host memory; see :func:`executor.optimizer.passes.host_step` for the arguments.

    Only one matrix at a time has a scaled gradient. That and the products are in ``memory``, uint8, which is allocated
    if it is left out.
    """
    assert params.shape is not None
    num_params = math.prod(params.shape)
    if memory is None:
        rows, columns = params.shape
        memory = torch.empty(orthogonalization_bytes((rows, columns)), dtype=torch.uint8, device="cpu")
    for start in range(0, len(grad), num_params):
        cut = slice(start, start + num_params)
        whole, buffer = state
        assert isinstance(buffer, np.ndarray)
        assert whole is not None
        master = whole[cut] if isinstance(whole, SplitMaster) else as_tensor(whole[cut])
        gradient = memory[: 4 * num_params].view(torch.float32).copy_(as_tensor(grad[cut]))
        gradient.mul_(float(np.float32(grad_scale)))
        muon(master, (as_tensor(buffer[cut]),), gradient, params, step, memory[4 * num_params :].view(torch.bfloat16))
        if weight_out is not None:
            assert isinstance(master, torch.Tensor)
            as_tensor(weight_out[cut]).copy_(master)


def as_tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """Return an array as a tensor in the same memory; of uint16, bits of bf16, as bf16."""
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor
