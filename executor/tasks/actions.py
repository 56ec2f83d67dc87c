"""What the tasks of a schedule do, apart from the compute that the caller does itself."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, final

import numpy as np
import torch

from executor.devices.backend import Backend, as_array, update_on_host
from executor.memory.activations import OffloadedActivations
from executor.memory.pieces import Piece
from executor.memory.state import ModelState
from executor.memory.units import Arrived, ParameterState, StateSlot, UnitState
from executor.optimizer import WorkerTeam
from executor.optimizer.table import Rule
from executor.tasks.exchange import Exchange
from executor.tasks.snapshots import Snapshots
from planner.decisions import Decisions, Place
from planner.schedule.tasks import Lane, Op, Task

_SUM_UP: Final = frozenset({Op.FLUSH, Op.SPILL})
"""Of what belongs to a micro-batch: what has to do with the sum of all gradients when it comes to the last one."""


class ParameterUpdate(NamedTuple):
    """How one parameter is updated in one iteration."""

    rule: Rule
    scale: float  # of its gradient


class _Run(NamedTuple):
    """A stretch of a unit's flat range whose parameters are all updated in the same way."""

    start: int
    stop: int
    update: ParameterUpdate
    step: int


class _Short(NamedTuple):
    """An iteration whose last micro-batches do not come."""

    num_micro_batches: int  # that have come
    first_task: int  # that may serve nothing


