"""Checkpoints on several levels: training writes to the fastest, and each slower one gets copies from the one above.

One thread for each level does what an arriving checkpoint asks for: on the fastest level it verifies what training has
written, on a slower one it copies. Then it removes old checkpoints.

Every chunk of a copy is checked three times: when it is read, just before it is written, and when it
is read again in its new place, before the copy gets its name. During a copy, retention does not remove the source. Each
level copies one checkpoint at a time, and one more may wait. A newer checkpoint replaces the one that waits, which is
then not copied. A failure loses that checkpoint in that place, and nothing else.

Retention removes old checkpoints only if enough newer ones were read again and verified. But reading
takes bandwidth from writes that training may wait for. So the fastest level's thread reads one checkpoint at a time,
always the newest. Once enough checkpoints are verified, the unread ones are removed. If intervals are long, all
checkpoints are read. The thread reads for at most a share of the time
(:data:`planner.checkpoints.policy.READING_SHARE`). Otherwise, with a checkpoint at every iteration, the next checkpoint
would wait for the drive.
"""

import contextlib
import dataclasses
import functools
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, final

from executor.checkpoint.divided import DividedPlace, NodePlaces
from executor.checkpoint.engine import Outcome
from executor.checkpoint.files.lock import run_lock
from executor.checkpoint.files.opening import Folder
from executor.checkpoint.files.system_calls import CheckpointError, Files
from executor.checkpoint.files.writer import lower_thread_priority
from executor.checkpoint.format.reader import Checkpoint
from executor.checkpoint.places.folder import FolderPlace
from executor.checkpoint.places.locating import is_remote, place_at
from executor.checkpoint.places.place import Place
from planner.checkpoints.policy import EXTRA_CHECKPOINTS, READING_SHARE
from planner.terms import MIN_CHECKPOINTS

if TYPE_CHECKING:
    from executor.checkpoint.nodes import Nodes  # which imports torch

DEFAULT_EVERY: Final = 100
PATIENCE_S: Final = 60.0
"""Longest wait, at the end of training, until a checkpoint has been verified."""

_END_S: Final = 10.0  # longest wait for a thread to end; one that hangs is left running


@dataclasses.dataclass(frozen=True, slots=True)
class Level:
    """A place for checkpoints, and their interval.

    Attributes:
        place: a folder, or a URL that ``fsspec`` knows.
        every: iterations between checkpoints, a multiple of the interval of the level above. The last checkpoint of a
            run is copied too.
        keep: number of checkpoints to retain, at least two.
    """

    place: str | Path
    every: int = DEFAULT_EVERY
    keep: int = MIN_CHECKPOINTS


def check_levels(levels: Sequence[Level]) -> None:
    """Check that levels are consistent.

    Raises:
        ValueError: there are no levels, the first one is not a folder, two levels have the same place, or an interval
            is less than 1 or not a multiple of the interval above.
    """
    if not levels:
        raise ValueError("there is no place for checkpoints; give at least one level")
    if is_remote(levels[0].place):
        raise ValueError(
            f"{levels[0].place} is not a folder, but training writes only into folders; give a folder as the level "
            "before it, from which its checkpoints are copied"
        )
    for level in levels:
        if level.every < 1:
            raise ValueError(f"{level.place} has a checkpoint every {level.every} iterations; give 1 or more")
    for above, level in itertools.pairwise(levels):
        if level.every % above.every:
            raise ValueError(
                f"{level.place} gets its checkpoints from {above.place}, which has one every {above.every} iterations, "
                f"so {level.every} is not a valid interval; give a multiple, such as "
                f"{-(-level.every // above.every) * above.every}"
            )
    places = [str(level.place).rstrip("/") for level in levels]
    if len(set(places)) < len(places):
        raise ValueError(f"{', '.join(places)}: two levels have the same place; give each level its own place")


