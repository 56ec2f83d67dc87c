"""Checks and guards: a prepared model refuses operations that would fail later or silently give wrong results."""

import functools
import gc
import types
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from executor.callbacks import replace_attribute
from executor.module.copies import plain_copy
from executor.module.guarded_parameters import INSTEAD, has_session, unguarded
from executor.module.own_checkpoints import is_checkpointed
from executor.packed import stored_parameters

SECOND_ORDER: Final = (
    "gradients of gradients (create_graph=True, as a gradient penalty needs them) and transforms of torch.func need "
    "modules that compute as they do in memory, but this plan tiles or divides some, or fetches weights in fp8; plan "
    "for them: give prepare() the step that makes them (step=...)"
)
"""Why backward through backward is refused."""

ON_DEMAND: Final = (
    "Until its step, weights are brought when modules run, which is slower than planned; losses and weights are those "
    "of training in memory. Iterations that match the plan follow it again. This is said once"
)
"""What an iteration does that has left the plan."""

AS_THEY_ARE: Final = (  # what becomes of module.compile()
    "modules that torch.compile has compiled run as they are until the session is closed; with compile_blocks=True, "
    "prepare() compiles the model's blocks under the plan"
)

LEFT_HALF_WAY: Final = (
    "If an exception left the iteration half way, it cannot be resumed: close the session "
    "(optimizer.session.close()), which gives the model the weights of the last step, or NaN if they are lost, and "
    "prepare() again, or continue from a checkpoint"
)
"""Remedy for an iteration that did not end."""

_prepared: Final = weakref.WeakSet[nn.Module]()
"""All modules of all models whose sessions are open."""


def unplanned_autocast(device: torch.device, planned: torch.dtype) -> str:
    """Return what autocast to another type than the plan's means for it; nothing if there is none."""
    if not torch.is_autocast_enabled(device.type) or (other := torch.get_autocast_dtype(device.type)) == planned:
        return ""
    return (
        f"autocast to {other} is on, but the plan is for {planned}: losses and weights are those of training in memory "
        f"with it, but times are others, and memory is not counted for copies of weights in {other}, which live from "
        "forward to backward where layers are not recomputed; if memory runs out, give prepare() less device_memory"
    )


def check_call() -> None:
    """Check that no checkpoint, compiler, trace or ``DistributedDataParallel`` calls a prepared model.

    Raises:
        ValueError: one does, so hooks would not see gradients, or would be compiled away.
    """
    if DistributedDataParallel._get_active_ddp_module() is not None:  # type: ignore[no-untyped-call]
        raise ValueError(
            "a prepared model was called by DistributedDataParallel, which would take its gradients; call the model "
            "itself, whose plan averages gradients over ranks"
        )
    if is_checkpointed():
        raise ValueError(
            "a prepared model was called inside torch.utils.checkpoint; call it outside of that: the plan recomputes "
            "activations itself"
        )
    if torch._C._dynamo.eval_frame.get_eval_frame_callback() not in {None, False}:
        raise ValueError(
            "a prepared model was called inside a function that torch.compile compiles, which would see weights where "
            "none are; call it outside of that, and give prepare() compile_blocks=True, which compiles its blocks"
        )
    if torch.jit.is_tracing() or torch.compiler.is_exporting():  # type: ignore[attr-defined, no-untyped-call]
        raise ValueError(
            "a prepared model was called by torch.jit.trace or torch.export, which would keep weights where none are; "
            "give them another model that has loaded model.state_dict()"
        )


def check_unprepared(model: nn.Module) -> None:
    """Check that no other session has this model or a part of it.

    Raises:
        ValueError: another session has it. Its hooks would report to both sessions.
    """
    if model in _prepared:
        raise ValueError(
            "the model is prepared already, and a model can have only one session; close the first one "
            "(session.close() of the optimizer that prepare() returned), or make the model again"
        )
    parts = [name for name, module in model.named_modules() if module in _prepared]
    if parts := parts or [name for name, parameter in model.named_parameters() if has_session(parameter)]:
        raise ValueError(
            f"{parts[0]} of the model is also that of a model that is prepared already, and only one plan can bring "
            "and update it; close that one's session, or prepare one nn.ModuleDict of both models, with step="
        )


