"""What a module's forward reads and changes besides its inputs and weights, so that it can run again as it ran before.

Recomputation runs a block's forward a second time. It must compute with the same values as the first time, and must
leave no trace. But forward may draw random numbers, and may change buffers and attributes: moving averages, codebooks,
counters, queues. The loop may change what forward reads before backward runs. So a snapshot is taken before the first
pass, and the second pass runs on it. Afterwards everything is put back as it was: the generators of Python, NumPy and
torch, and those that the modules hold; the modules' attributes and buffers, and what people set on parameters; the
variables that their methods, hooks and functions use (:mod:`executor.memory.variables`); context variables, and which
kernels ``sdpa_kernel`` allows.
``torch.utils.checkpoint`` could do it for torch's global generators, but goes a longer way than to ask a generator for
its state.

Attributes are compared and exchanged by identity, which costs microseconds. Tensors may change in place, so they are
copied: small ones always, large ones only if the first forward of all changed them. If another large one changes before
the second pass, its old values are gone, and an error is raised before any weight changes. What neither attributes nor
variables lead to (an open file, an iterator) is not seen here: :mod:`executor.audit` finds it.
"""

import array
import collections
import contextlib
import contextvars
import copy
import ctypes
import io
import itertools
import operator
import random
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any, Final, NamedTuple, final

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from executor.callbacks import OF_SESSION
from executor.memory.recompute_cache import ActivationError
from executor.memory.variables import Used, Variables, hooks_of, slots_of

SMALL_BYTES: Final = 1 << 16
"""Tensors up to this size are copied before every forward."""

_SMALL_INPUT_BYTES: Final = 1 << 10
"""The same for tensors that a forward is given. A plan does not count these copies."""

_BUFFERS: Final = (np.ndarray, array.array, bytearray)
_DEEPEST: Final = 3
"""Containers and objects inside attributes are followed to this depth."""

_QUANTIZERS: Final = frozenset({"bitsandbytes", "torchao"})
_MT19937_BYTES: Final = 625 * 4  # its key, and the position in it

_FORWARD_HOOKS: Final = [name for name in vars(nn.Module()) if name.startswith("_forward_")]
_OF_MODULES: Final = frozenset(vars(nn.Module())) - {"training"} | {"forward"}
_Key = tuple[int, Any]


