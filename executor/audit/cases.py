"""Which modules an audit runs again, and which it compares in both passes of recomputation."""

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from executor.distributed.shards import ParameterShard
from executor.memory.forward_state import ForwardState, Snapshot
from executor.memory.state import ModelState
from executor.module.binding import segment_module, tiled_modules
from planner.decisions import Decisions, Place
from planner.graph import Unit, segments


@dataclasses.dataclass(eq=False)
class Case:
    """A module to audit, and what it did under the plan, on the host.

    Attributes:
        shards: this rank's shards of its parameters, by the parameter's name in the model.
        exclusive: names of those that nothing outside the module reads.
        is_watched: whether the iteration that is under way audits it.
        in_tiles: whether it runs once for each tile of sequences, so that outputs inside it are those of tiles.
        columns: the shard of a head's weight whose logits stay with their ranks; ``None`` for other modules.
        calls: how often its forward ran in the audited micro-batch.
        ran: autograd's numbers of what the audited run made.
        plain: its forward in plain PyTorch; ``None``: the module's own.
        leaving: which outputs of modules inside it, in order, something outside refers to.
        own_gradients: what its own run has added to gradients, by name of the shard. The loop may read weights, too.
        why_no_gradients: why its gradients are not compared; empty if they are.
    """

    path: str
    module: nn.Module
    shards: dict[str, list[ParameterShard]]
    exclusive: frozenset[str]
    in_tiles: bool = False
    columns: ParameterShard | None = None
    is_watched: bool = False
    why_not: str = ""
    calls: int = 0
    ran: range = range(0)
    plain: Callable[..., Any] | None = None
    weights: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    call: Any = None  # arguments: leaves, of which tensors are on the host, and structure
    state: tuple[ForwardState, Snapshot] | None = None
    autocast: Callable[[], Any] = contextlib.nullcontext
    leaving: list[int] = dataclasses.field(default_factory=list)
    outputs: list[Tensor | None] = dataclasses.field(default_factory=list)
    output_gradients: dict[int, Tensor] = dataclasses.field(default_factory=dict)
    input_gradients: dict[int, Tensor] = dataclasses.field(default_factory=dict)
    own_gradients: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    why_no_gradients: str = ""

    @property
    def num_bytes(self) -> int:
        """Bytes of its weights and their gradients, which is most of what is copied."""
        wholes = [of_ranks[0] for of_ranks in self.shards.values()]
        return 2 * sum(shard.whole_shape.numel() * shard.whole.itemsize for shard in wholes)

    def trained(self) -> Iterator[ParameterShard]:
        """Yield this rank's shards of what it trains and nothing else reads, in an order that all ranks have."""
        for name in sorted(self.exclusive):
            yield from (shard for shard in self.shards[name] if shard.trains)

    def forget(self) -> None:
        """Free what was copied."""
        self.is_watched, self.weights = False, {}
        self.forget_call()

    def forget_call(self) -> None:
        """Free what was copied of a call."""
        self.calls, self.ran, self.plain, self.call, self.state = 0, range(0), None, None, None
        self.leaving, self.outputs, self.output_gradients, self.input_gradients = [], [], {}, {}
        self.own_gradients = {}


