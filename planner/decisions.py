"""Decisions: what the planner chooses, per unit and for the whole iteration."""

import functools
from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from planner.graph import Degrees, Unit
from planner.habits import Habits
from planner.optimizers import OPTIMIZERS, Optimizer
from planner.subgroups import Subgroup, UnitLayout, unit_layout

Activations = Literal["keep", "recompute", "offload", "offload-nvme", "offload-input"]


class Place(StrEnum):
    """Where a subgroup's optimizer state lives, and who updates it."""

    GPU = "gpu"  # resident on the device, updated there
    STREAM = "stream"  # lives on the host, streamed in, updated on the device, streamed back
    CPU = "cpu"  # lives on the host, updated by the host
    NVME = "nvme"  # lives on NVMe, read into host buffers, updated by the host, written back


class GradientPath(StrEnum):
    """How gradients leave the device."""

    ONCE = "once"  # in the weights' type, pinned, asynchronous: 2 B/param in bf16
    # DeepSpeed ZeRO-3 (up to 0.19): bf16 out and back in, and after the last micro-batch fp32 out [Note: Accumulation].
    # The fp32 copy also converts. It runs on the stream that backward's kernels wait for, so its time is fully exposed.
    ZERO3_BLOCKING = "zero3-blocking"  # the last copy is unpinned, and the caller waits for it
    ZERO3_PINNED = "zero3-pinned"  # the caller waits for the last copy, to a pinned buffer of the NVMe swapper
    ZERO3_ASYNC = "zero3-async"  # the last copy is pinned, and the caller does not wait
    # FSDP2 with ``CPUOffloadPolicy``: out in the master copy's type. Copies of the first micro-batch are pinned. The
    # caller waits for those of later ones, because it adds them (``_fsdp_collectives.py::foreach_reduce``).
    FSDP2 = "fsdp2"
    # Engines that stream layers: the device adds up. The sum waits on the host between micro-batches. After the last
    # one it stays, and with it the weights, until the update there.
    ON_DEVICE = "on-device"
    # Engines with passes of their own on the host: once, in the weights' type, pinned, to a buffer from where a pass of
    # the host takes them (:class:`planner.habits.Habits`).
    BUFFERED = "buffered"

    def blocks(self, micro_batch: int, last: int) -> bool:
        """Return whether the caller waits until a micro-batch's gradient is on the host; ``last`` is the last one."""
        if self is GradientPath.FSDP2:
            return micro_batch > 0
        return micro_batch == last and self in {GradientPath.ZERO3_BLOCKING, GradientPath.ZERO3_PINNED}

    @property
    def is_deepspeed(self) -> bool:
        """Whether DeepSpeed moves them."""
        return self.value.startswith("zero3")

    @property
    def is_one_copy(self) -> bool:
        """Whether each micro-batch's gradient is copied to the host once, where it is added to the sum."""
        return self in {GradientPath.ONCE, GradientPath.FSDP2, GradientPath.BUFFERED}


class HostUpdate(StrEnum):
    """How the host updates a subgroup and copies it to the device."""

    FUSED = "fused"  # one pass: gradient and state in, state and bf16 weights out; pinned uploads beside other updates
    # DeepSpeed: a pass that scales gradients; AdamW; then an unpinned copy that casts. The next update waits for it.
    DEEPSPEED = "deepspeed"
    # Deep Optimizer States: AdamW; then a pinned upload of fp32 weights, cast on the device. The next update waits for
    # it.
    DEVICE_CAST = "device-cast"
    # DeepSpeed's Super-Offload: a process of its own copies the gradient, then AdamW. After the last backward, its
    # result is copied, the gradient is scaled (``superoffload_stage3.py``), and an unpinned copy casts the weights. The
    # next of these waits for it.
    SUPER_OFFLOAD = "super-offload"

    @property
    def is_pinned(self) -> bool:
        """Whether weights are uploaded from pinned memory."""
        return self not in {HostUpdate.DEEPSPEED, HostUpdate.SUPER_OFFLOAD}


