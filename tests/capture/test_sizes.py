"""A captured model is planned at every micro-batch and number of tokens, as one that is known by its sizes."""

import json
import pickle
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

import ullage
from benchmarks.capture.tiny import TINY
from hwprofiles.registry import load_profile
from planner.choices.request import Request
from planner.choices.variants import variants
from planner.costs.model import CostModel
from planner.graph import Batch, build_graph, units
from planner.models import from_hf_config
from planner.models.captured import CapturedModel, resized, tokens_of
from planner.models.config import ModelConfigError
from planner.models.kernels import flop
from planner.plan.document import load_plan
from planner.plan.planning import InfeasibleError, make_plan
from planner.plan.remedies import what_would_fit
from planner.simulate.machine import run_until_steady
from planner.verification import verify
from ullage.capture import capture, capture_module
from ullage.capture.architectures import architecture
from ullage.main import main

MACHINE = "epyc-turin-2c"
LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 900,
}


def config(folder: Path, name: str, **changes: int) -> str:
    description = transformers.AutoConfig.for_model(name, **TINY[name] | changes)
    (folder / "config.json").write_text(json.dumps(description.to_dict()), encoding="utf-8")
    return str(folder)


@pytest.mark.part(4)
@pytest.mark.parametrize("name", ["gemma2", "qwen3_next", "whisper", "qwen2_5_vl", "vit"])
def test_a_model_at_another_size_is_what_is_captured_there(name: str, tmp_path: Path) -> None:
    path = config(tmp_path, name)
    inputs = architecture(path).inputs
    first = capture(path, inputs(2, 16), "fp32", as_on_gpu=False)
    has_tokens = tokens_of(first.inputs) > 1
    size = (3, 24 if has_tokens else 1)
    assert first.at(Batch(*size)) == capture(path, inputs(3, 24 if has_tokens else 16), "fp32", as_on_gpu=False)
    assert first.at(Batch(*size)) is first.at(Batch(*size))
    assert first.at(Batch(2, 16 if has_tokens else 1)) is first


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(40, 16), nn.Linear(16, 16), nn.Linear(16, 40)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.mix(self.embed(ids))).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("make", [Net, Net()])
def test_functions_and_modules_are_captured_again_too(make: Callable[[], nn.Module] | nn.Module) -> None:
    captured = capture_module(make, ["2x8:int64", "2x8:int64"], "fp32", as_on_gpu=False)
    assert captured.is_free
    larger = captured.at(Batch(5, 12))
    assert [spec.shape for spec in larger.inputs] == [(5, 12), (5, 12)]
    assert larger.forward_flop * 16 == captured.forward_flop * 60
    copied = pickle.loads(pickle.dumps(captured))  # noqa: S301
    assert copied == captured
    assert copied.at(Batch(5, 12)) == larger
    assert not copied.is_free  # a function of this process stays in it


def test_only_leading_dimensions_and_tokens_change() -> None:
    specs = ullage.CapturedInput.read
    given = (specs("2x8:int64"), specs("mask=2x1x8x8:bool"), specs("pixels=2x8x8"))
    assert [spec.shape for spec in resized(given, 3, 5)] == [(3, 5), (3, 1, 5, 5), (3, 8, 8)]


def test_a_global_batch_is_cut_as_the_planner_likes_and_verified_without_pytorch(tmp_path: Path) -> None:
    plan = ullage.plan(config(tmp_path, "gemma2"), hardware=MACHINE, seq_len=16, global_batch=8, precision="fp32")
    assert isinstance(plan.model, CapturedModel)
    assert plan.model.micro_batch == plan.decisions.micro_batch
    assert {other.micro_batch for other in plan.model.others} | {plan.model.micro_batch} == {1, 2, 4, 8}
    plan.save(tmp_path / "plan.json")
    loaded = load_plan(tmp_path / "plan.json")
    assert not loaded.model.is_free
    verify(loaded)
    with pytest.raises(ModelConfigError, match="was captured for micro-batch"):
        loaded.model.at(Batch(3, 16))


