"""What crosses the cuts of a model of the user's own, from stage to stage of a pipeline.

A stage runs the model's own forward, in which all but its own layers hand on what they are given
(:mod:`executor.module.stages`). At a cut, it gets what the first layer behind it is given, and what else later layers
are given of earlier stages, such as the output of an encoder. All of it is found on a copy that has no values. The
copy's tensors are fake, so that models which look at values, as for masks, see that they are traced. Its graph begins
anew at each cut, with the arguments of layers. Where code behind a cut still reaches what a module before it has
returned, as skip connections and losses of several towers do, that crosses too. If it reaches weights of an earlier
stage in another way, the model is refused. What a forward computes without gradients is not seen.
"""

import contextlib
import copy
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from executor.distributed.shards import BindingError
from executor.memory.recompute_cache import Running

HIDDEN: Final = object()
"""Stands for hidden states in what a layer returns."""

_META: Final = torch.device("meta")
_REMEDY = "so the model cannot be cut there; prepare it without pipeline="


Part = tuple[Sequence[str], frozenset[str]]
"""A chunk of a model: paths of its layers, in order, and names of the parameters that it uses."""


class Crossing(NamedTuple):
    """A tensor that crosses a cut.

    Attributes:
        layer, leaf: the first layer behind the cut that is given it, and its position among the leaves of
            ``(args, kwargs)``; an empty path if none is.
        passed_on: its position among what crosses the cut before, if it crosses that too.
        like: a tensor of its shape and type, without values.
        returned: modules that return it and whose callers need it behind the cut, each with its position among the
            leaves of the output, in the order in which they run.
    """

    layer: str
    leaf: int
    passed_on: int | None = None
    like: Tensor | None = None
    returned: Sequence[tuple[str, int]] = ()


Operators = Callable[
    [Sequence[tuple[Tensor, Tensor]]], contextlib.AbstractContextManager[Callable[[Any, Any, dict[str, Any]], Any]]
]
"""Of fake tensors with their values: a context, with what runs an operator on fake arguments there.

It knows or assumes the values that operators need.
"""

Given = dict[str, dict[int, int]]
"""For paths of layers, and leaves of their arguments: which of the tensors that cross a cut it is.

Likewise for leaves of the model's output, at the path :data:`OUTPUT`.
"""
OUTPUT: Final = ""


class Cuts(NamedTuple):
    """What crosses the cuts of a model.

    Attributes:
        crossing: of the cut before each chunk; nothing crosses before the first one.
        given: of each chunk, which of these its layers are given, and the model's output has.
        forms: what each layer returns, by its path, with :data:`HIDDEN` in place of a first tensor like the first one
            that it is given; what other modules return whose output crosses, in the order in which they run. Tensors
            are without values.
        changed: layers, and modules outside of them, whose output is changed in place later.
    """

    crossing: list[list[Crossing]]
    given: list[Given]
    forms: Mapping[str, Any]
    changed: Collection[str] = ()


def hidden_alone(parts: Sequence[Part]) -> Cuts:
    """Return the cuts of a model whose layers hand on hidden states alone."""
    crossing = [[Crossing(layers[0], 0)] if number else [] for number, (layers, _) in enumerate(parts)]
    return Cuts(crossing, [{each.layer: {each.leaf: 0} for each in cut} for cut in crossing], {})


def without_values(module: nn.Module, device: torch.device = _META) -> nn.Module:
    """Return a copy on the meta device, or on another one in a fake mode, whose parameters all get gradients."""
    memo: dict[int, Any] = {id(each): torch.empty_like(each, device=device) for each in module.buffers()}
    for each in module.parameters():
        empty = torch.empty_like(each, device=device)
        memo[id(each)] = nn.Parameter(empty, requires_grad=each.is_floating_point())
    return copy.deepcopy(module, memo)


def first_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the first argument of a call."""
    return args[0] if args else next(iter(kwargs.values()), None)


def exchanged(value: Any, tensors: Mapping[int, Tensor]) -> Any:
    """Return a value, such as ``(args, kwargs)``, with other tensors at some positions among its leaves."""
    if not tensors:
        return value
    leaves, structure = tree_flatten(value)
    for position, tensor in tensors.items():
        leaves[position] = tensor
    return tree_unflatten(leaves, structure)


def on_meta(value: Any) -> Any:
    """Return a value with tensors on the meta device in place of its own."""
    return tree_map_only(Tensor, lambda leaf: leaf.to("meta"), value)


class Absent(Tensor):
    """Logits that a stage does not make: what a model makes of them has no values either, and takes no memory."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], _types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            made = func(*on_meta(tuple(args)), **on_meta(kwargs or {}))
        return made.as_subclass(cls) if isinstance(made, Tensor) else made


