"""One stage of a pipeline, cut out of the user's model.

Every process makes the whole model, and keeps the weights of its own stage. The modules of other stages stay where they
are, without weights: layers hand their input on, all else returns zeros. So the model's own forward runs, and makes
masks, positions and rotations of the batch as it does in one process. In place of its input, the stage's first layer
gets the hidden states of the stage before; what the next stage's first layer is given is sent on. Whatever else of
earlier stages layers are given, or the model's own code reads, such as the output of an encoder, or what a skip
connection brings, is sent beside it (:mod:`executor.module.cuts`).
"""

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from executor.callbacks import in_backward, replace_attribute, with_gradient
from executor.distributed.shards import BindingError, check_outputs
from executor.module.binding import segment_module, unit_modules
from executor.module.cuts import (
    HIDDEN,
    OUTPUT,
    Absent,
    Crossing,
    Cuts,
    Operators,
    Part,
    cuts_of,
    exchanged,
    first_of,
    hidden_alone,
    on_meta,
    without_values,
)
from executor.module.empty import give_values
from executor.module.naming import Naming
from executor.module.tiled_logits import find_head
from planner.graph import Unit

_MOST_SHAPES: Final = 32  # of batches, whose cuts are kept
Receive = Callable[[Sequence[Tensor]], None]
"""Fills tensors with what the stage before sends next, all of a micro-batch."""


