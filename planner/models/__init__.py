"""Models: their sizes, where those come from, and the parameters that follow from them."""

from planner.models.config import Family, ModelConfig, ModelConfigError, UnknownModelError
from planner.models.huggingface import from_hf_config, to_hf_config_dict
from planner.models.parameters import ParameterSpec, num_parameters, parameters
from planner.models.registry import list_models, models_with_formulas, resolve_model

__all__ = [
    "Family",
    "ModelConfig",
    "ModelConfigError",
    "ParameterSpec",
    "UnknownModelError",
    "from_hf_config",
    "list_models",
    "models_with_formulas",
    "num_parameters",
    "parameters",
    "resolve_model",
    "to_hf_config_dict",
]
