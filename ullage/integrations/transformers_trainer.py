"""``ullage.offloaded``: ``transformers.Trainer``, and classes made from it, in the memory that is free."""

import contextlib
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar, Unpack, cast

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from executor.prepare import OffloadedOptimizer
from planner.plan.document import Plan, PlanError
from ullage.this_machine.checks import check_options
from ullage.training.preparing import Options, prepare

_Trainer = TypeVar("_Trainer", bound=transformers.Trainer)

# Newer versions have another name for it, and the older one as an alias.
_CHECKPOINTING: Final = ("activation_checkpointing", "gradient_checkpointing")
_REFUSED: Final = {
    "fp16": "use bf16=True: the plan then has bf16 weights and float32 master copies",
    "torch_compile": "leave it out, and give compile_blocks=True to ullage.offloaded",
    "load_best_model_at_end": "leave it out, and load the best checkpoint after training",
    "auto_find_batch_size": "leave it out: the plan is for per_device_train_batch_size",
    "fp16_full_eval": "leave it out: a prepared model keeps its type",
    "bf16_full_eval": "leave it out: a prepared model keeps its type",
    "fsdp": "leave it out: the plan shards and offloads by itself",
    "deepspeed": "leave it out: the plan shards and offloads by itself",
}
_PREPARED: Final = "_is_accelerate_prepared"  # what `accelerate` looks for in a model
_MOST_ROWS: Final = 20_000  # of the data whose lengths are looked at


def offloaded(trainer_class: type[_Trainer], **options: Unpack[Options]) -> type[_Trainer]:
    """Return a trainer's class that does the same, but trains under a plan for the free memory.

    ``ullage.offloaded(transformers.Trainer)(model=model, args=args, ...)``. The model stays where it is until training
    or evaluation begins. Then it is prepared, as by :func:`ullage.prepare`, with the optimizer that the trainer has
    made or was given. The example batch is one of the longest rows of the training data, as the trainer collates them.
    Accumulation and clipping are those of the trainer's arguments. ``bf16=True`` means bf16 weights with float32 master
    copies, without autocast. The trainer's gradient checkpointing is switched off, because the plan decides what is
    recomputed.

    The log of every step then has ``ullage_iteration_s`` (measured, the mean since the last log) and
    ``ullage_predicted_s``; not that of steps on other batches than planned. ``trainer.plan`` is the plan.
    ``trainer.close()`` gives the model back as an ordinary one; until then it can be evaluated and saved.

    Of several processes, which ``torchrun`` starts, each trains on its part of every batch, as the trainer divides it.
    All of them train, evaluate, save and close together; rank 0 writes. Gradients are averaged over ranks, of a loss
    that the trainer divides by the target tokens of all of them (``average_tokens_across_devices``, its default).

    Args:
        trainer_class: ``transformers.Trainer``, ``trl.SFTTrainer`` or another one.
        options: see :class:`Options`.

    Raises:
        TypeError: it is no such class, or there is no such option.
        ValueError: an option has a value that it cannot have.
    """
    if not (isinstance(trainer_class, type) and issubclass(trainer_class, transformers.Trainer)):
        name = trainer_class.__name__ if isinstance(trainer_class, type) else type(trainer_class).__name__
        raise TypeError(
            f"{name} is no class of transformers.Trainer; write ullage.offloaded(Trainer)(model=...), before it is made"
        )
    if issubclass(trainer_class, _Offloaded):
        raise TypeError(f"{trainer_class.__name__} is offloaded already; make it once, with all options")
    check_options("offloaded", options, Options.__annotations__)
    made = type(f"Offloaded{trainer_class.__name__}", (_Offloaded, trainer_class), {"ullage_options": options})
    return cast("type[_Trainer]", made)


