"""Decisions: what the planner chooses, per unit and for the whole iteration."""

import itertools
from collections.abc import Iterable
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from planner.decisions.fp8 import Fp8Weights
from planner.decisions.places import Place, UnitDecision
from planner.decisions.precision import Precision
from planner.decisions.sharding import Sharding
from planner.graph import Unit
from planner.models.choice import Count
from planner.optimizers import OPTIMIZERS, Optimizer


class Decisions(Sharding):
    """Everything that the planner chooses. With the model and the batch, it determines the schedule.

    Attributes:
        policy: the engine policy that these decisions follow or started from.
        num_param_slots: slots in each ring for fetched or gathered parameters.
        num_state_slots: slots for streamed optimizer state.
        num_nvme_slots: host buffers for optimizer state from NVMe. With 1, reads, updates and writes take turns. With
            2, one subgroup is read or written while another is updated. With 3, all overlap.
        num_gradient_slots: units by which backward may run ahead of gradient copies to the host.
        num_activation_slots: units by which forward may run ahead of offloads, and reloads ahead of backward.
        spill_gradients: whether gradients wait on NVMe if their state is there.
        update_order: the order of updates: by next forward, or as gradients arrive (always so if updates start during
            backward).
        update_start: ``step``: when all gradients are there; ``backward``: each as soon as its own gradient is there.
        num_forwards_ahead: micro-batches whose forward runs before the first one's backward, as in a pipeline's stages.
        num_backwards_ahead: micro-batches whose backward runs before the first one's gradients of weights, as in a
            pipeline's stages; ``None``: backward makes them.
        round_starts: of a stage, the segments with which its rounds begin, but the first.
        cuts: of a stage, the bytes of a micro-batch that it is sent by the stage before, and that it sends to the next
            one, in each round; 0 where there is no such stage.
        tied_weights: of a stage, its weights that another stage has too; they add up their gradients.
        overlap_next_forward: whether only a unit's own next forward waits for its update, not the whole next iteration.
        shares: sequences of each rank in a micro-batch, of which this rank's is ``micro_batch``; see [Note: Unlike
            devices] in :mod:`planner.plan.unlike`. ``None``: they are equal.
    """

    policy: str
    num_param_slots: Count = 2
    num_state_slots: Count = 2
    num_nvme_slots: Count = 2
    num_gradient_slots: Count = 2
    num_activation_slots: Count = 2
    spill_gradients: bool = False
    update_order: Literal["forward", "backward"] = "forward"
    update_start: Literal["step", "backward"] = "step"
    num_forwards_ahead: Count = 1
    num_backwards_ahead: Annotated[int, Field(ge=0)] | None = None
    round_starts: tuple[str, ...] = ()
    cuts: Annotated[tuple[tuple[int, int], ...], Field(exclude=True)] = ()  # of a stage alone, which no file has
    tied_weights: tuple[str, ...] = ()
    overlap_next_forward: bool = True
    shares: tuple[Count, ...] | None = None
    units: dict[str, UnitDecision]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.waits_for_norm and self.update_start == "backward":
            raise ValueError(
                "clip needs the norm of all gradients, so no update can start during backward; "
                "set update_start to 'step', speculate to true or clip to false"
            )
        if self.speculate:
            check_speculate(self.clip, self.optimizer)
        if self.contradiction:
            raise ValueError(self.contradiction)
        if self.pipeline_parallel > 1:
            _check_pipeline(self)
        if self.fp8_weights:
            check_fp8_weights(self.precision, self.optimizer)
        if self.split_masters:
            check_split_masters(self.precision)
        for name, unit in self.units.items():
            if unit.fetched and Place.GPU in unit.update:
                raise ValueError(
                    f"unit {name}: optimizer state on the gpu needs its parameters there too; "
                    "set params to 'gpu' or update to 'cpu' or 'stream'"
                )
            if unit.params == "nvme" and set(unit.update) - {Place.NVME}:
                raise ValueError(
                    f"unit {name}: parameters on nvme are written back with their optimizer state; set update to "
                    "'nvme' or params to 'host'"
                )
        return self

    @property
    def num_sequences(self) -> int:
        """Sequences that all ranks together read in an iteration."""
        return self.num_micro_batches * sum(self.shares or (self.micro_batch,) * self.num_readers)

    @property
    def weight(self) -> float:
        """Weight of this rank's gradients and losses in the mean over data-parallel ranks: 1 if shares are equal."""
        return self.micro_batch * self.num_readers / sum(self.shares) if self.shares else 1.0

    @property
    def in_rounds(self) -> bool:
        """Whether all micro-batches pass a round of layers before the next one, so that their gradients leave once."""
        return self.pipeline_rounds > 1 or bool(self.round_starts)

    @property
    def takes_back(self) -> bool:
        """Whether updates begin before the norm is known, so that gradients are kept until then."""
        return self.speculate is not None and self.update_start == "backward"

    @property
    def uses_storage(self) -> bool:
        """Whether anything lives on NVMe, or activations leave the device."""
        return any(u.params == "nvme" or u.offloads or Place.NVME in u.update for u in self.units.values())

    @property
    def shared_in_words(self) -> str:
        """How data-parallel ranks share the model, in words."""
        return f"ZeRO-{self.zero_stage}"

    def stored_weight_bytes(self, unit: str) -> int:
        """Return the bytes per parameter of a unit's weights on NVMe beside its state: 0 if they are in it."""
        has_copy = self.units[unit].params == "nvme" and not self.weight_in_state
        return self.precision.weight_bytes if has_copy else 0

    def fp8_of(self, unit: Unit) -> Fp8Weights | None:
        """Return how a unit's weights move where they are fetched or gathered in fp8; ``None`` where they are not."""
        params = self.units[unit.name].params
        moves = params == "host" or (params == "gpu" and self.gathers(unit))
        return self.fp8_if_moved(unit) if moves else None

    def offloads(self, unit: str) -> bool:
        """Return whether activations of a unit leave the device between forward and backward."""
        return self.units[unit].offloads

    def moves_fp8(self, unit: Unit) -> bool:
        """Return whether a unit's weights are fetched or gathered in fp8."""
        return self.fp8_of(unit) is not None

    def flushes(self, unit: str, place: Place) -> bool:
        """Return whether gradients of a unit's subgroups with this update place go to the host."""
        if place is Place.STREAM:
            return self.units[unit].streamed_gradients == "host"
        return place.by_host

    def serves(self, unit: str, place: Place) -> bool:
        """Return whether the host keeps weights for the device, of a unit's subgroups with this update place.

        It keeps weights that it updates and weights that are fetched. If the weight is in the state, no extra copy is
        needed.
        """
        params = self.units[unit].params
        if params == "nvme" or (self.weight_in_state and place is not Place.NVME):
            return False
        return params == "host" or place.by_host

    def arrives_in_place(self, unit: str, place: Place) -> bool:
        """Return whether gradients of a unit's subgroups with this update place overwrite the host's weights.

        [Note: In place] The device has the weights, and the update that uses the gradient makes new ones. So nobody
        needs the host's weights between their last copy to the device and that update: 2 bytes per parameter. The
        master copy is untouched, so nothing is lost. Weights that are fetched again for a later micro-batch are not
        overwritten, and gradients that wait elsewhere do not overwrite any. Nor do those with which updates may be
        taken back. In rounds, gradients leave when no micro-batch is left.
        """
        often = self.num_micro_batches > 1 and self.units[unit].fetched and not self.in_rounds
        spilled = place is Place.NVME and self.spill_gradients
        return not (often or spilled or self.takes_back) and self.flushes(unit, place) and self.serves(unit, place)

    def weights_pass(self, unit: str) -> bool:
        """Return whether streamed state of a unit travels with its gradients, or with its new weights."""
        weights_go = self.units[unit].fetched and not self.weight_in_state
        return self.flushes(unit, Place.STREAM) or weights_go

    def placed_pieces(self, unit: Unit) -> tuple[tuple[int, Place], ...]:
        """Return size and place of each of a unit's subgroups on one rank, in order."""
        return tuple(zip(self.piece_params(unit), self.units[unit.name].update, strict=True))

    def params_by_place(self, units: Iterable[Unit]) -> dict[Place, int]:
        """Return how many parameters of some units one rank updates at each place."""
        placed = dict.fromkeys(Place, 0)
        for num_params, place in itertools.chain.from_iterable(map(self.placed_pieces, units)):
            placed[place] += num_params
        return placed


