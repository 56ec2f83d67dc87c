import itertools
import json
from pathlib import Path

import pytest
from changed_data import with_changes
from hypothesis import given
from hypothesis import strategies as st

from hwprofiles.paths import number, quantities
from hwprofiles.registry import load_profile
from planner.costs.model import CostModel
from planner.decisions import Place
from planner.graph import Attention
from planner.models import num_parameters, resolve_model
from planner.models.kernels import flop
from planner.schedule.tasks import Op
from planner.setup import pieces
from ullage.rivals.cases import CaseError, Metric, load_cases, read_case
from ullage.rivals.cases.training import TrainingCase
from ullage.rivals.decisions import GradientPath, HostUpdate
from ullage.rivals.lowering import lower

FILE = Path(__file__).parents[2] / "ullage" / "data" / "published_cases.json"
CASES = {case["id"]: case for case in json.loads(FILE.read_text())["cases"]}
BLOCKING = next(name for name in CASES if "blocking" in name)
TWIN_FLOW = next(name for name in CASES if "r0.5" in name and "async" in name)
INTERLEAVED = next(name for name in CASES if "interleave-k5" in name)
MODELS = json.loads((Path(__file__).parents[2] / "data" / "published_models.json").read_text())["models"]
IN_MEMORY = next(name for name in CASES if "nvlink" in name)
PIPELINED = next(name for name in CASES if "g4-tp2-dp1-pp2" in name)


def case(name: str, **changes: object) -> TrainingCase:
    some = read_case(with_changes(CASES[name], changes))
    assert isinstance(some, TrainingCase)
    return some


def decided(some: TrainingCase):
    setup, decisions = some.decided(load_profile(some.hardware))
    places = [place for unit in decisions.units.values() for place in unit.update]
    sizes = [size for unit in setup.units for size in pieces(setup, unit)]
    return decisions, places, sizes


def scheduled(some: TrainingCase):
    setup, decisions = some.decided(load_profile(some.hardware))
    return setup, decisions, lower(setup.units, decisions, asynchronous=True)


@pytest.mark.parametrize("name", CASES)
def test_published_runs_are_predicted_within_a_factor_of_two(name):
    some = case(name)
    outcome = some.predict(load_profile(some.hardware))
    assert outcome.converged
    phases = sum(outcome.values[metric] for metric in (Metric.FORWARD, Metric.BACKWARD, Metric.UPDATE))
    loop_s = quantities(load_profile(some.hardware)).get("device.loop_s")
    # Six reports of memory: four in the micro-batch, two around the step.
    reports_s = number(loop_s) * (4 * some.num_micro_batches + 2) / 6 if loop_s else 0
    assert outcome.values[Metric.ITERATION] == pytest.approx(phases + reports_s)
    for metric, measured in some.measurements().items():
        if metric in {Metric.ITERATION, Metric.PEAK_GPU}:
            assert 0.5 < outcome.values[metric] / measured < 2


def test_every_micro_batch_reports_its_memory():
    some = case(BLOCKING)
    loop_s = number(quantities(load_profile(some.hardware))["device.loop_s"])
    outside = []
    for num_micro_batches in (1, 2, 5):
        batch = some.micro_batch * some.data_parallel * num_micro_batches
        values = case(BLOCKING, batch__global_batch=batch).predict(load_profile(some.hardware)).values
        phases = sum(values[metric] for metric in (Metric.FORWARD, Metric.BACKWARD, Metric.UPDATE))
        outside.append(values[Metric.ITERATION] - phases)
    assert outside == pytest.approx([loop_s, loop_s * 10 / 6, loop_s * 22 / 6])
    setup, decisions, _ = scheduled(some)
    cost, priced = CostModel.of(load_profile(some.hardware), setup.units, decisions), []  # one, which keeps its prices
    for num_micro_batches in (1, 2, 5):
        more = decisions.model_copy(update={"num_micro_batches": num_micro_batches})
        schedule = lower(setup.units, more, asynchronous=True)
        prices = zip(schedule.tasks, cost.prices(schedule), strict=True)
        priced += [price.latency_s for task, price in prices if task.op is Op.LOOP]
    assert priced == pytest.approx(outside)


