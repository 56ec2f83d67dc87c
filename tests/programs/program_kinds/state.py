"""What forward reads and changes besides inputs and weights, where no attribute of a module leads to it."""

import array
import collections
import contextlib
import contextvars
import functools
import itertools
import threading
import types
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from program_catalogue import Trained, registry, seeded, train
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations, parametrize

PROGRAMS, program = registry()
NUM_STEPS = 4
count, strength, centre = 0, 1.0, torch.empty(0)
tables: dict[str, torch.Tensor] = {}
settings = SimpleNamespace(scale=1.0)
shared = {"calls": [0]}
chosen = contextvars.ContextVar("chosen", default=1.0)


class Block(nn.Module):
    """A block whose ``factor`` is one, unless a class derived from it says otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def factor(self) -> float | torch.Tensor:
        return 1.0

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x)) * self.factor()))


class Net(nn.Module):
    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 64), nn.Linear(64, 8)
        self.blocks = nn.ModuleList(block() for _ in range(5))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def loop(ullage, block, *, around=lambda _step: contextlib.nullcontext(), between=lambda _step, _x: None) -> Trained:
    """Train, with the forward inside ``around``, and call ``between`` before backward."""
    model = Net(block)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    model, optimizer = ullage.prepare(model, optimizer, (torch.ones(32, 16),))
    losses = []
    for step in range(NUM_STEPS):
        x = torch.randn(32, 16, generator=seeded(step))
        with around(step):
            loss = model(x).square().mean()
        between(step, x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


@program
def global_counter(ullage) -> Trained:
    """Blocks count their calls in a global variable, and compute with the count."""
    global count
    count = 0

    class Counting(Block):
        def factor(self):
            global count
            count += 1
            return 1 + 0.05 * (count % 7)

    losses, model = loop(ullage, Counting)
    return [*losses, count], model


@program
def global_set_by_the_loop(ullage) -> Trained:
    """The loop sets a global number between forward and backward."""
    global strength
    strength = 1.0

    class Strong(Block):
        def factor(self):
            return strength

    def between(step: int, _x) -> None:
        global strength
        strength = 0.5 + step

    return loop(ullage, Strong, between=between)


@program
def global_centre(ullage) -> Trained:
    """DINO: a moving average in a global tensor, updated in place between forward and backward."""
    global centre
    centre = torch.zeros(64)

    class Centred(Block):
        def factor(self):
            return 1 + F.pad(centre, (0, 192))

    return loop(ullage, Centred, between=lambda _step, x: centre.mul_(0.5).add_(x.mean()))


class Gain(nn.Parameter):
    """A parameter with a multiplier, as libraries have them that carry learning rates across widths."""

    def multiplied(self):
        return self * self.multiplier


class Multiplied(Block):
    def __init__(self) -> None:
        super().__init__()
        self.gain = Gain(torch.ones(256))
        self.gain.multiplier, self.gain.calls = 1.0, []

    def factor(self):
        self.gain.calls.append(None)
        return self.gain.multiplied() * (1 + 0.1 * len(self.gain.calls))


@program
def attributes_of_parameters(ullage) -> Trained:
    """Forward reads and changes what people have set on a parameter, and the loop changes it before backward."""
    made: list[Multiplied] = []

    def block() -> Multiplied:
        made.append(Multiplied())
        return made[-1]

    def between(step, _x) -> None:
        for each in made:
            each.gain.multiplier = 1.0 / (2 + step)

    losses, model = loop(ullage, block, between=between)
    return [*losses, *(float(len(each.gain.calls)) for each in made)], model


@program
def settings_of_a_module(ullage) -> Trained:
    """A namespace of settings, which the loop changes between forward and backward."""
    settings.scale = 1.0

    class Set(Block):
        def factor(self):
            return settings.scale

    def between(step: int, _x) -> None:
        settings.scale = 1.0 + step

    return loop(ullage, Set, between=between)


def called() -> int:
    shared["calls"][0] += 1
    return shared["calls"][0]


@program
def helper_with_a_global_list(ullage) -> Trained:
    """A function of the program counts in a list of a global dictionary."""
    shared["calls"][0] = 0

    class Helped(Block):
        def factor(self):
            return 1 + 0.05 * (called() % 7)

    losses, model = loop(ullage, Helped)
    return [*losses, shared["calls"][0]], model


@program
def closures(ullage) -> Trained:
    """A function around the class has the counter, and the loop has a number."""
    seen, at = 0, 1.0

    class Closed(Block):
        def factor(self):
            nonlocal seen
            seen += 1
            return at + 0.05 * (seen % 7)

    def between(step: int, _x) -> None:
        nonlocal at
        at = 1.0 + step

    losses, model = loop(ullage, Closed, between=between)
    return [*losses, seen], model


@program
def function_that_a_block_is_given(ullage) -> Trained:
    """A block has a function as attribute, whose variables change."""
    seen, at = 0, {"scale": 1.0}

    def factor() -> float:
        nonlocal seen
        seen += 1
        return at["scale"] + 0.05 * (seen % 7)

    def block() -> Block:
        made = Block()
        made.factor = factor
        return made

    return loop(ullage, block, between=lambda step, _x: at.update(scale=1.0 + step))


@program
def counters_of_a_class(ullage) -> Trained:
    """Blocks share counters that are attributes of their class."""

    class Counted(Block):
        calls, each = 0, [0]

        def factor(self):
            type(self).calls += 1
            self.each[0] += 1
            return 1 + 0.05 * (self.calls % 7) + 0.01 * (self.each[0] % 3)

    losses, model = loop(ullage, Counted)
    return [*losses, Counted.calls, Counted.each[0]], model


@program
def mutable_default(ullage) -> Trained:
    """An argument's default value is a list that counts."""

    class Defaulting(Block):
        def factor(self, seen=[0]):  # noqa: B006 - what this is about
            seen[0] += 1
            return 1 + 0.05 * (seen[0] % 7)

    return loop(ullage, Defaulting)


