"""Gradients of gradients on a device, where threads number their nodes, and in ranks."""

import gc

import pytest
import torch
from penalties import WIDTH, Critic, penalised, trained, unknown, wasserstein
from torch import nn

import ullage
from ullage.this_machine import planning


@pytest.mark.usefixtures("gpu")
def test_a_planned_penalty_follows_the_order_and_the_memory_of_its_plan(monkeypatch):
    monkeypatch.setattr(planning, "FOR_LIBRARIES_BYTES", 0)
    monkeypatch.setattr(planning, "MOST_SIMULATIONS", 30)
    torch.manual_seed(0)
    batches = list(torch.randn(4, 512, 16, device="cuda"))
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


def scaled():
    """Return a critic that saves parameters themselves: of a linear layer, autograd saves a view."""
    model = Critic()
    for block in model.blocks:
        block.insert(0, nn.LayerNorm(WIDTH))
    return model


def stylised(model, x):
    """Used gradients are dropped between a gradient and its penalty, as StyleGAN's loop does."""
    at = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(at).sum(), at, create_graph=True)
    model.zero_grad()
    return gradient.square().sum()


def meta_learned(model, x):
    """MAML: weights after a step of their own serve another call, and nothing is accumulated before it."""
    own = dict(model.named_parameters())
    found = torch.autograd.grad(model(x).square().mean(), list(own.values()), create_graph=True)
    fast = {name: weight - 0.1 * g for (name, weight), g in zip(own.items(), found, strict=True)}
    return torch.func.functional_call(model, fast, (x.flip(0),)).square().mean()


@pytest.mark.parametrize(
    ("loss", "options"),
    [(stylised, {}), (meta_learned, {"device_memory": "182kB"})],
    ids=["used gradients are dropped", "the model is called again"],
)
def test_a_graph_of_gradients_lasts_until_the_step(loss, options):
    def train(model, optimizer):
        for _ in range(2):
            loss(model, x).backward()
            optimizer.step()
            model.zero_grad()

    torch.manual_seed(0)
    alone, model, x = scaled(), scaled(), torch.randn(8, 16)
    model.load_state_dict(alone.state_dict())
    train(alone, torch.optim.SGD(alone.parameters(), lr=0.01))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = ullage.prepare(model, optimizer, x, hardware="epyc-turin-2c", **options)
    with optimizer.session:
        train(model, optimizer)
        for name, weight in alone.state_dict().items():
            torch.testing.assert_close(model.state_dict()[name], weight)


@pytest.mark.parametrize(
    ("train", "options", "stages", "num_left"),
    [(trained, {"step": wasserstein}, {1, 2}, 0), (unknown, {"device_memory": "400kB"}, {3}, 3)],
    ids=["planned", "unknown"],
)
def test_ranks_train_with_a_penalty_together(processes, train, options, stages, num_left):
    torch.manual_seed(0)
    model, batches = Critic(), torch.randn(3, 64, 16)
    train(model, torch.optim.AdamW(model.parameters(), lr=1e-2), batches)
    for zero_stage, left, weights in processes.call(2, penalised, train, options):
        assert zero_stage in stages
        assert left == num_left
        for name, weight in model.state_dict().items():
            torch.testing.assert_close(torch.from_numpy(weights[name]), weight, rtol=1e-4, atol=1e-5)