@final
class ForwardState:
    """The state that the forward of a module, with all modules inside it, may read and change.

    Args:
        module: its forward runs twice.
        name: its name, for errors.
        torch_too: whether torch's global generators belong to it, that of the current GPU too.
    """

    def __init__(self, module: nn.Module, name: str, *, torch_too: bool = False) -> None:
        # The first forward of quantized layers moves what decodes their weights from the parameter to the module.
        self._modules = [m for m in module.modules() if type(m).__module__.partition(".")[0] not in _QUANTIZERS]
        self._name = name
        self._generators = [random, *_SETTINGS, *(_of_torch() if torch_too else ())]
        self._changing: set[_Key] | None = None  # large tensors that forward changes; unknown before the first forward
        self._draws_from_numpy = False
        self._hooks, self._newest_hook = [self], -1  # unlike any
        self._held_hooks = [vars(m)[name] for m in self._modules for name in _FORWARD_HOOKS]
        self._held_hooks += [
            held for name, held in vars(nn.modules.module).items() if name.startswith("_global_forward_")
        ]
        self._follow_hooks()

    def save(self, given: Any = (), *, whole: bool = False) -> "Snapshot":
        """Return a snapshot of the current state, to take before the first pass.

        Args:
            given: arguments of the forward. Lists and objects in them may change, and small tensors without gradients.
            whole: whether to copy large tensors that do not change, too.
        """
        self._follow_hooks()
        visit = self._visit(self._generators)
        if self._draws_from_numpy or self._changing is None:
            visit.generators.append(np.random)
        of_modules = dict(visit.tensors)
        visit.values(given)
        visit.tensors = {k: t for k, t in visit.tensors.items() if k in of_modules or _is_small_input(t)}
        copies: dict[int, torch.Tensor] = {}
        for key, tensor in visit.tensors.items():
            if id(tensor) in copies:
                continue
            if key not in of_modules:
                copies[id(tensor)] = _copy_of(tensor)
            elif whole or self._changing is None or key in self._changing or tensor.nbytes <= SMALL_BYTES:
                copies[id(tensor)] = tensor.clone()
        random_states = [(one, _get_state(one)) for one in {id(each): each for each in visit.generators}.values()]
        versions, context = {k: t._version for k, t in visit.tensors.items()}, contextvars.copy_context()
        hooks = [(held, held.copy()) for held in self._held_hooks]
        return Snapshot(visit.holders, visit.tensors, versions, copies, random_states, _numpy_bits(), context, hooks)

    def made(self, given: Any, begun: int) -> list[torch.Tensor]:
        """Return the tensors that a forward has left in attributes and arguments, with a gradient, in a fixed order.

        Args:
            given: arguments of the forward.
            begun: autograd's next number when the forward began.
        """
        visit = self._visit([])
        visit.values(given)
        found: list[Any] = visit.differentiable
        return [tensor for tensor in found if tensor.grad_fn._sequence_nr() >= begun]

    def _follow_hooks(self) -> None:
        """Find the variables that functions use, again if hooks have been added."""
        if self._newest_hook == RemovableHandle.next_id:  # no hook at all has been added
            return
        self._newest_hook, hooks = RemovableHandle.next_id, hooks_of(self._modules)
        if self._hooks == hooks:
            return
        self._hooks, used = hooks, Used(self._modules)
        self._variables, self._values = used.variables, used.values
        # NumPy's state takes 30 us to read, so it is left out if neither a method nor the first forward asks for it.
        self._draws_from_numpy |= any("random" in code.co_names for code in used.codes)

    def _visit(self, generators: list[Any]) -> "_Visit":
        visit = _Visit(generators)
        for module in self._modules:
            visit.module(module)
        for variables in self._variables:
            visit.variables(variables)
        visit.values(self._values)
        return visit

    def check(self, before: "Snapshot") -> None:
        """Check, after the first pass, that the snapshot has everything that this pass has changed.

        Raises:
            ActivationError: a large tensor has changed for the first time, or NumPy's generator.
        """
        drew_from_numpy = _numpy_bits() != before.numpy
        if self._changing is None:
            self._draws_from_numpy |= drew_from_numpy  # writes to tensor.data leave no trace but the values
            large = {k: t for k, t in before.tensors.items() if t.nbytes > SMALL_BYTES and id(t) in before.copies}
            self._changing = {key for key, t in large.items() if not _same(t, before.copies[id(t)])}
            for tensor in {id(t): t for k, t in large.items() if k not in self._changing}.values():
                before.copies.pop(id(tensor), None)
            return
        if drew_from_numpy and not self._draws_from_numpy:
            self._draws_from_numpy = True
            raise ActivationError(
                f"forward of {self._name} has drawn from numpy.random, which it did not do in its first call; the plan "
                "recomputes this module in backward, which would draw other numbers; draw in every forward, or with "
                "torch"
            )
        for key, tensor in before.tensors.items():
            if tensor._version != before.versions[key] and id(tensor) not in before.copies:
                self._changing.add(key)
                raise ActivationError(
                    f"forward of {self._name} has changed its {key[1]} in place, which it did not do in its first "
                    "call; the plan recomputes this module in backward, and the old values are gone; change it in "
                    "every forward or outside forward, or give the module a new tensor (self.buffer = values)"
                )

    def has_changed(self, before: "Snapshot") -> bool:
        """Return whether anything but values behind ``tensor.data`` is different now."""
        return (
            self.has_set_attributes(before)
            or any(tensor._version != before.versions[key] for key, tensor in before.tensors.items())
            or any(not _same_state(_get_state(generator), state) for generator, state in before.random)
        )

    def has_drawn(self, before: "Snapshot") -> bool:
        """Return whether torch's global generator has drawn since: that of the current GPU, if there is one."""
        *_, last = _of_torch()
        return any(not torch.equal(one.get_state(), state) for one, state in before.random if one is last)

    def has_set_attributes(self, before: "Snapshot") -> bool:
        """Return whether an attribute or an entry of a container has become another object."""
        return any(_differs(holder, contents) for holder, contents in before.holders)

    @contextlib.contextmanager
    def restored(self, before: "Snapshot") -> Iterator[None]:
        """Return a context for the second pass. Inside it, the state is that of the snapshot.

        Raises:
            ActivationError: a large tensor has been changed since the first pass, which forward does not change.
        """
        for key, tensor in before.tensors.items():
            if id(tensor) not in before.copies and tensor._version != before.versions[key]:
                raise ActivationError(
                    f"{key[1]} of {self._name} was changed in place between forward and backward; the plan recomputes "
                    "this module in backward, and the old values are gone; change it after backward, or give the "
                    "module a new tensor (module.buffer = values)"
                )
        holders = [(holder, contents, _copied(holder)) for holder, contents in before.holders]
        now = [(generator, _get_state(generator)) for generator, _ in before.random]
        set_by_with = [(one, value) for one, value in before.context.items() if one.get(None) is not value]
        tokens = [(one, one.set(value)) for one, value in set_by_with]
        hooks = [(held, then, held.copy()) for held, then in before.hooks if held != then]
        try:
            for held, then, _ in hooks:
                held.clear()
                held.update(then)
            copies = {number: tensor.clone() for number, tensor in before.copies.items()}  # it may run more than twice
            for holder, contents, _ in holders:
                put_back(holder, _with(contents, copies))
            for generator, state in before.random:
                _set_state(generator, state)
            yield
        finally:
            for holder, _, contents in holders:
                put_back(holder, contents)
            for generator, state in now:
                _set_state(generator, state)
            for one, token in tokens:
                one.reset(token)
            for held, _, since in hooks:
                held.clear()
                held.update(since)


