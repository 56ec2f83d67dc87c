"""Checkpoints in the schedule of a run: what they may not break, and what engines differ in."""

import dataclasses
import itertools

import numpy as np
import pytest
from amount import examples
from cases import cases, pipelines, random_prices
from checkpointed import CHECKFREQ, DATASTATES, DEEPSPEED, GB, OURS, POLARIS, TORCHSNAPSHOT, Job, of_checkpoint, saver
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner.checkpoints.costs import CheckpointCosts
from planner.checkpoints.lowering import Run, Shard, bytes_by_stage, state_of, with_checkpoints
from planner.checkpoints.policy import COPY_WEIGHT
from planner.checkpoints.trial import times
from planner.costs.model import CostModel
from planner.costs.resources import Price, Resource
from planner.decisions import Sharding
from planner.schedule.schedule import Schedule
from planner.schedule.tasks import Lane, Op, Phase, Task, Tier
from planner.schedule.timeline import Timeline
from planner.simulate.machine import run
from ullage.rivals.checkpoints.policy import POLICIES, CheckpointPolicy

SLOW = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
_CHUNK_BYTES = 4 << 20  # ours in lowered iterations
engines = st.sampled_from([*POLICIES.values(), OURS])


@st.composite
def jobs(draw: st.DrawFn, engine: st.SearchStrategy[CheckpointPolicy | None] = engines) -> Job:
    """Return jobs in which checkpoints are followed by iterations, and copies are about as long as those."""
    every = draw(st.integers(1, 4))
    return Job(
        draw(engine),
        num_iterations=every * draw(st.integers(1, 3)) + draw(st.integers(0, every)),
        every=every,
        shard_bytes=draw(st.sampled_from([1, 10, 14, 40])) * GB + draw(st.integers(-(10**8), 10**8)),
        buffer_bytes=draw(st.sampled_from([1, 4, 16, 100])) * GB + draw(st.integers(-(10**8), 10**8)),
        num_ranks=draw(st.sampled_from([1, 4, 8, 32, 80])),
        phases=draw(st.tuples(*[st.floats(0.05, 3.0)] * 3)),
    )


# --- properties of every engine


@SLOW
@given(jobs())
def test_every_checkpoint_writes_all_state_and_copies_it_once(job):
    made, _, read = job.simulate()
    assert made.num_checkpoints == len(read.blocked_s) == job.num_iterations // job.every
    for number in range(made.num_checkpoints):
        assert sum(task.num_bytes for task in of_checkpoint(made, number, Op.WRITE)) == job.shard_bytes
        assert sum(task.num_bytes for task in of_checkpoint(made, number, Op.SNAPSHOT)) == job.shard_bytes
        assert len(of_checkpoint(made, number, Op.CREATE)) == 1
    assert sum(origin >= 0 for origin in made.origin) == 3 * job.num_iterations


def peak_bytes(made: Run, timeline: Timeline, stage: int = 0) -> int:
    """Return the most host memory of one rank that copies hold: from when it is touched until they are written."""
    changes: list[tuple[float, int]] = []
    for number in range(made.num_checkpoints):
        copies, touched, writes = (
            [t for t in of_checkpoint(made, number, op) if t.stage == stage] for op in (Op.SNAPSHOT, Op.TOUCH, Op.WRITE)
        )
        for first, write in zip(touched or copies, writes, strict=True):
            changes.append((timeline.start_s[0, first.index], write.num_bytes))
            changes.append((timeline.end_s[0, write.index], -write.num_bytes))
    return max(itertools.accumulate((num_bytes for _, num_bytes in sorted(changes)), initial=0))


@SLOW
@given(jobs())
def test_bounded_memory_is_never_exceeded(job):
    made, timeline, _ = job.simulate()
    peak = peak_bytes(made, timeline)
    if job.engine is OURS or job.engine.bounded:
        assert peak <= job.buffer_bytes
    elif job.engine.staging == "fresh" and job.num_iterations >= job.every:
        assert peak == job.shard_bytes  # cloned whole; one in flight


@SLOW
@given(jobs())
def test_state_does_not_change_before_it_is_copied_nor_is_it_copied_before_it_has_changed(job):
    made, timeline, _ = job.simulate()
    start_s, end_s = timeline.start_s[0], timeline.end_s[0]
    updates = [t.index for t in made.schedule.tasks if t.op is Op.UPDATE]
    for number in range(made.num_checkpoints):
        iteration_ = (number + 1) * job.every  # the checkpoint comes after so many
        for task in of_checkpoint(made, number, Op.SNAPSHOT):
            assert start_s[task.index] >= end_s[updates[iteration_ - 1]]
            if iteration_ < len(updates):
                assert end_s[task.index] <= start_s[updates[iteration_]]


