"""Terms of the loss that begin in later steps: backward reads weights for them where the example batch had no need."""

import contextlib
import functools
import re
from types import SimpleNamespace

import pytest
import torch
from amount import examples, short_searches
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

import ullage
from executor.driver.iteration import IterationDriver

ROWS, WIDTH = 8, 16
LEAST = r"larger device_memory='([^']+)'"
TERMS = {
    "a leaf": lambda weight: torch.slogdet(weight)[1],
    "a view": lambda weight: torch.sin(weight.T[1:]).sum(),
    "products inside a function": lambda weight: torch.einsum("ij,jk,kl->il", weight, weight, weight).square().sum(),
    "rows": lambda weight: sum(row.dot(row) for row in weight.unbind()),
    "no values": lambda weight: weight.sum(),
}


def near_one() -> nn.Parameter:
    return nn.Parameter(torch.eye(WIDTH) + 0.1 * torch.randn(WIDTH, WIDTH))


class Leaf(nn.Module):
    """A layer with a term of its own, which it makes behind what it returns, and leaves in an attribute."""

    def __init__(self, term) -> None:
        super().__init__()
        self.weight, self.wide = near_one(), nn.Parameter(0.1 * torch.randn(WIDTH, 256))
        self.term, self.has_term = term, False

    def added(self):
        return self.term(self.weight) if self.has_term else 0

    def forward(self, x):
        found = x + torch.tanh(x @ self.weight @ self.wide) @ self.wide.T
        self.loss = self.added()
        return found


class Nested(Leaf):
    """The same between modules inside, and it returns more than a tensor."""

    def __init__(self, term) -> None:
        super().__init__(term)
        self.inner, self.outer = nn.Linear(WIDTH, 256), nn.Linear(256, WIDTH)
        del self.wide

    def forward(self, x):
        found = x + self.outer(torch.tanh(self.inner(x @ self.weight)))
        self.loss = self.added()
        return {"hidden": [found]}


class Hidden(Nested):
    """One that returns an object, in which no view can be put behind all that it makes."""

    def forward(self, x):
        found = SimpleNamespace(hidden=super().forward(x)["hidden"][0])
        self.loss = self.added()
        return found


class Model(Leaf):
    """A model with a weight of its own, of which it makes a term ``at`` a number of layers, or its layers do."""

    def __init__(self, layer, term, at) -> None:
        super().__init__(term)
        del self.wide
        self.layers, self.head, self.at = nn.ModuleList(layer(term) for _ in range(3)), nn.Linear(WIDTH, 4), at

    def forward(self, x, labels):
        loss = 0
        x = x @ self.weight
        for number, layer in enumerate(self.layers):
            layer.has_term = self.has_term and self.at is None
            loss = loss + self.added() if self.at == number else loss
            found = layer(x)
            x = found["hidden"][0] if isinstance(found, dict) else getattr(found, "hidden", found)
            loss = loss + layer.loss
        loss = loss + self.added() if self.at == 3 else loss
        return F.cross_entropy(self.head(x), labels) + 1e-2 * loss


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, WIDTH, generator=generator), torch.arange(ROWS) % 4


def prepared(model, optimizer, *, clip):
    """Prepare a model for the least memory that a plan fits."""
    plan = functools.partial(ullage.prepare, model, optimizer, batch(0), hardware="epyc-turin-2c", clip=clip)
    with pytest.raises(ullage.InfeasibleError) as error:
        plan(device_memory=1000)
    return plan(device_memory=re.search(LEAST, str(error.value))[1])


def trained(prepare, layer, term, at, *, begins):
    torch.manual_seed(0)
    model = Model(layer, TERMS[term], at)
    model.has_term = not begins
    model, optimizer = prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3))
    losses = []
    for step in range(4):
        model.has_term = step >= begins
        loss = model(*batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses), {name: values.clone() for name, values in model.state_dict().items()}, optimizer


@pytest.mark.parametrize("clip", [True, False])
@example(Nested, "a leaf", None, 1)
@example(Nested, "a leaf", 0, 1)
@example(Hidden, "a leaf", None, 1)
@given(
    st.sampled_from([Leaf, Nested, Hidden]),
    st.sampled_from(sorted(TERMS)),
    st.sampled_from([None, 0, 2, 3]),
    st.integers(0, 2),
)
@settings(max_examples=examples(5), deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])
def test_a_term_that_begins_later_has_its_gradient(clip, layer, term, at, begins):
    with short_searches():
        losses, weights, optimizer = trained(functools.partial(prepared, clip=clip), layer, term, at, begins=begins)
    places = {unit.is_resident for unit in optimizer.session.runtime.state.units.values()}
    optimizer.session.close()
    expected, in_memory, _ = trained(lambda *given: given, layer, term, at, begins=begins)
    assert False in places or not begins  # some weights move
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    for name, values in in_memory.items():
        torch.testing.assert_close(weights[name], values, rtol=1e-5, atol=1e-5, msg=name)


def test_what_no_hook_sees_is_refused_instead_of_wrong(monkeypatch):
    monkeypatch.setattr(IterationDriver, "watch", lambda *_: None)
    with short_searches(), contextlib.ExitStack() as closing:

        def prepare(*given):
            model, optimizer = prepared(*given, clip=True)
            closing.callback(optimizer.session.close)
            return model, optimizer

        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            trained(prepare, Hidden, "a leaf", None, begins=1)
