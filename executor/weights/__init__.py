"""Loads weights from files of ``transformers`` and ``peft`` under a plan, and saves them."""

from executor.weights.files import WeightsError
from executor.weights.folder import MAX_SHARD_BYTES, WeightsFolder
from executor.weights.loading import Loaded, load
from executor.weights.saving import save

__all__ = ["MAX_SHARD_BYTES", "Loaded", "WeightsError", "WeightsFolder", "load", "save"]