class Frozen(BaseModel):
    """Immutable; an unknown field is an error that names it."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class UnitDecision(Frozen):
    """Where one unit's parameters, activations and optimizer state live.

    Attributes:
        params: ``gpu`` keeps them (or the rank's shard) on the device; ``host`` fetches them into a slot for every use;
            ``nvme`` reads them into a host buffer before that.
        activations: ``keep`` saved activations, ``recompute`` them, or ``offload`` outputs of products to the host
            (``offload-nvme``: on to NVMe) and recompute the rest; ``offload-input`` offloads only the segment's input
            and recomputes everything. Equal for all units of one segment.
        update: one place per subgroup of the unit's (sharded) parameters, in order.
        streamed_gradients: where gradients of streamed subgroups wait for their update: on the ``gpu``, or on the
            ``host``, from where they come back with their state.
    """

    params: Literal["gpu", "host", "nvme"]
    activations: Activations
    update: tuple[Place, ...]
    streamed_gradients: Literal["gpu", "host"] = "host"

    @property
    def fetched(self) -> bool:
        """Whether the parameters are copied from the host for every use."""
        return self.params != "gpu"

    @property
    def offloads(self) -> bool:
        """Whether activations leave the device between forward and backward."""
        return self.activations in {"offload", "offload-nvme", "offload-input"}


# Over gradients in buffers: read for the check and for the norm, read and written to scale, written to clear.
_GRADIENT_PASSES = 5


class Precision(Frozen):
    """Types of weights, gradients and optimizer state.

    Attributes:
        weights: the type of weights and activations.
        state: the type of optimizer state; ``None`` is fp32, the only one that our executor has.
        gradients: the type in which gradients are summed over micro-batches and ranks; ``None`` is that of weights, the
            only one that our executor has.
        master: the type of the master copy; ``None`` is that of the rest of the state, the only one that our executor
            has. A master copy in bf16 is the weight itself.
    """

    weights: Literal["bf16", "fp32"]
    state: Literal["bf16"] | None = None
    gradients: Literal["fp32"] | None = None
    master: Literal["bf16"] | None = None

    @model_validator(mode="after")
    def _state_fits(self) -> Self:
        for name, found in (("state", self.state), ("master", self.master)):
            if found and self.weights != found:
                raise ValueError(f"{name} {found} needs weights of the same type, not {self.weights}; change one")
        return self

    @property
    def weight_bytes(self) -> Literal[2, 4]:
        """Bytes of one weight."""
        return 2 if self.weights == "bf16" else 4

    @property
    def gradient_bytes(self) -> Literal[2, 4]:
        """Bytes of one gradient."""
        return 4 if self.gradients else self.weight_bytes

    @property
    def master_bytes(self) -> Literal[2, 4]:
        """Bytes of one value of the master copy."""
        return 2 if self.state or self.master else 4

    @property
    def master_is_weight(self) -> bool:
        """Whether the optimizer's master copy is the weight itself, if both are in one place."""
        return self.weights == (self.state or self.master or "fp32")

    def state_bytes_per_param(self, optimizer: Optimizer) -> int:
        """Return the bytes of optimizer state per parameter, the master copy included."""
        return self.master_bytes + (2 if self.state else 4) * OPTIMIZERS[optimizer].num_buffers

    def update_bytes_per_param(self, optimizer: Optimizer) -> int:
        """Return the bytes that an update moves: gradient and state in, state and (if it is apart) weight out.

        Where gradients have a type of their own, they have buffers, which are checked, clipped and cleared in passes
        of their own (Megatron-Core's ``param_and_grad_buffer.py`` and ``clip_grads.py``).
        """
        apart = 0 if self.master_is_weight else self.weight_bytes
        passes = _GRADIENT_PASSES * self.gradient_bytes if self.gradients else 0
        return self.gradient_bytes + 2 * self.state_bytes_per_param(optimizer) + apart + passes


BF16, FP32 = Precision(weights="bf16"), Precision(weights="fp32")


class Decisions(Frozen):
    """Everything that the planner chooses. With the model and the batch, it determines the schedule.

    Attributes:
        policy: the engine policy that these decisions follow or started from.
        optimizer: the optimizer; with the precision it determines the size of the state.
        micro_batch: sequences per forward, on each rank.
        num_micro_batches: forwards+backwards per iteration (gradient accumulation).
        data_parallel: ranks that share the model's data; each has one device.
        tensor_parallel: ranks that share every layer, per data-parallel rank; units are then one rank's share.
        pipeline_parallel: stages that share the layers, per data-parallel rank.
        expert_parallel: data-parallel ranks that share the experts of every layer.
        expert_units: units into which a rank's experts of a layer are divided.
        zero_stage: what data-parallel ranks shard: 1 and 2 optimizer state and gradients, 3 parameters too.
        subgroup_params: the most parameters of one subgroup, the grain of the optimizer step.
        num_param_slots: slots in each ring for fetched or gathered parameters.
        num_state_slots: slots for streamed optimizer state.
        num_nvme_slots: host buffers for optimizer state from NVMe. With 1, reads, updates and writes take turns. With
            2, one subgroup is read or written while another is updated. With 3, all overlap.
        num_gradient_slots: units by which backward may run ahead of gradient copies to the host.
        num_activation_slots: units by which forward may run ahead of offloads, and reloads ahead of backward.
        spill_gradients: whether gradients wait on NVMe if their state is there.
        pinned_reads: whether parameters from NVMe are read into pinned buffers, from which copies to the device are
            fast.
        update_order: the order of updates: by next forward, or as gradients arrive (always so if updates start during
            backward).
        reduce_start: when ranks reduce gradients that accumulate on the device: in ``backward``, each unit's as soon as
            it is final, or all at the ``step``.
        update_start: ``step``: when all gradients are there; ``backward``: each as soon as its own gradient is there.
        overlap_next_forward: whether only a unit's own next forward waits for its update, not the whole next iteration.
        host_update: how the host updates.
        gradient_path: how gradients leave the device.
        max_prefetch_params: a unit with more parameters is gathered only when it is reached, and the next backward
            waits for the reduction of its gradient; ``None``: gathers run as far ahead as slots allow.
        max_reuse_params: gathered parameters are released at once if more parameters than that are used before their
            next use (DeepSpeed's reuse distance); ``None``: only when their slot is needed.
        module_hooks: whether Python hooks around every module gather and release its parameters (DeepSpeed ZeRO-3).
        loop: whether the script's own work between iterations (logging, data, waiting for the device) counts, as in
            published times.
        device_buffer_bytes: other device memory of an engine: its buckets and staging buffers.
        clip: whether gradients are clipped by their global norm; every update then waits for the norm.
        habits: what else another engine does; ``None`` for ours, and for engines that do nothing else.
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
    habits: Habits | None = None
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
        check_whole_matrices(self.optimizer, self.tensor_parallel)
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

    @model_validator(mode="after")
    def _consistent_gradients(self) -> Self:
        if self.precision.gradients:
            self._check_gradients()
        if self.gradient_path is GradientPath.FSDP2:
            self._check_fsdp2()
        if self.gradient_path is GradientPath.ON_DEVICE:
            self._check_on_device()
        return self

    def _check_on_device(self) -> None:
        if self.data_parallel > 1:
            raise ValueError(
                f"data_parallel is {self.data_parallel}, but gradient_path 'on-device' has one rank; set it to 1"
            )
        for name, unit in self.units.items():
            if places := set(unit.update) & {Place.CPU, Place.NVME}:
                raise ValueError(
                    f"unit {name}: gradient_path 'on-device' needs updates on the device, but there is one on "
                    f"{str(min(places))!r}; choose 'gpu' or 'stream'"
                )

    def _check_fsdp2(self) -> None:
        for name, unit in self.units.items():
            if set(unit.update) - {Place.CPU} or (unit.update and unit.params != "host"):
                raise ValueError(
                    f"unit {name}: gradient_path 'fsdp2' offloads everything; set its params to 'host' and update to "
                    "'cpu'"
                )

    def _check_gradients(self) -> None:
        for name, unit in self.units.items():
            if places := set(unit.update) - {Place.GPU}:
                raise ValueError(
                    f"unit {name}: gradients in {self.precision.gradients} stay on the device, but an update is on "
                    f"{str(min(places))!r}; choose 'gpu'"
                )

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
        """Whether our executor can run them; other engines' extra copies and passes are only simulated."""
        return (
            self.gradient_path is GradientPath.ONCE
            and self.host_update is HostUpdate.FUSED
            and self.habits is None
            and not (self.module_hooks or self.loop or self.device_buffer_bytes)
            and self.max_prefetch_params is self.max_reuse_params is None
            and self.reduce_start == "backward"
            and self.pipeline_parallel == 1
            and self.pinned_reads
            and self.precision in {BF16, FP32}
            and all(unit.activations != "offload-input" for unit in self.units.values())
        )

    @property
    def state_bytes_per_param(self) -> int:
        """Bytes of optimizer state per parameter, the master copy included; for Muon, of its matrices."""
        return self.precision.state_bytes_per_param(self.optimizer)

    @property
    def other_state_bytes_per_param(self) -> int:
        """The same of parameters that are no hidden matrices."""
        return self.precision.state_bytes_per_param(OPTIMIZERS[self.optimizer].others or self.optimizer)

    @property
    def resident_weight_bytes_per_param(self) -> int:
        """Bytes of state per parameter that a resident weight saves, because it may be the master copy itself."""
        return self.precision.weight_bytes if self.precision.master_is_weight else 0

    @property
    def unstreamed_weight_bytes_per_param(self) -> int:
        """Bytes of state per parameter that streaming saves; a master copy that is the weight may be there already."""
        return self.resident_weight_bytes_per_param if self.gradient_path is GradientPath.ON_DEVICE else 0

    @property
    def layer_by_layer(self) -> bool:
        """Whether all micro-batches pass a segment before the next one begins; see :class:`planner.habits.Habits`."""
        return self.habits is not None and self.habits.layer_by_layer

    @property
    def uses_storage(self) -> bool:
        """Whether anything lives on NVMe, or activations leave the device."""
        return any(u.params == "nvme" or u.offloads or Place.NVME in u.update for u in self.units.values())

    @property
    def num_state_versions(self) -> Literal[1, 2]:
        """Versions of state and weights on NVMe: our engine writes beside the old version, others in place.

        Decisions with extra copies or passes, or with unpinned reads, are those of other engines.
        """
        ours = self.gradient_path is GradientPath.ONCE and self.host_update is HostUpdate.FUSED and self.pinned_reads
        return 2 if ours else 1

    @property
    def spilled_bytes_per_param(self) -> int:
        """Bytes per parameter of a gradient on NVMe: in the weights' type, or in fp32 if it is converted first."""
        if self.gradient_path.is_one_copy:
            return self.flushed_bytes_per_param
        return 4

    @property
    def master_is_fetched(self) -> bool:
        """Whether fetched weights are the master copy: FSDP2 casts it on the device."""
        return self.precision.master_is_weight or self.gradient_path is GradientPath.FSDP2

    @property
    def fetched_bytes_per_param(self) -> int:
        """Bytes per parameter of a fetch from the host."""
        fsdp2 = self.gradient_path is GradientPath.FSDP2
        return self.precision.master_bytes if fsdp2 else self.precision.weight_bytes

    @property
    def flushed_bytes_per_param(self) -> int:
        """Bytes per parameter of a gradient that is copied to the host once: FSDP2 has the type of the master copy."""
        return self.fetched_bytes_per_param

    def stored_weight_bytes(self, unit: str) -> int:
        """Return the bytes per parameter of a unit's weights on NVMe: 0 if the fp32 master copy is the weight."""
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
        """Return the number of ranks with the same part of a unit. They reduce its gradient, and shard it in ZeRO."""
        return self.data_parallel // unit.parts(self.degrees) if self.data_parallel > 1 else 1

    def gathers(self, unit: Unit) -> bool:
        """Return whether a unit's parameters are sharded over ranks (ZeRO-3) and gathered for every use."""
        return self.zero_stage == 3 and self.replicas(unit) > 1 and not self.layer_by_layer

    def regathers(self, unit: Unit) -> bool:
        """Return whether ranks all-gather a unit's shards after the update (ZeRO-1 and 2)."""
        return self.zero_stage in {1, 2} and unit.num_params > 0 and self.replicas(unit) > 1

    def gathers_ahead(self, num_params: int) -> bool:
        """Return whether collectives of a unit with ``num_params`` parameters overlap with computing."""
        return self.max_prefetch_params is None or num_params <= self.max_prefetch_params

    def flushes(self, unit: str, place: Place) -> bool:
        """Return whether gradients of a unit's subgroups with this update place go to the host."""
        if place is Place.STREAM:
            return self.units[unit].streamed_gradients == "host"
        return place in {Place.CPU, Place.NVME}

    def serves(self, unit: str, place: Place) -> bool:
        """Return whether the host keeps weights for the device, of a unit's subgroups with this update place.

        It keeps weights that it updates and weights that are fetched. If the fp32 master copy is the weight, no extra
        copy is needed.
        """
        params = self.units[unit].params
        if params == "nvme" or (self.master_is_fetched and place is not Place.NVME):
            return False
        return params == "host" or place in {Place.CPU, Place.NVME}

    def arrives_in_place(self, unit: str, place: Place) -> bool:
        """Return whether gradients of a unit's subgroups with this update place overwrite the host's weights.

        [Note: In place] The device has the weights, and the update that uses the gradient makes new ones. So nobody
        needs the host's weights between their last copy to the device and that update: 2 bytes per parameter. The
        master copy is untouched, so nothing is lost. Weights that are fetched again for a later micro-batch are not
        overwritten, and gradients that wait elsewhere do not overwrite any.
        """
        often = self.num_micro_batches > 1 and self.units[unit].fetched
        spilled = place is Place.NVME and self.spill_gradients
        once = self.gradient_path is GradientPath.ONCE and not (often or spilled)
        return once and self.flushes(unit, place) and self.serves(unit, place)

    def weights_pass(self, unit: str) -> bool:
        """Return whether streamed state of a unit travels with its gradients, or with its new weights."""
        weights_go = self.units[unit].fetched and not self.precision.master_is_weight
        gradients_come = self.flushes(unit, Place.STREAM) and self.gradient_path is not GradientPath.ON_DEVICE
        return gradients_come or weights_go

    def shard_params(self, unit: Unit) -> int:
        """Return the number of a unit's trained parameters that one rank updates, padded to equal shards."""
        if OPTIMIZERS[self.optimizer].others:
            return self.layout(unit).shard_params
        return -(-unit.num_params // self.replicas(unit)) if self.zero_stage >= 1 else unit.num_params

    def padded_params(self, unit: Unit) -> int:
        """Return the number of a unit's trained parameters, padded to equal shards."""
        return self.shard_params(unit) * (self.replicas(unit) if self.zero_stage >= 1 else 1)

    def frozen_shard_bytes(self, unit: Unit) -> int:
        """Return the bytes of a unit's frozen weights that one rank keeps: all, or in ZeRO-3 a padded shard."""
        num_bytes = unit.frozen_bytes(self.precision.weight_bytes)
        if not num_bytes or not self.gathers(unit):
            return num_bytes
        return -(-num_bytes // (self.replicas(unit) * FROZEN_ALIGNMENT_BYTES)) * FROZEN_ALIGNMENT_BYTES

    def frozen_padded_bytes(self, unit: Unit) -> int:
        """Return the bytes of a unit's frozen weights, padded to equal shards."""
        return self.frozen_shard_bytes(unit) * (self.replicas(unit) if self.gathers(unit) else 1)

    def exchanged_params(self, unit: Unit) -> int:
        """Return the number of values in a collective over a unit's trained parameters.

        Padding between whole matrices counts, see [Note: Whole matrices] in :mod:`planner.subgroups`.
        """
        return self.padded_params(unit) if self.layout(unit).keeps_whole else unit.num_params

    def layout(self, unit: Unit) -> UnitLayout:
        """Return the layout of a unit's trained parameters."""
        num_shards = self.replicas(unit) if self.zero_stage >= 1 else 1
        return unit_layout(unit.extents, self.optimizer, num_shards, self.subgroup_params)

    def subgroups(self, unit: Unit) -> tuple[Subgroup, ...]:
        """Return a unit's subgroups on one rank, in order."""
        return self.layout(unit).subgroups

    def placed_subgroups(self, unit: Unit) -> tuple[Subgroup, ...]:
        """Return the subgroups whose places bounds weigh: not those of vectors beside the matrices of Muon.

        What these need comes on top of what bounds count.
        """
        cut = self.subgroups(unit)
        return tuple(subgroup for subgroup in cut if subgroup.matrices) or cut

    def placed_params(self, unit: Unit) -> int:
        """Return the parameters of :meth:`placed_subgroups`."""
        if OPTIMIZERS[self.optimizer].others:
            return sum(subgroup.num_params for subgroup in self.placed_subgroups(unit))
        return self.shard_params(unit)

    def placed_state_bytes_per_param(self, unit: Unit) -> int:
        """Return the bytes of state per parameter of :meth:`placed_subgroups`."""
        kinds = {subgroup.kind for subgroup in self.placed_subgroups(unit)} or {self.optimizer}
        return min(map(self.precision.state_bytes_per_param, kinds))

    def state_bytes(self, subgroup: Subgroup) -> int:
        """Return the bytes of a subgroup's optimizer state, the master copy included."""
        return self.precision.state_bytes_per_param(subgroup.kind) * subgroup.num_params

    def piece_params(self, unit: Unit) -> tuple[int, ...]:
        """Return the sizes of a unit's subgroups on one rank, in order."""
        return self.layout(unit).sizes

    def placed_pieces(self, unit: Unit) -> tuple[tuple[int, Place], ...]:
        """Return size and place of each of a unit's subgroups on one rank, in order."""
        return tuple(zip(self.piece_params(unit), self.units[unit.name].update, strict=True))


def check_whole_matrices(optimizer: Optimizer, tensor_parallel: int | None) -> None:
    """Check that ranks have whole matrices, if the optimizer needs them.

    Raises:
        ValueError: they share them.
    """
    if tensor_parallel and tensor_parallel > 1 and OPTIMIZERS[optimizer].others:
        raise ValueError(
            f"tensor_parallel is {tensor_parallel}, but {OPTIMIZERS[optimizer].words} works on whole matrices; set it "
            "to 1, or choose another optimizer"
        )


_degrees = functools.lru_cache(64)(Degrees)  # a search needs them thousands of times

FROZEN_ALIGNMENT_BYTES = 16
"""Shards of frozen weights begin at a multiple of it, so that values of every type do."""
