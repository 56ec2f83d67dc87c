"""Checkpoints of schedules: what they share with training, and what is refused."""

import dataclasses

import pytest
from cases import decide, small_units
from checkpointed import DATASTATES, DEEPSPEED, GB, OURS, POLARIS, Job, of_checkpoint, saver, simulated

from planner.checkpoints.lowering import Shard, state_of, with_checkpoints
from planner.checkpoints.policy import CHUNK_BYTES
from planner.costs.model import CostModel
from planner.costs.resources import Price, Resource
from planner.decisions import Place, Sharding
from planner.lowering import lower
from planner.schedule.schedule import Schedule
from planner.schedule.tasks import Lane, Op, Phase, Task, Tier
from ullage.rivals import checkpoints
from ullage.rivals.cases.checkpoints import iteration
from ullage.rivals.checkpoints.costs import EngineCosts
from ullage.rivals.checkpoints.policy import POLICIES, CheckpointPolicy


def lowered(place: Place) -> tuple[Schedule, CostModel, list[Price]]:
    model_units = small_units("gpt2", num_layers=4, micro_batch=4)
    schedule = lower(model_units, decide(model_units, place), asynchronous=True, takes_snapshots=True)
    cost = CostModel(POLARIS, model_units, Sharding())
    return schedule, cost, cost.prices(schedule)


def state_at(place: Place, num_replicas: int = 1) -> tuple[Shard, ...]:
    """Return the state that is saved of the same iteration."""
    return state_of(lowered(place)[0], num_replicas)


def test_checkpoints_share_the_drives_with_training():
    """A checkpoint on the drives of the node has no drives of its own."""
    cost = CostModel(POLARIS, small_units(), Sharding())
    costs = EngineCosts(DEEPSPEED, cost, "nvme")
    job = Job(DEEPSPEED, num_ranks=1)
    made, *_ = job.simulate()
    training = [Price(0.0, 1.0)] * 3
    write = next(p for p, t in zip(costs.prices(made, training), made.schedule.tasks, strict=True) if t.op is Op.WRITE)
    evict = cost.price(Task(0, Lane.NVME_WRITE, Op.EVICT, Phase.FORWARD, num_bytes=GB))
    shared = {resource for resource, _ in write.uses} & {resource for resource, _ in evict.uses}
    assert {Resource.NVME_WRITE, Resource.NVME} <= shared
    assert costs.capacities() == cost.capacities()


@pytest.mark.parametrize("place", Place)
def test_state_is_that_of_the_model_and_where_it_was_decided(place):
    schedule, *_ = lowered(place)
    state = state_at(place)
    num_params = sum(unit.num_params for unit in small_units("gpt2", num_layers=4, micro_batch=4))
    assert sum(shard.num_bytes for shard in state) == 12 * num_params
    tiers = {Place.GPU: Tier.GPU, Place.NVME: Tier.NVME}
    assert {shard.tier for shard in state} == {tiers.get(place, Tier.HOST)}
    changes = {schedule.tasks[shard.changed_by].op for shard in state}
    assert changes == {{Place.STREAM: Op.STORE, Place.NVME: Op.SWAP_OUT}.get(place, Op.UPDATE)}
    halves = state_at(place, 2)
    assert sum(shard.num_bytes for shard in halves) == pytest.approx(6 * num_params, rel=1e-3)


def test_state_on_the_host_is_not_copied_but_gated():
    schedule, cost, prices = lowered(Place.CPU)
    reads = []
    for buffer_bytes in (10**8, 10**7):
        state = state_at(Place.CPU)
        make = saver(OURS, buffer_bytes, CHUNK_BYTES)
        made = with_checkpoints(schedule, state, make, num_iterations=2, every=1)
        assert not sum(task.num_bytes for task in of_checkpoint(made, 0, Op.SNAPSHOT, Op.TOUCH, Op.PASS))
        _, timeline, read = simulated(made, prices, OURS, POLARIS, 1, cost=cost, store="nvme")
        reads.append(read.blocked_s[0])
    assert reads[1] > reads[0] + 0.04  # 2 GB/s of NVMe are slower than this small model's iteration, and less is copied
    writes = {(t.unit, t.piece): timeline.end_s[0, t.index] for t in of_checkpoint(made, 0, Op.WRITE)}
    second = [t for t in made.schedule.tasks if t.op is Op.UPDATE][len(writes) :]
    started = {(t.unit, t.piece): timeline.start_s[0, t.index] for t in second}
    # Per shard: the first may change while the last is still being written; a gate on the whole could not.
    assert min(started.values()) < max(writes.values())


