"""Is the memory ledger what PyTorch really holds? ``python benchmarks/planning/memory.py [SUBSTRING]``.

Two kinds of runs on this machine's CPU, each in a process of its own:

*in memory*: plain PyTorch, no code of this project around the model. One iteration (forward, backward, AdamW) runs
under PyTorch's own profiler, which reports every allocation and release of the allocator, those inside kernels too;
their running sum has a peak, on top of parameters and optimizer state, which are there before. It is compared with the
ledger of ``gpu-only``.

*executed*: plans that offload, by ``ullage execute``: what is taken once of either tier, and the peak of what comes and
goes on the device, against the plan's ledger.

*adapters*: the same of plans with ``--lora``, over bases that are quantized or not.

*tiles*: the same of plans with the loss in tiles, a long sequence among them.

*layers*: the same of plans with norms and MLPs in tiles.

With a substring only cases whose name has it are measured again.
"""

import argparse
import contextlib
import gc
import io
import itertools
import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.origin import origin, write_result
from hwprofiles.registry import load_profile
from planner.costs.model import CostModel
from planner.decisions import Precision, Sharding
from planner.graph import Batch, build_graph, units
from planner.models import ModelConfig, from_hf_config, resolve_model, to_hf_config_dict
from planner.schedule.tasks import MemoryClass, Tier
from planner.setup import Setup
from planner.simulate.machine import run_until_steady
from planner.simulate.prediction import TierMemory, memory_peaks
from ullage.main import main as ullage
from ullage.rivals.engines.deciding import gpu_only
from ullage.rivals.lowering import lower

OUTPUT = Path(__file__).parents[1] / "results" / "planning_memory.json"
MACHINE = "epyc-turin-2c"
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_SIZES = {"hidden_size": 768, "num_hidden_layers": 8, "num_attention_heads": 12, "max_position_embeddings": 1024}
_GATED = _SIZES | {"intermediate_size": 2048, "num_key_value_heads": 4}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama-85m": _GATED | {"model_type": "llama", "vocab_size": 32000},
    "llama-untied-128k": _GATED | {"model_type": "llama", "vocab_size": 128256, "num_hidden_layers": 4},
    "llama-20m": _GATED | {"model_type": "llama", "vocab_size": 1024, "hidden_size": 512, "num_attention_heads": 8}
    | {"intermediate_size": 1408, "num_hidden_layers": 6},
    "llama-32k": _GATED | {"model_type": "llama", "vocab_size": 32000, "num_hidden_layers": 4},
    "qwen3-70m": _GATED | {"model_type": "qwen3", "vocab_size": 16000, "head_dim": 64},
    "mixtral-150m": _GATED | {"model_type": "mixtral", "vocab_size": 8000, "num_local_experts": 4}
    | {"intermediate_size": 1024, "num_hidden_layers": 6},
    "opt-90m": _SIZES | {"model_type": "opt", "ffn_dim": 3072, "vocab_size": 16000, "dropout": 0.0},
}  # fmt: skip
# model, sequences, tokens of each, type, activations, micro-batches
IN_MEMORY = (
    ("gpt2", 2, 512, "fp32", "keep", 1),
    ("gpt2", 2, 512, "bf16", "recompute", 2),
    ("gpt2-medium", 1, 256, "fp32", "keep", 1),
    ("opt-125m", 2, 512, "bf16", "keep", 1),
    ("opt-125m", 1, 64, "fp32", "keep", 2),
    ("opt-350m", 2, 256, "fp32", "recompute", 1),
    ("opt-90m", 8, 256, "fp32", "keep", 1),
    ("opt-90m", 8, 256, "bf16", "recompute", 1),
    ("llama-85m", 4, 512, "fp32", "keep", 1),
    ("llama-85m", 8, 512, "bf16", "recompute", 2),
    ("llama-untied-128k", 1, 128, "fp32", "keep", 2),
    ("qwen3-70m", 4, 512, "bf16", "keep", 1),
    ("qwen3-70m", 4, 512, "fp32", "recompute", 1),
    ("qwen2.5-0.5b", 1, 256, "bf16", "keep", 1),
    ("mixtral-150m", 2, 512, "bf16", "keep", 1),
    ("mixtral-150m", 2, 512, "fp32", "recompute", 1),
)
# model, sequences, tokens of each, type, micro-batches, device memory
EXECUTED = (
    ("demo-llama", 2, 256, "bf16", 1, "180MB"),
    ("demo-llama", 4, 256, "fp32", 2, "300MB"),
    ("gpt2", 1, 256, "bf16", 1, "900MB"),
    ("opt-125m", 1, 256, "bf16", 2, "900MB"),
    ("qwen3-70m", 2, 256, "fp32", 1, "700MB"),
    ("mixtral-150m", 2, 256, "bf16", 1, "500MB"),
)
# model, sequences, tokens of each, type, quantization, what may be offloaded, device memory
ADAPTERS = (
    ("llama-20m", 2, 256, "fp32", "none", "never", "70MB"),
    ("llama-20m", 2, 256, "fp32", "nf4", "never", "50MB"),
    ("llama-20m", 2, 256, "fp32", "int8", "never", "50MB"),
    ("llama-20m", 2, 256, "fp32", "none", "activations", "90MB"),
    ("llama-20m", 2, 256, "fp32", "nf4", "activations", "70MB"),
    ("llama-20m", 2, 256, "bf16", "nf4", "never", "26MB"),
    ("llama-20m", 2, 256, "fp32", "int8", "activations", "70MB"),
    ("llama-20m", 2, 256, "bf16", "nf4", "activations", "34MB"),
)
# model, sequences, tokens of each, type, what may be offloaded, device memory, tokens of a tile of the loss
TILES = (
    ("llama-32k", 1, 1024, "fp32", "never", "700MB", 128),
    ("llama-32k", 1, 1024, "bf16", "never", "350MB", 128),
    ("llama-32k", 1, 2048, "bf16", "activations", "450MB", 256),
    ("gpt2", 1, 1024, "bf16", "never", "600MB", 256),
    ("llama-20m", 1, 8192, "bf16", "activations", "400MB", 1024),
)
LAYERS = (
    ("llama-20m", 1, 4096, "fp32", "never", "400MB", 512),
    ("llama-20m", 1, 8192, "bf16", "never", "300MB", 512),
    ("llama-20m", 1, 8192, "bf16", "activations", "280MB", 1024),
)


