"""Prices: calculated by hand on round numbers, monotone in sizes, and never more than a machine has."""

import dataclasses

import pytest
from amount import examples
from cases import MODELS, Case, cases, small_units
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from machines import machine, quantity, rate

from hwprofiles.paths import replace
from hwprofiles.profile import HardwareProfile
from hwprofiles.quantity import Provenance
from hwprofiles.registry import list_profiles, load_profile
from planner.costs.kernels import _TILES, wave_factor
from planner.costs.layout import Layout
from planner.costs.model import CostModel, total_flop
from planner.costs.rank import RankHardware
from planner.costs.resources import Price, Resource
from planner.costs.scalable import scalables, scaled
from planner.decisions import BF16, MOST_EXCHANGED_BYTES, Precision, Sharding
from planner.graph import Attention, Elementwise, Gemm
from planner.models.kernels import Collective, flop, num_kernels
from planner.schedule.tasks import Lane, Op, Phase, Task
from planner.setup import Setup
from ullage.rivals.engines.catalogue import POLICIES, can_run
from ullage.rivals.lowering import lower

UNITS = small_units("demo-llama", num_layers=1)
FP32 = Precision(weights="fp32")


def task(lane: Lane, op: Op, **fields: object) -> Task:
    return Task(0, lane, op, Phase.UPDATE, **fields)  # type: ignore[arg-type]


def model(profile: HardwareProfile, ranks: int = 1, precision: Precision = BF16) -> CostModel:
    return CostModel(profile, UNITS, Sharding(precision=precision, data_parallel=ranks))


def uses(**amounts: float) -> dict[Resource, float]:
    return {Resource[name]: pytest.approx(amount) for name, amount in amounts.items()}


def check(price: Price, duration_s: float, latency_s: float = 0.0, **amounts: float) -> None:
    assert price.duration_s == pytest.approx(duration_s)
    assert price.latency_s == pytest.approx(latency_s)
    assert dict(price.uses) == uses(**amounts)


def test_copies() -> None:
    cost = model(machine())
    down = {"LINK_DOWN": 2e10, "LINK": 2e10, "DRAM": 2e10}
    up = {"LINK_UP": 2e10, "LINK": 2e10, "DRAM": 2e10}
    check(cost.price(task(Lane.H2D, Op.FETCH, num_bytes=10**10)), 0.5, **down)
    check(cost.price(task(Lane.STATE_IN, Op.LOAD, num_bytes=10**10)), 0.5, **down)
    check(cost.price(task(Lane.D2H, Op.FLUSH, num_bytes=10**10)), 0.5, **up)
    check(cost.price(task(Lane.STATE_OUT, Op.STORE, num_bytes=10**10)), 0.5, **up)
    # What is not pinned goes through a staging buffer: four passes over memory away from the device, one to it.
    pageable = {"LINK_UP": 5e9, "LINK": 5e9, "DRAM": 2e10}
    check(cost.price(task(Lane.D2H, Op.FLUSH, num_bytes=10**10, pinned=False)), 2.0, **pageable)
    check(
        cost.price(task(Lane.H2D, Op.UPLOAD, num_bytes=10**10, pinned=False)),
        2.5,
        LINK_DOWN=4e9,
        LINK=4e9,
        DRAM=4e9,
    )
    stalling = task(Lane.D2H, Op.FLUSH, num_bytes=10**10, stalls=True)
    check(cost.price(stalling), 0.5, DEVICE=1, **up)
    assert cost.price(task(Lane.H2D, Op.FETCH)) == Price(0.0, 0.0)


def test_staged_copies_of_all_ranks_share_the_memory() -> None:
    """Eight ranks have 1.25e10 B/s each. A copy away from the device takes four passes, one to it takes one."""
    cost = model(machine(devices_per_node=8), ranks=8)
    price = cost.price(task(Lane.D2H, Op.FLUSH, num_bytes=10**10, pinned=False))
    assert price.duration_s == pytest.approx(4e10 / 1.25e10)
    assert dict(price.uses)[Resource.DRAM] == pytest.approx(1.25e10)
    assert cost.price(task(Lane.H2D, Op.UPLOAD, num_bytes=10**10, pinned=False)).duration_s == pytest.approx(2.5)


