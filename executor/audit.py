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
next iteration. Tensor- and expert-parallel modules compute only a part, so only their passes are compared.
"""

import collections
import contextlib
import dataclasses
import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Protocol, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from executor.callbacks import copied_cache, hook_target, in_backward, replace_attribute, same_autocast
from executor.distributed.shards import ParameterShard
from executor.memory.forward_state import ForwardState, Snapshot
from executor.module.binding import segment_module, tiled_modules
from executor.module.guarded_parameters import lifted
from planner.decisions import Decisions
from planner.graph import Unit, segments
from planner.terms import AuditTime

MOST_BYTES: Final = 1 << 30
_NO_SEQUENCE: Final = 2**63  # nodes of leaves have larger numbers
_NUM_SAMPLED: Final = 1024
_TOLERANCES: Final = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 2e-2}
_LOOSEST: Final = 6e-2  # of bf16 and smaller types
_OUTSIDE: Final = (
    "its forward is not the same twice. Usual causes: random numbers or state that no attribute of the module leads to "
    "(a global variable, a closure, a file). Hold them as attributes, buffers or generators of the module"
)
_PLAN: Final = (
    "Usual causes: a forward that depends on state outside of the module, a write that PyTorch does not notice (to "
    "tensor.data), kernels that are not deterministic. If it is none of these, the plan is wrong: please report it"
)


class AuditError(ValueError):
    """What the plan computed is not what plain PyTorch computes."""


class Weights(Protocol):
    """Returns the whole current weights of a parameter, by name, before an iteration begins."""

    def __call__(self, name: str) -> Tensor:
        """Return them."""
        ...


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


@dataclasses.dataclass(eq=False)
class _Case:
    """A module to audit, and what it did under the plan, on the host.

    Attributes:
        shards: its parameters, by name.
        exclusive: names of those that nothing outside the module reads.
        calls: how often its forward ran in the audited micro-batch.
    """

    path: str
    module: nn.Module
    shards: dict[str, ParameterShard]
    exclusive: frozenset[str]
    why_not: str = ""
    calls: int = 0
    weights: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    call: Any = None  # arguments: leaves, of which tensors are (values, requires_grad), and structure
    state: tuple[ForwardState, Snapshot] | None = None
    random: tuple[Tensor, ...] = ()
    autocast: Callable[[], Any] = contextlib.nullcontext
    outputs: list[Tensor | None] = dataclasses.field(default_factory=list)
    output_gradients: dict[int, Tensor] = dataclasses.field(default_factory=dict)
    input_gradients: dict[int, Tensor] = dataclasses.field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Bytes of its weights and their gradients, which is most of what is copied."""
        return 2 * sum(shard.whole_shape.numel() * shard.whole.itemsize for shard in self.shards.values())

    def forget(self) -> None:
        """Free what was copied."""
        self.calls, self.call, self.state, self.random = 0, None, None, ()
        self.weights, self.outputs = {}, []
        self.output_gradients, self.input_gradients = {}, {}


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
        self._sums_up = decisions.degrees.num_devices == 1 and decisions.update_start == "step"
        self._later = False  # whether the first micro-batch has ended
        self._all = [] if when == "off" else list(_cases(model, units, decisions, shards))
        self._due: list[_Case] = []
        self._cases: list[_Case] = []
        self._arrived: dict[str, tuple[Tensor, Tensor]] = {}  # of the first micro-batch, and the sum of all
        self._recomputed = {} if when == "off" or compiles else dict(_recomputed(model, units, decisions))
        self._samples: defaultdict[nn.Module, collections.deque[list[Tensor]]] = defaultdict(collections.deque)
        self._undo = contextlib.ExitStack()
        self._ours: frozenset[int] = frozenset()
        self._begin()

    def bound(self, hooks: frozenset[int]) -> None:
        """Note the ids of the hooks by which the session follows the model, which a plain run leaves out."""
        self._ours = hooks

    def begin_iteration(self, iteration: int, weights: Weights) -> None:
        """Begin to audit, if it is due, before the first forward of an iteration. All ranks call this together."""
        if isinstance(self._when, int) and self._when and not iteration % self._when and not self._due:
            self._begin()
        if self.paused or not self._due:
            return
        begin_s = time.perf_counter()
        self._stop()  # of an iteration that was left half way
        most = max(MOST_BYTES, *(case.num_bytes for case in self._due))
        self._cases = []
        while self._due and sum(case.num_bytes for case in self._cases) + self._due[0].num_bytes <= most:
            self._cases.append(self._due.pop(0))
        for case in self._cases:
            case.weights = {name: weights(name).to("cpu", copy=True) for name in case.shards}
            self._undo.callback(replace_attribute(case.module, "forward", self._watching(case)))
        for module in self._recomputed:
            self._undo.callback(module.register_forward_hook(self._sample).remove)
        self.is_active, self._later = True, False
        self._seconds += time.perf_counter() - begin_s

    def collect(self, name: str, gradient: Tensor) -> None:
        """A gradient of a parameter has arrived from autograd."""
        if any(name in case.shards for case in self._cases):
            held = gradient.detach().to("cpu", copy=True)
            first, total = self._arrived.get(name, (held, 0.0))
            self._arrived[name] = first, held.float() + total

    def end_micro_batch(self) -> None:
        """A micro-batch's backward has ended. Modules are audited in the first one."""
        self._later = True
        self._samples.clear()

    def end_iteration(self, device: torch.device, stored: Callable[[str], Iterator[tuple[slice, Tensor]]]) -> str:
        """Run the modules again, before any update, and return what differs; empty if nothing does.

        Args:
            device: where the model computes.
            stored: yields the parts of a parameter's flat gradient that its update is about to read.
        """
        begin_s = time.perf_counter()
        self._stop()
        for case in self._cases:
            why_not = (
                case.why_not
                or ("" if case.calls else "it did not run")
                or ("it ran several times" if case.calls > 1 else "")
            )
            if not why_not:
                try:
                    self._run_again(case, device)
                except Exception as error:  # noqa: BLE001 - an audit that cannot be made must not end the training
                    why_not = f"it cannot be run again: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
            if why_not:
                self._left_out[case.path] = why_not
            else:
                self._kinds.append(case.path)
            case.forget()
        if self._sums_up:
            for name, (_, total) in self._arrived.items():
                for part, values in stored(name):
                    self._compare(f"the gradient of {name} that its update reads", values, total.view(-1)[part], _PLAN)
        self._arrived.clear()
        self._cases.clear()
        self._seconds += time.perf_counter() - begin_s
        self.is_active = False
        if not self._due:
            self.result = Audited(
                tuple(self._kinds), dict(self._left_out), len(self._passes), self._largest, self._seconds
            )
            self._report(str(self.result))
        return self._difference

    def close(self) -> None:
        """Take the module wrappers off."""
        self._stop()
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
                self._samples[module].append(_samples(output))
        elif self._samples[module]:
            for first, second in zip(self._samples[module].popleft(), _samples(output), strict=False):
                self._compare(f"the output of {path} when {segment} is recomputed", second, first, _OUTSIDE)
            self._passes.add(segment)

    def _watching(self, case: _Case) -> Callable[..., Any]:
        """Return a module's forward that also copies what comes in and goes out, in the first micro-batch."""
        forward = case.module.forward

        @functools.wraps(forward)
        def watching(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled() or in_backward() or case.why_not or self._later:
                return forward(*args, **kwargs)
            case.calls += 1
            if case.calls > 1:
                return forward(*args, **kwargs)
            leaves, structure = tree_flatten((args, kwargs))
            held: dict[int, Any] = {id(leaf): _Held.of(leaf) for leaf in leaves if isinstance(leaf, Tensor)}
            held |= {id(leaf): copied_cache(leaf) for leaf in leaves if hasattr(leaf, "get_seq_length")}
            case.call = [held.get(id(leaf), leaf) for leaf in leaves], structure
            given = (*args, *kwargs.values())
            case.state = (state := ForwardState(case.module, case.path)), state.save(given, whole=True)
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)] or [torch.empty(0)]
            case.random, case.autocast = _random_states(tensors[0].device), same_autocast(tensors[0])
            edges = {get_gradient_edge(t): n for n, t in enumerate(given) if _is_differentiable(t)}
            begun = torch._C._autograd._get_sequence_nr()
            output = forward(*args, **kwargs)
            made = [*tree_leaves(output), *state.made(given, begun)]
            targets = list(_targets(made, begun))
            for number, target in targets:
                target.register_hook(_keeping(case.output_gradients, number))  # type: ignore[no-untyped-call]
            _watch_inputs(edges, [target for _, target in targets], begun, case.input_gradients)
            case.outputs = [_on_host(leaf) for leaf in made]
            if any(isinstance(leaf, Tensor) and type(leaf) is not Tensor for leaf in made):
                case.why_not = "its output is not computed yet"  # logits in tiles
            elif self._compiles and not torch.equal(case.random[-1], _random_states(tensors[0].device)[-1]):
                case.why_not = "it is compiled, and draws other random numbers"
            return output

        return watching

    def _run_again(self, case: _Case, device: torch.device) -> None:
        """Run a module in plain PyTorch, and compare."""
        leaves, structure = case.call
        made = {id(leaf): leaf.made(device) for leaf in leaves if isinstance(leaf, _Held)}
        args, kwargs = tree_unflatten([made.get(id(leaf), leaf) for leaf in leaves], structure)
        state, before = case.state or (None, None)
        assert state is not None and before is not None
        trained = [name for name in sorted(case.exclusive) if name in self._arrived and case.shards[name].trains]
        with (
            self._plain(case, device),
            _random(case.random, device),
            state.restored(before),
            torch.enable_grad(),
            case.autocast(),
        ):
            given = (*args, *kwargs.values())
            begun = torch._C._autograd._get_sequence_nr()
            output = case.module.forward(
                *(_aliased(value) for value in args), **{name: _aliased(value) for name, value in kwargs.items()}
            )
            results = [*tree_leaves(output), *state.made(given, begun)]
            targets = [(n, t) for n, t in _targets(results, begun) if n in case.output_gradients]
            inputs = [(number, given[number]) for number in case.input_gradients]
            parameters = [case.shards[name].leaf for name in trained]
            wanted = [*(tensor for _, tensor in inputs), *parameters]
            gradients: list[Tensor | None] = [None] * len(wanted)
            if targets and wanted and len(targets) == len(case.output_gradients):
                from_outside = [case.output_gradients[number].to(device) for number, _ in targets]
                gradients = _gradients([target for _, target in targets], wanted, from_outside)
        for number, (planned, plain) in enumerate(zip(case.outputs, results, strict=True)):
            if planned is not None:
                what = f"output {number} of {case.path}" if len(results) > 1 else f"the output of {case.path}"
                self._compare(what, planned, plain.detach(), _PLAN)
        found = [gradient for gradient in gradients if gradient is not None]
        scale = max((float(gradient.abs().max()) for gradient in found if gradient.numel()), default=0.0)
        of_inputs, of_parameters = gradients[: len(inputs)], gradients[len(inputs) :]
        for (number, _), gradient in zip(inputs, of_inputs, strict=True):
            if gradient is not None:
                what = f"the gradient of input {number} of {case.path}"
                self._compare(what, case.input_gradients[number], gradient, _PLAN, scale)
        for name, gradient in zip(trained, of_parameters, strict=True):
            if gradient is not None:
                self._compare(f"the gradient of {name}", self._arrived[name][0], gradient, _PLAN, scale)

    @contextlib.contextmanager
    def _plain(self, case: _Case, device: torch.device) -> Iterator[None]:
        """Return a context in which a module and all inside it are as before they were prepared, with their weights."""
        with contextlib.ExitStack() as stack:
            for module in case.module.modules():
                own = vars(module)
                plain = self._own_forwards.get(module)
                if "forward" in own and own["forward"] is not plain:
                    stack.callback(own.__setitem__, "forward", own["forward"])
                    if plain is None:
                        del own["forward"]
                    else:
                        own["forward"] = plain
                for name in ("_forward_pre_hooks", "_forward_hooks"):
                    hooks = own[name]
                    stack.callback(own.__setitem__, name, hooks)
                    own[name] = type(hooks)((key, hook) for key, hook in hooks.items() if key not in self._ours)
            for name, shard in case.shards.items():
                values = case.weights[name].to(device)
                stack.enter_context(_showing(shard, values))
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
        a, b = planned.to(plain.device, torch.float32), plain.float()
        same = (a == b) | (a.isnan() & b.isnan())
        off = float((a - b).abs().masked_fill(same, 0.0).nan_to_num(float("inf")).max())
        largest = max(float(b.abs().nan_to_num(0.0, 0.0, 0.0).max()), 1e-3 * scale)
        relative = 0.0 if not off else off / largest if largest else float("inf")
        self._largest = max(self._largest, relative)
        kind = min(planned.dtype, plain.dtype, key=lambda dtype: dtype.itemsize)
        if relative > _TOLERANCES.get(kind, _LOOSEST):
            self._difference = self._difference or (
                f"{what} differs from plain PyTorch's by {relative:.1%} of its largest value ({off:.3g} of "
                f"{largest:.3g}); {causes}"
            )


