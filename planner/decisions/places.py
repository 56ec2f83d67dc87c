"""Where a unit's parameters, gradients, activations and optimizer state live, and how they move."""

from enum import StrEnum
from typing import Literal

from hwprofiles.quantity import Frozen

Activations = Literal["keep", "recompute", "offload", "offload-nvme", "offload-input"]


class Place(StrEnum):
    """Where a subgroup's optimizer state lives, and who updates it."""

    GPU = "gpu"  # resident on the device, updated there
    STREAM = "stream"  # lives on the host, streamed in, updated on the device, streamed back
    CPU = "cpu"  # lives on the host, updated by the host
    NVME = "nvme"  # lives on NVMe, read into host buffers, updated by the host, written back


REDUCE_BUCKET_PARAMS = 500_000_000
"""Gradients that DeepSpeed reduces, and copies to the host, at a time: its default ``reduce_bucket_size``."""


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