def test_a_copy_by_a_core_reads_and_writes_the_same_memory() -> None:
    cost = model(machine(num_cores_per_copy=1))
    price = cost.price(task(Lane.H2D, Op.FETCH, num_bytes=10**10))
    check(price, 0.5, LINK_DOWN=2e10, LINK=2e10, DRAM=4e10, CORES=1)


def test_later_micro_batches_are_added_to_what_the_host_holds() -> None:
    """Three passes at 5e10 B/s, on a GPU beside the copy; no byte crosses the link twice for it."""
    flush = task(Lane.D2H, Op.FLUSH, num_bytes=10**10, micro_batch=1)
    check(model(machine()).price(flush), 0.6, LINK_UP=1e10 / 0.6, LINK=1e10 / 0.6, DRAM=4e10 / 0.6)
    slow = replace(machine(), {"host.dram_bytes_per_s": 4e10}, Provenance(origin="assumed", source="a test"))
    assert model(slow).price(flush).duration_s == pytest.approx(1.0), "all four passes are of one memory"
    in_turn = dict(model(machine(kind="host")).price(flush).uses)
    assert in_turn[Resource.LINK_UP] == pytest.approx(1e10 / (0.5 + 3e10 / 5e10))


def test_updates() -> None:
    one, shared = model(machine()), model(machine(devices_per_node=2), ranks=2)
    on_cpu = task(Lane.CPU, Op.UPDATE, num_params=10**9)
    check(one.price(on_cpu), 1.0, CORES=4, DRAM=28e9)
    check(shared.price(on_cpu), 2.0, CORES=2, DRAM=14e9)  # both ranks update at the same time
    on_device = task(Lane.GPU_UPDATE, Op.UPDATE, num_params=10**9)
    check(one.price(on_device), 0.1, DEVICE=1)
    check(one.price(task(Lane.CPU, Op.PASS, num_bytes=10**10)), 0.2, CORES=4, DRAM=5e10)
    check(shared.price(task(Lane.CPU, Op.PASS, num_bytes=10**10)), 0.4, CORES=2, DRAM=2.5e10)


def test_where_the_cpu_is_the_device_it_uses_cores_and_dram() -> None:
    cost = model(machine(kind="host"))
    assert not cost.asynchronous
    # 28 B/param at 1e10 params/s is more than the device can draw alone, 2.5e10 B/s.
    check(cost.price(task(Lane.GPU_UPDATE, Op.UPDATE, num_params=10**9)), 0.1, CORES=2, DRAM=2.5e10)
    used = dict(cost.price(task(Lane.COMPUTE, Op.FORWARD, unit="layers.0.mlp")).uses)
    assert used.keys() == {Resource.CORES, Resource.DRAM}


def test_where_the_cpu_is_the_device_it_computes_the_norm_of_gradients_that_stay() -> None:
    norm = {"device": machine(kind="host").device.model_copy(update={"gradient_norm": rate(1e9, "params")})}
    clip = task(Lane.LAUNCH, Op.CLIP, num_params=10**8)
    check(model(machine(kind="host").model_copy(update=norm)).price(clip), 0.0, latency_s=0.1)
    check(model(machine()).price(clip), 0.0)  # on a GPU it is lost in the rate of its memory


def test_kernels() -> None:
    gemm = Gemm(m=1000, n=2000, k=500, count=3)
    attention = Attention(batch=2, num_heads=4, seq_len=128, head_dim=64, causal=True, flash=True, backward=False)
    elementwise = Elementwise(num_bytes=10**9, count=2)
    cost = model(machine())
    assert cost.compute_s([gemm]) == pytest.approx(3 * 2 * 1000 * 2000 * 500 / 1e14)
    assert cost.compute_s([attention]) == pytest.approx(attention.flop / 1e14)
    assert cost.compute_s([elementwise]) == pytest.approx(2e-3)
    assert model(machine(), precision=FP32).compute_s([gemm]) == pytest.approx(2 * cost.compute_s([gemm]))
    assert model(machine(rows_half=1000)).compute_s([gemm]) == pytest.approx(2 * cost.compute_s([gemm]))
    assert model(machine(rows_half=1000)).compute_s([elementwise]) == pytest.approx(2e-3)


