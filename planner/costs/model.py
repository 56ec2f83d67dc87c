"""The cost model: the duration of each task on one machine, and the resources that it shares while it runs.

Costs are those of one *representative rank*. Ranks are identical, so resources that the ranks of a node share (cores,
DRAM) are divided by their number, and updates of all ranks run at the same time.
"""

import dataclasses
import math
from collections.abc import Hashable, Iterable
from typing import Literal, Self

from hwprofiles.profile import HardwareProfile
from hwprofiles.quantity import Quantity
from planner.costs.kernels import KernelCosts
from planner.costs.layout import Layout
from planner.costs.rank import RankHardware
from planner.costs.resources import Price, Resource
from planner.decisions import BF16, Decisions, Sharding
from planner.decisions.precision import SPLIT_OPERATOR_BYTES
from planner.graph import Kernel, Unit
from planner.lowering import stages
from planner.models.formulas.work import newton_schulz
from planner.models.kernels import flop, num_kernels
from planner.optimizers import ELEMENTWISE, OPTIMIZERS, Optimizer
from planner.schedule.arrays import kind_of
from planner.schedule.schedule import Schedule
from planner.schedule.tasks import Lane, Op, Task

# Passes to add a micro-batch's gradient to the sum on the host: two operands in, one out.
_ACCUMULATE_PASSES = 3
# A copy to or from memory that is not pinned goes through a small pinned buffer. Away from the device, the copy engine
# writes the buffer, and a core reads it, fetches the lines that it will write, and writes them. To the device, a core
# reads the source; the buffer that it writes stays in its cache, from where the copy engine reads.
_STAGED_PASSES = {"up": 4, "down": 1}
# A core with 8 lanes of fp32 and two multiply-adds a cycle has 64 at 2 GHz; instructions for bf16 would be faster.
_HOST_FLOP_PER_CORE_S = 50e9
_REPORTS = 6  # of memory, that the scripts of published runs make in an iteration with one micro-batch
# What gloo exchanges between processes of one machine, an order of magnitude: it copies through sockets.
_HOST_EXCHANGE_BYTES_PER_S = 1e9
_INSTANT_S = 1e-9
_STORAGE_READS = frozenset({Lane.NVME_READ, Lane.NVME_STATE_IN})
STORAGE_WRITES = frozenset({Lane.NVME_WRITE, Lane.NVME_STATE_OUT})


