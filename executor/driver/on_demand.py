"""The rest of an iteration whose model has left the plan.

[Note: On demand] A plan is a forecast: it brings weights before modules need them, in the order of the example batch. A
model or loop may leave that order: other modules, a second forward before the first one's backward, a batch without
backward, one more backward, a forward without gradients in between. Then nothing more is brought ahead in this
iteration. Weights come when a module runs, into the slot that the plan gives its unit, so views that autograd has saved
stay right, see [Note: Static slots] in :mod:`planner.lowering.parameters`. Activations stay as autograd keeps them;
those that were offloaded come back when backward asks for them. Gradients are added up on the host, in the order in
which they arrive. At the step, the rest of the schedule is issued without its tasks for forward and backward, so
gradients go where the updates read them, and these run as planned. The next iteration follows the plan again.

A backward that makes a graph of its own (``create_graph=True``) saves weights again, and no hook sees that graph. So
all weights get memory of their own until the step. Saved views of slots are read from there.

Gradients that have reached the host by then are taken back first. They may have overwritten weights [Note: In place],
which are made again from the master copy: it rounds to the same bits.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Any, final

import torch

from executor.callbacks import nodes, saved_as_is
from executor.distributed.shards import ParameterShard, unshard
from executor.driver.runtime import OF_GRADIENTS, Runtime
from executor.gradients import UPDATES_AT_STEP
from executor.memory.units import NEVER, ParameterState, UnitState
from executor.module.guards import SECOND_ORDER
from executor.module.visibility import WeightVisibility
from executor.packed import as_real
from planner.decisions import Decisions, Place
from planner.schedule.loop import OutOfOrderError
from planner.schedule.tasks import Op


@final
class OnDemand:
    """Brings weights and adds up gradients in an iteration that has left the plan; see [Note: On demand].

    The constructor waits for all tasks of the plan that were issued, and takes their gradients back. Ranks leave the
    plan together, bring the same units in the same order, and end the iteration together.

    Args:
        dropped: names of parameters whose gradients the user has dropped, as ``zero_grad()`` does.

    Raises:
        RankError: another rank has not left the plan here, or it has failed.
    """

    def __init__(self, runtime: Runtime, decisions: Decisions, dropped: Collection[str]) -> None:
        self._runtime = runtime
        self._iteration = runtime.loop.iteration
        self._last = decisions.num_micro_batches - 1
        self._first_skipped = runtime.loop.num_issued
        self._doing = f"iteration {self._iteration + 1}, which left the plan after {self._first_skipped} of its tasks"
        self._held: dict[str, dict[str, torch.Tensor]] = {name: {} for name in runtime.state.units}
        runtime.machine.wait()
        runtime.actions.synchronize()
        runtime.doing = self._doing
        runtime.check_same_call()
        runtime.begin_on_demand()
        runtime.offloaded.end_evictions()
        # First those whose gradients are in host memory, which gradients from NVMe pass through.
        for unit in sorted(runtime.state.units.values(), key=self._has_spilled):
            self._take_back(unit)
        self.drop(dropped)

    def bring(self, unit: str) -> None:
        """Bring all weights that a unit uses to the device.

        Raises:
            RankError: another rank brings another unit, or it has failed.
        """
        if self._runtime.gathers:
            self._runtime.doing = f"{self._doing}, at {unit}"
            self._runtime.check_same_call()
        self._runtime.fill_slots(unit)

    def collect(self, unit: UnitState, parameter: ParameterState, gradient: torch.Tensor) -> None:
        """Take a gradient from autograd, in the thread that runs backward."""
        leaving = self._runtime.actions.gradients.take(unit, parameter, gradient, self._last, self._iteration)
        if leaving is not None:
            self._add(unit, parameter, leaving)

    def gradient(self, name: str) -> torch.Tensor:
        """Return a copy of a parameter's gradient on the device, of its shape; zeros if none has come.

        It is the mean over ranks, which call this together.

        Raises:
            RankError: another rank reads the gradient of another parameter, or does something else, or has failed.
        """
        parts = list(self._own_gradients(name))
        return parts[0][0].in_model(unshard(parts, self._runtime.ranks)).to(self._runtime.backend.device)

    def _own_gradients(self, name: str) -> Iterator[tuple[ParameterShard, torch.Tensor]]:
        """Yield this rank's parts of a parameter's gradient, of their shapes."""
        self._reduce(name)
        for unit, parameter in self._runtime.state.by_parameter[name]:
            values = torch.zeros(
                parameter.stop - parameter.start,
                dtype=self._runtime.state.dtype,
                device=self._runtime.backend.device,
            )
            held = self._held[unit.name].get(parameter.name)
            for part in parameter.leaving if held is not None else ():
                assert held is not None
                parameter.values_of(part, values).copy_(parameter.part_of(part, held))
            for part in parameter.staying:
                if (gradient := unit.device_gradients.get((parameter.name, part.piece.index))) is not None:
                    parameter.values_of(part, values).copy_(gradient)
            if self._runtime.collectives is not None:
                self._runtime.collectives.sum_shards(unit, values)
            yield parameter.shard, values.view(parameter.shard.shape)

    def replace(self, name: str, values: torch.Tensor) -> None:
        """Set a parameter's gradient, of which each rank keeps its share. Ranks call this together.

        Raises:
            RankError: see :meth:`gradient`.
            ValueError: another rank has other values.
        """
        self._runtime.check_same_values(f"the gradient of {name}", values)
        whole = as_real(values.detach())
        self.drop([name])
        for unit, parameter in self._runtime.state.by_parameter[name]:
            part = parameter.shard.part(whole)
            own = part.to(self._runtime.backend.device, self._runtime.state.dtype, copy=True).reshape(-1)
            leaving = self._runtime.actions.gradients.keep(unit, parameter, own, self._iteration)
            if leaving is not None:
                self._add(unit, parameter, leaving)

    def _reduce(self, name: str) -> None:
        """Let ranks reduce all gradients so far, because one is read. They call this together."""
        runtime = self._runtime
        if (collectives := runtime.collectives) is None:
            return
        runtime.doing = f"{self._doing}, at the gradient of {name}"
        parameters = [parameter for _, parameter in runtime.state.by_name.values()]
        collectives.sync_arrivals(parameters, self._iteration, runtime.doing)
        collectives.reduce_rest(runtime.doing)
        for unit in runtime.state.units.values():
            self._take_back_flushing(unit)

    def drop(self, names: Collection[str]) -> None:
        """Drop the gradients so far of some parameters of the model."""
        for unit, parameter in self._runtime.state.by_name.values():
            if parameter.shard.name in names and parameter.arrived == self._iteration:
                parameter.arrived = NEVER
                parameter.step -= 1
                self._held[unit.name].pop(parameter.name, None)
                for _, present in unit.buckets.values():
                    present.discard(parameter.name)
                for part in parameter.staying:
                    unit.device_gradients.pop((parameter.name, part.piece.index), None)

    def skip_rest(self) -> None:
        """Let the plan's tasks for forward and backward that were not issued do nothing, and those of gradients run."""
        self._runtime.doing = self._doing
        for unit in self._runtime.state.units.values():
            if unit.group.size == 1 and (held := self._held.pop(unit.name)):
                unit.flushing[self._last] = held
        self._runtime.actions.skip(self._iteration, self._last + 1, self._first_skipped)

    def flush_rest(self) -> None:
        """Move the gradients whose tasks had been issued before the model left the plan, after all such tasks."""
        runtime = self._runtime
        runtime.issue_gradients()
        if (collectives := runtime.collectives) is not None:
            collectives.reduce_rest(self._doing)
        gradients = runtime.actions.gradients
        for unit in runtime.state.units.values():
            held = self._held.get(unit.name, {})
            if not (unit.flushing or held or gradients.awaits_exchange(unit, self._iteration)):
                continue
            self._take_back_spilled(unit)
            for micro_batch in sorted(unit.flushing):
                gradients.flush_unit(unit, micro_batch, self._iteration)
            for parameter in unit.parameters:
                if parameter.name in held:
                    gradients.sum_up(unit, parameter, held[parameter.name], self._iteration)
            gradients.exchange(unit, self._iteration)
            for piece in unit.pieces:
                if piece.spilled and unit.has_gradient(piece, self._iteration):
                    runtime.state.nvme.spill_again((unit.name, piece.index))

    def _take_back(self, unit: UnitState) -> None:
        """Take back the gradients that have left autograd, and make weights again that they have overwritten."""
        if flushed := [parameter for parameter in unit.parameters if parameter.flushed == self._iteration]:
            self._take_back_flushed(unit, flushed)
        self._take_back_flushing(unit)

    def _take_back_flushing(self, unit: UnitState) -> None:
        for gradients in [unit.flushing.pop(micro_batch) for micro_batch in sorted(unit.flushing)]:
            for parameter in unit.parameters:
                if (gradient := gradients.get(parameter.name)) is not None:
                    self._add(unit, parameter, gradient)

    def _take_back_flushed(self, unit: UnitState, flushed: Sequence[ParameterState]) -> None:
        self._take_back_spilled(unit)
        for parameter in flushed:
            held = self._sum_of(unit, parameter)
            for part in parameter.leaving:
                parameter.part_of(part, held).copy_(unit.arrival(part))
            parameter.flushed = NEVER
        for piece in unit.pieces:
            if piece.in_place and any(any(parameter.parts_in(piece)) for parameter in flushed):
                weights = unit.host_weight(piece)
                assert weights is not None
                if piece.place is Place.NVME:
                    self._runtime.state.nvme.restore_weights((unit.name, piece.index), weights)
                else:
                    weights.copy_(unit.masters(piece))

    def _take_back_spilled(self, unit: UnitState) -> None:
        for piece in unit.pieces:
            if piece.spilled:
                self._runtime.state.nvme.take_back_gradient((unit.name, piece.index))

    def _has_spilled(self, unit: UnitState) -> bool:
        keys = ((unit.name, piece.index) for piece in unit.pieces if piece.spilled)
        return any(self._runtime.state.nvme.has_spilled(key) for key in keys)

    def _add(self, unit: UnitState, parameter: ParameterState, gradient: torch.Tensor) -> None:
        is_first = parameter.name not in self._held[unit.name]
        held = self._sum_of(unit, parameter)
        for part in parameter.leaving:
            if is_first:
                parameter.part_of(part, held).copy_(parameter.part_of(part, gradient))
            else:
                parameter.part_of(part, held).add_(parameter.part_of(part, gradient).to(held.device))

    def _sum_of(self, unit: UnitState, parameter: ParameterState) -> torch.Tensor:
        """Return the sum of a parameter's gradients in host memory.

        It is the memory that the update reads, if nothing else can be there now; else new memory.
        """
        held = self._held[unit.name]
        if parameter.name not in held:
            first, *others = (unit.arrival(part) for part in parameter.leaving)
            own = unit.group.size == 1 and not any(p.piece.in_place or p.piece.spilled for p in parameter.leaving)
            size = parameter.parts[-1].stop - parameter.parts[0].start
            held[parameter.name] = (
                first
                if own and not others and len(first) == size
                else torch.empty(size, dtype=first.dtype, device=first.device)
            )
        return held[parameter.name]


