"""The optimizers that can be executed: everything about each of them is in one entry.

One with a kernel needs that beside this file, an entry here, and, if its state is of a new kind, a row in
:mod:`planner.optimizers`. For others an entry is made if they can take their own step in parts: see [Note: Own steps]
in :mod:`executor.optimizer.device`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from executor.optimizer import device
from executor.optimizer.adamw import LIMIT, MOMENTS, AdamWParams, adamw_step
from executor.optimizer.adamw_8bit import KEYS, adamw_8bit_step
from executor.optimizer.adamw_narrow import adamw_narrow_
from executor.optimizer.device import OwnParams, OwnStep
from executor.optimizer.lion import LionParams, lion_, lion_step
from executor.optimizer.muon import MuonParams, muon, muon_step
from executor.optimizer.passes import read
from executor.optimizer.reference import AdamW8bit, AdamWBf16, Lion, Muon, read_seeded, rounds
from executor.optimizer.sgd import AdagradParams, SgdParams, adagrad_step, sgd_step
from executor.optimizer.split import SplitMaster
from planner.optimizers import ELEMENTWISE, OPTIMIZERS, UPDATED_AT_ONCE, Optimizer

Params = AdamWParams | SgdParams | AdagradParams | LionParams | MuonParams | OwnParams
Group = Mapping[str, Any]
_KERNEL_DTYPES: Final = {1: np.uint8, 2: np.uint16, 4: np.float32}  # of buffers, by the bytes of a value


@dataclass(frozen=True, slots=True)
class OptimizerEntry:
    """One optimizer.

    Attributes:
        torch_class: the user's class; our saved state has its format.
        planned_as: its name in plans.
        buffers: keys of its tensors beside the master copy, in a parameter's state; of the type that plans have.
        read: returns hyper-parameters of a parameter group, whenever the updates of an iteration begin.
        host: takes a step in host memory: ``host((master, *buffers), grad, weight_out, params, step, scale, team)``;
            one with ``others`` also takes memory for what it computes.
        device: takes a step on a device; see :mod:`executor.optimizer.device`.
        counts_steps: whether a parameter's state has a ``step``.
        starts_at: the group's key for the initial value of buffers, which are then saved before the first step too;
            ``None`` if they begin at 0.
        refused: flags of a group that kernels do not support.
        converts: names of classes whose checkpoints it reads too, because only types of their state differ.
        others: the entry of groups without ``use_muon``: of parameters that are no hidden matrices. ``None`` if this
            one takes all.
        own: takes the steps, if this is no optimizer of :data:`ENTRIES`.
        numbers: keys of numbers in a parameter's state, beside ``step``.
        back: takes back a step on a device, up to rounding; ``None`` if none can be.
        whole: why its step cannot be taken in parts, so that it takes it itself, see [Note: Whole steps] in
            :mod:`executor.driver.whole_steps`; empty if it can. Nothing else here is used then.
    """

    torch_class: type[torch.optim.Optimizer]
    planned_as: Optimizer
    buffers: tuple[str, ...]
    read: Callable[[Group], Params]
    host: Callable[..., None]
    device: Callable[..., None]
    counts_steps: bool = True
    starts_at: str | None = None
    refused: tuple[str, ...] = ("maximize", "differentiable", "capturable")
    converts: tuple[str, ...] = ()
    others: "OptimizerEntry | None" = None
    own: OwnStep | None = None
    numbers: tuple[str, ...] = ()
    back: Callable[..., None] | None = None
    whole: str = ""

    def of(self, kind: Optimizer) -> "OptimizerEntry":
        """Return the entry of parameters that are planned as ``kind``."""
        return self.others if self.others is not None and kind != self.planned_as else self

    def of_group(self, group: Group) -> "OptimizerEntry":
        """Return the entry of a group's parameters."""
        return self.others if self.others is not None and not group["use_muon"] else self

    def rule(self, group: Group) -> "Rule":
        """Return the present update rule of a group's parameters.

        Raises:
            ValueError: a flag or a hyper-parameter that kernels do not support.
        """
        entry = self.of_group(group)
        for flag in entry.refused:
            if group.get(flag):
                raise ValueError(
                    f"the optimizer has {flag} set, which updates on the host do not support; leave it off"
                )
        return Rule(entry, entry.read(group))

    def warm_up(
        self,
        grad_dtype: npt.DTypeLike,
        group: Group,
        *,
        writes_bf16: bool,
        master_dtype: npt.DTypeLike = np.float32,
        splits: bool = False,
        speculates: bool = False,
    ) -> None:
        """Compile a group's kernels, or load them from numba's cache, so that the first step does not have to.

        Args:
            grad_dtype: of the gradients to come: ``uint16`` (bf16 bits) or ``float32``.
            group: hyper-parameters.
            writes_bf16: whether steps will write bf16 weights, to memory of their own or over bf16 gradients.
            master_dtype: of the master copy: ``float32``, or ``uint16`` (bf16 bits).
            splits: whether master copies are split instead.
            speculates: whether steps may be taken back.
        """
        entry = self.of_group(group)
        if entry.others is not None:
            return  # torch's products are compiled already
        buffers = [np.zeros(1, _KERNEL_DTYPES[num_bytes]) for num_bytes, _ in OPTIMIZERS[entry.planned_as].buffers]
        grad = np.zeros(1, grad_dtype)
        state = [SplitMaster.of_zeros(1) if splits else np.zeros(1, master_dtype), *buffers]
        rule = entry.rule(group)
        for each in (rule, rule.limited()) if speculates else (rule,):
            for weight_out in (np.zeros(1, np.uint16), grad) if writes_bf16 and not splits else (None,):
                entry.host(state, grad, weight_out, each.params, 1, 1.0, None)


