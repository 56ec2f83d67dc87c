"""Performs the tasks of a schedule, except the compute tasks, which the caller runs itself."""

import math
import threading
from collections.abc import Callable, Container
from typing import Final, final

import torch

from executor.devices.backend import Backend
from executor.distributed.ranks import Ranks
from executor.memory.activations import OffloadedActivations
from executor.memory.pieces import Piece
from executor.memory.state import ModelState
from executor.memory.units import UnitState
from executor.optimizer.workers import WorkerTeam
from executor.tasks.collectives import ScheduleCollectives
from executor.tasks.gradients import GradientTasks
from executor.tasks.links import Links
from executor.tasks.snapshots import Snapshots
from executor.tasks.updates import UpdateTasks
from planner.decisions import Decisions
from planner.schedule.tasks import STAGE_LANES, Lane, Op, Phase, Task

_SERVE_COMPUTING: Final = frozenset({Op.READ, Op.FETCH, Op.GATHER, Op.OFFLOAD, Op.EVICT, Op.RECALL, Op.RELOAD})
"""Tasks that serve forward and backward, outside the update. All others handle the sum of all gradients too."""
_OF_STATE: Final = frozenset({Op.SWAP_IN, Op.LOAD, Op.UPDATE, Op.STORE, Op.SWAP_OUT})


