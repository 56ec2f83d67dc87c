"""Finds a plan's units in a user's model, and places hooks that report where the model is.

[Note: Module boundaries] A compute task lasts from the hook of its unit to the hook of the next unit. Forward pre-hooks
on the modules that own or read parameters report where forward is. They report recomputation too, which is forward
inside backward. Hooks on the gradients of these modules' outputs report where backward is, and hooks on what the model
itself returns that the last unit's backward begins. Autograd runs nodes in the reverse order of their creation, and
accumulates each gradient as soon as it is computed. So when backward reaches another unit, the gradients of the
previous one are complete. If a module reads weights where no hook can see it, capturing the model raises an error
(``ullage/capture/executable.py``).

Recomputation starts when backward first needs a tensor of the segment that was not saved. By then, backward may already
have reached the segment's last unit. In this case the unit's backward task begins when recomputation has ended.
"""

import contextlib
import functools
import inspect
import itertools
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, final

import torch
from torch import nn
from torch.utils.checkpoint import _StopRecomputationError, checkpoint

from executor.callbacks import (
    ModuleCallbacks,
    forward_of,
    hook_outputs,
    hooked_behind,
    in_backward,
    is_transformed,
    leads_to,
    outside_transforms,
    replace_attribute,
    report_before,
    tensors_of,
)
from executor.distributed.shards import BindingError
from executor.memory.activations import OffloadedActivations, offloadable_inputs
from executor.memory.forward_state import ForwardState
from executor.module.caches import copy_caches, drop_caches, layer_number
from executor.module.guarded_parameters import alias_of, unguarded, version_of
from executor.module.guards import check_call
from executor.module.kept_inputs import giving_again, with_copies
from executor.module.naming import KEYS_ALONE
from executor.module.own_checkpoints import of_plan, passing_through, saved_tensors_hooks_of
from executor.module.tiled_layers import tile_modules
from executor.module.tiled_logits import find_head, tile_head
from executor.module.tiled_segments import tile_segments
from executor.packed import StoredParameter
from planner.decisions import Decisions
from planner.graph import Unit, segments

_NEVER_RUN: Final = (nn.ParameterDict, nn.ParameterList)


def unit_modules(model: nn.Module, units: Sequence[Unit], *, several: bool = False) -> dict[nn.Module, str]:
    """Return the modules that own or read parameters directly, each with its unit.

    Of a step that calls the model ``several`` times, give the ``units`` of one call; see :func:`calls`. Weights that
    belong to units of other calls are then those of the first unit that uses them. Modules that do not run are left
    out, and so is the model itself, because a call may return what it has kept.

    A module belongs to the unit that lists its parameters by their path in the module tree. If all of them are tied to
    other modules', it belongs to the unit that runs it, or else to the one that lists them, or to the first that shares
    that unit. If a module reads parameters of modules inside it without calling them, it belongs to the unit that reads
    them (operators of a captured unit are named by the module that runs them). Experts that are divided over several
    units are left out, because they report themselves which unit computes. The model itself belongs to the first unit
    that runs.

    Raises:
        BindingError: a module belongs to several units.
    """
    unit_of = {spec.name: unit.name for unit in units for spec in (*unit.parameters, *unit.frozen)}
    inside = {unit.name for unit in units}
    for unit in units:
        for name in unit.shared_parameters if not inside.issuperset(unit.shared_units) else ():
            unit_of.setdefault(name, unit.name)
    split = {name.rpartition("[")[0] for name in unit_of if name.endswith("]")}
    named = dict(model.named_parameters(remove_duplicate=False))
    owner = {id(named[name]): unit for name, unit in unit_of.items() if name in named}
    count = Counter(map(id, named.values()))
    result: dict[nn.Module, str] = {}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        names = [f"{prefix}{name}" for name, _ in module.named_parameters(recurse=False)]
        if split.intersection(names):
            continue
        found = {unit_of[name] for name in names if name in unit_of and count[id(named[name])] == 1}
        if names and not found:
            owners = {owner[id(named[name])] for name in names if id(named[name]) in owner}
            users = [unit for unit in units if owners & {unit.name, *unit.shared_units}]
            running = {u.name for u in users if any(o.path == path for o in u.operators)}
            listing = {unit_of[name] for name in names if name in unit_of}
            sharing = [unit.name for unit in users if owners & {*unit.shared_units}]
            found = running or listing or set(sharing[:1])
        if len(found) > 1 and not isinstance(module, _NEVER_RUN):  # of which several modules may read, each its own
            raise BindingError(
                f"module {path or 'model'} belongs to the units {', '.join(sorted(found))}, but must belong to one; "
                "plan this model again"
            )
        if len(found) == 1:
            result[module] = found.pop()
    modules = dict(model.named_modules())
    order = [unit.name for unit in units]
    for reader, unit_name in _readers(modules, result, units):  # it may read these before parameters of its own
        result[reader] = min(unit_name, result.get(reader, unit_name), key=order.index)
    if not several:
        result.setdefault(model, next(unit.name for unit in units if not unit.is_unused))
    return result