def test_device_updates_keep_gradients_in_fp32():
    some = case(TWIN_FLOW)
    _, places, sizes = decided(some)
    on_device = sum(size for place, size in zip(places, sizes, strict=True) if place is Place.GPU)
    buffers = scheduled(some)[2].buffers
    held = sum(buffer.num_bytes for buffer in buffers if buffer.label.endswith(" buffer"))
    assert on_device > 0
    assert held == 4 * on_device


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name]["engine"]["name"] == "gpu-only"])
def test_runs_in_memory_are_predicted_within_a_quarter(name):
    some = case(name)
    predicted = some.predict(load_profile(some.hardware)).values[Metric.ITERATION]
    assert predicted == pytest.approx(some.measurements()[Metric.ITERATION], rel=0.25)


def test_fewer_devices_than_the_node_has_and_zero_1():
    some = case(PIPELINED, zero_stage=1, activations="keep")
    outcome = some.predict(load_profile(some.hardware))
    assert outcome.converged
    # Without recomputation it is faster, and holds more.
    plain = case(PIPELINED).predict(load_profile(some.hardware))
    assert outcome.values[Metric.ITERATION] < plain.values[Metric.ITERATION]
    assert outcome.values[Metric.PEAK_GPU] > plain.values[Metric.PEAK_GPU]


IMPOSSIBLE = {
    "zero_stage is 2, but only 0 or 1": {"zero_stage": 2},
    "need 16 devices, but there are 8": {"parallel__tensor_parallel": 8},
    "num_attention_heads of .* is 16, which 3 tensor-parallel": {"parallel__tensor_parallel": 3},
    "pipeline_parallel is 8, but there are 6 layers": {
        "parallel__pipeline_parallel": 8,
        "parallel__tensor_parallel": 1,
        "model__num_layers": 6,
    },
}


@pytest.mark.parametrize("message", IMPOSSIBLE)
def test_degrees_that_cannot_be_are_refused_before_any_work(message):
    with pytest.raises(CaseError, match=f"case {PIPELINED}: .*{message}"):
        case(PIPELINED, **IMPOSSIBLE[message]).check()


def test_loaded_as_written():
    assert [loaded.id for loaded in load_cases(FILE)] == list(CASES)


def test_model_batch_and_parallelism_reach_the_setup():
    some = case(INTERLEAVED, batch__global_batch=24)
    setup, _ = some.decided(load_profile(some.hardware))
    units = setup.units
    assert sum(unit.num_params for unit in units) == CASES[INTERLEAVED]["model"]["num_params"]
    assert some.tokens_per_step == 2 * 4 * 3 * some.seq_len
    assert (setup.given.data_parallel, setup.given.micro_batch, setup.given.num_micro_batches) == (2, 4, 3)
    assert setup.given.subgroup_params == 100_000_000
    attention = [kernel for unit in units for kernel in unit.forward if isinstance(kernel, Attention)]
    flash = case(INTERLEAVED, model__flash_attention=True).setup(load_profile(some.hardware)).units
    fused = [kernel for unit in flash for kernel in unit.forward if isinstance(kernel, Attention)]
    assert fused
    assert not [kernel for kernel in attention if kernel.flash]
    assert sum(unit.saved_bytes for unit in flash) < sum(unit.saved_bytes for unit in units)


@pytest.mark.parametrize(("flush", "path"), [("blocking", "zero3-blocking"), ("async", "zero3-async")])
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_zero3_offload(flush, path, fraction):
    decisions, places, sizes = decided(
        case(BLOCKING, engine__gradient_flush=flush, engine__cpu_optimizer_fraction=fraction)
    )
    assert decisions.gradient_path is GradientPath(path)
    assert (decisions.zero_stage, decisions.data_parallel) == (3, 4)
    assert not decisions.overlap_next_forward
    assert decisions.host_update is HostUpdate.DEEPSPEED
    some = [size for size, place in zip(sizes, places, strict=True) if place is Place.CPU]
    assert sum(some) == pytest.approx(fraction * sum(sizes), abs=decisions.subgroup_params)


