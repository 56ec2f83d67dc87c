"""Compares what a plan computes with plain PyTorch, on the user's own model and data.

[Note: Audit] No list of tests knows a user's model. So the first planned iterations audit themselves. From every kind
of module one is chosen: the largest modules whose parameters belong to one segment, and of equal ones that the plan
treats alike, the last. While it runs under the plan, its input, the state that its forward reads (random numbers,
buffers, attributes), its output, and the gradients of both are copied to the host, and so are its parameters'
gradients as they arrive. At the step, before any update, the module runs again in plain PyTorch, with weights that were
read before the iteration, wherever the plan keeps them: without hooks, recomputation, tiles and compilation. Both must
agree. So must the gradients that the update is about to read and the sum of those that arrived, and what the modules of
each recomputed segment compute in the first and in the second pass, by a sample. A second pass ends where backward
needs no more of it, so the plan may have no weights for the rest.

An iteration copies at most the bytes of the largest module, or :data:`MOST_BYTES`. What does not fit is audited in the
next iteration. A module that ranks divide runs whole on each of them, with gathered weights, and each rank compares its
part. If a module runs several times, the first run is compared, without gradients of parameters, which have all runs.
"""

import collections
import contextlib
import dataclasses
import functools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from executor.audit.cases import Case, cases, recomputed_modules
from executor.audit.tensors import (
    aliased,
    gradients_of,
    host_copy,
    is_differentiable,
    keeping,
    leaving,
    on_host,
    outputs_inside,
    sampled,
    targets_of,
    watch_edges,
)
from executor.callbacks import (
    copied_cache,
    forward_of,
    in_backward,
    is_cache,
    nodes,
    replace_attribute,
    same_autocast,
    tensors_of,
)
from executor.distributed.lazy_rows import LazyRows
from executor.distributed.shards import ParameterShard
from executor.distributed.tensor_parallel import DIVIDED
from executor.memory.forward_state import ForwardState
from executor.module.guarded_parameters import lifted, unguarded
from executor.module.own_checkpoints import passing_through, saved_tensors_hooks_of
from executor.module.tiled_logits import TiledLogits
from planner.decisions import Decisions
from planner.graph import Unit, multiplied_in_fp8
from planner.terms import AuditTime

MOST_BYTES: Final = 1 << 30
_TOLERANCES: Final = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 2e-2}
_AT_ONCE: Final = 1 << 24  # values that are compared at a time: each takes 20 bytes beside the plan's own memory
_LOOSEST: Final = 6e-2  # of bf16 and smaller types
_LOOSEST_IN_FP8: Final = (
    0.25  # of compiled products in fp8: a gradient that is rounded otherwise is a place of e5m2 off
)
_OUTSIDE: Final = (
    "its forward is not the same twice. Usual causes: random numbers or state that neither attributes nor variables of "
    "its functions lead to (an iterator, a file, variables of a library). Hold them as attributes, buffers or "
    "generators of the module"
)
_PLAN: Final = (
    "Usual causes: a forward that depends on state outside of the module, a write that PyTorch does not notice (to "
    "tensor.data), kernels that are not deterministic. If it is none of these, the plan is wrong: please report it"
)


class AuditError(ValueError):
    """What the plan computed is not what plain PyTorch computes."""


@dataclasses.dataclass(frozen=True, slots=True)
class Audited:
    """What an audit has compared.

    Attributes:
        kinds: paths of the modules that were run again, one of each kind.
        left_out: paths of others, with the reason.
        num_passes: number of segments whose two passes were compared.
        largest: largest relative difference of an output or gradient.
        seconds: time that it took.
    """

    kinds: tuple[str, ...]
    left_out: Mapping[str, str]
    num_passes: int
    largest: float
    seconds: float

    def __str__(self) -> str:
        kinds = f"{len(self.kinds)} kind{'s' * (len(self.kinds) != 1)} of modules"
        passes = f", {self.num_passes} recomputations" if self.num_passes else ""
        equal = f"equal plain PyTorch's to {self.largest:.0e}" if self.largest else "are plain PyTorch's, bit for bit"
        line = f"audit: {kinds}{passes}: outputs and gradients {equal}"
        if not self.kinds:
            line = f"audit: no module was run again{passes}"
        if self.left_out:
            path, why = next(iter(self.left_out.items()))
            line += f"; {len(self.left_out)} left out ({path}: {why})"
        return f"{line} ({self.seconds:.2g} s)"