@final
class Actions:
    """Performs tasks on a model's state. Each method runs in the thread of the task's lane.

    ``collectives`` and ``ranks`` are ``None`` if there is one rank, and ``snapshots`` if there are no checkpoints.

    Attributes:
        gradients: collects, flushes and spills gradients.
        updates: performs the optimizer step.
        links: sends to other stages of a pipeline, and receives from them.
    """

    def __init__(
        self,
        state: ModelState,
        decisions: Decisions,
        backend: Backend,
        team: WorkerTeam,
        collectives: ScheduleCollectives | None,
        offloaded: OffloadedActivations,
        snapshots: Snapshots | None,
        ranks: Ranks | None = None,
    ) -> None:
        self._state = state
        self._backend = backend
        self._team = team
        self._collectives = collectives
        # Iterations whose compute tasks do not all run: micro-batches that do, and the first task that may be skipped.
        self._short: dict[int, tuple[int, int]] = {}
        self._deferred_from: tuple[int, int] | None = None  # iteration, and its first task that may be deferred
        self._deferred: list[Task] = []
        # See [Note: Speculation] in executor.driver.speculation.
        self._takes_back, self._speculated_in = decisions.takes_back, -1
        self._speculated: list[Task] = []
        self._lock = threading.Lock()
        self.gradients = GradientTasks(state, decisions, backend, team, collectives)
        self.links = Links(backend)
        self.updates = UpdateTasks(state, decisions, backend, team, None if ranks is None else ranks.matrices)

        def room(task: Task) -> str:
            return offloaded.rooms.name(task.unit, task.micro_batch, task.tile)

        self._by_op: dict[Op, Callable[[Task, int], None]] = {
            Op.READ: lambda task, _iteration: self.read(state.units[task.unit]),
            Op.FETCH: lambda task, _iteration: self.fetch(state.units[task.unit]),
            Op.GATHER: lambda task, _iteration: self.all_gather(state.units[task.unit]),
            Op.FLUSH: self.gradients.flush,
            Op.LOAD: self.updates.load,
            Op.UPDATE: self.updates.update,
            Op.STORE: self.updates.store,
            Op.UPLOAD: self._upload,
            Op.CAST: lambda task, _iteration: self.cast(state.units[task.unit]),
            Op.SWAP_IN: self._swap_in,
            Op.SWAP_OUT: lambda task, _iteration: state.nvme.swap_out((task.unit, task.piece)),
            Op.OFFLOAD: lambda task, _iteration: offloaded.offload(task.unit, room(task)),
            Op.SPILL: self.gradients.spill,
            Op.EVICT: lambda task, _iteration: offloaded.evict(room(task)),
            Op.RECALL: lambda task, _iteration: offloaded.recall(room(task)),
            Op.RELOAD: lambda task, _iteration: offloaded.reload(task.unit, room(task)),
            Op.SEND: self._send,
            Op.RECEIVE: self._send,
        }

        if collectives is not None:
            self._by_op[Op.SCATTER] = lambda task, _: collectives.reduce(state.units[task.unit], task.micro_batch)
        if snapshots is not None:
            self._by_op[Op.SNAPSHOT] = lambda task, iteration: snapshots.take((task.unit, task.piece), iteration)
            self._by_op[Op.GATE] = lambda task, _iteration: snapshots.release((task.unit, task.piece))

    def perform(self, task: Task, iteration: int) -> None:
        """Do the work of a task."""
        since, first = self._deferred_from or (-1, 0)
        if iteration == since and task.index >= first and task.phase is Phase.UPDATE:
            if not self._takes_back:  # else there is room for them
                self.updates.move_gradients(task, torch.device("cpu"))
            self._deferred.append(task)
        elif not self._short or not self._is_skipped(task, iteration):
            self._by_op[task.op](task, iteration)
            if self._takes_back and task.phase is Phase.UPDATE:
                self._end_update(task, iteration)

    def _end_update(self, task: Task, iteration: int) -> None:
        """Note that a task may have to be taken back; or release what it would have needed for that."""
        with self._lock:
            if iteration == self._speculated_in:
                self._speculated.append(task)
                return
        self.updates.release(task)

    def speculate(self, iteration: int) -> None:
        """Keep what is needed to take an iteration's updates back."""
        self._speculated_in = iteration

    def confirm(self) -> None:
        """Release what was kept, because no update will be taken back."""
        with self._lock:
            self._speculated_in, tasks, self._speculated = -1, self._speculated, []
        for task in tasks:
            self.updates.release(task)

    def take_back(self, iteration: int) -> None:
        """Take back an iteration's updates, which then wait for :meth:`perform_deferred`. All tasks must have ended."""
        self._speculated_in, self._deferred, self._speculated = -1, self._speculated, []
        self.updates.begin_back(iteration)
        self._perform_alone(iteration, _OF_STATE)

    def defer_updates(self, iteration: int, num_issued: int) -> None:
        """Let an iteration's updates wait that backward is about to begin, after the tasks that have been issued."""
        self._deferred_from = iteration, num_issued

    @property
    def defers(self) -> bool:
        """Whether updates wait for :meth:`perform_deferred`."""
        return self._deferred_from is not None

    def perform_deferred(self, iteration: int) -> None:
        """Perform the updates that wait, one after the other. All tasks that were issued must have ended."""
        self._deferred_from = None
        self._perform_alone(iteration)
        for task in self._deferred:
            self.updates.release(task)
        self._deferred = []

    def _perform_alone(self, iteration: int, ops: Container[Op] = frozenset(Op)) -> None:
        for task in sorted(self._deferred, key=lambda task: task.index):
            if task.op in ops:
                with self._backend.lane(task.lane):
                    self.updates.move_gradients(task, self._backend.device)
                    self._by_op[task.op](task, iteration)
                    self._backend.event_time_s(self._backend.record_event(task.lane))

    def skip(self, iteration: int, num_micro_batches: int, num_issued: int) -> None:
        """Skip the rest of an iteration's tasks for forward and backward. Call it before these tasks are issued.

        [Note: Short groups] If a user's data ends, the loop ends an iteration early. The rest of the schedule is issued
        all the same, because later tasks rely on its order, but tasks of missing micro-batches do nothing. Only tasks
        that handle the sum of all gradients still run: they all-reduce the sum so far, compute its norms, and write it
        to NVMe. The caller's position in the schedule, not the time, decides which tasks are skipped, so all ranks skip
        the same tasks. An iteration that has left the plan ends in the same way.

        Args:
            iteration: the one under way.
            num_micro_batches: number of micro-batches that have run.
            num_issued: number of the iteration's tasks that have been issued as planned.
        """
        self._short = {i: short for i, short in self._short.items() if i == iteration - 1}
        self._short[iteration] = num_micro_batches, num_issued

    def _is_skipped(self, task: Task, iteration: int) -> bool:
        """Return whether a task serves only micro-batches that do not run; see [Note: Short groups]."""
        num_micro_batches, first_task = self._short.get(iteration, (0, math.inf))
        if task.index < first_task:
            return False
        if task.op is Op.SCATTER:
            assert self._collectives is not None
            return self._collectives.first_summed(task) >= num_micro_batches
        if task.op in {Op.SEND, Op.RECEIVE}:  # off the plan, gradients come later, and the caller asks for the rest
            return True
        return task.op in _SERVE_COMPUTING and task.phase is not Phase.UPDATE

    def read(self, unit: UnitState) -> None:
        """Read a unit's weights, or the rank's shard of them, from NVMe into host memory."""
        if unit.landing:
            self._state.nvme.read_weights(unit.name)
        if unit.frozen is not None:
            unit.frozen.read()

    def fetch(self, unit: UnitState) -> None:
        """Copy a unit's weights, or the rank's shard of them, into its slot."""
        for own, served in unit.fetches():
            self._backend.copy(own, served)

    def all_gather(self, unit: UnitState) -> None:
        """All-gather a unit's weights on the device."""
        assert self._collectives is not None
        self._collectives.all_gather(unit)

    def cast(self, unit: UnitState) -> None:
        """Cast the host's weights of a unit that are fetched in fp8. All ranks that have shards call this together."""
        assert unit.fp8 is not None
        unit.fp8.cast(unit.served(), self._team)

    def upload(self, unit: UnitState, piece: Piece) -> None:
        """Copy weights that the host has updated to the device."""
        self._backend.copy(unit.own(piece), unit.uploaded(piece))

    def synchronize(self) -> None:
        """Wait for all work that the caller's thread has issued to the device."""
        self._backend.event_time_s(self._backend.record_event(Lane.COMPUTE))

    def _upload(self, task: Task, _iteration: int) -> None:
        unit = self._state.units[task.unit]
        if task.piece in unit.changed:  # frozen weights are on the device already
            unit.changed.remove(task.piece)
            self.upload(unit, unit.pieces[task.piece])

    def _send(self, task: Task, iteration: int) -> None:
        if task.lane in STAGE_LANES:
            self.links.exchange(task)
        else:
            self.gradients.exchange(self._state.units[task.unit], iteration)

    def _swap_in(self, task: Task, _iteration: int) -> None:
        """Give a piece a host buffer. If any of its parameters train, read its state: gradients may arrive later."""
        unit = self._state.units[task.unit]
        reads = unit.is_trained(unit.pieces[task.piece])
        self._state.nvme.swap_in((unit.name, task.piece), task.slot, reads=reads)
