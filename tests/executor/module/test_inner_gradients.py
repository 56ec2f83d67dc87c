"""Blocks that take a gradient inside their forward, and hooks in backward that read weights, from some step on."""

import functools
import re

import pytest
import torch
from amount import short_searches
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

import ullage

ROWS, WIDTH = 8, 32
BEGINS = 2  # the step in which it begins
LEAST = r"larger device_memory='([\d.]+)kB'"


def beside(block, _x, found):
    """A gradient of a graph that ends inside, as Langevin steps take it."""
    at = found.detach().requires_grad_()
    return torch.autograd.grad(block.computed(at).square().sum(), at)[0]


def kept(_block, x, found):
    """One of the block's own graph, which backward passes through later."""
    return torch.autograd.grad(found.square().sum(), x, retain_graph=True)[0]


def differentiated(_block, x, found):
    """One that is itself differentiated, as forces are."""
    return torch.autograd.grad(found.square().sum(), x, create_graph=True)[0]


def of_weights(block, x, found):
    """Gradients of weights, as fast weights are made of."""
    weights = torch.autograd.grad(found.square().mean(), list(block.parameters()), create_graph=True)
    return x * torch.stack([each.norm() for each in weights]).sum()


class Block(nn.Module):
    """Weights enough to be moved, in one segment; ``taking`` is how it takes a gradient, if it does."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.taking = None

    def computed(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))

    def forward(self, x):
        found = self.computed(x)
        if self.taking is None:
            return found
        return self.computed(self.computed(found - 1e-2 * self.taking(self, x, found)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.start, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x):
        x = self.start(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, WIDTH, generator=generator), torch.arange(ROWS) % 4


def prepared(model, optimizer):
    """Prepare a model for little more than the least memory that a plan fits."""
    plan = functools.partial(ullage.prepare, model, optimizer, (batch(0)[0],), hardware="epyc-turin-2c")
    with pytest.raises(ullage.InfeasibleError) as error:
        plan(device_memory=1000)
    return plan(device_memory=f"{1.1 * float(re.search(LEAST, str(error.value))[1])}kB")


def trained(prepare, begin, hook):
    torch.manual_seed(0)
    model = Model()
    model, optimizer = prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3))
    losses = []
    for step in range(4):
        if step == BEGINS:
            begin(model)
        x, labels = batch(step)
        loss = F.cross_entropy(model(x), labels)
        handle = hook(model, loss) if step >= BEGINS else None
        loss.backward()
        if handle is not None:
            handle.remove()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses), {name: values.clone() for name, values in model.state_dict().items()}, optimizer


def assert_trains_as_in_memory(begin, hook=lambda *_: None) -> None:
    with short_searches():
        losses, weights, optimizer = trained(prepared, begin, hook)
    assert optimizer.session.num_left == 4 - BEGINS
    units = optimizer.session.decisions.units
    assert {units[f"blocks.{number}.up"].activations for number in range(4)} == {"recompute", "offload", "keep"}
    assert not any(unit.is_resident for name, unit in optimizer.session.runtime.state.units.items() if "blocks" in name)
    optimizer.session.close()
    expected, in_memory, _ = trained(lambda *given: given, begin, hook)
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-6)
    for name, values in in_memory.items():
        torch.testing.assert_close(weights[name], values, rtol=1e-6, atol=1e-6, msg=name)


@pytest.mark.parametrize("first", [0, 1])  # of the blocks that do so: it leaves the plan, recomputed or offloaded
@pytest.mark.parametrize("taking", [beside, kept, differentiated, of_weights])
def test_a_forward_that_begins_to_take_a_gradient_inside_trains_as_in_memory(taking, first) -> None:
    def begin(model) -> None:
        for block in model.blocks[first:]:
            block.taking = taking

    assert_trains_as_in_memory(begin)


def with_norm(gradient, weight):
    return gradient * (1 + 0.01 * weight.norm())


@pytest.mark.parametrize("place", ["the loss", "a gradient of a weight", "inside a block"])
def test_a_hook_in_backward_that_begins_to_read_weights_of_others_trains_as_in_memory(place) -> None:
    def hook(model, loss):
        weights = [block.up.weight for block in model.blocks]
        if place == "the loss":
            return loss.register_hook(lambda gradient: with_norm(gradient, weights[0]))
        if place == "a gradient of a weight":
            return weights[1].register_hook(lambda gradient: gradient + 0.01 * weights[2] + 0.01 * weights[0])
        return None

    def begin(model) -> None:
        def follow(number, block) -> None:
            other = model.blocks[number - 1].up.weight
            compute = block.computed

            def computed(x):
                x = x * 1
                if x.requires_grad:
                    x.register_hook(lambda gradient: with_norm(gradient, other))
                return compute(x)

            block.computed = computed

        for number, block in enumerate(model.blocks if place == "inside a block" else ()):
            follow(number, block)

    assert_trains_as_in_memory(begin, hook)