@dataclasses.dataclass(frozen=True, slots=True)
class _Held:
    """An argument: its values on the host, and whether it needs a gradient."""

    values: Tensor
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> "_Held":
        return cls(tensor.detach().to("cpu", copy=True), tensor.requires_grad)

    def made(self, device: torch.device) -> Tensor:
        return self.values.to(device, copy=True).requires_grad_(self.requires_grad)


def _cases(
    model: nn.Module, units: tuple[Unit, ...], decisions: Decisions, shards: Mapping[str, ParameterShard]
) -> Iterator[_Case]:
    """Yield one module of each kind: the last of those with the same structure that the plan treats alike."""
    segment_of = {
        spec.name.partition("[")[0]: number
        for number, segment in enumerate(segments(units))
        for unit in segment
        for spec in (*unit.parameters, *unit.frozen)
    }
    names = {id(shard.whole): name for name, shard in shards.items()}
    treated = [
        {(d.params, d.activations, frozenset(d.update)) for d in (decisions.units[unit.name] for unit in segment)}
        for segment in segments(units)
    ]
    readers = _readers(model, units)
    divides = max(decisions.degrees.tensor_parallel, decisions.degrees.expert_parallel) > 1
    of_kind: dict[Any, _Case] = {}
    for path, module, own in _largest(model, names, segment_of):
        structure = tuple((inner, type(m)) for inner, m in module.named_modules())
        shapes = tuple((shards[n].whole_shape, shards[n].whole.dtype, shards[n].whole.requires_grad) for n in own)
        kind = structure, shapes, frozenset(treated[segment_of[own[0]]]), len(own)
        case = _Case(path, module, {name: shards[name] for name in own}, frozenset(own) - _read_outside(readers, path))
        if divides:
            case.why_not = "ranks divide it"
        elif not all(shard.leaf is shard.whole for shard in case.shards.values()):
            case.why_not = "its rows are divided over units"
        of_kind[kind] = case
    yield from of_kind.values()