def _readers(
    modules: Mapping[str, nn.Module], owners: Mapping[nn.Module, str], units: Sequence[Unit]
) -> Iterator[tuple[nn.Module, str]]:
    """Yield the modules that read parameters of inner modules without calling these."""
    for path, module in modules.items():
        if module in owners and isinstance(module, _NEVER_RUN):
            yield modules[path.rpartition(".")[0]], owners[module]
    for unit in units:
        for operator in unit.operators:
            reads = operator.parameters or (operator.shared_parameters and unit.call > 1)
            if reads and (reader := modules.get(operator.path)) is not None:
                yield reader, unit.name


class Marker(NamedTuple):
    """What the hooks of a module report: that forward (``begins``) or backward (``ends``) has reached its unit."""

    unit: str
    begins: bool
    ends: bool


def marked(
    model: nn.Module, units: tuple[Unit, ...], whole: Iterable[nn.Module] = (), *, several: bool = False
) -> dict[nn.Module, dict[int, Marker]]:
    """Return the modules whose hooks report progress, with what they mark in each call; see [Note: Module boundaries].

    Modules ``whole``, which are compiled or compute in tiles, report progress in place of those inside them. See
    :func:`unit_modules` for ``several``.
    """
    found: dict[nn.Module, dict[int, Marker]] = {}
    for call, mine in calls(units).items():
        unit_of = unit_modules(model, mine, several=several or units[-1].call > 1)
        for module in whole:
            if inside := [unit_of.pop(inner) for inner in module.modules() if inner in unit_of]:
                unit_of[module] = inside[0]
        order = [unit.name for unit in mine]
        unused = {unit.name for unit in mine if unit.is_unused}
        for module, unit in unit_of.items():
            # A module with other units inside reports forward only if its own comes first, and never reports backward.
            # Unused units run on demand only: they are in units of their own with all that is inside them.
            names = {unit_of[inner] for inner in module.modules() if inner in unit_of} - unused | {unit}
            marker = Marker(unit, begins=unit == min(names, key=order.index), ends=len(names) == 1)
            found.setdefault(module, {})[call] = marker
    return found


def calls(units: Iterable[Unit]) -> dict[int, tuple[Unit, ...]]:
    """Return the units of each call; see :attr:`planner.models.captured.CapturedModel.calls`."""
    return {call: tuple(group) for call, group in itertools.groupby(units, key=lambda unit: unit.call)}


