"""Train a ``LightningModule`` in the memory that is free: importing this registers ``Trainer(strategy="ullage")``."""

import atexit
import contextlib
import inspect
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Unpack

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BaseFinetuning, GradientAccumulationScheduler
from lightning.pytorch.strategies import DDPStrategy, Strategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from executor.callbacks import replace_attribute
from executor.distributed.meeting import world_size
from executor.prepare import OffloadedOptimizer
from executor.training_state.rng_state import preserved_rng_state
from planner.plan.document import Plan, PlanError
from ullage.this_machine.checks import check_options
from ullage.this_machine.planning import Options
from ullage.training.preparing import prepare


class LightningStrategy(DDPStrategy):
    """A strategy that trains under a plan for the memory that is free, with one process for each device.

    Write ``Trainer(strategy="ullage")``, or give one with options. When ``fit`` begins, it captures ``training_step``
    with the first batch of the training data, and prepares the module with the optimizer of ``configure_optimizers``,
    as in :func:`ullage.prepare`. Accumulation and clipping are those of the trainer. Updates wait for the step if it
    clips, if the module or a callback has a hook between backward and the step, which may read gradients, or if a
    callback changes the accumulation between epochs. The plan has memory to train what a ``BaseFinetuning`` has frozen,
    which it thaws later. If ``configure_optimizers`` has called :func:`ullage.prepare`
    itself, as for the two models of a GAN, its plans stay.
    When ``fit`` ends, the module is an ordinary one again. Evaluation outside of ``fit`` is Lightning's.

    Lightning starts the processes, gives each its share of the data, and reduces what is logged, as its ``ddp`` does.
    The plan reduces gradients, and shards what is worth it.

    Args:
        options: see :class:`Options`.

    Attributes:
        plan: the plan, once ``fit`` has begun.

    Raises:
        TypeError: an option does not exist.
        ValueError: an option has a wrong value.
    """

    strategy_name = "ullage"

    def __init__(self, **options: Unpack[Options]) -> None:
        check_options("LightningStrategy", options, Options.__annotations__)
        super().__init__()
        self._options = options
        self._offloaded: OffloadedOptimizer | None = None
        self.optimizers: list[torch.optim.Optimizer] = []
        self._trained: list[nn.Parameter] = []  # before callbacks freeze parameters

    @property
    def plan(self) -> Plan | None:
        """The plan, once ``fit`` has begun."""
        return None if self._offloaded is None else self._offloaded.plan

    def connect(self, model: nn.Module) -> None:
        """See Lightning; note what the module trains before callbacks freeze some of it."""
        super().connect(model)
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def _configure_launcher(self) -> None:
        if self._is_shared:
            super()._configure_launcher()

    def setup_distributed(self) -> None:
        """Connect to the other processes, if there are any."""
        if self._is_shared:
            super().setup_distributed()
            atexit.register(_leave)
            for name, value in (("LOCAL_RANK", self.local_rank), ("LOCAL_WORLD_SIZE", self.num_processes)):
                os.environ.setdefault(name, str(value))

    @property
    def _is_shared(self) -> bool:
        return bool(self.num_nodes * self.num_processes > 1)

    def setup(self, trainer: "pl.Trainer") -> None:
        """Prepare the module and its optimizer, if the trainer fits.

        Raises:
            PlanError: a plan cannot do what the trainer or the module says.
            ValueError: see :func:`ullage.prepare`.
        """
        if not self._is_shared:  # one process reads data in the order of its own samplers
            trainer._accelerator_connector.use_distributed_sampler = False
        if trainer.state.fn != TrainerFn.FITTING:
            # One process has no group in which DDPStrategy could send the module's states to the others.
            kind = DDPStrategy if self._is_shared else Strategy
            kind.setup(self, trainer)
            return
        module = self.lightning_module
        assert module is not None
        assert self.accelerator is not None
        if (size := world_size()) != self.num_nodes * self.num_processes:
            raise PlanError(
                f"{size} processes were started, but the trainer has {self.num_nodes} node(s) of {self.num_processes} "
                "device(s); give it as many as there are processes (num_nodes=, devices=)"
            )
        if (
            type(self.precision_plugin).__name__ in {"MixedPrecision", "HalfPrecision"}
            and self.precision_plugin.precision != "bf16-true"
        ):
            raise PlanError(
                f"the trainer has precision={self.precision_plugin.precision!r}, which plans do not support; give "
                "'bf16-true': the plan then keeps float32 master copies beside bf16 weights"
            )
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(module)
        self.setup_optimizers(trainer)
        if all(isinstance(optimizer, OffloadedOptimizer) for optimizer in self.optimizers):
            return
        if not module.automatic_optimization or len(self.optimizers) != 1:
            raise PlanError(
                f"{type(module).__name__} has {len(self.optimizers)} optimizers"
                f"{'' if module.automatic_optimization else ' and steps them itself'}, but this strategy plans one "
                "step of one optimizer; let configure_optimizers return optimizers that ullage.prepare has returned "
                "for each model and an example batch"
            )
        batch = self.batch_to_device(_first_batch(trainer))
        options: Any = {
            "num_micro_batches": trainer.accumulate_grad_batches,
            "clip": bool(trainer.gradient_clip_val) or _must_wait(module, trainer),
            **self._options,
        }
        thaws = any(isinstance(callback, BaseFinetuning) for callback in trainer.callbacks)
        with _step_as_forward(module, batch) as tensors, _thawed(self._trained if thaws else []):
            _, self._offloaded = prepare(module.train(), self.optimizers[0], tensors, **options)
        self.optimizers = [self._offloaded]

    def _setup_model(self, model: nn.Module) -> nn.Module:
        """Leave the module as it is: there is no DistributedDataParallel."""
        return model

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's ``training_step`` as its forward, which the plan follows."""
        if self._offloaded not in self.optimizers:
            return super().training_step(*args, **kwargs)
        module = self.lightning_module
        tensors, forward = _as_forward(module, *args, **kwargs)
        undo = replace_attribute(module, "forward", forward)
        try:
            return module(*tensors)
        finally:
            undo()

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Load the state to where the plan keeps it."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            optimizer.load_state_dict(state)

    def teardown(self) -> None:
        """Give the module back as an ordinary one."""
        for optimizer in self.optimizers:
            if isinstance(optimizer, OffloadedOptimizer):
                optimizer.session.close()
        self.optimizers = []
        super().teardown()


