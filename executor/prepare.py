"""The entry: a user's model and optimizer in, the same model and an optimizer with the same face out."""

from collections.abc import Callable, Mapping
from typing import Any, final

import torch
from torch import nn

from executor.optimizer.table import OptimizerEntry, entry_of
from executor.options import SessionOptions
from executor.session import Session
from executor.state import ParameterState, Part, UnitState, write_weights
from planner.decisions import Decisions
from planner.graph import Unit

_ON_CPU = SessionOptions()


def prepare_session(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    units: tuple[Unit, ...],
    decisions: Decisions,
    options: SessionOptions = _ON_CPU,
) -> tuple[nn.Module, "OffloadedOptimizer"]:
    """Put a model and its optimizer under a plan's decisions.

    The model is changed in place: its parameters move to where the plan keeps them. The training loop stays as it is,
    with the returned optimizer instead of the given one (of which the state, if any, is taken over).

    A plan for several ranks is executed by as many processes (``torchrun``), all of which run the same loop, each with
    its own part of every batch. They begin with rank 0's weights; buffers and the given optimizer's state are each
    rank's own. Norms are those of all ranks. All ranks evaluate, save, load and close together. On GPUs, the current
    device is the rank's (``torch.cuda.set_device``). If a rank fails, the others raise
    :class:`executor.watch.RankError`.

    Args:
        model: an unmodified module with the planned parameters.
        optimizer: one that :data:`executor.optimizer.table.ENTRIES` has, over the model's parameters or some of them,
            in any groups. Schedulers may be built on it or on the result.
        units: the model's units in forward order, for the decided micro-batch.
        decisions: what to execute.
        options: how.

    Returns:
        The model, and the optimizer to use from now on.

    Raises:
        ValueError: the optimizer is not known or not the planned one, the decisions cannot be executed, or the model
            is another one.
        DeviceMemoryError: a tier is too small.
        RankError: another rank has failed.
    """
    entry = entry_of(optimizer)
    session = Session(model, entry, optimizer.param_groups, units, decisions, options)
    return model, OffloadedOptimizer(optimizer, entry, session)


@final
class OffloadedOptimizer(torch.optim.Optimizer):
    """An optimizer whose updates run where a plan says. It shares the parameter groups of the one it stands for.

    Attributes:
        entry: what it computes.
        session: executes the plan.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, entry: OptimizerEntry, session: Session) -> None:
        super().__init__(optimizer.param_groups, optimizer.defaults)  # keeps the very dicts that it is given
        self.entry = entry
        self.session = session
        self._given = optimizer
        for group in self.param_groups:
            for parameter in group["params"]:
                if state := optimizer.state.get(parameter):
                    self._write_state(session.name_of(parameter), state, group)
        optimizer.state.clear()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """See ``torch.optim.Optimizer``; not once the plan is under way."""
        if hasattr(self, "session"):
            raise ValueError("parameters cannot be added under a plan; add them before prepare()")
        super().add_param_group(param_group)

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Begin the updates and return while they run; each is done before its parameter is used next.

        Raises:
            ValueError: there is a closure.
            OutOfOrderError: not all planned micro-batches have been there.
        """
        if closure is not None:
            raise ValueError("step(closure) computes again inside the step, which no plan has; call step()")
        self.session.step()
        self._given._opt_called = True  # type: ignore[attr-defined]  # schedulers built on it look whether it has stepped

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale all gradients so that their common 2-norm is at most ``max_norm``; return the norm before that.

        The same as ``torch.nn.utils.clip_grad_norm_`` on all parameters, which works too.

        Raises:
            GradientError: the plan has no clipping.
        """
        return nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], max_norm)

    def state_dict(self) -> dict[str, Any]:
        """Return the state in the format of the optimizer that it stands for, in float32 on the host.

        Where weights are bf16, each parameter also has its float32 ``master``. Waits for updates under way. It is
        whole on every rank, and all ranks call it together.
        """
        states = self._read_states()
        state: dict[int, dict[str, Any]] = {}
        groups, index = [], 0
        for group in self.param_groups:
            numbers = range(index, index + len(group["params"]))
            index = numbers.stop
            groups.append({k: v for k, v in group.items() if k != "params"} | {"params": list(numbers)})
            for number, parameter in zip(numbers, group["params"], strict=True):
                entry = states.get(self.session.name_of(parameter))
                if entry is not None:
                    state[number] = entry
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict`, or that of the optimizer it stands for, returned.

        Without a ``master`` the model's present weights are the master copy. Every rank gives the whole state.

        Raises:
            ValueError: other groups, or groups of other sizes, than this optimizer has.
        """
        theirs = state_dict["param_groups"]
        if [len(g["params"]) for g in theirs] != [len(g["params"]) for g in self.param_groups]:
            raise ValueError(
                f"the state has groups of {[len(g['params']) for g in theirs]} parameters, this optimizer has "
                f"{[len(g['params']) for g in self.param_groups]}; make the optimizer as it was when it was saved"
            )
        self.session.parameter_states()  # at rest
        for group, their in zip(self.param_groups, theirs, strict=True):
            for number, parameter in zip(their["params"], group["params"], strict=True):
                entry = state_dict["state"].get(number, {})
                self._write_state(self.session.name_of(parameter), entry, their)
            group.update({k: v for k, v in their.items() if k != "params"})

    def _read_states(self) -> dict[str, dict[str, Any]]:
        units = {unit.name: unit for unit, _ in self.session.parameter_states().values()}
        states: dict[str, dict[str, Any]] = {}
        for unit in units.values():
            keys = ("master", *self.entry.buffers)
            whole = {key: self.session.collected(_own(unit, i), unit) for i, key in enumerate(keys)}
            if unit.own_weights.dtype is torch.float32:  # the weights are the master copy
                del whole["master"]
            for entry in unit.parameters:
                if entry.step or self.entry.starts_at:
                    shape = entry.parameter.shape
                    cut = {key: flat[entry.start : entry.stop].clone().view(shape) for key, flat in whole.items()}
                    step = {"step": torch.tensor(float(entry.step))} if self.entry.counts_steps else {}
                    states[entry.name] = step | cut
        return states

    def _write_state(self, name: str, entry: Mapping[str, Any], group: Mapping[str, Any]) -> None:
        unit, parameter = self.session.parameter_states()[name]
        buffers = [entry.get(key) for key in self.entry.buffers]
        # Where steps are not told, state tells that there was one.
        parameter.step = int(entry.get("step", any(values is not None for values in buffers)))
        initial = None
        if self.entry.starts_at and not parameter.step:  # not from the state, which has the model's type
            initial = group[self.entry.starts_at]
        for part in parameter.parts:
            for buffer, values in zip(unit.buffers(part.piece), buffers, strict=True):
                target = _of_piece(buffer, part)
                if values is None or initial is not None:
                    target.fill_(initial or 0.0)
                else:
                    target.copy_(_of_parameter(values, parameter, part))
        if "master" in entry:
            write_weights(unit, parameter, entry["master"].reshape(-1))


def _own(unit: UnitState, which: int) -> torch.Tensor:
    """Return one tensor of the state that the rank has of a unit, float32 ``[shard]``, on the host."""
    return torch.cat([unit.state(piece)[which].cpu() for piece in unit.pieces])


def _of_piece(tensor: torch.Tensor, part: Part) -> torch.Tensor:
    return tensor[part.start - part.piece.start : part.stop - part.piece.start]


def _of_parameter(tensor: torch.Tensor, parameter: ParameterState, part: Part) -> torch.Tensor:
    return tensor.reshape(-1)[part.start - parameter.start : part.stop - parameter.start]
