"""How long steps take that leave the plan, beside FSDP2 with offloading.

    python benchmarks/cpu/on_demand.py

A small Llama trains in ordinary memory that stands in for a device, in fp32 with AdamW and clipping, on one rank over
gloo. Each step has two forwards and one backward of the sum of their losses. The variants take turns of several steps:

- memory: plain PyTorch;
- fsdp2: ``fully_shard`` on every layer and on the model, with ``CPUOffloadPolicy``;
- on_demand: a plan for one forward and little memory, which every step leaves;
- planned: a plan for the step itself (``step=``), with more memory: gradients that two calls share stay on the device.

Of each, the median is taken. The weights after all steps are compared with those of plain PyTorch.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

import ullage
from benchmarks.origin import origin, write_result

SIZES: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
}
BATCH, LENGTH, VOCABULARY = 2, 256, 4096
MEMORY = {"on_demand": "150MB", "planned": "350MB"}  # of the latter, gradients that two calls share stay
_ROUNDS, _WARM_UP, _COUNTED = 5, 1, 2


def _loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the sum of the losses of two forwards."""
    first, second = (model(input_ids=given, labels=given).loss for given in (tokens, tokens.flip(0)))
    total: Tensor = first + second
    return total


def _model() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=VOCABULARY, use_cache=False, **SIZES)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    return model.train()


def _made(name: str, tokens: Tensor) -> tuple[nn.Module, torch.optim.Optimizer]:
    model: Any = _model()
    if name == "fsdp2":
        mesh, policy = init_device_mesh("cpu", (1,)), CPUOffloadPolicy(pin_memory=False)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, offload_policy=policy)
        fully_shard(model, mesh=mesh, offload_policy=policy)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, eps=1e-4)
    if name == "on_demand":
        return ullage.prepare(model, optimizer, {"input_ids": tokens, "labels": tokens}, device_memory=MEMORY[name])
    if name == "planned":
        return ullage.prepare(model, optimizer, tokens, step=_loss, device_memory=MEMORY[name])
    return model, optimizer


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor) -> None:
    _loss(model, tokens).backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def measured(tokens: Tensor) -> dict[str, dict[str, Any]]:
    """Train all variants in turns, and compare."""
    made = {name: _made(name, tokens) for name in ("memory", "fsdp2", "on_demand", "planned")}
    seconds: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(_ROUNDS):
        for name, (model, optimizer) in made.items():
            for number in range(_WARM_UP + _COUNTED):
                begin_s = time.perf_counter()
                _step(model, optimizer, tokens)
                if hasattr(optimizer, "session"):
                    optimizer.session.synchronize()
                if number >= _WARM_UP:
                    seconds[name].append(time.perf_counter() - begin_s)
    whole: dict[str, Callable[[Tensor], Tensor]] = {"fsdp2": lambda weight: weight.full_tensor()}  # type: ignore[attr-defined]
    expected = made["memory"][0].state_dict()
    found: dict[str, dict[str, Any]] = {}
    for name, (model, optimizer) in made.items():
        weights = {key: whole.get(name, lambda weight: weight)(weight) for key, weight in model.state_dict().items()}  # type: ignore[no-untyped-call]
        off = max(float((weights[key] - weight).abs().max()) for key, weight in expected.items())
        left = optimizer.session.num_left if hasattr(optimizer, "session") else None
        found[name] = {"step_s": statistics.median(seconds[name]), "most_off": off, "num_left": left}
    for row in found.values():
        row["over_fsdp2"] = row["step_s"] / found["fsdp2"]["step_s"]
    for _, optimizer in made.values():
        if hasattr(optimizer, "session"):
            optimizer.session.close()
    return found


def main() -> None:
    """Measure, print and write the result."""
    about = origin("torch", "transformers")
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=0, world_size=1)
        try:
            tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
            results = measured(tokens)
        finally:
            dist.destroy_process_group()
    for name, row in results.items():
        print(f"{name}: {row['step_s']:.3f} s, {row['over_fsdp2']:.2f} of fsdp2, off by {row['most_off']:.1e}")
    path = Path(__file__).parents[1] / "results" / "cpu_on_demand.json"
    write_result(path, about | {"device_memory": MEMORY, "num_steps": _ROUNDS * _COUNTED, "results": results})


if __name__ == "__main__":
    main()
