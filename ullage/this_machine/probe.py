"""Run a tiny model through the whole executor to measure host time for calibration."""

import time

import torch

from executor.options import Options
from executor.prepare import prepare_session
from planner.decisions import BF16
from planner.graph import Batch, build_graph, units
from planner.models import resolve_model, to_hf_config_dict
from planner.models.kernels import num_kernels
from planner.placements import mixed
from planner.setup import Mix, Setup

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
    """Time a model so small that computing takes no time; see :data:`hwprofiles.calibrate.options.MeasureHost`.

    With a GPU everything stays there, so that no kernel waits for a copy or for an update on the host: the simulator
    counts such waits itself. For the same reason a step begins when the GPU has ended the backward, and ends before the
    loss is read.
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
