"""Decisions: what the planner chooses, per unit and for the whole iteration."""

import functools
from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from planner.graph import Degrees, Unit
from planner.optimizers import OPTIMIZERS, Optimizer

Activations = Literal["keep", "recompute", "offload", "offload-nvme"]


class Place(StrEnum):
    """Where a subgroup's optimizer state lives, and who updates it."""

    GPU = "gpu"  # resident on the device, updated there
    STREAM = "stream"  # lives on the host, streamed in, updated on the device, streamed back
    CPU = "cpu"  # lives on the host, updated by the host
    NVME = "nvme"  # lives on NVMe, read into host buffers, updated by the host, written back


class GradientPath(StrEnum):
    """How gradients leave the device."""

    ONCE = "once"  # in the weights' type, pinned, asynchronous: 2 B/param in bf16
    # DeepSpeed ZeRO-3 (up to 0.19): bf16 out, back in, fp32 out: 8 B/param. The last copy converts as it goes, on the
    # stream that backward's kernels wait for: its time is exposed in full.
    ZERO3_BLOCKING = "zero3-blocking"  # the last copy is unpinned, and the caller waits for it: nothing else is issued
    ZERO3_PINNED = "zero3-pinned"  # the caller waits for the last copy, to a pinned buffer of the NVMe swapper
    ZERO3_ASYNC = "zero3-async"  # the last copy is pinned, and the caller goes on

    @property
    def blocks(self) -> bool:
        """Whether the caller waits for a gradient to be on the host."""
        return self in {GradientPath.ZERO3_BLOCKING, GradientPath.ZERO3_PINNED}


class HostUpdate(StrEnum):
    """What the host does to update a subgroup on the CPU and to bring it to the device."""

    FUSED = "fused"  # one pass: gradient and state in, state and bf16 weights out; pinned uploads beside other updates
    # DeepSpeed: a pass that scales gradients; AdamW; then an unpinned copy that casts, and holds up the next update.
    DEEPSPEED = "deepspeed"
    # Deep Optimizer States: AdamW alone; fp32 weights are uploaded, pinned, and cast on the device; holds up the next.
    DEVICE_CAST = "device-cast"


