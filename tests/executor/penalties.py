"""Steps with gradients of gradients."""

import torch
from torch import nn

import ullage

WIDTH = 64


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
    real, fake, at = model(x), model(0.5 * x), (0.3 * x).requires_grad_()
    (gradient,) = torch.autograd.grad(model(at).sum(), at, create_graph=True)
    return fake.mean() - real.mean() + 10 * (gradient.norm(dim=-1) - 1).square().mean()


def trained(model, optimizer, batches):
    losses = []
    for x in batches:
        if x.is_cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        loss = wasserstein(model, x)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def unknown(model, optimizer, batches):
    """Train with a penalty in a second backward, which no plan knows."""
    for x in batches:
        model(x).square().mean().backward()
        at = (0.3 * x).requires_grad_()
        (gradient,) = torch.autograd.grad(model(at).sum(), at, create_graph=True)
        gradient.square().sum(-1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def penalised(rank: int, size: int, train, options):
    """Train a penalty in ranks; return the ZeRO stage, the iterations that left the plan, and the weights."""
    torch.manual_seed(0)
    model, every = Critic(), torch.randn(3, 32 * size, 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    mine = list(every[:, 32 * rank : 32 * (rank + 1)])
    model, optimizer = ullage.prepare(model, optimizer, mine[0], **options, hardware="epyc-turin-2c")
    with optimizer.session as session:
        train(model, optimizer, mine)
        left, final = session.num_left, {name: weight.numpy().copy() for name, weight in model.state_dict().items()}
    return optimizer.plan.decisions.zero_stage, left, final
