"""DeepSpeed: ZeRO-2 and ZeRO-3 with the optimizer on the host, Twin-Flow, Super-Offload and ZenFlow."""

import os
import shutil
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from benchmarks.peers.jobs import BETAS, EPS, WEIGHT_DECAY, Job
from benchmarks.peers.training import loss_of, make_model, recompute_layers, schedule_of

_NEVER = 2**31 - 1
_BF16_STATE = ("bf16_master_weights_and_grads", "bf16_optimizer_states")
# Parameters of no plan are gathered on one rank, so all of them may as well stay; see DeepSpeed's configuration.
_PERSISTENT = 10**15


def configuration(job: Job) -> dict[str, Any]:
    """Return DeepSpeed's configuration for a job.

    Settings: ``ratio`` (share of the optimizer on the host: below 1 it is Twin-Flow), ``sub_group_size``,
    ``overlap_comm``, ``pin_memory``, ``offload_param``, ``super_offload``, ``bucket_size``, ``zenflow`` (its section).
    """
    cell = job.cell
    offload: dict[str, Any] = {
        "device": "cpu",
        "pin_memory": bool(job.setting("pin_memory", job.device == "cuda")),
    }
    zero: dict[str, Any] = {
        "stage": 2 if job.engine != "zero3" else 3,
        "offload_optimizer": offload,
        "overlap_comm": bool(job.setting("overlap_comm", default=True)),
        "contiguous_gradients": True,
    }
    if "bucket_size" in job.settings:
        zero |= dict.fromkeys(("reduce_bucket_size", "allgather_bucket_size"), int(job.settings["bucket_size"]))
    if zero["stage"] == 3:
        offload["ratio"] = float(job.setting("ratio", 1.0))
        zero["sub_group_size"] = int(job.setting("sub_group_size", 10**8))
        if job.setting("super_offload", default=False):
            offload |= {"super_offload": True, "cpuadam_cores_perc": 0.9}
        if job.setting("offload_param", default=False):
            zero["offload_param"] = {"device": "cpu", "pin_memory": offload["pin_memory"]}
        else:  # as weights stay on the device, gathering and releasing them again would be for nothing
            zero |= {"stage3_param_persistence_threshold": _PERSISTENT, "stage3_model_persistence_threshold": _NEVER}
    if job.engine == "zenflow":
        zero["zenflow"] = job.setting("zenflow", {})
    optimizer = {"lr": job.lr, "betas": list(BETAS), "eps": EPS, "weight_decay": WEIGHT_DECAY}
    return {
        "train_micro_batch_size_per_gpu": cell.micro_batch,
        "gradient_accumulation_steps": cell.num_micro_batches,
        "gradient_clipping": cell.max_norm,
        "bf16": {"enabled": True, **dict.fromkeys(_BF16_STATE, cell.state == "bf16")} if cell.dtype == "bf16" else {},
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": optimizer},
        "wall_clock_breakdown": False,
        "steps_per_print": _NEVER,
    }


@final
class Zero:
    """A model under a DeepSpeed engine; settings are those of :func:`configuration`, and ``recompute``.

    What the engine does not do by itself and is done for it here: hand the learning rate to the device's optimizer of
    Twin-Flow, which it makes with the first rate and never tells of another.
    """

    def __init__(self, job: Job) -> None:
        find_toolkit(job.device)
        import deepspeed  # noqa: PLC0415 - optional

        self._cell, self._device = job.cell, job.device
        model: Any = make_model(job.cell, job.device)
        if job.setting("recompute", default=False):
            recompute_layers(model)
        self._engine, optimizer, _, _ = deepspeed.initialize(
            model=model,
            model_parameters=list(model.parameters()),
            config=configuration(job),
            lr_scheduler=schedule_of,
        )
        self._optimizer: Any = optimizer.optimizer
        self._num_backwards = 0
        self._device_optimizer: Any = getattr(optimizer, "backup_optimizer", None)

    def backward(self, tokens: Tensor) -> Tensor:
        """See :class:`Trainer`."""
        loss = loss_of(self._engine, tokens)
        self._engine.backward(loss)  # divides by the number of micro-batches
        self._num_backwards += 1
        if self._num_backwards % self._cell.num_micro_batches:
            self._engine.step()  # counts micro-batches
        return loss.detach()

    def step(self) -> None:
        """See :class:`Trainer`."""
        self._engine.step()
        if self._device_optimizer is not None:
            self._device_optimizer.param_groups[0]["lr"] = self._optimizer.param_groups[0]["lr"]

    def synchronize(self) -> None:
        """See :class:`Trainer`."""
        if self._device == "cuda":
            torch.cuda.synchronize()

    def close(self) -> dict[str, Any]:
        """See :class:`Trainer`."""
        self._engine.destroy()
        return {"optimizer": type(self._optimizer).__name__}


def find_toolkit(device: str) -> None:
    """Say which accelerator there is, before DeepSpeed is imported, and what its extensions are built with."""
    os.environ["DS_ACCELERATOR"] = device
    os.environ.setdefault("DS_SKIP_CUDA_CHECK", "1")  # minor versions of nvcc and of torch's CUDA need not be equal
    compiler = shutil.which("nvcc")
    toolkit = Path(compiler).resolve().parents[1] if compiler else Path("/usr/local/cuda")
    if device == "cuda" and toolkit.is_dir():
        os.environ.setdefault("CUDA_HOME", str(toolkit))
