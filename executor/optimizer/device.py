"""Optimizer steps with torch: on a device, and everywhere of optimizers that have no kernel here.

On a device they are torch's fused kernels if torch has them for every device, else its operators. Each function takes
float32 tensors of one shape: the master copy, the buffers in the order of the optimizer's entry in
:mod:`executor.optimizer.table`, and a scaled gradient, which it may overwrite.

[Note: Own steps] An optimizer without a kernel takes its own step, the code of its class, on each chunk of what it
updates. That is right if the step treats each value by itself, and if all that it remembers is in its state: tensors of
the parameter's shape, and numbers. Nobody can read that off a class, so it is tried: three steps on a matrix must give
the same bits as three steps on two flat parts of it, with state that is taken away and given back between them. Some
steps look at whole parameters in some cases alone. So the second gradient is orthogonal to each row, where AdamP
projects, and the third one is large, as of those that clip.
"""

import contextlib
import dataclasses
import inspect
import random
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType
from typing import Any, Final, final

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves, tree_map

from executor.optimizer.adamw import AdamWParams, adamw_factors
from executor.optimizer.muon import as_tensor
from executor.optimizer.passes import Bf16Array, BufferArray, GradientArray, cut
from executor.optimizer.sgd import AdagradParams, SgdParams
from executor.optimizer.split import SplitMaster, opened
from executor.optimizer.workers import WorkerTeam

Tensors = tuple[torch.Tensor, ...]


def adamw(master: torch.Tensor, buffers: Tensors, gradient: torch.Tensor, params: AdamWParams, step: int) -> None:
    """Take one step of AdamW or Adam. See :func:`executor.optimizer.adamw.adamw_step`."""
    exp_avg, exp_avg_sq = buffers
    _limit(gradient, params)
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


def adamw_back(master: torch.Tensor, buffers: Tensors, gradient: torch.Tensor, params: AdamWParams, step: int) -> None:
    """Take back one step of AdamW or Adam, up to rounding: solve its formulas for the values before it.

    Products are rounded as the step rounds them, so that moments that were 0, as of rows of an embedding, are 0 again.
    """
    exp_avg, exp_avg_sq = buffers
    beta1, rest1, beta2, rest2, decay, step_size, root_bias2_inverse, eps = map(float, adamw_factors(params, step))
    root = exp_avg_sq.sqrt().mul_(root_bias2_inverse).add_(eps)
    master.addcdiv_(exp_avg, root, value=step_size).div_(decay)
    if step == 1:
        exp_avg.zero_()
        exp_avg_sq.zero_()
        return
    _limit(gradient, params)
    if params.weight_decay and not params.decoupled_weight_decay:
        gradient.add_(master, alpha=params.weight_decay)
    exp_avg.sub_(gradient * rest1).div_(beta1 or 1.0)  # without momentum, the next step overwrites it
    exp_avg_sq.sub_((gradient * rest2).mul_(gradient)).div_(beta2 or 1.0).clamp_(min=0)


def _limit(gradient: torch.Tensor, params: AdamWParams) -> None:
    if params.limit is not None:
        gradient.masked_fill_((gradient.abs() < params.limit).logical_not_(), 0)


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


_HOST_CHUNK: Final = 1 << 18
"""Values of an own step on the host: its temporaries stay in caches, and it takes longer than to begin it."""

_NOT_HYPER_PARAMETERS: Final = ("params", "param_names")
_OF_PARAMETERS: Final = ("param_groups", "state")
_TRIED: Final = (64, 192)  # more values than what torchao and bitsandbytes keep in 32 bits, in whole blocks


@dataclasses.dataclass(frozen=True, slots=True)
class OwnParams:
    """What an own step needs beside tensors.

    Attributes:
        group: hyper-parameters.
        numbers: those of the state before the step, by the names in :attr:`OwnStep.numbers`.
        attributes: numbers that the optimizer itself has as attributes.
    """

    group: Mapping[str, Any]
    numbers: tuple[float, ...] = ()
    attributes: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@final
