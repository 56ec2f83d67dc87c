"""Modules at the edge of what people write: they plan, train as in memory, and resume from checkpoints."""

import contextlib
import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import highspy
import pytest
import torch
from amount import examples
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import ullage
from executor.options import Options
from executor.prepare import prepare_session
from planner.choices.variants import variants
from planner.decisions import UnitDecision
from planner.plan.planning import make_plan
from planner.search import smallest
from planner.verification import verify

SLOW = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
PROFILE = "epyc-turin-2c"


class Block(nn.Module):
    def __init__(
        self, width: int, change: Callable[[nn.Linear], nn.Module] = lambda layer: layer, inner: int = 0
    ) -> None:
        super().__init__()
        inner = inner or 4 * width
        self.norm, self.up, self.down = nn.LayerNorm(width), change(nn.Linear(width, inner)), nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Hidden(nn.Module):
    """Returns the outputs of all layers, or a loss that multiplies by weights of all blocks behind the last module."""

    def __init__(self, *, reads: bool, width: int = 128, inner: tuple[int, ...] = (512,) * 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.reads, self.first, self.last = reads, nn.Linear(16, width), nn.Linear(width, 8)
        self.blocks = nn.ModuleList(Block(width, inner=number) for number in inner)

    def forward(self, x: torch.Tensor) -> object:
        hidden = [self.first(x)]
        for block in self.blocks:
            hidden.append(block(hidden[-1]))
        out, last = self.last(hidden[-1]), hidden[-1]
        if not self.reads:
            return {"hidden": hidden, "logits": out}
        for block in self.blocks:
            last = last + torch.tanh(last @ block.up.weight.t()) @ block.down.weight.t()
        return out.square().mean() + last.square().mean()


def request(make: Callable[[], nn.Module], width: int, num_bytes: int) -> ullage.Request:
    captured = ullage.capture_module(make, [f"8x{width}"], dtype="fp32", as_on_gpu=False)
    return ullage.Request(
        captured,
        ullage.load_profile(PROFILE).with_device_memory(num_bytes),
        precision="fp32",
        seq_len=captured.seq_len,
        micro_batch=captured.micro_batch,
    )


@pytest.mark.parametrize(("reads", "num_bytes"), [(False, 1_190_000), (True, 7_480_000)])
def test_units_that_compute_nothing_or_need_all_weights_are_planned(reads: bool, num_bytes: int) -> None:
    """What computes for no time holds memory all the same; weights that are needed at once are in different slots."""
    plan = make_plan(request(lambda: Hidden(reads=reads), 16, num_bytes), 120)
    verify(plan)
    assert plan.certificate.placement  # HiGHS agrees that the plan satisfies the conditions


@pytest.mark.parametrize("inner", [(64,) * 4, (64, 48, 64, 80)], ids=["equal", "different"])
def test_weights_that_are_needed_at_once_are_in_different_slots(inner: tuple[int, ...]) -> None:
    """Also if the ring of each size has a single slot: the model trains as in memory."""
    variant = variants(request(lambda: Hidden(reads=True, width=32, inner=inner), 16, 10_000_000))[0]
    check_trained(variant, "keep", lambda: Hidden(reads=True, width=32, inner=inner))


class InPlace(nn.Module):
    """A residual stream that blocks, or their caller, change in place."""

    def __init__(self, where: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.where, self.first, self.last = where, nn.Linear(16, 32), nn.Linear(32, 8)
        self.blocks = nn.ModuleList(Block(32) for _ in range(5))
        for block in self.blocks:
            block.forward = functools.partial(self.changed, block)
            block.down.bias = None  # its products have a version counter of their own

    def changed(self, block: Block, x: torch.Tensor) -> torch.Tensor | None:
        added = block.down(torch.relu(block.up(block.norm(x.clone()))))
        if self.where == "caller":
            return added
        if self.where == "product":
            added += x
            return added * added.tanh()
        x += added
        return x if self.where == "block" else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)[None]
        for block in self.blocks:
            added = block(x=x)
            if self.where == "caller":
                x += added
            elif self.where == "product":
                x = added
        return self.last(x).square().mean()


@pytest.mark.parametrize("activations", ["keep", "recompute", "offload"])
@pytest.mark.parametrize("where", ["block", "argument", "caller", "product"])
def test_what_is_changed_in_place_is_recomputed_from_what_it_was(where: str, activations: str) -> None:
    variant = variants(request(lambda: InPlace(where), 16, 10_000_000))[0]
    check_trained(variant, activations, lambda: InPlace(where), num_samples=4)  # so there is room for all products


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x)