def test_backward_of_attention_has_a_rate_of_its_own_if_it_is_known() -> None:
    forward = Attention(batch=2, num_heads=4, seq_len=128, head_dim=64)
    backward, unfused = dataclasses.replace(forward, backward=True), dataclasses.replace(forward, flash=False)
    slower = {"attention_backward": {"bf16": rate(2.5e13, "flop"), "fp32": rate(1e13, "flop")}}
    known = machine().model_copy(update={"device": machine().device.model_copy(update=slower)})
    assert model(machine()).compute_s([backward]) == pytest.approx(backward.flop / 1e14)
    assert model(known).compute_s([backward]) == pytest.approx(backward.flop / 2.5e13)
    assert model(known, precision=FP32).compute_s([backward]) == pytest.approx(backward.flop / 1e13)
    for kernel in (forward, unfused, dataclasses.replace(unfused, backward=True)):
        assert model(known).compute_s([kernel]) == pytest.approx(model(machine()).compute_s([kernel]))
    (scalable,) = (s for s in scalables(known, "bf16", 1, uses_storage=False) if s.key == "device-attention")
    assert model(scaled(known, scalable, 2.0)).compute_s([backward]) == pytest.approx(backward.flop / 5e13)


def test_attention_has_the_rate_of_its_heads_if_it_is_known() -> None:
    rates = {"bf16": 1e13, "bf16-gqa": 2e13, "bf16-128": 3e13, "fp32": 1e12}
    kinds = {name: rate(value, "flop") for name, value in rates.items()}
    known = machine().model_copy(update={"device": machine().device.model_copy(update={"attention": kinds})})
    forward = Attention(batch=2, num_heads=4, seq_len=128, head_dim=64)
    for head_dim, shares_keys, wanted in (
        (64, False, "bf16"),
        (32, True, "bf16-gqa"),
        (128, False, "bf16-128"),
        (96, True, "bf16-128"),  # it was not measured with shared keys
    ):
        kernel = dataclasses.replace(forward, head_dim=head_dim, shares_keys=shares_keys)
        assert model(known).compute_s([kernel]) == pytest.approx(kernel.flop / rates[wanted])
        assert model(known, precision=FP32).compute_s([kernel]) == pytest.approx(kernel.flop / 1e12)
        (scalable,) = (s for s in scalables(known, "bf16", 1, uses_storage=False) if s.key == "device-attention")
        assert model(scaled(known, scalable, 2.0)).compute_s([kernel]) == pytest.approx(kernel.flop / 2 / rates[wanted])


def test_an_elementwise_kernel_too_large_for_the_curve_is_no_faster_than_memory() -> None:
    """The largest size of a curve may have been in a cache."""
    update = {"elementwise": rate(5e12, "bytes", largest=1e7), "memory_bytes_per_s": quantity(2e12, "bytes_per_s")}
    cost = model(machine().model_copy(update={"device": machine().device.model_copy(update=update)}))
    small, large = Elementwise(num_bytes=10**7), Elementwise(num_bytes=10**9)
    assert cost.compute_s([small]) == pytest.approx(1e7 / 5e12)
    assert cost.compute_s([large]) == pytest.approx(1e9 / 2e12)


def test_rows_that_meet_wait_for_one_another_on_a_gpu() -> None:
    """There one after another is added, by few threads; on a CPU, one core adds all rows anyway."""
    alone, meeting = Elementwise(10**6), Elementwise(10**6, num_meeting=512)
    gpu, cpu = model(load_profile("b300")), model(load_profile("epyc-turin-2c"))
    assert gpu.compute_s([meeting]) > 10 * gpu.compute_s([alone])
    assert gpu.compute_s([Elementwise(10**6, num_meeting=1024)]) == pytest.approx(2 * gpu.compute_s([meeting]))
    assert cpu.compute_s([meeting]) == cpu.compute_s([alone])


