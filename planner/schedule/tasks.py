"""The schedule: what happens in one iteration, as plain data.

[Note: Semantics] A lane runs its tasks first-in first-out, in issue order. A task starts when its lane is free and its
predecessors have ended. While it runs, it shares resources. It ends when its work is done. Nothing else orders tasks:
reuse of memory and the host's issue delay are tasks and dependencies too, never habits of an executor. The issue order
is the order of ``Schedule.tasks``. A task may only depend on tasks that were issued earlier, or in the previous
iteration, so a valid schedule cannot deadlock.

Work is stated in physical amounts (bytes, parameters, a unit's forward), never in seconds: the same schedule is
priced by :mod:`planner.costs.model` for simulation, and executed as it is.
"""

import dataclasses
from enum import StrEnum

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


class Op(StrEnum):
    """What a task does. Its unit, piece and amounts say to which data."""

    FORWARD = "forward"  # compute one unit's forward
    RECOMPUTE = "recompute"  # compute it again inside backward
    BACKWARD = "backward"
    WEIGHT_GRADIENT = "weight-gradient"  # gradients of weights, where backward leaves them for later
    FETCH = "fetch"  # parameters: host -> slot on the device
    GATHER = "gather"  # parameters: all-gather of the ranks' shards
    SCATTER = "scatter"  # gradients: reduce-scatter over the ranks
    FLUSH = "flush"  # gradients: device -> host, where later micro-batches add to earlier ones
    OVERWRITE = "overwrite"  # gradients: device -> host, in place of those of earlier micro-batches
    PASS = "pass"  # a pass over host memory (scaling, casting) in engines that do not fuse it into the update
    CAST = "cast"  # updated weights to the fp8 copy of them that is fetched
    CLIP = "clip"  # gradient norm over everything, clip coefficient: a barrier
    UPDATE = "update"  # optimizer step of one subgroup, where the lane says
    LOAD = "load"  # optimizer state and gradient: host -> device
    STORE = "store"  # optimizer state: device -> host
    UPLOAD = "upload"  # updated parameters: host -> device
    READ = "read"  # parameters, or state that is checkpointed: NVMe -> host
    SPILL = "spill"  # gradients: host -> NVMe
    SWAP_IN = "swap-in"  # optimizer state, and the gradient if it was spilled: NVMe -> host
    SWAP_OUT = "swap-out"  # optimizer state, and updated parameters that live there: host -> NVMe
    OFFLOAD = "offload"  # activations: device -> host
    EVICT = "evict"  # activations: host -> NVMe
    RECALL = "recall"  # activations: NVMe -> host
    RELOAD = "reload"  # activations: host -> device
    REMAKE = "remake"  # compute again, inside backward, what is cheap to make from offloaded activations
    ISSUE = "issue"  # the host's own time to issue what follows on the device
    RECEIVE = "receive"  # what another pipeline stage sends; on the launch lane, the host's own time around that
    SEND = "send"  # between pipeline stages: activations, their gradients, the gradient of tied embeddings
    STEP = "step"  # the training loop's own work from the norm to the next forward: step(), scheduler, data
    LOOP = "loop"  # what a script does between iterations: logging, data, waiting for the device
    CREATE = "create"  # the files of a checkpoint
    TOUCH = "touch"  # new host memory that a checkpoint is copied to: page faults
    SNAPSHOT = "snapshot"  # state that is checkpointed: device -> host
    WRITE = "write"  # a copy of it, or host-resident state itself: host -> storage
    PROMOTE = "promote"  # a whole checkpoint: storage -> slower storage
    VERIFY = "verify"  # read a promoted checkpoint again
    GATE = "gate"  # before state changes: copy the part that a checkpoint has not written yet, or wait for it


class Phase(StrEnum):
    """The part of an iteration that a task belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"
    LOOP = "loop"  # between iterations


class Lane(StrEnum):
    """A stream, thread or queue that runs its tasks one after another."""

    COMPUTE = "compute"  # forward and backward: the device's main stream, or the calling thread
    GPU_UPDATE = "gpu-update"  # optimizer steps on the device, a second stream
    H2D = "h2d"  # parameters in
    D2H = "d2h"  # gradients out
    STATE_IN = "state-in"  # optimizer state to the device: its own stream, so that it never delays a parameter
    STATE_OUT = "state-out"
    CPU = "cpu"  # the worker team that updates on the host
    COLLECTIVE = "collective"
    SEND = "send"  # activations to the next pipeline stage
    SEND_BACK = "send-back"  # their gradients to the previous one
    RECEIVE = "receive"  # both, from the stages that send them: a task ends when they are there
    RING = "ring"  # keys and values to the next rank of a sequence, while a task computes: it has no tasks of its own
    LAUNCH = "launch"  # the host thread that issues kernels
    SNAPSHOT = "snapshot"  # copies of state for a checkpoint, and the thread that starts them
    STAGING = "staging"  # threads that prepare host memory for snapshots
    WRITE = "write"  # threads that write snapshots to storage
    PROMOTION = "promotion"  # the thread that brings checkpoints to slower storage
    RETENTION = "retention"  # the thread that reads promoted checkpoints again before older ones are deleted
    GATE = "gate"  # waits for checkpoints before state changes
    ACTIVATION_IN = "activation-in"  # activations back to the device: never behind a parameter that waits for its slot
    ACTIVATION_OUT = "activation-out"
    NVME_READ = "nvme-read"  # parameters and activations from NVMe to the host
    NVME_WRITE = "nvme-write"  # activations to NVMe
    NVME_STATE_IN = "nvme-state-in"  # optimizer state: its own queue, so that it never delays a parameter
    NVME_STATE_OUT = "nvme-state-out"  # optimizer state and spilled gradients


HOST_LANES = frozenset(
    {Lane.CPU, Lane.LAUNCH, Lane.GATE, Lane.NVME_READ, Lane.NVME_WRITE, Lane.NVME_STATE_IN, Lane.NVME_STATE_OUT}
)
"""Lanes whose work threads of the host do. Where there is a GPU, all others submit theirs to a stream."""

CALLER_LANES = frozenset({Lane.COMPUTE, Lane.LAUNCH})
"""Lanes whose tasks run in the thread that calls the model."""

STAGE_LANES = frozenset({Lane.SEND, Lane.SEND_BACK, Lane.RECEIVE})
"""Lanes whose tasks wait for another pipeline stage, so that nothing that a stage waits for may wait for them twice."""


class Tier(StrEnum):
    """A place with a capacity and a bandwidth."""

    GPU = "gpu"  # the device's memory; the bounded arena where there is no GPU
    HOST = "host"
    NVME = "nvme"


class MemoryClass(StrEnum):
    """The purpose of bytes."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"
    WORKSPACE = "workspace"
    CHECKPOINT = "checkpoint"  # copies that are not written yet


