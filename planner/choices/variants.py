"""Variants of a request: each choice of degrees and batch sizes, with its units and prices."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator

from planner.choices.choice import choices
from planner.choices.request import Request
from planner.choices.tiles import (
    can_be_tiled,
    can_have_tiled_layers,
    layer_tile_of,
    segment_tile_of,
    tile_of,
    with_tiles,
)
from planner.costs.layout import Layout
from planner.costs.model import CostModel
from planner.costs.rank import RankHardware
from planner.decisions import Choice, Sharding
from planner.graph import Batch, Unit, build_graph, units
from planner.lowering.stages import sharing_stages
from planner.models.captured import CapturedModel, Model
from planner.models.config import ModelConfigError
from planner.optimizers import OPTIMIZERS
from planner.setup import Setup
from planner.terms import COMPILED

# If all state and activations take more than this share of a device's memory, it may be short of room. Workspace takes
# the rest.
_SHORT = 0.85


@dataclasses.dataclass(frozen=True)
class Variant:
    """One choice, ready to be scored and bounded.

    Attributes:
        request: what it is a choice for.
        setup: the input of engine policies.
        cost: prices of single units, in a pipeline too.
    """

    request: Request
    setup: Setup
    cost: CostModel

    @functools.cached_property
    def choice(self) -> Choice:
        """Degrees and batch sizes."""
        return Choice.of(self.setup.given)


def variants(request: Request) -> tuple[Variant, ...]:
    """Return all variants of a request.

    Raises:
        ValueError: there is none; the message says why.
    """
    found = choices(request)
    if isinstance(request.model, CapturedModel):
        found = _captured(request, found)
    found = tuple(_with_collectives(request, choice) for choice in found)
    if request.kernels == "auto":
        found = tuple(option for choice in found for option in _with_kernels(request, choice))
    tiled = (option for choice in found for option in _tiled(request, choice))
    fetched = (option for choice in tiled for option in _fetched(request, choice))
    return tuple(variant(request, option) for choice in fetched for option in _mastered(request, choice))


def _with_collectives(request: Request, choice: Choice) -> Choice:
    """Return a choice with the collectives that are wanted, or else with the faster ones.

    Raises:
        ValueError: they are to go through the host, but ranks are on several nodes.
    """
    profile, wanted = request.hardware, request.collectives
    layout = Layout.of(choice, profile)
    group = layout.replicas(1)
    if wanted == "host" and group.nodes > 1:
        raise ValueError(
            f"collectives are to go through host memory, but {choice.data_parallel} data-parallel ranks are on "
            f"{group.nodes} nodes; leave --parallel collectives=host out"
        )
    if wanted == "host" or (wanted is None and RankHardware(profile, layout).prefers_host(group)):
        return choice.model_copy(update={"collectives": "host" if group.per_node > 1 else None})
    return choice


def _with_kernels(request: Request, choice: Choice) -> Iterator[Choice]:
    """Yield a choice with the kernels of ``transformers``, and with compiled ones where these can be executed."""
    yield choice
    for kernels in COMPILED if request.storage == "never" else ():  # compiled blocks offload no activations
        compiled = choice.model_copy(update={"kernels": kernels})
        with contextlib.suppress(ModelConfigError):
            _units(request.model, request.batch(compiled))
            yield compiled


def _fetched(request: Request, choice: Choice) -> Iterator[Choice]:
    """Yield a choice with weights fetched in their own type, and in fp8 where they can be."""
    wanted = request.fp8_weights
    can = request.types.products and not OPTIMIZERS[request.optimizer].others and choice.pipeline_parallel == 1
    if not (wanted and can):
        yield choice
    if can and wanted is not False:
        yield choice.model_copy(update={"fp8_weights": True})


def _mastered(request: Request, choice: Choice) -> Iterator[Choice]:
    """Yield a choice with whole master copies, and with split ones.

    Split master copies take two bytes less of memory and of links for each parameter, and more of the host's cores.
    They have the same values. Without a wish, they are compared where the device may be short of room: room is what
    lets copies and updates run beside its work.
    """
    wanted, can = request.split_masters, request.types.can_be_split
    if not (wanted and can):
        yield choice
    if can and (wanted or (wanted is None and _share_of_memory(request, choice) > _SHORT)):
        yield choice.model_copy(update={"split_masters": True})


def _share_of_memory(request: Request, choice: Choice) -> float:
    """Return the share of a device's memory that all state and activations take, evenly divided among ranks."""
    types, layers = request.types, _units(request.model, request.batch(choice))
    per_param = types.state_bytes_per_param(request.optimizer) + types.gradient_bytes
    state_bytes = sum(unit.num_params for unit in layers) * per_param / choice.data_parallel
    saved_bytes = sum(unit.num_tiles * unit.saved_bytes for unit in layers)
    return (state_bytes + saved_bytes) / choice.pipeline_parallel / request.hardware.device.memory_bytes.value


