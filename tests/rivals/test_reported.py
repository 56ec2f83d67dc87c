"""Cases in the words of a request, attention kernels of other years, and the interval around a prediction."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hwprofiles.paths import number, quantities
from hwprofiles.profile import FOR_LIBRARIES_BYTES, HardwareProfile
from hwprofiles.quantity import Provenance
from hwprofiles.registry import load_profile
from planner.costs.scalable import all_scalables
from planner.graph import Batch, build_graph, units
from planner.models import resolve_model
from planner.schedule.tasks import Lane, Op, Phase
from planner.simulate.uncertainty import interval_s
from ullage.rivals.cases import CaseError, Metric, load_cases
from ullage.rivals.cases.rates import with_attention, with_fp16_sums
from ullage.rivals.cases.training import TrainingCase
from ullage.rivals.lowering import lower

ROOT = Path(__file__).parents[2]
FILE = ROOT / "benchmarks" / "published" / "held_out" / "reported.json"
RESULTS = json.loads((ROOT / "benchmarks" / "results" / "published_held_out.json").read_text(encoding="utf-8"))
CASES = {case.id: case for case in load_cases(FILE)}
SMALL = {
    "id": "small",
    "hardware": "a100-80",
    "source": "made for this test",
    "model": "qwen2.5-0.5b",
    "engine": "deepspeed",
    "micro_batch": 2,
    "seq_len": 512,
    "measured": {"iteration_ms": 1.0},
}


def iteration_s(**changes: object) -> float:
    case = TrainingCase.model_validate(SMALL | changes)
    return case.predict(load_profile(case.hardware)).values[Metric.ITERATION]


@pytest.mark.parametrize(
    "name",
    [
        "rp-a800x8-nvlink-zero-infinity-llama-3.1-8b",
        "rp-a800x8-nvlink-megatron-tp-llama-3.1-8b",
        "slideformer-ds-4090-8b-b16",
        "torchtune-a100-3b-adamw8bit",
    ],
)
def test_predictions_are_those_of_the_result_file(name: str) -> None:
    case = CASES[name]
    (row,) = (row for row in RESULTS["rows"] if row["id"] == name)
    found = case.predict(load_profile(case.hardware)).values
    for metric in case.measurements():
        assert found[metric] == pytest.approx(row[metric.value]["predicted"], rel=1e-6)


def test_every_case_can_be_expressed_and_every_run_has_a_result() -> None:
    for case in CASES.values():
        case.check()
    assert {row["id"] for row in RESULTS["rows"] if row["file"] == "reported"} == set(CASES)


@pytest.mark.part(2)
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"engine": "deepsped"}, "engine is 'deepsped', but must be one of deepspeed, fsdp"),
        ({"deepspeed": {"stag": 3}}, "deepspeed.stag is not known"),
        ({"devices": 3, "tensor_parallel": 2}, "must be a multiple of tensor_parallel 2"),
        ({"engine": "fsdp", "updates_in_backward": True}, "clip needs the norm of all gradients"),
        ({"kernels": "dataflow", "lora": "rank=4"}, "kernels is dataflow, which are not known of a captured model"),
        (
            {"kernels": "megatron-core", "precision": {"weights": "bf16", "products": "fp8"}},
            "precision.products is fp8, but products of kernels megatron-core are only known in the type of weights",
        ),
    ],
)
def test_others_are_refused_in_one_line(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(CaseError, match=reason) as refused:
        iteration_s(**changes)
    assert "\n" not in str(refused.value)


def test_settings_reach_the_prediction() -> None:
    kept, recomputed = iteration_s(activations="keep"), iteration_s(activations="recompute")
    assert kept < recomputed < iteration_s(activations="recompute", reruns_all=True)
    offloaded = {"deepspeed": {"stage": 3, "optimizer_device": "cpu"}}
    assert kept < iteration_s(**offloaded) < iteration_s(deepspeed={**offloaded["deepspeed"], "pin_optimizer": False})
    assert iteration_s(kernels="compiled") < kept
    assert iteration_s(seq_len=8192, attention="triton") > iteration_s(seq_len=8192)
    hooked = {"deepspeed": {"stage": 3}, "devices": 2, "seq_len": 128}
    assert iteration_s(**hooked, joint_qkv=True) < 0.9 * iteration_s(**hooked), "7 modules of a layer have hooks, not 9"


ZERO_INFINITY = {
    "stage": 3,
    "optimizer_device": "cpu",
    "param_device": "cpu",
    "prefetch_params": 500_000_000,
    "persistent_params": 1_000_000,
    "pin_optimizer": False,
    "waits": True,
}


@pytest.mark.parametrize(
    ("hardware", "name", "deepspeed", "longest"),
    [
        ("rtx-4090x8", "llama-3-8b", ZERO_INFINITY, 9),
        ("a800-80", "qwen3-1.7b", {"stage": 2}, 33),
    ],
)
def test_the_longest_sequence_that_fits_is_that_of_others(hardware, name, deepspeed, longest) -> None:
    """Thousands of tokens on 8 devices: ITcarrot/RoundPipe-artifact @e44270a, exp/raw-data.csv; its loop keeps outputs.

    Both lengths a tenth away are on the right side.
    """
    profile = load_profile(hardware)

    def fits(seq_len: float) -> bool:
        changes = {"hardware": hardware, "model": name, "deepspeed": deepspeed, "devices": 8}
        changes |= {"micro_batch": 1, "clip": False, "activations": "recompute", "seq_len": int(seq_len)}
        case = TrainingCase.model_validate(SMALL | changes | {"keeps_output": True})
        return case.predict(profile).values[Metric.PEAK_GPU] <= profile.device.memory_bytes.value

    assert fits(0.9 * longest * 1024)
    assert not fits(1.1 * longest * 1024)


def test_plain_optimizers_hold_the_roots_of_all_second_moments() -> None:
    """PyTorch's AdamW takes them all before it uses any, unless it is fused."""

    def peak(**changes: object) -> float:
        case = TrainingCase.model_validate(SMALL | {"engine": "fsdp", "micro_batch": 1, "seq_len": 64} | changes)
        return case.predict(load_profile("a100-80")).values[Metric.PEAK_GPU]

    model = resolve_model("qwen2.5-0.5b")
    num_params = sum(unit.num_params for unit in units(build_graph(model, Batch(1, 64))))
    all_bf16 = {"precision": {"weights": "bf16", "state": "bf16"}}
    # Without them, the peak is in backward, a little above what the step holds.
    assert 2 * num_params < peak() - peak(fused_update=True) < 4 * num_params
    assert num_params / 2 < peak(**all_bf16) - peak(**all_bf16, fused_update=True) < 2 * num_params


