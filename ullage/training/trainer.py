"""``Trainer``: a training loop under a plan."""

import contextlib
import dataclasses
import itertools
import math
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal, Self, Unpack, final

import numpy as np
import torch
from torch import nn

from executor.checkpoint import Outcome
from executor.checkpoint.levels import check_levels
from executor.distributed.shards import BindingError
from executor.optimizer.table import torch_class_of
from executor.prepare import ExecutionConfig
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
from ullage.training.batches import batch_source
from ullage.training.checkpoints import CheckpointOptions, CheckpointSaver, Stateful
from ullage.training.models import brings_weights, planned_model
from ullage.training.out_of_memory import OutOfMemoryError, check_device, reporting_out_of_memory
from ullage.training.preparing import Settings, prepare_planned, session_options, warn_about_dtypes
from ullage.training.processes import Process
from ullage.training.replanning import Replanned, replan
from ullage.training.text import Tokens

METERED: Final = 1
"""The iteration of a session whose memory is metered, which takes longer."""
_NUM_METERED: Final = 3  # iterations of several ranks, where the first ones were too much
MAX_GRADIENT_NORM: Final = 1.0
# What a trainer's own optimizer has beside its learning rate.
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
        loss: the mean over its micro-batches and all ranks; of :class:`ullage.Data`, over their target tokens.
        measured_s: wall seconds since it began; updates that it left under way are in the next one's.
        num_tokens: of all ranks together, padding left out.
    """

    iteration: int
    loss: float
    measured_s: float
    num_tokens: int


@final
class Trainer:
    """Trains a plan's model on tokens, one iteration at a time.

    Iterate over it: every :class:`Step` is one iteration, with gradients clipped to a norm of 1 if the plan clips.
    If the plan is for several devices, each of its processes (``torchrun``) has a trainer, and they iterate together.
    Leaving the ``with`` block waits for all updates and gives the model back as an ordinary one.

    Args:
        plan: made for this machine.
        model: an unmodified module with the planned parameters; left out, the planned one with random weights. It is
            called as ``model(input_ids=..., labels=...)`` if it is planned from sizes, else with its captured inputs.
        optimizer: the planned one over the model's parameters; left out, one with usual settings.
        data: files with a tokenizer (:class:`ullage.Data`, batched as planned), or tokens as unsigned integers in one
            dimension (see :func:`ullage.training.text.read_tokens`; a memory map is never read whole); left out, the
            built-in English text. A captured model has one random batch instead, unless it has ``Data``.
        lr: learning rate of the optimizer that is made here.
        seed: of the weights that are made here, and of the order of the data.
        position: sequences to skip at the beginning, such as the ``position`` at which another run stopped.
        checkpoints: where, when and how many; by default none.
        weights: files of weights to begin with, as :func:`ullage.load` takes them. A model that is not given is made as
            the ``config.json`` beside them says, without random weights.
        settings: see :class:`Settings`.

    Attributes:
        plan, model, optimizer: of the training. LR schedulers may be built on the optimizer.
        process: this process among those of the plan.
        stateful: what else goes into checkpoints, by name: anything with ``state_dict()``, of plain numbers and lists,
            and ``load_state_dict()``. LR schedulers belong here.
        outcomes: how the checkpoints of this process have ended so far, on every level.
        saver: makes checkpoints, or ``None``.

    Raises:
        PlanError: the plan was made for another kind of machine, or for another number of processes.
        ValueError: there are too few tokens or bad ones; an optimizer is given without its model; or the model or
            optimizer does not match the plan.
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
        **settings: Unpack[Settings],
    ) -> None:
        if optimizer is not None and model is None:
            raise ValueError("an optimizer was given without the model that it is for; give both, or neither")
        check_options("Trainer", settings, Settings.__annotations__)
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
            settings = {"checkpoint_buffer_bytes": checkpoints.buffer_bytes, **settings}
        self._settings = settings
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
            self.model, self.optimizer = prepare_planned(model, optimizer, plan, settings)
        with contextlib.ExitStack() as failing:
            failing.push(self.session)  # which tells the other ranks of a failure
            if folder is not None and is_made and brings_weights(plan):
                self.optimizer.weights_folder = folder
            elif folder is not None:
                load(self.optimizer, folder)
            if self.saver is not None:
                self.saver.open(self.optimizer)
            failing.pop_all()
        if self.process.data_rank:  # ranks that share layers must drop out the same
            torch.manual_seed(seed + self.process.data_rank)  # for random operations in training (dropout)

    @property
    def session(self) -> Session:
        """What executes the plan."""
        return self.optimizer.session

    @property
    def position(self) -> int:
        """Sequences of the data's order that have been passed, by all ranks together; see :class:`TokenStream`."""
        return self._batches.sequences.position

    def __iter__(self) -> Iterator[Step]:
        while True:
            yield self._step()

    def run(self, num_iterations: int) -> Iterator[Step]:
        """Train for more iterations, and yield each as it ends."""
        return itertools.islice(self, num_iterations)

    @property
    def iteration(self) -> int:
        """Number of iterations so far, including those of the checkpoint that training resumed from."""
        return self._iteration

    def resume(self) -> Resumed:
        """Continue from the newest checkpoint that is whole, if there is one; call it before the first iteration.

        It restores weights, optimizer state, step counts, learning rates, :attr:`stateful` objects, RNG state and the
        position in the data, whatever plan and number of ranks the checkpoint was made under. All ranks do so together.

        Raises:
            ValueError: the trainer makes no checkpoints.
            CheckpointError: it is of another model or optimizer.
        """
        if self.saver is None or not self.saver.is_open:
            raise ValueError("there are no checkpoints to resume from; give the trainer checkpoints=")
        found = self.saver.resume(self._batches)
        self._iteration = found.step
        return found

    def save(self) -> None:
        """Begin a checkpoint of the present state; it is taken during the next iteration, or when training ends.

        Raises:
            ValueError: the trainer makes no checkpoints.
        """
        if self.saver is None or not self.saver.is_open:
            raise ValueError("there is no place for checkpoints; give the trainer checkpoints=")
        self.saver.save(self.plan, self._iteration, self.position)

    def evaluate(self) -> float:
        """Return the mean loss over the target tokens that the data hold out, between two iterations.

        Raises:
            ValueError: nothing is held out.
        """
        if self._data is None:
            raise ValueError(
                "nothing is held out to evaluate on; give the trainer data=ullage.Data(..., eval_split=0.05)"
            )
        with reporting_out_of_memory(self.plan, self.session.memory):
            sums = self.session.collectives.means(np.array(self._data.eval_sums(self.model), np.float64))
        self.session.runtime.machine.exclude(self.session.iteration - 1)  # the time until the next one begins is longer
        return float(sums[0] / sums[1])

    def replan(self) -> Replanned:
        """Plan again with measured rates, and change to the new plan if it is faster; between two iterations.

        Training continues with the same weights, optimizer state, schedulers, RNG state, and position in the data.
        State passes through a file in ``storage_dir`` (or the system's folder for temporary files), one for each node,
        so that never more than the memory of one plan is taken. Losses and weights equal those without a change. With
        more than two ranks they may differ by the order of sums over ranks, which depends on the plan's ZeRO stage. All
        ranks do so together, by the mean of their times.

        Returns:
            The result; ``str()`` of it says it in words.

        Raises:
            ValueError: too few iterations were recorded as a whole.
            StorageError: there is no room for the file; nothing has changed then.
            OutOfMemoryError: the new plan did not find its memory; training can go on as before.
        """
        found = replan(self.plan, self.session.mean_timeline(), self.session.collectives.broadcast_text)
        if found.after is None or not self.session.collectives.broadcast(int(found.is_faster)):
            return found
        config = ExecutionConfig(
            found.after.units(), found.after.decisions, session_options(found.after, self._settings)
        )
        if self.saver is not None:
            self.saver.close(waits=True, brings_down=False)
        with reporting_out_of_memory(found.after):
            file_bytes = self.optimizer.switch_plan(config, config.options.storage_dir or Path(tempfile.gettempdir()))
        self.plan = self.optimizer.plan = found.after
        if self.saver is not None:
            self.saver.open(self.optimizer)
        return dataclasses.replace(found, switched=True, file_bytes=file_bytes)

    def close(self, *, give_back: bool = True) -> None:
        """End training. See :meth:`executor.session.Session.close`.

        If the trainer makes checkpoints, it makes one of the last iteration. It waits until this one has reached all
        levels, for as long as the options say, or until Ctrl-C; see :attr:`outcomes`.
        """
        if self.saver is not None and self.saver.is_open:
            has_state = not self.session.failed
            if has_state:
                self.save()
            self.saver.close(waits=has_state, brings_down=has_state)
        self.session.close(give_back=give_back)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self.close()
            return
        if self.saver is not None:
            self.saver.close(waits=False, brings_down=False)
        self.session.__exit__(kind, error, traceback)

    def _step(self) -> Step:
        if self.saver is not None and self.saver.is_due(self._iteration):
            self.save()  # not right behind the iteration: schedulers have been stepped since
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
            # Schedulers keep the rate that they were given.
            rate = max(group.get("initial_lr", group["lr"]) for group in self.optimizer.param_groups)
            raise ValueError(f"the loss is {loss} in iteration {iteration}; use a smaller --lr than {rate:g}")
        self._iteration += 1
        return Step(iteration, loss, time.perf_counter() - begin_s, self._batches.num_tokens)

    def _check_device(self) -> None:
        """Check the device's peak, and meter a few more iterations if it was too high.

        Threads of gloo may give a tensor up milliseconds after its sum is there, if others have the cores.
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
    """Check that this machine is of the kind that a plan was made for.

    Raises:
        PlanError: it is not, or has too little of it, or ``device`` asks for another kind.
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
    """Name the model that does not match the plan, if it was made for weights in a folder."""
    try:
        yield
    except BindingError as error:
        if folder is None:
            raise
        raise BindingError(f"the model in {folder} is not the planned one: {error} (--model {folder})") from error


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
    """Make the planned model with random weights, or without any for those in a folder, and its optimizer.

    Either is made only if it is not given.
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
            optimizer = torch_class_of(name)(model.parameters(), lr=lr, **more)
    return model, optimizer
