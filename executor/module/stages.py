"""One stage of a pipeline, cut out of the user's model.

Every process makes the whole model, and keeps the weights of its own stage. The modules of
other stages stay where they are, without weights: layers and norms hand their input on, embeddings and projections
return zeros. So the model's own forward runs, and makes masks, positions and rotations of the batch as it does in one
process. In place of its input, the stage's first layer gets the hidden states of the stage before; what its last layer
makes is sent on.
"""

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from executor.callbacks import replace_attribute
from executor.distributed.shards import BindingError
from executor.module.binding import segment_module, unit_modules
from executor.module.empty import give_values
from executor.module.naming import Naming
from planner.graph import Unit

Receive = Callable[[Tensor], None]
"""Fills a tensor with the hidden states of the stage before."""


@final
class Stage:
    """The part of a model that this process computes; what the others compute is handed on.

    Args:
        model: the whole model, which is changed in place.
        dealt: the segments of every stage.
        number: this process's stage.

    Attributes:
        received: the hidden states that the latest forward began with, which get a gradient; ``None`` if it began with
            the batch.
        made: what the stage's last layer made in the latest forward; ``None`` if the model's output follows.
        receive: see :data:`Receive`. Set it before a forward.
        homes: all of the model's parameters, each with its shape, and the first stage that has it. Those that this
            process does not have are empty, once they are dropped.

    Raises:
        BindingError: the model's layers are not modules of their own.
    """

    def __init__(self, model: nn.Module, dealt: Sequence[Sequence[list[Unit]]], number: int) -> None:
        self.received: Tensor | None = None
        self.made: Tensor | None = None
        self.receive: Receive | None = None
        self._model, self._undo = model, list[Callable[[], None]]()
        self._taken: list[tuple[nn.Module, str, nn.Parameter]] = []
        stage_of = {unit.name: stage for stage, parts in enumerate(dealt) for part in parts for unit in part}
        layers = {
            segment_module(model, part): stage
            for stage, parts in enumerate(dealt)
            for part in parts
            if part[0].in_layer
        }
        own = [layer for layer, stage in layers.items() if stage == number]
        if model in layers or not own:
            raise BindingError(
                "layers of the model are not modules of their own, so it cannot be cut into stages; plan with "
                "--parallel pipeline=1"
            )
        inside = {module for layer in layers for module in layer.modules()}
        units = tuple(unit for parts in dealt for part in parts for unit in part)
        around = {m: stage_of[unit] for m, unit in unit_modules(model, units).items() if m not in inside | {model}}
        homes: dict[nn.Parameter, int] = {}
        for module, stage in (layers | around).items():
            for parameter in module.parameters():
                homes[parameter] = min(homes.get(parameter, stage), stage)
        self.homes = {p: (p.shape, homes[p]) for p in model.parameters() if p in homes}
        for module, stage in (layers | around).items():
            if stage != number:
                self._replace(module)
        if number > 0:
            self._undo.append(own[0].register_forward_pre_hook(self._begin, with_kwargs=True).remove)
        if number < len(dealt) - 1:
            self._undo.append(own[-1].register_forward_hook(self._end).remove)
        self._undo.append(model.register_forward_pre_hook(self._check_call).remove)
        self._undo.append(model.register_state_dict_pre_hook(self._refuse_state_dict).remove)  # type: ignore[no-untyped-call]

    def drop(self) -> None:
        """Free the weights of other stages."""
        kept = {*self._model.parameters()}
        for parameter in self.homes:
            if parameter not in kept:
                give_values(parameter, torch.empty(0, dtype=parameter.dtype, device="cpu"))

    def has(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a parameter of any stage."""
        return isinstance(tensor, nn.Parameter) and tensor in self.homes

    def naming(self) -> Naming:
        """Return the names of the whole model's tensors in files of weights."""
        for inner, name, parameter in self._taken:
            inner._parameters[name] = parameter
        try:
            return Naming(self._model, {id(parameter): shape for parameter, (shape, _) in self.homes.items()})
        finally:
            for inner, name, _ in self._taken:
                inner._parameters[name] = None

    def _replace(self, module: nn.Module) -> None:
        """Take a module's weights, and let it hand on what it is given."""
        forward = _zeros(module) if isinstance(module, nn.Embedding | nn.Linear) else _through
        self._undo.append(replace_attribute(module, "forward", forward))
        for inner in module.modules():
            for name, parameter in list(inner.named_parameters(recurse=False)):
                inner._parameters[name] = None
                self._taken.append((inner, name, parameter))

    def _begin(self, _layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        assert self.receive is not None
        name = next(iter(kwargs), "")
        given = args[0] if args else kwargs[name]
        self.received = torch.empty(given.shape, dtype=given.dtype, device=given.device)
        self.receive(self.received)
        self.received.requires_grad_(torch.is_grad_enabled())
        return ((self.received, *args[1:]), kwargs) if args else ((), kwargs | {name: self.received})

    def _end(self, _layer: nn.Module, _args: Any, output: Any) -> None:
        self.made = output if isinstance(output, Tensor) else output[0]

    def _check_call(self, *_: object) -> None:
        if self.receive is None:
            raise BindingError(
                "the model was called, but this process has one stage of it; call optimizer.forward_backward(batches), "
                "or optimizer.evaluate(batches)"
            )

    def _refuse_state_dict(self, *_: object) -> None:
        raise BindingError(
            "this process has the weights of one stage; call session.close() before model.state_dict(), which gives it "
            "those of all"
        )

    def undo(self) -> None:
        """Make the model whole again. Parameters that were dropped stay empty."""
        while self._undo:
            self._undo.pop()()
        while self._taken:
            module, name, parameter = self._taken.pop()
            module.register_parameter(name, parameter)


def _through(hidden_states: Any, *_args: Any, **_kwargs: Any) -> Any:
    return hidden_states


def _zeros(module: nn.Embedding | nn.Linear) -> Callable[..., Tensor]:
    """Return what stands for an embedding or a projection: zeros of its shape, which take no memory.

    Those of a class of the model's own, which looks up positions, broadcast to the others.
    """
    zero = torch.zeros((), dtype=module.weight.dtype, device="cpu")
    width = module.embedding_dim if isinstance(module, nn.Embedding) else module.out_features

    def zeros(given: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
        shape = given.shape if isinstance(module, nn.Embedding) else given.shape[:-1]
        return zero.to(given.device).expand(*(shape if type(module) in {nn.Embedding, nn.Linear} else ()), width)

    return zeros
