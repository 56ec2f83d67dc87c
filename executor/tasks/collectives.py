"""Collectives of the schedule: all-gather of weights, all-reduce or reduce-scatter of gradients.

Gradients are reduced in the weights' type, as ``DistributedDataParallel`` does: each rank
divides its gradient by the number of ranks, and the quotients are summed; ranks that have unequal shares of a batch
weight theirs by these. If the schedule reduces once for all
micro-batches, each rank first accumulates its own gradients. If it reduces after every micro-batch, the means are
accumulated. If a parameter got no gradient on a rank, this rank contributes zeros. The parameter is updated if it got a
gradient on any rank, as with ``find_unused_parameters``.
"""

from collections.abc import Sequence
from typing import final

import numpy as np
import torch

from executor.devices.backend import Backend
from executor.devices.host_exchange import HostExchange
from executor.distributed.groups import Group
from executor.distributed.ranks import Ranks
from executor.gradients import UPDATES_AT_STEP, GradientError
from executor.memory.arenas import Arena
from executor.memory.state import ModelState
from executor.memory.units import GradientBucket, ParameterState, UnitState
from planner.decisions import Decisions
from planner.graph import Unit
from planner.lowering.memory import exchange_bytes
from planner.schedule.schedule import Schedule
from planner.schedule.tasks import MemoryClass, Op, Task