@final
class Stage:
    """The part of a model that this process computes; what the others compute is handed on.

    Args:
        model: the whole model, which is changed in place.
        chunks: the segments of every chunk, see [Note: Rounds] in :mod:`planner.lowering.stages`.
        number: this process's stage.
        num_stages: stages, of which each has every so many chunks.
        num_sharing: ranks that share the tokens of every sequence, of which each gets its own from the stage before.
        shares_evaluation: whether they do so in evaluation, too.
        operators: what follows a model that may be any, so that :meth:`check` says whether it can be cut; ``None`` for
            a model whose layers are known.

    Attributes:
        gradients: of what the latest forward was sent, in order, when its backward has ended; ``None`` if it began
            with the batch.
        receive: see :data:`Receive`. Set it before a forward.
        homes: all of the model's parameters, each with its shape, and the first stage that has it. Those that this
            process does not have are empty, once they are dropped.

    Raises:
        BindingError: the model's layers are not modules of their own.
    """

    def __init__(
        self,
        model: nn.Module,
        chunks: Sequence[Sequence[list[Unit]]],
        number: int,
        num_stages: int,
        *,
        num_sharing: int = 1,
        shares_evaluation: bool = True,
        operators: Operators | None = None,
    ) -> None:
        self.gradients: list[Tensor] | None = None
        self.receive: Receive | None = None
        self._num_sharing, self._shares_evaluation = num_sharing, shares_evaluation
        self._model, self._undo = model, list[Callable[[], None]]()
        self._number, self._num_stages, self._chunk = number, num_stages, number
        self._received, self._sent = list[Tensor](), dict[int, Tensor]()
        self._device: torch.device | None = None  # of the batch
        paths = {module: path for path, module in model.named_modules()}
        self._taken: list[tuple[nn.Module, str, nn.Parameter]] = []
        chunk_of = {unit.name: chunk for chunk, parts in enumerate(chunks) for part in parts for unit in part}
        layers = {
            segment_module(model, part): chunk
            for chunk, parts in enumerate(chunks)
            for part in parts
            if part[0].in_layer
        }
        if model in layers or not any(chunk % num_stages == number for chunk in layers.values()):
            raise BindingError(
                "layers of the model are not modules of their own, so it cannot be cut into stages; plan with "
                "--parallel pipeline=1"
            )
        self._parts = [part_of(parts, model) for parts in chunks]
        self._cuts, self._known = hidden_alone(self._parts), dict[tuple[Any, ...], Cuts]()
        self._returning: dict[str, nn.Module] = {}  # whose output crosses, by path, in the order in which they run
        self._operators, is_captured = operators, operators is not None
        self._twin = without_values(model) if is_captured else None
        inside = {module for layer in layers for module in layer.modules()}
        units = tuple(unit for parts in chunks for part in parts for unit in part)
        # What contains layers runs in every stage, also where it reads weights of modules inside by itself.
        holds = {module for module in model.modules() if not layers.keys().isdisjoint(module.modules())}
        around = {m: chunk_of[unit] for m, unit in unit_modules(model, units).items() if m not in inside | holds}
        homes: dict[nn.Parameter, int] = {}
        for module, chunk in (layers | around).items():
            for parameter in module.parameters():
                homes[parameter] = min(homes.get(parameter, num_stages), chunk % num_stages)
        apart = _around_layers(model, inside | around.keys()) if is_captured else {}
        owner = {spec.name: chunk_of[u.name] for u in units for spec in (*u.parameters, *u.frozen)}
        homes |= {p: owner.get(path, 0) % num_stages for path, (_, _, p) in apart.items() if p not in homes}
        self.homes = {p: (p.shape, homes[p]) for p in model.parameters() if p in homes}
        own = {m: chunk // num_stages for m, chunk in (layers | around).items() if chunk % num_stages == number}
        stands = {  # all are made before any module loses its weights, of which others may contain it
            module: self._through(paths[module]) if module in layers else self._like(module)
            for module in (layers | around)
            if module not in own or len(chunks) > num_stages
        }
        stand_ins = {module: _StandIn(module, forward) for module, forward in stands.items() if module in own}
        for module, name, parameter in (each for each in apart.values() if homes[each[2]] != number):
            self._take(module, name, parameter)
        kept = [(owner.get(path, 0) // num_stages, each) for path, each in apart.items() if homes[each[2]] == number]
        self._apart = kept if len(chunks) > num_stages else []  # with the round in which the model needs it
        for module in stands.keys() - own.keys():
            self._replace(module, stands[module])
        self._places = [
            (parent._modules, name, child, stand_ins[child], own[child])
            for parent in model.modules()
            for name, child in parent._modules.items()
            if child in stand_ins
        ]
        self._given = list[tuple[nn.Module, str]]()  # layers, with their paths
        for chunk in range(number, len(chunks), num_stages):
            there = [(layer, paths[layer]) for layer, its in layers.items() if its == chunk] if chunk else []
            self._given += there if is_captured else there[:1]
        self._undo.append(model.register_forward_pre_hook(self._check_call).remove)
        if not is_captured:
            whole = functools.partial(check_outputs, "ranks share layers", "pipeline=1")
            self._undo.append(model.register_forward_pre_hook(whole, with_kwargs=True).remove)
        self._undo.append(model.register_state_dict_pre_hook(self._refuse_state_dict).remove)  # type: ignore[no-untyped-call]

    def bind(self) -> None:
        """Give layers what is received, before other hooks say that the model has reached them: until then it waits."""
        taken = {inner: parameter.dtype for inner, _, parameter in self._taken}
        for module in self._model.modules():
            within = [taken[inner] for inner in module.modules() if inner in taken]
            if within and next(module.parameters(), None) is None:
                self._undo.append(replace_attribute(module, "parameters", functools.partial(self._empty, within[0])))
        for layer, path in self._given:
            give = functools.partial(self._give, path)
            self._undo.append(layer.register_forward_pre_hook(give, prepend=True, with_kwargs=True).remove)

    def _empty(self, dtype: torch.dtype, **_: bool) -> Iterator[nn.Parameter]:
        """Yield what stands for the weights of a module that has none here: models ask for their type and device."""
        yield nn.Parameter(torch.empty(0, dtype=dtype, device=self._device), requires_grad=False)

    def check(self, batch: Mapping[str, Any], loss: Callable[[Any, Mapping[str, Any]], Any] | None = None) -> None:
        """Look at a batch. Find what crosses the cuts of a captured model, see :func:`executor.module.cuts.cuts_of`.

        Where hidden states alone do, that is the same for all batches. With a ``loss``, it is what that needs.

        Raises:
            BindingError: the model cannot be cut.
        """
        self._device = next((leaf.device for leaf in tree_leaves(dict(batch)) if isinstance(leaf, Tensor)), None)
        if self._twin is None or self._operators is None:
            return
        key = (loss, *((name, leaf.shape) for name, leaf in batch.items() if isinstance(leaf, Tensor)))
        if key not in self._known:
            if len(self._known) == _MOST_SHAPES:
                self._known.pop(next(iter(self._known)))
            found = cuts_of(self._twin, self._parts, batch, self._operators, loss)
            if found.refusals:
                raise BindingError(found.refusals[max(found.refusals)])
            self._known[key] = found
            crossing = {path for cut in found.crossing for each in cut for path, _ in each.returned}
            for path in (path for path in found.forms if path in crossing and path not in self._returning):
                module = self._returning[path] = self._model.get_submodule(path)
                self._undo.append(module.register_forward_hook(functools.partial(self._returned, path)).remove)
        self._cuts = self._known[key]
        if all(len(cut) < 2 for cut in self._cuts.crossing) and all(map(_is_hidden, self._cuts.forms.values())):
            self._twin = None

    @contextlib.contextmanager
    def in_round(self, turn: int) -> Iterator[None]:
        """Return a context in which the model computes what the stage has in a round, and hands the rest on."""
        self._chunk = self._number + turn * self._num_stages
        self.gradients = None
        for modules, name, _, stand_in, its in self._places:
            if its != turn:
                modules[name] = stand_in
        elsewhere = [each for its, each in self._apart if its != turn]
        for module, name, parameter in elsewhere:
            self._hide(module, name, parameter)
        try:
            yield
        finally:
            for modules, name, module, _, _ in self._places:
                modules[name] = module
            for module, name, parameter in elsewhere:
                vars(module).pop(name)
                module._parameters[name] = parameter
            self._received, self._sent = [], {}

    def made(self) -> list[Tensor]:
        """Return what the next chunk is to be sent, when the model's forward has ended in the stage's round."""
        crossing = self._cuts.crossing[self._chunk + 1]
        return [
            self._sent[at] if each.passed_on is None else self._received[each.passed_on]
            for at, each in enumerate(crossing)
        ]

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

    def _replace(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        """Take a module's weights, and let another function stand for it."""
        self._undo.append(replace_attribute(module, "forward", forward))
        for inner in module.modules():
            for name, parameter in list(inner.named_parameters(recurse=False)):
                self._take(inner, name, parameter)

    def _take(self, module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        self._hide(module, name, parameter)
        self._taken.append((module, name, parameter))

    def _hide(self, module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        """Take a parameter; zeros that take no memory are there for whoever looks at its type or shape."""
        module._parameters[name] = None
        vars(module)[name] = torch.zeros((), dtype=parameter.dtype, device="cpu").expand(parameter.shape)

    def _give(self, path: str, _layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Give a layer what crosses the cut before its chunk; the first one receives all of it."""
        if path == self._parts[self._chunk][0][0]:
            self._receive_all(first_of(args, kwargs))
        return self._with_received(path, (args, kwargs))

    def _receive_all(self, hidden: Tensor | None = None) -> list[Tensor]:
        """Receive what crosses the cut before the chunk, once; ``hidden`` is like the first of it, if that is known."""
        if not self._received:
            self.gradients = []
            crossing = self._cuts.crossing[self._chunk]
            assert self.receive is not None
            device = self._device if hidden is None else hidden.device
            likes = [each.like if at or hidden is None else hidden for at, each in enumerate(crossing)]
            self.receive(values := [self._memory_for(like, device) for like in likes])
            self._received = [
                self._begun(at, each, trains=crosses.trains)
                for at, (each, crosses) in enumerate(zip(values, crossing, strict=True))
            ]
        return self._received

    def _with_received(self, path: str, value: Any) -> Any:
        given = self._cuts.given[self._chunk].get(path, {})
        return exchanged(value, {leaf: self._received[at] for leaf, at in given.items()})

    def _like(self, module: nn.Module) -> Callable[..., Any]:
        """Return what stands for any module: zeros of the shapes of its outputs.

        They take no memory, unless the model changes them in place. Logits of ``transformers`` are without values
        instead: models convert, scale or shift them, which gives zeros memory.
        """
        twin, path = without_values(module), next(path for path, m in self._model.named_modules() if m is module)
        is_head = hasattr(self._model, "get_output_embeddings") and module is find_head(self._model)

        def zeros(*args: Any, **kwargs: Any) -> Any:
            tensors = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
            device = next((leaf.device for leaf in tensors), self._device)
            with torch.no_grad():
                made = twin(*on_meta(args), **on_meta(kwargs))
            if is_head:
                return made.as_subclass(Absent)
            if path in self._cuts.changed:
                made = tree_map_only(Tensor, lambda leaf: torch.zeros_like(leaf, device=device), made)
            else:
                made = tree_map_only(Tensor, lambda leaf: leaf.new_zeros((), device=device).expand(leaf.shape), made)
            return self._with_returned(path, made)

        return zeros

    def output(self, output: Any) -> Any:
        """Return the model's output, with the tensors that earlier stages have made of it."""
        return self._with_received(OUTPUT, output)

    def _memory_for(self, like: Tensor | None, device: torch.device | None) -> Tensor:
        """Return memory for what this rank receives of a tensor that crosses a cut."""
        assert like is not None
        shape = list(like.shape)
        if self._shares_evaluation or torch.is_grad_enabled():
            shape[1:2] = [-(-tokens // self._num_sharing) for tokens in shape[1:2]]
        return torch.empty(shape, dtype=like.dtype, device=device)

    def _begun(self, at: int, values: Tensor, *, trains: bool) -> Tensor:
        """Return what has been received, as the beginning of a graph if it has a gradient."""
        assert self.gradients is not None
        self.gradients.append(values.new_zeros(()).expand_as(values))  # if none comes
        if not trains:
            return values
        anchor = torch.ones(0, device="cpu", requires_grad=True)
        # The graph that begins here keeps the gradient alone, so that the values may leave the device.
        return with_gradient(anchor, lambda _anchor: values, functools.partial(self.gradients.__setitem__, at))

    def _through(self, path: str) -> Callable[..., Any]:
        """Return what stands for a layer. It returns what it is given first, in the form that the layer returns.

        All other tensors are zeros. What the next chunk is to be given here is kept, to be sent.
        """

        def forward(*args: Any, **kwargs: Any) -> Any:
            for at, each in self._to_send():
                if each.layer == path:
                    self._sent.setdefault(at, tree_leaves((args, kwargs))[each.leaf])
            for inner, module in self._returning.items():
                if inner.startswith(f"{path}."):
                    _run_hooks(module, (), self._zeros(inner, None))
            return self._zeros(path, first_of(args, kwargs))

        return forward

    def _zeros(self, path: str, hidden: Tensor | None) -> Any:
        """Return what a layer of another chunk returns that is given hidden states, or a module inside it."""

        def made(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return hidden if leaf is HIDDEN else leaf
            zeros = torch.zeros((), dtype=leaf.dtype, device=self._device).expand(leaf.shape)
            return zeros.contiguous() if path in self._cuts.changed else zeros

        return self._with_returned(path, tree_map(made, self._cuts.forms.get(path, HIDDEN)))

    def _to_send(self) -> Iterator[tuple[int, Crossing]]:
        """Yield what the chunk itself makes of what crosses the cut behind it, each with its position there."""
        behind = self._chunk + 1
        crossing = self._cuts.crossing[behind] if behind < len(self._parts) else ()
        return ((at, each) for at, each in enumerate(crossing) if each.passed_on is None)

    def _returned(self, path: str, _module: nn.Module, _args: Any, output: Any) -> Any:
        """Keep what a module of the chunk returns, to be sent, and return what was received of another one's."""
        if in_backward():
            return output
        for at, each in self._to_send():
            if (leaf := dict(each.returned).get(path)) is not None:
                self._sent.setdefault(at, tree_leaves(output)[leaf])  # the module that runs first has made it
        return self._with_returned(path, output)

    def _with_returned(self, path: str, output: Any) -> Any:
        """Return what a module returns, with what was received of it."""
        crossing = enumerate(self._cuts.crossing[self._chunk])
        found = [(leaf, at) for at, each in crossing for returned, leaf in each.returned if returned == path]
        return exchanged(output, {leaf: self._receive_all()[at] for leaf, at in found})

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
            vars(module).pop(name, None)
            module.register_parameter(name, parameter)


class _StandIn(nn.Module):
    """Hands on what one of the stage's modules gets in the rounds of others, with the hooks of others alone.

    The model finds the module's other attributes, of which some choose masks, its class and the modules inside it,
    because ``transformers`` hooks all of some class that it finds in the first forward.
    """

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        own = vars(self)
        own["_stands_for"] = module  # not as a child
        own |= {name: vars(module)[name] for name in ("_modules", "_forward_hooks", "_forward_hooks_with_kwargs")}
        self.forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self.forward(*args, **kwargs)
        _run_hooks(vars(self)["_stands_for"], args, output)
        return output

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(vars(self)["_stands_for"])

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_stands_for"], name)


def _is_hidden(form: Any) -> bool:
    """Return whether a layer returns no tensor but hidden states like those that it is given."""
    return not any(isinstance(leaf, Tensor) for leaf in tree_leaves(form))


def _run_hooks(module: nn.Module, args: Any, output: Any) -> None:
    """Run the forward hooks of others on a module, such as those that collect what it returns."""
    for number, hook in module._forward_hooks.items():
        function = hook.func if isinstance(hook, functools.partial) else hook
        if not str(function.__module__).startswith("executor."):
            given = ({}, output) if number in module._forward_hooks_with_kwargs else (output,)
            hook(module, args, *given)


def _around_layers(model: nn.Module, others: Collection[nn.Module]) -> dict[str, tuple[nn.Module, str, nn.Parameter]]:
    """Return the parameters of all but some modules: of what contains layers. By path: the module, and its name."""
    return {
        f"{path}.{name}" if path else name: (module, name, parameter)
        for path, module in model.named_modules()
        if module not in others
        for name, parameter in module.named_parameters(recurse=False)
    }


def part_of(parts: Sequence[list[Unit]], model: nn.Module) -> Part:
    """Return the layers and parameters of a chunk, by name."""
    paths = {module: path for path, module in model.named_modules()}
    units = [unit for part in parts for unit in part]
    names = {spec.name for unit in units for spec in (*unit.parameters, *unit.frozen)}
    names.update(name for unit in units for name in unit.shared_parameters)
    return [paths[segment_module(model, part)] for part in parts if part[0].in_layer], frozenset(names)
