"""Optimizers that torch does not have, as plain ``torch.optim`` classes: for use without a plan, and as references."""

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, final

import torch

from executor.optimizer.adamw import MOMENTS, AdamWParams
from executor.optimizer.adamw_narrow import adamw_narrow_
from executor.optimizer.blocks import SCALES
from executor.optimizer.lion import LionParams, lion_
from executor.optimizer.passes import BLOCK, read
from planner.optimizers import is_hidden_matrix

ROUNDS: Final = "bf16_stochastic_round"
"""The key of a group for whether its weights in bf16 are rounded stochastically, and are their own master copies."""


class _NarrowAdamW(torch.optim.Optimizer):
    """AdamW with narrow moments.

    Attributes:
        _dtypes: types of its buffers, by their keys in a parameter's state.
    """

    _dtypes: Mapping[str, torch.dtype]

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        seed: int = 0,
        *,
        bf16_stochastic_round: bool = False,
    ) -> None:
        AdamWParams(lr, *betas, eps, weight_decay)  # which checks them
        numbers = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "seed": seed}
        super().__init__(params, {**numbers, ROUNDS: bf16_stochastic_round})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step; return the result of ``closure``, which computes gradients again."""
        return _step_each(self, closure, self._update)

    def _update(self, parameter: torch.Tensor, group: dict[str, Any], number: int) -> None:
        state = self.state[parameter]
        if not state:
            lengths = dict.fromkeys(SCALES.values(), -(-parameter.numel() // BLOCK))
            state |= {
                key: parameter.new_zeros(lengths.get(key, parameter.shape), dtype=dtype)
                for key, dtype in self._dtypes.items()
            }
        state["step"] = state.get("step", torch.tensor(0.0)) + 1
        # torch's load_state_dict() gives buffers the parameter's type.
        buffers = {key: state[key].to(dtype).reshape(-1) for key, dtype in self._dtypes.items()}
        weight = (parameter if rounds(group) else parameter.float()).reshape(-1)
        assert parameter.grad is not None
        gradient = parameter.grad.to(torch.float32, copy=True).reshape(-1)
        params = read_seeded(group, parameter=number)
        adamw_narrow_(weight, tuple(buffers.values()), gradient, params, int(state["step"]))
        parameter.copy_(weight.view(parameter.shape))
        state |= {key: values.view(state[key].shape) for key, values in buffers.items()}


@final
class AdamWBf16(_NarrowAdamW):
    """``torch.optim.AdamW`` with moments in bf16, rounded stochastically: 8 bytes of state a parameter instead of 12.

    The same seed gives the same bits, see [Note: Stochastic rounding] in :mod:`executor.optimizer.adamw_narrow`.

    Args:
        params: parameters, or groups of them.
        lr, betas, eps, weight_decay: as those of ``torch.optim.AdamW``.
        seed: of the rounding.
        bf16_stochastic_round: round new weights in bf16 stochastically too. Under a plan they have no fp32 master copy:
            4 bytes of state beside the weight. Weights in float32 are not rounded.

    Raises:
        ValueError: a negative ``lr``, ``eps`` or ``weight_decay``, or a beta outside [0, 1).
    """

    _dtypes = dict.fromkeys(MOMENTS, torch.bfloat16)


@final
class AdamW8bit(_NarrowAdamW):
    """``torch.optim.AdamW`` with moments in 8 bits: 6 bytes of state a parameter instead of 12.

    Moments have the format of ``bitsandbytes.optim.AdamW8bit``, see :mod:`executor.optimizer.blocks`: in the state of a
    parameter, ``exp_avg`` and ``exp_avg_sq`` are codes, and ``exp_avg_scale`` and ``exp_avg_sq_scale`` have a value for
    each block of 256. All parameters are kept so, however small.

    Args:
        params: parameters, or groups of them.
        lr, betas, eps, weight_decay: as those of ``torch.optim.AdamW``.
        seed: of the rounding of weights.
        bf16_stochastic_round: as that of :class:`AdamWBf16`: 2 bytes of state beside the weight.

    Raises:
        ValueError: a negative ``lr``, ``eps`` or ``weight_decay``, or a beta outside [0, 1).
    """

    _dtypes = dict.fromkeys(MOMENTS, torch.uint8) | dict.fromkeys(SCALES.values(), torch.float32)


@final
class Lion(torch.optim.Optimizer):
    """Evolved sign momentum (Chen et al., *Symbolic discovery of optimization algorithms*, arXiv:2302.06675).

    Every weight moves by ``lr``, in the direction of the sign of an average of gradients, so ``lr`` is about a tenth of
    AdamW's. If that average is not finite, the weight becomes NaN: a plain sign would hide the error.

    Args:
        params: parameters, or groups of them.
        lr: how far a weight moves.
        betas: weight of the past in the direction, and in the momentum that is kept.
        weight_decay: decoupled, as AdamW's.

    Raises:
        ValueError: a negative ``lr`` or ``weight_decay``, or a beta outside [0, 1).
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        LionParams(lr, *betas, weight_decay)
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step; return the result of ``closure``, which computes gradients again."""
        return _step_each(self, closure, self._update)

    def _update(self, parameter: torch.Tensor, group: dict[str, Any], number: int) -> None:  # noqa: ARG002 - as above
        state = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
        assert parameter.grad is not None
        lion_(parameter, (state["exp_avg"],), parameter.grad, read(LionParams, group), 0)


@final
class Muon(torch.optim.Optimizer):
    """``torch.optim.Muon`` for matrices of hidden layers, and ``torch.optim.AdamW`` for all other parameters.

    :func:`planner.optimizers.is_hidden_matrix` decides which is which.

    Args:
        params: ``model.named_parameters()``, which are divided here; or groups, each of which says ``use_muon``.
        adamw: arguments of ``torch.optim.AdamW``.
        muon: arguments of ``torch.optim.Muon``.

    Raises:
        ValueError: parameters without names; a group without ``use_muon``, or one of Muon with something that is no
            matrix; or what the two classes refuse.
    """

    def __init__(
        self,
        params: Iterable[tuple[str, torch.nn.Parameter]] | Iterable[dict[str, Any]],
        adamw: Mapping[str, Any] | None = None,
        **muon: Any,
    ) -> None:
        self._parts = {
            True: torch.optim.Muon([torch.empty(1, 1)], **muon),
            False: torch.optim.AdamW([torch.empty(1)], **(adamw or {})),
        }
        super().__init__(_groups(list(params)), {"lr": self._parts[True].defaults["lr"]})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """See ``torch.optim.Optimizer``."""
        if "use_muon" not in param_group:
            raise ValueError("a group does not say use_muon; set it to true or false, or pass model.named_parameters()")
        super().add_param_group({**self._parts[bool(param_group["use_muon"])].defaults, **param_group})
        group = self.param_groups[-1]
        strange = next((p for p in group["params"] if group["use_muon"] and p.ndim != 2), None)
        if strange is not None:
            raise ValueError(
                f"a parameter of shape {tuple(strange.shape)} is in a group of Muon, which takes matrices; set its "
                "group's use_muon to false"
            )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step; return the result of ``closure``, which computes gradients again."""
        loss = _loss_of(closure)
        for is_muon, part in self._parts.items():
            part.state = self.state
            part.param_groups = [group for group in self.param_groups if bool(group["use_muon"]) is is_muon]
            part.step()
        return loss


