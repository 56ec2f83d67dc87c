"""Checks where a model of the user's own is cut into the stages of a pipeline, on a copy that has no values.

A stage runs the model's own forward, in which all but its own layers hand on what they are given
(:mod:`executor.module.stages`). That is right where the output of one layer is the input of the next, and is all that
crosses a cut. The copy's tensors are fake, so that models which look at values, as for masks, see that they are traced.
Its graph begins anew at each cut: whatever later layers or losses still reach of an earlier stage crosses beside it.
What a forward computes without gradients is not seen.
"""

import copy
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from executor.callbacks import nodes
from executor.distributed.shards import BindingError

HIDDEN: Final = object()
"""Stands for hidden states in what a layer returns."""

_META: Final = torch.device("meta")
_REMEDY = "so the model cannot be cut there; prepare it without pipeline="


class Part(NamedTuple):
    """A chunk of a model: paths of its layers, in order, and names of the parameters that it uses."""

    layers: Sequence[str]
    parameters: frozenset[str]


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


def with_first(first: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call with another first one."""
    return ((first, *args[1:]), kwargs) if args else ((), kwargs | {next(iter(kwargs)): first})


def hidden_of(output: Any) -> Tensor | None:
    """Return the hidden states of what a layer returns: the first tensor."""
    return next((leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)), None)


def on_meta(value: Any) -> Any:
    """Return a value with tensors on the meta device in place of its own."""
    return tree_map_only(Tensor, lambda leaf: leaf.to("meta"), value)


def check_cuts(twin: nn.Module, parts: Sequence[Part], batch: Mapping[str, Any]) -> dict[str, Any]:
    """Check that one tensor crosses each cut, and nothing else.

    Args:
        twin: the model, see :func:`without_values`.
        parts: its chunks, in order.
        batch: keyword arguments of the model.

    Returns:
        What each layer returns, by its path, with :data:`HIDDEN` in place of the hidden states, and ``None`` in place
        of any other tensor.

    Raises:
        BindingError: naming what cannot be cut.
    """
    watch, mode = _Watch(parts), FakeTensorMode(allow_non_fake_inputs=True)
    device = next((leaf.device for leaf in tree_leaves(dict(batch)) if isinstance(leaf, Tensor)), torch.device("cpu"))
    with mode:
        faked = without_values(twin, device)
        given = tree_map_only(Tensor, mode.from_tensor, dict(batch))
    for path in (path for part in parts for path in part.layers):
        layer = faked.get_submodule(path)
        layer.register_forward_pre_hook(functools.partial(watch.begin, path), with_kwargs=True)
        layer.register_forward_hook(functools.partial(watch.end, path), with_kwargs=True)
    try:
        with torch.enable_grad(), mode, _AnyType():  # type: ignore[no-untyped-call]
            output = faked(**given)
    except BindingError:
        raise
    except Exception as error:
        raise BindingError(f"forward cannot be followed without values ({error}), {_REMEDY}") from error
    if watch.seen != [path for part in parts for path in part.layers]:
        raise BindingError(f"layers do not run once each and in order ({', '.join(watch.seen[:4])}, ...), {_REMEDY}")
    ends = [[watch.ended[count - 1]] for count in itertools.accumulate(len(part.layers) for part in parts)]
    ends[-1] = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    names: dict[int, set[str]] = {}
    for name, parameter in faked.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(name)
    for number, (part, roots) in enumerate(zip(parts, ends, strict=True)):
        leaves = [getattr(node, "variable", None) for node in nodes(*(root.grad_fn for root in roots))]
        for leaf in (leaf for leaf in leaves if leaf is not None and leaf is not watch.begun.get(number)):
            found = names.get(id(leaf), {"a tensor"})
            if not part.parameters & found:
                raise BindingError(
                    f"what {part.layers[-1]} or a later layer computes depends on {min(found)} of another stage, "
                    f"beside what the layer before {part.layers[0]} returns, {_REMEDY}"
                )
    return watch.forms


class _AnyType(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes fake outputs of the products of experts, of which torch has none but in bf16."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if getattr(func, "overloadpacket", None) is torch.ops.aten._grouped_mm:
            rows, matrices, *_ = args
            return rows.new_empty(len(rows), matrices.shape[-1])
        return func(*args, **(kwargs or {}))


class _Watch:
    """Hooks of the layers, which begin a graph at each cut.

    Attributes:
        seen: paths of the layers that have run.
        begun: by chunk, the tensor with which its graph begins.
        ended: the tensor that each layer has returned.
        forms: see :func:`check_cuts`.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self.seen: list[str] = []
        self.begun: dict[int, Tensor] = {}
        self.ended: list[Tensor] = []
        self.forms: dict[str, Any] = {}
        self._firsts = {part.layers[0]: number for number, part in enumerate(parts)}

    def begin(self, path: str, _layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Begin a graph, if a chunk begins with this layer."""
        self.seen.append(path)
        if not (number := self._firsts.get(path)):
            return None
        if not self.ended or first_of(args, kwargs) is not self.ended[-1]:
            raise BindingError(f"{path} is not given what the layer before it has returned, {_REMEDY}")
        self.begun[number] = leaf = self.ended[-1].detach().requires_grad_()
        return with_first(leaf, args, kwargs)

    def end(self, path: str, _layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Check what a layer returns."""
        made = hidden_of(output)
        compared = first_of(args, kwargs), made
        alike = [(each.shape, each.dtype) if isinstance(each, Tensor) else None for each in compared]
        if made is None or alike[0] != alike[1]:
            raise BindingError(
                f"{path} does not return hidden states like those that it is given, each as its first tensor, {_REMEDY}"
            )
        self.ended.append(made)
        self.forms[path] = tree_map_only(Tensor, lambda leaf: HIDDEN if leaf is made else None, output)
