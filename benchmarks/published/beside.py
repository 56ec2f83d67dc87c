"""Our plans beside LLMQ's measured runs: ``python benchmarks/published/beside.py [SUBSTRING]``.

Same model, sequences per step, types and machine; how a step is cut into micro-batches and shared by devices is each
engine's choice. LLMQ's state is all bf16 with stochastic rounding, as that of our ``adamw-bf16`` with a master copy in
bf16. Each row says what bounds our iteration and how much of it products take: the rest is what other kernels, or none,
could win.

With a substring only runs whose name has it are planned again.
"""

import itertools
import json
import sys
from typing import Any

import ullage
from benchmarks.origin import origin, write_result
from benchmarks.published.run import HERE, ROOT
from planner.costs.model import CostModel
from planner.decisions import Precision
from planner.models.config import ModelConfigError
from planner.models.kernels import Attention, Gemm
from planner.plan.document import Plan
from planner.plan.planning import InfeasibleError
from ullage.output.formatting import binds

OUTPUT = ROOT / "benchmarks" / "results" / "published_beside.json"
KERNELS = "transformers", "compiled"


def planned(run: dict[str, Any], kernels: str) -> Plan | None:
    """Return our plan for a run with one kind of kernels; ``None`` if there is none."""
    try:
        return ullage.plan(
            run["model"],
            hardware=run["hardware"],
            gpus=run["devices"],
            seq_len=run["seq_len"],
            global_batch=run["devices"] * run["micro_batch"] * run["num_micro_batches"],
            precision=Precision(weights="bf16", master="bf16"),
            products=run["products"],
            optimizer="adamw-bf16",
            pipeline_parallel=1,  # which can be executed
            kernels=kernels,
            storage="activations" if kernels == "transformers" else "never",
        )
    except (InfeasibleError, ModelConfigError):
        return None


def products_share(plan: Plan) -> float:
    """Return the share of an iteration that products and attention take."""
    units, decisions = plan.units(), plan.decisions
    kernels = itertools.chain.from_iterable((*unit.forward, *unit.backward) for unit in units)
    cost = CostModel.of(plan.hardware, units, decisions)
    computing_s = cost.compute_s([kernel for kernel in kernels if isinstance(kernel, Gemm | Attention)])
    return decisions.num_micro_batches * computing_s / plan.prediction.iteration_s


def row(run: dict[str, Any]) -> dict[str, Any]:
    """Return the better of our plans beside a run."""
    plans = {kernels: plan for kernels in KERNELS if (plan := planned(run, kernels))}
    found = {name: run[name] for name in ("id", "model", "hardware", "devices", "products", "source")}
    found["theirs_tokens_per_s"] = run["tokens_per_s"]
    if not plans:
        return found
    kernels, best = max(plans.items(), key=lambda item: item[1].prediction.tokens_per_s)
    seen = best.prediction
    return found | {
        "ours_tokens_per_s": round(seen.tokens_per_s),
        "ratio": round(seen.tokens_per_s / run["tokens_per_s"], 3),
        "kernels": kernels,
        "micro_batch": best.decisions.micro_batch,
        "binds": binds(seen.critical_s, seen.iteration_s),
        "products_share": round(products_share(best), 3),
    }


def main() -> None:
    """Plan for every run, and write both."""
    part = sys.argv[1] if len(sys.argv) > 1 else ""
    before = {each["id"]: each for each in json.loads(OUTPUT.read_text())["rows"]} if part else {}
    rows = []
    for run in json.loads((HERE / "llmq.json").read_text())["runs"]:
        rows.append(row(run) if part in run["id"] else before[run["id"]])
        print(json.dumps(rows[-1]), flush=True)
    write_result(OUTPUT, {**origin("numpy"), "rows": rows})


if __name__ == "__main__":
    main()
