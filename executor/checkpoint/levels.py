"""Checkpoints on several levels.

Training writes to the fastest level; each slower level gets copies from the one above.
"""

import contextlib
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, final

from executor.checkpoint.engine import Outcome
from executor.checkpoint.files.lock import RunLock
from executor.checkpoint.files.system_calls import Files
from executor.checkpoint.places.locating import check_reachable, check_room, is_remote, store_at
from executor.checkpoint.places.retention import MIN_CHECKPOINTS, AbstractStore
from executor.checkpoint.places.store import Store
from executor.checkpoint.promotion import Promoter, PromotionRequest

DEFAULT_EVERY: Final = 100
EXTRA_CHECKPOINTS: Final = 2
"""Number of checkpoints beside the retained ones: the newest, which is not verified yet, and the one being written."""


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
class Levels:
    """The places of a run's checkpoints, and the copies between them.

    Args:
        levels: fastest first. The first level is a folder.
        on_outcome: called with the outcome of each checkpoint on each level, in any thread.
        files: system calls that write into folders.
        is_first: whether this is rank 0. Rank 0 copies; other ranks only read.
        several_nodes: whether the ranks are on several nodes.

    Attributes:
        levels: the given levels.
        stores: their places, in the same order.

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
        several_nodes: bool = False,
    ) -> None:
        check_levels(levels)
        self.levels = tuple(levels)
        self.stores: tuple[AbstractStore, ...] = tuple(store_at(level.place, files) for level in levels)
        for store in self.stores if several_nodes else ():
            check_reachable(store)
        self._locks = contextlib.ExitStack()  # locked until closed; see [Note: One run]
        with contextlib.ExitStack() as failing:
            for store in self.stores if is_first else ():
                if isinstance(store, Store):
                    failing.callback(RunLock(store.root).close)
            self._locks = failing.pop_all()
        self._on_outcome = on_outcome
        self._newest: PromotionRequest | None = None
        self._promoters = [
            Promoter(
                index, self.stores[index], levels[index].keep, on_outcome, functools.partial(self._submit, index + 1)
            )
            for index in (range(1, len(levels)) if is_first else ())
        ]

    @property
    def fastest(self) -> Store:
        """The store that training writes to."""
        store = self.stores[0]
        assert isinstance(store, Store)
        return store

    def report(self, outcome: Outcome) -> None:
        """Report the outcome of a checkpoint that training wrote, and submit the checkpoint to the levels below."""
        self._on_outcome(outcome)
        if outcome.path is not None and outcome.error is None:
            self._newest = PromotionRequest(
                outcome.step, outcome.path, self.fastest, always=False, begin_s=time.monotonic()
            )
            self._submit(1, self._newest)

    def check_room(self, num_bytes: int) -> None:
        """Check that every folder has room for retained and new checkpoints, and one that the level below still reads.

        Raises:
            CheckpointError: a folder has too little room.
        """
        for index, (level, store) in enumerate(zip(self.levels, self.stores, strict=True)):
            is_read = index + 1 < len(self.levels)
            check_room(store, max(level.keep, MIN_CHECKPOINTS) + EXTRA_CHECKPOINTS + is_read, num_bytes)

    def promote_newest(self, patience_s: float) -> None:
        """Copy the newest checkpoint to all levels, and wait at most ``patience_s``.

        Copies that have not ended by then, or at Ctrl-C, are abandoned and reported.
        """
        if self._newest is None or not self._promoters:
            return
        deadline_s = time.monotonic() + patience_s
        self._submit(1, dataclasses.replace(self._newest, always=True))
        try:
            done = all(promoter.wait(deadline_s) for promoter in self._promoters)
            why = f"not within {patience_s:g} s after training"
        except KeyboardInterrupt:
            done, why = False, "abandoned when training was interrupted again"
        if not done:
            self.close(why)

    def close(self, why: str = "still being copied when checkpoints were closed") -> None:
        """Abandon copies that have not ended, and report this reason. Closing twice is allowed."""
        for promoter in self._promoters:
            promoter.close(why)
        self._locks.close()

    def _submit(self, index: int, request: PromotionRequest) -> None:
        """Submit a checkpoint to a level, if its interval is due. That level submits it to the next one."""
        if index <= len(self._promoters) and (request.always or request.step % self.levels[index].every == 0):
            self._promoters[index - 1].submit(request)