@pytest.fixture
def peak() -> Callable[..., float]:
    def peak_bytes(**changes: object) -> float:
        case = TrainingCase.model_validate(SMALL | {"engine": "fsdp", "micro_batch": 1, "seq_len": 64} | changes)
        return case.predict(load_profile("a100-80")).values[Metric.PEAK_GPU]

    return peak_bytes


NUM_PARAMS = sum(unit.num_params for unit in units(build_graph(resolve_model("qwen2.5-0.5b"), Batch(1, 64))))


def test_before_pytorch_2_1_adamw_held_two_such_tensors(peak: Callable[..., float]) -> None:
    assert peak(step_copies=2) - peak() == pytest.approx(4 * NUM_PARAMS, rel=0.01)


def test_moments_in_8_bit_stay_so_where_all_other_state_is_in_bf16(peak: Callable[..., float]) -> None:
    all_bf16 = {"precision": {"weights": "bf16", "state": "bf16"}, "fused_update": True}
    assert peak(**all_bf16) - peak(**all_bf16, optimizer="adamw-8bit") == pytest.approx(2 * NUM_PARAMS, rel=0.05)


def test_paged_state_waits_on_the_host_and_comes_for_each_update(peak: Callable[..., float]) -> None:
    run = {"engine": "fsdp", "fused_update": True, "micro_batch": 1, "updates_in_backward": True, "clip": False}
    # Of the state, what is on the device is that of the largest unit, which has the embedding.
    assert peak(**run) - peak(**run, paged=True) > 6 * NUM_PARAMS
    copies_s = 2 * 12 * NUM_PARAMS / 25e9
    assert copies_s / 2 < iteration_s(**run, paged=True) - iteration_s(**run) < 2 * copies_s


