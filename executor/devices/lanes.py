"""Runs a schedule on real lanes: threads, streams, and the caller's thread for forward and backward.

Forward, backward and the norm run in the thread that calls the model. If such a task is issued,
the caller has reached it. The caller waits for the task's dependencies, starts the task, and leaves it *open*. The task
ends when the caller's next task is issued, or at :meth:`LaneMachine.end_open`.

A lane whose tasks wait for nothing on the host, as copies on a stream do, has no thread. A task is submitted as soon as
all that it waits for has been: by the caller when it is issued, or by the thread that ends the last of those. Threads
of their own would run beside the caller, and each operator of torch takes and gives back the interpreter's lock several
times: who has to sleep for it wakes 0.1 ms later, which is longer than most operators take.
"""

import atexit
import collections
import contextlib
import dataclasses
import math
import queue
import threading
import time
import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Final, final

import torch

from executor.checkpoint.files.writer import lower_thread_priority
from executor.devices.backend import Backend, Event
from executor.devices.room import Room
from executor.distributed.watchdog import LANE_THREAD, RankError
from planner.schedule.schedule import Schedule
from planner.schedule.tasks import CALLER_LANES, STAGE_LANES, Lane, Op, Phase, Task
from planner.schedule.timeline import Span, Timeline

NUM_RECORDED: Final = 200
"""At most so many of the latest iterations keep their times, so that memory does not grow with the run."""
_END_S: Final = 30.0  # longest wait, when the machine stops, for tasks that have begun

Perform = Callable[[Task, int], None]
"""Does the work of one task of an iteration. Called in the thread of the task's lane."""


class LaneError(RuntimeError):
    """The session has failed: a task in the thread of its lane (its exception is the cause), or a call half way."""


@dataclasses.dataclass(eq=False, slots=True)
class _Ticket:
    """One run of a task. ``end`` is set when the work has been done, or submitted to a stream."""

    task: Task
    iteration: int
    after: Sequence["_Ticket"]  # cleared at the start: a chain of tickets would hold every iteration in memory
    is_recorded: bool
    behind: "_Ticket | None" = None  # launched after it, likewise
    start: Event = None  # set if it is recorded
    end: Event = None
    awaited: tuple[threading.Condition | Lane, ...] = ()  # conditions of threads, and lanes, that wait

    @property
    def name(self) -> str:
        return f"lane {self.task.lane} in {self.task.name} (iteration {self.iteration})"


