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


class Momentum(torch.optim.Optimizer):
    """Keeps momentum of large parameters in 8 bits, as torchao and bitsandbytes do."""

    @torch.no_grad()
    def step(self):
        for p in (p for group in self.param_groups for p in group["params"]):
            kept = torch.float8_e5m2 if p.numel() >= 4096 else p.dtype
            average = self.state[p].setdefault("average", torch.zeros_like(p, dtype=kept))
            average.copy_(average.float().lerp(p.grad, 0.3))
            p.sub_(average.float(), alpha=0.1)


@program
def state_by_size(ullage) -> Trained:
    """A class whose state is another one for large parameters."""
    made = model()
    return train(ullage, made, x, optimizer=Momentum(made.parameters(), {}))


class Projected(torch.optim.Optimizer):
    """AdamP's idea: where a gradient is nearly orthogonal to a weight, nothing of the step is along it."""

    def __init__(self, parameters, lr=1e-2):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                average = self.state[p].setdefault("average", torch.zeros_like(p)).lerp_(p.grad, 0.3)
                flat, step = p.view(-1), average.clone().view(-1)
                if torch.cosine_similarity(p.grad.view(-1), flat, dim=0).abs() < 1e-4:
                    step -= flat * ((flat @ step) / flat.square().sum().clamp_min(1e-12))
                flat.sub_(step, alpha=group["lr"])


@program
def projected_in_some_cases(ullage) -> Trained:
    """A class that looks at whole parameters, but only where their gradient is orthogonal to them."""

    class Normed(nn.Linear):
        def forward(self, x):
            return nn.functional.linear(x, 8 * self.weight / self.weight.norm(), self.bias)

    made = nn.Sequential(Normed(16, 64), nn.Tanh(), Normed(64, 64), nn.Tanh(), nn.Linear(64, 8))
    return train(ullage, made, x, optimizer=Projected(made.parameters(), lr=0.5))


class Several(torch.optim.Optimizer):
    """Drives several optimizers, each of which has a part of the parameters, as torchtitan's container does."""

    def __init__(self, optimizers):
        self.optimizers = optimizers
        super().__init__(
            [parameter for each in optimizers for group in each.param_groups for parameter in group["params"]], {}
        )

    def step(self):
        for each in self.optimizers:
            each.step()


@program
def several_optimizers_in_one(ullage) -> Trained:
    """Muon for matrices and AdamW for the rest, in a list of one optimizer."""
    made = model()
    parts = [[p for p in made.parameters() if (p.ndim == 2) is wide] for wide in (True, False)]
    optimizer = Several([torch.optim.Muon(parts[0], lr=1e-2), torch.optim.AdamW(parts[1], lr=1e-2, eps=1e-4)])
    return train(ullage, made, x, optimizer=optimizer)


class Lamb(torch.optim.Optimizer):
    """LAMB without decay: the rate of each parameter is that of its norm to its update's."""

    def __init__(self, parameters, lr=1e-2):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                average = self.state[p].setdefault("average", torch.zeros_like(p))
                average.lerp_(p.grad, 0.1)
                p.sub_(average, alpha=group["lr"] * float(p.norm() / average.norm().clamp(1e-6)))


@program
def lamb(ullage) -> Trained:
    """LAMB, whose step looks at norms of whole parameters."""
    made = model()
    return train(ullage, made, x, optimizer=Lamb(made.parameters()))


class Sharp(torch.optim.Optimizer):
    """SAM as its most used implementation has it: two steps, and an optimizer inside."""

    def __init__(self, parameters, inner, rho=0.05, **settings):
        super().__init__(parameters, {"rho": rho, **settings})
        self.inner = inner(self.param_groups, **settings)
        self.param_groups = self.inner.param_groups

    @torch.no_grad()
    def first_step(self):
        parameters = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        for p in parameters:
            self.state[p]["before"] = p.data.clone()
            p.add_(p.grad * (self.param_groups[0]["rho"] / norm))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["before"]
        self.inner.step()
        self.zero_grad()


