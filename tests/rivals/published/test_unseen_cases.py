"""Cases that nobody has measured are predicted, or refused by name, whatever the model, degrees, batch and engine."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
from amount import examples
from hypothesis import event, given, settings
from hypothesis import strategies as st

from hwprofiles.registry import load_profile
from ullage.rivals.cases import CaseError, Metric, load_cases, read_case
from ullage.rivals.cases.layouts import MODEL_SIZES

PUBLISHED = Path(__file__).parents[3] / "benchmarks" / "published"


def published(file: str) -> list[dict[str, Any]]:
    return json.loads((PUBLISHED / f"{file}.json").read_text())["cases"]


# hidden, layers, FFN, heads, heads of keys and values, vocabulary
SHAPES = [
    (1024, 6, 4096, 16, 16, 50257),
    (2048, 12, 5504, 32, 4, 32000),
    (3584, 28, 18944, 28, 4, 152064),
    (4096, 32, 14336, 32, 8, 128256),
    (8192, 20, 28672, 64, 8, 128256),
]
SIZES = ("hidden_size", "num_layers", "ffn_hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
HAVE_SEVERAL_NODES = ("polaris-a100-40g", "a100-cluster")


@st.composite
def trained(draw: st.DrawFn) -> dict[str, Any]:
    """A published run with another model, batch, parallelism and engine setting."""
    file = draw(st.sampled_from(["offloaded_update", "parallel_training", "nvme_offload"]))
    case = copy.deepcopy(draw(st.sampled_from(published(file))))
    model, parallel, batch, engine = (case[name] for name in ("model", "parallel", "batch", "engine"))
    model.pop("num_params", None)
    model |= zip(SIZES, draw(st.sampled_from(SHAPES)), strict=True)
    model["flash_attention"] = draw(st.booleans())
    if model["architecture"] != "llama":
        model["num_key_value_heads"] = model["num_attention_heads"]
    case["activations"] = draw(st.sampled_from(["keep", "recompute"]))
    room = parallel["gpus_per_node"] * (4 if case["hardware"] in HAVE_SEVERAL_NODES else 1)
    parallel["tensor_parallel"] = draw(st.sampled_from([1, 2, 4]))
    room //= parallel["tensor_parallel"]
    if engine["name"] == "gpu-only":
        parallel["pipeline_parallel"] = draw(st.integers(1, room))
        room //= parallel["pipeline_parallel"]
        case["zero_stage"] = draw(st.integers(0, 3 if parallel["pipeline_parallel"] == 1 else 1))
    else:
        engine["subgroup_params"] = draw(st.sampled_from([30_000_000, 100_000_000, 10**9]))
    if file == "offloaded_update":
        engine["cpu_optimizer_fraction"] = draw(st.floats(0, 1))
    if engine["name"] == "interleaved":
        engine["stride"] = draw(st.integers(1, 12))
    parallel["data_parallel"] = draw(st.integers(1, room))
    ranks = math.prod(parallel[name] for name in ("data_parallel", "tensor_parallel", "pipeline_parallel"))
    parallel["nodes"] = -(-ranks // parallel["gpus_per_node"])
    batch["micro_batch"], batch["seq_len"] = draw(st.integers(1, 4)), draw(st.sampled_from([512, 2048, 4096]))
    batch["global_batch"] = batch["micro_batch"] * parallel["data_parallel"] * draw(st.integers(1, 4))
    return case


@st.composite
def saved(draw: st.DrawFn) -> dict[str, Any]:
    case = copy.deepcopy(draw(st.sampled_from(published("checkpointing"))))
    case["nodes"] = draw(st.sampled_from([1, 2, 5, 64]))
    case["gpus"] = 4 * case["nodes"]
    case["checkpoint"] |= {
        "bytes_total_gb": case["nodes"] * draw(st.floats(1, 150)),
        "every_iterations": draw(st.integers(1, 20)),
        "host_buffer_gb_per_node": draw(st.sampled_from([8, 64, 256])),
    }
    return case


def values(data: dict[str, Any]) -> dict[Metric, float] | None:
    """Return what is predicted, or nothing where the case is refused by name."""
    try:
        case = read_case(data)
        case.check()
        outcome = case.predict(load_profile(case.hardware))
    except CaseError as error:
        assert data["id"] in str(error)
        return None
    assert outcome.converged
    assert set(case.measurements()) <= set(outcome.values)
    assert all(0 <= value < math.inf for value in outcome.values.values())
    return dict(outcome.values)


@settings(max_examples=examples(60))
@given(trained())
def test_more_micro_batches_never_take_less(data):
    few = values(data)
    data["batch"]["global_batch"] *= 2
    many = values(data)
    assert (few is None) == (many is None)
    event("refused" if few is None else "predicted")
    if few and many:
        assert many[Metric.ITERATION] > few[Metric.ITERATION] > 0
        # The phases of a pipeline's stages overlap.
        for phase in (Metric.FORWARD, Metric.BACKWARD) if data["parallel"]["pipeline_parallel"] == 1 else ():
            assert many[phase] > few[phase] > 0


@settings(max_examples=examples(40))
@given(saved())
def test_rarer_checkpoints_never_take_longer(data):
    data["iterations"], data["measured"] = 24, {"end_to_end_s": 1.0}
    often = values(data)
    data["checkpoint"]["every_iterations"] *= 2
    rarely = values(data)
    assert often and rarely
    plain_s = 24 * sum(data["phases_s"].values())
    rounding = 1 + 1e-9
    assert often[Metric.END_TO_END] * rounding >= rarely[Metric.END_TO_END]
    assert rarely[Metric.END_TO_END] * rounding >= plain_s


@pytest.mark.part(4)
@pytest.mark.parametrize("model", list(MODEL_SIZES)[::3])
def test_more_drives_never_train_slower(model):
    rates = []
    for ssds in (1, 4, 12):
        data = published("activation_swapping")[0] | {"model": model, "batch": 16, "ssds": ssds}
        found = values(data)
        assert found
        rates.append(found[Metric.COMPUTE_RATE])
    assert rates == sorted(rates)


WRONG = {
    "parallel_training": [
        ("model.num_layers", 0, "equal to 1"),
        ("model.hidden_size", -4096, "equal to 1"),
        ("model.vocab_size", 1.5, "valid integer"),
        ("batch.seq_len", None, "valid integer"),
        ("parallel", 8, "an object"),
        ("measured.iteration_ms", 0, "0.000000000001"),
        ("measured.iteration_ms", "12 s", "number"),
        ("zero_stage", 4, "less than or equal to 3"),
        ("activations", "sometimes", "'keep' or 'recompute'"),
    ],
    "checkpointing": [
        ("checkpoint.bytes_total_gb", -1, "0.000000000001"),
        ("checkpoint.every_iterations", 0, "equal to 1"),
        ("checkpoint.engine", "floppy", "'deepspeed'"),
        ("phases_s.forward", float("nan"), "finite"),
        ("nodes", 3, "multiple of nodes"),
    ],
    "streamed_h100": [
        ("tokens_per_round", 1000, "multiple of 1024"),
        ("tokens_per_step", 40_000, "multiple of 32768"),
        ("engine.clip", True, "False"),
        ("engine.optimizer", "sgd", "'adamw' or 'muon'"),
        ("engine.state.moments", "fp32", "'bf16'"),
        ("device_budget_gib", 0, "greater than 0"),
        ("measured.tokens_per_s", -1, "0.000000000001"),
    ],
    "activation_swapping": [
        ("model", "14b", "sizes are unknown"),
        ("ssds", 13, "has 12"),
        ("ssds", 0, "equal to 1"),
        ("batch", True, "valid integer"),
    ],
}


@pytest.mark.parametrize(("file", "row"), [(file, row) for file, rows in WRONG.items() for row in rows])
def test_a_wrong_value_is_refused_by_case_field_and_rule(file, row, tmp_path):
    field, value, rule = row
    data = copy.deepcopy(published(file)[0])
    place = data
    *outer, last = field.split(".")
    for name in outer:
        place = place[name]
    place[last] = value
    path = tmp_path / "cases.json"
    path.write_text(json.dumps({"schema_version": 1, "cases": [data]}))
    with pytest.raises(CaseError) as caught:
        for case in load_cases(path):
            case.check()
            case.predict(load_profile(case.hardware))
    message = str(caught.value)
    assert data["id"] in message
    assert last in message or outer[-1] in message
    assert rule in message