@program
def inherited_counter(ullage) -> Trained:
    """The method that counts in a closure is that of a parent class."""
    seen = 0

    class Parent(Block):
        def factor(self):
            nonlocal seen
            seen += 1
            return 1 + 0.05 * (seen % 7)

    class Child(Parent):
        pass

    return loop(ullage, Child)


@program
def counts_in_a_counter(ullage) -> Trained:
    """Blocks count in a collections.Counter, whose update() adds."""

    class Counting(Block):
        def __init__(self) -> None:
            super().__init__()
            self.seen = collections.Counter()

        def factor(self):
            self.seen["calls"] += 1
            return 1 + 0.05 * (self.seen["calls"] % 7)

    return loop(ullage, Counting)


class Fields(dict):
    """A dict whose entries are attributes too: others raise KeyError."""

    __getattr__, __setattr__ = dict.__getitem__, dict.__setitem__


@program
def fields_that_blocks_change(ullage) -> Trained:
    """Blocks change one object of a class made from dict, which the model also returns."""

    class Changing(Block):
        def forward(self, given):
            given.x = super().forward(given.x) * given.scale
            given.scale = given.scale * 0.9
            return given

    class Whole(Net):
        def forward(self, x):
            found = Fields(x=self.first(x), scale=torch.ones(()))
            for block in self.blocks:
                found = block(found)
            return Fields(scale=found.scale, x=self.last(found.x))

    batch = lambda step: (torch.randn(32, 16, generator=seeded(step)),)
    return train(ullage, Whole(Changing), batch, loss=lambda out: out.x.square().mean())


@program
def counts_in_slots(ullage) -> Trained:
    """A block counts in an object with slots."""

    class Counts:
        __slots__ = ("calls", "empty")

        def __init__(self) -> None:
            self.calls = 0

    class Counting(Block):
        def __init__(self) -> None:
            super().__init__()
            self.seen = Counts()

        def factor(self):
            self.seen.calls += 1
            return 1 + 0.05 * (self.seen.calls % 7)

    return loop(ullage, Counting)


@program
def tables_in_a_cache(ullage) -> Trained:
    """A function under functools.lru_cache makes a table in the first forward."""

    @functools.lru_cache(maxsize=4)
    def table(size: int) -> torch.Tensor:
        return torch.randn(size)

    class Cached(Block):
        def factor(self):
            return 1 + 0.05 * table(256)

    return loop(ullage, Cached)


class Calls:
    number = 0


def counted() -> int:
    counted.calls += 1
    return counted.calls


@program
def counts_in_many_places(ullage) -> Trained:
    """Counts in a function's attribute, a class, another file, a thread's own variables, and arrays of numbers."""
    file, own, numbers, some = types.ModuleType("file"), threading.local(), array.array("l", [0]), bytearray(1)
    exec("count = 0\ndef tick():\n    global count\n    count += 1\n    return count", vars(file))  # noqa: S102
    counted.calls = Calls.number = own.calls = file.set = 0

    class Counting(Block):
        def factor(self):
            Calls.number += 1
            own.calls += 1
            numbers[0] += 1
            some[0] += 1
            file.set += 1
            calls = (counted(), Calls.number, own.calls, numbers[0], some[0], file.set, file.tick())
            return 1 + sum(0.01 * (number % (3 + place)) for place, number in enumerate(calls))

    losses, model = loop(ullage, Counting)
    found = (counted.calls, Calls.number, own.calls, numbers[0], some[0], file.set, file.count)
    return losses + [float(each) for each in found], model


