"""Weights in the files of ``transformers`` and ``peft``: loading them under a plan, and saving them."""

from executor.weights.files import WeightsError
from executor.weights.folder import MAX_SHARD_BYTES, WeightsFolder
from executor.weights.loading import Loaded, load
from executor.weights.saving import save

__all__ = ["MAX_SHARD_BYTES", "Loaded", "WeightsError", "WeightsFolder", "load", "save"]