def differentiated(x: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(x.tanh().sum(), x, create_graph=True)[0]


SHARED = nn.Dropout(0.1)
INSIDE: dict[str, Callable[[Callable[[torch.Tensor], torch.Tensor], torch.Tensor], torch.Tensor]] = {
    "a module that blocks and models share": lambda block, x: SHARED(block(SHARED(x))),
    "a scripted function": lambda block, x: scripted(block(x)),
    "vmap": lambda block, x: torch.vmap(block)(x),
    "a backward": lambda block, x: block(x) + differentiated(x),
}


class Inside(nn.Module):
    """Its blocks call something; the first layer's weight is read again behind them."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows, self.blocks = nn.Linear(16, 32), nn.ModuleList(Block(32) for _ in range(4))
        for block in self.blocks:
            block.inner = SHARED
            block.forward = functools.partial(INSIDE[name], block.forward)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.rows(x)
        for block in self.blocks:
            x = block(x)
        return nn.functional.linear(x, self.rows.weight.t())


@pytest.mark.parametrize("name", INSIDE)
def test_what_a_block_does_is_recomputed_or_kept(name: str) -> None:
    """Two models train at once, and have a module in common."""
    variant = variants(request(lambda: Inside(name), 16, 10_000_000))[0]
    kept = name == "a backward"  # it would begin the recomputation
    assert any(unit.can_swap for unit in variant.setup.units) != kept
    other = Inside(name)
    units, decisions = variant.setup.units, next(iter(smallest(variant.setup)))
    with prepare_session(other, torch.optim.AdamW(other.parameters()), units, decisions)[1].session:
        check_trained(variant, "keep" if kept else "recompute", lambda: Inside(name))


def check_trained(variant: Any, activations: str, make: Callable[[], nn.Module], num_samples: int = 8) -> None:
    """Check that a model trains as in memory with all weights on the host, and a single slot for each size."""
    decisions = next(iter(smallest(variant.setup))).model_copy(update={"num_param_slots": 1})
    away = {
        unit.name: UnitDecision(
            params="host",
            activations=activations if unit.can_swap else "keep",
            update=decisions.units[unit.name].update,
        )
        for unit in variant.setup.units
    }
    assert activations == "keep" or any(unit.can_swap for unit in variant.setup.units)
    decisions = decisions.model_copy(update={"units": away})
    found = []
    for prepares in (False, True):
        model = make()
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
        session: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if prepares:
            model, optimizer = prepare_session(model, optimizer, variant.setup.units, decisions, Options(audit="first"))
            session = optimizer.session
        with session:
            torch.manual_seed(1)
            for _ in range(3):
                output = model(torch.randn(num_samples, 16))
                (output.square().mean() if output.dim() else output).backward()
                optimizer.step()
                optimizer.zero_grad()
            if prepares:
                left_out = optimizer.session.audit.result.left_out
                assert optimizer.session.num_left == 0
                assert all("changes a view" in why for why in left_out.values())
            found.append({name: values.clone() for name, values in model.state_dict().items()})
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)


def as_buffer(layer: nn.Linear) -> nn.Module:
    weight = layer.weight.detach().clone()
    del layer.weight
    layer.register_buffer("weight", weight)
    return layer


class Counted(nn.Module):
    """A parametrization that counts how often it has run, as spectral norm goes on with what it has found."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return weight * (1 + 0.01 * self.count)


def counted(layer: nn.Linear, *, bias: bool = True) -> nn.Module:
    if not bias:
        layer.bias = None
    return parametrize.register_parametrization(layer, "weight", Counted())


MADE = {
    "weight norm": parametrizations.weight_norm,
    "counted": counted,
    "counted without bias": functools.partial(counted, bias=False),
    "pruned": lambda layer: prune.l1_unstructured(layer, "weight", amount=0.3),
    "buffer": as_buffer,
}


@pytest.mark.parametrize("way", MADE)
def test_linear_layers_without_a_weight_of_their_own_train(way: str) -> None:
    """With any memory: their units may have nothing to run again, but are recomputed with their block."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        blocks = [Block(64, MADE[way]) for _ in range(3)]
        return nn.Sequential(nn.Linear(16, 64), *blocks, MADE[way](nn.Linear(64, 256)), nn.Linear(256, 8))

    torch.manual_seed(1)
    batches = [torch.randn(64, 16) for _ in range(2)]
    plain = make()
    optimizer = torch.optim.SGD(plain.parameters(), lr=1e-2)
    for x in batches:
        plain(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    model = make()
    model, optimizer = ullage.prepare(
        model,
        torch.optim.SGD(model.parameters(), lr=1e-2),
        (batches[0],),
        hardware=PROFILE,
        device_memory="1.23MB",  # pruning has masks, which are copied before a block that is recomputed
    )
    with optimizer.session:
        for x in batches:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert optimizer.session.num_left == 0
        found = optimizer.session.full_parameters()
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(found[name], parameter.detach(), rtol=1e-5, atol=1e-6)


@settings(SLOW, max_examples=examples(3))
@given(st.integers(0, 10**6))
def test_whatever_the_search_proposes_is_accepted(seed: int) -> None:
    """Segments of captured modules are swapped as a whole or not at all; lowering refuses no proposal."""
    chosen = random.Random(seed)  # noqa: S311 - no secret
    ways = [lambda layer: layer, *MADE.values()]

    def block() -> nn.Module:
        inner = Block(32, chosen.choice(ways))
        return chosen.choice([inner, nn.Sequential(inner, nn.Linear(32, 32)), nn.Sequential(nn.Linear(32, 32))])

    made = nn.Sequential(*(block() for _ in range(4)), nn.Linear(32, 4))
    wanted = request(lambda: made, 32, 4 * sum(p.numel() for p in made.parameters()))
    for variant in variants(wanted):
        by_segment: dict[str, set[bool]] = {}
        for unit in variant.setup.units:
            by_segment.setdefault(unit.segment, set()).add(unit.can_swap)
        assert all(len(found) == 1 for found in by_segment.values())
    with contextlib.suppress(ullage.InfeasibleError):
        make_plan(wanted, 30)


SHAPES = st.sampled_from([(0,), (3, 0), (0, 3), (), (1,), (2, 1)])


class Odd(nn.Module):
    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        self.own = nn.ParameterList(nn.Parameter(torch.full(shape, 0.5)) for shape in shapes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for own in self.own:
            x = x + 0.1 * own.sum()
        return x


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    "adamw-8bit": lambda model: ullage.AdamW8bit(model.parameters(), lr=1e-2),
    "adamw-bf16": lambda model: ullage.AdamWBf16(model.parameters(), lr=1e-2),
    "lion": lambda model: ullage.Lion(model.parameters(), lr=1e-3),
    "muon": lambda model: ullage.Muon(model.named_parameters(), lr=1e-2),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.1),
}


@settings(SLOW, max_examples=examples(3))
@given(
    st.lists(st.lists(SHAPES, min_size=1, max_size=2), min_size=2, max_size=3),
    st.sampled_from(["adamw", "muon", "adamw-8bit", "sgd", "lion", "adagrad", "adamw-bf16"]),
    st.sampled_from(["8kB", "12kB", "30kB"]),
    st.sampled_from(["never", "nvme"]),
    st.booleans(),
)
@example([[(0,)], [(0,)]], "adamw", "8kB", "never", False)
def test_parameters_without_elements_or_dimensions(
    tmp_path_factory: pytest.TempPathFactory,
    shapes: list[list[tuple[int, ...]]],
    kind: str,
    memory: str,
    storage: str,
    other: bool,
) -> None:
    """They train as in memory, and a checkpoint that was made is resumed, also under another plan and optimizer."""
    torch.manual_seed(1)
    batches = [(torch.randn(8, 8), torch.randint(3, (8,))) for _ in range(3)]
    folder = tmp_path_factory.mktemp("odd")

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.odd = nn.ModuleList(map(Odd, shapes))
            self.empty, self.layers = nn.Linear(8, 0), nn.ModuleList(nn.Linear(8, 8) for _ in shapes)
            self.last = nn.Linear(8, 3)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            for odd, layer in zip(self.odd, self.layers, strict=True):
                x = odd(torch.tanh(layer(x)))
            return nn.functional.cross_entropy(self.last(torch.cat((x, self.empty(x)), -1)), y)

    def prepared(kind: str, memory: str) -> tuple[nn.Module, ullage.OffloadedOptimizer]:
        model = Net()
        nvme = {"storage": "nvme", "storage_dir": folder / "drive"} if storage == "nvme" else {}
        return ullage.prepare(
            model,
            OPTIMIZERS[kind](model),
            batches[0],
            hardware=PROFILE,
            device_memory=memory,
            checkpoint_buffer_bytes=1_000_000,
            **nvme,
        )

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[tuple[torch.Tensor, ...]]) -> None:
        for batch in batches:
            model(*batch).backward()
            optimizer.step()
            optimizer.zero_grad()

    plain = Net()
    train(plain, OPTIMIZERS[kind](plain), batches)
    tolerance = 2e-3 if kind in {"adamw-8bit", "adamw-bf16", "muon", "lion"} else 1e-5
    try:
        model, optimizer = prepared(kind, memory)
    except ullage.InfeasibleError:
        return
    with optimizer.session, ullage.Checkpoints(optimizer, ullage.Level(folder / "saved")) as checkpoints:
        train(model, optimizer, batches[:2])
        checkpoints.save(2)
        train(model, optimizer, batches[2:])
        checkpoints.finish()
        optimizer.state_dict()
        found = optimizer.session.full_parameters()
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(found[name], parameter.detach(), rtol=0, atol=tolerance)
    model, optimizer = prepared("adamw" if other and kind.startswith("adamw") else kind, "30kB" if other else memory)
    with optimizer.session, ullage.Checkpoints(optimizer, ullage.Level(folder / "saved")) as checkpoints:
        assert checkpoints.resume().step == 2
        train(model, optimizer, batches[2:])
        found = optimizer.session.full_parameters()
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(found[name], parameter.detach(), rtol=0, atol=1e-2 if other else tolerance)


@pytest.mark.parametrize("status", ["kUnknown", "kInfeasible", "kSolveError"])
def test_whatever_the_solver_says_there_is_a_plan_with_a_proof(status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = request(lambda: nn.Sequential(*(Block(32) for _ in range(4)), nn.Linear(32, 4)), 32, 260_000)
    monkeypatch.setattr(highspy.Highs, "getModelStatus", lambda _: getattr(highspy.HighsModelStatus, status))
    plan = make_plan(wanted, 40)
    assert 0 < plan.certificate.bound_s <= plan.prediction.iteration_s
    verify(plan)


class Written(nn.Module):
    """Its forward bounds the norms of an embedding, and the weights of a layer between blocks that may move."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.bounded = nn.Embedding(500, 32, max_norm=1.0), nn.Linear(32, 32)
        self.blocks, self.last = nn.ModuleList(Block(32) for _ in range(6)), nn.Linear(32, 8)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.bounded.weight.clamp_(-0.15, 0.15)
        x = self.bounded(self.words(words))
        for block in self.blocks:
            x = block(x)
        return self.last(x).square().mean()


class Spectral(nn.Module):
    """Multiplies in the frequencies, by complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.up = nn.Parameter(torch.randn(5, 32, 32, dtype=torch.complex64) / 8), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        modes = torch.einsum("bti,tio->bto", torch.fft.rfft(x, dim=1), self.weight)
        return x + torch.relu(self.up(torch.fft.irfft(modes, n=x.shape[1], dim=1)))


class Operator(nn.Module):
    """A Fourier neural operator over words."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.last = nn.Embedding(500, 32), nn.Linear(32, 8)
        self.blocks = nn.ModuleList(Spectral() for _ in range(6))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words)
        for block in self.blocks:
            x = block(x)
        return self.last(x).square().mean()


