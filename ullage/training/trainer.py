"""``ullage.Trainer``: the training loop under a plan. For a loop of your own, use ``prepare``."""

import contextlib
import dataclasses
import itertools
import math
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal, Unpack, final

import numpy as np
import torch
from torch import nn

from executor.checkpoint import Outcome
from executor.checkpoint.levels import check_levels
from executor.distributed.shards import BindingError
from executor.optimizer.reference import ROUNDS
from executor.optimizer.table import torch_class_of
from executor.session import Session
from executor.training_state.saving import Resumed
from executor.weights import load
from executor.weights.files import weights_folder
from hwprofiles.allocator import keep_freed_memory
from planner.optimizers import OPTIMIZERS, Optimizer
from planner.plan.document import Plan, PlanError
from planner.schedule.tasks import Tier
from ullage.data import Data
from ullage.this_machine.checks import check_options
from ullage.this_machine.planning import PLAN_OPTIONS, Options
from ullage.training.batches import batch_source
from ullage.training.checkpoints import CheckpointOptions, CheckpointSaver, Stateful
from ullage.training.models import brings_weights, planned_model
from ullage.training.out_of_memory import OutOfMemoryError, check_device, reporting_out_of_memory
from ullage.training.preparing import options_of, prepare_planned, warn_about_dtypes
from ullage.training.processes import Process
from ullage.training.replanning import Replanned, replan
from ullage.training.text import Tokens