def test_what_does_not_fit_is_helped_by_a_smaller_micro_batch() -> None:
    captured = capture_module(Net, ["64x16:int64", "64x16:int64"], "fp32", as_on_gpu=False)
    machine = load_profile(MACHINE).with_device_memory(400_000)
    request = Request(captured, machine, seq_len=16, micro_batch=64, precision="fp32")
    with pytest.raises(InfeasibleError):
        make_plan(request)
    assert any(words.startswith("--micro-batch ") for words, _ in what_would_fit(request))


@pytest.mark.part(4)
@pytest.mark.parametrize("name", ["cohere", "gemma2", "t5"])
def test_a_model_with_its_loss_in_tiles_is_captured_again(name: str, tmp_path: Path) -> None:
    path = config(tmp_path, name)
    captured = capture(path, architecture(path).inputs(2, 16), "fp32", as_on_gpu=False)
    whole, tiled = (units(build_graph(captured, Batch(2, 16, 4, loss_tile_tokens=n))) for n in (None, 6))
    assert [unit.name for unit in tiled] == [unit.name for unit in whole]
    assert [unit.parameters for unit in tiled] == [unit.parameters for unit in whole]
    assert captured.num_logits is not None
    of_whole, of_tiles = (sum(flop(u.forward) + flop(u.backward) for u in found) for found in (whole, tiled))
    assert of_whole == of_tiles
    assert tiled[-1].saved_bytes < whole[-1].saved_bytes - 2 * 16 * captured.num_logits * 3


def test_a_captured_head_is_as_formulas_have_it() -> None:
    sizes = transformers.LlamaConfig(**LLAMA)
    model = transformers.AutoModelForCausalLM.from_config(sizes)
    captured = capture_module(model, ["input_ids=2x32:int64", "labels=2x32:int64"], as_on_gpu=False)
    batch = Batch(2, 32, loss_tile_tokens=20)
    ours, theirs = (units(build_graph(m, batch))[-1] for m in (from_hf_config(sizes.to_dict(), "x"), captured))
    assert flop(theirs.forward) == flop(ours.forward)
    assert flop(theirs.backward) == flop(ours.backward)
    assert theirs.saved_bytes == pytest.approx(ours.saved_bytes, rel=0.01)
    gradient_bytes = 2 * model.lm_head.weight.numel()  # which a captured head has in backward
    assert theirs.workspace_bytes + gradient_bytes == pytest.approx(ours.workspace_bytes, rel=0.03)


@pytest.mark.part(3)
@pytest.mark.parametrize("given", [{}, {"layer_tile_tokens": 100}, {"loss_tile_tokens": 64}], ids=str)
def test_a_plan_that_compares_tiles_is_verified_without_another_capture(given: dict[str, int], tmp_path: Path) -> None:
    path = config(tmp_path, "olmo2", intermediate_size=1024, max_position_embeddings=512)
    captured = capture(path, architecture(path).inputs(1, 512), "fp32", as_on_gpu=False)
    machine = load_profile(MACHINE).with_device_memory(30_000_000)
    request = Request(captured, machine, seq_len=512, micro_batch=1, precision="fp32", **given)  # type: ignore[arg-type]
    assert any(variant.choice.layer_tile_tokens for variant in variants(request))
    (tmp_path / "plan.json").write_text(make_plan(request, 2).to_json())
    verify(load_plan(tmp_path / "plan.json"))


def test_captured_layers_are_as_formulas_have_them() -> None:
    """But for their workspace, which a capture measures for a whole unit."""
    sizes = transformers.LlamaConfig(**LLAMA)
    model = transformers.AutoModelForCausalLM.from_config(sizes)
    captured = capture_module(model, ["input_ids=2x32:int64", "labels=2x32:int64"], as_on_gpu=False)
    batch = Batch(2, 32, layer_tile_tokens=20)
    ours, theirs = (units(build_graph(m, batch))[1:-1] for m in (from_hf_config(sizes.to_dict(), "x"), captured))
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert flop(other.forward) == flop(one.forward)
        assert flop(other.backward) == flop(one.backward)
        assert flop(other.recompute) == flop(one.recompute)
        assert other.saved_bytes == pytest.approx(one.saved_bytes, rel=0.02)
        assert other.swap_bytes == one.swap_bytes


def test_a_model_without_logits_has_no_tiles() -> None:
    captured = capture_module(Net, ["2x8:int64", "2x8:int64"], "fp32", as_on_gpu=False)
    with pytest.raises(ModelConfigError, match="cannot be computed in tiles; leave --tiles loss out"):
        ullage.plan(captured, hardware=MACHINE, loss_tile_tokens=4, precision="fp32")