def check_plain(model: nn.Module) -> None:
    """Check that all parameters of a model have a shape, and can be moved.

    Raises:
        ValueError: a module is lazy, or is scripted and has parameters.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and next(module.parameters(), None) is not None:
            raise ValueError(
                f"module {name or 'the model'} is scripted (torch.jit), so its parameters cannot be moved; give the "
                "module as it was before torch.jit.script, or script functions without parameters alone"
            )
    if (name := next((name for name, parameter in model.named_parameters() if is_lazy(parameter)), None)) is not None:
        raise ValueError(
            f"parameter {name} is of a lazy module and has no shape yet; run the model once on a batch, and then make "
            "the optimizer, before prepare()"
        )


class _Span(NamedTuple):
    """The bytes between a tensor's first and last value."""

    memory: tuple[str, int]  # the device, and for tensors without values the storage
    begin: int
    end: int
    words: str
    tensor: torch.Tensor
    is_trained: bool

    def shares_values(self, other: "_Span") -> bool:
        """Return whether two spans of one memory have a value in common; columns of one matrix have none."""
        return np.shares_memory(self._places(), other._places())

    def _places(self) -> Any:
        """Return an array in the tensor's place, whose values are not read."""
        itemsize = self.tensor.itemsize
        with unguarded():
            strides = self.tensor.stride()
        place = types.SimpleNamespace()
        place.__array_interface__ = {
            "version": 3,
            "typestr": f"|V{itemsize}",
            "shape": tuple(self.tensor.shape),
            "strides": tuple(stride * itemsize for stride in strides),
            "data": (self.begin + itemsize, True),  # an address of 0 would be none
        }
        return np.asarray(place)


def check_memory(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Check that no trained parameter shares values with another parameter, or with a buffer.

    PyTorch trains such parameters as one weight, but a plan moves each by itself. Slices without common values may lie
    in one storage. Frozen parameters may share values, because these never differ.

    Args:
        model: any module.
        optimizer: its parameters are trained, even if they are frozen now.

    Raises:
        ValueError: one does; names both.
    """
    given = {id(p) for group in optimizer.param_groups for p in group["params"]} if optimizer is not None else set()
    spans = sorted(_spans(model, given), key=lambda span: (span.memory, span.begin))
    open_spans: list[_Span] = []
    for span in spans:
        open_spans = [other for other in open_spans if other.memory == span.memory and other.end > span.begin]
        for other in open_spans:
            if (span.is_trained or other.is_trained) and span.shares_values(other):
                remedy = (
                    "leave ensure_weight_tying=True out of the LoraConfig, or give adapters to only one of the tied "
                    "layers"
                    if "lora_" in other.words
                    else "assign one nn.Parameter to both modules, and transpose or slice it in forward, or give each "
                    "its own memory (.clone())"
                )
                raise ValueError(
                    f"{other.words} and {span.words} share memory, so PyTorch trains them as one weight, but a plan "
                    f"would move each by itself; {remedy}"
                )
        open_spans.append(span)


class Sharing(NamedTuple):
    """A tensor outside of a model with memory of one of its trained parameters.

    Attributes:
        tensor: outside, as a parameter of another model.
        name: of the parameter.
        parameter: of the model.
        before: an alias of what it is now.
        is_within: whether all that the tensor has is the parameter's, in its type.
    """

    tensor: torch.Tensor
    name: str
    parameter: nn.Parameter
    before: torch.Tensor
    is_within: bool


def sharing_memory(model: nn.Module, trained: Collection[int]) -> Iterator[Sharing]:
    """Yield ordinary tensors of the process, outside of a model, that have memory of its trained parameters.

    In PyTorch they change with these: a parameter of another model that was made of one's data, a state dict that is
    still held. What only autograd or NumPy holds is not seen.

    Args:
        model: any module, before its weights move.
        trained: the ``id`` of parameters that an optimizer has.
    """
    own = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    storages = {key: tensor.untyped_storage() for key, tensor in own.items() if _is_plain(tensor)}
    # The Python object of a storage holds it, as each of its tensors does.
    count = Counter(storage._cdata for storage in storages.values())
    held = {storage for storage, number in count.items() if torch._C._storage_Use_Count(storage) > number + 1}
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad or id(p) in trained]
    named = [(name, p) for name, p in named if id(p) in storages and storages[id(p)]._cdata in held]
    spans = [(span, p) for name, p in named for span in _of_tensors([(name, p.detach(), True)])]
    for tensor in gc.get_objects() if spans else ():
        if not _is_plain(tensor) or id(tensor) in own:
            continue
        for given in _of_tensors([("", tensor, False)]) if tensor.untyped_storage()._cdata in held else ():
            for span, parameter in spans:
                if given.tensor is not span.tensor and span.begin < given.end and given.begin < span.end:
                    is_within = span.begin <= given.begin and given.end <= span.end and tensor.dtype == parameter.dtype
                    yield Sharing(tensor, span.words, parameter, span.tensor, is_within)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is an ordinary one with memory."""
    is_ordinary = (type(tensor) is torch.Tensor or type(tensor) is nn.Parameter) and tensor.layout is torch.strided
    return is_ordinary and not (torch._C._functorch.is_functorch_wrapped_tensor(tensor) or tensor.is_meta)


def trained_memory(model: nn.Module) -> Callable[[torch.Tensor], str]:
    """Return a function that returns the trained parameter in whose memory a tensor lies; empty if there is none."""
    spans = [span for span in _spans(model, set()) if span.is_trained]

    def owner(tensor: torch.Tensor) -> str:
        given = next(_of_tensors([("", tensor, False)]), None)
        found = (s.words for s in spans if given is not None and s.memory == given.memory and s.shares_values(given))
        return next(found, "")

    return owner


def _spans(model: nn.Module, trained: set[int]) -> Iterator[_Span]:
    held = [
        (f"parameter {name}", tensor, stored.parameter.requires_grad or id(stored.parameter) in trained)
        for name, stored in stored_parameters(model).items()
        for tensor in stored.tensors()
        if isinstance(tensor, torch.Tensor)  # a quantized one without values has no scales yet
    ]
    return _of_tensors(held + [(f"buffer {name}", b, False) for name, b in model.named_buffers()])


def _of_tensors(held: list[tuple[str, torch.Tensor, bool]]) -> Iterator[_Span]:
    for words, tensor, is_trained in held:
        if tensor.layout is torch.strided and tensor.numel() and not is_traceable_wrapper_subclass(tensor):
            with unguarded():  # a parameter out of sight says the strides of its weights, which are elsewhere
                strides, offset = tensor.stride(), tensor.storage_offset()
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True))
            begin = int(offset) * tensor.itemsize if tensor.is_meta else tensor.data_ptr()
            memory = (str(tensor.device), tensor.untyped_storage()._cdata if tensor.is_meta else 0)
            yield _Span(memory, begin, begin + (int(last) + 1) * tensor.itemsize, words, tensor, is_trained)


