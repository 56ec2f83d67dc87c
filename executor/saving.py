"""Checkpoints of training under a plan: everything that it needs to go on as if it had not stopped."""

import base64
import contextlib
import os
import random
from collections.abc import Callable, Mapping
from typing import Any, Self, final

import numpy as np
import torch

from executor.checkpoint import (
    Checkpoint,
    CheckpointEngine,
    CheckpointError,
    Files,
    Flusher,
    Level,
    Levels,
    Outcome,
)
from executor.checkpoint.engine import MASTER
from executor.checkpoint.opening import Folder
from executor.checkpoint.retention import parse_name
from executor.parallel.shares import assemble, whole_name
from executor.prepare import OffloadedOptimizer

_PATIENCE_S = 60.0


@final
class Checkpoints:
    """Makes checkpoints of a prepared model and its optimizer, and brings them back.

    Args:
        optimizer: what ``prepare`` returned, for a session with room for checkpoints.
        levels: where they go, fastest first. Training writes to the first, a folder that all ranks share; each further
            one gets its checkpoints from the one above, of the steps that are multiples of its interval.
        tell: is called with how each one ended on each level, in another thread.
        files: what writes into folders.

    Raises:
        ValueError: the session was made without room for checkpoints, or the levels do not fit together.
        CheckpointError: a place cannot be used, has no room, or is not shared by all nodes.
    """

    def __init__(
        self,
        optimizer: OffloadedOptimizer,
        *levels: Level,
        tell: Callable[[Outcome], None] = lambda _outcome: None,
        files: Files | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._session = session = optimizer.session
        if session.snapshots is None:
            raise ValueError("the session has no room for checkpoints; give it checkpoint_buffer_bytes")
        member = session.member()
        self._rank = member.rank
        several_nodes = member.size > int(os.environ.get("LOCAL_WORLD_SIZE") or member.size)
        self.levels = Levels(levels, tell, files=files, is_first=member.rank == 0, several_nodes=several_nodes)
        store = self.levels.fastest
        self._flusher = Flusher(store.files, session.snapshots.ring, patience_s=_PATIENCE_S)
        self._engine = CheckpointEngine(
            session.snapshots, store, self._flusher, keep=levels[0].keep, member=member, tell=self.levels.made
        )
        session.snapshots.engine = self._engine
        try:
            self.levels.check_room(round(session.mean(self._engine.num_bytes) * member.size))
        except CheckpointError:
            self.close()
            raise

    def save(self, step: int, extra: Mapping[str, Any] | None = None) -> None:
        """Begin a checkpoint between two iterations; it is taken during the next one, and written beside training.

        All ranks do so together.

        Args:
            step: iterations of training behind the present state.
            extra: what else is to be kept, as plain JSON (an LR scheduler's ``state_dict()``, the place in the data).

        Raises:
            OutOfOrderError: in the middle of an iteration.
            CheckpointError: one was begun here already.
        """
        self._session.check_between_iterations()
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self._optimizer.param_groups]
        steps = {parameter.share.name: parameter.step for _, parameter in self._session.parameters()}
        own = {
            "optimizer": self._optimizer.entry.stock.__name__,
            "groups": groups,
            "steps": steps,
            "rng": rng_state(),
            **(extra or {}),
        }
        self._engine.begin(step, self._session.iteration, own)

    def finish(self) -> None:
        """Wait until checkpoints that have begun are durable, or have failed; between iterations."""
        self.take_rest()
        self._engine.wait()

    def take_rest(self) -> None:
        """Take what has not been taken of checkpoints that have begun, without an iteration; between iterations."""
        self._session.synchronize()
        self._engine.take_rest()

    def bring_down(self, patience_s: float) -> None:
        """Bring the newest checkpoint to all levels, and wait for that, but not for long; after :meth:`finish`.

        What does not come there in time, or until Ctrl-C, is given up and told.
        """
        self.levels.bring_down(patience_s)

    def newest(self) -> tuple[Folder | None, tuple[str, ...]]:
        """Return where the newest checkpoint is that is whole, and why newer ones are not.

        Rank 0 reads all of it, and the others take its word.
        """
        level, step, nonce = -1, 0, 0
        refused: tuple[str, ...] = ()
        if self._rank == 0:
            found = self.levels.newest()
            refused = found.refused
            if found.checkpoint is not None:
                level, (step, nonce) = found.level, parse_name(found.checkpoint.folder.name) or (0, 0)
        level, step, nonce = (self._session.of_first(value) for value in (level, step, nonce))
        return (None if level < 0 else self.levels.stores[level].folder(step, nonce)), refused

    def close(self) -> None:
        """Give up what has not been taken or is on its way to other levels, wait for the rest, and end the threads.

        Closing twice is allowed.
        """
        self._engine.close()
        if self._session.snapshots is not None:
            self._session.snapshots.engine = None
        self._flusher.close()
        self.levels.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self.close()


