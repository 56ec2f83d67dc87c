"""Plan, simulate and execute the training of models that are too big for the GPUs at hand.

Names are imported when first used, so that ``import ullage`` is quick and planning never loads torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from executor.checkpoint import Level as Level
    from executor.optimizer.reference import Lion as Lion
    from executor.restoring import restore as restore
    from executor.saving import Checkpoints as Checkpoints
    from hwprofiles.registry import load_profile as load_profile
    from planner.models.registry import resolve_model as resolve_model
    from planner.plan.document import Plan as Plan
    from planner.plan.document import load_plan as load_plan
    from planner.plan.planning import Request as Request
    from ullage.analysis.simulation import simulate as simulate
    from ullage.capture import capture_module as capture_module
    from ullage.planning import plan as plan
    from ullage.training.checkpoints import CheckpointOptions as CheckpointOptions
    from ullage.training.levels import memory_folder as memory_folder
    from ullage.training.trainer import Trainer as Trainer
    from ullage.training.trainer import prepare as prepare

_ORIGINS = {
    "CheckpointOptions": ("ullage.training.checkpoints", "CheckpointOptions"),
    "Checkpoints": ("executor.saving", "Checkpoints"),
    "Level": ("executor.checkpoint", "Level"),
    "Lion": ("executor.optimizer.reference", "Lion"),
    "Plan": ("planner.plan.document", "Plan"),
    "Request": ("planner.plan.planning", "Request"),
    "Trainer": ("ullage.training.trainer", "Trainer"),
    "capture_module": ("ullage.capture", "capture_module"),
    "load_plan": ("planner.plan.document", "load_plan"),
    "load_profile": ("hwprofiles.registry", "load_profile"),
    "memory_folder": ("ullage.training.levels", "memory_folder"),
    "plan": ("ullage.planning", "plan"),
    "prepare": ("ullage.training.trainer", "prepare"),
    "resolve_model": ("planner.models.registry", "resolve_model"),
    "restore": ("executor.restoring", "restore"),
    "simulate": ("ullage.analysis.simulation", "simulate"),
}

__all__ = [
    "CheckpointOptions",
    "Checkpoints",
    "Level",
    "Lion",
    "Plan",
    "Request",
    "Trainer",
    "capture_module",
    "load_plan",
    "load_profile",
    "memory_folder",
    "plan",
    "prepare",
    "resolve_model",
    "restore",
    "simulate",
]


def __getattr__(name: str) -> Any:
    """Import a public name (PEP 562)."""
    if name not in _ORIGINS:
        raise AttributeError(f"module 'ullage' has no attribute {name!r}")
    module, attribute = _ORIGINS[name]
    value = getattr(importlib.import_module(module), attribute)
    globals()[name] = value  # next time without coming here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_ORIGINS})