class OwnStep:
    """The step of a user's optimizer that has no kernel here, see [Note: Own steps].

    Args:
        optimizer: the user's.

    Attributes:
        buffers: keys of the tensors in a parameter's state.
        numbers: keys of the numbers in it, without ``step``.
        counts_steps: whether it has a ``step``.

    Raises:
        ValueError: the optimizer cannot step in parts.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        if any(isinstance(value, torch.Tensor) for value in _held_by(optimizer)):
            raise ValueError("it keeps tensors beside its state")
        told_apart_by = {"id", *(key for group in optimizer.param_groups for p in group["params"] for key in vars(p))}
        if looks := told_apart_by.intersection(_names_in(type(optimizer), "step", set())):
            raise ValueError(f"its step looks at {min(looks)} of a parameter, and gets parts of it to update")
        self._optimizer = optimizer
        self._like: dict[torch.device, Mapping[str, Any]] = {}
        first = self.read(optimizer.param_groups[0])
        with _left_alone(optimizer):
            state = self._state_like(torch.device("cpu"), first)
            self.buffers = tuple(key for key, value in state.items() if isinstance(value, torch.Tensor) and value.dim())
            self.counts_steps = "step" in state
            known = (*self.buffers, "step")
            self.numbers = tuple(key for key, value in state.items() if key not in known and value is not None)
            for group in optimizer.param_groups:
                self._try(self.read(group))

    def read(self, group: Mapping[str, Any]) -> OwnParams:
        """Return the present hyper-parameters of a group."""
        names = dict.fromkeys((*self._optimizer.defaults, *group))
        values = {name: group[name] for name in names if name not in _NOT_HYPER_PARAMETERS}
        if "fused" in values:  # whose vectors round as their remainders do not, see [Note: Rounding]
            values["fused"] = None
        kept = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in values.items()}
        return OwnParams(kept, attributes=_numbers_of(vars(self._optimizer)))

    def numbers_after(self, params: OwnParams, step: int) -> tuple[float, ...]:
        """Return the numbers of a parameter's state after a step, which do not depend on gradients."""
        one = [torch.zeros(1, device="cpu") for _ in (*self.buffers, "master", "gradient")]
        state = self._step(one[0], one[2:], one[1], params, step)
        return tuple(float(state[key]) for key in self.numbers)

    def on_device(
        self,
        master: torch.Tensor,
        buffers: Sequence[torch.Tensor],
        gradient: torch.Tensor,
        params: OwnParams,
        step: int,
    ) -> None:
        """Take a step on a device."""
        state = self._step(master, buffers, gradient, params, step)
        for key, buffer in zip(self.buffers, buffers, strict=True):
            if state[key].data_ptr() != buffer.data_ptr():  # its first state, or it does not update in place
                buffer.copy_(state[key])

    @torch.no_grad()
    def _step(
        self,
        master: torch.Tensor,
        buffers: Sequence[torch.Tensor],
        gradient: torch.Tensor,
        params: OwnParams,
        step: int,
    ) -> Mapping[str, Any]:
        """Take a step; return the state after it, whose tensors need not be ``buffers``. The first step makes them."""
        parameter = master.detach()  # so that no one else's tensor gets a gradient
        parameter.grad = gradient
        own = bare(self._optimizer, [{**params.group, "params": [parameter]}])
        vars(own).update(params.attributes)
        if step > 1:
            numbers = {"step": step - 1, **dict(zip(self.numbers, params.numbers, strict=True))}
            own.state[parameter] = {
                key: value.new_tensor(numbers[key]) if isinstance(value, torch.Tensor) else type(value)(numbers[key])
                for key, value in self._state_like(master.device, params).items()
                if key in numbers
            } | dict(zip(self.buffers, (buffer.detach() for buffer in buffers), strict=True))
        type(own).step(own)
        return dict(own.state[parameter])

    def _state_like(self, device: torch.device, params: OwnParams) -> Mapping[str, Any]:
        """Return a state that the optimizer has made on a device: it shows where numbers are, and their types."""
        if device not in self._like:
            value, gradient = torch.ones(1, device=device), torch.ones(1, device=device)
            self._like[device] = self._step(value, (), gradient, params, 1)
        return self._like[device]

    def _try(self, params: OwnParams) -> None:
        """Check that the steps of a group can be taken in parts.

        Raises:
            ValueError: they cannot.
        """
        generator = torch.Generator().manual_seed(0)
        whole, *gradients = (torch.randn(_TRIED, generator=generator, device="cpu") for _ in range(4))
        gradients[2] *= 32
        flat, first = whole.flatten().clone(), whole.clone()
        parts = [slice(0, _TRIED[1] + 5), slice(_TRIED[1] + 5, len(flat))]
        buffers = [torch.zeros_like(flat) for _ in self.buffers]
        numbers: tuple[float, ...] = ()
        own = bare(self._optimizer, [{**params.group, "params": [whole]}])
        others = _numbers_in(own)
        for step, gradient in enumerate(gradients, 1):
            if step == 2:  # after a step with another gradient, which momentum remembers
                along = (gradient * whole).sum(1, keepdim=True) / whole.square().sum(1, keepdim=True)
                gradient.sub_(whole * along)
            whole.grad = gradient.clone()
            with torch.no_grad():
                type(own).step(own)
            before = dataclasses.replace(params, numbers=numbers)
            for part in parts:
                self.on_device(flat[part], [b[part] for b in buffers], gradient.flatten()[part].clone(), before, step)
            numbers = self.numbers_after(before, step)
            kept = {key: value for key, value in own.state[whole].items() if value is not None}
            wanted: dict[str, Any] = {"step": step} if self.counts_steps else {}
            wanted |= dict(zip(self.numbers, numbers, strict=True)) | dict(zip(self.buffers, buffers, strict=True))
            for key in {*kept, *wanted, "weight"}:
                theirs, ours = (whole, flat) if key == "weight" else (kept.get(key), wanted.get(key))
                if not _is_same(theirs, ours):
                    raise ValueError(f"its {key} is another one when it steps in parts")
        if self.read(own.param_groups[0]) != params or _numbers_in(own) != others:
            raise ValueError("it keeps state beside that of parameters")
        if torch.equal(whole, first) and not own.state[whole]:
            raise ValueError("its step leaves a parameter that it is given as it is")


