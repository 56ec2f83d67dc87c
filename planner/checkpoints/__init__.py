"""Checkpoints: engines as policies, their tasks in the schedule of a run, and what they cost."""

from planner.checkpoints.costs import CheckpointCosts
from planner.checkpoints.lowering import Run, Shard, state_of, with_checkpoints
from planner.checkpoints.policy import POLICIES, CheckpointPolicy, policy
from planner.checkpoints.reading import RunTimes, times

__all__ = [
    "POLICIES",
    "CheckpointCosts",
    "CheckpointPolicy",
    "Run",
    "RunTimes",
    "Shard",
    "policy",
    "state_of",
    "times",
    "with_checkpoints",
]