def check_speculate(clip: bool, optimizer: Optimizer) -> None:
    """Check that updates can be taken back.

    Raises:
        ValueError: nothing is clipped, or the optimizer's step has no inverse.
    """
    if not clip:
        raise ValueError("speculate is for gradients that are clipped, but clip is false; leave one of both out")
    if optimizer != "adamw":
        raise ValueError(
            f"speculate needs updates that can be taken back, as of adamw with its state in fp32, not "
            f"{optimizer}; leave speculate out, or choose adamw"
        )


def check_split_masters(precision: Precision) -> None:
    """Check that master copies can be split.

    Raises:
        ValueError: they have no weight in bf16 beside them, or are in bf16 themselves.
    """
    if not precision.can_be_split:
        raise ValueError(
            f"split_masters needs weights in bf16 and master copies in fp32, not {precision.weights} and "
            f"{precision.master or 'fp32'}; leave split_masters out"
        )


def check_fp8_weights(precision: Precision, optimizer: Optimizer) -> None:
    """Check that weights can be fetched in fp8.

    Raises:
        ValueError: products are in another type, or the optimizer lays weights out in its own way.
    """
    if precision.products != "fp8":
        raise ValueError(
            f"fp8_weights needs products in fp8, not {precision.weights}; plan with --precision products=fp8, or leave "
            "fp8_weights out"
        )
    if OPTIMIZERS[optimizer].others:
        raise ValueError(
            f"fp8_weights: {OPTIMIZERS[optimizer].words} needs matrices before other parameters; leave fp8_weights "
            "out, or choose another optimizer"
        )


def _check_pipeline(decisions: Decisions) -> None:
    if decisions.spill_gradients:
        raise ValueError(
            f"spill_gradients with pipeline_parallel {decisions.pipeline_parallel}: stages add up gradients of weights "
            "that they share at the step, where they are; leave it out"
        )
    if decisions.update_start == "backward":
        raise ValueError(
            f"pipeline_parallel is {decisions.pipeline_parallel}, whose stages add up gradients at the step, so no "
            "update can start during backward; use update_start 'step'"
        )
