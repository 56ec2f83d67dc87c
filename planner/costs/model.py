"""The cost model: what each task of a schedule takes on one machine, and what it shares while it runs.

Costs are those of one *representative rank*: ranks are identical, so resources that a node's ranks share (cores, DRAM)
are divided by the number of ranks on the node, and updates of all ranks run at the same time.
"""

import dataclasses
import itertools
from collections.abc import Hashable, Iterable
from enum import IntEnum
from typing import Self

from hwprofiles.profile import Dtype, HardwareProfile
from hwprofiles.quantity import Curve, Quantity
from planner.costs.fabrics import Fabrics
from planner.costs.layout import Layout
from planner.decisions import Decisions, Precision
from planner.graph import Attention, Degrees, Elementwise, Gemm, Kernel, Unit
from planner.lowering import stages
from planner.models.kernels import Collective, flop, num_kernels
from planner.optimizers import MEASURED, OPTIMIZERS, Optimizer
from planner.schedule.arrays import kind_of
from planner.schedule.schedule import Schedule
from planner.schedule.tasks import Lane, Op, Work

_WORTH_A_WARNING_S = 1e-3
# Outputs along each side of what one multiprocessor computes at a time.
_TILE = 128
# Adding a micro-batch's gradient to what the host holds: two operands in, one out.
_ACCUMULATE_PASSES = 3
# A copy to or from memory that is not pinned goes through a pinned buffer: a core reads the source, fetches the lines
# that it will write, and writes them; the copy engine reads them (or the other way round).
_STAGED_PASSES = 4
_STORAGE_READS = frozenset({Lane.NVME_READ, Lane.NVME_STATE_IN})
_STORAGE_WRITES = frozenset({Lane.NVME_WRITE, Lane.NVME_STATE_OUT})


class Resource(IntEnum):
    """What running tasks share."""

    DEVICE = 0  # the device's compute: capacity 1
    CORES = 1  # CPU cores
    DRAM = 2  # bytes/s
    LINK_DOWN = 3  # bytes/s towards the device
    LINK_UP = 4
    LINK = 5  # both directions together
    FABRIC = 6
    NVME_READ = 7  # bytes/s
    NVME_WRITE = 8
    NVME = 9  # both directions together
    PFS = 10  # bytes/s to the file system that all nodes share
    INTERPRETER = 11  # the Python interpreter of the training process: capacity 1


@dataclasses.dataclass(frozen=True, slots=True)
class Price:
    """What one task takes when alone, and what it uses per second of that.

    Attributes:
        latency_s: paid first; nothing is shared meanwhile.
        duration_s: at full speed.
        uses: (resource, amount per second at full speed), resources ascending.
        weight: how fast its speed rises where it competes with others; see [Note: Fluid sharing].
    """

    latency_s: float
    duration_s: float
    uses: tuple[tuple[Resource, float], ...] = ()
    weight: float = 1.0