def restore(optimizer: OffloadedOptimizer, checkpoint: Checkpoint) -> dict[str, Any]:
    """Set weights, state, step counts, groups and random numbers to what they were; return this rank's ``extra``.

    Whatever plan, number of ranks and tiers it was made under: every rank reads what it needs.

    Raises:
        CheckpointError: it is of another model or optimizer, or damaged.
    """
    session = optimizer.session
    of_ranks = checkpoint.manifest.extra["ranks"]
    member = session.member()
    extra: dict[str, Any] = of_ranks[member.rank if member.rank < len(of_ranks) else 0]
    stock = optimizer.entry.stock.__name__
    if extra["optimizer"] != stock or len(extra["groups"]) != len(optimizer.param_groups):
        raise CheckpointError(
            f"{checkpoint.folder} has the state of {extra['optimizer']} with {len(extra['groups'])} group(s), but the "
            f"optimizer is {stock} with {len(optimizer.param_groups)}; make it as it was when it was saved"
        )
    group_of = {session.name_of(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    left = {parameter.share.name for _, parameter in session.parameters()}
    for unit in {id(unit): unit for unit, _ in session.parameters()}.values():
        shares = [parameter.share for parameter in unit.parameters if parameter.share.name in left]
        left.difference_update(share.name for share in shares)  # others may have rows of the same
        entries = {}
        for share in shares:
            values = {
                state: _read(checkpoint, share.name, state, share.whole_shape)
                for state in (MASTER, *optimizer.entry.buffers)
            }
            step = torch.tensor(float(extra["steps"][share.name]))
            entries[share.name] = ({"step": step, **values}, group_of.get(share.name, {}))
        optimizer.write_states(entries)
    for group, saved in zip(optimizer.param_groups, extra["groups"], strict=True):
        for key, value in saved.items():
            group[key] = tuple(value) if isinstance(group.get(key), tuple) else value
    if len(of_ranks) == member.size:
        set_rng_state(extra["rng"])
    return extra


def _read(checkpoint: Checkpoint, name: str, state: str, shape: torch.Size) -> torch.Tensor:
    """Return a whole tensor, from whatever shares of it were saved."""
    tensor = name if state == MASTER else f"{state}.{name}"
    parts = {}
    for own, record in checkpoint.manifest.tensors.items():
        if whole_name(own) == tensor:
            if own == tensor and record.shape != tuple(shape):
                raise CheckpointError(
                    f"{checkpoint.folder}: {tensor} has shape {record.shape}, but {tuple(shape)} in the model; the "
                    "checkpoint is of another model"
                )
            parts[own] = torch.empty(record.shape, dtype=torch.float32)
            checkpoint.read(own, 0, parts[own].reshape(-1).numpy().view(np.uint8))
    whole = torch.empty(shape, dtype=torch.float32)
    try:
        assemble(tensor, parts, whole)
    except (ValueError, RuntimeError) as error:  # torch: shapes that do not fit
        raise CheckpointError(f"{checkpoint.folder}: {error}; the checkpoint is of another model") from error
    return whole


def rng_state() -> dict[str, Any]:
    """Return the state of all random numbers that training may use, as plain JSON."""
    kind, keys, position, has_gauss, cached = np.random.get_state()  # noqa: NPY002 - what users' code may use
    version, internal, gauss = random.getstate()
    state = {
        "torch": _text(torch.get_rng_state()),
        "python": [version, list(internal), gauss],
        "numpy": [kind, np.asarray(keys).tolist(), position, has_gauss, cached],
    }
    if torch.cuda.is_available():
        state["cuda"] = _text(torch.cuda.get_rng_state())
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Set what :func:`rng_state` returned."""
    torch.set_rng_state(_tensor(state["torch"]))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), position, has_gauss, cached))  # noqa: NPY002
    if "cuda" in state and torch.cuda.is_available():
        with contextlib.suppress(RuntimeError):  # another kind of device
            torch.cuda.set_rng_state(_tensor(state["cuda"]))


def _text(values: torch.Tensor) -> str:
    return base64.b64encode(values.numpy().tobytes()).decode()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
