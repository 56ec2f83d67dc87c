"""Decisions of other engines: ours, and what only they do. They are simulated, never executed."""

from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from planner.decisions import BF16, Decisions, Place, Precision
from planner.graph import Unit
from ullage.rivals.precision import RivalPrecision

LAYERS_IN_TURN = "layers in turn"
"""How a row says that layers move from device to device, which no plan of ours does."""

ONE_COPY = "one copy on the host"
"""How a row says that ranks fetch whole weights from memory that they share, and copy whole gradients there."""

OWN_KERNELS = "kernels of its own"
"""How a row says that it is not priced in the kernels of the request."""

REDUCE_BUCKET_PARAMS = 500_000_000
"""Gradients that DeepSpeed reduces, and copies to the host, at a time: its default ``reduce_bucket_size``."""


Amount = Annotated[int, Field(ge=0)]


class GradientPath(StrEnum):
    """How gradients leave the device."""

    ONCE = "once"  # as ours: in the weights' type, pinned, asynchronous, 2 B/param in bf16
    # DeepSpeed ZeRO-3 (up to 0.19): bf16 out and back in, and after the last micro-batch fp32 out.
    # The fp32 copy also converts. It runs on the stream that backward's kernels wait for, so its time is fully exposed.
    ZERO3_BLOCKING = "zero3-blocking"  # the last copy is unpinned, and the caller waits for it
    ZERO3_PAGEABLE = "zero3-pageable"  # no copy is pinned, and the caller waits for each: ``pin_memory`` is off
    ZERO3_PINNED = "zero3-pinned"  # the caller waits for the last copy, to a pinned buffer of the NVMe swapper
    ZERO3_ASYNC = "zero3-async"  # the last copy is pinned, and the caller does not wait
    # FSDP2 with ``CPUOffloadPolicy``: out in the master copy's type. Copies of the first micro-batch are pinned. The
    # caller waits for those of later ones, because it adds them (``_fsdp_collectives.py::foreach_reduce``).
    FSDP2 = "fsdp2"
    # Engines that stream layers: the device adds up. The sum waits on the host between micro-batches. After the last
    # one it stays, and with it the weights, until the update there, if that begins during backward.
    ON_DEVICE = "on-device"
    # Engines with passes of their own on the host: once, in the weights' type, pinned, to a buffer from where a pass of
    # the host takes them (``sum_bytes``, ``prepare_bytes``).
    BUFFERED = "buffered"

    def blocks(self, micro_batch: int, last: int) -> bool:
        """Return whether the caller waits until a micro-batch's gradient is on the host; ``last`` is the last one."""
        if self is GradientPath.FSDP2:
            return micro_batch > 0
        if self is GradientPath.ZERO3_PAGEABLE:
            return True
        return micro_batch == last and self in {GradientPath.ZERO3_BLOCKING, GradientPath.ZERO3_PINNED}

    def pins(self, micro_batch: int, *, is_final: bool) -> bool:
        """Return whether a copy of a micro-batch's gradient is to pinned memory; ``is_final``: the very last one."""
        if self is GradientPath.FSDP2:
            return micro_batch == 0
        return self is not GradientPath.ZERO3_PAGEABLE and not (is_final and self is GradientPath.ZERO3_BLOCKING)

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

    # As ours, one pass: gradient and state in, state and bf16 weights out; pinned uploads beside other updates.
    FUSED = "fused"
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


