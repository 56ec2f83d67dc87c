"""Loops that write weights, or read and change gradients, as they are in memory; ``average`` is what DDP does."""

import torch
from torch import nn


def loss_of(model, tokens):
    return model(input_ids=tokens, labels=tokens).loss


def with_gradients(model):
    return [parameter for parameter in model.parameters() if parameter.grad is not None]


def one_step(_model, optimizer, loss, average, edit=lambda: None):
    loss.backward()
    average()
    edit()
    optimizer.step()
    optimizer.zero_grad()
    return [loss.item()]


def noise(model, optimizer, tokens, average, step):
    def edit():
        generator = torch.Generator().manual_seed(step)
        for parameter in with_gradients(model):
            parameter.grad.add_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype), alpha=0.01)
        nn.utils.clip_grad_value_(model.parameters(), 0.02)

    return one_step(model, optimizer, loss_of(model, tokens), average, edit)


def rows(model, optimizer, tokens, average, _step):
    def edit():
        for parameter in with_gradients(model):
            parameter.grad[:1] = 0
            parameter.grad.view(-1)[::2].mul_(0.5)

    return one_step(model, optimizer, loss_of(model, tokens), average, edit)


def surgery(model, optimizer, tokens, average, _step):
    """Gradients of two losses are kept, and their combination is set."""
    kept, seen = [], []
    for part in (tokens[:1], tokens[1:]):
        loss = loss_of(model, part)
        loss.backward()
        average()
        seen.append(loss.item())
        kept.append([parameter.grad.clone() for parameter in model.parameters()])
        optimizer.zero_grad()
    for parameter, one, other in zip(model.parameters(), *kept, strict=True):
        along = (one * other).sum() / other.square().sum().clamp_min(1e-12)
        parameter.grad = one - along.clamp_max(0) * other + other
    optimizer.step()
    optimizer.zero_grad()
    return seen


def loss_scaling(model, optimizer, tokens, average, step):
    """What GradScaler does, with an infinite gradient in one step, which is left out."""
    loss = loss_of(model, tokens)
    (loss * (float("inf") if step == 1 else 256.0)).backward()
    average()
    found, inverse = torch.zeros(1), torch.tensor([1 / 256.0])
    gradients = [parameter.grad for parameter in with_gradients(model)]
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, inverse)
    if not found:
        optimizer.step()
    optimizer.zero_grad()
    return [loss.item(), float(found)]


def read_between(model, optimizer, tokens, average, _step):
    """Each micro-batch's gradient is looked at; the first one is doubled."""
    seen = []
    for number, part in enumerate((tokens[:1], tokens[1:])):
        before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        loss = loss_of(model, part)
        loss.backward()
        average(before)
        seen += [loss.item(), *(float(parameter.grad.abs().sum()) for parameter in with_gradients(model)[:2])]
        for parameter in with_gradients(model) if number == 0 else ():
            parameter.grad *= 2
    optimizer.step()
    optimizer.zero_grad()
    return seen


def penalty(model, optimizer, tokens, average, _step):
    loss = loss_of(model, tokens) + sum(0.01 * parameter.square().sum() for parameter in model.parameters())
    return one_step(model, optimizer, loss, average)


def sharpness_aware(model, optimizer, tokens, average, _step):
    loss_of(model, tokens).backward()
    average()
    with torch.no_grad():
        norm = torch.stack([parameter.grad.norm() for parameter in with_gradients(model)]).norm()
        moves = {parameter: parameter.grad * (0.05 / norm) for parameter in with_gradients(model)}
        for parameter, move in moves.items():
            parameter.add_(move)
    optimizer.zero_grad()
    loss = loss_of(model, tokens)
    loss.backward()
    average()
    with torch.no_grad():
        for parameter, move in moves.items():
            parameter.sub_(move)
    optimizer.step()
    optimizer.zero_grad()
    return [loss.item()]


def writes(model, optimizer, tokens, average, step):
    """Weights are set in all ways, and a state is loaded."""
    kept = {name: weight.clone() for name, weight in model.state_dict().items()}
    seen = one_step(model, optimizer, loss_of(model, tokens), average)
    parameters = list(model.parameters())
    torch.manual_seed(step)
    nn.init.normal_(parameters[1], std=0.02)
    parameters[2].data = torch.full_like(parameters[2], 0.25)
    with torch.no_grad():
        parameters[-1][0] = 0.5
        parameters[3].data.clamp_(-0.02, 0.02)
    if step == 2:
        model.load_state_dict(kept)
    return [*seen, parameters[3].detach().norm().item()]


def state_writes(model, optimizer, tokens, average, _step):
    """Tensors of state_dict() are written to, at once and after a step."""
    states = vars(model).setdefault("kept", [])
    states.append({name: weight for name, weight in model.state_dict().items() if weight.is_floating_point()})
    with torch.no_grad():
        for state in states:
            for weight in state.values():
                weight.mul_(0.9)
    seen = one_step(model, optimizer, loss_of(model, tokens), average)
    return [*seen, *(weight.norm().item() for weight in states[0].values())]


def averages(model, optimizer, tokens, average, step):
    """An average of the weights is evaluated in their place, and at the end stays there."""
    average_of = vars(model).setdefault("kept", {n: p.detach().clone() for n, p in model.named_parameters()})
    seen = one_step(model, optimizer, loss_of(model, tokens), average)
    for name, parameter in model.named_parameters():
        average_of[name].lerp_(parameter.detach(), 0.5)
    own = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(average_of[name])
        seen.append(loss_of(model.eval(), tokens).item())
        for name, parameter in model.train().named_parameters() if step < 2 else ():
            parameter.copy_(own[name])
    return seen


def another_optimizer(model, optimizer, tokens, average, step):
    """A second optimizer, of torch, takes each second step."""
    other = torch.optim.SGD(model.parameters(), lr=1e-2)
    loss = loss_of(model, tokens)
    loss.backward()
    average()
    (other if step % 2 else optimizer).step()
    optimizer.zero_grad()
    return [loss.item()]


EDITS = {
    edit.__name__: edit
    for edit in (
        noise, rows, surgery, loss_scaling, read_between, penalty, sharpness_aware, writes, state_writes, averages,
        another_optimizer,
    )
}  # fmt: skip