@program
def context_variable(ullage) -> Trained:
    """A context variable is set around forward alone."""

    class Chosen(Block):
        def factor(self):
            return chosen.get()

    @contextlib.contextmanager
    def around(step: int):
        token = chosen.set(0.5 + step)
        yield
        chosen.reset(token)

    return loop(ullage, Chosen, around=around)


@program
def attention_chosen_around_forward(ullage) -> Trained:
    """``sdpa_kernel`` stands around forward alone, which keeps a tensor of inference mode in an attribute."""

    class Attending(Block):
        def forward(self, x):
            heads = self.norm(x).view(4, 8, 4, 16).transpose(1, 2)
            with torch.inference_mode():
                self.mean = heads.mean()
            return super().forward(x + F.scaled_dot_product_attention(heads, heads, heads).reshape(x.shape))

    return loop(ullage, Attending, around=lambda _step: sdpa_kernel(SDPBackend.MATH))


@program
def features_collected_by_hooks(ullage) -> Trained:
    """Forward hooks of a user collect features in a list, and change what a layer gives by a number of theirs."""
    collected, seen = [], 0

    def collect(_module, _args, output):
        nonlocal seen
        seen += 1
        collected.append(output.detach().mean())
        return output * (1 + 0.05 * (seen % 7))

    def growing() -> Callable[..., torch.Tensor]:
        """Return a hook with a number of its own."""
        own = 0

        def grow(_module, _args, output):
            nonlocal own
            own += 1
            return output * (1 + 0.05 * (own % 7))

        return grow

    def block() -> Block:
        made = Block()
        made.up.register_forward_hook(collect)
        made.norm.register_forward_hook(growing())
        made.down.register_forward_hook(growing())
        return made

    losses, model = loop(ullage, block)
    return [*losses, len(collected), seen, *map(float, collected)], model


class Recorder:
    """Keeps what layers give, as libraries that look into networks do."""

    def __init__(self) -> None:
        self.features: dict[str, list[torch.Tensor]] = {}

    def keep(self, name: str, _module, _args, output) -> None:
        self.features.setdefault(name, []).append(output)


