"""Our plans beside LLMQ's measured runs: ``python benchmarks/published/beside.py [SUBSTRING]``.

See :class:`ullage.rivals.cases.beside.BesideCase`. Each row says what bounds our iteration and how much of it products
take: the rest is what other kernels, or none, could win.

With a substring only runs whose name has it are planned again.
"""

import json
import sys
from typing import Any

from benchmarks.origin import origin, write_result
from benchmarks.published.run import HERE, ROOT
from hwprofiles.registry import load_profile
from planner.costs.model import CostModel
from planner.models.kernels import Attention, Gemm
from planner.plan.document import Plan
from ullage.output.formatting import binds
from ullage.rivals.cases.beside import BesideCase

OUTPUT = ROOT / "benchmarks" / "results" / "published_beside.json"


def products_share(plan: Plan) -> float:
    """Return the share of an iteration that products and attention take."""
    units, decisions = plan.units(), plan.decisions
    cost = CostModel.of(plan.hardware, units, decisions)
    computing_s = sum(
        unit.num_tiles * cost.compute_s(k for k in (*unit.forward, *unit.backward) if isinstance(k, Gemm | Attention))
        for unit in units
    )
    return decisions.num_micro_batches * computing_s / plan.prediction.iteration_s


def row(run: dict[str, Any]) -> dict[str, Any]:
    """Return the better of our plans beside a run."""
    plans = BesideCase.model_validate(run).plans(load_profile(run["hardware"]))
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
    for run in json.loads((HERE / "llmq.json").read_text())["cases"]:
        rows.append(row(run) if part in run["id"] else before[run["id"]])
        print(json.dumps(rows[-1]), flush=True)
    write_result(OUTPUT, {**origin("numpy"), "command": "python benchmarks/published/beside.py", "rows": rows})


if __name__ == "__main__":
    main()