def _recomputed(
    model: nn.Module, units: tuple[Unit, ...], decisions: Decisions
) -> Iterator[tuple[nn.Module, tuple[str, str]]]:
    """Yield the modules whose forward runs a second time as it ran first, with their paths and their segments."""
    paths = {module: path for path, module in model.named_modules()}
    tiled = tiled_modules(model, units) if decisions.layer_tile_tokens is not None else {}
    in_tiles = {inner for module in tiled for inner in module.modules()}
    for segment in segments(units):
        if decisions.units[segment[0].name].activations != "keep":
            for module in segment_module(model, segment).modules():
                if module not in in_tiles and next(module.children(), None) is None:
                    yield module, (paths[module], segment[0].segment)


def _largest(
    model: nn.Module, names: Mapping[int, str], segment_of: Mapping[str, int]
) -> Iterator[tuple[str, nn.Module, list[str]]]:
    """Yield the largest modules inside the model whose parameters all belong to one segment, with their names."""
    seen: set[nn.Module] = set()
    waiting = [(path, module) for path, module in model.named_children()][::-1]
    while waiting:
        path, module = waiting.pop()
        own = list(dict.fromkeys(names[id(p)] for p in module.parameters() if id(p) in names))
        if module in seen or not own:
            continue
        seen.add(module)
        runs = type(module).forward is not nn.Module.forward and not isinstance(module, nn.ModuleList | nn.ModuleDict)
        if runs and len({segment_of.get(name, -1) for name in own}) == 1 and own[0] in segment_of:
            yield path, module, own
        else:
            waiting += [(f"{path}.{name}", child) for name, child in module.named_children()][::-1]


