"""What shares memory with parameters goes on to do so: other models' parameters, state dicts, aliases."""

import copy
import functools
import io
import re

import pytest
import torch
from amount import short_searches
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import ullage
from executor.module.guards import sharing_memory

WIDTH = 64


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4))


def batch(step: int) -> torch.Tensor:
    return torch.randn(16, 8, generator=torch.Generator().manual_seed(step))


def prepared(model, optimizer, **options):
    """Prepare a model for the least memory that a plan fits, so that its weights move."""
    plan = functools.partial(ullage.prepare, model, optimizer, (batch(0),), hardware="epyc-turin-2c", **options)
    with short_searches():
        with pytest.raises(ullage.InfeasibleError) as error:
            plan(device_memory=1000)
        return plan(device_memory=re.search(r"larger device_memory='([^']+)'", str(error.value))[1])


def train(model, optimizer, step: int) -> None:
    model(batch(step)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def of_another(weight: nn.Parameter) -> nn.Module:
    other = nn.Linear(WIDTH, WIDTH)
    other.weight = nn.Parameter(weight.data)
    return other


def with_data(weight: nn.Parameter) -> nn.Module:
    other = nn.Linear(WIDTH, WIDTH)
    other.weight.data = weight.data
    return other


WAYS = {
    "a parameter of its data": lambda model: of_another(model[2].weight).weight,
    "data of a parameter": lambda model: with_data(model[2].weight).weight,
    "data": lambda model: model[2].weight.data,
    "detached": lambda model: model[2].weight.detach(),
    "a state dict": lambda model: model.state_dict()["2.weight"],
}
LATER_APART = ("data of a parameter",)


@pytest.mark.part(3)
@pytest.mark.parametrize(
    ("way", "is_early"),
    # Later, a tensor that gets `data` takes the memory itself, and asks no class.
    [(way, is_early) for way in WAYS for is_early in (True, False) if is_early or way not in LATER_APART],
)
def test_what_shares_memory_follows_the_weights_and_changes_them(way: str, is_early: bool) -> None:
    def seen(prepare) -> list[torch.Tensor]:
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
        shared = WAYS[way](model) if is_early else None
        model, optimizer = prepare(model, optimizer)
        shared = shared if is_early else WAYS[way](model)
        found = []
        for step in range(2):
            train(model, optimizer, step)
            found.append(shared.detach().clone())
        with torch.no_grad():
            shared.mul_(0.5)
        found.append(model[2].weight.detach().clone())
        train(model, optimizer, 2)
        found += [copy.deepcopy(shared).detach(), *pickled(shared)]
        if way in ("data", "detached"):
            copied = copy.copy(shared)
            train(model, optimizer, 4)
            found.append(copied.clone())
        if hasattr(optimizer, "session"):
            optimizer.session.close()
        found.append(shared.detach().clone())
        train(model, torch.optim.SGD(model.parameters(), lr=1e-2), 3)
        assert type(shared) is (nn.Parameter if "parameter" in way else torch.Tensor)
        return [*found, shared.detach()]

    for ours, expected in zip(seen(prepared), seen(lambda *given: given), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


def pickled(tensor: torch.Tensor) -> list[torch.Tensor]:
    file = io.BytesIO()
    torch.save({"it": tensor}, file)
    file.seek(0)
    return [torch.load(file)["it"].detach()]


@pytest.mark.parametrize("is_early", [True, False], ids=["before prepare", "after prepare"])
def test_a_parameter_over_the_same_memory_has_a_gradient_of_its_own(is_early: bool) -> None:
    def seen(prepare) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
        other = of_another(model[2].weight) if is_early else None
        model, optimizer = prepare(model, optimizer)
        train(model, optimizer, 0)
        other = other if is_early else of_another(model[2].weight)
        other(torch.ones(2, WIDTH)).square().mean().backward()
        assert model[2].weight.grad is None
        gradient = other.weight.grad.clone()
        torch.optim.SGD(other.parameters(), lr=1e-2).step()  # of both models' weight
        found = gradient, other.weight.detach().clone(), model[2].weight.detach().clone()
        if hasattr(optimizer, "session"):
            optimizer.session.close()
        return found

    ours, expected = seen(prepared), seen(lambda *given: given)
    for value, wanted in zip(ours, expected, strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-5, atol=1e-6)


def test_a_row_that_was_taken_before_is_refused_once_weights_have_changed_and_follows_again_after_the_session() -> None:
    model = make()
    row = model[2].weight.data[3]
    model, optimizer = prepared(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    assert torch.equal(row.clone(), make()[2].weight[3])
    train(model, optimizer, 0)
    with pytest.raises(ValueError, match=re.escape("a view of 2.weight was taken before")):
        row.sum()
    optimizer.session.close()
    assert torch.equal(row, model[2].weight[3])


def test_a_tensor_with_the_memory_of_several_parameters_is_told_of(capsys: pytest.CaptureFixture[str]) -> None:
    model = make()
    vector = parameters_to_vector(model.parameters())
    vector_to_parameters(vector, model.parameters())
    model, optimizer = prepared(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    assert "1 tensors that this process holds share memory with parameters, as with 0.weight" in capsys.readouterr().err
    optimizer.session.close()


def test_the_model_of_what_shares_memory_is_not_prepared_too() -> None:
    model = make()
    other = of_another(model[2].weight)
    model, optimizer = prepared(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    with optimizer.session, pytest.raises(ValueError, match="weight of the model is also that of a model"):
        ullage.prepare(other, torch.optim.AdamW(other.parameters()), (torch.ones(2, WIDTH),), hardware="epyc-turin-2c")


def llama() -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=100, **sizes))


def loaded(tmp_path, **options):
    llama().save_pretrained(tmp_path)
    return [AutoModelForCausalLM.from_pretrained(tmp_path, **options)]


def assigned(_tmp_path):
    model = llama()
    model.load_state_dict({name: values.clone() for name, values in llama().state_dict().items()}, assign=True)
    return [model]


def copied(_tmp_path):
    model, states = llama(), llama().state_dict()
    model.load_state_dict(states)
    return [model, copy.deepcopy(model), torch.optim.swa_utils.AveragedModel(model), states]


def trained(_tmp_path):
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters())
    loss = model(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss
    loss.backward()
    optimizer.step()
    return [model, loss, optimizer]


def awaiting_backward(_tmp_path):
    model = llama()
    return [model, model(input_ids=torch.arange(8)[None]).logits]


PLAIN = {
    "loaded": loaded,
    "loaded in bf16": functools.partial(loaded, dtype=torch.bfloat16),
    "assigned": assigned,
    "copied": copied,
    "trained": trained,
    "awaiting backward": awaiting_backward,
    "flat weights": lambda _: [nn.LSTM(8, 16, 2)],
    "frozen": lambda _: [(model := llama().requires_grad_(False)), model.state_dict()],
}


@pytest.mark.parametrize("way", PLAIN)
def test_where_nothing_else_holds_the_memory_nothing_is_found(way: str, tmp_path) -> None:
    model, *_held = PLAIN[way](tmp_path)
    assert not list(sharing_memory(model, ()))
