"""``ullage.prepare`` with models that are called with more than tensors, or whose shapes depend on values."""

import copy
import re
from collections.abc import Callable

import pytest
import torch
from torch import nn

import ullage
from hwprofiles.registry import load_profile

IMAGE = 9  # the token in whose place the images go
WIDTH = 32


class Seeing(nn.Module):
    """Puts images in the place of tokens, as LLaVA does, and scales its scores at the end, as CLIP does."""

    def __init__(self, *, scales: bool = False) -> None:
        super().__init__()
        self.tokens, self.sight = nn.Embedding(10, WIDTH), nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, WIDTH)) for _ in "ab")
        self.head = nn.Linear(WIDTH, 10)
        self.scale = nn.Parameter(torch.tensor(2.0)) if scales else 1.0

    def forward(self, ids, images, with_loss=False, mask=None):
        assert mask is None
        x = self.tokens(ids)
        x = x.index_put((ids == IMAGE,), self.sight(images).flatten(0, 1))
        for block in self.blocks:
            x = x + block(x)
        scores = self.head(x) * self.scale
        return nn.functional.cross_entropy(scores.flatten(0, 1), ids.flatten()) if with_loss else scores


def batch() -> dict[str, object]:
    ids = torch.randint(IMAGE, (4, 6))
    ids[:, 1:3] = IMAGE
    return {"ids": ids, "images": torch.randn(4, 2, 8), "with_loss": True, "mask": None}


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    torch.manual_seed(1)
    losses = []
    for _ in range(3):
        loss = model(**batch())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("scales", [False, True])
def test_values_arguments_and_a_weight_beside_the_modules_train_as_in_memory(scales: bool) -> None:
    torch.manual_seed(0)
    model = Seeing(scales=scales)
    alone = copy.deepcopy(model)
    expected = train(alone, torch.optim.AdamW(alone.parameters(), lr=1e-2))
    machine = load_profile("epyc-turin-2c")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = ullage.prepare(model, optimizer, batch(), hardware=machine, device_memory=68_000)
    assert any(unit.params == "host" for unit in optimizer.plan.decisions.units.values())
    with optimizer.session:
        assert train(model, optimizer) == pytest.approx(expected, rel=1e-5)
    for name, weight in alone.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], weight, rtol=1e-4, atol=1e-5)


def test_a_weight_that_only_the_models_own_forward_reads_trains_without_a_loss_in_the_model() -> None:
    """Backward begins at what the model returns, which a hook sees."""
    inputs = {name: values for name, values in batch().items() if name in {"ids", "images"}}
    found: list[dict[str, torch.Tensor]] = []
    for prepares in (False, True):
        torch.manual_seed(0)
        model: nn.Module = Seeing(scales=True)
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        if prepares:
            machine = load_profile("epyc-turin-2c")
            model, optimizer = ullage.prepare(model, optimizer, inputs, hardware=machine, device_memory=68_000)
        for _ in range(3):
            model(**inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append({name: values.clone() for name, values in model.state_dict().items()})
    assert optimizer.session.num_left == 0
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)


class Halves(nn.Module):
    """Two layers whose weights lie in one storage: slices beside each other, or one the transpose of the other."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        flat = torch.randn(2 * WIDTH, 2 * WIDTH) / 8
        one, other = (flat[:, :WIDTH], flat[:, WIDTH:]) if how == "columns" else flat.split(WIDTH)[0].chunk(2, dim=1)
        if how == "rows":
            one, other = (part.view(WIDTH, WIDTH) for part in flat.flatten()[: 2 * WIDTH**2].chunk(2))
        self.encode.weight = nn.Parameter(one[:WIDTH])
        self.decode.weight = nn.Parameter(one[:WIDTH].t() if how == "transposed" else other[:WIDTH])
        if how == "buffer":
            self.register_buffer("kept", self.encode.weight.data[:1])

    def forward(self, x):
        return ((self.decode(torch.tanh(self.encode(x))) - x) ** 2).mean()


def steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    torch.manual_seed(1)
    losses = []
    for _ in range(3):
        loss = model(torch.randn(8, WIDTH))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("how", ["rows", "columns"])
def test_slices_of_one_storage_train_as_in_memory(how: str) -> None:
    made = []
    for _ in "ab":
        torch.manual_seed(0)
        made.append(Halves(how))
    alone, model = made
    expected = steps(alone, torch.optim.SGD(alone.parameters(), lr=1.0))
    model, optimizer = ullage.prepare(
        model, torch.optim.SGD(model.parameters(), lr=1.0), torch.randn(8, WIDTH), hardware="epyc-turin-2c", clip=False
    )
    with optimizer.session:
        assert steps(model, optimizer) == expected


@pytest.mark.parametrize(("how", "other"), [("transposed", "parameter decode.weight"), ("buffer", "buffer kept")])
def test_memory_that_two_tensors_share_is_refused_before_anything_is_measured(how: str, other: str) -> None:
    model = Halves(how)
    with pytest.raises(ValueError, match=rf"parameter encode.weight and {other} share memory.*\.clone\(\)"):
        ullage.prepare(model, torch.optim.SGD(model.parameters()), torch.randn(8, WIDTH), hardware="none")
    with pytest.raises(ullage.CaptureError, match="share memory"):
        ullage.capture_module(lambda: Halves(how), [f"8x{WIDTH}"], dtype="fp32")


class Branching(nn.Module):
    """Has a tower that only some batches use, and a copy of its head over the weight of the embedding, never used."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.before = nn.Embedding(10, WIDTH), nn.Linear(WIDTH, 10, bias=False)
        self.before.weight = self.tokens.weight
        self.tower = nn.Sequential(nn.Linear(WIDTH, 256), nn.ReLU(), nn.Linear(256, 128))
        self.up, self.down, self.head = nn.Linear(WIDTH, 256), nn.Linear(256, 128), nn.Linear(128, 10)

    def forward(self, ids, image=None):
        x = self.down(torch.relu(self.up(self.tokens(ids))))
        if image is not None:
            x = x + self.tower(image)[:, None]
        scores = self.head(torch.relu(x))
        return nn.functional.cross_entropy(scores.flatten(0, 1), ids.flatten())