def bind(
    model: nn.Module,
    units: tuple[Unit, ...],
    decisions: Decisions,
    activations: OffloadedActivations,
    callbacks: ModuleCallbacks,
    undo: list[Callable[[], None]],
    compile_backend: str | None = None,
) -> None:
    """Add hooks to a model that report progress, recompute and offload. Functions that remove them go to ``undo``.

    With a ``compile_backend``, the modules that :func:`executor.module.compilation.compiled_modules` finds are
    compiled. Units with offloaded activations are not compiled: a compiled graph has no separate matrix products.
    """
    unit_of = unit_modules(model, calls(units)[1], several=units[-1].call > 1)
    undo.append(model.register_forward_hook(lambda *given: callbacks.on_model_end(given[-1]), always_call=True).remove)
    is_elsewhere = (head := find_head(model)) is not None and head not in unit_of  # in the last stage of a pipeline
    if (decisions.loss_tile_tokens is not None or decisions.context_parallel > 1) and not is_elsewhere:
        undo.append(
            tile_head(
                model,
                decisions.loss_tile_tokens,
                lambda head: callbacks.on_backward(unit_of[head]),
                lambda head: callbacks.on_logits(unit_of[head]),
            )
        )
    whole: list[nn.Module] = []
    if compile_backend is not None:
        from executor.module.compilation import compile_blocks, compile_loss  # noqa: PLC0415 - takes a second

        stay = tuple(unit for unit in units if not decisions.units[unit.name].offloads)
        whole += compile_blocks(model, stay, unit_of, compile_backend, undo)
        if decisions.loss_tile_tokens is None and decisions.tensor_parallel == decisions.context_parallel == 1:
            undo.append(compile_loss(model, compile_backend))
    if decisions.layer_tile_tokens is not None:
        whole += (tiled := tiled_modules(model, units))
        undo += tile_modules(tiled, decisions.layer_tile_tokens)
    # A stage that receives what it computes from, in some round, has reached its first unit when that is there.
    receives = any(before for before, _ in decisions.cuts)
    marks = marked(model, units, whole, several=receives)
    behind = (
        next((u for u in reversed(mine) if u.backward or u.num_params), mine[-1]) for mine in calls(units).values()
    )
    # A loss of the model's own is computed behind the last unit, whose backward it belongs to.
    between = _Between(callbacks, {*_of_containers(model, units, marks), *(unit.name for unit in behind)})
    undo.append(model.register_forward_pre_hook(lambda *_: between.begin()).remove)
    undo.append(model.register_forward_hook(lambda *given: between.hand_over(given[-1])).remove)
    for module, of_module in marks.items():
        undo += _hooks(module, of_module, callbacks, between)
    undo.append(model.register_forward_pre_hook(lambda *_: callbacks.on_model_begin(), prepend=True).remove)
    again: dict[nn.Module, dict[int, list[Unit]]] = {}
    for segment in segments(units):
        if decisions.units[segment[0].name].activations != "keep":
            again.setdefault(segment_module(model, segment), {})[segment[0].call] = segment
    offloading = {unit.name for unit in units if decisions.units[unit.name].offloads}
    for module, of_call in again.items():
        undo += _recompute(module, of_call, activations, offloading, callbacks)
    undo += tile_segments(model, tiled_segments(model, units), callbacks)


def tiled_segments(model: nn.Module, units: tuple[Unit, ...]) -> dict[nn.Module, tuple[list[str], int]]:
    """Return the modules that tiles of sequences pass, with the names of their units and the number of tiles.

    Raises:
        BindingError: a module computes several segments.
    """
    found: dict[nn.Module, tuple[list[str], int]] = {}
    for segment in segments(units):
        if (num_tiles := segment[0].num_tiles) > 1:
            if (module := segment_module(model, segment)) in found:
                raise BindingError(
                    f"{segment[0].segment} runs several times in a forward, so tiles of sequences cannot pass it; plan "
                    "without --tiles segment"
                )
            found[module] = [unit.name for unit in segment], num_tiles
    return found


def watch_calls(model: nn.Module, paths: Iterable[str], callbacks: ModuleCallbacks) -> Iterator[Callable[[], None]]:
    """Report a step's calls of the model, and of modules of these paths; yield functions that undo this."""
    for module in {model, *map(model.get_submodule, paths)}:
        yield module.register_forward_pre_hook(lambda *_: _begin_call(callbacks), prepend=True).remove
        yield module.register_forward_hook(
            lambda *given: callbacks.on_call_end(failed=given[-1] is None), always_call=True
        ).remove


def _begin_call(callbacks: ModuleCallbacks) -> None:
    check_call()
    is_followed = not is_transformed()
    with outside_transforms():
        callbacks.on_call(is_followed=is_followed)