class CostModel:
    """Prices tasks on one hardware profile.

    Args:
        profile: the machine.
        units: the model's units.
        given: degrees of parallelism, types of weights and gradients, and the optimizer.

    Attributes:
        precision: types of weights and gradients.
        layout: the groups of ranks and their nodes.
        num_ranks, ranks_per_node: of the whole job, and of a full node; each has one device.
        stages_on_nodes: how many ranks of each pipeline stage a node has, for every kind of node.
    """

    def __init__(self, profile: HardwareProfile, units: Iterable[Unit], given: Sharding) -> None:
        self.profile = profile
        self.precision = precision = given.precision
        self._units = {unit.name: unit for unit in units}
        self._dtype_bytes = precision.weight_bytes
        self._optimizer = given.optimizer
        self._given = given
        self.layout = Layout.of(given, profile)
        self.num_ranks = self.layout.num_ranks
        self.ranks_per_node = self.layout.ranks_per_node
        self.stages_on_nodes = self.layout.stages_on_nodes()
        self._rank = RankHardware(profile, self.layout)
        self._kernels = KernelCosts(self._rank, precision)
        # Muon's products are in bf16, whatever the type of weights.
        in_bf16 = precision.weights != "bf16" and "bf16" in profile.device.gemm
        self._products = KernelCosts(self._rank, BF16) if in_bf16 else self._kernels
        self._prices: dict[Hashable, Price] = {}  # by kind
        self._same: dict[Price, Price] = {}

    @classmethod
    def of(cls, profile: HardwareProfile, units: tuple[Unit, ...], decisions: Decisions) -> Self:
        """Return the prices for what :func:`planner.lowering.lower` makes of these units and decisions.

        Raises:
            ValueError: there are fewer layers than pipeline stages.
        """
        return cls(profile, stages(decisions, units), decisions)

    @property
    def asynchronous(self) -> bool:
        """Whether the device runs apart from the thread that issues its work."""
        return self.profile.device.kind == "gpu"

    @property
    def warnings(self) -> dict[str, None]:
        """Sentences about readings outside the measured range, in order of appearance."""
        return self._rank.warnings

    def capacities(self) -> dict[Resource, float]:
        """Return what one rank has of every resource."""
        return self._rank.capacities()

    def prices(self, schedule: Schedule) -> list[Price]:
        """Return the price of every task of a schedule; tasks of one kind share one object.

        A compute task without kernels (the backward of a unit that the loss does not reach) takes an instant. If it
        took no time at all, it would seem to hold no memory.
        """
        arrays, known = schedule.arrays, self._prices
        prices = [known.get(kind) or self.price(work) for kind, work in zip(arrays.kinds, arrays.works, strict=True)]
        for number, (work, price) in enumerate(zip(arrays.works, prices, strict=True)):
            if work.lane is Lane.COMPUTE and not price.duration_s:
                prices[number] = dataclasses.replace(price, duration_s=_INSTANT_S)
        return [prices[number] for number in arrays.work.tolist()]

    def price(self, task: Task) -> Price:
        """Return the price of one task."""
        kind = kind_of(task)  # equal layers, and candidates of a search, have tasks of the same kinds
        if (price := self._prices.get(kind)) is None:
            price = self._compute(task) if task.lane is Lane.COMPUTE else self._price(task)
            price = self._prices[kind] = self._same.setdefault(price, price)
        return price

    def _parts(self, task: Task) -> int:
        """Return the number of different parts of a collective's parameters that data-parallel ranks hold."""
        if task.lane is not Lane.COLLECTIVE or task.unit not in self._units:
            return 1
        return self._units[task.unit].parts(self._given)

    def _price(self, task: Task) -> Price:
        if task.lane is Lane.LAUNCH:
            return self._launch(task)
        if task.op is Op.UPDATE:
            return self._cpu_update(task) if task.lane is Lane.CPU else self._device_update(task)
        if task.op in {Op.PASS, Op.CAST}:
            return self._rank.host_pass(task.num_bytes)
        if task.op in {Op.SEND, Op.RECEIVE}:
            return self._send(task)
        if task.lane is Lane.COLLECTIVE:
            return self._collective(task)
        return self._storage(task) if task.lane in _STORAGE_READS | STORAGE_WRITES else self._copy(task)

    def _launch(self, task: Task) -> Price:
        """Price the host's own time: the script's work, an exchange between stages, or kernels, hooks and tensors.

        Where the host is the device, it also computes the norm of gradients that stay there.
        """
        device = self.profile.device
        host_s = device.issue_s.value * task.num_kernels + _seconds(device.hook_s) * task.num_modules
        host_s += _seconds(device.step_s) * task.num_tensors
        if task.num_params and device.gradient_norm is not None:
            host_s += self._rank.read_s(device.gradient_norm, task.num_params, "gradient norm")
        if task.op is Op.LOOP:
            host_s = _seconds(device.loop_s) * task.num_modules / _REPORTS
        return Price(_seconds(device.exchange_s) if task.op is Op.RECEIVE else host_s, 0.0)

    def compute_s(self, kernels: Iterable[Kernel]) -> float:
        """Return the time that kernels take on the device, one after another."""
        return self._kernels.compute_s(kernels)

    def work(self, task: Task) -> tuple[float, float]:
        """Return the FLOP of a compute task, and the bytes that its kernels touch."""
        kernels = self.kernels_of(task)
        return flop(kernels), sum(self._kernels.time_and_bytes(kernel)[1] for kernel in kernels)

    def _compute(self, task: Task) -> Price:
        kernels = self.kernels_of(task)
        times = [self._kernels.time_and_bytes(kernel) for kernel in kernels]
        duration_s = sum(time_s for time_s, _ in times)
        if not self.asynchronous:  # the host issues and computes in turn
            duration_s += self.profile.device.issue_s.value * num_kernels(kernels)
        num_bytes = sum(num_bytes for _, num_bytes in times) + task.num_bytes
        if task.num_bytes:  # passes of an engine over what the kernels made
            duration_s += self._rank.read_s(self.profile.device.elementwise, task.num_bytes, "elementwise")
        return Price(0.0, duration_s, self._kernels.on_device(duration_s, num_bytes))

    def kernels_of(self, task: Task) -> tuple[Kernel, ...]:
        """Return the kernels of a task of the compute lane."""
        unit = self._units[task.unit]
        if task.in_fp8 and unit.fp8_twin:
            unit = unit.fp8_twin
        match task.op:
            case Op.FORWARD:
                return unit.forward
            case Op.RECOMPUTE:
                return unit.recompute
            case Op.REMAKE:
                return unit.remake
            case Op.WEIGHT_GRADIENT:
                return unit.weight_gradients
            case _:
                return unit.backward

    def _device_update(self, task: Task) -> Price:
        device = self.profile.device
        read_s = self._rank.read_s(device.optimizer, task.num_params, "device optimizer")
        products_s = sum(self._products.compute_s(newton_schulz(*shape)) for shape in task.matrices)
        if OPTIMIZERS[self._optimizer].others:
            products_s += self._rank.exchanges_s(self.layout.tensor_group, task.num_bytes)
        elif task.num_bytes:  # further passes of an engine
            products_s += self._rank.read_s(device.elementwise, task.num_bytes, "elementwise")
        state = self.precision.optimizer_state(self._kind(task))
        update_bytes = self._update_bytes(task)
        if device.kind == "gpu" and not (state.fuses and device.fuses_updates is not False):
            update_bytes = state.gpu_update_bytes or update_bytes
            update_bytes += SPLIT_OPERATOR_BYTES if task.splits else 0
        duration_s = (
            self._with_arithmetic(self._of_measured(update_bytes) * read_s, task, device.num_cores) + products_s
        )
        return Price(0.0, duration_s, self._kernels.on_device(duration_s, update_bytes * task.num_params))

    def _kind(self, task: Task) -> Optimizer:
        """Return the optimizer of an update."""
        others = OPTIMIZERS[self._optimizer].others
        return others if others and not task.matrices else self._optimizer

    def _update_bytes(self, task: Task) -> float:
        """Return the bytes per parameter that an update moves."""
        return self.precision.update_bytes_per_param(self._kind(task), splits=task.splits)

    def _with_arithmetic(self, memory_s: float, task: Task, num_cores: float) -> float:
        """Return the time of an update on so many cores, at least that of its arithmetic; on a GPU there are none."""
        kind = self._kind(task)
        core_s = self.precision.optimizer_state(kind).host_core_s
        if not num_cores or not (core_s or task.splits):
            return memory_s
        known: dict[str, Quantity] = {str(key): each for key, each in (self.profile.host.narrow_update_s or {}).items()}
        if task.splits and (splitting := known.get("adamw-split")):
            memory_s = max(memory_s, task.num_params * splitting.value / num_cores)
        name = f"{kind}-rounded" if self.precision.rounds else kind
        measured = known.get(name)
        arithmetic_s = task.num_params * (measured.value if measured else core_s) / num_cores
        if measured is None and arithmetic_s > memory_s:
            self._rank.warnings.setdefault(
                f"updates with {name} are assumed to take {core_s * 1e9:.2g} ns per parameter and core, as on an AMD "
                f"EPYC{'' if kind in ELEMENTWISE else '; `ullage calibrate --only cpu` measures it'}"
            )
        return max(memory_s, arithmetic_s)

    def _of_measured(self, update_bytes: float) -> float:
        """Return how much longer than AdamW an update takes without its products.

        Profiles have the time of AdamW. Memory binds every update, so its time is that, scaled by the bytes it moves.
        """
        return update_bytes / BF16.update_bytes_per_param("adamw")

    def _host_products_s(self, task: Task) -> float:
        """Return the time of Muon's products on the host, by the cores that update, and of exchanges before and after.

        If the device is a share of the host's cores, they are as fast as its own. Profiles of GPUs do not have products
        on the host: an assumed rate stands in for them.
        """
        device, host, ranks = self.profile.device, self.profile.host, self.ranks_per_node
        kernels = [kernel for shape in task.matrices for kernel in newton_schulz(*shape)]
        exchanges_s = self._rank.exchanges_s(self.layout.tensor_group, task.num_bytes)
        if device.kind == "host":
            return exchanges_s + self._products.compute_s(kernels) * device.num_cores * ranks / host.num_optimizer_cores
        if kernels:
            self._rank.warnings.setdefault(
                f"Muon's products on the host are assumed to run at {_HOST_FLOP_PER_CORE_S / 1e9:g} GFLOP/s a core"
            )
        if task.num_bytes:
            exchanges_s = max(exchanges_s, task.num_bytes / _HOST_EXCHANGE_BYTES_PER_S)
            self._rank.warnings.setdefault(
                "tensor-parallel ranks are assumed to exchange parts of Muon's matrices in host memory at "
                f"{_HOST_EXCHANGE_BYTES_PER_S / 1e9:g} GB/s each"
            )
        return exchanges_s + flop(kernels) * ranks / (_HOST_FLOP_PER_CORE_S * host.num_optimizer_cores)

    def _cpu_update(self, task: Task) -> Price:
        """Price an update on the rank's share of the node, because all ranks update at the same time."""
        host, ranks = self.profile.host, self.ranks_per_node
        duration_s = self._rank.read_s(host.optimizer, task.num_params * ranks, "CPU optimizer")
        if host.optimizer_process_params_per_s is not None:
            duration_s = max(duration_s, task.num_params / host.optimizer_process_params_per_s.value)
        duration_s *= self._of_measured(self._update_bytes(task))
        # It is at most as fast as memory and arithmetic allow.
        num_bytes = self._update_bytes(task) * task.num_params
        duration_s = max(duration_s, num_bytes * ranks / host.dram_bytes_per_s.value)
        duration_s = self._with_arithmetic(duration_s, task, host.num_optimizer_cores / ranks)
        duration_s += self._host_products_s(task)
        if duration_s <= 0:
            return Price(0.0, 0.0)
        dram = num_bytes / duration_s
        return Price(
            0.0,
            duration_s,
            ((Resource.CORES, host.num_optimizer_cores / ranks), (Resource.DRAM, self._rank.at_most_dram(dram))),
        )

    def _copy(self, task: Task) -> Price:
        link = self.profile.host_link
        down = task.lane in {Lane.H2D, Lane.STATE_IN, Lane.ACTIVATION_IN}
        direction: Literal["down", "up"] = "down" if down else "up"
        num_bytes = task.num_bytes * self._rank.ranks_per_uplink
        duration_s = self._rank.read_s(link.down if down else link.up, num_bytes, "copy")
        # If a core copies, the bytes are read from and written to the same DRAM.
        num_passes = 2 if link.num_cores_per_copy.value else 1
        if not task.pinned:  # one thread per rank copies to or from a pinned buffer: slower than the link, not shared
            duration_s = max(duration_s, task.num_bytes / link.pageable_rate(direction))
            if not link.num_cores_per_copy.value:
                num_passes = _STAGED_PASSES[direction]
                staged_bytes = num_passes * task.num_bytes * self.ranks_per_node
                duration_s = max(duration_s, staged_bytes / self.profile.host.dram_bytes_per_s.value)
        if duration_s <= 0:
            return Price(0.0, 0.0)
        if task.op is Op.FLUSH and task.micro_batch:
            added_s = self._rank.host_pass(_ACCUMULATE_PASSES * task.num_bytes).duration_s
            num_passes += _ACCUMULATE_PASSES
            if self.asynchronous:  # the host adds what came before: the slower of both sets the pace, or their memory
                dram_s = num_passes * task.num_bytes / self._rank.at_most_dram(math.inf)
                duration_s = max(duration_s, added_s, dram_s)
            else:
                duration_s += added_s
        if task.num_params and (norm := self.profile.device.gradient_norm) is not None:
            if self.asynchronous and task.op is Op.FLUSH and task.micro_batch:  # the norm is of the sum, on the host
                duration_s += self._rank.host_pass(self._dtype_bytes * task.num_params).duration_s
            else:
                duration_s += self._rank.read_s(norm, task.num_params, "gradient norm")
        rate = task.num_bytes / duration_s
        uses = self._rank.copying(0.0 if down else rate, rate if down else 0.0, num_passes)
        if task.stalls:
            uses.append((Resource.DEVICE, 1.0))
        return Price(0.0, duration_s, tuple(sorted(uses)))

    def _storage(self, task: Task) -> Price:
        """Price a read from or write to NVMe, past the page cache. All ranks of a node do theirs at the same time."""
        nvme = self.profile.nvme
        if nvme is None:
            raise ValueError(f"profile {self.profile.name} has no nvme; add it, or place nothing there")
        reads = task.lane in _STORAGE_READS
        duration_s = self._rank.read_s(nvme.read if reads else nvme.write, task.num_bytes * self.ranks_per_node, "NVMe")
        if duration_s <= 0:
            return Price(0.0, 0.0)
        rate = task.num_bytes / duration_s
        capacity = self._rank.storage_capacities()
        uses = (
            (Resource.DRAM, self._rank.at_most_dram(rate)),
            (Resource.NVME_READ if reads else Resource.NVME_WRITE, rate),
            (Resource.NVME, min(rate, capacity[Resource.NVME])),
        )
        return Price(0.0, duration_s, uses)

    def _collective(self, task: Task) -> Price:
        """Price a collective over data-parallel ranks: through the host, or inside and between nodes."""
        group = self.layout.replicas(self._parts(task))
        cast_s, agreed_s = 0.0, 0.0
        if task.op is Op.GATHER and task.num_params:  # the shard is cast first, with scales that ranks agree on
            num_bytes = (2 * self._dtype_bytes + 1) * task.num_params
            cast_s = self._rank.read_s(self.profile.device.elementwise, num_bytes, "elementwise")
            agreed_s = self._rank.collective(group, 0, num_rounds=2).latency_s
        if task.through_host:
            price = self._rank.through_host(group, task.num_bytes, sums=task.op is not Op.GATHER, more_s=cast_s)
        else:
            price = self._rank.collective(group, task.num_bytes, more_s=cast_s)
        return dataclasses.replace(price, latency_s=price.latency_s + agreed_s)

    def _send(self, task: Task) -> Price:
        """Price one rank's transfer to another stage. What that stage receives is there as soon as it has been sent.

        On the lane of collectives, stages add up the gradient of tied weights, as two outer ones would: a rank brings
        it together from the host, and from the shards of other ranks, and returns the sum to where it was.
        """
        if task.op is Op.RECEIVE:
            return Price(0.0, 0.0)
        count, other = self.layout.pipeline, 0 if task.stage else -1
        to = {Lane.SEND: task.stage + 1, Lane.SEND_BACK: task.stage - 1}.get(task.lane, other) % count
        fabric = self._rank.between(task.stage, to)
        rate = fabric.bytes_per_s.value
        duration_s = task.num_bytes / rate
        if task.lane is Lane.COLLECTIVE:
            if self._given.zero_stage:
                duration_s += self._collective(dataclasses.replace(task, num_bytes=2 * task.num_bytes)).duration_s
            moved_bytes = self._dtype_bytes * task.num_params
            copies = (Task(0, lane, Op.FLUSH, task.phase, num_bytes=moved_bytes) for lane in (Lane.H2D, Lane.D2H))
            duration_s += sum(self._copy(copy).duration_s for copy in copies)
        uses = tuple(sorted([*self._rank.exchanging(), *self._rank.crossing(fabric, rate)]))
        return Price(fabric.latency_s.value, duration_s, uses)


def _seconds(quantity: Quantity | None) -> float:
    return quantity.value if quantity else 0.0


def total_flop(units: Iterable[Unit], decisions: Decisions) -> float:
    """Return the FLOP of one rank's iteration without recomputation (the model FLOP of MFU).

    Args:
        units: of the whole model, or of one tensor-parallel rank's share.
        decisions: the plan's; in a pipeline, the result is the mean over stages.
    """
    total = sum(unit.num_tiles * flop((*unit.forward, *unit.backward, *unit.weight_gradients)) for unit in units)
    return decisions.num_micro_batches * total / decisions.pipeline_parallel