def _step_each(
    optimizer: torch.optim.Optimizer,
    closure: Callable[[], float] | None,
    update: Callable[[torch.Tensor, dict[str, Any], int], None],
) -> float | None:
    """Update each parameter that has a gradient, given its group and its number in the optimizer."""
    loss = _loss_of(closure)
    numbers = itertools.count()
    for group in optimizer.param_groups:
        for parameter, number in zip(group["params"], numbers, strict=False):
            if parameter.grad is not None:
                update(parameter, group, number)
    return loss


def _loss_of(closure: Callable[[], float] | None) -> float | None:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def read_seeded(group: Mapping[str, Any], **given: Any) -> AdamWParams:
    """Return the hyper-parameters of a group of AdamW's that rounds stochastically."""
    return read(AdamWParams, {"seed": 0, **group}, **given)


def rounds(group: Mapping[str, Any]) -> bool:
    """Return whether a group's weights in bf16 are rounded stochastically; those of another optimizer are not."""
    return bool(group.get(ROUNDS))


def _groups(params: list[Any]) -> list[dict[str, Any]]:
    """Return groups; parameters with names are divided into those of Muon and those of AdamW."""
    if all(isinstance(each, dict) for each in params):
        return params
    if not all(isinstance(each, tuple) for each in params):
        raise ValueError("Muon needs the names of parameters to choose its own; pass model.named_parameters()")
    groups = [
        {"params": [p for name, p in params if is_hidden_matrix(name, tuple(p.shape)) is mine], "use_muon": mine}
        for mine in (True, False)
    ]
    return [group for group in groups if group["params"]]
