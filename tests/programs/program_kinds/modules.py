"""Modules: what a model may hold, and how its parts may reach each other."""

import dataclasses

import torch
import torch.nn.functional as F
from program_catalogue import Trained, registry, seeded, train
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

PROGRAMS, program = registry()


def x_of(*shape: int):
    return lambda step: (torch.randn(*shape, generator=seeded(step)),)


class Block(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def stack(*layers, width: int = 64) -> nn.Module:
    return nn.Sequential(nn.Linear(16, width), *layers, nn.Linear(width, 8))


@program
def layer_scale(ullage) -> Trained:
    """ConvNeXt's gamma: a weight of a block that is read behind its children."""

    class Scaled(Block):
        def __init__(self) -> None:
            super().__init__()
            self.gamma = nn.Parameter(torch.full((64,), 0.1))

        def forward(self, x):
            return x + self.gamma * self.down(F.gelu(self.up(self.norm(x))))

    return train(ullage, stack(*(Scaled() for _ in range(4))), x_of(32, 16))


@program
def modulation_tables(ullage) -> Trained:
    """DiT and PixArt: a table of the block is added before its first child is called."""

    class Modulated(Block):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(2, 64) * 0.1)

        def forward(self, x):
            shift, scale = self.table + x.mean(dim=0)
            return x + self.down(F.gelu(self.up(self.norm(x) * (1 + scale) + shift)))

    return train(ullage, stack(*(Modulated() for _ in range(4))), x_of(32, 16))


@program
def parameter_lists(ullage) -> Trained:
    """Weights in a ParameterList and a ParameterDict."""

    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(nn.Parameter(torch.randn(64, 64) / 8) for _ in range(3))
            self.biases = nn.ParameterDict({"a": nn.Parameter(torch.zeros(64)), "b": nn.Parameter(torch.ones(64))})

        def forward(self, x):
            for weight in self.weights:
                x = torch.tanh(x @ weight + self.biases["a"])
            return x * self.biases["b"]

    return train(ullage, stack(Listed(), Listed()), x_of(32, 16))


@program
def tied_by_functional(ullage) -> Trained:
    """The head is F.linear with the embedding's weight."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.blocks = nn.Embedding(50, 64), nn.ModuleList(Block() for _ in range(3))

        def forward(self, ids):
            x = self.embed(ids)
            for block in self.blocks:
                x = block(x)
            return F.cross_entropy(F.linear(x, self.embed.weight).flatten(0, 1), ids.flatten())

    return train(ullage, Tied(), ids_of(50))


def ids_of(vocabulary: int, *shape: int):
    shape = shape or (4, 16)
    return lambda step: (torch.randint(vocabulary, shape, generator=seeded(step)),)


@program
def tied_parameters(ullage) -> Trained:
    """head.weight = embed.weight."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.blocks = nn.Embedding(50, 64), nn.ModuleList(Block() for _ in range(3))
            self.head = nn.Linear(64, 50, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids):
            x = self.embed(ids)
            for block in self.blocks:
                x = block(x)
            return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())

    return train(ullage, Tied(), ids_of(50))


@program
def shared_blocks(ullage) -> Trained:
    """ALBERT and universal transformers: one block runs four times."""

    class Repeated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.block, self.head = nn.Linear(16, 64), Block(), nn.Linear(64, 8)

        def forward(self, x):
            x = self.embed(x)
            for _ in range(4):
                x = self.block(x)
            return self.head(x)

    return train(ullage, Repeated(), x_of(32, 16))


@program
def shared_across_depth(ullage) -> Trained:
    """Two blocks in turn: a, b, a, b."""

    class Cycled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.a, self.b, self.head = nn.Linear(16, 64), Block(), Block(), nn.Linear(64, 8)

        def forward(self, x):
            x = self.embed(x)
            for block in (self.a, self.b, self.a, self.b):
                x = block(x)
            return self.head(x)

    return train(ullage, Cycled(), x_of(32, 16))


@program
def weight_norm(ullage) -> Trained:
    """Weight norm by parametrization."""
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)) for _ in range(3)]
    for block in blocks:
        parametrizations.weight_norm(block[0])
    return train(ullage, stack(*blocks), x_of(32, 16))


@program
def weight_norm_by_hooks(ullage) -> Trained:
    """The older torch.nn.utils.weight_norm."""
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)) for _ in range(3)]
    for block in blocks:
        nn.utils.weight_norm(block[0])
    return train(ullage, stack(*blocks), x_of(32, 16))