def check_kinds(model: object, optimizer: object) -> None:
    """Check that the model is a module and the optimizer an optimizer.

    Raises:
        TypeError: one of them is not, or the optimizer's step was replaced.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model is {type(model).__name__}; give a torch.nn.Module")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"the optimizer is {type(optimizer).__name__}; give one of torch.optim over model.parameters()")
    step: Any = vars(optimizer).get("step")
    while step is not None and getattr(step, "_wrapped_by_lr_sched", False):  # as learning-rate schedulers do
        step = getattr(step, "__wrapped__", None)
    if step is not None and getattr(step, "__func__", step) is not type(optimizer).step:
        raise TypeError(
            "the optimizer's step was replaced, which the plan's own step would leave out; replace that of what "
            "prepare() returns, or use optimizer.register_step_pre_hook()"
        )


def run_uncompiled(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Let modules that ``torch.compile`` has compiled compute as they are; yield functions that undo this.

    A compiled graph hides its operators from a capture, and weights are not there when it is made.
    """
    for module in model.modules():
        own = vars(module)
        if module._compiled_call_impl is not None:  # module.compile() was called
            yield functools.partial(own.update, _compiled_call_impl=own["_compiled_call_impl"])
            own["_compiled_call_impl"] = None
        inner: Any = dict(module.named_children()).get("_orig_mod")
        if inner is not None and own["forward"] != inner.__call__:  # torch.compile(module) returned it
            yield functools.partial(own.update, forward=own["forward"])
            own["forward"] = inner.__call__
            continue
        for name, method in {**_of_class(module), **own}.items():
            compiled: Any = getattr(method, "_torchdynamo_orig_callable", None)  # torch.compile(method) returned it
            if compiled is not None:
                yield replace_attribute(module, name, compiled if name in own else types.MethodType(compiled, module))