def test_a_process_takes_more_of_a_device_than_its_tensors(peak: Callable[..., float]) -> None:
    measured = {"iteration_ms": 1.0, "peak_gpu_process_gib": 1.0}
    assert peak(measured=measured) - peak() == FOR_LIBRARIES_BYTES


@pytest.mark.parametrize(
    ("hardware", "kernels", "devices", "num_mib"),
    [
        ("a800-80", "transformers", 8, 1024),
        ("rtx-4090x8", "transformers", 8, 484),
        ("rtx-4090x8", "megatron-core", 8, 1024),
        ("a800-80", "megatron-core", 1, 1024),
        ("a800-80", "megatron-core", 8, 1024 + 2 * 688),
    ],
)
def test_a_process_holds_more_the_more_its_libraries_have(
    hardware: str, kernels: str, devices: int, num_mib: int
) -> None:
    """A context on GeForce is small, and each communicator of Megatron has buffers where there is NVLink."""
    case = TrainingCase.model_validate(SMALL | {"kernels": kernels, "devices": devices})
    assert case.beside_tensors_bytes(load_profile(hardware)) == num_mib << 20


@pytest.mark.parametrize("lora", [None, "rank=8"])
def test_without_its_fused_head_ligers_loss_takes_the_place_of_whole_logits(
    peak: Callable[..., float], lora: str | None
) -> None:
    """They are there in bf16, and in fp32 with the gradient in their place: 6 B each, where tiles hold few."""
    run = {"kernels": "liger", "activations": "recompute", "seq_len": 8192, "lora": lora, "fused_update": True}
    logits = 8192 * 151_936
    by_tokens = {head: peak(**run, fused_head=head) for head in (True, False)}
    assert 4 * logits < by_tokens[False] - by_tokens[True] < 6.5 * logits


@pytest.mark.parametrize("kernels", ["compiled", "compiled-layers", "liger"])
def test_a_loss_of_transformers_holds_all_logits_in_fp32_beside_other_kernels(kernels: str) -> None:
    """Log-probabilities and two gradients of them in fp32, and the logits where the loop has cast and kept them."""
    run = {"kernels": kernels, "activations": "recompute", "seq_len": 8192, "engine": "fsdp", "fused_update": True}
    logits, plain = 2 * 8192 * 151_936, peak_bytes(**run, loss="transformers")
    assert plain == pytest.approx(peak_bytes(**run | {"kernels": "transformers"}), rel=0.01)
    assert plain - peak_bytes(**run) > 7.9 * logits
    assert peak_bytes(**run, loss="transformers", keeps_output="fp32") - plain == pytest.approx(4 * logits, rel=0.01)


def test_the_allocator_keeps_the_block_of_logits_that_were_cast_if_the_device_has_room() -> None:
    run = SMALL | {"engine": "fsdp", "seq_len": 8192, "activations": "recompute", "fused_update": True}

    def peak(kind: str, **changes: object) -> float:
        case = TrainingCase.model_validate(
            run | {"measured": {"iteration_ms": 1.0, f"peak_gpu_{kind}_gib": 1}} | changes
        )
        return case.predict(load_profile("a100-80")).values[Metric.PEAK_GPU]

    assert peak("reserved") - peak("allocated") == 2 * (2 * 8192 * 151_936)
    assert peak("reserved", kernels="compiled") == peak("allocated", kernels="compiled")
    room = load_profile("a100-80").device.memory_bytes.value
    full = {"micro_batch": 9, "seq_len": 4096}
    assert peak("reserved", **full) == room > peak("allocated", **full)


