"""A plan inside ``transformers.Trainer``: checks of its arguments, and measurements beside predictions in its log.

A model and an optimizer from :func:`ullage.prepare` go into ``Trainer`` as any others do; it calls forward, backward,
``clip_grad_norm_`` and ``step()``, which is all that a plan needs. What the callback adds is to check, before training,
that both mean the same, and to put the plan's figures into the logs.
"""

import time
from typing import Any, Final, final

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from executor.prepare import OffloadedOptimizer
from planner.plan.document import Plan, PlanError

# Newer versions have another name for it, and the older one as an alias.
_CHECKPOINTING: Final = (
    "activation_checkpointing" if hasattr(TrainingArguments, "activation_checkpointing") else "gradient_checkpointing"
)


@final
class UllageCallback(TrainerCallback):
    """For ``Trainer(model=model, optimizers=(optimizer, scheduler), callbacks=[UllageCallback(optimizer, plan)])``.

    The log of every step then has ``ullage_iteration_s`` (measured, the mean since the last log) and
    ``ullage_predicted_s``; not that of a step on fewer micro-batches, or on other shapes, than planned. The session
    stays open when training ends, for ``trainer.save_model()`` and ``trainer.evaluate()``;
    ``optimizer.session.close()`` gives the model back as an ordinary one.

    Args:
        optimizer: what :func:`ullage.prepare` returned.
        plan: the plan.
    """

    def __init__(self, optimizer: OffloadedOptimizer, plan: Plan) -> None:
        self._optimizer = optimizer
        self._plan = plan
        self._begin_s = 0.0
        self._spent_s: list[float] = []

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Check that the trainer's arguments agree with the plan.

        Raises:
            PlanError: they do not; the message names the argument and its planned value.
        """
        decided = self._plan.decisions
        clips = args.max_grad_norm is not None and args.max_grad_norm > 0
        wanted = {
            "gradient_accumulation_steps": (args.gradient_accumulation_steps, decided.num_micro_batches),
            "per_device_train_batch_size": (args.per_device_train_batch_size, decided.micro_batch),
            "max_grad_norm": (args.max_grad_norm, args.max_grad_norm if clips == decided.clip else float(decided.clip)),
            "bf16": (args.bf16, False),
            "fp16": (args.fp16, False),
            "torch_compile": (args.torch_compile, False),
            "load_best_model_at_end": (args.load_best_model_at_end, False),
            "auto_find_batch_size": (args.auto_find_batch_size, False),
            "bf16_full_eval": (args.bf16_full_eval, False),
            "fp16_full_eval": (args.fp16_full_eval, False),
            _CHECKPOINTING: (getattr(args, _CHECKPOINTING), False),
        }
        for name, (given, planned) in wanted.items():
            if given != planned:
                raise PlanError(
                    f"TrainingArguments has {name}={given!r}, but under the plan it is {planned!r}; change it, or plan "
                    "again (types, compiling, recomputation and weights are the plan's, and the prepared model's)"
                )

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
            "ullage_predicted_s": self._plan.prediction.iteration_s,
        }
        self._spent_s.clear()
        logs |= found  # for callbacks that come later; the history has had its copy
        state.log_history[-1] |= found

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Wait for the last updates, so that their errors are raised here."""
        self._optimizer.session.synchronize()