def _readers(model: nn.Module, units: tuple[Unit, ...]) -> dict[str, list[str]]:
    """Return the paths of the modules that read each parameter, as far as the plan knows; of others: empty."""
    paths = {path for path, _ in model.named_modules()}
    found: dict[str, list[str]] = {}
    for unit in units:
        for operator in unit.operators:
            path = operator.name.partition("#")[0]
            for name in operator.shared_parameters:
                found.setdefault(name, []).append(path if path in paths else "")
            for spec in operator.parameters:
                if path in paths:
                    found.setdefault(spec.name, []).append(path)
    return found


def _read_outside(readers: Mapping[str, list[str]], path: str) -> set[str]:
    """Return the parameters that a module outside ``path`` reads."""
    return {name for name, read in readers.items() if any(f"{one}.".find(f"{path}.") != 0 for one in read)}


@contextlib.contextmanager
def _showing(shard: ParameterShard, values: Tensor) -> Iterator[None]:
    """Return a context in which a parameter has these values, whatever the plan shows in it."""
    leaf = shard.leaf
    with lifted(leaf):
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


@contextlib.contextmanager
def _random(states: tuple[Tensor, ...], device: torch.device) -> Iterator[None]:
    """Return a context with these states of torch's global generators; see :func:`_random_states`."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.set_rng_state(states[0])
        if device.type == "cuda":
            torch.cuda.set_rng_state(states[1], device)
        yield


def _random_states(device: torch.device) -> tuple[Tensor, ...]:
    on_host = torch.get_rng_state()
    return (on_host, torch.cuda.get_rng_state(device)) if device.type == "cuda" else (on_host,)


def _watch_inputs(
    edges: Mapping[GradientEdge, int], targets: list[Tensor], begun: int, store: dict[int, Tensor]
) -> None:
    """Keep the gradients that a module gives its inputs, without those that other modules give the same tensors.

    Hooks on the module's own autograd nodes leave the order of all sums as it is, as aliases of inputs would not.

    Args:
        edges: where the gradients of inputs go, with the number of the input.
        targets: tensors that the module has made.
        begun: autograd's next number when the module began.
        store: gets the gradients, on the host, by number.
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