def test_an_update_that_is_a_chain_of_operators_moves_20_values_of_a_parameter() -> None:
    profile, phases = load_profile("a100-80"), {}
    for fused in (True, False):
        case = TrainingCase.model_validate(SMALL | {"engine": "fsdp", "fused_update": fused, "model": "llama-3-8b"})
        phases[fused] = case.predict(profile).values[Metric.UPDATE]
    expected_s = 13 * 4 * 8_030_261_248 / number(quantities(profile)["device.elementwise"])
    assert phases[False] - phases[True] == pytest.approx(expected_s, rel=0.02)


def test_biases_that_are_added_by_expert_are_not_added_up_row_by_row() -> None:
    """gpt-oss has biases; in backward of 1024 rows an expert, each such sum takes longer than all products."""
    case = next(case for case in load_cases(FILE.with_name("unseen.json")) if case.id.startswith("automodel"))
    assert isinstance(case, TrainingCase)
    assert case.biases_by_expert
    by_row = case.model_copy(update={"biases_by_expert": False})
    profile = load_profile(case.hardware)
    fast, slow = (each.predict(profile).values[Metric.ITERATION] for each in (case, by_row))
    assert slow > 1.7 * fast


def test_ranks_that_shard_masters_have_no_weights_of_their_own_beside_them() -> None:
    """FSDP gathers from the fp32 shards, and keeps gradients as these are; ZeRO-3 has both in the weights' type."""

    def peak(engine: str, **changes: object) -> float:
        run = {"engine": engine, "devices": 8, "micro_batch": 1, "seq_len": 64, "model": "llama-3-8b"} | changes
        return TrainingCase.model_validate(SMALL | run).predict(load_profile("a100-80")).values[Metric.PEAK_GPU]

    def fsdp(**changes: object) -> float:
        return peak("fsdp", activations="recompute", fused_update=True, **changes)

    num_params = 8_030_261_248 / 8
    deepspeed = peak("deepspeed", deepspeed={"stage": 3}, activations="recompute")
    assert fsdp(zero_stage=3) < fsdp(zero_stage=2)
    assert deepspeed - fsdp(zero_stage=3) > num_params
    in_bf16 = fsdp(zero_stage=3, precision={"weights": "bf16", "master": "bf16"})
    assert fsdp(zero_stage=3) - in_bf16 == pytest.approx((2 + 2) * num_params, rel=0.05)


def peak_bytes(**changes: object) -> float:
    case = TrainingCase.model_validate(
        SMALL | {"measured": {"iteration_ms": 1.0, "peak_gpu_allocated_gib": 1.0}} | changes
    )
    return case.predict(load_profile(case.hardware)).values[Metric.PEAK_GPU]


def test_ranks_that_reduce_whole_gradients_do_so_in_place() -> None:
    """Megatron-Core's buffers are there once, whatever the number of ranks; so it is where ranks share experts."""
    megatron = {"engine": "megatron", "kernels": "megatron-core", "precision": {"weights": "bf16", "gradients": "fp32"}}
    assert peak_bytes(**megatron, devices=8) == peak_bytes(**megatron)
    experts = megatron | {"model": "qwen3-30b-a3b", "devices": 8}
    assert peak_bytes(**experts, expert_parallel=8) < peak_bytes(**experts, expert_parallel=4)
    assert peak_bytes(devices=8, deepspeed={"stage": 0}) > peak_bytes(devices=8, deepspeed={"stage": 1})