class _Offloaded(transformers.Trainer):
    """What differs; the class it is mixed with does everything else."""

    ullage_options: Options
    _offloaded: OffloadedOptimizer | None = None
    _given: torch.optim.Optimizer | None = None
    _of_model: nn.Module | None = None

    @property
    def plan(self) -> Plan | None:
        """The plan, once training or evaluation has begun."""
        return None if self._offloaded is None else self._offloaded.plan

    def close(self) -> None:
        """Wait for the last updates and give the model back as an ordinary one."""
        if self._offloaded is not None:
            self._offloaded.session.close()
            vars(self._of_model).pop(_PREPARED, None)

    def create_accelerator_and_postprocess(self) -> None:
        """Check the arguments, and change those that the plan decides, before they are used.

        Raises:
            PlanError: one of them cannot.
        """
        args = self.args
        for name, remedy in _REFUSED.items():
            if getattr(args, name, None):
                raise PlanError(f"TrainingArguments has {name}={getattr(args, name)!r}, which no plan has; {remedy}")
        args._n_gpu = min(args.n_gpu, 1)  # no copies of the model on further GPUs
        self._precision = {"precision": "bf16"} if args.bf16 else {}
        args.bf16, args.mixed_precision = False, "no"
        for name in _CHECKPOINTING:
            if getattr(args, name, None):
                setattr(args, name, False)
        super().create_accelerator_and_postprocess()

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave the model where it is: the plan moves it."""

    def _prepare_input(self, data: Any) -> Any:
        data = super()._prepare_input(data)
        is_float = isinstance(data, Tensor) and data.is_floating_point()
        return data.to(torch.bfloat16) if is_float and self._precision else data

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Make the optimizer, and put it and the model under a plan: once, and again after :meth:`close`."""
        if self._of_model is self.model and self.optimizer is not None:
            assert self._offloaded is not None
            if not self._offloaded.session.closed:
                return self.optimizer
            self.optimizer = self._given
        self._given = given = super().create_optimizer(model)
        self.close()  # that of another model, which model_init has replaced
        assert self.model is not None
        args = self.args
        options: Any = {
            "num_micro_batches": args.gradient_accumulation_steps,
            "clip": bool(args.max_grad_norm and args.max_grad_norm > 0),
            **self._precision,
            **self.ullage_options,
        }
        _, self._offloaded = prepare(self.model.train(), given, self._largest_batch(), **options)
        self.optimizer, self._of_model = self._offloaded, self.model
        # The plan reduces gradients over ranks: `accelerate` must not wrap the model in DistributedDataParallel.
        setattr(self.model, _PREPARED, True)
        self.remove_callback(_Measurements)
        self.add_callback(_Measurements(self._offloaded))
        return self._offloaded

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """Return the norm for the log; none if the plan does not wait for all gradients, as nobody clips them."""
        assert self._offloaded is not None
        if grad_norm is None and not self._offloaded.plan.decisions.clip:
            return None
        return super()._get_grad_norm(model, grad_norm)  # type: ignore[no-untyped-call]

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Save the model from rank 0, with weights that all ranks gather together."""
        if state_dict is None and self._is_shared and self.model is not None:
            state_dict = self.model.state_dict()
        super()._save(output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save both from rank 0; ranks that write nothing take part in gathering the optimizer's state."""
        if self._is_shared and not self.args.should_save:
            assert self._offloaded is not None
            self._offloaded.state_dict()
        super()._save_optimizer_and_scheduler(output_dir)

    @property
    def _is_shared(self) -> bool:
        """Whether several ranks have the prepared model together."""
        return self._offloaded is not None and not self._offloaded.session.closed and self.args.world_size > 1

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate the prepared model, which is where the data come to."""
        if not self.is_in_train:
            self.create_optimizer()
        return super().evaluation_loop(*args, **kwargs)

    def _largest_batch(self) -> dict[str, Tensor]:
        """Return a batch of the longest rows of the data, or the first one of a stream; random numbers go on."""
        with _preserved_rng_state():
            loader = self.get_train_dataloader()
            batch = _collated(loader, self.args.train_batch_size)
        tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
        tokens = tensors.get("input_ids")  # beside which TRL gives packed batches the places where documents begin
        return {name: value for name, value in tensors.items() if tokens is None or len(value) == len(tokens)}


def _collated(loader: Any, num_rows: int) -> Mapping[str, Any]:
    data = loader.dataset
    if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        batch = next(iter(loader))
    else:
        step = max(len(data) // _MOST_ROWS, 1)
        rows = sorted(range(0, len(data), step), key=lambda row: _length(data[row]), reverse=True)[:num_rows]
        try:
            batch = loader.collate_fn([data[row] for row in rows])
        except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"the longest rows of the training data make no batch ({type(error).__name__}: {error}); give "
                "dictionaries as rows, and a data_collator that pads them to one length"
            ) from error
    if not isinstance(batch, Mapping):
        raise TypeError(
            f"the trainer's batches are {type(batch).__name__}, not dictionaries; give it a data_collator that returns "
            "what the model is called with, by name. A trainer that generates its batches (GRPO) cannot be planned: "
            "write a loop of your own around ullage.prepare"
        )
    return batch


def _length(row: Any) -> int:
    tokens = row.get("input_ids") if isinstance(row, Mapping) else None
    return len(tokens) if isinstance(tokens, Sequence | Tensor | np.ndarray) else 0


@contextlib.contextmanager
def _preserved_rng_state() -> Iterator[None]:
    """Restore the RNG state afterwards."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - data collators use it
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002


class _Measurements(TrainerCallback):
    """Puts measured and predicted seconds per iteration into the trainer's log."""

    def __init__(self, optimizer: OffloadedOptimizer) -> None:
        self._optimizer = optimizer
        self._begin_s = 0.0
        self._spent_s: list[float] = []

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Note when an iteration begins."""
        self._begin_s = time.perf_counter()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Note how long it has taken, if it was as planned; updates under way are in the next one's time."""
        if self._optimizer.session.driver.last_was_whole:
            self._spent_s.append(time.perf_counter() - self._begin_s)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add measurements and their predictions to the log."""
        if not self._spent_s or logs is None or "loss" not in logs:
            return
        found = {
            "ullage_iteration_s": sum(self._spent_s) / len(self._spent_s),
            "ullage_predicted_s": self._optimizer.plan.prediction.iteration_s,
        }
        self._spent_s.clear()
        logs |= found  # for callbacks that come later; the history has had its copy
        state.log_history[-1] |= found

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Wait for the last updates, so that their errors are raised here."""
        self._optimizer.session.synchronize()
