"""Random modules: lists of blocks of many kinds, in one stream or two, nested, with skips, shared and frozen parts."""

import dataclasses
import random
import types

import numpy as np
import torch
from hypothesis import strategies as st
from torch import nn

from planner.models.captured import CapturedInput

WIDTH, BATCH, LENGTH = 8, 4, 3
INPUT = CapturedInput(shape=(BATCH, LENGTH, WIDTH))


class Listed(nn.Module):
    """Keeps its parts in a list, which is never called itself (as the blocks of T5 do)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ModuleList([block("norm-linear-tanh"), block("linear-gelu-linear")])

    def forward(self, x):
        for part in self.layer:
            x = x + part(x)
        return x


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.activation = nn.Linear(WIDTH, WIDTH), nn.SiLU()
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))

    def forward(self, x):
        return self.activation(self.linear(x) * self.scale)


class Scaled(nn.Module):
    """Uses a parameter of its own before and after the module inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return torch.tanh(self.inner(x * self.scale)) * self.scale


class Bare(nn.Module):
    """Owns a weight, and has a module inside it that owns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.activation = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3), nn.Tanh()

    def forward(self, x):
        return self.activation(x @ self.weight)


class Paired(nn.Module):
    """Hands on a tuple, of which the next block takes the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.relu(self.first(x)), self.second(x)


class Idle(nn.Module):
    """Owns a weight that it does not use, and hands on what it was given, or a view of that."""

    def __init__(self, *, as_view: bool) -> None:
        super().__init__()
        self.unused, self.as_view = nn.Parameter(torch.ones(WIDTH)), as_view

    def forward(self, x):
        return x.view_as(x) if self.as_view else x


class InPlace(nn.Module):
    """Changes what its layer has made, and a copy of what it was given, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        x = x + 0
        x.mul_(self.scale)
        y = self.linear(x)
        y[..., 0] += 1
        return y.tanh_()


class Outer(nn.Module):
    """Uses a parameter that belongs to a module which is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.holder, self.linear = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(nn.functional.linear(x, self.holder.weight, self.holder.bias).tanh())


class Aside(nn.Module):
    """Hands on what has no gradient to its layer; the loss gets that by way of an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.linear = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        self.aside = self.gate(x).square().mean()
        return torch.tanh(self.linear(x))


class Named(nn.Module):
    """Hands on a dictionary of what its layers make, by way of a module that owns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"a": nn.Linear(WIDTH, WIDTH), "b": nn.Linear(WIDTH, WIDTH)})

    def forward(self, x):
        made = {name: layer(x) for name, layer in self.layers.items()}
        return made["a"].tanh(), made


class Half(nn.Module):
    """Has a part that takes no gradient to what comes before it."""

    def __init__(self) -> None:
        super().__init__()
        self.fixed, self.trained = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        with torch.no_grad():
            mask = torch.sigmoid(self.fixed(x))
        return torch.tanh(self.trained(x)) * mask


class Table(nn.Module):
    """Reads a parameter of its own before it calls a module inside it, as diffusion transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.table = nn.Parameter(torch.randn(2, WIDTH))

    def forward(self, x):
        shift, scale = self.table.unbind()
        return x + self.down(torch.tanh(self.up(x * (1 + scale) + shift)))


class Running(nn.Module):
    """Computes with what its forward changes: buffers, in place and behind ``data`` and anew, large ones too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("range", torch.ones(()))
        self.register_buffer("last", torch.zeros(WIDTH))
        self.register_buffer("book", torch.zeros(3000, WIDTH))
        self.register_buffer("queue", torch.zeros(3000, WIDTH))

    def forward(self, x):
        with torch.no_grad():
            vectors = x.flatten(0, -2)
            self.mean.mul_(0.9).add_(vectors.mean(0), alpha=0.1)
            self.range.data.lerp_(x.abs().amax(), 0.1)
            self.book.data[: len(vectors)] += vectors
            self.queue.copy_(torch.cat([vectors, self.queue])[: len(self.queue)])
            shift, self.last = self.last, vectors.mean(0)
        return torch.tanh(self.linear(x - self.mean - shift) / self.range + self.book[0] + self.queue[len(vectors)])