def test_elementwise_kernels_have_the_rate_of_their_type_if_it_is_known() -> None:
    kernels = [Elementwise(num_bytes=10**9, count=2)]
    assert model(machine(), precision=FP32).compute_s(kernels) == pytest.approx(2e-3)
    device = machine().device.model_copy(update={"elementwise_fp32": rate(4e12, "bytes")})
    both = machine().model_copy(update={"device": device})
    assert model(both, precision=FP32).compute_s(kernels) == pytest.approx(5e-4)
    assert model(both).compute_s(kernels) == pytest.approx(2e-3)
    scalable = next(
        scalable for scalable in scalables(both, "fp32", 1, uses_storage=False) if scalable.key == "device-elementwise"
    )
    assert model(scaled(both, scalable, 2.0), precision=FP32).compute_s(kernels) == pytest.approx(2.5e-4)
    assert model(scaled(both, scalable, 2.0)).compute_s(kernels) == pytest.approx(2e-3)  # of another type


def test_compute_is_the_sum_of_its_kernels() -> None:
    cost, unit = model(machine()), UNITS[1]
    for op, kernels in ((Op.FORWARD, unit.forward), (Op.RECOMPUTE, unit.recompute), (Op.BACKWARD, unit.backward)):
        check(cost.price(task(Lane.COMPUTE, op, unit=unit.name)), cost.compute_s(kernels), DEVICE=1)
    issue = task(Lane.LAUNCH, Op.ISSUE, unit=unit.name, num_kernels=7)
    assert cost.price(issue) == Price(pytest.approx(7e-5), 0.0)


def test_collectives() -> None:
    """Each rank moves all but its own share; between nodes the slower level sets the pace, and latencies add up."""
    profile = machine(devices_per_node=4)
    gather = task(Lane.COLLECTIVE, Op.GATHER, num_bytes=10**10)
    check(model(profile, ranks=4).price(gather), 0.75e10 / 1e11, latency_s=1e-5, FABRIC=1)
    check(model(profile, ranks=2).price(gather), 0.5e10 / 1e11, latency_s=1e-5, FABRIC=1)
    check(model(profile, ranks=8).price(gather), 7 / 8 * 1e10 / 4 / 1e10, latency_s=3e-5, FABRIC=1)
    via = model(machine(devices_per_node=4, via_host_link=True), ranks=4).price(gather)
    assert dict(via.uses)[Resource.LINK_DOWN] == pytest.approx(2e10)
    through_sockets = model(machine(devices_per_node=4, kind="host"), ranks=4).price(gather)
    assert dict(through_sockets.uses) == uses(FABRIC=1, CORES=1)
    with pytest.raises(ValueError, match="no inter_node fabric, but 8 devices need 2 nodes"):
        model(machine(devices_per_node=4, inter_node=False), ranks=8).price(gather)


def through_host(profile: HardwareProfile, ranks: int, op: Op, num_bytes: int) -> Price:
    sharding = Sharding(precision=BF16, data_parallel=ranks, collectives="host")
    collective = task(Lane.COLLECTIVE, op, num_bytes=num_bytes, through_host=True)
    return CostModel(profile, UNITS, sharding).price(collective)


