"""Trainings that nothing watches but their own audit.

Exits with 1, and says what differs, if an audit finds something; and with 2 after any other error.

``run.py --audit`` runs it once for every defect of ``defects.json`` that is ``audited``.
"""

import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests" / folder) for folder in ("capture", "executor", "")]

from random_modules import INPUT, Random, Recipe, Stream  # noqa: E402 - after the path
from training import Task, decide, prepare, session_options, train, uniform  # noqa: E402

from executor.audit.audit import AuditError  # noqa: E402
from executor.prepare import prepare_session  # noqa: E402
from planner.decisions import FP32, Activations, Decisions, Place, UnitDecision  # noqa: E402
from planner.graph import Batch, build_graph, units  # noqa: E402
from ullage.capture import capture_module  # noqa: E402

BLOCKS = ("table", "running", "counting", "drawing", "statistics", "linear-dropout")


def sessions() -> Iterator[tuple[Any, Any, int]]:
    """Yield models and optimizers under plans of every kind, with the number of micro-batches."""
    options = session_options(audit="first")
    for kind in BLOCKS:
        recipe = Recipe((Stream((kind, kind, "linear-gelu")),))
        found = capture_module(lambda recipe=recipe: Random(recipe), [INPUT], "fp32", as_on_gpu=False)
        its_units = units(build_graph(found, Batch(found.micro_batch, found.seq_len, 4)))
        ways: list[tuple[Activations, Place]] = [("recompute", Place.CPU), ("offload", Place.STREAM)]
        for activations, place in ways:
            chosen = {
                unit.name: UnitDecision(
                    params="host", activations=activations if unit.recompute else "keep", update=(place,)
                )
                for unit in its_units
            }
            decisions = Decisions(
                policy="audited",
                precision=FP32,
                micro_batch=4,
                subgroup_params=10**6,
                num_param_slots=1,
                num_micro_batches=2,
                clip=True,
                units=chosen,
            )
            torch.manual_seed(7)
            model = Random(recipe).train()
            optimizer = torch.optim.AdamW(model.parameters())
            yield *prepare_session(model, optimizer, its_units, decisions, options), 2


def tasks() -> Iterator[tuple[Task, Decisions]]:
    """Yield tasks of models that are planned by formulas, with plans."""
    for family, params, place, tile in (("gpt2", "gpu", "gpu", None), ("llama", "host", "cpu", 3)):
        task = Task(family=family, dtype=torch.float32, num_micro_batches=2, iterations=1)
        settings = {"layer_tile_tokens": tile, "num_param_slots": 1}
        yield task, decide(task, uniform(params, place, "recompute"), **settings)


def main() -> int:
    """Train one iteration of each."""
    try:
        for model, optimizer, num_micro_batches in sessions():
            with optimizer.session:
                for _ in range(num_micro_batches):
                    model(torch.randn(INPUT.shape)).backward()
                optimizer.step()
        for task, decisions in tasks():
            model, optimizer = prepare(task, decisions, audit="first")
            with optimizer.session:
                train(task, model, optimizer)
    except AuditError as error:
        sys.stdout.write(f"AuditError: {error}\n")
        return 1
    except Exception:  # noqa: BLE001 - of the defect, but not found by the audit
        traceback.print_exc()
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
