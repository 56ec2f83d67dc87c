"""Levels and intervals of checkpoints for real plans: limits hold, nothing else wastes less, and why is said."""

import functools
import itertools
import json
import math

import numpy as np
import pytest
from amount import ALL, examples
from hypothesis import given, settings
from hypothesis import strategies as st

from hwprofiles.profile import HardwareProfile
from hwprofiles.quantity import CurvePoint
from hwprofiles.registry import load_profile
from planner.checkpoints.choosing import choose_checkpoints
from planner.checkpoints.interval import CheckpointsError, Protection, nest
from planner.checkpoints.policy import HASH_BYTES_PER_S, LEAST_BUFFER_BYTES, NUM_THREADS
from planner.checkpoints.trial import Trial
from planner.choices.request import Request
from planner.models.config import ModelConfig
from planner.models.registry import resolve_model
from planner.plan.checkpoints import CheckpointPlan, CheckpointRequest
from planner.plan.document import Plan
from planner.plan.planning import make_plan
from planner.terms import LEVELS
from planner.verification import verify
from ullage.rivals.checkpoints.beside import engine_rows, protected, saved_by
from ullage.rivals.checkpoints.policy import POLICIES

HOUR, DAY = 3600.0, 86400.0
KINDS = {"memory": 2 * HOUR, "nvme": DAY, "pfs": 30 * DAY}


@pytest.fixture(autouse=True)
def _short_simulations(monkeypatch: pytest.MonkeyPatch):
    if not ALL:
        monkeypatch.setattr("planner.checkpoints.trial._MAX_TASKS", 5_000)


def varied(profile: HardwareProfile, **capacities: float) -> HardwareProfile:
    """Return the profile with other capacities, in bytes, of its nvme and pfs."""
    parts = {}
    for name, num_bytes in capacities.items():
        storage = getattr(profile, name)
        quantity = storage.capacity_bytes.model_copy(update={"value": num_bytes})
        parts[name] = storage.model_copy(update={"capacity_bytes": quantity})
    return profile.model_copy(update=parts)


