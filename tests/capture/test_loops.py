"""Models that loop over tokens are continued from short captures, as if they had been recorded."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from planner.models import loops
from planner.models.captured import CapturedModel
from ullage.capture import capture_module, module

WIDTH, TOKENS = 24, 20
INPUTS = [f"2x{TOKENS}:int64"]


class Scan(nn.Module):
    """A recurrence over tokens, whose values are padded to whole chunks first."""

    def __init__(self, chunk: int) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.ones(WIDTH))
        self.chunk = chunk

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        num_tokens = values.shape[1]
        length = math.ceil(num_tokens / self.chunk) * self.chunk
        values = nn.functional.pad(values, (0, 0, 0, length - num_tokens)).exp()
        state, outputs = values[:, 0], []
        for token in range(num_tokens):
            state = state * self.decay + values[:, token].sigmoid()
            outputs.append(state.tanh())
        return torch.stack(outputs, 1)


class Recurrent(nn.Module):
    def __init__(self, chunk: int = 1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, WIDTH)
        self.projection = nn.Linear(WIDTH, WIDTH)
        self.scan = Scan(chunk)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.scan(self.projection(self.embedding(tokens))).float().square().mean()


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let lengths be short and loops be found early; return the numbers of tokens that are captured."""
    monkeypatch.setattr(loops, "_SHORT", 4)
    monkeypatch.setattr(loops, "_LONGER", 6)
    monkeypatch.setattr(loops, "_PROOF", 10)
    seen: list[int] = []
    recorded = module._Capture._recorded

    def counted(self: module._Capture, model: nn.Module, inputs: tuple, *args: object) -> CapturedModel:
        seen.append(inputs[0].shape[1])
        return recorded(self, model, inputs, *args)

    monkeypatch.setattr(module._Capture, "_recorded", counted)
    return seen


def captured(make: Callable[[], nn.Module]) -> CapturedModel:
    return capture_module(make, INPUTS, name="own:model")


def test_what_is_continued_is_what_would_be_recorded(short: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    expected = captured(Recurrent)
    monkeypatch.setattr(module, "_MANY_EVENTS", 100)
    found = captured(Recurrent)
    assert short == [TOKENS, TOKENS, 4, 6, 10]
    assert found == expected


def test_what_grows_otherwise_is_recorded(short: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    expected = captured(lambda: Recurrent(chunk=8))
    monkeypatch.setattr(module, "_MANY_EVENTS", 100)
    assert captured(lambda: Recurrent(chunk=8)) == expected
    assert short == [TOKENS, TOKENS, 4, 6, 10, TOKENS]


@pytest.mark.parametrize("spec", [["2x18:int64"], ["x=2x20:int64", "y=2x20x3"], ["2x20"]])
def test_short_or_other_inputs_are_recorded(spec: list[str], short: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MANY_EVENTS", 0)

    class Any(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
            return (x * self.scale).mean() + (0 if y is None else y.mean())

    capture_module(Any, spec)
    assert len(short) == 1
