"""Choose the levels and intervals of checkpoints for a plan, given the expected failures.

Every set of levels that survives all failures is tried. Training writes the fastest level of a
set; a background thread fills each slower level from the one above. On several nodes, memory and drives also have what
the node before saves ([Note: Divided places] in :mod:`executor.checkpoint.divided`). So they survive the loss of a
node. Neighbours that are lost within one restart are left to the file system that all nodes share. The simulator says
what each level costs and how long it takes, and :mod:`planner.checkpoints.interval` finds the intervals. If checkpoints
come so close that they overlap, the interval and its neighbours are simulated with overlaps, and the one with the least
waste wins.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from planner.checkpoints.costs import hash_bytes_per_s, storage_of
from planner.checkpoints.interval import CheckpointsError, Nested, Protection, check, nest
from planner.checkpoints.policy import CHUNK_BYTES, EXTRA_CHECKPOINTS, LEAST_BUFFER_BYTES
from planner.checkpoints.trial import Trial
from planner.plan.checkpoints import Bound, CheckpointLevel, CheckpointPlan, CheckpointRequest
from planner.plan.document import Plan
from planner.schedule.tasks import Tier
from planner.terms import DAY_S, LEVELS, Level

_NOT_WORTH_MEMORY = 1e-4  # of the time
NOT_WORTH_IT: Final = "does not pay"
"""Why a level is left out that could be used."""


def choose_checkpoints(plan: Plan, request: CheckpointRequest, trial: Trial | None = None) -> CheckpointPlan:
    """Return the levels and intervals that waste the least of a plan's time.

    Args:
        plan: what is trained, and where.
        request: failures and limits.
        trial: the plan's simulations, to be shared by several calls for one plan.

    Raises:
        CheckpointsError: no level survives the failures, or the limits contradict each other.
    """
    trial = trial or Trial(plan)
    found: list[tuple[_Choice, tuple[Level, ...], Nested]] = []
    errors: list[CheckpointsError] = []
    for buffer_bytes in _buffers(trial, request):
        try:
            choice = _Choice(plan, request, trial, buffer_bytes)
            found.append((choice, *choice.best()))
        except CheckpointsError as error:
            errors.append(error)
    if not found:
        raise errors[-1]
    least = min(nested.waste for _, _, nested in found)
    choice, levels, nested = next(each for each in found if each[-1].waste <= least + _NOT_WORTH_MEMORY)
    return choice.made(levels, choice.confirmed(levels, nested))


def _buffers(trial: Trial, request: CheckpointRequest) -> list[int]:
    """Return sizes of a rank's buffer to try, smallest first: the one asked for, or up to its whole checkpoint."""
    if request.buffer_bytes is not None:
        return [request.buffer_bytes]
    most_bytes = trial.free_bytes(Tier.HOST) // trial.cost.ranks_per_node
    wanted = {trial.shard_bytes >> 2, trial.shard_bytes + CHUNK_BYTES - 1}
    larger = {min(size, most_bytes) // CHUNK_BYTES * CHUNK_BYTES for size in wanted}
    return [LEAST_BUFFER_BYTES, *sorted(size for size in larger if size > LEAST_BUFFER_BYTES)]


class _Choice:
    """The choice for one size of buffer."""

    def __init__(self, plan: Plan, request: CheckpointRequest, trial: Trial, buffer_bytes: int) -> None:
        self._request = request
        self._iteration_s = plan.prediction.iteration_s
        self._profile = plan.hardware
        self._trial = trial
        self._buffer_bytes = buffer_bytes
        cost = trial.cost
        self._node_bytes = trial.num_copies * trial.node_bytes
        self._all_bytes = trial.all_bytes
        self._ring_bytes = buffer_bytes * cost.ranks_per_node
        if (free_bytes := self._trial.free_bytes(Tier.HOST)) < self._ring_bytes:
            raise CheckpointsError(
                f"checkpoints need {_size(self._ring_bytes)} of each host for what is not written yet, and the plan "
                f"leaves {_size(free_bytes)}; leave more of it free, or give less with --checkpoints buffer=SIZE"
            )
        self._limits = (request.max_overhead, request.max_lost_s)
        self._left_out = {level: why for level in LEVELS if (why := self._why_not(level))}

    def made(self, levels: tuple[Level, ...], chosen: Nested) -> CheckpointPlan:
        """Return a choice as it stands in a plan."""
        left_out = self._left_out | {level: NOT_WORTH_IT for level in LEVELS if level not in {*levels, *self._left_out}}
        return CheckpointPlan(
            request=self._request,
            iteration_s=self._iteration_s,
            size_bytes=self._all_bytes,
            buffer_bytes=self._buffer_bytes,
            node_buffer_bytes=self._ring_bytes,
            levels=tuple(self._rows(levels, chosen)),
            left_out=left_out,
            waste=chosen.waste,
            overhead=chosen.overhead,
            most_lost_s=chosen.most_lost_s,
            engines=(),
            assumptions=tuple(self._assumptions(levels)),
        )

    # --- levels

    def _why_not(self, level: Level) -> str | None:
        """Return why a level cannot be used; ``None`` if it can."""
        count, storage = self._request.keep + EXTRA_CHECKPOINTS, storage_of(self._trial.cost, level)
        if level != "memory" and storage is None:
            return f"profile {self._profile.name} has none"
        free_bytes, size_bytes = {
            "memory": (self._trial.free_bytes(Tier.HOST) - self._ring_bytes, self._node_bytes),
            "nvme": (self._trial.free_bytes(Tier.NVME), self._node_bytes),
            "pfs": (int(storage.capacity_bytes.value) if storage else 0, self._all_bytes),
        }[level]
        if count * size_bytes > free_bytes:
            free = _size(max(free_bytes, 0))
            return f"{count} checkpoints of {_size(size_bytes)} have no room in the {free} that are free"
        if level == "nvme" and self._endured_s() == math.inf:
            written = self._trial.written_bytes * DAY_S / self._iteration_s
            return f"training alone writes {_size(written)} a day, as much as the drives endure or more"
        return None

    def _endured_s(self) -> float:
        """Return the shortest time between checkpoints, in seconds, that the endurance of the node's drives allows."""
        if (per_day := self._endured_bytes_per_day()) is None:
            return 0.0
        rate = per_day / DAY_S - self._trial.written_bytes / self._iteration_s
        return self._node_bytes / rate if rate > 0 else math.inf

    def _endured_bytes_per_day(self) -> float | None:
        """Return the bytes per day that the node's drives endure: asked for, or from the profile; ``None``: unknown."""
        nvme, writes = self._profile.nvme, self._request.drive_writes_per_day
        if nvme is None:
            return None
        if writes is not None:
            return writes * nvme.capacity_bytes.value
        return nvme.endurance_bytes_per_day.value if nvme.endurance_bytes_per_day else None

    def _sets(self) -> Iterator[tuple[Level, ...]]:
        """Yield the sets of levels that survive all failures and whose slowest level is needed for some of them."""
        usable = [level for level in LEVELS if level not in self._left_out]
        for count in range(1, len(usable) + 1):
            for levels in itertools.combinations(usable, count):
                served = self._rates(levels)
                if served is not None and served[-1] > 0:
                    yield levels

    def _rates(self, levels: tuple[Level, ...]) -> list[float] | None:
        """Return the failures per second from which each level recovers; ``None`` if some have no level."""
        rates = dict.fromkeys(levels, 0.0)
        if self._is_copied(levels):
            rates[levels[0]] = self._request.failures_per_s
            lost_per_s = self._nodes_lost_per_s
            if levels[-1] == "pfs":
                neighbours = min(self._trial.num_nodes - 1, 2)
                again_s = self._request.restart_s + self._trial.restored_s(levels[0]) + self._trial.fetched_s()
                rates["pfs"] = lost_per_s**2 * again_s * neighbours / self._trial.num_nodes
            elif lost_per_s and "pfs" not in self._left_out:
                return None
            return list(rates.values())
        for kind, mtbf_s in self._request.mtbf_s.items():
            surviving = [level for level in levels if LEVELS.index(level) >= LEVELS.index(kind)]
            if not surviving:
                return None
            rates[surviving[0]] += 1 / mtbf_s
        return list(rates.values())

    def _is_copied(self, levels: tuple[Level, ...]) -> bool:
        """Return whether the next node has copies on the fastest of some levels."""
        return self._trial.num_copies > 1 and levels[0] != "pfs"

    @property
    def _nodes_lost_per_s(self) -> float:
        return sum(1 / mtbf_s for kind, mtbf_s in self._request.mtbf_s.items() if kind != "memory")

    # --- what they cost

    def _protections(self, levels: tuple[Level, ...], every: int | None = None) -> list[Protection]:
        """Return each level's cost and failures; ``every`` is the fastest level's interval, if known."""
        rates = self._rates(levels)
        assert rates is not None, "only sets that survive everything are looked at"
        found, latency_s = [], 0.0
        for position, (level, rate) in enumerate(zip(levels, rates, strict=True)):
            if position == 0:
                measured = self._saved(level, every)
                if self._is_copied(levels):
                    copied = self._trial.promoted(level, level)
                    measured = Protection(measured.cost_s + copied.cost_s, measured.latency_s + copied.latency_s)
                drained_s = measured.latency_s - measured.cost_s  # training waits for the rest
            else:
                measured = self._trial.promoted(levels[position - 1], level)
                drained_s = measured.latency_s
            latency_s += measured.latency_s
            restart_s = self._request.restart_s + self._trial.restored_s(level)
            is_copied = self._is_copied(levels)
            if is_copied and position == 0:
                restart_s += self._trial.fetched_s() * self._nodes_lost_per_s / self._request.failures_per_s
            least_s = max(drained_s, self._endured_s() if level == "nvme" else 0.0)
            found.append(Protection(measured.cost_s, latency_s, restart_s, rate, is_copied and level == "pfs", least_s))
        return found

    def _saved(self, level: Level, every: int | None) -> Protection:
        alone = self._trial.saved(level, self._buffer_bytes)
        if every is None or every * self._iteration_s >= alone.latency_s:
            return alone  # each checkpoint is written before the next one begins
        return self._trial.saved(level, self._buffer_bytes, every)

    # --- the best

    def best(self) -> tuple[tuple[Level, ...], Nested]:
        """Return the set and the intervals that waste least, if each checkpoint costs as much as one alone.

        Raises:
            CheckpointsError: nothing survives the failures, or the limits contradict each other.
        """
        found: list[tuple[tuple[Level, ...], Nested]] = []
        errors: list[CheckpointsError] = []
        for levels in self._sets():
            protections = self._protections(levels)
            try:
                found.append((levels, nest(protections, self._iteration_s, *self._limits)))
            except CheckpointsError as error:
                errors.append(error)
        if found:
            return min(found, key=lambda pair: pair[1].waste)
        raise self._contradiction(errors) if errors else self._nothing_survives()

    def confirmed(self, levels: tuple[Level, ...], nested: Nested) -> Nested:
        """Simulate the intervals and their neighbours with overlapping checkpoints, and return the best.

        Raises:
            CheckpointsError: none is within the limits.
        """
        ratios = [b // a for a, b in itertools.pairwise(nested.every)]
        found, errors = [], []
        best = nested.every[0]
        for first in sorted({best - 1, best, best + 1, best + 2, 2 * best} - {0}):  # limits may need the longer ones
            protections = self._protections(levels, first)
            every = tuple(itertools.accumulate([first, *ratios], lambda a, b: a * b))
            try:
                found.append(check(protections, every, self._iteration_s, *self._limits))
            except CheckpointsError as error:
                errors.append(error)
        if not found:
            raise self._contradiction(errors)
        return min(found, key=lambda each: each.waste)

    def _contradiction(self, errors: list[CheckpointsError]) -> CheckpointsError:
        overheads = [error.least_overhead for error in errors if error.least_overhead is not None]
        losses_s = [error.least_lost_s for error in errors if error.least_lost_s is not None]
        limits, ways = [], []
        if self._request.max_overhead is not None:
            limits.append(f"--checkpoints max-overhead={100 * self._request.max_overhead:g}%")
            ways += [f"allow {100 * min(overheads):.3g} % of overhead"] if overheads else []
        if self._request.max_lost_s is not None:
            limits.append(f"--checkpoints max-lost-work={self._request.max_lost_s:g}s")
            ways += [f"{'' if ways else 'allow '}{min(losses_s):.3g} s of lost work"] if losses_s else []
        if not ways:
            limits = limits or ["an iteration between checkpoints"]
            ways.append("write to faster storage")
        return CheckpointsError(f"no checkpoints keep {' and '.join(limits)}; {', or '.join(ways)}")

    def _nothing_survives(self) -> CheckpointsError:
        slowest = max(self._request.mtbf_s, key=LEVELS.index)
        needed = LEVELS[LEVELS.index(slowest) :]
        reasons = "; ".join(f"{level}: {self._left_out[level]}" for level in needed if level in self._left_out)
        return CheckpointsError(
            f"no storage is left that survives what {slowest}={self._request.mtbf_s[slowest]:.0f}s stands for "
            f"({reasons}); make room, choose a profile that has it, or give --checkpoints pfs-bandwidth=SIZE"
        )

    # --- in words and rows

    def _rows(self, levels: tuple[Level, ...], chosen: Nested) -> Iterable[CheckpointLevel]:
        protections = self._protections(levels, chosen.every[0])
        for position, (level, every, each) in enumerate(zip(levels, chosen.every, protections, strict=True)):
            size_bytes = self._all_bytes if level == "pfs" else self._node_bytes
            yield CheckpointLevel(
                level=level,
                every=every,
                bound=self._bound(position, levels, chosen, protections),
                cost_s=each.cost_s,
                latency_s=each.latency_s,
                restart_s=each.restart_s,
                mtbf_s=1 / each.failures_per_s if each.failures_per_s else None,
                stored_bytes=(self._request.keep + EXTRA_CHECKPOINTS) * size_bytes,
                written_bytes_per_day=size_bytes * DAY_S * (1 - chosen.waste) / (every * self._iteration_s),
            )

    def _bound(
        self, position: int, levels: tuple[Level, ...], chosen: Nested, protections: Sequence[Protection]
    ) -> Bound:
        """Return what decided the interval of one of the levels."""
        before = chosen.every[position - 1] if position else 1
        fewer_s, least_s = (chosen.every[position] - before) * self._iteration_s, protections[position].least_s
        if fewer_s < least_s and least_s > self._iteration_s:
            endured = levels[position] == "nvme" and self._endured_s() == least_s
            return "endurance" if endured else "drain"
        if chosen.every[position] == 1:
            return "iteration"
        free, (max_overhead, max_lost_s) = nest(protections, self._iteration_s), self._limits
        if max_overhead is not None and free.overhead > max_overhead:
            return "overhead"
        if max_lost_s is not None and free.most_lost_s > max_lost_s:
            return "lost work"
        return "waste"

    def _assumptions(self, levels: tuple[Level, ...]) -> Iterator[str]:
        yield f"restart: {self._request.restart_s:g} s until state can be read"
        hashing = hash_bytes_per_s(self._profile.host)
        yield f"checksums: {hashing.value / 1e9:.3g} GB/s per core ({hashing.provenance.source})"
        if self._endured_bytes_per_day() is None:
            yield "drives endure whatever is written (--checkpoints drive-writes-per-day says how much, or the profile)"
        elif self._request.drive_writes_per_day is None:
            yield f"drives endure {_size(self._endured_bytes_per_day() or 0.0)} a day, as the profile says"
        yield "failures come at exponential times"
        if len(levels) > 1:
            yield "one thread of each node fills a slower level from the one above"
        if self._is_copied(levels):
            yield "each node also has what the node before saves, so a lost node costs as much as a lost process"
            if levels[-1] != "pfs":
                yield "what is run needs a place after these that all nodes share (--checkpoints pfs-bandwidth=SIZE)"


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 1e12:.3g} TB" if num_bytes >= 1e12 else f"{num_bytes / 1e9:.3g} GB"