class CostModel:
    """Prices tasks on one hardware profile.

    Args:
        profile: the machine.
        units: the model's units.
        precision: types of weights and gradients.
        data_parallel: ranks that share the batch, each with one device.
        tensor_parallel: ranks that share every layer.
        pipeline_parallel: stages that share the layers.
        expert_parallel: data-parallel ranks that share every bank of experts.
        optimizer: what updates the parameters.

    Attributes:
        layout: which ranks share what, and on which nodes they are.
        num_ranks, ranks_per_node: of the whole job, and of a full node; each has one device.
        warnings: sentences about readings outside the measured range, in order of appearance.
    """

    def __init__(
        self,
        profile: HardwareProfile,
        units: Iterable[Unit],
        precision: Precision,
        data_parallel: int,
        tensor_parallel: int = 1,
        pipeline_parallel: int = 1,
        expert_parallel: int = 1,
        *,
        optimizer: Optimizer = "adamw",
    ) -> None:
        self.profile = profile
        self.warnings: dict[str, None] = {}
        self._units = {unit.name: unit for unit in units}
        self._dtype: Dtype = precision.weights
        self._dtype_bytes = precision.weight_bytes
        self._update_bytes = OPTIMIZERS[optimizer].update_bytes_per_param
        # Memory binds every update, so that it takes AdamW's time by their bytes.
        self._of_measured = self._update_bytes / MEASURED.update_bytes_per_param
        self._degrees = Degrees(data_parallel, tensor_parallel, pipeline_parallel, expert_parallel)
        self.layout = Layout(data_parallel, tensor_parallel, pipeline_parallel, profile.devices_per_node)
        self._fabrics = Fabrics(profile, self.layout)
        self.num_ranks = self.layout.num_ranks
        self.ranks_per_node = self.layout.ranks_per_node
        # Ranks behind one switch copy at the same time, so that all their bytes cross its uplink.
        self._ranks_per_uplink = min(self.ranks_per_node, profile.devices_per_uplink())
        self._kernels: dict[int, tuple[float, float]] = {}  # by identity: equal layers share their kernels
        self._prices: dict[Hashable, Price] = {}  # by kind
        self._same: dict[Price, Price] = {}

    @classmethod
    def of(cls, profile: HardwareProfile, units: tuple[Unit, ...], decisions: Decisions) -> Self:
        """Return the prices for what :func:`planner.lowering.lower` makes of these units and decisions.

        Raises:
            ValueError: there are fewer layers than pipeline stages.
        """
        degrees = dataclasses.astuple(decisions.degrees)
        return cls(profile, stages(units, decisions), decisions.precision, *degrees, optimizer=decisions.optimizer)

    @property
    def asynchronous(self) -> bool:
        """Whether the device runs apart from the thread that issues its work."""
        return self.profile.device.kind == "gpu"

    def capacities(self) -> dict[Resource, float]:
        """Return what one rank has of every resource."""
        profile, ranks = self.profile, self.ranks_per_node
        link = profile.host_link
        capacity = {
            Resource.DEVICE: 1.0,
            Resource.CORES: profile.host.num_cores / ranks,
            Resource.DRAM: profile.host.dram_bytes_per_s.value / ranks,
            Resource.LINK_DOWN: link.down.best_rate_per_s() / self._ranks_per_uplink,
            Resource.LINK_UP: link.up.best_rate_per_s() / self._ranks_per_uplink,
            Resource.LINK: link.both_bytes_per_s.value / self._ranks_per_uplink,
            Resource.FABRIC: 1.0,
            Resource.PFS: 1.0,  # only checkpoints are written there: see planner.checkpoints.costs
            Resource.INTERPRETER: 1.0,
            **self._storage_capacities(),
        }
        for resource, amount in capacity.items():
            if amount <= 0:
                name = resource.name.lower()
                raise ValueError(f"profile {profile.name} gives {name} a capacity of {amount:g}; it must be positive")
        return capacity

    def _storage_capacities(self) -> dict[Resource, float]:
        """Return a rank's share of the node's drives; without drives nothing can use them, and any number will do."""
        nvme = self.profile.nvme
        if nvme is None:
            return {Resource.NVME_READ: 1.0, Resource.NVME_WRITE: 1.0, Resource.NVME: 1.0}
        read, write = nvme.read.best_rate_per_s(), nvme.write.best_rate_per_s()
        both = nvme.both_bytes_per_s.value if nvme.both_bytes_per_s else read + write
        ranks = self.ranks_per_node
        return {Resource.NVME_READ: read / ranks, Resource.NVME_WRITE: write / ranks, Resource.NVME: both / ranks}

    def prices(self, schedule: Schedule) -> list[Price]:
        """Return the price of every task of a schedule; equal work has one object for its price."""
        arrays, known = schedule.arrays, self._prices
        prices = [known.get(kind) or self.price(work) for kind, work in zip(arrays.kinds, arrays.works, strict=True)]
        return [prices[number] for number in arrays.work.tolist()]

    def price(self, task: Work) -> Price:
        """Return the price of one task."""
        kind = kind_of(task)  # equal layers have equal tasks, and candidates of a search too
        if (price := self._prices.get(kind)) is None:
            price = self._compute(task) if task.lane is Lane.COMPUTE else self._price(task)
            price = self._prices[kind] = self._same.setdefault(price, price)
        return price

    def _parts(self, task: Work) -> int:
        """Return how many different parts of what a collective is about the data-parallel ranks hold."""
        if task.lane is not Lane.COLLECTIVE or task.unit not in self._units:
            return 1
        return self._units[task.unit].parts(self._degrees)

    def _price(self, task: Work) -> Price:
        if task.lane is Lane.LAUNCH:
            return self._launch(task)
        if task.op is Op.UPDATE:
            return self._cpu_update(task) if task.lane is Lane.CPU else self._device_update(task)
        if task.op is Op.PASS:
            return self._host_pass(task.num_bytes)
        if task.op is Op.SEND:
            return self._send(task)
        if task.lane is Lane.COLLECTIVE:
            return self._collective(task)
        return self._storage(task) if task.lane in _STORAGE_READS | _STORAGE_WRITES else self._copy(task)

    def _launch(self, task: Work) -> Price:
        """Price the host's own time: what a script does, an exchange between stages, or kernels, hooks and tensors."""
        device = self.profile.device
        host_s = device.issue_s.value * task.num_kernels + _seconds(device.hook_s) * task.num_modules
        host_s += _seconds(device.step_s) * task.num_tensors
        of_its_own = {Op.LOOP: device.loop_s, Op.RECEIVE: device.exchange_s}
        return Price(_seconds(of_its_own[task.op]) if task.op in of_its_own else host_s, 0.0)

    def compute_s(self, kernels: Iterable[Kernel]) -> float:
        """Return the time that kernels take on the device, one after another."""
        return sum(self._kernel(kernel)[0] for kernel in kernels)

    def work(self, task: Work) -> tuple[float, float]:
        """Return the FLOP of a compute task, and the bytes that its kernels touch."""
        kernels = self.kernels_of(task)
        return flop(kernels), sum(self._kernel(kernel)[1] for kernel in kernels)

    def _compute(self, task: Work) -> Price:
        kernels = self.kernels_of(task)
        times = [self._kernel(kernel) for kernel in kernels]
        duration_s = sum(time_s for time_s, _ in times)
        if not self.asynchronous:  # the host issues and computes in turn
            duration_s += self.profile.device.issue_s.value * num_kernels(kernels)
        num_bytes = sum(num_bytes for _, num_bytes in times)
        return Price(0.0, duration_s, self._on_device(duration_s, num_bytes))

    def kernels_of(self, task: Work) -> tuple[Kernel, ...]:
        """Return what a task of the compute lane runs."""
        unit = self._units[task.unit]
        match task.op:
            case Op.FORWARD:
                return unit.forward
            case Op.RECOMPUTE:
                return unit.recompute
            case Op.REMAKE:
                return unit.remake
            case _:
                return unit.backward

    def _on_device(self, duration_s: float, num_bytes: float) -> tuple[tuple[Resource, float], ...]:
        """Return what work on the device uses; where the CPU is the device, that is cores and DRAM."""
        device = self.profile.device
        if device.kind == "gpu" or duration_s <= 0:
            return ((Resource.DEVICE, 1.0),)
        # Caches keep part of the traffic from DRAM; more than the device can draw alone it cannot be.
        dram = min(num_bytes / duration_s, device.memory_bytes_per_s.value, self.profile.host.dram_bytes_per_s.value)
        return ((Resource.CORES, float(device.num_cores)), (Resource.DRAM, dram))

    def _kernel(self, kernel: Kernel) -> tuple[float, float]:
        """Return (seconds, bytes touched) of one kernel entry, all its repetitions together."""
        key = id(kernel)
        if key not in self._kernels:
            self._kernels[key] = self._price_kernel(kernel)
        return self._kernels[key]

    def _price_kernel(self, kernel: Kernel) -> tuple[float, float]:
        device = self.profile.device
        match kernel:
            case Gemm() if kernel.batched:  # one kernel: all products together fill the device
                num_bytes = self._dtype_bytes * (kernel.m * kernel.k + kernel.k * kernel.n + kernel.m * kernel.n)
                num_bytes *= kernel.count
                time_s = self._read(device.gemm[self._dtype], kernel.flop, "GEMM")
                return max(time_s, num_bytes / device.memory_bytes_per_s.value), float(num_bytes)
            case Gemm():
                flop = kernel.flop / kernel.count
                if device.multiprocessors:
                    idle = wave_factor(kernel.m, kernel.n, device.multiprocessors)
                else:  # a product of few rows leaves part of the device idle: rate r / (r + r_half) of the curve's
                    idle = 1 + device.gemm_rows_half.value / kernel.m
                time_s = self._read(device.gemm[self._dtype], flop, "GEMM") * idle
                num_bytes = self._dtype_bytes * (kernel.m * kernel.k + kernel.k * kernel.n + kernel.m * kernel.n)
                return time_s * kernel.count, float(num_bytes * kernel.count)
            case Attention():
                curve = device.attention if kernel.flash else device.gemm
                time_s = self._read(curve[self._dtype], kernel.flop, "attention")
                rows = kernel.batch * kernel.num_heads * kernel.seq_len * kernel.head_dim
                return time_s, float(4 * self._dtype_bytes * rows)
            case Elementwise():
                curve_of_type = device.elementwise_fp32 if self._dtype == "fp32" else None
                time_s = self._read(curve_of_type or device.elementwise, kernel.num_bytes, "elementwise")
                return time_s * kernel.count, float(kernel.num_bytes * kernel.count)
            case Collective():
                return self._inside_unit_s(kernel) * kernel.count, float(kernel.num_bytes * kernel.count)

    def _device_update(self, task: Work) -> Price:
        duration_s = self._of_measured * self._read(self.profile.device.optimizer, task.num_params, "device optimizer")
        return Price(0.0, duration_s, self._on_device(duration_s, self._update_bytes * task.num_params))

    def _cpu_update(self, task: Work) -> Price:
        """Price an update by the rank's share of the node: all ranks update at the same time."""
        host, ranks = self.profile.host, self.ranks_per_node
        duration_s = self._read(host.optimizer, task.num_params * ranks, "CPU optimizer")
        if host.optimizer_process_params_per_s is not None:
            duration_s = max(duration_s, task.num_params / host.optimizer_process_params_per_s.value)
        duration_s *= self._of_measured
        # It cannot be faster than memory feeds it, whatever cores could do.
        duration_s = max(duration_s, self._update_bytes * task.num_params * ranks / host.dram_bytes_per_s.value)
        if duration_s <= 0:
            return Price(0.0, 0.0)
        dram = self._update_bytes * task.num_params / duration_s
        return Price(
            0.0,
            duration_s,
            ((Resource.CORES, host.num_optimizer_cores / ranks), (Resource.DRAM, self._at_most_dram(dram))),
        )

    def _host_pass(self, num_bytes: int) -> Price:
        host, ranks = self.profile.host, self.ranks_per_node
        rate = min(host.elementwise_bytes_per_s.value, host.dram_bytes_per_s.value) / ranks
        uses = ((Resource.CORES, host.num_optimizer_cores / ranks), (Resource.DRAM, self._at_most_dram(rate)))
        return Price(0.0, num_bytes / rate, uses)

    def _at_most_dram(self, rate: float) -> float:
        """Bound a task's own demand by the whole capacity, so that a task alone always runs at full speed."""
        return min(rate, self.profile.host.dram_bytes_per_s.value / self.ranks_per_node)

    def _copy(self, task: Work) -> Price:
        link = self.profile.host_link
        down = task.lane in {Lane.H2D, Lane.STATE_IN, Lane.ACTIVATION_IN}
        num_bytes = task.num_bytes * self._ranks_per_uplink
        duration_s = self._read(link.down if down else link.up, num_bytes, "copy")
        if not task.pinned:  # one thread per rank copies to or from a pinned buffer: slower than the link, not shared
            duration_s = max(duration_s, task.num_bytes / link.pageable_rate("down" if down else "up"))
        if duration_s <= 0:
            return Price(0.0, 0.0)
        # Where a core copies, the bytes are read from and written to the same DRAM.
        num_passes = 2 if link.num_cores_per_copy.value else 1 if task.pinned else _STAGED_PASSES
        if task.op is Op.FLUSH and task.micro_batch:
            duration_s += self._host_pass(_ACCUMULATE_PASSES * task.num_bytes).duration_s
            num_passes += _ACCUMULATE_PASSES
        if task.op is Op.FLUSH and (norm := self.profile.device.gradient_norm) is not None:
            if self.asynchronous and task.micro_batch:  # of the sum, which is on the host
                duration_s += self._host_pass(self._dtype_bytes * task.num_params).duration_s
            else:
                duration_s += self._read(norm, task.num_params, "gradient norm")
        rate = task.num_bytes / duration_s
        uses = [
            (Resource.LINK_DOWN if down else Resource.LINK_UP, rate),
            (Resource.LINK, rate),
            (Resource.DRAM, self._at_most_dram(rate * num_passes)),
        ]
        if link.num_cores_per_copy.value:
            uses.append((Resource.CORES, link.num_cores_per_copy.value))
        if task.stalls:
            uses.append((Resource.DEVICE, 1.0))
        return Price(0.0, duration_s, tuple(sorted(uses)))

    def _storage(self, task: Work) -> Price:
        """Price a read or write of NVMe: all ranks of a node do theirs at the same time, past the page cache."""
        nvme = self.profile.nvme
        if nvme is None:
            raise ValueError(f"profile {self.profile.name} has no nvme; add it, or place nothing there")
        reads = task.lane in _STORAGE_READS
        duration_s = self._read(nvme.read if reads else nvme.write, task.num_bytes * self.ranks_per_node, "NVMe")
        if duration_s <= 0:
            return Price(0.0, 0.0)
        rate = task.num_bytes / duration_s
        capacity = self._storage_capacities()
        uses = (
            (Resource.DRAM, self._at_most_dram(rate)),
            (Resource.NVME_READ if reads else Resource.NVME_WRITE, rate),
            (Resource.NVME, min(rate, capacity[Resource.NVME])),
        )
        return Price(0.0, duration_s, uses)

    def _collective(self, task: Work) -> Price:
        """Price a collective over the ranks that share the data; each level's bytes cross what it is made of."""
        rings = self._fabrics.rings(self.layout.replicas(self._parts(task)), task.num_bytes)
        duration_s = max((ring.time_s for ring in rings), default=0.0)
        uses: list[tuple[Resource, float]] = [(Resource.FABRIC, 1.0)]
        for ring in rings:
            if ring.fabric.via_host_link and ring.time_s > 0:
                best = self.profile.host_link.down.best_rate_per_s() / self._ranks_per_uplink
                uses += [(Resource.LINK_DOWN, min(ring.num_bytes / ring.time_s, best))]
        return Price(sum(ring.fabric.latency_s.value for ring in rings), duration_s, tuple(sorted(uses)))

    def _inside_unit_s(self, kernel: Collective) -> float:
        """Return the time of a collective inside a unit, which its next kernel waits for."""
        if kernel.kind == "all-to-all":
            return self._fabrics.all_to_all_s(self.layout.parts(kernel.num_ranks), kernel.num_bytes)
        rings = self._fabrics.rings(self.layout.tensor_group, kernel.num_bytes * kernel.num_passes)
        return sum(ring.fabric.latency_s.value for ring in rings) + max((ring.time_s for ring in rings), default=0.0)

    def _send(self, task: Work) -> Price:
        """Price one rank's transfer to another stage; the outer stages exchange the gradient of tied embeddings."""
        last = self.layout.pipeline - 1
        to = {Lane.SEND: task.stage + 1, Lane.SEND_BACK: task.stage - 1}.get(task.lane, last - task.stage)
        fabric = self._fabrics.between(task.stage, to)
        return Price(fabric.latency_s.value, task.num_bytes / fabric.bytes_per_s.value, ((Resource.FABRIC, 1.0),))

    def _read(self, curve: Curve, size: float, what: str) -> float:
        reading = curve.read(size)
        low, high = curve.points[0].size, curve.points[-1].size
        # Below the range a reading is off by no more than the first point's time: not worth a word if that is small.
        if reading.extrapolated and (size > high or curve.points[0].median_s > _WORTH_A_WARNING_S):
            self.warnings.setdefault(
                f"{what} times are extrapolated: {self.profile.name} covers {low:.3g} to {high:.3g} {curve.size_unit}"
            )
        return reading.time_s


def _seconds(quantity: Quantity | None) -> float:
    return quantity.value if quantity else 0.0


def wave_factor(m: int, n: int, multiprocessors: int) -> float:
    """Return how much longer a product of an (m, n) output takes because tiles come in whole waves.

    Each multiprocessor works on one tile at a time, of 128 x 128 outputs, the commonest of cuBLAS; a tile at the edge
    and a wave that does not fill the device take as long as full ones (NVIDIA, *Matrix Multiplication Background*,
    "Tile Quantization" and "Wave Quantization").
    """
    tiles = -(-m // _TILE) * -(-n // _TILE)
    waves = -(-tiles // multiprocessors)
    return waves * multiprocessors * _TILE**2 / (m * n)


def total_flop(units: Iterable[Unit], decisions: Decisions) -> float:
    """Return the FLOP that one rank's iteration needs, without recomputation (the model FLOP of MFU).

    Args:
        units: of the whole model, or of one tensor-parallel rank's share.
        decisions: how many micro-batches; of pipeline stages the mean is taken.
    """
    kernels = itertools.chain.from_iterable((*unit.forward, *unit.backward) for unit in units)
    return decisions.num_micro_batches * flop(kernels) / decisions.pipeline_parallel