@program
def features_in_the_loss(ullage) -> Trained:
    """A recorder's method is the hook; the loss has the features that it kept, with their gradients."""
    recorder, model = Recorder(), Net(Block)
    for number, block in enumerate(model.blocks):
        block.up.register_forward_hook(functools.partial(recorder.keep, f"up{number}"))
        block.register_forward_hook(functools.partial(recorder.keep, f"block{number}"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    model, optimizer = ullage.prepare(model, optimizer, (torch.ones(32, 16),))
    losses = []
    for step in range(NUM_STEPS):
        recorder.features.clear()
        loss = model(torch.randn(32, 16, generator=seeded(step))).square().mean()
        loss = loss + sum(f.abs().mean() for kept in recorder.features.values() for f in kept)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses += [loss.item(), sum(map(len, recorder.features.values()))]
    return losses, model


@program
def numpy_counts(ullage) -> Trained:
    """Counts in NumPy arrays: of a file, and of the block."""
    counts = np.zeros(3)

    class Counting(Block):
        def __init__(self) -> None:
            super().__init__()
            self.own = np.zeros(2, dtype=np.int64)

        def factor(self):
            counts[1] += 1
            self.own[0] += 1
            return 1 + 0.05 * float(counts[1] % 7) + 0.01 * int(self.own[0])

    losses, model = loop(ullage, Counting)
    return [*losses, *counts.tolist(), model.blocks[0].own[0]], model


class Schedule:
    """A helper that is no module, and counts outside of itself."""

    total = 0

    def __call__(self) -> float:
        Schedule.total += 1
        return 1 + 0.05 * (Schedule.total % 7) + 0.01 * (called() % 3)


@program
def helper_object(ullage) -> Trained:
    """A block holds an object whose method counts in its class and in a file."""
    Schedule.total, shared["calls"][0] = 0, 0

    def block() -> Block:
        made = Block()
        made.factor = Schedule()
        return made

    return loop(ullage, block)


@program
def tables_made_once(ullage) -> Trained:
    """A global dictionary has tables, which the first forward makes."""
    tables.clear()

    class Tabled(Block):
        def factor(self):
            if "wave" not in tables:
                tables["wave"] = torch.linspace(0.5, 1.5, 256).sin()
            return tables["wave"]

    losses, model = loop(ullage, Tabled)
    return [*losses, float(tables["wave"].sum())], model


@program
def cache_under_another_name(ullage) -> Trained:
    """XLM, whose layers get their cache of keys under a name of their own."""
    config = transformers.XLMConfig(vocab_size=32, emb_dim=32, n_layers=3, n_heads=2, pad_index=0)

    def tokens(step: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(1, 32, (2, 8), generator=seeded(step))
        return {"input_ids": ids, "labels": ids}

    return train(ullage, transformers.XLMWithLMHeadModel(config), tokens)


@program
def weights_made_once(ullage) -> Trained:
    """Normed weights are made once for a step, by parametrize.cached around forward and backward."""
    blocks = [
        nn.Sequential(parametrizations.weight_norm(nn.Linear(16, 16)), nn.Tanh(), nn.Linear(16, 16)) for _ in range(3)
    ]
    model = nn.Sequential(*blocks, nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    batches = [torch.randn(8, 16, generator=seeded(step)) for step in range(NUM_STEPS)]
    model, optimizer = ullage.prepare(model, optimizer, (batches[0],))
    losses = []
    for batch in batches:
        with parametrize.cached():
            loss = model(batch).square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


class Advancing(Block):
    """Advances a position that it is given, and notes its call in a list beside it."""

    def forward(self, x, position, calls, advances):
        y = x + self.down(F.gelu(self.up(self.norm(x)) * (1 + position) + len(calls)))
        if advances:
            position.add_(0.25)
            calls.append(1)
        return y


class Placed(Net):
    advances = False

    def forward(self, x, position, calls):
        x = self.first(x)
        for block in self.blocks:
            x = block(x, position, calls, self.advances)
        return self.last(x)


@program
def inputs_that_advance(ullage) -> Trained:
    """From the third step on, each block changes a tensor and a list that all blocks are given."""
    batches = [(torch.randn(32, 16, generator=seeded(step)), torch.zeros(1), []) for step in range(NUM_STEPS)]
    model = Placed(Advancing)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    model, optimizer = ullage.prepare(model, optimizer, batches[0])
    losses = []
    for step, batch in enumerate(batches):
        model.advances = step > 1
        loss = model(*batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


@program
def momentum_encoder(ullage) -> Trained:
    """MoCo: forward moves a second, frozen encoder towards the first one, and keeps a queue of its outputs."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key = Net(Block), Net(Block).requires_grad_(False)
            self.key.load_state_dict(self.query.state_dict())
            self.register_buffer("queue", torch.randn(64, 8))

        @torch.no_grad()
        def follow(self) -> None:
            for ours, theirs in zip(self.query.parameters(), self.key.parameters(), strict=True):
                theirs.data = theirs.data * 0.9 + ours.data * 0.1

        def forward(self, x):
            query = self.query(x)
            with torch.no_grad():
                self.follow()
                key = self.key(0.9 * x)
            others = query @ self.queue.clone().T
            self.queue[:32] = self.queue[32:].clone()
            self.queue[32:] = key
            return torch.cat([(query * key).sum(-1, keepdim=True), others], -1).log_softmax(-1)[:, 0].neg().mean()

    return train(ullage, Model(), lambda step: (torch.randn(32, 16, generator=seeded(step)),))


@program
def codebook_in_a_frozen_parameter(ullage) -> Trained:
    """Vector quantization: blocks move their codebooks, which are frozen parameters, in forward."""

    class Quantized(Block):
        def __init__(self) -> None:
            super().__init__()
            self.codes = nn.Parameter(torch.randn(16, 64), requires_grad=False)

        def forward(self, x):
            x = super().forward(x)
            nearest = torch.cdist(x, self.codes).argmin(-1)
            quantized = self.codes[nearest]
            with torch.no_grad():
                self.codes.index_add_(0, nearest, 0.1 * (x - quantized))
            return x * (1 + 0.1 * (quantized - x).detach())

    return loop(ullage, Quantized)


@program
def bounded_by_other_data(ullage) -> Trained:
    """EEGNet: layers bound their weights in forward, and give them to the parameter as other data."""

    class Bounded(nn.Linear):
        def forward(self, x):
            self.weight.data = torch.renorm(self.weight.data, p=2, dim=0, maxnorm=0.5)
            return super().forward(x)

    class With(Block):
        def __init__(self) -> None:
            super().__init__()
            self.bounded = Bounded(64, 64)

        def forward(self, x):
            return super().forward(x) + self.bounded(x)

    return loop(ullage, With)


@program
def hooks_around_forward(ullage) -> Trained:
    """Hooks of one forward alone, which are gone before backward, as adapters are given their inputs by peft."""
    hooks: list = []

    def hooked(block: Block) -> Block:
        blocks.append(block)
        return block

    @contextlib.contextmanager
    def around(step: int):
        scale = 1 + 0.1 * step
        hooks.extend(b.up.register_forward_pre_hook(lambda _, args: (args[0] * scale,)) for b in blocks[-5:])
        everywhere = lambda module, _, output: output * scale if isinstance(module, nn.LayerNorm) else None
        hooks.append(nn.modules.module.register_module_forward_hook(everywhere))
        yield
        while hooks:
            hooks.pop().remove()

    blocks: list[Block] = []
    return loop(ullage, lambda: hooked(Block()), around=around)


@program
def hooks_added_later(ullage) -> Trained:
    """Hooks that are added after prepare, to layers inside of blocks and to all modules, count and change outputs."""
    counts, norms = {"inside": 0, "backward": 0}, []

    def inside(_module, _args, output):
        counts["inside"] += 1
        return output * (1 + counts["inside"] / 64)

    def count_norms(module, _args, _output) -> None:
        if isinstance(module, nn.LayerNorm):
            norms.append(module)

    def count_backward(_module, _before, _after) -> None:
        counts["backward"] += 1

    class Adding:
        def __init__(self) -> None:
            self.hooks: list = []

        def prepare(self, model, *args, **options):
            model, optimizer = ullage.prepare(model, *args, **options)
            self.hooks += [block.up.register_forward_hook(inside) for block in model.blocks]
            self.hooks += [block.register_full_backward_hook(count_backward) for block in model.blocks]
            self.hooks.append(nn.modules.module.register_module_forward_hook(count_norms))
            return model, optimizer

    adding = Adding()
    try:
        losses, model = loop(adding, Block)
    finally:
        for hook in adding.hooks:
            hook.remove()
    return losses + [float(count) for count in (*counts.values(), len(norms))], model


@program
def counting_hooks_on_gradients(ullage) -> Trained:
    """Fisher information: hooks on parameters add up what they get, and one changes it by how often it was called."""
    sums, calls = {}, []

    def add(name: str, gradient: torch.Tensor) -> None:
        sums[name] = sums.get(name, 0) + gradient.square()

    def scale(gradient: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return gradient * (1 + len(calls) / 8)

    def hooked() -> nn.Module:
        block = Block()
        for name, parameter in block.named_parameters():
            parameter.register_hook(functools.partial(add, name))
        block.up.bias.register_hook(scale)
        return block

    losses, model = loop(ullage, hooked)
    return losses + [float(total.sum()) for total in sums.values()] + [float(len(calls))], model


@program
def backward_that_draws_and_counts(ullage) -> Trained:
    """A function whose backward draws noise, counts, and moves an average that it computes with."""
    counts = {"calls": 0}

    class Noisy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, average):
            ctx.average = average
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            counts["calls"] += 1
            ctx.average.mul_(0.9).add_(gradient.abs().mean(), alpha=0.1)
            return gradient * ctx.average + 1e-3 * torch.randn_like(gradient), None

    class WithNoise(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("average", torch.ones(()))

        def forward(self, x):
            return Noisy.apply(super().forward(x), self.average)

    losses, model = loop(ullage, WithNoise)
    return [*losses, float(counts["calls"])], model


@program
def iterators(ullage) -> Trained:
    """The model takes from an iterator and a generator, and so does the step that is planned, which counts too."""
    counts, draws = [0], (1 + number % 5 for number in range(100))

    class Taking(Net):
        def __init__(self) -> None:
            super().__init__(Block)
            self.phases = itertools.cycle([0.5, 1.0, 2.0])

        def forward(self, x):
            return super().forward(x) * next(self.phases)

    def step(model, x):
        counts[0] += 1
        return model(x * next(draws)).square().mean() * counts[0]

    model = Taking()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    model, optimizer = ullage.prepare(model, optimizer, torch.ones(32, 16), step=step)
    losses = []
    for number in range(NUM_STEPS):
        loss = step(model, torch.randn(32, 16, generator=seeded(number)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return [*losses, float(counts[0])], model