def shallow(name: str) -> ModelConfig:
    """Return a model with a quarter of its layers: as wide, and so as long an iteration for each of its bytes."""
    model = resolve_model(name)
    return model.model_copy(update={"num_layers": model.num_layers // 4})


@functools.cache
def planned(hardware: str = "polaris-a100-40g", model: str = "opt-1.3b", num_devices: int = 4, **options) -> Plan:
    """Return a plan with long iterations: those of short ones are many until a checkpoint is written."""
    options = {"micro_batch": 16} | options
    request = Request(shallow(model), load_profile(hardware), num_devices=num_devices, seq_len=1024, **options)
    return make_plan(request, max_simulations=12)


@functools.cache
def far_from_pfs() -> Plan:
    """Return a plan on a machine whose drives are far faster than its network."""
    hardware = load_profile("h100x4-80g")
    point = CurvePoint(size=1e9, p10_s=5.0, median_s=5.0, p90_s=5.0)
    curve = hardware.nvme.write.model_copy(update={"points": (point,)})
    pfs = hardware.nvme.model_copy(update={"write": curve, "read": curve, "num_drives": None})
    return make_plan(
        Request(
            shallow("opt-1.3b"), hardware.model_copy(update={"pfs": pfs}), num_devices=4, seq_len=1024, micro_batch=4
        ),
        max_simulations=60,
    )


@functools.cache
def on_drives() -> Plan:
    """Return a plan with state that neither device nor host can hold."""
    hardware = load_profile("rtx-4090").with_device_memory(2 * 10**9)
    memory = hardware.host.memory_bytes.model_copy(update={"value": 3.2e9})
    host = hardware.host.model_copy(update={"memory_bytes": memory})
    hardware = hardware.model_copy(update={"host": host})
    request = Request(shallow("opt-1.3b"), hardware, seq_len=1024, micro_batch=1, storage="nvme")
    return make_plan(request, max_simulations=4)


@functools.cache
def trial() -> Trial:
    """Return what is simulated of that plan, for all questions about it."""
    return Trial(far_from_pfs())


OFTEN = CheckpointRequest(mtbf_s={"memory": HOUR, "nvme": 6 * HOUR, "pfs": 2 * DAY}, buffer_bytes=LEAST_BUFFER_BYTES)


@functools.cache
def chosen() -> CheckpointPlan:
    return choose_checkpoints(far_from_pfs(), OFTEN, trial())


def test_every_level_is_used_where_its_failures_are_common():
    assert [each.level for each in chosen().levels] == list(LEVELS)
    intervals = [each.every for each in chosen().levels]
    assert all(b % a == 0 for a, b in itertools.pairwise(intervals))
    assert [each.mtbf_s for each in chosen().levels] == pytest.approx(list(OFTEN.mtbf_s.values()))
    latencies_s = [each.latency_s for each in chosen().levels]
    assert latencies_s == sorted(latencies_s)
    assert not chosen().left_out
    assert chosen().every("nvme") == intervals[1]


def test_nothing_that_could_be_chosen_wastes_less():
    """Any set of levels, at its own best intervals."""
    made, iteration_s = chosen(), far_from_pfs().prediction.iteration_s
    for levels in [("pfs",), ("nvme", "pfs"), ("memory", "pfs"), ("memory", "nvme", "pfs")]:
        rates = dict.fromkeys(levels, 0.0)
        for kind, mtbf_s in OFTEN.mtbf_s.items():
            rates[next(level for level in levels if LEVELS.index(level) >= LEVELS.index(kind))] += 1 / mtbf_s
        protections, latency_s = [], 0.0
        for above, level in itertools.pairwise((None, *levels)):
            measured = trial().promoted(above, level) if above else trial().saved(level, made.buffer_bytes)
            latency_s += measured.latency_s
            restart_s = made.request.restart_s + trial().restored_s(level)
            least_s = measured.latency_s - (0.0 if above else measured.cost_s)
            protections.append(Protection(measured.cost_s, latency_s, restart_s, rates[level], least_s=least_s))
        assert made.waste <= nest(protections, iteration_s).waste * (1 + 1e-9)


@functools.cache
def on_nodes(slower: float = 1.0) -> Trial:
    """Return what is simulated of a plan for two nodes of four devices, whose file system is slow."""
    hardware = load_profile("polaris-a100-40g")
    point = CurvePoint(size=1e9, p10_s=20.0, median_s=20.0, p90_s=20.0)
    curve = hardware.pfs.write.model_copy(update={"points": (point,)})
    pfs = hardware.pfs.model_copy(update={"write": curve, "read": curve, "job_write_bytes_per_s": None})
    plan = planned(num_devices=8)
    rate = hardware.inter_node.bytes_per_s
    fabric = hardware.inter_node.model_copy(
        update={"bytes_per_s": rate.model_copy(update={"value": rate.value / slower})}
    )
    return Trial(plan.model_copy(update={"hardware": hardware.model_copy(update={"pfs": pfs, "inter_node": fabric})}))


def test_a_lost_node_costs_the_last_copy_that_its_neighbour_has():
    """Not the last checkpoint that all nodes share, which two neighbours that are lost at once still cost."""
    plan, trial = planned(num_devices=8), on_nodes()
    request = CheckpointRequest(mtbf_s={"memory": HOUR, "pfs": DAY}, buffer_bytes=LEAST_BUFFER_BYTES)
    made = choose_checkpoints(plan.model_copy(update={"hardware": trial.cost.profile}), request, trial)
    own, *_, shared = made.levels
    assert (own.level, shared.level) == ("memory", "pfs")
    assert own.mtbf_s == pytest.approx(1 / (1 / HOUR + 1 / DAY))
    again_s = request.restart_s + trial.restored_s("memory") + trial.fetched_s()
    assert shared.mtbf_s == pytest.approx(1 / (again_s / 2 / DAY**2)), "the other one of two nodes"
    assert made.most_lost_s == pytest.approx(
        own.every * plan.prediction.iteration_s * (1 + own.cost_s / own.every) + own.latency_s, rel=0.01
    )
    assert own.stored_bytes == 2 * (request.keep + 2) * trial.node_bytes, "its own, and the copies"
    assert own.restart_s < again_s
    assert any("each node also has what the node before saves" in words for words in made.assumptions)


def test_the_copy_for_the_next_node_crosses_the_network():
    for slower in (1.0, 50.0):
        trial = on_nodes(slower)
        sent_s = trial.node_bytes / trial.cost.profile.inter_node.bytes_per_s.value
        assert trial.promoted("memory", "memory").latency_s >= sent_s
    assert trial.promoted("memory", "memory").latency_s > 5 * on_nodes().promoted("memory", "memory").latency_s
    alone = Trial(planned(num_devices=4))
    promoted_s = alone.promoted("memory", "nvme").latency_s
    assert on_nodes().promoted("memory", "nvme").latency_s == pytest.approx(promoted_s, rel=0.01), "2 x half of it"


def test_the_same_plan_has_the_same_checkpoints_and_they_are_verified():
    wanted = CheckpointRequest(mtbf_s={"nvme": DAY}, buffer_bytes=LEAST_BUFFER_BYTES)
    plan = protected(planned("rtx-4090", "gpt2", 1), wanted)
    assert plan.to_json() == protected(planned("rtx-4090", "gpt2", 1), wanted).to_json()
    assert Plan.model_validate(json.loads(plan.to_json())) == plan
    assert "checkpoints" not in json.loads(planned("rtx-4090", "gpt2", 1).to_json())
    verify(plan)
    better = plan.checkpoints.model_copy(update={"waste": plan.checkpoints.waste * 0.999})
    with pytest.raises(ValueError, match=r"states checkpoints\.waste 0\.\d+, but it is 0\.\d+"):
        verify(plan.model_copy(update={"checkpoints": better}))
    first = plan.checkpoints.levels[0]
    longer = plan.checkpoints.model_copy(
        update={"levels": (first.model_copy(update={"every": first.every + 1}), *plan.checkpoints.levels[1:])}
    )
    with pytest.raises(ValueError, match=r"checkpoints\.levels\[0\]\.every"):
        verify(plan.model_copy(update={"checkpoints": longer}))


@settings(deadline=None, max_examples=examples(6))
@given(
    st.dictionaries(st.sampled_from(LEVELS), st.floats(0.5, 1000.0), min_size=1),
    st.sampled_from([None, 0.002, 0.02]),
    st.sampled_from([None, 600.0, 7200.0]),
    st.sampled_from([None, 0.5, 5.0]),
)
def test_limits_hold_whatever_is_asked(mtbf_h, max_overhead, max_lost_s, drive_writes_per_day):
    wanted = CheckpointRequest(
        mtbf_s={level: hours * HOUR for level, hours in mtbf_h.items()},
        max_overhead=max_overhead,
        max_lost_s=max_lost_s,
        drive_writes_per_day=drive_writes_per_day,
    )
    plan = far_from_pfs()
    try:
        made = choose_checkpoints(plan, wanted, trial())
    except CheckpointsError as error:
        assert max_overhead is not None or max_lost_s is not None
        assert "allow " in str(error)  # the remedy
        return
    assert max_overhead is None or made.overhead <= max_overhead * (1 + 1e-9)
    assert max_lost_s is None or made.most_lost_s <= max_lost_s * (1 + 1e-9)
    survivors = {LEVELS.index(each.level) for each in made.levels}
    assert max(survivors) >= max(LEVELS.index(level) for level in wanted.mtbf_s)
    assert sum(1 / each.mtbf_s for each in made.levels if each.mtbf_s) == pytest.approx(wanted.failures_per_s)
    for each in made.levels:
        if each.level == "nvme" and drive_writes_per_day is not None:
            capacity_bytes = plan.hardware.nvme.capacity_bytes.value
            assert each.written_bytes_per_day <= drive_writes_per_day * capacity_bytes * (1 + 1e-9)
    assert 0 <= made.overhead <= made.waste / (1 - made.waste)


def test_what_binds_is_named():
    plan = far_from_pfs()

    def wanted(mtbf_s: float = HOUR, **limits: float) -> CheckpointPlan:
        question = CheckpointRequest(mtbf_s={"nvme": mtbf_s}, buffer_bytes=LEAST_BUFFER_BYTES, **limits)
        return choose_checkpoints(plan, question, trial())

    free = wanted()
    last = free.levels[-1]
    assert last.level == "nvme"
    assert {each.bound for each in free.levels} <= {"waste", "drain", "iteration"}
    interval_s = last.every * plan.prediction.iteration_s
    per_day = trial().shard_bytes * 4 * DAY / (3 * interval_s) / plan.hardware.nvme.capacity_bytes.value
    worn = wanted(drive_writes_per_day=per_day)
    assert (worn.levels[-1].level, worn.levels[-1].bound) == ("nvme", "endurance")
    assert 3 * last.every <= worn.levels[-1].every <= 4 * last.every
    assert "overhead" in {each.bound for each in wanted(max_overhead=free.overhead / 4).levels}
    rare = wanted(100 * DAY)
    assert "lost work" in {each.bound for each in wanted(100 * DAY, max_lost_s=rare.most_lost_s / 2).levels}
    assert worn.waste > free.waste
    endurance = plan.hardware.nvme.capacity_bytes.model_copy(
        update={"value": per_day * plan.hardware.nvme.capacity_bytes.value}
    )
    nvme = plan.hardware.nvme.model_copy(update={"endurance_bytes_per_day": endurance})
    stated = plan.model_copy(update={"hardware": plan.hardware.model_copy(update={"nvme": nvme})})
    question = CheckpointRequest(mtbf_s={"nvme": HOUR}, buffer_bytes=LEAST_BUFFER_BYTES)
    by_profile = choose_checkpoints(stated, question, Trial(stated))
    assert (by_profile.levels[-1].every, by_profile.levels[-1].bound) == (worn.levels[-1].every, "endurance")
    assert any("a day, as the profile says" in line for line in by_profile.assumptions)


def test_levels_without_room_are_left_out_and_that_is_said():
    plan, wanted = far_from_pfs(), CheckpointRequest(mtbf_s={"nvme": 6 * HOUR}, buffer_bytes=LEAST_BUFFER_BYTES)
    made = choose_checkpoints(plan.model_copy(update={"hardware": varied(plan.hardware, nvme=1e9)}), wanted)
    assert made.levels[-1].level == "pfs"
    assert made.left_out["nvme"] == "4 checkpoints of 4.91 GB have no room in the 1 GB that are free"
    nowhere = plan.model_copy(update={"hardware": varied(plan.hardware, nvme=1e9, pfs=1e9)})
    message = r"no storage is left that survives what nvme=21600s .*nvme: 4 checkpoints.*; pfs: 4 checkpoints"
    with pytest.raises(CheckpointsError, match=message):
        choose_checkpoints(nowhere, wanted)
    quantity = plan.hardware.host.memory_bytes.model_copy(update={"value": 1e9})
    host = plan.hardware.host.model_copy(update={"memory_bytes": quantity})
    hardware = plan.hardware.model_copy(update={"host": host})
    prediction = plan.prediction.model_copy(update={"memory": {}})  # all on the device
    small = plan.model_copy(update={"hardware": hardware, "prediction": prediction})
    made = choose_checkpoints(small, wanted)
    assert [each.level for each in made.levels] == ["nvme"]
    assert made.left_out["memory"].endswith("no room in the 0.732 GB that are free")  # 1 GB less four rings
    with pytest.raises(
        CheckpointsError, match=r"checkpoints need 8 GB of each host.*leaves 1 GB.*--checkpoints buffer="
    ):
        choose_checkpoints(small, wanted.model_copy(update={"buffer_bytes": 2 * 10**9}))


def test_a_profile_without_storage_says_what_to_do():
    plan = planned("h100")
    with pytest.raises(
        CheckpointsError, match=r"survives what pfs=2592000s.*profile h100 has none.*--checkpoints pfs-bandwidth="
    ):
        choose_checkpoints(plan, CheckpointRequest(mtbf_s=KINDS))


def test_limits_that_contradict_each_other_are_one_line_with_the_remedy():
    wanted = CheckpointRequest(
        mtbf_s={"pfs": DAY}, max_overhead=1e-8, max_lost_s=3600.0, buffer_bytes=LEAST_BUFFER_BYTES
    )
    message = (
        r"no checkpoints keep --checkpoints max-overhead=1e-06% and --checkpoints max-lost-work=3600s; "
        r"allow .* % of overhead, or"
    )
    with pytest.raises(CheckpointsError, match=message):
        choose_checkpoints(far_from_pfs(), wanted, trial())


def test_drives_that_training_wears_out_take_no_checkpoints():
    plan = on_drives()
    writes = Trial(plan).written_bytes  # state that neither device nor host hold
    assert writes > 0, "this model needs the drives"
    per_day = 0.5 * writes * DAY / plan.prediction.iteration_s / plan.hardware.nvme.capacity_bytes.value
    with pytest.raises(CheckpointsError, match=r"training alone writes .* a day, as much as the drives endure or more"):
        choose_checkpoints(plan, CheckpointRequest(mtbf_s={"nvme": DAY}, drive_writes_per_day=per_day))


def test_state_on_drives_competes_with_its_checkpoints():
    """A checkpoint of state on NVMe reads it there, and writes it there, beside training that does both."""
    plan = on_drives()
    trial = Trial(plan)
    nvme = plan.hardware.nvme
    alone_s = trial.shard_bytes / nvme.write.best_rate_per_s()
    measured = trial.saved("nvme", LEAST_BUFFER_BYTES)
    assert measured.latency_s > 1.05 * alone_s
    made = choose_checkpoints(plan, CheckpointRequest(mtbf_s={"nvme": DAY}))
    assert made.levels[-1].level == "nvme"
    why_not = {row.name: row.why_not for row in engine_rows(made, trial)}
    assert why_not["datastates"] == "its code refuses state that is not on the device"
    assert why_not["checkfreq-async"].startswith("needs 4.91 GB more of the host")


def test_filling_a_slower_level_competes_with_training_for_drives():
    """One thread reads, hashes, writes, hashes, and reads again: beside state on the same drives both take longer."""
    plan = on_drives()
    beside, alone = Trial(plan), trial()
    for each, interferes in ((beside, True), (alone, False)):
        nvme, size = each.cost.profile.nvme, each.shard_bytes * each.cost.ranks_per_node
        copied = 2 / each.cost.profile.host.elementwise_bytes_per_s.value * each.cost.profile.host.num_optimizer_cores
        passes = 3 / HASH_BYTES_PER_S.value + copied
        drives = 1 / nvme.write.best_rate_per_s() + 1 / nvme.read.best_rate_per_s()
        found = each.promoted("memory", "nvme")
        if interferes:
            assert found.latency_s > 1.3 * size * (passes + drives)
            assert found.cost_s > 0.002 * found.latency_s
        else:
            assert 0.98 < found.latency_s / (size * (passes + drives)) < 1.25  # training uses cores and DRAM too
            assert found.cost_s < 0.001 * found.latency_s


def test_checksums_are_made_at_the_rate_of_the_profile():
    plan = planned("rtx-4090", "gpt2", 1)
    rate = plan.hardware.host.dram_bytes_per_s.model_copy(update={"value": 1e8})
    host = plan.hardware.host.model_copy(update={"hash_bytes_per_s": rate})
    slow = plan.model_copy(update={"hardware": plan.hardware.model_copy(update={"host": host})})
    made = choose_checkpoints(slow, CheckpointRequest(mtbf_s={"nvme": DAY}))
    assert made.levels[-1].latency_s >= made.size_bytes / (NUM_THREADS * 1e8)
    assert any(words.startswith("checksums: 0.1 GB/s per core") for words in made.assumptions)


def test_ours_wastes_less_than_other_engines_at_their_best():
    """Beside other engines that take all the memory that is free, ours gets as much as pays."""
    shared = Trial(planned())
    everything = choose_checkpoints(planned(), CheckpointRequest(mtbf_s=KINDS), shared)
    one = choose_checkpoints(planned(), CheckpointRequest(mtbf_s={"nvme": 6 * HOUR}), shared)
    beside = [list(engine_rows(made, shared)) for made in (everything, one)]
    for made, rows in zip((everything, one), beside, strict=True):
        assert [row.name for row in rows] == list(POLICIES)
        for row in rows:
            assert row.waste > made.waste
            assert row.every >= 1
    assert {row.level for row in beside[0]} == {"pfs"}  # nothing else survives all
    incomplete = protected(planned("rtx-4090", "gpt2", 1), CheckpointRequest(mtbf_s={"nvme": DAY})).checkpoints
    why_not = {row.name: row.why_not for row in incomplete.engines}
    assert "serialise_bytes_per_s" in why_not["deepspeed"]


@pytest.mark.part(2)
@pytest.mark.parametrize("num_devices", [4, 2])
def test_pipelines_save_what_their_stages_have(num_devices: int):
    """With as many data-parallel ranks each saves its part of the state, and the node with the largest stage most."""
    plan = planned("polaris-a100-40g", "gpt2", num_devices, pipeline_parallel=2, micro_batch=None, global_batch=8)
    shared = Trial(plan)
    made = choose_checkpoints(plan, CheckpointRequest(mtbf_s={"nvme": DAY}), shared)
    config = resolve_model("gpt2")
    tied = config.vocab_size * config.hidden_size  # the embedding, of which the last stage has a copy
    num_params = sum(unit.num_params for unit in plan.units())
    assert made.size_bytes == pytest.approx(12 * (num_params + tied), rel=1e-6)
    assert shared.node_bytes == made.size_bytes  # one node has all
    assert shared.shard_bytes > made.size_bytes / num_devices
    assert verify(plan.model_copy(update={"checkpoints": made}).sealed())
    # A stage that has to wait for its checkpoint keeps the others waiting.
    blocking = saved_by(shared, POLICIES["deepspeed"], "nvme")
    assert blocking.cost_s > shared.shard_bytes / plan.hardware.nvme.write.best_rate_per_s()
    assert shared.saved("nvme", 2 * shared.shard_bytes).cost_s < blocking.cost_s / 10


def test_expected_times_are_those_of_simulated_runs():
    made = chosen().model_copy(update={"request": chosen().request.model_copy(update={"num_iterations": 10_000})})
    rate, work_s = made.request.failures_per_s, made.work_s
    assert work_s == 10_000 * made.iteration_s
    rng = np.random.default_rng(3)
    spent_s, num_runs = 0.0, 20_000
    for _ in range(num_runs):  # each failure loses all
        while (life_s := rng.exponential(1 / rate)) < work_s:
            spent_s += life_s + made.request.restart_s
        spent_s += work_s
    # A failure while restarting is another failure: the formula's restart is part of a life.
    assert spent_s / num_runs == pytest.approx(made.without_s, rel=0.02)
    assert made.expected_s == pytest.approx(work_s / (1 - made.waste))
    forever = made.model_copy(update={"request": made.request.model_copy(update={"num_iterations": 10**9})})
    assert forever.without_s == math.inf
    assert forever.expected_s < math.inf


def test_a_level_that_the_plan_has_not_is_refused():
    made = choose_checkpoints(planned("rtx-4090", "gpt2", 1), CheckpointRequest(mtbf_s={"nvme": DAY}))
    with pytest.raises(ValueError, match=r"makes no checkpoints at level pfs, but at .*nvme"):
        made.every("pfs")