@final
class ScheduleCollectives:
    """Performs the tasks of the collective lane. The schedule is the same on all ranks.

    Attributes:
        mean_factor: factor of this rank's gradients, so that the sum over data-parallel ranks is the mean.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        state: ModelState,
        decisions: Decisions,
        schedule: Schedule,
        backend: Backend,
        ranks: Ranks,
        host: Arena,
    ) -> None:
        self._state = state
        self._backend = backend
        self._ranks = ranks
        self._shards = decisions.zero_stage >= 1
        self.mean_factor = decisions.weight / decisions.data_parallel
        self._waits = decisions.update_start == "step"
        self._scattered: dict[str, list[int]] = {}  # micro-batches after which a unit's gradient is reduced
        for task in schedule.tasks:
            if task.op is Op.SCATTER:
                self._scattered.setdefault(task.unit, []).append(task.micro_batch)
        self._through_host: dict[Group, HostExchange] = {}  # what groups use instead of their process groups
        sizes = exchange_bytes(units, decisions)
        for unit in units:
            if (num_bytes := sizes.pop(unit.parts(decisions), 0)) and (group := ranks.replicas(unit)).size > 1:
                self._through_host[group] = exchange = HostExchange(group, num_bytes, backend, ranks)
                ranks.leaving.callback(exchange.close)
                host.count(f"collectives {num_bytes}", MemoryClass.WORKSPACE, exchange.own_memory)

    def all_gather(self, unit: UnitState) -> None:
        """All-gather a unit's weights on the device from the ranks' shards."""
        if unit.fp8 is not None and unit.on_device:
            unit.fp8.cast_on_device(unit.own_weights)
        for whole, own in unit.gathers():
            self._way(unit).all_gather(whole, own)

    def _way(self, unit: UnitState) -> Group | HostExchange:
        return self._through_host.get(unit.group, unit.group)

    def collect(self, unit: UnitState, parameter: ParameterState, flat: torch.Tensor, micro_batch: int) -> None:
        """Add a gradient to its unit's bucket, in the thread that runs backward."""
        due = next(m for m in self._scattered[unit.name] if m >= micro_batch)
        if due not in unit.buckets:
            unit.buckets[due] = _empty_bucket(unit)
        values, present = unit.buckets[due]
        held = values[parameter.start : parameter.stop]
        if parameter.name in present:
            held.add_(flat)
        else:
            held.copy_(flat)
            present.add(parameter.name)

    def reduce_rest(self, doing: str) -> None:
        """Reduce the gradients that arrived after their unit's last reduction, on any rank. Ranks call it together.

        All reductions of the schedule must have ended. ``doing`` is the call that this rank is in, in words.
        """
        owners = [unit for unit, _ in self._state.by_name.values()]
        waiting = self._ranks.check_same_call(doing, [float(bool(unit.buckets)) for unit in owners])
        for name in dict.fromkeys(unit.name for unit, count in zip(owners, waiting, strict=True) if count):
            self.reduce(self._state.units[name], self._scattered[name][-1])

    def reduce(self, unit: UnitState, micro_batch: int) -> None:
        """Reduce-scatter or all-reduce a unit's gradient, and keep the part that this rank updates."""
        bucket = unit.buckets.pop(micro_batch, None)
        values, present = bucket or _empty_bucket(unit)
        for parameter in unit.parameters:
            if parameter.name not in present:
                values[parameter.start : parameter.stop].zero_()
        for start, stop in unit.pads():
            values[start:stop].zero_()
        self._backend.scale(values, self.mean_factor)
        mean = values
        if self._shards:
            mean = self._backend.scratch(len(unit.own_weights), mean.dtype)
            self._way(unit).reduce_scatter(mean, values)
        else:
            self._way(unit).all_reduce(mean)
        self._backend.record_stream(values)
        copy = any(piece.leaves for piece in unit.pieces)
        own = [(parameter, parameter.own_of(mean, unit.start)) for parameter in unit.parameters]
        for parameter, gradient in own:
            unit.keep_gradient(parameter, gradient, copy=copy)
        unit.flushing[micro_batch] = {parameter.name: gradient for parameter, gradient in own if parameter.leaving}

    def exchange(self, unit: UnitState, values: torch.Tensor) -> None:
        """Add up this rank's part of a gradient, zeros elsewhere, over the shards of ranks and over stages."""
        self.sum_shards(unit, values)
        self._ranks.sharing.all_reduce(values)

    def sum_shards(self, unit: UnitState, values: torch.Tensor) -> None:
        """Add up a gradient of which each rank has its share, and zeros elsewhere."""
        if len(unit.own_weights) < len(unit.device_weights):
            self._way(unit).all_reduce(values)

    def first_summed(self, task: Task) -> int:
        """Return the first micro-batch whose gradient a ``SCATTER`` task reduces. The last one is the task's own."""
        before = [m for m in self._scattered[task.unit] if m < task.micro_batch]
        return before[-1] + 1 if before else 0

    def sync_arrivals(self, parameters: Sequence[ParameterState], iteration: int, doing: str) -> None:
        """Mark a gradient as arrived on all ranks if it has arrived on any.

        Args:
            parameters: this rank's parts of all parameters.
            iteration: the one under way.
            doing: the call that this rank is in, in words. It must be the same on all ranks.

        Raises:
            GradientError: a parameter got a gradient on only some ranks, and its update may have begun without it.
        """
        arrived = self._ranks.check_same_call(
            doing, [float(parameter.arrived == iteration) for parameter in parameters]
        )
        for parameter, count in zip(parameters, arrived, strict=True):
            if 0 < count < self._ranks.size and not self._waits:
                raise GradientError(
                    f"{parameter.name} got a gradient on {count:g} of {self._ranks.size} ranks, but its update began "
                    f"during backward; {UPDATES_AT_STEP}"
                )
            if count:
                parameter.arrive(iteration)

    def sum_squares(
        self, parameters: Sequence[tuple[UnitState, ParameterState]], squares: Sequence[float]
    ) -> list[float]:
        """All-reduce the sums of squares of this rank's parts of gradients; return the sums for whole gradients.

        A part that several ranks hold counts once. If a parameter is not sharded over tensor-parallel ranks, they must
        all have the same bits, because their arithmetic is the same. All NaN count as equal.

        Raises:
            GradientError: they differ, so these ranks no longer train one model.
        """
        mesh = self._ranks.mesh
        if self._ranks.size == mesh.degrees.data_parallel and not self._shards and mesh.degrees.expert_parallel == 1:
            return list(squares)
        size, count = mesh.degrees.tensor_parallel, len(squares)
        rows = [0.0] * (size * count)  # one row per tensor-parallel rank
        for i, (unit, _) in enumerate(parameters):
            if self._shards or unit.group.rank == 0:
                rows[mesh.tensor * count + i] = squares[i]
        self._ranks.check_same_call("clipping, or reading norms")
        sums = np.array(self._ranks.all_reduce(rows)).reshape(size, count)
        rounding = mesh.degrees.data_parallel * 2**-52  # the same parts may be added up in another order
        alike = np.isclose(sums, sums[0], rtol=rounding, atol=0, equal_nan=True).all(0)
        totals = []
        for i, (_, parameter) in enumerate(parameters):
            divided = parameter.shard.dim is not None
            if not divided and not alike[i]:
                raise GradientError(
                    f"tensor-parallel ranks have different gradients of {parameter.shard.name}, which each rank holds "
                    "whole; give these ranks the same batches, and the same random numbers (torch.manual_seed)"
                )
            totals.append(float(sum(sums[:, i]) if divided else sums[0, i]))
        return totals


def _empty_bucket(unit: UnitState) -> GradientBucket:
    return torch.empty_like(unit.device_weights), set()