@dataclass(frozen=True, slots=True)
class Rule:
    """How parameters are updated in one iteration: by what, with which hyper-parameters and factor of gradients."""

    entry: OptimizerEntry
    params: Params
    scale: float = 1.0

    def of_parameter(self, number: int, shape: torch.Size) -> "Rule":
        """Return the rule for a parameter of this shape, which has this number among the optimizer's parameters."""
        if isinstance(self.params, AdamWParams) and self.params.seed is not None:
            return dataclasses.replace(self, params=dataclasses.replace(self.params, parameter=number))
        if isinstance(self.params, MuonParams):
            return dataclasses.replace(self, params=dataclasses.replace(self.params, shape=tuple(shape)))
        return self

    def limited(self) -> "Rule":
        """Return the rule of a step that may be taken back, for which large values of the gradient count as 0."""
        assert isinstance(self.params, AdamWParams)
        return dataclasses.replace(self, params=dataclasses.replace(self.params, limit=LIMIT))

    def back(self) -> "Rule":
        """Return the rule that takes this one's step back."""
        assert self.entry.back is not None
        host = functools.partial(device.on_host, self.entry.back)
        return dataclasses.replace(self, entry=dataclasses.replace(self.entry, host=host, device=self.entry.back))

    def counting(self, numbers: dict[int, tuple[float, ...]], step: int) -> "Rule":
        """Return the rule of a step for a parameter whose state has numbers.

        Args:
            numbers: those after each of its latest steps, by the step's number; those after this one are added.
            step: number of this step, from 1.
        """
        if not (isinstance(self.params, OwnParams) and self.entry.own and self.entry.numbers):
            return self
        params = dataclasses.replace(self.params, numbers=numbers.get(step - 1, ()))
        numbers[step] = self.entry.own.numbers_after(params, step)
        numbers.pop(step - 2, None)
        return dataclasses.replace(self, params=params)

    def at(self, position: int) -> "Rule":
        """Return the rule for values from this position of a parameter on, where it depends on positions."""
        if position and isinstance(self.params, AdamWParams) and self.params.seed is not None:
            moved = dataclasses.replace(self.params, start=self.params.start + position)
            return dataclasses.replace(self, params=moved)
        return self

    def chunk_params(self, most: int) -> int:
        """Return how many parameters are updated together: at most so many, but no less than a matrix."""
        if OPTIMIZERS[self.entry.planned_as].gpu_update_bytes is not None:
            return min(most, UPDATED_AT_ONCE)
        shape = self.params.shape if isinstance(self.params, MuonParams) else None
        return most if shape is None else math.prod(shape)


