"""Modules as people write them: no preset knows any of them."""

import collections

import torch
from torch import nn
from torch.nn import functional

from planner.models.captured import CapturedInput


class Mlp(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x):
        return self.down(functional.gelu(self.up(x)))


class MixerBlock(nn.Module):
    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.norm1, self.tokens = nn.LayerNorm(width), Mlp(tokens, 2 * tokens)
        self.norm2, self.channels = nn.LayerNorm(width), Mlp(width, 4 * width)

    def forward(self, x):
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class Mixer(nn.Module):
    """MLP-Mixer; its forward returns the loss."""

    def __init__(self, num_blocks: int = 3, width: int = 48) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, 4)
        self.blocks = nn.Sequential(*(MixerBlock(16, width) for _ in range(num_blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images, labels):
        x = self.blocks(self.patch(images).flatten(2).transpose(1, 2))
        return functional.cross_entropy(self.head(self.norm(x).mean(1)), labels)


class ScaledBlock(nn.Module):
    """Uses parameters of its own around both of its halves."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = Mlp(width, 4 * width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.scale1, self.scale2 = nn.Parameter(torch.ones(width)), nn.Parameter(torch.ones(width))

    def forward(self, x):
        y = self.norm1(x)
        x = x + self.scale1 * self.attention(y, y, y, need_weights=False)[0]
        return x + self.scale2 * self.mlp(self.norm2(x))


class Vit(nn.Module):
    """Parameters of the root are used at the beginning; the output is a dictionary."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, 4)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, 17, width))
        self.layers = nn.ModuleList(ScaledBlock(width) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images, labels):
        x = self.patch(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.positions
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x)[:, 0])
        return {"logits": logits, "loss": functional.cross_entropy(logits, labels)}


class Tied(nn.Module):
    """A head that uses the embedding's weight through a module of its own."""

    def __init__(self, width: int = 32, vocabulary: int = 60) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True, norm_first=True) for _ in range(3)
        )
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


class TiedByTheHead(nn.Module):
    """A tied head that is made before the embedding, and has a bias of its own, as XLM-RoBERTa has it."""

    def __init__(self, width: int = 32, vocabulary: int = 60) -> None:
        super().__init__()
        self.head = nn.Linear(width, vocabulary)
        self.tied = Tied(width, vocabulary)
        self.tied.head = self.head
        self.tied.embed.weight = self.head.weight

    def forward(self, ids):
        return self.tied(ids)


class Translator(nn.Module):
    """An encoder and a decoder whose embeddings, and the head, are one weight. Florence-2 has one that does not run."""

    def __init__(self, width: int = 32, vocabulary: int = 60) -> None:
        super().__init__()
        self.read, self.write, self.unused = (nn.Embedding(vocabulary, width) for _ in range(3))
        layer = {"dropout": 0.0, "batch_first": True}
        self.encoder = nn.ModuleList(nn.TransformerEncoderLayer(width, 4, 64, **layer) for _ in range(2))
        self.decoder = nn.ModuleList(nn.TransformerDecoderLayer(width, 4, 64, **layer) for _ in range(2))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.write.weight = self.head.weight = self.unused.weight = self.read.weight

    def forward(self, ids):
        memory = self.read(ids)
        for layer in self.encoder:
            memory = layer(memory)
        x = self.write(ids)
        for layer in self.decoder:
            x = layer(x, memory)
        return functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


class Repeated(nn.Module):
    """One block that runs three times."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first = nn.Linear(16, width)
        self.block = Mlp(width, 64)
        self.last = nn.Linear(width, 1)

    def forward(self, x):
        x = self.first(x)
        for _ in range(3):
            x = x + self.block(x)
        return self.last(x)


class Gated(nn.Module):
    """Has a weight that is read on both sides of its children, in forward and so in backward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.inner = nn.Parameter(torch.randn(width)), nn.Linear(width, width)

    def forward(self, x):
        return self.inner(x * self.gate) * self.gate


class Unused(nn.Module):
    """Has parts that its example batch does not reach, but every second batch of training does."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(*(Gated(16) for _ in range(4)), nn.LayerNorm(16))
        self.layers = nn.ModuleList(Mlp(16, 32) for _ in range(2))
        self.spare = nn.Linear(16, 16)

    def forward(self, x, image=None):
        if image is not None:
            x = x + self.image(image)
        for layer in self.layers:
            x = layer(x)
        return x if image is None else self.spare(x)


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x):
        y = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(x + self.norm2(self.conv2(y)))


def residual() -> nn.Module:
    """Blocks that keep statistics."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.Sequential(*(Residual(16) for _ in range(3))),
        nn.Flatten(),
        nn.Linear(4096, 4),
    )


class Stage(nn.Module):
    """A list of blocks of its own, and what leads to the next stage."""

    def __init__(self, width: int, *, last: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mlp(width, 4 * width) for _ in range(2))
        self.grow = nn.Identity() if last else nn.Linear(width, 2 * width)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.grow(x)


class Stages(nn.Module):
    """Its output is a tuple with the loss in it."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.Sequential(Stage(16, last=False), Stage(32, last=True))
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        logits = self.head(self.stages(x))
        return logits, logits.float().square().mean()


def convolutions() -> nn.Module:
    """Plain, depthwise, grouped and transposed convolutions, one after another, without blocks."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1, groups=16),
        nn.Conv2d(16, 32, 3, stride=2, padding=1, groups=2),
        nn.ReLU(),
        nn.ConvTranspose2d(32, 16, 2, stride=2),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 64, 10),
    )


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.0), 3)