def branching(inputs, **settings) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Branching()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return ullage.prepare(model, optimizer, inputs, hardware="epyc-turin-2c", **settings)


IDS = {"ids": torch.arange(24).reshape(4, 6) % 10}
BOTH = IDS | {"image": torch.ones(4, WIDTH)}


def trained_beside(planned, step: Callable[[nn.Module], list[float]], **settings) -> int:
    """Train as planned and in memory, and compare; return how many iterations left the plan."""
    torch.manual_seed(0)
    alone = Branching()
    plain = torch.optim.AdamW(alone.parameters(), lr=1e-2)
    model, optimizer = branching(planned, **settings)
    with optimizer.session as session:
        for _ in range(3):
            losses = []
            for each, steps_of in ((alone, plain), (model, optimizer)):
                losses.append(step(each))
                nn.utils.clip_grad_norm_(each.parameters(), 1.0)
                steps_of.step()
                steps_of.zero_grad()
            assert losses[0] == pytest.approx(losses[1], rel=1e-5)
        return session.num_left


@pytest.mark.parametrize("device_memory", ["1GB", 900_000])
@pytest.mark.parametrize(("planned", "called", "num_left"), [(BOTH, IDS, 0), (IDS, BOTH, 3)], ids=["left out", "more"])
def test_another_branch_than_the_planned_one_trains_as_in_memory(planned, called, num_left, device_memory) -> None:
    def step(model: nn.Module) -> list[float]:
        loss = model(**called)
        loss.backward()
        return [loss.item()]

    assert trained_beside(planned, step, device_memory=device_memory) == num_left


def test_a_tied_module_that_never_runs_has_its_weights_when_it_is_evaluated() -> None:
    """As the head that peft keeps beside the one that it trains."""
    torch.manual_seed(0)
    alone = Branching()
    plain = torch.optim.AdamW(alone.parameters(), lr=1e-2)
    model, optimizer = branching(IDS, device_memory=700_000)
    assert any(unit.params == "host" for unit in optimizer.plan.decisions.units.values())
    with optimizer.session:
        for _ in range(2):
            losses = []
            for each, steps_of in ((alone, plain), (model, optimizer)):
                loss = each(**IDS)
                loss.backward()
                nn.utils.clip_grad_norm_(each.parameters(), 1.0)
                steps_of.step()
                steps_of.zero_grad()
                losses.append(loss.item())
            assert losses[0] == pytest.approx(losses[1], rel=1e-6)
        x = torch.randn(3, WIDTH)
        model.eval()
        with torch.no_grad():
            torch.testing.assert_close(model.before(x), alone.before(x))


def test_a_second_backward_trains_as_in_memory() -> None:
    def step(model: nn.Module) -> list[float]:
        loss = model(**IDS)
        loss.backward(retain_graph=True)
        (0.5 * loss).backward()
        return [loss.item()]

    assert trained_beside(IDS, step) == 3


def test_a_closure_runs_forward_and_backward_in_the_step() -> None:
    torch.manual_seed(0)
    alone = Branching()
    plain = torch.optim.AdamW(alone.parameters(), lr=1e-2)
    model, optimizer = branching(IDS)
    with optimizer.session as session, torch.no_grad():
        for _ in range(3):
            losses = []
            for each, steps_of in ((alone, plain), (model, optimizer)):

                def closure(each=each, steps_of=steps_of):
                    steps_of.zero_grad()
                    loss = each(**IDS)
                    loss.backward()
                    return loss

                losses.append(steps_of.step(closure).item())
            assert losses[0] == pytest.approx(losses[1], rel=1e-5)
        assert session.num_left == 0


