"""The objects that execute a schedule: memory, threads, and tasks."""

import contextlib
from collections.abc import Mapping
from typing import Final, final

import torch

from executor.devices.backend import Backend
from executor.devices.cores import Cores
from executor.devices.lanes import LaneError, LaneMachine
from executor.distributed.ranks import Ranks
from executor.distributed.shards import ParameterShard
from executor.memory.activations import OffloadedActivations
from executor.memory.arenas import Arena
from executor.memory.state import ModelState
from executor.optimizer import WorkerTeam
from executor.optimizer.table import OptimizerEntry
from executor.options import SessionOptions
from executor.tasks.actions import Actions
from executor.tasks.collectives import ScheduleCollectives
from executor.tasks.snapshots import Snapshots
from planner.decisions import Decisions
from planner.graph import Unit
from planner.lowering import lower
from planner.schedule.loop import Loop, OutOfOrderError
from planner.schedule.tasks import Op, Tier

OF_GRADIENTS: Final = frozenset({Op.SCATTER, Op.FLUSH, Op.SPILL})
"""Tasks that bring gradients to where updates read them."""


@final
class Unbroken(contextlib.AbstractContextManager[None]):
    """A context for a part of a call that changes the session: if it does not complete, the session has failed.

    [Note: Interrupted] A signal's handler may raise anywhere (Ctrl-C, time limits). Calls that only read can then be
    made again: what they remember is set after the work that it describes, and forgotten before. Parking and unparking
    can be called again too. Around everything else stands this context. It marks the session as failed, and every later
    call says so. In forward and backward, weights and state of the last step are still whole where updates begin at the
    step: then lanes finish them, and ``close()`` gives the weights back.

    Args:
        runtime: of the session.
        call: the call, in words.
        keeps: whether weights and state stay those of the last step.
        expected: errors that leave everything as it was, or are followed by a call that sets it.
    """

    def __init__(
        self, runtime: "Runtime", call: str, *, keeps: bool = False, expected: tuple[type[BaseException], ...] = ()
    ) -> None:
        self._runtime = runtime
        self._call = call
        self._keeps = keeps
        self._expected: tuple[type[BaseException], ...] = (OutOfOrderError, *expected)

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if error is None:
            return
        if not isinstance(error, self._expected):
            self._runtime.fail(self._call, error, keeps=self._keeps)
        elif isinstance(error, OutOfOrderError) and self._runtime.inside_iteration and self._runtime.ranks is not None:
            self._runtime.ranks.report_failure(error)  # others wait for the tasks that this rank does not reach


