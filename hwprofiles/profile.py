"""What a machine can do: the schema of a hardware profile.

A profile describes *one node* and how many of them are joined, as seen by one training process per device. The
*device* is what computes: a GPU, or (kind ``host``) a share of the CPU with a bounded arena of ordinary memory
that stands in for one, so that everything can run and be measured on a machine without a GPU.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Annotated, Literal, Self, TypeVar

from pydantic import Field, model_validator

from hwprofiles.quantity import (
    Bytes,
    BytesPerSecond,
    Count,
    Curve,
    CurveOverBytes,
    CurveOverFlop,
    CurveOverParams,
    CurvePoint,
    Frozen,
    ParamsPerSecond,
    Provenance,
    Quantity,
    Ratio,
    Seconds,
)

Dtype = Literal["bf16", "fp32"]


class Device(Frozen):
    """What computes.

    Attributes:
        kind: ``gpu`` (asynchronous, own memory) or ``host`` (a share of the CPU cores, arena in ordinary memory).
        memory_bytes: capacity that training may use.
        memory_bytes_per_s: bandwidth of that memory.
        num_cores: CPU cores that computing occupies (0 for a GPU).
        gemm: time of one matrix product against its FLOP, per data type (``fp16`` counts as ``bf16``).
        gemm_rows_half: rows (tokens) at which a product reaches half of the curve's rate because too few rows fill
            the device; 0 switches the correction off.
        multiprocessors: how many of them share a product's tiles, so that the last wave leaves some idle (see
            :func:`planner.costs.model.wave_factor`); ``None`` leaves that to the curve, and ``gemm_rows_half`` applies.
        gemm_bytes_per_s: rate at which a product's matrices pass, if that adds to its time: where the tensor cores run
            at the device's power limit, they slow down with every byte moved. ``None``: transfers hide behind products.
        attention: time of one fused attention against its FLOP (the masked half not counted), per data type.
        attention_backward: the same of its backward, which has other kernels: on GPUs they are somewhat slower, on CPUs
            in bf16 several times. ``None``: at the rate of forward.
        elementwise: time of one elementwise kernel against the bytes it reads and writes, dispatch included.
        elementwise_fp32: the same in fp32; ``None`` where the same memory binds both. Processors without instructions
            for bf16 are slower in that than their memory.
        optimizer: time of one AdamW update on the device against its number of parameters.
        gradient_norm: time to sum the squares of a gradient before it leaves the device, against its parameters;
            ``None`` where that is lost in the memory's rate.
        issue_s: host time per kernel, of Python and autograd included. A GPU computes meanwhile; where computing is
            synchronous it comes on top of every kernel's own time.
        step_s: host time per parameter tensor between the end of backward and the next forward (clipping, ``step()``,
            scheduler, data); ``None`` where it is not known, and then taken as 0.
        hook_s: host time of the hooks around one module in one pass, in engines that gather parameters by Python hooks
            (DeepSpeed ZeRO-3); ``None`` where it is not known, and then taken as 0.
        loop_s: host time that the scripts of published runs spend between iterations (logging, data, waiting for the
            device); ``None`` where none are.
        exchange_s: host time around one exchange between pipeline stages, from the arrival of what a stage waits for
            to its first kernel: the device has nothing to do meanwhile. ``None``: not known, taken as 0.
    """

    name: str
    kind: Literal["gpu", "host"]
    memory_bytes: Bytes
    memory_bytes_per_s: BytesPerSecond
    num_cores: Annotated[int, Field(ge=0)]
    gemm: dict[Dtype, CurveOverFlop]
    gemm_rows_half: Count
    multiprocessors: Annotated[int, Field(ge=1)] | None = None
    gemm_bytes_per_s: BytesPerSecond | None = None
    attention: dict[Dtype, CurveOverFlop]
    attention_backward: dict[Dtype, CurveOverFlop] | None = None
    elementwise: CurveOverBytes
    elementwise_fp32: CurveOverBytes | None = None
    optimizer: CurveOverParams
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
        pageable_bytes_per_s: rate of a copy to memory that is not pinned (away from the device), and in the other
            direction too unless ``pageable_down_bytes_per_s`` is given.
        pageable_down_bytes_per_s: rate of a copy from memory that is not pinned, where it differs: copies away from
            the device often land in fresh memory, and then pay for page faults that the others do not.
        num_cores_per_copy: CPU cores that one running copy occupies (0 where an engine copies).
    """

    down: CurveOverBytes
    up: CurveOverBytes
    both_bytes_per_s: BytesPerSecond
    pageable_bytes_per_s: BytesPerSecond
    pageable_down_bytes_per_s: BytesPerSecond | None = None
    num_cores_per_copy: Count

    def pageable_rate(self, direction: Literal["down", "up"]) -> float:
        """Return the bytes per second of a copy in ``direction`` whose host side is not pinned."""
        if direction == "down" and self.pageable_down_bytes_per_s is not None:
            return self.pageable_down_bytes_per_s.value
        return self.pageable_bytes_per_s.value