def _adam(torch_class: type[torch.optim.Optimizer], *, decoupled: bool) -> OptimizerEntry:
    return OptimizerEntry(
        torch_class=torch_class,
        planned_as="adamw",
        buffers=MOMENTS,
        read=lambda group: read(AdamWParams, {"decoupled_weight_decay": decoupled, **group}),
        host=adamw_step,
        device=device.adamw,
        back=device.adamw_back,
        refused=("amsgrad", "maximize", "differentiable", "capturable"),
        converts=("AdamWBf16", "AdamW8bit") if decoupled else (),
    )


_ADAMW: Final = _adam(torch.optim.AdamW, decoupled=True)

ENTRIES: Final[tuple[OptimizerEntry, ...]] = (
    _ADAMW,
    _adam(torch.optim.Adam, decoupled=False),
    OptimizerEntry(
        torch_class=AdamWBf16,
        planned_as="adamw-bf16",
        buffers=MOMENTS,
        read=read_seeded,
        host=adamw_step,
        device=adamw_narrow_,
        converts=("AdamW", "AdamW8bit"),
    ),
    OptimizerEntry(
        torch_class=AdamW8bit,
        planned_as="adamw-8bit",
        buffers=KEYS,
        read=lambda group: read_seeded(group) if rounds(group) else read(AdamWParams, group, seed=None),
        host=adamw_8bit_step,
        device=adamw_narrow_,
        converts=("AdamW", "AdamWBf16"),
    ),
    OptimizerEntry(
        torch_class=torch.optim.SGD,
        planned_as="sgd",
        buffers=("momentum_buffer",),
        read=functools.partial(read, SgdParams),
        host=sgd_step,
        device=device.sgd,
        counts_steps=False,
    ),
    OptimizerEntry(
        torch_class=torch.optim.Adagrad,
        planned_as="adagrad",
        buffers=("sum",),
        read=functools.partial(read, AdagradParams),
        host=adagrad_step,
        device=device.adagrad,
        starts_at="initial_accumulator_value",
    ),
    OptimizerEntry(
        torch_class=Lion,
        planned_as="lion",
        buffers=("exp_avg",),
        read=functools.partial(read, LionParams),
        host=lion_step,
        device=lion_,
        counts_steps=False,
    ),
    OptimizerEntry(
        torch_class=Muon,
        planned_as="muon",
        buffers=("momentum_buffer",),
        read=functools.partial(read, MuonParams),
        host=muon_step,
        device=muon,
        counts_steps=False,
        others=_ADAMW,
    ),
)


