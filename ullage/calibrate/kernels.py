"""The executor's kernels for calibration, and a tiny model that runs through all of it, to measure the host's time."""

import functools
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, get_args

import numpy as np
import torch

from executor.devices.backend import as_array, sum_of_squares
from executor.devices.cuda import fused, update_on_device
from executor.memory.pieces import state_buffers
from executor.optimizer.adamw import AdamWParams, adamw_step
from executor.optimizer.split import SplitMaster
from executor.optimizer.table import ENTRIES, Rule
from executor.optimizer.workers import WorkerTeam
from executor.options import Options
from executor.prepare import prepare_session
from hwprofiles.profile import NarrowUpdate
from planner.decisions import BF16
from planner.graph import Batch, build_graph, units
from planner.models import resolve_model, to_hf_config_dict
from planner.models.kernels import num_kernels
from planner.placements import mixed
from planner.setup import Mix, Setup
from ullage.calibrate.options import Array

__all__ = ["cpu_adamw", "device_adamw", "end_teams", "fuses_updates", "host_times", "narrow_updates", "sum_of_squares"]


def cpu_adamw(state: Sequence[Array], num_threads: int) -> None:
    """Take one AdamW step in place, without the GIL.

    Args:
        state: flat arrays: the master copy and both averages in float32, the gradient, which is read, and the weight,
            which is written, both in bfloat16 as uint16.
        num_threads: threads that share it.
    """
    *buffers, gradient, weight = state
    adamw_step(buffers, gradient, weight, AdamWParams(), step=1, team=_team(num_threads))


@functools.cache
def _team(num_threads: int) -> WorkerTeam:
    """Return a team of threads, which persist between steps, as in training."""
    return WorkerTeam(num_threads)


def end_teams() -> None:
    """End the threads of all steps on the CPU."""
    _team.cache_clear()


def device_adamw(master: Any, exp_avg: Any, exp_avg_sq: Any, gradient: Any, weight: Any) -> None:
    """Take the same step on the current stream of a GPU, over tensors of float32 and bfloat16."""
    entry = next(entry for entry in ENTRIES if entry.torch_class is torch.optim.AdamW)
    rule = Rule(entry, AdamWParams(), scale=0.5)  # as in clipping
    update_on_device((master, exp_avg, exp_avg_sq, weight), [gradient], rule, step=1)


def fuses_updates() -> bool:
    """Return whether all updates of AdamW on a GPU are one kernel."""
    return fused() is not None


def narrow_updates(num_params: int) -> dict[NarrowUpdate, Callable[[], object]]:
    """Return compiled updates with state in fewer bytes.

    Each is a call that takes a step over so many parameters in the calling thread.
    """
    found = {name: _narrow_update(name, num_params) for name in get_args(NarrowUpdate)}
    for update in found.values():
        update()  # compiles it
    return found


def _narrow_update(name: NarrowUpdate, num_params: int) -> Callable[[], object]:
    planned, rounded, _ = name.removesuffix("-split").partition("-rounded")
    entry = next(entry for entry in ENTRIES if entry.planned_as == planned)
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(num_params, generator=generator) for _ in range(2)]
    master, gradient = (as_array(v) for v in (values[0].bfloat16() if rounded else values[0], values[1].bfloat16()))
    buffers = [as_array(torch.zeros(b.length(num_params), dtype=b.dtype)) for b in state_buffers(entry.planned_as)[1:]]
    weight = None if rounded else np.zeros(num_params, np.uint16)
    whole: Any = master
    if name.endswith("-split"):
        whole, weight = SplitMaster.of_zeros(num_params), None
        whole.copy_(values[0])
    steps = itertools.count(1)
    return lambda: entry.host([whole, *buffers], gradient, weight, AdamWParams(seed=0), next(steps))


_TINY = {
    "num_layers": 4,
    "hidden_size": 32,
    "word_embed_proj_dim": 32,
    "ffn_hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 64,
}
_NUM_TOKENS = 8
_WARM_UP = 3
_REPEATS = 12


def host_times(device: str) -> tuple[list[float], list[float]]:
    """Time a model so small that computing takes no time, on ``cpu`` or ``cuda``.

    With a GPU everything stays there, so that no kernel waits for a copy or for an update on the host: the simulator
    counts such waits itself. For the same reason a step begins when the GPU has ended the backward, and ends before the
    loss is read.

    Returns:
        The wall seconds per kernel of forward and backward, without waiting for a GPU, and those per parameter tensor
        from the end of backward to the next forward, one of each per repetition.
    """
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415 - takes seconds

    on_gpu = device == "cuda"
    config = resolve_model("demo-llama").model_copy(update=_TINY)
    model_units = units(build_graph(config, Batch(1, _NUM_TOKENS, BF16.weight_bytes)))
    setup = Setup(model_units)
    num_gpu = sum(setup.movable.values()) if on_gpu else 0
    decisions = mixed(setup, Mix(num_gpu=num_gpu, num_stream=0, num_keep=config.num_layers))
    model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        AutoConfig.for_model(**to_hf_config_dict(config)), dtype=torch.bfloat16
    )
    options = Options(device="cuda" if on_gpu else "cpu", num_threads=1)
    _, optimizer = prepare_session(model, torch.optim.AdamW(model.parameters()), model_units, decisions, options)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    compute_s: list[float] = []
    step_s: list[float] = []
    with optimizer.session:
        tokens = torch.zeros((1, _NUM_TOKENS), dtype=torch.int64, device=next(model.parameters()).device)
        for _ in range(_WARM_UP + _REPEATS):
            begin_s = time.perf_counter()
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            loss.backward()
            compute_s.append(time.perf_counter() - begin_s)
            if on_gpu:
                torch.cuda.synchronize()
            begin_s = time.perf_counter()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            if not on_gpu:
                loss.item()
            step_s.append(time.perf_counter() - begin_s)
            loss.item()
    num_issued = sum(num_kernels(unit.forward) + num_kernels(unit.backward) for unit in model_units)
    num_tensors = sum(len(unit.parameters) for unit in model_units)
    return [each / num_issued for each in compute_s[_WARM_UP:]], [each / num_tensors for each in step_s[_WARM_UP:]]
