"""How near to the best are plans, and how much better than engines? ``python benchmarks/planning/grid.py [SUBSTRING]``.

Ten models on 1, 2, 4 and 8 GPUs of four kinds: every cell is planned and verified, or nothing was found that fits, and
then it is told whether that is proven. Gaps are those of the certificates. With a substring only cells whose name has
it are planned again.
"""

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from rich.progress import track

from hwprofiles.files import write_whole
from hwprofiles.registry import load_profile
from planner.choices.request import Request
from planner.models import resolve_model
from planner.plan.planning import InfeasibleError
from planner.verification import verify
from ullage.rivals import make_plan

MODELS = (
    "opt-1.3b",
    "opt-6.7b",
    "opt-13b",
    "opt-30b",
    "opt-66b",
    "opt-175b",
    "llama-3-8b",
    "llama-3-70b",
    "qwen2.5-7b",
    "mixtral-8x7b",
)
MACHINES = ("rtx-4090", "a100-40", "a100-80", "h100")
NUM_DEVICES = (1, 2, 4, 8)
OUTPUT = Path(__file__).parents[1] / "results" / "planning_grid.json"


def cell(model: str, machine: str, num_devices: int) -> dict[str, Any]:
    """Plan one cell, with the request's defaults: 4 sequences of 2048 tokens per device; ``plan_s`` is of one core."""
    name = {"model": model, "machine": machine, "num_devices": num_devices}
    profile = load_profile("rtx-4090x8" if machine == "rtx-4090" and num_devices > 1 else machine)
    begin_s = time.process_time()
    try:
        plan = make_plan(Request(resolve_model(model), profile, num_devices=num_devices))
    except InfeasibleError as error:
        return name | {"fits": False, "proven": "it is proven" in str(error), "why": str(error)}
    plan_s = time.process_time() - begin_s
    verify(plan)
    iteration_s, certificate = plan.prediction.iteration_s, plan.certificate
    engines = [row for row in plan.engines if row.fits and row.iteration_s and not row.numerics]
    best = min(engines, key=lambda row: row.iteration_s or 0.0, default=None)
    return name | {
        "fits": True,
        "iteration_s": iteration_s,
        "bound_s": certificate.bound_s,
        "gap": certificate.gap(iteration_s),
        "gap_parts": certificate.gap_parts(iteration_s),
        "best_engine": best.name if best else None,
        "best_engine_over_ours": best.iteration_s / iteration_s if best and best.iteration_s else None,
        "plan_s": round(plan_s, 2),
        "num_simulations": plan.num_simulations,
    }


def summary(cells: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what all cells together say."""
    planned = [c for c in cells if c.get("fits")]
    gaps = [c["gap"] for c in planned]
    ratios = [c["best_engine_over_ours"] for c in planned if c["best_engine_over_ours"]]
    return {
        "num_cells": len(cells),
        "planned": len(planned),
        "proven_infeasible": sum(c.get("proven", False) for c in cells),
        "not_found": sum(c.get("fits") is False and not c["proven"] for c in cells),
        "median_gap": statistics.median(gaps) if gaps else None,
        "worst_gap": max(gaps, default=None),
        "gaps_above_15_percent": sum(gap > 0.15 for gap in gaps),
        "no_engine_fits": sum(c["best_engine"] is None for c in planned),
        "least_engine_over_ours": min(ratios, default=None),
        "median_engine_over_ours": statistics.median(ratios) if ratios else None,
        "most_engine_over_ours": max(ratios, default=None),
        "median_plan_s": statistics.median(c["plan_s"] for c in planned) if planned else None,
        "slowest_plan_s": max((c["plan_s"] for c in planned), default=None),
    }


def main() -> None:
    """Plan the cells that match, keep the others, and write all."""
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    known = json.loads(OUTPUT.read_text())["cells"] if OUTPUT.exists() else []
    cells = {(c["model"], c["machine"], c["num_devices"]): c for c in known}
    keys = [(model, machine, count) for model in MODELS for machine in MACHINES for count in NUM_DEVICES]
    todo = [key for key in keys if wanted in " ".join(map(str, key))]
    for key in track(todo, description="planning"):
        cells[key] = cell(*key)
        ordered = [cells[other] for other in keys if other in cells]
        result = {"command": "python benchmarks/planning/grid.py", "summary": summary(ordered), "cells": ordered}
        write_whole(OUTPUT, json.dumps(result, indent=1) + "\n")  # what is planned is kept, whatever comes next
    print(json.dumps(result["summary"], indent=1))


if __name__ == "__main__":
    main()