@final
class LaneMachine(contextlib.AbstractContextManager["LaneMachine"]):
    """Runs a schedule on any backend. :class:`planner.schedule.loop.Loop` walks the schedule.

    Args:
        perform: does the work of every task that is not on one of the caller's lanes.
        submitted: lanes without a thread.
        in_order: whether a task is launched in issue order, whatever its lane, see [Note: One order] in
            :mod:`planner.lowering.launches`.
        capacity_bytes: device memory, see :mod:`executor.devices.room`; ``None``: no limit.
        record: whether to record times for :meth:`timeline`. May be changed between iterations. The latest
            :data:`NUM_RECORDED` recorded iterations are kept.
        on_stop: called with the failure, if any, when the machine stops, in the thread that stops it. If tasks wait for
            anything but other tasks, it must end that waiting.
        closes_when_interrupted: whether Ctrl-C while the caller waits closes the machine, so that it says so at once.
            Otherwise the caller may wait again, or fail it.

    Attributes:
        is_waiting: whether the caller waits for tasks now.
        num_ended: number of tasks that have ended.
        on_caller: called with a task's index when a task of the caller's lanes begins, in its thread. It may be set.
    """

    def __init__(
        self,
        schedule: Schedule,
        perform: Perform,
        backend: Backend,
        *,
        submitted: Collection[Lane] = (),
        in_order: Callable[[Task], bool] = lambda _task: False,
        capacity_bytes: int | None = None,
        record: bool = False,
        on_stop: Callable[[BaseException | None], None] = lambda _failure: None,
        closes_when_interrupted: bool = True,
    ) -> None:
        self.record = record
        self.on_caller: Callable[[int], None] = lambda _task: None
        self._on_stop = on_stop
        self._closes_when_interrupted = closes_when_interrupted
        self._schedule = schedule
        self._perform = perform
        self._in_order = in_order
        self._latest_in_order: _Ticket | None = None
        self._backend = backend
        # The lock guards all fields below. Code that does not wait takes it without the condition, which is slower. The
        # condition is notified when nothing is pending, and when a ticket ends that the caller waits for.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._stopped = False
        self._failure: BaseException | None = None
        self._num_pending = 0
        self._room = None if capacity_bytes is None else Room(schedule, capacity_bytes)
        self._wants_room = False
        self.is_waiting, self.num_ended = False, 0
        self._was_waiting = False  # whether the caller was interrupted while it waited
        self._tickets: dict[int, dict[int, _Ticket]] = {}
        self._open: list[_Ticket] = []
        self._recorded: dict[int, list[_Ticket]] = {}
        self._left_out: set[int] = set()
        self._last: dict[Lane, Event] = {}  # end of the latest task of each lane
        self._latest_of_stage: dict[Lane, _Ticket] = {}  # of the lanes that wait for other stages
        self._lines = {lane: collections.deque[_Ticket]() for lane in submitted}
        self._submitting: set[Lane] = set()  # lanes of which a thread submits a task now
        self._local = threading.local()  # lanes that this thread still has to look at
        lanes = {task.lane for task in schedule.tasks} - CALLER_LANES - self._lines.keys()
        self._queues: dict[Lane, queue.SimpleQueue[_Ticket | None]] = {lane: queue.SimpleQueue() for lane in lanes}
        # One condition per thread, which wakes only for its own dependencies: waking takes longer than issuing.
        self._turns = {lane: threading.Condition(self._lock) for lane in lanes}
        self._turns |= dict.fromkeys(CALLER_LANES, self._changed)
        # Daemon threads: the interpreter waits for other threads before it calls functions registered with atexit.
        self._end_by_s = math.inf
        self._threads = [
            threading.Thread(target=self._run_lane, args=(lane,), name=f"{LANE_THREAD}{lane}", daemon=True)
            for lane in sorted(lanes)
        ]
        for thread in self._threads:
            thread.start()
        atexit.register(self.close)

    @property
    def stopped(self) -> bool:
        """Whether it is closed or has failed."""
        return self._stopped

    @property
    def failed(self) -> bool:
        """Whether it is closed or has failed; its lanes may still run, so that :meth:`drain` can be called."""
        return self._stopped or self._failure is not None

    def check(self) -> None:
        """Check that it has neither failed nor been closed. Raises as :meth:`wait`."""
        if self._stopped or self._failure is not None:
            self._check()

    def issue(self, tasks: Sequence[Task], iteration: int) -> None:
        """Append tasks to their lanes, in this order. For the caller's lanes, see the module's docstring.

        Raises:
            LaneError: a task failed on some lane.
            RuntimeError: the machine is closed.
        """
        self.check()
        self._end_if_left(self._issue, tasks, iteration)

    def _issue(self, tasks: Sequence[Task], iteration: int) -> None:
        for_lanes: list[_Ticket] = []
        for task in tasks:
            ticket = self._ticket(task, iteration)
            if task.lane not in CALLER_LANES:
                for_lanes.append(ticket)
                continue
            # End the open task before lanes wake: a lane that finds it open would wait and wake again.
            if self._open:
                self._end_tickets(before=task)
            if for_lanes:
                self._send(for_lanes)
                for_lanes.clear()
            self._wait_in_caller(self._begin, ticket)
            if self._stopped:
                self._check()
            self.on_caller(task.index)
            self._open.append(ticket)
        if for_lanes:
            self._send(for_lanes)

    def issue_unplanned(self, lane: Lane) -> None:
        """Append a task that is not of the schedule to a lane that waits for other stages. It waits for nothing else.

        Raises as :meth:`issue`.
        """
        self.check()
        task = Task(-1, lane, Op.RECEIVE if lane is Lane.RECEIVE else Op.SEND, Phase.LOOP)
        self._end_if_left(self._send, [_Ticket(task, -1, (), is_recorded=False)])

    def await_stage(self, lane: Lane) -> None:
        """Wait for the latest task of a lane that waits for other stages, on the device too. Raises as :meth:`wait`."""
        if (ticket := self._latest_of_stage.pop(lane, None)) is not None:
            self._wait_in_caller(self._wait_for, ticket, self._changed)
            self._check()
            self._backend.wait_event(Lane.COMPUTE, ticket.end)

    def end_open(self) -> None:
        """End open tasks of the caller's lanes, because the caller leaves them."""
        if self._open:
            self._end_if_left(self._end_tickets, None)

    def wait(self) -> None:
        """End open tasks, and wait until all tasks issued so far have ended, on the device's streams too.

        But not those that wait for other stages: see :meth:`await_stage`. Two stages that wait for what they send each
        other, before they receive it, would wait for ever.

        Raises:
            LaneError: a task failed on some lane.
            RuntimeError: the machine is closed.
        """
        self._wait_until_idle()
        self._check()
        self._wait_for_events()

    def drain(self) -> None:
        """Wait as :meth:`wait` does, after a failure that has left the lanes running. If no task ends, stop."""
        self._wait_until_idle(_END_S)
        if not self._stopped:
            self._wait_for_events()

    def _wait_until_idle(self, longest_s: float | None = None) -> None:
        """Wait until nothing is pending. Stop if no task ends within ``longest_s``: a drive may hang."""

        def until_idle() -> None:
            num_ended = -1
            with self._changed:
                while not self._changed.wait_for(lambda: self._stopped or not self._num_pending, longest_s):
                    if num_ended == self.num_ended:
                        self._stop()
                    num_ended = self.num_ended

        self.end_open()
        self._wait_in_caller(until_idle)

    def _wait_for_events(self) -> None:
        for event in list(self._last.values()):
            self._backend.event_time_s(event)
        self._backend.settle()

    def settle(self, lane: Lane) -> None:
        """Wait for all issued tasks of a lane, except those that wait for the caller."""
        held_up: set[int] = set()
        lanes: set[Lane] = set()  # lanes whose next task waits for the caller, so that all later tasks wait too
        waiting = [t for i in sorted(self._tickets) for t in self._tickets[i].values() if t.end is None]
        for ticket in waiting:
            by_caller = ticket.task.lane in CALLER_LANES or ticket.task.lane in lanes
            if by_caller or any(id(dependency) in held_up for dependency in (*ticket.after, ticket.behind)):
                held_up.add(id(ticket))
                lanes.add(ticket.task.lane)
            elif ticket.task.lane is lane:
                self._wait_in_caller(self._wait_for, ticket, self._changed)

    def timeline(self, first: int = 0, last: int | None = None) -> Timeline:
        """Return the recorded times of iterations ``first`` to ``last`` (inclusive; ``None``: the latest).

        In the timeline, iterations count from 0, and time from the first start. Tasks that have not ended are left out,
        so call :meth:`wait` first. Each iteration of :meth:`exclude` is cut out, with the time until the next one
        begins.
        """
        tickets = [
            t
            for iteration, recorded in self._recorded.items()
            if first <= iteration and (last is None or iteration <= last)
            for t in recorded
            if t.end is not None
        ]
        if not tickets:
            return Timeline.from_spans(self._schedule, (), 0)
        times_s = [(self._backend.event_time_s(t.start), self._backend.event_time_s(t.end)) for t in tickets]
        zero_s = min(start_s for start_s, _ in times_s)
        begin, end = min(t.iteration for t in tickets), max(t.iteration for t in tickets)
        spans = (
            Span(t.iteration - begin, t.task.index, start_s - zero_s, end_s - zero_s)
            for t, (start_s, end_s) in zip(tickets, times_s, strict=True)
        )
        timeline = Timeline.from_spans(self._schedule, spans, end - begin + 1)
        return timeline.without({i - begin for i in self._left_out if begin <= i <= end})

    @property
    def recorded(self) -> list[int]:
        """Iterations with recorded times, including those that every timeline leaves out."""
        return sorted(self._recorded)

    @property
    def left_out(self) -> frozenset[int]:
        """Iterations that every timeline leaves out."""
        return frozenset(self._left_out)

    def exclude(self, iteration: int) -> None:
        """Leave an iteration out of every timeline, because it did not run as planned."""
        self._left_out = {i for i in self._left_out if i in self._recorded} | {iteration}

    def fail(self, error: BaseException, *, stops: bool = True) -> None:
        """Stop because of a failure elsewhere. The next call that waits or issues raises it.

        Unless ``stops``, the lanes run what was issued to its end.
        """
        if stops:
            self._stop(error)
        else:
            self._failure = self._failure or error

    def close(self) -> None:
        """Drop tasks that have not started, and end the threads.

        Closing twice is allowed, and waits no longer than once.

        If a task does not end, its thread is left running, with a warning.
        """
        self._stop()
        for lane_queue in self._queues.values():
            lane_queue.put(None)
        self._end_by_s = min(self._end_by_s, time.monotonic() + _END_S)
        for thread in self._threads:
            thread.join(max(self._end_by_s - time.monotonic(), 0.0))
        hung = [thread.name for thread in self._threads if thread.is_alive()]
        self._threads.clear()
        self._tickets.clear()
        self._open.clear()
        atexit.unregister(self.close)
        if hung:
            warnings.warn(
                f"{', '.join(hung)}: the task has not ended within {_END_S:g} s, so its thread is left running; "
                "check whether the drive or device still answers",
                RuntimeWarning,
                stacklevel=2,
            )

    def __exit__(self, *_exc_info: object) -> None:
        self.close()

    def _ticket(self, task: Task, iteration: int) -> _Ticket:
        if (current := self._tickets.get(iteration)) is None:
            self._tickets = {i: tickets for i, tickets in self._tickets.items() if i == iteration - 1}
            current = self._tickets[iteration] = {}
        after = [current[i] for i in task.after] if task.after else []
        if task.after_previous and (previous := self._tickets.get(iteration - 1)):
            after += [previous[i] for i in task.after_previous]
        ticket = current[task.index] = _Ticket(task, iteration, after, self.record)
        if ticket.is_recorded:
            self._recorded.setdefault(iteration, []).append(ticket)
            if len(self._recorded) > NUM_RECORDED:
                del self._recorded[min(self._recorded)]
        if self._in_order(task):
            ticket.behind, self._latest_in_order = self._latest_in_order, ticket
        return ticket

    def _send(self, tickets: Sequence[_Ticket]) -> None:
        """Append tickets to the queues of their lanes."""
        with self._lock:
            self._num_pending += sum(ticket.task.lane not in STAGE_LANES for ticket in tickets)
            self._latest_of_stage |= {t.task.lane: t for t in tickets if t.task.lane in STAGE_LANES}
            if self._room:
                for ticket in tickets:
                    self._room.issue(ticket.task)
            for ticket in tickets:
                if (line := self._lines.get(ticket.task.lane)) is not None:
                    line.append(ticket)
        for ticket in tickets:
            if ticket.task.lane not in self._lines:
                self._queues[ticket.task.lane].put(ticket)
        self._submit({ticket.task.lane for ticket in tickets if ticket.task.lane in self._lines})

    def _submit(self, lanes: Collection[Lane]) -> None:
        """Submit what these lanes have at their heads, and what has waited for that, until all wait for others."""
        waiting: collections.deque[Lane] | None = getattr(self._local, "lanes", None)
        if waiting is not None:  # this thread is at it
            waiting.extend(lanes)
            return
        if not lanes:
            return
        self._local.lanes = waiting = collections.deque(lanes)
        try:
            # The caller may be evaluating; tensors that are made here are kept for later iterations.
            with torch.inference_mode(mode=False), torch.no_grad():
                while waiting:
                    while (ticket := self._next(waiting[0])) is not None:
                        self._submit_one(ticket)
                    waiting.popleft()
        finally:
            self._local.lanes = None

    def _next(self, lane: Lane) -> _Ticket | None:
        """Take a lane's next ticket, if all that it waits for has ended and no other thread submits on this lane."""
        with self._lock:
            line = self._lines[lane]
            if self._stopped or lane in self._submitting or not line:
                return None
            for dependency in line[0].after:
                if dependency.end is None:
                    if lane not in dependency.awaited:
                        dependency.awaited += (lane,)
                    return None
            self._submitting.add(lane)
            return line.popleft()

    def _submit_one(self, ticket: _Ticket) -> None:
        try:
            with self._backend.lane(ticket.task.lane):
                if self._begin(ticket):
                    self._perform(ticket.task, ticket.iteration)
                    self._end(ticket)
        except BaseException as error:
            if not isinstance(error, Exception):  # Ctrl-C, in the caller's thread
                self._stop(error)
                raise
            self._stop(error if isinstance(error, RankError) else _lane_error(ticket, ticket.task.lane, error))

    def _run_lane(self, lane: Lane) -> None:
        ticket: _Ticket | None = None
        try:
            with self._backend.lane(lane):
                if lane is Lane.SNAPSHOT:
                    lower_thread_priority()
                while (ticket := self._queues[lane].get()) is not None and self._begin(ticket):
                    self._perform(ticket.task, ticket.iteration)
                    self._end(ticket)
        except BaseException as error:  # noqa: BLE001 - the next call that waits or issues raises it
            self._stop(error if isinstance(error, RankError) else _lane_error(ticket, lane, error))

    def _begin(self, ticket: _Ticket) -> bool:
        """Wait for a ticket's dependencies, and start it; return False if the machine has stopped."""
        after, lane = ticket.after, ticket.task.lane
        self._wait_for_turn(ticket)
        if self._open and lane in CALLER_LANES:  # its own tickets run in order anyway
            after = [t for t in after if t not in self._open]
        for dependency in after:
            if dependency.end is None:  # otherwise take no lock
                self._wait_for(dependency, self._turns[lane])
            if self._stopped:
                return False
            self._backend.wait_event(lane, dependency.end)
        if self._room:
            self._take_room(ticket, self._room)
        if self._stopped:
            return False
        ticket.after = ()
        if ticket.is_recorded:
            if lane is Lane.COMPUTE:  # what the host has waited for since it came here was not issuing
                for issuing in self._open:
                    issuing.start = self._backend.record_event(issuing.task.lane)
            ticket.start = self._backend.record_event(lane)
        return True

    def _wait_for_turn(self, ticket: _Ticket) -> None:
        """Wait until what is to be launched before a ticket has been: see [Note: One order]."""
        before, ticket.behind = ticket.behind, None
        if before is not None and before.end is None:
            self._wait_for(before, self._turns[ticket.task.lane])

    def _take_room(self, ticket: _Ticket, room: Room) -> None:
        """Count the buffers that a ticket makes. On a caller's lane, first wait until there is room."""
        with self._changed:
            if ticket.task.lane in CALLER_LANES:
                self._wants_room = True
                self._changed.wait_for(lambda: self._stopped or not room.lacks(ticket.task))
                self._wants_room = False
            room.begin(ticket.task, ticket.iteration)

    def _wait_for(self, ticket: _Ticket, turn: threading.Condition) -> None:
        with self._changed:
            while ticket.end is None and not self._stopped:
                ticket.awaited += (turn,)
                turn.wait()

    def _end(self, ticket: _Ticket) -> None:
        """End a ticket of another thread than the caller's."""
        event = self._backend.record_event(ticket.task.lane)
        with self._lock:
            self._submitting.discard(ticket.task.lane)
            lanes = self._set_end(ticket, event)
            if ticket.task.lane not in STAGE_LANES:
                self._num_pending -= 1
                self._last[ticket.task.lane] = event
            if not self._num_pending or self._wants_room:
                self._changed.notify_all()
        self._submit(lanes)

    def _end_tickets(self, before: Task | None) -> None:
        """End open tickets, ``before`` the caller's next task. The caller wakes no one but lanes that wait for them."""
        stay, lanes = [], list[Lane]()
        for ticket in self._open:
            # On a GPU, issuing a compute task overlaps with the task itself.
            if before is not None and before.lane is Lane.COMPUTE and ticket.task.op is Op.ISSUE:
                stay.append(ticket)
                continue
            event = self._backend.record_event(ticket.task.lane)
            with self._lock:
                lanes += self._set_end(ticket, event)
        self._open = stay
        self._submit(lanes)

    def _set_end(self, ticket: _Ticket, event: Event) -> list[Lane]:
        """Set a ticket's end, wake the threads that wait for it, and return the lanes that do."""
        self.num_ended += 1
        ticket.end = event
        lanes = []
        for waiting in ticket.awaited:
            if isinstance(waiting, Lane):
                lanes.append(waiting)
            else:
                waiting.notify_all()
        if self._room:
            self._room.end(ticket.task, ticket.iteration, was_issued=ticket.task.lane not in CALLER_LANES)
        return lanes

    def _stop(self, failure: BaseException | None = None) -> None:
        with self._lock:
            self._failure = self._failure or failure  # set first: callers read both without the lock
            stopped, self._stopped = self._stopped, True
            for turn in (self._changed, *self._turns.values()):
                turn.notify_all()
        if not stopped:
            self._on_stop(failure)

    def _check(self) -> None:
        stopped = self._stopped  # read first: the next call raises a failure that comes in between
        if self._failure is not None:
            if not isinstance(self._failure, Exception):  # who saves after Ctrl-C must not be interrupted again
                raise LaneError(f"the session was ended by {type(self._failure).__name__}; resume from a checkpoint")
            raise self._failure
        if stopped:
            raise RuntimeError("the session and its lanes are closed; prepare() the model again to continue training")

    def _wait_in_caller(self, wait: Callable[..., object], *args: object) -> None:
        """Let the caller wait for tasks. If it is interrupted, it may wait again, or the machine closes."""
        self.is_waiting = self._was_waiting = True
        try:
            wait(*args)
            self._was_waiting = False
        except KeyboardInterrupt as error:
            if self._closes_when_interrupted:
                self.fail(error)  # reports to other ranks at once
                self.close()
            raise
        finally:
            self.is_waiting = False

    def _end_if_left(self, call: Callable[..., None], *args: object) -> None:
        """Make a call that an exception may leave only while the caller waits. Otherwise lanes stop.

        Tickets may have been left half issued or half ended, so that waiting for them would never end.
        """
        self._was_waiting = False
        try:
            call(*args)
        except BaseException:
            if not self._was_waiting:
                self._stop()
            raise


def _lane_error(ticket: _Ticket | None, lane: Lane, cause: BaseException) -> LaneError:
    error = LaneError(f"{ticket.name if ticket else f'lane {lane}'} failed: {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error