class RivalDecisions(Decisions):
    """What another engine decides: the fields of ours, and what it does differently.

    Attributes:
        pinned_reads: whether parameters from NVMe are read into pinned buffers, from which copies to the device are
            fast.
        reduce_start: when ranks reduce gradients that accumulate on the device: in ``backward``, each unit's as soon as
            it is final, or all at the ``step``.
        host_update: how the host updates.
        gradient_path: how gradients leave the device.
        max_prefetch_params: a unit with more parameters is gathered only when it is reached, and the next backward
            waits for the reduction of its gradient; ``None``: gathers run as far ahead as slots allow. 0 is DeepSpeed
            with a prefetch bucket of 0.
        max_live_params: parameters are gathered ahead as long as no more than that are there; ``None``: there is no
            limit but that of slots.
        max_reuse_params: gathered parameters are released at once if more parameters than that are used before their
            next use (DeepSpeed's reuse distance); ``None``: only when their slot is needed.
        module_hooks: whether Python hooks around every module gather and release its parameters, and gradients are
            passed over on the device (DeepSpeed ZeRO-3, [Note: Reductions]).
        inputs_on_host: whether inputs of segments that are recomputed wait on the host.
        loop: whether the script's own work between iterations (logging, data, waiting for the device) counts, as in
            published times.
        device_buffer_bytes: other device memory of an engine: its buckets and staging buffers.
        step_scratch_bytes: what updates on the device hold during the step, for each parameter that they take at once,
            beside gradients and state.
        step_scratch_params: at most so many parameters are taken at once; ``None``: all.
        chain_bytes: what updates on the device move for each parameter beside one pass, as a chain of operators does.
        shards_masters: whether ranks shard only the master copies, and cast what they gather (FSDP): no shard of
            weights in their own type waits on a device.
        output_bytes: what the loop keeps of a micro-batch's output while its backward runs.
        all_reduces: whether ranks all-reduce gradients of which each needs its share only (DeepSpeed's ZeRO-1 and 2).
        reduces_once: whether each rank adds up whole gradients, also of sharded parameters, and ranks reduce them with
            the last micro-batch only (``no_sync`` of PyTorch's FSDP).
        adds_in_products: whether the engine's own kernels add gradients to those of earlier micro-batches.
        dtensors: whether parameters and gradients are ``DTensor`` ([Note: FSDP2] in
            :mod:`ullage.rivals.passes.computing`).
        bucket_params: gradients that are reduced after the last backward are joined into all-reduces of at most so many
            parameters (DeepSpeed). 0: each unit has its own.
        recompute_block: the engine recomputes so many segments in a row before their backward, keeps only their
            outputs, and then runs each segment's forward once more (MegaTrain). It fetches parameters for each of
            these uses, into another buffer each time. 0: it recomputes once.
        layer_by_layer: all micro-batches pass a segment before the next segment begins, and gradients of a segment
            leave the device once. Inputs of segments travel through the host. If there are several ranks, each works
            on other segments of the same batch at any time (RoundPipe).
        publishes_late: the host's updates run beside the next iteration, which therefore uses weights that are one
            update old. Its end publishes them.
        num_steps: iterations of the user's batch that one iteration of the schedule stands for (ZenFlow).
        fetches_whole: ranks fetch whole weights from host memory, where others gather shards: from one copy that they
            have ``together``, or each from its ``own``. In the first case gradients that are ``buffered`` leave whole,
            too, and are added up there; in the second, those that leave between micro-batches do.
        cast_bytes: bytes of host memory per parameter that a cast of the master copy moves before each fetch; then the
            host has no other weights.
        awaits_updates: whether a gradient leaves the device only when the gradient before it was used: both have one
            buffer on the host.
        launches_graphs: whether the host issues each unit's kernels at once, as a CUDA graph.
        sum_bytes: bytes of host memory per parameter that a pass moves after each copy of a gradient to the host.
        prepare_bytes: the same, of a pass before the update; ``None``: as ``host_update`` says.
        publish_bytes: the same, of a pass after the update.
        host_bytes: other bytes of host memory that the engine holds per parameter that it updates.
        head_percent: the share of the last segment's saved activations and workspace that the engine holds, because its
            own head makes logits in chunks, or their gradient in place.
    """

    precision: Precision | RivalPrecision = BF16
    pinned_reads: bool = True
    reduce_start: Literal["step", "backward"] = "backward"
    host_update: HostUpdate = HostUpdate.FUSED
    gradient_path: GradientPath = GradientPath.ONCE
    max_prefetch_params: Amount | None = None
    max_live_params: Amount | None = None
    max_reuse_params: Amount | None = None
    module_hooks: bool = False
    inputs_on_host: bool = False
    loop: bool = False
    device_buffer_bytes: Amount = 0
    step_scratch_bytes: Amount = 0
    step_scratch_params: Annotated[int, Field(gt=0)] | None = None
    chain_bytes: Amount = 0
    shards_masters: bool = False
    output_bytes: Amount = 0
    all_reduces: bool = False
    reduces_once: bool = False
    adds_in_products: bool = False
    dtensors: bool = False
    bucket_params: Amount = 0
    recompute_block: Amount = 0
    layer_by_layer: bool = False
    publishes_late: bool = False
    num_steps: Annotated[int, Field(ge=1)] = 1
    fetches_whole: Literal["together", "own"] | None = None
    cast_bytes: Amount = 0
    awaits_updates: bool = False
    launches_graphs: bool = False
    sum_bytes: Amount = 0
    prepare_bytes: Amount | None = None
    publish_bytes: Amount = 0
    host_bytes: Amount = 0
    head_percent: Annotated[int, Field(ge=0, le=100)] = 100

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.reduce_start == "step" and self.update_start == "backward":
            raise ValueError(
                "no update can start during backward if gradients are added up at the step; set update_start to 'step' "
                "or reduce_start to 'backward'"
            )
        fsdp2 = self.gradient_path is GradientPath.FSDP2
        if self.fp8_weights and fsdp2:
            raise ValueError(f"fp8_weights: policy {self.policy!r} fetches them in another type; leave fp8_weights out")
        if fsdp2:
            _check_fsdp2(self)
        if self.gradient_path is GradientPath.ON_DEVICE:
            _check_on_device(self)
        if isinstance(self.precision, RivalPrecision) and self.precision.gradients:
            _check_gradients(self, self.precision.gradients)
        return self

    @property
    def fills_buckets(self) -> bool:
        """Whether gradients that leave the device wait for one another; see :mod:`ullage.rivals.passes.gradients`."""
        blocking = self.gradient_path in {GradientPath.ZERO3_BLOCKING, GradientPath.ZERO3_PAGEABLE}
        return blocking and self.update_start == "step"

    @property
    def num_state_versions(self) -> Literal[1, 2]:
        """Versions of state and weights on NVMe: others write in place."""
        ours = self.gradient_path is GradientPath.ONCE and self.host_update is HostUpdate.FUSED and self.pinned_reads
        return 2 if ours else 1

    @property
    def resident_weight_bytes_per_param(self) -> int:
        """Bytes of state per parameter that a resident weight saves; see :class:`planner.decisions.Sharding`."""
        return self.precision.weight_bytes if self.shards_masters else super().resident_weight_bytes_per_param

    @property
    def moved_bytes_per_param(self) -> int:
        """Bytes per parameter of a fetch from the host, and of a gradient that is copied there once.

        FSDP2 moves both in the type of the master copy, which it casts on the device.
        """
        if self.fetches_fp8:
            return 1
        fsdp2 = self.gradient_path is GradientPath.FSDP2
        return self.precision.master_bytes if fsdp2 else self.precision.weight_bytes

    @property
    def spilled_bytes_per_param(self) -> int:
        """Bytes per parameter of a gradient that waits on the host or on NVMe, which may be converted to fp32 first."""
        if self.gradient_path is GradientPath.ON_DEVICE:
            return self.precision.gradient_bytes
        return self.moved_bytes_per_param if self.gradient_path.is_one_copy else 4

    @property
    def shared_in_words(self) -> str:
        """How data-parallel ranks share the model, in words."""
        if self.fetches_whole == "together" and self.zero_stage == 3:
            return ONE_COPY
        return LAYERS_IN_TURN if self.layer_by_layer else super().shared_in_words

    @property
    def numerics(self) -> str | None:
        """How an engine changes what is computed, beyond the order of sums, in words; ``None`` if it does not."""
        parts = []
        if self.num_steps > 1:
            parts.append(
                f"the host updates every {self.num_steps} iterations, the device the largest gradients in each"
            )
        if self.publishes_late:
            parts.append("weights are one update old")
        if self.precision.rounds and not self.precision.can_be_kept(self.optimizer):
            parts.append(f"no master copy beside weights in {self.precision.weights}")
        return "; ".join(parts) or None

    def offloads(self, unit: str) -> bool:
        """Return whether activations of a unit leave the device between forward and backward."""
        decided = self.units[unit]
        return decided.offloads or (self.inputs_on_host and decided.activations == "recompute")

    @property
    def piles_up(self) -> bool:
        """Whether whole gradients that stay on the device add up there until the last micro-batch."""
        return self.reduces_once or super().piles_up

    def gathers(self, unit: Unit) -> bool:
        """Return whether a unit's parameters are sharded over ranks (ZeRO-3) and gathered for every use."""
        return not (self.layer_by_layer or self.fetches_whole is not None) and super().gathers(unit)

    def regathers(self, unit: Unit) -> bool:
        """Return whether ranks all-gather a unit's shards after the update, if all of it stays on the device."""
        if not self.fetches_whole:
            return super().regathers(unit)
        stays = self.zero_stage > 0 and not self.units[unit.name].fetched
        return stays and not self.sums_on_host and unit.num_params > 0 and self.replicas(unit) > 1

    def replicates(self, unit: str) -> bool:
        """Return whether each rank's host memory has all of a unit's weights and gradients (ShadowSpill's ranks)."""
        return self.fetches_whole == "own" and self.units[unit].fetched

    @property
    def sums_on_host(self) -> bool:
        """Whether ranks copy whole gradients to host memory, where they are added up."""
        return self.fetches_whole is not None and self.gradient_path is GradientPath.BUFFERED

    @property
    def sums_leave(self) -> bool:
        """Whether sums of gradients that wait on the host are there until the step, when their norm is known."""
        return self.gradient_path is GradientPath.ON_DEVICE and self.update_start == "step"

    @property
    def fetches_fp8(self) -> bool:
        """Whether the host has weights that the device cast to fp8 beside others, and these are fetched."""
        on_device = self.gradient_path is GradientPath.ON_DEVICE
        return on_device and self.fetches_whole == "together" and self.precision.products is not None

    def gathers_ahead(self, num_params: int) -> bool:
        """Return whether collectives of a unit with ``num_params`` parameters overlap with computing."""
        return self.max_prefetch_params is None or num_params <= self.max_prefetch_params

    def serves(self, unit: str, place: Place) -> bool:
        """Return whether the host keeps weights for the device: not in FSDP2, where they are in the state."""
        there = (self.gradient_path is GradientPath.FSDP2 or self.cast_bytes > 0) and place is not Place.NVME
        return not there and super().serves(unit, place)

    def arrives_in_place(self, unit: str, place: Place) -> bool:
        """Return whether gradients overwrite the host's weights; only ours do."""
        return self.gradient_path is GradientPath.ONCE and super().arrives_in_place(unit, place)

    def weights_pass(self, unit: str) -> bool:
        """Return whether streamed state of a unit travels with its gradients, or with its new weights."""
        if self.gradient_path is GradientPath.ON_DEVICE:
            leaves = self.sums_leave and self.flushes(unit, Place.STREAM)
            return leaves or (self.units[unit].fetched and not self.weight_in_state)
        return super().weights_pass(unit)


