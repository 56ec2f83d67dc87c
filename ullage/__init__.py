"""Plan, simulate and execute the training of models that are too big for the GPUs at hand.

Names are imported when first used, so that ``import ullage`` is quick and planning never loads torch.
"""

import pkgutil
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from executor.checkpoint import Checkpoint as Checkpoint
    from executor.checkpoint import CheckpointError as CheckpointError
    from executor.checkpoint import DamagedError as DamagedError
    from executor.checkpoint import Level as Level
    from executor.checkpoint import Outcome as Outcome
    from executor.checkpoint import checkpoint_at as checkpoint_at
    from executor.devices.lanes import LaneError as LaneError
    from executor.distributed.shards import BindingError as BindingError
    from executor.distributed.watchdog import RankError as RankError
    from executor.gradients import GradientError as GradientError
    from executor.memory.arenas import DeviceMemoryError as DeviceMemoryError
    from executor.memory.nvme_files import StorageError as StorageError
    from executor.memory.recompute_cache import ActivationError as ActivationError
    from executor.module.compilation import CompileError as CompileError
    from executor.optimizer.reference import Lion as Lion
    from executor.prepare import OffloadedOptimizer as OffloadedOptimizer
    from executor.restoring import restore as restore
    from executor.saving import Checkpoints as Checkpoints
    from executor.saving import Resumed as Resumed
    from executor.session import Session as Session
    from hwprofiles.machine import OtherMachineError as OtherMachineError
    from hwprofiles.profile import HardwareProfile as HardwareProfile
    from hwprofiles.registry import ProfileError as ProfileError
    from hwprofiles.registry import load_profile as load_profile
    from planner.decisions import Decisions as Decisions
    from planner.decisions import Precision as Precision
    from planner.models.captured import CapturedInput as CapturedInput
    from planner.models.captured import CapturedModel as CapturedModel
    from planner.models.config import ModelConfig as ModelConfig
    from planner.models.config import ModelConfigError as ModelConfigError
    from planner.models.config import UnknownModelError as UnknownModelError
    from planner.models.registry import resolve_model as resolve_model
    from planner.plan.document import Plan as Plan
    from planner.plan.document import PlanError as PlanError
    from planner.plan.document import load_plan as load_plan
    from planner.plan.planning import InfeasibleError as InfeasibleError
    from planner.plan.planning import Request as Request
    from planner.schedule.loop import OutOfOrderError as OutOfOrderError
    from planner.schedule.timeline import Timeline as Timeline
    from planner.simulate.machine import Simulation as Simulation
    from planner.simulate.prediction import Prediction as Prediction
    from ullage.analysis.simulation import simulate as simulate
    from ullage.capture.module import capture_module as capture_module
    from ullage.capture.records import CaptureError as CaptureError
    from ullage.integrations.trainer_callback import UllageCallback as UllageCallback
    from ullage.planning import plan as plan
    from ullage.training.checkpoints import CheckpointOptions as CheckpointOptions
    from ullage.training.levels import memory_folder as memory_folder
    from ullage.training.out_of_memory import OutOfMemoryError as OutOfMemoryError
    from ullage.training.trainer import Settings as Settings
    from ullage.training.trainer import Step as Step
    from ullage.training.trainer import Trainer as Trainer
    from ullage.training.trainer import prepare as prepare

_ORIGINS = {
    "ActivationError": "executor.memory.recompute_cache:ActivationError",
    "BindingError": "executor.distributed.shards:BindingError",
    "capture_module": "ullage.capture.module:capture_module",
    "CapturedInput": "planner.models.captured:CapturedInput",
    "CapturedModel": "planner.models.captured:CapturedModel",
    "CaptureError": "ullage.capture.records:CaptureError",
    "Checkpoint": "executor.checkpoint:Checkpoint",
    "checkpoint_at": "executor.checkpoint:checkpoint_at",
    "CheckpointError": "executor.checkpoint:CheckpointError",
    "CheckpointOptions": "ullage.training.checkpoints:CheckpointOptions",
    "Checkpoints": "executor.saving:Checkpoints",
    "CompileError": "executor.module.compilation:CompileError",
    "DamagedError": "executor.checkpoint:DamagedError",
    "Decisions": "planner.decisions:Decisions",
    "DeviceMemoryError": "executor.memory.arenas:DeviceMemoryError",
    "GradientError": "executor.gradients:GradientError",
    "HardwareProfile": "hwprofiles.profile:HardwareProfile",
    "InfeasibleError": "planner.plan.planning:InfeasibleError",
    "LaneError": "executor.devices.lanes:LaneError",
    "Level": "executor.checkpoint:Level",
    "Lion": "executor.optimizer.reference:Lion",
    "load_plan": "planner.plan.document:load_plan",
    "load_profile": "hwprofiles.registry:load_profile",
    "memory_folder": "ullage.training.levels:memory_folder",
    "ModelConfig": "planner.models.config:ModelConfig",
    "ModelConfigError": "planner.models.config:ModelConfigError",
    "OffloadedOptimizer": "executor.prepare:OffloadedOptimizer",
    "OtherMachineError": "hwprofiles.machine:OtherMachineError",
    "Outcome": "executor.checkpoint:Outcome",
    "OutOfMemoryError": "ullage.training.out_of_memory:OutOfMemoryError",
    "OutOfOrderError": "planner.schedule.loop:OutOfOrderError",
    "Plan": "planner.plan.document:Plan",
    "plan": "ullage.planning:plan",
    "PlanError": "planner.plan.document:PlanError",
    "Precision": "planner.decisions:Precision",
    "Prediction": "planner.simulate.prediction:Prediction",
    "prepare": "ullage.training.trainer:prepare",
    "ProfileError": "hwprofiles.registry:ProfileError",
    "RankError": "executor.distributed.watchdog:RankError",
    "Request": "planner.plan.planning:Request",
    "resolve_model": "planner.models.registry:resolve_model",
    "restore": "executor.restoring:restore",
    "Resumed": "executor.saving:Resumed",
    "Session": "executor.session:Session",
    "Settings": "ullage.training.trainer:Settings",
    "simulate": "ullage.analysis.simulation:simulate",
    "Simulation": "planner.simulate.machine:Simulation",
    "Step": "ullage.training.trainer:Step",
    "StorageError": "executor.memory.nvme_files:StorageError",
    "Timeline": "planner.schedule.timeline:Timeline",
    "Trainer": "ullage.training.trainer:Trainer",
    "UllageCallback": "ullage.integrations.trainer_callback:UllageCallback",
    "UnknownModelError": "planner.models.config:UnknownModelError",
}

__all__ = list(_ORIGINS)


def __getattr__(name: str) -> Any:
    """Import a public name (PEP 562)."""
    if name not in _ORIGINS:
        raise AttributeError(f"module 'ullage' has no attribute {name!r}")
    value = pkgutil.resolve_name(_ORIGINS[name])
    globals()[name] = value  # next time without coming here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_ORIGINS})