def test_collectives_through_the_host() -> None:
    """A rank writes its part and reads all others; of what is summed it writes the others, and adds its own up."""
    profile, rounds = machine(devices_per_node=4), -(-(2**30) // 4 // MOST_EXCHANGED_BYTES)
    assert rounds == 8
    gather = through_host(profile, 4, Op.GATHER, 2**30)
    up_bytes, down_bytes = 2**28, 3 * 2**28
    copied_s = down_bytes / 2e10 + up_bytes / 2e10 / rounds  # reading begins when the first round has been written
    check(gather, copied_s, latency_s=rounds * 1e-4, **ways(up_bytes / copied_s, down_bytes / copied_s))
    scatter = through_host(profile, 4, Op.SCATTER, 2**30)
    both_s = 2 * down_bytes / 3e10
    summed_s = both_s + down_bytes / 2e10 / 32 + (2**30 + 2**28) / 1e12
    check(scatter, summed_s, latency_s=32 * 1e-4, **ways(down_bytes / summed_s, down_bytes / summed_s))
    on_cores = through_host(machine(devices_per_node=4, num_cores_per_copy=1), 4, Op.GATHER, 2**30)
    assert on_cores.duration_s == pytest.approx((up_bytes + down_bytes) / 2e10)
    with pytest.raises(ValueError, match="8 ranks with the same weights are on 2 nodes; plan with --parallel"):
        through_host(profile, 8, Op.GATHER, 2**30)


def ways(up_rate: float, down_rate: float) -> dict[str, float]:
    both = up_rate + down_rate
    return {"LINK_UP": up_rate, "LINK_DOWN": down_rate, "LINK": both, "DRAM": min(both, 1e11 / 4)}


@given(st.sampled_from([2, 4, 8]), st.sampled_from([Op.GATHER, Op.SCATTER]), st.data())
def test_more_bytes_take_no_less_time_through_the_host(ranks: int, op: Op, data: st.DataObject) -> None:
    for name in ("rtx-4090x8", "a100x8-nvlink"):
        sizes = sorted(data.draw(st.lists(st.integers(1, 2**34), min_size=2, max_size=2)))
        less, more = (through_host(load_profile(name), ranks, op, size) for size in sizes)
        assert less.duration_s <= more.duration_s * (1 + 1e-9)
        assert less.latency_s <= more.latency_s


def test_ranks_prefer_the_host_to_a_slow_fabric_alone() -> None:
    """NVLink is faster than host memory, NCCL without peer-to-peer copies is not; nodes share no memory."""
    for name, ranks, preferred in (
        ("rtx-4090x8", 8, True),
        ("rtx-4090x8", 1, False),
        ("a100x8-nvlink", 8, False),
        ("a100-cluster", 16, False),
    ):
        profile = load_profile(name)
        layout = Layout(ranks, 1, 1, profile.devices_per_node)
        assert RankHardware(profile, layout).prefers_host(layout.replicas(1)) == preferred


@pytest.mark.parametrize("num_bytes", [10**6, 10**9])
@pytest.mark.parametrize("device", ["rtx-4090x8", "epyc-turin-2c"])
def test_what_passes_on_is_hidden_behind_a_step_of_attention_on_a_gpu(device: str, num_bytes: int) -> None:
    """The rest of its time counts. A host that computes does one after the other."""
    profile = load_profile("rtx-4090x8").model_copy(update={"device": load_profile(device).device})
    attend, alone = Attention(1, 8, 4096, 128, num_steps=4), Collective(num_bytes, 2, kind="pass")
    behind = dataclasses.replace(alone, count=3, behind=attend)
    cost = CostModel(profile, UNITS, Sharding(data_parallel=2, context_parallel=2))
    fabric = profile.intra_node
    assert fabric is not None
    hop_s = fabric.hop_latency_s.value if fabric.hop_latency_s else 0
    pass_s = num_bytes / fabric.bytes_per_s.value + fabric.latency_s.value + hop_s
    hidden_s = cost.compute_s([attend]) / 4 if profile.device.kind == "gpu" else 0
    assert cost.compute_s([alone]) == pytest.approx(pass_s)
    assert cost.compute_s([behind]) == pytest.approx(3 * max(pass_s - hidden_s, 0))


def test_an_all_reduce_over_two_nodes_is_a_tree() -> None:
    """Between two nodes each one sends the tensor once, over all its NICs; more nodes make a ring of two rounds."""
    summed = Collective(10**9, 8)
    for per_node, sent_bytes in ((4, 1e9), (2, 2 * 7 / 8 * 1e9)):
        profile = machine(devices_per_node=per_node)
        cost = CostModel(profile, UNITS, Sharding(tensor_parallel=8))
        assert cost.compute_s([summed]) == pytest.approx(3e-5 + sent_bytes / per_node / 1e10)


@pytest.mark.parametrize("tensor_parallel", [1, 2, 4])
def test_a_group_with_some_of_a_nodes_devices_has_a_fraction_of_its_share(tensor_parallel: int) -> None:
    """Of four devices a group has all, two or one; with two or one it shares NICs with its neighbours' groups."""
    profile = machine(devices_per_node=4)
    assert profile.inter_node is not None
    fabric = profile.inter_node.model_copy(update={"partial_group_ratio": quantity(0.25, "ratio")})
    gather = task(Lane.COLLECTIVE, Op.GATHER, num_bytes=10**10)
    per_node, ranks = 4 // tensor_parallel, 8 // tensor_parallel
    slower = 1 if tensor_parallel == 1 else 4
    cost = CostModel(
        profile.model_copy(update={"inter_node": fabric}),
        UNITS,
        Sharding(data_parallel=ranks, tensor_parallel=tensor_parallel),
    )
    assert cost.price(gather).duration_s == pytest.approx(slower * (ranks - 1) / ranks * 1e10 / per_node / 1e10)


@pytest.mark.parametrize(
    ("lane", "op", "resource", "rate"),
    [
        (Lane.NVME_STATE_IN, Op.SWAP_IN, "NVME_READ", 2e9),
        (Lane.NVME_READ, Op.READ, "NVME_READ", 2e9),
        (Lane.NVME_STATE_OUT, Op.SWAP_OUT, "NVME_WRITE", 1e9),
        (Lane.NVME_WRITE, Op.EVICT, "NVME_WRITE", 1e9),
    ],
)
def test_ranks_share_their_nodes_drives(lane: Lane, op: Op, resource: str, rate: float) -> None:
    price = model(machine(devices_per_node=4), ranks=8).price(task(lane, op, num_bytes=10**10))
    check(price, 1e10 / rate, DRAM=rate, NVME=rate, **{resource: rate})


def test_drives_that_lose_when_mixed_bound_the_sum() -> None:
    cost = model(machine(nvme_both=5e9))
    assert cost.capacities()[Resource.NVME] == 5e9
    # One direction alone is never slower for it.
    assert dict(cost.price(task(Lane.NVME_READ, Op.READ, num_bytes=10**10)).uses)[Resource.NVME] == 5e9


def test_a_machine_without_drives_says_so() -> None:
    with pytest.raises(ValueError, match="profile round has no nvme; add it"):
        model(machine(nvme_bytes=0)).price(task(Lane.NVME_READ, Op.READ, num_bytes=1))


def test_capacities_are_one_ranks_share() -> None:
    cost = model(machine(devices_per_node=4), ranks=8)
    assert cost.ranks_per_node == 4
    expected = uses(DEVICE=1, CORES=2, DRAM=2.5e10, LINK_DOWN=2e10, LINK_UP=2e10, LINK=3e10, FABRIC=1)
    expected |= uses(NVME_READ=2e9, NVME_WRITE=1e9, NVME=3e9, PFS=1, INTERPRETER=1)
    assert cost.capacities() == expected
    assert model(machine(devices_per_node=4), ranks=2).capacities()[Resource.CORES] == 4
    link = machine().host_link.model_copy(update={"up": rate(1e10, "bytes")})
    slow_up = model(machine().model_copy(update={"host_link": link})).capacities()
    assert (slow_up[Resource.LINK_DOWN], slow_up[Resource.LINK_UP]) == pytest.approx((2e10, 1e10))


def test_reading_outside_the_measured_range_is_remembered_once() -> None:
    cost = model(load_profile("v100"))
    assert not cost.warnings
    for _ in range(2):
        cost.price(task(Lane.H2D, Op.FETCH, num_bytes=10**14))
    (warning,) = cost.warnings
    assert warning.startswith("copy times are extrapolated: v100 covers")


LANES = {
    Op.FETCH: (Lane.H2D, "num_bytes"),
    Op.FLUSH: (Lane.D2H, "num_bytes"),
    Op.PASS: (Lane.CPU, "num_bytes"),
    Op.GATHER: (Lane.COLLECTIVE, "num_bytes"),
    Op.UPDATE: (Lane.CPU, "num_params"),
    Op.LOAD: (Lane.STATE_IN, "num_bytes"),
}


@settings(deadline=None, max_examples=examples(200))
@given(
    st.sampled_from(list_profiles()),
    st.sampled_from(list(LANES)),
    st.lists(st.integers(0, 10**11), min_size=2, max_size=2).map(sorted),
    st.booleans(),
    st.integers(0, 1),
)
def test_more_takes_longer(name: str, op: Op, sizes: list[int], pinned: bool, micro_batch: int) -> None:
    profile = load_profile(name)
    lane, field = LANES[op]
    cost = model(profile, ranks=profile.devices_per_node)
    less, more = (cost.price(task(lane, op, pinned=pinned, micro_batch=micro_batch, **{field: size})) for size in sizes)
    assert less.duration_s <= more.duration_s * (1 + 1e-12)
    if sizes[0] > 0 and lane is not Lane.COLLECTIVE:
        assert less.duration_s > 0


def overloads(cost: CostModel, prices: list[Price]) -> list[tuple[Resource, float]]:
    capacity = cost.capacities()
    return [(r, a / capacity[r]) for price in prices for r, a in price.uses if not 0 < a <= capacity[r] * (1 + 1e-12)]


@pytest.mark.part(14)
@pytest.mark.parametrize("name", list_profiles())
def test_a_task_alone_always_runs_at_full_speed(name: str) -> None:
    profile = load_profile(name)
    precision = [BF16, FP32][list_profiles().index(name) % 2]
    for model_name in MODELS:
        units = small_units(model_name)
        for ranks in {1, profile.devices_per_node}:
            setup = Setup(
                units,
                Sharding(data_parallel=ranks, num_micro_batches=2, precision=precision, subgroup_params=1_000_000),
            )
            cost = CostModel(profile, units, Sharding(precision=precision, data_parallel=ranks))
            for engine, policy in POLICIES.items():
                for decisions in policy(setup) if can_run(engine, setup, 1) else ():
                    schedule = lower(units, decisions, asynchronous=cost.asynchronous)
                    assert overloads(cost, cost.prices(schedule)) == []


@settings(deadline=None, max_examples=examples(60), suppress_health_check=[HealthCheck.too_slow])
@given(cases(), st.sampled_from(["gpu", "host"]), st.sampled_from([0, 0.5, 1]), st.booleans())
def test_any_schedule_runs_on_any_kind_of_machine(case: Case, kind: str, cores: float, via_host_link: bool) -> None:
    profile = machine(kind=kind, devices_per_node=4, num_cores_per_copy=cores, via_host_link=via_host_link)
    cost = CostModel(profile, case.units, case.decisions)
    prices = cost.prices(case.schedule)
    assert overloads(cost, prices) == []
    for each, price in zip(case.schedule.tasks, prices, strict=True):
        resources = [resource for resource, _ in price.uses]
        assert resources == sorted(set(resources))
        links = [a * price.duration_s for r, a in price.uses if r is Resource.LINK]
        if each.lane not in {Lane.COLLECTIVE, Lane.COMPUTE}:  # every byte of a copy crosses the link once
            assert links in ([], [pytest.approx(each.num_bytes)])


@settings(deadline=None, max_examples=examples(30), suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_a_price_does_not_depend_on_what_was_priced_before(case: Case) -> None:
    ranks = case.decisions.data_parallel

    def fresh() -> CostModel:
        return CostModel(
            machine(devices_per_node=4), case.units, Sharding(precision=case.decisions.precision, data_parallel=ranks)
        )

    assert fresh().prices(case.schedule) == [fresh().price(each) for each in case.schedule.tasks]


def test_total_flop_counts_no_recomputation() -> None:
    setup = Setup(UNITS, Sharding(num_micro_batches=3))
    keep, recompute = POLICIES["gpu-only"](setup)
    assert total_flop(UNITS, keep) == total_flop(UNITS, recompute)
    assert total_flop(UNITS, keep.model_copy(update={"pipeline_parallel": 2})) == total_flop(UNITS, keep) / 2
    assert total_flop(UNITS, keep) == 3 * sum(flop(unit.forward) + flop(unit.backward) for unit in UNITS)


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(1, 8192), st.integers(1, 32), st.integers(1, 64), st.sampled_from(["a100-80", "h100"]))
def test_a_grouped_kernel_is_between_one_product_and_many(rows: int, tiles: int, count: int, name: str) -> None:
    """Groups of whole tiles are one product; no grouping is slower than a kernel for every group."""
    cost = CostModel(load_profile(name), small_units("demo-llama"), Sharding())
    n, k = 128 * tiles, 4096
    grouped, separate = (cost.compute_s((Gemm(rows, n, k, count, grouped=one),)) for one in (True, False))
    assert grouped <= separate * (1 + 1e-9)
    padded = Gemm(-(-rows // 128) * 128 * count, n, k)
    floor_s = 2 * count * (rows * k + k * n + rows * n) / cost.profile.device.memory_bytes_per_s.value
    assert cost.compute_s((Gemm(rows * count, n, k),)) <= grouped * (1 + 1e-9)
    assert grouped <= max(cost.compute_s((padded,)), floor_s) * (1 + 1e-9)
    assert num_kernels((Gemm(rows, n, k, count, grouped=True),)) == 1


def test_products_in_fp8_have_a_curve_of_their_own_and_inputs_of_one_byte() -> None:
    gemm = Gemm(m=1000, n=2000, k=500, count=3, fp8=True)
    fast = machine(fp8_flop_per_s=4e14)
    assert model(fast).compute_s([gemm]) == pytest.approx(3 * 2 * 1000 * 2000 * 500 / 4e14)
    assert model(fast, precision=FP32).compute_s([gemm]) == model(fast).compute_s([gemm])
    # Where moving a product's matrices adds to its time: 1 B for each value of the two, 2 B of the result.
    moving = fast.model_copy(
        update={"device": fast.device.model_copy(update={"gemm_bytes_per_s": quantity(1e12, "bytes_per_s")})}
    )
    moved_s = 3 * (1000 * 500 + 500 * 2000 + 2 * 1000 * 2000) / 1e12
    assert model(moving).compute_s([gemm]) == pytest.approx(model(fast).compute_s([gemm]) + moved_s)
    (scalable,) = (s for s in scalables(fast, "bf16", 1, uses_storage=False) if s.key == "device-gemm")
    assert model(scaled(fast, scalable, 2.0)).compute_s([gemm]) == pytest.approx(model(fast).compute_s([gemm]) / 2)


def test_a_device_without_products_in_fp8_says_so_in_one_line() -> None:
    with pytest.raises(
        ValueError,
        match=r"^profile .* says nothing about products in fp8: .*bf16, fp32; leave out --precision products=fp8.*$",
    ):
        model(load_profile("a100-80")).compute_s([Gemm(1024, 1024, 1024, fp8=True)])


@settings(max_examples=examples(100), deadline=None)
@given(
    *(st.integers(128, 2048).map(lambda size: 16 * size) for _ in range(3)), st.sampled_from(["h100", "h200", "b200"])
)
def test_a_large_product_in_fp8_is_never_slower_than_in_bf16(m: int, n: int, k: int, name: str) -> None:
    cost = CostModel(load_profile(name), UNITS, Sharding())
    kernels = (Gemm(m, n, k, fp8=True), Gemm(m, n, k), Gemm(m, n, 2 * k, fp8=True))  # prices know them by identity
    own_s, in_bf16_s, longer_s = (cost.compute_s([kernel]) for kernel in kernels)
    assert own_s < min(in_bf16_s, longer_s)


@given(st.integers(1, 2048), st.integers(1, 2048), st.integers(1, 400_000), st.integers(1, 400_000))
def test_few_tiles_share_a_long_inner_side(m: int, n: int, shorter: int, longer: int) -> None:
    """Then nothing idles, but a product never gets faster as it grows."""
    shorter, longer = sorted((shorter, longer))
    times = [k * wave_factor(m, n, 108, k=k) for k in (shorter, longer)]
    assert times[0] <= times[1] * (1 + 1e-12)
    endless = wave_factor(m, n, 108, k=10**9)
    found = []
    for (rows, columns), share in _TILES.items():
        tiles = -(-m // rows) * -(-n // columns)
        whole = tiles if tiles < 108 else -(-tiles // 108) * 108  # in whole waves
        found.append(whole * rows * columns / share / (m * n))
    assert endless == pytest.approx(min(found))
    assert wave_factor(m, n, 108, k=8192) == wave_factor(m, n, 108), "a side that is not long is not split"