def with_penalty(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    at = x.clone().requires_grad_()
    loss = model(at).square().mean()
    (gradient,) = torch.autograd.grad(loss, at, create_graph=True)
    return loss + gradient.square().sum()


@pytest.mark.parametrize("memory", [None, "53kB"])
@pytest.mark.parametrize(
    ("when", "planned"), [("in the loss", False), ("in backward", False), ("afterwards", False), ("afterwards", True)]
)
def test_gradients_of_gradients_that_no_plan_knows_train_as_in_memory(
    when: str, planned: bool, memory: str | None
) -> None:
    trained = []
    x = torch.randn(8, 16)
    for prepares in (False, True):
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(
            nn.Linear(16, 64),
            nn.Tanh(),
            *(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3)),
            nn.Linear(64, 8),
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if prepares:
            options = {"hardware": load_profile("epyc-turin-2c"), "step": with_penalty if planned else None}
            options["device_memory"] = None if planned else memory
            model, optimizer = ullage.prepare(model, optimizer, x if planned else (x,), **options)
        for _ in range(3):
            penalised = planned or when == "in the loss"
            loss = with_penalty(model, x) if penalised else model(x).square().mean()
            if when == "in the loss":  # whose graph is not behind the penalty's
                loss = model(0.5 * x).square().mean() + with_penalty(model, x)
            loss.backward(create_graph=when == "in backward", retain_graph=True)
            if when == "in backward":  # as optimizers of second order do
                with_penalty(model, x).backward()
                at = x.clone().requires_grad_()
                torch.autograd.grad(model(at).sum(), at, create_graph=True)[0].square().sum().backward()
            elif when == "afterwards":  # as GradNorm does, to weigh tasks
                torch.autograd.grad(loss, model[-1].weight, create_graph=True)
            optimizer.step()
            optimizer.zero_grad()
        trained.append({name: weight.clone() for name, weight in model.state_dict().items()})
        if prepares:
            assert optimizer.session.num_left == 3
            optimizer.session.close()
    for name, weight in trained[0].items():
        torch.testing.assert_close(trained[1][name], weight, rtol=1e-4, atol=1e-5)


def test_a_plan_that_does_not_fit_speaks_of_the_arguments_of_prepare() -> None:
    with pytest.raises(ullage.InfeasibleError) as refused:
        branching(IDS, device_memory="1kB")
    assert "--" not in str(refused.value)
    found = re.search(r"a larger device_memory='([\d.]+[kM]B)'", str(refused.value))
    assert found is not None
    branching(IDS, device_memory=found[1])[1].session.close()


def test_anomaly_mode_stays_on_through_a_capture() -> None:
    with pytest.warns(UserWarning, match="Anomaly Detection"), torch.autograd.detect_anomaly():
        model, optimizer = branching(IDS)
        with optimizer.session:
            model(**IDS).backward()
            optimizer.step()
            assert torch.is_anomaly_enabled()


def test_a_models_own_no_sync_stays() -> None:
    class Own(Seeing):
        def no_sync(self) -> str:
            return "its own"

    model = Own()
    given = batch()
    model, optimizer = ullage.prepare(model, torch.optim.AdamW(model.parameters()), given, hardware="epyc-turin-2c")
    with optimizer.session:
        assert model.no_sync() == "its own"


class Modulated(nn.Module):
    """A block that reads a table of its own before its modules, as those of diffusers' PixArt and Wan do."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(2, WIDTH))
        self.first, self.second = (
            nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, WIDTH)) for _ in range(2)
        )

    def forward(self, x):
        first, second = (self.table + 1.0).chunk(2)  # so that backward reads no table
        return (y := x + first * self.first(x)) + second * self.second(y)


class WithTables(nn.Module):
    """Reads a table of its own behind the last block, before its head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 8)
        self.blocks = nn.ModuleList(Modulated() for _ in range(3))
        self.table = nn.Parameter(torch.randn(2, WIDTH))

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        shift, scale = (self.table + 1.0).chunk(2)
        return self.head(x * (1 + scale) + shift).square().mean()


def test_a_table_behind_blocks_that_have_tables_follows_the_plan() -> None:
    torch.manual_seed(0)
    model, batches = WithTables(), [torch.randn(4, 8) for _ in range(3)]
    plain = copy.deepcopy(model)
    optimizer, expected = (torch.optim.SGD(each.parameters(), lr=1e-2) for each in (model, plain))
    model, optimizer = ullage.prepare(model, optimizer, (batches[0],), hardware="epyc-turin-2c")
    with optimizer.session as session:
        for (trained, steps), x in ((pair, x) for x in batches for pair in ((model, optimizer), (plain, expected))):
            trained(x).backward()
            steps.step()
            steps.zero_grad()
        assert session.num_left == 0
        for name, values in plain.state_dict().items():
            torch.testing.assert_close(session.full_parameters()[name], values, rtol=1e-5, atol=1e-6)
