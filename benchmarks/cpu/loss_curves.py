"""Does training with narrow state learn as training with fp32 state does? 1,000 iterations of a small Llama each.

    python benchmarks/cpu/loss_curves.py

The same plans, weights and batches of the built-in text with each optimizer, three seeds of each. The plan offloads a
part of the state, so updates run on the device and on the CPU. Losses are of training batches, averaged over ten
iterations. ``--optimizers`` trains with some of them, and keeps what the result file has of the others.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.demo import output_of
from benchmarks.origin import origin, write_result
from planner.plan.document import describe, load_plan

OPTIMIZERS = (
    "adamw",
    "adamw-bf16",
    "adamw-8bit",
    "adamw-bf16 --precision master=bf16",
    "adamw-8bit --precision master=bf16",
)
MODEL = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "vocab_size": 256,
}
SETTING = ["--hardware", "epyc-turin-2c", "--precision", "bf16", "--seq-len", "128", "--micro-batch", "8"]
LAST = 100
"""Iterations at the end whose mean loss is compared."""


def trained(
    folder: Path, optimizer: str, seed: int, device_memory: str, num_iterations: int
) -> tuple[list[float], str]:
    """Plan and train; return the loss of each iteration, and where the plan updates."""
    model, plan = folder / "model.json", folder / "plan.json"
    model.write_text(json.dumps(MODEL), encoding="utf-8")
    options = [*SETTING, "--memory", "device=" + device_memory, "--optimizer", *optimizer.split()]
    output_of("plan", "--model", str(model), *options, "--output", str(plan))
    run = ["--iterations", str(num_iterations), "--seed", str(seed), "--output-dir", str(folder)]
    losses: list[float] = output_of("execute", str(plan), *run, "--allow-other-machine")["losses"]
    planned = load_plan(plan)
    return losses, describe(planned.decisions, planned.units())


def main() -> None:
    """Train with each optimizer and seed, print the last losses and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/cpu_loss_curves.json"))
    parser.add_argument("--iterations", type=int, default=1000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--device-memory", default="14MB")
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=OPTIMIZERS)
    arguments = parser.parse_args()
    began = origin("torch", "transformers", "numba", "numpy")
    rows: list[dict[str, Any]] = []
    if kept := set(OPTIMIZERS) - set(arguments.optimizers):
        rows = json.loads(arguments.output.read_text(encoding="utf-8"))["rows"]
        rows = [row for row in rows if row["optimizer"] in kept and row["seed"] in arguments.seeds]
    for seed in arguments.seeds:
        for optimizer in arguments.optimizers:
            with tempfile.TemporaryDirectory() as temporary:
                found = trained(Path(temporary), optimizer, seed, arguments.device_memory, arguments.iterations)
            losses, placement = found
            tens = [statistics.fmean(losses[i : i + 10]) for i in range(0, len(losses), 10)]
            last = statistics.fmean(losses[-LAST:])
            print(f"seed {seed}, {optimizer}: first {losses[0]:.4f}, mean of the last {LAST} {last:.4f}", flush=True)
            row = {"optimizer": optimizer, "seed": seed, "placement": placement, "first": losses[0], "last": last}
            rows.append(row | {"curve": [round(loss, 5) for loss in tens]})
    rows.sort(key=lambda row: (row["seed"], OPTIMIZERS.index(row["optimizer"])))
    found_of = dict.fromkeys(row["optimizer"] for row in rows)
    last_of = {name: [row["last"] for row in rows if row["optimizer"] == name] for name in found_of}
    wide = last_of["adamw"]
    result = {
        **began,
        "model": MODEL,
        "plan": " ".join([*SETTING, "--memory", "device=" + arguments.device_memory]),
        "num_iterations": arguments.iterations,
        "last": LAST,
        "rows": rows,
        "differences": {
            name: [n / w - 1 for w, n in zip(wide, last_of[name], strict=True)] for name in found_of if name != "adamw"
        },
        "seed_spread": (max(wide) - min(wide)) / statistics.fmean(wide),
    }
    write_result(arguments.output, result)


if __name__ == "__main__":
    main()