@final
class Runtime:
    """Memory, threads and tasks of one session.

    The constructor moves the model's parameters into its memory, and starts the threads.

    Args:
        ranks: all ranks; ``None`` if there is only one.
        failing: gets callbacks that undo the constructor if the session cannot begin.

    Attributes:
        gpu, host: memory of each tier, counted by class.
        state: weights, optimizer state and gradients.
        offloaded: activations that are offloaded.
        collectives: collectives of the schedule; ``None`` if there is only one rank.
        snapshots: takes state for checkpoints; ``None`` without checkpoints.
        actions: does the work of tasks.
        machine: runs the tasks on lanes.
        loop: issues the tasks in order.
        inside_iteration: whether an iteration is under way.
        parked: whether device memory has been freed, see :mod:`executor.parking`.
        doing: the call that this rank is in, in words. All ranks must be in the same call when a collective begins.
    """

    def __init__(
        self,
        units: tuple[Unit, ...],
        decisions: Decisions,
        shards: Mapping[str, ParameterShard],
        entry: OptimizerEntry,
        *,
        backend: Backend,
        ranks: Ranks | None,
        cores: Cores,
        options: SessionOptions,
        failing: contextlib.ExitStack,
    ) -> None:
        self.backend = backend
        self.ranks = ranks
        self._updates_at_step = decisions.update_start == "step"
        self.inside_iteration = False
        self.parked = False
        self.doing = "iteration 1"
        takes_snapshots = options.checkpoint_buffer_bytes > 0
        schedule = lower(units, decisions, asynchronous=options.device == "cuda", takes_snapshots=takes_snapshots)
        self.gpu = Arena(Tier.GPU, options.gpu_capacity_bytes, backend)
        self.host = Arena(Tier.HOST, options.host_capacity_bytes, backend)
        if ranks is not None:
            names = "".join(name + "?" * shard.is_absent for name, shard in shards.items())
            ranks.all.check_same("plan or model", (schedule.to_json() + names).encode())
        rank = 0 if ranks is None else ranks.rank
        written = (task.unit for task in schedule.tasks if task.op is Op.SNAPSHOT)
        self.state = state = ModelState(
            units, decisions, shards, self.gpu, self.host, ranks, options.storage_dir, written
        )
        failing.callback(state.frozen.close)
        if state.stored is not None:
            failing.callback(state.stored.close)
        failing.callback(state.give_back)
        self.collectives = None if ranks is None else ScheduleCollectives(state, decisions, schedule, backend, ranks)
        self.snapshots = None
        if takes_snapshots:
            self.snapshots = Snapshots(state, schedule, entry, backend, self.host, options, rank)
        self._team = WorkerTeam(cores.num_updating, cores.of_updates)
        failing.callback(self._team.close)
        self.offloaded = OffloadedActivations(units, decisions, options.storage_dir, rank, self.host, backend)
        self.actions = Actions(
            state, decisions, backend, self._team, self.collectives, self.offloaded, self.snapshots, ranks
        )
        self.machine = LaneMachine(
            schedule,
            self.actions.perform,
            backend,
            capacity_bytes=None if options.device == "cuda" else options.gpu_capacity_bytes,
            record=options.record,
            on_stop=self._has_stopped,
            closes_when_interrupted=ranks is not None,
        )
        failing.callback(self.machine.close)
        self.loop = Loop(schedule, self.machine)
        if ranks is not None:
            ranks.num_values = len(state.by_name)
            ranks.watch(self.machine.fail, self._waits_for)

    @property
    def has_last_step(self) -> bool:
        """Whether master copies are those of the last step once all issued tasks have ended."""
        return self._updates_at_step or not self.inside_iteration or self.actions.defers

    def fail(self, call: str, error: BaseException, *, keeps: bool = False) -> None:
        """Mark the session as failed, because a call did not complete; see [Note: Interrupted]."""
        keeps = keeps and self.ranks is None and self.has_last_step and not self.machine.stopped
        reason = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
        left = (
            "which gives the model the weights of the last step"
            if keeps
            else "whose weights are NaN then, because those of one step no longer exist"
        )
        failure = LaneError(
            f"{call} did not complete ({reason}), and the session cannot go on: close it (optimizer.session.close()), "
            f"{left}, and resume from a checkpoint in a new session"
        )
        self.machine.fail(failure, stops=not keeps)
        if self.ranks is not None:
            self.ranks.report_failure(error)

    def check_has_weights(self) -> None:
        """Check that all weights have values.

        Raises:
            ValueError: some weights have no values.
        """
        if absent := self.state.absent:
            more = f" and {len(absent) - 1} more have" if len(absent) > 1 else " has"
            raise ValueError(
                f"{min(absent)}{more} no values, because the model was made on the meta device; load them first, for "
                "example with ullage.load(optimizer, FOLDER)"
            )

    def check_autocast(self) -> None:
        """Check that no autocast to another type than the plan's is on. Raises ValueError otherwise."""
        kind, dtype = self.backend.device.type, self.state.dtype
        if torch.is_autocast_enabled(kind) and (other := torch.get_autocast_dtype(kind)) != dtype:
            raise ValueError(
                f"autocast to {other} is on, but the plan computes with {dtype} weights; leave autocast, or plan with "
                "another --precision"
            )

    def check_unparked(self) -> None:
        """Check that the session is not parked.

        Raises:
            OutOfOrderError: the session is parked.
        """
        if self.parked:
            raise OutOfOrderError(
                "the session is parked, and has no device memory; call session.unpark() first, or read weights with "
                "session.stream_weights()"
            )

    def issue_gradients(self) -> None:
        """Issue what brings gradients to where updates read them, and wait. Forward and backward have ended."""
        of_gradients = (task.index for task in self.loop.schedule.tasks if task.op in OF_GRADIENTS)
        self.loop.issue_up_to(1 + max(of_gradients, default=-1))
        self.machine.wait()

    def synchronize(self) -> None:
        """Wait until all updates have ended.

        Raises:
            LaneError: a task failed on some lane.
        """
        self.machine.wait()
        self._rest()

    def drain(self) -> None:
        """Wait as :meth:`synchronize` does, after a failure that has left the lanes running."""
        self.machine.drain()
        self._rest()

    def _rest(self) -> None:
        self.actions.synchronize()
        for unit in self.state.units.values():
            unit.spent.clear()

    def check_same_call(self, *, needed: bool = True) -> None:
        """Check, if ``needed``, that all ranks are in the same call.

        Raises:
            RankError: the calls differ, or a rank has failed.
        """
        if needed and self.ranks is not None:
            self.ranks.check_same_call(self.doing)

    def close(self) -> None:
        """End the threads and remove files. Closing twice is allowed."""
        self.machine.close()
        self._team.close()
        self.offloaded.close()
        self.state.frozen.close()
        if self.state.stored is not None:
            self.state.stored.close()

    def _waits_for(self) -> tuple[str, int]:
        assert self.ranks is not None
        waits = self.machine.is_waiting or self.ranks.is_waiting
        return self.doing if waits else "", self.machine.num_ended + self.ranks.num_ended

    def _has_stopped(self, failure: BaseException | None) -> None:
        if self.ranks is not None:
            if failure is not None:
                self.ranks.report_failure(failure)
            self.ranks.stop()