def entry_of(optimizer: torch.optim.Optimizer) -> OptimizerEntry:
    """Return the entry of a user's optimizer.

    One without a kernel, or with a flag that its kernel does not support, gets an entry of its own.

    Raises:
        ValueError: it is one of ``bitsandbytes``, whose kernels do not see where a plan keeps weights;
            ``SparseAdam``, as a plan has no sparse gradients; or it wraps another one, whose groups are its own.
    """
    found = next((entry for entry in ENTRIES if type(optimizer) is entry.torch_class), None)
    if found and not any(group.get(flag) for group in optimizer.param_groups for flag in ("amsgrad", "maximize")):
        return found
    name = f"{type(optimizer).__module__}.{type(optimizer).__name__}"
    why = ""
    if name.startswith("bitsandbytes."):
        why = "whose kernels do not see weights where a plan keeps them"
    elif type(optimizer) is torch.optim.SparseAdam:
        why = "which takes sparse gradients alone, but those under a plan are dense"
    elif getattr(getattr(type(optimizer), "param_groups", None), "fset", None):
        raise ValueError(
            f"the optimizer is {name}, which wraps another one and decides when that steps; give ullage.prepare the "
            "optimizer that it wraps, and wrap the one that ullage.prepare returns (as accelerator.prepare does)"
        )
    if why:
        raise ValueError(f"the optimizer is {name}, {why}; {_nearest(optimizer) or 'use one of torch.optim'}")
    try:
        return _own_entry(optimizer)
    except Exception as error:  # noqa: BLE001 - whatever a step raises that cannot be taken so
        return _whole_entry(optimizer, " ".join(str(error).split())[:200] or f"it raises {type(error).__name__}")


def _whole_entry(optimizer: torch.optim.Optimizer, why: str) -> OptimizerEntry:
    def nothing(*_args: object) -> None:
        """Leave the update to the optimizer itself."""

    return OptimizerEntry(
        torch_class=type(optimizer),
        planned_as=ELEMENTWISE[0],
        buffers=(),
        read=lambda _group: OwnParams({}),
        host=nothing,
        device=nothing,
        counts_steps=False,
        refused=(),
        whole=f"{why}; {nearest}" if (nearest := _nearest(optimizer)) else why,
    )


def _own_entry(optimizer: torch.optim.Optimizer) -> OptimizerEntry:
    own = OwnStep(optimizer)
    if len(own.buffers) >= len(ELEMENTWISE):
        raise ValueError(f"it keeps {len(own.buffers)} values for each")
    return OptimizerEntry(
        torch_class=type(optimizer),
        planned_as=ELEMENTWISE[len(own.buffers)],
        buffers=own.buffers,
        read=own.read,
        host=functools.partial(device.on_host, own.on_device),
        device=own.on_device,
        counts_steps=own.counts_steps,
        refused=("differentiable", "capturable"),
        own=own,
        numbers=own.numbers,
    )


def _nearest(optimizer: torch.optim.Optimizer) -> str:
    """Return which optimizer to use instead of one that has no entry, in words; nothing if none is like it."""
    name = type(optimizer).__name__
    is_small = getattr(getattr(optimizer, "args", None), "optim_bits", None) == 8  # of bitsandbytes
    if "Lion" in name or "Muon" in name:
        ours, why = ("Lion" if "Lion" in name else "Muon"), "which makes the same updates"
    elif "8bit" in name or (is_small and "Adam" in name):
        ours, why = "AdamW8bit", "whose state is that of bitsandbytes in 8 bits"
    elif "4bit" in name or is_small or name in {"Adafactor", "GaLoreAdamW", "APOLLOAdamW", "Lomo", "AdaLomo"}:
        ours, why = "AdamW8bit", "which keeps 2 bytes of state per parameter beside the master copy"
    elif "Adam" in name and name not in {"Adam", "AdamW"}:
        return "use torch.optim.AdamW (in a Trainer: optim='adamw_torch'): the plan puts its state where there is room"
    else:
        return ""
    return f"use ullage.{ours}, {why} (in a Trainer: optimizer_cls_and_kwargs=(ullage.{ours}, {{'lr': ...}}))"


def torch_class_of(planned: Optimizer) -> Callable[..., torch.optim.Optimizer]:
    """Return the class of a plan's optimizer.

    Raises:
        ValueError: the plan is for a class that only its user has.
    """
    for entry in ENTRIES:
        if entry.planned_as == planned:
            return entry.torch_class
    raise ValueError(f"the plan is for {OPTIMIZERS[planned].words}; give ullage.prepare that optimizer with this plan")


assert all(len(entry.buffers) == len(OPTIMIZERS[entry.planned_as].buffers) for entry in ENTRIES)
