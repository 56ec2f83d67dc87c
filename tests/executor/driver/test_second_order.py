"""Gradients of gradients on a device: their nodes are numbered by threads, and their activations are its memory."""

import gc

import pytest
import torch
from torch import nn

import ullage
from ullage.this_machine import planning

BATCH, WIDTH = 512, 64


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(16, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 128), nn.Tanh(), nn.Linear(128, WIDTH)) for _ in range(4)
        )

    def forward(self, x):
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


def wasserstein(model, x):
    real, fake, at = model(x), model(0.5 * x.flip(0)), (0.3 * x).requires_grad_()
    (gradient,) = torch.autograd.grad(model(at).sum(), at, create_graph=True)
    return fake.mean() - real.mean() + 10 * (gradient.norm(dim=-1) - 1).square().mean()


def trained(model, optimizer, batches):
    losses = []
    for x in batches:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        loss = wasserstein(model, x)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.usefixtures("gpu")
def test_a_planned_penalty_follows_the_order_and_the_memory_of_its_plan(monkeypatch):
    monkeypatch.setattr(planning, "FOR_LIBRARIES_BYTES", 0)
    monkeypatch.setattr(planning, "MOST_SIMULATIONS", 30)
    torch.manual_seed(0)
    batches = list(torch.randn(4, BATCH, 16, device="cuda"))
    alone, model = Critic().cuda(), Critic()
    model.load_state_dict(alone.state_dict())
    expected = trained(alone, torch.optim.AdamW(alone.parameters(), lr=1e-2), batches)
    weights = {name: weight.cpu() for name, weight in alone.state_dict().items()}
    del alone
    gc.collect()
    before_bytes = torch.cuda.memory_allocated()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = ullage.prepare(
        model, optimizer, batches[0], step=wasserstein, hardware="h200x1-16c", precision="fp32", device_memory="9.5MB"
    )
    with optimizer.session as session:
        found = trained(model, optimizer, batches)
        peak_bytes = torch.cuda.max_memory_allocated() - before_bytes
        assert session.num_left == 0
    assert found == pytest.approx(expected, rel=1e-4)
    assert peak_bytes <= 1.02 * optimizer.plan.gpu_memory.peak_bytes
    for name, weight in weights.items():
        torch.testing.assert_close(model.state_dict()[name].cpu(), weight, rtol=1e-4, atol=1e-5)