@final
class Audit:
    """Audits a session; see [Note: Audit].

    Args:
        model: the model, before it is bound to the plan.
        shards: its parameters.
        compiles: whether blocks are compiled.
        report: gets one line when all modules have been audited.

    Attributes:
        is_active: whether the iteration that is under way is audited.
        result: the latest audit that has ended; ``None`` if none has.
    """

    def __init__(
        self,
        when: AuditTime,
        model: nn.Module,
        units: tuple[Unit, ...],
        decisions: Decisions,
        shards: Mapping[str, ParameterShard],
        *,
        compiles: bool,
        report: Callable[[str], None],
    ) -> None:
        self.is_active = False
        self.paused = False
        self.result: Audited | None = None
        self._when = when
        self._model = model
        self._report = report
        self._own_forwards = {m: vars(m)["forward"] for m in model.modules() if "forward" in vars(m)}
        self._decisions = decisions
        self._compiles = compiles
        in_fp8 = any(multiplied_in_fp8(operator) for unit in units for operator in unit.operators)
        self._cast_to: torch.dtype | None = None  # the type that the loop's autocast computes in
        self._loosest = _LOOSEST_IN_FP8 if compiles and in_fp8 else _LOOSEST
        self._divides = decisions.divides_weights
        self._undivided = [
            (module, {name: vars(module)[name] for name in DIVIDED if name in vars(module)})
            for module in (model.modules() if decisions.tensor_parallel > 1 else ())
        ]
        self._sums_up = decisions.num_devices == 1
        self._later = False  # whether the first micro-batch has ended
        self._all = [] if when == "off" else list(cases(model, units, decisions, shards))
        self._due: list[Case] = []
        self._cases: list[Case] = []
        self._arrived: dict[
            str, tuple[ParameterShard, Tensor, Tensor]
        ] = {}  # of the first micro-batch, and all of them
        self._recomputed = {} if when == "off" or compiles else dict(recomputed_modules(model, units, decisions))
        self._samples: defaultdict[Any, collections.deque[list[Tensor]]] = defaultdict(collections.deque)
        self._undo, self._watchers = contextlib.ExitStack(), contextlib.ExitStack()
        self._ours: frozenset[int] = frozenset()
        self._call: Callable[[], Hashable] = lambda: 1
        self._begin()

    def bound(self, hooks: frozenset[int], call: Callable[[], Hashable]) -> None:
        """Note the ids of the hooks by which the session follows the model, which a plain run leaves out.

        ``call`` returns the step's call that runs, and the tile of sequences.
        """
        self._ours, self._call = hooks, call
        for case in self._all:  # now: a module that is called has looked up its forward before any hook runs
            self._watchers.callback(replace_attribute(case.module, "forward", self._watching(case)))

    def begin_iteration(self, iteration: int, weights: Callable[[str], Tensor]) -> None:
        """Begin to audit, if it is due, before the first forward of an iteration. All ranks call this together.

        ``weights`` returns the whole current weights of a parameter, by name.
        """
        if isinstance(self._when, int) and self._when and not iteration % self._when and not self._due:
            self._begin()
        if self.paused or not self._due:
            return
        begin_s = time.perf_counter()
        self.abandon()  # an iteration that was left half way
        most = max(MOST_BYTES, *(case.num_bytes for case in self._due))
        self._cases = []
        while self._due and sum(case.num_bytes for case in self._cases) + self._due[0].num_bytes <= most:
            self._cases.append(self._due.pop(0))
        for case in self._cases:
            case.weights = {name: host_copy(weights(name)) for name in case.shards}
            case.is_watched = True
        for module in self._recomputed:
            self._undo.callback(module.register_forward_hook(self._sample).remove)
        self._undo.callback(self._model.register_forward_hook(self._see_readers).remove)
        self.is_active, self._later = True, False
        self._seconds += time.perf_counter() - begin_s

    def collect(self, shard: ParameterShard, gradient: Tensor) -> None:
        """A gradient of a shard has arrived from autograd."""
        if any(shard.name in case.shards for case in self._cases):
            held = host_copy(gradient)
            _, first, total = self._arrived.get(shard.shard_name, (shard, held, None))
            self._arrived[shard.shard_name] = shard, first, held.float() if total is None else total + held

    def end_micro_batch(self) -> None:
        """A micro-batch's backward has ended. Modules are audited in the first one."""
        self._later = True
        self._samples.clear()

    def abandon(self) -> None:
        """Audit the same modules in a later iteration, because this one does not follow the plan."""
        if self.is_active:
            self._stop()
            for case in self._cases:
                case.forget()
            self._due = [*self._cases, *self._due]
            self._arrived.clear()
            self._cases.clear()
            self.is_active = False

    def end_iteration(
        self,
        device: torch.device,
        stored: Callable[[ParameterShard], Iterator[tuple[slice, Tensor]]],
        summed: Callable[[Tensor], Tensor],
    ) -> str:
        """Run the modules again, before any update, and return what differs; empty if nothing does.

        Args:
            device: where the model computes.
            stored: yields the parts of a shard's flat gradient that its update is about to read.
            summed: returns the sum over the ranks that have the same experts. All of them call it together.
        """
        begin_s = time.perf_counter()
        self._stop()
        for case in self._cases:
            gradients: dict[str, Tensor] = {}
            scale = 0.0
            why_not = case.why_not or ("" if case.calls else "it did not run")
            if not why_not:
                try:
                    gradients, scale = self._run_again(case, device)
                    why_not = case.why_not or case.why_no_gradients
                except Exception as error:  # noqa: BLE001 - an audit that cannot be made must not end the training
                    why_not = f"it cannot be run again: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
            if why_not:
                self._left_out[case.path] = why_not
            else:
                self._kinds.append(case.path)
            self._compare_gradients(case, gradients, summed, scale)
            case.forget()
        if self._sums_up:
            for name, (shard, _, total) in self._arrived.items():
                for part, values in stored(shard):
                    self._compare(f"the gradient of {name} that its update reads", values, total.view(-1)[part], _PLAN)
        self._arrived.clear()
        self._cases.clear()
        self._seconds += time.perf_counter() - begin_s
        self.is_active = False
        if not self._due:
            if self._when == "first":
                self._watchers.close()
            self.result = Audited(
                tuple(self._kinds), dict(self._left_out), len(self._passes), self._largest, self._seconds
            )
            self._report(str(self.result))
        return self._difference

    def close(self) -> None:
        """Take the module wrappers off."""
        self._stop()
        self._watchers.close()
        self.is_active = False
        self._cases, self._due = [], []

    def _begin(self) -> None:
        self._due = list(self._all)
        self._kinds: list[str] = []
        self._left_out: dict[str, str] = {}
        self._passes: set[str] = set()
        self._largest, self._seconds = 0.0, 0.0
        self._difference = ""

    def _stop(self) -> None:
        self._undo.close()
        self._samples.clear()

    def _sample(self, module: nn.Module, _args: Any, output: Any) -> None:
        """Sample what a module computes in the first pass, and compare it with the second one; a hook."""
        path, segment = self._recomputed[module]
        if not in_backward():
            if torch.is_grad_enabled():
                self._samples[module, self._call()].append(sampled(output))
        elif samples := self._samples[module, self._call()]:
            for first, second in zip(samples.popleft(), sampled(output), strict=False):
                self._compare(f"the output of {path} when {segment} is recomputed", second, first, _OUTSIDE)
            self._passes.add(segment)

    def _see_readers(self, _module: nn.Module, _args: Any, output: Any) -> None:
        """Note the parameters that are read outside of their module's forward, as by another method of it; a hook."""
        if self._later:  # what later micro-batches make has other numbers
            return
        ours: dict[int, list[tuple[Case, str]]] = {}  # of tied weights, several modules
        for case in self._cases:
            for name, of in case.shards.items() if case.ran.stop else ():
                ours.setdefault(id(of[0].leaf), []).append((case, name))
        for node in nodes(*(leaf.grad_fn for leaf in tensors_of(output)) if ours else ()):
            for after, _ in node.next_functions:
                for case, name in ours.get(id(getattr(after, "variable", None)), ()):
                    if node._sequence_nr() not in case.ran:
                        case.exclusive -= {name}

    def _watching(self, case: Case) -> Callable[..., Any]:
        """Return a module's forward that also copies what comes in and goes out, in the first micro-batch."""
        forward = forward_of(case.module)

        @functools.wraps(forward)
        def watching(*args: Any, **kwargs: Any) -> Any:
            case.calls += self._watches(case)
            if case.calls > 1 and self._cast_to is not None:
                case.why_no_gradients = "autocast makes one copy of its weights for all its calls"
            if not self._watches(case) or case.calls > 1:
                return forward(*args, **kwargs)
            return self._watch(case, forward, args, kwargs)

        return watching

    def _watches(self, case: Case) -> bool:
        return case.is_watched and not (self._later or case.why_not) and torch.is_grad_enabled() and not in_backward()

    def _watch(self, case: Case, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a forward, and copy what comes in and goes out."""
        leaves, structure = tree_flatten((args, kwargs))
        if any(isinstance(leaf, LazyRows) for leaf in leaves):
            return self._watch_tiled(case, forward(*args, **kwargs))
        if why_not := _why_not(case.module, leaves):
            case.why_not = why_not
            return forward(*args, **kwargs)
        held: dict[int, Any] = {
            id(leaf): host_copy(leaf).requires_grad_(leaf.requires_grad) for leaf in leaves if isinstance(leaf, Tensor)
        }
        held |= {id(leaf): copied_cache(leaf) for leaf in leaves if is_cache(leaf)}
        case.call = [held.get(id(leaf), leaf) for leaf in leaves], structure
        given = (*args, *kwargs.values())
        is_hooked = saved_tensors_hooks_of() == "loop"
        case.why_no_gradients = "hooks (saved_tensors_hooks) may change what its backward reads" if is_hooked else ""
        state = ForwardState(case.module, case.path, torch_too=True)
        case.state = state, (before := state.save(given, whole=True))
        like = next((leaf for leaf in leaves if isinstance(leaf, Tensor)), torch.empty(0))
        case.autocast = same_autocast(like)
        if torch.is_autocast_enabled(like.device.type):
            self._cast_to = torch.get_autocast_dtype(like.device.type)
        edges = {get_gradient_edge(t): n for n, t in enumerate(given) if is_differentiable(t)}
        with unguarded():  # before the forward, because this makes autograd nodes
            own_edges = {
                get_gradient_edge(shard.leaf): shard.shard_name for shard in case.trained() if shard.leaf.requires_grad
            }
        begun = torch._C._autograd._get_sequence_nr()
        views = [(leaf, leaf._version) for leaf in leaves if isinstance(leaf, Tensor) and leaf._base is not None]
        with outputs_inside(case.module, empty=self._compiles or case.in_tiles) as (inside, instead):
            output = forward(*args, **kwargs)
        if not case.is_watched:  # the iteration left the plan in this forward
            return output
        case.ran = range(begun, torch._C._autograd._get_sequence_nr())
        own = {id(leaf) for leaf in tree_leaves(output)}
        own |= {id(leaf._base) for leaf in tree_leaves(output) if type(leaf) is Tensor}
        case.leaving = [number for number in leaving(inside, instead) if id(inside[number]) not in own]
        made = [*tree_leaves(output), *(inside[n] for n in case.leaving), *state.made(given, begun)]
        targets = [] if case.why_no_gradients else list(targets_of(made, begun))
        for number, target in targets:
            assert target.grad_fn is not None
            target.grad_fn.register_prehook(keeping(case.output_gradients, number, target.output_nr))
        watch_edges(edges, [target for _, target in targets], begun, case.input_gradients)
        watch_edges(own_edges, [target for _, target in targets], begun, case.own_gradients)
        case.outputs = [on_host(leaf) for leaf in made]
        if isinstance(output, TiledLogits):
            case.forget_call()
            self._watch_tiled(case, output)
        elif any(isinstance(leaf, Tensor) and type(leaf) is not Tensor for leaf in made):
            case.why_not = "its output is not an ordinary tensor"
        elif any(view._version != version for view, version in views):
            case.why_not = "it changes a view in place, whose gradients autograd takes to its base"
        elif (self._compiles or self._undivided or case.in_tiles) and state.has_drawn(before):
            who = "ranks divide it, and draw" if self._undivided else "tiles of sequences pass it, and draw"
            who = "it is compiled, and draws" if self._compiles else who
            case.why_not = f"{who} other random numbers"
        return output

    def _watch_tiled(self, case: Case, output: Any) -> Any:
        """Audit what is computed of logits when they are used."""
        if isinstance(output, TiledLogits):
            output.head.watcher = functools.partial(self._watch_logits, case)
            self._undo.callback(setattr, output.head, "watcher", None)
            if case.columns is not None:
                case.why_not = "ranks divide its logits, which are computed in tiles"
        return output

    def _watch_logits(
        self, case: Case, planned: Callable[[Tensor], Tensor], plain: Callable[[Tensor], Tensor], hidden: Tensor
    ) -> Tensor:
        case.calls += self._watches(case)
        if not self._watches(case) or case.calls > 1:
            return planned(hidden)
        case.plain = plain
        found: Tensor = self._watch(case, planned, (hidden,), {})
        return found

    def _run_again(self, case: Case, device: torch.device) -> tuple[dict[str, Tensor], float]:
        """Run a module in plain PyTorch, and compare.

        Returns:
            The whole gradients of its parameters, by name; and the largest value of a gradient.
        """
        leaves, structure = case.call
        made = {
            id(leaf): leaf.detach().to(device, copy=True).requires_grad_(leaf.requires_grad)
            for leaf in leaves
            if isinstance(leaf, Tensor)
        }
        args, kwargs = tree_unflatten([made.get(id(leaf), leaf) for leaf in leaves], structure)
        state, before = case.state or (None, None)
        assert state is not None and before is not None
        trained = sorted({shard.name for shard in case.trained() if shard.shard_name in self._arrived})
        with (
            state.restored(before),
            self._plain(case, device) as leaves_of,
            passing_through(),
            _inside_alone(case.module),
            torch.enable_grad(),
            case.autocast(),
        ):
            copied = torch._C._autograd._get_sequence_nr()
            given = (*args, *kwargs.values())
            args, kwargs = [aliased(value) for value in args], {name: aliased(value) for name, value in kwargs.items()}
            begun = torch._C._autograd._get_sequence_nr()
            with outputs_inside(case.module) as (inside, _):
                output = (case.plain or case.module.forward)(*args, **kwargs)
            inner = (inside[n] for n in case.leaving)
            results = [*tree_leaves(output), *inner, *state.made((*args, *kwargs.values()), begun)]
            if len(case.outputs) == len(tree_leaves(output)) + len(case.leaving):
                results = results[: len(case.outputs)]  # a cache of keys and values is only filled here
            inputs = [(number, given[number]) for number in case.input_gradients]
            if case.columns is not None and case.outputs[0] is not None and results[0].shape != case.outputs[0].shape:
                # Its rank has some of the logits, so the input's gradient is not that of the whole.
                results, inputs = [case.columns.divided(results[0].movedim(-1, 0)).movedim(0, -1).clone()], []
            targets = [(n, t) for n, t in targets_of(results, begun) if n in case.output_gradients]
            if any(node._sequence_nr() < copied for node in nodes(*(target.grad_fn for _, target in targets))):
                raise ValueError("what it keeps leads back to the run before")
            parameters = [leaves_of[name] for name in trained]
            wanted = [*(tensor for _, tensor in inputs), *parameters]
            gradients: Sequence[Tensor | None] = [None] * len(wanted)
            if targets and wanted and len(targets) == len(case.output_gradients):
                from_outside = [case.output_gradients[number].to(device) for number, _ in targets]
                between = state.save()
                found = gradients_of([target for _, target in targets], wanted, from_outside)
                if state.has_changed(between):
                    case.why_not = "its backward draws random numbers or changes what it computes with"
                else:
                    gradients = found
        for number, (planned, plain) in enumerate(zip(case.outputs, results, strict=True)):
            if planned is not None:
                what = f"output {number} of {case.path}" if len(results) > 1 else f"the output of {case.path}"
                self._compare(what, planned, plain.detach(), _PLAN)
        scale = max((float(g.abs().max()) for g in gradients if g is not None and g.numel()), default=0.0)
        of_inputs, of_parameters = gradients[: len(inputs)], gradients[len(inputs) :]
        for (number, _), gradient in zip(inputs, of_inputs, strict=True):
            if gradient is not None:
                what = f"the gradient of input {number} of {case.path}"
                self._compare(what, case.input_gradients[number], gradient, _PLAN, scale)
        return {name: g for name, g in zip(trained, of_parameters, strict=True) if g is not None}, scale

    def _compare_gradients(
        self, case: Case, gradients: Mapping[str, Tensor], summed: Callable[[Tensor], Tensor], scale: float
    ) -> None:
        """Compare gradients of parameters. Those of experts have the tokens of all ranks that share them."""
        for shard in case.trained() if not case.why_no_gradients else ():
            gradient = gradients.get(shard.name)
            if shard.rows is not None and shard.mesh.degrees.expert_parallel > 1:
                if gradient is None:  # it must take part: other ranks may have one
                    gradient = torch.full(shard.whole_shape, float("nan"), device="cpu")
                gradient = summed(gradient.float())
            if gradient is not None and not gradient.isnan().all() and shard.shard_name in self._arrived:
                own = shard.part(gradient)
                arrived = None if _has_hooks(shard) else self._arrived[shard.shard_name][1]
                # What ranks divide is compared as it arrives, with all that they exchange.
                if shard.mesh.degrees.tensor_parallel * shard.mesh.degrees.expert_parallel == 1:
                    arrived = case.own_gradients.get(shard.shard_name, arrived)
                if arrived is not None:
                    self._compare(f"the gradient of {shard.name}", arrived, own, _PLAN, scale)

    @contextlib.contextmanager
    def _plain(self, case: Case, device: torch.device) -> Iterator[dict[str, nn.Parameter]]:
        """Return a context in which a module and all inside it are as before they were prepared, with their weights.

        It yields the parameters, by name. Where ranks divide them, they are others than the user's.
        """
        with contextlib.ExitStack() as stack:
            for module in case.module.modules():
                if "forward" in vars(module):
                    plain = self._own_forwards.get(module, functools.partial(type(module).forward, module))
                    stack.callback(replace_attribute(module, "forward", plain))
                for name in ("_forward_pre_hooks", "_forward_hooks"):
                    hooks = vars(module)[name]
                    ours = {key for key, hook in hooks.items() if key in self._ours or hook == self._sample}
                    theirs = type(hooks)((key, hook) for key, hook in hooks.items() if key not in ours)
                    stack.callback(replace_attribute(module, name, theirs))
            found = {name: of_ranks[0].whole for name, of_ranks in case.shards.items()}
            if self._divides or any(shard.leaf is not shard.whole for of in case.shards.values() for shard in of):
                found = {n: nn.Parameter(case.weights[n].to(device), p.requires_grad) for n, p in found.items()}
                stack.enter_context(self._whole(case, found))
            else:
                for name, (shard,) in case.shards.items():
                    stack.enter_context(_showing(shard, case.weights[name].to(device)))
            yield found

    @contextlib.contextmanager
    def _whole(self, case: Case, parameters: Mapping[str, nn.Parameter]) -> Iterator[None]:
        """Return a context in which a module is as before ranks divided it, with these parameters."""
        inside = set(case.module.modules())
        new = {id(case.shards[name][0].whole): parameter for name, parameter in parameters.items()}
        with contextlib.ExitStack() as stack:
            for module, counts in self._undivided:
                for name, count in counts.items() if module in inside else ():
                    stack.callback(replace_attribute(module, name, count))
            for module in inside:
                own = module._parameters
                stack.callback(own.update, dict(own))
                own.update({name: new.get(id(parameter), parameter) for name, parameter in own.items()})
            yield

    def _compare(self, what: str, planned: Tensor, plain: Tensor, causes: str, scale: float = 0.0) -> None:
        """Note how far two tensors differ, and the first difference that is too large.

        ``scale`` is the largest value around them: what is a thousandth of it or less counts by that.
        """
        if planned.shape != plain.shape:
            self._difference = self._difference or (
                f"{what} has shape {list(planned.shape)}, but plain PyTorch's has {list(plain.shape)}; {causes}"
            )
        if planned.shape != plain.shape or not plain.numel():
            return
        off, largest = 0.0, 1e-3 * scale
        parts = (values.reshape(-1).split(_AT_ONCE) for values in (planned, plain))  # type: ignore[no-untyped-call]
        for mine, theirs in zip(*parts, strict=True):
            a, b = mine.to(plain.device, torch.float32), theirs.float()
            same = (a == b) | (a.isnan() & b.isnan())
            off = max(off, float((a - b).abs().masked_fill(same, 0.0).nan_to_num(float("inf")).max()))
            largest = max(largest, float(b.abs().nan_to_num(0.0, 0.0, 0.0).max()))
        relative = 0.0 if not off else off / largest if largest else float("inf")
        self._largest = max(self._largest, relative)
        # Where autocast rounds inside of a module, its results in float32 are as far off.
        kind = min(planned.dtype, plain.dtype, self._cast_to or plain.dtype, key=lambda dtype: dtype.itemsize)
        if relative > _TOLERANCES.get(kind, self._loosest):
            self._difference = self._difference or (
                f"{what} differs from plain PyTorch's by {relative:.1%} of its largest value ({off:.3g} of "
                f"{largest:.3g}); {causes}"
            )


def _why_not(module: nn.Module, given: list[Any]) -> str:
    """Return why a call of a module cannot be made again; empty if it can."""
    if any(isinstance(leaf, nn.Parameter) for leaf in given):
        return "it is given a weight"
    weights = [weight for inner in module.modules() for weight in inner._parameters.values() if weight is not None]
    if not all(isinstance(weight, nn.Parameter) for weight in weights):
        return "torch.func.functional_call gives it other weights"
    is_transformed = torch._C._functorch.peek_interpreter_stack() is not None
    return "a transform of torch.func runs it" if is_transformed else ""


@contextlib.contextmanager
def _inside_alone(module: nn.Module) -> Iterator[None]:
    """Return a context in which a module may run what is inside it, and no others, which would run under the plan.

    Others come to it as arguments, in lists, or by closures and global variables.
    """
    inside, thread = set(module.modules()), threading.get_ident()

    def check(other: nn.Module, _args: Any) -> None:
        if threading.get_ident() == thread and other not in inside and any(True for _ in other.parameters()):
            raise ValueError(f"it runs a {type(other).__name__} that is not inside it")

    with nn.modules.module.register_module_forward_pre_hook(check):
        yield


def _has_hooks(shard: ParameterShard) -> bool:
    """Return whether hooks of the user's get a parameter's gradient, and may return another one."""
    with unguarded():
        return bool(shard.whole._backward_hooks or shard.leaf._backward_hooks)


@contextlib.contextmanager
def _showing(shard: ParameterShard, values: Tensor) -> Iterator[None]:
    """Return a context in which a parameter has these values, whatever the plan shows in it, and no hooks."""
    leaf = shard.leaf
    with contextlib.ExitStack() as undo:
        undo.enter_context(lifted(leaf))
        if hooks := leaf._backward_hooks:  # they have seen this gradient
            leaf._backward_hooks = None
            undo.callback(setattr, leaf, "_backward_hooks", hooks)
        if shard.stored.is_quantized:
            with shard.stored.living_in(values):
                yield
            return
        shown = leaf.data
        leaf.data = values.view(leaf.shape)
        try:
            yield
        finally:
            leaf.data = shown