@final
class _Worker:
    """A thread of lowest priority. It works on one checkpoint, and one more waits. A newer one replaces the latter.

    Args:
        name: name of the thread.
        work: works on a checkpoint of a faster level, and returns how long the thread rests afterwards, in seconds.
        at_end: called when the thread ends.
    """

    def __init__(self, name: str, work: Callable[[Outcome], float], at_end: Callable[[], None]) -> None:
        self._work = work
        self._at_end = at_end
        self._changed = threading.Condition()  # guards the fields below
        self._under_way: Outcome | None = None
        self._waiting: Outcome | None = None
        self._num_callers = 0  # that wait until everything is done
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, checkpoint: Outcome) -> Outcome | None:
        """Work on one after the current one, unless a newer one is submitted first; return the replaced one."""
        with self._changed:
            replaced, self._waiting = self._waiting, checkpoint
            self._changed.notify_all()
        return replaced

    def wait(self, deadline_s: float) -> bool:
        """Wait without rest until all work is done, or ``time.monotonic()`` is ``deadline_s``; return whether it is."""
        with self._changed:
            self._num_callers += 1
            self._changed.notify_all()
            try:
                return self._changed.wait_for(
                    lambda: self._under_way is None and self._waiting is None, max(deadline_s - time.monotonic(), 0)
                )
            finally:
                self._num_callers -= 1

    def close(self, patience_s: float) -> Outcome | None:
        """End the thread when all work is done; return what it still works on after ``patience_s``."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(patience_s)
        return self._under_way if self._thread.is_alive() else None

    def _run(self) -> None:
        lower_thread_priority()
        while (checkpoint := self._next()) is not None:
            rest_s = 0.0
            try:
                rest_s = self._work(checkpoint)
            finally:
                with self._changed:
                    self._under_way = None
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self._is_closed or self._num_callers > 0, rest_s)
        with contextlib.suppress(OSError):
            self._at_end()

    def _next(self) -> Outcome | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting is not None or self._is_closed)
            self._under_way, self._waiting = self._waiting, None
            return self._under_way


@final
class Levels:
    """The places of a run's checkpoints: copies between them, and retention.

    Args:
        levels: fastest first. The first level is a folder.
        on_outcome: called with the outcome of each checkpoint on each level, in any thread.
        files: system calls that write into folders.
        is_first: whether this is rank 0. Rank 0 copies and removes; other ranks only read, but see :meth:`divide`.

    Attributes:
        levels: the given levels.
        places: their places, in the same order.
        folders: those of them that are folders of this node; ``None`` at URLs.
        num_divided: levels, fastest first, of which every node has a folder of its own.

    Raises:
        ValueError: the levels are not consistent.
        CheckpointError: a place cannot be used, or another run writes there.
    """

    def __init__(
        self,
        levels: Sequence[Level],
        on_outcome: Callable[[Outcome], None],
        *,
        files: Files | None = None,
        is_first: bool = True,
    ) -> None:
        check_levels(levels)
        self.levels = tuple(levels)
        self.places: tuple[Place, ...] = tuple(place_at(level.place, files) for level in levels)
        self.folders = tuple(place if isinstance(place, FolderPlace) else None for place in self.places)
        with contextlib.ExitStack() as locks:
            for folder in filter(None, self.folders if is_first else ()):
                locks.enter_context(run_lock(folder.root))
            self._locks = locks.pop_all()  # locked until closed; see [Note: One run]
        self.num_divided = 0
        self.here: NodePlaces | None = None  # places of this node, since :meth:`divide`
        self._on_outcome = on_outcome
        self._newest: Outcome | None = None
        self._last_step = -1  # goes to all levels, also to those whose interval is not due
        self._num_whole = 0
        self._end: str | None = None  # why copying has ended
        self._workers = [
            _Worker(
                f"checkpoint level {index}",
                functools.partial(self._copy, index) if index else self._verify,
                (lambda: None) if folder is None else folder.remove_spares,
            )
            for index, folder in enumerate(self.folders if is_first else ())
        ]

    def divide(self, peers: "Nodes", num_divided: int) -> NodePlaces:
        """Do the same on all nodes from now on; see [Note: Divided places] in :mod:`executor.checkpoint.divided`.

        All ranks call it before the first checkpoint, when no other run uses their folders.

        Args:
            peers: all ranks.
            num_divided: levels, fastest first, of which every node has a folder of its own.

        Returns:
            The places of this node.

        Raises:
            CheckpointError: another run has locked a folder of this node.
        """
        self.num_divided = num_divided
        self.here = here = NodePlaces(peers, self.places, num_divided, self._check_open)
        if peers.rank == 0:
            divided = (DividedPlace(here, level) for level in range(num_divided))
            self.places = (*divided, *self.places[num_divided:])
        elif peers.is_leader:
            for folder in filter(None, self.folders[:num_divided]):
                self._locks.enter_context(run_lock(folder.root))
            here.follow_levels()
        return here

    @property
    def fastest(self) -> FolderPlace:
        """The folder that training writes to."""
        folder = self.folders[0]
        assert folder is not None, "training writes into a folder"
        return folder

    def report(self, outcome: Outcome) -> None:
        """Report the outcome of a checkpoint that training wrote, and submit the checkpoint to the levels below."""
        self._on_outcome(outcome)
        if outcome.path is not None and outcome.error is None:
            self._newest = outcome
            self._submit(1, outcome)
            for worker in self._workers[:1]:
                worker.submit(outcome)
                self._prune(outcome, reads=False)

    def keep_common(self, step: int) -> None:
        """Remove what nodes do not all have, or is newer than a step: what a crash or the loss of a node has left."""
        for place in self.places:
            if isinstance(place, DividedPlace):
                of_nodes = place.steps()
                for other in set().union(*of_nodes):
                    if other > step or any(other not in steps for steps in of_nodes):
                        place.remove(place.folder(other))

    def check_room(self, num_bytes: int, node_bytes: int = 0, *, is_first: bool = True) -> None:
        """Check that every folder has room for retained and new checkpoints, and one that the level below still reads.

        Args:
            num_bytes: of a checkpoint.
            node_bytes: of its files on this node, where every node has a folder of its own.
            is_first: whether this is rank 0, which checks the folders that nodes share.

        Raises:
            CheckpointError: a folder has too little room.
        """
        for index, (level, folder) in enumerate(zip(self.levels, self.folders, strict=True)):
            is_read, is_divided = index + 1 < len(self.levels), index < self.num_divided
            if folder is not None and (is_first or is_divided):
                num_checkpoints = max(level.keep, MIN_CHECKPOINTS) + EXTRA_CHECKPOINTS + is_read
                folder.check_room(num_checkpoints, node_bytes if is_divided else num_bytes)

    def settle(self) -> None:
        """Wait, at most :data:`PATIENCE_S`, until the newest checkpoint of training is verified."""
        for worker in self._workers[:1]:
            worker.wait(time.monotonic() + PATIENCE_S)

    def promote_newest(self, patience_s: float) -> None:
        """Copy the newest checkpoint to all levels, and wait at most ``patience_s``.

        Copies that have not ended by then, or at Ctrl-C, are abandoned and reported.
        """
        copying = self._workers[1:]
        if self._newest is None or not copying:
            return
        deadline_s = time.monotonic() + patience_s
        self._last_step = self._newest.step
        self._submit(1, self._newest)
        try:
            done = all(worker.wait(deadline_s) for worker in copying)
            why = f"not within {patience_s:g} s after training"
        except KeyboardInterrupt:
            done, why = False, "abandoned when training was interrupted again"
        if not done:
            self.close(why)

    def close(self, why: str = "still being copied when checkpoints were closed", patience_s: float = 0.0) -> None:
        """Abandon copies that have not ended, and report this reason. Closing twice is allowed.

        Leaders other than rank 0 wait for at most ``patience_s`` until rank 0 has closed.
        """
        if self._end is not None:
            return
        if self.here is not None:
            self.here.wait(patience_s)
        self._end = why
        for level, worker in enumerate(self._workers):
            hanging = worker.close(_END_S)
            if hanging is not None and level:
                self._fail(level, hanging, f"{why}; the place has not answered for {_END_S:g} s")
        if self.here is not None:
            self.here.end()
        self._locks.close()

    def _submit(self, level: int, source: Outcome) -> None:
        """Submit a checkpoint to a level, if its interval is due. That level submits it to the next one."""
        if level >= len(self._workers):
            return
        if source.step != self._last_step and source.step % self.levels[level].every:
            return
        replaced = self._workers[level].submit(source)
        if replaced is not None and replaced.step != source.step:
            self._fail(
                level,
                replaced,
                f"step {source.step} replaced it before it was copied, because this level is too slow; give the level "
                "a longer interval",
            )
            self._submit(level + 1, replaced)

    def _verify(self, outcome: Outcome) -> float:
        """Verify a checkpoint of training and remove old ones."""
        begin_s = time.monotonic()
        assert outcome.path is not None, "only written checkpoints are submitted"
        try:
            with self.places[0].reading(outcome.path):
                self._num_whole += self.places[0].verify(outcome.path)
        except CheckpointError as error:  # checkpoints are being closed, or a node is lost or could not do something
            if self._end is None:
                self._fail(0, outcome, f"not verified: {error}")
            return 0.0
        self._prune(outcome, reads=False)
        if self._num_whole < max(self.levels[0].keep, MIN_CHECKPOINTS):  # until then, nothing can be removed
            return 0.0
        return (time.monotonic() - begin_s) * (1 / READING_SHARE - 1)

    def _copy(self, level: int, source: Outcome) -> float:
        """Copy a checkpoint to a level and submit it to the next one: the copy, or the original if copying failed."""
        try:
            path = self._put(level, source)
        except Exception as error:  # noqa: BLE001 - drivers raise any error, and only this copy may fail
            self._fail(level, source, str(error) or type(error).__name__)
        else:
            source = source.on_level(level, path)
            self._on_outcome(source)
            self._prune(source, reads=True)
        self._submit(level + 1, source)
        return 0.0

    def _put(self, level: int, source: Outcome) -> Folder:
        assert source.path is not None, "only written checkpoints are submitted"
        self._check_open()
        above = self.places[source.level]
        with above.reading(source.path):
            if source.path not in above.folders():
                raise CheckpointError(
                    f"{source.path} was removed for newer checkpoints before it was copied: keep more there, or give "
                    "this level a longer interval"
                )
            copy = None
            if source.level < self.num_divided:
                copy = functools.partial(self._copy_on_nodes, level, source)
            with Checkpoint(source.path) as checkpoint:
                return self.places[level].put(checkpoint, self._check_open, copy)

    def _copy_on_nodes(self, level: int, source: Outcome, name: str) -> None:
        assert self.here is not None, "only nodes with folders of their own copy together"
        order = {"do": "copy", "level": level, "source": source.level, "step": source.step, "name": name}
        self.here.ask(order, check=self._check_open)

    def _check_open(self) -> None:
        if self._end is not None:
            raise CheckpointError(self._end)

    def _prune(self, outcome: Outcome, *, reads: bool) -> None:
        """Remove old checkpoints after a new one has arrived."""
        try:
            self.places[outcome.level].prune(self.levels[outcome.level].keep, reads=reads)
        except OSError as error:
            self._on_outcome(dataclasses.replace(outcome, error=f"older checkpoints could not be removed: {error}"))

    def _fail(self, level: int, source: Outcome, why: str) -> None:
        self._on_outcome(source.on_level(level, None, f"not in {self.places[level].place}: {why}"))
