"""What crosses the cuts of a model of the user's own, from stage to stage of a pipeline.

A stage runs the model's own forward, in which all but its own layers hand on what they are given
(:mod:`executor.module.stages`). At a cut, it gets what the first layer behind it is given, and what else later layers
are given of earlier stages, such as the output of an encoder. All of it is found on a copy that has no values. The
copy's tensors are fake, so that models which look at values, as for masks, see that they are traced. Its graph begins
anew at each cut, with the arguments of layers. Where code behind a cut still reaches what a module before it has
returned, as skip connections and losses of several towers do, that crosses too. If it reaches weights of an earlier
stage in another way, the model is refused.

[Note: Values without gradients] Autograd's graph does not have what a forward computes without gradients: detached
values, masks, indices. So each operator notes of what it makes such values, and which of them it reads where it makes
something with gradients. Together with the graph, that is all on which a loss depends. If code reads a number
(``.item()``), that may decide what runs later, so all later chunks depend on it.
"""

import contextlib
import copy
import functools
import itertools
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from executor.distributed.shards import BindingError
from executor.memory.recompute_cache import Running

HIDDEN: Final = object()
"""Stands for hidden states in what a layer returns."""

_META: Final = torch.device("meta")
_CONTAINERS: Final = (dict, list, tuple, set)  # which are copied for what they contain
_REMEDY = "so the model cannot be cut there; leave pipeline= out"


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
        trains: whether it has a gradient.
    """

    layer: str
    leaf: int
    passed_on: int | None = None
    like: Tensor | None = None
    returned: Sequence[tuple[str, int]] = ()
    trains: bool = True


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
        refusals: why the model cannot be cut before some chunks, by their numbers.
    """

    crossing: list[list[Crossing]]
    given: list[Given]
    forms: Mapping[str, Any]
    changed: Collection[str] = ()
    refusals: Mapping[int, str] = MappingProxyType({})


def hidden_alone(parts: Sequence[Part]) -> Cuts:
    """Return the cuts of a model whose layers hand on hidden states alone."""
    crossing = [[Crossing(layers[0], 0)] if number else [] for number, (layers, _) in enumerate(parts)]
    return Cuts(crossing, [{each.layer: {each.leaf: 0} for each in cut} for cut in crossing], {})


