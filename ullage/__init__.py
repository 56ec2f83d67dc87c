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
    from planner.plan import Plan as Plan
    from planner.plan import load_plan as load_plan
    from planner.planning import Request as Request
    from planner.planning import make_plan as plan
    from ullage.capture import capture_module as capture_module
    from ullage.keeping import CheckpointOptions as CheckpointOptions
    from ullage.levels import memory_folder as memory_folder
    from ullage.simulation import simulate as simulate
    from ullage.training import Trainer as Trainer
    from ullage.training import prepare as prepare

_ORIGINS = {
    "CheckpointOptions": ("ullage.keeping", "CheckpointOptions"),
    "Checkpoints": ("executor.saving", "Checkpoints"),
    "Level": ("executor.checkpoint", "Level"),
    "Lion": ("executor.optimizer.reference", "Lion"),
    "Plan": ("planner.plan", "Plan"),
    "Request": ("planner.planning", "Request"),
    "Trainer": ("ullage.training", "Trainer"),
    "capture_module": ("ullage.capture", "capture_module"),
    "load_plan": ("planner.plan", "load_plan"),
    "load_profile": ("hwprofiles.registry", "load_profile"),
    "memory_folder": ("ullage.levels", "memory_folder"),
    "plan": ("planner.planning", "make_plan"),
    "prepare": ("ullage.training", "prepare"),
    "resolve_model": ("planner.models.registry", "resolve_model"),
    "restore": ("executor.restoring", "restore"),
    "simulate": ("ullage.simulation", "simulate"),
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
