"""Checkpoints: engines as policies, their tasks in the schedule of a run, and what they cost."""

from planner.checkpoints.costs import CheckpointCosts
from planner.checkpoints.lowering import Run, with_checkpoints, with_promotion
from planner.checkpoints.policy import POLICIES, CheckpointPolicy, policy
from planner.checkpoints.reading import RunTimes, times
from planner.checkpoints.state import Shard, bytes_by_stage, coarse, state_of
from planner.checkpoints.stores import LEVELS, Level

__all__ = [
    "LEVELS",
    "POLICIES",
    "CheckpointCosts",
    "CheckpointPolicy",
    "Level",
    "Run",
    "RunTimes",
    "Shard",
    "bytes_by_stage",
    "coarse",
    "policy",
    "state_of",
    "times",
    "with_checkpoints",
    "with_promotion",
]
