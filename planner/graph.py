"""The operators of a model at one batch size, and their division into units."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from planner.models.captured import CapturedModel, Model
from planner.models.choice import Choice
from planner.models.config import ModelConfig, ModelConfigError
from planner.models.formulas import experts, float8, kernel_sets
from planner.models.formulas.ends import embedding_operators, head_operators
from planner.models.formulas.layers import layer_parts, placed
from planner.models.kernels import Attention, Collective, Elementwise, Gemm, Kernel, Kernels, num_kernels
from planner.models.operators import UNUSED, Batch, Operator, by_module, weight_of
from planner.models.parameters import ParameterSpec, parameters
from planner.models.patterns import Pattern
from planner.models.sharding import share
from planner.models.zero_bubble import apart
from planner.optimizers import is_hidden_matrix
from planner.subgroups import Extent

__all__ = [
    "Attention",
    "Batch",
    "Collective",
    "Elementwise",
    "Gemm",
    "Kernel",
    "Kernels",
    "Operator",
    "Pattern",
    "Unit",
    "build_graph",
    "segments",
    "units",
]


@dataclasses.dataclass(frozen=True)
class Unit:
    """The grain of placement and transfer: neighbouring operators whose parameters move together.

    Attributes:
        name: ``embed``, ``layers.3.attn``, ``layers.3.mlp``, ``layers.3.experts.5`` or ``head``; of a captured model
            the path of a module.
        segment: the decoder layer, which is recomputed as a whole. ``embed`` and ``head`` are segments of their own and
            are never recomputed.
        operators: in forward order.
        shared_units: other units whose parameters it uses (tied embeddings).
        is_first: whether its segment begins with it.
        can_swap: whether its segment's activations can be recomputed or offloaded. All units of the segment belong to
            a layer, and backward goes through it: not where nothing in or before it is trained. A unit may have no
            kernel of its own to run again.
        entry_bytes: what a forward that begins here, in a pipeline, keeps for backward beside hidden states: rotations
            that it makes before, and what else it is sent.
    """

    name: str
    segment: str
    operators: tuple[Operator, ...]
    shared_units: tuple[str, ...] = ()
    is_first: bool = False
    can_swap: bool = False
    entry_bytes: int = 0

    def renamed(self, names: Mapping[str, str]) -> "Unit":
        """Return the unit with other names for some of its parameters, and of those that it shares."""
        if not names:
            return self
        operators = (
            dataclasses.replace(
                operator,
                parameters=tuple(
                    dataclasses.replace(spec, name=names.get(spec.name, spec.name)) for spec in operator.parameters
                ),
                shared_parameters=tuple(names.get(name, name) for name in operator.shared_parameters),
            )
            for operator in self.operators
        )
        return dataclasses.replace(self, operators=tuple(operators))

    @functools.cached_property
    def parameters(self) -> tuple[ParameterSpec, ...]:
        """Those that are trained, in order of use, :attr:`fp8_parameters` behind all others.

        They have gradients and optimizer state, are cut into subgroups, and their number is :attr:`num_params`.
        """
        trained = [spec for operator in self.operators for spec in operator.parameters if spec.is_trained]
        return (*(spec for spec in trained if spec not in self.fp8_parameters), *self.fp8_parameters)

    @functools.cached_property
    def frozen(self) -> tuple[ParameterSpec, ...]:
        """Parameters that only move with the others."""
        return tuple(spec for operator in self.operators for spec in operator.parameters if not spec.is_trained)

    @functools.cached_property
    def fp8_parameters(self) -> tuple[ParameterSpec, ...]:
        """Those that products in fp8 cast, each with a scale of its own. Empty if one of them is frozen."""
        names = {weight for operator in self.operators for weight in multiplied_in_fp8(operator)}
        found = [spec for operator in self.operators for spec in operator.parameters if spec.name in names]
        return tuple(found) if all(spec.is_trained for spec in found) else ()

    @functools.cached_property
    def fp8_twin(self) -> "Unit | None":
        """The same unit where these come in fp8, so that it does not cast them."""
        if not self.fp8_parameters:
            return None
        operators = (
            dataclasses.replace(operator.fp8_twin, parameters=operator.parameters) if operator.fp8_twin else operator
            for operator in self.operators
        )
        return dataclasses.replace(self, operators=tuple(operators))

    @property
    def call(self) -> int:
        """The call of the model that runs it, from 1 on; see :attr:`planner.models.captured.CapturedModel.calls`."""
        return self.operators[0].call

    @property
    def evaluates(self) -> bool:
        """Whether it runs without gradients in a step that calls the model several times."""
        return self.operators[0].evaluates

    @property
    def stays(self) -> bool:
        """Whether its weights and activations stay on the device; see [Note: Second order] in :mod:`planner.setup`."""
        return self.operators[0].stays

    @property
    def num_tiles(self) -> int:
        """Tiles of sequences that pass its segment one after another; its kernels and bytes are those of one tile."""
        return self.operators[0].num_tiles

    @functools.cached_property
    def writes(self) -> bool:
        """Whether its forward writes to its weights; see [Note: Written weights] in :mod:`planner.setup`."""
        return any(operator.writes for operator in self.operators)

    @functools.cached_property
    def num_params(self) -> int:
        """Number of its own parameters that are trained."""
        return sum(spec.num_params for spec in self.parameters)

    @functools.cached_property
    def num_weights(self) -> int:
        """Number of all its own parameters, trained and frozen."""
        return self.num_params + sum(spec.num_params for spec in self.frozen)

    @functools.cached_property
    def _frozen_bytes(self) -> dict[int, int]:
        return {size: sum(spec.stored_bytes(size) for spec in self.frozen) for size in (2, 4)}

    def frozen_bytes(self, weight_bytes: int) -> int:
        """Return the bytes of its frozen weights, as they are kept and moved."""
        return self._frozen_bytes[weight_bytes]

    @functools.cached_property
    def size_name(self) -> str:
        """A name for its size: units of one name share a ring of slots."""
        return f"{self.num_params}+{self.frozen_bytes(2)}" if self.frozen else str(self.num_params)

    def stored_bytes(self, weight_bytes: int) -> int:
        """Return the bytes of all its weights, as they are kept and moved."""
        return weight_bytes * self.num_params + self.frozen_bytes(weight_bytes)

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """Number of elements of each of its own trained parameters, by name."""
        return {spec.name: spec.num_params for spec in self.parameters}

    @functools.cached_property
    def extents(self) -> tuple[Extent, ...]:
        """Size of each of its own trained parameters, and the shapes of hidden matrices that they are or belong to."""
        return tuple((spec.num_params, _hidden_matrix(spec)) for spec in self.parameters)

    @functools.cached_property
    def shared_parameters(self) -> tuple[str, ...]:
        """Names of the parameters of other units that it uses."""
        return tuple(name for operator in self.operators for name in operator.shared_parameters)

    @functools.cached_property
    def steps(self) -> tuple[tuple[int, int, bool, int], ...]:
        """For each operator's backward: saved bytes, workspace, whether it is a bank of experts, gradients."""
        return tuple(
            (o.saved_bytes, 0 if o.differentiates else o.workspace_bytes, o.kind == "experts", len(o.parameter_names))
            for o in self.operators
        )

    @functools.cached_property
    def gradient_names(self) -> tuple[str, ...]:
        """Names of the parameters whose gradients its operators make, operator by operator."""
        return tuple(name for operator in self.operators for name in operator.parameter_names)

    @functools.cached_property
    def _counts(self) -> tuple[Callable[[Choice], int], ...]:
        """The functions that count the parts of its operators' parameters, without duplicates."""
        return tuple(dict.fromkeys(operator.pattern.parts for operator in self.operators if operator.parameters))

    def parts(self, choice: Choice) -> int:
        """Return the number of different parts of its parameters that data-parallel ranks hold; see [Note: Patterns].

        Raises:
            ValueError: its operators differ in this number, so they cannot move together.
        """
        counts = self._counts
        if len(counts) == 1:
            return counts[0](choice)
        found = {count(choice) for count in counts} or {1}
        if len(found) > 1:
            raise ValueError(
                f"unit {self.name} has operators of which data-parallel ranks hold {sorted(found)} different parts; "
                "make them units of their own"
            )
        return found.pop()

    @functools.cached_property
    def saved_bytes(self) -> int:
        """Bytes saved for backward if nothing is recomputed, including the unit's input if backward needs it."""
        return sum(operator.saved_bytes for operator in self.operators)

    @functools.cached_property
    def workspace_bytes(self) -> int:
        """The most bytes that exist only inside it, beside saved activations, the hidden state and gradients.

        The peak of a backward is about the saved bytes of all units up to this one, plus twice the hidden state, plus
        this workspace.
        """
        return max(operator.workspace_bytes for operator in self.operators)

    @functools.cached_property
    def forward_workspace_bytes(self) -> int:
        """The most bytes that its forward needs beyond its saved activations: those of backward without gradients.

        When an operator runs, later operators have not saved anything yet. In backward, they no longer hold anything.
        """
        if self.operators[0].measured:
            return self.workspace_bytes
        most_bytes = later_bytes = 0
        for operator in reversed(self.operators):
            most_bytes = max(most_bytes, operator.workspace_bytes - later_bytes)
            later_bytes += operator.saved_bytes
        return most_bytes + (self.activation_output_bytes if self.recompute else 0)

    @functools.cached_property
    def forward(self) -> Kernels:
        """Kernels of the forward, in order."""
        return tuple(kernel for operator in self.operators for kernel in operator.forward)

    @functools.cached_property
    def backward(self) -> Kernels:
        """Kernels of the backward, in order."""
        return tuple(kernel for operator in reversed(self.operators) for kernel in operator.backward)

    @functools.cached_property
    def weight_gradients(self) -> Kernels:
        """Kernels that backward leaves for later, in order; see [Note: Zero bubble]."""
        return tuple(kernel for operator in reversed(self.operators) for kernel in operator.weight_gradients)

    @functools.cached_property
    def kept_bytes(self) -> int:
        """Bytes that these need from backward on."""
        return sum(operator.kept_bytes for operator in self.operators)

    @functools.cached_property
    def recompute(self) -> Kernels:
        """Kernels that run again in backward if the segment is recomputed (``torch.utils.checkpoint``, non-reentrant).

        It stops once the last saved tensor is back, so the end of a layer is not rerun. Empty outside layers, and where
        backward does not come.
        """
        return tuple(kernel for operator in self.operators for kernel in _rerun(self, operator))

    @property
    def in_layer(self) -> bool:
        """Whether it belongs to a decoder layer, or to another repeated block."""
        return self.segment != self.name

    @functools.cached_property
    def swap_bytes(self) -> int:
        """Bytes that are moved if activations are offloaded: outputs of its products, and its segment's input.

        Operators that recomputation does not reach are not included. :attr:`remake` makes everything else from these.
        """
        given = self.activation_output_bytes if self.is_first else 0
        return given + sum(operator.product_bytes for operator in self.operators)

    @functools.cached_property
    def remake(self) -> Kernels:
        """The kernels of a recompute that run again in backward if activations are offloaded.

        These are elementwise kernels, exchanges of tokens, and whatever computes in tiles. The number of exchanged
        tokens is known only at run time, so their memory cannot be planned, and ranks have to agree on it again. Sums
        over ranks are kept, like products.
        """
        return tuple(
            kernel
            for operator in self.operators
            for kernel in _rerun(self, operator)
            if operator.in_tiles
            or isinstance(kernel, Elementwise)
            or (isinstance(kernel, Collective) and kernel.kind == "all-to-all")
        )

    @functools.cached_property
    def num_kernels(self) -> dict[str, int]:
        """Numbers of launched kernels of a task, by op."""
        lists = {name: getattr(self, name) for name in ("forward", "backward", "recompute", "remake")}
        lists["weight-gradient"] = self.weight_gradients
        return {name: num_kernels(kernels) for name, kernels in lists.items()}

    @property
    def is_unused(self) -> bool:
        """Whether the batch does not reach it; see [Note: Unused units] in :mod:`planner.lowering.parameters`."""
        return self.operators[0].kind == UNUSED

    @functools.cached_property
    def num_modules(self) -> int:
        """The number of modules with parameters of their own that are called."""
        return 0 if self.is_unused else len({spec.name.rpartition(".")[0] for spec in (*self.parameters, *self.frozen)})

    @property
    def given_bytes(self) -> int:
        """Bytes that a stage of a pipeline is sent which begins with its segment."""
        return self.operators[0].given_bytes or self.activation_output_bytes

    @functools.cached_property
    def activation_output_bytes(self) -> int:
        """Bytes of its output, the hidden state: the input that a recomputed segment after it must keep."""
        hidden = [operator for operator in self.operators if operator.kind not in {"rotary", "router", "dispatch"}]
        return hidden[-1].output_bytes


