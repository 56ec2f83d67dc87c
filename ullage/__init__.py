"""Plan, simulate and execute the training of models that are too big for the GPUs at hand.

Names are imported at their first use. So ``import ullage`` is fast, and planning never loads torch.
"""

import ast
import importlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from executor.audit.audit import AuditError as AuditError
    from executor.checkpoint.engine import Outcome as Outcome
    from executor.checkpoint.files.system_calls import CheckpointError as CheckpointError
    from executor.checkpoint.files.system_calls import DamagedError as DamagedError
    from executor.checkpoint.format.reader import Checkpoint as Checkpoint
    from executor.checkpoint.levels import Level as Level
    from executor.checkpoint.places.locating import checkpoint_at as checkpoint_at
    from executor.devices.lanes import LaneError as LaneError
    from executor.distributed.shards import BindingError as BindingError
    from executor.distributed.watchdog import RankError as RankError
    from executor.gradients import GradientError as GradientError
    from executor.memory.arenas import DeviceMemoryError as DeviceMemoryError
    from executor.memory.nvme_files import StorageError as StorageError
    from executor.memory.recompute_cache import ActivationError as ActivationError
    from executor.module.compilation import CompileError as CompileError
    from executor.optimizer.reference import AdamW8bit as AdamW8bit
    from executor.optimizer.reference import AdamWBf16 as AdamWBf16
    from executor.optimizer.reference import Lion as Lion
    from executor.optimizer.reference import Muon as Muon
    from executor.prepare import OffloadedOptimizer as OffloadedOptimizer
    from executor.session import Session as Session
    from executor.training_state.restoring import restore as restore
    from executor.training_state.saving import Checkpoints as Checkpoints
    from executor.training_state.saving import Resumed as Resumed
    from executor.weights.loading import Loaded as Loaded
    from executor.weights.loading import load as load
    from executor.weights.saving import save as save
    from hwprofiles.profile import HardwareProfile as HardwareProfile
    from hwprofiles.registry import ProfileError as ProfileError
    from hwprofiles.registry import list_profiles as list_profiles
    from hwprofiles.registry import load_profile as load_profile
    from hwprofiles.registry import profile_of as profile_of
    from planner.choices.request import Request as Request
    from planner.decisions import Decisions as Decisions
    from planner.decisions import Precision as Precision
    from planner.models.captured import CapturedInput as CapturedInput
    from planner.models.captured import CapturedModel as CapturedModel
    from planner.models.config import ModelConfig as ModelConfig
    from planner.models.config import ModelConfigError as ModelConfigError
    from planner.models.config import NoFormulasError as NoFormulasError
    from planner.models.config import UnknownModelError as UnknownModelError
    from planner.models.huggingface import from_hf_config as from_hf_config
    from planner.models.huggingface import to_hf_config_dict as to_hf_config_dict
    from planner.models.registry import list_models as list_models
    from planner.models.registry import packaged_names as packaged_names
    from planner.models.registry import resolve_model as resolve_model
    from planner.plan.document import Plan as Plan
    from planner.plan.document import PlanError as PlanError
    from planner.plan.document import load_plan as load_plan
    from planner.plan.planning import InfeasibleError as InfeasibleError
    from planner.schedule.loop import OutOfOrderError as OutOfOrderError
    from planner.schedule.timeline import Timeline as Timeline
    from planner.simulate.machine import Simulation as Simulation
    from planner.simulate.prediction import Prediction as Prediction
    from ullage.analysis.simulation import simulate as simulate
    from ullage.capture.module import capture_module as capture_module
    from ullage.capture.records import CaptureError as CaptureError
    from ullage.cli.remedies import Remedy as Remedy
    from ullage.integrations.transformers_trainer import offloaded as offloaded
    from ullage.planning import bound_tokens_per_s as bound_tokens_per_s
    from ullage.planning import plan as plan
    from ullage.planning import what_would_fit as what_would_fit
    from ullage.report.answers import details as details
    from ullage.report.answers import explain as explain
    from ullage.report.answers import page_assets as page_assets
    from ullage.report.answers import report_html as report_html
    from ullage.report.answers import summary as summary
    from ullage.report.charts import Part as Part
    from ullage.report.parts import page_data as page_data
    from ullage.this_machine.planning import Options as Options
    from ullage.training.levels import memory_folder as memory_folder
    from ullage.training.out_of_memory import OutOfMemoryError as OutOfMemoryError
    from ullage.training.preparing import prepare as prepare
    from ullage.training.replanning import Replanned as Replanned
    from ullage.training.replanning import replan as replan
    from ullage.whatif.prices import Prices as Prices
    from ullage.whatif.prices import example_prices as example_prices
    from ullage.whatif.questions import study as study
    from ullage.whatif.study import Study as Study

# `transformers` imports these, which then warn of kernels for other devices or versions. Nothing here needs them.
for _noisy in ("bitsandbytes.backends.cpu.ops", "torchao", "torch.utils._pytree"):
    logging.getLogger(_noisy).setLevel(logging.ERROR)

# The list above is the only one: what it imports from where is read from this file.
_IMPORTS = [node for node in ast.walk(ast.parse(Path(__file__).read_bytes())) if isinstance(node, ast.ImportFrom)]
_MODULE_OF = {name.name: node.module or "" for node in _IMPORTS for name in node.names if name.asname}

__all__ = list(_MODULE_OF)
__all__.sort(key=lambda name: (name.lower(), name))


def __getattr__(name: str) -> Any:
    """Import a public name (PEP 562)."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'ullage' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value  # the next access does not call this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