@program
def spectral_norm(ullage) -> Trained:
    """Spectral norm, which changes buffers in forward."""
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)) for _ in range(3)]
    for block in blocks:
        parametrizations.spectral_norm(block[2])
    return train(ullage, stack(*blocks), x_of(32, 16))


@program
def orthogonal(ullage) -> Trained:
    """Orthogonal weights by parametrization."""
    blocks = [nn.Linear(64, 64) for _ in range(3)]
    for block in blocks:
        parametrizations.orthogonal(block)
    return train(ullage, stack(*blocks), x_of(32, 16))


@program
def pruned(ullage) -> Trained:
    """torch.nn.utils.prune: a mask in a buffer, and a weight that is made anew before each forward."""
    blocks = [nn.Linear(64, 64) for _ in range(3)]
    for block in blocks:
        prune.l1_unstructured(block, "weight", 0.3)
    return train(ullage, stack(*blocks), x_of(32, 16))


@program
def one_activation_everywhere(ullage) -> Trained:
    """One nn.SiLU instance in all blocks, as in UNets of diffusers."""
    act = nn.SiLU()

    class Uses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.act, self.down = nn.Linear(64, 128), act, nn.Linear(128, 64)

        def forward(self, x):
            return x + self.down(self.act(self.up(x)))

    return train(ullage, stack(*(Uses() for _ in range(4)), act), x_of(32, 16))


@program
def batch_norm(ullage) -> Trained:
    """Running statistics."""
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU()) for _ in range(4)]
    return train(ullage, stack(*blocks), x_of(32, 16))


@program
def vector_quantizer(ullage) -> Trained:
    """A codebook of moving averages, and a straight-through estimator."""

    class Quantizer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("codes", torch.randn(12, 64))
            self.register_buffer("counts", torch.ones(12))

        def forward(self, x):
            nearest = torch.cdist(x, self.codes).argmin(-1)
            if self.training:
                hot = F.one_hot(nearest, 12).to(x.dtype)
                self.counts.mul_(0.9).add_(hot.sum(0), alpha=0.1)
                with torch.no_grad():
                    self.codes.lerp_((hot.T @ x) / self.counts[:, None].clamp_min(1e-3), 0.1)
            return x + (self.codes[nearest] - x).detach()

    return train(ullage, stack(Block(), Quantizer(), Block()), x_of(32, 16))