def _hidden_matrix(spec: ParameterSpec) -> tuple[int, int] | None:
    """Return the shape of the whole hidden matrix that a parameter is or belongs to; ``None`` if there is none."""
    if not is_hidden_matrix(spec.name, spec.shape):
        return None
    rows, columns = spec.whole_shape or spec.shape
    return rows, columns


def _rerun(unit: Unit, operator: Operator) -> Kernels:
    """Return the kernels of an operator that run again if its segment is recomputed."""
    if not unit.can_swap:
        return ()
    return operator.forward[: len(operator.forward) - operator.num_skipped]


def build_graph(config: Model, batch: Batch) -> tuple[Operator, ...]:
    """Return the operators of one forward in order of execution.

    Raises:
        ValueError: the sequence is longer than a learned position embedding, or the model cannot be shared by
            ``batch.tensor_parallel`` ranks, or was captured for another batch.
    """
    if batch.splits_backward:
        return tuple(apart(build_graph(config, dataclasses.replace(batch, splits_backward=False)), batch.dtype_bytes))
    if (tile := batch.segment_tile_sequences) is not None:
        return tuple(_in_segment_tiles(config, batch, tile))
    if isinstance(config, CapturedModel):
        return config.graph(batch)
    experts.check(config, batch)
    float8.check(config, batch)
    kernel_sets.check(config, batch)
    own = share(config, batch)
    owned = by_module(parameters(own))
    first, last = embedding_operators(own, batch, owned), head_operators(own, batch, owned)
    return assemble(own, batch, first, lambda layer: _layer(own, config, batch, layer), last)