@pytest.mark.parametrize("engine", ["fsdp2-offload", "zenflow", "super-offload"])
def test_engines_that_choose_their_placement_keep_or_recompute_as_stated(engine: str) -> None:
    kept, recomputed = (peak_bytes(engine=engine, activations=each, seq_len=4096) for each in ("keep", "recompute"))
    assert kept > 1.3 * recomputed


def test_clipping_dtensors_takes_the_host_as_long_as_it_was_published() -> None:
    """63 ms for 291 gradients, on a host that issues a kernel in 15 us; the update waits."""
    run = {"engine": "fsdp", "zero_stage": 3, "devices": 8, "seq_len": 2048}
    (num_params,) = (
        sum(len(unit.parameters) for unit in units(build_graph(resolve_model("qwen2.5-0.5b"), Batch(1, 64)))),
    )
    more_s = iteration_s(**run, dtensors=True) - iteration_s(**run, dtensors=True, clip=False)
    assert more_s == pytest.approx(num_params * 0.063 / 291, rel=0.05)
    assert iteration_s(**run) == pytest.approx(iteration_s(**run, clip=False), rel=0.01)


def test_what_fsdp2_gathers_and_reduces_is_copied_on_the_stream_that_computes() -> None:
    """Two gathers of a layer with recomputation, and one reduction: each value of 2 B is read and written.

    If sequences are short, the host is slower than the device: then hooks count.
    """
    run = {"engine": "fsdp", "zero_stage": 3, "devices": 8, "clip": False, "activations": "recompute"}
    copied_bytes = 3 * 2 * 2 * 494_032_768
    rate = load_profile("a100-80").device.memory_bytes_per_s.value
    more_s = iteration_s(**run, dtensors=True, seq_len=8192) - iteration_s(**run, seq_len=8192)
    assert more_s == pytest.approx(copied_bytes / rate, rel=0.15)  # with the start of each copy
    hooks_s = 24 * 3 * 60 * 15e-6
    more_s = iteration_s(**run, dtensors=True, seq_len=64) - iteration_s(**run, seq_len=64)
    assert more_s == pytest.approx(hooks_s, rel=0.3)


def test_deepspeed_holds_whole_parameters_only_while_they_are_used() -> None:
    """When the loss has its logits, the embedding is not there, whose vocabulary is as large.

    If more parameters may be there, layers that are fetched ahead take its room.
    """
    deepspeed = {"stage": 3, "optimizer_device": "cpu", "param_device": "cpu"}
    run = {"model": "llama-3-8b", "micro_batch": 1, "activations": "recompute", "seq_len": 8192}
    case = TrainingCase.model_validate(SMALL | run | {"deepspeed": deepspeed | {"max_live_params": 100_000_000}})
    setup, decisions = case.decided(load_profile(case.hardware))
    schedule = lower(setup.units, decisions, asynchronous=True)
    more = lower(setup.units, decisions.model_copy(update={"max_live_params": 10**9}), asynchronous=True)
    assert {f"slot {slot}" for slot in range(3)} < {buffer.label for buffer in more.buffers}
    embedding, head = setup.units[0].name, setup.units[-1].name
    tasks = {task.index: task for task in schedule.tasks}
    held = [buffer for buffer in schedule.buffers if buffer.label == f"{embedding} whole"]
    assert [tasks[buffer.last].phase for buffer in held] == [Phase.FORWARD, Phase.BACKWARD]
    (of_head,) = (buffer for buffer in schedule.buffers if buffer.label == f"{head} whole")
    assert of_head.num_bytes >= held[0].num_bytes == 2 * 128_256 * 4096
    backward = next(task for task in schedule.tasks if task.op is Op.BACKWARD and task.unit == head)
    assert held[0].last < backward.index < held[1].first