def cuts_of(
    twin: nn.Module,
    parts: Sequence[Part],
    batch: Mapping[str, Any],
    operators: Operators,
    loss: Callable[[Any, Mapping[str, Any]], Any] | None = None,
) -> Cuts:
    """Return what crosses the cuts.

    Args:
        twin: the model, see :func:`without_values`.
        parts: its chunks, in order.
        batch: keyword arguments of the model.
        operators: what runs the model's operators.
        loss: returns what backward begins with, of the model's output and its batch; ``None``: it may begin with
            anything that the model returns.

    Raises:
        BindingError: naming what cannot be cut.
    """
    watch, mode = _Watch(parts), FakeTensorMode(allow_non_fake_inputs=True)
    device = next((leaf.device for leaf in tree_leaves(dict(batch)) if isinstance(leaf, Tensor)), torch.device("cpu"))
    with mode:
        faked = without_values(twin, device)
        given = tree_map_only(Tensor, mode.from_tensor, dict(batch))
    watch.hook(faked, parts)
    values = zip(*map(tree_leaves, (given, dict(batch))), strict=True)
    known = [(fake, real.cpu()) for fake, real in values if isinstance(real, Tensor)]
    try:
        with (
            torch.enable_grad(),
            mode,
            operators(known) as run,
            Running(lambda function, _types, args, kwargs: run(function, watch.note_writes(function, args), kwargs)),
        ):
            output = watch.finish(faked(**given))
    except BindingError:
        raise
    except Exception as error:
        raise BindingError(f"forward cannot be followed without values ({error}), {_REMEDY}") from error
    if watch.seen != [path for layers, _ in parts for path in layers]:
        raise BindingError(f"layers do not run once each and in order ({', '.join(watch.seen[:4])}, ...), {_REMEDY}")
    names: dict[int, set[str]] = {}
    for name, parameter in faked.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(name)
    needed = output if loss is None else loss(output, given)
    roots = [leaf for leaf in tree_leaves(needed) if isinstance(leaf, Tensor)]
    for chunk, (layers, parameters) in reversed(list(enumerate(parts))):  # what modules return adds to the cuts before
        begun = {id(each) for each in watch.begun[chunk]}
        for leaf in (leaf for leaf in watch.reached(chunk, roots) if id(leaf) not in begun):
            found = names.get(id(leaf), {"a tensor"})
            if not parameters & found:
                raise BindingError(
                    f"what {layers[-1]} or a later layer computes depends on {min(found)} of another stage, "
                    f"beside what layers from {layers[0]} on are given, {_REMEDY}"
                )
        cut = zip(watch.whole[chunk], watch.crossing[chunk], strict=True)
        roots = [tensor for tensor, each in cut if each.passed_on is None]
    crossed = {path for cut in watch.crossing for each in cut for path, _ in each.returned}
    returned = {path: form for path, form in watch.returned.items() if path in crossed}
    return Cuts(watch.crossing, watch.given, returned | watch.forms, watch.changed)


_Edge = tuple[Any, int]
"""A node of autograd's graph, and which of its outputs."""


