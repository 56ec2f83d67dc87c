"""``ullage.prepare(..., step=function)``: steps that call the model several times, or parts of it, are planned."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ullage
from hwprofiles.registry import load_profile
from ullage.this_machine import planning

WIDTH = 32
Step = Callable[[Any, Any], torch.Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(torch.relu(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, WIDTH), nn.Linear(WIDTH, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.kept: list[Any] | None = None

    def encode(self, x: torch.Tensor, num: int = 5) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks[:num]:
            x = block(x)
        return x

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for given, made in self.kept or ():
            if given is x:
                return made  # type: ignore[no-any-return]
        scores = self.last(self.encode(x))
        made = {"scores": scores, "loss": scores.square().mean()}
        if self.kept is not None:
            self.kept.append((x, made))
        return made


def three(model: Any, batch: Any) -> torch.Tensor:
    one, two, three = (model(x)["scores"] for x in (batch["x"], batch["x"], batch["y"]))
    return (one - two).square().mean() + nn.functional.relu(one.mean() - three.square().mean() + 1)


def losses(model: Any, batch: Any) -> torch.Tensor:
    one, two = model(batch["x"])["loss"], model(batch["y"])["loss"]
    return one + 2 * two


def encoded(model: Any, batch: Any) -> torch.Tensor:
    one, two = nn.functional.normalize(model.encode(batch["x"])), nn.functional.normalize(model.encode(batch["y"], 3))
    return nn.functional.cross_entropy(one @ two.t() / 0.1, torch.arange(len(one), device=one.device))


def reference_behind(model: Any, batch: Any) -> torch.Tensor:
    scores = model(batch["x"])["scores"]
    with torch.no_grad():
        reference = model(batch["y"])["scores"]
    return (scores - reference).square().mean()


def reference_before(model: Any, batch: Any) -> torch.Tensor:
    with torch.no_grad():
        reference = model(batch["y"])["scores"]
    return (model(batch["x"])["scores"] - reference).square().mean()


def mixed(model: Any, batch: Any) -> torch.Tensor:
    loss = (
        model(batch["x"])["loss"] + model.last(model.encode(batch["y"])).abs().mean() + model.first(batch["x"]).mean()
    )
    return loss * torch.tensor(batch["weights"]).sum()


def remembered(model: Any, batch: Any) -> torch.Tensor:
    """The second call with the same tensor returns what the first one has kept."""
    model.kept = []
    one, two, again, more = (model(batch[key])["scores"] for key in ("x", "y", "x", "y"))
    model.kept = None
    return (one * again - two.sigmoid() * more).square().mean()


TEACHER = nn.Embedding(30_000, 4)


def taught(model: Any, batch: Any) -> torch.Tensor:
    """Another model, of more weights than the device has memory."""
    with torch.no_grad():
        wanted = TEACHER(torch.arange(len(batch["x"])))
    return (model(batch["x"])["scores"] - wanted).square().mean()


def once(model: Any, batch: Any) -> torch.Tensor:
    return model(batch["x"])["scores"].sigmoid().mean()


STEPS: dict[str, Step] = {
    s.__name__: s for s in (three, losses, encoded, reference_behind, reference_before, mixed, remembered, taught, once)
}


MEMORY = dict.fromkeys(["three", "losses", "mixed", "remembered"], 250_000) | {"taught": 150_000}  # bytes


def batch_of(size: int = 48) -> dict[str, Any]:
    return {"x": torch.randn(size, 16), "y": torch.randn(size, 16), "weights": [0.5, 1.0]}


def run(
    model: nn.Module, optimizer: torch.optim.Optimizer, step: Step, batches: list[Any], accumulate: int
) -> list[float]:
    torch.manual_seed(3)
    found = []
    for number, batch in enumerate(batches, 1):
        loss = step(model, batch) / accumulate
        loss.backward()
        found.append(loss.item())
        if number % accumulate == 0:
            nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return found


def prepared(model: Net, step: Step | None, batch: Any, device_memory: int = 250_000, **options: Any) -> Any:
    optimizer, machine = torch.optim.AdamW(model.parameters(), lr=1e-2), load_profile("epyc-turin-2c")
    return ullage.prepare(model, optimizer, batch, step=step, hardware=machine, device_memory=device_memory, **options)


@pytest.fixture(autouse=True)
def _short_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "MOST_SIMULATIONS", 30)


@pytest.mark.part(3)
@pytest.mark.parametrize(("name", "accumulate"), [(name, 1 + number % 2) for number, name in enumerate(STEPS)])
def test_a_step_of_several_calls_follows_its_plan_and_trains_as_in_memory(name: str, accumulate: int) -> None:
    torch.manual_seed(0)
    model, log = Net(), list[float]()

    def step(model: Any, batch: Any) -> torch.Tensor:
        loss = STEPS[name](model, batch)
        log.append(loss.item())
        return loss

    batches = [batch_of() for _ in range(6)]
    alone = copy.deepcopy(model)
    expected = run(alone, torch.optim.AdamW(alone.parameters(), lr=1e-2), STEPS[name], batches, accumulate)
    model, optimizer = prepared(model, step, batches[0], MEMORY.get(name, 220_000), num_micro_batches=accumulate)
    assert not log
    plan = optimizer.plan
    assert any(unit.params == "host" for unit in plan.decisions.units.values())
    assert any(unit.activations != "keep" for unit in plan.decisions.units.values())
    with optimizer.session as session:
        found = run(model, optimizer, step, batches, accumulate)
        assert session.num_left == 0
        assert session.audit.result is not None
        assert session.audit.result.kinds
        assert not session.audit.result.left_out
    assert found == pytest.approx(expected, rel=1e-5)
    for key, weight in alone.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["encoded", "reference_before"])
def test_other_steps_than_the_planned_one_train_as_in_memory(name: str) -> None:
    torch.manual_seed(0)
    model, batches = Net(), [batch_of() for _ in range(5)]
    steps = [STEPS[each] for each in (name, "losses", name, "reference_behind", name)]
    alone = copy.deepcopy(model)
    model, optimizer = prepared(model, steps[0], batches[0])
    theirs = torch.optim.AdamW(alone.parameters(), lr=1e-2)
    with optimizer.session as session:
        for step, batch in zip(steps, batches, strict=True):
            torch.manual_seed(3)
            expected = run(alone, theirs, step, [batch], 1)
            model.eval()
            with torch.no_grad():
                model(batch["y"][:3])  # evaluations are no part of it
            model.train()
            assert run(model, optimizer, step, [batch], 1) == pytest.approx(expected, rel=1e-5)
        assert session.num_left == 2
    for key, weight in alone.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("step", "options", "message"),
    [
        (three, {"compile_blocks": True}, "compile_blocks is True, but the planned step calls the model several times"),
        (
            lambda _model, batch: batch["x"].requires_grad_().mean(),
            {},
            "the step calls neither the model nor a part of",
        ),
        (lambda model, batch: model(batch["x"])["scores"].detach(), {}, "no tensor with a gradient"),
        (lambda model, batch: model(batch["z"]), {}, "KeyError: 'z'; make it run with these inputs first"),
    ],
)
def test_steps_that_cannot_be_planned_are_refused_in_one_line(step: Step, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        prepared(Net(), step, batch_of(), **options)
    assert "\n" not in str(refused.value)
