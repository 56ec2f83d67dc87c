"""Callbacks on the boundaries of a model's modules; functions to hook tensors, replace attributes, keep autocast."""

import collections
import contextlib
import copy
import dataclasses
import functools
import itertools
import re
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Protocol

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

_Function = Callable[[torch.Tensor], torch.Tensor]
_Backward = Callable[[torch.Tensor], torch.Tensor | None]
_FUSED: Final = re.compile("ScaledDotProduct(.+?)Attention")
OF_SESSION: Final = (
    *("name_in_model", "class_in_model", "reader_of_session", "others_with_weights", "data_taken_in_forward"),
    *("id_of_last_hook", "backward_reads", "_is_param"),
)
"""Names of the attributes that a session gives parameters. All others are the user's."""


class ModuleCallbacks(Protocol):
    """Callbacks of the hooks on a model; see [Note: Module boundaries] in :mod:`executor.module.binding`."""

    def on_forward(self, unit: str) -> None:
        """Forward, or recomputation, has reached a unit."""

    def after_forward(self) -> None:
        """The forward of a module has ended: hide the weights of the last unit if it was called from the loop."""

    def on_backward(self, unit: str) -> None:
        """Backward has reached a unit."""

    def watch(self, parameter: nn.Parameter, unit: Callable[[], str]) -> None:
        """Report backward of a unit where it reads a parameter, see :mod:`executor.module.watched_parameters`.

        Called where forward reads that, ``unit`` returns the unit's name, or an empty one for no report.
        """

    def on_transformed(self, reads: bool) -> None:
        """A transform of ``torch.func`` runs a module with gradients; ``reads``: with weights of the model's own."""

    def on_unplanned(self, why: str) -> None:
        """A forward that trains does what the plan does not have: ``why``, in words."""

    def on_recomputed(self, unit: str) -> None:
        """Recomputation has ended for the segment whose last unit this is."""

    def on_tile(self, tile: int) -> None:
        """Forward or backward of a tile begins, see [Note: Tiled segments] in :mod:`executor.module.tiled_segments`.

        It is 0 outside of tiles.
        """

    def on_call(self, *, is_followed: bool) -> None:
        """The user's step calls the model, or a part of it, see [Note: Steps] in :mod:`ullage.capture.partitioning`.

        If :func:`is_transformed`, hooks do not follow it.
        """

    def on_call_end(self, *, failed: bool) -> None:
        """Such a call has ended, or ``failed``."""

    def on_model_begin(self) -> None:
        """The model's own forward begins."""

    def on_model_end(self, output: Any) -> None:
        """The model's own forward has ended, or failed: then without ``output``."""

    def on_logits(self, unit: str) -> Callable[[], contextlib.AbstractContextManager[None]]:
        """A head with tiled logits has run; see [Note: Tiled logits] in :mod:`executor.module.tiled_logits`.

        Return a function that makes a context. Inside it, the head's weights are those of this forward. Entering it
        raises OutOfOrderError if these weights are gone by then.
        """

    @property
    def call(self) -> int:
        """The call of the user's step that runs now, or whose backward does; 1 outside of planned calls."""

    @property
    def follows(self) -> bool:
        """Whether hooks follow what runs now. They do inside transforms that the model's own forward runs."""

    @property
    def micro_batch(self) -> int:
        """The micro-batch of the latest planned forward."""

    @property
    def tile(self) -> int:
        """The tile of sequences that passes its segment now."""

    @property
    def unit(self) -> str:
        """The unit that computes now; empty if none does."""

    @property
    def trains(self) -> bool:
        """Whether a forward that begins now is one of the plan's."""

    @property
    def on_demand(self) -> bool:
        """Whether this iteration has left the plan, see [Note: On demand] in :mod:`executor.driver.on_demand`."""


