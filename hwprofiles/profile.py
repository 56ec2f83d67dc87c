"""The schema of a hardware profile: capacities and rates of a machine.

A profile describes *one node* and the fabric between nodes, as one training process per device sees them. The *device*
computes. It is a GPU, or (kind ``host``) a share of the CPU cores with a bounded arena of ordinary memory. A device of
kind ``host`` stands in for a GPU, so that everything can run and be measured on a machine without one.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Annotated, Final, Literal, Self, TypeVar, get_args

from pydantic import Field, model_validator

from hwprofiles.quantity import (
    Bytes,
    BytesPerSecond,
    Count,
    CurveOverBytes,
    CurveOverFlop,
    CurveOverParams,
    Frozen,
    ParamsPerSecond,
    Provenance,
    Ratio,
    Seconds,
)

NAME_PATTERN: Final = r"[a-z0-9][a-z0-9._-]*"
"""Names of profiles."""

Dtype = Literal["bf16", "fp32"]
ProductType = Literal[Dtype, "fp8"]
"""Types of the two matrices of a product; everything else, its output included, has a :data:`Dtype`."""

AttentionType = Literal["bf16", "fp32", "bf16-gqa", "bf16-128", "bf16-128-gqa"]
"""Types of attention: with heads of more than 64 values (``128``), with key-value heads that queries share (``gqa``).

The plain types stand for heads of 64 values, and for all that a profile says nothing about.
"""

ATTENTION_TYPES: Final[tuple[AttentionType, ...]] = get_args(AttentionType)

NarrowUpdate = Literal["adamw-bf16", "adamw-8bit", "adamw-bf16-rounded", "adamw-8bit-rounded", "adamw-split"]
"""Updates of optimizers with state in fewer bytes; ``rounded`` with a master copy in bf16, ``split`` with a
split one.
"""


FOR_LIBRARIES_BYTES: Final = 1 << 30
"""Memory of a GPU that no plan fills with tensors.

A device's ``memory_bytes`` are what tensors may take. They are less by this than the memory that is free when a machine
is calibrated, than the memory that CUDA sees (packaged profiles), and than ``--memory device=SIZE``. It is for:

