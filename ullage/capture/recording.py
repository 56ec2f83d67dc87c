"""Record one forward and backward of a module under fake tensors, operator by operator.

Fake tensors have shapes and types but no memory, so any machine can record a model of any size. The recorded operators
are those of a CPU, for which autograd needs no GPU. If a GPU runs other operators, those are recorded
(:func:`_as_on_gpu`).
"""

import bisect
import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final
from unittest import mock

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves, tree_map_only

from executor.callbacks import (
    Saved,
    ends_here,
    hook_target,
    in_backward,
    nodes,
    replace_attribute,
    tensors_of,
    transforms,
)
from executor.memory.forward_state import SMALL_BYTES
from executor.memory.recompute_cache import is_running_again
from executor.module.batches import named_inputs
from executor.module.own_checkpoints import is_compiled
from executor.module.tiled_layers import tile_modules
from executor.module.tiled_logits import tile_head
from executor.packed import as_real, stored_parameters
from planner.models.captured import NO_TILES
from planner.models.kernels import flop
from planner.models.operators import Batch
from ullage.capture.fakes import Fakes, traceable_functions
from ullage.capture.inputs import input_of
from ullage.capture.kernels import has_known_cost, kernels_of
from ullage.capture.operator_checks import check_operator
from ullage.capture.quantized import multiply_4bit
from ullage.capture.records import (
    OF_STEP,
    CaptureError,
    Event,
    LongLoopError,
    Recording,
    Save,
    Storage,
    Visit,
    strided,
)
from ullage.capture.repeats import Repeats, UnequalError
from ullage.capture.token_wise import TokenWise

# Operators with table look-ups: the position of the integers' argument, and the table's dimension of the first
# argument.
_TABLES = {"embedding": (1, 0), "nll_loss_forward": (1, 1), "nll_loss2d_forward": (1, 1)}
aten = torch.ops.aten
_SETS_DATA: Final[Any] = Tensor.data.__set__  # type: ignore[attr-defined]
OUTPUTS_LOSS: Final = "the output's loss"
OF_LOOP: Final = "your loop's, planned as the cross-entropy of the first floating output"
_SCALAR: Final = "the scalar in the output"
_FIRST_SCALAR: Final = "the first scalar in the output"
_AND_ALL_ELSE: Final = ", with all that does not lead to it"


def record(
    found: Recording,
    run: Callable[[], Any],
    inputs: Sequence[Tensor],
    tiles: Batch = NO_TILES,
    tiled: Collection[nn.Module] = (),
    *,
    as_on_gpu: bool,
    fakes: Fakes,
    repeats: Repeats | None = None,
    token_wise: TokenWise | None = None,
) -> Recording:
    """Run and record forward and backward of a model with fake parameters and inputs.

    Args:
        found: an empty recording of a model in training mode, to fill and return.
        run: calls the model, and returns its output, or a loss.
        inputs: the tensors that it is called with, in the order of the captured inputs.
        tiles: number of tokens for which the loss, and the modules ``tiled``, are computed at a time.
        tiled: modules to compute in tiles.
        as_on_gpu: record GPU kernels if they differ from those of a CPU.
        fakes: runs the operators, and knows the values of some inputs.
        repeats: equal blocks of the model, of which some are recorded; ``None``: record all blocks.
        token_wise: finds modules that can be computed in tiles.

    Raises:
        LongLoopError: forward has more events than ``repeats`` allows.
        CaptureError: the output has no loss, backward fails or reaches no parameter, or a real kernel refuses the
            arguments of an operator.
    """
    check = functools.partial(check_operator, as_on_gpu=as_on_gpu, tried=set())
    recorder = _Recorder(found, inputs, fakes, check, repeats, tiled, token_wise)
    with contextlib.ExitStack() as stack:
        stack.enter_context(fakes.readable())
        if as_on_gpu:
            stack.enter_context(_as_on_gpu())
        if tiles.loss_tile_tokens is not None:
            stack.callback(tile_head(found.model, tiles.loss_tile_tokens, recorder.reach_head))
        if tiles.layer_tile_tokens is not None:
            for undo in tile_modules(tiled, tiles.layer_tile_tokens):
                stack.callback(undo)
        stack.enter_context(traceable_functions())
        stack.enter_context(_InPlace(found.model))
        stack.enter_context(recorder.hooked())
        stack.enter_context(recorder)
        stack.enter_context(recorder.saves())
        loss, words = (find_loss if found.is_step else _planned_loss)(run())  # nothing else holds the output
        if not found.visits:
            raise CaptureError(
                "the step calls neither the model nor a part of it, but weights come when a module runs; put what "
                "reads them into a forward, and let the step call that"
            )
        recorder.begin_backward(loss)
        loss.backward()  # type: ignore[no-untyped-call]
    recorder.end()
    found.loss = OF_STEP + words if found.is_step else words
    found.reader = fakes.reader
    found.tiled = frozenset(name for name, module in found.model.named_modules() if module in tiled)
    if repeats is not None:
        found.copies, found.begins = repeats.copies, repeats.begins
    return found