def outside_transforms() -> contextlib.AbstractContextManager[Any]:
    """Return a context outside of what sees all operators: transforms of ``torch.func``, tracers and other modes.

    Transforms would wrap tensors of a session. A tracer would record what brings weights, and do it once more later.
    """
    has_modes = torch._C._len_torch_dispatch_stack() > 0
    is_transformed = torch._C._functorch.peek_interpreter_stack() is not None
    if not (has_modes or is_transformed):
        return contextlib.nullcontext()
    outside = contextlib.ExitStack()
    if has_modes:
        outside.enter_context(_disable_current_modes())
    if is_transformed:
        from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack  # noqa: PLC0415 - needs a while

        outside.enter_context(temporarily_clear_interpreter_stack())
    return outside


def is_transformed() -> bool:
    """Return whether a transform of ``torch.func`` or ``forward_ad`` runs with gradients, which hooks do not see.

    Nor do hooks follow a model whose operators run without values.
    """
    return is_captured() or transforms()


def transforms() -> bool:
    """Return whether a transform of ``torch.func`` or ``forward_ad`` runs with gradients."""
    if torch._C._functorch.peek_interpreter_stack() is None and forward_ad._current_level < 0:
        return False
    running = torch._C._functorch.get_interpreter_stack() or ()
    return torch.is_grad_enabled() or any(one.key() == torch._C._functorch.TransformType.Grad for one in running)


_capture: Final = threading.local()


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """Return a context in which a model or a step is captured by this thread: operators run without values."""
    before, _capture.runs = is_captured(), True
    try:
        yield
    finally:
        _capture.runs = before


def is_captured() -> bool:
    """Return whether this thread captures a model or a step, so that operators run without values."""
    return getattr(_capture, "runs", False)


def in_backward() -> bool:
    """Return whether this thread is inside a backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)


def ends_here() -> bool:
    """Return whether the backward that runs now goes no further than its node, as that of a gradient inside forward.

    A hook that kept its node would keep its graph too: a cycle that Python does not see.
    """
    node: Any = torch._C._current_autograd_node()
    with contextlib.suppress(RuntimeError):  # for a leaf whose gradient is asked for, which is further
        return node is not None and not any(
            torch._C._will_engine_execute_node(after) for after, _ in node.next_functions if after is not None
        )
    return False


def nodes(*roots: Any, seen: set[Any] | None = None) -> Iterator[Any]:
    """Yield all autograd nodes behind some, and these themselves; leave out those ``seen``, and add to them."""
    seen = set() if seen is None else seen
    left = [root for root in dict.fromkeys(roots) if root is not None and root not in seen]
    seen |= {None, *roots}
    while left:
        node = left.pop()
        yield node
        following = dict.fromkeys(after for after, _ in node.next_functions if after not in seen)
        seen.update(following)
        left += following


def saved_as_is(node: Any) -> Iterator[Any]:
    """Yield the ``SavedTensor`` of each tensor that an autograd node has saved itself.

    What hooks have saved for it, as where a segment is recomputed or the loop has given some, is left out.
    """
    for name in _names_of_saved(node.__class__):
        raw = getattr(node, name)
        for saved in raw if isinstance(raw, tuple) else (raw,):
            if saved is not None and saved.unpack_hook is None and isinstance(saved.data, torch.Tensor):
                yield saved


@functools.cache
def _names_of_saved(kind: Any) -> list[str]:
    return [name for name in dir(kind) if name.startswith("_raw_saved_")]


def is_within(weights: torch.Tensor, values: torch.Tensor) -> bool:
    """Return whether values are weights, or begin inside their memory."""
    start = weights.data_ptr()
    return values.dtype == weights.dtype and start <= values.data_ptr() < start + weights.nbytes


def tensors_of(value: object, depth: int = 3) -> Iterator[torch.Tensor]:
    """Yield the tensors among what a module is called with or returns.

    They may be inside tuples, lists, mappings and dataclasses, and to this ``depth`` in attributes of other objects, as
    of ``torch.distributions``. Key-value caches are left out: they hold what modules inside have returned.
    """
    for leaf in (value,) if isinstance(value, torch.Tensor) else tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif isinstance(leaf, Mapping | list | tuple):
            yield from tensors_of(list(leaf.values() if isinstance(leaf, Mapping) else leaf), depth)
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from tensors_of([getattr(leaf, field.name, None) for field in dataclasses.fields(leaf)], depth)
        elif depth and hasattr(leaf, "__dict__") and not (callable(leaf) or is_cache(leaf)):
            yield from tensors_of(list(vars(leaf).values()), depth - 1)


def fused_attention(output: Any) -> tuple[str, ...]:
    """Return the fused kernels of attention that a forward has run, such as ``cudnn``, as autograd names them.

    Attention that is not fused, or inside a compiled graph, is in none of them.

    Args:
        output: what the model returned, with gradients.
    """
    behind = nodes(*(tensor.grad_fn for tensor in tensors_of(output)))
    return tuple(sorted({fused[1].lower() for node in behind if (fused := _FUSED.match(node.name()))}))


def hook_target(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor to hook (``tensor`` or its base), so that the hook fires when backward reaches its producer.

    If a view is changed in place (as by ``nn.ReLU(inplace=True)`` after an ``nn.Linear`` on a 3-D input), autograd
    drops the hooks of the view, but not those of its base. Making a view reads no weights, so a hook on the base serves
    as well.
    """
    base = tensor._base
    return tensor if base is None or base.grad_fn is None else base