def _layer(config: ModelConfig, whole: ModelConfig, batch: Batch, layer: int) -> tuple[Operator, ...]:
    parts = layer_parts(config, whole, batch, layer)
    if not batch.fp8_products:
        return parts
    twins = layer_parts(config, whole, dataclasses.replace(batch, casts_weights=False), layer)
    pairs = zip(parts, twins, strict=True)
    return tuple(dataclasses.replace(o, fp8_twin=twin) if o.forward != twin.forward else o for o, twin in pairs)


def _in_segment_tiles(config: Model, batch: Batch, tile: int) -> Iterator[Operator]:
    """Yield the operators where so many sequences pass a layer at a time: those of layers are for one tile."""
    num_tiles, rest = divmod(batch.micro_batch, tile)
    if rest:
        raise ModelConfigError(
            f"segment_tile_sequences is {tile}, but must divide the micro-batch of {batch.micro_batch} sequences; "
            "choose a divisor"
        )
    whole = dataclasses.replace(batch, segment_tile_sequences=None)
    of_whole, of_tile = (build_graph(config, each) for each in (whole, dataclasses.replace(whole, micro_batch=tile)))
    if [operator.name for operator in of_whole] != [operator.name for operator in of_tile]:
        raise ModelConfigError(
            f"{config.name} has other operators for {tile} sequences than for {batch.micro_batch}, so its layers "
            "cannot compute tiles of sequences; leave --tiles segment out"
        )
    for one, other in zip(of_whole, of_tile, strict=True):
        if one.unit == one.segment:
            yield one
        elif one.call > 1 or one.stays or one.evaluates or one.changed_inputs:
            raise ModelConfigError(
                f"{config.name} is called several times in a step, makes gradients of gradients, or changes inputs of "
                "layers in place, so tiles of sequences cannot pass its layers; leave --tiles segment out"
            )
        else:
            twin = other.fp8_twin and dataclasses.replace(other.fp8_twin, num_tiles=num_tiles)
            yield dataclasses.replace(other, num_tiles=num_tiles, fp8_twin=twin)


