"""The comparison of checkpoint engines: what each has saved is what it was given, and another thing is noticed."""

import pytest
import torch

from benchmarks.cpu.checkpoint_engines import check, num_bytes_of, predicted, report
from benchmarks.cpu.engines import Blocking, CheckFreq
from hwprofiles.registry import load_profile
from planner.choices.request import Request
from planner.models import resolve_model
from planner.plan.planning import make_plan
from ullage.calibrate.sampling import quantity

STATE = {"0.master": torch.randn(300, 7), "0.step": torch.tensor(3.0)}


@pytest.mark.parametrize("engine", [Blocking, CheckFreq])
def test_a_checkpoint_is_compared_with_what_was_given(engine, tmp_path):
    made = engine(STATE)
    made.save(tmp_path, 1)
    made.finish()
    check(made, tmp_path, 1)
    torch.save(STATE | {"0.step": torch.tensor(4.0)}, tmp_path / "1.pt")
    with pytest.raises(AssertionError, match=engine.__name__):
        check(made, tmp_path, 1)


def test_runs_are_predicted_and_reported():
    """A blocking engine stops training at every checkpoint for as long as it writes, and ours for nothing."""
    profile = load_profile("epyc-turin-2c").with_device_memory(50_000_000)
    rates = {key: quantity(1e9, "bytes_per_s", "made up", 1) for key in ("fresh_bytes_per_s", "serialise_bytes_per_s")}
    profile = profile.model_copy(update={"host": profile.host.model_copy(update=rates)})
    model = resolve_model("demo-llama").model_copy(update={"num_layers": 1, "vocab_size": 512})
    plan = make_plan(Request(model, profile, seq_len=64))
    found = {
        (name, every): predicted(plan, name, 0.1, 100_000_000, (10, every))
        for name in ("torch.save", "checkfreq", "torchsnapshot", "ours")
        for every in (5, 1)
    }
    assert all(not isinstance(says, str) for says in found.values()), found
    assert found["torch.save", 1]["end_to_end_s"] > found["torch.save", 5]["end_to_end_s"] > 1.0
    assert found["torch.save", 1]["blocked_s"] > 5 * found["ours", 1]["blocked_s"]
    row = {
        "engine": "torch.save",
        "every": 1,
        "end_to_end_s": 1.5,
        "blocked_s": 0.05,
        "blocking_throughput_bytes_per_s": 2e9,
        "iteration_s": 0.15,
        "cost_s": 0.05,
    }
    rows = [row | {"predicted": found["torch.save", 1]}, row | {"predicted": "no drive"}]
    model = {"num_bytes": num_bytes_of(STATE), "iteration_s": 0.1, "rows": rows}
    text = report({"absent": {"torchsnapshot": "No module"}, "models": {"llama": model}})
    assert "torchsnapshot is not there: No module" in text
    assert "not predicted: no drive" in text
    assert "2.0 GB/s" in text