@given(st.sampled_from([0.0, 0.3, 0.5, 0.9, 1.0]), st.integers(1, 10))
def test_interleaved_keeps_the_first_share_and_streams_every_kth(fraction, stride):
    some = case(INTERLEAVED, engine__cpu_optimizer_fraction=fraction, engine__stride=stride)
    decisions, places, sizes = decided(some)
    starts = itertools.accumulate(sizes, initial=0)
    subgroups = [start // decisions.subgroup_params for start, _ in zip(starts, sizes, strict=False)]
    total = -(-sum(sizes) // decisions.subgroup_params)
    resident = total - round(total * fraction)
    for subgroup, place in zip(subgroups, places, strict=True):
        streamed = Place.STREAM if subgroup % stride == stride - 1 else Place.CPU
        assert place is (Place.GPU if subgroup < resident else streamed)


def test_subgroups_are_cut_within_units():
    decisions, _, sizes = decided(case(BLOCKING, engine__subgroup_params=7_000_000))
    assert decisions.subgroup_params == 7_000_000 >= max(sizes)
    assert sum(sizes) >= CASES[BLOCKING]["model"]["num_params"] / 4


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_activations(activations):
    some = case(TWIN_FLOW, activations=activations)
    setup, decisions = some.decided(load_profile(some.hardware))
    for unit in setup.units:
        assert decisions.units[unit.name].activations == (activations if unit.recompute else "keep")


@pytest.mark.parametrize(("zero_stage", "all_reduced"), [(0, True), (1, False), (2, False), (3, False)])
def test_in_memory_cases_at_every_zero_stage(zero_stage, all_reduced):
    setup, decisions, schedule = scheduled(case(IN_MEMORY, zero_stage=zero_stage))
    assert (decisions.zero_stage, decisions.data_parallel) == (zero_stage, 8)
    scattered = sum(task.num_bytes for task in schedule.tasks if task.op is Op.SCATTER)
    updated = sum(task.num_params for task in schedule.tasks if task.op is Op.UPDATE)
    params = sum(unit.num_params for unit in setup.units)
    times = 2 if all_reduced else setup.given.num_micro_batches if zero_stage >= 2 else 1
    assert scattered == 2 * params * times  # bytes of bf16
    assert updated == pytest.approx(params if zero_stage == 0 else params / 8, rel=0.01)


def test_only_runs_that_shard_by_themselves_checkpoint_as_pytorch_does():
    """Megatron's reentrant checkpoints run all of a layer again, those of FSDP's users stop before the last product."""
    again = []
    for zero_stage in (0, 3):
        setup, _, _ = scheduled(case(IN_MEMORY, zero_stage=zero_stage, activations="recompute"))
        (unit,) = (unit for unit in setup.units if unit.name == "layers.0.mlp")
        again.append(flop(unit.recompute) / flop(unit.forward))
    assert again == [1, pytest.approx(0.5)]


UNSUPPORTED = {
    "need 8 devices": {"parallel__tensor_parallel": 2},
    "parallel.pipeline_parallel is 4": {"parallel__pipeline_parallel": 4},
    "offload.optimizer: Input should be .*, not 'pfs'": {"offload__optimizer": "pfs"},
    "offload.params: Input should be .*, not 'nvme'": {"offload__params": "nvme"},
    "precision: Input should be .*, not 'fp8'": {"precision": "fp8"},
    "zero_stage is 2": {"zero_stage": 2},
    "engine.stride is 3": {"engine__stride": 3},
    "engine.gradient_flush is None": {"engine__gradient_flush": None},
    "parallel.data_parallel 99": {"parallel__data_parallel": 99},
    "batch.global_batch is 5": {"batch__global_batch": 5},
    "gpus_per_node is 8": {"parallel__gpus_per_node": 8},
}


@pytest.mark.parametrize("message", UNSUPPORTED)
def test_what_cannot_be_expressed_is_refused_by_name(message):
    with pytest.raises(CaseError, match=f"case {BLOCKING}: .*{message}"):
        case(BLOCKING, **UNSUPPORTED[message]).predict(load_profile("a100x4-40g"))


def test_tensor_parallel_ranks_share_every_layer():
    """Four ranks as 2 x 2 hold, gather and update half as much each as two ranks do."""
    alone = case(BLOCKING, parallel__data_parallel=2, batch__global_batch=2)
    shared = case(BLOCKING, parallel__data_parallel=2, parallel__tensor_parallel=2, batch__global_batch=2)
    flushed = []
    for some in (alone, shared):
        _, decisions, schedule = scheduled(some)
        flushed.append(sum(task.num_bytes for task in schedule.tasks if task.op is Op.OVERWRITE))
        assert decisions.tensor_parallel == some.tensor_parallel
    assert flushed[1] == pytest.approx(flushed[0] / 2, rel=0.01)
    profile = load_profile("a100x4-40g")
    assert shared.predict(profile).values[Metric.PEAK_GPU] < 0.75 * alone.predict(profile).values[Metric.PEAK_GPU]


def test_parameters_on_the_host_are_fetched_for_every_use():
    schedule = scheduled(case(BLOCKING, offload__params="cpu"))[2]
    fetched = sum(task.num_bytes for task in schedule.tasks if task.op is Op.FETCH)
    assert fetched > 2 * CASES[BLOCKING]["model"]["num_params"] / 4  # bf16 shards, more than once
    assert not [task for task in schedule.tasks if task.op is Op.UPLOAD]


def test_parameters_that_the_device_updates_stay_on_it():
    some = case(TWIN_FLOW, offload__params="cpu")
    placed = scheduled(some)[1].units.values()
    assert {unit.params for unit in placed if Place.GPU in unit.update} == {"gpu"}
    assert {unit.params for unit in placed if set(unit.update) == {Place.CPU}} == {"host"}


def test_interleaved_needs_a_stride():
    with pytest.raises(CaseError, match=r"engine\.stride"):
        case(INTERLEAVED, engine__stride=None).check()


def test_sizes_that_do_not_add_up_are_refused():
    with pytest.raises(CaseError, match=f"case {BLOCKING}: model: .*num_params"):
        case(BLOCKING, model__num_layers=31)


BROKEN = {
    "engine.name": {"engine": {"name": "warp", "gradient_flush": "async"}},
    "swapping.every: such a field": {"swapping": {"every": 1}},
    "batch.micro_batch": {"batch": {"micro_batch": "4", "global_batch": 4, "seq_len": 2048}},
    "measured.iteration_ms": {"measured": {"iteration_ms": -1}},
    "measured.tflops: such a field": {"measured": {"tflops": 3}},
}


@pytest.mark.parametrize("message", BROKEN)
def test_broken_files_name_case_and_field(message, tmp_path):
    path = tmp_path / "cases.json"
    path.write_text(json.dumps({"schema_version": 1, "cases": [CASES[INTERLEAVED], CASES[BLOCKING] | BROKEN[message]]}))
    with pytest.raises(CaseError, match=f"case {BLOCKING}: {message}"):
        load_cases(path)


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"schema_version": 2, "cases": []}', '{"schema_version": 1, "cases": []}']
)
def test_files_that_are_no_cases(text, tmp_path):
    path = tmp_path / "cases.json"
    path.write_text(text)
    with pytest.raises(CaseError, match=r"cases\.json"):
        load_cases(path)


@pytest.mark.parametrize("entry", MODELS, ids=lambda entry: entry["case"])
def test_published_models_have_the_stated_size(entry):
    model = entry["model"] | {"flash_attention": True}
    assert num_parameters(case(BLOCKING, model=model).model) == model["num_params"]
    with pytest.raises(CaseError, match=f"case {BLOCKING}: .* parameters, but num_params is 7"):
        case(BLOCKING, model=model | {"num_params": 7})


def test_a_case_of_gpt2_has_its_size():
    sizes = {"num_layers": 12, "hidden_size": 768, "ffn_hidden_size": 3072, "num_attention_heads": 12}
    sizes |= {"num_key_value_heads": 12, "vocab_size": 50257, "max_positions": 1024}
    others = {"mlp": "gelu", "norm": "layernorm", "bias": True, "tied_embeddings": True, "flash_attention": True}
    model = case(IN_MEMORY, model={"name": "g", "architecture": "gpt2", **sizes, **others}).model
    assert num_parameters(model) == num_parameters(resolve_model("gpt2"))
