"""The loop of ``ullage execute``, around a prepared model. For a loop of your own, use ``prepare``."""

import contextlib
import math
import time
from collections.abc import Iterator
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

from executor.prepare import OffloadedOptimizer
from planner.schedule.tasks import Tier
from ullage.training.batches import Batches, loss_of
from ullage.training.checkpoints import Saver
from ullage.training.out_of_memory import OutOfMemoryError, check_device, reporting_out_of_memory

METERED: Final = 1
"""The iteration of a session whose memory is metered. It takes longer."""
_NUM_METERED: Final = 3  # iterations to meter with several ranks, if the first ones exceed the capacity
MAX_GRADIENT_NORM: Final = 1.0
_WARM_UP: Final = 5  # iterations in which the learning rate rises


class Step(NamedTuple):
    """One iteration of training.

    Attributes:
        iteration: counted from 0.
        loss: mean over its micro-batches and all ranks.
        measured_s: wall seconds of the iteration. Updates that still run at its end count in the next iteration.
    """

    iteration: int
    loss: float
    measured_s: float


def train(
    model: nn.Module, optimizer: OffloadedOptimizer, batches: Batches, begin: int, end: int, saver: Saver | None = None
) -> Iterator[Step]:
    """Train from iteration ``begin`` to ``end``, and yield each when it ends.

    The learning rate rises for five iterations and falls as a cosine until ``end``. It depends only on the iteration,
    and on the rate that the optimizer was made with, which checkpoints keep. Between two iterations, the plan may
    change (:func:`ullage.replan`). If the plan clips, gradients are clipped to a norm of 1.

    Args:
        model: a prepared model.
        optimizer: the optimizer that ``prepare`` returned for it.
        batches: the training data.
        begin: number of iterations that have ended.
        end: number of iterations in all.
        saver: saves checkpoints, before the iterations at which they are due.

    Raises:
        ValueError: the loss is not finite, or the model does not know a token.
        OutOfMemoryError: memory ran out.
        RankError: another rank has failed.
    """
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])  # as schedulers keep it
    num_to_meter = 0
    for iteration in range(begin, end):
        if saver is not None and saver.is_due(iteration):
            saver.save(iteration)
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * _rate(iteration, end)
        begin_s = time.perf_counter()
        session = optimizer.session  # a change of plans makes another
        # On a CPU, a dispatch mode meters memory, in which no compiled graph runs.
        seen = session.options.device != "cpu" or not session.options.compile_blocks
        if session.iteration == METERED and seen:
            num_to_meter = 1 if optimizer.plan.decisions.num_devices == 1 else _NUM_METERED
        with reporting_out_of_memory(optimizer.plan, session.memory):
            with session.metered() if num_to_meter else contextlib.nullcontext():
                total = _compute(model, optimizer, batches)
            if num_to_meter:
                num_to_meter = _check_device(optimizer, num_to_meter)
            loss = session.collectives.mean(float(total) * optimizer.plan.decisions.weight)
        if not math.isfinite(loss):
            rate = max(group["initial_lr"] for group in optimizer.param_groups)
            raise ValueError(f"the loss is {loss} in iteration {iteration}; use a smaller --lr than {rate:g}")
        yield Step(iteration, loss, time.perf_counter() - begin_s)


def _rate(iteration: int, end: int) -> float:
    return min((iteration + 1) / _WARM_UP, 1.0) * 0.5 * (1 + math.cos(math.pi * iteration / end))


def _compute(model: nn.Module, optimizer: OffloadedOptimizer, batches: Batches) -> Tensor:
    """Run one iteration; return this rank's mean loss."""
    device = next(model.parameters()).device
    total = torch.zeros((), device=device)
    if optimizer.pipeline is not None:
        losses = optimizer.forward_backward(batches.micro_batches(device), loss_of)
        total += sum(losses) / len(losses)
    else:
        for loss in batches.losses(model):
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
    if optimizer.plan.decisions.clip:
        optimizer.clip_grad_norm_(MAX_GRADIENT_NORM)
    optimizer.step()
    optimizer.zero_grad()
    return total


def _check_device(optimizer: OffloadedOptimizer, num_to_meter: int) -> int:
    """Check the device's peak; return how many more iterations to meter.

    If it was too high, those that are left decide: where other threads have the cores, threads of gloo may free a
    tensor milliseconds after its sum is complete.
    """
    try:
        check_device(optimizer.plan, optimizer.session.memory()[Tier.GPU])
    except OutOfMemoryError:
        if num_to_meter == 1:
            raise
        return num_to_meter - 1
    return 0