def hook_gradient(tensor: torch.Tensor, node: Any, hook: Callable[[torch.Tensor], None]) -> None:
    """Do the same as ``register_hook`` in half the time. It returns no handle, because this hook is never removed."""
    if type(tensor) is not torch.Tensor or node is None or tensor._backward_hooks is not None:
        tensor.register_hook(hook)  # type: ignore[no-untyped-call]
    else:
        tensor._backward_hooks = collections.OrderedDict({-1: hook})  # handles count from 0
        node._register_hook_dict(tensor)


def hook_outputs(output: Any, reached: Callable[[], None], begun: int = 0) -> bool:
    """Report that backward has reached what a forward returned, if backward goes further than that.

    Leave out what only passed through the forward, or behind which a hook of the user's lets backward end.

    Args:
        output: of the forward.
        reached: called then, once for each tensor.
        begun: autograd's next number when the forward began.

    Returns:
        Whether forward has made nodes behind all of these, as for a loss that it leaves in an attribute. Backward may
        reach these nodes first; see :func:`hooked_behind`.
    """

    def arrive(_gradient: torch.Tensor) -> None:
        if not ends_here():
            reached()

    latest = begun - 1
    for leaf in tensors_of(output):
        if leaf.requires_grad:
            made = hook_target(leaf)
            if (node := made.grad_fn) is not None and (number := node._sequence_nr()) >= begun:
                hook_gradient(made, node, arrive)
                latest = max(latest, number if made is leaf else leaf.grad_fn._sequence_nr())  # type: ignore[union-attr]
    return begun <= latest < torch._C._autograd._get_sequence_nr() - 1


def report_before(node: Any, reached: Callable[[], None]) -> None:
    """Report that backward has reached a node, before that runs, if backward goes further than that."""
    node.register_prehook(lambda _: None if ends_here() else reached())


def hooked_behind(output: Any, reached: Callable[[], None], begun: int) -> Any:
    """Return what a forward returned, as views that were made after all that it has made, with hooks.

    Autograd runs the nodes that it can run from the latest one on. So backward reaches a view before what the forward
    has made. See :func:`hook_outputs`.
    """

    def behind(leaf: torch.Tensor) -> torch.Tensor:
        node = leaf.grad_fn
        if node is None or node._sequence_nr() < begun or type(leaf) is not torch.Tensor:
            return leaf
        view = leaf.view_as(leaf)
        assert view.grad_fn is not None
        report_before(view.grad_fn, reached)
        return view

    return tree_map_only(torch.Tensor, behind, output)


def replace_attribute(module: nn.Module, name: str, value: Any) -> Callable[[], None]:
    """Set an attribute of a module, which may shadow one of its class. Return a function that restores the module.

    It leaves alone what somebody else has set since.
    """
    own, replaced = vars(module), _replaced.setdefault(module, {})
    before = own.get(name, _NOTHING)
    own[name] = value
    replaced.setdefault(name, before)

    def undo() -> None:
        if own.get(name) is not value:
            return
        _put(own, name, before)
        if replaced.get(name) is before:
            del replaced[name]

    return undo


