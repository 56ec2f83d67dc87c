"""The cost of checkpoints for a plan, by simulating training with and without them."""

import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable

from planner.checkpoints.costs import CheckpointCosts
from planner.checkpoints.interval import Protection
from planner.checkpoints.lowering import (
    MakeSaver,
    Run,
    Saver,
    bytes_by_stage,
    coarse,
    state_of,
    with_checkpoints,
    with_promotion,
)
from planner.checkpoints.policy import CHUNK_BYTES, NUM_THREADS, READING_SHARE
from planner.costs.model import STORAGE_WRITES, CostModel
from planner.lowering import stages
from planner.plan.document import Plan
from planner.schedule.tasks import Lane, Op, Tier
from planner.schedule.timeline import Timeline
from planner.simulate.machine import run
from planner.simulate.prediction import capacities
from planner.terms import Level


@dataclasses.dataclass(frozen=True)
class RunTimes:
    """Times of a run with checkpoints, in seconds.

    Attributes:
        end_to_end_s: until everything was computed and written.
        over_s: until checkpoints were also read again.
        training_s: until everything was computed.
        blocked_s: for each checkpoint, how long training tasks waited for it that could have run.
        latency_s: for each checkpoint, from the time when its state was complete until it was written; in a pipeline,
            of the slowest stage.
        busy_s: for each checkpoint, from that time until it was also read again.
    """

    end_to_end_s: float
    over_s: float
    training_s: float
    blocked_s: tuple[float, ...]
    latency_s: tuple[float, ...]
    busy_s: tuple[float, ...]


def times(run: Run, timeline: Timeline) -> RunTimes:
    """Return the times of a run whose timeline has the whole run as one iteration."""
    start_s, end_s = timeline.start_s[0].tolist(), timeline.end_s[0].tolist()
    waits: dict[int, list[tuple[float, float]]] = defaultdict(list)
    begun_s: dict[tuple[int, int], float] = {}  # by checkpoint and stage
    latency_s: dict[int, float] = defaultdict(float)
    busy_s: dict[int, float] = defaultdict(float)
    lane_end_s: dict[tuple[int, Lane], float] = defaultdict(float)
    for task, number in zip(run.schedule.tasks, run.checkpoint, strict=True):
        mine = [i for i in task.after if run.checkpoint[i] >= 0]
        others_s = max((end_s[i] for i in task.after if run.checkpoint[i] < 0), default=0.0)
        if number < 0:
            ready_s = max(others_s, lane_end_s[task.stage, task.lane])
            if mine and start_s[task.index] > ready_s:
                last = max(mine, key=lambda i: (end_s[i], i))
                waits[run.checkpoint[last]].append((ready_s, start_s[task.index]))
        elif task.op is not Op.GATE:
            took_s = end_s[task.index] - begun_s.setdefault((number, task.stage), others_s)
            busy_s[number] = max(busy_s[number], took_s)
            if task.lane is not Lane.RETENTION:
                latency_s[number] = max(latency_s[number], took_s)
        lane_end_s[task.stage, task.lane] = end_s[task.index]
    numbers = range(run.num_checkpoints)
    return RunTimes(
        end_to_end_s=max(
            (e for e, t in zip(end_s, run.schedule.tasks, strict=True) if t.lane is not Lane.RETENTION), default=0.0
        ),
        over_s=max(end_s, default=0.0),
        training_s=max((e for e, number in zip(end_s, run.checkpoint, strict=True) if number < 0), default=0.0),
        blocked_s=tuple(_union_s(waits[number]) for number in numbers),
        latency_s=tuple(latency_s[number] for number in numbers),
        busy_s=tuple(busy_s[number] for number in numbers),
    )