def find_loss(output: Any) -> tuple[Tensor, str]:
    """Return the loss in a model's output, and a description of its place.

    The loss is the output itself if that is a floating scalar; else its ``loss`` (an attribute or a key); else its only
    floating scalar. Else the loop makes one of its first floating tensor; its cross-entropy stands for that: of what
    loops make of logits, it takes the most memory.

    Raises:
        CaptureError: no tensor in the output has a gradient.
    """
    if isinstance(output, Tensor) and output.dim() == 0 and output.requires_grad:
        return output, "the output"
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(named, Tensor) and named.requires_grad:
        return (named, OUTPUTS_LOSS) if named.dim() == 0 else (named.mean(), "the mean of the output's loss")
    trained = [leaf for leaf in tensors_of(output) if leaf.requires_grad]
    scalars = [leaf for leaf in trained if leaf.dim() == 0]
    if len(scalars) == 1:
        return scalars[0], _SCALAR
    if trained:
        return _stand_in(trained[0]), OF_LOOP if trained[0].dim() else _FIRST_SCALAR
    raise CaptureError(
        f"the output, a {type(output).__name__}, has no tensor with a gradient, so nothing can be trained; return "
        "a scalar loss, an object with a loss, or the tensor to train"
    )


def _planned_loss(output: Any) -> tuple[Tensor, str]:
    """Return the loss in a model's output, with stand-ins for what the loop makes of all that does not lead to it.

    A loop adds up several losses, or makes one of logits beside a scalar that balances experts. If the model names its
    loss, that is the whole. Raises as :func:`find_loss`.
    """
    loss, words = find_loss(output)
    reached = set(nodes(loss.grad_fn))
    for leaf in tensors_of(output) if words in (OF_LOOP, _SCALAR, _FIRST_SCALAR) else ():
        if leaf.grad_fn is not None and leaf.grad_fn not in reached:
            loss, words = loss + _stand_in(leaf), words.removesuffix(_AND_ALL_ELSE) + _AND_ALL_ELSE
            reached.update(nodes(leaf.grad_fn, seen=reached))
    return loss, words


def _stand_in(output: Tensor) -> Tensor:
    if not output.dim():
        return output
    # Kept until their backward, as the loop has a name for them.
    (made,) = Saved.apply(as_real(output))  # type: ignore[no-untyped-call]
    return -functional.log_softmax(made.float(), -1).mean()


@contextlib.contextmanager
def _as_on_gpu() -> Iterator[None]:
    """Run dropout as on a GPU: inside fused attention, and elsewhere as one kernel with a mask of bytes."""
    attention, dropout = functional.scaled_dot_product_attention, functional.dropout

    def fused_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,  # noqa: ARG001
        is_causal: bool = False,
        **rest: Any,
    ) -> Tensor:
        return attention(query, key, value, attn_mask, 0.0, is_causal, **rest)

    def fused_dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:  # noqa: A002
        if not training or not p or inplace:
            return dropout(input, p, training, inplace)
        return torch.native_dropout(input, p, True)[0]

    with mock.patch.multiple(functional, scaled_dot_product_attention=fused_attention, dropout=fused_dropout):
        yield


_Running = tuple[int, int, list[tuple[Tensor, int]]]
"""A visit that has not ended: autograd's next number when it began, and buffers with their versions then."""