def test_fsdp_holds_no_whole_parameters_in_its_step() -> None:
    run = {"engine": "fsdp", "zero_stage": 3, "devices": 8, "micro_batch": 1, "seq_len": 64}
    case = TrainingCase.model_validate(SMALL | run)
    setup, decisions = case.decided(load_profile(case.hardware))
    schedule = lower(setup.units, decisions, asynchronous=True)
    whole = [buffer for buffer in schedule.buffers if buffer.label.endswith(" whole")]
    assert {buffer.label for buffer in whole} >= {f"{unit.name} whole" for unit in setup.units if unit.num_weights}
    assert max(buffer.last for buffer in whole) < min(task.index for task in schedule.tasks if task.op is Op.UPDATE)
    assert not any(buffer.label.startswith("slot ") for buffer in schedule.buffers)


def test_whole_gradients_that_add_up_are_reduced_once_and_held() -> None:
    """``no_sync`` of FSDP: weights are gathered for each micro-batch, gradients reduced with the last one."""
    run = {"engine": "fsdp", "zero_stage": 3, "devices": 8, "num_micro_batches": 4, "micro_batch": 1, "seq_len": 64}
    profile = load_profile("a100-80")
    found = []
    for reduces_once in (False, True):
        case = TrainingCase.model_validate(SMALL | run | {"reduces_once": reduces_once})
        setup, decisions = case.decided(profile)
        tasks = lower(setup.units, decisions, asynchronous=True).tasks
        works = [task for task in tasks if task.lane is Lane.COLLECTIVE]
        moved = {op: sum(task.num_bytes for task in works if task.op is op) for op in (Op.GATHER, Op.SCATTER)}
        found.append((moved, case.predict(profile).values[Metric.PEAK_GPU]))
    (each, each_peak), (once, once_peak) = found
    assert each[Op.SCATTER] == 4 * once[Op.SCATTER] > 0
    assert each[Op.GATHER] == once[Op.GATHER]
    assert once_peak - each_peak > NUM_PARAMS  # 2 B, of which the step needs some


def test_buffers_of_gradients_are_there_before_backward() -> None:
    """Megatron-Core's fp32 sums, where the peak is the loss of a long sequence: gradients of weights come later.

    Beside them are placeholders in bf16, of the shapes of one layer's four products and of the head.
    """

    def peak(**precision: str) -> float:
        run = {"engine": "fsdp", "hardware": "b200", "kernels": "megatron-core", "micro_batch": 1, "seq_len": 65_536}
        run |= {"precision": {"weights": "bf16"} | precision, "activations": "recompute"}
        return TrainingCase.model_validate(SMALL | run).predict(load_profile("b200")).values[Metric.PEAK_GPU]

    num_params = sum(unit.num_params for unit in units(build_graph(resolve_model("qwen2.5-0.5b"), Batch(1, 64))))
    hidden, keys, ffn, vocab = 896, 128, 4864, 151_936
    placeholders = hidden * (hidden + 2 * keys + hidden + 2 * ffn + ffn + vocab)
    assert peak(gradients="fp32") - peak() == pytest.approx(4 * num_params + 2 * placeholders, rel=0.03)


def test_sums_in_fp16_are_faster_on_geforce_cards_alone() -> None:
    for name, ratio in (("rtx-4090", 2), ("a800-80", 1), ("rtx-pro-6000", 1)):
        before, after = (quantities(p) for p in (load_profile(name), with_fp16_sums(load_profile(name))))
        assert number(after["device.gemm.bf16"]) == pytest.approx(ratio * number(before["device.gemm.bf16"]))
        assert number(after["device.attention.bf16"]) == number(before["device.attention.bf16"])


@pytest.mark.parametrize(
    ("name", "devices", "ratio"), [("rtx-4090x8", 2, 1.65), ("rtx-4090x8", 8, 1), ("a800-80", 2, 1)]
)
def test_two_devices_share_host_memory_with_no_others(name: str, devices: int, ratio: float) -> None:
    """Where there is NVLink, they do not exchange through it."""
    profile = load_profile(name)
    machine = TrainingCase.model_validate(SMALL | {"devices": devices}).machine_of(profile)
    rate = number(quantities(profile)["intra_node.bytes_per_s"])
    assert number(quantities(machine)["intra_node.bytes_per_s"]) == pytest.approx(ratio * rate, rel=0.01)


