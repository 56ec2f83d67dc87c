"""A weight that the model itself reads just before a block: it is seen with the block, which is then no segment."""

import re

import pytest
import torch
from torch import nn
from torch.nn import functional

import ullage

TOKENS = torch.arange(36).view(6, 6)


class Scaled(nn.Module):
    """Layers of torch behind an embedding whose values are scaled by a weight of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.scale = nn.Embedding(36, 32), nn.Parameter(torch.ones(32))
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(32, 2, 64, 0.0, batch_first=True) for _ in range(4))
        self.head = nn.Linear(32, 36)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens) * self.scale
        for layer in self.layers:
            hidden = layer(hidden)
        scores: torch.Tensor = self.head(hidden)
        return scores


def losses(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    found = []
    for _ in range(3):
        loss = functional.cross_entropy(model(TOKENS).flatten(0, 1), TOKENS.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_it_trains_in_the_least_memory_as_in_memory() -> None:
    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Scaled()
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    with pytest.raises(ValueError, match="does not fit") as refused:
        ullage.prepare(*made(), (TOKENS,), hardware="epyc-turin-2c", device_memory="10kB")
    least = re.search(r"device_memory='([^']+)'", str(refused.value))
    assert least
    model, optimizer = ullage.prepare(*made(), (TOKENS,), hardware="epyc-turin-2c", device_memory=least[1])
    assert any(unit.activations == "recompute" for unit in optimizer.plan.decisions.units.values())
    with optimizer.session as session:
        assert losses(model, optimizer) == pytest.approx(losses(*made()), rel=1e-6)
        assert session.num_left == 0