def config_of(name: str) -> ModelConfig:
    """Return a preset, or one of the sizes above."""
    return from_hf_config(CONFIGS[name], name) if name in CONFIGS else resolve_model(name)


def predict(
    config: ModelConfig, batch: tuple[int, int], dtype: Any, activations: str, num_micro_batches: int
) -> TierMemory:
    """Return the ledger of training in memory on one device; ``batch`` is sequences and tokens of each."""
    precision = Precision(weights=dtype)
    model_units = units(build_graph(config, Batch(*batch, precision.weight_bytes)))
    setup = Setup(model_units, Sharding(micro_batch=batch[0], num_micro_batches=num_micro_batches, precision=precision))
    keep_all = {unit.name: "keep" for unit in model_units}
    decisions = next(
        d
        for d in gpu_only(setup)
        if ({n: u.activations for n, u in d.units.items()} == keep_all) == (activations == "keep")
    )
    cost = CostModel.of(load_profile(MACHINE), model_units, decisions)
    simulation = run_until_steady(lower(model_units, decisions, asynchronous=cost.asynchronous), cost)
    return memory_peaks(simulation.timeline, simulation.steady, cost)[Tier.GPU]


class Training:
    """Plain PyTorch: a model, and an AdamW per parameter, over an fp32 master copy where weights are bf16."""

    def __init__(
        self, config: ModelConfig, batch: tuple[int, int], dtype: str, activations: str, num_micro_batches: int
    ) -> None:
        torch.manual_seed(0)
        hf_config = AutoConfig.for_model(**to_hf_config_dict(config))
        model = AutoModelForCausalLM.from_config(hf_config, dtype=DTYPES[dtype])  # type: ignore[no-untyped-call]
        self._model: Any = model.train()
        if activations == "recompute":
            self._model.activation_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
        self._weights = list(self._model.parameters())
        whole = dtype == "fp32"
        self._masters = [w if whole else torch.nn.Parameter(w.detach().float()) for w in self._weights]
        self._optimizers = [torch.optim.AdamW([master], lr=1e-4, fused=True) for master in self._masters]
        self._num_micro_batches = num_micro_batches
        self._tokens = torch.randint(config.vocab_size, batch)

    def iterate(self) -> None:
        """Forward, backward and update."""
        for _ in range(self._num_micro_batches):
            self._model(input_ids=self._tokens, labels=self._tokens, use_cache=False).loss.backward()
        for weight, master, optimizer in zip(self._weights, self._masters, self._optimizers, strict=True):
            if master is not weight:
                master.grad = weight.grad.float()
            optimizer.step()
            if master is not weight:
                weight.data.copy_(master.data)
            weight.grad = master.grad = None

    def static_bytes(self) -> dict[MemoryClass, int]:
        """Return what is there all the time, once there has been an iteration."""
        moments = sum(t.nbytes for o in self._optimizers for state in o.state.values() for t in state.values())
        masters = sum(m.nbytes for m, w in zip(self._masters, self._weights, strict=True) if m is not w)
        parameters = sum(weight.nbytes for weight in self._weights)
        return {MemoryClass.PARAMETERS: parameters, MemoryClass.OPTIMIZER: moments + masters}