def as_it_was(module: nn.Module) -> dict[str, Any]:
    """Return a module's attributes as they are without those that :func:`replace_attribute` has set."""
    own = dict(vars(module))
    for name, before in _replaced.get(module, {}).items():
        _put(own, name, before)
    return own


def _put(own: dict[str, Any], name: str, before: Any) -> None:
    if before is _NOTHING:
        own.pop(name, None)
    else:
        own[name] = before


_NOTHING: Final = object()
_replaced: Final = weakref.WeakKeyDictionary[nn.Module, dict[str, Any]]()
"""What attributes were before they were replaced."""


def forward_of(module: nn.Module) -> Callable[..., Any]:
    """Return what runs a module's forward: its own, or that of its class, which may be replaced later."""
    own: Callable[..., Any] | None = vars(module).get("forward")
    return functools.update_wrapper(functools.partial(_class_forward, module), module.forward) if own is None else own


def _class_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(module).forward(module, *args, **kwargs)


def leads_to(function: Any, wanted: Callable[..., Any], depth: int = 4) -> bool:
    """Return whether a function holds another one, which it then may call: as audits and wrappers of the user's do."""
    if function is wanted or not depth:
        return function is wanted
    held = [getattr(function, name, None) for name in ("__wrapped__", "__func__")]
    if isinstance(function, functools.partial):
        held += [function.func, *function.args, *function.keywords.values()]
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # a variable without a value
            held.append(cell.cell_contents)
    held += getattr(function, "__defaults__", None) or ()
    for owner in (function, getattr(function, "__self__", None)):
        held += getattr(owner, "__dict__", {}).values() if not isinstance(owner, nn.Module) else ()
    return any(callable(each) and leads_to(each, wanted, depth - 1) for each in held)


def is_cache(value: object) -> bool:
    """Return whether a value is a key-value cache of ``transformers``. Objects may have attributes of any name."""
    return hasattr(type(value), "get_seq_length")


def copied_cache(cache: Any) -> Any:
    """Return a copy of a key-value cache of ``transformers``, to which a layer may add without changing the cache.

    That of an encoder and a decoder holds two caches, and which layers it has filled. Layers of state-space models hold
    dictionaries.
    """
    result = copy.copy(cache)
    for name, value in vars(cache).items():
        if isinstance(value, list):
            setattr(result, name, [copied_cache(each) if hasattr(each, "__dict__") else each for each in value])
        elif isinstance(value, dict):
            setattr(result, name, value.copy())
        elif is_cache(value):
            setattr(result, name, copied_cache(value))
    return result


class Saved(torch.autograd.Function):
    """Saves tensors for the backward of a later node, which finds them at ``grad_fn``, and passes them on."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return aliases. Those of tensors that need no gradient need none."""
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)  # nothing comes for a weight whose gradient is made later
        found = tuple(tensor.view_as(tensor) for tensor in tensors)
        ctx.mark_non_differentiable(*itertools.compress(found, [not needed for needed in ctx.needs_input_grad]))
        return found

    @staticmethod
    def backward(_ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Pass gradients on."""
        return gradients


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, forward: _Function, backward: _Backward) -> torch.Tensor:
        ctx.backward_of = backward
        result = forward(values)
        if result is values:
            ctx.mark_dirty(values)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, None, None]:
        return ctx.backward_of(gradient), None, None


def with_gradient(values: torch.Tensor, forward: _Function, backward: _Backward) -> torch.Tensor:
    """Return ``forward(values)``, which may be ``values`` changed in place; autograd keeps no tensor for backward.

    ``backward`` returns the gradient of ``values``, given that of the result; ``None``: there is none.
    """
    result: torch.Tensor = _WithGradient.apply(values, forward, backward)  # type: ignore[no-untyped-call]
    return result


def same_autocast(tensor: torch.Tensor) -> Callable[[], torch.autocast]:
    """Return a function that makes a context with the autocast that is on now for a tensor's kind of device."""
    kind = tensor.device.type
    return functools.partial(torch.autocast, kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
