"""What an audit copies of a module's run under a plan: arguments, results, gradients, random numbers."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd.graph import GradientEdge
from torch.utils._pytree import tree_leaves

from executor.callbacks import hook_target
from executor.direct_io import pages

_NO_SEQUENCE: Final = 2**63  # nodes of leaves have larger numbers
_NUM_SAMPLED: Final = 1024
_LARGE_BYTES: Final = 1 << 21


def host_copy(tensor: Tensor) -> Tensor:
    """Return a copy in host memory, without a graph.

    Large copies lie in large pages: to touch new memory in small ones takes several times as long as a GPU's copy.
    """
    values = tensor.detach()
    if values.layout is not torch.strided or values.nbytes < _LARGE_BYTES or not values.is_contiguous():
        return values.to("cpu", copy=True)
    return torch.from_numpy(pages(values.nbytes)).view(values.dtype).view(values.shape).copy_(values)


def watch_edges(edges: Mapping[GradientEdge, Any], targets: list[Tensor], begun: int, store: dict[Any, Tensor]) -> None:
    """Keep the gradients that a module gives its inputs or weights, without those that others give the same tensors.

    Hooks on the module's own autograd nodes leave the order of all sums as it is, as aliases of inputs would not.

    Args:
        edges: where the gradients go, each with a key.
        targets: tensors that the module has made.
        begun: autograd's next number when the module began.
        store: gets the gradients, on the host, by key.
    """
    waiting: list[Any] = [target.grad_fn for target in targets]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen or not begun <= node._sequence_nr() < _NO_SEQUENCE:
            continue
        seen.add(node)
        found = [(index, edges.get(GradientEdge(*edge))) for index, edge in enumerate(node.next_functions)]
        if any(number is not None for _, number in found):
            node.register_hook(_adding(store, [(i, number) for i, number in found if number is not None]))
        waiting += [after for after, _ in node.next_functions]


def _adding(store: dict[Any, Tensor], slots: list[tuple[int, Any]]) -> Callable[[Any, Any], None]:
    def add(to_inputs: Any, _from_outputs: Any) -> None:
        for index, number in slots:
            if (gradient := to_inputs[index]) is not None:
                held = host_copy(gradient.to_dense() if gradient.is_sparse else gradient)
                store[number] = store[number] + held if number in store else held

    return add


@contextlib.contextmanager
def outputs_inside(module: nn.Module, *, empty: bool = False) -> Iterator[tuple[list[Tensor], dict[int, Tensor]]]:
    """Return a context that collects what the modules inside a module return, in order; or nothing (``empty``).

    Also collected, by index, is what hooks give on instead, as :func:`executor.callbacks.hooked_behind` does.
    """
    found: list[Tensor] = []
    instead: dict[int, Tensor] = {}

    def collect(_module: nn.Module, _args: Any, output: Any) -> None:
        found.extend(leaf for leaf in tree_leaves(output) if is_differentiable(leaf))

    def see(_module: nn.Module, _args: Any, output: Any) -> None:
        for number, leaf in enumerate(reversed([leaf for leaf in tree_leaves(output) if is_differentiable(leaf)]), 1):
            if leaf._base is not None and leaf._base is found[-number]:
                instead[len(found) - number] = leaf

    with contextlib.ExitStack() as hooks:
        for inner in module.modules():
            if inner is not module and not empty:
                hooks.callback(inner.register_forward_hook(collect, prepend=True).remove)
                hooks.callback(inner.register_forward_hook(see).remove)
        yield found, instead


def leaving(inside: list[Tensor], instead: dict[int, Tensor]) -> list[int]:
    """Return the indices of what modules inside one have returned to others than it, see :func:`outputs_inside`.

    Such is what a hook collects (a router's logits, for a loss of its own): it gets a gradient from elsewhere.
    """
    numbers = list(instead)
    of_views = [numbers[at] for at in referred_to(list(instead.values()))]
    return sorted({*referred_to(inside), *of_views})


def referred_to(tensors: list[Tensor]) -> list[int]:
    """Return the indices of the tensors that something in Python, other than one list or so, still refers to."""
    counts = [sys.getrefcount(tensor) for tensor in list(tensors)]
    saved = [tensor._use_count() > 1 for tensor in tensors]  # type: ignore[attr-defined]
    return [number for number, count in enumerate(counts) if count > _REFERENCES[saved[number]]]


@torch.enable_grad()
def _references() -> list[int]:
    """Return how many references a tensor in two lists has, and one that autograd has saved: C++ may hold one too."""
    alone = torch.ones(1, requires_grad=True, device="cpu") * 1
    saved = alone * 1
    by_autograd = saved.sin()
    counts = [sys.getrefcount(tensor) for tensor in [alone, saved]]
    del by_autograd
    return counts


_REFERENCES: Final = _references()  # not in a forward: a checkpoint around it would count what is saved


def keeping(store: dict[int, Tensor], number: int, index: int) -> Callable[[Any], None]:
    """Return a hook to run before a node, that keeps one of its gradients on the host.

    Hooks on tensors run before it, such as one of the user's that turns a gradient around.
    """

    def keep(gradients: Any) -> None:
        if (gradient := gradients[index]) is not None:  # as for an output of cuDNN's nn.LSTM that nothing uses
            store[number] = host_copy(gradient)

    return keep


def targets_of(made: list[Any], begun: int) -> Iterator[tuple[int, Tensor]]:
    """Yield the tensors among results that get a gradient, each once, with the number of the result.

    Tensors that only passed through the module are left out: ``begun`` is autograd's next number when it began.
    """
    seen: set[int] = set()
    for number, leaf in enumerate(made):
        if type(leaf) is Tensor and leaf.requires_grad:
            target = hook_target(leaf)
            node = target.grad_fn
            if node is not None and node._sequence_nr() >= begun and id(target) not in seen:
                seen.add(id(target))
                yield number, target


def gradients_of(targets: list[Tensor], wanted: list[Tensor], totals: list[Tensor]) -> list[Tensor | None]:
    """Return gradients of inputs and parameters, given the total gradients of a module's outputs.

    If one output was made from another one, the total gradient of the other has both what came from outside and what
    came by way of the first. Only what came from outside is passed on.
    """
    order = sorted(range(len(targets)), key=lambda k: -_sequence_of(targets[k]))  # later ones first
    outer: list[Tensor] = []
    for position, k in enumerate(order):
        later = [targets[j] for j in order[:position]]
        inner: Any = (None,)
        if later:
            inner = torch.autograd.grad(later, targets[k], outer, retain_graph=True, allow_unused=True)
        outer.append(totals[k] if inner[0] is None else totals[k] - inner[0])
    return list(torch.autograd.grad([targets[k] for k in order], wanted, outer, allow_unused=True))


def _sequence_of(tensor: Tensor) -> int:
    node: Any = tensor.grad_fn
    return int(node._sequence_nr())


def is_differentiable(leaf: Any) -> bool:
    """Return whether an argument is a tensor whose gradient can be compared."""
    return type(leaf) is Tensor and leaf.requires_grad


def aliased(value: Any) -> Any:
    """Return a copy of a leaf that needs a gradient, because a module may change its input in place."""
    return value.clone() if is_differentiable(value) else value


def on_host(leaf: Any) -> Tensor | None:
    """Return a copy of a floating-point tensor on the host; ``None`` of anything else."""
    return host_copy(leaf) if type(leaf) is Tensor and leaf.is_floating_point() else None


def sampled(output: Any) -> list[Tensor]:
    """Return some values of each floating-point tensor in an output, on the host."""
    found = []
    for leaf in tree_leaves(output):
        if type(leaf) is not Tensor or is_functorch_wrapped_tensor(leaf):  # inside torch.vmap, it cannot be read
            continue
        if leaf.is_floating_point() and leaf.layout is torch.strided and leaf.numel():
            flat = leaf.detach().reshape(-1)
            found.append(flat[:: -(-flat.numel() // _NUM_SAMPLED)].to("cpu", copy=True))
    return found