class Counting(nn.Module):
    """Computes with attributes that its forward changes: numbers, lists, objects, a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.calls, self.seen, self.box = 0, [], types.SimpleNamespace(total=0.0, of={"max": 0})
        self.held = torch.zeros(WIDTH)

    def forward(self, x):
        self.calls += 1
        self.seen.append(self.calls)
        self.box.total += 0.25 * len(self.seen)
        self.box.of["max"] = max(self.box.of["max"], self.calls)
        self.held.add_(0.125)
        return torch.tanh(self.linear(x) * (1 + self.calls / 8) + self.box.total + self.box.of["max"] + self.held)

    @property
    def state(self):
        return self.calls, self.seen, vars(self.box), self.held.tolist()


NOISE = torch.Generator()


class Drawing(nn.Module):
    """Draws from the generators of Python and NumPy, from generators that it holds, and from one that it names."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.own, self.other = nn.Linear(WIDTH, WIDTH), torch.Generator(), random.Random(3)  # noqa: S311
        self.numpy = np.random.default_rng(3)

    def forward(self, x):
        drawn = [random.random(), np.random.rand(), self.other.random(), self.numpy.random()]  # noqa: NPY002, S311
        noise = torch.rand(WIDTH, generator=self.own) + torch.rand(WIDTH, generator=NOISE)
        return torch.tanh(self.linear(x) * (1 + sum(drawn) / 4) + noise)

    @property
    def state(self):
        drawn = random.random(), np.random.rand()  # noqa: NPY002, S311
        return drawn, self.other.random(), self.numpy.random(), self.own.get_state().sum()


BLOCKS = {
    "table": Table,
    "running": Running,
    "counting": Counting,
    "drawing": Drawing,
    "statistics": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(LENGTH), nn.Tanh()),
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "linear-gelu": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()),
    "linear-relu": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)),
    "relu-linear": lambda: nn.Sequential(nn.ReLU(), nn.Linear(WIDTH, WIDTH)),
    "linear-dropout": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)),
    "linear-gelu-linear": lambda: nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)),
    "norm-linear-tanh": lambda: nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh()),
    "nested": lambda: nn.Sequential(nn.Sequential(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), nn.Tanh())),
    "transformer": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True),
    "listed": Listed,
    "buffered": Buffered,
    "scaled": Scaled,
    "bare": Bare,
    "paired": Paired,
    "named": Named,
    "half": Half,
    "idle": lambda: Idle(as_view=False),
    "idle-view": lambda: Idle(as_view=True),
    "in-place": InPlace,
    "outer": Outer,
    "aside": Aside,
}


def block(kind: str) -> nn.Module:
    return BLOCKS[kind]()