def _must_wait(module: pl.LightningModule, trainer: pl.Trainer) -> bool:
    """Return whether updates must wait for the step: gradients may be read, or the number of micro-batches changes."""
    schedulers = [each for each in trainer.callbacks if isinstance(each, GradientAccumulationScheduler)]
    if any(len({*each.scheduling.values()}) > 1 for each in schedulers):
        return True
    hooks = ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping")
    found = any(is_overridden(name, module) for name in hooks)
    return found or any(is_overridden(name, each, pl.Callback) for name in hooks[:2] for each in trainer.callbacks)


def _as_forward(
    module: pl.LightningModule, batch: Any, *args: Any, **kwargs: Any
) -> tuple[tuple[Tensor, ...], Callable[..., Any]]:
    """Return the tensors of a batch, and a forward of the module that is its ``training_step`` with them."""
    leaves, spec = tree_flatten(batch)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    own_forward = module.forward

    def forward(*tensors: Tensor) -> Any:
        given = dict(zip(places, tensors, strict=True))
        with contextlib.ExitStack() as stack:  # training_step may call the module itself
            stack.callback(replace_attribute(module, "forward", own_forward))
            values = [given.get(place, leaf) for place, leaf in enumerate(leaves)]
            return module.training_step(tree_unflatten(values, spec), *args, **kwargs)

    return tuple(leaves[place] for place in places), forward


@contextlib.contextmanager
def _step_as_forward(module: pl.LightningModule, batch: Any) -> Iterator[tuple[Tensor, ...]]:
    """Return a context in which the module's forward is a training step that logs nothing; it yields the inputs."""
    args = (0,) * (len(inspect.signature(module.training_step).parameters) > 1)
    tensors, forward = _as_forward(module, batch, *args)
    made_up = ("forward", forward), ("log", _no_log), ("log_dict", _no_log), ("all_gather", _of_all_ranks)
    with contextlib.ExitStack() as stack:
        for name, value in made_up:
            stack.callback(replace_attribute(module, name, value))
        yield tensors


@contextlib.contextmanager
def _thawed(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Return a context in which parameters require gradients, though the optimizer may get them later."""
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    with warnings.catch_warnings():
        if frozen:
            warnings.filterwarnings("ignore", "the optimizer lacks")
        for parameter in frozen:
            parameter.requires_grad_(True)
        try:
            yield
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)


def _leave() -> None:
    """Destroy the process group: threads of gloo's that outlive the interpreter may abort the process."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _no_log(*_args: object, **_kwargs: object) -> None:
    """Log nothing: a capture computes no values."""


def _of_all_ranks(data: Any, *_args: object, **_kwargs: object) -> Any:
    """Return what ``all_gather`` would if all ranks had the same: one of them captures alone."""
    size = world_size()
    tensors = tree_map(torch.as_tensor, data)
    return tree_map(lambda leaf: leaf.expand(size, *leaf.shape), tensors) if size > 1 else tensors


def _first_batch(trainer: "pl.Trainer") -> Any:
    """Return the first batch of the training data. The RNG state does not change."""
    trainer.fit_loop.setup_data()  # once; what it draws is drawn without a plan too
    with preserved_rng_state():
        loaders, spec = tree_flatten(trainer.train_dataloader)
        return tree_unflatten([next(iter(loader)) for loader in loaders], spec)


if LightningStrategy.strategy_name not in StrategyRegistry:
    StrategyRegistry.register(LightningStrategy.strategy_name, LightningStrategy)
