"""Collections of published runs, read as their sources state them."""

import json
from pathlib import Path

import pytest

from hwprofiles.registry import load_profile
from ullage.main import main
from ullage.rivals.cases import CaseError, Metric, load_cases, read_file
from ullage.rivals.cases.beside import BesideCase
from ullage.rivals.cases.capacity import CapacityCase
from ullage.rivals.cases.collected import LeftOutError, read_capacity, read_collected
from ullage.rivals.cases.training import TrainingCase
from ullage.rivals.precision import RivalPrecision

ROOT = Path(__file__).parents[3]
COLLECTION = ROOT / "tests" / "data" / "collection.json"
BY_HAND = {case.id: case for case in load_cases(ROOT / "benchmarks" / "published" / "held_out" / "reported.json")}
READ = {case.id: case for case in read_file(COLLECTION).cases}


@pytest.mark.parametrize("name", sorted(BY_HAND.keys() & READ.keys()))
def test_a_run_is_read_as_it_was_translated_by_hand(name):
    """All that is simulated is the same; peaks were rounded."""
    read, by_hand = READ[name], BY_HAND[name]
    words = {"note", "machine", "differs", "measured"}
    assert read.model_dump(exclude=words) == by_hand.model_dump(exclude=words)
    assert read.measured == pytest.approx(by_hand.measured, rel=1e-4)


def test_enough_of_them_are_compared():
    assert len(BY_HAND.keys() & READ.keys()) >= 14


def test_what_nothing_is_like_is_left_out_with_its_reason():
    left_out = read_file(COLLECTION).left_out
    assert left_out == {
        "fsdpqlora-2x3090-yi-34b-qlora-b2-s2048": "machine 2x3090: the rate of its PCIe is not stated, and the "
        "profile of RTX 3090 is of one device",
        "lohan-70b-bs16-ssd12-gpu2": "there is no row of this engine for 2 devices",
        "mlpoffload-h100x4-40b-mlp-offload": "machine h100x4-mlpoffload: the rate of its drives is not stated",
        "rp-maxseq-rtx4090x8-mobius-qwen3-32b": "there is no row for system mobius",
        "superoffload-gb200-32b-s56000": "no longest sequence is stated",
    }


def test_what_is_not_read_is_said():
    run = next(run for run in json.loads(COLLECTION.read_text())["cases"] if run["id"].startswith("slideformer"))
    assert "not read" not in READ[run["id"]].differs
    run["engine"]["spins"] = 3
    assert read_collected(run, {}).differs.endswith("not read: engine.spins")


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("batch.seq_len", "long", "batch.seq_len is 'long', but must be a number"),
        ("parallel.data_parallel", True, "parallel.data_parallel is True, but must be a number"),
        ("hardware", 7, "hardware is 7, but must be a word"),
        ("hardware", None, "machine  has no profile"),
        ("measured.iteration_ms", None, "no iteration was timed"),
        ("engine.name", "abacus", "there is no row for engine abacus"),
        ("activations", "half", "neither recomputed nor kept"),
        ("precision", "fp32", "types are 'fp32' with products in 'bf16', but known are bf16 and fp16, or fp8"),
        ("engine.products", "fp4", "products in 'fp4'"),
        ("engine.weights", "int2", "weights are 'int2', but known are bf16, NF4 and int8"),
        ("engine.optimizer", "sgd", "the optimizer is 'sgd', but known are adamw, lion and muon"),
        ("lora", {"rank": 8, "targets": "all linear and head"}, "adapters of the head"),
    ],
)
def test_a_run_with_a_wrong_field_is_left_out_in_one_line(path, value, words):
    run = next(run for run in json.loads(COLLECTION.read_text())["cases"] if run["id"].startswith("slideformer"))
    run["measured"].pop("tokens_per_s")
    outer, _, name = path.rpartition(".")
    (run[outer] if outer else run)[name] = value
    with pytest.raises(LeftOutError, match=words):
        read_collected(run, {})


def read_as(name: str, **changes: object) -> TrainingCase:
    run = next(run for run in json.loads(COLLECTION.read_text())["cases"] if run["id"].startswith(name))
    for path, value in changes.items():
        outer, _, inner = path.partition("__")
        (run[outer] if inner else run)[inner or outer] = value
    read = read_collected(run, {})
    assert isinstance(read, TrainingCase)
    return read


