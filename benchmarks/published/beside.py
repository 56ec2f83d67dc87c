"""Our plans beside LLMQ's measured runs: ``python benchmarks/published/beside.py [SUBSTRING]``.

Beside them is what its own row predicts. See :class:`ullage.rivals.cases.beside.BesideCase`. Each row says what bounds
our iteration and how much of it products take: the rest is what other kernels, or none, could win.

With a substring only runs whose name has it are planned again. What is predicted for LLMQ itself is always new.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from benchmarks.origin import origin, write_result
from benchmarks.published.run import HERE, ROOT
from hwprofiles.profile import HardwareProfile
from hwprofiles.registry import load_profile
from planner.costs.model import CostModel
from planner.decisions import Decisions
from planner.graph import Unit
from planner.models.kernels import Attention, Gemm
from ullage.output.formatting import binds
from ullage.rivals.cases import Metric, load_cases
from ullage.rivals.cases.beside import BesideCase
from ullage.rivals.cases.training import TrainingCase

OUTPUT = ROOT / "benchmarks" / "results" / "published_beside.json"


PARTS = {"norm": "norms and sums", "loss": "loss", "activation": "SwiGLU", "embedding": "embedding"}


def parts_s(profile: HardwareProfile, units: Sequence[Unit], decisions: Decisions) -> dict[str, float]:
    """Return the seconds of an iteration that each kind of kernel takes, recomputation left out.

    Sums of the residual are in products' modules or in norms, and count with norms.
    """
    cost, found = CostModel.of(profile, tuple(units), decisions), defaultdict[str, float](float)
    for unit in units:
        for operator in unit.operators:
            for kernel in (*operator.forward, *operator.backward):
                is_product = isinstance(kernel, Gemm | Attention)
                others = "norms and sums" if operator.kind == "down" else "others"
                part = type(kernel).__name__ if is_product else PARTS.get(operator.kind, others)
                found[part] += decisions.num_micro_batches * unit.num_tiles * cost.compute_s((kernel,))
    names = {"Gemm": "products", "Attention": "attention"}
    return {names.get(part, part): round(seconds, 3) for part, seconds in sorted(found.items())}


def theirs(run: TrainingCase) -> dict[str, Any]:
    """Return what was measured of a run, and what is predicted."""
    predicted_s = run.predict(load_profile(run.hardware)).values[Metric.ITERATION]
    found: dict[str, Any] = {name: getattr(run, name) for name in ("id", "model", "hardware", "devices", "source")}
    setup, decisions = run.decided(profile := run.machine_of(load_profile(run.hardware)))
    return found | {
        "theirs_parts_s": parts_s(profile, setup.units, decisions),
        "products": run.precision.products,
        "theirs_tokens_per_s": round(run.tokens_per_step / run.measurements()[Metric.ITERATION], 1),
        "theirs_predicted_tokens_per_s": round(run.tokens_per_step / predicted_s),
    }


def ours(beside: BesideCase) -> dict[str, Any]:
    """Return the best of our plans beside a run; nothing if none fits."""
    plans = beside.plans(load_profile(beside.hardware))
    if not plans:
        return {}
    kernels, best = max(plans.items(), key=lambda item: item[1].prediction.tokens_per_s)
    seen, parts = best.prediction, parts_s(best.hardware, best.units(), best.decisions)
    return {
        "ours_s": round(seen.iteration_s, 3),
        "ours_parts_s": parts,
        "ours_tokens_per_s": round(seen.tokens_per_s),
        "ratio": round(seen.tokens_per_s * beside.measurements()[Metric.OURS] / beside.run.tokens_per_step, 3),
        "kernels": kernels,
        "micro_batch": best.decisions.micro_batch,
        "binds": binds(seen.critical_s, seen.iteration_s),
        "products_share": round((parts["products"] + parts["attention"]) / seen.iteration_s, 3),
    }


def main() -> None:
    """Plan for every run, and write both."""
    part = sys.argv[1] if len(sys.argv) > 1 else ""
    before = {each["id"]: each for each in json.loads(OUTPUT.read_text())["rows"]} if part else {}
    rows = []
    for case in load_cases(HERE / "held_out" / "llmq.json"):
        beside = BesideCase.of(case)
        assert beside
        rows.append(before.get(case.id, {}) | theirs(beside.run) | (ours(beside) if part in case.id else {}))
        print(json.dumps(rows[-1]), flush=True)
    write_result(OUTPUT, {**origin("numpy"), "command": "python benchmarks/published/beside.py", "rows": rows})


if __name__ == "__main__":
    main()