def _union_s(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the time that at least one interval covers."""
    total_s, covered_s = 0.0, 0.0
    for begin_s, end_s in sorted(intervals):
        total_s += max(end_s - max(begin_s, covered_s), 0.0)
        covered_s = max(covered_s, end_s)
    return total_s


# Numbers of iterations: before the first checkpoint, after it until times may repeat, and the most in a simulation.
_WARM_UP, _FIRST_ITERATIONS, _MAX_TASKS = 2, 8, 20_000
_AS_LONG = 1.1  # writing beside training takes this much longer than alone, as a first estimate
# Number of checkpoints in a run at close intervals, where one slows the next.
_IN_A_ROW = 3


class Trial:
    """Simulations of a plan's training, with and without checkpoints.

    Args:
        plan: what is trained, and where.

    Attributes:
        cost: prices of training.
        shard_bytes: saved by one rank; in a pipeline, by a rank of the largest stage.
        num_nodes: nodes of the job.
        num_copies: of what a node saves to its own memory or drives: 2 if the next node has one too.
        node_bytes: saved by all ranks of the node that saves most.
        all_bytes: saved by all ranks.
        state: the pieces that ranks save.
    """

    def __init__(self, plan: Plan) -> None:
        decisions, units = plan.decisions, plan.units()
        self.cost = CostModel.of(plan.hardware, units, decisions)
        self._memory = plan.prediction.memory
        self._iteration_s = plan.prediction.iteration_s
        self._schedule = plan.schedule()
        self._taken = plan.schedule(takes_snapshots=True)
        self._prices = self.cost.prices(self._taken)
        of_ranks = stages(decisions, units)
        replicas = {unit.name: 1 if decisions.zero_stage else decisions.replicas(unit) for unit in of_ranks}
        self.state = state_of(self._taken, replicas)
        saved = bytes_by_stage(self._taken, self.state)
        self._by_stage = saved
        self.shard_bytes = max(saved)
        layout = self.cost.layout
        self.num_nodes = len(layout.nodes())
        self.num_copies = min(self.num_nodes, 2)
        self.node_bytes = max(sum(saved[layout.stage(rank)] for rank in ranks) for ranks in layout.nodes())
        self.all_bytes = sum(saved) * layout.num_ranks // len(saved)
        self._saved: dict[tuple[Level, int, int | None], Protection] = {}
        self._promoted: dict[tuple[Level, Level], Protection] = {}
        self._plain: dict[int, float] = {}

    @property
    def written_bytes(self) -> int:
        """Bytes that the ranks of one node write to its drives in every iteration of training."""
        tasks = self._schedule.tasks
        return self.cost.ranks_per_node * sum(task.num_bytes for task in tasks if task.lane in STORAGE_WRITES)

    def free_bytes(self, tier: Tier) -> int:
        """Return the bytes of one node's tier that the plan leaves free."""
        if tier not in self._memory:
            return capacities(self.cost)[tier]
        return self._memory[tier].capacity_bytes - self._memory[tier].peak_bytes

    def saved(self, level: Level, buffer_bytes: int, every: int | None = None) -> Protection:
        """Return the cost of a checkpoint, and how long it takes to be written.

        Args:
            level: where it goes.
            buffer_bytes: host memory of each rank for copies that are not written yet.
            every: iterations between checkpoints; ``None``: one checkpoint alone.

        Raises:
            ValueError: the profile lacks the level.
        """
        if every is not None and _IN_A_ROW * every * len(self._schedule.tasks) > _MAX_TASKS:
            every = None  # they are so far apart that one alone is simulated
        key = level, buffer_bytes, every
        if key not in self._saved:
            costs = CheckpointCosts(self.cost, level)
            share = self._share_read(costs, every)
            chunk_bytes, buffer_bytes = coarse(CHUNK_BYTES, self.state, buffer_bytes)
            make = functools.partial(Saver, buffer_bytes=buffer_bytes, chunk_bytes=chunk_bytes, reads_again=share)
            if every is None:
                again_s = costs.read_again_s(self.shard_bytes) if share else 0.0
                self._saved[key] = self.alone(make, costs, NUM_THREADS, again_s)
            else:
                number = _WARM_UP + every * _IN_A_ROW - 1
                read = self._simulated(self._checkpoints(make, number, every), costs)
                added_s = max(read.training_s - self._plain_s(number), 0.0)
                self._saved[key] = Protection(added_s / _IN_A_ROW, max(read.latency_s))
        return self._saved[key]

    def alone(self, make: MakeSaver, costs: CheckpointCosts, num_writers: int, more_s: float = 0.0) -> Protection:
        """Return cost and latency of one checkpoint that has finished before the next one begins.

        Args:
            make: makes each stage's saver.
            costs: prices what savers do.
            num_writers: threads that write.
            more_s: a first estimate of the time that it takes beside writing.
        """
        about_s = costs.write(self.shard_bytes, num_writers).duration_s + more_s
        return self._settled(lambda number: self._checkpoints(make, number, number), costs, about_s)

    def promoted(self, above: Level, level: Level) -> Protection:
        """Return cost and latency of the promotion of a checkpoint to a slower level, or of its copy for the next node.

        Args:
            above: where it is.
            level: where it goes to. If that is the same level, the next node gets it.

        Raises:
            ValueError: the profile lacks one of them.
        """
        if (above, level) not in self._promoted:
            threads = 1 / self.cost.ranks_per_node
            costs = CheckpointCosts(self.cost, level, above)
            ways = (CheckpointCosts(self.cost, above).read, costs.write, costs.read)
            copies = self.num_copies if above != level != "pfs" else 1  # each node promotes what it has
            about_s = copies * sum(way(self.shard_bytes, threads).duration_s for way in ways)
            build = functools.partial(with_promotion, self._taken, [copies * num_bytes for num_bytes in self._by_stage])
            self._promoted[above, level] = self._settled(lambda n: build(num_iterations=n), costs, about_s)
        return self._promoted[above, level]

    def fetched_s(self) -> float:
        """Return the seconds in which a node that is new gets what it is to have from other nodes."""
        fabric = self.cost.profile.inter_node
        assert fabric is not None, "a profile for several nodes has one"
        return self.num_copies * self.node_bytes / fabric.bytes_per_s.value

    def restored_s(self, level: Level) -> float:
        """Return the seconds in which all ranks read a checkpoint."""
        return CheckpointCosts(self.cost, level).read(self.shard_bytes, NUM_THREADS).duration_s

    def _share_read(self, costs: CheckpointCosts, every: int | None) -> float:
        """Return the fraction of each checkpoint that is read again; less than 1 if checkpoints are close."""
        if every is None:
            return 1.0
        return min(READING_SHARE * every * self._iteration_s / costs.read_again_s(self.shard_bytes), 1.0)

    def _checkpoints(self, make: MakeSaver, num_iterations: int, every: int) -> Run:
        return with_checkpoints(
            self._taken, self.state, make, num_iterations=num_iterations, every=every, first=_WARM_UP
        )

    def _settled(self, build: Callable[[int], Run], costs: CheckpointCosts, about_s: float) -> Protection:
        """Simulate longer and longer runs with one checkpoint, until it is finished before the run ends.

        ``about_s`` is a first estimate of its time. If it takes too long for a simulation, its cost is extrapolated
        from the simulated part.
        """
        most = max(_FIRST_ITERATIONS, _MAX_TASKS // len(self._schedule.tasks))
        number = min(_FIRST_ITERATIONS + math.ceil(about_s / self._iteration_s), most)
        while True:
            read = self._simulated(build(number), costs)
            rest_s = max(read.over_s - read.training_s, 0.0)
            if not rest_s or number == most:
                break
            number = min(number + math.ceil(_AS_LONG * rest_s * number / read.training_s), most)
        (blocked_s,), (latency_s,), (busy_s,) = read.blocked_s, read.latency_s, read.busy_s
        added_s = max(read.training_s - self._plain_s(number), 0.0)
        slowed_s = max(added_s - blocked_s, 0.0)
        if rest_s < busy_s:
            slowed_s *= busy_s / (busy_s - rest_s)
        return Protection(min(added_s, blocked_s) + slowed_s, latency_s)

    def _simulated(self, made: Run, costs: CheckpointCosts) -> RunTimes:
        return times(made, run(made.schedule, costs.prices(made, self._prices), costs.capacities(), 1))

    def _plain_s(self, num_iterations: int) -> float:
        """Return the seconds of ``num_iterations`` without checkpoints."""
        if num_iterations not in self._plain:
            prices = self.cost.prices(self._schedule)
            timeline = run(self._schedule, prices, self.cost.capacities(), num_iterations)
            self._plain[num_iterations] = float(timeline.end_s.max())
        return self._plain[num_iterations]
