"""Engine policies: what they place, and what follows from it on machines with round numbers."""

import importlib
import itertools
import re
from collections import Counter, defaultdict

import pytest
from amount import examples
from cases import MODELS, small_units
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import machine

from hwprofiles.profile import HardwareProfile
from hwprofiles.registry import load_profile
from planner.choices.request import Request
from planner.choices.variants import variants
from planner.costs.model import CostModel
from planner.decisions import Decisions, Place, Sharding
from planner.graph import Batch, build_graph, units
from planner.models import resolve_model
from planner.placements import mixed
from planner.plan.planning import _infeasible
from planner.schedule.tasks import Lane, Op, Phase, Task, Tier
from planner.search import Scorer, best_of
from planner.setup import Mix, Setup, pieces
from planner.simulate.machine import run_until_steady
from planner.simulate.prediction import memory_peaks
from ullage.rivals.best import best_of_engine, engine_policies
from ullage.rivals.decisions import GradientPath, HostUpdate
from ullage.rivals.engines.catalogue import HOST_PARAMETER_POLICIES, POLICIES, STORAGE_POLICIES, can_run
from ullage.rivals.engines.deciding import gpu_only
from ullage.rivals.engines.deepspeed import super_offload, twin_flow, zero_infinity, zero_offload
from ullage.rivals.engines.interleaved import interleaved
from ullage.rivals.engines.ratel import ratel
from ullage.rivals.lowering import lower

UNITS = small_units("demo-llama")
BUCKETS = importlib.import_module("ullage.rivals.passes.gradients")


def setup(**given: object) -> Setup:
    return Setup(UNITS, Sharding(**{"subgroup_params": 500_000, **given}))  # type: ignore[arg-type]


def places(decisions: Decisions) -> list[Place]:
    return [place for unit in UNITS for place in decisions.units[unit.name].update]


