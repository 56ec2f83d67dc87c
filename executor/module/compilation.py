"""``torch.compile`` for the repeated blocks of a model that runs under a plan.

[Note: Compiled modules] Each module is compiled separately: the largest modules whose parameters all belong to one
unit, such as the attention of a layer, its MLP, or a norm that ``transformers`` wrote in Python; or a whole layer,
where that is a unit. Hooks (:mod:`executor.module.binding`) run before and after the module, outside of its graph, so
they cause no graph breaks. Weights have arrived when the module begins, and its gradients are complete when its
backward ends. Parameters are inputs of its graph. Their shapes and addresses never change (static slots), so identical
layers share one graph, and nothing is recompiled during training. Recomputation wraps the whole layer with its compiled
modules. Collectives inside a module are outside of its graphs. Experts that are units of their own are not compiled.

The loss of a model of ``transformers`` is compiled too, if all its logits exist at once: PyTorch's operators convert
them to fp32, and keep and make several tensors of that size. Inductor reads the logits, and writes their gradient.

Layers whose activations are offloaded are not compiled. Offloading saves the outputs of matrix products, which it sees
as operators in PyTorch's dispatcher. A compiled graph has fused kernels instead. Such a kernel may never write a
product's output: it applies the bias and the activation function first.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import torch
from torch import nn
from torch._dynamo import config
from torch._dynamo.exc import TorchDynamoException

from executor.callbacks import replace_attribute
from executor.module.own_checkpoints import compiled
from planner.graph import Unit

_SPARE_VARIANTS: Final = 8
"""Extra compilations of the same code, beside one per module: for training, evaluation and other shapes."""


class CompileError(ValueError):
    """A module cannot be compiled."""


def compiled_modules(
    model: nn.Module, units: tuple[Unit, ...], unit_of: Mapping[nn.Module, str]
) -> dict[nn.Module, str]:
    """Return the modules to compile, each with its unit; see [Note: Compiled modules].

    Modules of ``torch.nn`` are not compiled: each is one kernel already.
    """
    repeated = {unit.name for unit in units if unit.segment != unit.name}
    found: dict[nn.Module, str] = {}
    inside: set[nn.Module] = set()
    for module in model.modules():  # from the outside to the inside
        owners = (inner for inner in module.modules() if next(inner.parameters(recurse=False), None) is not None)
        inner = {unit_of.get(owner, "") for owner in owners}  # experts in several units are in no unit here
        has_forward = type(module).forward is not nn.Module.forward  # containers have none
        if module in inside or len(inner) != 1 or not inner <= repeated or not has_forward:
            continue
        inside.update(module.modules())
        if not type(module).__module__.startswith("torch.nn."):
            found[module] = inner.pop()
    return found


def compile_blocks(
    model: nn.Module,
    units: tuple[Unit, ...],
    unit_of: Mapping[nn.Module, str],
    backend: str,
    undo: list[Callable[[], None]],
) -> Iterable[nn.Module]:
    """Compile the modules that :func:`compiled_modules` finds, and return them; what restores them goes to ``undo``."""
    found = compiled_modules(model, units, unit_of)
    limit = max(config.recompile_limit, len(found) + _SPARE_VARIANTS)  # for modules that share code
    undo.append(_replaced(config, "recompile_limit", limit))
    for name, module in model.named_modules():
        if module in found:
            what = f"module {name} ({type(module).__name__})"
            undo.append(replace_attribute(module, "forward", compile_function(module.forward, what, backend)))
    return found


def compile_loss(model: nn.Module, backend: str) -> Callable[[], None]:
    """Compile the loss of a model of ``transformers``; return a function that restores it."""
    owners: list[Any] = [
        each for each in model.modules() if isinstance(getattr(type(each), "loss_function", None), property)
    ]
    if not owners:
        return lambda: None
    owner = owners[0]  # those inside it have no head
    loss = compile_function(owner.loss_function, f"the loss of {type(owner).__name__}", backend)
    return _replaced(owner, "loss_function", loss)


def _replaced(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Set an attribute that may be a property; return a function that sets it to what it was."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    return functools.partial(setattr, owner, name, before)


def reason(error: Exception) -> str:
    """Return why something cannot be compiled, in one line; advice for debugging follows in the error."""
    return " ".join(str(error).strip().split("\n\n")[0].split())


def compile_function(function: Callable[..., Any], what: str, backend: str) -> Callable[..., Any]:
    """Return a function that a backend of ``torch.compile`` compiles at its first call.

    It raises :class:`CompileError`, which says ``what`` it is, if it cannot be compiled.
    """
    compiling = compiled(torch.compile(function, backend=backend))

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return compiling(*args, **kwargs)
        except TorchDynamoException as error:
            raise CompileError(
                f"{what} cannot be compiled: {reason(error)}; leave out compile_blocks (--compile), or fix it"
            ) from error

    return call