@contextlib.contextmanager
def kept_outside(model: nn.Module, step: Callable[..., Any] | None = None) -> Iterator[None]:
    """Return a context after which RNGs and variables that a model uses, or a step that calls it, are as before it."""
    modules = list(model.modules())
    visit = _Visit([random, np.random])
    for module in modules:
        visit.module(module)
    used = Used(modules, step)
    for variables in used.variables:
        visit.variables(variables)
    visit.values(used.values)
    before = [(generator, _get_state(generator)) for generator in visit.generators]
    try:
        with as_they_were(visit.holders):
            yield
    finally:
        for generator, state in before:
            _set_state(generator, state)


@contextlib.contextmanager
def as_they_were(holders: Iterable[tuple[Any, Any]]) -> Iterator[None]:
    """Return a context after which containers hold these contents. What is taken from iterators in them comes again."""
    held = [contents.values() if isinstance(contents, dict) else contents for _, contents in holders]
    found = [each for values in held if not isinstance(values, _BUFFERS) for each in values if _is_iterator(each)]
    taken = {id(each): list[Any]() for each in found}
    try:
        noting = {id(each): _noting(each, taken[id(each)]) for each in found}
        for holder, contents in holders if noting else ():
            put_back(holder, _with(contents, noting))
        yield
    finally:
        again = {id(each): itertools.chain(taken[id(each)], each) for each in found if taken[id(each)]}
        for holder, contents in holders:
            put_back(holder, _with(contents, again))


def _is_iterator(value: Any) -> bool:
    return isinstance(value, Iterator) and not isinstance(value, io.IOBase)


def _noting(iterator: Iterator[Any], taken: list[Any]) -> Iterator[Any]:
    for value in iterator:
        taken.append(value)
        yield value


class Snapshot(NamedTuple):
    """The state before a forward.

    Attributes:
        holders: attributes of modules and objects, and containers, each with a shallow copy of its contents.
        tensors: the tensors in them that may change in place, by holder and name.
        versions: their version counters.
        copies: copies of some of them, by ``id``.
        random: random number generators with their states.
        numpy: the bits of NumPy's global generator.
        context: the context variables.
        hooks: on forward, which a loop or library may have around each forward: as modules hold them, and copies.
    """

    holders: list[tuple[Any, Any]]
    tensors: dict[_Key, torch.Tensor]
    versions: dict[_Key, int]
    copies: dict[int, torch.Tensor]
    random: list[tuple[Any, Any]]
    numpy: bytes
    context: contextvars.Context
    hooks: list[tuple[dict[int, Any], dict[int, Any]]]


