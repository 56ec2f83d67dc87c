"""Optimizers, made as their libraries show it: with a kernel of ours, with their own step, and users' own."""

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


class SignSgd(torch.optim.Optimizer):
    """Steps by the sign of an average, which it keeps beside the count of steps."""

    def __init__(self, parameters, lr=1e-3, beta=0.9):
        super().__init__(parameters, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["n"], state["average"] = 0, torch.zeros_like(p)
                state["n"] += 1
                state["average"].lerp_(p.grad, 1 - group["beta"])
                p.sub_(state["average"].div(1 - group["beta"] ** state["n"]).tanh(), alpha=group["lr"])


@program
def own_class(ullage) -> Trained:
    """A class of the user's own, which counts steps under another name."""
    made = model()
    return train(ullage, made, x, optimizer=SignSgd(made.parameters(), lr=1e-2))


@program
def adafactor(ullage) -> Trained:
    """torch.optim.Adafactor, whose update of a value depends on its whole row and column."""
    made = model()
    return train(ullage, made, x, optimizer=torch.optim.Adafactor(made.parameters(), lr=1e-3))


for each in (
    with_torch("AdamW", fused=True, eps=1e-4),
    with_torch("AdamW", foreach=True, eps=1e-4),
    with_torch("Adam", weight_decay=0.1, eps=1e-4),
    with_torch("SGD", lr=1e-2, momentum=0.9, nesterov=True),
    with_torch("SGD", lr=1e-2),
    with_torch("RMSprop", lr=1e-3, eps=1e-4),
    with_torch("RMSprop", lr=1e-3, eps=1e-4, momentum=0.9, centered=True),
    with_torch("NAdam", lr=1e-3, eps=1e-4, weight_decay=0.1),
    with_torch("RAdam", lr=1e-3, eps=1e-4),
    with_torch("Adamax", lr=1e-3, eps=1e-4),
    with_torch("Adadelta", lr=0.1, eps=1e-4),
    with_torch("ASGD", lr=1e-2, t0=1.0),
    with_torch("Rprop", lr=1e-4),
    with_torch("AdamW", lr=1e-3, eps=1e-4, amsgrad=True),
    with_torch("Adam", lr=1e-4, eps=1e-4, maximize=True),
    with_torch("Adagrad", eps=1e-4),
):
    program(each)