def without_values(module: nn.Module, device: torch.device = _META) -> nn.Module:
    """Return a copy on the meta device, or on another one in a fake mode, whose parameters all get gradients.

    What modules hold that cannot be copied, such as a lock or a generator, the copy shares.
    """
    memo: dict[int, Any] = {id(each): torch.empty_like(each, device=device) for each in module.buffers()}
    attributes = (value for each in module.modules() for value in vars(each).values())
    # In a fake mode, PyTorch would print an error before it refuses to copy one.
    memo |= {id(value): value for value in attributes if isinstance(value, torch.Generator)}
    for each in module.parameters():
        empty = torch.empty_like(each, device=device)
        memo[id(each)] = nn.Parameter(empty, requires_grad=each.is_floating_point())
    while True:
        try:
            return copy.deepcopy(module, dict(memo))
        except Exception as error:
            frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
            copied = [frame.f_locals["x"] for frame in frames if frame.f_code is copy.deepcopy.__code__]
            holders = [at for at, value in enumerate(copied) if isinstance(value, nn.Module)]
            inside = copied[holders[-1] + 1 :] if holders else []
            held = next((value for value in inside if not isinstance(value, _CONTAINERS)), None)
            if held is None or id(held) in memo:
                raise
            memo[id(held)] = held


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
        batch: keyword arguments of the model. Tensors on the meta device have values that nobody knows.
        operators: what runs the model's operators.
        loss: returns what backward begins with, of the model's output and its batch; ``None``: it may begin with
            anything that the model returns.

    Raises:
        BindingError: forward cannot be followed.
    """
    watch, mode = _Watch(parts), FakeTensorMode(allow_non_fake_inputs=True)
    tensors = _tensors_of(dict(batch))
    device = next((each.device for each in tensors if not each.is_meta), torch.device("cpu"))

    def fake(tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device=device) if tensor.is_meta else mode.from_tensor(tensor)

    with mode:
        faked = without_values(twin, device)
        given = tree_map_only(Tensor, fake, dict(batch))
    watch.hook(faked, parts)
    values = zip(_tensors_of(given), tensors, strict=True)
    known = [(each, real.cpu()) for each, real in values if not real.is_meta]
    try:
        with (
            torch.enable_grad(),
            mode,
            operators(known) as run,
            mock.patch.object(FakeTensor, "numpy", watch.looking(FakeTensor.numpy)),
            Running(lambda function, _types, args, kwargs: watch.note(run, function, args, kwargs)),
        ):
            output = watch.finish(faked(**given))
    except BindingError:
        raise
    except Exception as error:
        raise BindingError(f"forward cannot be followed without values ({error}), {_REMEDY}") from error
    names: dict[int, set[str]] = {}
    for name, parameter in faked.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(name)
    needed = output if loss is None else loss(output, given)
    if watch.seen != [path for layers, _ in parts for path in layers]:
        why = f"layers do not run once each and in order ({', '.join(watch.seen[:4])}, ...), {_REMEDY}"
        return Cuts(watch.crossing, watch.given, {}, refusals=dict.fromkeys(range(1, len(parts)), why))
    roots = [leaf for leaf in tree_leaves(needed) if isinstance(leaf, Tensor)]
    for chunk, (layers, parameters) in reversed(list(enumerate(parts))):  # what modules return adds to the cuts before
        begun = {id(each) for each in watch.begun[chunk]}
        for leaf in (leaf for leaf in watch.reached(chunk, roots) if id(leaf) not in begun):
            found = names.get(id(leaf), {"a tensor" if leaf.requires_grad else "a value without gradients"})
            if not parameters & found:
                watch.refusals.setdefault(
                    chunk,
                    f"what {layers[-1]} or a later layer computes depends on {min(found)} of another stage, "
                    f"beside what layers from {layers[0]} on are given, {_REMEDY}",
                )
        cut = zip(watch.whole[chunk], watch.crossing[chunk], strict=True)
        roots = [tensor for tensor, each in cut if each.passed_on is None]
    crossed = {path for cut in watch.crossing for each in cut for path, _ in each.returned}
    returned = {path: form for path, form in watch.returned.items() if path in crossed}
    return Cuts(watch.crossing, watch.given, returned | watch.forms, watch.changed, watch.refusals)


_Edge = tuple[Any, int]
"""A node of autograd's graph, and which of its outputs; or the number of a :data:`_Value`, and 0."""
_Value = tuple[int, bool, Sequence[_Edge]]
"""A value without gradients: the chunk that makes it, whether in a module that other stages do not run, and of what."""