@final
class Actions:
    """Performs tasks on a model's state. Each method runs in the thread of the task's lane.

    Args:
        state: what is worked on.
        decisions: where things live.
        backend: the device.
        team: threads for updates on the host.
        exchange: does what several ranks do together; ``None`` if there is one.
        offloaded: activations that leave.
    """

    def __init__(
        self,
        state: ModelState,
        decisions: Decisions,
        backend: Backend,
        team: WorkerTeam,
        exchange: Exchange | None,
        offloaded: OffloadedActivations,
    ) -> None:
        self._state = state
        self._backend = backend
        self._team = team
        self._exchange = exchange
        self._clips = decisions.clip
        self._updates_at_step = decisions.update_start == "step"
        self._num_micro_batches = decisions.num_micro_batches
        self._updates: dict[int, Mapping[str, ParameterUpdate]] = {}
        self._short: dict[int, _Short] = {}
        self._slot_of: dict[tuple[str, int], StateSlot] = {}
        self._by_op: dict[Op, Callable[[Task, int], None]] = {
            Op.READ: lambda task, _iteration: self.read(state.units[task.unit]),
            Op.FETCH: lambda task, _iteration: self.fetch(state.units[task.unit]),
            Op.GATHER: lambda task, _iteration: self.gather(state.units[task.unit]),
            Op.SCATTER: self._scatter,
            Op.FLUSH: self._flush,
            Op.LOAD: self._load,
            Op.UPDATE: self._update,
            Op.STORE: self._store,
            Op.UPLOAD: self._upload,
            Op.SWAP_IN: self._swap_in,
            Op.SWAP_OUT: self._swap_out,
            Op.OFFLOAD: lambda task, _iteration: offloaded.leave(task.unit),
            Op.SPILL: self._spill,
            Op.EVICT: lambda task, _iteration: offloaded.evict(task.unit),
            Op.RECALL: lambda task, _iteration: offloaded.recall(task.unit),
            Op.RELOAD: lambda task, _iteration: offloaded.come_back(task.unit),
            Op.SNAPSHOT: self._snapshot,
            Op.GATE: self._gate,
        }
        self.snapshots: Snapshots | None = None

    def perform(self, task: Task, iteration: int) -> None:
        """Do the work of a task."""
        if not self._serves_nothing(task, iteration):
            self._by_op[task.op](task, iteration)

    def end_early(self, iteration: int, num_micro_batches: int, num_issued: int) -> None:
        """Take it that an iteration has no more micro-batches than these, before anything else of it is issued.

        [Note: Short groups] A user's loop ends an iteration early where its data end. The rest of the schedule is
        issued all the same, so that what follows finds the order that it relies on, but nothing moves for micro-batches
        that do not come. Only what their tasks would have summed up is: gradients that pile up until the last one are
        added up over the ranks, their norms are taken, and they go on to NVMe. Which tasks serve nothing is decided by
        where the caller is in the schedule and not by the time, so that ranks agree.

        Args:
            iteration: the one under way.
            num_micro_batches: that have come.
            num_issued: tasks of the iteration that have been issued.
        """
        self._short = {i: short for i, short in self._short.items() if i == iteration - 1}
        self._short[iteration] = _Short(num_micro_batches, num_issued)

    def _serves_nothing(self, task: Task, iteration: int) -> bool:
        """Return whether a task is for micro-batches alone that do not come; see [Note: Short groups]."""
        short = self._short.get(iteration)
        if short is None or task.index < short.first_task or task.micro_batch < short.num_micro_batches:
            return False
        if task.op is Op.SCATTER:
            assert self._exchange is not None
            return self._exchange.first_summed(task) >= short.num_micro_batches
        return task.op not in _SUM_UP

    def begin_updates(self, iteration: int, updates: Mapping[str, ParameterUpdate]) -> None:
        """Say how every parameter is to be updated in an iteration, before its first update is issued."""
        self._updates = {i: known for i, known in self._updates.items() if i == iteration - 1} | {iteration: updates}

    def fetch(self, unit: UnitState) -> None:
        """Bring a unit's weights, or the rank's shard of them, into its slot."""
        for own, served in unit.fetches():
            self._backend.copy(own, served)

    def read(self, unit: UnitState) -> None:
        """Read a unit's weights, or the rank's shard of them, from NVMe into host memory."""
        assert self._state.stored is not None
        self._state.stored.read_weights(unit.name)

    def settle(self) -> None:
        """Wait for what the caller's thread has given to the device."""
        self._backend.seconds(self._backend.mark(Lane.COMPUTE))

    def gather(self, unit: UnitState) -> None:
        """Make a unit's weights whole on the device; all ranks do so together."""
        assert self._exchange is not None
        self._exchange.gather(unit)

    def upload(self, unit: UnitState, piece: Piece) -> None:
        """Bring what the host has updated to the device."""
        self._backend.copy(unit.own(piece), unit.uploaded(piece))

    def collect(
        self, unit: UnitState, parameter: ParameterState, gradient: torch.Tensor, micro_batch: int, iteration: int
    ) -> None:
        """Take a gradient from autograd, in the thread that runs backward, and see that it goes where it is needed."""
        flat = gradient.reshape(-1)
        first = parameter.arrived != iteration
        if self._exchange is not None and unit.group is not None:
            self._exchange.collect(unit, parameter, flat, micro_batch)
        else:
            if self._exchange is not None and self._exchange.mean_factor != 1:
                self._backend.scale(flat, self._exchange.mean_factor)
            self._keep(unit, parameter, flat, micro_batch, first=first)
        if first:
            parameter.arrived = iteration
            parameter.step += 1

    @staticmethod
    def _keep(unit: UnitState, parameter: ParameterState, flat: torch.Tensor, micro_batch: int, *, first: bool) -> None:
        """Hold a gradient until it is flushed or updated with."""
        whole = not any(parameter.leaving_parts())
        for part in parameter.parts:
            if part.piece.leaves:
                arrived = Arrived(flat, parameter.start)
                unit.flushing.setdefault(micro_batch, {})[parameter.name] = arrived
                continue
            mine = flat[part.start - parameter.start : part.stop - parameter.start]
            key = (parameter.name, part.piece.index)
            if not first:
                unit.device_gradients[key].add_(mine)
            else:  # a view keeps the whole gradient, so what is flushed in part is copied
                unit.device_gradients[key] = mine if whole else mine.clone()

    def norms(self, iteration: int) -> dict[str, torch.Tensor]:
        """Return the 2-norms of an iteration's gradients, float32 scalars on the device, once all have been flushed.

        They are those of whole parameters, by their names, whatever of them this rank has.
        """
        sums: dict[str, list[torch.Tensor]] = {}
        first: dict[str, tuple[UnitState, ParameterState]] = {}
        for unit, parameter in self._state.parameters():
            if parameter.arrived == iteration:
                first.setdefault(parameter.share.name, (unit, parameter))
                sums.setdefault(parameter.share.name, []).extend(
                    (
                        *(parameter.squares if parameter.flushed == iteration else ()),
                        *(
                            self._backend.sum_of_squares(unit.device_gradients[parameter.name, part.piece.index])
                            for part in parameter.staying_parts()
                        ),
                    )
                )
        if not sums:
            return {}
        # To the host as one tensor and back as one: each copy waits for the device.
        terms = [term for of_parameter in sums.values() for term in of_parameter]
        squares = iter(torch.stack(terms).tolist() if terms else ())
        totals = [sum(itertools.islice(squares, len(terms))) for terms in sums.values()]
        if self._exchange is not None:
            totals = self._exchange.summed(tuple(first.values()), totals)
        norms = torch.tensor(totals, dtype=torch.float64).sqrt().to(torch.float32).to(self._backend.device)
        return dict(zip(sums, norms.unbind(), strict=True))

    def _scatter(self, task: Task, _iteration: int) -> None:
        assert self._exchange is not None
        self._exchange.scatter(task)

    def _upload(self, task: Task, _iteration: int) -> None:
        unit = self._state.units[task.unit]
        if task.piece in unit.changed:  # what is frozen is there already
            unit.changed.remove(task.piece)
            self.upload(unit, unit.pieces[task.piece])

    def _flush(self, task: Task, iteration: int) -> None:
        """Copy gradients to the host, or add them to those of earlier micro-batches in their own type, as autograd."""
        unit = self._state.units[task.unit]
        gradients = unit.flushing.pop(task.micro_batch, {})
        last = task.micro_batch == self._num_micro_batches - 1
        for parameter in unit.parameters:
            gradient = gradients.get(parameter.name)
            if gradient is not None:
                self._flush_one(unit, parameter, gradient, iteration)
            if last and self._clips and parameter.flushed == iteration:
                parameter.squares = list(self._squares(unit, parameter, gradient))

    def _flush_one(self, unit: UnitState, parameter: ParameterState, gradient: Arrived, iteration: int) -> None:
        for part in parameter.leaving_parts():
            held = unit.gradient(part.piece)[part.start - part.piece.start : part.stop - part.piece.start]
            source = gradient.of(part)
            if self._num_micro_batches == 1:
                self._backend.copy(held, source)
            else:
                self._backend.accumulate(held, source, first=parameter.flushed != iteration)
        self._backend.used(gradient.values)
        parameter.flushed = iteration

    def _squares(self, unit: UnitState, parameter: ParameterState, gradient: Arrived | None) -> Iterator[torch.Tensor]:
        for part in parameter.leaving_parts():
            if self._num_micro_batches == 1:  # the device is faster, and the host's copy may still be on its way
                assert gradient is not None
                yield self._backend.sum_of_squares(gradient.of(part))
            else:
                held = unit.gradient(part.piece)[part.start - part.piece.start : part.stop - part.piece.start]
                yield self._backend.sum_of_squares_on_host(held, self._team)

    def _load(self, task: Task, iteration: int) -> None:
        unit = self._state.units[task.unit]
        piece = unit.pieces[task.piece]
        if not self._touched(unit, piece, iteration):
            return  # nothing of it is trained, so its state stays where it is
        slot = self._state.state_slots[task.slot].first(piece.num_params)
        for target, source in zip(slot.state, unit.state(piece), strict=True):
            self._backend.copy(target, source)
        if piece.leaves:
            self._backend.copy(slot.weights, unit.gradient(piece))
        self._slot_of[unit.name, piece.index] = slot

    def _store(self, task: Task, _iteration: int) -> None:
        unit = self._state.units[task.unit]
        piece = unit.pieces[task.piece]
        slot = self._slot_of.pop((unit.name, piece.index), None)
        if slot is None:
            return
        for target, source in zip(unit.state(piece), slot.state, strict=True):
            self._backend.copy(target, source)
        weights = unit.host_weight(piece)
        if weights is not None:
            self._backend.copy(weights, slot.weights)

    def _swap_in(self, task: Task, _iteration: int) -> None:
        """Read state into a host buffer, unless nothing of it is trained; gradients may still be on their way."""
        unit, stored = self._state.units[task.unit], self._state.stored
        assert stored is not None
        stored.swap_in((unit.name, task.piece), task.slot, reads=unit.is_trained(unit.pieces[task.piece]))

    def _spill(self, task: Task, iteration: int) -> None:
        """Write what has come of a unit's gradients to NVMe."""
        unit, stored = self._state.units[task.unit], self._state.stored
        assert stored is not None
        assert stored.spilled is not None
        for piece in unit.pieces:
            if piece.spilled and self._touched(unit, piece, iteration):
                stored.spilled.spill((unit.name, piece.index))

    def _swap_out(self, task: Task, _iteration: int) -> None:
        assert self._state.stored is not None
        self._state.stored.swap_out((task.unit, task.piece))

    def _snapshot(self, task: Task, iteration: int) -> None:
        if self.snapshots is not None:
            self.snapshots.take((task.unit, task.piece), iteration)

    def _gate(self, task: Task, _iteration: int) -> None:
        if self.snapshots is not None:
            self.snapshots.release((task.unit, task.piece))

    def _update(self, task: Task, iteration: int) -> None:
        unit = self._state.units[task.unit]
        piece = unit.pieces[task.piece]
        if task.lane is Lane.CPU:
            self._update_on_host(unit, piece, iteration)
        elif piece.place is Place.GPU:
            self._update_staying(unit, piece, unit.state(piece), iteration)
        else:
            self._update_streamed(unit, piece, iteration)

    def _update_on_host(self, unit: UnitState, piece: Piece, iteration: int) -> None:
        held = self._host_state(unit, piece, iteration)
        if held is None:
            return
        state, weights = [*held, self._host_gradient(unit, piece)], self._host_weight(unit, piece)
        rounds = weights is not None and weights.dtype is not torch.float32
        if weights is not None and rounds:
            state.append(weights)
        num_updated = 0
        for run in self._runs(unit, piece, iteration):
            num_updated += run.stop - run.start
            cut = tuple(tensor[run.start - piece.start : run.stop - piece.start] for tensor in state)
            update_on_host(cut, run.update.rule, run.step, run.update.scale, self._team)
            unit.changed.add(piece.index)
            if self._state.stored is not None and piece.place is Place.NVME:
                self._state.stored.changed((unit.name, piece.index))
        if unit.on_nvme:
            if weights is not None and 0 < num_updated < piece.num_params:  # they are written with those beside them
                weights.copy_(held[0])
        elif weights is not None and not rounds:
            np.copyto(as_array(weights), as_array(held[0]))
        elif piece.in_place and weights is not None:
            self._put_back(unit, piece, (weights, held[0]), iteration)

    def _host_state(self, unit: UnitState, piece: Piece, iteration: int) -> tuple[torch.Tensor, ...] | None:
        """Return a piece's state on the host; ``None`` if it is on NVMe and nothing has come to update it with."""
        if piece.place is not Place.NVME:
            return unit.state(piece)
        assert self._state.stored is not None
        return self._state.stored.state((unit.name, piece.index)) if self._touched(unit, piece, iteration) else None

    def _host_gradient(self, unit: UnitState, piece: Piece) -> torch.Tensor:
        if not piece.spilled:
            return unit.gradient(piece)
        assert self._state.stored is not None
        return self._state.stored.gradient((unit.name, piece.index))

    def _host_weight(self, unit: UnitState, piece: Piece) -> torch.Tensor | None:
        """Return where an update on the host writes weights, if not to the master copy alone."""
        if not unit.on_nvme:
            return unit.host_weight(piece)
        assert self._state.stored is not None
        return self._state.stored.weights((unit.name, piece.index))

    def _put_back(
        self, unit: UnitState, piece: Piece, copies: tuple[torch.Tensor, torch.Tensor], iteration: int
    ) -> None:
        """Put weights back where there are gradients that the user dropped: the master copy rounds to the same."""
        weights, master = copies
        updated = {p.name for p, _ in self._single_runs(unit, piece, iteration)}
        for parameter in unit.parameters:
            if parameter.flushed == iteration and parameter.name not in updated:
                for part in (part for part in parameter.parts if part.piece.index == piece.index):
                    held = slice(part.start - piece.start, part.stop - piece.start)
                    weights[held].copy_(master[held])

    def _update_staying(self, unit: UnitState, piece: Piece, state: tuple[torch.Tensor, ...], iteration: int) -> None:
        """Update with a gradient that stayed on the device, and write the weights where they are resident."""
        weights = unit.own(piece) if unit.on_device else None
        singles = self._single_runs(unit, piece, iteration)
        for run in self._runs(unit, piece, iteration):
            gradients, stop = list[torch.Tensor](), run.start
            while stop < run.stop:
                parameter, single = next(singles)
                gradients.append(unit.device_gradients.pop((parameter.name, piece.index)))
                stop = single.stop
            held = slice(run.start - piece.start, run.stop - piece.start)
            cut = [tensor[held] for tensor in state]
            if weights is not None and weights.dtype is not torch.float32:
                cut.append(weights[held])
            self._backend.update(cut, gradients, run.update.rule, run.step, run.update.scale)
            self._spend(unit, gradients)
        for parameter in unit.parameters:  # gradients that the user dropped
            unit.device_gradients.pop((parameter.name, piece.index), None)

    def _spend(self, unit: UnitState, gradients: Sequence[torch.Tensor]) -> None:
        """Let gradients go that an update has been given.

        [Note: Spent] On a GPU the caller is ahead of updates, and would be given other memory for the next forward
        while they have not ended: up to all gradients beside all activations, which no plan has room for. Where they
        have to have ended before the unit's forward, its gradients are kept until then, when that stream may have
        their memory at once. What came from another lane has memory of that one's, and what is updated during
        backward has to go then: both are kept for the lane that updates, and are free when it is done.
        """
        if self._exchange is None and self._updates_at_step:
            unit.spent.extend(gradient for gradient in gradients if gradient.is_cuda)
            return
        for gradient in gradients:
            self._backend.used(gradient)

    def _update_streamed(self, unit: UnitState, piece: Piece, iteration: int) -> None:
        slot = self._slot_of.get((unit.name, piece.index))
        if slot is None:
            return
        if piece.leaves:
            for run in self._runs(unit, piece, iteration):
                held = slice(run.start - piece.start, run.stop - piece.start)
                *cut, weights = (tensor[held] for tensor in (*slot.state, slot.weights))
                self._backend.update(cut, [weights], run.update.rule, run.step, run.update.scale)
        else:
            self._update_staying(unit, piece, slot.state, iteration)
        # All of it, also what was not updated: rounding the same master copy again gives the same weight.
        if unit.on_device:
            unit.own(piece).copy_(slot.state[0])
        elif unit.host_weights is not None:
            slot.weights.copy_(slot.state[0])

    def _touched(self, unit: UnitState, piece: Piece, iteration: int) -> bool:
        """Return whether a gradient of a piece has come, also one that nothing is updated with.

        It may have taken the place of weights [Note: In place], or wait on the device to be dropped.
        """

        def has_come(parameter: ParameterState) -> bool:
            if piece.leaves:
                return parameter.flushed == iteration
            return (parameter.name, piece.index) in unit.device_gradients

        parts = ((parameter, part) for parameter in unit.parameters for part in parameter.parts)
        return any(part.piece.index == piece.index and has_come(parameter) for parameter, part in parts)

    def _single_runs(self, unit: UnitState, piece: Piece, iteration: int) -> Iterator[tuple[ParameterState, _Run]]:
        """Yield what is updated of a piece, parameter by parameter: those that got a gradient, as torch does."""
        updates = self._updates[iteration]
        for parameter in unit.parameters:
            if parameter.arrived != iteration or parameter.share.name not in updates:
                continue
            for part in parameter.parts:
                if part.piece.index == piece.index:
                    yield parameter, _Run(part.start, part.stop, updates[parameter.share.name], parameter.step)

    def _runs(self, unit: UnitState, piece: Piece, iteration: int) -> Iterator[_Run]:
        """Yield what is updated of a piece, neighbours that are updated alike as one."""
        open_run: _Run | None = None
        for _, run in self._single_runs(unit, piece, iteration):
            if open_run and (open_run.stop, open_run.update, open_run.step) == (run.start, run.update, run.step):
                open_run = open_run._replace(stop=run.stop)
                continue
            if open_run:
                yield open_run
            open_run = run
        if open_run:
            yield open_run