Shapes = tuple[tuple[int, int], ...]


@dataclasses.dataclass(slots=True)
class Task:
    """One piece of work on one lane.

    Passes of lowering set its amounts and dependencies; nothing changes a task of a :class:`.schedule.Schedule`.

    Attributes:
        index: position in the issue order.
        lane, op, phase: see the enums.
        unit: name of the unit it works on, or ``""`` for the whole model.
        micro_batch: which forward+backward of the iteration it belongs to.
        tile: which tile of the micro-batch's sequences passes its segment, see [Note: Breadth order] in
            :mod:`planner.lowering.compute`.
        piece: index of the subgroup within the unit, or -1 for the whole unit.
        num_bytes: bytes copied, gathered, scattered or passed over, or exchanged for an update by tensor-parallel
            ranks, or moved by it in further passes; 0 otherwise.
        num_params: parameters that this rank updates, whose squared gradients it sums (``FLUSH``), or that it casts
            before (``GATHER``); 0 otherwise.
        num_kernels: kernels that the host issues (``ISSUE``); 0 otherwise.
        num_tensors: parameter tensors that the host goes through (``STEP``), or whose gradients are added to those of
            earlier micro-batches; 0 otherwise.
        num_modules: modules whose hooks the host runs (``ISSUE``), or reports that a script makes (``LOOP``); 0
            otherwise.
        slot: slot that is filled, on the device (``FETCH``, ``GATHER``, ``LOAD``) or in a ring of host buffers
            (``READ``, ``SWAP_IN``), or -1.
        stage: pipeline stage whose rank it belongs to; every stage has lanes and resources of its own.
        pinned: for copies, whether the host side is pinned memory (the copy is then asynchronous and fast).
        stalls: for copies, whether the device computes nothing meanwhile.
        matrices: shapes of the whole matrices that an update orthogonalizes.
        in_fp8: whether the unit's weights come in fp8, so that computing does not cast them.
        splits: whether an update is of split master copies.
        through_host: whether a collective goes through host memory that ranks share, not over the fabric.
        after: indices of tasks of the same iteration that must have ended; all smaller than ``index``.
        after_previous: indices of tasks of the previous iteration that must have ended.
    """

    index: int
    lane: Lane
    op: Op
    phase: Phase
    unit: str = ""
    micro_batch: int = 0
    piece: int = -1
    num_bytes: int = 0
    num_params: int = 0
    num_kernels: int = 0
    num_tensors: int = 0
    num_modules: int = 0
    slot: int = -1
    pinned: bool = True
    stalls: bool = False
    matrices: Shapes = ()
    in_fp8: bool = False
    splits: bool = False
    through_host: bool = False
    stage: int = 0
    tile: int = 0
    after: tuple[int, ...] = ()
    after_previous: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """A readable name, such as ``update layers.3.mlp#2``."""
        piece = f"#{self.piece}" if self.piece >= 0 else ""
        micro_batch = f" mb{self.micro_batch}" if self.micro_batch else ""
        tile = f" tile {self.tile}" if self.tile else ""
        return f"{self.op} {self.unit or 'model'}{piece}{micro_batch}{tile}"


@dataclasses.dataclass(frozen=True, slots=True)
class Buffer:
    """Bytes held on a tier from the start of one task to the end of another.

    ``first`` and ``last`` are task indices; both ``None`` means held all the time. A buffer whose ``last`` is issued
    before its ``first`` is carried over into the next iteration. It is held by a rank of its pipeline ``stage``.
    """

    tier: Tier
    memory_class: MemoryClass
    num_bytes: int
    label: str
    first: int | None = None
    last: int | None = None
    stage: int = 0


LANES, TIERS, MEMORY_CLASSES = tuple(Lane), tuple(Tier), tuple(MemoryClass)
