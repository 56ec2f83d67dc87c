"""Moves gradients from autograd to where the update reads them."""

import dataclasses
from collections.abc import Iterator
from typing import final

import torch

from executor.devices.backend import Backend
from executor.memory.state import ModelState
from executor.memory.units import ParameterState, UnitState
from executor.optimizer.workers import WorkerTeam
from executor.tasks.collectives import ScheduleCollectives
from planner.decisions import Decisions
from planner.schedule.tasks import Task


@final
@dataclasses.dataclass(frozen=True)
class GradientTasks:
    """Collects, flushes and spills gradients, and computes norms. ``_collectives`` is ``None`` if there is one rank."""

    _state: ModelState
    _decisions: Decisions
    _backend: Backend
    _team: WorkerTeam
    _collectives: ScheduleCollectives | None

    def collect(
        self, unit: UnitState, parameter: ParameterState, gradient: torch.Tensor, micro_batch: int, iteration: int
    ) -> None:
        """Take a gradient from autograd, in the thread that runs backward."""
        if (held := self.take(unit, parameter, gradient, micro_batch, iteration)) is not None:
            # In rounds, micro-batches come one after another: their sum leaves with the last.
            due = self._decisions.num_micro_batches - 1 if self._decisions.in_rounds else micro_batch
            sums = unit.flushing.setdefault(due, {})
            if parameter.name in sums:
                sums[parameter.name].add_(held)
            else:
                sums[parameter.name] = held

    def take(
        self, unit: UnitState, parameter: ParameterState, gradient: torch.Tensor, micro_batch: int, iteration: int
    ) -> torch.Tensor | None:
        """Take a gradient as :meth:`collect` does; return the rank's own part if any of it goes to the host now."""
        flat = gradient if gradient.dim() == 1 else gradient.reshape(-1)
        if (collectives := self._collectives) is not None and unit.group.size > 1:
            parameter.arrive(iteration)
            collectives.collect(unit, parameter, flat, micro_batch)
            return None
        if collectives is not None and collectives.mean_factor != 1:
            self._backend.scale(flat, collectives.mean_factor)
        return self.keep(unit, parameter, flat, iteration)

    def keep(
        self, unit: UnitState, parameter: ParameterState, flat: torch.Tensor, iteration: int
    ) -> torch.Tensor | None:
        """Take a flat gradient that is the mean over ranks; return the same as :meth:`take`."""
        parameter.arrive(iteration)
        held = parameter.own_of(flat, parameter.start)
        if parameter.staying:
            # A view keeps the whole gradient alive, so a part is copied if the rest is flushed, or that of other ranks.
            unit.keep_gradient(parameter, held, copy=bool(parameter.leaving) or unit.group.size > 1)
        return held if parameter.leaving else None

    def sum_up(self, unit: UnitState, parameter: ParameterState, gradient: torch.Tensor, iteration: int) -> None:
        """Add host memory's part of an iteration's gradient to what has been flushed."""
        self._backend.settle()
        for part in parameter.leaving:
            target, values = unit.arrival(part), parameter.part_of(part, gradient)
            if parameter.flushed == iteration:
                target.add_(values)
            else:
                target.copy_(values)
        parameter.flushed = iteration
        if self._decisions.clip:
            parameter.squares = [
                self._backend.sum_of_squares_on_host(unit.arrival(p), self._team) for p in parameter.leaving
            ]

    def exchange(self, unit: UnitState, iteration: int) -> None:
        """Add up the gradients of a unit's weights that another stage of the pipeline has too; once an iteration."""
        for parameter in self._awaiting(unit, iteration):
            assert self._collectives is not None
            parameter.exchanged = iteration
            num_values, device = parameter.stop - parameter.start, self._backend.device
            values = torch.zeros(num_values, dtype=self._state.dtype, device=device)
            self._backend.settle()
            for part in parameter.leaving if parameter.flushed == iteration else ():
                self._backend.copy(parameter.values_of(part, values), unit.arrival(part))
            held = unit.device_gradients
            staying = [((parameter.name, p.piece.index), parameter.values_of(p, values)) for p in parameter.staying]
            for key, own in staying:
                if key in held:
                    own.copy_(held[key])
            self._collectives.exchange(unit, values)
            parameter.arrive(iteration)
            for key, own in staying:
                held[key] = held[key].copy_(own) if key in held else own.clone()
            leaving = [(unit.arrival(part), parameter.values_of(part, values)) for part in parameter.leaving]
            for target, own in leaving:
                self._backend.copy(target, own)
            if leaving:
                parameter.flushed = iteration
                parameter.squares = [self._backend.sum_of_squares(own) for _, own in leaving if self._decisions.clip]

    def awaits_exchange(self, unit: UnitState, iteration: int) -> bool:
        """Return whether :meth:`exchange` has something left to do for a unit."""
        return any(True for _ in self._awaiting(unit, iteration))

    def _awaiting(self, unit: UnitState, iteration: int) -> Iterator[ParameterState]:
        tied = self._decisions.tied_weights
        return (p for p in unit.parameters if p.shard.name in tied and p.exchanged != iteration)

    def norms(self, iteration: int) -> dict[str, torch.Tensor]:
        """Return the 2-norms of an iteration's gradients, float32 scalars on the device.

        All gradients must have been flushed. Keys are names of whole parameters. Each norm is that of the whole
        parameter, even if this rank holds only a part.
        """
        sums: dict[str, list[torch.Tensor | float]] = {}
        first: dict[str, tuple[UnitState, ParameterState]] = {}
        for unit, parameter in self._state.by_name.values():
            if parameter.arrived != iteration:
                continue
            first.setdefault(parameter.shard.name, (unit, parameter))
            terms = sums.setdefault(parameter.shard.name, [])
            terms += parameter.squares if parameter.flushed == iteration else ()
            for part in parameter.staying:
                terms.append(self._backend.sum_of_squares(unit.device_gradients[parameter.name, part.piece.index]))
        if not sums:
            return {}
        # Copy one tensor to the host and one back, because each copy waits for the device.
        on_device = [term for terms in sums.values() for term in terms if isinstance(term, torch.Tensor)]
        squares = iter(torch.stack(on_device).double().square().tolist() if on_device else ())
        totals = [
            sum(next(squares) if isinstance(term, torch.Tensor) else term for term in terms) for terms in sums.values()
        ]
        if self._collectives is not None:
            totals = self._collectives.sum_squares(tuple(first.values()), totals)
        norms = (
            torch.tensor(totals, dtype=torch.float64, device="cpu").sqrt().to(torch.float32).to(self._backend.device)
        )
        return dict(zip(sums, norms.unbind(), strict=True))

    def flush(self, task: Task, iteration: int) -> None:
        """Copy gradients to the host, or add them to the sum of earlier micro-batches, in their own data type."""
        self.flush_unit(self._state.units[task.unit], task.micro_batch, iteration)

    def flush_unit(self, unit: UnitState, micro_batch: int, iteration: int) -> None:
        """Move a unit's gradients of a micro-batch, as :meth:`flush` does."""
        gradients = unit.flushing.pop(micro_batch, {})
        last = micro_batch == self._decisions.num_micro_batches - 1
        first = {parameter.name for parameter in unit.parameters if parameter.flushed != iteration}
        sums: list[tuple[torch.Tensor, torch.Tensor]] = []
        for parameter in unit.parameters:
            if (gradient := gradients.get(parameter.name)) is not None:
                sums += self._flush_one(unit, parameter, gradient, iteration)
        if sums:
            self._backend.accumulate(sums, self._team)
        for parameter in unit.parameters if last and self._decisions.clip else ():
            if parameter.flushed == iteration:
                gradient = gradients.get(parameter.name) if parameter.name in first else None
                parameter.squares = list(self._squares(unit, parameter, gradient))

    def spill(self, task: Task, iteration: int) -> None:
        """Write the gradients of a unit's pieces to NVMe, if they have arrived."""
        unit = self._state.units[task.unit]
        self._backend.settle()
        for piece in unit.pieces:
            if piece.spilled and unit.has_gradient(piece, iteration):
                self._state.nvme.spill((unit.name, piece.index))

    def _flush_one(
        self, unit: UnitState, parameter: ParameterState, gradient: torch.Tensor, iteration: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Copy an iteration's first gradient of a parameter; of later ones, yield what is to be added to what."""
        for part in parameter.leaving:
            target, source = unit.arrival(part), parameter.part_of(part, gradient)
            if target.data_ptr() == source.data_ptr():
                continue  # it was added up there, see [Note: On demand] in executor.driver.on_demand
            if parameter.flushed == iteration:
                yield target, source
            elif self._decisions.num_micro_batches == 1 or source.device == target.device:
                self._backend.copy(target, source)
            else:  # and wait: the host may read it next, for its norm
                target.copy_(source)
        if self._is_on_device(gradient):
            self._backend.record_stream(gradient)
        parameter.flushed = iteration

    def _squares(
        self, unit: UnitState, parameter: ParameterState, gradient: torch.Tensor | None
    ) -> Iterator[torch.Tensor | float]:
        for part in parameter.leaving:
            # The device is faster, and the copy to the host may still run.
            if self._decisions.num_micro_batches == 1 and gradient is not None and self._is_on_device(gradient):
                yield self._backend.sum_of_squares(parameter.part_of(part, gradient))
            else:
                self._backend.settle()
                yield self._backend.sum_of_squares_on_host(unit.arrival(part), self._team)

    def _is_on_device(self, gradient: torch.Tensor) -> bool:
        """Return whether a gradient came from autograd, and was not added up on the host."""
        return gradient.device.type == self._backend.device.type
