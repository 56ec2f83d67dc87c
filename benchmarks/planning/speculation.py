"""What is gained by updates that begin before the norm of gradients is known, where no step clips?

``python benchmarks/planning/speculation.py`` plans each cell three times: as by default, with ``--speculate``, and
without clipping, which is the most that speculation can gain. ``verify`` simulates each plan again.
"""

from pathlib import Path
from typing import Any, Final

from benchmarks.origin import origin, write_result
from hwprofiles.registry import load_profile
from planner.choices.request import Request
from planner.models import resolve_model
from planner.plan.planning import make_plan
from planner.schedule.tasks import Tier
from planner.verification import verify

CELLS: Final = (
    ("llama-3.1-8b", "rtx-4090", 1),
    ("llama-3.1-8b", "a100-40", 1),
    ("opt-13b", "h100", 1),
    ("llama-3.1-8b", "rtx-4090x8", 4),
    ("opt-30b", "a100-80", 4),
    ("llama-3-70b", "h100", 8),
)
WAYS: Final[dict[str, dict[str, Any]]] = {"waits": {}, "speculates": {"speculate": True}, "no_clip": {"clip": False}}
OUTPUT: Final = Path(__file__).parents[1] / "results" / "planning_speculation.json"


def cell(model: str, hardware: str, num_devices: int) -> dict[str, Any]:
    """Plan one cell in each way."""
    found: dict[str, Any] = {}
    for name, given in WAYS.items():
        plan = make_plan(Request(resolve_model(model), load_profile(hardware), num_devices=num_devices, **given))
        verify(plan)
        assert plan.certificate is not None
        found[name] = {
            "iteration_s": plan.prediction.iteration_s,
            "bound_s": plan.certificate.bound_s,
            "host_bytes": plan.prediction.memory[Tier.HOST].peak_bytes,
        }
    return {"model": model, "hardware": hardware, "num_devices": num_devices, **found}


def main() -> None:
    """Plan all cells, and write."""
    write_result(OUTPUT, {**origin(), "cells": [cell(*each) for each in CELLS]})


if __name__ == "__main__":
    main()
