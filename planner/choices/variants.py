"""Variants of a request: each choice of degrees and batch sizes, with its units and prices."""

import dataclasses
import functools
from collections.abc import Iterator

from hwprofiles.profile import HardwareProfile
from planner.choices.choice import Constraints, batch_of
from planner.choices.tiles import can_be_tiled, can_have_tiled_layers, layer_tile_of, tile_of, with_tiles
from planner.costs.model import CostModel
from planner.decisions import Choice, Precision, Sharding
from planner.graph import Batch, Unit, build_graph, units
from planner.models.captured import CapturedModel, Model
from planner.models.config import ModelConfigError
from planner.optimizers import OPTIMIZERS, Optimizer
from planner.setup import Setup
from planner.terms import Storage, default_micro_batch


@dataclasses.dataclass(frozen=True)
class Job:
    """The part of a request that all variants share.

    Attributes:
        model: sizes of the model.
        hardware: the machine.
        seq_len: tokens per sequence.
        expert_load: shares of all visits that go to each expert; see :class:`planner.graph.Batch`.
        precision: types of weights and gradients.
        optimizer: the optimizer.
        clip: whether gradients are clipped by their global norm.
        subgroup_params: most parameters of one subgroup.
    """

    model: Model
    hardware: HardwareProfile
    seq_len: int
    expert_load: tuple[tuple[float, ...], ...]
    precision: Precision
    optimizer: Optimizer
    clip: bool
    subgroup_params: int


@dataclasses.dataclass(frozen=True)
class Variant:
    """One choice, ready to be scored and bounded.

    Attributes:
        setup: the input of engine policies.
        cost: prices of single units, in a pipeline too.
    """

    setup: Setup
    cost: CostModel

    @functools.cached_property
    def choice(self) -> Choice:
        """Degrees and batch sizes."""
        return Choice.of(self.setup.given)


def variants(job: Job, constraints: Constraints) -> tuple[Variant, ...]:
    """Return all variants of a request.

    Raises:
        ValueError: there is none; the message says why.
    """
    if job.precision.products:  # see :func:`planner.models.formulas.float8.check`
        constraints = constraints.model_copy(update={"tensor_parallel": 1})
    if constraints.micro_batch is None and constraints.global_batch is None:
        constraints = constraints.model_copy(update={"micro_batch": default_micro_batch(job.seq_len)})
    choices = constraints.choices(job.model, job.hardware.devices_per_node)
    if isinstance(job.model, CapturedModel):
        choices = _captured(job, choices)
    tiled = (option for choice in choices for option in _tiled(job, choice, constraints))
    found = (option for choice in tiled for option in _fetched(job, choice, constraints.fp8_weights))
    return tuple(variant(job, choice, constraints.storage) for choice in found)


def _fetched(job: Job, choice: Choice, wanted: bool | None) -> Iterator[Choice]:
    """Yield a choice with weights fetched in their own type, and in fp8 where they can be."""
    can = job.precision.products and not OPTIMIZERS[job.optimizer].others and choice.pipeline_parallel == 1
    if not (wanted and can):
        yield choice
    if can and wanted is not False:
        yield choice.model_copy(update={"fp8_weights": True})


def _tiled(job: Job, choice: Choice, constraints: Constraints) -> Iterator[Choice]:
    """Yield a choice with each way of computing in tiles that is worth comparing: none, of the loss, of layers too.

    Raises:
        ModelConfigError: the model has nothing that can be computed in the tiles that are wanted.
    """
    _check_tiles(job.model, choice, constraints.loss_tile_tokens, constraints.layer_tile_tokens)
    batch = batch_of(choice, job.seq_len, job.precision, job.expert_load, job.hardware.device)
    found = [with_tiles(choice, batch.num_tokens, constraints.loss_tile_tokens, constraints.layer_tile_tokens)]
    if choice.pipeline_parallel == 1:
        ways = found.copy()
        if constraints.layer_tile_tokens is None:
            tokens = layer_tile_of(job.model, batch, _units(job.model, batch), job.hardware.device)
            ways.append(with_tiles(found[0], batch.num_tokens, layers=tokens))
        if constraints.loss_tile_tokens is None:
            # Whole logits take more than any layer, so tiles of layers go with those of the loss, where these are worth
            # it.
            for way in ways:
                batch = batch_of(way, job.seq_len, job.precision, job.expert_load, job.hardware.device)
                tokens = tile_of(job.model, batch, _units(job.model, batch), job.hardware.device)
                found.append(with_tiles(way, batch.num_tokens, loss=tokens))
        else:
            found += ways
    yield from dict.fromkeys(found)


def _check_tiles(model: Model, choice: Choice, loss: int | None, layers: int | None) -> None:
    if loss is not None and not can_be_tiled(model):
        raise ModelConfigError(
            f"{model.name} has no torch.nn.Linear as its output embeddings, or no loss of its own, so the loss "
            "cannot be computed in tiles; leave --loss-tile out"
        )
    if layers is None:
        return
    if not can_have_tiled_layers(model):
        raise ModelConfigError(
            f"layers of {model.name} cannot be computed in tiles; captured models can, and models with RMS norms, "
            "gated MLPs and no experts (llama, mistral, qwen2, qwen3); leave --layer-tile out"
        )
    if choice.tensor_parallel > 1:
        raise ModelConfigError(
            f"layers that {choice.tensor_parallel} tensor-parallel ranks share cannot be computed in tiles; leave "
            "--layer-tile or --tensor-parallel out"
        )


def _captured(job: Job, choices: tuple[Choice, ...]) -> tuple[Choice, ...]:
    """Return the choices whose micro-batch a captured model takes: one sample is too few for some norms.

    Raises:
        ModelConfigError: there is none.
    """
    found: list[Choice] = []
    reasons: list[ModelConfigError] = []
    for choice in choices:
        try:
            _units(job.model, batch_of(choice, job.seq_len, job.precision, job.expert_load, job.hardware.device))
        except ModelConfigError as error:
            reasons.append(error)
        else:
            found.append(choice)
    if not found:
        raise reasons[0]
    return tuple(found)


def variant(job: Job, choice: Choice, storage: Storage) -> Variant:
    """Return the variant of one choice."""
    given = Sharding(
        **dict(choice),
        precision=job.precision,
        optimizer=job.optimizer,
        clip=job.clip,
        subgroup_params=job.subgroup_params,
    )
    batch = batch_of(choice, job.seq_len, job.precision, job.expert_load, job.hardware.device)
    setup = Setup(_units(job.model, batch), given, storage)
    degrees = dataclasses.astuple(given.degrees)
    cost = CostModel(job.hardware, setup.units, job.precision, *degrees, optimizer=job.optimizer)
    return Variant(setup, cost)


@functools.lru_cache(32)  # choices with the same micro-batch share them, and so do all machines of a study
def _units(model: Model, batch: Batch) -> tuple[Unit, ...]:
    found = units(build_graph(model, batch))
    if not any(unit.num_params for unit in found):
        raise ValueError(
            f"{model.name} trains nothing: all its parameters are frozen; set requires_grad of some to true"
        )
    return found