def on_host(
    take: Callable[..., None],
    state: Sequence[BufferArray | SplitMaster],
    grad: GradientArray,
    weight_out: Bf16Array | None,
    params: Any,
    step: int,
    grad_scale: float = 1.0,
    team: WorkerTeam | None = None,  # noqa: ARG001 - torch has its own threads
) -> None:
    """Let ``take``, a function of this module, take a step in host memory, or take it back.

    The other arguments are those of :func:`executor.optimizer.passes.host_step`.
    """
    scale = torch.full((1,), grad_scale, dtype=torch.float32, device="cpu")
    for begin in range(0, len(grad), _HOST_CHUNK):
        part = cut((*state, grad, weight_out), begin, min(begin + _HOST_CHUNK, len(grad)))
        master, *buffers, gradient, weights = (as_tensor(a) if isinstance(a, np.ndarray) else a for a in part)
        with opened(master) as values:
            take(values, buffers, gradient * scale, params, step)
            if weights is not None:
                weights.copy_(values)


def _names_in(kind: type, method: str, seen: set[str]) -> Iterator[str]:
    """Yield the names and texts in the code of a method, of functions inside it, and of methods that it names."""
    seen.add(method)
    left = [getattr(inspect.unwrap(getattr(kind, method)), "__code__", None)]
    while left:
        if not isinstance(code := left.pop(), CodeType):
            continue
        yield from (constant for constant in code.co_consts if isinstance(constant, str))
        left += code.co_consts
        for name in code.co_names:
            yield name
            if name not in seen and name in vars(kind) and callable(getattr(kind, name)):
                yield from _names_in(kind, name, seen)


def bare(
    optimizer: torch.optim.Optimizer,
    groups: Sequence[dict[str, Any]],
    state: defaultdict[torch.Tensor, Any] | None = None,
) -> torch.optim.Optimizer:
    """Return an optimizer of the same class over other groups, without hooks and what schedulers wrap.

    Its lists and dictionaries are copies.
    """
    own = object.__new__(type(optimizer))
    held = ((key, value) for key, value in vars(optimizer).items() if key not in ("step", *_OF_PARAMETERS))
    vars(own).update({key: tree_map(lambda leaf: leaf, value) for key, value in held})
    vars(own).update({key: OrderedDict() for key in vars(optimizer) if key.endswith("_hooks")})
    own.state, own.param_groups = defaultdict(dict) if state is None else state, list(groups)
    return own


@contextlib.contextmanager
def _left_alone(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Return a context for trials of an optimizer's step, in which no step updates the optimizer's own parameters.

    Inside it, they have no gradients, and another optimizer, which this one drives, raises a ValueError. Afterwards,
    generators draw what they would have drawn.
    """

    def refuse(stepped: torch.optim.Optimizer, *_given: object) -> None:
        if type(stepped) is not type(optimizer):
            raise ValueError("it steps through another optimizer")

    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in parameters]
    numpy_random: Any = np.random
    drawn = random.getstate(), numpy_random.get_state()
    handle = register_optimizer_step_pre_hook(refuse)
    try:
        for parameter in parameters:
            parameter.grad = None
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        handle.remove()
        random.setstate(drawn[0])
        numpy_random.set_state(drawn[1])
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient


def _held_by(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return what an optimizer's attributes hold, also inside lists and dictionaries, without groups and state."""
    return tree_leaves({k: v for k, v in vars(optimizer).items() if k not in ("defaults", *_OF_PARAMETERS)})


def _numbers_in(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [value for value in _held_by(optimizer) if isinstance(value, int | float)]


def _numbers_of(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if isinstance(value, int | float)}


def _is_same(theirs: Any, ours: Any) -> bool:
    if isinstance(ours, torch.Tensor):
        kept = type(theirs) is torch.Tensor and theirs.dtype is torch.float32 and theirs.shape == _TRIED
        return kept and torch.equal(theirs.flatten(), ours)
    return theirs is not None and ours is not None and float(theirs) == float(ours)