def test_words_of_sources_decide_what_is_held():
    """See the comments in ``ullage/rivals/cases/collected.py`` for what each source's code does."""
    assert not READ["slideformer-ds-4090-8b-b16"].inputs_on_host  # cpu_checkpointing, which is not called
    assert read_as("slideformer", engine__checkpoints="on the host", activations="recompute").inputs_on_host
    halo = "github.com/whitecircle/halo agent-docs"
    assert read_as("slideformer").fused_head
    assert not read_as("slideformer", source=halo).fused_head
    assert read_as("slideformer", source=halo, engine__loss="fused linear cross entropy").fused_head
    assert read_as("slideformer", engine__liger=None, engine__loss="fused linear cross entropy").kernels == "liger"
    assert read_as("slideformer", engine__optimizer="adamw_torch_fused").fused_update
    assert not read_as("slideformer", engine__optimizer="adamw (not fused)").fused_update
    assert read_as("slideformer", engine__wrapper="FSDP2, trl.SFTTrainer").dtensors
    assert read_as("slideformer", source="a table, torch 2.0").step_copies == 2
    assert read_as("slideformer", source="a table, torch 2.10").step_copies == 1
    assert read_as("slideformer", engine__optimizer="PagedAdamW8bit").paged
    assert read_as("slideformer", precision=None).precision == RivalPrecision(weights="bf16")
    assert read_as("slideformer", engine__products="fp8").precision.products == "fp8"
    assert read_as("slideformer", engine__weights="int8").quantize == "int8"
    sharing = {"name": "gpu-only", "framework": "Megatron-LM", "distributed_optimizer": True}
    assert read_as("slideformer", engine=sharing).zero_stage == 1
    assert read_as("slideformer", model__architecture="qwen").joint_qkv
    assert not read_as("slideformer", model__architecture="qwen2").joint_qkv
    assert not read_as("slideformer", engine__optimizer="adamw (PagedAdamW8bit is off)").paged
    in_memory = {"engine__name": "gpu-only", "engine__offload_param": False}
    assert not read_as("slideformer", **in_memory, engine__wrapper="FSDP").reduces_once
    assert read_as("slideformer", **in_memory, engine__wrapper="FSDP2, trl.SFTTrainer").reduces_once
    assert read_as("slideformer", **in_memory, engine__wrapper="FSDP", source="RoundPipe-artifact").reduces_once


def test_layers_are_compiled_where_no_graph_breaks_and_a_loss_of_whole_logits_is_not():
    """A checkpointed layer runs as it is if the kernel of attention branches on the positions of its one sequence."""
    run = {"engine__compile": True, "engine__liger": None, "note": "", "engine__loss": "whole logits"}
    broken = run | {"engine__attention": "flash-attention-2", "batch": {"micro_batch": 1, "seq_len": 1024}}
    assert read_as("slideformer", **run, activations="recompute").kernels == "compiled"
    assert read_as("slideformer", **broken, activations="recompute").kernels == "transformers"
    assert read_as("slideformer", **broken, activations="keep").kernels == "compiled"
    several = broken | {"batch": {"micro_batch": 2, "seq_len": 1024}}
    assert read_as("slideformer", **several, activations="recompute").kernels == "compiled"
    assert read_as("slideformer", **run).loss == "transformers"
    assert read_as("slideformer", **run | {"engine__loss": "whole logits, compiled"}).loss is None
    assert read_as("slideformer", **run, source="github.com/pytorch/torchtune").loss is None


def test_reentrant_checkpoints_run_all_of_a_layer_again():
    in_memory = {"engine__name": "gpu-only", "engine__offload_param": False, "engine__wrapper": "FSDP"}
    assert read_as("slideformer").reruns_all  # that of ``transformers`` before 5
    assert not read_as("slideformer", activations="keep").reruns_all
    assert not read_as("slideformer", **in_memory).reruns_all
    assert read_as("slideformer", **in_memory, activations="recompute, reentrant").reruns_all
    assert not read_as("slideformer", source="github.com/pytorch/torchtune").reruns_all
    assert read_as("slideformer", engine__name="roundpipe", activations=None).reruns_all


def test_a_host_that_held_more_than_a_desktop_has_is_a_servers():
    held, more = ({"iteration_ms": 1.0, "host_gb": size} for size in (100, 172))
    assert (read_as("slideformer", measured=held).hardware, read_as("slideformer", measured=more).hardware) == (
        "rtx-4090",
        "rtx-4090x8",
    )


def test_peaks_are_those_of_tensors_or_of_the_process():
    gib = READ["slideformer-ds-4090-8b-b16"].measured["peak_gpu_allocated_gib"]
    gb = {"iteration_ms": 1.0, "peak_gpu_allocated_gb": gib}
    assert read_as("slideformer", measured=gb).measured["peak_gpu_allocated_gib"] == pytest.approx(gib * 1e9 / 2**30)
    halo = read_as("slideformer", measured=gb, source="github.com/whitecircle/halo")
    assert halo.measured["peak_gpu_allocated_gib"] == pytest.approx(gib)
    unsaid = read_as("slideformer", measured={"iteration_ms": 1.0, "peak_gpu_gb": 2.0}).measured
    assert unsaid["peak_gpu_process_gib"] == pytest.approx(2e9 / 2**30)