def _tiled(request: Request, choice: Choice) -> Iterator[Choice]:
    """Yield a choice with each way of computing in tiles that is worth comparing.

    These are none, tiles in layers or of the sequences that pass them, and either with those of the loss.

    Raises:
        ModelConfigError: the model has nothing that can be computed in the tiles that are wanted.
    """
    model, device = request.model, request.hardware.device
    loss, layers, sequences = request.loss_tile_tokens, request.layer_tile_tokens, request.segment_tile_sequences
    _check_tiles(model, choice, loss, layers)
    _check_segment_tiles(choice, sequences)
    batch = request.batch(choice)
    found = [with_tiles(choice, batch.num_tokens, loss, layers, sequences)]
    ways = found.copy()
    if layers is None and sequences is None and choice.pipeline_parallel == 1:
        tokens = layer_tile_of(model, batch, _units(model, batch), device)
        ways.append(with_tiles(found[0], batch.num_tokens, layers=tokens))
        tile = segment_tile_of(model, batch, _units(model, batch), device)
        ways.append(with_tiles(found[0], batch.num_tokens, sequences=tile))
    if loss is None:
        # Whole logits take more than any layer, so tiles of layers go with those of the loss, where these are worth it.
        for way in ways:
            batch = request.batch(way)
            tokens = tile_of(model, batch, _units(model, batch), device)
            found.append(with_tiles(way, batch.num_tokens, loss=tokens))
    else:
        found += ways
    yield from dict.fromkeys(found)


def _check_segment_tiles(choice: Choice, sequences: int | None) -> None:
    if sequences is None:
        return
    if why := choice.model_copy(update={"segment_tile_sequences": sequences}).contradiction:
        raise ModelConfigError(why)
    if choice.kernels not in {None, "transformers"}:
        raise ModelConfigError(
            f"{choice.kernels} kernels compute all sequences at once; leave --tiles segment or --kernels out"
        )


def _check_tiles(model: Model, choice: Choice, loss: int | None, layers: int | None) -> None:
    if loss is not None and not can_be_tiled(model):
        raise ModelConfigError(
            f"{model.name} has no torch.nn.Linear as its output embeddings, or no loss of its own, so the loss "
            "cannot be computed in tiles; leave --tiles loss out"
        )
    if layers is None:
        return
    if not can_have_tiled_layers(model):
        raise ModelConfigError(
            f"layers of {model.name} cannot be computed in tiles; captured models can, and models with RMS norms, "
            "gated MLPs and no experts (llama, mistral, qwen2, qwen3); leave --tiles layer out"
        )
    if choice.tensor_parallel > 1:
        raise ModelConfigError(
            f"layers that {choice.tensor_parallel} tensor-parallel ranks share cannot be computed in tiles; leave "
            "--tiles layer or --parallel tensor out"
        )


def _captured(request: Request, tried: tuple[Choice, ...]) -> tuple[Choice, ...]:
    """Return the choices whose micro-batch a captured model takes: one sample is too few for some norms.

    Raises:
        ModelConfigError: there is none.
    """
    found: list[Choice] = []
    reasons: list[ModelConfigError] = []
    for choice in tried:
        try:
            _check_cut(_units(request.model, request.batch(choice)), choice)
        except ModelConfigError as error:
            reasons.append(error)
        else:
            found.append(choice)
    if not found:
        raise reasons[0]
    return tuple(found)


def variant(request: Request, choice: Choice) -> Variant:
    """Return the variant of one choice."""
    given = Sharding(
        **dict(choice),
        precision=request.types,
        optimizer=request.optimizer,
        clip=request.clip,
        speculate=request.speculate or None,
        subgroup_params=request.subgroup_params,
    )
    setup = Setup(_units(request.model, request.batch(choice)), given, request.storage)
    return Variant(request, setup, CostModel(request.hardware, setup.units, given))


@functools.lru_cache(32)  # choices with the same micro-batch share them, and so do all machines of a study
def _units(model: Model, batch: Batch) -> tuple[Unit, ...]:
    found = units(build_graph(model, batch))
    if not any(unit.num_params for unit in found):
        raise ValueError(
            f"{model.name} trains nothing: all its parameters are frozen; set requires_grad of some to true"
        )
    return found


def _check_cut(units: tuple[Unit, ...], choice: Choice) -> None:
    """Check that a captured model can be cut into stages, as far as its units show.

    Raises:
        ModelConfigError: there are too few layers, or some weights are shared by other stages than others.
    """
    if choice.pipeline_parallel == 1:
        return
    try:
        sharing_stages(units, choice)
    except ValueError as error:
        raise ModelConfigError(str(error)) from None
