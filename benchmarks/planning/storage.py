"""What are NVMe and offloaded activations worth? ``python benchmarks/planning/storage.py``.

Each request is planned with nothing but device and host, with activations that may wait on the host, and with NVMe;
each plan is verified, and what does not fit is told with whether that is proven.
"""

import json
from pathlib import Path
from typing import Any, get_args

from rich.progress import track

from hwprofiles.files import write_whole
from hwprofiles.registry import load_profile
from planner.choices.request import Request
from planner.models import resolve_model
from planner.plan.document import describe
from planner.plan.planning import InfeasibleError
from planner.terms import Storage
from planner.verification import verify
from ullage.rivals import make_plan

# Model, machine with one device, sequences of 2048 tokens.
CASES = (
    ("opt-6.7b", "gh200", 24),
    ("opt-13b", "rtx-4090", 4),
    ("opt-13b", "rtx4090-12ssd", 4),
    ("opt-66b", "rtx4090-12ssd", 4),
    ("opt-175b", "rtx4090-12ssd", 4),
)
OUTPUT = Path(__file__).parents[1] / "results" / "planning_storage.json"


def cell(model: str, machine: str, micro_batch: int, storage: Storage) -> dict[str, Any]:
    """Plan and verify one request."""
    name = {"model": model, "machine": machine, "micro_batch": micro_batch, "storage": storage}
    try:
        plan = make_plan(Request(resolve_model(model), load_profile(machine), micro_batch=micro_batch, storage=storage))
    except InfeasibleError as error:
        return name | {"fits": False, "proven": "it is proven" in str(error)}
    verify(plan)
    return name | {
        "fits": True,
        "iteration_s": plan.prediction.iteration_s,
        "bound_s": plan.certificate.bound_s,
        "gap": plan.certificate.gap(plan.prediction.iteration_s),
        "placement": describe(plan.decisions, plan.units()),
        "engines_s": {row.name: row.iteration_s for row in plan.engines if row.fits},
    }


def main() -> None:
    """Plan all, and write."""
    todo = [(*case, storage) for case in CASES for storage in get_args(Storage)]
    cells = [cell(*arguments) for arguments in track(todo, description="planning")]
    whole = {"command": "python benchmarks/planning/storage.py", "cells": cells}
    write_whole(OUTPUT, json.dumps(whole, indent=1) + "\n")


if __name__ == "__main__":
    main()