def _adding(store: dict[int, Tensor], slots: list[tuple[int, int]]) -> Callable[[Any, Any], None]:
    def add(to_inputs: Any, _from_outputs: Any) -> None:
        for index, number in slots:
            if (gradient := to_inputs[index]) is not None:
                held = gradient.detach().to("cpu", copy=True)
                store[number] = store[number] + held if number in store else held

    return add


def _keeping(store: dict[int, Tensor], number: int) -> Callable[[Tensor], None]:
    """Return a hook that keeps a gradient on the host."""

    def keep(gradient: Tensor) -> None:
        store[number] = gradient.detach().to("cpu", copy=True)

    return keep


def _targets(made: list[Any], begun: int) -> Iterator[tuple[int, Tensor]]:
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


def _gradients(targets: list[Tensor], wanted: list[Tensor], totals: list[Tensor]) -> list[Tensor | None]:
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


def _is_differentiable(leaf: Any) -> bool:
    return type(leaf) is Tensor and leaf.requires_grad


def _aliased(value: Any) -> Any:
    """Return a view of a leaf that needs a gradient, because a module may change its input in place."""
    return value.view_as(value) if _is_differentiable(value) else value


def _on_host(leaf: Any) -> Tensor | None:
    return leaf.detach().to("cpu", copy=True) if type(leaf) is Tensor and leaf.is_floating_point() else None


def _samples(output: Any) -> list[Tensor]:
    """Return some values of each floating-point tensor in an output, on the host."""
    found = []
    for leaf in tree_leaves(output):
        if type(leaf) is Tensor and leaf.is_floating_point() and leaf.numel():
            flat = leaf.detach().reshape(-1)
            found.append(flat[:: -(-flat.numel() // _NUM_SAMPLED)].to("cpu", copy=True))
    return found