def test_complex_weights_are_not_cut_to_their_real_part_on_the_way_to_files(tmp_path: Path) -> None:
    model = Operator()
    weights = {name: weight for name, weight in model.state_dict().items() if not weight.is_complex()}
    save_file({**weights, "blocks.0.weight": torch.ones(5, 32, 32, 2)}, tmp_path / "model.safetensors")
    optimizer = ullage.prepare(model, torch.optim.SGD(model.parameters()), words_of(0), hardware=PROFILE)[1]
    with optimizer.session:
        with pytest.raises(ValueError, match=r"blocks\.0\.weight is complex, .*; save model\.state_dict\(\)"):
            ullage.save(optimizer, tmp_path / "saved")
        with pytest.raises(ValueError, match=r"blocks\.0\.weight is complex, and cannot be loaded under"):
            ullage.load(optimizer, tmp_path, strict=False)
        assert torch.equal(model.state_dict()["blocks.0.weight"], Operator().blocks[0].weight)


def words_of(step: int) -> torch.Tensor:
    return torch.randint(500, (4, 8), generator=torch.Generator().manual_seed(step))


def train_on_words(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, max_norm: float) -> list[float]:
    losses = []
    for step in steps:
        for part in (2 * step, 2 * step + 1):
            loss = model(words_of(part))
            if max_norm and step % 2:  # with a penalty on weights, off the plan
                loss = loss + 1e-3 * sum(weight.abs().square().sum() for weight in model.parameters())
            loss.backward()
            losses.append(loss.item())
        if max_norm:
            losses.append(float(nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.part(2)
@pytest.mark.parametrize("max_norm", [0.0, 0.02])
@pytest.mark.parametrize(("make", "memory"), [(Written, 1_050_000), (Operator, 1_100_000)])
def test_weights_that_forward_writes_to_and_complex_ones_train_as_in_memory(
    make: type[nn.Module], memory: int, max_norm: float
) -> None:
    """With accumulation, also after both have been saved; and on from there in memory."""

    def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.NAdam(model.parameters(), lr=0.02)  # whose step under a plan is its own

    def prepared(model: nn.Module) -> Any:
        options = {"hardware": PROFILE, "device_memory": memory, "num_micro_batches": 2}
        return ullage.prepare(model, optimizer_of(model), words_of(0), **options)[1]

    plain, model, again = make(), make(), make()
    theirs = optimizer_of(plain)
    expected = train_on_words(plain, theirs, range(6), max_norm)
    if isinstance(plain, Written):
        assert float(plain.bounded.weight.detach().abs().max()) > 0.15, "an update goes beyond the bound"
    with (ours := prepared(model)).session:
        assert any({*unit.update} - {"gpu"} for unit in ours.plan.decisions.units.values()), "others are elsewhere"
        seen = train_on_words(model, ours, range(2), max_norm)
        again.load_state_dict(model.state_dict())
        state = ours.state_dict()
    resumed = prepared(again)
    with resumed.session:
        resumed.load_state_dict(state)
        seen += train_on_words(again, resumed, range(2, 4), max_norm)
        state = resumed.state_dict()
    in_memory = optimizer_of(again)
    in_memory.load_state_dict(state)
    seen += train_on_words(again, in_memory, range(4, 6), max_norm)
    assert seen == (pytest.approx(expected, rel=1e-4) if max_norm else expected)
    for name, weight in plain.state_dict().items():
        found = again.state_dict()[name]
        assert found.dtype is weight.dtype
        assert torch.allclose(found, weight, rtol=0, atol=1e-4) if max_norm else torch.equal(found, weight), name


class Following(nn.Module):
    """Its second layer is frozen, and follows the first one in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = (
            nn.Linear(16, 16),
            nn.Linear(16, 16).requires_grad_(False),
            nn.Linear(16, 8),
        )

    def forward(self, x):
        with torch.no_grad():
            self.second.weight.lerp_(self.first.weight, 0.1)
        return self.last(self.first(x) + self.second(x)).square().mean()


def test_frozen_parameters_that_forward_writes_to_are_read_loaded_and_never_trained() -> None:
    model, x = Following(), torch.randn(8, 16)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with pytest.raises(ValueError, match=r"frozen parameter second\.weight, but checkpoints hold"):
        ullage.prepare(
            model, torch.optim.AdamW(trained), (x,), hardware="epyc-turin-2c", checkpoint_buffer_bytes=1 << 20
        )
    model, optimizer = ullage.prepare(model, torch.optim.AdamW(trained), (x,), hardware="epyc-turin-2c")
    with optimizer.session as session:
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()
        kept = {name: weight.clone() for name, weight in model.state_dict().items()}
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert not torch.equal(model.second.weight, kept["second.weight"])
        model.load_state_dict(kept)
        for name, weight in session.full_parameters().items():
            assert torch.equal(weight, kept[name])
        model.second.weight.requires_grad_(True)
        with pytest.raises(ValueError, match=r"second\.weight was frozen when the plan was made"):
            model(x)


class Scaled(nn.Module):
    def __init__(self, scales: nn.ParameterDict | nn.ParameterList, key: Any) -> None:
        super().__init__()
        self.inner, self.scales, self.key = nn.Linear(64, 64), scales, key

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.inner(x)) * self.scales[self.key]


@pytest.mark.parametrize("kind", [dict, list])
def test_blocks_share_a_dictionary_of_parameters_of_which_each_reads_its_own(kind: type) -> None:
    """As TinyLoRA does: the dictionary never runs, and its parameters belong to several units."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        values = [torch.randn(64) for _ in range(2)]
        shared = nn.ParameterDict({"a": values[0], "b": values[1]}) if kind is dict else nn.ParameterList(values)
        keys = ["a", "a", "b", "b"] if kind is dict else [0, 0, 1, 1]
        return nn.Sequential(nn.Linear(16, 64), *(nn.Sequential(Scaled(shared, k), Block(64)) for k in keys))

    found = []
    for prepares in (False, True):
        model = make()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
        if prepares:
            batch = (torch.zeros(64, 16),)
            model, optimizer = ullage.prepare(model, optimizer, batch, hardware=PROFILE, device_memory="1.3MB")
            assert any(unit.params == "host" for unit in optimizer.plan.decisions.units.values())
        torch.manual_seed(1)
        for _ in range(3):
            model(torch.randn(64, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append({name: values.clone() for name, values in model.state_dict().items()})
    optimizer.session.close()
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)