def subgroup_of_each_piece(some: Setup) -> list[int]:
    """Return the subgroup, cut across units, that each piece begins in."""
    offset, found = 0, []
    for unit in UNITS:
        for size in pieces(some, unit):
            found.append(offset // some.given.subgroup_params)
            offset += size
    return found


def iteration_s(profile: HardwareProfile, decisions: Decisions) -> float:
    cost = CostModel(profile, UNITS, decisions)
    simulation = run_until_steady(lower(UNITS, decisions, asynchronous=cost.asynchronous), cost)
    return simulation.timeline.period_s(simulation.steady)


def test_twin_flow_takes_the_first_subgroups_to_the_device() -> None:
    subgroups = subgroup_of_each_piece(setup())
    total = max(subgroups) + 1
    fractions = [0.0, 0.3, 1.0]
    tried = list(twin_flow(setup(), fractions))
    assert len(tried) == 2 * len(fractions)  # activations kept and recomputed
    for fraction, decisions in zip([f for f in fractions for _ in range(2)], tried, strict=True):
        first = total - round(total * fraction)
        assert places(decisions) == [Place.GPU if subgroup < first else Place.CPU for subgroup in subgroups]


def test_interleaved_streams_every_kth() -> None:
    for stride, decisions in zip([3, 3, 4, 4], interleaved(setup(), [3, 4]), strict=True):
        for subgroup, place in zip(subgroup_of_each_piece(setup()), places(decisions), strict=True):
            assert place is (Place.STREAM if (subgroup + 1) % stride == 0 else Place.CPU)
        assert decisions.num_state_slots == 1  # one in flight


def test_what_policies_are() -> None:
    first = {name: next(iter(policy(setup()))) for name, policy in POLICIES.items()}
    assert set(places(first["gpu-only"])) == {Place.GPU}
    assert set(places(first["zero-offload"])) == {Place.CPU}
    assert first["zero-offload-blocking"].gradient_path is GradientPath.ZERO3_BLOCKING
    assert first["zero-offload"].gradient_path is GradientPath.ZERO3_ASYNC
    assert first["interleaved"].gradient_path is GradientPath.ZERO3_ASYNC
    assert first["interleaved"].host_update is HostUpdate.DEVICE_CAST
    hooked = {"zero-offload", "zero-offload-blocking", "twin-flow", "interleaved", "super-offload", "zenflow"}
    assert {name for name, d in first.items() if d.module_hooks} == hooked
    assert {name for name, d in first.items() if d.overlap_next_forward} == {"roundpipe", "streaming"}
    assert {name: d.policy for name, d in first.items()} == {name: name for name in POLICIES}
    stages = {d.zero_stage for d in gpu_only(setup(data_parallel=4))}
    assert stages == {1, 2, 3}


@pytest.mark.parametrize("clip", [True, False])
def test_super_offload_updates_beside_backward_only_if_nothing_is_clipped(clip: bool) -> None:
    """Its worker costs two copies more, and what it overlaps is the updates: weights go up when backward has ended."""
    some = setup(clip=clip)
    (half, _, decisions, _), (slower, _) = super_offload(some, (0.5, 1.0)), zero_offload(some)
    schedule = lower(UNITS, decisions, asynchronous=True)
    last = max(task.index for task in schedule.tasks if task.op is Op.BACKWARD)
    chains: dict[tuple[str, int], list[Task]] = defaultdict(list)
    for task in schedule.tasks:
        if task.op in {Op.PASS, Op.UPDATE, Op.UPLOAD}:
            chains[task.unit, task.piece].append(task)
    uploads = []
    for chain in chains.values():
        copied, update, returned, upload = chain
        assert [task.op for task in chain] == [Op.PASS, Op.UPDATE, Op.PASS, Op.UPLOAD]
        assert (copied.num_bytes, returned.num_bytes) == (8 * update.num_params, 16 * update.num_params)
        assert not upload.pinned
        assert copied.index in update.after
        assert returned.index > last  # and on the lane of the update, which keeps its order
        assert (returned.lane, returned.index > update.index) == (update.lane, True)
        assert upload.after == (returned.index,)
        uploads.append((returned, upload))
    assert len(chains) == len(places(decisions))
    assert (min(chain[0].index for chain in chains.values()) > last) == clip
    for (_, upload), (returned, _) in itertools.pairwise(sorted(uploads, key=lambda pair: pair[1].index)):
        assert upload.index in returned.after  # one after the other
    tasks = lower(UNITS, half, asynchronous=True).tasks  # backward ends with units that the device updates
    last = max(task.index for task in tasks if task.op is Op.BACKWARD)
    (returned,) = next(task for task in tasks if task.op is Op.UPLOAD).after
    assert clip or last in tasks[returned].after
    slow_host = machine(flop_per_s=1e12)  # backward takes about as long as updates
    assert (iteration_s(slow_host, decisions) > iteration_s(slow_host, slower)) == clip


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("ranks", [1, 4])
def test_fsdp2_moves_master_copies_and_adds_up_on_the_host(ranks: int, clip: bool) -> None:
    """As ``torch.distributed.fsdp`` does: 4 bytes in for every use, 4 out for every micro-batch, nothing overlaps."""
    keeping, recomputed = POLICIES["fsdp2-offload"](setup(data_parallel=ranks, num_micro_batches=3, clip=clip))
    for decisions in (keeping, recomputed):
        schedule = lower(UNITS, decisions, asynchronous=True)
        shard = sum(-(-unit.num_params // ranks) for unit in UNITS)
        tasks = {op: [task for task in schedule.tasks if task.op is op] for op in Op}
        assert sum(task.num_bytes for task in tasks[Op.FETCH]) % 4 == 0
        flushed = [sum(t.num_bytes for t in tasks[Op.FLUSH] if t.micro_batch == i) for i in range(3)]
        assert flushed == [4 * shard] * 3
        assert [all(t.pinned for t in tasks[Op.FLUSH] if t.micro_batch == i) for i in range(3)] == [True, False, False]
        assert not tasks[Op.UPLOAD]
        if ranks > 1:
            assert sum(task.num_bytes for task in tasks[Op.GATHER]) == ranks / 2 * sum(
                task.num_bytes for task in tasks[Op.FETCH]
            )
        assert sum(task.num_bytes for task in tasks[Op.PASS]) == (12 * shard if clip else 0)
        held = Counter[Tier]()
        for buffer in schedule.buffers:
            held[buffer.tier] += buffer.num_bytes if buffer.first is None else 0
        assert held[Tier.HOST] == 16 * shard  # weights, two moments and the gradient
        # What comes next waits for a gradient that is added on the host, not for the first micro-batch's.
        computing = [task for task in schedule.tasks if task.lane is Lane.COMPUTE]
        flush = {(task.unit, task.micro_batch): task.index for task in tasks[Op.FLUSH]}
        for task, following in itertools.pairwise(computing):
            if task.op is Op.BACKWARD and (key := (task.unit, task.micro_batch)) in flush:
                assert (flush[key] in following.after) == (task.micro_batch > 0)
        first_update = min(task.index for task in tasks[Op.UPDATE])
        assert first_update > max(task.index for task in tasks[Op.BACKWARD])


def test_what_storage_policies_are() -> None:
    first = {name: next(iter(policy(setup()))) for name, policy in STORAGE_POLICIES.items()}
    assert {name: d.policy for name, d in first.items()} == {name: name for name in STORAGE_POLICIES}
    assert all(set(places(d)) == {Place.NVME} for d in first.values())
    infinity, swapping = first["zero-infinity"], first["ratel"]
    assert infinity.spill_gradients
    assert infinity.gradient_path is GradientPath.ZERO3_PINNED
    assert {unit.params for unit in infinity.units.values()} == {"gpu"}
    assert (swapping.clip, swapping.update_start) == (False, "backward")
    assert {unit.params for unit in swapping.units.values()} == {"nvme"}


def test_every_number_of_swapped_segments_is_tried() -> None:
    names = setup().swappable
    tried = [{unit.segment for unit in UNITS if decisions.units[unit.name].offloads} for decisions in ratel(setup())]
    assert tried == [set(names[:count]) for count in range(len(names) + 1)]
    (some,) = ratel(setup(), (2,), num_on_host=1)
    assert [some.units[f"{name}.attn"].activations for name in names[:2]] == ["offload-nvme", "offload"]


def test_pipelines_make_swapping_faster() -> None:
    """The swapper takes turns; reading ahead helps, and writing behind too, by no more than the whole update."""
    times = [
        iteration_s(machine(), next(iter(zero_infinity(setup(), pipeline_read=r, pipeline_write=w))))
        for r, w in ((False, False), (True, False), (True, True))
    ]
    assert times[0] > times[1] >= times[2]
    assert times[2] < iteration_s(machine(), next(iter(POLICIES["zero-offload-blocking"](setup())))) + times[0]


def test_storage_policies_in_the_order_of_what_they_overlap() -> None:
    """State on NVMe is slower than on the host; updates during backward are faster than after it."""
    infinity, swapping = (
        min(iteration_s(machine(), d) for d in policy(setup())) for policy in STORAGE_POLICIES.values()
    )
    on_host = min(iteration_s(machine(), d) for d in POLICIES["zero-offload-blocking"](setup()))
    assert swapping < infinity
    assert on_host < infinity


def test_engines_in_the_order_that_overlap_implies() -> None:
    """Blocking gradient copies are slower than asynchronous ones, and those slower than no offload at all."""
    by_name = {name: min(iteration_s(machine(), d) for d in policy(setup())) for name, policy in POLICIES.items()}
    # Its fractions include 0, but it passes over gradients on the device.
    assert by_name["gpu-only"] < by_name["twin-flow"] == pytest.approx(by_name["gpu-only"], rel=0.02)
    assert by_name["gpu-only"] < by_name["zero-offload"] < by_name["zero-offload-blocking"]
    assert by_name["interleaved"] < by_name["zero-offload"]


@pytest.mark.parametrize("blocks", [True, False])
def test_deepspeed_gathers_behind_its_reductions(blocks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gathers large units ahead too. A caller that waits for a gradient gathers nothing meanwhile."""
    monkeypatch.setattr(BUCKETS, "REDUCE_BUCKET_PARAMS", 0)
    policy = POLICIES["zero-offload-blocking" if blocks else "zero-offload"]
    decisions = next(iter(policy(setup(data_parallel=2)))).model_copy(update={"num_param_slots": 1})
    tasks = lower(UNITS, decisions, asynchronous=True).tasks
    collectives = [t for t in tasks if t.lane is Lane.COLLECTIVE and t.phase is Phase.BACKWARD]
    place = {(task.op, task.unit): number for number, task in enumerate(collectives)}
    last_copies = {t.unit: t.index for t in tasks if t.op is Op.OVERWRITE}
    ahead = 0
    for task in tasks:
        if task.op is not Op.GATHER or task.phase is not Phase.BACKWARD:
            continue
        # The unit whose slot it takes has been used when its backward has ended.
        freed = [tasks[i].unit for i in task.after if tasks[i].op is Op.BACKWARD]
        for unit in freed:
            ahead += 1
            assert place[Op.SCATTER, unit] < place[Op.GATHER, task.unit]
            assert (last_copies[unit] in task.after) == blocks
    assert ahead


@pytest.mark.parametrize("num_params", [0, 3_000_000, 10**9])
@pytest.mark.parametrize("data_parallel", [1, 2])
def test_a_caller_that_blocks_waits_once_for_each_bucket(
    num_params: int, data_parallel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients leave together when the next one would not fit, and the next backward waits for all of them."""
    monkeypatch.setattr(BUCKETS, "REDUCE_BUCKET_PARAMS", num_params)
    decisions = next(zero_offload(setup(data_parallel=data_parallel), GradientPath.ZERO3_BLOCKING))
    tasks = lower(UNITS, decisions, asynchronous=True).tasks
    sizes = {unit.name: unit.num_params for unit in UNITS}
    backwards = [task for task in tasks if task.op is Op.BACKWARD]
    copies = {task.unit: task for task in tasks if task.op is Op.OVERWRITE}
    for task, coming in itertools.pairwise(backwards):
        bucket = [each.unit for each in backwards if each.index <= task.index < copies[each.unit].index]
        waited = [tasks[i].unit for i in coming.after if tasks[i].op is Op.OVERWRITE]
        full = sum(sizes[name] for name in bucket) + sizes[coming.unit] > num_params
        assert waited == ([task.unit] if full else [])


@pytest.mark.parametrize("name", ["round", "a100-40", "h100"])
def test_twin_flow_takes_longer_the_more_the_cpu_updates(name: str) -> None:
    profile = machine() if name == "round" else load_profile(name)
    # The host's time for hooks and kernels would hide all else: this model is tiny.
    issue_s = profile.device.issue_s.model_copy(update={"value": 1e-6})
    device = profile.device.model_copy(update={"hook_s": None, "issue_s": issue_s})
    profile = profile.model_copy(update={"device": device})
    fractions = [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    times_s = [iteration_s(profile, d) for d in list(twin_flow(setup(), fractions))[::2]]
    assert all(later > sooner * (1 - 1e-9) for sooner, later in itertools.pairwise(times_s))
    assert times_s[-1] > 1.2 * times_s[0]


@pytest.mark.parametrize("recompute", [False, True])
def test_plain_training_needs_most_device_memory(recompute: bool) -> None:
    peaks = {}
    for name, policy in POLICIES.items():
        for decisions in list(policy(setup()))[int(recompute) :: 2]:
            cost = CostModel(machine(), UNITS, decisions)
            simulation = run_until_steady(lower(UNITS, decisions, asynchronous=True), cost)
            memory = memory_peaks(simulation.timeline, simulation.steady, cost)
            held = memory[Tier.GPU].peak_bytes - decisions.device_buffer_bytes
            peaks[name, places(decisions).count(Place.GPU)] = held
    most = peaks.pop(("gpu-only", len(places(next(gpu_only(setup()))))))
    half = len(places(next(gpu_only(setup())))) / 2
    # Nothing held against the same and more: Twin-Flow with nothing on the CPU keeps its gradient buffer, in fp32.
    assert most >= 0.85 * max(peaks.values())
    assert most > max(peak for (_, num_gpu), peak in peaks.items() if num_gpu <= half)


@given(st.sampled_from(MODELS), st.sampled_from([0.5, 1.1, 1.3, 1.6, 2.0, 3.0]), st.sampled_from([1, 4]), st.booleans())
@settings(max_examples=examples(30), deadline=None)
def test_engines_recompute_only_where_they_must(model: str, room: float, ranks: int, clip: bool) -> None:
    """What need not be scored would not be chosen: the best of all settings, on devices of any size."""
    many = units(build_graph(resolve_model(model), Batch(64, 512)))  # activations are most of the memory
    chosen = Setup(many, Sharding(data_parallel=ranks, micro_batch=64, subgroup_params=1_000_000, clip=clip))
    gpu_bytes = room * sum(unit.saved_bytes for unit in chosen.units)
    cost = CostModel(machine(gpu_bytes=gpu_bytes, devices_per_node=ranks), chosen.units, chosen.given)
    scorer, thorough = (Scorer(chosen.units, 512, cost, lower=lower) for _ in range(2))
    names = [name for name in POLICIES if can_run(name, chosen, 1) and name != "streaming"]  # that is a search
    found = {name: best_of_engine(chosen, scorer, name) for name in names}
    for name in names:
        best = best_of(map(thorough.score, POLICIES[name](chosen)))
        if name not in HOST_PARAMETER_POLICIES or not best.missing_bytes:
            overload, iteration_s = best.order
            expected = (overload, iteration_s / best.decisions.num_steps)
            assert found[name].order == pytest.approx(expected, rel=1e-9)
    if not any(candidate.missing_bytes for candidate in found.values()):
        assert scorer.num_simulations <= thorough.num_simulations


@pytest.mark.parametrize("profile", ["rtx-4090", "a100-80"])
def test_engines_of_many_micro_batches_are_compared_by_few(profile: str) -> None:
    """The rows are those of whole schedules; see [Note: Few micro-batches] in ``planner/search/scoring.py``."""
    (variant,) = variants(
        Request(
            resolve_model("gpt2"), load_profile(profile), seq_len=256, micro_batch=4, num_micro_batches=16, clip=False
        )
    )
    few, whole = (Scorer.of(variant, lower=lower, whole=way) for way in (False, True))
    names = [name for name in (*POLICIES, *STORAGE_POLICIES) if can_run(name, variant.setup, 1)]
    assert len(names) > 8
    for name in names:
        found, expected = (best_of_engine(variant.setup, scorer, name) for scorer in (few, whole))
        assert found.iteration_s == pytest.approx(expected.iteration_s, rel=1e-2)
        assert found.filled == pytest.approx(expected.filled, rel=1e-2)


def test_a_mix_fills_the_device_from_the_front_and_spreads_what_is_streamed() -> None:
    total = len(places(next(gpu_only(setup()))))
    mix = Mix(num_gpu=2, num_stream=2, num_keep=1)
    placed = places(mixed(setup(), mix))
    assert placed[:2] == [Place.GPU, Place.GPU]
    assert Counter(placed) == {Place.GPU: 2, Place.STREAM: 2, Place.CPU: total - 4}
    assert Place.STREAM not in placed[:3]  # not all at the front, but evenly among the rest
    assert placed[-1] is Place.STREAM
    decisions = mixed(setup(), mix)
    saved_segments = {
        unit.segment for unit in UNITS if unit.recompute and decisions.units[unit.name].activations == "keep"
    }
    assert saved_segments == {"layers.1"}  # the last: it is needed again soonest


def test_a_mix_serves_late_units_from_the_host_unless_they_are_tied() -> None:
    for model in MODELS:
        units = small_units(model)
        decisions = mixed(Setup(units), Mix(num_gpu=0, num_stream=0, num_keep=0, num_host=len(units)))
        tied = {name for unit in units if unit.shared_units for name in (unit.name, *unit.shared_units)}
        on_device = {name for name, unit in decisions.units.items() if unit.params == "gpu"}
        assert on_device == tied


def test_without_clipping_updates_start_during_backward() -> None:
    mix = Mix(num_gpu=0, num_stream=0, num_keep=9)
    early, late = mixed(setup(clip=False), mix), mixed(setup(clip=True), mix)
    assert (early.update_start, late.update_start) == ("backward", "step")
    for decisions in (early, late):
        cost = CostModel(machine(), UNITS, decisions)
        schedule = lower(UNITS, decisions, asynchronous=True)
        timeline = run_until_steady(schedule, cost).timeline
        first_update = next(t.index for t in schedule.tasks if t.op is Op.UPDATE)
        last_backward = [t.index for t in schedule.tasks if t.op is Op.BACKWARD][-1]
        during = timeline.start_s[0, first_update] < timeline.end_s[0, last_backward]
        assert during == (decisions is early)


@pytest.mark.parametrize("ranks", [1, 4])
def test_pieces_agree_with_decisions(ranks: int) -> None:
    chosen = setup(data_parallel=ranks)
    for name, policy in POLICIES.items():
        for decisions in policy(chosen) if can_run(name, chosen, 1) else ():
            for unit in UNITS:
                assert decisions.piece_params(unit) == pieces(chosen, unit)


def test_a_variant_has_units_for_the_batch_and_the_precision() -> None:
    request = Request(model=resolve_model("demo-llama"), hardware=machine(), seq_len=64, micro_batch=2)
    two = variants(request)[0]
    chosen = two.setup
    assert Scorer.of(two, lower=lower).score(next(gpu_only(chosen))).missing_bytes == {}
    saved_bytes = chosen.units[1].saved_bytes
    one = Request(resolve_model("demo-llama"), machine(), seq_len=64, micro_batch=1)
    assert saved_bytes == 2 * variants(one)[0].setup.units[1].saved_bytes


def test_too_little_nvme_is_named() -> None:
    """What drives cannot hold is rejected before simulating, with the tier's name and a remedy; so is having none."""
    for num_bytes, message in ((1e7, r"nvme \(1 device\(s\) per node\) lacks .* more nodes"), (0, "has no nvme")):
        request = Request(resolve_model("demo-llama"), machine(nvme_bytes=num_bytes), seq_len=64, micro_batch=1)
        one = variants(request)[0]
        chosen = one.setup
        decisions = next(zero_infinity(chosen))
        if not num_bytes:
            with pytest.raises(ValueError, match=message):
                Scorer.of(one, lower=lower).score(decisions)
            continue
        candidate = Scorer.of(one, lower=lower).score(decisions)
        held = decisions.state_bytes_per_param + decisions.spilled_bytes_per_param
        total = sum(unit.num_params for unit in chosen.units)
        assert candidate.missing_bytes == {Tier.NVME: held * total - num_bytes}
        assert re.search(message, str(_infeasible(decisions, candidate.missing_bytes, variants(request)[0])))


def test_zero_offload_keeps_parameters_on_the_host_where_the_device_is_too_small_for_them() -> None:
    """DeepSpeed's ``offload_param``: every unit is fetched for each use, and the host updates what it serves."""
    for gpu_bytes, where in ((2e10, "gpu"), (5e9, "host")):
        requested = Request(resolve_model("opt-2.7b"), machine(gpu_bytes=gpu_bytes), seq_len=64, micro_batch=1)
        one = variants(requested)[0]
        some = one.setup
        rows = engine_policies(some, Scorer.of(one, lower=lower))
        for name in ("zero-offload-blocking", "zero-offload"):
            found = rows[name]
            assert not found.missing_bytes
            assert {found.decisions.units[unit.name].params for unit in some.units if unit.num_params} == {where}
            ops = Counter(task.op for task in lower(some.units, found.decisions, asynchronous=True).tasks)
            assert bool(ops[Op.FETCH]) == (where == "host")
            assert bool(ops[Op.UPLOAD]) == (where == "gpu")
        assert bool(rows["twin-flow"].missing_bytes) == (where == "host")