def cases(
    model: nn.Module, units: tuple[Unit, ...], decisions: Decisions, shards: Mapping[str, ParameterShard]
) -> Iterator[Case]:
    """Yield one module of each kind: the last of those with the same structure that the plan treats alike."""
    segment_of = {
        spec.name.partition("[")[0]: number
        for number, segment in enumerate(segments(units))
        for unit in segment
        if not unit.is_unused
        for spec in (*unit.parameters, *unit.frozen)
    }
    by_name: dict[str, list[ParameterShard]] = {}
    for shard in shards.values():
        by_name.setdefault(shard.name, []).append(shard)
    names = {id(of_ranks[0].whole): name for name, of_ranks in by_name.items()}
    treated = [
        {(d.params, d.activations, frozenset(d.update)) for d in (decisions.units[unit.name] for unit in segment)}
        for segment in segments(units)
    ]
    readers = _readers(model, units)
    heads = {o.name: shards[o.parameter_names[0]] for unit in units for o in unit.operators if o.kind == "head"}
    attention = {o.name.rpartition(".")[0] for unit in units for o in unit.operators if o.kind == "qkv"}
    sharing = attention if decisions.context_parallel > 1 else set()
    of_kind: dict[Any, Case] = {}
    for path, module, own in _largest(model, names, segment_of):
        structure = tuple((inner, type(m)) for inner, m in module.named_modules())
        wholes = [by_name[name][0] for name in own]
        shapes = tuple((shard.whole_shape, shard.whole.dtype, shard.trains) for shard in wholes)
        kind = structure, shapes, frozenset(treated[segment_of[own[0]]]), len(own)
        exclusive = frozenset(own) - _read_outside(readers, path)
        columns = heads.get(path) if decisions.tensor_parallel > 1 else None
        in_tiles = segments(units)[segment_of[own[0]]][0].num_tiles > 1
        case = Case(path, module, {name: by_name[name] for name in own}, exclusive, in_tiles, columns)
        if any(f"{inner}.".startswith(f"{path}.") for inner in sharing):
            case.why_not = "ranks share its sequences"
        of_kind[kind] = case
    yield from of_kind.values()


def recomputed_modules(
    model: nn.Module, units: tuple[Unit, ...], decisions: Decisions
) -> Iterator[tuple[nn.Module, tuple[str, str]]]:
    """Yield the modules whose forward runs a second time as it ran first, with their paths and their segments.

    A module that several segments of a call share is left out, because its second passes come in another order.
    """
    paths = {module: path for path, module in model.named_modules()}
    tiled = tiled_modules(model, units) if decisions.layer_tile_tokens is not None else {}
    in_tiles = {inner for module in tiled for inner in module.modules()}
    recomputed = [segment for segment in segments(units) if decisions.units[segment[0].name].activations != "keep"]
    inside = {(s[0].call, s[0].segment): set(segment_module(model, s).modules()) for s in recomputed}
    used = Counter((call, module) for (call, _), modules in inside.items() for module in modules)
    for (call, name), modules in inside.items():
        for module in modules:
            if used[call, module] == 1 and module not in in_tiles and next(module.children(), None) is None:
                yield module, (paths[module], name)


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
            path = operator.path
            # A penalty on weights in the user's step is computed behind the last module, and may read its weights too.
            is_behind = operator.shared_parameters and operator.name != path
            penalised = [spec.name for spec in unit.parameters] if is_behind else []
            for name in (*operator.shared_parameters, *penalised):
                found.setdefault(name, []).append("" if is_behind or path not in paths else path)
            for spec in operator.parameters:
                if path in paths:
                    found.setdefault(spec.name, []).append(path)
    return found


def _read_outside(readers: Mapping[str, list[str]], path: str) -> set[str]:
    """Return the parameters that a module outside ``path`` reads."""
    return {name for name, read in readers.items() if any(f"{one}.".find(f"{path}.") != 0 for one in read)}


def stored_gradients(state: ModelState, iteration: int, shard: ParameterShard) -> Iterator[tuple[slice, Tensor]]:
    """Yield the parts of a shard's gradient that its updates read, each with its place in the flat shard."""
    for unit, parameter in state.by_parameter.get(shard.name, ()):
        if parameter.shard is not shard:
            continue
        for part in parameter.parts:
            inside = slice(part.start - parameter.start, part.stop - parameter.start)
            on_host = part.piece.leaves and part.piece.place is not Place.NVME  # buffers for NVMe change hands
            if on_host and parameter.flushed == iteration:
                yield inside, unit.arrival(part)
            elif (held := unit.device_gradients.get((parameter.name, part.piece.index))) is not None:
                yield inside, held