@dataclasses.dataclass(frozen=True)
class Stream:
    """A list of blocks.

    Attributes:
        container: ``sequential``, ``list`` or ``dict``; or ``stages`` of two blocks each.
        skips: whether the input of each block of the first half is added to the output of its partner in the second.
        shared: index of a block that runs again at the end; -1 for none.
        frozen: number of first blocks without gradients.
    """

    blocks: tuple[str, ...]
    container: str = "list"
    skips: bool = False
    shared: int = -1
    frozen: int = 0


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A module.

    Attributes:
        streams: one; or two, of which the second reads the first's output (``then``) or which take turns (``turns``).
        ends: whether a layer is before the streams and one behind them.
        no_grad: whether the first stream runs under ``torch.no_grad()``, if a second one trains.
    """

    streams: tuple[Stream, ...]
    order: str = "then"
    ends: bool = True
    no_grad: bool = False


class Lane(nn.Module):
    """One stream of a random module."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self.stream = stream
        blocks = [block(kind) for kind in stream.blocks]
        match stream.container:
            case "dict":
                self.blocks = nn.ModuleDict({f"b{i}": made for i, made in enumerate(blocks)})
            case "sequential":
                self.blocks = nn.Sequential(*blocks)
            case "stages":
                pairs = [blocks[i : i + 2] for i in range(0, len(blocks), 2)]
                self.blocks = nn.ModuleList(nn.ModuleList(pair) for pair in pairs)
            case _:
                self.blocks = nn.ModuleList(blocks)
        for made in blocks[: stream.frozen]:
            made.requires_grad_(False)

    def listed(self) -> list[nn.Module]:
        match self.stream.container:
            case "dict":
                found = list(self.blocks.values())
            case "stages":
                found = [made for pair in self.blocks for made in pair]
            case _:
                found = list(self.blocks)
        return found + ([found[self.stream.shared]] if self.stream.shared >= 0 else [])

    def steps(self, x):
        """Run one block at a time, and yield what came of it."""
        blocks, waiting = self.listed(), []
        plain = not self.stream.skips and self.stream.shared < 0 and {"paired", "named"}.isdisjoint(self.stream.blocks)
        if self.stream.container == "sequential" and plain:
            yield self.blocks(x)
            return
        for index, made in enumerate(blocks):
            if self.stream.skips and index < len(blocks) // 2:
                waiting.append(x)
            x = made(x)
            if isinstance(x, tuple):
                x = x[0]
            if self.stream.skips and index >= (len(blocks) + 1) // 2:
                x = x + waiting.pop()
            yield x

    def forward(self, x):
        for result in self.steps(x):
            x = result
        return x


class Random(nn.Module):
    """What a recipe says; its output is a scalar."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.before = nn.Linear(WIDTH, WIDTH) if recipe.ends else nn.Identity()
        self.lanes = nn.ModuleList(Lane(stream) for stream in recipe.streams)
        self.behind = nn.Linear(WIDTH, 1) if recipe.ends else nn.Identity()

    def forward(self, x):
        x = self.before(x)
        if self.recipe.order == "turns" and len(self.lanes) == 2:
            results = [x, x.tanh()]
            lanes = [lane.steps(result) for lane, result in zip(self.lanes, results, strict=True)]
            while lanes:
                for number, lane in list(enumerate(lanes)):
                    if (result := next(lane, None)) is None:
                        lanes.remove(lane)
                    else:
                        results[number % 2] = result
            x = results[0] + results[1]
        else:
            for number, lane in enumerate(self.lanes):
                with torch.set_grad_enabled(not (self.recipe.no_grad and number == 0 and len(self.lanes) == 2)):
                    y = lane(x)
                x = y if number == 0 else x + y
        aside = [module.aside for module in self.modules() if isinstance(module, Aside)]
        return self.behind(x).square().mean() + sum(aside)


@st.composite
def streams(draw: st.DrawFn) -> Stream:
    kinds = draw(st.lists(st.sampled_from(sorted(BLOCKS)), min_size=1, max_size=2))
    blocks = tuple(draw(st.sampled_from(kinds)) for _ in range(draw(st.integers(2, 5))))
    return Stream(
        blocks=blocks,
        container=draw(st.sampled_from(["sequential", "list", "dict", "stages"])),
        skips=draw(st.booleans()),
        shared=draw(st.sampled_from([-1, -1, -1, *range(len(blocks))])),
        frozen=draw(st.sampled_from([0, 0, 0, 1, len(blocks)])),
    )


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    found = draw(st.lists(streams(), min_size=1, max_size=2))
    recipe = Recipe(
        streams=tuple(found),
        order=draw(st.sampled_from(["then", "turns"])),
        ends=draw(st.booleans()),
        no_grad=draw(st.sampled_from([False, False, True])),
    )
    nothing = any(s.frozen or not {"idle", "idle-view"}.isdisjoint(s.blocks) for s in recipe.streams)
    if not recipe.ends and (recipe.no_grad or nothing):
        return dataclasses.replace(recipe, ends=True)
    return recipe
