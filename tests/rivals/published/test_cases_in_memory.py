import copy
import json
import statistics
from pathlib import Path

import pytest

from hwprofiles.registry import load_profile
from ullage.rivals.cases import CaseError, Metric, load_cases, read_case
from ullage.rivals.cases.training import TrainingCase

FILE = Path(__file__).parents[3] / "benchmarks" / "published" / "in_memory_b200.json"
CASES = {case["id"]: case for case in json.loads(FILE.read_text())["cases"]}
DENSE, SHARDED = "b200-llama3-70b-l12-tp1-pp2-dp4-mbc4-cef", "b200-llama3-70b-tp2-pp1-dp4-l12-mbc8-cef"
LONG, EXPERTS = (
    "b200-llama3-405b-l4-tp1-cp8-pp1-dp1-seq32768-mbc4-cef",
    "b200-deepseekv3-l4-tp1-ep8-pp1-dp8-mbc4-cef",
)
PROFILE = load_profile("b200x8-nvlink")


def changed(name, **fields):
    data = copy.deepcopy(CASES[name])
    for place, values in fields.items():
        data[place] |= values
    return data


def test_every_case_of_the_file_is_read():
    cases = load_cases(FILE)
    assert [case.id for case in cases] == list(CASES)
    assert all(isinstance(case, TrainingCase) and case.kernels == "megatron-core" for case in cases)
    assert all(case.loss_in_place for case in cases)  # ``cef`` is TransformerEngine's


def test_measurements_are_in_si_units():
    found = read_case(CASES[DENSE]).measurements()
    assert found == {Metric.ITERATION: pytest.approx(0.843), Metric.PEAK_GPU: pytest.approx(66.55 * 1024**3)}


def test_what_simumax_predicts_may_be_left_out():
    data = copy.deepcopy(CASES[DENSE])
    del data["predicted_by_simumax_ms"]
    assert read_case(data).predicted_by_simumax_ms is None


@pytest.mark.parametrize(
    ("name", "place", "values", "field"),
    [
        (DENSE, "engine", {"offload": True}, "engine.offload"),
        (DENSE, "parallel", {"data_parallel": "4"}, "parallel.data_parallel"),
        (DENSE, "model", {"kv_lora_rank": 512}, "kv_lora_rank"),
        (EXPERTS, "model", {"num_key_value_heads": 8}, "num_key_value_heads"),
        (DENSE, "model", {"architecture": "mamba"}, "model"),
    ],
)
def test_wrong_fields_are_named(tmp_path, name, place, values, field):
    path = tmp_path / "cases.json"
    path.write_text(json.dumps({"schema_version": 1, "cases": [changed(name, **{place: values})]}))
    with pytest.raises(CaseError, match=rf"{name}: .*{field}"):
        load_cases(path)


@pytest.mark.parametrize(
    ("name", "place", "values", "field"),
    [
        (DENSE, "engine", {"gradients": "bf16"}, "engine.gradients: Input should be 'fp32'"),
        (DENSE, "engine", {"fused_cross_entropy": False}, "engine.fused_cross_entropy: Input should be True"),
        (DENSE, "engine", {"zero_stage": 0}, "engine.zero_stage: Input should be 1"),
        (DENSE, "model", {"flash_attention": False}, "model.flash_attention: Input should be True"),
        (DENSE, "model", {"bias": True}, "model.bias: Input should be False"),
        (DENSE, "model", {"mlp": "gelu"}, "model.mlp: Input should be 'swiglu'"),
        (SHARDED, "engine", {"sequence_parallel": False}, "engine.sequence_parallel is False"),
        (EXPERTS, "parallel", {"tensor_parallel": 16}, "must be a multiple of tensor_parallel 16"),
        (DENSE, "parallel", {"expert_parallel": 4}, "parallel.expert_parallel: Input should be 1"),
        (EXPERTS, "parallel", {"expert_parallel": 3}, "divide the 8 ranks of a stage"),
        (EXPERTS, "model", {"num_experts": 100}, "num_experts of deepseek-v3-shape is 100"),
        (LONG, "parallel", {"context_parallel": 3}, "multiple of twice context_parallel 3"),
        (SHARDED, "model", {"num_attention_heads": 63}, "num_attention_heads"),
    ],
)
def test_what_is_not_modelled_or_does_not_fit_is_refused_by_name(name, place, values, field):
    with pytest.raises(CaseError, match=rf"case {name}: .*{field}"):
        read_case(changed(name, **{place: values})).check()


def test_more_ranks_than_a_node_has_are_refused():
    case = read_case(changed(DENSE, parallel={"data_parallel": 8}))
    with pytest.raises(CaseError, match=r"it had 16 ranks on 1 node.*b200x8-nvlink has 8 devices per node"):
        case.predict(PROFILE)


def predicted(name, **fields):
    return read_case(changed(name, **fields)).predict(PROFILE).values


def test_published_runs_are_predicted_within_five_percent_on_average_and_their_peaks_within_one():
    cases = load_cases(FILE)
    errors = {metric: [] for metric in (Metric.ITERATION, Metric.PEAK_GPU)}
    for case in cases:
        found, measured = case.predict(PROFILE), case.measurements()
        assert found.converged
        for metric, values in errors.items():
            values.append(abs(found.values[metric] / measured[metric] - 1))
    assert statistics.mean(errors[Metric.ITERATION]) < 0.05
    assert statistics.mean(errors[Metric.PEAK_GPU]) < 0.01
    simumax = statistics.mean(abs(case.predicted_by_simumax_ms / case.measured["iteration_ms"] - 1) for case in cases)
    assert statistics.mean(errors[Metric.ITERATION]) < simumax
    page = (FILE.parents[2] / "docs" / "results.md").read_text()
    assert f"SimuMax predicts iteration times with a mean\nerror of {100 * simumax:.1f} %" in page


def test_each_degree_does_what_it_is_for():
    """Context: shorter attention, less memory. Experts: fewer on a rank. Micro-batches: in proportion."""
    shorter = predicted(LONG, parallel={"context_parallel": 4})
    assert predicted(LONG)[Metric.ITERATION] < shorter[Metric.ITERATION]
    assert predicted(LONG)[Metric.PEAK_GPU] < shorter[Metric.PEAK_GPU]
    fewer = predicted(EXPERTS, parallel={"expert_parallel": 4})
    assert predicted(EXPERTS)[Metric.PEAK_GPU] < fewer[Metric.PEAK_GPU]
    once, twice = (
        read_case(changed(SHARDED) | {"num_micro_batches": number}).predict(PROFILE).values for number in (4, 8)
    )
    shared = predicted(EXPERTS, parallel={"data_parallel": 4, "tensor_parallel": 2})
    assert shared[Metric.ITERATION] < predicted(EXPERTS)[Metric.ITERATION]  # half as many tokens in all
    assert 1.8 < twice[Metric.ITERATION] / once[Metric.ITERATION] < 2
    assert twice[Metric.PEAK_GPU] == once[Metric.PEAK_GPU]
