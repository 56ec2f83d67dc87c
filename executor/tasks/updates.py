"""Optimizer updates of pieces: on the host, on the device, and streamed through the device."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

import numpy as np
import torch

from executor.devices.backend import Backend, as_array, update_on_host
from executor.distributed.groups import Group
from executor.distributed.matrices import Run, update_matrices
from executor.memory.pieces import Piece, State, as_state
from executor.memory.state import ModelState
from executor.memory.units import ParameterState, UnitState
from executor.optimizer.passes import cut
from executor.optimizer.split import SplitMaster
from executor.optimizer.table import Rule
from executor.optimizer.workers import WorkerTeam
from planner.decisions import Decisions, Place
from planner.schedule.tasks import Lane, Op, Task


@final
class UpdateTasks:
    """Performs updates, and copies the state of streamed pieces to the device and back."""

    def __init__(
        self,
        state: ModelState,
        decisions: Decisions,
        backend: Backend,
        team: WorkerTeam,
        matrices: Group | None = None,
    ) -> None:
        self._state = state
        self._matrices = matrices
        self._backend = backend
        self._team = team
        self._master_is_weight = decisions.precision.master_is_weight
        self._weight_in_state = decisions.weight_in_state
        self._takes_back = decisions.takes_back
        self._keeps_spent = decisions.num_devices == 1 and (decisions.update_start == "step" or self._takes_back)
        self._rules: dict[int, Mapping[str, Rule]] = {}  # by iteration, then by parameter
        # Streamed pieces that are in a slot: the tensors of their state there, and their weights.
        self._in_slot: dict[tuple[str, int], tuple[tuple[torch.Tensor, ...], torch.Tensor]] = {}

    def begin(self, iteration: int, rules: Mapping[str, Rule]) -> None:
        """Set how each parameter is updated in an iteration. Call it before the iteration's first update is issued."""
        self._rules = {i: known for i, known in self._rules.items() if i == iteration - 1} | {iteration: rules}

    def has_begun(self, iteration: int, rules: Mapping[str, Rule]) -> bool:
        """Return whether these are the rules with which an iteration's updates have begun."""
        return self._rules.get(iteration) == rules

    def begin_back(self, iteration: int) -> None:
        """Let updates of an iteration be taken back, until it begins with other rules."""
        self._rules[iteration] = {name: rule.back() for name, rule in self._rules[iteration].items()}

    def release(self, task: Task) -> None:
        """Release the gradients on the device that an update has read, because it is not taken back any more."""
        unit = self._state.units[task.unit]
        if self._takes_back and task.op is Op.UPDATE:
            self._release_gradients(unit, [*self._take_gradients(unit, unit.pieces[task.piece]).values()])

    def update(self, task: Task, iteration: int) -> None:
        """Update a piece on the lane that the plan chose."""
        unit = self._state.units[task.unit]
        piece = unit.pieces[task.piece]
        if task.lane is Lane.CPU:
            self._update_on_host(unit, piece, iteration)
        elif piece.place is Place.GPU:
            self._update_on_device(unit, piece, unit.state(piece), iteration)
        else:
            self._update_streamed(unit, piece, iteration)

    def move_gradients(self, task: Task, device: torch.device) -> None:
        """Move the gradients that an update reads and frees on the device: to the host if it waits, and back again."""
        unit = self._state.units[task.unit]
        if task.op is Op.UPDATE:
            for (name, piece), gradient in list(unit.device_gradients.items()):
                if piece == task.piece and gradient.device != device:
                    unit.device_gradients[name, piece] = gradient.to(device)
                    if gradient.is_cuda:
                        self._backend.record_stream(gradient)

    def load(self, task: Task, iteration: int) -> None:
        """Copy a streamed piece's state into its slot on the device, unless no gradient of it has arrived."""
        unit = self._state.units[task.unit]
        piece = unit.pieces[task.piece]
        if not unit.has_gradient(piece, iteration):
            return
        slot, weights = self._state.state_slots[task.slot]
        tensors, weights = piece.state_in(slot), weights[: piece.num_params]
        for target, source in zip(tensors, unit.tensors(piece), strict=True):
            self._backend.copy(target, source)
        if piece.leaves:
            self._backend.settle()
            self._backend.copy(weights, unit.gradient(piece))
        self._in_slot[unit.name, piece.index] = tensors, weights

    def store(self, task: Task, _iteration: int) -> None:
        """Copy a streamed piece's state from its slot back to the host."""
        unit = self._state.units[task.unit]
        piece = unit.pieces[task.piece]
        if (slot := self._in_slot.pop((unit.name, piece.index), None)) is None:
            return
        for target, source in zip(unit.tensors(piece), slot[0], strict=True):
            self._backend.copy(target, source)
        weights = unit.host_weight(piece)
        if weights is not None:
            self._backend.copy(weights, slot[1])

    def _update_on_host(self, unit: UnitState, piece: Piece, iteration: int) -> None:
        key, stored = (unit.name, piece.index), self._state.nvme if piece.place is Place.NVME else None
        if stored is not None and not unit.has_gradient(piece, iteration):
            return  # its state has not been read
        self._backend.settle()
        held = unit.state(piece) if stored is None else stored.state(key)
        gradient = self._state.nvme.gradient(key) if piece.spilled else unit.gradient(piece)
        # Memory to write weights to, besides the master copy; None if there is none.
        weights = self._state.nvme.weights(key) if unit.on_nvme else unit.host_weight(piece)
        rounds = weights is not None and not self._weight_in_state
        state = [*held, *([weights] if weights is not None and rounds else [])]
        runs = list(self._runs(unit, piece, iteration))
        self._take([_given(run, piece, _within(run, piece, [gradient]), state) for run in runs], on_host=True)
        num_updated = sum(run.stop - run.start for run in runs)
        if num_updated:
            unit.changed.add(piece.index)
            if stored is not None:
                stored.set_changed(key)
        if weights is None:
            return
        master = held[0].weight if isinstance(held[0], SplitMaster) else held[0]
        if unit.on_nvme:
            if 0 < num_updated < piece.num_params:  # the piece is written whole, with weights that got no update
                weights.copy_(master)
        elif not rounds:
            np.copyto(as_array(weights), as_array(master))
        elif piece.in_place:
            self._restore_dropped(unit, piece, weights, master, iteration)

    def _take(self, runs: Sequence[Run], *, on_host: bool = False) -> None:
        """Take steps one after another, and at last those of matrices that ranks share, together."""
        memory = self._state.update_memory if on_host else None
        for run in runs:
            if run.shard is not None:
                continue
            if on_host:
                update_on_host(run.state, run.gradients[0], run.rule, run.step, self._team, memory)
            else:
                self._backend.update(run.state, run.gradients, run.rule, run.step)
        shared = [run for run in runs if run.shard is not None]
        if shared:
            assert self._matrices is not None
            update_matrices(
                shared, self._matrices, functools.partial(self._matrices.all_to_all, on_host=on_host), memory
            )

    def _restore_dropped(
        self, unit: UnitState, piece: Piece, weights: torch.Tensor, master: torch.Tensor, iteration: int
    ) -> None:
        """Overwrite gradients that the user dropped with weights from the master copy, which round to the same bits."""
        updated = {p.name for p, _ in self._parameter_runs(unit, piece, iteration)}
        for parameter in unit.parameters:
            if parameter.flushed == iteration and parameter.name not in updated:
                for part in parameter.parts_in(piece):
                    weights[part.within].copy_(master[part.within])

    def _update_on_device(self, unit: UnitState, piece: Piece, state: State, iteration: int) -> None:
        """Update with a gradient that stayed on the device, and write the resident weights, if there are any."""
        targets = (unit.own(piece),) if unit.on_device and not (self._master_is_weight or piece.splits) else ()
        singles, runs = self._parameter_runs(unit, piece, iteration), list[Run]()
        held = self._take_gradients(unit, piece, keeps=self._takes_back)
        for run in self._runs(unit, piece, iteration):
            gradients, stop = list[torch.Tensor](), run.start
            while stop < run.stop:
                parameter, single = next(singles)
                gradients.append(held[parameter.name])
                stop = single.stop
            runs.append(_given(run, piece, gradients, (*state, *targets)))
        self._take(runs)
        if not self._keeps_spent:
            for gradient in held.values():
                self._backend.record_stream(gradient)
        if not self._takes_back:
            self._release_gradients(unit, [*held.values()])

    def _take_gradients(self, unit: UnitState, piece: Piece, *, keeps: bool = False) -> dict[str, torch.Tensor]:
        """Return the gradients of a piece that are on the device, by parameter; the unit has them no more."""
        held = unit.device_gradients
        keys = [key for parameter in unit.parameters if (key := (parameter.name, piece.index)) in held]
        return {key[0]: held[key] if keeps else held.pop(key) for key in keys}

    def _release_gradients(self, unit: UnitState, gradients: Sequence[torch.Tensor]) -> None:
        """Release gradients that an update has read.

        [Note: Spent] On a GPU the caller runs ahead of the updates. If a gradient were freed here, the allocator could
        not reuse its memory before the update has ended. So the next forward would allocate other memory: in the worst
        case, all gradients and all activations would be held at once, which no plan has memory for. Therefore, if
        updates end before the unit's next forward, the unit keeps its gradients until that forward. The stream of that
        forward may reuse their memory at once. Two kinds of gradients cannot wait: gradients that another lane
        allocated, and gradients that are updated during backward and not taken back. They are recorded on the stream
        of the update, and become free when the update is done.
        """
        if self._keeps_spent:
            unit.spent.extend(gradient for gradient in gradients if gradient.is_cuda)

    def _update_streamed(self, unit: UnitState, piece: Piece, iteration: int) -> None:
        if (slot := self._in_slot.get((unit.name, piece.index))) is None:
            return
        tensors, weights = slot
        state = as_state(tensors, splits=piece.splits)
        if piece.leaves:
            runs = self._runs(unit, piece, iteration)
            self._take([_given(run, piece, _within(run, piece, [weights]), state) for run in runs])
        else:
            self._update_on_device(unit, piece, state, iteration)
        # Write the whole piece: parameters without an update get the same bits again.
        if unit.on_device:
            unit.own(piece).copy_(tensors[0])
        elif unit.host_weights is not None:
            weights.copy_(tensors[0])

    def _parameter_runs(self, unit: UnitState, piece: Piece, iteration: int) -> Iterator[tuple[ParameterState, Run]]:
        """Yield each parameter of a piece that got a gradient and is updated, with its range."""
        rules = self._rules[iteration]
        for parameter in unit.parameters:
            if parameter.arrived != iteration or parameter.shard.name not in rules:
                continue
            rule = rules[parameter.shard.name].counting(parameter.numbers, parameter.step)
            for part in parameter.parts_in(piece):
                here = rule.at(part.start - parameter.start)
                is_shared = self._matrices is not None and piece.kind == "muon" and parameter.shard.dim is not None
                yield (
                    parameter,
                    Run(part.start, part.stop, here, parameter.step, parameter.shard if is_shared else None),
                )

    def _runs(self, unit: UnitState, piece: Piece, iteration: int) -> Iterator[Run]:
        """Yield the ranges of a piece that are updated. Adjacent ranges with the same update are merged."""
        open_run: Run | None = None
        for _, run in self._parameter_runs(unit, piece, iteration):
            same = open_run and (open_run.stop, open_run.rule, open_run.step) == (run.start, run.rule, run.step)
            if open_run and same and open_run.shard is run.shard is None:
                open_run = open_run._replace(stop=run.stop)
                continue
            if open_run:
                yield open_run
            open_run = run
        if open_run:
            yield open_run


def _given(run: Run, piece: Piece, gradients: Sequence[torch.Tensor], state: Sequence[Any]) -> Run:
    """Return a run with its range of a piece's state, and with its gradients."""
    return run._replace(gradients=gradients, state=_within(run, piece, state))


def _within(run: Run, piece: Piece, values: Sequence[Any]) -> tuple[Any, ...]:
    """Return a run's range of a piece's state, master copy first, or of other tensors of it."""
    return cut(values, run.start - piece.start, run.stop - piece.start)