class Host(Frozen):
    """The CPU side of one node.

    Attributes:
        memory_bytes: DRAM that training may use.
        dram_bytes_per_s: what all cores and copy engines together can move, reads and writes added.
        num_cores: physical cores.
        optimizer: time of one fused single-pass AdamW (28 B/param) against its parameters, with all cores that the
            node gives to updates.
        num_optimizer_cores: how many cores that is.
        optimizer_by_threads: rate of one large update against its threads, where that was measured.
        optimizer_process_params_per_s: the most that one process reaches, whose threads are bound to some of the cores,
            however few processes there are; ``None``: a lone process uses them all.
        elementwise_bytes_per_s: host passes that are not the optimizer (casts, scaling), all those cores together.
        fresh_bytes_per_s: at which one process touches memory that it has just been given (page faults, zeroing);
            ``None`` where it is not known.
        serialise_bytes_per_s: at which one thread turns tensors in host memory into a file of ``torch.save`` (pickle,
            a zip record with its CRC-32, buffered writes), if the disk keeps up; ``None`` where it is not known.
        hash_bytes_per_s: at which one thread makes checksums (xxh3) of host memory; ``None`` where it is not known.
    """

    name: str
    memory_bytes: Bytes
    dram_bytes_per_s: BytesPerSecond
    num_cores: Annotated[int, Field(ge=1)]
    optimizer: CurveOverParams
    num_optimizer_cores: Annotated[int, Field(ge=1)]
    optimizer_by_threads: dict[int, ParamsPerSecond] | None = None
    optimizer_process_params_per_s: ParamsPerSecond | None = None
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
        capacity_bytes: of it all.
        read, write: what one node draws.
        job_write_bytes_per_s: what all nodes of one job together write, however many they are; ``None``: as many times
            one node's rate.
        create_s: time of its metadata server to create one file, one after another for a whole job; ``None``: lost in
            the rest.
        num_drives: how many equal drives the capacity and the rates are those of, where that is known.
        endurance_bytes_per_day: that may be written to it a day, for years (a drive's TBW over the days of its
            warranty); ``None`` where it is not known.
        both_bytes_per_s: sum over reading and writing when both go on; ``None`` where neither slows the other.
    """

    capacity_bytes: Bytes
    read: CurveOverBytes
    write: CurveOverBytes
    job_write_bytes_per_s: BytesPerSecond | None = None
    create_s: Seconds | None = None
    num_drives: Annotated[int, Field(ge=1)] | None = None
    both_bytes_per_s: BytesPerSecond | None = None
    endurance_bytes_per_day: Bytes | None = None

    def with_drives(self, num_drives: int) -> Self:
        """Return the tier with that many of its drives, striped: rates and capacity in proportion.

        Raises:
            ValueError: it is not known how many there are, or they are fewer.
        """
        if self.num_drives is None or not 1 <= num_drives <= self.num_drives:
            raise ValueError(
                f"{num_drives} drives were asked for, but there are {self.num_drives}; ask for at most that"
            )
        return self.striped(num_drives)

    def striped(self, num_drives: int) -> Self:
        """Return the tier with so many of its drives, or more like them: rates and capacity in proportion.

        Raises:
            ValueError: it is not known how many there are.
        """
        if self.num_drives is None:
            raise ValueError("num_drives is not stated, so that rates and capacity of others are not known; add it")
        share = num_drives / self.num_drives

        def less(quantity: Quantity) -> Quantity:
            return quantity.model_copy(update={"value": quantity.value * share})

        def slower(curve: Curve) -> Curve:
            points = (
                CurvePoint(size=p.size * share, p10_s=p.p10_s, median_s=p.median_s, p90_s=p.p90_s) for p in curve.points
            )
            return curve.model_copy(update={"points": tuple(points)})

        return self.model_copy(
            update={
                "num_drives": num_drives,
                "capacity_bytes": less(self.capacity_bytes),
                "read": slower(self.read),
                "write": slower(self.write),
                "both_bytes_per_s": less(self.both_bytes_per_s) if self.both_bytes_per_s else None,
                "endurance_bytes_per_day": (
                    less(self.endurance_bytes_per_day) if self.endurance_bytes_per_day else None
                ),
            }
        )


class Fabric(Frozen):
    """What joins devices.

    Attributes:
        bytes_per_s: bus bandwidth of an all-gather or reduce-scatter, per device and direction, while all devices of
            a node take part (between nodes: each device's share of the NICs).
        latency_s: start-up time of one collective.
        hop_latency_s: what every step of a ring adds to that, so that it grows with the ranks; ``None``: the start-up
            time is that of the usual groups, steps included.
        via_host_link: the collective's bytes cross the same link as host copies (no NVLink).
        partial_group_ratio: between nodes, the fraction of ``bytes_per_s`` that a group reaches if it has only some of
            a node's devices, while other groups have the rest; ``None`` stands for 1.
    """

    bytes_per_s: BytesPerSecond
    latency_s: Seconds
    hop_latency_s: Seconds | None = None
    via_host_link: bool = False
    partial_group_ratio: Ratio | None = None


class MachineIdentity(Frozen):
    """Which machine a profile was measured on, as far as its operating system tells.

    Attributes:
        cpu: model name of the processor.
        num_cpus: logical processors, whoever may use them.
        memory_bytes: all memory that the system has.
        gpus: names of the GPUs, in order.
        drives: models of the drives that were measured; ``()`` where none has a name.
    """

    cpu: str
    num_cpus: Annotated[int, Field(ge=1)]
    memory_bytes: Annotated[int, Field(ge=1)]
    gpus: tuple[str, ...] = ()
    drives: tuple[str, ...] = ()


class HardwareProfile(Frozen):
    """One machine: nodes of equal devices.

    Attributes:
        name: what ``--hardware`` calls it.
        topology: pairs of joined places, e.g. ``("gpu0", "switch0")``; checked to be one connected graph in which
            every device reaches ``dram``. Devices joined to one ``switch…`` share its uplink to the host.
        devices_per_node: devices in one node.
        intra_node, inter_node: fabrics inside and between nodes; ``None`` where there is only one device or node.
        one_memory: whether host and device have the same memory, so that moving state gains nothing. It counts as the
            device's, but for the little that the host needs. ``None``: each has its own.
        measured_on: the machine that was calibrated; ``None`` where values are not those of one machine.
    """

    schema_version: Literal[1] = 1
    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")]
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
        """Return how many devices share one switch's uplink, of the capacity of one link, to the host (1: none do)."""
        devices = {f"{self.device.kind}{i}" for i in range(self.devices_per_node)}
        links = {frozenset(pair) for pair in self.topology}
        shared = Counter(place for link in links if link & devices for place in link if place.startswith("switch"))
        return max(shared.values(), default=1)

    def with_device_memory(self, num_bytes: int) -> Self:
        """Return the same machine with another capacity of each device, as asked for.

        Raises:
            ValueError: that is more than the device has.
        """
        capacity = self.device.memory_bytes
        if not 0 < num_bytes <= capacity.value:
            raise ValueError(
                f"device memory of {num_bytes} B was asked for, but each device of {self.name} has "
                f"{capacity.value:.0f} B; ask for at most that"
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