def no_compile(compile_backend: str | None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that keeps a function out of compiled graphs. Without compilation it does nothing."""
    return (lambda function: function) if compile_backend is None else torch.compiler.disable


def bind_state_dict(
    model: nn.Module, names: Mapping[int, str], weight: Callable[[str], torch.Tensor], *, divides: bool
) -> list[Callable[[], None]]:
    """Make ``state_dict`` return current weights, which parameters do not show; return functions that undo this.

    What is written to the dictionary's tensors is written to the weights.

    Args:
        model: the bound model.
        names: names of its parameters, by ``id(parameter)``.
        weight: returns a parameter's current weights, by its name.
        divides: whether ranks share layers or experts. Then none can be loaded by ``load_state_dict``.
    """

    def saving(module: nn.Module) -> Callable[[dict[str, Any], str, bool], None]:
        save = module._save_to_state_dict

        def save_current(state_dict: dict[str, Any], prefix: str, keep_vars: bool) -> None:
            own = {} if KEYS_ALONE.get() else dict(module.named_parameters(recurse=False))
            packed = [s for p in own.values() if (s := StoredParameter(p, module)).is_quantized]
            with contextlib.ExitStack() as living:
                for stored in packed:  # their scales are entries of their own
                    living.enter_context(stored.living_in(weight(names[id(stored.parameter)])))
                with unguarded():
                    save(state_dict, prefix, keep_vars)
            for name, parameter in own.items():
                planned = id(parameter) in names  # others count as buffers
                if planned and prefix + name in state_dict and not StoredParameter(parameter, module).is_quantized:
                    state_dict[prefix + name] = alias_of(parameter, weight(names[id(parameter)]))

        return save_current

    def refuse(_module: nn.Module, _state_dict: object, _prefix: str, metadata: Mapping[str, Any], *_: object) -> None:
        if divides or metadata.get("assign_to_params_buffers"):
            raise ValueError(
                "weights cannot be loaded into a prepared model by load_state_dict() with assign=True, nor where ranks "
                "share layers or experts; load them before prepare() or after session.close(), or with "
                "ullage.load(optimizer, FOLDER) between steps; save and resume whole runs with ullage.Checkpoints"
            )

    handles = [m.register_load_state_dict_pre_hook(refuse) for m in model.modules()]  # type: ignore[no-untyped-call]
    handles += _bind_ties(model)
    owners = [m for m in model.modules() if next(m.parameters(recurse=False), None) is not None]
    undo = [replace_attribute(module, "_save_to_state_dict", saving(module)) for module in owners]
    return undo + [handle.remove for handle in handles]


def _bind_ties(model: nn.Module) -> Iterator[Any]:
    """Make tied weights one tensor in ``state_dict``, even where reading copies them; yield the handles of hooks."""
    tied: dict[int, list[list[str]]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        tied.setdefault(id(parameter), []).append(name.split("."))

    def tying(keys: list[str]) -> Callable[..., None]:
        def tie(_module: nn.Module, state_dict: dict[str, Any], prefix: str, _metadata: object) -> None:
            there = [key for key in (prefix + key for key in keys) if key in state_dict]
            state_dict.update((key, state_dict[there[0]]) for key in there[1:])

        return tie

    for paths in tied.values():
        if len(paths) > 1:
            shared = in_common(*paths)
            keys = [".".join(path[len(shared) :]) for path in paths]
            owner = model.get_submodule(".".join(shared))
            yield owner.register_state_dict_post_hook(tying(keys))  # type: ignore[no-untyped-call]


def _of_containers(
    model: nn.Module, units: Iterable[Unit], marks: Mapping[nn.Module, Mapping[int, Marker]]
) -> Iterator[str]:
    """Yield the units whose weights code outside of their modules may use: that of a module with other units inside."""
    reads = any(not o.path and (o.parameters or o.shared_parameters) for unit in units for o in unit.operators)
    for module, of_call in marks.items():
        if module is not model or reads or next(model.parameters(recurse=False), None) is not None:
            yield from (marker.unit for marker in of_call.values() if not marker.ends)


@final
class _Between:
    """Reports when backward reaches what containers compute between modules with weights of their own.

    A weight that code between two modules uses, as a scale of the model's own, is in one unit with the modules around
    it. Backward reads the weight before it reaches the module in front of it. The module behind may have been passed
    over, or there is none. So what a unit makes behind its modules, and gives to another unit or returns, says that
    backward has come to the unit.

    Args:
        units: the units with such weights, and those behind which the model computes its loss.
    """

    def __init__(self, callbacks: ModuleCallbacks, units: Collection[str]) -> None:
        self._callbacks, self._units = callbacks, units
        self._unit, self._ended = "", 0  # the last one that forward was at, and autograd's next number then

    def begin(self) -> None:
        """A forward of the model begins. Unless it is a later call of a step, it has nothing of earlier ones."""
        if self._callbacks.call == 1:
            self._unit = ""

    def is_at(self, unit: str) -> None:
        """Forward has reached a unit, which may read weights before a module of it runs, or a module of it has run."""
        if unit in self._units and not _is_recomputing(self._callbacks):
            self._unit, self._ended = unit, torch._C._autograd._get_sequence_nr()

    def hand_over(self, values: Any, to: str = "") -> None:
        """Forward leaves the last unit with these values: it reaches another one, or ends."""
        unit = self._unit
        if not unit or unit == to:
            return
        self._unit = ""
        if torch.is_grad_enabled() and not _is_recomputing(self._callbacks):
            # Logits in tiles, of a class of their own, are not computed yet.
            made = [leaf for leaf in tensors_of(values) if type(leaf) is torch.Tensor]
            reached = functools.partial(self._callbacks.on_backward, unit)
            hook_outputs(made, reached, self._ended)
            for leaf in made:  # what was made after the base of a view may read weights: backward passes it first
                node = leaf.grad_fn
                if leaf._base is not None and node is not None and node._sequence_nr() >= self._ended:
                    report_before(node, reached)


def _is_recomputing(callbacks: ModuleCallbacks) -> bool:
    """Whether backward does not pass through what modules return; on demand the user's own checkpointing runs them."""
    return in_backward() and not callbacks.on_demand


def _hooks(
    module: nn.Module, of_call: Mapping[int, Marker], callbacks: ModuleCallbacks, between: _Between
) -> Iterator[Callable[[], None]]:
    """Let hooks before and after a module's forward report that forward or backward has reached it.

    ``of_call`` has what it marks in each call. Yield functions that remove the hooks.
    """
    begun = 0  # autograd's next number when the forward began
    first = next(iter(of_call.values()))

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        nonlocal begun
        begun = torch._C._autograd._get_sequence_nr()
        if not callbacks.follows:
            reads = any(isinstance(weight, nn.Parameter) for weight in module.parameters())
            with outside_transforms():
                callbacks.on_transformed(reads)
        elif (marker := of_call.get(callbacks.call, first)).begins:
            between.hand_over((args, kwargs), marker.unit)
            with outside_transforms():
                callbacks.on_forward(marker.unit)
            between.is_at(marker.unit)

    arrives = {marker.unit: functools.partial(callbacks.on_backward, marker.unit) for marker in of_call.values()}

    def after(_module: nn.Module, _args: Any, output: Any) -> Any:
        if not callbacks.follows:
            return None
        callbacks.after_forward()
        if not (marker := of_call.get(callbacks.call, first)).ends:
            return None  # forward is at the unit of the module inside that has run last
        between.is_at(marker.unit)
        arrive = arrives[marker.unit]
        if torch.is_grad_enabled() and not _is_recomputing(callbacks) and hook_outputs(output, arrive, begun):
            return hooked_behind(output, arrive, begun)
        return None

    if any(marker.begins for marker in of_call.values()):
        # Before hooks of the user's that read weights, as those of torch.nn.utils.weight_norm do.
        yield module.register_forward_pre_hook(before, prepend=True, with_kwargs=True).remove
    yield module.register_forward_hook(after).remove
    # Between its modules it may come to run those of other units, in steps that leave the plan.
    contains = any(True for _ in module.children()) or not all(marker.ends for marker in of_call.values())
    for parameter in module.parameters(recurse=False) if contains else ():
        callbacks.watch(parameter, functools.partial(_reading, of_call, callbacks))


def _reading(of_call: Mapping[int, Marker], callbacks: ModuleCallbacks) -> str:
    """Return the unit of a module that reads weights in forward; empty if backward does not pass through that."""
    if not torch.is_grad_enabled() or not callbacks.follows or _is_recomputing(callbacks):
        return ""
    return of_call.get(callbacks.call, next(iter(of_call.values()))).unit


def segment_module(model: nn.Module, segment: list[Unit]) -> nn.Module:
    """Return the module of a segment.

    A captured segment has the path of its block as its name. The path of a preset's segment (``layers.3``) depends on
    the ``transformers`` family: it is the deepest module that contains all parameters of the segment.
    """
    with contextlib.suppress(AttributeError):
        return model.get_submodule(segment[0].segment.partition("@")[0])
    owners = [spec.name.split(".")[:-1] for unit in segment for spec in (*unit.parameters, *unit.frozen)]
    return model.get_submodule(".".join(in_common(*owners)))


def in_common(*paths: list[str]) -> Sequence[str]:
    """Return the names with which all paths begin."""
    return os.path.commonprefix(paths)  # noqa: RUF071 - of lists of names


def _checkpoint(call: Callable[..., Any], bound: inspect.BoundArguments, **settings: Any) -> Any:
    """Call a function with activation checkpointing.

    An exception in forward passes it by, because torch 2.11 leaves checkpoint's hooks in place while one is kept.
    """
    failed: list[BaseException] = []

    def kept(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except BaseException as error:
            if in_backward():
                raise
            failed.append(error)

    # Its state of random numbers is a part of ForwardState.
    output = checkpoint(
        of_plan(kept), *bound.args, use_reentrant=False, preserve_rng_state=False, **settings, **bound.kwargs
    )
    if failed:
        raise failed.pop()  # the list holds it no longer, so no cycle keeps tensors
    return output


_Weight = tuple[dict[str, Any], str, torch.Tensor, bool, int]
"""A parameter in forward: the dictionary and name that has it, whether it takes gradients, and its version."""


def _recompute(
    module: nn.Module,
    of_call: Mapping[int, list[Unit]],
    activations: OffloadedActivations,
    offloading: Collection[str],
    callbacks: ModuleCallbacks,
) -> Iterator[Callable[[], None]]:
    """Apply activation checkpointing to a module, and offload some activations; yield functions that undo this.

    The module computes these segments in the calls that recompute it, see :func:`calls`. Units ``offloading`` offload.
    """
    original, first = forward_of(module), next(iter(of_call.values()))
    name = first[0].name.partition("@")[0]
    state = ForwardState(module, name, torch_too=True)
    signature = inspect.signature(original)
    layer = layer_number(module)
    has_ended: list[bool] = []
    owned = [(m._parameters, name) for m in module.modules() for name, p in m._parameters.items() if p is not None]

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        is_followed = not has_ended and callbacks.follows  # if it has ended, a wrapper of the user's still calls it
        if not (is_followed and torch.is_grad_enabled()):
            if is_followed and callbacks.trains:
                callbacks.on_unplanned(f"{first[-1].name} ran without gradients in a forward that trains")
            return original(*args, **kwargs)
        # What hooks may compress stays as they have it: a second pass would not pass by them.
        is_hooked = saved_tensors_hooks_of() == "loop"
        segment = None if is_hooked else of_call.get(callbacks.call, None if callbacks.trains else first)
        if segment is None:
            return original(*args, **kwargs)  # this call keeps its activations
        names = [unit.name for unit in segment]
        bound = signature.bind(*args, **kwargs)
        has_caches = drop_caches(bound.arguments, layer)  # those that hold keys and values already
        before = state.save(bound.arguments.values())
        given: inspect.BoundArguments | None = bound  # until the first pass begins
        args, kwargs = with_copies(args, kwargs, segment[0].operators[0].changed_inputs, before.copies)
        again = signature.bind(*args, **kwargs)
        drop_caches(again.arguments, layer)
        offloads = names[0] in offloading and callbacks.trains
        moved = offloadable_inputs(again.args) if offloads else ()
        given_again = giving_again(names[0], again.args, again.kwargs, before.copies.values(), moved)
        weights = _weights(owned)

        def compute(bound: inspect.BoundArguments) -> Any:
            if has_caches:
                copy_caches(bound.arguments)
            return original(*bound.args, **bound.kwargs)

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal given
            if given is not None:  # the first pass; perhaps inside backward, as losses with cached gradients have it
                arguments, given = given, None
                output = compute(arguments)
                state.check(before)
                return output
            with _reporting(names, callbacks), state.restored(before), _with_weights(weights, names[0]):
                args, kwargs = given_again(args, kwargs)
                return compute(signature.bind(*args, **kwargs))

        if not offloads:
            return _checkpoint(run, again)
        with activations.forward(names, callbacks, again.args) as modes:
            return _checkpoint(run, again, context_fn=modes)

    yield lambda: has_ended.append(True)
    yield replace_attribute(module, "forward", forward)
    watch = functools.partial(_watch_forward, forward, name, callbacks)
    yield module.register_forward_pre_hook(watch, prepend=True).remove


@contextlib.contextmanager
def _reporting(names: Sequence[str], callbacks: ModuleCallbacks) -> Iterator[None]:
    """Return a context for the second pass of a segment, which reports where it begins and ends."""
    callbacks.on_forward(names[0])  # the module may read weights of its own before a hook inside it reports this
    try:
        with passing_through():
            yield
    except RuntimeError as error:
        if "TorchScript interpreter" in str(error):  # out of which its end came as an error of another kind
            raise _StopRecomputationError from error
        raise
    finally:  # recomputation stops with an exception as soon as it has all needed tensors
        callbacks.on_recomputed(names[-1])


def _watch_forward(
    forward: Callable[..., Any], name: str, callbacks: ModuleCallbacks, module: nn.Module, _args: Any
) -> None:
    """Before a module runs, see whether its forward is still what recomputes it, or leads there; a hook."""
    now, runs = vars(module).get("forward"), callbacks.trains and not in_backward()
    if runs and now is not forward and not leads_to(now, forward):
        callbacks.on_unplanned(f"the forward of {name} was replaced")
    elif runs and saved_tensors_hooks_of() == "loop":
        callbacks.on_unplanned(f"hooks of the loop (saved_tensors_hooks) get the activations of {name}")


def _weights(owned: Iterable[tuple[dict[str, Any], str]]) -> list[_Weight]:
    with unguarded():
        weights = ((held, name, held[name]) for held, name in owned if name in held)
        return [(held, name, weight, weight.requires_grad, version_of(weight)) for held, name, weight in weights]


@contextlib.contextmanager
def _with_weights(then: Iterable[_Weight], unit: str) -> Iterator[None]:
    """Return a context in which modules have the parameters that they had in forward, frozen or not as they were.

    By backward, a call of ``torch.func.functional_call`` has ended, and a loop may have frozen or thawed parameters.

    Raises:
        ValueError: one has been written to since. Autograd notices this only where it has saved the parameter.
    """
    with unguarded():
        if written := [name for _, name, weight, _, version in then if version_of(weight) != version]:
            raise ValueError(
                f"the {written[0]} of a module was written to between forward and backward, where the plan recomputes "
                f"{unit}: gradients would be those of other activations; write it before forward, or after backward"
            )
        others = [(held, name, held[name], weight) for held, name, weight, *_ in then if held[name] is not weight]
        changed = [(weight, trains) for _, _, weight, trains, _ in then if weight.requires_grad != trains]
        for held, name, _, weight in others:
            held[name] = weight
        for weight, trains in changed:
            weight.requires_grad_(trains)
    try:
        yield
    finally:
        with unguarded():
            for held, name, usual, _ in others:
                held[name] = usual
            for weight, trains in changed:
                weight.requires_grad_(not trains)


def tiled_modules(model: nn.Module, units: tuple[Unit, ...]) -> dict[nn.Module, str]:
    """Return the modules that compute in tiles, each with its unit."""
    return {model.get_submodule(o.name): unit.name for unit in units for o in unit.operators if o.in_tiles}
