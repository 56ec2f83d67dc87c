"""``ullage.prepare(..., step=function)``: steps of several calls, or with gradients of gradients, are planned."""

import copy
import itertools
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ullage
from hwprofiles.registry import load_profile
from planner.decisions import Place
from planner.plan.planning import Request, make_plan
from planner.verification import verify
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


with torch.random.fork_rng():
    torch.manual_seed(0)  # some teachers leave a gradient near zero, which AdamW makes a step of
    TEACHER = nn.Embedding(30_000, 4)


def taught(model: Any, batch: Any) -> torch.Tensor:
    """Another model, of more weights than the device has memory."""
    with torch.no_grad():
        wanted = TEACHER(torch.arange(len(batch["x"])))
    return (model(batch["x"])["scores"] - wanted).square().mean()


def once(model: Any, batch: Any) -> torch.Tensor:
    return model(batch["x"])["scores"].sigmoid().mean()


def head_in_the_loss(model: Any, batch: Any) -> torch.Tensor:
    """The loss computes what the head does, as losses do that never have all logits."""
    hidden, head = model.encode(batch["x"]), model.last
    return torch.stack([(part @ head.weight.t() + head.bias).square().mean() for part in hidden.chunk(2)]).mean()


STEPS: dict[str, Step] = {
    step.__name__: step
    for step in (
        *(three, losses, encoded, taught, reference_before, mixed, remembered, reference_behind, once),
        head_in_the_loss,
    )
}


MEMORY = dict.fromkeys(["three", "losses", "mixed", "remembered"], 250_000) | {"taught": 150_000}  # bytes


def batch_of(size: int = 48) -> dict[str, Any]:
    return {"x": torch.randn(size, 16), "y": torch.randn(size, 16), "weights": [0.5, 1.0]}


def run(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: Step,
    batches: list[Any],
    accumulate: int,
    *,
    clip: bool = True,
) -> list[float]:
    torch.manual_seed(3)
    found = []
    for number, batch in enumerate(batches, 1):
        loss = step(model, batch) / accumulate
        loss.backward()
        found.append(loss.item())
        if number % accumulate == 0:
            if clip:
                nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return found


def prepared(
    model: nn.Module, step: Step | None, batch: Any, device_memory: int | str = 250_000, **options: Any
) -> Any:
    optimizer, machine = torch.optim.AdamW(model.parameters(), lr=1e-2), load_profile("epyc-turin-2c")
    return ullage.prepare(model, optimizer, batch, step=step, hardware=machine, device_memory=device_memory, **options)


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
        assert session.audit.result.left_out.keys() == ({"last"} if name == "head_in_the_loss" else set())
    assert found == pytest.approx(expected, rel=1e-5)
    for key, weight in alone.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], weight, rtol=1e-4, atol=1e-5)


KEPT = SimpleNamespace(count=0)


class Loop:
    """A loop whose step goes on with what earlier steps have left."""

    def __init__(self) -> None:
        self.count, self.losses, self.noise = 0, list[float](), torch.Generator().manual_seed(0)
        self.scales = itertools.cycle([1.0, 0.5, 2.0])

    def step(self, model: Any, batch: Any) -> torch.Tensor:
        self.count += 1
        x = batch["x"] + torch.randn(batch["x"].shape, generator=self.noise)
        loss = model(x)["loss"] * self.count * next(self.scales)
        self.losses.append(loss.item())
        return loss


def around_a_function() -> Step:
    data, draws = iter([batch_of()["x"] for _ in range(9)]), np.random.default_rng(0)
    return lambda model, _batch: model(next(data))["loss"] * draws.random()


def global_count(model: Any, batch: Any) -> torch.Tensor:
    KEPT.count += 1
    return model(batch["x"])["loss"] * KEPT.count


