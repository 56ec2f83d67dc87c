"""Optimizers, made as their libraries show it, and one that no plan executes (others are refused by the same line)."""

import torch
from program_catalogue import Trained, registry, seeded, train
from torch import nn

PROGRAMS, program = registry()


def model() -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(3)]
    return nn.Sequential(nn.Linear(16, 64), *blocks, nn.Linear(64, 8))


def x(step: int) -> tuple[torch.Tensor]:
    return (torch.randn(32, 16, generator=seeded(step)),)


def with_torch(name: str, **options):
    def run(ullage) -> Trained:
        made = model()
        return train(ullage, made, x, optimizer=getattr(torch.optim, name)(made.parameters(), **options))

    run.__doc__ = f"torch.optim.{name} {options or ''}".rstrip()
    run.__name__ = "_".join([name.lower(), *options])
    return run


for each in (
    with_torch("AdamW", fused=True, eps=1e-4),
    with_torch("AdamW", foreach=True, eps=1e-4),
    with_torch("Adam", weight_decay=0.1, eps=1e-4),
    with_torch("SGD", lr=1e-2, momentum=0.9, nesterov=True),
    with_torch("SGD", lr=1e-2),
    with_torch("RMSprop", lr=1e-3, eps=1e-4),
    with_torch("Adagrad", eps=1e-4),
):
    program(each)