def _check_on_device(decisions: RivalDecisions) -> None:
    if decisions.data_parallel > 1 and not decisions.zero_stage:
        raise ValueError(
            f"data_parallel is {decisions.data_parallel}, but gradient_path 'on-device' has ranks that share updates; "
            "set zero_stage to 1 or more"
        )
    for name, unit in decisions.units.items():
        if places := {place for place in unit.update if place.by_host}:
            raise ValueError(
                f"unit {name}: gradient_path 'on-device' needs updates on the device, but there is one on "
                f"{str(min(places))!r}; choose 'gpu' or 'stream'"
            )


def _check_gradients(decisions: RivalDecisions, gradients: str) -> None:
    for name, unit in decisions.units.items():
        if places := set(unit.update) - {Place.GPU}:
            raise ValueError(
                f"unit {name}: gradients in {gradients} stay on the device, but an update is on {str(min(places))!r}; "
                "choose 'gpu'"
            )


def _check_fsdp2(decisions: RivalDecisions) -> None:
    for name, unit in decisions.units.items():
        if set(unit.update) - {Place.CPU} or (unit.update and unit.params != "host"):
            raise ValueError(
                f"unit {name}: gradient_path 'fsdp2' offloads everything; set its params to 'host' and update to 'cpu'"
            )
