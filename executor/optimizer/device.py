"""The optimizer step on a device: torch's fused kernels if torch has them for every device, else its operators.

Each function takes float32 tensors of one shape: the master copy, the buffers in the order of the optimizer's entry in
:mod:`executor.optimizer.table`, and a scaled gradient, which it may overwrite.
"""

import torch

from executor.optimizer import AdagradParams, AdamWParams, LionParams, SgdParams
from executor.optimizer.muon import MuonParams, muon
from executor.optimizer.reference import lion

Tensors = tuple[torch.Tensor, ...]


def adamw(master: torch.Tensor, buffers: Tensors, gradient: torch.Tensor, params: AdamWParams, step: int) -> None:
    """Take one step of AdamW or Adam. See :func:`executor.optimizer.adamw.adamw_step`."""
    exp_avg, exp_avg_sq = buffers
    fused = torch._fused_adamw_ if params.decoupled_weight_decay else torch._fused_adam_
    fused(
        [master],
        [gradient],
        [exp_avg],
        [exp_avg_sq],
        [],
        [torch.full((), float(step), device=master.device)],
        lr=params.lr,
        beta1=params.beta1,
        beta2=params.beta2,
        weight_decay=params.weight_decay,
        eps=params.eps,
        amsgrad=False,
        maximize=False,
    )


def sgd(master: torch.Tensor, buffers: Tensors, gradient: torch.Tensor, params: SgdParams, step: int) -> None:
    """Take one step of SGD. See :func:`executor.optimizer.sgd.sgd_step`."""
    torch._fused_sgd_(
        [master],
        [gradient],
        list(buffers) if params.momentum else [],
        weight_decay=params.weight_decay,
        momentum=params.momentum,
        lr=params.lr,
        dampening=params.dampening,
        nesterov=params.nesterov,
        maximize=False,
        is_first_step=step == 1 and params.momentum > 0,
    )


def adagrad(master: torch.Tensor, buffers: Tensors, gradient: torch.Tensor, params: AdagradParams, step: int) -> None:
    """Take one step of Adagrad. See :func:`executor.optimizer.sgd.adagrad_step`."""
    (sum_of_squares,) = buffers
    if params.weight_decay:
        gradient.add_(master, alpha=params.weight_decay)
    sum_of_squares.addcmul_(gradient, gradient)
    rate = params.lr / (1 + (step - 1) * params.lr_decay)
    master.addcdiv_(gradient, sum_of_squares.sqrt().add_(params.eps), value=-rate)


def muon_(master: torch.Tensor, buffers: Tensors, gradient: torch.Tensor, params: MuonParams, step: int) -> None:  # noqa: ARG001 - all have it
    """Take one step of Muon. See :func:`executor.optimizer.muon.muon`."""
    muon(master, buffers, gradient, params)


def lion_(master: torch.Tensor, buffers: Tensors, gradient: torch.Tensor, params: LionParams, step: int) -> None:  # noqa: ARG001 - all have it
    """Take one step of Lion. See :func:`executor.optimizer.lion.lion_step`."""
    (exp_avg,) = buffers
    lion(master, exp_avg, gradient, params.lr, params.beta1, params.beta2, params.weight_decay)