class Frozen(BaseModel):
    """Immutable; an unknown field is an error that names it."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class UnitDecision(Frozen):
    """Where one unit's parameters, activations and optimizer state live.

    Attributes:
        params: ``gpu`` keeps them (or the rank's shard) on the device; ``host`` fetches them into a slot for every use;
            ``nvme`` reads them into a host buffer before that.
        activations: ``keep`` what backward needs, ``recompute`` it, or ``offload`` what only products can make to the
            host (``offload-nvme``: and on to NVMe) and make the rest again; equal for all units of one segment.
        update: one place per subgroup of the unit's (sharded) parameters, in order.
        streamed_gradients: where gradients of subgroups that are streamed wait for their update: they stay on the
            ``gpu``, or leave to the ``host`` and come back with their state.
    """

    params: Literal["gpu", "host", "nvme"]
    activations: Activations
    update: tuple[Place, ...]
    streamed_gradients: Literal["gpu", "host"] = "host"

    @property
    def fetched(self) -> bool:
        """Whether the parameters come from the host for every use."""
        return self.params != "gpu"

    @property
    def offloads(self) -> bool:
        """Whether activations leave the device between forward and backward."""
        return self.activations in {"offload", "offload-nvme"}


class Precision(Frozen):
    """Types of weights and gradients. The optimizer always works in fp32."""

    weights: Literal["bf16", "fp32"]

    @property
    def weight_bytes(self) -> Literal[2, 4]:
        """Bytes of one weight or gradient."""
        return 2 if self.weights == "bf16" else 4

    @property
    def master_is_weight(self) -> bool:
        """Whether the fp32 master copy is the weight itself, where both are in one place."""
        return self.weights == "fp32"


BF16, FP32 = Precision(weights="bf16"), Precision(weights="fp32")


class Decisions(Frozen):
    """Everything that was chosen. Together with the model and the batch this determines the schedule.

    Attributes:
        policy: the engine policy that these decisions follow or started from.
        optimizer: what updates the parameters, in fp32: it says how much state they have.
        micro_batch: sequences per forward, on each rank.
        num_micro_batches: forwards+backwards per iteration (gradient accumulation).
        data_parallel: ranks that share the model's data; each has one device.
        tensor_parallel: ranks that share every layer, for each of those; the units are then one rank's share.
        pipeline_parallel: stages that share the layers, for each of those.
        expert_parallel: data-parallel ranks that share the experts of every layer.
        expert_units: units that a rank's experts of a layer fall into.
        zero_stage: what is sharded over them: 1, 2 optimizer state and gradients, 3 parameters too.
        subgroup_params: most parameters of one subgroup, the grain of the optimizer step.
        num_param_slots: slots in each ring that parameters are fetched or gathered into.
        num_state_slots: slots that streamed optimizer state passes through.
        num_nvme_slots: host buffers that optimizer state from NVMe passes through: 1 reads, updates and writes in turn,
            2 read or write one while another is updated, 3 do all at once.
        num_gradient_slots: units that backward may run ahead of gradients leaving the device.
        num_activation_slots: units that forward may run ahead of activations leaving the device, and that activations
            may come back ahead of backward.
        spill_gradients: gradients that are updated from NVMe wait there too.
        pinned_reads: parameters from NVMe are read into pinned buffers, from which copies to the device are fast.
        update_order: the order of updates: by each unit's next forward, or as gradients arrive (always so if they
            start during backward).
        reduce_start: when ranks add up gradients that pile up on the device: in ``backward``, each unit's as soon as
            it is final, or all at the ``step``.
        update_start: ``step`` when all gradients are there, ``backward`` each as soon as its own is there.
        overlap_next_forward: an update gates only its own unit's next forward, instead of the whole next iteration.
        host_update: what the host does around an update.
        gradient_path: how gradients leave the device.
        max_prefetch_params: a unit of more parameters is gathered only when it is reached, and the next backward waits
            for the reduction of its gradient; ``None``: gathers run as far ahead as slots allow, reductions behind.
        max_reuse_params: what is gathered is released at once if more parameters than that are used before it is needed
            again (DeepSpeed's reuse distance); ``None``: only when its slot is needed.
        module_hooks: Python hooks around every module gather and release its parameters (DeepSpeed ZeRO-3).
        loop: the training script's own work between iterations counts too (logging, data, waiting for the device), as
            published times include it.
        device_buffer_bytes: what an engine holds on the device besides: its buckets and staging buffers.
        clip: gradients are scaled by their global norm, which every update then waits for.
    """

    policy: str
    precision: Precision = BF16
    optimizer: Optimizer = "adamw"
    micro_batch: Annotated[int, Field(ge=1)] = 1
    num_micro_batches: Annotated[int, Field(ge=1)] = 1
    data_parallel: Annotated[int, Field(ge=1)] = 1
    tensor_parallel: Annotated[int, Field(ge=1)] = 1
    pipeline_parallel: Annotated[int, Field(ge=1)] = 1
    expert_parallel: Annotated[int, Field(ge=1)] = 1
    expert_units: Annotated[int, Field(ge=1)] = 1
    zero_stage: Annotated[int, Field(ge=0, le=3)] = 0
    subgroup_params: Annotated[int, Field(ge=1)] = 100_000_000
    num_param_slots: Annotated[int, Field(ge=1)] = 2
    num_state_slots: Annotated[int, Field(ge=1)] = 2
    num_nvme_slots: Annotated[int, Field(ge=1)] = 2
    num_gradient_slots: Annotated[int, Field(ge=1)] = 2
    num_activation_slots: Annotated[int, Field(ge=1)] = 2
    spill_gradients: bool = False
    pinned_reads: bool = True
    update_order: Literal["forward", "backward"] = "forward"
    reduce_start: Literal["step", "backward"] = "backward"
    update_start: Literal["step", "backward"] = "step"
    overlap_next_forward: bool = True
    host_update: HostUpdate = HostUpdate.FUSED
    gradient_path: GradientPath = GradientPath.ONCE
    max_prefetch_params: Annotated[int, Field(ge=0)] | None = None
    max_reuse_params: Annotated[int, Field(ge=0)] | None = None
    module_hooks: bool = False
    loop: bool = False
    device_buffer_bytes: Annotated[int, Field(ge=0)] = 0
    clip: bool = True
    units: dict[str, UnitDecision]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.clip and self.update_start == "backward":
            raise ValueError(
                "clip needs the norm of all gradients, so no update can start during backward; "
                "set update_start to 'step' or clip to false"
            )
        if self.reduce_start == "step" and self.update_start == "backward":
            raise ValueError(
                "no update can start during backward if gradients are added up at the step; set update_start to 'step' "
                "or reduce_start to 'backward'"
            )
        if self.data_parallel % self.expert_parallel:
            raise ValueError(
                f"expert_parallel {self.expert_parallel} must divide data_parallel {self.data_parallel}, whose ranks "
                "share the experts; change one of them"
            )
        if self.pipeline_parallel > 1:
            self._check_pipeline()
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

    def _check_pipeline(self) -> None:
        if self.reduce_start != "step":
            raise ValueError(
                f"pipeline_parallel {self.pipeline_parallel} needs reduce_start 'step': the outer stages add up a tied "
                "embedding's gradient first; set it"
            )
        if self.zero_stage > 1:
            raise ValueError(
                f"zero_stage {self.zero_stage} with pipeline_parallel {self.pipeline_parallel}: every micro-batch "
                "would send its gradients again; set zero_stage to 0 or 1"
            )
        for name, unit in self.units.items():
            if unit.params != "gpu" or set(unit.update) - {Place.GPU}:
                raise ValueError(
                    f"unit {name}: pipeline_parallel {self.pipeline_parallel} keeps everything on the devices; set "
                    "params and update to 'gpu'"
                )

    @property
    def executable(self) -> bool:
        """Whether they describe what our executor does; other engines' extra copies and passes are only simulated."""
        return (
            self.gradient_path is GradientPath.ONCE
            and self.host_update is HostUpdate.FUSED
            and not (self.module_hooks or self.loop or self.device_buffer_bytes)
            and self.max_prefetch_params is self.max_reuse_params is None
            and self.reduce_start == "backward"
            and self.pipeline_parallel == 1
            and self.pinned_reads
        )

    @property
    def state_bytes_per_param(self) -> int:
        """Bytes of optimizer state per parameter, the fp32 master copy included."""
        return OPTIMIZERS[self.optimizer].state_bytes_per_param

    @property
    def resident_state_bytes_per_param(self) -> int:
        """The same beside weights on the device, which in fp32 are the master copy themselves."""
        return self.state_bytes_per_param - (4 if self.precision.master_is_weight else 0)

    @property
    def uses_storage(self) -> bool:
        """Whether anything lives on NVMe, or activations leave the device."""
        return any(u.params == "nvme" or u.offloads or Place.NVME in u.update for u in self.units.values())

    @property
    def num_state_versions(self) -> Literal[1, 2]:
        """How often state and weights on NVMe are there: ours are written beside the old version, others' in place.

        An engine with copies, passes or unpinned reads of its own is another one.
        """
        ours = self.gradient_path is GradientPath.ONCE and self.host_update is HostUpdate.FUSED and self.pinned_reads
        return 2 if ours else 1

    @property
    def spilled_bytes_per_param(self) -> int:
        """Bytes of a gradient that waits on NVMe: in the weights' type; in fp32 where an engine converts it before."""
        return self.precision.weight_bytes if self.gradient_path is GradientPath.ONCE else 4

    def stored_weight_bytes(self, unit: str) -> int:
        """Return the bytes per parameter of a unit's weights on NVMe: none where the fp32 master copy is the weight."""
        apart = self.units[unit].params == "nvme" and not self.precision.master_is_weight
        return self.precision.weight_bytes if apart else 0

    @property
    def degrees(self) -> Degrees:
        """How many ranks share what."""
        return _degrees(self.data_parallel, self.tensor_parallel, self.pipeline_parallel, self.expert_parallel)

    @property
    def num_devices(self) -> int:
        """All ranks, each with one device."""
        return self.degrees.num_devices

    def replicas(self, unit: Unit) -> int:
        """Return how many ranks have the same part of a unit: they add up its gradient, and share it under ZeRO."""
        return self.data_parallel // unit.parts(self.degrees) if self.data_parallel > 1 else 1

    def gathers(self, unit: Unit) -> bool:
        """Return whether a unit's parameters are sharded over ranks (ZeRO-3) and gathered for every use."""
        return self.zero_stage == 3 and self.replicas(unit) > 1

    def regathers(self, unit: Unit) -> bool:
        """Return whether ranks give each other the shards of a unit that they updated (ZeRO-1 and 2)."""
        return self.zero_stage in {1, 2} and self.replicas(unit) > 1

    def gathers_ahead(self, num_params: int) -> bool:
        """Return whether collectives of a unit of so many parameters run beside computing."""
        return self.max_prefetch_params is None or num_params <= self.max_prefetch_params

    def flushes(self, unit: str, place: Place) -> bool:
        """Return whether the gradients of a unit's subgroups that are updated there go to the host."""
        if place is Place.STREAM:
            return self.units[unit].streamed_gradients == "host"
        return place in {Place.CPU, Place.NVME}

    def serves(self, unit: str, place: Place) -> bool:
        """Return whether the host keeps weights for the device of a unit's subgroups that are updated there.

        It does of what it updates, and of all that is fetched; where its fp32 master copy is the weight, that serves.
        """
        params = self.units[unit].params
        if params == "nvme" or (self.precision.master_is_weight and place is not Place.NVME):
            return False
        return params == "host" or place in {Place.CPU, Place.NVME}

    def arrives_in_place(self, unit: str, place: Place) -> bool:
        """Return whether gradients of a unit's subgroups that are updated there take the place of the host's weights.

        [Note: In place] The device has the weights, and will be given new ones by the update that uses the gradient,
        so between their last copy to the device and that update nobody needs the host's: 2 bytes per parameter. The
        master copy is untouched, so nothing is lost with them. What is fetched again for a later micro-batch, or waits
        elsewhere, arrives apart.
        """
        often = self.num_micro_batches > 1 and self.units[unit].fetched
        spilled = place is Place.NVME and self.spill_gradients
        once = self.gradient_path is GradientPath.ONCE and not (often or spilled)
        return once and self.flushes(unit, place) and self.serves(unit, place)

    def weights_pass(self, unit: str) -> bool:
        """Return whether gradients come with a unit's streamed state, or new weights go with it."""
        weights_go = self.units[unit].fetched and not self.precision.master_is_weight
        return self.flushes(unit, Place.STREAM) or weights_go

    def shard_params(self, unit: Unit) -> int:
        """Return how many of a unit's parameters one rank updates (padded to equal shards)."""
        return -(-unit.num_params // self.replicas(unit)) if self.zero_stage >= 1 else unit.num_params

    def padded_params(self, unit: Unit) -> int:
        """Return how many parameters a unit has with what pads it to equal shards: fewer than ranks more."""
        return self.shard_params(unit) * (self.replicas(unit) if self.zero_stage >= 1 else 1)

    def piece_params(self, unit: Unit) -> tuple[int, ...]:
        """Return the sizes of a unit's subgroups on one rank, in order."""
        return subgroups(self.shard_params(unit), self.subgroup_params)

    def placed_pieces(self, unit: Unit) -> tuple[tuple[int, Place], ...]:
        """Return size and place of each of a unit's subgroups on one rank, in order."""
        return tuple(zip(self.piece_params(unit), self.units[unit.name].update, strict=True))


_degrees = functools.lru_cache(64)(Degrees)  # they are asked for thousands of times

SECTOR_PARAMS = 128
"""Values in float32 that are 512 B, the smallest sector."""


@functools.lru_cache(4096)  # equal layers are cut alike, in every schedule of a search
def subgroups(num_params: int, subgroup_params: int) -> tuple[int, ...]:
    """Return the sizes of the subgroups that some parameters are cut into: as few as may be, and as equal as can be.

    A short one at the end would take a slot of a ring, and turn in its queue, for next to nothing. Where that makes
    none longer than it may be, all but the last are whole sectors of a drive in float32: what comes behind one of them
    in memory can then be transferred to and from files without a copy.
    """
    count = -(-num_params // subgroup_params)
    if count <= 1:
        return (num_params,) * count
    whole = -(-num_params // (count * SECTOR_PARAMS)) * SECTOR_PARAMS
    if whole <= subgroup_params and (last := num_params - (count - 1) * whole) > 0:
        return (*(whole,) * (count - 1), last)
    size, longer = divmod(num_params, count)
    return (size + 1,) * longer + (size,) * (count - longer)