class _Watch:
    """Hooks of the layers, which begin a graph at each cut.

    Attributes:
        seen: paths of the layers that have run.
        crossing, given, forms: see :class:`Cuts`.
        returned: what modules return, by their paths, in the order in which they run.
        changed, refusals: see :class:`Cuts`.
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
        self.changed, self.refusals = set[str](), dict[int, str]()
        self._outside: dict[int, tuple[str, Any]] = {}  # by address, what layers and modules outside of them return
        self._where: dict[_Edge, list[tuple[str, int]]] = {}  # modules that return it
        self._apart: list[range] = []  # autograd's numbers in modules that other stages do not run
        self._inside = 0  # how many of these run now
        # See [Note: Values without gradients].
        self._values: list[_Value] = []
        self._sources: dict[int, tuple[Any, dict[Any, list[_Edge]]]] = {}  # by storage, and place there: what it is
        self._beside: dict[int, list[_Edge]] = {}  # by number of a node: such values that its operator has read
        self._looked: list[_Value] = []  # numbers that code has read
        self._leaves: dict[int, _Edge] = {}  # by ``id``, parameters, and what begins a graph at a cut
        self._latest = 0  # autograd's next number after the latest operator

    def hook(self, model: nn.Module, parts: Sequence[Part]) -> None:
        """Hook the layers, and the modules inside them."""
        named = [*model.named_parameters(remove_duplicate=False)]
        for _, parameter in named:
            if parameter.requires_grad:
                self._begin_graph(parameter)
        self._own = [{id(parameter) for name, parameter in named if name in parameters} for _, parameters in parts]
        layers = {model.get_submodule(path) for of_part, _ in parts for path in of_part}
        within = {inner for layer in layers for inner in layer.modules()}
        around = {path: module for path, module in model.named_modules() if path and module not in within}
        for module in (each for each in around.values() if layers.isdisjoint(each.modules())):
            if next(module.parameters(), None) is not None:
                self._set_apart(module)
        for path, module in around.items():
            module.register_forward_hook(functools.partial(self.end_outside, path))
        for path in (path for of_part, _ in parts for path in of_part):
            self._set_apart(layer := model.get_submodule(path))
            layer.register_forward_pre_hook(functools.partial(self.begin, path), with_kwargs=True)
            layer.register_forward_hook(functools.partial(self.end, path), with_kwargs=True)
            for name, inner in layer.named_modules(prefix=path):
                if inner is not layer:
                    inner.register_forward_hook(functools.partial(self.end_inside, name))

    def _set_apart(self, module: nn.Module) -> None:
        begun = list[int]()

        def begin(*_: Any) -> None:
            self._inside += 1
            begun.append(torch._C._autograd._get_sequence_nr())

        def end(_module: nn.Module, _args: Any, output: Any) -> Any:
            # Others have what it returns without gradients from it alone, also if it only hands that on.
            leaves = [each for each in enumerate(tree_leaves(output)) if isinstance(each[1], Tensor)]
            output = exchanged(output, {leaf: each.clone() for leaf, each in leaves if not each.requires_grad})
            self._inside -= 1
            self._apart.append(range(begun.pop(), torch._C._autograd._get_sequence_nr()))
            return output

        module.register_forward_pre_hook(begin)
        module.register_forward_hook(end)

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
            why = f"{path} is not given hidden states of the layers before it first, {_REMEDY}"
            self.refusals.setdefault(self._chunk, why)
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
            self.begun[chunk].append(begun := torch.empty_like(tensor.detach()).requires_grad_())  # as it is received
            self._begin_graph(begun)
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
            elif self._is_made_in(chunk, node):
                left += [after for after, _ in self._behind(node)]
        return True

    def _is_made_in(self, chunk: int, node: Any) -> bool:
        """Return whether a node, or value without gradients, has been made in a chunk or a later one."""
        return self._values[node][0] >= chunk if isinstance(node, int) else node._sequence_nr() >= self._numbers[chunk]

    def _behind(self, node: Any) -> list[_Edge]:
        """Return of what a node, or value without gradients, is made."""
        if isinstance(node, int):
            return [*self._values[node][2]]
        after = [edge for edge in node.next_functions if edge[0] is not None]
        return after + self._beside.get(node._sequence_nr(), [])

    def end_outside(self, path: str, _module: nn.Module, _args: Any, output: Any) -> None:
        """Note what a layer, or a module outside of layers, returns."""
        self._note_returned(path, output)
        for storage in (leaf.untyped_storage() for leaf in tree_leaves(output) if isinstance(leaf, Tensor)):
            self._outside.setdefault(storage._cdata, (path, storage))  # kept, so that no other one has its address

    def note(self, run: Callable[..., Any], function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run an operator. Note of what its results are made, and which outputs of modules it changes."""
        number = torch._C._autograd._get_sequence_nr()
        given = _tensors_of((args, kwargs))
        beside = [edge for each in given for edge in self._beside_graph(each)]
        edges = [*dict.fromkeys(edge for each in given for edge in self._edges_of(each))]
        if beside and number > self._latest and torch.is_grad_enabled():  # autograd has made a node for it
            self._beside[number - 1] = beside
        made = run(function, args, kwargs)
        self._latest = torch._C._autograd._get_sequence_nr()
        named = {each.name: value for each, value in zip(function._schema.arguments, args, strict=False)} | kwargs
        infos = [(each.alias_info, named.get(each.name)) for each in function._schema.arguments]
        written = _tensors_of([value for info, value in infos if info is not None and info.is_write])
        for each in written:
            path, _ = self._outside.get(each.untyped_storage()._cdata, ("", None))
            self.changed |= {path} - {""}
        results = _tensors_of(made)
        if edges and not results and not written and function.namespace != "prim":  # which asks for the device
            self._looked.append((self._chunk, self._inside > 0, edges))
        if edges or self._inside:
            value = [(len(self._values), 0)]
            self._values.append((self._chunk, self._inside > 0, edges))
            views = {each.untyped_storage()._cdata: each for each in given if not each.requires_grad}
            for each in written:
                self._set_sources(each, [*value, *self._all_sources(each)], is_all=True)
            for each in results if not written else ():
                of = views.get(each.untyped_storage()._cdata)
                self._set_sources(each, value if of is None else self._sources_of(of))
        return made

    def looking(self, read: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that reads a tensor's values for other code, such as NumPy's, and notes that."""

        def noted(tensor: Tensor, **named: Any) -> Any:
            self._looked.append((self._chunk, self._inside > 0, self._edges_of(tensor)))
            return read(tensor, **named)

        return noted

    def _sources_of(self, tensor: Tensor) -> list[_Edge]:
        """Return of what a tensor's values are, beside what its graph shows."""
        _, found = self._sources.get(tensor.untyped_storage()._cdata, (None, {}))
        return found[_place(tensor)] if _place(tensor) in found else self._all_sources(tensor)

    def _all_sources(self, tensor: Tensor) -> list[_Edge]:
        """Return the same of all values in a tensor's memory."""
        _, found = self._sources.get(tensor.untyped_storage()._cdata, (None, {}))
        return [*dict.fromkeys(itertools.chain(*found.values()))]

    def _set_sources(self, tensor: Tensor, edges: list[_Edge], *, is_all: bool = False) -> None:
        """Set of what a tensor's values are, or with ``is_all``, all values in its memory."""
        storage = tensor.untyped_storage()  # kept, so that no other one has its address
        _, found = self._sources.setdefault(storage._cdata, (storage, {}))
        if is_all:
            found.clear()
        found[() if is_all else _place(tensor)] = edges

    def _edges_of(self, tensor: Tensor) -> list[_Edge]:
        """Return on what a tensor depends."""
        edge = self._leaves.get(id(tensor)) if tensor.grad_fn is None else (tensor.grad_fn, tensor.output_nr)
        return self._beside_graph(tensor) if edge is None else [edge, *self._beside_graph(tensor)]

    def _beside_graph(self, tensor: Tensor) -> list[_Edge]:
        """Return of what a tensor's values are, if its graph does not show all of it: that of a function need not."""
        node = tensor.grad_fn
        shows_all = node is not None and not isinstance(node, BackwardCFunction) and type(node).__name__ != "CopySlices"
        return [] if shows_all or id(tensor) in self._leaves else self._sources_of(tensor)

    def _begin_graph(self, leaf: Tensor) -> None:
        edge = get_gradient_edge(leaf)
        self._leaves[id(leaf)] = edge.node, edge.output_nr

    def end_inside(self, path: str, _module: nn.Module, _args: Any, output: Any) -> None:
        """Note what a module inside a layer returns."""
        self._note_returned(path, output)

    def _note_returned(self, path: str, output: Any) -> None:
        """Note what a module returns; several may return one tensor."""
        self.returned[path] = tree_map_only(Tensor, Tensor.detach, output)
        for leaf, tensor in enumerate(tree_leaves(output)):
            edges = self._edges_of(tensor) if isinstance(tensor, Tensor) else []
            is_value = len(edges) == 1 and isinstance(edges[0][0], int) and self._values[edges[0][0]][1]
            if edges and (tensor.grad_fn is not None or is_value):
                where = self._where.setdefault(edges[0], [])
                where.append((path, leaf))
                crossing = Crossing("", leaf, None, tensor.detach(), where, tensor.requires_grad)
                self._made.setdefault(edges[0], (self._chunk, crossing, tensor))
                self._set_sources(tensor, edges[:1])

    def reached(self, chunk: int, roots: Sequence[Tensor]) -> list[Tensor]:
        """Return the leaves behind some tensors of a chunk. What modules in earlier chunks return begins a graph.

        What code outside of layers makes of that alone, each stage computes itself.
        """
        leaves, seen = list[Tensor](), set[_Edge]()
        # An edge is given with whether the node that reads it runs in this chunk's stage.
        left = [(edge, True) for each in roots for edge in self._edges_of(each)]
        for when, inside, edges in self._looked:
            left += [(edge, True) for edge in edges if when == chunk or (when < chunk and not inside)]
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
            is_here = self._is_made_in(chunk, node) or not self._is_apart(node)
            if not is_here and chunk and isinstance(node, int):
                leaves.append(torch.empty(0))  # which another stage has alone
            left += [(before, is_here) for before in self._behind(node)]
        return leaves

    def _is_apart(self, node: Any) -> bool:
        """Return whether a module has made it that other stages do not run."""
        if isinstance(node, int):
            return self._values[node][1]
        number = node._sequence_nr()
        return any(number in each for each in self._apart)

    def _cross(self, chunk: int, made: int, crossing: Crossing, tensor: Tensor) -> int:
        """Let what a module in the chunk ``made`` returns cross all cuts up to a chunk's; return where."""
        edge, cut = self._edges_of(tensor)[0], self.crossing[chunk]
        for at, each in enumerate(self.whole[chunk]):
            if self._edges_of(each)[:1] == [edge]:  # a layer may be given it, too
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


def _tensors_of(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.storage_offset(), tensor.shape, tensor.stride()