def test_attention_of_other_years_has_its_share_of_the_rate() -> None:
    profile = load_profile("a100-80")
    before, after = (quantities(each) for each in (profile, with_attention(profile, "triton")))
    for name, share in (("attention", 1 / 1.4), ("attention_backward", 0.5)):
        rate = number(after[f"device.{name}.bf16"])
        assert rate == pytest.approx(share * number(before["device.attention.bf16"]))


def test_kernels_made_for_ampere_are_slow_on_newer_devices_of_the_data_center() -> None:
    for name, slower in (("b300", True), ("gb200", True), ("h100", True), ("rtx-5090", False), ("a100-80", False)):
        profile = load_profile(name)
        assert (with_attention(profile, "flash-attention-2") != profile) == slower
        assert with_attention(profile, "flash-attention-4") == profile
    before, after = (
        quantities(p) for p in (load_profile("b300"), with_attention(load_profile("b300"), "flash-attention-2"))
    )
    path = "device.attention.bf16-128"
    assert number(after[path]) == pytest.approx(406e12, rel=0.01)  # 1.1e12 FLOP in 2.71 ms
    assert number(before[path]) == pytest.approx(1571e12, rel=0.01)
    known = quantities(with_attention(load_profile("h100"), "flash-attention-3"))
    assert number(known["device.attention.bf16"]) == pytest.approx(1.75 * 346e12)  # where a rate is assumed
    assert number(known["device.attention.fp32"]) == number(quantities(load_profile("h100"))["device.attention.fp32"])
    for name in ("h100-80g-dataflow", "h200x1-16c", "a100-80", "b300"):  # fitted, measured, and not a Hopper
        profile = load_profile(name)
        assert with_attention(profile, "flash-attention-3") == profile
    older = quantities(with_attention(load_profile("h100"), "triton"))
    assert number(older["device.attention_backward.bf16"]) == pytest.approx(346e12 / 2)


def bound_by(*keys: str) -> object:
    """Return an iteration that takes as long as some of a machine's properties, one after another."""
    paths = [s.paths[0] for s in all_scalables(load_profile("a100-80")) if s.key in keys]
    return lambda machine: sum(1e12 / number(quantities(machine)[path]) for path in paths)


def of_origin(origin: str) -> HardwareProfile:
    """Return a machine with every number of one origin."""
    data = load_profile("a100-80").model_dump(mode="json", exclude_none=True)

    def mark(part: object) -> None:
        if isinstance(part, dict):
            if "provenance" in part:
                part["provenance"] = Provenance(origin="assumed", source="made for this test").model_dump(mode="json")
                part["provenance"]["origin"] = origin
                part["provenance"] |= {"runs": ["a run"]} if origin == "fitted" else {}
                part["provenance"] |= {"date": "2026-11-27", "num_samples": 3} if origin == "measured" else {}
            for inner in part.values():
                mark(inner)
        elif isinstance(part, list):
            for inner in part:
                mark(inner)

    mark(data)
    return HardwareProfile.model_validate(
        {key: value for key, value in data.items() if value is not None},
    )


@given(st.sets(st.sampled_from(["device-gemm", "host-link-down", "cpu-optimizer", "host-dram"]), min_size=1))
def test_an_interval_is_around_the_prediction_and_as_wide_as_origins_say(keys: set[str]) -> None:
    takes = bound_by(*keys)
    widths = []
    for origin in ("measured", "published", "assumed"):
        machine = of_origin(origin)
        predicted = takes(machine)  # type: ignore[operator]
        low, high = interval_s(machine, takes, predicted)  # type: ignore[arg-type]
        assert low < predicted < high
        assert low * high == pytest.approx(predicted**2)
        widths.append(math.log(high / low))
    assert widths == sorted(widths)
    assert widths[0] < 0.5 * widths[-1]
