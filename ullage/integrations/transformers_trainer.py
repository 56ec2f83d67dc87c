"""``ullage.offloaded``: train with ``transformers.Trainer`` and its subclasses in the memory that is free."""

import contextlib
import copy
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar, Unpack, cast
from unittest import mock

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import ConcatDataset
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from executor.distributed.meeting import world_size
from executor.prepare import OffloadedOptimizer
from executor.training_state.rng_state import preserved_rng_state
from hwprofiles.installation import check_versions
from planner.plan.document import Plan, PlanError
from ullage.capture.module import as_before
from ullage.capture.records import CaptureError
from ullage.this_machine.checks import check_options
from ullage.this_machine.planning import Options
from ullage.training.preparing import prepare

check_versions(["accelerate"])  # an older one wraps models that are prepared

_Trainer = TypeVar("_Trainer", bound=transformers.Trainer)

# Newer versions of transformers have a new name, and keep the old one as an alias.
_CHECKPOINTING: Final = ("activation_checkpointing", "gradient_checkpointing")
_REFUSED: Final = {
    "fp16": "use bf16=True: the plan then has bf16 weights and float32 master copies",
    "torch_compile": "leave it out, and give compile_blocks=True to ullage.offloaded",
    "auto_find_batch_size": "leave it out: the plan is for per_device_train_batch_size",
    "fp16_full_eval": "leave it out: a prepared model keeps its type",
    "bf16_full_eval": "leave it out: a prepared model keeps its type",
    "fsdp": "leave it out: the plan shards and offloads by itself",
    "deepspeed": "leave it out: the plan shards and offloads by itself",
}
_PREPARED: Final = "_is_accelerate_prepared"  # the attribute with which `accelerate` marks a model
_CALLS_MODEL: Final = frozenset({"Trainer.compute_loss", "SFTTrainer.compute_loss"})
"""Methods whose loss is that of ``model(**batch)``. The step of other trainers is recorded."""
_MOST_ROWS: Final = 20_000  # rows of the data whose lengths are compared


def offloaded(trainer_class: type[_Trainer], **options: Unpack[Options]) -> type[_Trainer]:
    """Return a subclass of a trainer that trains under a plan for the memory that is free now.

    Write ``ullage.offloaded(transformers.Trainer)(model=model, args=args, ...)``. The model stays where it is until
    training or evaluation begins. Then Ullage prepares it, as in :func:`ullage.prepare`, with the trainer's optimizer.
    The example batch has the longest rows of the training data, collated by the trainer. A ``compute_loss`` that does
    more than to call the model with the batch is planned as ``step`` of :func:`ullage.prepare` is. Accumulation and
    clipping are those of the trainer's arguments. ``bf16=True`` means bf16 weights with float32 master copies, without
    autocast. The trainer's gradient checkpointing is switched off, because the plan decides which activations are
    recomputed.

    The log then has ``ullage_iteration_s`` (measured, the mean since the last log) and ``ullage_predicted_s``, unless
    batches did not have the planned shape. ``trainer.plan`` is the plan. ``trainer.close()`` gives the model back as an
    ordinary one; until then it can be evaluated and saved.

    If ``torchrun`` starts several processes, each trains on its part of every batch, as the trainer divides it. All
    processes train, evaluate, save and close together; rank 0 writes. Gradients are averaged over ranks. The trainer
    divides the loss by the target tokens of all ranks (``average_tokens_across_devices``, its default).

    Args:
        trainer_class: ``transformers.Trainer`` or a subclass, such as those of TRL and ``sentence-transformers``.
        options: see :class:`Options`.

    Raises:
        TypeError: ``trainer_class`` is not a trainer class, or an option does not exist.
        ValueError: an option has a wrong value.
    """
    if not (isinstance(trainer_class, type) and issubclass(trainer_class, transformers.Trainer)):
        name = trainer_class.__name__ if isinstance(trainer_class, type) else type(trainer_class).__name__
        raise TypeError(f"{name} is not a subclass of transformers.Trainer; write ullage.offloaded(Trainer)(model=...)")
    if issubclass(trainer_class, _Offloaded):
        raise TypeError(f"{trainer_class.__name__} is offloaded already; call ullage.offloaded once, with all options")
    check_options("offloaded", options, Options.__annotations__)
    made = type(f"Offloaded{trainer_class.__name__}", (_Offloaded, trainer_class), {"ullage_options": options})
    return cast("type[_Trainer]", made)


