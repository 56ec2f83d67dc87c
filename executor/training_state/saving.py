"""Checkpoints of training under a plan. Resumed training gives the same bits as uninterrupted training."""

import contextlib
import dataclasses
import json
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

import numpy as np
import torch

from executor.checkpoint.divided import DividedPlace, NodePlaces
from executor.checkpoint.engine import CheckpointEngine, Outcome
from executor.checkpoint.files.opening import Folder
from executor.checkpoint.files.system_calls import CheckpointError, DamagedError, Files
from executor.checkpoint.files.writer import Flusher
from executor.checkpoint.format.manifest import Manifest
from executor.checkpoint.format.reader import Checkpoint
from executor.checkpoint.levels import Level, Levels
from executor.checkpoint.nodes import Nodes
from executor.checkpoint.places.place import candidates, parse_name, step_of
from executor.prepare import OffloadedOptimizer, check_prepared
from executor.training_state.restoring import files_needed, restore
from executor.training_state.rng_state import rng_state

_PATIENCE_S = 60.0
_CLOSED_S = 600.0  # longest until rank 0 has brought the last checkpoint to all levels
_SHARED_S = 5.0  # longest until a file that another node has written is seen


@dataclasses.dataclass(frozen=True, slots=True)
class Resumed:
    """The checkpoint from which training resumes.

    Attributes:
        path: path of the checkpoint; ``None`` if there was none, so that training starts from the beginning.
        step: iterations that it contains.
        refused: why newer checkpoints were skipped.
        extra: state that was saved beside the model and the optimizer.
    """

    path: Folder | None = None
    step: int = 0
    refused: tuple[str, ...] = ()
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@final
class Checkpoints(contextlib.AbstractContextManager["Checkpoints"]):
    """Saves checkpoints of a prepared model and its optimizer, and restores them.

    Args:
        optimizer: the optimizer that ``prepare`` returned, for a session with buffers for checkpoints.
        levels: places of checkpoints, fastest first. Training writes to the first level, a folder. Each further level
            gets copies from the level above, of the steps that are multiples of its interval. Nodes may each have a
            folder of their own, but all share the last level; see [Note: Divided places] in
            :mod:`executor.checkpoint.divided`.
        on_outcome: called in another thread with the outcome of each checkpoint on each level.
        files: system calls that write into folders.

    Raises:
        ValueError: the session has no buffers for checkpoints, or the levels are not consistent.
        CheckpointError: a place cannot be used, has no room, or is shared by some nodes only.
    """

    def __init__(
        self,
        optimizer: OffloadedOptimizer,
        *levels: Level,
        on_outcome: Callable[[Outcome], None] = lambda _outcome: None,
        files: Files | None = None,
    ) -> None:
        check_prepared(optimizer)
        self._optimizer = optimizer
        self._session = session = optimizer.session
        if session.runtime.snapshots is None:
            raise ValueError("the session has no buffers for checkpoints; pass checkpoint_buffer_bytes to prepare()")
        session.runtime.enter("Checkpoints()")
        rank, size = session.collectives.rank, session.collectives.size
        nonce = int(session.collectives.broadcast(torch.tensor(secrets.randbits(32), device="cpu")))
        self._rank = rank
        self.levels = Levels(levels, on_outcome, files=files, is_first=rank == 0)
        self._nodes = nodes = Nodes(session.runtime.ranks)
        try:
            here = self._divide(nonce)
        except BaseException:
            self.levels.close()
            raise
        place = self.levels.fastest
        self._flusher = Flusher(place.files, session.runtime.snapshots.ring, patience_s=_PATIENCE_S)
        self._engine = CheckpointEngine(
            session.runtime.snapshots,
            here,
            self._flusher,
            nonce=f"{nonce:08x}" if size > 1 else "",
            on_outcome=self.levels.report,
        )
        session.runtime.snapshots.engine = self._engine
        of_nodes = np.zeros(len(nodes.nodes))
        of_nodes[nodes.node] = self._engine.num_bytes
        of_nodes = session.collectives.means(of_nodes) * size
        if nodes.is_leader:
            try:
                node_bytes = round(of_nodes[nodes.node] + of_nodes[nodes.node - 1])  # with copies of the node before's
                self.levels.check_room(round(of_nodes.sum()), node_bytes, is_first=rank == 0)
            except CheckpointError:
                self.close(on_all_ranks=False)
                raise

    def _divide(self, nonce: int) -> NodePlaces:
        """Find out of which levels every node has a folder of its own; return the places of this node.

        Raises:
            CheckpointError: some nodes share a place that others have for themselves; or none is shared by all.
        """
        nodes, folders, collectives = self._nodes, self.levels.folders, self._session.collectives
        is_shared, is_own = self._seen(nonce) if collectives.size > 1 else ([True] * len(folders), [])
        divided = [folder for folder, all_see in zip(folders, is_shared, strict=True) if folder and not all_see]
        if not divided:
            nodes.share()
            return self.levels.divide(nodes, 0)
        if divided != list(folders[: len(divided)]) or len(divided) == len(folders):
            raise CheckpointError(
                f"{divided[-1].place} is not the same on all nodes: give after it a folder on a file system that all "
                "nodes share, or a URL, from which training goes on if two neighbouring nodes are lost"
            )
        if not all(is_own[: len(divided)]):
            raise CheckpointError(
                f"{divided[is_own.index(False)].place} is shared by some nodes and not by all, or not by all ranks of "
                "a node; give a folder that each node has for itself, or that all share"
            )
        nodes.connect()
        otherwise = CheckpointError("another run writes checkpoints into a folder of another node")
        with collectives.together(otherwise):
            return self.levels.divide(nodes, len(divided))

    def _seen(self, nonce: int) -> tuple[list[bool], list[bool]]:
        """Return for each level whether all ranks see the marks of all nodes there; and whether only their node's.

        The leader of each node leaves a mark in every folder. URLs are the same on all nodes. All ranks call this
        together.

        Raises:
            CheckpointError: a mark cannot be left there.
        """
        nodes, folders, collectives = self._nodes, self.levels.folders, self._session.collectives
        marks = [f"{nonce:08x}-{node}" for node in range(len(nodes.nodes))]
        with contextlib.ExitStack() as stack:
            for folder in filter(None, folders if nodes.is_leader else ()):
                stack.enter_context(folder.marked(marks[nodes.node]))
            collectives.any(False)  # after it, all marks are there
            deadline_s = time.monotonic() + _SHARED_S
            while True:
                seen = [[folder is None or folder.has_mark(mark) for mark in marks] for folder in folders]
                later = (folder for folder, its in zip(folders, seen, strict=True) if folder and not all(its))
                if time.monotonic() > deadline_s or not any(folder.may_be_shared for folder in later):
                    break
                time.sleep(0.1)
            own = [mark == marks[nodes.node] for mark in marks]
            found = collectives.means(np.array([[all(its), its == own] for its in seen], float)) == 1
        return found[:, 0].tolist(), found[:, 1].tolist()

    def save(self, step: int, extra: Mapping[str, Any] | None = None) -> None:
        """Begin a checkpoint between two iterations.

        Tasks of the next iteration take it, and it is written during training.

        All ranks call this together.

        Args:
            step: iterations of training that the current state contains.
            extra: other state to save, as plain JSON (an LR scheduler's ``state_dict()``, the position in the data).

        Raises:
            OutOfOrderError: in the middle of an iteration.
            CheckpointError: a checkpoint was already begun after this iteration.
            RankError: another rank is in another call, or saves another step.
        """
        self._session.runtime.check_idle()
        self._session.runtime.settle_state()
        self._session.runtime.check_has_weights()
        self._session.runtime.check_unparked()
        self._session.runtime.enter(
            f"checkpoints.save({step})"
        )  # else a rank would wait for parts of others that never come
        if self._optimizer.entry.numbers:
            self._session.synchronize()  # because updates set them
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self._optimizer.param_groups]
        names = [[self._session.name_of(p) for p in group["params"]] for group in self._optimizer.param_groups]
        parameters = [parameter for _, parameter in self._session.runtime.state.by_name.values()]
        steps = {parameter.shard.name: parameter.step for parameter in parameters}
        shared = {p.shard.name: list(p.shard.whole_shape) for p in parameters if not p.shard.is_whole}
        own = {
            "optimizer": self._optimizer.entry.torch_class.__name__,
            "groups": groups,
            "parameters": names,
            "steps": steps,
            "numbers": {parameter.shard.name: parameter.numbers.get(parameter.step, ()) for parameter in parameters},
            "shapes": shared,
            "rng": rng_state(),
            **(extra or {}),
        }
        self._engine.begin(step, self._session.iteration, own)

    def finish(self) -> None:
        """Wait until all checkpoints that have begun are durable or have failed. Call it between iterations."""
        self.take_remaining()
        self._engine.wait()

    def settle(self) -> None:
        """Wait as :meth:`finish` does, and until old checkpoints on the first level are verified and removed."""
        self.finish()
        self.levels.settle()

    def take_remaining(self) -> None:
        """Take the rest of all checkpoints that have begun, now instead of in the next iteration."""
        self._session.synchronize()
        self._engine.take_remaining()

    def promote_newest(self, patience_s: float) -> None:
        """Copy the newest checkpoint to all levels, and wait at most ``patience_s``. Call :meth:`finish` first.

        If a copy has not ended by then, or at Ctrl-C, it is abandoned and reported.
        """
        self.levels.promote_newest(patience_s)

    def resume(self) -> Resumed:
        """Restore the newest whole checkpoint, see :func:`restore`. All ranks call this together.

        Each checkpoint is read only once. If any rank finds damage in it, it is skipped.

        Raises:
            CheckpointError: the checkpoint is of another model or optimizer, or no checkpoint is whole. In the second
                case the model's weights are lost.
        """
        self._session.runtime.enter("checkpoints.resume()")
        if self.levels.num_divided:
            self.finish()  # so that only one thread moves files between nodes
        there, refused = candidates(self.levels.places) if self._rank == 0 else ([], [])
        path, lost = None, False
        for level, path in self._found_by_rank_0(there):
            otherwise = DamagedError(f"{path}: another rank cannot read its part")
            is_there = False
            try:
                with contextlib.ExitStack() as stack:
                    if level < self.levels.num_divided:
                        self._gather(level, path)
                    with self._session.collectives.together(otherwise):  # restore() begins with collectives
                        checkpoint = stack.enter_context(Checkpoint(path))
                    is_there = True
                    with self._session.collectives.together(otherwise, (DamagedError,)):
                        extra = restore(self._optimizer, checkpoint)
            except DamagedError as error:
                refused.append(str(error))
                lost |= is_there
                continue
            step = checkpoint.manifest.step
            self.levels.keep_common(step)
            return Resumed(path, step, tuple(refused), extra)
        if path is not None:
            none_whole = CheckpointError(
                f"no checkpoint is whole: {'; '.join(refused)}; copy one from a backup, or start training again with "
                "another place for checkpoints"
            )
            if lost:  # parts of several are there now
                self._session.runtime.fail("resume()", none_whole)
            raise none_whole
        return Resumed(refused=tuple(refused))

    def _gather(self, level: int, path: Folder) -> None:
        """Bring to each node the files of a divided checkpoint that its ranks need, and those for its neighbour.

        Every rank says which files it needs. All ranks call this together.

        Raises:
            DamagedError: a file is on no node, or cannot be brought.
        """
        nodes, collectives = self._nodes, self._session.collectives
        place = self.levels.places[level]
        there = np.zeros((0, 0), bool)  # what each node has, on rank 0

        def held() -> str:
            nonlocal there
            assert isinstance(place, DividedPlace), "rank 0 asks all nodes"
            found, there = place.held(step_of(path))
            return found.to_json().decode()

        def bring() -> str:
            assert isinstance(place, DividedPlace), "rank 0 asks all nodes"
            place.bring(manifest, there, wanted > 0)
            return ""

        manifest = Manifest.read(self._told(held).encode())
        wanted = np.zeros((len(nodes.nodes), len(manifest.files)))
        wanted[nodes.node, sorted(files_needed(self._optimizer, manifest))] = 1.0
        wanted = collectives.means(wanted)
        self._told(bring)

    def _told(self, make: Callable[[], str]) -> str:
        """Return the text that rank 0 makes; if it cannot, all ranks raise. All ranks call this together."""

        def made() -> str:
            try:
                return json.dumps({"is": make()})
            except OSError as error:
                return json.dumps({"error": str(error)})

        told: dict[str, str] = json.loads(self._session.collectives.broadcast_text(made))
        if "error" in told:
            raise DamagedError(told["error"])
        return told["is"]

    def _found_by_rank_0(self, there: Sequence[tuple[int, Folder]]) -> Iterator[tuple[int, Folder]]:
        """Yield the checkpoints that rank 0 has found, with their levels. All ranks call this together."""
        found = iter([(level, *(parse_name(folder.name) or (0, 0))) for level, folder in there])
        while True:
            own = torch.tensor(next(found, (-1, 0, 0)), device="cpu")
            level, step, nonce = self._session.collectives.broadcast(own).tolist()
            if level < 0:
                return
            yield level, self.levels.places[level].folder(step, nonce)

    def close(self, *, on_all_ranks: bool = True) -> None:
        """Abandon unfinished snapshots and copies to other levels, and wait for files that are being written.

        Closing twice is allowed. If not all ranks close now, because of an error, this one waits for no other.
        """
        self._session.runtime.doing = "checkpoints.close()"
        self._engine.close()
        if self._session.runtime.snapshots is not None:
            self._session.runtime.snapshots.engine = None
        self._flusher.close()
        self.levels.close(patience_s=_CLOSED_S if on_all_ranks else 0.0)

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        self.close(on_all_ranks=error is None)