def test_our_plan_stands_beside_an_engine_with_kernels_of_its_own():
    run = READ["llmq-4090x1-0.5b-bf16-b16"]
    beside = BesideCase.of(run)
    assert beside.num_sequences == 512
    assert beside.measurements() == {Metric.OURS: pytest.approx(13.158, rel=1e-3)}
    assert BesideCase.of(READ["slideformer-ds-4090-8b-b16"]) is None


LLMQ = {case.id: case for case in load_cases(ROOT / "benchmarks" / "published" / "held_out" / "llmq.json")}


@pytest.mark.parametrize("name", sorted(LLMQ.keys() & READ.keys()))
def test_options_of_llmq_say_what_is_where(name):
    words = {"note", "machine", "differs", "source"}
    assert READ[name].model_dump(exclude=words) == LLMQ[name].model_dump(exclude=words)


def test_the_longest_sequence_is_the_last_that_fits(monkeypatch):
    case = next(case for case in READ.values() if isinstance(case, CapacityCase))
    assert isinstance(case.run, TrainingCase)
    assert (case.run.engine, case.run.devices, case.longest) == ("deepspeed", 8, 9)
    for last in (1, 7, 9, 40, 1000):
        lengths(monkeypatch, lambda length, last=last: 1 if length <= last else -1)  # says only whether it fits
        assert predicted(case) == last * 1024
        for room in ROOMS:
            seen = lengths(monkeypatch, lambda length, last=last, room=room: room(last + 0.5) - room(length))
            assert predicted(case) == last * 1024
            assert len(seen) == len(set(seen))
    seen = lengths(monkeypatch, lambda length: 5e9 - 8e7 * length)
    assert predicted(case) == 62 * 1024
    assert seen == [9, 10, 20, 40, 62, 63]  # at most twice the longest, then one more than the last that fits
    lengths(monkeypatch, lambda _: -1)
    with pytest.raises(CaseError, match="not even sequences of 1024 tokens"):
        predicted(case)


# What grows with sequences: a line, a line that bends, and one with stairs.
ROOMS = (lambda x: 1e8 * x, lambda x: max(1e8 * x, 4e8 * (x - 12)), lambda x: 1e8 * x + 1e9 * (x // 8))


def lengths(monkeypatch, room_bytes):
    """Give sequences the room that a function says; return those that are looked at."""
    seen = []
    monkeypatch.setattr(
        CapacityCase, "_room_bytes", lambda _self, _machine, length: (seen.append(length), room_bytes(length))[1]
    )
    return seen


def test_sequences_grow_into_what_a_process_leaves_of_the_device(monkeypatch):
    """An RTX 4090 has 23.6 GiB, of which a process takes 484 MiB."""
    case = next(case for case in READ.values() if isinstance(case, CapacityCase))
    sizes = set()

    def room_bytes(_self, machine, length):
        sizes.add(machine.device.memory_bytes.value)
        return 1 - length

    monkeypatch.setattr(CapacityCase, "_room_bytes", room_bytes)
    predicted(case)
    (num_bytes,) = sizes
    assert num_bytes == pytest.approx(23.6 * 2**30 - (484 << 20))


@pytest.mark.parametrize(
    ("system", "model", "count", "lora"),
    [("megatron-pp", "llama-3.1-8b", 8, None), ("roundpipe", "qwen3-235b-a22b", 1, "rank=32,targets=all-linear")],
)
def test_a_longest_sequence_was_looked_for_with_the_batch_and_weights_of_its_script(system, model, count, lora):
    entry = json.loads(COLLECTION.read_text())["capacity"][0]
    run = read_capacity(entry | {"system": system, "model": model}, {}).run
    assert (run.num_micro_batches, run.micro_batch, run.lora) == (count, 1, lora)


def predicted(case: CapacityCase) -> float:
    return case.predict(load_profile(case.hardware)).values[Metric.LONGEST]


def test_longer_sequences_need_more_memory():
    case = next(case for case in READ.values() if isinstance(case, CapacityCase))
    machine = case.run.machine_of(load_profile(case.hardware))
    assert case._room_bytes(machine, 1) > 0 > case._room_bytes(machine, 64)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cases": [3]}, "cases number 0 must be an object with an id"),
        ({"colour": 1}, "colour: such a field is not known"),
        ({"cases": [{"id": "a", "hardware": "abacus"}], "capacity": []}, "none of its runs can be predicted"),
    ],
)
def test_a_wrong_collection_is_refused_in_one_line(tmp_path, change, words):
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(json.loads(COLLECTION.read_text()) | change))
    with pytest.raises(CaseError, match=words) as refused:
        read_file(path)
    assert "\n" not in str(refused.value)


def test_validate_shows_what_is_left_out_and_what_is_predicted(capsys):
    assert main(["validate", str(COLLECTION), "--case", "*[rp][ou]2*", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {case["id"] for case in found["cases"]} == {"rp-a800x8-nvlink-zero2-llama-3.1-8b"}
    assert found["left_out"].keys() == {"lohan-70b-bs16-ssd12-gpu2"}