- the CUDA context and the code of kernels, before a process has made its first tensor;
- workspaces of cuBLAS and cuBLASLt: on Hopper 32 MiB for each handle and stream, so 64 MiB for forward and autograd's
  thread, and 32 MiB more if updates multiply on their stream (PyTorch's docs, ``CUBLAS_WORKSPACE_CONFIG``);
- workspaces of cuDNN and buffers of NCCL;
- page tables of registered host memory: 8 B for each page of 4 KiB, 0.2 GB for 100 GB in small pages;
- what PyTorch's allocator rounds up, and the unused end of the segments that each stream has for itself: up to 22 MiB a
  stream, if segments are expandable.

It is an estimate. On an H200, the context took 0.65 GB, the first product 0.1 GB and page tables 2 MB per GB of host
memory; the allocator had reserved 4 % more than was in use under two plans that filled 12 and 20 GB
(``benchmarks/results/gpu_probe.json``, ``gpu_agreement.json``). ``ullage execute`` records what it has reserved, and
warns if that exceeds the capacity by more.
"""


class Device(Frozen):
    """The device that computes.

    Attributes:
        kind: ``gpu`` (asynchronous, own memory) or ``host`` (a share of the CPU cores, arena in ordinary memory).
        memory_bytes: capacity that training may use.
        memory_bytes_per_s: bandwidth of that memory.
        num_cores: CPU cores that computing occupies (0 for a GPU).
        gemm: time of one matrix product against its FLOP, per type of its two matrices (``fp16`` counts as ``bf16``).
            ``fp8`` is there only if the device has such products; its time is that of the product alone, without the
            casts.
        gemm_rows_half: rows (tokens) at which a product reaches half of the curve's rate, because few rows do not fill
            the device; 0 switches the correction off.
        multiprocessors: number of multiprocessors that share the tiles of a product. In the last wave some of them are
            idle (see :func:`planner.costs.model.wave_factor`). ``None``: ``gemm_rows_half`` applies instead.
        gemm_bytes_per_s: rate of moving a product's matrices, if that adds to its time: tensor cores at the device's
            power limit slow down with every byte moved. ``None``: transfers hide behind products.
        attention: time of one fused attention against its FLOP (the masked half not counted), per data type and, where
            they were measured, kind of heads.
        attention_backward: the same for backward, whose kernels are somewhat slower on GPUs, and several times slower
            on CPUs in bf16. ``None``: the rate of forward.
        elementwise: time of one elementwise kernel against the bytes it reads and writes, dispatch included.
        elementwise_fp32: the same in fp32; ``None`` if memory binds both types. Processors without bf16 instructions
            are slower than their memory in bf16.
        optimizer: time of one AdamW update on the device against its number of parameters.
        fuses_updates: ``gpu`` only: whether updates of any AdamW are one kernel, as with Triton, which PyTorch for CUDA
            brings along on Linux. Otherwise those with narrow or split state are chains of torch's operators. ``None``:
            not known, taken as one kernel.
        gradient_norm: time to sum the squares of a gradient before it leaves the device, against its parameters;
            ``None`` if memory bandwidth hides it.
        issue_s: host time to issue one kernel, with Python and autograd. A GPU computes meanwhile. If computing is
            synchronous, this time adds to the time of every kernel.
        step_s: host time per parameter tensor between the end of backward and the next forward (clipping, ``step()``,
            scheduler, data); ``None``: not known, taken as 0.
        hook_s: host time of the hooks around one module in one pass, in engines that gather parameters by Python hooks
            (DeepSpeed ZeRO-3); ``None``: not known, taken as 0.
        loop_s: host time that the scripts of published runs spend outside of the phases of an iteration with one
            micro-batch (reports of memory, logging, data); ``None`` without published runs.
        exchange_s: host time around one exchange between pipeline stages, from the arrival of a stage's input to its
            first kernel. The device is idle meanwhile. ``None``: not known, taken as 0.
    """

    name: str
    kind: Literal["gpu", "host"]
    memory_bytes: Bytes
    memory_bytes_per_s: BytesPerSecond
    num_cores: Annotated[int, Field(ge=0)]
    gemm: dict[ProductType, CurveOverFlop]
    gemm_rows_half: Count
    multiprocessors: Annotated[int, Field(ge=1)] | None = None
    gemm_bytes_per_s: BytesPerSecond | None = None
    attention: dict[AttentionType, CurveOverFlop]
    attention_backward: dict[AttentionType, CurveOverFlop] | None = None
    elementwise: CurveOverBytes
    elementwise_fp32: CurveOverBytes | None = None
    optimizer: CurveOverParams
    fuses_updates: bool | None = None
    gradient_norm: CurveOverParams | None = None
    issue_s: Seconds
    step_s: Seconds | None = None
    hook_s: Seconds | None = None
    loop_s: Seconds | None = None
    exchange_s: Seconds | None = None


class Link(Frozen):
    """A link with two directions, ``down`` towards the device and ``up`` away from it.

    Attributes:
        down, up: time of one pinned copy against its bytes, alone on the link.
        both_bytes_per_s: sum over both directions when both are busy (split duplex: at most down + up).
        pageable_bytes_per_s: rate of a copy from the device to pageable memory; it also holds for the other direction
            if ``pageable_down_bytes_per_s`` is ``None``.
        pageable_down_bytes_per_s: rate of a copy from pageable memory to the device, if it differs. Copies from the
            device often land in fresh memory and pay for page faults; copies to the device do not.
        num_cores_per_copy: CPU cores that one running copy occupies (0 if a copy engine copies).
    """

    down: CurveOverBytes
    up: CurveOverBytes
    both_bytes_per_s: BytesPerSecond
    pageable_bytes_per_s: BytesPerSecond
    pageable_down_bytes_per_s: BytesPerSecond | None = None
    num_cores_per_copy: Count

    def pageable_rate(self, direction: Literal["down", "up"]) -> float:
        """Return the bytes per second of a copy in ``direction`` whose host side is pageable."""
        if direction == "down" and self.pageable_down_bytes_per_s is not None:
            return self.pageable_down_bytes_per_s.value
        return self.pageable_bytes_per_s.value


class Host(Frozen):
    """The CPU side of one node.

    Attributes:
        memory_bytes: DRAM that training may use.
        dram_bytes_per_s: bytes that all cores and copy engines together can move, reads plus writes.
        num_cores: physical cores.
        optimizer: time of one fused single-pass AdamW (28 B/param) against its parameters, on ``num_optimizer_cores``.
        num_optimizer_cores: cores of the node that run updates.
        optimizer_by_threads: rate of one large update against its threads, if it was measured.
        optimizer_process_params_per_s: the highest rate of one process if its threads are bound to some of the cores,
            even if no other process runs; ``None``: a lone process uses all cores.
        narrow_update_s: time of one core for one parameter of an update with state in fewer bytes, whose arithmetic may
            take longer than memory; ``None``: constants of the planner stand in. ``adamw-split`` is for all updates
            of split master copies; without it, memory alone binds them.
        elementwise_bytes_per_s: rate of elementwise passes on the host other than the optimizer (casts, scaling), on
            ``num_optimizer_cores``.
        fresh_bytes_per_s: rate at which one process touches newly allocated memory (page faults, zeroing); ``None`` if
            it is not known.
        serialise_bytes_per_s: rate at which one thread turns tensors in host memory into a file of ``torch.save``
            (pickle, a zip record with its CRC-32, buffered writes) if the disk keeps up; ``None`` if it is not known.
        hash_bytes_per_s: rate at which one thread makes checksums (xxh3) of host memory; ``None`` if it is not known.
    """

    name: str
    memory_bytes: Bytes
    dram_bytes_per_s: BytesPerSecond
    num_cores: Annotated[int, Field(ge=1)]
    optimizer: CurveOverParams
    num_optimizer_cores: Annotated[int, Field(ge=1)]
    optimizer_by_threads: dict[int, ParamsPerSecond] | None = None
    optimizer_process_params_per_s: ParamsPerSecond | None = None
    narrow_update_s: dict[NarrowUpdate, Seconds] | None = None
    elementwise_bytes_per_s: BytesPerSecond
    fresh_bytes_per_s: BytesPerSecond | None = None
    serialise_bytes_per_s: BytesPerSecond | None = None
    hash_bytes_per_s: BytesPerSecond | None = None

    @model_validator(mode="after")
    def _cores(self) -> Self:
        if self.num_optimizer_cores > self.num_cores:
            raise ValueError(
                f"num_optimizer_cores is {self.num_optimizer_cores}, but num_cores is {self.num_cores}; "
                "give updates at most all of them"
            )
        return self


class Storage(Frozen):
    """A disk tier: ``nvme`` of one node or a shared ``pfs``; curves are time against bytes of one large request.

    Attributes:
        capacity_bytes: capacity of the whole tier.
        read, write: time of one node's request.
        job_write_bytes_per_s: highest write rate of all nodes of a job together; ``None``: the number of nodes times
            one node's rate.
        create_s: time in which the metadata server creates one file. It creates the files of a job one after another.
            ``None``: negligible.
        num_drives: number of equal drives that capacity and rates are of, if it is known.
        endurance_bytes_per_day: bytes that may be written per day, for years (a drive's TBW divided by the days of its
            warranty); ``None`` if it is not known.
        both_bytes_per_s: sum over reading and writing when both run; ``None`` if neither slows the other.
    """

    capacity_bytes: Bytes
    read: CurveOverBytes
    write: CurveOverBytes
    job_write_bytes_per_s: BytesPerSecond | None = None
    create_s: Seconds | None = None
    num_drives: Annotated[int, Field(ge=1)] | None = None
    both_bytes_per_s: BytesPerSecond | None = None
    endurance_bytes_per_day: Bytes | None = None

    def striped(self, num_drives: int) -> Self:
        """Return the tier with ``num_drives`` drives, fewer or more than it has: rates and capacity in proportion.

        Raises:
            ValueError: the number of drives is not known.
        """
        if self.num_drives is None:
            raise ValueError("num_drives is not stated, so rates of other numbers of drives are not known; add it")
        share = num_drives / self.num_drives
        update: dict[str, object] = {"num_drives": num_drives}
        for name in ("capacity_bytes", "both_bytes_per_s", "endurance_bytes_per_day"):
            if (quantity := getattr(self, name)) is not None:
                update[name] = quantity.model_copy(update={"value": quantity.value * share})
        for name, curve in (("read", self.read), ("write", self.write)):
            points = tuple(point.model_copy(update={"size": point.size * share}) for point in curve.points)
            update[name] = curve.model_copy(update={"points": points})
        return self.model_copy(update=update)


class Fabric(Frozen):
    """A fabric between devices.

    Attributes:
        bytes_per_s: bus bandwidth of an all-gather or reduce-scatter, per device and direction, while all devices of
            a node take part (between nodes: each device's share of the NICs).
        latency_s: start-up time of one collective.
        hop_latency_s: time that every step of a ring adds to ``latency_s``, so that start-up grows with the ranks;
            ``None``: ``latency_s`` includes the steps of usual groups.
        via_host_link: the collective's bytes cross the same link as host copies (no NVLink).
        partial_group_ratio: between nodes, the fraction of ``bytes_per_s`` that a group reaches if it has only some of
            a node's devices and other groups have the rest; ``None`` means 1.
    """

    bytes_per_s: BytesPerSecond
    latency_s: Seconds
    hop_latency_s: Seconds | None = None
    via_host_link: bool = False
    partial_group_ratio: Ratio | None = None


class MachineIdentity(Frozen):
    """Identity of the machine that a profile was measured on, from its operating system.

    Attributes:
        cpu: model name of the processor.
        num_cpus: all logical processors, even if this process may not use some.
        memory_bytes: all memory of the system.
        gpus: names of the GPUs, in order.
        drives: models of the drives that were measured; ``()`` if none has a name.
    """

    cpu: str
    num_cpus: Annotated[int, Field(ge=1)]
    memory_bytes: Annotated[int, Field(ge=1)]
    gpus: tuple[str, ...] = ()
    drives: tuple[str, ...] = ()


class HardwareProfile(Frozen):
    """One machine: nodes of equal devices.

    Attributes:
        name: name for ``--hardware``.
        topology: pairs of joined places, e.g. ``("gpu0", "switch0")``. They must be one connected graph in which every
            device reaches ``dram``. Devices joined to one ``switch…`` share its uplink to the host.
        devices_per_node: devices in one node.
        intra_node, inter_node: fabrics inside and between nodes; ``None`` if there is only one device or node.
        one_memory: host and device share one memory, so offloading gains nothing. The memory counts as the device's,
            except for the small part that the host needs. ``None``: host and device have separate memories.
        measured_on: the machine that was calibrated; ``None`` if the values are not those of one machine.
    """

    schema_version: Literal[1] = 1
    name: Annotated[str, Field(pattern=f"^{NAME_PATTERN}$")]
    description: str
    device: Device
    devices_per_node: Annotated[int, Field(ge=1)]
    host: Host
    host_link: Link
    nvme: Storage | None = None
    pfs: Storage | None = None
    intra_node: Fabric | None = None
    inter_node: Fabric | None = None
    topology: tuple[tuple[str, str], ...]
    one_memory: Literal[True] | None = None
    measured_on: MachineIdentity | None = None

    @model_validator(mode="after")
    def _connected(self) -> Self:
        places = dict.fromkeys(place for pair in self.topology for place in pair)
        wanted = {f"{self.device.kind}{i}" for i in range(self.devices_per_node)} | {"dram"}
        if missing := sorted(wanted - set(places)):
            raise ValueError(f"topology does not mention {', '.join(missing)}; every device and dram must be in it")
        if len(parts := connected(places, self.topology)) > 1:
            raise ValueError(f"topology falls into separate parts {parts}; join them with a link")
        if self.devices_per_node > 1 and self.intra_node is None:
            raise ValueError(f"{self.devices_per_node} devices per node need intra_node; add that fabric")
        return self

    def devices_per_uplink(self) -> int:
        """Return how many devices share one switch's uplink to the host, which has one link's rate (1: no sharing)."""
        devices = {f"{self.device.kind}{i}" for i in range(self.devices_per_node)}
        links = {frozenset(pair) for pair in self.topology}
        shared = Counter(place for link in links if link & devices for place in link if place.startswith("switch"))
        return max(shared.values(), default=1)

    def with_device_limit(self, num_bytes: int) -> Self:
        """Return the same machine, of whose devices a process takes at most so many bytes.

        Of a GPU, :data:`FOR_LIBRARIES_BYTES` of them are left free.

        Raises:
            ValueError: ``num_bytes`` is more than the device has, or leaves nothing for tensors.
        """
        margin = FOR_LIBRARIES_BYTES if self.device.kind == "gpu" else 0
        if num_bytes <= margin:
            raise ValueError(
                f"device memory of {num_bytes} B is too little: {margin} B of a GPU are for libraries; give more"
            )
        return self.with_device_memory(num_bytes - margin)

    def with_device_memory(self, num_bytes: int) -> Self:
        """Return the same machine with less memory on each device.

        Raises:
            ValueError: ``num_bytes`` is more than the device has.
        """
        capacity = self.device.memory_bytes
        if not 0 < num_bytes <= capacity.value:
            raise ValueError(
                f"device memory of {num_bytes} B is too much: each device of {self.name} has "
                f"{capacity.value:.0f} B; give at most that"
            )
        provenance = Provenance(origin="assumed", source=f"asked for, of {capacity.value:.0f} B")
        quantity = capacity.model_copy(update={"value": float(num_bytes), "provenance": provenance})
        return self.model_copy(update={"device": self.device.model_copy(update={"memory_bytes": quantity})})


_Node = TypeVar("_Node", int, str)


def connected(nodes: Iterable[_Node], pairs: Iterable[tuple[_Node, _Node]]) -> list[list[_Node]]:
    """Return the connected components of an undirected graph, each of them sorted."""
    component = {node: [node] for node in nodes}
    for one, other in pairs:
        if component[one] is not component[other]:
            component[one] += component[other]
            component |= dict.fromkeys(component[other], component[one])
    return [sorted(nodes) for nodes in {id(nodes): nodes for nodes in component.values()}.values()]