@pytest.mark.part(2)
@pytest.mark.parametrize("kind", ["object", "around a function", "global"])
def test_what_a_step_goes_on_with_is_not_used_up_by_the_plan(kind: str) -> None:
    """Counters, generators and iterators, of an object, around a function, and global ones."""
    found = []
    for prepares in (False, True):
        KEPT.count = 0
        torch.manual_seed(0)
        step: Step = {"object": Loop().step, "around a function": around_a_function(), "global": global_count}[kind]
        model, batches = Net(), [batch_of() for _ in range(3)]
        model, optimizer = (
            prepared(model, step, batches[0]) if prepares else (model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        )
        found.append(run(model, optimizer, step, batches, 1))
    assert optimizer.session.num_left == 0
    optimizer.session.close()
    assert found[1] == pytest.approx(found[0], rel=1e-5)


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


@pytest.mark.part(2)
@pytest.mark.parametrize(
    ("step", "options", "message"),
    [
        (three, {"compile_blocks": True}, "compile_blocks is True, but the planned step calls the model several times"),
        (
            lambda model, batch: penalty(lambda x: model(x)["scores"], batch["x"]),
            {"compile_blocks": True, "device_memory": 10**7},
            "compile_blocks is True, but the plan is for gradients of gradients",
        ),
        (
            lambda _model, batch: batch["x"].requires_grad_().mean(),
            {},
            "the step calls neither the model nor a part of",
        ),
        (lambda model, batch: model(batch["x"])["scores"].detach(), {}, "no tensor with a gradient"),
        (lambda model, batch: model(batch["z"]), {}, "KeyError: 'z'; make it run with this batch first, or leave"),
    ],
)
def test_steps_that_cannot_be_planned_are_refused_in_one_line(step: Step, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        prepared(Net(), step, batch_of(), **options)
    assert "\n" not in str(refused.value)


class Critic(nn.Module):
    """Gives a score, or the gradient of the score, as models of energies and forces do."""

    def __init__(self, *, forces: bool = False) -> None:
        super().__init__()
        self.forces, self.first, self.last = forces, nn.Linear(16, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 128), nn.Tanh(), nn.Linear(128, WIDTH)) for _ in range(6)
        )

    def score(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)  # type: ignore[no-any-return]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.forces:
            return self.score(x)
        with torch.enable_grad():
            at = x.clone().requires_grad_()
            (forces,) = torch.autograd.grad(self.score(at).sum(), at, create_graph=True)
        return (forces - x).square().mean()


def penalty(model: Any, x: torch.Tensor) -> torch.Tensor:
    at = (0.3 * x).requires_grad_()
    (gradient,) = torch.autograd.grad(model(at).sum(), at, create_graph=True)
    return (gradient.norm(dim=-1) - 1).square().mean()


def wasserstein(model: Any, batch: Any) -> torch.Tensor:
    return model(batch["y"]).mean() - model(batch["x"]).mean() + 10 * penalty(model, batch["x"])  # type: ignore[no-any-return]


def penalty_first(model: Any, batch: Any) -> torch.Tensor:
    return 10 * penalty(model, batch["x"]) + model(batch["y"]).mean() - model(batch["x"]).mean()  # type: ignore[no-any-return]


def at_the_data(model: Any, batch: Any) -> torch.Tensor:
    at = batch["x"].clone().requires_grad_()
    scores = model(at)
    (gradient,) = torch.autograd.grad(scores.sum(), at, create_graph=True)
    return nn.functional.softplus(scores).mean() + gradient.square().sum(-1).mean()  # type: ignore[no-any-return]


def penalty_alone(model: Any, batch: Any) -> torch.Tensor:
    """Backward reaches no output, and the last bias gets no gradient."""
    return penalty(model, batch["x"])


def of_second_order(model: Any, batch: Any) -> torch.Tensor:
    """Gradients of weights have a graph too, and are added to those that come later."""
    model(batch["y"]).square().mean().backward(create_graph=True)
    return penalty(model, batch["x"])