@program
def routed_experts(ullage) -> Trained:
    """A mixture of experts with top-2 routing, a loss for balance as an attribute, and empty experts."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router, self.experts = nn.Linear(64, 6), nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
            self.balance = torch.zeros(())

        def forward(self, x):
            weights, chosen = self.router(x).softmax(-1).topk(2)
            out = torch.zeros_like(x)
            for index, expert in enumerate(self.experts):
                rows, slots = torch.where(chosen == index)
                if len(rows):
                    out = out.index_add(0, rows, expert(x[rows]) * weights[rows, slots, None])
            self.balance = weights.square().mean()
            return x + out

    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = stack(Experts(), Experts())

        def forward(self, x):
            out = self.layers(x).square().mean()
            return out + sum(m.balance for m in self.modules() if isinstance(m, Experts))

    return train(ullage, Routed(), x_of(8, 16))


@program
def hypernetwork(ullage) -> Trained:
    """One network makes the weights of another."""

    class Hyper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.code, self.make = nn.Parameter(torch.randn(3, 16)), nn.Linear(16, 64 * 64)

        def forward(self, x):
            for weight in self.make(self.code).view(3, 64, 64):
                x = torch.tanh(F.linear(x, weight / 8))
            return x

    return train(ullage, stack(Hyper()), x_of(32, 16))


@program
def outputs_in_dataclasses(ullage) -> Trained:
    """Modules that pass dataclasses and dicts to each other."""

    @dataclasses.dataclass
    class State:
        hidden: torch.Tensor
        skips: list

    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Block()

        def forward(self, state):
            hidden = self.inner(state.hidden)
            return State(hidden, [*state.skips, hidden])

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.steps, self.head = (
                nn.Linear(16, 64),
                nn.ModuleList(Step() for _ in range(3)),
                nn.Linear(64, 8),
            )

        def forward(self, x):
            state = State(self.embed(x), [])
            for step in self.steps:
                state = step(state)
            return {"out": self.head(sum(state.skips))}

    return train(ullage, Whole(), x_of(32, 16), loss=lambda out: out["out"].square().mean())


@program
def unet_skips(ullage) -> Trained:
    """A U-Net: outputs of the way down are used on the way up."""

    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down = nn.ModuleList(nn.Conv2d(a, b, 3, 2, 1) for a, b in ((3, 16), (16, 32), (32, 64)))
            self.up = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, 2) for a, b in ((64, 32), (64, 16), (32, 3)))

        def forward(self, x):
            skips = []
            for layer in self.down:
                x = F.relu(layer(x))
                skips.append(x)
            for index, layer in enumerate(self.up):
                x = layer(x if not index else torch.cat([x, skips[-1 - index]], 1))
            return x

    return train(ullage, UNet(), x_of(2, 3, 16, 16))


@program
def own_checkpointing(ullage) -> Trained:
    """A module that checkpoints by itself."""

    class Checkpointed(Block):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)

    return train(ullage, stack(*(Checkpointed() for _ in range(3))), x_of(32, 16))


@program
def own_function(ullage) -> Trained:
    """A torch.autograd.Function of one's own."""

    class Clip(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.clamp(-1, 1)

        @staticmethod
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            return gradient * (x.abs() <= 1)

    class Clipped(nn.Module):
        def forward(self, x):
            return Clip.apply(x)

    return train(ullage, stack(Block(), Clipped(), Block()), x_of(32, 16))


@program
def full_backward_hooks(ullage) -> Trained:
    """Hooks of the user's own on modules and tensors."""
    blocks = [Block() for _ in range(3)]
    blocks[0].register_full_backward_hook(lambda _m, given, _out: (given[0] * 0.5,))
    blocks[1].register_forward_hook(lambda _m, _args, out: out * 1.5)
    blocks[2].register_forward_pre_hook(lambda _m, args: (args[0] + 0.1,))
    return train(ullage, stack(*blocks), x_of(32, 16))


@program
def gradient_reversal(ullage) -> Trained:
    """Domain-adversarial training."""

    class Reverse(torch.autograd.Function):
        @staticmethod
        def forward(_ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(_ctx, gradient):
            return -gradient

    class Dann(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base, self.classes, self.domains = stack(Block(), Block()), nn.Linear(8, 4), nn.Linear(8, 2)

        def forward(self, x):
            h = self.base(x)
            return self.classes(h).square().mean() + self.domains(Reverse.apply(h)).square().mean()

    return train(ullage, Dann(), x_of(32, 16))


@program
def siamese(ullage) -> Trained:
    """One tower for two inputs of one forward."""

    class Siamese(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower = stack(Block(), Block())

        def forward(self, a, b):
            return (self.tower(a) - self.tower(b)).square().mean()

    return train(ullage, Siamese(), lambda step: (*x_of(32, 16)(step), *x_of(32, 16)(step + 100)))


@program
def two_towers(ullage) -> Trained:
    """CLIP: two towers and a temperature of the root."""

    class Clip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.image, self.text = stack(Block(), Block()), stack(Block(), Block())
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, a, b):
            a, b = F.normalize(self.image(a), dim=-1), F.normalize(self.text(b), dim=-1)
            return F.cross_entropy(self.scale.exp() * a @ b.T, torch.arange(len(a)))

    return train(ullage, Clip(), lambda step: (*x_of(32, 16)(step), *x_of(32, 16)(step + 100)))


@program
def early_exit(ullage) -> Trained:
    """The batch decides how many blocks run."""

    class Exits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.blocks, self.head = (
                nn.Linear(16, 64),
                nn.ModuleList(Block() for _ in range(4)),
                nn.Linear(64, 8),
            )

        def forward(self, x):
            h = self.embed(x)
            for block in self.blocks:
                h = block(h)
                if h.mean() > 0.02:
                    break
            return self.head(h)

    return train(ullage, Exits(), x_of(32, 16))


@program
def views_of_one_weight(ullage) -> Trained:
    """Query, key and value are chunks of one weight, sliced in forward."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Parameter(torch.randn(3 * 64, 64) / 8)

        def forward(self, x):
            q, k, v = (F.linear(x, part) for part in self.qkv.chunk(3))
            return x + F.scaled_dot_product_attention(q[None, None], k[None, None], v[None, None])[0, 0]

    return train(ullage, stack(Attention(), Attention()), x_of(32, 16))


@program
def transformer_encoder(ullage) -> Trained:
    """nn.TransformerEncoder with a mask."""
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.Linear(16, 64), nn.TransformerEncoder(layer, 3), nn.Linear(64, 8))
    return train(ullage, model, x_of(4, 12, 16))


@program
def parts_that_do_not_run(ullage) -> Trained:
    """A tower that only some batches reach."""

    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.text, self.image = stack(Block(), Block()), stack(Block(), Block())

        def forward(self, x, image=None):
            out = self.text(x)
            return out if image is None else out + self.image(image)

    def batches(step: int):
        return (*x_of(8, 16)(step), *(x_of(8, 16)(step + 9) if step == 2 else ()))

    return train(ullage, Towers(), batches)


@program
def frozen_parts(ullage) -> Trained:
    """A frozen backbone in a lower precision, a trained head."""
    model = stack(Block(), Block(), nn.Linear(64, 64))
    for layer in list(model)[:3]:
        layer.requires_grad_(False)
    return train(ullage, model, x_of(32, 16))


@program
def lazy_modules(ullage) -> Trained:
    """nn.LazyLinear, after one forward."""
    model = nn.Sequential(nn.LazyLinear(64), nn.ReLU(), nn.LazyLinear(64), nn.ReLU(), nn.LazyLinear(8))
    model(x_of(2, 16)(0)[0])
    return train(ullage, model, x_of(32, 16))


@program
def scripted_part(ullage) -> Trained:
    """A submodule of torch.jit.script."""
    model = stack(torch.jit.script(nn.Sequential(nn.Linear(64, 64), nn.ReLU())), Block())
    return train(ullage, model, x_of(32, 16))


@program
def read_by_another_method(ullage) -> Trained:
    """ProphetNet: an embedding that runs by its forward and, in the same step, by a method of its own."""

    class Positions(nn.Embedding):
        def forward(self, count):
            return super().forward(torch.arange(count))

        def of(self, ids):
            return super().forward(ids)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.positions = nn.Linear(16, 64), Positions(32, 64)
            self.block, self.last = Block(), nn.Linear(64, 8)

        def forward(self, x):
            x = self.first(x) + self.positions(len(x)) + 0.5 * self.positions.of(torch.arange(len(x)).flip(0))
            return self.last(self.block(x))

    return train(ullage, Model(), x_of(32, 16))


@program
def reversed_gradients(ullage) -> Trained:
    """Domain adaptation: a hook on the features turns their gradient around."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features, self.last = stack(Block(), Block()), nn.Linear(8, 8)

        def forward(self, x):
            features = self.features(x)
            features.register_hook(lambda gradient: -0.1 * gradient)
            return self.last(features)

    return train(ullage, Model(), x_of(32, 16))


@program
def compiled_methods(ullage) -> Trained:
    """A forward that the class compiles, and one that is compiled on the object."""

    class Compiled(Block):
        @torch.compile(backend="eager")
        def forward(self, x):
            return super().forward(x)

    model = stack(Compiled(), Block(), Block())
    model[2].forward = torch.compile(model[2].forward, backend="eager")
    return train(ullage, model, x_of(4, 16))


@torch.compile(backend="eager", fullgraph=True)
def compiled_block(block, x):
    return x + block.down(F.gelu(block.up(block.norm(x))))


@torch.compile(backend="eager", fullgraph=True)
def compiled_product(x, weight):
    return F.gelu(x @ weight)


@program
def compiled_functions(ullage) -> Trained:
    """Functions compiled as a whole, which are given a module, or weights."""

    class OfModule(Block):
        def forward(self, x):
            return compiled_block(self, x)

    class OfWeights(Block):
        def forward(self, x):
            return x + self.down(compiled_product(self.norm(x), self.up.weight.t()))

    return train(ullage, stack(OfModule(), OfWeights(), OfModule()), x_of(4, 16))


@program
def modules_lent_to_blocks(ullage) -> Trained:
    """One module that blocks run and do not hold: it comes as an argument, in a list, and by a closure."""

    class Scored(Block):
        def __init__(self, lent=None) -> None:
            super().__init__()
            self.lent = lent

        def forward(self, x):
            return super().forward(x) * self.lent[0](x)

    class Called(Block):
        def forward(self, x, scores):
            return super().forward(x) * scores(x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.scores, self.last = nn.Linear(16, 64), nn.Linear(64, 1), nn.Linear(64, 8)
            self.listed, self.called = Scored([self.scores]), nn.ModuleList(Called() for _ in range(2))

        def forward(self, x):
            x = self.called[0](self.listed(self.first(x)), self.scores)
            return self.last(self.called[1](x, lambda h: 2 * self.scores(h)))

    return train(ullage, Model(), x_of(32, 16))