class _Offloaded(transformers.Trainer):
    """The methods that differ; the trainer class that this is mixed with does the rest."""

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
        """Check the arguments, and change those that the plan decides, before anything uses them.

        Raises:
            PlanError: a plan cannot do what an argument says.
        """
        args = self.args
        for name, remedy in _REFUSED.items():
            if getattr(args, name, None):
                raise PlanError(
                    f"TrainingArguments has {name}={getattr(args, name)!r}, which plans do not support; {remedy}"
                )
        if (started := world_size()) != args.world_size:
            raise PlanError(
                f"{started} processes were started, but TrainingArguments has world_size={args.world_size}, so each "
                "would train on all data; give use_cpu=True on a machine without a GPU"
            )
        args._n_gpu = min(args.n_gpu, 1)  # so that the trainer does not copy the model to other GPUs
        self._precision = {"precision": "bf16"} if args.bf16 else {}
        args.bf16, args.mixed_precision = False, "no"
        if switched_on := [name for name in _CHECKPOINTING if getattr(args, name, None)]:
            warnings.warn(
                f"TrainingArguments has {switched_on[0]}=True, which is switched off: the plan decides which "
                "activations are recomputed",
                RuntimeWarning,
                stacklevel=2,
            )
            for name in switched_on:
                setattr(args, name, False)
        super().create_accelerator_and_postprocess()

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave the model where it is; the plan moves it."""

    def _prepare_input(self, data: Any) -> Any:
        data = super()._prepare_input(data)
        is_float = isinstance(data, Tensor) and data.is_floating_point()
        return data.to(torch.bfloat16) if is_float and self._precision else data

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Make the optimizer and prepare it and the model under a plan, once, and again after :meth:`close`.

        Raises:
            PlanError: the trainer's step cannot be recorded, or it trains parameters that are not the model's.
        """
        if self._of_model is self.model and self.optimizer is not None:
            assert self._offloaded is not None
            if not self._offloaded.session.closed:
                return self.optimizer
            self.optimizer = self._given
        # Trainers of the user's may take no model.
        self._given = given = super().create_optimizer(*(() if model is None else (model,)))
        self.close()  # the plan of the model that model_init has replaced
        assert self.model is not None
        args = self.args
        options: Any = {
            "num_micro_batches": args.gradient_accumulation_steps,
            "clip": bool(args.max_grad_norm and args.max_grad_norm > 0) or self._has_callback_on_gradients,
            **self._precision,
            **self.ullage_options,
        }
        self._offloaded = self._prepared(self.model.train(), given, options)
        self.optimizer, self._of_model = self._offloaded, self.model
        # The plan reduces gradients over ranks, so `accelerate` must not wrap the model in DistributedDataParallel.
        setattr(self.model, _PREPARED, True)
        self.remove_callback(_Measurements)
        self.add_callback(_Measurements(self._offloaded))
        return self._offloaded

    @property
    def _has_callback_on_gradients(self) -> bool:
        """Whether a callback has ``on_pre_optimizer_step``, which may read gradients."""
        own = (type(each).on_pre_optimizer_step for each in self.callback_handler.callbacks)
        return any(each is not TrainerCallback.on_pre_optimizer_step for each in own)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """Return the gradient norm for the log; ``None`` if the plan does not clip, and so does not know the norm."""
        assert self._offloaded is not None
        if grad_norm is None and not self._offloaded.plan.decisions.clip:
            return None
        return super()._get_grad_norm(model, grad_norm)  # type: ignore[no-untyped-call]

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model on rank 0. Before transformers 5.23, the other ranks do not come to :meth:`_save`."""
        self._has_gathered = False
        super().save_model(output_dir, _internal_call)
        if self._is_shared and not self._has_gathered and self.model is not None:
            self.model.state_dict()

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Save the model on rank 0; all ranks gather the weights together."""
        self._has_gathered = True
        if state_dict is None and self._is_shared and self.model is not None:
            state_dict = self.model.state_dict()
        super()._save(output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save both on rank 0; all ranks gather the optimizer's state together."""
        if self._is_shared and not self.args.should_save:
            assert self._offloaded is not None
            self._offloaded.state_dict()
        super()._save_optimizer_and_scheduler(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load both into host memory. For several ranks, the trainer would load all state onto every GPU."""
        if checkpoint is None or not self._is_shared:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        optimizer, scheduler = (Path(checkpoint) / name for name in (OPTIMIZER_NAME, SCHEDULER_NAME))
        if optimizer.exists() and scheduler.exists():
            assert self.optimizer is not None
            assert self.lr_scheduler is not None
            self.optimizer.load_state_dict(torch.load(optimizer, map_location="cpu", weights_only=True))
            self.lr_scheduler.load_state_dict(torch.load(scheduler, map_location="cpu", weights_only=True))

    @property
    def _is_shared(self) -> bool:
        """Whether several ranks have the prepared model together."""
        return self._offloaded is not None and not self._offloaded.session.closed and self.args.world_size > 1

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate the prepared model."""
        if not self.is_in_train:
            self.create_optimizer()
        return super().evaluation_loop(*args, **kwargs)

    def _prepared(self, model: nn.Module, given: torch.optim.Optimizer, options: Any) -> OffloadedOptimizer:
        """Prepare the model for ``compute_loss`` of a batch with the longest rows of the data.

        The RNG state does not change, and neither does what the trainer keeps.
        """
        name = type(self).__mro__[2].__name__
        is_plain = type(self).compute_loss.__qualname__ in _CALLS_MODEL
        is_plain = is_plain and self.label_smoother is None and self.compute_loss_func is None
        with _made_up_generation(self, model):
            batch = _collated(self.get_train_dataloader(), self.args.train_batch_size)
            inputs = batch if is_plain else self._prepare_inputs(batch)
        self.current_gradient_accumulation_steps = self.args.gradient_accumulation_steps
        counts = not is_plain and isinstance(inputs, Mapping)
        num_items = self._get_num_items_in_batch([inputs], torch.device("cpu")) if counts else None

        def step(_model: nn.Module, inputs: Any) -> Any:
            with _without_ranks(self.accelerator), self.compute_loss_context_manager():
                return self.compute_loss(model, inputs, num_items_in_batch=num_items)

        try:
            if is_plain:
                return prepare(model, given, _arguments(batch), **options)[1]
            return prepare(model, given, inputs, step=step, **options)[1]
        except CaptureError as error:
            failed = error
        # A plan of its first call brings weights too, but its steps leave the plan. Some trainers have no compute_loss.
        compute = self.training_step if is_plain else self.compute_loss
        try:
            with _made_up_generation(self, model):
                args, kwargs = _first_call(model, lambda: compute(model, copy.deepcopy(inputs)))
            return prepare(model, given, (args, kwargs), step=lambda _, call: model(*call[0], **call[1]), **options)[1]
        except CaptureError:
            if is_plain:
                raise failed from None
            raise PlanError(
                f"compute_loss of the {name} cannot be recorded: {failed}; write a loop of your own around "
                "ullage.prepare"
            ) from failed


def _first_call(model: nn.Module, compute: Callable[[], Any]) -> tuple[Any, Any]:
    """Return what a function first calls a model with, which does not run.

    Raises:
        CaptureError: the function does not call it.
    """
    calls: list[tuple[Any, Any]] = []

    def stop(_module: nn.Module, args: Any, kwargs: Any) -> None:
        calls.append((args, kwargs))
        raise CaptureError("the first call is enough")

    with model.register_forward_pre_hook(stop, prepend=True, with_kwargs=True):
        try:
            compute()
        except Exception as error:
            if not calls:
                raise CaptureError(str(error)) from error
    if not calls:
        raise CaptureError("the model is not called")
    return calls[0]


@contextlib.contextmanager
def _without_ranks(accelerator: Any) -> Iterator[None]:
    """Let rank 0, which captures alone, gather nothing from other ranks."""
    with contextlib.ExitStack() as stack:
        for name in ("gather", "gather_for_metrics", "reduce", "pad_across_processes"):
            stack.enter_context(mock.patch.object(accelerator, name, lambda tensor, *_args, **_kwargs: tensor))
        yield


@contextlib.contextmanager
def _made_up_generation(trainer: Any, model: nn.Module) -> Iterator[None]:
    """Let a trainer that generates its batches (GRPO, RLOO) get completions as long as they may be, at once.

    After it, the RNG state and what the trainer keeps are those before.

    The model has no memory on the device yet. So neither the completions nor their probabilities and rewards are real.
    """

    def generate(input_ids: Tensor, *_args: Any, generation_config: Any = None, **rest: Any) -> Tensor:
        config: Any = generation_config or model.generation_config
        most: int = (
            rest.get("max_new_tokens") or config.max_new_tokens or max(config.max_length - input_ids.shape[1], 1)
        )
        return torch.cat([input_ids, input_ids[:, -1:].expand(-1, most)], dim=1)

    def probabilities(_model: Any, input_ids: Tensor, _mask: Any, logits_to_keep: int, *_: Any, **_rest: Any) -> Any:
        return input_ids.new_zeros(len(input_ids), logits_to_keep, dtype=torch.float32), None, None

    def rewards(_inputs: Any, prompts: Any, *_args: Any) -> Tensor:
        return torch.rand(len(prompts), len(trainer.reward_funcs), device=trainer.accelerator.device)

    made_up = (
        (model, "generate", generate),
        (trainer, "_get_per_token_logps_and_entropies", probabilities),
        (trainer, "_calculate_rewards", rewards),
    )
    with preserved_rng_state(), as_before([vars(trainer)]), contextlib.ExitStack() as stack:
        for owner, name, function in made_up if hasattr(trainer, "reward_funcs") else ():
            if hasattr(owner, name):
                stack.enter_context(mock.patch.object(owner, name, function))
        yield


def _arguments(batch: Any) -> dict[str, Any]:
    """Return what a model is called with, of a trainer's batch."""
    if not isinstance(batch, Mapping):
        raise TypeError(
            f"the trainer's batches are {type(batch).__name__}, not dictionaries; give it a data_collator that returns "
            "the arguments of the model by name"
        )
    tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
    if not tensors:
        raise CaptureError("the trainer's batches have no tensors; give it a data_collator that makes them")
    tokens = tensors.get("input_ids")  # TRL also gives packed batches the offsets of documents
    return {name: value for name, value in tensors.items() if tokens is None or len(value) == len(tokens)}


def _collated(loader: Any, num_rows: int) -> Any:
    """Return a batch of the longest rows of the data; of a stream, or data with a sampler of its own, the first one."""
    data = loader.dataset
    if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")) or isinstance(data, ConcatDataset):
        batch = next(iter(loader))
    else:
        step = max(len(data) // _MOST_ROWS, 1)
        rows = sorted(range(0, len(data), step), key=lambda row: _length(data[row]), reverse=True)[:num_rows]
        try:
            batch = loader.collate_fn([data[row] for row in rows])
        except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"the longest rows of the training data cannot be collated ({type(error).__name__}: {error}); give "
                "dictionaries as rows, and a data_collator that pads them to one length"
            ) from error
    return batch


def _length(row: Any) -> int:
    if not isinstance(row, Mapping):
        return 0
    texts = [value for value in row.values() if isinstance(value, str)]
    of = [row["input_ids"]] if "input_ids" in row else texts
    return sum(len(tokens) for tokens in of if isinstance(tokens, Sequence | Tensor | np.ndarray))


class _Measurements(TrainerCallback):
    """Puts measured and predicted seconds per iteration into the trainer's log."""

    def __init__(self, optimizer: OffloadedOptimizer) -> None:
        self._optimizer = optimizer
        self._begin_s = 0.0
        self._spent_s: list[float] = []

    def on_step_begin(self, *_args: Any, **_kwargs: Any) -> None:
        """Record the start of an iteration."""
        self._begin_s = time.perf_counter()

    def on_step_end(self, *_args: Any, **_kwargs: Any) -> None:
        """Record the time of an iteration with the planned shape. Running updates count in the next iteration."""
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
        logs |= found  # for later callbacks; the history already has its copy
        state.log_history[-1] |= found

    def on_train_end(self, *_args: Any, **_kwargs: Any) -> None:
        """Wait for the last updates, so that their errors are raised here."""
        self._optimizer.session.synchronize()