def assemble(
    config: ModelConfig,
    batch: Batch,
    first: Iterable[Operator],
    parts_of: Callable[[int], tuple[Operator, ...]],
    last: Iterable[Operator],
) -> tuple[Operator, ...]:
    """Return a model's operators in order of execution.

    Args:
        config: sizes of one rank's share of the model.
        batch: the batch.
        first: operators before the layers.
        parts_of: from a layer, its operators with names relative to it.
        last: operators behind the layers.

    Raises:
        ValueError: the sequence is longer than a learned position embedding.
    """
    if config.family in {"opt", "gpt2"} and batch.seq_len > config.max_positions:
        raise ValueError(
            f"sequence length {batch.seq_len} exceeds the {config.max_positions} positions that {config.name} has "
            "learned; shorten the sequence or choose another model"
        )
    operators = sorted(first, key=lambda operator: operator.kind == "rotary")
    parts: dict[tuple[object, ...], tuple[Operator, ...]] = {}  # equal layers share their kernels
    for layer in range(config.num_layers):
        kind = (config.has_experts(layer), experts.load_of(batch, layer))
        if kind not in parts:
            parts[kind] = parts_of(layer)
        operators += (placed(part, config, layer) for part in parts[kind])
    return (*operators, *last)


def units(operators: Collection[Operator]) -> tuple[Unit, ...]:
    """Return the units of operators from :func:`build_graph`, in forward order."""
    owner = {spec.name: operator.unit for operator in operators for spec in operator.parameters}
    swapped = _swapped_segments(operators)
    result: list[Unit] = []
    for name, group in itertools.groupby(operators, key=lambda operator: operator.unit):
        members = tuple(group)
        shared = {owner[parameter]: None for operator in members for parameter in operator.shared_parameters}
        segment = members[0].segment
        is_first = not result or result[-1].segment != segment
        result.append(Unit(name, segment, members, tuple(shared), is_first, segment in swapped))
    return tuple(result)


def _swapped_segments(operators: Collection[Operator]) -> set[str]:
    """Return the segments whose activations can be recomputed or offloaded; see :attr:`Unit.can_swap`."""
    # Experts that no token visits compute nothing, but are trained all the same.
    reached = {o.segment for o in operators if o.backward or any(spec.is_trained for spec in o.parameters)}
    again = {o.segment for o in operators if len(o.forward) > o.num_skipped and not o.stays}
    return reached & again - {o.segment for o in operators if o.writes or o.unit == o.segment}


def multiplied_in_fp8(operator: Operator) -> set[str]:
    """Return the names of the weights of an operator's products in fp8."""
    shapes = {(kernel.n, kernel.k) for kernel in operator.forward if isinstance(kernel, Gemm) and kernel.fp8}
    if operator.measured:  # what runs in one captured module may be the first to see another's parameters
        return {weight_of(operator)} if shapes else set()
    return {spec.name for spec in operator.parameters if spec.shape in shapes}


def segments(units: Iterable[Unit]) -> list[list[Unit]]:
    """Return units grouped by segment, in forward order."""
    return [list(group) for _, group in itertools.groupby(units, key=lambda unit: unit.segment)]