@SLOW
@given(jobs(), st.integers(1, 6))
def test_checkpoints_more_often_never_make_training_faster(job, every):
    rarer = dataclasses.replace(job, every=job.every + every)
    assert job.times.training_s >= rarer.times.training_s * (1 - 1e-9)


@SLOW
@given(jobs())
def test_training_takes_longer_by_what_was_blocked_and_interference(job):
    plain_s = job.num_iterations * sum(job.phases)
    read = job.times
    blocked_s = sum(read.blocked_s)
    assert read.training_s >= plain_s * (1 - 1e-9)
    if job.engine is OURS or not job.engine.holds_interpreter:
        assert read.training_s == pytest.approx(plain_s + blocked_s)
    assert read.end_to_end_s >= read.training_s
    assert all(latency_s > 0 for latency_s in read.latency_s)


@SLOW
@given(jobs(st.just(OURS)))
def test_ours_never_blocks_longer_than_datastates(job):
    ours, theirs = job.times, dataclasses.replace(job, engine=DATASTATES).times
    # Checksums read memory once more, which delays writes a little where copies take all that memory gives.
    assert ours.training_s <= theirs.training_s * 1.05


@SLOW
@given(jobs(), st.sampled_from(["job_write_bytes_per_s", "fresh_bytes_per_s", "serialise_bytes_per_s"]))
def test_a_faster_machine_is_never_slower(job, name):
    def faster(part):
        quantity = getattr(part, name, None)
        if quantity is None:
            return part
        return part.model_copy(update={name: quantity.model_copy(update={"value": 2 * quantity.value})})

    better = POLARIS.model_copy(update={"pfs": faster(POLARIS.pfs), "host": faster(POLARIS.host)})
    # Not exactly: what is faster may share with others at another moment (Graham's anomalies).
    assert dataclasses.replace(job, profile=better).times.training_s <= job.times.training_s * 1.01


# --- each engine


def test_lazy_copies_in_a_long_interval_block_for_nothing():
    assert Job(OURS, num_iterations=12, every=6).times.blocked_s == (0.0, 0.0)
    created_s = 8 * POLARIS.pfs.create_s.value
    assert Job(DATASTATES, num_iterations=12, every=6).times.blocked_s[0] == pytest.approx(created_s)


def unpinned_copy_s(num_bytes: int) -> float:
    """Seconds in which each device of a node copies so much to memory that is not pinned: four passes over DRAM."""
    shared_bytes = 4 * num_bytes * POLARIS.devices_per_node
    return max(
        num_bytes / POLARIS.host_link.pageable_bytes_per_s.value, shared_bytes / POLARIS.host.dram_bytes_per_s.value
    )


def test_deepspeed_blocks_for_copy_and_write():
    written_s = 10 * GB / POLARIS.host.serialise_bytes_per_s.value
    wanted_s = unpinned_copy_s(10 * GB) + written_s + 8 * POLARIS.pfs.create_s.value
    assert Job(DEEPSPEED).times.blocked_s[:3] == pytest.approx([wanted_s] * 3, rel=1e-3)
    assert Job(DEEPSPEED).times.blocked_s[3] == 0  # nothing comes after it


def test_many_ranks_share_what_the_file_system_gives_one_job():
    job_bytes_per_s = POLARIS.pfs.job_write_bytes_per_s.value
    many = Job(DEEPSPEED, num_ranks=80).times
    assert many.latency_s[0] > 80 * 10 * GB / job_bytes_per_s
    few = Job(DATASTATES, num_ranks=4).times
    assert few.latency_s[0] == pytest.approx(4 * 10 * GB / POLARIS.pfs.write.best_rate_per_s(), rel=0.1)