class _Visit:
    """Goes through modules, their attributes and what these hold, and notes what may change."""

    def __init__(self, generators: list[Any]) -> None:
        self.holders: list[tuple[Any, Any]] = []
        self.tensors: dict[_Key, torch.Tensor] = {}
        self.differentiable: list[torch.Tensor] = []
        self.generators = list(generators)
        self._seen: set[int] = set()
        self._given: list[Any] = []

    def module(self, module: nn.Module, depth: int = 0) -> None:
        """Note a module's attributes and buffers, and what people have set on its parameters."""
        own = vars(module)
        if id(own) in self._seen:
            return
        self._hold(own, _copied(own), depth)
        if buffers := own.get("_buffers"):
            self._hold(buffers, buffers, depth)
        for parameter in own.get("_parameters", {}).values():
            if parameter is not None and (held := _copied(vars(parameter))) and not _is_quantized(parameter):
                self._hold(vars(parameter), held, depth)

    def variables(self, variables: Variables) -> None:
        """Note variables, and what they hold."""
        self._hold(variables, dict(variables), 0)

    def values(self, given: Any) -> None:
        """Note lists, dicts and objects among arguments."""
        self._given.append(tuple(given))  # which lives on: what is seen is known by ``id``
        self._sequence(None, None, self._given[-1], 0)

    def _hold(self, holder: Any, items: MutableMapping[Any, Any], depth: int) -> None:
        self._seen.add(id(holder))
        self.holders.append((holder, _copied(holder) if holder is items else items))
        for key, value in items.items():
            if (follow := _kind(type(value))) is not None:
                follow(self, holder, key, value, depth + 1)

    def _tensor(self, holder: Any, key: Any, tensor: torch.Tensor, _depth: int) -> None:
        if tensor.grad_fn is not None:
            self.differentiable.append(tensor)
        elif tensor.is_inference():
            pass  # left by an evaluation; a forward that trains cannot change it
        elif not tensor.requires_grad and not isinstance(tensor, nn.Parameter) and tensor.layout is torch.strided:
            self.tensors[id(holder), key] = tensor

    def _generator(self, _holder: Any, _key: Any, generator: Any, _depth: int) -> None:
        self.generators.append(generator)

    def _buffer(self, _holder: Any, _key: Any, values: Any, _depth: int) -> None:
        is_numpy = isinstance(values, np.ndarray)
        is_small = (values.nbytes if is_numpy else sys.getsizeof(values)) <= SMALL_BYTES
        if is_small and not (is_numpy and not values.flags.writeable) and id(values) not in self._seen:
            self._seen.add(id(values))
            self.holders.append((values, copy.copy(values)))

    def _module(self, _holder: Any, _key: Any, module: nn.Module, depth: int) -> None:
        if depth <= _DEEPEST:
            self.module(module, depth)

    def _object(self, _holder: Any, _key: Any, value: Any, depth: int) -> None:
        if depth <= _DEEPEST and id(own := vars(value)) not in self._seen:
            self._hold(own, own, depth)

    def _slotted(self, _holder: Any, _key: Any, value: Any, depth: int) -> None:
        if depth <= _DEEPEST and id(value) not in self._seen:
            self._seen.add(id(value))
            self.holders.append((own := slots_of(value), dict(own)))
            for name, inner in own.items():
                if (follow := _kind(type(inner))) is not None:
                    follow(self, value, name, inner, depth + 1)

    def _mapping(self, _holder: Any, _key: Any, value: Any, depth: int) -> None:
        if depth <= _DEEPEST and id(value) not in self._seen:
            self._hold(value, value, depth)
            if hasattr(value, "__dict__"):  # a class made from dict
                self._object(None, None, value, depth)

    def _sequence(self, _holder: Any, _key: Any, value: Any, depth: int) -> None:
        if depth > _DEEPEST or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if not isinstance(value, tuple):  # it cannot change, but what is in it can
            self.holders.append((value, _copied(value)))
        for index, inner in enumerate(value):
            if (follow := _kind(type(inner))) is not None:
                follow(self, value, index, inner, depth + 1)


_Follow = Callable[[_Visit, Any, Any, Any, int], None]
_KINDS: Final[dict[type, _Follow | None]] = {}


def _kind(of: type) -> _Follow | None:
    """Return how to follow a value of this class; ``None`` if it cannot change, or is not followed."""
    if of not in _KINDS:
        _KINDS[of] = _found_kind(of)
    return _KINDS[of]


def _found_kind(of: type) -> _Follow | None:
    for kinds, follow in (
        ((torch.Tensor,), _Visit._tensor),
        (_BUFFERS, _Visit._buffer),
        ((torch.Generator, random.Random, np.random.Generator, np.random.RandomState), _Visit._generator),
        ((nn.Module,), _Visit._module),
        ((dict,), _Visit._mapping),
        ((list, tuple, set, collections.deque), _Visit._sequence),
    ):
        if issubclass(of, kinds):
            return follow
    # Configurations do not change in forward, and lead to much.
    package = of.__module__.partition(".")[0]
    if issubclass(of, type) or package in _NOT_FOLLOWED or of.__name__.endswith("Config"):
        return None
    if getattr(of, "__dictoffset__", 0) or issubclass(of, threading.local):
        return _Visit._object
    return _Visit._slotted if hasattr(of, "__slots__") and package not in sys.stdlib_module_names else None


_NOT_FOLLOWED: Final = frozenset(
    {"torch", "builtins", "functools", "inspect", "typing", "enum", "logging", "threading"}
)


def _is_quantized(parameter: nn.Parameter) -> bool:
    """Return whether a parameter's attributes are its values and what decodes them."""
    return type(parameter).__module__.partition(".")[0] in _QUANTIZERS