def test_copies_share_the_link_with_gradients():
    """Half of the state stays on the device; copying it meets the gradients of the other half on their way out."""
    schedule, cost, prices = lowered(Place.CPU)
    state = [
        dataclasses.replace(shard, tier=Tier.GPU, num_bytes=500 * shard.num_bytes) for shard in state_at(Place.CPU)
    ]
    flushes = [task.index for task in schedule.tasks if task.op is Op.FLUSH]

    def flush_s(engine: CheckpointPolicy, every: int) -> float:
        made = with_checkpoints(schedule, state, saver(engine, 500 * GB), num_iterations=3, every=every)
        _, timeline, _ = simulated(made, prices, engine, POLARIS, 1, cost=cost)
        second = [i for i, origin in enumerate(made.origin) if origin in flushes][len(flushes) : 2 * len(flushes)]
        return float(sum(timeline.end_s[0, i] - timeline.start_s[0, i] for i in second))

    assert flush_s(DATASTATES, 1) > 1.3 * flush_s(DATASTATES, 4)


def test_blocking_engines_stop_the_loop_and_lazy_ones_do_not():
    schedule, cost, prices = lowered(Place.GPU)
    state = state_at(Place.GPU)
    plain_s = None
    costs = {}
    for name, engine in (*POLICIES.items(), ("ullage", OURS)):
        reads = []
        for every in (9, 4):
            made = with_checkpoints(schedule, state, saver(engine, GB, CHUNK_BYTES), num_iterations=8, every=every)
            reads.append(simulated(made, prices, engine, POLARIS, 1, cost=cost)[2])
        plain, saved = reads
        plain_s = plain_s or plain.training_s
        assert plain.training_s == plain_s
        costs[name] = (saved.training_s - plain.training_s) / len(saved.blocked_s)
    assert costs["deepspeed"] > costs["torchsnapshot"] > costs["datastates"] >= costs["ullage"] >= 0
    assert costs["checkfreq-async"] > costs["torchsnapshot"]


def test_an_unknown_engine_is_refused_by_name():
    with pytest.raises(ValueError, match="'gemini'; choose one of deepspeed"):
        checkpoints.engine("gemini", CostModel(POLARIS, (), Sharding()), "pfs", (), 1)


@pytest.mark.parametrize("name", ["num_iterations", "every", "buffer_bytes"])
def test_numbers_must_be_positive(name):
    with pytest.raises(ValueError, match=f"{name} is 0"):
        dataclasses.replace(Job(OURS), **{name: 0}).simulate()


def test_state_of_another_schedule_is_refused():
    schedule, _ = iteration(1.0, 1.0, 1.0)
    for shard in (Shard(1, Tier.GPU, 3), Shard(-1, Tier.GPU, 2)):
        with pytest.raises(ValueError, match="sizes cannot be negative"):
            with_checkpoints(schedule, [shard], saver(OURS, 1), num_iterations=1, every=1)


def test_a_buffer_of_nothing_is_refused():
    with pytest.raises(ValueError, match="more than 10000; give it more host memory than 1000 B"):
        Job(DATASTATES, buffer_bytes=1000).simulate()


@pytest.mark.parametrize(
    ("engine", "lacking", "message"),
    [
        ("deepspeed", {"serialise_bytes_per_s": None}, r"no host\.serialise_bytes_per_s.*deepspeed"),
        ("torchsnapshot", {"fresh_bytes_per_s": None}, r"no host\.fresh_bytes_per_s.*torchsnapshot"),
    ],
)
def test_a_rate_that_the_profile_lacks_is_named(engine, lacking, message):
    profile = POLARIS.model_copy(update={"host": POLARIS.host.model_copy(update=lacking)})
    with pytest.raises(ValueError, match=message):
        Job(POLICIES[engine], profile=profile).simulate()
    Job(OURS, profile=profile).simulate()  # does not need it


def test_a_store_that_the_profile_lacks_is_named():
    with pytest.raises(ValueError, match="has no pfs"):
        Job(OURS, profile=POLARIS.model_copy(update={"pfs": None})).simulate()