IMAGES, LABELS = CapturedInput(shape=(4, 3, 16, 16)), CapturedInput(shape=(4,), dtype="int64")


class LowRank(nn.Module):
    """A frozen product with a trained one of low rank beside it (LoRA, arXiv:2106.09685)."""

    def __init__(self, width: int, rank: int = 4) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class AdaptedBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width).requires_grad_(False)
        self.first, self.second = LowRank(width), LowRank(width)

    def forward(self, x):
        return x + self.second(functional.gelu(self.first(self.norm(x))))


class Adapted(nn.Module):
    """Only the adapters are trained; embedding and head are one frozen weight."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(60, width).requires_grad_(False)
        self.blocks = nn.ModuleList(AdaptedBlock(width) for _ in range(3))
        self.head = nn.Linear(width, 60, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Frozen(collections.OrderedDict):
    """A dictionary that refuses writes once it is made, as that of a configuration of ``diffusers``."""

    made = False

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.made = True

    def refuse(self, *_args, **_kwargs):
        raise TypeError("frozen")

    def __setitem__(self, name, value):
        if self.made:
            self.refuse()
        super().__setitem__(name, value)

    clear = update = pop = setdefault = refuse


class Timed(nn.Module):
    """One activation in several places, a frozen configuration, and a layer that reads its weights from a list."""

    activation = nn.SiLU()

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.config = Frozen(width=width, blocks=2)
        self.first, self.activation, self.second = (
            nn.Linear(16, 4 * width),
            Timed.activation,
            nn.Linear(4 * width, width),
        )
        self.rnn = nn.GRU(width, width)
        self.blocks = nn.ModuleList(
            nn.ModuleList([nn.Linear(width, 3 * width), Timed.activation, nn.Linear(3 * width, width)]) for _ in "ab"
        )
        self.last = nn.Linear(width, 2)

    def forward(self, x):
        x = self.activation(self.second(self.activation(self.first(x))))
        x = self.rnn(x)[0]
        for up, activation, down in self.blocks:
            x = x + down(activation(up(x)))
        return self.last(self.activation(x)).square().mean()


class Layer(nn.Module):
    """A layer that scales what the layers inside it make, and keeps a penalty for the model."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gamma = nn.Parameter(torch.full((width,), 0.5))

    def forward(self, x):
        y = self.down(functional.gelu(self.up(self.norm(self.conv(x))))) * self.gamma
        self.penalty = torch.tanh(y @ self.conv.weight)
        return x + y


class Scaled(nn.Module):
    """Weights that are read between calls of other modules: of the model, a list, one layer, another module."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.layer, self.middle = nn.Linear(width, width), Layer(width), nn.Linear(width, 2 * width)
        self.scales, self.shift = nn.ParameterList([torch.ones(2 * width)]), nn.Parameter(torch.zeros(width))
        self.back, self.last = nn.Linear(2 * width, width), nn.Linear(width, width)

    def forward(self, x):
        x = self.middle(self.layer(self.first(x))) * self.scales[0]
        x = self.last(functional.silu(self.back(x) + self.shift))
        return x.square().mean() + self.layer.penalty.square().mean()


OWN = {
    "scaled": (Scaled, (CapturedInput(shape=(4, 6, 16)),)),
    "timed": (Timed, (CapturedInput(shape=(4, 3, 16)),)),
    "adapted": (Adapted, (CapturedInput(shape=(4, 12), dtype="int64"),)),
    "mixer": (Mixer, (IMAGES, LABELS)),
    "vit": (Vit, (IMAGES, CapturedInput(name="labels", shape=(4,), dtype="int64"))),
    "tied": (Tied, (CapturedInput(shape=(4, 12), dtype="int64"),)),
    "tied_by_the_head": (TiedByTheHead, (CapturedInput(shape=(4, 12), dtype="int64"),)),
    "translator": (Translator, (CapturedInput(shape=(4, 12), dtype="int64"),)),
    "repeated": (Repeated, (CapturedInput(shape=(4, 16)),)),
    "unused": (Unused, (CapturedInput(shape=(4, 5, 16)),)),
    "residual": (residual, (IMAGES,)),
    "stages": (Stages, (CapturedInput(shape=(4, 64, 16)),)),
    "convolutions": (convolutions, (CapturedInput(shape=(2, 3, 16, 16)),)),
    "encoder": (encoder, (CapturedInput(shape=(4, 24, 64)),)),
}
NUM_VALUES = {"adapted": 60, "mixer": 10, "vit": 10, "tied": 60, "tied_by_the_head": 60, "translator": 60}


def batch(name: str, dtype: torch.dtype, seed: int = 0) -> tuple[list, dict]:
    """Return positional and named inputs of a module."""
    generator = torch.Generator().manual_seed(seed)
    args, kwargs = [], {}
    for spec in OWN[name][1]:
        if spec.dtype == "float":
            tensor = torch.randn(spec.shape, generator=generator).to(dtype)
        else:
            tensor = torch.randint(NUM_VALUES[name], spec.shape, generator=generator)
        if spec.name:
            kwargs[spec.name] = tensor
        else:
            args.append(tensor)
    if name == "unused" and seed % 2:
        kwargs["image"] = args[0].flip(0)
    return args, kwargs