def why_not(runtime: Runtime, decisions: Decisions) -> str:
    """Return why an iteration cannot leave the plan here; empty if it can."""
    issued, last = runtime.loop.schedule.tasks[: runtime.loop.num_issued], decisions.num_micro_batches - 1
    ends = any(task.op in OF_GRADIENTS and task.micro_batch == last for task in issued)
    if any(task.op in {Op.UPDATE, Op.LOAD} for task in issued) or (ends and decisions.update_start == "backward"):
        return f"Updates of this plan begin in backward; {UPDATES_AT_STEP}"
    return ""


def check_second_order(decisions: Decisions) -> None:
    """Check that backward may make a graph of its own off the plan.

    Raises:
        OutOfOrderError: modules compute by functions of the plan's, whose backward has no graph.
    """
    tiles = any(size is not None for size in decisions.tiles.values())
    exchanges = decisions.divides_weights or decisions.context_parallel > 1  # inside modules
    if tiles or exchanges or decisions.fp8_weights:
        raise OutOfOrderError(SECOND_ORDER)


def hook_saved_weights(visibility: WeightVisibility, seen: set[Any]) -> None:
    """Let nodes behind the current one read weights that forward has saved in memory of their own, if they have it.

    Forward saves views of slots. A graph that backward makes would save them again, and read them when the slots have
    other weights.
    """
    for node in nodes(torch._C._current_autograd_node(), seen=seen):
        for saved in saved_as_is(node):
            # Parameters show the memory that they have.
            if not isinstance(saved.data, torch.nn.Parameter) and visibility.is_in_slot(saved.data):
                saved.register_hooks(_as_it_is, visibility.kept_values)


def _as_it_is(values: torch.Tensor) -> torch.Tensor:
    return values