def test_one_checkfreq_checkpoint_costs_its_snapshot_and_its_persist_at_any_interval():
    """The writer holds the interpreter: whatever time it takes, training loses, and the last one ends after all."""
    snapshot_s = unpinned_copy_s(10 * GB) + 10 * GB / POLARIS.host.fresh_bytes_per_s.value
    persist_s = 10 * GB / POLARIS.host.serialise_bytes_per_s.value
    create_s = 8 * POLARIS.pfs.create_s.value  # beside training, unless that waits for the writer
    for every in (1, 2, 6):
        read = Job(CHECKFREQ, num_iterations=12, every=every).times
        assert read.blocked_s[0] == pytest.approx(snapshot_s, rel=1e-3)
        at_least_s = 12 * 3.2 + (12 // every) * (snapshot_s + persist_s)
        assert at_least_s * 0.999 <= read.end_to_end_s <= (at_least_s + (12 // every) * create_s) * 1.001


def test_a_writer_that_leaves_the_interpreter_alone_costs_training_nothing():
    polite = dataclasses.replace(CHECKFREQ, holds_interpreter=False)
    rude, kind = (Job(engine, num_iterations=12, every=6).times for engine in (CHECKFREQ, polite))
    assert kind.training_s == pytest.approx(12 * 3.2 + kind.blocked_s[0])
    assert rude.training_s > kind.training_s + 3


def test_a_pool_overlaps_page_faults_with_copies():
    fresh = dataclasses.replace(TORCHSNAPSHOT, staging="fresh")
    pool_s, one_s = (Job(engine).times.blocked_s[0] for engine in (TORCHSNAPSHOT, fresh))
    assert one_s > 1.1 * pool_s


def test_a_full_buffer_makes_copies_wait_for_writes():
    roomy, tight = (Job(DATASTATES, buffer_bytes=size * GB).times for size in (100, 2))
    assert roomy.blocked_s[1] < 1 < tight.blocked_s[1]


def test_what_is_in_flight_is_waited_for():
    many = dataclasses.replace(TORCHSNAPSHOT, in_flight=None)
    one_s, many_s = (
        Job(engine, buffer_bytes=200 * GB, num_ranks=32).times.blocked_s[1] for engine in (TORCHSNAPSHOT, many)
    )
    assert one_s > many_s + 1


def test_our_copies_yield_to_training():
    made, _, _ = Job(OURS).simulate()
    costs = CheckpointCosts(CostModel(POLARIS, (), Sharding(data_parallel=8)), "pfs")
    prices = costs.prices(made, [Price(0.0, 1.0)] * 3)
    weights = {number >= 0: price.weight for number, price in zip(made.checkpoint, prices, strict=True)}
    assert weights == {True: COPY_WEIGHT, False: 1.0}


# --- on top of a lowered iteration


@settings(SLOW, max_examples=examples(50), suppress_health_check=list(HealthCheck))
@given(
    st.one_of(cases(), pipelines()),
    engines,
    st.integers(1, 2),
    st.integers(1, 2),
    st.sampled_from([10**7, 10**8]),
    st.integers(0, 2**32 - 1),
)
def test_any_lowered_iteration_takes_checkpoints(case, engine, every, more, buffer_bytes, seed):
    """At any prices: one state, saved whole, after it has changed and before it changes again."""
    state, num_iterations = state_of(case.taken), every + more
    make = saver(engine, buffer_bytes, _CHUNK_BYTES)
    made = with_checkpoints(case.taken, state, make, num_iterations=num_iterations, every=every)
    timeline = run(made.schedule, *random_prices(made.schedule, seed), 1)
    start_s, end_s = timeline.start_s[0], timeline.end_s[0]
    first = min(origin for origin in made.origin if origin >= 0)
    assert made.origin.count(first) == num_iterations
    for number in range(made.num_checkpoints):
        iteration_ = (number + 1) * every
        overtaken: list[tuple[float, Task]] = []  # written from where it is, which may have changed before
        for shard in state:
            chunks = [
                t
                for t in of_checkpoint(made, number, Op.SNAPSHOT, Op.READ, Op.PASS, Op.WRITE)
                if (t.unit, t.piece) == (shard.unit, shard.piece)
            ]
            written = sum(t.num_bytes for t in chunks if t.op is Op.WRITE)
            assert written == shard.num_bytes
            assert {t.stage for t in chunks} <= {case.taken.tasks[shard.changed_by].stage}
            copies = [t for t in chunks if t.op is not Op.WRITE and t.num_bytes] or chunks
            assert (Op.READ in {t.op for t in copies}) == (shard.tier is Tier.NVME)
            changing = [index for index, origin in enumerate(made.origin) if origin == shard.changed_by]
            changed = changing[iteration_ - 1]
            assert min(start_s[t.index] for t in copies) >= end_s[changed]
            if iteration_ < num_iterations:
                changes = changing[iteration_]
                if copies == chunks and engine is OURS:
                    overtaken += [(start_s[changes], t) for t in chunks]
                else:
                    assert max(end_s[t.index] for t in copies) <= start_s[changes]
        for moment_s, _ in overtaken:  # what is not written by then has been copied, and there is room for it
            held = sum(t.num_bytes for at_s, t in overtaken if at_s <= moment_s < end_s[t.index])
            assert held <= buffer_bytes


def test_stages_of_a_pipeline_save_beside_each_other():
    """The second stage has twice as much to save, and waits for that, not for the first, which waits for its own."""
    tasks = (
        Task(0, Lane.COMPUTE, Op.FORWARD, Phase.FORWARD, "a"),
        Task(1, Lane.COMPUTE, Op.FORWARD, Phase.FORWARD, "b", stage=1, after=(0,)),
    )
    state = (Shard(4 * GB, Tier.GPU, 0, "a"), Shard(8 * GB, Tier.GPU, 1, "b"))
    assert bytes_by_stage(Schedule(tasks), state) == (4 * GB, 8 * GB)
    made = with_checkpoints(Schedule(tasks), state, saver(DEEPSPEED, GB), num_iterations=2, every=2, first=1)
    per_second = {Op.FORWARD: 1.0, Op.WRITE: 1 / GB}  # of a task, of a byte
    prices = [
        Price(0.0, per_second.get(t.op, 0.0) * (t.num_bytes if t.op is Op.WRITE else 1)) for t in made.schedule.tasks
    ]
    timeline = run(made.schedule, prices, dict.fromkeys(Resource, 1.0), 1)
    read = times(made, timeline)
    # Saved from 1 to 5 and from 2 to 10 s; computed again from 5 to 6 and from 10 to 11 s.
    assert read.training_s == pytest.approx(11)
    assert read.latency_s == pytest.approx((8,))
    assert read.blocked_s == pytest.approx((8,))
    assert peak_bytes(made, timeline, stage=1) == DEEPSPEED.chunk_bytes


@settings(SLOW, max_examples=examples(50), suppress_health_check=list(HealthCheck))
@given(cases())
def test_a_run_without_checkpoints_is_the_iterations_one_after_another(case):
    made = with_checkpoints(case.taken, state_of(case.taken), saver(OURS, 10**9), num_iterations=3, every=4)
    prices, capacities = random_prices(case.schedule, 1)
    plain = run(case.schedule, prices, capacities, 3)
    unrolled = run(made.schedule, prices * 3, capacities, 1)
    assert np.array_equal(unrolled.end_s[0], plain.end_s.ravel())


@settings(SLOW, max_examples=examples(50), suppress_health_check=list(HealthCheck))
@given(cases(ours=True), st.integers(0, 2**32 - 1))
def test_predicted_gates_are_those_that_are_executed(case, seed):
    """With room for everything and instant writes a piece waits for its own copy: to the moment as in the schedule."""
    taken = case.taken
    snapshots = {task.index: (task.unit, task.piece) for task in taken.tasks if task.op is Op.SNAPSHOT}
    state = state_of(taken)
    assert list(snapshots.values()) == [(shard.unit, shard.piece) for shard in state]
    trained = [(t.lane, t.op, t.unit, t.piece) for t in taken.tasks if t.op not in {Op.SNAPSHOT, Op.GATE}]
    assert trained == [(t.lane, t.op, t.unit, t.piece) for t in case.schedule.tasks]

    predicted = with_checkpoints(taken, state, saver(OURS, 10**12, 10**10), num_iterations=3, every=1)
    count, whole = len(taken.tasks), Run(taken)
    for number in range(3):
        for task in taken.tasks:
            after = {number * count + i for i in task.after}
            after |= {(number - 1) * count + i for i in task.after_previous} if number else set()
            # In the first iteration, when nothing has been asked for yet, gates do nothing.
            after = after if number or task.op is not Op.GATE else set()
            again = dataclasses.replace(task, index=len(whole.tasks), after=tuple(sorted(after)), after_previous=())
            whole.append(again, task.index, -1)
    plain, capacities = random_prices(case.schedule, seed)
    rng = np.random.default_rng(seed)
    copied_s = {
        (shard.unit, shard.piece): 0.0 if shard.tier is Tier.HOST else float(rng.exponential()) for shard in state
    }
    training = iter(plain)
    own = {Op.SNAPSHOT, Op.GATE}
    prices = [None if task.op in own else next(training) for task in taken.tasks]

    def price(made: Run, task: Task) -> Price:
        origin = made.origin[task.index]
        if origin >= 0 and prices[origin] is not None:
            return prices[origin]
        first = task.index < count  # nothing has been asked for yet
        copies = task.op in {Op.SNAPSHOT, Op.READ} and not first
        return Price(0.0, copied_s[task.unit, task.piece] if copies else 0.0)

    ends_s = []
    for made in (predicted, whole):
        timeline = run(made.schedule, [price(made, task) for task in made.schedule.tasks], capacities, 1)
        trained = [t.index for t in made.schedule.tasks if made.origin[t.index] >= 0 and t.op not in own]
        ends_s.append(timeline.end_s[0, trained])
    assert ends_s[0] == pytest.approx(ends_s[1])


# --- what is refused
