"""What the iterations do whose batches have another shape than planned; see [Note: Other shapes]."""

from typing import Final, final

from executor.driver.runtime import Runtime

_MANY: Final = 4  # other shapes of batches from which on each is expected to be new


@final
class OtherShapes:
    """Notes batches of other shapes, and leaves their iterations out of comparisons.

    Attributes:
        latest: the latest iteration that had one.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.latest = -2
        self._runtime = runtime
        self._seen: set[tuple[int, ...]] = set()

    def note(self, shape: tuple[int, ...]) -> None:
        """A forward of the plan begins with a batch of another shape."""
        loop = self._runtime.loop
        if len(self._seen) < _MANY:
            self._seen.add(tuple(shape))
        expected = loop.expected()
        # In the middle of an iteration, forward may have run that is still to be recomputed.
        if len(self._seen) == _MANY and expected is not None and not expected.micro_batch:
            self._runtime.backend.expect_many_shapes()
        if self.latest != loop.iteration:
            self.latest = loop.iteration
            self._runtime.machine.exclude(self.latest)
