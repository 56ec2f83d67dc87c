"""A weight that the model itself reads just before a block, which is then no segment, or behind its last module."""

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


class Tempered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)))
        self.temperature = nn.Parameter(torch.full((16,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.layers(x) / self.temperature
        return scores


@pytest.mark.parametrize("order", ["one after the other", "of one forward"])
def test_several_backwards_that_begin_at_it_find_it(order: str) -> None:
    """Also when weights that move have been hidden at the end of the first one."""
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))

    def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        for _ in range(2):
            first = model(x)
            second = first if order == "of one forward" else model(x + 1)
            first.square().mean().backward(retain_graph=True)
            second.exp().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return {name: weight.clone() for name, weight in model.state_dict().items()}

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Tempered()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    with pytest.raises(ValueError, match="does not fit") as refused:
        ullage.prepare(*made(), (x,), hardware="epyc-turin-2c", device_memory="1kB")
    least = re.search(r"device_memory='([^']+)'", str(refused.value))
    assert least
    model, optimizer = ullage.prepare(*made(), (x,), hardware="epyc-turin-2c", device_memory=least[1])
    with optimizer.session:
        torch.testing.assert_close(trained(model, optimizer), trained(*made()))


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