def _of_class(module: nn.Module) -> dict[str, Any]:
    """Return what the classes of a module have, by name, except those of PyTorch."""
    kinds = [kind for kind in type(module).__mro__ if not kind.__module__.startswith("torch.")]
    return {name: value for kind in reversed(kinds) for name, value in vars(kind).items()}


def bind_guards(
    model: nn.Module, dtype: torch.dtype, device: torch.device, values: Callable[[nn.Parameter], torch.Tensor]
) -> list[Callable[[], None]]:
    """Make a model and all its modules refuse operations that a session cannot follow; return functions that undo this.

    These operations are: preparing again, adding or replacing modules or parameters, and changing the type or the
    device of weights; and pickling and shallow copies. Deep copies get the ``values`` of parameters.
    """
    undo = []
    for module in _guarded(model):
        undo += [
            replace_attribute(module, "_apply", _refusing_conversion(module, dtype, device)),
            replace_attribute(module, "__deepcopy__", functools.partial(plain_copy, module, values=values)),
            replace_attribute(module, "__reduce_ex__", _refuse_pickle),
            replace_attribute(
                module, "compile", lambda *_, **__: warnings.warn(AS_THEY_ARE, RuntimeWarning, stacklevel=2)
            ),
        ]
        _prepared.add(module)
        undo.append(functools.partial(_prepared.discard, module))
    return undo + refuse_replacements(
        _guarded(model),
        lambda name, kind: ValueError(
            f"{name} of a {kind} cannot be set: the modules and parameters of a prepared model "
            f"stay as planned; {INSTEAD}"
        ),
    )


def _guarded(model: nn.Module) -> list[nn.Module]:
    """Return a model's modules without those that hold nothing, as activations, which models may share."""
    return [m for m in model.modules() if m is model or m._parameters or m._buffers or m._modules]


def refuse_replacements(
    modules: Iterable[nn.Module], refusal: Callable[[str, str], Exception]
) -> list[Callable[[], None]]:
    """Make modules refuse that their parameters and modules are added or replaced; return functions that undo this.

    A refusal gives the module its class and parameters back: ``weight_norm`` and its like change the class and take the
    weight away before they set another.

    ``refusal`` returns the error, given the name of what is set, and the class of its module.
    """
    refusing = weakref.WeakKeyDictionary({each: (type(each), {**each._parameters}) for each in modules})

    def refuse(module: nn.Module, name: str, value: Any) -> None:
        if module in refusing and value is not module._parameters.get(name, module._modules.get(name)):
            module.__class__, parameters = refusing[module]
            module._parameters.clear()
            module._parameters.update(parameters)
            raise refusal(name, type(module).__name__)

    register = register_module_parameter_registration_hook, register_module_module_registration_hook
    return [each(refuse).remove for each in register]


def _refuse_pickle(_protocol: object) -> None:
    raise TypeError(
        "a prepared model cannot be pickled, or copied by copy.copy(): its session, which has the memory of its "
        "weights, is a part of it; save model.state_dict(), or pickle copy.deepcopy(model), which is an ordinary model"
    )


def _refusing_conversion(module: nn.Module, dtype: torch.dtype, device: torch.device) -> Callable[..., nn.Module]:
    """Return an ``_apply`` (which ``to()``, ``half()`` and ``cuda()`` call) that raises if weights would change."""
    original: Callable[..., nn.Module] = module._apply

    def apply(fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        probe = torch.zeros(1, dtype=dtype, device=device)
        before = _type_and_place(probe)
        if (after := _type_and_place(moved := fn(probe))) != before:
            elsewhere = " elsewhere" if after[:2] == before[:2] else ""
            raise ValueError(
                f"the weights of a prepared model stay {dtype} on {device}, as planned, and cannot become "
                f"{moved.dtype} on {moved.device}{elsewhere}; change the model before prepare(), or after "
                "session.close()"
            )
        return original(fn, recurse)

    return apply


def _type_and_place(tensor: torch.Tensor) -> tuple[torch.dtype, torch.device, int]:
    return tensor.dtype, tensor.device, 0 if tensor.is_meta else tensor.data_ptr()
