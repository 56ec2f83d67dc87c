"""Simulated runs of training that saves checkpoints."""

import dataclasses
import functools

from hwprofiles.profile import HardwareProfile
from hwprofiles.registry import load_profile
from planner.checkpoints.costs import CheckpointCosts
from planner.checkpoints.lowering import MakeSaver, Run, Saver, Shard, with_checkpoints
from planner.checkpoints.trial import RunTimes, times
from planner.costs.model import CostModel
from planner.costs.resources import Price
from planner.decisions import Sharding
from planner.schedule.tasks import Op, Task, Tier
from planner.schedule.timeline import Timeline
from planner.simulate.machine import run
from ullage.rivals.cases.checkpoints import iteration
from ullage.rivals.checkpoints.costs import EngineCosts
from ullage.rivals.checkpoints.lowering import EngineSaver
from ullage.rivals.checkpoints.policy import POLICIES, CheckpointPolicy

POLARIS = load_profile("polaris-a100-40g")
GB = 10**9
CHUNK_BYTES = 256_000_000  # at least, of all engines: small ones make long runs, and no difference
DEEPSPEED, CHECKFREQ, TORCHSNAPSHOT, DATASTATES = POLICIES.values()
OURS = None


def saver(engine: CheckpointPolicy | None, buffer_bytes: int, chunk_bytes: int = CHUNK_BYTES) -> MakeSaver:
    """Return how an engine saves; ``None`` is ours."""
    if engine is None:
        return functools.partial(Saver, buffer_bytes=buffer_bytes, chunk_bytes=chunk_bytes)
    return functools.partial(EngineSaver, engine, buffer_bytes=buffer_bytes)


@dataclasses.dataclass(frozen=True)
class Job:
    """A run of known phases on a machine, by default the published one of 7B on two nodes."""

    engine: CheckpointPolicy | None
    num_iterations: int = 4
    every: int = 1
    shard_bytes: int = 10 * GB
    buffer_bytes: int = 16 * GB
    num_ranks: int = 8
    phases: tuple[float, float, float] = (1.26, 1.82, 0.12)
    profile: HardwareProfile = POLARIS

    def simulate(self) -> tuple[Run, Timeline, RunTimes]:
        schedule, prices = iteration(*self.phases)
        state = [Shard(self.shard_bytes, Tier.GPU, 2)]
        make = saver(self.engine, self.buffer_bytes)
        made = with_checkpoints(schedule, state, make, num_iterations=self.num_iterations, every=self.every)
        return simulated(made, prices, self.engine, self.profile, self.num_ranks)

    @property
    def times(self) -> RunTimes:
        return self.simulate()[2]


def simulated(
    made: Run, prices: list[Price], engine: CheckpointPolicy | None, profile: HardwareProfile, num_ranks: int, **options
) -> tuple[Run, Timeline, RunTimes]:
    cost = options.pop("cost", None) or CostModel(profile, (), Sharding(data_parallel=num_ranks))
    store = options.pop("store", "pfs")
    costs = EngineCosts(engine, cost, store) if engine else CheckpointCosts(cost, store)
    timeline = run(made.schedule, costs.prices(made, prices), costs.capacities(), 1)
    return made, timeline, times(made, timeline)


def of_checkpoint(made: Run, number: int, *ops: Op) -> list[Task]:
    return [t for t in made.schedule.tasks if made.checkpoint[t.index] == number and t.op in ops]