class OneSampleIsTooFew(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def test_sizes_that_a_model_does_not_take_are_left_out() -> None:
    captured = capture_module(OneSampleIsTooFew, ["4x8"], "fp32", as_on_gpu=False)
    with pytest.raises(
        ModelConfigError, match=r"micro-batch 1, 1 tokens per sequence: .*more than 1 value per channel"
    ):
        captured.at(Batch(1, 1))
    plan = ullage.plan(captured, hardware=MACHINE, global_batch=4)
    assert {other.micro_batch for other in plan.model.others} | {plan.model.micro_batch} == {2, 4}
    verify(plan)


def test_studies_and_options_of_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = config(tmp_path, "gemma2")
    monkeypatch.chdir(tmp_path)
    options = ["--hardware", MACHINE, "--precision", "fp32"]
    sweep = ["--seq-len", "8", "--sweep", "micro_batch=1,2"]
    assert main(["whatif", "--model", path, *options, *sweep, "--workers", "1", "--json"]) == 0
    points = json.loads(capsys.readouterr().out)["points"]
    assert len({point["result"]["figures"]["iteration_s"] for point in points}) == 2
    monkeypatch.setitem(sys.modules, "sizes_of_nets", sys.modules[__name__])
    shape = ["--input-shape", "2x8:int64", "2x8:int64", "--micro-batch", "3", "--seq-len", "12"]
    assert main(["plan", "--model", "sizes_of_nets:Net", *shape, *options]) == 0
    assert "Net(3x12:int64, 3x12:int64): captured" in " ".join(capsys.readouterr().out.split())


class Skipping(nn.Module):
    """What its first layer returns is read behind its last."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(4))

    def forward(self, x):
        first = x = self.layers[0](x)
        for layer in self.layers[1:]:
            x = layer(x)
        return (x * first).square().mean()


def test_a_pipeline_is_predicted_with_all_that_crosses_its_cuts():
    """In the search too, of the same model as is in the plan."""
    captured = capture_module(Skipping, ["x=64x64"], "fp32")
    plan = ullage.plan(captured, gpus=2, hardware="rtx-4090x8", pipeline_parallel=2, num_micro_batches=2)
    assert plan.model.segments[2].given_bytes == 2 * 64 * 64 * 4
    cost = CostModel.of(plan.hardware, plan.units(), plan.decisions)
    assert run_until_steady(plan.schedule(), cost).iteration_s == pytest.approx(plan.prediction.iteration_s, rel=1e-9)
    alone = ullage.plan(captured, gpus=1, hardware="rtx-4090x8")
    assert alone.model.is_cut is None, "what crosses cuts is looked for where a plan has stages"


class Separate(Skipping):
    """Layers that are all given the input, so that no stage is given hidden states."""

    def forward(self, x):
        return sum(layer(x) for layer in self.layers).square().mean()


class Twice(Skipping):
    def forward(self, x):
        for layer in (*self.layers, *self.layers):
            x = layer(x)
        return x.square().mean()


class SeparateWithoutLoss(Skipping):
    def forward(self, x):
        return sum(layer(x) for layer in self.layers)


def test_a_model_that_cannot_be_cut_is_refused_before_it_is_executed():
    """Where a loop with a loss of its own may need less, its first step tells."""
    ways = {"gpus": 2, "hardware": "rtx-4090x8", "num_micro_batches": 2}
    captured = capture_module(Separate, ["x=64x64"], "fp32")
    with pytest.raises(ValueError, match=r"begin with layers.2: layers.2 is not given hidden states .* pipeline= out"):
        ullage.plan(captured, pipeline_parallel=2, **ways)
    assert ullage.plan(captured, pipeline_parallel=1, **ways).decisions.pipeline_parallel == 1
    with pytest.raises(ValueError, match=r"the model has no layers to cut between: .* leave pipeline= "):
        ullage.plan(capture_module(Twice, ["x=64x64"], "fp32"), pipeline_parallel=2, **ways)
    without = capture_module(SeparateWithoutLoss, ["x=64x64"], "fp32")
    assert ullage.plan(without, pipeline_parallel=2, **ways).decisions.pipeline_parallel == 2