class _Watch:
    """Hooks of the layers, which begin a graph at each cut.

    Attributes:
        seen: paths of the layers that have run.
        crossing, given, forms: see :class:`Cuts`.
        returned: what modules return, by their paths, in the order in which they run.
        changed: see :class:`Cuts`.
        whole: by chunk, the tensors that cross the cut before it, with their graphs.
        begun: by chunk, the tensors with which its graph begins, in the same order.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self.seen: list[str] = []
        self.forms: dict[str, Any] = {}
        self.returned: dict[str, Any] = {}
        self.crossing: list[list[Crossing]] = [[] for _ in parts]
        self.given: list[Given] = [{} for _ in parts]
        self.whole: list[list[Tensor]] = [[] for _ in parts]
        self.begun: list[list[Tensor]] = [[] for _ in parts]
        self._firsts = {layers[0]: number for number, (layers, _) in enumerate(parts)}
        self._numbers = [0] * len(parts)  # autograd's next number at each cut
        self._own: list[set[int]] = []  # parameters of each chunk, by ``id``
        self._chunk = 0
        self._made: dict[_Edge, tuple[int, Crossing, Tensor]] = {}  # what modules return, and the chunk where they do
        self.changed = set[str]()
        self._outside: dict[int, tuple[str, Any]] = {}  # by address, what layers and modules outside of them return
        self._where: dict[_Edge, list[tuple[str, int]]] = {}  # modules that return it
        self._apart: list[range] = []  # autograd's numbers in modules that other stages do not run

    def hook(self, model: nn.Module, parts: Sequence[Part]) -> None:
        """Hook the layers, and the modules inside them."""
        named = [*model.named_parameters(remove_duplicate=False)]
        self._own = [{id(parameter) for name, parameter in named if name in parameters} for _, parameters in parts]
        layers = {model.get_submodule(path) for of_part, _ in parts for path in of_part}
        within = {inner for layer in layers for inner in layer.modules()}
        around = {path: module for path, module in model.named_modules() if path and module not in within}
        for path, module in around.items():
            module.register_forward_hook(functools.partial(self.end_outside, path))
        for module in (each for each in around.values() if layers.isdisjoint(each.modules())):
            if next(module.parameters(), None) is not None:
                self._set_apart(module)
        for path in (path for of_part, _ in parts for path in of_part):
            self._set_apart(layer := model.get_submodule(path))
            layer.register_forward_pre_hook(functools.partial(self.begin, path), with_kwargs=True)
            layer.register_forward_hook(functools.partial(self.end, path), with_kwargs=True)
            for name, inner in layer.named_modules(prefix=path):
                if inner is not layer:
                    inner.register_forward_hook(functools.partial(self.end_inside, name))

    def _set_apart(self, module: nn.Module) -> None:
        begun = list[int]()
        module.register_forward_pre_hook(lambda *_: begun.append(torch._C._autograd._get_sequence_nr()))
        module.register_forward_hook(
            lambda *_: self._apart.append(range(begun.pop(), torch._C._autograd._get_sequence_nr()))
        )

    def begin(self, path: str, _layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Begin a graph where a tensor of an earlier chunk is given to this layer."""
        self.seen.append(path)
        if path in self._firsts:
            self._chunk = self._firsts[path]
            self._numbers[self._chunk] = torch._C._autograd._get_sequence_nr()
        if not self._chunk:
            return None
        tensors = dict[int, Tensor]()
        for leaf, tensor in enumerate(tree_leaves((args, kwargs))):
            if isinstance(tensor, Tensor) and tensor.requires_grad and not isinstance(tensor, nn.Parameter):
                at = self._crossed(self._chunk, path, leaf, tensor)
                if at is not None:
                    self.given[self._chunk].setdefault(path, {})[leaf] = at
                    tensors[leaf] = self.begun[self._chunk][at]
        if path in self._firsts and 0 not in tensors:
            raise BindingError(f"{path} is not given hidden states of the layers before it first, {_REMEDY}")
        return exchanged((args, kwargs), tensors)

    def finish(self, output: Any) -> Any:
        """Return the model's output, with the tensors that cross the last cut as they are behind it."""
        known, leaves = self._known(self._chunk), enumerate(tree_leaves(output))
        found = {leaf: known[id(tensor)] for leaf, tensor in leaves if id(tensor) in known}
        self.given[self._chunk][OUTPUT] = found
        return exchanged(output, {leaf: self.begun[self._chunk][at] for leaf, at in found.items()})

    def _known(self, chunk: int) -> dict[int, int]:
        """Return the positions of tensors among what crosses the cut before a chunk, by ``id``."""
        return {id(each): at for both in (self.whole, self.begun) for at, each in enumerate(both[chunk])}

    def _crossed(self, chunk: int, path: str, leaf: int, tensor: Tensor) -> int | None:
        """Return which of what crosses the cut before a chunk a tensor is; ``None``: the chunk has made it."""
        if not chunk or (tensor.grad_fn is not None and not self._is_earlier(chunk, tensor.grad_fn)):
            return None
        at = self._known(chunk).get(id(tensor))
        if at is None:
            before = self._crossed(chunk - 1, path, leaf, tensor)
            at = len(self.whole[chunk])
            self.whole[chunk].append(tensor)
            self.begun[chunk].append(tensor.detach().requires_grad_())
            self.crossing[chunk].append(Crossing(path, leaf, before, tensor.detach()))
        return at

    def _is_earlier(self, chunk: int, made: Any) -> bool:
        """Return whether a node was made before a chunk, or between its layers of what was made before alone.

        Such as the part for each layer of something that is made for all of them.
        """
        begun, left, seen = {id(each) for each in self.begun[chunk]}, [made], set[Any]()
        while left:
            node = left.pop()
            if node in seen:
                continue
            seen.add(node)
            if (variable := getattr(node, "variable", None)) is not None:
                if id(variable) in begun | self._own[chunk]:
                    return False
            elif node._sequence_nr() >= self._numbers[chunk]:
                left += [after for after, _ in node.next_functions if after is not None]
        return True

    def end_outside(self, path: str, _module: nn.Module, _args: Any, output: Any) -> None:
        """Note what a layer, or a module outside of layers, returns."""
        self._note_returned(path, output)
        for storage in (leaf.untyped_storage() for leaf in tree_leaves(output) if isinstance(leaf, Tensor)):
            self._outside.setdefault(storage._cdata, (path, storage))  # kept, so that no other one has its address

    def note_writes(self, function: Any, args: Sequence[Any]) -> Sequence[Any]:
        """Note which of such outputs an operator changes; return its arguments."""
        for argument, value in zip(function._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, Tensor):
                path, _ = self._outside.get(value.untyped_storage()._cdata, ("", None))
                self.changed |= {path} - {""}
        return args

    def end_inside(self, path: str, _module: nn.Module, _args: Any, output: Any) -> None:
        """Note what a module inside a layer returns."""
        self._note_returned(path, output)

    def _note_returned(self, path: str, output: Any) -> None:
        """Note what a module returns; several may return one tensor."""
        self.returned[path] = tree_map_only(Tensor, Tensor.detach, output)
        for leaf, tensor in enumerate(tree_leaves(output)):
            if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                where = self._where.setdefault(edge := _edge_of(tensor), [])
                where.append((path, leaf))
                crossing = Crossing("", leaf, None, tensor.detach(), where)
                self._made.setdefault(edge, (self._chunk, crossing, tensor))

    def reached(self, chunk: int, roots: Sequence[Tensor]) -> list[Tensor]:
        """Return the leaves behind some tensors of a chunk. What modules in earlier chunks return begins a graph.

        What code outside of layers makes of that alone, each stage computes itself.
        """
        leaves, seen = list[Tensor](), set[_Edge]()
        # An edge is given with whether the node that reads it runs in this chunk's stage.
        left = [(_edge_of(each), True) for each in roots if each.grad_fn is not None]
        leaves += [each for each in roots if each.grad_fn is None and each.requires_grad]
        while left:
            edge, runs_here = left.pop()
            if edge in seen:
                continue
            seen.add(edge)
            node, _ = edge
            if (variable := getattr(node, "variable", None)) is not None:
                leaves.append(variable)
                continue
            made = self._made.get(edge)
            if made is not None and made[0] < chunk and runs_here:
                self._cross(chunk, *made)
                continue
            number_there = node._sequence_nr()
            is_here = number_there >= self._numbers[chunk] or not any(number_there in each for each in self._apart)
            left += [((after, number), is_here) for after, number in node.next_functions if after is not None]
        return leaves

    def _cross(self, chunk: int, made: int, crossing: Crossing, tensor: Tensor) -> int:
        """Let what a module in the chunk ``made`` returns cross all cuts up to a chunk's; return where."""
        edge, cut = _edge_of(tensor), self.crossing[chunk]
        for at, each in enumerate(self.whole[chunk]):
            if each.grad_fn is not None and _edge_of(each) == edge:  # a layer may be given it, too
                cut[at] = cut[at]._replace(returned=crossing.returned)
                return at
        before = self._cross(chunk - 1, made, crossing, tensor) if made < chunk - 1 else None
        cut.append(crossing._replace(passed_on=before))
        self.whole[chunk].append(tensor)
        self.begun[chunk].append(tensor)
        return len(cut) - 1

    def end(self, path: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Note what a layer returns."""
        self.end_outside(path, layer, args, output)
        given, made = first_of(args, kwargs), next((x for x in tree_leaves(output) if isinstance(x, Tensor)), None)
        both = [(each.shape, each.dtype) if isinstance(each, Tensor) else None for each in (given, made)]
        passes = made if both[0] == both[1] else None
        self.forms[path] = tree_map_only(Tensor, lambda x: HIDDEN if x is passes else x.detach(), output)


def _edge_of(tensor: Tensor) -> _Edge:
    return tensor.grad_fn, tensor.output_nr
