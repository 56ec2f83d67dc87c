"""The model, the data and the loop, equal for all engines."""

import itertools
import time
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.peers.jobs import BETAS, EPS, WEIGHT_DECAY, Cell, Job, lr_factor, model_config
from planner.models import to_hf_config_dict
from ullage.training.text import read_text, sequences, windows

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
SEED = 0


class Trainer(Protocol):
    """A model under an engine."""

    def backward(self, tokens: Tensor) -> Tensor:
        """Run forward and backward of one micro-batch, int64[micro_batch, seq_len]; return its loss, detached."""
        ...

    def step(self) -> None:
        """Clip, update and move the learning rate on; may return while updates run."""
        ...

    def synchronize(self) -> None:
        """Wait until all updates have ended."""
        ...

    def close(self) -> dict[str, Any]:
        """End the engine and return what only it has to tell."""
        ...


def make_model(cell: Cell, device: str, dtype: torch.dtype | None = None, home: str | None = None) -> Any:
    """Make the model with the random weights that every engine starts from.

    Values are those of the computing type, so that a master copy in another type starts from the same numbers.

    Args:
        cell: whose model.
        device: where random numbers come from, the same for all engines: not all devices draw the same ones.
        dtype: of the model that is returned, in place of the computing type.
        home: where it is moved before its type is changed, so that the device holds the computing type alone.
    """
    torch.manual_seed(SEED)
    config = AutoConfig.for_model(**to_hf_config_dict(model_config(cell.model)))
    with torch.device(device):
        made: Any = AutoModelForCausalLM.from_config(config, dtype=DTYPES[cell.dtype])  # type: ignore[no-untyped-call]
    return made.to(home).to(dtype).train()


def recompute_layers(model: Any) -> None:
    """Let every layer keep its input alone for backward."""
    options = {"use_reentrant": False}
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable(options)


def layers_of(model: nn.Module) -> nn.ModuleList:
    """Return the model's repeated blocks: its largest list of modules."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=lambda blocks: sum(p.numel() for p in blocks.parameters()))


def adamw_options(job: Job) -> dict[str, Any]:
    """Return what every AdamW is made with."""
    return {"lr": job.lr, "betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY}


def schedule_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    """Return the learning rate's schedule."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lr_factor)


def loss_of(model: Any, tokens: Tensor) -> Tensor:
    """Return the mean loss of predicting every next token."""
    loss: Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    return loss


def micro_batches(job: Job) -> Iterator[list[Tensor]]:
    """Yield the micro-batches of one iteration after another: English text, one token per byte."""
    text, size = windows(read_text(None), job.cell.seq_len), job.cell.micro_batch
    positions = itertools.count(step=size)
    for _ in range(job.num_iterations):
        batch = [sequences(text, next(positions), size, seed=SEED) for _ in range(job.cell.num_micro_batches)]
        yield [tokens.to(job.device) for tokens in batch]


def train(job: Job, trainer: Trainer) -> tuple[list[float], list[float], float]:
    """Run the loop; return losses and wall seconds of all iterations, and the seconds of all timed ones together.

    The loss is read in every iteration, as training that logs does. An iteration lasts from the start of its first
    forward to that of the next iteration's, so that updates which run beside a forward count where they delay it. The
    last iteration ends when its updates have: deferring work beyond what is timed gains nothing in the total.
    """
    batches = list(micro_batches(job))
    losses, starts_s = [], []
    trainer.synchronize()
    for batch in batches:
        starts_s.append(time.perf_counter())
        seen = [trainer.backward(tokens) for tokens in batch]
        if job.step_threads != job.num_threads and job.engine != "ours":  # ours has threads of its own for updates
            torch.set_num_threads(job.step_threads)
        trainer.step()
        torch.set_num_threads(job.num_threads)
        losses.append(float(torch.stack(seen).float().mean()))
    trainer.synchronize()
    starts_s.append(time.perf_counter())
    iteration_s = [end - begin for begin, end in itertools.pairwise(starts_s)]
    return losses, iteration_s, sum(iteration_s[job.num_warm_up :])