class _InPlace(TorchFunctionMode):
    """Lets a forward that gives a trained parameter other data (``weight.data = ...``) write them in place."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _SETS_DATA and id(args[0]) in self._trained:
            held, values = args[0].detach(), args[1]
            is_other = values.untyped_storage()._cdata != held.untyped_storage()._cdata
            if is_other and (values.shape, values.dtype) == (held.shape, held.dtype):
                with torch.no_grad():
                    held.copy_(values)
                return None
        return func(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(
        self,
        found: Recording,
        inputs: Sequence[Tensor],
        fakes: Fakes,
        check: Callable[..., None],
        repeats: Repeats | None,
        tiled: Collection[nn.Module],
        token_wise: TokenWise | None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = found
        self._fakes, self._check, self._repeats, self._token_wise = fakes, check, repeats, token_wise
        # A module in tiles is one visit, because its submodules run once per tile.
        self._inner = {inner for module in tiled for inner in module.modules() if inner is not module}
        self._copied: set[nn.Module] = set()  # modules that are called now as copies, without running
        self._num_calls = 1
        self._ran: set[nn.Module] = set()  # modules that have run in this call
        # What the user's step does itself counts to its latest call, or to the first one.
        self._stack: list[_Running] = [(0 if found.is_step else -1, 0, [])]
        self._number: dict[int, int] = {}  # numbers of existing storages, by address
        self._held: list[Any] = []
        self._watch: dict[int, weakref.ref[Any]] = {}
        self._name: dict[int, str] = {}  # names of parameters, by number of the storage
        self._sequences: list[int] = []  # autograd's next number when each forward event was dispatched
        self._source = -1  # forward event of the running autograd node
        self._in_backward = False
        self._index_of: dict[int, set[int]] = {}  # inputs from which the integers in a storage come
        for name, stored in stored_parameters(found.model).items():
            for tensor in (*stored.tensors(), *stored.tables()):
                self._name[self._known(tensor, "parameter")] = name
        self._types = {name: parameter.dtype for name, parameter in found.model.named_parameters()}
        for buffer in strided(list(found.model.buffers())):
            self._known(buffer, "buffer")
        for number, tensor in enumerate(inputs):
            self._index_of[self._known(tensor, "input")] = {number}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # the class, such as one of torchao, runs operators on its parts, which come here
        kwargs = kwargs or {}
        if has_tangents := forward_ad._current_level >= 0:  # PyTorch makes those of zeros on the meta device
            args, kwargs = tree_map_only(Tensor, _in_memory, (args, kwargs))
        kind = getattr(kwargs.get("device"), "type", "")
        if kind == "cuda" or (kind == "meta" and (has_tangents or in_backward())):
            kwargs = kwargs | {"device": torch.device("cpu")}  # where all fake tensors are
        if self.found.is_step and func is aten._local_scalar_dense.default and args[0].is_floating_point():
            return self._fakes.logged(args[0])
        if func.overloadpacket.__name__ == "gemm_4bit":
            with self:
                return multiply_4bit(*args, **kwargs)
        output = self._fakes.run(func, args, kwargs)
        if func.namespace != "prim":
            self._record(func, args, kwargs, output)
        return output

    def _record(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], output: Any) -> None:
        found, visit, source = self.found, self._stack[-1][0], len(self.found.forward)
        if kernels := kernels_of(func, args, kwargs, output):
            self._try(func, args, kwargs, output)
        known = len(found.storages)
        given = strided((args, kwargs))
        read = [self._storage(part) for part in given]
        for storage in found.storages[known:] if found.is_step else ():
            storage.owner = "parameter"  # of another model, or what else a step finds outside of the model
        results = strided(output)
        written = tuple(self._storage(leaf) for leaf in results)
        products = results if flop(kernels) and not is_running_again() else []
        # The weights that a backward of second order reads are there: see [Note: Second order] in planner.setup.
        inside = in_backward() and torch.is_grad_enabled() and not self._in_backward
        if self._in_backward:
            visit, source = found.forward[self._source].visit, self._source
            if func.overloadpacket is aten.add:
                found.sums[written[0]] = tuple(read)
        event = Event(
            visit,
            source,
            kernels,
            written,
            output_bytes=results[0].numel() * results[0].element_size() if results else 0,
            product_bytes=sum(t.numel() * t.element_size() for t in products if t.is_floating_point()),
            parameters=tuple(dict.fromkeys(self._name[n] for n in read if n in self._name and not inside)),
            changes=func._schema.is_mutable and not self._in_backward,
        )
        if self._in_backward:
            found.backward.append(event)
            return
        if self._token_wise is not None:
            self._token_wise.see(func, args, kwargs, output)
        found.compiled = found.compiled or (bool(event.parameters) and is_compiled())
        self._follow_integers(func.overloadpacket.__name__, args, read, results, written)
        if event.changes:
            self._note_written(written)
        self._sequences.append(torch._C._autograd._get_sequence_nr())
        found.forward.append(event)
        if self._repeats and self._repeats.most_events is not None and len(found.forward) > self._repeats.most_events:
            raise LongLoopError

    def _try(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], output: Any) -> None:
        """Try an operator, unless made-up values may crash it: one whose cost, or shapes, PyTorch cannot say."""
        if not has_known_cost(func, args):
            if not self._in_backward:
                path = self.found.visits[self._stack[-1][0]].path if self.found.visits else ""
                self.found.unpriced.setdefault(str(func.overloadpacket), path)
            return
        if func in self._fakes.by_values:
            return
        try:
            self._check(func, args, kwargs, output)
        except CaptureError as error:
            if not self._in_backward:
                raise
            raise CaptureError(f"backward of {self._at()}: {error}") from error

    def _at(self) -> str:
        """Return the name of the module whose backward is running, for errors."""
        visit = self.found.forward[self._source].visit
        path = self.found.visits[visit].path if visit >= 0 else ""
        return f"module {path}" if path else "the model"

    def _note_written(self, storages: Iterable[int]) -> None:
        """Note the parameters among storages that forward changes in place."""
        for name in (self._name[number] for number in storages if number in self._name):
            trains = self.found.model.get_parameter(name).requires_grad
            (self.found.written if trains else self.found.as_buffers).add(name)

    def _follow_integers(
        self, name: str, args: Sequence[Any], read: list[int], results: list[Tensor], written: tuple[int, ...]
    ) -> None:
        """Record which inputs are indices of a table, and the length of the table."""
        if (table := _TABLES.get(name)) is not None:
            index, size = args[table[0]], args[0].shape[table[1]]
            for number in self._index_of.get(self._storage(index), ()):
                self.found.num_values[number] = min(size, self.found.num_values[number] or size)
        sources = set().union(*(self._index_of.get(number, ()) for number in read))
        for result, number in zip(results, written, strict=True):
            if sources and not result.is_floating_point():
                self._index_of.setdefault(number, set()).update(sources)

    @contextlib.contextmanager
    def hooked(self) -> Iterator[None]:
        """Track the module whose forward is running."""
        with contextlib.ExitStack() as stack:
            for path, module in self.found.model.named_modules():
                if module not in self._inner:
                    enter = functools.partial(self._enter, path)
                    stack.callback(module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True).remove)
                    stack.callback(module.register_forward_hook(self._leave, always_call=True, with_kwargs=True).remove)
            for block in self._repeats.runs if self._repeats else ():
                stack.callback(replace_attribute(block, "forward", functools.partial(self._run, block, block.forward)))
            yield

    def _lose_sight(self) -> None:
        """Note that a transform runs the model, which hooks do not follow."""
        if self._repeats is not None:
            raise UnequalError  # copies are made by functions that transforms do not take
        self.found.unfollowed = self.found.second_order = True

    @contextlib.contextmanager
    def saves(self) -> Iterator[None]:
        """Record what autograd saves, but inside transforms of ``torch.func``, which take no hooks."""
        hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)
        disable, num_inside = torch.autograd.graph.disable_saved_tensors_hooks, 0

        @contextlib.contextmanager
        def without_hooks(message: str) -> Iterator[None]:
            nonlocal num_inside
            self._lose_sight()
            if not num_inside:
                hooks.__exit__()
            num_inside += 1
            try:
                with disable(message):
                    yield
            finally:
                num_inside -= 1
                if not num_inside:
                    hooks.__enter__()

        with hooks, mock.patch.object(torch.autograd.graph, "disable_saved_tensors_hooks", without_hooks):
            yield

    def pack(self, tensor: Tensor) -> tuple[Tensor, int]:
        """Record a tensor that autograd saves."""
        if not self._in_backward:
            position, visit = len(self.found.forward), self._stack[-1][0]
            self.found.saves += [Save(self._storage(part), position, visit) for part in strided(tensor)]
        return tensor, tensor._version

    def unpack(self, saved: tuple[Tensor, int]) -> Tensor:
        """Check that saved tensors were not overwritten, as autograd does without hooks."""
        tensor, version = saved
        if not self._in_backward:
            self.found.backward_inside.add(self._stack[-1][0])
        if tensor._version != version:
            raise CaptureError(
                f"backward of {self._at()}: a tensor of shape {list(tensor.shape)} was changed in place after autograd "
                "saved it for backward; change a copy"
            )
        return tensor

    def begin_backward(self, loss: Tensor) -> None:
        """Track the running autograd node from here on."""
        self._in_backward = True
        self._source = len(self.found.forward) - 1
        if self.found.unfollowed:  # what is still there is saved
            for number, storage in enumerate(self.found.storages):
                if storage.died is None and storage.born >= 0:
                    visit = self.found.forward[min(storage.born, self._source)].visit
                    self.found.saves.append(Save(number, storage.born, visit))
        if loss.grad_fn is None:
            raise CaptureError("the loss is made inside of a backward of its own, or of no output of the model")
        for node in nodes(loss.grad_fn):
            # The first event dispatched after the node was made.
            source = bisect.bisect_right(self._sequences, node._sequence_nr())
            if source < len(self._sequences):
                node.register_prehook(functools.partial(self._begin_node, source))

    def end(self) -> None:
        """Mark the storages of parameters' gradients.

        Raises:
            CaptureError: no parameter has a gradient, or forward has given one other data.
        """
        for name, parameter in self.found.model.named_parameters():
            # A layer of bitsandbytes takes its bias to the type of its input, which is the same each time.
            converted = parameter.dtype is not self._types[name] or is_traceable_wrapper_subclass_type(type(parameter))
            parts = [] if converted else strided(parameter)
            if any(self._storage(part) not in self._name for part in parts):
                if not parameter.requires_grad:
                    self.found.as_buffers.add(name)
                    continue
                raise CaptureError(
                    f"forward gives the parameter {name} other data, which a plan would lose; do that between steps, "
                    "outside of forward, or make it a buffer"
                )
            if parameter.grad is not None:
                for part in strided(parameter.grad):
                    self.found.gradients[name] = number = self._storage(part)
                    self.found.storages[number].owner = "gradient"
                    for term in self.found.sums.get(number, ()):  # of a tied weight, one may be made in forward
                        if self.found.storages[term].born < len(self.found.forward):
                            self.found.storages[term].owner = "gradient"
        if not self.found.gradients:
            raise CaptureError(
                "no parameter has a gradient after backward, because the loss depends on no trained parameter; return "
                "a loss that depends on them"
            )
        if self.found.as_buffers:
            self._take_out(self.found.as_buffers)

    def _take_out(self, names: set[str]) -> None:
        """Let parameters count as buffers, also where they were read."""
        for number, name in self._name.items():
            if name in names:
                self.found.storages[number].owner = "buffer"
        for events in (self.found.forward, self.found.backward):
            for index, event in enumerate(events):
                if not names.isdisjoint(event.parameters):
                    self.found.of_written.add(event.source)
                    left = tuple(name for name in event.parameters if name not in names)
                    events[index] = dataclasses.replace(event, parameters=left)

    def reach_head(self, head: nn.Module) -> None:
        """Record that backward has reached a head whose logits are in tiles."""
        number = next(index for index, visit in enumerate(self.found.visits) if visit.module is head)
        self.found.arrivals.append((number, len(self.found.backward)))

    def _enter(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._in_backward:
            return
        found = self.found
        if self._repeats and self._repeats.begin(module, args, kwargs, len(found.forward)):
            self._copied.add(module)
            return
        if self._token_wise is not None:
            self._token_wise.enter(path, module, args, kwargs)
        parent = self._stack[-1][0] if len(self._stack) > 1 else -1
        if parent < 0 and found.is_step and not self._ran.isdisjoint(module.modules()):
            self._num_calls += 1
            self._ran.clear()
        if parent < 0 and found.is_step and transforms():
            self._lose_sight()
        if not found.visits:
            specs = (input_of(name, tensor) for name, tensor in named_inputs(args, kwargs))
            found.called_with = tuple(spec for spec in specs if spec is not None)
        self._ran.add(module)
        found.compiled = found.compiled or is_compiled()
        given = [part for part in strided((args, kwargs)) if part.is_floating_point()]
        trained = [tensor for tensor in given if tensor.requires_grad]
        held = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in trained}
        buffers = [(buffer, buffer._version) for buffer in strided(list(module.buffers()))]
        self._stack.append((len(found.visits), torch._C._autograd._get_sequence_nr(), buffers))
        found.visits.append(
            Visit(
                path,
                module,
                parent,
                len(found.forward),
                self._num_calls,
                evaluates=not torch.is_grad_enabled(),
                input_bytes=sum(held.values()),
                inputs=frozenset(map(self._storage, trained or given[:1])),
                given=tuple(
                    (position, self._storage(part))
                    for position, leaf in enumerate(tree_leaves((args, kwargs)))
                    if isinstance(leaf, Tensor) and leaf.layout is torch.strided
                    for part in strided(leaf)
                ),
            )
        )

    def _run(self, block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if block in self._copied:
            assert self._repeats
            return self._repeats.copy(block, args, kwargs)
        return forward(*args, **kwargs)

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._in_backward:
            return
        if module in self._copied:
            self._copied.discard(module)
            return
        if self._repeats:
            self._repeats.end(module, args, kwargs, output)
        index, begun, buffers = self._stack.pop()
        self._held.append(buffers)  # as what recomputation starts from holds them
        if self.found.is_step and len(self._stack) == 1:
            self._stack[0] = index, *self._stack[0][1:]
        visit = self.found.visits[index]
        if self._token_wise is not None:
            self._token_wise.leave(visit.path, output)
        visit.stop, visit.last = len(self.found.forward), len(self.found.visits) - 1
        # Recomputation starts from a copy of them: see executor.memory.forward_state.
        visit.state_bytes = sum(b.nbytes for b, before in buffers if b.nbytes <= SMALL_BYTES or b._version != before)
        for leaf in tensors_of(output):
            if leaf.requires_grad:
                node = hook_target(leaf).grad_fn
                if node is not None and node._sequence_nr() >= begun:
                    node.register_prehook(functools.partial(self._arrive, index))

    def _begin_node(self, source: int, _gradients: Any) -> None:
        self._source = source

    def _arrive(self, visit: int, _gradients: Any) -> None:
        if ends_here():
            return
        if torch.is_grad_enabled():
            self.found.second_order = True
            return
        self.found.arrivals.append((visit, len(self.found.backward)))

    def _known(self, tensor: Tensor, owner: str) -> int:
        number = self._storage(tensor)
        self._held.append(tensor.untyped_storage())  # else the Python object, and with it the number, would be freed
        self.found.storages[number].owner = owner
        self.found.storages[number].born = -1
        return number

    def _storage(self, tensor: Tensor) -> int:
        """Return the number of a tensor's storage; give a new storage a new number."""
        storage, found = tensor.untyped_storage(), self.found
        address = storage._cdata
        if (number := self._number.get(address)) is not None:
            return number
        number = self._number[address] = len(found.storages)
        found.storages.append(Storage(storage.nbytes(), len(found.forward) + len(found.backward)))

        def died(_reference: Any) -> None:
            found.storages[number].died = len(found.forward) + len(found.backward) - 1
            if self._number.get(address) == number:
                del self._number[address]
            self._watch.pop(number, None)

        self._watch[number] = weakref.ref(storage, died)
        return number


def _in_memory(tensor: Tensor) -> Tensor:
    """Return a tangent of zeros as a fake tensor; any other tensor as it is."""
    is_tangent = type(tensor) is Tensor and tensor.is_meta and tensor._is_zerotensor()
    return torch.zeros(tensor.shape, dtype=tensor.dtype) if is_tangent else tensor