def _copied(holder: Any) -> Any:
    """Return a shallow copy of a container, or of a module's or parameter's own attributes."""
    if isinstance(holder, _BUFFERS):
        return copy.copy(holder)
    if not isinstance(holder, MutableMapping):
        return list(holder)
    copied = dict(holder)
    if "_parameters" in copied:  # of a module
        for name in _OF_MODULES:
            copied.pop(name, None)
    elif "_is_param" in copied:  # of a parameter that has a session
        for name in OF_SESSION:
            copied.pop(name, None)
    return copied


def _with(contents: Any, others: Mapping[int, Any]) -> Any:
    """Return contents with others in place of what has them, by ``id``."""
    if isinstance(contents, _BUFFERS):
        return contents
    if isinstance(contents, dict):
        return {key: others.get(id(value), value) for key, value in contents.items()}
    return [others.get(id(value), value) for value in contents]


def _differs(holder: Any, contents: Any) -> bool:
    """Return whether a container holds something else now."""
    if isinstance(holder, _BUFFERS):
        return bool(_bits(holder) != _bits(contents))
    now = _copied(holder)
    if isinstance(holder, MutableMapping):
        return list(now) != list(contents) or any(map(operator.is_not, now.values(), contents.values()))
    return len(now) != len(contents) or any(map(operator.is_not, now, contents))


def _bits(values: Any) -> bytes:
    found: bytes = bytes(values) if isinstance(values, bytearray) else values.tobytes()
    return found


def put_back(holder: Any, contents: Any) -> None:
    """Make a container hold this, and nothing else. Containers that hold it already are not touched."""
    if not _differs(holder, contents):
        return
    if isinstance(holder, _BUFFERS):
        everything: Any = ... if isinstance(holder, np.ndarray) else slice(None)
        holder[everything] = contents
    elif isinstance(holder, MutableMapping):
        # Not by methods of a class made from dict: a Counter's update() adds, and others refuse or convert.
        of: Any = next((kind for kind in (collections.OrderedDict, dict) if isinstance(holder, kind)), type(holder))
        there = holder if "_parameters" in contents else _copied(holder)  # all of a module, or what forward may change
        for key in there.keys() - contents.keys():
            of.__delitem__(holder, key)
        for key, value in contents.items():
            of.__setitem__(holder, key, value)
    else:
        holder.clear()
        (holder.update if isinstance(holder, set) else holder.extend)(contents)


def _is_small_input(tensor: torch.Tensor) -> bool:
    return type(tensor) is torch.Tensor and tensor.nbytes <= _SMALL_INPUT_BYTES and not tensor.is_inference()


def _copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of an input, the same one for all blocks that are given it, as long as it does not change."""
    if tensor not in _copies_of_inputs or _copies_of_inputs[tensor][0] != tensor._version:
        _copies_of_inputs[tensor] = tensor._version, tensor.clone()
    kept: torch.Tensor = _copies_of_inputs[tensor][1]
    return kept


_copies_of_inputs: Final[Any] = WeakTensorKeyDictionary()  # with the versions that were copied


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors have the same bits."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)) if a.dim() else a.equal(b)


def _of_torch() -> Iterator[torch.Generator]:
    yield torch.default_generator
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        yield torch.cuda.default_generators[torch.cuda.current_device()]


_ATTENTION: Final = [
    (getattr(torch.backends.cuda, f"{kind}_sdp_enabled"), getattr(torch.backends.cuda, f"enable_{kind}_sdp"))
    for kind in ("flash", "mem_efficient", "math", "cudnn")
]


def _allow_attention(states: list[bool]) -> None:
    for (_, enable), state in zip(_ATTENTION, states, strict=True):
        enable(state)


def _set_parametrized(state: tuple[int, dict[Any, Any]]) -> None:
    parametrize._cache_enabled, kept = state
    parametrize._cache = kept.copy()


# Read and set like generators: which kernels of attention may run, as ``sdpa_kernel`` sets it; and the weights that
# parametrizations have made, as ``parametrize.cached`` keeps them.
_SETTINGS: Final = (
    types.SimpleNamespace(getstate=lambda: [is_enabled() for is_enabled, _ in _ATTENTION], setstate=_allow_attention),
    types.SimpleNamespace(
        getstate=lambda: (parametrize._cache_enabled, dict(parametrize._cache)), setstate=_set_parametrized
    ),
)


def _numpy_bits() -> bytes:
    """Return the bits of NumPy's global generator, a hundred times faster than its state."""
    generator: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if not isinstance(generator, np.random.MT19937):
        return repr(generator.state).encode()
    return ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)


def _get_state(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if hasattr(generator, "getstate") else generator.get_state()


def _same_state(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else repr(a) == repr(b)


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif hasattr(generator, "setstate"):
        generator.setstate(state)
    else:
        generator.set_state(state)
