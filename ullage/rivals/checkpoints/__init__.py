"""Checkpoint engines in published runs: what they wait for, how they save state, and what that costs."""

import dataclasses
import functools
from collections.abc import Sequence

from planner.checkpoints.costs import CheckpointCosts
from planner.checkpoints.lowering import MakeSaver, Saver, Shard, coarse
from planner.checkpoints.policy import CHUNK_BYTES
from planner.costs.model import CostModel
from planner.terms import Level
from ullage.rivals.checkpoints.costs import EngineCosts
from ullage.rivals.checkpoints.lowering import EngineSaver
from ullage.rivals.checkpoints.policy import POLICIES


def engine(
    name: str,
    cost: CostModel,
    store: Level,
    state: Sequence[Shard],
    buffer_bytes: int,
    num_files: int | None = None,
) -> tuple[MakeSaver, CheckpointCosts]:
    """Return how an engine of that name, perhaps ours, saves the state, and its prices.

    Raises:
        ValueError: there is no such engine, or the profile lacks the store.
    """
    if name == "ullage":
        chunk_bytes, _ = coarse(CHUNK_BYTES, state, buffer_bytes)
        ours = functools.partial(Saver, buffer_bytes=buffer_bytes, chunk_bytes=chunk_bytes)
        return ours, CheckpointCosts(cost, store, num_files=num_files)
    if name not in POLICIES:
        raise ValueError(f"there is no checkpoint engine {name!r}; choose one of {', '.join((*POLICIES, 'ullage'))}")
    chunk_bytes, _ = coarse(POLICIES[name].chunk_bytes, state, buffer_bytes)
    policy = dataclasses.replace(POLICIES[name], chunk_bytes=chunk_bytes)
    theirs = functools.partial(EngineSaver, policy, buffer_bytes=buffer_bytes)
    return theirs, EngineCosts(policy, cost, store, num_files)