METERED: Final = 1
"""The iteration of a session whose memory is metered. It takes longer."""
_NUM_METERED: Final = 3  # iterations to meter with several ranks, if the first ones exceed the capacity
MAX_GRADIENT_NORM: Final = 1.0
# Hyperparameters of a trainer's own optimizer beside the learning rate.
_HYPER_PARAMETERS: dict[Optimizer, dict[str, Any]] = {
    "adamw": {"betas": (0.9, 0.95), "weight_decay": 0.1},
    "adamw-bf16": {"betas": (0.9, 0.95), "weight_decay": 0.1},
    "adamw-8bit": {"betas": (0.9, 0.95), "weight_decay": 0.1},
    "sgd": {"momentum": 0.9},
    "adagrad": {},
    "lion": {"betas": (0.95, 0.98), "weight_decay": 0.1},
    "muon": {"adjust_lr_fn": "match_rms_adamw"},  # so that one rate serves both kinds of parameters
}


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One iteration of training.

    Attributes:
        iteration: counted from 0.
        loss: mean over its micro-batches and all ranks; for :class:`ullage.Data`, mean over target tokens.
        measured_s: wall seconds of the iteration. Updates that still run at its end count in the next iteration.
        num_tokens: tokens over all ranks, without padding.
    """

    iteration: int
    loss: float
    measured_s: float
    num_tokens: int


@final
class Trainer(contextlib.AbstractContextManager["Trainer"]):
    """Trains a plan's model on tokens, one iteration at a time.

    Iterate over the trainer: every :class:`Step` is one iteration. If the plan clips, gradients are clipped to a norm
    of 1. If the plan is for several devices, each process of ``torchrun`` has a trainer, and they iterate together.
    At the end of the ``with`` block, the trainer waits for all updates and turns the model back into an ordinary one.

    Args:
        plan: a plan for this machine.
        model: an unmodified module with the planned parameters. Default: the planned model with random weights. If the
            model is planned from sizes, it is called as ``model(input_ids=..., labels=...)``, otherwise with its
            captured inputs.
        optimizer: the planned optimizer over the model's parameters. Default: one with usual settings.
        data: files with a tokenizer (:class:`ullage.Data`, batched as planned), or tokens as unsigned integers in one
            dimension (see :func:`ullage.training.text.read_tokens`; a memory map is never read whole). Default: the
            built-in English text. A captured model without ``Data`` has one random batch instead.
        lr: learning rate of the default optimizer.
        seed: seed of the default model's weights and of the order of the data.
        position: sequences to skip at the beginning, such as the ``position`` at which another run stopped.
        checkpoints: options for checkpoints. Default: no checkpoints.
        weights: files of weights to begin with, as for :func:`ullage.load`. The default model is then made from the
            ``config.json`` beside them, without random weights.
        options: those of :class:`ullage.Options` that do not plan.

    Attributes:
        plan, model, optimizer: plan, model and optimizer of the training. LR schedulers may be built on the optimizer.
        process: this process's ranks.
        stateful: other objects to save in checkpoints, by name. Each has ``state_dict()``, which returns plain numbers
            and lists, and ``load_state_dict()``. Put LR schedulers here.
        outcomes: results of the checkpoints of this process so far, on every level.
        saver: saves checkpoints; ``None`` without them.

    Raises:
        PlanError: the plan is for another kind of machine, or for another number of processes.
        ValueError: there are too few tokens, or the model does not know one; an optimizer is given without its model;
            or the model or optimizer does not match the plan.
        OutOfMemoryError: memory ran out, here or later.
        RankError: another rank has failed.
    """

    def __init__(
        self,
        plan: Plan,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        data: Tokens | Data | None = None,
        *,
        lr: float = 1e-3,
        seed: int = 0,
        position: int = 0,
        checkpoints: CheckpointOptions | None = None,
        weights: str | Path | None = None,
        **options: Unpack[Options],
    ) -> None:
        if optimizer is not None and model is None:
            raise ValueError("an optimizer was given without its model; give both, or neither")
        check_options("Trainer", options, [name for name in Options.__annotations__ if name not in PLAN_OPTIONS])
        self.plan = plan
        self.process = Process.of(plan)
        check_machine(plan, self.process)
        self.stateful: dict[str, Stateful] = {}
        self.outcomes: list[Outcome] = []
        self.saver: CheckpointSaver | None = None
        if checkpoints is not None:
            check_levels(checkpoints.levels)
            self.saver = CheckpointSaver(
                plan, checkpoints, self.stateful, self.outcomes, is_first=self.process.is_first
            )
            options = {"checkpoint_buffer_bytes": checkpoints.buffer_bytes, **options}
        self._options = options
        self._batches = batch_source(plan, data, seed, position, self.process.data_rank)
        self._data = data if isinstance(data, Data) else None
        if self._data is not None:
            self.stateful["data"] = self._data
        self._iteration = self._num_to_meter = 0
        if not (is_made := model is None):
            warn_about_dtypes(model, plan)
        folder = None if weights is None else weights_folder(weights)
        with reporting_out_of_memory(plan), _naming_weights(folder if model is None else None):
            model, optimizer = _make(plan, model, optimizer, self.process, folder, lr=lr, seed=seed)
            self.model, self.optimizer = prepare_planned(model, optimizer, plan, options_of(plan, options))
        with contextlib.ExitStack() as failing:
            failing.push(self.session)  # on a failure, the session tells the other ranks
            if folder is not None and is_made and brings_weights(plan):
                self.optimizer.weights_folder = folder
            elif folder is not None:
                load(self.optimizer, folder)
            if self.saver is not None:
                self.saver.open(self.optimizer)
            failing.pop_all()
        if self.process.data_rank:  # ranks that share layers keep the same RNG state for dropout
            torch.manual_seed(seed + self.process.data_rank)  # different dropout on data-parallel ranks

    @property
    def session(self) -> Session:
        """The session that executes the plan."""
        return self.optimizer.session

    @property
    def position(self) -> int:
        """Sequences of the data that all ranks together have read; see :class:`TokenStream`."""
        return self._batches.sequences.position

    def __iter__(self) -> Iterator[Step]:
        while True:
            yield self._step()

    def run(self, num_iterations: int) -> Iterator[Step]:
        """Train for ``num_iterations`` iterations, and yield each when it ends."""
        return itertools.islice(self, num_iterations)

    @property
    def iteration(self) -> int:
        """Number of finished iterations, including those before the checkpoint that training resumed from."""
        return self._iteration

    def resume(self) -> Resumed:
        """Resume from the newest complete checkpoint, if there is one. Call it before the first iteration.

        This restores weights, optimizer state, step counts, learning rates, :attr:`stateful` objects, RNG state and the
        position in the data. The checkpoint may be from another plan and another number of ranks. All ranks call it
        together.

        Raises:
            ValueError: the trainer makes no checkpoints.
            CheckpointError: the checkpoint is of another model or optimizer.
        """
        if self.saver is None or not self.saver.is_open:
            raise ValueError("there are no checkpoints to resume from; give the trainer checkpoints=")
        found = self.saver.resume(self._batches)
        self._iteration = found.step
        return found

    def save(self) -> None:
        """Begin a checkpoint of the present state. It is copied during the next iteration, or when training ends.

        Raises:
            ValueError: the trainer makes no checkpoints.
        """
        if self.saver is None or not self.saver.is_open:
            raise ValueError("the trainer makes no checkpoints; give it checkpoints=")
        self.saver.save(self.plan, self._iteration, self.position)

    def evaluate(self) -> float:
        """Return the mean loss over the target tokens of the held-out data. Call it between two iterations.

        Raises:
            ValueError: no data are held out.
        """
        if self._data is None:
            raise ValueError(
                "no data are held out for evaluation; give the trainer data=ullage.Data(..., eval_split=0.05)"
            )
        with reporting_out_of_memory(self.plan, self.session.memory):
            sums = self.session.collectives.means(np.array(self._data.eval_sums(self.model), np.float64))
        self.session.runtime.machine.exclude(self.session.iteration - 1)  # the evaluation delays the next iteration
        return float(sums[0] / sums[1])

    def replan(self) -> Replanned:
        """Plan again with measured rates, and change to the new plan if it is faster. Call it between two iterations.

        The whole training state continues: weights, optimizer state, schedulers, RNG state, and the position in the
            data.
        The state passes through one file per node in ``storage_dir`` (or the system's temporary folder), so that memory
        never holds two plans. Losses and weights are the same as without the change. With more than two ranks they may
        differ by the order of sums over ranks, which the plan's ZeRO stage decides. All ranks call it together and use
        the mean of their times.

        Returns:
            The result; ``str()`` of it is the result in words.

        Raises:
            ValueError: too few complete iterations were recorded.
            StorageError: there is no room for the file; nothing has changed.
            OutOfMemoryError: there is not enough memory for the new plan; training can continue under the old one.
        """
        found = replan(self.plan, self.session.mean_timeline(), self.session.collectives.broadcast_text)
        if found.after is None or not self.session.collectives.broadcast(int(found.is_faster)):
            return found
        options = options_of(found.after, self._options)
        if self.saver is not None:
            self.saver.close(waits=True, brings_down=False)
        with reporting_out_of_memory(found.after):
            folder = options.storage_dir or Path(tempfile.gettempdir())
            file_bytes = self.optimizer.switch_plan(found.after.units(), found.after.decisions, options, folder)
        self.plan = self.optimizer.plan = found.after
        if self.saver is not None:
            self.saver.open(self.optimizer)
        return dataclasses.replace(found, switched=True, file_bytes=file_bytes)

    def close(self, *, give_back: bool = True) -> None:
        """End training. See :meth:`executor.session.Session.close`.

        If the trainer makes checkpoints, it makes one of the last iteration. It waits until this one is on all levels,
        for at most the time in the options, or until Ctrl-C; see :attr:`outcomes`.
        """
        if self.saver is not None and self.saver.is_open:
            has_state = not self.session.failed
            if has_state:
                self.save()
            self.saver.close(waits=has_state, brings_down=has_state)
        self.session.close(give_back=give_back)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self.close()
            return
        if self.saver is not None:
            self.saver.close(waits=False, brings_down=False)
        self.session.__exit__(kind, error, traceback)

    def _step(self) -> Step:
        if self.saver is not None and self.saver.is_due(self._iteration):
            self.save()  # not at the end of the iteration, because schedulers have been stepped since then
        begin_s = time.perf_counter()
        iteration, session = self._iteration, self.session
        if session.iteration == METERED:
            self._num_to_meter = 1 if self.plan.decisions.num_devices == 1 else _NUM_METERED
        metered = self._num_to_meter > 0
        with reporting_out_of_memory(self.plan, session.memory):
            with session.metered() if metered else contextlib.nullcontext():
                total = self._compute()
            if metered:
                self._check_device()
            loss = session.collectives.mean(float(total))
        if not math.isfinite(loss):
            # A scheduler keeps the initial rate in its group.
            rate = max(group.get("initial_lr", group["lr"]) for group in self.optimizer.param_groups)
            raise ValueError(f"the loss is {loss} in iteration {iteration}; use a smaller --lr than {rate:g}")
        self._iteration += 1
        return Step(iteration, loss, time.perf_counter() - begin_s, self._batches.num_tokens)

    def _check_device(self) -> None:
        """Check the device's peak. If it was too high, meter a few more iterations first.

        If other threads have the cores, threads of gloo may free a tensor milliseconds after its sum is complete.
        """
        self._num_to_meter -= 1
        try:
            check_device(self.plan, self.session.memory()[Tier.GPU])
        except OutOfMemoryError:
            if not self._num_to_meter:
                raise
        else:
            self._num_to_meter = 0

    def _compute(self) -> torch.Tensor:
        """Run one iteration; return this rank's mean loss."""
        device = next(self.model.parameters()).device
        total = torch.zeros((), device=device)
        for loss in self._batches.losses(self.model, device):
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        if self.plan.decisions.clip:
            self.optimizer.clip_grad_norm_(MAX_GRADIENT_NORM)
        self.optimizer.step()
        return total


def check_machine(plan: Plan, process: Process, device: Literal["auto", "host", "cuda"] = "auto") -> None:
    """Check that this machine matches a plan.

    Raises:
        PlanError: the machine has another kind of device, too few devices or cores, or ``device`` is of another kind.
    """
    kind = plan.hardware.device.kind
    wanted = {"auto": kind, "host": "host", "cuda": "gpu"}[device]
    if wanted != kind:
        raise PlanError(
            f"the plan was made for a {kind} device ({plan.hardware.name}), but --device asks for {device}; "
            "plan for that machine: `ullage calibrate`, then `ullage plan --hardware local`"
        )
    if kind == "gpu" and not torch.cuda.is_available():
        raise PlanError(
            f"the plan was made for {plan.hardware.name}, but this machine has no GPU that PyTorch can use; "
            "run `ullage calibrate` here and plan with --hardware local"
        )
    if kind == "gpu" and (count := torch.cuda.device_count()) <= process.local_rank:
        raise PlanError(
            f"the plan is for {process.per_node} devices on a node, but this machine has {count}; plan with --gpus "
            f"{count}, or for a profile of this machine"
        )
    wanted_cores = plan.hardware.device.num_cores * process.per_node
    if kind == "host" and (cores := len(os.sched_getaffinity(0))) < wanted_cores:
        raise PlanError(
            f"the plan computes on {wanted_cores} cores, but this process may use {cores}; "
            "run `ullage calibrate` here and plan with --hardware local"
        )


@contextlib.contextmanager
def _naming_weights(folder: Path | None) -> Iterator[None]:
    """If the model was made for weights in a folder and does not match the plan, name the folder in the error."""
    try:
        yield
    except BindingError as error:
        if folder is None:
            raise
        raise BindingError(f"the model in {folder} does not match the plan: {error} (--model {folder})") from error


def _make(
    plan: Plan,
    model: nn.Module | None,
    optimizer: torch.optim.Optimizer | None,
    process: Process,
    weights: Path | None,
    *,
    lr: float,
    seed: int,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Make the planned model and its optimizer. Weights are random, or are loaded later from ``weights``.

    If the model or optimizer is given, it is returned unchanged.
    """
    if plan.hardware.device.kind == "host":
        torch.set_num_threads(plan.hardware.device.num_cores)
        keep_freed_memory()
    else:
        torch.cuda.set_device(process.local_rank)
    torch.manual_seed(seed)
    model = (planned_model(plan, weights) if model is None else model).train()
    if optimizer is None:
        name = plan.decisions.optimizer
        more = _HYPER_PARAMETERS[name]
        if OPTIMIZERS[name].others:
            adamw = {"lr": lr, **_HYPER_PARAMETERS["adamw"]}
            optimizer = torch_class_of(name)(model.named_parameters(), adamw, lr=lr, **more)
        else:
            if plan.decisions.precision.rounds:
                more = {**more, ROUNDS: True}
            optimizer = torch_class_of(name)(model.parameters(), lr=lr, **more)
    return model, optimizer
