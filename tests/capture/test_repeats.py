"""Blocks that are recorded once and copied are what they would be if all were recorded."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from benchmarks.capture.tiny import TINY
from planner.graph import Batch, build_graph, units
from planner.models.captured import NO_TILES, CapturedInput, CapturedModel
from ullage.capture.architectures import architecture
from ullage.capture.module import _Capture
from ullage.capture.repeats import Repeats

UNLIKE = {"gpt_neo", "lfm2", "swin", "convnext", "jamba"}  # their depth is given otherwise, or no block is like another
DEPTHS = {"num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers", "decoder_layers", "depth"}


def deep(sizes: Any) -> Any:
    """Return a configuration with seven layers."""
    if not isinstance(sizes, dict):
        return sizes
    return {key: 7 if key in DEPTHS else deep(value) for key, value in sizes.items()}


def both(make: Callable[[], nn.Module], inputs: tuple[CapturedInput, ...]) -> tuple[CapturedModel, CapturedModel, int]:
    """Return a model captured with copies and without, and how many copies there were."""
    with torch.device("meta"):
        model, again = make(), make()
    num_copies = sum(not runs for runs in Repeats(again).runs.values())
    job = _Capture(make, "x", "fp32", as_on_gpu=False)
    return job.of(inputs), job._recorded(model, inputs, NO_TILES, None), num_copies


def shape(captured: CapturedModel) -> list[Any]:
    """Return all that a captured model says, but for workspace."""
    operators = [o.model_copy(update={"workspace_bytes": 0}) for b in captured.blocks for o in b.operators]
    numbered = iter(operators)
    blocks = [tuple(itertools.islice(numbered, len(block.operators))) for block in captured.blocks]
    return [(segment.path, blocks[segment.block]) for segment in captured.segments]


def peak_bytes(captured: CapturedModel) -> int:
    found = units(build_graph(captured, Batch(captured.micro_batch, captured.seq_len, 4)))
    held = itertools.accumulate(unit.saved_bytes for unit in found)
    return max(saved + unit.workspace_bytes for saved, unit in zip(held, found, strict=True))


@pytest.mark.part(80)
@pytest.mark.parametrize("name", [name for name in TINY if name not in UNLIKE])
def test_copies_are_like_blocks_that_are_recorded(name: str, tmp_path: Path) -> None:
    sizes = deep(TINY[name])
    data = transformers.AutoConfig.for_model(name.partition(",")[0], **sizes).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(data | {"architectures": sizes.get("architectures")}))
    found = architecture(tmp_path)
    seq_len = found.seq_len(32 if found.kind.has_tokens else None, 32)
    copied, recorded, _ = both(found.make, found.inputs(2, seq_len))
    assert shape(copied) == shape(recorded)
    assert peak_bytes(copied) == pytest.approx(peak_bytes(recorded), rel=0.02)


def test_most_blocks_of_a_deep_model_are_copied() -> None:
    sizes = TINY["qwen3_next"] | {"num_hidden_layers": 24}
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model("qwen3_next", **sizes))
    runs = Repeats(model).runs.values()
    assert (sum(runs), len(runs)) == (5, 24)  # two of each kind, and the last, which is the third of its kind


class Block(nn.Module):
    def __init__(self, number: int, *, own: bool = False, aside: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)
        self.act, self.aside = nn.Sequential(nn.GELU()), aside
        self.layer_idx, self.factor = number, 1.0 + number if own else 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.act(self.first(x))
        if self.aside:
            self.kept = inner.square().mean()
        return x + self.factor * self.second(inner)


class Stack(nn.Module):
    def __init__(
        self, *, own: bool = False, tied: bool = False, between: int = 0, reads: bool = False, aside: bool = False
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(number, own=own, aside=aside) for number in range(8))
        self.between, self.reads, self.aside = between, reads, aside
        if tied:
            for block in self.blocks:
                block.second.bias = self.blocks[0].second.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x)
            for _ in range(self.between if number == 5 else self.between // 2):
                x = torch.sin(x)
        for block in self.blocks if self.reads else ():
            x = x @ block.first.weight.t() @ block.second.weight.t()
        return x.square().mean() + sum(block.kept for block in self.blocks if self.aside)


@pytest.mark.parametrize(
    ("make", "num_copies"),
    [
        (Stack, 5),
        (lambda: Stack(own=True), 0),  # each has a number of its own that it computes with
        (lambda: Stack(tied=True), 0),
        (lambda: Stack(reads=True), 5),  # code behind them reads their weights: likewise
        (lambda: Stack(aside=True), 5),  # each sets an attribute that the loss reads: likewise
        (lambda: Stack(between=4), 5),  # more runs after one block than after the others: all are recorded then
    ],
    ids=["equal", "numbered", "tied", "read later", "attributes", "followed by more"],
)
def test_what_is_not_equal_is_recorded(make: Callable[[], nn.Module], num_copies: int) -> None:
    copied, recorded, found = both(make, (CapturedInput(shape=(4, 8)),))
    assert (shape(copied), found) == (shape(recorded), num_copies)
    assert copied.num_params == sum(parameter.numel() for parameter in make().parameters())