@program
def sharpness_aware_class(ullage) -> Trained:
    """Sharpness-aware minimization by a class that has an optimizer of its own."""
    made = model()
    prepared, optimizer = ullage.prepare(made, Sharp(made.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9), x(0))
    losses = []
    for number in range(4):
        for step in (optimizer.first_step, optimizer.second_step):
            loss = prepared(*x(number)).square().mean()
            loss.backward()
            step()
            losses.append(loss.item())
    return losses, prepared


@program
def lbfgs(ullage) -> Trained:
    """L-BFGS, which calls a closure several times in a step."""
    made = model()
    made, optimizer = ullage.prepare(made, torch.optim.LBFGS(made.parameters(), lr=0.1, max_iter=3), x(0))

    def closure():
        optimizer.zero_grad()
        loss = made(*x(0)).square().mean()
        loss.backward()
        return loss

    return [optimizer.step(closure).item() for _ in range(3)], made


@program
def parameters_of_the_loss(ullage) -> Trained:
    """One optimizer for a model and for weights of its losses, which are parameters of no module."""
    made, weights = model(), nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.AdamW([{"params": made.parameters()}, {"params": [weights], "lr": 0.1}], lr=1e-3, eps=1e-4)
    made, optimizer = ullage.prepare(made, optimizer, x(0))
    losses = []
    for number in range(4):
        out = made(*x(number))
        loss = ((-weights).exp() * torch.stack([out.square().mean(), out.abs().mean()]) + weights).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses += [loss.item(), *weights.tolist()]
    return losses, made


@program
def two_optimizers(ullage) -> Trained:
    """An encoder and a generator, each with its optimizer: the second steps later, in every second iteration."""
    made = model()
    encoder, generator = list(made[:3].parameters()), list(made[3:].parameters())
    optimizer = torch.optim.AdamW(encoder, lr=1e-2, eps=1e-4)
    second = torch.optim.SGD(generator, lr=1e-1, momentum=0.9)
    made, optimizer = ullage.prepare(made, optimizer, x(0))
    losses = []
    for number in range(5):
        loss = made(*x(number)).square().mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(made.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses += [loss.item(), norm.item()]
        if number % 2:
            for parameter in generator:
                parameter.grad.add_(parameter.detach(), alpha=0.01)
            losses.append(nn.utils.clip_grad_norm_(generator, 0.2).item())
            second.step()
            second.zero_grad()
    optimizer.add_param_group({"params": generator, "lr": 1e-3})  # with the gradients of the last iteration
    optimizer.step()
    return losses, made


@program
def amsgrad_in_one_group(ullage) -> Trained:
    """AdamW with amsgrad for a part of the parameters."""
    made = model()
    first, *others = made.parameters()
    groups = [{"params": [first], "amsgrad": True}, {"params": others}]
    return train(ullage, made, x, optimizer=torch.optim.AdamW(groups, lr=1e-3, eps=1e-4))


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


@program
def group_added_later(ullage) -> Trained:
    """A part of the model joins the optimizer after two steps, by add_param_group."""
    made = model()
    optimizer = torch.optim.AdamW(made[2:].parameters(), lr=1e-2, eps=1e-4)
    made, optimizer = ullage.prepare(made, optimizer, x(0))
    losses = []
    for step in range(5):
        if step == 2:
            optimizer.add_param_group({"params": list(made[:2].parameters()), "lr": 5e-3})
        loss = made(*x(step)).square().mean()
        loss.backward()
        optimizer.step()
        made.zero_grad()
        losses.append(loss.item())
    return losses, made


@program
def rates_that_depend_on_the_loss(ullage) -> Trained:
    """Learning rate and decay are set between backward and the step, where no gradient is clipped."""
    made = model()
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2, eps=1e-4)
    made, optimizer = ullage.prepare(made, optimizer, x(0), clip=False)
    losses = []
    for number in range(4):
        loss = made(*x(number)).square().mean()
        loss.backward()
        if number != 2:
            optimizer.param_groups[0].update(lr=0.1 * loss.item(), weight_decay=0.1 * number)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, made
