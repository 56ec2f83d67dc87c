"""Engines that train a job: ours, plain PyTorch, and the peers. One code for CPU and GPU.

Each is a class made from a :class:`~benchmarks.peers.jobs.Job`, whose docstring names its settings. What is not
installed or does not run here raises on the way, which becomes the row's text.
"""

import os
from collections.abc import Callable
from importlib import import_module
from typing import Any, final

import torch
from torch import Tensor, nn

from benchmarks.peers.jobs import Job
from benchmarks.peers.training import (
    DTYPES,
    Trainer,
    adamw_options,
    layers_of,
    loss_of,
    make_model,
    recompute_layers,
    schedule_of,
)
from executor.optimizer.reference import AdamWBf16

# Engine, and the package that has to be there for it.
PACKAGES = {"zero2": "deepspeed", "zero3": "deepspeed", "zenflow": "deepspeed", "torchao": "torchao"}


@final
class InMemory:
    """Plain PyTorch, everything on the device: what offloading is compared with.

    Settings: ``fused`` (of AdamW; without it the loop over parameters, as the reference), ``recompute``, ``rounding``
    (of weights that are their own master copies; ``stochastic``: as ours, by a loop over parameters too).
    """

    def __init__(self, job: Job) -> None:
        self._cell = job.cell
        self._device = job.device
        self._model = make_model(job.cell, job.device)
        if job.setting("recompute", default=False):
            recompute_layers(self._model)
        self._weights = list(self._model.parameters())
        whole = job.cell.weights_are_masters
        self._masters = self._weights if whole else [nn.Parameter(w.detach().float()) for w in self._weights]
        self._gradients = [] if whole else [torch.empty_like(master) for master in self._masters]
        fused = bool(job.setting("fused", default=True))
        self._optimizer: torch.optim.Optimizer
        if job.setting("rounding", default="nearest") == "stochastic":
            self._optimizer = AdamWBf16(self._masters, **adamw_options(job), bf16_stochastic_round=True)
        else:
            self._optimizer = torch.optim.AdamW(self._masters, **adamw_options(job), fused=fused, foreach=False)
        self._scheduler = schedule_of(self._optimizer)

    def backward(self, tokens: Tensor) -> Tensor:
        """See :class:`Trainer`."""
        loss = loss_of(self._model, tokens)
        (loss / self._cell.num_micro_batches).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    @torch.no_grad()
    def step(self) -> None:
        """See :class:`Trainer`."""
        if self._gradients:
            torch._foreach_copy_(self._gradients, [w.grad for w in self._weights])
            for master, weight, gradient in zip(self._masters, self._weights, self._gradients, strict=True):
                master.grad, weight.grad = gradient, None
        if self._cell.max_norm:
            nn.utils.clip_grad_norm_(self._masters, self._cell.max_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        if self._gradients:
            torch._foreach_copy_(self._weights, self._masters)
        self._scheduler.step()

    def synchronize(self) -> None:
        """See :class:`Trainer`."""
        wait_for(self._device)

    def close(self) -> dict[str, Any]:
        """See :class:`Trainer`."""
        return {}


@final
class Fsdp2:
    """``fully_shard`` with ``CPUOffloadPolicy`` on one rank: parameters, gradients and states on the host, in one type.

    Settings: ``reshard`` (after forward), ``fused`` (of AdamW, else foreach), ``recompute``.
    """

    def __init__(self, job: Job) -> None:
        import torch.distributed as dist  # noqa: PLC0415 - not in every build of torch
        from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard  # noqa: PLC0415

        self._cell, self._device = job.cell, job.device
        on_gpu = job.device == "cuda"
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
        self._model: Any = make_model(job.cell, job.device, DTYPES[job.cell.state], home="cpu")
        if job.setting("recompute", default=False):
            recompute_layers(self._model)
        dtype = None if job.cell.weights_are_masters else torch.bfloat16
        options: dict[str, Any] = {
            "mesh": init_device_mesh(job.device, (1,)),
            "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None),
            "offload_policy": CPUOffloadPolicy(pin_memory=on_gpu),
            "reshard_after_forward": bool(job.setting("reshard", default=True)),
        }
        for layer in layers_of(self._model):
            fully_shard(layer, **options)
        fully_shard(self._model, **options)
        for module in self._model.modules():  # buffers belong to no group, and stay where they were made
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(job.device))
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), **adamw_options(job), fused=bool(job.setting("fused", default=True))
        )
        self._scheduler = schedule_of(self._optimizer)
        self._micro_batch = 0

    def backward(self, tokens: Tensor) -> Tensor:
        """See :class:`Trainer`."""
        count = self._cell.num_micro_batches
        if count > 1:
            self._model.set_requires_gradient_sync(self._micro_batch % count == count - 1)
        self._micro_batch += 1
        loss = loss_of(self._model, tokens)
        (loss / count).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def step(self) -> None:
        """See :class:`Trainer`."""
        if self._cell.max_norm:
            nn.utils.clip_grad_norm_(self._model.parameters(), self._cell.max_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._scheduler.step()

    def synchronize(self) -> None:
        """See :class:`Trainer`."""
        wait_for(self._device)

    def close(self) -> dict[str, Any]:
        """See :class:`Trainer`."""
        import torch.distributed as dist  # noqa: PLC0415 - not in every build of torch

        dist.destroy_process_group()
        return {}


@final
class TorchAo:
    """torchao's ``CPUOffloadOptimizer``: weights and gradients on the GPU, AdamW per parameter on the host.

    It updates host copies in the weights' own type, so states are fp32 only if weights are: then computing in bf16 is
    autocast's. Settings: ``offload_gradients``, ``recompute``.
    """

    def __init__(self, job: Job) -> None:
        from torchao.optim import CPUOffloadOptimizer  # noqa: PLC0415 - optional

        offload_gradients = bool(job.setting("offload_gradients", default=False))
        if offload_gradients and job.cell.num_micro_batches > 1:
            raise NotImplementedError("offload_gradients is not compatible with accumulation")
        self._cell, self._device = job.cell, job.device
        self._model: Any = make_model(job.cell, job.device, DTYPES[job.cell.state])
        if job.setting("recompute", default=False):
            recompute_layers(self._model)
        self._optimizer = CPUOffloadOptimizer(
            self._model.parameters(), torch.optim.AdamW, offload_gradients=offload_gradients, **adamw_options(job)
        )
        if job.cell.max_norm:
            raise NotImplementedError("gradients have left for the host before their common norm is known: no clipping")
        self._scheduler = schedule_of(self._optimizer)

    def backward(self, tokens: Tensor) -> Tensor:
        """See :class:`Trainer`."""
        with torch.autocast(self._device, torch.bfloat16, enabled=not self._cell.weights_are_masters):
            loss = loss_of(self._model, tokens)
        (loss / self._cell.num_micro_batches).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def step(self) -> None:
        """See :class:`Trainer`."""
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._scheduler.step()

    def synchronize(self) -> None:
        """See :class:`Trainer`."""
        wait_for(self._device)

    def close(self) -> dict[str, Any]:
        """See :class:`Trainer`."""
        return {}


def wait_for(device: str) -> None:
    """Wait for all streams of a GPU."""
    if device == "cuda":
        torch.cuda.synchronize()


def _later(module: str, name: str) -> Callable[[Job], Trainer]:
    def make(job: Job) -> Trainer:
        trainer: Trainer = getattr(import_module(f"benchmarks.peers.{module}"), name)(job)
        return trainer

    return make


ENGINES: dict[str, Callable[[Job], Trainer]] = {
    "ours": _later("ours", "Ours"),
    "zero2": _later("zero", "Zero"),
    "zero3": _later("zero", "Zero"),
    "zenflow": _later("zero", "Zero"),
    "fsdp2": Fsdp2,
    "torchao": TorchAo,
    "in_memory": InMemory,
}


def one_rank_environment(port: int) -> None:
    """Say that this process is the only rank, as a launcher would."""
    single = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update(single)