def least_memory(model: nn.Module, step: Step | None, batch: Any, **options: Any) -> str:
    with pytest.raises(ullage.InfeasibleError, match="gradients of gradients, for which all weights") as refused:
        prepared(model, step, batch, 1000, **options)
    assert "\n" not in str(refused.value)
    found = re.search(r"a larger device_memory='([\d.]+[kM]B)'", str(refused.value))
    assert found is not None
    return found[1]


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.part(15)
@pytest.mark.parametrize(("accumulate", "clip"), [(1, True), (2, True), (1, False), (2, False)])
@pytest.mark.parametrize("step", [wasserstein, penalty_first, at_the_data, penalty_alone, of_second_order])
def test_gradients_of_gradients_train_as_in_memory_in_the_memory_that_the_refusal_names(
    step: Step, accumulate: int, clip: bool
) -> None:
    torch.manual_seed(0)
    alone, batches = Critic(), [batch_of(16) for _ in range(6)]
    model, options = copy.deepcopy(alone), {"num_micro_batches": accumulate, "clip": clip}
    expected = run(alone, torch.optim.AdamW(alone.parameters(), lr=1e-2), step, batches, accumulate, clip=clip)
    memory = least_memory(model, step, batches[0], **options)
    model, optimizer = prepared(model, step, batches[0], memory, **options)
    decided = optimizer.plan.decisions.units.values()
    assert {(unit.params, unit.activations) for unit in decided} == {("gpu", "keep")}
    assert optimizer.plan.decisions.update_start == "step"  # gradients may come in another order
    assert {place for unit in decided for place in unit.update} - {Place.GPU}
    with optimizer.session as session:
        found = run(model, optimizer, step, batches, accumulate, clip=clip)
        assert session.num_left == (6 // accumulate if step is of_second_order else 0)
    assert torch._C._is_multithreading_enabled()  # as before
    assert found == pytest.approx(expected, rel=1e-5)
    for key, weight in alone.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], weight, rtol=1e-4, atol=1e-5)


def test_gradients_of_gradients_that_reach_no_module_in_backward_train_as_in_memory() -> None:
    torch.manual_seed(0)
    alone, batches = nn.Linear(16, 1), [batch_of(16) for _ in range(3)]
    model = copy.deepcopy(alone)
    expected = run(alone, torch.optim.AdamW(alone.parameters(), lr=1e-2), penalty_alone, batches, 1)
    model, optimizer = prepared(model, penalty_alone, batches[0])
    with optimizer.session as session:
        assert run(model, optimizer, penalty_alone, batches, 1) == pytest.approx(expected, rel=1e-5)
        assert session.num_left == 0


def test_gradients_of_gradients_in_forward_train_as_in_memory_also_between_evaluations() -> None:
    torch.manual_seed(0)
    alone, batches = Critic(forces=True), [torch.randn(16, 16) for _ in range(4)]
    model = copy.deepcopy(alone)
    model, optimizer = prepared(model, None, batches[0], least_memory(model, None, batches[0]))
    theirs = torch.optim.AdamW(alone.parameters(), lr=1e-2)
    with optimizer.session as session:
        for x in batches:
            losses = []
            for each, steps in ((alone, theirs), (model, optimizer)):
                losses.append(each(x))
                losses[-1].backward()
                steps.step()
                steps.zero_grad()
                each.eval()
                with torch.no_grad():
                    losses.append(each(x[:3]))
                each.train()
            assert [loss.item() for loss in losses[:2]] == pytest.approx([loss.item() for loss in losses[2:]], rel=1e-5)
        assert session.num_left == 0
    for key, weight in alone.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], weight, rtol=1e-4, atol=1e-5)


def test_ranks_share_the_state_and_not_the_weights_of_gradients_of_gradients() -> None:
    captured = planning.capture_live(Critic(), batch_of(), None, wasserstein)
    plan = make_plan(
        Request(captured, load_profile("a100x4-40g"), num_devices=4, seq_len=1, micro_batch=48, precision="fp32"), 10
    )
    assert plan.decisions.zero_stage in {1, 2}
    assert {proof.zero_stage for proof in plan.certificate.proofs} == {0, 1, 2}
    verify(plan)


@pytest.mark.parametrize("changes", [{"params": "host", "update": (Place.CPU,)}, {"activations": "recompute"}])
def test_a_plan_that_moves_what_gradients_of_gradients_need_is_refused(changes: dict[str, Any]) -> None:
    model, optimizer = prepared(Critic(), wasserstein, batch_of(), 10**7)
    optimizer.session.close()
    plan, name = optimizer.plan, "blocks.2.0"
    moved = plan.decisions.units | {name: plan.decisions.units[name].model_copy(update=changes)}
    changed = plan.model_copy(update={"decisions": plan.decisions.model_copy(update={"units": moved})})
    with pytest.raises(
        ValueError, match=rf"{name} (is planned to move, but gradients of gradients|cannot be recomputed)"
    ):
        ullage.prepare(model, torch.optim.AdamW(model.parameters()), changed)
