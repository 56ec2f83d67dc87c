"""What the planner chooses: per unit, and for the whole iteration."""

from planner.decisions.decisions import Decisions, check_fp8_weights, check_speculate, check_split_masters
from planner.decisions.fp8 import Fp8Weights
from planner.decisions.places import Activations, Place, UnitDecision
from planner.decisions.precision import BF16, FP32, Precision
from planner.decisions.sharding import FROZEN_ALIGNMENT_BYTES, MOST_EXCHANGED_BYTES, Sharding
from planner.models.choice import DEGREES, Choice, Count

__all__ = [
    "BF16",
    "DEGREES",
    "FP32",
    "FROZEN_ALIGNMENT_BYTES",
    "MOST_EXCHANGED_BYTES",
    "Activations",
    "Choice",
    "Count",
    "Decisions",
    "Fp8Weights",
    "Place",
    "Precision",
    "Sharding",
    "UnitDecision",
    "check_fp8_weights",
    "check_speculate",
    "check_split_masters",
]
