"""Tracks where the model is in the schedule. When a hook of a unit fires, its compute task is reached."""

import contextlib
import itertools
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Final, final

import torch

from executor.callbacks import in_backward
from executor.driver.runtime import Runtime
from executor.module.later_gradients import LaterGradients
from planner.decisions import Decisions
from planner.graph import Unit, segments
from planner.lowering.compute import AGAIN
from planner.lowering.program import rounds_of
from planner.schedule.loop import OutOfOrderError
from planner.schedule.tasks import Op, Task

_RUN_AGAIN: Final = frozenset(AGAIN.values())
_INSIDE_BACKWARD: Final = _RUN_AGAIN | {Op.BACKWARD}
_MANY: Final = 4  # other shapes of batches from which on each is expected to be new


@final
class Progress:
    """Tracks the caller through forward and backward.

    Args:
        backward_begins: called when the backward of a planned micro-batch begins, before its first task is issued.
        backward_ended: called with the micro-batch and the round when their backward has ended; with the last
            micro-batch, if the iteration has left the plan.
        unbroken: a context for the end of a backward.

    Attributes:
        task: the compute task that runs; ``None`` outside forward and backward, and off the plan.
        micro_batch: that of the latest planned call.
        tile: the tile of sequences that passes its segment; 0 outside of tiles.
        first: the first unit that the batch reaches.
        num_called: number of calls that have begun since the first one of a micro-batch.
        has_left: whether the iteration has left the plan, see [Note: On demand] in :mod:`executor.driver.on_demand`.
        later: keeps the gradients that the plan has after backward.
        latest_other_shape: the latest iteration that had a batch of another shape than planned, or passed over units.
    """

    def __init__(
        self,
        runtime: Runtime,
        units: tuple[Unit, ...],
        decisions: Decisions,
        *,
        backward_begins: Callable[[int], None],
        backward_ended: Callable[[int, int], None],
        unbroken: contextlib.AbstractContextManager[object],
    ) -> None:
        self.task: Task | None = None
        self.micro_batch = self.tile = 0
        self.has_left = False
        self._loop = loop = runtime.loop
        self._machine, self._backend = runtime.machine, runtime.backend
        self.latest_other_shape = -2
        self._other_shapes: set[tuple[int, ...]] = set()
        self._num_micro_batches = decisions.num_micro_batches
        self._unused = {unit.name for unit in units if unit.is_unused}
        self.num_called = 0
        self._call, self._call_of = 1, {unit.name: unit.call for unit in units}
        self.first = next(unit for unit in units if not unit.is_unused)
        self._first = next(task.unit for task in loop.schedule.tasks if task.op is Op.FORWARD)
        self._firsts = {next(group).name for _, group in itertools.groupby(units, key=lambda unit: unit.call)}
        self._rounds = dict(zip((unit.name for unit in units), rounds_of(units, decisions), strict=True))
        starts = {next(names) for turn, names in itertools.groupby(self._rounds, self._rounds.__getitem__) if turn}
        self._firsts |= starts
        self._round_firsts = {self._first} | starts
        self.later = LaterGradients(units, runtime.state.by_name, self._waits_with)
        self._backward_begins = backward_begins
        self._backward_ended = backward_ended
        self._unbroken = unbroken
        self._segment = {unit.name: {u.name for u in segment} for segment in segments(units) for unit in segment}
        self._recompute_ops = {
            name: AGAIN.get(unit.activations, Op.RECOMPUTE) for name, unit in decisions.units.items()
        }
        self._recompute_starts = {
            unit.name: (self._recompute_ops[unit.name], segment[0].name)
            for segment in segments(units)
            for unit in segment
            if decisions.units[unit.name].activations != "keep"
        }
        self._index = {
            (task.op, task.unit, task.micro_batch, task.tile): task.index
            for task in loop.schedule.tasks
            if task.op in _INSIDE_BACKWARD | {Op.FORWARD}
        }
        self._without_backward = {unit.name for unit in units if not (unit.backward or unit.num_params)}
        self._awaits_recomputation = False  # backward has reached a unit that is still to be recomputed
        self._watching_end = False  # whether the end of the running backward has a callback
        self._goes_on = False  # whether the backward that has ended was inside another one
        self._left: set[str] = set()  # units that this backward has left

    @property
    def unit(self) -> str:
        """The unit that computes; empty if none does."""
        return "" if self.task is None else self.task.unit

    @property
    def num_complete(self) -> int:
        """Micro-batches of this iteration that have run; 0 if all have run or one is under way."""
        expected = self._loop.expected()
        return expected.micro_batch if expected is not None and self.begins else 0

    @property
    def begins(self) -> bool:
        """Whether the plan's next task is the first forward of a micro-batch, in any round."""
        expected = self._loop.expected()
        at_first = expected is not None and expected.op is Op.FORWARD and expected.unit in self._round_firsts
        return at_first and expected is not None and not expected.tile

    @property
    def call(self) -> int:
        """The call of the user's step that runs now, or whose backward does; 1 outside of planned calls."""
        return self._call_of.get(self.unit, 1) if in_backward() and not self.has_left else self._call

    def begin_call(self) -> None:
        """The user's step calls the model, or a part of it."""
        self.num_called = 0 if self.begins else self.num_called + 1
        expected = self._loop.expected()
        self._call = 1
        if expected is not None and expected.op is Op.FORWARD and not self.has_left:
            self._call, self.micro_batch = self._call_of[expected.unit], expected.micro_batch

    def note_other_shape(self, shape: tuple[int, ...]) -> None:
        """A forward of the plan begins with a batch of another shape; leave the iteration out of comparisons.

        See :mod:`executor.module.batches`.
        """
        if len(self._other_shapes) < _MANY:
            self._other_shapes.add(tuple(shape))
        expected = self._loop.expected()
        # In the middle of an iteration, forward may have run that is still to be recomputed.
        if len(self._other_shapes) == _MANY and expected is not None and not expected.micro_batch:
            self._backend.expect_many_shapes()
        self._exclude()

    def _exclude(self) -> None:
        if self.latest_other_shape != self._loop.iteration:
            self.latest_other_shape = self._loop.iteration
            self._machine.exclude(self.latest_other_shape)

    @property
    def is_between(self) -> bool:
        """Whether the plan's next task is the forward of a micro-batch or call, or one after all of them."""
        expected = self._loop.expected()
        if expected is None or expected.op is Op.CLIP:
            return True
        return expected.op is Op.FORWARD and expected.unit in self._firsts and not expected.tile

    @property
    def passed_over(self) -> AbstractSet[str]:
        """The units that the forward of this micro-batch has passed over, until its backward reaches a unit."""
        return self._left

    @property
    def comes_back(self) -> bool:
        """Whether a backward of the plan is to come next, or what it leaves, outside of forward."""
        expected = self._loop.expected()
        return not self.has_left and expected is not None and expected.op in _INSIDE_BACKWARD | {Op.WEIGHT_GRADIENT}

    def left_in(self, turn: int) -> list[str]:
        """Return the units of a round whose backward leaves gradients, in the order of backward."""
        return [unit for unit in self.later.units if self._rounds[unit] == turn]

    def reach_weights(self, unit: str = "") -> None:
        """What backward has left is made for a unit; without one, that has ended. Raises as :meth:`reach`."""
        if not self.has_left and unit:
            self.task = self._loop.reach(Op.WEIGHT_GRADIENT, unit)
        elif not self.has_left:
            self._machine.end_open()
            self.task = None

    def leave(self) -> None:
        """Note that this iteration has left the plan."""
        self.has_left, self.task = True, None
        self._left.clear()

    def end_early(self) -> None:
        """Skip the micro-batches that are missing. Raises as :meth:`reach`."""
        while (expected := self._loop.expected()) is not None and expected.op is not Op.CLIP:
            self._loop.reach(expected.op, expected.unit)
        self._machine.end_open()
        self.has_left = False

    def begin_forward(self) -> None:
        """The forward of a micro-batch begins, perhaps with the unit with which the one before has ended."""
        if self.task is not None and self.task.op is Op.FORWARD:
            self.task = None

    def is_at(self, op: Op, unit: str) -> bool:
        """Return whether the caller is already at this task. A unit may have several modules with hooks."""
        task = self.task
        return task is not None and task.unit == unit and task.op is op and task.tile == self.tile

    def meets(self, unit: str) -> bool:
        """Return whether forward is at a unit, or the plan expects it next of those that the batch reaches."""
        expected = self._loop.expected()
        begins = self.begins and unit == self.first.name  # after units that the batch does not reach
        return self.is_at(Op.FORWARD, unit) or begins or (expected is not None and expected.unit == unit)

    def awaits_gradient(self, unit: str) -> bool:
        """Return whether a gradient of a unit may arrive now: backward runs and has not left the unit."""
        return self.task is not None and self.task.op in _INSIDE_BACKWARD and unit not in self._left

    def recompute(self, unit: str) -> None:
        """Recomputation (a forward inside backward) has reached a unit. Raises as :meth:`reach`."""
        op = self._recompute_ops[unit]
        self._awaits_recomputation = False
        if not self.is_at(op, unit):
            self.enter_backward()
            self.reach(op, unit)

    def backward(self, unit: str) -> None:
        """Backward has reached a unit. Raises as :meth:`reach`.

        A plan brings no weights for the backward of units that neither train nor come after one that does. Backward
        reaches them all the same if the batch itself needs gradients.
        """
        self.enter_backward()
        if unit in self._without_backward:
            raise OutOfOrderError(
                f"backward reached {unit}, but the plan ends backward before, as nothing up to there is trained"
            )
        if (begins := self._recompute_starts.get(unit)) is not None:
            self._skip_to(*begins)
        expected = self._loop.expected()
        if expected is not None and expected.op in _RUN_AGAIN and expected.unit in self._segment[unit]:
            # Recomputation is about to begin; its end calls recomputed(). Before that, backward may read weights, as a
            # torch.autograd.Function of the user's does that keeps a parameter.
            if expected.unit == unit:
                self.reach(expected.op, unit)
                self._awaits_recomputation = True
            return
        if not (self._awaits_recomputation and self.unit == unit):
            self.recomputed(unit)

    def recomputed(self, unit: str) -> None:
        """Recomputation has ended for the segment whose last unit this is. Raises as :meth:`reach`."""
        if not self.is_at(Op.BACKWARD, unit):
            self.enter_backward()
            self.reach(Op.BACKWARD, unit)

    def reach(self, op: Op, unit: str) -> None:
        """Forward, recomputation or backward has reached a unit.

        Raises:
            OutOfOrderError: the plan does not expect it here.
            LaneError: a task failed on some lane.
        """
        self._skip_to(op, unit)
        try:
            if unit in self._unused:
                raise self.unexpected(op, unit)
            task = self._loop.reach(op, unit)
        except OutOfOrderError:
            if op in _RUN_AGAIN:
                raise OutOfOrderError(
                    f"forward reached {unit} inside backward, but the plan does not recompute it there"
                ) from None
            raise self.unexpected(op, unit) from None
        if self.task is not None and self.task.op is Op.BACKWARD and not self.task.tile:
            self._left.add(self.task.unit)  # of tiles, the first one comes last
        self.task, self._awaits_recomputation = task, False

    def enter_backward(self) -> bool:
        """Backward runs. Return whether it has just begun."""
        if self._watching_end:
            return False
        begins, self._goes_on, self.tile = not self._goes_on, False, 0
        if not self.has_left and (expected := self._loop.expected()) is not None:
            self._backward_begins(expected.micro_batch)
        self._watching_end = True
        torch.autograd.Variable._execution_engine.queue_callback(self._end)
        return begins

    @property
    def is_in_backward(self) -> bool:
        """Whether backward runs, and has reached the model."""
        return self._watching_end and in_backward()

    @property
    def is_broken_off(self) -> bool:
        """Whether an exception has ended the latest backward."""
        return self._watching_end and not in_backward()

    @property
    def rests(self) -> bool:
        """Whether neither forward nor backward is under way on the plan, and no exception has ended the latter."""
        return self.task is None and not in_backward() and not self._watching_end

    def forget_backward(self) -> None:
        """Forget a backward that is broken off."""
        self._watching_end = self._goes_on = False

    def unexpected(self, op: Op, unit: str = "") -> OutOfOrderError:
        """Return the error for a task that the model has reached where the plan has another one."""
        expected = self._loop.expected()
        wanted = "optimizer.step()" if expected is None or expected.op is Op.CLIP else expected.name
        return OutOfOrderError(f"the model reached {op} {unit or self._first}, but the plan expects {wanted}")

    def _waits_with(self) -> int | None:
        return self.task.micro_batch if self.task is not None and not self.has_left else None

    def _skip_to(self, op: Op, unit: str) -> None:
        """Skip units that the batch never reaches, and those that this forward passes over (experts without tokens).

        Neither does backward reach these, nor units where neither they nor earlier ones need a gradient.
        """
        while (expected := self._loop.expected()) is not None and (expected.op is not op or expected.unit != unit):
            if expected.op in _INSIDE_BACKWARD or expected.unit not in self._unused:
                ahead = self._index.get((op, unit, expected.micro_batch, self.tile), -1) > expected.index
                goes_forward = op is Op.FORWARD
                if not ahead or goes_forward != (expected.op is Op.FORWARD):
                    return
                if goes_forward and not self._passes_over(expected, unit):
                    return
            self._loop.reach(expected.op, expected.unit)
            if not expected.tile:
                self._left.add(expected.unit)

    def _passes_over(self, expected: Task, unit: str) -> bool:
        """Return whether forward may go on at a unit that comes later; then the iteration is not as predicted."""
        same_call = self._call_of[expected.unit] == self._call_of[unit]
        if passes := same_call and expected.tile == self.tile and unit not in self._unused:
            self._exclude()
        return passes

    def _end(self) -> None:
        with self._unbroken:
            self._end_backward()

    def _end_backward(self) -> None:
        if self.has_left:
            self._watching_end = False
            # Where a module checkpoints by itself, with use_reentrant=True, a node of one backward runs another.
            self._goes_on = torch._C._current_autograd_node() is not None
            self._backward_ended(self._num_micro_batches - 1, 0)
            return
        assert self.task is not None
        micro_batch, turn = self.task.micro_batch, self._rounds[self.task.unit]
        while (
            (expected := self._loop.expected()) is not None
            and expected.op in _INSIDE_BACKWARD
            and (expected.micro_batch, self._rounds[expected.unit]) == (micro_batch, turn)
        ):
            self._loop.reach(expected.op, expected.unit)
        self._machine.end_open()
        self._backward_ended(micro_batch, turn)
        self._watching_end = False
        self._left.clear()
        self.task = None  # last: until then, no step is allowed