def peak_bytes(run: Callable[[], None]) -> int:
    """Return the most bytes that PyTorch's allocator has given out at once in a run, beyond what was there."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    results: Any = profiler.profiler
    changes: list[tuple[int, int]] = [
        (e.start_ns(), e.nbytes()) for e in results.kineto_results.events() if e.name() == "[memory]"
    ]
    return max(itertools.accumulate(num_bytes for _, num_bytes in sorted(changes, key=lambda change: change[0])))


def in_memory(name: str, micro_batch: int, seq_len: int, dtype: str, activations: str, count: int) -> dict[str, Any]:
    """Train in memory and compare. What is told by class is what PyTorch can tell: the rest is one number."""
    config, batch = config_of(name), (micro_batch, seq_len)
    ledger = predict(config, batch, dtype, activations, count)
    training = Training(config, batch, dtype, activations, count)
    training.iterate()
    measured = training.static_bytes()
    dynamic = peak_bytes(training.iterate)
    static_classes = {str(kind): [ledger.by_class.get(kind, 0), num_bytes] for kind, num_bytes in measured.items()}
    predicted_dynamic = ledger.peak_bytes - sum(ledger.by_class.get(kind, 0) for kind in measured)
    total = sum(measured.values()) + dynamic
    return {
        "predicted_bytes": ledger.peak_bytes,
        "measured_bytes": total,
        "error": ledger.peak_bytes / total - 1,
        "predicted_and_measured_bytes": static_classes | {"comes and goes": [predicted_dynamic, dynamic]},
        "error_of_what_comes_and_goes": predicted_dynamic / dynamic - 1,
        "predicted_by_class": {str(kind): num_bytes for kind, num_bytes in ledger.by_class.items()},
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def adapted(
    name: str, micro_batch: int, seq_len: int, dtype: str, quantization: str, storage: str, device_memory: str
) -> dict[str, Any]:
    """Plan adapters for a small device and execute."""
    options = ("--lora", "rank=16", "--quantize", quantization, "--storage", storage)
    return executed(name, micro_batch, seq_len, dtype, 1, device_memory, *options)


def tiled(
    name: str, micro_batch: int, seq_len: int, dtype: str, storage: str, device_memory: str, num_tokens: int
) -> dict[str, Any]:
    """Plan the loss in tiles for a small device and execute."""
    options = ("--storage", storage, "--tiles", "loss=" + str(num_tokens))
    return executed(name, micro_batch, seq_len, dtype, 1, device_memory, *options)


def layers(
    name: str, micro_batch: int, seq_len: int, dtype: str, storage: str, device_memory: str, num_tokens: int
) -> dict[str, Any]:
    """Plan norms and MLPs in tiles for a small device, and the loss too, and execute."""
    options = ("--storage", storage, "--tiles", "layer=" + str(num_tokens), "--tiles", "loss=" + str(num_tokens))
    return executed(name, micro_batch, seq_len, dtype, 1, device_memory, *options)


def executed(
    name: str, micro_batch: int, seq_len: int, dtype: str, count: int, device_memory: str, *options: str
) -> dict[str, Any]:
    """Plan for a small device and execute."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        config, plan = folder / "config.json", folder / "plan.json"
        config.write_text(json.dumps(to_hf_config_dict(config_of(name))))
        sizes = ["--micro-batch", str(micro_batch), "--seq-len", str(seq_len), "--accumulate", str(count)]
        made = _output_of(
            "plan", "--model", str(config), "--hardware", MACHINE, "--memory", "device=" + device_memory,
            "--precision", dtype, *sizes, *options, "--output", str(plan),
        )  # fmt: skip
        run = _output_of("execute", str(plan), "--iterations", "6", "--output-dir", str(folder / "out"))
    placed = [place for unit in made["decisions"]["units"].values() for place in unit["update"]]
    return {
        "memory": {tier: row for tier, row in run["memory"].items() if row["predicted"]},
        "error": max((row["error"] for row in run["memory"].values() if row["predicted"]), key=abs),
        "num_updates_by_place": {place: placed.count(place) for place in sorted(set(placed))},
        "num_recomputed": sum(unit["activations"] == "recompute" for unit in made["decisions"]["units"].values()),
        "num_offloaded": sum(unit["activations"].startswith("offload") for unit in made["decisions"]["units"].values()),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def _output_of(*arguments: str) -> dict[str, Any]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = ullage([*arguments, "--json"])
    if code:
        sys.exit(f"ullage {' '.join(arguments)} failed with {code}")
    result: dict[str, Any] = json.loads(out.getvalue())
    return result


def cases() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Return all cases by name."""
    found: dict[str, tuple[Any, tuple[Any, ...]]] = {}
    for case in IN_MEMORY:
        name, micro_batch, seq_len, dtype, activations, count = case
        found[f"in memory: {name} {dtype} {micro_batch}x{seq_len} {activations} x{count}"] = in_memory, case
    for offloaded in EXECUTED:
        name, micro_batch, seq_len, dtype, count, device_memory = offloaded
        found[f"executed: {name} {dtype} {micro_batch}x{seq_len} x{count} in {device_memory}"] = executed, offloaded
    for adapters in ADAPTERS:
        name, micro_batch, seq_len, dtype, quantization, storage, device_memory = adapters
        words = f"{name} {dtype} {micro_batch}x{seq_len}, base {quantization}, offload {storage} in {device_memory}"
        found[f"adapters: {words}"] = adapted, adapters
    for tiles in TILES:
        name, micro_batch, seq_len, dtype, storage, device_memory, num_tokens = tiles
        words = f"{name} {dtype} {micro_batch}x{seq_len}, {num_tokens} at once, offload {storage} in {device_memory}"
        found[f"tiles: {words}"] = tiled, tiles
    for tiles in LAYERS:
        name, micro_batch, seq_len, dtype, storage, device_memory, num_tokens = tiles
        words = f"{name} {dtype} {micro_batch}x{seq_len}, {num_tokens} at once, offload {storage} in {device_memory}"
        found[f"layers: {words}"] = layers, tiles
    return found


def summary(results: dict[str, Any]) -> dict[str, Any]:
    """Return what all cases of a kind together say."""
    found = {}
    for kind in ("in memory", "executed", "adapters", "tiles", "layers"):
        errors = {name: case["error"] for name, case in results.items() if name.startswith(kind)}
        if errors:
            worst = max(errors, key=lambda name: abs(errors[name]))
            mean = sum(abs(error) for error in errors.values()) / len(errors)
            found[kind] = {"num_cases": len(errors), "mean": mean, "worst": errors[worst], "worst_case": worst}
    return found


def main() -> None:
    """Measure the cases that match, keep the others, and write all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("substring", nargs="?", default="")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    known = cases()
    if args.child:
        run, case = known[args.child]
        result = run(*case)
        print(f"\n{json.dumps(result)}")
        return
    # Cases of earlier calls stay, so that it is the command for all of them.
    began = origin("torch", "transformers") | {"command": "python benchmarks/planning/memory.py"}
    results = json.loads(OUTPUT.read_text())["cases"] if OUTPUT.exists() else {}
    for name in track([name for name in known if args.substring in name], description="measuring"):
        child = subprocess.run([sys.executable, __file__, "--child", name], capture_output=True, text=True, check=False)
        if child.returncode:
            sys.exit(f"{name} failed:\n{child.stderr[-2000:]}")
        results[name] = json.loads(child.stdout.splitlines()[-1])
        ordered = {other: results[other] for other in known if other in results}
        write_result(OUTPUT, {**began, "summary": summary(ordered), "cases": ordered})
    print(json.dumps(summary(results), indent=1))


if __name__ == "__main__":
    main()
